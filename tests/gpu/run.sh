#!/usr/bin/env bash
# Everything that needs a CUDA device, in under ten minutes: equality without synchronisation, then the table of ratios.
set -euo pipefail
cd "$(dirname "$0")/../.."
timeout 400 python -m pytest -q -m gpu tests/gpu
timeout 180 python -m rollout bench --device cuda --sizes mid --batches 64 --repeats 2 --peers ''

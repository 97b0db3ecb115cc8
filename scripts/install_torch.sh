#!/bin/sh
# Install torch ahead of everything else: its CPU build unless an NVIDIA GPU is there, so that nobody downloads
# gigabytes of CUDA for nothing. pip cannot choose between the builds; uv can (--torch-backend). Where uv cannot
# reach the CPU builds, pip takes what its own configuration offers.
#   sh scripts/install_torch.sh VENV/bin torch==2.13.0
set -eu
bin=$1
requirement=$2
if "$bin/python" -c "import torch" 2>/dev/null; then
    exit 0
fi
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then
    "$bin/pip" install --quiet "$requirement"
    exit 0
fi
"$bin/pip" install --quiet uv
if ! UV_HTTP_RETRIES=0 "$bin/uv" pip install --quiet --python "$bin/python" --torch-backend cpu "$requirement" 2>/dev/null; then
    "$bin/pip" install --quiet "$requirement"
fi

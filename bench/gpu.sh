#!/bin/sh
# All that there is to know on a GPU, in under 8 minutes: the tests, then the table.
# Needs a Python with this project's dependencies and a CUDA build of torch: PYTHON=... bench/gpu.sh
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
export HF_HUB_OFFLINE=1
exec timeout 470 "$PYTHON" -m bench.gpu "$@"

#!/usr/bin/env bash
# Runs MXNet's CUDA build on the null GPU: CUDA libraries that record every call and compute nothing. No GPU is needed.
#
#   bash scripts/nullgpu.sh                          # sets up (once; two minutes, 2 GB), then pytest tests/nullgpu
#   bash scripts/nullgpu.sh tests/nullgpu -k lstm    # arguments go to pytest
#   bash scripts/nullgpu.sh python SCRIPT ...        # any other program on the null GPU
#
#   MXMP_NULLGPU  where the environment lives (default: ~/.cache/mxmp-nullgpu); several checkouts may share it
#   MXMP_PYTHON   the Python 3.8-3.11 to use (default: the newest one found)
#   NG_DEVICES    how many GPUs there are (default: 1);  NG_CC  their compute capability (default: 70, a V100's)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/stubs.sh
stub_setup
stub_run tests/nullgpu "$@"

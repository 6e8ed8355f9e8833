#!/usr/bin/env bash
# Runs MXNet's CUDA build on the simulated GPU: the machine code of its kernels, translated for a CPU. No GPU is needed.
#
#   bash scripts/simgpu.sh                           # sets up (once; three minutes, 3 GB), then pytest tests/simgpu
#   bash scripts/simgpu.sh tests/simgpu -k master    # arguments go to pytest
#   bash scripts/simgpu.sh python SCRIPT ...         # any other program on the simulated GPU
#
#   MXMP_SIMGPU_HOME  where MXNet's kernels and the translated ones live (default: ~/.cache/mxmp-simgpu)
#   SIMGPU_TRACE      1 prints the name of every kernel that is launched
#   SIMGPU_SHUFFLE    a number: the blocks of each launch run in an order drawn by it, not in the grid's
#   MXMP_NULLGPU, MXMP_PYTHON, NG_DEVICES: as for scripts/nullgpu.sh, with which it shares an environment
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/stubs.sh
stub_setup

export MXMP_SIMGPU_HOME="${MXMP_SIMGPU_HOME:-$HOME/.cache/mxmp-simgpu}"
site="$(echo "$stub_venv"/lib/python3.*/site-packages)"
export SIMGPU_PYTHON="$stub_venv/bin/python" SIMGPU_PTXAS="$site/nvidia/cuda_nvcc/bin/ptxas"
export SIMGPU_NVDISASM="$site/nvidia/cu13/bin/nvdisasm" NG_COMPUTES=1 NG_CC=80
mkdir -p "$MXMP_SIMGPU_HOME/cache"
exec 9>"$MXMP_SIMGPU_HOME/lock"
flock 9
if ! [ -e "$MXMP_SIMGPU_HOME/index.sqlite" ]; then
    echo "==> taking the kernels out of libmxnet.so (once; a minute, 600 MB)"
    rm -rf "$MXMP_SIMGPU_HOME/cubin.part"
    mkdir "$MXMP_SIMGPU_HOME/cubin.part"
    (cd "$MXMP_SIMGPU_HOME/cubin.part" && PATH="$site/nvidia/cu13/bin:$PATH" \
        cuobjdump -arch sm_80 -xelf all "$site/mxnet/libmxnet.so" >/dev/null) ||
        mxmp_fail "cuobjdump could not read libmxnet.so (output above)."
    rm -rf "$MXMP_SIMGPU_HOME/cubin"
    mv "$MXMP_SIMGPU_HOME/cubin.part" "$MXMP_SIMGPU_HOME/cubin"
    python -m gpu.sim.cubin
fi
exec 9>&-
SIMGPU_TRANSLATOR="$(python -m gpu.sim.kernel)"
export SIMGPU_TRANSLATOR
stub_run tests/simgpu "$@"

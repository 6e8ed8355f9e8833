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
. scripts/setup.sh

home="${MXMP_NULLGPU:-$HOME/.cache/mxmp-nullgpu}"
requirements=tests/nullgpu/requirements.txt
venv="$home/environment"
stamp="$venv/.mxmp-$(sha256sum <"$requirements" | cut -c1-16)"

mxmp_check_machine
for tool in gcc nm readelf; do
    command -v "$tool" >/dev/null || mxmp_fail "$tool, which builds the null GPU, is missing (apt-get install gcc)."
done
mkdir -p "$home"
exec 9>"$home/lock"
flock 9  # another checkout may be at it
if ! { [ -e "$stamp" ] && mxmp_python_fits "$venv/bin/python"; }; then
    mxmp_make_venv "$venv"
    echo "==> installing MXNet's CUDA build and what the tests need (once; about two minutes)"
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    PYTHONWARNINGS=ignore "$venv/bin/python" -m pip install --quiet -r "$requirements" ||
        mxmp_fail "pip could not install $requirements (output above)."
    touch "$stamp"
fi
exec 9>&-
. "$venv/bin/activate"
mxmp_cuda_path "$venv"
python tests/nullgpu/stub/build.py build/nullgpu
export LD_LIBRARY_PATH="$PWD/build/nullgpu:$LD_LIBRARY_PATH"
export PYTHONPATH="$PWD:$PWD/scripts:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 MXNET_CUDNN_AUTOTUNE_DEFAULT=0

if [ "${1:-}" = python ]; then exec "$@"; fi
if [ $# -eq 0 ]; then set -- tests/nullgpu; fi
# With this engine MXNet does one thing after the other and frees arrays at once, so every run records the same. With
# MXNet's own choice (ThreadedEnginePerDevice), loops whose operators are fused may crash: see docs/troubleshooting.md.
export MXNET_ENGINE_TYPE="${MXNET_ENGINE_TYPE:-NaiveEngine}"
exec python -m pytest -p no:faulthandler -n "${MXMP_JOBS:-2}" -q "$@"

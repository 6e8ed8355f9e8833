# shellcheck shell=bash
# Sourced by nullgpu.sh and simgpu.sh: MXNet's CUDA build on stubs of the CUDA libraries, one library for both GPUs.
. scripts/setup.sh

stub_home="${MXMP_NULLGPU:-$HOME/.cache/mxmp-nullgpu}"
stub_venv="$stub_home/environment"

# Makes (once) and activates the environment, builds the stubs of this checkout, and lets libmxnet.so find them.
stub_setup() {
    local requirements=scripts/gpu/null/requirements.txt stamp tool
    stamp="$stub_venv/.mxmp-$(sha256sum <"$requirements" | cut -c1-16)"
    mxmp_check_machine
    for tool in gcc nm readelf; do
        command -v "$tool" >/dev/null || mxmp_fail "$tool, which builds the stubs, is missing (apt-get install gcc)."
    done
    mkdir -p "$stub_home"
    exec 9>"$stub_home/lock"
    flock 9  # another checkout may be at it
    if ! { [ -e "$stamp" ] && mxmp_python_fits "$stub_venv/bin/python"; }; then
        mxmp_make_venv "$stub_venv"
        echo "==> installing MXNet's CUDA build and what the tests need (once; about two minutes)"
        export PIP_DISABLE_PIP_VERSION_CHECK=1
        PYTHONWARNINGS=ignore "$stub_venv/bin/python" -m pip install --quiet -r "$requirements" ||
            mxmp_fail "pip could not install $requirements (output above)."
        touch "$stamp"
    fi
    exec 9>&-
    # shellcheck disable=SC1091
    . "$stub_venv/bin/activate"
    mxmp_cuda_path "$stub_venv"
    python scripts/gpu/null/stub/build.py build/nullgpu
    export LD_LIBRARY_PATH="$PWD/build/nullgpu:$LD_LIBRARY_PATH"
    export PYTHONPATH="$PWD:$PWD/scripts:$PWD/scripts/lab${PYTHONPATH:+:$PYTHONPATH}"
    export PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 MXNET_CUDNN_AUTOTUNE_DEFAULT=0
}

# stub_run FOLDER ARGUMENT ...: a Python program, or pytest with the arguments; with none, on the folder.
stub_run() {
    local folder="$1"
    shift
    if [ "${1:-}" = python ]; then exec "$@"; fi
    if [ $# -eq 0 ]; then set -- "$folder"; fi
    # With this engine MXNet does one thing after the other and frees arrays at once, so every run is the same. With
    # MXNet's own choice (ThreadedEnginePerDevice), loops whose operators are fused may crash: see
    # docs/troubleshooting.md.
    export MXNET_ENGINE_TYPE="${MXNET_ENGINE_TYPE:-NaiveEngine}"
    exec python -m pytest -p no:faulthandler -n "${MXMP_JOBS:-2}" -q "$@"
}

#!/usr/bin/env bash
# Runs the tests against the mxnet-cu112 wheel, on the CPU of a machine without a GPU. Arguments go to pytest.
#
# The wheel's library wants libcuda.so.1, which comes with NVIDIA's driver. A stub stands in for it: the ten
# driver functions that MXNet 1.9.1 binds, each of which answers "no CUDA device". Downloads about 2 GB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup.sh

if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    mxmp_fail "this machine has an NVIDIA driver; run the tests on it: MXMP_BUILD=cu112 bash scripts/test.sh"
fi
command -v gcc >/dev/null || mxmp_fail "gcc, which builds the stub of libcuda.so.1, is missing (apt-get install gcc)."

stub="$mxmp_root/build/libcuda-stub"
mkdir -p "$stub"
gcc -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$stub/libcuda.so.1" -x c - <<'C'
enum { CUDA_ERROR_NO_DEVICE = 100 };
#define STUB(name) int name(void) { return CUDA_ERROR_NO_DEVICE; }
STUB(cuDeviceGet)
STUB(cuDevicePrimaryCtxRetain)
STUB(cuGraphKernelNodeGetParams)
STUB(cuGraphNodeGetType)
STUB(cuLaunchKernel)
STUB(cuModuleGetFunction)
STUB(cuModuleLoadData)
STUB(cuModuleLoadDataEx)
STUB(cuModuleUnload)
int cuGetErrorString(int error, const char **text) {
    (void)error;
    *text = "stub of libcuda.so.1: no CUDA device";
    return 0;
}
C
export LD_LIBRARY_PATH="$stub${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"

export MXMP_BUILD=cu112 MXMP_VENV="${MXMP_VENV:-$mxmp_root/.venv-cu112}"
mxmp_setup
python -W ignore - <<'PY'
import mxnet as mx

assert mx.runtime.Features().is_enabled("CUDA"), "this is not the CUDA build"
print(f"==> mxnet {mx.__version__} built with CUDA; {mx.context.num_gpus()} GPUs")
PY
exec pytest "$@"

#!/usr/bin/env bash
# Builds Horovod in an environment of its own (.venv-horovod) and runs the tests that need it: two workers, an
# overflow on one. Arguments go to pytest.
#
# Horovod has no wheel. It needs g++ (apt-get install g++) and three minutes, once. MAKEFLAGS=-j1 builds with one core.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup.sh

command -v g++ >/dev/null || mxmp_fail "g++, which builds Horovod, is missing (apt-get install g++)."
export MXMP_VENV="${MXMP_VENV:-$mxmp_root/.venv-horovod}"
mxmp_setup
if ! python -W ignore -c 'import horovod.mxnet' >/dev/null 2>&1; then
    echo "==> building Horovod with MXNet and Gloo (once; three minutes)"
    log="$MXMP_VENV/horovod-build.log"
    python -m pip install --quiet 'cmake>=3.18' 'setuptools<70' wheel pyyaml cffi cloudpickle psutil packaging ||
        mxmp_fail "pip could not install what Horovod is built with (output above)."
    # Its Gloo asks for an older CMake than version 4 admits.
    HOROVOD_WITH_MXNET=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_PYTORCH=1 \
        HOROVOD_WITHOUT_TENSORFLOW=1 CMAKE_POLICY_VERSION_MINIMUM=3.5 MAKEFLAGS="${MAKEFLAGS:--j$(nproc)}" \
        python -m pip install --verbose --no-build-isolation horovod==0.28.1 >"$log" 2>&1 ||
        { tail -n 40 "$log" >&2; mxmp_fail "Horovod could not be built; all of the output is in $log."; }
fi
python -W ignore -c 'import horovod, horovod.mxnet, mxnet; print(f"==> horovod {horovod.__version__}, mxnet {mxnet.__version__}")'
export PYTHONPATH="$mxmp_root${PYTHONPATH:+:$PYTHONPATH}"
if [ $# -eq 0 ]; then
    set -- tests/features/test_distributed.py tests/features/test_distributed_modules.py tests/step/test_stores.py
fi
exec python -m pytest "$@"

#!/usr/bin/env bash
# Sets up .venv and runs the linters, the types, the manual's site, every test, and those on the null and simulated GPU.
# Arguments go to pytest: -m quick, or -n 0 for one process; with some, these two are left out.
#
#   bash scripts/test.sh --mxnet 1.7.0         # on another version of MXNet: every test that it can run, and no more
#   bash scripts/test.sh --mxnet 1.8.0 --core  # its core, what trains and what is saved: about a minute
#   bash scripts/test.sh --mxnet 1.8.0 --shown # what users are shown: README, tutorials, ImageNet examples, the demo
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup.sh
if [ "${1:-}" = --mxnet ]; then
    MXMP_MXNET="${2:?a version, as in --mxnet 1.7.0}"
    shift 2
    case "${1:-}" in
        --core)
            shift
            set -- -m quick tests/host/test_versions.py tests/step/test_scaler.py tests/gluon/test_convert.py \
                tests/symbolic/test_module.py "$@"
            ;;
        --shown)
            shift
            page="tests/docs/test_docs.py::test_python_of_the_page_runs"
            set -- "$page[README.md]" "$page[docs/tutorial-gluon.md]" "$page[docs/tutorial-symbolic.md]" \
                tests/examples/test_imagenet_gluon.py tests/examples/test_imagenet_symbolic.py \
                tests/scripts/test_demo.py "$@"
            ;;
    esac
    mxmp_setup
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    exec python -m pytest -p no:cacheprovider -n 2 --dist worksteal --timeout 1200 --timeout-method thread \
        --hypothesis-profile=ci "$@"
fi
mxmp_setup

failed=()
check() {
    echo "==> $*"
    "$@" || failed+=("$*")
}
check ruff check .
check ruff format --check .
check mypy
check bash scripts/docs.sh
# Two processes of one thread each, which take tests from each other at the end.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Drawn examples are the same in every run. A test that hangs ends after 20 minutes, with its name and each thread's stack.
check pytest -n 2 --dist worksteal --timeout 1200 --timeout-method thread --hypothesis-profile=ci "$@"
if [ $# -eq 0 ]; then
    check bash scripts/nullgpu.sh
    check bash scripts/simgpu.sh
fi
if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi

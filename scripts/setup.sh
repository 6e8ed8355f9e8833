# shellcheck shell=bash
# Sourced by demo.sh, docs.sh and test.sh: makes (once) and activates the virtual environment .venv.
#
#   MXMP_PYTHON  the Python 3.8-3.11 to use (default: the newest one found)
#   MXMP_BUILD   which MXNet: cpu (default) or cu112
#   MXMP_MXNET   which version of MXNet (default: 1.9.1)
#   MXMP_VENV    where the environment lives (default: .venv; of another version ~/.cache/mxmp-versions/VERSION, which
#                several checkouts may share)

mxmp_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

mxmp_fail() {
    printf 'error: %s\n' "$@" >&2
    exit 1
}

mxmp_python_fits() {
    "$1" -c 'import sys; sys.exit(not (3, 8) <= sys.version_info[:2] < (3, 12))' >/dev/null 2>&1
}

# Prints a Python of a version, as 3.11, that runs: on PATH, then pyenv's, then /opt and conda's.
mxmp_find_version() {
    local candidate
    for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python \
        "/opt/python/$1"*/bin/python "/usr/local/bin/python$1"; do
        if mxmp_python_fits "$candidate"; then command -v "$candidate"; return; fi
    done
    return 1
}

# Prints a Python 3.8-3.11 that runs, newest first.
mxmp_find_python() {
    local candidate version
    for version in 3.11 3.10 3.9 3.8; do
        if mxmp_find_version "$version"; then return; fi
    done
    for candidate in python3 python; do
        if mxmp_python_fits "$candidate"; then command -v "$candidate"; return; fi
    done
    return 1
}

mxmp_check_machine() {
    if [ "$(uname -s)-$(uname -m)" != Linux-x86_64 ]; then
        mxmp_fail "MXNet 1.9.1 has wheels for Linux on x86_64; this is $(uname -s) on $(uname -m)."
    fi
}

mxmp_make_venv() {
    local python="${MXMP_PYTHON:-}" venv="$1"
    if [ -z "$python" ]; then
        python="$(mxmp_find_python)" || mxmp_fail \
            "MXNet 1.9.1 needs Python 3.8, 3.9, 3.10 or 3.11, and none was found." \
            "Install one (Debian/Ubuntu: apt-get install python3 python3-venv; or: pyenv install 3.11)," \
            "or name it: MXMP_PYTHON=/path/to/python3.11 bash $0"
    fi
    mxmp_python_fits "$python" || mxmp_fail "MXMP_PYTHON=$python is not a Python 3.8, 3.9, 3.10 or 3.11 that runs."
    if [ -e "$venv" ] && [ ! -e "$venv/.mxmp" ]; then
        mxmp_fail "$venv exists and this script did not make it; remove it or set MXMP_VENV to another place."
    fi
    echo "==> $("$python" -V) ($python) -> ${venv#"$mxmp_root"/}"
    "$python" -m venv --clear "$venv" || mxmp_fail \
        "$python cannot make a virtual environment (Debian/Ubuntu: apt-get install python3-venv)."
    touch "$venv/.mxmp"
}

# The CUDA wheels keep their libraries where the loader does not look.
mxmp_cuda_path() {
    local dir
    for dir in "$1"/lib/python*/site-packages/nvidia/*/lib; do
        [ -d "$dir" ] && LD_LIBRARY_PATH="$dir${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    done
    export LD_LIBRARY_PATH
}

mxmp_check_import() {
    local output
    if ! output="$(python -W ignore -c 'import mxnet, cv2, gluoncv, gluonnlp, mxmp' 2>&1)"; then
        printf '%s\n' "$output" >&2
        mxmp_fail "the packages are installed but do not import (last line above)." \
            "A missing lib*.so comes from the system (Debian/Ubuntu: apt-get install libgl1 libglib2.0-0 libgomp1)."
    fi
}

mxmp_setup() {
    local extra="${MXMP_BUILD:-cpu}" mxnet="${MXMP_MXNET:-1.9.1}" venv="$mxmp_root/.venv" build package stamp
    case "$extra" in
        cpu) package=mxnet ;;
        cu112) package=mxnet-cu112 ;;
        *) mxmp_fail "MXMP_BUILD=$extra; allowed: cpu, cu112." ;;
    esac
    build="$extra"
    case "$mxnet" in
        1.9.1) ;;
        1.7.0 | 1.8.0 | 1.9.0)
            venv="$HOME/.cache/mxmp-versions/$mxnet"
            build="$extra-$mxnet"
            mkdir -p "${venv%/*}"
            export PYTHONPATH="$mxmp_root${PYTHONPATH:+:$PYTHONPATH}"
            ;;
        *) mxmp_fail "MXNet $mxnet; allowed: 1.7.0, 1.8.0, 1.9.0, 1.9.1." ;;
    esac
    venv="${MXMP_VENV:-$venv}"
    mxmp_check_machine
    stamp="$venv/.mxmp-$(cat "$mxmp_root/setup.cfg" "$mxmp_root/pyproject.toml" | sha256sum | cut -c1-16)-$build"
    if [ -e "$stamp" ] && mxmp_python_fits "$venv/bin/python"; then
        # shellcheck disable=SC1091
        . "$venv/bin/activate"
        if [ "$extra" = cu112 ]; then mxmp_cuda_path "$venv"; fi
        return
    fi
    if ! { [ -e "$venv/.mxmp" ] && mxmp_python_fits "$venv/bin/python"; }; then
        mxmp_make_venv "$venv"
    fi
    # shellcheck disable=SC1091
    . "$venv/bin/activate"
    echo "==> installing MXNet $mxnet ($extra), GluonCV and the tools (once; about a minute)"
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    python -m pip install --quiet --upgrade pip || mxmp_fail "pip could not reach a package index (output above)."
    PYTHONWARNINGS=ignore python -m pip install --quiet "$package==$mxnet.*" \
        --editable "$mxmp_root[$extra,vision,nlp,tune,plots,docs,dev]" ||
        mxmp_fail "pip could not install the packages (output above)."
    if [ "$extra" = cu112 ]; then mxmp_cuda_path "$venv"; fi
    mxmp_check_import
    touch "$stamp"
}

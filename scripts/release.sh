#!/usr/bin/env bash
# The checklist of a release: a clean tree, one version, a dated CHANGELOG, a wheel and an sdist in dist/ that install
# with [cpu] into empty environments of the oldest and the newest Python, and run README's Python there. At the end it
# prints how to tag and publish.
#
#   bash scripts/release.sh         # everything; first, bash scripts/test.sh
#   bash scripts/release.sh --try   # what CI runs: any tree, an undated CHANGELOG, and dist/ stays as it is
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup.sh
case "${*:-}" in '' | --try) ;; *) mxmp_fail "release.sh takes --try or nothing, not: $*" ;; esac
trial="${1:-}"
mxmp_setup

version="$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' mxmp/__init__.py)"
[[ "$version" =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || mxmp_fail "mxmp/__init__.py: __version__ is '$version', not N.N.N."
heading="$(grep -m 1 '^## ' CHANGELOG.md)"
date="${heading#"## $version "}"
[ "$date" != "$heading" ] || mxmp_fail "CHANGELOG.md begins with '$heading', and mxmp/__init__.py says $version."
if [ -z "$trial" ]; then
    [ -z "$(git status --porcelain)" ] || mxmp_fail "the tree has changes; commit them first: git status"
    [[ "$date" =~ ^\([0-9]{4}-[0-9]{2}-[0-9]{2}\)$ ]] || mxmp_fail "CHANGELOG.md: date the release, '## $version (YYYY-MM-DD)'."
    if git rev-parse -q --verify "refs/tags/v$version" >/dev/null; then
        mxmp_fail "v$version is tagged already; raise __version__."
    fi
fi

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
echo "==> building $version"
python -m build --outdir "$work/dist" . >"$work/build.log" 2>&1 || {
    tail -n 30 "$work/build.log" >&2
    mxmp_fail "python -m build failed (output above)."
}
for each in 3.8 3.11; do
    if ! python="$(mxmp_find_version "$each")"; then
        echo "==> Python $each is not here, and was not tried"
        continue
    fi
    "$python" -m venv --clear "$work/venv"
    for file in "$work/dist/mxmp-$version-py3-none-any.whl" "$work/dist/mxmp-$version.tar.gz"; do
        [ -e "$file" ] || mxmp_fail "the build made $(ls "$work/dist"), not $(basename "$file")."
        echo "==> installing $(basename "$file")[cpu] into an empty environment of Python $each"
        # The second replaces the first and meets the packages that it has brought.
        "$work/venv/bin/python" -m pip uninstall --quiet --yes --disable-pip-version-check mxmp 2>/dev/null
        "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$file[cpu]"
        # From an empty folder, so that nothing is imported from the clone.
        (mkdir "$work/run" && cd "$work/run" && "$work/venv/bin/python" -W ignore - "$mxmp_root/README.md" "$version") \
            <scripts/checks/installed.py
        rm -rf "$work/run"
        tried=yes
    done
done
[ -n "${tried:-}" ] || mxmp_fail "neither Python 3.8 nor 3.11 is here: nothing was tried."

if [ -n "$trial" ]; then exit; fi
rm -rf dist
mv "$work/dist" dist
cat <<TEXT
==> dist/ holds mxmp $version. To publish it, after bash scripts/test.sh has passed on this commit:
    git tag -a v$version -m "mxmp $version"
    git push origin v$version
    python -m pip install twine && python -m twine upload dist/*
Then raise __version__ and begin a section '(unreleased)' in CHANGELOG.md.
TEXT

#!/usr/bin/env bash
# Builds the manual as a site, docs/_build/html/index.html. Warnings are errors. Arguments go to sphinx-build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup.sh
mxmp_setup
# -E: a page that was not read again would not be warned of again.
python -W ignore -m sphinx -E -W --keep-going -q -d docs/_build/doctrees "$@" docs docs/_build/html
python -W ignore scripts/dev.py check site
echo "==> docs/_build/html/index.html"

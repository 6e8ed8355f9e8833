#!/usr/bin/env bash
# Trains one GluonCV network in float32, float16 and bfloat16 and compares them. Arguments go to demo.py: --whole trains
# for ten epochs, not three.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup.sh
mxmp_setup
exec python scripts/dev.py demo "$@"

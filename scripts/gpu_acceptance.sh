#!/usr/bin/env bash
# For the first person with a GPU: what mxmp does on it, in ten minutes and one file to send.
#
#   bash scripts/gpu_acceptance.sh           # a V100, T4 or A100; sets up .venv-gpu with mxnet-cu112 (2 GB, once)
#   bash scripts/gpu_acceptance.sh --quick   # small batches, one network: about two minutes
#
# It runs the tests that need a GPU, records the GPU's products and holds the CPU's emulation of float16 to them, and
# measures step time and peak memory beside FP32 and mxnet.contrib.amp, and times layouts and fusion alone. The results
# are in gpu-acceptance.json. To hold its times against the model of docs/gpu-graphs.md, in the environment that it made:
#
#   python scripts/dev.py check gpu-model gpu-acceptance.json
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup.sh
export MXMP_BUILD=cu112 MXMP_VENV="${MXMP_VENV:-$mxmp_root/.venv-gpu}"
mxmp_setup
exec python scripts/dev.py check gpu-acceptance "$@"

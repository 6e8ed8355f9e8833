"""Looks at the graphs that a GPU would run, without one: native float16, types infer, nothing emulated.

    python scripts/check_gpu_graph.py                    # seven GluonCV networks
    python scripts/check_gpu_graph.py resnet152_v1b

Exits with 1 where a matrix operator would not read and write float16.
"""

from __future__ import annotations

import json
import sys
import warnings

import mxnet as mx
import numpy as np

import mxmp
from mxmp.precision.rules import RULES, Kind

NETWORKS = [
    "resnet18_v1b",
    "mobilenetv2_1.0",
    "vgg11_bn",
    "densenet121",
    "squeezenet1.1",
    "resnext50_32x4d",
    "inceptionv3",
]


def dtypes(symbol: mx.sym.Symbol) -> dict[str, str]:
    """The dtype of every tensor of a graph that is fed FP32 data."""
    internals = symbol.get_internals()
    _, found, _ = internals.infer_type(data=np.float32)
    return {name: np.dtype(dtype).name for name, dtype in zip(internals.list_outputs(), found)}


def check(symbol: mx.sym.Symbol) -> dict[str, int]:
    """Matrix operators, those that read and write float16 only, casts, and casts back to back."""
    low = mxmp.cast_symbol(symbol, "float16", ctx=mx.gpu())
    nodes = json.loads(low.tojson(remove_amp_cast=False))["nodes"]
    known = dtypes(low)

    def dtype(node: dict) -> str:
        return known[node["name"]] if node["op"] == "null" else known[f"{node['name']}_output"]

    matrix = [n for n in nodes if n["op"] in RULES and RULES[n["op"]].kind is Kind.LOW]
    native = [n for n in matrix if {dtype(n), *(dtype(nodes[i]) for i, *_ in n["inputs"])} == {"float16"}]
    casts = [n for n in nodes if n["op"] == "Cast"]
    emulated = [n for n in casts if nodes[n["inputs"][0][0]]["op"] == "Cast"]
    return {"matrix": len(matrix), "native": len(native), "casts": len(casts), "emulated": len(emulated)}


def main() -> int:
    warnings.simplefilter("ignore")
    from gluoncv.model_zoo import get_model

    wrong = 0
    print(f"{'network':<20}{'matrix operators':>18}{'in float16':>12}{'casts':>8}{'emulated':>10}")
    for name in sys.argv[1:] or NETWORKS:
        found = check(get_model(name)(mx.sym.var("data")))
        wrong += found["native"] != found["matrix"] or found["emulated"] > 0
        print(f"{name:<20}{found['matrix']:>18}{found['native']:>12}{found['casts']:>8}{found['emulated']:>10}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

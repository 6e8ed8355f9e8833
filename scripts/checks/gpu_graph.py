"""Check the graphs that a GPU would run, without one: native float16, types infer, nothing emulated.

Ends with 1 where a matrix operator would not read and write float16.
"""

from __future__ import annotations

import json

import mxnet as mx
import numpy as np
from support.options import parse
from support.pages import table

import mxmp
from mxmp.precision.rules import RULES, Kind

NETWORKS = ["resnet18_v1b", "mobilenetv2_1.0", "vgg11_bn", "densenet121", "squeezenet1.1"]
NETWORKS += ["resnext50_32x4d", "inceptionv3"]


def dtypes(symbol: mx.sym.Symbol) -> dict[str, str]:
    """Return the dtype of every tensor of a graph that is fed FP32 data."""
    internals = symbol.get_internals()
    _, found, _ = internals.infer_type(data=np.float32)
    return {name: np.dtype(dtype).name for name, dtype in zip(internals.list_outputs(), found)}


def check(symbol: mx.sym.Symbol) -> dict[str, int]:
    """Count matrix operators, those that read and write float16 only, casts, and casts back to back."""
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


def main(arguments: list[str] | None = None) -> int:
    args = parse(__doc__, arguments, "networks", networks=(NETWORKS, "of GluonCV (default: seven)"))
    from gluoncv.model_zoo import get_model

    found = {name: check(get_model(name)(mx.sym.var("data"))) for name in args.networks}
    head = "network | matrix operators | in float16 | casts | emulated"
    print(table(head, ([name, *counts.values()] for name, counts in found.items())))
    return int(any(each["native"] != each["matrix"] or each["emulated"] for each in found.values()))

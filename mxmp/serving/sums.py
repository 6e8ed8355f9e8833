"""FullyConnected with float16 sums, emulated on a CPU: what ``MXNET_FC_TRUE_FP16=1`` makes MXNet request from cuBLAS.

Convolutions have FP32 sums even then (src/operator/nn/cudnn/cudnn_convolution-inl.h).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mxnet as mx
import numpy as np

from ..precision.graph import Graph
from ..precision.missing_kernels import is_true

_NAME = "mxmp_float16_sums"
# A Tensor Core of a V100 adds the exact products of four elements to a float16 number and rounds. Later GPUs add more
# products at a time, and round less often.
_PRODUCTS = 4


def with_float16_sums(graph: Graph, names: set[str]) -> None:
    """Let these FullyConnected of an emulation sum in float16, in place; ``register`` comes before it is loaded."""
    for node in graph.nodes():
        if node.op == "FullyConnected" and node.name in names:
            node.op = "Custom"
            flatten = node.attrs.get("flatten", "True")
            node.attrs = {"op_type": _NAME, "flatten": flatten, "num_inputs": str(len(node.inputs))}


@lru_cache(maxsize=None)
def register() -> None:
    """Make MXNet know the operator of ``with_float16_sums`` in this process."""
    mx.operator.register(_NAME)(_Property)


class _Sums(mx.operator.CustomOp):
    """Computes FullyConnected, forward only, with sums rounded to float16 as a V100 does."""

    def __init__(self, flatten: bool) -> None:
        super().__init__()
        self._flatten = flatten

    def forward(self, is_train: bool, req: list, in_data: list, out_data: list, aux: list) -> None:
        data, weight, *bias = (array.asnumpy() for array in in_data)
        rows = data.reshape(len(data) if self._flatten else -1, weight.shape[1])
        total = np.zeros((len(rows), len(weight)), "float16")
        with np.errstate(over="ignore", invalid="ignore"):
            for first in range(0, weight.shape[1], _PRODUCTS):
                part = slice(first, first + _PRODUCTS)
                total = (total + rows[:, part] @ weight[:, part].T).astype("float16")
            result = (total + bias[0]).astype("float16") if bias else total
        self.assign(out_data[0], req[0], mx.nd.array(result.reshape(out_data[0].shape), dtype="float32"))


class _Property(mx.operator.CustomOpProp):
    """Describes ``_Sums`` to MXNet; the arguments are the node's attributes, as texts."""

    def __init__(self, flatten: str, num_inputs: str) -> None:
        super().__init__(need_top_grad=False)
        self._flatten = is_true(flatten)
        self._names = ["data", "weight", "bias"][: int(num_inputs)]

    def list_arguments(self) -> list[str]:
        return self._names

    def infer_shape(self, in_shape: list) -> tuple:
        data, weight = in_shape[:2]
        rows = data[:1] if self._flatten else data[:-1]
        return in_shape, [[*rows, weight[0]]], []

    def create_operator(self, ctx: Any, in_shapes: list, in_dtypes: list) -> _Sums:
        return _Sums(self._flatten)

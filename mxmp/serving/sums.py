"""FullyConnected with float16 sums, emulated on a CPU: what ``MXNET_FC_TRUE_FP16=1`` makes MXNet request from cuBLAS.

A Tensor Core of a V100 adds the exact products of four elements to a float16 number and rounds; later GPUs add more
products at a time and round less often. Convolutions have FP32 sums whatever the variable is
(src/operator/nn/cudnn/cudnn_convolution-inl.h).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mxnet as mx
import numpy as np

from ..precision.graph import Graph
from ..precision.rule import is_true

_NAME = "mxmp_float16_sums"
_PRODUCTS = 4


def with_float16_sums(graph: Graph, names: set[str]) -> None:
    """Let the FullyConnected operators with these names sum as a V100 does with ``MXNET_FC_TRUE_FP16=1``, in place.

    Sums are rounded to float16 after every four products. ``graph`` is an emulation of float16 (``lower_to_float16``);
    its operators read FP32 arrays whose values float16 can hold. Call ``register`` before the graph is loaded or run.
    """
    for node in graph.nodes():
        if node.op == "FullyConnected" and node.name in names:
            node.op = "Custom"
            flatten = node.attrs.get("flatten", "True")
            node.attrs = {"op_type": _NAME, "flatten": flatten, "num_inputs": str(len(node.inputs))}


@lru_cache(maxsize=None)
def register() -> None:
    """Make MXNet know the operator of ``with_float16_sums`` in this process; a further call does nothing."""
    mx.operator.register(_NAME)(_Property)


class _Sums(mx.operator.CustomOp):
    """Computes FullyConnected, forward only, as a V100 does with ``MXNET_FC_TRUE_FP16=1``: with float16 sums."""

    def __init__(self, flatten: bool) -> None:
        super().__init__()
        self._flatten = flatten

    def forward(self, is_train: bool, req: list, in_data: list, out_data: list, aux: list) -> None:
        """Write FullyConnected's output: sums, rounded to float16 after every four products and after the bias."""
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
    """Describes ``_Sums`` to MXNet. The constructor's arguments are the attributes of the node, as texts."""

    def __init__(self, flatten: str, num_inputs: str) -> None:
        super().__init__(need_top_grad=False)
        self._flatten = is_true(flatten)
        self._names = ["data", "weight", "bias"][: int(num_inputs)]

    def list_arguments(self) -> list[str]:
        """Return the names of FullyConnected's inputs: "data", "weight" and, if it has one, "bias"."""
        return self._names

    def infer_shape(self, in_shape: list) -> tuple:
        """Return three lists of shapes: of the inputs (``in_shape``), of the one output, and of no auxiliary states."""
        data, weight = in_shape[:2]
        rows = data[:1] if self._flatten else data[:-1]
        return in_shape, [[*rows, weight[0]]], []

    def create_operator(self, ctx: Any, in_shapes: list, in_dtypes: list) -> _Sums:
        """Return the object that computes the operator."""
        return _Sums(self._flatten)

"""The operators of small graphs, with what ``advise`` counts of them."""

from __future__ import annotations

from mxmp.diagnose.advising.flops import Tensor, shaped_nodes
from mxmp.precision.graph import Graph


def tensors(**shapes):
    return {name: Tensor(shape, "float32") for name, shape in shapes.items()}


def products_of(symbol, **shapes):
    """Return the matrix products of the one operator of ``symbol`` that has some."""
    (step,) = [s for s in shaped_nodes(Graph.from_symbol(symbol), tensors(**shapes)) if s.products()]
    return step.products()

"""The graphs of a bound module, for tools that look at it without training it."""

from __future__ import annotations

from ....symbolic.bucketing import BucketingModule
from ....symbolic.module import Module
from ..protocol import ConvertedGraph


def bound_graphs(target: Module | BucketingModule) -> list[ConvertedGraph]:
    """Return the FP32 graphs of a bound module; that of a bucket is called ``"softmax, bucket 10"``."""
    modules = target.modules if isinstance(target, BucketingModule) else {None: target}
    found = []
    for key, module in modules.items():
        if module.plan is not None:
            name = module.symbol.name or "symbol"
            title = name if key is None else f"{name}, bucket {key}"
            shapes = {each.name: each.shape for each in [*module.data_shapes, *(module.label_shapes or ())]}
            graph = module.for_training, module.symbol, module.plan, shapes, module.requested_gradients
            found.append(ConvertedGraph(title, *graph))
    if not found:
        raise ValueError("the module has no graph yet: bind() it first")
    return found

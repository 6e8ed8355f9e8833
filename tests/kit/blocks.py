"""A net whose forward is a function of the test's."""

from __future__ import annotations

from typing import Any, Callable

from mxnet import gluon


class Lambda(gluon.HybridBlock):
    """Children by name, and what they compute: ``compute(mx.nd or mx.sym, block, *inputs)``."""

    def __init__(self, compute: Callable[..., Any], **children: gluon.HybridBlock) -> None:
        super().__init__()
        self.compute = compute
        for name, child in children.items():
            setattr(self, name, child)

    def hybrid_forward(self, F: Any, *inputs: Any) -> Any:  # noqa: N803
        return self.compute(F, self, *inputs)

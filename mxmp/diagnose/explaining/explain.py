"""``explain``: per node the dtype and the reason, the casts, and what was left alone."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Iterable, Iterator

import mxnet as mx
from mxnet.gluon import Block

from ...gluon._mxnet import children
from ...gluon.hook import hooks
from ...kernels.fit import device_of
from ...policy import Policy
from ...precision.casts import strip
from ...precision.decide import decide
from ...precision.graph import Graph, as_shape
from ...precision.plan import Plan, read_policy
from ...symbolic import BucketingModule, Module
from .measure import measure
from .render import render
from .report import GraphReport, NodeReport

__all__ = ["Explanation", "check_shapes", "explain"]


@dataclass(frozen=True)
class Explanation:
    """What ``explain`` found. ``print`` it, or read ``graphs``.

    ``unconverted``: names of blocks that run as Python and stay FP32.
    """

    graphs: tuple[GraphReport, ...]
    unconverted: tuple[str, ...] = ()

    @property
    def num_casts(self) -> int:
        """Casts in one forward: of the training graphs where there are some."""
        return sum(len(graph.casts) for graph in self._current())

    @property
    def cast_bytes(self) -> int | None:
        """Bytes that one forward moves for casts, None without shapes."""
        sizes = [graph.cast_bytes for graph in self._current()]
        return None if None in sizes else sum(sizes)  # type: ignore[arg-type]

    @property
    def nodes(self) -> tuple[NodeReport, ...]:
        """All operators of those graphs."""
        return tuple(node for graph in self._current() for node in graph.nodes)

    def _current(self) -> tuple[GraphReport, ...]:
        return tuple(g for g in self.graphs if g.training) or self.graphs

    def __str__(self) -> str:
        return render(self.graphs, self.unconverted)


def explain(
    target: Block | mx.sym.Symbol | Module | BucketingModule,
    *inputs: Any,
    policy: str | Policy | Plan | None = None,
    exclude: Iterable[str] = (),
    ctx: mx.Context | None = None,
    **shapes: tuple[int, ...],
) -> Explanation:
    """What mxmp decided for each operator of a converted net or a bound Module, or would decide for a Symbol.

    Parameters
    ----------
    target : Block, Module, BucketingModule or Symbol
        A net that ``convert`` returned, a module of mxmp's, or an FP32 Symbol.
    *inputs : NDArray
        For a net: called once with them if it has not been called yet.
    policy, exclude, ctx
        For a Symbol: as for ``cast_symbol``.
    **shapes : tuple of int
        For a Symbol: input shapes, to count bytes; for example ``data=(32, 3, 224, 224)``.

    Raises
    ------
    ValueError
        The net is not converted, or was never called and no inputs are given; the module is not bound; or
        shapes are of no input of the Symbol, or do not fit it.
    """
    if isinstance(target, mx.sym.Symbol):
        asked, plan = read_policy(policy or "float16", exclude)
        return Explanation((_symbol(target, asked, plan, ctx, shapes),))
    if not isinstance(target, (Block, Module, BucketingModule)):
        raise TypeError(
            "explain takes a gluon Block, a Symbol, an mxmp.Module or an mxmp.BucketingModule, "
            f"got {type(target).__module__}.{type(target).__name__}"
        )
    if policy is not None or shapes:
        raise ValueError("policy and shapes are for Symbols: a net or module is explained as it was converted")
    if not isinstance(target, Block):
        return Explanation(tuple(_modules(target)))
    if not any(hooks(target)):
        raise ValueError(f"{target.name!r} is not converted: call mxmp.convert(net) first, or explain a Symbol")
    reports = tuple(_graphs(target))
    if not reports and inputs:
        target(*inputs)
        reports = tuple(_graphs(target))
    if not reports:
        raise ValueError(f"{target.name!r} has no graph yet: call it once, or pass inputs to explain(net, x)")
    return Explanation(reports, tuple(_unconverted(target)))


def _symbol(
    symbol: mx.sym.Symbol, policy: Policy, plan: Plan | None, ctx: mx.Context | None, shapes: dict[str, tuple]
) -> GraphReport:
    check_shapes(shapes, symbol.list_inputs(), ["policy", "exclude", "ctx"])
    graph = strip(Graph.from_symbol(symbol))
    plan = plan or decide(graph, policy, device_of(ctx), keep_output_names=True)
    try:
        return measure(symbol.name or "symbol", None, graph, plan, shapes)
    except mx.MXNetError as error:
        why = str(error).strip().splitlines()[-1]
        raise ValueError(f"the shapes {shapes} do not fit the Symbol: {why}") from error


def check_shapes(shapes: dict[str, tuple], inputs: list[str], keywords: list[str]) -> None:
    """Raise ``ValueError`` for a shape of no input, perhaps a misspelt keyword, or with a size that is none."""
    for name, shape in shapes.items():
        if name not in inputs:
            close = get_close_matches(name, [*inputs, *keywords], n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(inputs[:5])}, ..."
            raise ValueError(f"the Symbol has no input {name!r}; {hint}")
        as_shape(shape, name)


def _modules(target: Module | BucketingModule) -> Iterator[GraphReport]:
    modules = target.modules if isinstance(target, BucketingModule) else {None: target}
    bound = [(key, module, module.plan) for key, module in modules.items() if module.plan is not None]
    if not bound:
        raise ValueError("the module has no graph yet: bind() it first")
    for key, module, plan in bound:
        name = module.symbol.name or "symbol"
        shapes = {each.name: each.shape for each in [*module.data_shapes, *(module.label_shapes or ())]}
        graph = strip(Graph.from_symbol(module.symbol))
        yield measure(name if key is None else f"{name}, bucket {key}", module.for_training, graph, plan, shapes)


def _graphs(net: Block) -> Iterator[GraphReport]:
    for block, hook in hooks(net):
        for key, built in hook.graphs.items():
            graph = strip(Graph.from_symbol(built.traced.graph[1]))
            yield measure(block.name, key.training, graph, built.plan, built.shapes)


def _unconverted(net: Block) -> Iterator[str]:
    converted = {id(block) for block, hook in hooks(net) if not hook.python}
    stack = [net]
    while stack:
        block = stack.pop()
        if id(block) not in converted:
            yield block.name
            stack.extend(children(block))

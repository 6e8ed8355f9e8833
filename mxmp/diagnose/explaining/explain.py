"""``explain``: per node the dtype and the reason, the casts, and what was left alone."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from math import prod
from typing import Any, Iterable, Iterator, Mapping, Sequence

import mxnet as mx
from mxnet.gluon import Block

from ...gluon._mxnet import children
from ...gluon.hook import hooks
from ...kernels.fit import UNKNOWN, device_of
from ...pipeline import emitted
from ...policy import Policy
from ...precision.casts import FULL, insert_casts, strip
from ...precision.decide import decide
from ...precision.graph import Graph, Node, as_shape
from ...precision.plan import Plan, PlannedGraph, read_policy, rule_under
from ...precision.rules import Kind
from ...precision.subgraphs import bodies
from ...precision.traffic import CastSize, cast_sizes
from ...symbolic import BucketingModule, Module
from .report import Explanation, GraphReport, NodeReport

__all__ = ["check_shapes", "explain"]


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
        return _measured(symbol.name or "symbol", None, graph, plan, shapes)
    except mx.MXNetError as error:
        why = str(error).strip().splitlines()[-1]
        raise ValueError(f"the shapes {shapes} do not fit the Symbol: {why}") from error


def check_shapes(shapes: dict[str, tuple], inputs: list[str], keywords: Sequence[str] = ()) -> None:
    """Raise ``ValueError`` for a shape of no input, perhaps a misspelt keyword, or with a size that is none.

    MXNet counts the elements of an array in 64 bits and, unless it is built with ``USE_INT64_TENSOR_SIZE``, a size in
    32.
    """
    largest = 2**63 - 1 if mx.runtime.Features().is_enabled("INT64_TENSOR_SIZE") else 2**31 - 1
    for name, shape in shapes.items():
        if name not in inputs:
            close = get_close_matches(name, [*inputs, *keywords], n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(inputs[:5])}, ..."
            raise ValueError(f"the Symbol has no input {name!r}; {hint}")
        as_shape(shape, name)
        if any(size > largest for size in shape) or prod(shape) > 2**63 - 1:
            raise ValueError(
                f"{name}={shape} is too large for MXNet: a size is at most {largest:,}, all at most 2**63 - 1"
            )


def _modules(target: Module | BucketingModule) -> Iterator[GraphReport]:
    modules = target.modules if isinstance(target, BucketingModule) else {None: target}
    bound = [(key, module, module.plan) for key, module in modules.items() if module.plan is not None]
    if not bound:
        raise ValueError("the module has no graph yet: bind() it first")
    for key, module, plan in bound:
        name = module.symbol.name or "symbol"
        shapes = {each.name: each.shape for each in [*module.data_shapes, *(module.label_shapes or ())]}
        graph = strip(Graph.from_symbol(module.symbol))
        title = name if key is None else f"{name}, bucket {key}"
        yield _measured(title, module.for_training, graph, plan, shapes, module.requested_gradients)


def _graphs(net: Block) -> Iterator[GraphReport]:
    for block, hook in hooks(net):
        for key, built in hook.graphs.items():
            graph = strip(Graph.from_symbol(built.traced.graph[1]))
            requested = {param.name: request for param, request in built.asked}
            large = built.only_for is not None
            yield _measured(block.name, key.training, graph, built.plan, built.shapes, requested, large_inputs=large)


def _unconverted(net: Block) -> Iterator[str]:
    converted = {id(block) for block, hook in hooks(net) if not hook.python}
    stack = [net]
    while stack:
        block = stack.pop()
        if id(block) not in converted:
            yield block.name
            stack.extend(children(block))


def _measured(
    name: str,
    training: bool | None,
    graph: Graph,
    plan: Plan,
    shapes: dict,
    grad_req: Mapping[str, str] = UNKNOWN,
    *,
    large_inputs: bool = False,
) -> GraphReport:
    """Return what ``plan`` does to ``graph``, an FP32 graph, and what its casts move."""
    names = graph.names()
    workarounds = _workarounds(graph, plan, grad_req, large_inputs)
    at: dict[str, list[str]] = {}
    for workaround, found in workarounds.items():
        for each in found:
            at.setdefault(each, []).append(workaround)
    nodes, casts = _inside(graph, plan, shapes)
    nodes = [replace(node, workarounds=tuple(at.get(node.name, ()))) for node in nodes]
    variables = [names[node] for node in graph.nodes() if node.is_variable]
    return GraphReport(
        name,
        training,
        plan,
        tuple(nodes),
        tuple(casts),
        tuple(sorted(plan.low_variables)),
        tuple(name for name in variables if name not in plan.low_variables),
        workarounds,
    )


def _workarounds(
    graph: Graph, plan: Plan, grad_req: Mapping[str, str], large_inputs: bool
) -> dict[str, tuple[str, ...]]:
    """Return the operators and variables that need each workaround; those of casts are the tensors that are cast."""
    casted = emitted(graph, plan, grad_req, large_inputs=large_inputs)

    def source(node: Node) -> str:
        while node not in casted.source and node.inputs:
            node = node.inputs[0].node
        return casted.source[node].name if node in casted.source else node.name

    return {name: tuple(dict.fromkeys(map(source, nodes))) for name, nodes in casted.workarounds.items()}


def _inside(graph: Graph, plan: Plan, shapes: dict, prefix: str = "") -> tuple[list[NodeReport], list[CastSize]]:
    """Return the operators and casts of a graph, those in the bodies of control flow too.

    Casts that the device's kernels do inside are left out.
    """
    casted, fitted = insert_casts(PlannedGraph(graph, plan)), emitted(graph, plan)
    left = set(fitted.graph.nodes())
    casted.casts = [cast for cast, same in zip(casted.casts, fitted.casts) if same in left]
    ours = set(casted.casts)
    names = graph.names()
    casts = [cast._replace(tensor=prefix + cast.tensor) for cast in cast_sizes(casted, shapes)]
    nodes = []
    for new, old in casted.source.items():
        if old.is_variable:
            continue
        decision = plan.decisions[names[old]]
        nodes.append(
            NodeReport(
                prefix + old.name,
                old.op,
                plan.policy.compute if decision.low else FULL,
                decision.reason,
                sum(entry.node in ours for entry in new.inputs),
                rule_under(plan.policy, old.op).kind is Kind.ALONE,
            )
        )
        for body in bodies(old):
            inner, within = body.prefix(names[old]), plan.within(body, names[old])
            more, moved = _inside(body.graph, within, {}, prefix + inner)
            nodes += more
            casts += moved
    return nodes, casts

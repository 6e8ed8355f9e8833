"""``explain``: the dtype of each operator and the reason, the casts, and the operators that the policy leaves alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Iterable, Mapping

import mxnet as mx
from mxnet.gluon import Block

from ...callbacks import last_line
from ...frontend import ConvertedGraph
from ...kernels.channels_last import norms_over_rows
from ...kernels.fit import device_of
from ...pipeline import emitted, warn_of_plan
from ...policy import Policy
from ...precision.casts import LowGraph, strip
from ...precision.decide import decide
from ...precision.graph import Graph, Node, check_shapes
from ...precision.operators import Options
from ...precision.plan import FULL, Plan, read_policy, summed_in_fp32
from ...precision.rules import Kind
from ...precision.traffic import CastSize, cast_sizes
from ..shared.targets import Network, converted_graphs, is_network, kind_of
from .report import Explanation, GraphReport, NodeReport


def explain(
    target: Network | mx.sym.Symbol,
    *inputs: Any,
    policy: str | Policy | Plan | None = None,
    exclude: Iterable[str] = (),
    ctx: mx.Context | None = None,
    **shapes: tuple[int, ...],
) -> Explanation:
    """Return in which dtype each operator of a converted net or a bound module computes, and why.

    For an FP32 Symbol: in which dtype each operator would compute after ``cast_symbol``.

    Parameters
    ----------
    target : Block, Module, BucketingModule or Symbol
        A net that ``convert`` returned, an mxmp.Module or mxmp.BucketingModule, or an FP32 Symbol.
    *inputs : NDArray
        Only for a net: its inputs. They are needed if the net was not called since ``convert``, ``hybridize`` or
        ``cast``, because it has no graph then: it is called with them once, in the mode (training or inference) that
        autograd has at the time. A net that has a graph is not called.
    policy, exclude, ctx
        Only for a Symbol. ``policy`` is a recipe, policy string, Policy, Plan or path of a Plan (default
        ``"float16"``). ``exclude`` has more patterns, as of ``fnmatch``, for names of operators or blocks to keep in
        FP32; it cannot be combined with a Plan. ``ctx`` is the device (default: the current context's); with a Plan,
        the Plan's device is taken instead.
    **shapes : tuple of int
        Only for a Symbol: shapes of its inputs, for example ``data=(32, 3, 224, 224)``, from which the bytes of casts
        are counted. Without them, the bytes are None.

    Returns
    -------
    Explanation
        ``print`` it, or read its ``graphs``: for each operator the dtype and the reason, and for each graph the casts,
        the parameters stored in float16, and the workarounds.

    Raises
    ------
    TypeError
        ``target`` is none of these.
    ValueError
        The net is not converted, or has no graph yet and there are no inputs; the module is not bound; ``inputs`` are
        given with a Symbol or module; ``policy``, ``exclude``, ``ctx`` or shapes are given with a net or module; or
        policy, Plan or shapes do not fit the Symbol.
    OSError
        The file of a Plan cannot be read.
    """
    if isinstance(target, mx.sym.Symbol):
        if inputs:
            raise ValueError(
                f"explain takes nothing by position after a Symbol, got {_types(inputs)}: name the shapes of its "
                "inputs and the policy, explain(symbol, policy='float16', data=(32, 3, 224, 224))"
            )
        return Explanation((_report_symbol(target, *read_policy(policy or "float16", exclude), ctx, shapes),))
    if not is_network(target):
        raise TypeError(
            f"explain takes a gluon Block, a Symbol, an mxmp.Module or an mxmp.BucketingModule, got {kind_of(target)}"
        )
    if policy is not None or exclude or ctx is not None or shapes:
        raise ValueError(
            "policy, exclude, ctx and shapes are for Symbols: a net or module is explained as it was converted"
        )
    if inputs and not isinstance(target, Block):
        raise ValueError(
            f"explain takes nothing after a module, got {_types(inputs)}: a bound module has its graphs, write "
            "explain(module)"
        )
    if any(isinstance(each, (str, Policy, Plan)) for each in inputs):
        raise ValueError(
            f"explain takes a net's inputs, got {_types(inputs)}: a net is explained as it was converted, so "
            "convert it by that policy first, mxmp.convert(net, policy)"
        )
    graphs, unconverted = converted_graphs(target, inputs)
    return Explanation(tuple(map(_report_graph, graphs)), tuple(unconverted))


def _types(inputs: Iterable[Any]) -> str:
    return ", ".join(type(each).__name__ for each in inputs)


def _report_symbol(
    symbol: mx.sym.Symbol, policy: Policy, plan: Plan | None, ctx: mx.Context | None, shapes: dict[str, tuple]
) -> GraphReport:
    """Return the report on an FP32 Symbol, as ``plan`` would convert it or, if None, ``policy`` on ``ctx``."""
    check_shapes(shapes, symbol.list_inputs(), ["policy", "exclude", "ctx"])
    graph, given = strip(Graph.from_symbol(symbol)), plan
    plan = plan or decide(graph, policy, device_of(ctx), Options(keep_output_names=True))
    plan = summed_in_fp32(plan)
    try:
        found = _report_graph(ConvertedGraph(symbol.name or "symbol", None, symbol, plan, shapes))
    except mx.MXNetError as error:
        raise ValueError(f"the shapes {shapes} do not fit the Symbol: {last_line(error)}") from error
    if given is not None:
        warn_of_plan(graph, given, set())
    return found


def _report_graph(converted: ConvertedGraph) -> GraphReport:
    """Return the report on an FP32 graph, which is converted once more by its plan."""
    graph, plan, shapes = strip(Graph.from_symbol(converted.symbol)), converted.plan, converted.shapes
    fitted = emitted(graph, plan, converted.requested_gradients, large_inputs=converted.large_inputs)
    nodes, casts, workarounds = _described(fitted, shapes)
    at = {workaround: dict.fromkeys(places) for workaround, places in workarounds.items()}
    variables = [name for node, name in fitted.planned.names.items() if node.is_variable]
    return GraphReport(
        converted.name,
        converted.training,
        plan,
        tuple(replace(node, workarounds=tuple(name for name in at if node.name in at[name])) for node in nodes),
        tuple(casts),
        tuple(sorted(plan.low_variables)),
        tuple(name for name in variables if name not in plan.low_variables),
        {name: tuple(places) for name, places in at.items()},
        tuple(norms_over_rows(graph)) if plan.device == "gpu" else (),
    )


def _described(
    fitted: LowGraph, shapes: Mapping[str, tuple], prefix: str = ""
) -> tuple[list[NodeReport], list[CastSize], dict[str, list[str]]]:
    """Return the reports on the operators of a graph, its casts, and the places of each workaround, bodies included.
    ``prefix``, ``"loop/"`` in the body of a loop, is put before each name.
    """

    def source(node: Node) -> str:
        # Of a cast: the operator or variable whose output it reads.
        while node not in fitted.source and node.inputs:
            node = node.inputs[0].node
        return prefix + (fitted.source[node].name if node in fitted.source else node.name)

    planned = fitted.planned
    inserted = {(cast.tensor, cast.dtype) for cast in fitted.casts_left}
    casts = [cast._replace(tensor=prefix + cast.tensor) for cast in cast_sizes(fitted, shapes)]
    workarounds = {name: list(map(source, places)) for name, places in fitted.workarounds.items()}
    nodes = []
    for node, decision in planned.decisions.items():
        nodes.append(
            NodeReport(
                prefix + node.name,
                node.op,
                fitted.compute if decision.low else FULL,
                decision.reason,
                sum((entry, planned.cast_to(node, i)) in inserted for i, entry in enumerate(node.inputs)),
                planned.rules[node].kind is Kind.ALONE,
            )
        )
        for body, low in fitted.bodies.get(node, ()):
            inner = _described(low, {}, prefix + body.prefix(planned.names[node]))
            nodes += inner[0]
            casts += inner[1]
            for name, places in inner[2].items():
                workarounds.setdefault(name, []).extend(places)
    return nodes, casts, workarounds

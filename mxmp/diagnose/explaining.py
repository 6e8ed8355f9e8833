"""``explain``: the dtype of each operator and the reason, the casts, and the operators that the policy leaves alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Iterable, Mapping

import mxnet as mx
from mxnet.gluon import Block

from ..callbacks import last_line
from ..kernels.channels_last import WHY_SLOW, norms_over_rows
from ..kernels.fit import device_of
from ..pipeline import emitted
from ..policy import Policy
from ..precision.casts import LowGraph, cast_to, strip
from ..precision.decide import decide
from ..precision.edited import warn_of_plan
from ..precision.graph import Graph, Node
from ..precision.operators import Options
from ..precision.plan import FULL, Plan, read_policy, summed_in_fp32, without_effect
from ..precision.rule import Kind
from ..precision.traffic import CastSize, cast_sizes
from ..shapes import check_shapes
from .networks.frontends import Network, converted_graphs, is_network, kind_of
from .networks.protocol import ConvertedGraph
from .text import grouped, section, some, table


@dataclass(frozen=True)
class NodeReport:
    """The dtype in which one operator computes, why, and which casts and workarounds it needs.

    Attributes
    ----------
    name, op : str
        Name and type in the FP32 graph, such as ``"fc1"`` and ``"FullyConnected"``. An operator in the body of the loop
        ``"loop"`` has the name ``"loop/fc1"``.
    dtype : str
        The compute dtype, or ``"float32"`` for every operator that does not compute in it, also one on integers.
    reason : str
        Why it computes in this dtype, in one line.
    casts : int
        How many of its inputs are outputs of a cast that mxmp inserted.
    left_alone : bool
        True if the rule for this type of operator is ``ALONE``: mxmp does not cast its inputs, because they are
        integers, indices, random numbers or sparse arrays, or because it is a Custom operator.
    workarounds : tuple of str
        The names of the workarounds, for wrong, missing or slow kernels of the device, that the operator needs.
    """

    name: str
    op: str
    dtype: str
    reason: str
    casts: int
    left_alone: bool
    workarounds: tuple[str, ...] = ()


@dataclass(frozen=True)
class GraphReport:
    """How one graph is converted: the dtypes of its operators, its casts, stored parameters and workarounds.

    The graph is that of a Symbol, a Module, one bucket of a BucketingModule, or a block in training or in inference.

    Attributes
    ----------
    name : str
        The name of the Symbol or block; of a BucketingModule with the key of the bucket, ``"softmax, bucket 10"``.
    training : bool or None
        True if the graph runs in training, False in inference; None for a Symbol.
    plan : Plan
        The plan that the graph follows.
    nodes : tuple of NodeReport
        All operators of the graph, those in the bodies of control flow included.
    casts : tuple of CastSize
        For each cast the name of the tensor that it reads, the dtype to which it casts, and the bytes that it reads and
        writes (None if the tensor's shape is not known, as in the bodies of control flow).
    low_params, full_params : tuple of str
        The names of the parameters that are stored in float16, with FP32 master weights; and of all other variables,
        inputs included.
    workarounds : mapping of str to tuple of str
        The names of the operators and variables that need a workaround, by the name of the workaround. In the body of a
        loop or branch, they have a prefix: ``"loop/fc1"``.
    slow_norms : tuple of str
        On a GPU, the names of each BatchNorm whose axis is not 1, for which cuDNN has slow kernels.
    """

    name: str
    training: bool | None
    plan: Plan
    nodes: tuple[NodeReport, ...]
    casts: tuple[CastSize, ...]
    low_params: tuple[str, ...]
    full_params: tuple[str, ...]
    workarounds: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    slow_norms: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        """Return the device whose kernels the graph runs on: ``"cpu"`` or ``"gpu"``."""
        return self.plan.device

    @property
    def policy(self) -> Policy:
        """Return the policy for which the graph's plan was made."""
        return self.plan.policy

    @property
    def unmatched(self) -> tuple[str, ...]:
        """Return the patterns in the policy's ``exclude`` that match no operator and no block of the graph."""
        return self.plan.unmatched

    @property
    def without_effect(self) -> tuple[str, ...]:
        """Return the policy's ``low_ops`` and ``full_ops`` that change nothing in the graph, each with the reason.

        Such as ``"low_ops=softmax: the graph has none"``, or that the device has no kernel for it in the compute dtype.
        """
        return tuple(f"{entry}: {why}" for entry, why in without_effect(self.plan).items())

    @property
    def cast_bytes(self) -> int | None:
        """Return the bytes that all casts together read and write in one forward; None if a shape is not known."""
        return _total(cast.bytes for cast in self.casts)

    @property
    def num_low(self) -> int:
        """Return how many operators compute in low precision."""
        return sum(node.dtype == self.policy.compute for node in self.nodes)

    def __str__(self) -> str:
        mode = {None: "", True: ", training", False: ", inference"}[self.training]
        size, compute = self.cast_bytes, self.policy.compute
        moved = "" if size is None else f", {size / 2**20:.1f} MiB read and written per forward"
        lines = [
            f"{self.name} ({self.policy}, {self.device}{mode})",
            f"  {self.num_low} of {len(self.nodes)} operators in {compute}, {len(self.casts)} casts{moved}",
            "",
            *self._table(),
        ]
        for title, names in (
            # A Symbol that ``cast_symbol`` returns may be one for inference alone.
            (f"Stored in {compute}{'' if self.training is None else ' with FP32 masters'}", self.low_params),
            ("Left alone", [node.name for node in self.nodes if node.left_alone]),
            ("exclude matched nothing", self.unmatched),
        ):
            lines += ["", f"  {title}: {some(names)}"] if names else []
        lines += section("Without effect", self.without_effect)
        if self.workarounds:
            rows = [(name, str(len(nodes)), some(nodes, 3)) for name, nodes in self.workarounds.items()]
            lines += ["", *table([("workaround for the kernels", "places", "for"), *rows], "<><")]
        if self.slow_norms:
            lines += ["", f"  BatchNorm with another axis than 1: {some(self.slow_norms)}", f"    {WHY_SLOW}"]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        """Return a table that counts the operators of each type, dtype and reason, largest count first."""
        alike = grouped(self.nodes, lambda node: (node.dtype, node.op, node.reason))
        order = sorted(alike.items(), key=lambda item: -len(item[1]))
        rows = [(str(len(nodes)), *key[:2], str(sum(n.casts for n in nodes)), key[2]) for key, nodes in order]
        return table([("nodes", "dtype", "operator", "casts", "reason"), *rows], "><<><")


@dataclass(frozen=True)
class Explanation:
    """The result of ``explain``: for each graph of a network, in which dtype its operators compute, and why.

    ``print`` it, or read ``graphs``. Plain data.

    Attributes
    ----------
    graphs : tuple of GraphReport
        One report for each graph. In a net, each block that Python code calls has one graph for each kind of its calls
        so far (training or inference, device, nesting of the arguments). A block that is called inside the graph of
        another has none. A BucketingModule has one graph for each bucket that is bound.
    unconverted : tuple of str
        Names of the blocks of a net that run as Python, not as a graph, and so stay in FP32.
    """

    graphs: tuple[GraphReport, ...]
    unconverted: tuple[str, ...] = ()

    @property
    def num_casts(self) -> int:
        """Return the number of casts in all training graphs together; if there are no training graphs, in all graphs.

        If a forward runs each of these graphs once, these are the casts of one forward.
        """
        return sum(len(graph.casts) for graph in self._current())

    @property
    def cast_bytes(self) -> int | None:
        """Return the bytes that casts read and write in one forward of each training graph, summed over these graphs.

        If there are no training graphs, all graphs count. None if the shape of a cast tensor is not known.
        """
        return _total(graph.cast_bytes for graph in self._current())

    @property
    def nodes(self) -> tuple[NodeReport, ...]:
        """Return the reports on the operators of all training graphs; if there are no such graphs, of all graphs."""
        return tuple(node for graph in self._current() for node in graph.nodes)

    def _current(self) -> tuple[GraphReport, ...]:
        return tuple(g for g in self.graphs if g.training) or self.graphs

    def __str__(self) -> str:
        python = [f"Runs as Python, in FP32: {some(self.unconverted)}"] if self.unconverted else []
        return "\n\n".join([*map(str, self.graphs), *python])


def _total(sizes: Iterable[int | None]) -> int | None:
    known = list(sizes)
    return None if None in known else sum(known)  # type: ignore[arg-type]


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

    Examples
    --------
    >>> data = mx.sym.var("data")
    >>> out = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(data, num_hidden=2, name="fc"), name="softmax")
    >>> for node in mxmp.explain(out, policy="float16").graphs[0].nodes:
    ...     print(node.name, node.dtype)
    fc float16
    softmax float32
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
                sum((entry, cast_to(planned, node, i)) in inserted for i, entry in enumerate(node.inputs)),
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

"""``advise``: which shapes miss the Tensor Cores, what padding them would cost, and which products could be joined."""

from __future__ import annotations

from typing import Any, Iterable, Iterator, Sequence

import mxnet as mx
from mxnet.gluon import Block

from ...host.callbacks import last_line
from ...kernels.channels_last import has_norm, norms_over_rows
from ...messages.shapes import wanted_shapes
from ...policy import Policy
from ...precision._mxnet import dtype_name
from ...precision.casts import strip
from ...precision.decide import decide
from ...precision.graph import Graph, data_inputs
from ...precision.operators import Options
from ...precision.plan import Plan
from ..networks.frontends import called_graphs, policy_for
from ..networks.protocol import CalledGraph
from ..text import grouped
from .advice import Advice, Joinable, MatrixReport
from .flops import ShapedNode, Tensor, shaped_nodes
from .gemm import Products
from .gpus import gpu_named
from .machine import slowed_by

# Matrix operators whose products are not counted.
_UNCOUNTED = {"Convolution_v1", "Correlation", "Custom", "khatri_rao", "_npi_einsum", "_contrib_quantized_rnn"}
_UNCOUNTED |= {"_sg_mkldnn_conv", "_sg_mkldnn_fully_connected"}
_UNCOUNTED |= {f"_linalg_{name}" for name in ("syrk", "trmm", "trsm", "potrf", "potri", "gelqf", "syevd", "inverse")}


def advise(
    target: Block | mx.sym.Symbol,
    *inputs: Any,
    policy: str | Policy | Plan | None = None,
    device: str = "v100",
    exclude: Iterable[str] = (),
    **shapes: tuple[int, ...],
) -> Advice:
    """Return which matrix operators suit a GPU's Tensor Cores, which do not and why, and which sizes to pad them to.

    Everything is counted from shapes; nothing is measured, and no GPU is needed.

    Parameters
    ----------
    target : Block or Symbol
        A net, converted or not, which stays as it is; or a Symbol in FP32 or quantized to INT8.
    *inputs : NDArray or tuple of int
        For a net: the arrays that it is called with, or shapes of FP32 arrays. The net is only traced, unless a part of
        it runs as Python: then it is called once, in inference, and needs arrays with meaningful values, not shapes.
    policy : str, Policy or Plan, optional
        The name of a recipe (``"float16-fast"``), a policy string (``"compute=float16"``), a Policy, a Plan or the path
        of a saved Plan. By default the policy of a converted net, otherwise ``"float16"``.
    device : {"v100", "t4", "a100"}
        The GPU to advise on.
    exclude : iterable of str
        Patterns, as of ``fnmatch``, for names of operators or blocks that stay in FP32, besides those of the policy.
        Not with a Plan.
    **shapes : tuple of int
        For a Symbol: the shapes of its inputs, for example ``data=(32, 3, 224, 224)``.

    Returns
    -------
    Advice
        ``print`` it, or read its fields.

    Raises
    ------
    TypeError
        ``target`` is neither a Block nor a Symbol.
    ValueError
        A net has no inputs, or nothing in it runs as a graph; inputs or shapes do not fit ``target``, or those of a
        Symbol say the shape of no matrix operator; the policy or
        device is not known; no GPU can follow the policy (bfloat16); or the plan is of another graph, or given with
        ``exclude``.
    OSError
        The file of a Plan cannot be read.
    """
    gpu_named(device)
    called = called_graphs(target, inputs, shapes)
    requested, plan = policy_for(target, policy, exclude)
    if requested.compute == "bfloat16":
        raise ValueError(
            "advise counts shapes for a GPU, and MXNet 1.9.1 has no bfloat16 kernels for a GPU: use 'float16' "
            "(policy='float16'). On a CPU mxmp.tune measures what bfloat16 gains"
        )
    matrices: list[MatrixReport] = []
    joinable: list[Joinable] = []
    unknown: list[str] = []
    unmatched: list[set[str]] = []
    for graph in called:
        prefix = f"{graph.name}/" if len(called) > 1 else ""
        nodes, decided = _decided(graph, plan or requested)
        for shaped in nodes:
            found = shaped.products()
            if shaped.node.op in _UNCOUNTED or None in [*shaped.ins, *shaped.outs[:1]]:
                unknown.append(prefix + shaped.name)
            elif found is not None and found.gemms:
                matrices.append(_matrix(shaped, found, decided, prefix))
        joinable += _joinable(nodes, prefix)
        unmatched.append(set(decided.unmatched))
    if isinstance(target, mx.sym.Symbol) and unknown and not matrices:
        # Nothing is counted, and a report would say that 0 % can run on Tensor Cores.
        missing = [name for name in data_inputs(Graph.from_symbol(target)) if name not in shapes]
        if missing:
            raise ValueError(f"the shapes {shapes} do not say the shape of {wanted_shapes(missing)}")
    graphs = [Graph.from_symbol(graph.symbol) for graph in called]
    return Advice(
        name=target.name or called[0].name,
        policy=str(requested if plan is None else plan.policy),
        device=device.lower(),
        matrices=tuple(matrices),
        joinable=tuple(joinable),
        unknown=tuple(unknown),
        unmatched=tuple(sorted(set.intersection(*unmatched))),
        slowed_by=slowed_by(),
        has_norm=any(has_norm(graph) for graph in graphs),
        slow_norms=tuple(name for graph in graphs for name in norms_over_rows(graph)),
    )


def _decided(called: CalledGraph, policy: Policy | Plan) -> tuple[list[ShapedNode], Plan]:
    """Return the operators of a graph with their shapes, and the plan that says which compute in low precision."""
    graph, parameters = strip(Graph.from_symbol(called.symbol)), called.parameters or None
    plan = policy if isinstance(policy, Plan) else decide(graph, policy, "gpu", Options(parameters=parameters))
    known = {name: Tensor(shape, dtype_name(dtype)) for name, (shape, dtype) in called.known.items()}
    try:
        nodes = list(shaped_nodes(graph, known))
    except mx.MXNetError as error:
        raise ValueError(f"the shapes do not fit {called.name!r}: {last_line(error)}") from error
    missing = [shaped.name for shaped in nodes if shaped.name not in plan.decisions]
    if missing:
        raise ValueError(f"the plan is of another graph: it has no decision for {missing[0]!r}")
    return nodes, plan


def _matrix(shaped: ShapedNode, found: Products, plan: Plan, prefix: str) -> MatrixReport:
    """Return the report on an operator; ``prefix`` is ``""``, or the graph's name and ``"/"`` if there are several."""
    elements = sum(tensor.size for tensor in [*shaped.ins, *shaped.outs] if tensor)
    if shaped.node.op == "RNN":  # no cache holds the weights from one time step to the next
        elements = sum(g.times * (g.m * g.k + g.k * g.n + g.m * g.n) for g in found.gemms)
    decision = plan.decisions[shaped.name]
    dtype = plan.policy.compute if decision.low else "float32"
    if shaped.ins[0] is not None and shaped.ins[0].dtype in ("int8", "uint8"):
        dtype = "int8"
    depthwise = shaped.node.op in ("Convolution", "Deconvolution") and found.sizes[0].value == 1 < found.gemms[0].times
    return MatrixReport(
        *(prefix + shaped.name, shaped.node.op, found.layout, found.gemms, found.sizes, shaped.times),
        *(elements, dtype, decision.reason, depthwise),
    )


# Attributes in which products of one input may differ and still be joined.
_OWN = {"num_hidden", "num_filter", "no_bias"}


def _joinable(nodes: Sequence[ShapedNode], prefix: str) -> Iterator[Joinable]:
    """Yield each group of matrix operators that could be one, because they read the same tensor."""

    def may_be_joined(shaped: ShapedNode) -> bool:
        node = shaped.node
        is_one = node.op in ("FullyConnected", "Convolution", "dot") and int(node.attrs.get("num_group", 1)) == 1
        return is_one and shaped.products() is not None and all(e.node.is_variable for e in node.inputs[1:])

    def read(shaped: ShapedNode) -> tuple:
        node = shaped.node
        same = sorted((k, v) for k, v in node.attrs.items() if k not in _OWN and not k.startswith("__"))
        return node.inputs[0], node.op, tuple(same)

    for (entry, op, _), members in grouped(filter(may_be_joined, nodes), read).items():
        # No two of them share the second input, the weight.
        if len({shaped.node.inputs[1] for shaped in members}) == len(members) > 1:
            outputs = sum(found.gemms[0].n for shaped in members if (found := shaped.products()))
            names = tuple(prefix + shaped.name for shaped in members)
            yield Joinable(names, op, prefix + entry.node.name, outputs)

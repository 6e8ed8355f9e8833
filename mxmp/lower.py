"""The graph for a device's kernels: native where MXNet has them, emulated where it has not."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Collection

import mxnet as mx

from .graph import Entry, Graph, Node
from .plan import Plan, decide
from .policy import Policy
from .rewrite import FULL, MARK, Rewritten, insert_casts, is_ours, strip

__all__ = ["device_of", "low_graph", "lower"]

# oneDNN's backward of an FP32 Deconvolution fails ("could not execute a primitive") wherever its weight
# is computed, as ours is by a cast; MXNet's own kernel, which float64 gets in 1-D and 2-D, does not.
_EMULATED_IN_FLOAT64 = ("Deconvolution", "_npx_deconvolution")


def device_of(ctx: mx.Context | None) -> str:
    """``"gpu"`` or ``"cpu"``: whose kernels a graph on ``ctx`` (default: the current context) meets."""
    kind = (ctx or mx.context.current_context()).device_type
    return "gpu" if kind == "gpu" else "cpu"


def low_graph(
    graph: Graph,
    policy: Policy,
    device: str,
    *,
    parameters: Collection[str] | None = None,
    stored_low: Collection[str] = (),
    keep_output_names: bool = False,
) -> tuple[Graph, Plan]:
    """Decide, rewrite, lower: what both doors do with a graph. See ``decide`` for the arguments.

    Casts of an earlier conversion are taken out first, so converting twice is converting once.
    """
    plan = decide(
        strip(graph),
        policy,
        device,
        parameters=parameters,
        stored_low=stored_low,
        keep_output_names=keep_output_names,
    )
    return lower(insert_casts(plan)), plan


@lru_cache(maxsize=None)
def _warn_of_slow_bfloat16(cpuinfo: str = "/proc/cpuinfo") -> None:
    """Once: without its instructions oneDNN emulates bfloat16 in FP32 ones."""
    try:
        with open(cpuinfo) as file:
            known = file.read()
    except OSError:
        return
    if "flags" in known and not ("avx512_bf16" in known or "amx_bf16" in known):
        warnings.warn(
            "this CPU has neither AVX512-BF16 nor AMX, so bfloat16 is emulated: expect no gain over FP32",
            stacklevel=4,
        )


def lower(rewritten: Rewritten) -> Graph:
    """The graph that runs on ``rewritten.plan.device``; takes ``rewritten.graph`` over.

    - float16 on a GPU: as it is; every low-precision node is a native kernel.
    - bfloat16 on a CPU: casts become ``amp_cast``, which oneDNN does; ``Cast`` truncates to bfloat16
      instead of rounding, and is slower.
    - float16 on a CPU: emulated, see ``_emulate``.
    """
    plan = rewritten.plan
    if plan.device == "gpu":
        return rewritten.graph
    if plan.policy.compute == "bfloat16":
        _warn_of_slow_bfloat16()
        return _with_amp_cast(rewritten.graph)
    return _emulate(rewritten)


def _with_amp_cast(graph: Graph) -> Graph:
    for node in list(graph.nodes()):
        if is_ours(node):
            node.op = "amp_cast"
        if node.op == "Convolution" and node.attrs.get("num_group", "1") != "1":
            _unblock(node.inputs[1].node)
    return graph


def _unblock(cast: Node) -> None:
    """Copy a grouped convolution's weight in front of its cast.

    MXNet's FP32 inference leaves weights in oneDNN's blocked layout, and oneDNN has no reorder from
    the grouped one to bfloat16 ("could not create a primitive descriptor for a reorder primitive").
    The copy is plain. (``Cast`` would do, but it truncates to bfloat16 instead of rounding.)
    """
    if is_ours(cast) and cast.inputs[0].node.is_variable:
        weight = cast.inputs[0]
        copy = Node("_copy", f"{weight.node.name}_plain", {MARK: "cast"}, [weight])
        cast.inputs[0] = Entry(copy)


def _emulate(rewritten: Rewritten) -> Graph:
    """Each low-precision node as a Tensor Core does it: read float16, compute in FP32, round once.

    Tensors between nodes are real float16, so gradients that meet are rounded, and summed in float16,
    as on a GPU. A node that only selects values (``Rule.exact``) passes its FP32 output straight to
    its one reader: rounding before or after it is the same, forward and backward. (Not where its input
    has another reader: MXNet adds the second gradient before it rounds.)
    """
    graph = rewritten.graph
    readers = graph.consumers()
    heads = set(graph.heads)
    outputs: dict[Node, list[Entry]] = {}
    for entry in dict.fromkeys([*readers, *graph.heads]):
        outputs.setdefault(entry.node, []).append(entry)
    half: dict[Entry, Entry] = {}
    wide: set[Entry] = set()
    for node in list(graph.nodes()):
        decision = rewritten.decision(node)
        low = decision if decision is not None and decision.low else None
        alone = all(len(readers[entry]) == 1 for entry in node.inputs)
        for position, entry in enumerate(node.inputs):
            if low and position not in low.rule.keep and entry not in wide:
                node.inputs[position] = _widen(half.get(entry, entry), node, position)
            else:
                node.inputs[position] = half.get(entry, entry)
        if not low:
            continue
        exact = alone and low.rule.exact
        for entry in outputs.get(node, ()):
            if entry.index in low.rule.keep_outputs:
                continue
            if exact and entry not in heads and _one_fp32_reader(readers[entry]):
                wide.add(entry)
            else:
                half[entry] = _round(entry, rewritten.plan.policy.compute, is_head=entry in heads)
    graph.heads = [half.get(entry, entry) for entry in graph.heads]
    for node in list(graph.nodes()):
        if node.op == "BatchNorm" and node.attrs.get("axis", "1") == "1":
            _reblock(node)
    return graph


def _reblock(norm: Node) -> None:
    """Give a BatchNorm behind a rounded convolution its input in oneDNN's blocked layout again.

    Casts leave the plain layout, in which BatchNorm is five times slower. A depthwise convolution with
    ones copies every value as it is, forward and backward, into the blocked one: a ResNet-50 step took
    1.93 times FP32's instead of 2.08 (on noise).
    """
    widened = norm.inputs[0]
    rounded = widened.node.inputs[0] if is_ours(widened.node) else widened
    source = rounded.node.inputs[0].node if is_ours(rounded.node) else None
    if source is None or source.op != "Convolution" or source.attrs["kernel"].count(",") != 1:
        return
    if source.attrs.get("layout", "NCHW") not in ("NCHW", "None"):
        return
    channels = source.attrs["num_filter"]
    ones = Node("_ones", f"{norm.name}_ones", {"shape": f"({channels}, 1, 1, 1)", "dtype": FULL, MARK: "copy"})
    attrs = {"kernel": "(1, 1)", "num_filter": channels, "num_group": channels, "no_bias": "True", MARK: "copy"}
    norm.inputs[0] = Entry(Node("Convolution", f"{norm.name}_blocked", attrs, [widened, Entry(ones)]))


def _one_fp32_reader(readers: list[tuple[Node, int]]) -> bool:
    return len(readers) == 1 and not _in_float64(readers[0][0])


def _in_float64(node: Node) -> bool:
    return node.op in _EMULATED_IN_FLOAT64 and node.attrs["kernel"].count(",") < 2


def _widen(entry: Entry, node: Node, position: int) -> Entry:
    dtype = "float64" if _in_float64(node) else FULL
    return Entry(Node("Cast", f"{node.name}_in{position}_to_{dtype}", {"dtype": dtype, MARK: "cast"}, [entry]))


def _round(entry: Entry, dtype: str, *, is_head: bool) -> Entry:
    node = entry.node
    suffix = f"_{entry.index}" if entry.index else ""
    cast = Node("Cast", f"{node.name}{suffix}_rounded", {"dtype": dtype, MARK: "cast"}, [entry])
    if is_head and entry.index == 0:
        cast.attrs[MARK] = "head"
        cast.name, node.name = node.name, f"{node.name}_{FULL}"
    return Entry(cast)

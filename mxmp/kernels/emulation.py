"""float16 on a CPU, where MXNet has no float16 kernels for matrix operators: emulation of a Tensor Core.

Each low-precision operator reads float16, computes in FP32 and rounds its result once, forward and backward. The
tensors between operators are real float16. So where a tensor has several readers, their gradients are rounded and then
summed in float16, as on a GPU. Afterwards casts that change no value are skipped, to save time.
"""

from __future__ import annotations

from typing import Sequence

from ..precision.casts import APART, FULL, MARK
from ..precision.graph import Entry, Node
from ..precision.rules import is_volume
from .workaround import Fitting

__all__ = [
    *("clamp_to_lowest", "compute_in_float64", "failing_deconvolutions", "low_nodes", "poolings_of_padding"),
    *("round_every_node", "selecting_nodes", "skip_needless_roundings"),
]


def low_nodes(fitting: Fitting) -> list[Node]:
    """Return the operators that compute in float16, by the plan."""
    return list(fitting.low)


def round_every_node(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Emulate float16 in each low-precision operator: cast its inputs to FP32, and its outputs to float16, in place.

    Inputs and outputs that its rule keeps in FP32 (``Rule.keep``, ``Rule.keep_outputs``) get no cast. A rounded output
    that is an output of the graph keeps its name: the cast gets the name. Fills ``fitting.widenings`` and
    ``fitting.roundings``.
    """
    graph, low = fitting.graph, fitting.low
    heads = set(graph.heads)
    outputs: dict[Node, list[Entry]] = {}
    for entry in dict.fromkeys([*graph.consumers(), *graph.heads]):
        outputs.setdefault(entry.node, []).append(entry)
    half: dict[Entry, Entry] = {}
    for node in list(graph.nodes()):
        rule = low.get(node)
        for position, entry in enumerate(node.inputs):
            read = half.get(entry, entry)
            widen = rule is not None and position not in rule.keep
            node.inputs[position] = _widen(fitting, read, node, position) if widen else read
        for entry in outputs.get(node, ()) if rule is not None else ():
            if entry.index not in rule.keep_outputs:  # type: ignore[union-attr]
                half[entry] = _round(fitting, entry, is_head=entry in heads)
    graph.heads = [half.get(entry, entry) for entry in graph.heads]


def _widen(fitting: Fitting, entry: Entry, node: Node, position: int) -> Entry:
    """Return the output of a new cast to FP32 of ``entry``, for input ``position`` of ``node`` alone; note the cast.

    Each reader needs its own cast. With a shared one, MXNet would sum the gradients of all readers in FP32 and round
    the sum, where a GPU rounds each gradient.
    """
    name = f"{node.name}_in{position}_to_{FULL}"
    cast = Node("Cast", name, {"dtype": FULL, MARK: "cast", APART: name}, [entry])
    fitting.widenings.add(cast)
    return Entry(cast)


def _round(fitting: Fitting, entry: Entry, *, is_head: bool) -> Entry:
    """Return the output of a new cast to float16 of an operator's FP32 output ``entry``; note the cast.

    Where ``entry`` is the first output of its operator and an output of the graph (``is_head``), the cast takes the
    operator's name, so that the graph's outputs keep their names; the operator becomes ``NAME_float32``.
    """
    node, dtype = entry.node, fitting.casted.compute
    suffix = f"_{entry.index}" if entry.index else ""
    cast = Node("Cast", f"{node.name}{suffix}_rounded", {"dtype": dtype, MARK: "cast"}, [entry])
    if is_head and entry.index == 0:
        cast.attrs[MARK] = "head"
        cast.name, node.name = node.name, f"{node.name}_{FULL}"
    fitting.roundings.setdefault(node, []).append(cast)
    return Entry(cast)


def failing_deconvolutions(fitting: Fitting) -> list[Node]:
    """Return the 1-D and 2-D deconvolutions that compute in low precision.

    Their backward fails in oneDNN, as their weight is the output of a cast. 3-D ones stay in FP32 by the rules.
    """
    operators = ("Deconvolution", "_npx_deconvolution")
    return [node for node in fitting.low if node.op in operators and not is_volume(node.attrs)]


def compute_in_float64(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Cast the inputs of these deconvolutions to float64 instead of FP32, in place.

    MXNet computes float64 by its own kernel, which oneDNN's fault does not concern. The result is rounded to float16
    as before.
    """
    for node in nodes:
        for cast in (entry.node for entry in node.inputs if entry.node in fitting.widenings):
            name = f"{cast.name[: -len(FULL)]}float64"
            cast.name, cast.attrs["dtype"], cast.attrs[APART] = name, "float64", name


def poolings_of_padding(fitting: Fitting) -> list[Node]:
    """Return the low-precision max poolings in which a window may cover nothing but padding.

    Only ``pooling_convention="full"``, which rounds the number of windows up, has such windows.
    """

    def may(node: Node) -> bool:
        is_max = node.op in ("Pooling", "_npx_pooling") and node.attrs.get("pool_type", "max") == "max"
        return is_max and node.attrs.get("pooling_convention") == "full"

    return [node for node in fitting.low if may(node)]


def clamp_to_lowest(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Raise outputs of these poolings that are below -65504, float16's lowest value, to it before they are rounded.

    For a window in padding alone the FP32 kernel returns FP32's lowest value, which a cast would turn into -inf.
    """
    for node in nodes:
        for cast in fitting.roundings.get(node, ()):
            name = cast.name if cast.attrs[MARK] == "head" else node.name
            attrs = {"scalar": "-65504.0", MARK: "copy"}
            cast.inputs[0] = Entry(
                Node("_maximum_scalar", f"{name}_of_{fitting.casted.compute}", attrs, list(cast.inputs))
            )


def selecting_nodes(fitting: Fitting) -> list[Node]:
    """Return the low-precision operators whose output values are a selection of the input values.

    These are the operators with ``Rule.exact``, such as relu, reshape and concat. They give the same numbers whether
    values are rounded before or after them.
    """
    return [node for node in fitting.roundings if fitting.low[node].exact]


def skip_needless_roundings(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Take out, in place, the cast to float16 behind each of these operators, and the cast back to FP32 after it.

    The operators (see ``selecting_nodes``) return FP32 values that float16 holds exactly, and the casts in front of
    them round their gradients, so no number changes. An output with several readers, or one that is an output of the
    graph, keeps its casts. A cast to FP32 that is not of the emulation stays, and reads FP32.
    """
    readers = fitting.graph.consumers()
    heads = set(fitting.graph.heads)
    for node in nodes:
        for rounding in fitting.roundings[node]:
            users = readers.get(Entry(rounding), [])
            if len(users) == 1 and Entry(rounding) not in heads and users[0][0].attrs["dtype"] == FULL:
                widening, position = users[0]
                if widening in fitting.widenings:
                    ((widening, position),) = readers[Entry(widening)]
                widening.inputs[position] = rounding.inputs[0]

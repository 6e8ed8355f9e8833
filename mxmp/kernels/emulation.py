"""float16 on a CPU, which has no float16 matrix kernels: each operator as a Tensor Core computes it.

Each low node reads float16, computes in FP32 and rounds once, forward and backward. The tensors between nodes are real
float16, so gradients that meet are rounded, and summed in float16, as on a GPU. Afterwards the graph is made faster
without a change of any value.
"""

from __future__ import annotations

from typing import Sequence

from ..precision.casts import APART, FULL, MARK
from ..precision.graph import Entry, Node
from ..precision.rules import is_volume
from .workaround import Fitting

__all__ = [
    *("failing_deconvolutions", "in_float64", "low_nodes", "maxima_of_padding", "not_below_lowest"),
    *("round_every_node", "selecting_nodes", "skip_needless_roundings"),
]


def low_nodes(fitting: Fitting) -> list[Node]:
    """Return the operators that compute in float16."""
    return list(fitting.low)


def round_every_node(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Widen what each low node reads, and round what it returns."""
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
    """Return a cast for this reader alone: of readers that share one, MXNet sums the gradients before it rounds."""
    name = f"{node.name}_in{position}_to_{FULL}"
    cast = Node("Cast", name, {"dtype": FULL, MARK: "cast", APART: name}, [entry])
    fitting.widenings.add(cast)
    return Entry(cast)


def _round(fitting: Fitting, entry: Entry, *, is_head: bool) -> Entry:
    node, dtype = entry.node, fitting.casted.compute
    suffix = f"_{entry.index}" if entry.index else ""
    cast = Node("Cast", f"{node.name}{suffix}_rounded", {"dtype": dtype, MARK: "cast"}, [entry])
    if is_head and entry.index == 0:
        cast.attrs[MARK] = "head"
        cast.name, node.name = node.name, f"{node.name}_{FULL}"
    fitting.roundings.setdefault(node, []).append(cast)
    return Entry(cast)


def failing_deconvolutions(fitting: Fitting) -> list[Node]:
    """Return the low 1-D and 2-D deconvolutions. MXNet's own kernel, which float64 gets, takes no 3-D one."""
    operators = ("Deconvolution", "_npx_deconvolution")
    return [node for node in fitting.low if node.op in operators and not is_volume(node.attrs)]


def in_float64(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Compute in float64, by MXNet's own kernel."""
    for node in nodes:
        for cast in (entry.node for entry in node.inputs if entry.node in fitting.widenings):
            name = f"{cast.name[: -len(FULL)]}float64"
            cast.name, cast.attrs["dtype"], cast.attrs[APART] = name, "float64", name


def maxima_of_padding(fitting: Fitting) -> list[Node]:
    """Return the low max poolings of which a window can lie in padding alone."""

    def may(node: Node) -> bool:
        is_max = node.op in ("Pooling", "_npx_pooling") and node.attrs.get("pool_type", "max") == "max"
        return is_max and node.attrs.get("pooling_convention") == "full"

    return [node for node in fitting.low if may(node)]


def not_below_lowest(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Take float16's lowest value for anything below it, in front of the rounding."""
    for node in nodes:
        for cast in fitting.roundings.get(node, ()):
            name = cast.name if cast.attrs[MARK] == "head" else node.name
            attrs = {"scalar": "-65504.0", MARK: "copy"}
            cast.inputs[0] = Entry(
                Node("_maximum_scalar", f"{name}_of_{fitting.casted.compute}", attrs, list(cast.inputs))
            )


def selecting_nodes(fitting: Fitting) -> list[Node]:
    """Return the low nodes that only select values (``Rule.exact``)."""
    return [node for node in fitting.roundings if fitting.low[node].exact]


def skip_needless_roundings(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Hand the FP32 output of such a node straight to its one reader: rounding before or after it is the same."""
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

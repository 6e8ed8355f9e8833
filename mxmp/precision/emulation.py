"""float16 on a CPU, which has no float16 matrix kernels: each operator as a Tensor Core computes it."""

from __future__ import annotations

from .casts import APART, FULL, MARK, CastGraph
from .graph import Entry, Graph, Node
from .onednn import blocked_batch_norms
from .rules import is_volume

__all__ = ["emulate"]

# oneDNN's backward of an FP32 Deconvolution fails ("could not execute a primitive") wherever its weight
# is computed, as ours is by a cast; MXNet's own kernel, which float64 gets in 1-D and 2-D, does not.
_IN_FLOAT64 = ("Deconvolution", "_npx_deconvolution")


def emulate(casted: CastGraph) -> Graph:
    """The graph for a CPU's FP32 kernels; takes ``casted`` over.

    Emulated first, then made faster without a change of any value.
    """
    emulation = _Emulation(casted)
    emulation.round_every_node()
    emulation.skip_needless_roundings()
    blocked_batch_norms(casted.graph)
    return casted.graph


class _Emulation:
    """The passes, and the casts that they put around each low node."""

    def __init__(self, casted: CastGraph) -> None:
        self._casted = casted
        self._graph = casted.graph
        self._widened: set[Node] = set()
        self._rounded: dict[Node, list[Node]] = {}

    def round_every_node(self) -> None:
        """Each low node reads float16, computes in FP32 and rounds once, forward and backward.

        Tensors between nodes are real float16, so gradients that meet are rounded, and summed in
        float16, as on a GPU.
        """
        graph, low = self._graph, self._casted.low
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
                node.inputs[position] = self._widen(read, node, position) if widen else read
            for entry in outputs.get(node, ()) if rule is not None else ():
                if entry.index not in rule.keep_outputs:  # type: ignore[union-attr]
                    half[entry] = self._round(entry, is_head=entry in heads)
        graph.heads = [half.get(entry, entry) for entry in graph.heads]

    def skip_needless_roundings(self) -> None:
        """A node that only selects values (``Rule.exact``) hands its FP32 output straight to its one reader.

        Rounding before or after it is the same, forward and backward.
        """
        readers = self._graph.consumers()
        heads = set(self._graph.heads)
        for node, roundings in self._rounded.items():
            if not self._casted.low[node].exact:
                continue
            for rounding in roundings:
                users = readers.get(Entry(rounding), [])
                if len(users) == 1 and Entry(rounding) not in heads and users[0][0].attrs["dtype"] == FULL:
                    widening, position = users[0]
                    if widening in self._widened:
                        ((widening, position),) = readers[Entry(widening)]
                    widening.inputs[position] = rounding.inputs[0]

    def _widen(self, entry: Entry, node: Node, position: int) -> Entry:
        """A cast for this reader alone: of those that share one, MXNet sums the gradients before it rounds."""
        dtype = "float64" if node.op in _IN_FLOAT64 and not is_volume(node.attrs) else FULL
        name = f"{node.name}_in{position}_to_{dtype}"
        cast = Node("Cast", name, {"dtype": dtype, MARK: "cast", APART: name}, [entry])
        self._widened.add(cast)
        return Entry(cast)

    def _round(self, entry: Entry, *, is_head: bool) -> Entry:
        node, dtype = entry.node, self._casted.compute
        if _starts_from_lowest(node):
            lowest = {"scalar": "-65504.0", MARK: "copy"}
            entry = Entry(Node("_maximum_scalar", f"{node.name}_of_{dtype}", lowest, [entry]))
        suffix = f"_{entry.index}" if entry.index else ""
        cast = Node("Cast", f"{node.name}{suffix}_rounded", {"dtype": dtype, MARK: "cast"}, [entry])
        if is_head and entry.index == 0:
            cast.attrs[MARK] = "head"
            cast.name, node.name = node.name, f"{node.name}_{FULL}"
        self._rounded.setdefault(node, []).append(cast)
        return Entry(cast)


def _starts_from_lowest(node: Node) -> bool:
    """Whether a window of a maximum can lie wholly in padding: it gives the lowest value of the dtype.

    FP32's would round to -inf, and the next product to NaN.
    """
    is_max = node.op in ("Pooling", "_npx_pooling") and node.attrs.get("pool_type", "max") == "max"
    return is_max and node.attrs.get("pooling_convention") == "full"

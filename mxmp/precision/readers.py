"""Which operators compute in FP32 because of what reads them: digits that low precision would take from their readers.

Rules say what an operator is safe in. Here the graph is read from its outputs back: a sigmoid is safe in low precision,
but not in front of an FP32 loss that reads 1 - p; a constant factor is, but not where the output's gradient overflows.
"""

from __future__ import annotations

from typing import Mapping

from .draft import TIMES, Draft, deciding_inputs, is_square
from .graph import Entry, Graph, Node, Reader
from .rules import Kind, Rule

BEHIND = "nothing behind it computes in low precision, and a cast in front of it costs no more than one behind"
_RESIDUAL = "one term is FP32, and FP32 alone reads the sum: a cast of the other term costs no more than one behind"
_DISTANCE = "it cancels in a sum with squares of its operands, as in a² + b² - 2ab"
_SUMS = frozenset(
    ["broadcast_add", "broadcast_sub", "elemwise_add", "elemwise_sub", "add_n", "_npi_add", "_npi_subtract"]
)
_PRODUCTS = frozenset(["FullyConnected", "dot", "batch_dot", "_np_dot", "_npi_matmul", "_npi_tensordot"])
_SQUARES = frozenset(
    ["square", "_npi_square", "_power_scalar", "_npi_power_scalar", "_square_sum", "norm", "_npi_norm"]
)
_Readers = Mapping[Node, "list[Reader]"]


def raised(graph: Graph, draft: Draft) -> dict[Node, str]:
    """Return the operators in low precision that are to be FP32 because of their readers, each with the reason."""
    walk = _Walk(graph, draft)
    nodes = [node for node in graph.nodes() if not node.is_variable]
    fine = _fine(nodes, draft)
    for node in reversed(nodes):
        walk.visit(node, fine)
    for node in filter(walk.waits, nodes):
        if any(walk.is_full(entry) for entry in deciding_inputs(node, draft.rules[node])):
            walk.found[node] = "it follows its inputs, and one of them is FP32"
    return walk.found


class _Walk:
    """One way through a graph, from the outputs back: ``found`` has the operators that must be FP32, and why."""

    def __init__(self, graph: Graph, draft: Draft) -> None:
        self.found: dict[Node, str] = {}
        self._draft = draft
        self._readers = {  # an index, a condition or a shape is not read as a value
            node: [(user, position) for user, position in users if position not in draft.rules[user].keep]
            for node, users in graph.readers().items()
        }
        heads = {entry.node for entry in graph.heads}
        self._full_heads, self._low_heads = (heads, set()) if draft.policy.output == "float32" else (set(), heads)
        self._not_last = heads if draft.options.is_body else self._low_heads  # behind a body comes its next iteration
        # Of ``dense -> x * 2 -> max -> exp`` all are last: no matrix operator behind them is low.
        self._last: set[Node] = set()
        # Only FP32 reads what ``max`` returns, but it needs no cast of its own: it takes the dtype of ``x * 2``.
        self._through: set[Node] = set()
        # ``max`` has few results, so the cast stays behind it, and ``x * 2`` in front of it stays low.
        self._shrunk: set[Node] = set()

    def visit(self, node: Node, fine: Mapping[Node, str]) -> None:
        """Decide for ``node`` by what was decided for its readers; ``fine`` are the operators of ``_fine``."""
        draft, rule = self._draft, self._draft.rules[node]
        users = [user for user, _ in self._readers.get(node, ())]
        if node not in self._not_last and all(user in self._last and not self._is_low_matrix(user) for user in users):
            self._last.add(node)
        if not draft.decisions[node].low:
            return
        if draft.kinds.get(node) is Kind.LOW and node.op in _PRODUCTS and node.op not in draft.policy.low_ops:
            self.found.update(dict.fromkeys(_distance(node, self._readers, draft), _DISTANCE))
        if draft.kinds.get(node) is not Kind.FOLLOW or rule.kind is not Kind.FOLLOW or node in self.found:
            return
        if node in fine and (node in self._full_heads or any(map(self._reads_full, self._readers.get(node, ())))):
            self.found[node] = f"{fine[node]}, and FP32 reads it"
        # Behind the last matrix operator, rounding what only FP32 reads, or its gradient, saves nothing. What rounds
        # nothing stays: its values are rounded already. So do sums of several tensors: they would need a cast for each.
        elif self._is_read_full_alone(node):
            if self._adds_to_fp32(node):
                self.found[node] = _RESIDUAL
            elif _rounds_nothing(node, rule) or rule.shrinks or not _is_cheaper_before(node, draft, fine):
                self._through.add(node)
                if rule.shrinks or not self._shrunk.isdisjoint(users):
                    self._shrunk.add(node)
            elif node in self._last and self._shrunk.isdisjoint(users):
                self.found[node] = BEHIND

    def waits(self, node: Node) -> bool:
        """Return whether ``node``, behind the last matrix operator, takes the dtype of what it reads."""
        return node in self._through and node in self._last

    def is_full(self, entry: Entry) -> bool:
        node = entry.node
        if node.is_variable or node in self.found:
            return not node.is_variable
        return not self._draft.decisions[node].low and not self._draft.norm_reads_float16(node, 0)

    def _reads_full(self, reader: tuple[Node, int]) -> bool:
        draft = self._draft
        return reader[0] in self.found or not (draft.wants_low(*reader) or draft.norm_reads_float16(*reader))

    def _is_read_full_alone(self, node: Node) -> bool:
        """Return whether all that reads ``node`` does so in FP32, perhaps behind what is not worth a cast."""
        readers = self._readers.get(node, ())
        return node not in self._low_heads and all(self._reads_full(r) or r[0] in self._through for r in readers)

    def _adds_to_fp32(self, node: Node) -> bool:
        """Return whether ``node`` adds to what FP32 computes at most one term in low precision, as behind LayerNorm."""
        terms = dict.fromkeys(deciding_inputs(node, self._draft.rules[node]))
        count = sum(map(self.is_full, terms))
        return node.op in _SUMS and count > 0 and len(terms) - count <= 1

    def _is_low_matrix(self, node: Node) -> bool:
        """Return whether ``node`` is in low precision whatever reads it: a matrix operator, or by a plan."""
        draft = self._draft
        return draft.decisions[node].low and draft.kinds.get(node) is not Kind.FOLLOW and node not in self.found


def _fine(nodes: list[Node], draft: Draft) -> dict[Node, str]:
    """Return the operators from whose values rounding takes what matters (``Rule.loses``), each with what it takes."""
    found: dict[Node, str] = {}
    for node in nodes:
        rule = draft.rules[node]
        lost = rule.loses(node.attrs, draft.policy.compute)
        if lost:
            found[node] = lost
        # It passes such values on: it moves them, or computes from nothing else (1 - p).
        elif rule.kind is Kind.FOLLOW:
            read = dict.fromkeys(deciding_inputs(node, rule))
            sources = [found[entry.node] for entry in read if entry.node in found]
            if sources and (rule.exact or len(read) == 1):
                found[node] = "it passes on values near a limit or a constant"
    return found


def _rounds_nothing(node: Node, rule: Rule) -> bool:
    return rule.exact or (node.op == "Activation" and node.attrs.get("act_type") == "relu")


def _is_cheaper_before(node: Node, draft: Draft, fine: Mapping[Node, str]) -> bool:
    """Return whether casts in front of ``node`` cost no more than one behind it, or are worth it: in a product."""
    read = set(deciding_inputs(node, draft.rules[node]))
    return len(read) == 1 or node.op in TIMES or any(entry.node in fine for entry in read)


def _distance(product: Node, readers: _Readers, draft: Draft) -> list[Node]:
    """Return ``product`` and what leads from it to an FP32 sum with squares of its operands, or an empty list."""
    operands = {_moved_from(entry, draft) for entry in product.inputs[:2]}
    came_from: dict[Node, Node | None] = {product: None}
    stack = [product]
    while stack:
        node = stack.pop()
        for user, position in readers.get(node, ()):
            if user.op in _SUMS:
                others = [entry for i, entry in enumerate(user.inputs) if i != position]
                # Attention with a mask or a bias is no such sum: these do not depend on queries and keys.
                if not draft.decisions[user].low and any(_has_square_of(entry, operands, draft) for entry in others):
                    return _way_back(node, came_from)
            elif user not in came_from and _computes_from_one(user, draft):
                came_from[user] = node
                stack.append(user)
    return []


def _computes_from_one(node: Node, draft: Draft) -> bool:
    rule = draft.rules[node]
    return rule.kind is Kind.FOLLOW and len(set(deciding_inputs(node, rule))) == 1


def _way_back(node: Node | None, came_from: Mapping[Node, Node | None]) -> list[Node]:
    way = []
    while node is not None:
        way.append(node)
        node = came_from[node]
    return way


def _moved_from(entry: Entry, draft: Draft) -> Entry:
    """Return the tensor whose values ``entry`` has, perhaps moved, negated or some of them zero (``Rule.exact``)."""
    while not entry.node.is_variable and draft.rules[entry.node].exact and len(entry.node.inputs) == 1:
        entry = entry.node.inputs[0]
    return entry


def _has_square_of(entry: Entry, operands: set[Entry], draft: Draft) -> bool:
    """Return whether ``entry`` is computed from the square of one of ``operands``, with no matrix product between."""
    seen: set[tuple[Entry, bool]] = set()
    stack = [(entry, False)]
    while stack:
        entry, squared = stack.pop()
        if squared and entry in operands:
            return True
        node = entry.node
        if (entry, squared) in seen or node.is_variable or draft.rules[node].kind is Kind.LOW:
            continue
        seen.add((entry, squared))
        squared = squared or node.op in _SQUARES or is_square(node)
        stack += [(each, squared) for each in node.inputs]
    return False

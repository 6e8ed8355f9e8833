"""Which operators compute in FP32 because of what reads them: digits that low precision would take from their readers.

Rules say what an operator is safe in. Here the graph is read from its outputs back: a sigmoid is safe in low precision,
but not in front of an FP32 loss that reads 1 - p; a constant factor is, but not where the output's gradient overflows.
"""

from __future__ import annotations

from typing import Mapping, Protocol

from ..policy import Policy
from .graph import Entry, Graph, Node
from .plan import Decision
from .rules import Kind, Rule

BEHIND = "nothing behind it computes in low precision, and a cast in front of it costs no more than one behind"
_DISTANCE = "it cancels in a sum with squares of its operands, as in a² + b² - 2ab"
_SUMS = frozenset(
    ["broadcast_add", "broadcast_sub", "elemwise_add", "elemwise_sub", "add_n", "_npi_add", "_npi_subtract"]
)
_PRODUCTS = frozenset(["FullyConnected", "dot", "batch_dot", "_np_dot", "_npi_matmul", "_npi_tensordot"])
_SQUARES = frozenset(
    ["square", "_npi_square", "_power_scalar", "_npi_power_scalar", "_square_sum", "norm", "_npi_norm"]
)
_TIMES = frozenset(["elemwise_mul", "broadcast_mul", "_npi_multiply"])
_Readers = Mapping[Node, "list[tuple[Node, int]]"]


class Draft(Protocol):
    """The decisions so far, of ``decide``; ``kinds`` has the operators for which the rules decided."""

    policy: Policy
    rules: dict[Node, Rule]
    kinds: dict[Node, Kind]
    decisions: dict[Node, Decision]

    def wants_low(self, node: Node, position: int) -> bool: ...
    def norm_reads_float16(self, node: Node, position: int) -> bool: ...


def deciding_inputs(node: Node, rule: Rule) -> list[Entry]:
    """Return the inputs of ``node`` that decide its dtype: those in neither ``Rule.keep`` nor ``Rule.params``."""
    return [entry for position, entry in enumerate(node.inputs) if position not in (*rule.keep, *rule.params)]


def raised(graph: Graph, draft: Draft, *, is_body: bool) -> dict[Node, str]:
    """Return the operators in low precision that are to compute in FP32 because of their readers, each with the reason.

    - One whose values matter by their last digits (``_fine``), where anything reads these in FP32.
    - One behind the last matrix operator, where all that reads it is FP32: rounding its output, or the output's
      gradient, would save nothing. Operators that round nothing stay, as their values are rounded already, and sums
      of several tensors, which would cost a cast for each.
    - A product that cancels against squares of its operands (``_distance``).

    Behind a loop's body (``is_body``) comes its next iteration, with matrix operators.
    """
    nodes = [node for node in graph.nodes() if not node.is_variable]
    readers = _readers(graph, draft)
    fine = _fine(nodes, draft)
    heads = {entry.node for entry in graph.heads}
    low_heads = heads if draft.policy.output != "float32" else set()
    found: dict[Node, str] = {}
    last: set[Node] = set()  # behind which no matrix operator computes in low precision
    through: set[Node] = set()  # what only FP32 reads, and is not worth casts of its own
    shrunk: set[Node] = set()  # in front of which a cast costs more than behind
    for node in reversed(nodes):
        users, kind = readers.get(node, []), draft.kinds.get(node)
        reads_full = [user in found or not _reads_low(draft, user, position) for user, position in users]
        any_full = any(reads_full) or node in heads - low_heads
        all_full = all(full or user in through for full, (user, _) in zip(reads_full, users)) and node not in low_heads
        ends = node not in (heads if is_body else low_heads)
        if ends and all(u in last and (u in found or not _is_low_matrix(draft, u)) for u, _ in users):
            last.add(node)
        if not draft.decisions[node].low:
            continue
        if kind is Kind.LOW and node.op in _PRODUCTS and node.op not in draft.policy.low_ops:
            found.update(dict.fromkeys(_distance(node, readers, draft), _DISTANCE))
        if kind is not Kind.FOLLOW or draft.rules[node].kind is not Kind.FOLLOW or node in found:
            continue
        light = draft.rules[node].exact or draft.rules[node].shrinks
        if node in fine and any_full:
            found[node] = f"{fine[node]}, and FP32 reads it"
        elif all_full and (light or not _is_cheaper_before(node, draft, fine)):
            through.add(node)
            if draft.rules[node].shrinks or any(user in shrunk for user, _ in users):
                shrunk.add(node)
        elif all_full and node in last and not any(user in shrunk for user, _ in users):
            found[node] = BEHIND
    for node in nodes:  # in FP32 it reads what is FP32 already
        if node in through & last and any(
            _is_full(draft, entry, found) for entry in deciding_inputs(node, draft.rules[node])
        ):
            found[node] = "it follows its inputs, and one of them is FP32"
    return found


def _readers(graph: Graph, draft: Draft) -> dict[Node, list[tuple[Node, int]]]:
    """Return what reads the values of each node; an index, a condition or a shape is none of them."""
    found: dict[Node, list[tuple[Node, int]]] = {}
    for entry, users in graph.consumers().items():
        found.setdefault(entry.node, []).extend((u, i) for u, i in users if i not in draft.rules[u].keep)
    return found


def _reads_low(draft: Draft, node: Node, position: int) -> bool:
    return draft.wants_low(node, position) or draft.norm_reads_float16(node, position)


def _is_low_matrix(draft: Draft, node: Node) -> bool:
    """Return whether ``node`` computes in low precision whatever reads it: a matrix operator, or by a plan."""
    return draft.decisions[node].low and draft.kinds.get(node) is not Kind.FOLLOW


def _is_full(draft: Draft, entry: Entry, found: Mapping[Node, str]) -> bool:
    node = entry.node
    if node.is_variable or node in found:
        return not node.is_variable
    return not draft.decisions[node].low and not draft.norm_reads_float16(node, 0)


def _fine(nodes: list[Node], draft: Draft) -> dict[Node, str]:
    """Return the operators whose values lose to rounding what matters of them (``Rule.loses``), each with what that is.

    With them those that pass such values on: they move them, or compute from nothing else (1 - p).
    """
    found: dict[Node, str] = {}
    for node in nodes:
        rule = draft.rules[node]
        lost = rule.loses(node.attrs, draft.policy.compute)
        if lost:
            found[node] = lost
        elif rule.kind is Kind.FOLLOW:
            read = dict.fromkeys(deciding_inputs(node, rule))
            sources = [found[entry.node] for entry in read if entry.node in found]
            if sources and (rule.exact or len(read) == 1):
                found[node] = "it passes on values near a limit or a constant"
    return found


def _is_cheaper_before(node: Node, draft: Draft, fine: Mapping[Node, str]) -> bool:
    """Return whether casts in front of ``node`` cost no more than one behind it, or are worth it: in a product."""
    read = set(deciding_inputs(node, draft.rules[node]))
    return len(read) == 1 or node.op in _TIMES or any(entry.node in fine for entry in read)


def is_square(node: Node) -> bool:
    """Return whether ``node`` multiplies a tensor by itself."""
    return node.op in _TIMES and node.inputs[0] == node.inputs[1]


def _distance(product: Node, readers: _Readers, draft: Draft) -> list[Node]:
    """Return ``product`` and what leads from it to an FP32 sum with squares of its operands, or an empty list.

    Attention with a mask or a bias is no such sum: these do not depend on queries and keys.
    """
    operands = {_moved_from(entry, draft) for entry in product.inputs[:2]}
    paths = [[product]]
    while paths:
        path = paths.pop()
        for user, position in readers.get(path[-1], []):
            if user.op in _SUMS:
                others = [entry for i, entry in enumerate(user.inputs) if i != position]
                if not draft.decisions[user].low and any(_has_square_of(entry, operands, draft) for entry in others):
                    return path
            elif draft.rules[user].kind is Kind.FOLLOW and len(set(deciding_inputs(user, draft.rules[user]))) == 1:
                paths.append([*path, user])
    return []


def _moved_from(entry: Entry, draft: Draft) -> Entry:
    """Return the tensor whose values ``entry`` has in another order or shape."""
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

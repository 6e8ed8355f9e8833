"""What the readers of a tensor need of it, and where low precision would take it: there FP32 must compute.

A dataflow analysis, as in a compiler, on sets of ``Need``. What an operator does are columns of its row in
``rule_table.py``, so that none is named here::

    made(n)   = makes(n) | passes(n) & made(inputs of n)              what rounding n may take: 1 - p, where p is 0.9999
    needed(n) = needs(r) | passes(r) & needed(r), for all readers r   what they need: a logarithm, small values
    FP32 computes n if made(n) & needed(n)

Two rounds are enough for the state of a loop. Only FP32 readers need ``DISTANCE``: ``near`` has what that concerns, and
``cost.py`` knows its readers. And many roundings of one state add up, whoever reads it.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Mapping

from .graph import Entry, Node
from .operators import Operators
from .rule import Kind, Need, Role, Rule, is_exact

_WHAT = {
    Need.SMALL: "needs the size of its smallest values",
    Need.EXACT: "needs every digit of it, as it is computed from data and constants",
    Need.CANCELS: "takes it off squares of its operands, as in a² + b² - 2ab, and what is left is small",
}
# So many roundings of a state are many: unrolled loops of 50 steps lose digits, and the deepest stage of a well-known
# residual network, ResNeSt-269, has 47 sums.
MANY = 56
_ROUNDING = (Role.SUM, Role.TIMES, Role.SCALE)
# A constant such as 0.99 that low precision rounds makes the same error in each step.
_ROUNDED_CONSTANT = 8


class Needs:
    """The needs of one graph, and those in its bodies."""

    def __init__(self, operators: Operators) -> None:
        self._operators = operators
        self._rules, self._nodes = operators.rules, operators.graph.nodes()
        self._heads = [entry.node for entry in operators.graph.heads]
        self.full: dict[Node, str] = {}  # operators that must compute in FP32, and which reader needs what
        self.near: dict[Node, str] = {}  # operators that must do so where FP32 reads them, and what would be lost
        self.within = {node: [(body, Needs(inner)) for body, inner in each] for node, each in operators.within.items()}
        self._made: dict[Node, int] = {}
        # What is needed of a node, each with the operator that needs it.
        self.needed: dict[Node, list[tuple[int, Node]]] = {}

    def analyse(self) -> Needs:
        """Find what must compute in FP32; return this object."""
        self.forward({})
        self.backward([])
        self.conclude()
        return self

    # -- what values are --------------------------------------------------------------------------------

    def forward(self, given: Mapping[Node, int]) -> int:
        """Record what each node's values are, of variables also what is ``given``; return what the outputs' are."""
        made = self._made
        for node in self._nodes:
            own = self._operators.makes[node]
            if node.is_variable:
                own |= given.get(node, 0)
            elif node in self.within:
                own |= self._forward_bodies(node)
            else:
                passed = self._passes(node)
                if passed:
                    for entry in self._values(node):
                        own |= made[entry.node] & passed
            made[node] = own
        return reduce(or_, map(made.__getitem__, self._heads), 0)

    def _forward_bodies(self, node: Node) -> int:
        found = 0
        for body, inner in self.within[node]:
            outer = {variable: self._made[node.inputs[at].node] for variable, at in body.positions.items()}
            state = inner.forward(outer)  # what the next iteration begins with
            found |= inner.forward({v: each if v in body.castable else each | state for v, each in outer.items()})
        return found

    def _passes(self, node: Node) -> int:
        """Return what the values of ``node`` are because its inputs' are."""
        rule = self._rules[node]
        # A learned bias moves small values away from zero, and says that the product is a feature, and no position.
        return 0 if rule.role is Role.MATRIX and len(node.inputs) > 2 else rule.passes

    def _values(self, node: Node) -> list[Entry]:
        """Return the inputs of ``node`` that are no indices, lengths or conditions."""
        keep = self._rules[node].keep
        return [entry for at, entry in enumerate(node.inputs) if at not in keep] if keep else [*node.inputs]

    # -- what readers need ------------------------------------------------------------------------------

    def backward(self, needed: list[tuple[int, Node]]) -> None:
        """Record what is needed of each node, of the outputs also what is ``needed``."""
        for head in self._heads:
            for need, reader in needed:
                self._ask(head, need, reader)
        cancelling = self._cancelling()
        for node in reversed(self._nodes):
            if node in self.within:
                self._backward_bodies(node)
            elif not node.is_variable:
                self._hand_on(node)
                rule = self._rules[node]
                if rule.needs:
                    for at, entry in enumerate(node.inputs):
                        if not rule.needs_of or at in rule.needs_of:
                            self._ask(entry.node, rule.needs, node)
                for at in cancelling.get(node, ()):
                    self._ask(node.inputs[at].node, Need.CANCELS, node)

    def _hand_on(self, node: Node) -> None:
        passed = self._passes(node) | (Need.CANCELS if self._computes_from_one(node) else 0)
        for need, reader in self.needed.get(node, ()):
            if need & passed:
                for entry in self._values(node):
                    self._ask(entry.node, need & passed, reader)

    def _backward_bodies(self, node: Node) -> None:
        for body, inner in self.within[node]:
            inner.backward(self.needed.get(node, []))
            states = [each for each in body.positions if each not in body.castable]
            inner.backward([each for state in states for each in inner.needed.get(state, ())])
            for variable, at in body.positions.items():
                for need, reader in inner.needed.get(variable, ()):
                    self._ask(node.inputs[at].node, need, reader)

    def _ask(self, node: Node, need: int, reader: Node) -> None:
        found = self.needed.setdefault(node, [])
        new = need & ~reduce(or_, (each for each, _ in found), 0)
        if new:
            found.append((new, reader))

    def _cancelling(self) -> dict[Node, list[int]]:
        """Return the sums in which a matrix product meets squares of its operands, with the product's positions."""
        found: dict[Node, list[int]] = {}
        if not self._operators.squares:
            return found
        squares: dict[Node, set[Entry]] = {}
        products: dict[Node, set[Entry]] = {}
        none: set[Entry] = set()
        for node, rule in self._rules.items():
            if rule.role is Role.MATRIX:
                if node.op not in self._operators.policy.low_ops:
                    products[node] = {self._moved_from(entry) for entry in node.inputs[:2]}
                continue
            inside = none.union(*(squares.get(entry.node, none) for entry in node.inputs))
            if node in self._operators.squares:
                inside.add(self._moved_from(node.inputs[0]))
            if inside:
                squares[node] = inside
            if self._computes_from_one(node):
                products[node] = products.get(self._operators.reads[node][0].node, none)
            if rule.role is Role.SUM:
                for at, entry in enumerate(node.inputs):
                    others = none.union(*(squares.get(e.node, none) for i, e in enumerate(node.inputs) if i != at))
                    if not products.get(entry.node, none).isdisjoint(others):
                        found.setdefault(node, []).append(at)
        return found

    def _computes_from_one(self, node: Node) -> bool:
        return self._rules[node].kind is Kind.FOLLOW and len(set(self._operators.reads[node])) == 1

    def _moved_from(self, entry: Entry) -> Entry:
        """Return the tensor whose values ``entry`` has, perhaps moved, negated or some of them zero."""
        while not entry.node.is_variable and self._rules[entry.node].exact and len(entry.node.inputs) == 1:
            entry = entry.node.inputs[0]
        return entry

    # -- where one meets the other ----------------------------------------------------------------------

    def conclude(self) -> None:
        for node, found in self.needed.items():
            if not node.is_variable and node.op not in self._operators.policy.low_ops:
                for needs, reader in found:
                    for need in _WHAT:
                        if need & needs & self._made[node]:
                            self.full.setdefault(node, f"{reader.op} {reader.name!r} {_WHAT[need]}")
        for node, rule in self._rules.items():
            if rule.kind is Kind.FOLLOW and self._made[node] & Need.DISTANCE:
                self.near[node] = self._distance(node, rule)
        for node in self._accumulating():
            self.full.setdefault(
                node,
                "many sums and products in a row change these values, with no matrix product between: roundings add up",
            )
        for each in self.within.values():
            for _, inner in each:
                inner.conclude()

    def _distance(self, node: Node, rule: Rule) -> str:
        compute = self._operators.policy.compute
        constant = rule.rounded_limit(node.attrs, compute)
        if constant:
            return f"{compute} does not hold {constant} exactly"
        if rule.made(node.attrs, compute) & Need.DISTANCE:
            return "it comes near a limit, to which its distance matters"
        return "it passes on values near a limit or a constant"

    def _accumulating(self) -> list[Node]:
        """Return the operators in chains of ``MANY`` that would round the same values in low precision."""
        normed = self._normed()
        own = {node: self._roundings(node, normed) for node in self._rules}
        before: dict[Node, int] = {}
        for node in self._rules:
            if self._follows(node, before):
                before[node] = own[node] + max(before.get(e.node, 0) for e in node.inputs)
        if max(before.values(), default=0) < MANY:
            return []
        behind: dict[Node, int] = {}
        for node in reversed(list(before)):
            behind[node] = behind.get(node, 0) + own[node]
            for entry in node.inputs:
                if entry.node in before:
                    behind[entry.node] = max(behind.get(entry.node, 0), behind[node])
        rounding = (node for node in before if self._rules[node].role in _ROUNDING)
        return [node for node in rounding if before[node] + behind[node] - own[node] >= MANY]

    def _follows(self, node: Node, low: Mapping[Node, int]) -> bool:
        """Return whether ``node`` would be low if its inputs in ``low`` were; it needs nothing else."""
        operators = self._operators
        if operators.kinds[node][0] is not Kind.FOLLOW or self._rules[node].normalized:
            return False
        if node in operators.fixed or node in self.full:
            return False
        read = operators.reads[node]
        return bool(read) and all(entry.node in low or self._may_be_low(entry.node) for entry in read)

    def _may_be_low(self, node: Node) -> bool:
        """Return whether ``node`` begins such a chain: a matrix operator, a norm that float16 may follow, a weight."""
        operators = self._operators
        if node.is_variable:
            return node in operators.storable
        if node in operators.fixed or node in self.full:
            return False
        kind = operators.kinds[node][0]
        follows_norm = kind is Kind.FOLLOW and self._rules[node].normalized
        return kind is Kind.LOW or follows_norm or node in operators.normalized

    def _normed(self) -> set[Node]:
        """Return the operators whose values a BatchNorm made, or weights and functions of such, as a residual branch's.
        These are no small updates, and the roundings of their own products are as large as those of their sums."""
        # 64, 128 and 256 such blocks: outputs 0.97 to 1.16 times as far from FP32 as with the sums in FP32, gradients
        # 0.89 to 1.10; without norms 2.2 times behind 64 blocks, with h = 0.01 before each sum 3.4 times.
        found: set[Node] = set()
        for node, rule in self._rules.items():
            if rule.kind is Kind.LOW or (rule.kind is Kind.FOLLOW and rule.role not in _ROUNDING):
                read = [entry.node for entry in self._operators.reads[node] if not entry.node.is_variable]
                if read and found.issuperset(read):
                    found.add(node)
            elif rule.kind is Kind.NORM:
                found.add(node)
        return found

    def _roundings(self, node: Node, normed: set[Node]) -> int:
        rule = self._rules[node]
        if rule.role is Role.SUM and any(entry.node in normed for entry in node.inputs):
            return 0
        if rule.role is Role.SCALE:
            text = node.attrs.get(rule.scalars[0], "")
            return 1 if is_exact(text, self._operators.policy.compute) else _ROUNDED_CONSTANT
        return 1 if rule.role in _ROUNDING else 0

"""The dtype of operators that may compute in either: the one in which fewer tensors are cast.

A choice depends on what is in front of an operator and on what is behind it, so there are two passes:

* to the outputs: what follows its inputs is low if all of them are, or may be, as behind a norm or a parameter;
* back: behind the last matrix operator, what FP32 alone reads is FP32, if that takes no more casts. In front of it, it
  stays low, as less memory is read and written. What comes near a limit is FP32 wherever FP32 reads it.

No shapes are known here, so tensors are counted; ``mxmp.tune`` weighs bytes or times, by an exact minimum cut. How
many bytes that saves in each network, ``scripts/dev.py sweep plans`` counts.
"""

from __future__ import annotations

from typing import Iterable

from . import safe_sums
from .graph import Entry, Node, Reader
from .needs import MANY, Needs
from .operators import Operators
from .plan import DecidedGraph, Decision
from .rule import Kind, Role
from .subgraphs import Body

BEHIND = "nothing behind it computes in low precision, and a cast in front of it costs no more than one behind"
RESIDUAL = "one term is FP32, and FP32 alone reads the sum: a cast of the other term costs no more than one behind"
_FOLLOWS_FP32 = "it follows its inputs, and one of them is FP32"


class Assignment(DecidedGraph):
    """Makes a decision for each operator of a graph; those that a plan has made (``Options.decided``) stay."""

    def __init__(self, operators: Operators, needs: Needs) -> None:
        self.within: dict[Node, list[tuple[Body, Assignment]]] = {}
        low_inputs = {}
        for node, within in operators.within.items():
            inner = [(body, Assignment(each, of)) for (body, each), (_, of) in zip(within, needs.within[node])]
            self.within[node] = inner
            low_inputs[node] = {body.positions[read] for body, inside in inner for read in inside.castable_low(body)}
        super().__init__(operators.policy, operators.rules, {}, low_inputs)
        self._operators, self._needs, self._readers = operators, needs, operators.readers
        self._heads = {entry.node for entry in operators.graph.heads}
        given = operators.options.decided
        self._by_plan = bool(given)  # it lacks the undecided and the movers, which then compute in FP32
        self._by_rule: set[Node] = set()
        # FP32 operators whose first output, in float16's range, may be read in either dtype.
        self._either: set[Node] = set()
        # Operators that follow their inputs and read nothing but such outputs, until ``_settle`` decides.
        self._undecided: dict[Node, None] = {}
        # Operators that only move the values of parameters, until ``_settle`` decides.
        self._movers: dict[Node, None] = {}
        for node, rule in self.rules.items():
            decision = given.get(operators.names[node])
            if node in operators.fixed:
                self.decisions[node] = Decision(node.op, False, operators.fixed[node])
            elif decision is not None and decision.op == node.op:
                self.decisions[node] = decision
            else:
                self._by_rule.add(node)
                self.decisions[node] = Decision(node.op, *self._first(node, rule.exact))
        self._settle()
        self.heed_readers()
        self._note_loops()
        self.low_variables = self._stored_low()

    def _stored_low(self) -> set[Node]:
        """Return the parameters that are stored in float16 already, or that all their readers read in float16."""
        options = self._operators.options
        low = {node for node in self._operators.names if node.is_variable and node.name in options.stored_low}
        for variable, users in self._readers.items():
            if not variable.is_variable or variable in self._operators.non_fp32 or variable in self._heads:
                continue
            is_parameter = (
                variable.name in options.parameters
                if options.parameters is not None
                else all(position in self.rules[node].weights for node, position in users)
            )
            if is_parameter and all(self.wants_low(*user) for user in users):
                low.add(variable)
        return low

    def named(self) -> dict[str, Decision]:
        """Return the decisions by the names of a plan, those in bodies too."""
        found: dict[str, Decision] = {}
        for node, decision in self.decisions.items():
            name = self._operators.names[node]
            found[name] = decision
            for body, inside in self.within.get(node, ()):
                found.update({body.prefix(name) + inner: each for inner, each in inside.named().items()})
        return found

    # -- to the outputs ---------------------------------------------------------------------------------

    def _first(self, node: Node, is_exact: bool) -> tuple[bool, str]:
        """Return whether ``node`` computes in low precision by what it reads, and why."""
        kind, reason = self._operators.kinds[node]
        if kind in (Kind.LOW, Kind.FOLLOW) and node in self._needs.full:
            return False, self._needs.full[node]
        if kind is Kind.FOLLOW:
            read = self._operators.reads[node]
            if not read:
                return False, reason
            if is_exact and all(self._is_parameter(entry.node) for entry in read):
                self._movers[node] = None
                return True, reason
            if not self._all_may_be_low(read):
                return False, _FOLLOWS_FP32
            if not any(map(self._is_low_for_certain, read)):
                self._undecided[node] = None
        elif node in self._operators.normalized:
            self._either.add(node)
        elif node in self._operators.lacking and self.policy.compute == "float16":
            # Its values are in float16's range: an addition of one and a float16 tensor may still compute in float16.
            read = self._operators.reads[node]
            if read and self._all_may_be_low(read):
                self._either.add(node)
        return kind in (Kind.LOW, Kind.FOLLOW), reason

    def _all_may_be_low(self, entries: Iterable[Entry]) -> bool:
        return all(self._is_low_for_certain(entry) or self._may_be_either(entry) for entry in entries)

    def _is_low_for_certain(self, entry: Entry) -> bool:
        """Return whether ``entry`` is in low precision for certain, not up to ``_settle``; False for a variable."""
        return entry.node not in self._undecided and entry.node not in self._movers and self.is_low(entry)

    def _is_parameter(self, node: Node) -> bool:
        """Return whether ``node`` has the values of parameters that may be stored in float16, perhaps moved."""
        return node in self._movers or node in self._operators.storable

    def _may_be_either(self, entry: Entry) -> bool:
        """Return whether ``entry`` may be read in FP32 or low precision, as ``_settle`` decides; never in bfloat16."""
        if entry.node in self._either:
            return entry.index == 0
        return entry.node in self._undecided and self.is_low(entry)

    # -- between norms, parameters and sums -------------------------------------------------------------

    def _settle(self) -> None:
        """Decide for the operators that ``_first`` left undecided."""
        behind_norms: set[Node] = set()
        # An operator that reads only what is safe in both dtypes, such as a relu behind an FP32 BatchNorm, computes in
        # low precision in three cases: (1) an operator reads it in low precision, and would round it anyway; (2) a
        # BatchNorm of cuDNN reads it; (3) it makes no graph output, and a BatchNorm of cuDNN with float16 data is in
        # front of it, perhaps with others of case (3) between.
        for node in self._undecided:
            after_norm = (e.node in behind_norms or self._norm_returns_float16(e) for e in node.inputs)
            if node not in self._heads and any(after_norm):
                behind_norms.add(node)
        for node in reversed(list(self._undecided)):
            wanted = (not self._reads_full(reader) for reader in self._readers.get(node, ()))
            if self._by_plan or not (node in behind_norms or any(wanted)):
                self._full(node, "it follows a normalization, and nothing that reads it computes in low precision")
        # Rounding commutes with moving, and so the parameters can be stored in float16.
        for node in reversed(list(self._movers)):
            if self._by_plan or node in self._heads or not self._all_want_low(node):
                self._full(node, "it moves the values of parameters, and not all that read it compute in low precision")
        # A softmax or LayerNorm between float16 needs no cast, where its kernel sums in FP32. A softmax may read FP32
        # too, as under a mask: behind a cast, as MXNet would take a variable's dtype for that which softmax returns.
        behind_low: set[Node] = set()
        for node, decision in list(self.decisions.items()):
            if decision.low or any(entry.node in behind_low for entry in node.inputs):
                behind_low.add(node)
            if node in behind_low and self._sums_safely(node):
                reads = self.is_low(node.inputs[0]) or self.reads_either(node)
                used = node not in self._heads and self._readers.get(node) and self._all_want_low(node)
                if reads and used:
                    self.decisions[node] = Decision(node.op, True, safe_sums.REASON)

    def _sums_safely(self, node: Node) -> bool:
        rule, is_full = self.rules[node], self._operators.kinds[node][0] is Kind.FULL
        if not (rule.sums_safely and is_full and node in self._either) or self._operators.options.exported:
            return False
        return safe_sums.is_set() and safe_sums.may_be_float16(rule, node.attrs, self.policy)

    def _norm_returns_float16(self, entry: Entry) -> bool:
        """Return whether ``entry`` is of a BatchNorm of cuDNN's with float16 data."""
        return self._norm_reads_float16(entry.node, 0) and self._is_low_for_certain(entry.node.inputs[0])

    def _norm_reads_float16(self, node: Node, position: int) -> bool:
        return position == 0 and node in self._either and node in self._operators.cudnn_norms

    def _all_want_low(self, node: Node) -> bool:
        return all(self.wants_low(*reader) for reader in self._readers.get(node, ()))

    def _full(self, node: Node, reason: str) -> None:
        self.decisions[node] = Decision(node.op, False, reason)

    # -- back from the outputs --------------------------------------------------------------------------

    def heed_readers(self) -> None:
        """Let operators compute in FP32 that FP32 reads, where it needs their digits, or that takes no more casts."""
        read_in_full = self._heads if self.policy.output == "float32" else set()
        low_heads = self._heads - read_in_full
        # Behind the outputs of a body comes the next iteration.
        not_last = self._heads if self._operators.options.is_body else low_heads
        # Of ``dense -> x * 2 -> max -> exp`` all are last: no matrix operator behind them is low.
        last: set[Node] = set()
        # Only FP32 reads what ``max`` returns, but it needs no cast of its own: it takes the dtype of ``x * 2``.
        through: set[Node] = set()
        # ``max`` has few results, so the cast stays behind it, and ``x * 2`` in front of it stays low.
        shrunk: set[Node] = set()
        nodes = list(self.rules)
        for node in reversed(nodes):
            rule = self.rules[node]
            # An index, a condition or a shape is not read as a value.
            readers = [(user, at) for user, at in self._readers.get(node, ()) if at not in self.rules[user].keep]
            users = [user for user, _ in readers]
            if node not in not_last and all(user in last and not self._is_low_matrix(user) for user in users):
                last.add(node)
            if not self.decisions[node].low or not self._follows(node):
                continue
            if node in self._needs.near and (node in read_in_full or any(map(self._reads_full, readers))):
                self._full(node, f"{self._needs.near[node]}, and FP32 reads it")
            elif node not in low_heads and all(self._reads_full(r) or r[0] in through for r in readers):
                # What rounds nothing stays low: its values are rounded already. So do sums of several low tensors, as
                # they would need a cast for each.
                if self._adds_to_fp32(node):
                    self._full(node, RESIDUAL)
                elif node in self._operators.selecting or rule.shrinks or not self._is_cheaper_before(node):
                    through.add(node)
                    if rule.shrinks or not shrunk.isdisjoint(users):
                        shrunk.add(node)
                elif node in last and shrunk.isdisjoint(users):
                    self._full(node, BEHIND)
        for node in nodes:
            if node in through and node in last and any(map(self._is_full, self._operators.reads[node])):
                self._full(node, _FOLLOWS_FP32)

    def _note_loops(self) -> None:
        """Say of products by a weight that many read, as in an unrolled loop, that each rounds the state."""
        for variable, readers in self._readers.items():
            low = [n for n, at in readers if at > 0 and self.decisions[n].low and self.rules[n].role is Role.MATRIX]
            if variable.is_variable and len(low) >= MANY:
                for node in low:
                    why = f"{self.decisions[node].reason}; {len(low)} products by one weight: what passes through all "
                    self.decisions[node] = Decision(node.op, True, f"{why}is rounded as often")

    def _follows(self, node: Node) -> bool:
        rule = self.rules[node]
        return node in self._by_rule and rule.kind is Kind.FOLLOW and self._operators.kinds[node][0] is Kind.FOLLOW

    def _is_full(self, entry: Entry) -> bool:
        node = entry.node
        return not (node.is_variable or self.decisions[node].low or self._norm_reads_float16(node, 0))

    def _reads_full(self, reader: Reader) -> bool:
        return not (self.wants_low(*reader) or self._norm_reads_float16(*reader))

    def _adds_to_fp32(self, node: Node) -> bool:
        """Return whether ``node`` adds to what FP32 computes at most one term in low precision, as behind LayerNorm."""
        terms = dict.fromkeys(self._operators.reads[node])
        count = sum(map(self._is_full, terms))
        return self.rules[node].role is Role.SUM and count > 0 and len(terms) - count <= 1

    def _is_low_matrix(self, node: Node) -> bool:
        """Return whether ``node`` is in low precision whatever reads it: a matrix operator, or by a plan."""
        is_follower = node in self._by_rule and self._operators.kinds[node][0] is Kind.FOLLOW
        return self.decisions[node].low and not is_follower

    def _is_cheaper_before(self, node: Node) -> bool:
        """Return whether casts in front of ``node`` cost no more than one behind, or are worth it: in a product."""
        read = set(self._operators.reads[node])
        is_product = self.rules[node].role is Role.TIMES
        return len(read) == 1 or is_product or any(entry.node in self._needs.near for entry in read)

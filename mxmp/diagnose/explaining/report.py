"""The result of ``explain``, as plain data, and its text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Iterable, Mapping

from ...kernels.channels_last import WHY_SLOW
from ...policy import Policy
from ...precision.plan import Plan
from ...precision.traffic import CastSize
from ..shared.report import grouped, section, some, table


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
        low, full = self.policy.low_ops, self.policy.full_ops
        of_type = grouped(self.nodes, lambda node: node.op)
        absent = [(f, op) for f, ops in (("low_ops", low), ("full_ops", full)) for op in ops if op not in of_type]
        kept = [op for op in low if op in of_type and all(node.dtype == "float32" for node in of_type[op])]
        return (
            *(f"{field}={op}: the graph has none" for field, op in absent),
            *(f"low_ops={op}: it stays in FP32, as {of_type[op][0].reason}" for op in kept),
        )

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

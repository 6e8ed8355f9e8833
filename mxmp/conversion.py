"""One conversion of one network, for both frontends: what decides its dtypes, and how its parameters are stored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Collection, Iterable, Mapping

import mxnet as mx

from .pipeline import low_graph
from .policy import Policy, excluding
from .precision.graph import Graph
from .precision.plan import Plan

__all__ = ["Conversion"]


class Conversion:
    """The policy or the plan of a network, and how its parameters are stored.

    The first graph that reads a parameter decides how it is stored; every later graph follows.

    Attributes
    ----------
    how : Policy or Plan
    stored_low : dict of str to bool
        By the name of each parameter that a graph has read: whether it is float16, with an FP32 master.
    """

    def __init__(self, how: Policy | Plan) -> None:
        self.how = how
        self.stored_low: dict[str, bool] = {}

    @property
    def policy(self) -> Policy:
        return self.how.policy if isinstance(self.how, Plan) else self.how

    @property
    def plan(self) -> Plan | None:
        """The Plan that decides, None where the rules do."""
        return self.how if isinstance(self.how, Plan) else None

    def excluding(self, nodes: Collection[str]) -> Policy | Plan:
        """Return the policy or plan that keeps these nodes in FP32 too."""
        policy = excluding(self.policy, nodes)
        return replace(self.how, policy=policy) if isinstance(self.how, Plan) else policy

    def build(
        self,
        symbol: mx.sym.Symbol,
        device: str,
        parameters: Iterable[str],
        *,
        stored: Mapping[str, bool],
        fixed: Collection[str] = (),
        **options: Any,
    ) -> tuple[Graph, Plan]:
        """Return the graph in low precision for an FP32 Symbol, and the plan that it follows.

        Parameters
        ----------
        parameters : iterable of str
            The names of all parameters that it reads.
        stored : mapping of str to bool
            How some of them are stored already.
        fixed : collection of str
            Parameters that stay FP32 unless they are stored low already.
        **options
            For ``pipeline.low_graph``.

        Raises
        ------
        ValueError
            The plan is of another network, or a parameter is needed in another dtype than it is stored in.
        """
        names = list(parameters)
        graph, plan = self._low_graph(
            Graph.from_symbol(symbol),
            device,
            parameters={each for each in names if each not in stored and each not in fixed},
            stored_low={each for each, low in stored.items() if low},
            **options,
        )
        for each in names:
            self.stored_low.setdefault(each, stored.get(each, each in plan.low_variables))
        return graph, plan

    def _low_graph(self, graph: Graph, device: str, **options: Any) -> tuple[Graph, Plan]:
        return low_graph(graph, self.how, device, **options)

"""``cast_symbol``: takes a Symbol and returns a Symbol with casts."""

from __future__ import annotations

import warnings
from typing import Iterable

import mxnet as mx

from ..kernels.fit import device_of
from ..pipeline import low_graph
from ..policy import Policy
from ..precision.casts import declare_full
from ..precision.graph import Graph
from ..precision.plan import Plan, read_policy

__all__ = ["cast_symbol", "nothing_low", "warn_of_unmatched"]


def cast_symbol(
    sym: mx.sym.Symbol,
    policy: str | Policy | Plan = "float16",
    *,
    exclude: Iterable[str] = (),
    ctx: mx.Context | None = None,
) -> mx.sym.Symbol:
    """Return a new Symbol that computes in low precision where that is safe; ``sym`` is untouched.

    Arguments, auxiliary states and output names are those of ``sym``. Casting a cast Symbol again
    replaces the first cast.

    Parameters
    ----------
    sym : mxnet.symbol.Symbol
    policy : str, Policy or Plan
        A recipe (``print(Policy.recipes())``), a policy string, a Policy, a Plan of this very Symbol, or the path of a
        saved Plan.
    exclude : iterable of str
        Patterns of nodes or blocks to keep in FP32, added to the policy's.
    ctx : mxnet.Context, optional
        The device that will run the Symbol (default: the current context). On a CPU float16 is emulated, on a GPU it
        is native; the two Symbols differ.

    Raises
    ------
    TypeError
        ``sym`` is no Symbol.
    ValueError
        The policy cannot hold on ``ctx``, an operator has no rule, or no operator would run in low precision.
    """
    if not isinstance(sym, mx.sym.Symbol):
        raise TypeError(f"cast_symbol takes an mxnet Symbol, got {type(sym).__name__}: for a Block use mxmp.convert")
    requested, override = read_policy(policy, exclude)
    graph, plan = low_graph(Graph.from_symbol(sym), override or requested, device_of(ctx), keep_output_names=True)
    warn_of_unmatched(plan)
    useless = nothing_low(plan)
    if useless:
        raise ValueError(useless)
    declare_full(graph)
    return graph.to_symbol()


def warn_of_unmatched(plan: Plan, stacklevel: int = 3) -> None:
    """Warn of patterns in ``exclude`` that match nothing, which is rarely meant."""
    if plan.unmatched:
        warnings.warn(f"exclude: no node or block matches {list(plan.unmatched)}", stacklevel=stacklevel)


def nothing_low(plan: Plan) -> str | None:
    """Return an error message if no operator computes in low precision, unless tuning found that to be faster."""
    if plan.num_low or plan.tuned is not None:
        return None
    reasons = sorted({d.reason for d in plan.decisions.values()})[:5]
    return (
        f"nothing in this Symbol would run in {plan.policy.compute}: it has no matrix operator that may. "
        f"Reasons: {'; '.join(reasons) or 'it has no operator at all'}"
    )

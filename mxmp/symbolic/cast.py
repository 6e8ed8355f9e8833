"""``cast_symbol``: takes a Symbol and returns a Symbol with casts."""

from __future__ import annotations

from typing import Iterable

import mxnet as mx

from ..kernels.fit import device_of
from ..messages.callers import warn_user
from ..messages.keywords import keywords_explained
from ..pipeline import low_graph
from ..policy import Policy
from ..precision.casts import declare_full, strip
from ..precision.graph import Graph
from ..precision.plan import Plan, message_of_idle, read_policy, why_nothing_low, without_effect


@keywords_explained
def cast_symbol(
    sym: mx.sym.Symbol,
    policy: str | Policy | Plan = "float16",
    *,
    exclude: Iterable[str] = (),
    ctx: mx.Context | None = None,
) -> mx.sym.Symbol:
    """Return a copy of a Symbol with casts, which computes in low precision where the rules call that safe.

    ``sym`` is not changed. The names and the order of arguments, auxiliary states and outputs are those of ``sym``.
    Weights that the policy stores in float16 are declared as float16. Casts of an earlier call are removed first. No
    operator runs. The Symbol contains no loss scale: to train with float16, use ``mxmp.Module``.

    Parameters
    ----------
    sym : mxnet.symbol.Symbol
    policy : str, Policy or Plan
        A recipe (``print(Policy.recipes())``), a policy string such as ``"compute=float16,norm=compute"``, a Policy, a
        Plan that was made for ``sym``, or the path of a saved Plan.
    exclude : iterable of str
        Patterns, as of ``fnmatch``, for names of operators to keep in FP32, besides the policy's own. ``["stage1"]``
        keeps ``"stage1"`` and ``"stage1_conv0"``. A warning names patterns that match nothing, and ``low_ops`` and
        ``full_ops`` of the policy that change nothing. Must be empty with a Plan.
    ctx : mxnet.Context, optional
        The device that will run the Symbol (default: the current context). On a CPU float16 is emulated, on a GPU
        native. If the environment variable ``MXNET_SAFE_ACCUMULATION`` is ``"1"`` or ``"true"`` now, it must be so
        wherever the Symbol runs on a GPU: softmax and LayerNorm may read float16, and would sum in float16 without it.

    Raises
    ------
    TypeError
        ``sym`` is no Symbol.
    ValueError
        The policy is unknown or needs what the device lacks (bfloat16 on a GPU), an operator has no rule, the Plan is
        of another Symbol or device, or no operator would compute in low precision.
    OSError
        The file of a Plan cannot be read.

    Examples
    --------
    >>> data = mx.sym.var("data")
    >>> out = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(data, num_hidden=2, name="fc"), name="softmax")
    >>> low = mxmp.cast_symbol(out, "float16", ctx=mx.gpu())  # for a GPU; it need not be there
    >>> low.list_arguments() == out.list_arguments()  # the parameters and their names stay
    True
    >>> [name for name in low.get_internals().list_outputs() if "_to_" in name]  # the casts
    ['data_to_float16_output', 'fc_to_float32_output']
    """
    if not isinstance(sym, mx.sym.Symbol):
        from ..messages.networks import instead

        raise TypeError(f"cast_symbol takes an mxnet Symbol, got {type(sym).__name__}{instead(sym, True)}")
    requested, override = read_policy(policy, exclude)
    original = strip(Graph.from_symbol(sym))
    graph, plan = low_graph(original, override or requested, device_of(ctx), keep_output_names=True)
    if override is not None:
        from ..precision.edited import warn_of_plan

        warn_of_plan(original, override, set())
    warn_of_unmatched(plan, override is None)
    useless = message_if_nothing_low(plan)
    if useless:
        raise ValueError(useless)
    declare_full(graph)
    return graph.to_symbol()


def warn_of_unmatched(plan: Plan, by_rules: bool) -> None:
    """Warn of what ``exclude``, ``low_ops`` and ``full_ops`` name in vain; a Plan given may have its own reasons."""
    if plan.unmatched:
        warn_user(f"exclude: no node or block matches {list(plan.unmatched)}")
    idle = without_effect(plan) if by_rules else {}
    if idle:
        warn_user(message_of_idle(idle))


def message_if_nothing_low(plan: Plan) -> str | None:
    """Return an error message if no operator computes in low precision under ``plan``, otherwise None."""
    if plan.num_low or plan.tuned is not None:  # ``tune`` may have measured that FP32 is fastest
        return None
    reasons = sorted({d.reason for d in plan.decisions.values()})[:5]
    return (
        f"nothing in this Symbol would run in {plan.policy.compute}: {why_nothing_low(plan)}. "
        f"Reasons: {'; '.join(reasons) or 'it has no operator at all'}"
    )

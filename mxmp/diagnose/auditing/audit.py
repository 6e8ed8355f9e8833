"""``audit``: which operators in low precision change what this network computes from these data."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace
from typing import Any, Callable, Collection, Iterable, Mapping, Sequence

import mxnet as mx
from mxnet.ndarray import NDArray

from ...policy import Policy, pattern_for
from ...precision.casts import strip
from ...precision.graph import Graph
from ...precision.plan import Plan, read_policy
from ..networks.frontends import Network, check_positive, replayed_network
from ..networks.protocol import ReplayedGraph
from .lost import ROUNDOFF, what_was_lost
from .replays import THRESHOLD, Candidate, Noise, Replays
from .report import Audit, Change, Finding

# Among more operators than this, only so few are looked for that change much and do not stand out of the noise.
_MANY, _FEW = 32, 3
# What is left of a change, divided by its limit, where it is gone; and by how much more a shorter cure may leave.
_GONE, _AS_GOOD = 0.25, 1.5
# The loss scale from which the replays start in float16, as DynamicLossScaler does.
_SCALE = 2.0**16


def audit(
    target: Network | mx.sym.Symbol,
    loss_fn: Callable | None,
    batch: Any,
    *,
    policy: str | os.PathLike | Policy | Plan | None = None,
    exclude: Iterable[str] = (),
    params: Mapping[str, NDArray] | None = None,
    worst: int = 10,
    apply: bool = False,
) -> Audit:
    """Say which operators in low precision change loss, gradients and outputs of this network for this batch.

    ::

        print(mxmp.diagnose.audit(net, loss_fn, (x, y)))              # a converted net, in training mode
        print(mxmp.diagnose.audit(net, None, x))                      # its outputs in inference
        print(mxmp.diagnose.audit(module, None, batch))               # a module; the loss is in its Symbol
        print(mxmp.diagnose.audit(net, loss_fn, (x, y), policy=plan)) # before convert: a policy, or a Plan

    The batch is replayed with FP32, and then with some operators in low precision and all else in FP32. What differs
    is counted in units of noise: how far errors of a few roundings, in the weights, move the same number. Where a group
    of operators moves something by more than eight times its noise, its halves are replayed, down to single operators.
    Inputs with large digits multiply such errors too. So single operators also stand out that change the loss by more
    than 2 %, all gradients together by 50 % or an output by 15 %, if the change is gone without a few of them; and
    those that read a raw column of the batch which rounding moves by more than 2 % of its deviation. Other converted
    nets that ``loss_fn`` calls are audited with this one. A network in which everything low stays below that is not
    searched: nothing stands out.

    All replays compute with copies of the weights, with the same dropout masks, which are audit's own. Weights, master
    weights, gradients, running statistics, random state and trainer stay as they are; MXNet's random state moves only
    if Python code of the net or ``loss_fn`` draws numbers. The dropout within a recurrent layer (``RNN``), and in
    bodies of control flow, is off. Waits for the device.

    Parameters
    ----------
    target : Block, Module, BucketingModule or Symbol
        A net that ``convert`` returned, or a HybridBlock with ``policy``; a bound mxmp.Module or BucketingModule, which
        is switched to the bucket of the batch; or an FP32 Symbol, with ``policy`` and ``params``.
    loss_fn : callable or None
        Of a net: called as ``loss_fn(net(*inputs), *labels)``, returns the loss, an NDArray or a list of them. None:
        the net runs in inference mode, and only outputs are compared. Of a module or Symbol: called with the list of
        outputs and, of a module, the labels; None: gradients are those of its loss heads, or of the sum of its outputs.
        A Symbol without loss and loss head runs in inference mode, and so does a module that is not bound to train.
    batch : (inputs, labels), DataBatch or dict
        Of a net: a pair, each of them an array or a list of arrays; without ``loss_fn`` the inputs alone. Of a module
        its DataBatch. Of a Symbol, arrays by name, labels too.
    policy : str, Policy, Plan or path, optional
        Only for a target that is not converted: what ``convert`` would take. A GPU's Plan is replayed on a CPU too, by
        the emulation of float16.
    exclude : iterable of str
        More patterns of names to keep in FP32, with ``policy``.
    params : mapping of str to NDArray, optional
        Only of a Symbol: its parameters, by name, or as ``"arg:fc_weight"`` and ``"aux:bn_moving_mean"``.
    worst : int
        How many operators to name at most.
    apply : bool
        Keep the named operators in FP32 in the converted net or module, from the next forward on. Gradients may be
        lost: call it between an update and the next forward.

    Returns
    -------
    Audit
        ``print`` it. Its ``findings`` are the operators that stand out, and ``exclude`` the patterns that cure them.

    Raises
    ------
    TypeError
        The arguments do not fit the target.
    ValueError
        The target is not converted and there is no ``policy``, or both; a parameter has no values; ``worst`` is not
        positive; an operator draws random numbers that cannot be held still; FP32's own loss, gradients or outputs are
        not finite; or ``apply`` is not possible, as for ``guard``.
    """
    check_positive(worst=worst)
    how = None
    if policy is not None:
        requested, plan = read_policy(policy, exclude)
        how = plan or requested
    network = replayed_network(target, loss_fn, batch, how, params)
    if apply:
        network.check_excludable()
    with network.unchanged():
        found, bad = _audited(Replays(network), worst)
    if apply and found.findings:
        network.exclude(bad)
        return replace(found, applied=True)
    return found


def _audited(replays: Replays, worst: int) -> tuple[Audit, Collection[Candidate]]:
    """Return the report, and the operators that its ``exclude`` keeps in FP32."""
    if not replays.reference.is_finite:
        raise ValueError("FP32's own loss, gradients or outputs are inf or NaN for this batch: see mxmp.diagnose.blame")
    computes = {graph.plan.policy.compute for graph in replays.graphs}
    noise = Noise(replays, max(ROUNDOFF[each] for each in computes))
    if "float16" in computes and replays.reference.gradients:
        replays.loss_scale = _SCALE

    def change(low: Sequence[Candidate]) -> Change:
        return noise.change(replays.differences(replays.run_scaled(low)))

    candidates = replays.candidates
    total = change(candidates)
    bad, remaining = _at_fault(replays, total, change, worst)
    for each in replays.readers_of_digits():
        if each not in bad and len(bad) < worst:
            bad[each] = change([each])
            remaining = None
    others = replays.low_without(bad)
    if bad and remaining is None:
        remaining = change(others)
    ops = {each: replays.graphs[each[0]].plan.decisions[each[1]].op for each in candidates}
    full_ops = {ops[each] for each in bad} - {ops[each] for each in others}
    report = Audit(
        compute=replays.graphs[0].plan.policy.compute,
        candidates=len(candidates),
        replays=replays.count,
        loss_scale=replays.loss_scale,
        total=total,
        findings=tuple(_findings(replays, bad)),
        remaining=remaining,
        exclude=tuple(dict.fromkeys(pattern_for(name) for _, name in bad)),
        full_ops=tuple(sorted(full_ops)),
        threshold=THRESHOLD,
    )
    return report, bad


def _at_fault(
    replays: Replays, total: Change, change: Callable[[Sequence[Candidate]], Change], worst: int
) -> tuple[dict[Candidate, Change], Change | None]:
    """Return the fewest operators found, at most ``worst``, without which nothing stands out, and what is then left."""
    candidates = replays.candidates
    found = _worst(candidates, total, change, worst, lambda each: each.times_noise / THRESHOLD)
    bad, left = _needed(replays, found, change)
    # What remains may be large beside the limits, however large the noise: the inputs multiply errors of weights too.
    if (left or total).times_limit <= 1:
        return bad, left
    rest = replays.low_without(bad)
    few = worst - len(bad) if len(rest) <= _MANY else min(worst - len(bad), _FEW)
    more = _worst(rest, left or total, change, few, lambda each: each.times_limit)
    cured, after = _needed(replays, {**bad, **more}, change)
    # A few operators cause it if it is gone without them. In a deep network that multiplies any error, it is not.
    cures = after is not None and after.times_limit <= max(1.0, (left or total).times_limit * _GONE)
    return (cured, after) if cures else (bad, left)


def _needed(
    replays: Replays, found: Mapping[Candidate, Change], change: Callable[[Sequence[Candidate]], Change]
) -> tuple[dict[Candidate, Change], Change | None]:
    """Return those of ``found``, the worst first, that have to be in FP32, by trying, and what is then left."""
    if not found:
        return {}, None

    def left_without(excluded: Collection[Candidate]) -> Change:
        return change(replays.low_without(excluded))

    def bound(change: Change) -> float:
        return max(change.times_noise / THRESHOLD, change.times_limit)

    left = left_without(found)
    enough = max(1.0, bound(left) * _AS_GOOD)
    kept = dict(found)
    for each in reversed(list(found)) if len(found) > 1 and math.isfinite(enough) else ():
        without = left_without([other for other in kept if other != each])
        if bound(without) <= enough and len(kept) > 1:
            del kept[each]
            left = without
    return kept, left


def _worst(
    candidates: Sequence[Candidate],
    total: Change,
    change: Callable[[Sequence[Candidate]], Change],
    worst: int,
    size: Callable[[Change], float],
) -> dict[Candidate, Change]:
    """Return the single operators whose ``size`` is above 1, the worst first: always halve the group that changes most.
    They are at most ``worst``."""
    groups = [(candidates, total)] if candidates else []  # in the order of the graphs
    found: dict[Candidate, Change] = {}
    while groups and len(found) < worst:
        at = max(range(len(groups)), key=lambda i: (_rank(groups[i][1]), size(groups[i][1])))
        group, changed = groups.pop(at)
        if size(changed) <= 1:
            break
        if len(group) == 1:
            found[group[0]] = changed
        else:
            middle = len(group) // 2
            groups[at:at] = [(half, change(half)) for half in (group[:middle], group[middle:])]
    return dict(sorted(found.items(), key=lambda each: -_rank(each[1])))


def _rank(change: Change) -> float:
    """Return by what changes are ordered: an inf in the forward is worse than one in a gradient."""
    forward = not math.isfinite(change.output) or not math.isfinite(change.loss or 0.0)
    return math.inf if forward else min(change.times_noise, sys.float_info.max)


def _findings(replays: Replays, bad: Mapping[Candidate, Change]) -> list[Finding]:
    """Return a Finding for each operator of ``bad``, the worst first; those that only pass values on join the first."""
    findings: list[Finding] = []
    for graph in replays.graphs:
        own = {name: changed for (number, name), changed in bad.items() if number == graph.number}
        if not own:
            continue
        leaders = _leaders(graph, own)
        around = replays.tapped(graph, own)
        for name, changed in own.items():
            if leaders[name] == name:
                lost, detail = "rounded", "within a loop or branch"
                if name in around:
                    compute = graph.plan.policy.compute
                    lost, detail = what_was_lost(around[name], changed, compute, graph.constants)
                also = tuple(other for other in own if other != name and leaders[other] == name)
                findings.append(Finding(name, graph.plan.decisions[name].op, changed, lost, detail, also))
    position = {name: i for i, (_, name) in enumerate(replays.candidates)}
    return sorted(findings, key=lambda each: (-_rank(each.change), position[each.name]))


def _leaders(graph: ReplayedGraph, own: Mapping[str, Change]) -> dict[str, str]:
    """Return for each operator of ``own`` the one that it passes values on from, or itself."""
    names = strip(Graph.from_symbol(graph.symbol)).names()
    leaders = {name: name for name in own}
    for node, name in names.items():  # in graph order
        if name in own:
            read = [names[entry.node] for entry in node.inputs if names[entry.node] in own]
            # It passes on what it reads if it changes no more than twice as much.
            first = next((each for each in read if own[name].times_noise <= 2 * own[each].times_noise), name)
            leaders[name] = leaders[first]
    return leaders

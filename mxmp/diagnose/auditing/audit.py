"""``audit``: which operators in low precision change what this network computes from these data."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace
from glob import escape
from typing import Any, Callable, Iterable, Mapping, Sequence

import mxnet as mx
from mxnet.ndarray import NDArray

from ...frontend import ReplayedGraph
from ...policy import Policy
from ...precision.casts import strip
from ...precision.graph import Graph
from ...precision.plan import Plan, read_policy
from ..shared.targets import Network, check_positive, replayed_network
from .lost import what_was_lost
from .replays import Candidate, Noise, Replays
from .report import Audit, Change, Finding

# From how many times the noise an operator stands out. Healthy networks reach 4 (see docs/looking-inside.md).
THRESHOLD = 8.0
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
    is counted in units of noise: how far errors of a few roundings, in weights and inputs, move the same number. Where
    a group of operators moves something by more than eight times its noise, its halves are replayed, down to single
    operators. A network in which everything low stays below that is not searched: nothing stands out.

    All replays compute with copies of the weights, with the same dropout masks, which are audit's own. Weights, master
    weights, gradients, running statistics, random state and trainer stay as they are; MXNet's random state moves only
    if Python code of the net or ``loss_fn`` draws numbers. The dropout within a recurrent layer (``RNN``) is off. Waits
    for the device.

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
        found = _audited(Replays(network), worst)
    if apply and found.findings:
        network.exclude([name for each in found.findings for name in (each.name, *each.also)])
        return replace(found, applied=True)
    return found


def _audited(replays: Replays, worst: int) -> Audit:
    if not replays.reference.is_finite:
        raise ValueError("FP32's own loss, gradients or outputs are inf or NaN for this batch: see mxmp.diagnose.blame")
    compute = replays.graphs[0].plan.policy.compute
    noise = Noise(replays, compute)
    if compute == "float16" and replays.reference.gradients:
        replays.loss_scale = _SCALE

    def change(low: Sequence[Candidate]) -> Change:
        return noise.change(replays.differences(replays.run_scaled(low)))

    candidates = replays.candidates
    total = change(candidates)
    bad = _worst(candidates, total, change, worst) if candidates else {}
    findings = _findings(replays, bad, compute)
    others = [each for each in candidates if each not in bad]
    remaining = change(others) if bad else None
    ops = {each: replays.graphs[each[0]].plan.decisions[each[1]].op for each in candidates}
    full_ops = {ops[each] for each in bad} - {ops[each] for each in others}
    return Audit(
        *(compute, len(candidates), replays.count, replays.loss_scale, total, tuple(findings), remaining),
        exclude=tuple(dict.fromkeys(pattern_for(name) for _, name in bad)),
        full_ops=tuple(sorted(full_ops)),
        threshold=THRESHOLD,
    )


def pattern_for(name: str) -> str:
    """Return the pattern of ``exclude`` for an operator of a plan, such as ``"loop/fc"`` or ``"fc:1"``."""
    inner = name.rpartition("/")[2]
    stem, _, number = inner.rpartition(":")
    return escape(stem if stem and number.isdigit() else inner)


def _worst(
    candidates: Sequence[Candidate], total: Change, change: Callable[[Sequence[Candidate]], Change], worst: int
) -> dict[Candidate, Change]:
    """Return the single operators that stand out, at most ``worst``: always halve the group that changes most."""
    groups = [(candidates, total)]  # in the order of the graphs
    found: dict[Candidate, Change] = {}
    while groups and len(found) < worst:
        at = max(range(len(groups)), key=lambda i: _rank(groups[i][1]))
        group, changed = groups.pop(at)
        if changed.times_noise <= THRESHOLD:
            break
        if len(group) == 1:
            found[group[0]] = changed
        else:
            middle = len(group) // 2
            groups[at:at] = [(half, change(half)) for half in (group[:middle], group[middle:])]
    return found


def _rank(change: Change) -> float:
    """Return by what changes are ordered: an inf in the forward is worse than one in a gradient."""
    forward = not math.isfinite(change.output) or not math.isfinite(change.loss or 0.0)
    return math.inf if forward else min(change.times_noise, sys.float_info.max)


def _findings(replays: Replays, bad: Mapping[Candidate, Change], compute: str) -> list[Finding]:
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

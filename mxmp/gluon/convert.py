"""``convert`` and ``restore``: nets converted in place, and back.

A converted block keeps its class, tree, hooks and Parameters; each HybridBlock of the tree gets one hook.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Callable, Collection, Iterable

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, HybridBlock, Parameter

from ..kernels.fit import device_of
from ..policy import Policy
from ..precision.decide import check_policy
from ..precision.plan import Plan, read_policy
from . import _mxnet
from .blocks import blocks_of, hybrid_blocks, with_names_of
from .conversion import Expected, NetConversion, conversions_of, join, leave, refuse_contrib_amp
from .hook import Hook, Owner, hook_of, hooks
from .parameter import BFLOAT16, LowParameter

__all__ = ["convert", "exclude_more", "is_whole", "restore"]


def convert(
    net: Block, policy: str | Policy | Plan = "float16", *, exclude: Iterable[str] | Callable[[str, Block], bool] = ()
) -> Block:
    """Make ``net`` compute in low precision where that is safe, in place; returns ``net``.

    Needs no prior ``hybridize`` or forward. Parameters, their names, sharing, ``lr_mult``,
    ``wd_mult`` and ``grad_req`` stay, ``hybridize(...)`` may follow with any flags, and outputs are
    FP32. A converted net always runs as a graph. Converting again replaces the policy. Nets that share
    blocks or Parameters may each be converted, with policies of their own.

    Parameters
    ----------
    net : mxnet.gluon.Block
        A HybridBlock, a SymbolBlock, or a Block whose outermost hybrid children are converted.
    policy : str, Policy or Plan
        A recipe (``print(Policy.recipes())``), a policy string, a Policy, a Plan of this net (``mxmp.tune``), or the
        path of a saved Plan (``"plan.json"``).
    exclude : iterable of str, or callable
        Patterns of nodes or blocks to keep in FP32, added to the policy's; a block that cannot be traced
        then runs as Python. Or a filter ``(name, block) -> bool``: its blocks run as Python, in FP32,
        with all that they contain. What contains such a block runs as Python around it, and calls graphs.

    Raises
    ------
    TypeError
        ``net`` is no Block.
    ValueError
        The policy cannot hold, there is nothing to convert, or parameters are not FP32. The net
        stays as it was. Where a Plan is of another net, its first call says so.
    RuntimeError
        ``amp.init()`` of ``mxnet.contrib.amp`` was called in this process.
    """
    if not isinstance(net, Block):
        hint = ": for a Symbol use mxmp.cast_symbol" if isinstance(net, mx.sym.Symbol) else ""
        raise TypeError(f"convert takes a gluon Block, got {type(net).__name__}{hint}")
    refuse_contrib_amp()
    asked, plan = read_policy(policy, () if callable(exclude) else exclude)
    if callable(exclude) and plan is not None:
        raise ValueError("a Plan is of the whole net, and blocks that run as Python have none: tune what remains")
    if plan is not None:
        plan = with_names_of(net, plan)
        asked = plan.policy
    python, outside = _left_as_python(net, exclude if callable(exclude) else _named_by(asked))
    blocks = [block for block in hybrid_blocks(net) if id(block) not in outside]
    if not any(id(block) not in python for block in blocks):
        why = "the filter excludes every one" if python else "only those have a graph to rewrite"
        raise ValueError(f"nothing to convert: {type(net).__name__} {net.name!r} holds no HybridBlock ({why})")
    params = list(net.collect_params().values())
    _check_parameters(params, asked, plan)
    if _is_converted_so(net, blocks, asked, plan, python):
        return net
    _release(net, _whole(net)[0])
    full = [p.name for block in hybrid_blocks(net) if id(block) in python | outside for p in block.params.values()]
    conversion = NetConversion(plan or asked, _expected(net, asked, python, outside), full)
    _install(conversion, params, [(block, id(block) in python) for block in blocks])
    return net


def is_whole(net: Block) -> bool:
    """Whether ``net`` contains all that each of its conversions converted."""
    return not _whole(net)[1]


def exclude_more(net: Block, nodes: Collection[str]) -> None:
    """Convert ``net``'s conversions again, with these nodes in FP32 too; blocks left as Python stay so.

    Between two steps: what is trained goes on from the same values, gradients are forgotten.
    """
    for conversion in _whole(net)[0]:
        how = conversion.excluding(nodes)
        owners = [(block, owner) for block, hook in hooks(net) for owner in hook.owners]
        owned = [(block, owner.python) for block, owner in owners if owner.conversion is conversion]
        params = [param for param in net.collect_params().values() if conversion in conversions_of([param])]
        _release(net, [conversion])
        expected = Expected(net.name, [block for block, _ in owned if conversion.expected.is_root(block)], ())
        _install(NetConversion(how, expected, conversion.full), params, owned)


def _install(conversion: NetConversion, params: list[Parameter], blocks: list[tuple[HybridBlock, bool]]) -> None:
    """``blocks``: each with whether it runs as Python."""
    for param in params:
        join(param, conversion)
    for block, python in blocks:
        (hook_of(block) or Hook(block)).own(Owner(conversion, python))


def restore(net: Block) -> Block:
    """Undo ``convert`` in place; returns ``net`` in FP32, with the masters' values where there are masters.

    A net that is not converted is left alone. Blocks and Parameters that it shares with another
    converted net stay converted for that one.

    Raises
    ------
    ValueError
        ``net`` is only a part of what was converted.
    """
    if not isinstance(net, Block):
        raise TypeError(f"restore takes a gluon Block, got {type(net).__name__}")
    whole, parts = _whole(net)
    if parts and not whole:
        raise ValueError(
            f"{net.name!r} is a part of a net that was converted as a whole, or shared with one, and would go on in "
            "low precision there: restore that net, or convert it again with "
            f"mxmp.convert(net, exclude=[{net.name!r}])"
        )
    _release(net, whole)
    return net


def _whole(net: Block) -> tuple[list[NetConversion], list[NetConversion]]:
    """The conversions in ``net`` of which it contains all blocks, and the others."""
    inside = {id(block) for block in hybrid_blocks(net)}
    found = list(dict.fromkeys(owner.conversion for _, hook in hooks(net) for owner in hook.owners))
    whole = [c for c in found if all(id(block) in inside for block in c.blocks)]
    return whole, [c for c in found if c not in whole]


def _release(net: Block, conversions: list[NetConversion]) -> None:
    for _, hook in list(hooks(net)):
        for conversion in conversions:
            if any(owner.conversion is conversion for owner in hook.owners):
                hook.disown(conversion)
    for param in net.collect_params().values():
        leave(param, conversions)


def _is_converted_so(
    net: Block, blocks: list[HybridBlock], policy: Policy, plan: Plan | None, python: set[int]
) -> bool:
    """Whether one conversion of ``net`` alone already does what is asked."""
    whole, parts = _whole(net)
    if len(whole) != 1 or parts or (whole[0].policy, whole[0].plan) != (policy, plan):
        return False
    owners = {id(block): owner for block, hook in hooks(net) for owner in hook.owners}
    return owners.keys() == {id(block) for block in blocks} and all(
        owner.python == (key in python) for key, owner in owners.items()
    )


def _named_by(policy: Policy) -> Callable[[str, Block], bool]:
    """The filter that patterns are: blocks of a user's own class that one names, which may do what no graph can.

    MXNet's layers can be traced and stay in the graph, in FP32, as do nodes that a pattern ending in * matches.
    """
    patterns = [pattern for pattern in policy.exclude if not pattern.endswith("*")]

    def names(name: str, block: Block) -> bool:
        return not type(block).__module__.startswith("mxnet.") and any(fnmatchcase(name, p) for p in patterns)

    return names


def _left_as_python(net: Block, exclude: Callable[[str, Block], bool]) -> tuple[set[int], set[int]]:
    """Which blocks run as Python: those that the filter names and what contains them; and what these contain."""
    python: set[int] = set()
    outside: set[int] = set()

    def walk(block: Block) -> bool:
        if exclude(block.name, block):
            python.add(id(block))
            outside.update(id(inner) for inner in blocks_of(block) if inner is not block)
            return True
        below = [walk(child) for child in _mxnet.children(block)]
        if any(below):
            python.add(id(block))
        return any(below)

    walk(net)
    return python, outside


def _expected(net: Block, policy: Policy, python: set[int], outside: set[int]) -> Expected:
    """Of the outermost blocks that run as graphs, and of the patterns that leave no block as Python."""

    def roots(block: Block) -> list[HybridBlock]:
        if id(block) in outside:
            return []
        if isinstance(block, HybridBlock) and id(block) not in python:
            return [block]
        return [found for child in _mxnet.children(block) for found in roots(child)]

    left = [block.name for block in blocks_of(net) if id(block) in python]
    patterns = [p for p in policy.exclude if not any(fnmatchcase(name, p) for name in left)]
    return Expected(net.name, roots(net), patterns)


def _check_parameters(params: list[Parameter], policy: Policy, plan: Plan | None) -> None:
    for param in params:
        if isinstance(param, LowParameter):
            continue
        if np.dtype(param.dtype) in (np.float16, BFLOAT16):
            raise ValueError(
                f"Parameter {param.name!r} is stored in {param.dtype}: convert takes an FP32 net and casts by "
                "itself; call net.cast('float32') first"
            )
        for ctx in _mxnet.contexts(param):
            check_policy(policy, device_of(ctx))
            if plan is not None and plan.device != device_of(ctx):
                raise ValueError(f"the plan was made for a {plan.device}, and {param.name!r} is on {ctx}: tune there")
    check_policy(policy, "cpu")

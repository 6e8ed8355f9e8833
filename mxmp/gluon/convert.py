"""``convert`` and ``restore``: nets converted in place, and back.

A converted net keeps its class, tree, hooks and Parameters; each HybridBlock of the tree gets one hook.
"""

from __future__ import annotations

from typing import Callable, Iterable

import mxnet as mx
from mxnet.gluon import Block

from ..policy import Policy
from ..precision.plan import Plan, read_policy
from . import _mxnet
from .blocks import divide, with_names_of
from .conversion import NetConversion
from .hook import conversions_in, install, remove

__all__ = ["convert", "restore"]


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
    _mxnet.refuse_contrib_amp()
    requested, plan = read_policy(policy, () if callable(exclude) else exclude)
    if callable(exclude) and plan is not None:
        raise ValueError("a Plan is of the whole net, and blocks that run as Python have none: tune what remains")
    how = requested if plan is None else with_names_of(net, plan)
    policy = how.policy if isinstance(how, Plan) else how
    division = divide(net, exclude if callable(exclude) else policy)
    conversion = NetConversion(how, net, division)
    install(net, conversion, division)
    return net


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
    complete, partial = conversions_in(net)
    if partial and not complete:
        raise ValueError(
            f"{net.name!r} is a part of a net that was converted as a whole, or shared with one, and would go on in "
            "low precision there: restore that net, or convert it again with "
            f"mxmp.convert(net, exclude=[{net.name!r}])"
        )
    remove(net, complete)
    return net

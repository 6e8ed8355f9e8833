"""``convert`` and ``restore``: nets converted in place, and back.

A converted block keeps its class, tree, hooks and Parameters; each HybridBlock of the tree gets one hook.
"""

from __future__ import annotations

from typing import Iterable

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, Parameter

from ..policy import Policy, as_policy
from ..precision.decide import check_policy
from ..precision.devices import device_of
from . import _mxnet
from .conversion import Conversion, conversion_of
from .expected import Expected
from .hook import Hook, hook_of, hooks, hybrid_blocks
from .parameter import LowParameter, store_full

__all__ = ["convert", "restore"]


def convert(net: Block, policy: str | Policy = "float16", *, exclude: Iterable[str] = ()) -> Block:
    """Make ``net`` compute in low precision where that is safe, in place; returns ``net``.

    Needs no prior ``hybridize`` or forward. Parameters, their names, sharing, ``lr_mult``,
    ``wd_mult`` and ``grad_req`` stay, ``hybridize(...)`` may follow with any flags, and outputs are
    FP32. A converted net always runs as a graph. Converting again replaces the policy.

    Parameters
    ----------
    net : mxnet.gluon.Block
        A HybridBlock, a SymbolBlock, or a Block whose outermost hybrid children are converted.
    policy : str or Policy
        ``"float16"``, ``"bfloat16"``, a policy string or a Policy.
    exclude : iterable of str
        Patterns of nodes or blocks to keep in FP32, added to the policy's.

    Raises
    ------
    TypeError
        ``net`` is no Block.
    ValueError
        The policy cannot hold, there is nothing to convert, or parameters are not FP32. The net
        stays as it was.
    """
    policy = as_policy(policy, exclude)
    if not isinstance(net, Block):
        hint = ": for a Symbol use mxmp.cast_symbol" if isinstance(net, mx.sym.Symbol) else ""
        raise TypeError(f"convert takes a gluon Block, got {type(net).__name__}{hint}")
    blocks = hybrid_blocks(net)
    if not blocks:
        raise ValueError(
            f"nothing to convert: {type(net).__name__} {net.name!r} holds no HybridBlock, and only those "
            "have a graph to rewrite"
        )
    params = list(net.collect_params().values())
    _check_parameters(params, policy)
    before = [hook_of(block) for block in blocks]
    old = {None if hook is None else hook.conversion for hook in before}
    if len(old) == 1 and all(conversion is not None and conversion.policy == policy for conversion in old):
        return net
    restore(net)
    conversion = Conversion(policy, Expected(net, policy))
    for block in blocks:
        _mxnet.add_hook(block, Hook(conversion))
        _mxnet.forget_graph(block)
    for param in params:
        param.mxmp_conversion = conversion
    return net


def restore(net: Block) -> Block:
    """Undo ``convert`` in place; returns ``net`` in FP32, with the masters' values where there are masters.

    A net that is not converted is left alone.
    """
    if not isinstance(net, Block):
        raise TypeError(f"restore takes a gluon Block, got {type(net).__name__}")
    for block, hook in list(hooks(net)):
        hook.detach(block)
    for param in net.collect_params().values():
        if conversion_of(param) is not None:
            store_full(param)
            del param.mxmp_conversion
    return net


def _check_parameters(params: list[Parameter], policy: Policy) -> None:
    for param in params:
        if isinstance(param, LowParameter):
            continue
        if np.dtype(param.dtype) in (np.float16, _BFLOAT16):
            raise ValueError(
                f"Parameter {param.name!r} is stored in {param.dtype}: convert takes an FP32 net and casts by "
                "itself; call net.cast('float32') first"
            )
        for ctx in _mxnet.contexts(param):
            check_policy(policy, device_of(ctx))
    check_policy(policy, "cpu")


_BFLOAT16 = np.dtype([("bfloat16", np.uint16)])

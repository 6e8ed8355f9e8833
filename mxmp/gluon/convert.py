"""``convert`` and ``restore``: nets converted in place, and back. Each HybridBlock gets a hook that runs its graphs."""

from __future__ import annotations

from contextlib import suppress
from inspect import signature
from typing import Callable, Iterable

import mxnet as mx
from mxnet.gluon import Block

from ..messages.keywords import keywords_explained
from ..policy import Policy
from ..precision.plan import Plan, read_policy
from . import _mxnet
from .blocks import blocks_of, divide, with_names_of
from .conversion import NetConversion
from .hook import conversions_in, install, remove

_SYMBOLIC = (mx.sym.Symbol, mx.mod.BaseModule)


@keywords_explained
def convert(
    net: Block, policy: str | Policy | Plan = "float16", *, exclude: Iterable[str] | Callable[[str, Block], bool] = ()
) -> Block:
    """Make ``net`` compute in low precision where that is safe, in place; return ``net``.

    Neither ``hybridize`` nor a forward is needed before. After this call the net runs as a graph, whether it is
    hybridized or not; ``hybridize(...)`` may follow with any flags but ``backend``. Outputs are FP32, unless the policy
    says ``output="compute"``. The Parameters stay the same objects, with their names, sharing, ``lr_mult``, ``wd_mult``
    and ``grad_req``. Converting again replaces the policy. Nets that share blocks or Parameters may each be converted,
    with different policies. Does not wait for the device; graphs are made in the first forward.

    Parameters
    ----------
    net : mxnet.gluon.Block
        A HybridBlock, a SymbolBlock, or any other Block, in which the outermost HybridBlocks are converted.
    policy : str, Policy or Plan
        A recipe (``print(Policy.recipes())`` lists them), a policy string (``"float16,norm=compute"``, see
        ``Policy.parse``), a Policy, a Plan of this net (``mxmp.tune``), or the path of a saved Plan (``"plan.json"``).
    exclude : iterable of str, or callable
        Patterns such as ``"*head*"``: the operators and blocks whose names match stay in FP32, besides those that the
        policy excludes. A block of a class from outside MXNet runs as Python code if a pattern that does not end in
        ``*`` matches its name. Or a filter ``(name, block) -> bool``: the blocks for which it is True run as Python
        code in FP32. If a block runs as Python code by its name or the filter, so do all blocks inside and around it;
        all other HybridBlocks still run as graphs. With a Plan, ``exclude`` must be empty.

    Returns
    -------
    mxnet.gluon.Block
        ``net`` itself.

    Raises
    ------
    TypeError
        ``net`` is not a Block.
    ValueError
        ``policy`` is not understood or asks for what MXNet cannot do (bfloat16 on a GPU), there is no HybridBlock to
        convert, a parameter is float16 or bfloat16, or ``exclude`` is given with a Plan. The net stays as it was. If a
        Plan was made for another net, the first forward raises this error.
    OSError
        The file of a Plan cannot be read.
    RuntimeError
        ``amp.init()`` of ``mxnet.contrib.amp`` was called in this process.

    Examples
    --------
    >>> net = nn.HybridSequential()
    >>> net.add(nn.Dense(16, activation="relu"), nn.Dense(2))
    >>> net.initialize()
    >>> net = mxmp.convert(net, "float16")
    >>> x = mx.nd.random.uniform(shape=(8, 4))
    >>> net(x).dtype  # what a net returns is FP32
    <class 'numpy.float32'>
    """
    if not isinstance(net, Block):
        from ..messages.networks import instead  # what is said is loaded where it is needed

        raise TypeError(f"convert takes a gluon Block, got {type(net).__name__}{instead(net)}")
    _mxnet.refuse_contrib_amp()
    if isinstance(exclude, (Block, type)):  # which is callable too
        exclude = [exclude]  # type: ignore[list-item]  # refused as a name
    if callable(exclude):
        _check_filter(exclude)
    requested, plan = read_policy(policy, () if callable(exclude) else exclude)
    if callable(exclude) and plan is not None:
        raise ValueError("a Plan is of the whole net, and blocks that run as Python have none: tune what remains")
    how = requested if plan is None else with_names_of(blocks_of(net), plan)
    policy = how.policy if isinstance(how, Plan) else how
    division = divide(net, exclude if callable(exclude) else policy)
    install(division, NetConversion(how, division))
    return net


def _check_filter(exclude: Callable[[str, Block], bool]) -> None:
    with suppress(ValueError):  # a builtin may have no signature
        try:
            signature(exclude).bind("", None)
        except TypeError as error:
            raise TypeError(f"exclude is a filter of two arguments, lambda name, block: ...: {error}") from error


def restore(net: Block) -> Block:
    """Undo ``convert`` in place; return ``net`` in FP32.

    Parameters that were stored in float16 get the values of their master weights, and gradients of zeros. A net that is
    not converted stays as it is. A block that was inside ``net`` at the call of ``convert``, and was replaced by
    another block since, is restored too. Blocks and Parameters that ``net`` shares with another converted net stay
    converted for that net. Does not wait for the device.

    Raises
    ------
    TypeError
        ``net`` is not a Block.
    ValueError
        ``net`` was converted only as a part of a larger net, or through a block that it shares with another net.
        Restore the larger or the other net.

    Examples
    --------
    >>> net = nn.HybridSequential()
    >>> net.add(nn.Dense(16, activation="relu"), nn.Dense(2))
    >>> net.initialize()
    >>> x = mx.nd.random.uniform(shape=(8, 4))
    >>> before = net(x)
    >>> low = mxmp.convert(net, "float16")(x)
    >>> bool((mxmp.restore(net)(x) == before).min())
    True
    """
    if not isinstance(net, Block):
        from ..messages.networks import instead

        hint = ": cast_symbol and Module leave the FP32 Symbol as it is" if isinstance(net, _SYMBOLIC) else instead(net)
        raise TypeError(f"restore takes a gluon Block, got {type(net).__name__}{hint}")
    blocks = blocks_of(net)
    complete, partial = conversions_in(blocks)
    if partial and not complete:
        raise ValueError(
            f"{net.name!r} is a part of a net that was converted as a whole, or shared with one, and would go on in "
            "low precision there: restore that net, or convert it again with "
            f"mxmp.convert(net, exclude=[{net.name!r}])"
        )
    remove(blocks, complete)
    return net

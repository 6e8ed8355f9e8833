"""``tune``: the plan that is fast here, of those that are safe."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any, Iterable

import mxnet as mx
import numpy as np
from mxnet.gluon import Block

from ..host.child import showing
from ..kernels.fit import device_of
from ..messages.callers import warn_user
from ..policy import Policy
from ..precision.decide import check_policy
from ..precision.plan import Plan, read_policy
from ..step.updater import check_optimizer
from .choices import fewest_bytes
from .job import context_of, job_of
from .machine import describe, kept_times, write
from .process import measured_apart
from .search import EMULATED

logger = logging.getLogger("mxmp")


def tune(
    target: Block | mx.sym.Symbol,
    *inputs: Any,
    policy: str | Policy = "bfloat16",
    exclude: Iterable[str] = (),
    training: bool = True,
    optimizer: str = "sgd",
    measure: bool = True,
    ctx: mx.Context | None = None,
    cache: bool | str | os.PathLike = True,
    progress: bool = True,
    **shapes: Any,
) -> Plan:
    """Return the fastest plan of those that the rules call safe, for these shapes on this machine.

    Each operator and each cast is timed in its place in the network, forward and backward: with the whole network in
    FP32, with every operator in low precision that is safe there, and with the matrix operators alone in low precision.
    A minimum cut of these times gives the plan with the least sum. At the end whole steps of the network are timed, in
    rounds of one step each, under this plan, the rules' plan, the plan whose casts move the fewest bytes, and FP32.
    FP32 is chosen unless the fastest of the other plans beats it in at least three quarters of the rounds, and the
    rules' plan unless another beats that one so.

    ``tune`` measures in a process of its own, with the environment of this one, so with as many threads and the same
    instruction sets. If an operator's low-precision kernel crashes there, the operator stays in FP32. ``target`` is not
    changed, no random number of this process is drawn, and no thread is left behind. The call blocks until the plan is
    found, in seconds to minutes; Ctrl-C raises ``KeyboardInterrupt`` here and ends the other process.

    Custom operators, which only this process can run, compute in FP32. In their place a stand-in is timed that reads
    and returns tensors of the same shapes.

    Parameters
    ----------
    target : HybridBlock or Symbol
        The network, in FP32 or converted already. The shapes of its parameters need not be known yet.
    *inputs : NDArray, or tuple or list of int
        For a block: the arrays that it will be called with, or their shapes; lists of them where the block takes lists.
        Steps are timed on the values of an array, and on random values for a shape.
    policy : str or Policy
        A recipe, a policy string such as ``"compute=bfloat16,exclude=*head*"``, or a Policy, as for ``convert``. What
        the policy keeps in FP32 stays in FP32. float16 on a CPU is timed in its emulation.
    exclude : iterable of str
        Patterns of operators or blocks to keep in FP32, added to those of the policy.
    training : bool
        True for the plan that is fastest for a forward and a backward, False for a forward in inference mode alone.
    optimizer : str
        The name of the optimizer that updates the weights in the whole steps of a training: that of your Trainer. An
        update takes the same time under every plan, so the longer it takes, the less is gained. ``"sgd"`` has momentum;
        others have MXNet's defaults.
    measure : bool
        False runs nothing. The plan is then the one whose casts move the fewest bytes, with all matrix operators in low
        precision for which that is safe. Fewer bytes need not be less time: on a CPU this plan computes ReLU6's
        ``clip`` in bfloat16, which is correct and slow.
    ctx : mxnet.Context, optional
        The device that the plan is for, and on which it is measured. Default: where the parameters are; before they
        are initialized, or for a Symbol, where the input arrays are; without these, the current context.
    cache : bool or path
        True keeps the measured times in a file in the user's cache folder, and a later call does not measure them
        again; False does neither. A path is another folder for the file. Times hold for one machine, number of threads
        and build of MXNet. If the file cannot be read or written, ``tune`` warns and measures.
    progress : bool
        True shows a progress bar if stderr is a terminal and tqdm is installed.
    **shapes : tuple of int or NDArray
        For a Symbol: the shape or array of each input by its name, for example ``data=(32, 3, 224, 224)``. Every input
        that is no parameter must be given.

    Returns
    -------
    Plan
        The dtype of every operator, with the measured times in ``Plan.tuned``. Print it, save it, or give it to
        ``convert``, ``cast_symbol`` or ``Module`` as their policy. If the plan has nothing in low precision, they run
        the FP32 graph.

    Raises
    ------
    TypeError
        ``target`` is neither a Block nor a Symbol, or ``optimizer`` is no name.
    ValueError
        The inputs or their shapes do not fit the network; the block is no HybridBlock or cannot be traced; the policy
        is a Plan, is bfloat16 on a GPU, or names an operator that MXNet lacks or that cannot be in low precision; or an
        operator has no rule, or MXNet has no such optimizer. With ``measure=True`` also: ``ctx`` is a GPU that this
        machine lacks, or the body of a loop or condition has a Custom operator or one of ``mx.library``.
    ImportError
        A package is missing that ``pip install 'mxmp[tune]'`` installs.
    RuntimeError
        The process for measuring cannot start, FP32 itself crashes in it, or it was killed, as when memory runs out.
    mxnet.MXNetError
        The network fails even in FP32.

    Examples
    --------
    >>> net = nn.HybridSequential()
    >>> net.add(nn.Dense(16, activation="relu"), nn.Dense(2))
    >>> net.initialize()
    >>> x = mx.nd.random.uniform(shape=(8, 4))
    >>> plan = mxmp.tune(net, x, policy="bfloat16")
    >>> net = mxmp.convert(net, plan)
    """
    for name, value in {"training": training, "measure": measure}.items():
        if not isinstance(value, (bool, np.bool_)):
            raise ValueError(f"{name} must be True or False, got {value!r}")
    _check_optimizer(optimizer)
    policy, plan = read_policy(policy, exclude)
    if plan is not None:
        raise ValueError(f"tune makes a Plan, and was given one: give it a policy, such as policy={str(policy)!r}")
    device_of(ctx)  # refuses what is no context
    ctx = ctx or context_of(target, [*inputs, *shapes.values()])
    on_gpu = device_of(ctx) == "gpu"
    check_policy(policy, device_of(ctx), policy.low_ops + policy.full_ops)
    if measure and on_gpu and ctx.device_id >= mx.context.num_gpus():
        raise ValueError(f"{ctx} is not here to measure on: tune where it is, or with measure=False")
    if measure and not on_gpu and policy.compute == "float16":
        logger.warning("float16 is emulated on a CPU: %s", EMULATED)
    job = job_of(target, inputs, shapes, policy, ctx, training, measure, optimizer.lower())
    if not measure:
        return fewest_bytes(job)
    machine = describe(ctx)
    file, known = kept_times(machine, None if cache is True else cache) if cache else (None, {})
    with showing(progress, total=5) as show:
        plan, seconds = measured_apart(replace(job, seconds=known), show)
    if file is not None:
        try:
            write(file, machine, seconds)
        except OSError as error:
            warn_user(f"tune could not keep its times: {error}")
    return plan


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, str):
        raise TypeError(f"optimizer must be a name, such as 'adam', got {type(optimizer).__name__}")
    check_optimizer(optimizer, None)
    made_by = mx.optimizer.Optimizer.opt_registry[optimizer.lower()].__module__
    if not made_by.startswith("mxnet."):
        raise ValueError(
            f"{optimizer!r} is an optimizer of {made_by}, which the process that measures does not know: name the one "
            "of MXNet's whose update takes about as long, such as 'adam'"
        )

"""``tune``: the plan that is fast here, of those that are safe."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from typing import Any, Iterable

import mxnet as mx
from mxnet.gluon import Block

from ..child import showing
from ..files import check_writable
from ..policy import Policy
from ..precision.plan import Plan, read_policy
from .job import job_of
from .machine import cache_file, describe
from .process import measured_apart
from .search import fewest_bytes
from .table import read, write

__all__ = ["tune"]


def tune(
    target: Block | mx.sym.Symbol,
    *inputs: Any,
    policy: str | Policy = "bfloat16",
    exclude: Iterable[str] = (),
    training: bool = True,
    measure: bool = True,
    ctx: mx.Context | None = None,
    cache: bool | str | os.PathLike = True,
    progress: bool = True,
    **shapes: Any,
) -> Plan:
    """Return the fastest plan of those that the rules call safe, for these shapes on this machine.

    Each operator and each cast is timed in its place in the network, forward and backward: once with all of it in
    FP32, once with all in low precision that may be, and once with the matrix operators alone. A minimum cut of these
    costs is the assignment with the least time. At the end steps of the network decide between that, the rules' plan,
    the one with the fewest bytes cast, and FP32, which wins where nothing is faster beyond the spread.

    It measures in a process of its own, which starts with this one's environment: same threads, same instruction sets.
    A kernel that crashes there is left out. ``target`` stays as it is, no random number of this process is drawn, and
    no thread is left behind. Ctrl-C ends both at once.

    Operators that this process alone knows (Custom ones, those of ``mx.library``) compute in FP32; a stand-in that
    reads and returns the same shapes is timed in their place.

    Parameters
    ----------
    target : HybridBlock or Symbol
        In FP32 or converted; its shapes need not be known yet.
    *inputs : NDArray, or tuple or list of int
        For a block: what it will be called with, or its shapes; lists of them where the block takes lists.
    policy, exclude
        As for ``convert``. What the policy keeps in FP32 stays there.
    training : bool
        Whether a step is a forward and a backward, or a forward alone.
    measure : bool
        Without it nothing runs: the plan is the one whose casts move the fewest bytes, with every matrix operator low
        that may be. Bytes are not time: on a CPU it computes ReLU6's ``clip`` in bfloat16, which is right and slow.
    ctx : mxnet.Context, optional
        Where it will run (default: the current context).
    cache : bool or path
        Whether times are kept, or the folder for them (default: the user's cache folder). They hold for one machine,
        number of threads and build of MXNet. Where they cannot be read or written, ``tune`` warns and measures.
    progress : bool
        Show a bar on a terminal, where tqdm is installed.
    **shapes : tuple of int or NDArray
        For a Symbol: its inputs; for example ``data=(32, 3, 224, 224)``.

    Returns
    -------
    Plan
        ``print`` it, save it, give it to ``convert``, ``cast_symbol`` or ``Module`` for a policy. One in which nothing
        is low runs the FP32 graph as it is.

    Raises
    ------
    TypeError
        ``target`` is neither.
    ValueError
        The shapes do not fit, the block cannot be traced, the policy cannot hold, or ``ctx`` is not there.
    ImportError
        ``pip install 'mxmp[tune]'`` is missing.
    RuntimeError
        The process for measuring cannot start, FP32 itself crashes in it, or it was killed, as when memory runs out.
    mxnet.MXNetError
        FP32 itself fails.
    """
    policy, plan = read_policy(policy, exclude)
    if plan is not None:
        raise ValueError(f"tune makes a Plan, and was given one: give it a policy, such as policy={str(policy)!r}")
    ctx = ctx or mx.context.current_context()
    if measure and ctx.device_type == "gpu" and ctx.device_id >= mx.context.num_gpus():
        raise ValueError(f"{ctx} is not here to measure on: tune where it is, or with measure=False")
    job = job_of(target, inputs, shapes, policy, ctx, training, measure)
    if not measure:
        return fewest_bytes(job)
    machine = describe(ctx)
    file, known = _kept_times(machine, None if cache is True else cache) if cache else (None, {})
    with showing(progress, total=5) as show:
        plan, seconds = measured_apart(replace(job, seconds=known), show)
    if file is not None:
        try:
            write(file, machine, seconds)
        except OSError as error:
            warnings.warn(f"tune could not keep its times: {error}", stacklevel=2)
    return plan


def _kept_times(machine: dict[str, Any], folder: str | os.PathLike | None) -> tuple[str | None, dict[str, float]]:
    """Return the file for this machine's times, None where it cannot be written, and its times. Warn at most once."""
    file, known, why = None, {}, None
    try:
        file = cache_file(machine, folder)
        known = read(file)
    except (OSError, ValueError) as error:
        why = f"measures anew, for {file or 'the cache'} cannot be used: {error}"
    if file is not None:
        try:
            check_writable(file)
        except OSError as error:
            file, why = None, f"will not keep its times: {error}"
    if why is not None:
        warnings.warn(f"tune {why}", stacklevel=3)
    return file, known

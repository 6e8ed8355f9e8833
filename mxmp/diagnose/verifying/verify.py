"""``verify``: run a ported training plain, through mxmp in FP32, and in low precision, and compare what they do."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Callable, Sequence

from ...host.child import showing
from ..networks.frontends import check_positive
from .judging import course, departure
from .porting import alike_on_average, compare
from .reasons import reasons
from .recording import Record
from .report import Verification, behind, difference, updates_of
from .rounding import judge
from .running import Job, Runner, Script

# How plain MXNet may run where it fails, and what it is called. Some of oneDNN's kernels fail in FP32.
_OTHERWISE = (
    (Job("plain", imperative=True), "was not hybridized"),
    (Job("plain", onednn=False), "computed without oneDNN"),
)
# What mxmp logs of a port that is right, too.
_NO_NEWS = ("step ", "nan or inf is detected", "float16 is emulated", "this CPU has neither", "discarded non-finite")


def verify(
    run: Callable[[], Any] | str | os.PathLike,
    steps: int = 20,
    *,
    arguments: Sequence[str] = (),
    seed: int = 0,
    progress: bool = True,
) -> Verification:
    """Say whether a ported training still does what it did in plain MXNet, and whether what is left is only rounding.

    Runs it several times for ``steps`` updates, each time in a process of its own, with the same random seeds and the
    same initial weights:

    - *plain*: each call of mxmp does what MXNet's would. ``convert`` leaves the net as it is, a Trainer is gluon's.
    - *graph*: all that mxmp does, with graphs, loss scale and checks, but every operator computes in FP32.
    - *low*: as written.
    - *noise*, twice: plain, with the initial weights rounded to the compute dtype, up or down at random.

    Further runs follow where the first leave a question: whether plain repeats itself, how a last digit of FP32 grows,
    what other random draws do. A step that low precision skips is left out of the plain run that it is compared with.
    A process ends at its last update, so that nothing behind it in the script is done.

    Parameters
    ----------
    run : callable, str or path
        A function without arguments that builds and trains, or the path of a script, which runs as by ``python``.
    steps : int
        How many updates of a trainer or module to compare. A script that ends earlier is compared as far as it goes.
    arguments : sequence of str
        What the script gets in ``sys.argv``.
    seed : int
        The seed of Python's, NumPy's and MXNet's random numbers.
    progress : bool
        Whether to show a progress bar, if tqdm is installed.

    Returns
    -------
    Verification
        ``right`` and ``verdict``; ``print`` shows them with likely reasons, ``plot_verification`` draws.

    Raises
    ------
    TypeError
        ``run`` is neither callable nor a path.
    ValueError
        ``steps`` is not positive, or ``arguments`` are given for a function.
    OSError
        There is no such script.
    """
    check_positive(steps=steps)
    called: Script | Callable[[], Any]
    if isinstance(run, (str, os.PathLike)):
        path = os.fspath(run)
        with open(path, "rb"):
            pass
        called = Script(path, list(arguments))
    elif callable(run):
        if arguments:
            raise ValueError("arguments are for a script; a function is called without any")
        called = run
    else:
        raise TypeError(f"verify takes a function that builds and trains, or a script, got {type(run).__name__}")
    with showing(progress, 6 * steps) as show:
        return _verified(Runner(called, steps, seed, show))


def _verified(runner: Runner) -> Verification:
    job = Job("plain")
    plain = runner.run(job)
    note = ""
    failed = plain.error
    for other, how in _OTHERWISE if failed else ():
        job, plain, note = other, runner.run(other), f"plain MXNet {how}, as it fails with {failed} otherwise"
        if not plain.error:
            break
    if plain.error:
        # A fork keeps the kernels that this process has chosen before.
        anew = ". If MXNet has computed here before, try it in a new process: python -m mxmp verify SCRIPT"
        hint = anew if failed.startswith("MXNetError") else ""
        return Verification(None, f"Cannot say: in plain MXNet it fails with {failed}{hint}")
    if unknown := _says_nothing(plain):
        return Verification(None, f"Cannot say: {unknown}", steps=plain.updates)
    dtype = "bfloat16" if "bfloat16" in plain.dtypes else "float16"
    graph, written = runner.run(Job("graph", onednn=job.onednn)), Job("low")
    if graph.error.startswith("MXNetError") and job.onednn:
        other = job._replace(onednn=False)
        records = runner.run(other), runner.run(Job("graph", onednn=False))
        if not any(each.error for each in records):
            note = f"FP32 computed without oneDNN, as its graph fails with {graph.error} otherwise"
            job, (plain, graph) = other, records
    low = runner.run(written)
    if low.error and not job.onednn:
        without = runner.run(written._replace(onednn=False))
        if not without.error:  # what low precision leaves in FP32 fails as in plain MXNet
            note += f"; {dtype} too, as it fails with {low.error} otherwise: set MXNET_MKLDNN_ENABLED=0 to train so"
            written, low = written._replace(onednn=False), without
    said = tuple(text for text in dict.fromkeys(low.said) if text not in plain.said and not text.startswith(_NO_NEWS))
    found: dict[str, Any] = {"steps": plain.updates, "dtype": dtype, "said": said, "written": tuple(low.outside)}
    early = departure(plain, graph) if graph.error else None
    if graph.error and (early is None or early.what == "updates"):
        return _ended(graph, "in FP32", note, found)
    compared = compare(runner, job, plain, graph, note)
    plain, job, at, note = compared.plain, compared.job, compared.at, compared.note
    runs = {"plain": (plain, plain), "graph": compared.moved or (plain, graph), "low": (plain, low)}
    found["courses"] = {name: course(*pair) for name, pair in runs.items()}
    if at is not None and not compared.unknown:
        apart = f", {note}" if note.startswith("without") else behind(note)
        verdict = (
            f"The port is not right: graph differs from plain from update {at.step} on, in FP32, so rounding is not "
            f"the cause: {difference(at, len(plain.steps))}{apart}"
        )
        return Verification(False, verdict, reasons(at), departure=at, **found)
    if low.error:
        return _ended(low, f"in {dtype}", note, found)
    found["agreement"] = max(found["courses"]["graph"].compared, default=0.0)
    if compared.unknown:
        return Verification(None, f"Cannot say: {compared.unknown}", departure=at, **found)
    of_draws, of_graph = compared.draws, compared.draws or compared.faults
    again = (Job("graph", onednn=job.onednn) if of_graph else job)._replace(dtype=dtype, skips=frozenset(low.skips))
    reference = runner.run(again) if low.skips else graph if of_graph else plain
    found["skipped"] = len(low.skips)
    judged = judge(runner, again, reference, written, low, note, found)
    left = judged.low_departure
    if left is not None and of_draws and alike_on_average(runner, job, written, left):
        return replace(
            judged, right=True, verdict=f"The port is right: {note}, of {dtype} too", low_departure=None, reasons=()
        )
    return judged


def _says_nothing(plain: Record) -> str:
    """Return why nothing follows from the plain run; empty if something does."""
    if not plain.is_ported:
        return (
            "it makes no update by an mxmp.Trainer or mxmp.Module. A loop that changes weights itself, by w -= lr * g "
            "or optimizer.update, has no loss scale: give them to an mxmp.Trainer, or a Symbol to an mxmp.Module"
        )
    if not plain.dtypes:
        return "nothing is converted. Call mxmp.convert(net), or train an mxmp.Module"
    ends = plain.ends_at
    return f"from update {ends} on, plain MXNet's own gradients are inf or NaN" if ends else ""


def _ended(record: Record, how: str, note: str, found: dict[str, Any]) -> Verification:
    made = f" after {updates_of(record.updates)}" if record.updates else ""
    verdict = f"The port is not right: plain MXNet trains, and mxmp {how} ends{made} with {record.error}"
    return Verification(False, verdict + behind(note), **found)

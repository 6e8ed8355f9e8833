"""Looks at a training, by mxmp's tools and MXNet's own: whatever is called between two calls, the training goes on."""

from __future__ import annotations

import contextlib
import io
import pickle
from typing import Any, Callable

from kit.twins import array

import mxmp
from mxmp import diagnose


def watched(pair: Any, *target: Any) -> None:
    """Begin to watch, or end it: the calls in between are watched."""
    if pair.watch is None:
        pair.watch = diagnose.watch(*target, every=pair.rng.choice([1, 2]))
    else:
        pair.watch.close()
        pair.watch = None


def guarded(pair: Any, *target: Any) -> None:
    """The same with ``guard``, which is so patient that it moves nothing."""
    if pair.watch is None:
        pair.watch = diagnose.guard(*target, patience=10**6)
    else:
        watched(pair)


def summary(pair: Any) -> None:
    # MXNet refuses it where a block is hybridized.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(AssertionError):
        pair.low.net.summary(*pair.low.arguments(77))


def audit(pair: Any) -> None:
    side = pair.low
    diagnose.audit(side.net, lambda out, _: side.loss(out, 77), (side.arguments(77), array(78, 1)))


def blame(pair: Any) -> None:
    side = pair.low
    diagnose.blame(side.net, side.trainer, *side.arguments(77), loss=lambda out: side.loss(out, 77))


OF_NETS: dict[str, Callable[[Any], Any]] = {
    "explain": lambda pair: str(mxmp.explain(pair.low.net)),
    "explain a call": lambda pair: mxmp.explain(pair.low.net, *pair.low.arguments(77)),
    "advise": lambda pair: str(diagnose.advise(pair.low.net, *pair.low.arguments(77))),
    "audit": audit,
    "audit outputs": lambda pair: diagnose.audit(pair.low.net, None, pair.low.arguments(77)),
    "blame": blame,
    "watch": lambda pair: watched(pair, pair.low.net, pair.low.trainer),
    "guard": lambda pair: guarded(pair, pair.low.net, pair.low.trainer),
    "summary": summary,
    "tune": lambda pair: mxmp.tune(pair.low.net, *pair.low.arguments(77), measure=False),
    "checkpoint": lambda pair: mxmp.save_checkpoint(pair.folder / "look", pair.low.net, pair.low.trainer),
    "parameters": lambda pair: pair.low.net.save_parameters(str(pair.folder / "look.params")),
    "export": lambda pair: pair.low.net.export(str(pair.folder / "look")),
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair.low.trainer.scaler)),
    "repr": lambda pair: (repr(pair.low.net), repr(pair.low.trainer), str(pair.low.trainer.scaler)),
}
OF_MODULES: dict[str, Callable[[Any], Any]] = {
    "explain": lambda pair: str(mxmp.explain(pair.low.module)),
    "audit": lambda pair: diagnose.audit(pair.low.module, None, pair.low.batch(77)),
    "blame": lambda pair: diagnose.blame(pair.low.module, pair.low.batch(77)),
    "watch": lambda pair: watched(pair, pair.low.module),
    "guard": lambda pair: guarded(pair, pair.low.module),
    "checkpoint": lambda pair: mxmp.save_checkpoint(pair.folder / "look", pair.low.module),
    "parameters": lambda pair: pair.low.module.save_params(str(pair.folder / "look.params")),
    "get_params": lambda pair: pair.low.module.get_params(),
    "outputs": lambda pair: pair.low.module.get_outputs(),
}

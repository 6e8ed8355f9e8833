"""Which operators have to be in FP32 for a batch to be finite, by trying."""

from __future__ import annotations

from typing import Callable, Collection, NamedTuple, Sequence

import mxnet as mx

from ...policy import pattern_for
from ..auditing.replays import Candidate, Replays
from ..networks.protocol import ReplayedNetwork


class Tried(NamedTuple):
    """What trying has found: the patterns of ``exclude`` that cure, or why there are none, as the end of a sentence."""

    cure: tuple[str, ...]
    why: str = ""


def tried(replayed: Callable[[], ReplayedNetwork], scale: float) -> Tried:
    """Replay the batch of ``replayed()`` with operators in FP32, from the loss scale ``scale`` on down."""
    try:
        network = replayed()
        with network.unchanged():
            return _tried(Replays(network), scale)
    except (ValueError, mx.MXNetError) as error:
        return Tried((), f"No exclude could be tried: {str(error).strip().splitlines()[-1]}")


def _tried(replays: Replays, scale: float) -> Tried:
    if not replays.reference.is_finite:
        return Tried((), "The same batch is not finite in FP32 either")

    def is_finite(low: Collection[Candidate]) -> bool:
        replays.loss_scale = scale
        return replays.run_scaled(low).is_finite

    candidates = replays.candidates
    if is_finite(candidates):
        return Tried(())
    found: list[Candidate] = []
    left = candidates
    while not is_finite(left):
        bad = _one(left, is_finite)
        if not bad:
            return Tried((), "No exclude of single operators cures it: replayed alone, each is finite")
        found += bad
        left = replays.low_without(found)
    for each in reversed(found) if len(found) > 1 else ():
        others = [other for other in found if other != each]
        if others and is_finite(replays.low_without(others)):
            found = others
    return Tried(tuple(dict.fromkeys(pattern_for(name) for _, name in found)))


def _one(group: Sequence[Candidate], is_finite: Callable[[Collection[Candidate]], bool]) -> list[Candidate]:
    """Return the last operator of ``group`` that alone makes the batch not finite; none if it takes several."""
    while len(group) > 1:
        middle = len(group) // 2
        half = next((half for half in (group[middle:], group[:middle]) if not is_finite(half)), None)
        if half is None:
            return []
        group = half
    return list(group)

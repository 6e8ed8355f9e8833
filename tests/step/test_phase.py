"""Between two steps: every event in every phase either leads on or says what to do."""

from __future__ import annotations

from itertools import product

import pytest

from mxmp.step.phase import Event, Phase, Progress

LEADS_TO = {
    Phase.READY: {Event.BACKWARD: Phase.SCALED, Event.REDUCE: Phase.READY},
    Phase.SCALED: {
        Event.BACKWARD: Phase.SCALED,
        Event.REDUCE: Phase.REDUCED,
        Event.UNSCALE: Phase.UNSCALED,
        Event.CLIP: Phase.CLIPPED,
        Event.UPDATE: Phase.READY,
    },
    Phase.REDUCED: {
        Event.BACKWARD: Phase.SCALED,
        Event.REDUCE: Phase.REDUCED,
        Event.UNSCALE: Phase.UNSCALED_REDUCED,
        Event.CLIP: Phase.CLIPPED,
        Event.UPDATE: Phase.READY,
    },
    Phase.CLIPPED: {
        Event.REDUCE: Phase.CLIPPED,
        Event.UNSCALE: Phase.UNSCALED_CLIPPED,
        Event.CLIP: Phase.CLIPPED,
        Event.UPDATE: Phase.READY,
    },
    Phase.UNSCALED: {
        Event.REDUCE: Phase.UNSCALED_REDUCED,
        Event.CLIP: Phase.UNSCALED_CLIPPED,
        Event.UPDATE: Phase.READY,
    },
    Phase.UNSCALED_REDUCED: {
        Event.REDUCE: Phase.UNSCALED_REDUCED,
        Event.CLIP: Phase.UNSCALED_CLIPPED,
        Event.UPDATE: Phase.READY,
    },
    Phase.UNSCALED_CLIPPED: {
        Event.REDUCE: Phase.UNSCALED_CLIPPED,
        Event.CLIP: Phase.UNSCALED_CLIPPED,
        Event.UPDATE: Phase.READY,
    },
}


def at(phase: Phase) -> Progress:
    progress = Progress()
    progress.phase = phase
    return progress


@pytest.mark.parametrize(("phase", "event"), [*product(Phase, Event)], ids=lambda e: e.name)
def test_an_event_leads_on_or_is_refused_and_then_nothing_changed(phase, event):
    progress = at(phase)
    if event in LEADS_TO[phase]:
        progress.check(event, 8.0)
        progress.note(event, 8.0)
        assert progress.phase is LEADS_TO[phase][event]
    else:
        with pytest.raises(RuntimeError):
            progress.check(event, 8.0)
        assert progress.phase is phase


@pytest.mark.parametrize("event", Event, ids=lambda e: e.name)
def test_at_scale_one_a_plain_backward_counts(event):
    progress = Progress()
    progress.check(event, 1.0)
    progress.note(event, 1.0)
    assert progress.phase is LEADS_TO[Phase.SCALED][event]


def test_gradients_that_are_added_are_not_added_to_a_sum_over_devices():
    for phase in (Phase.REDUCED, Phase.SCALED):
        progress = at(phase)
        progress.accumulates = True
        if phase is Phase.SCALED:
            progress.check(Event.BACKWARD, 8.0)
            continue
        with pytest.raises(RuntimeError, match="update first"):
            progress.check(Event.BACKWARD, 8.0)

"""Between two steps: every event, whatever came before it, either leads on or says what to do."""

from __future__ import annotations

import copy
import pickle
from itertools import product

import pytest

from mxmp.step.ledger import Event, Ledger

NONE, SCALED, REDUCED, CLIPPED = "", "pending", "pending summed", "pending summed clipped"
UNSCALED, UNSCALED_REDUCED = "pending unscaled", "pending summed unscaled"
UNSCALED_CLIPPED = "pending summed unscaled clipped"
LEADS_TO = {
    NONE: {Event.BACKWARD: SCALED, Event.REDUCE: NONE},
    SCALED: {Event.BACKWARD: SCALED, Event.REDUCE: REDUCED, Event.UNSCALE: UNSCALED, Event.CLIP: CLIPPED},
    REDUCED: {Event.BACKWARD: SCALED, Event.REDUCE: REDUCED, Event.UNSCALE: UNSCALED_REDUCED, Event.CLIP: CLIPPED},
    CLIPPED: {Event.REDUCE: CLIPPED, Event.UNSCALE: UNSCALED_CLIPPED, Event.CLIP: CLIPPED},
    UNSCALED: {Event.REDUCE: UNSCALED_REDUCED, Event.CLIP: UNSCALED_CLIPPED},
    UNSCALED_REDUCED: {Event.REDUCE: UNSCALED_REDUCED, Event.CLIP: UNSCALED_CLIPPED},
    UNSCALED_CLIPPED: {Event.REDUCE: UNSCALED_CLIPPED, Event.CLIP: UNSCALED_CLIPPED},
}


def at(state: str) -> Ledger:
    ledger = Ledger()
    for flag in state.split():
        setattr(ledger, flag, True)
    return ledger


def state_of(ledger: Ledger) -> str:
    return " ".join(flag for flag in ("pending", "summed", "unscaled", "clipped") if getattr(ledger, flag))


@pytest.mark.parametrize(("state", "event"), [*product(LEADS_TO, Event)])
def test_an_event_leads_on_or_is_refused_and_then_nothing_changed(state, event):
    ledger = at(state)
    if event is Event.UPDATE and state:
        ledger.check(event, 8.0)
        ledger.clear()
        assert state_of(ledger) == NONE
    elif event in LEADS_TO[state]:
        ledger.check(event, 8.0)
        ledger.note(event, 8.0)
        assert state_of(ledger) == LEADS_TO[state][event]
    else:
        with pytest.raises(RuntimeError):
            ledger.check(event, 8.0)
        assert state_of(ledger) == state


@pytest.mark.parametrize("event", LEADS_TO[SCALED])
def test_at_scale_one_a_plain_backward_counts(event):
    ledger = Ledger()
    ledger.check(Event.UPDATE, 1.0)
    ledger.check(event, 1.0)
    ledger.note(event, 1.0)
    assert state_of(ledger) == LEADS_TO[SCALED][event]


def test_gradients_that_are_added_are_not_added_to_a_sum_over_devices():
    for state in (REDUCED, SCALED):
        ledger = at(state)
        ledger.accumulates = True
        if state is SCALED:
            ledger.check(Event.BACKWARD, 8.0)
            continue
        with pytest.raises(RuntimeError, match="update first"):
            ledger.check(Event.BACKWARD, 8.0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda ledger: pickle.loads(pickle.dumps(ledger))])
def test_a_copy_has_no_gradients(copied):
    ledger, weight = at(CLIPPED), object()
    ledger.note_written([weight])
    ledger.note_scale(8.0, awaited=True)
    other = copied(ledger)
    assert state_of(other) == NONE
    assert not other.scaled
    assert not other.awaited
    assert not other.has_written(weight)
    assert ledger.has_written(weight)

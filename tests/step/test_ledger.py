"""Between two steps: every event, whatever came before it, either leads on or says what to do."""

from __future__ import annotations

import copy
import pickle
from itertools import product

import pytest

from mxmp.step.ledger import LEADS_TO, Event, Ledger, State

UNSCALED = [State.UNSCALED, State.UNSCALED_REDUCED, State.UNSCALED_CLIPPED]
CLIPPED = [State.CLIPPED, State.UNSCALED_CLIPPED]
SUMMED = [State.REDUCED, State.UNSCALED_REDUCED, *CLIPPED]


def at(state: State) -> Ledger:
    ledger = Ledger()
    ledger.state = state
    return ledger


@pytest.mark.parametrize(("state", "event"), [*product(State, Event)])
def test_an_event_leads_on_or_is_refused_and_then_nothing_changed(state, event):
    ledger = at(state)
    if event in LEADS_TO[state]:
        ledger.check(event, 8.0)
        ledger.note(event, 8.0)
        assert ledger.state is LEADS_TO[state][event]
    else:
        with pytest.raises(RuntimeError):
            ledger.check(event, 8.0)
        assert ledger.state is state


@pytest.mark.parametrize("state", State)
def test_gradients_can_always_be_summed_and_all_that_there_are_be_applied(state):
    assert LEADS_TO[state][Event.REDUCE] in SUMMED or state is State.NONE
    assert LEADS_TO[state].get(Event.UPDATE) is (None if state is State.NONE else State.NONE)


@pytest.mark.parametrize("state", State)
def test_what_is_unscaled_or_clipped_stays_so_until_the_update(state):
    for event, then in LEADS_TO[state].items():
        if event is not Event.UPDATE:
            assert state not in UNSCALED or then in UNSCALED
            assert state not in CLIPPED or then in CLIPPED
            assert state not in SUMMED or then in SUMMED or event is Event.BACKWARD
    assert (Event.UNSCALE in LEADS_TO[state]) == (state is not State.NONE and state not in UNSCALED)
    assert (Event.BACKWARD in LEADS_TO[state]) == (state not in UNSCALED + CLIPPED)


@pytest.mark.parametrize("event", LEADS_TO[State.SCALED])
def test_at_scale_one_a_plain_backward_counts(event):
    ledger = Ledger()
    ledger.check(Event.UPDATE, 1.0)
    ledger.check(event, 1.0)
    ledger.note(event, 1.0)
    assert ledger.state is LEADS_TO[State.SCALED][event]


def test_gradients_that_are_added_are_not_added_to_a_sum_over_devices():
    for state in (State.REDUCED, State.SCALED):
        ledger = at(state)
        ledger.accumulates = True
        if state is State.SCALED:
            ledger.check(Event.BACKWARD, 8.0)
            continue
        with pytest.raises(RuntimeError, match="update first"):
            ledger.check(Event.BACKWARD, 8.0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda ledger: pickle.loads(pickle.dumps(ledger))])
def test_a_copy_has_no_gradients(copied):
    ledger, weight, gradient = at(State.CLIPPED), object(), object()
    ledger.note_written([(weight, gradient)])
    ledger.note_scale(8.0, awaited=True)
    other = copied(ledger)
    assert other.state is State.NONE
    assert not other.scaled
    assert not other.awaited
    assert not other.has_written(weight, gradient)
    assert ledger.has_written(weight, gradient)
    assert not ledger.has_written(weight, object())  # of another ``grad_req``

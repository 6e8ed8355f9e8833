"""Drawn sequences of calls leave what they leave in plain FP32 MXNet, bit for bit, where mxmp keeps all in FP32.

MXMP_DRAWN=2000 tries as many of each frontend; ``-k "gluon and 1234"`` repeats one.
"""

from __future__ import annotations

import os

import pytest

from .drawn_sequences import PAIRS, run

SEEDS = range(int(os.environ.get("MXMP_DRAWN", "30")))

pytestmark = [
    pytest.mark.filterwarnings("ignore:nothing in .* (computes|would run) in:UserWarning"),
    pytest.mark.filterwarnings("ignore:Optimizer created manually:UserWarning"),
    pytest.mark.filterwarnings("ignore:Already bound:UserWarning"),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),  # of MXNet's own Module
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", PAIRS)
def test_a_drawn_sequence_of_calls_is_that_of_plain_fp32(kind, seed, tmp_path):
    run(kind, seed, tmp_path)


SUMS = ["add", "iteration", "scale", "iteration", "step", "scale", "clip", "iteration", "scale", "iteration"]
LATER = {
    "gluon": ["unscale", "step", "iteration", "scale", "load_states", "iteration"],
    "module": ["update", "scale", "iteration", "scale", "load_states", "iteration"],
}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", LATER)
def test_what_a_step_leaves_in_added_gradients_follows_the_loss_scale(kind, seed, tmp_path):
    calls = [call for call in [*SUMS, *LATER[kind]] if call in PAIRS[kind].OPS]
    run(kind, seed, tmp_path, calls)

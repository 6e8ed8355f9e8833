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


# What is drawn too seldom to be left to chance.
LOOKS = "clip clip,unscale clip,clip unscale,allreduce clip,allreduce unscale clip,unscale allreduce clip,scale unscale"
STEP = "step iteration"
ORDERS = {
    "gluon": [
        *(f"{how} forward backward {looks} {STEP}" for how in ("write", "add") for looks in LOOKS.split(",")),
        f"add forward backward scale forward backward scale forward backward clip {STEP}",
        "freeze iteration null iteration write iteration overflow iteration",
        f"add iteration scale iteration step scale clip {STEP} scale iteration unscale {STEP} scale load_states {STEP}",
    ],
    "module": [
        "add iteration scale iteration scale iteration update scale iteration scale load_states iteration",
        "iteration load_states iteration overflow rebind iteration",
    ],
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("kind", "calls"), [(kind, calls) for kind in ORDERS for calls in ORDERS[kind]])
def test_an_order_of_calls_is_that_of_plain_fp32(kind, calls, seed, tmp_path):
    run(kind, seed, tmp_path, calls.split())

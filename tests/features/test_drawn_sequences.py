"""Drawn sequences of calls leave what they leave in plain FP32 MXNet, bit for bit, where mxmp keeps all in FP32; and on
float16 parameters with masters, what they leave in a twin with FP32 parameters.

MXMP_DRAWN=2000 tries as many of each frontend; ``-k "gluon and 1234"`` repeats one.
"""

from __future__ import annotations

import os

import pytest

from .drawn_masters import KEEP, WRITES, MastersModulePair, MastersPair
from .drawn_modules import BucketsPair, ModulePair
from .drawn_sequences import HEADS, LOOKS, ON_ONE_DEVICE, VARIANTS, GluonPair, run
from .drawn_trainers import OverlappingPair, OwnScalersPair, TrainersPair

MASTERS = {"masters": MastersPair, "masters of a module": MastersModulePair}
KINDS = {
    "gluon": GluonPair,
    "module": ModulePair,
    "buckets": BucketsPair,
    "trainers": TrainersPair,
    "scalers": OwnScalersPair,
    "overlapping": OverlappingPair,
    **MASTERS,
}
SEEDS = range(int(os.environ.get("MXMP_DRAWN", "20")))

pytestmark = [
    pytest.mark.filterwarnings("ignore:nothing in .* (computes|would run) in:UserWarning"),
    pytest.mark.filterwarnings("ignore:a net computes in float16 and is trained by a:UserWarning"),
    pytest.mark.filterwarnings("ignore:Optimizer created manually:UserWarning"),
    pytest.mark.filterwarnings("ignore:Already bound:UserWarning"),
    pytest.mark.filterwarnings("ignore:Parameters already initialized:UserWarning"),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),  # of MXNet's own Module
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_drawn_sequence_of_calls_is_that_of_its_twin(kind, seed, tmp_path):
    run(KINDS[kind], seed, tmp_path)


# What is drawn too seldom to be left to chance.
BETWEEN = (
    "clip clip,unscale clip,clip unscale,allreduce clip,allreduce unscale clip,unscale allreduce clip,scale unscale"
)
STEP = "step iteration"
ORDERS = {
    "gluon": [
        *(f"{how} forward backward {looks} {STEP}" for how in ("write", "add") for looks in BETWEEN.split(",")),
        f"add forward backward scale forward backward scale forward backward clip {STEP}",
        "freeze iteration null iteration write iteration overflow iteration",
        f"add iteration scale iteration step scale clip {STEP} scale iteration unscale {STEP} scale load_states {STEP}",
        f"forward backward allreduce {STEP} bad_batch part part {STEP} part overflow stray {STEP}",
        f"iteration switch iteration switch {STEP} inputs {STEP} wrong_loss {STEP} master_weights {STEP}",
        f"plain_iteration plain_step {STEP} iteration plain_step plain_iteration {STEP}",
    ],
    "module": [
        "add iteration scale iteration scale iteration update scale iteration scale load_states iteration",
        "iteration load_states iteration overflow rebind iteration",
    ],
    "masters": [
        "iteration user_write iteration average iteration user_write overflow iteration",
        "add iteration scale forward backward user_write forward backward clip step set_data iteration",
    ],
    "masters of a module": [
        "iteration user_write iteration add iteration scale iteration user_write overflow iteration"
    ],
    "scalers": ["both critic step step", "critic both step step both step step"],
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("kind", "calls"), [(kind, calls) for kind in ORDERS for calls in ORDERS[kind]])
def test_an_order_of_calls_is_that_of_its_twin(kind, calls, seed, tmp_path):
    run(KINDS[kind], seed, tmp_path, calls.split())


TRAINING = (
    "iteration iteration overflow iteration scale iteration add overflow iteration zero_grad overflow write iteration"
)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["gluon", "masters", "masters and multi_precision"])
def test_every_optimizer_trains_as_its_twin(kind, variant, tmp_path):
    kind, _, multi_precision = kind.partition(" and ")
    devices = {"devices": 1} if VARIANTS[variant][0] in ON_ONE_DEVICE else {}
    forced = {"optimizer": VARIANTS[variant], "stored": "masters", "multi_precision": bool(multi_precision), **devices}
    run(KINDS[kind], len(variant), tmp_path, TRAINING.split(), **forced)


LEFT = ("scale", "unscale", "clip", "allreduce", "unscale clip")
SAVES = "load_states forward backward discard load_states iteration"
SKIPS = "overflow iteration overflow iteration"
CHOICES = {
    **{f"by {way}": ("gluon", f"iteration add {STEP}", {"way": way}) for way in GluonPair.WAYS},
    "plain, at a scale of 1": (
        "gluon",
        f"iteration forward backward allreduce {STEP}",
        {"way": "plain", "scaler": None},
    ),
    "plain, after unscale": ("gluon", f"add forward backward unscale forward backward {STEP}", {"way": "plain"}),
    **{f"{looks}, {late}": ("gluon", SKIPS, {"looks": looks, "late": late}) for looks in LOOKS for late in (0, 1)},
    **{
        f"cleared after {look}": ("gluon", SKIPS, {"looks": look, "late": 0, "ends": "zero_grad", "scaler": "dynamic"})
        for look in ("clip_global_norm", "unscale", "unscale allreduce_grads")
    },
    **{f"head {head}": ("gluon", "iteration scale iteration scale iteration", {"head": head}) for head in HEADS},
    **{
        f"{how}, {kind}": (kind, "iteration user_write iteration", {"write": how}) for how in WRITES for kind in MASTERS
    },
    **{f"keep {how}": ("masters", f"{STEP} average average", {"keep": how, "stored": "masters"}) for how in KEEP},
    **{f"nested {how}": ("scalers", "nested both step", {"nested": how}) for how in OwnScalersPair.NESTED},
    **{f"zero_grad after {look}": ("gluon", f"forward backward {look} zero_grad {SAVES}", {}) for look in LEFT},
    **{
        f"another grad_req after {look}": (
            *("gluon", f"forward backward {look} add step add iteration"),
            {"optimizer": ("sgd", {"momentum": 0.9, "wd": 0.01}), "way": "backward"},
        )
        for look in ("", "clip", "unscale", "allreduce")
    },
    "by each trainer": ("trainers", "round round overflow", {"how": "by each"}),
    "a scale of 1, shared": ("trainers", "scale round round round overflow", {"scale": 1.0}),
    "an own optimizer on two devices": (
        "masters",
        "iteration user_write iteration iteration",
        {"optimizer": ("limited", {}), "devices": 2, "kvstore": "device", "stored": "masters"},
    ),
    "adding up at the default scale": ("masters", f"add {STEP} iteration", {"scaler": "dynamic", "stored": "masters"}),
    "a scale below 1": (
        "module",
        "scale iteration forward backward input_grads update iteration",
        {"scale": 2.0**-40, "head": "softmax"},
    ),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_leaves_what_its_twin_has(choice, seed, tmp_path):
    kind, calls, forced = CHOICES[choice]
    run(KINDS[kind], seed, tmp_path, calls.split(), **forced)

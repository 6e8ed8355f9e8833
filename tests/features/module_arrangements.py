"""Legal arrangements of a Module, drawn; and each with its FP32 twin, MXNet's own. As ``arrangements`` for Gluon."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import mxnet as mx
import numpy as np
from hypothesis import strategies as st
from kit.plans import random_exclusions, random_plan_of_symbol
from kit.twins import POLICIES, array
from mxnet.gluon import nn

import mxmp

from .arrangements import BATCH, CLASSES, HEADS, OPTIMIZERS, STEPS, WIDTH, part, parts


@dataclass(frozen=True)
class ModuleArrangement:
    """One program: ``heads`` behind one body; ``"output"`` is a plain one, whose gradient the caller gives."""

    dtype: str
    parts: tuple[str, ...]
    heads: tuple[str, ...]
    bucketing: bool
    scale: float | str | None
    backwards: int
    devices: int
    kvstore: str
    optimizer: str
    overflow: bool
    how: str = "rules"  # or operators "excluded" at random, or a "plan" drawn at random
    evaluations: int = 0  # after each step
    seed: int = 0


@st.composite
def module_arrangements(draw: st.DrawFn) -> ModuleArrangement:
    def one_of(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    # A module takes the gradients of all its outputs from the caller, or of none.
    heads = one_of(("output",), ("output", "output"), None)
    return ModuleArrangement(
        dtype=one_of(*POLICIES),
        parts=tuple(draw(st.lists(parts(), min_size=1, max_size=2))),
        heads=heads or tuple(draw(st.lists(st.sampled_from([*HEADS]), min_size=1, max_size=2))),
        bucketing=one_of(False, False, True),
        scale=one_of(1024.0, 64.0, "dynamic", 1.0, None),
        backwards=one_of(1, 1, 2, 3),
        devices=one_of(1, 1, 2, 4),
        kvstore=one_of("local", "device"),
        optimizer=one_of(*OPTIMIZERS),
        overflow=one_of(False, False, True),
        how=one_of("rules", "excluded", "plan"),
        evaluations=one_of(0, 1, 2),
        seed=draw(st.integers(0, 1000)),
    )


def module_deltas(a: ModuleArrangement, *, full: bool = False) -> dict[str, np.ndarray]:
    """What three steps add to every parameter, running statistics included; and the evaluations' outputs."""
    # On several devices MXNet's own fused executors read weights beside their update: after an evaluation two of sixty
    # FP32 runs came out by up to 38 % different.
    unfused = {"MXNET_SUBGRAPH_BACKEND": "NONE"} if full else {}
    with mock.patch.dict(os.environ, unfused):
        return _module_deltas(a, full)


def _module_deltas(a: ModuleArrangement, full: bool) -> dict[str, np.ndarray]:
    symbol, frozen = _symbol(a, full)
    module = _module(a, symbol, frozen, full)
    data, label = [("data", (BATCH, WIDTH))], [("label", (BATCH,))]
    module.bind(
        data, label if "label" in symbol.list_arguments() else None, grad_req="add" if a.backwards > 1 else "write"
    )
    before = _initial(symbol)
    module.init_params(arg_params=before, aux_params=before, allow_extra=True)
    options = {**OPTIMIZERS[a.optimizer], "rescale_grad": 1 / (BATCH * a.backwards)}
    module.init_optimizer(a.kvstore, a.optimizer, options)
    outputs: dict[str, np.ndarray] = {}
    for step in range(STEPS):
        _step(a, module, step, full)
        for number in range(a.evaluations):
            outputs[f"output of evaluation {number} after step {step}"] = _evaluate(a, module)
    mx.nd.waitall()  # BatchNorm writes its statistics in backward without telling the engine
    args, auxs = module.get_params()
    changes = {name: value.asnumpy() - before[name].asnumpy() for name, value in {**args, **auxs}.items()}
    return {**changes, **outputs}


def _symbol(a: ModuleArrangement, full: bool) -> tuple[mx.sym.Symbol, list[str]]:
    """And the names of what stays as it is."""
    body = nn.HybridSequential(prefix="body_")
    with body.name_scope():
        body.add(*(part(name, copy=full) for name in a.parts))
    out = body(mx.sym.var("data"))
    outs = [mx.sym.FullyConnected(out, num_hidden=CLASSES, name=f"fc{k}") for k in range(len(a.heads))]
    label = mx.sym.var("label")
    ends = [
        o if head == "output" else HEADS[head](prefix=f"head{k}_")(o, label)
        for k, (o, head) in enumerate(zip(outs, a.heads))
    ]
    frozen = [
        name for name, param in body.collect_params().items() if param.grad_req == "null" and "running" not in name
    ]
    return mx.sym.Group(ends), frozen


def _module(a: ModuleArrangement, symbol: mx.sym.Symbol, frozen: list[str], full: bool) -> Any:
    labels = ["label"] if "label" in symbol.list_arguments() else []
    common: dict[str, Any] = {"context": [mx.cpu(k) for k in range(a.devices)], "fixed_param_names": frozen}
    if not full:
        scale = mxmp.DynamicLossScaler(512.0) if a.scale == "dynamic" else a.scale
        common.update(policy=_how(a, symbol), loss_scale=scale)
    library = mx.mod if full else mxmp
    if a.bucketing:
        return library.BucketingModule(lambda key: (symbol, ["data"], labels), default_bucket_key=BATCH, **common)
    return library.Module(symbol, ["data"], labels, **common)


def _how(a: ModuleArrangement, symbol: mx.sym.Symbol) -> mxmp.Policy | mxmp.Plan:
    policy = POLICIES[a.dtype]
    policy = mxmp.Policy.parse(policy) if isinstance(policy, str) else policy
    if a.how == "plan":
        return random_plan_of_symbol(symbol, policy, a.seed)
    return policy if a.how == "rules" else replace(policy, exclude=tuple(random_exclusions([symbol], a.seed)))


def _initial(symbol: mx.sym.Symbol) -> dict[str, mx.nd.NDArray]:
    rng = np.random.RandomState(1)
    known = {"data": (BATCH, WIDTH), **({"label": (BATCH,)} if "label" in symbol.list_arguments() else {})}
    arguments, _, states = symbol.infer_shape(**known)
    shapes = {k: v for k, v in zip(symbol.list_arguments(), arguments) if k not in known}
    values = {k: mx.nd.array(rng.uniform(-0.5, 0.5, v)) for k, v in shapes.items()}
    shapes = dict(zip(symbol.list_auxiliary_states(), states))
    return {**values, **{k: mx.nd.ones(v) if k.endswith("var") else mx.nd.zeros(v) for k, v in shapes.items()}}


def _step(a: ModuleArrangement, module: Any, number: int, full: bool) -> None:
    for k in range(a.backwards):
        seed = number * 8 + k
        batch = _batch(a, seed)
        module.forward(batch, is_train=True)
        module.backward(None if _labelled(a) else [array(seed + 1 + i, BATCH, CLASSES) for i in range(len(a.heads))])
    spoiled = a.overflow and number == 1
    gradients = (module._curr_module if a.bucketing else module)._exec_group.grad_arrays
    if spoiled:
        next(g for g in gradients if g[0] is not None)[-1][:] = float("inf")
    if not (full and spoiled):
        module.update()
    for arrays in gradients:
        for gradient in arrays:
            if gradient is not None:
                gradient[:] = 0


def _batch(a: ModuleArrangement, seed: int) -> mx.io.DataBatch:
    labels = [mx.nd.array((np.arange(BATCH) + seed) % CLASSES)]
    # A bucket key of its own makes another graph over the same parameters.
    key = {"bucket_key": BATCH + seed % 2} if a.bucketing else {}
    shapes = {
        "provide_data": [("data", (BATCH, WIDTH))],
        "provide_label": [("label", (BATCH,))] if _labelled(a) else None,
    }
    return mx.io.DataBatch([array(seed, BATCH, WIDTH)], labels if _labelled(a) else [], **key, **shapes)


def _evaluate(a: ModuleArrangement, module: Any) -> np.ndarray:
    module.forward(_batch(a, 0), is_train=False)
    return np.concatenate([out.asnumpy().ravel() for out in module.get_outputs()])


def _labelled(a: ModuleArrangement) -> bool:
    return "output" not in a.heads

"""A converted net of any code computes, leaves behind and differentiates what one does that is not hybridized.

pytest tests/features/test_drawn_code.py --hypothesis-profile=long --hypothesis-seed=1
"""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from kit.examples import examples
from mxnet import autograd, gluon

import mxmp

from .drawn_code import CALLS, EVENTS, OF_THE_NET, SHAPE, Program, made, programs

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*it is traced anew:UserWarning"),
    pytest.mark.filterwarnings("ignore:nothing in .* computes in:UserWarning"),
    pytest.mark.filterwarnings("ignore:.* is not used by any computation"),
    pytest.mark.filterwarnings("ignore:a plain loss.backward:UserWarning"),
]


@settings(max_examples=examples(200), suppress_health_check=list(HealthCheck), print_blob=True, deadline=None)
@given(programs())
def test_a_converted_net_is_what_its_code_says(program: Program):
    with mx.util.np_shape(program.is_numpy), mx.util.np_array(program.is_numpy):
        found = [runs(program, how) for how in (None, "float16")]
    for number, (full, low) in enumerate(zip(*found)):
        where = f"call {number}:\n{program}"
        assert full.keys() == low.keys(), where
        for name, value in full.items():
            if isinstance(value, np.ndarray):
                np.testing.assert_allclose(
                    low[name], value, rtol=0.02, atol=0.02 * max(1, abs(value).max()), err_msg=f"{name}, {where}"
                )
            else:
                assert low[name] == value, f"{name}, {where}"


def runs(program: Program, how: str | None) -> list[dict[str, Any]]:
    """Return what each call gives: outputs, attributes, gradients and running statistics."""
    net, module = made(program.code)
    mx.random.seed(3)
    net.initialize(mx.init.Xavier())
    rng, array = np.random.RandomState(0), mx.np.array if program.is_numpy else mx.nd.array
    x, y = (array(rng.uniform(-1, 1, SHAPE), dtype="float32") for _ in range(2))
    x.attach_grad()
    if how:
        mxmp.convert(net, how)
    found = []
    for events, mode, has_label in program.calls:
        for event, value, is_inside in events:
            made_anew = EVENTS[event](net.inner if is_inside and event not in OF_THE_NET else net, module, value)
            net = made_anew if isinstance(made_anew, gluon.Block) else net
        found.append(called(net, x, y, mode, has_label))
    return found


def called(net: Any, x: Any, y: Any, mode: str, has_label: bool) -> dict[str, Any]:
    params = net.collect_params()
    with CALLS[mode]():
        out = net(x, y) if has_label else net(x)
        arrays: list[mx.nd.NDArray] = []
        found = {"out": flat(out, arrays), "counts": [net.count, net.inner.count]}
        loss = sum((each * (i + 1)).sum() for i, each in enumerate(arrays))
    for name, value in left_in(net).items():
        left: list[mx.nd.NDArray] = []
        found[name] = flat(value, left)
        found.update({f"{name}{i}": each.asnumpy() for i, each in enumerate(left)})
    found.update({f"out{i}": each.asnumpy() for i, each in enumerate(arrays)})
    x.grad[:] = 0
    for param in params.values():
        if param.grad_req != "null":
            param.grad()[:] = 0
    if mode.startswith("record"):
        try:
            autograd.backward([loss], train_mode=autograd.is_training() or mode == "record")
        except mx.MXNetError:  # of plain, where all is paused
            found["backward"] = "nothing to differentiate"
        found["gradient of x"] = x.grad.asnumpy()
    for name, param in params.items():
        short = name[len(net.prefix) if name.startswith(net.prefix) else 0 :]
        if mode.startswith("record") and param.grad_req != "null":
            found[f"gradient of {short}"] = param.grad().astype("float32").asnumpy()
        if "running" in short:
            found[short] = param.data().asnumpy()
    found.pop("backward", None)
    return found


def left_in(net: Any) -> dict[str, Any]:
    both = {"": net, "inner ": net.inner}
    return {f"{of}{name}": getattr(b, name) for of, b in both.items() for name in ("aux", "names", "last")}


def flat(value: Any, arrays: list) -> Any:
    """Return how arrays are nested in a value, and what they are; they are appended to ``arrays``."""
    if isinstance(value, mx.nd.NDArray):
        arrays.append(value)
        return type(value).__name__, np.dtype(value.dtype).name, value.shape
    if isinstance(value, (list, tuple)):
        return type(value)(flat(each, arrays) for each in value)
    return {key: flat(each, arrays) for key, each in value.items()} if isinstance(value, dict) else value

"""Recurrent layers on the simulated GPU: the stub of cuDNN against MXNet's CPU, and language models on it."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn

import mxmp

from .families import CPU, GPU, UNITS, WORDS, Family, Training, differing, distance, trained

TESTS_PER_PROCESS = 20
STEPS, BATCH, INPUTS, HIDDEN = 5, 3, 7, 6
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
SHAPES = [(1, False), (2, False), (1, True), (3, True)]


def values(mode: str, layers: int, both: bool) -> dict[str, np.ndarray]:
    """Inputs of a layer, all of them float16 numbers."""
    directions, count, inputs = 1 + both, 0, INPUTS
    for _ in range(layers):
        count += directions * GATES[mode] * HIDDEN * (inputs + HIDDEN + 2)
        inputs = directions * HIDDEN
    rng = np.random.RandomState(layers)
    shapes = {"data": (STEPS, BATCH, INPUTS), "parameters": (count,), "state": (layers * directions, BATCH, HIDDEN)}
    if mode == "lstm":
        shapes["state_cell"] = shapes["state"]
    return {name: (rng.randn(*shape) * 0.5).astype("float16").astype("float32") for name, shape in shapes.items()}


def computed(
    mode: str, layers: int, both: bool, ctx: mx.Context, dtype: str = "float32", request: str = "write"
) -> dict[str, np.ndarray]:
    """Outputs and last states, in inference too, and the gradients of all inputs."""
    arrays = {name: mx.nd.array(value, ctx=ctx, dtype=dtype) for name, value in values(mode, layers, both).items()}
    options = {"mode": mode, "state_size": HIDDEN, "num_layers": layers, "bidirectional": both, "state_outputs": True}
    for name, array in arrays.items():
        array.attach_grad(request if name == "parameters" else "write")  # MXNet adds to no other gradient
    outputs = mx.nd.RNN(**arrays, **options)
    found = {f"inference {i}": out for i, out in enumerate(outputs)}
    rng = np.random.RandomState(0)
    for _ in range(1 + (request == "add")):
        with autograd.record():
            outputs = mx.nd.RNN(**arrays, **options)
        heads = [mx.nd.array(rng.randn(*out.shape), ctx=ctx, dtype=dtype) for out in outputs]
        autograd.backward(outputs, heads)
    found.update({f"output {i}": out for i, out in enumerate(outputs)})
    found.update({f"gradient of {name}": array.grad for name, array in arrays.items()})
    assert {array.dtype for array in found.values()} == {np.dtype(dtype).type}
    return {name: array.astype("float32").asnumpy() for name, array in found.items()}


def largest_errors(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> dict[str, float]:
    """Of each array, over its largest value."""
    return {name: float(np.abs(found[name] - wanted[name]).max() / np.abs(wanted[name]).max()) for name in wanted}


@pytest.mark.parametrize("mode", GATES)
@pytest.mark.parametrize(("layers", "both"), SHAPES)
def test_a_layer_is_the_cpus_in_fp32(mode, layers, both):
    errors = largest_errors(*(computed(mode, layers, both, ctx) for ctx in (GPU, CPU)))
    assert max(errors.values()) < 5e-6, errors


@pytest.mark.parametrize("mode", GATES)
@pytest.mark.parametrize(("layers", "both"), SHAPES[1:])
def test_a_float16_layer_is_fp32s_but_for_roundings(mode, layers, both):
    errors = largest_errors(computed(mode, layers, both, GPU, "float16"), computed(mode, layers, both, CPU))
    assert 2**-13 < max(errors.values()) < 2**-7, errors


@pytest.mark.parametrize("mode", GATES)
def test_gradients_are_added_where_that_is_asked(mode):
    errors = largest_errors(*(computed(mode, 2, True, ctx, request="add") for ctx in (GPU, CPU)))
    assert max(errors.values()) < 5e-6, errors


class LanguageModel(gluon.HybridBlock):
    def __init__(self, layer: Any, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, UNITS)
        self.layer = layer(UNITS, layout="NTC", input_size=UNITS, **options)
        self.decoder = nn.Dense(WORDS, flatten=False)

    def hybrid_forward(self, F: Any, words: Any) -> Any:  # noqa: N803
        return self.decoder(self.layer(self.embedding(words)))


LAYERS = {
    "lstm": lambda: LanguageModel(rnn.LSTM, num_layers=2),
    "gru": lambda: LanguageModel(rnn.GRU),
    "both directions": lambda: LanguageModel(rnn.LSTM, bidirectional=True),
    "tanh": lambda: LanguageModel(rnn.RNN, activation="tanh"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_language_model_trains_as_in_the_emulation(name):
    family = Family(LAYERS[name], (6,), (6,), axis=2)
    exact, emulated, found = (
        trained(family, *run).change() for run in ((None, CPU), ("float16", CPU), ("float16", GPU))
    )
    own = distance(emulated, exact)
    assert 0 < own < 4e-3
    assert distance(found, emulated) < own
    assert distance(found, exact) < 1.5 * own


def test_an_overflow_in_a_language_model_changes_no_bit():
    run = Training(Family(LAYERS["lstm"], (6,), (6,), axis=2), "float16", GPU, scale=mxmp.DynamicLossScaler(2.0**24))
    skipped = []
    for number in range(14):
        before = run.weights()
        run.step(number)
        skipped.append(run.trainer.last_step_skipped)
        assert (differing(before, run.weights()) == []) is skipped[-1]
    assert skipped[0]
    assert not skipped[-1]

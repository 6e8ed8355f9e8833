"""The CPU's emulation of float16 against a Tensor Core's recording, and against exact arithmetic.

Both sum products of float16 numbers in FP32, in an order of their own, and round once to float16. So a result may
differ by one step of float16 at most, plus what FP32 loses over the sum: its length times FP32's rounding error times
the sum of the products' magnitudes (a Tensor Core cuts off where FP32 rounds, hence the factor 2).
"""

import os
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from gpu import tensor_core

import mxmp

RECORDING = Path(os.environ.get("MXMP_TENSOR_CORE") or Path(__file__).parent.parent / "data" / "tensor_core.npz")
NAMES = [name for name, _ in tensor_core.cases()]


def _products(name, data, weight, head):
    """(out, data_grad, weight_grad) of float64 arrays, and the number of products in each sum."""
    if name.startswith("fc"):
        results = data @ weight.T, head @ weight, head.T @ data
        return results, (data.shape[1], head.shape[1], head.shape[0])
    padded = np.pad(data, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    out = np.einsum("nchwij,fcij->nfhw", windows, weight)
    weight_grad = np.einsum("nchwij,nfhw->fcij", windows, head)
    heads = np.lib.stride_tricks.sliding_window_view(
        np.pad(head, ((0, 0), (0, 0), (1, 1), (1, 1))), (3, 3), axis=(2, 3)
    )
    data_grad = np.einsum("nfhwij,fcij->nchw", heads, weight[:, :, ::-1, ::-1])
    pixels = head.shape[0] * head.shape[2] * head.shape[3]
    return (out, data_grad, weight_grad), (data.shape[1] * 9, head.shape[1] * 9, pixels)


def _exact(case, name):
    """What float64 arithmetic gives, rounded once to float16."""
    results, _ = _products(name, *(case[key].astype(np.float64) for key in ("data", "weight", "head")))
    with np.errstate(over="ignore"):
        rounded = [result.astype(np.float16) for result in results]
    return dict(zip(("out", "data_grad", "weight_grad"), rounded))


def _emulated(case, name):
    """What mxmp's emulation gives on the CPU."""
    data, weight = mx.sym.Variable("data"), mx.sym.Variable("weight")
    if name.startswith("fc"):
        sym = mx.sym.FullyConnected(data, weight, no_bias=True, num_hidden=case["weight"].shape[0])
    else:
        filters = case["weight"].shape[0]
        sym = mx.sym.Convolution(data, weight, no_bias=True, num_filter=filters, kernel=(3, 3), pad=(1, 1))
    low = mxmp.cast_symbol(sym, mxmp.Policy("float16", params="float32"), ctx=mx.cpu())
    values = {key: mx.nd.array(case[key], dtype="float32") for key in ("data", "weight")}
    grads = {key: mx.nd.zeros_like(value) for key, value in values.items()}
    executor = low.bind(mx.cpu(), values, grads)
    out = executor.forward(is_train=True)[0].asnumpy()
    executor.backward(mx.nd.array(case["head"], dtype="float32"))
    return {"out": out, **{f"{key}_grad": grad.asnumpy() for key, grad in grads.items()}}


def _bounded(array):
    """float64, with infinity one step of float16 beyond its largest number."""
    return np.clip(array.astype(np.float64), -65536, 65536)


def _hold(case, name, expected):
    magnitudes, lengths = _products(name, *(abs(case[key].astype(np.float64)) for key in ("data", "weight", "head")))
    emulated = _emulated(case, name)
    for key, magnitude, length in zip(("out", "data_grad", "weight_grad"), magnitudes, lengths):
        got, want = _bounded(emulated[key]), _bounded(expected[key])
        step = np.spacing(np.minimum(abs(want), 32768).astype(np.float16))
        same = abs(got - want) <= step + 2 * length * 2.0**-24 * magnitude
        assert same.all(), f"{name}.{key}: {np.count_nonzero(~same)} of {same.size} differ"


@pytest.fixture(scope="module")
def recording():
    if not RECORDING.exists():
        pytest.skip(f"no {RECORDING.name} yet: scripts/dev.py check tensor-core makes it where there is a Tensor Core")
    with np.load(RECORDING) as file:
        return dict(file)


@pytest.mark.parametrize("name", NAMES)
def test_emulation_equals_tensor_core(recording, name):
    case = {key: recording[f"{name}.{key}"] for key in tensor_core.ARRAYS}
    _hold(case, name, case)


@pytest.mark.parametrize("name", NAMES)
def test_emulation_equals_exact_arithmetic_rounded_once(name):
    case = dict(tensor_core.cases())[name]
    _hold(case, name, _exact(case, name))


@pytest.mark.parametrize("kind", ["fc", "conv"])
def test_the_cases_are_what_they_say(kind):
    every = dict(tensor_core.cases())
    out = {case: _exact(every[f"{kind}.{case}"], kind)["out"] for case in ("normal", "overflow", "subnormal")}
    assert np.isfinite(out["normal"]).all()
    assert 0.02 < np.isinf(out["overflow"]).mean() < 0.98
    assert np.median(abs(out["subnormal"])) < 2.0**-14
    assert every[f"{kind}.long"]["weight"][0].size >= 2000


def test_a_wrong_result_is_noticed():
    name = "fc.normal"
    case = dict(tensor_core.cases())[name]
    wrong = _exact(case, name)
    wrong["out"][3, 5] += np.float16(0.125)
    with pytest.raises(AssertionError, match="1 of 768"):
        _hold(case, name, wrong)


def test_recording_refuses_without_a_gpu(tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA GPU here")
    with pytest.raises(SystemExit, match="no CUDA GPU"):
        tensor_core.main(["--output", str(tmp_path / "none.npz")])
    assert not list(tmp_path.iterdir())

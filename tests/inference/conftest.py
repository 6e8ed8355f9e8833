"""The trained network, the digits, and what optimizing it with them finds: made once for all these tests."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.served_networks import batches, digits, trained_on_digits

import mxmp
from mxmp.inference.runner import CandidateError, Runner


@pytest.fixture(scope="session")
def images():
    return digits()[0]


@pytest.fixture(scope="session")
def net():
    mx.random.seed(0)
    np.random.seed(0)
    return trained_on_digits()


@pytest.fixture(scope="session")
def held(net, images):
    """Digits that neither trained nor calibrated, their labels, and what FP32 says."""
    x = mx.nd.array(images[1500:])
    return x, digits()[1][1500:], net(x).asnumpy()


@pytest.fixture(scope="session")
def found(net, images):
    return mxmp.optimize_for_inference(net, batches(images))


@pytest.fixture(scope="session")
def candidates(net, images):
    """Each candidate as it would be served."""
    kept = {}

    def evaluate(served):
        dtypes = {
            p.dtype if isinstance(p.dtype, str) else str(np.dtype(p.dtype)) for p in served.collect_params().values()
        }
        ops = served.symbol.tojson(remove_amp_cast=False)
        kind = "int8" if "quantize" in ops else "bfloat16" if any("bfloat16" in d for d in dtypes) else "float32, fused"
        kept[kind] = served
        return 1.0

    mxmp.optimize_for_inference(net, batches(images), evaluate=evaluate)
    return kept


@pytest.fixture(scope="session")
def full(net, images):
    return mxmp.optimize_for_inference(net, batches(images), dtypes=())


@pytest.fixture
def failing(monkeypatch):
    """Lets the process of candidates fail where ``is_asked(what, *arguments)``."""

    def fail(is_asked, message="its process ended with SIGSEGV"):
        ask = Runner.ask

        def failing_ask(self, what, *arguments):
            if is_asked(what, *arguments):
                raise CandidateError(message, crashed="ended" in message)
            return ask(self, what, *arguments)

        monkeypatch.setattr(Runner, "ask", failing_ask)

    return fail

"""Fixtures that every test may use."""

import os

import mxnet as mx
import numpy as np
import pytest
from hypothesis import settings

from mxmp import cpu
from mxmp.pipeline import _log_that_float16_is_emulated

os.environ.pop("MXNET_SAFE_ACCUMULATION", None)  # tests that need it set it

# scripts/test.sh tries the same examples every time ("ci"); pytest alone tries new ones, and
# --hypothesis-profile=long twenty times as many (see kit/examples.py).
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("home", deadline=None)
settings.register_profile("long", deadline=None, max_examples=2000)
settings.load_profile("home")


_log_that_float16_is_emulated()  # once in a process; tests of the log see their own lines only


def pytest_configure(config):
    """Tests read scaled gradients, and compute unscaled ones in float16, to compare them; users are warned.
    ``gluon/test_scaled_reads.py`` and ``gluon/test_doors.py`` say when."""
    config.addinivalue_line("filterwarnings", "ignore:the gradient .*is read between a scaled backward:UserWarning")
    config.addinivalue_line("filterwarnings", r"ignore:a plain loss.backward\(\) has run through:UserWarning")


def pytest_collection_modifyitems(items):
    """What is not marked `slow` is `quick`; what needs a machine that this one is not skips, with the reason."""
    lacking = {
        "gpu": not mx.context.num_gpus() and "needs a CUDA GPU that MXNet 1.9.1 can use; there is none here",
        "bfloat16_kernels": not cpu.multiplies_bfloat16() and "needs oneDNN's bfloat16 kernels, so a CPU with AVX-512",
        "vnni": cpu.lacks(*cpu.VNNI) and "needs INT8 kernels that do not overflow, so a CPU with VNNI",
    }
    for item in items:
        if item.get_closest_marker("slow") is None:
            item.add_marker("quick")
        for marker, reason in lacking.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_setup():
    """The engine is idle when pytest writes the next phase into the environment: MXNet's oneDNN reads the environment
    in the engine's threads, and glibc's getenv beside another thread's putenv crashes (one run in about a hundred).
    """
    yield
    mx.nd.waitall()


pytest_runtest_call = pytest_runtest_teardown = pytest_runtest_setup


@pytest.fixture(autouse=True)
def _seeded():
    mx.random.seed(0)
    np.random.seed(0)


@pytest.fixture(autouse=True)
def _environment_as_it_was():
    """Scripts and examples that are run in this process set variables for theirs.

    Only what they changed is written: a thread of MXNet's that reads the environment meanwhile crashes where glibc has
    moved it.
    """
    before = dict(os.environ)
    yield
    for name in (before.keys() | os.environ.keys()) - {"PYTEST_CURRENT_TEST"}:
        if name not in before:
            del os.environ[name]
        elif os.environ.get(name) != before[name]:
            os.environ[name] = before[name]

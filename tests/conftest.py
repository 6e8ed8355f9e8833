"""Fixtures that every test may use."""

import os
import warnings

import mxnet as mx
import numpy as np
import pytest
from hypothesis import settings

from mxmp.host import cpu
from mxmp.host.versions import NUMBERS
from mxmp.pipeline import _log_that_float16_is_emulated, _warn_of_slow_bfloat16

BAD_INPUT = "tests/test_main.py::test_bad_input_is_one_line_that_says_what_is_wrong_and_writes_nothing"
ONLY_1_7 = ((1, 7, 0),)
BEFORE_1_9 = (*ONLY_1_7, (1, 8, 0))
NO_NORM_WITH_RELU = "has no BatchNormWithReLU"
NO_3D_DECONVOLUTION = "computes no Deconvolution over three axes on a CPU"
UNKNOWN_SHAPE = "ends its shape inference in a failed check of BatchNorm where the shape of the data is not known"

os.environ.pop("MXNET_SAFE_ACCUMULATION", None)  # tests that need it set it

# scripts/test.sh tries the same examples every time ("ci"); pytest alone tries new ones, and
# --hypothesis-profile=long twenty times as many (see kit/examples.py).
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("home", deadline=None)
settings.register_profile("long", deadline=None, max_examples=2000)
settings.load_profile("home")


# Once in a process; tests of the log and of warnings see their own lines only.
_log_that_float16_is_emulated()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    _warn_of_slow_bfloat16()


def pytest_configure(config):
    """Tests read scaled gradients, and compute unscaled ones in float16, to compare them; users are warned.
    ``gluon/test_scaled_reads.py`` and ``gluon/test_backward.py`` say when."""
    config.addinivalue_line("filterwarnings", "ignore:the gradient .*is read between a scaled backward:UserWarning")
    config.addinivalue_line("filterwarnings", r"ignore:a plain loss.backward\(\) has run through:UserWarning")


# Faults of other versions of MXNet than 1.9.1: pytest ids, the versions that have the fault, and the fault.
FAULTS = (
    ("tests/gluon/test_hook.py::test_block_save_", BEFORE_1_9, "has no HybridBlock.save"),
    *(
        (f"tests/features/test_save_and_load.py::test_{what}", BEFORE_1_9, "has no HybridBlock.save")
        for what in ("any_net", "a_loaded", "after_the_first_call", "the_graph_of_a_loaded")
    ),
    ("tests/features/test_wrong_kernels.py::test_a_3d_deconvolution", BEFORE_1_9, NO_3D_DECONVOLUTION),
    ("tests/kernels/test_padding.py::test_3d_deconvolutions_are_cropped_apart", BEFORE_1_9, NO_3D_DECONVOLUTION),
    (
        "tests/gluon/test_scaling.py::test_a_loss_that_would_round_the_scale_is_refused_and_one_that_holds_it_is_not[half",
        BEFORE_1_9,
        "computes amp_cast of no float16 array on a CPU (unknown type for MKLDNN)",
    ),
    (
        "tests/step/test_gradients.py::test_finite_elements_whose_squares_overflow_are_no_overflow[20000]",
        BEFORE_1_9,
        "rounds dot's sum of squares more than the test allows, in FP32",
    ),
    *(
        (f"tests/kernels/{test}", ONLY_1_7, NO_NORM_WITH_RELU)
        for test in (
            "test_cuda.py::test_batch_norm_with_relu_is_two_operators",
            "test_cuda.py::test_a_norm_with_relu_of_low_input_has_no_casts",
            "test_emulation.py::test_bfloat16_without_avx512_has_one_rounding_forward_and_backward[_contrib_BatchNormWithReLU]",
        )
    ),
    (f"{BAD_INPUT}[tune without shapes", ONLY_1_7, UNKNOWN_SHAPE),
    (f"{BAD_INPUT}[advise without shapes", ONLY_1_7, UNKNOWN_SHAPE),
    ("tests/test_main.py::test_tune_names_what_it_lacks", ONLY_1_7, UNKNOWN_SHAPE),
    (
        "tests/features/test_operators_on_weights.py::test_every_operator_on_weights_binds_and_trains_as_in_fp32[_square_sum]",
        ONLY_1_7,
        "ends the process in _square_sum, in FP32",
    ),
    (
        "tests/features/test_operators_on_weights.py::test_every_operator_on_weights_binds_and_trains_as_in_fp32[_npi_pad]",
        ONLY_1_7,
        "computes 1 for each gradient of np.pad, in FP32",
    ),
    (
        "tests/gluon/test_scopes.py::test_batch_statistics_of_a_prediction_are_exported_and_have_gradients",
        ONLY_1_7,
        "exports no net with a parameter that its graph does not read, and has no BatchNormReLU",
    ),
    (
        "tests/gluon/test_hook.py::test_hybridize_in_the_middle_takes_hold_at_once_even_for_forward",
        ONLY_1_7,
        "has no hybridize(clear=...)",
    ),
    (
        "tests/scripts/test_sweep_operators.py::test_every_registered_name_is_measured_or_listed_with_the_reason",
        ONLY_1_7,
        NO_NORM_WITH_RELU,
    ),
)


def fault_of(test: str) -> str:
    """Return the fault of the MXNet that runs for which a test cannot pass, or an empty string."""
    faults = [fault for start, versions, fault in FAULTS if NUMBERS in versions and test.startswith(start)]
    return f"MXNet {mx.__version__} {faults[0]}" if faults else ""


def pytest_collection_modifyitems(items):
    """What is not marked `slow` is `quick`; what needs a machine or a MXNet that this is not skips, with the reason."""
    lacking = {
        "gpu": not mx.context.num_gpus() and "needs a CUDA GPU that MXNet 1.9.1 can use; there is none here",
        "bfloat16_kernels": not cpu.multiplies_bfloat16() and "needs oneDNN's bfloat16 kernels, so a CPU with AVX-512",
        "vnni": cpu.lacks(*cpu.VNNI) and "needs INT8 kernels that do not overflow, so a CPU with VNNI",
    }
    for item in items:
        if item.get_closest_marker("slow") is None:
            item.add_marker("quick")
        if fault_of(item.nodeid):
            item.add_marker(pytest.mark.skip(reason=fault_of(item.nodeid)))
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

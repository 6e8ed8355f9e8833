"""The table of missing kernels: each is named with its reason, and none is named that is sound."""

from __future__ import annotations

import pytest

from mxmp.precision.missing_kernels import TABLE, missing_kernel

# mx.nd.array looks for scipy.sparse.csr.
pytestmark = pytest.mark.filterwarnings("ignore:Please import `csr_matrix`:DeprecationWarning")


def test_missing_kernels_are_those_of_the_cpu():
    assert missing_kernel("Deconvolution", {}, "float16", "cpu") == ""
    assert missing_kernel("Deconvolution", {}, "float16", "gpu") == ""
    volume = {"kernel": "(2, 2, 2)"}
    assert missing_kernel("Deconvolution", volume, "float16", "gpu") == ""
    assert "3-D" in missing_kernel("Deconvolution", volume, "float16", "cpu")
    assert "Deconvolution" in missing_kernel("Deconvolution", {}, "bfloat16", "cpu")
    assert missing_kernel("Pooling", {}, "bfloat16", "cpu") == ""
    assert "slower" in missing_kernel("clip", {"a_min": "0", "a_max": "6"}, "bfloat16", "cpu")
    assert missing_kernel("clip", {"a_min": "0", "a_max": "6"}, "bfloat16", "cpu", slow_too=True) == ""
    for bounds in ({"a_min": "-0.3", "a_max": "0.7"}, {"a_min": "0", "a_max": "257"}, {"a_min": "0"}):
        assert "truncates" in missing_kernel("clip", bounds, "bfloat16", "cpu", slow_too=True)
    assert "max and avg" in missing_kernel("Pooling", {"pool_type": "sum"}, "bfloat16", "cpu")


VOLUME = {"kernel": "(3, 3, 3)", "num_filter": "16"}


def known(sizes):
    """Return the keyword of ``missing_kernel`` for the first input: its channels, or its shape in training."""
    return {"data_shape": sizes} if isinstance(sizes, tuple) else {"channels": sizes}


LACKING = [
    ("Deconvolution", "float16", VOLUME, None, "3-D deconvolution"),
    ("clip", "bfloat16", {"a_min": "0", "a_max": "0.1"}, None, "truncates its bounds"),
    ("clip", "bfloat16", {"a_min": "0", "a_max": "6"}, None, "three times slower"),
    ("softsign", "bfloat16", {}, None, "kernel of softsign truncates instead of rounding"),
    ("_mul_scalar", "bfloat16", {"scalar": "0.3"}, None, "truncates instead of rounding, its constant too"),
    ("transpose", "bfloat16", {}, None, "no sound bfloat16 CPU kernel for transpose"),
    ("Activation", "bfloat16", {"act_type": "softsign"}, None, "no bfloat16 kernel for softsign"),
    ("LeakyReLU", "bfloat16", {"act_type": "selu"}, None, "LeakyReLU has no bfloat16 kernel for selu"),
    ("Pooling", "bfloat16", {"pool_type": "lp"}, None, "max and avg only"),
    ("Pooling", "bfloat16", {"pooling_convention": "same"}, None, "'same'"),
    ("Convolution", "bfloat16", {**VOLUME, "dilate": "(2, 1, 1)"}, None, "not measured"),
    ("FullyConnected", "bfloat16", {"num_hidden": "4096"}, (32, 64, 8, 8), "96 rows for 8 million"),
    ("BatchNorm", "bfloat16", {}, 72, "of BatchNorm is slower than FP32's where 72 channels"),
    ("Convolution", "bfloat16", {"num_filter": "24", "num_group": "24"}, None, "where 24 channels"),
]


@pytest.mark.parametrize(("op", "dtype", "attrs", "channels", "reason"), LACKING)
def test_a_missing_kernel_is_named_with_its_reason_and_a_gpu_lacks_none(op, dtype, attrs, channels, reason):
    assert reason in missing_kernel(op, attrs, dtype, "cpu", **known(channels))
    assert missing_kernel(op, attrs, dtype, "gpu", **known(channels)) == ""


@pytest.mark.parametrize(
    ("op", "attrs", "channels"),
    [
        ("_mul_scalar", {"scalar": "-0.25"}, None),
        ("Activation", {"act_type": "relu"}, None),
        ("Convolution", VOLUME, None),
        ("BatchNorm", {}, 96),
        ("BatchNorm", {}, None),
        ("Convolution", {"num_filter": "32", "num_group": "32"}, None),
        ("Convolution", {"num_filter": "24", "num_group": "12"}, None),
        ("FullyConnected", {"num_hidden": "4096"}, None),
        ("FullyConnected", {"num_hidden": "4096"}, (96, 4096)),
        ("FullyConnected", {"num_hidden": "4096"}, (16, 1024)),
        ("FullyConnected", {"num_hidden": "512"}, (15, 1024)),
        ("FullyConnected", {"num_hidden": "4096", "flatten": "False"}, (4, 24, 4096)),
        ("FullyConnected", {"num_hidden": "4096"}, (0, 4096)),
    ],
)
def test_a_sound_kernel_is_not_missing(op, attrs, channels):
    assert missing_kernel(op, attrs, "bfloat16", "cpu", **known(channels)) == ""


@pytest.mark.parametrize(("op", "dtype", "attrs", "channels", "reason"), LACKING)
def test_slow_kernels_can_be_allowed_and_wrong_ones_cannot(op, dtype, attrs, channels, reason):
    slow = "slower" in missing_kernel(op, attrs, dtype, "cpu", **known(channels)) and reason != "truncates its bounds"
    assert (missing_kernel(op, attrs, dtype, "cpu", **known(channels), slow_too=True) == "") is slow


def test_every_kernel_that_a_cpu_alone_lacks_has_an_example_above():
    alone = [
        row for dtype in ("float16", "bfloat16") for row in TABLE["cpu", dtype] if row not in TABLE["gpu", "float16"]
    ]
    assert len(LACKING) == len(alone)

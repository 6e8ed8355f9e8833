"""Designed inputs of the operators that compute: pointwise, matrix products, pooling, normalisation."""

from __future__ import annotations

import itertools
from typing import Any, Iterator

import numpy as np

from .case import Input, add, product

FLAT = [(1,), (3,), (1024,), (7, 5), (2, 3, 5, 7), (2, 16, 8, 8), (2, 3, 2, 3, 5), (0, 3)]
NCHW = (2, 8, 6, 6)


_UNARY = """relu _npx_relu abs _npi_absolute negative _npi_negative sigmoid _npx_sigmoid tanh _npi_tanh softsign erf
arctan _npi_arctan arcsinh _npi_arcsinh radians _npi_radians _contrib_div_sqrt_dim _copy _np_copy _copyto BlockGrad
zeros_like ones_like Flatten"""
for _shape in FLAT:
    for _draw in ("normal", "wide") if _shape == (1024,) else ("normal",):
        add(_UNARY, Input(_shape, _draw))
        add("hard_sigmoid", Input(_shape, _draw))
        for _act in ("relu", "sigmoid", "tanh", "softsign", "softrelu"):
            add("Activation", Input(_shape, _draw), act_type=_act)
        for _act in ("leaky", "gelu", "elu", "selu"):
            add("LeakyReLU", Input(_shape, _draw), act_type=_act)
        add("LeakyReLU", Input(_shape, _draw), act_type="leaky", slope=0.1)
    for _low, _high in ((0, 6), (-0.3, 0.7), (-1e30, 1e30)):
        add("clip", _shape, a_min=_low, a_max=_high)
    for _scalar in (0, 1, 2, 1.5, 1.1, -0.3, 1e-3, 1000.1) if _shape == (1024,) else (1.1,):
        add(
            """_plus_scalar _npi_add_scalar _minus_scalar _npi_subtract_scalar _rminus_scalar _npi_rsubtract_scalar
            _mul_scalar _npi_multiply_scalar _maximum_scalar _minimum_scalar _npi_copysign_scalar _npi_rcopysign_scalar
            _contrib_gradientmultiplier""",
            _shape,
            scalar=_scalar,
        )
        add("_div_scalar _npi_true_divide_scalar", _shape, scalar=_scalar or 3)
    add(
        """elemwise_add elemwise_sub elemwise_mul _maximum _minimum _grad_add _npi_copysign _npi_add _npi_subtract
        _npi_multiply broadcast_add broadcast_sub broadcast_mul broadcast_maximum broadcast_minimum""",
        _shape,
        _shape,
    )
    for _count in (1, 2, 5):
        add("add_n", *[_shape] * _count, num_args=_count)
for _slope in ((8,), (1,)):
    add("LeakyReLU", NCHW, _slope, act_type="prelu")
for _a, _b in (((2, 8, 6, 6), (1, 8, 1, 1)), ((7, 1), (1, 5)), ((3, 1000), (1, 1)), ((300, 40), (1, 40))):
    add("broadcast_add broadcast_sub broadcast_mul broadcast_maximum broadcast_minimum", _a, _b)
    add("_npi_add _npi_subtract _npi_multiply _npi_copysign", _a, _b)
for _p, _mode in ((0.0, "training"), (0.5, "training"), (0.3, "always")):
    add("Dropout", NCHW, p=_p, mode=_mode)
add("Dropout", (40, 30), p=0.5, axes=(0,))
add("_npi_diff", (6, 9), n=1, axis=-1)
add("_npi_diff", (6, 9), n=3, axis=0)
add("_npi_ediff1d", (50,), to_begin_arr_given=False, to_end_arr_given=False)


for _data, _units, _flatten in (((4, 6), 5, True), ((1, 1), 1, True), ((33, 65), 17, True), ((2, 3, 4), 5, False),
                                ((2, 3, 4, 5), 7, True), ((0, 6), 5, True), ((3, 256), 1000, True)):  # fmt: skip
    _in = int(np.prod(_data[1:])) if _flatten else _data[-1]
    add("FullyConnected", _data, (_units, _in), (_units,), num_hidden=_units, flatten=_flatten)
    add("FullyConnected", _data, (_units, _in), num_hidden=_units, flatten=_flatten, no_bias=True)


def _convolutions() -> Iterator[tuple[tuple[int, ...], int, dict[str, Any]]]:
    for dims in (1, 2, 3):
        for kernel, pad, stride, dilate, group, size, channels in (
            (1, 0, 1, 1, 1, 5, 4),
            (3, 1, 1, 1, 1, 6, 8),
            (3, 1, 2, 1, 1, 7, 3),
            (3, 2, 1, 2, 1, 9, 4),
            (3, 1, 1, 1, 4, 6, 8),
            (3, 1, 1, 1, 8, 6, 8),
            (3, 1, 1, 1, 1, 1, 16),
            (5, 2, 1, 1, 1, 1, 16),
            (5, 2, 1, 1, 1, 2, 16),
            (3, 1, 2, 1, 1, 2, 3),
            (3, 4, 1, 1, 1, 4, 4),
            (2, 0, 2, 1, 1, 5, 5),
            (3, 1, 1, 1, 16, 1, 16),
            (3, 1, 1, 1, 1, 8, 32),
        ):
            if dims == 3 and size > 7:
                continue
            sides = {"kernel": kernel, "pad": pad, "stride": stride, "dilate": dilate}
            geometry = {k: (v,) * dims for k, v in sides.items()}
            yield (2, channels, *(size,) * dims), kernel, {**geometry, "num_group": group}


for _data, _k, _attrs in _convolutions():
    _kernel, _group = _attrs["kernel"], _attrs["num_group"]
    _out = _data[1] if _group > 1 else 16
    _weight = (_out, _data[1] // _group, *_kernel)
    add("Convolution", _data, _weight, (_out,), **_attrs, num_filter=_out)
    add("Convolution", _data, _weight, **_attrs, num_filter=_out, no_bias=True)
    _back = (_data[1], _out // _group, *_kernel)
    add("Deconvolution", _data, _back, **_attrs, num_filter=_out)
    if _k == 3:
        add("Deconvolution", _data, _back, (_out,), **_attrs, num_filter=_out, no_bias=False)
add("Convolution", (2, 128, 1, 1), (256, 128, 5, 5), (256,), kernel=(5, 5), pad=(2, 2), num_filter=256)
add("Convolution", (0, 3, 5, 5), (4, 3, 3, 3), (4,), kernel=(3, 3), num_filter=4)
for _a, _b, _attrs in (((4, 5), (5, 6), {}), ((5, 4), (5, 6), {"transpose_a": True}), ((1, 1), (1, 1), {}),
                       ((4, 5), (6, 5), {"transpose_b": True}), ((33, 200), (200, 17), {})):  # fmt: skip
    add("dot", _a, _b, **_attrs)
    add("batch_dot", (3, *_a), (3, *_b), **_attrs)
add("_np_dot _npi_matmul", (4, 5), (5, 6))
add("_np_dot _npi_matmul", (7,), (7,))
add("_np_dot _npi_matmul", (2, 4, 5), (5,))
add("_npi_matmul", (3, 4, 5), (3, 5, 6))
add("_npi_matmul", (3, 1, 4, 5), (2, 5, 6))
add("_npi_tensordot", (2, 3, 4), (4, 3, 5), a_axes_summed=(1, 2), b_axes_summed=(1, 0))
add("_npi_tensordot_int_axes", (2, 3, 4), (3, 4, 5), axes=2)
add("_contrib_interleaved_matmul_selfatt_qk", (5, 2, 3 * 8), heads=2)
add("_contrib_interleaved_matmul_selfatt_valatt", (5, 2, 3 * 8), (4, 5, 5), heads=2)
add("_contrib_interleaved_matmul_encdec_qk", (5, 2, 8), (7, 2, 16), heads=2)
add("_contrib_interleaved_matmul_encdec_valatt", (7, 2, 16), (4, 5, 7), heads=2)
for _mode, _gates in (("rnn_relu", 1), ("rnn_tanh", 1), ("gru", 3), ("lstm", 4)):
    for _layers, _both in ((1, False), (2, True)):
        _ways, _hidden, _width = 1 + _both, 6, 5
        _size = sum(
            _ways * _gates * _hidden * ((_width if layer == 0 else _ways * _hidden) + _hidden + 2)
            for layer in range(_layers)
        )
        _states = [(_layers * _ways, 3, _hidden)] * (1 + (_mode == "lstm"))
        _rnn = {"mode": _mode, "state_size": _hidden, "num_layers": _layers, "bidirectional": _both}
        add("RNN", (4, 3, _width), Input((_size,)), *_states, **_rnn)
add("im2col", NCHW, kernel=(3, 3), pad=(1, 1))
add("im2col", NCHW, kernel=(2, 2), stride=(2, 2))


for _dims in (1, 2, 3):
    for _type, _geometry in itertools.product(("max", "avg", "sum", "lp"), ((2, 0, 2, 5), (3, 1, 1, 6), (3, 1, 2, 1), (2, 1, 1, 3))):  # fmt: skip # noqa: E501
        _k, _pad, _stride, _size = _geometry
        for _more in product(pooling_convention=[None, "full"], count_include_pad=[None, False]):
            if _more and _type not in ("max", "avg"):
                continue
            _attrs = {"kernel": (_k,) * _dims, "pad": (_pad,) * _dims, "stride": (_stride,) * _dims}
            add("Pooling", (2, 5, *(_size,) * _dims), pool_type=_type, **_attrs, **_more, **({"p_value": 2} if _type == "lp" else {}))  # fmt: skip # noqa: E501
    add("Pooling", (2, 16, *(6,) * _dims), pool_type="avg", global_pool=True, kernel=(1,) * _dims)
    add("Pooling", (2, 16, *(6,) * _dims), pool_type="max", global_pool=True, kernel=(1,) * _dims)
# A window wholly in the padding.
add("Pooling", (1, 1, 2, 2), kernel=(1, 1), pad=(0, 0), stride=(2, 2), pool_type="max", pooling_convention="full")
add("Pooling", (1, 2, 3, 3), kernel=(2, 2), pad=(1, 1), stride=(3, 3), pool_type="max", pooling_convention="full")
add("Pooling", (1, 2, 1, 1), kernel=(2, 2), pad=(1, 1), stride=(2, 2), pool_type="max", pooling_convention="full")
for _type in ("max", "avg"):
    add("Pooling", (2, 5, 7), kernel=(3,), stride=(2,), pool_type=_type, pooling_convention="same")
for _output in ((1, 1), (2, 3), (6, 6)):
    add("_contrib_AdaptiveAvgPooling2D", NCHW, output_size=_output)
add("_contrib_BilinearResize2D", NCHW, height=9, width=11)
add("_contrib_BilinearResize2D", NCHW, height=3, width=3, align_corners=False)
for _scale in (1, 2, 3):
    add("UpSampling", NCHW, scale=_scale, sample_type="nearest", num_args=1)
add("UpSampling", NCHW, (2, 8, 3, 3), scale=2, sample_type="nearest", num_args=2)
for _shape, _axis in ((NCHW, 1), ((4, 16, 1, 1), 1), ((2, 16, 5), 1), ((2, 3, 4, 4, 4), 1), ((8, 5), 1), ((4, 3, 3, 6), 3)):  # fmt: skip # noqa: E501
    _vector = (_shape[_axis],)
    _states = (Input(_vector, 0.0, False), Input(_vector, 1.0, False))
    for _more in product(fix_gamma=[False, None], use_global_stats=[None, True]):
        _axes = {} if _axis == 1 else {"axis": _axis}
        _names = "BatchNorm _contrib_BatchNormWithReLU" if _axis == 1 and len(_shape) == 4 else "BatchNorm"
        add(_names, _shape, Input(_vector, "positive"), _vector, *_states, **_axes, **_more)

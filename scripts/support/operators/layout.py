"""Designed inputs of the operators that only move, repeat or select values."""

from __future__ import annotations

from .case import Input, add

X = (2, 8, 6, 6)
S = (3, 4)
SHAPES = [(1,), (7,), (7, 5), (2, 3, 4), (2, 8, 6, 6), (2, 3, 2, 3, 4), (0, 4)]


def index(shape: tuple[int, ...], below: int) -> Input:
    """Indices, lengths or conditions: integers in float32 below a bound, without a gradient."""
    return Input(shape, below, grad=False)


for _shape in SHAPES:
    add("Reshape", _shape, shape=(-1,))
    add("_np_reshape _npx_reshape", _shape, newshape=(-1,) if 0 not in _shape else _shape[::-1])
    add("expand_dims", _shape, axis=0)
    add("expand_dims", _shape, axis=-1)
    add("transpose _np_transpose", _shape)
    add("squeeze _np_squeeze", (1, *_shape), axis=0)
    add("reverse _npi_flip", _shape, axis=(0,))
    add("_np_roll", _shape, shift=(1,), axis=(0,))
    add("_np_atleast_1d _np_atleast_2d _np_atleast_3d", _shape, num_args=1)
    add("slice_axis", _shape, axis=0, begin=0, end=max(_shape[0] - 1, 1))
    add("slice", _shape, begin=(0,), end=(1,))
    add("reshape_like", _shape, Input(_shape[::-1], grad=False))
    add("slice_like", _shape, Input(_shape, grad=False))
    add("_identity_with_attr_like_rhs", _shape, Input(_shape, grad=False))
    add("stack", _shape, _shape, num_args=2)
    add("stack", _shape, _shape, _shape, num_args=3, axis=1)
    add("_npi_stack", _shape, _shape, num_args=2, axis=-1)
    add("_npi_vstack _npi_hstack _npi_dstack _npi_column_stack", _shape, _shape, num_args=2)
    for _count in (1, 2, 5):
        add("Concat", *[_shape] * _count, num_args=_count, dim=0)
        add("Concat", *[_shape] * _count, num_args=_count, dim=-1)
        add("_npi_concatenate", *[_shape] * _count, num_args=_count, axis=-1)
add("Concat", (2, 3, 4, 4), (2, 5, 4, 4), (2, 16, 4, 4), num_args=3, dim=1)
add("Concat", (2, 3, 4), (2, 3, 1), num_args=2, dim=2)
add("_rnn_param_concat", (3,), (4,), num_args=2, dim=0)
add("Reshape", X, shape=(0, -1))
add("Reshape", X, shape=(-3, -2))
add("Reshape", X, shape=(0, -4, 2, -1, 0, 0))
for _axes in ((1, 0, 2, 3), (0, 2, 3, 1), (0, 3, 1, 2), (3, 2, 1, 0)):
    add("transpose _np_transpose", X, axes=_axes)
add("transpose", (2, 16, 8, 8), axes=(0, 2, 3, 1))
add("SwapAxis", X, dim1=1, dim2=2)
add("SwapAxis", S, dim1=0, dim2=1)
add("_np_moveaxis", X, source=(1,), destination=(2,))
add("depth_to_space space_to_depth", X, block_size=2)
add("_npi_rot90", S, k=1, axes=(0, 1))
add("squeeze _np_squeeze", (3, 1, 4, 1))
for _case in ({"begin": (0, 1), "end": (2, 3)}, {"begin": (None, 3), "end": (None, 0), "step": (1, -1)}):
    add("slice", S, **_case)
add("slice_axis", X, axis=1, begin=-3, end=None)
add("slice_like", X, Input((2, 8, 3, 3), grad=False), axes=(2, 3))
add("SliceChannel", S, outputs=2, num_outputs=2, axis=1)
add("SliceChannel", X, outputs=8, num_outputs=8, axis=1, squeeze_axis=True)
add("SliceChannel", S, outputs=1, num_outputs=1, axis=0)
add("_split_v2 _npi_hsplit", S, outputs=2, indices=(0, 2), axis=1)
add("_split_v2", X, outputs=3, indices=(0, 1, 5), axis=1)
add("_npi_dsplit", X, outputs=2, indices=(0, 2), axis=2)
add("Crop", X, num_args=1, h_w=(3, 3))
add("Crop", X, Input((2, 8, 4, 4), grad=False), num_args=2, center_crop=True)
for _k in (0, 1, -1):
    add("diag _np_diag _npi_tril", (5, 5), k=_k)
    add("diag _np_diag _np_diagflat", (4,), k=_k)
    add("_np_diagonal", (5, 5), offset=_k)
for _constant in (0, 1.1):
    for _mode in ("constant", "edge", "reflect"):
        add("Pad", X, mode=_mode, pad_width=(0, 0, 0, 0, 1, 2, 2, 1), constant_value=_constant)
        add("_npi_pad", S, mode=_mode, pad_width=((1, 1), (2, 0)), constant_value=_constant)
add("_slice_assign", S, (2, 2), begin=(0, 1), end=(2, 3))
add("_slice_assign_scalar", S, begin=(0, 1), end=(2, 3), scalar=1.1)


for _size in (3, 3000):
    add("broadcast_axis", (4, 1), axis=(1,), size=(_size,))
    add("broadcast_to _npi_broadcast_to", (1, 4), shape=(_size, 4))
    add("broadcast_like", (1, 4), Input((_size, 4), grad=False))
    add("tile", (4,), reps=(_size,))
    add("repeat", (4,), repeats=_size)
    add("repeat", (4, 2), repeats=_size, axis=0)


for _rows in (5, 4000):
    for _mode in ("clip", "wrap"):
        add("take", (5, 4), index((_rows,), 5), mode=_mode)
    add("take", (4, 5), index((_rows,), 5), axis=1)
    add("gather_nd", (5, 4), index((1, _rows), 5))
    add("_contrib_index_copy", (5, 4), Input((3,), (0, 2, 4), False), (3, 4))
add("scatter_nd", (3, 4), Input((1, 3), ((0, 2, 4),), False), shape=(5, 4))
add("batch_take", (6, 5), index((6,), 5)._replace(dtype="int32"))
for _axis in (-1, 0):
    add("pick", (6, 5), index((6 if _axis else 5,), 5), axis=_axis)
add("_npi_delete", (6, 5), start=1, stop=3, step=1, axis=0)
add("_npi_delete", (6, 5), int_ind=2, axis=1)
for _shape in (S, (1,), X):
    add("where _npi_where", index(_shape, 2), _shape, _shape)
    for _scalar in (0, 1.1):
        add("_npi_where_lscalar _npi_where_rscalar", index(_shape, 2), _shape, scalar=_scalar)
add("where", index((3,), 2), S, S)
add("_npi_where", index((3, 1), 2), (1, 4), (3, 4))
_lengths = Input((3,), (1, 4, 2), False)
for _shape in ((5, 3, 4), (5, 3)):
    for _value in (0, 1.1):
        add("SequenceMask", _shape, _lengths, use_sequence_length=True, value=_value)
    add("SequenceMask", _shape)
    add("SequenceLast SequenceReverse", (*_shape[:2], 4), _lengths, use_sequence_length=True)
    add("SequenceReverse SequenceLast", (*_shape[:2], 4))
for _axis in (None, 0, 1):
    add("max min", (6, 50), **({} if _axis is None else {"axis": _axis}))
    add("_np_max _np_min", (6, 50), **({} if _axis is None else {"axis": (_axis,)}))
add("max min", Input((4, 4), 1.0), axis=1, keepdims=True)

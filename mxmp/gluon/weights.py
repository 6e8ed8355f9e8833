"""The FP32 weights of a net, in memory: read, average and set them without rounding."""

from __future__ import annotations

from typing import Any, Iterable, Mapping

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, Parameter
from mxnet.ndarray import NDArray

from ..messages.text import did_you_mean
from . import _mxnet
from .parameter import full_arrays, set_values


def master_weights(net: Any) -> dict[str, NDArray]:
    """Return copies of the FP32 weights of a net: the master weights of Parameters that are stored in float16.

    ``Parameter.data()`` of such a Parameter is float16, so an average of it loses what small updates add. The copies
    are those that ``save_parameters`` would write, without a file. ``set_master_weights`` sets them. Does not wait for
    the device.

    Parameters
    ----------
    net : mxnet.gluon.Block, mapping or iterable of Parameter
        A net, converted or not; or Parameters, such as ``net.collect_params()``.

    Returns
    -------
    dict of str to NDArray
        A new array for each Parameter, on the first of its contexts and in the Parameter's shape and dtype, which is
        float32 where it is stored in float16. Running statistics are the mean over all contexts. The names of a net are
        those in a file of ``save_parameters`` (``"0.weight"``), so that nets of equal structure have equal names; the
        names of Parameters are their own (``"dense0_weight"``).

    Raises
    ------
    TypeError
        ``net`` is none of the above. A Module has ``get_params()``, which returns FP32 weights.
    ValueError
        A Parameter has no values yet: ``initialize`` was not called, or no forward has told its shape.

    Examples
    --------
    >>> net = nn.HybridSequential()
    >>> net.add(nn.Dense(16, activation="relu"), nn.Dense(2))
    >>> net.initialize()
    >>> net = mxmp.convert(net, mxmp.Policy("float16", params="float16"))
    >>> out = net(mx.nd.random.uniform(shape=(8, 4)))
    >>> for name, value in mxmp.master_weights(net).items():
    ...     print(name, value.shape, value.dtype.__name__)
    0.weight (16, 4) float32
    0.bias (16,) float32
    1.weight (2, 16) float32
    1.bias (2,) float32
    """
    return {name: _copy(param) for name, param in _initialized(net).items()}


def set_master_weights(net: Any, weights: Mapping[str, Any]) -> None:
    """Set FP32 weights of a net, on all devices, exactly; float16 Parameters get the rounded ones besides.

    Gradients, optimizer states and the loss scale stay as they are. Does not wait for the device.

    Parameters
    ----------
    net : mxnet.gluon.Block, mapping or iterable of Parameter
        As for ``master_weights``.
    weights : mapping of str to NDArray or numpy.ndarray
        From the names that ``master_weights(net)`` returns to the values, of the same shapes. Parameters that are
        missing stay as they are.

    Raises
    ------
    TypeError, ValueError
        As ``master_weights``; also ``ValueError`` for a name that the net does not have, or a value of another shape.
        Nothing has changed then.

    Examples
    --------
    >>> net = nn.HybridSequential()
    >>> net.add(nn.Dense(16, activation="relu"), nn.Dense(2))
    >>> net.initialize()
    >>> net = mxmp.convert(net, "float16")
    >>> out = net(mx.nd.random.uniform(shape=(8, 4)))
    >>> weights = mxmp.master_weights(net)
    >>> mxmp.set_master_weights(net, {name: 0.5 * value for name, value in weights.items()})
    """
    params = _initialized(net)
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights: expected a dict of arrays, as master_weights returns, got {type(weights).__name__}")
    for name, value in weights.items():
        if name not in params:
            meant = next((own for own, param in params.items() if param.name == name), None)
            hint = f"; the net's own name for it is {meant!r}" if meant else did_you_mean(str(name), params)
            listed = ", ".join(map(repr, list(params)[:4]))
            raise ValueError(f"no Parameter {name!r}{hint or f'; there are {listed}, ...'} (see master_weights(net))")
        if not isinstance(value, (NDArray, np.ndarray)):
            raise TypeError(f"{name!r}: expected an NDArray or NumPy array, got {type(value).__name__}")
        if tuple(value.shape) != tuple(params[name].shape):
            raise ValueError(f"{name!r} has shape {tuple(params[name].shape)}, got a value of {tuple(value.shape)}")
    for name, value in weights.items():
        param = params[name]
        if not isinstance(value, NDArray):
            value = mx.nd.array(value, dtype=param.dtype)
        set_values(param, value)


def _initialized(net: Any) -> dict[str, Parameter]:
    """Return Parameters by name; raise ``TypeError`` and ``ValueError`` as ``master_weights`` does."""
    params: dict[str, Parameter] = {}
    if isinstance(net, Block):
        params = _mxnet.structural_names(net)
    elif isinstance(net, Iterable):
        values = list(net.values() if hasattr(net, "values") else net)
        params = {param.name: param for param in values if isinstance(param, Parameter)}
        if len(params) < len(values):
            raise TypeError("expected Parameters, each once, got others, or two of one name")
    else:
        hint = ": use its get_params() and set_params(), which take FP32" if isinstance(net, mx.mod.BaseModule) else ""
        raise TypeError(f"expected a gluon Block or Parameters, got {type(net).__name__}{hint}")
    for name, param in params.items():
        if not _mxnet.is_initialized(param):
            raise ValueError(f"Parameter {name!r} has no values yet: initialize the net and call it once")
    return params


def _copy(param: Parameter) -> NDArray:
    arrays = full_arrays(param)
    if len(arrays) == 1 or _mxnet.is_differentiable(param) or arrays[0].dtype not in (np.float32, np.float64):
        return arrays[0].copy()
    moved = [array.as_in_context(arrays[0].ctx) for array in arrays]
    return sum(moved[1:], moved[0]) / len(moved)

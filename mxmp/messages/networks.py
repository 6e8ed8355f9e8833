"""What to say of what is no network of the right kind."""

from __future__ import annotations

import os
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

# What to do with what is no network of the kind that a function takes.
_INSTEAD: dict[Any, str] = {
    mx.sym.Symbol: "for a Symbol use mxmp.cast_symbol, or mxmp.Module to train it",
    mx.gluon.Block: "for a Block use mxmp.convert and mxmp.Trainer",
    mx.mod.BaseModule: "a Module is converted when it is made, mxmp.Module(symbol, policy='float16'); its graph is "
    ".symbol",
    mx.model.FeedForward: "use mxmp.Module(symbol, policy='float16'), whose fit takes data iterators",
    mx.executor.Executor: "in place of bind, train mxmp.Module(symbol, policy='float16'), which has a loss scale; bind "
    "what mxmp.cast_symbol(symbol) returns to predict",
    mx.gluon.Trainer: "that is a trainer, pass the network that it trains",
    mx.gluon.ParameterDict: "those are parameters, pass the net itself",
    (list, tuple, set, dict): "call it for each network",
    (NDArray, np.ndarray): "that is an array, the network comes first",
    (FunctionType, MethodType, partial): "a function has no parameters to train, make it the forward of a Block whose "
    "weights are Parameters, self.params.get(name, shape=shape), and train these with mxmp.Trainer",
}


def instead(got: Any, wants_symbol: bool = False) -> str:
    """Return the end of a message about ``got``, which is no network of the right kind; ``""`` if nothing is known."""
    if isinstance(got, type):
        return f": that is a class, make an object of it, {got.__name__}(...)"
    if isinstance(got, (str, os.PathLike)):
        load = "mx.sym.load(file)" if wants_symbol else "gluon.SymbolBlock.imports(symbol_file, ['data'], params_file)"
        return f": load it from its files first, {load}"
    return next((f": {text}" for kind, text in _INSTEAD.items() if isinstance(got, kind)), "")

"""What is optimized, and what is given back: the one file of this package that knows both frontends."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Iterable, Mapping, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, HybridBlock, SymbolBlock
from mxnet.ndarray import NDArray

from ..files import replacing_all
from ..gluon.graphs import traced_alone
from ..gluon.parameter import weight_of
from ..precision.casts import strip
from ..precision.graph import Graph
from ..symbolic.checkpoint import write_arrays, write_symbol
from ..symbolic.parameters import check_parameters
from .folding import Params
from .fusing import FUSED
from .report import InferenceReport

__all__ = ["OptimizedBlock", "OptimizedSymbol", "Subject", "read_target", "served"]

Batch = Mapping[str, NDArray]
_TYPE_CODES = {"float32": "0", "uint8": "3", "int32": "4", "int8": "5", "int64": "6"}  # mshadow's


class Subject(NamedTuple):
    """A network in FP32: its graph, its parameters, and the batches by the names of its inputs."""

    graph: Graph
    params: Params
    inputs: list[str]
    batches: Sequence[Batch]
    is_block: bool


def read_target(target: Any, calibration: Any, arg_params: Batch | None, aux_params: Batch | None) -> Subject:
    """Return what ``optimize_for_inference`` was called with, checked; the network is left as it is.

    Raises
    ------
    TypeError
        ``target`` is neither a Block nor a Symbol.
    ValueError
        It has no graph or no values, it is on a GPU, or the batches do not fit it.
    """
    batches = _batches(calibration)
    if isinstance(target, mx.sym.Symbol):
        subject = _of_symbol(target, batches, arg_params, aux_params)
    elif arg_params is not None or aux_params is not None:
        raise ValueError("arg_params and aux_params are for Symbols: a block has its own parameters")
    else:
        subject = _of_block(target, batches)
    if subject.graph.numpy:
        raise ValueError("this network is one of mx.np, whose operators MXNet neither fuses nor quantizes: use mx.nd")
    done = [node.name for node in subject.graph.nodes() if node.op in FUSED or "quantize" in node.op]
    if done:
        raise ValueError(f"{done[0]!r} is fused or quantized already: give the network as it was before")
    _check_values(subject)
    _check_shapes(subject)
    for node in subject.graph.nodes():
        if node.is_variable and node.name in subject.batches[0]:
            # Of these dtypes nobody else tells: casts and INT8 take several.
            code = _TYPE_CODES.get(np.dtype(subject.batches[0][node.name].dtype).name)
            node.attrs.update({} if code is None else {"__dtype__": code})
    return subject._replace(params={name: value.as_in_context(mx.cpu()) for name, value in subject.params.items()})


def _batches(calibration: Any) -> list[Any]:
    expected = "expected an iterable of batches, each what the network is called with, such as [x] or a DataIter"
    if isinstance(calibration, (NDArray, np.ndarray, str, dict)) or not isinstance(calibration, Iterable):
        raise ValueError(f"calibration is one {type(calibration).__name__}: {expected}")
    if isinstance(calibration, mx.io.DataIter):
        calibration.reset()
    batches = list(calibration)
    if not batches:
        raise ValueError(f"there is no calibration data: {expected}")
    return batches


def _of_block(block: Any, batches: list[Any]) -> Subject:
    if not isinstance(block, Block):
        raise TypeError(f"optimize_for_inference takes a gluon HybridBlock or a Symbol, got {type(block).__name__}")
    if not isinstance(block, HybridBlock):
        raise ValueError(f"{block.name!r} runs as Python, which has no graph: optimize the HybridBlocks in it")
    nested = [_converted(_data_of(batch)) for batch in batches]
    values = [_flat(batch) for batch in nested]
    try:
        symbol, found, params = traced_alone(block, _arguments(nested[0]), False)
    except ValueError as error:
        raise ValueError(
            f"{error}. A batch of {len(values[0])} arrays was passed on as so many inputs: where it holds labels too, "
            "leave them out, as in ((x,) for x, y in batches)"
        ) from error
    weights = {name: weight_of(param) for name, param in params.items()}
    empty = [name for name, weight in weights.items() if not (weight.masters or weight.arrays)]
    if empty:
        raise ValueError(f"Parameter {empty[0]!r} has no values yet: initialize the net, call it once, and train it")
    full = {name: (weight.masters or weight.arrays)[0] for name, weight in weights.items()}
    place_of = {id(array): place for place, array in enumerate(values[0])}
    inputs = list(found)
    places = [place_of[id(found[name])] for name in inputs]
    for number, batch in enumerate(values):
        if len(batch) != len(values[0]):
            raise ValueError(f"calibration batch {number} has {len(batch)} arrays, and the first one {len(values[0])}")
    fed = [{name: batch[place] for name, place in zip(inputs, places)} for batch in values]
    return Subject(strip(Graph.from_symbol(symbol)), full, inputs, fed, True)


def _of_symbol(symbol: mx.sym.Symbol, batches: list[Any], args: Batch | None, auxs: Batch | None) -> Subject:
    if not args and not auxs and symbol.list_auxiliary_states():
        raise ValueError("a Symbol is optimized with its parameters: pass arg_params= and aux_params=")
    named = {**{f"arg:{k}": v for k, v in (args or {}).items()}, **{f"aux:{k}": v for k, v in (auxs or {}).items()}}
    check_parameters(symbol, named, {})
    params = {**(args or {}), **(auxs or {})}
    inputs = [name for name in symbol.list_arguments() if name not in params]
    fed = []
    for number, batch in enumerate(batches):
        if isinstance(batch, Mapping):
            arrays = {name: _array(value) for name, value in batch.items()}
        else:
            names = [desc[0] for desc in getattr(batch, "provide_data", None) or []] or inputs
            arrays = dict(zip(names, _flat(_converted(_data_of(batch)))))
        unknown = sorted(set(arrays) - set(inputs))
        if unknown or not arrays:
            raise ValueError(f"calibration batch {number} has {unknown or 'no arrays'}: the inputs are {inputs}")
        fed.append(arrays)
    return Subject(strip(Graph.from_symbol(symbol)), params, inputs, fed, False)


def _data_of(batch: Any) -> Any:
    return batch.data if isinstance(batch, mx.io.DataBatch) else batch


def _arguments(batch: Any) -> tuple:
    return tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)


def _converted(value: Any) -> Any:
    """Return the same nesting of arrays of MXNet's, of which no two are one object; floating-point ones in FP32."""
    if isinstance(value, (list, tuple)):
        return [_converted(item) for item in value]
    return None if value is None else _array(value)


def _array(value: Any) -> NDArray:
    if not isinstance(value, (NDArray, np.ndarray)):
        raise ValueError(f"a calibration batch holds a {type(value).__name__}: expected arrays, or tuples of them")
    array = value.detach() if isinstance(value, NDArray) else mx.nd.array(value, dtype=value.dtype)
    is_float = array.dtype in (np.float16, np.float64)
    array = array.astype("float32") if is_float else array
    return array if array.context == mx.cpu() else array.as_in_context(mx.cpu())


def _flat(value: Any) -> list[NDArray]:
    if isinstance(value, (list, tuple)):
        return [array for item in value for array in _flat(item)]
    return [] if value is None else [value]


def _check_values(subject: Subject) -> None:
    for name, value in subject.params.items():
        if value.context.device_type != "cpu":
            raise ValueError(f"parameter {name!r} is on {value.context}: fusion and INT8 are for CPUs, move it there")
        if np.dtype(value.dtype) != np.float32:
            dtype = "bfloat16" if np.dtype(value.dtype).names else np.dtype(value.dtype).name
            raise ValueError(f"parameter {name!r} is {dtype}: give the network in FP32, as it was before net.cast()")
    named = [(f"parameter {name!r}", value) for name, value in subject.params.items()]
    named += [
        (f"calibration batch {i}, {name!r},", v) for i, batch in enumerate(subject.batches) for name, v in batch.items()
    ]
    for what, value in named:
        if value.size == 0 or not np.isfinite(value.asnumpy().astype("float64", copy=False)).all():
            raise ValueError(
                f"{what} {'holds NaN or infinity' if value.size else 'is empty'}: every value must be finite"
            )


def _check_shapes(subject: Subject) -> None:
    symbol = subject.graph.to_symbol()
    known = {name: value.shape for name, value in subject.params.items()}
    for number, batch in enumerate(subject.batches):
        shapes = {name: value.shape for name, value in batch.items()}
        try:
            symbol.infer_shape(**{**known, **shapes})
        except mx.MXNetError as error:
            last = str(error).strip().splitlines()[-1]
            raise ValueError(
                f"calibration batch {number} with shapes {shapes} does not fit the network: {last}"
            ) from error


class _Served:
    """A graph to serve with its parameters and the report on how it was found."""

    symbol: mx.sym.Symbol
    arg_params: Params
    aux_params: Params
    report: InferenceReport

    def _take(self, graph: Graph, params: Params, report: InferenceReport) -> None:
        self.symbol = graph.to_symbol()
        states = set(self.symbol.list_auxiliary_states())
        self.arg_params = {name: value.copy() for name, value in params.items() if name not in states}
        self.aux_params = {name: value.copy() for name, value in params.items() if name in states}
        self.report = report

    def export(self, path: str, epoch: int = 0, remove_amp_cast: bool = False) -> tuple[str, str]:
        """Write ``PATH-symbol.json`` and ``PATH-0000.params``, which plain MXNet loads; return their names.

        ``SymbolBlock.imports`` and ``mx.mod.Module.load`` read them; both files appear, or none. The casts are part
        of the graph, so ``remove_amp_cast`` must stay False.

        Raises
        ------
        ValueError
            ``remove_amp_cast`` is True.
        OSError
            A file cannot be written; names it.
        """
        if remove_amp_cast:
            raise ValueError("the casts are part of this graph: it cannot be exported without them")
        files = f"{path}-symbol.json", f"{path}-{epoch:04d}.params"
        with replacing_all(*files) as (symbol_file, params_file):
            write_symbol(symbol_file, self.symbol, remove_amp_cast=False)
            write_arrays(params_file, _named(self.arg_params, self.aux_params))
        return files


class OptimizedSymbol(_Served):
    """A Symbol to serve, with its parameters: ``symbol``, ``arg_params``, ``aux_params`` and ``report``."""

    def __init__(self, graph: Graph, params: Params, report: InferenceReport) -> None:
        self._take(graph, params, report)


class OptimizedBlock(_Served, SymbolBlock):
    """A network to call, with ``symbol``, ``arg_params``, ``aux_params`` and ``report``; it cannot be trained.

    It takes the arrays that the network took, and returns its outputs, as a flat list where there are several.
    """

    def __init__(self, graph: Graph, params: Params, inputs: Mapping[str, Any], report: InferenceReport) -> None:
        symbol = graph.to_symbol()
        super().__init__(symbol, [mx.sym.var(name, dtype=dtype) for name, dtype in inputs.items()])
        self._take(graph, params, report)
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder, "params"))
            write_arrays(file, _named(self.arg_params, self.aux_params))
            self.collect_params().load(file, mx.cpu(), cast_dtype=True, dtype_source="saved")
        self.collect_params().setattr("grad_req", "null")
        self.hybridize(static_alloc=True, static_shape=True)

    def forward(self, *inputs: Any) -> Any:
        return super().forward(*_flat(inputs))


def _named(args: Params, auxs: Params) -> Params:
    return {**{f"arg:{name}": value for name, value in args.items()}, **{f"aux:{name}": v for name, v in auxs.items()}}


def served(subject: Subject, graph: Graph, params: Params, report: InferenceReport) -> OptimizedBlock | OptimizedSymbol:
    """Return a graph with its parameters as what ``optimize_for_inference`` gives back for the subject."""
    if subject.is_block:
        inputs = {name: subject.batches[0][name].dtype for name in subject.inputs}
        return OptimizedBlock(graph, params, inputs, report)
    return OptimizedSymbol(graph, params, report)

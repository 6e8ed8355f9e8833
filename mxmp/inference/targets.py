"""Reads what ``optimize_for_inference`` is called with, for Gluon and Symbol, and makes what it returns."""

from __future__ import annotations

import tempfile
import warnings
from math import prod
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import Block, HybridBlock, SymbolBlock
from mxnet.ndarray import NDArray

from ..gluon.parameter import weight_of
from ..gluon.symbols import traced_call
from ..host.callbacks import last_line
from ..host.files import replacing_all
from ..kernels.memory import keep_memory_apart
from ..messages.networks import instead
from ..messages.text import class_of
from ..precision._mxnet import dtype_name
from ..precision.casts import strip
from ..precision.graph import TYPE_CODES, Entry, Graph, Node, output_shapes
from ..precision.heads import HEAD_OPERATORS
from ..serving.folding import Params, by_kind
from ..serving.fusing import FUSED
from ..symbolic.checkpoint import write_arrays, write_symbol
from ..symbolic.parameters import check_parameters
from .prepared import Prepared
from .report import InferenceReport

# From the names of a network's inputs to arrays.
Batch = Mapping[str, NDArray]
# Operators of networks that cannot be optimized: what each is, and why.
_REFUSED = {
    "Custom": "Custom operator, which only this process can run, and graphs are tried in another one",
    "_contrib_boolean_mask": "boolean_mask, whose size depends on values, and MXNet may crash where it runs such a "
    "graph again",
}
# The dtypes of inputs that are declared in the graph.
_DECLARED = ("float32", "uint8", "int32", "int8", "int64")


class Subject(NamedTuple):
    """A network and its calibration data, all on the CPU; the parameters may be the network's own arrays."""

    graph: Graph
    params: Params
    inputs: list[str]  # in the order in which the network takes them
    places: list[int] | None  # of a block's ``inputs`` among the arrays of its call, which may be more
    batches: Sequence[Batch]
    calibrating: Sequence[int] = (0,)  # positions of the batches that calibrate INT8
    held: Sequence[int] = (0,)  # and of those that measure accuracy


def read_target(
    target: Any, calibration: Any, arg_params: Batch | None, aux_params: Batch | None, *, any_device: bool = False
) -> Subject:
    """Return what ``optimize_for_inference`` was called with, checked; ``any_device`` lets parameters be on a GPU."""
    if not isinstance(target, (mx.sym.Symbol, Block)):
        raise TypeError(
            f"optimize_for_inference takes a gluon Block or Symbol, got {class_of(target)}{instead(target)}"
        )
    batches = _batches(calibration)
    if isinstance(target, mx.sym.Symbol):
        subject = _read_symbol(target, batches, arg_params, aux_params)
    elif arg_params is not None or aux_params is not None:
        raise ValueError("arg_params and aux_params are for Symbols: a block has its own parameters")
    else:
        subject = _read_block(target, batches)
    done = [node.name for node in subject.graph.nodes() if node.op in FUSED or "quantize" in node.op]
    if done:
        raise ValueError(f"{done[0]!r} is fused or quantized already: give the network as it was before")
    for node in subject.graph.nodes():
        if node.op in _REFUSED:
            raise ValueError(f"{node.name!r} is a {_REFUSED[node.op]}: optimize what is before and behind it")
    _check_values(subject, any_device)
    if not any_device:
        keep_memory_apart(subject.graph)  # here, and in the process that measures
    for number, batch in enumerate(subject.batches):
        if reason := _refusal(subject, batch):
            raise ValueError(f"calibration batch {number} {reason}")
    for node in subject.graph.nodes():
        if node.is_variable and node.name in subject.batches[0]:
            # MXNet infers the dtype of an input from the operator that reads it, which casts and INT8 do not fix.
            dtype = np.dtype(subject.batches[0][node.name].dtype).name
            node.attrs.update({"__dtype__": TYPE_CODES[dtype]} if dtype in _DECLARED else {})
    return _split(
        subject._replace(params={name: value.as_in_context(mx.cpu()) for name, value in subject.params.items()})
    )


def _split(subject: Subject) -> Subject:
    """Return ``subject`` with batches that calibrate and others that measure, of which a single one is cut."""
    batches = subject.batches
    if len(batches) > 1:
        first = len(batches) - max(len(batches) // 3, 1)
        return subject._replace(calibrating=range(first), held=range(first, len(batches)))
    (batch,) = batches
    rows = {array.shape[0] if array.ndim else 1 for array in batch.values()}
    if len(rows) == 1 and min(rows) > 1:
        half = min(rows) // 2
        parts = [{name: array[part] for name, array in batch.items()} for part in (slice(half), slice(half, None))]
        if not any(_refusal(subject, part) for part in parts):
            # The whole batch is timed: it stays the first.
            return subject._replace(batches=[batch, *parts], calibrating=[1], held=[2])
    # It cannot be cut: it has one row, arrays of different numbers of rows, or a network of one batch size.
    return subject


def _batches(calibration: Any) -> list[Any]:
    expected = "expected an iterable of batches, each what the network is called with, such as [x] or a DataIter"
    if isinstance(calibration, (NDArray, np.ndarray, str, dict)) or not isinstance(calibration, Iterable):
        is_batch = isinstance(calibration, (NDArray, np.ndarray, dict, mx.io.DataBatch))
        fix = "; that is one batch, put it in a list, [batch]" if is_batch else ""
        raise ValueError(f"calibration is one {type(calibration).__name__}: {expected}{fix}")
    if isinstance(calibration, mx.io.DataIter):
        calibration.reset()
    batches = list(calibration)
    if not batches:
        raise ValueError(f"there is no calibration data: {expected}")
    return batches


def _read_block(block: Any, batches: list[Any]) -> Subject:
    """Return a block and its batches, each what one call takes, as a ``Subject``; the first traces the block."""
    if not isinstance(block, Block):
        raise TypeError(
            f"optimize_for_inference takes a gluon HybridBlock or a Symbol, got {type(block).__name__}{instead(block)}"
        )
    if not isinstance(block, HybridBlock):
        raise ValueError(f"{block.name!r} runs as Python, which has no graph: optimize the HybridBlocks in it")
    nested = [_as_arrays(batch) for batch in batches]
    values = [_flat(batch) for batch in nested]
    first = nested[0]
    try:
        args = tuple(first) if isinstance(first, list) else (first,)
        symbol, found, params, _ = traced_call(block, args, False, served=True)
    except ValueError as error:
        many = "where it holds labels too, leave them out, as in ((x,) for x, y in batches)"
        fix = many if len(values[0]) > 1 else "one batch of several inputs is [(x, y)], a list of one tuple"
        raise ValueError(
            f"{error}. A batch of {len(values[0])} arrays was passed on as so many inputs: {fix}"
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
    return Subject(strip(Graph.from_symbol(symbol)), full, inputs, places, fed)


def _read_symbol(symbol: mx.sym.Symbol, batches: list[Any], args: Batch | None, auxs: Batch | None) -> Subject:
    """Return a Symbol and its batches as a ``Subject``; arguments not in ``args`` are inputs, labels too."""
    if not args and not auxs and symbol.list_auxiliary_states():
        raise ValueError("a Symbol is optimized with its parameters: pass arg_params= and aux_params=")
    try:
        check_parameters(symbol, _prefixed(args or {}, auxs or {}), {})
    except ValueError as error:
        raise ValueError(
            f"arg_params and aux_params do not fit the Symbol: {error}; give those that mx.model.load_checkpoint or "
            "module.get_params() returns"
        ) from error
    params = {**(args or {}), **(auxs or {})}
    inputs = [name for name in symbol.list_arguments() if name not in params]
    fed = []
    for number, batch in enumerate(batches):
        if isinstance(batch, Mapping):
            arrays = {name: _as_array(value) for name, value in batch.items()}
        else:
            names = [desc[0] for desc in getattr(batch, "provide_data", None) or []] or inputs
            values = _flat(_as_arrays(batch))
            if len(values) > len(names):
                raise ValueError(
                    f"calibration batch {number} has {len(values)} arrays, and the inputs are {names}: give dicts from "
                    "the names of inputs to arrays, or leave out what the network does not read"
                )
            arrays = dict(zip(names, values))
        unknown = sorted(set(arrays) - set(inputs))
        if unknown or not arrays:
            raise ValueError(f"calibration batch {number} has {unknown or 'no arrays'}: the inputs are {inputs}")
        fed.append(arrays)
    return Subject(strip(Graph.from_symbol(symbol)), params, inputs, None, fed)


def _as_arrays(value: Any) -> Any:
    """Return nested lists of arrays by ``_as_array``; an array that occurs twice becomes two objects."""
    if isinstance(value, mx.io.DataBatch):
        value = value.data
    if isinstance(value, (list, tuple)):
        return [_as_arrays(item) for item in value]
    return None if value is None else _as_array(value)


def _as_array(value: Any) -> NDArray:
    """Return an ``NDArray`` on the CPU, in FP32 if it was float16 or float64; it may share memory with ``value``."""
    if not isinstance(value, (NDArray, np.ndarray)):
        raise ValueError(f"a calibration batch holds a {type(value).__name__}: expected arrays, or tuples of them")
    if isinstance(value, mx.np.ndarray):
        raise ValueError("this network is one of mx.np, whose operators MXNet neither fuses nor quantizes: use mx.nd")
    try:
        array = value.detach() if isinstance(value, NDArray) else mx.nd.array(value, dtype=value.dtype)
    except KeyError as error:
        raise ValueError(f"a calibration batch holds {value.dtype}, which MXNet does not have") from error
    is_float = array.dtype in (np.float16, np.float64)
    array = array.astype("float32") if is_float else array
    return array if array.context == mx.cpu() else array.as_in_context(mx.cpu())


def _flat(value: Any) -> list[NDArray]:
    """Return the arrays in nested lists and tuples, from left to right, without None."""
    if isinstance(value, (list, tuple)):
        return [array for item in value for array in _flat(item)]
    return [] if value is None else [value]


def _check_values(subject: Subject, any_device: bool) -> None:
    for name, value in subject.params.items():
        if value.context.device_type != "cpu" and not any_device:
            raise ValueError(f"parameter {name!r} is on {value.context}: fusion and INT8 are for CPUs, move it there")
        dtype = np.dtype(value.dtype)
        if dtype != np.float32 and dtype.kind not in "iu":  # integers, such as indices
            raise ValueError(
                f"parameter {name!r} is {dtype_name(value.dtype)}: give the network in FP32, as net.cast('float32') "
                "makes it"
            )
    named = [(f"parameter {name!r}", value) for name, value in subject.params.items()]
    for number, batch in enumerate(subject.batches):
        named += [(f"calibration batch {number}, {name!r},", value) for name, value in batch.items()]
    for what, value in named:
        if value.size == 0 or not np.isfinite(value.asnumpy().astype("float64", copy=False)).all():
            why = "holds NaN or infinity" if value.size else "is empty"
            raise ValueError(f"{what} {why}: every value must be finite")


def _refusal(subject: Subject, batch: Batch) -> str:
    """Return why the network cannot run on ``batch``, to follow its name in a message; ``""`` if it can."""
    missing = [name for name in subject.inputs if name not in batch and name in _read_names(subject.graph)]
    if missing:
        return f"has no array for {missing}, which the network reads (a parameter belongs into arg_params)"
    shapes = {name: value.shape for name, value in batch.items()}
    known = {**{name: value.shape for name, value in subject.params.items()}, **shapes}
    # MXNet lets a reshape to another number of elements pass, and then reads what lies behind the array.
    reshapes = [node for node in subject.graph.nodes() if node.op == "Reshape"]
    symbol = subject.graph.to_symbol()
    try:
        output_shapes(symbol, known)  # infer_shape would print all shapes that do not fit
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that shapes are missing: the text below says it
            found, _, _ = symbol.infer_shape(**known)
        ends = Graph([end for node in reshapes for end in (node.inputs[0], Entry(node))], subject.graph.attrs)
        sizes = [*map(prod, output_shapes(ends.to_symbol(), known))] if reshapes else []
    except mx.MXNetError as error:
        return f"with shapes {shapes} does not fit the network: {last_line(error)}"
    unfed = [name for name in subject.inputs if name not in batch]
    if found is None and unfed:  # without unfed inputs, a cond is in the graph: MXNet infers nothing behind it
        return f"has no array for {unfed}, which the network reads"
    for node, before, after in zip(reshapes, sizes[::2], sizes[1::2]):
        if before != after:
            return f"with shapes {shapes} does not fit the network: {node.name} makes {after} elements of {before}"
    return ""


def _read_names(graph: Graph) -> set[str]:
    """Return the names of the variables on which outputs depend: all but labels of loss heads."""
    labelled = HEAD_OPERATORS - {"Custom"}  # they copy their first input, or its softmax
    found: set[Node] = set()
    open_nodes = [entry.node for entry in graph.heads]
    while open_nodes:
        node = open_nodes.pop()
        if node not in found:
            found.add(node)
            open_nodes += [entry.node for entry in (node.inputs[:1] if node.op in labelled else node.inputs)]
    return {node.name for node in found if node.is_variable}


class _Served:
    """What ``OptimizedBlock`` and ``OptimizedSymbol`` share; ``copy`` and ``pickle`` make a new object on the CPU."""

    report: InferenceReport
    _more: tuple[Any, ...] = ()  # the constructor's arguments between parameters and report

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled Symbol would lose its casts.
        text, params = self.symbol.tojson(remove_amp_cast=False), {**self.arg_params, **self.aux_params}
        return _remade, (type(self), text, params, self._more, self.report)

    def _take(self, graph: Graph, params: Params, report: InferenceReport) -> None:
        self.symbol = graph.to_symbol()
        copies = {name: value.copy() for name, value in params.items()}
        self.arg_params, self.aux_params = by_kind(self.symbol, copies)
        self.report = report

    def export(self, path: str, epoch: int = 0, remove_amp_cast: bool = False) -> tuple[str, str]:
        """Write ``PATH-symbol.json`` and ``PATH-0000.params``, which MXNet loads without mxmp; return the two names.

        ``SymbolBlock.imports`` and ``mx.mod.Module.load`` read the files. Either both appear or none. Waits for the
        parameters.

        Parameters
        ----------
        path : str
            What the names of both files begin with, folders included.
        epoch : int
            The number in the name of the second file, in four digits: ``PATH-0012.params`` for 12.
        remove_amp_cast : bool
            Must be False, as the casts are part of the graph. It exists because the method replaces
            ``HybridBlock.export``.

        Raises
        ------
        ValueError
            ``remove_amp_cast`` is True.
        OSError
            A file cannot be written; the message names it.
        """
        if remove_amp_cast:
            raise ValueError("the casts are part of this graph: it cannot be exported without them")
        files = f"{path}-symbol.json", f"{path}-{epoch:04d}.params"
        with replacing_all(*files) as (symbol_file, params_file):
            write_symbol(symbol_file, self.symbol, remove_amp_cast=False)
            write_arrays(params_file, _prefixed(self.arg_params, self.aux_params))
        return files


class OptimizedSymbol(_Served):
    """A Symbol for inference with its parameters, as ``optimize_for_inference`` returns it for a Symbol.

    Attributes
    ----------
    symbol : Symbol
        To be bound on a CPU, or on a GPU if ``dtypes="float16"`` was requested. Its inputs are those of the Symbol that
        was optimized.
    arg_params, aux_params : dict of str to NDArray
        Its arguments and its auxiliary states by name, on the CPU.
    report : InferenceReport
        How the Symbol was found.
    """

    def __init__(self, graph: Graph, params: Params, report: InferenceReport) -> None:
        self._take(graph, params, report)


class OptimizedBlock(_Served, SymbolBlock):
    """A network for inference, as ``optimize_for_inference`` returns it for a HybridBlock.

    Calls take the arrays that the network took, of any batch size, and return its output; several outputs are a flat
    list. The first call with a shape prepares the weights for oneDNN's kernels. They stay prepared for the last four
    shapes, each of which has a copy, whatever ``hybridize`` is called with. The block runs on a CPU; with
    ``dtypes="float16"`` it is for a GPU, to which ``collect_params().reset_ctx(mx.gpu())`` moves it. It cannot be
    trained: gradients do not flow through it. Do not set its parameters: MXNet's fused operators would not notice, and
    go on with the old values for the shapes that are prepared.

    Attributes
    ----------
    symbol : Symbol
        The graph that calls run.
    arg_params, aux_params : dict of str to NDArray
        Copies of its arguments and its auxiliary states, by name.
    report : InferenceReport
        How the graph was found.
    """

    def __init__(
        self, graph: Graph, params: Params, inputs: Mapping[str, Any], places: list[int], report: InferenceReport
    ) -> None:
        variables = [mx.sym.var(name, dtype=dtype) for name, dtype in inputs.items()]
        super().__init__(graph.to_symbol(), variables)
        self._take(graph, params, report)
        self._places = places  # of ``inputs`` among the arrays of a call, in nested lists too
        self._more = dict(inputs), places
        self._prepared = Prepared(graph, variables, self.params)
        self._is_observed = False
        quantized = {node.inputs[0].node.name for node in graph.nodes() if node.op == "_contrib_quantize_v2"}
        self._dtypes = {place: dtype for place, (name, dtype) in zip(places, inputs.items()) if name in quantized}
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder, "params"))
            write_arrays(file, _prefixed(self.arg_params, self.aux_params))
            self.collect_params().load(file, mx.cpu(), cast_dtype=True, dtype_source="saved")
        self.collect_params().setattr("grad_req", "null")

    def forward(self, *inputs: Any) -> Any:
        """Run the graph and return its outputs, without recording gradients; inputs may be nested lists and tuples.

        Arrays that the network does not read are ignored. If the inputs are Symbols, so are the outputs. Raises
        ``ValueError`` if there are too few arrays, or if an input that the graph converts to INT8 has another dtype
        than it had in the calibration data.
        """
        with autograd.pause(train_mode=False):
            arrays = _flat(inputs)
            needed = max(self._places, default=-1) + 1
            if len(arrays) < needed:
                raise ValueError(f"{self.name!r} takes at least {needed} arrays, got {len(arrays)}")
            for place, dtype in self._dtypes.items():
                # MXNet would take an array of uint8 or int8 for one that is quantized already.
                if isinstance(arrays[place], NDArray) and arrays[place].dtype != dtype:
                    raise ValueError(
                        f"array {place} is {np.dtype(arrays[place].dtype).name}, and {self.name!r} was calibrated with "
                        f"{np.dtype(dtype).name}: call it with array.astype('{np.dtype(dtype).name}')"
                    )
            read = [arrays[place] for place in self._places]
            # Called with Symbols, the block becomes a part of the graph of a block around it.
            if self._is_observed or not isinstance(read[0], NDArray):
                return super().forward(*read)
            return self._prepared(read)

    def cast(self, dtype: Any) -> None:
        """Refuse a cast: the graph holds the dtype of each operator. Raises ``ValueError`` unless ``dtype`` is FP32."""
        if dtype not in ("float32", np.float32):
            raise ValueError(
                f"{self.name!r} has the dtypes that were found for it, and cast({dtype!r}) would break its graph: "
                "optimize the network again, with dtypes='float16' for a GPU"
            )

    def register_op_hook(self, callback: Callable[..., Any], monitor_all: bool = False) -> None:
        """Let all later calls pass each operator's outputs to ``callback``, and with ``monitor_all`` also its inputs.

        MXNet calls ``callback`` with the tensor's name, the operator's type and the tensor's handle. Calls of the block
        are then slower.
        """
        super().register_op_hook(callback, monitor_all)
        self._is_observed = True


def _remade(kind: type, text: str, params: Params, more: tuple[Any, ...], report: InferenceReport) -> Any:
    """Return an ``OptimizedBlock`` or ``OptimizedSymbol``, for ``copy`` and ``pickle``."""
    return kind(Graph.from_json(text), params, *more, report)


def _prefixed(args: Batch, auxs: Batch) -> Params:
    """Return both in one dict, by the keys of a checkpoint: ``arg:NAME``, ``aux:NAME``."""
    return {**{f"arg:{name}": value for name, value in args.items()}, **{f"aux:{name}": v for name, v in auxs.items()}}


def served(subject: Subject, graph: Graph, params: Params, report: InferenceReport) -> OptimizedBlock | OptimizedSymbol:
    """Return what ``optimize_for_inference`` returns for ``subject``."""
    if subject.places is None:
        return OptimizedSymbol(graph, params, report)
    inputs = {name: subject.batches[0][name].dtype for name in subject.inputs}
    return OptimizedBlock(graph, params, inputs, subject.places, report)

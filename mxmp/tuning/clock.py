"""How long a graph takes, operator by operator and as a whole step, on arrays of its own.

A monitor waits after each operator in its place in the network, so with the layouts and caches of training: after a
plain array, BatchNorm takes five times as long as after a convolution, which returns a blocked layout of oneDNN.
"""

from __future__ import annotations

import ctypes
import re
import statistics
import time
from collections import Counter
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence, Union

import mxnet as mx
import numpy as np
from mxnet.base import NDArrayHandle
from mxnet.ndarray import NDArray

from ..host.callbacks import KeptError, hold_interrupts
from ..kernels.fusion import Unfused
from ..kernels.padding import LargeInputs
from ..pipeline import emitted
from ..precision.casts import FULL, LowGraph, declare_full, source_of
from ..precision.graph import Entry, Graph, Node
from ..precision.plan import Plan
from ..precision.rules import rule_of
from ..step.gradients import FiniteSums, fetch
from ..step.masters import Masters
from ..step.updater import Update, Updaters
from .job import Job
from .stand_ins import put_stand_ins, with_stand_ins


class Cast(NamedTuple):
    """The cast of a tensor of the FP32 graph, forward and backward: to FP32 if ``to_fp32``, else to low precision."""

    entry: Entry
    to_fp32: bool


# What a measured time belongs to: an operator of the FP32 graph, or a cast.
Owner = Union[Node, Cast]

# Operators that MXNet registers the old way (MXNET_REGISTER_OP_PROPERTY). A monitor of their backward's inputs never
# ends: MXNet takes it to have 4 billion (src/nnvm/legacy_op_util.cc: kVarg; GraphExecutor::ExecuteMonInputCallback).
_LEGACY_NAMES = (
    "BatchNorm_v1 BilinearSampler Convolution_v1 Correlation Crop GridGenerator IdentityAttachKLSparseReg InstanceNorm "
    "L2Normalization MakeLoss Pad Pooling_v1 ROIPooling SVMOutput SequenceLast SequenceMask SequenceReverse "
    "SliceChannel SpatialTransformer SwapAxis _contrib_DeformableConvolution _contrib_DeformablePSROIPooling "
    "_contrib_MultiBoxDetection _contrib_MultiBoxPrior _contrib_MultiBoxTarget _contrib_MultiProposal "
    "_contrib_PSROIPooling _contrib_Proposal _contrib_SyncBatchNorm _contrib_count_sketch _contrib_fft _contrib_ifft"
)
_LEGACY = frozenset(_LEGACY_NAMES.split())


@contextmanager
def listening(
    executor: mx.executor.Executor, note: Callable[[str, NDArray], None], before: bool = False
) -> Iterator[None]:
    """Call ``note`` with name and array of each output of an operator, and ``before`` it runs of each input too.
    Its first error is raised behind the block."""
    error = KeptError()

    def call(name: bytes, handle: Any) -> None:
        with error:
            note(name.decode(), NDArray(ctypes.cast(handle, NDArrayHandle), writable=False))  # frees the handle

    executor.set_monitor_callback(call, monitor_all=before)
    yield
    error.raise_it()


class Arrays:
    """Arrays that all plans of a graph are timed on: copies of the user's, else random with a fixed seed."""

    def __init__(
        self,
        graph: Graph,
        ctx: mx.Context,
        grad_req: Mapping[str, str],
        values: Mapping[str, NDArray],
        shapes: Mapping[str, tuple[int, ...]],
        large_inputs: bool = False,
        optimizer: str = "sgd",
    ) -> None:
        symbol = with_stand_ins(graph).to_symbol()
        known = {**shapes, **{name: value.shape for name, value in values.items()}}
        sizes, _, states = symbol.infer_shape(**known)
        dtypes = {**dict.fromkeys(shapes, np.float32), **{name: value.dtype for name, value in values.items()}}
        types = symbol.infer_type_partial(**dtypes)[0]
        # large_inputs: without the workarounds for inputs that are small beside the padding.
        self.ctx, self.grad_req, self.large_inputs = ctx, dict(grad_req), large_inputs
        rng = np.random.RandomState(0)
        read_exactly = _read_exactly(graph)
        self.arguments = {
            name: values[name].copyto(ctx)
            if name in values
            else mx.nd.array(_drawn(name, size, rng, name in read_exactly), ctx=ctx, dtype=dtype or np.float32)
            for name, size, dtype in zip(symbol.list_arguments(), sizes, types)
        }
        self.gradients = {
            name: mx.nd.zeros_like(self.arguments[name])
            for name, request in grad_req.items()
            if request != "null" and name in self.arguments
        }
        self.states = {
            name: mx.nd.array(_drawn(name, size, rng, True), ctx=ctx)
            for name, size in zip(symbol.list_auxiliary_states(), states)
        }
        self._batch = {name: self.arguments[name].asnumpy() for name in shapes.keys() | values.keys()}
        # What updates write: the arguments keep the values that all plans are timed on.
        self.updated = {name: self.arguments[name].copy() for name in self.gradients}
        self.optimizer = optimizer
        self.optimizer_states: dict[int, Any] = {}
        self.synced: dict[int, bool] = {}

    def feed(self) -> None:
        """Copy the batch from NumPy, as a training loop does."""
        for name, values in self._batch.items():
            self.arguments[name][:] = values


def arrays_of(job: Job, graph: Graph) -> Arrays:
    drawn = {name: shape for name, shape in job.inputs.items() if name not in job.values}
    # A converted block has another graph for large inputs; a cast Symbol has one for all.
    large = LargeInputs(with_stand_ins(graph), list(job.inputs), job.policy.compute)
    large_inputs = job.parameters is not None and bool(large) and large.at(list(job.inputs.values()))
    return Arrays(graph, job.ctx, job.grad_req, job.values, drawn, large_inputs, job.optimizer)


def _read_exactly(graph: Graph) -> set[str]:
    """Return the variables that no plan reads through a cast: labels, indices, gamma and the like."""
    found = {}
    for entry, users in graph.consumers().items():
        if entry.node.is_variable:
            found[entry.node.name] = all(position in rule_of(node.op).keep for node, position in users)
    return {name for name, exactly in found.items() if exactly}


def _drawn(name: str, shape: tuple[int, ...], rng: np.random.RandomState, exactly: bool) -> np.ndarray:
    """Return FP32 values with which nothing overflows or is denormal, which would make operators slow."""
    if exactly:  # random values would be no labels, indices or variances
        return np.full(shape, float(name.endswith(("gamma", "var"))), "float32")
    fan_in = int(np.prod(shape[1:])) if len(shape) > 1 else 1
    return rng.normal(0, (2 / max(fan_in, 1)) ** 0.5 if name.endswith("weight") else 1, shape).astype("float32")


class _TrainersStep:
    """What a Trainer's step does after the backward: it checks the gradients, and updates the weights."""

    def __init__(self, arguments: Mapping[str, NDArray], gradients: Mapping[str, NDArray], arrays: Arrays) -> None:
        options = {"momentum": 0.9} if arrays.optimizer == "sgd" else {}
        # Weights that stay what they are; SGLD draws from a normal distribution, and refuses a rate of 0.
        self._updaters = Updaters(mx.optimizer.create(arrays.optimizer, learning_rate=1e-20, **options), 1)
        self._updaters[0].states, self._updaters[0].states_synced = arrays.optimizer_states, arrays.synced
        self._updates = []
        for number, (name, gradient) in enumerate(gradients.items()):
            stored, master = arguments[name], arrays.updated[name]
            is_low = stored.dtype != master.dtype
            of = (stored.copy(), gradient, Masters([master])) if is_low else (master, gradient)
            self._updates.append(Update(number, 0, name, *of))
        self._sums = FiniteSums([update.gradient for update in self._updates])

    def __call__(self) -> None:
        fetch(self._sums())
        self._updaters.apply(self._updates, 1.0, reduced=False)


class Timed:
    """The graph of one plan, bound, whose steps are timed as a whole or by operator; an ``MXNetError`` is raised.
    ``before_each`` gets the owner before and after each operator of a first step, and then None."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        arrays: Arrays,
        training: bool,
        before_each: Callable[[Owner | None], None] | None = None,
    ) -> None:
        casted = emitted(graph, plan, arrays.grad_req, large_inputs=arrays.large_inputs)
        stand_ins = put_stand_ins(casted.graph)
        declare_full(casted.graph)
        casted.source.update({new: casted.source[node] for new, node in stand_ins.items()})
        owners = _owners(casted)
        # A workaround may need several operators for one owner.
        self.operators = Counter(owners.values())
        # MXNet's monitor reports operators by name: the name is the position of the owner.
        self._owners = list(owners.values())
        for number, node in enumerate(owners):
            node.name = f"n{number}"
        arguments, gradients = dict(arrays.arguments), dict(arrays.gradients) if training else {}
        for variable in casted.planned.low_variables:
            for held in (arguments, gradients):
                if variable.name in held:
                    held[variable.name] = held[variable.name].astype(casted.compute)
        self._training = training
        self._feed = arrays.feed
        self._update = [_TrainersStep(arguments, gradients, arrays)] if gradients else []
        self._reports_backward = not any(node.op in _LEGACY for node in casted.graph.nodes())
        symbol = casted.graph.to_symbol()
        self._executor = _bind(symbol, arrays, arguments, gradients)
        outputs = self._executor.outputs
        # Random: of equal gradients, normalization leaves denormals, for which FP32 takes 100 times as long.
        rng = np.random.RandomState(1)
        self._head_gradients = [
            mx.nd.array(rng.normal(0, 1, out.shape), arrays.ctx).astype(out.dtype) for out in outputs
        ]
        # Where a kernel crashes the process, the last call has said what ran: None is a whole step, or the backward
        # of a graph with an operator of _LEGACY.
        if before_each is not None:
            careful = _bind(symbol, arrays, arguments, gradients)
            with suppress(mx.MXNetError):  # the next step raises it again, unless the monitor was its cause
                self._run(careful, lambda owner: None if owner is None else before_each(owner), before=True)
            before_each(None)
        self.step()  # kernels do some things only the first time

    def step(self) -> float:
        """Run a forward and in training a backward, and return their seconds. Waits for the device."""
        return _seconds(partial(self._pass, self._executor, self._training))

    def whole_step(self) -> float:
        """Run ``step`` between a batch from NumPy and, in training, the update; return all seconds. Waits."""
        return _seconds(self._feed, partial(self._pass, self._executor, self._training), *self._update)

    def rest_of_step(self) -> float:
        """Run what ``whole_step`` does around ``step``; return its seconds. Waits for the device."""
        return _seconds(self._feed, *self._update)

    def profile(self) -> dict[Owner, float]:
        """Run a step; return the seconds of each owner, forward and backward. Later steps of the object are slower."""
        spent: dict[Owner, float] = {}
        last = pending = 0.0

        def note(owner: Owner | None) -> None:
            # Of None, an operator that sums gradients: its seconds go to the operator whose backward runs next.
            nonlocal last, pending
            pending += time.perf_counter() - last
            if owner is not None:
                spent[owner] = spent.get(owner, 0.0) + pending
                pending = 0.0
            last = time.perf_counter()

        mx.nd.waitall()
        last = time.perf_counter()
        self._run(self._executor, note)
        return spent

    def _run(self, executor: mx.executor.Executor, note: Callable[[Owner | None], None], before: bool = False) -> None:
        """Run a step; call ``note`` for each output of an operator, with None for MXNet's own operators."""
        owners = self._owners  # a closure over self would keep it alive

        def call(name: str, _: NDArray) -> None:
            # The monitor's name of a tensor is ``"n7_output"`` where the operator's time is counted for ``owners[7]``.
            mx.nd.waitall()
            found = re.match(r"n(\d+)_", name)
            note(owners[int(found.group(1))] if found else None)

        with listening(executor, call, before):
            _seconds(partial(self._pass, executor, self._training and (self._reports_backward or not before)))

    def _pass(self, executor: mx.executor.Executor, backward: bool) -> None:
        executor.forward(is_train=self._training)
        if backward:
            executor.backward(self._head_gradients)


def _seconds(*parts: Callable[[], None]) -> float:
    """Call all parts on a device that is idle before and waited for behind them; return the seconds."""
    mx.nd.waitall()
    with hold_interrupts():
        start = time.perf_counter()
        for part in parts:
            part()
        mx.nd.waitall()
        return time.perf_counter() - start


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile; a single value is all three."""
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def gain(times: Mapping[str, Sequence[float]], name: str, against: str) -> tuple[float, float, float]:
    """Return the quartiles, over the rounds, of how many times as fast ``name`` is as ``against``."""
    return quartiles([a / b for a, b in zip(times[against], times[name])])


def beats(times: Mapping[str, Sequence[float]], name: str, other: str) -> bool:
    """Return whether ``name`` is faster in three quarters of the rounds."""
    return gain(times, name, other)[0] > 1


def _owners(casted: LowGraph) -> dict[Node, Owner]:
    """Return what the time of each operator counts for: a workaround's for its first reader, else for its source."""
    casts = {node: Cast(cast.tensor, cast.dtype == FULL) for node, cast in casted.casts.items()}
    nodes = [node for node in casted.graph.nodes() if not node.is_variable]
    reader: dict[Node, Node] = {}
    for node in nodes:
        for entry in node.inputs:
            reader.setdefault(entry.node, node)
    owners: dict[Node, Owner] = {}
    for node in reversed(nodes):
        owner = casted.source.get(node) or casts.get(node)
        if owner is None:
            owner = owners[reader[node]] if node in reader else casted.source[source_of(Entry(node)).node]
        owners[node] = owner
    return owners


def _bind(
    symbol: mx.sym.Symbol, arrays: Arrays, arguments: dict[str, NDArray], gradients: dict[str, NDArray]
) -> mx.executor.Executor:
    """Return an executor without oneDNN's fusion, as hybridized nets and ``mxmp.Module`` in training have none."""
    if arrays.ctx.device_type == "cpu":
        symbol = Unfused(symbol)
    requests = {name: arrays.grad_req.get(name, "null") if name in gradients else "null" for name in arguments}
    return symbol.bind(arrays.ctx, arguments, gradients or None, requests, arrays.states)

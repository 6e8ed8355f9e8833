"""How long a graph takes, operator by operator and as one step, on arrays of its own.

Each operator is timed in its place in the network: MXNet's executors call back after every operator, forward and
backward, and the callback waits for it. So the operator meets the layouts (oneDNN's blocked ones), the caches and the
memory that it meets in training, which it would not in a graph of its own: BatchNorm after a plain array takes five
times as long as after a convolution.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections import Counter
from contextlib import suppress
from typing import Any, Callable, Mapping, NamedTuple, Union

import mxnet as mx
import numpy as np
from mxnet.base import NDArrayHandle
from mxnet.ndarray import NDArray

from ..callbacks import KeptError, hold_interrupts
from ..kernels.fusion import Unfused
from ..pipeline import emitted
from ..precision.casts import FULL, CastGraph, declare_full, is_ours, source_of
from ..precision.graph import Entry, Graph, Node
from ..precision.plan import Plan, PlannedGraph
from ..precision.rules import rule_of
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


class Arrays:
    """Arrays for a graph to be timed on: inputs, parameters, gradients and auxiliary states, all on one device.

    Several plans of the graph are timed on the same values; of parameters and gradients that a plan has in float16,
    ``Timed`` makes float16 copies. No array here is the user's: given values are copied in their dtype, all others are
    random numbers of a fixed seed, or for labels, indices, gamma and the like zeros or ones.

    Parameters
    ----------
    graph, ctx
        The network in FP32, and the device.
    grad_req : mapping of str to str
        ``"write"``, ``"add"`` or ``"null"`` for variables by name; a variable that is missing has no gradient.
    values, shapes : mapping of str to NDArray, and to tuple of int
        The inputs that the user gave as arrays, by name; and the shapes of the other inputs.
    large_inputs : bool
        Kept here for ``Timed``: if True, the graph that it runs lacks the workarounds that are needed only for inputs
        that are small beside the padding; if False, it has them.

    Attributes
    ----------
    arguments, gradients, states : dict of str to NDArray
        By name: the inputs and parameters; the gradients of those that have one; the auxiliary states.
    """

    def __init__(
        self,
        graph: Graph,
        ctx: mx.Context,
        grad_req: Mapping[str, str],
        values: Mapping[str, NDArray],
        shapes: Mapping[str, tuple[int, ...]],
        large_inputs: bool = False,
    ) -> None:
        symbol = with_stand_ins(graph).to_symbol()
        known = {**shapes, **{name: value.shape for name, value in values.items()}}
        sizes, _, states = symbol.infer_shape(**known)
        dtypes = {**dict.fromkeys(shapes, np.float32), **{name: value.dtype for name, value in values.items()}}
        types = symbol.infer_type_partial(**dtypes)[0]
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


def _read_exactly(graph: Graph) -> set[str]:
    """Return the names of those variables of ``graph`` that no operator reads through a cast, under any plan.

    These are labels, indices, lengths, gamma, beta and the like. Random values would not be valid for all of them.
    """
    found = {}
    for entry, users in graph.consumers().items():
        if entry.node.is_variable:
            found[entry.node.name] = all(position in rule_of(node.op).keep for node, position in users)
    return {name for name, exactly in found.items() if exactly}


def _drawn(name: str, shape: tuple[int, ...], rng: np.random.RandomState, exactly: bool) -> np.ndarray:
    """Return FP32 values for the variable ``name`` with which no activation or gradient overflows or is denormal.

    Denormals would make operators slow. ``exactly`` is True for a label, an index, gamma, beta or a running statistic:
    all values are then 1 if the name ends in "gamma" or "var", otherwise 0.
    """
    if exactly:
        return np.full(shape, float(name.endswith(("gamma", "var"))), "float32")
    fan_in = int(np.prod(shape[1:])) if len(shape) > 1 else 1
    return rng.normal(0, (2 / max(fan_in, 1)) ** 0.5 if name.endswith("weight") else 1, shape).astype("float32")


class Timed:
    """The graph of one plan, bound to arrays, whose steps can be timed as a whole or operator by operator.

    The constructor runs one step, so that the later ones do not include what kernels do only the first time.

    Parameters
    ----------
    graph, plan, arrays
        The network in FP32, a plan of it, and arrays for it, which several plans can share.
    training : bool
        True if a step is a forward and a backward, False if it is a forward alone.
    before_each : callable, optional
        If given, the constructor runs another step first, operator by operator. It calls ``before_each`` before each
        operator, and again after it, with its ``Owner``: the operator of ``graph``, or the ``Cast``, for which it runs.
        After that step it passes None. So the last call says what ran when a kernel crashes the process. The step has
        no backward if the graph has an operator of ``_LEGACY``, whose backward's inputs cannot be monitored. A crash in
        the backward then follows the call with None.

    Attributes
    ----------
    operators : Counter of Owner to int
        For each operator of the FP32 graph and each cast, how many operators the bound graph runs for it: a workaround
        may need several.

    Raises
    ------
    mxnet.MXNetError
        From the constructor and every method: a kernel is missing or fails, or memory runs out.
    """

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
        self.operators = Counter(owners.values())
        # MXNet's monitor reports operators by name: the name is the position of the owner.
        self._owners = list(owners.values())
        for number, node in enumerate(owners):
            node.name = f"n{number}"
        arguments, gradients = dict(arrays.arguments), dict(arrays.gradients) if training else {}
        for variable in PlannedGraph(graph, plan).low_variables:
            for held in (arguments, gradients):
                if variable.name in held:
                    held[variable.name] = held[variable.name].astype(casted.compute)
        self._training = training
        self._reports_backward = not any(node.op in _LEGACY for node in casted.graph.nodes())
        symbol = casted.graph.to_symbol()
        self._executor = _bind(symbol, arrays, arguments, gradients)
        outputs = self._executor.outputs
        # Random: of equal gradients, normalization leaves denormals, for which FP32 takes 100 times as long.
        rng = np.random.RandomState(1)
        self._head_gradients = [
            mx.nd.array(rng.normal(0, 1, out.shape), arrays.ctx).astype(out.dtype) for out in outputs
        ]
        if before_each is not None:
            careful = _bind(symbol, arrays, arguments, gradients)
            with suppress(mx.MXNetError):  # the next step raises it again, unless the monitor was its cause
                self._run(careful, lambda owner: None if owner is None else before_each(owner), before=True)
            before_each(None)
        self.step()

    def step(self) -> float:
        """Run one step, a forward and in training a backward, and return its seconds. Waits for the device."""
        return self._step(self._executor, self._training)

    def profile(self) -> dict[Owner, float]:
        """Run one step and return the seconds of each operator and cast in it, forward and backward together.

        The time of an operator that MXNet adds by itself, to sum gradients, is counted for the operator whose backward
        runs next. A callback waits for the device after each operator. The callback stays on the executor, so a later
        ``step`` waits after each operator too, and takes longer.
        """
        spent: dict[Owner, float] = {}
        last = pending = 0.0

        def note(owner: Owner | None) -> None:
            # If ``owner`` is None, these seconds are added at the next call, to the time of its ``owner``.
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
        """Run one step of ``executor``; after each operator, call ``note`` with what its time is counted for.

        ``note`` gets None for an operator that MXNet added by itself. It is called once for each output of an
        operator; with ``before=True`` also before each operator, once for each of its inputs. The step then has no
        backward if the graph has an operator of ``_LEGACY``, since a monitor of its backward's inputs never ends. An
        exception in ``note`` is raised when the step has ended.
        """
        owners, error = self._owners, KeptError()  # a closure over self would keep it alive

        def call(name: bytes | str, handle: Any) -> None:
            # The monitor's name of a tensor is ``"n7_output"`` where the operator's time is counted for ``owners[7]``.
            with error:
                NDArray(ctypes.cast(handle, NDArrayHandle), writable=False)  # frees the handle
                mx.nd.waitall()
                found = re.match(r"n(\d+)_", name.decode() if isinstance(name, bytes) else name)
                note(owners[int(found.group(1))] if found else None)

        executor.set_monitor_callback(call, monitor_all=before)
        self._step(executor, self._training and (self._reports_backward or not before))
        error.raise_it()

    def _step(self, executor: mx.executor.Executor, backward: bool) -> float:
        """Run a forward of an executor, and a backward if ``backward`` is True; return the seconds of both together.

        The forward is in training mode if the constructor's ``training`` was True, even without a backward. Waits for
        the device, and delays Ctrl-C until the end.
        """
        mx.nd.waitall()
        with hold_interrupts():
            start = time.perf_counter()
            executor.forward(is_train=self._training)
            if backward:
                executor.backward(self._head_gradients)
            mx.nd.waitall()
            return time.perf_counter() - start


def _owners(casted: CastGraph) -> dict[Node, Owner]:
    """Return, for each operator of the graph with casts, what its measured time is counted for.

    That is an operator of the FP32 graph, or a ``Cast``. An operator that a workaround inserted is counted with the
    first node, in graph order, that reads its output; if none does, with the operator whose values it passes on.
    """
    casts = {}
    for cast in casted.casts:
        entry = cast.inputs[0]
        while is_ours(entry.node):
            entry = entry.node.inputs[0]
        casts[cast] = Cast(entry._replace(node=casted.source[entry.node]), cast.attrs["dtype"] == FULL)
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
    """Return an executor of ``symbol``, bound without MXNet's oneDNN fusion.

    Hybridized Gluon nets, and ``mxmp.Module`` in training, run without that fusion, so times with it would not be
    theirs. The device, ``grad_req`` and the auxiliary states are those of ``arrays``.
    """
    if arrays.ctx.device_type == "cpu":
        symbol = Unfused(symbol)
    requests = {name: arrays.grad_req.get(name, "null") if name in gradients else "null" for name in arguments}
    return symbol.bind(arrays.ctx, arguments, gradients or None, requests, arrays.states)

"""The loss scale of a backward: what the backward starts from, and the scale of each loss head that it reaches.

A loss head is an operator that writes its own gradient, such as ``SoftmaxOutput``. In a converted block it reads its
scale from an input, an array of each recorded forward. Outside, one that reads its attribute ``grad_scale`` in the
backward is scaled by that; any other ignores the loss scale, and is refused (``refuse_unscaled_heads``; inside
unconverted hybridized blocks, as far as it can be found, ``refuse_hidden_heads``).
"""

from __future__ import annotations

import math
import re
import threading
import weakref
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Callable, Collection, Iterable, Iterator, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

from ..precision._mxnet import BFLOAT16, dtype_name
from ..precision.graph import Entry, Graph, Node
from ..precision.heads import HEAD_OPERATORS, is_unscaled
from ..step.python_operators import true_gradients
from . import _mxnet

# -- what autograd recorded --------------------------------------------------------------------------

_OPERATOR = re.compile(r'"op": "(\w+)"')
_OPAQUE = re.compile(r'"op": "_CachedOp",\s+"name": "(\w+)"')


def recorded_name(array: NDArray) -> str | None:
    """Return the name that autograd's recorded graph has for the node of ``array``; None if it was not recorded."""
    try:
        return mx.autograd.get_symbol(array).name
    except mx.MXNetError:
        return None


# MXNet's errors for an array that was not recorded: in get_symbol, and in backward.
_NOT_RECORDED = (
    "NDArray is not part of a computation graph",
    "it is not in a computational graph",
    "There are no inputs in computation graph that require gradients",
)


@contextmanager
def explain_unrecorded() -> Iterator[None]:
    """Replace MXNet's errors for a loss that was not recorded by a ``RuntimeError`` that says what to do."""
    try:
        yield
    except mx.MXNetError as error:
        if not any(words in str(error) for words in _NOT_RECORDED):
            raise
        raise RuntimeError(
            "the loss was not recorded: compute net(x) and the loss inside `with autograd.record():`. Where they are, "
            "nothing of it asks for a gradient (grad_req='null'), or an earlier backward used its record up "
            "(retain_graph=True keeps it), or the net is a copy (copy.deepcopy, pickle), whose arrays MXNet gives no "
            "gradients before the grad_req of each parameter was set to 'null' and back"
        ) from error


class Record:
    """The graphs that autograd recorded when ``losses`` were computed: what one backward of them reaches.
    Every property and method raises ``RuntimeError`` if a loss was not recorded."""

    def __init__(self, losses: Sequence[NDArray]) -> None:
        self.losses = losses

    @cached_property
    def _symbols(self) -> list[mx.sym.Symbol]:
        with explain_unrecorded():
            return [mx.autograd.get_symbol(loss) for loss in self.losses]

    @cached_property
    def _texts(self) -> list[str]:
        """Return the recorded graphs as JSON, one per loss, which are faster to search than Symbols."""
        return [symbol.tojson(remove_amp_cast=False) for symbol in self._symbols]

    @cached_property
    def leaves(self) -> set[str]:
        """Return the names that autograd has for the graphs' variables (``"var3"``): Parameters and inputs."""
        return {name for symbol in self._symbols for name in symbol.list_inputs()}

    @cached_property
    def operators(self) -> set[str]:
        """Return the types of all recorded operators; a hybridized block is one, ``"_CachedOp"``."""
        return {name for text in self._texts for name in _OPERATOR.findall(text)}

    @cached_property
    def _graphs(self) -> list[Graph]:
        return [Graph.from_json(text) for text in self._texts]

    def nodes(self) -> Iterator[Node]:
        """Yield all recorded nodes. Takes 0.6 ms for a ResNet-50, so look in ``operators`` first."""
        for graph in self._graphs:
            yield from graph.nodes()

    def heads_with_attribute(self) -> list[tuple[mx.sym.Symbol, str]]:
        """Return each loss head of Python code that reads ``grad_scale`` in its backward, and its value as text."""
        if _SCALED_BY_ATTRIBUTE.isdisjoint(self.operators):
            return []
        found = []
        for symbol, graph in zip(self._symbols, self._graphs):
            for node in graph.nodes():
                if node.op in _SCALED_BY_ATTRIBUTE and is_unscaled(node):
                    found.append((_mxnet.recorded_node(symbol, node.name), node.attrs.get("grad_scale", "1")))
        return list({head.name: (head, own) for head, own in found}.values())

    def used_outputs(self) -> set[tuple[str, int]]:
        """Return ``(name of the node, output index)`` for each output that gets a head gradient in a backward."""
        entries: list[Entry] = [entry for node in self.nodes() for entry in node.inputs]
        entries += [head for graph in self._graphs for head in graph.heads]
        return {(entry.node.name, entry.index) for entry in entries}

    def outputs_of_cached_ops(self, known: Collection[str] = ()) -> dict[str, dict[str, bool]]:
        """Return ``_mxnet.outputs_of_cached_ops`` of the calls of hybridized blocks, without those named in ``known``.
        Takes 0.05 ms per call."""
        found: dict[str, dict[str, bool]] = {}
        for symbol, text in zip(self._symbols, self._texts):
            nodes = [name for name in _OPAQUE.findall(text) if name not in found and name not in known]
            found.update(_mxnet.outputs_of_cached_ops(symbol, nodes) if nodes else {})
        return found


# The loss heads whose backward reads the attribute ``grad_scale`` anew; the others read it in their forward.
_SCALED_BY_ATTRIBUTE = frozenset(
    ["SoftmaxOutput", "LinearRegressionOutput", "LogisticRegressionOutput", "MAERegressionOutput"]
)


def _as_text(number: np.float32) -> str:
    """Return a number as MXNet reads it exactly: its parser misreads some exponents."""
    return np.format_float_positional(number, unique=True, trim="-")


# -- loss heads in converted blocks ------------------------------------------------------------------


# How many binary digits a number of these dtypes has.
_NARROW = {np.dtype(np.float16): ("float16", 11), BFLOAT16: ("bfloat16", 8)}


def check_head_gradient(loss: NDArray, scale: float, given: NDArray | None = None) -> None:
    """Raise ``TypeError`` if one of them is no NDArray, and ``ValueError`` if the dtype of the loss cannot hold
    ``scale`` exactly, or ``given`` does not fit the loss."""
    if not isinstance(loss, NDArray):
        raise TypeError(f"loss must be an NDArray or a list of them, got {type(loss).__name__}")
    name, digits = _NARROW.get(np.dtype(loss.dtype), ("", 53))
    if (name == "float16" and not 2.0**-14 <= scale <= 2.0**15) or not (
        math.frexp(scale)[0] * 2.0**digits
    ).is_integer():
        # The update divides by the exact scale.
        raise ValueError(
            f"the loss is {name}, which cannot hold the loss scale {scale:g}: compute the loss in FP32 "
            "(loss_fn(net(x).astype('float32'), y)), or use a power of two from 2**-14 to 2**15"
        )
    if given is None:
        return
    if not isinstance(given, NDArray):
        raise TypeError(f"out_grad must be an NDArray or a list of them, got {type(given).__name__}")
    wanted, got = ((each.shape, dtype_name(each.dtype), str(each.ctx)) for each in (loss, given))
    if wanted != got:
        raise ValueError(f"out_grad must have the shape, dtype and device of its loss, {wanted}, got {got}")


def head_gradient(loss: NDArray, scale: float, given: NDArray | None = None) -> NDArray:
    """Return the head gradient with which a backward of ``loss`` is one of ``loss * scale``; does not wait.
    ``given`` is the user's, None for 1. Raises as ``check_head_gradient``."""
    check_head_gradient(loss, scale, given)
    kind = mx.np if isinstance(loss, mx.np.ndarray) else mx.nd
    return (kind.ones_like(loss) if given is None else given) * scale


# Global: the scale arrays that recorded forwards read, by the names that autograd gave them; autograd's record is no
# object of Python's that could hold them. Each is a pair: the array that the forward was given, by which autograd knows
# it, and one of the same memory to write to. They are dropped when a scaled backward has used their record up, and the
# oldest in any case.
_scales: dict[str, tuple[NDArray, NDArray]] = {}
# Global, for the same reason: the names of the nodes that recorded forwards of converted blocks made; and of these,
# the forwards with loss heads that the loss scale does not multiply.
_converted_calls: dict[str, None] = {}
_unscaled_calls: dict[str, None] = {}
_LIVE_RECORDS = 1 << 14
# Global: all trainers that live. A backward must know of trainers with other scalers whose gradients it would
# overwrite, and a forward whether any trainer scales; no object leads from a loss or a net to them.
living_trainers: weakref.WeakSet[Any] = weakref.WeakSet()
# Global: the lock for these three dicts.
_lock = threading.Lock()
# Global: whether this thread is inside a scaled backward, of whatever trainer.
_local = threading.local()


def needs_scale(compute: str) -> bool:
    """Return whether the loss heads of a converted block must multiply their gradients by the scale in this call."""
    # In bfloat16 without a trainer that scales, the multiplication would be needless and slow: it takes ten operators.
    return autograd.is_recording() and (
        compute != "bfloat16" or any(trainer.may_scale for trainer in list(living_trainers))
    )


def call_with_scale(call: Callable[[NDArray], Any], ctx: mx.Context) -> Any:
    """Call ``call(scale)``, a forward with loss heads, with an array of 1 that ``heads_scaled_by`` sets later."""
    memory = mx.nd.ones((1,), ctx=ctx)
    fed = memory.detach()  # autograd notes in the handle which record it belongs to
    out = call(fed)
    if autograd.is_recording():
        _remember(_scales, fed, (fed, memory))
    return out


@contextmanager
def heads_scaled_by(value: float, record: Record) -> Iterator[None]:
    """Multiply the gradients that loss heads and Python operators write by ``value``, in a backward of ``record``.
    Raises ``RuntimeError`` inside another such ``with`` block on this thread: the loss would be scaled twice."""
    if getattr(_local, "open", False):
        raise RuntimeError(
            "a scaled backward inside scale_loss would be scaled twice: call autograd.backward there, on the "
            "scaled loss, or trainer.backward(loss) outside"
        )
    reached: dict[str, tuple[NDArray, NDArray]] = {}
    if _scales:
        with _lock:
            reached = {name: _scales[name] for name in record.leaves if name in _scales}
    scales = [memory for _, memory in reached.values()] if value != 1.0 else []
    heads = record.heads_with_attribute() if value != 1.0 else []
    _local.open = True
    try:
        # MXNet's engine orders these writes and the backward's reads, so nothing waits.
        _set(scales, value)
        for head, own in heads:
            _mxnet.set_attribute(head, "grad_scale", _as_text(np.float32(own) * np.float32(value)))
        with true_gradients(value):
            yield
    finally:
        _set(scales, 1.0)
        for head, own in heads:
            _mxnet.set_attribute(head, "grad_scale", own)
        _local.open = False
        used_up = [name for name, (fed, _) in reached.items() if recorded_name(fed) is None]
        with _lock:
            for name in used_up:
                _scales.pop(name, None)


def remember_converted_call(out: NDArray, *, has_unscaled_heads: bool) -> None:
    """Remember, by one of its outputs, a call of a converted block, for ``refuse_hidden_heads`` to ignore.
    For ``refuse_late_scale``, also that it has loss heads which the loss scale does not multiply."""
    _remember(_converted_calls, out, None)
    if has_unscaled_heads:
        _remember(_unscaled_calls, out, None)


def refuse_late_scale(record: Record, scale: float) -> None:
    """Raise ``ValueError`` if a forward of ``record`` has loss heads that the loss scale ``scale`` would not multiply.
    It is then one in bfloat16, of a time when no mxmp.Trainer had a loss scale."""
    if _unscaled_calls and any(node.name in _unscaled_calls for node in record.nodes()):
        raise ValueError(
            f"the net, in bfloat16, ran before there was a loss scale; it is {scale:g} now. The gradient of the net's "
            "loss head would not be multiplied by it, and the update would divide by it: call the net again"
        )


def _remember(store: dict, array: NDArray, value: Any) -> None:
    """Store ``value`` under the name that autograd gave to ``array``; do nothing if it was not recorded."""
    name = recorded_name(array)
    if name is not None:
        with _lock:
            store[name] = value
            # Forwards without a backward must not fill the memory.
            while len(store) > _LIVE_RECORDS:
                del store[next(iter(store))]


def _set(scales: Sequence[NDArray], value: float) -> None:
    with autograd.pause():
        for scale in scales:
            scale[:] = value


# -- loss heads outside any converted block --------------------------------------------------------

# MXNet names an output after its operator, unless the user has named it.
_HEAD = re.compile(rf"({'|'.join(op.lower() for op in HEAD_OPERATORS)})\d*_output\d*$")
# Operators through which no gradient goes: a block that ends in one writes zeros.
_NO_GRADIENT = re.compile(
    r"(blockgrad|stop_gradient|(zeros|ones|arange)_like|arg(max|min|sort)|topk|one_hot|(equal|greater|lesser)(_?scalar)?"
    r"|logical_(and|or|xor|not)|round|rint|floor|ceil|trunc|fix|sign|multibox(prior|target|detection)|proposal|box_nms"
    r"|shape_array)\d*_output\d*$"
)


def refuse_unscaled_heads(record: Record, scale: float) -> None:
    """Raise ``ValueError`` if autograd recorded a loss head, such as ``MakeLoss``, that ignores the loss scale.
    Takes 0.7 ms for a ResNet-50."""
    ignoring = HEAD_OPERATORS - _SCALED_BY_ATTRIBUTE
    if ignoring.isdisjoint(record.operators):
        return
    for node in record.nodes():
        if node.op in ignoring and is_unscaled(node):
            raise ValueError(
                f"{node.op} writes its own gradient and ignores the loss scale {scale:g}, by which the update "
                "would divide: put it inside a net that goes through mxmp.convert, or use loss_scale=None"
            )


def refuse_hidden_heads(record: Record, scale: float, trained: Iterable[NDArray]) -> None:
    """Raise ``ValueError`` if an unconverted hybridized block has a loss head inside, which ignores the loss scale.
    A loss head is not found if the backward reads the head gradient of another output, and the head is no output or one
    that the user has named. One that sends a gradient to none of the weights ``trained`` is no error."""
    if "_CachedOp" not in record.operators:
        return
    hidden = record.outputs_of_cached_ops(known=_converted_calls)
    if all(reads for outputs in hidden.values() for reads in outputs.values()):
        return
    used = record.used_outputs()
    names_of_trained = set(map(recorded_name, trained))
    for node in list(record.nodes()):
        if node.name not in hidden:
            continue
        outputs = list(hidden[node.name].items())
        reached = [outputs[i] for i in range(len(outputs)) if (node.name, i) in used]
        # A loss head: an output has its name (``"softmaxoutput0_output"``) and its head gradient is not read. Or no
        # head gradient is read of the outputs that the losses depend on, and none is of an operator without a gradient.
        named = [name for name, reads in outputs if not reads and _HEAD.search(name)]
        if not named and any(reads or _NO_GRADIENT.search(name) for name, reads in reached):
            continue
        read = {each.name for each in Graph([Entry(node)]).nodes() if each.is_variable}
        if not read.isdisjoint(names_of_trained):
            names = ", ".join(name[len(node.name) + 1 :] for name in named or dict(reached))
            raise ValueError(
                f"a hybridized block (its output: {names}) ignores the gradient from above, and with it the loss "
                f"scale {scale:g}, by which the update would divide: it has a loss head inside. Convert it with "
                "mxmp.convert(block), or use loss_scale=None; if its output is to have no gradient, call the block "
                "within autograd.pause()"
            )

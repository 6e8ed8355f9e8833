"""The loss scale of a backward: what the backward starts from, and the scale of each loss head that it reaches.

A loss head is an operator that writes its own gradient, such as ``SoftmaxOutput``. In a converted block, loss heads
read their scale from an input of the graph named ``SCALE_NAME``. Each recorded forward of the block passes a new array
to this input. The array holds the loss scale during a scaled backward that reaches this forward, and 1 otherwise.

A loss head that Python code calls outside any converted block is scaled by its own attribute ``grad_scale``, where it
reads it in the backward: the attribute is multiplied by the loss scale for this backward. One that does not read it
then, such as ``MakeLoss``, ignores the loss scale, so it is an error. In the graph that autograd recorded,
an unconverted hybridized block is one ``_CachedOp`` node. Python cannot read the operators in the node, but MXNet shows
which head gradients its backward reads. A block is taken to have a loss head in two cases: its backward reads none of
the head gradients of the outputs on which the losses depend; or it has an output that is named after a loss head, and
does not read the head gradient of this output.

A loss head is not found if the block's backward reads the head gradient of another output, and the loss head is no
output of the block or has a name that the user gave.
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

from ..precision.graph import Entry, Graph, Node
from ..precision.heads import HEAD_OPERATORS, is_unscaled
from . import _mxnet
from .parameter import BFLOAT16

# -- what autograd recorded --------------------------------------------------------------------------

_OPERATOR = re.compile(r'"op": "(\w+)"')
_OPAQUE = re.compile(r'"op": "_CachedOp",\s+"name": "(\w+)"')


def recorded_name(array: NDArray) -> str | None:
    """Return the name that autograd's recorded graph has for the node of ``array``; None if ``array`` was not recorded.

    The node, an operator or a variable, has the same name in the Symbol ``mx.autograd.get_symbol(loss)``.
    """
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
    """Replace MXNet's error for a loss that was not recorded, raised in the ``with`` block, by a ``RuntimeError``.

    The new error says what to do. MXNet's error is recognized by its text; any other error stays as it is.
    """
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
    """The graphs that autograd recorded when ``losses`` were computed, from ``mx.autograd.get_symbol``.

    One object is made for each backward; it tells which parameters and which loss heads the backward reaches. Every
    property and method raises ``RuntimeError`` if a loss was not recorded.
    """

    def __init__(self, losses: Sequence[NDArray]) -> None:
        self.losses = losses

    @cached_property
    def _symbols(self) -> list[mx.sym.Symbol]:
        with explain_unrecorded():
            return [mx.autograd.get_symbol(loss) for loss in self.losses]

    @cached_property
    def _texts(self) -> list[str]:
        """Return the recorded graphs as JSON texts, one per loss, which are faster to search than Symbols."""
        return [symbol.tojson(remove_amp_cast=False) for symbol in self._symbols]

    @cached_property
    def leaves(self) -> set[str]:
        """Return the names that autograd has for the graphs' variables (``"var3"``): Parameters and inputs."""
        return {name for symbol in self._symbols for name in symbol.list_inputs()}

    @cached_property
    def operators(self) -> set[str]:
        """Return the types of all operators that autograd recorded; a hybridized block is one, ``"_CachedOp"``."""
        return {name for text in self._texts for name in _OPERATOR.findall(text)}

    @cached_property
    def _graphs(self) -> list[Graph]:
        return [Graph.from_json(text) for text in self._texts]

    def nodes(self) -> Iterator[Node]:
        """Yield all nodes of the graphs that autograd recorded.

        Takes 0.6 ms for a ResNet-50, so callers first look in ``operators`` for the types that they seek.
        """
        for graph in self._graphs:
            yield from graph.nodes()

    def heads_with_attribute(self) -> list[tuple[mx.sym.Symbol, str]]:
        """Return each loss head that Python code has called and that reads ``grad_scale`` in its backward.

        Each is a pair: the recorded node, as a Symbol, and the value of ``grad_scale`` that the user gave, as text.
        """
        if _SCALED_BY_ATTRIBUTE.isdisjoint(self.operators):
            return []
        found = []
        for symbol, graph in zip(self._symbols, self._graphs):
            for node in graph.nodes():
                if node.op in _SCALED_BY_ATTRIBUTE and is_unscaled(node):
                    found.append((_mxnet.recorded_node(symbol, node.name), node.attrs.get("grad_scale", "1")))
        return list({head.name: (head, own) for head, own in found}.values())

    def used_outputs(self) -> set[tuple[str, int]]:
        """Return the outputs of recorded nodes that another node reads, and the losses.

        Each is a pair ``(name of the node, output index)``. A backward sends a head gradient to these outputs only.
        """
        entries: list[Entry] = [entry for node in self.nodes() for entry in node.inputs]
        entries += [head for graph in self._graphs for head in graph.heads]
        return {(entry.node.name, entry.index) for entry in entries}

    def outputs_of_cached_ops(self, known: Collection[str] = ()) -> dict[str, dict[str, bool]]:
        """Return, for each output of a call of a hybridized block, whether the call's backward reads its head gradient.

        Each call is one recorded node. The result maps the node's name to a dict, which maps the name of each output to
        True (its head gradient is read) or False. Nodes named in ``known`` are left out, and so are those for which
        this cannot be found out (see ``_mxnet.outputs_of_cached_ops``). Takes 0.05 ms per node.
        """
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


def head_gradient(loss: NDArray, scale: float) -> NDArray:
    """Return an array full of ``scale``: with this head gradient, a backward of ``loss`` is one of ``loss * scale``.

    The array has the shape, dtype, context and kind (``mx.nd`` or ``mx.np``) of ``loss``. Does not wait for the device.
    Raises ``TypeError`` if ``loss`` is no NDArray. Raises ``ValueError`` if ``loss`` is float16 and ``scale`` is not
    from 2**-14 to 2**15; also if ``loss`` is float16 or bfloat16 and this dtype would round ``scale``, since the update
    divides by the exact one.
    """
    if not isinstance(loss, NDArray):
        raise TypeError(f"loss must be an NDArray or a list of them, got {type(loss).__name__}")
    name, digits = _NARROW.get(np.dtype(loss.dtype), ("", 53))
    if (name == "float16" and not 2.0**-14 <= scale <= 2.0**15) or not (
        math.frexp(scale)[0] * 2.0**digits
    ).is_integer():
        raise ValueError(
            f"the loss is {name}, which cannot hold the loss scale {scale:g}: compute the loss in FP32 "
            "(loss_fn(net(x).astype('float32'), y)), or use a power of two from 2**-14 to 2**15"
        )
    kind = mx.np if isinstance(loss, mx.np.ndarray) else mx.nd
    return kind.ones_like(loss) * scale


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
    """Return whether the loss heads of a converted block must multiply their gradients by the loss scale in this call.

    Only a call that autograd records needs it, and in bfloat16 only if a living mxmp.Trainer has a loss scale other
    than 1, or may get one. Without such a trainer the multiplication would be needless, and slow: it takes ten
    operators on the head's input. ``compute`` is the compute dtype.
    """
    return autograd.is_recording() and (
        compute != "bfloat16" or any(trainer.may_scale for trainer in list(living_trainers))
    )


def call_with_scale(call: Callable[[NDArray], Any], ctx: mx.Context) -> Any:
    """Call ``call(scale)``, the forward of a converted block with loss heads, and return its result.

    ``scale`` is a new FP32 array of shape (1,) on ``ctx``, with the value 1. In a backward, the loss heads multiply
    their gradients by the value that the array has then. If autograd records the forward, the array is remembered, so
    that ``heads_scaled_by`` can set it to the loss scale during a backward.
    """
    memory = mx.nd.ones((1,), ctx=ctx)
    fed = memory.detach()  # autograd notes in the handle which record it belongs to
    out = call(fed)
    if autograd.is_recording():
        _remember(_scales, fed, (fed, memory))
    return out


@contextmanager
def heads_scaled_by(value: float, record: Record) -> Iterator[None]:
    """Multiply the gradients that loss heads write by ``value``, during a backward from ``record.losses``.

    The loss heads of a converted block read their scale from an array, a new one in each forward (``call_with_scale``).
    The arrays of those forwards that the backward reaches are set to ``value`` when the ``with`` block begins, and to 1
    when it ends; it does not matter which trainer updates the parameters. MXNet's engine orders these writes and the
    backward's reads, so nothing waits. Of loss heads outside converted blocks, the attribute ``grad_scale`` is set (see
    ``Record.heads_with_attribute``). Raises ``RuntimeError`` inside another such ``with`` block on this thread, because
    the loss would be scaled twice.
    """
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
        _set(scales, value)
        for head, own in heads:
            _mxnet.set_attribute(head, "grad_scale", _as_text(np.float32(own) * np.float32(value)))
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
    """Remember the call of a converted block that has returned ``out``, so that ``refuse_hidden_heads`` ignores it.

    ``out`` may be any one of the block's outputs. Does nothing if ``out`` was not recorded. ``has_unscaled_heads`` says
    whether the graph has loss heads that the loss scale does not multiply, as it did not need to (``needs_scale``);
    ``refuse_late_scale`` then refuses a backward with another loss scale.
    """
    _remember(_converted_calls, out, None)
    if has_unscaled_heads:
        _remember(_unscaled_calls, out, None)


def refuse_late_scale(record: Record, scale: float) -> None:
    """Raise ``ValueError`` if a forward of ``record`` has loss heads that the loss scale ``scale`` would not multiply.

    The forward is then one of a net in bfloat16, of a time when no mxmp.Trainer had a loss scale.
    """
    if _unscaled_calls and any(node.name in _unscaled_calls for node in record.nodes()):
        raise ValueError(
            f"the net, in bfloat16, ran before there was a loss scale; it is {scale:g} now. The gradient of the net's "
            "loss head would not be multiplied by it, and the update would divide by it: call the net again"
        )


def _remember(store: dict, array: NDArray, value: Any) -> None:
    """Store ``value`` in ``store``, under the name that autograd gave to ``array``; do nothing if it was not recorded.

    The oldest of more than ``_LIVE_RECORDS`` entries are dropped: forwards without a backward must not fill the memory.
    """
    name = recorded_name(array)
    if name is not None:
        with _lock:
            store[name] = value
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

    Loss heads in converted graphs do not ignore it, nor do those of ``Record.heads_with_attribute``. Only operators
    that autograd recorded one by one are examined; for those inside hybridized blocks see ``refuse_hidden_heads``.
    ``scale`` is for the message. Takes 0.7 ms for a ResNet-50.
    """
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

    Autograd records a call of such a block as one node. The block is taken to have a loss head in two cases. First: an
    output has a loss head's name (``"softmaxoutput0_output"``), and its head gradient is not read. Second: of the
    outputs on which the losses of ``record`` depend, the block reads no head gradient, and none has the name of an
    operator without a gradient, such as ``argmax``. So if the head gradient of one of these outputs is read, a loss
    head is found only if it is an output of the block that the user has not named. ``trained`` are the weight arrays
    that the next step updates: a loss head that sends a gradient to none of them is no error. ``scale`` is only for the
    message; the caller does not call this function if it is 1. Takes no time if no hybridized block was recorded.
    """
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

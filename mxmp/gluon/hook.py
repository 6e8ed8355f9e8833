"""What stands in front of one block's ``forward``, and runs the right low-precision graph for each call.

A ``HybridBlock`` keeps one graph and what its inputs look like on itself. A converted block has a graph for
each training mode, structure of inputs and device; which one a call needs is found from the call, and
nothing of the call is kept on the block, so calls from several threads, and calls inside calls, do not meet.
The FP32 graph stays beside them, so exports and checkpoints stay FP32.
"""

from __future__ import annotations

from typing import Any, Iterator, NamedTuple

from mxnet import autograd
from mxnet.gluon import Block, HybridBlock

from ..kernels.fit import device_of
from . import _mxnet
from .blocks import blocks_of, hybrid_blocks
from .conversion import BUILDING, NetConversion, is_tracing
from .graphs import BuiltGraph, GraphKey, Graphs, UntraceableError, build

__all__ = ["Hook", "Owner", "hook_of", "hooks"]


class Owner(NamedTuple):
    """One conversion that a block is part of. ``python``: it is left as Python there."""

    conversion: NetConversion
    python: bool


class Hook:
    """Stands in ``block.forward``, with the conversions that the block is part of.

    The last of them says how the block runs when it is called itself: a conversion's root traces all
    that it contains by its own policy.
    """

    def __init__(self, block: HybridBlock) -> None:
        self.owners: list[Owner] = []
        self._block = block
        self._chosen: bool | None = None

    def __setstate__(self, state: dict) -> None:
        """For copies, whose conversions have yet to learn of their blocks."""
        vars(self).update(state)
        for owner in self.owners:
            owner.conversion.blocks.add(self._block)

    @property
    def conversion(self) -> NetConversion:
        return self.owners[-1].conversion

    @property
    def python(self) -> bool:
        """Whether the block runs as Python: excluded, or around an excluded one."""
        return any(owner.python for owner in self.owners)

    @property
    def graphs(self) -> dict[GraphKey, BuiltGraph]:
        """Those made since the block was last hybridized."""
        return {} if self._was_hybridized() else _mxnet.cached_op(self._block)

    def own(self, owner: Owner) -> None:
        """Make the block part of one more conversion."""
        self.owners.append(owner)
        owner.conversion.blocks.add(self._block)
        _mxnet.take_over(self._block, self, self.call_graph)

    def disown(self, conversion: NetConversion) -> None:
        """Take it out of one; out of the last, the block is left as if it had never been converted."""
        self.owners = [owner for owner in self.owners if owner.conversion is not conversion]
        if self._chosen is not None and not self._was_hybridized():
            _mxnet.set_active(self._block, self._chosen)
        self._chosen = None
        _mxnet.undo_load(self._block)
        _mxnet.give_back(self._block)
        if self.owners:
            _mxnet.take_over(self._block, self, self.call_graph)

    def __call__(self, *args: Any) -> Any:
        """As ``forward`` of the block's class, which is left to do what is no call of a graph."""
        block = self._block
        has_symbol, has_array, contexts, ctx = _mxnet.kinds(args)
        if has_symbol:
            self._check_trace()
        elif self.python:
            self._set_active(False)
        elif _mxnet.children(block) and _mxnet.is_summarized(block):
            pass  # as Python, to show what is inside
        elif _mxnet.overrides_forward(block):
            self._set_active(True)  # should it call HybridBlock's
        elif has_array:
            if len(contexts) > 1:
                raise ValueError(
                    f"{block.name!r} was given arrays on {sorted(map(str, contexts))}: a graph runs on one device"
                )
            with ctx:
                return self.call_graph(*args)
        return _mxnet.forward(block, args)

    def call_graph(self, *args: Any) -> Any:
        """Stands in MXNet's call of the block's graph: the result of the graph that this call needs."""
        block, conversion = self._block, self.conversion
        self._check_backend()
        try:
            flat, structure = _mxnet.flatten(args)
        except ValueError as error:
            raise ValueError(
                f"{block.name!r}: mxmp runs it as a graph, whose inputs are arrays, None, or nested lists of "
                f"them ({error}). Pass an array, or leave the block as Python: "
                f"mxmp.convert(net, exclude=lambda name, block: name == {block.name!r})"
            ) from error
        inputs = [array for array in flat if array is not None]
        _refuse_loader_memory(block, inputs)
        key = GraphKey(autograd.is_training(), repr(structure), device_of(inputs[0].ctx), _mxnet.variant(block))
        if key.training:
            conversion.note_training()
        graphs = self._keep_graphs()
        built = graphs.get(key)
        if built is None or not built.serves(inputs):
            with BUILDING:
                built = graphs.get(key)
                if built is None or not built.serves(inputs):
                    built = graphs[key] = self._build(args, key.device)
        if autograd.is_recording():
            conversion.check_trainer(built.plan, built.asked)
        self._show(built, graphs)
        return built.run(inputs, _mxnet.monitor(block))

    def _show(self, built: BuiltGraph, graphs: Graphs) -> None:
        """Let files be made of this graph, and no longer of one that the block was loaded with."""
        shown = _mxnet.traced(self._block).graph
        if shown is built.traced.graph:
            return
        if shown and all(shown is not each.traced.graph for each in graphs.values()):
            _undo_load(self._block)
        _mxnet.show(self._block, built.traced)

    def _build(self, args: tuple, device: str) -> BuiltGraph:
        _undo_load(self._block)
        try:
            return build(self._block, args, device, self.conversion)
        except UntraceableError as found:
            culprit, reason = found.blocks[-1], found.reason
            raise ValueError(
                f"{culprit.name!r} ({type(culprit).__name__}) cannot be traced, and mxmp runs {self._block.name!r} as "
                "a graph: hybrid_forward gets Symbols there, which have no values, shapes or lengths "
                f"({type(reason).__name__}: {reason}). Write it without them, or leave this block as Python and "
                f"convert around it: mxmp.convert(net, exclude=lambda name, block: name == {culprit.name!r})"
            ) from reason

    def _set_active(self, active: bool) -> None:
        """Whether MXNet's own ``forward`` shall run a graph, whatever ``hybridize`` says; that is remembered."""
        if self._was_hybridized() or _mxnet.is_active(self._block) != active:
            self._chosen = _mxnet.is_active(self._block)
            _mxnet.set_active(self._block, active)
            self._keep_graphs()

    def _keep_graphs(self) -> Graphs:
        """The block's graphs, where MXNet keeps the operator of its one graph: what clears that clears these."""
        if self._was_hybridized():
            with BUILDING:
                if self._was_hybridized():
                    _mxnet.set_cached_op(self._block, Graphs())
        return _mxnet.cached_op(self._block)

    def _was_hybridized(self) -> bool:
        """Whether something cleared the block's graphs, or it has none yet."""
        return not isinstance(_mxnet.cached_op(self._block), Graphs)

    def _check_backend(self) -> None:
        block = self._block
        if _mxnet.backend(block):
            raise ValueError(
                f"{block.name}: hybridize(backend={_mxnet.backend(block)!r}) partitions the FP32 graph, and a "
                "converted net runs its own: drop the backend, or call mxmp.restore(net) first"
            )

    def _check_trace(self) -> None:
        """Inside another block's graph our casts would be lost: say so."""
        outer = None if is_tracing() else _mxnet.block_being_traced()
        if outer is not None and hook_of(outer) is None:
            raise ValueError(
                f"{self._block.name!r} was converted by mxmp and is now part of {outer.name!r}, which was not: "
                f"its casts would be lost. Convert the outermost block: mxmp.convert({outer.name})"
            )


_LOADER_MEMORY = ("cpu_shared", "cpu_pinned")


def _refuse_loader_memory(block: HybridBlock, arrays: list) -> None:
    """A graph wants its inputs where its parameters are, and MXNet's own error does not say how that is done."""
    for array in arrays:
        if array.ctx.device_type in _LOADER_MEMORY and block.collect_params().keys():
            raise ValueError(
                f"{block.name}: the batch is in {array.ctx}, where a DataLoader with workers or pin_memory leaves it, "
                "and a converted net runs as a graph, which like any hybridized net takes inputs from its own device "
                "only: call x.as_in_context(mx.cpu()), or gluon.utils.split_and_load(x, contexts)"
            )


def _undo_load(block: HybridBlock) -> None:
    for each in blocks_of(block):
        _mxnet.undo_load(each)


def hook_of(block: Block) -> Hook | None:
    """The block's hook, None where it is not converted."""
    found = vars(block).get("forward")
    return found if isinstance(found, Hook) else None


def hooks(net: Block) -> Iterator[tuple[HybridBlock, Hook]]:
    """The converted blocks of the tree, outermost first."""
    for block in hybrid_blocks(net):
        hook = hook_of(block)
        if hook is not None:
            yield block, hook

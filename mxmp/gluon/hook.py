"""The forward pre-hook of one block: keeps the dispatcher in place that runs the right low-precision graph.

The FP32 graph stays beside it, so exports and checkpoints stay FP32.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, Iterator, NamedTuple

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block, HybridBlock
from mxnet.ndarray import NDArray

from ..precision.devices import device_of
from . import _mxnet, dispatch
from .conversion import BUILDING, Conversion, is_tracing
from .graphs import BuiltGraph, GraphKey, UntraceableError, build

__all__ = ["Hook", "Owner", "blocks_of", "hook_of", "hooks", "hybrid_blocks"]


class Owner(NamedTuple):
    """One conversion that a block is part of. ``python``: it is left as Python there."""

    conversion: Conversion
    is_root: bool
    python: bool


class Hook:
    """What mxmp keeps of one block: the conversions that it is part of, the last of which says how it runs.

    A conversion's root traces all that it contains by its own policy, so this is about calls of the
    block itself.
    """

    quiet = True  # for _mxnet.add_hook

    def __init__(self, block: HybridBlock) -> None:
        self.owners: list[Owner] = []
        self._formats = _mxnet.formats(block)
        self._dispatcher: dispatch.Dispatcher | None = None
        self._failed = False

    @property
    def conversion(self) -> Conversion:
        return self.owners[-1].conversion

    @property
    def python(self) -> bool:
        """Whether the block runs as Python: excluded, or around an excluded one."""
        return self._failed or any(owner.python for owner in self.owners)

    @property
    def graphs(self) -> dict[GraphKey, BuiltGraph]:
        return {} if self._dispatcher is None else self._dispatcher.graphs

    def __call__(self, block: HybridBlock, args: tuple) -> None:
        if any(not isinstance(a, NDArray) for a in args):
            try:
                flat = _mxnet.flatten(args)[0]
            except ValueError as error:
                if self.python or _mxnet.runs_python(block):
                    return
                raise ValueError(
                    f"{block.name!r}: mxmp runs it as a graph, whose inputs are arrays, None, or nested lists of "
                    f"them ({error}). Pass an array, or leave the block as Python: "
                    f"mxmp.convert(net, exclude=lambda name, block: name == {block.name!r})"
                ) from error
            if any(isinstance(a, mx.sym.Symbol) for a in flat):
                self._check_trace(block)
                return
        self.follow(block)
        if _mxnet.backend(block):
            raise ValueError(
                f"{block.name}: hybridize(backend={_mxnet.backend(block)!r}) partitions the FP32 graph, and a "
                "converted net runs its own: drop the backend, or call mxmp.restore(net) first"
            )

    def own(self, block: HybridBlock, owner: Owner) -> None:
        """Make the block part of one more conversion."""
        self.owners.append(owner)
        owner.conversion.blocks.add(block)
        self._dispatcher = None
        self.follow(block)

    def disown(self, block: HybridBlock, conversion: Conversion) -> None:
        """Take it out of one; out of the last, the block is left as if it had never been converted."""
        self.owners = [owner for owner in self.owners if owner.conversion is not conversion]
        self._dispatcher, self._failed = None, False
        if self.owners:
            self.follow(block)
            return
        _mxnet.remove_hook(block, self)
        active = _mxnet.is_active(block)
        _mxnet.set_active(block, active.chosen if isinstance(active, dispatch.Active) else active)
        _mxnet.set_formats(block, self._formats)
        _mxnet.forget_graph(block)

    def follow(self, block: HybridBlock) -> None:
        """Be in place again after what clears a block's graph: ``hybridize``, ``cast``, a new child."""
        active, found = _mxnet.is_active(block), self._dispatcher
        ours = isinstance(active, dispatch.Active)
        if ours and (self.python or (_mxnet.stands(block, found) and found.flags == _mxnet.flags(block))):
            return
        with BUILDING:
            chosen = active.chosen if ours else bool(active)
            if not self.python:
                self._dispatcher = dispatch.Dispatcher(partial(self._find, block), _mxnet.flags(block))
                _mxnet.stand_in(block, self._dispatcher, dispatch.op_args([]))
                inputs, outputs = self._formats
                _mxnet.set_formats(block, (dispatch.in_format(inputs), dispatch.out_format(outputs)))
            _mxnet.set_active(block, dispatch.Active(not self.python, chosen))

    def _find(self, block: HybridBlock, dispatcher: dispatch.Dispatcher, inputs: list, structure: Any) -> Any:
        """The block's result, of the graph for this call."""
        active = _mxnet.is_active(block)
        if getattr(active, "asked_by", None) == threading.get_ident():
            if _mxnet.is_summarized(block):
                return _mxnet.run_as_python(_mxnet.copied(block), _mxnet.nested(inputs, structure))
            active.asked_by = None
        key = GraphKey(autograd.is_training(), repr(structure), device_of(inputs[0].ctx), _mxnet.variant(block))
        built = dispatcher.graphs.get(key)
        if built is None:
            args = _mxnet.nested(inputs, structure)
            try:
                with BUILDING:
                    built = dispatcher.graphs.get(key) or self._build(block, args, key.device)
                    dispatcher.graphs[key] = built
            except UntraceableError as found:
                self._leave_as_python(found)
                return _mxnet.run_as_python(_mxnet.copied(block), args)
        if dispatcher.shown is not built:
            self._show(block, dispatcher, built)
        if dispatcher.monitor is not None:
            built.op.monitor(*dispatcher.monitor)
        return built.run(inputs)

    def _build(self, block: HybridBlock, args: tuple, device: str) -> BuiltGraph:
        is_root = any(owner.is_root for owner in self.owners if owner.conversion is self.conversion)
        return build(block, args, device, self.conversion, is_root=is_root)

    def _show(self, block: HybridBlock, dispatcher: dispatch.Dispatcher, built: BuiltGraph) -> None:
        """Leave the FP32 graph of the last call to ``export`` and ``save``; calls do not look at it."""
        dispatcher.shown, traced = built, built.traced
        params = [param for is_data, param in traced.op_args if not is_data]
        _mxnet.stand_in(block, dispatcher, dispatch.op_args(params), traced.graph)
        _mxnet.set_formats(block, (dispatch.in_format(traced.in_format), dispatch.out_format(traced.out_format)))

    def _leave_as_python(self, found: UntraceableError) -> None:
        """An excluded block that cannot be traced, and what is around it, run as Python from now on.

        Raises
        ------
        ValueError
            None of them is excluded; names the block that failed.
        """
        blocks, reason = found.blocks, found.reason
        if not any(self.conversion.excludes(block.name) for block in blocks):
            culprit = blocks[-1]
            raise ValueError(
                f"{culprit.name!r} ({type(culprit).__name__}) cannot be traced, and mxmp runs {blocks[0].name!r} as a "
                "graph: hybrid_forward gets Symbols there, which have no values, shapes or lengths "
                f"({type(reason).__name__}: {reason}). Write it without them, or leave this block as Python and "
                f"convert around it: mxmp.convert(net, exclude=[{culprit.name!r}])"
            ) from reason
        for block in blocks:
            hook = hook_of(block)
            if hook is not None:
                hook._failed, hook._dispatcher = True, None
                _mxnet.set_active(block, dispatch.Active(False, bool(getattr(_mxnet.is_active(block), "chosen", 0))))
                _mxnet.forget_graph(block)

    def _check_trace(self, block: HybridBlock) -> None:
        """Inside another block's graph our casts would be lost: say so."""
        outer = None if is_tracing() else _mxnet.block_being_traced()
        if outer is None:
            return
        if hook_of(outer) is not None:
            raise ValueError(
                f"{outer.name!r} was converted by mxmp and something cleared its graph; call net(x), not net.forward(x)"
            )
        raise ValueError(
            f"{block.name!r} was converted by mxmp and is now part of {outer.name!r}, which was not: "
            f"its casts would be lost. Convert the outermost block: mxmp.convert({outer.name})"
        )


def hook_of(block: Block) -> Hook | None:
    """The block's hook, None where it is not converted."""
    return next((hook for hook in _mxnet.hooks(block) if isinstance(hook, Hook)), None)


def hooks(net: Block) -> Iterator[tuple[HybridBlock, Hook]]:
    """The converted blocks of a tree with their hooks, outermost first."""
    for block in hybrid_blocks(net):
        hook = hook_of(block)
        if hook is not None:
            yield block, hook


def hybrid_blocks(net: Block) -> list[HybridBlock]:
    """Every HybridBlock of the tree once, outermost first."""
    return [block for block in blocks_of(net) if isinstance(block, HybridBlock)]


def blocks_of(net: Block) -> list[Block]:
    """Every block of the tree once, outermost first."""
    found: dict[int, Block] = {}
    stack: list[Block] = [net]
    while stack:
        block = stack.pop()
        found.setdefault(id(block), block)
        stack.extend(reversed(_mxnet.children(block)))
    return list(found.values())

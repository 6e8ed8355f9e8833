"""The hook that runs the right low-precision graph for each call of a block, and how hooks get onto a net and off it.

The graph is found from the call, and nothing of the call is kept on the block; so calls from several threads, and calls
inside calls, do not disturb each other. The FP32 graph is stored on the block, so exports and checkpoints stay FP32.
"""

from __future__ import annotations

import gc
import threading
from contextlib import contextmanager
from typing import Any, Callable, Collection, Iterator, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import Block, HybridBlock, Parameter

from ..kernels.fit import device_of
from ..messages.refusals import inputs_explained
from . import _mxnet
from .blocks import Division, blocks_of, hybrid_blocks
from .conversion import NetConversion
from .graphs import BUILDING, BuiltGraph, Graphs, UntraceableError, build, call_on_symbols
from .nesting import Constants, key_of, split
from .parameter import conversions_of, replace_conversions
from .tracing import is_tracing

# The attribute of a block for which ``convert`` was called: its NetConversion. A copy of the block has a copy of it.
_CALLED = "mxmp_conversion"


class _StandIn(threading.local):
    run: Callable[[HybridBlock, Hook, tuple], Any] | None = None


# Global: what runs in place of the graphs that this thread calls, of whatever net, while ``audit`` replays a batch.
_stand_in = _StandIn()


@contextmanager
def standing_in(run: Callable[[HybridBlock, Hook, tuple], Any]) -> Iterator[None]:
    """Run ``run(block, hook, args)`` in place of each graph of a converted net that this thread calls."""
    before, _stand_in.run = _stand_in.run, run
    try:
        yield
    finally:
        _stand_in.run = before


class Hook:
    """Runs a converted HybridBlock: it is set as ``block.forward``. A new one replaces it when the conversions change.
    ``conversions`` maps each conversion that the block is part of, oldest first, to True if it excludes the block or a
    block inside it; one True makes it run as Python code in all."""

    def __init__(self, block: HybridBlock, conversions: Mapping[NetConversion, bool]) -> None:
        self.conversions = conversions
        self._block = block
        # What ``hybridize`` chose before this hook changed it, and the flags of that call, a new list in each.
        self._chosen: tuple[bool, list] | None = None
        self._join_conversions()

    def __setstate__(self, state: dict) -> None:
        """Restore the hook of a copied block; the copies of its conversions have no ``blocks`` at first."""
        vars(self).update(state)
        self._join_conversions()

    def _join_conversions(self) -> None:
        for conversion in self.conversions:
            conversion.blocks.add(self._block)

    @property
    def conversion(self) -> NetConversion:
        """Return the newest conversion, which decides the dtypes when Python code calls the block."""
        return list(self.conversions)[-1]

    @property
    def runs_as_python(self) -> bool:
        return any(self.conversions.values())

    @property
    def graphs(self) -> Graphs:
        """Return the graphs built since the last ``hybridize``, ``cast`` or new child."""
        if not isinstance(_mxnet.cached_op(self._block), Graphs):
            with BUILDING:
                if not isinstance(_mxnet.cached_op(self._block), Graphs):
                    # Where MXNet keeps a CachedOp: ``hybridize``, ``cast`` and a new child then delete these graphs.
                    _mxnet.set_cached_op(self._block, Graphs(self._block, self.conversion.policy.compute))
        return _mxnet.cached_op(self._block)

    def undo(self) -> None:
        """Make the block run by its class's ``forward`` again, as ``hybridize`` requested last; delete its graphs."""
        if self._chosen is not None and self._chosen[1] is _mxnet.flags(self._block):
            _mxnet.set_active(self._block, self._chosen[0])
        _mxnet.undo_load(self._block)
        _mxnet.restore_calls(self._block)

    def __call__(self, *args: Any) -> Any:
        """Run the block on arrays, through ``call_graph``, or on Symbols; replaces ``block.forward``."""
        block = self._block
        has_symbol, has_array, contexts, ctx = _mxnet.kinds(args)
        if has_symbol:
            self._refuse_unconverted_trace()
            return call_on_symbols(block, args)
        if self.runs_as_python:
            self._set_active(False)
        elif _mxnet.children(block) and _mxnet.is_summarized(block):
            pass  # runs as Python, so that ``summary`` sees each child
        elif _mxnet.overrides_forward(block):
            self._set_active(True)  # HybridBlock.forward, if that forward calls it, shall run a graph
        elif has_array:
            if len(contexts) > 1:
                from ..messages.converted import no_two_devices

                raise no_two_devices(block.name, contexts)
            with ctx:
                return self.call_graph(*args)
        elif any(isinstance(each, np.ndarray) for each in args):
            raise TypeError(f"{block.name!r} was called with a NumPy array: call it with mx.nd.array(x)")
        return _mxnet.forward(block, args)

    def hybridize(self, active: bool = True, *args: Any, **kwargs: Any) -> None:
        backend = kwargs.get("backend", next(iter(args), None))
        if backend:
            from ..messages.converted import no_backend

            raise no_backend(self._block.name, backend)
        type(self._block).hybridize(self._block, active, *args, **kwargs)

    def cast(self, dtype: Any) -> None:
        try:
            name = np.dtype(dtype).name
        except TypeError:  # "bfloat16"
            name = dtype
        if name not in ("float32", "float64"):
            from ..messages.converted import no_cast  # what is said is loaded where it is needed

            raise no_cast(self._block.name, name)
        type(self._block).cast(self._block, dtype)

    def optimize_for(self, *args: Any, backend: str | None = None, **kwargs: Any) -> None:
        from ..messages.converted import no_partition

        raise no_partition(self._block.name, backend)

    def call_graph(self, *args: Any) -> Any:
        """Build the graph for this kind of call if it is missing, run it on ``args``, and return its output.
        Replaces ``_call_cached_op``, which ``HybridBlock.forward`` calls in a hybridized block."""
        block, conversion = self._block, self.conversion
        if _stand_in.run is not None:
            return _stand_in.run(block, self, args)
        if _mxnet.backend(block):
            from ..messages.converted import no_backend

            raise no_backend(block.name, _mxnet.backend(block))
        try:
            args, constants = split(args)
        except ValueError as error:
            from ..messages.inputs import no_inputs_of_graphs  # what is said is loaded where it is needed

            raise no_inputs_of_graphs(block.name, error) from error
        flat, structure = _mxnet.flatten(args)
        inputs = [array for array in flat if array is not None]
        contexts = [array.ctx for array in inputs]
        _check_memory(block, contexts)
        if autograd.is_training():
            conversion.note_training_forward()
        graphs, call = self.graphs, (repr(structure), device_of(contexts[0]), key_of(constants), inputs)
        built = graphs.find(*call)
        if built is None:
            with BUILDING:
                built = graphs.find(*call)
                if built is None:
                    with inputs_explained(inputs):
                        built = self._add(call, args, constants)
        conversion.warn_of_unscaled_training(built.plan, built.requested)
        self._set_exported(built, graphs)
        with inputs_explained(inputs):
            try:
                return built.run(inputs, _mxnet.monitor(block))
            except mx.MXNetError as error:
                from ..messages.inputs import unequal  # shapes of another call, of which some did not differ

                if unequal(str(error)) is None:
                    raise
            with BUILDING:
                built = self._add(call, args, constants)
            return built.run(inputs, _mxnet.monitor(block))

    def _set_exported(self, built: BuiltGraph, graphs: Graphs) -> None:
        """Store the FP32 graph of ``built`` on the block, so that ``export`` writes the graph that was called last."""
        # A graph that mxmp did not build was stored by MXNet's ``load(prefix)``, which also renames blocks and keys.
        shown = _mxnet.traced_graph(self._block)
        # A SymbolBlock has its graph before any call, and ``op_args``, with the Parameters to export, only after one.
        if shown.graph is built.traced.graph and shown.op_args is built.traced.op_args:
            return
        if shown.graph and all(shown.graph is not each.traced.graph for each in list(graphs.values())):
            _undo_load(self._block)
        _mxnet.set_traced_graph(self._block, built.traced)

    def _add(self, call: tuple, args: tuple, constants: Constants) -> BuiltGraph:
        """Build the graph of a call and store it for ``Graphs.find(*call)``; the caller holds ``BUILDING``."""
        built = self._build(args, constants)
        self.graphs.add(built, *call)
        return built

    def _build(self, args: tuple, constants: Constants) -> BuiltGraph:
        """Trace the block and return its graph; the error of a block that cannot be traced names it."""
        _undo_load(self._block)
        _adopt_children(self._block, self.conversions)
        try:
            return build(self._block, args, constants, self.conversion)
        except UntraceableError as found:
            from .untraceable import error_of  # what is said is loaded where it is needed

            is_whole = _CALLED in vars(self._block)
            raise error_of(self._block, args, *found.args, is_whole=is_whole) from found.args[1]

    def _set_active(self, active: bool) -> None:
        """Set whether ``HybridBlock.forward`` runs a graph; remember for ``undo`` what ``hybridize`` chose."""
        flags = _mxnet.flags(self._block)
        if self._chosen is None or self._chosen[1] is not flags:
            self._chosen = _mxnet.is_active(self._block), flags
        _mxnet.set_active(self._block, active)

    def _refuse_unconverted_trace(self) -> None:
        """Raise ``ValueError`` if MXNet traces an unconverted block around this one, which would lose the casts."""
        outer = None if is_tracing() else _mxnet.block_being_traced()
        if outer is not None and hook_of(outer) is None and not self._has_nothing_to_lose():
            from ..messages.converted import no_part_of

            raise no_part_of(outer.name, self._block.name)

    def _has_nothing_to_lose(self) -> bool:
        """Return whether the block came with a net that was converted, and has no parameters: FP32 nets may have it."""
        # GluonNLP's MLPAttentionCell(act=nn.Activation("tanh")): a default argument is one block in all nets.
        is_root = any(conversion.starts_at(self._block) for conversion in self.conversions)
        return not is_root and not self._block.collect_params().keys()


def _check_memory(block: HybridBlock, contexts: list[mx.Context]) -> None:
    """Raise ``ValueError`` if ``block`` has parameters and an input is in shared or pinned memory."""
    # A DataLoader with workers or ``pin_memory`` leaves batches there; MXNet's own error does not say what to do.
    for ctx in contexts:
        if ctx.device_type in ("cpu_shared", "cpu_pinned") and block.collect_params().keys():
            from ..messages.converted import no_such_memory

            raise no_such_memory(block.name, ctx)


def _undo_load(block: HybridBlock) -> None:
    """Undo the renaming by MXNet's ``load(prefix)`` in ``block`` and all blocks inside it."""
    for each in blocks_of(block):
        _mxnet.undo_load(each)


def hook_of(block: Block) -> Hook | None:
    """Return the block's hook; None if the block is not converted."""
    found = vars(block).get("forward")
    return found if isinstance(found, Hook) else None


def hooks(net: Block) -> Iterator[tuple[HybridBlock, Hook]]:
    """Yield ``(block, hook)`` for ``net`` and each block inside that has a hook, outermost first.
    Blocks that run as Python code have one, but those inside an excluded block have none."""
    for block in hybrid_blocks(net):
        hook = hook_of(block)
        if hook is not None:
            yield block, hook


# -- onto a net and off it --------------------------------------------------------------------------


def conversions_in(blocks: Sequence[Block]) -> tuple[list[NetConversion], list[NetConversion]]:
    """Return the conversions of ``blocks``, all blocks of a net: those that ``restore(net)`` undoes, and the rest.
    The rest are of other nets, and also convert blocks outside."""
    inside = set(map(id, blocks))
    called = [vars(block)[_CALLED] for block in blocks if _CALLED in vars(block)]
    converting = [conversion for hook in filter(None, map(hook_of, blocks)) for conversion in hook.conversions]
    found = dict.fromkeys([*called, *converting])
    if not found.keys() <= {*called}:
        gc.collect()  # blocks refer to themselves, so a net that was deleted counts until Python collects such cycles
    complete = [c for c in found if c in called or inside.issuperset(map(id, c.blocks))]
    return complete, [c for c in found if c not in complete]


def install(division: Division, conversion: NetConversion) -> None:
    """Put hooks of a new conversion on a net, and end those that ``restore(net)`` would undo.
    Nothing changes if the net has just one conversion already, with the same policy or plan and the same division."""
    runs_as_python = {id(block): False for block in division.graphs}
    runs_as_python.update((id(block), True) for block in division.python if isinstance(block, HybridBlock))
    complete, partial = conversions_in(division.blocks)
    installed = {id(block): hook.runs_as_python for block in division.blocks for hook in [hook_of(block)] if hook}
    if [each.how for each in complete] == [conversion.how] and not partial and installed == runs_as_python:
        return
    own = set(division.blocks[0].collect_params().values())
    _replace(
        *(division.blocks, complete),
        lambda block: {conversion: runs_as_python[id(block)]} if id(block) in runs_as_python else {},
        lambda param: [conversion] if param in own else [],
    )
    _set_called(division.blocks, conversion)


def remove(blocks: Sequence[Block], conversions: Collection[NetConversion]) -> None:
    """End ``conversions``, the first list of ``conversions_in(blocks)``; the first of ``blocks`` is the net."""
    _replace(blocks, conversions, lambda block: {}, lambda param: [])
    _set_called(blocks, None)


def exclude_more(net: Block, nodes: Collection[str]) -> None:
    """Keep ``nodes`` in FP32 too, in each conversion that ``restore(net)`` would undo; call it between two steps.
    Parameters keep their values; the gradients of those that were stored in float16 become zero."""
    blocks = blocks_of(net)
    complete, _ = conversions_in(blocks)
    for conversion in complete:
        conversion.exclude(nodes)

    def hooked(block: HybridBlock) -> Mapping[NetConversion, bool]:
        hook = hook_of(block)
        return {c: python for c, python in hook.conversions.items() if c in complete} if hook else {}

    _replace(blocks, complete, hooked, lambda param: [c for c in conversions_of([param]) if c in complete])


def _replace(
    blocks: Sequence[Block],
    old: Collection[NetConversion],
    hooked: Callable[[HybridBlock], Mapping[NetConversion, bool]],
    listed: Callable[[Parameter], Collection[NetConversion]],
) -> None:
    """Take a net's blocks and Parameters out of the conversions ``old`` and put them into those of the two functions.
    ``hooked(block)`` also says which run the block as Python code. Blocks that were replaced since are changed too."""
    changed = {id(b): b for b in [*blocks, *(b for c in old for b in c.blocks)] if isinstance(b, HybridBlock)}
    for block in changed.values():
        _change_block(block, old, hooked(block))
    dicts = [blocks[0].collect_params(), *(block.params for block in changed.values())]
    replace_conversions(old, {param: listed(param) for each in dicts for param in each.values()})


def _adopt_children(block: HybridBlock, conversions: Mapping[NetConversion, bool]) -> None:
    """Put blocks that the user has added inside a block that runs as a graph since ``convert`` into its conversions."""
    for each in hybrid_blocks(block):
        if hook_of(each) is None:
            _change_block(each, [], conversions)
            replace_conversions([], {param: [*conversions] for param in each.params.values()})


def _set_called(blocks: Sequence[Block], conversion: NetConversion | None) -> None:
    """Record on the net ``blocks[0]`` that ``convert`` was called with it; delete the other blocks' records."""
    for block in blocks:
        vars(block).pop(_CALLED, None)
    if conversion is not None:
        vars(blocks[0])[_CALLED] = conversion


def _change_block(block: HybridBlock, old: Collection[NetConversion], new: Mapping[NetConversion, bool]) -> None:
    """Take ``block`` out of ``old`` and put it into ``new``, with a new hook or none, and without its graphs."""
    before = hook_of(block)
    had = before.conversions if before is not None else {}
    after = Hook(block, {**{c: python for c, python in had.items() if c not in old}, **new})
    if after.conversions.keys() == had.keys() and not new:
        return
    for conversion in had.keys() - after.conversions.keys():
        conversion.blocks.discard(block)
    if before is not None:
        before.undo()
    if after.conversions:
        methods = ("hybridize", "cast", "optimize_for")
        _mxnet.redirect_calls(block, after, after.call_graph, **{name: getattr(after, name) for name in methods})

"""What a graph remembers of Python: what the trace has read, compared at each call, and what it has left behind.

The code of a block runs in the trace alone. What it reads then (attributes, children, globals) must be the same in each
call of the graph; what it writes, such as a second result in an attribute, is written again after each call.
"""

from __future__ import annotations

import random
import threading
from contextlib import contextmanager
from functools import partial
from itertools import chain
from types import FunctionType
from typing import AbstractSet, Any, Callable, Iterator, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Block

from ..messages.callers import warn_user
from . import _mxnet
from .changes import Before, has_symbol
from .nesting import Nesting, nesting_of
from .reachable import CALLED, Reachable, of_classes
from .reads import MISSING, Reads, is_of_library, of_class, state_of

# Global: the trace that runs on this thread, if any, for the blocks that note what is read of them.
_local = threading.local()
# Names by which code reads the values of arrays, as no Symbol lets it.
_VALUES = {"asscalar", "asnumpy"}
_NO_ARRAY = "within F.contrib.foreach, while_loop or cond a graph has no array for it"


class Trace:
    """One run of a block's code on Symbols: what it reads and writes, and what hooks of blocks inside would get."""

    def __init__(self, block: Block, clone: Block, inside: Sequence[Block]) -> None:
        self.reads = Reads()
        self._block, self._clone = block, clone
        self._inside = [each for each in inside if each is not block]
        # By id and name: the block, the name, and what the block had before the first write.
        self._written: dict[tuple[int, str], tuple[Block, str, Any]] = {}
        self._before = Before()
        self._hooked: list[tuple[str, Block, tuple]] = []
        self._paused = False
        classes = dict.fromkeys(chain.from_iterable(type(each).__mro__ for each in (block, *inside)))
        self._reachable = Reachable(classes, self._note)
        for each in (self._block, *self._inside):
            self._reachable.reach(*of_classes(type(each), CALLED))

    # -- what blocks say in ``_noted`` --

    def note_read(self, block: Block, name: str) -> None:
        if self._paused or name in _mxnet.BOOKKEEPING or name.startswith("__") or (id(block), name) in self._written:
            return
        if name in _mxnet.HOOKS and block is self._clone:
            return  # they get arrays
        value = vars(block).get(name)
        self._reachable.reach(value)
        if name not in vars(block):
            found = of_class(block, name)
            self._reachable.reach(*of_classes(type(block), [name]))
            # The code of a method or property is noted itself. One of the user's may be replaced on the instance.
            if hasattr(type(found), "__get__") and (not isinstance(found, FunctionType) or is_of_library(found)):
                return
        self._note(block, name)

    def _note(self, owner: Any, name: str) -> None:
        if isinstance(owner, Block):
            self._before.keep(vars(owner).get(name))
        else:
            self._before.keep_name(owner, name)
        self.reads.note(owner, name)

    def note_write(self, block: Block, name: str) -> None:
        if not self._paused and name not in _mxnet.BOOKKEEPING:
            self._written.setdefault((id(block), name), (block, name, vars(block).get(name, MISSING)))

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    # -- running it --

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what the code reads and writes in the ``with`` block; afterwards all blocks have what they had."""
        hooks = [(each, name, vars(each)[name]) for each in self._inside for name in _mxnet.HOOKS if vars(each)[name]]
        outer, _local.trace = getattr(_local, "trace", None), self
        generators = (random, np.random)
        states = [*map(state_of, generators)]
        for each in generators:
            self._before.keep(each)
        try:
            for each, name, _ in hooks:
                # ``__call__`` reads these; the user's hooks run on arrays, after each call.
                vars(each)[name] = {0: partial(self._note_hook, name)}
            with _noted([self._clone, *self._inside]):
                yield
        finally:
            _local.trace = outer
            for each, name, before in hooks:
                vars(each)[name] = before
            if [*map(state_of, generators)] != states:
                self.reads.always_anew = "draws random numbers in Python (random, numpy.random)"
            elif _VALUES & self._reachable.names():
                self.reads.always_anew = "reads the values of arrays (asscalar, asnumpy)"

    def _note_hook(self, name: str, block: Block, *given: Any) -> None:
        self._hooked.append((name, block, given))

    def left(self, args: tuple) -> Left:
        """Return what the code, which got ``args``, has left behind; the blocks keep what they had before. Raises
        ``ValueError`` if a Symbol was put into a list or dict that was there before, or if a hook gets one of the body
        of a ``foreach``, ``while_loop`` or ``cond``."""
        arrays: list[mx.sym.Symbol] = []
        writes: list[tuple[Block, str, Nesting]] = []
        for block, name, before in self._written.values():
            value = vars(block).pop(name, MISSING)
            if before is not MISSING:
                vars(block)[name] = before
            kept = len(arrays)
            nesting = _nesting(value, arrays)
            if self._are_inner(arrays[kept:], args):
                del arrays[kept:]
                _warn_of_inner(block, name)
            elif value is not MISSING:
                writes.append((self._block if block is self._clone else block, name, nesting))
        calls = []
        for name, block, given in self._hooked:
            kept = len(arrays)
            calls.append((name, block, _nesting(given, arrays)))
            if self._are_inner(arrays[kept:], args):
                raise ValueError(f"take off the forward hook of {block.name!r}: {_NO_ARRAY}")
        self.reads.replace(self._clone, self._block)
        for name, value in self.reads.differences():
            _refuse_symbols(name, value)
            self.reads.always_anew = f"changes {name!r} in place"
        return Left(arrays, writes, calls)

    def _are_inner(self, symbols: Sequence[mx.sym.Symbol], args: tuple) -> bool:
        """Return whether some read a variable that is neither in ``args`` nor a parameter: one of a loop's body."""
        if not symbols:
            return False
        inputs: list[mx.sym.Symbol] = []
        nesting_of(list(args), inputs)
        known = {*self._block.collect_params(), *chain.from_iterable(each.list_inputs() for each in inputs)}
        return not all(known.issuperset(each.list_inputs()) for each in symbols)

    def undo(self) -> None:
        """Give all blocks back what the code of a failed trace has written."""
        for block, name, before in self._written.values():
            vars(block).pop(name, None) if before is MISSING else vars(block).update({name: before})
        self.undo_changes()

    def undo_changes(self) -> None:
        """Undo what the code has changed in place, and give random numbers of Python the state that they had."""
        self._before.restore()


class Left:
    """What a trace has left behind besides its result."""

    # No tuple, in which MXNet's ``collect_params`` would find the blocks.
    def __init__(
        self,
        arrays: list[mx.sym.Symbol],
        writes: list[tuple[Block, str, Nesting]],
        calls: list[tuple[str, Block, Nesting]],
    ) -> None:
        # Symbols, further outputs of the graph.
        self.arrays = arrays
        # Attributes that the code has set: the block, the name, and how the value is nested.
        self._writes = writes
        # Calls of forward hooks of blocks inside: an attribute of ``_mxnet.HOOKS``, the block, and what they get.
        self._calls = calls
        self.nestings = [*[nesting for _, _, nesting in writes], *[nesting for _, _, nesting in calls]]

    @property
    def outputs(self) -> int:
        """Return how many outputs of the graph ``arrays`` are."""
        return sum(len(each.list_outputs()) for each in self.arrays)

    def repeat(self, values: Sequence[Any]) -> None:
        """Set the attributes and run the hooks with what this call gives, in the order of ``nestings``."""
        for (block, name, _), value in zip(self._writes, values):
            vars(block)[name] = value
        for (name, block, _), given in zip(self._calls, values[len(self._writes) :]):
            args = tuple(given[0]) if isinstance(given[0], list) else given[0]
            for hook in list(vars(block)[name].values()):
                hook(block, args, *given[1:])


def _refuse_symbols(name: str, value: Any) -> None:
    if has_symbol(value):
        raise ValueError(
            f"it puts a result into {name!r}, which would hold a Symbol after the call: assign it to an attribute of "
            "the block in each call, self.aux = ..., or return it as an output"
        )


def _warn_of_inner(block: Block, name: str) -> None:
    if not is_of_library(type(block)):  # as MXNet's VariationalDropoutCell, for itself
        stays = f"it stays as it was, {getattr(block, name, None)!r}. Return it as a state or an output"
        warn_user(f"{name!r} of {block.name!r} is set in the body of a loop, and {_NO_ARRAY}: {stays}")


def apart(more: Sequence[mx.sym.Symbol], outputs: Sequence[mx.sym.Symbol]) -> Iterator[mx.sym.Symbol]:
    """Yield ``more`` Symbols as outputs beside ``outputs``: copies of those that are outputs already."""
    seen = {tuple(each.list_outputs()) for each in outputs}
    for each in more:
        name = tuple(each.list_outputs())
        if name in seen:
            each = _mxnet.copy_of(each)
        seen.add(name)
        yield each


def _nesting(value: Any, arrays: list) -> Nesting:
    """Return ``nesting_of`` a value; one that it does not know is passed on as it is."""
    kept = len(arrays)
    try:
        return nesting_of(value, arrays)
    except ValueError:
        del arrays[kept:]
        return Nesting(None, value)


@contextmanager
def _noted(blocks: Sequence[Block]) -> Iterator[None]:
    """Tell the thread's trace what code reads and writes of these blocks in the ``with`` block.
    Their classes stay theirs, as code may compare them, and get other methods as long."""
    watched, kinds = set(map(id, blocks)), set(map(type, blocks))
    names = ("__getattribute__", "__setattr__")
    # All of them before any is replaced: a class inherits from another.
    methods = {kind: [getattr(kind, name) for name in names] for kind in kinds}
    own = {kind: [vars(kind).get(name) for name in names] for kind in kinds}
    try:
        for kind, replaced in methods.items():
            for name, noting in zip(names, _noting(watched, *replaced)):
                setattr(kind, name, noting)
        yield
    finally:
        for kind, before in own.items():
            for name, method in zip(names, before):
                if method is not None:
                    setattr(kind, name, method)
                elif name in vars(kind):
                    delattr(kind, name)


def _noting(watched: AbstractSet[int], read: Callable, write: Callable) -> tuple[Callable, Callable]:
    def get(self: Any, name: str) -> Any:
        trace = getattr(_local, "trace", None)
        if trace is not None and id(self) in watched:
            trace.note_read(self, name)
        return read(self, name)

    def set_(self: Any, name: str, value: Any) -> None:
        trace = getattr(_local, "trace", None)
        if trace is None or id(self) not in watched:
            write(self, name, value)
            return
        trace.note_write(self, name)
        with trace.paused():  # Block.__setattr__ reads what it replaces
            write(self, name, value)

    return get, set_

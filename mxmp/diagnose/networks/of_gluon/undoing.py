"""Calls of nets and losses that leave no trace in Python."""

from __future__ import annotations

import random
from contextlib import contextmanager
from itertools import chain
from typing import Any, Iterator

import numpy as np
from mxnet.gluon import Block

from ....gluon import _mxnet
from ....gluon.blocks import blocks_of
from ....gluon.changes import Before
from ....gluon.reachable import CALLED, Reachable, of_classes
from ....gluon.reads import names_in
from ..protocol import unchanged


@contextmanager
def without_trace(*called: Any) -> Iterator[None]:
    """As ``undone``; also restore running statistics and frozen Parameters of the nets."""
    params = [param for net in called if isinstance(net, Block) for param in net.collect_params().values()]
    frozen = [param for param in params if param.grad_req == "null" and _mxnet.is_initialized(param)]
    with undone(*called), unchanged([], [array for param in frozen for array in _mxnet.arrays(param)]):
        yield


@contextmanager
def undone(*called: Any) -> Iterator[None]:
    """Undo, when the ``with`` block ends, what the code of these nets and functions has changed of Python in it, as far
    as a trace sees what code reads, and in arrays that are no Parameters; and draws of Python's and NumPy's numbers."""
    before, blocks = Before(arrays=True), {}

    def add(value: Any) -> None:
        new = [each for each in blocks_of(value) if id(each) not in blocks] if isinstance(value, Block) else []
        held = [{k: v for k, v in vars(each).items() if k not in _mxnet.BOOKKEEPING} for each in new]
        blocks.update({id(block): (block, own) for block, own in zip(new, held)})
        values = [value, *(v for own in held for k, v in own.items() if k not in _mxnet.HOOKS)]
        for each in values:
            before.keep(each)
        code = [each for block in new for each in of_classes(type(block), CALLED)]
        classes = dict.fromkeys(chain.from_iterable(type(block).__mro__ for block in new))
        Reachable(classes, note).reach(*code, *values)

    def note(owner: Any, name: str) -> None:
        before.keep_name(owner, name)
        if isinstance(names_in(owner).get(name), Block):
            add(names_in(owner)[name])

    for each in (random, np.random, *called):
        add(each)
    try:
        yield
    finally:
        for block, own in blocks.values():
            for name in vars(block).keys() - _mxnet.BOOKKEEPING - own.keys():
                del vars(block)[name]
            vars(block).update(own)
        before.restore()

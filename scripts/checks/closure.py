"""Counts the lines of code that a training through mxmp loads: what is to be read to know all that it runs.

A line counts unless it is blank, a comment or a docstring. Loaded is what ``convert``, ``Trainer``, ``Module`` and
``cast_symbol`` import, at the top of files or when a small network trains in both dtypes, through both frontends.
The ``__init__.py`` of mxmp and of the two frontends import every feature: these are left out, and what is called is
imported from the file that it stands in.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import types
from pathlib import Path
from typing import Any

from support.options import parse
from support.results import ROOT

ALL, CONVERT = "convert, Trainer, Module and cast_symbol", "convert alone"
_DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_TABLES_OF_CONTENTS = ("mxmp", "mxmp.gluon", "mxmp.symbolic")
_SILENT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)


def main(arguments: list[str] | None = None) -> int:
    parse(__doc__, arguments)
    for name in _TABLES_OF_CONTENTS:
        package = types.ModuleType(name)
        package.__path__ = [str(ROOT.joinpath(*name.split(".")))]
        sys.modules[name] = package
    _call()
    totals = {CONVERT: loaded()}
    _train()
    totals[ALL] = loaded()
    for file, lines in sorted(totals[ALL].items(), key=lambda item: item[1]):
        print(f"{lines:6,} {'  ' if file in totals[CONVERT] else '+ '}{file}")
    for what, files in totals.items():
        print(f"{sum(files.values()):6,} {what}, {len(files)} files")
    return 0


def loaded() -> dict[str, int]:
    """Return the lines of code of each file of mxmp that this process has imported."""
    files = {getattr(each, "__file__", None) for name, each in sys.modules.items() if name.startswith("mxmp.")}
    return {str(Path(file).relative_to(ROOT)): code_lines(Path(file).read_text()) for file in files if file}


def code_lines(text: str) -> int:
    """Return how many lines of Python hold code: none of a docstring, a comment, nor a blank one."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _SILENT and token.string:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        first = node.body[0] if isinstance(node, _DEFINITIONS) and node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def _net() -> Any:
    from mxnet.gluon import nn

    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3), nn.BatchNorm(), nn.Activation("relu"), nn.Dropout(0.1), nn.Flatten(), nn.Dense(10))
    net.initialize()
    return net


def _call() -> None:
    import mxnet as mx

    from mxmp.gluon.convert import convert

    for dtype in ("float16", "bfloat16"):
        net = convert(_net(), dtype)
        with mx.autograd.record():
            net(mx.nd.ones((2, 3, 8, 8)))


def _train() -> None:
    import mxnet as mx
    import numpy as np

    from mxmp.gluon.convert import convert
    from mxmp.gluon.trainer import Trainer
    from mxmp.symbolic.cast import cast_symbol
    from mxmp.symbolic.module import Module

    data, label = np.ones((4, 3, 8, 8), "float32"), np.zeros(4, "float32")
    for dtype in ("float16", "bfloat16"):
        net = convert(_net(), dtype)
        for optimizer in ("sgd", "adam"):
            trainer = Trainer(net.collect_params(), optimizer)
            with mx.autograd.record():
                loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()(net(mx.nd.array(data)), mx.nd.array(label))
            trainer.backward(loss)
            trainer.step(4)
        symbol = mx.sym.SoftmaxOutput(_net()(mx.sym.var("data")), name="softmax")
        cast_symbol(symbol, dtype)
        module = Module(symbol, policy=dtype)
        module.fit(mx.io.NDArrayIter(data, label, 2), num_epoch=1)
    mx.nd.waitall()

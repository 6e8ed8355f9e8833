"""What is said of a block that cannot be traced."""

from __future__ import annotations

import re
from inspect import signature

from mxnet import autograd
from mxnet.gluon import Block, HybridBlock, Parameter, nn


def _cure(text: str) -> str:
    """Return what to write where MXNet says ``text``."""
    if found := re.search("must have NDArray type, but got <(_?)Symbol", text):
        return "Write F.np and F.npx in place of mx.np and mx.npx" if found[1] else "Write F in place of mx.nd"
    if "must be Symbol instances, but got" in text or re.search(r"(NDArray|ndarray|Symbol)'> not supported", text):
        return ("Write F.np in place of mx.np. For an array of the block, write" if "numpy" in text else "Write") + (
            " self.c = self.params.get_constant('c', array) in __init__, and hybrid_forward(self, F, x, c) gets "
            "the array c, as it gets Parameters; take what one call leaves for the next as an input, and return it"
        )
    if found := re.search(r'namely operator "(\S+)="', text):
        return f"Write x = x {found[1]} y in place of x {found[1]}= y"
    if found := re.search(r"_Symbol object has no attribute (\w+)", text):  # as numpy.exp(x) asks for x.exp
        return f"Write F.np.{found[1]}(x)"
    return "Write it without them"


def error_of(block: HybridBlock, args: tuple, culprit: Block, reason: Exception, *, is_whole: bool) -> Exception:
    """Return the error of ``culprit``, which is ``block`` or inside it and cannot be traced: a ``TypeError`` if it got
    wrong arguments, or a list in place of an array, otherwise a ``ValueError`` that says how to leave it as Python.
    ``is_whole``: ``block`` is the net that was converted."""
    text = str(reason)
    if isinstance(reason, TypeError) and "hybrid_forward() " in text and "argument" in text:
        names = list(signature(culprit.hybrid_forward).parameters)[1:]
        takes = [name for name in names if not isinstance(getattr(culprit, name, None), Parameter)]
        count = f"{len(args)} inputs" if culprit is block else "others"
        return TypeError(
            f"{culprit.name!r} ({type(culprit).__name__}) takes the inputs {', '.join(takes)}, and was called with "
            f"{count} ({reason})"
        )
    nested = next((type(each).__name__ for each in args if isinstance(each, (list, tuple))), None)
    if nested and "must be Symbol instances, but got [" in text:
        return TypeError(
            f"{block.name!r} ({type(block).__name__}) was called with a {nested} of arrays where {culprit.name!r} "
            "takes an array: write net(x), or net(*arrays) for a net of several inputs"
        )
    kind = type(culprit)
    inside = [name for name, each in vars(culprit).items() if isinstance(each, Block) and each.collect_params().keys()]
    # A net may have many of its class.
    is_own = not kind.__module__.startswith("mxnet.") or isinstance(culprit, nn.HybridLambda)
    alike = f"isinstance(block, {kind.__name__})" if is_own else f"name == {culprit.name!r}"
    how = f"leave {'such blocks' if is_own else 'it'} as Python and convert the rest: mxmp.convert(net, exclude=lambda "
    how += f"name, block: {alike})"
    if inside and culprit is block:
        how = f"convert, in place of it, what is inside, as mxmp.convert(net.{inside[0]})"
    elif inside:
        how += f", and what is inside by itself, as mxmp.convert(block.{inside[0]})"
    elif culprit is block and is_whole:  # as Python, nothing of the net would be converted
        how = "do not convert it"
    shown = re.sub(r"\n.*\n(?=<NDArray )", "an ", text, flags=re.DOTALL)  # without all its elements
    return ValueError(
        f"{culprit.name!r} ({kind.__name__}) cannot be traced, and mxmp runs {block.name!r} as a graph: hybrid_forward "
        f"gets Symbols there, which have no values ({type(reason).__name__}: {shown}). {_cure(text)}, or {how}"
        + ("" if autograd.is_training() else ". To predict alone, mxmp.restore(net) after training gives FP32")
    )

"""The examples in the docstrings of all public names, run."""

from __future__ import annotations

import doctest

import mxnet as mx
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

KNOWN = {"mx": mx, "mxmp": mxmp, "autograd": autograd, "gluon": gluon, "nn": nn}
TIMING = {"tune", "optimize_for_inference"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in TIMING else []) for name in mxmp.__all__]
)
def test_the_example_of_a_public_name_prints_what_it_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example = doctest.DocTestParser().get_doctest(getattr(mxmp, name).__doc__, KNOWN, name, None, None)
    assert example.examples
    said: list[str] = []
    doctest.DocTestRunner().run(example, out=said.append)
    assert not said, "".join(said)

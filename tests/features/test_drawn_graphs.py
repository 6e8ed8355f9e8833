"""Drawn graphs of about ten operators have FP32's outputs and gradients but for roundings, as Symbols and as nets.

MXNet's own FP32 graph is wrong in some, as where a residual reads what hard_sigmoid returns. So FP32 multiplies each
tensor by 1: no operator's gradient has an array that another reads. MXMP_DRAWN=1000 tries as many; a value at the kink
of a relu or a maximum, and what float16 flushes to zero, then need a look.
"""

from __future__ import annotations

import os
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from gpu.sim.drawn import RESULTS, Arrays, Drawn, heads_for
from mxnet import autograd, gluon
from support.results import read

import mxmp
from mxmp.precision.graph import Entry, Graph, Node

ENDS = {*read(RESULTS)["ends its process"]}  # in plain FP32, too
RESIDUALS = [3642, 5779, 8051, 8935, 9644]  # of a hard_sigmoid
SEEDS = sorted({*range(int(os.environ.get("MXMP_DRAWN", "40"))), *RESIDUALS} - ENDS)
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
CONTROLS, TIMES = 8, 6.0


def multiplied(symbol: Any, seed: int, share: float) -> Any:
    """Each tensor that an operator reads, times 1, or up to ``share`` more or less.

    But for running statistics, and weights of deconvolutions: oneDNN's backward fails where one is computed.
    """
    mx.random.seed(seed)
    graph, limits = Graph.from_symbol(symbol), {"low": f"{1 - share:.12f}", "high": f"{1 + share:.12f}"}
    for node in graph.nodes():
        for position, entry in enumerate(node.inputs):
            is_kept = (node.op == "BatchNorm" and position > 2) or (node.op == "Deconvolution" and position > 0)
            if not is_kept and not entry.node.name.startswith("index"):
                name = f"{node.name}_{position}"
                drawn = Entry(Node("_random_uniform_like", f"{name}_drawn", limits, [entry]))
                factor = Entry(Node("BlockGrad", f"{name}_factor", {}, [drawn]))
                node.rewire(position, Entry(Node("elemwise_mul", f"{name}_times", {}, [entry, factor])))
    return graph.to_symbol()


def distances(found: Arrays, wanted: Arrays) -> dict[str, float]:
    """The largest error of each array, as a share of its largest value."""
    return {n: float(np.abs(found[n] - wanted[n]).max() / max(np.abs(wanted[n]).max(), 1e-30)) for n in wanted}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_symbol_computes_as_fp32_but_for_roundings(seed, dtype):
    drawn, rounding = Drawn(seed), ROUNDING[dtype]
    low = mxmp.cast_symbol(drawn.symbol, mxmp.Policy(dtype, params="float32"), ctx=mx.cpu())
    want = drawn.results(multiplied(drawn.symbol, 0, 0.0), mx.cpu())
    errors, moved = distances(drawn.results(low, mx.cpu()), want), dict.fromkeys(want, 0.0)
    for control in range(1, CONTROLS + 1):
        other = distances(drawn.results(multiplied(drawn.symbol, control, rounding), mx.cpu()), want)
        moved = {name: max(most, other[name]) for name, most in moved.items()}
        far = {
            name: (error, moved[name]) for name, error in errors.items() if error > TIMES * moved[name] + 4 * rounding
        }
        if not far:
            return
    raise AssertionError(f"{far} in {' '.join(drawn.kinds)}")


def trained(drawn: Drawn, dtype: str, **flags: bool) -> Arrays:
    """Outputs and gradients of the third call of a net."""
    names = [name for name in drawn.symbol.list_arguments() if name.startswith(("data", "index"))]
    net = gluon.SymbolBlock(drawn.symbol, [mx.sym.var(name, dtype="float32") for name in names])
    params = net.collect_params()
    for name, param in params.items():
        param.shape = drawn.values[name].shape
    net.initialize()
    mxmp.convert(net, mxmp.Policy(dtype, params="float32"))
    net.hybridize(**flags)
    inputs = {name: mx.nd.array(drawn.values[name]) for name in names}
    for name in [name for name in names if name.startswith("data")]:
        inputs[name].attach_grad()
    for _ in range(3):
        for name, param in params.items():
            param.set_data(mx.nd.array(drawn.values[name]))
        with autograd.record():
            outputs = net(*inputs.values())
        outputs = outputs if isinstance(outputs, list) else [outputs]
        autograd.backward(outputs, heads_for(outputs))
    grads = {name: param.grad() for name, param in params.items() if param.grad_req != "null"}
    grads.update({name: array.grad for name, array in inputs.items() if name.startswith("data")})
    found = {f"output {i}": out.asnumpy() for i, out in enumerate(outputs)}
    return {**found, **{f"gradient of {name}": grad.asnumpy() for name, grad in grads.items()}}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("flags", [{}, {"static_alloc": True, "static_shape": True}], ids=["", "static"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_net_computes_as_the_symbol(seed, flags, dtype):
    drawn = Drawn(seed)
    low = mxmp.cast_symbol(drawn.symbol, mxmp.Policy(dtype, params="float32"), ctx=mx.cpu())
    want, found = drawn.results(low, mx.cpu()), trained(drawn, dtype, **flags)
    assert found.keys() == want.keys()
    assert max(distances(found, want).values()) < 1e-3

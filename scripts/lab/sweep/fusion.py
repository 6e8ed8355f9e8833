"""Every model of the zoos for inference on a CPU: folded and fused, in FP32 and bfloat16, into one JSON file.

The folded and fused FP32 graph must compute what the network does, above 90 dB. Some networks, with weights that were
drawn at random, amplify the rounding of FP32 beyond that: there it must be as near to the network in float64 as the
network in FP32 is, within 6 dB. A ``Module`` in bfloat16 that predicts by such a graph may be at most 3 dB further from
FP32 than the same module by its graph with casts; below 15 dB, where networks amplify bfloat16's rounding so much that
chance decides, nothing is said. Models that run as Python, or that MXNet's Symbol cannot hold, have no such graph.
"""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import Any

import mxnet as mx
import numpy as np
from support.results import FOLDER

import mxmp
from mxmp.inference.calibration import sqnr
from mxmp.inference.targets import read_target
from mxmp.kernels.fusion import Unfused
from mxmp.serving.folding import copied, fold_constants, fold_norms, without_identities
from mxmp.serving.fusing import FUSED, fuse
from mxmp.symbolic import _mxnet
from sweep.models import Run, sweep_zoo, with_model

RESULTS = FOLDER / "fusion.json"
SAME, NEAR, MARGIN, CHAOS = 90.0, 6.0, 3.0, 15.0  # dB


def main(arguments: list[str] | None = None) -> None:
    sweep_zoo(__doc__, arguments, RESULTS, wanted, measured)


def wanted(result: dict[str, Any] | None, again: str | None) -> bool:
    return result is None or again == "all" or (again == "failed" and not passes(result))


def passes(result: dict[str, Any]) -> bool:
    """Return whether all that was compared holds. What has no graph, or what FP32 itself cannot do, is no fault."""
    if result.keys() & {"left_out", "reference_error", "no_graph"}:
        return True
    if "error" in result:
        return False
    same = result["fused"] >= SAME
    if "fused to float64" in result:
        same = result["fused to float64"] >= result["plain to float64"] - NEAR
    return same and ("module" not in result or result["casts"] < CHAOS or result["module"] >= result["casts"] - MARGIN)


def measured(name: str, _: dict[str, Any], run: Run, __: str | None) -> dict[str, Any]:
    found, ended = run(with_model, name, compared)
    return {"error": ended, **found} if ended and "reference_error" not in found else found


def compared(pipe: Connection, model: Any) -> None:
    """Send the SQNR to plain FP32, in dB, of the fused FP32 graph and of a bfloat16 module by both its graphs."""
    from sweep.networks.running import cause

    os.environ.pop("MXNET_SUBGRAPH_BACKEND", None)
    model.warm_up()
    try:
        subject = read_target(model.net, [tuple(model.case.inputs())], None, None)
    except ValueError as error:
        pipe.send(("no_graph", cause(error)))
        return
    # A box may be another one where two have almost the same score, so the boxes that are chosen from are compared.
    chosen_from = [node.inputs[0] for node in subject.graph.nodes() if node.op == "_contrib_box_nms"]
    subject.graph.heads = chosen_from[:1] or subject.graph.heads
    batch = subject.batches[0]
    plain = outputs(subject.graph, {**subject.params, **batch})
    if any(np.isnan(each).any() for each in plain):
        raise ArithmeticError("FP32 itself is not finite")
    try:
        graph, params = fold_constants(*fold_norms(without_identities(subject.graph), subject.params))
        fused = fuse(graph)
        pipe.send(("operators", sum(node.op in FUSED for node in fused.nodes())))
        by_fusion = outputs(fused, {**params, **batch})
        pipe.send(("fused", same := worst(plain, by_fusion)))
        if same < SAME:
            exact = in_float64(subject)
            pipe.send(("plain to float64", worst(exact, plain)))
            pipe.send(("fused to float64", worst(exact, by_fusion)))
        by_module(pipe, subject, plain)
    except Exception as error:  # whatever MXNet or mxmp raises is the result
        pipe.send(("error", cause(error)))


def outputs(graph: Any, arrays: dict[str, Any]) -> list[Any]:
    """Return the outputs of a graph as NumPy arrays, without MXNet's own fusion."""
    symbol = graph.to_symbol()
    args, states = (
        {n: arrays[n] for n in names} for names in (symbol.list_arguments(), symbol.list_auxiliary_states())
    )
    executor = Unfused(symbol).bind(mx.cpu(), args, grad_req="null", aux_states=states)
    return [out.asnumpy() for out in executor.forward(is_train=False)]


def in_float64(subject: Any) -> list[Any]:
    """Return the outputs of a network that computes in float64."""
    graph = copied(subject.graph)
    for node in graph.nodes():
        if node.is_variable:
            node.attrs.pop("__dtype__", None)
        elif node.attrs.get("dtype") == "float32":
            node.attrs["dtype"] = "float64"
    arrays = {**subject.params, **subject.batches[0]}
    return outputs(graph, {n: v.astype("float64") if v.dtype.__name__ == "float32" else v for n, v in arrays.items()})


def by_module(pipe: Connection, subject: Any, plain: list[Any]) -> None:
    """Send how far a bfloat16 module is from ``plain``: by its graph for inference, then by its graph with casts."""
    symbol, batch = subject.graph.to_symbol(), subject.batches[0]
    names = [name for name in symbol.list_arguments() if name in batch]
    if not names:
        return
    shapes = [mx.io.DataDesc(name, batch[name].shape, batch[name].dtype) for name in names]
    try:
        mx.mod.Module(symbol, data_names=names, label_names=None).bind(shapes, for_training=False)
    except (AssertionError, RuntimeError):  # such as an input whose first axis is not the batch
        return
    module = mxmp.Module(symbol, data_names=names, label_names=None, policy="bfloat16")
    module.bind(shapes, for_training=False)
    if module.plan is None or not module.plan.num_low:
        return
    states = set(symbol.list_auxiliary_states())
    module.set_params(
        {name: value for name, value in subject.params.items() if name not in states},
        {name: value for name, value in subject.params.items() if name in states},
    )
    data = mx.io.DataBatch([batch[name] for name in names])
    for word in ("module", "casts"):
        module.forward(data, is_train=False)
        pipe.send((word, worst(plain, [out.asnumpy() for out in module.get_outputs()])))
        module.core.exposed = True  # as if a user had read the executors: then the graph with casts runs
    (executor,) = _mxnet.group(module).execs
    if executor._fused is None:
        raise RuntimeError("MXNet did not bind the graph for inference")


def worst(plain: list[Any], found: list[Any]) -> float:
    """Return the lowest SQNR of the outputs, in dB; infinite elements must be equal."""
    return min((min(sqnr(*pair), 999.0) for pair in zip(plain, found)), default=999.0)

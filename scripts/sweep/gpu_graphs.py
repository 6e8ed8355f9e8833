"""What a GPU would be given to do in float16: casts, bytes and operators of every network's graphs. No GPU is needed.

Nothing is computed but for networks that are no single graph, which are run once on their smallest input to see
which graphs they call. Shapes and dtypes are inferred for a batch as one trains with; operators of forward and
backward are those that MXNet's executor plans for the graph; operators of the step are counted by MXNet's profiler on
as many parameters of one number each. A count that was ended goes on.
"""

from __future__ import annotations

import re
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, Callable, Collection, NamedTuple

import numpy as np
from support.processes import silence
from support.results import DOCS

from sweep.models import Run, sweep_zoo

RESULTS = DOCS / "gpu-graphs.json"
VARIANTS = ["float32", "float16", "float16-fast", "minimal", "contrib.amp"]
NO_NETWORK = re.compile(r"(nlp|rnn|nn|flow|contrib|np)\.|batch_dot$|.*_int8$")
BATCH = {"segmentation": 8, "pose": 16, "ssd": 32, "yolo": 16, "center_net": 16, "depth": 12, "siamrpn": 16}
SIZES = {
    "bert": {2: 32, 16: 128, 3: 20},  # sequences, tokens, masked tokens
    "language model": {8: 35, 2: 80},  # tokens, sequences
    "translation": {2: 64, 16: 50, 12: 50},
}


def main(arguments: list[str] | None = None) -> None:
    sweep_zoo(__doc__, arguments, RESULTS, lambda result, again: lacking(result or {}, again), count, names)


def count(name: str, before: dict[str, Any], run: Run, again: str | None) -> dict[str, Any]:
    found, ended = run(worker, name, lacking(before, again))
    if "variants" not in found:
        return {"error": found.get("error", ended)}
    return {**found, "variants": {**before.get("variants", {}), **found["variants"]}}


def names() -> list[str]:
    """Return the zoos' networks, without what the catalogue has of single layers."""
    from zoo.catalogue import in_order

    return [name for name in in_order() if not NO_NETWORK.match(name)]


def lacking(result: dict[str, Any], again: str | None) -> list[str]:
    """Return the variants that a network is still to be counted in."""
    if again == "all" or not result or (again == "failed" and "error" in result):
        return VARIANTS
    if "variants" not in result:
        return []
    failed = {name for name, figures in result["variants"].items() if again == "failed" and "error" in figures}
    return [name for name in VARIANTS if name in failed or name not in result["variants"]]


def worker(pipe: Connection, gib: float, name: str, wanted: list[str]) -> None:
    silence()
    from zoo.catalogue import CASES
    from zoo.running import cause

    try:
        for key, value in counts(CASES[name](), wanted).items():
            pipe.send((key, value))
    except Exception as error:  # whatever a network's own code raises is the result
        pipe.send(("error", cause(error)))


class Traced(NamedTuple):
    """The graphs that a network calls in training, and its parameters: whether each is trained."""

    calls: list
    params: dict[str, bool]

    def resized(self, size: Callable[[tuple], tuple]) -> Traced:
        """Return the same with inputs of other shapes."""

        def known(call: Any) -> dict[str, tuple]:
            return {n: (s if n in self.params else size(s), t) for n, (s, t) in call.known.items()}

        return self._replace(calls=[call._replace(known=known(call)) for call in self.calls])

    def inputs(self, call: Any) -> dict[str, tuple]:
        return {name: shape for name, (shape, _) in call.known.items() if name not in self.params}


def counts(case: Any, wanted: list[str]) -> dict[str, Any]:
    """Return the figures of one network, by variant."""
    from zoo.running import cause

    small = traced(case)
    large, where = small.resized(lambda shape: scaled(case, shape)), "as one trains with"
    try:
        written = sum(map(bytes_written, large.calls))
    except Exception:  # a size that the network has in its own code, or its other inputs
        large, where, written = small, "the smallest that the network takes", sum(map(bytes_written, small.calls))
    inputs = {name: list(shape) for call in large.calls for name, shape in large.inputs(call).items()}
    found: dict[str, Any] = {}
    for variant in wanted:
        try:
            found[variant] = figures(variant, large, small)
        except Exception as error:  # what contrib.amp cannot do is a result
            found[variant] = {"error": cause(error)}
    return {"kind": case.kind, "batch": where, "inputs": inputs, "written": written, "variants": found}


def traced(case: Any) -> Traced:
    """Return the graph of the whole network, or of the blocks that a network in Python calls."""
    import mxnet as mx
    from mxnet import autograd, gluon
    from zoo.running import all_blocks, call, calls, without_drop_blocks

    net = case.make()
    without_drop_blocks(net)
    inputs = (case.train_inputs or case.inputs)()
    with autograd.train_mode():
        if isinstance(net, gluon.HybridBlock) and type(net).__call__ is gluon.HybridBlock.__call__:
            found = [call(net, inputs)]
        else:
            net.initialize(case.init or mx.init.Xavier())
            net(*inputs)
            for block in all_blocks(net):
                if isinstance(block, gluon.HybridBlock):
                    block._clear_cached_op()
            net.hybridize()
            with calls() as found, autograd.record():
                net(*inputs)
    # A shape that is not known yet is None.
    known = [{n: (tuple(shape or ()), dtype) for n, (shape, dtype) in each.known.items()} for each in found]
    trained = {name: param.grad_req != "null" for name, param in net.collect_params().items()}
    return Traced([each._replace(known=shapes) for each, shapes in zip(found, known)], trained)


def scaled(case: Any, shape: tuple) -> tuple:
    """Return the shape of an input for a batch as one trains with."""
    if case.kind in ("classification", "gluon") and len(shape) == 4:
        size = 32 if case.name.startswith("cifar") else max(shape[2], 224)
        return (128, shape[1], size, size)
    if case.kind == "video" and len(shape) in (4, 5):
        size = shape[-1] if shape[-1] in (112, 299) else 224
        return (32 if len(shape) == 4 else 8, *shape[1:-2], size, size)
    sizes = SIZES.get(case.kind)
    if sizes:
        return tuple(sizes.get(size, size) for size in shape)
    return (shape[0] * BATCH.get(case.kind, 1), *shape[1:])


def rewritten(variant: str, symbol: Any, shapes: dict[str, tuple]) -> Any:
    """Return the Symbol that runs, of a Symbol and the shapes of its inputs."""
    import mxnet as mx
    from mxnet.contrib import amp

    import mxmp
    from mxmp.pipeline import low_graph
    from mxmp.precision.graph import Graph

    if variant == "float32":
        return symbol
    if variant == "contrib.amp":
        return amp.convert_symbol(symbol, "float16")
    if variant == "minimal":
        how: Any = mxmp.tune(symbol, policy="float16-fast", measure=False, ctx=mx.gpu(), **shapes)
    else:
        how = mxmp.Policy.parse(variant)
    # As a converted net runs; cast_symbol keeps the outputs' names as well, at a price.
    return low_graph(Graph.from_symbol(symbol), how, "gpu")[0].to_symbol()


def figures(variant: str, large: Traced, small: Traced) -> dict[str, Any]:
    from zoo.running import counted

    casted = [call._replace(symbol=rewritten(variant, call.symbol, large.inputs(call))) for call in large.calls]
    one = large.resized(lambda shape: (1, *shape[1:]))
    moved = counted(casted)
    trained = {name for name, is_trained in large.params.items() if is_trained}
    low = {name for call in casted for name, attrs in call.symbol.attr_dict().items() if attrs.get("__dtype__") == "2"}
    calls = zip(casted, small.calls, one.calls)
    operators = sum(planned(each.symbol, [least.known, full.known], trained) for each, least, full in calls)
    step = step_operators(len(trained & low), len(trained - low), variant)
    return {"casts": moved["casts"], "cast_bytes": moved["cast_bytes"], "operators": operators, "step": step}


def bytes_written(call: Any) -> int:
    """Return what the operators of an FP32 graph write in one forward. Raises where the shapes do not fit."""
    from zoo.running import steps

    written = [out for step in steps(call) for out in step.outs if out]
    return sum(out.size * np.dtype(out.dtype).itemsize for out in written)


def planned(symbol: Any, known: list[dict[str, tuple]], trained: Collection[str]) -> int:
    """Count operators of forward and backward, as MXNet's executor plans them; at the first size that it takes."""
    import mxnet as mx

    inputs, attrs = symbol.list_inputs(), symbol.attr_dict()
    shapes = {name: shape for name, (shape, _) in known[0].items() if name in inputs and shape and all(shape)}
    dtypes = {name: known[0][name][1] for name in inputs if "__dtype__" not in attrs.get(name, {})}
    requests = {name: "write" if name in trained else "null" for name in symbol.list_arguments()}
    try:
        executor = symbol.simple_bind(mx.cpu(), grad_req=requests, type_dict=dtypes, **shapes)
    except Exception:
        if len(known) == 1:
            raise
        return planned(symbol, known[1:], trained)
    return len(re.findall(r"^Op:", executor.debug_str(), flags=re.MULTILINE))


@lru_cache(maxsize=None)
def step_operators(low: int, full: int, variant: str) -> int:
    """Count operators of one step of SGD with momentum, of parameters stored in float16 and in FP32.

    By the profiler, on parameters of one number each. ``float32``: of MXNet's Trainer. ``contrib.amp``: the same, and
    its finite check, one for 200 gradients (mxnet/contrib/amp/loss_scaler.py). Else of mxmp's, with FP32 masters of
    what is stored in float16.
    """
    from bench.host import backward_and_step, counted
    from mxnet import gluon

    import mxmp
    from mxmp.gluon import _mxnet
    from mxmp.gluon.parameter import store_low

    if variant == "contrib.amp":
        return step_operators(low, full, "float32") + -(-(low + full) // 200)
    ours = variant != "float32"
    made = [gluon.Parameter(f"p{number}", shape=(1,), init="zeros") for number in range(low + full)]
    for number, param in enumerate(made):
        param.initialize()
        if ours and number < low:
            store_low(param, "float16")
    kind: Any = mxmp.Trainer if ours else gluon.Trainer
    extra = {"loss_scale": 128.0} if ours else {"update_on_kvstore": False}
    trainer = kind(made, "sgd", {"momentum": 0.9}, **extra)

    def forward() -> list:
        # Not param.data(): what a user asks for is looked at in every step, in case it was written into.
        return [_mxnet.data(param).astype("float32") for param in made]

    backward_and_step(forward, trainer, lambda step: step())  # makes the states
    return backward_and_step(forward, trainer, counted)

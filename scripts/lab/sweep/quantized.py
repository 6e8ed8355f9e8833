"""The metric in INT8 of trained networks, calibrated on 5, 10 and 50 batches, beside FP32's.

The networks of `examples/recipes/` and some others by the same recipes, trained in FP32. Calibration has batches of 8
rows of training data (the LSTM: 16 streams of 20 words). `mxmp.optimize_for_inference` chooses by training data that
calibrated nothing; the metric is that of data held out, by which nothing was chosen. Prints a table; a run that was
ended goes on with results/int8.json.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from importlib import import_module
from typing import Any, Callable, NamedTuple

import mxnet as mx
from parity.verdict import METRICS
from support.options import parse
from support.pages import table
from support.results import FOLDER, ROOT, read, write

import mxmp

RESULTS = FOLDER / "int8.json"
BATCHES, BATCH = (5, 10, 50), 8
MOST = BATCHES[-1] * 3 // 2  # a third of the batches measures, and calibrates nothing
LABELS = {
    "alexnet": "AlexNet",
    "vgg16": "VGG-16",
    "googlenet": "GoogLeNet",
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
    "resnet101": "ResNet-101",
    "inceptionv3": "Inception v3",
    "resnet18_v2": "ResNet-18 v2 (pre-activation)",
    "mobilenetv2": "MobileNetV2",
    "mobilenetv3": "MobileNetV3-small",
    "ssd": "SSD",
    "bert": "BERT, fine-tuned",
    "lstm": "LSTM",
}


class Trained(NamedTuple):
    """A trained network; ``choose`` and ``judge`` are its metric on training data and on data held out.

    The training data is none of the ``batches``. Both take the network, or one that was made from it.
    """

    net: Any
    batches: list[Any]
    choose: Callable[[Any], float]
    judge: Callable[[Any], float]
    metric: str


def main(arguments: list[str] | None = None) -> None:
    args = parse(
        *(__doc__, arguments, "networks"),
        networks=([str], f"default: all, {', '.join(LABELS)}"),
        max_drop=(0.5, "of the metric that INT8 may lose, in its unit, on the data that chooses"),
    )
    sys.path.insert(0, str(ROOT / "examples" / "recipes"))
    results = read(RESULTS)
    for name in args.networks or LABELS:
        if name not in results:
            results[name] = measured(name, args.max_drop)
            write(RESULTS, results)
            print(f"{name}: {results[name]}", flush=True)
    print(render(results))


def measured(name: str, max_drop: float) -> dict[str, Any]:
    """Train the network in FP32; return its metric, and that in INT8 by the number of calibration batches."""
    with contextlib.redirect_stdout(io.StringIO()):
        trained = {"ssd": ssd, "bert": bert, "lstm": lstm}.get(name, lambda: classifier(name))()
    found: dict[str, Any] = {"metric": trained.metric, "float32": trained.judge(trained.net)}
    for count in BATCHES:
        found[str(count)] = quantized(trained, count, max_drop)
    return found


def run(name: str, metric: str, epochs: int) -> Any:
    """Return a run of a recipe in FP32."""
    common = import_module("common")
    return common.Run(common.parser(__doc__, epochs).parse_args(["--dtype", "float32"]), name, metric, 0)


def classifier(name: str) -> Trained:
    """Return a network by the recipe of image classifiers, which lacks the learning rate of some."""
    classify, common = import_module("classify"), import_module("common")
    from gluoncv import model_zoo

    others = {
        "resnet18": classify.Network(classify.zoo("resnet18_v1b"), 8, 48, 0.02),
        "resnet101": classify.Network(classify.zoo("resnet101_v1b"), 8, 48, 0.02),
        "resnet18_v2": classify.Network(classify.zoo("resnet18_v2"), 8, 48, 0.02),
        "mobilenetv2": classify.Network(lambda: model_zoo.get_model("mobilenetv2_0.5", classes=10), 1, 48, 0.01),
        "mobilenetv3": classify.Network(lambda: model_zoo.get_model("mobilenetv3_small", classes=10), 1, 48, 0.01),
    }
    network = {**others, **classify.NETWORKS}[name]
    net, (images, labels, held, truth) = classify.train(network, run(name, "top-1, %", classify.EPOCHS))
    rest = slice(MOST * BATCH, len(images) // network.copies)  # what follows are the images once more, moved
    return Trained(
        net,
        [mx.nd.array(images[i * BATCH :][:BATCH]) for i in range(MOST)],
        lambda served: common.top_1(served, images[rest], labels[rest]),
        lambda served: common.top_1(served, held, truth),
        "top-1, %",
    )


def ssd() -> Trained:
    """Return the detector of digits on canvases."""
    recipe = import_module("ssd")

    net, data, held = recipe.train(run("ssd", "mAP, %", recipe.EPOCHS))
    rest = type(data)(*(array[MOST * BATCH :] for array in data))
    return Trained(
        net,
        [mx.nd.array(data.images[i * BATCH :][:BATCH]) for i in range(MOST)],
        lambda served: recipe.mean_average_precision(served, rest),
        lambda served: recipe.mean_average_precision(served, held),
        "mAP, %",
    )


def bert() -> Trained:
    """Return the small BERT that tells whether a film was liked."""
    recipe, pairs = import_module("bert"), import_module("pairs")
    net, rows, held = recipe.finetune(run("bert", "accuracy, %", 1))
    return Trained(
        net,
        [tuple(pairs.columns(rows[i * BATCH :][:BATCH])[:4]) for i in range(MOST)],
        lambda served: recipe.accuracy(served, rows[MOST * BATCH :]),
        lambda served: recipe.accuracy(served, held),
        "accuracy, %",
    )


def lstm() -> Trained:
    """Return the language model; a batch is words and the state that the words before them left."""
    recipe = import_module("lstm_gluon")
    text, held = recipe.texts()
    net = recipe.train(run("lstm", "perplexity", recipe.EPOCHS), text)
    state, batches = recipe.begin_state(), []
    for words, _ in list(recipe.parts(text))[:MOST]:
        batches.append((words, state))
        _, *state = net(words, state)
    return Trained(
        net,
        batches,
        lambda served: recipe.perplexity(served, text[MOST * recipe.STEPS :]),
        lambda served: recipe.perplexity(served, held),
        "perplexity",
    )


def quantized(trained: Trained, count: int, max_drop: float) -> dict[str, Any]:
    """Return the metric with every operator in INT8 that can be, and with as many as lose no more than ``max_drop``."""
    sign, judged = 1 if METRICS[trained.metric].higher else -1, []

    def evaluate(served: Any) -> float:
        judged.append({"value": trained.judge(served), "operators": operators(served.symbol)})
        return sign * trained.choose(served)

    batches = trained.batches[: count + max(count // 2, 1)]
    served = mxmp.optimize_for_inference(
        trained.net, batches, dtypes=["int8"], evaluate=evaluate, max_drop=max_drop, progress=False
    )
    report = served.report
    scored = [each for each in report.candidates if each.score is not None]
    tried = [(each, result) for each, result in zip(scored, judged) if each.name.startswith("int8")]  # one is FP32
    accurate = [result for each, result in tried if not each.verdict]
    return {
        "all": next((result for each, result in tried if each.name == "int8"), None),
        "within": max(accurate, key=lambda result: result["operators"], default=None),
        "calibrator": max(report.calibrators, key=report.calibrators.__getitem__, default=None),
        "sqnr": {each.name: each.sqnr for each, _ in tried},
        "notes": report.notes,
    }


def operators(symbol: Any) -> int:
    """Return how many operators of a graph compute in INT8."""
    # A reshape before a dense layer has the layer's name in its own.
    nodes = json.loads(symbol.tojson())["nodes"]
    return sum(node["name"].startswith("quantized_") and node["op"] != "Reshape" for node in nodes)


def render(results: dict[str, Any]) -> str:
    """Return the table: the metric in FP32, and the differences in its unit."""
    head = " | ".join(["network", "metric", "FP32", *(f"{count} batches" for count in BATCHES), "operators in INT8"])
    return table(head, (row(LABELS[name], results[name]) for name in LABELS if name in results))


def row(label: str, found: dict[str, Any]) -> list[str]:
    """Return the cells of a network; where operators have to stay in FP32, with the difference if they do not."""
    differences, counts = [], []
    for each in (found[str(count)] for count in BATCHES):
        every, within = (difference(each[key], found["float32"]) for key in ("all", "within"))
        differences.append(within if each["all"] == each["within"] else f"{within} (all: {every})")
        counts.append(f"{each['within']['operators']} of {each['all']['operators']}" if each["within"] else "none")
    return [label, found["metric"], f"{found['float32']:.2f}", *differences, " / ".join(dict.fromkeys(counts))]


def difference(result: dict[str, Any] | None, reference: float) -> str:
    """Return how much a metric differs from the one in FP32, with its sign."""
    return f"{result['value'] - reference:+.2f}" if result else "none"

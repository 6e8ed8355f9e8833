"""Top-1 in INT8 of trained networks, calibrated on 5, 10 and 50 batches, beside FP32's.

The networks of `examples/recipes/classify.py` and some others, trained in FP32 on handwritten digits by the same
recipe. Calibration has batches of 8 training images. `mxmp.optimize_for_inference` chooses by training images that
calibrated nothing; top-1 is of held out images, by which nothing was chosen. Prints a table; a
run that was ended goes on with docs/int8.json.
"""

from __future__ import annotations

import contextlib
import io
import sys
from importlib import import_module
from typing import Any

from support.options import parse
from support.results import DOCS, ROOT, read, write

RESULTS = DOCS / "int8.json"
BATCHES, BATCH = (5, 10, 50), 8
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
}


def main(arguments: list[str] | None = None) -> None:
    args = parse(
        *(__doc__, arguments, "networks"),
        networks=([str], f"default: all, {', '.join(LABELS)}"),
        max_drop=(0.5, "points of top-1 that INT8 may lose on the images that choose"),
    )
    sys.path.insert(0, str(ROOT / "examples" / "recipes"))
    results = read(RESULTS)
    for name in args.networks or LABELS:
        if name not in results:
            results[name] = measured(name, args.max_drop)
            write(RESULTS, results)
            print(f"{name}: {results[name]}", flush=True)
    print("\n".join(table(results)))


def measured(name: str, max_drop: float) -> dict[str, Any]:
    """Train the network in FP32; return its top-1 in %, and that of INT8 by the number of calibration batches."""
    classify, common = import_module("classify"), import_module("common")

    entry = network(name)
    with contextlib.redirect_stdout(io.StringIO()):
        run = common.Run(
            common.parser(__doc__, classify.EPOCHS).parse_args(["--dtype", "float32"]), name, "top-1, %", 10
        )
        net, (images, labels, held, truth) = classify.train(entry, run)
    found: dict[str, Any] = {"float32": common.top_1(net, held, truth)}
    for count in BATCHES:
        found[str(count)] = quantized(net, images, labels, (held, truth), entry.copies, count, max_drop)
    return found


def network(name: str) -> Any:
    """Return the recipe's entry for a network, with a learning rate for those that the recipe does not have."""
    classify = import_module("classify")
    from gluoncv import model_zoo

    others = {
        "resnet18": classify.Network(classify.zoo("resnet18_v1b"), 8, 48, 0.02),
        "resnet101": classify.Network(classify.zoo("resnet101_v1b"), 8, 48, 0.02),
        "resnet18_v2": classify.Network(classify.zoo("resnet18_v2"), 8, 48, 0.02),
        "mobilenetv2": classify.Network(lambda: model_zoo.get_model("mobilenetv2_0.5", classes=10), 1, 48, 0.01),
        "mobilenetv3": classify.Network(lambda: model_zoo.get_model("mobilenetv3_small", classes=10), 1, 48, 0.01),
    }
    return classify.NETWORKS.get(name) or others[name]


def quantized(
    net: Any, images: Any, labels: Any, held: Any, copies: int, count: int, max_drop: float
) -> dict[str, Any]:
    """Return top-1 in % with every layer in INT8, and with as many as lose no more than ``max_drop``.

    ``copies``: the images, then copies of them that were moved, which are not used here.
    """
    common = import_module("common")
    import mxnet as mx

    import mxmp

    total = count + max(count // 2, 1)  # a third of the batches measures, and calibrates nothing
    batches = [mx.nd.array(images[i * BATCH : (i + 1) * BATCH]) for i in range(total)]
    rest = slice(total * BATCH, len(images) // copies)
    tops = []

    def evaluate(served: Any) -> float:
        tops.append(common.top_1(served, *held))
        return common.top_1(served, images[rest], labels[rest])

    report = mxmp.optimize_for_inference(net, batches, dtypes=["int8"], evaluate=evaluate, max_drop=max_drop).report
    tried = [each for each in report.candidates if each.score is not None]
    by_name = dict(zip([each.name for each in tried], tops[1:]))  # the first call is FP32's
    kept = [each.name for each in tried if not each.verdict]
    fewest = min(kept, key=layers_in_fp32, default="")
    calibrator = max(report.calibrators, key=lambda each: report.calibrators[each], default=None)
    return {
        "all": by_name.get("int8"),
        "within": by_name.get(fewest),
        "layers_in_fp32": layers_in_fp32(fewest),
        "calibrator": calibrator,
        "sqnr": {each.name: each.sqnr for each in tried},
        "notes": report.notes,
    }


def layers_in_fp32(name: str) -> int:
    """Return the number in the name of a candidate, such as 2 of ``"int8, 2 in float32"``."""
    return int(name.split(", ")[1].split()[0]) if ", " in name else 0


def table(results: dict[str, Any]) -> list[str]:
    """Return the lines of the table: top-1 in FP32, and the differences in points."""
    head = [f"{count} batches" for count in BATCHES]
    lines = [f"| network | FP32, % | {' | '.join(head)} | layers in FP32 |", f"|{'---|' * (len(BATCHES) + 3)}"]
    for name, found in results.items():
        drops, kept = [], []
        for count in BATCHES:
            each = found[str(count)]
            every, within = (
                "none" if each[key] is None else f"{each[key] - found['float32']:+.2f}" for key in ("all", "within")
            )
            drops.append(every if every == within else f"{within} (all in INT8: {every})")
            kept.append(str(each["layers_in_fp32"]))
        lines.append(f"| {LABELS[name]} | {found['float32']:.2f} | {' | '.join(drops)} | {' / '.join(kept)} |")
    return lines

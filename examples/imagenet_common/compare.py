"""The table and the picture that compare runs of one network in several dtypes."""

import sys
from pathlib import Path
from typing import Any, Dict, List, Sequence

from rich.console import Console
from rich.table import Table

Results = Dict[str, Any]

# Okabe and Ito's colours; widths and dashes keep coinciding lines apart, also without colour.
STYLES = {
    "float32": {"color": "#0072B2", "linestyle": "-", "marker": "o", "linewidth": 3.2, "markersize": 8},
    "float16": {"color": "#E69F00", "linestyle": "--", "marker": "s", "linewidth": 2.2, "markersize": 5.5},
    "float16, Symbolic": {"color": "#009E73", "linestyle": "-.", "marker": "D", "linewidth": 1.8, "markersize": 4.5},
    "bfloat16": {"color": "#000000", "linestyle": ":", "marker": "^", "linewidth": 1.6, "markersize": 4},
}


def label(run: Results) -> str:
    """What to call a run: its dtype, and its interface where that is not Gluon."""
    return str(run.get("label", run["dtype"]))


def print_table(runs: Sequence[Results]) -> None:
    """One row a run."""
    table = Table(title=f"{runs[0]['model']}, {len(runs[0]['history'])} epochs, same seed and hyper-parameters")
    table.add_column("run")
    for name in (
        "val. top-1\n(%)",
        "best\nval. loss",
        "ms/step,\nbest epoch",
        "loss scale\nat the end",
        "skipped\nsteps",
        "casts",
        "peak memory\n(MB)",
    ):
        table.add_column(name, justify="right")
    for run in runs:
        table.add_row(
            label(run),
            f"{100 * run['top1']:.2f}",
            f"{run['best_loss']:.4f}",
            f"{run['ms_per_step']:.1f}",
            f"{run['loss_scale']:g}",
            str(run["skipped_steps"]),
            str(run["casts"]),
            f"{run['peak_memory_mb']:.0f}",
        )
    Console(width=None if sys.stdout.isatty() else 110).print(table)


def training_curve(run: Results) -> List[List[float]]:
    """[epochs done, loss]: the mean loss of each logged interval, at the interval's end."""
    steps, interval = run["steps_per_epoch"], run["log_interval"]
    xs, ys = [], []
    for entry in run["history"]:
        for number, loss in enumerate(entry["train_loss"], 1):
            xs.append(entry["epoch"] - 1 + min(number * interval, steps) / steps)
            ys.append(loss)
    return [xs, ys]


def draw(runs: Sequence[Results], path: Path) -> None:
    """Training loss and validation accuracy over the epochs, as a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for run in runs:
        style = STYLES[label(run)]
        line = {name: value for name, value in style.items() if not name.startswith("marker")}
        left.semilogy(*training_curve(run), label=label(run), **line)
        epochs = [entry["epoch"] for entry in run["history"]]
        accuracy = [100 * entry["top1"] for entry in run["history"]]
        right.plot(epochs, accuracy, label=f"{label(run)}: {accuracy[-1]:.2f} %", **style)
    left.set(xlabel="epoch", ylabel="training loss", title="Training loss")
    right.set(xlabel="epoch", ylabel="validation top-1 (%)", title="Validation accuracy")
    right.xaxis.get_major_locator().set_params(integer=True)
    for axes, place in ((left, "upper right"), (right, "lower right")):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc=place, frameon=False, handlelength=3.5)
    emulated = "; float16 is emulated on a CPU" if any(run.get("emulated") for run in runs) else ""
    figure.suptitle(f"{runs[0]['model']}: {len(runs)} runs with one seed and the same hyper-parameters{emulated}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)

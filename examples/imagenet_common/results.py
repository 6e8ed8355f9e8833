"""Figures of a run: the log, the line after each epoch, the JSON file."""

import argparse
import json
import logging
import resource
from typing import Any, Dict, List

from .network import devices

log = logging.getLogger("imagenet")


def start_log(options: argparse.Namespace) -> None:
    """Epoch lines to the screen; with --logging-file every interval to that file too."""
    log.setLevel(logging.DEBUG)
    log.propagate = False
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    screen = logging.StreamHandler()
    screen.setLevel(logging.INFO)
    log.addHandler(screen)
    if options.logging_file:
        options.logging_file.parent.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(options.logging_file)
        file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        log.addHandler(file)


def log_epoch(entry: Dict[str, Any], options: argparse.Namespace, images: int) -> None:
    """The line that stays on the screen for an epoch."""
    log.info(
        "epoch %d/%d: train loss %.4f, val loss %.4f, top-1 %.4f, top-5 %.4f, %.0f images/s, loss scale %g, skipped %d",
        *(
            entry["epoch"],
            options.num_epochs,
            entry["train_loss"][-1],
            entry["loss"],
            entry["top1"],
            entry["top5"],
        ),
        *(images / entry["seconds"], entry["loss_scale"], entry["skipped_steps"]),
    )


def summarize(options: argparse.Namespace, history: List[Dict[str, Any]], steps: int, casts: int) -> Dict[str, Any]:
    """What the table and the picture need. Time per step: the fastest epoch's, data loading included."""
    return {
        "model": options.model,
        "dtype": options.dtype,
        "emulated": options.dtype == "float16" and devices(options.num_gpus)[0].device_type == "cpu",
        "steps_per_epoch": steps,
        "log_interval": options.log_interval,
        "top1": history[-1]["top1"],
        "top5": history[-1]["top5"],
        "best_loss": min(entry["loss"] for entry in history),
        "ms_per_step": min(entry["seconds"] for entry in history) / steps * 1000,
        "loss_scale": history[-1]["loss_scale"],
        "skipped_steps": history[-1]["skipped_steps"],
        "casts": casts,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "history": history,
    }


def finish(results: Dict[str, Any], options: argparse.Namespace) -> None:
    """The last line, and the JSON file."""
    log.info(
        "final: top-1 %.4f, top-5 %.4f, %.1f ms/step",
        results["top1"],
        results["top5"],
        results["ms_per_step"],
    )
    save(results, options)


def save(results: Dict[str, Any], options: argparse.Namespace) -> None:
    """The JSON file where --results names one, whole or not at all."""
    if options.results:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        new = options.results.with_suffix(".new")
        new.write_text(json.dumps(results, indent=1))
        new.replace(options.results)

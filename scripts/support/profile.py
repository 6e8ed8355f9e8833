"""What MXNet's profiler counts."""

from __future__ import annotations

import json
import os
import tempfile
from functools import lru_cache
from typing import Any, Callable

import mxnet as mx


@lru_cache(maxsize=None)
def _folder() -> tempfile.TemporaryDirectory:
    """Return a folder that is deleted when the process ends."""
    return tempfile.TemporaryDirectory(prefix="mxmp-profile-")


def operators(run: Callable[[], Any]) -> dict[str, tuple[int, float]]:
    """Return how often MXNet runs each operator in ``run``, and milliseconds in all; frees and waits are none."""
    options = {"profile_symbolic": True, "profile_imperative": True, "aggregate_stats": True}
    # MXNet deletes this file, and a thread of its own writes it anew at any time.
    mx.profiler.set_config(filename=os.path.join(_folder().name, "profile.json"), **options)
    mx.nd.waitall()
    mx.profiler.set_state("run")
    run()
    mx.nd.waitall()
    mx.profiler.set_state("stop")
    found = json.loads(mx.profiler.dumps(reset=True, format="json"))["Time"].get("operator", {})
    waits = ("DeleteVariable", "WaitForVar")
    return {name: (row["Count"], row["Total"]) for name, row in found.items() if name not in waits}

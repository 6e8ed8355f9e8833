"""Reads what MXNet's own profiler dumps: a Chrome trace of operators."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Iterator

from .kernels import kind_of_operator
from .profiled import Event

__all__ = ["read_trace"]

# The engine's own, between operators.
_ENGINE = {"WaitForVar", "DeleteVariable", "DeleteOperator"}


def read_trace(raw: dict[str, Any], path: str) -> list[Event]:
    """Every operator of a dump; the asynchronous twins of its events, and calls of MXNet's C interface, left out.

    Raises
    ------
    ValueError
        There are no operators in it.
    """
    found = list(_operators(raw["traceEvents"]))
    if not found:
        raise ValueError(
            f"{path!r} holds no operators: record with mx.profiler.set_config(profile_all=True, "
            "aggregate_stats=True, ...), set_state('run'), and after mx.nd.waitall() set_state('stop') and dump()"
        )
    return found


def _operators(events: list[dict]) -> Iterator[Event]:
    devices = {
        event["pid"]: event["args"]["name"]
        for event in events
        if event.get("ph") == "M" and event.get("name") == "process_name"
    }
    open_since: dict[tuple, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") != "operator" or event["name"] in _ENGINE or event["ph"] not in "BE":
            continue
        key = event["pid"], event["tid"], event["name"]
        if event["ph"] == "B":
            open_since[key].append(event["ts"])
        elif open_since[key]:
            seconds = (event["ts"] - open_since[key].pop()) / 1e6
            device = devices.get(event["pid"], str(event["pid"]))
            yield Event(event["name"], event["name"], kind_of_operator(event["name"]), seconds, device)

"""The file of a plan: JSON that a person reads, with a line for each operator."""

from __future__ import annotations

import errno
import json
import os
from typing import Any

from ..files import replacing
from ..policy import Policy
from ..wrong_files import kind_of, near_name
from .tuned import Tuned, texts

FORMAT = "mxmp-plan-1"


def write(path: str | os.PathLike, text: str) -> None:
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write(text)


def read(path: str | os.PathLike) -> dict[str, Any]:
    """Return what ``parsed`` returns for a file; an error names it."""
    try:
        with open(path, encoding="utf-8") as file:
            return parsed(file.read())
    except FileNotFoundError as error:
        what = f"{error.strerror}; expected a precision plan{near_name(os.fspath(path), '.json')}"
        raise FileNotFoundError(errno.ENOENT, what, os.fspath(path)) from error
    except ValueError as error:
        other = kind_of(os.fspath(path), "a precision plan")
        why = f"not a precision plan as Plan.save writes it; {other}" if other else error
        raise ValueError(f"{os.fspath(path)!r}: {why}") from error


def text_of(plan: Any) -> str:
    head: dict[str, Any] = {
        "format": FORMAT,
        "policy": str(plan.policy),
        "device": plan.device,
        "low_variables": sorted(plan.low_variables),
        "unmatched": list(plan.unmatched),
    }
    if plan.blocks:
        head["blocks"] = list(plan.blocks)
    if plan.tuned is not None:
        head["tuned"] = plan.tuned.to_dict()
    dtypes = {True: plan.policy.compute, False: "float32"}
    rows = [json.dumps([n, d.op, dtypes[d.low], d.reason]) for n, d in plan.decisions.items()]
    operators = ",\n  ".join(rows)
    return json.dumps(head, indent=1)[:-2] + f',\n "operators": [\n  {operators}\n ]\n}}\n'


def parsed(text: str) -> dict[str, Any]:
    """Return the fields of the plan that ``text_of`` wrote, each decision as a tuple; ``ValueError`` for other text."""
    try:
        raw = json.loads(text)
        given = raw.get("format") if isinstance(raw, dict) else None
        if given != FORMAT:
            raise ValueError(f"expected an object with the format {FORMAT!r}, got {given!r}")
        (policy,) = map(Policy.parse, texts([raw["policy"]]))
        dtypes = {policy.compute: True, "float32": False}
        rows = [texts(row) for row in raw["operators"]]
        odd = next((dtype for *_, dtype, _ in rows if dtype not in dtypes), None)
        if odd is not None:
            raise ValueError(f"the dtype of an operator is {' or '.join(map(repr, dtypes))}, got {odd!r}")
        decisions = {name: (op, dtypes[dtype], why) for name, op, dtype, why in rows}
        if len(decisions) != len(rows) or raw["device"] not in ("cpu", "gpu"):
            raise ValueError("a name stands in it twice, or its device is unknown")
        return {
            "policy": policy,
            "device": raw["device"],
            "decisions": decisions,
            "low_variables": frozenset(texts(raw["low_variables"])),
            "unmatched": texts(raw["unmatched"]),
            "tuned": Tuned.from_dict(raw["tuned"]) if "tuned" in raw else None,
            "blocks": texts(raw.get("blocks", [])),
        }
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"not a precision plan as Plan.save writes it ({why})") from error

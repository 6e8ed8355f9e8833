"""Reports on disk: JSON with the name of its format."""

from __future__ import annotations

import json
import os
from typing import Any, Callable, Mapping

from ...files import replacing

__all__ = ["read_report", "write_report"]


def write_report(path: str, form: str, fields: Mapping[str, Any]) -> None:
    """Write a report's fields; the file appears whole or not at all."""
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        json.dump({"format": form, **fields}, file, indent=1)
        file.write("\n")


def read_report(path: str, forms: Mapping[str, Callable[[dict], Any]]) -> Any:
    """Read a report of one of ``forms``, each with what makes it from its fields.

    Raises
    ------
    ValueError
        The file holds none of them.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read()
    try:
        raw = json.loads(text)
        make = forms[raw.pop("format")]
        return make(raw)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{os.fspath(path)!r} is no report that was saved by mxmp ({', '.join(forms)}): "
            f"{type(error).__name__}: {error}"
        ) from error

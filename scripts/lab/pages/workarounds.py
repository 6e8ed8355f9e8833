"""The manual's page of the workarounds for kernels, from their table."""

from __future__ import annotations

from typing import Any, Iterator

from support.left_out import TESTS
from support.options import parse
from support.pages import filled, table
from support.results import DOCS, FOLDER, read

from mxmp.kernels.table import WORKAROUNDS

_HEAD = "name | dtypes | what is wrong | where | without it | MXNet | test"
_EFFECTS = {"fails": "an error, or the process ends", "wrong": "wrong numbers", "slow": "slower"}


def main(arguments: list[str] | None = None) -> None:
    parse(__doc__, arguments)
    (DOCS / "workarounds.md").write_text(render(), encoding="utf-8")


def render() -> str:
    """Return the page in Markdown: a table for each device."""
    rows = {device: list(_rows(device)) for device in ("cpu", "gpu")}
    return filled(__file__, **{device: table(_HEAD, found) if found else "" for device, found in rows.items()})


def _rows(device: str) -> Iterator[tuple[Any, ...]]:
    needed = read(FOLDER / "workarounds.json")
    for row in WORKAROUNDS:
        if device in row.devices:
            test = TESTS[row.name].rpartition("::")[2]
            yield (
                f"`{row.name}`" + (" (optional)" if row.optional else ""),
                ", ".join(row.dtypes),
                row.fault,
                row.source,
                _EFFECTS[row.effect],
                _versions(row.name, needed) if device == "cpu" else "",
                f"`{test}`",
            )


def _versions(name: str, needed: dict[str, dict[str, bool]]) -> str:
    """Return in which versions of MXNet the fault was seen, by name; empty where none was tried."""
    tried = [version for version in needed if name in needed[version]]
    seen = [version for version in tried if needed[version][name]]
    if seen == tried:
        return "all" if tried else ""
    first, last = seen[0], seen[-1]
    return f"since {first}" if last == tried[-1] else f"{first} to {last}"

"""Result files: JSON that a run which was ended goes on with, a line for each result."""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import json
import os
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Sequence

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [ROOT / "scripts", ROOT / "scripts" / "lab"]  # what their processes need on PYTHONPATH
DOCS = ROOT / "docs"
FOLDER = ROOT / "scripts" / "lab" / "results"  # of all that was measured


def read(path: Path) -> dict[str, Any]:
    """Return the results of a file by name; empty where there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def carried_on(out: str, todo: Iterable[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Return a result for each item of ``todo``: what names it, and what its function returns. New ones are printed.
    ``out`` is a file of JSON lines that keeps them, and goes on where an earlier run ended; empty for no file."""
    path = Path(out) if out else None
    known = [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []
    for names, run in todo:
        if not any(names.items() <= each.items() for each in known):
            known.append({**names, **run()})
            print(json.dumps(known[-1]), flush=True)
            if path:
                with path.open("a") as file:
                    file.write(json.dumps(known[-1]) + "\n")
    return known


def write_lines(path: str, results: Iterable[dict[str, Any]]) -> None:
    """Write a list of results as JSON, a line for each; nothing for an empty path."""
    if path:
        Path(path).write_text("[\n" + ",\n".join(map(json.dumps, results)) + "\n]\n")


def write(path: Path, results: dict[str, Any], depth: int = 1) -> None:
    """Write the file completely or not at all; ``depth``: how many names deep a result stands."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(_text(results, depth, " " * (depth - 1)) + "\n", encoding="utf-8")
    os.replace(new, path)


def _text(value: Any, depth: int, indent: str) -> str:
    if not depth:
        return json.dumps(value)
    lines = [f"{indent}{json.dumps(name)}: {_text(each, depth - 1, indent + ' ')}" for name, each in value.items()]
    return "{\n" + ",\n".join(lines) + "\n" + indent[:-1] + "}"


@functools.lru_cache(maxsize=None)
def tree() -> str:
    """Name the code of ``mxmp/`` by a digest of its files."""
    found = hashlib.sha256()
    for path in sorted((ROOT / "mxmp").rglob("*.py")):
        found.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]


def chosen(names: Sequence[str], patterns: Sequence[str], what: str) -> list[str]:
    """Return the names that fit a pattern, all where there is none. Exits where a pattern fits no name."""
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise SystemExit(f"no {what} is called {pattern!r}; there are {', '.join(names[:5])}, ...")
    return [name for name in names if not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def in_parallel(
    one: Callable[[Any], Any], todo: Iterable[Any], jobs: int = 1, unit: str = "model"
) -> Iterator[tuple[Any, Any]]:
    """Yield each item with its result as they are done, ``jobs`` at a time, under a bar."""
    from tqdm import tqdm

    items = list(todo)
    with ThreadPool(max(jobs, 1)) as pool:
        yield from tqdm(pool.imap_unordered(lambda item: (item, one(item)), items), total=len(items), unit=unit)

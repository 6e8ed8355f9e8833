"""The manual's page of the rules of every operator, from their tables."""

from __future__ import annotations

from typing import Iterator

from support.options import parse
from support.pages import filled, table
from support.results import DOCS, read
from sweep.casts import RESULTS as CASTS

from mxmp.precision import missing_kernels, rule_table
from mxmp.precision.missing_kernels import MissingKernel
from mxmp.precision.rule import Kind, Need, Rule

_NEEDED = " (FP32 readers need it)"
_DEVICES = {"cpu": "a CPU", "gpu": "a GPU"}


def main(arguments: list[str] | None = None) -> None:
    parse(__doc__, arguments)
    (DOCS / "rules.md").write_text(render(), encoding="utf-8")


def render() -> str:
    """Return the page in Markdown: a table for each kind of rule, and one of the kernels that devices lack."""
    tables = {
        kind.value: table("operators | why", (_row(rule) for rule in rule_table.TABLE if rule.kind is kind))
        for kind in Kind
    }
    moved = [result["float16 gpu"]["bytes"] for result in read(CASTS).values() if "float16 gpu" in result]
    more = sum(new for _, new in moved) / sum(old for old, _ in moved) - 1
    cost = f"{100 * more:.2f} % in {len(moved)} networks in float16 on a GPU"
    return (
        filled(
            __file__,
            readers_cost=cost,
            missing=table("dtype, device | operators | why", dict.fromkeys(_missing())),
            **tables,
        ).rstrip()
        + "\n"
    )


def _row(rule: Rule) -> tuple[str, str]:
    exceptions = (
        f"`{' or '.join(each.values)}` as `{each.attr}`: {each.reason}{_NEEDED * bool(each.makes & Need.DISTANCE)}"
        for each in rule.when
    )
    needed = _NEEDED * (rule.makes & Need.DISTANCE or bool(rule.limits))
    return _code(rule.operators.split()), ". ".join([rule.reason + needed, *exceptions])


def _missing() -> Iterator[tuple[str, str, str]]:
    for (device, dtype), rows in missing_kernels.TABLE.items():
        for row in rows:
            yield f"{dtype}, {_DEVICES[device]}", _which(row), row.reason.replace("{", "`{").replace("}", "}`")


def _which(row: MissingKernel) -> str:
    """Return the operators of a row; of one about all others, in which section they are not."""
    names = _code(sorted(row.operators))
    return f"all but {names}" if row.all_others else names


def _code(names: list[str]) -> str:
    return " ".join(f"`{name}`" for name in names)

"""Command-line options from keywords, so that a tool says them once."""

from __future__ import annotations

import argparse
from typing import Any


def parse(doc: str | None, arguments: list[str] | None, positional: str = "", **options: Any) -> argparse.Namespace:
    """Parse ``--name value`` for each keyword ``name=default`` or ``name=(default, help, choices)``.

    The default gives the type: False is a flag, a list takes several values, and a type (or a list of one) stands for
    no default. ``positional``: the keyword that takes what comes without a name.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, option in options.items():
        given: tuple[Any, ...] = option if isinstance(option, tuple) else (option,)
        missing: tuple[Any, ...] = ("", None)
        default, text, choices = given + missing[len(given) - 1 :]
        first = default[0] if isinstance(default, list) and default else default
        more: dict[str, Any] = {"help": text or "(default: %(default)s)", "default": default}
        if isinstance(first, type):
            more["default"] = [] if name == positional else None
        if default is False:
            more["action"] = "store_true"
        else:
            more["type"] = first if isinstance(first, type) else str if isinstance(first, list) else type(first)
            more["choices"] = list(choices) if choices else None
        if isinstance(default, list):
            more["nargs"] = "*" if name == positional else "+"
        parser.add_argument(name if name == positional else f"--{name.replace('_', '-')}", **more)
    return parser.parse_args(arguments or [])

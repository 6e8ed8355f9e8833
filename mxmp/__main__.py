"""Command line: convert a checkpoint for inference, explain, find what is fast, and look inside.

python -m mxmp cast net-symbol.json net-0010.params net-float16 --device gpu
python -m mxmp explain net-symbol.json --shape data=1,3,224,224
python -m mxmp tune net-symbol.json --shape data=8,3,224,224 --out plan.json
python -m mxmp advise net-symbol.json --shape data=128,3,224,224 --device v100
python -m mxmp profile report.sqlite
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from reprlib import repr as shorten
from typing import Any, Callable

import mxnet as mx
from mxnet.ndarray import NDArray

from .diagnose import advise, explain, profile
from .diagnose.advising.gpus import GPUS
from .diagnose.explaining.report import Explanation
from .files import replacing_all
from .policy import Policy
from .precision.graph import check_shapes
from .symbolic import cast_symbol
from .symbolic.checkpoint import last_line, read_parameters, read_symbol, write_arrays, write_symbol
from .symbolic.parameters import check_parameters, halved
from .tuning import tune


def main(arguments: list[str] | None = None) -> int:
    """Run a command line; return the exit status: 0, or 2 with one line on stderr."""
    args = parser().parse_args(arguments)
    try:
        args.run(args)
    except (ValueError, OSError, ImportError, MemoryError, mx.MXNetError) as error:
        text = last_line(error) if isinstance(error, mx.MXNetError) else " ".join(str(error).splitlines())
        print(f"mxmp {args.command}: {text or type(error).__name__}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, with a subparser for each command."""
    top = argparse.ArgumentParser("python -m mxmp", description="Mixed precision for MXNet checkpoints.")
    commands = top.add_subparsers(dest="command", required=True)
    recipes = ", ".join(Policy.recipes())

    def add(run: Callable, purpose: str, policy: str = "", plan: bool = False) -> argparse.ArgumentParser:
        """Add the command that is called as the function ``run``; with ``policy``, its default, for a Symbol."""
        command = commands.add_parser(run.__name__[1:], help=purpose)
        command.set_defaults(run=run)
        if policy:
            command.add_argument("symbol", help="FP32 symbol, NAME-symbol.json")
            command.add_argument("--exclude", nargs="+", default=[], help="patterns of nodes that stay FP32")
            command.add_argument("--shape", nargs="+", default=[], metavar="NAME=N,C,H,W", help="input shapes")
            others = ", a policy string or a plan (.json)" if plan else " or a policy string"
            command.add_argument("--policy", default=policy, help=recipes + others)
        return command

    cast = add(_cast, "write a low-precision checkpoint for inference", "float16", plan=True)
    cast.add_argument("params", nargs="?", help="its parameters, NAME-0000.params")
    cast.add_argument("out", help="prefix of the files to write: OUT-symbol.json and OUT-0000.params")
    show = add(_explain, "say what each operator would compute in, and why", "float16", plan=True)
    show.add_argument("--nodes", action="store_true", help="one line per operator as well")
    find = add(_tune, "find the plan that is fast on this machine", "bfloat16")
    find.add_argument("--out", required=True, help="the plan to write, as JSON")
    find.add_argument("--inference", action="store_true", help="for a forward alone, not a training step")
    find.add_argument("--bytes", action="store_true", help="measure nothing: cast the fewest bytes")
    find.add_argument("--no-cache", action="store_true", help="neither read nor keep times of earlier runs")
    for command in (cast, show, find):
        command.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where it will run")

    shapes = add(_advise, "say which shapes miss the Tensor Cores", "float16")
    shapes.add_argument("--device", choices=tuple(GPUS), default="v100", help="on which GPU")
    read = add(_profile, "say what ran on Tensor Cores, from what Nsight Systems recorded")
    read.add_argument("file", help="what nsys export --type sqlite wrote")
    return top


def _cast(args: argparse.Namespace) -> None:
    symbol = read_symbol(args.symbol)
    low = cast_symbol(symbol, args.policy, exclude=args.exclude, ctx=mx.Context(args.device))
    params = _parameters(args.params, symbol, _shapes(args)) if args.params else {}
    written = halved(params, low)
    found = _explanation(symbol, args)
    files = [f"{args.out}-symbol.json"] + ([f"{args.out}-0000.params"] if args.params else [])
    with replacing_all(*files) as (symbol_file, *params_file):
        write_symbol(symbol_file, low, remove_amp_cast=False)
        for path in params_file:
            write_arrays(path, written)
    print(found)
    print(f"\nWrote {' and '.join(files)}")
    if args.params:
        before, after = (sum(v.size * v.dtype().itemsize for v in d.values()) for d in (params, written))
        print(f"Parameters: {before / 2**20:.1f} MiB -> {after / 2**20:.1f} MiB")


def _explain(args: argparse.Namespace) -> None:
    found = _explanation(read_symbol(args.symbol), args)
    print(found)
    if args.nodes:
        print()
        for node in found.nodes:
            more = f" [{', '.join(node.workarounds)}]" if node.workarounds else ""
            print(f"{node.dtype:<9} {node.op:<24} {node.name}: {node.reason}{more}")


def _explanation(symbol: mx.sym.Symbol, args: argparse.Namespace) -> Explanation:
    return explain(symbol, policy=args.policy, exclude=args.exclude, ctx=mx.Context(args.device), **_shapes(args))


def _tune(args: argparse.Namespace) -> None:
    symbol = read_symbol(args.symbol)
    shapes: dict[str, Any] = dict(_shapes(args))
    check_shapes(shapes, symbol.list_inputs())
    plan = tune(
        symbol,
        policy=args.policy,
        exclude=args.exclude,
        ctx=mx.Context(args.device),
        training=not args.inference,
        measure=not args.bytes,
        cache=not args.no_cache,
        **shapes,
    )
    plan.save(args.out)
    print(plan)
    print(f"\nWrote {args.out}")


def _advise(args: argparse.Namespace) -> None:
    symbol = read_symbol(args.symbol)
    found = advise(symbol, policy=args.policy, exclude=args.exclude, device=args.device, **_shapes(args))
    # A Symbol has the name of its last operator; the file has the network's.
    name = os.path.basename(args.symbol)
    print(replace(found, name=name[: -len("-symbol.json")] if name.endswith("-symbol.json") else name))


def _profile(args: argparse.Namespace) -> None:
    print(profile(args.file))


def _parameters(path: str, symbol: mx.sym.Symbol, shapes: dict[str, tuple]) -> dict[str, NDArray]:
    params = read_parameters(path)
    try:
        if not check_parameters(symbol, params, shapes):
            print("The sizes of the parameters could not be checked: give --shape for all inputs")
    except ValueError as error:
        raise ValueError(f"{path!r} does not fit the symbol: {error}") from error
    return params


def _shapes(args: argparse.Namespace) -> dict[str, tuple]:
    shapes = {}
    for text in args.shape:
        name, _, sizes = text.partition("=")
        numbers = [int(size) if size.strip().isdecimal() and len(size) < 20 else 0 for size in sizes.split(",")]
        if not name or 0 in numbers:
            raise ValueError(f"--shape {shorten(text)} is not NAME=N,C,H,W with positive numbers of at most 19 digits")
        shapes[name] = tuple(numbers)
    return shapes


if __name__ == "__main__":
    sys.exit(main())

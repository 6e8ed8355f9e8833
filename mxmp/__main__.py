"""Command line: convert a checkpoint for inference, explain, find what is fast, and look inside.

python -m mxmp cast net-symbol.json net-0010.params net-float16 --device gpu
python -m mxmp explain net-symbol.json --shape data=1,3,224,224
python -m mxmp tune net-symbol.json --shape data=8,3,224,224 --out plan.json
python -m mxmp optimize net-symbol.json net-0010.params data.npy net-fast
python -m mxmp advise net-symbol.json --shape data=128,3,224,224 --device v100 --save advice.json
python -m mxmp profile report.sqlite --save profile.json
python -m mxmp plot advice.json roofline.png
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from reprlib import repr as shorten
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from .diagnose import Advice, Profile, advise, explain, load, plot_profile, plot_roofline, profile
from .diagnose.advising.gpus import GPUS
from .diagnose.explaining.explain import check_shapes
from .files import read_json, replacing_all
from .inference import optimize_for_inference
from .policy import Policy
from .symbolic import cast_symbol
from .symbolic.checkpoint import write_arrays, write_symbol
from .symbolic.parameters import check_parameters, halved
from .tuning import tune


def main(arguments: list[str] | None = None) -> int:
    """Run a command line; returns the exit status: 0, or 2 with one line on stderr."""
    args = _parser().parse_args(arguments)
    try:
        args.run(args)
    except (ValueError, OSError, ImportError, MemoryError, mx.MXNetError) as error:
        text = _last_line(error) if isinstance(error, mx.MXNetError) else " ".join(str(error).splitlines())
        print(f"mxmp {args.command}: {text or type(error).__name__}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m mxmp", description="Mixed precision for MXNet checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    recipes = ", ".join(Policy.recipes())
    graph = argparse.ArgumentParser(add_help=False)
    graph.add_argument("symbol", help="FP32 symbol, NAME-symbol.json")
    graph.add_argument("--exclude", nargs="+", default=[], help="patterns of nodes that stay FP32")
    graph.add_argument("--shape", nargs="+", default=[], metavar="NAME=N,C,H,W", help="input shapes")
    common = argparse.ArgumentParser(add_help=False, parents=[graph])
    common.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where it will run")
    report = argparse.ArgumentParser(add_help=False)
    report.add_argument("--save", metavar="REPORT.json", help="write the report too, for plot")

    policy = argparse.ArgumentParser(add_help=False)
    policy.add_argument("--policy", default="float16", help=f"{recipes}, a policy string or a plan (.json)")
    cast = commands.add_parser("cast", parents=[common, policy], help="write a low-precision checkpoint for inference")
    cast.add_argument("params", nargs="?", help="its parameters, NAME-0000.params")
    cast.add_argument("out", help="prefix of the files to write: OUT-symbol.json and OUT-0000.params")
    cast.set_defaults(run=_cast)

    show = commands.add_parser(
        "explain", parents=[common, policy], help="say what each operator would compute in, and why"
    )
    show.add_argument("--nodes", action="store_true", help="one line per operator as well")
    show.set_defaults(run=_explain)

    plan = commands.add_parser("tune", parents=[common], help="find the plan that is fast on this machine")
    plan.add_argument("--policy", default="bfloat16", help=f"{recipes} or a policy string")
    plan.add_argument("--out", required=True, help="the plan to write, as JSON")
    plan.add_argument("--inference", action="store_true", help="for a forward alone, not a training step")
    plan.add_argument("--bytes", action="store_true", help="measure nothing: cast the fewest bytes")
    plan.add_argument("--no-cache", action="store_true", help="neither read nor keep times of earlier runs")
    plan.set_defaults(run=_tune)

    fast = commands.add_parser("optimize", help="write the fastest graph for inference on this CPU that is still right")
    fast.add_argument("symbol", help="FP32 symbol, NAME-symbol.json")
    fast.add_argument("params", help="its parameters, NAME-0000.params")
    fast.add_argument(
        "data", help="calibration data, .npy: batches of the first input, (batch, row, ...); or .npz by name"
    )
    fast.add_argument("out", help="prefix of the files to write: OUT-symbol.json and OUT-0000.params")
    fast.add_argument("--dtypes", nargs="*", default=["int8", "bfloat16"], help="allowed beside FP32")
    fast.add_argument(
        "--max-drop", type=float, default=0.01, help="share of top answers that may be others than FP32's"
    )
    fast.add_argument("--min-sqnr", type=float, default=20.0, help="least signal to noise ratio of the outputs, in dB")
    fast.add_argument("--save", metavar="REPORT.json", help="write the report too")
    fast.add_argument("--plot", metavar="PICTURE", help="draw time against accuracy: .png, .svg or .pdf")
    fast.set_defaults(run=_optimize)

    tell = commands.add_parser("advise", parents=[graph, report], help="say which shapes miss the Tensor Cores")
    tell.add_argument("--policy", default="float16", help=f"{recipes} or a policy string")
    tell.add_argument("--device", choices=tuple(GPUS), default="v100", help="on which GPU")
    tell.set_defaults(run=_advise)

    read = commands.add_parser("profile", parents=[report], help="say what a profiler's file tells of Tensor Cores")
    read.add_argument("file", help="Nsight Systems' SQLite, Nsight Compute's CSV, or what mx.profiler.dump() wrote")
    read.set_defaults(run=_profile)

    draw = commands.add_parser("plot", help="draw the picture of a saved report")
    draw.add_argument("report", help="what --save wrote")
    draw.add_argument("picture", help="the file to write: .png, .svg or .pdf")
    draw.set_defaults(run=_plot)
    return parser


def _cast(args: argparse.Namespace) -> None:
    symbol = _load_symbol(args.symbol)
    low = cast_symbol(symbol, args.policy, exclude=args.exclude, ctx=mx.Context(args.device))
    params = _load_params(args.params, symbol, _shapes(args)) if args.params else {}
    written = halved(params, low)
    found = explain(symbol, policy=args.policy, exclude=args.exclude, ctx=mx.Context(args.device), **_shapes(args))
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
    found = explain(
        _load_symbol(args.symbol),
        policy=args.policy,
        exclude=args.exclude,
        ctx=mx.Context(args.device),
        **_shapes(args),
    )
    print(found)
    if args.nodes:
        print()
        for node in found.nodes:
            more = f" [{', '.join(node.workarounds)}]" if node.workarounds else ""
            print(f"{node.dtype:<9} {node.op:<24} {node.name}: {node.reason}{more}")


def _tune(args: argparse.Namespace) -> None:
    symbol = _load_symbol(args.symbol)
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


def _optimize(args: argparse.Namespace) -> None:
    symbol = _load_symbol(args.symbol)
    params = _load_params(args.params, symbol, {})
    found = optimize_for_inference(
        symbol,
        _load_batches(args.data, [name for name in symbol.list_arguments() if f"arg:{name}" not in params]),
        dtypes=args.dtypes,
        max_drop=args.max_drop,
        min_sqnr=args.min_sqnr,
        arg_params={key[4:]: value for key, value in params.items() if key.startswith("arg:")},
        aux_params={key[4:]: value for key, value in params.items() if key.startswith("aux:")},
    )
    files = found.export(args.out)
    if args.save:
        found.report.save(args.save)
    if args.plot:
        found.report.plot(args.plot)
    print(found.report)
    print(f"\nWrote {' and '.join(files)}")


def _load_batches(path: str, inputs: list[str]) -> list[dict[str, np.ndarray]]:
    """Return the batches of a file, whose arrays have one axis more than an input: the number of the batch."""
    try:
        raw = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path!r} holds no arrays of NumPy: expected .npy or .npz ({error})") from error
    arrays = {inputs[0]: raw} if isinstance(raw, np.ndarray) else dict(raw.items())
    if not arrays or any(array.ndim < 2 for array in arrays.values()):
        raise ValueError(f"{path!r} holds no batches: expected arrays of shape (batches, rows, ...)")
    if len({len(array) for array in arrays.values()}) > 1:
        raise ValueError(f"{path!r}: its arrays have different numbers of batches")
    count = min(map(len, arrays.values()))
    return [{name: array[number] for name, array in arrays.items()} for number in range(count)]


def _advise(args: argparse.Namespace) -> None:
    found = advise(
        _load_symbol(args.symbol), policy=args.policy, exclude=args.exclude, device=args.device, **_shapes(args)
    )
    _print(found, args.save)


def _profile(args: argparse.Namespace) -> None:
    _print(profile(args.file), args.save)


def _print(found: Advice | Profile, path: str | None) -> None:
    if path:
        found.save(path)
    print(found)
    if path:
        print(f"\nWrote {path}")


def _plot(args: argparse.Namespace) -> None:
    found = load(args.report)
    if isinstance(found, Advice):
        plot_roofline(found, args.picture)
    else:
        plot_profile(found, args.picture)
    print(f"Wrote {args.picture}")


def _load_symbol(path: str) -> mx.sym.Symbol:
    if not os.path.isfile(path):
        raise ValueError(f"no file {path!r}; expected a Symbol in JSON, NAME-symbol.json")
    try:
        _check_graph(read_json(path))
        symbol = mx.sym.load(path)
        _check_outputs(symbol)
        symbol.infer_type_partial()  # counts the inputs of each operator
        return symbol
    except (mx.MXNetError, ValueError) as error:
        raise ValueError(f"{path!r} is no Symbol in JSON, or it is damaged: {_last_line(error)}") from error


def _check_graph(raw: Any) -> None:
    """Raise ``ValueError`` if it is no graph: MXNet's own reader may answer a broken file with garbage, or crash."""
    nodes, heads = _list(raw, "nodes"), _list(raw, "heads")
    if not nodes or not heads:
        raise ValueError(f"it has no {'heads' if nodes else 'nodes'}")
    for number, node in enumerate(nodes):
        if not isinstance(node, dict) or not all(isinstance(node.get(key), str) for key in ("op", "name")):
            raise ValueError(f"node {number} has no op or no name")
        _check_places(_list(node, "inputs"), number)
        _check_places([[place] for place in _list(node, "control_deps")], number)
        for body in _list(node, "subgraphs"):
            _check_graph(body)
    _check_places(heads, len(nodes))
    _check_places([[place] for place in _list(raw, "arg_nodes")], len(nodes))


def _check_outputs(symbol: mx.sym.Symbol) -> None:
    """Raise ``ValueError`` if an operator reads an output that another does not have, which MXNet does not notice."""
    there = {(node, output) for node, output, *_ in json.loads(symbol.get_internals().tojson())["heads"]}
    graph = json.loads(symbol.tojson())
    for entry in [*graph["heads"], *(entry for node in graph["nodes"] for entry in node["inputs"])]:
        if tuple(entry[:2]) not in there:
            raise ValueError(f"it reads output {entry[1]} of node {entry[0]}, which has fewer")


def _list(raw: Any, key: str) -> list:
    found = raw.get(key, []) if isinstance(raw, dict) else None
    if not isinstance(found, list):
        raise ValueError(f"it has no list of {key}, but {shorten(raw if found is None else found)}")
    return found


def _check_places(entries: list, count: int) -> None:
    """Raise ``ValueError`` unless each entry begins with the number of one of the first ``count`` nodes."""
    for entry in entries:
        places = entry if isinstance(entry, list) and entry else [-1]
        if not all(type(place) is int and 0 <= place < 2**31 for place in places) or places[0] >= count:
            raise ValueError(f"{shorten(entry)} is no place in it: expected the number of a node below {count} first")


def _load_params(path: str, symbol: mx.sym.Symbol, shapes: dict[str, tuple]) -> dict[str, NDArray]:
    if not os.path.isfile(path):
        raise ValueError(f"no file {path!r}; expected parameters, NAME-0000.params")
    try:
        params = mx.nd.load(path)
    except mx.MXNetError as error:
        raise ValueError(f"{path!r} holds no MXNet parameters, or it is damaged: {_last_line(error)}") from error
    if not isinstance(params, dict) or not all(k.startswith(("arg:", "aux:")) for k in params):
        raise ValueError(f"{path!r} holds no checkpoint: expected names such as 'arg:conv0_weight'; use net.export()")
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


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[-1]


if __name__ == "__main__":
    sys.exit(main())

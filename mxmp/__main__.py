"""Command line: convert a checkpoint for inference, explain, find what is fast, look inside, and start a job.

python -m mxmp cast net-symbol.json net-0010.params net-float16 --device gpu
python -m mxmp explain net-symbol.json --shape data=1,3,224,224
python -m mxmp tune net-symbol.json --shape data=8,3,224,224 --out plan.json
python -m mxmp optimize net-symbol.json net-0010.params data.npy net-fast
python -m mxmp audit net-symbol.json net-0010.params batch.npz
python -m mxmp verify train.py --steps 20
python -m mxmp advise net-symbol.json --shape data=128,3,224,224 --device v100
python -m mxmp profile report.sqlite
python -m mxmp launch --workers 2 -- python train.py
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import zipfile
import zlib
from dataclasses import replace
from inspect import signature
from reprlib import repr as shorten
from typing import Any, Callable, NoReturn, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from . import __version__, diagnose
from .diagnose import advise, audit, explain, plot_verification, profile, verify
from .diagnose.advising.gpus import GPUS
from .diagnose.explaining import Explanation
from .host.callbacks import last_line
from .host.files import check_writable, replacing_all
from .host.pictures import picture_format
from .inference import optimize_for_inference
from .inference.runner import CandidateError
from .launch import launch, launch_horovod
from .messages.files import kind_of, near_name
from .messages.shapes import check_shapes
from .messages.text import did_you_mean
from .policy import Policy
from .precision import safe_sums
from .symbolic import cast_symbol
from .symbolic.checkpoint import write_arrays, write_symbol
from .symbolic.parameters import cast_parameters, check_parameters
from .symbolic.reading import read_parameters, read_symbol
from .tuning import tune

PROGRAM = "python -m mxmp"
_ELSEWHERE = {"convert": "cast", "--dtype": "--policy", "--output": "--out", "--gpu": "--device", "--cpu": "--device"}


def main(arguments: list[str] | None = None) -> int:
    """Run a command line (None: the process's own); return its status: 0, or 2 after an error, told in one line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    cut = arguments.index("--") if arguments[:1] == ["verify"] and "--" in arguments else len(arguments)
    args = parser().parse_args(arguments[:cut], argparse.Namespace(arguments=arguments[cut + 1 :]))
    try:
        status = args.run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print(f"{args.prog}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except (ValueError, OSError, ImportError, MemoryError, RuntimeError, CandidateError) as error:
        # MXNetError is a RuntimeError.
        text = last_line(error) if isinstance(error, mx.MXNetError) else " ".join(str(error).splitlines())
        if isinstance(error, OSError) and error.filename:
            text = f"{error.strerror}: {error.filename!r}"  # without "[Errno 2]"
        print(f"{args.prog}: {text or type(error).__name__}", file=sys.stderr)
        return 2
    return status or 0


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as those of the commands are, and name what was meant."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown options here, where the command's own are known, not in the parser of all commands."""
        known, others = super().parse_known_args(args, namespace)
        wrong = next((each for each in others if each.startswith("-")), "")
        if others and self.prog != PROGRAM:
            options = re.findall(r"--[\w-]+", self.format_help())
            meant = did_you_mean(_ELSEWHERE.get(wrong, wrong.partition("=")[0]), options)
            self.error(f"unrecognized arguments: {' '.join(others)}{meant}")
        return known, others

    def error(self, message: str) -> NoReturn:
        takes_several = " ...]" in self.format_usage()
        if message.startswith("the following arguments are required") and takes_several:
            message += "; an option that takes several values, such as --shape, goes behind them"
        chosen = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if chosen:
            meant = did_you_mean(_ELSEWHERE.get(chosen[1], chosen[1]), re.findall(r"[\w-]+", chosen[2]))
            in_python = f"; that is for Python: mxmp.diagnose.{chosen[1]}" if chosen[1] in diagnose.__all__ else ""
            message += meant or in_python
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    top = _Parser(PROGRAM, description="Mixed precision for MXNet: checkpoints, plans, and jobs on this machine.")
    top.add_argument("--version", action="version", version=f"mxmp {__version__}, with MXNet {mx.__version__}")
    commands = top.add_subparsers(dest="command", required=True)
    recipes = ", ".join(Policy.recipes())

    def add(run: Callable, purpose: str, policy: str = "", plan: bool = False) -> argparse.ArgumentParser:
        # ``policy`` is the default of --policy; "" for a command without --policy, symbol, --exclude and --shape.
        name = run.__name__[1:]
        examples = [line for line in (__doc__ or "").splitlines() if line.startswith(f"{PROGRAM} {name} ")]
        command = commands.add_parser(
            name, help=purpose, description=purpose, epilog="\n".join(["example:", *examples]) if examples else None
        )
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        command.set_defaults(run=run, prog=command.prog)
        if policy:
            command.add_argument("symbol", metavar="SYMBOL", help="FP32 symbol, NAME-symbol.json")
            several: Any = {"nargs": "+", "action": "extend", "default": []}  # the option may be given again
            command.add_argument("--exclude", metavar="PATTERN", help="patterns of nodes that stay FP32", **several)
            command.add_argument("--shape", metavar="NAME=N,C,H,W", help="input shapes", **several)
            others = ", a policy string or a plan (.json)" if plan else " or a policy string"
            command.add_argument(
                "--policy", default=policy, metavar="TEXT", help=f"{recipes}{others} (default: %(default)s)"
            )
        return command

    cast = add(_cast, "write a low-precision checkpoint for inference", "float16", plan=True)
    cast.add_argument(
        "params", nargs="?", metavar="PARAMS", help="its parameters, NAME-0000.params; without them only the symbol"
    )
    cast.add_argument("out", metavar="OUT", help="prefix of the files to write: OUT-symbol.json and OUT-0000.params")
    show = add(_explain, "say what each operator would compute in, and why", "float16", plan=True)
    show.add_argument("--nodes", action="store_true", help="one line per operator as well")
    find = add(_tune, "find the plan that is fast on this machine", "bfloat16")
    find.add_argument("--out", required=True, metavar="PLAN.json", help="the plan to write, as JSON")
    find.add_argument("--inference", action="store_true", help="for a forward alone, not a training step")
    find.add_argument("--optimizer", default="sgd", metavar="NAME", help="of the training (default: %(default)s)")
    find.add_argument("--bytes", action="store_true", help="measure nothing: cast the fewest bytes")
    find.add_argument("--no-cache", action="store_true", help="neither read nor keep times of earlier runs")
    for command in (cast, find):
        command.add_argument("--force", action="store_true", help="replace files that exist")
    for command in (cast, show, find):
        command.add_argument(
            "--device", choices=("cpu", "gpu"), default="cpu", help="where it will run (default: %(default)s)"
        )

    fast = add(_optimize, "write the fastest graph for inference on this CPU that is still right")
    fast.add_argument("symbol", metavar="SYMBOL", help="FP32 symbol, NAME-symbol.json")
    fast.add_argument("params", metavar="PARAMS", help="its parameters, NAME-0000.params")
    fast.add_argument(
        "data",
        metavar="DATA",
        help="calibration data, .npy: batches of the first input, (batch, row, ...); .npz by name",
    )
    fast.add_argument("out", metavar="OUT", help="prefix of the files to write: OUT-symbol.json and OUT-0000.params")
    fast.add_argument(
        "--dtypes",
        nargs="*",
        metavar="NAME",
        default=["int8", "bfloat16"],
        help="allowed besides FP32; or float16, for a GPU (default: int8 bfloat16)",
    )
    fast.add_argument(
        "--max-drop",
        type=float,
        metavar="SHARE",
        default=0.01,
        help="share of top answers, 0 to 1, that may be others than FP32's (default: %(default)s)",
    )
    fast.add_argument(
        "--min-sqnr",
        type=float,
        metavar="DB",
        default=20.0,
        help="least signal to noise ratio of each output column, in dB (default: %(default)s)",
    )
    fast.add_argument("--force", action="store_true", help="replace files that exist")
    fast.add_argument("--save", metavar="REPORT.json", help="write the report too")
    fast.add_argument("--plot", metavar="PICTURE", help="draw time against accuracy: .png, .svg or .pdf")

    look = add(
        _audit, "say which operators in low precision change what it computes from a batch", "float16", plan=True
    )
    look.add_argument("params", metavar="PARAMS", help="its parameters, NAME-0000.params")
    look.add_argument(
        "data", metavar="DATA", help="batches as for optimize, labels too (.npz by name); the first is used"
    )
    look.add_argument(
        "--worst", type=int, default=10, metavar="N", help="how many operators to name at most (default: %(default)s)"
    )

    check = add(_verify, "say whether a ported training script still does the same")
    check.add_argument(
        "--steps", type=int, default=20, metavar="N", help="how many updates to compare (default: %(default)s)"
    )
    check.add_argument("--seed", type=int, default=0, metavar="N", help="of all random numbers (default: %(default)s)")
    check.add_argument("--plot", metavar="PICTURE", help="draw loss and gradients: .png, .svg or .pdf")
    check.add_argument("script", metavar="SCRIPT", help="the script; its own arguments stand at the end, after --")

    shapes = add(_advise, "say which shapes miss the Tensor Cores", "float16")
    shapes.add_argument("--device", choices=tuple(GPUS), default="v100", help="on which GPU (default: %(default)s)")
    read = add(_profile, "say what ran on Tensor Cores, from what Nsight Systems recorded")
    read.add_argument("file", metavar="FILE", help="what nsys export --type sqlite wrote")

    job = add(_launch, "run a training script as a distributed job on this machine")
    job.add_argument("--workers", type=int, default=2, metavar="N", help="how many (default: %(default)s)")
    job.add_argument("--servers", type=int, default=1, metavar="N", help="how many (default: %(default)s)")
    job.add_argument("--timeout", type=float, metavar="SECONDS", help="for the whole job (default: no limit)")
    job.add_argument("--horovod", action="store_true", help="workers of Horovod (Gloo): no scheduler, no servers")
    job.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="PROGRAM", help="what every worker runs, after --: python train.py"
    )
    return top


def _cast(args: argparse.Namespace) -> None:
    _check_prefix(args.out)
    files = [f"{args.out}-symbol.json"] + ([f"{args.out}-0000.params"] if args.params else [])
    _check_outputs(files, args.force, args.symbol, args.params)
    symbol = read_symbol(args.symbol)
    low = cast_symbol(symbol, args.policy, exclude=args.exclude, ctx=mx.Context(args.device))
    params = _parameters(args.params, symbol, _shapes(args)) if args.params else {}
    written = cast_parameters(params, low)
    found = _explanation(symbol, args)
    with replacing_all(*files) as (symbol_file, *params_file):
        write_symbol(symbol_file, low, remove_amp_cast=False)
        for path in params_file:
            write_arrays(path, written)
    print(found)
    print(f"\nWrote {' and '.join(files)}")
    if args.device == "gpu" and any(node.reason == safe_sums.REASON for node in found.nodes):
        print(f"Set {safe_sums.VARIABLE}=1 where it runs too: without it, its softmax and LayerNorm sum in float16")
    if args.params:
        before, after = (sum(v.size * v.dtype().itemsize for v in d.values()) for d in (params, written))
        print(f"Parameters: {_size(before)} -> {_size(after)}")


def _explain(args: argparse.Namespace) -> None:
    found = _explanation(read_symbol(args.symbol), args)
    print(found)
    if args.nodes:
        print()
        for node in found.nodes:
            more = f" [{', '.join(node.workarounds)}]" if node.workarounds else ""
            print(f"{node.dtype:<9} {node.op:<24} {node.name}: {node.reason}{more}")


def _explanation(symbol: mx.sym.Symbol, args: argparse.Namespace) -> Explanation:
    found = explain(
        symbol, policy=args.policy, exclude=args.exclude, ctx=mx.Context(args.device), **_keywords(args, explain)
    )
    return Explanation(tuple(replace(graph, name=_name_of(args.symbol)) for graph in found.graphs))


def _name_of(path: str) -> str:
    """Return the network's name in reports, that of its file: a Symbol has the name of its last operator."""
    name = os.path.basename(path)
    return name[: -len("-symbol.json")] if name.endswith("-symbol.json") else name


def _size(count: int) -> str:
    """Return a number of bytes with its unit: ``"97.5 MiB"``, ``"3.1 KiB"``."""
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def _tune(args: argparse.Namespace) -> None:
    _check_outputs([args.out], args.force, args.symbol)
    symbol = read_symbol(args.symbol)
    shapes: dict[str, Any] = _keywords(args, tune)
    check_shapes(shapes, symbol.list_inputs())
    plan = tune(
        symbol,
        policy=args.policy,
        exclude=args.exclude,
        ctx=mx.Context(args.device),
        training=not args.inference,
        optimizer=args.optimizer,
        measure=not args.bytes,
        cache=not args.no_cache,
        **shapes,
    )
    plan.save(args.out)
    print(plan)
    print(f"\nWrote {args.out}")


def _optimize(args: argparse.Namespace) -> None:
    _check_prefix(args.out)
    outputs = [f"{args.out}-symbol.json", f"{args.out}-0000.params", args.save, args.plot]
    _check_outputs(outputs, args.force, args.symbol, args.params, args.data)
    if args.plot:
        picture_format(args.plot)
    symbol = read_symbol(args.symbol)
    params = _parameters(args.params, symbol, {})
    found = optimize_for_inference(
        symbol,
        _batches(args.data, [name for name in symbol.list_arguments() if f"arg:{name}" not in params]),
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


def _check_prefix(out: str) -> None:
    """Raise if the prefix of files to write is a file: the parameters, as the last argument was forgotten."""
    if os.path.isfile(out) or out.endswith((".params", ".json")):
        raise ValueError(f"OUT is {out!r}, a file: expected the prefix of the files to write, behind PARAMS")


def _check_outputs(outputs: Sequence[str | None], force: bool, *inputs: str | None) -> None:
    """Raise, before a long computation, if an output is an input, occurs twice, cannot be written or, unless ``force``,
    exists; skip None."""
    read = {os.path.realpath(path) for path in inputs if path}
    written: set[str] = set()
    for path in filter(None, outputs):
        real = os.path.realpath(path)
        if real in read:
            raise ValueError(f"{path!r} is read and would be overwritten: give what is written another name")
        if real in written:
            raise ValueError(f"{path!r} would be written twice: give each file that is written a name of its own")
        written.add(real)
        check_writable(path)
        if os.path.isfile(path) and not force:
            raise ValueError(f"{path!r} exists: give what is written another name, or --force to replace it")


def _batches(path: str, inputs: list[str]) -> list[dict[str, np.ndarray]]:
    """Return the batches of a .npy or .npz file, as dicts by input; an array has the shape (batches, rows, ...).
    A .npy file is for the first of ``inputs``, the Symbol's. The names in an .npz file are not checked."""
    if not inputs:
        raise ValueError(f"nothing reads the batches in {path!r}: the file of parameters has all the symbol's inputs")
    try:
        with open(path, "rb") as file:
            raw = np.load(file, allow_pickle=False)
            arrays = {inputs[0]: raw} if isinstance(raw, np.ndarray) else dict(raw.items())
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        if not os.path.exists(path):
            raise ValueError(f"no file {path!r}; expected batches, .npy or .npz{near_name(path, '.npy')}") from error
        why = kind_of(path, "array") or error
        raise ValueError(f"{path!r} holds no arrays of NumPy: expected .npy or .npz ({why})") from error
    if not arrays or any(array.ndim < 2 for array in arrays.values()):
        raise ValueError(f"{path!r} holds no batches: expected arrays of shape (batches, rows, ...)")
    if len({len(array) for array in arrays.values()}) > 1:
        raise ValueError(f"{path!r}: its arrays have different numbers of batches")
    count = min(map(len, arrays.values()))
    return [{name: array[number] for name, array in arrays.items()} for number in range(count)]


def _audit(args: argparse.Namespace) -> None:
    symbol = read_symbol(args.symbol)
    params = _parameters(args.params, symbol, _shapes(args))
    inputs = [name for name in symbol.list_arguments() if f"arg:{name}" not in params]
    batch = {name: mx.nd.array(array, dtype=array.dtype) for name, array in _batches(args.data, inputs)[0].items()}
    batch = {name: array.astype("float32") if array.dtype == np.float64 else array for name, array in batch.items()}
    how = {"policy": args.policy, "exclude": args.exclude, "worst": args.worst}
    print(audit(symbol, None, batch, params=params, **how))


def _advise(args: argparse.Namespace) -> None:
    symbol = read_symbol(args.symbol)
    found = advise(symbol, policy=args.policy, exclude=args.exclude, device=args.device, **_keywords(args, advise))
    print(replace(found, name=_name_of(args.symbol)))


def _profile(args: argparse.Namespace) -> None:
    print(profile(args.file))


def _verify(args: argparse.Namespace) -> int:
    if args.plot:
        picture_format(args.plot)
    found = verify(args.script, args.steps, arguments=args.arguments, seed=args.seed)
    print(found)
    if args.plot and found.courses:
        plot_verification(found, args.plot)
    return found.status


def _launch(args: argparse.Namespace) -> int:
    program = args.program[args.program[:1] == ["--"] :]
    if args.horovod:
        return launch_horovod(program, args.workers, args.timeout)
    return launch(program, args.workers, args.servers, args.timeout)


def _parameters(path: str, symbol: mx.sym.Symbol, shapes: dict[str, tuple]) -> dict[str, NDArray]:
    """Return a file's arrays by names such as ``"arg:fc_weight"``, checked; print if shapes could not be checked."""
    params = read_parameters(path)
    try:
        if not check_parameters(symbol, params, shapes):
            print("The sizes of the parameters could not be checked: give --shape for all inputs")
    except ValueError as error:
        raise ValueError(f"{path!r} does not fit the symbol: {error}") from error
    return params


def _keywords(args: argparse.Namespace, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the shapes as keywords of ``function``, which has others."""
    shapes = _shapes(args)
    taken = shapes.keys() & signature(function).parameters.keys()
    if taken:
        raise ValueError(
            f"--shape cannot give {taken.pop()!r}, an argument of mxmp.{function.__name__}: rename the input"
        )
    return shapes


def _shapes(args: argparse.Namespace) -> dict[str, tuple]:
    """Return ``{"data": (1, 3, 224, 224)}`` for ``--shape data=1,3,224,224``."""
    shapes: dict[str, tuple] = {}
    for text in args.shape:
        name, _, sizes = text.partition("=")
        numbers = [int(size) if size.strip().isdecimal() and len(size) < 20 else 0 for size in sizes.split(",")]
        if not name or 0 in numbers:
            raise ValueError(
                f"--shape {shorten(text)} is not NAME=N,C,H,W with positive numbers of at most 19 digits, such as "
                "data=32,3,224,224"
            )
        if shapes.get(name, tuple(numbers)) != tuple(numbers):
            raise ValueError(f"--shape gives two shapes of {name}: {shapes[name]} and {tuple(numbers)}")
        shapes[name] = tuple(numbers)
    return shapes


if __name__ == "__main__":
    sys.exit(main())

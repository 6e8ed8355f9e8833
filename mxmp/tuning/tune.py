"""``tune``: the plan that is fast here, of those that are safe."""

from __future__ import annotations

import os
import warnings
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple

import mxnet as mx
from mxnet.gluon import Block, HybridBlock
from mxnet.ndarray import NDArray

from ..files import check_writable
from ..gluon.blocks import prefixes_of
from ..gluon.graphs import read_inputs, traced_alone
from ..kernels.fit import device_of
from ..kernels.padding import LargeInputs
from ..policy import Policy
from ..precision.casts import strip
from ..precision.graph import Graph, as_shape
from ..precision.plan import Plan, read_policy
from ..precision.tuned import Tuned
from .choices import Task, cast_bytes, shapes_of
from .clock import Arrays
from .cut import Costs
from .machine import cache_file, describe
from .search import BYTES, RULES, Search
from .table import Table, read, write

__all__ = ["tune"]


def tune(
    target: Block | mx.sym.Symbol,
    *inputs: Any,
    policy: str | Policy = "bfloat16",
    exclude: Iterable[str] = (),
    training: bool = True,
    measure: bool = True,
    ctx: mx.Context | None = None,
    cache: bool | str | os.PathLike = True,
    progress: bool = True,
    **shapes: Any,
) -> Plan:
    """The fastest plan of those that the rules call safe, for these shapes on this machine.

    Each operator and each cast is timed in its place in the network, forward and backward, once with all of it in
    FP32, once with all low that may be, and once with the matrix operators alone. A minimum cut of these costs is the
    assignment with the least time. At the end whole steps decide between that, the rules' plan, the one with the fewest
    bytes cast, and FP32, which wins where nothing is faster beyond the spread.

    ``target`` is left as it is: nothing of it runs, and what is timed are arrays of ``tune``'s own. Dropout is timed
    without drawing, so the random numbers that follow are those that would have followed without ``tune``; what a
    graph draws by other operators (``F.random.normal``) is drawn.

    Parameters
    ----------
    target : HybridBlock or Symbol
        In FP32 or converted; its shapes need not be known yet.
    *inputs : NDArray, or tuple or list of int
        For a block: what it will be called with, or its shapes; lists of them where the block takes lists.
    policy, exclude
        As for ``convert``. What the policy keeps in FP32 stays there.
    training : bool
        Whether a step is a forward and a backward, or a forward alone.
    measure : bool
        Without it nothing runs: the plan is the one whose casts move the fewest bytes, with every matrix operator low
        that may be. Bytes are not time: on a CPU it computes ReLU6's ``clip`` in bfloat16, which is right and slow.
    ctx : mxnet.Context, optional
        Where it will run (default: the current context).
    cache : bool or path
        Whether times are kept, or the folder for them (default: the user's cache folder). They hold for one machine,
        number of threads and build of MXNet. Where they cannot be read or written, ``tune`` warns and measures.
    progress : bool
        Show a bar on a terminal, where tqdm is installed.
    **shapes : tuple of int or NDArray
        For a Symbol: its inputs; for example ``data=(32, 3, 224, 224)``.

    Returns
    -------
    Plan
        ``print`` it, save it, give it to ``convert``, ``cast_symbol`` or ``Module`` for a policy.

    Raises
    ------
    TypeError
        ``target`` is neither.
    ValueError
        The shapes do not fit, the block cannot be traced, the policy cannot hold, or ``ctx`` is not there.
    ImportError
        ``pip install 'mxmp[tune]'`` is missing.
    """
    policy, plan = read_policy(policy, exclude)
    if plan is not None:
        raise ValueError(f"tune makes a Plan, and was given one: give it a policy, such as policy={str(policy)!r}")
    if isinstance(target, Block) and (shapes or not inputs):
        raise ValueError("give a block its inputs, or their shapes, in order: named inputs are for Symbols")
    ctx = ctx or mx.context.current_context()
    if measure and ctx.device_type == "gpu" and ctx.device_id >= mx.context.num_gpus():
        raise ValueError(f"{ctx} is not here to measure on: tune where it is, or with measure=False")
    if isinstance(target, mx.sym.Symbol):
        subject = _of_symbol(target, inputs, shapes)
    else:
        subject = _of_block(target, inputs, training)
    graph = subject.graph
    names = graph.to_symbol().list_inputs()
    unknown = sorted(set(subject.shapes) - set(names))
    if unknown:
        raise ValueError(f"there is no input {unknown[0]!r}: it has {', '.join(names[:5])}, ...")
    task = Task(
        graph,
        policy,
        device_of(ctx),
        parameters=subject.parameters,
        keep_output_names=subject.keep_output_names,
        slow_too=not measure,
    )
    sizes = shapes_of(graph, subject.shapes)
    if not measure:
        return replace(_fewest_bytes(task, sizes, training), blocks=subject.blocks)
    asked = subject.grad_req or {name: "write" for name in names if name not in subject.shapes}
    given = {name: shape for name, shape in subject.shapes.items() if name not in subject.values}
    machine = describe(ctx)
    file, known = _kept_times(machine, None if cache is True else cache) if cache else (None, {})
    table = Table(task, sizes, training, known)
    # A converted block knows the sizes of a call, a cast Symbol does not.
    large = LargeInputs(graph, list(subject.shapes), policy.compute).at(list(subject.shapes.values()))
    arrays = Arrays(graph, ctx, asked, subject.values, given, large and isinstance(target, Block))
    with _told(progress) as tell:
        found = Search(task, arrays, sizes, training, table, tell).run()
    if file is not None:
        try:
            write(file, machine, table.seconds)
        except OSError as error:
            warnings.warn(f"tune could not keep its times: {error}", stacklevel=2)
    return replace(task.plan(found.low, found.reasons), tuned=found.tuned, blocks=subject.blocks)


def _kept_times(machine: dict[str, Any], folder: str | os.PathLike | None) -> tuple[str | None, dict[str, float]]:
    """The file for this machine's times, None where it cannot be written, and the times in it. Warns at most once."""
    file, known, why = None, {}, None
    try:
        file = cache_file(machine, folder)
        known = read(file)
    except (OSError, ValueError) as error:
        why = f"measures anew, for {file or 'the cache'} cannot be used: {error}"
    if file is not None:
        try:
            check_writable(file)
        except OSError as error:
            file, why = None, f"will not keep its times: {error}"
    if why is not None:
        warnings.warn(f"tune {why}", stacklevel=3)
    return file, known


class _Subject(NamedTuple):
    """A graph in FP32 with what is known of its inputs. ``grad_req``: empty where nobody says. ``blocks``: see Plan."""

    graph: Graph
    shapes: Mapping[str, tuple[int, ...]]
    values: Mapping[str, NDArray]
    parameters: list[str] | None
    grad_req: Mapping[str, str]
    keep_output_names: bool
    blocks: tuple[str, ...] = ()


def _of_symbol(symbol: mx.sym.Symbol, inputs: tuple, given: Mapping[str, Any]) -> _Subject:
    if inputs:
        raise ValueError("name the inputs of a Symbol: tune(symbol, data=(32, 3, 224, 224))")
    values = {name: value for name, value in given.items() if isinstance(value, NDArray)}
    shapes = {name: value.shape if name in values else as_shape(value, name) for name, value in given.items()}
    return _Subject(strip(Graph.from_symbol(symbol)), shapes, values, None, {}, True)


def _of_block(block: Any, inputs: tuple, training: bool) -> _Subject:
    if not isinstance(block, Block):
        raise TypeError(f"tune takes a gluon HybridBlock or a Symbol, got {type(block).__name__}")
    if not isinstance(block, HybridBlock):
        raise ValueError(f"{block.name!r} runs as Python, which has no plan: tune the HybridBlocks in it")
    arrays, drawn = read_inputs(inputs)
    symbol, found, params = traced_alone(block, arrays, training)
    values = {name: array for name, array in found.items() if all(array is not each for each in drawn)}
    return _Subject(
        strip(Graph.from_symbol(symbol)),
        {name: array.shape for name, array in found.items()},
        values,
        list(params),
        {name: param.grad_req for name, param in params.items()},
        False,
        prefixes_of(block),
    )


def _fewest_bytes(task: Task, sizes: Mapping, training: bool) -> Plan:
    moved = cast_bytes(sizes)
    plans = {RULES: task.low_nodes(task.rules), BYTES: task.least_bytes(sizes)}
    amounts = {name: int(task.choice.cost(low, Costs({}, {}, moved, moved))) for name, low in plans.items()}
    return replace(task.plan(plans[BYTES], {}), tuned=Tuned(BYTES, training, cast_bytes=amounts))


@contextmanager
def _told(progress: bool) -> Iterator[Callable[[str], None]]:
    """What a search tells is shown on a terminal."""
    try:
        from tqdm import tqdm
    except ImportError:
        progress = False
    if not progress:
        yield lambda text: None
        return
    with tqdm(total=5, disable=None, unit="part") as bar:

        def tell(text: str) -> None:
            bar.set_description(text)
            bar.update()

        yield tell

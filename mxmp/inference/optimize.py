"""The public function ``optimize_for_inference``."""

from __future__ import annotations

from math import isfinite, isnan, nan
from numbers import Real
from typing import Any, Callable, Iterable, Mapping

import mxnet as mx
from mxnet.gluon import HybridBlock
from mxnet.ndarray import NDArray

from ..host import cpu
from ..host.child import showing
from ..messages.keywords import keywords_explained
from ..precision.graph import Graph
from ..serving.folding import Params
from .report import InferenceReport
from .runner import Runner
from .search import BFLOAT16, FLOAT16, INT8, CandidateSearch, Limits
from .targets import OptimizedBlock, OptimizedSymbol, read_target, served


@keywords_explained
def optimize_for_inference(
    target: HybridBlock | mx.sym.Symbol,
    calibration: Iterable[Any],
    *,
    dtypes: Iterable[str] = (INT8, BFLOAT16),
    evaluate: Callable[[Any], float] | None = None,
    max_drop: float = 0.01,
    min_sqnr: float = 20.0,
    arg_params: Mapping[str, NDArray] | None = None,
    aux_params: Mapping[str, NDArray] | None = None,
    progress: bool = True,
) -> OptimizedBlock | OptimizedSymbol:
    """Return a network for inference: the fastest of many graphs for this CPU that is still accurate enough.

    FP32, bfloat16 (on a CPU with AVX-512) and INT8 (with VNNI) are tried, and mixtures in which the least accurate
    layers stay in FP32. BatchNorm is folded into the layers before it, operators are fused by oneDNN where that is
    right, and weights are stored in the dtype in which they are used. A bfloat16 or INT8 graph is returned only if it
    is faster than every FP32 graph. ``target`` stays as it is.

    ``dtypes="float16"`` returns a network for a GPU instead: BatchNorm is folded, layers are float16 where the rules
    and the accuracy allow it, with weights stored in float16. Its accuracy is that of the emulation on this CPU, and no
    time is measured. Its arrays are on the CPU; a returned block moves by ``collect_params().reset_ctx(mx.gpu())``.

    The graphs run in another process, so that a kernel that crashes ends only that process; the report then says so.
    The call returns when all have run.

    Parameters
    ----------
    target : HybridBlock or Symbol
        A network with FP32 weights on the CPU; for float16 also on a GPU. If mxmp has converted it, the casts are
        removed first and FP32 weights are used.
    calibration : iterable of batches
        Inputs of the network, without labels. A batch is an array, a tuple of arrays, a ``DataBatch`` or, for a Symbol,
        a dict from the names of inputs to arrays. Arrays without names go to the inputs of a Symbol in the order of
        ``list_arguments()``; labels that only its loss heads read need no array. The last third of the batches, at
        least one, measures accuracy, the others calibrate INT8; a single batch is cut in two, or does both if it cannot
        be cut. The first batch is timed, so it should have the shape with which you will call the network.
    dtypes : str or iterable of str
        The dtypes to try: ``"int8"``, ``"bfloat16"`` or both, or ``"float16"`` without these two. A string is one
        dtype. FP32 is always tried; with ``()`` nothing else is.
    evaluate : callable, optional
        Takes an ``OptimizedBlock`` or ``OptimizedSymbol``, as this function returns it (for float16, the emulation),
        and returns its accuracy as a number, higher is better. It is called in this process for FP32 and for each graph
        in another dtype that runs. It alone decides which graphs are accurate enough, so judge the result on data that
        ``evaluate`` does not see.
    max_drop : float
        With ``evaluate``, how much lower its number may be than for FP32: the difference of the two. Without, the share
        of rows (from 0 to 1) of each output of scores whose largest value may be in another column than in FP32. An
        output of several columns is one of scores if it has two axes, or if a dense layer, a convolution, a product or
        a softmax gives it; 1 switches this off.
    min_sqnr : float
        Without ``evaluate``, the least signal to quantization noise ratio of each column of each output against FP32's,
        in dB, where the column's mean is no signal. The columns of an output, such as classes or coordinates, are along
        axis 1 where it has four axes or more (images), and otherwise along the last one. A column that does not vary on
        the data is compared with its mean; a single row, with the spread of its values.
    arg_params, aux_params : mapping of str to NDArray
        The parameters and the running statistics of a Symbol, by name; None for a block, which has its own.
    progress : bool
        Show a progress bar on a terminal, if tqdm is installed.

    Returns
    -------
    OptimizedBlock or OptimizedSymbol
        A block for a block, to be called as the block is; an object with a Symbol and its parameters for a Symbol. Its
        attribute ``report`` is an ``InferenceReport``; its method ``export`` writes files that MXNet loads without
        mxmp.

    Raises
    ------
    TypeError
        ``target`` is neither a Block nor a Symbol.
    ValueError
        The block cannot be traced to a Symbol; it need not be hybridized. Or the network is fused or quantized
        already, has outputs with NaN, or has parameters that are missing, not initialized, neither FP32 nor integers,
        not finite, or on a GPU (unless for float16). Or there is no calibration data, or it does not fit the network,
        is not finite or holds ``mx.np`` arrays. Or a dtype is unknown, float16 is mixed with another one,
        ``arg_params`` or ``aux_params`` is given for a block, ``max_drop`` is negative or no number, ``min_sqnr`` is
        no number, or ``evaluate`` is no callable or returned no finite number.
    RuntimeError
        Python does not know its own executable, so no other process can be started.
    mxmp.inference.runner.CandidateError
        The network itself, in FP32, fails on the calibration data.

    Examples
    --------
    >>> net = nn.HybridSequential()
    >>> net.add(nn.Dense(16, activation="relu"), nn.Dense(2))
    >>> net.initialize()
    >>> batches = [mx.nd.random.uniform(shape=(8, 4)) for _ in range(4)]
    >>> out = net(batches[0])  # gives the parameters their shapes
    >>> served = mxmp.optimize_for_inference(net, batches, dtypes="bfloat16")
    >>> served(batches[0]).shape
    (8, 2)
    """
    requested = _checked(dtypes)
    _check_limits(evaluate, max_drop, min_sqnr)
    subject = read_target(target, calibration, arg_params, aux_params, any_device=FLOAT16 in requested)

    def score(graph: Graph, params: Params) -> float:
        assert evaluate is not None
        value = evaluate(served(subject, graph, params, _NO_REPORT))
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = nan
        if not isfinite(number):
            raise ValueError(f"evaluate returned {value!r:.200}: expected a finite number, higher for a better network")
        return number

    limits = Limits(max_drop, min_sqnr, None if evaluate is None else score)
    with Runner(subject.batches) as runner, showing(progress) as tell:
        search = CandidateSearch(subject, runner, limits, tell)
        if INT8 in requested and cpu.lacks(*cpu.VNNI):
            # INT8 kernels are slow then, and add two products of INT8 numbers in 16 bits, which may overflow.
            requested.remove(INT8)
            search.notes.append(
                "int8 was left out: this CPU has no VNNI, so its INT8 kernels are slow and may overflow"
            )
        if BFLOAT16 in requested and not cpu.multiplies_bfloat16():
            requested.remove(BFLOAT16)
            search.notes.append(
                "bfloat16 was left out: this CPU has no AVX-512, so bfloat16 is emulated, and slower than FP32"
            )
        return served(subject, *search.run(requested))


# The report of a network that ``evaluate`` gets: the search has not ended yet.
_NO_REPORT = InferenceReport("", "", [], [], {}, [])


def _checked(dtypes: Iterable[str]) -> list[str]:
    """Return ``dtypes``, a name or several, as a list without repetitions."""
    if not isinstance(dtypes, Iterable):
        raise ValueError(f"dtypes={dtypes!r}: expected names, such as ({INT8!r}, {BFLOAT16!r}), or () for FP32 alone")
    requested = [dtypes] if isinstance(dtypes, str) else list(dict.fromkeys(dtypes))
    for dtype in requested:
        if dtype not in (INT8, BFLOAT16, FLOAT16, "float32"):
            raise ValueError(f"dtypes: {dtype!r} is none of {INT8!r}, {BFLOAT16!r} and {FLOAT16!r}")
    if FLOAT16 in requested and {INT8, BFLOAT16} & set(requested):
        raise ValueError(f"dtypes: {requested!r} mixes float16, for a GPU, with dtypes for a CPU: optimize twice")
    return requested


def _check_limits(evaluate: Any, max_drop: Any, min_sqnr: Any) -> None:
    if evaluate is not None and not callable(evaluate):
        raise ValueError(f"evaluate={evaluate!r:.200}: expected a function that takes a network and returns a number")
    if not (isinstance(max_drop, Real) and float(max_drop) >= 0):
        raise ValueError(f"max_drop={max_drop!r}: expected a number from 0, in the unit of evaluate")
    if evaluate is None and float(max_drop) > 1:
        raise ValueError(
            f"max_drop={max_drop!r}: expected a share of the top answers, 0 to 1, as evaluate is not given; 0.05 is 5 %"
        )
    if not isinstance(min_sqnr, Real) or isnan(min_sqnr):
        raise ValueError(f"min_sqnr={min_sqnr!r}: expected a number of dB, such as 20")

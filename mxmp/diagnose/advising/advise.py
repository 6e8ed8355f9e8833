"""``advise``: which shapes miss the Tensor Cores, what padding or joining would cost, and what there is to gain."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Sequence

import mxnet as mx
from mxnet.gluon import Block

from ...policy import Policy
from ...precision.casts import strip
from ...precision.decide import check_policy, decide
from ...precision.graph import Graph
from ...precision.plan import Plan, read_policy
from ..explaining.explain import check_shapes
from ..shared.targets import called_graphs, policy_of, with_names_of
from .advice import Advice, Joinable, MatrixReport
from .flops import Step, Tensor, dtype_name, walk
from .gemm import Products
from .gpus import Gpu, gpu_named

__all__ = ["advise"]

# What they multiply is not counted.
_UNCOUNTED = {"Convolution_v1", "Correlation", "Custom", "khatri_rao", "_npi_einsum"}
_UNCOUNTED |= {f"_linalg_{name}" for name in ("syrk", "trmm", "trsm", "potrf", "potri", "gelqf", "syevd", "inverse")}
_LOOK_UPS = {"Embedding", "take", "gather_nd", "pick"}  # read as much as they write
# They hand on their input's memory, in inference.
_VIEWS = {"Dropout", "Reshape", "Flatten", "expand_dims", "squeeze", "BlockGrad", "_copy", "reshape_like"}


def advise(
    target: Block | mx.sym.Symbol,
    *inputs: Any,
    policy: str | Policy | Plan | None = None,
    device: str = "v100",
    exclude: Iterable[str] = (),
    **shapes: tuple[int, ...],
) -> Advice:
    """Which matrix operators fit a GPU's Tensor Cores, which do not and why, and what low precision can gain.

    Everything is counted from shapes; nothing is measured, and no GPU is needed.

    Parameters
    ----------
    target : Block or Symbol
        A net, converted or not, which is left as it is; or an FP32 Symbol.
    *inputs : NDArray or tuple of int
        For a net: what it is called with, or shapes of FP32 arrays. It is only traced, unless a part of it
        runs as Python: then it is called once, in inference, and needs arrays with meaningful values.
    policy : str, Policy or Plan
        As for ``convert``; a converted net's own by default, otherwise ``"float16"``.
    device : {"v100", "t4", "a100"}
    exclude
        As for ``convert``.
    **shapes : tuple of int
        For a Symbol: input shapes, for example ``data=(32, 3, 224, 224)``.

    Raises
    ------
    TypeError
        ``target`` is neither.
    ValueError
        The shapes do not fit, or are of no input; an unknown device; a policy that no GPU can follow (bfloat16).
    """
    gpu = gpu_named(device)
    calls, own = _calls(target, inputs, shapes)
    chosen = _chosen(policy or own, exclude)
    if isinstance(chosen, Plan) and isinstance(target, Block):
        chosen = with_names_of(target, chosen)
    matrices: list[MatrixReport] = []
    joinable: list[Joinable] = []
    unknown: list[str] = []
    unmatched: list[set[str]] = []
    other_bytes = 0.0
    for called in calls:
        prefix = f"{called.name}/" if len(calls) > 1 else ""
        steps, plan = _planned(called, chosen)
        for step in steps:
            found = step.products()
            if step.node.op in _UNCOUNTED or None in [*step.ins, *step.outs[:1]]:
                unknown.append(prefix + step.name)
            elif found is not None and found.gemms:
                matrices.append(_matrix(step, found, plan, prefix))
            elif step.node.op not in _VIEWS and not step.node.subgraphs:
                other_bytes += 4 * _elements(step) * step.times
        joinable += _joinable(steps, prefix)
        unmatched.append(set(plan.unmatched))
    return Advice(
        name=target.name or "symbol",
        policy=str(chosen.policy if isinstance(chosen, Plan) else chosen),
        device=device.lower(),
        matrices=tuple(matrices),
        joinable=tuple(joinable),
        other_bytes=other_bytes,
        unknown=tuple(unknown),
        unmatched=tuple(sorted(set.intersection(*unmatched))),
        settings=tuple(_settings(gpu, matrices)),
    )


class _Called(NamedTuple):
    """An FP32 graph that a call runs. ``known``: of its inputs, by name; ``parameters``: which of them are no data."""

    name: str
    graph: Graph
    known: dict[str, Tensor]
    parameters: frozenset[str]


def _calls(target: Any, inputs: tuple, shapes: dict[str, tuple]) -> tuple[list[_Called], str]:
    """The graphs to count, and the policy that is theirs."""
    if isinstance(target, mx.sym.Symbol):
        if inputs:
            raise ValueError("a Symbol's shapes are given by name: advise(symbol, data=(32, 3, 224, 224))")
        check_shapes(shapes, target.list_inputs(), ["policy", "device", "exclude"])
        known = {name: Tensor(tuple(shape), "float32") for name, shape in shapes.items()}
        graph = strip(Graph.from_symbol(target))
        return [_Called(target.name or "symbol", graph, known, frozenset())], "float16"
    if not isinstance(target, Block):
        raise TypeError(
            f"advise takes a gluon Block or a Symbol, got {type(target).__module__}.{type(target).__name__}"
        )
    if shapes or not inputs:
        raise ValueError("a net takes its inputs in order: advise(net, x), or advise(net, (32, 3, 224, 224))")
    graphs = called_graphs(target, inputs)
    return [_called(*graph) for graph in graphs], str(policy_of(target) or "float16")


def _called(name: str, symbol: mx.sym.Symbol, known: Mapping[str, tuple], parameters: frozenset[str]) -> _Called:
    tensors = {key: Tensor(tuple(shape), dtype_name(dtype)) for key, (shape, dtype) in known.items()}
    return _Called(name, strip(Graph.from_symbol(symbol)), tensors, parameters)


def _chosen(policy: str | Policy | Plan, exclude: Iterable[str]) -> Policy | Plan:
    asked, plan = read_policy(policy, exclude)
    if plan is not None:
        check_policy(asked, "gpu")
    return plan or asked


def _planned(called: _Called, policy: Policy | Plan) -> tuple[list[Step], Plan]:
    """The operators of a graph, and the plan that decides for each."""
    parameters = called.parameters or None
    plan = policy if isinstance(policy, Plan) else decide(called.graph, policy, "gpu", parameters=parameters)
    try:
        steps = list(walk(called.graph, called.known))
    except mx.MXNetError as error:
        why = str(error).strip().splitlines()[-1]
        raise ValueError(f"the shapes do not fit {called.name!r}: {why}") from error
    missing = [step.name for step in steps if step.name not in plan.decisions]
    if missing:
        raise ValueError(f"the plan is of another graph: it has no decision for {missing[0]!r}")
    return steps, plan


def _elements(step: Step) -> int:
    """Read and written."""
    if step.node.op in _LOOK_UPS:
        return sum(2 * tensor.size for tensor in step.outs if tensor)
    found = step.products()
    if step.node.op == "RNN" and found is not None:  # no cache holds the weights from one step to the next
        return sum(g.times * (g.m * g.k + g.k * g.n + g.m * g.n) for g in found.gemms)
    return sum(tensor.size for tensor in [*step.ins, *step.outs] if tensor)


def _matrix(step: Step, found: Products, plan: Plan, prefix: str) -> MatrixReport:
    decision = plan.decisions[step.name]
    dtype = plan.policy.compute if decision.low else "float32"
    if step.ins[0] is not None and step.ins[0].dtype in ("int8", "uint8"):
        dtype = "int8"
    depthwise = step.node.op in ("Convolution", "Deconvolution") and found.sizes[0].value == 1 < found.gemms[0].times
    return MatrixReport(
        *(prefix + step.name, step.node.op, found.layout, found.gemms, found.sizes, step.times),
        *(_elements(step), dtype, decision.reason, depthwise),
    )


# What products of one input must share to be one: all but the number of outputs.
_OWN = {"num_hidden", "num_filter", "no_bias"}


def _joinable(steps: Sequence[Step], prefix: str) -> Iterator[Joinable]:
    """Layers and convolutions with weights of their own that read the same tensor in the same way."""
    groups: dict[tuple, list[Step]] = defaultdict(list)
    for step in steps:
        node = step.node
        own = all(entry.node.is_variable for entry in node.inputs[1:])
        if not own or node.op not in ("FullyConnected", "Convolution", "dot") or step.products() is None:
            continue
        if int(node.attrs.get("num_group", 1)) > 1:
            continue
        same = tuple(sorted((k, v) for k, v in node.attrs.items() if k not in _OWN and not k.startswith("__")))
        groups[node.inputs[0], node.op, same].append(step)
    for (entry, op, _), members in groups.items():
        if len({step.node.inputs[1] for step in members}) == len(members) > 1:
            outputs = sum(found.gemms[0].n for step in members if (found := step.products()))
            names = tuple(prefix + step.name for step in members)
            yield Joinable(names, op, prefix + entry.node.name, outputs)


def _on(variable: str, default: str) -> bool:
    return os.environ.get(variable, default).lower() in ("1", "true")


def _settings(gpu: Gpu, matrices: list[MatrixReport]) -> Iterator[str]:
    """MXNet 1.9.1: docs/static_site/src/pages/api/faq/env_var.md, src/operator/linalg.h, cudnn_convolution-inl.h."""
    if any(m.op == "Convolution" and m.layout in ("NCHW", "NCDHW") and m.on_tensor_cores(gpu) for m in matrices):
        # NVIDIA, Convolutional Layers User's Guide, "Tensor Layouts In Memory: NCHW vs NHWC".
        yield "Layout NCHW: cuDNN's Tensor Core kernels read NHWC, and transpose around each convolution."
    if not _on("MXNET_CUDA_ALLOW_TENSOR_CORE", "1"):
        yield "MXNET_CUDA_ALLOW_TENSOR_CORE=0 keeps float16 off the Tensor Cores too: unset it."
    if _on("MXNET_CUDA_TENSOR_OP_MATH_ALLOW_CONVERSION", "0"):
        yield (
            "MXNET_CUDA_TENSOR_OP_MATH_ALLOW_CONVERSION=1 rounds FP32 inputs of convolutions, recurrent layers and "
            "products to float16 inside the kernels, where neither the policy nor the loss scale reaches. Unset it."
        )
    else:
        yield (
            "MXNET_CUDA_TENSOR_OP_MATH_ALLOW_CONVERSION is off, as it should be: it would round FP32 inputs to "
            "float16 inside the kernels, without a loss scale."
        )
    if "tf32" in gpu.tensor:
        yield (
            f"On {gpu.name} FP32 products run as TF32 (10-bit mantissa, FP32's range): MXNet built for CUDA 11 asks "
            "cuBLAS for it and cuDNN 8 allows it by itself. NVIDIA_TF32_OVERRIDE=0 turns it off."
            + (" It is off here." if os.environ.get("NVIDIA_TF32_OVERRIDE") == "0" else "")
        )
    else:
        yield f"{gpu.name} has no TF32: FP32 products run on its FP32 cores."

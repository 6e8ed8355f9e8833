"""Record float16 matrix products and convolutions of a real Tensor Core into a small .npz.

It needs an NVIDIA GPU of compute capability 7.0 or newer, and MXNet's CUDA build (``--by mxnet``, which records the
very kernels that a converted net runs) or PyTorch (``--by torch``, for GPUs newer than MXNet's wheels). The tests of
``tests/features/test_tensor_core.py`` then hold the CPU's emulation of float16 against the file.

The file, all arrays float16 but for the first:

    meta                    a JSON string: library, device, compute capability, versions
    <kind>.<case>.<array>   kind: fc (out = data @ weight.T) or conv (3x3, stride 1, padding 1, NCHW, no bias)
                            case: normal, overflow (some sums beyond 65504), subnormal (most results below 2^-14),
                                  long (sums of at least 2,000 products)
                            array: data, weight, head (the gradient that comes in), out, data_grad, weight_grad
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, Dict, Iterator

import numpy as np
from support.options import parse
from support.results import ROOT

ARRAYS = ("data", "weight", "head", "out", "data_grad", "weight_grad")
Case = Dict[str, np.ndarray]


def cases() -> Iterator[tuple[str, Case]]:
    """Yield (name, data and weight and head) of every case; the same values on every machine."""
    random = np.random.RandomState(0)

    def draw(shape: tuple[int, ...], scale: float) -> np.ndarray:
        return (scale * random.standard_normal(shape)).astype(np.float16)

    fc = {"data": (32, 64), "weight": (24, 64), "head": (32, 24)}
    conv = {"data": (2, 16, 8, 8), "weight": (8, 16, 3, 3), "head": (2, 8, 8, 8)}
    long_fc = {"data": (2, 2048), "weight": (3, 2048), "head": (2, 3)}
    long_conv = {"data": (1, 256, 4, 4), "weight": (2, 256, 3, 3), "head": (1, 2, 4, 4)}
    scales = {"normal": (1.0, 1.0), "overflow": (200.0, 30.0), "subnormal": (2.0**-9, 2.0**-9)}
    for kind, shapes, long_shapes in (("fc", fc, long_fc), ("conv", conv, long_conv)):
        for case, (first, second) in scales.items():
            by_name = {"data": first, "weight": second, "head": second}
            yield f"{kind}.{case}", {name: draw(shape, by_name[name]) for name, shape in shapes.items()}
        yield f"{kind}.long", {name: draw(shape, 1.0) for name, shape in long_shapes.items()}


def record(by: str, device: str) -> Case:
    """Run forward and backward of every case on `device`; by ``"torch"`` or ``"mxnet"``."""
    run = {"torch": run_torch, "mxnet": run_mxnet}[by]
    arrays: Case = {}
    for name, case in cases():
        results = {**case, **run(name, case, device)}
        arrays.update({f"{name}.{key}": results[key] for key in ARRAYS})
    return arrays


def run_torch(name: str, case: Case, device: str) -> Case:
    import torch

    # Sums stay FP32 to the end, as MXNet asks of cuBLAS and cuDNN.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cudnn.deterministic = True
    tensors = {key: torch.from_numpy(value).to(device) for key, value in case.items()}
    data, weight = tensors["data"].requires_grad_(), tensors["weight"].requires_grad_()
    if name.startswith("fc"):
        out = torch.nn.functional.linear(data, weight)
    else:
        layout = torch.channels_last  # the layout of the Tensor Core's own kernels: no Winograd
        low, kernel = data.to(memory_format=layout), weight.to(memory_format=layout)
        out = torch.nn.functional.conv2d(low, kernel, padding=1)
    out.backward(tensors["head"])
    results = {"out": out.detach(), "data_grad": data.grad, "weight_grad": weight.grad}
    return {key: value.cpu().numpy() for key, value in results.items()}


def run_mxnet(name: str, case: Case, device: str) -> Case:
    import mxnet as mx
    from mxnet import autograd

    ctx = mx.gpu() if device == "cuda" else mx.cpu()
    data, weight, head = (mx.nd.array(case[key], ctx=ctx, dtype="float16") for key in ("data", "weight", "head"))
    for array in (data, weight):
        array.attach_grad()
    count = case["weight"].shape[0]
    with autograd.record():
        if name.startswith("fc"):
            out = mx.nd.FullyConnected(data, weight, no_bias=True, num_hidden=count)
        else:
            out = mx.nd.Convolution(data, weight, no_bias=True, num_filter=count, kernel=(3, 3), pad=(1, 1))
    out.backward(head)
    return {"out": out.asnumpy(), "data_grad": data.grad.asnumpy(), "weight_grad": weight.grad.asnumpy()}


def find_torch() -> dict[str, Any]:
    """Return what the recording runs on; exits with one line where there is no Tensor Core."""
    try:
        import torch
    except ImportError:
        sys.exit("error: PyTorch is not installed here; it needs a build with CUDA (https://pytorch.org)")
    if not torch.cuda.is_available():
        sys.exit(f"error: PyTorch {torch.__version__} sees no CUDA GPU; nothing was recorded")
    capability = torch.cuda.get_device_capability()
    if capability < (7, 0):
        sys.exit(f"error: compute capability {capability} has no Tensor Core; it takes 7.0 (Volta) or newer")
    return {
        "device": torch.cuda.get_device_name(),
        "capability": list(capability),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def find_mxnet() -> dict[str, Any]:
    import mxnet as mx

    if not mx.context.num_gpus():
        sys.exit(f"error: MXNet {mx.__version__} sees no CUDA GPU; nothing was recorded")
    return {"mxnet": mx.__version__, **nvidia_smi()}


def nvidia_smi() -> dict[str, Any]:
    """Return name, compute capability, driver and memory of the first GPU; empty where nvidia-smi does not say."""
    fields = {"device": "name", "capability": "compute_cap", "driver": "driver_version", "memory": "memory.total"}
    command = ["nvidia-smi", f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader"]
    try:
        line = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return {}
    return dict(zip(fields, map(str.strip, line.split(","))))


def main(arguments: list[str] | None = None) -> None:
    args = parse(
        *(__doc__, arguments),
        output=ROOT / "tests" / "data" / "tensor_core.npz",
        by=("torch", "what runs the products", ("torch", "mxnet")),
    )
    meta = {"library": args.by, **{"torch": find_torch, "mxnet": find_mxnet}[args.by]()}
    arrays = record(args.by, "cuda")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.output, meta=json.dumps(meta), **arrays)
    print(f"{args.output}: {len(arrays)} arrays from {meta.get('device')}, {args.output.stat().st_size} bytes")

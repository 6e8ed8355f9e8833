"""Records float16 matrix products and convolutions of a real Tensor Core, through PyTorch, into a small .npz.

It needs PyTorch and an NVIDIA GPU of compute capability 7.0 or newer, and refuses without. The tests of
``tests/kernels/test_tensor_core.py`` then hold the CPU's emulation of float16 against the file.

The file, all arrays float16 but for the first:

    meta                    a JSON string: device, compute capability, versions of PyTorch, CUDA and cuDNN
    <kind>.<case>.<array>   kind: fc (out = data @ weight.T) or conv (3x3, stride 1, padding 1, NCHW, no bias)
                            case: normal, overflow (some sums beyond 65504), subnormal (most results below 2^-14),
                                  long (sums of at least 2,000 products)
                            array: data, weight, head (the gradient that comes in), out, data_grad, weight_grad
"""

from __future__ import annotations

import json
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


def record(device: str) -> Case:
    """Run forward and backward of every case on `device`."""
    import torch

    # Sums stay FP32 to the end, as MXNet asks of cuBLAS and cuDNN.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cudnn.deterministic = True
    arrays: Case = {}
    for name, case in cases():
        tensors = {key: torch.from_numpy(value).to(device) for key, value in case.items()}
        data, weight = tensors["data"].requires_grad_(), tensors["weight"].requires_grad_()
        if name.startswith("fc"):
            out = torch.nn.functional.linear(data, weight)
        else:
            layout = torch.channels_last  # the layout of the Tensor Core's own kernels: no Winograd
            low, kernel = data.to(memory_format=layout), weight.to(memory_format=layout)
            out = torch.nn.functional.conv2d(low, kernel, padding=1)
        out.backward(tensors["head"])
        results = {**case, "out": out.detach(), "data_grad": data.grad, "weight_grad": weight.grad}
        for key in ARRAYS:
            value = results[key]
            arrays[f"{name}.{key}"] = value if isinstance(value, np.ndarray) else value.cpu().numpy()
    return arrays


def find_tensor_core() -> dict[str, Any]:
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


def main(arguments: list[str] | None = None) -> None:
    output = parse(__doc__, arguments, output=ROOT / "tests" / "data" / "tensor_core.npz").output
    meta = find_tensor_core()
    arrays = record("cuda")
    output.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(output, meta=json.dumps(meta), **arrays)
    print(f"{output}: {len(arrays)} arrays from {meta['device']}, {output.stat().st_size} bytes")

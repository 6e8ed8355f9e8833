"""Devices, GluonCV networks and weights, with errors that a user can act on."""

import argparse
import difflib
import re
from pathlib import Path
from typing import Any, Callable, List, Optional

import mxnet as mx
from gluoncv.model_zoo import get_model
from gluoncv.model_zoo.model_zoo import get_model_list
from mxnet.gluon import HybridBlock

from .errors import UserError

OTHER_TASKS = re.compile(
    "ssd|yolo|rcnn|fcn|psp|deeplab|danet|icnet|fastscnn|center_net|pose|monodepth|siamrpn|hrnet.*_s$"
    "|_kinetics|_hmdb|_ucf|_sthsth|_custom|_int8"
)


def devices(num_gpus: Optional[int]) -> List[mx.Context]:
    """The first `num_gpus` GPUs; None: all of them, else the CPU."""
    available = mx.context.num_gpus()
    wanted = available if num_gpus is None else num_gpus
    if not 0 <= wanted <= available:
        raise UserError(f"--num-gpus {num_gpus}; allowed: 0 to {available}, the GPUs that MXNet sees")
    return [mx.gpu(i) for i in range(wanted)] or [mx.cpu()]


def policy_for(options: argparse.Namespace, context: mx.Context) -> Any:
    """What `convert` and `Module` take: `--policy`; without it the recipe of `--dtype`, on a GPU the fast one.

    cuDNN's BatchNorm computes in FP32 from float16 data, so casts around it would repeat what it does.
    """
    if options.policy is not None:
        return options.policy
    fast = options.dtype == "float16" and context.device_type == "gpu"
    return "float16-fast" if fast else options.dtype


def build_network(options: argparse.Namespace, contexts: List[mx.Context]) -> HybridBlock:
    """The FP32 network with its weights, tried on one black image."""
    net = _create(options)
    if options.use_pretrained:
        net.collect_params().reset_ctx(contexts)
    else:
        net.initialize(mx.init.MSRAPrelu(), ctx=contexts)
    size = options.input_size
    try:
        output = net(mx.nd.zeros((1, 3, size, size), ctx=contexts[0]))
        net(mx.sym.Variable("data"))  # some of GluonCV's networks have no graph
    except (mx.base.MXNetError, ValueError) as error:
        raise UserError(f"--model {options.model} with --input-size {size}: {last_line(error)}") from None
    shape = getattr(output, "shape", type(output).__name__)
    if shape != (1, options.num_classes):
        raise UserError(f"--model {options.model}: its output is {shape}, not (1, {options.num_classes})")
    if options.resume_params:
        load(net.load_parameters, options.resume_params, "--resume-params", ctx=contexts)
    return net


def _create(options: argparse.Namespace) -> HybridBlock:
    known = [name for name in get_model_list() if not OTHER_TASKS.search(name)]
    if options.model.lower() not in known:
        close = difflib.get_close_matches(options.model.lower(), known, n=5, cutoff=0.4)
        raise UserError(
            f"--model {options.model}: GluonCV has no classification network of this name; "
            f"close names: {', '.join(close) or 'none'}"
        )
    extra = {"last_gamma": True} if options.last_gamma else {}
    if options.model.lower().startswith("nasnet"):
        extra["use_aux"] = False
    try:
        return get_model(options.model, classes=options.num_classes, pretrained=options.use_pretrained, **extra)
    except TypeError as error:
        raise UserError(f"--model {options.model} does not take these options: {error}") from None


def load(method: Callable[..., Any], path: Path, option: str, **arguments: Any) -> None:
    """`method(path)`, with a missing or foreign file as a UserError."""
    if not path.is_file():
        raise UserError(f"{option} {path}: no such file")
    try:
        method(str(path), **arguments)
    except Exception as error:  # AssertionError, MXNetError, UnpicklingError: MXNet has no class for a bad file
        raise UserError(f"{option} {path}: not loadable here: {last_line(error)}") from error


def last_line(error: Exception) -> str:
    """What MXNet says, without its native traceback."""
    lines = str(error).strip().splitlines()
    return re.sub(r"^(MXNetError: )?(Check failed: )?", "", lines[-1].strip()) if lines else type(error).__name__

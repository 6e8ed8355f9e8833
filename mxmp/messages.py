"""What to say of what a user wrote: a name, a network, a file, a shape, a dtype. And whose line a warning names."""

from __future__ import annotations

import os
import re
import warnings
import zipfile
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from importlib.util import find_spec
from inspect import currentframe, signature
from math import prod
from numbers import Integral
from types import FrameType
from typing import Any, Callable, Collection, Iterable, Iterator, Sequence, TypeVar

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from .callbacks import last_line
from .files import read_json
from .policy import Policy, is_policy_text

_Function = TypeVar("_Function", bound=Callable[..., Any])
_INSIDE = ("mxnet", "mxmp", "contextlib")
_NET = "mxmp.convert(net, 'float16'), once, makes a net compute in low precision"
_STEP = "trainer = mxmp.Trainer(...) scales the loss by trainer.backward(loss), and trainer.step(batch_size) unscales"
_SYMBOL = "mxmp.cast_symbol(symbol, 'float16') returns a Symbol with casts, and mxmp.Module(symbol) trains it"
_MASTERS = "mxmp.Trainer and mxmp.Module keep FP32 master weights by themselves, and checkpoints hold them"
_OPERATORS = "mxmp.Policy(low_ops=[...], full_ops=[...]) says which operators compute in what"
_DIAGNOSE = "mxmp.diagnose.{}"

# Names of mxnet.contrib.amp, torch.amp, Apex and GluonNLP in lower case, and of ``diagnose``.
_HINTS = {
    _NET: "amp init initialize autocast auto_cast custom_fwd convert_hybrid_block half float16 bfloat16",
    _STEP: "gradscaler init_trainer scale_loss lossscaler fp16trainer fp16_optimizer scale backward custom_bwd",
    "trainer.discard() of an mxmp.Trainer leaves a step out; one with an overflow is skipped by itself": "skip_step",
    "net.collect_params().zero_grad(), which only grad_req='add' needs": "zero_grad",
    _SYMBOL: "convert_model convert_symbol convert_bucketing_module castsymbol",
    "trainer.unscale() of an mxmp.Trainer; trainer.clip_global_norm(max_norm) needs none": "unscale unscale_ clip_grad",
    _MASTERS: "master_params master_weights multi_precision",
    _OPERATORS: "list_lp16_ops list_fp16_ops list_fp32_ops register_half_function register_float_function",
    "mxmp.optimize_for_inference(net, batches)": "optimize quantize quantize_net quantize_model",
    _DIAGNOSE: "watch blame advise profile plot_histograms plot_loss_scale",
}
# Names of methods of torch.amp, torch.optim, Apex and MXNet, for ``mxmp.Trainer`` and for modules.
_TRAINER = {
    "trainer.unscale()": "unscale_ unscale_grads unscale_gradients get_unscaled_gradients",
    "trainer.clip_global_norm(max_norm)": "clip_grad_norm_ clip_grad_norm clip_gradients clip_grads clip",
    "trainer.discard() leaves a step out; one with an overflow is skipped by itself": "skip_step skip skip_update "
    "reject reject_step",
    "net.collect_params().zero_grad(), which only grad_req='add' needs, or trainer.discard()": "zero_grad zero_grads",
    "trainer.backward(loss) scales the loss, and the scale is trainer.loss_scale": "scale get_scale get_scaled_loss",
    "trainer.scaler.loss_scale = value sets the scale": "update_scale set_scale set_loss_scale",
    "trainer.last_step_skipped, after a step": "found_inf was_skipped step_skipped skipped",
    "trainer.save_states(file), or mxmp.save_checkpoint(path, net, trainer)": "state_dict save save_optimizer_states "
    "save_checkpoint",
    "trainer.load_states(file), or mxmp.load_checkpoint(path, net, trainer)": "load_state_dict load "
    "load_optimizer_states load_checkpoint",
    "trainer.learning_rate, and trainer.set_learning_rate(value)": "lr get_lr set_lr param_groups",
}
_MODULE = {
    "module.update() divides by module.loss_scale": "unscale unscale_ unscale_grads step",
    "optimizer_params={'clip_gradient': limit} clips true gradients": "clip_global_norm clip_grad_norm_ clip",
    "module.discard() leaves a step out; one with an overflow is skipped by itself": "skip_step skip skip_update "
    "reject reject_step",
    "module.discard() sets the gradients to zero, and leaves a step out": "zero_grad zero_grads",
    "module.backward() scales by itself, and the scale is module.loss_scale": "scale scale_loss get_scale",
    "module.scaler.loss_scale = value sets the scale": "update_scale set_scale set_loss_scale",
    "module.last_step_skipped, after update()": "found_inf was_skipped step_skipped skipped",
    "module.save_optimizer_states(file), or mxmp.save_checkpoint(path, module)": "state_dict save_states save",
    "module.load_optimizer_states(file), or mxmp.load_checkpoint(path, module)": "load_state_dict load_states",
    "mxmp.load_checkpoint(path, module), or mxmp.Module.load(prefix, epoch)": "load_checkpoint",
    "optimizer_params={'learning_rate': value, 'lr_scheduler': schedule} sets it": "lr set_lr set_learning_rate",
}
_FIELDS = [field.name for field in fields(Policy)]
# By their first bytes. MXNet's number of a list of arrays: kMXAPINDArrayListMagic, src/ndarray/ndarray.cc.
_BEGINNINGS = {
    b"SQLite format 3\0": "an SQLite database",
    b"\x93NUMPY": "an array of NumPy, as in a .npy file",
    b"\x12\x01\0\0\0\0\0\0": "parameters of MXNet",
    b"\x80": "a pickle, as in a file of optimizer states",
}
_KEYS = {"nodes": "a Symbol in JSON", "operators": "a precision plan, as Plan.save writes it"}


def class_of(value: object) -> str:
    """Return the class of a value with its module, for a message: ``"mxnet.gluon.trainer.Trainer"``, ``"list"``."""
    return f"{type(value).__module__}.{type(value).__name__}".replace("builtins.", "")


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the end of a message about a name that is none of ``known``, ``"; did you mean 'policy'?"``, or ``""``."""
    near = get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def instead(got: Any, wants_symbol: bool = False) -> str:
    """Return the end of a message about ``got``, which is no network of the right kind; ``""`` if nothing is known."""
    if isinstance(got, type):
        return f": that is a class, make an object of it, {got.__name__}(...)"
    if isinstance(got, mx.sym.Symbol):
        return ": for a Symbol use mxmp.cast_symbol, or mxmp.Module to train it"
    if isinstance(got, mx.gluon.Block):
        return ": for a Block use mxmp.convert and mxmp.Trainer"
    if isinstance(got, mx.mod.BaseModule):
        return ": a Module is converted when it is made, mxmp.Module(symbol, policy='float16'); its graph is .symbol"
    if isinstance(got, mx.gluon.Trainer):
        return ": that is a trainer, pass the network that it trains"
    if isinstance(got, mx.gluon.ParameterDict):
        return ": those are parameters, pass the net itself"
    if isinstance(got, (str, os.PathLike)):
        load = "mx.sym.load(file)" if wants_symbol else "gluon.SymbolBlock.imports(symbol_file, ['data'], params_file)"
        return f": load it from its files first, {load}"
    if isinstance(got, (list, tuple, set, dict)):
        return ": call it for each network"
    if isinstance(got, (NDArray, np.ndarray)):
        return ": that is an array, the network comes first"
    return ""


def kind_of(path: str, unless: str = "") -> str:
    """Return the end of a message, ``"it holds a Symbol in JSON"``; ``""`` if not known, or of the kind ``unless``."""
    if os.path.isdir(path):
        return "it is a folder"
    with open(path, "rb") as file:
        begin = file.read(1024)
    found = next((kind for first, kind in _BEGINNINGS.items() if begin.startswith(first)), "")
    if not begin:
        return "it is empty"
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            is_states = {"tree.npy", "digest.npy"} <= set(archive.namelist())
        found = "optimizer states of mxmp" if is_states else "arrays of NumPy, as in a .npz file"
    elif not found:
        try:
            raw = read_json(path)
            keys = raw if isinstance(raw, dict) else ()
            found = next((kind for key, kind in _KEYS.items() if key in keys), "JSON of another kind")
        except UnicodeDecodeError:
            return ""
        except ValueError:
            found = "text that is no JSON"
    return "" if unless and found.startswith(unless) else f"it holds {found}"


def near_name(path: str, ending: str = "") -> str:
    """Return the end of a message about a missing file, such as ``"; did you mean 'net-0010.params'?"``.
    Without a near name it lists files of the folder whose names have the ``ending`` of the kind, if there are any."""
    folder, name = os.path.split(path)
    try:
        there = os.listdir(folder or ".")
    except OSError:
        return f"; there is no folder {folder!r}"
    near = get_close_matches(name, there, n=1, cutoff=0.8)
    if near:
        return f"; did you mean {os.path.join(folder, near[0])!r}?"
    same = sorted(each for each in there if ending and each.endswith(ending))[:3]
    return f"; there is {' or '.join(repr(os.path.join(folder, each)) for each in same)}" if same else ""


def as_shape(value: Any, name: str = "") -> tuple[int, ...]:
    """Return a shape that a user wrote for the input ``name`` as a tuple of int; raise ``ValueError`` if it is none."""
    start = f"{name}=" if name else ""
    if isinstance(value, (tuple, list)):
        sizes = tuple(int(size) for size in value if isinstance(size, Integral) and not isinstance(size, bool))
        if sizes and len(sizes) == len(value) and min(sizes) > 0:
            return sizes
        hint = "every size, that of the batch too, must be a positive integer"
    elif isinstance(value, np.ndarray):
        raise ValueError(f"{start}a NumPy array: give mx.nd.array(x), or its shape {value.shape}")
    else:
        hint = "a shape is a tuple, such as (32, 3, 224, 224)"
        if isinstance(value, Policy) or (isinstance(value, str) and is_policy_text(value)):
            hint = f"a policy is given by name, policy={str(value)!r}"
    raise ValueError(f"{start}{value!r} is neither an MXNet array nor a shape: {hint}")


def wanted_shapes(names: Sequence[str]) -> str:
    """Return the end of a message about inputs whose shapes are not known."""
    return (
        f"{', '.join(names[:5])}: give those of all inputs, such as {names[0]}=(32, 3, 224, 224), or "
        f"--shape {names[0]}=32,3,224,224 on the command line"
    )


def check_shapes(shapes: dict[str, tuple], inputs: list[str], keywords: Sequence[str] = ()) -> None:
    """Raise ``ValueError`` if a name or shape that a user wrote is wrong; ``keywords`` is what else may be meant."""
    largest = 2**63 - 1 if mx.runtime.Features().is_enabled("INT64_TENSOR_SIZE") else 2**31 - 1
    for name, shape in shapes.items():
        if name not in inputs:
            close = get_close_matches(name, [*inputs, *keywords], n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(inputs[:5])}, ..."
            raise ValueError(f"the Symbol has no input {name!r}; {hint}")
        as_shape(shape, name)
        if any(size > largest for size in shape) or prod(shape) > 2**63 - 1:
            raise ValueError(
                f"{name}={shape} is too large for MXNet: a size is at most {largest:,}, all at most 2**63 - 1"
            )


@contextmanager
def dtypes_explained(inputs: Iterable[Any]) -> Iterator[None]:
    """Say what to do where MXNet refuses inputs, arrays or DataDescs, beside FP32 weights, such as float64 data."""
    try:
        yield
    except RuntimeError as error:  # MXNetError is one, and ``simple_bind`` raises others
        odd = sorted({np.dtype(each.dtype).name for each in inputs} - {"float32"})
        said = last_line(error)
        mixed = re.search(r"expected (\w+), got (\w+)", said)
        if not (("requires uniform type" in said and odd) or (mixed and {*mixed.groups()} & {*odd})):
            raise
        raise mx.MXNetError(
            f"an input is {' or '.join(odd)}, and an operator multiplies it by weights of another dtype: call "
            f"x.astype('float32') first. MXNet says: {said}"
        ) from error


def missing_method(owner: object, name: str) -> str:
    """Return the message about ``owner.name`` of a trainer or module, with what to write instead if that is known."""
    table = _TRAINER if hasattr(type(owner), "step") else _MODULE
    hint = next((f": {hint}" for hint, names in table.items() if name.lower() in names.split()), "")
    public = [each for each in dir(type(owner)) if not each.startswith("_")]
    hint = hint or ("" if name.startswith("_") else did_you_mean(name, public, 0.8))
    return f"{type(owner).__name__!r} object has no attribute {name!r}{hint}"


def check_keywords(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise ``TypeError``, with what was meant, if a keyword that ``function`` is given is none of ``known``."""
    for name in given:
        if name not in known:
            raise TypeError(f"{function} takes no argument {name!r}{_keyword_meant(name, known)}")


def _keyword_meant(name: str, known: Collection[str]) -> str:
    if "policy" in known and name in _FIELDS:
        return f"; that is a field of the policy, policy=mxmp.Policy('float16', {name}=...)"
    hint = did_you_mean(name, known)
    if name in ("dtype", "compute", "compute_dtype", "precision", "amp", "fp16", "policy") and not hint:
        takes = "the dtype is the policy, policy='float16'"
        hint = f"; {takes}" if "policy" in known else "; mxmp.convert(net, 'float16') says what a net computes in"
    return hint


def keywords_explained(function: _Function) -> _Function:
    """Let ``function`` say what was meant where it is given a keyword that it does not take, or too many values."""
    parameters = signature(function).parameters
    known = [name for name in parameters if name != "self"]
    ordered = [name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    called_as = function.__qualname__.partition(".")[0]

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        check_keywords(called_as, kwargs, known)
        if len(args) > len(ordered):
            first = ", ".join(name for name in ordered if name != "self")
            others = [f"{name}=..." for name in known if name not in ordered]
            name = f"; write {' or '.join(others)} with its name" if others else ""
            raise TypeError(f"{called_as} takes {first or 'nothing'} by position, got {args[-1]!r:.80} too{name}")
        return function(*args, **kwargs)

    return called  # type: ignore[return-value]


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's that led here, and not at one in MXNet or mxmp."""
    level, frame = 1, currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def error_of(name: str, public: Sequence[str]) -> Exception:
    """Return the error that ``mxmp.__getattr__`` raises: an ``ImportError`` in ``from mxmp import name``."""
    # Python replaces the text of an AttributeError there. ``import`` calls hasattr, for submodules too.
    text = missing(name, public)
    hint = text.partition(": ")[2]
    frame: FrameType | None = currentframe()
    for _ in range(2):  # __getattr__, and what asks it
        frame = frame and frame.f_back
    is_import = frame is not None and frame.f_code.co_name == "_handle_fromlist"
    if hint and is_import and find_spec(f"mxmp.{name}") is None:
        return ImportError(f"cannot import name {name!r} from 'mxmp': {hint}", name="mxmp")
    return AttributeError(text)


def missing(name: str, public: Sequence[str]) -> str:
    """Return the message about ``mxmp.name``, which does not exist, with what to write instead if that is known."""
    hint = next((hint for hint, names in _HINTS.items() if name.lower() in names.split()), "")
    near = get_close_matches(name.lower(), [each.lower() for each in public], n=1)
    if not hint and near:
        hint = f"did you mean mxmp.{next(each for each in public if each.lower() == near[0])}?"
    return f"module 'mxmp' has no attribute {name!r}" + (f": {hint.format(name)}" if hint else "")

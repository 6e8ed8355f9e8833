"""What to write for names of other libraries that a user types as ``mxmp.NAME``."""

from __future__ import annotations

from difflib import get_close_matches
from importlib.util import find_spec
from inspect import currentframe
from types import FrameType
from typing import Sequence

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
    _SYMBOL: "convert_model convert_symbol convert_bucketing_module castsymbol",
    "trainer.unscale() of an mxmp.Trainer; trainer.clip_global_norm(max_norm) needs none": "unscale unscale_ clip_grad",
    _MASTERS: "master_params master_weights multi_precision",
    _OPERATORS: "list_lp16_ops list_fp16_ops list_fp32_ops register_half_function register_float_function",
    "mxmp.optimize_for_inference(net, batches)": "optimize quantize quantize_net quantize_model",
    _DIAGNOSE: "watch blame advise profile plot_histograms plot_loss_scale",
}


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

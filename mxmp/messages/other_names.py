"""What to write instead of a name that mxmp does not have: those of other libraries, and misspelt ones."""

from __future__ import annotations

from difflib import get_close_matches
from importlib.util import find_spec
from inspect import currentframe
from types import FrameType
from typing import Sequence

from .text import did_you_mean

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
    _SYMBOL: "convert_model convert_symbol convert_bucketing_module castsymbol feedforward",
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
    "mx.gluon.utils.clip_global_norm(arrays, max_norm * module.loss_scale), before update(), clips the gradients of "
    "module._exec_group.grad_arrays; optimizer_params={'clip_gradient': limit} clips each element": "clip_global_norm "
    "clip_grad_norm_ clip_grad_norm clip",
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


def missing_method(owner: object, name: str) -> str:
    """Return the message about ``owner.name`` of a trainer or module, with what to write instead if that is known."""
    table = _TRAINER if hasattr(type(owner), "step") else _MODULE
    hint = next((f": {hint}" for hint, names in table.items() if name.lower() in names.split()), "")
    public = [each for each in dir(type(owner)) if not each.startswith("_")]
    hint = hint or ("" if name.startswith("_") else did_you_mean(name, public, 0.8))
    return f"{type(owner).__name__!r} object has no attribute {name!r}{hint}"


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

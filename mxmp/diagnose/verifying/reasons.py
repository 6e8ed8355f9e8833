"""What fits the way in which a run through mxmp in FP32 leaves the plain one."""

from __future__ import annotations

from math import log2

from .judging import Departure, constant_factor

_HEADS = "a loss.backward(), a loss head, CustomOp or autograd.Function that does not pass on its head gradient"


def reasons(at: Departure) -> tuple[str, ...]:
    """Return what fits, the likeliest first."""
    return {
        "updates": _of_updates,
        "weights": _of_weights,
        "losses": _of_losses,
        "outputs": _of_losses,
        "gradients": _of_gradients,
    }[at.what](at)


def _of_updates(at: Departure) -> tuple[str, ...]:
    return (
        "the script leaves out or repeats steps by a number that has the loss scale in it, such as a gradient's norm: "
        "read it after trainer.unscale(), or from trainer.clip_global_norm(max_norm); of a Module, divide it by "
        "module.loss_scale",
        "an update that one of the two runs does not reach, because of a value that it has computed",
    )


def _of_weights(at: Departure) -> tuple[str, ...]:
    return (
        "a learning rate, or another number of the update, that follows gradients with the loss scale in them: call "
        "trainer.unscale() before code that reads gradients; of a Module, divide what it reads by module.loss_scale",
        "the script writes into weights between two steps, from such gradients",
    )


def _of_losses(at: Departure) -> tuple[str, ...]:
    factor = _as_scale(constant_factor(at))
    if factor is not None and factor > 1:
        return (f"the script multiplies the loss by {factor:g}, and trainer.backward does so too: leave it out",)
    gradients = (
        "data or weights that no mxmp.Trainer updates, which the script or another trainer changes by gradients with "
        "the loss scale in them: x.grad of an input is trainer.input_grad(x)"
    )
    values = (
        "a graph keeps what the Python code of a block did when it was made, and that changes now: a value, a branch, "
        "a result that is left somewhere, a number that is drawn"
    )
    return (gradients, values) if at.step > 1 or "loss 1" not in at.names else (values, gradients)


def _of_gradients(at: Departure) -> tuple[str, ...]:
    if at.ratios and max(at.ratios) == 0.0:
        return (
            "no gradient flows there: a result that a block leaves in an attribute is read after the call and is what "
            "it was before, or a loss that is added to the other is no part of the graph",
            "grad_req or grad_mult was changed for one of the two",
        )
    changed = (
        "the script changes or clips gradients between backward and step, with the loss scale in them: call "
        "trainer.unscale() first, or trainer.clip_global_norm(max_norm); of a Module, multiply the limit by "
        "module.loss_scale"
    )
    factor = constant_factor(at)
    scale = _as_scale(factor)
    if scale is not None and scale > 1:
        return (f"they are {scale:g} times too large, with the loss scale in them: nothing has divided by it",)
    if scale is not None:
        return (
            f"they are {1 / scale:g} times too small, divided by a loss scale that they did not have: {_HEADS}",
            "the script divides by the loss scale, too, which step and update do",
            changed,
        )
    if factor is not None and factor > 1 / 256:
        return (
            f"all are {factor:.4g} times those of plain: look at the batch size of step, rescale_grad and grad_req",
        )
    return changed, f"the loss agrees and its gradients do not: {_HEADS}"


def _as_scale(factor: float | None) -> float | None:
    """Return the power of two that a factor is, if it is one and as far from 1 as loss scales are."""
    if factor is None or not max(factor, 1 / factor) >= 256:
        return None
    nearest = 2.0 ** round(log2(factor))
    return nearest if abs(factor / nearest - 1) < 0.01 else None

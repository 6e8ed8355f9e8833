"""What to say of what a converted net does not do, and of what it cannot be made of."""

from __future__ import annotations

from typing import Any


def no_cast(block: str, dtype: Any) -> ValueError:
    return ValueError(
        f"{block}: cast({dtype!r}) of a converted net, which needs FP32 parameters and casts by itself: leave it out, "
        "or call mxmp.restore(net) first for MXNet's own cast"
    )


def no_partition(block: str, backend: str | None) -> ValueError:
    return ValueError(
        f"{block}: optimize_for(backend={backend!r}) partitions the FP32 graph: for inference, "
        "mxmp.optimize_for_inference(net, batches) fuses its graph, or call mxmp.restore(net) for MXNet's partition"
    )


def no_part_of(outer: str, block: str) -> ValueError:
    return ValueError(
        f"{block!r} was converted by mxmp and is now part of {outer!r}, which was not: its casts would be lost. "
        f"Convert the outermost block: mxmp.convert({outer})"
    )


def no_such_memory(block: str, ctx: Any) -> ValueError:
    return ValueError(
        f"{block}: the batch is in {ctx}, where a DataLoader with workers or pin_memory leaves it. As for any "
        "hybridized net, call x.as_in_context(mx.cpu()) or gluon.utils.split_and_load(x, contexts)"
    )


def no_plan_of_another(planned: str, param: str, ctx: Any) -> ValueError:
    return ValueError(f"the plan was made for a {planned}, and {param!r} is on {ctx}: tune there")


def no_two_devices(block: str, contexts: Any) -> ValueError:
    return ValueError(f"{block!r} was given arrays on {sorted(map(str, contexts))}: a graph runs on one device")


def no_part_without_child(block: str, param: str) -> ValueError:
    return ValueError(
        f"{param!r} is a Parameter of a layer that {block!r} calls and that is no child of it, as one in a list, dict "
        "or plain object. No Trainer, no file and no conversion of the net knows it: call self.register_child(layer) "
        "in __init__, or put the layers into a gluon.nn.HybridSequential"
    )


def no_own_graph_call(block: str, kind: str) -> ValueError:
    return ValueError(
        f"{block!r} ({kind}) overrides _call_cached_op, by which MXNet calls the FP32 graph, and a converted block "
        "calls another one. Override forward, or leave the block as Python: "
        f"mxmp.convert(net, exclude=lambda name, block: name == {block!r})"
    )


def no_arrays_of_another(param: str, kind: str) -> ValueError:
    return ValueError(
        f"{kind} {param!r} was made of the arrays of a Parameter that a converted net stores in float16, and lacks its "
        "FP32 master: make it before the first call of the net (as apply_weight_drop does), or call mxmp.restore(net) "
        "before, and mxmp.convert(net) after it"
    )


def unscaled_by(trainer: str) -> str:
    return (
        f"a net computes in float16 and is trained by a {trainer}, which does not scale the loss: gradients below 6e-8 "
        "become zero. Use mxmp.Trainer and trainer.backward(loss), or bfloat16"
    )


def unscaled_backward(net: str) -> str:
    return (
        f"a plain loss.backward() has run through {net!r}, which computes in float16, and without a loss scale "
        "gradients below 6e-8 become zero: use trainer.backward(loss) of an mxmp.Trainer, then step, or, for the "
        "gradient of an input, trainer.input_grad(x) and trainer.discard(); or convert to bfloat16, which needs no "
        "scaling"
    )


def no_contrib_amp() -> RuntimeError:
    return RuntimeError(
        "amp.init() of mxnet.contrib.amp was called in this process, and its casts would stand in every graph beside "
        "mxmp's. It cannot be undone: remove the call, and start Python again. mxmp.convert(net) needs none"
    )


def no_backend(block: str, backend: str) -> ValueError:
    return ValueError(
        f"{block}: hybridize(backend={backend!r}) partitions the FP32 graph, and a converted net runs its own: drop "
        "the backend, or call mxmp.restore(net) first"
    )


def no_low_parameter(param: str, dtype: Any) -> ValueError:
    return ValueError(
        f"Parameter {param!r} is stored in {dtype}: convert takes an FP32 net and casts by itself; call "
        "net.cast('float32') first, and for another cast mxmp.restore(net)"
    )


def no_two_dtypes(param: str, policy: Any) -> ValueError:
    return ValueError(
        f"Parameter {param!r} is shared with a net that was converted to store it in float16, and here ({policy}) it "
        "is read in another dtype: convert both nets with params='float32'"
    )

"""Training of a network on the null GPU, and the figures of one step."""

from __future__ import annotations

from typing import Any

import mxnet as mx
from mxnet import autograd, gluon
from support.zoo.case import Case
from support.zoo.vision import without_drop_blocks

import mxmp

FP32, AMP = "float32", "contrib.amp"


class Training:
    """A case's net with a trainer, in FP32, by ``mxnet.contrib.amp`` or by a policy of mxmp's.

    ``contrib.amp`` patches MXNet: nothing else may be trained in its process, before or after.
    """

    def __init__(
        self,
        case: Case,
        how: str,
        *,
        devices: int = 1,
        optimizer: str = "sgd",
        kvstore: str | None = "device",
        **flags: Any,
    ) -> None:
        if how == AMP:
            from mxnet.contrib import amp

            amp.init()
        self.case, self.how = case, how
        self.contexts = [mx.gpu(i) for i in range(devices)]
        self.net = case.make()
        without_drop_blocks(self.net)
        for name, param in self.net.collect_params().items():
            param.init = "zeros" if name.endswith(("beta", "mean")) else mx.init.Constant(0.5)  # nothing is computed
        self.net.initialize(ctx=self.contexts)
        for param in self.net.collect_params().values():
            if param.list_ctx() != self.contexts:  # GluonCV has initialized some already
                param.reset_ctx(self.contexts)
        if how not in (FP32, AMP):
            mxmp.convert(self.net, how)
        self.net.hybridize(**flags)
        options: dict[str, Any] = {"learning_rate": 0.1}
        if optimizer == "sgd":
            options["momentum"] = 0.9
        if how != FP32:
            options["multi_precision"] = True
        make = gluon.Trainer if how in (FP32, AMP) else mxmp.Trainer
        self._options = (make, optimizer, options, kvstore)
        self._trainer: Any = None

    @property
    def trainer(self) -> Any:
        """Made at the first use: parameters of unknown shapes have values after a forward pass."""
        if self._trainer is None:
            make, optimizer, options, kvstore = self._options
            self._trainer = make(self.net.collect_params(), optimizer, options, kvstore=kvstore)
            if self.how == AMP:
                from mxnet.contrib import amp

                amp.init_trainer(self._trainer)
        return self._trainer

    def forward_backward(self) -> None:
        losses: list[Any] = []
        with autograd.record():
            for ctx in self.contexts:
                with ctx:
                    found = self.case.loss(self.net(*(self.case.train_inputs or self.case.inputs)()))
                    losses += found if isinstance(found, (list, tuple)) else [found]
        if self.how == FP32:
            autograd.backward(losses)
        elif self.how == AMP:
            from mxnet.contrib import amp

            with autograd.record(), amp.scale_loss(losses, self.trainer) as scaled:
                autograd.backward(scaled)
        else:
            self.trainer.backward(losses)

    def step(self) -> None:
        # Some networks carry a layer that they never call.
        self.trainer.step(1, ignore_stale_grad=True)

    def run(self, steps: int = 2) -> None:
        for _ in range(steps):
            self.forward_backward()
            self.step()
        mx.nd.waitall()

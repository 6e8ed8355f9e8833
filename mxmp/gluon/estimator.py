"""The part of ``gluon.contrib.estimator`` that runs backward, scaled."""

from __future__ import annotations

from typing import Any

from mxnet import autograd
from mxnet.gluon.contrib import estimator

from .trainer import Trainer

__all__ = ["BatchProcessor"]


class BatchProcessor(estimator.BatchProcessor):
    """For ``Estimator(net, loss, trainer=mxmp.Trainer(...), batch_processor=mxmp.BatchProcessor())``.

    Everything else of an Estimator stays as it is: handlers, metrics, and the update, which its
    ``GradientUpdateHandler`` makes with ``trainer.step``.
    """

    def fit_batch(self, estimator: Any, train_batch: Any, batch_axis: int = 0) -> tuple:
        """As MXNet's: data, labels, predictions and losses, a list each with one item per device.

        Raises
        ------
        TypeError
            The Estimator's trainer cannot scale.
        """
        if not isinstance(estimator.trainer, Trainer):
            raise TypeError(
                f"mxmp.BatchProcessor scales the loss through an mxmp.Trainer, and the Estimator has a "
                f"{type(estimator.trainer).__module__}.{type(estimator.trainer).__name__}: pass "
                'Estimator(..., trainer=mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}))'
            )
        data, label = self._get_data_and_label(train_batch, estimator.context, batch_axis)
        with autograd.record():
            pred = [estimator.net(x) for x in data]
            loss = [estimator.loss(y_hat, y) for y_hat, y in zip(pred, label)]
        estimator.trainer.backward(loss)
        return data, label, pred, loss

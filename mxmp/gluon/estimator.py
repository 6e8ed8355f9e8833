"""A BatchProcessor, with which Gluon's Estimator trains by an mxmp.Trainer."""

from __future__ import annotations

from typing import Any

from mxnet import autograd
from mxnet.gluon.contrib import estimator

from ..messages.text import class_of
from .trainer import Trainer


class BatchProcessor(estimator.BatchProcessor):
    """Makes Gluon's Estimator train with loss scaling::

        Estimator(net, loss, trainer=mxmp.Trainer(...), batch_processor=mxmp.BatchProcessor())

    Only the forward and backward of a training batch are replaced. Event handlers, metrics and evaluation stay. The
    Estimator's ``GradientUpdateHandler`` still makes the update, with ``trainer.step``.

    Examples
    --------
    >>> net = nn.HybridSequential()
    >>> net.add(nn.Dense(16, activation="relu"), nn.Dense(2))
    >>> net.initialize()
    >>> from mxnet.gluon.contrib.estimator import Estimator
    >>> net = mxmp.convert(net, "float16")
    >>> trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, loss_scale=128.0)
    >>> loss, accuracy = gluon.loss.SoftmaxCrossEntropyLoss(), mx.metric.Accuracy()
    >>> train = Estimator(net, loss, accuracy, trainer=trainer, batch_processor=mxmp.BatchProcessor())
    >>> data = gluon.data.ArrayDataset(mx.nd.random.uniform(shape=(32, 4)), mx.nd.zeros(32))
    >>> train.fit(gluon.data.DataLoader(data, batch_size=8), epochs=1)  # doctest: +ELLIPSIS
    Training begin: ...
    >>> trainer.skipped_steps
    0
    """

    def fit_batch(self, estimator: Any, train_batch: Any, batch_axis: int = 0) -> tuple:
        """Run forward and a scaled backward for one training batch; return ``(data, label, pred, loss)``.

        Each of the four is a list with one NDArray per device, as in MXNet's class. ``train_batch`` is a batch of the
        Estimator's data loader, ``batch_axis`` the axis along which it is split over devices. Does not wait for the
        device. Raises ``TypeError`` if the trainer of ``estimator`` is not an mxmp.Trainer.
        """
        if not isinstance(estimator.trainer, Trainer):
            raise TypeError(
                f"mxmp.BatchProcessor scales the loss through an mxmp.Trainer, and the Estimator has a "
                f"{class_of(estimator.trainer)}: pass "
                'Estimator(..., trainer=mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}))'
            )
        data, label = self._get_data_and_label(train_batch, estimator.context, batch_axis)
        with autograd.record():
            pred = [estimator.net(x) for x in data]
            loss = [estimator.loss(y_hat, y) for y_hat, y in zip(pred, label)]
        estimator.trainer.backward(loss)
        return data, label, pred, loss

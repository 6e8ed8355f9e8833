"""Label smoothing and mixup."""

import argparse
from typing import Tuple

import mxnet as mx
import numpy as np


class Targets:
    """Labels as the loss wants them: class numbers, or distributions (`soft`) under smoothing and mixup."""

    def __init__(self, options: argparse.Namespace, epoch: int) -> None:
        self.classes = options.num_classes
        self.smoothing = 0.1 if options.label_smoothing else 0.0
        self.mixup = options.mixup and epoch < options.num_epochs - options.mixup_off_epoch
        self.alpha = options.mixup_alpha
        self.random = np.random.RandomState(options.seed * 1000 + epoch)
        self.soft = bool(self.mixup or self.smoothing)

    def __call__(self, data: mx.nd.NDArray, label: mx.nd.NDArray) -> Tuple[mx.nd.NDArray, mx.nd.NDArray]:
        if not self.soft:
            return data, label
        low = self.smoothing / self.classes
        target = mx.nd.one_hot(label, self.classes, on_value=1 - self.smoothing + low, off_value=low)
        if self.mixup:
            share = self.random.beta(self.alpha, self.alpha)
            data = share * data + (1 - share) * data.flip(axis=0)
            target = share * target + (1 - share) * target.flip(axis=0)
        return data, target

"""Learning-rate schedules with warm-up, MXNet's own."""

import argparse

from mxnet import lr_scheduler


def learning_rate_schedule(options: argparse.Namespace, steps_per_epoch: int) -> lr_scheduler.LRScheduler:
    """Cosine, squared polynomial or steps, after a linear warm-up."""
    warmup = {"warmup_steps": options.warmup_epochs * steps_per_epoch, "warmup_begin_lr": options.warmup_lr}
    total = options.num_epochs * steps_per_epoch
    if options.lr_mode == "cosine":
        return lr_scheduler.CosineScheduler(total, base_lr=options.lr, **warmup)
    if options.lr_mode == "poly":
        return lr_scheduler.PolyScheduler(total, base_lr=options.lr, pwr=2, **warmup)
    period = options.lr_decay_period
    epochs = range(period, options.num_epochs, period) if period > 0 else options.lr_decay_epoch
    steps = [epoch * steps_per_epoch for epoch in epochs] or [total]
    return lr_scheduler.MultiFactorScheduler(steps, factor=options.lr_decay, base_lr=options.lr, **warmup)

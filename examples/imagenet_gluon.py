"""Trains a GluonCV classification network on ImageNet-style RecordIO in float32, float16 or bfloat16.

    python examples/imagenet_gluon.py --model resnet50_v1b --dtype float16 --batch-size 128 \\
        --rec-train train.rec --rec-val val.rec --last-gamma --no-wd --label-smoothing

It uses every GPU there is, otherwise the CPU. A run resumed from a checkpoint (--resume-epoch,
--resume-params, --resume-states) goes on where the first one stopped; with --optimizer sgd bit for bit.
"""

import argparse
import sys
import time
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from imagenet_common.command import run
from imagenet_common.data import Batch, open_records, train_batches, val_batches
from imagenet_common.errors import UserError
from imagenet_common.network import build_network, devices, last_line, load, policy_for
from imagenet_common.results import log, log_epoch, save, summarize
from imagenet_common.schedule import learning_rate_schedule
from imagenet_common.targets import Targets
from mxnet import autograd
from mxnet.gluon import HybridBlock
from mxnet.gluon.loss import SoftmaxCrossEntropyLoss
from mxnet.gluon.utils import split_and_load
from tqdm import tqdm

import mxmp


def convert(net: HybridBlock, options: argparse.Namespace, context: mx.Context) -> Tuple[HybridBlock, int]:
    """The network in `--dtype` by `--policy`, and how many casts that took."""
    if options.dtype == "float32":
        return net, 0
    try:
        net = mxmp.convert(net, policy_for(options, context))
        report = mxmp.explain(net, mx.nd.zeros((1, 3, options.input_size, options.input_size), ctx=context))
    except ValueError as error:
        raise UserError(f"--dtype {options.dtype}: {last_line(error)}") from None
    if options.explain:
        print(report)
    return net, report.num_casts


def make_trainer(net: HybridBlock, options: argparse.Namespace, steps_per_epoch: int) -> mxmp.Trainer:
    """SGD with (Nesterov) momentum, with the schedule and the loss scale of the options."""
    if options.no_wd:
        for parameter in net.collect_params(".*beta|.*gamma|.*bias").values():
            parameter.wd_mult = 0.0
    schedule = learning_rate_schedule(options, steps_per_epoch)
    settings = {
        "learning_rate": options.lr,
        "lr_scheduler": schedule,
        "momentum": options.momentum,
        "wd": options.wd,
    }
    loss_scale = None if options.loss_scale == "none" else options.loss_scale
    parameters = net.collect_params()
    trainer = mxmp.Trainer(parameters, options.optimizer, settings, kvstore=options.kvstore, loss_scale=loss_scale)
    if options.resume_states:
        load(trainer.load_states, options.resume_states, "--resume-states")
        trainer.optimizer.lr_scheduler = schedule
    return trainer


def train_epoch(
    net: HybridBlock,
    trainer: mxmp.Trainer,
    batches: Iterator[Batch],
    targets: Targets,
    contexts: List[mx.Context],
    bar: tqdm,
    log_interval: int,
) -> List[float]:
    """One pass over the data. Returns the mean loss of each `log_interval` steps."""
    loss_function = SoftmaxCrossEntropyLoss(sparse_label=not targets.soft)
    curve: List[float] = []
    pending: List[mx.nd.NDArray] = []
    for step, batch in enumerate(batches, 1):
        data, target = targets(batch.data, batch.label)
        parts = zip(split_and_load(data, contexts), split_and_load(target, contexts))
        with autograd.record():
            losses = [loss_function(net(x), y) for x, y in parts]
        trainer.backward(losses)
        trainer.step(len(data))
        pending += [loss.mean() for loss in losses]
        bar.update()
        if step % log_interval == 0 or step == bar.total:
            curve.append(float(np.mean([loss.asscalar() for loss in pending])))
            pending.clear()
            bar.set_postfix(loss=f"{curve[-1]:.3f}", scale=f"{trainer.loss_scale:g}")
            log.debug("step %d/%d: loss %.4f, lr %.5f", step, bar.total, curve[-1], trainer.learning_rate)
    return curve


def evaluate(net: HybridBlock, batches: Iterator[Batch], contexts: List[mx.Context]) -> Dict[str, float]:
    """Top-1, top-5 and loss over exactly the samples of the file."""
    metrics = {
        "top1": mx.metric.Accuracy(),
        "top5": mx.metric.TopKAccuracy(5),
        "loss": mx.metric.CrossEntropy(),
    }
    for batch in batches:
        outputs = [net(x).as_in_context(mx.cpu()) for x in split_and_load(batch.data, contexts)]
        probabilities = mx.nd.softmax(mx.nd.concat(*outputs, dim=0)[: batch.valid])
        for metric in metrics.values():
            metric.update(batch.label[: batch.valid], probabilities)
    return {name: float(metric.get()[1]) for name, metric in metrics.items()}


def save_if_due(
    net: HybridBlock, trainer: mxmp.Trainer, options: argparse.Namespace, history: List[Dict[str, Any]]
) -> None:
    """MODEL-EPOCH.params (which plain MXNet loads) with MODEL-EPOCH.states, and MODEL-best.params."""
    if not options.save_frequency:
        return
    options.save_dir.mkdir(parents=True, exist_ok=True)
    stem = options.save_dir / options.model
    epoch = history[-1]["epoch"]
    if epoch % options.save_frequency == 0 or epoch == options.num_epochs:
        net.save_parameters(f"{stem}-{epoch}.params")
        trainer.save_states(f"{stem}-{epoch}.states")
    if history[-1]["top1"] >= max(entry["top1"] for entry in history):
        net.save_parameters(f"{stem}-best.params")


def train(options: argparse.Namespace) -> Dict[str, Any]:
    """The whole run. Returns its figures and curves as plain data."""
    contexts = devices(options.num_gpus)
    batch_size = options.batch_size * len(contexts)
    train_records = open_records(options.rec_train, options.rec_train_idx, options.num_classes)
    val_records = open_records(options.rec_val, options.rec_val_idx, options.num_classes)
    mx.random.seed(options.seed)
    np.random.seed(options.seed)
    net, casts = convert(build_network(options, contexts), options, contexts[0])
    net.hybridize(static_alloc=True, static_shape=True)
    steps = -(-train_records.count // batch_size)
    trainer = make_trainer(net, options, steps)
    log.info(
        "%s in %s on %s: %d steps of %d images an epoch",
        options.model,
        options.dtype,
        contexts,
        steps,
        batch_size,
    )
    history: List[Dict[str, Any]] = []
    for epoch in range(options.resume_epoch, options.num_epochs):
        mx.random.seed(options.seed * 1000 + epoch)
        start = time.perf_counter()
        label = f"{options.dtype} {epoch + 1}/{options.num_epochs}"
        with tqdm(total=steps, desc=label, unit="step", disable=None, leave=False) as bar:
            batches = train_batches(train_records, options, batch_size, epoch)
            curve = train_epoch(net, trainer, batches, Targets(options, epoch), contexts, bar, options.log_interval)
        mx.nd.waitall()
        entry: Dict[str, Any] = {
            "epoch": epoch + 1,
            "seconds": time.perf_counter() - start,
            "train_loss": curve,
        }
        entry.update(evaluate(net, val_batches(val_records, options, batch_size), contexts))
        entry.update(loss_scale=trainer.loss_scale, skipped_steps=trainer.skipped_steps)
        history.append(entry)
        log_epoch(entry, options, steps * batch_size)
        save_if_due(net, trainer, options, history)
        save(summarize(options, history, steps, casts), options)
    return summarize(options, history, steps, casts)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Runs the command line; bad input is one line on stderr and status 2."""
    return run(__doc__.splitlines()[0], train, arguments)


if __name__ == "__main__":
    sys.exit(main())

"""Trains a network as a Symbol with Module.fit on ImageNet-style RecordIO in float32, float16 or bfloat16.

    python examples/imagenet_symbolic.py --model resnet50_v1b --dtype float16 --batch-size 128 \\
        --rec-train train.rec --rec-val val.rec --last-gamma --no-wd --label-smoothing

The networks (ResNet, AlexNet, VGG, Inception v3, ResNeXt and the rest) are GluonCV's, traced into Symbols with
a SoftmaxOutput head; options, data, table and picture are those of imagenet_gluon.py. Checkpoints are plain
MXNet files that mx.mod.Module.load opens.
"""

import argparse
import logging
import os
import sys
import time
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from imagenet_common.command import run
from imagenet_common.data import Batch, open_records, train_batches, val_batches
from imagenet_common.errors import UserError
from imagenet_common.network import build_network, devices, last_line, load, policy_for
from imagenet_common.results import log, log_epoch, summarize
from imagenet_common.schedule import learning_rate_schedule
from imagenet_common.targets import Targets
from tqdm import tqdm

import mxmp


class Epochs(mx.io.DataIter):
    """A fresh pass over the records at every reset, as Module.fit wants it."""

    def __init__(self, options: argparse.Namespace, records: Any, batch_size: int, training: bool) -> None:
        super().__init__(batch_size)
        self.options, self.records, self.training = options, records, training
        self.epoch = options.resume_epoch
        self.soft = Targets(options, 0).soft
        self.batches: Iterator[Batch] = self._open()
        size = options.input_size
        self.provide_data = [mx.io.DataDesc("data", (batch_size, 3, size, size))]
        shape = (batch_size, options.num_classes) if self.soft else (batch_size,)
        self.provide_label = [mx.io.DataDesc("softmax_label", shape)]

    def _open(self) -> Iterator[Batch]:
        if not self.training:
            return val_batches(self.records, self.options, self.batch_size)
        self.targets = Targets(self.options, self.epoch)
        mx.random.seed(self.options.seed * 1000 + self.epoch)
        return train_batches(self.records, self.options, self.batch_size, self.epoch)

    def reset(self) -> None:
        self.epoch += 1
        self.batches = self._open()

    def next(self) -> mx.io.DataBatch:
        batch = next(self.batches)
        if self.training:
            data, label = self.targets(batch.data, batch.label)
            return mx.io.DataBatch([data], [label], pad=0)
        label = batch.label.one_hot(self.options.num_classes) if self.soft else batch.label
        return mx.io.DataBatch([batch.data], [label], pad=self.batch_size - batch.valid)


def as_symbol(options: argparse.Namespace) -> Tuple[mx.sym.Symbol, Dict[str, Any], Dict[str, Any]]:
    """GluonCV's network with a softmax head, and its parameters: initial ones, or those of --resume-params."""
    with mx.name.NameManager():  # the names of a first network, whatever was built before
        net = build_network(argparse.Namespace(**{**vars(options), "resume_params": None}), [mx.cpu()])
    symbol = mx.sym.SoftmaxOutput(net(mx.sym.var("data")), mx.sym.var("softmax_label"), name="softmax")
    values = {name: parameter.data() for name, parameter in net.collect_params().items()}
    if options.resume_params:
        saved: Dict[str, Any] = {}
        load(lambda path: saved.update(mx.nd.load(path)), options.resume_params, "--resume-params")
        values = {name.split(":", 1)[-1]: value for name, value in saved.items()}
        missing = sorted({*symbol.list_inputs()} - {*values, "data", "softmax_label"})
        if missing:
            raise UserError(f"--resume-params {options.resume_params}: holds no {missing[0]}; not of {options.model}")
    args = {name: values[name] for name in symbol.list_arguments() if name in values}
    return symbol, args, {name: values[name] for name in symbol.list_auxiliary_states()}


def make_module(
    symbol: mx.sym.Symbol, options: argparse.Namespace, contexts: List[mx.Context]
) -> Tuple[mx.mod.Module, int]:
    """The module in `--dtype` by `--policy`, and how many casts that took."""
    logger = logging.getLogger("imagenet.module")
    logger.setLevel(logging.ERROR)  # fit() would say that it is bound already
    common: Dict[str, Any] = {"context": contexts, "logger": logger}
    if options.dtype == "float32":
        return mx.mod.Module(symbol, **common), 0
    loss_scale = None if options.loss_scale == "none" else options.loss_scale
    try:
        policy = policy_for(options, contexts[0])
        module = mxmp.Module(symbol, policy=policy, loss_scale=loss_scale, **common)
        report = mxmp.explain(symbol, policy=policy, ctx=contexts[0])
    except ValueError as error:
        raise UserError(f"--dtype {options.dtype}: {last_line(error)}") from None
    if options.explain:
        print(report)
    return module, report.num_casts


def prepare(
    module: mx.mod.Module, data: Epochs, args: Dict[str, Any], auxs: Dict[str, Any], options: argparse.Namespace
) -> None:
    """Bind, set the parameters, and make the optimizer; a resumed run gets its states."""
    module.bind(data.provide_data, data.provide_label)
    module.set_params(args, auxs)
    steps = -(-data.records.count // data.batch_size)
    settings = {
        "learning_rate": options.lr,
        "lr_scheduler": learning_rate_schedule(options, steps),
        "momentum": options.momentum,
        "wd": options.wd,
        "begin_num_update": options.resume_epoch * steps,  # a plain Module's states file holds no counts
    }
    module.init_optimizer(options.kvstore, options.optimizer, settings)
    decays = [name for name in args if not options.no_wd or name.endswith("_weight")]
    module._optimizer.set_wd_mult({name: float(name in decays) for name in args})
    if options.resume_states:
        load(module.load_optimizer_states, options.resume_states, "--resume-states")


class Progress:
    """What Module.fit calls back: the bar, the curve, the figures of every epoch, the checkpoints."""

    def __init__(self, module: mx.mod.Module, options: argparse.Namespace, data: Epochs, validation: Epochs) -> None:
        self.module, self.options, self.validation = module, options, validation
        self.steps = -(-data.records.count // data.batch_size)
        self.images = self.steps * data.batch_size
        self.history: List[Dict[str, Any]] = []
        self.begin()

    def begin(self) -> None:
        self.curve: List[float] = []
        self.start = time.perf_counter()
        label = f"{self.options.dtype} {len(self.history) + 1 + self.options.resume_epoch}/{self.options.num_epochs}"
        self.bar = tqdm(total=self.steps, desc=label, unit="step", disable=None, leave=False)

    def batch_end(self, state: Any) -> None:
        self.bar.update()
        if (state.nbatch + 1) % self.options.log_interval == 0 or state.nbatch + 1 == self.steps:
            self.curve.append(float(state.eval_metric.get()[1]))
            state.eval_metric.reset()
            self.bar.set_postfix(loss=f"{self.curve[-1]:.3f}", scale=f"{getattr(self.module, 'loss_scale', 1):g}")

    def epoch_end(self, epoch: int, symbol: mx.sym.Symbol, args: Dict[str, Any], auxs: Dict[str, Any]) -> None:
        self.bar.close()
        entry = {
            "epoch": epoch + 1,
            "seconds": time.perf_counter() - self.start,
            "train_loss": self.curve,
            "loss_scale": getattr(self.module, "loss_scale", 1.0),
            "skipped_steps": getattr(self.module, "skipped_steps", 0),
        }
        self.history.append({**entry, **evaluate(self.module, self.validation)})
        log_epoch(self.history[-1], self.options, self.images)
        self.save_if_due()
        self.begin()

    def save_if_due(self) -> None:
        """PREFIX-symbol.json, PREFIX-0010.params and PREFIX-0010.states, as Module.load names them."""
        epoch, every = self.history[-1]["epoch"], self.options.save_frequency
        if every and (epoch % every == 0 or epoch == self.options.num_epochs):
            self.options.save_dir.mkdir(parents=True, exist_ok=True)
            self.module.save_checkpoint(str(self.options.save_dir / self.options.model), epoch, True)


def soft_cross_entropy(target: np.ndarray, probability: np.ndarray) -> float:
    return float(-(target * np.log(probability + 1e-12)).sum(1).mean())


def evaluate(module: mx.mod.Module, batches: Epochs) -> Dict[str, float]:
    """Top-1, top-5 and loss over exactly the samples of the file."""
    found = {"top1": mx.metric.Accuracy(), "top5": mx.metric.TopKAccuracy(5), "loss": mx.metric.CrossEntropy()}
    for (probabilities,), _, batch in module.iter_predict(batches):
        label = batch.label[0][: len(probabilities)]
        label = label.argmax(axis=1) if batches.soft else label
        for metric in found.values():
            metric.update(label, probabilities)
    return {name: float(metric.get()[1]) for name, metric in found.items()}


def train(options: argparse.Namespace) -> Dict[str, Any]:
    """The whole run. Returns its figures and curves as plain data."""
    contexts = devices(options.num_gpus)
    batch_size = options.batch_size * len(contexts)
    records = [
        open_records(path, index, options.num_classes)
        for path, index in ((options.rec_train, options.rec_train_idx), (options.rec_val, options.rec_val_idx))
    ]
    mx.random.seed(options.seed)
    np.random.seed(options.seed)
    symbol, args, auxs = as_symbol(options)
    module, casts = make_module(symbol, options, contexts)
    data, validation = (Epochs(options, r, batch_size, training) for r, training in zip(records, (True, False)))
    prepare(module, data, args, auxs, options)
    progress = Progress(module, options, data, validation)
    log.info("%s in %s on %s: %d steps an epoch", options.model, options.dtype, contexts, progress.steps)
    module.fit(
        data,
        eval_metric=mx.metric.CustomMetric(soft_cross_entropy) if data.soft else mx.metric.CrossEntropy(),
        batch_end_callback=progress.batch_end,
        epoch_end_callback=progress.epoch_end,
        arg_params=args,
        aux_params=auxs,
        force_init=True,  # the same values again, or fit() warns that there are some already
        begin_epoch=options.resume_epoch,
        num_epoch=options.num_epochs,
    )
    progress.bar.close()
    return summarize(options, progress.history, progress.steps, casts)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Runs the command line; bad input is one line on stderr and status 2."""
    os.environ.setdefault("MXNET_SUBGRAPH_BACKEND", "NONE")  # MXNet's own fusion is wrong on some residual networks
    return run(__doc__.splitlines()[0], train, arguments)


if __name__ == "__main__":
    sys.exit(main())

"""Whether the libraries on top of MXNet train alike in FP32 and in both dtypes: those that are installed.

Prints losses by library and dtype, and ends with 1 where those at the end differ by more than a tenth. Each network is
small: a ResNet for CIFAR of GluonCV, a BERT of GluonNLP, DeepAR of GluonTS, a transformer of Sockeye.
GluonTS and Sockeye: pip install --no-deps gluonts==0.13.8 sockeye==2.3.24, and what their import asks for.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any, Callable, Iterator

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from support.options import parse
from support.pages import table

import mxmp

DTYPES = ("float32", "bfloat16", "float16")
STEPS = 30
CLOSE = 0.1


def main(arguments: list[str] | None = None) -> int:
    args = parse(__doc__, arguments, libraries=([str], "default: all that are installed", tuple(LIBRARIES)))
    rows, differ = [], False
    for name in args.libraries or [name for name in LIBRARIES if importlib.util.find_spec(name)]:
        last = []
        for dtype in DTYPES:
            mx.random.seed(0)
            np.random.seed(0)
            losses = list(LIBRARIES[name](dtype))
            rows.append([name, importlib.metadata.version(name), dtype, *(f"{x:.4f}" for x in losses)])
            last.append(losses[-1])
        differ |= max(abs(loss - last[0]) for loss in last) > CLOSE * abs(last[0])
    print(f"MXNet {mx.__version__}: losses in the first and the last step\n")
    print(table("library | version | dtype | first | last", rows))
    return int(differ)


def gluoncv(dtype: str) -> Iterator[float]:
    from gluoncv.model_zoo import get_model

    net = get_model("cifar_resnet20_v1", classes=10)
    return trained(net, [mx.nd.random.uniform(shape=(8, 3, 32, 32))], mx.nd.arange(8), dtype)


def gluonnlp(dtype: str) -> Iterator[float]:
    from gluonnlp.model import BERTEncoder, BERTModel

    encoder = BERTEncoder(num_layers=2, units=32, hidden_size=64, num_heads=4, max_length=16, dropout=0)
    net = BERTModel(encoder, vocab_size=100, token_type_vocab_size=2, units=32, embed_size=32, use_decoder=False)
    tokens, lengths = mx.nd.array(np.random.randint(0, 100, (8, 16))), mx.nd.array([16, 8, 9, 12] * 2)
    return trained(net, [tokens, mx.nd.zeros((8, 16)), lengths], mx.nd.array([0, 1] * 4), dtype)


def sockeye(dtype: str) -> Iterator[float]:
    from sockeye import constants, data_io, encoder, model, transformer

    part = transformer.TransformerConfig(
        *(32, 4, 64, "relu", 2, 0, 0, 0, constants.FIXED_POSITIONAL_EMBEDDING, "n", "dr", 20, 20)
    )
    embedding = [encoder.EmbeddingConfig(vocab_size=50, num_embed=32, dropout=0) for _ in range(2)]
    net = model.SockeyeModel(model.ModelConfig(data_io.DataConfig(None, 20, 20, 1, 1), 50, 50, *embedding, part, part))
    source, target = (mx.nd.array(np.random.randint(4, 50, (8, length, 1))) for length in (10, 9))
    args = [source, mx.nd.full((8,), 10), target, mx.nd.full((8,), 9)]
    return trained(net, args, target.squeeze(axis=2), dtype, read=lambda out: out[constants.LOGITS_NAME])


def gluonts(dtype: str) -> Iterator[float]:
    # Its own Trainer trains, so a callback of its converts the network, and nothing scales the loss.
    import pandas
    from gluonts.dataset.common import ListDataset
    from gluonts.mx import DeepAREstimator, Trainer
    from gluonts.mx.trainer.callback import Callback

    losses: list[float] = []

    class Convert(Callback):
        def on_network_initializing_end(self, training_network: gluon.HybridBlock) -> None:
            if dtype != "float32":
                mxmp.convert(training_network, dtype)

        def on_train_epoch_end(self, epoch_no: int, epoch_loss: float, **given: Any) -> bool:
            losses.append(epoch_loss)
            return True

    waves = [5 + np.sin(np.arange(400) / 7 + i) + np.random.normal(0, 0.1, 400) for i in range(8)]
    data = ListDataset([{"start": pandas.Timestamp("2020-01-01"), "target": wave} for wave in waves], freq="H")
    trainer = Trainer(epochs=2, num_batches_per_epoch=STEPS, callbacks=[Convert()])
    DeepAREstimator(freq="H", prediction_length=24, dropout_rate=0, trainer=trainer).train(data)
    yield from (losses[0], losses[-1])


def trained(
    net: gluon.Block,
    args: list[mx.nd.NDArray],
    labels: mx.nd.NDArray,
    dtype: str,
    read: Callable = lambda out: out[-1] if isinstance(out, (tuple, list)) else out,
) -> Iterator[float]:
    """Train on one batch and yield its first and last loss; ``read`` takes the scores from the output."""
    net.initialize(mx.init.Xavier())
    net(*args)
    is_fp32 = dtype == "float32"
    if not is_fp32:
        mxmp.convert(net, dtype)
    trainer = (gluon if is_fp32 else mxmp).Trainer(
        net.collect_params(), "adam", {"learning_rate": 1e-3}, **({} if is_fp32 else {"loss_scale": 128})
    )
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    for step in range(STEPS):
        with autograd.record():
            loss = loss_of(read(net(*args)), labels)
        loss.backward() if is_fp32 else trainer.backward(loss)
        trainer.step(len(labels))
        if step in (0, STEPS - 1):
            yield float(loss.mean().asscalar())


LIBRARIES: dict[str, Callable[[str], Iterator[float]]] = {
    each.__name__: each for each in (gluoncv, gluonnlp, gluonts, sockeye)
}

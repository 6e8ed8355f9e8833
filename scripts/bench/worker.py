"""One variant of one network, a step at a time: see ``turns.Worker``.

A variant of PyTorch's is run by a Python that has torch and torchvision; MXNet needs an older NumPy than theirs.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Callable, Dict, Iterator, Tuple

from bench.networks import WORDS, Network, network
from bench.turns import answers, operators, serve, timed

PROFILED = 3  # steps
Step = Tuple[
    Callable[[], Any], Callable[[], Dict[str, Any]]
]  # runs one step, returns whether it was skipped; profiles it


def run(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the answers: that it is prepared, and to each command."""
    chosen = network(config["network"])
    if config["variant"].startswith("torch"):
        yield from answers(partial(torch_step, chosen, **config), lambda: None)
        return
    import mxnet as mx

    on_gpu = config.get("device") == "gpu"
    if on_gpu:
        mx.test_utils.set_default_context(mx.gpu())
    if config["variant"] == "tuning":
        yield tune(chosen, **config)
    else:
        yield from answers(partial(mxnet_step, chosen, **config), mx.nd.waitall, gpu_bytes if on_gpu else None)


def gpu_bytes() -> int:
    """Return the bytes of the GPU that are in use. MXNet's pool gives none back, so this is its peak so far."""
    import mxnet as mx

    mx.nd.waitall()
    free, total = mx.context.gpu_memory_info()
    return total - free


def tune(net_of: Network, *, task: str, policy: str, batch: int, size: int, plan: str, **_: Any) -> dict:
    """Write the plan for ``tuned``, in a process of its own: what tuning takes is no part of a step's peak memory."""
    import mxmp

    started, net = time.perf_counter(), initialized(net_of)
    made = mxmp.tune(net, *net_of.inputs(batch, size), policy=policy, training=task == "training", cache=False)
    made.save(plan)
    chosen, gains = made.tuned.chosen, made.tuned.gains
    found = {"operators": len(made.decisions), "chosen": chosen, "predicted": made.tuned.predicted.get(chosen, 1.0)}
    measured = gains[chosen][1] if chosen in gains else 1.0
    return {"seconds": time.perf_counter() - started, **found, "measured": measured}


def initialized(net_of: Network) -> Any:
    import mxnet as mx
    import numpy as np

    mx.random.seed(0)
    np.random.seed(0)
    net = net_of.make()
    net.initialize(mx.init.MSRAPrelu() if net_of.optimizer == "sgd" else mx.init.Normal(0.02))
    return net


def mxnet_step(
    net_of: Network, *, variant: str, task: str, dtype: str, policy: str, batch: int, size: int, plan: str, **_: Any
) -> Step:
    from mxnet import autograd, gluon

    if variant == "contrib.amp":
        from mxnet.contrib import amp

        amp.init(dtype)
    import mxmp

    net, inputs, ours = initialized(net_of), net_of.inputs(batch, size), variant not in ("float32", "contrib.amp")
    if ours:
        named = {"rules": policy, "tuned": plan}.get(variant, variant)
        mxmp.convert(net, mxmp.Plan.load(named) if variant == "tuned" else named)
    net.hybridize(static_alloc=True, static_shape=True)
    if task != "training":
        step: Callable[[], Any] = partial(net, *inputs)
        return step, partial(profile, net, step)

    with autograd.record():  # SSD traces another network for inference, and MXNet keeps the first
        net(*inputs)  # shapes of the parameters
    kind = mxmp.Trainer if ours else gluon.Trainer
    options = {**net_of.options, **({"multi_precision": True} if dtype == "float16" and variant != "float32" else {})}
    trainer = kind(net.collect_params(), net_of.optimizer, options)
    if variant == "contrib.amp" and dtype == "float16":
        amp.init_trainer(trainer)

    def train() -> bool:
        with autograd.record():
            loss = net_of.loss(net(*inputs), batch)
            if variant == "contrib.amp" and dtype == "float16":
                with amp.scale_loss(loss, trainer) as loss:
                    pass
        (trainer if ours else autograd).backward(loss)
        trainer.step(batch, ignore_stale_grad=True)  # some networks carry a layer that they never call
        return ours and trainer.last_step_skipped

    return train, partial(profile, net, train)


def profile(net: Any, step: Callable[[], Any]) -> dict[str, dict]:
    """Return of each operator that one step runs how often, and milliseconds in all."""
    import mxnet as mx

    net.hybridize(static_alloc=False, static_shape=False)  # a static graph runs in bulks of many operators
    step()
    found = operators(lambda: [timed(step, mx.nd.waitall) for _ in range(PROFILED)])
    return {"operators": {name: [count / PROFILED, ms / PROFILED] for name, (count, ms) in found.items()}}


def torch_step(net_of: Network, *, variant: str, task: str, dtype: str, batch: int, size: int, **_: Any) -> Step:
    """On a CPU: PyTorch's kernels are done when a step returns. It is not profiled."""
    import torch

    torch.manual_seed(0)
    net, x, classes = torch_network(str(net_of.torch), batch, size)
    low = torch.autocast("cpu", dtype=getattr(torch, dtype), enabled=variant == "torch.autocast")
    if task != "training":
        net.eval()

        def predict() -> None:
            with torch.no_grad(), low:
                net(x)

        return predict, lambda: {"operators": {}}

    net.train()
    options = dict(net_of.options, lr=net_of.options["learning_rate"])
    del options["learning_rate"]
    optimizer = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[net_of.optimizer](net.parameters(), **options)

    def train() -> None:
        optimizer.zero_grad()
        with low:
            out = net(x)
            out, *auxiliary = out if isinstance(out, tuple) else (out,)
            if classes is None:
                loss = (out.float() ** 2).mean()
            else:
                labels, entropy = torch.arange(out.shape[0]) % classes, torch.nn.functional.cross_entropy
                loss = entropy(out, labels) + 0.4 * sum(entropy(each, labels) for each in auxiliary)
        loss.backward()
        optimizer.step()

    return train, lambda: {"operators": {}}


def torch_network(name: str, batch: int, size: int) -> tuple[Any, Any, int | None]:
    """Return the network, its input, and how many classes it tells apart."""
    import torch
    from torch import nn

    if name == "bert":
        layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, activation="gelu")
        return nn.TransformerEncoder(layer, 12, enable_nested_tensor=False), torch.randn(size, batch, 768), None
    if name == "lstm":

        class LanguageModel(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embedding, self.lstm = nn.Embedding(WORDS, 650), nn.LSTM(650, 650, 2)
                self.out = nn.Linear(650, WORDS)

            def forward(self, x: Any) -> Any:
                return self.out(self.lstm(self.embedding(x))[0]).flatten(0, 1)

        return LanguageModel(), torch.randint(0, WORDS, (size, batch)), WORDS
    import torchvision

    return getattr(torchvision.models, name)(weights=None), torch.randn(batch, 3, size, size), 1000


if __name__ == "__main__":
    serve(run)

"""One variant of one network in PyTorch on a CPU, a step at a time: see ``turns.Worker``.

Run by a Python that has torch and torchvision; MXNet needs an older NumPy than theirs.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, Callable, Iterator

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.networks import WORDS, Network, network
from bench.turns import peak_bytes, serve


def run(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The answers: that it is prepared, and to each command."""
    before = peak_bytes()
    step = make_step(network(config["network"]), **config)
    step()
    yield {"prepared": 0.0}
    for command in map(str.strip, sys.stdin):
        if command == "step":
            start = time.perf_counter()
            step()
            yield {"seconds": time.perf_counter() - start}
        elif command == "memory":
            yield {"peak": peak_bytes(), "before": before}
        elif command == "profile":
            yield {"operators": {}}


def make_step(
    net_of: Network, *, variant: str, task: str, dtype: str, batch: int, size: int, **_: Any
) -> Callable[[], None]:
    """A function that runs one step; PyTorch's CPU kernels are done when it returns."""
    import torch

    torch.manual_seed(0)
    net, x, classes = made(str(net_of.torch), batch, size)
    low = torch.autocast("cpu", dtype=getattr(torch, dtype), enabled=variant == "torch.autocast")
    if task != "training":
        net.eval()

        def predict() -> None:
            with torch.no_grad(), low:
                net(x)

        return predict

    net.train()
    if net_of.optimizer == "adam":
        optimizer: Any = torch.optim.Adam(net.parameters(), net_of.options["learning_rate"])
    else:
        optimizer = torch.optim.SGD(net.parameters(), net_of.options["learning_rate"], momentum=0.9)

    def train() -> None:
        optimizer.zero_grad()
        with low:
            out = net(x)
            out, *auxiliary = out if isinstance(out, tuple) else (out,)
            if classes is None:
                loss = (out.float() ** 2).mean()
            else:
                labels = torch.arange(out.shape[0]) % classes
                entropy = torch.nn.functional.cross_entropy
                loss = entropy(out, labels) + 0.4 * sum(entropy(each, labels) for each in auxiliary)
        loss.backward()
        optimizer.step()

    return train


def made(name: str, batch: int, size: int) -> tuple[Any, Any, int | None]:
    """The network, its input, and how many classes it tells apart."""
    import torch
    from torch import nn

    if name == "bert":
        layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, activation="gelu")
        return nn.TransformerEncoder(layer, 12, enable_nested_tensor=False), torch.randn(size, batch, 768), None
    if name == "lstm":
        return LanguageModel(nn), torch.randint(0, WORDS, (size, batch)), WORDS
    import torchvision

    return getattr(torchvision.models, name)(weights=None), torch.randn(batch, 3, size, size), 1000


def LanguageModel(nn: Any) -> Any:  # noqa: N802
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.lstm, self.out = nn.Embedding(WORDS, 650), nn.LSTM(650, 650, 2), nn.Linear(650, WORDS)

        def forward(self, x: Any) -> Any:
            return self.out(self.lstm(self.embedding(x))[0]).flatten(0, 1)

    return Net()


if __name__ == "__main__":
    serve(run)

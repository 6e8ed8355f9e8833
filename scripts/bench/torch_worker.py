"""One variant of one network in PyTorch on a CPU, a step at a time: see ``turns.Worker``.

Run by a Python that has torch and torchvision; MXNet needs an older NumPy than theirs.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Iterator

from bench.networks import WORDS, Network, network
from bench.turns import answers, serve


def run(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the answers: that it is prepared, and to each command."""
    yield from answers(partial(make_step, network(config["network"]), **config), lambda: None)


def make_step(
    net_of: Network, *, variant: str, task: str, dtype: str, batch: int, size: int, **_: Any
) -> tuple[Callable[[], None], Callable[[], dict]]:
    """Return a function that runs one step, and no profile; PyTorch's CPU kernels are done when it returns."""
    import torch

    torch.manual_seed(0)
    net, x, classes = made(str(net_of.torch), batch, size)
    low = torch.autocast("cpu", dtype=getattr(torch, dtype), enabled=variant == "torch.autocast")
    if task != "training":
        net.eval()

        def predict() -> None:
            with torch.no_grad(), low:
                net(x)

        return predict, dict

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

    return train, dict


def made(name: str, batch: int, size: int) -> tuple[Any, Any, int | None]:
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

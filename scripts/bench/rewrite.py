"""How long deciding, rewriting and lowering take.

    python scripts/bench_rewrite.py

Chains of doubling length, up to 100,000 nodes, show that the time is linear; ResNet-152 is the largest
network that users meet.
"""

from __future__ import annotations

import statistics
import time
import warnings

import mxnet as mx

from mxmp.policy import Policy
from mxmp.precision.graph import Entry, Graph, Node
from mxmp.precision.pipeline import low_graph


def main() -> None:
    warnings.simplefilter("ignore")
    print(f"{'graph':<22}{'nodes':>9}{'ms':>9}{'us/node':>9}   rewrite only, median of 5")
    for length in (12_500, 25_000, 50_000, 100_000):
        report(f"chain of {length:,}", chain(length))
    from gluoncv.model_zoo import get_model

    report("resnet152_v1b", Graph.from_symbol(get_model("resnet152_v1b")(mx.sym.var("data"))))


def chain(length: int) -> Graph:
    """FullyConnected and relu in turn."""
    entry = Entry(Node("null", "data"))
    for i in range(length // 3):
        weight = Entry(Node("null", f"fc{i}_weight"))
        attrs = {"num_hidden": "4", "no_bias": "True", "flatten": "False"}
        entry = Entry(Node("FullyConnected", f"fc{i}", attrs, [entry, weight]))
        entry = Entry(Node("relu", f"relu{i}", {}, [entry]))
    return Graph([entry])


def report(name: str, graph: Graph) -> None:
    nodes = sum(1 for _ in graph.nodes())
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        low_graph(graph, Policy("float16"), "gpu")
        taken.append(time.perf_counter() - start)
    median = statistics.median(taken)
    print(f"{name:<22}{nodes:>9,}{median * 1e3:>9.1f}{median / nodes * 1e6:>9.2f}")


if __name__ == "__main__":
    main()

"""Drawn graphs: what mxmp emulates on a CPU is what the machine code of MXNet's kernels computes.

MXMP_DRAWN=1000 tries as many graphs; ``gpu.sim.drawn`` counts them.
"""

from __future__ import annotations

import os

import pytest
from gpu.sim.drawn import LIMIT, RESULTS, Drawn
from support.results import read

TESTS_PER_PROCESS = 12
ENDS = {*read(RESULTS)["ends its process"]}  # in a CPU's backward (SIGFPE), in plain FP32 too


@pytest.mark.parametrize("seed", sorted({*range(int(os.environ.get("MXMP_DRAWN", "24")))} - ENDS))
def test_the_emulation_is_what_a_gpu_computes(seed):
    graph = Drawn(seed)
    verdict, error, where = graph.judged()
    assert verdict != "differs", f"{error:.3g} units, not {LIMIT}, in {where}: {' '.join(graph.kinds)}"

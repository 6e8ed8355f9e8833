"""Linear systems: the LU's products are a converted network's, and refinement solves what FP64 solves."""

import importlib
from pathlib import Path

import numpy as np
import pytest
from scipy.linalg import lu_factor

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes"


@pytest.fixture
def refinement(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    return importlib.import_module("refinement")


def in_float16(matrix):
    return matrix.astype("float16").astype("float32")


def test_products_read_and_round_to_float16_and_sum_in_float32(refinement):
    random = np.random.RandomState(0)
    left, right = random.randn(30, 20).astype("float32"), random.randn(20, 40).astype("float32")
    wanted = in_float16(in_float16(left) @ in_float16(right))
    np.testing.assert_array_equal(refinement.product("float16")(left, right), wanted)
    np.testing.assert_allclose(refinement.product("float32")(left, right), left @ right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [20, 32, 75])
def test_the_lu_is_that_of_lapack(refinement, size):
    matrix = np.random.RandomState(size).randn(size, size)
    factors, pivots = refinement.lu(matrix, np.matmul)
    wanted, wanted_pivots = lu_factor(matrix)
    np.testing.assert_array_equal(pivots, wanted_pivots)
    np.testing.assert_allclose(factors, wanted, atol=1e-3)


def test_refinement_reaches_what_fp64_does_where_the_condition_allows(refinement):
    found = refinement.table(size=96, conditions=(1e2, 1e9))
    easy, hard = found[1e2], found[1e9]
    assert easy["float16"].holds
    assert easy["float32"].holds
    assert easy["float16"].error < 1e-12
    assert 1e-5 < easy["float16"].first < 1e-2  # the LU alone has what float16 has
    assert easy["float16"].iterations > easy["float32"].iterations
    assert hard["float32"].holds
    assert hard["float16"].iterations > hard["float32"].iterations


def test_the_command_says_what_is_not_solved(refinement, monkeypatch, capsys):
    monkeypatch.setattr(refinement, "CONDITIONS", (1e12,))
    monkeypatch.setattr(refinement, "ITERATIONS", 10)
    refinement.main(["--size", "64"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["1e+12", "float16"], ["1e+12", "float32"]]
    assert lines[1].endswith("not solved")

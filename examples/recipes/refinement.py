"""Linear systems: LU in float16 with FP32 sums, refined to FP64's accuracy by GMRES (Haidar et al., 2018, MAGMA).

    python examples/recipes/refinement.py

The blocks of the LU that cost n^3 are matrix products, the same that a converted network computes: float16 in and out,
summed in FP32, emulated on a CPU. The rest of the LU is FP32. GMRES works in FP64 and has the LU as preconditioner
(Carson and Higham, 2017). Data: random matrices of chosen condition numbers, so no licence applies. A residual is that
of b - Ax, relative to the norms of A, x and b.
"""

from __future__ import annotations

import argparse
from typing import Any, Callable, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import nn
from scipy.linalg import lu_factor, lu_solve, qr, solve_triangular
from scipy.sparse.linalg import LinearOperator, gmres

import mxmp

CONDITIONS = tuple(10.0**power for power in range(1, 11))
BLOCK, ITERATIONS, ENOUGH = 32, 200, 1e-15  # columns; of GMRES in all; residual at which a solution is final


class Solution(NamedTuple):
    """``first``: residual of the LU alone. ``iterations``: of GMRES, in all. ``residual``, ``error``: at the end."""

    first: float
    iterations: int
    residual: float
    error: float

    @property
    def holds(self) -> bool:
        """Return whether refinement reached FP64's accuracy."""
        return self.residual <= ENOUGH


def product(dtype: str) -> Callable:
    """Return a function that multiplies two FP32 matrices in a dtype, as a network does."""
    dot = nn.HybridLambda("dot")
    if dtype != "float32":
        mxmp.convert(dot, dtype)
    return lambda left, right: dot(mx.nd.array(left), mx.nd.array(right)).asnumpy()


def lu(matrix: np.ndarray, multiply: Callable) -> tuple[np.ndarray, np.ndarray]:
    """Return the LU with partial pivoting of a matrix (n, n), as ``scipy.linalg.lu_solve`` takes it."""
    a, pivots = matrix.astype("float32"), np.arange(len(matrix))
    for start in range(0, len(a), BLOCK):
        end = min(start + BLOCK, len(a))
        left, panel, right = np.split(a[start:], [start, end], axis=1)
        panel[:], swaps = lu_factor(panel)
        for row, other in enumerate(swaps):
            for part in (left, right):
                part[[row, other]] = part[[other, row]]
        pivots[start:end] = start + swaps
        width = end - start
        right[:width] = solve_triangular(panel[:width], right[:width], lower=True, unit_diagonal=True)
        if end < len(a):
            right[width:] -= multiply(panel[width:], right[:width])
    return a, pivots


def solve(matrix: np.ndarray, wanted: np.ndarray, multiply: Callable) -> Solution:
    """Return how well the FP64 system whose solution is ``wanted``, of shape (n,), is solved."""
    target = matrix @ wanted
    factors, pivots = lu(matrix, multiply)
    factors = factors.astype("float64")
    near_inverse = LinearOperator(matrix.shape, lambda r: lu_solve((factors, pivots), r))
    found = near_inverse @ target
    first = residual(matrix, found, target)
    steps: list[float] = []
    while residual(matrix, found, target) > ENOUGH and len(steps) < ITERATIONS:
        more, _ = gmres(
            matrix,
            target - matrix @ found,
            M=near_inverse,
            atol=0.0,
            restart=50,
            maxiter=1,
            callback=steps.append,
            callback_type="pr_norm",
        )
        found = found + more
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    return Solution(first, len(steps), residual(matrix, found, target), float(error))


def residual(matrix: np.ndarray, found: np.ndarray, target: np.ndarray) -> float:
    """Return the normwise backward error (Rigal and Gaches, 1967)."""
    norms = np.linalg.norm(matrix, 2) * np.linalg.norm(found) + np.linalg.norm(target)
    return float(np.linalg.norm(target - matrix @ found) / norms)


def conditioned(size: int, condition: float, random: np.random.RandomState) -> np.ndarray:
    """Return a matrix (size, size) whose singular values fall geometrically from 1 to ``1 / condition``."""
    left, right = (qr(random.standard_normal((size, size)))[0] for _ in range(2))
    return left * np.geomspace(1, 1 / condition, size) @ right


def table(size: int = 256, conditions: Sequence[float] = ()) -> dict[float, dict[str, Solution]]:
    """Return the solutions by condition number and by the dtype of the products."""
    random, multiply = np.random.RandomState(0), {dtype: product(dtype) for dtype in ("float16", "float32")}
    found = {}
    for condition in conditions or CONDITIONS:
        matrix, wanted = conditioned(size, condition, random), random.standard_normal(size)
        found[condition] = {dtype: solve(matrix, wanted, multiply[dtype]) for dtype in multiply}
    return found


def main(arguments: Sequence[str] | None = None) -> dict[float, dict[str, Any]]:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=256, help="rows of the matrices (default: 256)")
    found = table(parser.parse_args(arguments).size)
    print("condition  products    LU alone  iterations  residual     error")
    for condition, each in found.items():
        for dtype, got in each.items():
            numbers = f"{got.first:8.1e}  {got.iterations:10}  {got.residual:8.1e}  {got.error:8.1e}"
            print(f"{condition:9.0e}  {dtype:10}  {numbers}{'' if got.holds else '  not solved'}")
    return found


if __name__ == "__main__":
    main()

"""Solving x + g(x) = z for a contraction g: the inverse of a residual block (Theorem 1, Algorithm 1).

    Banach      x <- z - g(x)                                     ||x_k - x*|| <= L^k / (1 - L) ||x_1 - x_0||   (Eq. 1)
    Anderson    the combination of the last steps with the smallest residual, with Banach steps as a fallback
    Newton      x <- x + (I + J)^-1 (z - x - g(x)), with Anderson's steps as a fallback

The reported error bound holds for ANY x: ||x - x*|| <= ||x + g(x) - z|| / (1 - L), because x -> x + g(x) expands
distances by at least 1 - L. It holds for every solver and precision, if the residual is evaluated exactly enough: it is
evaluated once more in float64 at the end, with a bound on the rounding error (`Rounding`), and where float32 stalls
above the tolerance, the last steps run in float64. (The textbook bound from the last step fails in float32 and for
accelerated iterations.)

Algorithm 1 as printed runs n + 1 steps; here one iteration is one evaluation of g.

Reading order: `affine` (an affine approximation of g), `steps` (those of single samples), `combination` (Anderson's),
`solvers` (Banach, Anderson, Newton), `solution` (what a solve reports), `solving` (solve and prove).
"""

from .affine import FEW_DIMENSIONS, MAX_DIMENSION, Affine
from .solution import ChainSolution, ConvergenceError, Solution, describe_proof
from .solvers import Anderson, Banach, Newton, Solver, default_solver
from .solving import default_tolerance, iteration_limit, solve
from .steps import Branch

__all__ = [
    "FEW_DIMENSIONS",
    "MAX_DIMENSION",
    "Affine",
    "Anderson",
    "Banach",
    "Branch",
    "ChainSolution",
    "ConvergenceError",
    "Newton",
    "Solution",
    "Solver",
    "default_solver",
    "default_tolerance",
    "describe_proof",
    "iteration_limit",
    "solve",
]

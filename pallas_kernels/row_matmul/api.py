"""The dense steps of a decoder layer for a few rows: products, gated products, additions with norms.

A product may come in parts along its contracted axis, [S, rows, columns] in float32, which whoever reads it adds up:
that saves a launch and a trip through memory. Implementations may pad rows and columns; readers know how many count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .. import dispatch
from ..errors import ShapeError
from ..hopper import on_hopper
from . import reference, xla
from .parts import total

__all__ = ["gated_matmul", "matmul_parts", "residual_norm", "total"]


def _table(name: str) -> Mapping[str, Callable[..., Any]]:
    return MappingProxyType(
        {"mosaic_gpu": on_hopper(__name__, name), "xla": getattr(xla, name), "reference": getattr(reference, name)}
    )


MATMUL, GATED, NORM = (_table(name) for name in ("matmul_parts", "gated_matmul", "residual_norm"))


def matmul_parts(
    x: Float[Array, "_ E"],
    weights: Sequence[Float[Array, "_ _"]],
    dtypes: Sequence[DTypeLike],
    *,
    implementation: dispatch.Implementation = None,
) -> tuple[Float[Array, "_ _ _"], ...]:
    """x W for every W, each perhaps in parts.

    Args:
      x: rows.
      weights: matrices that share their input.
      dtypes: of the results that come whole; parts are float32.
      implementation: see `dispatch.run`.

    Returns:
      For every matrix [S, at least as many rows, at least as many columns]; see `total`.

    Raises:
      ShapeError: shapes that do not fit each other.
      UnsupportedKernelError, ValueError: as `dispatch.run`.
    """
    for index, weight in enumerate(weights):
        if weight.shape[0] != x.shape[1]:
            raise ShapeError(f"weights[{index}] has shape {weight.shape}, expected {x.shape[1]} rows")
    return dispatch.run("matmul_parts", MATMUL, implementation, x, tuple(weights), tuple(dtypes))


def gated_matmul(
    x: Float[Array, "_ E"], weight: Float[Array, "E 2 H"], *, implementation: dispatch.Implementation = None
) -> Float[Array, "_ H"]:
    """silu(x W0) * (x W1) in the dtype of x; rows may be padded.

    Args:
      x: rows.
      weight: gate and up.
      implementation: see `dispatch.run`.

    Raises:
      UnsupportedKernelError, ValueError: as `dispatch.run`.
    """
    return dispatch.run("gated_matmul", GATED, implementation, x, weight)


def residual_norm(
    x: Float[Array, "R E"],
    parts: Float[Array, "S _ _"] | None,
    scale: Float[Array, " E"],
    *,
    eps: float,
    implementation: dispatch.Implementation = None,
) -> tuple[Float[Array, "R E"], Float[Array, "R E"]]:
    """x + sum of parts, and its root-mean-square norm times scale.

    Args:
      x: the residual stream.
      parts: what is added; None for nothing.
      scale: of the norm.
      eps: added to the mean square.
      implementation: see `dispatch.run`.

    Returns:
      The stream after the addition, and its norm, both in the dtype of x.

    Raises:
      UnsupportedKernelError, ValueError: as `dispatch.run`.
    """
    return dispatch.run("residual_norm", NORM, implementation, x, parts, scale, eps)

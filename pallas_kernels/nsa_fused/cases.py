"""Named workloads of the fused layers on Hopper: those of `sparse_verify`."""

from __future__ import annotations

from ..sparse_verify.cases import LOWERED, SMALL, TOLERANCE, Workload

__all__ = ["LOWERED", "SMALL", "TOLERANCE", "Workload"]

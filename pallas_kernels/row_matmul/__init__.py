"""Products of a few rows with large matrices, and what follows them in a decoder layer."""

from .api import gated_matmul, matmul_parts, residual_norm, total
from .xla import one_matmul, rms_norm

__all__ = ["gated_matmul", "matmul_parts", "one_matmul", "residual_norm", "rms_norm", "total"]

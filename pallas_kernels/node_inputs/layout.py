"""Arguments and results of the op."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Float

from ..layout import Completions


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HeadShape:
    """Static sizes: B, T, K, G, D; `gates` columns of the projection to gates: 3 K G, 3 for all heads, or none."""

    batch: int
    nodes: int
    kv_heads: int
    group: int
    dim: int
    gates: int = 0

    @property
    def columns(self) -> int:
        """Of the projection to queries, keys and values: [K, G + 2, D]."""
        return self.kv_heads * (self.group + 2) * self.dim


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class EntryRows:
    """How compressed entries arise: weighted sums of the rows of `completions`.

    Args:
      tail_k, tail_v: unrotated keys, and values, of the last l committed tokens, as the cache holds them.
      completions: entries that nodes complete, and their rows.
      cos, sin: rotary angles of the entries.
      weight_k, weight_v: weight of each row; None for averages.
      position_k, position_v: added to the rows before they are weighted; None for nothing.
    """

    tail_k: Float[Array, "B K l D"]
    tail_v: Float[Array, "B K l D"]
    completions: Completions
    cos: Float[Array, "B M half"]
    sin: Float[Array, "B M half"]
    weight_k: Float[Array, "K l"] | None = None
    weight_v: Float[Array, "K l"] | None = None
    position_k: Float[Array, "K l D"] | None = None
    position_v: Float[Array, "K l D"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeInputs:
    """Results.

    Args:
      q: rotated queries.
      k, v: rotated keys, and values.
      raw_k: keys that are not rotated.
      gates: sigmoids, None without a projection to gates.
      k_cmp, v_cmp: completed entries, rotated keys; None where the op was not asked for them.
    """

    q: Float[Array, "B T K G D"]
    k: Float[Array, "B K T D"]
    v: Float[Array, "B K T D"]
    raw_k: Float[Array, "B K T D"]
    gates: Float[Array, "B T K G 3"] | None = None
    k_cmp: Float[Array, "B K M D"] | None = None
    v_cmp: Float[Array, "B K M D"] | None = None

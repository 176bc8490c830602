"""Workloads and tolerances that the tests of the Hopper kernels share."""

from __future__ import annotations

import dataclasses

from ..layout import Geometry

DEFAULT = Geometry(
    kernel_size=32, kernel_stride=16, block_size=64, n_blocks=16, init_blocks=1, local_blocks=2, window=512
)
SMALL_STRIDE = dataclasses.replace(DEFAULT, kernel_stride=8)
SMALL_BLOCK = dataclasses.replace(DEFAULT, block_size=32)
EQUAL_SIZES = dataclasses.replace(
    DEFAULT, kernel_size=16, kernel_stride=16, block_size=16, init_blocks=0, local_blocks=1
)

# Relative error of the output against float32: the probabilities are rounded to the inputs' dtype (2**-9 and 2**-12
# of each, at random), and nothing else is.
OUTPUT_TOLERANCE = {"bfloat16": 4e-3, "float16": 6e-4}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One call.

    Args:
      nodes, heads, dim: T, G, D.
      kv_heads: K.
      capacity: of the cache, in tokens.
      lengths: committed tokens per sequence.
      tree: "chain", "star" or "random".
      geometry: block sizes.
      dtype: of queries, keys and values.
      group: nodes that share a schedule, 0 for none.
      tile, splits, warpgroups, narrow: tile choices.
    """

    nodes: int
    heads: int
    dim: int
    capacity: int
    lengths: tuple[int, ...]
    kv_heads: int = 1
    tree: str = "random"
    geometry: Geometry = DEFAULT
    dtype: str = "bfloat16"
    group: int = 0
    tile: int = 128
    splits: int = 1
    warpgroups: int = 1
    narrow: bool = False


# Interpreted on a CPU: small, each for a boundary.
INTERPRETED = {
    "splits, ragged last tile": Case(nodes=5, heads=4, dim=64, capacity=4096, lengths=(3000,), group=2, splits=2),
    "two warpgroups, merged fours": Case(
        nodes=17, heads=4, dim=128, capacity=2048, lengths=(2000,), tree="chain", group=4, warpgroups=2
    ),
    "three heads, narrow tiles": Case(
        nodes=3, heads=3, dim=64, capacity=2048, lengths=(1500,), group=1, tile=64, splits=2
    ),
    "batch, short contexts, float16": Case(
        nodes=3, heads=16, dim=64, capacity=2048, lengths=(20, 2043), tree="chain", dtype="float16", group=3
    ),
    "stride 8": Case(nodes=4, heads=1, dim=64, capacity=1024, lengths=(1000,), geometry=SMALL_STRIDE, group=4),
    "one entry per block": Case(
        nodes=2, heads=2, dim=64, capacity=2048, lengths=(2040,), geometry=EQUAL_SIZES, group=2
    ),
    "no entry": Case(nodes=2, heads=2, dim=64, capacity=2048, lengths=(5,), group=2),
    "narrow: more steps than stages": Case(
        nodes=1, heads=4, dim=128, capacity=4096, lengths=(3007,), group=1, tile=64, narrow=True
    ),
    "narrow: three heads, stride 8": Case(
        nodes=2, heads=3, dim=64, capacity=2048, lengths=(2006,), geometry=SMALL_STRIDE, group=2, narrow=True
    ),
    "narrow: batch, short contexts, float16": Case(
        nodes=5,
        heads=1,
        dim=64,
        capacity=2048,
        lengths=(20, 2043),
        tree="chain",
        dtype="float16",
        group=4,
        tile=64,
        splits=2,
        narrow=True,
    ),
    "narrow: one entry per block": Case(
        nodes=8, heads=1, dim=64, capacity=2048, lengths=(1900,), geometry=EQUAL_SIZES, group=2, tile=64, narrow=True
    ),
    "narrow: no entry": Case(nodes=2, heads=4, dim=64, capacity=2048, lengths=(5,), group=2, narrow=True),
}

# The interpreter takes minutes for these.
LONG = {
    "4400 blocks": Case(
        nodes=2, heads=1, dim=64, capacity=70400, lengths=(70000,), geometry=EQUAL_SIZES, group=2, splits=2
    ),
    "one node, batch, 64K": Case(nodes=1, heads=4, dim=128, capacity=65536, lengths=(65007, 300), kv_heads=8, group=1),
}

# Groups that clusters of thread blocks serve, or a thread block each.
CLUSTERED = {
    "two row tiles, groups of 16": Case(
        nodes=65, heads=4, dim=128, capacity=65536, lengths=(64000,), kv_heads=8, group=16, splits=6
    ),
    "batch, short contexts, groups of 8": Case(
        nodes=13, heads=4, dim=64, capacity=8192, lengths=(20, 700, 7000), kv_heads=2, tree="chain", group=8
    ),
    "a row tile of 20, groups of 16": Case(nodes=22, heads=3, dim=64, capacity=8192, lengths=(8000,), group=16),
    "512K, groups of 16": Case(nodes=33, heads=4, dim=64, capacity=524288, lengths=(524000,), group=16, splits=8),
    "few nodes, groups of 16": Case(nodes=3, heads=4, dim=128, capacity=65536, lengths=(60000,), kv_heads=8, group=16),
}

# Cross-lowered for CUDA.
LOWERED = {
    "T=1": Case(nodes=1, heads=4, dim=128, capacity=65536, lengths=(0,), kv_heads=8, group=1),
    "T=65": Case(nodes=65, heads=4, dim=128, capacity=65536, lengths=(0,), kv_heads=8, group=4),
    "T=65, D=64, groups of 8": Case(nodes=65, heads=4, dim=64, capacity=8192, lengths=(0,), kv_heads=8, group=8),
    "T=65, groups of 16": Case(nodes=65, heads=4, dim=128, capacity=65536, lengths=(0,), kv_heads=8, group=16),
    "T=129, 128K": Case(nodes=129, heads=4, dim=128, capacity=131072, lengths=(0,), kv_heads=8),
    "T=65, 512K": Case(nodes=65, heads=4, dim=128, capacity=524288, lengths=(0,), kv_heads=8, group=4),
    "G=16, one entry per block": Case(
        nodes=17, heads=16, dim=64, capacity=16384, lengths=(0,), kv_heads=2, geometry=EQUAL_SIZES, group=1
    ),
    "T=8, G=1, float16": Case(nodes=8, heads=1, dim=64, capacity=8192, lengths=(0,), dtype="float16", group=8),
    "T=2, G=3, stride 8": Case(
        nodes=2, heads=3, dim=128, capacity=8192, lengths=(0, 0), geometry=SMALL_STRIDE, group=2
    ),
    "T=1, one entry per block": Case(
        nodes=1, heads=8, dim=64, capacity=16384, lengths=(0,), kv_heads=2, geometry=EQUAL_SIZES, group=1
    ),
    "G=3, stride 8": Case(nodes=21, heads=3, dim=128, capacity=8192, lengths=(0,), geometry=SMALL_STRIDE, group=3),
}

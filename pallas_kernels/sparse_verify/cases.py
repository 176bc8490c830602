"""Named workloads of the Hopper kernels, for tests and benchmarks."""

from __future__ import annotations

import dataclasses

# The kernels round probabilities to the inputs' dtype before they weigh values: half an ulp, 2^-9 for bfloat16 and
# 2^-12 for float16, of terms that partly add up. In relative norm; 1.3e-3 was the most seen on an H200 (bfloat16).
TOLERANCE = {"bfloat16": 4e-3, "float16": 1e-3}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Static sizes of a call, with the lengths and the kind of tree that it is tried with.

    Args:
      nodes, group, heads, kv_heads, dim: T, C, G, K, D.
      capacity, lengths: rows of the cache, and committed ones of each sequence.
      block_size, n_blocks, window, kernel_size, kernel_stride: of the geometry.
      chain: whether each node is the child of the one before; otherwise trees are random.
      splits: of the selected, the window and the compressed branch.
      stages: key tiles in the ring.
      dtype: of queries, keys and values.
    """

    nodes: int
    group: int = 1
    heads: int = 4
    kv_heads: int = 1
    dim: int = 64
    capacity: int = 256
    lengths: tuple[int, ...] = (200,)
    block_size: int = 64
    n_blocks: int = 4
    window: int = 100
    kernel_size: int = 32
    kernel_stride: int = 16
    chain: bool = False
    splits: tuple[int, int, int] = (1, 1, 1)
    stages: int = 2
    dtype: str = "bfloat16"


# Small enough for the interpreter; each is the only one with some trait.
SMALL = {
    "decode": Workload(nodes=1, heads=1, lengths=(65,), capacity=128),
    "full_cache": Workload(nodes=3, group=2, lengths=(256,), splits=(2, 1, 2), chain=True),
    "block_end": Workload(nodes=5, group=2, lengths=(192,), chain=True, splits=(3, 2, 1), dtype="float16"),
    "crosses_block": Workload(nodes=6, group=4, heads=3, lengths=(190,), chain=True, window=4, splits=(2, 1, 2)),
    "one_row": Workload(nodes=2, group=2, heads=2, lengths=(1,), capacity=64, n_blocks=1, splits=(2, 2, 2)),
    "ragged": Workload(nodes=4, group=3, kv_heads=2, lengths=(7, 130), capacity=192, splits=(2, 1, 1)),
    "chunk": Workload(nodes=70, group=32, heads=2, lengths=(60,), capacity=192, n_blocks=2, window=20, chain=True),
    "small_blocks": Workload(nodes=5, group=2, dim=128, block_size=32, lengths=(95,), capacity=160, splits=(2, 1, 1)),
}
# Only lowered: what an H200 ran, and shapes at the edges of what the kernels take.
LOWERED = {
    "decode_64k": Workload(nodes=1, kv_heads=8, dim=128, capacity=65536, n_blocks=16, window=512),
    "tree5_64k": Workload(nodes=5, group=4, kv_heads=8, dim=128, capacity=65536, n_blocks=16, window=512),
    "tree17_8k": Workload(nodes=17, group=4, kv_heads=8, dim=128, capacity=8192, n_blocks=16, window=512),
    "tree65_64k": Workload(nodes=65, group=8, kv_heads=8, dim=128, capacity=65536, n_blocks=16, window=512),
    "tree65_narrow": Workload(nodes=65, group=16, kv_heads=8, dim=64, capacity=65536, n_blocks=16, window=512),
    "chunk_64k": Workload(
        nodes=512, group=16, kv_heads=8, dim=128, capacity=65536, n_blocks=16, window=512, chain=True
    ),
    "tree129_64k": Workload(nodes=129, group=8, kv_heads=8, dim=128, capacity=65536, n_blocks=16, window=512),
    "tree65_512k": Workload(nodes=65, group=4, kv_heads=8, dim=128, capacity=524288, n_blocks=16, window=512),
    "three_heads": Workload(nodes=21, group=5, heads=3, kv_heads=2, dim=128, capacity=8192, n_blocks=16, window=512),
    "sixteen_heads": Workload(nodes=9, group=8, heads=16, dim=64, capacity=4096, block_size=16, n_blocks=16),
}

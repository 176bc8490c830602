"""Named workloads of the Hopper kernel, for tests and benchmarks."""

from __future__ import annotations

import dataclasses

from ..sparse_verify.cases import TOLERANCE
from ..sparse_verify.cases import Workload as Pass
from .tiles import TileConfig

__all__ = ["LOWERED", "SMALL", "TOLERANCE", "Workload"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Workload(Pass):
    """A pass, of which the geometry and the selection are not used here.

    Args:
      asked: last nodes that have queries, by default all.
      reach: window of the op.
      config: tile configuration, by default the library's choice.
    """

    asked: int | None = None
    reach: int | None = None
    config: TileConfig | None = None


# Small enough for the interpreter; each is the only one with some trait.
SMALL = {
    "decode": Workload(
        nodes=1, heads=1, lengths=(65,), capacity=128, config=TileConfig(splits=2, warpgroups=2, tile=64, stages=2)
    ),
    "ragged": Workload(
        nodes=4,
        kv_heads=2,
        lengths=(7, 130),
        capacity=192,
        dtype="float16",
        config=TileConfig(splits=2, warpgroups=1, tile=64, stages=2),
    ),
    "in_turn": Workload(
        nodes=17,
        lengths=(256,),
        config=TileConfig(splits=1, warpgroups=2, tile=128, stages=2, alternate=True),
    ),
    "left_over": Workload(
        nodes=6, heads=16, lengths=(190,), config=TileConfig(splits=2, warpgroups=3, tile=64, stages=3)
    ),
    "one_left": Workload(
        nodes=9,
        heads=16,
        lengths=(191,),
        chain=True,
        reach=70,
        config=TileConfig(splits=1, warpgroups=2, tile=64, stages=2, alternate=True),
    ),
    "draft": Workload(
        nodes=9,
        asked=4,
        heads=3,
        dim=128,
        lengths=(100,),
        reach=20,
        config=TileConfig(splits=1, warpgroups=2, tile=64, stages=4),
    ),
    "wide_tree": Workload(
        nodes=70, heads=2, lengths=(1,), capacity=64, config=TileConfig(splits=3, warpgroups=2, tile=64, stages=2)
    ),
    "before_the_window": Workload(
        nodes=100,
        heads=2,
        lengths=(64,),
        capacity=64,
        chain=True,
        reach=5,
        config=TileConfig(splits=1, warpgroups=3, tile=64, stages=3),
    ),
}
_LONG = Workload(nodes=1, kv_heads=8, dim=128, capacity=65536)
# Only lowered, with the library's choice of tiles.
LOWERED = {
    **{f"tree{nodes}": dataclasses.replace(_LONG, nodes=nodes) for nodes in (1, 5, 17, 33, 65, 129)},
    **{f"narrow{nodes}": dataclasses.replace(_LONG, nodes=nodes, dim=64) for nodes in (1, 33, 129)},
    "tree65_512k": dataclasses.replace(_LONG, nodes=65, capacity=524288),
    "chunk512": dataclasses.replace(_LONG, nodes=512, chain=True),
    "three_heads": Workload(nodes=22, heads=3, kv_heads=3, dim=64, capacity=8192, dtype="float16"),
    "sixteen_heads": Workload(nodes=9, heads=16, kv_heads=2, dim=64, capacity=65536),
    "draft": dataclasses.replace(_LONG, nodes=40, asked=8, reach=4096),
}

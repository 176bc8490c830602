"""Compressed branch, block selection and merged schedules on NVIDIA Hopper, in two launches.

The first launch attends to the compressed entries in splits and leaves block masses relative to running maxima; the
second adds up the splits, scales and sums the masses of a KV head, selects, and merges the selections of a group.
Exactness: scores differ from the float32 definition by the rounding of the exponent's argument and of the two bf16
parts that a probability is binned in, together below `SCORE_TOLERANCE` of a block's score; sets are the same wherever
the scores of the last block taken and the first one left differ by more. The output carries the rounding of the
probabilities to the inputs' dtype. Repeated calls give the same bits. Splits depend on the number of query rows, so
the same node in a pass of another size can differ by rounding.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..errors import UnsupportedKernelError
from ..hopper import require_attention, require_hopper
from ..layout import CachedKV, Geometry, TreeKV, TreeQueries
from . import tiles
from .mosaic_attend import AttendConfig, Partials, attend
from .mosaic_choose import SelectPlan, finish, merge
from .mosaic_common import MASKED, ROWS, TREE_TILE
from .mosaic_narrow import COLUMNS

SCORE_TOLERANCE = 2e-5  # relative; two bf16 parts leave 2**-17, float32 dots and exp2 the rest
MAX_BLOCKS = 16384  # 1M tokens in blocks of 64: the bit maps of 16 nodes take 32 KB of shared memory
MAX_SLOTS = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Selected:
    """What a refresh layer needs from the compressed branch.

    Args:
      out: attention over compressed entries, float32.
      blocks: selected blocks, ascending, -1 padded.
      merged: visit lists of groups of nodes, as `MergedSchedule.blocks`; None without a group.
      owners: as `MergedSchedule.owners`.
    """

    out: Float[Array, "B T K G D"]
    blocks: Int[Array, "B K T S"]
    merged: Int[Array, "B K P U"] | None
    owners: Int[Array, "B K P U"] | None


def _overlap(entry: Any, block: Any, geometry: Geometry, xp: Any) -> Any:
    """How often an entry counts in a block: their common tokens, in strides."""
    ratio = geometry.block_size // geometry.kernel_stride
    reach = geometry.kernel_size // geometry.kernel_stride
    common = xp.minimum(entry + reach, (block + 1) * ratio) - xp.maximum(entry, block * ratio)
    return xp.maximum(common, 0)


def _bins(geometry: Geometry, tile: int) -> np.ndarray | None:
    """Transposed overlaps of a tile's entries with its blocks, then with the next block; None for the identity."""
    ratio = geometry.block_size // geometry.kernel_stride
    if ratio == 1:
        return None
    width = tile // ratio + (8 if geometry.kernel_size > geometry.kernel_stride else 0)
    table = _overlap(np.arange(tile)[None], np.arange(width)[:, None], geometry, np)
    table[tile // ratio + 1 :] = 0
    return table.astype(np.float32)


def _overlaps(geometry: Geometry) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How often each entry of a block counts in it, and in the next one."""
    entries = np.arange(geometry.block_size // geometry.kernel_stride)
    own, next_one = (_overlap(entries, block, geometry, np) for block in range(2))
    return tuple(own.tolist()), tuple(next_one.tolist())


def _check(
    q: Array, cached: CachedKV, tree: TreeKV, geometry: Geometry, *, scale: float, tile: int, select: bool
) -> None:
    operands = {"cached.k_cmp": cached.k_cmp, "cached.v_cmp": cached.v_cmp, "tree.k_cmp": tree.k_cmp}
    require_attention(q, operands, q.shape[1])
    if scale <= 0:
        raise UnsupportedKernelError(f"needs a positive scale, got {scale}")
    if not select:
        return
    size, stride, block = geometry.kernel_size, geometry.kernel_stride, geometry.block_size
    if size % stride or block % stride or size > block:
        raise UnsupportedKernelError(
            f"needs a stride that divides both block sizes and kernel_size <= block_size, got {geometry}"
        )
    per_tile = tile * stride // block
    if tile * stride % block or per_tile < 8 or per_tile & (per_tile - 1):
        raise UnsupportedKernelError(f"needs block_size / kernel_stride in 1, 2, 4, 8, got {block / stride}")
    blocks, slots = cached.capacity // block, geometry.selection_width(cached.capacity)
    if blocks > MAX_BLOCKS or slots > MAX_SLOTS:
        raise UnsupportedKernelError(
            f"needs at most {MAX_BLOCKS} blocks and {MAX_SLOTS} slots, got {blocks} and {slots}"
        )
    if slots < min(geometry.init_blocks + geometry.local_blocks, blocks):
        raise UnsupportedKernelError(f"needs as many slots as forced blocks, got {geometry}")


def _pad_axis(x: Array, axis: int, size: int) -> Array:
    if x.shape[axis] >= size:
        return x
    return jnp.pad(x, [(0, size - x.shape[axis] if i == axis else 0) for i in range(x.ndim)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operands:
    """A call, laid out for the kernels. Everything but the queries, keys and values is the same in every layer.

    Args:
      q: queries.
      k, v, tree_k, tree_v: compressed entries, committed (padded) and completed.
      bias: which row sees which completed entry.
      counts: committed and completed entries, first block that the latter can touch.
      bins: overlaps of a tile of entries.
      overlap: of the entries of a block with it, and with the next one.
      own: own block of each node.
      weights: overlaps of completed entries.
      per_tile_nodes: nodes in a row tile.
      config: tile choices.
      plan: of the selection.
    """

    q: Float[Array, "B T K G D"]
    k: Float[Array, "X N D"]
    v: Float[Array, "X N D"]
    tree_k: Float[Array, "X M2 D"]
    tree_v: Float[Array, "X M2 D"]
    bias: Float[Array, "B R 64 M"]
    counts: Int[Array, "B 4"]
    bins: Float[Array, "Y tile"] | None
    overlap: tuple[tuple[int, ...], tuple[int, ...]]
    own: Int[Array, "B T2"]
    weights: Float[Array, "B E M"] | None
    per_tile_nodes: int
    config: AttendConfig
    plan: SelectPlan | None

    def attend(self, *, scale: float, interpret: Any = None) -> Partials:
        """The first launch."""
        return attend(
            self.q,
            self.k,
            self.v,
            self.tree_k,
            self.tree_v,
            self.bias,
            self.counts,
            self.bins,
            overlap=self.overlap,
            per_tile_nodes=self.per_tile_nodes,
            scale=scale,
            config=self.config,
            score=self.plan is not None,
            interpret=interpret,
        )

    def finish(
        self, partials: Partials, shape: tuple[int, int, int, int, int], *, interpret: Any = None
    ) -> tuple[Array, ...]:
        """The second launch; `shape` is the queries'."""
        return finish(
            partials,
            self.counts,
            self.own,
            self.weights,
            shape=shape,
            per_tile_nodes=self.per_tile_nodes,
            plan=self.plan,
            interpret=interpret,
        )


def lay_out(
    q: Float[Array, "B T K G D"],
    cached: CachedKV,
    tree: TreeKV,
    queries: TreeQueries,
    *,
    geometry: Geometry,
    scale: float,
    select: bool,
    group: int,
    config: AttendConfig | None,
) -> Operands:
    """Prepares a call; see `select_and_attend`."""
    batch, nodes, heads, group_heads, dim = q.shape
    entries, completed = cached.k_cmp.shape[2], tree.k_cmp.shape[2]
    merged, bunch, per_tile_nodes = tiles.bunch_of(
        nodes=nodes,
        heads=group_heads,
        group=group if select else 0,
        most=tiles.most_bunch() if config is None else config.select_bunch,
    )
    row_tiles = -(-nodes // per_tile_nodes)
    if config is None:
        config = tiles.choose(
            row_tiles=row_tiles,
            heads=batch * heads,
            entries=entries,
            nodes=nodes,
            bunch=bunch,
            blocks=cached.capacity // geometry.block_size,
            rows=nodes * group_heads,
        )
    if config.narrow and nodes * group_heads > COLUMNS:
        raise ValueError(f"narrow needs T * G <= {COLUMNS}, got {nodes} * {group_heads}: leave it off")

    width = -(-completed // TREE_TILE) * TREE_TILE
    k, v = (_pad_axis(x.reshape(batch * heads, entries, dim), 1, config.tile) for x in (cached.k_cmp, cached.v_cmp))
    tree_k, tree_v = (x.reshape(batch * heads, completed, dim) for x in (tree.k_cmp, tree.v_cmp))

    node = tree.completions.node
    seen = jnp.take_along_axis(queries.ancestor, jnp.maximum(node, 0)[:, None], axis=2) & (node >= 0)[:, None]
    bias = jnp.pad(
        jnp.where(seen, 0.0, MASKED),
        ((0, 0), (0, row_tiles * per_tile_nodes - nodes), (0, width - completed)),
        constant_values=MASKED,
    ).reshape(batch, row_tiles, 1, per_tile_nodes, width)
    bias = jnp.broadcast_to(bias, (batch, row_tiles, group_heads, per_tile_nodes, width))
    bias = bias.reshape(batch, row_tiles, group_heads * per_tile_nodes, width)
    bias = jnp.pad(bias, ((0, 0), (0, 0), (0, ROWS - bias.shape[2]), (0, 0)), constant_values=MASKED)

    ratio = geometry.block_size // geometry.kernel_stride
    reach = geometry.kernel_size // geometry.kernel_stride
    visible = geometry.num_entries(queries.length)
    first_block = visible // ratio
    used = jnp.sum(node >= 0, axis=1)
    counts = jnp.stack([visible, used, first_block, first_block], axis=1).astype(jnp.int32)
    whole = max(bunch, merged)
    own = _pad_axis((queries.position // geometry.block_size).astype(jnp.int32), 1, -(-nodes // whole) * whole)

    bins = weights = plan = None
    if select:
        table = _bins(geometry, config.tile)
        bins = None if table is None else jnp.asarray(table, jnp.bfloat16)
        touched = (nodes // geometry.kernel_stride + reach - 1) // ratio + 2
        blocks = first_block[:, None, None] + jnp.arange(touched)[:, None]
        weights = _overlap(tree.completions.entry[:, None], blocks, geometry, jnp)
        weights = jnp.where((node >= 0)[:, None], weights, 0).astype(jnp.float32)
        weights = _pad_axis(weights, 2, width)
        plan = SelectPlan(
            slots=geometry.selection_width(cached.capacity),
            blocks=cached.capacity // geometry.block_size,
            init=geometry.init_blocks,
            local=geometry.local_blocks,
            ratio=ratio,
            steps=-(-entries // config.tile),
            per_tile=config.tile // ratio,
            spills=reach > 1,
            group=merged,
            bunch=bunch,
            warps=min(config.select_warps, 32 // bunch),
        )
    return Operands(
        q=q,
        k=k,
        v=v,
        tree_k=tree_k,
        tree_v=tree_v,
        bias=bias,
        counts=counts,
        bins=bins,
        overlap=_overlaps(geometry) if select else ((1,), (0,)),
        own=own,
        weights=weights,
        per_tile_nodes=per_tile_nodes,
        config=config,
        plan=plan,
    )


def select_and_attend(
    q: Float[Array, "B T K G D"],
    cached: CachedKV,
    tree: TreeKV,
    queries: TreeQueries,
    *,
    geometry: Geometry,
    scale: float,
    select: bool = True,
    group: int = 0,
    config: AttendConfig | None = None,
    interpret: Any = None,
) -> Selected:
    """The compressed branch, and with `select` the selection; with a `group` also the merged schedule.

    Does not look at the device: it can be lowered for CUDA, or interpreted, anywhere. Without `select`, `blocks` is
    an empty array.

    Args:
      q: rotated queries, bfloat16 or float16.
      cached: committed keys and values.
      tree: the nodes' own keys and values, with the entries that they complete.
      queries: where the nodes stand.
      geometry: static sizes.
      scale: multiplies q . k after the product.
      select: whether to select blocks.
      group: nodes that share a visit list, 0 for no merging.
      config: tile choices, by default those of `tiles.choose`.
      interpret: parameters of the interpreter, or None.

    Raises:
      UnsupportedKernelError: shape or dtype that the kernels do not cover.
      ValueError: a `config` with a bunch that is not offered, or a narrow one for more rows than it takes.
    """
    tile = tiles.entries_per_tile() if config is None else config.tile
    _check(q, cached, tree, geometry, scale=scale, tile=tile, select=select)
    options: dict[str, Any] = {
        "geometry": geometry,
        "scale": scale,
        "select": select,
        "group": group,
        "config": config,
    }
    if interpret is not None:
        return _run(q, cached, tree, queries, **options, interpret=interpret)
    return _run_shared(q, cached, tree, queries, **options)


def _run(
    q: Float[Array, "B T K G D"],
    cached: CachedKV,
    tree: TreeKV,
    queries: TreeQueries,
    *,
    geometry: Geometry,
    scale: float,
    select: bool,
    group: int,
    config: AttendConfig | None,
    interpret: Any = None,
) -> Selected:
    batch, nodes, heads = q.shape[:3]
    operands = lay_out(
        q, cached, tree, queries, geometry=geometry, scale=scale, select=select, group=group, config=config
    )
    partials = operands.attend(scale=scale, interpret=interpret)
    out, *rest = operands.finish(partials, (batch, nodes, heads, q.shape[3], q.shape[4]), interpret=interpret)
    plan = operands.plan
    if plan is None:
        return Selected(out=out, blocks=jnp.zeros((batch, heads, nodes, 0), jnp.int32), merged=None, owners=None)
    chosen = rest[0].reshape(batch, heads, nodes, plan.slots)
    if not group:
        return Selected(out=out, blocks=chosen, merged=None, owners=None)
    merged, owners = rest[1:] if plan.group else merge(rest[0], group=group, blocks=plan.blocks, interpret=interpret)
    shape = (batch, heads, *merged.shape[1:])
    return Selected(out=out, blocks=chosen, merged=merged.reshape(shape), owners=owners.reshape(shape))


# Layers of one shape share a trace and a lowering, which takes seconds.
_run_shared = functools.partial(jax.jit, static_argnames=("geometry", "scale", "select", "group", "config"))(_run)


def block_select(
    q: Float[Array, "B T K G D"],
    cached: CachedKV,
    tree: TreeKV,
    queries: TreeQueries,
    *,
    geometry: Geometry,
    scale: float,
) -> tuple[Float[Array, "B T K G D"], Int[Array, "B K T S"]]:
    """The compressed branch's output and the blocks that each node selects, on a Hopper GPU."""
    require_hopper()
    result = select_and_attend(q, cached, tree, queries, geometry=geometry, scale=scale)
    return result.out, result.blocks


def compressed_attention(
    q: Float[Array, "B T K G D"],
    cached: CachedKV,
    tree: TreeKV,
    queries: TreeQueries,
    *,
    geometry: Geometry,
    scale: float,
) -> Float[Array, "B T K G D"]:
    """Attention over compressed entries, on a Hopper GPU; 0 for a node that sees none."""
    require_hopper()
    return select_and_attend(q, cached, tree, queries, geometry=geometry, scale=scale, select=False).out

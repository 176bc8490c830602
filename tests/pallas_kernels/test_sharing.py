"""Shared selections and overlap, against sets in plain Python."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ssv_jax.pallas_kernels import Geometry, overlap, share

SIZE, INIT, LOCAL, SLOTS = 8, 1, 2, 6
GEOMETRY = Geometry(
    kernel_size=8, kernel_stride=4, block_size=SIZE, n_blocks=SLOTS, init_blocks=INIT, local_blocks=LOCAL, window=9
)


def forced(position: int) -> set[int]:
    own = position // SIZE
    return {b for b in range(own + 1) if b < INIT or b > own - LOCAL}


def random_case(seed: int):
    """Exact selections of ten nodes on a wandering path that crosses a block; forced blocks always in."""
    rng = np.random.default_rng(seed)
    length = int(rng.integers(1, 90))
    depth = np.sort(rng.integers(0, 12, 10))
    position = length + depth
    rows = []
    for _ in range(2):
        for at in position:
            free = [b for b in range(at // SIZE + 1) if b not in forced(at)]
            extra = rng.permutation(free)[: max(SLOTS - len(forced(at)), 0)]
            chosen = sorted(forced(at) | {int(b) for b in extra})
            rows.append(chosen + [-1] * (SLOTS - len(chosen)))
    return length, position, np.asarray(rows, np.int32).reshape(1, 2, 10, SLOTS)


@pytest.mark.parametrize("group", [1, 3, 4, 10])
def test_share_reads_the_first_nodes_free_blocks_and_the_own_forced_ones(group):
    """A node without its own block, a future block, or a block that reaches past the committed length."""
    for seed in range(20):
        length, position, blocks = random_case(seed)
        got = np.asarray(
            share(
                jnp.asarray(blocks),
                jnp.asarray(position[None], jnp.int32),
                jnp.asarray([length], jnp.int32),
                geometry=GEOMETRY,
                group=group,
            )
        )
        for head in range(2):
            for node, at in enumerate(position):
                first = {int(b) for b in blocks[0, head, node // group * group] if b >= 0}
                kept = {b for b in first if (b + 1) * SIZE <= length and b <= at // SIZE}
                row = got[0, head, node]
                real = row[row >= 0].tolist()
                assert set(real) == kept | forced(at)
                assert real == sorted(set(real))
                assert (row[len(real) :] == -1).all()


@pytest.mark.parametrize("group", [1, 4])
def test_overlap_counts_pairs_and_leaders(group):
    """Padding that counts, forced blocks in the free figure, or the wrong denominator."""
    for seed in range(10):
        _, position, blocks = random_case(seed)
        valid = np.arange(10) < 8
        got = overlap(
            jnp.asarray(blocks),
            jnp.asarray(position[None], jnp.int32),
            jnp.asarray(valid[None]),
            geometry=GEOMETRY,
            group=group,
        )
        raw = free = led = pairs = members = 0.0
        for head in range(2):
            sets = [{int(b) for b in row if b >= 0} for row in blocks[0, head]]
            loose = [one - forced(at) for one, at in zip(sets, position, strict=True)]
            for node in range(1, 8):
                pairs += 1
                raw += len(sets[node] & sets[node - 1]) / min(len(sets[node]), len(sets[node - 1]))
                least = min(len(loose[node]), len(loose[node - 1]))
                free += len(loose[node] & loose[node - 1]) / least if least else 1.0
            for node in range(8):
                if node % group:
                    members += 1
                    led += len(sets[node // group * group] & sets[node]) / len(sets[node])
        assert float(got.count) == pairs
        assert float(got.group_count) == members
        np.testing.assert_allclose([got.raw, got.free, got.group], [raw, free, led], rtol=1e-5)

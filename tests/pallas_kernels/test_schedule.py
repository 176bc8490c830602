"""Merged schedules: unions, ownership, padding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssv_jax.pallas_kernels import MergedSchedule, merge
from ssv_jax.pallas_kernels.sparse_verify.schedule import MAX_GROUP, owned_by
from tests.pallas_kernels.cases import QUICK, random_blocks

_merge = jax.jit(merge, static_argnums=(1, 2), compiler_options=QUICK)
_owned_by = jax.jit(owned_by, compiler_options=QUICK)


def merged(selected: np.ndarray, group: int, num_blocks: int) -> tuple[MergedSchedule, np.ndarray]:
    schedule = _merge(jnp.asarray(selected), group, num_blocks)
    return jax.tree.map(np.asarray, schedule), np.asarray(_owned_by(schedule))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 32])
@pytest.mark.parametrize("nodes", [1, 10])
def test_a_group_visits_each_block_once_and_each_node_owns_what_it_selected(group, nodes):
    """A block visited twice counts twice in the softmax; an unowned one is lost; an alien one leaks."""
    rng = np.random.default_rng(10 * group + nodes)
    width, num_blocks = 4, 9
    for _ in range(6):
        selected = random_blocks(rng, (2, 3, nodes), width, num_blocks)
        schedule, own = merged(selected, group, num_blocks)
        parts = -(-nodes // group)
        assert schedule.group == group
        assert schedule.blocks.shape == schedule.owners.shape == (2, 3, parts, min(group * width, num_blocks))
        for b, k, part in np.ndindex(2, 3, parts):
            members = [set(selected[b, k, i]) - {-1} for i in range(part * group, min((part + 1) * group, nodes))]
            union = sorted(set().union(*members))
            visits = schedule.blocks[b, k, part].tolist()
            assert visits == union + [-1] * (len(visits) - len(union))
            for c in range(group):
                owned = [block for block, mine in zip(visits, own[b, k, part, c], strict=True) if mine]
                # Each exactly once, ascending; nothing for the padding of a short last group.
                assert owned == (sorted(members[c]) if c < len(members) else [])
        assert np.all(schedule.owners[schedule.blocks < 0] == 0)


def test_group_of_one_is_the_selection_itself():
    selected = random_blocks(np.random.default_rng(0), (1, 2, 5), 3, 8)
    schedule, _ = merged(selected, 1, 8)
    np.testing.assert_array_equal(schedule.blocks, selected)
    np.testing.assert_array_equal(schedule.owners, (selected >= 0).astype(np.int32))


def test_the_union_is_never_wider_than_the_cache():
    """Disjoint selections that fill the cache: the last block must still have a slot."""
    selected = np.arange(8, dtype=np.int32).reshape(1, 1, 4, 2)
    schedule, own = merged(selected, 4, 8)
    assert schedule.blocks[0, 0, 0].tolist() == list(range(8))
    assert schedule.owners[0, 0, 0].tolist() == [1, 1, 2, 2, 4, 4, 8, 8]
    assert own.sum() == 8


def test_the_largest_group_uses_the_sign_bit():
    """Bit 31 of an int32 read with an arithmetic shift: node 31 owning everything, or nothing."""
    selected = np.full((1, 1, MAX_GROUP, 1), -1, np.int32)
    selected[0, 0, MAX_GROUP - 1, 0] = 2
    selected[0, 0, 0, 0] = 1
    schedule, own = merged(selected, MAX_GROUP, 4)
    assert schedule.blocks[0, 0, 0].tolist() == [1, 2, -1, -1]
    assert own[0, 0, 0, :, :2].sum(1).tolist() == [1] + [0] * (MAX_GROUP - 2) + [1]
    assert own[0, 0, 0, MAX_GROUP - 1].tolist() == [False, True, False, False]


@pytest.mark.parametrize("group", [0, -1, MAX_GROUP + 1])
def test_group_out_of_range_is_refused(group):
    with pytest.raises(ValueError, match=f"group must be between 1 and {MAX_GROUP}, got {group}"):
        merge(jnp.zeros((1, 1, 2, 1), jnp.int32), group, 4)

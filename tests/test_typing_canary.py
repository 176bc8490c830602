"""Shows that shapes are checked in tests: that a wrong one raises, in each folder, through the links.

Without this, a hook that silently does nothing would look like a suite without shape errors.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from ssv_jax.pallas_kernels.layout import Completions, TreeQueries, chain
from ssv_jax.pallas_kernels.masking import masked_softmax


def make_queries(batch: int = 2, nodes: int = 3) -> TreeQueries:
    return chain(jnp.zeros(batch, jnp.int32), nodes)


@pytest.mark.parametrize("name", ["ssv_jax.loop", "ssv_jax.models.config", "ssv_jax.pallas_kernels.layout"])
def test_hook_loads_each_folder(name):
    importlib.import_module(name)
    loaded = {key: module for key, module in sys.modules.items() if key.split(".")[0] == "ssv_jax"}
    assert name in loaded
    # The hook's own loader, by name: it is private.
    unchecked = [key for key, m in loaded.items() if "Jaxtyping" not in type(m.__spec__.loader).__name__]
    assert not unchecked


def test_wrong_rank_raises_in_kernels():
    with pytest.raises(TypeCheckError):
        chain(jnp.zeros((2, 2), jnp.int32), 3)


def test_wrong_dtype_raises_in_kernels():
    with pytest.raises(TypeCheckError):
        masked_softmax(jnp.zeros((2, 3)), jnp.zeros((2, 3)))


def test_sizes_must_agree_between_arguments():
    with pytest.raises(TypeCheckError):
        masked_softmax(jnp.zeros((2, 3)), jnp.zeros((2, 4), bool))


def test_wrong_field_raises_when_a_pytree_is_built():
    zeros = jnp.zeros((2, 3), jnp.int32)
    with pytest.raises(TypeCheckError):
        Completions(node=zeros, entry=jnp.zeros((2, 4), jnp.int32), rows=zeros[..., None], node_slot=zeros)
    with pytest.raises(TypeCheckError):
        dataclasses.replace(make_queries(), position=jnp.zeros((2, 3, 1), jnp.int32))


def test_checks_hold_under_tracing():
    with pytest.raises(TypeCheckError):
        jax.eval_shape(chain, jax.ShapeDtypeStruct((2, 2), jnp.int32), 3)


def test_jax_may_rebuild_a_pytree_with_any_leaves():
    # What `conftest.py` replaces in `register_dataclass`: none of these builds a node of our own making.
    queries = make_queries()
    assert jax.tree.map(lambda x: None, queries).position is None
    assert jax.tree.map(lambda x: x.shape, queries).position == (2, 3)
    assert jax.eval_shape(lambda q: q, queries).position.shape == (2, 3)
    assert jax.device_get(queries).position.shape == (2, 3)
    _, stacked = jax.lax.scan(lambda carry, _: (carry, carry), queries, None, length=4)
    assert stacked.position.shape == (4, 2, 3)
    assert jax.vmap(lambda q: q.position.sum())(stacked).shape == (4,)
    compiled = jax.jit(lambda q: dataclasses.replace(q, length=q.length + 1), donate_argnums=0)
    assert compiled(queries).length.tolist() == [1, 1]
    assert isinstance(queries, TreeQueries)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(queries)]
    assert paths == [".length", ".position", ".ancestor", ".parent"]

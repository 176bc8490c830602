"""The training pass is the decoder: same logits, same gradients, for every plan, length and compressor."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ssv_jax.models.cache import init_cache
from ssv_jax.models.config import LlamaConfig, NSAConfig
from ssv_jax.models.layer_plan import LayerPlan
from ssv_jax.models.llama import PassOptions, build, param_shapes, random_params
from ssv_jax.pallas_kernels import chain
from ssv_jax.training.forward import (
    SequenceOptions,
    hidden_states,
    logits_of,
    stack_params,
    unstack_params,
)
from ssv_jax.training.sparse import attention_mass, choose_blocks, selection_loss

NSA = NSAConfig(
    cmp_fn="weighted",
    cmp_pe="kv",
    kernel_size=8,
    kernel_stride=4,
    block_size=16,
    n_selected=4,
    window_keys=24,
    gate_bias=True,
)
CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    nsa=NSA,
    tie_embeddings=True,
)

sequence_pass = jax.jit(hidden_states, static_argnames=("config", "options"))


def large_params(config: LlamaConfig, seed: int = 0) -> dict[str, jax.Array]:
    """Parameters that make attention peaked, so that a wrong block or position shows."""
    return {k: v * (12 if k.endswith(("kernel", "embedding")) else 1) for k, v in random_params(config, seed).items()}


def decoder_logits(
    config: LlamaConfig, params: dict, tokens: jax.Array, plan: tuple[bool, ...], taps: tuple[int, ...] = ()
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    batch, length = tokens.shape
    options = PassOptions(plan=LayerPlan(refresh=plan), is_chain=True, taps=taps)

    @jax.jit
    def run(params: dict, tokens: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        cache = init_cache(config, capacity=16 * (length // 16 + 1), batch=batch, dtype=jnp.float32)
        model = nnx.merge(*build(config, params))
        out = model(tokens, chain(jnp.zeros((batch,), jnp.int32), length), cache, options)
        return out.logits, out.taps

    return run(params, tokens)


def tokens_of(length: int, batch: int = 2) -> jax.Array:
    return jax.random.randint(jax.random.key(length), (batch, length), 0, CONFIG.vocab_size)


VARIANTS = {
    "dense": dataclasses.replace(CONFIG, nsa=None, tie_embeddings=False, qkv_bias=True, qk_norm=True),
    "weighted": CONFIG,
    "mean-token-gate": dataclasses.replace(CONFIG, nsa=NSAConfig(
        kernel_size=8, kernel_stride=8, block_size=8, n_selected=3, window_keys=5, gate_scope="token", cmp_rope="pre",
        init_blocks=0, local_blocks=1)),
    "linear": dataclasses.replace(CONFIG, nsa=dataclasses.replace(NSA, cmp_fn="linear", cmp_pe="k")),
    "pooled": dataclasses.replace(CONFIG, nsa=dataclasses.replace(NSA, cmp_fn="pooled")),
    "mlp": dataclasses.replace(CONFIG, nsa=dataclasses.replace(NSA, cmp_fn="mlp")),
}  # fmt: skip


REFRESH, REUSE = (True, True, True), (True, False, False)


@pytest.mark.parametrize(
    ("name", "plan", "library"),
    [
        *((name, plan, False) for name in VARIANTS for plan in (REFRESH, REUSE)),
        ("weighted", REUSE, True),
        ("mean-token-gate", REFRESH, True),
    ],
)
def test_logits_and_taps_are_those_of_the_decoder(name: str, plan: tuple[bool, ...], library: bool) -> None:
    config = VARIANTS[name]
    params, tokens = large_params(config, 1), tokens_of(101)
    want, want_taps = decoder_logits(config, params, tokens, plan, taps=(0, 2, 3))
    stacked = stack_params(config, params)
    options = SequenceOptions(taps=(0, 2, 3), chunk=16, segments=3, library=library)
    hidden = sequence_pass(config, stacked, tokens, jnp.array(plan), options)
    assert float(jnp.abs(want).max()) > 1
    np.testing.assert_allclose(logits_of(config, stacked, hidden.final), want, atol=1e-4)
    for got, expected in zip(hidden.taps, want_taps, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("length", "library"), [(1, False), (7, False), (16, False), (33, False), (1, True), (33, True)]
)
def test_every_length(length: int, library: bool) -> None:
    params, tokens = large_params(CONFIG, 2), tokens_of(length)
    want, _ = decoder_logits(CONFIG, params, tokens, (True, False, True))
    stacked = stack_params(CONFIG, params)
    options = SequenceOptions(chunk=12, segments=2, library=library)
    hidden = sequence_pass(CONFIG, stacked, tokens, jnp.array([True, False, True]), options)
    np.testing.assert_allclose(logits_of(CONFIG, stacked, hidden.final), want, atol=1e-4)


def test_a_reuse_layer_reads_other_blocks_than_a_refresh_layer() -> None:
    params, tokens = large_params(CONFIG, 3), tokens_of(120)
    stacked = stack_params(CONFIG, params)
    options = SequenceOptions(selected=True, chunk=40)
    chosen = {
        plan: sequence_pass(CONFIG, stacked, tokens, jnp.array(plan), options).selected
        for plan in ((True, True, True), (True, False, False))
    }
    fresh, reused = (np.asarray(chosen[plan]) for plan in chosen)
    assert (reused[1] == reused[0]).all()
    assert (fresh[1] != fresh[0]).any()
    position = np.arange(120)
    assert (fresh.sum(-1) == np.minimum(4, position // 16 + 1)).all()


@pytest.mark.parametrize(("remat", "library"), [(False, False), (True, True)])
def test_gradients_are_those_of_the_decoder(remat: bool, library: bool) -> None:
    params, tokens = large_params(CONFIG, 4), tokens_of(70, batch=1)
    plan, weight = (True, False, True), jax.random.normal(jax.random.key(5), (1, 70, CONFIG.vocab_size))

    def through_decoder(params: dict) -> jax.Array:
        return (decoder_logits(CONFIG, params, tokens, plan)[0] * weight).sum()

    def through_scan(stacked: dict) -> jax.Array:
        options = SequenceOptions(chunk=32, remat=remat, library=library)
        hidden = hidden_states(CONFIG, stacked, tokens, jnp.array(plan), options)
        return (logits_of(CONFIG, stacked, hidden.final) * weight).sum()

    want = jax.jit(jax.grad(through_decoder))(params)
    got = unstack_params(CONFIG, jax.jit(jax.grad(through_scan))(stack_params(CONFIG, params)))
    for name, value in want.items():
        scale = float(jnp.abs(value).max())
        assert scale > 0 or name.endswith("/pe"), name
        np.testing.assert_allclose(got[name], value, atol=2e-4 * max(scale, 1e-3), err_msg=name)


def test_stacking_is_undone() -> None:
    params = random_params(CONFIG, 6)
    back = unstack_params(CONFIG, stack_params(CONFIG, params))
    assert list(back) == list(param_shapes(CONFIG))
    for name, value in params.items():
        np.testing.assert_array_equal(back[name], value)


def plain_selection_loss(block_scores: np.ndarray, scores: np.ndarray, position: np.ndarray) -> float:
    """The definition, one query and KV head at a time, in float64."""
    total = 0.0
    for b, k, c in np.ndindex(block_scores.shape[:3]):
        at, blocks = int(position[c]), block_scores.shape[-1]
        full = np.zeros(blocks * NSA.block_size)
        for head in scores[b, k, c].astype(np.float64):
            weights = np.exp(head[: at + 1] - head[: at + 1].max())
            full[: at + 1] += weights / weights.sum() / scores.shape[3]
        mass = full.reshape(blocks, NSA.block_size).sum(-1)
        own = at // NSA.block_size
        free = [j for j in range(own + 1) if j >= NSA.init_blocks and j <= own - NSA.local_blocks]
        if free:
            wanted, got = mass[free] / mass[free].sum(), block_scores[b, k, c, free] / block_scores[b, k, c, free].sum()
            total += mass[free].sum() * (wanted * np.log(wanted / got)).sum()
    return total


def test_selection_loss_follows_its_definition() -> None:
    rng, position = np.random.default_rng(7), np.array([0, 15, 47, 64, 90, 95])
    scores = rng.standard_normal((2, 2, 6, 3, 96)).astype(np.float32) * 2
    block_scores = rng.random((2, 2, 6, 6)).astype(np.float32) + 0.1
    mass = attention_mass(jnp.asarray(scores), jnp.asarray(position), 6, CONFIG)
    got = selection_loss(jnp.asarray(block_scores), mass, jnp.asarray(position), CONFIG)
    np.testing.assert_allclose(got, plain_selection_loss(block_scores, scores, position), rtol=1e-4)


def test_selection_loss_trains_the_compressor_and_no_key() -> None:
    scores = jax.random.normal(jax.random.key(8), (1, 2, 4, 3, 96))
    block_scores, position = jax.random.uniform(jax.random.key(9), (1, 2, 4, 6)) + 0.1, jnp.array([60, 70, 80, 95])

    def loss(block_scores: jax.Array, scores: jax.Array) -> jax.Array:
        return selection_loss(block_scores, attention_mass(scores, position, 6, CONFIG), position, CONFIG)

    wrt_blocks, wrt_keys = jax.grad(loss, argnums=(0, 1))(block_scores, scores)
    assert float(jnp.abs(wrt_blocks).max()) > 1e-3
    assert not np.asarray(wrt_keys).any()


@pytest.mark.parametrize("every", [1, 3])
def test_selection_loss_of_some_queries_is_the_same_by_tiles_and_by_library(every: int) -> None:
    params, tokens = stack_params(CONFIG, large_params(CONFIG, 10)), tokens_of(100)
    plan = jnp.ones(3, bool)

    def loss(params: dict, library: bool, chunk: int) -> jax.Array:
        options = SequenceOptions(selection_loss=True, selection_every=every, chunk=chunk, segments=2, library=library)
        found = hidden_states(CONFIG, params, tokens, plan, options).selection_loss
        assert found is not None
        return found.sum()

    run = jax.jit(jax.value_and_grad(loss), static_argnums=(1, 2))
    (want, want_grads), (got, got_grads) = run(params, False, 24), run(params, True, 30)
    assert float(want) > 1e-3
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for name, value in want_grads.items():
        np.testing.assert_allclose(got_grads[name], value, atol=1e-4 * float(jnp.abs(value).max() + 1), err_msg=name)


def test_tiles_hold_whole_strides_of_compared_queries() -> None:
    options = SequenceOptions(selection_loss=True, selection_every=3, chunk=32)
    with pytest.raises(ValueError, match="chunk must be a multiple of selection_every"):
        hidden_states(CONFIG, stack_params(CONFIG, random_params(CONFIG)), tokens_of(40), None, options)


@pytest.mark.parametrize(("init", "local"), [(1, 2), (0, 1), (2, 1)])
def test_forced_blocks_and_the_best_others_are_chosen(init, local):
    """A forced block that takes the place of a free one, a block of the future, or a tie that goes the other way."""
    nsa = NSAConfig(kernel_size=8, kernel_stride=4, block_size=8, n_selected=5, init_blocks=init, local_blocks=local)
    config = dataclasses.replace(CONFIG, nsa=nsa)
    position = np.array([3, 8, 30, 77, 127])
    scores = np.round(8 * np.random.default_rng(0).random((2, 2, len(position), 16))).astype(np.float32)
    chosen = np.asarray(choose_blocks(jnp.asarray(scores), jnp.asarray(position), config))
    for at in np.ndindex(chosen.shape[:3]):
        own = position[at[2]] // 8
        forced = {block for block in range(own + 1) if block < init or block > own - local}
        free = sorted(set(range(own + 1)) - forced, key=lambda block, at=at: (-scores[at][block], block))
        assert set(np.flatnonzero(chosen[at])) == forced | set(free[: 5 - len(forced)])

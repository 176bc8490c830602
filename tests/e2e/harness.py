"""Tiny models, random trees and scripted drafts for end-to-end runs of the decode loop."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from ssv_jax import loop
from ssv_jax.drafting.none import NoDrafter
from ssv_jax.drafting.protocol import Params
from ssv_jax.drafting.replay import ReplayDrafter, Script
from ssv_jax.models.config import LlamaConfig, NSAConfig
from ssv_jax.models.layer_plan import LayerPlan
from ssv_jax.models.llama import build, random_params
from ssv_jax.state import DecodeState

VOCAB = 61
CHUNK = 16

_BASE = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    tie_embeddings=True,
    max_position=512,
)
_SIZES = {"kernel_size": 8, "kernel_stride": 4, "block_size": 8, "n_selected": 4, "window_keys": 10}
MODELS = {
    "overlapping": dataclasses.replace(_BASE, nsa=NSAConfig(cmp_fn="linear", cmp_pe="k", **_SIZES)),
    # Window and blocks shorter than the deep trees; middle blocks of a path are not forced.
    "short-window": dataclasses.replace(
        _BASE,
        num_heads=3,
        num_kv_heads=1,
        nsa=NSAConfig(
            kernel_size=4,
            kernel_stride=4,
            block_size=4,
            n_selected=3,
            window_keys=5,
            cmp_rope="pre",
            init_blocks=0,
            local_blocks=1,
            gate_bias=True,
        ),
    ),
    "wide-blocks": dataclasses.replace(
        _BASE,
        num_heads=4,
        num_kv_heads=1,
        tie_embeddings=False,
        nsa=NSAConfig(
            kernel_size=8, kernel_stride=2, block_size=16, n_selected=3, window_keys=16, cmp_fn="mlp", cmp_pe="kv"
        ),
    ),
    "pooled-token-gates": dataclasses.replace(
        _BASE,
        num_heads=2,
        num_kv_heads=2,
        qk_norm=True,
        nsa=NSAConfig(cmp_fn="pooled", gate_scope="token", **(_SIZES | {"kernel_size": 4, "window_keys": 3})),
    ),
    "dense": _BASE,
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A tiny target with weights large enough for its argmax to wander."""

    config: LlamaConfig
    graphdef: object
    params: Params


def raw_params(name: str, seed: int = 0) -> dict[str, jax.Array]:
    params = random_params(MODELS[name], seed)
    return {name: array * (8.0 if array.ndim > 1 else 1.0) for name, array in params.items()}


@functools.cache
def model(name: str, seed: int = 0) -> Model:
    config = MODELS[name]
    graphdef, state = build(config, raw_params(name, seed))
    return Model(config, graphdef, Params(target=state))


def decoding(target: Model, drafter=None, **choices) -> loop.Decoding:
    return loop.Decoding(model=target.graphdef, config=target.config, drafter=drafter or NoDrafter(), **choices)


prefill_chunk = jax.jit(loop.prefill_chunk, static_argnames=("decoding", "size"))
decode_until = jax.jit(loop.decode_until, static_argnames=("decoding", "rounds"))
init_state = jax.jit(loop.init_state, static_argnames=("decoding", "max_new_tokens", "capacity", "dtype"))


def run(
    what: loop.Decoding,
    params: Params,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    capacity: int,
    script: Script | None = None,
    rounds: int = 64,
    seed: int = 0,
    limits: list[int] | None = None,
    dtype: object = jnp.float32,
) -> tuple[list[list[int]], DecodeState]:
    """Emitted tokens of every sequence, first one included, and the final state."""
    lengths = [len(prompt) for prompt in prompts]
    padded = np.zeros((len(prompts), capacity), np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    state = init_state(
        what,
        jnp.asarray(padded),
        jnp.asarray(lengths, jnp.int32),
        max_new_tokens=max_new_tokens,
        key=jax.random.key(seed),
        capacity=capacity,
        dtype=dtype,
    )
    if limits is not None:
        state = dataclasses.replace(state, limit=jnp.minimum(state.limit, jnp.asarray(limits, jnp.int32)))
    if script is not None:
        state = dataclasses.replace(state, drafter=script)
    for _ in range(-(-max(lengths) // CHUNK)):
        state, _ = prefill_chunk(what, params, state, CHUNK)
    for _ in range(1 + max_new_tokens // max(rounds, 1)):
        state, _ = decode_until(what, params, state, rounds)
    history, count = np.asarray(state.history), np.asarray(state.count)
    return [history[row, lengths[row] : count[row]].tolist() for row in range(len(prompts))], state


def random_tree(rng: np.random.Generator, nodes: int, max_depth: int, kind: str) -> np.ndarray:
    """Parents of a random tree; node 0 is the root, unused nodes are padding."""
    parent = np.full(nodes, -1, np.int32)
    if kind == "chain":
        for node in range(1, min(nodes, max_depth + 1)):
            parent[node] = node - 1
        return parent
    if kind == "star":
        parent[1:] = 0
        return parent
    depth = np.zeros(nodes, int)
    used = nodes if rng.random() < 0.7 else int(rng.integers(2, nodes + 1))
    for node in range(1, used):
        choices = [above for above in range(node) if depth[above] < max_depth]
        # Prefer the newest node, so that deep paths exist.
        above = choices[-1] if rng.random() < 0.5 else int(rng.choice(choices))
        parent[node], depth[node] = above, depth[above] + 1
    return parent


def script_for(
    rng: np.random.Generator,
    drafter: ReplayDrafter,
    truth: np.ndarray,
    *,
    kind: str,
    wrong: float,
    turns: int = 5,
) -> Script:
    """Trees that draft the truth, each node spoiled with probability `wrong`."""
    batch = truth.shape[0]
    trees = [[random_tree(rng, drafter.num_nodes, drafter.max_depth, kind) for _ in range(batch)] for _ in range(turns)]
    spoiled = rng.random((turns, batch, drafter.num_nodes)) < wrong
    shift = np.where(spoiled, rng.integers(1, VOCAB, spoiled.shape), 0)
    return Script(
        truth=jnp.asarray(truth, jnp.int32),
        parent=jnp.asarray(np.array(trees), jnp.int32),
        shift=jnp.asarray(shift, jnp.int32),
        vocab_size=jnp.asarray(VOCAB, jnp.int32),
        played=jnp.asarray(0, jnp.int32),
    )


def plan(interval: int, layers: int) -> LayerPlan:
    return LayerPlan.every(layers, interval)


def margin(target: Model, tokens: list[int], one: int, other: int, *, capacity: int) -> float:
    """How far apart two next tokens' logits are after `tokens`, in a plain pass of the model's own dtype."""
    state = init_state(
        decoding(target),
        jnp.asarray([tokens + [0] * (capacity - len(tokens))], jnp.int32),
        jnp.asarray([len(tokens)], jnp.int32),
        max_new_tokens=1,
        key=jax.random.key(0),
        capacity=capacity,
        dtype=jnp.bfloat16,
    )
    logits = None
    for _ in range(-(-len(tokens) // CHUNK)):
        state, logits = prefill_chunk(decoding(target), target.params, state, CHUNK)
    return abs(float(logits[0, one] - logits[0, other]))

"""Training-time test of an EAGLE-3 head: what the head computes while drafting, for every position of a text at once.

Step 0 runs every pair (feature of the target at i, token at i + 1), as `drafting.eagle3` does when it observes.
Step s continues each of these rows as a chain of its own: row i holds the head's previous output and the token at
i + 1 + s, stands at rotary position i + s, and attends to the step-0 rows up to i and to its own steps 1 ... s, which
is what a drafter sees that has committed i + 1 pairs and has drafted s tokens. Its logits are for the token at
i + 2 + s, and are trained towards the target's distribution there (arXiv 2503.01840, section 3.2).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..models.eagle3 import DraftLayer, Eagle3
from ..models.layers import rope_angles, rotate
from .sparse import product

_SEGMENTS = 4  # runs of queries that read keys up to their own end only
# Float32 numbers in one block of logits (512 MiB).
_LOGITS = 1 << 27


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainingTest:
    """Static choices of the training-time test.

    Args:
      steps: passes of the head, the first over the target's features; 6 trains a chain of 6 drafts.
      decay: weight of each step's loss relative to the step before.
      window: pairs in reach of the head's attention, the own one included; None for all. To be the drafter's.
      chunk: queries whose attention scores exist at a time.
      logits: float32 numbers in one block of logits; bounds memory, nothing else.

    Raises:
      ValueError: a value out of range.
    """

    steps: int = 6
    decay: float = 0.8
    window: int | None = None
    chunk: int = 256
    logits: int = _LOGITS

    def __post_init__(self) -> None:
        for name in ("steps", "chunk", "logits"):
            if getattr(self, name) < 1:
                raise ValueError(f"training test: {name} must be >= 1, got {getattr(self, name)}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"training test: window must be >= 1 or none, got {self.window}")
        if not 0 < self.decay <= 1:
            raise ValueError(f"training test: decay must be in (0, 1], got {self.decay}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher:
    """What the target says about a batch of texts.

    Args:
      final: its last hidden states, after the final norm.
      table: its output matrix, one row per token, the draft vocabulary's rows first and in the order of draft ids
        (`draft_first`).
    """

    final: Float[Array, "B S E"]
    table: Float[Array, "V E"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sums:
    """Sums over a batch; `+` joins batches and `report` turns them into rates.

    Args:
      targets: supervised tokens.
      loss: sum of weighted cross-entropies over steps and targets, in nats.
      offered: drafts of each step that have a supervised target.
      covered: of these, the ones whose target's first choice the head can propose.
      hits: of these, the ones where it is the head's first choice, too.
      rows: rows with a supervised target at every step.
      runs: their hits before the first miss, summed over rows.
    """

    targets: Array
    loss: Array
    offered: Array
    covered: Array
    hits: Array
    rows: Array
    runs: Array

    def __add__(self, other: Sums) -> Sums:
        return jax.tree.map(jnp.add, self, other)

    def report(self) -> dict[str, Any]:
        """Rates on the host.

        Returns:
          `loss` (nats per supervised token, summed over weighted steps), `accuracy` (by step: agreement of the first
          choices, drafts outside the draft vocabulary count as misses), `coverage` (share of first choices in the
          draft vocabulary), `tokens_per_round` (of a greedy chain of as many drafts as there are steps, bonus
          included, for text that the target wrote greedily).
        """
        host = jax.device_get(self)

        def rate(part: Any, whole: Any) -> float:
            return float(part) / max(float(whole), 1.0)

        return {
            "loss": rate(host.loss, host.targets),
            "accuracy": [rate(hit, offer) for hit, offer in zip(host.hits, host.offered, strict=True)],
            "coverage": rate(host.covered[0], host.offered[0]),
            "tokens_per_round": 1 + rate(host.runs, host.rows),
        }


def draft_first(table: Float[Array, "V E"], target_ids: np.ndarray | None) -> Float[Array, "V E"]:
    """Rows of the target's output matrix, those of the draft vocabulary first; all in order without one."""
    if target_ids is None:
        return table
    rest = np.setdiff1d(np.arange(table.shape[0]), target_ids)
    return jnp.take(table, jnp.asarray(np.concatenate([target_ids, rest])), axis=0)


def training_test(
    head: Eagle3,
    kernel: Float[Array, "E Vd"] | None,
    embedded: Float[Array, "B S E"],
    taps: tuple[Float[Array, "B S Et"], ...],
    teacher: Teacher,
    supervised: Bool[Array, "B S"],
    options: TrainingTest,
) -> tuple[Float[Array, ""], Sums]:
    """The loss of a head on a batch of texts.

    Args:
      head: in the dtype to compute in.
      kernel: the output matrix where it is trained; None for the target's own rows.
      embedded: embeddings of the texts' tokens.
      taps: the target's residual streams at the tokens.
      teacher: the target's last hidden states and output matrix.
      supervised: which tokens count as targets.
      options: static choices.

    Returns:
      Per supervised token: the cross-entropy between the target's distribution over the draft vocabulary,
      renormalised, and the head's, summed over steps with weights decay^s; 0 where the target's first choice is
      outside the draft vocabulary. And the sums behind it.
    """
    with jax.default_matmul_precision("highest"):
        outputs = unroll(head, embedded, taps, options)
        x = outputs if head.config.normed_output else head.norm(outputs)
        frozen = kernel is None
        if kernel is None:
            kernel = teacher.table[: head.config.draft_vocab_size].T
        steps, length = x.shape[0], x.shape[2]
        # Row i of step s is about the target's distribution at position p = i + 1 + s. Everything below goes by p.
        aligned = jnp.stack([_right(x[s], 1 + s) for s in range(steps)])
        follows = _left(supervised, 1)
        position = jnp.arange(length)
        mask = jnp.stack([follows & (position >= 1 + s) for s in range(steps)])
        weights = options.decay ** jnp.arange(steps, dtype=jnp.float32)
        inputs = _Inputs(final=teacher.final, table=teacher.table, mask=mask, weights=weights)
        total, (hit, covered) = _soft_cross_entropy(options.logits, frozen, aligned, kernel.astype(x.dtype), inputs)
    targets = jnp.maximum(supervised.sum(), 1).astype(jnp.float32)
    return total / targets, _sums(targets, total, mask, hit, covered)


def _sums(targets: Array, loss: Array, mask: Array, hit: Array, covered: Array) -> Sums:
    steps = mask.shape[0]
    # Back to rows: what step s of row i hit is at position i + 1 + s.
    complete = jnp.stack([_left(mask[s], 1 + s) for s in range(steps)]).all(0)
    run = jnp.cumprod(jnp.stack([_left(hit[s], 1 + s) for s in range(steps)]).astype(jnp.int32), axis=0).sum(0)
    return Sums(
        targets=targets,
        loss=jax.lax.stop_gradient(loss),
        offered=mask.sum((1, 2), dtype=jnp.float32),
        covered=(mask & covered).sum((1, 2), dtype=jnp.float32),
        hits=hit.sum((1, 2), dtype=jnp.float32),
        rows=complete.sum(dtype=jnp.float32),
        runs=jnp.where(complete, run, 0).sum(dtype=jnp.float32),
    )


def _left(x: Array, by: int) -> Array:
    """x[:, i + by] at i; zeros beyond the end."""
    return jnp.pad(x[:, by:], ((0, 0), (0, min(by, x.shape[1])), *[(0, 0)] * (x.ndim - 2)))


def _right(x: Array, by: int) -> Array:
    """x[:, i - by] at i; zeros before the start."""
    return jnp.pad(x[:, : max(x.shape[1] - by, 0)], ((0, 0), (min(by, x.shape[1]), 0), *[(0, 0)] * (x.ndim - 2)))


def unroll(
    head: Eagle3,
    embedded: Float[Array, "B S E"],
    taps: tuple[Float[Array, "B S Et"], ...],
    options: TrainingTest,
) -> Float[Array, "n B S E"]:
    """The head's outputs of all steps, row by row; rows whose token lies beyond the text hold something finite."""
    length = embedded.shape[1]
    x = head.fuse(taps)
    embedded = embedded.astype(x.dtype)
    rows: list[_Rows] = [_Rows() for _ in head.layers]
    outputs = []
    for step in range(options.steps):
        token = _left(embedded, 1 + step)
        angles = rope_angles(jnp.arange(length) + step, head.config.head_dim, head.config.rope)
        for index, layer in enumerate(head.layers):
            x, rows[index] = _layer(layer, x, token if index == 0 else None, angles, rows[index], options)
        if head.config.normed_output:
            x = head.norm(x)
        outputs.append(x)
    return jnp.stack(outputs)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Keys and values of a layer's steps so far, each [B, S, K, D]."""

    k: tuple[Array, ...] = ()
    v: tuple[Array, ...] = ()


def _layer(
    layer: DraftLayer, x: Array, token: Array | None, angles: tuple[Array, Array], rows: _Rows, options: TrainingTest
) -> tuple[Array, _Rows]:
    """`DraftLayer.__call__` with the rows of earlier steps in place of a cache."""
    if token is None:
        joined = layer.attn_norm(x)
    else:
        normed = layer.feature_norm(x)
        joined = jnp.concatenate([layer.token_norm(token), normed], axis=-1)
        x = normed if layer.normed_residual else x
    qkv = layer.attn.qkv(joined)
    q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
    cos, sin = angles
    q = rotate(q, cos[:, None, None], sin[:, None, None])
    k = rotate(k, cos[:, None], sin[:, None])
    rows = _Rows((*rows.k, k), (*rows.v, v))
    out = _attend(q, rows, scale=layer.attn.config.head_dim**-0.5, options=options)
    x = x + layer.attn.o(out.astype(x.dtype))
    return x + layer.mlp(layer.mlp_norm(x)), rows


def _attend(
    q: Float[Array, "B S K G D"], rows: _Rows, *, scale: float, options: TrainingTest
) -> Float[Array, "B S K G D"]:
    """Row i of the latest step over the step-0 rows up to i and its own later ones, under one softmax; float32."""
    step, length = len(rows.k) - 1, q.shape[1]
    window = options.window if options.window is not None and options.window <= length + step else None
    # Own rows in reach: step r stands step - r behind.
    near = [r for r in range(1, step + 1) if window is None or step - r < window]
    own = [jnp.stack([kv[r] for r in near], axis=3) for kv in (rows.k, rows.v)] if near else []
    chunk = min(options.chunk, length)
    count = -(-length // chunk)

    def tiles(x: Array) -> Array:  # [B, S, K, ...] -> [tiles, B, K, chunk, ...]
        x = jnp.pad(x, ((0, 0), (0, count * chunk - length), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(x.shape[0], count, chunk, *x.shape[2:]), (1, 3), (0, 2))

    xs = (jnp.arange(count) * chunk, tiles(q), *map(tiles, own))
    k, v = (jnp.swapaxes(x[0], 1, 2) for x in (rows.k, rows.v))  # heads first, as batched products have them
    outputs = []
    segments = 1 if window is not None else min(_SEGMENTS, count)
    bounds = [count * i // segments for i in range(segments + 1)]
    for begin, end in zip(bounds, bounds[1:], strict=False):
        readable = min(end * chunk, length)
        width = readable if window is None else min(readable, chunk + window - 1)
        tile = functools.partial(_attend_tile, step=step, window=window, width=width, scale=scale)
        # Scores, whose size is quadratic, are computed again in the backward pass.
        tile = functools.partial(jax.checkpoint(tile), k[:, :, :readable], v[:, :, :readable])
        part = jax.tree.map(lambda x, begin=begin, end=end: x[begin:end], xs)
        outputs.append(jax.lax.map(lambda x, tile=tile: tile(*x), part))
    out = jnp.moveaxis(jnp.concatenate(outputs), (0, 2), (1, 3))
    return out.reshape(out.shape[0], count * chunk, *out.shape[3:])[:, :length]


def _attend_tile(
    keys: Float[Array, "B K X D"],
    values: Float[Array, "B K X D"],
    first: Int[Array, ""],
    q: Float[Array, "B K C G D"],
    own_k: Float[Array, "B K C r D"] | None = None,
    own_v: Float[Array, "B K C r D"] | None = None,
    *,
    step: int,
    window: int | None,
    width: int,
    scale: float,
) -> Float[Array, "B K C G D"]:
    """Queries `first` ... over `width` of the step-0 rows and over their own later ones."""
    start = jnp.zeros((), jnp.int32)
    if width < keys.shape[2]:
        start = jnp.clip(first + 1 - (window or 0), 0, keys.shape[2] - width)
        keys, values = (jax.lax.dynamic_slice_in_dim(x, start, width, axis=2) for x in (keys, values))
    row = first + jnp.arange(q.shape[2])[:, None, None]
    key = start + jnp.arange(width)
    mask = key <= row
    if window is not None:
        mask &= key > row + step - window
    scores = jnp.where(mask, product("bkcgd,bkxd->bkcgx", q, keys) * scale, -jnp.inf)
    top = scores.max(-1, keepdims=True)
    own = None
    if own_k is not None:
        own = product("bkcgd,bkcrd->bkcgr", q, own_k) * scale
        top = jnp.maximum(top, own.max(-1, keepdims=True))
    top = jax.lax.stop_gradient(top)
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    out = product("bkcgx,bkxd->bkcgd", weights.astype(values.dtype), values)
    if own is not None and own_v is not None:
        own = jnp.exp(own - top)
        total = total + own.sum(-1, keepdims=True)
        out = out + product("bkcgr,bkcrd->bkcgd", own.astype(own_v.dtype), own_v)
    return out / total


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Inputs:
    """The constants of `_soft_cross_entropy`: final [B, S, E], table [V, E], mask [n, B, S], weights [n]."""

    final: Array
    table: Array
    mask: Array
    weights: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _soft_cross_entropy(
    block: int, frozen: bool, x: Array, kernel: Array, inputs: _Inputs
) -> tuple[Array, tuple[Array, Array]]:
    """Weighted cross-entropies, summed, with hits [n, B, S] and covered [B, S].

    Both sides are positions of the target: x[s, :, p] [n, B, S, E] are the head's normed outputs about position p.
    Logits exist for a run of positions at a time. A custom gradient, because that of a softmax is known before its
    cotangent is: one pass serves both directions, where recomputation would need two.
    """
    total, hits, _, _ = _blocks(block, x, kernel, inputs, gradient=False, frozen=True)
    return total, hits


def _forward(block: int, frozen: bool, x: Array, kernel: Array, inputs: _Inputs) -> Any:
    total, hits, dx, dkernel = _blocks(block, x, kernel, inputs, gradient=True, frozen=frozen)
    # `kernel` stands for its own gradient's shape where that is not wanted.
    return (total, hits), (dx, dkernel if dkernel is not None else kernel, inputs)


def _backward(block: int, frozen: bool, saved: Any, cotangent: Any) -> Any:
    dx, dkernel, inputs = saved
    scale = cotangent[0]
    dkernel = jnp.zeros_like(dkernel) if frozen else (dkernel * scale).astype(dx.dtype)
    zeros = jax.tree.map(_no_gradient, inputs)
    return (dx * scale).astype(dx.dtype), dkernel, zeros


def _no_gradient(x: Array) -> Any:
    return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape, jax.dtypes.float0)


_soft_cross_entropy.defvjp(_forward, _backward)


def _blocks(
    block: int, x: Array, kernel: Array, inputs: _Inputs, *, gradient: bool, frozen: bool
) -> tuple[Array, tuple[Array, Array], Array | None, Array | None]:
    """The sum, hits and covered, and where asked for the gradients towards x and kernel, by runs of positions."""
    steps, batch, length, _ = x.shape
    vocab = kernel.shape[1]
    run = max(1, min(length, block // (batch * max(steps * vocab, inputs.table.shape[0]))))
    count = -(-length // run)

    def runs(a: Array, axis: int) -> Array:
        pad = [(0, 0)] * a.ndim
        pad[axis] = (0, count * run - length)
        a = jnp.pad(a, pad)
        return jnp.moveaxis(a.reshape(*a.shape[:axis], count, run, *a.shape[axis + 1 :]), axis, 0)

    def whole(a: Array, axis: int) -> Array:
        a = jnp.moveaxis(a, 0, axis)
        a = a.reshape(*a.shape[:axis], count * run, *a.shape[axis + 2 :])
        return jax.lax.slice_in_dim(a, 0, length, axis=axis)

    def step(carry: tuple[Array, Array], part: tuple[Array, Array, Array]) -> Any:
        total, dkernel = carry
        xs, final, mask = part
        theirs = jnp.einsum("bre,ve->brv", final, inputs.table, preferred_element_type=jnp.float32)
        mine, others = theirs[..., :vocab], theirs[..., vocab:]
        covered = mine.max(-1) >= others.max(-1) if others.shape[-1] else jnp.ones(mine.shape[:-1], bool)
        p = jax.nn.softmax(mine)
        logits = jnp.einsum("sbre,ev->sbrv", xs, kernel, preferred_element_type=jnp.float32)
        hit = mask & covered & (jnp.argmax(logits, -1) == jnp.argmax(mine, -1))
        norm = jax.nn.logsumexp(logits, axis=-1)
        weight = jnp.where(mask & covered, inputs.weights[:, None, None], 0.0)
        total = total + ((norm - (p * logits).sum(-1)) * weight).sum()
        dx = None
        if gradient:
            g = ((jnp.exp(logits - norm[..., None]) - p) * weight[..., None]).astype(xs.dtype)
            dx = jnp.einsum("sbrv,ev->sbre", g, kernel, preferred_element_type=jnp.float32).astype(xs.dtype)
            if not frozen:
                dkernel = dkernel + jnp.einsum("sbre,sbrv->ev", xs, g, preferred_element_type=jnp.float32)
        return (total, dkernel), (hit, covered, dx)

    start = (jnp.zeros((), jnp.float32), jnp.zeros(() if frozen else kernel.shape, jnp.float32))
    parts = (runs(x, 2), runs(inputs.final, 1), runs(inputs.mask, 2))
    (total, dkernel), (hit, covered, dx) = jax.lax.scan(step, start, parts)
    return total, (whole(hit, 2), whole(covered, 1)), None if dx is None else whole(dx, 2), None if frozen else dkernel

"""The loss that turns a dense model into a sparse one: match the dense teacher's predictions on any text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..models.config import LlamaConfig
from .forward import SequenceOptions, Stacked, hidden_states, logits_of
from .lora import merge
from .sparse import SparseOptions

_LOGIT_ROWS = 4096  # rows whose logits exist at a time


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Distillation:
    """Static description of teacher and student.

    Args:
      teacher: dense.
      student: sparse, otherwise the same model.
      scale: of the low-rank deltas.
      stream_weight: weight of the mean cosine distance between residual streams after every layer.
      selection_weight: weight of the selection loss (`forward.Hidden`), mean over layers.
      sparse: how sparse attention is computed; its `selection_loss` follows the weight.
    """

    teacher: LlamaConfig
    student: LlamaConfig
    scale: float
    stream_weight: float
    selection_weight: float = 0.0
    sparse: SparseOptions = SparseOptions()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Matching:
    """How close a student is to its teacher, means over positions.

    Attributes:
      loss: what is minimised.
      kl: KL(teacher || student) of next-token distributions, nats.
      streams: cosine distance of residual streams.
      selection: how far block scores are from what full attention reads, nats.
      nll, teacher_nll: negative log-likelihood of the text's own next token, nats.
    """

    loss: Float[Array, ""]
    kl: Float[Array, ""]
    streams: Float[Array, ""]
    selection: Float[Array, ""]
    nll: Float[Array, ""]
    teacher_nll: Float[Array, ""]


def match(
    recipe: Distillation,
    trained: Stacked,
    base: Stacked,
    tokens: Int[Array, "B S"],
    targets: Bool[Array, "B S"],
    refresh: Bool[Array, " L"],
    remat: bool = True,
) -> Matching:
    """Compares student and teacher on a batch.

    Args:
      recipe: static.
      trained: see `lora.init_trained`.
      base: the dense model's stacked parameters, in the dtype to compute in.
      tokens: B sequences.
      targets: tokens whose likelihood is counted in `nll`; the match is over all positions.
      refresh: layers that select blocks.
      remat: see `forward.SequenceOptions`.
    """
    sparse = dataclasses.replace(recipe.sparse, selection_loss=recipe.selection_weight > 0)
    options = SequenceOptions(**dataclasses.asdict(sparse), streams=recipe.stream_weight > 0, remat=remat)
    teacher = hidden_states(recipe.teacher, base, tokens, options=dataclasses.replace(options, remat=False))
    teacher = jax.lax.stop_gradient(teacher)
    merged = merge(base, trained, recipe.scale)
    student = hidden_states(recipe.student, merged, tokens, refresh, options)
    following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    counted = jnp.pad(targets[:, 1:], ((0, 0), (0, 1)))
    kl, nll, teacher_nll = _compare_logits(recipe.student, base, teacher.final, student.final, following, counted)
    streams = jnp.zeros(())
    if teacher.streams is not None and student.streams is not None:
        streams = _cosine_distance(teacher.streams, student.streams)
    selection = jnp.zeros(()) if student.selection_loss is None else student.selection_loss.mean()
    positions = tokens.shape[0] * tokens.shape[1]
    number = jnp.maximum(counted.sum(), 1)
    return Matching(
        loss=kl / positions + recipe.stream_weight * streams + recipe.selection_weight * selection,
        kl=kl / positions,
        streams=streams,
        selection=selection,
        nll=nll / number,
        teacher_nll=teacher_nll / number,
    )


def _cosine_distance(a: Array, b: Array) -> Array:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    norms = jnp.maximum(jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1), 1e-6)
    return (1 - (a * b).sum(-1) / norms).mean()


def _compare_logits(
    config: LlamaConfig,
    params: Mapping[str, Array],
    teacher: Array,
    student: Array,
    following: Array,
    counted: Array,
) -> tuple[Array, Array, Array]:
    """Sums of KL, student's and teacher's negative log-likelihood; logits of a few rows at a time."""
    batch, length = following.shape
    rows = max(d for d in range(1, length + 1) if length % d == 0 and (d == 1 or d * batch <= _LOGIT_ROWS))

    def cut(x: Array) -> Array:  # along the sequence, so that a batch spread over devices stays where it is
        return jnp.moveaxis(x.reshape(batch, length // rows, rows, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def part(sums: Array, xs: tuple[Array, Array, Array, Array]) -> tuple[Array, None]:
        t, s, token, count = xs
        log_t = jax.nn.log_softmax(logits_of(config, params, t))
        log_s = jax.nn.log_softmax(logits_of(config, params, s))
        kl = (jnp.exp(log_t) * (log_t - log_s)).sum()
        own = lambda logs: -(jnp.take_along_axis(logs, token[..., None], -1)[..., 0] * count).sum()  # noqa: E731
        return sums + jnp.stack([kl, jax.lax.stop_gradient(own(log_s)), own(log_t)]), None

    sums, _ = jax.lax.scan(part, jnp.zeros(3), (cut(teacher), cut(student), cut(following), cut(counted)))
    return sums[0], sums[1], sums[2]

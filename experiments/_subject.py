"""A model on the device, as it is or as its twin of other sizes, with its draft head."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import _evaluation as evaluation
import _harness as harness
import jax
from flax import nnx
from twin import build_twin

from ssv_jax import UsageError
from ssv_jax.drafting.eagle3 import Eagle3Drafter
from ssv_jax.models import eagle3
from ssv_jax.models.config import LlamaConfig
from ssv_jax.models.eagle3_config import Eagle3Config, default_taps
from ssv_jax.models.eagle3_loading import load_eagle3
from ssv_jax.models.llama import build


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """A draft head, on the host; `kind` is `trained` or `random`."""

    config: Eagle3Config
    params: dict[str, Any]
    kind: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A model on the device.

    Args:
      name: for results: what is real about it, what is scaled up.
      config, graphdef, target: the model.
      vocab_size: its real tokens.
      head: drafter of one node, and parameters; None without a head.
      head_kind: see `Head`; None without a head.
      stop: tokens that end an answer.
    """

    name: str
    config: LlamaConfig
    graphdef: nnx.GraphDef
    target: nnx.State
    vocab_size: int
    head: tuple[Eagle3Drafter, nnx.State] | None = None
    head_kind: str | None = None
    stop: tuple[int, ...] = ()


def random_head(config: LlamaConfig, seed: int = 0, draft_vocab: int = 16384) -> Head:
    """A head of the usual sizes that knows nothing: what it costs is real, what it drafts is not."""
    small = config.num_layers < 7
    head = Eagle3Config(
        vocab_size=config.vocab_size,
        draft_vocab_size=min(draft_vocab, config.vocab_size),
        hidden_size=config.hidden_size,
        target_hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rope=config.rope,
        taps=(0, 1, config.num_layers) if small else default_taps(config.num_layers),
    )
    return Head(config=head, params=dict(eagle3.random_params(head, seed)), kind="random")


def find_head(model: evaluation.Model, directory: Path | None, allow_random: bool) -> Head:
    """The head in `directory`, else the model's own, else, if that is allowed, a random one.

    Raises:
      UsageError: no head.
      CheckpointError: one that cannot be read or does not fit.
    """
    where = directory or model.head
    if where is not None:
        loaded = load_eagle3(where, model.config, target_params=model.params)
        return Head(config=loaded.config, params=dict(loaded.params), kind="trained")
    if not allow_random:
        raise UsageError(
            f"{model.facts['name']} has no draft head of its own: name one with --draft-model, draft with "
            "--draft ngram, or give --random-head, which shows what drafting costs and nothing of what it gains"
        )
    return random_head(model.config)


def make_subject(
    model: evaluation.Model, head: Head | None, dtype: Any, shape: Any = None, seed: int = 0
) -> tuple[Subject, float]:
    """The model on the device, widened to `shape` if there is one, and the seconds that took.

    Raises:
      UsageError: a shape that cannot hold the model.
    """
    began = time.perf_counter()
    config, params = model.config, model.params
    draft = None if head is None else (head.config, head.params)
    what = "dense" if config.nsa is None else "NSA"
    name = f"{model.facts['name']}, {what}"
    if shape is not None:
        try:
            twin = build_twin(config, params, shape, draft, seed=seed, dtype=dtype)
        except ValueError as error:
            raise UsageError(f"--shape: {error}") from None
        config, params = twin.config, twin.params
        if twin.head_config is not None and twin.head_params is not None:
            draft = twin.head_config, twin.head_params
        name += f", widened to {twin.config.num_layers} layers of {twin.config.hidden_size} (scale-up twin)"
    graphdef, target = build(config, params, dtype)
    drafter = None
    if draft is not None:
        graph, state = eagle3.build(*draft, dtype)
        window = draft[0].draft_window
        drafter = Eagle3Drafter(graphdef=graph, config=draft[0], window=window, depth=1, top_k=1, num_nodes=2), state
    jax.block_until_ready(jax.tree.leaves(target))
    subject = Subject(
        name=name,
        config=config,
        graphdef=graphdef,
        target=target,
        vocab_size=model.config.vocab_size,
        head=drafter,
        head_kind=None if head is None else head.kind,
        stop=() if model.tokenizer is None else tuple(model.tokenizer.eos_ids),
    )
    seconds = time.perf_counter() - began
    harness.say(f"{name}: on the device in {seconds:.1f} s")
    return subject, seconds

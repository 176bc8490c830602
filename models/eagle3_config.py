"""What an EAGLE-3 draft head is, and how the checkpoints in circulation describe one (arXiv 2503.01840).

Nothing here imports jax. Fields of a `config.json` that this module does not know are refused: an option that
is ignored would only show as drafts that are rarely accepted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from .config import LlamaConfig, RopeConfig
from .errors import CheckpointError
from .hf_config import _Fields, _parse_rope

NUM_TAPS = 3
TapConvention = Literal["residual", "layer-output"]
TAP_CONVENTIONS: tuple[TapConvention, ...] = ("residual", "layer-output")

_CONSUMED = frozenset(
    """
    hidden_size target_hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim
    rms_norm_eps vocab_size draft_vocab_size num_hidden_layers rope_theta rope_scaling rope_parameters
    attention_bias qkv_bias mlp_bias fc_norm norm_before_fc norm_before_residual norm_output eagle_config
    eagle_aux_hidden_state_layer_ids
    """.split()
)
_EAGLE_CONFIG = frozenset(
    ("eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state", "tap_convention", "draft_window")
)
# Without influence on the mathematics of inference. `max_position_embeddings` is among them on purpose: rotary
# angles are computed, and heads are routinely run far beyond the (often copied) limit in their file.
_IRRELEVANT = frozenset(
    """
    architectures model_type torch_dtype dtype transformers_version _name_or_path name_or_path
    initializer_range use_cache pretraining_tp attention_dropout bos_token_id eos_token_id pad_token_id
    max_position_embeddings target_model_type max_window_layers output_attentions output_hidden_states
    return_dict
    """.split()
)
# Fields that are accepted with one of these values only.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "tie_word_embeddings": (False,),
    "bias": (False,),
    "use_sliding_window": (False,),
    "sliding_window": (None,),
    "parallel_drafting": (False,),
    "quantization_config": (None,),
    "logit_scale": (1.0,),
    "partial_rotary_factor": (1.0,),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Config:
    """An EAGLE-3 head for one target.

    Args:
      vocab_size: of the target.
      draft_vocab_size: tokens that the head can propose; equal to `vocab_size`, it proposes them all.
      hidden_size: width of the head.
      target_hidden_size: width of the target's residual stream.
      intermediate_size: of the feed-forward.
      num_layers: the first takes token and feature side by side, later ones the residual stream alone.
      num_heads, num_kv_heads, head_dim: of the attention.
      rms_eps: of all norms.
      rope: the head's own, which need not be the target's.
      taps: residual streams of the target that are fused, low to high: k is the stream after k layers.
      tap_norm: RMSNorm before the fusion: none, one of each tap (`fc_norm`), or one of the concatenation
        (`norm_before_fc`).
      normed_residual: the first layer's residual is the normed feature (`norm_before_residual`).
      normed_output: the final norm is part of the feature that the next step reads (`norm_output`).
      qkv_bias, o_bias, mlp_bias: whether those projections have biases.
      own_embedding: token embeddings of its own; otherwise the target's.
      own_head: an output matrix of its own; otherwise the rows of the target's at the draft vocabulary.
      draft_window: pairs that its attention should reach, its own included; None for all. A recommendation, which
        drafters follow unless told otherwise.

    Raises:
      ValueError: a size that is not positive, heads that do not group, or taps that are not three rising
        indices.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_layers: int = 1
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    taps: tuple[int, ...]
    tap_norm: Literal["none", "each", "concat"] = "none"
    normed_residual: bool = False
    normed_output: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    own_embedding: bool = False
    own_head: bool = True
    draft_window: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type != "int":
                continue
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"eagle3 {field.name} must be a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"eagle3 num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"eagle3 head_dim={self.head_dim} must be even: rotary embedding rotates pairs")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"eagle3 draft_vocab_size={self.draft_vocab_size} exceeds vocab_size={self.vocab_size}")
        if self.tap_norm not in ("none", "each", "concat"):
            raise ValueError(f"eagle3 tap_norm must be none, each or concat, got {self.tap_norm!r}")
        check_taps(self.taps)
        window = self.draft_window
        if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
            raise ValueError(f"eagle3 draft_window must be an integer >= 1 or null, got {window!r}")
        if not self.own_embedding and self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"eagle3 hidden_size={self.hidden_size} differs from target_hidden_size="
                f"{self.target_hidden_size}: the head cannot share the target's embeddings and needs its own"
            )
        if not self.own_head and self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"eagle3 hidden_size={self.hidden_size} differs from target_hidden_size="
                f"{self.target_hidden_size}: the head cannot share the target's output matrix and needs its own"
            )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def reduced_vocab(self) -> bool:
        """Whether draft ids differ from target ids."""
        return self.draft_vocab_size < self.vocab_size


def check_taps(taps: Sequence[int]) -> None:
    """Three rising indices.

    Raises:
      ValueError: another number of taps, a repeated one, or a wrong order.
    """
    whole = all(isinstance(tap, int) and not isinstance(tap, bool) and tap >= 0 for tap in taps)
    if len(taps) != NUM_TAPS or not whole or any(a >= b for a, b in zip(taps, taps[1:], strict=False)):
        raise ValueError(
            f"eagle3 taps must be {NUM_TAPS} different residual-stream indices from low to high, got {list(taps)}"
        )


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """The residual streams that EAGLE-3 fuses where nothing else is said: after 2, half and all but 3 layers.

    Raises:
      ValueError: fewer than 7 layers, where they would coincide.
    """
    taps = (2, num_layers // 2, num_layers - 3)
    if num_layers < 7:
        raise ValueError(
            f"eagle3: a target of {num_layers} layers has no three different default taps (they need 7 "
            "layers): name them"
        )
    return taps


def resolve_taps(
    ids: Sequence[int] | None, num_layers: int, convention: TapConvention | None = None
) -> tuple[int, ...]:
    """Residual-stream indices from the ids of a checkpoint.

    Two conventions are in use: `residual` counts residual streams (id k is the stream after k layers),
    `layer-output` counts layers from 0 (id k is the output of layer k, the stream after k + 1 layers). Ids
    that are the defaults of one convention are recognised; for others the convention must be given.

    Args:
      ids: as stored, None for the defaults.
      num_layers: of the target.
      convention: of the ids; None recognises defaults only.

    Raises:
      ValueError: ambiguous, repeated, unordered or out-of-range ids.
    """
    if convention is not None and convention not in TAP_CONVENTIONS:
        raise ValueError(f"tap convention must be one of {', '.join(TAP_CONVENTIONS)}, got {convention!r}")
    if ids is None:
        return default_taps(num_layers)
    if convention is None:
        defaults = default_taps(num_layers) if num_layers >= 7 else ()
        if tuple(ids) == defaults:
            convention = "residual"
        elif defaults and tuple(ids) == tuple(tap - 1 for tap in defaults):
            convention = "layer-output"
        else:
            raise ValueError(
                f"eagle3 tap ids {list(ids)} are the defaults of neither convention for {num_layers} layers: "
                "say tap_convention 'residual' (id k is the residual stream after k layers, 0 the embeddings) "
                "or 'layer-output' (id k is the output of layer k, counted from 0)"
            )
    check_taps(ids)
    taps = tuple(tap + (convention == "layer-output") for tap in ids)
    if taps[-1] > num_layers:
        raise ValueError(f"eagle3 tap ids {list(ids)} ({convention}) reach beyond the target's {num_layers} layers")
    return taps


def check_against_target(config: Eagle3Config, target: LlamaConfig) -> None:
    """A head fits a target; to be called before any weights are read.

    Raises:
      CheckpointError: names the size that differs, in both models.
    """
    _check_sizes(config.vocab_size, config.target_hidden_size, target)
    if config.taps[-1] > target.num_layers:
        raise CheckpointError(
            f"the draft head taps the residual stream after {config.taps[-1]} layers, but the target has "
            f"{target.num_layers}"
        )


def _check_sizes(vocab: int, hidden: int, target: LlamaConfig) -> None:
    for what, ours, theirs in (
        ("vocab_size", vocab, target.vocab_size),
        ("target_hidden_size", hidden, target.hidden_size),
    ):
        if ours != theirs:
            raise CheckpointError(
                f"the draft head was made for another target: its {what} is {ours}, the target's is {theirs}"
            )


def _draft_window(reader: _Fields) -> int | None:
    window = (reader.mapping("eagle_config") or {}).get("draft_window")
    if window is not None and (not isinstance(window, int) or isinstance(window, bool)):
        raise reader.error(f"eagle3 draft_window must be an integer >= 1 or null, got {window!r}")
    return window


def parse_eagle3_config(
    path: Path,
    fields: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    target: LlamaConfig,
    tap_convention: TapConvention | None = None,
) -> Eagle3Config:
    """The head behind a `config.json`, checked against its target.

    Args:
      path: the file, for messages.
      fields: its content.
      shapes: of the tensors beside it, in canonical names; they say whether the head has an embedding and an
        output matrix of its own.
      target: what it drafts for.
      tap_convention: of the tap ids; None takes `eagle_config.tap_convention`, or recognises default ids.

    Raises:
      CheckpointError: a field that is unknown, missing, of a wrong type or value, or a head for another
        target.
    """
    reader = _Fields(path, fields)
    _refuse_unknown(reader, fields)
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    vocab, target_hidden = reader.integer("vocab_size"), reader.integer("target_hidden_size", hidden)
    attention_bias = reader.boolean("attention_bias")
    each, concat = reader.boolean("fc_norm"), reader.boolean("norm_before_fc")
    if each and concat:
        raise reader.error("fc_norm and norm_before_fc exclude each other")
    try:
        # Before the taps, which mean nothing for another target.
        _check_sizes(vocab, target_hidden, target)
        config = Eagle3Config(
            vocab_size=vocab,
            draft_vocab_size=reader.integer("draft_vocab_size", vocab),
            hidden_size=hidden,
            target_hidden_size=target_hidden,
            intermediate_size=reader.integer("intermediate_size"),
            num_layers=reader.integer("num_hidden_layers", 1),
            num_heads=heads,
            num_kv_heads=reader.integer("num_key_value_heads", heads),
            head_dim=reader.integer("head_dim", hidden // max(heads, 1)),
            rms_eps=reader.number("rms_norm_eps", 1e-6),
            rope=_parse_rope(reader),
            taps=_parse_taps(reader, target, tap_convention),
            tap_norm="each" if each else "concat" if concat else "none",
            normed_residual=reader.boolean("norm_before_residual"),
            normed_output=reader.boolean("norm_output"),
            qkv_bias=reader.boolean("qkv_bias", attention_bias),
            o_bias=attention_bias,
            mlp_bias=reader.boolean("mlp_bias"),
            own_embedding="embed_tokens.weight" in shapes,
            own_head="lm_head.weight" in shapes,
            draft_window=_draft_window(reader),
        )
        check_against_target(config, target)
    except CheckpointError as error:
        raise error if str(error).startswith(str(path)) else reader.error(str(error)) from None
    except ValueError as error:
        raise reader.error(str(error)) from None
    return config


def _refuse_unknown(reader: _Fields, fields: Mapping[str, Any]) -> None:
    eagle = reader.mapping("eagle_config") or {}
    unknown = sorted(set(fields) - _CONSUMED - _IRRELEVANT - set(_ONLY))
    unknown += [f"eagle_config.{name}" for name in sorted(set(eagle) - _EAGLE_CONFIG)]
    if unknown:
        raise reader.error(
            f"unknown field(s) {', '.join(unknown)}: this EAGLE-3 variant is not implemented, or the file "
            "describes another kind of model"
        )
    for name, allowed in _ONLY.items():
        value = fields.get(name, allowed[0])
        if value is not None and value not in allowed:
            raise reader.error(f"{name}={value!r} is not supported, only {allowed[0]!r}")
    if not eagle.get("use_aux_hidden_state", True):
        raise reader.error("eagle_config.use_aux_hidden_state is false: only heads that fuse three taps are supported")


def _parse_taps(reader: _Fields, target: LlamaConfig, convention: TapConvention | None) -> tuple[int, ...]:
    eagle = reader.mapping("eagle_config") or {}
    name = "eagle_aux_hidden_state_layer_ids"
    found = [ids for ids in (eagle.get(name), reader.get(name)) if ids is not None]
    if len(found) == 2 and found[0] != found[1]:
        raise reader.error(f"{name} is given twice, with different ids")
    ids = found[0] if found else None
    if ids is not None and not isinstance(ids, list):
        raise reader.error(f"{name} must be a list of {NUM_TAPS} integers, got {ids!r}")
    return resolve_taps(ids, target.num_layers, convention or eagle.get("tap_convention"))


def eagle3_config_to_json(config: Eagle3Config, dtype: str) -> dict[str, Any]:
    """The `config.json` of a head in SpecForge's fields; `parse_eagle3_config` reads it back equal.

    Args:
      config: the head.
      dtype: name of the weights' dtype, recorded for other readers.
    """
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "attention_bias": config.o_bias,
        # Most heads in circulation use layer outputs, and other programs take ids that start with 1 for them.
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in config.taps],
            "use_aux_hidden_state": True,
            "tap_convention": "layer-output",
        },
    }
    if config.taps[0] == 0:
        fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = list(config.taps)
        fields["eagle_config"]["tap_convention"] = "residual"
    if config.draft_window is not None:
        fields["eagle_config"]["draft_window"] = config.draft_window
    if config.qkv_bias != config.o_bias:
        fields["qkv_bias"] = config.qkv_bias
    for name, value in (
        ("mlp_bias", config.mlp_bias),
        ("fc_norm", config.tap_norm == "each"),
        ("norm_before_fc", config.tap_norm == "concat"),
        ("norm_before_residual", config.normed_residual),
        ("norm_output", config.normed_output),
    ):
        if value:
            fields[name] = True
    scaling = config.rope.scaling
    if scaling is not None:
        fields["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    return fields

"""Hugging Face style `config.json` <-> `LlamaConfig`.

Formats: `llama`, `mistral` (without a sliding window), `qwen2`, `qwen3`; `llama-nsa` in two dialects, with
this project's `nsa_config` object or with the three fields of the NSA-1B release; fla's `nsa`.

The own dialect is a Llama config with `"model_type": "llama-nsa"`, `"architectures":
["LlamaNSAForCausalLM"]`, an object `nsa_config` of `NSAConfig`'s field names and, where they differ from
`attention_bias`, `qkv_bias` and `o_bias`, as well as `qk_norm`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .checkpoint_names import FLA, HF, Naming
from .config import NSA_PRESETS, Llama3Scaling, LlamaConfig, NSAConfig, RopeConfig, nsa_from_mapping
from .errors import CheckpointError

_ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama-nsa": "LlamaNSAForCausalLM",
    "nsa": "NSAForCausalLM",
}
# What the Hugging Face classes assume where the file says nothing.
_DEFAULT_EPS, _DEFAULT_THETA = 1e-6, 10000.0
_DEFAULT_MAX_POSITION: Mapping[str, int] = {"mistral": 131072, "qwen2": 32768, "qwen3": 32768}
_MISTRAL_WINDOW = 4096
_QWEN3_HEAD_DIM = 128
_FLA_HEAD_DIM = 64


@dataclasses.dataclass(frozen=True, slots=True)
class ParsedConfig:
    """A config file as this project reads it; `config.nsa` is None for a dense model."""

    config: LlamaConfig
    naming: Naming


class _Fields:
    """Typed access to the fields of one JSON object, with errors that name file and field."""

    def __init__(self, path: Path, fields: Mapping[str, Any], prefix: str = "") -> None:
        self.path, self._fields, self._prefix = path, fields, prefix

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {text}")

    def get(self, name: str) -> Any:
        return self._fields.get(name)

    def has(self, name: str) -> bool:
        return name in self._fields

    def _typed(self, name: str, kinds: type | tuple[type, ...], what: str, default: Any) -> Any:
        value = self._fields.get(name)
        if value is None:
            if default is _REQUIRED:
                raise self.error(f"field {self._prefix}{name} is missing")
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise self.error(f"field {self._prefix}{name} must be {what}, got {value!r}")
        return value

    def integer(self, name: str, default: Any = None) -> int:
        return self._typed(name, int, "an integer", _REQUIRED if default is None else default)

    def number(self, name: str, default: float | None = None) -> float:
        return float(self._typed(name, (int, float), "a number", _REQUIRED if default is None else default))

    def boolean(self, name: str, default: bool = False) -> bool:
        return self._typed(name, bool, "true or false", default)

    def mapping(self, name: str) -> dict[str, Any] | None:
        return self._typed(name, dict, "an object or null", None)


_REQUIRED = object()


def parse_config(path: Path, fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ParsedConfig:
    """The model behind a `config.json`.

    Args:
      path: the file, for messages.
      fields: its content.
      shapes: of the tensors in the checkpoint. fla's files do not say all sizes; for the others, head_dim is
        checked against them.

    Raises:
      CheckpointError: an unsupported model, a field that is missing or of a wrong type, or an option that the
        models here do not implement.
    """
    reader = _Fields(path, fields)
    model_type = _model_type(reader)
    _refuse_unsupported(reader, model_type)
    try:
        if model_type == "nsa":
            return _parse_fla(reader, shapes)
        return ParsedConfig(_parse_hf(reader, model_type, shapes), HF)
    except CheckpointError:
        raise
    except ValueError as error:
        raise reader.error(str(error)) from None


def _model_type(reader: _Fields) -> str:
    known = ", ".join(f"{kind} ({name})" for kind, name in _ARCHITECTURES.items())
    architectures = reader.get("architectures") or []
    if not isinstance(architectures, list):
        raise reader.error(f"field architectures must be a list, got {architectures!r}")
    model_type = reader.get("model_type")
    if model_type is None:
        model_type = next((kind for kind, name in _ARCHITECTURES.items() if name in architectures), None)
    if not isinstance(model_type, str) or model_type not in _ARCHITECTURES:
        found = model_type or architectures or "without model_type and architectures"
        raise reader.error(f"unsupported model {found!r}; supported: {known}")
    if architectures and _ARCHITECTURES[model_type] not in architectures:
        raise reader.error(
            f"unsupported architecture {', '.join(map(str, architectures))} of model_type {model_type}; "
            f"supported: {known}"
        )
    return model_type


def _refuse_unsupported(reader: _Fields, model_type: str) -> None:
    """Options that would change the mathematics."""
    act = reader.get("hidden_act") or "silu"
    if act not in ("silu", "swish"):
        raise reader.error(f"hidden_act {act!r} is not supported, only silu")
    if reader.get("quantization_config"):
        raise reader.error("quantised checkpoints (quantization_config) are unsupported, use the original")
    if reader.number("partial_rotary_factor", 1.0) != 1.0:
        raise reader.error("partial_rotary_factor other than 1 is not supported")
    layer_types = reader.get("layer_types")
    if layer_types is not None and (
        not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types)
    ):
        raise reader.error("layer_types: only full_attention is supported")
    if model_type == "mistral":
        limit = reader.integer("max_position_embeddings", _DEFAULT_MAX_POSITION[model_type])
        # An absent field is not a null one.
        window = reader.integer("sliding_window", limit if reader.has("sliding_window") else _MISTRAL_WINDOW)
        if window < limit:
            raise reader.error(f"sliding_window {window} is not supported; only null, or at least {limit}")
    if reader.boolean("use_sliding_window"):
        first = reader.integer("max_window_layers", 0)
        if first < reader.integer("num_hidden_layers"):
            raise reader.error("use_sliding_window is not supported")


def _parse_hf(reader: _Fields, model_type: str, shapes: Mapping[str, tuple[int, ...]]) -> LlamaConfig:
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    if heads < 1:
        raise reader.error(f"num_attention_heads must be positive, got {heads}")
    default_dim = _QWEN3_HEAD_DIM if model_type == "qwen3" else hidden // heads
    head_dim = reader.integer("head_dim", default_dim)
    q_shape = shapes.get(HF.templates["q"].format(i=0) + ".weight")
    if q_shape is not None and q_shape[0] != heads * head_dim:
        raise reader.error(
            f"head_dim {head_dim} and num_attention_heads {heads} give {heads * head_dim} query rows, but "
            f"{HF.templates['q'].format(i=0)}.weight has shape {list(q_shape)}; correct head_dim"
        )
    attention_bias = reader.boolean("attention_bias")
    qkv_bias, o_bias, qk_norm = attention_bias, attention_bias, model_type == "qwen3"
    nsa = None
    if model_type == "qwen2":
        qkv_bias, o_bias = True, False
    elif model_type == "llama-nsa":
        qkv_bias = reader.boolean("qkv_bias", attention_bias)
        o_bias = reader.boolean("o_bias", attention_bias)
        qk_norm = reader.boolean("qk_norm")
        nsa = _parse_nsa(reader)
    return LlamaConfig(
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=reader.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=reader.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        rms_eps=reader.number("rms_norm_eps", _DEFAULT_EPS),
        rope=_parse_rope(reader),
        tie_embeddings=reader.boolean("tie_word_embeddings"),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=reader.boolean("mlp_bias") if model_type in ("llama", "llama-nsa") else False,
        qk_norm=qk_norm,
        max_position=reader.integer("max_position_embeddings", _DEFAULT_MAX_POSITION.get(model_type, 2048)),
        nsa=nsa,
    )


def _parse_rope(reader: _Fields) -> RopeConfig:
    """`rope_theta`, and `rope_scaling` or the newer `rope_parameters`, which may hold the theta as well."""
    fields = reader.mapping("rope_parameters")
    name = "rope_parameters" if fields is not None else "rope_scaling"
    fields = reader.mapping("rope_scaling") if fields is None else fields
    theta = reader.number("rope_theta", _DEFAULT_THETA)
    if fields is None:
        return RopeConfig(theta=theta)
    scaling = _Fields(reader.path, fields, f"{name}.")
    theta = scaling.number("rope_theta", theta)
    if scaling.number("partial_rotary_factor", 1.0) != 1.0:
        raise reader.error(f"{name}.partial_rotary_factor other than 1 is not supported")
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind != "llama3":
        raise reader.error(f"{name} of type {kind!r} is not supported; supported: default, llama3")
    return RopeConfig(
        theta=theta,
        scaling=Llama3Scaling(
            factor=scaling.number("factor"),
            low_freq_factor=scaling.number("low_freq_factor"),
            high_freq_factor=scaling.number("high_freq_factor"),
            original_max_position=scaling.integer("original_max_position_embeddings"),
        ),
    )


def _parse_nsa(reader: _Fields) -> NSAConfig:
    """`nsa_config` where present, otherwise the three fields of NSA-1B, which runs fla's kernels."""
    own = reader.mapping("nsa_config")
    if own is not None:
        return nsa_from_mapping(own)
    return _fla_nsa(reader)


def _fla_nsa(reader: _Fields) -> NSAConfig:
    block = reader.integer("block_size", 64)
    return dataclasses.replace(
        NSA_PRESETS["fla"],
        kernel_size=block,
        kernel_stride=block,
        block_size=block,
        n_selected=reader.integer("block_counts", 16),
        window_keys=reader.integer("window_size", 512),
    )


def _parse_fla(reader: _Fields, shapes: Mapping[str, tuple[int, ...]]) -> ParsedConfig:
    """fla leaves sizes to its code, and its head_dim is not passed on: the tensors decide."""
    q_name, down_name, gate_name = (FLA.templates[role].format(i=0) for role in ("q", "down", "gate"))
    heads = reader.integer("num_heads", 64)
    kv_heads = reader.integer("num_kv_heads", heads)
    q_shape, down_shape = shapes.get(f"{q_name}.weight"), shapes.get(f"{down_name}.weight")
    if heads < 1 or (q_shape is not None and q_shape[0] % heads):
        raise reader.error(f"num_heads {heads} does not divide {q_name}.weight {list(q_shape or ())}")
    head_dim = q_shape[0] // heads if q_shape else reader.integer("head_dim", _FLA_HEAD_DIM)
    inter = down_shape[-1] if down_shape else reader.integer("intermediate_size")
    gate_shape = shapes.get(f"{gate_name}.weight")
    fused = gate_shape is not None and gate_shape[0] == 2 * inter
    config = LlamaConfig(
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("hidden_size"),
        intermediate_size=inter,
        num_layers=reader.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=reader.number("norm_eps", _DEFAULT_EPS),
        rope=_parse_rope(reader),
        tie_embeddings=reader.boolean("tie_word_embeddings"),
        qkv_bias=reader.boolean("qkv_bias") or f"{q_name}.bias" in shapes,
        max_position=reader.integer("max_position_embeddings", 2048),
        nsa=_fla_nsa(reader),
    )
    return ParsedConfig(config, dataclasses.replace(FLA, fused_gate_up=fused))


def config_to_json(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """The `config.json` of a model; `parse_config` reads it back equal.

    Args:
      config: the model.
      dtype: name of the weights' dtype, recorded for other readers.

    Raises:
      CheckpointError: a dense model whose combination of biases and norms no Hugging Face class has.
    """
    model_type = _export_type(config)
    fields: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_eps,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope.theta,
        "rope_scaling": None,
        "torch_dtype": dtype,
    }
    scaling = config.rope.scaling
    if scaling is not None:
        fields["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    if model_type in ("llama", "llama-nsa", "qwen3"):
        fields["attention_bias"] = config.qkv_bias and config.o_bias
    if model_type in ("llama", "llama-nsa"):
        fields["mlp_bias"] = config.mlp_bias
    if model_type in ("qwen2", "qwen3"):
        fields["use_sliding_window"] = False
    if config.nsa is not None:
        if config.qkv_bias != config.o_bias:
            fields["qkv_bias"], fields["o_bias"] = config.qkv_bias, config.o_bias
        if config.qk_norm:
            fields["qk_norm"] = True
        fields["nsa_config"] = dataclasses.asdict(config.nsa)
    return fields


def _export_type(config: LlamaConfig) -> str:
    if config.nsa is not None:
        return "llama-nsa"
    if config.qkv_bias == config.o_bias and not config.qk_norm:
        return "llama"
    if config.qkv_bias and not config.o_bias and not config.qk_norm and not config.mlp_bias:
        return "qwen2"
    if config.qk_norm and config.qkv_bias == config.o_bias and not config.mlp_bias:
        return "qwen3"
    raise CheckpointError(
        f"no Hugging Face architecture has qkv_bias={config.qkv_bias}, o_bias={config.o_bias}, "
        f"mlp_bias={config.mlp_bias}, qk_norm={config.qk_norm}; save this model with save_orbax instead"
    )

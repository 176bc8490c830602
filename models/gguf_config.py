"""Metadata of a GGUF file of the llama architecture -> `LlamaConfig`."""

from __future__ import annotations

from typing import Any

import numpy as np

from .checkpoint_names import GGUF
from .config import Llama3Scaling, LlamaConfig, RopeConfig
from .errors import CheckpointError
from .gguf_io import GGUFFile

ROPE_FREQS = "rope_freqs.weight"
"""Tensor that holds llama3 frequency divisors, one per rotary pair."""

# Relative error allowed between the stored divisors (float32) and those of a candidate.
_ROPE_TOLERANCE = 1e-4


def parse_gguf_config(file: GGUFFile) -> LlamaConfig:
    """The dense model that a GGUF file holds.

    Raises:
      CheckpointError: an architecture other than llama, a missing or odd metadata value, or an option that
        the models here do not implement.
    """
    arch = file.metadata.get("general.architecture")
    if arch != "llama":
        raise CheckpointError(f"{file.path}: unsupported GGUF architecture {arch!r}; supported: llama")

    def value(key: str, kinds: tuple[type, ...], default: Any = None) -> Any:
        found = file.metadata.get(f"llama.{key}", default)
        if found is None:
            raise CheckpointError(f"{file.path}: metadata llama.{key} is missing")
        if not isinstance(found, kinds) or isinstance(found, bool):
            raise CheckpointError(f"{file.path}: metadata llama.{key} is {str(found)[:80]}, unsupported")
        return found

    hidden, heads = value("embedding_length", (int,)), value("attention.head_count", (int,))
    if heads < 1:
        raise CheckpointError(f"{file.path}: metadata llama.attention.head_count is {heads}")
    rotary = value("rope.dimension_count", (int,), hidden // heads)
    head_dim = value("attention.key_length", (int,), rotary)
    if value("attention.value_length", (int,), head_dim) != head_dim or rotary != head_dim:
        raise CheckpointError(
            f"{file.path}: keys, values and rotary embedding must have one head size; found {head_dim}, "
            f"{file.metadata.get('llama.attention.value_length', head_dim)} and {rotary}"
        )
    if value("expert_count", (int,), 0):
        raise CheckpointError(f"{file.path}: mixture-of-experts models are not supported")
    max_position = value("context_length", (int,))
    if 0 < value("attention.sliding_window", (int,), 0) < max_position:
        raise CheckpointError(f"{file.path}: models with a sliding window are not supported")
    embed = file.tensors.get(GGUF.templates["embed"] + ".weight")
    vocab = embed.shape[0] if embed else value("vocab_size", (int,))

    def has(role: str) -> bool:
        return GGUF.templates[role].format(i=0) + ".bias" in file.tensors

    try:
        return LlamaConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=value("feed_forward_length", (int,)),
            num_layers=value("block_count", (int,)),
            num_heads=heads,
            num_kv_heads=value("attention.head_count_kv", (int,), heads),
            head_dim=head_dim,
            # The file stores float32; the decimal that was meant is the shortest one that rounds to it.
            rms_eps=_shortest(value("attention.layer_norm_rms_epsilon", (float,))),
            rope=_parse_rope(file, _shortest(value("rope.freq_base", (float,), 10000.0)), head_dim),
            tie_embeddings=GGUF.templates["head"] + ".weight" not in file.tensors,
            qkv_bias=has("q"),
            o_bias=has("o"),
            mlp_bias=has("gate"),
            max_position=max_position,
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{file.path}: {error}") from None


def _shortest(value: float) -> float:
    return float(str(np.float32(value)))


def _parse_rope(file: GGUFFile, theta: float, head_dim: int) -> RopeConfig:
    kind = file.metadata.get("llama.rope.scaling.type", "none")
    # Older files have a bare linear factor.
    linear = file.metadata.get("llama.rope.scale_linear", 1.0)
    if kind != "none" or linear not in (0.0, 1.0):
        shown = kind if kind != "none" else "linear"
        raise CheckpointError(f"{file.path}: rope scaling {shown!r} is unsupported; supported: none, llama3")
    if ROPE_FREQS not in file.tensors:
        return RopeConfig(theta=theta)
    divisors = file.read(ROPE_FREQS).reshape(-1)
    if divisors.shape != (head_dim // 2,) or not np.all(np.isfinite(divisors)) or np.any(divisors <= 0):
        raise CheckpointError(
            f"{file.path}: {ROPE_FREQS} has shape {list(divisors.shape)}, expected [{head_dim // 2}], all positive"
        )
    divisors = divisors.astype(np.float64)
    if np.all(divisors == 1):
        return RopeConfig(theta=theta)
    scaling = recover_llama3(divisors, theta)
    if scaling is None:
        raise CheckpointError(
            f"{file.path}: {ROPE_FREQS} is not a llama3 frequency scaling; other long-context variants are "
            "not supported"
        )
    return RopeConfig(theta=theta, scaling=scaling)


def recover_llama3(divisors: np.ndarray, theta: float) -> Llama3Scaling | None:
    """The llama3 scaling behind stored frequency divisors, or None if there is none within 1e-4.

    Between the two wavelength limits, `1 / divisor = (1 - s) / factor + s` with `s` linear in the frequency:
    `s = (original / wavelength - low) / (high - low)`. Only the ratios of low, high and original matter, so
    low is taken as 1, as Meta's models have it; the published values are tried first, then a fit.

    Args:
      divisors: [D / 2] float64, 1 for unscaled frequencies.
      theta: rotary base.
    """
    half = divisors.shape[0]
    frequency = theta ** (-np.arange(half) / half)
    factor = float(str(np.float32(divisors.max())))
    if factor <= 1:
        return None
    candidates = [(1.0, 4.0, 8192.0)]
    turns = frequency / (2 * np.pi)
    s = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    inside = (s > 1e-6) & (s < 1 - 1e-6)
    if inside.sum() >= 2:
        slope, offset = np.polyfit(turns[inside], s[inside], 1)
        if slope > 0 and offset < 0:
            candidates.append((1.0, 1 - 1 / offset, round(-slope / offset)))
    for low, high, original in candidates:
        if original < 1:
            continue
        ramp = np.clip((original * turns - low) / (high - low), 0, 1)
        expected = 1 / ((1 - ramp) / factor + ramp)
        if np.allclose(divisors, expected, rtol=_ROPE_TOLERANCE, atol=0):
            return Llama3Scaling(
                factor=factor,
                low_freq_factor=low,
                high_freq_factor=float(high),
                original_max_position=int(original),
            )
    return None

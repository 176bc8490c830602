"""Model configurations: what a Llama, its rotary embedding and its sparse attention are.

Everything here is static: frozen, hashable dataclasses of ints, floats, strings and tuples, safe as jit
static arguments. Nothing here imports jax.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling:
    """Llama 3's piecewise rotary frequency scaling (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        if self.factor < 1 or self.original_max_position <= 0:
            raise ValueError(
                f"llama3 rope scaling: factor must be >= 1 and original_max_position > 0, "
                f"got {self.factor} and {self.original_max_position}"
            )
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "llama3 rope scaling: need 0 < low_freq_factor < high_freq_factor, "
                f"got {self.low_freq_factor} and {self.high_freq_factor}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary position embedding in the half-split layout of Hugging Face Llama."""

    theta: float = 10000.0
    scaling: Llama3Scaling | None = None

    def __post_init__(self) -> None:
        if not self.theta > 1:
            raise ValueError(f"rope theta must be greater than 1, got {self.theta}")


_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "cmp_fn": ("mean", "weighted", "linear", "mlp", "pooled"),
        "cmp_pe": ("none", "k", "kv"),
        # "none" would also need an unrotated query for the compressed branch; no known weights use it.
        "cmp_rope": ("post", "pre"),
        "gate_scope": ("head", "token"),
    }
)
# Options that other NSA codebases have and this one refuses, with the value that it implements.
_FIXED: Mapping[str, str] = MappingProxyType(
    {
        "cmp_visible": "le",
        "score": "mass",
        "group_reduce": "sum",
        "branch_kv": "shared",
        "rope_layout": "half",
    }
)
_LARGEST = 1 << 30  # positions are int32, and sums of two of these must be
_POSITIVE = ("kernel_size", "kernel_stride", "block_size", "n_selected", "window_keys", "cmp_pools")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NSAConfig:
    """One definition of Native Sparse Attention that covers the public variants (arXiv 2502.11089).

    Args:
      cmp_fn: how a compression block of `kernel_size` rows becomes one entry: average, learned position
        weights, one linear map of the flattened rows, a two-layer perceptron of them, or position weights plus
        attention pooling (of this project): rows weighted by a softmax of learned scores, so that one
        telling row is not averaged away.
      cmp_pools: attention pools of `pooled`.
      cmp_pe: learned position embedding inside a compression block, added to no rows, to keys, or to keys
        and values.
      cmp_rope: rotary embedding of compressed keys: `post` compresses unrotated keys, then rotates the entry
        at the position of its first row; `pre` compresses rotated keys.
      kernel_size, kernel_stride: length and stride of compression blocks, in tokens.
      block_size: length of a selection block, in tokens; a multiple of `kernel_stride`, >= `kernel_size`.
      n_selected: blocks that each query reads, forced ones included.
      round_n_pow2: round `n_selected` up to a power of two (fla's kernels do).
      init_blocks, local_blocks: forced blocks at the start of the sequence and ending with the query's own.
      window_keys: keys in the sliding window, the query's own included.
      gate_scope: one gate triple per query head, or one per token that all heads share.
      gate_bias: whether the gate projection has a bias.
      cmp_visible, score, group_reduce, branch_kv, rope_layout: fixed to what is implemented (`le`, `mass`,
        `sum`, `shared`, `half`); any other value is refused, never approximated.

    Raises:
      ValueError: an unknown, unsupported or inconsistent value; the message names the field and the remedy.
    """

    cmp_fn: Literal["mean", "weighted", "linear", "mlp", "pooled"] = "mean"
    cmp_pools: int = 4
    cmp_pe: Literal["none", "k", "kv"] = "none"
    cmp_rope: Literal["post", "pre"] = "post"
    kernel_size: int = 32
    kernel_stride: int = 16
    block_size: int = 64
    n_selected: int = 16
    round_n_pow2: bool = False
    init_blocks: int = 1
    local_blocks: int = 2
    window_keys: int = 512
    cmp_visible: str = "le"
    score: str = "mass"
    group_reduce: str = "sum"
    gate_scope: Literal["head", "token"] = "head"
    gate_bias: bool = False
    branch_kv: str = "shared"
    rope_layout: str = "half"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"nsa {name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name, only in _FIXED.items():
            if getattr(self, name) != only:
                raise ValueError(f"nsa {name}={getattr(self, name)!r} is not supported: only {only!r} is implemented")
        for name in ("round_n_pow2", "gate_bias"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"nsa {name} must be true or false, got {getattr(self, name)!r}")
        for name in (*_POSITIVE, "init_blocks", "local_blocks"):
            value, least = getattr(self, name), int(name in _POSITIVE)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"nsa {name} must be an integer >= {least}, got {value!r}")
            if value > _LARGEST:
                raise ValueError(f"nsa {name} must be at most {_LARGEST}, got {value}")
        if self.kernel_size % self.kernel_stride or self.block_size % self.kernel_stride:
            raise ValueError(
                f"nsa kernel_stride={self.kernel_stride} must divide kernel_size={self.kernel_size} "
                f"and block_size={self.block_size}"
            )
        if self.kernel_size > self.block_size:
            raise ValueError(f"nsa kernel_size={self.kernel_size} must not exceed block_size={self.block_size}")
        if self.local_blocks < 1:
            raise ValueError("nsa local_blocks must be >= 1: a query always reads its own block")
        if self.n_blocks < self.init_blocks + self.local_blocks:
            raise ValueError(
                f"nsa n_selected={self.n_selected} must hold the forced blocks: "
                f"init_blocks + local_blocks = {self.init_blocks + self.local_blocks}"
            )

    @property
    def n_blocks(self) -> int:
        """Selected blocks per query after rounding."""
        return 1 << (self.n_selected - 1).bit_length() if self.round_n_pow2 else self.n_selected

    @property
    def trained_parts(self) -> tuple[str, ...]:
        """Names of the parts that need trained parameters beside the gates."""
        parts = () if self.cmp_fn == "mean" else (f"the {self.cmp_fn} compressor",)
        return parts if self.cmp_pe == "none" else (*parts, "the position embedding of the compressor")


NSA_PRESETS: Mapping[str, NSAConfig] = MappingProxyType(
    {
        "paper": NSAConfig(),
        "xunhao": NSAConfig(cmp_fn="linear", cmp_pe="k", window_keys=513),
        "fsa": NSAConfig(cmp_fn="linear", cmp_pe="k", gate_scope="token", window_keys=513),
        # fla's own kernel is not a true top-n once n_selected > block_size / 2; here it always is.
        "fla": NSAConfig(
            cmp_rope="pre",
            kernel_size=64,
            kernel_stride=64,
            block_size=64,
            round_n_pow2=True,
            init_blocks=0,
            local_blocks=1,
        ),
    }
)


def nsa_from_mapping(fields: Mapping[str, Any], base: NSAConfig | None = None) -> NSAConfig:
    """An NSAConfig from its field names, over `base` or the defaults.

    Raises:
      ValueError: an unknown field (the known ones are listed) or a bad value.
    """
    known = [f.name for f in dataclasses.fields(NSAConfig)]
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise ValueError(f"unknown nsa field(s) {', '.join(unknown)}; known: {', '.join(known)}")
    return dataclasses.replace(base or NSAConfig(), **fields)


def nsa_from_json(text: str) -> NSAConfig:
    """An NSAConfig from a preset name or a JSON object of its fields (`{"preset": NAME, ...}` sets the base).

    Raises:
      ValueError: neither a preset nor a JSON object, an unknown field, or a bad value.
    """
    presets = ", ".join(sorted(NSA_PRESETS))
    if text in NSA_PRESETS:
        return NSA_PRESETS[text]
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"nsa config {text!r} is neither a preset ({presets}) nor JSON: {error.msg} at column {error.colno}"
        ) from None
    except (ValueError, RecursionError) as error:  # numbers or nesting beyond what Python reads
        raise ValueError(f"nsa config cannot be read as JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"nsa config must be a JSON object or a preset ({presets}), got {type(fields).__name__}")
    preset = fields.pop("preset", None)
    if preset is not None and (not isinstance(preset, str) or preset not in NSA_PRESETS):
        raise ValueError(f"unknown nsa preset {preset!r}; known: {presets}")
    return nsa_from_mapping(fields, NSA_PRESETS[preset] if preset else None)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig:
    """A Llama-family decoder; `nsa` says whether its attention is sparse.

    Raises:
      ValueError: a size that is not positive, or heads that do not divide into groups.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    max_position: int = 8192
    nsa: NSAConfig | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary embedding rotates pairs")

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    def dense(self) -> LlamaConfig:
        """The same model with dense attention."""
        return dataclasses.replace(self, nsa=None)

"""What an adaptation trains: low-rank deltas of the base matrices, gates and compressors (LoRA, arXiv 2106.09685).

Trained values live in float32 by name: `NAME` for a parameter that the dense model lacks, `NAME.lora_a` [L, in, r]
and `NAME.lora_b` [L, r, out] for a matrix that it has, with `NAME` as in `forward.stack_params` and the matrix
flattened to [in, out]. The merged model is an ordinary one; nothing of the adaptation is left when it runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..models.config import LlamaConfig
from ..models.delta import LORA_A, LORA_B, matrix_shape
from .forward import Stacked, layer_names

TARGETS = ("attn/qkv/kernel", "attn/o/kernel", "mlp/gate_up/kernel", "mlp/down/kernel")


def init_trained(config: LlamaConfig, rank: int, gate_bias: tuple[float, float, float], seed: int) -> Stacked:
    """The start of an adaptation: the dense model, reading selected blocks alone.

    Args:
      config: of the sparse model; its gates must have biases.
      rank: of the deltas; 0 trains gates and compressors only.
      gate_bias: logits of the compressed, selected and window gate at the start.
      seed: of the input sides `lora_a`; the output sides start at zero.

    Returns:
      Trained values by name. Compressors start as averages, gate kernels at zero.

    Raises:
      ValueError: a config without `gate_bias`, or a rank below 0.
    """
    if config.nsa is None or not config.nsa.gate_bias:
        raise ValueError("adaptation needs an NSA config with gate_bias=true: a closed gate starts from its bias")
    if rank < 0:
        raise ValueError(f"rank must be >= 0, got {rank}")
    rng = np.random.default_rng(seed)
    layers, trained = config.num_layers, {}
    for name, shape in layer_names(config).items():
        full, value = (layers, *shape), None
        if name == "attn/gate/bias":
            value = np.broadcast_to(np.asarray(gate_bias, np.float32), full)
        elif name == "attn/gate/kernel" or name.endswith("/pe"):
            value = np.zeros(full, np.float32)
        elif name.startswith("attn/compress_"):
            value = _average(config, name, full, rng)
        elif name in TARGETS and rank:
            inputs, outputs = matrix_shape(name, shape)
            draw = rng.standard_normal((layers, inputs, rank), np.float32) / math.sqrt(inputs)
            trained[f"layers/{name}{LORA_A}"] = jnp.asarray(draw)
            trained[f"layers/{name}{LORA_B}"] = jnp.zeros((layers, rank, outputs), jnp.float32)
        if value is not None:
            trained[f"layers/{name}"] = jnp.asarray(value)
    return trained


def _average(config: LlamaConfig, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """A compressor's parameters such that it averages its rows, with noise where a zero would never move."""
    assert config.nsa is not None
    rows, dim = config.nsa.kernel_size, config.head_dim
    last = name.rsplit("/", 1)[-1]
    if last in ("pool_bias", "pool_mix"):
        return np.zeros(shape, np.float32)
    if last == "weight" and config.nsa.cmp_fn in ("weighted", "pooled"):
        return np.full(shape, 1 / rows, np.float32)
    if last == "weight":  # [L, K, l, D, D]
        return np.broadcast_to(np.eye(dim, dtype=np.float32) / rows, shape)
    if last in ("b1", "b2"):
        return np.zeros(shape, np.float32)
    return rng.standard_normal(shape, np.float32) * 0.02


def merge(base: Mapping[str, Array], trained: Mapping[str, Array], scale: float) -> Stacked:
    """The sparse model's stacked parameters: base + scale * a @ b, and the new ones; in the dtype of the base.

    Args:
      base: the dense model, see `forward.stack_params`.
      trained: see `init_trained`.
      scale: of the low-rank products.
    """
    dtype = base["embed/embedding"].dtype
    merged = {name: value for name, value in base.items() if name not in trained}
    for name, value in trained.items():
        if name.endswith(LORA_A):
            matrix = name.removesuffix(LORA_A)
            delta = jnp.einsum("lir,lro->lio", value, trained[f"{matrix}{LORA_B}"], precision=jax.lax.Precision.HIGHEST)
            weight = base[matrix].astype(jnp.float32) + scale * delta.reshape(base[matrix].shape)
            merged[matrix] = weight.astype(dtype)
        elif not name.endswith(LORA_B):
            merged[name] = value.astype(dtype)
    return merged

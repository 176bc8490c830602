"""Deltas over tiny models, with values whose products are exact in float32 and storable in bfloat16."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from ssv_jax.models.config import LlamaConfig, NSAConfig, RopeConfig
from ssv_jax.models.delta import LORA_A, LORA_B, DeltaBase, save_delta
from ssv_jax.models.llama import param_shapes

SCALE = 0.5
RANK = 3
# Of every layer: name and number of leading axes that are inputs.
ADAPTED = {"attn/qkv/kernel": 1, "attn/o/kernel": 3, "mlp/gate_up/kernel": 1, "mlp/down/kernel": 1}
NSA = NSAConfig(
    cmp_fn="weighted",
    cmp_pe="kv",
    kernel_size=8,
    kernel_stride=4,
    block_size=8,
    n_selected=4,
    window_keys=12,
    gate_bias=True,
)


def trained_from(base: LlamaConfig) -> LlamaConfig:
    """What a base becomes: sparse, with another rotary base and a longer context."""
    return dataclasses.replace(base, nsa=NSA, rope=RopeConfig(theta=40000.0), max_position=1024)


def random_arrays(base: LlamaConfig, config: LlamaConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """New parameters, low-rank changes of the four kernels of each layer, and one replaced norm."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return rng.integers(-2, 3, shape).astype(np.float32) / 4

    shapes = param_shapes(config)
    arrays = {name: draw(*shape) for name, shape in shapes.items() if name not in param_shapes(base)}
    for layer in range(config.num_layers):
        for part, inputs in ADAPTED.items():
            name = f"layers/{layer}/{part}"
            shape = shapes[name]
            arrays[name + LORA_A] = draw(math.prod(shape[:inputs]), RANK)
            arrays[name + LORA_B] = draw(RANK, math.prod(shape[inputs:]))
    arrays["norm/scale"] = 1 + draw(config.hidden_size)
    return arrays


def write_delta(directory: Path, base: str, base_config: LlamaConfig, **options: Any) -> dict[str, np.ndarray]:
    """A delta of `trained_from(base_config)` on disk; its tensors in float32."""
    config = options.pop("config", trained_from(base_config))
    arrays = options.pop("arrays", None) or random_arrays(base_config, config)
    save_delta(
        directory,
        base=DeltaBase(model=base, sha256=options.pop("sha256", None)),
        base_config=base_config,
        config=config,
        arrays=arrays,
        lora_scale=SCALE,
        **options,
    )
    return arrays

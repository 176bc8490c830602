"""A tiny checkpoint on disk, with a byte-level tokenizer and a chat template."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ssv_jax.models.config import LlamaConfig, NSAConfig
from ssv_jax.models.llama import random_params
from ssv_jax.models.saving import export_hf

CONFIG = LlamaConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    tie_embeddings=True,
    max_position=512,
    nsa=NSAConfig(kernel_size=8, kernel_stride=4, block_size=8, n_selected=4, window_keys=12),
)
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_checkpoint(directory: Path, *, config: LlamaConfig = CONFIG, tokenizer: bool = True, seed: int = 0) -> Path:
    """A model that writes varied text, in the project's own NSA format or as a dense Llama."""
    params = {name: np.asarray(x) * (10 if x.ndim > 1 else 1) for name, x in random_params(config, seed).items()}
    export_hf(directory, config, params)
    if tokenizer:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        built = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
        built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        built.decoder = decoders.ByteLevel()
        built.add_special_tokens(["<|end|>"])
        built.save(str(directory / "tokenizer.json"))
        about = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
        (directory / "tokenizer_config.json").write_text(json.dumps(about))
    return directory


DENSE = dataclasses.replace(CONFIG, nsa=None)

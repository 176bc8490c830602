"""A model spread over several devices emits the tokens of one device, in float32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import dataclasses, json, sys
import jax, numpy as np
from ssv_jax import Engine, Strategy, TreeSpec
from ssv_jax.models.config import LlamaConfig, NSAConfig
from ssv_jax.models.llama import random_params

tensor, devices = int(sys.argv[1]), int(sys.argv[2])
assert len(jax.devices()) == devices
sizes = dict(kernel_size=8, kernel_stride=4, block_size=8, n_selected=4, window_keys=12)
eight = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_layers=2, num_heads=16, num_kv_heads=8,
                    head_dim=8, tie_embeddings=True, max_position=256, nsa=NSAConfig(cmp_fn="linear", **sizes))
# Three KV heads divide neither by 2 nor by 8: attention is replicated, the rest is split.
three = dataclasses.replace(eight, num_heads=9, num_kv_heads=3, tie_embeddings=False, nsa=None)
out = {}
for name, config in (("nsa", eight), ("dense", three)):
    params = {n: np.asarray(x) * (8 if x.ndim > 1 else 1) for n, x in random_params(config, 1).items()}
    for draft in ("none", "ngram"):
        engine = Engine(config, params, strategy=Strategy(draft=draft), tensor=tensor)
        result = engine.generate([3, 1, 4, 1, 5, 9, 2, 6] * 4, max_new_tokens=24)
        out[name + " " + draft] = list(result.tokens)
        if tensor > 1:
            kernel = engine._params.target["layers"][0]["mlp"]["down"]["kernel"][...]
            assert len(kernel.sharding.device_set) == tensor
            assert kernel.addressable_shards[0].data.shape[0] == 64 // tensor, kernel.sharding
            if name == "nsa":
                qkv = engine._params.target["layers"][0]["attn"]["qkv"]["kernel"][...]
                assert qkv.addressable_shards[0].data.shape[1] == 8 // tensor
print(json.dumps(out))
"""


def tokens(tensor: int, devices: int) -> dict[str, list[int]]:
    env = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # as the fixture `quick_programs`
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", SCRIPT, str(tensor), str(devices)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def one_device():
    return tokens(1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 8])
def test_same_tokens_as_one_device(one_device, devices):
    """A collective that is missing or doubled, a head on the wrong device, or parameters that are not split at all."""
    assert tokens(devices, devices) == one_device
    assert one_device["nsa none"] == one_device["nsa ngram"]

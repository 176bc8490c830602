"""Autoregressive decoding speed: an 8B-shaped model with random weights, and SmolLM2, against their floors.

python experiments/ar_decode.py [--smoke] [--output FILE] [--skip-8b] [--implementation NAME] [--llama-cpp]
Random weights time the same as real ones; nothing about their tokens means anything.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import _harness as harness
import jax
import jax.numpy as jnp

from ssv_jax import Engine, UsageError, loop
from ssv_jax.drafting.none import NoDrafter
from ssv_jax.drafting.protocol import Params
from ssv_jax.models.cache import Cache
from ssv_jax.models.config import NSA_PRESETS, Llama3Scaling, LlamaConfig, NSAConfig, RopeConfig
from ssv_jax.models.errors import CheckpointError
from ssv_jax.models.llama import build, param_shapes
from ssv_jax.registry import resolve
from ssv_jax.variants import compiler_options

SHAPE_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope=RopeConfig(
        theta=500000.0,
        scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192),
    ),
    max_position=131072,
    nsa=NSA_PRESETS["paper"],
)
SMOKE = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    nsa=NSAConfig(kernel_size=8, kernel_stride=4, block_size=16, n_selected=4, window_keys=16),
)


def random_parameters(config: LlamaConfig, dtype: Any) -> dict[str, jax.Array]:
    """Random weights, one array at a time, so that nothing but the model itself is allocated."""
    keys = jax.random.split(jax.random.key(0), len(param_shapes(config)))

    @jax.jit
    def scale(x: jax.Array) -> jax.Array:
        return x * jnp.asarray(0.02, x.dtype)

    return {
        name: jnp.ones(shape, dtype) if name.endswith("scale") else scale(jax.random.normal(key, shape, dtype))
        for key, (name, shape) in zip(keys, param_shapes(config).items(), strict=True)
    }


def random_cache(cache: Cache, length: int) -> Cache:
    """The same cache, full of random rows up to `length`."""
    leaves, structure = jax.tree.flatten(cache.layers)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    filled = [jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    return Cache(layers=jax.tree.unflatten(structure, filled), length=jnp.full_like(cache.length, length))


def step_times(
    config: LlamaConfig,
    params: dict[str, jax.Array],
    context: int,
    dtype: Any,
    rounds: int,
    repeats: int,
    name: str | None,
) -> dict[str, Any]:
    """Milliseconds per token at a context: `rounds` rounds a call, no host between them."""
    wanted = param_shapes(config)
    graphdef, target = build(config, {key: value for key, value in params.items() if key in wanted}, dtype)
    decoding = loop.Decoding(model=graphdef, config=config, drafter=NoDrafter(), implementation=name)
    calls = repeats + 2
    capacity = -(-(context + rounds * calls) // 2048) * 2048  # odd capacities make XLA pad whole caches
    state = loop.init_state(
        decoding,
        jnp.zeros((1, 1), jnp.int32),
        jnp.ones((1,), jnp.int32),
        max_new_tokens=capacity,
        key=jax.random.key(0),
        capacity=capacity,
        dtype=dtype,
    )
    state = dataclasses.replace(
        state, cache=random_cache(state.cache, context), count=state.count + context, limit=state.limit + capacity
    )
    weights = Params(target=target)
    decode = jax.jit(loop.decode_until, static_argnames=("decoding", "rounds"), donate_argnames=("state",))
    began = time.perf_counter()
    lowered = decode.lower(decoding=decoding, params=weights, state=state, rounds=rounds)
    compiled = lowered.compile(compiler_options())
    compile_s = time.perf_counter() - began
    seconds = []
    for call in range(calls):
        began = time.perf_counter()
        state, _ = compiled(params=weights, state=state)
        jax.block_until_ready(state.count)
        if call >= 2:
            seconds.append((time.perf_counter() - began) / rounds * 1e3)
    assert int(state.cache.length[0]) == context + rounds * calls
    return {"ms_per_token": harness.spread(seconds), "rounds_per_call": rounds, "compile_s": compile_s}


def measure_shapes(smoke: bool, name: str | None, attentions: list[str]) -> dict[str, Any]:
    config, dtype = (SMOKE, jnp.float32) if smoke else (SHAPE_8B, jnp.bfloat16)
    contexts = (64,) if smoke else (8192, 65536)
    rounds, repeats = (2, 2) if smoke else (32, 7)
    params = random_parameters(config, dtype)
    streamed = sum(math.prod(array.shape) for key, array in params.items() if key != "embed/embedding")
    rows = []
    for context in contexts:
        for attention in attentions:
            model = config if attention == "nsa" else config.dense()
            try:
                row = step_times(model, params, context, dtype, rounds, repeats, name)
            except Exception as error:  # an out-of-memory case must not lose the others
                row = {"error": f"{type(error).__name__}: {error}"[:300]}
            rows.append({"context": context, "attention": attention, **row})
            harness.say(f"{context} {attention}: {row.get('ms_per_token', row)}")
    bytes_read = streamed * jnp.dtype(dtype).itemsize
    return {
        "model": "smoke" if smoke else "Llama-3.1-8B shape, random weights",
        "dtype": jnp.dtype(dtype).name,
        "weight_bytes_per_token": bytes_read,
        "weight_floor_ms": None if smoke else bytes_read / 4.55e12 * 1e3,
        "floor_source": "weights over 4.55 TB/s, the HBM read rate measured on an H200",
        "rows": rows,
    }


def measure_smollm2(repeats: int, max_new_tokens: int, model: str) -> dict[str, Any] | None:
    """Tokens per second of the real model from a chat prompt, and the tokens themselves."""
    rows = []
    for dtype in ("float32", "bfloat16"):
        if dtype == "bfloat16" and jax.default_backend() == "cpu":
            continue
        for attention in ("dense", "nsa"):
            try:
                engine = Engine.load(model, dtype=dtype, attention=attention)
            except (CheckpointError, UsageError) as error:
                harness.say(f"SmolLM2 left out: {error}")
                return None
            prompt = engine.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
            runs = [engine.generate(prompt, max_new_tokens=max_new_tokens, ignore_eos=True) for _ in range(repeats + 1)]
            answer = engine.generate(prompt, max_new_tokens=64)
            rows.append(
                {
                    "dtype": dtype,
                    "attention": attention,
                    "decode_tok_s": harness.spread([run.decode_tok_s for run in runs[1:]]),
                    "new_tokens": max_new_tokens,
                    "compile_s": runs[0].timings_s["compile"],
                    "answer": answer.text,
                    "answer_tokens": list(answer.tokens),
                }
            )
            harness.say(f"SmolLM2 {dtype} {attention}: {rows[-1]['decode_tok_s']}")
    return {"model": "SmolLM2-135M-Instruct (Q4_1 dequantised)", "rows": rows}


def write_float32_gguf(source: Path, target: Path) -> None:
    """The same model with dequantised tensors, which the peer then reads as we do."""
    import gguf

    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(target, "llama")
    kept = ("general.architecture", "general.file_type", "general.quantization_version")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in kept:
            continue
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(field.name, field.contents())
        else:
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        shape = [int(size) for size in tensor.shape[::-1]]
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def measure_llama_cpp(repeats: int, max_new_tokens: int) -> dict[str, Any]:
    """Tokens per second of llama.cpp (package xllamacpp) on the float32 GGUF, with as many threads as cores."""
    import xllamacpp

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        write_float32_gguf(resolve("smollm2-135m").path, file)
        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_ctx, params.n_gpu_layers, params.n_parallel = 1024, 0, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count() or 1
        server = xllamacpp.Server(params)
        request = {"prompt": "Once upon a time,", "n_predict": max_new_tokens, "temperature": 0, "ignore_eos": True}
        speeds = []
        for _ in range(repeats + 1):
            answer = server.handle_completions({**request, "cache_prompt": False})
            speeds.append(float(answer["timings"]["predicted_per_second"]))
    version = importlib.metadata.version("xllamacpp")
    return {
        "program": f"llama.cpp (xllamacpp {version}), float32 GGUF",
        "threads": os.cpu_count(),
        "decode_tok_s": harness.spread(speeds[1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, seconds on a CPU")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--skip-8b", action="store_true")
    parser.add_argument("--attention", nargs="+", choices=["nsa", "dense"], default=["nsa", "dense"])
    parser.add_argument("--skip-smollm2", action="store_true")
    parser.add_argument("--model", default="smollm2-135m", help="name or path of SmolLM2")
    parser.add_argument("--implementation", default=None)
    parser.add_argument("--llama-cpp", action="store_true", help="also time llama.cpp (needs package xllamacpp)")
    args = parser.parse_args()
    device = jax.devices()[0].device_kind.lower().replace(" ", "-")
    output = args.output or harness.RESULTS / "ar_decode" / f"{'smoke' if args.smoke else device}.json"
    result: dict[str, Any] = {"command": "python experiments/ar_decode.py", "implementation": args.implementation}
    if not args.skip_8b:
        result["shapes"] = measure_shapes(args.smoke, args.implementation, args.attention)
        harness.write(output, result)  # a time limit must not lose it
    runs = (3, 128) if jax.default_backend() == "cpu" else (5, 256)
    if not args.smoke and not args.skip_smollm2:
        result["smollm2"] = measure_smollm2(*runs, args.model)
        harness.write(output, result)
    if args.llama_cpp:
        result["peer"] = measure_llama_cpp(*runs)
        harness.say(f"llama.cpp: {result['peer']['decode_tok_s']}")
    harness.write(output, result)
    for row in result.get("shapes", {}).get("rows", []):
        if "ms_per_token" in row:
            print(f"{row['context']:>7} {row['attention']:>5} {row['ms_per_token']['median']:8.2f} ms/token")


if __name__ == "__main__":
    main()

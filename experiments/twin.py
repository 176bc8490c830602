"""Scale-up twin: a small model and its draft head, widened to the sizes of a large model without changing a token.

python experiments/twin.py --model NAME_OR_DIR --output DIR [--shape 8b] [--draft-model DIR] [--dtype bfloat16]
python experiments/twin.py --smoke

The twin computes the small model's function, so that its acceptance, selected blocks and overlap are those of trained
weights, while its bytes and operations are those of the large model (up to zeros, which cost as much as other values).
`build_twin` makes one in memory; the directory that the command writes loads as any model, its head with it.

`_widening` says how; extra layers come last, so taps and layer plans keep their numbers.

Memory on the host: a dict of arrays in `dtype` (16.1 GB for `8b` in bfloat16, and a head of 0.9 GB); with
`put=jax.device_put` one tensor at a time (1.1 GB), the rest on the device.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import _evaluation as evaluation
import _harness as harness
import jax
import jax.numpy as jnp
import numpy as np
from _widening import Put, Shape, widen_config, widen_head, widen_head_config, widen_params
from flax import nnx

from ssv_jax import UsageError
from ssv_jax.models.cache import Cache, commit, geometry_of, init_cache
from ssv_jax.models.config import LlamaConfig
from ssv_jax.models.eagle3_config import Eagle3Config
from ssv_jax.models.eagle3_loading import export_eagle3, load_eagle3
from ssv_jax.models.llama import LlamaOutput, PassOptions, build, param_shapes
from ssv_jax.models.saving import save_orbax
from ssv_jax.pallas_kernels import chain
from ssv_jax.registry import HEAD_FOLDER

_8B = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "draft_vocab_size": 32000}
# Llama-3.1-8B and an EAGLE-3 head for it.
SHAPES = {"8b": Shape(**_8B, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128)}
SMOKE_SHAPE = Shape(
    vocab_size=160, hidden_size=96, intermediate_size=128, num_layers=3, num_heads=16, num_kv_heads=4, head_dim=16
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Twin:
    """A widened model and its widened head, if it has one."""

    config: LlamaConfig
    params: dict[str, Any]
    head_config: Eagle3Config | None = None
    head_params: dict[str, Any] | None = None


def build_twin(
    config: LlamaConfig,
    params: Mapping[str, Any],
    shape: Shape,
    head: tuple[Eagle3Config, Mapping[str, Any]] | None = None,
    *,
    seed: int = 0,
    dtype: Any = np.float32,
    put: Put | None = None,
) -> Twin:
    """A model and its head (config, parameters), widened; see `widen_config` and `widen_params`."""
    wide = widen_config(config, shape)
    wide_head = None if head is None else widen_head_config(head[0], config, wide, shape)
    twin = Twin(config=wide, params=widen_params(config, params, wide, seed=seed, dtype=dtype, put=put))
    if head is None or wide_head is None:
        return twin
    wider = widen_head(*head, config, wide_head, seed=seed + 1, dtype=dtype, put=put)
    return dataclasses.replace(twin, head_config=wide_head, head_params=wider)


def compare(
    config: LlamaConfig, params: Mapping[str, Any], twin: Twin, count: int, dtype: Any, size: int = 128
) -> dict[str, float]:
    """Prefills both with the same random tokens, `size` a pass, and says how far apart they are.

    Returns:
      `logits`, the largest difference; `largest`, the largest real logit; `argmax`, the share of equal ones; `padded`,
      the largest padded logit (-inf without); `blocks`, the share of equal selections on the real KV heads.
    """
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, count)).astype(np.int32)
    vocab, kv = config.vocab_size, config.num_kv_heads
    sides = [_prefiller(*side, count, dtype) for side in ((config, params), (twin.config, twin.params))]
    steps = evaluation.Steps("compared", -(-count // size))
    found = []
    for at in range(0, count, size):
        small, wide = (run(tokens[:, at : at + size]) for run in sides)
        real, pairs = wide.logits[..., :vocab], zip(small.selections, wide.selections, strict=False)
        same = [(a.blocks == b.blocks[:, :kv]).all(-1).mean() for a, b in pairs if a is not None and b is not None]
        row = {
            "logits": float(jnp.abs(small.logits - real).max()),
            "largest": float(jnp.abs(small.logits).max()),
            "argmax": float((small.logits.argmax(-1) == wide.logits.argmax(-1)).mean()),
            "padded": float(wide.logits[..., vocab:].max(initial=-jnp.inf)),
            "blocks": float(np.mean([float(x) for x in same])) if same else 1.0,
        }
        found.append((row, small.logits.shape[1] / count))
        steps.step(f"logits within {row['logits']:.2g}, equal blocks {row['blocks']:.5f}")
    shares = {name: sum(row[name] * share for row, share in found) for name in ("argmax", "blocks")}
    return {name: max(row[name] for row, _ in found) for name in ("logits", "largest", "padded")} | shares


def _prefiller(
    config: LlamaConfig, params: Mapping[str, Any], count: int, dtype: Any
) -> Callable[[np.ndarray], LlamaOutput]:
    """Runs and commits the next tokens at each call."""
    graphdef, state = build(config, params, dtype)
    cache = init_cache(config, count, dtype=dtype)
    geometry = None if config.nsa is None else geometry_of(config.nsa)

    @functools.partial(jax.jit, donate_argnums=2)
    def step(state: Any, tokens: jax.Array, cache: Cache) -> tuple[LlamaOutput, Cache]:
        rows = tokens.shape[1]
        out = nnx.merge(graphdef, state)(tokens, chain(cache.length, rows), cache, PassOptions(is_chain=True))
        path = jnp.arange(rows, dtype=jnp.int32)[None]
        cache = commit(cache, out.trees, path, jnp.full((1,), rows, jnp.int32), geometry)
        return dataclasses.replace(out, trees=()), cache

    def run(tokens: np.ndarray) -> LlamaOutput:
        nonlocal cache
        out, cache = step(state, jnp.asarray(tokens), cache)
        return out

    return run


def parse_shape(text: str) -> Shape:
    """A name in `SHAPES`, or a JSON object of the fields of `Shape`.

    Raises:
      UsageError: neither.
    """
    if text in SHAPES:
        return SHAPES[text]
    try:
        fields = json.loads(text)
        wrong = [name for name, value in fields.items() if type(value) is not int or value < 1]
        if wrong:
            raise ValueError(f"{wrong[0]} must be a positive integer")
        return Shape(**fields)
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(
            f"--shape {text}: neither one of {', '.join(SHAPES)} nor JSON of its fields: {error}"
        ) from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    evaluation.add_model_arguments(parser, dense=False)
    parser.add_argument("--draft-model", type=Path, default=None, help="directory of a head; default: the model's own")
    parser.add_argument("--shape", default="8b", help="name or JSON")
    parser.add_argument("--output", type=Path, default=None, help="directory to write; the tokenizer is not part of it")
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", type=int, default=0, metavar="TOKENS", help="compare both on random tokens")
    parser.add_argument("--smoke", action="store_true", help="tiny random model, seconds on a CPU")
    args = parser.parse_args()
    if not (args.output or args.check or args.smoke):
        parser.error("nothing to do: name an --output, or --check TOKENS")
    if args.smoke:
        args.check, args.dtype = args.check or 100, "float32"
    shape = SMOKE_SHAPE if args.smoke else parse_shape(args.shape)
    if args.output and args.output.is_dir() and any(args.output.iterdir()) and not args.overwrite:
        raise UsageError(f"--output {args.output}: not empty; name another directory or add --overwrite")
    model = (
        evaluation.smoke_model() if args.smoke else evaluation.load_model(args.model, args.attention, args.nsa_config)
    )
    where = args.draft_model or model.head
    head = None
    if where is not None:
        loaded = load_eagle3(where, model.config, target_params=model.params)
        head = loaded.config, loaded.params
    dtype = jnp.dtype(args.dtype)
    steps = evaluation.Steps("widened", 0 if head is None else len(head[1]))

    def put(array: np.ndarray) -> np.ndarray:
        steps.step(f"{array.nbytes / 1e6:.0f} MB")
        return array

    try:
        steps.total += len(param_shapes(widen_config(model.config, shape)))
        twin = build_twin(model.config, model.params, shape, head, seed=args.seed, dtype=dtype, put=put)
    except ValueError as error:
        raise UsageError(f"--shape: {error}") from None
    arrays = [*twin.params.values(), *(twin.head_params or {}).values()]
    size = sum(array.nbytes for array in arrays) / 1e9
    harness.say(f"{size:.2f} GB in {steps.seconds:.1f} s")
    if args.check:
        found = compare(model.config, model.params, twin, args.check, dtype)
        evaluation.table([found], list(found))
    if args.output:
        save_orbax(args.output, twin.config, twin.params, overwrite=args.overwrite)
        if twin.head_config is not None and twin.head_params is not None:
            export_eagle3(args.output / HEAD_FOLDER, twin.head_config, twin.head_params)
        harness.say(f"wrote {args.output}")
    if args.smoke and (found["logits"] > 1e-4 * found["largest"] or found["blocks"] < 1 or found["argmax"] < 1):
        raise SystemExit("error: the twin computes another function")


if __name__ == "__main__":
    evaluation.guarded(main)

"""How much of the attention that finds a needle a selection keeps, by the sizes of its entries and blocks, untrained.

python experiments/selection_geometry.py --model NAME_OR_DIR --data FILE.npz.xz [--lengths 8192] [--trials 3] [--smoke]
The model reads a prompt of `needle.py` with full attention. Where a KV head puts at least a tenth of its attention
(`--least`) on the needle while an answer's digit is predicted, the blocks are selected that entries of averaged keys
would choose, and those that hold most attention (`best`, what no selection of so many blocks can exceed). A sparse
model's own compressors are added in their geometry. A geometry is written l,d,l',n: keys of an entry, entries every d
keys, keys of a block, selected blocks.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import _evaluation as evaluation
import _harness as harness
import _tasks as tasks
import jax
import jax.numpy as jnp
import numpy as np

from ssv_jax import UsageError
from ssv_jax.models.config import LlamaConfig, NSAConfig
from ssv_jax.models.layers import rope_angles
from ssv_jax.models.nsa import NSAttention
from ssv_jax.training.forward import layer_builder, layer_names
from ssv_jax.training.sparse import attention_mass, choose_blocks, compress, key_scores, rotated, score_blocks

BEFORE = 12  # tokens of the needle before its number
TILE = 256
GEOMETRIES = (
    "32,16,64,16",
    "32,16,32,32",
    "16,16,64,16",
    "16,8,64,16",
    "16,8,32,32",
    "8,8,64,16",
    "8,8,32,32",
    "4,4,32,32",
)


def geometry(text: str) -> NSAConfig:
    try:
        size, stride, block, count = (int(part) for part in text.split(","))
        return NSAConfig(
            cmp_fn="mean", cmp_pe="none", kernel_size=size, kernel_stride=stride, block_size=block, n_selected=count
        )
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be l,d,l',n as in 32,16,64,16: {error}") from None


def where_needle_is(trial: tasks.Trial) -> tuple[np.ndarray, np.ndarray]:
    """Positions that predict the scored tokens of the answer, and which tokens are the needle's, bool [S]."""
    length = len(trial.tokens)
    scored = length - len(trial.item) + np.flatnonzero(trial.item >= 0)
    number = trial.tokens[scored]
    starts = [i for i in range(length - 2 * len(number)) if np.array_equal(trial.tokens[i : i + len(number)], number)]
    needle = np.zeros(length, bool)
    needle[max(starts[0] - BEFORE, 0) : starts[0] + len(number)] = True
    return scored - 1, needle


class Reader:
    """A model with full attention, one layer at a time, and what selections would keep of it.

    Args:
      model: dense or sparse.
      length: of the prompts.
      geometries: of averaged entries, by name.
      least: attention on the needle of a head that looks for it.
    """

    def __init__(self, model: evaluation.Model, length: int, geometries: Mapping[str, NSAConfig], least: float) -> None:
        config = model.config
        self._params, self._dense, self._length, self._least = model.params, config.dense(), length, least
        own = {} if config.nsa is None else {"own": config.nsa}
        self.configs = {name: dataclasses.replace(config, nsa=nsa) for name, nsa in {**geometries, **own}.items()}
        self._builders = {name: layer_builder(c, jnp.float32) for name, c in self.configs.items()}
        self._builder = layer_builder(self._dense, jnp.float32)
        self._cos, self._sin = rope_angles(jnp.arange(length), config.head_dim, config.rope)
        self._layer = jax.jit(self._run)

    def _params_of(self, config: LlamaConfig, layer: int) -> dict[str, Any]:
        """Of a layer; gates, which no measure here looks at, are 0 where the model has none."""
        found = {name: self._params.get(f"layers/{layer}/{name}") for name in layer_names(config)}
        return {n: np.zeros(layer_names(config)[n], np.float32) if x is None else x for n, x in found.items()}

    def read(self, trial: tasks.Trial) -> dict[str, tuple[float, float, float]]:
        """By geometry: attention on the needle, that of it which selected blocks hold, and all that they hold."""
        position, needle = where_needle_is(trial)
        x = jnp.asarray(self._params["embed/embedding"], jnp.float32)[trial.tokens][None]
        sums: dict[str, np.ndarray] = {}
        layers = self._dense.num_layers
        for layer in range(layers):
            params = {name: self._params_of(config, layer) for name, config in self.configs.items()}
            x, found = self._layer(self._params_of(self._dense, layer), params, x, position, needle)
            for name, values in found.items():
                sums[name] = sums.get(name, 0) + np.asarray(values, np.float64) / np.array([1, 1, layers])
        return {name: tuple(values.tolist()) for name, values in sums.items()}

    def _run(self, dense: Any, params: Any, x: Any, position: Any, needle: Any) -> tuple[Any, dict[str, Any]]:
        with jax.default_matmul_precision("highest"):
            layer = self._builder(dense)
            rows = rotated(layer.attn, layer.attn_norm(x), self._cos, self._sin)
            q, raw, k, v = (jnp.moveaxis(y, 1, 2) for y in rows)

            def weights(at: Any) -> Any:
                """[B, K, C, G, S] of the queries at some positions."""
                scores = key_scores(jnp.take(q, at, axis=2), k, layer.attn.scale)
                return jax.nn.softmax(jnp.where((jnp.arange(self._length) <= at[:, None])[:, None], scores, -1e30), -1)

            tiles = jnp.arange(-(-self._length // TILE) * TILE).reshape(-1, TILE).clip(max=self._length - 1)
            out = jax.lax.map(lambda at: jnp.einsum("bkcgs,bksd->bckgd", weights(at), v), tiles)
            out = jnp.moveaxis(out, 0, 1).reshape(1, -1, *out.shape[3:])[:, : self._length]
            x = x + layer.attn.o(out)
            x = x + layer.mlp(layer.mlp_norm(x))

            at, found = weights(position).mean(3)[0], {}  # K C S
            asking = jnp.take(q, position, axis=2)
            whole = key_scores(asking, k, layer.attn.scale)
            looks = jnp.where(needle, at, 0).sum(-1, keepdims=True) >= self._least
            for name, config in self.configs.items():
                nsa = config.nsa
                assert nsa is not None
                attn = self._builders[name](params[name]).attn
                assert isinstance(attn, NSAttention)
                entries, _ = compress(attn, k if nsa.cmp_rope == "pre" else raw, v)
                blocks = -(-self._length // nsa.block_size)
                scores = score_blocks(asking, entries, position, blocks, attn)
                mass = attention_mass(whole, position, blocks, config)
                for kind, ranked in (("", scores), (" best", mass)):
                    chosen = choose_blocks(ranked, position, config)[0]
                    kept = jnp.repeat(chosen, nsa.block_size, -1)[..., : self._length]
                    found[name + kind] = jnp.stack(
                        [
                            jnp.where(looks & needle, at, 0).sum(),
                            jnp.where(looks & needle & kept, at, 0).sum(),
                            jnp.where(kept, at, 0).sum(-1).mean(),
                        ]
                    )
            return x, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    evaluation.add_model_arguments(parser, dense=False)
    evaluation.add_output_arguments(parser)
    parser.add_argument("--data", nargs="+", default=[], help="held-out token sets; the first one is used")
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--least", type=float, default=0.1, help="attention on the needle of heads that look for it")
    parser.add_argument("--geometries", nargs="+", type=geometry, default=[geometry(x) for x in GEOMETRIES])
    args = parser.parse_args()
    if args.trials < 1:
        raise UsageError(f"--trials must be at least 1, got {args.trials}")
    if args.smoke:
        args.lengths, args.trials, args.least = [640], 1, 0.0
        args.geometries = [geometry("8,4,16,5"), geometry("4,4,16,5")]
        model, found = evaluation.smoke_model(), evaluation.smoke_set()
    else:
        evaluation.require_files("--data", args.data)
        model = evaluation.load_model(args.model, args.attention, args.nsa_config)
        found = next(iter(evaluation.read_sets(args.data, model.config.vocab_size).values()))
    tools = tasks.tools_of(model.tokenizer, model.config.vocab_size)
    names = {f"{g.kernel_size},{g.kernel_stride},{g.block_size},{g.n_selected}": g for g in args.geometries}
    rows: list[dict[str, Any]] = []
    steps = evaluation.Steps("prompts", len(args.lengths) * args.trials, args.budget_s)
    for length in args.lengths:
        reader, sums = Reader(model, length, names, args.least), dict[str, list[tuple[float, float, float]]]()
        for trial in tasks.make_trials(tools, found, length, args.trials, "single", args.seed):
            if steps.spent:
                harness.say(f"budget of {args.budget_s:g} s spent: prompts left out")
                break
            for name, values in reader.read(trial).items():
                sums.setdefault(name, []).append(values)
            steps.step(f"{length} tokens")
        for name, values in sums.items():
            looked, kept, held = np.sum(values, 0)
            share = kept / looked if looked else None
            rows.append(
                {
                    "length": length,
                    "geometry": name,
                    "trials": len(values),
                    "needle_attention": looked,
                    "needle_kept": share,
                    "attention_kept": held / len(values),
                }
            )
    output = evaluation.output_path("selection_geometry", args.output, args.smoke)
    result = {
        "command": "python experiments/selection_geometry.py",
        "model": model.facts,
        "data": [Path(path).name for path in args.data],
        "needle_attention": f"summed over layers, KV heads and digits where it is at least {args.least}",
        "needle_kept": "the part of it in selected blocks",
        "attention_kept": "part of all attention in selected blocks, mean over layers, KV heads and digits",
        "rows": rows,
    }
    harness.write(output, result)
    evaluation.write_csv(output.with_suffix(".csv"), rows)
    evaluation.table(rows, "length geometry trials needle_kept attention_kept".split())


if __name__ == "__main__":
    evaluation.guarded(main)

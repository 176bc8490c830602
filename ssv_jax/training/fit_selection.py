"""Command line: `python -m ssv_jax.training.fit_selection` fits the compressors of an adapted model to full attention.

Layer by layer, on sequences that stay in memory: the queries and keys of a layer are computed once, its compressor
of keys is fitted so that block scores follow the mass that full attention puts on the blocks, and the sequences
move on through the fitted layer. No gradient passes a layer, so a step costs a thousandth of one of `adapt_nsa`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..command import Parser, run_resumable
from ..errors import UsageError

if TYPE_CHECKING:
    from ..models.config import LlamaConfig


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = Parser(
        prog="python -m ssv_jax.training.fit_selection",
        description="Fit the key compressors of a delta that adapt_nsa wrote, so that it selects the blocks that full "
        "attention reads. Weighted compressors become pooled ones. Kill it at any time: the same command resumes.",
    )
    p.add_argument("--model", required=True, metavar="DELTA", help="delta with weighted or pooled compressors")
    p.add_argument(
        "--data",
        required=True,
        nargs="+",
        metavar="PATH[=WEIGHT]",
        help="text files, directories or token sets; rows are drawn by weight, by size without weights",
    )
    p.add_argument("--out", required=True, type=Path, metavar="DIR", help="run folder; the result is DIR/delta")
    p.add_argument("--length", type=int, default=8192, help="tokens of a sequence")
    p.add_argument("--sequences", type=int, default=16, help="to fit on; one in eight checks the fit")
    p.add_argument("--queries", type=int, default=256, help="of a sequence, drawn for every layer")
    p.add_argument(
        "--focus",
        type=float,
        default=0.9,
        help="share of the queries' chances that follows how much of their attention lies on one far block",
    )
    p.add_argument("--pools", type=int, default=4, help="attention pools of a compressor")
    p.add_argument("--steps", type=int, default=600, help="per layer, one sequence each")
    p.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the layers; bfloat16 on a GPU by default")
    p.add_argument("--chunk", type=int, default=256, help="queries per tile of sparse attention")
    return p


def _check(args: argparse.Namespace) -> None:
    for name, least in (("length", 2), ("sequences", 2), ("queries", 1), ("pools", 1), ("steps", 1), ("chunk", 1)):
        if getattr(args, name) < least:
            raise UsageError(f"--{name} must be >= {least}, got {getattr(args, name)}")
    if args.seed < 0:
        raise UsageError(f"--seed must be >= 0, got {args.seed}")
    if not 0 <= args.focus <= 1:
        raise UsageError(f"--focus must be in [0, 1], got {args.focus}")
    if not 0 < args.lr < float("inf"):
        raise UsageError(f"--lr must be a positive number, got {args.lr}")


def pooled_config(config: LlamaConfig, pools: int) -> LlamaConfig:
    """The model with pooled compressors.

    Raises:
      UsageError: a model whose compressors have no position weights to go on from, or other pools.
    """
    nsa = config.nsa
    if nsa is None or nsa.cmp_fn not in ("weighted", "pooled"):
        found = "dense attention" if nsa is None else f"cmp_fn={nsa.cmp_fn}"
        raise UsageError(f"--model: has {found}; the fit starts from weighted or pooled compressors")
    if nsa.cmp_fn == "pooled" and nsa.cmp_pools != pools:
        raise UsageError(f"--pools {pools}: the model has {nsa.cmp_pools}")
    return dataclasses.replace(config, nsa=dataclasses.replace(nsa, cmp_fn="pooled", cmp_pools=pools))


def _run(args: argparse.Namespace) -> None:
    import jax
    import jax.numpy as jnp
    import ml_dtypes
    import numpy as np

    from ..models.delta import merge, read_delta, save_delta, weights_sha256
    from ..models.loading import delta_base, load
    from ..registry import resolve
    from ..tokenizer import Tokenizer
    from .forward import layer_names
    from .runs import check_folder, start_folder
    from .selection_fit import LayerFit, with_pools
    from .tokens import Mixture, read_data

    say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    where = resolve(args.model)
    if where.kind != "delta":
        raise UsageError(f"--model {args.model}: is no delta; run ssv_jax.training.adapt_nsa first")
    delta = read_delta(where.path)
    say(f"loading {where.description}")
    base = load(delta_base(where.path, delta.info, where.base), nsa=None, dtype=np.dtype("float32"))
    config = pooled_config(delta.info.config(base.config), args.pools)
    assert config.nsa is not None
    forced = (config.nsa.init_blocks + config.nsa.local_blocks) * config.nsa.block_size
    if args.length - forced < args.queries:
        raise UsageError(
            f"--length {args.length}: needs --queries {args.queries} beyond the {forced} tokens whose blocks are read "
            "anyway: longer sequences or fewer queries"
        )
    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "out"}
    settings = {**settings, "dtype": dtype, "delta": weights_sha256(where.path)}
    check_folder(args.out, settings)
    if base.tokenizer_source is None:
        raise UsageError(f"--model {args.model}: no tokenizer beside the base's weights; add one to read text data")
    sets, weights = read_data(args.data, Tokenizer.from_path(base.tokenizer_source), say)
    start_folder(args.out, settings)
    mixture = Mixture(sets=sets, weights=weights, length=args.length, batch=1, seed=args.seed)
    arrays = with_pools(config, delta.arrays, args.seed)
    # Fitted values are rounded as they will be stored before the next layer sees them.
    stored = {name: value.astype(ml_dtypes.bfloat16).astype(np.float32) for name, value in arrays.items()}
    pooled = dataclasses.replace(delta, info=dataclasses.replace(delta.info, nsa=config.nsa), arrays=stored)
    params = merge(base.config, base.params, pooled)
    fit = LayerFit(config, length=args.length, dtype=dtype, chunk=args.chunk)
    embedding = jnp.asarray(params["embed/embedding"], dtype)
    streams = [embedding[mixture.batch_at(i)[0]] for i in range(args.sequences)]
    checks = max(args.sequences // 8, 1)
    began, losses = time.monotonic(), []
    for layer in range(config.num_layers):
        names = {name: f"layers/{layer}/{name}" for name in layer_names(config)}
        values = {name: jnp.asarray(params[full], dtype) for name, full in names.items()}
        part = args.out / f"layer-{layer:03d}.npz"
        if part.exists():
            found = dict(np.load(part))
            loss = tuple(found.pop("loss"))
        else:
            key = jax.random.fold_in(jax.random.key(args.seed), layer)
            seen = []
            for number, x in enumerate(streams):
                own = jax.random.fold_in(key, number)
                at = fit.draw(values, x, own, count=args.queries, focus=args.focus)
                seen.append(fit.observe(values, x, at))
            found, loss = fit.fit(
                values, seen[checks:], seen[:checks], steps=args.steps, rate=args.lr, seed=args.seed + layer
            )
            with open(part.with_suffix(".part"), "wb") as file:
                np.savez(file, **{**found, "loss": np.array(loss)})  # pyright: ignore[reportArgumentType]
            part.with_suffix(".part").replace(part)
        losses.append([float(x) for x in loss])
        for name, value in found.items():
            arrays[names[name]] = value
            values[name] = jnp.asarray(value.astype(ml_dtypes.bfloat16), dtype)
        streams = [fit.advance(values, x) for x in streams]
        done = layer + 1
        left = (time.monotonic() - began) / done * (config.num_layers - done)
        say(
            f"layer {done}/{config.num_layers}: selection loss {loss[0]:.4f} -> {loss[1]:.4f} nats on held-out "
            f"sequences, {left:.0f} s left"
        )
    fields = {name: settings[name] for name in ("length", "sequences", "queries", "focus", "steps", "lr", "seed")}
    save_delta(
        args.out / "delta",
        base=delta.info.base,
        base_config=base.config,
        config=config,
        arrays=arrays,
        lora_scale=delta.info.lora_scale,
        refresh_intervals=delta.info.refresh_intervals,
        training={**delta.info.training, "selection_fit": {**fields, "losses": losses}},
        overwrite=True,
    )
    before, after = (sum(pair[i] for pair in losses) / len(losses) for i in range(2))
    say(f"selection loss {before:.4f} -> {after:.4f} nats; wrote {args.out / 'delta'}: --model {args.out / 'delta'}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    args = parser().parse_args(argv)

    def work() -> None:
        _check(args)
        _run(args)

    return run_resumable(work, remains="from the last layer", smaller="fewer or shorter sequences")


if __name__ == "__main__":
    sys.exit(main())

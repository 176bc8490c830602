"""Command line: `python -m ssv_jax.training.adapt_nsa` turns a dense Llama into one with Native Sparse Attention."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..command import Parser, run_resumable
from ..errors import UsageError
from .schedule import Phase, parse_phase

if TYPE_CHECKING:
    import numpy as np

    from ..models.config import LlamaConfig, NSAConfig
    from .distill import Distillation
    from .forward import Stacked
    from .tokens import Mixture, TokenSet

_GATE_BIAS = (-4.0, 2.2, -2.2)  # selected blocks alone, with the window slightly open
_COMPRESSORS = "/attn/compress_"
_DEFAULT_NSA = '{"cmp_fn": "weighted", "cmp_pe": "kv", "gate_bias": true}'


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = Parser(
        prog="python -m ssv_jax.training.adapt_nsa",
        description="Adapt a dense Llama to Native Sparse Attention by matching its own predictions on text. "
        "Gates and compressors are new, the base gets low-rank deltas. Kill it at any time: the same command resumes.",
    )
    p.add_argument("--model", required=True, metavar="NAME_OR_PATH", help="dense checkpoint: teacher and start")
    p.add_argument(
        "--data",
        required=True,
        nargs="+",
        metavar="PATH[=WEIGHT]",
        help="text files, directories or token sets; rows are drawn by weight, by size without weights",
    )
    p.add_argument("--out", required=True, type=Path, metavar="DIR", help="run folder; the result is DIR/delta")
    p.add_argument("--heldout", nargs="+", default=[], metavar="PATH", help="text to evaluate on, never trained on")
    p.add_argument(
        "--phase",
        action="append",
        type=parse_phase,
        metavar="length=L,batch=B,steps=N",
        help="may be repeated; default one phase of 200 steps of 8 sequences of 2048",
    )
    p.add_argument("--nsa-config", default=_DEFAULT_NSA, metavar="PRESET_OR_JSON", help=f"default {_DEFAULT_NSA}")
    p.add_argument("--rope-theta", type=float, metavar="THETA", help="of the result; default the base's")
    p.add_argument(
        "--refresh-intervals",
        type=_intervals,
        default={1: 0.4, 2: 0.2, 3: 0.25, 4: 0.15},
        metavar="1:0.4,2:0.2,...",
        help="layer plans drawn in training: refresh every k layers with this probability",
    )
    p.add_argument("--rank", type=int, default=32, help="of the low-rank deltas; 0 trains gates and compressors only")
    p.add_argument(
        "--start",
        type=Path,
        metavar="DELTA",
        help="go on from this delta of the same model and rank; with another --nsa-config without its compressors",
    )
    p.add_argument("--lora-scale", type=float, default=1.0, help="factor of the low-rank deltas")
    p.add_argument("--stream-weight", type=float, default=1.0, help="of the match of residual streams")
    p.add_argument("--selection-weight", type=float, default=0.1, help="of the match of block scores to full attention")
    p.add_argument("--selection-every", type=int, default=1, metavar="N", help="match those of each N-th query")
    p.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    p.add_argument("--warmup", type=int, default=20, help="steps")
    p.add_argument("--weight-decay", type=float, default=0.0)
    p.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the computation; bfloat16 on a GPU by default")
    p.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    p.add_argument("--log-every", type=int, default=5, metavar="STEPS")
    p.add_argument("--eval-rows", type=int, default=4, metavar="N", help="held-out sequences per length")
    p.add_argument("--max-seconds", type=float, help="stop early after this time, with a checkpoint, to resume later")
    p.add_argument("--chunk", type=int, default=128, help="queries per tile of sparse attention")
    p.add_argument(
        "--attention",
        choices=("auto", "library", "tiles"),
        default="auto",
        help="sparse attention by calls of a library, by tiles of our own, or by the library where cuDNN can",
    )
    p.add_argument("--segments", type=int, default=4, help="compiled key lengths per sequence")
    return p


def _intervals(text: str) -> dict[int, float]:
    try:
        chances = {int(k): float(v) for k, v in (part.split(":") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"must look like 1:0.5,3:0.5, got {text!r}") from None
    if min(chances) < 1 or min(chances.values()) < 0 or not sum(chances.values()) > 0:
        raise argparse.ArgumentTypeError(f"intervals must be >= 1 and probabilities >= 0, got {text!r}")
    return chances


def _configs(args: argparse.Namespace, base: LlamaConfig, length: int) -> tuple[LlamaConfig, LlamaConfig]:
    """Teacher and student for sequences of a length.

    The teacher keeps its own rotary base where it was trained; beyond, it runs with the student's.
    """
    from ..models.config import nsa_from_json

    theta = args.rope_theta or base.rope.theta
    rope = dataclasses.replace(base.rope, theta=theta)
    nsa = nsa_from_json(args.nsa_config)
    student = dataclasses.replace(base, rope=rope, nsa=nsa)
    if theta != base.rope.theta:
        student = dataclasses.replace(student, max_position=max(base.max_position, _longest(args.phase)))
    teacher = base if length <= base.max_position else dataclasses.replace(base, rope=rope)
    return teacher, student


def _values_of(start: Path, fresh: Stacked, nsa: NSAConfig, layers: int) -> tuple[Stacked, bool]:
    """A delta's values in the place of fresh ones, and whether they are all of them.

    Compressors of another configuration cannot go on: they stay fresh.

    Raises:
      UsageError: a delta of other values.
    """
    import jax.numpy as jnp
    import numpy as np

    from ..models.delta import read_delta

    delta = read_delta(start)
    whole = delta.info.nsa == nsa
    rows = {
        name: [f"layers/{layer}/{name.removeprefix('layers/')}" for layer in range(layers)]
        for name in fresh
        if whole or _COMPRESSORS not in name
    }
    expected = {row: fresh[name].shape[1:] for name, names in rows.items() for row in names}
    found = {name: tuple(value.shape) for name, value in delta.arrays.items() if whole or _COMPRESSORS not in name}
    if expected != found:
        differing = sorted({n for n in {*expected, *found} if expected.get(n) != found.get(n)})
        raise UsageError(f"--start {start}: other values than this run trains ({differing[0]}, ...); see --rank")
    values = {
        name: jnp.asarray(np.stack([np.asarray(delta.arrays[row], np.float32) for row in names]))
        for name, names in rows.items()
    }
    return {**fresh, **values}, whole


def _longest(phases: Sequence[Phase]) -> int:
    return max(phase.length for phase in phases)


def _check(args: argparse.Namespace) -> None:
    for name in ("rank", "warmup", "seed"):
        if getattr(args, name) < 0:
            raise UsageError(f"--{name.replace('_', '-')} must be >= 0, got {getattr(args, name)}")
    for name in ("save_every", "log_every", "eval_rows", "chunk", "segments", "selection_every"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be >= 1, got {getattr(args, name)}")
    if args.chunk % args.selection_every:
        raise UsageError(
            f"--chunk {args.chunk} must be a multiple of --selection-every {args.selection_every}: change either"
        )
    for name in ("lr", "clip"):
        if not 0 < getattr(args, name) < float("inf"):
            raise UsageError(f"--{name} must be a positive number, got {getattr(args, name)}")
    if args.rope_theta is not None and not 1 < args.rope_theta < float("inf"):
        raise UsageError(f"--rope-theta must be greater than 1, got {args.rope_theta}")
    from ..models.config import nsa_from_json

    try:
        nsa = nsa_from_json(args.nsa_config)
    except ValueError as error:
        raise UsageError(f"--nsa-config: {error}") from None
    if not nsa.gate_bias:
        raise UsageError('--nsa-config: add "gate_bias": true; branches that start closed need a bias')


class _Trainer:
    """Compiled steps over all devices, batches spread over them."""

    def __init__(self, args: argparse.Namespace, base: LlamaConfig, params: Stacked) -> None:
        import jax
        import jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec

        from .distill import match
        from .lora import init_trained
        from .schedule import adamw, total_steps

        self.args, self.base_config = args, base
        self.steps = total_steps(args.phase)
        self.optimizer = adamw(weight_decay=args.weight_decay, clip=args.clip)
        devices = jax.devices()
        mesh = jax.sharding.Mesh(devices, ("data",))
        self.everywhere = NamedSharding(mesh, PartitionSpec())
        self.spread = NamedSharding(mesh, PartitionSpec("data"))
        self.devices = len(devices)
        self.params = jax.device_put(params, self.everywhere)
        _, student = _configs(args, base, 1)
        trained = init_trained(student, args.rank, _GATE_BIAS, args.seed)
        if args.start is not None:
            assert student.nsa is not None
            trained, whole = _values_of(args.start, trained, student.nsa, base.num_layers)
            if not whole:
                print("--start has another --nsa-config: its compressors are left out", file=sys.stderr, flush=True)
        self.state = jax.device_put({"trained": trained, "optimizer": self.optimizer.init(trained)}, self.everywhere)

        def step(recipe: Distillation, state: Any, params: Stacked, batch: Any, refresh: Any, rate: Any) -> Any:
            def loss(trained: Stacked) -> Any:
                tokens, targets = batch
                result = match(recipe, trained, params, tokens, targets, refresh)
                return result.loss, result

            grads, result = jax.grad(loss, has_aux=True)(state["trained"])
            updates, optimizer = self.optimizer.update(grads, state["optimizer"], state["trained"])
            trained = jax.tree.map(lambda value, update: value - rate * update, state["trained"], updates)
            norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in grads.values()))
            return {"trained": trained, "optimizer": optimizer}, result, norm

        self.step = jax.jit(step, static_argnames="recipe", donate_argnames="state")
        self.match = jax.jit(match, static_argnames=("recipe", "remat"))

    def recipe(self, length: int) -> Distillation:
        from .distill import Distillation
        from .sparse import SparseOptions

        teacher, student = _configs(self.args, self.base_config, length)
        return Distillation(
            teacher=teacher,
            student=student,
            scale=self.args.lora_scale,
            stream_weight=self.args.stream_weight,
            selection_weight=self.args.selection_weight,
            sparse=SparseOptions(
                chunk=self.args.chunk,
                segments=self.args.segments,
                selection_every=self.args.selection_every,
                library={"auto": None, "library": True, "tiles": False}[self.args.attention],
            ),
        )

    def place(self, rows: np.ndarray) -> Any:
        import jax

        return jax.device_put(rows, self.spread if rows.shape[0] % self.devices == 0 else self.everywhere)

    def refresh(self, interval: int) -> np.ndarray:
        import numpy as np

        return np.arange(self.base_config.num_layers) % interval == 0

    def drawn_interval(self, step: int) -> int:
        """The layer plan of a step, from the seed and the step alone."""
        import numpy as np

        chances = np.array(list(self.args.refresh_intervals.values()))
        rng = np.random.default_rng([self.args.seed, 1, step])
        return int(rng.choice(list(self.args.refresh_intervals), p=chances / chances.sum()))


def _train(args: argparse.Namespace) -> None:
    import jax
    import numpy as np

    from ..models.loading import load, read_model_config
    from ..registry import resolve
    from ..tokenizer import Tokenizer
    from .forward import stack_params
    from .runs import Run, check_folder
    from .schedule import learning_rate, phase_at, tokens_before
    from .tokens import Mixture, read_data

    say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    where = resolve(args.model)
    if where.kind == "delta":
        raise UsageError(
            f"--model {args.model}: is a delta; name the dense model under it, and --start to go on from it"
        )
    config = read_model_config(where.path, nsa=None)
    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    for name in ("out", "max_seconds", "save_every", "log_every", "heldout", "eval_rows"):  # do not decide the result
        settings.pop(name)
    settings["phase"] = [dataclasses.asdict(phase) for phase in args.phase]
    settings["dtype"] = dtype
    check_folder(args.out, settings)
    say(f"loading {where.description}")
    checkpoint = load(where.path, nsa=None, dtype=np.dtype("float32"))
    if checkpoint.tokenizer_source is None:
        raise UsageError(f"--model {args.model}: no tokenizer beside the weights; add one to read text data")
    tokenizer = Tokenizer.from_path(checkpoint.tokenizer_source)
    sets, weights = read_data(args.data, tokenizer, say)
    heldout = read_data(args.heldout, tokenizer, say)[0] if args.heldout else ()
    trainer = _Trainer(args, config, stack_params(config, checkpoint.params, jax.numpy.dtype(dtype)))
    run = Run(args.out, settings, trainer.steps, args.save_every)
    trainer.state, done = run.restore(trainer.state)

    mixtures: dict[tuple[int, int], Mixture] = {}
    compiled: set[tuple[int, int]] = set()
    began = time.monotonic()
    for step in range(done, trainer.steps):
        phase = phase_at(args.phase, step)
        shape = (phase.length, phase.batch)
        if shape not in mixtures:
            mixtures[shape] = Mixture(
                sets=sets, weights=weights, length=phase.length, batch=phase.batch, seed=args.seed
            )
        tokens, targets = mixtures[shape].batch_at(step)
        if shape not in compiled:
            run.say(f"compiling for {phase.batch} x {phase.length} tokens")
            compiled.add(shape)
        trainer.state, result, norm = trainer.step(
            trainer.recipe(phase.length),
            trainer.state,
            trainer.params,
            (trainer.place(tokens), trainer.place(targets)),
            trainer.refresh(trainer.drawn_interval(step)),
            np.float32(learning_rate(step, args.lr, args.warmup, trainer.steps)),
        )
        finished = step + 1
        if finished % args.log_every == 0 or finished == trainer.steps:
            values = {f.name: float(getattr(result, f.name)) for f in dataclasses.fields(result)}
            if not np.isfinite(values["loss"]):
                raise UsageError(f"the loss is not finite after step {finished}: lower --lr and resume from {args.out}")
            run.log(finished, tokens_before(args.phase, finished), **values, grad_norm=float(norm))
        run.save(finished, trainer.state)
        if args.max_seconds and time.monotonic() - began > args.max_seconds and finished < trainer.steps:
            run.save(finished, trainer.state, force=True)
            run.finish(("kl", "streams"))
            run.say(f"stopped after step {finished} of {trainer.steps}; the same command resumes")
            return
    run.save(trainer.steps, trainer.state, force=True)
    run.finish(("kl", "streams"))
    # What is evaluated is what is shipped: the values as they will be stored.
    stored = {name: value.astype(jax.numpy.bfloat16) for name, value in trainer.state["trained"].items()}
    trainer.state["trained"] = {name: value.astype(jax.numpy.float32) for name, value in stored.items()}
    _write(args, trainer, where.path, stored)
    run.say(f"wrote {args.out / 'delta'}: --model {args.out / 'delta'}")
    _evaluate(args, trainer, heldout, run)


def _write(args: argparse.Namespace, trainer: _Trainer, base: Path, stored: Stacked) -> None:
    from ..models.delta import DeltaBase, save_delta, weights_sha256
    from ..registry import MODELS
    from .forward import split_layers

    _, student = _configs(args, trainer.base_config, 1)
    phases = [dataclasses.asdict(phase) for phase in args.phase]
    save_delta(
        args.out / "delta",
        base=DeltaBase(
            model=args.model if args.model in MODELS else str(Path(args.model).resolve()), sha256=weights_sha256(base)
        ),
        base_config=trainer.base_config,
        config=student,
        arrays=split_layers(stored),
        lora_scale=args.lora_scale,
        refresh_intervals=sorted(k for k, chance in args.refresh_intervals.items() if chance > 0),
        training={"phases": phases, "learning_rate": args.lr, "rank": args.rank, "seed": args.seed},
        overwrite=True,
    )


def _evaluate(args: argparse.Namespace, trainer: _Trainer, heldout: Sequence[TokenSet], run: Any) -> None:
    """Held-out match per length and layer plan, as a table on stderr and `heldout.json`."""
    import json

    import numpy as np

    from .tokens import Mixture

    rows = []
    for number, token_set in enumerate(heldout):
        for length in sorted({phase.length for phase in args.phase}):
            mixture = Mixture(sets=(token_set,), weights=(1.0,), length=length, batch=1, seed=1)
            for interval in args.refresh_intervals:
                found = []
                for step in range(args.eval_rows):
                    tokens, targets = mixture.batch_at(step)
                    result = trainer.match(
                        trainer.recipe(length),
                        trainer.state["trained"],
                        trainer.params,
                        trainer.place(tokens),
                        trainer.place(targets),
                        trainer.refresh(interval),
                        remat=False,
                    )
                    found.append([float(result.kl), float(result.nll), float(result.teacher_nll)])
                kl, nll, teacher = np.mean(found, axis=0)
                rows.append(
                    {
                        "data": args.heldout[number],
                        "length": length,
                        "refresh_every": interval,
                        "kl": kl,
                        "nll": nll,
                        "teacher_nll": teacher,
                    }
                )
                run.say(
                    f"held out {Path(args.heldout[number]).name}, {length} tokens, refresh every {interval}: "
                    f"KL {kl:.4f}, NLL {nll:.4f}, teacher {teacher:.4f}"
                )
    if rows:
        (args.out / "heldout.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    args = parser().parse_args(argv)
    args.phase = args.phase or [Phase(length=2048, batch=8, steps=200)]

    def work() -> None:
        _check(args)
        _train(args)

    return run_resumable(work, remains="from the last checkpoint", smaller="a smaller batch or shorter sequences")


if __name__ == "__main__":
    sys.exit(main())

"""Command line: `python -m ssv_jax.training.train_eagle3`. Trains an EAGLE-3 head for a model of this project.

The target is frozen and runs inside the training step, so nothing but tokens is stored. A run can be killed at any
moment; the same command goes on from its last checkpoint and ends with the same head.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from ..command import Parser, run_resumable
from ..errors import UsageError
from ..models import eagle3
from ..models.config import LlamaConfig
from ..models.eagle3_config import Eagle3Config, default_taps
from ..models.eagle3_loading import export_eagle3, load_eagle3, target_head
from ..models.errors import CheckpointError
from ..models.layer_plan import LayerPlan
from ..models.loading import Checkpoint, load, read_model_config
from ..registry import resolve
from ..tokenizer import Tokenizer
from .eagle3_loss import Sums, Teacher, TrainingTest, draft_first, training_test
from .forward import SequenceOptions, hidden_states, stack_params
from .runs import Run
from .schedule import Phase, adamw, learning_rate, parse_phase, phase_at, tokens_before, total_steps
from .tokens import Mixture, TokenSet, read_data

_HEAD, _REPORT = "head", "report.json"
# Not trained: the vocabulary map, and the output matrix where it is the target's.
_MAP, _OUTPUT = "target_ids", "lm_head/kernel"
_NOT_DECISIVE = ("save_every", "log_every", "max_seconds", "heldout_batches")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The frozen model.

    Args:
      config, params: of the model; parameters by flat name, in the dtype of the computation.
      tokenizer: None where the data is token sets of any tokenizer.
      source: where it came from, for the run's settings.
    """

    config: LlamaConfig
    params: Mapping[str, Any]
    tokenizer: Tokenizer | None
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train.

    Args:
      phases: batches, one shape after the other.
      test: the training-time test; its window is the drafter's.
      lr, warmup: peak learning rate, and steps until it is reached.
      seed: of the initial head and of the order of the data.
      refresh_every: layer plans of the target, taken in turn by the steps; 1 refreshes everywhere.
      save_every, log_every: steps.
      max_seconds: stop, with a checkpoint and a head, after so long; None goes on to the end.
      heldout_batches: of the evaluation at the end, of the last phase's shape.
    """

    phases: tuple[Phase, ...]
    test: TrainingTest = TrainingTest()
    lr: float = 1e-3
    warmup: int = 200
    seed: int = 0
    refresh_every: tuple[int, ...] = (1,)
    save_every: int = 500
    log_every: int = 10
    max_seconds: float | None = None
    heldout_batches: int = 16


def choose_vocabulary(sets: Sequence[TokenSet], weights: Sequence[float], size: int, vocab: int) -> np.ndarray:
    """The ids that occur most often as targets, each set counting by its weight; sorted, int32 [size].

    Ties, and ids that never occur, go by the lower id.
    """
    share = np.zeros(vocab)
    for token_set, weight in zip(sets, weights, strict=True):
        ids = token_set.tokens if token_set.supervised is None else token_set.tokens[token_set.supervised]
        share += np.bincount(ids, minlength=vocab) * (weight / max(len(ids), 1))
    return np.sort(np.argsort(-share, kind="stable")[:size]).astype(np.int32)


def head_config(
    target: LlamaConfig,
    *,
    draft_vocab: int = 0,
    taps: tuple[int, ...] | None = None,
    own_head: bool = False,
    layers: int = 1,
    intermediate_size: int | None = None,
    tap_norm: str = "each",
    normed_output: bool = False,
    normed_residual: bool = False,
) -> Eagle3Config:
    """A head with the target's own widths, heads and rotary base, which shares its embedding.

    Args:
      target: the model.
      draft_vocab: tokens that the head can propose; 0, or as many as there are, for all.
      taps: residual streams; None for EAGLE-3's.
      own_head: train an output matrix, from the target's rows; otherwise those rows serve as they are.
      layers, intermediate_size, tap_norm, normed_output, normed_residual: see `Eagle3Config`.

    Raises:
      ValueError: values that do not fit each other or the target.
    """
    fields: dict[str, Any] = {"tap_norm": tap_norm, "normed_output": normed_output, "normed_residual": normed_residual}
    return Eagle3Config(
        vocab_size=target.vocab_size,
        draft_vocab_size=min(draft_vocab or target.vocab_size, target.vocab_size),
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=intermediate_size or target.intermediate_size,
        num_layers=layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_eps=target.rms_eps,
        rope=target.rope,
        taps=taps or default_taps(target.num_layers),
        own_head=own_head,
        **fields,
    )


class Trainer:
    """A head in training beside its frozen target, spread over all visible devices by sequences of the batch."""

    def __init__(self, target: Target, config: Eagle3Config, target_ids: np.ndarray, recipe: Recipe) -> None:
        """Takes the target, the head's shape, its draft vocabulary (int32 [Vd], sorted), and how to train."""
        self.target, self.config, self.recipe, self.target_ids = target, config, recipe, target_ids
        self.dtype = jnp.asarray(target.params["embed/embedding"]).dtype
        devices = jax.devices()
        uneven = [phase for phase in recipe.phases if phase.batch % len(devices)]
        if uneven:
            raise UsageError(
                f"batch={uneven[0].batch}: must be a multiple of the {len(devices)} visible devices; change it, or "
                "hide devices with CUDA_VISIBLE_DEVICES"
            )
        mesh = Mesh(np.asarray(devices), ("data",))
        self._everywhere, self._by_row = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
        stacked = stack_params(target.config, target.params, self.dtype)
        # Its own rows first, so that one product serves both vocabularies.
        output = stacked["embed/embedding"] if target.config.tie_embeddings else stacked["lm_head/kernel"].T
        table = draft_first(output, target_ids if config.reduced_vocab else None)
        self._frozen = jax.device_put({"target": stacked, "table": table, _MAP: target_ids}, self._everywhere)
        plans = [LayerPlan.every(target.config.num_layers, every).refresh for every in recipe.refresh_every]
        self._plans = [jax.device_put(np.asarray(plan), self._everywhere) for plan in plans]
        self._optimizer = adamw(weight_decay=0.0, clip=1.0)
        self._step = jax.jit(self._train_step, donate_argnums=0)
        self._measure = jax.jit(lambda params, *batch: self._loss(params, *batch)[1])

    def initial_state(self) -> dict[str, Any]:
        """Random parameters in float32, and the optimiser's state."""
        params = eagle3.random_params(dataclasses.replace(self.config, draft_vocab_size=1), self.recipe.seed)
        params = {name: x for name, x in params.items() if name not in (_MAP, _OUTPUT)}
        # The target's, as its rows read the result, but weaker: random features shall not be sure of anything.
        params["norm/scale"] = 0.5 * jnp.asarray(self.target.params["norm/scale"], jnp.float32)
        if self.config.own_head:
            params[_OUTPUT] = jnp.asarray(self._output_rows(np.dtype(np.float32)))
        state = {"params": params, "optimizer": self._optimizer.init(params)}
        return jax.device_put(state, self._everywhere)

    def run(
        self, run: Run, data: tuple[Sequence[TokenSet], Sequence[float]], stop_after: int | None = None
    ) -> tuple[Any, int]:
        """Trains from the run's last checkpoint to the end, or for `stop_after` steps.

        Returns:
          The state, and the steps done; fewer than all where the time was up.
        """
        began = time.monotonic()
        recipe = self.recipe
        state, done = run.restore(self.initial_state())
        mixtures: dict[tuple[int, int], Mixture] = {}
        last = total_steps(recipe.phases) if stop_after is None else min(done + stop_after, total_steps(recipe.phases))
        for step in range(done, last):
            phase = phase_at(recipe.phases, step)
            shape = phase.length, phase.batch
            if shape not in mixtures:
                run.say(f"step {step}: length {phase.length}, batch {phase.batch}; compiling takes a minute or so")
                mixtures[shape] = _mixture(data, *shape, recipe.seed)
            rate = np.float32(learning_rate(step, recipe.lr, recipe.warmup, total_steps(recipe.phases)))
            batch = self._batch(mixtures[shape], step)
            state, sums, norm = self._step(state, self._frozen, *batch, self._plan(step), rate)
            count = step + 1
            if count % recipe.log_every == 0 or count == last:
                report = sums.report()
                accuracy = {f"accuracy_{i}": rate for i, rate in enumerate(report.pop("accuracy"))}
                tokens = tokens_before(recipe.phases, count)
                run.log(count, tokens, **report, **accuracy, gradient_norm=float(norm))
                if not np.isfinite(report["loss"]):
                    raise ValueError(
                        f"the loss is {report['loss']} at step {count}: use a smaller --lr or more --warmup"
                    )
            late = recipe.max_seconds is not None and time.monotonic() - began > recipe.max_seconds
            run.save(count, state, force=late or count == total_steps(recipe.phases))
            if late:
                return state, count
        return state, max(done, last)

    def final_params(self, state: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The head as it is shipped: every parameter of `eagle3.param_shapes`, in bfloat16."""
        dtype = np.dtype(jnp.bfloat16)
        params = {name: np.asarray(x).astype(dtype) for name, x in jax.device_get(state["params"]).items()}
        if not self.config.own_head:
            params[_OUTPUT] = self._output_rows(dtype)
        if self.config.reduced_vocab:
            params[_MAP] = self.target_ids
        return params

    def evaluate(self, params: Mapping[str, Any], data: tuple[Sequence[TokenSet], Sequence[float]]) -> dict[str, Any]:
        """`Sums.report` of a head on held-out data, in batches of the last phase's shape.

        Args:
          params: as `final_params` returns them.
          data: sets and weights.
        """
        phase = self.recipe.phases[-1]
        mixture = _mixture(data, phase.length, phase.batch, seed=0)
        trained = {name: jnp.asarray(x, jnp.float32) for name, x in params.items() if name in self._trained()}
        trained = jax.device_put(trained, self._everywhere)
        total: Sums | None = None
        for step in range(self.recipe.heldout_batches):
            sums = self._measure(trained, self._frozen, *self._batch(mixture, step), self._plans[0])
            total = sums if total is None else total + sums
        assert total is not None
        return total.report()

    def _trained(self) -> list[str]:
        skipped = (_MAP,) if self.config.own_head else (_MAP, _OUTPUT)
        return [name for name in eagle3.param_shapes(self.config) if name not in skipped]

    def _output_rows(self, dtype: np.dtype) -> np.ndarray:
        return target_head(self.target.config, self.target.params, self.target_ids, dtype)

    def _plan(self, step: int) -> Array:
        return self._plans[step % len(self._plans)]

    def _batch(self, mixture: Mixture, step: int) -> tuple[Array, Array]:
        return jax.device_put(mixture.batch_at(step), self._by_row)

    def _train_step(
        self, state: Any, frozen: Any, tokens: Array, supervised: Array, refresh: Array, rate: Array
    ) -> Any:
        gradient_of = jax.value_and_grad(self._loss, has_aux=True)
        (_, sums), gradient = gradient_of(state["params"], frozen, tokens, supervised, refresh)
        updates, optimizer = self._optimizer.update(gradient, state["optimizer"], state["params"])
        params = jax.tree.map(lambda value, update: value - rate * update, state["params"], updates)
        return {"params": params, "optimizer": optimizer}, sums, optax.tree.norm(gradient)

    def _loss(self, params: Any, frozen: Any, tokens: Array, supervised: Array, refresh: Array) -> tuple[Array, Sums]:
        options = SequenceOptions(taps=self.config.taps)
        hidden = hidden_states(self.target.config, frozen["target"], tokens, refresh, options)
        teacher = Teacher(final=hidden.final, table=frozen["table"])
        whole = dict(params)
        # Never read when frozen: the loss takes the teacher's rows.
        whole.setdefault(_OUTPUT, frozen["table"][: self.config.draft_vocab_size].T)
        if self.config.reduced_vocab:
            whole[_MAP] = frozen[_MAP]
        graphdef, head = eagle3.build(self.config, whole, self.dtype)
        embedded = jnp.take(frozen["target"]["embed/embedding"], tokens, axis=0)
        kernel = params.get(_OUTPUT)
        return training_test(
            nnx.merge(graphdef, head), kernel, embedded, hidden.taps, teacher, supervised, self.recipe.test
        )


def _mixture(data: tuple[Sequence[TokenSet], Sequence[float]], length: int, batch: int, seed: int) -> Mixture:
    sets, weights = data
    return Mixture(sets=tuple(sets), weights=tuple(weights), length=length, batch=batch, seed=seed)


def train(
    target: Target,
    config: Eagle3Config,
    recipe: Recipe,
    out: Path,
    data: tuple[Sequence[TokenSet], Sequence[float]],
    heldout: tuple[Sequence[TokenSet], Sequence[float]] | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    stop_after: int | None = None,
) -> dict[str, Any]:
    """Trains a head, or goes on with one, and writes it to OUT/head.

    Args:
      target: the frozen model.
      config: of the head.
      recipe: how to train.
      out: the run's folder, see `Run`; gets `head/`, `report.json` and the learning curve.
      data, heldout: sets with their weights; held-out ones for the report.
      settings: recorded beside the recipe, to be the same on resumption.
      stop_after: steps after which to return without a head, for tests of resumption.

    Returns:
      The report: what was trained, and how the head does on held-out text after rounding to bfloat16.

    Raises:
      UsageError: a folder that holds something else, or a batch that the devices do not divide.
      DataError, ValueError: data that cannot be used, or a loss that is not finite.
    """
    vocab = config.draft_vocab_size
    target_ids = choose_vocabulary(*data, vocab, config.vocab_size)
    trainer = Trainer(target, config, target_ids, recipe)
    decided = {"target": target.source, "dtype": str(trainer.dtype), "head": dataclasses.asdict(config)}
    decided |= {"recipe": _settings_of(recipe), "tokens": [len(s.tokens) for s in data[0]], "weights": list(data[1])}
    run = Run(out, {**decided, **(settings or {})}, total_steps(recipe.phases), recipe.save_every)
    state, done = trainer.run(run, data, stop_after)
    if stop_after is not None:
        run.finish(plotted=("loss", "tokens_per_round"))
        return {}
    params = trainer.final_params(state)
    shipped = dataclasses.replace(config, draft_window=recipe.test.window)
    export_eagle3(run.directory / _HEAD, shipped, params, overwrite=True)
    # What was written, read again.
    stored = load_eagle3(run.directory / _HEAD, target.config, target_params=target.params, dtype=jnp.bfloat16)
    report: dict[str, Any] = {
        "head": str(_HEAD),
        "parameters": int(sum(np.prod(params[name].shape) for name in trainer._trained())),
        "steps": done,
        "tokens": tokens_before(recipe.phases, done),
        "draft_window": recipe.test.window,
        "draft_vocab": vocab,
    }
    if heldout is not None:
        run.say("evaluating on held-out text")
        report["heldout"] = trainer.evaluate(stored.params, heldout)
    (run.directory / _REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    run.finish(plotted=("loss", "tokens_per_round"))
    if done < total_steps(recipe.phases):
        run.say(f"stopped after step {done} of {total_steps(recipe.phases)}; the same command goes on")
    return report


def _settings_of(recipe: Recipe) -> dict[str, Any]:
    """What decides the result."""
    fields = dataclasses.asdict(recipe)
    return {name: fields[name] for name in fields if name not in _NOT_DECISIVE}


def load_target(name: str, dtype: str | None) -> Target:
    """A model by name or path; bfloat16 on an accelerator and float32 on a CPU unless `dtype` says otherwise.

    Raises:
      CheckpointError: a checkpoint that cannot be read.
    """
    dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    where = resolve(name)
    read_model_config(where.path, base=where.base)  # before minutes of loading
    checkpoint: Checkpoint = load(where.path, base=where.base, dtype=np.dtype(jnp.dtype(dtype)))
    source = checkpoint.tokenizer_source
    tokenizer = Tokenizer.from_path(source) if source else None
    return Target(config=checkpoint.config, params=checkpoint.params, tokenizer=tokenizer, source=name)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be integers separated by commas, got {text!r}") from None


def parser() -> argparse.ArgumentParser:
    """All options."""
    p = Parser(
        prog="python -m ssv_jax.training.train_eagle3",
        description="Train an EAGLE-3 draft head. The same command resumes a run that was stopped.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--model", required=True, metavar="NAME_OR_PATH", help="the target, which stays as it is")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the target; float32 on a CPU, else bfloat16")
    p.add_argument("--data", nargs="+", required=True, metavar="PATH[=W]", help="token sets, text files, directories")
    p.add_argument("--heldout", nargs="+", metavar="PATH", help="text for the evaluation at the end")
    p.add_argument("--heldout-batches", type=int, default=16, metavar="N")
    p.add_argument("--out", required=True, metavar="DIR", help="the run's folder; the head goes to DIR/head")
    batches = p.add_argument_group("batches")
    batches.add_argument("--length", type=int, default=2048, metavar="N", help="tokens per sequence")
    batches.add_argument("--batch", type=int, default=16, metavar="N", help="sequences per step")
    batches.add_argument("--steps", type=int, default=1000, metavar="N")
    batches.add_argument(
        "--phase",
        type=parse_phase,
        action="append",
        metavar="length=L,batch=B,steps=N",
        help="instead of the three above; repeatable, e.g. long sequences after short ones",
    )
    recipe = p.add_argument_group("training")
    recipe.add_argument("--lr", type=float, default=1e-3, help="peak; then a cosine down to a twentieth")
    recipe.add_argument("--warmup", type=int, default=200, metavar="N", help="steps")
    recipe.add_argument("--ttt-steps", type=int, default=6, metavar="N", help="drafts in a row that are trained")
    recipe.add_argument("--decay", type=float, default=0.8, help="weight of a draft's loss relative to the one before")
    recipe.add_argument(
        "--refresh-every", type=_numbers, default=(1,), metavar="N[,N]", help="the target's layer plans"
    )
    recipe.add_argument("--seed", type=int, default=0)
    recipe.add_argument("--save-every", type=int, default=500, metavar="N", help="steps between checkpoints")
    recipe.add_argument("--max-seconds", type=float, metavar="S", help="stop after so long, with a head; resumable")
    recipe.add_argument("--log-every", type=int, default=10, metavar="N")
    head = p.add_argument_group("head")
    head.add_argument("--draft-vocab", type=int, default=16384, metavar="N", help="most frequent targets; 0 for all")
    head.add_argument("--draft-window", type=int, metavar="N", help="pairs that it attends to, in decoding too")
    head.add_argument("--own-head", action="store_true", help="train an output matrix instead of the target's rows")
    head.add_argument("--taps", type=_numbers, metavar="A,B,C", help="residual streams; default 2, half, all but 3")
    head.add_argument("--layers", type=int, default=1, metavar="N")
    head.add_argument("--intermediate-size", type=int, metavar="N", help="of the feed-forward; default the target's")
    head.add_argument("--tap-norm", choices=["none", "each", "concat"], default="each")
    head.add_argument("--norm-output", action="store_true", help="the next step reads the normed feature")
    head.add_argument("--norm-residual", action="store_true", help="the residual is the normed feature")
    return p


def _recipe(args: argparse.Namespace) -> Recipe:
    phases = args.phase or [Phase(length=args.length, batch=args.batch, steps=args.steps)]
    test = TrainingTest(steps=args.ttt_steps, decay=args.decay, window=args.draft_window)
    shortest = min(phase.length for phase in phases)
    if shortest < args.ttt_steps + 3:
        raise ValueError(
            f"length={shortest} is too short for --ttt-steps {args.ttt_steps}: use {args.ttt_steps + 3} or more"
        )
    for name in ("save_every", "log_every", "heldout_batches"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.lr <= 0 or args.warmup < 0 or args.seed < 0 or min(args.refresh_every) < 1:
        raise ValueError("--lr and --refresh-every must be positive, --warmup and --seed not negative")
    return Recipe(
        phases=tuple(phases),
        test=test,
        lr=args.lr,
        warmup=args.warmup,
        seed=args.seed,
        refresh_every=args.refresh_every,
        save_every=args.save_every,
        log_every=args.log_every,
        max_seconds=args.max_seconds,
        heldout_batches=args.heldout_batches,
    )


def _train(args: argparse.Namespace) -> None:
    say = functools.partial(print, file=sys.stderr, flush=True)
    try:
        recipe = _recipe(args)
        where = resolve(args.model)
        config = head_config(
            read_model_config(where.path, base=where.base),
            draft_vocab=args.draft_vocab,
            taps=args.taps,
            own_head=args.own_head,
            layers=args.layers,
            intermediate_size=args.intermediate_size,
            tap_norm=args.tap_norm,
            normed_output=args.norm_output,
            normed_residual=args.norm_residual,
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from None
    say(f"loading {args.model}")
    target = load_target(args.model, args.dtype)
    if target.tokenizer is None:
        raise CheckpointError(f"{args.model}: has no tokenizer, which the data needs")
    data = read_data(args.data, target.tokenizer, say)
    heldout = read_data(args.heldout, target.tokenizer, say) if args.heldout else None
    report = train(target, config, recipe, Path(args.out), data, heldout, settings={"data": args.data})
    print(json.dumps(report, indent=2))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; exit status 2 for usage errors, 1 for files and data that cannot be used."""
    args = parser().parse_args(argv)
    return run_resumable(
        lambda: _train(args),
        remains="from the last checkpoint",
        smaller="a smaller batch, shorter sequences or fewer --ttt-steps",
    )


if __name__ == "__main__":
    raise SystemExit(main())

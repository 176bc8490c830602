"""One whole verification step of an 8B-shaped model with random weights: milliseconds, and where they go.

    python experiments/verify_step.py [--smoke] [--output FILE] [--nodes 1 5 17 33 65 129] [--contexts 8192 65536]
        [--plans lossless every4 dense] [--implementations mosaic_gpu xla] [--cases 65:65536:lossless:mosaic_gpu ...]
        [--prefill 65536 --chunks 512 2048 --prefill-plans lossless dense] [--launches] [--seconds N]

A step scores all nodes of a draft tree (a binary tree in breadth-first order; one node is autoregressive decoding),
takes every node's best token, and commits the path of first children. Steps run in one compiled loop with donated
caches: no host between them. Random weights cost the same time as real ones. How far the nodes' selections agree
decides how many bytes they read: token embeddings share a part of their variance (`--correlation`), and the overlap is
measured; `--overlap 0.75` looks for the correlation that gives so much.

`--grid` is the table of trees by contexts, the most telling first; with `--seconds` it stops in time, and the same
command goes on with what the output file lacks.

`--prefill` times whole prompts, by attention and chunk size; `--cases none` times nothing else.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import _harness as harness
import _kernel_time as timing
import _step_report as report
import ar_decode
import jax
import jax.numpy as jnp
import numpy as np
from _kernel_cases import agreement
from flax import nnx

from ssv_jax import loop
from ssv_jax.drafting.none import NoDrafter
from ssv_jax.drafting.protocol import Params
from ssv_jax.models.cache import Cache, commit, geometry_of, init_cache
from ssv_jax.models.config import LlamaConfig
from ssv_jax.models.layer_plan import LayerPlan
from ssv_jax.models.llama import PassOptions, abstract, build, param_shapes
from ssv_jax.tree import DraftTree, queries_of
from ssv_jax.variants import compiler_options

PLANS = {"lossless": 1, "every4": 4, "dense": None}  # interval of refresh layers
KINDS = (  # by kernel name; the first match counts
    ("selection", r"nsa_(compressed_scores|select|merge)"),
    ("attention", r"nsa_|sparse_|dense_"),
    ("matmuls", r"nvjet|cutlass|cublas|splitk|row_matmul|gated_matmul"),
)
SPLIT_PRODUCT = "pr,prc->pc"  # how a projection of one row names its product


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration.

    Args:
      nodes, context, plan, implementation: what is run.
      group: the largest number of nodes that share a visit list.
      steps: in a call.
      around: implementation of everything around attention; None for that of attention where it fits.
    """

    nodes: int
    context: int
    plan: str
    implementation: str
    group: int
    steps: int
    around: str | None = None

    @property
    def name(self) -> str:
        around = f" around={self.around}" if self.around else ""
        return f"{self.implementation} {self.plan} T={self.nodes} context={self.context}{around}"


def correlated(params: dict[str, jax.Array], correlation: float) -> dict[str, jax.Array]:
    """The same parameters; embeddings of any two tokens have this correlation."""
    return {**params, "embed/embedding": _mixed(params["embed/embedding"], correlation)}


@jax.jit
def _mixed(table: jax.Array, correlation: jax.Array) -> jax.Array:
    own, common = jnp.sqrt(1 - correlation), jnp.sqrt(correlation)
    return (own * table + common * table[:1]).astype(table.dtype)


def binary_tree(nodes: int) -> tuple[jax.Array, jax.Array]:
    """Parents, and the path of first children from the root."""
    parent = jnp.asarray([[-1, *((node - 1) // 2 for node in range(1, nodes))]], jnp.int32)
    path = [0]
    while 2 * path[-1] + 1 < nodes:
        path.append(2 * path[-1] + 1)
    return parent, jnp.asarray([path], jnp.int32)


def step_function(case: Case, config: LlamaConfig, graphdef: nnx.GraphDef) -> Any:
    """`(target, layers, length, token) -> (layers, length, token, blocks)` after `case.steps` steps.

    `blocks`: selections of the first, a middle and the last layer that selects.
    """
    parent, path = binary_tree(case.nodes)
    interval = PLANS[case.plan]
    geometry = None if config.nsa is None else geometry_of(config.nsa)
    options = PassOptions(
        plan=LayerPlan.every(config.num_layers, interval) if interval else None,
        group=min(case.group, case.nodes),
        is_chain=case.nodes == 1,
        implementation=case.implementation,
        steps=case.around,
    )
    valid = jnp.ones(parent.shape, bool)

    def run(target: nnx.State, layers: Any, length: jax.Array, token: jax.Array) -> Any:
        def step(_: Any, carry: Any) -> Any:
            layers, length, token, blocks = carry
            cache = Cache(layers=layers, length=length)
            tokens = (token + jnp.arange(case.nodes)[None] * 7919) % config.vocab_size
            tree = DraftTree(tokens=tokens, parent=parent, valid=valid, rank=jnp.zeros_like(parent))
            queries = queries_of(tree, length)
            output = nnx.merge(graphdef, target)(tokens, queries, cache, options)
            best = jnp.argmax(output.logits, axis=-1).astype(jnp.int32)
            found = [choice for choice in output.selections if choice is not None]
            if found:
                blocks = jnp.stack([found[index].blocks for index in (0, len(found) // 2, -1)])
            count = jnp.full_like(length, path.shape[1])
            cache = commit(cache, output.trees, path, count, geometry, case.around or options.implementation)
            # Back to the same length: every step of a run costs the same, and the cache never overflows.
            return cache.layers, length, best[:, -1:], blocks

        width = 0 if geometry is None else geometry.selection_width(capacity_of(case))
        blocks = jnp.full((3, 1, config.num_kv_heads, case.nodes, width), -1, jnp.int32)
        return jax.lax.fori_loop(0, case.steps, step, (layers, length, token, blocks))

    return run


def compile_case(case: Case, config: LlamaConfig, dtype: Any) -> tuple[Any, float]:
    """The compiled loop, and the seconds that it took."""
    model = config.dense() if case.plan == "dense" else config
    began = time.perf_counter()
    graphdef, state = abstract(model, dtype)
    cache = jax.eval_shape(functools.partial(init_cache, model, capacity_of(case), dtype=dtype))
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    run = jax.jit(step_function(case, model, graphdef), donate_argnums=(1, 2, 3))
    compiled = run.lower(state, cache.layers, cache.length, token).compile(compiler_options())
    return compiled, time.perf_counter() - began


def capacity_of(case: Case) -> int:
    """Room for the context and one path; odd capacities make XLA pad whole caches."""
    return -(-(case.context + 64) // 2048) * 2048


def kernels_of(call: Any) -> dict[str, list[float]]:
    """Microseconds of every kernel of one call, by name; nothing without a GPU."""
    times: dict[str, list[float]] = collections.defaultdict(list)
    for name, us in timing.events(call):
        times[name].append(us)
    return times


def products(hlo: str) -> dict[str, str]:
    """Kinds of the kernels that XLA makes of dots: projections, or einsums of attention, which name their axes."""
    kinds = {}
    for name, path in re.findall(r"%?([\w.-]+) = [^\n]*? fusion\([^\n]*op_name=\"([^\"]*dot_general)", hlo):
        attends = "->" in path and SPLIT_PRODUCT not in path
        kinds[re.sub(r"[.-]", "_", name)] = "attention" if attends else "matmuls"
    return kinds


def split(times: dict[str, list[float]], steps: int, known: dict[str, str]) -> dict[str, Any]:
    """Milliseconds and launches of a step, by kind of work; `known` are the kinds of `products`."""
    parts = {kind: {"ms": 0.0, "launches": 0.0} for kind in (*(kind for kind, _ in KINDS), "rest")}
    for name, durations in times.items():
        kind = next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), None)
        kind = kind or known.get(name, "rest")
        parts[kind]["ms"] += sum(durations) / 1e3 / steps
        parts[kind]["launches"] += len(durations) / steps
    return {kind: {key: round(value, 4) for key, value in part.items()} for kind, part in parts.items()}


def measure(
    case: Case,
    compiled: Any,
    config: LlamaConfig,
    params: dict[str, jax.Array],
    dtype: Any,
    repeats: int,
    top: int,
    *,
    correlation: float,
    wanted: float | None = None,
) -> dict[str, Any]:
    """Times of one configuration; with a `wanted` overlap the correlation is only where the search begins."""
    model = config.dense() if case.plan == "dense" else config
    known = {name: value for name, value in params.items() if name in param_shapes(model)}
    # Three tokens before a block's end, so that nodes of depth 2 complete a compressed entry.
    cache = ar_decode.random_cache(init_cache(model, capacity_of(case), dtype=dtype), case.context - 3)
    layers, length, token = cache.layers, cache.length, jnp.zeros((1, 1), jnp.int32)
    del cache
    seconds, blocks, target = [], None, None

    def call() -> None:
        nonlocal layers, length, token, blocks
        layers, length, token, blocks = compiled(target, layers, length, token)
        jax.block_until_ready(token)

    def overlaps(correlation: float) -> list[float]:
        nonlocal target
        target = None  # two embedding tables at a time are enough
        _, target = build(model, correlated(known, correlation), dtype)
        call()
        return agreement(np.asarray(blocks)) if case.plan != "dense" else []

    agree = overlaps(correlation)
    if wanted is not None and agree:
        correlation, _ = report.calibrate(lambda x: float(np.mean(overlaps(x))), wanted, start=correlation)
        agree = overlaps(correlation)
    for turn in range(repeats + 1):
        began = time.perf_counter()
        call()
        if turn >= 1:
            seconds.append((time.perf_counter() - began) / case.steps * 1e3)
    result: dict[str, Any] = {
        "ms_per_step": harness.spread(seconds),
        "steps_per_call": case.steps,
        "embedding_correlation": round(correlation, 6),
        "overlap_of_neighbours": round(float(np.mean(agree)), 3) if agree else None,
        "overlap_by_layer": {name: round(x, 3) for name, x in zip(("first", "middle", "last"), agree, strict=False)},
    }
    times = kernels_of(call)
    if times:
        result["profile"] = split(times, case.steps, products(compiled.as_text()))
        heaviest = sorted(times.items(), key=lambda item: -sum(item[1]))[:top]
        result["kernels"] = {
            name[:90]: {"us": round(sum(t) / case.steps, 2), "launches": round(len(t) / case.steps, 2)}
            for name, t in heaviest
        }
    return result


def launches_per_layer(config: LlamaConfig, params: dict[str, jax.Array], dtype: Any, case: Case) -> dict[str, Any]:
    """Kernels of one refresh, reuse and dense layer: differences between models of 4 and 8 layers."""

    def launches(plan: str, layers: int) -> float:
        small = dataclasses.replace(config, num_layers=layers)
        some = dataclasses.replace(case, plan=plan)
        compiled, _ = compile_case(some, small, dtype)
        wanted = param_shapes(small)
        kept = {name: value for name, value in params.items() if name in wanted}
        profile = measure(some, compiled, small, kept, dtype, 1, 0, correlation=0.0)["profile"]
        return sum(part["launches"] for part in profile.values())

    refresh = (launches("lossless", 8) - launches("lossless", 4)) / 4
    group = launches("every4", 8) - launches("every4", 4)
    dense = (launches("dense", 8) - launches("dense", 4)) / 4
    return {"case": case.name, "refresh": refresh, "reuse": (group - refresh) / 3, "dense": dense}


class Prefill:
    """A prompt in chunks; compiling and timing are apart, so that compiling can be parallel."""

    def __init__(self, config: LlamaConfig, tokens: int, chunk: int, plan: str, name: str | None, dtype: Any) -> None:
        self.config = config.dense() if plan == "dense" else config
        self.tokens, self.chunk, self.plan, self.name, self.dtype = tokens, chunk, plan, name, dtype
        self.graphdef, self.abstract = abstract(self.config, dtype)
        interval = PLANS[plan]
        self.decoding = loop.Decoding(
            model=self.graphdef,
            config=self.config,
            drafter=NoDrafter(),
            plan=LayerPlan.every(config.num_layers, interval) if interval else None,
            implementation=name,
        )

    @property
    def title(self) -> str:
        """For messages."""
        return f"prefill of {self.tokens} tokens, {self.plan}, {self.name or 'default'}, chunks of {self.chunk}"

    def state(self) -> Any:
        """Before the first chunk."""
        return loop.init_state(
            self.decoding,
            jnp.arange(self.tokens, dtype=jnp.int32)[None] % self.config.vocab_size,
            jnp.full((1,), self.tokens, jnp.int32),
            max_new_tokens=8,
            key=jax.random.key(0),
            capacity=-(-(self.tokens + self.chunk) // 2048) * 2048,
            dtype=self.dtype,
        )

    def compile(self) -> tuple[Any, float]:
        """The compiled chunk, and the seconds that it took."""
        began = time.perf_counter()
        run = jax.jit(loop.prefill_chunk, static_argnames=("decoding", "size"), donate_argnames=("state",))
        weights = Params(target=self.abstract)
        state = jax.eval_shape(self.state)
        lowered = run.lower(decoding=self.decoding, params=weights, state=state, size=self.chunk)
        compiled = lowered.compile(compiler_options())
        return compiled, time.perf_counter() - began

    def measure(self, compiled: Any, params: dict[str, jax.Array], top: int) -> dict[str, Any]:
        """Seconds of whole prompts, and the heaviest kernels of the last chunk, which sees the whole context."""
        wanted = param_shapes(self.config)
        known = {name: value for name, value in params.items() if name in wanted}
        weights, seconds = Params(target=build(self.config, known, self.dtype)[1]), []
        chunks = -(-self.tokens // self.chunk)

        def filled(chunks: int) -> Any:
            state = self.state()
            jax.block_until_ready(state.count)
            began = time.perf_counter()
            for _ in range(chunks):
                state, _ = compiled(params=weights, state=state)
            jax.block_until_ready(state.count)
            return state, time.perf_counter() - began

        for _ in range(2):
            seconds.append(filled(chunks)[1])
        state, _ = filled(chunks - 1)
        times = kernels_of(lambda: jax.block_until_ready(compiled(params=weights, state=state)[0].count))
        heaviest = sorted(times.items(), key=lambda item: -sum(item[1]))[:top]
        kernels = {name[:90]: {"us": round(sum(t), 1), "launches": len(t)} for name, t in heaviest}
        return {
            "seconds": min(seconds),
            "all_seconds": seconds,
            "last_chunk": split(times, 1, products(compiled.as_text())),
            "last_chunk_kernels": kernels,
        }

    def row(self) -> dict[str, Any]:
        """What was prefilled."""
        return {"tokens": self.tokens, "chunk": self.chunk, "plan": self.plan, "implementation": self.name}


def table(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One flat row per timed configuration."""
    rows = []
    for row in result["rows"]:
        if "ms_per_step" not in row:
            continue
        flat = {key: row[key] for key in ("implementation", "plan", "nodes", "context", "overlap_of_neighbours")}
        flat |= {"ms": row["ms_per_step"]["median"], "ms_min": row["ms_per_step"]["min"]}
        for kind, part in row.get("profile", {}).items():
            flat |= {f"{kind}_ms": part["ms"], f"{kind}_launches": part["launches"]}
        rows.append(flat)
    return rows


def save(result: dict[str, Any], output: Path) -> None:
    """JSON, and the rows as CSV beside it."""
    harness.write(output, result)
    if table(result):
        harness.write_csv(output.with_suffix(".csv"), table(result))


def earlier(output: Path, kernels: str) -> list[dict[str, Any]]:
    """Rows of an earlier run of the same code on the same kind of device."""
    if not output.exists():
        return []
    data = json.loads(output.read_text())
    if data.get("provenance", {}).get("device") != jax.devices()[0].device_kind or data.get("kernels_sha") != kernels:
        return []
    return [row for row in data["rows"] if "ms_per_step" in row]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, seconds on a CPU")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 5, 17, 33, 65, 129])
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 16384, 32768, 65536, 131072])
    parser.add_argument("--plans", nargs="+", choices=list(PLANS), default=["lossless", "every4"])
    parser.add_argument("--implementations", nargs="+", default=["mosaic_gpu", "xla"])
    parser.add_argument(
        "--cases", nargs="+", default=None, help="nodes:context:plan:implementation, instead; none for none"
    )
    parser.add_argument("--around", default=None, help="implementation of everything around attention, such as xla")
    parser.add_argument("--layers", type=int, default=None, help="a model of fewer layers")
    parser.add_argument("--group", type=int, default=4, help="nodes that share a visit list; 0: 8 or 16 by nodes")
    parser.add_argument("--correlation", type=float, default=0.9, help="of token embeddings, 0 to 1")
    parser.add_argument("--overlap", type=float, default=None, help="of neighbours' selections; finds the correlation")
    parser.add_argument("--grid", action="store_true", help="trees by contexts, kernels; goes on where it stopped")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no measurement after this time")
    parser.add_argument("--threads", type=int, default=None, help="that compile (default: 4, with --grid 6)")
    parser.add_argument("--after", type=Path, help="start timing once this file exists")
    parser.add_argument("--top", type=int, default=25, help="heaviest kernels to list")
    parser.add_argument("--launches", action="store_true", help="also kernels per layer kind")
    parser.add_argument("--prefill", type=int, default=0, help="also prefill so many tokens")
    parser.add_argument("--chunks", type=int, nargs="+", default=[512], help="tokens of a pass of --prefill")
    parser.add_argument("--prefill-plans", nargs="+", choices=list(PLANS), default=["lossless", "dense"])
    parser.add_argument("--prefill-implementation", default=None)
    args = parser.parse_args()
    if args.smoke:
        timing.prepare(smoke=True)
    if args.overlap is not None and not 0 < args.overlap < 1:
        parser.error(f"--overlap must be above 0 and below 1, got {args.overlap}")
    if args.grid and args.cases:
        parser.error("--grid and --cases both say what to time: give one")
    if not 0 <= args.group <= 32:
        parser.error(f"--group must be between 0 and 32, got {args.group}")
    if not 0 <= args.correlation < 1:
        parser.error(f"--correlation must be at least 0 and below 1, got {args.correlation}")
    if min(args.nodes) < 1 or min(args.contexts) < 1 or args.steps < 1 or min(args.chunks) < 1 or args.prefill < 0:
        parser.error("--nodes, --contexts, --steps and --chunks must be positive, --prefill not negative")
    began = time.perf_counter()
    config, dtype = (ar_decode.SMOKE, jnp.float32) if args.smoke else (ar_decode.SHAPE_8B, jnp.bfloat16)
    if args.smoke:
        args.nodes, args.contexts, args.implementations, args.steps, args.repeats = [1, 5], [512], ["xla"], 2, 2
        args.overlap = 0.9 if args.overlap is None else args.overlap
    if args.layers:
        config = dataclasses.replace(config, num_layers=args.layers)
    if args.launches and (config.num_layers < 8 or jax.default_backend() != "gpu"):
        parser.error("--launches compares models of 4 and 8 layers on a GPU")
    device = jax.devices()[0].device_kind.lower().replace(" ", "-")
    name = "smoke" if args.smoke else f"grid-{device}" if args.grid else device
    output = args.output or harness.RESULTS / "verify_step" / f"{name}.json"
    wanted = [
        (nodes, context, plan, name)
        for context in args.contexts
        for nodes in args.nodes
        for plan in args.plans
        for name in args.implementations
    ]
    if args.cases:
        wanted = [tuple(text.split(":")) for text in args.cases if text != "none"]
    if args.grid and not args.smoke:
        wanted = report.grid()
    if any(len(parts) != 4 or parts[2] not in PLANS for parts in wanted):
        parser.error(f"--cases takes nodes:context:plan:implementation with a plan of {', '.join(PLANS)}")
    cases = [
        Case(
            nodes=int(nodes),
            context=int(context),
            plan=plan,
            implementation=name,
            group=args.group or report.by_nodes(int(nodes)),
            steps=args.steps,
            around=args.around,
        )
        for nodes, context, plan, name in dict.fromkeys(wanted)
    ]
    result: dict[str, Any] = {
        "command": "python experiments/verify_step.py",
        "model": f"{'smoke' if args.smoke else 'Llama-3.1-8B shape'}, {config.num_layers} layers, random weights",
        "dtype": jnp.dtype(dtype).name,
        "tree": "binary, breadth-first; the path of first children is committed",
        "overlap_wanted": args.overlap,
        "kernels_sha": timing.fingerprint("pallas_kernels", "models"),
        "rows": [],
    }
    if args.grid:
        result["rows"] = earlier(output, result["kernels_sha"])
        known = {tuple(row[field.name] for field in dataclasses.fields(Case)) for row in result["rows"]}
        cases = [case for case in cases if dataclasses.astuple(case) not in known]
        harness.say(f"{len(result['rows'])} configurations are known, {len(cases)} to run")

    def left() -> float:
        return args.seconds - (time.perf_counter() - began)

    def in_time() -> bool:
        return left() > 0

    # Tracing takes turns, at a fifth of a case's time: more threads than 6 only make the first case wait.
    pool = concurrent.futures.ThreadPoolExecutor(args.threads or (6 if args.grid else 4))
    waiting = {case: pool.submit(compile_case, case, config, dtype) for case in cases}
    prompts = [
        Prefill(config, args.prefill, chunk, plan, args.prefill_implementation, dtype)
        for chunk in args.chunks
        for plan in args.prefill_plans
        if args.prefill
    ]
    prompts_waiting = [pool.submit(prompt.compile) for prompt in prompts]
    while args.after and not args.after.exists() and in_time():
        time.sleep(0.2)
    params, guess = ar_decode.random_parameters(config, dtype), args.correlation

    def attempt(what: str, work: Any) -> dict[str, Any]:
        try:
            found = work()
        except Exception as error:  # an out-of-memory case must not lose the others
            found = {"error": f"{type(error).__name__}: {error}"[:500]}
        shown = found.get("ms_per_step", found.get("error"))
        if "seconds" in found:
            shown = f"{found['seconds']:.2f} s; last chunk: {found['last_chunk']}"
        harness.say(f"{what}: {shown} {found.get('profile', '')}")
        return found

    def run_case(case: Case) -> dict[str, Any]:
        compiled, seconds = waiting[case].result(timeout=max(1.0, left()))
        del waiting[case]
        options = {"correlation": guess, "wanted": args.overlap if case.nodes > 1 else None}
        return {
            "compile_s": seconds,
            **measure(case, compiled, config, params, dtype, args.repeats, args.top, **options),
        }

    for case in cases:
        if in_time():
            row = dataclasses.asdict(case) | attempt(case.name, functools.partial(run_case, case))
            result["rows"].append(row)
            guess = row.get("embedding_correlation", guess)  # the next case begins its search there
            save(result, output)
    for prompt, waited in zip(prompts, prompts_waiting, strict=True):
        if not in_time():
            break

        def run_prompt(prompt: Prefill = prompt, waited: Any = waited) -> dict[str, Any]:
            compiled, seconds = waited.result(timeout=max(1.0, left()))
            return {"compile_s": seconds, **prompt.measure(compiled, correlated(params, args.correlation), args.top)}

        result.setdefault("prefill", []).append(prompt.row() | attempt(prompt.title, run_prompt))
        save(result, output)
    if args.launches and cases and in_time():
        result["launches_per_layer"] = attempt("launches", lambda: launches_per_layer(config, params, dtype, cases[0]))
        harness.say(f"launches per layer: {result['launches_per_layer']}")
    pool.shutdown(wait=False, cancel_futures=True)
    save(result, output)
    if table(result):
        harness.plot(output.with_suffix(".png"), lambda axes: report.draw(axes, table(result)), columns=2)
        print(report.text(table(result)), flush=True)
    failed = [row["error"] for row in (*result["rows"], *result.get("prefill", [])) if "error" in row]
    if args.smoke and failed:
        raise SystemExit(f"error: {failed[0]}")
    if not all(future.done() for future in (*waiting.values(), *prompts_waiting)):
        os._exit(0)  # Python would wait for compilations that come too late


if __name__ == "__main__":
    main()

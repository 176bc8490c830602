"""One whole verification step of an 8B-shaped model with random weights: milliseconds, and where they go.

    python experiments/verify_step.py [--smoke] [--output FILE] [--nodes 1 5 17 33 65 129] [--contexts 8192 65536]
        [--plans lossless every4 dense] [--implementations mosaic_gpu xla] [--cases 65:65536:lossless:mosaic_gpu ...]
        [--prefill 65536 --chunk 2048] [--launches] [--seconds N]

A step scores all nodes of a draft tree (a binary tree in breadth-first order; one node is autoregressive decoding),
takes every node's best token, and commits the path of first children. Steps run in one compiled loop with donated
caches: no host between them. Random weights cost the same time as real ones. How far the nodes' selections agree
decides how many bytes they read: token embeddings share a part of their variance (`--correlation`), and the overlap is
measured.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import csv
import dataclasses
import functools
import glob
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import _harness as harness
import ar_decode
import jax
import jax.numpy as jnp
from flax import nnx

from ssv_jax import loop
from ssv_jax.drafting.none import NoDrafter
from ssv_jax.drafting.protocol import Params
from ssv_jax.models.cache import Cache, commit, geometry_of, init_cache
from ssv_jax.models.config import LlamaConfig
from ssv_jax.models.layer_plan import LayerPlan
from ssv_jax.models.llama import PassOptions, abstract, build, param_shapes
from ssv_jax.pallas_kernels import overlap
from ssv_jax.tree import DraftTree, queries_of

PLANS = {"lossless": 1, "every4": 4, "dense": None}  # interval of refresh layers
KINDS = (  # by kernel name; the first match counts
    ("selection", r"nsa_(compressed_scores|select|merge)"),
    ("attention", r"nsa_|sparse_"),
    ("matmuls", r"nvjet|cutlass|cublas|splitk"),
)
SPLIT_PRODUCT = "pr,prc->pc"  # how a projection of one row names its product


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration; `group` is the largest number of nodes that share a visit list."""

    nodes: int
    context: int
    plan: str
    implementation: str
    group: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.implementation} {self.plan} T={self.nodes} context={self.context}"


def correlated(params: dict[str, jax.Array], correlation: float) -> dict[str, jax.Array]:
    """The same parameters; embeddings of any two tokens have this correlation."""
    table = params["embed/embedding"]

    @jax.jit
    def mix(table: jax.Array) -> jax.Array:
        own, common = (1 - correlation) ** 0.5, correlation**0.5
        return (own * table + common * table[:1]).astype(table.dtype)

    return {**params, "embed/embedding": mix(table)}


def binary_tree(nodes: int) -> tuple[jax.Array, jax.Array]:
    """Parents, and the path of first children from the root."""
    parent = jnp.asarray([[-1, *((node - 1) // 2 for node in range(1, nodes))]], jnp.int32)
    path = [0]
    while 2 * path[-1] + 1 < nodes:
        path.append(2 * path[-1] + 1)
    return parent, jnp.asarray([path], jnp.int32)


def step_function(case: Case, config: LlamaConfig, graphdef: nnx.GraphDef) -> Any:
    """`(target, layers, length, token) -> (layers, length, token, agreement)` after `case.steps` steps."""
    parent, path = binary_tree(case.nodes)
    interval = PLANS[case.plan]
    geometry = None if config.nsa is None else geometry_of(config.nsa)
    options = PassOptions(
        plan=LayerPlan.every(config.num_layers, interval) if interval else None,
        group=min(case.group, case.nodes),
        is_chain=case.nodes == 1,
        implementation=case.implementation if config.nsa is not None else None,
    )
    valid = jnp.ones(parent.shape, bool)

    def run(target: nnx.State, layers: Any, length: jax.Array, token: jax.Array) -> Any:
        def step(_: Any, carry: Any) -> Any:
            layers, length, token, agreement = carry
            cache = Cache(layers=layers, length=length)
            tokens = (token + jnp.arange(case.nodes)[None] * 7919) % config.vocab_size
            tree = DraftTree(tokens=tokens, parent=parent, valid=valid, rank=jnp.zeros_like(parent))
            queries = queries_of(tree, length)
            output = nnx.merge(graphdef, target)(tokens, queries, cache, options)
            best = jnp.argmax(output.logits, axis=-1).astype(jnp.int32)
            found = [choice for choice in output.selections if choice is not None]
            if case.nodes > 1 and found and geometry is not None:
                measured = overlap(
                    found[-1].blocks, queries.position, valid, geometry=geometry, group=min(case.group, case.nodes)
                )
                agreement = measured.raw / measured.count
            count = jnp.full_like(length, path.shape[1])
            cache = commit(cache, output.trees, path, count, geometry)
            # Back to the same length: every step of a run costs the same, and the cache never overflows.
            return cache.layers, length, best[:, -1:], agreement

        zero = jnp.zeros((), jnp.float32)
        return jax.lax.fori_loop(0, case.steps, step, (layers, length, token, zero))

    return run


def compile_case(case: Case, config: LlamaConfig, dtype: Any) -> tuple[Any, float]:
    """The compiled loop, and the seconds that it took."""
    model = config.dense() if case.plan == "dense" else config
    began = time.perf_counter()
    graphdef, state = abstract(model, dtype)
    cache = jax.eval_shape(functools.partial(init_cache, model, capacity_of(case), dtype=dtype))
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    run = jax.jit(step_function(case, model, graphdef), donate_argnums=(1, 2, 3))
    compiled = run.lower(state, cache.layers, cache.length, token).compile()
    return compiled, time.perf_counter() - began


def capacity_of(case: Case) -> int:
    """Room for the context and one path; odd capacities make XLA pad whole caches."""
    return -(-(case.context + 64) // 2048) * 2048


def kernels_of(call: Any) -> dict[str, list[float]]:
    """Microseconds of every kernel of one call, by name."""
    times: dict[str, list[float]] = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        for path in glob.glob(folder + "/**/*.xplane.pb", recursive=True):
            for plane in jax.profiler.ProfileData.from_file(path).planes:
                if "/device:GPU" in plane.name:
                    for line in plane.lines:
                        if "Stream" in line.name:
                            for event in line.events:
                                times[event.name].append(event.duration_ns / 1e3)
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
    case: Case, compiled: Any, config: LlamaConfig, params: dict[str, jax.Array], dtype: Any, repeats: int, top: int
) -> dict[str, Any]:
    """Times of one configuration."""
    model = config.dense() if case.plan == "dense" else config
    wanted = param_shapes(model)
    _, target = build(model, {name: value for name, value in params.items() if name in wanted}, dtype)
    # Three tokens before a block's end, so that nodes of depth 2 complete a compressed entry.
    cache = ar_decode.random_cache(init_cache(model, capacity_of(case), dtype=dtype), case.context - 3)
    layers, length, token = cache.layers, cache.length, jnp.zeros((1, 1), jnp.int32)
    del cache
    seconds, agreement = [], jnp.zeros(())

    def call() -> None:
        nonlocal layers, length, token, agreement
        layers, length, token, agreement = compiled(target, layers, length, token)
        jax.block_until_ready(token)

    for turn in range(repeats + 2):
        began = time.perf_counter()
        call()
        if turn >= 2:
            seconds.append((time.perf_counter() - began) / case.steps * 1e3)
    result: dict[str, Any] = {
        "ms_per_step": harness.spread(seconds),
        "steps_per_call": case.steps,
        "overlap_of_neighbours": round(float(agreement), 3) if case.nodes > 1 else None,
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
        profile = measure(some, compiled, small, kept, dtype, 1, 0)["profile"]
        return sum(part["launches"] for part in profile.values())

    refresh = (launches("lossless", 8) - launches("lossless", 4)) / 4
    group = launches("every4", 8) - launches("every4", 4)
    dense = (launches("dense", 8) - launches("dense", 4)) / 4
    return {"case": case.name, "refresh": refresh, "reuse": (group - refresh) / 3, "dense": dense}


class Prefill:
    """A prompt in chunks; compiling and timing are apart, so that compiling can be parallel."""

    def __init__(self, config: LlamaConfig, tokens: int, chunk: int, name: str | None, dtype: Any) -> None:
        self.config, self.tokens, self.chunk, self.name, self.dtype = config, tokens, chunk, name, dtype
        self.graphdef, self.abstract = abstract(config, dtype)
        self.decoding = loop.Decoding(model=self.graphdef, config=config, drafter=NoDrafter(), implementation=name)

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
        compiled = run.lower(decoding=self.decoding, params=weights, state=state, size=self.chunk).compile()
        return compiled, time.perf_counter() - began

    def measure(self, compiled: Any, params: dict[str, jax.Array]) -> dict[str, Any]:
        """Seconds of whole prompts."""
        weights, seconds = Params(target=build(self.config, params, self.dtype)[1]), []
        for _ in range(2):
            state = self.state()
            jax.block_until_ready(state.count)
            began = time.perf_counter()
            for _ in range(-(-self.tokens // self.chunk)):
                state, _ = compiled(params=weights, state=state)
            jax.block_until_ready(state.count)
            seconds.append(time.perf_counter() - began)
            del state
        return {"tokens": self.tokens, "chunk": self.chunk, "implementation": self.name, "seconds": seconds}


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Milliseconds of a step by nodes, one panel per context; needs the extra `plot`."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        harness.say("no plot: matplotlib is not installed (extra `plot`)")
        return
    contexts = sorted({row["context"] for row in rows})
    figure, axes = plt.subplots(1, len(contexts), figsize=(4 * len(contexts), 3.2), sharey=True, squeeze=False)
    for axis, context in zip(axes[0], contexts, strict=True):
        lines: dict[str, list[tuple[int, float]]] = collections.defaultdict(list)
        for row in rows:
            if row["context"] == context:
                label = row["plan"] if row["plan"] == "dense" else f"{row['plan']}, {row['implementation']}"
                lines[label].append((row["nodes"], row["ms"]))
        for label, points in lines.items():
            axis.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
        axis.set(title=f"context {context}", xlabel="nodes", xscale="log")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("ms per step")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


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
    rows = table(result)
    if rows:
        names = list(dict.fromkeys(key for row in rows for key in row))
        with output.with_suffix(".csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, seconds on a CPU")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 5, 17, 33, 65, 129])
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 16384, 32768, 65536, 131072])
    parser.add_argument("--plans", nargs="+", choices=list(PLANS), default=["lossless", "every4"])
    parser.add_argument("--implementations", nargs="+", default=["mosaic_gpu", "xla"])
    parser.add_argument("--cases", nargs="+", default=None, help="nodes:context:plan:implementation, instead")
    parser.add_argument("--layers", type=int, default=None, help="a model of fewer layers")
    parser.add_argument("--group", type=int, default=4, help="nodes that share a visit list")
    parser.add_argument("--correlation", type=float, default=0.9, help="of token embeddings, 0 to 1")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no measurement after this time")
    parser.add_argument("--threads", type=int, default=4, help="that compile")
    parser.add_argument("--after", type=Path, help="start timing once this file exists")
    parser.add_argument("--top", type=int, default=25, help="heaviest kernels to list")
    parser.add_argument("--launches", action="store_true", help="also kernels per layer kind")
    parser.add_argument("--prefill", type=int, default=0, help="also prefill so many tokens")
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--prefill-implementation", default=None)
    args = parser.parse_args()
    if not 0 <= args.correlation < 1:
        parser.error(f"--correlation must be at least 0 and below 1, got {args.correlation}")
    if min(args.nodes) < 1 or min(args.contexts) < 1 or args.steps < 1:
        parser.error("--nodes, --contexts and --steps must be positive")
    began = time.perf_counter()
    config, dtype = (ar_decode.SMOKE, jnp.float32) if args.smoke else (ar_decode.SHAPE_8B, jnp.bfloat16)
    if args.smoke:
        args.nodes, args.contexts, args.implementations, args.steps, args.repeats = [1, 5], [64], ["xla"], 2, 2
    if args.layers:
        config = dataclasses.replace(config, num_layers=args.layers)
    if args.launches and (config.num_layers < 8 or jax.default_backend() != "gpu"):
        parser.error("--launches compares models of 4 and 8 layers on a GPU")
    device = jax.devices()[0].device_kind.lower().replace(" ", "-")
    output = args.output or harness.RESULTS / "verify_step" / f"{'smoke' if args.smoke else device}.json"
    wanted = [tuple(text.split(":")) for text in args.cases or ()] or [
        (nodes, context, plan, "xla" if plan == "dense" else name)
        for context in args.contexts
        for nodes in args.nodes
        for plan in args.plans
        for name in args.implementations
    ]
    if any(len(parts) != 4 or parts[2] not in PLANS for parts in wanted):
        parser.error(f"--cases takes nodes:context:plan:implementation with a plan of {', '.join(PLANS)}")
    cases = [
        Case(
            nodes=int(nodes),
            context=int(context),
            plan=plan,
            implementation=name,
            group=args.group,
            steps=args.steps,
        )
        for nodes, context, plan, name in dict.fromkeys(wanted)
    ]
    result: dict[str, Any] = {
        "command": "python experiments/verify_step.py",
        "model": f"{'smoke' if args.smoke else 'Llama-3.1-8B shape'}, {config.num_layers} layers, random weights",
        "dtype": jnp.dtype(dtype).name,
        "tree": "binary, breadth-first; the path of first children is committed",
        "embedding_correlation": args.correlation,
        "group": args.group,
        "rows": [],
    }

    def left() -> float:
        return args.seconds - (time.perf_counter() - began)

    def in_time() -> bool:
        return left() > 0

    pool = concurrent.futures.ThreadPoolExecutor(args.threads)
    waiting = {case: pool.submit(compile_case, case, config, dtype) for case in cases}
    prompt = Prefill(config, args.prefill, args.chunk, args.prefill_implementation, dtype) if args.prefill else None
    prompt_waiting = pool.submit(prompt.compile) if prompt else None
    while args.after and not args.after.exists() and in_time():
        time.sleep(0.2)
    params = correlated(ar_decode.random_parameters(config, dtype), args.correlation)

    def attempt(what: str, work: Any) -> dict[str, Any]:
        try:
            found = work()
        except Exception as error:  # an out-of-memory case must not lose the others
            found = {"error": f"{type(error).__name__}: {error}"[:500]}
        harness.say(f"{what}: {found.get('ms_per_step', found.get('error'))} {found.get('profile', '')}")
        return found

    def run_case(case: Case) -> dict[str, Any]:
        compiled, seconds = waiting.pop(case).result(timeout=max(1.0, left()))
        return {"compile_s": seconds, **measure(case, compiled, config, params, dtype, args.repeats, args.top)}

    for case in cases:
        if in_time():
            row = dataclasses.asdict(case) | attempt(case.name, functools.partial(run_case, case))
            result["rows"].append(row)
            save(result, output)
    if prompt and prompt_waiting and in_time():

        def run_prompt() -> dict[str, Any]:
            compiled, seconds = prompt_waiting.result(timeout=max(1.0, left()))
            return {"compile_s": seconds, **prompt.measure(compiled, params)}

        result["prefill"] = attempt("prefill", run_prompt)
        harness.say(f"prefill: {result['prefill']}")
        save(result, output)
    if args.launches and in_time():
        result["launches_per_layer"] = attempt("launches", lambda: launches_per_layer(config, params, dtype, cases[0]))
        harness.say(f"launches per layer: {result['launches_per_layer']}")
    pool.shutdown(wait=False, cancel_futures=True)
    save(result, output)
    if table(result):
        plot(table(result), output.with_suffix(".png"))


if __name__ == "__main__":
    main()

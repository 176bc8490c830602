"""Checks of the GPU kernels against the float32 definitions, over random shapes; free of pytest.

Every check draws its shapes from a seed. Rows that nothing may read are poison, and the memory that outputs land in
was full of NaN before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ssv_jax.drafting.protocol import Params
from ssv_jax.models.config import LlamaConfig, NSAConfig
from ssv_jax.models.llama import build, random_params
from ssv_jax.pallas_kernels import (
    MergedSchedule,
    Selection,
    block_select,
    compressed_attention,
    dense_verify,
    refresh_attention,
    reuse_attention,
    sparse_verify,
)
from tests.e2e import harness
from tests.gpu import step_checks
from tests.pallas_kernels.mosaic_inputs import Call, make_call, op_module, relative_error

KERNEL = "mosaic_gpu"
REPEATS = 8
SHAPES = tuple(range(16))
FEW_ROWS = tuple(range(16, 24))  # the query rows of a KV head are at most 8
# A selection may differ from the definition's where two block scores are closer than the kernel's rounding; with
# random data that is one row in thousands, and a wrong mask or boundary is far more.
DIFFERENT_ROWS = 0.01


def random_workload(seed: int) -> Any:
    """Shapes of one call: sizes at and around the edges of tiles, blocks, words and groups."""
    cases = op_module("sparse_verify.cases")
    rng = np.random.default_rng(seed)

    def pick(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    heads = pick(1, 2, 3, 4, 4, 4, 8, 16)
    nodes = pick(1, 2, 3, 5, 8, 16, 17, 31, 33, 63, 64, 65, 100, 129)
    block_size = pick(32, 64, 64, 64)
    if seed % 16 == 15:  # a tree over many blocks
        nodes, block_size = 200, 32
    chunk = seed % 16 == 14  # of a prompt
    nodes = 300 if chunk else nodes
    few = seed in FEW_ROWS
    heads = min(heads, 8) if few else heads
    nodes = int(rng.integers(1, 8 // heads + 1)) if few else nodes
    blocks = pick(9, 33, 700) if few else pick(4, 9, 20, 33)
    capacity = max(blocks * block_size, -(-(nodes + block_size) // block_size) * block_size)
    spare = capacity - nodes
    edge = int(rng.integers(1, spare // block_size + 1)) * block_size
    lengths = tuple(
        int(np.clip(pick(spare, edge - 1, edge, edge + 1, rng.integers(1, spare + 1)), 1, spare))
        for _ in range(pick(1, 1, 2))
    )
    return cases.Workload(
        nodes=nodes,
        group=pick(1, 2, 3, 4, 5, 8, 16, 32),
        heads=heads,
        kv_heads=pick(1, 2, 4, 8),
        dim=pick(64, 128, 128),
        capacity=capacity,
        lengths=lengths,
        block_size=block_size,
        n_blocks=pick(3, 8, 16),
        window=pick(1, 63, 64, 100, 512),
        kernel_stride=pick(8, 16, 32) if block_size == 64 else 16,
        chain=bool(pick(True, False)) or chunk,
        dtype=pick("bfloat16", "bfloat16", "float16"),
    )


def spoil_free_memory(elements: int = 1 << 26) -> None:
    """Leaves NaN where the next outputs will probably land."""
    jax.block_until_ready(jnp.full((elements,), jnp.nan, jnp.float32)).delete()


def outputs(call: Call, group: int, implementation: str) -> dict[str, Any]:
    """Every op on one call."""
    arguments = (call.q, call.cached, call.tree, call.queries)
    named: dict[str, Any] = {"geometry": call.geometry, "scale": call.scale, "implementation": implementation}
    selected, blocks = block_select(*arguments, **named)
    refreshed, selection = refresh_attention(*arguments, call.gates, group=group, **named)
    return {
        "sparse_verify": sparse_verify(*arguments, call.selection.schedule, call.gates, **named),
        "reuse_attention": reuse_attention(*arguments, call.gates, call.selection, **named),
        "compressed_attention": compressed_attention(*arguments, **named),
        "block_select": selected,
        "blocks": blocks,
        "refresh_attention": refreshed,
        "refresh_blocks": selection.blocks,
        "schedule": (selection.schedule.blocks, selection.schedule.owners),
    }


def check_ops(seed: int) -> dict[str, float]:
    """All ops of one random call; returns relative errors by op."""
    work = random_workload(seed)
    call = make_call(work, seed)
    run = jax.jit(lambda call: outputs(call, work.group, KERNEL)).lower(call).compile()
    spoil_free_memory()
    got = jax.tree.map(np.asarray, run(call))
    for _ in range(REPEATS):
        again = jax.tree.map(np.asarray, run(call))
        jax.tree.map(np.testing.assert_array_equal, again, got)

    def definition(call: Call, blocks: Any, schedule: Any) -> dict[str, Any]:
        group = op_module("nsa_fused.mosaic_gpu").visit_group(work.nodes, work.heads, work.group)
        merged = MergedSchedule(blocks=schedule[0], owners=schedule[1], group=group)
        own = outputs(call, work.group, "reference")
        arguments = (call.q, call.cached, call.tree, call.queries, call.gates)
        named: dict[str, Any] = {"geometry": call.geometry, "scale": call.scale, "implementation": "reference"}
        inherited = reuse_attention(*arguments, Selection(blocks=blocks, schedule=merged), **named)
        return own | {"refresh_attention": inherited}  # under the kernel's selection, right or wrong

    with jax.default_matmul_precision("highest"):
        want = jax.tree.map(np.asarray, jax.jit(definition)(call, got["refresh_blocks"], got["schedule"]))
    for name in ("blocks", "refresh_blocks"):
        different = float((got[name] != want[name]).any(-1).mean())
        assert different <= DIFFERENT_ROWS, f"{name} differ in {different:.1%} of rows: {work}"
    np.testing.assert_array_equal(got["blocks"], got["refresh_blocks"])
    tolerance = op_module("sparse_verify.cases").TOLERANCE[work.dtype]
    errors = {}
    for name in ("sparse_verify", "reuse_attention", "compressed_attention", "block_select", "refresh_attention"):
        if not np.any(want[name]):
            np.testing.assert_array_equal(got[name], 0)
            continue
        errors[name] = relative_error(got[name], want[name])
        assert errors[name] < tolerance, f"{name}: error {errors[name]:.2e}, tolerance {tolerance:.0e}: {work}"
    return errors


def check_dense(seed: int) -> dict[str, float]:
    """Dense attention of one random call, with and without a window; returns relative errors."""
    work = random_workload(seed)
    rng = np.random.default_rng(seed + 1000)
    asked = int(rng.integers(1, work.nodes + 1)) if seed % 4 == 3 else work.nodes
    call = make_call(work, seed)
    windows = (None, work.window)

    def attend(call: Call, implementation: str) -> list[jax.Array]:
        arguments = (call.q[:, -asked:], call.cached.k, call.cached.v, call.tree.k, call.tree.v, call.queries)
        named: dict[str, Any] = {"scale": call.scale, "implementation": implementation}
        return [dense_verify(*arguments, window=window, **named) for window in windows]

    run = jax.jit(functools.partial(attend, implementation=KERNEL)).lower(call).compile()
    spoil_free_memory()
    got = jax.tree.map(np.asarray, run(call))
    for _ in range(REPEATS):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, run(call)), got)
    with jax.default_matmul_precision("highest"):
        want = jax.jit(functools.partial(attend, implementation="reference"))(call)
    tolerance = op_module("sparse_verify.cases").TOLERANCE[work.dtype]
    errors = {}
    for window, ours, theirs in zip(windows, got, want, strict=True):
        errors[f"window {window}"] = error = relative_error(ours, theirs)
        assert error < tolerance, f"window {window}: error {error:.2e}, tolerance {tolerance:.0e}: {asked} of {work}"
    return errors


MODEL = LlamaConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=512,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    tie_embeddings=True,
    max_position=4096,
    nsa=NSAConfig(kernel_size=32, kernel_stride=16, block_size=64, n_selected=4, window_keys=128),
)
PROMPTS = (1, 64, 500)
NEW_TOKENS, CAPACITY = 96, 1024
# Where two implementations first part, the logits of their two tokens, over the deviation of all logits: bfloat16
# rounds activations to 2^-9, over and over.
MARGIN = 0.05


@functools.cache
def model() -> harness.Model:
    """A small model in bfloat16, of shapes that the kernels take."""
    params = {name: x * (4.0 if x.ndim > 1 else 1.0) for name, x in random_params(MODEL, 0).items()}
    graphdef, target = build(MODEL, params, jnp.bfloat16)
    return harness.Model(MODEL, graphdef, Params(target=target))


def next_logits(tokens: list[int]) -> np.ndarray:
    """Logits after the tokens, by the portable implementation."""
    what = harness.decoding(model(), implementation="xla")
    state = harness.init_state(
        what,
        jnp.asarray([tokens + [0] * (CAPACITY - len(tokens))], jnp.int32),
        jnp.asarray([len(tokens)], jnp.int32),
        max_new_tokens=1,
        key=jax.random.key(0),
        capacity=CAPACITY,
        dtype=jnp.bfloat16,
    )
    logits = None
    for _ in range(-(-len(tokens) // harness.CHUNK)):
        state, logits = harness.prefill_chunk(what, model().params, state, harness.CHUNK)
    assert logits is not None
    return np.asarray(logits[0], np.float64)


def check_tokens(prompt: int) -> dict[str, float]:
    """Greedy decoding with kernels and with XLA: equal, or parting where the two best logits nearly tie.

    With a plan of refresh and reuse layers for odd prompts.
    """
    rng = np.random.default_rng(prompt)
    tokens = rng.integers(0, MODEL.vocab_size, prompt).tolist()
    plan = harness.plan(2, MODEL.num_layers) if prompt % 2 else None

    def generate(name: str) -> list[int]:
        what = harness.decoding(model(), implementation=name, plan=plan)
        options = {"max_new_tokens": NEW_TOKENS, "capacity": CAPACITY, "dtype": jnp.bfloat16}
        return harness.run(what, model().params, [tokens], **options)[0][0]

    ours, theirs = generate(KERNEL), generate("xla")
    assert len(ours) == len(theirs) == NEW_TOKENS
    same = next((i for i in range(NEW_TOKENS) if ours[i] != theirs[i]), NEW_TOKENS)
    if same == NEW_TOKENS:
        return {"equal_tokens": same}
    if plan is not None:  # the margin below is of a model that refreshes everywhere
        assert same > 0, "the first token differs"
        return {"equal_tokens": same}
    logits = next_logits(tokens + theirs[:same])
    margin = abs(logits[ours[same]] - logits[theirs[same]]) / logits.std()
    assert margin < MARGIN, f"token {same} differs at a margin of {margin:.3f} deviations"
    return {"equal_tokens": same, "margin": margin}


CHECKS: dict[str, tuple[Callable[[int], dict[str, float]], tuple[int, ...]]] = {
    "ops": (check_ops, SHAPES + FEW_ROWS),
    "dense": (check_dense, SHAPES),
    "tokens": (check_tokens, PROMPTS),
    "products": (step_checks.check_products, step_checks.SEEDS),
    "nodes": (step_checks.check_nodes, step_checks.SEEDS),
    "model": (step_checks.check_model, step_checks.NODES),
}

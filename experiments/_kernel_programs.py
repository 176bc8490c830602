"""What the kernel benchmark times: grid points, one launch a query, fused layers beside separate branches, peers.

Each function here is the work of one process for some seconds: it compiles one program, makes inputs, and returns a
row for each point. Contexts and overlaps are data where the kernel does not know them: a selected block is a selected
block in a cache of any capacity.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import _kernel_time as timing
import jax
import jax.numpy as jnp
import numpy as np
from _kernel_cases import (
    CALLS,
    L2_BYTES,
    SPARE,
    Case,
    agreement,
    caches,
    merged,
    module,
    normal,
    point,
    queries_of,
    tree_of,
    unchecked,
)

from ssv_jax.pallas_kernels import (
    CachedKV,
    MergedSchedule,
    Selection,
    TreeKV,
    TreeQueries,
    UnsupportedKernelError,
    merge,
)

REPEATS = 2
ALIKE = 0.94  # correlation of neighbours' queries at which random keys give an overlap of about 3/4


def key_of(**fields: Any) -> str:
    """The key of a row."""
    return " ".join(f"{name}={value}" for name, value in fields.items())


# Programs


def attention(case: Case, op: str, config: Any, portable: bool) -> Callable[..., jax.Array]:
    """The selected and window branch ("verify"), or all three ("reuse"), under a given selection."""
    options: dict[str, Any] = {"geometry": case.geometry, "scale": case.scale}

    def ours(q: Any, cached: CachedKV, tree: TreeKV, queries: TreeQueries, selection: Selection, gates: Any) -> Any:
        arguments = (q, cached, tree, queries, selection.schedule, gates)
        return module("sparse_verify.mosaic_gpu").lowered(
            *arguments, **options, compressed=op == "reuse", config=config
        )

    def theirs(q: Any, cached: CachedKV, tree: TreeKV, queries: TreeQueries, selection: Selection, gates: Any) -> Any:
        if op == "reuse":
            return module("nsa_fused.xla").reuse_attention(q, cached, tree, queries, gates, selection, **options)
        return module("sparse_verify.xla").sparse_verify(q, cached, tree, queries, selection.schedule, gates, **options)

    return theirs if portable else ours


def selecting(case: Case, config: Any, portable: bool, select: bool = True) -> Callable[..., Any]:
    """The compressed branch, the selection and merged lists (with `select`)."""
    options: dict[str, Any] = {"geometry": case.geometry, "scale": case.scale}

    def ours(q: Any, cached: CachedKV, tree: TreeKV, queries: TreeQueries) -> Any:
        return module("block_select.mosaic_gpu").select_and_attend(
            q, cached, tree, queries, **options, select=select, group=case.group if select else 0, config=config
        )

    def theirs(q: Any, cached: CachedKV, tree: TreeKV, queries: TreeQueries) -> Any:
        ops = module("block_select.xla")
        if not select:
            return ops.compressed_attention(q, cached, tree, queries, **options)
        out, blocks = ops.block_select(q, cached, tree, queries, **options)
        return (out, blocks, merge(blocks, case.group, case.blocks)) if case.group else (out, blocks)

    return theirs if portable else ours


def tiles_of(case: Case, op: str) -> Any:
    """The tile configuration that the library chooses for a case whose cache just holds its context."""
    shape = jax.ShapeDtypeStruct
    dtype = jnp.dtype(case.dtype)
    lead = (case.batch, case.kv_heads)
    rows = shape((*lead, case.context, case.dim), dtype)
    entries = shape((*lead, max(case.geometry.entries(case.context), 1), case.dim), dtype)
    width = min(case.group * case.geometry.selection_width(case.context), case.blocks)
    lists = shape((*lead, -(-case.nodes // case.group), width), jnp.int32)
    q = shape((case.batch, case.nodes, case.kv_heads, case.heads, case.dim), dtype)
    cached = unchecked(CachedKV, k=rows, v=rows, k_cmp=entries, v_cmp=entries)
    schedule = unchecked(MergedSchedule, blocks=lists, owners=lists, group=case.group)
    found = []

    def look(q: jax.Array, cached: CachedKV, schedule: MergedSchedule) -> None:
        choose = module("sparse_verify.mosaic_gpu").choose
        found.append(choose(q, cached, schedule, case.geometry, compressed=op == "reuse"))

    jax.eval_shape(look, q, cached, schedule)
    return found[0]


# Inputs that the points of a process share


@functools.lru_cache(maxsize=4)
def _pool(case: Case, count: int, entries_only: bool) -> list[CachedKV]:
    with timing.device():
        return jax.block_until_ready(caches(case, count, entries_only=entries_only, poison=False))


def full_caches(case: Case) -> list[CachedKV]:
    """Caches of a capacity that rotate: more than the L2 cache even at 8K tokens."""
    plain = Case(nodes=1, context=case.context, dim=case.dim, kv_heads=case.kv_heads, geometry=case.geometry)
    return _pool(plain, 4 if case.dim > 64 else 6, False)


def entry_caches(case: Case) -> list[CachedKV]:
    """Caches of compressed entries that rotate."""
    plain = Case(nodes=1, context=case.context, dim=case.dim, kv_heads=case.kv_heads, geometry=case.geometry)
    return _pool(plain, int(min(64, max(4, -(-2.5 * L2_BYTES // max(plain.entry_bytes, 1))))), True)


def alike(case: Case, rng: np.random.Generator) -> jax.Array:
    """Queries that are so much alike that neighbours select as trained models' do."""
    shape = (case.kv_heads, case.heads, case.dim)
    common, own = (normal((n, *shape), "float32", rng) for n in (1, case.nodes))
    mixed = (ALIKE**0.5 * common + (1 - ALIKE) ** 0.5 * own)[None]
    return jax.device_put(mixed.astype(jnp.dtype(case.dtype)))


def _row(timed: Mapping[str, Any], read: float, rate: float | None, seconds: Mapping[str, float]) -> dict[str, Any]:
    row = {**timed, **seconds}
    if rate and timed["clock"] == "CUPTI":
        row["floor_us"] = round(read / rate * 1e6, 3)
        row["share_of_read_rate"] = round(read / rate * 1e6 / timed["us"]["median"], 4)
    return row


# Work of a process


def grid_attention(
    op: str,
    base: Case,
    config: Any,
    points: Sequence[tuple[int, float]],
    rate: float | None,
    portable: bool,
    suite: str = "grid",
) -> list[dict[str, Any]]:
    """One program at points (context, overlap); `base.context` is the capacity of the cache."""
    cached = full_caches(base)
    inputs, cases = [], []
    for context, share in points:
        case = dataclasses.replace(base, lengths=(context - SPARE,), overlap=share)
        cases.append(case)
        inputs.append(point(case, 4 if portable else CALLS))
    units = [
        [
            [(x.q, cached[n % len(cached)], x.tree, x.queries, selection, x.gates)]
            for n, selection in enumerate(x.selections)
        ]
        for x in inputs
    ]
    program, seconds = timing.compiled(attention(base, op, config, portable), units[0][0][0])
    rows = []
    for (context, share), case, x, timed in zip(
        points, cases, inputs, timing.measure(program, units, REPEATS), strict=True
    ):
        fields = {"nodes": base.nodes, "group": base.group, "dim": base.dim, "context": context, "overlap": share}
        read = x.distinct_bytes + (case.entry_bytes if op == "reuse" else 0)
        rows.append(
            {
                "key": key_of(suite=suite, op=op, **fields, **({"tiles": config} if suite == "tune" else {})),
                "suite": suite,
                "op": op,
                **fields,
                "tiles": None if config is None else dataclasses.asdict(config),
                "distinct_mb": round(read / 1e6, 3),
                "loaded_selected_mb": round(x.loaded_bytes / 1e6, 3),
                **_row(timed, read, rate, seconds),
            }
        )
    return rows


def grid_select(
    case: Case, config: Any, rate: float | None, portable: bool, suite: str = "grid"
) -> list[dict[str, Any]]:
    """The compressed branch, selection and merge of a shape; it does not depend on the overlap."""
    rng = np.random.default_rng(case.nodes)
    queries = queries_of(case, rng)
    tree, queries = jax.device_put((tree_of(case, queries, rng), queries))
    q, cached = alike(case, rng), entry_caches(case)
    count = 4 if portable else max(16, len(cached))
    units = [[(q, cached[n % len(cached)], tree, queries)] for n in range(count)]
    program, seconds = timing.compiled(selecting(case, config, portable), units[0][0])
    (timed,) = timing.measure(program, [units], REPEATS)
    fields = {"nodes": case.nodes, "group": case.group, "dim": case.dim, "context": case.context}
    row = {
        "key": key_of(suite=suite, op="select", **fields, **({"tiles": config} if suite == "tune" else {})),
        "suite": suite,
        "op": "select",
        **fields,
        "tiles": None if config is None else dataclasses.asdict(config),
        "distinct_mb": round(case.entry_bytes / 1e6, 3),
        **_row(timed, case.entry_bytes, rate, seconds),
    }
    return [row]


def _alone(case: Case, node: int, position: int) -> Case:
    """The case of one node of a tree, its path committed."""
    return dataclasses.replace(case, nodes=1, group=1, lengths=(position,))


def per_query(
    op: str, base: Case, config: Any, points: Sequence[tuple[int, int, float]], portable: bool
) -> list[dict[str, Any]]:
    """A launch for each node, as in speculation over a sparse decoder that knows one query; its path is committed.

    Points are (nodes, context, overlap); `base` has one node. Nodes follow each other over one cache, so what they
    share may come from the L2 cache, as it would; steps rotate through the caches.
    """
    steps = 2 if portable else 3
    cached = entry_caches(base) if op == "select" else full_caches(base)
    units, program, seconds = [], None, {}
    for nodes, context, share in points:
        case = dataclasses.replace(base, nodes=nodes, lengths=(context - SPARE,), overlap=share)
        x = point(case, steps)
        chosen = [np.asarray(selection.blocks) for selection in x.selections]
        q, gates = np.asarray(x.q), np.asarray(x.gates)
        if op == "select":
            q = np.asarray(alike(case, np.random.default_rng(nodes)))
        alone = []
        for node, position in enumerate(np.asarray(x.queries.position[0])):
            one, rng = _alone(case, node, int(position)), np.random.default_rng(node)
            queries = queries_of(one, rng)
            mine = slice(node, node + 1)
            lists = [merged(blocks[:, :, mine], 1, case.blocks) for blocks in chosen]
            alone.append((q[:, mine], tree_of(one, queries, rng), queries, gates[:, mine], lists))
        alone = jax.device_put(alone)
        each = []
        for step in range(steps):
            unit = []
            for q_one, tree, queries, g_one, lists in alone:
                now = cached[step % len(cached)]
                if op == "select":
                    unit.append((q_one, now, tree, queries))
                    continue
                visit, own = lists[step]
                schedule = MergedSchedule(blocks=visit, owners=own, group=1)
                unit.append((q_one, now, tree, queries, Selection(blocks=visit, schedule=schedule), g_one))
            each.append(unit)
        units.append(each)
        if program is None:
            build = selecting(base, config, portable) if op == "select" else attention(base, op, config, portable)
            program, seconds = timing.compiled(build, each[0][0])
    assert program is not None
    rows = []
    # In traces of their own: a step of a large tree is hundreds of launches.
    for (nodes, context, share), each in zip(points, units, strict=True):
        (timed,) = timing.measure(program, [each], REPEATS)
        fields = {"nodes": nodes, "group": 1, "dim": base.dim, "context": context}
        fields |= {} if op == "select" else {"overlap": share}
        row = {"key": key_of(suite="per query", op=op, **fields), "suite": "per query", "op": op, **fields}
        rows.append({**row, **timed, **seconds})
    return rows


def _separate(case: Case, refresh: bool, portable: bool) -> Callable[..., Any]:
    """The branches in launches of their own: each call of a kernel leaves the other branches nothing to read."""
    geometry = case.geometry
    narrow = dataclasses.replace(case, geometry=dataclasses.replace(geometry, window=1))
    selected = alone = None
    if not portable:
        selected = tiles_of(narrow, "verify")
        lists = case.kv_heads * -(-case.nodes * case.heads // 64)
        keys = geometry.window // 64 + 1
        alone = dataclasses.replace(selected, selected=1, last=1, window=max(1, min(keys, 132 // lists)))
    no_window = attention(narrow, "verify", selected, portable)
    window = attention(case, "verify", alone, portable)
    compressed = selecting(dataclasses.replace(case, group=0), None, portable, select=refresh)
    only_second, only_third = (jnp.asarray(x, jnp.float32) for x in ((0, 1, 0), (0, 0, 1)))

    def run(q: Any, cached: Any, tree: Any, queries: Any, selection: Selection, gates: Any) -> Any:
        found = compressed(q, cached, tree, queries)
        out = found if portable and not refresh else found[0] if portable else found.out
        if refresh:
            schedule = merge(found[1] if portable else found.blocks, case.group, case.blocks)
        else:
            schedule = selection.schedule
        nothing = MergedSchedule(
            blocks=jnp.full_like(schedule.blocks, -1), owners=jnp.zeros_like(schedule.owners), group=case.group
        )
        arguments = (q, cached, tree, queries)
        blocks = dataclasses.replace(selection, schedule=schedule)
        empty = dataclasses.replace(selection, schedule=nothing)
        second = no_window(*arguments, blocks, gates * only_second)
        third = window(*arguments, empty, gates * only_third)
        return gates[..., 0:1] * out + second + third

    return run


def _fused(case: Case, refresh: bool, portable: bool) -> Callable[..., Any]:
    """The layer as the library runs it."""
    options: dict[str, Any] = {"geometry": case.geometry, "scale": case.scale}
    ops = module("nsa_fused.xla" if portable else "nsa_fused.mosaic_gpu")

    def run(q: Any, cached: Any, tree: Any, queries: Any, selection: Selection, gates: Any) -> Any:
        if refresh:
            call = ops.refresh_attention if portable else ops.lowered_refresh
            return call(q, cached, tree, queries, gates, group=case.group, **options)
        call = ops.reuse_attention if portable else ops.lowered_reuse
        return call(q, cached, tree, queries, gates, selection, **options)

    return run


def layers(case: Case, kind: str, variant: str, rate: float | None, portable: bool) -> list[dict[str, Any]]:
    """One layer, "refresh" or "reuse", as "fused" kernels, as "separate" branches, or by "xla"."""
    x = point(case, 4 if portable else 16)
    bytes_each = case.entry_bytes + x.distinct_bytes
    count = 2 if portable else int(min(24, max(4, -(-2.5 * L2_BYTES // bytes_each))))
    plain = Case(nodes=1, context=case.context, dim=case.dim, kv_heads=case.kv_heads, geometry=case.geometry)
    cached = _pool(plain, count, False)
    q = alike(case, np.random.default_rng(case.nodes)) if kind == "refresh" else x.q
    units = [
        [(q, cached[n % count], x.tree, x.queries, x.selections[n % len(x.selections)], x.gates)]
        for n in range(max(count, len(x.selections)))
    ]
    plainly = portable or variant == "xla"
    build = _separate if variant == "separate" else _fused
    with timing.device() if plainly else contextlib.nullcontext():  # XLA tries its kernels on the device
        program, seconds = timing.compiled(build(case, kind == "refresh", plainly), units[0][0])
    (timed,) = timing.measure(program, [units], REPEATS)
    fields = {"nodes": case.nodes, "group": case.group, "dim": case.dim, "context": case.context}
    row = {"key": key_of(suite="layers", op=kind, variant=variant, **fields), "suite": "layers", "op": kind}
    row |= {"variant": variant, **fields, "overlap": case.overlap}
    if kind == "refresh" and variant == "fused" and case.nodes > 1:
        chosen = np.asarray(program(*units[0][0])[1].blocks)
        row["overlap"] = round(agreement(chosen[None])[0], 3)
    return [row | _row(timed, bytes_each, rate, seconds)]


def dense_peer(case: Case, rate: float | None, portable: bool) -> list[dict[str, Any]]:
    """Dense attention over the same cache and tree, by the first implementation of the op's table that takes it."""
    ops = module("dense_verify.api")
    x = point(case, 1)
    plain = Case(nodes=1, context=case.context, dim=case.dim, kv_heads=case.kv_heads, geometry=case.geometry)
    cached = _pool(plain, 2 if portable else 4, False)

    def run(name: str, q: Any, cache: CachedKV, tree: TreeKV, queries: TreeQueries) -> jax.Array:
        arguments = (q, cache.k, cache.v, tree.k, tree.v, queries)
        return ops.dense_verify(*arguments, scale=case.scale, implementation=name)

    units = [[(x.q, cache, x.tree, x.queries)] for cache in cached]
    for name in ops.IMPLEMENTATIONS:
        try:
            with contextlib.nullcontext() if name == "mosaic_gpu" else timing.device():
                program, seconds = timing.compiled(functools.partial(run, name), units[0][0])
            break
        except UnsupportedKernelError:
            continue
    else:
        raise RuntimeError("no implementation of dense_verify takes this shape")
    (timed,) = timing.measure(program, [units], REPEATS)
    fields = {"nodes": case.nodes, "dim": case.dim, "context": case.context}
    read = 2.0 * case.kv_heads * sum(case.committed) * case.dim * case.item
    row = {"key": key_of(suite="layers", op="dense", **fields), "suite": "layers", "op": "dense", "variant": name}
    return [row | fields | _row(timed, read, rate, seconds)]

"""The op in one launch on NVIDIA Hopper: a thread block per node or completed entry, and KV head.

Nobody waits for anybody: an entry's block adds up the parts of its nodes' rows itself.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..errors import UnsupportedKernelError
from ..mosaic_rows import read_row, row_layout
from .layout import EntryRows, HeadShape, NodeInputs

plgpu: Any = jax.experimental.pallas.mosaic_gpu  # its type hints do not describe what it accepts

MAX_NODES = 512  # longer passes are chunks of a prompt
F32 = jnp.float32


def node_inputs(
    qkv: Float[Array, "S _ _"],
    gates: Float[Array, "S2 _ _"] | None,
    gate_bias: Float[Array, " _"] | None,
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    entries: EntryRows | None,
    shape: HeadShape,
    dtype: DTypeLike,
    *,
    interpret: Any = None,
) -> NodeInputs:
    """See `api.node_inputs`; does not look at the device.

    Raises:
      UnsupportedKernelError: shapes that the kernel does not cover.
    """
    row_layout(shape.dim)
    if shape.nodes > MAX_NODES:
        raise UnsupportedKernelError(f"needs at most {MAX_NODES} nodes, got {shape.nodes}")
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        raise UnsupportedKernelError(f"needs bfloat16 or float16, got {jnp.dtype(dtype)}")
    if entries is not None and entries.tail_k.dtype != dtype:
        raise UnsupportedKernelError(f"needs a cache of {jnp.dtype(dtype)}, got {entries.tail_k.dtype}")
    dtype = jnp.dtype(dtype)
    if interpret is not None:
        return _run(qkv, gates, gate_bias, cos, sin, entries, shape, dtype, interpret)
    return _run_shared(qkv, gates, gate_bias, cos, sin, entries, shape, dtype)


def _angles(cos: Array, sin: Array) -> tuple[Array, Array]:
    """Factors of a whole head: x' = x cos + (x with its halves exchanged) sin."""
    return jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1)


def _run(
    qkv: Float[Array, "S _ _"],
    gates: Float[Array, "S2 _ _"] | None,
    gate_bias: Float[Array, " _"] | None,
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    entries: EntryRows | None,
    shape: HeadShape,
    dtype: Any,
    interpret: Any = None,
) -> NodeInputs:
    batch, nodes, kv_heads, group, dim = shape.batch, shape.nodes, shape.kv_heads, shape.group, shape.dim
    heads = group + 2
    inputs = {"qkv": qkv, "gates": gates, "gate_bias": gate_bias}
    inputs["cos"], inputs["sin"] = _angles(cos, sin)
    size = completed = 0
    if entries is not None:
        size, completed = entries.tail_k.shape[2], entries.completions.node.shape[1]
        inputs |= {"tail_k": entries.tail_k, "tail_v": entries.tail_v}
        inputs |= {"weight_k": entries.weight_k, "weight_v": entries.weight_v}
        inputs |= {"position_k": entries.position_k, "position_v": entries.position_v}
        inputs |= {"rows": entries.completions.rows, "node": entries.completions.node}
        inputs["entry_cos"], inputs["entry_sin"] = _angles(entries.cos, entries.sin)
    names = [name for name, value in inputs.items() if value is not None]

    def out(*dims: int, kind: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, kind)

    tree = out(batch, kv_heads, nodes, dim)
    outputs = {"q": out(batch, nodes, kv_heads, group, dim), "k": tree, "v": tree, "raw_k": tree}
    if gates is not None:
        outputs["gates"] = out(batch, nodes, kv_heads, group, 3, kind=F32)
    if completed:
        outputs |= {name: out(batch, kv_heads, completed, dim) for name in ("k_cmp", "v_cmp")}

    def body(*refs: Any) -> None:
        named = dict(zip([*names, *(f"out_{name}" for name in outputs), "halves"], refs, strict=True))
        at, k, b = lax.axis_index("i"), lax.axis_index("k"), lax.axis_index("b")
        if not completed:
            _node(named, b, at, k)
            return
        pl.when(at < nodes)(lambda: _node(named, b, at, k))
        pl.when(at >= nodes)(lambda: _entry(named, b, at - nodes, k))

    def read(ref: Any, *at: Any) -> Any:
        return read_row(ref, *at).astype(F32)

    def head(named: dict[str, Any], row: Any, k: Any, number: int) -> Any:
        """One head of a node's projection, rounded as a product that comes whole is."""
        columns = pl.ds(pl.multiple_of((k * heads + number) * dim, dim), dim)
        parts = [read(named["qkv"], part, row, columns) for part in range(qkv.shape[0])]
        return functools.reduce(lambda a, b: a + b, parts).astype(dtype)

    def turn(named: dict[str, Any], values: list[Any], cos: Any, sin: Any) -> list[Any]:
        """Rotates heads; their halves are exchanged on the way through shared memory."""
        halves = named["halves"]
        for number, value in enumerate(values):
            halves[number, pl.ds(0, dim)] = value
            halves[number, pl.ds(dim, dim)] = value
        plgpu.commit_smem()
        exchanged = [read(halves, number, pl.ds(dim // 2, dim)) for number in range(len(values))]
        return [(value * cos + other * sin).astype(dtype) for value, other in zip(values, exchanged, strict=True)]

    def _node(named: dict[str, Any], b: Any, t: Any, k: Any) -> None:
        row = b * nodes + t
        *kept, v = [head(named, row, k, number) for number in range(heads)]
        turned = turn(named, [x.astype(F32) for x in kept], read(named["cos"], b, t), read(named["sin"], b, t))
        for number in range(group):
            named["out_q"][b, t, k, number, :] = turned[number]
        named["out_k"][b, k, t, :] = turned[group]
        named["out_raw_k"][b, k, t, :] = kept[group]
        named["out_v"][b, k, t, :] = v
        if gates is None:
            return
        for number in range(3 * group):
            column = number % 3 if shape.gates == 3 else k * (3 * group) + number
            parts = [named["gates"][part, row, column].astype(F32) for part in range(gates.shape[0])]
            raw = functools.reduce(lambda a, b: a + b, parts)
            if gate_bias is not None:
                raw = raw + named["gate_bias"][column].astype(F32)
            named["out_gates"][b, t, k, number // 3, number % 3] = 1.0 / (1.0 + jnp.exp(-raw))

    def _entry(named: dict[str, Any], b: Any, m: Any, k: Any) -> None:
        exists = named["node"][b, m] >= 0
        pl.when(exists)(lambda: _compress(named, b, m, k))
        pl.when(jnp.logical_not(exists))(lambda: _nothing(named, b, m, k))

    def _nothing(named: dict[str, Any], b: Any, m: Any, k: Any) -> None:
        for name in ("out_k_cmp", "out_v_cmp"):
            named[name][b, k, m, :] = plgpu.layout_cast(jnp.zeros((dim,), dtype), row_layout(dim))

    def _compress(named: dict[str, Any], b: Any, m: Any, k: Any) -> None:
        def weight(which: str, row: Any) -> Any:
            which = f"weight_{which}"
            return named[which][k, row].astype(F32) if which in named else jnp.float32(1 / size)

        def placed(which: str, row: Any, value: Any) -> Any:
            which = f"position_{which}"
            return value + read(named[which], k, row) if which in named else value

        def from_tail() -> tuple[Any, Any, Any]:
            """Rows come in order, the committed ones first: all of them are read at once."""
            places = [named["rows"][b, m, row] for row in range(size)]
            committed = functools.reduce(lambda a, b: a + b, [(at < size).astype(jnp.int32) for at in places])
            sums = []
            for which in ("k", "v"):
                rows = [read(named[f"tail_{which}"], b, k, lax.min(at, size - 1)) for at in places]
                rows = [placed(which, row, x) for row, x in enumerate(rows)]
                factors = [jnp.where(row < committed, weight(which, row), 0.0) for row in range(size)]
                sums.append(functools.reduce(lambda a, b: a + b, [x * f for x, f in zip(rows, factors, strict=True)]))
            return committed, *sums

        committed, k_sum, v_sum = from_tail()

        def add(row: Any, sums: tuple[Any, Any]) -> tuple[Any, Any]:
            node = b * nodes + named["rows"][b, m, row] - size
            new = [head(named, node, k, number).astype(F32) for number in (group, group + 1)]
            new = [placed(which, row, x) * weight(which, row) for which, x in zip("kv", new, strict=True)]
            return sums[0] + new[0], sums[1] + new[1]

        k_sum, v_sum = lax.fori_loop(committed, size, add, (k_sum, v_sum))
        rounded = k_sum.astype(dtype).astype(F32)
        (turned,) = turn(named, [rounded], read(named["entry_cos"], b, m), read(named["entry_sin"], b, m))
        named["out_k_cmp"][b, k, m, :] = turned
        named["out_v_cmp"][b, k, m, :] = v_sum.astype(dtype)

    body.__name__ = "node_inputs"
    found = plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=[plgpu.SMEM((group + 1, 2 * dim), F32)],
        grid=(nodes + completed, kv_heads, batch),
        grid_names=("i", "k", "b"),
        # Shared memory is written once, and `commit_smem` waits for everybody: no barrier around each store.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
    )(*(inputs[name] for name in names))
    named = dict(zip(outputs, found, strict=True))
    if entries is not None and not completed:
        named |= {name: jnp.zeros((batch, kv_heads, 0, dim), dtype) for name in ("k_cmp", "v_cmp")}
    return NodeInputs(**named)


# Layers of one shape share a trace and a lowering.
_run_shared = functools.partial(jax.jit, static_argnums=(6, 7))(_run)

"""What attention reads of its nodes: portable, interpreted as on a GPU, and lowered for one."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from ssv_jax.pallas_kernels import Geometry, completions
from ssv_jax.pallas_kernels.errors import ShapeError, UnsupportedKernelError
from ssv_jax.pallas_kernels.node_inputs import EntryRows, HeadShape, NodeInputs, node_inputs
from tests.pallas_kernels.cases import queries_of
from tests.pallas_kernels.mosaic_inputs import op_module, relative_error

mosaic, reference = op_module("node_inputs.mosaic_gpu"), op_module("node_inputs.reference")
INTERPRET = plgpu.InterpretGPUParams()
TOLERANCE = 4e-3  # bfloat16 rounds to 2^-9
FIELDS = tuple(field.name for field in dataclasses.fields(NodeInputs))


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of a call; `parts` of the projection, one of which is a whole product."""

    parents: tuple[int, ...]
    lengths: tuple[int, ...]
    kv_heads: int = 2
    group: int = 2
    size: int = 8
    parts: int = 3
    weighted: bool = False
    positions: str = ""  # of which rows, `k` or `kv`
    gates: int = 12
    gate_bias: bool = False


CASES = {
    "tree": Case(parents=(-1, 0, 0, 1, 3), lengths=(3, 22), weighted=True),
    "decode": Case(parents=(-1,), lengths=(7,), group=1, parts=1, gates=3),
    "positions": Case(parents=(-1, 0, 0, 1, 3), lengths=(3, 22), weighted=True, positions="kv", gate_bias=True),
    "shared_gates": Case(parents=(-1, 0), lengths=(6,), positions="k", gates=3, gate_bias=True),
    "nothing_completed": Case(parents=(-1, 0), lengths=(9,), kv_heads=1, gates=0),
}


def arguments_of(case: Case, dim: int = 128) -> tuple[tuple[Any, ...], HeadShape]:
    rng = np.random.default_rng(0)
    batch, nodes = len(case.lengths), len(case.parents)
    shape = HeadShape(batch=batch, nodes=nodes, kv_heads=case.kv_heads, group=case.group, dim=dim, gates=case.gates)
    parents = np.broadcast_to(np.array(case.parents), (batch, nodes))
    sizes = Geometry(
        kernel_size=case.size,
        kernel_stride=case.size // 2,
        block_size=case.size,
        n_blocks=4,
        init_blocks=1,
        local_blocks=1,
        window=8,
    )
    done = completions(queries_of(parents, np.array(case.lengths)), sizes)

    def random(*dims: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jnp.asarray(rng.standard_normal(dims), dtype)

    def angles(count: int) -> tuple[jax.Array, jax.Array]:
        angle = rng.uniform(0, 6, (batch, count, dim // 2))
        return jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)

    cos, sin = angles(done.node.shape[1])
    entries = EntryRows(
        tail_k=random(batch, case.kv_heads, case.size, dim),
        tail_v=random(batch, case.kv_heads, case.size, dim),
        completions=done,
        cos=cos,
        sin=sin,
        weight_k=random(case.kv_heads, case.size) if case.weighted else None,
        weight_v=random(case.kv_heads, case.size) if case.weighted else None,
        position_k=random(case.kv_heads, case.size, dim) if "k" in case.positions else None,
        position_v=random(case.kv_heads, case.size, dim) if "v" in case.positions else None,
    )
    rows, kind = batch * nodes + 3, jnp.bfloat16 if case.parts == 1 else jnp.float32  # padded
    qkv = random(case.parts, rows, shape.columns + 128, dtype=kind)
    gates = random(2, rows, 128, dtype=jnp.float32) if case.gates else None
    bias = random(case.gates) if case.gate_bias else None
    return (qkv, gates, bias, *angles(nodes), entries), shape


def compare(got: NodeInputs, arguments: tuple[Any, ...], shape: HeadShape) -> None:
    want = reference.node_inputs(*arguments, shape, jnp.bfloat16)
    exists = np.asarray(arguments[5].completions.node >= 0)[:, None, :, None]
    for name in FIELDS:
        ours, theirs = getattr(got, name), getattr(want, name)
        if theirs is None:
            assert ours is None
            continue
        ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
        assert np.isfinite(ours).all()
        if name.endswith("cmp"):
            ours, theirs = np.where(exists, ours, 0), np.where(exists, theirs, 0)
        if theirs.any():
            assert relative_error(ours, theirs) < TOLERANCE, name


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", sorted(CASES))
def test_interpreted_op_follows_the_definition(name, dim):
    """Halves that are not exchanged, rows of another node or head, an entry of a sibling's rows, parts left out."""
    arguments, shape = arguments_of(CASES[name], dim)
    run = jax.jit(lambda *arrays: mosaic.node_inputs(*arrays, shape, jnp.bfloat16, interpret=INTERPRET))
    compare(run(*arguments), arguments, shape)


@pytest.mark.parametrize("name", sorted(CASES))
def test_portable_op_follows_the_definition(name):
    arguments, shape = arguments_of(CASES[name], dim=16)
    named: dict[str, Any] = {"shape": shape, "dtype": jnp.bfloat16, "implementation": "xla"}
    run = lambda qkv, gates, bias, *more: node_inputs(qkv, gates, *more, gate_bias=bias, **named)  # noqa: E731
    compare(jax.jit(run)(*arguments), arguments, shape)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("nodes", [1, 65])
def test_op_lowers_to_one_kernel(nodes, dim):
    """What the interpreter accepts and the compiler refuses."""
    parents = (-1, *((node - 1) // 2 for node in range(1, nodes)))
    case = Case(parents=parents, lengths=(1000,), kv_heads=8, group=4, size=32, parts=5, gates=96)
    case = dataclasses.replace(case, weighted=True, positions="kv" if dim == 64 else "", gate_bias=dim == 64)
    arguments, shape = arguments_of(case, dim)
    run = jax.jit(lambda *arrays: mosaic.node_inputs(*arrays, shape, jnp.bfloat16))
    text = run.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


def test_what_does_not_fit_is_refused():
    arguments, shape = arguments_of(CASES["tree"])
    with pytest.raises(ShapeError, match="qkv has shape"):
        node_inputs(arguments[0][:, :2], arguments[1], *arguments[3:], shape=shape, dtype=jnp.bfloat16)
    with pytest.raises(ShapeError, match="both or none"):
        node_inputs(arguments[0], None, *arguments[3:], shape=shape, dtype=jnp.bfloat16)
    with pytest.raises(ShapeError, match="gate_bias has shape"):
        node_inputs(*arguments[:2], *arguments[3:], gate_bias=jnp.zeros(5), shape=shape, dtype=jnp.bfloat16)
    with pytest.raises(UnsupportedKernelError, match="bfloat16"):
        mosaic.node_inputs(*arguments, shape, jnp.float32)
    arguments, shape = arguments_of(CASES["tree"], dim=32)
    with pytest.raises(UnsupportedKernelError, match="64 or a multiple of 128"):
        mosaic.node_inputs(*arguments, shape, jnp.bfloat16)

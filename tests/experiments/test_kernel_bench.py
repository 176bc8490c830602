"""What the kernel benchmark's numbers rest on: selections and their lists, sums of traces, ratios, tile tables."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from ssv_jax.pallas_kernels import merge

NAMES = ("_harness", "_kernel_cases", "_kernel_time", "_kernel_programs", "_kernel_tune", "_kernel_report")
NAMES += ("_step_report",)


@pytest.fixture(scope="module")
def scripts(plain_names):
    """The modules by name."""
    return {name: __import__(name) for name in NAMES}


@pytest.mark.parametrize(
    ("nodes", "group", "context", "share"),
    [(17, 4, 8192, 0.75), (5, 32, 4096, 0.5), (40, 16, 16384, 0.9), (9, 3, 512, 0.5)],
)
def test_selections_overlap_as_stated_and_lists_are_those_of_merge(scripts, nodes, group, context, share):
    cases = scripts["_kernel_cases"]
    case = cases.Case(nodes=nodes, group=group, context=context, overlap=share)
    rng = np.random.default_rng(0)
    position = cases.queries_of(case, rng).position[0]
    chosen = cases.selections_of(case, position, 4, rng)
    own = position // case.geometry.block_size
    assert (chosen <= own[:, None]).all()
    for node in range(nodes):
        for row in chosen[..., node, :].reshape(-1, chosen.shape[-1]):
            real = row[row >= 0]
            assert len(set(real)) == len(real) and {0, own[node] - 1, own[node]} <= set(real.tolist())
            assert (row[: len(real)] == np.sort(real)).all()  # ascending, padding at the end
    if context > 512:  # where there are enough blocks to differ in
        same_block = own[1:] == own[:-1]  # otherwise forced blocks differ too
        found = [cases.agreement(chosen[..., n : n + 2, :][None])[0] for n in np.flatnonzero(same_block)]
        assert np.mean(found) == pytest.approx(share, abs=0.02)
    lists, owners = cases.merged(chosen, group, case.blocks)
    for call in range(len(chosen)):
        want = merge(jnp.asarray(chosen[call][None]), group, case.blocks)
        np.testing.assert_array_equal(lists[call], want.blocks[0])
        np.testing.assert_array_equal(owners[call], want.owners[0])


def test_bytes_count_every_block_of_a_head_once(scripts):
    cases = scripts["_kernel_cases"]
    case = cases.Case(nodes=2, group=2, context=8192, kv_heads=1, lengths=(6400,))
    chosen = np.full((1, 1, 2, 16), -1, np.int32)
    chosen[0, 0, 0, :3], chosen[0, 0, 1, :3] = (0, 7, 99), (0, 8, 99)
    lists, _ = cases.merged(chosen, 2, case.blocks)
    distinct, loaded = cases.selected_bytes(case, chosen, lists)
    window = set(range((6400 - 511) // 64, 6400 // 64 + 1))
    assert distinct == len({0, 7, 8, 99} | window) * case.block_bytes
    assert loaded == 4 * case.block_bytes


def test_a_trace_is_cut_into_units_and_points(scripts, monkeypatch):
    timing = scripts["_kernel_time"]
    # Two points of two units of two calls; a call is two of our kernels and one of XLA's.
    durations = iter(range(1, 1000))
    trace = []
    for _ in range(2 * 2 * 2 * 2):  # points, repeats, units, calls
        trace.append(("fusion", 100.0))
        trace += [(f"{name}_mosaic_gpu_kernel", float(next(durations))) for name in ("attend", "sum")]
    monkeypatch.setattr(timing.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing, "_record", lambda folder, call: call())
    monkeypatch.setattr(timing, "_recorded", lambda folder: trace)
    calls = []
    units = [[(1,), (2,)], [(3,), (4,)]]
    rows = timing.measure(lambda x: calls.append(x), [units, units], repeats=2)
    assert calls == [1, 1] + [1, 2, 3, 4] * 4
    sums = [sum(range(1 + 4 * n, 5 + 4 * n)) for n in range(8)]
    assert rows[0]["us"] == {"median": np.median(sums[:4]), "min": sums[0], "max": sums[3], "repeats": 4}
    assert rows[1]["us"]["median"] == np.median(sums[4:])
    assert rows[0]["launches"] == 4 and rows[0]["all_launches"] == 6
    assert rows[0]["kernels"] == {"attend": 8.0, "sum": 9.0}
    trace.pop()
    with pytest.raises(RuntimeError, match="not whole"):
        timing.measure(lambda x: None, [units, units], repeats=2)


def test_ratios_are_of_the_mean_layer(scripts):
    report = scripts["_kernel_report"]

    def row(suite: str, op: str, us: float, nodes: int, group: int, **more: float) -> dict:
        shape = {"nodes": nodes, "group": group, "dim": 128, "context": 65536}
        return {"suite": suite, "op": op, **shape, **more, "us": {"median": us}}

    rows = []
    for op, single, one, four in (("verify", 300.0, 60.0, 30.0), ("select", 700.0, 50.0, 40.0)):
        more = {} if op == "select" else {"overlap": 0.75}
        rows += [row("per query", op, single, 65, 1, **more), row("grid", op, one, 65, 1, **more)]
        rows.append(row("grid", op, four, 65, 4, **more))
    rows += [row("grid", "reuse", us, 65, group, overlap=0.75) for us, group in ((90.0, 1), (50.0, 4))]
    rows.append(row("per query", "reuse", 500.0, 65, 1, overlap=0.75))
    (found,) = report.speedups(rows)
    assert found["group"] == 4 and found["refresh_us"] == 70.0 and found["reuse_us"] == 50.0
    assert found["every_1_over_per_query"] == pytest.approx(1000 / 70, abs=1e-3)
    assert found["every_4_over_per_query"] == pytest.approx(1000 / 55, abs=1e-3)
    assert found["every_4_over_ungrouped"] == pytest.approx(110 / 55)
    assert found["reuse_over_per_query"] == 10.0


def test_rows_of_other_kernels_are_forgotten(scripts, tmp_path, monkeypatch):
    timing = scripts["_kernel_time"]
    path = tmp_path / "rows.json"
    first = timing.Rows(path, {"command": "x"})
    first.add([{"key": "a", "us": {"median": 1.0}}, {"key": "b", "error": "out of memory"}])
    first.save()
    assert json.loads(path.read_text())["command"] == "x"
    assert list(timing.Rows(path, {}).rows) == ["a"]  # what failed is tried again
    monkeypatch.setattr(timing, "fingerprint", lambda *folders: "other")
    assert not timing.Rows(path, {}).rows
    path.write_text("[]")
    with pytest.raises(ValueError, match="--restart"):
        timing.Rows(path, {})


def _halve(x: int) -> list[dict]:
    if x == 3:
        raise ValueError("three")
    return [{"key": str(x), "us": {"median": x / 2}}]


def test_jobs_run_in_order_until_time_is_up(scripts):
    timing = scripts["_kernel_time"]
    jobs = [timing.Job(name=str(x), work=_halve, arguments={"x": x}, keys=(str(x),)) for x in (2, 3, 4)]
    found = []

    def done(job, rows, seconds):
        found.append((job.name, rows if isinstance(rows, str) else rows[0]["us"]["median"]))

    options = {"workers": 0, "patience": 1.0, "cache": None, "done": done}
    assert not timing.run(jobs, until=time.time() + 3600, **options)
    assert found[0] == ("2", 1.0) and "ValueError: three" in found[1][1] and found[2] == ("4", 2.0)
    assert timing.run(jobs, until=time.time() - 1, **options) == jobs


def test_winners_replace_entries_of_the_table_by_its_own_keys(scripts):
    tune, cases, programs = (scripts[f"_kernel_{name}"] for name in ("tune", "cases", "programs"))
    folder = Path(__file__).parents[2] / "pallas_kernels" / "sparse_verify" / "tiles"
    current = json.loads((folder / "nvidia_h200.json").read_text())
    case = cases.Case(nodes=65, group=8)
    choices = tune.attention_choices(case, "verify")
    assert choices[0] == programs.tiles_of(case, "verify") and len(set(choices)) == len(choices)
    fields = {"nodes": 65, "group": 8, "dim": 128, "context": 65536, "overlap": 0.75}
    rows = [
        {"key": programs.key_of(suite="tune", op="verify", **fields, tiles=config), "us": {"median": us}}
        for config, us in zip(choices, (30.0, 20.0, 29.5), strict=False)
    ]
    table, wins = tune.attention_table(rows, [case], current)
    assert wins[0]["taken"] and wins[0]["best_us"] == 20.0
    key = tune.attention_key(case, "verify")
    assert cases.module("sparse_verify.tiles").TileConfig(**table["verify"][key]) == choices[1]
    assert table["reuse"] == current["reuse"]
    small = [dict(row, us={"median": us}) for row, us in zip(rows, (30.0, 29.9, 29.5), strict=True)]
    assert not tune.attention_table(small, [case], current)[1][0]["taken"]  # within the noise


def test_keys_are_those_that_the_library_looks_up(scripts, monkeypatch):
    tune, cases, programs = (scripts[f"_kernel_{name}"] for name in ("tune", "cases", "programs"))
    tiles = cases.module("sparse_verify.tiles")
    for case, op in ((cases.Case(nodes=17, group=8, dim=64), "verify"), (cases.Case(nodes=129, group=16), "reuse")):
        wanted = dataclasses.replace(programs.tiles_of(case, op), stages=4)
        entry = {op: {tune.attention_key(case, op): dataclasses.asdict(wanted)}}
        monkeypatch.setattr(tiles, "tuned", lambda folder, device, entry=entry: entry)
        assert programs.tiles_of(case, op) == wanted
        monkeypatch.undo()


def test_calibration_finds_an_overlap(scripts):
    report = scripts["_step_report"]
    asked = []

    def measured(correlation: float) -> float:
        asked.append(correlation)
        return 1 - (1 - correlation) ** 0.4

    for start in (None, 0.5, 0.9, 0.999):
        asked.clear()
        correlation, value = report.calibrate(measured, 0.75, start=start)
        assert abs(value - 0.75) <= 0.02 and len(asked) <= 9
        assert measured(correlation) == value
    assert report.calibrate(lambda x: 0.3, 0.75)[1] == 0.3  # out of reach: the nearest

"""CUPTI times of kernels, the device's read rate, and jobs for processes that compile side by side and time in turn."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import glob
import hashlib
import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import _harness as harness
import jax
import jax.numpy as jnp

OURS = "_mosaic_gpu"  # in the names of our kernels
_gate: Any = threading.RLock()  # who holds it has the device for themselves


@contextlib.contextmanager
def device() -> Iterator[None]:
    """The device alone: no other process of this benchmark runs a kernel meanwhile."""
    with _gate:
        yield


def _record(folder: str, call: Callable[[], Any]) -> None:
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    with jax.profiler.trace(folder, profiler_options=options):
        call()


def _recorded(folder: str) -> list[tuple[str, float]]:
    found = []
    for path in glob.glob(folder + "/**/*.xplane.pb", recursive=True):
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            if "/device:GPU" in plane.name:
                for line in plane.lines:
                    if "Stream" in line.name:
                        found += [(event.start_ns, event.name, event.duration_ns / 1e3) for event in line.events]
    return [(name, us) for _, name, us in sorted(found)]


def events(call: Callable[[], Any]) -> list[tuple[str, float]]:
    """Names and microseconds of the kernels of a call, in the order in which they began; none without a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        _record(folder, call)
        return _recorded(folder)


def read_rate() -> dict[str, float]:
    """Bytes a second of device memory: row maxima of 2 GiB."""
    x = jax.random.normal(jax.random.key(0), (8192, 131072), jnp.bfloat16)
    largest = jax.jit(lambda x: x.max(axis=1))
    jax.block_until_ready(largest(x))
    with device():
        found = events(lambda: [jax.block_until_ready(largest(x)) for _ in range(7)])
    by_name: dict[str, list[float]] = {}
    for name, us in found:
        by_name.setdefault(name, []).append(us)
    rates = harness.spread([x.nbytes / (us * 1e-6) for us in max(by_name.values(), key=sum)])
    return {key: value if key == "repeats" else round(value) for key, value in rates.items()}


Unit = Sequence[tuple[Any, ...]]  # calls, by their arguments, that are one measurement together


def measure(function: Callable[..., Any], points: Sequence[Sequence[Unit]], repeats: int = 2) -> list[dict[str, Any]]:
    """Kernel times of a program at several points, each of some units that are alike but for their data.

    Returns:
      For each point: `us`, spread over units of what our kernels take (all kernels, where none is ours); `kernels`,
      the same by kernel, medians of a launch; `launches` of ours and `all_launches` a unit; `all_us` a unit. Without a
      GPU `us` is wall time.
    """

    def run(units: Sequence[Unit]) -> None:
        out = None
        for unit in units:
            for arguments in unit:
                out = function(*arguments)
        jax.block_until_ready(out)

    if jax.default_backend() != "gpu":
        return [{"us": harness.spread(_walls(function, units)), "clock": "wall"} for units in points]
    with tempfile.TemporaryDirectory() as folder:
        with device():
            for units in points:
                jax.block_until_ready(function(*units[0][0]))
            _record(folder, lambda: [run(units) for units in points for _ in range(repeats)])
        found = _recorded(folder)  # others may go on meanwhile
    counts = [len(units) * repeats for units in points]
    calls = sum(len(unit) for units in points for unit in units) * repeats
    ours = [event for event in found if OURS in event[0]] or found
    if not ours or len(ours) % calls:
        raise RuntimeError(f"{len(ours)} kernels of {calls} calls: the trace is not whole")
    each, every = len(ours) // calls, len(found) / calls
    rows, start = [], 0
    for units, count in zip(points, counts, strict=True):
        size = len(units[0])  # units of a point have as many calls
        mine = ours[start : start + count * size * each]
        start += len(mine)
        step = size * each
        sums = [sum(us for _, us in mine[n * step : (n + 1) * step]) for n in range(count)]
        names = dict.fromkeys(name for name, _ in mine)
        rows.append(
            {
                "us": {key: round(value, 3) for key, value in harness.spread(sums).items()},
                "kernels": {
                    name.split(OURS)[0][:40]: round(statistics.median(us for other, us in mine if other == name), 3)
                    for name in names
                },
                "launches": size * each,
                "all_launches": round(size * every, 2),
                "all_us": round(sum(us for _, us in found) / calls * size, 3),  # on average over the points
                "clock": "CUPTI",
            }
        )
    return rows


def _walls(function: Callable[..., Any], units: Sequence[Unit]) -> list[float]:
    def run(unit: Unit) -> None:
        for arguments in unit:
            jax.block_until_ready(function(*arguments))

    run(units[0])
    return [1e6 * harness.timed(lambda unit=unit: run(unit), 1, warmup=0)[0] for unit in units]


def compiled(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, dict[str, float]]:
    """A program, and the seconds to trace and lower it, and to compile it."""
    began = time.perf_counter()
    lowered = jax.jit(function).lower(*arguments)
    between = time.perf_counter()
    program = lowered.compile()
    return program, {"lower_s": round(between - began, 2), "compile_s": round(time.perf_counter() - between, 2)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Work of some seconds for one process: `work(**arguments)` returns rows.

    Args:
      name: for progress.
      work: a function of a module.
      arguments: by name.
      keys: of the rows that it makes.
    """

    name: str
    work: Callable[..., list[dict[str, Any]]]
    arguments: Mapping[str, Any]
    keys: tuple[str, ...]


def _enter(gate: Any, cache: str | None) -> None:
    global _gate
    _gate = gate
    keep_compiled(cache)


def prepare(smoke: bool) -> None:
    """Settings that must be made before the device is first used; processes inherit them."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the device's memory
    if smoke:  # times mean nothing then
        quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick}"


def keep_compiled(folder: str | None) -> None:
    """Keeps executables in a folder, for later runs."""
    if folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _perform(job: Job, until: float) -> tuple[list[dict[str, Any]] | str | None, float]:
    """Rows, or what went wrong, or None for a job that came too late; and seconds."""
    began = time.time()
    if began > until:
        return None, 0.0
    try:
        return job.work(**job.arguments), time.time() - began
    except Exception as error:  # noqa: BLE001 - one bad point must not cost the others
        return f"{type(error).__name__}: {error}"[:600] + "\n" + traceback.format_exc(limit=-4), time.time() - began


def run(
    jobs: Sequence[Job],
    *,
    workers: int,
    until: float,
    patience: float,
    cache: str | None,
    done: Callable[[Job, list[dict[str, Any]] | str, float], None],
) -> list[Job]:
    """Runs jobs in their order, in `workers` processes (0: in this one), and hands their rows to `done`.

    Args:
      jobs: most important first.
      workers: processes.
      until: time (of `time.time`) after which none starts.
      patience: seconds for those that run then; after that they are stopped.
      cache: folder of executables.
      done: called here, with rows or what went wrong, and seconds.

    Returns:
      Jobs that did not run.
    """
    if not workers:
        left = list(jobs)
        for job in jobs:
            found, seconds = _perform(job, until)
            if found is not None:
                left.remove(job)
                done(job, found, seconds)
        return left
    left, failures = list(jobs), 0
    spawn = multiprocessing.get_context("spawn")  # a forked process cannot use the parent's device
    gate = spawn.RLock()
    while left and time.time() < until and failures < 3:
        pool = concurrent.futures.ProcessPoolExecutor(
            min(workers, len(left)), mp_context=spawn, initializer=_enter, initargs=(gate, cache)
        )
        waiting = {pool.submit(_perform, job, until): job for job in left}
        try:
            for future in concurrent.futures.as_completed(waiting, timeout=until + patience - time.time()):
                found, seconds = future.result()
                if found is not None:
                    left.remove(waiting[future])
                    done(waiting[future], found, seconds)
            break
        except BrokenProcessPool:  # a process died, perhaps in the compiler
            failures += 1
            harness.say(f"a process died ({failures}); the first of the {len(left)} jobs left go to the end")
            left = left[workers:] + left[:workers]
            gate = spawn.RLock()  # it may have died with the other
        except TimeoutError:
            harness.say(f"out of time; {len(left)} jobs did not finish")
            break
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            _stop()
    return left


def _stop() -> None:
    """Ends the processes that still run, all of them this one's children."""
    for process in multiprocessing.active_children():
        process.join(timeout=2.0)
        if process.is_alive():
            process.terminate()


def fingerprint(*folders: str) -> str:
    """Of the sources and tile tables of folders: rows of other code are measured again."""
    digest, root = hashlib.sha256(), Path(__file__).parent.parent
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*")):
        if path.suffix in (".py", ".json"):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


class Rows:
    """Rows in a JSON file, by key; those of the same kernels on the same device are kept from run to run.

    Args:
      path: the file.
      about: what else the file says.
      restart: whether to forget what is there.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], restart: bool = False) -> None:
        self.path, self.about, self.rows = path, dict(about), {}
        self._ran, self._saved, self.kernels = harness.provenance(), 0.0, fingerprint("pallas_kernels")
        if restart or not path.exists():
            return
        try:
            data = json.loads(path.read_text())
            same = data["provenance"]["device"] == self._ran["device"]
            kept = [row for row in data["rows"] if same and row["kernels_sha"] == self.kernels and "error" not in row]
            self.rows = {row["key"]: row for row in kept}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} does not hold the rows of this benchmark ({error!r}): add --restart") from None
        harness.say(f"{path.name}: {len(kept)} rows of these kernels; {len(data['rows']) - len(kept)} others dropped")

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """New rows, in place of those with the same keys; saved every five seconds."""
        for row in rows:
            self.rows[row["key"]] = {**row, "kernels_sha": self.kernels, "commit": self._ran["commit"]}
        if time.time() - self._saved > 5.0:
            self.save()

    def save(self) -> None:
        """Writes the file, whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(self.path.name + ".part")
        rows = ",\n  ".join(json.dumps(row) for row in self.rows.values())
        head = json.dumps({"provenance": self._ran, **self.about}, indent=1)
        part.write_text(head[:-2] + ',\n "rows": [\n  ' + rows + "\n ]\n}\n")
        os.replace(part, self.path)
        self._saved = time.time()

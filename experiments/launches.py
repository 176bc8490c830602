"""Kernel launches of a whole decode step and the bytes that they move, by layer kind, from the compiled program.

    python experiments/launches.py [--smoke] [--output FILE] [--nodes 1 65] [--context 65536] [--implementation NAME]
        [--profile]
    python experiments/launches.py --hlo FILE ...

Steps are those of `verify_step.py`. A layer's share is the difference between programs of different depth: refresh
layers from all-refresh models, reuse layers from models with one and three of them, dense layers from dense models;
what remains belongs to the step. Compiling needs the device that is counted for; `--hlo` reads compiled programs that
were saved as text and prints what each holds. `--profile` also counts the kernels of a profiled run, on a GPU.

A launch is an instruction of the loop's body that becomes a kernel or a copy. Its bytes are those of the buffers that
it reads and writes: of an operand that is only sliced or gathered from, the slices; of one that is updated in place,
the update. Kernels of our own are counted by whole buffers, except for caches, of which they touch some rows: these
count zero. A round trip is an intermediate that one launch writes and another reads.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import _harness as harness
import ar_decode
import jax
import jax.numpy as jnp
import verify_step

from ssv_jax.models.cache import init_cache
from ssv_jax.models.llama import build

WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
# Instructions that cost no launch; all others of a scheduled program do.
FREE = set(
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency partition-id replica-id "
    "opt-barrier custom-call-done copy-done".split()
)
CALLS = ("call", "while", "conditional", "async-start")
SLICES = ("dynamic-slice", "gather", "slice")
CACHE = 1 << 18  # bytes; smaller operands from outside the step count whole
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\([^=]*?\)|\S+) ([\w-]+)\(")
KINDS = (  # by operation or the source of a fusion; the first match counts
    ("attention", r"mosaic_gpu.*(nsa_|sparse_|dense_)"),
    ("products", r"mosaic_gpu.*(row|gated)_matmul|gemm|cublas|dot_general"),
    ("steps", r"mosaic_gpu"),
    ("copies", r"^copy"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a program: its name, type, operation, operands and everything after them."""

    name: str
    type: str
    operation: str
    operands: tuple[str, ...]
    rest: str

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that it runs."""
        names = re.findall(
            r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)", self.rest
        )
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.rest)
        return (*names, *(re.findall(r"[\w.-]+", branches[1]) if branches else ()))

    @property
    def source(self) -> str:
        """What it was in the model."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""


def size(text: str) -> int:
    """Bytes of a type, tuples included."""
    total = 0
    for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", text):
        count = 1
        for dim in filter(None, dims.split(",")):
            count *= int(dim)
        total += WIDTHS.get(kind, 4) * count
    return total


def _operands(line: str, start: int) -> tuple[tuple[str, ...], str]:
    """Names inside the parentheses that open before `start`, and what follows them."""
    depth, at = 1, start
    while depth and at < len(line):
        depth += {"(": 1, ")": -1}.get(line[at], 0)
        at += 1
    return tuple(re.findall(r"%([\w.-]+)", line[start : at - 1])), line[at:]


class Program:
    """A compiled program: its computations, in scheduled order."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        self.entry, lines = "", None
        for line in re.sub(r"/\*.*?\*/", "", text).split("\n"):
            head = re.match(r"^(ENTRY )?%?([\w.-]+) [^=]*\{\s*$", line)
            if head:
                lines = self.computations.setdefault(head[2], [])
                self.entry = head[2] if head[1] else self.entry
            elif lines is not None and (found := INSTRUCTION.match(line)):
                operands, rest = _operands(line, found.end())
                lines.append(Instruction(found[1], found[2], found[3], operands, rest))
        self.tables = {name: {x.name: x for x in body} for name, body in self.computations.items()}

    def step(self) -> str:
        """The computation that launches most: the body of the loop over steps."""
        inside = [
            name for body in self.computations.values() for x in body if x.operation == "while" for name in x.called
        ]
        return max(inside or [self.entry], key=lambda name: len(self.launches(name)))

    def launches(self, name: str) -> list[tuple[str, Instruction]]:
        """Launches of a computation and of those that it calls, each with the computation that it stands in."""
        found = []
        for x in self.computations.get(name, ()):
            if x.operation in CALLS:
                found += [launch for called in x.called for launch in self.launches(called)]
            elif x.operation not in FREE and not (x.operation == "custom-call" and "Sharding" in x.rest):
                found.append((name, x))
        return found

    def _fused(self, x: Instruction) -> list[Instruction]:
        return self.computations.get(x.called[0], []) if x.operation == "fusion" and x.called else []

    def _carried(self, where: str, name: str) -> bool:
        """Whether an operand comes from outside the step: a cache or a weight."""
        x = self.tables[where].get(name)
        while x is not None and x.operation in ("bitcast", "get-tuple-element") and x.operands:
            x = self.tables[where].get(x.operands[0])
        return x is not None and x.operation == "parameter"

    def bytes_of(self, where: str, x: Instruction) -> int:
        """Bytes that a launch reads and writes; caches count zero for kernels that read or write some of their rows."""
        table = self.tables[where]
        operands = [(name, table[name].type) for name in x.operands if name in table]
        if x.operation == "custom-call" and self.kind(x) in ("attention", "steps"):
            operands = [(name, kind) for name, kind in operands if size(kind) < CACHE or not self._carried(where, name)]
            written = 0 if "output_to_operand_aliasing" in x.rest else size(x.type)
            return written + sum(size(kind) for _, kind in operands)
        if not self._fused(x):
            return size(x.type) + sum(size(kind) for _, kind in operands)
        body = self._fused(x)
        named = {y.name: y for y in body}
        users: dict[str, list[Instruction]] = collections.defaultdict(list)
        for y in body:
            for operand in y.operands:
                users[operand].append(y)

        def through(name: str) -> list[tuple[str, Instruction]]:
            """Uses of a value, past instructions that only rename it."""
            found = []
            for y in users[name]:
                found += through(y.name) if y.operation in ("bitcast", "reshape", "copy") else [(name, y)]
            return found

        updated = 0
        total = size(x.type)
        for y in body:
            if y.operation in ("dynamic-update-slice", "scatter"):
                update = y.operands[1 if y.operation == "dynamic-update-slice" else -1]
                into = size(y.type)
                if update in named and total >= into:  # in place: the update is written, the rest stays
                    total += size(named[update].type) - into
                    updated += 1
        for y in body:
            if y.operation != "parameter":
                continue
            uses = through(y.name)
            in_place = [
                z for name, z in uses if z.operation in ("dynamic-update-slice", "scatter") and z.operands[0] == name
            ]
            sliced = [z for name, z in uses if z.operation in SLICES and z.operands[0] == name]
            if uses and len(in_place) == len(uses) and updated:
                continue
            total += sum(size(z.type) for z in sliced) if uses and len(sliced) == len(uses) else size(y.type)
        return total

    def kind(self, x: Instruction) -> str:
        """Of work, see KINDS."""
        text = f"{x.operation} {x.name} {x.rest[:200]} {x.source}"
        fused = " ".join(y.operation for y in self._fused(x))
        found = next((kind for kind, pattern in KINDS if re.search(pattern, text)), None)
        return found or ("products" if re.search(r"\bdot\b", fused) else "fusions")

    def count(self) -> dict[str, Any]:
        """Launches, bytes and round trips of a step, by kind of work."""
        where = self.step()
        launches = self.launches(where)
        kinds: dict[str, dict[str, int]] = collections.defaultdict(lambda: {"launches": 0, "bytes": 0})
        read = {(at, operand) for at, x in launches for operand in self._roots(at, x.operands)}
        trips = 0
        for at, x in launches:
            part = kinds[self.kind(x)]
            part["launches"] += 1
            part["bytes"] += self.bytes_of(at, x)
            trips += (at, x.name) in read
        total = {key: sum(part[key] for part in kinds.values()) for key in ("launches", "bytes")}
        return {**total, "round_trips": trips, "kinds": dict(kinds)}

    def _roots(self, where: str, names: Iterable[str]) -> Iterable[str]:
        """Launches behind operands, through instructions that cost nothing."""
        for name in names:
            x = self.tables[where].get(name)
            if x is not None and x.operation in ("bitcast", "get-tuple-element", "opt-barrier"):
                yield from self._roots(where, x.operands)
            else:
                yield name

    def listing(self) -> list[str]:
        """One line per launch, in order."""
        return [
            f"{self.kind(x):9} {self.bytes_of(at, x) / 1e3:10.1f} kB  {x.name[:44]:44} {x.type[:40]:40} "
            f"{x.source[-60:]}"
            for at, x in self.launches(self.step())
        ]


def minus(a: dict[str, Any], b: dict[str, Any], divisor: int) -> dict[str, Any]:
    """The difference of two counts, per layer."""
    zero = {"launches": 0, "bytes": 0}
    names = sorted({*a["kinds"], *b["kinds"]})
    kinds = {
        name: {key: (a["kinds"].get(name, zero)[key] - b["kinds"].get(name, zero)[key]) / divisor for key in zero}
        for name in names
    }
    return {**{key: (a[key] - b[key]) / divisor for key in ("launches", "bytes", "round_trips")}, "kinds": kinds}


def by_layer(
    one: dict[str, Any], three: dict[str, Any], mixed: tuple[dict[str, Any], dict[str, Any]]
) -> dict[str, Any]:
    """Counts per layer kind, from models of 1 and 3 refresh layers, and of 1 refresh layer and 1 or 3 reuse layers."""
    refresh, reuse = minus(three, one, 2), minus(mixed[1], mixed[0], 2)
    return {"refresh": refresh, "reuse": reuse, "step": minus(one, refresh, 1)}


def table(counts: dict[str, dict[str, Any]]) -> list[str]:
    """Counts as lines of text."""
    lines = [f"{'':10} {'launches':>8} {'MB':>9} {'round trips':>11}"]
    for name, count in counts.items():
        lines.append(f"{name:10} {count['launches']:8.1f} {count['bytes'] / 1e6:9.2f} {count['round_trips']:11.1f}")
        for kind, part in count["kinds"].items():
            lines.append(f"  {kind:8} {part['launches']:8.1f} {part['bytes'] / 1e6:9.2f}")
    return lines


def measure(case: verify_step.Case, config: Any, dtype: Any, profile: bool, save: Path | None) -> dict[str, Any]:
    """Counts of one number of nodes: NSA layers of both kinds, and dense layers."""

    def counted(plan: str, layers: int) -> dict[str, Any]:
        small, some = dataclasses.replace(config, num_layers=layers), dataclasses.replace(case, plan=plan)
        compiled, seconds = verify_step.compile_case(some, small, dtype)
        harness.say(f"{some.name}, {layers} layers: compiled in {seconds:.0f} s")
        if save:
            save.mkdir(parents=True, exist_ok=True)
            (save / f"{plan}_{case.nodes}_{layers}.txt").write_text(compiled.as_text())
        result = Program(compiled.as_text()).count()
        if profile:
            result["profiled"] = profiled(some, small.dense() if plan == "dense" else small, compiled, dtype)
        return result

    one, three = counted("lossless", 1), counted("lossless", 3)
    mixed = counted("every4", 2), counted("every4", 4)
    layers = by_layer(one, three, mixed)
    dense_one, dense_three = counted("dense", 1), counted("dense", 3)
    layers["dense"] = minus(dense_three, dense_one, 2)
    if profile:
        layers["refresh"]["profiled"] = (three["profiled"] - one["profiled"]) / 2
        layers["reuse"]["profiled"] = (mixed[1]["profiled"] - mixed[0]["profiled"]) / 2
        layers["dense"]["profiled"] = (dense_three["profiled"] - dense_one["profiled"]) / 2
    return layers


def profiled(case: verify_step.Case, config: Any, compiled: Any, dtype: Any) -> float:
    """Kernels and copies of a step, as the profiler of a GPU sees them."""
    _, target = build(config, ar_decode.random_parameters(config, dtype), dtype)
    cache = ar_decode.random_cache(init_cache(config, verify_step.capacity_of(case), dtype=dtype), case.context - 3)
    arguments: Any = (cache.layers, cache.length, jnp.zeros((1, 1), jnp.int32))

    def call() -> None:
        nonlocal arguments
        arguments = compiled(target, *arguments)[:3]
        jax.block_until_ready(arguments)

    call()
    return sum(len(times) for times in verify_step.kernels_of(call).values()) / case.steps


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, seconds on a CPU")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 65])
    parser.add_argument("--context", type=int, default=65536)
    parser.add_argument("--implementation", default="mosaic_gpu")
    parser.add_argument("--group", type=int, default=4, help="nodes that share a visit list")
    parser.add_argument("--profile", action="store_true", help="also count the kernels of profiled runs, on a GPU")
    parser.add_argument("--save", type=Path, default=None, help="folder for the compiled programs")
    parser.add_argument("--hlo", type=Path, nargs="+", default=None, help="saved programs to count instead")
    parser.add_argument("--list", action="store_true", help="with --hlo: every launch")
    args = parser.parse_args()
    if args.hlo:
        for path in args.hlo:
            program = Program(path.read_text())
            print(
                "\n".join(
                    (f"{path.name}:", *table({"step": program.count()}), *(program.listing() if args.list else ()))
                )
            )
        return
    if min(args.nodes) < 1 or args.context < 1:
        parser.error("--nodes and --context must be positive")
    if args.profile and jax.default_backend() != "gpu":
        parser.error("--profile counts kernels on a GPU")
    config, dtype = (ar_decode.SMOKE, jnp.float32) if args.smoke else (ar_decode.SHAPE_8B, jnp.bfloat16)
    if args.smoke:
        args.nodes, args.context, args.implementation = [1, 5], 64, "xla"
    device = jax.devices()[0].device_kind.lower().replace(" ", "-")
    output = args.output or harness.RESULTS / "launches" / f"{'smoke' if args.smoke else device}.json"
    result: dict[str, Any] = {
        "command": "python experiments/launches.py",
        "model": "smoke" if args.smoke else "Llama-3.1-8B shape",
        "context": args.context,
        "implementation": args.implementation,
        "rows": [],
    }
    for nodes in args.nodes:
        began = time.perf_counter()
        case = verify_step.Case(
            nodes=nodes,
            context=args.context,
            plan="lossless",
            implementation=args.implementation,
            group=args.group,
            steps=2,
        )
        layers = measure(case, config, dtype, args.profile, args.save)
        result["rows"].append({"nodes": nodes, "layers": layers})
        harness.write(output, result)
        print("\n".join((f"{nodes} nodes ({time.perf_counter() - began:.0f} s)", *table(layers))))


if __name__ == "__main__":
    main()

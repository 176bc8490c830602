"""Runs the PTX of a thread block, or of a cluster of them, on NumPy: the instructions that our kernels use, no more.

The lanes of a warp run together as long as their program counters agree; where they differ, the lowest goes first.
Instructions that need a whole warp fail unless all of its lanes are there. Registers hold raw bits. Blocks of a cluster
run as far apart as their barriers let them, and the shared memory of a block that has ended is gone.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

LANES = np.arange(32)
FORMATS = {"f32": np.float32, "s32": np.int32, "u32": np.uint32, "b32": np.uint32}
WIDE = {"s64": np.int64, "u64": np.uint64, "b64": np.uint64}
COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


WINDOW = 1 << 24  # from one block's shared memory to the next, as its cluster sees it


class Memory:
    """Bytes at addresses from `base` on; loads of what was never stored fail."""

    def __init__(self, size: int, base: int = 0) -> None:
        self.data, self.known, self.base = np.zeros(size, np.uint8), np.zeros(size, bool), base

    def place(self, at: int, array: np.ndarray, known: bool = True) -> None:
        raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        self.data[at - self.base : at - self.base + raw.size] = raw
        self.known[at - self.base : at - self.base + raw.size] = known

    def read(self, at: int, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.data[at - self.base : at - self.base + size].view(dtype).reshape(shape)

    def load(self, addresses: np.ndarray, size: int) -> np.ndarray:
        at = addresses.astype(np.int64)[:, None] - self.base + np.arange(size)
        assert (at >= 0).all() and (at < self.data.size).all(), "load out of bounds"
        assert (addresses % size == 0).all(), "misaligned load"
        assert self.known[at].all(), "load of something never stored"
        return self.data[at].copy().view(np.uint64 if size == 8 else np.uint32)[:, 0].astype(np.uint64)

    def store(self, addresses: np.ndarray, values: np.ndarray, size: int) -> None:
        at = addresses.astype(np.int64)[:, None] - self.base + np.arange(size)
        assert (at >= 0).all() and (at < self.data.size).all(), "store out of bounds"
        assert (addresses % size == 0).all(), "misaligned store"
        raw = values.astype(np.uint64 if size == 8 else np.uint32).view(np.uint8).reshape(-1, size)
        self.data[at], self.known[at] = raw, True


class Cluster:
    """The shared memory of all blocks, at addresses that `mapa` gives."""

    def __init__(self, blocks: list[Memory]) -> None:
        self.blocks = blocks

    @staticmethod
    def address(at: np.ndarray, rank: np.ndarray) -> np.ndarray:
        return at + (rank + np.uint64(1)) * np.uint64(WINDOW)

    def load(self, addresses: np.ndarray, size: int) -> np.ndarray:
        ranks = addresses.astype(np.int64) // WINDOW - 1
        assert (ranks >= 0).all() and (ranks < len(self.blocks)).all(), "an address of no block of the cluster"
        found = [self.blocks[rank].load(at[None], size) for rank, at in zip(ranks, addresses % WINDOW, strict=True)]
        return np.concatenate(found)


def _parse(text: str, operands: list[int]) -> tuple[list[tuple[str | None, str, list[str]]], dict[str, int]]:
    program: list[tuple[str | None, str, list[str]]] = []
    labels: dict[str, int] = {}
    text = re.sub(r"\$(\d+)", lambda found: f"operand{found[1]}", text.strip())
    for line in text.removeprefix("{").removesuffix("}").split("\n"):
        line = line.strip()
        if line.endswith(":"):
            labels[line[:-1]] = len(program)
            continue
        for part in filter(None, (piece.strip() for piece in line.split(";"))):
            if part.startswith(".reg"):
                continue
            guard = None
            if part.startswith("@"):
                guard, part = part.split(maxsplit=1)
            name, _, rest = part.partition(" ")
            arguments = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
            program.append((guard, name, arguments))
    return program, labels


class Warp:
    """Registers and program counters of 32 lanes."""

    def __init__(self, program: Any, labels: Any, operands: list[Any], space: dict[str, Any], rank: int = 0) -> None:
        self.program, self.labels, self.space = program, labels, space
        self.registers: dict[str, np.ndarray] = {
            f"operand{i}": np.broadcast_to(np.asarray(value, np.uint64), (32,)) for i, value in enumerate(operands)
        }
        self.registers["%cluster_ctarank"] = np.full(32, rank, np.uint64)
        self.counter = np.zeros(32, np.int64)
        self.steps = 0
        self.state = ""  # why the warp stands still
        self.arrivals = self.waits = 0  # at the cluster's barrier

    def raw(self, name: str) -> np.ndarray:
        if name.startswith("0f"):
            return np.full(32, int(name[2:], 16), np.uint64)
        if re.fullmatch(r"-?\d+|0x[0-9a-f]+", name):
            return np.full(32, int(name, 0), np.int64).view(np.uint64)
        # What was never set may be read where a predicate then drops the result: NaN, and true.
        return self.registers.get(name, np.full(32, 0xFFFFFFFF, np.uint64))

    def typed(self, name: str, kind: str) -> np.ndarray:
        bits = self.raw(name)
        return bits.view(WIDE[kind]) if kind in WIDE else bits.astype(np.uint32).view(FORMATS[kind])

    def put(self, name: str, value: np.ndarray, active: np.ndarray) -> None:
        if value.dtype != np.uint64 and value.dtype != bool:
            value = value.view(np.uint32 if value.dtype.itemsize == 4 else np.uint64).astype(np.uint64)
        old = self.registers.get(name, np.zeros(32, value.dtype))
        self.registers[name] = np.where(active, value, old)

    def address(self, text: str) -> np.ndarray:
        name, _, offset = text[1:-1].partition("+")
        return self.raw(name).view(np.int64) + int(offset or 0)

    def run(self) -> str:
        """Until a barrier of the block ("bar"), one of the cluster ("arrive", "wait"), or the end ("end")."""
        end = len(self.program)
        while True:
            at = int(self.counter.min())
            if at == end:
                assert self.arrivals == self.waits, "an end without waiting for the cluster"
                return "end"
            active = self.counter == at
            self.steps += 1
            guard, name, arguments = self.program[at]
            self.counter[active] = at + 1
            if guard is not None:
                held = self.raw(guard.lstrip("@!")).astype(bool)
                active = active & (~held if guard.startswith("@!") else held)
            if name == "bra":
                self.counter[active] = self.labels[arguments[0]]
            elif name == "bar.sync":
                assert active.all(), "a barrier that lanes miss"
                return "bar"
            elif name.startswith("barrier.cluster"):
                step = name.split(".")[2]
                if guard is None or active.any():
                    assert active.all(), "a barrier that lanes miss"
                    assert self.arrivals == self.waits + (step == "wait"), "arriving and waiting do not alternate"
                    self.arrivals, self.waits = self.arrivals + (step == "arrive"), self.waits + (step == "wait")
                    return step
            elif name == "bar.warp.sync":
                assert active.all(), "a warp barrier that lanes miss"
            elif active.any():
                with np.errstate(all="ignore"):
                    self.execute(name.split("."), arguments, active)

    def execute(self, name: list[str], arguments: list[str], active: np.ndarray) -> None:
        operation, kind = name[0], name[-1]

        def value(i: int, of: str = kind) -> np.ndarray:
            return self.typed(arguments[i], of)

        match operation:
            case "ld" | "st" | "red":
                self.access(name, arguments, active)
            case "setp":
                found = COMPARE[name[1]](value(1), value(2))
                if name[2] == "and":
                    found = found & self.raw(arguments[3]).astype(bool)
                self.put(arguments[0], found, active)
            case "selp":
                self.put(arguments[0], np.where(self.raw(arguments[3]).astype(bool), value(1), value(2)), active)
            case "shfl":
                assert active.all(), "a shuffle that lanes miss"
                source, by = self.raw(arguments[1]), int(arguments[2])
                lane = {"bfly": LANES ^ by, "idx": np.full(32, by), "up": np.where(LANES >= by, LANES - by, LANES)}
                self.put(arguments[0], source[lane[name[2]]], active)
            case "redux":
                assert active.all(), "a reduction that lanes miss"
                whole = {"max": np.max, "min": np.min, "add": np.add.reduce, "or": np.bitwise_or.reduce}[name[2]]
                self.put(arguments[0], np.full(32, whole(value(1)), value(1).dtype), active)
            case "mapa":
                self.put(arguments[0], Cluster.address(self.raw(arguments[1]), self.raw(arguments[2])), active)
            case "mov" if arguments[1].startswith("{"):
                low, high = (self.raw(part.strip()) for part in arguments[1][1:-1].split(","))
                self.put(arguments[0], (high << np.uint64(32)) | (low & np.uint64(0xFFFFFFFF)), active)
            case "mov":
                self.put(arguments[0], value(1).copy(), active)
            case "cvt":
                self.put(arguments[0], self.raw(arguments[1]) & np.uint64(0xFFFFFFFF), active)
            case "mul" if name[1] == "wide":
                self.put(arguments[0], self.typed(arguments[1], "u32").astype(np.uint64) * value(2), active)
            case "mad":
                self.put(arguments[0], value(1) * value(2) + value(3), active)
            case "fma":
                exact = value(1).astype(np.float64) * value(2) + value(3)
                self.put(arguments[0], exact.astype(np.float32), active)
            case "add" | "sub" | "mul" | "max" | "min" | "and" | "or" | "xor" | "div":
                functions = {
                    "add": np.add,
                    "sub": np.subtract,
                    "mul": np.multiply,
                    "max": np.maximum,
                    "min": np.minimum,
                    "and": np.logical_and if kind == "pred" else np.bitwise_and,
                    "or": np.bitwise_or,
                    "xor": np.bitwise_xor,
                    "div": np.floor_divide,
                }
                if kind == "pred":
                    self.put(arguments[0], self.raw(arguments[1]).astype(bool) & self.raw(arguments[2]), active)
                else:
                    self.put(arguments[0], functions[operation](value(1), value(2)), active)
            case "shl":
                self.put(arguments[0], value(1) << (value(2) & 31), active)
            case "shr":
                self.put(arguments[0], value(1) >> value(2), active)
            case "not":
                self.put(arguments[0], ~value(1), active)
            case "neg":
                self.put(arguments[0], -value(1), active)
            case "ex2":
                self.put(arguments[0], np.exp2(value(1)), active)
            case "lg2":
                self.put(arguments[0], np.log2(value(1)), active)
            case "popc":
                self.put(arguments[0], np.bitwise_count(value(1)).astype(np.uint32), active)
            case "bfind":
                bits = value(1).astype(np.float64)
                self.put(arguments[0], np.floor(np.log2(np.maximum(bits, 1))).astype(np.uint32), active)
            case _:
                raise NotImplementedError(".".join(name))

    def access(self, name: list[str], arguments: list[str], active: np.ndarray) -> None:
        memory, size = self.space[name[1]], 8 if name[-1] in WIDE else 4
        if name[0] == "red":
            for lane in LANES[active]:
                at, bits = self.address(arguments[0])[lane : lane + 1], self.raw(arguments[1])[lane : lane + 1]
                memory.store(at, memory.load(at, 4) | bits, 4)
            return
        loads = name[0] == "ld"
        registers, reference = (arguments[0], arguments[1]) if loads else (arguments[1], arguments[0])
        at = self.address(reference)
        if registers.startswith("{"):
            each = [part.strip() for part in registers[1:-1].split(",")]
            assert (at[active] % (size * len(each)) == 0).all(), "misaligned vector load"
        else:
            each = [registers]
        for i, register in enumerate(each):
            if loads:
                found = np.zeros(32, np.uint64)
                found[active] = memory.load(at[active] + i * size, size)
                self.put(register, found, active)
            else:
                memory.store(at[active] + i * size, self.raw(register)[active], size)


def run_block(text: str, operands: list[int], threads: int, memory: Memory, shared: Memory) -> int:
    """Runs one thread block; `operands` are those of the text without the last, the thread's index.

    Returns:
      Instructions of the busiest warp.
    """
    return run_cluster(text, operands, threads, memory, [shared])


def run_cluster(text: str, operands: list[int], threads: int, memory: Memory, shared: list[Memory]) -> int:
    """As `run_block` for a cluster of thread blocks, each with its shared memory."""
    program, labels = _parse(text, operands)
    blocks = []
    for rank, own in enumerate(shared):
        space = {"global": memory, "shared": own, "shared::cluster": Cluster(shared)}
        blocks.append([Warp(program, labels, [*operands, LANES + 32 * i], space, rank) for i in range(threads // 32)])
    every = [warp for block in blocks for warp in block]
    while any(warp.state != "end" for warp in every):
        going = 0
        for block, own in zip(blocks, shared, strict=True):
            for warp in block:
                behind = any(other.arrivals < warp.waits for other in every)
                if warp.state in ("", "arrive") or (warp.state == "wait" and not behind):
                    warp.state, going = warp.run(), going + 1
            states = {warp.state for warp in block}
            assert not {"bar", "end"} <= states, "a barrier that warps miss"
            if states == {"bar"}:
                going += 1
                for warp in block:
                    warp.state = ""
            elif states == {"end"}:
                own.known[:] = False
        assert going, "a barrier that warps miss"
    return max(warp.steps for warp in every)

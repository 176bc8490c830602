"""Writing PTX: declared registers, labels, and reductions that several stages need."""

from __future__ import annotations

from collections.abc import Sequence


class Writer:
    """Lines of PTX, and the registers that they declare."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.declared: dict[str, list[str]] = {}
        self.labels = 0

    def __call__(self, *instructions: str) -> None:
        """Adds instructions."""
        self.lines += [f"{line};" for line in instructions]

    def new(self, kind: str, *names: str) -> tuple[str, ...]:
        """Declares registers."""
        known = self.declared.setdefault(kind, [])
        known += [name for name in names if name not in known]
        return names

    def many(self, kind: str, name: str, count: int) -> list[str]:
        """Declares numbered registers."""
        return list(self.new(kind, *(f"{name}{i}" for i in range(count))))

    def label(self) -> str:
        """A fresh label."""
        self.labels += 1
        return f"L{self.labels}"

    def at(self, label: str) -> None:
        """Places a label."""
        self.lines.append(f"{label}:")

    def text(self) -> str:
        """The whole block."""
        names = [f".reg .{kind} {', '.join(names)};" for kind, names in self.declared.items()]
        return "\n".join(["{", *names, *self.lines, "}"])


def reduce_registers(ptx: Writer, operation: str, values: Sequence[str], temporary: str) -> str:
    """Reduces registers pairwise; results go to new registers."""
    level, names = 0, list(values)
    while len(names) > 1:
        above = []
        for i in range(0, len(names) - 1, 2):
            (into,) = ptx.new("b32", f"{temporary}_{level}_{i}")
            ptx(f"{operation} {into}, {names[i]}, {names[i + 1]}")
            above.append(into)
        names = above + ([names[-1]] if len(names) % 2 else [])
        level += 1
    return names[0]


def reduce_lanes(ptx: Writer, operation: str, registers: Sequence[str], lanes: int, temporary: str) -> None:
    """Combines the first `lanes` lanes (a power of two); all lanes get the result. Interleaved over the registers."""
    distance = 1
    while distance < lanes:
        for i, register in enumerate(registers):
            (other,) = ptx.new("f32", f"{temporary}{i}")
            ptx(f"shfl.sync.bfly.b32 {other}, {register}, {distance}, 31, 0xffffffff")
        for i, register in enumerate(registers):
            ptx(f"{operation} {register}, {register}, {temporary}{i}")
        distance *= 2
    if lanes < 32:
        for register in registers:
            ptx(f"shfl.sync.idx.b32 {register}, {register}, 0, 31, 0xffffffff")

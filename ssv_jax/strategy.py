"""Strategies: how a run drafts and verifies, and which deviation from autoregressive decoding that implies.

Imports no jax: strategies are compared, ranked and validated on the host.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from typing import Any, Literal


class PrecisionClass(enum.Enum):
    """What a run may emit, in order of deviation.

    `LOSSLESS`: exactly what autoregressive decoding with a selection in every layer emits.
    `STRICT`: exactly what autoregressive decoding with the same layer plan emits.
    `APPROX`: no such guarantee; queries of a group may share a selection.
    """

    LOSSLESS = "lossless"
    STRICT = "strict"
    APPROX = "approx"

    def allows(self, other: PrecisionClass) -> bool:
        """Whether a run of class `other` is acceptable to a user who allows this class."""
        order = list(PrecisionClass)
        return order.index(other) <= order.index(self)


LARGEST_TREE = 1024  # masks and draft states grow with its square


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TreeSpec:
    """Size of a draft tree.

    Args:
      depth: edges on its longest path.
      topk: candidates that every expansion considers; branches of the n-gram drafter.
      nodes: nodes that are verified, the root included.

    Raises:
      ValueError: a value out of range.
    """

    depth: int
    topk: int
    nodes: int

    def __post_init__(self) -> None:
        for name in ("depth", "topk"):
            if getattr(self, name) < 1:
                raise ValueError(f"tree {name} must be >= 1, got {getattr(self, name)}")
        for name in ("depth", "topk", "nodes"):
            if getattr(self, name) > LARGEST_TREE:
                raise ValueError(f"tree {name} must be at most {LARGEST_TREE}, got {getattr(self, name)}")
        if self.nodes < 2:
            raise ValueError(f"tree nodes must be >= 2 (the root and a draft), got {self.nodes}")
        if self.nodes < self.depth + 1:
            raise ValueError(
                f"tree nodes={self.nodes} cannot hold a path of depth={self.depth}: use nodes >= {self.depth + 1}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LookupShape:
    """What prompt lookup drafts.

    Args:
      depth: tokens of each branch.
      branches: matches that are continued.
      num_nodes: nodes of the tree, root included; later branches are cut short to fit.
      max_ngram, min_ngram: tokens that a match compares at most, and needs at least.

    Raises:
      ValueError: a value out of range.
    """

    depth: int
    branches: int
    num_nodes: int
    max_ngram: int = 4
    min_ngram: int = 2

    def __post_init__(self) -> None:
        if self.depth < 1 or self.branches < 1:
            raise ValueError(f"depth and branches must be >= 1, got {self.depth} and {self.branches}")
        if not 2 <= self.num_nodes <= self.depth * self.branches + 1:
            raise ValueError(
                f"nodes={self.num_nodes} must be between 2 and {self.depth * self.branches + 1}, what "
                f"{self.branches} branches of depth {self.depth} and the root give"
            )
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(f"need 1 <= min_ngram <= max_ngram, got {self.min_ngram} and {self.max_ngram}")

    @classmethod
    def of[Shape: LookupShape](cls: type[Shape], tree: TreeSpec) -> Shape:
        """Of a tree of this size, whose `topk` is the number of branches."""
        return cls(depth=tree.depth, branches=tree.topk, num_nodes=tree.nodes)


DRAFTERS = ("none", "ngram", "eagle3")
MOST_WINDOW = 1 << 30  # tokens; positions are 32-bit integers
AUTO = "auto"  # the engine decides, see `drafting.build.settle`
DEFAULT_TREES = {"ngram": TreeSpec(depth=7, topk=1, nodes=8), "eagle3": TreeSpec(depth=6, topk=8, nodes=32)}


_TREE_LABEL = re.compile(r"(\d+)x(\d+)x(\d+)")
_PART_LABELS = {
    "group": re.compile(r"group(\d+)"),
    "refresh_every": re.compile(r"refresh(\d+)"),
    "refresh_layers": re.compile(r"layers(\d+(?:\.\d+)*)"),
    "draft_window": re.compile(r"window(\d+)"),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """One way to decode.

    Args:
      draft: drafter, one of `DRAFTERS`, or `auto`: the model's own where it has one, which `Engine` settles.
      tree: size of the draft tree; None for the drafter's default.
      traversal: order of the nodes in a pass.
      group: consecutive nodes that share a visit list.
      grouping: `exact` visits the union of the group's selections; `shared` gives all the group's nodes the
        first one's.
      refresh_every: layers 0, k, 2k, ... select blocks, the others inherit.
      refresh_layers: the layers that select, instead of `refresh_every`.
      draft_window: tokens that the drafter's network attends to, 0 for all, None for what its checkpoint recommends.

    Raises:
      ValueError: an unknown name or a value out of range.
    """

    draft: str = "none"
    tree: TreeSpec | None = None
    traversal: Literal["bfs", "dfs"] = "bfs"
    group: int = 1
    grouping: Literal["exact", "shared"] = "exact"
    refresh_every: int = 1
    refresh_layers: tuple[int, ...] | None = None
    draft_window: int | None = None

    def __post_init__(self) -> None:
        if self.draft not in (*DRAFTERS, AUTO):
            raise ValueError(f"unknown drafter {self.draft!r}; known: {', '.join((AUTO, *DRAFTERS))}")
        if self.traversal not in ("bfs", "dfs"):
            raise ValueError(f"traversal must be bfs or dfs, got {self.traversal!r}")
        if self.grouping not in ("exact", "shared"):
            raise ValueError(f"grouping must be exact or shared, got {self.grouping!r}")
        if not 1 <= self.group <= 32:
            raise ValueError(f"group must be between 1 and 32, got {self.group}")
        if self.refresh_every < 1:
            raise ValueError(f"layer plan: refresh-every must be >= 1, got {self.refresh_every}")
        if self.refresh_layers is not None:
            if self.refresh_every != 1:
                raise ValueError("layer plan: give refresh_every or refresh_layers, not both")
            if 0 not in self.refresh_layers:
                raise ValueError("layer plan: layer 0 must be a refresh layer, it has nothing to inherit")
        if self.draft_window is not None and self.draft not in ("eagle3", AUTO):
            raise ValueError("a draft window needs the eagle3 drafter: drop it, or choose eagle3")
        if self.draft_window is not None and not 0 <= self.draft_window <= MOST_WINDOW:
            raise ValueError(
                f"draft window: must be from 1 to {MOST_WINDOW} tokens, or 0 for all, got {self.draft_window}"
            )
        if self.draft == "none" and self.tree is not None:
            raise ValueError("a tree needs a drafter: choose ngram or eagle3, or leave the tree out")
        size = self.size
        if size and self.draft == "ngram" and size.nodes > size.depth * size.topk + 1:
            raise ValueError(
                f"tree nodes={size.nodes} exceeds the pool: {size.topk} branches of depth {size.depth} and the "
                f"root give {size.depth * size.topk + 1}"
            )

    @property
    def size(self) -> TreeSpec | None:
        """The tree that is drafted, None for autoregressive decoding and where that is not settled."""
        return self.tree or DEFAULT_TREES.get(self.draft)

    @property
    def precision(self) -> PrecisionClass:
        """The class that this strategy's output belongs to, on a sparse target."""
        if self.grouping == "shared" and self.group > 1:
            return PrecisionClass.APPROX
        return PrecisionClass.STRICT if self.reuses else PrecisionClass.LOSSLESS

    @property
    def plan(self) -> tuple[int, tuple[int, ...] | None]:
        """The layer plan. Strategies that one run may mix have equal ones: it decides what the cache holds."""
        return self.refresh_every, self.refresh_layers

    @property
    def label(self) -> str:
        """A short name that says everything, e.g. `eagle3:5x8x32+dfs+group4`; `parse` reads it back."""
        size = self.size
        parts = [self.draft + (f":{size.depth}x{size.topk}x{size.nodes}" if size else "")]
        if self.traversal != "bfs":
            parts.append(self.traversal)
        if self.group != 1:
            parts.append(f"group{self.group}")
        if self.grouping != "exact":
            parts.append(self.grouping)
        if self.refresh_every != 1:
            parts.append(f"refresh{self.refresh_every}")
        if self.refresh_layers is not None:
            parts.append("layers" + ".".join(str(layer) for layer in self.refresh_layers))
        if self.draft_window is not None:
            parts.append(f"window{self.draft_window}")
        return "+".join(parts)

    @classmethod
    def parse(cls, label: str) -> Strategy:
        """The strategy of a label.

        A label reads `DRAFTER[:DEPTHxTOPKxNODES]`, then any of `+dfs`, `+groupN`, `+shared`, `+refreshN`,
        `+layers0.4.9`, `+windowN`.

        Raises:
          ValueError: a label of another form, or a strategy that cannot be.
        """
        head, *parts = label.strip().split("+")
        draft, _, tree = head.partition(":")
        fields: dict[str, Any] = {"draft": draft}
        refusal = ValueError(
            f"strategy {label!r} must read DRAFTER[:DEPTHxTOPKxNODES] and any of +dfs, +groupN, +shared, +refreshN, "
            "+layers0.4.9, +windowN; e.g. none, ngram:7x1x8, eagle3:5x8x32+dfs+group4"
        )
        if tree:
            match = _TREE_LABEL.fullmatch(tree)
            if match is None:
                raise refusal
            depth, topk, nodes = (int(number) for number in match.groups())
            fields["tree"] = TreeSpec(depth=depth, topk=topk, nodes=nodes)
        for part in parts:
            if part in ("bfs", "dfs"):
                name, value = "traversal", part
            elif part in ("exact", "shared"):
                name, value = "grouping", part
            else:
                found = [(name, match) for name, form in _PART_LABELS.items() if (match := form.fullmatch(part))]
                if not found:
                    raise refusal
                name, match = found[0]
                numbers = tuple(int(number) for number in match[1].split("."))
                value = numbers if name == "refresh_layers" else numbers[0]
            if name in fields:
                raise ValueError(f"strategy {label!r} says {name.replace('_', '-')} twice: drop one")
            fields[name] = value
        return cls(**fields)

    @property
    def reuses(self) -> bool:
        """Whether a layer plan was asked for in which layers inherit."""
        return self.refresh_every > 1 or self.refresh_layers is not None

    def check(self, allowed: PrecisionClass) -> None:
        """Raises ValueError when this strategy deviates more than the user allows."""
        if not allowed.allows(self.precision):
            cause = "shared grouping" if self.precision is PrecisionClass.APPROX else "a layer plan with reuse"
            raise ValueError(
                f"{cause} is {self.precision.value}, but only {allowed.value} is allowed: "
                f"allow precision {self.precision.value}, or use "
                + ("exact grouping" if self.precision is PrecisionClass.APPROX else "refresh-every=1")
            )

"""An EAGLE-3 head in float64 numpy, one pair at a time, from tensors in SpecForge's names; and tiny heads."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
from safetensors import safe_open

from ssv_jax.models import eagle3, llama
from ssv_jax.models.config import LlamaConfig, RopeConfig
from ssv_jax.models.eagle3_config import Eagle3Config

TARGET = LlamaConfig(
    vocab_size=31,
    hidden_size=12,
    intermediate_size=20,
    num_layers=7,
    num_heads=2,
    num_kv_heads=1,
    head_dim=6,
)
PLAIN = Eagle3Config(
    vocab_size=31,
    draft_vocab_size=17,
    hidden_size=12,
    target_hidden_size=12,
    intermediate_size=20,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    rms_eps=1e-5,
    rope=RopeConfig(theta=50.0),
    taps=(2, 3, 4),
)
HEADS = {
    "plain": PLAIN,
    "eagle-3.1": dataclasses.replace(PLAIN, tap_norm="each", normed_output=True, qkv_bias=True),
    "concat-norm": dataclasses.replace(PLAIN, tap_norm="concat", normed_residual=True, o_bias=True, mlp_bias=True),
    "three-layers": dataclasses.replace(PLAIN, num_layers=3, normed_residual=True),
    "own-parts": dataclasses.replace(PLAIN, hidden_size=8, own_embedding=True, draft_vocab_size=31),
}


def random_head(config: Eagle3Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Parameters of order one, so that features and logits differ clearly; the draft vocabulary is scattered."""
    rng = np.random.default_rng(seed)
    params: dict[str, np.ndarray] = {}
    for name, shape in eagle3.param_shapes(config).items():
        fan = shape[0] if "qkv" in name or "gate_up" in name else np.prod(shape[:-1])
        scale = 1.5 / np.sqrt(max(fan, 1)) if name.endswith("kernel") else 0.7
        # Sharp attention, so that a pair's own token and path decide its feature; several likely tokens, so that
        # beams have different parents.
        scale *= {"qkv/kernel": 2.5, "lm_head/kernel": 0.25}.get("/".join(name.split("/")[-2:]), 1.0)
        params[name] = (rng.normal(size=shape) * scale + (name.endswith("scale"))).astype(np.float32)
    if "target_ids" in params:
        chosen = rng.permutation(config.vocab_size)[: config.draft_vocab_size]
        params["target_ids"] = np.sort(chosen).astype(np.int32)
    return params


def random_target(seed: int = 2) -> dict[str, np.ndarray]:
    """Parameters of the target; drawing them in numpy spares compiling its initialisation."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.normal(size=shape) * 0.3 + name.endswith("scale")).astype(np.float32)
        for name, shape in llama.param_shapes(TARGET).items()
    }


def random_embedding(config: Eagle3Config, seed: int = 1) -> np.ndarray:
    """The target's token embeddings."""
    shape = (config.vocab_size, config.target_hidden_size)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def read_tensors(directory: Path) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint, by their names in the file."""
    with safe_open(directory / "model.safetensors", framework="np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def _rms(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def _rotate(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """x [heads, D]: pairs (i, i + D / 2) turn by position * theta^(-2 i / D)."""
    half = x.shape[-1] // 2
    angle = position * theta ** (-np.arange(half) / half)
    first, second = x[:, :half], x[:, half:]
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], axis=-1
    )


@dataclasses.dataclass
class Pair:
    """What later pairs need of an earlier one."""

    position: int
    keys: list[np.ndarray]
    values: list[np.ndarray]
    feature: np.ndarray


class NumpyHead:
    """The head behind a checkpoint directory."""

    def __init__(self, directory: Path, embedding: np.ndarray | None = None) -> None:
        self.fields = json.loads((directory / "config.json").read_text())
        self.w = {name: x.astype(np.float64) for name, x in read_tensors(directory).items()}
        self.embedding = self.w.get("embed_tokens.weight", embedding)
        self.eps = self.fields["rms_norm_eps"]
        offsets = self.w.get("d2t")
        self.ids = np.arange(self.fields["draft_vocab_size"])
        if offsets is not None:
            self.ids = self.ids + offsets.astype(int)

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return self.w[name + ".weight"] @ x + self.w.get(name + ".bias", 0.0)

    def fuse(self, taps: list[np.ndarray]) -> np.ndarray:
        """Three vectors, low to high."""
        if self.fields.get("fc_norm"):
            taps = [_rms(tap, self.w[f"fc_norm.{i}.weight"], self.eps) for i, tap in enumerate(taps)]
        joined = np.concatenate(taps)
        if self.fields.get("norm_before_fc"):
            joined = _rms(joined, self.w["input_norm.weight"], self.eps)
        return self.w["fc.weight"] @ joined

    def pair(self, feature: np.ndarray, token: int, position: int, before: list[Pair], window: int = 10**9) -> Pair:
        """Runs one pair that sees `before` (those within the window) and itself."""
        seen = [pair for pair in before if pair.position > position - window]
        keys, values, x = [], [], feature
        for i in range(self.fields["num_hidden_layers"]):
            name = "midlayer" if i == 0 else f"layers.{i}"
            if i == 0:
                normed = _rms(x, self.w[f"{name}.hidden_norm.weight"], self.eps)
                embedded = _rms(self.embedding[token], self.w[f"{name}.input_layernorm.weight"], self.eps)
                attended = np.concatenate([embedded, normed])
                if self.fields.get("norm_before_residual"):
                    x = normed
            else:
                attended = _rms(x, self.w[f"{name}.input_layernorm.weight"], self.eps)
            dim, theta = self.fields["head_dim"], self.fields["rope_theta"]
            q, k, v = (self._linear(f"{name}.self_attn.{p}_proj", attended).reshape(-1, dim) for p in "qkv")
            q, k = _rotate(q, position, theta), _rotate(k, position, theta)
            keys.append(k)
            values.append(v)
            out = np.zeros_like(q)
            for h in range(q.shape[0]):
                kv = h // (q.shape[0] // k.shape[0])
                rows = np.stack([pair.keys[i][kv] for pair in seen] + [k[kv]])
                scores = rows @ q[h] / np.sqrt(dim)
                p = np.exp(scores - scores.max())
                out[h] = p / p.sum() @ np.stack([pair.values[i][kv] for pair in seen] + [v[kv]])
            x = x + self._linear(f"{name}.self_attn.o_proj", out.reshape(-1))
            normed = _rms(x, self.w[f"{name}.post_attention_layernorm.weight"], self.eps)
            gate, up = (self._linear(f"{name}.mlp.{p}_proj", normed) for p in ("gate", "up"))
            x = x + self._linear(f"{name}.mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
        if self.fields.get("norm_output"):
            x = _rms(x, self.w["norm.weight"], self.eps)
        return Pair(position, keys, values, x)

    def log_p(self, feature: np.ndarray) -> np.ndarray:
        """Log-probabilities over the draft vocabulary."""
        if not self.fields.get("norm_output"):
            feature = _rms(feature, self.w["norm.weight"], self.eps)
        logits = self.w["lm_head.weight"] @ feature
        return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())

    def prefill(self, taps: np.ndarray, following: np.ndarray, window: int = 10**9) -> list[Pair]:
        """Stable pairs of taps [3, L, Et] and the tokens that follow each position."""
        pairs: list[Pair] = []
        for i, token in enumerate(following):
            pairs.append(self.pair(self.fuse(list(taps[:, i])), int(token), i, pairs, window))
        return pairs


def tree_of(
    head: NumpyHead, stable: list[Pair], root: int, *, depth: int, top_k: int, nodes: int, window: int = 10**9
) -> list[tuple[int, int, int]]:
    """(token, parent index, rank among siblings) of each node of the dynamic tree, breadth first, root first."""
    length = len(stable)
    # A pool item: score, token, parent pool index, rank, the pairs above it, the feature before it.
    pool: list[dict] = []

    def expand(parent: int, score: float, feature: np.ndarray, above: list[Pair]) -> None:
        log_p = head.log_p(feature)
        for rank, draft in enumerate(sorted(range(len(log_p)), key=lambda i: (-log_p[i], i))[:top_k]):
            item = {"score": score + log_p[draft], "token": int(head.ids[draft]), "parent": parent, "rank": rank}
            pool.append(item | {"feature": feature, "above": above})

    def order(indices: list[int]) -> list[int]:
        return sorted(indices, key=lambda i: (-pool[i]["score"], i))

    expand(-1, 0.0, stable[-1].feature, [])
    level = list(range(top_k))
    for step in range(1, depth + 1):
        beams = sorted(order(level)[:top_k])
        start = len(pool)
        for beam in beams:
            item = pool[beam]
            pair = head.pair(item["feature"], item["token"], length + step - 1, stable + item["above"], window)
            expand(beam, item["score"], pair.feature, [*item["above"], pair])
        level = list(range(start, len(pool)))
    chosen = sorted(order(list(range(len(pool))))[: nodes - 1])
    place = {-1: 0} | {index: i + 1 for i, index in enumerate(chosen)}
    return [(root, -1, 0)] + [(pool[i]["token"], place[pool[i]["parent"]], pool[i]["rank"]) for i in chosen]


def as_jax(params: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """The same parameters on the device."""
    return {name: jax.numpy.asarray(x) for name, x in params.items()}

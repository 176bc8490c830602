"""Float64 numpy oracle: a plain Llama forward with dense attention or Native Sparse Attention.

This file is the authority that the JAX code is tested against, so it imports nothing of the project and has
no cache, no batching and no block-wise evaluation: every function follows one formula and loops over
positions in Python. Batched over heads and head dimension only. Indices are 0-based throughout.

Symbols: t query position, l ``kernel_size``, d ``kernel_stride``, b ``block_size`` (l' in the formulas), n
selected blocks, W ``window_keys`` (the query's own key included). Axes: T tokens, K KV heads, G query heads
per KV head (query head h = k*G + g), D head dim, E embed, F ffn, N compressed entries, V vocabulary.

``config`` is a plain dict (``dataclasses.asdict`` of the project's LlamaConfig works), with dicts under
``"rope"`` (``theta``, ``scaling``) and ``"nsa"`` (None for dense attention). ``params`` maps flat names
("layers/0/attn/o/kernel") to arrays; ``param_shapes`` lists them.
"""
# ruff: noqa: E741  (`l` is the compression block length, as in the formulas)

import math

import numpy as np

NSA_DEFAULTS = {
    "cmp_fn": "mean",  # mean | weighted | linear | mlp | pooled
    "cmp_pools": 4,
    "cmp_pe": "none",  # none | k | kv
    "cmp_rope": "post",  # post | pre | none
    "kernel_size": 32,
    "kernel_stride": 16,
    "block_size": 64,
    "n_selected": 16,
    "round_n_pow2": False,
    "init_blocks": 1,
    "local_blocks": 2,
    "window_keys": 512,
    "cmp_visible": "le",
    "score": "mass",
    "group_reduce": "sum",
    "gate_scope": "head",  # head | token
    "gate_bias": False,
    "branch_kv": "shared",
    "rope_layout": "half",
}
_CHOICES = {
    "cmp_fn": ("mean", "weighted", "linear", "mlp", "pooled"),
    "cmp_pe": ("none", "k", "kv"),
    "cmp_rope": ("post", "pre", "none"),
    "gate_scope": ("head", "token"),
    "cmp_visible": ("le",),
    "score": ("mass",),
    "group_reduce": ("sum",),
    "branch_kv": ("shared",),
    "rope_layout": ("half",),
}


# --- configuration ------------------------------------------------------------------------------------------


def nsa_settings(nsa):
    """Fills defaults into an NSA dict and rejects what the formulas here do not cover."""
    unknown = set(nsa) - set(NSA_DEFAULTS)
    if unknown:
        raise ValueError(f"unknown NSA fields {sorted(unknown)}")
    out = {**NSA_DEFAULTS, **nsa}
    for name, allowed in _CHOICES.items():
        if out[name] not in allowed:
            raise ValueError(f"{name}={out[name]!r} is not one of {allowed}")
    l, d, b = out["kernel_size"], out["kernel_stride"], out["block_size"]
    if l % d or b % d or l > b:
        raise ValueError(f"need d|l, d|l', l<=l'; got l={l}, d={d}, l'={b}")
    if num_selected(out) < out["init_blocks"] + out["local_blocks"]:
        raise ValueError("n_selected is smaller than init_blocks + local_blocks")
    if out["window_keys"] < 1:
        raise ValueError("window_keys counts the query's own key, so it is at least 1")
    return out


def num_selected(nsa):
    """n, rounded up to a power of two if the configuration says so."""
    n = nsa["n_selected"]
    return 1 << (n - 1).bit_length() if nsa["round_n_pow2"] else n


def param_shapes(config):
    """Flat parameter name -> shape."""
    E, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    K, D = config["num_kv_heads"], config["head_dim"]
    G = config["num_heads"] // K
    shapes = {"embed/embedding": (V, E)}
    for i in range(config["num_layers"]):
        p = f"layers/{i}/"
        shapes[p + "attn_norm/scale"] = (E,)
        shapes[p + "attn/qkv/kernel"] = (E, K, G + 2, D)
        if config.get("qkv_bias"):
            shapes[p + "attn/qkv/bias"] = (K, G + 2, D)
        if config.get("qk_norm"):
            shapes[p + "attn/q_norm/scale"] = (D,)
            shapes[p + "attn/k_norm/scale"] = (D,)
        shapes[p + "attn/o/kernel"] = (K, G, D, E)
        if config.get("o_bias"):
            shapes[p + "attn/o/bias"] = (E,)
        if config.get("nsa") is not None:
            nsa = nsa_settings(config["nsa"])
            gates = (K, G, 3) if nsa["gate_scope"] == "head" else (3,)
            shapes[p + "attn/gate/kernel"] = (E, *gates)
            if nsa["gate_bias"]:
                shapes[p + "attn/gate/bias"] = gates
            l = nsa["kernel_size"]
            for side in ("k", "v"):
                c = p + f"attn/compress_{side}/"
                if nsa["cmp_fn"] in ("weighted", "pooled"):
                    shapes[c + "weight"] = (K, l)
                elif nsa["cmp_fn"] == "linear":
                    shapes[c + "weight"] = (K, l, D, D)
                elif nsa["cmp_fn"] == "mlp":
                    shapes[c + "w1"], shapes[c + "b1"] = (K, l, D, D), (K, D)
                    shapes[c + "w2"], shapes[c + "b2"] = (K, D, D), (K, D)
                if nsa["cmp_fn"] == "pooled":
                    P = nsa["cmp_pools"]
                    shapes[c + "pool_query"], shapes[c + "pool_bias"] = (K, D, P), (K, l, P)
                    shapes[c + "pool_mix"] = (K, P, D)
                if side in nsa["cmp_pe"]:  # "k" and "kv" name the sides; "none" contains neither letter
                    shapes[c + "pe"] = (K, l, D)
        shapes[p + "mlp_norm/scale"] = (E,)
        shapes[p + "mlp/gate_up/kernel"] = (E, 2, F)
        shapes[p + "mlp/down/kernel"] = (F, E)
        if config.get("mlp_bias"):
            shapes[p + "mlp/gate_up/bias"] = (2, F)
            shapes[p + "mlp/down/bias"] = (E,)
    shapes["norm/scale"] = (E,)
    if not config.get("tie_embeddings"):
        shapes["lm_head/kernel"] = (E, V)
    return shapes


def random_params(config, seed):
    """Seeded float64 parameters, exact in float32, scaled so that attention is far from uniform."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, shape in sorted(param_shapes(config).items()):
        x = rng.standard_normal(shape)
        leaf = name.rsplit("/", 1)[1]
        if leaf == "scale":
            x = 1.0 + 0.2 * x
        elif leaf in ("bias", "b1", "b2"):
            x = 0.3 * x
        elif leaf == "pe":
            x = 0.5 * x
        elif leaf != "embedding":
            fan_in = shape[0]
            if "/attn/o/" in name:
                fan_in = shape[0] * shape[1] * shape[2]
            elif "/compress_" in name:
                fan_in = math.prod(shape[1:-1]) if len(shape) > 2 else shape[1]
            gain = 2.0 if "/qkv/" in name else 1.0
            x = gain * x / math.sqrt(fan_in)
        out[name] = x.astype(np.float32).astype(np.float64)
    return out


# --- elementary functions -----------------------------------------------------------------------------------


def sigmoid(x):
    """1 / (1 + exp(-x)), written with tanh so that no input overflows."""
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def silu(x):
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def gelu(x):
    """x * Phi(x) with the exact normal distribution function."""
    return x * 0.5 * (1.0 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2.0)))


def rms_norm(x, scale, eps):
    """x / sqrt(mean(x^2) + eps) * scale over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def softmax(s):
    """Softmax over the last axis; -> (p, lse)."""
    m = s.max(axis=-1, keepdims=True)
    e = np.exp(s - m)
    z = e.sum(axis=-1, keepdims=True)
    return e / z, (m + np.log(z))[..., 0]


def rope_frequencies(rope, D):
    """Angle per position of each of the D/2 rotated pairs; llama3 scaling if ``rope["scaling"]`` is set."""
    theta, scaling = rope.get("theta", 10000.0), rope.get("scaling")
    out = []
    for i in range(D // 2):
        f = theta ** (-2.0 * i / D)
        if scaling is not None:
            factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
            original = scaling["original_max_position"]
            wavelength = 2.0 * math.pi / f
            if wavelength < original / high:
                pass
            elif wavelength > original / low:
                f = f / factor
            else:
                s = (original / wavelength - low) / (high - low)
                f = (1.0 - s) * f / factor + s * f
        out.append(f)
    return np.array(out)


def apply_rope(x, positions, rope):
    """Half-split rotation of x [T, ..., D]: element i pairs with element i + D/2, by angle position * f_i."""
    D = x.shape[-1]
    angle = np.asarray(positions, np.float64)[:, None] * rope_frequencies(rope, D)
    angle = angle.reshape(angle.shape[0], *[1] * (x.ndim - 2), D // 2)
    cos, sin = np.cos(angle), np.sin(angle)
    x1, x2 = x[..., : D // 2], x[..., D // 2 :]
    return np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)


def attend(q, k, v):
    """One query over all given keys. q [K,G,D], k and v [X,K,D] -> (o [K,G,D], p [K,G,X], lse [K,G])."""
    s = np.einsum("kgd,xkd->kgx", q, k) * q.shape[-1] ** -0.5
    p, lse = softmax(s)
    return np.einsum("kgx,xkd->kgd", p, v), p, lse


# --- A1: compression ----------------------------------------------------------------------------------------


def num_visible(t, l, d):
    """N(t): compressed entries visible at position t, i.e. the number of c >= 0 with c*d + l - 1 <= t."""
    return 0 if t + 1 < l else (t + 1 - l) // d + 1


def compress_block(x, cmp_fn, weights):
    """phi of one block x [K, l, D] -> [K, D]. ``weights``: dict with pe?, weight? | w1, b1, w2, b2, and pool_*."""
    if "pe" in weights:
        x = x + weights["pe"]
    if cmp_fn == "mean":
        return x.mean(axis=1)
    if cmp_fn == "weighted":
        return np.einsum("km,kmd->kd", weights["weight"], x)
    if cmp_fn == "pooled":
        scores = np.einsum("kmd,kdp->kpm", x, weights["pool_query"]) + weights["pool_bias"].swapaxes(1, 2)
        share = np.exp(scores - scores.max(axis=-1, keepdims=True))
        share /= share.sum(axis=-1, keepdims=True)
        pooled = (share @ x) * weights["pool_mix"]
        return np.einsum("km,kmd->kd", weights["weight"], x) + pooled.sum(axis=1)
    if cmp_fn == "linear":
        return np.einsum("kmd,kmde->ke", x, weights["weight"])
    if cmp_fn == "mlp":
        h = gelu(np.einsum("kmd,kmdh->kh", x, weights["w1"]) + weights["b1"])
        return np.einsum("kh,khe->ke", h, weights["w2"]) + weights["b2"]
    raise ValueError(f"unknown cmp_fn {cmp_fn!r}")


def compress(x, cmp_fn, weights, l, d):
    """All complete blocks of x [T, K, D]: entry c is phi(x[c*d : c*d + l]). -> [N(T-1), K, D]."""
    T, K, D = x.shape
    out = [
        compress_block(x[c * d : c * d + l].swapaxes(0, 1), cmp_fn, weights) for c in range(num_visible(T - 1, l, d))
    ]
    return np.stack(out) if out else np.zeros((0, K, D))


def compress_kv(nsa, rope, k_unroped, v, compress_k, compress_v):
    """Compressed keys (rotated as cmp_rope says) and values. -> (ck [N,K,D], cv [N,K,D])."""
    l, d, fn = nsa["kernel_size"], nsa["kernel_stride"], nsa["cmp_fn"]
    if nsa["cmp_rope"] == "pre":  # compress the rotated keys
        ck = compress(apply_rope(k_unroped, np.arange(len(k_unroped)), rope), fn, compress_k, l, d)
    else:
        ck = compress(k_unroped, fn, compress_k, l, d)
        if nsa["cmp_rope"] == "post":  # rotate entry c to the first position of its block
            ck = apply_rope(ck, np.arange(len(ck)) * d, rope)
    return ck, compress(v, fn, compress_v, l, d)


# --- A2: compressed attention -------------------------------------------------------------------------------


def compressed_attention(q, ck, cv, n):
    """One query over the first n entries -> (o [K,G,D], p [K,G,n], lse [K,G]); n = 0: o = 0, lse = -inf."""
    if n == 0:
        K, G, _ = q.shape
        return np.zeros_like(q), np.zeros((K, G, 0)), np.full((K, G), -np.inf)
    return attend(q, ck[:n], cv[:n])


# --- A3: block importance -----------------------------------------------------------------------------------


def block_importance(p, num_blocks, l, d, block):
    """S [K, num_blocks] from the compressed attention probabilities p [K, G, N] of one query.

    P[k,c] = sum over the group of p; S[k,j] = sum_{m<r} sum_{e<o} P[k, r*j + m + e - (o-1)], r = block/d, o
    = l/d, terms out of range being 0.
    """
    K, _, N = p.shape
    P = p.sum(axis=1)
    r, o = block // d, l // d
    S = np.zeros((K, num_blocks))
    for j in range(num_blocks):
        for m in range(r):
            for e in range(o):
                c = r * j + m + e - (o - 1)
                if 0 <= c < N:
                    S[:, j] += P[:, c]
    return S


# --- A4: selection ------------------------------------------------------------------------------------------


def forced_blocks(t, block, init, local):
    """F_t: the first ``init`` blocks and the last ``local`` ones ending with the query's own; causal only."""
    B = t // block
    return {j for j in range(B + 1) if j < init or j > B - local}


def select_blocks(S, t, nsa):
    """I_t of one KV head, ascending: the forced blocks and the best others by (-S, j). S [at least B+1]."""
    B = t // nsa["block_size"]
    forced = forced_blocks(t, nsa["block_size"], nsa["init_blocks"], nsa["local_blocks"])
    free = sorted((j for j in range(B + 1) if j not in forced), key=lambda j: (-S[j], j))
    count = min(num_selected(nsa), B + 1)
    return sorted([*sorted(forced), *free][:count])


# --- A5, A6: selected and window attention ------------------------------------------------------------------


def selected_attention(q, k, v, ids, t, block):
    """One query over the keys x <= t of its blocks ids[k], per KV head k. -> (o [K,G,D], lse [K,G])."""
    o, lse = np.zeros_like(q), np.zeros(q.shape[:2])
    for h in range(q.shape[0]):
        chosen = set(ids[h])
        keys = [x for x in range(t + 1) if x // block in chosen]
        o_h, _, lse_h = attend(q[h : h + 1], k[keys, h : h + 1], v[keys, h : h + 1])
        o[h], lse[h] = o_h[0], lse_h[0]
    return o, lse


def window_attention(q, k, v, t, window):
    """One query over the last ``window`` keys, its own included. -> (o [K,G,D], lse [K,G])."""
    first = max(0, t - window + 1)
    o, _, lse = attend(q, k[first : t + 1], v[first : t + 1])
    return o, lse


def dense_attention(q, k, v):
    """Causal attention: query t over all keys x <= t. q [T,K,G,D] (rotated), k, v [T,K,D] -> [T,K,G,D]."""
    return np.stack([attend(q[t], k[: t + 1], v[: t + 1])[0] for t in range(len(q))])


# --- A1-A7 together -----------------------------------------------------------------------------------------


def nsa_attention(nsa, rope, q_unroped, k_unroped, v, gates, compress_k=None, compress_v=None, selection=None):
    """NSA for a whole sequence at positions 0..T-1.

    Args: q_unroped [T,K,G,D], k_unroped and v [T,K,D], gates [T,K,G,3] after the sigmoid (order cmp, slc,
    win), compress_k / compress_v the compressor weights, selection the inherited ids of a reuse layer
    ([t][k] -> ids) or None.

    Returns a dict: out, cmp, slc, win [T,K,G,D]; cmp_lse, slc_lse, win_lse [T,K,G]; importance: per
    position [K, B+1]; selection: per position, per KV head, ascending ids.

    With cmp_rope "none" no rotation enters the compressed scores at all: both the query and the entries are
    unrotated.
    """
    nsa = nsa_settings(nsa)
    l, d, block = nsa["kernel_size"], nsa["kernel_stride"], nsa["block_size"]
    T, K, G, D = q_unroped.shape
    q, k = apply_rope(q_unroped, np.arange(T), rope), apply_rope(k_unroped, np.arange(T), rope)
    q_cmp = q_unroped if nsa["cmp_rope"] == "none" else q
    ck, cv = compress_kv(nsa, rope, k_unroped, v, compress_k or {}, compress_v or {})
    res = {name: np.zeros((T, K, G, D)) for name in ("cmp", "slc", "win")}
    res |= {name: np.zeros((T, K, G)) for name in ("cmp_lse", "slc_lse", "win_lse")}
    res |= {"importance": [], "selection": []}
    for t in range(T):
        res["cmp"][t], p, res["cmp_lse"][t] = compressed_attention(q_cmp[t], ck, cv, num_visible(t, l, d))
        S = block_importance(p, t // block + 1, l, d, block)
        ids = [select_blocks(S[h], t, nsa) for h in range(K)] if selection is None else selection[t]
        res["slc"][t], res["slc_lse"][t] = selected_attention(q[t], k, v, ids, t, block)
        res["win"][t], res["win_lse"][t] = window_attention(q[t], k, v, t, nsa["window_keys"])
        res["importance"].append(S)
        res["selection"].append(ids)
    res["out"] = gates[..., 0:1] * res["cmp"] + gates[..., 1:2] * res["slc"] + gates[..., 2:3] * res["win"]
    return res


# --- Llama --------------------------------------------------------------------------------------------------


def _sub(params, prefix):
    return {name[len(prefix) :]: x for name, x in params.items() if name.startswith(prefix)}


def forward(config, params, tokens, refresh=None):
    """The whole model on one token sequence, from scratch.

    Args: refresh, one bool per layer: False makes a layer inherit the selection of the nearest earlier
    refresh layer (same position, same KV head); None means all True. Layer 0 must be True.

    Returns a dict: logits [T,V]; hidden: num_layers + 1 residual streams [T,E], hidden[0] the embeddings
    and hidden[i] the un-normed stream after i blocks; selection: per layer, per position, per KV head,
    ascending block ids (None per layer when dense); importance: per layer, per position, S [K, B+1] (what a
    reuse layer would have ranked by; None when dense).
    """
    params = {name: np.asarray(x, np.float64) for name, x in params.items()}
    eps, rope, nsa = config["rms_eps"], config["rope"], config.get("nsa")
    K, G = config["num_kv_heads"], config["num_heads"] // config["num_kv_heads"]
    layers = config["num_layers"]
    refresh = (True,) * layers if refresh is None else tuple(refresh)
    if len(refresh) != layers or not refresh[0]:
        raise ValueError(f"refresh needs {layers} entries, the first True; got {refresh}")
    tokens = np.asarray(tokens)
    T = len(tokens)

    x = params["embed/embedding"][tokens]
    hidden, selections, importances = [x], [], []
    selection = None
    for i in range(layers):
        a = _sub(params, f"layers/{i}/attn/")
        h = rms_norm(x, params[f"layers/{i}/attn_norm/scale"], eps)
        qkv = np.tensordot(h, a["qkv/kernel"], axes=1) + a.get("qkv/bias", 0.0)
        q, k, v = qkv[:, :, :G], qkv[:, :, G], qkv[:, :, G + 1]
        if config.get("qk_norm"):
            q, k = rms_norm(q, a["q_norm/scale"], eps), rms_norm(k, a["k_norm/scale"], eps)
        if nsa is None:
            pos = np.arange(T)
            o = dense_attention(apply_rope(q, pos, rope), apply_rope(k, pos, rope), v)
            selections.append(None)
            importances.append(None)
        else:
            g = sigmoid(np.tensordot(h, a["gate/kernel"], axes=1) + a.get("gate/bias", 0.0))
            if g.ndim == 2:  # one gate triple per token, shared by all heads
                g = np.broadcast_to(g[:, None, None, :], (T, K, G, 3))
            inherited = None if refresh[i] else selection
            res = nsa_attention(nsa, rope, q, k, v, g, _sub(a, "compress_k/"), _sub(a, "compress_v/"), inherited)
            o, selection = res["out"], res["selection"]
            selections.append(selection)
            importances.append(res["importance"])
        x = x + np.tensordot(o, a["o/kernel"], axes=3) + a.get("o/bias", 0.0)

        m = _sub(params, f"layers/{i}/mlp/")
        h = rms_norm(x, params[f"layers/{i}/mlp_norm/scale"], eps)
        gate_up = np.tensordot(h, m["gate_up/kernel"], axes=1) + m.get("gate_up/bias", 0.0)
        x = x + (silu(gate_up[:, 0]) * gate_up[:, 1]) @ m["down/kernel"] + m.get("down/bias", 0.0)
        hidden.append(x)

    final = rms_norm(x, params["norm/scale"], eps)
    head = params["embed/embedding"].T if config.get("tie_embeddings") else params["lm_head/kernel"]
    return {"logits": final @ head, "hidden": hidden, "selection": selections, "importance": importances}


def greedy(config, params, prompt, steps, refresh=None, stop_ids=()):
    """New ids, each the argmax (lowest on ties) of a forward over everything so far; ends after a stop id."""
    tokens, out = list(prompt), []
    for _ in range(steps):
        out.append(int(np.argmax(forward(config, params, tokens, refresh)["logits"][-1])))
        tokens.append(out[-1])
        if out[-1] in stop_ids:
            break
    return out


# --- trees --------------------------------------------------------------------------------------------------


def tree_path(parents, node):
    """Nodes from the root to ``node``, both included. parents[i] < i, or negative at the root."""
    path = []
    while node >= 0:
        path.append(node)
        if parents[node] >= node:
            raise ValueError(f"node {node} precedes its parent {parents[node]}")
        node = parents[node]
    return path[::-1]


def tree_path_logits(config, params, prefix, tree_tokens, parents, refresh=None):
    """Logits [N,V] of each tree node: the last row of a from-scratch forward on prefix + its path."""
    out = []
    for node in range(len(tree_tokens)):
        path = [int(tree_tokens[i]) for i in tree_path(parents, node)]
        out.append(forward(config, params, [*map(int, prefix), *path], refresh)["logits"][-1])
    return np.stack(out)

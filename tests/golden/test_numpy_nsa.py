"""Self-checks of the numpy oracle: hand-computed values and identities that hold by definition."""
# ruff: noqa: E741  (`l` is the compression block length, as in the formulas)

import itertools
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import numpy_nsa as oracle  # noqa: E402

ROPE = {"theta": 10000.0, "scaling": None}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 64}


def make_config(nsa=None, **changes):
    config = {
        "vocab_size": 41,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_eps": 1e-5,
        "rope": ROPE,
        "tie_embeddings": True,
        "qkv_bias": False,
        "o_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "nsa": nsa,
    }
    return config | changes


def make_nsa(**changes):
    base = {"kernel_size": 4, "kernel_stride": 2, "block_size": 8, "n_selected": 4, "window_keys": 6}
    return base | changes


def random_tokens(T, seed=0):
    return np.random.default_rng(seed).integers(0, 41, T)


def random_qkv(T, K=2, G=2, D=8, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((T, K, G, D)), rng.standard_normal((T, K, D)), rng.standard_normal((T, K, D))


def close(actual, expected, atol=1e-12):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


# --- A1 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("l", "d"), [(32, 16), (4, 2), (4, 4), (6, 2), (1, 1)])
def test_num_visible_counts_the_entries_that_end_at_or_before_t(l, d):
    for t in range(-1, 100):
        assert oracle.num_visible(t, l, d) == sum(c * d + l - 1 <= t for c in range(200))


def test_num_visible_by_hand():
    assert [oracle.num_visible(t, 32, 16) for t in (0, 30, 31, 46, 47, 63, 64)] == [0, 0, 1, 1, 2, 3, 3]


@pytest.mark.parametrize("pe", [False, True])
@pytest.mark.parametrize("cmp_fn", ["mean", "weighted", "linear", "mlp", "pooled"])
def test_compress_equals_scalar_loops(cmp_fn, pe):
    T, K, D, l, d = 11, 2, 4, 4, 2
    rng = np.random.default_rng(1)
    x = rng.standard_normal((T, K, D))
    shapes = {
        "mean": {},
        "weighted": {"weight": (K, l)},
        "linear": {"weight": (K, l, D, D)},
        "pooled": {"weight": (K, l), "pool_query": (K, D, 3), "pool_bias": (K, l, 3), "pool_mix": (K, 3, D)},
        "mlp": {"w1": (K, l, D, 5), "b1": (K, 5), "w2": (K, 5, D), "b2": (K, D)},
    }[cmp_fn]
    w = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    if pe:
        w["pe"] = rng.standard_normal((K, l, D))
    out = oracle.compress(x, cmp_fn, w, l, d)
    assert out.shape == (4, K, D)
    for c, k, e in itertools.product(range(4), range(K), range(D)):
        rows = [[x[c * d + m, k, i] + (w["pe"][k, m, i] if pe else 0.0) for i in range(D)] for m in range(l)]
        if cmp_fn == "mean":
            expected = sum(rows[m][e] for m in range(l)) / l
        elif cmp_fn == "weighted":
            expected = sum(w["weight"][k, m] * rows[m][e] for m in range(l))
        elif cmp_fn == "linear":
            expected = sum(rows[m][i] * w["weight"][k, m, i, e] for m in range(l) for i in range(D))
        elif cmp_fn == "pooled":
            expected = sum(w["weight"][k, m] * rows[m][e] for m in range(l))
            for p in range(3):
                dot = [sum(rows[m][i] * w["pool_query"][k, i, p] for i in range(D)) for m in range(l)]
                raw = [math.exp(dot[m] + w["pool_bias"][k, m, p]) for m in range(l)]
                expected += w["pool_mix"][k, p, e] * sum(raw[m] * rows[m][e] for m in range(l)) / sum(raw)
        else:
            expected = w["b2"][k, e]
            for j in range(5):
                a = w["b1"][k, j] + sum(rows[m][i] * w["w1"][k, m, i, j] for m in range(l) for i in range(D))
                expected += w["w2"][k, j, e] * a * 0.5 * (1.0 + math.erf(a / math.sqrt(2.0)))
        close(out[c, k, e], expected)


def test_key_rotation_post_is_at_block_start_and_pre_is_per_row():
    _, k, v = random_qkv(10)
    l, d = 4, 2
    for mode in ("post", "pre", "none"):
        nsa = oracle.nsa_settings(make_nsa(cmp_rope=mode))
        ck, cv = oracle.compress_kv(nsa, ROPE, k, v, {}, {})
        for c in range(4):
            rows = k[c * d : c * d + l]
            if mode == "pre":
                expected = oracle.apply_rope(rows, range(c * d, c * d + l), ROPE).mean(axis=0)
            elif mode == "post":
                expected = oracle.apply_rope(rows.mean(axis=0)[None], [c * d], ROPE)[0]
            else:
                expected = rows.mean(axis=0)
            close(ck[c], expected)
            close(cv[c], v[c * d : c * d + l].mean(axis=0))


def test_rope_by_hand_and_relative():
    # D = 4, theta = 100: frequencies 1 and 0.1; element 0 pairs with 2, element 1 with 3.
    x = np.array([[1.0, 2.0, 3.0, 4.0]])
    c, s, c2, s2 = math.cos(5.0), math.sin(5.0), math.cos(0.5), math.sin(0.5)
    expected = [[c - 3 * s, 2 * c2 - 4 * s2, 3 * c + s, 4 * c2 + 2 * s2]]
    close(oracle.apply_rope(x, [5], {"theta": 100.0, "scaling": None}), expected)
    q, k = np.random.default_rng(0).standard_normal((2, 1, 8))
    dots = [np.sum(oracle.apply_rope(q, [7 + i], ROPE) * oracle.apply_rope(k, [3 + i], ROPE)) for i in (0, 50)]
    close(dots[0], dots[1])


def test_llama3_frequencies_by_hand():
    # D = 4, theta = 1e4: plain frequencies 1 and 0.01, wavelengths 6.28 and 628.3.
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 1000}
    smooth = (1000 / (2 * math.pi / 0.01) - 1.0) / 3.0  # 628.3 lies between 1000/4 and 1000/1
    expected = [1.0, (1 - smooth) * 0.01 / 8.0 + smooth * 0.01]
    close(oracle.rope_frequencies({"theta": 1e4, "scaling": scaling}, 4), expected)
    scaling["original_max_position"] = 500  # now 628.3 > 500: divided by the factor
    close(oracle.rope_frequencies({"theta": 1e4, "scaling": scaling}, 4), [1.0, 0.01 / 8.0])


# --- A3, A4 -------------------------------------------------------------------------------------------------


def test_importance_weights_for_32_16_64_by_hand():
    # Two heads; block 1 covers positions 64..127, so entries 3..7 (starting at 48, 64, 80, 96, 112) touch it.
    p = np.zeros((1, 2, 11))
    p[0, 0] = [0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.09, 0.10, 0.45]
    p[0, 1, 3] = 1.0
    S = oracle.block_importance(p, 3, 32, 16, 64)[0]
    s0 = 2 * 0.01 + 2 * 0.02 + 2 * 0.03 + 1 * (0.04 + 1.0)
    s1 = 1 * (0.04 + 1.0) + 2 * 0.05 + 2 * 0.06 + 2 * 0.07 + 1 * 0.08
    s2 = 1 * 0.08 + 2 * 0.09 + 2 * 0.10 + 2 * 0.45
    close(S, [s0, s1, s2])
    eye = np.eye(12)[None]  # one head per entry
    weights = np.stack([oracle.block_importance(eye[:, c : c + 1], 3, 32, 16, 64)[0] for c in range(12)], axis=1)
    assert weights[1].tolist() == [0, 0, 0, 1, 2, 2, 2, 1, 0, 0, 0, 0]
    assert weights[0].tolist() == [2, 2, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(("l", "d", "b"), [(32, 16, 64), (4, 4, 4), (6, 2, 6), (8, 2, 16), (4, 4, 12), (5, 5, 15)])
def test_importance_weight_is_overlap_over_stride(l, d, b):
    for c in range(20):
        p = np.zeros((1, 1, 20))
        p[0, 0, c] = 1.0
        S = oracle.block_importance(p, 40, l, d, b)[0]
        covered = range(c * d, c * d + l)
        close(S, [len(set(covered) & set(range(j * b, (j + 1) * b))) / d for j in range(40)])
        assert S.sum() == l // d


def test_importance_equals_group_mass_when_the_three_sizes_agree():
    p = np.random.default_rng(0).random((2, 3, 7))
    close(oracle.block_importance(p, 8, 4, 4, 4), np.pad(p.sum(axis=1), ((0, 0), (0, 1))))


def test_selection_by_hand_and_ties_go_to_the_lower_index():
    nsa = oracle.nsa_settings(make_nsa(n_selected=5, init_blocks=1, local_blocks=2))
    t = 9 * 8 + 3  # block 9
    assert oracle.forced_blocks(t, 8, 1, 2) == {0, 8, 9}
    S = np.array([0, 1, 2, 7, 2, 5, 7, 0, 0, 0, 99, 99], float)  # 10 and 11 are in the future
    assert oracle.select_blocks(S, t, nsa) == [0, 3, 6, 8, 9]
    S[6] = 5  # now 5 and 6 tie behind 3
    assert oracle.select_blocks(S, t, nsa) == [0, 3, 5, 8, 9]
    assert oracle.select_blocks(np.zeros(10), t, nsa) == [0, 1, 2, 8, 9]  # all tie
    assert oracle.select_blocks(np.zeros(10), 8 * 3, nsa) == [0, 1, 2, 3]  # fewer blocks than n
    assert oracle.select_blocks(np.zeros(10), 0, nsa) == [0]
    own_only = oracle.nsa_settings(make_nsa(n_selected=3, init_blocks=0, local_blocks=1))
    assert oracle.select_blocks(S, t, own_only) == [3, 5, 9]


def test_causal_blocks_without_mass_win_over_future_blocks():
    S = np.array([0.0, 0.0, 0.0, 9.0])
    nsa = oracle.nsa_settings(make_nsa(n_selected=3, init_blocks=0, local_blocks=1))
    assert oracle.select_blocks(S, 2 * 8, nsa) == [0, 1, 2]


def test_n_is_rounded_up_to_a_power_of_two_only_on_request():
    for n, rounded in [(1, 1), (2, 2), (3, 4), (5, 8), (16, 16)]:
        assert oracle.num_selected({"n_selected": n, "round_n_pow2": True}) == rounded
        assert oracle.num_selected({"n_selected": n, "round_n_pow2": False}) == n


# --- branches against dense attention -----------------------------------------------------------------------


def test_branches_equal_dense_when_they_cover_everything():
    T = 37
    q, k, v = random_qkv(T)
    gates = np.ones((T, 2, 2, 3))
    res = oracle.nsa_attention(make_nsa(n_selected=5, window_keys=T), ROPE, q, k, v, gates)
    pos = np.arange(T)
    dense = oracle.dense_attention(oracle.apply_rope(q, pos, ROPE), oracle.apply_rope(k, pos, ROPE), v)
    close(res["slc"], dense)
    close(res["win"], dense)
    close(res["slc_lse"], res["win_lse"])
    close(res["out"], res["cmp"] + 2 * dense)


def test_compressed_branch_equals_dense_for_blocks_of_one():
    T = 21
    q, k, v = random_qkv(T)
    nsa = {"kernel_size": 1, "kernel_stride": 1, "block_size": 4, "n_selected": 6}
    pos = np.arange(T)
    dense = oracle.dense_attention(oracle.apply_rope(q, pos, ROPE), oracle.apply_rope(k, pos, ROPE), v)
    for mode in ("post", "pre"):
        res = oracle.nsa_attention(nsa | {"cmp_rope": mode}, ROPE, q, k, v, np.ones((T, 2, 2, 3)))
        close(res["cmp"], dense)
    unrotated = oracle.nsa_attention(nsa | {"cmp_rope": "none"}, ROPE, q, k, v, np.ones((T, 2, 2, 3)))
    close(unrotated["cmp"], oracle.dense_attention(q, k, v))


def test_window_counts_its_own_key():
    q, k, v = random_qkv(9)
    o, _ = oracle.window_attention(q[8], k, v, 8, 1)
    close(o, np.broadcast_to(v[8][:, None], o.shape))
    o, lse = oracle.window_attention(q[8], k, v, 8, 3)
    s = np.einsum("kgd,xkd->kgx", q[8], k[6:9]) / math.sqrt(8)
    close(lse, np.log(np.exp(s).sum(axis=-1)))
    close(o, np.einsum("kgx,xkd->kgd", np.exp(s) / np.exp(s).sum(axis=-1, keepdims=True), v[6:9]))


def test_compressed_branch_is_zero_before_the_first_entry():
    q, k, v = random_qkv(6)
    res = oracle.nsa_attention(make_nsa(), ROPE, q, k, v, np.ones((6, 2, 2, 3)))
    assert not res["cmp"][:3].any()
    assert np.isneginf(res["cmp_lse"][:3]).all()
    close(res["cmp"][3], np.broadcast_to(v[:4].mean(axis=0)[:, None], (2, 2, 8)))  # one entry: its value


def test_selected_branch_reads_only_its_blocks():
    q, k, v = random_qkv(32)
    o, _ = oracle.selected_attention(q[30], k, v, [[0, 3], [1, 3]], 30, 8)
    for h, rows in enumerate(([*range(8), *range(24, 31)], [*range(8, 16), *range(24, 31)])):
        s = np.einsum("gd,xd->gx", q[30, h], k[rows, h]) / math.sqrt(8)
        p = np.exp(s) / np.exp(s).sum(axis=-1, keepdims=True)
        close(o[h], p @ v[rows, h])


# --- the model ----------------------------------------------------------------------------------------------

VARIANTS = [
    {"cmp_fn": fn, "cmp_pe": pe, "cmp_rope": rope, "gate_scope": scope, "gate_bias": bias}
    for (fn, pe), (rope, scope, bias) in itertools.product(
        itertools.product(("mean", "weighted", "linear", "mlp", "pooled"), ("none", "k", "kv")),
        (("post", "head", False), ("pre", "token", True), ("none", "head", True)),
    )
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(str(x) for x in v.values()))
def test_future_tokens_leave_past_logits_alone(variant):
    config = make_config(
        make_nsa(**variant), qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True, tie_embeddings=False
    )
    params = oracle.random_params(config, 3)
    tokens = random_tokens(48)
    other = tokens.copy()
    other[29:] = (other[29:] + 1 + np.arange(19)) % 41
    a, b = (oracle.forward(config, params, x) for x in (tokens, other))
    assert np.isfinite(a["logits"]).all()
    close(a["logits"][:29], b["logits"][:29])
    assert [s[:29] for s in a["selection"]] == [s[:29] for s in b["selection"]]
    assert np.abs(a["logits"][29:] - b["logits"][29:]).max() > 0.1
    close(oracle.forward(config, params, tokens[:29])["logits"], a["logits"][:29])


def test_every_parameter_is_read():
    config = make_config(
        make_nsa(cmp_fn="mlp", cmp_pe="kv", gate_bias=True, n_selected=3),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        qk_norm=True,
        tie_embeddings=False,
        rope={"theta": 10000.0, "scaling": LLAMA3},
    )
    params = oracle.random_params(config, 0)
    tokens = random_tokens(40)
    base = oracle.forward(config, params, tokens)["logits"]
    for name, x in params.items():
        changed = params | {name: x * 1.5}
        assert np.abs(oracle.forward(config, changed, tokens)["logits"] - base).max() > 1e-4, name


@pytest.mark.parametrize("branch", ["slc", "win"])
def test_model_equals_dense_model_when_gated_to_a_covering_branch(branch):
    T = 40
    covering = {"slc": {"n_selected": 5, "window_keys": 3}, "win": {"n_selected": 3, "window_keys": T}}[branch]
    config = make_config(make_nsa(**covering, gate_bias=True), qk_norm=True)
    params = oracle.random_params(config, 1)
    dense = config | {"nsa": None}
    dense_params = {name: params[name] for name in oracle.param_shapes(dense)}
    for i in range(2):
        params[f"layers/{i}/attn/gate/kernel"] *= 0
        params[f"layers/{i}/attn/gate/bias"][...] = -100.0
        params[f"layers/{i}/attn/gate/bias"][..., {"slc": 1, "win": 2}[branch]] = 100.0
    tokens = random_tokens(T)
    close(
        oracle.forward(config, params, tokens)["logits"],
        oracle.forward(dense, dense_params, tokens)["logits"],
        1e-10,
    )


def test_gate_columns_are_compressed_selected_window():
    T = 40
    q, k, v = random_qkv(T)
    gates = np.random.default_rng(9).random((T, 2, 2, 3))
    res = oracle.nsa_attention(make_nsa(n_selected=3), ROPE, q, k, v, gates)
    for t, h, g in itertools.product(range(T), range(2), range(2)):
        parts = [res[name][t, h, g] for name in ("cmp", "slc", "win")]
        close(res["out"][t, h, g], sum(gates[t, h, g, b] * parts[b] for b in range(3)))


def test_hidden_is_the_stream_before_the_final_norm():
    config = make_config(make_nsa(), num_layers=3)
    params = oracle.random_params(config, 8)
    tokens = random_tokens(20)
    res = oracle.forward(config, params, tokens)
    assert len(res["hidden"]) == 4
    close(res["hidden"][0], params["embed/embedding"][tokens])
    for i, x in enumerate(res["hidden"]):
        final = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * params["norm/scale"]
        shorter = oracle.forward(config | {"num_layers": i}, params, tokens) if i else None
        if shorter:
            close(shorter["logits"], final @ params["embed/embedding"].T)
    close(shorter["logits"], res["logits"])


def test_token_gate_is_a_head_gate_with_repeated_columns():
    token = make_config(make_nsa(gate_scope="token", gate_bias=True))
    params = oracle.random_params(token, 2)
    head = make_config(make_nsa(gate_scope="head", gate_bias=True))
    expanded = dict(params)
    for i in range(2):
        w, b = (f"layers/{i}/attn/gate/{leaf}" for leaf in ("kernel", "bias"))
        expanded[w] = np.broadcast_to(params[w][:, None, None, :], (16, 2, 2, 3))
        expanded[b] = np.broadcast_to(params[b], (2, 2, 3))
    tokens = random_tokens(30)
    close(oracle.forward(head, expanded, tokens)["logits"], oracle.forward(token, params, tokens)["logits"])


def test_query_heads_read_the_kv_head_of_their_group():
    # Two KV heads with equal weights must give what one KV head with all four query heads gives (dense).
    one = make_config(num_kv_heads=1)
    p1 = oracle.random_params(one, 4)
    two = make_config(num_kv_heads=2)
    p2 = {name: x for name, x in p1.items() if "/attn/" not in name}
    for i in range(2):
        w = p1[f"layers/{i}/attn/qkv/kernel"]  # [E, 1, 6, D]
        halves = [np.concatenate([w[:, 0, 2 * h : 2 * h + 2], w[:, 0, 4:]], axis=1) for h in range(2)]
        p2[f"layers/{i}/attn/qkv/kernel"] = np.stack(halves, axis=1)
        p2[f"layers/{i}/attn/o/kernel"] = p1[f"layers/{i}/attn/o/kernel"].reshape(2, 2, 8, 16)
    tokens = random_tokens(12)
    close(oracle.forward(two, p2, tokens)["logits"], oracle.forward(one, p1, tokens)["logits"])


@pytest.mark.parametrize("name", ["llama3_biases", "qwen2_qkv_bias_tied", "qwen3_qk_norm"])
def test_dense_model_equals_recorded_hugging_face_logits(name):
    with np.load(Path(__file__).parent / "tiny_hf.npz") as recorded:
        config = json.loads(str(recorded[f"{name}/config"]))
        params = oracle.random_params(config, int(recorded[f"{name}/seed"]))
        # If this differs, numpy's generator changed its stream: record again, nothing else is wrong.
        total = sum(float(np.abs(x).sum()) for x in params.values())
        np.testing.assert_allclose(total, recorded[f"{name}/params_sum"], rtol=1e-12)
        logits = oracle.forward(config, params, recorded[f"{name}/tokens"])["logits"]
        # Their rotary tables are float32 even in a float64 model: 1e-6 of the logits' scale, up to 22.
        np.testing.assert_allclose(logits, recorded[f"{name}/logits"], rtol=0, atol=5e-5)


def test_reuse_layer_inherits_from_the_nearest_earlier_refresh_layer():
    config = make_config(make_nsa(n_selected=3, init_blocks=1, local_blocks=1), num_layers=4)
    params = oracle.random_params(config, 5)
    tokens = random_tokens(64)
    full = oracle.forward(config, params, tokens)
    mixed = oracle.forward(config, params, tokens, refresh=(True, False, True, False))
    assert mixed["selection"][1] == mixed["selection"][0] == full["selection"][0]
    assert mixed["selection"][3] == mixed["selection"][2]
    assert mixed["selection"][2] != mixed["selection"][0]
    assert full["selection"][1] != full["selection"][0]
    close(mixed["hidden"][1], full["hidden"][1])
    assert np.abs(mixed["hidden"][2] - full["hidden"][2]).max() > 1e-4
    close(oracle.forward(config, params, tokens, refresh=[True] * 4)["logits"], full["logits"])
    # The inheriting layer keeps its own compressed and window branches: substitute its selection by hand.
    once = oracle.forward(config | {"num_layers": 2}, params, tokens, refresh=(True, False))
    close(once["hidden"][2], mixed["hidden"][2])
    for bad in ((False, True, True, True), (True, True)):
        with pytest.raises(ValueError, match="refresh"):
            oracle.forward(config, params, tokens, refresh=bad)


def test_inherited_selection_replaces_only_the_selected_branch():
    T = 40
    q, k, v = random_qkv(T)
    nsa = make_nsa(n_selected=2, init_blocks=0, local_blocks=1)
    own = oracle.nsa_attention(nsa, ROPE, q, k, v, np.ones((T, 2, 2, 3)))
    ids = [[sorted({0, t // 8})] * 2 for t in range(T)]
    given = oracle.nsa_attention(nsa, ROPE, q, k, v, np.ones((T, 2, 2, 3)), selection=ids)
    assert given["selection"] == ids
    close(given["cmp"], own["cmp"])
    close(given["win"], own["win"])
    assert np.abs(given["slc"] - own["slc"]).max() > 1e-3


def test_greedy_appends_the_argmax_and_stops():
    config = make_config(make_nsa())
    params = oracle.random_params(config, 6)
    prompt = [1, 2, 3]
    out = oracle.greedy(config, params, prompt, 8)
    assert len(out) == 8
    logits = oracle.forward(config, params, prompt + out)["logits"]
    assert logits[2:-1].argmax(axis=-1).tolist() == out
    stop = out[4]
    assert oracle.greedy(config, params, prompt, 8, stop_ids=(stop,)) == out[: out.index(stop) + 1]


def test_tree_nodes_see_their_path_only():
    config = make_config(make_nsa(n_selected=3))
    params = oracle.random_params(config, 7)
    prefix = random_tokens(29)
    tokens, parents = [5, 6, 7, 8, 9, 10], [-1, 0, 0, 1, 1, 3]
    assert oracle.tree_path(parents, 5) == [0, 1, 3, 5]
    logits = oracle.tree_path_logits(config, params, prefix, tokens, parents)
    for path in ([0, 1, 3, 5], [0, 2], [0, 1, 4]):
        full = oracle.forward(config, params, [*prefix, *(tokens[i] for i in path)])["logits"][29:]
        close(logits[path], full)
    chain = oracle.tree_path_logits(config, params, prefix, tokens, [-1, 0, 1, 2, 3, 4])
    close(chain, oracle.forward(config, params, [*prefix, *tokens])["logits"][29:])
    with pytest.raises(ValueError, match="precedes"):
        oracle.tree_path(parents=[-1, 2, 1], node=2)


@pytest.mark.parametrize(
    "bad",
    [
        {"kernel_stride": 3},
        {"kernel_size": 16},
        {"n_selected": 2},
        {"window_keys": 0},
        {"cmp_visible": "lt"},
        {"score": "logit"},
        {"group_reduce": "mean"},
        {"branch_kv": "separate"},
        {"rope_layout": "interleaved"},
        {"cmp_fn": "max"},
        {"no_such_field": 1},
    ],
)
def test_unsupported_settings_are_refused(bad):
    with pytest.raises(ValueError):
        oracle.nsa_settings(make_nsa(**bad))

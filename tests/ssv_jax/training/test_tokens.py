"""Token sets: files, tokenising, and batches that depend on seed and step alone."""

from __future__ import annotations

import json
import lzma

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from ssv_jax.tokenizer import Tokenizer
from ssv_jax.training import tokens
from ssv_jax.training.tokens import DataError, Mixture, TokenSet, from_documents, load, read_data, save, tokenize_files

STRIDE = 1000


def make_set(sizes: list[int], base: int = 0, flags: bool = False) -> TokenSet:
    """Token d * STRIDE + i + base is the i-th of document d, so a token tells where it comes from."""
    documents = [np.arange(size) + d * STRIDE + base for d, size in enumerate(sizes)]
    return from_documents(documents, 2**17, [document % 3 == 0 for document in documents] if flags else None)


def byte_tokenizer(**options) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    built = tokenizers.Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    return Tokenizer(built, **options)


# Sets and their files


@pytest.mark.parametrize("suffix", [".npz", ".npz.xz"])
@pytest.mark.parametrize("flags", [False, True])
def test_save_and_load(tmp_path, suffix, flags):
    original = make_set([5, 1, 900, 13], flags=flags)
    path = tmp_path / f"deep/set{suffix}"
    save(path, original)
    again = load(path)
    np.testing.assert_array_equal(again.tokens, original.tokens)
    np.testing.assert_array_equal(again.starts, original.starts)
    assert again.tokens.dtype == original.tokens.dtype and again.starts.dtype == np.int64
    if flags:
        np.testing.assert_array_equal(again.supervised, original.supervised)
    else:
        assert again.supervised is None
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_files_are_compact(tmp_path):
    documents = [np.random.default_rng(d).integers(0, 40, 300) for d in range(200)]
    token_set = from_documents(documents, 49152, [np.ones(300, bool)] * 200)
    save(tmp_path / "a.npz", token_set)
    save(tmp_path / "a.npz.xz", token_set)
    assert (tmp_path / "a.npz").stat().st_size < 60000 * (2 + 1 / 8) + 200 * 4 + 2000
    assert (tmp_path / "a.npz.xz").stat().st_size < 60000 * 0.9


@pytest.mark.parametrize(("vocab", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_dtype_follows_the_vocabulary(vocab, dtype):
    token_set = from_documents([[1, 2], [], [vocab - 1]], vocab)
    assert token_set.tokens.dtype == dtype
    assert token_set.documents == 2
    assert token_set.document(1).tolist() == [vocab - 1]
    with pytest.raises(DataError, match=f"token id {vocab - 1}, but the vocabulary has 100"):
        token_set.check_vocab(100)


@pytest.mark.parametrize(
    ("documents", "flags", "message"),
    [
        ([], None, "none holds a token"),
        ([[], []], None, "none holds a token"),
        ([[1], [3, 300]], None, "document 1: token ids run from 3 to 300, outside a vocabulary of 300"),
        ([[1, -2]], None, "from -2 to 1"),
        ([[1, 2]], [[True]], "document 0: 2 tokens but 1 supervised flags"),
    ],
)
def test_unusable_documents(documents, flags, message):
    with pytest.raises(DataError, match=message):
        from_documents(documents, 300, flags)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"starts": np.array([0, 5, 3, 9])}, "starts must rise from 0"),
        ({"starts": np.array([1, 9])}, "starts must rise from 0"),
        ({"starts": np.array([0, 8])}, "starts must rise from 0"),
        ({"starts": np.array([0])}, "starts must rise from 0"),
        ({"tokens": np.arange(9)}, "tokens must be a one-dimensional uint16 or uint32 array, got int64"),
        ({"tokens": np.zeros((3, 3), np.uint16)}, "one-dimensional"),
        ({"supervised": np.ones(8, bool)}, "9 tokens but 8 supervised flags"),
        ({"tokens": np.zeros(0, np.uint16)}, "holds no tokens"),
    ],
)
def test_inconsistent_sets(changes, message):
    fields = {"tokens": np.arange(9, dtype=np.uint16), "starts": np.array([0, 4, 9])}
    with pytest.raises(DataError, match=message):
        TokenSet(**(fields | changes))


def damage(path, kind):
    data = path.read_bytes()
    if kind == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif kind == "text":
        path.write_text("not a token set")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "flipped":
        path.write_bytes(data[:80] + bytes(b ^ 255 for b in data[80:200]) + data[200:])


@pytest.mark.parametrize("suffix", [".npz", ".npz.xz"])
@pytest.mark.parametrize("kind", ["cut", "text", "empty", "flipped"])
def test_damaged_files(tmp_path, suffix, kind):
    path = tmp_path / f"set{suffix}"
    save(path, make_set([500, 20]))
    damage(path, kind)
    with pytest.raises(DataError, match=r"set\.npz.*(again)"):
        load(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": np.arange(4, dtype=np.uint16)}, "format, lengths missing"),
        ({"format": 9, "tokens": np.arange(4, dtype=np.uint16), "lengths": np.array([4], np.uint32)}, "format 9"),
        ({"format": 1, "tokens": np.arange(4, dtype=np.uint16), "lengths": np.array([5], np.uint32)}, "add up"),
        ({"format": 1, "tokens": np.arange(4, dtype=np.uint16), "lengths": np.array([-1, 5])}, "add up"),
        ({"format": 1, "tokens": np.arange(4.0), "lengths": np.array([4], np.uint32)}, "tokens must be"),
        ({"format": 1, "tokens": np.array([None]), "lengths": np.array([1], np.uint32)}, "damaged, or no token set"),
    ],
)
def test_files_of_another_kind(tmp_path, fields, message):
    np.savez(tmp_path / "x.npz", **fields)
    with pytest.raises(DataError, match=message):
        load(tmp_path / "x.npz")


def test_names_of_files(tmp_path):
    with pytest.raises(DataError, match="ends in .npz or .npz.xz"):
        save(tmp_path / "x.bin", make_set([4]))
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "absent.npz")
    with lzma.open(tmp_path / "x.npz.xz", "w") as file:
        file.write(b"hello")
    with pytest.raises(DataError, match="damaged"):
        load(tmp_path / "x.npz.xz")


# Text


def test_tokenize_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "_REPORT_SECONDS", 0.0)
    (tmp_path / "texts/inner").mkdir(parents=True)
    (tmp_path / "texts/b.md").write_text("Zürich")
    (tmp_path / "texts/a.txt").write_bytes(b"\xef\xbb\xbfab")
    (tmp_path / "texts/inner/c.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "id": 3}\n{"text": ""}\n')
    (tmp_path / "texts/skipped.bin").write_bytes(b"\xff\xfe")
    (tmp_path / "texts/empty.txt").touch()
    tokenizer, lines = byte_tokenizer(), []
    token_set = tokenize_files([tmp_path / "texts"], tokenizer, lines.append)
    documents = [tokenizer.decode(token_set.document(i).tolist()) for i in range(token_set.documents)]
    assert documents == ["ab", "Zürich", "one", "two"]
    assert token_set.tokens.dtype == np.uint16
    assert lines and all(line.startswith("tokenised ") for line in lines)
    named = tokenize_files([tmp_path / "texts/b.md", tmp_path / "texts/b.md"], tokenizer)
    assert named.documents == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", b"", "no text to train on"),
        ("x.txt", b"ok \xff", r"x\.txt: not UTF-8 text \(byte 3\)"),
        ("x.jsonl", b'{"text": "a"}\n{"text"\n', r"x\.jsonl, line 2: not JSON"),
        ("x.jsonl", b'{"content": "a"}\n', 'line 1: expected an object with a string "text"'),
        ("x.jsonl", b"[1]\n", "line 1: expected an object"),
        ("x.jsonl", b'{"text": 3}\n', "line 1: expected an object"),
        ("x.jsonl", b"\xff\n", "not UTF-8"),
    ],
)
def test_unusable_text(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        tokenize_files([tmp_path / name], byte_tokenizer())


def test_no_text_at_all(tmp_path):
    with pytest.raises(DataError, match="no text files in it"):
        tokenize_files([tmp_path], byte_tokenizer())
    with pytest.raises(DataError, match="none given"):
        tokenize_files([], byte_tokenizer())
    with pytest.raises(FileNotFoundError, match="absent"):
        tokenize_files([tmp_path / "absent.txt"], byte_tokenizer())


def test_read_data(tmp_path):
    save(
        tmp_path / "a.npz.xz",
        make_set([50, 20]).__class__(tokens=np.arange(70, dtype=np.uint16), starts=np.array([0, 70])),
    )
    (tmp_path / "b=1.txt").write_text("hello there")
    lines = []
    sets, weights = read_data([str(tmp_path / "a.npz.xz"), str(tmp_path / "b=1.txt")], byte_tokenizer(), lines.append)
    assert weights == (70.0, 11.0)
    assert [len(s.tokens) for s in sets] == [70, 11]
    assert any("70 tokens in 1 documents" in line for line in lines)
    _, weights = read_data([f"{tmp_path}/a.npz.xz=0.3", f"{tmp_path}/b=1.txt=2"], byte_tokenizer())
    assert weights == (0.3, 2.0)


@pytest.mark.parametrize(
    ("paths", "error", "message"),
    [
        ([], DataError, "no path given"),
        (["{}/a.npz=0.3", "{}/a.npz"], DataError, "has no weight"),
        (["{}/a.npz=0"], DataError, "positive number"),
        (["{}/a.npz=nan"], DataError, "positive number"),
        (["{}/a.npz=much"], DataError, "expected PATH=WEIGHT"),
        (["{}/c.npz"], FileNotFoundError, "no such file"),
        (["{}/c.txt=1"], FileNotFoundError, "no such file"),
        (["{}/a.npz"], DataError, "token id 500, but the vocabulary has 256"),
    ],
)
def test_unusable_data_arguments(tmp_path, paths, error, message):
    save(tmp_path / "a.npz", from_documents([[1, 500]], 1000))
    with pytest.raises(error, match=message):
        read_data([path.format(tmp_path) for path in paths], byte_tokenizer())


# Batches


def check_rows(mixture: Mixture, steps: range) -> None:
    """Each row is made of runs of real tokens of one set; a run of a document that fits is whole unless it is last."""
    owners = [{int(t): (n, d) for d in range(s.documents) for t in s.document(d)} for n, s in enumerate(mixture.sets)]
    for step in steps:
        batch, supervised = mixture.batch_at(step)
        assert batch.shape == supervised.shape == (mixture.batch, mixture.length)
        assert batch.dtype == np.int32 and supervised.dtype == np.bool_
        for row, flags in zip(batch.tolist(), supervised.tolist(), strict=True):
            number = next(n for n, owner in enumerate(owners) if row[0] in owner)
            token_set, owner = mixture.sets[number], owners[number]
            begins = [i for i, t in enumerate(row) if i == 0 or t != row[i - 1] + 1 or owner[t] != owner[row[i - 1]]]
            for begin, end in zip(begins, [*begins[1:], len(row)], strict=True):
                document = token_set.document(owner[row[begin]][1])
                run = np.asarray(row[begin:end])
                offset = int(np.flatnonzero(document == run[0])[0])
                np.testing.assert_array_equal(run, document[offset : offset + len(run)])
                if len(document) <= mixture.length:
                    assert offset == 0
                    assert len(run) == len(document) or end == len(row)
                elif end < len(row):
                    assert offset + len(run) == len(document)
                expected = np.ones(len(run), bool) if token_set.supervised is None else run % 3 == 0
                expected[0] = False
                assert flags[begin:end] == expected.tolist()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is slow
@given(
    sizes=st.lists(st.integers(2, 90), min_size=1, max_size=8),
    length=st.integers(2, 40),
    flags=st.booleans(),
    seed=st.integers(0, 2**40),
)
def test_rows_are_whole_consecutive_documents(sizes, length, flags, seed):
    sets = (make_set([*sizes, 7], flags=flags), make_set([300, 3], base=50000))
    check_rows(Mixture(sets=sets, weights=(1.0, 1.0), length=length, batch=3, seed=seed), range(6))


def test_batches_depend_on_seed_and_step_alone():
    sets = (make_set([40] * 30), make_set([900], base=50000))

    def mixture(seed=5):
        return Mixture(sets=sets, weights=(2.0, 1.0), length=64, batch=4, seed=seed)

    straight = mixture()
    run = [straight.batch_at(step) for step in range(60)]
    resumed, jumping = mixture(), mixture()
    for step in range(40, 60):
        np.testing.assert_array_equal(resumed.batch_at(step)[0], run[step][0])
    for step in (59, 3, 58, 0, 3):
        for ours, theirs in zip(jumping.batch_at(step), run[step], strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert any((mixture(6).batch_at(step)[0] != run[step][0]).any() for step in range(3))
    assert len({tokens_.tobytes() for tokens_, _ in run}) == 60


def test_a_longer_batch_takes_the_same_rows():
    sets = (make_set([40] * 30),)
    narrow = Mixture(sets=sets, weights=(1.0,), length=32, batch=2, seed=1)
    wide = Mixture(sets=sets, weights=(1.0,), length=32, batch=4, seed=1)
    np.testing.assert_array_equal(np.concatenate([narrow.batch_at(6)[0], narrow.batch_at(7)[0]]), wide.batch_at(3)[0])


@pytest.mark.parametrize("weights", [(3.0, 1.0, 1.0), (35.0, 25.0, 20.0), (1e6, 1.0, 1.0)])
def test_weights_are_honoured(weights):
    sets = tuple(make_set([50] * 4, base=10000 * n) for n in range(3))
    mixture = Mixture(sets=sets, weights=weights, length=16, batch=10, seed=0)
    first = np.concatenate([mixture.batch_at(step)[0][:, 0] for step in range(100)])
    counts = np.bincount(first // 10000, minlength=3)
    exact = np.asarray(weights) / sum(weights) * 1000
    assert counts.sum() == 1000
    assert (counts >= 1).all()
    assert (np.abs(counts - exact) <= 2).all()


def test_a_pass_covers_long_documents_at_changing_offsets():
    token_set = make_set([950])
    mixture = Mixture(sets=(token_set,), weights=(1.0,), length=100, batch=10, seed=2)
    seen = [mixture.batch_at(epoch)[0] for epoch in range(20)]
    offsets = {int(row[0]) for batch in seen for row in batch}
    assert len(offsets) > 50 and 0 in offsets
    whole = [set(range(950)) <= set(batch.ravel().tolist()) for batch in seen]
    assert any(whole)
    assert set(range(950)) == set(np.concatenate(seen).ravel().tolist())
    orders = [batch[:, 0].tolist() for batch, complete in zip(seen, whole, strict=True) if complete]
    assert any(order != sorted(order) for order in orders)


def test_a_set_shorter_than_a_row_repeats():
    mixture = Mixture(sets=(from_documents([[7, 8, 9]], 100),), weights=(1.0,), length=8, batch=1, seed=0)
    batch, supervised = mixture.batch_at(123456)
    assert batch[0].tolist() == [7, 8, 9, 7, 8, 9, 7, 8]
    assert supervised[0].tolist() == [False, True, True, False, True, True, False, True]


def test_every_document_comes_up():
    mixture = Mixture(sets=(make_set([3, 60, 11, 29, 30, 31]),), weights=(1.0,), length=30, batch=4, seed=9)
    seen = set(np.concatenate([mixture.batch_at(step)[0].ravel() for step in range(40)]).tolist())
    assert seen == set(mixture.sets[0].tokens.tolist())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sets": (), "weights": ()}, "at least one set"),
        ({"weights": (1.0, 2.0)}, "2 for 1 sets"),
        ({"weights": (0.0,)}, "positive"),
        ({"weights": (float("nan"),)}, "positive"),
        ({"length": 1}, "length: expected at least 2, got 1"),
        ({"batch": 0}, "batch: expected at least 1, got 0"),
        ({"seed": -1}, "seed: expected at least 0, got -1"),
        ({"sets": (make_set([1, 1]),)}, "no token to predict"),
        ({"sets": (from_documents([[1, 2]], 9, [[True, False]]),)}, "no token to predict"),
    ],
)
def test_unusable_mixtures(changes, message):
    fields = {"sets": (make_set([9]),), "weights": (1.0,), "length": 4, "batch": 1, "seed": 0}
    with pytest.raises(DataError, match=message):
        Mixture(**(fields | changes))


def test_negative_step():
    with pytest.raises(DataError, match="step: expected 0 or more"):
        Mixture(sets=(make_set([9]),), weights=(1.0,), length=4, batch=1, seed=0).batch_at(-1)


def test_beginning_of_sequence(tmp_path):
    built = byte_tokenizer()._backend
    built.add_special_tokens(["<s>"])
    bos = built.token_to_id("<s>")
    built.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ("one", "two")))
    token_set = tokenize_files([tmp_path / "a.jsonl"], Tokenizer(built, bos_id=bos))
    assert [int(token_set.document(i)[0]) for i in range(2)] == [bos, bos]

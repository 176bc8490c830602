"""The engine: budgets, stops, seeds, streams, contexts, and nothing recompiled for another prompt."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssv_jax import ContextLengthError, Engine, NumericsError, PrecisionClass, Strategy, TreeSpec, UsageError
from ssv_jax.models.eagle3 import random_params as eagle3_params
from ssv_jax.models.eagle3_config import Eagle3Config, default_taps
from ssv_jax.models.eagle3_loading import export_eagle3
from tests.ssv_jax.tiny import CONFIG, DENSE, write_checkpoint

PROMPT = "abc abc abc abc "


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model") / "nsa")


@pytest.fixture(scope="module")
def engine(directory):
    return Engine.load(directory)


@pytest.fixture(scope="module")
def speculative(directory):
    return Engine.load(directory, strategy=Strategy(draft="ngram", group=2))


def test_budget_is_exact(engine):
    """One token too many or too few, at any budget; the first token comes from prefill."""
    longest = engine.generate(PROMPT, max_new_tokens=19, ignore_eos=True)
    for budget in (1, 2, 7, 8, 9, 19):
        short = engine.generate(PROMPT, max_new_tokens=budget, ignore_eos=True)
        assert short.tokens == longest.tokens[:budget]
        assert short.finish_reason == "length"


def test_speculation_changes_no_token(engine, speculative):
    """Drafted text that differs from plain text."""
    want = engine.generate(PROMPT, max_new_tokens=40, ignore_eos=True)
    got = speculative.generate(PROMPT, max_new_tokens=40, ignore_eos=True)
    assert got.tokens == want.tokens
    assert got.stats["drafted"] > 0
    rounds = got.stats["per_round"]
    assert sum(rounds["drafted"]) == got.stats["drafted"]
    assert sum(rounds["accepted"]) == got.stats["accepted"]
    assert sum(rounds["emitted"]) == len(got.tokens) - 1
    assert len(rounds["emitted"]) == got.stats["rounds"]
    assert got.stats["precision"] == "lossless"
    assert got.stats["overlap"] is None  # costs time: on request


def test_stop_string_cuts_text_and_tokens(engine):
    """Text after a stop string, or a stop string split over tokens that is missed."""
    options = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 1.0, "seed": 5}
    free = engine.generate(PROMPT, **options)
    at = next(i for i in range(8, len(free.text) - 2) if free.text.find(free.text[i : i + 2]) == i)
    stop = free.text[at : at + 2]
    cut = engine.generate(PROMPT, stop=("never appears", stop), **options)
    assert cut.text == free.text[:at]
    assert cut.finish_reason == "stop_string"
    assert cut.tokens == free.tokens[: len(cut.tokens)]
    assert len(cut.tokens) < len(free.tokens)
    pieces = list(engine.stream(PROMPT, stop=(stop,), **options))
    assert "".join(piece.text for piece in pieces) == free.text[:at]


def test_end_token_is_emitted_and_ends_the_text(engine):
    """Junk after the end token, or an end token shown as text."""
    free = engine.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
    tokenizer = engine.tokenizer
    original, ended = tokenizer.eos_ids, free.tokens[11]
    first = free.tokens.index(ended)
    try:
        tokenizer.eos_ids = (ended,)
        result = engine.generate(PROMPT, max_new_tokens=30)
    finally:
        tokenizer.eos_ids = original
    assert result.tokens == free.tokens[: first + 1]
    assert result.finish_reason == "stop"


def test_stream_equals_generate(engine):
    """A stream that loses or repeats text or tokens."""
    whole = engine.generate(PROMPT, max_new_tokens=21, temperature=1.0, seed=3)
    pieces = list(engine.stream(PROMPT, max_new_tokens=21, temperature=1.0, seed=3))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert tuple(token for piece in pieces for token in piece.tokens) == whole.tokens


def test_seed_decides_samples(engine):
    """Samples that cannot be repeated, or that ignore the seed."""
    options = {"max_new_tokens": 20, "temperature": 1.5, "ignore_eos": True}
    one = engine.generate(PROMPT, seed=1, **options)
    assert engine.generate(PROMPT, seed=1, **options).tokens == one.tokens
    assert engine.generate(PROMPT, seed=2, **options).tokens != one.tokens
    assert (
        engine.generate(PROMPT, seed=1, **(options | {"top_k": 1})).tokens
        == engine.generate(PROMPT, max_new_tokens=20, ignore_eos=True).tokens
    )


def test_context_limit(engine):
    """A crash or silent damage where the context ends."""
    ids = [5] * 510
    full = engine.generate(ids, max_new_tokens=50, ignore_eos=True)
    assert full.finish_reason == "context"
    assert len(full.prompt_ids) + len(full.tokens) == CONFIG.max_position + 1
    assert len(engine.generate([5] * 512, max_new_tokens=5, ignore_eos=True).tokens) == 1
    with pytest.raises(ContextLengthError, match="513 tokens.*context holds 512.*shorten it by at least 1"):
        engine.generate([5] * 513)


def test_nothing_recompiles_after_warm_up(speculative):
    """A compilation for every prompt: minutes lost by users."""
    speculative.generate(PROMPT, max_new_tokens=30)
    compiled = speculative.variants.compilations
    for length in (17, 18, 30, 49):
        speculative.generate([7] * length, max_new_tokens=30, seed=length)
    assert speculative.variants.compilations == compiled + 1  # the prefill size of longer prompts, once


def test_chat_uses_the_template(engine):
    """A conversation flattened in another form than the model was trained on."""
    ids = engine.encode_chat([{"role": "user", "content": "hi"}])
    assert engine.tokenizer.decode(ids) == "<|user|>hi\n<|assistant|>"
    result = engine.chat([{"role": "user", "content": "hi"}], max_new_tokens=4)
    assert result.prompt_ids == tuple(ids)


def test_continuing_a_cut_turn_equals_one_long_turn(speculative):
    """State that runs ahead of the text that was returned."""
    whole = speculative.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
    for cut in (5, 8, 13):
        first = speculative.generate(PROMPT, max_new_tokens=cut, ignore_eos=True)
        rest = speculative.generate(first.prompt_ids + first.tokens, max_new_tokens=24 - cut, ignore_eos=True)
        assert first.tokens + rest.tokens == whole.tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"top_p": 0.0}, "top_p must be"),
        ({"top_k": -1}, "top_k must be"),
        ({"seed": -1}, "seed must be"),
        ({"stop": ("",)}, "stop must be"),
    ],
)
def test_bad_options_are_refused(engine, options, message):
    """A traceback from deep inside, or a silent default."""
    with pytest.raises(UsageError, match=message):
        engine.generate(PROMPT, **options)


def test_bad_prompts_are_refused(engine):
    """An out-of-range id would read another token's embedding."""
    with pytest.raises(UsageError, match="prompt is empty"):
        engine.generate("")
    with pytest.raises(UsageError, match="prompt is empty"):
        engine.generate([])
    with pytest.raises(UsageError, match="token 300 is outside the vocabulary"):
        engine.generate([1, 300])
    with pytest.raises(UsageError, match="token -1 is outside"):
        engine.generate([-1])


def test_without_a_tokenizer_ids_work_and_text_does_not(tmp_path):
    """A directory of weights alone must still serve token ids."""
    engine = Engine.load(write_checkpoint(tmp_path / "bare", tokenizer=False))
    result = engine.generate([1, 2, 3], max_new_tokens=3)
    assert len(result.tokens) == 3
    assert result.text is None
    with pytest.raises(UsageError, match="no tokenizer"):
        engine.generate("text")
    with pytest.raises(UsageError, match="stop strings need a tokenizer"):
        engine.generate([1], stop=("x",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": Strategy(refresh_every=2)}, "only lossless is allowed"),
        (
            {"strategy": Strategy(group=2, grouping="shared"), "precision": PrecisionClass.STRICT},
            "only strict is allowed",
        ),
        ({"strategy": Strategy(refresh_every=3), "precision": PrecisionClass.STRICT}, "exceeds the model's 2 layers"),
        ({"strategy": Strategy(draft="eagle3")}, "needs a draft model"),
        ({"draft_model": "somewhere", "strategy": Strategy(draft="ngram")}, "has no network"),
        ({"attention": "dense", "nsa_config": CONFIG.nsa}, "exclude each other"),
        ({"dtype": "float64"}, "dtype must be"),
        ({"tensor": 64}, "needs 64 devices"),
    ],
)
def test_bad_engines_are_refused(directory, options, message):
    """Nonsense that is only noticed after minutes of loading and compiling."""
    with pytest.raises(UsageError, match=message):
        Engine.load(directory, **options)


def test_bad_strategies_are_refused():
    """Trees and groups that cannot exist."""
    for options, message in (
        ({"draft": "medusa"}, "known: auto, none, ngram, eagle3"),
        ({"group": 0}, "group must be"),
        ({"refresh_every": 0}, "refresh-every must be >= 1"),
        ({"tree": TreeSpec(depth=2, topk=1, nodes=3)}, "needs a drafter"),
        ({"draft": "ngram", "tree": TreeSpec(depth=2, topk=2, nodes=6)}, "exceeds the pool"),
    ):
        with pytest.raises(ValueError, match=message):
            Strategy(**options)
    with pytest.raises(ValueError, match="cannot hold a path"):
        TreeSpec(depth=9, topk=2, nodes=4)


def test_dense_models_refuse_block_options(tmp_path):
    """Grouping does nothing for dense attention; silence would mislead."""
    where = write_checkpoint(tmp_path / "dense", config=DENSE)
    with pytest.raises(UsageError, match="attention is dense"):
        Engine.load(where, strategy=Strategy(group=2))


def test_strict_class_is_reported(directory):
    """A run with reuse layers must not call itself lossless."""
    engine = Engine.load(directory, strategy=Strategy(refresh_every=2), precision=PrecisionClass.APPROX)
    assert engine.generate(PROMPT, max_new_tokens=2).stats["precision"] == "strict"


def test_shared_grouping_runs_and_says_approx(directory):
    """The approximate class, end to end."""
    strategy = Strategy(draft="ngram", group=4, grouping="shared")
    engine = Engine.load(directory, strategy=strategy, precision=PrecisionClass.APPROX)
    result = engine.generate(PROMPT, max_new_tokens=20, ignore_eos=True)
    assert len(result.tokens) == 20
    assert result.stats["precision"] == "approx"
    assert result.stats["overlap"] is not None


def test_overlap_is_measured_on_request(directory):
    """Of exact strategies too; it changes no token."""
    strategy = Strategy(draft="ngram", group=4)
    runs = [
        Engine.load(directory, strategy=strategy, measure_overlap=wanted).generate(PROMPT, max_new_tokens=20)
        for wanted in (False, True)
    ]
    assert runs[0].stats["overlap"] is None and runs[0].stats["overlap_free"] is None
    assert 0 < runs[1].stats["overlap"] <= 1 and 0 <= runs[1].stats["overlap_free"] <= 1
    assert runs[0].tokens == runs[1].tokens


def test_eagle3_head_changes_no_token(tmp_path):
    """A head from disk, wired through the engine: drafts are verified, and the text stays that of plain decoding."""
    config = dataclasses.replace(CONFIG, num_layers=7)
    target = write_checkpoint(tmp_path / "target", config=config)
    head = Eagle3Config(
        hidden_size=config.hidden_size,
        target_hidden_size=config.hidden_size,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=config.vocab_size,
        draft_vocab_size=64,
        taps=default_taps(config.num_layers),
    )
    export_eagle3(tmp_path / "head", head, {n: np.asarray(x) for n, x in eagle3_params(head, 1).items()})
    plain = Engine.load(target).generate(PROMPT, max_new_tokens=24, ignore_eos=True)
    strategy = Strategy(draft="eagle3", tree=TreeSpec(depth=2, topk=3, nodes=8), draft_window=16, group=3)
    engine = Engine.load(target, strategy=strategy, draft_model=tmp_path / "head")
    fast = engine.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
    assert fast.tokens == plain.tokens
    assert fast.stats["drafted"] > 0
    other = write_checkpoint(tmp_path / "other", config=dataclasses.replace(config, hidden_size=64))
    with pytest.raises(ValueError, match="hidden"):
        Engine.load(other, strategy=strategy, draft_model=tmp_path / "head")
    with pytest.raises(UsageError, match="pool"):
        too_many = Strategy(draft="eagle3", tree=TreeSpec(depth=1, topk=2, nodes=50))
        Engine.load(target, strategy=too_many, draft_model=tmp_path / "head")


def test_logits_that_are_not_finite_are_an_error(tmp_path):
    """Damaged weights would write plausible text."""
    path = write_checkpoint(tmp_path / "m")
    engine = Engine.load(path)
    leaves = jax.tree.map(lambda x: x * jnp.nan, engine.params.target)
    engine._params = dataclasses.replace(engine.params, target=leaves)
    with pytest.raises(NumericsError, match="not finite after 0 new tokens"):
        engine.generate("abc", max_new_tokens=4)


def test_logits_that_fail_while_decoding_are_an_error(tmp_path):
    """Only prefill was looked at."""
    engine = Engine.load(write_checkpoint(tmp_path / "m"))
    stream = engine.stream("abc", max_new_tokens=4, ignore_eos=True)
    next(stream)
    engine._params = jax.tree.map(lambda x: x * jnp.nan, engine.params)
    with pytest.raises(NumericsError, match="not finite after 1 new tokens"):
        list(stream)

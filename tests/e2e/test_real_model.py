"""SmolLM2 answers as Hugging Face transformers does, token for token, plain, sparse and speculative."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ssv_jax import Engine, Strategy, TreeSpec
from ssv_jax.models.errors import CheckpointError
from ssv_jax.planning import Manual
from ssv_jax.registry import resolve

pytestmark = pytest.mark.slow
GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2_hf.npz"
COPY = "Repeat this list three times: alpha beta gamma delta epsilon zeta eta theta iota kappa."


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as file:
        return {name: file[name] for name in file.files if name.startswith("chat")}


@pytest.fixture(scope="module", autouse=True)
def installed():
    try:
        resolve("smollm2-135m")
    except CheckpointError as error:
        pytest.skip(str(error))


def check(engine: Engine, golden) -> None:
    for chat in (0, 1):
        result = engine.generate(golden[f"chat{chat}_prompt"].tolist(), max_new_tokens=64)
        assert list(result.tokens) == golden[f"chat{chat}_new"].tolist()


def test_dense_equals_transformers(golden):
    """A loader, tokenizer or model fault that only real weights show; prompt ids come from the chat template."""
    engine = Engine.load("smollm2-135m")
    check(engine, golden)
    ids = engine.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    assert ids == golden["chat0_prompt"].tolist()


def test_prompt_lookup_equals_transformers_and_pays(golden):
    """Speculation on the real model: the same tokens, and more than two a round where text repeats."""
    tree = TreeSpec(depth=7, topk=1, nodes=8)
    engine = Engine.load("smollm2-135m", strategy=Strategy(draft="ngram", tree=tree))
    check(engine, golden)
    chat = engine.encode_chat([{"role": "user", "content": COPY}])
    fast = engine.generate(chat, max_new_tokens=96)
    plain = Engine.load("smollm2-135m").generate(chat, max_new_tokens=96)
    assert fast.tokens == plain.tokens
    assert fast.stats["emitted_per_round"] > 2


def test_sparse_with_every_block_selected_equals_transformers(golden):
    """The sparse path on real weights, in the configuration where it must be dense attention."""
    check(Engine.load("smollm2-135m", attention="nsa"), golden)


def test_the_shipped_sparse_model_answers_and_speculation_changes_no_token(monkeypatch):
    """A delta merged wrongly; grouped verification that reads other blocks where weights make the choice matter; a head
    that drafts nonsense."""
    # One executable to prefill prompts of any length, instead of one for each size.
    monkeypatch.setattr("ssv_jax.engine._PREFILL_SIZES", (512,))
    plain, grouped = "none", "eagle3:4x2x8+group4"
    planner = Manual([Strategy.parse(label) for label in (plain, grouped)])
    engine = Engine.load("smollm2-135m-nsa", planner=planner)
    engine.least_capacity = 2048  # one executable for both contexts
    question = [{"role": "user", "content": "What is the capital of France?"}]
    assert "Paris" in engine.chat(question, max_new_tokens=16).text
    prompt = (GOLDEN.parent / "text.md").read_text() + (GOLDEN.parent / "README.md").read_text()
    ids = engine.tokenizer.encode(prompt)[-1300:]
    assert len(ids) == 1300 > engine.config.nsa.n_blocks * engine.config.nsa.block_size
    want = engine.generate(ids, max_new_tokens=32, ignore_eos=True)
    assert set(want.stats["planner"]["calls"]) == {plain} and want.stats["drafted"] == 0
    planner.choose = lambda call: grouped
    got = engine.generate(ids, max_new_tokens=32, ignore_eos=True)
    assert set(got.stats["planner"]["calls"]) == {grouped}
    assert got.tokens == want.tokens
    assert got.stats["accepted"] > 0

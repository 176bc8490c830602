"""The training-time test against the drafter that it trains for, and its loss against a plain one."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ssv_jax.drafting.eagle3 import Eagle3Drafter
from ssv_jax.drafting.protocol import Observation, Params
from ssv_jax.models import eagle3
from ssv_jax.models.llama import build
from ssv_jax.training.eagle3_loss import Teacher, TrainingTest, draft_first, training_test, unroll
from tests.models.eagle3_numpy import HEADS, PLAIN, TARGET, as_jax, random_embedding, random_head, random_target

LENGTH, STEPS = 13, 5


def inputs(batch: int = 1, seed: int = 0):
    rng = np.random.default_rng(seed)
    taps = rng.normal(size=(3, batch, LENGTH, TARGET.hidden_size)).astype(np.float32)
    tokens = rng.integers(0, TARGET.vocab_size, (batch, LENGTH)).astype(np.int32)
    return tuple(jnp.asarray(tap) for tap in taps), jnp.asarray(tokens)


CASES = [
    ("plain", None),
    ("plain", 1),
    ("eagle-3.1", 3),
    ("concat-norm", None),
    ("three-layers", 3),
    ("own-parts", None),
]


@pytest.mark.parametrize(("name", "window"), CASES)
def test_every_step_computes_what_the_drafter_computes(name, window):
    config, params = HEADS[name], random_head(HEADS[name])
    table = params["embed/embedding"] if config.own_embedding else random_embedding(config)
    graphdef, draft = eagle3.build(config, params)
    target = as_jax(random_target() | {"embed/embedding": random_embedding(config)})
    every = Params(target=build(TARGET, target)[1], draft=draft)
    drafter = Eagle3Drafter(graphdef=graphdef, config=config, depth=1, top_k=1, num_nodes=2, window=window)
    taps, tokens = inputs()

    @jax.jit
    def trained(taps, tokens):
        head = nnx.merge(graphdef, draft)
        options = TrainingTest(steps=STEPS, window=window, chunk=4)
        return head.logits(unroll(head, jnp.asarray(table)[tokens], taps, options).reshape(STEPS, LENGTH, -1))

    # All anchors at once: sequence b has committed b + 1 pairs, then drafts the text's own tokens.
    anchors = LENGTH - STEPS

    @jax.jit
    def drafted(taps, tokens):
        head = nnx.merge(graphdef, draft)
        state = drafter.init(batch=anchors, capacity=16, dtype=jnp.float32)
        rows = jnp.arange(anchors)
        seen = Observation(
            tokens=jnp.broadcast_to(tokens[:, 1 : anchors + 1], (anchors, anchors)),
            taps=tuple(jnp.broadcast_to(tap[:, :anchors], (anchors, anchors, tap.shape[-1])) for tap in taps),
            start=jnp.zeros(anchors, jnp.int32),
            count=rows.astype(jnp.int32) + 1,
        )
        state = drafter.observe(every, state, seen)
        logits = [head.logits(state.feature[:, None])]
        frontier = features = trees = None
        for step in range(1, STEPS):
            token = tokens[0, rows + 1 + step][:, None]
            if frontier is None:
                frontier = drafter._start(state, token)
            else:
                parent = jnp.zeros((anchors, 1), jnp.int32)
                frontier = drafter._descend(frontier, features, trees, token, parent, step)
            features, trees = drafter._run(head, every, state, frontier)
            logits.append(head.logits(features))
        return jnp.stack(logits)[:, :, 0]

    ours, theirs = trained(taps, tokens)[:, :anchors], drafted(taps, tokens)
    assert float(jnp.abs(theirs).max()) > 0.1
    # Sharp attention, layer over layer and step over step, amplifies rounding.
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-3 if config.num_layers > 1 else 1e-4)


def plain_loss(head, kernel, embedded, taps, final, table, ids, supervised, steps, decay):
    """Step by step over the rows that have a target, with whole logits."""
    outputs = unroll(head, embedded, taps, TrainingTest(steps=steps))
    theirs = final @ table.T
    first = jnp.argmax(theirs, -1)
    covered, p = (first[..., None] == ids).any(-1), jax.nn.softmax(theirs[..., ids])
    total, hits, offered = 0.0, [], []
    for s in range(steps):
        rows = LENGTH - 2 - s  # the last one is about the last token
        log_q = jax.nn.log_softmax(head.norm(outputs[s, :, :rows]) @ kernel)
        at = slice(1 + s, 1 + s + rows)
        counts = supervised[:, 2 + s :]
        cross_entropy = -(p[:, at] * log_q).sum(-1)
        total = total + decay**s * jnp.where(counts & covered[:, at], cross_entropy, 0).sum()
        hits.append(counts & (jnp.asarray(ids)[jnp.argmax(log_q, -1)] == first[:, at]))
        offered.append(counts)
    rows = LENGTH - 1 - steps
    complete = jnp.stack([x[:, :rows] for x in offered]).all(0)
    runs = jnp.cumprod(jnp.stack([x[:, :rows] for x in hits]).astype(jnp.int32), axis=0).sum(0)
    per_round = 1 + (runs * complete).sum() / complete.sum()
    rates = jnp.stack([hit.sum() / offer.sum() for hit, offer in zip(hits, offered, strict=True)])
    return total / supervised.sum(), (rates, per_round)


@pytest.mark.parametrize("own_head", [False, True])
def test_loss_and_gradients_equal_a_plain_loss(own_head):
    config, steps = dataclasses.replace(PLAIN, own_head=own_head), 3
    params = as_jax(random_head(config))
    ids = np.sort(np.asarray(params["target_ids"]))
    params["target_ids"] = jnp.asarray(ids)
    taps, tokens = inputs(batch=2, seed=1)
    rng = np.random.default_rng(3)
    final = jnp.asarray(rng.normal(size=(2, LENGTH, 12)), jnp.float32)
    table = jnp.asarray(rng.normal(size=(31, 12)) * 0.5, jnp.float32)
    supervised = jnp.asarray(rng.random((2, LENGTH)) < 0.8)
    embedded = jnp.asarray(random_embedding(config), jnp.float32)[tokens]
    trained = {name: x for name, x in params.items() if name != "target_ids"}
    if not own_head:
        trained.pop("lm_head/kernel")

    def head_of(trained):
        kernel = trained.get("lm_head/kernel", table[ids].T)
        graphdef, state = eagle3.build(config, params | trained | {"lm_head/kernel": kernel})
        return nnx.merge(graphdef, state), kernel

    @functools.partial(jax.value_and_grad, has_aux=True)
    def ours(trained):
        head, kernel = head_of(trained)
        teacher = Teacher(final=final, table=draft_first(table, ids))
        # Blocks of a few positions, so that there are several, and one is padded.
        options = TrainingTest(steps=steps, decay=0.7, chunk=4, logits=2 * steps * 31 * 4)
        kernel = kernel if own_head else None
        return training_test(head, kernel, embedded, taps, teacher, supervised, options)

    @functools.partial(jax.value_and_grad, has_aux=True)
    def theirs(trained):
        head, kernel = head_of(trained)
        return plain_loss(head, kernel, embedded, taps, final, table, ids, supervised, steps, 0.7)

    (loss, sums), gradient = jax.jit(ours)(trained)
    (expected, (rates, per_round)), expected_gradient = jax.jit(theirs)(trained)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for name in trained:
        np.testing.assert_allclose(gradient[name], expected_gradient[name], rtol=2e-3, atol=5e-5, err_msg=name)
        assert float(jnp.abs(gradient[name]).max()) > 0
    report = (sums + sums).report()
    np.testing.assert_allclose(report["accuracy"], rates, rtol=1e-6)
    np.testing.assert_allclose(report["loss"], float(loss), rtol=1e-5)
    assert report["tokens_per_round"] == pytest.approx(float(per_round))
    assert 0.3 < report["coverage"] < 1 and rates.max() > 0


def test_padding_at_the_end_of_a_text_changes_nothing_before():
    config, params = PLAIN, random_head(PLAIN)
    graphdef, state = eagle3.build(config, params)
    taps, tokens = inputs()
    embedded = jnp.asarray(random_embedding(config), jnp.float32)[tokens]
    run = jax.jit(lambda e, t: unroll(nnx.merge(graphdef, state), e, t, TrainingTest(steps=3, chunk=8)))
    whole = run(embedded, taps)
    cut = run(embedded[:, :-2], tuple(tap[:, :-2] for tap in taps))
    keep = LENGTH - 2 - 3
    np.testing.assert_allclose(whole[:, :, :keep], cut[:, :, :keep], rtol=1e-5, atol=1e-5)
    assert np.isfinite(np.asarray(cut)).all()


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"window": 0}, {"decay": 0.0}, {"chunk": 0}])
def test_bad_options_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TrainingTest(**wrong)

"""Draft trees by group size: block visits and bytes of a round, acceptance, and on a GPU the time of a round.

python experiments/tree_grid.py --model NAME_OR_DIR --data FILE.npz.xz... [--draft ngram|eagle3] [--smoke]
Held-out texts are continued greedily with each tree. What the nodes select does not depend on how they are grouped, so
one run gives the visits of every group size, in breadth-first and depth-first order: with groups of C consecutive
nodes, a KV head reads each block of a group's union once. Visits count blocks of the committed text; nodes that are
padding count for nothing. `--timed` runs the rounds with each group size and measures them.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import _evaluation as evaluation
import _harness as harness
import acceptance
import jax
import jax.numpy as jnp
import numpy as np
from _prompts import Prompt, long_prompts
from _served import members
from flax import nnx

from ssv_jax import UsageError, loop
from ssv_jax.drafting.protocol import Params
from ssv_jax.state import RUNNING, DecodeState, Emitted
from ssv_jax.tree import DraftTree, flatten, queries_of

TREES = {
    "ngram": ["3x1x4", "7x1x8", "15x1x16", "3x4x13", "7x4x29", "7x9x64"],
    "eagle3": ["3x1x4", "7x1x8", "3x4x13", "4x4x16", "5x8x32", "7x10x64"],
}
GROUPS = (1, 2, 4, 8, 16, 32)
ORDERS = ("bfs", "dfs")


def visits(
    tree: DraftTree, chosen: jax.Array, length: jax.Array, block_size: int, groups: tuple[int, ...], depth: int
) -> jax.Array:
    """Blocks read by all groups of a pass, int32 [orders, groups, B], summed over layers and KV heads.

    Args:
      tree: B trees of T nodes.
      chosen: sets of blocks [L, B, K, T, N].
      length: committed tokens [B].
      block_size: tokens of a block.
      groups: sizes of groups.
      depth: bound on the depth of nodes.
    """
    nodes, blocks = chosen.shape[-2:]
    committed = jnp.arange(blocks) * block_size < length[:, None]
    chosen = chosen & committed[:, None, None] & tree.valid[:, None, :, None]
    numbered = dataclasses.replace(tree, tokens=jnp.broadcast_to(jnp.arange(nodes), tree.tokens.shape))
    found = []
    for order in ORDERS:
        place = flatten(numbered, order, depth).tokens[None, :, None, :, None]
        sets = jnp.take_along_axis(chosen, place, axis=3)
        for size in groups:
            padded = jnp.pad(sets, ((0, 0), (0, 0), (0, 0), (0, -nodes % size), (0, 0)))
            parts = padded.reshape(*sets.shape[:3], -1, size, blocks)
            found.append(parts.any(-2).sum((0, 2, 3, 4), dtype=jnp.int32))
    return jnp.stack(found).reshape(len(ORDERS), len(groups), -1)


def observed_round(
    decoding: loop.Decoding, groups: tuple[int, ...], params: Params, state: DecodeState
) -> tuple[DecodeState, Emitted, jax.Array, jax.Array]:
    """`loop.decode_round`, the visits of its pass, and its nodes [B]; sequences that are done have none.

    The pass is written twice, with the same inputs: the compiler makes one of them, where it can.
    """
    drafter, nsa = decoding.drafter, decoding.config.nsa
    assert nsa is not None
    key, _ = jax.random.split(jax.random.fold_in(state.key, state.round))
    tree = drafter.propose(params, state.drafter, history=state.history, count=state.count, key=key)
    tree = flatten(tree, decoding.traversal, drafter.max_depth)
    queries = queries_of(tree, state.cache.length)
    model = nnx.merge(decoding.model, params.target)
    output = model(tree.tokens, queries, state.cache, decoding.options(is_chain=False))
    blocks = -(-state.cache.capacity // nsa.block_size)
    chosen = jnp.stack([members(x.blocks, blocks) for x in output.selections if x is not None])
    running = state.status == RUNNING
    read = visits(tree, chosen, state.cache.length, nsa.block_size, groups, drafter.max_depth)
    nodes = jnp.where(running, tree.valid.sum(1), 0)
    state, emitted = loop.decode_round(decoding, params, state)
    return state, emitted, jnp.where(running, read, 0), nodes


def compile_rounds(
    target: acceptance.Target, setting: acceptance.Setting, groups: tuple[int, ...], args: argparse.Namespace
) -> dict[str, Any]:
    """`observed_round` by tree; the prefill too."""
    target.prepare(setting, [])
    jitted = jax.jit(observed_round, static_argnums=(0, 1), donate_argnums=3)

    def lower(tree: str) -> Any:
        state = jax.eval_shape(lambda: target.first_state(setting, [[0]], target.any_tree, 1))
        return jitted.lower(target.decoding(tree, 0.0), groups, target.params, state)

    trees = [name for name in target.drafters if name != "none"]
    return evaluation.compile_all({tree: lambda tree=tree: lower(tree) for tree in trees})


def observe(
    target: acceptance.Target,
    setting: acceptance.Setting,
    calls: dict[str, Any],
    prompts: list[Prompt],
    groups: tuple[int, ...],
    args: argparse.Namespace,
    steps: evaluation.Steps,
) -> list[dict[str, Any]]:
    """Rows by (set, tree, order, group) at one context."""
    nsa = target.config.nsa
    assert nsa is not None
    found: dict[tuple[str, str], list[tuple[np.ndarray, int, int]]] = {}
    for at in range(0, len(prompts), setting.batch):
        if steps.spent:
            harness.say(f"budget of {args.budget_s:g} s spent: some texts left out")
            break
        part = prompts[at : at + setting.batch]
        filled = [prompt.tokens for prompt in part] + [part[-1].tokens] * (setting.batch - len(part))
        first, _ = target.prefill(setting, filled, args.new_tokens)
        for tree, call in calls.items():
            state = jax.tree.map(jnp.copy, first)
            done, before = 0, len([x for each in found.values() for x in each])
            while bool((state.status == RUNNING).any()):
                state, emitted, read, nodes = call(target.params, state)
                counts = jax.device_get((emitted.count, read, nodes))
                for row, prompt in enumerate(part):
                    if counts[0][row]:
                        each = found.setdefault((prompt.category, tree), [])
                        each.append((counts[1][..., row], int(counts[2][row]), int(counts[0][row])))
                        done += int(counts[0][row])
            rounds = len([x for each in found.values() for x in each]) - before
            steps.step(f"{len(part[0].tokens)} tokens, {tree}: {done / max(rounds, 1):.2f} tokens a round")
    block_bytes = nsa.block_size * 2 * target.config.head_dim * target.dtype.itemsize
    alone = target.config.num_layers * target.config.num_kv_heads * nsa.n_blocks * block_bytes  # a token by itself
    rows = []
    for (name, tree), each in found.items():
        read, nodes, emitted = (np.array(x) for x in zip(*each, strict=True))
        for o, order in enumerate(ORDERS):
            for g, group in enumerate(groups):
                bytes_a_round = float(read[:, o, g].mean()) * block_bytes
                rows.append(
                    {
                        "set": name.split()[0],
                        "context": len(prompts[0].tokens),
                        "tree": tree,
                        "order": order,
                        "group": group,
                        "rounds": len(each),
                        "nodes": float(nodes.mean()),
                        "tokens_a_round": float(emitted.mean()),
                        "visits_left": float(read[:, o, g].sum() / read[:, o, groups.index(1)].sum()),
                        "selected_mb_a_round": bytes_a_round / 1e6,
                        "selected_bytes_a_token_over_plain": bytes_a_round / float(emitted.mean()) / alone,
                    }
                )
    return rows


def time_rounds(
    target: acceptance.Target,
    setting: acceptance.Setting,
    prompts: list[Prompt],
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Milliseconds of a round of one sequence, by (context, tree, order, group), and of a round without drafts."""
    target.prepare(setting, [])
    jobs = {("none", "bfs", 1): target.decoding("none", 0.0)}
    for tree in (name for name in target.drafters if name != "none"):
        for order in args.timed_orders:
            for group in args.timed_groups:
                decoding = dataclasses.replace(target.decoding(tree, 0.0), group=group, traversal=order)
                if group <= decoding.drafter.num_nodes:
                    jobs[tree, order, group] = decoding
    jitted = jax.jit(loop.decode_until, static_argnames=("decoding", "rounds"), donate_argnames="state")

    def ready(state: DecodeState, tree: str) -> DecodeState:
        stats = type(state.stats).zero(target.drafters[tree].max_depth)
        return dataclasses.replace(state, stats=stats, drafter=None if tree == "none" else state.drafter)

    def lower(key: tuple[str, str, int]) -> Any:
        shapes = jax.eval_shape(lambda: ready(target.first_state(setting, [[0]], target.any_tree, 1), key[0]))
        return jitted.lower(decoding=jobs[key], params=target.params, state=shapes, rounds=args.rounds_a_call)

    calls = evaluation.compile_all({key: lambda key=key: lower(key) for key in jobs})
    rows = []
    steps = evaluation.Steps("times", len(prompts) * len(calls), args.budget_s)
    for prompt in prompts:
        first, _ = target.prefill(setting, [prompt.tokens], args.new_tokens)
        for (tree, order, group), call in calls.items():
            if steps.spent:
                harness.say(f"budget of {args.budget_s:g} s spent: some times left out")
                return rows
            each = []
            for turn in range(args.repeats + 1):
                state = jax.block_until_ready(ready(jax.tree.map(jnp.copy, first), tree))
                began = time.perf_counter()
                state, out = call(params=target.params, state=state)
                jax.block_until_ready(out.count)
                seconds = time.perf_counter() - began
                done = int((np.asarray(out.emitted) > 0).sum())
                if turn and done:
                    each.append(seconds / done * 1e3)
            row = {"context": len(prompt.tokens), "tree": tree, "order": order, "group": group}
            rows.append(row | {f"ms_a_round_{key}": value for key, value in harness.spread(each).items()})
            steps.step(f"{tree}, {order}, groups of {group}: {rows[-1]['ms_a_round_median']:.2f} ms a round")
    return rows


def draw(axes: Any, rows: list[dict[str, Any]], timed: list[dict[str, Any]]) -> None:
    left, right = axes
    context = max(row["context"] for row in rows)
    mine = [row for row in rows if row["context"] == context]
    for tree in dict.fromkeys(row["tree"] for row in mine):
        for order, style in zip(ORDERS, ("-o", "--s"), strict=True):
            each = [row for row in mine if (row["tree"], row["order"]) == (tree, order)]
            groups = sorted({row["group"] for row in each})
            values = [np.mean([row["visits_left"] for row in each if row["group"] == g]) for g in groups]
            left.plot(groups, values, style, ms=3, label=f"{tree}, {order}")
    left.set(xlabel="nodes in a group", ylabel="block visits left", xscale="log", title=f"{context} tokens")
    left.set_ylim(0, 1.03)
    if timed:
        for tree in dict.fromkeys(row["tree"] for row in timed if row["tree"] != "none"):
            each = [r for r in timed if (r["tree"], r["order"], r["context"]) == (tree, "bfs", context)]
            right.plot([r["group"] for r in each], [r["ms_a_round_median"] for r in each], "-o", ms=3, label=tree)
        right.set(xlabel="nodes in a group", ylabel="ms a round, breadth-first", xscale="log")
    else:
        for tree in dict.fromkeys(row["tree"] for row in mine):
            each = [row for row in mine if (row["tree"], row["order"]) == (tree, "bfs")]
            groups = sorted({row["group"] for row in each})
            key = "selected_bytes_a_token_over_plain"
            right.plot(groups, [np.mean([r[key] for r in each if r["group"] == g]) for g in groups], "-o", label=tree)
        right.axhline(1, color="grey", ls=":", label="plain decoding")
        right.set(xlabel="nodes in a group", ylabel="selected bytes a token / plain, breadth-first", xscale="log")
    right.set_ylim(0, None)
    for axis in axes:
        sizes = sorted({row["group"] for row in mine})
        axis.set_xlim(0.9, 1.1 * sizes[-1])
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.minorticks_off()
        axis.legend(fontsize=6)


def smoke_prompts(length: int) -> list[Prompt]:
    tokens = tuple(evaluation.smoke_set().document(0)[:length].tolist())
    return [Prompt(name="smoke", category="smoke", tokens=tokens)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    evaluation.add_model_arguments(parser, dense=False)
    evaluation.add_output_arguments(parser)
    parser.add_argument("--data", nargs="+", default=[], help="held-out token sets")
    parser.add_argument("--draft", choices=("eagle3", "ngram"), default="ngram")
    parser.add_argument("--draft-model", type=Path, default=None, help="directory of a head; default: the model's own")
    parser.add_argument("--draft-window", type=int, default=None)
    parser.add_argument("--trees", nargs="+", default=None, metavar="DEPTHxTOPKxNODES")
    parser.add_argument("--groups", nargs="+", type=int, default=list(GROUPS))
    parser.add_argument("--contexts", nargs="+", type=int, default=[8192, 16384])
    parser.add_argument("--windows", type=int, default=4, help="per set")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=512, help="tokens of a prefill pass")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default=None, help="default: float32 on a CPU")
    parser.add_argument("--timed", action=argparse.BooleanOptionalAction, default=None, help="default: on a GPU")
    parser.add_argument("--timed-groups", nargs="+", type=int, default=[1, 4, 8, 16])
    parser.add_argument("--timed-orders", nargs="+", choices=ORDERS, default=["bfs"])
    parser.add_argument("--repeats", type=int, default=5, help="of each time")
    parser.add_argument("--rounds-a-call", type=int, default=8, help="of each time")
    parser.add_argument("--refresh-every", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    on_cpu = jax.default_backend() == "cpu"
    args.dtype, args.rounds = args.dtype or ("float32" if on_cpu else "bfloat16"), None
    args.timed = not on_cpu if args.timed is None else args.timed
    if args.smoke:
        args.draft, args.trees, args.groups, args.contexts = "ngram", ["3x2x7"], [1, 2, 4], [160]
        args.new_tokens, args.size, args.dtype, args.timed = 12, 80, "float32", True
        args.repeats, args.rounds_a_call, args.timed_groups = 1, 2, [2]
    args.trees = args.trees or TREES[args.draft]
    for text in args.trees:
        acceptance.parse_tree(text)
    groups = tuple(sorted({1, *args.groups}))
    if any(not 1 <= group <= 32 for group in (*groups, *args.timed_groups)):
        raise UsageError("--groups and --timed-groups: from 1 to 32")
    if args.smoke:
        model, head = evaluation.smoke_model(), None
    else:
        evaluation.require_files("--data", args.data)
        model = evaluation.load_model(args.model, args.attention, args.nsa_config)
        head = args.draft_model or model.head
        if args.draft == "eagle3" and head is None:
            raise UsageError(f"{args.model} has no draft head of its own: name one with --draft-model")
    if model.config.nsa is None:
        raise UsageError(f"{args.model} is dense and selects nothing: give a sparse model, or --attention nsa")
    target = acceptance.Target(model, args.dtype, args, head)
    prompts = {
        n: smoke_prompts(n) if args.smoke else long_prompts(args.data, model, [n], args.windows) for n in args.contexts
    }
    output = evaluation.output_path("tree_grid", args.output, args.smoke)
    hidden = ("model", "output", "data", "draft_model")
    result: dict[str, Any] = {
        "command": "python experiments/tree_grid.py",
        "model": model.facts,
        "head": head.name if head else None,
        "settings": {key: str(value) for key, value in vars(args).items() if key not in hidden}
        | {"data": [Path(path).name for path in args.data]},
        "rows": [],
        "timed": [],
    }
    longest, batch = prompts[max(prompts)], min(args.batch, max(map(len, prompts.values())))
    setting = target.setting(longest, batch, args.new_tokens, args.size)  # all contexts share what is compiled
    calls = compile_rounds(target, setting, groups, args)
    total = sum(len(calls) * -(-len(found) // batch) for found in prompts.values())
    steps = evaluation.Steps("grid", total, args.budget_s)
    for found in prompts.values():
        result["rows"] += observe(target, setting, calls, found, groups, args, steps)
        harness.write(output, result)  # a time limit must not lose it
    if args.timed:
        single = target.setting(longest, 1, args.new_tokens, args.size)
        result["timed"] = time_rounds(target, single, [found[0] for found in prompts.values()], args)
        harness.write(output, result)
    rows, timed = result["rows"], result["timed"]
    known = {(r["context"], r["tree"], r["order"], r["group"]): r for r in timed}
    for row in rows:
        row |= known.get((row["context"], row["tree"], row["order"], row["group"]), {})
    harness.write(output, result)
    evaluation.write_csv(output.with_suffix(".csv"), rows)
    if rows:
        evaluation.plot(output.with_suffix(".png"), lambda axes: draw(axes, rows, timed), columns=2)
    names = "set context tree order group nodes tokens_a_round visits_left selected_mb_a_round ms_a_round_median"
    evaluation.table(rows, names.split())


if __name__ == "__main__":
    evaluation.guarded(main)

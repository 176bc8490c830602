"""Prompt lookup on a chat that copies its prompt: tokens a round and tokens per second beside plain decoding.

python experiments/prompt_lookup.py [--smoke] [--output FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import _harness as harness
import jax

from ssv_jax import Engine, Strategy
from ssv_jax.models.config import LlamaConfig
from ssv_jax.models.llama import random_params

CHAT = "Repeat this list three times: alpha beta gamma delta epsilon zeta eta theta iota kappa."


def engine_of(draft: str, smoke: bool) -> Engine:
    strategy = Strategy(draft=draft)
    if not smoke:
        return Engine.load("smollm2-135m", strategy=strategy)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16
    )
    return Engine(config, random_params(config), strategy=strategy)


def measure(draft: str, smoke: bool, repeats: int) -> dict[str, Any]:
    engine = engine_of(draft, smoke)
    prompt = [1, 2, 3, 4] * 5 if smoke else engine.encode_chat([{"role": "user", "content": CHAT}])
    runs = [engine.generate(prompt, max_new_tokens=16 if smoke else 128) for _ in range(repeats + 1)]
    last = runs[-1]
    harness.say(f"{draft}: {last.stats['emitted_per_round']:.2f} tokens a round, {last.decode_tok_s:.1f} tok/s")
    return {
        "draft": draft,
        "tokens": list(last.tokens),
        "emitted_per_round": last.stats["emitted_per_round"],
        "acceptance_by_depth": last.stats["acceptance_by_depth"],
        "decode_tok_s": harness.spread([run.decode_tok_s for run in runs[1:]]),
        "strategy": last.stats["strategy"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny random model, seconds on a CPU")
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    rows = [measure(draft, args.smoke, 1 if args.smoke else 3) for draft in ("none", "ngram")]
    same = rows[0]["tokens"] == rows[1]["tokens"]
    device = jax.devices()[0].device_kind.lower().replace(" ", "-")
    output = args.output or harness.RESULTS / "prompt_lookup" / f"{'smoke' if args.smoke else device}.json"
    harness.write(
        output, {"command": "python experiments/prompt_lookup.py", "chat": CHAT, "identical": same, "rows": rows}
    )
    for row in rows:
        speed = row["decode_tok_s"]["median"]
        print(f"{row['draft']:>6} {row['emitted_per_round']:6.2f} tokens a round {speed:8.1f} tok/s")
    if not same:
        raise SystemExit("the drafted tokens differ from the plain ones")


if __name__ == "__main__":
    main()

"""Command line: `python -m ssv_jax.generate`. Text goes to stdout, everything else to stderr."""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .command import Parser, Progress, enable_compilation_cache, leave, run_command, usable_streams, versions
from .errors import UsageError

if TYPE_CHECKING:
    from .engine import Engine
    from .generation import Generation

_DESCRIPTION = "Generate text with a Llama or Native-Sparse-Attention model in JAX."


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be integers separated by commas, got {text!r}") from None


def _fields(text: str, names: Sequence[str]) -> dict[str, int]:
    """`a=1,b=2` with exactly known names."""
    fields: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        name = name.strip()
        if name not in names or name in fields or not re.fullmatch(r"\s*-?[0-9]+\s*", value):
            raise argparse.ArgumentTypeError(f"must read {','.join(f'{n}=N' for n in names)}, got {text!r}")
        fields[name] = int(value)
    return fields


def _tree(text: str) -> dict[str, int]:
    fields = _fields(text, ("depth", "topk", "nodes"))
    missing = [name for name in ("depth", "topk", "nodes") if name not in fields]
    if missing:
        raise argparse.ArgumentTypeError(f"lacks {', '.join(missing)}: e.g. depth=6,topk=8,nodes=32")
    return fields


def _layer_plan(text: str) -> dict[str, Any]:
    """`refresh-every=N` or `refresh=0,4,9`."""
    name, _, value = text.partition("=")
    try:
        if name == "refresh-every":
            return {"refresh_every": int(value)}
        if name == "refresh":
            return {"refresh_layers": tuple(int(layer) for layer in value.split(","))}
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"must read refresh-every=N or refresh=0,4,9, got {text!r}")


def parser() -> argparse.ArgumentParser:
    """All options."""
    p = Parser(prog="python -m ssv_jax.generate", description=_DESCRIPTION, allow_abbrev=False)
    p.add_argument("stdin", nargs="?", choices=["-"], help="read the prompt from standard input")
    p.add_argument("--list-models", action="store_true", help="list known model names and exit")
    source = p.add_argument_group("prompt (exactly one)")
    source.add_argument("--prompt", metavar="TEXT", help="continue this text")
    source.add_argument(
        "--chat",
        metavar="TEXT",
        action="append",
        help="a user turn; repeat for user, assistant, user ... turns, the last being the user's",
    )
    source.add_argument("--prompt-file", metavar="FILE", help="continue the text of this UTF-8 file")
    source.add_argument("--prompt-ids", metavar="1,2,3", type=_token_ids, help="continue these token ids, as they are")
    model = p.add_argument_group("model")
    model.add_argument(
        "--model", metavar="NAME_OR_PATH", help="name, directory or GGUF file; --list-models marks the default"
    )
    model.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: float32 on a CPU, else bfloat16")
    model.add_argument(
        "--attention",
        choices=["auto", "dense", "nsa"],
        default="auto",
        help="auto runs what the checkpoint holds",
    )
    model.add_argument("--nsa-config", metavar="JSON_OR_PRESET", help="sparse attention to run instead (implies nsa)")
    model.add_argument("--implementation", metavar="NAME", help="of the attention ops; default: the fastest that fits")
    model.add_argument("--mesh", metavar="tensor=N", help="spread the model over N devices")
    out = p.add_argument_group("generation")
    out.add_argument("--max-new-tokens", type=int, default=256, metavar="N")
    out.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default) is greedy")
    out.add_argument("--top-k", type=int, default=0, metavar="K", help="0 keeps all")
    out.add_argument("--top-p", type=float, default=1.0, metavar="P")
    out.add_argument("--seed", type=int, default=0)
    out.add_argument("--stop", metavar="TEXT", action="append", default=[], help="stop before this text; repeatable")
    out.add_argument("--ignore-eos", action="store_true", help="go on after end tokens")
    spec = p.add_argument_group("speculation")
    spec.add_argument(
        "--draft",
        choices=["auto", "none", "ngram", "eagle3"],
        default="auto",
        help="auto (default) drafts with the model's own head if it has one",
    )
    spec.add_argument("--draft-model", metavar="DIR", help="an EAGLE-3 head; default: the model's own")
    spec.add_argument(
        "--tap-convention", choices=["residual", "layer-output"], help="what the head's tap ids mean, if ambiguous"
    )
    spec.add_argument(
        "--draft-window", type=int, metavar="N", help="tokens the head attends to, 0: all; default: its own"
    )
    spec.add_argument("--tree", type=_tree, metavar="depth=6,topk=8,nodes=32")
    spec.add_argument("--traversal", choices=["bfs", "dfs"], default="bfs", help="order of tree nodes in a pass")
    spec.add_argument("--group", type=int, default=1, metavar="N", help="nodes that share a block visit list")
    spec.add_argument("--grouping", choices=["exact", "shared"], default="exact")
    spec.add_argument("--layer-plan", type=_layer_plan, default={}, metavar="refresh-every=N")
    spec.add_argument("--precision", choices=["lossless", "strict", "approx"], default="lossless")
    spec.add_argument(
        "--strategy",
        default="auto",
        metavar="auto|LABEL",
        help="all of the above but the head in one word, e.g. none, ngram:7x1x8, eagle3:5x8x32+dfs+group4",
    )
    spec.add_argument(
        "--profile",
        metavar="FILE",
        help="a profile (python -m ssv_jax.profile) that chooses the strategy",
    )
    report = p.add_argument_group("output")
    report.add_argument("--explain", action="store_true", help="say on stderr which strategy runs, when and why")
    report.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    report.add_argument("--measure-overlap", action="store_true", help="with --json: how far neighbours' blocks agree")
    report.add_argument("--quiet", action="store_true", help="no progress on stderr")
    return p


def _check_text(args: argparse.Namespace) -> None:
    """Bytes of the command line that are not UTF-8 arrive as lone surrogates, which no tokenizer takes."""
    for name, values in (("--prompt", [args.prompt]), ("--chat", args.chat), ("--stop", args.stop)):
        for value in values or ():
            try:
                (value or "").encode()
            except UnicodeEncodeError as error:
                raise UsageError(f"{name}: not valid text at character {error.start}; use UTF-8") from None


def _read_prompt(args: argparse.Namespace) -> tuple[str, Any]:
    """The kind of prompt and its content.

    Raises:
      UsageError: none or several, or one that cannot be read.
    """
    given = {
        "--prompt": args.prompt,
        "--chat": args.chat,
        "--prompt-file": args.prompt_file,
        "--prompt-ids": args.prompt_ids,
        "-": args.stdin,
    }
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        what = "none" if not names else f"{' and '.join(names)}"
        raise UsageError(f"give exactly one of {', '.join(given)}; got {what}")
    if args.chat is not None:
        if len(args.chat) % 2 == 0:
            raise UsageError(
                f"--chat turns alternate user, assistant, user: {len(args.chat)} turns end with the assistant's; "
                "add a user turn"
            )
        return "chat", args.chat
    if args.prompt_ids is not None:
        return "ids", args.prompt_ids
    origin = names[0]
    if args.prompt is not None:
        text = args.prompt
    else:
        try:
            if args.prompt_file is None:
                data = sys.stdin.buffer.read()
            else:
                origin = f"--prompt-file {args.prompt_file}"
                data = Path(args.prompt_file).read_bytes()
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UsageError(f"{origin}: not UTF-8 at byte {error.start}; convert it first") from None
        except (OSError, ValueError) as error:
            raise UsageError(f"{origin}: {getattr(error, 'strerror', None) or error}") from None
    if not text:
        raise UsageError("the prompt is empty: give some text")
    return "text", text


def _load(args: argparse.Namespace, progress: Progress) -> Engine:
    from .engine import Engine, parse_mesh
    from .models.config import nsa_from_json
    from .registry import DEFAULT_MODEL
    from .strategy import PrecisionClass, Strategy, TreeSpec

    try:
        nsa = None if args.nsa_config is None else nsa_from_json(args.nsa_config)
        asked = Strategy(
            draft=args.draft,
            tree=TreeSpec(**args.tree) if args.tree else None,
            traversal=args.traversal,
            group=args.group,
            grouping=args.grouping,
            **args.layer_plan,
            draft_window=args.draft_window,
        )
        strategy = asked
        if args.strategy != "auto":
            if asked != Strategy(draft="auto"):
                raise UsageError("--strategy says all about the strategy: drop it, or the other speculation options")
            strategy = Strategy.parse(args.strategy)
        strategy.check(PrecisionClass(args.precision))
    except ValueError as error:
        raise UsageError(str(error)) from None
    return Engine.load(
        DEFAULT_MODEL if args.model is None else args.model,
        attention=args.attention,
        nsa_config=nsa,
        dtype=args.dtype,
        progress=progress,
        strategy=strategy,
        precision=PrecisionClass(args.precision),
        planner=args.profile,
        explain=(lambda decision: print(f"plan: {decision}", file=sys.stderr, flush=True)) if args.explain else None,
        draft_model=args.draft_model,
        tap_convention=args.tap_convention,
        implementation=args.implementation,
        tensor=1 if args.mesh is None else parse_mesh(args.mesh),
        measure_overlap=args.measure_overlap,
    )


def _report(engine: Engine, result: Generation) -> dict[str, Any]:
    import jax

    return {
        "prompt_tokens": len(result.prompt_ids),
        "prompt_ids": list(result.prompt_ids),
        "tokens": list(result.tokens),
        "text": result.text,
        "finish_reason": result.finish_reason,
        "timings_s": {name: round(value, 4) for name, value in result.timings_s.items()},
        "decode_tok_s": round(result.decode_tok_s, 2),
        "device": jax.devices()[0].device_kind,
        "dtype": str(engine.dtype),
        "attention": "dense" if engine.config.nsa is None else "nsa",
        **result.stats,
        "notes": list(engine.notes),
        "versions": versions(),
    }


def _generate(args: argparse.Namespace) -> None:
    from .generation import GenerationOptions

    progress = Progress(sys.stderr, enabled=not args.quiet)
    options = {
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "seed": args.seed,
        "stop": tuple(args.stop),
        "ignore_eos": args.ignore_eos,
    }
    GenerationOptions(**options)
    _check_text(args)
    kind, content = _read_prompt(args)
    enable_compilation_cache()
    engine = _load(args, progress)
    for note in engine.notes:
        progress.say(f"note: {note}")
    if args.explain and args.profile is None:
        print(f"plan: {engine.strategy.label} throughout: {engine.drafter_reason}", file=sys.stderr, flush=True)
    if kind == "chat":
        turns = [
            {"role": "user" if turn % 2 == 0 else "assistant", "content": text} for turn, text in enumerate(content)
        ]
        content = engine.encode_chat(turns)
    stream = engine.stream(content, **options)
    while True:
        try:
            chunk = next(stream)
        except StopIteration as end:
            result = end.value
            break
        if not args.json:
            text = chunk.text if engine.tokenizer else "".join(f"{token} " for token in chunk.tokens)
            sys.stdout.write(text)
            sys.stdout.flush()
    if args.json:
        print(json.dumps(_report(engine, result), ensure_ascii=False))
    else:
        print()
    sys.stdout.flush()
    emitted = f", {result.stats['emitted_per_round']:.2f} tokens per round" if engine.strategy.draft != "none" else ""
    progress.say(
        f"{len(result.tokens)} tokens ({result.finish_reason}), {result.decode_tok_s:.1f} tok/s{emitted}, "
        f"precision {engine.precision.value}; "
        + ", ".join(f"{name} {value:.1f} s" for name, value in result.timings_s.items())
    )


def _list_models() -> None:
    from .registry import DEFAULT_MODEL, MODELS

    for name, model in MODELS.items():
        print(f"{name}\t{model.description}" + (" (default)" if name == DEFAULT_MODEL else ""))
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 2 for usage errors, 1 for what cannot be read or run."""
    usable_streams()
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    return run_command(
        _list_models if args.list_models else lambda: _generate(args),
        smaller="a shorter prompt, fewer new tokens or a smaller tree",
    )


if __name__ == "__main__":
    leave(main())

"""Text <-> token ids, chat prompts, and text from a stream of ids.

A thin layer over the `tokenizers` library. A tokenizer comes from a directory in Hugging Face's layout or
from the metadata of a GGUF file; in the latter case it is rebuilt here, as the metadata names its
pre-tokenizer but does not contain it.
"""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from .models.errors import CheckpointError
from .models.gguf_io import GGUFFile
from .models.safetensors_io import read_json_object

_REPLACEMENT = "\ufffd"
_SAVED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """Encodes and decodes text; knows the special tokens and the chat template of one model.

    Args:
      backend: the tokenizer proper.
      bos: text of the beginning-of-sequence token, or None.
      eos_ids: ids that end a generation.
      chat_template: jinja2 source, or None if the model has none.
      special: named special tokens (`eos_token`, ...) that a template may refer to.
      source: where it comes from, for messages.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        chat_template: str | None = None,
        special: Mapping[str, str] = MappingProxyType({}),
        source: str = "tokenizer",
    ) -> None:
        self._backend = backend
        self.bos_id = bos_id
        self.eos_ids = tuple(eos_ids)
        self.chat_template = chat_template
        self.source = source
        self._special = dict(special)
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._template: jinja2.Template | None = None

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """From a GGUF file or a directory, see `from_gguf` and `from_directory`."""
        return cls.from_directory(path) if Path(path).is_dir() else cls.from_gguf(path)

    @classmethod
    def from_gguf(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Rebuilds the byte-level BPE tokenizer that a GGUF file describes.

        Raises:
          CheckpointError: unreadable file, missing metadata, or a tokenizer that cannot be rebuilt exactly
            (SentencePiece, or a pre-tokenizer that is not in `PRE_TOKENIZERS`).
        """
        return _from_gguf(cls, GGUFFile(Path(path)))

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Reads `tokenizer.json` and, where present, its companions.

        The chat template is `chat_template.jinja`, else `tokenizer_config.json`'s (its default if there are
        several). End tokens are those of `generation_config.json`, else `config.json`, then
        `tokenizer_config.json`'s. A directory without `tokenizer.json` goes through
        `transformers.AutoTokenizer`, offline.

        Raises:
          CheckpointError: no tokenizer there, or files that cannot be read.
        """
        return _from_directory(cls, Path(path))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        """Token ids of a text; special tokens written out in it are recognised.

        Args:
          text: any text.
          add_bos: put the beginning-of-sequence token first.

        Raises:
          ValueError: `add_bos` without such a token.
        """
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if not add_bos:
            return ids
        if self.bos_id is None:
            raise ValueError(f"{self.source}: there is no beginning-of-sequence token; use add_bos=False")
        return [self.bos_id, *ids]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of token ids; invalid UTF-8 becomes U+FFFD, ids beyond the vocabulary nothing."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    @property
    def adds_bos(self) -> bool:
        """Whether plain text of this model starts with the beginning-of-sequence token."""
        return self.bos_id is not None and self._backend.encode("", add_special_tokens=True).ids[:1] == [self.bos_id]

    def token_id(self, token: str) -> int | None:
        """Id of a token given by its text, or None."""
        return self._backend.token_to_id(token)

    def kind_of(self, i: int) -> Literal["absent", "special", "byte", "plain"]:
        """What an id stands for: nothing, a special token, a single byte (`<0x0A>`), or a piece of text."""
        token = self._backend.id_to_token(i)
        if token is None:
            return "absent"
        if i in self._special_ids:
            return "special"
        return "byte" if _BYTE_TOKEN.fullmatch(token) else "plain"

    def stream(self, skip_special: bool = True) -> StreamDecoder:
        """A decoder for ids that arrive bit by bit."""
        return StreamDecoder(self, skip_special)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation, by the model's chat template.

        Args:
          messages: mappings with `role` and `content`, oldest first.
          add_generation_prompt: end with the header of the assistant's answer.

        Raises:
          ValueError: the model has no template, or the template refuses these messages.
        """
        if self.chat_template is None:
            raise ValueError(f"{self.source}: there is no chat template; encode the prompt as plain text")
        try:
            if self._template is None:
                self._template = _environment().from_string(self.chat_template)
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special,
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"{self.source}: chat template: {error}") from None

    def apply_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation, see `render_chat`. The template writes its own special tokens."""
        return self.encode(self.render_chat(messages, add_generation_prompt))

    def save(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Writes the files that `from_directory` reads.

        Returns:
          The files written.
        """
        where = Path(directory)
        where.mkdir(parents=True, exist_ok=True)
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self._special}
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        generation: dict[str, Any] = {"eos_token_id": list(self.eos_ids)}
        if self.bos_id is not None:
            generation["bos_token_id"] = self.bos_id
        files = [where / name for name in _SAVED]
        self._backend.save(str(files[0]))
        for file, content in zip(files[1:], (config, generation), strict=True):
            file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return files


class StreamDecoder:
    """Turns ids that arrive in pieces into text that never changes afterwards.

    What `push` returned so far is always a prefix of the final text: an incomplete UTF-8 sequence is held
    back until its last byte is there or `flush` is called. All parts together equal `Tokenizer.decode` of
    all ids.

    Args:
      tokenizer: of the model.
      skip_special: leave special tokens out.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._reset()

    def _reset(self) -> None:
        self._context: list[int] = []  # ids whose text is out, kept because some decoders look back
        self._pending: list[int] = []
        self._emitted = 0  # characters of decode(context + pending) that are out

    def push(self, ids: Iterable[int]) -> str:
        """Adds ids and returns the text that became certain, possibly none."""
        self._pending.extend(int(i) for i in ids)
        text = self._tokenizer.decode(self._context + self._pending, self._skip_special)
        held = self._held_back(text)
        part = text[self._emitted : len(text) - held]
        if held or not part:
            self._emitted += len(part)
            return part
        # Everything is out: the pending ids become the context, whose text the next call subtracts.
        self._context, self._pending = self._pending, []
        self._emitted = len(self._tokenizer.decode(self._context, self._skip_special))
        return part

    def _held_back(self, text: str) -> int:
        """Characters at the end of `text` that later ids may change."""
        # A run of byte tokens is decoded as a whole: one bad byte at its end turns all of it into U+FFFD.
        start = len(self._pending)
        for index in reversed(range(len(self._pending))):
            kind = self._tokenizer.kind_of(self._pending[index])
            if kind == "byte":
                start = index
            elif not (kind == "absent" or (kind == "special" and self._skip_special)):
                break
        if start < len(self._pending):
            before = self._context + self._pending[:start]
            return len(text) - len(self._tokenizer.decode(before, self._skip_special))
        return 1 if text.endswith(_REPLACEMENT) else 0

    def flush(self) -> str:
        """Returns what is still held back and starts afresh."""
        text = self._tokenizer.decode(self._context + self._pending, self._skip_special)
        part = text[self._emitted :]
        self._reset()
        return part


# Chat templates

_GENERATION_TAG = "generation"


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` ... `{% endgeneration %}`, which mark what to train on; transparent here."""

    tags = {_GENERATION_TAG}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements((f"name:end{_GENERATION_TAG}",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The dialect that chat templates are written in."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    def to_json(value: Any, **options: Any) -> str:
        # Unlike jinja2's own filter, no HTML escapes.
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment


# GGUF

_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + _WORD + r"|\p{N}{1,3}|" + _REST
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + _WORD + r"|\p{N}|" + _REST


def _byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, _byte_level(use_regex=False)])


def _digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)])


PRE_TOKENIZERS = MappingProxyType(
    {
        "smollm": _digits,
        "starcoder": _digits,
        "gpt-2": lambda: _byte_level(use_regex=True),
        "llama-bpe": lambda: _split(_LLAMA3),
        "llama3": lambda: _split(_LLAMA3),
        "llama-v3": lambda: _split(_LLAMA3),
        "qwen2": lambda: _split(_QWEN2),
    }
)
"""`tokenizer.ggml.pre` -> how text is split before BPE, for those that can be rebuilt exactly."""

_IGNORE_MERGES = ("llama-bpe", "llama3", "llama-v3")
_CONTROL, _USER_DEFINED = 3, 4
_MARKERS = ("bos", "eos", "unknown", "padding")
_END_MARKERS = ("eos", "eot", "eom")
# Llama 3 files often name only one of their two end tokens.
_TURN_END = "<|eot_id|>"


def _from_gguf(cls: type[Tokenizer], file: GGUFFile) -> Tokenizer:
    def value(key: str, kind: type, default: Any = None) -> Any:
        found = file.metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(found, kind):
            what = "missing" if found is None else str(found)[:60]
            raise CheckpointError(
                f"{file.path}: metadata tokenizer.ggml.{key} is {what}; give the directory of the original tokenizer"
            )
        return found

    model = value("model", str)
    if model != "gpt2":
        raise CheckpointError(
            f"{file.path}: tokenizer model {model!r} cannot be rebuilt, only byte-level BPE ('gpt2'); "
            "give the directory of the original tokenizer"
        )
    pre = value("pre", str, "default")
    if pre not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{file.path}: pre-tokenizer {pre!r} is not among {', '.join(sorted(PRE_TOKENIZERS))}; "
            "give the directory of the original tokenizer"
        )
    tokens, merges = value("tokens", list), value("merges", list)
    kinds = value("token_type", list, [1] * len(tokens))
    if len(kinds) != len(tokens):
        raise CheckpointError(f"{file.path}: {len(tokens)} tokens, {len(kinds)} token types; copy it again")
    try:
        bpe = models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in merges],
            ignore_merges=pre in _IGNORE_MERGES,
        )
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{file.path}: its vocabulary and merges do not fit: {error}") from None
    backend = tokenizers.Tokenizer(bpe)
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    listed = list(zip(tokens, kinds, strict=True))
    control = [AddedToken(token, special=True, normalized=False) for token, kind in listed if kind == _CONTROL]
    defined = [AddedToken(token, special=False, normalized=False) for token, kind in listed if kind == _USER_DEFINED]
    backend.add_special_tokens(control)
    backend.add_tokens(defined)

    def marker(name: str) -> int | None:
        found = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return found if isinstance(found, int) and 0 <= found < len(tokens) else None

    bos = marker("bos")
    if bos is not None and file.metadata.get("tokenizer.ggml.add_bos_token") is True:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    ends = [i for i in map(marker, _END_MARKERS) if i is not None]
    turn_end = backend.token_to_id(_TURN_END)
    if turn_end is not None and kinds[turn_end] == _CONTROL:
        ends.append(turn_end)
    names = {"unknown": "unk_token", "padding": "pad_token"}
    special = {names.get(m, f"{m}_token"): tokens[i] for m in _MARKERS if (i := marker(m)) is not None}
    template = file.metadata.get("tokenizer.chat_template")
    return cls(
        backend,
        bos_id=bos,
        eos_ids=tuple(dict.fromkeys(ends)),
        chat_template=template if isinstance(template, str) else None,
        special=special,
        source=str(file.path),
    )


# Directories


def _from_directory(cls: type[Tokenizer], path: Path) -> Tokenizer:
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory")
    names = ("tokenizer_config.json", "generation_config.json", "config.json")
    config, generation, model = (read_json_object(path / n) if (path / n).is_file() else {} for n in names)
    backend = _backend(path)

    def text_of(value: Any) -> str | None:
        value = value.get("content") if isinstance(value, dict) else value
        return value if isinstance(value, str) else None

    named = {key: text_of(value) for key, value in config.items() if key.endswith("_token")}
    special = {key: text for key, text in named.items() if text}
    bos_id = backend.token_to_id(special["bos_token"]) if "bos_token" in special else None
    bos_id = _ids(generation, model, "bos_token_id", (bos_id,))[0]
    end = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    eos_ids = _ids(generation, model, "eos_token_id", ())
    return cls(
        backend,
        bos_id=bos_id,
        eos_ids=tuple(dict.fromkeys(i for i in (*eos_ids, end) if i is not None)),
        chat_template=_chat_template(path, config),
        special=special,
        source=str(path),
    )


def _ids(
    generation: Mapping[str, Any], model: Mapping[str, Any], key: str, default: Sequence[int | None]
) -> Sequence[int | None]:
    """One id or several, from the first file that has them."""
    for fields in (generation, model):
        value = fields.get(key)
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value and all(isinstance(i, int) for i in value):
            return value
    return default


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if template is None and (path / "chat_template.json").is_file():
        template = read_json_object(path / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("default")
    return template if isinstance(template, str) else None


def _backend(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if file.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            text = " ".join(str(error).split())
            raise CheckpointError(f"{file}: not a tokenizer: {text}; copy it again") from None
        # Some files carry the settings of a training run; a prompt must be neither cut nor padded.
        backend.no_truncation()
        backend.no_padding()
        return backend
    try:
        from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # transformers raises ValueError, OSError, ImportError, KeyError ...
        text = " ".join(str(error).split())[:160]
        raise CheckpointError(
            f"{path}: no tokenizer.json, and transformers cannot load a tokenizer from it either ({text})"
        ) from None
    backend = getattr(found, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise CheckpointError(f"{path}: its tokenizer cannot be expressed as tokenizer.json; convert it first")
    return backend

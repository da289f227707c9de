"""Text to token ids and back, and the model's own chat template.

The only user of tokenizers and jinja2. A template comes from the model's folder, never from a
request.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

from serving.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    FallbackDetokenizer,
    WindowDetokenizer,
)

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
SPACE = "\u2581"  # SentencePiece's visible space


class TokenizerError(Exception):
    """The folder has no usable tokenizer."""


class TemplateFailed(Exception):
    """The model's chat template refuses these messages, or there is no template."""


class Tokenizer:
    """What a model's folder says about its text. Immutable, so any thread may use it."""

    def __init__(
        self,
        fast: tokenizers.Tokenizer,
        *,
        template: str | None = None,
        special: Mapping[str, str] | None = None,
        eos_ids: frozenset[int] = frozenset(),
        vocab_size: int | None = None,
    ) -> None:
        fast.no_truncation()
        fast.no_padding()
        self._fast = fast
        self._special = dict(special or {})
        self.template = template or ""
        self._template = _environment().from_string(template) if template else None
        added = fast.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self.eos_ids = eos_ids
        self.vocab_size = vocab_size or fast.get_vocab_size()
        spec = json.loads(fast.to_str())
        self._style, self._strips = _style(spec["decoder"])
        self._max_token_bytes = self._longest_token(spec) if self._style == "bytes" else None

    @classmethod
    def load(cls, folder: Path | str) -> "Tokenizer":
        """Read tokenizer.json and what lies beside it. Raises TokenizerError with one line."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{folder} has no tokenizer.json")
        try:
            fast = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{path} cannot be read: {error}") from error
        config = _read(folder / "tokenizer_config.json")
        special = {name: text for name in SPECIAL_NAMES if (text := _content(config.get(name)))}
        model = _read(folder / "config.json")
        return cls(
            fast,
            template=_template_text(folder, config),
            special=special,
            eos_ids=_eos_ids(fast, special, _read(folder / "generation_config.json"), model),
            vocab_size=model.get("vocab_size"),
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Blocking; releases the GIL (the library's own ``encode`` does not), so that a thread
        keeps the event loop free."""
        encodings = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encodings[0].ids)

    def min_tokens(self, text: str) -> int:
        """At least so many tokens, told without encoding: for texts that are far too long."""
        if self._max_token_bytes is None:
            return 0
        return len(text.encode()) // self._max_token_bytes

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def render(self, messages: Sequence[Mapping[str, Any]], **extra: Any) -> str:
        """The prompt that the model's template makes of a conversation."""
        if self._template is None:
            raise TemplateFailed("this model has no chat template; use /v1/completions")
        values = {"add_generation_prompt": True, **self._special, **extra}
        try:
            return self._template.render(messages=messages, **values)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise TemplateFailed(f"the chat template refuses the messages: {error}") from error

    @property
    def takes_tools(self) -> bool:
        """Whether the model's template has a place for functions."""
        return re.search(r"\btools\b", self.template) is not None

    def detokenizer(self) -> Detokenizer:
        """A fresh one, for one sequence."""
        if self._style == "bytes":
            return ByteDetokenizer(self._text_bytes)
        if self._style == "fallback":
            return FallbackDetokenizer(self._piece, self._strips)
        return WindowDetokenizer(self.decode)

    @functools.lru_cache(maxsize=65536)  # noqa: B019 - lives as long as the server
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, special ones by their name; b"" outside the vocabulary."""
        token = self._fast.id_to_token(token_id)
        if token is None:
            return b""
        if self._style == "bytes" and token_id not in self._special_ids:
            return _byte_level(token)
        if self._style == "fallback":
            value = _byte_value(token)
            return bytes([value]) if value is not None else token.replace(SPACE, " ").encode()
        return token.encode()

    def _longest_token(self, spec: Mapping[str, Any]) -> int | None:
        """In bytes of text; None where text may vanish before it is split into tokens."""
        normalizer = spec["normalizer"]
        strips = any(token["lstrip"] or token["rstrip"] for token in spec["added_tokens"])
        if strips or (normalizer is not None and normalizer["type"] != "NFC"):
            return None
        shrink = 1 if normalizer is None else 4  # composing characters shortens text
        return shrink * max(map(len, self._fast.get_vocab(with_added_tokens=True)), default=1)

    def _text_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._special_ids else self.token_bytes(token_id)

    def _piece(self, token_id: int) -> str | int:
        token = self._fast.id_to_token(token_id)
        if token is None or token_id in self._special_ids:
            return ""
        value = _byte_value(token)
        return token.replace(SPACE, " ") if value is None else value


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 byte values."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _byte_level(token: str) -> bytes:
    alphabet = _byte_alphabet()
    try:
        return bytes(alphabet[char] for char in token)
    except KeyError:  # an added token stands for itself
        return token.encode()


def _byte_value(token: str) -> int | None:
    """<0xE2> -> 226; None for every other token."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


def _style(decoder: Mapping[str, Any] | None) -> tuple[str, bool]:
    """How ids become text, and whether one leading space is dropped."""
    kind = decoder["type"] if decoder else None
    if kind == "ByteLevel":
        return "bytes", False
    if decoder and kind == "Sequence":
        steps = {step["type"]: step for step in decoder["decoders"]}
        replace = steps.get("Replace", {})
        known = steps.keys() <= {"Replace", "ByteFallback", "Fuse", "Strip"}
        spaces = replace.get("pattern") == {"String": SPACE} and replace.get("content") == " "
        strip = steps.get("Strip")
        plain = strip is None or (strip["content"], strip["start"], strip["stop"]) == (" ", 1, 0)
        if known and spaces and plain and "ByteFallback" in steps:
            return "fallback", strip is not None
    return "window", False


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _content(token: Any) -> str | None:
    """tokenizer_config.json writes a token as text or as an object with its text."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _template_text(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # named templates
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template


def _eos_ids(
    fast: tokenizers.Tokenizer,
    special: Mapping[str, str],
    generation: Mapping[str, Any],
    model: Mapping[str, Any],
) -> frozenset[int]:
    """The ids that end an answer: generation_config.json's, else config.json's, and eos_token."""
    found = generation.get("eos_token_id", model.get("eos_token_id"))
    ids = set(found if isinstance(found, list) else [found])
    if "eos_token" in special:
        ids.add(fast.token_to_id(special["eos_token"]))
    return frozenset(i for i in ids if isinstance(i, int))


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks the assistant's part for training; for serving it is its body."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - declared so by the base class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    """The environment that Hugging Face renders chat templates in."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

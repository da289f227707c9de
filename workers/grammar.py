"""Which tokens may come next when an answer has to have a form: llguidance, the only user of it.

A grammar is one string that travels with the request: JSON schema, regular expression or Lark, as
llguidance writes it. Front doors use ``problem`` to refuse bad ones, workers use ``matcher``.
No torch here: the mask is a numpy array.
"""

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import llguidance
import llguidance.numpy
import numpy as np
from numpy.typing import NDArray

MAX_CHARS = 65_536
# Bounds on what one grammar may cost: about 20 ms to build, and a few for each token's mask.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
}
JSON_OPTIONS: Any = {"whitespace_flexible": True, "whitespace_pattern": r"[ \t\n]{1,20}"}


def from_schema(schema: Mapping[str, Any] | bool) -> str:
    """As indented as a model likes, but not for ever: some never leave the white space."""
    text = json.dumps(schema)
    return str(llguidance.LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS))


def lark_schema(schema: Mapping[str, Any]) -> str:
    """As ``from_schema``, for a rule of a Lark grammar."""
    return "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS})


def from_regex(pattern: str) -> str:
    return str(llguidance.LLMatcher.grammar_from_regex(pattern))


def from_choices(choices: Iterable[str]) -> str:
    return from_lark(
        "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    )


def from_lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


class Grammars:
    """For one model's vocabulary. Any thread."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._json, self._vocab_size, self._eos_ids = tokenizer, vocab_size, sorted(eos_ids)
        self._lock = threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None

    @classmethod
    def load(cls, folder: Path, vocab_size: int, eos_ids: Iterable[int]) -> "Grammars | None":
        """None when the folder has no tokenizer or no end: then no form can be asked for."""
        path, ids = folder / "tokenizer.json", frozenset(eos_ids)
        if not path.is_file() or not ids:
            return None
        grammars = cls(path.read_text("utf-8"), vocab_size, ids)
        threading.Thread(target=grammars.warm, name="vocabulary", daemon=True).start()
        return grammars

    def warm(self) -> None:
        """Build what every grammar needs: about a second, once."""
        self._vocabulary()

    def problem(self, grammar: str) -> str:
        """Why it cannot be used; "" when it can. Takes as long as building it."""
        error = self.matcher(grammar).error
        return error.splitlines()[0][:200] if error else ""

    def matcher(self, grammar: str) -> "Matcher":
        limits = llguidance.LLParserLimits(**LIMITS)
        matcher = llguidance.LLMatcher(self._vocabulary(), grammar, log_level=0, limits=limits)
        return Matcher(matcher, self._vocab_size)

    def _vocabulary(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = llguidance.LLTokenizer(
                    self._json, n_vocab=self._vocab_size, eos_token=self._eos_ids
                )
            return self._tokenizer


class Matcher:
    """One answer on its way through its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._mask = llguidance.numpy.allocate_token_bitmask(1, vocab_size)
        self._num_seen = 0

    @property
    def error(self) -> str:
        return str(self._matcher.get_error()) if self._matcher.is_error() else ""

    def allowed(self, output: Sequence[int]) -> NDArray[np.bool_] | None:
        """Over the vocabulary, after these tokens; None when the grammar is of no use any more."""
        if self._num_seen > len(output):
            self._matcher.reset()
            self._num_seen = 0
        new, self._num_seen = list(output[self._num_seen :]), len(output)
        if new and not self._matcher.is_stopped():
            self._matcher.consume_tokens(new)
        if self._matcher.is_error():
            return None
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._mask)
        if self._matcher.is_error():
            return None
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")
        return bits[: self._vocab_size].astype(np.bool_)

"""Tool calls in the text of an answer: how models of each kind write them, and reading them as they
arrive.

It knows text. It refuses to know what a tool does, and whether its arguments make sense.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass

WHITE = " \t\n\r"
FILLER = WHITE + "[],;"  # around the calls of one answer
STRAY = ("<|python_tag|>", "[TOOL_CALLS]")  # special tokens, which text mostly leaves out
HEAD = r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"%s"\s*:\s*'


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a model writes calls: each an object with a name and arguments.

    start  before        object                                      after  between before …  end
           <tool_call>⏎  {"name": "f", "arguments": {"x": 1}}  ⏎</tool_call>  ⏎
    """

    arguments: str = "arguments"  # the key that holds them
    start: str = ""
    before: str = ""
    after: str = ""
    between: str | None = None  # None: an answer is one call at most
    end: str = ""
    id_chars: int = 24  # of a call's id, where the template counts them

    @property
    def mark(self) -> str:
        """Where calls begin in a text; "" when only the text's own start can be one."""
        return self.before.strip(WHITE)


HERMES = CallForm(before="<tool_call>\n", after="\n</tool_call>", between="\n")
LLAMA = CallForm(arguments="parameters")
MISTRAL = CallForm(start="[", between=", ", end="]", id_chars=9)


def form_of(template: str) -> CallForm | None:
    """The form that a chat template teaches; None when it is one that nobody here can read."""
    if "<tool_call>" in template:
        return None if "<function=" in template else HERMES
    if "[TOOL_CALLS]" in template:
        return None if "[ARGS]" in template else MISTRAL
    return LLAMA if '"parameters"' in template else None


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What came next of one call. The first delta of a call has its name."""

    index: int
    arguments: str
    name: str = ""
    id: str = ""  # with the name, once the front door has given one


@dataclass(frozen=True, slots=True)
class Parsed:
    text: str = ""  # that is no call
    calls: tuple[CallDelta, ...] = ()


class CallParser:
    """Feed it an answer piece by piece, then ``flush``. What turns out to be no call of a known
    tool comes back as text; after ``max_calls`` nothing comes any more."""

    def __init__(self, form: CallForm, names: Collection[str], max_calls: int) -> None:
        self._form, self._names, self._max_calls = form, names, max_calls
        self._close = form.after.strip(WHITE)
        self._head = re.compile(HEAD % re.escape(form.arguments))
        self._held = ""  # what may become a mark
        self._raw = ""  # since a mark, until a call has been found behind it
        self._object: _Object | None = None  # the call that is being read
        self._is_inside = False  # behind a mark
        self._num_before = 0  # calls before that mark
        self._has_text = False
        self._texts: list[str] = []
        self._deltas: list[CallDelta] = []
        self.num_calls = 0

    def feed(self, text: str) -> Parsed:
        while text and not (self._is_full and self._object is None):
            if self._object is not None:
                text = self._read(self._object, text)
            else:
                text, self._held = self._held + text, ""
                text = self._between(text) if self._is_inside else self._outside(text)
        return self._take()

    def flush(self) -> Parsed:
        """The end of the answer. A call that broke off after its name stays one."""
        is_told = self._object is not None and self._object.num_told >= 0
        rest = "" if is_told else self._raw + self._held
        if rest.strip(FILLER) or not self.num_calls:
            self._say(rest)
        self._held = self._raw = ""
        return self._take()

    @property
    def has_calls(self) -> bool:
        """Whether one was told of, complete or not."""
        return self.num_calls > 0 or (self._object is not None and self._object.num_told >= 0)

    @property
    def _is_full(self) -> bool:
        return self.num_calls >= self._max_calls

    def _take(self) -> Parsed:
        parsed = Parsed("".join(self._texts), tuple(self._deltas))
        self._texts, self._deltas = [], []
        return parsed

    def _say(self, text: str) -> None:
        if text and not self._is_full:
            self._has_text = True
            self._texts.append(text)

    def _outside(self, text: str) -> str:
        """Pass text on; returns what stands behind a mark."""
        mark = self._form.mark
        at = text.find(mark) if mark else self._bare_start(text)
        if at < 0:
            keep = len(text)
            if mark:
                keep = len(text[: _open(text, mark)].rstrip(WHITE))
            elif not self._has_text and not _behind_stray(text):
                keep = 0
            self._say(text[:keep])
            self._held = text[keep:]
            return ""
        before = text[:at].rstrip(WHITE) if mark else ""
        self._say(before)
        self._is_inside, self._raw = True, text[len(before) : at + len(mark)]
        self._num_before = self.num_calls
        return text[at + len(mark) :]

    def _bare_start(self, text: str) -> int:
        """Without a mark an answer is calls from its first character on, or not at all. -1 when
        this is text, or may be."""
        rest = _behind_stray(text)
        is_start = not self._has_text and not self.num_calls and rest[:1] in ("{", "[")
        return len(text) - len(rest) if is_start else -1

    def _between(self, text: str) -> str:
        """Behind a mark, before or after a call; returns what begins there."""
        rest = text.lstrip(FILLER)
        if rest.startswith("{"):
            self._raw += text[: len(text) - len(rest)]
            self._object = _Object(self._head, self._form.arguments)
            return rest
        if not rest or (len(rest) < len(self._close) and self._close.startswith(rest)):
            self._held = text
            return ""
        raw, self._raw, self._is_inside = self._raw, "", False
        if self.num_calls == self._num_before:  # a mark and no call
            self._say(raw + text)
            return ""
        return rest.removeprefix(self._close)

    def _read(self, found: "_Object", text: str) -> str:
        """Into the open object; returns what is behind it."""
        used = found.feed(text)
        self._raw += text[:used]
        if found.name in self._names and (delta := found.take(self.num_calls)) is not None:
            self._deltas.append(delta)
        if found.is_done:
            self._object = None
            if found.num_told >= 0:
                self._raw = ""
                self.num_calls += 1
            else:
                raw, self._raw, self._is_inside = self._raw, "", False
                self._say(raw)
        return text[used:]


class _Object:
    """One JSON object as it arrives. Its arguments are known as they come if they follow its name,
    else at its end."""

    def __init__(self, head: re.Pattern[str], key: str) -> None:
        self._head, self._key = head, key
        self._raw = ""
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._start: int | None = None  # of the arguments in ``_raw``
        self._stop: int | None = None
        self._whole: str | None = None  # arguments that were known at the end only
        self.name = ""
        self.num_told = -1  # characters of its arguments; -1: its name is not told either
        self.is_done = False

    def feed(self, text: str) -> int:
        """How many characters belong to it."""
        seen = len(self._raw)
        self._raw += text
        for used, char in enumerate(text, start=1):
            self._nest(char, seen + used)
            if self.is_done:
                self._raw = self._raw[: seen + used]
                return used
        return len(text)

    def take(self, index: int) -> CallDelta | None:
        """What is known and not told yet."""
        if self._whole is not None:
            known = self._whole
        elif self._start is not None:
            known = self._raw[self._start : self._stop]
        else:
            return None
        is_first, told = self.num_told < 0, max(0, self.num_told)
        self.num_told = len(known)
        if not is_first and told == len(known):
            return None
        return CallDelta(index, known[told:], self.name if is_first else "")

    def _nest(self, char: str, end: int) -> None:
        """One character further, which ends at ``end``."""
        if self._in_string:
            self._in_string = self._is_escaped or char != '"'
            self._is_escaped = char == "\\" and not self._is_escaped
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            if self._depth == 1 and char == "{" and self._start is None:
                self._begin_arguments(end - 1)
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 1 and self._start is not None and self._stop is None:
                self._stop = end
            elif self._depth == 0:
                self._finish(end)

    def _begin_arguments(self, at: int) -> None:
        if match := self._head.fullmatch(self._raw, 0, at):
            self.name, self._start = _text(match[1]), at

    def _finish(self, end: int) -> None:
        self.is_done = True
        if self._start is not None:
            return
        try:
            value = json.loads(self._raw[:end])
        except (ValueError, RecursionError):
            return
        arguments = value.get(self._key, {})
        if isinstance(value.get("name"), str) and isinstance(arguments, dict | str):
            self.name = value["name"]
            self._whole = arguments if isinstance(arguments, str) else json.dumps(arguments)


def _behind_stray(text: str) -> str:
    """Without white space and a special token at its start; "" while there may be more of it."""
    rest = text.lstrip(WHITE)
    if any(stray.startswith(rest) for stray in STRAY):
        return ""
    for stray in STRAY:
        rest = rest.removeprefix(stray)
    return rest.lstrip(WHITE)


def _text(literal: str) -> str:
    """Of a JSON string; "" when it is none."""
    try:
        value = json.loads(literal)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""


def _open(text: str, mark: str) -> int:
    """Where the longest end of ``text`` starts that may still become the mark."""
    for at in range(max(0, len(text) - len(mark) + 1), len(text)):
        if mark.startswith(text[at:]):
            return at
    return len(text)

"""Functions that a chat's answer may call: what the client offers, the grammar of an answer that
must call one, and an answer's deltas with its calls taken out of the text.
"""

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from serving.api.fields import Fields, wrong
from serving.api.form import schema_of
from serving.calls import HERMES, CallDelta, CallForm, CallParser, Parsed, form_of
from serving.generation import Delta
from serving.tokenizer import Tokenizer
from workers import grammar as grammars

Json = Mapping[str, Any]
MAX_TOOLS = 128
MAX_CALLS = 128  # in one answer
MAX_FORCED_CALLS = 16  # of one that is held to calls
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: Json  # JSON schema
    shown: Json  # as templates want it


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What the model is told of, how it writes calls, and whether it must."""

    tools: tuple[Tool, ...]
    form: CallForm
    max_calls: int
    grammar: str = ""  # of an answer that must be calls

    @property
    def shown(self) -> tuple[Json, ...]:
        return tuple(tool.shown for tool in self.tools)


def read_tools(fields: Fields, tokenizer: Tokenizer) -> ToolUse | None:
    """None when no call can be made. Raises BadRequest."""
    for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
        if fields.raw(old):
            raise wrong(old, f"is not offered: use {new}")
    tools = tuple(_tool(entry) for entry in fields.objects("tools"))
    names = [tool.name for tool in tools]
    if len(tools) > MAX_TOOLS:
        raise wrong("tools", f"may hold at most {MAX_TOOLS} functions")
    if len(set(names)) < len(names):
        raise wrong("tools", "name one function twice")
    choice = _choice(fields, names)
    parallel = fields.flag("parallel_tool_calls", True)
    if choice == "none":
        return None
    form = form_of(tokenizer.template) if tokenizer.takes_tools else HERMES
    if form is None:
        raise wrong("tools", "are not offered: this model's template writes calls in another form")
    many = parallel and form.between is not None
    if choice == "auto":
        return ToolUse(tools, form, MAX_CALLS if parallel else 1)
    forced = tools if choice == "required" else [t for t in tools if t.name == choice[1:]]
    limit = MAX_FORCED_CALLS if many and choice == "required" else 1
    return ToolUse(tools, form, limit, _grammar(forced, form, limit))


def _tool(fields: Fields) -> Tool:
    if fields.text("type") != "function":
        raise fields.wrong("type", "must be function")
    function = fields.section("function")
    name = function.text("name")
    if not NAME.fullmatch(name):
        raise function.wrong("name", "must be 1 to 64 letters, digits, _, - and .")
    shown: dict[str, Any] = {"name": name, "description": function.text("description")}
    has_schema = function.raw("parameters") is not None
    parameters = schema_of(function, "parameters") if has_schema else NOTHING
    function.flag("strict")
    shown["parameters"] = parameters
    return Tool(name, parameters, {"type": "function", "function": shown})


def _choice(fields: Fields, names: Sequence[str]) -> str:
    """One of CHOICES, or "=" and the name of the function that must be called."""
    choice = fields.raw("tool_choice")
    if choice is None:
        return "auto" if names else "none"
    if isinstance(choice, Mapping):
        asked = fields.section("tool_choice")
        if asked.text("type") != "function":
            raise asked.wrong("type", "must be function")
        name = asked.section("function").text("name")
        if name not in names:
            raise wrong("tool_choice", "names a function that tools does not have")
        return f"={name}"
    if choice not in CHOICES:
        raise wrong("tool_choice", f"must be {', '.join(CHOICES)} or a function of tools")
    if choice == "required" and not names:
        raise wrong("tool_choice", "needs tools")
    return str(choice) if names else "none"


def _grammar(tools: Sequence[Tool], form: CallForm, max_calls: int) -> str:
    """Calls as the model writes them, each function's arguments held to its own schema."""
    rules = []
    for i, tool in enumerate(tools):
        head = f'{form.before}{{"name": {json.dumps(tool.name)}, "{form.arguments}": '
        rules.append(f"call_{i}: {_quoted(head)} arguments_{i} {_quoted('}' + form.after)}")
        rules.append(f"arguments_{i}: {grammars.lark_schema(tool.parameters)}")
    more = f" ({_quoted(form.between or '')} call){{0,{max_calls - 1}}}" if max_calls > 1 else ""
    ends = [_quoted(text) if text else "" for text in (form.start, form.end)]
    any_call = " | ".join(f"call_{i}" for i in range(len(tools)))
    return grammars.from_lark(
        "\n".join((f"start: {ends[0]} call{more} {ends[1]}", f"call: {any_call}", *rules))
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class CallReader:
    """The deltas of one answer, all its choices, with calls in their place."""

    def __init__(self, use: ToolUse, num_choices: int) -> None:
        names = {tool.name for tool in use.tools}
        self._form = use.form
        self._parsers = [CallParser(use.form, names, use.max_calls) for _ in range(num_choices)]
        self._kept: dict[int, Delta] = {}  # what has come and says nothing yet

    def read(self, delta: Delta) -> Delta | None:
        """None while the text so far may become a call."""
        parser = self._parsers[delta.index]
        parts = [parser.feed(delta.text)]
        if delta.finish_reason is not None:
            parts.append(parser.flush())
        text, calls = _joined(parts)
        reason = delta.finish_reason
        if reason == "stop" and parser.has_calls:
            reason = "tool_calls"
        delta = replace(delta, text=text, calls=self._named(calls), finish_reason=reason)
        delta = _after(self._kept.pop(delta.index, None), delta)
        if delta.text or delta.calls or delta.finish_reason:
            return delta
        self._kept[delta.index] = delta
        return None

    def _named(self, calls: Iterable[CallDelta]) -> tuple[CallDelta, ...]:
        return tuple(
            replace(call, id=_call_id(self._form.id_chars)) if call.name else call for call in calls
        )


def _joined(parts: Sequence[Parsed]) -> tuple[str, list[CallDelta]]:
    return "".join(part.text for part in parts), [call for part in parts for call in part.calls]


def _after(kept: Delta | None, delta: Delta) -> Delta:
    if kept is None:
        return delta
    return replace(
        delta,
        token_ids=kept.token_ids + delta.token_ids,
        logprobs=kept.logprobs + delta.logprobs,
        prompt=kept.prompt + delta.prompt,
    )


def _call_id(num_chars: int) -> str:
    """Some templates take ids of exactly so many letters and digits, and no prefix."""
    token = secrets.token_hex(num_chars)[:num_chars]
    return token if num_chars < 24 else f"call_{token}"

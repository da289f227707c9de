"""A chat's messages, checked, and the one text that the model's template makes of them.

A model whose template knows no tools is told of them in words of ours, those that Qwen's template
uses: a system message, calls as <tool_call> and results as <tool_response>.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serving.api.fields import Fields, as_text, wrong
from serving.calls import HERMES
from serving.errors import BadRequest
from serving.tokenizer import TemplateFailed, Tokenizer

Json = Mapping[str, Any]
MAX_CALLS = 128  # in one message

INTRODUCTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class Conversation:
    """``ending``: "answer" opens the model's turn, "continue" leaves the last message open, "end"
    stops behind it."""

    messages: tuple[Json, ...]
    tools: tuple[Json, ...] = ()  # as templates want them
    ending: str = "answer"

    def text(self, tokenizer: Tokenizer) -> str:
        """As the model wants to see it. Raises BadRequest."""
        messages, extra = self.messages, {}
        if tokenizer.takes_tools:
            extra = {"tools": list(self.tools)} if self.tools else {}
        elif self.tools or any(m["role"] == "tool" or "tool_calls" in m for m in messages):
            messages = _in_plain_words(messages, self.tools)
        opens = self.ending == "answer"
        try:
            text = tokenizer.render(messages, add_generation_prompt=opens, **extra)
        except TemplateFailed as error:
            raise BadRequest(str(error), "messages") from error
        if self.ending == "continue":
            return _without_end(text, messages[-1]["content"])
        return text


def read_conversation(fields: Fields, tools: Sequence[Json] = ()) -> Conversation:
    """Raises BadRequest with the path of the first thing that is wrong."""
    _refuse_templates(fields)
    messages = tuple(_message(message) for message in fields.objects("messages"))
    if not messages:
        raise wrong("messages", "must be a list with at least one message")
    return Conversation(messages, tuple(tools), _ending(fields))


def _message(fields: Fields) -> Json:
    role = fields.text("role")
    if not role:
        raise fields.wrong("role", "is missing")
    checked: dict[str, Any] = {"role": role}
    calls = [_call(call) for call in fields.objects("tool_calls")] if role == "assistant" else []
    if len(calls) > MAX_CALLS:
        raise fields.wrong("tool_calls", f"may hold at most {MAX_CALLS} calls")
    content = fields.raw("content")
    is_silent = bool(calls) and content in (None, "", [])
    checked["content"] = "" if is_silent else _content(content, fields.name("content"))
    if calls:
        checked["tool_calls"] = calls
    for optional in ("name", *(["tool_call_id"] if role == "tool" else [])):
        if text := fields.text(optional):
            checked[optional] = text
    return checked


def _call(fields: Fields) -> Json:
    """One of the assistant's calls; arguments as a value, which is what templates want."""
    fields.one_of("type", "function", ("function",))
    function = fields.section("function")
    if not (name := function.text("name")):
        raise function.wrong("name", "is missing")
    text = function.text("arguments") or "{}"
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise function.wrong("arguments", "must be the text of a JSON object")
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": fields.text("id"), **call}


def _content(content: Any, path: str) -> str:
    """A string, or parts that are all text."""
    if isinstance(content, str):
        return as_text(content, path)
    if not isinstance(content, Sequence) or not content:
        raise wrong(path, "must be a string or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        where = f"{path}[{i}]"
        if not isinstance(part, Mapping):
            raise wrong(where, "must be an object")
        if part.get("type") != "text":
            raise wrong(f"{where}.type", "must be text: this model reads nothing else")
        texts.append(as_text(part.get("text"), f"{where}.text"))
    return "".join(texts)


def _ending(fields: Fields) -> str:
    continues = fields.flag("continue_final_message")
    answers = fields.flag("add_generation_prompt", not continues)
    if continues and answers:
        raise wrong("continue_final_message", "needs add_generation_prompt: false")
    return "continue" if continues else "answer" if answers else "end"


def _without_end(text: str, content: str) -> str:
    """Up to the end of the last message's content, without what the template puts after it."""
    content = content.strip()
    found = text.rfind(content) if content else -1
    if found < 0:
        raise wrong("continue_final_message", "does not work with this message and template")
    return text[: found + len(content)]


def _refuse_templates(fields: Fields) -> None:
    """A template is a program: it comes from the model's folder or not at all."""
    if fields.raw("chat_template") is not None:
        raise wrong("chat_template", "is never taken from a request")
    if fields.raw("chat_template_kwargs"):
        raise wrong("chat_template_kwargs", "is not offered: the model's template takes none here")


def _in_plain_words(messages: Sequence[Json], tools: Sequence[Json]) -> tuple[Json, ...]:
    """For a template that knows roles and texts only."""
    told = [_as_text(message) for message in messages]
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        words = INTRODUCTION.format(tools=listed)
        if told[0]["role"] == "system":
            told[0] = {**told[0], "content": f"{told[0]['content']}\n\n{words}"}
        else:
            told.insert(0, {"role": "system", "content": words})
    return tuple(told)


def _as_text(message: Json) -> Json:
    if message["role"] == "tool":
        response = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": response}
    if "tool_calls" not in message:
        return message
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
    texts = [message["content"], *(f"{HERMES.before}{call}{HERMES.after}" for call in calls)]
    return {"role": "assistant", "content": "\n".join(text for text in texts if text)}

"""The form that a client wants its answer to have, as the one grammar string that workers follow.

OpenAI's ``response_format`` and vLLM's ``structured_outputs`` and ``guided_*``. A grammar that
cannot be used is a BadRequest here: it never reaches a worker.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from serving.api.fields import Fields, as_text
from serving.errors import BadRequest
from workers import grammar as grammars

CHECK_TIMEOUT_S = 2.0
MAX_CHOICES = 1000
MAX_DEPTH = 64  # of a schema
ANY_OBJECT = {"type": "object"}
KINDS = ("json", "regex", "choice", "grammar")

# One at a time: what is expensive to check delays others of its kind, and nobody else.
_checker = ThreadPoolExecutor(1, "grammar-check")


async def read_form(fields: Fields, known: grammars.Grammars | None) -> str:
    """The grammar; "" when any text will do. Raises BadRequest with the field's name."""
    asked = [pair for pair in (_response_format(fields), *_vllm(fields)) if pair is not None]
    if not asked:
        return ""
    if len(asked) > 1:
        raise BadRequest(f"{asked[0][0]} and {asked[1][0]} ask for two forms of one answer")
    ((param, grammar),) = asked
    return await checked(grammar, param, known)


async def checked(grammar: str, param: str, known: grammars.Grammars | None) -> str:
    """The grammar, once it is known that workers can use it. Raises BadRequest."""
    if known is None:
        raise BadRequest(f"{param} is not offered for this model", param)
    if len(grammar) > grammars.MAX_CHARS:
        raise BadRequest(f"{param} has more than {grammars.MAX_CHARS} characters", param)
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(_checker, known.warm)
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            problem = await loop.run_in_executor(_checker, known.problem, grammar)
    except TimeoutError:
        raise BadRequest(f"{param} takes too long to compile", param) from None
    if problem:
        raise BadRequest(f"{param} cannot be used as a grammar", param)
    return grammar


def _response_format(fields: Fields) -> tuple[str, str] | None:
    form = fields.section("response_format")
    kind = form.text("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return "response_format", grammars.from_schema(ANY_OBJECT)
    if kind != "json_schema":
        raise form.wrong("type", "must be text, json_object or json_schema")
    described = form.section("json_schema")
    for ignored in ("name", "strict", "description"):
        described.raw(ignored)
    return "response_format", grammars.from_schema(schema_of(described, "schema"))


def _vllm(fields: Fields) -> list[tuple[str, str] | None]:
    nested = fields.section("structured_outputs")
    return [
        *(_one(nested, kind, kind) for kind in KINDS),
        *(_one(fields, f"guided_{kind}", kind) for kind in KINDS),
    ]


def _one(fields: Fields, name: str, kind: str) -> tuple[str, str] | None:
    value = fields.raw(name)
    if value is None:
        return None
    param = fields.name(name)
    if kind == "json":
        return param, grammars.from_schema(schema_of(fields, name))
    if kind == "choice":
        return param, grammars.from_choices(_choices(value, fields, name))
    text = as_text(value, param)
    return param, grammars.from_regex(text) if kind == "regex" else grammars.from_lark(text)


def schema_of(fields: Fields, name: str) -> Mapping[str, Any]:
    """A JSON schema that is not too deep. Raises BadRequest."""
    value = fields.raw(name)
    if not isinstance(value, Mapping):
        raise fields.wrong(name, "must be a JSON schema, an object")
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in _children(node)]
        if not level:
            return value
    raise fields.wrong(name, f"is nested more than {MAX_DEPTH} deep")


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, Mapping):
        return node.values()
    return node if isinstance(node, list) else ()


def _choices(value: Any, fields: Fields, name: str) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not len(value) > 0:
        raise fields.wrong(name, "must be a list of strings")
    if len(value) > MAX_CHOICES:
        raise fields.wrong(name, f"may have at most {MAX_CHOICES} choices")
    choices = [as_text(choice, fields.name(name)) for choice in value]
    if not all(choices):
        raise fields.wrong(name, "has an empty choice")
    return choices

"""Reading one untyped JSON object field by field. A wrong type or range is a BadRequest naming it.

``null`` means absent. A bool is never a number. Values are never put into messages: they may be
somebody's text.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from serving.errors import BadRequest


class Fields:
    """Remembers which names were asked for: the rest are the unknown ones."""

    def __init__(self, body: Mapping[str, Any], path: str = "") -> None:
        self._body = body
        self._path = path
        self._known: set[str] = set()
        self._sections: list[Fields] = []

    def name(self, field: str) -> str:
        return f"{self._path}{field}"

    def raw(self, field: str) -> Any:
        self._known.add(field)
        return self._body.get(field)

    def unknown(self) -> list[str]:
        """Full names, those of nested objects included."""
        own = [self.name(field) for field in self._body if field not in self._known]
        return own + [name for section in self._sections for name in section.unknown()]

    def integer(self, field: str, default: int, low: int, high: int) -> int:
        value = self.optional_integer(field, low, high)
        return default if value is None else value

    def optional_integer(self, field: str, low: int, high: int) -> int | None:
        value = self.raw(field)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():  # JSON writers that know one number
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(field, "must be an integer")
        if not low <= value <= high:
            raise self.wrong(field, f"must be between {low} and {high}")
        return value

    def number(self, field: str, default: float, low: float, high: float) -> float:
        value = self.optional_number(field, low, high)
        return default if value is None else value

    def optional_number(self, field: str, low: float, high: float) -> float | None:
        value = self.raw(field)
        if value is None:
            return None
        if not is_number(value):
            raise self.wrong(field, "must be a finite number")
        if not low <= value <= high:
            raise self.wrong(field, f"must be between {low:g} and {high:g}")
        return float(value)

    def flag(self, field: str, default: bool = False) -> bool:
        value = self.raw(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(field, "must be true or false")
        return value

    def text(self, field: str, default: str = "") -> str:
        value = self.raw(field)
        return default if value is None else as_text(value, self.name(field))

    def one_of(self, field: str, default: str, choices: tuple[str, ...]) -> str:
        value = self.text(field, default)
        if value not in choices:
            raise self.wrong(field, f"must be one of {', '.join(choices)}")
        return value

    def section(self, field: str) -> "Fields":
        """A nested object; an absent one is empty."""
        value = self.raw(field)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.wrong(field, "must be an object")
        nested = Fields(value, f"{self.name(field)}.")
        self._sections.append(nested)
        return nested

    def objects(self, field: str) -> list["Fields"]:
        """A list of objects; an absent one is empty."""
        value = self.raw(field)
        if value is None:
            return []
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self.wrong(field, "must be a list")
        for i, item in enumerate(value):
            if not isinstance(item, Mapping):
                raise self.wrong(f"{field}[{i}]", "must be an object")
        nested = [Fields(item, f"{self.name(field)}[{i}].") for i, item in enumerate(value)]
        self._sections += nested
        return nested

    def wrong(self, field: str, what: str) -> BadRequest:
        return wrong(self.name(field), what)


def wrong(param: str, what: str) -> BadRequest:
    return BadRequest(f"{param} {what}", param)


def is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond every float
        return False


def as_text(value: Any, param: str) -> str:
    """A string that can be UTF-8: JSON can carry half a surrogate pair, a tokenizer cannot."""
    if not isinstance(value, str):
        raise wrong(param, "must be a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise wrong(param, "is not valid Unicode: it holds half a surrogate pair") from None
    return value

"""The demonstration: chats that stream while somebody else's long prompt is prefilled.

A client like any other, over HTTP. It measures what a reader of the streams would see, and draws
nothing.
"""

import asyncio
import json
import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from serving.service import ServiceError, key_header

MODES = ("mixed", "disaggregated")
CHAT_TOKENS = 160  # enough to outlast the long prompt on a slow machine
LONG_TOKENS = 16
WARM_TOKENS = 8  # of every chat before the long prompt arrives
TIMEOUT_S = 300.0
PARAGRAPH = (
    "The river rose in the night, and by morning the lower fields were a lake in which the "
    "fence posts stood like the masts of small sunken boats. Nobody in the village had seen it so "
    "high, and the old people, who had seen everything, said so twice. "
)
QUESTIONS = (
    "Why is the sky blue?",
    "How does a bicycle stay upright?",
    "Tell me about the history of bread.",
    "What makes a good story?",
    "How do bees find their way home?",
    "Explain why the sea is salty.",
    "What should I cook tonight?",
    "How were the pyramids built?",
)


@dataclass(slots=True)
class Stream:
    """What the reader of one answer saw."""

    name: str
    sent_at: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # one per piece of text
    route: dict[str, Any] = field(default_factory=dict)  # the evenflow object of the last chunk
    is_done: bool = False

    @property
    def ttft_s(self) -> float | None:
        return self.arrivals[0] - self.sent_at if self.arrivals else None

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    def gaps_between(self, start: float, end: float) -> list[float]:
        """Gaps that a reader waited out, wholly or in part, between the two moments."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return [b - a for a, b in pairs if b > start and a < end]


@dataclass(frozen=True, slots=True)
class Result:
    """One mode: the chats, and the long prompt among them."""

    mode: str
    chats: tuple[Stream, ...]
    long: Stream

    @property
    def prefill_window(self) -> tuple[float, float]:
        first = self.long.arrivals[0] if self.long.arrivals else time.monotonic()
        return self.long.sent_at, first

    def gaps_alone(self) -> list[float]:
        start, _ = self.prefill_window
        return [gap for chat in self.chats for gap in chat.gaps_between(0.0, start)]

    def gaps_during(self) -> list[float]:
        window = self.prefill_window
        return [gap for chat in self.chats for gap in chat.gaps_between(*window)]

    def summary(self) -> dict[str, Any]:
        """For a table or a machine; seconds."""
        alone, during = self.gaps_alone(), self.gaps_during()
        return {
            "mode": self.mode,
            "long_ttft_s": self.long.ttft_s,
            "long_transfer_s": self.long.route.get("transfer_s"),
            "gap_alone_median_s": statistics.median(alone) if alone else None,
            "gap_during_median_s": statistics.median(during) if during else None,
            "gap_during_max_s": max(during, default=None),
            "fallback": self.long.route.get("fallback"),
            "requests": [{"name": s.name, **s.route} for s in (*self.chats, self.long)],
        }


class Demo:
    """Runs against any Evenflow at ``url``. ``streams`` is what can be watched meanwhile."""

    def __init__(self, url: str, num_chats: int, prompt_tokens: int) -> None:
        self._url, self._num_chats, self._prompt_tokens = url, num_chats, prompt_tokens
        self.mode = ""
        self.streams: tuple[Stream, ...] = ()

    def run(self, on_result: Callable[[Result], None]) -> list[Result]:
        """Both modes, one after the other. ServiceError when something does not answer."""
        return asyncio.run(self._run(on_result))

    async def _run(self, on_result: Callable[[Result], None]) -> list[Result]:
        limits = httpx.Limits(max_connections=None)
        try:
            async with httpx.AsyncClient(
                base_url=self._url,
                timeout=TIMEOUT_S,
                limits=limits,
                headers=key_header(),
                trust_env=False,
            ) as client:
                results = []
                for mode in MODES:
                    prompt = await self._long_prompt(client)
                    result = await self._run_mode(client, mode, prompt)
                    on_result(result)
                    results.append(result)
                return results
        except BaseExceptionGroup as group:
            raise _first(group) from None
        except httpx.HTTPError as error:
            raise _unreachable(error) from None

    async def _run_mode(
        self, client: httpx.AsyncClient, mode: str, prompt: Sequence[int]
    ) -> Result:
        chats = tuple(Stream(f"chat {i + 1}") for i in range(self._num_chats))
        long = Stream(f"prompt of {len(prompt)} tokens")
        self.mode, self.streams = mode, (*chats, long)
        async with asyncio.TaskGroup() as group:
            for chat, question in zip(chats, _questions(len(chats)), strict=True):
                group.create_task(_chat(client, chat, question, mode))
            while any(len(s.arrivals) < WARM_TOKENS and not s.is_done for s in chats):
                await asyncio.sleep(0.02)
            group.create_task(_complete(client, long, prompt, mode))
        return Result(mode, chats, long)

    async def _long_prompt(self, client: httpx.AsyncClient) -> list[int]:
        """Of the wanted length, and unlike any before: a cached prefix would spare the work."""
        text = f"Chapter {uuid.uuid4()}. " + PARAGRAPH * (1 + self._prompt_tokens // 40)
        answer = await client.post("/tokenize", json={"prompt": text})
        body = _checked(answer.status_code, answer.content)
        longest = body["max_model_len"] - LONG_TOKENS
        if self._prompt_tokens > longest:
            raise ServiceError(f"prompt_tokens: {self._prompt_tokens} is more than {longest}")
        tokens: list[int] = body["tokens"][: self._prompt_tokens]
        return tokens


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that ended all streams; the others were cancelled for it."""
    error = group.exceptions[0]
    if isinstance(error, BaseExceptionGroup):
        return _first(error)
    return _unreachable(error) if isinstance(error, httpx.HTTPError) else error


def _unreachable(error: httpx.HTTPError) -> ServiceError:
    return ServiceError(f"the server does not answer: {error or type(error).__name__}")


def _questions(number: int) -> list[str]:
    return [QUESTIONS[i % len(QUESTIONS)] for i in range(number)]


async def _chat(client: httpx.AsyncClient, stream: Stream, question: str, mode: str) -> None:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": CHAT_TOKENS}
    await _read(client, "/v1/chat/completions", body, stream, mode)


async def _complete(
    client: httpx.AsyncClient, stream: Stream, prompt: Sequence[int], mode: str
) -> None:
    body = {"prompt": prompt, "max_tokens": LONG_TOKENS}
    await _read(client, "/v1/completions", body, stream, mode)


async def _read(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], stream: Stream, mode: str
) -> None:
    """Send one request and note when each piece of its answer arrives."""
    fixed = {"stream": True, "temperature": 0.8, "seed": 1, "ignore_eos": True}
    stream.sent_at = time.monotonic()
    try:
        json_body = {**body, **fixed, "evenflow": {"mode": mode}}
        async with client.stream("POST", path, json=json_body) as answer:
            if answer.status_code != 200:
                _checked(answer.status_code, await answer.aread())
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    _note(stream, json.loads(line[6:]))
    finally:
        stream.is_done = True


def _note(stream: Stream, event: dict[str, Any]) -> None:
    if "error" in event:
        raise ServiceError(f"{stream.name}: {event['error']['message']}")
    for choice in event["choices"]:
        if choice.get("text") or choice.get("delta", {}).get("content"):
            stream.arrivals.append(time.monotonic())
    stream.route = event.get("evenflow", stream.route)


def _checked(status: int, body: bytes) -> dict[str, Any]:
    """The answer's JSON; ServiceError with the server's own words when it refuses."""
    try:
        parsed: dict[str, Any] = json.loads(body)
    except ValueError:
        raise ServiceError(f"HTTP {status} with a body that is not JSON") from None
    if status != 200:
        raise ServiceError(parsed.get("error", {}).get("message", f"HTTP {status}"))
    return parsed

"""An HTTP client that streams completions and notes when each token came. It hides no error.

It speaks three dialects: OpenAI's, with vLLM's ``return_token_ids``, llama.cpp's own, and that of
transformers, which takes and gives text. All say how many tokens an event brings, so that a gap is
always one between two tokens.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from bench.report import Record
from bench.workloads import Ask, prompt_of

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one kind of server is asked for exactly so many tokens, and how it answers."""

    path: str
    body: Callable[[list[int], int], Event]
    num_tokens: Callable[[Event, int], int]  # that an event brings, after so many before it


def _openai_body(prompt: list[int], max_tokens: int) -> Event:
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


def _openai_tokens(event: Event, _: int) -> int:
    return sum(len(choice.get("token_ids") or ()) for choice in event["choices"])


def _llama_body(prompt: list[int], max_tokens: int) -> Event:
    return {
        "prompt": prompt,
        "n_predict": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "cache_prompt": False,
        "timings_per_token": True,  # text may lag behind tokens; this count does not
    }


def _llama_tokens(event: Event, before: int) -> int:
    timings = event.get("timings")
    return int(timings["predicted_n"]) - before if timings else 0


def text_dialect(words: Sequence[str]) -> Dialect:
    """Of a server that takes no token ids: a prompt of as many words, each of which is one token.
    It ends at no token, like the others, and sends the text of each token by itself; what it could
    not show yet is counted with the end."""

    def body(prompt: list[int], max_tokens: int) -> Event:
        return {
            "prompt": "".join(words[token % len(words)] for token in prompt),
            "max_tokens": max_tokens,
            "stream": True,
            "generation_config": json.dumps({"eos_token_id": -1, "do_sample": False}),
        }

    def num_tokens(event: Event, before: int) -> int:
        if event.get("usage"):
            return int(event["usage"]["completion_tokens"]) - before
        return sum(bool(choice.get("text")) for choice in event["choices"])

    return Dialect("/v1/completions", body, num_tokens)


OPENAI = Dialect("/v1/completions", _openai_body, _openai_tokens)
LLAMA = Dialect("/completion", _llama_body, _llama_tokens)


async def stream(
    client: httpx.AsyncClient, name: str, prompt: list[int], max_tokens: int, **body: object
) -> Record:
    """Send one streaming completion of exactly ``max_tokens`` tokens. Never raises for the
    server's failures: they are in ``Record.error``."""
    record = Record(name, time.perf_counter(), num_prompt_tokens=len(prompt))
    await fill(client, record, prompt, max_tokens, body=body)
    return record


async def fill(
    client: httpx.AsyncClient,
    record: Record,
    prompt: list[int],
    max_tokens: int,
    *,
    dialect: Dialect = OPENAI,
    until: float | None = None,
    body: Event | None = None,
) -> None:
    """As ``stream``, into a record that is there already. With ``until`` the client leaves at the
    first token after that time, which is no error."""
    request = dialect.body(prompt, max_tokens) | (body or {})
    try:
        async with client.stream("POST", dialect.path, json=request) as response:
            if response.status_code != 200:
                record.error = f"HTTP {response.status_code}: {(await response.aread())[:300]!r}"
                return
            async for line in response.aiter_lines():
                _read(line, record, dialect)
                if until is not None and time.perf_counter() > until:
                    return
    except httpx.HTTPError as error:
        record.error = f"{type(error).__name__}: {error}"
    if record.error is None and len(record.token_times) != max_tokens:
        record.error = f"{len(record.token_times)} tokens instead of {max_tokens}"


async def play(
    client: httpx.AsyncClient,
    asks: Sequence[Ask],
    *,
    dialect: Dialect = OPENAI,
    patience_s: float | None = None,
) -> list[Record]:
    """Send every request when it is due, whatever became of those before it (open loop).

    Times count from when a request was due, so a late client counts against the server. What is
    not finished ``patience_s`` after the last arrival is given up, and has an error that says so.
    """
    prompts = [prompt_of(ask.num_prompt_tokens, ask.seed) for ask in asks]
    start = time.perf_counter() + 0.1
    records = [Record(a.name, start + a.at_s, num_prompt_tokens=a.num_prompt_tokens) for a in asks]

    async def send(ask: Ask, record: Record, prompt: list[int]) -> None:
        await asyncio.sleep(max(0.0, record.sent_at - time.perf_counter()))
        until = None if ask.until_s is None else start + ask.until_s
        await fill(client, record, prompt, ask.max_tokens, dialect=dialect, until=until)

    tasks = [asyncio.create_task(send(*each)) for each in zip(asks, records, prompts, strict=True)]
    last = max((ask.at_s for ask in asks), default=0.0)
    timeout = None if patience_s is None else last + patience_s
    done, late = await asyncio.wait(tasks, timeout=timeout) if tasks else (set(), set())
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    for task, record in zip(tasks, records, strict=True):
        if task in late:
            record.error = f"not finished {patience_s:g} s after the last arrival"
    for task in done:
        task.result()  # a bug of this client is not a slow server
    return records


def _read(line: str, record: Record, dialect: Dialect) -> None:
    if not line.startswith("data: ") or line == "data: [DONE]":
        return
    now = time.perf_counter()
    event = json.loads(line[6:])
    if "error" in event:
        record.error = event["error"]["message"]
        return
    record.token_times.extend([now] * dialect.num_tokens(event, len(record.token_times)))
    record.evenflow = event.get("evenflow") or record.evenflow


def open_client(base_url: str) -> httpx.AsyncClient:
    """A client with room for every stream of a benchmark and patience for a slow server."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=base_url, timeout=httpx.Timeout(600.0), limits=limits)

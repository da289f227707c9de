"""An HTTP client that streams completions and notes when each token came. It hides no error."""

import json
import time

import httpx

from bench.report import Record


async def stream(
    client: httpx.AsyncClient, name: str, prompt: list[int], max_tokens: int, **body: object
) -> Record:
    """Send one streaming completion of exactly ``max_tokens`` tokens. Never raises for the
    server's failures: they are in ``Record.error``."""
    record = Record(name, time.perf_counter())
    request = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **body,
    }
    try:
        async with client.stream("POST", "/v1/completions", json=request) as response:
            if response.status_code != 200:
                record.error = f"HTTP {response.status_code}: {(await response.aread())[:300]!r}"
                return record
            async for line in response.aiter_lines():
                _read(line, record)
    except httpx.HTTPError as error:
        record.error = f"{type(error).__name__}: {error}"
    if record.error is None and len(record.token_times) != max_tokens:
        record.error = f"{len(record.token_times)} tokens instead of {max_tokens}"
    return record


def _read(line: str, record: Record) -> None:
    if not line.startswith("data: ") or line == "data: [DONE]":
        return
    now = time.perf_counter()
    event = json.loads(line[6:])
    if "error" in event:
        record.error = event["error"]["message"]
        return
    for choice in event["choices"]:
        record.token_times.extend([now] * len(choice.get("token_ids") or ()))
    record.evenflow = event.get("evenflow") or record.evenflow


def open_client(base_url: str) -> httpx.AsyncClient:
    """A client with room for every stream of a benchmark and patience for a slow server."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=base_url, timeout=httpx.Timeout(600.0), limits=limits)

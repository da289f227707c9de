"""openai-python and a raw socket against a real HTTP server over scripted workers."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from serving.api.openai import build_app
from serving.api.settings import FrontSettings
from serving.config import TlsConfig
from serving.gateway import Gateway
from serving.http_server import HttpServer
from serving.pools import Submission
from tests.fakes import Event, FakePools, Script, hashed, worker
from tests.front import MODEL, TOKENIZER, keyring, says
from workers.core.output import Output

pytestmark = pytest.mark.cluster

CHAT: list[Any] = [{"role": "user", "content": "Hello there"}]
TEXT = "Grüße 👨‍👩‍👧‍👦 und 안녕하세요 an alle."


@dataclass(slots=True)
class Served:
    pools: FakePools
    gateway: Gateway
    client: openai.AsyncOpenAI
    port: int


@contextlib.asynccontextmanager
async def served(
    script: Script, *, delay_s: float = 0.0, max_queue: int = 256, **settings: Any
) -> AsyncIterator[Served]:
    pools = FakePools(worker("prefill-0"), worker("decode-0"), script=script, delay_s=delay_s)
    gateway = Gateway(pools, TOKENIZER, model=MODEL, max_queue=max_queue)
    app = build_app(gateway, FrontSettings(MODEL, **settings))
    server = HttpServer(app, TlsConfig())
    with socket.create_server(("127.0.0.1", 0)) as sock:
        task = asyncio.create_task(server.serve(sockets=[sock]))
        port = sock.getsockname()[1]
        client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="secret", max_retries=0
        )
        try:
            yield Served(pools, gateway, client, port)
        finally:
            await client.close()
            server.should_exit = True
            await task


async def quiet(pools: FakePools, gateway: Gateway, within_s: float = 1.0) -> None:
    """Nothing runs or is held, and nothing is sampled any more."""
    async with asyncio.timeout(within_s):
        while pools.held or gateway.num_calls:
            await asyncio.sleep(0.01)
    sampled = pools.num_tokens
    await asyncio.sleep(0.05)
    assert pools.num_tokens == sampled


async def test_chat_streams_and_whole_answers_agree() -> None:
    async with served(says(TEXT)) as s:
        chat = s.client.chat.completions
        whole = await chat.create(model=MODEL, messages=CHAT, max_tokens=500)
        assert whole.choices[0].message.content == TEXT
        assert whole.choices[0].finish_reason == "stop"
        stream = await chat.create(
            model=MODEL,
            messages=CHAT,
            max_tokens=500,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"evenflow": {"mode": "disaggregated"}},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == TEXT
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].usage == whole.usage
        assert chunks[-2].model_extra["evenflow"]["workers"] == ["prefill-0", "decode-0"]
        await quiet(s.pools, s.gateway)


async def test_logprobs_stop_and_n_as_the_client_library_reads_them() -> None:
    """FAULTS 109, 17."""
    async with served(says(TEXT)) as s:
        chat = s.client.chat.completions
        answer = await chat.create(
            model=MODEL, messages=CHAT, max_tokens=500, logprobs=True, top_logprobs=2, stop=" an"
        )
        content = answer.choices[0].logprobs.content
        assert answer.choices[0].message.content == TEXT.split(" an")[0]
        assert all(len(entry.top_logprobs) == 2 for entry in content)
        answer = await chat.create(model=MODEL, messages=CHAT, max_tokens=9, n=3)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        completion = await s.client.completions.create(
            model=MODEL, prompt=["a", "b"], max_tokens=500, logprobs=1
        )
        assert [choice.text for choice in completion.choices] == [TEXT, TEXT]
        assert completion.choices[0].logprobs.top_logprobs
        models = await s.client.models.list()
        assert [model.id for model in models.data] == [MODEL]


async def test_errors_become_the_library_s_classes() -> None:
    """FAULTS 107."""

    async def ask(s: Served, **body: Any) -> None:
        body = {"model": MODEL, "messages": CHAT, **body}
        await s.client.chat.completions.create(**body)

    async with served(says(TEXT), keys=keyring("secret")) as s:
        with pytest.raises(openai.BadRequestError) as bad:
            await ask(s, temperature=9)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await ask(s, model="gpt-9")
        s.client.api_key = "wrong"
        with pytest.raises(openai.AuthenticationError):
            await ask(s)
        s.client.api_key = "secret"
        s.pools.set_load("prefill-0", waiting_seqs=1000)
        with pytest.raises(openai.RateLimitError) as limited:
            await ask(s)
        assert int(limited.value.response.headers["retry-after"]) >= 1
        s.pools.views.clear()
        with pytest.raises(openai.InternalServerError):
            await ask(s)


def breaking(at: int) -> Script:
    def script(worker_id: str, submission: Submission, position: int) -> Event:
        if position < at:
            return hashed()(worker_id, submission, position)
        return Output("", finish_reason="error", error="the model step failed")

    return script


async def test_a_stream_that_fails_half_way_raises() -> None:
    """FAULTS 107, 15."""
    async with served(breaking(4)) as s:
        stream = await s.client.chat.completions.create(
            model=MODEL, messages=CHAT, stream=True, max_tokens=50
        )
        with pytest.raises(openai.APIError):
            async for chunk in stream:
                assert chunk.choices[0].finish_reason is None
        await quiet(s.pools, s.gateway)


async def raw_post(port: int, body: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    writer.write((head + body).encode())
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize("mode", ["mixed", "disaggregated"])
async def test_a_client_that_leaves_stops_its_request(stream: str, mode: str) -> None:
    """FAULTS 79: without stream nothing is sent for long, so the socket has to be watched."""
    async with served(hashed(), delay_s=0.005) as s:
        body = (
            f'{{"prompt": "x", "max_tokens": 500, "ignore_eos": true, "stream": {stream}, '
            f'"evenflow": {{"mode": "{mode}"}}}}'
        )
        _, writer = await raw_post(s.port, body)
        await asyncio.sleep(0.3)
        assert s.pools.held
        writer.close()
        await quiet(s.pools, s.gateway)
        assert s.pools.num_tokens < 200
        assert b'evenflow_requests_aborted_total{model_name="tiny"} 1.0' in (
            s.gateway.metrics.render()
        )


async def test_many_streams_opened_and_closed_leave_nothing() -> None:
    """FAULTS 79, 17: left to themselves they would run for ten seconds."""
    async with served(hashed(), delay_s=0.02, max_queue=1000) as s:
        body = '{"prompt": "x", "max_tokens": 500, "ignore_eos": true, "stream": true, "n": 2}'

        async def one(wait_s: float) -> None:
            _, writer = await raw_post(s.port, body)
            await asyncio.sleep(wait_s)
            writer.close()

        for _ in range(3):
            await asyncio.gather(*(one(i / 5000) for i in range(100)))
        await quiet(s.pools, s.gateway, within_s=5.0)


async def test_slow_readers_get_the_same_deltas() -> None:
    """FAULTS 111: 50 streams, 10 of them read slowly."""

    async def read(s: Served, index: int) -> str:
        stream = await s.client.completions.create(
            model=MODEL, prompt=f"p{index}", max_tokens=40, seed=3, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        texts = []
        async for chunk in stream:
            texts.append(chunk.choices[0].text)
            await asyncio.sleep(0.01 if index < 10 else 0)
        return "".join(texts)

    async with served(hashed(), delay_s=0.001) as s:
        streamed = await asyncio.gather(*(read(s, i) for i in range(50)))
        for index, text in enumerate(streamed):
            whole = await s.client.completions.create(
                model=MODEL, prompt=f"p{index}", max_tokens=40, seed=3,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            assert text == whole.choices[0].text

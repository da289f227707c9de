"""openai-python and a plain gRPC client against a running server: T0 on Ray, both modes."""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Callable

import grpc
import httpx
import openai
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import evenflow_pb2 as pb
from protos import evenflow_pb2_grpc as rpc
from tests.integration.conftest import Running

pytestmark = pytest.mark.cluster

MODES = ["mixed", "disaggregated"]
CHAT: list = [{"role": "user", "content": "Tell me about the sea."}]
PROMPT = list(range(200, 300))


@pytest.fixture
async def client(evenflow: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{evenflow.url}/v1", api_key="x", max_retries=0) as it:
        yield it


@pytest.fixture
async def stub(evenflow: Running) -> AsyncIterator[rpc.InferenceStub]:
    async with grpc.aio.insecure_channel(evenflow.grpc) as channel:
        yield rpc.InferenceStub(channel)


@pytest.fixture(autouse=True)
def every_page_comes_home(evenflow: Running):
    """FAULTS 43: after each test, at once, no page is owned or leased on any worker. On a quiet
    machine that takes a third of a second; leases that nobody released would take thirty."""
    yield
    wait_clean(evenflow, 3.0)


def ledgers(running: Running) -> dict[str, dict]:
    with running.client() as http:
        return http.get("/debug/kv").json()


def wait_clean(running: Running, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        dirty = {
            name: ledger
            for name, ledger in ledgers(running).items()
            if ledger["owned"] or ledger["leased"] or ledger["free"] != ledger["num_pages"]
        }
        if not dirty:
            return
        assert time.monotonic() < deadline, dirty
        time.sleep(0.05)


def wait_busy(running: Running, is_busy: Callable[[dict], bool]) -> None:
    """Until some worker's ledger looks like this."""
    deadline = time.monotonic() + 20
    while not any(is_busy(ledger) for ledger in ledgers(running).values()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def extra(mode: str, **options: object) -> dict:
    return {"evenflow": {"mode": mode}, "ignore_eos": True, "return_token_ids": True, **options}


async def token_ids(client: openai.AsyncOpenAI, mode: str, **options: object) -> list[int]:
    settings = {"max_tokens": 16, "temperature": 0.0, **options}
    answer = await client.completions.create(
        model="t0", prompt=PROMPT, extra_body=extra(mode), **settings
    )
    return answer.choices[0].token_ids  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------ openai-python


@pytest.mark.parametrize("mode", MODES)
async def test_chat_streams_what_the_whole_answer_says(client, mode):
    whole = await client.chat.completions.create(
        model="t0", messages=CHAT, max_tokens=24, temperature=0, extra_body=extra(mode)
    )
    stream = await client.chat.completions.create(
        model="t0",
        messages=CHAT,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=extra(mode),
    )
    text, usage, reasons = "", None, []
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert text == whole.choices[0].message.content
    assert reasons == ["length"]
    assert usage.completion_tokens == whole.usage.completion_tokens == 24


async def test_both_modes_and_both_doors_give_the_same_tokens(client, stub):
    seeded = {"temperature": 0.8, "seed": 42, "max_tokens": 32}
    http = [await token_ids(client, mode, **seeded) for mode in MODES for _ in range(2)]
    assert all(tokens == http[0] for tokens in http)
    options = pb.Options(max_tokens=32, temperature=0.8, seed=42, ignore_eos=True)
    for mode in MODES:
        options.mode = mode
        call = stub.Generate(
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), options=options), timeout=60
        )
        answers = [answer async for answer in call]
        assert [id for answer in answers for id in answer.token_ids] == http[0]
        assert answers[-1].final.usage.completion_tokens == 32
        assert answers[-1].final.route.mode == mode


async def test_a_seed_is_kept_among_unseeded_neighbours(client):
    """FAULTS 7: alone, then with three unseeded requests, in both modes."""
    seeded = {"temperature": 0.8, "seed": 42}
    alone = await token_ids(client, "mixed", **seeded)
    for mode in MODES:
        for _ in range(2):
            answers = await asyncio.gather(
                token_ids(client, mode, **seeded),
                *(token_ids(client, mode, temperature=1.0) for _ in range(3)),
            )
            assert answers[0] == alone


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 16, 17])
async def test_exactly_max_tokens(client, mode, max_tokens):
    """FAULTS 19."""
    answer = await client.completions.create(
        model="t0", prompt=PROMPT, max_tokens=max_tokens, temperature=0, extra_body=extra(mode)
    )
    assert answer.usage.completion_tokens == max_tokens
    assert len(answer.choices[0].token_ids) == max_tokens
    assert answer.choices[0].finish_reason == "length"
    if max_tokens == 1 and mode == "disaggregated":
        assert len(answer.evenflow["workers"]) == 1, "nothing went to a decode worker"


@pytest.mark.parametrize("mode", MODES)
async def test_n_choices_logprobs_and_stop(client, mode):
    """FAULTS 17, 109, 11."""
    answer = await client.chat.completions.create(
        model="t0",
        messages=CHAT,
        max_tokens=20,
        temperature=1.0,
        n=3,
        seed=1,
        logprobs=True,
        top_logprobs=2,
        extra_body=extra(mode),
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == 60
    assert len({choice.message.content for choice in answer.choices}) >= 2
    for choice in answer.choices:
        entries = choice.logprobs.content
        assert len(entries) == 20 and all(len(entry.top_logprobs) == 2 for entry in entries)
        joined = b"".join(bytes(entry.bytes) for entry in entries)
        assert joined.decode(errors="replace") == choice.message.content
    whole = await client.completions.create(
        model="t0", prompt=PROMPT, max_tokens=32, temperature=0, extra_body=extra(mode)
    )
    text = whole.choices[0].text
    stop = text[len(text) // 2 :][:3]
    cut = await client.completions.create(
        model="t0", prompt=PROMPT, max_tokens=32, temperature=0, stop=stop, extra_body=extra(mode)
    )
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


async def test_out_of_vocabulary_ids_hurt_nobody(client, evenflow):
    """FAULTS 21: 400 with the parameter, and the same worker answers the next one."""
    before = evenflow.workers().keys()
    for prompt in ([49152], [999999], [2**31], [2**63], [[5], [49152]]):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="t0", prompt=prompt, max_tokens=2)
        assert refused.value.param == "prompt"
    assert len(await token_ids(client, "mixed")) == 16
    assert evenflow.workers().keys() == before


async def test_a_prompt_beyond_the_context_is_refused_with_the_numbers(client):
    with pytest.raises(openai.BadRequestError, match="8192"):
        await client.completions.create(model="t0", prompt=[5] * 9000, max_tokens=2)


# ------------------------------------------------------------------------------------ leaving


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_every_page(evenflow, mode, stream):
    """FAULTS 79: streaming or not, within a second (checked by the fixture)."""
    body = {"prompt": PROMPT, "max_tokens": 4000, "stream": stream, **extra(mode)}
    async with httpx.AsyncClient(base_url=evenflow.url, trust_env=False) as http:
        with contextlib.suppress(httpx.TimeoutException):
            async with http.stream("POST", "/v1/completions", json=body, timeout=0.7) as response:
                async for _ in response.aiter_lines():
                    if stream:
                        break


@pytest.mark.parametrize("mode", MODES)
async def test_a_parent_aborted_takes_its_choices_along(client, mode):
    """FAULTS 17: n=3, abort after two deltas."""
    for _ in range(10):
        stream = await client.completions.create(
            model="t0", prompt=PROMPT, max_tokens=2000, n=3, stream=True, extra_body=extra(mode)
        )
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == 2:
                break
        await stream.close()


@pytest.mark.parametrize("mode", MODES)
async def test_a_grpc_deadline_ends_the_work(stub, mode):
    """FAULTS 113."""
    options = pb.Options(max_tokens=4000, mode=mode, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), options=options)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        async for _ in stub.Generate(request, timeout=0.5):
            pass
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_abort_by_id_ends_a_request(stub):
    options = pb.Options(max_tokens=4000, ignore_eos=True, request_id="to-abort")
    call = stub.Generate(pb.GenerateRequest(text="Once upon a time", options=options), timeout=60)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        async for _ in call:
            await stub.Abort(pb.AbortRequest(request_id="to-abort"), timeout=5)
    assert failed.value.code() is grpc.StatusCode.CANCELLED


# ------------------------------------------------------------------------------------ gRPC


async def test_a_client_that_knows_only_reflection_can_generate(evenflow):
    async with grpc.aio.insecure_channel(evenflow.grpc) as channel:
        ask = reflection_pb2.ServerReflectionRequest(file_containing_symbol="evenflow.v1.Inference")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        pool = descriptor_pool.DescriptorPool()
        async for answer in stub.ServerReflectionInfo(iter([ask])):
            for blob in answer.file_descriptor_response.file_descriptor_proto:
                pool.Add(descriptor_pb2.FileDescriptorProto.FromString(blob))
        make = message_factory.GetMessageClass
        request = make(pool.FindMessageTypeByName("evenflow.v1.GenerateRequest"))
        response = make(pool.FindMessageTypeByName("evenflow.v1.GenerateResponse"))
        generate = channel.unary_stream(
            "/evenflow.v1.Inference/Generate",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        message = request(text="Hello")
        message.options.max_tokens = 5
        message.options.ignore_eos = True
        answers = [answer async for answer in generate(message, timeout=30)]
        assert answers[-1].final.usage.completion_tokens == 5


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (pb.Options(temperature=-1), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.Options(model="other"), grpc.StatusCode.NOT_FOUND),
        (pb.Options(max_tokens=100_000), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_bad_calls_have_the_field_s_usual_codes(stub, options, code):
    """FAULTS 113."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        async for _ in stub.Generate(pb.GenerateRequest(text="Hi", options=options), timeout=10):
            pass
    assert failed.value.code() is code


# ------------------------------------------------------------------------------------ at length


async def test_a_thousand_requests_with_random_aborts(evenflow):
    """Done 7: both modes, aborts at any moment; nothing leaks, nothing is stuck."""
    rng = random.Random(9)
    gate = asyncio.Semaphore(24)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=evenflow.url, timeout=120, limits=limits, trust_env=False
    ) as http:

        async def one(i: int) -> str:
            mode, leaves = MODES[i % 2], rng.random() < 0.4
            body = {
                "prompt": [rng.randrange(3, 49152) for _ in range(rng.randint(1, 150))],
                "max_tokens": rng.randint(1, 12),
                "stream": rng.random() < 0.5,
                **extra(mode),
            }
            async with gate:
                if not leaves:
                    answer = await http.post("/v1/completions", json=body)
                    return "ok" if answer.status_code == 200 else answer.text
                task = asyncio.create_task(http.post("/v1/completions", json=body))
                await asyncio.sleep(rng.random() * 0.3)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
                    await task
                return "left"

        fates = await asyncio.gather(*(one(i) for i in range(1000)))
    assert set(fates) == {"ok", "left"}
    with evenflow.client() as client:
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize("mode", ["mixed", "disaggregated"])
def test_an_answer_has_the_form_that_was_asked_for(evenflow: Running, mode: str) -> None:
    """The same one in both modes: the form moves with the request."""
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Ada", "Bob"]}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    }
    body = {
        "messages": [{"role": "user", "content": "Who?"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        "max_tokens": 200,
        "seed": 11,
    }
    with evenflow.client() as client:
        texts = [
            client.post("/v1/chat/completions", json={**body, "evenflow": {"mode": one}}).json()[
                "choices"
            ][0]["message"]["content"]
            for one in (mode, "mixed")
        ]
    assert texts[0] == texts[1]
    value = json.loads(texts[0])
    assert value.keys() == {"name", "ok"} and value["name"] in ("Ada", "Bob")

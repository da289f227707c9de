"""A plain gRPC client, and one that knows only reflection, against a real server."""

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, ClassVar

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import evenflow_pb2 as pb
from protos import evenflow_pb2_grpc as services
from serving.api.grpc_server import GrpcServer
from serving.api.settings import FrontSettings
from serving.errors import NotFound
from serving.gateway import Gateway
from tests.fakes import FakePools, Script, hashed, worker
from tests.front import MODEL, TOKENIZER, keyring, says

pytestmark = pytest.mark.cluster

TEXT = "Grüße 👨‍👩‍👧‍👦 und 안녕하세요 an alle."


@dataclass(slots=True)
class Served:
    pools: FakePools
    gateway: Gateway
    server: GrpcServer
    channel: grpc.aio.Channel
    inference: Any
    cluster: Any
    port: int

    async def generate(self, text: str = "Hello", timeout: float = 10, **options: Any) -> list[Any]:
        request = pb.GenerateRequest(text=text, options=pb.Options(**options))
        return [r async for r in self.inference.Generate(request, timeout=timeout)]

    async def code(self, call: Any) -> grpc.StatusCode:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call
        details = raised.value.details() or ""
        assert "Traceback" not in details and details
        return raised.value.code()

    async def quiet(self, within_s: float = 1.0) -> None:
        async with asyncio.timeout(within_s):
            while self.pools.held or self.gateway.num_calls:
                await asyncio.sleep(0.01)
        sampled = self.pools.num_tokens
        await asyncio.sleep(0.05)
        assert self.pools.num_tokens == sampled


@contextlib.asynccontextmanager
async def served(
    script: Script | None = None, *, delay_s: float = 0.0, **settings: Any
) -> AsyncIterator[Served]:
    pools = FakePools(
        worker("prefill-0"), worker("decode-0"), script=script or says(TEXT), delay_s=delay_s
    )
    gateway = Gateway(pools, TOKENIZER, model=MODEL)
    server = GrpcServer(gateway, FrontSettings(MODEL, **settings))
    port = await server.start("127.0.0.1", 0)
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        inference, cluster = services.InferenceStub(channel), services.ClusterStub(channel)
        try:
            yield Served(pools, gateway, server, channel, inference, cluster, port)
        finally:
            await server.stop()


async def test_generate_and_chat_answer_like_http() -> None:
    async with served() as s:
        responses = await s.generate(max_tokens=500, mode="disaggregated", logprobs=1)
        assert "".join(r.text for r in responses) == TEXT
        *before, last = responses
        assert not any(r.HasField("final") for r in before) and last.finish_reason == "stop"
        assert last.final.route.mode == "disaggregated"
        assert last.final.route.decode_worker == "decode-0"
        ids = [token for r in responses for token in r.token_ids]
        assert ids == [*TOKENIZER.encode(TEXT), 2]
        assert last.final.usage.completion_tokens == len(ids)
        raw = b"".join(entry.chosen.token_bytes for r in responses for entry in r.logprobs)
        assert raw.decode() == TEXT
        request = pb.ChatRequest(messages=[pb.Message(role="user", content="Hi")])
        chat = [r async for r in s.inference.Chat(request)]
        assert "".join(r.text for r in chat) == TEXT
        await s.quiet()


async def test_options_mean_what_they_mean_over_http() -> None:
    async with served() as s:
        await s.generate(
            max_tokens=9, min_tokens=2, temperature=0.0, top_k=5, seed=4, stop_token_ids=[7],
            logit_bias={5: -1.0}, priority=2, slo_ttft_ms=500, ignore_eos=True, request_id="mine",
        )  # fmt: skip
        request = s.pools.submissions[0][1].request
        sampling = request.sampling
        assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature) == (9, 2, 0.0)
        assert (sampling.top_k, sampling.seed, sampling.stop_ids) == (5, 4, {7})
        assert sampling.logit_bias == ((5, -1.0),) and request.slo.ttft_s == 0.5
        assert request.priority == 2
        explained = await s.cluster.Explain(pb.ExplainRequest(request_id="mine"))
        assert explained.outcome == "length" and explained.route.reason


async def test_tokens_models_and_status() -> None:
    async with served() as s:
        tokens = await s.inference.Tokenize(pb.TokenizeRequest(text=TEXT))
        text = await s.inference.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids))
        assert text.text == TEXT
        models = await s.inference.ListModels(pb.ListModelsRequest())
        assert [(m.id, m.max_model_len) for m in models.models] == [(MODEL, 8192)]
        status = await s.cluster.GetStatus(pb.GetStatusRequest())
        assert [w.id for w in status.workers] == ["prefill-0", "decode-0"]
        assert status.workers[0].load.num_pages == 1024


async def test_every_failure_has_its_code() -> None:
    """FAULTS 113."""
    codes = grpc.StatusCode
    async with served(max_body_bytes=1 << 20) as s:
        assert await s.code(s.generate(temperature=9)) is codes.INVALID_ARGUMENT
        assert await s.code(s.generate(text="")) is codes.INVALID_ARGUMENT
        assert await s.code(s.generate(mode="fast")) is codes.INVALID_ARGUMENT
        assert await s.code(s.generate(model="gpt-9")) is codes.NOT_FOUND
        assert await s.code(s.generate(text="x" * (1 << 21))) is codes.RESOURCE_EXHAUSTED
        explain = s.cluster.Explain(pb.ExplainRequest(request_id="never"))
        assert await s.code(explain) is codes.NOT_FOUND
        request = pb.DetokenizeRequest(token_ids=[10**6])
        assert await s.code(s.inference.Detokenize(request)) is codes.INVALID_ARGUMENT
        s.pools.script = lambda *_: RuntimeError("secret detail")
        with pytest.raises(grpc.aio.AioRpcError, match="failed in the gateway") as raised:
            await s.generate()
        assert raised.value.code() is codes.INTERNAL and "secret" not in str(raised.value)
        s.pools.set_load("decode-0", waiting_seqs=9999)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await s.generate()
        assert raised.value.code() is codes.RESOURCE_EXHAUSTED
        assert int(dict(raised.value.trailing_metadata())["grpc-retry-pushback-ms"]) > 0
        await s.gateway.drain(1.0)
        assert await s.code(s.generate()) is codes.UNAVAILABLE


async def test_a_large_prompt_is_read_up_to_the_configured_limit() -> None:
    """FAULTS 87, 113: gRPC's own default is 4 MiB."""
    async with served() as s:
        code = await s.code(s.generate(text="x " * (3 << 20), timeout=60))
        assert code is grpc.StatusCode.INVALID_ARGUMENT  # read, and longer than the context


@pytest.mark.parametrize("mode", ["mixed", "disaggregated"])
async def test_a_deadline_stops_the_workers(mode: str) -> None:
    """FAULTS 113."""
    async with served(hashed(), delay_s=0.005) as s:
        call = s.generate(max_tokens=1000, ignore_eos=True, timeout=0.3, mode=mode)
        assert await s.code(call) is grpc.StatusCode.DEADLINE_EXCEEDED
        await s.quiet()
        assert s.pools.num_tokens < 200


async def test_a_cancelled_call_stops_the_workers() -> None:
    """FAULTS 113, 17."""
    async with served(hashed(), delay_s=0.005) as s:
        options = pb.Options(max_tokens=1000, n=3, ignore_eos=True)
        call = s.inference.Generate(pb.GenerateRequest(text="x", options=options))
        await call.read()
        call.cancel()
        await s.quiet()


async def test_abort_by_id_ends_the_stream_as_cancelled() -> None:
    async with served(hashed(), delay_s=0.005) as s:
        options = {"max_tokens": 1000, "ignore_eos": True, "request_id": "mine"}
        task = asyncio.create_task(s.generate(**options))
        await asyncio.sleep(0.1)
        await s.inference.Abort(pb.AbortRequest(request_id="mine"))
        assert await s.code(task) is grpc.StatusCode.CANCELLED
        await s.quiet()
        await s.inference.Abort(pb.AbortRequest(request_id="mine"))  # idempotent


async def test_a_key_is_asked_for_everywhere_but_health() -> None:
    """FAULTS 113."""
    async with served(keys=keyring("secret")) as s:
        assert await s.code(s.generate()) is grpc.StatusCode.UNAUTHENTICATED
        for call in (
            s.inference.ListModels(pb.ListModelsRequest()),
            s.inference.Tokenize(pb.TokenizeRequest(text="x")),
            s.inference.Abort(pb.AbortRequest(request_id="x")),
            s.cluster.GetStatus(pb.GetStatusRequest()),
        ):
            assert await s.code(call) is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", "Bearer secret"),)
        await s.inference.ListModels(pb.ListModelsRequest(), metadata=metadata)


async def test_health_follows_the_workers() -> None:
    async with served() as s:
        health = health_pb2_grpc.HealthStub(s.channel)
        kinds = health_pb2.HealthCheckResponse
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == kinds.SERVING
        request = health_pb2.HealthCheckRequest(service="evenflow.v1.Inference")
        assert (await health.Check(request)).status == kinds.SERVING
        s.pools.views.clear()
        assert (await watch.read()).status == kinds.NOT_SERVING
        watch.cancel()
        request = health_pb2.HealthCheckRequest(service="nobody")
        assert await s.code(health.Check(request)) is grpc.StatusCode.NOT_FOUND


async def test_a_client_that_knows_only_reflection_can_generate() -> None:
    async with served() as s:
        reflection = reflection_pb2_grpc.ServerReflectionStub(s.channel)
        symbol = reflection_pb2.ServerReflectionRequest(
            file_containing_symbol="evenflow.v1.Inference"
        )
        answer = await anext(aiter(reflection.ServerReflectionInfo(iter([symbol]))))
        pool = descriptor_pool.DescriptorPool()
        for raw in answer.file_descriptor_response.file_descriptor_proto:
            pool.Add(descriptor_pb2.FileDescriptorProto.FromString(raw))
        method = pool.FindServiceByName("evenflow.v1.Inference").FindMethodByName("Generate")
        request = message_factory.GetMessageClass(method.input_type)
        response = message_factory.GetMessageClass(method.output_type)
        call = s.channel.unary_stream(
            "/evenflow.v1.Inference/Generate",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        message = request(text="Hello")
        message.options.max_tokens = 500
        assert "".join([r.text async for r in call(message)]) == TEXT


async def test_a_port_in_use_is_an_error() -> None:
    async with served() as s:
        other = GrpcServer(s.gateway, FrontSettings(MODEL))
        with pytest.raises(OSError, match="cannot be bound"):
            await other.start("127.0.0.1", s.port)


async def test_roles_and_drains() -> None:
    async with served() as s:
        await s.cluster.SetRole(pb.SetRoleRequest(worker="decode-0", role="mixed"))
        await s.cluster.Drain(pb.DrainRequest(worker="prefill-0"))
        status = await s.cluster.GetStatus(pb.GetStatusRequest())
        assert [(w.role, w.is_leaving) for w in status.workers] == [
            ("prefill", True),
            ("mixed", False),
        ]
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await s.cluster.Drain(pb.DrainRequest(worker="x"))
        assert error.value.code() == grpc.StatusCode.NOT_FOUND


async def test_the_status_can_be_watched() -> None:
    async with served() as s:
        watch = s.cluster.WatchStatus(pb.WatchStatusRequest(period_s=0.1))
        first = await watch.read()
        assert [w.role for w in first.workers] == ["prefill", "decode"] and first.ready
        assert first.model == MODEL and not first.decisions
        await s.generate(request_id="mine")
        async with asyncio.timeout(5):
            while not (status := await watch.read()).decisions:
                pass
        assert (status.decisions[0].request_id, status.decisions[0].outcome) == ("mine", "length")
        watch.cancel()
        await s.quiet()


async def test_pools_are_scaled_where_somebody_scales() -> None:
    class Scaler:
        targets: ClassVar[dict[str, int]] = {"decode": 1}

        async def scale(self, pool: str, num: int) -> None:
            if pool not in self.targets:
                raise NotFound(f"no pool {pool!r}")
            self.targets[pool] = num

        def status(self) -> dict[str, Any]:
            return {"targets": self.targets}

    async with served() as s:
        call = s.cluster.Scale(pb.ScaleRequest(pool="decode", workers=3))
        assert await s.code(call) is grpc.StatusCode.NOT_FOUND
        s.gateway.scaler = Scaler()
        await s.cluster.Scale(pb.ScaleRequest(pool="decode", workers=3))
        status = await s.cluster.GetStatus(pb.GetStatusRequest())
        assert dict(status.targets) == {"decode": 3}
        call = s.cluster.Scale(pb.ScaleRequest(pool="x", workers=3))
        assert await s.code(call) is grpc.StatusCode.NOT_FOUND


async def test_a_request_can_be_moved() -> None:
    async with served(hashed(), delay_s=0.01) as s:
        options = {"max_tokens": 60, "ignore_eos": True, "request_id": "mine", "mode": "mixed"}
        task = asyncio.create_task(s.generate(**options))
        await asyncio.sleep(0.1)
        here = s.pools.submissions[0][0]
        there = {"prefill-0": "decode-0", "decode-0": "prefill-0"}[here]
        await s.cluster.Move(pb.MoveRequest(request_id="mine", worker=there))
        responses = await task
        assert len([token for r in responses for token in r.token_ids]) == 60
        assert s.pools.submissions[-1][0] == there
        unknown = s.cluster.Move(pb.MoveRequest(request_id="never", worker=there))
        assert await s.code(unknown) is grpc.StatusCode.NOT_FOUND


async def test_calls_prompts_and_ends_have_their_fields() -> None:
    call = '<tool_call>{"name": "now", "arguments": {"zone": 1}}</tool_call>'
    async with served(says(f"So: {call}")) as s:
        tool = pb.Tool(name="now", description="The time.", parameters='{"type": "object"}')
        messages = [pb.Message(role="user", content="When?")]
        request = pb.ChatRequest(messages=messages, tools=[tool], options=pb.Options(n=2))
        answers = [r async for r in s.inference.Chat(request)]
        for index in (0, 1):
            own = [r for r in answers if r.index == index]
            calls = [delta for r in own for delta in r.tool_calls]
            assert "".join(r.text for r in own) == "So:" and own[-1].finish_reason == "tool_calls"
            assert calls[0].name == "now" and calls[0].id
            assert "".join(delta.arguments for delta in calls) == '{"zone": 1}'
        first, *_, last = await s.generate(prompt_logprobs=1, stop=["<tool"])
        assert len(first.prompt_logprobs) == len(TOKENIZER.encode("Hello")) - 1
        assert last.stop == "<tool"
        counted = await s.inference.Tokenize(pb.TokenizeRequest(messages=messages, tools=[tool]))
        assert len(counted.token_ids) == answers[-1].final.usage.prompt_tokens


async def test_no_message_is_answered_with_our_fault() -> None:
    """Random bytes, and random bytes that are messages. EVENFLOW_FUZZ=3000 for the whole lot."""
    rng, allowed = random.Random(5), {"INVALID_ARGUMENT", "NOT_FOUND"}
    num_messages = int(os.environ.get("EVENFLOW_FUZZ", "200"))
    async with served() as s:
        for _ in range(num_messages):
            options = pb.Options(
                max_tokens=rng.choice([0, 1, 3, 2**32 - 1]),
                temperature=rng.choice([0.0, -1.0, 1e308, float("nan"), float("inf")]),
                n=rng.choice([0, 1, 2, 2**31]),
                logit_bias={rng.choice([-1, 5, 2**30]): rng.uniform(-200, 200)},
                stop=rng.choice([[], ["x"], [""], ["y" * 9999]]),
                mode=rng.choice(["", "mixed", "fast"]),
                request_id=rng.choice(["", "a b", "z" * 500]),
                bad_words=rng.choice([[], ["", "x"]]),
                json_schema=rng.choice(["{}", "[", "7"]),
            )
            message: Any = pb.GenerateRequest(
                text=rng.choice(["", "Hi", "x" * 9999]), options=options
            )
            if rng.random() < 0.5:
                call = pb.ToolCall(id="x", name="f", arguments=rng.choice(["", "{}", "[1]", "{"]))
                message = pb.ChatRequest(
                    messages=[
                        pb.Message(
                            role=rng.choice(["", "user", "assistant", "tool"]),
                            content=rng.choice(["", "Hi"]),
                            tool_calls=rng.choice([[], [call], [call] * 200]),
                        )
                    ],
                    tools=rng.choice(
                        [[], [pb.Tool(name="f", parameters=rng.choice(["", "{", "7"]))]]
                    ),
                    tool_choice=rng.choice(["", "auto", "required", "=f", "=g", "odd"]),
                    options=options,
                )
            raw = bytearray(message.SerializeToString())
            for _ in range(rng.randint(0, 3)):
                raw[rng.randrange(len(raw))] = rng.randrange(256)
            method = rng.choice(["Generate", "Chat", "Tokenize", "Detokenize", "Abort"])
            call = s.channel.unary_stream(f"/evenflow.v1.Inference/{method}")
            try:
                async for _ in call(bytes(raw), timeout=5):
                    pass
            except grpc.aio.AioRpcError as error:
                assert error.code().name in allowed, error
                assert len(error.details()) < 1000
        await s.generate()
        await s.quiet()

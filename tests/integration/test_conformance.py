"""Sixty named promises of the OpenAI interface, through openai-python on real workers, each in both
modes; and those that have a meaning there over gRPC."""

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import httpx
import openai
import pytest

from protos import evenflow_pb2 as pb
from protos import evenflow_pb2_grpc as rpc
from tests.integration.conftest import Running

pytestmark = pytest.mark.cluster

MODES = ["mixed", "disaggregated"]
PROMPT = list(range(200, 260))
CHAT: list[Any] = [{"role": "user", "content": "Tell me about the sea."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]
ENDS = {"ignore_eos": False}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


class Client:
    """openai-python, in one mode, greedy and without end unless a check says otherwise."""

    def __init__(self, running: Running, mode: str) -> None:
        base = f"{running.url}/v1"
        self.api = openai.AsyncOpenAI(base_url=base, api_key="x", max_retries=0, timeout=60)
        self.http = httpx.AsyncClient(base_url=running.url, trust_env=False, timeout=60)
        self.mode = mode

    async def complete(self, prompt: Any = PROMPT, **options: Any) -> Any:
        return await self.api.completions.create(model="t0", prompt=prompt, **self._with(options))

    async def chat(self, messages: Any = CHAT, **options: Any) -> Any:
        settings = self._with(options)
        return await self.api.chat.completions.create(model="t0", messages=messages, **settings)

    async def chunks(self, call: Awaitable[Any]) -> list[Any]:
        return [chunk async for chunk in await call]

    async def refused(self, call: Awaitable[Any], param: str | None) -> None:
        with pytest.raises(openai.BadRequestError) as error:
            await call
        assert error.value.param == param and error.value.type == "invalid_request_error"

    def _with(self, options: dict[str, Any]) -> dict[str, Any]:
        extra = {"evenflow": {"mode": self.mode}, "ignore_eos": True, "return_token_ids": True}
        extra |= options.pop("extra", {})
        return {"max_tokens": 6, "temperature": 0, **options, "extra_body": extra}


Check = Callable[[Client], Awaitable[None]]


def text_of(chunks: list[Any]) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices]
    return "".join((c.text if hasattr(c, "text") else c.delta.content) or "" for c in choices)


class Completions:
    async def test_a_string(self, c: Client) -> None:
        assert (await c.complete("Hello there")).choices[0].text

    async def test_token_ids(self, c: Client) -> None:
        answer = await c.complete()
        assert answer.object == "text_completion" and answer.usage.prompt_tokens == len(PROMPT)

    async def test_several_strings(self, c: Client) -> None:
        answer = await c.complete(["a b", "c d", "e f"])
        assert [choice.index for choice in answer.choices] == [0, 1, 2]

    async def test_several_lists_of_ids(self, c: Client) -> None:
        answer = await c.complete([PROMPT, PROMPT[:9]])
        assert answer.choices[0].token_ids == (await c.complete()).choices[0].token_ids

    async def test_max_tokens_is_exact(self, c: Client) -> None:
        for count in (1, 2, 5):
            answer = await c.complete(max_tokens=count)
            assert answer.usage.completion_tokens == count
            assert answer.choices[0].finish_reason == "length"

    async def test_sixteen_tokens_are_the_default(self, c: Client) -> None:
        answer = await c.complete(max_tokens=openai.NOT_GIVEN)
        assert answer.usage.completion_tokens == 16

    async def test_usage_adds_up(self, c: Client) -> None:
        usage = (await c.complete(n=2, max_tokens=3)).usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), 6)
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens

    async def test_a_stream_is_the_whole_answer(self, c: Client) -> None:
        chunks = await c.chunks(c.complete(stream=True))
        assert text_of(chunks) == (await c.complete()).choices[0].text
        assert len({chunk.id for chunk in chunks}) == 1

    async def test_stream_usage_comes_last(self, c: Client) -> None:
        options = {"include_usage": True}
        *before, last = await c.chunks(c.complete(stream=True, stream_options=options))
        assert last.choices == [] and last.usage.completion_tokens == 6
        assert all(chunk.usage is None for chunk in before)

    async def test_stream_usage_only_when_asked(self, c: Client) -> None:
        for options in ({}, {"include_usage": False}):
            chunks = await c.chunks(c.complete(stream=True, stream_options=options))
            assert all(chunk.usage is None and chunk.choices for chunk in chunks)

    async def test_stream_usage_all_along(self, c: Client) -> None:
        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await c.chunks(c.complete(stream=True, stream_options=options))
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == 6

    async def test_stream_options_need_a_stream(self, c: Client) -> None:
        await c.refused(c.complete(stream_options={}), "stream_options")

    async def test_echo(self, c: Client) -> None:
        plain = (await c.complete("Hello there")).choices[0].text
        assert (await c.complete("Hello there", echo=True)).choices[0].text == "Hello there" + plain

    async def test_echo_in_a_stream(self, c: Client) -> None:
        chunks = await c.chunks(c.complete("Hello there", echo=True, stream=True))
        assert chunks[0].choices[0].text == "Hello there"

    async def test_logprobs(self, c: Client) -> None:
        found = (await c.complete(logprobs=2)).choices[0].logprobs
        assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == 6
        for chosen, top in zip(found.token_logprobs, found.top_logprobs, strict=True):
            assert chosen == pytest.approx(max(top.values()), abs=1e-5) and chosen <= 0

    async def test_echo_with_logprobs(self, c: Client) -> None:
        """FAULTS 5: the second time, too, when the prompt's pages are cached."""
        asked = {"echo": True, "logprobs": 2, "max_tokens": 1}
        first, second = [(await c.complete(**asked)).choices[0].logprobs for _ in range(2)]
        assert len(first.tokens) == len(PROMPT) + 1 and first.token_logprobs[0] is None
        assert None not in first.token_logprobs[1:]
        assert second.token_logprobs[1:] == pytest.approx(first.token_logprobs[1:], abs=1e-4)

    async def test_prompt_logprobs(self, c: Client) -> None:
        choice = (await c.complete(extra={"prompt_logprobs": 1})).choices[0]
        none, *told = choice.prompt_logprobs
        assert none is None and len(told) == len(PROMPT) - 1
        for token_id, entry in zip(PROMPT[1:], told, strict=True):
            assert entry[str(token_id)]["rank"] >= 1

    async def test_prompt_logprobs_are_not_streamed(self, c: Client) -> None:
        asked = c.complete(stream=True, extra={"prompt_logprobs": 1})
        await c.refused(asked, "prompt_logprobs")

    async def test_n_answers_differ(self, c: Client) -> None:
        answer = await c.complete(n=3, temperature=1.0, seed=1, max_tokens=12)
        assert len({choice.text for choice in answer.choices}) >= 2

    async def test_best_of_must_be_n(self, c: Client) -> None:
        assert len((await c.complete(n=2, best_of=2)).choices) == 2
        await c.refused(c.complete(best_of=3), "best_of")

    async def test_suffix_is_refused(self, c: Client) -> None:
        await c.refused(c.complete(suffix="end"), "suffix")

    async def test_a_stop_string_cuts(self, c: Client) -> None:
        text = (await c.complete(max_tokens=20)).choices[0].text
        stop = text[6:9]
        cut = (await c.complete(max_tokens=20, stop=[stop])).choices[0]
        assert cut.text == text[: text.index(stop)]
        assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)

    async def test_a_stop_string_may_stay(self, c: Client) -> None:
        text = (await c.complete(max_tokens=20)).choices[0].text
        extra = {"include_stop_str_in_output": True}
        cut = await c.complete(max_tokens=20, stop=text[6:9], extra=extra)
        assert cut.choices[0].text == text[: text.index(text[6:9]) + 3]

    async def test_a_stop_token_ends(self, c: Client) -> None:
        ids = (await c.complete()).choices[0].token_ids
        answer = (await c.complete(extra={"stop_token_ids": [ids[3]]})).choices[0]
        assert answer.finish_reason == "stop" and answer.stop_reason == ids[3]
        assert answer.token_ids == ids[: ids.index(ids[3]) + 1]

    async def test_a_seed_is_kept(self, c: Client) -> None:
        asked = {"seed": 7, "temperature": 0.9, "max_tokens": 12}
        first, second = [(await c.complete(**asked)).choices[0].token_ids for _ in range(2)]
        assert first == second

    async def test_logit_bias_bans_and_forces(self, c: Client) -> None:
        first = (await c.complete(max_tokens=1)).choices[0].token_ids[0]
        banned = await c.complete(max_tokens=1, logit_bias={str(first): -100})
        assert banned.choices[0].token_ids[0] != first
        forced = await c.complete(max_tokens=3, logit_bias={"777": 100})
        assert forced.choices[0].token_ids == [777] * 3

    async def test_only_allowed_tokens(self, c: Client) -> None:
        extra = {"allowed_token_ids": [500, 501]}
        answer = await c.complete(temperature=1.0, extra=extra)
        assert set(answer.choices[0].token_ids) <= {500, 501}

    async def test_bad_words_do_not_come(self, c: Client) -> None:
        text = (await c.complete(max_tokens=12)).choices[0].text
        word = next(word for word in text.split() if word)
        answer = await c.complete(max_tokens=12, extra={"bad_words": [word]})
        assert answer.choices[0].text != text

    async def test_penalties_change_tokens(self, c: Client) -> None:
        prompt = [700, 701] * 20
        plain = (await c.complete(prompt, max_tokens=16, logit_bias={"700": 8})).choices[0]
        fined = await c.complete(
            prompt, max_tokens=16, logit_bias={"700": 8}, frequency_penalty=2.0
        )
        assert fined.choices[0].token_ids.count(700) <= plain.token_ids.count(700)

    async def test_top_k_one_is_greedy(self, c: Client) -> None:
        answer = await c.complete(temperature=1.0, extra={"top_k": 1})
        assert answer.choices[0].token_ids == (await c.complete()).choices[0].token_ids

    async def test_min_tokens_hold_stops_back(self, c: Client) -> None:
        ids = (await c.complete()).choices[0].token_ids
        extra = {"stop_token_ids": [ids[0]], "min_tokens": 4}
        assert (await c.complete(extra=extra)).usage.completion_tokens >= 4

    async def test_the_end_of_a_prompt_is_kept(self, c: Client) -> None:
        answer = await c.complete(extra={"truncate_prompt_tokens": 9})
        assert answer.usage.prompt_tokens == 9
        assert answer.choices[0].prompt_token_ids == PROMPT[-9:]

    async def test_a_form_is_kept(self, c: Client) -> None:
        answer = await c.complete(max_tokens=40, extra={"guided_choice": ["yes", "no"]})
        assert answer.choices[0].text in ("yes", "no")


class Chats:
    async def test_an_answer(self, c: Client) -> None:
        answer = await c.chat()
        assert answer.object == "chat.completion"
        message = answer.choices[0].message
        assert message.role == "assistant" and message.content and not message.tool_calls

    async def test_a_system_message(self, c: Client) -> None:
        messages = [{"role": "system", "content": "Be brief."}, *CHAT]
        assert (await c.chat(messages)).usage.prompt_tokens > 5

    async def test_content_in_parts(self, c: Client) -> None:
        parts = [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "about the sea."}]
        one = await c.chat([{"role": "user", "content": parts}])
        assert one.choices[0].token_ids == (await c.chat()).choices[0].token_ids

    async def test_pictures_are_refused(self, c: Client) -> None:
        part = {"type": "image_url", "image_url": {"url": "http://x"}}
        asked = c.chat([{"role": "user", "content": [part]}])
        await c.refused(asked, "messages[0].content[0].type")

    async def test_a_stream_begins_with_the_role(self, c: Client) -> None:
        chunks = await c.chunks(c.chat(stream=True))
        assert chunks[0].choices[0].delta.role == "assistant"
        assert text_of(chunks) == (await c.chat()).choices[0].message.content
        assert chunks[-1].choices[0].finish_reason == "length"

    async def test_stream_usage(self, c: Client) -> None:
        options = {"include_usage": True}
        chunks = await c.chunks(c.chat(stream=True, stream_options=options, n=2))
        assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12

    async def test_max_completion_tokens(self, c: Client) -> None:
        answer = await c.chat(max_completion_tokens=3, max_tokens=openai.NOT_GIVEN)
        assert answer.usage.completion_tokens == 3

    async def test_logprobs_without_alternatives(self, c: Client) -> None:
        entries = (await c.chat(logprobs=True)).choices[0].logprobs.content
        assert len(entries) == 6 and all(entry.top_logprobs == [] for entry in entries)

    async def test_logprobs_are_bytes_of_the_text(self, c: Client) -> None:
        """FAULTS 109."""
        choice = (await c.chat(logprobs=True, top_logprobs=3, max_tokens=20)).choices[0]
        joined = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
        assert joined.decode(errors="replace") == choice.message.content
        assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)

    async def test_top_logprobs_need_logprobs(self, c: Client) -> None:
        await c.refused(c.chat(top_logprobs=2), "top_logprobs")

    async def test_prompt_logprobs(self, c: Client) -> None:
        answer = await c.chat(extra={"prompt_logprobs": 0})
        assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens

    async def test_n_choices(self, c: Client) -> None:
        answer = await c.chat(n=3, temperature=1.0, seed=3)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]

    async def test_any_json_object(self, c: Client) -> None:
        form: Any = {"type": "json_object"}
        choice = (await c.chat(response_format=form, max_tokens=400, seed=2)).choices[0]
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
        assert choice.message.content.lstrip().startswith("{")

    async def test_a_json_schema(self, c: Client) -> None:
        form: Any = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
        answer = await c.chat(response_format=form, max_tokens=200)
        assert json.loads(answer.choices[0].message.content)["city"] in ("Oslo", "Rome")

    async def test_a_bad_schema_is_refused(self, c: Client) -> None:
        form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "odd"}}}
        await c.refused(c.chat(response_format=form), "response_format")

    async def test_a_named_function_is_called(self, c: Client) -> None:
        choice = (await c.chat(tools=TOOLS, tool_choice=NAMED, max_tokens=200, extra=ENDS)).choices[
            0
        ]
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "weather" and arguments["city"] in ("Oslo", "Rome")

    async def test_some_function_is_called(self, c: Client) -> None:
        answer = await c.chat(
            tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=200
        )
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name in ("weather", "now") and call.id

    async def test_a_call_is_streamed(self, c: Client) -> None:
        asked = {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 200, "extra": ENDS}
        chunks = await c.chunks(c.chat(stream=True, **asked))
        calls = [x for k in chunks for x in k.choices[0].delta.tool_calls or ()]
        assert calls[0].id and calls[0].function.name == "weather"
        whole = (await c.chat(**asked)).choices[0].message.tool_calls[0]
        joined = "".join(call.function.arguments for call in calls)
        assert joined == whole.function.arguments and len(calls) > 2
        assert chunks[-1].choices[0].finish_reason == "tool_calls"

    async def test_tools_may_be_offered_in_vain(self, c: Client) -> None:
        for choice in ("auto", "none"):
            answer = await c.chat(tools=TOOLS, tool_choice=choice)
            assert answer.choices[0].finish_reason == "length"

    async def test_a_result_goes_back(self, c: Client) -> None:
        function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
        calls = [{"id": "call_1", "type": "function", "function": function}]
        messages = [
            *CHAT,
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"},
        ]
        answer = await c.chat(messages, tools=TOOLS)
        assert answer.usage.prompt_tokens > (await c.chat(tools=TOOLS)).usage.prompt_tokens

    async def test_an_unknown_function_is_refused(self, c: Client) -> None:
        other: Any = {"type": "function", "function": {"name": "other"}}
        await c.refused(c.chat(tools=TOOLS, tool_choice=other), "tool_choice")

    async def test_a_final_message_is_continued(self, c: Client) -> None:
        messages = [*CHAT, {"role": "assistant", "content": "The sea is"}]
        extra = {"continue_final_message": True, "add_generation_prompt": False}
        longer = await c.chat(messages)
        assert (
            await c.chat(messages, extra=extra)
        ).usage.prompt_tokens < longer.usage.prompt_tokens


class Errors:
    async def test_an_unknown_model(self, c: Client) -> None:
        with pytest.raises(openai.NotFoundError) as error:
            await c.api.completions.create(model="gpt-9", prompt="x")
        assert error.value.code == "model_not_found"

    async def test_an_unknown_route(self, c: Client) -> None:
        with pytest.raises(openai.NotFoundError):
            await c.api.embeddings.create(model="t0", input="x")

    async def test_an_empty_prompt(self, c: Client) -> None:
        """FAULTS 25."""
        await c.refused(c.complete(""), "prompt")
        await c.refused(c.chat([]), "messages")

    async def test_ids_outside_the_vocabulary(self, c: Client) -> None:
        """FAULTS 21."""
        await c.refused(c.complete([999_999]), "prompt")

    async def test_numbers_out_of_range(self, c: Client) -> None:
        for name, value in (("temperature", 3), ("top_p", 0), ("n", 0), ("max_tokens", 0)):
            await c.refused(c.complete(**{name: value}), name)

    async def test_a_prompt_beyond_the_context(self, c: Client) -> None:
        with pytest.raises(openai.BadRequestError) as error:
            await c.complete([5] * 9000)
        assert error.value.code == "context_length_exceeded"

    async def test_json_that_is_none(self, c: Client) -> None:
        answer = await c.http.post("/v1/completions", content=b'{"prompt": "x"')
        assert answer.status_code == 400 and answer.json()["error"]["message"]

    async def test_a_wrong_method(self, c: Client) -> None:
        answer = await c.http.get("/v1/completions")
        assert answer.status_code == 405 and answer.headers["allow"] == "POST"

    async def test_unknown_fields_do_no_harm(self, c: Client) -> None:
        """FAULTS 29."""
        extra = {"temprature": 3, "metadata": {}, "service_tier": "auto", "user": "me"}
        assert (await c.complete(extra=extra)).choices[0].text is not None

    async def test_models_are_listed(self, c: Client) -> None:
        assert [model.id async for model in c.api.models.list()] == ["t0"]
        assert (await c.api.models.retrieve("t0")).id == "t0"

    async def test_an_answer_names_its_request(self, c: Client) -> None:
        raw = await c.api.completions.with_raw_response.create(
            model="t0",
            prompt=PROMPT,
            max_tokens=1,
            extra_headers={"x-request-id": f"mine-{c.mode}"},
        )
        assert raw.headers["x-request-id"] == raw.parse().id == f"mine-{c.mode}"


CHECKS: dict[str, Check] = {
    f"{group.__name__.lower()}: {name.removeprefix('test_').replace('_', ' ')}": method
    for group in (Completions, Chats, Errors)
    for name, method in inspect.getmembers(group(), inspect.ismethod)
}


def test_there_are_sixty() -> None:
    assert len(CHECKS) >= 60


@pytest.fixture(params=MODES)
async def client(evenflow: Running, request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    client = Client(evenflow, request.param)
    yield client
    await asyncio.gather(client.api.close(), client.http.aclose())


@pytest.mark.parametrize("name", CHECKS)
async def test_through_openai_python(client: Client, name: str) -> None:
    await CHECKS[name](client)


# ---------------------------------------------------------------------------- over gRPC


class Stub:
    def __init__(self, inference: Any, mode: str) -> None:
        self.inference, self.mode = inference, mode

    async def complete(self, prompt: list[int] = PROMPT, **options: Any) -> list[Any]:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=prompt), options=self._options(options)
        )
        return [answer async for answer in self.inference.Generate(request, timeout=60)]

    async def chat(self, options: dict[str, Any] | None = None, **request: Any) -> list[Any]:
        messages = request.pop("messages", [pb.Message(**CHAT[0])])
        asked = pb.ChatRequest(messages=messages, options=self._options(options or {}), **request)
        return [answer async for answer in self.inference.Chat(asked, timeout=60)]

    def _options(self, options: dict[str, Any]) -> pb.Options:
        defaults = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "mode": self.mode}
        return pb.Options(**{**defaults, **options})


def ids_of(answers: list[Any]) -> list[int]:
    return [token for answer in answers for token in answer.token_ids]


TOOL = pb.Tool(name="weather", parameters=json.dumps(SCHEMA))


class OverGrpc:
    async def test_token_ids(self, s: Stub) -> None:
        answers = await s.complete()
        assert len(ids_of(answers)) == 6 and answers[-1].finish_reason == "length"
        assert answers[-1].final.usage.prompt_tokens == len(PROMPT)

    async def test_n_choices(self, s: Stub) -> None:
        assert {answer.index for answer in await s.complete(n=3)} == {0, 1, 2}

    async def test_a_seed_is_kept(self, s: Stub) -> None:
        asked = {"seed": 7, "temperature": 0.9}
        assert ids_of(await s.complete(**asked)) == ids_of(await s.complete(**asked))

    async def test_logprobs(self, s: Stub) -> None:
        entries = [entry for answer in await s.complete(logprobs=2) for entry in answer.logprobs]
        assert len(entries) == 6 and all(len(entry.top) == 2 for entry in entries)

    async def test_prompt_logprobs(self, s: Stub) -> None:
        first, *others = await s.complete(prompt_logprobs=1)
        assert [entry.token.token_id for entry in first.prompt_logprobs] == PROMPT[1:]
        assert not any(answer.prompt_logprobs for answer in others)

    async def test_stops(self, s: Stub) -> None:
        ids = ids_of(await s.complete())
        *_, last = await s.complete(stop_token_ids=[ids[2]])
        assert (last.finish_reason, last.stop_token_id) == ("stop", ids[2])
        text = "".join(answer.text for answer in await s.complete(max_tokens=20))
        *_, last = await s.complete(max_tokens=20, stop=[text[6:9]])
        assert last.stop == text[6:9]

    async def test_bias_and_lists_of_tokens(self, s: Stub) -> None:
        assert ids_of(await s.complete(logit_bias={777: 100})) == [777] * 6
        assert set(ids_of(await s.complete(allowed_token_ids=[500]))) == {500}
        assert ids_of(await s.complete(truncate_prompt_tokens=9)) != ids_of(await s.complete())

    async def test_every_form(self, s: Stub) -> None:
        for form, allowed in (
            ({"regex": "[ab]{3}"}, lambda text: set(text) <= {"a", "b"}),
            ({"choices": pb.Choices(texts=["yes", "no"])}, lambda text: text in ("yes", "no")),
            ({"grammar": 'start: "left" | "right"'}, lambda text: text in ("left", "right")),
            ({"json_schema": json.dumps(SCHEMA)}, lambda text: "city" in json.loads(text)),
        ):
            answers = await s.complete(max_tokens=200, **form)
            assert allowed("".join(answer.text for answer in answers)), form

    async def test_a_chat(self, s: Stub) -> None:
        assert len(ids_of(await s.chat())) == 6

    async def test_a_named_function_is_called(self, s: Stub) -> None:
        answers = await s.chat(
            {"max_tokens": 200, "ignore_eos": False}, tools=[TOOL], tool_choice="=weather"
        )
        calls = [call for answer in answers for call in answer.tool_calls]
        assert calls[0].id and calls[0].name == "weather"
        arguments = json.loads("".join(call.arguments for call in calls))
        assert arguments["city"] in ("Oslo", "Rome")
        assert answers[-1].finish_reason == "tool_calls"

    async def test_a_result_goes_back(self, s: Stub) -> None:
        call = pb.ToolCall(id="call_1", name="weather", arguments="{}")
        messages = [
            pb.Message(**CHAT[0]),
            pb.Message(role="assistant", tool_calls=[call]),
            pb.Message(role="tool", tool_call_id="call_1", content="12 degrees"),
        ]
        assert len(ids_of(await s.chat(messages=messages, tools=[TOOL]))) == 6

    async def test_a_final_message_is_continued(self, s: Stub) -> None:
        messages = [pb.Message(**CHAT[0]), pb.Message(role="assistant", content="The sea is")]
        answers = await s.chat(messages=messages, continue_final_message=True)
        longer = await s.chat(messages=messages)
        counts = [a[-1].final.usage.prompt_tokens for a in (answers, longer)]
        assert counts[0] < counts[1]

    async def test_bad_requests_name_the_field(self, s: Stub) -> None:
        for call in (
            s.complete(temperature=3),
            s.complete([999_999]),
            s.complete([]),
            s.chat(tools=[TOOL], tool_choice="=other"),
            s.chat(tools=[pb.Tool(name="f", parameters="{")]),
            s.chat(messages=[]),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


GRPC_CHECKS = {
    name.removeprefix("test_").replace("_", " "): method
    for name, method in inspect.getmembers(OverGrpc(), inspect.ismethod)
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", GRPC_CHECKS)
async def test_over_grpc(evenflow: Running, name: str, mode: str) -> None:
    async with grpc.aio.insecure_channel(evenflow.grpc) as channel:
        await GRPC_CHECKS[name](Stub(rpc.InferenceStub(channel), mode))

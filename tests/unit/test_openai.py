"""The HTTP interface as OpenAI's clients read it, in process."""

import asyncio
import json
from typing import Any

import pytest

from serving.auth import ApiKey, Keyring, digest
from serving.explain import lines
from serving.pools import Submission
from tests.fakes import Event, FakePools, hashed, scripted, worker
from tests.front import (
    DISAGGREGATED,
    MODEL,
    TOKENIZER,
    chunks,
    deltas,
    events,
    front,
    keyring,
    says,
)
from tests.tokenizers import TEXTS
from workers.core.output import Output

SPLIT = (worker("prefill-0"), worker("decode-0"))
MIXED_TEXT = "ok 👨‍👩‍👧‍👦 안녕 สวัสดี END more"


def error_of(body: dict[str, Any]) -> dict[str, Any]:
    """The error object, checked for OpenAI's shape (FAULTS 107)."""
    assert list(body) == ["error"]
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and isinstance(error["type"], str)
    assert all(error[key] is None or isinstance(error[key], str) for key in ("param", "code"))
    return error


# ---------------------------------------------------------------------------- answers


async def test_a_completion_is_what_openai_clients_expect() -> None:
    door = front(FakePools(script=says("Good day.")))
    response = await door.complete(max_tokens=40)
    body = response.json()
    assert response.headers["x-request-id"] == body["id"]
    assert response.headers["x-evenflow-mode"] == "mixed"
    assert (body["object"], body["model"]) == ("text_completion", MODEL)
    assert body["choices"][0]["text"] == "Good day."
    assert body["choices"][0]["finish_reason"] == "stop"
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert body["evenflow"]["workers"] == ["mixed-0"]


async def test_a_chat_is_rendered_with_the_models_template() -> None:
    door = front(FakePools(script=says("Hi!")))
    body = (
        await door.chat([{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}])
    ).json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hi!"}
    prompt = door.pools.submissions[0][1].request.prompt
    expected = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(prompt, skip_special_tokens=False) == expected


async def test_a_chat_without_max_tokens_may_fill_the_context() -> None:
    door = front(FakePools(worker("mixed-0", num_pages=100), worker("mixed-1"), script=says("a")))
    await door.chat()
    request = door.pools.submissions[0][1].request
    assert len(request.prompt) + request.sampling.max_tokens == 1600


async def test_every_shape_of_prompt() -> None:
    door = front(FakePools(script=says("yes")))
    ids = TOKENIZER.encode("Hello")
    for prompt, count in (("Hello", 1), (["Hello", "x"], 2), (ids, 1), ([ids, [5], [6]], 3)):
        body = (await door.complete(prompt)).json()
        assert [choice["index"] for choice in body["choices"]] == list(range(count))
        assert all(choice["text"] == "yes" for choice in body["choices"])


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_are_returned_on_request(stream: bool) -> None:
    door = front(FakePools(script=says(MIXED_TEXT)))
    response = await door.complete([5, 6], max_tokens=400, return_token_ids=True, stream=stream)
    bodies = chunks(response) if stream else [response.json()]
    choices = [choice for body in bodies for choice in body["choices"]]
    assert choices[0]["prompt_token_ids"] == [5, 6]
    joined = [token for choice in choices for token in choice["token_ids"]]
    assert joined == [*TOKENIZER.encode(MIXED_TEXT), 2]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_gives_the_prompt_back_first(stream: bool) -> None:
    door = front(FakePools(script=says(" there")))
    response = await door.complete("Hello", echo=True, stream=stream)
    text = "".join(deltas(response)) if stream else response.json()["choices"][0]["text"]
    assert text == "Hello there"


@pytest.mark.parametrize("mode", ["mixed", "disaggregated"])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 16, 17])
async def test_exactly_max_tokens(mode: str, max_tokens: int) -> None:
    """FAULTS 19."""
    for stream in (False, True):
        door = front(FakePools(*SPLIT))
        body = {"max_tokens": max_tokens, "ignore_eos": True, "evenflow": {"mode": mode}}
        options = {"stream_options": {"include_usage": True}} if stream else {}
        response = await door.complete(**body, stream=stream, **options)
        last = chunks(response)[-1] if stream else response.json()
        assert last["usage"]["completion_tokens"] == max_tokens
        assert response.headers["x-evenflow-mode"] == mode
        assert bool(door.pools.submitted("decode-0")) == (mode == "mixed" or max_tokens > 1)


# ---------------------------------------------------------------------------- streams


async def test_a_stream_starts_with_a_token_and_every_delta_says_something() -> None:
    """FAULTS 1: no chunk for a prefill step, no empty delta after the role."""
    door = front(FakePools(script=hashed(550)))
    body = {"max_tokens": 8, "ignore_eos": True, "stream": True}
    found = chunks(await door.chat(**body))
    role, *rest = [chunk["choices"][0] for chunk in found]
    assert role["delta"] == {"role": "assistant", "content": ""}
    for choice in rest:
        assert choice["delta"].get("content") or choice["finish_reason"]
    assert rest[-1]["finish_reason"] == "length"
    assert found[-1]["evenflow"]["mode"] == "mixed"


async def test_the_first_delta_comes_with_the_first_token() -> None:
    """FAULTS 1: and the time to first token is the one that the client sees."""
    door = front(FakePools(script=says("abcdefgh"), delay_s=0.02))
    loop = asyncio.get_running_loop()
    start = loop.time()
    async with door.http.stream(
        "POST", "/v1/completions", json={"prompt": "x", "stream": True}
    ) as response:
        assert response.status_code == 200
        await response.aread()
    total = loop.time() - start
    ttft = await door.metric("vllm:time_to_first_token_seconds_sum")
    assert 0.02 <= ttft < total / 2
    assert await door.metric("vllm:time_to_first_token_seconds_count") == 1


@pytest.mark.parametrize("text", TEXTS)
async def test_streams_equal_whole_answers_and_split_no_character(text: str) -> None:
    """FAULTS 13, 111."""
    door = front(FakePools(*SPLIT, script=says(text)))
    whole = (await door.complete(max_tokens=900)).json()["choices"][0]["text"]
    found = deltas(await door.complete(max_tokens=900, stream=True, evenflow=DISAGGREGATED))
    assert "".join(found) == whole == text
    assert not any("\ufffd" in delta for delta in found)


async def test_an_answer_cut_inside_a_character_says_so_at_its_end() -> None:
    """FAULTS 13."""
    ids = TOKENIZER.encode("ok 𓀀")[:-1]
    door = front(FakePools(script=scripted(ids)))
    for stream in (False, True):
        response = await door.complete(max_tokens=len(ids), stream=stream)
        text = "".join(deltas(response)) if stream else response.json()["choices"][0]["text"]
        assert text == TOKENIZER.decode(ids)
        assert text.endswith("\ufffd")


async def test_stop_strings_never_leak_into_a_stream() -> None:
    """FAULTS 11."""
    stops = [MIXED_TEXT[at : at + size] for at in range(3, 26, 3) for size in (1, 2, 5, 12)]
    for stop in stops:
        door = front(FakePools(*SPLIT, script=says(MIXED_TEXT)))
        whole = (await door.complete(max_tokens=400, stop=stop)).json()["choices"][0]
        response = await door.complete(max_tokens=400, stop=[stop], stream=True)
        expected = MIXED_TEXT[: MIXED_TEXT.index(stop)]
        assert "".join(deltas(response)) == whole["text"] == expected
        last = chunks(response)[-1]["choices"][0]
        assert last["finish_reason"] == whole["finish_reason"] == "stop"
        assert last["stop_reason"] == whole["stop_reason"] == stop
        assert door.pools.held == set()


async def test_concurrent_streams_get_their_own_deltas_once() -> None:
    """FAULTS 111."""
    door = front(FakePools(*SPLIT, script=hashed(550), delay_s=0.0005))
    prompts = [f"prompt {i}" for i in range(50)]
    body = {"max_tokens": 24, "ignore_eos": True, "seed": 1}
    whole = await asyncio.gather(*(door.complete(p, **body) for p in prompts))
    streamed = await asyncio.gather(*(door.complete(p, **body, stream=True) for p in prompts))
    for one, many in zip(whole, streamed, strict=True):
        assert "".join(deltas(many)) == one.json()["choices"][0]["text"]


async def test_n_answers_in_one_stream() -> None:
    """FAULTS 17."""
    door = front(FakePools(*SPLIT, script=hashed(550)))
    body = {"n": 3, "max_tokens": 40, "seed": 7, "ignore_eos": True}
    whole = (await door.chat(**body)).json()
    assert whole["usage"]["completion_tokens"] == 120
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert len(set(texts)) == 3
    response = await door.chat(**body, stream=True)
    assert ["".join(deltas(response, index)) for index in range(3)] == texts
    ends = [c for chunk in chunks(response) for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(choice["index"] for choice in ends) == [0, 1, 2]


@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_usage_in_a_stream_only_when_asked_for(route: str) -> None:
    """FAULTS 105."""
    door = front(FakePools(script=hashed(200)))
    send = getattr(door, route)
    for options in (None, {}, {"include_usage": False}):
        found = chunks(await send(stream=True, max_tokens=4, stream_options=options))
        assert not any(chunk.get("usage") for chunk in found)
        assert all(chunk["choices"] for chunk in found)
    response = await send(stream=True, max_tokens=4, n=2, stream_options={"include_usage": True})
    *before, last = chunks(response)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 8
    assert not any(chunk.get("usage") for chunk in before)
    refused = await send(stream_options={"include_usage": True})
    assert refused.status_code == 400
    assert error_of(refused.json())["param"] == "stream_options"


async def test_a_failure_in_mid_stream_is_an_event_and_no_done() -> None:
    """FAULTS 15, 89, 107: and a whole answer is a 500."""

    def script(worker_id: str, submission: Submission, position: int) -> Event:
        if position < 3:
            return hashed()(worker_id, submission, position)
        return Output("", finish_reason="error", error="the model step failed")

    door = front(FakePools(script=script))
    found = events(await door.complete(stream=True))
    assert error_of(found[-1])["type"] == "server_error"
    assert not any(c["finish_reason"] for chunk in found[:-1] for c in chunk["choices"])
    response = await door.complete()
    assert response.status_code == 500
    error_of(response.json())
    assert (await door.http.get("/health")).status_code == 200


# ---------------------------------------------------------------------------- logprobs


async def test_chat_logprobs_have_chats_shape() -> None:
    """FAULTS 109."""
    door = front(FakePools(script=says(MIXED_TEXT)))
    for top in (None, 0, 3):
        extra = {} if top is None else {"top_logprobs": top}
        choice = (await door.chat(logprobs=True, max_tokens=400, **extra)).json()["choices"][0]
        content = choice["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in content) == MIXED_TEXT.encode()
        for entry in content:
            assert entry.keys() == {"token", "logprob", "bytes", "top_logprobs"}
            assert len(entry["top_logprobs"]) == (top or 0)
    assert (await door.chat(top_logprobs=2)).status_code == 400
    assert (await door.chat()).json()["choices"][0]["logprobs"] is None


async def test_streamed_logprobs_are_those_of_the_whole_answer() -> None:
    """FAULTS 109: also where characters are split over tokens."""
    door = front(FakePools(script=says(MIXED_TEXT)))
    body = {"logprobs": True, "top_logprobs": 1, "max_tokens": 400}
    whole = (await door.chat(**body)).json()["choices"][0]["logprobs"]["content"]
    found = chunks(await door.chat(**body, stream=True))
    choices = [choice for chunk in found for choice in chunk["choices"] if choice["logprobs"]]
    assert [entry for choice in choices for entry in choice["logprobs"]["content"]] == whole


async def test_completion_logprobs_are_four_lists() -> None:
    """FAULTS 109."""
    door = front(FakePools(script=says("plain text")))
    choice = (await door.complete(logprobs=2)).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == "plain text"
    assert len(logprobs["token_logprobs"]) == len(logprobs["tokens"])
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert "plain text"[offset:].startswith(token)
    assert (await door.complete(logprobs=0)).json()["choices"][0]["logprobs"][
        "top_logprobs"
    ] is None


async def test_logprobs_end_where_a_stop_string_cuts() -> None:
    """FAULTS 109, 11."""
    door = front(FakePools(script=says("one two three")))
    choice = (await door.chat(logprobs=True, stop=" th", max_tokens=99)).json()["choices"][0]
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert "".join(tokens) == choice["message"]["content"] == "one two"


# ---------------------------------------------------------------------------- errors


async def test_every_error_has_openais_shape() -> None:
    """FAULTS 107."""
    door = front(FakePools(script=hashed()), max_body_bytes=2000)
    post = door.http.post
    cases = [
        (await post("/v1/completions", content=b"{nope"), 400),
        (await post("/v1/completions", content=b'{"prompt": NaN}'), 400),
        (await post("/v1/completions", content=b"[" * 1900), 400),
        (await post("/v1/completions", content=b"\xff\xfe"), 400),
        (await post("/v1/completions", json=["prompt"]), 400),
        (await door.complete(temperature="hot"), 400),
        (await door.complete(model="gpt-9"), 404),
        (await door.http.get("/v1/models/gpt-9"), 404),
        (await door.http.get("/v1/models/"), 404),
        (await post("/v1/nothing", json={}), 404),
        (await door.http.get("/v1/evenflow/requests/never"), 404),
        (await door.http.get("/v1/completions"), 405),
        (await door.complete("x" * 4000), 413),
        (await post("/v1/completions", content=_endless()), 413),
    ]
    for response, status in cases:
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/json"
        error_of(response.json())


async def _endless() -> Any:
    for _ in range(10):
        yield b" " * 400


async def test_a_key_guards_everything_but_the_probes() -> None:
    """FAULTS 107: deny by default."""
    door = front(keys=keyring("secret", "other"))
    for path in ("/v1/models", "//v1/models", "/metrics", "/v1/evenflow/status", "/nothing", "/"):
        response = await door.http.get(path)
        assert response.status_code == 401
        error_of(response.json())
    for path in ("/health", "/ready", "/version", "/-/healthz", "/-/routes"):
        assert (await door.http.head(path)).status_code == 200
        assert (await door.http.get(path)).status_code == 200
    for header, status in (("Bearer secret", 200), ("Bearer wrong", 401), ("secret", 401)):
        response = await door.http.get("/v1/models", headers={"authorization": header})
        assert response.status_code == status


async def test_overload_is_429_with_retry_after() -> None:
    """FAULTS 107."""
    door = front(FakePools(worker("mixed-0", waiting_seqs=9)), max_queue=9)
    for stream in (False, True):
        response = await door.complete(stream=stream)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert error_of(response.json())["code"] == "overloaded"
    assert door.pools.submissions == []


async def test_no_worker_is_503_and_not_ready() -> None:
    door = front()
    assert (await door.http.get("/ready")).status_code == 200
    door.pools.lose("mixed-0")
    assert (await door.http.get("/ready")).status_code == 503
    assert (await door.complete()).status_code == 503
    assert (await door.http.get("/health")).status_code == 200
    assert (await door.http.get("/v1/models")).status_code == 200


# ---------------------------------------------------------------------------- the rest


async def test_tokenize_and_detokenize_are_inverse() -> None:
    door = front()
    text = "Hello <|im_end|> 👍🏽"
    body = (await door.http.post("/tokenize", json={"prompt": text})).json()
    assert body["count"] == len(body["tokens"]) and body["max_model_len"] == 8192
    back = await door.http.post("/detokenize", json={"tokens": body["tokens"]})
    assert back.json() == {"prompt": text}
    messages = [{"role": "user", "content": "Hi"}]
    body = (await door.http.post("/tokenize", json={"messages": messages})).json()
    assert body["tokens"][0] == 1
    for bad in ({}, {"tokens": "x"}, {"tokens": [10**6]}, {"tokens": [1.5]}):
        assert (await door.http.post("/detokenize", json=bad)).status_code == 400


async def test_status_and_explain_tell_where_requests_ran() -> None:
    door = front(FakePools(*SPLIT))
    status = (await door.http.get("/v1/evenflow/status")).json()
    assert [w["id"] for w in status["workers"]] == ["prefill-0", "decode-0"]
    assert status["workers"][0]["load"]["num_pages"] == 1024
    headers = {"x-request-id": "mine/1", "x-evenflow-mode": "disaggregated"}
    body = {"prompt": "x", "max_tokens": 3}
    response = await door.http.post("/v1/completions", json=body, headers=headers)
    assert response.headers["x-request-id"] == "mine/1"
    told = (await door.http.get("/v1/evenflow/requests/mine/1")).json()
    assert (told["mode"], told["outcome"]) == ("disaggregated", "length")
    assert told["workers"] == ["prefill-0", "decode-0"]
    assert told["candidates"] and "disaggregated over prefill-0" in told["reason"]
    assert told["predicted"]["decode"] == "decode-0" and told["ttft_slo_s"] == 2.0
    parts = told["ttft_queue_s"] + told["ttft_prefill_s"] + told["front_s"]
    assert parts >= told["ttft_s"] > 0, "scripted workers claim more time than passed"
    text = "\n".join(lines(told))
    assert "ran in disaggregated mode: prefill-0 read the prompt, decode-0 wrote" in text
    assert "first token after" in text and "promised" in text
    assert "prompt" not in told


async def test_metrics_have_the_names_that_dashboards_use() -> None:
    door = front(FakePools(*SPLIT))
    await door.complete(max_tokens=5, evenflow=DISAGGREGATED, ignore_eos=True)
    names = {
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:inter_token_latency_seconds_count": 4,
        "vllm:e2e_request_latency_seconds_count": 1,
        "vllm:request_queue_time_seconds_count": 1,
        "vllm:generation_tokens_total": 5,
        "vllm:request_success_total": 1,
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0,
        "vllm:num_preemptions_total": 0,
        "evenflow_requests_total": 1,
    }
    for name, value in names.items():
        assert await door.metric(name) == value, name
    assert await door.metric("vllm:prompt_tokens_total") > 0
    door.pools.set_load("decode-0", running_seqs=3, free_pages=512)
    assert await door.metric("vllm:num_requests_running") == 3
    assert await door.metric("vllm:kv_cache_usage_perc") == 0.25


async def test_no_prompt_in_errors_or_metrics() -> None:
    canary = "canary-8231"
    door = front()
    for body in ({"max_tokens": 10**6}, {"stop": canary * 99}, {"user": canary, canary: canary}):
        response = await door.complete(f"{canary} text", **body)
        assert response.status_code == 200 or canary not in response.text
    assert canary not in (await door.http.get("/metrics")).text
    assert json.dumps(canary)[1:-1] not in (await door.http.get("/v1/evenflow/status")).text


async def test_roles_drains_and_moves_over_http() -> None:
    pools = FakePools(worker("decode-0"), worker("decode-1"), delay_s=0.005)
    f = front(pools)
    path = "/v1/evenflow/workers/decode-0"
    assert (await f.http.post(f"{path}/role", json={"role": "prefill"})).status_code == 200
    assert pools.views["decode-0"].role == "prefill"
    assert (await f.http.post(f"{path}/role", json={"role": "both"})).status_code == 400
    assert (await f.http.post(f"{path}/role", json=[])).json()["error"]["param"] == "role"
    assert (await f.http.post("/v1/evenflow/workers/x/drain", json={})).status_code == 404
    assert (await f.http.post(f"{path}/drain", json={})).status_code == 200
    status = (await f.http.get("/v1/evenflow/status")).json()
    assert [w["is_leaving"] for w in status["workers"]] == [True, False]
    move = {"worker": "decode-1"}
    assert (await f.http.post("/v1/evenflow/requests/r/move", json=move)).status_code == 404


async def test_only_an_admin_s_key_may_change_what_workers_do() -> None:
    keys = Keyring(
        [
            ApiKey("user", digest("k1"), "user"),
            ApiKey("ops", digest("k2"), "ops", admin=True),
        ]
    )
    f = front(FakePools(worker("decode-0")), keys=keys)
    for key, status in (("k1", 403), ("k2", 200)):
        answer = await f.http.post(
            "/v1/evenflow/workers/decode-0/drain",
            json={},
            headers={"authorization": f"Bearer {key}"},
        )
        assert answer.status_code == status


async def test_a_pool_is_scaled_by_admins_where_somebody_scales() -> None:
    class Scaler:
        said: tuple[str, int] | None = None

        async def scale(self, pool: str, num: int) -> None:
            self.said = (pool, num)

        def status(self) -> dict[str, Any]:
            return {"targets": {}}

    door = front()
    path = "/v1/evenflow/pools/decode/scale"
    assert (await door.http.post(path, json={"workers": 2})).status_code == 404
    door.gateway.scaler = scaler = Scaler()
    for body in ({}, [], {"workers": "2"}, {"workers": -1}, {"workers": True}):
        assert (await door.http.post(path, json=body)).status_code == 400
    assert scaler.said is None
    assert (await door.http.post(path, json={"workers": 2})).json()["workers"] == 2
    assert scaler.said == ("decode", 2)
    locked = front(keys=keyring("secret"))
    locked.gateway.scaler = scaler
    headers = {"authorization": "Bearer secret"}
    answer = await locked.http.post(path, json={"workers": 9}, headers=headers)
    assert answer.status_code == 403 and scaler.said == ("decode", 2)

"""Bad input ends at the front door with the name of the parameter, and workers never see it."""

import asyncio
import json
import logging
from typing import Any

import pytest

from tests.fakes import FakePools, worker
from tests.front import TOKENIZER, Front, front, says

OUT = TOKENIZER.vocab_size  # the first id that is none


@pytest.fixture
def door() -> Front:
    return front(FakePools(worker("mixed-0", num_pages=64), script=says("fine")))


async def refused(door: Front, param: str | None, body: dict[str, Any], chat: bool = False) -> str:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    default = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    content = json.dumps({**default, **body})
    response = await door.http.post(path, content=content)
    assert response.status_code == 400, (body, response.text)
    error = response.json()["error"]
    assert error["param"] == param, (body, error)
    assert door.pools.submissions == []
    assert (await door.complete()).status_code == 200
    door.pools.submissions.clear()
    return str(error["message"])


@pytest.mark.parametrize(
    "prompt", [[OUT], [999999], [2**31], [2**63], [-1], [[5], [OUT]], [True], [1.5], [5, "x"]]
)
async def test_token_ids_outside_the_vocabulary_are_refused(door: Front, prompt: Any) -> None:
    """FAULTS 21."""
    await refused(door, "prompt", {"prompt": prompt})


@pytest.mark.parametrize(
    "bias",
    [
        *({str(OUT): 1}, {"-1": 1}, {"abc": 1}, {"1.5": 1}, {"5": 101}, {"5": "x"}, {"5": None}),
        *({"5": True}, {"5": -100.5}, {"": 1}, [5], "5", {"9" * 40: 1}, {"5": 10**400}),
    ],
)
async def test_logit_bias_is_checked(door: Front, bias: Any) -> None:
    """FAULTS 23."""
    await refused(door, "logit_bias", {"logit_bias": bias})


async def test_a_bias_beyond_floats_is_refused_and_a_good_one_is_taken(door: Front) -> None:
    """FAULTS 23."""
    body = '{"prompt": "x", "logit_bias": {"5": 1e999}}'
    response = await door.http.post("/v1/completions", content=body)
    assert response.json()["error"]["param"] == "logit_bias"
    assert (await door.complete(logit_bias={"5": -100})).status_code == 200
    assert door.pools.submissions[0][1].request.sampling.logit_bias == ((5, -100.0),)


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], [[], [1]], None, {}, 5, ["x", 5], [["x"]]])
async def test_a_prompt_of_no_tokens_is_refused(door: Front, prompt: Any) -> None:
    """FAULTS 25."""
    await refused(door, "prompt", {"prompt": prompt})


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 1, "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0].type",
        ),
    ],
)
async def test_messages_are_checked(door: Front, messages: Any, param: str) -> None:
    """FAULTS 25."""
    await refused(door, param, {"messages": messages}, chat=True)


async def test_an_empty_message_is_fine_because_the_template_is_a_prompt(door: Front) -> None:
    """FAULTS 25."""
    assert (await door.chat("")).status_code == 200


ENDLESS = "{% for _ in range(10**9) %}x{% endfor %}"


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("chat_template", ENDLESS),
        ("chat_template_kwargs", {"chat_template": ENDLESS}),
        ("chat_template_kwargs", {"tokenize": True}),
        ("chat_template_kwargs", {"return_dict": True}),
        ("add_generation_prompt", "x"),
    ],
)
async def test_a_template_never_comes_from_a_request(door: Front, param: str, value: Any) -> None:
    """FAULTS 119."""
    await refused(door, param, {param: value}, chat=True)


async def test_half_a_surrogate_pair_is_refused(door: Front) -> None:
    for body in ('{"prompt": "\\ud800"}', '{"prompt": "x", "stop": "\\udfff"}'):
        response = await door.http.post("/v1/completions", content=body)
        assert response.status_code == 400 and "surrogate" in response.json()["error"]["message"]


async def test_what_fits_no_empty_pool_is_refused_and_others_go_on(door: Front) -> None:
    """FAULTS 27: 64 pages of 16 hold 1,024 tokens, the context is 8,192."""
    message = await refused(door, "prompt", {"prompt": [5] * 1500})
    assert "1500" in message and "1024" in message
    message = await refused(door, "max_tokens", {"prompt": [5] * 1000, "max_tokens": 500})
    assert "1000" in message and "500" in message and "1024" in message
    for _ in range(5):
        assert (await door.complete()).status_code == 200
    assert (await door.complete([5] * 1000, max_tokens=25)).status_code == 200


async def test_what_exceeds_the_context_is_refused() -> None:
    """FAULTS 27."""
    door = front(FakePools(script=says("fine")))
    assert "8192" in await refused(door, "prompt", {"prompt": [5] * 8192})
    assert "8192" in await refused(door, "max_tokens", {"prompt": [5] * 8000, "max_tokens": 193})
    assert (await door.complete([5] * 8000, max_tokens=192)).status_code == 200


async def test_a_text_that_is_far_too_long_is_refused_without_encoding_it(door: Front) -> None:
    """FAULTS 27: six megabytes take seconds to encode."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    message = await refused(door, "prompt", {"prompt": "x " * (3 << 20)})
    await refused(
        door, "messages", {"messages": [{"role": "user", "content": "x " * (3 << 20)}]}, True
    )
    assert loop.time() - start < 1.0
    assert "at least" in message and "8192" in message


WRONG = [
    ("max_tokens", [0, -1, 1.5, "7", True, 2**40, [1]]),
    ("temperature", [-0.1, 2.1, "1", True, [], 10**400]),
    ("top_p", [0, -1, 1.1, "x"]),
    ("top_k", [-2, 1.5, "x", 2**40]),
    ("min_p", [-0.1, 1.1]),
    ("seed", [1.5, "x", True, 2**64, -(2**63) - 1]),
    ("presence_penalty", [-2.1, 2.1, "x"]),
    ("frequency_penalty", [-2.1, 2.1]),
    ("repetition_penalty", [0, -1, "x"]),
    ("n", [0, 17, 1.5, "2", True]),
    ("best_of", [2, 0]),
    ("logprobs", [21, -1, True, "2"]),
    ("min_tokens", [-1, 17, "x"]),
    ("stop", ["", [""], ["x"] * 17, "x" * 257, 5, [5], {"a": 1}]),
    ("stop_token_ids", [[OUT], [-1], "x", 5, [1.5], [1] * 257]),
    ("stream", ["yes", 1]),
    ("stream_options", [5, {"include_usage": True}]),
    ("suffix", ["x", 5]),
    ("echo", ["x"]),
    ("ignore_eos", [1]),
    ("priority", ["x", 2**40]),
    ("evenflow", [5]),
    ("evenflow.mode", ["fast"]),
    ("evenflow.slo.ttft_ms", [0, -1, "x"]),
    ("evenflow.worker", [5, [5], ["a", "b", "c"]]),
]


@pytest.mark.parametrize(
    ("param", "value"),
    [(param, value) for param, values in WRONG for value in values],
    ids=lambda value: str(value)[:24],
)
async def test_wrong_types_and_ranges_name_the_parameter(
    door: Front, param: str, value: Any
) -> None:
    body = value
    for name in reversed(param.split(".")):
        body = {name: body}
    await refused(door, param, body)


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("top_logprobs", {"top_logprobs": 3}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("logprobs", {"logprobs": 3}),
        ("max_completion_tokens", {"max_completion_tokens": 0}),
        ("tools[0].function.name", {"tools": [{"type": "function"}]}),
        ("response_format", {"response_format": {"type": "json_object"}}),
    ],
)
async def test_what_chat_does_not_offer_is_refused(
    door: Front, param: str, body: dict[str, Any]
) -> None:
    await refused(door, param, body, chat=True)


async def test_unknown_fields_are_ignored_and_counted(
    door: Front, caplog: pytest.LogCaptureFixture
) -> None:
    """FAULTS 29."""
    caplog.set_level(logging.DEBUG)
    body = {
        "messages": [{"role": "user", "content": "x", "name": "Ann", "weight": 1}],
        "temprature": "secret-value",
        "evenflow": {"mood": 1, "slo": {"later": 1}},
        **{"metadata": {}, "service_tier": "auto", "user": "u", "parallel_tool_calls": False},
        **{"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "store": None},
    }
    response = await door.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert await door.metric("evenflow_ignored_fields_total") == 4
    assert "temprature" in caplog.text and "secret-value" not in caplog.text


async def test_null_means_the_default(door: Front) -> None:
    names = ["max_tokens", "temperature", "stop", "seed", "logit_bias", "n", "evenflow", "model"]
    assert (await door.complete(**dict.fromkeys(names))).status_code == 200


async def test_mode_slo_and_priority_from_body_or_headers(door: Front) -> None:
    evenflow = {"mode": "mixed", "slo": {"ttft_ms": 500}, "priority": -3}
    headers = {"x-evenflow-mode": "disaggregated", "x-slo-ttft-ms": "9", "x-slo-itl-ms": "40"}
    body = {"prompt": "x", "evenflow": evenflow, "priority": 7}
    assert (await door.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
    request = door.pools.submissions[0][1].request
    assert (request.slo.ttft_s, request.slo.itl_s, request.priority) == (0.5, 0.04, -3)
    await door.complete(priority=7)
    assert door.pools.submissions[1][1].request.priority == 7
    for bad in ("soon", "nan", "-5"):
        response = await door.http.post(
            "/v1/completions", json={"prompt": "x"}, headers={"x-slo-itl-ms": bad}
        )
        assert response.status_code == 400


async def test_pinning_needs_debug() -> None:
    pools = FakePools(worker("mixed-0"), worker("mixed-1"), script=says("fine"))
    door = front(pools)
    assert (await door.complete(evenflow={"worker": ["mixed-1", "mixed-0"]})).status_code == 200
    assert [worker_id for worker_id, _ in pools.submissions] == ["mixed-1", "mixed-0"]
    assert (await door.complete(evenflow={"worker": "mixed-9"})).status_code == 503
    closed = front(pools, debug=False)
    assert (await closed.complete(evenflow={"worker": "mixed-1"})).status_code == 400


async def test_the_client_cannot_choose_the_workers_name_for_a_request(door: Front) -> None:
    headers = {"x-request-id": "same"}
    for _ in range(2):
        await door.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    first, second = (submission.request.id for _, submission in door.pools.submissions)
    assert first != second and first.startswith("same~")
    headers = {"x-request-id": "a b"}
    response = await door.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    assert response.status_code == 400


async def test_sampling_reaches_the_worker_as_asked(door: Front) -> None:
    body = {
        **{
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": -1,
            "min_p": 0.1,
            "seed": -1,
            "max_tokens": 9,
        },
        **{"presence_penalty": 1, "frequency_penalty": -1.5, "repetition_penalty": 1.1},
        **{"min_tokens": 3, "stop_token_ids": [7], "logprobs": 0},
    }
    await door.complete(**body)
    sampling = door.pools.submissions[0][1].request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 0)
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == (2**64 - 1, 9, 3)
    assert sampling.stop_ids == {0, 2, 7} and sampling.logprobs == 0
    await door.complete(ignore_eos=True)
    sampling = door.pools.submissions[1][1].request.sampling
    assert sampling.stop_ids == frozenset() and sampling.logprobs is None


async def test_tokenize_and_detokenize_take_no_more_than_a_context() -> None:
    entry = front(FakePools(worker("mixed-0", num_pages=64), script=says("fine")))
    ids = [5] * 1025
    for path, body in (("/detokenize", {"tokens": ids}), ("/tokenize", {"prompt": "x" * 10**6})):
        response = await entry.http.post(path, json=body)
        assert response.status_code == 400, path
        assert response.json()["error"]["code"] == "context_length_exceeded"
    whole = await entry.http.post("/detokenize", json={"tokens": ids[:1000]})
    assert whole.status_code == 200

"""Functions that an answer may call: what the client asks for, and what it reads."""

import json
from typing import Any

import pytest
import torch

from serving.api.fields import Fields
from serving.api.tools import read_tools
from serving.calls import HERMES, LLAMA, MISTRAL, CallForm, CallParser
from serving.errors import BadRequest
from serving.tokenizer import Tokenizer
from tests.fakes import FakePools
from tests.front import TOKENIZER, Front, chunks, front, says
from tests.greedy import sequence
from tests.tokenizers import byte_level
from workers.constraints import Constraints
from workers.grammar import Grammars
from workers.sampler import Sampler

EOS = 2
GRAMMARS = Grammars(TOKENIZER._fast.to_str(), TOKENIZER.vocab_size, [EOS])
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
TEMPLATES = {  # what makes each form of template known
    HERMES: "{{ tools | tojson }}<tool_call>{{ messages[0].content }}",
    LLAMA: '{{ tools | tojson }}{"name": , "parameters": }{{ messages[0].content }}',
    MISTRAL: "{{ tools | tojson }}[TOOL_CALLS]{{ messages[0].content }}",
}


def door(answer: str = "Hi") -> Front:
    return front(FakePools(script=says(answer)), grammars=GRAMMARS)


def prompt_of(front: Front) -> str:
    prompt = front.pools.submissions[-1][1].request.prompt
    return TOKENIZER.decode(prompt, skip_special_tokens=False)


# ---------------------------------------------------------------------------- answers


async def test_a_call_is_read_out_of_the_answer() -> None:
    body = (await door(f"Let me look.\n{CALL}").chat(tools=TOOLS)).json()
    choice = body["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me look."
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo", "days": 2}'}


async def test_streamed_calls_add_up_to_the_same() -> None:
    answer = await door(f"Look:{CALL}\n{CALL}").chat(
        tools=TOOLS, stream=True, stream_options={"include_usage": True}
    )
    *events, usage = chunks(answer)
    choices = [event["choices"][0] for event in events]
    assert "".join(c["delta"].get("content") or "" for c in choices) == "Look:"
    calls = [call for c in choices for call in c["delta"].get("tool_calls", ())]
    heads = [call for call in calls if "id" in call]
    assert [call["index"] for call in heads] == [0, 1]
    assert len({call["id"] for call in heads}) == 2
    for index in (0, 1):
        own = [call["function"]["arguments"] for call in calls if call["index"] == index]
        assert json.loads("".join(own)) == {"city": "Oslo", "days": 2} and len(own) > 3
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert all(c["delta"] or c["finish_reason"] for c in choices), "no event says nothing"
    assert usage["usage"]["completion_tokens"] > 20


async def test_one_call_only_when_asked_for_one() -> None:
    body = (await door(f"{CALL}\n{CALL} and more").chat(
        tools=TOOLS, parallel_tool_calls=False)).json()  # fmt: skip
    message = body["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1 and message["content"] is None


@pytest.mark.parametrize("extra", [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}])
async def test_without_tools_a_call_is_text(extra: dict[str, Any]) -> None:
    entry = door(CALL)
    choice = (await entry.chat(**extra)).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": CALL}
    assert choice["finish_reason"] == "stop" and "weather" not in prompt_of(entry)


async def test_an_answer_without_calls_is_an_answer() -> None:
    choice = (await door("It rains. <tool_call>").chat(tools=TOOLS)).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "It rains. <tool_call>"}
    assert choice["finish_reason"] == "stop"


# ---------------------------------------------------------------------------- prompts


async def test_a_template_without_tools_gets_them_in_plain_words() -> None:
    entry = door("ok")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"},
    ]
    body = {"messages": messages, "tools": TOOLS}
    answer = await entry.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    prompt = prompt_of(entry)
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\n# Tools") and '"Oslo"' in prompt
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in prompt
    assert "<|im_start|>user\n<tool_response>\n12 degrees\n</tool_response><|im_end|>" in prompt
    counted = await entry.http.post("/tokenize", json=body)
    assert counted.json()["tokens"] == list(entry.pools.submissions[-1][1].request.prompt)


def test_a_template_with_tools_gets_them_as_they_are() -> None:
    from serving.api.conversation import read_conversation

    template = (
        "{{ tools | tojson }}<tool_call>{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{{ c.id }}{% endfor %}{{ m.content }}{% endfor %}"
    )
    tokenizer = Tokenizer(byte_level(), template=template, eos_ids=frozenset({2}))
    call = {"id": "call_7", "function": {"name": "now", "arguments": '{"zone": 1}'}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    fields = Fields({"messages": messages, "tools": TOOLS})
    tools = read_tools(fields, tokenizer)
    assert tools is not None
    text = read_conversation(fields, tools.shown).text(tokenizer)
    assert text.endswith('{"zone": 1}call_7')
    assert json.loads(text.split("<tool_call>")[0])[1]["function"]["name"] == "now"


# ---------------------------------------------------------------------------- forced calls


def forced(form: CallForm, seed: int, **body: Any) -> list[tuple[str, Any]]:
    """The calls in noise that is held to them."""
    tokenizer = Tokenizer(byte_level(), template=TEMPLATES[form], eos_ids=frozenset({EOS}))
    use = read_tools(Fields({"tools": TOOLS, **body}), tokenizer)
    assert use is not None and use.form is form and GRAMMARS.problem(use.grammar) == ""
    sampler, noise = Sampler(Constraints(GRAMMARS)), torch.Generator().manual_seed(seed)
    seq = sequence("r", [5], max_tokens=2000, grammar=use.grammar, temperature=1.0, seed=seed,
                   stop_ids=frozenset({EOS}))  # fmt: skip
    while EOS not in seq.output and len(seq.output) < 2000:
        row = torch.randn(TOKENIZER.vocab_size, generator=noise)
        row[EOS] += 6.0
        seq.output.append(sampler.sample(row[None], [seq])[0].id)
    parser = CallParser(form, {"weather", "now"}, use.max_calls)
    parts = [parser.feed(TOKENIZER.decode(seq.output)), parser.flush()]
    assert "".join(part.text for part in parts) == ""
    deltas = [delta for part in parts for delta in part.calls]
    names = {delta.index: delta.name for delta in deltas if delta.name}
    texts = {i: "".join(d.arguments for d in deltas if d.index == i) for i in names}
    return [(names[i], json.loads(texts[i])) for i in names]


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL])
@pytest.mark.parametrize("seed", [1, 2])
def test_noise_held_to_a_named_function_calls_it(form: CallForm, seed: int) -> None:
    ((name, arguments),) = forced(form, seed, tool_choice=NAMED)
    assert name == "weather" and arguments.keys() == {"city", "days"}
    assert arguments["city"] in ("Oslo", "Rome") and 1 <= arguments["days"] <= 9


@pytest.mark.parametrize("form", [HERMES, MISTRAL])
def test_noise_that_must_call_calls_one_or_more(form: CallForm) -> None:
    calls = [forced(form, seed, tool_choice="required") for seed in range(6)]
    assert all(1 <= len(found) <= 16 for found in calls)
    assert {name for found in calls for name, _ in found} == {"weather", "now"}
    one = forced(form, 3, tool_choice="required", parallel_tool_calls=False)
    assert len(one) == 1


async def test_a_forced_call_reaches_the_worker_as_a_grammar() -> None:
    entry = door(CALL)
    body = (await entry.chat(tools=TOOLS, tool_choice=NAMED)).json()
    assert body["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert "weather" in entry.pools.submissions[0][1].request.sampling.grammar


# ---------------------------------------------------------------------------- refusals


def _tool(**function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **function}}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [1]}, "tools[0]"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"tools": _tool(name="a b")}, "tools[0].function.name"),
        ({"tools": _tool(name=7)}, "tools[0].function.name"),
        ({"tools": _tool(parameters="{}")}, "tools[0].function.parameters"),
        ({"tools": _tool(strict="yes")}, "tools[0].function.strict"),
        ({"tools": _tool() * 2}, "tools"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {**NAMED, "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "tools"),
        ({"tools": _tool(parameters={"type": "odd"}), "tool_choice": "required"}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_bad_tools_are_a_400_that_names_the_field(body: dict[str, Any], param: str) -> None:
    """FAULTS 121."""
    entry = door()
    response = await entry.chat(**body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert entry.pools.submissions == []


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, ".function.arguments"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}, ".function.arguments"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, ".function.arguments"),
        ({"tool_calls": [{"function": {}}]}, ".function.name"),
        ({"tool_calls": [{"type": "custom"}]}, ".type"),
    ],
)
async def test_bad_calls_in_a_history_are_a_400(message: dict[str, Any], param: str) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", **message}]
    response = await door().http.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == f"messages[1].tool_calls[0]{param}"


def test_a_template_of_an_unknown_form_takes_no_tools() -> None:
    tokenizer = Tokenizer(byte_level(), template="{{ tools }}<function=f>", eos_ids=frozenset({2}))
    with pytest.raises(BadRequest, match="another form"):
        read_tools(Fields({"tools": TOOLS}), tokenizer)

"""Answers that have to have a form, and tokens that are ruled out."""

import json
import re
import time
from typing import Any

import pytest
import torch

from serving.api.form import read_form
from serving.api.intake import Ask
from serving.errors import BadRequest
from tests.front import TOKENIZER, chunks, front
from tests.greedy import sequence
from workers import grammar as grammars
from workers.constraints import Constraints, bad_ends
from workers.grammar import Grammars
from workers.sampler import Sampler

EOS = 2
GRAMMARS = Grammars(TOKENIZER._fast.to_str(), TOKENIZER.vocab_size, [EOS])
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
NAMED = {"name": "person", "strict": True, "schema": SCHEMA}


def generate(grammar: str, seed: int, **sampling: Any) -> str:
    """Noise, held to a form."""
    sampler = Sampler(Constraints(GRAMMARS))
    settings = {"temperature": 1.0, "seed": seed, "stop_ids": frozenset({EOS}), **sampling}
    seq = sequence("r", [5, 6], max_tokens=300, grammar=grammar, **settings)
    noise = torch.Generator().manual_seed(seed)
    while EOS not in seq.output and len(seq.output) < 300:
        row = torch.randn(TOKENIZER.vocab_size, generator=noise)
        seq.output.append(sampler.sample(row[None], [seq])[0].id)
    return TOKENIZER.decode(seq.output, skip_special_tokens=True)


@pytest.mark.parametrize("seed", range(5))
def test_noise_held_to_a_schema_is_valid_json(seed: int) -> None:
    value = json.loads(generate(grammars.from_schema(SCHEMA), seed))
    assert value.keys() == {"name", "age"} and value["name"] in ("Ada", "Bob")
    assert isinstance(value["age"], int) and value["age"] <= 150


def test_white_space_ends() -> None:
    """Some models would indent for ever."""
    matcher = GRAMMARS.matcher(grammars.from_schema(SCHEMA))
    output = TOKENIZER.encode("{ ", add_special_tokens=False)
    for _ in range(60):
        allowed = matcher.allowed(output)
        assert allowed is not None
        if not allowed[output[-1]]:
            break
        output.append(output[-1])
    assert 10 < len(output) < 40


def test_regular_expressions_choices_and_greedy() -> None:
    assert re.fullmatch(r"[ab]{3}-\d\d", generate(grammars.from_regex(r"[ab]{3}-\d\d"), 1))
    choices = ['yes "indeed"', "no", "vielleicht ü"]
    texts = {generate(grammars.from_choices(choices), seed) for seed in range(12)}
    assert texts <= set(choices) and len(texts) > 1
    assert generate(grammars.from_choices(["no"]), 3, temperature=0.0) == "no"


def test_a_request_that_moves_goes_on_in_its_grammar() -> None:
    """A worker that has seen nothing of the answer, and one that saw more of it than it is now."""
    grammar, rows = grammars.from_regex("abcdef"), torch.zeros(1, TOKENIZER.vocab_size)
    here, there = Sampler(Constraints(GRAMMARS)), Sampler(Constraints(GRAMMARS))
    seq = sequence("r", [5], max_tokens=20, grammar=grammar, stop_ids=frozenset({EOS}))
    for sampler in (here, here, there, there, here, here):
        seq.output.append(sampler.sample(rows, [seq])[0].id)
    assert TOKENIZER.decode(seq.output) == "abcdef"[: len(TOKENIZER.decode(seq.output))]
    del seq.output[2:]
    expected = there.sample(rows, [seq])[0].id
    assert here.sample(rows, [seq])[0].id == expected


def test_a_grammar_that_cannot_be_used_ends_the_answer_and_no_other() -> None:
    """FAULTS 121: it raises nothing in the step."""
    sampler = Sampler(Constraints(GRAMMARS))
    bad = sequence("a", [5], grammar="start: (", stop_ids=frozenset({EOS}))
    good = sequence("b", [5])
    rows = torch.randn(2, TOKENIZER.vocab_size)
    tokens = sampler.sample(rows, [bad, good])
    assert tokens[0].id == EOS and tokens[1].id == int(rows[1].argmax())


def test_only_allowed_tokens_and_never_a_bad_word() -> None:
    sampler, rows = Sampler(), torch.randn(1, 50)
    allowed = sequence("a", [1], allowed_ids=frozenset({4, 9}), temperature=1.0)
    assert {sampler.sample(torch.randn(1, 50), [allowed])[0].id for _ in range(40)} == {4, 9}
    best, second = rows[0].topk(2).indices.tolist()
    bad = sequence("b", [1], bad_words=((7, best), (8,)))
    assert sampler.sample(rows, [bad])[0].id == best
    bad.output.append(7)
    assert sampler.sample(rows, [bad])[0].id == second
    assert bad_ends(((1, 2, 3), (2, 4), (5,)), [1, 2]) == [3, 4, 5]


def test_something_is_always_left_to_sample() -> None:
    only = {"allowed_ids": frozenset({4}), "temperature": 1.0}
    for ruled_out in ({"bad_words": ((4,),)}, {"stop_ids": frozenset({4}), "min_tokens": 3}):
        seq = sequence("a", [1], **only, **ruled_out)
        assert Sampler().sample(torch.randn(1, 50), [seq])[0].id == 4


# ---------------------------------------------------------------------------- at the door


async def ask(**body: Any) -> Ask:
    door = front(grammars=GRAMMARS)
    from serving.api.intake import Intake
    from serving.api.settings import FrontSettings

    intake = Intake(door.gateway, FrontSettings("tiny", grammars=GRAMMARS))
    return await intake.chat({"messages": [{"role": "user", "content": "Hi"}], **body})


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_object"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            }
        },
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"guided_json": SCHEMA},
        {"guided_regex": "[a-z]+"},
        {"guided_choice": ["yes", "no"]},
        {"guided_grammar": 'start: "a" | "b"'},
    ],
)
async def test_every_way_to_ask_for_a_form_reaches_the_worker(body: dict[str, Any]) -> None:
    grammar = (await ask(**body)).generation.sampling.grammar
    assert GRAMMARS.problem(grammar) == ""


@pytest.mark.parametrize(
    "body",
    [
        {"guided_regex": "("},
        {"guided_regex": "["},
        {"guided_regex": "|".join(f"word{i}" * 3 for i in range(20_000))},
        {"guided_regex": 7},
        {"guided_choice": []},
        {"guided_choice": [""]},
        {"guided_choice": "yes"},
        {"guided_grammar": "start: nothing"},
        {"guided_json": "{}"},
        {"guided_json": {"type": "nonsense"}},
        {"guided_json": {"$ref": "#/nowhere"}},
        {"guided_json": {"$ref": "http://127.0.0.1/schema"}},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
    ],
    ids=lambda body: str(body)[:40],
)
async def test_a_form_that_cannot_be_used_is_a_400(body: dict[str, Any]) -> None:
    """FAULTS 121."""
    started = time.monotonic()
    with pytest.raises(BadRequest):
        await ask(**body)
    assert time.monotonic() - started < 10


async def test_deep_and_recursive_schemas_are_bounded() -> None:
    """FAULTS 121."""
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(100):
        deep = {"type": "object", "properties": {"a": deep}}
    with pytest.raises(BadRequest, match="nested"):
        await ask(guided_json=deep)
    tree = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    assert (await ask(guided_json=tree)).generation.sampling.grammar
    assert (await ask(guided_regex="(a+)+b")).generation.sampling.grammar


async def test_without_a_vocabulary_a_form_is_refused() -> None:
    from serving.api.fields import Fields

    with pytest.raises(BadRequest, match="not offered"):
        await read_form(Fields({"guided_regex": "a"}), None)
    assert await read_form(Fields({}), None) == ""


async def test_fields_that_change_tokens_reach_the_worker() -> None:
    door = front()
    answer = await door.complete(
        "Hello there", allowed_token_ids=[5, 6], bad_words=["bad"], truncate_prompt_tokens=3
    )
    assert answer.status_code == 200, answer.text
    request = door.pools.submissions[0][1].request
    assert request.sampling.allowed_ids == {5, 6}
    encoded = [tuple(TOKENIZER.encode(t, add_special_tokens=False)) for t in ("bad", " bad")]
    assert set(request.sampling.bad_words) == set(encoded)
    assert request.prompt == tuple(TOKENIZER.encode("Hello there"))[-3:]
    for body in (
        {"allowed_token_ids": []},
        {"allowed_token_ids": [10**6]},
        {"bad_words": [""]},
        {"bad_words": "x"},
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": -2},
    ):
        assert (await door.complete("Hello", **body)).status_code == 400, body


async def test_a_final_message_is_continued() -> None:
    door = front()
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, I"}]
    prompts = []
    for body in (
        {"continue_final_message": True, "add_generation_prompt": False},
        {"continue_final_message": True},
        {"add_generation_prompt": False},
        {},
    ):
        answer = await door.http.post("/v1/chat/completions", json={"messages": messages, **body})
        assert answer.status_code == 200, answer.text
        prompts.append(TOKENIZER.decode(door.pools.submissions[-1][1].request.prompt,
                                        skip_special_tokens=False))  # fmt: skip
    assert prompts[0] == prompts[1] and prompts[0].endswith("Well, I")
    assert prompts[2].startswith(prompts[0]) and prompts[3].startswith(prompts[2])
    assert len(prompts[3]) > len(prompts[2])
    both = {"continue_final_message": True, "add_generation_prompt": True}
    answer = await door.http.post("/v1/chat/completions", json={"messages": messages, **both})
    assert answer.status_code == 400


async def test_usage_may_come_with_every_event() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await front().complete("Hi", max_tokens=5, stream=True, stream_options=options)
    usages = [chunk["usage"]["completion_tokens"] for chunk in chunks(answer)]
    assert usages == sorted(usages) and usages[-1] == 5

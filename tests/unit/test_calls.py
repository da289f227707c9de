"""Tool calls are found in an answer however it is cut into pieces, and nothing else is lost."""

import json

import pytest

from serving.calls import HERMES, LLAMA, MISTRAL, CallForm, CallParser, form_of

F = '{"name": "f", "arguments": {"x": "a}\\"{", "y": [1, {"z": 2}]}}'
ARGS = '{"x": "a}\\"{", "y": [1, {"z": 2}]}'
CASES = [  # form, answer, text, calls
    (HERMES, "Hello <b> you.", "Hello <b> you.", []),
    (HERMES, f"<tool_call>\n{F}\n</tool_call>", "", [("f", ARGS)]),
    (HERMES, f"Let me see.\n\n<tool_call>\n{F}\n</tool_call>", "Let me see.", [("f", ARGS)]),
    (
        HERMES,
        f"<tool_call>{F}</tool_call>\n<tool_call>\n{F}\n</tool_call>\n",
        "",
        [("f", ARGS)] * 2,
    ),
    (HERMES, f"<tool_call>[{F}, {F}]</tool_call>", "", [("f", ARGS)] * 2),
    (HERMES, f"<tool_call>\n{F}\n</tool_call> so", " so", [("f", ARGS)]),
    (HERMES, f"<tool_call>{F} and then", "and then", [("f", ARGS)]),
    (
        HERMES,
        '<tool_call>{"arguments": {"x": 1}, "name": "g"}</tool_call>',
        "",
        [("g", '{"x": 1}')],
    ),
    (HERMES, '<tool_call>{"name": "g"}</tool_call>', "", [("g", "{}")]),
    (HERMES, '<tool_call>{"name": "g", "arguments": "{}"}</tool_call>', "", [("g", "{}")]),
    (HERMES, '<tool_call>{"name": "no"}</tool_call>', '<tool_call>{"name": "no"}</tool_call>', []),
    (HERMES, "<tool_call>nothing", "<tool_call>nothing", []),
    (HERMES, "a <tool_ca", "a <tool_ca", []),
    (HERMES, "a <tool_call>\n", "a <tool_call>\n", []),
    (HERMES, '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"x": 1', "", [("f", '{"x": 1')]),
    (HERMES, "<tool_call>{'name': 'f'}</tool_call>", "<tool_call>{'name': 'f'}</tool_call>", []),
    (HERMES, "text \n", "text \n", []),
    (LLAMA, '{"name": "f", "parameters": {"x": 1}}', "", [("f", '{"x": 1}')]),
    (LLAMA, '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
    (LLAMA, 'See: {"name": "f", "parameters": {}}', 'See: {"name": "f", "parameters": {}}', []),
    (LLAMA, '{"answer": 42}', '{"answer": 42}', []),
    (LLAMA, " Hi there", " Hi there", []),
    (MISTRAL, f"[TOOL_CALLS] [{F}, {F}]", "", [("f", ARGS)] * 2),
    (MISTRAL, f"[{F}]", "", [("f", ARGS)]),
    (MISTRAL, "[1, 2] is a list", "[1, 2] is a list", []),
]


def parse(
    form: CallForm, pieces: list[str], max_calls: int = 8
) -> tuple[str, list[tuple[str, str]], int]:
    parser = CallParser(form, {"f", "g"}, max_calls)
    parsed = [*map(parser.feed, pieces), parser.flush()]
    calls: dict[int, tuple[str, str]] = {}
    for delta in (delta for one in parsed for delta in one.calls):
        assert bool(delta.name) == (delta.index not in calls), "the first delta names the call"
        name, arguments = calls.get(delta.index, (delta.name, ""))
        calls[delta.index] = (name, arguments + delta.arguments)
    assert list(calls) == list(range(len(calls)))
    return "".join(one.text for one in parsed), list(calls.values()), parser.num_calls


@pytest.mark.parametrize(("form", "answer", "text", "calls"), CASES)
def test_calls_are_found_however_the_answer_is_cut(
    form: CallForm, answer: str, text: str, calls: list[tuple[str, str]]
) -> None:
    for size in (1, 2, 3, 7, len(answer)):
        pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
        assert parse(form, pieces)[:2] == (text, calls), size


def test_arguments_come_as_the_model_writes_them() -> None:
    parser = CallParser(HERMES, {"f"}, 8)
    parser.feed('<tool_call>\n{"name": "f", "arguments": {"x"')
    assert parser.feed(': "lo').calls[0].arguments == ': "lo'
    assert parser.feed('ng"}').calls[0].arguments == 'ng"}'
    assert parser.feed("}\n</tool_call>").calls == ()


def test_after_the_last_allowed_call_nothing_comes() -> None:
    answer = f"<tool_call>{F}</tool_call>\n<tool_call>{F}</tool_call> and more"
    assert parse(HERMES, [answer], max_calls=1)[:2] == ("", [("f", ARGS)])


def test_a_long_answer_takes_linear_time() -> None:
    arguments = json.dumps({"x": "y" * 200_000})
    answer = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert parse(HERMES, list(answer))[1] == [("f", arguments)]


def test_the_form_follows_the_template() -> None:
    assert form_of("… <tool_call> …") is HERMES
    assert form_of("… [TOOL_CALLS] …") is MISTRAL
    assert form_of('… {"name": …, "parameters": …} …') is LLAMA
    assert form_of("<tool_call>\n<function=name>") is None
    assert form_of("tools | tojson") is None

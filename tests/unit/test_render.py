"""Events of a stream: those made from a form that was rendered once are the ones made in full."""

import json
from dataclasses import replace
from typing import Any

import pytest

from serving.api.intake import Ask, Streaming
from serving.api.render import Stream
from serving.generation import Delta, Generation, TokenLogprobs, TokenText
from workers.core.request import Sampling

TEXTS = ["a", ' "quoted" \\ back', "\n\t\x00\x1f", "\u2028 👩‍👩‍👧 ü", '","text":"', "\ufffd"]
ASKS = {
    "completion": {"is_chat": False},
    "chat": {"is_chat": True},
    "echo": {"is_chat": False, "echo": ("Once",)},
    "prompt logprobs": {"is_chat": False, "prompt_logprobs": True},
    "ids": {"is_chat": True, "return_token_ids": True},
    "usage": {"is_chat": True, "streaming": Streaming(usage=True, continuous_usage=True)},
}


def ask(**about: object) -> Ask:
    generation = Generation("cmpl-1", "cmpl-1~x", ((1, 2),), Sampling(), 0.0, n=2)
    return replace(Ask(generation, is_chat=False, streaming=Streaming()), **about)


def last(events: bytes) -> Any:
    return json.loads(events.split(b"data: ")[-1])


def plain(events: bytes) -> Any:
    """Without what depends on when an event came."""
    event = last(events)
    for choice in event["choices"]:
        choice.pop("prompt_token_ids", None)  # with the first one only
    return {name: event[name] for name in event if name not in ("created", "usage")}


@pytest.mark.parametrize("about", ASKS.values(), ids=ASKS)
def test_an_event_from_a_form_is_the_one_in_full(about: dict[str, object]) -> None:
    stream = Stream(ask(**about), "the model")
    for index in (0, 1):
        stream.events(Delta(index, "first", (7,)))
    for number, text in enumerate(TEXTS):
        delta = Delta(number % 2, text, (8,))
        full = plain(Stream(ask(**about), "the model").events(delta))
        assert plain(stream.events(delta)) == full


def test_a_delta_with_more_than_text_is_rendered_in_full() -> None:
    stream = Stream(ask(is_chat=True), "the model")
    stream.events(Delta(0, "first", (7,)))
    token = TokenText(8, "x", b"x", -0.5)
    told = last(stream.events(Delta(0, "x", (8,), logprobs=(TokenLogprobs(token),))))
    assert told["choices"][0]["logprobs"]["content"][0]["logprob"] == -0.5
    ended = last(stream.events(Delta(0, "y", (9,), finish_reason="stop", stop_reason="y")))
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["choices"][0]["stop_reason"] == "y"


def test_usage_so_far_counts_every_token() -> None:
    stream = Stream(ask(**ASKS["usage"]), "the model")
    counts = [last(stream.events(Delta(0, "x", (i, i))))["usage"] for i in range(3)]
    assert [count["completion_tokens"] for count in counts] == [2, 4, 6]

"""Bodies that nobody would send: each gets an answer in the right envelope, and none is our fault.

EVENFLOW_FUZZ says how many (an afternoon's worth: EVENFLOW_FUZZ=10000).
"""

import json
import os
import random
from typing import Any

import pytest

from tests.fakes import FakePools
from tests.front import front, says
from tests.unit.test_form import GRAMMARS
from tests.unit.test_openai import error_of

NUM_BODIES = int(os.environ.get("EVENFLOW_FUZZ", "600"))
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**70), 1e308, -0.0, 0.5, 1.5),
    *("", "x", "\u0000", "\ud800", "🙂" * 50, "a" * 5000, [], {}, [[]], [None], [{}], {"": None}),
    *({"type": "text"}, [1, "a"], [[1], ["a"]], ["x"] * 300, [5] * 9000, {"a": {"b": {"c": []}}}),
]
FIELDS: dict[str, list[Any]] = {
    "prompt": ["Hi", ["a", "b"], [5, 6], [[5], [6]], "ü 🙂", [10**6]],
    "messages": [
        [{"role": "user", "content": "Hi"}],
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        [{"role": "tool", "content": ""}, {"role": "user", "content": None}],
    ],
    "tokens": [[5, 6], [2**40]],
    "max_tokens": [1, 3], "max_completion_tokens": [2], "min_tokens": [1], "temperature": [0, 1.3],
    "top_p": [0.5, 1], "top_k": [-1, 5], "min_p": [0.1], "seed": [7, -3], "n": [1, 2, 16],
    "best_of": [2], "logprobs": [1, True, 20], "top_logprobs": [3], "echo": [True],
    "stop": ["a", ["b", "c"]], "stop_token_ids": [[5]], "ignore_eos": [True], "stream": [True],
    "stream_options": [{"include_usage": True, "continuous_usage_stats": True}],
    "logit_bias": [{"5": 3, "6": -100}], "allowed_token_ids": [[5, 6]], "bad_words": [["x"]],
    "presence_penalty": [1], "frequency_penalty": [-1], "repetition_penalty": [1.2],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}],
    "guided_json": [{"type": "object"}], "guided_regex": ["[a-z]+", "("],
    "structured_outputs": [{"choice": ["a"]}], "guided_choice": [["a", "b"]],
    "truncate_prompt_tokens": [-1, 2], "continue_final_message": [True],
    "add_generation_prompt": [False], "tools": [[]], "tool_choice": ["none", "auto"],
    "cache_salt": ["s"], "priority": [-5], "suffix": [""], "user": ["u"], "model": ["tiny", "gpt"],
    "evenflow": [{"mode": "mixed", "slo": {"ttft_ms": 5}, "worker": "mixed-0"}, {"mode": 5}],
    "return_token_ids": [True], "chat_template": ["{{ 1 }}"], "add_special_tokens": [False],
}  # fmt: skip


def body(rng: random.Random) -> bytes:
    """Mostly sense, some nonsense; at times not even JSON."""
    names = [*rng.sample(sorted(FIELDS), rng.randint(0, 6)), "prompt", "messages", "tokens"]
    value: Any = {"max_tokens": 3}
    for name in names:
        value[name] = rng.choice(ODD if rng.random() < 0.25 else FIELDS[name])
    if rng.random() < 0.05:
        value = rng.choice(ODD)
    raw = json.dumps(value).encode()
    for _ in range(rng.randint(1, 4) if rng.random() < 0.15 else 0):
        at = rng.randrange(len(raw) + 1)
        raw = raw[:at] + rng.randbytes(rng.randint(0, 3)) + raw[at + rng.randint(0, 4) :]
    return raw


@pytest.mark.parametrize("seed", range(4))
async def test_no_body_is_answered_with_our_fault(seed: int) -> None:
    rng, door = random.Random(seed), front(FakePools(script=says("ok")), grammars=GRAMMARS)
    statuses = set()
    for _ in range(NUM_BODIES // 4):
        raw, path = body(rng), rng.choice(PATHS)
        answer = await door.http.post(path, content=raw)
        statuses.add(answer.status_code)
        assert answer.status_code < 500, (path, raw[:2000], answer.text)
        if answer.status_code >= 400:
            error_of(answer.json())
            assert len(answer.content) < 2000, (path, raw[:2000])
        else:
            assert "error" not in answer.text[:20], (path, raw[:2000], answer.text)
    assert statuses >= {200, 400}
    assert not door.pools.held and not door.gateway.num_calls
    assert (await door.complete("Hi")).status_code == 200

"""A prompt is in no log, metric or error, however its request ends."""

import logging

import pytest

from serving.pools import Submission, WorkerLost
from tests.fakes import FakePools, hashed, worker
from tests.front import Front, front
from workers.core.output import Output

CANARY = "canary-7f3a"
ENDINGS = {
    "fine": hashed(),
    "engine error": lambda *_: Output("", finish_reason="error", error="no memory"),
    "bug": lambda *_: RuntimeError("unexpected"),
    "worker lost": lambda *_: WorkerLost("it died"),
    "nonsense": lambda *_: 10**6,
}
BAD_BODIES = (
    {"prompt": CANARY, "temperature": CANARY},
    {"prompt": CANARY, "stop": [CANARY, 5]},
    {"prompt": CANARY * 100_000},
    {"prompt": [CANARY, {}]},
    {"prompt": CANARY, "logit_bias": {CANARY: 1}},
    {"prompt": CANARY, "evenflow": {"mode": CANARY}},
    {"prompt": "x", "suffix": CANARY},
    {"prompt": {CANARY: CANARY}},
    {"messages": [{"role": "user", "content": [{"type": CANARY, "text": CANARY}]}]},
    {"messages": [{"role": CANARY, "content": 7, CANARY: CANARY}]},
    {"messages": CANARY},
    {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": CANARY}},
    {CANARY: CANARY},
)


async def check_door(door: Front) -> None:
    assert CANARY not in (await door.http.get("/metrics")).text
    assert CANARY not in (await door.http.get("/v1/evenflow/status")).text
    for call in list(door.gateway._store._entries.values()):  # type: ignore[attr-defined]
        assert CANARY not in repr(call)


@pytest.mark.parametrize("ending", ENDINGS)
async def test_no_ending_tells_the_prompt(ending: str, caplog: pytest.LogCaptureFixture) -> None:
    """FAULTS 125."""
    caplog.set_level(logging.INFO)

    def script(name: str, submission: Submission, position: int) -> object:
        return hashed()(name, submission, position) if position < 2 else ENDINGS[ending](
            name, submission, position
        )  # fmt: skip

    door = front(FakePools(worker("mixed-0"), worker("mixed-1"), script=script))  # type: ignore[arg-type]
    for answer in (
        await door.complete(CANARY, max_tokens=4),
        await door.chat(CANARY, max_tokens=4),
        await door.complete(CANARY, max_tokens=4, stream=True),
    ):
        assert CANARY not in answer.text and CANARY not in str(answer.headers)
    await check_door(door)
    assert CANARY not in caplog.text


@pytest.mark.parametrize("body", BAD_BODIES, ids=lambda body: ",".join(body)[:30])
async def test_no_refusal_repeats_what_was_sent(
    body: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    """FAULTS 125."""
    caplog.set_level(logging.INFO)
    door = front()
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        answer = await door.http.post(path, json=body)
        assert answer.status_code == 400 or path == "/tokenize", answer.text
        if answer.status_code != 200:
            assert CANARY not in answer.text
    broken = f'{{"prompt": "{CANARY}", '
    answer = await door.http.post("/v1/completions", content=broken)
    assert answer.status_code == 400 and CANARY not in answer.text
    await check_door(door)
    assert CANARY not in caplog.text

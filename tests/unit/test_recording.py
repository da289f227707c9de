"""A recording tells who asked when for how much, and nothing of what."""

import json
from contextlib import aclosing
from pathlib import Path

import pytest

from bench.sim.workload import load
from serving.errors import Overloaded
from serving.gateway import Gateway
from serving.generation import Generation
from serving.recording import Recorder
from tests.fakes import FakePools, worker
from tests.front import MODEL, TOKENIZER
from workers.core.request import Sampling

PREFIX = tuple(range(10_000_000, 10_000_064))  # found by chance in no clock and no digest


async def ask(gateway: Gateway, id: str, prompt: tuple[int, ...], salt: str = "") -> None:
    generation = Generation(id, id, (prompt,), Sampling(max_tokens=5), 0.0, cache_salt=salt)
    async with aclosing(gateway.generate(generation)) as deltas:
        async for _ in deltas:
            pass


def rows_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_arrivals_lengths_and_shared_prefixes_are_kept_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "day.jsonl"
    gateway = Gateway(FakePools(worker("mixed-0")), TOKENIZER, model=MODEL, recorder=Recorder(path))
    await ask(gateway, "a", (*PREFIX, 7))
    await ask(gateway, "b", (*PREFIX, 8, 9))
    await ask(gateway, "c", (*PREFIX, 7), salt="another tenant")
    first, second, third = rows_of(path)
    assert (first["prompt_tokens"], first["output_tokens"]) == (65, 5)
    assert first["outcome"] == "length" and first["mode"] == "mixed"
    names = [row["blocks"] for row in (first, second, third)]
    assert names[0][0] == names[1][0] != names[2][0] and names[0][1] != names[1][1]  # type: ignore[index]
    workload = load(path)
    prompts = [workload.prompt(arrival) for arrival in workload.arrivals]
    assert [len(prompt) for prompt in prompts] == [65, 66, 65]
    assert prompts[0][:64] == prompts[1][:64] != prompts[2][:64]


async def test_no_token_id_can_be_read_or_looked_up(tmp_path: Path) -> None:
    names = []
    for day in ("one.jsonl", "two.jsonl"):
        recorder = Recorder(tmp_path / day)
        gateway = Gateway(FakePools(worker("mixed-0")), TOKENIZER, model=MODEL, recorder=recorder)
        await ask(gateway, "a", PREFIX)
        text = (tmp_path / day).read_text()
        assert not any(str(token) in text for token in PREFIX)
        names.append(rows_of(tmp_path / day)[0]["blocks"])
    assert names[0] != names[1], "each recording has a key of its own"


async def test_the_refused_are_recorded_as_well(tmp_path: Path) -> None:
    path = tmp_path / "day.jsonl"
    pools = FakePools(worker("mixed-0"))
    gateway = Gateway(pools, TOKENIZER, model=MODEL, max_queue=-1, recorder=Recorder(path))
    with pytest.raises(Overloaded):
        await ask(gateway, "a", PREFIX)
    assert [row["outcome"] for row in rows_of(path)] == ["refused"]


async def test_a_recording_that_cannot_go_on_ends_alone(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "day.jsonl")
    gateway = Gateway(FakePools(worker("mixed-0")), TOKENIZER, model=MODEL, recorder=recorder)
    recorder.close()
    await ask(gateway, "a", PREFIX)

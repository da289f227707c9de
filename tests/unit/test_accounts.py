"""Every call is accounted for at every look at the metrics, whatever becomes of it."""

import asyncio
import os
import random

from serving.pools import Submission, WorkerLost
from tests.fakes import Event, FakePools, hashed, worker
from tests.front import Front, front

NUM_CALLS = int(os.environ.get("EVENFLOW_FATES", "400"))  # 10000 for the whole lot
ENDS = ("calls_completed_total", "requests_aborted_total", "request_failures_total")


def chaos(name: str, submission: Submission, position: int) -> Event:
    """Workers that answer, fail, are lost or send nonsense: each request's seed says which."""
    fate = submission.request.sampling.seed % 10
    if position == 3 and fate == 0:
        return RuntimeError("a bug")
    if position == 3 and fate == 1 and not submission.output:
        return WorkerLost("it died")
    if position == 2 and fate == 2:
        return 10**6  # no token of this vocabulary
    return hashed()(name, submission, position)


async def figures(door: Front) -> dict[str, float]:
    """Sums over all labels."""
    found: dict[str, float] = {}
    for line in (await door.http.get("/metrics")).text.splitlines():
        name = line.split("{")[0]
        if name[0] != "#":
            found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


def unaccounted(found: dict[str, float]) -> float:
    ended = sum(found.get(f"evenflow_{name}", 0.0) for name in ENDS)
    return found["evenflow_calls_started_total"] - ended - found["evenflow_calls_running"]


async def one_call(door: Front, i: int, rng: random.Random) -> int:
    """The tokens that it was told of; 0 when it was told of none in the end."""
    body = {"seed": i, "max_tokens": rng.randint(1, 12), "n": rng.choice([1, 1, 1, 2])}
    body["evenflow"] = {"mode": rng.choice(["auto", "mixed", "disaggregated"])}
    headers = {"x-request-id": f"r{i}"}
    post = door.http.post("/v1/completions", json={"prompt": "Hi", **body}, headers=headers)
    task = asyncio.create_task(post)
    fate = rng.random()
    if fate < 0.15:
        await asyncio.sleep(rng.random() * 0.01)
        door.gateway.abort(f"r{i}")
    elif fate < 0.3:
        await asyncio.sleep(rng.random() * 0.01)
        task.cancel()
    try:
        answer = await task
    except asyncio.CancelledError:
        return 0
    return answer.json()["usage"]["completion_tokens"] if answer.status_code == 200 else 0


async def test_calls_add_up_at_every_scrape() -> None:
    pools = FakePools(worker("prefill-0"), worker("decode-0"), script=chaos, delay_s=0.0005)
    door, rng = front(pools, max_queue=40), random.Random(5)
    left: list[float] = []

    async def scrape() -> None:
        while True:
            left.append(unaccounted(await figures(door)))
            await asyncio.sleep(0.003)

    scraper = asyncio.create_task(scrape())
    told = 0
    for start in range(0, NUM_CALLS, 50):
        calls = (one_call(door, i, rng) for i in range(start, min(start + 50, NUM_CALLS)))
        told += sum(await asyncio.gather(*calls))
    scraper.cancel()
    found = await figures(door)
    assert len(left) > 5 and set(left) == {0.0} and unaccounted(found) == 0.0
    assert found["evenflow_calls_started_total"] == NUM_CALLS
    assert found["evenflow_calls_running"] == 0.0
    assert all(found[f"evenflow_{name}"] > 0 for name in ENDS)
    tokens = found["vllm:generation_tokens_total"]
    assert told <= tokens, "whoever left or failed was told of some, too"
    firsts = found["vllm:time_to_first_token_seconds_count"]
    assert firsts + found["vllm:inter_token_latency_seconds_count"] == tokens
    assert not pools.held and door.gateway.num_calls == 0


async def test_tokens_told_are_tokens_counted() -> None:
    door = front(FakePools(worker("prefill-0"), worker("decode-0")))
    rng, told = random.Random(6), 0
    for i in range(60):
        body = {"seed": i, "max_tokens": rng.randint(1, 9), "n": rng.choice([1, 3])}
        told += (await door.complete(**body)).json()["usage"]["completion_tokens"]
    found = await figures(door)
    assert found["vllm:generation_tokens_total"] == told
    assert found["evenflow_calls_completed_total"] == 60

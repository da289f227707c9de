"""What the overload benchmark makes of what it saw."""

import httpx

from bench.overload import ANSWER, Offered, Watched
from bench.report import Record


async def test_refusals_failures_and_good_answers_are_told_apart() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        match len(seen):
            case 1:
                return httpx.Response(429, headers={"retry-after": "1"})
            case 2:
                return httpx.Response(429)
            case 3:
                event = 'data: {"choices":[{"token_ids":[7]}]}\n\n'
                return httpx.Response(200, text=event * ANSWER + "data: [DONE]\n\n")
        return httpx.Response(200, text='data: {"error":{"message":"broken"}}\n\n')

    seen: list[httpx.Request] = []
    offered = Offered()
    async with httpx.AsyncClient(
        transport=httpx.MockTransport(answer), base_url="http://x"
    ) as client:
        for seed in range(4):
            await offered.send(client, Record("r", 0.0), seed)
    assert len(offered.refusals_s) == 2 and offered.num_silent == 1
    assert [record.error for record in offered.records] == [None, "broken"]


def test_a_process_that_grows_is_seen_through_noise() -> None:
    streams = list(range(0, 5001, 250))
    noise = [3.0 if i % 2 else -3.0 for i in range(len(streams))]
    for slope in (0.0, 0.5):
        kib = [1000.0 + slope * at + noise[i] for i, at in enumerate(streams)]
        row = Watched("worker", streams, kib, [9] * len(streams)).row()
        assert abs(float(str(row["kib_per_request"])) - slope) < 0.01
        assert float(str(row["upper_95"])) < slope + 0.05

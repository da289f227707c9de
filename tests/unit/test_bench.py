"""The benchmarks' own promises: no gap is lost, no error hidden, no figure flattered."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest

from bench import client, loads, peer_tables, report, server, workloads
from bench.client import LLAMA, OPENAI, Dialect, text_dialect
from bench.peer_servers import Setting
from bench.peer_tables import Column
from bench.report import Record, Slo
from bench.workloads import Ask

Events = Callable[[dict[str, object]], AsyncIterator[dict[str, object]]]


def record(*times: float, sent_at: float = 0.0, num_prompt_tokens: int = 10) -> Record:
    return Record("r", sent_at, list(times), num_prompt_tokens=num_prompt_tokens)


# ---------------------------------------------------------------------------- the client


class Lines(httpx.AsyncByteStream):
    def __init__(self, events: AsyncIterator[dict[str, object]]) -> None:
        self.events = events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for event in self.events:
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"


def serve(events: Events) -> httpx.AsyncClient:
    """A client of a server that answers each request with these events."""

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=Lines(events(json.loads(request.content))))

    return httpx.AsyncClient(base_url="http://test", transport=httpx.MockTransport(answer))


async def openai(body: dict[str, object]) -> AsyncIterator[dict[str, object]]:
    yield {"choices": [{"text": "", "token_ids": [5]}]}  # no text yet, and a token all the same
    yield {"choices": [{"text": "abc", "token_ids": [6, 7]}]}
    yield {"choices": [{"text": "", "token_ids": None}], "usage": {}}


async def llama(body: dict[str, object]) -> AsyncIterator[dict[str, object]]:
    yield {"content": "a", "timings": {"predicted_n": 1}}
    yield {"content": "bc", "timings": {"predicted_n": 3}}  # the text of a token had to wait
    yield {"content": "", "stop": True, "timings": {"predicted_n": 3}}


async def transformers(body: dict[str, object]) -> AsyncIterator[dict[str, object]]:
    assert body["prompt"] == " one two one two"
    yield {"choices": [{"text": "a"}]}
    yield {"choices": [{"text": " b"}]}  # and a token whose text has to wait
    yield {"choices": [{"text": ""}], "usage": {"completion_tokens": 3}}


async def endless(body: dict[str, object]) -> AsyncIterator[dict[str, object]]:
    while True:
        yield {"choices": [{"token_ids": [1]}]}
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("dialect", "events"),
    [(OPENAI, openai), (LLAMA, llama), (text_dialect([" one", " two"]), transformers)],
)
async def test_every_token_is_counted_once(
    dialect: Dialect, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "prompt_of", lambda num_tokens, seed: list(range(num_tokens)))
    (seen,) = await client.play(serve(events), [Ask("a", 0.0, 4, 3, 1)], dialect=dialect)
    assert seen.error is None
    assert len(seen.token_times) == 3
    assert len(seen.gaps_s) == 2


async def test_a_short_answer_is_an_error() -> None:
    seen = await client.stream(serve(openai), "a", [1, 2], 5)
    assert seen.error == "3 tokens instead of 5"


async def test_an_error_in_the_stream_is_an_error() -> None:
    async def broken(body: dict[str, object]) -> AsyncIterator[dict[str, object]]:
        yield {"choices": [{"token_ids": [5]}]}
        yield {"error": {"message": "the worker is gone"}}

    seen = await client.stream(serve(broken), "a", [1, 2], 1)
    assert seen.error == "the worker is gone"


async def test_a_refusal_is_an_error() -> None:
    refuse = httpx.MockTransport(lambda request: httpx.Response(503, text="busy"))
    async with httpx.AsyncClient(base_url="http://test", transport=refuse) as http:
        seen = await client.stream(http, "a", [1], 1)
    assert seen.error is not None and "503" in seen.error and "busy" in seen.error


async def test_a_client_that_leaves_is_no_error() -> None:
    ask = Ask("stream", 0.0, 4, 10**6, 1, until_s=0.02)
    (seen,) = await client.play(serve(endless), [ask])
    assert seen.error is None and seen.token_times


async def test_what_comes_too_late_is_counted_as_missed() -> None:
    asks = [Ask("late", 0.0, 4, 10**6, 1), Ask("good", 0.0, 4, 3, 2)]

    async def events(body: dict[str, object]) -> AsyncIterator[dict[str, object]]:
        async for event in endless(body) if body["max_tokens"] != 3 else openai(body):
            yield event

    late, good = await client.play(serve(events), asks, patience_s=0.2)
    assert late.error is not None and "not finished" in late.error
    assert good.error is None
    assert loads.slo_of(late).is_met_by(late) is False


async def test_an_open_loop_counts_from_when_a_request_was_due() -> None:
    asks = [Ask("a", 0.0, 4, 3, 1), Ask("b", 0.05, 4, 3, 2)]
    first, second = await client.play(serve(openai), asks)
    assert second.sent_at - first.sent_at == pytest.approx(0.05)
    assert second.ttft_s >= 0


async def test_a_failed_request_leaves_no_figure() -> None:
    target = loads.Target(serve(openai), OPENAI)
    with pytest.raises(
        loads.LoadFailed, match=r"1 of 1 requests failed: .*3 tokens instead of 128"
    ):
        await loads.single(target, loads.Sizes())


async def test_tokens_held_back_do_not_look_fast() -> None:
    async def held_back(body: dict[str, object]) -> AsyncIterator[dict[str, object]]:
        await asyncio.sleep(0.2)
        yield {"choices": [{"token_ids": [1] * 128}]}

    samples = await loads.single(loads.Target(serve(held_back), OPENAI), loads.Sizes(repeat=1))
    assert samples["decode_tok_s"][0] < 128 / 0.2


# ---------------------------------------------------------------------------- figures


def test_one_late_token_among_a_hundred_breaks_no_promise_but_two_do() -> None:
    slo = Slo(ttft_s=1.0, gap_s=0.15)
    steady = [0.5 + 0.1 * i for i in range(101)]
    one_late = [*steady[:50], *(t + 1 for t in steady[50:])]
    two_late = [*one_late[:70], *(t + 1 for t in one_late[70:])]
    assert slo.is_met_by(record(*steady))
    assert slo.is_met_by(record(*one_late))
    assert not slo.is_met_by(record(*two_late))
    assert not slo.is_met_by(record(1.1))
    assert not slo.is_met_by(record())


def test_goodput_is_met_requests_per_second_of_arrivals() -> None:
    records = [record(0.5), record(3.0), record(3.0, num_prompt_tokens=2000)]
    assert report.goodput(records, loads.slo_of, window_s=2.0) == 1.0


def test_a_gap_counts_whole_in_every_window_it_touches() -> None:
    seen = [record(0.0, 1.0, 6.0, 6.5)]
    assert report.gaps_within(seen, 2.0, 3.0) == [5.0]
    assert report.gaps_within(seen, 0.0, 7.0) == [1.0, 5.0, 0.5]
    assert report.tokens_per_s(seen, 5.0, 7.0) == 1.0


def test_a_summary_shows_the_spread() -> None:
    assert report.summary([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0, "num": 3}


# ---------------------------------------------------------------------------- workloads


def test_the_same_seed_asks_the_same() -> None:
    assert workloads.poisson_mix(1.0, 60, 3) == workloads.poisson_mix(1.0, 60, 3)
    assert workloads.poisson_mix(1.0, 60, 3) != workloads.poisson_mix(1.0, 60, 4)
    assert workloads.prompt_of(50, 1) == workloads.prompt_of(50, 1) != workloads.prompt_of(50, 2)


def test_the_mix_is_four_short_to_one_long_at_the_rate_asked() -> None:
    asks = workloads.poisson_mix(2.0, 1000, 0)
    assert len(asks) == pytest.approx(2000, rel=0.1)
    assert {(a.num_prompt_tokens, a.max_tokens) for a in asks} == {(128, 64), (2000, 32)}
    assert sum(a.name == "long" for a in asks) / len(asks) == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "azure.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2023-11-16 18:15:46.6805900,374,44\n"
            "2023-11-16 18:15:48.6805900,9000,10\n"
            "2023-11-16 18:15:50.6805900,396,109\n",
        ),
        (
            "mooncake.jsonl",
            '{"timestamp": 0, "input_length": 374, "output_length": 44, "hash_ids": []}\n'
            '{"timestamp": 2000, "input_length": 9000, "output_length": 10, "hash_ids": []}\n'
            '{"timestamp": 4000, "input_length": 396, "output_length": 109, "hash_ids": []}\n',
        ),
        (
            "lengths.csv",
            "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n"
            "374,44,418,1\n9000,10,9010,1\n396,109,505,1\n",
        ),
    ],
)
def test_a_trace_keeps_its_lengths_and_says_what_it_skips(
    tmp_path: Path, name: str, lines: str
) -> None:
    path = tmp_path / name
    path.write_text(lines)
    trace = workloads.read_trace(path, 10, rate=0.5, max_total_tokens=6000)
    assert [(a.num_prompt_tokens, a.max_tokens) for a in trace.asks] == [(374, 44), (396, 109)]
    assert trace.num_skipped == 1
    assert [a.at_s for a in trace.asks] == [0.0, pytest.approx(4.0)]  # two at half a one a second


def test_a_trace_that_fits_nowhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n9000,10\n")
    with pytest.raises(ValueError, match="no request fits 6000"):
        workloads.read_trace(path, 10, 1.0, 6000)


# ---------------------------------------------------------------------------- the tables


def column(name: str, **medians: float) -> Column:
    figures = {key: report.summary([value]) for key, value in medians.items()}
    return Column(name, name.partition(" ")[0], figures, {})


def test_better_is_above_one_whatever_the_unit() -> None:
    ours, theirs = report.summary([4.0]), report.summary([2.0])
    assert peer_tables.ratio("decode_tok_s", ours, theirs) == 2.0
    assert peer_tables.ratio("longest_gap_s", ours, theirs) == 0.5
    assert peer_tables.ratio("goodput_at_0.9", ours, report.summary([0.0])) == float("inf")


def test_the_last_column_is_the_best_peer_and_not_the_worst() -> None:
    columns = [
        column("evenflow 64", decode_tok_s=100.0),
        column("vllm 512", decode_tok_s=40.0),
        column("llama 2048", decode_tok_s=80.0),
    ]
    line = next(x for x in peer_tables.tables(columns).splitlines() if "(evenflow 64)" in x)
    assert line.endswith("| 2.50 | 1.25 | 1.25 |")


def test_goodput_is_compared_where_the_best_peer_is_best() -> None:
    columns = [
        column("evenflow 64", **{"goodput_at_0.6": 0.6, "goodput_at_0.9": 0.9}),
        column("vllm 512", **{"goodput_at_0.6": 0.5, "goodput_at_0.9": 0.2}),
        column("llama 2048", **{"goodput_at_0.6": 0.1, "goodput_at_0.9": 0.3}),
    ]
    verdict = peer_tables.goodput_verdict(columns)
    assert "peaks at 0.6 requests/s" in verdict and "vllm 512" in verdict
    assert "evenflow 64 0.6/s (1.20 times)" in verdict


def test_a_load_that_failed_says_why_in_the_report() -> None:
    failed = Column("vllm 512", "vllm", {}, {"single": "1 of 1 requests failed: HTTP 500"})
    text = peer_tables.tables([column("evenflow 64", decode_tok_s=1.0), failed])
    assert "| failed |" in text and "vllm 512, single: failed. 1 of 1" in text


@pytest.mark.parametrize("text", ["vllm", "vllm:", "vllm:a", "tgi:512", "llama:512+64", "vllm:1+b"])
def test_a_setting_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not evenflow:N"):
        Setting.parse(text)


def test_settings_read_as_they_are_shown() -> None:
    assert Setting.parse("vllm:256+64") == Setting("vllm", 256, 64)
    assert Setting.parse("vllm:256+64").name == "vllm 256+64"
    assert Setting.parse("llama:2048").dialect is LLAMA
    assert Setting.parse("evenflow:online").name == "evenflow online"


# ---------------------------------------------------------------------------- servers


def test_a_server_is_measured_and_ends_with_all_it_started() -> None:
    port = server.free_port()
    child = f"{sys.executable} -c 'import time; time.sleep(60)' &"
    command = ["sh", "-c", f"{child} exec {sys.executable} -m http.server {port}"]
    with server.running(command, port, "/", env={"PYTHONUNBUFFERED": "1"}) as running:
        assert len(running.processes()) == 2
        assert running.start_up_s > 0 and running.memory_bytes() > 1 << 20
    assert running.processes() == []


@pytest.mark.parametrize("lost", ["mark", "session"])
def test_a_process_that_hides_is_found(lost: str) -> None:
    """vLLM writes its title over its environment, Ray gives its processes sessions."""
    port = server.free_port()
    hide = {"mark": f"env -u {server.MARK}", "session": "setsid"}[lost]
    command = ["sh", "-c", f"{hide} sleep 60 & exec {sys.executable} -m http.server {port}"]
    with server.running(command, port, "/") as running:
        assert len(running.processes()) == 2
    assert running.processes() == []


def test_a_server_that_does_not_come_up_shows_its_log() -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with pytest.raises(server.StartError, match="no such model"):  # noqa: SIM117
        with server.running(command, server.free_port(), "/"):
            pass

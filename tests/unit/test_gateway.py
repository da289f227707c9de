"""A call on scripted workers: every token once, every worker let go, whatever happens."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from kvtransfer.core.handle import KVHandle
from serving.errors import (
    Aborted,
    BadRequest,
    Internal,
    NoCapacity,
    NotFound,
    Overloaded,
    PromptTooLong,
    Unavailable,
)
from serving.gateway import Gateway
from serving.generation import Delta, Generation
from serving.pools import Submission, WorkerLost
from tests.fakes import LAYOUT, Event, FakePools, Script, hashed, scripted, worker
from tests.front import MODEL, TOKENIZER
from workers.core.output import Output, Token
from workers.core.pace import Pace
from workers.core.request import Request, Sampling

SPLIT = (worker("prefill-0"), worker("decode-0"))


def gateway(pools: FakePools, **settings: Any) -> Gateway:
    return Gateway(pools, TOKENIZER, model=MODEL, **settings)


def generation(
    id: str = "r", max_tokens: int = 8, n: int = 1, mode: str = "auto", **more: Any
) -> Generation:
    sampling = Sampling(max_tokens=max_tokens, **more.pop("sampling", {}))
    prompts = more.pop("prompts", ((5, 6, 7),))
    return Generation(id, id, prompts, sampling, 0.0, n=n, mode=mode, **more)


async def collect(front: Gateway, call: Generation) -> list[Delta]:
    async with aclosing(front.generate(call)) as deltas:
        return [delta async for delta in deltas]


def ids(deltas: Sequence[Delta], index: int = 0) -> list[int]:
    return [token for delta in deltas if delta.index == index for token in delta.token_ids]


def expected(count: int, prompt: tuple[int, ...] = (5, 6, 7), seed: int = 0) -> list[int]:
    """What the FAKE model says."""
    submission = Submission(Request("x", prompt, Sampling(seed=seed)))
    return [hashed()("", submission, position) for position in range(count)]  # type: ignore[misc]


def failing(at: int, event: Event, on: str = "") -> Script:
    """The FAKE model, but ``event`` at one position (on one worker)."""
    normal = hashed()

    def script(worker_id: str, submission: Submission, position: int) -> Event:
        is_here = position == at and (not on or worker_id == on)
        return event if is_here else normal(worker_id, submission, position)

    return script


# ---------------------------------------------------------------------------- both modes


@pytest.mark.parametrize("mode", ["mixed", "disaggregated"])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 16, 17])
async def test_exactly_max_tokens_in_both_modes(mode: str, max_tokens: int) -> None:
    """FAULTS 19."""
    pools = FakePools(*SPLIT)
    deltas = await collect(gateway(pools), generation(max_tokens=max_tokens, mode=mode))
    final = deltas[-1].final
    assert ids(deltas) == expected(max_tokens)
    assert deltas[-1].finish_reason == "length"
    assert final is not None and final.usage.completion_tokens == max_tokens
    assert pools.held == set()
    if mode == "disaggregated":
        assert len(pools.submitted("decode-0")) == (max_tokens > 1)


async def test_the_decode_worker_gets_the_handle_and_what_was_delivered() -> None:
    pools = FakePools(*SPLIT)
    deltas = await collect(gateway(pools), generation(mode="disaggregated"))
    (first,), (second,) = pools.submitted("prefill-0"), pools.submitted("decode-0")
    assert first.hand_off and first.handle is None and first.output == ()
    assert not second.hand_off and second.output == tuple(ids(deltas)[:1])
    assert second.handle is not None and second.handle.source == "prefill-0"
    final = deltas[-1].final
    assert final is not None
    trace = final.trace
    assert trace.workers == ["prefill-0", "decode-0"]
    assert (trace.queue_s, trace.prefill_s, trace.transfer_s) == (0.625, 1.0, 0.25)


async def test_a_stop_id_as_first_token_needs_no_decode_worker() -> None:
    """FAULTS 19."""
    pools = FakePools(*SPLIT, script=scripted([2]))
    call = generation(mode="disaggregated", sampling={"stop_ids": frozenset({2})})
    deltas = await collect(gateway(pools), call)
    assert [(d.text, d.finish_reason, d.stop_reason) for d in deltas] == [("", "stop", None)]
    final = deltas[-1].final
    assert final is not None and final.trace.decode_worker == "prefill-0"
    assert pools.submitted("decode-0") == [] and pools.held == set()


async def test_a_stop_token_id_is_told_and_an_end_token_is_not() -> None:
    pools = FakePools(script=scripted([40, 41]))
    stop_ids = frozenset({41})
    call = generation(sampling={"stop_ids": stop_ids}, stop_token_ids=stop_ids)
    last = (await collect(gateway(pools), call))[-1]
    assert (last.finish_reason, last.stop_reason, last.token_ids) == ("stop", 41, (41,))


async def test_a_worker_that_leaves_hands_its_streams_over() -> None:
    """A hand-off nobody asked for: a draining worker's."""
    leaving = FakePools(worker("mixed-0"), worker("mixed-1", decode_seqs=3))
    handed = leaving._output  # a real handle, at position 3 on mixed-0

    def script(worker_id: str, submission: Submission, position: int) -> Event:
        event = hashed()(worker_id, submission, position)
        if worker_id != "mixed-0" or position != 3:
            return event
        asked = Submission(submission.request, submission.output, True)
        return handed("mixed-0", asked, [0] * position, event)  # type: ignore[arg-type]

    leaving.script = script
    deltas = await collect(gateway(leaving), generation())
    assert ids(deltas) == expected(8)
    assert leaving.submitted("mixed-1")[0].handle is not None
    assert leaving.held == set()


# ---------------------------------------------------------------------------- workers fail


@pytest.mark.parametrize(("lost", "at"), [("prefill-0", 0), ("decode-0", 1), ("decode-0", 5)])
async def test_a_lost_worker_costs_no_token_and_none_comes_twice(lost: str, at: int) -> None:
    pools = FakePools(*SPLIT, worker("mixed-0"), script=failing(at, WorkerLost("gone"), on=lost))
    deltas = await collect(gateway(pools), generation(mode="disaggregated"))
    assert ids(deltas) == expected(8)
    final = deltas[-1].final
    assert final is not None
    assert final.trace.fallback == f"{lost} was lost after {at} tokens; replayed"
    assert pools.submissions[-1][1].output or at == 0
    assert pools.held == set()


async def test_a_stream_outlives_the_mode_that_it_asked_for() -> None:
    """With one worker left there is no disaggregated mode; there is still the stream."""
    pools = FakePools(*SPLIT, script=failing(5, WorkerLost("gone"), on="decode-0"))
    deltas = await collect(gateway(pools), generation(mode="disaggregated"))
    final = deltas[-1].final
    assert ids(deltas) == expected(8)
    assert final and (final.trace.mode, final.trace.decode_worker) == ("mixed", "prefill-0")
    assert final.trace.fallback == "decode-0 was lost after 5 tokens; replayed"


async def test_a_worker_lost_in_mixed_mode_is_replayed_on_another() -> None:
    script = failing(4, WorkerLost("gone"), on="mixed-0")
    pools = FakePools(worker("mixed-0"), worker("mixed-1", decode_seqs=1), script=script)
    front = gateway(pools)
    deltas = await collect(front, generation())
    assert ids(deltas) == expected(8)
    assert pools.submitted("mixed-1")[0].output == tuple(expected(4))
    assert b'evenflow_fallbacks_total{cause="worker lost",model_name="tiny"} 1.0' in (
        front.metrics.render()
    )


async def test_workers_lost_one_after_another_end_in_unavailable() -> None:
    pools = FakePools(
        *(worker(f"mixed-{i}") for i in range(5)), script=failing(2, WorkerLost("gone"))
    )
    with pytest.raises(Unavailable, match="3 workers were lost"):
        await collect(gateway(pools), generation())
    assert len(pools.submissions) == 3 and pools.held == set()


async def test_recomputed_pages_are_told_and_counted() -> None:
    told = Output("", Token(99), "length", fallback="TransferError: timed out")
    pools = FakePools(*SPLIT, script=failing(1, told, on="decode-0"))
    front = gateway(pools)
    final = (await collect(front, generation(mode="disaggregated")))[-1].final
    assert final is not None and final.trace.fallback == "TransferError: timed out"
    assert b'evenflow_fallbacks_total{cause="transfer"' in front.metrics.render()
    explanation = await front.explain("r")
    assert explanation is not None and explanation["fallback"] == "TransferError: timed out"


@pytest.mark.parametrize(
    "event",
    [
        60000,
        -1,
        RuntimeError("the worker's stream broke in a new way"),
        Output("", finish_reason="error", error="the model step failed"),
    ],
)
async def test_what_breaks_one_stream_breaks_no_other(event: Event) -> None:
    """FAULTS 15."""
    normal = hashed()

    def script(worker_id: str, submission: Submission, position: int) -> Event:
        if submission.request.id == "bad" and position == 3:
            return event
        return normal(worker_id, submission, position)

    pools = FakePools(script=script)
    front = gateway(pools)
    good = [collect(front, generation(f"good-{i}", prompts=((i,),))) for i in range(5)]
    bad = collect(front, generation("bad"))
    *healthy, failed = await asyncio.gather(*good, bad, return_exceptions=True)
    assert isinstance(failed, Internal)
    for i, deltas in enumerate(healthy):
        assert not isinstance(deltas, BaseException)
        assert ids(deltas) == expected(8, prompt=(i,))
    assert pools.held == set() and front.is_ready


async def test_a_detokenizer_that_fails_ends_its_own_stream_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FAULTS 15."""

    class Broken:
        def feed(self, token_id: int) -> str:
            raise ValueError("invalid prefix")

        def flush(self) -> str:
            return ""

    pools = FakePools(delay_s=0.001)
    front = gateway(pools)
    good = asyncio.create_task(collect(front, generation("good", max_tokens=30)))
    await asyncio.sleep(0.01)
    monkeypatch.setattr(TOKENIZER, "detokenizer", Broken)
    with pytest.raises(Internal):
        await collect(front, generation("bad"))
    monkeypatch.undo()
    assert ids(await good) == expected(30)
    assert pools.held == set()


# ---------------------------------------------------------------------------- ends early


async def test_a_client_that_leaves_frees_every_worker() -> None:
    for count in range(1, 4):
        pools = FakePools(*SPLIT)
        front = gateway(pools)
        async with aclosing(front.generate(generation(mode="disaggregated"))) as deltas:
            for _ in range(count):
                await anext(deltas)
        assert pools.held == set() and front.num_calls == 0
        assert await front.explain("r") is not None


async def test_cancelling_the_consumer_at_any_time_frees_every_worker() -> None:
    for wait_s in (0.0, 0.001, 0.003, 0.006):
        pools = FakePools(*SPLIT, delay_s=0.001)
        front = gateway(pools)
        task = asyncio.create_task(collect(front, generation(mode="disaggregated", n=3)))
        await asyncio.sleep(wait_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pools.held == set() and front.num_calls == 0


async def test_abort_by_id_ends_the_stream_and_is_idempotent() -> None:
    pools = FakePools(delay_s=0.001)
    front = gateway(pools)
    task = asyncio.create_task(collect(front, generation(max_tokens=1000)))
    await asyncio.sleep(0.02)
    assert front.abort("r")
    with pytest.raises(Aborted):
        await task
    assert pools.held == set()
    assert not front.abort("r") and not front.abort("never was")
    explanation = await front.explain("r")
    assert explanation is not None and explanation["outcome"] == "aborted"


async def test_a_stop_string_stops_the_worker_too() -> None:
    """FAULTS 11."""
    pools = FakePools(script=scripted(TOKENIZER.encode("one two three four")))
    deltas = await collect(gateway(pools), generation(max_tokens=1000, stop=("wo th",)))
    assert "".join(d.text for d in deltas) == "one t"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "wo th")
    assert pools.held == set() and pools.num_tokens < 30
    assert [worker_id for worker_id, _ in pools.aborts] == ["mixed-0"]


# ---------------------------------------------------------------------------- n and many


async def test_n_answers_have_their_own_text_seed_and_end() -> None:
    """FAULTS 17."""
    pools = FakePools()
    deltas = await collect(gateway(pools), generation(n=3, max_tokens=40))
    for index in range(3):
        assert ids(deltas, index) == expected(40, seed=index)
        own = [d for d in deltas if d.index == index]
        assert [d.finish_reason for d in own].count("length") == 1
        assert own[-1].finish_reason == "length"
    assert [d.final is not None for d in deltas].count(True) == 1
    final = deltas[-1].final
    assert final is not None
    assert (final.usage.prompt_tokens, final.usage.completion_tokens) == (3, 120)
    assert sorted(s.request.id for _, s in pools.submissions) == ["r-0", "r-1", "r-2"]


async def test_aborting_n_answers_leaves_no_child() -> None:
    """FAULTS 17, 50 times."""
    for _ in range(50):
        pools = FakePools(*SPLIT)
        front = gateway(pools)
        call = generation(n=3, max_tokens=40, mode="disaggregated")
        async with aclosing(front.generate(call)) as deltas:
            await anext(deltas)
            await anext(deltas)
        assert pools.held == set() and front.num_calls == 0
        sampled = pools.num_tokens
        await asyncio.sleep(0)
        assert pools.num_tokens == sampled


async def test_several_prompts_are_one_call() -> None:
    deltas = await collect(
        gateway(FakePools()), generation(prompts=((1,), (2, 3)), n=2, max_tokens=4)
    )
    assert [ids(deltas, i) for i in range(4)] == [
        expected(4, (1,), 0),
        expected(4, (1,), 1),
        expected(4, (2, 3), 0),
        expected(4, (2, 3), 1),
    ]


async def test_a_burst_spreads_before_any_load_report() -> None:
    pools = FakePools(worker("mixed-0"), worker("mixed-1"), delay_s=0.01)
    front = gateway(pools)
    await asyncio.gather(*(collect(front, generation(f"r{i}", 2)) for i in range(10)))
    counts = len(pools.submitted("mixed-0")), len(pools.submitted("mixed-1"))
    assert sum(counts) == 10 and min(counts) >= 3


# ---------------------------------------------------------------------------- refusals


async def test_refused_before_any_work() -> None:
    with pytest.raises(Unavailable, match="no worker that takes requests"):
        pools = FakePools()
        pools.lose("mixed-0")
        await collect(gateway(pools), generation())
    with pytest.raises(NoCapacity, match="needs two workers"):
        await collect(gateway(FakePools()), generation(mode="disaggregated"))
    with pytest.raises(Overloaded, match="2 sequences are waiting") as raised:
        busy = FakePools(worker("mixed-0", waiting_seqs=2))
        await collect(gateway(busy, max_queue=2), generation())
    assert raised.value.retry_after_s >= 1
    assert busy.submissions == []


async def test_a_prompt_that_only_fits_other_workers_is_too_long() -> None:
    """FAULTS 27, in disaggregated mode: both pools."""
    pools = FakePools(worker("prefill-0", num_pages=64), worker("mixed-0", num_pages=256))
    call = generation(prompts=(tuple([1] * 1500),), mode="disaggregated")
    with pytest.raises(PromptTooLong, match="1500 tokens"):
        await collect(gateway(pools), call)
    assert pools.submissions == []


async def test_a_burst_beyond_the_queue_is_refused_at_once() -> None:
    pools = FakePools(delay_s=0.005)
    front = gateway(pools, max_queue=4)
    calls = [collect(front, generation(f"r{i}", 2)) for i in range(10)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(r, Overloaded) for r in results) == 6
    assert sum(isinstance(r, list) for r in results) == 4


async def test_an_id_is_free_again_when_its_call_is_over() -> None:
    front = gateway(FakePools(delay_s=0.001))
    task = asyncio.create_task(collect(front, generation()))
    await asyncio.sleep(0)
    with pytest.raises(BadRequest, match="'r' is running"):
        await collect(front, generation())
    await task
    assert await collect(front, generation())


async def test_draining_refuses_new_calls_and_lets_running_ones_end() -> None:
    front = gateway(FakePools(delay_s=0.001))
    task = asyncio.create_task(collect(front, generation(max_tokens=20)))
    await asyncio.sleep(0.005)
    assert not await front.drain(0.001)
    assert not front.is_ready
    with pytest.raises(Unavailable, match="shutting down"):
        await collect(front, generation("other"))
    assert await front.drain(5.0)
    assert await front.drain(0.0)
    assert ids(await task) == expected(20)


# ------------------------------------------------------------------------------------ moving

DECODERS = (worker("decode-0"), worker("decode-1"))


async def moved_after(front: Gateway, call: Generation, action: Any) -> list[Delta]:
    """The deltas of a call; ``action`` is run after its second one."""
    deltas: list[Delta] = []
    async with aclosing(front.generate(call)) as stream:
        async for delta in stream:
            deltas.append(delta)
            if len(deltas) == 2:
                await action()
    return deltas


async def test_a_drained_worker_s_stream_goes_on_elsewhere_with_its_pages() -> None:
    """FAULTS 83: nothing new there, every token once, no replay."""
    pools = FakePools(*DECODERS, delay_s=0.001)
    front = gateway(pools)
    deltas = await moved_after(
        front, generation(max_tokens=20), lambda: front.moves.drain("decode-0")
    )
    assert ids(deltas) == expected(20)
    (moved,) = pools.submitted("decode-1")
    assert moved.handle is not None and moved.handle.source == "decode-0"
    assert list(moved.output) == expected(20)[: len(moved.output)]
    final = deltas[-1].final
    assert final is not None and final.trace.fallback == "" and final.trace.num_moves == 1
    assert final.usage.completion_tokens == 20
    await collect(front, generation("second"))
    assert len(pools.submitted("decode-0")) == 1 and not pools.held


async def test_what_was_reserved_is_given_up_when_the_stream_goes_elsewhere() -> None:
    """The worker that was to go on is leaving by the time the first token is there."""
    normal, promised = hashed(), False

    def script(worker_id: str, submission: Submission, position: int) -> Event:
        nonlocal promised
        if worker_id != "prefill-0" or promised:
            return normal(worker_id, submission, position)
        promised = True
        return Output("", promise=KVHandle("r", "prefill-0", "1", 3, 1, LAYOUT))

    pools = FakePools(*SPLIT, script=script, delay_s=0.001)
    front = gateway(pools)
    async with aclosing(front.generate(generation(mode="disaggregated"))) as deltas:
        answer = asyncio.create_task(anext(deltas))
        while not pools.reserved:
            await asyncio.sleep(0)
        pools.views["decode-1"] = worker("decode-1")
        pools.drain("decode-0")
        first = await answer
        rest = [await anext(deltas)]
        assert ("decode-0", "r") in pools.aborts
        rest += [delta async for delta in deltas]
    assert ids([first, *rest]) == expected(8)
    assert not pools.submitted("decode-0") and pools.submitted("decode-1") and not pools.held


async def test_a_drain_with_nobody_else_leaves_the_stream_where_it_is() -> None:
    pools = FakePools(worker("mixed-0"), delay_s=0.001)
    front = gateway(pools)
    deltas = await moved_after(
        front, generation(max_tokens=20), lambda: front.moves.drain("mixed-0")
    )
    assert ids(deltas) == expected(20) and len(pools.submissions) == 1
    with pytest.raises(Unavailable, match="takes requests"):
        await collect(front, generation("second"))
    await front.moves.set_role("mixed-0", "mixed")
    assert ids(await collect(front, generation("third"))) == expected(8)


async def test_streams_leave_a_worker_that_is_to_prefill_only_for_one_that_decodes() -> None:
    for other, num_moves in (("decode-1", 1), ("prefill-1", 0)):
        pools = FakePools(worker("decode-0"), worker(other), delay_s=0.001)
        front = gateway(pools)
        deltas = await moved_after(
            front,
            generation(max_tokens=20, pinned=("decode-0",)),
            lambda front=front: front.moves.set_role("decode-0", "prefill"),
        )
        assert ids(deltas) == expected(20)
        assert deltas[-1].final is not None and deltas[-1].final.trace.num_moves == num_moves


async def test_a_stream_moved_to_a_worker_that_dies_on_the_way_is_replayed() -> None:
    pools = FakePools(*DECODERS, delay_s=0.001)
    front = gateway(pools)

    async def move_then_lose() -> None:
        assert front.move("r", "decode-1")
        pools.lose("decode-1")

    deltas = await moved_after(front, generation(max_tokens=20), move_then_lose)
    assert ids(deltas) == expected(20) and not pools.held
    assert deltas[-1].final is not None and "nowhere" in deltas[-1].final.trace.fallback


async def test_roles_and_moves_are_checked() -> None:
    front = gateway(FakePools())
    with pytest.raises(BadRequest, match="not one of mixed, prefill, decode"):
        await front.moves.set_role("mixed-0", "both")
    with pytest.raises(NotFound, match="'x' is attached"):
        await front.moves.drain("x")
    assert not front.move("unknown", "x")


async def test_the_parts_of_a_first_tokens_time_add_up() -> None:
    """FAULTS 103: counted from arrival, the queue included."""
    clock = [100.0]

    def script(worker: str, submission: Submission, position: int) -> Event:
        clock[0] += 2.0 if position == 0 else 0.25
        return 7

    pools = FakePools(worker("mixed-0"), script=script)
    front = gateway(pools, clock=lambda: clock[0])
    await collect(front, replace(generation(), arrived_at=99.0))
    told = await front.explain("r")
    assert told is not None
    assert told["ttft_s"] == pytest.approx(3.0)
    parts = told["ttft_queue_s"] + told["ttft_prefill_s"] + told["front_s"]
    assert parts == pytest.approx(told["ttft_s"]) and told["ttft_queue_s"] == 0.5
    assert told["worst_itl_s"] == pytest.approx(0.25) and told["late_gaps"] == 7


async def test_what_cannot_be_in_time_is_refused_when_asked_to() -> None:
    pace = Pace(is_measured=True)
    view = replace(worker("mixed-0", queued_tokens=40_000, waiting_seqs=9), pace=pace)
    front = gateway(FakePools(view, delay_s=0.01), in_time=True, clock=lambda: 100.0)
    late = replace(generation(prompts=((5,) * 900,)), arrived_at=100.0)
    flood = [replace(late, id=f"r{i}", key=f"r{i}") for i in range(20)]
    await asyncio.gather(*(collect(front, g) for g in flood))  # nobody has come before them
    with pytest.raises(Overloaded, match="s are promised") as refused:
        await collect(front, late)
    assert refused.value.retry_after_s >= 1

"""The scheduler keeps its promises under every policy, budget and pool."""

import itertools
import random

import pytest

from tests.stepper import Stepper, handle, request
from workers.core.policy import POLICIES, Limits
from workers.core.request import Sequence
from workers.core.scheduler import DoesNotFit


def chunks_of(stepper, name):
    """Of the last step."""
    return [(c.start, c.length) for c in stepper.chunks if c.seq.id == name]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", [1, 7, 16, 64, 4096])
@pytest.mark.parametrize("num_pages", [24, 400])
def test_every_request_gets_its_tokens_and_every_page_comes_home(policy, budget, num_pages):
    rng = random.Random(budget)
    stepper = Stepper(Limits(budget, 8, policy), num_pages)
    want = {}
    for i in range(30):
        name = str(i)
        want[name] = rng.randint(1, 40)
        stepper.submit(request(name, rng.randint(1, 200), want[name], arrived_at=float(i)))
        stepper.run_step()
    stepper.run()
    assert {name: len(steps) for name, steps in stepper.token_steps.items()} == want
    assert set(stepper.ended.values()) == {"length"}
    assert stepper.is_clean and stepper.scheduler.waiting_tokens == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_random_aborts_in_every_phase_leak_nothing(policy):
    """FAULTS 43: free pages return to the whole pool once everything has ended."""
    rng = random.Random(7)
    for page_size in (1, 16, 32):
        stepper = Stepper(Limits(32, 6, policy), 4096 // page_size // 8, page_size)
        fetching = []
        for i in range(400):
            name = str(i)
            prompt = rng.randint(1, 100)
            if rng.random() < 0.3:
                stepper.submit(request(name, prompt), output=[5], handle=handle(name, prompt))
            else:
                stepper.submit(request(name, prompt, rng.randint(1, 30)))
            plan, _ = stepper.run_step()
            fetching += plan.fetches
            if rng.random() < 0.5:
                stepper.scheduler.abort(str(rng.randint(0, i)))
            if fetching and rng.random() < 0.6:
                seq = fetching.pop(rng.randrange(len(fetching)))
                stepper.scheduler.fetch_ended(seq, landed=rng.random() < 0.7)
        while len(stepper.scheduler) or fetching:
            plan, _ = stepper.run_step()
            fetching += plan.fetches
            if fetching:
                stepper.scheduler.fetch_ended(fetching.pop(), landed=True)
        assert stepper.is_clean
        assert stepper.scheduler.num_waiting == stepper.scheduler.waiting_tokens == 0


def test_decodes_come_first_and_a_long_prompt_takes_what_is_left():
    stepper = Stepper(Limits(max_tokens=32), num_pages=400)
    for name in "abcd":
        stepper.submit(request(name, 4, 100))
    stepper.run_step()
    stepper.submit(request("long", 1000))
    _, sampled = stepper.run_step()
    assert set(sampled) == set("abcd")
    assert chunks_of(stepper, "long") == [(0, 24)], "28 tokens are left: three whole tiles"


def test_splitfuse_fills_every_step_to_the_last_token():
    stepper = Stepper(Limits(32, 16, "splitfuse"), num_pages=400)
    for i in range(10):
        stepper.submit(request(str(i), 45, 8))
    sizes = []
    while stepper.scheduler.prefills or stepper.scheduler.num_waiting or not sizes:
        plan, _ = stepper.run_step()
        sizes.append(sum(c.length for c in plan.chunks))
    assert set(sizes[:-1]) == {32}


def test_prefill_first_stops_the_decodes_for_a_whole_prompt():
    stepper = Stepper(Limits(64, 16, "prefill-first"), num_pages=400)
    stepper.submit(request("short", 4, 50))
    stepper.run_step()
    stepper.submit(request("long", 1000))
    _, sampled = stepper.run_step()
    assert chunks_of(stepper, "long") == [(0, 1000)], "a prompt over the budget runs alone, whole"
    assert sampled == ["long"]


def test_static_admits_nobody_until_the_batch_has_ended():
    stepper = Stepper(Limits(64, 2, "static"), num_pages=400)
    for name in "abc":
        stepper.submit(request(name, 4, 5 if name == "a" else 10))
    stepper.run()
    assert stepper.token_steps["c"][0] > stepper.token_steps["b"][-1]


def test_no_decode_waits_long_under_a_stream_of_prompts():
    """FAULTS 31: at most 3 steps between two tokens of any of six streams."""
    stepper = Stepper(Limits(max_tokens=64, max_seqs=64), num_pages=4000)
    for i in range(6):
        stepper.submit(request(f"stream{i}", 8, 2000))
    for i in range(150):
        for _ in range(8):
            stepper.run_step()
        stepper.submit(request(f"prompt{i}", 512, 4, arrived_at=float(i)))
    for i in range(6):
        steps = stepper.token_steps[f"stream{i}"]
        assert max(b - a for a, b in itertools.pairwise(steps)) <= 3
    assert sum(len(stepper.token_steps.get(f"prompt{i}", [])) > 0 for i in range(150)) > 100


def test_preemption_under_pressure_is_no_livelock():
    """FAULTS 33: 8 requests that grow to 12 pages each in a pool of 40."""

    def steps(num_pages):
        stepper = Stepper(Limits(64, 16), num_pages)
        for i in range(8):
            stepper.submit(request(str(i), 16, 12 * 16 - 16, arrived_at=float(i)))
        seqs = [stepper.scheduler[str(i)] for i in range(8)]
        total = stepper.run(max_steps=5000)
        return total, max(seq.num_preemptions for seq in seqs)

    free, no_preemptions = steps(num_pages=400)
    pressed, preemptions = steps(num_pages=40)
    assert no_preemptions == 0 and 0 < preemptions <= 8
    assert pressed <= 3 * free


def test_a_budget_below_the_number_of_decodes_is_shared_fairly():
    """FAULTS 35: budget 4, 12 decodes: all advance alike, and a prompt still gets through."""
    stepper = Stepper(Limits(max_tokens=4, max_seqs=16), num_pages=400)
    for i in range(12):
        stepper.submit(request(str(i), 1, 500))
    while len(stepper.token_steps) < 12:
        stepper.run_step()
    before = {name: len(steps) for name, steps in stepper.token_steps.items()}
    for _ in range(300):
        plan, _ = stepper.run_step()
        assert sum(c.length for c in plan.chunks) <= 4
    gained = [len(stepper.token_steps[name]) - before[name] for name in before]
    assert min(gained) >= 0.8 * max(gained)
    stepper.submit(request("late", 40))
    while "late" not in stepper.token_steps:
        stepper.run_step()
        assert stepper.step < 1000


def test_a_high_priority_request_does_not_wait_for_a_seat():
    """FAULTS 37: two low-priority runs fill max_seqs; the important one is served at once."""
    stepper = Stepper(Limits(max_tokens=64, max_seqs=2), num_pages=400)
    for name in "ab":
        stepper.submit(request(name, 20, 200, priority=1))
    for _ in range(5):
        stepper.run_step()
    submitted = stepper.step
    stepper.submit(request("urgent", 20, 4, priority=0, arrived_at=9.0))
    stepper.run()
    assert stepper.token_steps["urgent"][0] - submitted <= 5
    assert len(stepper.token_steps["a"]) == len(stepper.token_steps["b"]) == 200


def test_equal_priorities_never_preempt_each_other_for_a_seat():
    stepper = Stepper(Limits(64, 1), num_pages=400)
    stepper.submit(request("first", 4, 20))
    stepper.run_step()
    stepper.submit(request("second", 4, 20))
    stepper.run()
    assert stepper.scheduler.num_preemptions == 0


def test_what_an_empty_pool_cannot_hold_is_refused_and_blocks_nobody():
    """FAULTS 27: refused at once, with the numbers."""
    stepper = Stepper(Limits(64, 8), num_pages=64)
    with pytest.raises(DoesNotFit, match=r"1500 tokens .* 1024 tokens"):
        stepper.submit(request("huge", 1500))
    stepper.submit(request("short", 5))
    stepper.run()
    assert stepper.ended == {"short": "length"}


def test_a_sequence_that_outgrows_the_pool_ends_there():
    """FAULTS 27: 1,000 + 500 tokens in a pool of 1,024 end with "length", not with a hang."""
    stepper = Stepper(Limits(64, 8), num_pages=64)
    stepper.submit(request("grows", 1000, 500))
    stepper.submit(request("other", 10, 30, arrived_at=1.0))
    stepper.run()
    assert stepper.ended == {"grows": "length", "other": "length"}
    assert len(stepper.token_steps["grows"]) == 25, "the last token's KV is never needed"


def test_a_sequence_leaves_with_its_pages_after_its_first_token():
    stepper = Stepper(Limits(64, 8))
    seq = stepper.submit(request("moved", 100, 8), hand_off=True)
    stepper.submit(request("done", 10, 1), hand_off=True)
    stepper.run()
    assert len(stepper.handed_off["moved"]) == 7
    assert seq.num_computed == 100 and seq.output == [7]
    assert stepper.ended == {"done": "length"}, "one token needs no second worker"
    stepper.pool.take_back(stepper.handed_off["moved"])
    assert stepper.is_clean


def test_a_running_decode_is_handed_off_at_any_token():
    stepper = Stepper()
    seq = stepper.submit(request("moved", 10, 50))
    for _ in range(5):
        stepper.run_step()
    assert stepper.scheduler.hand_off("moved")
    stepper.run_step()
    assert stepper.handed_off["moved"] and seq.num_computed == 15 and len(seq.output) == 6


def test_a_failed_fetch_is_computed_here_and_a_landed_one_is_not():
    stepper = Stepper(prefix_caching=False)
    landed = stepper.submit(request("a", 40), output=[5], handle=handle("a", 40))
    failed = stepper.submit(request("b", 40), output=[5], handle=handle("b", 40))
    plan, _ = stepper.run_step()
    assert set(plan.fetches) == {landed, failed} and not plan.chunks
    stepper.scheduler.fetch_ended(landed, landed=True)
    stepper.scheduler.fetch_ended(failed, landed=False)
    stepper.run_step()
    assert chunks_of(stepper, "a") == [(40, 1)] and chunks_of(stepper, "b") == [(0, 41)]


def test_pages_of_an_aborted_fetch_stay_reserved_until_the_transfer_is_over():
    """FAULTS 51: a late write must not land in somebody else's pages."""
    stepper = Stepper(num_pages=8)
    seq = stepper.submit(request("a", 40), output=[5], handle=handle("a", 40))
    stepper.run_step()
    stepper.scheduler.abort("a")
    assert stepper.scheduler.owned() == {"a": 3} and stepper.pool.num_free == 5
    assert not stepper.scheduler.fetch_ended(seq, landed=True)
    assert stepper.is_clean


def test_an_id_in_use_is_refused():
    stepper = Stepper()
    stepper.submit(request("a", 4))
    with pytest.raises(ValueError, match="in use"):
        stepper.submit(request("a", 4))


def test_early_requests_of_one_moment_can_be_computed_here_after_all():
    """They are ranked from the start: the choices of one call arrive together, and their order in
    the queue must not depend on anything else."""
    stepper = Stepper(Limits(64, 8), 64)
    early = [Sequence(request(str(i), 40, 4), handle=handle(str(i), 40)) for i in range(3)]
    for seq in early:
        seq.is_early = True
        assert stepper.scheduler.reserve(seq)
    for seq in early:
        assert stepper.scheduler.confirm(seq.id, 7, False) is seq
        assert stepper.scheduler.fetch_ended(seq, landed=False)
    stepper.run()
    assert set(stepper.ended) == {"0", "1", "2"} and stepper.is_clean


def test_a_decode_that_came_with_its_next_page_takes_nobody_elses():
    """Its KV ends at a page border, and the page of the token behind it came with it. The first one
    is in the cache, so that two and one are all there are."""
    stepper = Stepper(Limits(max_tokens=64), num_pages=3)
    stepper.submit(request("here", 20, 5))
    stepper.run_step()
    stepper.submit(request("moved", 16, 5), output=[5], handle=handle("moved", 16))
    plan, _ = stepper.run_step()
    stepper.scheduler.fetch_ended(plan.fetches[0], landed=True)
    assert stepper.scheduler.pool.num_free == 0
    plan, sampled = stepper.run_step()
    assert set(sampled) == {"here", "moved"} and not plan.preempted

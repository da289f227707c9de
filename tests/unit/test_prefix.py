"""The prefix cache: what was computed before is not computed again, and is never wrong."""

import random

import pytest

from tests.stepper import Stepper, handle, request
from workers.core.policy import POLICIES, Limits
from workers.core.prefix import next_key, root_key
from workers.core.request import Request, Sampling


def req(name, prompt, max_tokens=4, salt=""):
    return Request(name, tuple(prompt), Sampling(max_tokens), cache_salt=salt)


def run(stepper, request_, **kwargs):
    """Run it to its end; how many of its tokens were found."""
    seq = stepper.submit(request_, **kwargs)
    stepper.run()
    return seq.num_cached


def test_a_repeated_prompt_is_found_but_for_its_last_page():
    stepper = Stepper(num_pages=64)
    prompt = range(100, 150)
    assert run(stepper, req("a", prompt)) == 0
    assert run(stepper, req("b", prompt)) == 48
    assert stepper.is_clean and stepper.pool.num_kept > 0


def test_a_hit_never_covers_the_last_token():
    """At least one token is computed, or there would be nothing to sample from."""
    stepper = Stepper()
    prompt = range(100, 148)
    run(stepper, req("a", prompt))
    assert run(stepper, req("b", prompt)) == 32


def test_only_whole_equal_pages_from_the_start_are_shared():
    stepper = Stepper()
    run(stepper, req("a", range(100, 164)))
    changed = [*range(100, 120), 7, *range(121, 164)]
    assert run(stepper, req("b", changed)) == 16
    assert run(stepper, req("c", range(116, 164))) == 0, "same pages, other predecessors"


def test_answers_are_found_by_the_next_turn_of_the_conversation():
    stepper = Stepper()
    seq = stepper.submit(req("a", range(100, 120), max_tokens=30))
    stepper.run()
    turn = [*seq.request.prompt, *seq.output, *range(900, 910)]
    assert run(stepper, req("b", turn)) == 48, "49 tokens were computed: three full pages"


def test_another_salt_never_matches():
    """FAULTS 47."""
    stepper = Stepper()
    run(stepper, req("a", range(100, 164), salt="tenant a"))
    assert run(stepper, req("b", range(100, 164), salt="tenant b")) == 0
    assert run(stepper, req("c", range(100, 164), salt="tenant a")) == 48


def test_keys_stand_for_order_borders_salt_and_model():
    """FAULTS 45: no confusion of [1, 23] with [12, 3], of pages swapped, of model and salt."""
    root = root_key("m", "s")
    assert len({root, root_key("ms", ""), root_key("", "ms"), root_key("m", "t")}) == 4
    assert next_key(root, [1, 23]) != next_key(root, [12, 3])
    a, b = next_key(root, [1, 2]), next_key(root, [3, 4])
    assert next_key(a, [3, 4]) != next_key(b, [1, 2])
    assert next_key(root, [1, 2, 3, 4]) != next_key(a, [3, 4])
    assert len(a) == 16


def test_a_million_random_pages_do_not_collide():
    """FAULTS 45."""
    rng = random.Random(5)
    root = root_key("m", "")
    keys = {next_key(root, [rng.getrandbits(16) for _ in range(4)]) for _ in range(200_000)}
    assert len(keys) == 200_000


def test_shared_pages_are_held_until_the_last_sequence_lets_go():
    stepper = Stepper(Limits(256, 8), num_pages=32)
    run(stepper, req("first", range(100, 164)))
    for name in "ab":
        stepper.submit(req(name, range(100, 164), max_tokens=50))
    stepper.run_step()
    assert stepper.scheduler["a"].pages[:3] == stepper.scheduler["b"].pages[:3]
    stepper.scheduler.abort("a")
    stepper.run_step()
    assert len(stepper.scheduler["b"].pages) >= 4
    stepper.run()
    assert stepper.is_clean


def test_eviction_takes_the_least_recently_used_and_never_a_held_page():
    stepper = Stepper(Limits(256, 8), num_pages=12)
    run(stepper, req("old", range(100, 164)))
    run(stepper, req("new", range(200, 264)))
    run(stepper, req("big", range(300, 380)))
    assert run(stepper, req("new again", range(200, 264))) == 48
    assert run(stepper, req("old again", range(100, 164))) < 48


def test_a_decode_worker_that_holds_a_prefix_asks_for_the_rest_only():
    stepper = Stepper(num_pages=64)
    prompt = request("x", 100).prompt
    run(stepper, Request("a", prompt[:64], Sampling(4)))
    seq = stepper.submit(Request("b", prompt, Sampling(4)), output=[5], handle=handle("b", 100))
    plan, _ = stepper.run_step()
    assert plan.fetches == (seq,) and seq.num_cached == 64 and len(seq.pages) == 7
    stepper.scheduler.fetch_ended(seq, landed=True)
    stepper.run()
    assert stepper.is_clean


def test_a_preempted_sequence_finds_its_own_pages_again():
    stepper = Stepper(Limits(64, 2), num_pages=64)
    stepper.submit(request("low", 100, 200, priority=1))
    for _ in range(20):
        stepper.run_step()
    stepper.submit(Request("one", (5,) * 9, Sampling(3), priority=0))
    stepper.submit(Request("two", (6,) * 9, Sampling(3), priority=0))
    low = stepper.scheduler["low"]
    stepper.run()
    assert low.num_preemptions == 1 and low.num_cached >= 96


@pytest.mark.parametrize("policy", POLICIES)
def test_random_sharing_leaks_nothing(policy):
    """FAULTS 41, 43: prompts of few families, aborts, fetches, a pool that keeps evicting."""
    rng = random.Random(11)
    stepper = Stepper(Limits(48, 6, policy), num_pages=40)
    fetching = []
    for i in range(1500):
        family = rng.randrange(4)
        prompt = [family * 1000 + j for j in range(rng.randint(1, 200))]
        moved = rng.random() < 0.3
        stepper.submit(
            req(str(i), prompt, rng.randint(1, 20), salt=rng.choice(["", "x"])),
            output=[5] if moved else [],
            handle=handle(str(i), len(prompt)) if moved else None,
        )
        for _ in range(rng.randint(0, 12)):
            plan, _ = stepper.run_step()
            fetching += plan.fetches
        if rng.random() < 0.4:
            stepper.scheduler.abort(str(rng.randint(max(0, i - 20), i)))
        if fetching and rng.random() < 0.8:
            seq = fetching.pop(rng.randrange(len(fetching)))
            stepper.scheduler.fetch_ended(seq, landed=rng.random() < 0.7)
    while len(stepper.scheduler) or fetching:
        plan, _ = stepper.run_step()
        fetching += plan.fetches
        if fetching:
            stepper.scheduler.fetch_ended(fetching.pop(), landed=True)
    for pages in stepper.handed_off.values():
        stepper.pool.take_back(pages)
    assert stepper.is_clean

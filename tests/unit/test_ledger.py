"""Pages that left the scheduler: one holder each, free once, free in the end."""

import random
import threading

import pytest

from kvtransfer.core.ledger import LeaseLedger
from kvtransfer.leases import Leases


def test_pages_come_free_when_the_lease_is_released() -> None:
    ledger = LeaseLedger(lease_s=10)
    ledger.grant("a", [3, 1, 2], num_tokens=40, now=0)
    assert ledger.held() == {"a": 3} and ledger.take_free() == []
    ledger.release("a")
    ledger.release("a")
    assert ledger.held() == {} and ledger.take_free() == [3, 1, 2] and ledger.take_free() == []


def test_a_running_send_outlives_the_release() -> None:
    ledger = LeaseLedger(lease_s=10)
    ledger.grant("a", [1, 2], num_tokens=20, now=0)
    pages = ledger.begin_send("a", now=1)
    assert pages == (1, 2)
    ledger.release("a")
    assert ledger.take_free() == [] and ledger.held() == {"a": 2}
    assert ledger.begin_send("a", now=1) is None, "a released lease is not sent again"
    ledger.end_send("a", pages, now=2)
    assert ledger.take_free() == [1, 2] and ledger.held() == {}


def test_a_lease_expires_unless_renewed_or_sending() -> None:
    ledger = LeaseLedger(lease_s=10)
    for name, page in (("idle", 1), ("renewed", 2), ("sending", 3)):
        ledger.grant(name, [page], num_tokens=1, now=0)
    assert ledger.renew("renewed", now=9)
    pages = ledger.begin_send("sending", now=9)
    assert pages is not None
    assert ledger.expire(now=10) == ["idle"]
    assert not ledger.renew("idle", now=10) and ledger.begin_send("idle", now=10) is None
    assert ledger.expire(now=19) == ["renewed"]
    ledger.end_send("sending", pages, now=100)
    assert ledger.expire(now=109) == [], "the receiver of a failed send may ask once more"
    assert ledger.expire(now=110) == ["sending"]
    assert ledger.take_free() == [1, 2, 3]


def test_renewals_do_not_keep_a_lease_for_ever() -> None:
    """FAULTS 39: two workers may each wait for room that the other's lease takes."""
    ledger = LeaseLedger(lease_s=10)
    ledger.grant("a", [1], num_tokens=1, now=0)
    renewed_at = [now for now in range(1, 100) if ledger.renew("a", now)]
    assert renewed_at[-1] == 39 and ledger.expire(now=40) == ["a"]


def test_an_expired_lease_is_gone_before_anybody_sweeps() -> None:
    ledger = LeaseLedger(lease_s=10)
    ledger.grant("a", [1], num_tokens=1, now=0)
    assert not ledger.renew("a", now=10) and ledger.begin_send("a", now=10) is None
    assert ledger.expire(now=10) == ["a"]


def test_a_second_hand_off_of_a_request_replaces_the_first() -> None:
    ledger = LeaseLedger(lease_s=10)
    ledger.grant("a", [1], num_tokens=1, now=0)
    old = ledger.begin_send("a", now=1)
    ledger.grant("a", [2], num_tokens=2, now=2)
    new = ledger.begin_send("a", now=3)
    assert (old, new) == ((1,), (2,)) and ledger.held() == {"a": 2}
    assert new is not None and old is not None
    ledger.end_send("a", new, now=4)
    assert ledger.take_free() == [], "the late send still reads page 1"
    ledger.end_send("a", old, now=5)
    assert ledger.take_free() == [1] and ledger.held() == {"a": 1}


def test_a_lease_holds_a_page_once() -> None:
    """FAULTS 41: the same page twice in one list."""
    ledger = LeaseLedger(lease_s=10)
    with pytest.raises(AssertionError):
        ledger.grant("a", [4, 4], num_tokens=20, now=0)
    assert ledger.held() == {}


def test_a_shared_page_comes_back_once_from_each_lease() -> None:
    ledger = LeaseLedger(lease_s=10)
    ledger.grant("a", [1, 2], num_tokens=20, now=0)
    ledger.grant("b", [1, 3], num_tokens=20, now=0)
    ledger.release("a")
    assert ledger.take_free() == [1, 2]
    ledger.release("b")
    assert ledger.take_free() == [1, 3]


@pytest.mark.parametrize("seed", range(4))
def test_every_page_is_in_one_place_under_random_operations(seed: int) -> None:
    """FAULTS 41, 43: no double free, no page lost, clean when everybody has let go."""
    rng = random.Random(seed)
    ledger = LeaseLedger(lease_s=5)
    free, sends, now = set(range(60)), [], 0.0
    for step in range(25_000):
        now += rng.random() * 0.3
        name = f"r{rng.randrange(12)}"
        match rng.randrange(8):
            case 0 | 1 if free:
                pages = rng.sample(sorted(free), rng.randint(1, min(8, len(free))))
                free.difference_update(pages)
                ledger.grant(name, pages, num_tokens=1, now=now)
            case 2 | 3:
                sent = ledger.begin_send(name, now)
                if sent is not None:
                    sends.append((name, sent))
            case 4 | 5 if sends:
                ledger.end_send(*sends.pop(rng.randrange(len(sends))), now)
            case 6 if rng.random() < 0.5:
                ledger.release(name)
            case 6:
                ledger.renew(name, now)
            case _:
                ledger.expire(now)
        back = ledger.take_free()
        assert len(set(back)) == len(back) and free.isdisjoint(back), f"{step}: freed twice"
        assert all(not set(back) & set(pages) for _, pages in sends), f"{step}: freed while sent"
        free.update(back)
        assert len(free) + sum(ledger.held().values()) == 60, f"{step}: a page is lost"
    for name, sent in sends:
        ledger.end_send(name, sent, now)
    ledger.expire(now + 100)
    free.update(ledger.take_free())
    assert free == set(range(60)) and ledger.held() == {}


def test_leases_tell_the_engine_when_pages_came_back() -> None:
    now, woken = [0.0], threading.Event()
    leases = Leases(lease_s=10, clock=lambda: now[0])
    leases.on_free = woken.set
    leases.grant("a", [1], num_tokens=1)
    pages = leases.begin_send("a")
    assert pages is not None and leases.renew("a") and not woken.is_set()
    leases.end_send("a", pages)
    now[0] = 20.0
    assert leases.expire() == ["a"] and woken.is_set() and leases.take_free() == [1]

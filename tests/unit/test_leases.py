"""What is promised may be read at any moment of its life, and never after it."""

from kvtransfer.leases import Leases


def test_a_promise_that_became_a_lease_meanwhile_can_still_be_read():
    """Between being told of ready pages and reading them, the prompt may have been finished."""
    leases = Leases(10.0)
    leases.promise("a", [7, 8, 9], 2)
    ready = leases.ready("a", 0).result(0)
    assert ready is not None and ready.num_pages == 2
    leases.grant("a", [7, 8, 9], 40)
    pages = leases.peek("a", 2)
    assert pages == (7, 8)
    assert leases.holds("a", pages)


def test_what_is_over_is_not_read():
    leases = Leases(10.0)
    leases.promise("a", [7, 8, 9], 2)
    assert leases.peek("a", 3) is None, "not all of these are computed"
    pages = leases.peek("a", 2)
    leases.revoke("a")
    assert pages == (7, 8) and not leases.holds("a", pages)
    assert leases.peek("a", 2) is None
    leases.grant("b", [1, 2], 20)
    leases.release("b")
    assert leases.peek("b", 1) is None

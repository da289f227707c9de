"""Values live as long as they were given, and the store never outgrows its bound."""

from serving.state import MemoryStore


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_values_expire_and_can_be_deleted() -> None:
    clock = Clock()
    store = MemoryStore(clock=clock)
    await store.set("a", {"x": 1}, ttl_s=10)
    clock.now = 9.9
    assert await store.get("a") == {"x": 1}
    clock.now = 10.0
    assert await store.get("a") is None
    await store.set("a", {"x": 2}, ttl_s=10)
    await store.delete("a")
    await store.delete("a")
    assert await store.get("a") is None


async def test_scan_finds_the_living_by_prefix() -> None:
    clock = Clock()
    store = MemoryStore(clock=clock)
    for key, ttl_s in (("w:1", 1.0), ("w:2", 5.0), ("r:1", 5.0)):
        await store.set(key, {"key": key}, ttl_s)
    clock.now = 2.0
    assert await store.scan("w:") == {"w:2": {"key": "w:2"}}


async def test_the_oldest_make_room() -> None:
    store = MemoryStore(max_entries=2)
    for key in ("a", "b", "a", "c"):
        await store.set(key, {}, ttl_s=10)
    assert sorted(await store.scan("")) == ["a", "c"]


async def test_values_are_copies() -> None:
    store, value = MemoryStore(), {"x": 1}
    await store.set("a", value, ttl_s=10)
    value["x"] = 2
    assert await store.get("a") == {"x": 1}

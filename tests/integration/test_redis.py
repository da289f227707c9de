"""The store's promises on a real Redis, and what happens while it is frozen, gone or empty."""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from serving.gateway import Gateway
from serving.redis_store import RedisStore
from serving.state import MemoryStore, StateStore
from tests.fakes import FakePools
from tests.front import MODEL, TOKENIZER
from tests.redis_server import RedisServer

pytestmark = pytest.mark.cluster


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.stop()


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[StateStore]:
    if request.param == "memory":
        yield MemoryStore()
        return
    store = RedisStore(request.getfixturevalue("server").url, deadline_s=2.0)
    yield store
    await store.close()


async def until(condition: Callable[[], bool], within_s: float) -> float:
    started = time.monotonic()
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)
    return time.monotonic() - started


# ------------------------------------------------------------------ the same for both stores


async def test_values_come_back_until_they_expire_or_are_deleted(store: StateStore) -> None:
    await store.set("a", {"x": [1, "ü", None]}, ttl_s=30)
    await store.set("b", {"x": 2}, ttl_s=0.05)
    assert await store.get("a") == {"x": [1, "ü", None]}
    await asyncio.sleep(0.1)
    assert await store.get("b") is None and await store.get("c") is None
    await store.set("a", {"x": 3}, ttl_s=30)
    assert await store.get("a") == {"x": 3}
    for _ in range(2):
        await store.delete("a")
    assert await store.get("a") is None


async def test_scan_takes_a_prefix_literally(store: StateStore) -> None:
    for key in ("w*:1", "w*:2", "wx:1", "r:1", "w[a]:1"):
        await store.set(key, {"key": key}, ttl_s=30)
    assert await store.scan("w*:") == {k: {"key": k} for k in ("w*:1", "w*:2")}
    assert await store.scan("w[a]") == {"w[a]:1": {"key": "w[a]:1"}}
    assert len(await store.scan("")) == 5


async def test_values_are_copies(store: StateStore) -> None:
    value = {"x": 1}
    await store.set("a", value, ttl_s=30)
    value["x"] = 2
    assert await store.get("a") == {"x": 1}


async def test_many_at_once(store: StateStore) -> None:
    await asyncio.gather(*(store.set(f"k:{i}", {"i": i}, 30) for i in range(300)))
    assert len(await store.scan("k:")) == 300


# ------------------------------------------------------------------ several gateways


async def test_gateways_share_what_they_know(server: RedisServer) -> None:
    stores = [RedisStore(server.url, "m", deadline_s=2.0) for _ in range(2)]
    other = RedisStore(server.url, "another model", deadline_s=2.0)
    await stores[0].set("a", {"x": 1}, 30)
    assert await stores[1].get("a") == {"x": 1}
    assert await other.get("a") is None and await other.scan("") == {}
    await stores[1].delete("a")
    assert await stores[1].get("a") is None
    for store in (*stores, other):
        await store.close()


async def test_another_gateway_explains_a_request(server: RedisServer) -> None:
    stores = [RedisStore(server.url, MODEL, deadline_s=2.0) for _ in range(2)]
    here, there = (Gateway(FakePools(), TOKENIZER, model=MODEL, store=store) for store in stores)
    await _one_request(here, "mine")
    explained = await there.explain("mine")
    assert explained is not None and explained["outcome"] == "length"
    for store in stores:
        await store.close()


async def _one_request(gateway: Gateway, name: str) -> float:
    from serving.api.intake import Intake
    from serving.api.settings import FrontSettings

    intake = Intake(gateway, FrontSettings(MODEL))
    started = time.monotonic()
    ask = await intake.completion({"prompt": "canary", "max_tokens": 3}, request_id=name)
    async for _ in intake.answer(ask):
        pass
    return time.monotonic() - started


# ------------------------------------------------------------------ outages


async def test_a_frozen_redis_costs_one_deadline_and_converges_when_it_is_back(
    server: RedisServer,
) -> None:
    """FAULTS 91."""
    store = RedisStore(server.url, MODEL, probe_s=0.2)
    gateway = Gateway(FakePools(), TOKENIZER, model=MODEL, store=store)
    before = [await _one_request(gateway, f"before-{i}") for i in range(20)]
    server.freeze()
    frozen = [await _one_request(gateway, f"frozen-{i}") for i in range(40)]
    assert not store.is_up
    added = sorted(took - statistics.median(before) for took in frozen)
    assert added[-2] < 0.1, "at most one request waits, for one deadline"
    assert added[-1] < 1.0
    assert (await gateway.explain("frozen-39") or {})["outcome"] == "length"
    server.thaw()
    await until(lambda: store.is_up, 5)
    fresh = RedisStore(server.url, MODEL, deadline_s=2.0)
    assert (await fresh.get("request:frozen-39") or {})["outcome"] == "length"
    await store.close()
    await fresh.close()


async def test_a_redis_that_is_gone_and_comes_back_empty_is_filled_again(
    server: RedisServer,
) -> None:
    """FAULTS 91."""
    store = RedisStore(server.url, probe_s=0.1, deadline_s=0.5)
    await store.set("old", {"x": 1}, 30)
    server.stop()
    await store.set("new", {"x": 2}, 30)
    assert await store.get("old") == {"x": 1} and await store.get("new") == {"x": 2}
    server.start()
    await until(lambda: store.is_up, 5)
    fresh = RedisStore(server.url, deadline_s=2.0)
    assert await fresh.scan("") == {"old": {"x": 1}, "new": {"x": 2}}
    await store.close()
    await fresh.close()


async def test_a_redis_that_was_never_there_stops_nobody() -> None:
    store = RedisStore("redis://127.0.0.1:1", probe_s=0.1)
    await store.set("a", {"x": 1}, 30)
    assert await store.get("a") == {"x": 1} and not store.is_up
    await store.close()


async def test_connection_churn_is_survived(server: RedisServer) -> None:
    store = RedisStore(server.url, probe_s=0.05, deadline_s=0.5)
    for i in range(20):
        await store.set("a", {"i": i}, 30)
        if store.is_up:
            await store._client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "no")
        assert await store.get("a") == {"i": i}
    await until(lambda: store.is_up, 5)
    await store.close()


async def test_nonsense_under_our_keys_is_no_value(server: RedisServer) -> None:
    store = RedisStore(server.url, deadline_s=2.0)
    for key, text in (("a", "not json"), ("b", "[1]"), ("c", '"x"')):
        await store._client.set(f"evenflow:default:{key}", text)
    await store._client.rpush("evenflow:default:list", "x")
    assert [await store.get(key) for key in ("a", "b", "c")] == [None, None, None]
    assert await store.scan("") == {}
    await store.close()


async def test_no_prompt_is_in_redis(server: RedisServer) -> None:
    """FAULTS 125."""
    store = RedisStore(server.url, MODEL, deadline_s=2.0)
    await _one_request(Gateway(FakePools(), TOKENIZER, model=MODEL, store=store), "mine")
    keys = [key async for key in store._client.scan_iter()]
    assert keys == [f"evenflow:{MODEL}:request:mine"]
    assert "canary" not in str(await store._client.get(keys[0]))
    await store.close()

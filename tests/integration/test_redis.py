"""The store's promises on a real Redis, and what happens while it is frozen, gone or empty."""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from serving.gateway import Gateway
from serving.peers import PREFIX
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


async def test_gateways_know_of_each_other_while_they_live(store: StateStore) -> None:
    """The same for both stores: a lease is renewed, ends with its gateway, or runs out."""
    gateways = [Gateway(FakePools(), TOKENIZER, model=MODEL, store=store) for _ in range(2)]
    peers = [gateway.peers for gateway in gateways]
    for i, one in enumerate(peers):
        one._period_s = 0.05
        one.start(host="127.0.0.1", http_port=8000 + i, grpc_port=9000 + i)
    await until(lambda: all(len(one.all()) == 2 for one in peers), 5)
    found = {gateway["id"]: gateway for gateway in peers[0].all()}
    assert found[peers[1].id]["http_port"] == 8001
    assert found[peers[1].id]["workers"] == ["mixed-0"] and found[peers[1].id]["ready"]
    assert [one.leads for one in peers].count(True) == 1
    peers.sort(key=lambda one: one.leads)
    await peers[1].stop()
    await until(lambda: [one["id"] for one in peers[0].all()] == [peers[0].id], 5)
    assert peers[0].leads and peers[0].is_alone
    await store.set(PREFIX + "dead", {"host": "x"}, ttl_s=0.2)
    await until(lambda: len(peers[0].all()) == 2, 5)
    await until(lambda: len(peers[0].all()) == 1, 5)
    await peers[0].stop()


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


async def test_a_black_hole_costs_one_deadline_and_converges_when_it_ends(
    server: RedisServer,
) -> None:
    """FAULTS 91: connections are taken and nothing ever answers, nor refuses."""
    async with BlackHole(server.port) as proxy:
        store = RedisStore(f"redis://127.0.0.1:{proxy.port}/0", MODEL, probe_s=0.2)
        gateway = Gateway(FakePools(), TOKENIZER, model=MODEL, store=store)
        await _one_request(gateway, "before")
        assert store.is_up
        proxy.swallows = True
        took = [await _one_request(gateway, f"dark-{i}") for i in range(40)]
        assert not store.is_up and sorted(took)[-2] < 0.5 and max(took) < 1.5
        assert (await gateway.explain("dark-39") or {})["outcome"] == "length"
        proxy.swallows = False
        await until(lambda: store.is_up, 5)
        fresh = RedisStore(server.url, MODEL, deadline_s=2.0)
        assert (await fresh.get("request:dark-39") or {})["outcome"] == "length"
        await store.close()
        await fresh.close()


class BlackHole:
    """A TCP proxy that passes everything on, until it swallows what comes."""

    def __init__(self, target: int) -> None:
        self._target, self.swallows = target, False
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "BlackHole":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        ways = [self._pass(reader, back), self._pass(there, writer)]
        self._tasks |= {asyncio.create_task(way) for way in ways}

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                if not self.swallows:
                    writer.write(data)
        except ConnectionError:
            pass
        finally:
            writer.close()


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

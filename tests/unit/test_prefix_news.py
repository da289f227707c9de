"""A gateway knows what another one has sent to a worker, and Redis learns nothing of a prompt."""

from contextlib import aclosing

from serving.core.prefixes import BLOCK, MAX_NEWS, Prefixes, names_of
from serving.gateway import Gateway
from serving.generation import Generation
from serving.state import MemoryStore
from tests.fakes import FakePools, worker
from tests.front import MODEL, TOKENIZER
from workers.core.request import Sampling

SECRET = b"the deployment's"
PROMPT = tuple(range(31000, 31000 + 2 * BLOCK + 9))


def gateway(store: MemoryStore) -> Gateway:
    pools = FakePools(*(worker(f"mixed-{i}", num_pages=512) for i in range(4)))
    return Gateway(pools, TOKENIZER, model=MODEL, store=store, secret=SECRET)


async def ask(gateway: Gateway, prompt: tuple[int, ...] = PROMPT) -> str:
    """The worker that a call ran on."""
    call = Generation("a", "a", (prompt,), Sampling(max_tokens=2), gateway.clock())
    async with aclosing(gateway.generate(call)) as deltas:
        finals = [delta.final async for delta in deltas]
    assert finals[-1] is not None
    return finals[-1].trace.decode_worker


async def meet(*gateways: Gateway) -> None:
    """Each has a lease and has seen the others'."""
    for _ in range(2):
        for each in gateways:
            await each.peers.look()


async def two(store: MemoryStore) -> tuple[Gateway, Gateway]:
    """Of which the first has sent a prompt somewhere, and told."""
    one, other = gateway(store), gateway(store)
    await meet(one, other)
    await ask(one)
    await one.prefix_news.exchange()
    return one, other


async def test_what_one_gateway_sent_somewhere_another_sends_there_too() -> None:
    store = MemoryStore()
    one, *others = (gateway(store) for _ in range(4))
    await meet(one, *others)
    home = await ask(one)
    for each in (one, *others):
        await each.prefix_news.exchange()
    assert [await ask(each) for each in others] == [home] * 3


async def test_another_deployments_names_mean_nothing() -> None:
    assert names_of(PROMPT, "", b"one") != names_of(PROMPT, "", b"two")
    assert names_of(PROMPT, "a", b"one") != names_of(PROMPT, "b", b"one")
    assert names_of(PROMPT, "a", b"one")[0] == names_of(PROMPT[:BLOCK], "a", b"one")[0]


async def test_no_token_can_be_read_from_the_store() -> None:
    """FAULTS 125."""
    store = MemoryStore()
    await two(store)
    (told,) = (await store.scan("prefixes:")).values()
    (names,) = told.values()
    assert set(names) == set(names_of(PROMPT, "", SECRET)) and not set(names) & set(PROMPT)


async def test_what_is_heard_is_not_told_on() -> None:
    store = MemoryStore()
    _, other = await two(store)
    await other.prefix_news.exchange()
    assert (await store.scan("prefixes:"))[f"prefixes:{other.peers.id}"] == {}


async def test_one_alone_writes_nothing_and_keeps_little() -> None:
    store = MemoryStore()
    alone = gateway(store)
    await ask(alone)
    await alone.prefix_news.exchange()
    assert not await store.scan("prefixes:")
    prefixes = Prefixes()
    for i in range(MAX_NEWS + 5):
        prefixes.add((i,), "mixed-0", 4 * BLOCK)
    assert sum(map(len, prefixes.news().values())) == MAX_NEWS
    assert prefixes.news() == {}

"""The controller between the gateway and whoever starts workers, with the real autoscaler."""

import asyncio
from collections.abc import Callable, Mapping

import pytest

from serving.config import ConfigError, load_config
from serving.core.scaling import ADD, FLIP, HOLD, ScaleRules
from serving.errors import BadRequest, NotFound
from serving.gateway import Gateway
from serving.peers import Peers
from serving.pools import WorkerView
from serving.scaler import PoolRange, Scaler
from serving.state import MemoryStore
from workers.core.output import Load
from workers.core.pace import Pace

PACE = Pace((2e-2, 4e-4, 8e-9, 2e-4, 4e-7, 0.0), is_measured=True)


class Counts:
    """Replica counts that obey at once, and are remembered."""

    def __init__(self, **counts: int) -> None:
        self.counts = counts
        self.said: list[tuple[str, int]] = []

    async def targets(self) -> Mapping[str, int]:
        return self.counts

    async def set_target(self, pool: str, num: int) -> None:
        self.said.append((pool, num))


def view(name: str, role: str) -> WorkerView:
    return WorkerView(name, role, Load(num_pages=4096), 4096, 16, 8192, pace=PACE)


class Fixed:
    """Workers that stay as they are, but for their role."""

    def __init__(self, *views: WorkerView) -> None:
        self.views = list(views)
        self.listeners = []

    def workers(self) -> list[WorkerView]:
        return self.views

    def on_change(self, listener) -> None:
        self.listeners.append(listener)

    def set_role(self, worker_id: str, role: str) -> None:
        self.views = [view(v.id, role if v.id == worker_id else v.role) for v in self.views]
        for listener in self.listeners:
            listener(worker_id)


class Rig:
    def __init__(self, pools: Fixed, counts: Counts, **ranges: tuple[int, int]) -> None:
        self.now, self.counts, self.store = 0.0, counts, MemoryStore()
        self.gateway = Gateway(pools, None, model="m", clock=lambda: self.now)
        ranged = {name: PoolRange(name, *bounds) for name, bounds in ranges.items()}
        rules = ScaleRules(max_gpus=sum(bounds[1] for bounds in ranges.values()))
        self.scaler = Scaler(
            self.gateway, counts, ranged, rules, self.store, clock=lambda: self.now
        )
        self.num = 0

    async def overload(self, rate: float) -> list[str]:
        """Three periods of prompts that nobody answers; what was decided."""
        kinds = []
        for _ in range(3):
            for i in range(int(10 * rate)):
                self.num += 1
                self.gateway.demand.arrived(str(self.num), 2000, 9, 2.0, 0.1, self.now + i / rate)
            self.now += 10
            kinds.append((await self.scaler.step()).kind)
        return kinds


async def test_what_is_decided_is_done_told_and_kept() -> None:
    rig = Rig(Fixed(view("mixed-a", "mixed")), Counts(mixed=1), mixed=(1, 3))
    assert ADD in await rig.overload(2.0)
    pool, num = rig.counts.said[0]
    assert pool == "mixed" and num > 1
    status = rig.scaler.status()
    assert status["targets"] == {"mixed": rig.counts.said[-1][1]}
    assert "prefill side" in status["changes"][-1]["reason"]
    kept = await rig.store.scan("scaling:")
    assert [change["pool"] for change in kept.values()] == ["mixed"] * len(rig.counts.said)
    metrics = rig.gateway.metrics.render().decode()
    assert 'evenflow_scale_decisions_total{kind="add",model_name="m"}' in metrics


async def test_a_flip_is_a_role_that_the_worker_confirms() -> None:
    pools = Fixed(view("prefill-a", "prefill"), *(view(f"decode-{i}", "decode") for i in range(3)))
    rig = Rig(pools, Counts(prefill=1, decode=3), prefill=(1, 1), decode=(3, 3))
    assert FLIP in await rig.overload(1.0)
    assert sorted(v.role for v in pools.workers()) == ["decode", "decode", "prefill", "prefill"]
    assert not rig.counts.said


async def test_a_person_scales_within_the_range() -> None:
    rig = Rig(Fixed(view("mixed-a", "mixed")), Counts(mixed=1), mixed=(1, 3))
    await rig.scaler.scale("mixed", 3)
    assert rig.counts.said == [("mixed", 3)]
    with pytest.raises(BadRequest):
        await rig.scaler.scale("mixed", 4)
    with pytest.raises(NotFound):
        await rig.scaler.scale("decode", 1)


async def test_one_of_several_gateways_scales_and_the_next_takes_over() -> None:
    """The eldest leads; the others neither decide nor keep what they no longer need."""
    store, elder, younger = MemoryStore(), *(_crowded() for _ in range(2))
    for rig in (elder, younger):
        rig.gateway.peers = Peers(store, dict, period_s=0.001)
        rig.gateway.peers.start()
        await asyncio.sleep(0.01)
    await _until(lambda: len(elder.gateway.peers.all()) == 2)
    assert elder.gateway.peers.leads and not younger.gateway.peers.leads
    assert set(await younger.overload(2.0)) == {HOLD} and not younger.counts.said
    assert "another gateway" in younger.scaler.status()["now"]["reason"]
    assert ADD in await elder.overload(2.0)
    await elder.gateway.peers.stop()
    await _until(lambda: younger.gateway.peers.is_alone)
    assert ADD in await younger.overload(2.0)
    await younger.gateway.peers.stop()


def _crowded() -> Rig:
    return Rig(Fixed(view("mixed-a", "mixed")), Counts(mixed=1), mixed=(1, 3))


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.001)


async def test_an_error_of_one_period_does_not_end_the_next() -> None:
    rig = Rig(Fixed(view("mixed-a", "mixed")), Counts(mixed=1), mixed=(1, 3))
    fails = iter([True, False])
    inner = rig.counts.targets

    async def targets() -> Mapping[str, int]:
        if next(fails):
            raise OSError("Ray is busy")
        return await inner()

    rig.counts.targets = targets  # type: ignore[method-assign]
    task = asyncio.create_task(Scaler.run(_quick(rig)))
    for _ in range(200):
        await asyncio.sleep(0.01)
        if rig.scaler.status()["now"] is not None:
            break
    task.cancel()
    assert rig.scaler.status()["targets"] == {"mixed": 1}


def _quick(rig: Rig) -> Scaler:
    rig.scaler._rules = ScaleRules(period_s=0.01)
    return rig.scaler


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scaling.mixed": "4-1"}, "scaling.mixed"),
        ({"scaling.mixed": "two"}, "scaling.mixed"),
        ({"scaling.mixed": "2-4"}, "starts with 1 workers"),
        ({"scaling.mixed": "1-4", "scaling.max_workers": 1}, "scaling.max_workers"),
        ({"scaling.mixed": "1-4", "scaling.period": "0s"}, "scaling.period"),
    ],
)
def test_ranges_that_make_no_sense_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, settings)


def test_without_a_range_nothing_scales() -> None:
    assert not load_config(None, {}).scaling.is_on
    config = load_config(None, {"scaling.mixed": "1-4", "scaling.max_workers": 3})
    assert config.scaling.is_on and config.most_workers == 3

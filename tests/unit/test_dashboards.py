"""Every query of the dashboard and the alerts finds its metrics and labels at our /metrics."""

import asyncio
import functools
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from serving.pools import Submission, WorkerLost
from tests.fakes import Event, FakePools, hashed, worker
from tests.front import front

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "evenflow.json").read_text())
ALERTS = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())
NAME = re.compile(r"(?<![\w:$\"])((?:vllm:|evenflow_|up\b)[\w:]*)(?:\{([^}]*)\})?")
BUG = 9  # a prompt's last token that breaks the worker
BY = re.compile(r"by \(([^)]*)\)")


def queries() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


@functools.cache
def exported() -> dict[str, set[str]]:
    return asyncio.run(scraped())


async def scraped() -> dict[str, set[str]]:
    """The labels of each metric, after requests of every fate."""

    def script(name: str, submission: Submission, position: int) -> Event:
        if submission.request.prompt[-1] == BUG:
            return RuntimeError("a bug")
        if name == "mixed-1":
            return WorkerLost("it died")
        return hashed()(name, submission, position)

    door = front(FakePools(*map(worker, ("prefill-0", "decode-0", "mixed-0", "mixed-1")),
                           script=script))  # fmt: skip
    for mode in ("mixed", "disaggregated"):
        for _ in range(4):
            await door.complete("Hi", max_tokens=4, evenflow={"mode": mode})
    await door.complete("Hi", evenflow={"mode": "mixed", "worker": "mixed-1"})
    await door.complete([BUG], max_tokens=4, evenflow={"mode": "mixed"})
    found: dict[str, set[str]] = defaultdict(set)
    for line in (await door.http.get("/metrics")).text.splitlines():
        if not line.startswith("#"):
            name, _, rest = line.partition("{")
            found[name] |= set(re.findall(r'(\w+)="', rest.rpartition("}")[0]))
    found["up"] = {"job"}
    return found


@pytest.mark.parametrize(("title", "query"), queries(), ids=lambda value: value[:40])
def test_every_query_finds_its_metrics_and_labels(title: str, query: str) -> None:
    metrics = exported()
    used = NAME.findall(query)
    assert used, query
    for name, selector in used:
        assert name in metrics, f"{title}: {name} is not exported"
        for label in re.findall(r"(\w+)\s*(?:=~|!=|=)", selector):
            assert label in metrics[name], f"{title}: {name} has no label {label}"
    for group in BY.findall(query):
        for label in filter(None, (part.strip() for part in group.split(","))):
            assert any(label in metrics[name] for name, _ in used), f"{title}: by {label}"
    assert query.count("(") == query.count(")")


def test_the_bounds_in_queries_are_bounds_of_the_histograms() -> None:
    from serving.metrics import ITL_BUCKETS, TTFT_BUCKETS

    bounds = {"inter_token": ITL_BUCKETS, "first_token": TTFT_BUCKETS}
    pattern = re.compile(r"vllm:(?:time_to_)?(inter_token|first_token)\w*\{([^}]*)")
    for _, query in queries():
        for metric, selector in pattern.findall(query):
            for bound in re.findall(r'le="([^"]+)"', selector):
                assert float(bound) in bounds[metric], query


def test_the_dashboard_can_be_provisioned() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids) and DASHBOARD["uid"] == "evenflow"
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["x"] + place["w"] <= 24
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"

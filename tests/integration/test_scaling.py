"""Clocks 3 and 4 on a real Ray: a worker flips, Serve adds a replica and takes it away again, and
nobody who listens to a stream notices."""

import json
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Running, command, start_serve, wait_until

pytestmark = pytest.mark.cluster

STREAM_TOKENS = 2500
PROMPT_TOKENS = 1000
CONFIG = """
step_faults: slow_s=0.03
max_num_batched_tokens: 64
num_pages: 4096
dtype: float32
drain_s: 30
mixed: 0
prefill: 1
decode: 2
slo: {ttft: 2s, itl: 1s}
scaling:
  prefill: 1-2
  decode: 2-2
  period: 1s
  window: 10s
  look_back: 6s
  cool_down: 6s
"""


@pytest.fixture
def elastic(t0_with_tokenizer: Path, tmp_path: Path) -> Iterator[Running]:
    """A prefill worker and two decode workers, which compute 64 tokens in each 30 ms at most."""
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    running = start_serve(t0_with_tokenizer, tmp_path / "stderr", "--config", str(config))
    yield running
    running.stop()
    assert not running.descendants(), "serve left processes behind"


def test_roles_and_replicas_follow_the_load_and_no_stream_is_cut(elastic: Running) -> None:
    with ThreadPoolExecutor(64) as pool, PromptLoad(elastic, pool) as load:
        streams = [pool.submit(stream, elastic, i) for i in range(6)]
        wait_until(lambda: sum(decodes(elastic).values()) == 6, 30, "six streams run")

        load.start(rate=4.0)
        wait_until(lambda: "flip" in kinds(elastic), 60, "a decode worker flips")
        wait_until(lambda: "add" in kinds(elastic), 60, "a prefill replica is asked for")
        wait_until(lambda: roles(elastic) == ["decode"] + 3 * ["prefill"], 90, "it is there")

        load.stop()
        wait_until(lambda: "remove" in kinds(elastic), 120, "a replica is let go")
        wait_until(lambda: len(elastic.workers()) == 3, 60, "it has left")

        for answer in (future.result(timeout=180) for future in streams):
            assert answer["usage"]["completion_tokens"] == STREAM_TOKENS
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["evenflow"]["fallback"] is None, "it went on from its pages"
        assert load.errors == []

    changes = scaling(elastic)["changes"]
    assert all(change["reason"] for change in changes)
    shown = subprocess.run(
        command("status", "--url", elastic.url), capture_output=True, text=True, timeout=60
    ).stdout
    assert "scaling: prefill 1, decode 2" in shown and "no GPU is needed" in shown
    with elastic.client() as client:
        metrics = client.get("/metrics").text
    assert 'evenflow_scale_decisions_total{kind="add"' in metrics


class PromptLoad:
    """Prompts of 1,000 tokens at a steady rate, with one token each for an answer."""

    def __init__(self, running: Running, pool: ThreadPoolExecutor) -> None:
        self._running, self._pool = running, pool
        self._over = threading.Event()
        self._sent: list[Future[dict[str, Any]]] = []
        self._thread: threading.Thread | None = None
        self.errors: list[str] = []

    def __enter__(self) -> "PromptLoad":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self, rate: float) -> None:
        self._thread = threading.Thread(target=self._send, args=(rate,))
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        for future in self._sent:
            answer = future.result(timeout=120)
            if "choices" not in answer:
                self.errors.append(json.dumps(answer))
        self._sent.clear()

    def _send(self, rate: float) -> None:
        number = 0
        while not self._over.wait(1 / rate):
            number += 1
            prompt = [100 + (number * 7919 + i * 31) % 40000 for i in range(PROMPT_TOKENS)]
            self._sent.append(self._pool.submit(complete, self._running, prompt, 1))


def stream(running: Running, number: int) -> dict[str, Any]:
    return complete(running, [100 + number] * 8, STREAM_TOKENS)


def complete(running: Running, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    with running.client() as client:
        answer = client.post("/v1/completions", json=body, timeout=300)
    return dict(answer.json())


def scaling(running: Running) -> dict[str, Any]:
    with running.client() as client:
        return dict(client.get("/v1/evenflow/status").json()["scaling"])


def kinds(running: Running) -> list[str]:
    return [change["kind"] for change in scaling(running)["changes"]]


def roles(running: Running) -> list[str]:
    return sorted(str(worker["role"]) for worker in running.workers().values())


def decodes(running: Running) -> dict[str, int]:
    return {name: w["load"]["decode_seqs"] for name, w in running.workers().items()}  # type: ignore[index]

"""The real command on a real Ray: both modes, membership, failures, and nothing left behind."""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.integration.conftest import Running, command, processes_of, start_serve, wait_until

pytestmark = pytest.mark.cluster

PROMPT = list(range(100, 180))


def complete(running: Running, mode: str, max_tokens: int = 16, **options: object) -> dict:
    body = {
        "prompt": PROMPT,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "evenflow": {"mode": mode},
        **options,
    }
    with running.client() as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def run(*arguments: str, timeout_s: float = 60) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=timeout_s)


def test_both_modes_answer_with_the_same_tokens(evenflow: Running) -> None:
    mixed, split = complete(evenflow, "mixed"), complete(evenflow, "disaggregated")
    assert mixed["choices"][0]["token_ids"] == split["choices"][0]["token_ids"]
    assert len(mixed["evenflow"]["workers"]) == 1
    first, second = split["evenflow"]["workers"]
    assert first.startswith("prefill-") and second.startswith("mixed-")
    assert split["evenflow"]["transfer_s"] > 0 and split["evenflow"]["fallback"] is None


def test_status_shows_every_worker(evenflow: Running) -> None:
    table = run("status", "--url", evenflow.url)
    assert table.returncode == 0
    assert "mixed-" in table.stdout and "prefill-" in table.stdout
    facts = json.loads(run("status", "--url", evenflow.url, "--json").stdout)
    assert sorted(worker["role"] for worker in facts["workers"]) == ["mixed", "prefill"]


def test_the_demo_runs_against_a_running_evenflow(evenflow: Running) -> None:
    arguments = ("--url", evenflow.url, "--prompt-tokens", "1000", "--json")
    demo = run("demo", *arguments, timeout_s=120)
    assert demo.returncode == 0, demo.stderr
    results = json.loads(demo.stdout)
    assert [result["mode"] for result in results] == ["mixed", "disaggregated"]
    for result in results:
        assert len(result["requests"]) == 9
        assert all(request["mode"] == result["mode"] for request in result["requests"])
        assert result["gap_during_max_s"] > 0
    plain = run("demo", "--url", evenflow.url, "--prompt-tokens", "100", "--streams", "2")
    assert plain.returncode == 0 and "mixed on mixed-" in plain.stdout


def test_a_demo_that_is_refused_says_why(evenflow: Running) -> None:
    demo = run("demo", "--url", evenflow.url, "--prompt-tokens", "100000")
    assert demo.returncode == 1
    assert demo.stderr.startswith("evenflow: prompt_tokens: 100000 is more than")


def test_a_killed_worker_is_replaced_and_its_requests_go_on(evenflow: Running) -> None:
    expected = complete(evenflow, "mixed", max_tokens=1500)["choices"][0]["token_ids"]
    (victim,) = (name for name, w in evenflow.workers().items() if w["role"] == "mixed")
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(complete, evenflow, "mixed", max_tokens=1500)
        wait_until(
            lambda: evenflow.workers()[victim]["load"]["decode_seqs"],  # type: ignore[index]
            30,
            "the request is running on the mixed worker",
        )
        os.kill(replica_pid(evenflow, "mixed"), signal.SIGKILL)
        got = answer.result(timeout=60)
    assert got["choices"][0]["token_ids"] == expected
    assert victim in got["evenflow"]["fallback"]
    wait_until(
        lambda: sorted(str(w["role"]) for w in evenflow.workers().values()) == ["mixed", "prefill"],
        60,
        "another mixed worker is attached",
    )
    assert victim not in evenflow.workers()
    assert complete(evenflow, "disaggregated")["evenflow"]["fallback"] is None


def test_a_killed_gateway_comes_back_on_its_ports(evenflow: Running) -> None:
    os.kill(replica_pid(evenflow, "gateway"), signal.SIGKILL)
    wait_until(lambda: not is_ready(evenflow), 10, "the gateway is gone")
    wait_until(lambda: is_ready(evenflow) and len(evenflow.workers()) == 2, 60, "it is back")
    assert complete(evenflow, "disaggregated")["evenflow"]["fallback"] is None
    wait_until(lambda: is_clean(evenflow), 5, "what the old gateway had submitted is gone")


def test_a_killed_controller_of_serve_stops_no_stream_and_comes_back(evenflow: Running) -> None:
    """It decides about replicas; no token passes through it."""
    expected = complete(evenflow, "mixed", max_tokens=1500)["choices"][0]["token_ids"]
    before, workers = controller_pid(evenflow), set(evenflow.workers())
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(complete, evenflow, "mixed", max_tokens=1500)
        wait_until_some(evenflow, "decode_seqs")
        os.kill(before, signal.SIGKILL)
        assert complete(evenflow, "disaggregated")["evenflow"]["fallback"] is None
        got = answer.result(timeout=60)
    assert got["choices"][0]["token_ids"] == expected and got["evenflow"]["fallback"] is None
    wait_until(lambda: controller_pid(evenflow) not in (0, before), 30, "another controller runs")
    assert set(evenflow.workers()) == workers


def test_a_thousand_requests_with_random_aborts_leave_nothing(evenflow: Running) -> None:
    outcomes = asyncio.run(storm(evenflow.url, 1000, random.Random(7)))
    assert set(outcomes) == {"answered", "left"}, Counter(outcomes)
    wait_until(lambda: is_clean(evenflow), 5, "every page is free")
    for worker in evenflow.workers().values():
        load = worker["load"]
        assert isinstance(load, dict)
        assert (load["waiting_seqs"], load["running_seqs"], load["leased_pages"]) == (0, 0, 0)


async def storm(url: str, number: int, rng: random.Random) -> list[str]:
    """Random requests in both modes, 32 at a time; two in five clients leave early."""
    room = asyncio.Semaphore(32)

    async def one(client: httpx.AsyncClient) -> str:
        body = {
            "prompt": [rng.randrange(3, 49152) for _ in range(rng.randint(1, 150))],
            "max_tokens": rng.randint(1, 30),
            "n": rng.choice((1, 1, 1, 2)),
            "stream": rng.random() < 0.5,
            "seed": rng.randrange(2**31),
            "evenflow": {"mode": rng.choice(("auto", "mixed", "disaggregated"))},
        }
        patience_s = rng.uniform(0.0, 0.1) if rng.random() < 0.4 else 60.0
        async with room:
            try:
                async with asyncio.timeout(patience_s):
                    answer = await client.post("/v1/completions", json=body)
                return "answered" if answer.status_code == 200 else answer.text
            except TimeoutError:
                return "left" if patience_s < 60 else "stuck"

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, timeout=90, trust_env=False, limits=limits
    ) as client:
        return await asyncio.gather(*(one(client) for _ in range(number)))


def wait_until_some(running: Running, count: str) -> None:
    """Until the load of some worker has a request of that kind."""
    wait_until(
        lambda: any(w["load"][count] for w in running.workers().values()),  # type: ignore[index]
        30,
        "the request is running",
    )


def is_clean(running: Running) -> bool:
    """Nobody holds a page on any worker."""
    with running.client() as client:
        ledgers = client.get("/debug/kv").json()
    return all(
        not ledger["owned"] and not ledger["leased"] and ledger["free"] == ledger["num_pages"]
        for ledger in ledgers.values()
    )


def is_ready(running: Running) -> bool:
    try:
        with running.client() as client:
            return client.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def replica_pid(running: Running, pool: str) -> int:
    pid = pid_of(running, f"ServeReplica:evenflow:{pool}")
    assert pid, f"no replica of {pool}"
    return pid


def controller_pid(running: Running) -> int:
    return pid_of(running, "ServeController")


def pid_of(running: Running, actor: str) -> int:
    """0 when there is none."""
    for pid in running.descendants():
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            if actor.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return 0


def test_a_second_serve_finds_its_port_taken(evenflow: Running) -> None:
    port = evenflow.url.rsplit(":", 1)[-1]
    second = run("serve", "--http-port", port, "--grpc-port", "0", "--ray", "local")
    assert second.returncode == 1
    assert f":{port} is in use" in second.stderr and second.stderr.count("\n") == 1


def test_sigterm_lets_running_requests_finish(t0_with_tokenizer: Path, tmp_path: Path) -> None:
    arguments = ("--dtype", "float32", "--num-pages", "512", "--mixed", "1", "--prefill", "0")
    running = start_serve(t0_with_tokenizer, tmp_path / "stderr", *arguments)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(complete, running, "mixed", max_tokens=1000)
        wait_until_some(running, "running_seqs")
        stop = threading.Thread(target=running.stop, args=(signal.SIGTERM,))
        stop.start()
        assert len(answer.result(timeout=60)["choices"][0]["token_ids"]) == 1000
        stop.join(timeout=60)
    assert running.process.returncode == 0
    assert not processes_of(running.mark)


def test_a_model_that_does_not_fit_ends_in_one_line(
    t0_with_tokenizer: Path, tmp_path: Path
) -> None:
    log = tmp_path / "stderr"
    with pytest.raises(AssertionError, match="serve ended with 1"):
        start_serve(t0_with_tokenizer, log, "--num-pages", str(10**9), "--prefill", "0")
    *progress, last = log.read_text().splitlines()
    assert last.startswith("evenflow: Serve could not start it: ")
    assert all(line.endswith("...") for line in progress), progress

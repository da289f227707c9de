"""A machine that dies, as far as one machine can show it: two Ray nodes, each with its worker."""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from serving.deployments.launch import ENVIRONMENT
from tests.integration.conftest import ROOT, Running, start_serve, wait_until
from tests.integration.test_ray import complete

pytestmark = pytest.mark.cluster

NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 << 20}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head for the gateway and one worker; its nodes' processes import what is tested here."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, sys.path)]))
    from ray.cluster_utils import Cluster

    resources = {"evenflow_gateway": 1, "evenflow_mixed": 1}
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "resources": resources})
    yield cluster
    cluster.shutdown()


def decode_worker(running: Running) -> dict[str, Any]:
    """Its load; empty when none is attached."""
    for worker in running.workers().values():
        if worker["role"] == "decode":
            return dict(worker["load"])  # type: ignore[call-overload]
    return {}


def test_a_node_that_dies_takes_no_stream_with_it(
    cluster: Any, t0_with_tokenizer: Path, tmp_path: Path
) -> None:
    """And those that are left serve on."""
    node = cluster.add_node(resources={"evenflow_decode": 1}, **NODE)
    config = tmp_path / "config.yaml"
    config.write_text("placement: labelled\n")
    where = ("--ray", cluster.address, "--config", str(config))
    pools = ("--mixed", "1", "--prefill", "0", "--decode", "1")
    size = ("--dtype", "float32", "--num-pages", "512")
    running = start_serve(t0_with_tokenizer, tmp_path / "stderr", *where, *pools, *size)
    try:
        wait_until(lambda: len(running.workers()) == 2, 60, "both workers are attached")
        expected = complete(running, "mixed", max_tokens=1500)["choices"][0]["token_ids"]
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(complete, running, "disaggregated", max_tokens=1500)
            wait_until(lambda: decode_worker(running).get("decode_seqs"), 30, "it decodes there")
            cluster.remove_node(node, allow_graceful=False)
            got = answer.result(timeout=60)
        assert got["choices"][0]["token_ids"] == expected
        assert "was lost after" in got["evenflow"]["fallback"]
        wait_until(lambda: not decode_worker(running), 10, "nobody counts on the lost worker")
        assert complete(running, "auto")["evenflow"]["fallback"] is None
    finally:
        running.stop()

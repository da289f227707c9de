"""Canary prompts through a real deployment, and then a look into everything that it wrote."""

import re
from pathlib import Path

import pytest

from tests.integration.conftest import Running

pytestmark = pytest.mark.cluster
CANARY = "canary 9c1e77 sings"


def log_folders(running: Running) -> set[Path]:
    """Of the Ray sessions that the run's processes belong to."""
    found = set()
    for pid in running.descendants():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        found |= set(re.findall(r"/[^\0= ]*/session_[^/\0 ]+", command))
    return {Path(folder) / "logs" for folder in found}


def test_prompts_are_in_no_log_of_the_deployment(evenflow: Running) -> None:
    """FAULTS 125."""
    with evenflow.client() as client:
        for mode in ("mixed", "disaggregated"):
            body = {"prompt": CANARY, "max_tokens": 4, "evenflow": {"mode": mode}}
            assert client.post("/v1/completions", json=body).status_code == 200
        bad = ({"n": 0}, {"prompt": CANARY * 100_000}, {"prompt": [CANARY, {}]})
        for wrong in bad:
            wrong = {"prompt": CANARY, **wrong}
            answer = client.post("/v1/completions", json=wrong)
            assert answer.status_code == 400 and "canary" not in answer.text
        body = {"prompt": CANARY, "max_tokens": 500, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            next(stream.iter_lines())  # and leave in the middle
        assert "canary" not in client.get("/metrics").text
    folders = log_folders(evenflow)
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        assert CANARY.encode() not in path.read_bytes(), path

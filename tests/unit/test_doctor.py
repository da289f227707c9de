"""Each finding says ok, or how to mend it."""

import json
import socket
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serving import doctor
from serving.cli import app

PORTS = ("--http-port", "0", "--grpc-port", "0")


def test_this_machine_is_examined_line_by_line() -> None:
    result = CliRunner().invoke(app, ["doctor", *PORTS])
    names = [line[6:].split("  ")[0].strip() for line in result.output.splitlines()]
    for name in ("Python", "torch", "GPUs", "flash-attn", "NCCL", "compiler", "Ray"):
        assert name in names
    for name in ("running Ray", "memory", "demo model", "packages"):
        assert name in names
    assert result.exit_code == ("fail" in result.output)


def test_findings_for_machines_are_json() -> None:
    result = CliRunner().invoke(app, ["doctor", *PORTS, "--json"])
    findings = json.loads(result.output)
    assert {finding["state"] for finding in findings} <= {"ok", "note", "fail"}


def test_a_taken_port_is_a_note_with_a_way_out() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        finding = doctor.check_port("127.0.0.1", sock.getsockname()[1], "grpc")
    assert finding.state == "note" and "--grpc-port" in finding.text


def test_a_gpu_without_nccl_fails_and_flash_attn_is_optional() -> None:
    found = {f.name: f for f in doctor.describe_devices(["NVIDIA_H200"], [], [])}
    assert found["GPUs"].text == "NVIDIA H200"
    assert found["NCCL"].state == "fail"
    assert found["flash-attn"].state == "ok"
    assert found["CUDA path"].text.startswith("contract-tested on CPUs; last run on hardware: ")


def test_the_last_run_on_a_gpu_is_told_from_its_record(tmp_path: Path) -> None:
    record = tmp_path / "gpu.json"
    assert doctor.last_gpu_run(record) == "last run on hardware: never"
    run = {"at": "2027-01-01", "gpu": "NVIDIA H200", "commit": "abc", "tests": "30 passed"}
    record.write_text(json.dumps(run))
    assert doctor.last_gpu_run(record).endswith("2027-01-01, NVIDIA H200, commit abc: 30 passed")
    record.write_text("[]")
    assert "cannot be read" in doctor.last_gpu_run(record)


def test_the_readme_says_the_same() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert doctor.last_gpu_run() in " ".join(readme.split())


def test_a_cpu_is_described_by_what_it_computes_in() -> None:
    (gpus, *others) = doctor.describe_devices([], [], ["avx512_bf16"])
    assert gpus.state == "ok" and "bfloat16" in gpus.text
    assert all(finding.state == "ok" for finding in others)


def test_another_package_of_our_name_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "workers_of_others-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: workers-of-others\nVersion: 1.0\n")
    (info / "top_level.txt").write_text("workers\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    finding = doctor.check_packages()
    assert finding.state == "fail"
    assert finding.text == "workers-of-others takes our names: pip uninstall it here"

"""Twenty planted bugs of kinds that systems like this one have had: which do the tests see?

    python -m bench.mutations

Copies the sources, plants one bug at a time and runs the unit tests closest to it: files of the
suite that runs on every commit. Prints a row per bug and writes ``bench/results/mutations.jsonl``.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.report import save

ROOT = Path(__file__).parents[1]
COPIED = ("bench", "deploy", "kvtransfer", "protos", "serving", "tests", "workers")
TIMEOUT_S = 600
SCHEDULER, ENGINE, GATEWAY = "workers/core/scheduler.py", "workers/engine.py", "serving/gateway.py"
LEDGER, LOOPBACK = "kvtransfer/core/ledger.py", "kvtransfer/loopback.py"


@dataclass(frozen=True, slots=True)
class Bug:
    """``old`` occurs once in ``file`` and becomes ``new``; ``tests`` are those closest to it."""

    name: str
    file: str
    old: str
    new: str
    tests: str


BUGS = (
    Bug(
        "free leased pages while a send reads them",
        LEDGER,
        "if lease.num_sends:\n            self._closing",
        "if False:\n            self._closing",
        "ledger loopback",
    ),
    Bug(
        "an expired lease still sends",
        LEDGER,
        "(lease.num_sends == 0 and lease.expires_at <= now)",
        "False",
        "ledger",
    ),
    Bug(
        "renewing is forgotten",
        LEDGER,
        "lease.expires_at = min(now + self.lease_s, lease.ends_at)",
        "pass",
        "ledger engine",
    ),
    Bug(
        "a release frees pages twice",
        LEDGER,
        "lease = self._leases.pop(request_id, None)",
        "lease = self._leases.get(request_id)",
        "ledger",
    ),
    Bug(
        "skip the incarnation check",
        LOOPBACK,
        "if member.incarnation != handle.incarnation:",
        "if False:",
        "loopback",
    ),
    Bug(
        "skip the layout check",
        LOOPBACK,
        "if mismatch is not None:",
        "if False:",
        "loopback",
    ),
    Bug(
        "keep the lease after the pages were fetched",
        LOOPBACK,
        "        source.leases.release(handle.request_id)\n\n    def fetch_early",
        "\n    def fetch_early",
        "loopback engine early",
    ),
    Bug(
        "believe a copy of revoked pages",
        "kvtransfer/core/promises.py",
        "return promise is not None and promise.pages[: len(pages)] == pages",
        "return True",
        "early",
    ),
    Bug(
        "promise a page that is only half computed",
        ENGINE,
        "seq.num_computed // page_size)",
        "-(-seq.num_computed // page_size))",
        "equivalence early",
    ),
    Bug(
        "drop the completion of a fetch",
        ENGINE,
        "self._inbox.put(lambda: self._fetch_ended(seq, fetched))",
        "pass",
        "engine early",
    ),
    Bug(
        "take a failed transfer for a landed one",
        ENGINE,
        "if self._scheduler.fetch_ended(seq, landed=failure is None)",
        "if self._scheduler.fetch_ended(seq, landed=True)",
        "engine matrix",
    ),
    Bug(
        "an abort forgets the lease",
        ENGINE,
        "        self._leases.release(request_id)\n",
        "",
        "engine channel",
    ),
    Bug(
        "free pages of an aborted fetch while they fill",
        SCHEDULER,
        "elif seq.phase is not Phase.FETCHING:",
        "else:",
        "scheduler engine early",
    ),
    Bug(
        "the last token of a prompt is not sampled",
        SCHEDULER,
        "samples = start + length == seq.num_tokens",
        "samples = start + length == seq.num_tokens - 1",
        "scheduler",
    ),
    Bug(
        "off by one at a page border",
        SCHEDULER,
        "to_border = page_size - seq.num_computed % page_size",
        "to_border = page_size - seq.num_computed % page_size + 1",
        "scheduler equivalence",
    ),
    Bug(
        "a preempted sequence keeps its count of computed tokens",
        SCHEDULER,
        "        seq.num_computed = seq.num_cached = 0\n",
        "",
        "scheduler equivalence",
    ),
    Bug(
        "one token too many",
        "workers/core/request.py",
        "len(self.output) >= self.max_output",
        "len(self.output) > self.max_output",
        "scheduler engine",
    ),
    Bug(
        "count the hand-off's token twice",
        GATEWAY,
        "        seq.output.append(output.token.id)\n",
        "        seq.output.extend([output.token.id] * (1 + (output.handle is not None)))\n",
        "gateway",
    ),
    Bug(
        "a replay forgets what was delivered",
        "serving/running.py",
        "return Submission(self.request, tuple(self.output), hand_off, handle)",
        "return Submission(self.request, (), hand_off, handle)",
        "gateway channel",
    ),
    Bug(
        "let only the last worker go",
        GATEWAY,
        "for worker, request_id in reversed(seq.touched):",
        "for worker, request_id in seq.touched[-1:]:",
        "gateway trouble",
    ),
)


def is_caught(bug: Bug, tree: Path) -> str:
    """The first test that fails, or "" when none does."""
    path = tree / bug.file
    source = path.read_text()
    if source.count(bug.old) != 1:
        raise SystemExit(f"{bug.name}: {bug.file} has {source.count(bug.old)} such places, not one")
    path.write_text(source.replace(bug.old, bug.new))
    try:
        near = [f"tests/unit/test_{name}.py" for name in bug.tests.split()]
        return _first_failure(tree, near)
    finally:
        path.write_text(source)


def _first_failure(tree: Path, tests: list[str]) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not cluster and not model"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", *tests],
            cwd=tree,
            env=env,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return "it hangs"
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0].split(" - ")[0].split("::")[-1] if lines else f"exit {done.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="bugs whose name contains this")
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in COPIED:
            shutil.copytree(ROOT / name, tree / name)
        shutil.copy(ROOT / "pyproject.toml", tree)
        for bug in BUGS:
            if args.only in bug.name:
                caught = is_caught(bug, tree)
                rows.append({"bug": bug.name, "file": bug.file, "caught_by": caught})
                print(f"{bug.name}: {caught or 'MISSED'}", flush=True)
    table = Table(title="Planted bugs, and the first test that sees each")
    for column in ("bug", "file", "caught_by"):
        table.add_column(column.replace("_", " "))
    for row in rows:
        table.add_row(*(str(value) or "MISSED" for value in row.values()))
    Console(width=160).print(table)
    num_caught = sum(bool(row["caught_by"]) for row in rows)
    print(f"{num_caught} of {len(rows)} caught")
    if not args.only:
        save("mutations", rows, num_caught=num_caught)


if __name__ == "__main__":
    main()

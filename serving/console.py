"""How the command line looks: progress, tables and lines, on a terminal or as plain text.

It draws facts that others found out, and finds out nothing itself.
"""

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from serving.config import ROLES, Config
from serving.explain import lines

SHOWN_CHANGES = 5  # of the autoscaler
PLAIN_WIDTH = 160  # of tables in a file or a pipe


def _console(stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


out, err = _console(stderr=False), _console(stderr=True)


class Progress:
    """What is going on now: a spinner on a terminal, a line per stage elsewhere."""

    def __init__(self) -> None:
        self._status = err.status("") if err.is_terminal else None
        self._last = ""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def say(self, stage: str) -> None:
        if self._status is not None:
            self._status.update(f"{_plain(stage)} ...")
            self._status.start()
        elif stage != self._last:
            err.print(f"{_plain(stage)} ...")
        self._last = stage

    def close(self) -> None:
        """Until something is said again."""
        if self._status is not None:
            self._status.stop()


def done(message: str) -> None:
    """One line on stdout."""
    out.print(_plain(message))


def explanation(answer: dict[str, Any]) -> None:
    """Where a request ran and why, in lines that are not broken anywhere else."""
    for line in lines(answer):
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def problem(message: str) -> None:
    """One line on stderr."""
    err.print(f"[bold red]evenflow:[/] {_plain(' '.join(message.split()))}")


def welcome(config: Config, model: str, url: str, grpc: str) -> None:
    """The endpoints, and a line to copy."""
    pools = ", ".join(f"{n} {role}" for role in ROLES if (n := config.count(role)))
    flags = f" --cacert {config.tls.cert}" if config.tls.is_on else ""
    flags += ' --oauth2-bearer "$EVENFLOW_API_KEY"' if config.api_keys else ""
    body = (
        f'{{"model": "{model}", "stream": true, "messages": '
        '[{"role": "user", "content": "Why is the sky blue?"}]}'
    )
    out.print(f"\n[bold]Evenflow[/] serves [bold]{_plain(model)}[/] (workers: {pools})")
    out.print(f"  HTTP  {url}/v1")
    out.print(f"  gRPC  {grpc}")
    out.print("\nTry it:", style="dim")
    content_type = "-H 'content-type: application/json'"
    out.print(
        f"  curl -N{flags} {url}/v1/chat/completions {content_type} -d '{body}'", markup=False
    )
    out.print("\nCtrl-C ends it.", style="dim")


def status_table(status: Mapping[str, Any]) -> None:
    """One row per worker."""
    table = Table(title=f"{status['model']}: {status['num_calls']} running requests")
    for name in ("worker", "role"):
        table.add_column(name)
    for name in ("waiting", "running", "prompt tokens queued", "pages used", "leased", "step ms"):
        table.add_column(name, justify="right")
    for worker in sorted(status["workers"], key=lambda w: w["id"]):
        load = worker["load"]
        used = load["num_pages"] - load["free_pages"] - load["leased_pages"]
        table.add_row(
            worker["id"],
            worker["role"] + (" (drained)" if worker.get("is_leaving") else ""),
            str(load["waiting_seqs"]),
            str(load["running_seqs"]),
            str(load["queued_tokens"]),
            f"{used}/{load['num_pages']}",
            str(load["leased_pages"]),
            f"{load['step_s'] * 1000:.0f}",
        )
    out.print(table)
    if status.get("scaling"):
        _scaling(status["scaling"])


def _scaling(scaling: Mapping[str, Any]) -> None:
    """What the autoscaler thinks now, and its last changes."""
    targets = ", ".join(f"{pool} {num}" for pool, num in scaling["targets"].items())
    now = scaling["now"]
    out.print(f"scaling: {targets}; {_plain(now['reason']) if now else 'no decision yet'}")
    for change in scaling["changes"][:SHOWN_CHANGES]:
        at = time.strftime("%H:%M:%S", time.localtime(change["at"]))
        out.print(f"  {at}  {_plain(change['what'])}: {_plain(change['reason'])}")


def new_key(name: str, key: str, sha256: str) -> None:
    """The key on stdout, where a pipe finds it alone; what to do with it on stderr."""
    err.print("The key, shown only now:")
    out.print(key, markup=False)
    err.print("The entry for the file that api_keys names:")
    err.print(f"keys:\n  - name: {name}\n    sha256: {sha256}", markup=False)


def check_line(name: str, state: str, text: str) -> None:
    """One line of the doctor: ok, note or fail."""
    style = {"ok": "green", "note": "yellow", "fail": "bold red"}[state]
    out.print(f"[{style}]{state:4}[/]  {name:12} {_plain(text)}")


def _plain(text: str) -> str:
    """Text that shows its brackets instead of styling by them."""
    return text.replace("[", "\\[")

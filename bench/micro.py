"""How near the model step and the scheduler come to what they could be, without any server.

    python -m bench.micro [--threads 1,2] [--dtype bfloat16] [--rounds 10]

Steps: SmolLM2 on the native kernels and on torch, in turn, at batch sizes and prompt lengths that
serving meets; each beside this machine's own limits, measured in the same run, and the share of
them that it reaches. Scheduler: seconds per planned and committed step with many sequences.
Writes ``bench/results/micro.jsonl``.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from bench.report import markdown, save
from workers.core.pages import PagePool
from workers.core.plan import Chunk
from workers.core.policy import Limits
from workers.core.request import Request, Sampling, Sequence
from workers.core.scheduler import Scheduler
from workers.kvcache import DTYPES
from workers.memory import use_huge_pages
from workers.models.config import ModelConfig
from workers.native.library import Kernels, kernels
from workers.runner import ModelRunner, load_runner
from workers.weights import resolve

PAGE_SIZE, NUM_PAGES = 16, 1100
READ_BYTES, DOT_ROUNDS = 256 << 20, 200_000


@dataclass(frozen=True)
class Load:
    """One step: so many sequences, each with these new tokens behind that context."""

    name: str
    num_seqs: int
    new: int
    context: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.new


LOADS = [
    Load("decode 1 @ 500", 1, 1, 500),
    Load("decode 8 @ 500", 8, 1, 500),
    Load("decode 32 @ 500", 32, 1, 500),
    Load("prefill 512", 1, 512),
    Load("prefill 2000", 1, 2000),
    Load("prefill 4000", 1, 4000),
    Load("64 more of 2000", 1, 64, 2000),
]


@dataclass(frozen=True)
class Roof:
    """What this machine can do at best."""

    read_bytes_s: float
    flops_s: float

    def least_s(self, load: Load, config: ModelConfig, item_bytes: int) -> float:
        """No step of this load can be faster: all its weights and pages come from memory while
        its multiplications are done."""
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        attended = load.new * load.context + load.new * (load.new + 1) / 2  # (query, key) pairs
        layer = config.hidden_size * (
            (2 * heads + 2 * kv_heads) * head_dim + 3 * config.intermediate_size
        )
        head = config.vocab_size * config.hidden_size
        kv = 2 * kv_heads * head_dim * (load.context + load.new) * load.num_seqs
        layers = config.num_layers
        num_bytes = item_bytes * (layers * (layer + kv) + head)
        flops = 2.0 * layers * load.num_tokens * layer + 2 * head * load.num_seqs
        flops += 4 * layers * heads * head_dim * attended * load.num_seqs
        return max(num_bytes / self.read_bytes_s, flops / self.flops_s)


def best(call: Callable[[], object], rounds: int = 5) -> float:
    return min(_seconds(call) for _ in range(rounds))


def measure_roof(native: Kernels, dtype: torch.dtype, threads: int) -> Roof:
    data = torch.empty(READ_BYTES, dtype=torch.uint8)
    use_huge_pages(data)
    data.fill_(1)
    is_bf16 = dtype == torch.bfloat16
    flops = native.call("multiply", is_bf16, DOT_ROUNDS, threads)
    return Roof(
        READ_BYTES / best(lambda: native.call("read_all", data, data.nbytes, threads)),
        flops / best(lambda: native.call("multiply", is_bf16, DOT_ROUNDS, threads)),
    )


def chunks_of(load: Load) -> tuple[Chunk, ...]:
    """The load's sequences over pages in random order. A step leaves them as they are."""
    generator = torch.Generator().manual_seed(0)
    free = torch.randperm(NUM_PAGES, generator=generator).tolist()
    size = load.context + load.new
    chunks = []
    for i in range(load.num_seqs):
        prompt = torch.randint(1000, 40000, (size,), generator=generator).tolist()
        seq = Sequence(Request(str(i), tuple(prompt), Sampling(temperature=0.0)))
        seq.num_computed = load.context
        seq.pages = [free.pop() for _ in range(-(-size // PAGE_SIZE))]
        chunks.append(Chunk(seq, load.context, load.new))
    return tuple(chunks)


def time_steps(runners: dict[str, ModelRunner], load: Load, rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, the runners in turn, so that a busy moment hits all."""
    chunks = chunks_of(load)
    repeats = 3 if load.num_tokens <= 64 else 1
    times: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(rounds if repeats > 1 else max(3, rounds // 3)):
        for name, runner in runners.items():
            step = partial(runner.run, chunks)
            times[name] += [_seconds(step) for _ in range(repeats)]
    return times


def measure_model(dtype: str, threads: Iterable[int], rounds: int) -> list[dict[str, object]]:
    native = kernels()
    if native is None:
        raise SystemExit("no native kernels on this machine: see the log")
    folder = resolve()
    runners = {
        name: load_runner(folder, dtype, page_size=PAGE_SIZE, num_pages=NUM_PAGES, isa=isa)
        for name, isa in (("native", native.isa), ("torch", "torch"))
    }
    config, precision = runners["native"].config, DTYPES[dtype]
    rows = []
    for num_threads in threads:
        torch.set_num_threads(num_threads)
        for load in LOADS:
            roof = measure_roof(native, precision, num_threads)
            times = time_steps(runners, load, rounds)
            median = {name: statistics.median(values) for name, values in times.items()}
            rows.append(
                {
                    "threads": num_threads,
                    "load": load.name,
                    **{f"{name}_ms": _round(value * 1e3) for name, value in median.items()},
                    "native_min_ms": _round(min(times["native"]) * 1e3),
                    "native_tok_s": _round(load.num_tokens / median["native"]),
                    "torch_tok_s": _round(load.num_tokens / median["torch"]),
                    "ratio": _round(median["torch"] / median["native"]),
                    "read_gb_s": _round(roof.read_bytes_s / 1e9),
                    "gflop_s": _round(roof.flops_s / 1e9),
                    "share": _round(
                        roof.least_s(load, config, precision.itemsize) / min(times["native"])
                    ),
                }
            )
            print(_line(rows[-1]), flush=True)
    return rows


def measure_scheduler(num_running: int, num_waiting: int) -> dict[str, object]:
    """Microseconds for plan and commit, every running sequence decoding in every step."""
    num_pages = num_running * 20
    limits = Limits(max_tokens=2 * num_running, max_seqs=num_running)
    scheduler = Scheduler(limits, PagePool(num_pages, PAGE_SIZE))
    for i in range(num_running + num_waiting):
        prompt = tuple(range(i, i + 20))
        scheduler.submit(Sequence(Request(str(i), prompt, Sampling(max_tokens=250))))
    times = []
    for step in range(200):
        start = time.perf_counter()
        plan = scheduler.plan(step / 10)
        planned = time.perf_counter()
        sampled = {chunk.seq.id: 5 for chunk in plan.chunks if chunk.samples}
        computed = time.perf_counter()
        scheduler.commit(plan, sampled)
        committed = time.perf_counter()
        if len(plan.decodes) == num_running and not plan.prefills:
            times.append(planned - start + committed - computed)
    return {
        "running": num_running,
        "waiting": num_waiting,
        "median_us": _round(statistics.median(times) * 1e6),
        "min_us": _round(min(times) * 1e6),
        "steps": len(times),
    }


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _round(value: float) -> float:
    return float(f"{value:.3g}")


def _line(row: dict[str, object]) -> str:
    return "  ".join(f"{key} {value}" for key, value in row.items())


def _table(rows: list[dict[str, object]]) -> str:
    return markdown(list(rows[0]), [[str(value) for value in row.values()] for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description="Model steps and scheduler against their limits.")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    threads = [int(value) for value in args.threads.split(",")]
    steps = measure_model(args.dtype, threads, args.rounds)
    plans = [measure_scheduler(*size) for size in ((8, 0), (256, 0), (256, 10_000))]
    print(_table(steps), _table(plans), sep="\n")
    native = kernels()
    isa = native.isa if native is not None else "torch"
    path = save("micro", steps + plans, dtype=args.dtype, isa=isa)
    print(f"written to {path}")


if __name__ == "__main__":
    main()

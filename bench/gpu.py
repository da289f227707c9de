"""What the CUDA path does on this GPU, beside what the GPU can do: tests, then a table.

    bench/gpu.sh

Steps are real ones, with sampling and the wait for the tokens, on random weights in the shape of
Llama 3 8B. The roofline is the memory bandwidth and the bfloat16 matrix rate measured in this run.
Writes ``bench/results/gpu-NAME.md``, a line of ``gpu.jsonl``, and ``gpu.json``, which says when a
GPU last ran the tests: nothing else writes it.
"""

import argparse
import json
import logging
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.report import RESULTS, commit, save
from workers.core.plan import Chunk
from workers.core.request import Phase, Request, Sampling, Sequence
from workers.models.config import ModelConfig, RopeScaling
from workers.runner import ModelRunner, StepLimits
from workers.weights import Checkpoint

ROOT = Path(__file__).parents[1]
LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_model_len=8192,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(),
    tie_embeddings=False,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    dtype="bfloat16",
    eos_ids=frozenset(),
    fingerprint="random weights",
)
DECODES = [(1, 500), (8, 500), (32, 500), (64, 500), (128, 500), (256, 500)]
DECODES += [(1, 4000), (8, 4000), (32, 4000), (1, 8000)]
PREFILLS = [512, 2000, 4000, 8000]
BUDGET = 2048
WARM_STEPS, STEPS = 5, 30
TESTS_TIMEOUT_S = 240


class RandomWeights(Checkpoint):
    """Every tensor that is asked for, small enough that activations stay finite."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __contains__(self, name: str) -> bool:
        return True

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        return tensor.fill_(1.0) if len(shape) == 1 else tensor.normal_(std=shape[1] ** -0.5)


@dataclass(frozen=True, slots=True)
class Roofline:
    """Rates measured on this device."""

    bytes_per_s: float
    flops_per_s: float

    def step_s(self, config: ModelConfig, rows: int, sampled: int, context: int) -> float:
        """No step can be faster that computes ``rows`` tokens and reads ``context`` of KV in all:
        weights and keys pass through memory once, and every product is computed."""
        layers, head = num_weights(config)
        kv_bytes = config.kv_layout(1, "bfloat16").page_bytes  # of one token
        num_bytes = 2 * (layers + head) + (context + rows) * kv_bytes
        per_key = 4 * config.num_heads * config.head_dim * config.num_layers
        flops = 2 * (layers * rows + head * sampled) + per_key * _pairs(rows, sampled, context)
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


def _pairs(rows: int, sampled: int, context: int) -> float:
    """Query and key pairs: all of a decode's context, on average half of a prompt's own."""
    return context if rows == sampled else rows * (context + rows / 2)


def num_weights(config: ModelConfig) -> tuple[int, int]:
    """Of all layers, and of the output head. The embedding is only looked up."""
    heads = config.num_heads + 2 * config.num_kv_heads
    attention = (heads + config.num_heads) * config.head_dim * config.hidden_size
    mlp = 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * (attention + mlp), config.vocab_size * config.hidden_size


def measure_roofline(device: torch.device) -> Roofline:
    return Roofline(_bytes_per_s(device, 2 << 30), _flops_per_s(device, 8192))


def _bytes_per_s(device: torch.device, num_bytes: int) -> float:
    """Of a copy, which reads and writes."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _seconds(lambda: target.copy_(source))


def _flops_per_s(device: torch.device, size: int) -> float:
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return 2 * size**3 / _seconds(lambda: left @ right)


def _seconds(action: Callable[[], object], repeats: int = 20) -> float:
    """Median of one call, the device's work included."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@dataclass(frozen=True, slots=True)
class Row:
    load: str
    tokens: int  # that one such load brings
    seconds: float
    eager_s: float  # without recorded graphs
    roofline_s: float


def decoding(runner: ModelRunner, batch: int, context: int, steps: int) -> list[Sequence]:
    """Sequences in the midst of decoding. What their pages hold does not matter here."""
    page_size = runner.cache.layout.page_size
    count = -(-(context + steps) // page_size)
    seqs = []
    for i in range(batch):
        seq = Sequence(Request(str(i), (1,) * context, Sampling(max_tokens=steps, temperature=0.0)))
        seq.num_computed, seq.phase = context - 1, Phase.DECODE
        seq.pages = list(range(i * count, (i + 1) * count))
        seqs.append(seq)
    return seqs


def fits(runner: ModelRunner, batch: int, num_tokens: int) -> bool:
    return batch * -(-num_tokens // runner.cache.layout.page_size) <= runner.cache.num_pages


def decode_s(runner: ModelRunner, batch: int, context: int, steps: int = STEPS) -> float:
    """Median of a step in which every sequence gets a token."""
    seqs, times = decoding(runner, batch, context, WARM_STEPS + steps), []
    for _ in range(WARM_STEPS + steps):
        start = time.perf_counter()
        tokens = runner.run(tuple(Chunk(seq, seq.num_computed, 1) for seq in seqs))
        times.append(time.perf_counter() - start)
        for seq in seqs:
            seq.output.append(tokens[seq.id].id)
            seq.num_computed += 1
    return statistics.median(times[WARM_STEPS:])


def prefill_s(runner: ModelRunner, num_tokens: int, budget: int, repeats: int = 5) -> float:
    """Median time to the first token of a prompt that comes alone, in chunks of the budget."""
    times = []
    for _ in range(repeats + 1):
        seq = Sequence(Request("prompt", (1,) * num_tokens, Sampling(temperature=0.0)))
        seq.pages = list(range(-(-num_tokens // runner.cache.layout.page_size)))
        start = time.perf_counter()
        for at in range(0, num_tokens, budget):
            runner.run((Chunk(seq, at, min(budget, num_tokens - at)),))
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def measure(
    recorded: ModelRunner, eager: ModelRunner, roofline: Roofline, max_context: int = 8192
) -> Iterator[Row]:
    """A row per load that fits the pages."""
    config = recorded.config
    for batch, context in DECODES:
        steps = WARM_STEPS + STEPS
        if context + steps <= max_context and fits(recorded, batch, context + steps):
            yield Row(
                f"decode {batch} x {context}",
                batch,
                decode_s(recorded, batch, context),
                decode_s(eager, batch, context),
                roofline.step_s(config, batch, batch, batch * context),
            )
    for num_tokens in PREFILLS:
        if num_tokens <= max_context and fits(recorded, 1, num_tokens):
            least = sum(
                roofline.step_s(config, min(BUDGET, num_tokens - at), 0, at)
                for at in range(0, num_tokens, BUDGET)
            )
            seconds = prefill_s(recorded, num_tokens, BUDGET)
            yield Row(f"prefill {num_tokens}", num_tokens, seconds, seconds, least)


def table(rows: list[Row]) -> str:
    lines = [
        "| load | ms | ms without graphs | tok/s | roofline ms | share of roofline |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        lines.append(
            f"| {row.load} | {row.seconds * 1e3:.2f} | {row.eager_s * 1e3:.2f} "
            f"| {row.tokens / row.seconds:.0f} | {row.roofline_s * 1e3:.2f} "
            f"| {row.roofline_s / row.seconds:.0%} |"
        )
    return "\n".join(lines)


def run_tests() -> str:
    """The last line of the GPU tests, such as "30 passed in 41.5s"."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", "-rs"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=TESTS_TIMEOUT_S, check=False
    )
    print(done.stdout, done.stderr, sep="\n", flush=True)
    counts = re.findall(r"\d+ (?:passed|failed|error|errors|skipped)", done.stdout)
    return ", ".join(counts) or f"no result, exit status {done.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Test and measure the CUDA path.")
    parser.add_argument("--max-seqs", type=int, default=256)
    parser.add_argument("--only-tests", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this torch sees no CUDA device")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    gpu = torch.cuda.get_device_name()
    run: dict[str, object] = {"gpu": gpu, "torch": torch.__version__, "tests": run_tests()}
    RESULTS.mkdir(exist_ok=True)
    at = time.strftime("%Y-%m-%d", time.gmtime())
    (RESULTS / "gpu.json").write_text(json.dumps({**run, "at": at, "commit": commit()}) + "\n")
    if args.only_tests:
        return
    rows, about = measure_here(args.max_seqs)
    text = (
        f"# {gpu}\n\n{at}, commit {commit()}, torch {torch.__version__}. {about}\n\n{table(rows)}\n"
    )
    (RESULTS / f"gpu-{gpu.lower().replace(' ', '-')}.md").write_text(text)
    save("gpu", [asdict(row) for row in rows], about=about, **run)
    print(text)


def measure_here(max_seqs: int) -> tuple[list[Row], str]:
    from workers.cuda import start  # needs Triton, which torch's CUDA builds bring
    from workers.cuda.model import CudaLlama
    from workers.cuda.runner import CudaRunner

    device = torch.device("cuda")
    roofline = measure_roofline(device)
    limits = StepLimits(BUDGET, max_seqs, LLAMA_8B.max_model_len)
    attention = start.choose_attention(LLAMA_8B, torch.bfloat16, device, limits.max_context)
    if attention is None:
        raise SystemExit("no fast attention computes right on this device: see the line above")
    layout = LLAMA_8B.kv_layout(attention.page_size_multiple, "bfloat16")
    began = time.perf_counter()
    weights = RandomWeights(device)
    recorded = start.make_runner(LLAMA_8B, weights, attention, layout, device, limits, None)
    about = (
        f"Llama 3 8B, random weights, bfloat16, attention {attention.name}, "
        f"{recorded.cache.num_pages} pages of {layout.page_size} tokens, ready in "
        f"{time.perf_counter() - began:.1f} s. Measured in this run: "
        f"{roofline.bytes_per_s / 1e12:.2f} TB/s, {roofline.flops_per_s / 1e12:.0f} TFLOP/s."
    )
    model = recorded.model
    assert isinstance(model, CudaLlama)
    eager = CudaRunner(model, recorded.cache, attention)
    return list(measure(recorded, eager, roofline)), about


if __name__ == "__main__":
    main()

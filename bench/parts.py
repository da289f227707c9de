"""What a model step spends its time on: each part alone, at the shapes of the step.

    python -m bench.parts [--threads 2] [--dtype bfloat16] [--rounds 9]

A part is timed as often as a step has it (30 layers, one head), as one kernel call each; what such
a call costs by itself is measured with one row of nothing and taken off. "host" is what the step
needs beyond the kernels' time: Python, torch and the sampler. Each part stands beside the time that
this machine's memory or arithmetic needs for it at best. Writes ``bench/results/parts.jsonl``.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.micro import LOADS, NUM_PAGES, PAGE_SIZE, Load, Roof, best, chunks_of, measure_roof
from bench.report import markdown, save
from workers.batch import build
from workers.core.plan import Chunk
from workers.kvcache import DTYPES
from workers.models.config import ModelConfig
from workers.native.attention import NativePlan
from workers.native.library import Kernels, PackedLinear, kernels
from workers.runner import ModelRunner, load_runner
from workers.weights import resolve


@dataclass(frozen=True)
class Matrix:
    """A linear layer of the model, and how often a step has it."""

    name: str
    outputs: int
    inputs: int
    times: int
    gated: bool = False

    def least_s(self, rows: int, roof: Roof, item_bytes: int) -> float:
        size = self.outputs * self.inputs * (2 if self.gated else 1) * self.times
        return max(size * item_bytes / roof.read_bytes_s, 2 * rows * size / roof.flops_s)


def matrices(config: ModelConfig) -> list[Matrix]:
    hidden, layers, d = config.hidden_size, config.num_layers, config.head_dim
    return [
        Matrix("qkv", (config.num_heads + 2 * config.num_kv_heads) * d, hidden, layers),
        Matrix("output", hidden, config.num_heads * d, layers),
        Matrix("gate, up", config.intermediate_size, hidden, layers, gated=True),
        Matrix("down", hidden, config.intermediate_size, layers),
        Matrix("head", config.vocab_size, hidden, 1),
    ]


class Parts:
    """Times one load's parts on the runner's kernels."""

    def __init__(self, runner: ModelRunner, native: Kernels, dtype: torch.dtype, rounds: int):
        self._runner, self._native, self._dtype, self._rounds = runner, native, dtype, rounds
        self._weights = {
            matrix.name: [self._packed(matrix) for _ in range(matrix.times)]
            for matrix in matrices(runner.config)
        }

    def of(self, load: Load) -> dict[str, float]:
        """Seconds by part, and of the whole step."""
        chunks = chunks_of(load)
        with torch.inference_mode():
            seconds = {
                matrix.name: self._matrix(
                    matrix, load.num_seqs if matrix.times == 1 else None, load
                )
                for matrix in matrices(self._runner.config)
            }
            seconds["attention"], seconds["norms, rotary"] = self._attention(chunks, load)
            step, host = self._step(chunks)
        rest = step - host - sum(seconds.values())
        return {**seconds, "meeting, rest": max(rest, 0.0), "host": host, "step": step}

    def _matrix(self, matrix: Matrix, rows: int | None, load: Load) -> float:
        x = torch.randn(rows or load.num_tokens, matrix.inputs).to(self._dtype)
        weights = self._weights[matrix.name]

        def all_layers() -> None:
            for weight in weights:
                self._native.linear(x, weight)

        return self._least(all_layers, matrix.times)

    def _attention(self, chunks: tuple[Chunk, ...], load: Load) -> tuple[float, float]:
        runner, native, config = self._runner, self._native, self._runner.config
        batch = build(chunks, PAGE_SIZE, runner.model.device)
        plan = runner.attention.plan(batch.attention, self._dtype)
        assert isinstance(plan, NativePlan), "the parts are those of the native kernels"
        heads = config.num_heads + 2 * config.num_kv_heads
        qkv = torch.randn(load.num_tokens, heads, config.head_dim).to(self._dtype)
        rotation = torch.randn(load.num_tokens, config.head_dim)
        x = torch.randn(load.num_tokens, config.hidden_size).to(self._dtype)
        weight = torch.ones(config.hidden_size).to(self._dtype)
        layers = range(config.num_layers)

        def attend() -> None:
            for layer in layers:
                native.attention(qkv[:, : config.num_heads], runner.cache, layer, plan.batch)

        def rows() -> None:
            for layer in layers:
                native.norm(x, weight, config.rms_norm_eps)
                native.norm(x, weight, config.rms_norm_eps)
                native.rotate_and_store(
                    qkv, rotation, runner.cache, layer, plan.batch, (None, None), 1e-5
                )

        return self._least(attend, len(layers)), self._least(rows, 3 * len(layers))

    def _step(self, chunks: tuple[Chunk, ...]) -> tuple[float, float]:
        """Of the whole, and of what is not in the two big kernel calls."""
        in_kernels = 0.0
        forward, logits = self._runner.model.forward, self._runner.model.logits

        def timed(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def wrapped(*arguments: object) -> torch.Tensor:
                nonlocal in_kernels
                start = time.perf_counter()
                result = call(*arguments)
                in_kernels += time.perf_counter() - start
                return result

            return wrapped

        model = self._runner.model
        model.forward, model.logits = timed(forward), timed(logits)  # type: ignore[method-assign]
        try:
            fastest = (float("inf"), 0.0)
            for _ in range(2 * self._rounds):
                in_kernels, start = 0.0, time.perf_counter()
                self._runner.run(chunks)
                took = time.perf_counter() - start
                fastest = min(fastest, (took, took - in_kernels))
        finally:
            model.forward, model.logits = forward, logits  # type: ignore[method-assign]
        return fastest

    def _least(self, call: Callable[[], None], num_calls: int) -> float:
        """The best of several rounds, less what so many empty calls cost."""
        return max(best(call, self._rounds) - num_calls * self._call_s(), 0.0)

    def _call_s(self) -> float:
        x, weight = torch.ones(1, 16).to(self._dtype), torch.ones(16).to(self._dtype)

        def empty() -> None:
            for _ in range(30):
                self._native.norm(x, weight, 1e-5)

        return best(empty, self._rounds) / 30

    def _packed(self, matrix: Matrix) -> PackedLinear:
        rows = matrix.outputs * (2 if matrix.gated else 1)
        weight = (torch.randn(rows, matrix.inputs) * 0.02).to(self._dtype)
        return PackedLinear(self._native, weight, None, matrix.gated)


def measure(threads: int, dtype: str, rounds: int) -> list[dict[str, object]]:
    native = kernels()
    if native is None:
        raise SystemExit("no native kernels on this machine: see the log")
    precision = DTYPES[dtype]
    torch.set_num_threads(threads)
    runner = load_runner(resolve(), dtype, page_size=PAGE_SIZE, num_pages=NUM_PAGES)
    parts, roof = Parts(runner, native, precision, rounds), measure_roof(native, precision, threads)
    least = {matrix.name: matrix for matrix in matrices(runner.config)}
    rows: list[dict[str, object]] = []
    for load in LOADS[:4]:
        seconds = parts.of(load)
        for name, took in seconds.items():
            row = {"load": load.name, "part": name, "ms": round(took * 1e3, 3)}
            row["share"] = round(took / seconds["step"], 3)
            if name in least:
                num_rows = load.num_seqs if name == "head" else load.num_tokens
                least_s = least[name].least_s(num_rows, roof, precision.itemsize)
                row["at_best_ms"] = round(least_s * 1e3, 3)
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Where the time of a model step goes.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    rows = measure(args.threads, args.dtype, args.rounds)
    columns = ["load", "part", "ms", "share", "at_best_ms"]
    print(markdown(columns, [[str(row.get(name, "")) for name in columns] for row in rows]))
    print(f"written to {save('parts', rows, dtype=args.dtype, threads=args.threads)}")


if __name__ == "__main__":
    main()

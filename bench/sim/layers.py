"""LLMServingSim's profile of one GPU, layer by layer, as a latency model.

It knows the four-way attention grid (prompt chunk, its context, decodes, their mean context) and
the layers that depend on tokens or sequences alone; all of it is GPU time, so ``host_s`` of the
worker has to say what the CPU adds.
"""

import csv
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from bench.sim.latency import DEFAULT_LINK, Link
from bench.sim.profiles import Line
from workers.core.plan import BatchShape

PER_LAYER = ("layernorm", "qkv_proj", "rotary_emb", "o_proj", "layernorm")
PER_LAYER_MLP = ("gate_up_proj", "act_fn", "down_proj")
ONCE = ("embedding", "final_layernorm")
PER_SEQUENCE = ("lm_head", "sampler")

Grid = dict[int, dict[int, dict[int, Line]]]  # chunk -> its context -> decodes -> their context


@dataclass(frozen=True, slots=True)
class LayeredTimes:
    """Seconds a step from microseconds a layer."""

    num_layers: int
    by_tokens: Line  # all token-wise work of the whole model
    by_sequences: Line
    attention: Grid
    link: Link = DEFAULT_LINK

    def step_s(self, shape: BatchShape) -> float:
        tokens = shape.prefill_tokens + shape.decode_seqs
        sampling = shape.decode_seqs + (1 if shape.prefill_tokens else 0)
        micros = self.by_tokens(tokens) + self.by_sequences(sampling)
        return (micros + self.num_layers * self._attention_us(shape)) / 1e6

    def transfer_s(self, num_bytes: int, pair: str = "") -> float:
        return self.link.transfer_s(num_bytes, pair)

    def _attention_us(self, shape: BatchShape) -> float:
        """Several prompts in a step are taken as equal ones: the mean context says how many."""
        p, n = shape.prefill_tokens, shape.decode_seqs
        k = shape.decode_context / n if n else 0.0
        if not p:
            return self._at(0, 0, n, k)
        end = shape.prefill_context / p  # mean context at the end of the chunks
        if end >= p:
            return self._at(p, end - p, n, k)
        alone = self._at(end, 0, 0, 0) * p / end
        return alone + (self._at(0, 0, n, k) if n else 0.0)

    def _at(self, chunk: float, context: float, n: float, k: float) -> float:
        """Linear between the corners of the grid cell."""
        total = 0.0
        for c, weight_c in _corners(sorted(self.attention), chunk):
            contexts = self.attention[c]
            for h, weight_h in _corners(sorted(contexts), context):
                curves = contexts[h]
                counts = sorted(curves) if n == 0 else [m for m in sorted(curves) if m]
                for m, weight_m in _corners(counts, n):
                    total += weight_c * weight_h * weight_m * curves[m](k)
        return total


def _corners(grid: list[int], x: float) -> list[tuple[int, float]]:
    """The two grid values around ``x`` with their weights; at an end, or on a value, only one."""
    i = bisect_right(grid, x) - 1
    if i < 0:
        return [(grid[0], 1.0)]
    if grid[i] == x or len(grid) == 1:
        return [(grid[i], 1.0)]
    i = min(i, len(grid) - 2)
    part = (x - grid[i]) / (grid[i + 1] - grid[i])
    return [(grid[i], 1 - part), (grid[i + 1], part)]


def llmservingsim(
    folder: Path, prefix: str, num_layers: int, link: Link = DEFAULT_LINK
) -> LayeredTimes:
    """Read ``{prefix}_dense.csv``, ``_per_sequence.csv`` and ``_attention.csv``."""
    dense = _layers(folder / f"{prefix}_dense.csv")
    sequences = _layers(folder / f"{prefix}_per_sequence.csv")
    per_layer = PER_LAYER + PER_LAYER_MLP
    by_tokens = [
        (
            tokens,
            num_layers * sum(dense[name][tokens] for name in per_layer)
            + sum(dense[name][tokens] for name in ONCE),
        )
        for tokens in dense["qkv_proj"]
    ]
    by_sequences = [
        (count, sum(sequences[name][count] for name in PER_SEQUENCE))
        for count in sequences["lm_head"]
    ]
    attention = _attention(folder / f"{prefix}_attention.csv")
    return LayeredTimes(num_layers, Line(by_tokens), Line(by_sequences), attention, link)


def _layers(path: Path) -> dict[str, dict[int, float]]:
    layers: dict[str, dict[int, float]] = {}
    with path.open(newline="") as file:
        rows = csv.reader(file)
        next(rows)
        for layer, count, micros in rows:
            layers.setdefault(layer, {})[int(count)] = float(micros)
    return layers


def _attention(path: Path) -> Grid:
    points: dict[int, dict[int, dict[int, list[tuple[float, float]]]]] = {}
    with path.open(newline="") as file:
        rows = csv.reader(file)
        next(rows)
        for chunk, context, n, k, micros in rows:
            cell = points.setdefault(int(chunk), {}).setdefault(int(context), {})
            cell.setdefault(int(n), []).append((float(k), float(micros)))
    return {
        chunk: {
            context: {n: Line(curve) for n, curve in counts.items()}
            for context, counts in contexts.items()
        }
        for chunk, contexts in points.items()
    }

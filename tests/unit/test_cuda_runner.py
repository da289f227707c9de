"""The whole CUDA path on T0 with its kernels interpreted: the tokens of the host path, steps
replayed from recordings equal steps that are not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench.tiny import tiny_model
from tests.cuda_libraries import RecordingVarlen
from tests.greedy import advance, generate, sequence
from tests.interpreted import only_interpreted
from workers.core.plan import Chunk
from workers.core.request import Sequence
from workers.kvcache import KVCache
from workers.models.config import ModelConfig
from workers.runner import ModelRunner, load_runner
from workers.weights import Checkpoint

pytest.importorskip("triton", reason="triton is not installed")

from workers.cuda.attention import CudaAttention, TorchVarlen
from workers.cuda.graphs import DecodeGraphs, Recording, batch_sizes
from workers.cuda.model import CudaLlama
from workers.cuda.runner import CudaRunner

pytestmark = only_interpreted
CPU = torch.device("cpu")
PAGE, NUM_PAGES, MAX_CONTEXT = 16, 16, 32


class HostRecorder:
    """A recording that computes again, into the same output and from the same inputs."""

    def __init__(self) -> None:
        self.replays: list[int] = []

    def __call__(self, body: Callable[[], torch.Tensor]) -> Recording:
        output = body()

        def replay() -> None:
            self.replays.append(len(output))
            output.copy_(body())

        return Recording(replay, output)


def cuda_runner(folder: Any, recorder: HostRecorder | None = None) -> CudaRunner:
    config = ModelConfig.load(folder)
    model = CudaLlama(config, Checkpoint(folder), torch.float32, CPU)
    cache = KVCache(config.kv_layout(PAGE, "float32"), NUM_PAGES, CPU)
    varlen = RecordingVarlen(is_strict=False)
    library = TorchVarlen(MAX_CONTEXT, varlen.varlen_attn, varlen.replacement)
    attention = CudaAttention(library)
    graphs = None
    if recorder is not None:
        max_pages = MAX_CONTEXT // PAGE
        with torch.inference_mode():
            graphs = DecodeGraphs(model, cache, attention, max_pages, [1, 2, 4], recorder)
    return CudaRunner(model, cache, attention, graphs)


def prompt(num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(64, 49152, (num_tokens,), generator=generator).tolist()


def requests() -> list[Sequence]:
    """Three at different places around a page's edge, one of them sampled."""
    pages = iter(range(100))
    rules: list[dict[str, Any]] = [{}, {}, {"temperature": 0.9, "top_p": 0.95, "seed": 5}]
    return [
        sequence(
            str(n),
            prompt(n, n),
            [next(pages) for _ in range(-(-(n + 8) // PAGE))],
            max_tokens=5,
            **rule,
        )
        for n, rule in zip((5, 14, 20), rules, strict=True)
    ]


@pytest.mark.parametrize(("arch", "recorder"), [("llama", None), ("qwen3", HostRecorder())])
def test_tokens_are_those_of_the_host_path(
    tmp_path: Any, arch: str, recorder: HostRecorder | None
) -> None:
    folder = tiny_model(tmp_path, arch)
    host = load_runner(folder, "float32", device="cpu", page_size=PAGE, num_pages=64)
    outputs = []
    for runner in (host, cuda_runner(folder, recorder)):
        runner.cache.pool.fill_(torch.nan)
        seqs = requests()
        generate(runner, seqs, budget=13)
        outputs.append([seq.output for seq in seqs])
    assert outputs[1] == outputs[0]
    assert recorder is None or recorder.replays


@pytest.fixture(scope="module")
def recorder() -> HostRecorder:
    return HostRecorder()


@pytest.fixture(scope="module")
def recorded(t0_folder: Any, recorder: HostRecorder) -> CudaRunner:
    return cuda_runner(t0_folder, recorder)


def decoding(runner: ModelRunner, count: int) -> list[Sequence]:
    """Sequences whose prompts are computed, on two pages each."""
    seqs = [sequence(str(i), prompt(3 + i, i), [2 * i, 2 * i + 1]) for i in range(count)]
    for seq in seqs:
        advance(runner, [Chunk(seq, 0, seq.num_tokens)])
    return seqs


def decodes(seqs: list[Sequence]) -> list[Chunk]:
    return [Chunk(seq, seq.num_computed, 1) for seq in seqs]


@pytest.mark.parametrize(("count", "sizes"), [(1, [1]), (3, [4]), (4, [4]), (5, [])])
def test_decodes_replay_the_next_recorded_size(
    recorded: CudaRunner, recorder: HostRecorder, count: int, sizes: list[int]
) -> None:
    seqs = decoding(recorded, count)
    recorder.replays.clear()
    advance(recorded, decodes(seqs))
    assert recorder.replays == sizes


def test_steps_with_chunks_are_not_replayed(recorded: CudaRunner, recorder: HostRecorder) -> None:
    seqs = decoding(recorded, 2)
    recorder.replays.clear()
    late = sequence("late", prompt(12, 9), [9])
    advance(recorded, [*decodes(seqs), Chunk(late, 0, 9)])
    advance(recorded, [*decodes(seqs), Chunk(late, 9, 1)])  # one row, and none that samples
    assert recorder.replays == []


def test_contexts_beyond_the_recorded_pages_are_not_replayed(
    recorded: CudaRunner, recorder: HostRecorder
) -> None:
    seq = sequence("a", prompt(MAX_CONTEXT + 2, 1), range(4))
    advance(recorded, [Chunk(seq, 0, seq.num_tokens)])
    recorder.replays.clear()
    advance(recorded, decodes([seq]))
    assert recorder.replays == []


def test_padding_touches_no_page(recorded: CudaRunner, recorder: HostRecorder) -> None:
    """Three sequences in a recording of four: only their own new tokens are written."""
    seqs = decoding(recorded, 3)
    recorded.cache.pool[6:] = torch.nan
    before = recorded.cache.pool.clone()
    recorder.replays.clear()
    advance(recorded, decodes(seqs))
    assert recorder.replays == [4]
    after = recorded.cache.pool
    changed = (before != after) & ~(before.isnan() & after.isnan())
    slots = changed.any(-1).any(3).any(2).any(1).nonzero().tolist()  # [page, offset]
    assert slots == [[2 * i, 3 + i] for i in range(3)]


def test_a_step_without_tokens_gives_none(recorded: CudaRunner) -> None:
    seq = sequence("a", prompt(6, 4), [0])
    assert recorded.run((Chunk(seq, 0, 5),)) == {}


def test_recorded_sizes() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(6) == [1, 2, 4, 6]
    assert batch_sizes(64) == [1, 2, 4, *range(8, 65, 8)]
    assert batch_sizes(1000)[-1] == 256
    assert all(size <= 100 for size in batch_sizes(100)) and batch_sizes(100)[-1] == 100

"""Calls of the CUDA backends keep the contracts of the libraries, and give float64's attention."""

import importlib.util
import inspect
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda_libraries import RecordingFlash, RecordingVarlen
from tests.interpreted import only_interpreted
from tests.paged import Shape, paged_batch
from workers.models.config import ModelConfig, ModelError
from workers.runner import checked_page_size

pytest.importorskip("triton", reason="triton is not installed")

from workers.cuda import start
from workers.cuda.attention import CudaAttention, FlashAttn, Library, TorchVarlen

pytestmark = only_interpreted
LAYER = 1
CPU = torch.device("cpu")
BATCHES = [
    [(1, 1), (1, 255), (1, 256), (1, 257), (1, 600)],  # decodes
    [(40, 40), (256, 300), (2, 257)],  # chunks
    [(1, 300), (1, 20), (64, 512), (1, 70)],  # both, the last one a chunk of one row
    [(1, 5)],
    [(300, 300)],
]


def relative_error(library: Library, sizes: list[tuple[int, int]]) -> float:
    batch = paged_batch(Shape(page_size=256), sizes, torch.float16)
    plan = CudaAttention(library).plan(batch.metadata, batch.q.dtype)
    plan.store(batch.k, batch.v, batch.cache, LAYER)
    out = plan.forward(batch.q, batch.cache, LAYER).double()
    return float((out - batch.reference()).norm() / batch.reference().norm())


@pytest.mark.parametrize("sizes", BATCHES)
def test_flash_attn(sizes: list[tuple[int, int]]) -> None:
    flash = RecordingFlash()
    assert relative_error(FlashAttn(flash), sizes) < 1e-2
    chunks = sizes[next((i for i, (rows, _) in enumerate(sizes) if rows > 1), len(sizes)) :]
    assert flash.calls == ["kvcache"] * (chunks != sizes) + ["varlen"] * bool(chunks)


@pytest.mark.parametrize("sizes", BATCHES)
@pytest.mark.parametrize("replacement", [None, "FA3", "FA4"])
def test_torch_varlen(sizes: list[tuple[int, int]], replacement: str | None) -> None:
    """Only chunks reach it: decodes are computed by a kernel of ours, here interpreted."""
    varlen = RecordingVarlen(replacement)
    library = TorchVarlen(1024, varlen.varlen_attn, varlen.replacement)
    assert relative_error(library, sizes) < 1e-2
    assert varlen.num_calls == any(rows > 1 for rows, _ in sizes)


def parameters(function: Any) -> list[tuple[str, Any]]:
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind) for p in found if p.name != "self"]


def test_the_recording_has_the_signature_of_this_torch() -> None:
    from torch.nn.attention import current_flash_attention_impl
    from torch.nn.attention.varlen import varlen_attn

    assert parameters(RecordingVarlen.varlen_attn) == parameters(varlen_attn)
    assert current_flash_attention_impl() is None


@pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is None, reason="flash-attn is not installed"
)
def test_the_recording_has_the_signature_of_this_flash_attn() -> None:
    import flash_attn

    for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):
        ours = parameters(getattr(RecordingFlash, name))
        theirs = parameters(getattr(flash_attn, name))
        assert theirs[: len(ours)] == ours


def test_this_torch_computes_shapes_through_its_own_operator() -> None:
    """Meta tensors run the real schema: names, types and which arguments may be left out."""
    meta = torch.device("meta")
    from torch.nn.attention.varlen import varlen_attn

    q = torch.empty(5, 8, 64, dtype=torch.bfloat16, device=meta)
    pages = torch.empty(3, 256, 2, 64, dtype=torch.bfloat16, device=meta)
    sums = torch.empty(3, dtype=torch.int32, device=meta)
    for sums_of_keys in (sums, None):
        out = varlen_attn(
            q,
            pages,
            pages,
            sums,
            sums_of_keys,
            3,
            300,
            window_size=(-1, 0),
            enable_gqa=True,
            seqused_k=sums[1:],
            block_table=torch.empty(2, 2, dtype=torch.int32, device=meta),
            num_splits=1,
        )
        assert out.shape == q.shape


def test_pages_of_other_sizes_are_refused_at_start() -> None:
    attention = CudaAttention(FlashAttn(RecordingFlash()))
    assert checked_page_size(None, attention) == 256
    assert checked_page_size(512, attention) == 512
    message = "page_size: 16, but flash-attn takes only multiples of 256"
    with pytest.raises(ModelError, match=message):
        checked_page_size(16, attention)


@pytest.fixture
def config(t0_folder: Path) -> ModelConfig:
    return ModelConfig.load(t0_folder)


class Broken(RecordingFlash):
    """The split-KV trap: rows that nobody wrote."""

    def flash_attn_varlen_func(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = super().flash_attn_varlen_func(*args, **kwargs)
        out[-1] = torch.nan
        return out


class Changed(RecordingFlash):
    def flash_attn_with_kvcache(self, *args: Any) -> torch.Tensor:
        raise AssertionError("called with keywords only")


def test_the_first_library_that_computes_right_is_taken(
    config: ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    libraries = {
        "broken": lambda: FlashAttn(Broken()),
        "changed": lambda: FlashAttn(Changed()),
        "missing": lambda: FlashAttn(importlib.import_module("no_such_library")),
        "good": lambda: FlashAttn(RecordingFlash()),
    }
    caplog.set_level(logging.INFO)
    assert start.first_right(libraries, config, torch.float16, CPU) is not None
    assert [record.getMessage() for record in caplog.records] == ["attention: good"]
    caplog.clear()
    del libraries["good"]
    assert start.first_right(libraries, config, torch.float16, CPU) is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("attention: torch SDPA, which is slow on a GPU (broken: its result is")
    assert "changed: TypeError" in line and "missing: ModuleNotFoundError" in line


def test_models_that_the_kernels_cannot_compute_are_not_tried(
    config: ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    good = {"good": lambda: FlashAttn(RecordingFlash())}
    assert start.first_right(good, config, torch.float32, CPU) is None
    assert start.first_right(good, replace(config, head_dim=264), torch.float16, CPU) is None
    first, second = (record.getMessage() for record in caplog.records)
    assert "float32" in first and "head_dim 264" in second

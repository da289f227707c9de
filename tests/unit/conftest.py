"""Models that several tests share."""

import os
from pathlib import Path

import pytest
import torch

from bench.tiny import tiny_model
from tests.native import open_kernels
from workers.native.library import Kernels
from workers.runner import ModelRunner, load_runner

if not torch.cuda.is_available():  # Triton reads it when kernels are defined
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def t0_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("t0"))


@pytest.fixture(scope="session")
def t0(t0_folder: Path) -> ModelRunner:
    """T0 in float32 with 64 pages of 16 tokens."""
    return load_runner(t0_folder, "float32", num_pages=64)


@pytest.fixture(scope="session")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Those of one instruction set, see tests/native.py."""
    return open_kernels(request.param)

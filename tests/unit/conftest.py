"""Models that several tests share."""

from pathlib import Path

import pytest

from tests.tiny import tiny_model
from workers.runner import ModelRunner, load_runner


@pytest.fixture(scope="session")
def t0_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("t0"))


@pytest.fixture(scope="session")
def t0(t0_folder: Path) -> ModelRunner:
    """T0 in float32 with 64 pages of 16 tokens."""
    return load_runner(t0_folder, "float32", num_pages=64)

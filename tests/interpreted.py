"""Triton's kernels on CPU tensors, which tests/unit/conftest.py switches on."""

import pytest
import torch

only_interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels run on the GPU here: see tests/gpu"
)

"""The native kernels of every instruction set, for tests that run on each."""

import pytest
import torch

from workers.native.build import ISAS, BuildError, has
from workers.native.library import Kernels

_opened: dict[str, Kernels] = {}


def open_kernels(isa: str) -> Kernels:
    """Skips the test where they cannot be built or would not run."""
    if not has(isa):
        pytest.skip(f"this CPU has no {isa}")
    try:
        if isa not in _opened:
            _opened[isa] = Kernels(isa)
    except BuildError as error:
        pytest.skip(f"no native kernels: {error}")
    return _opened[isa]


KERNELS = pytest.mark.parametrize(
    "kernels", list(ISAS), indirect=True
)  # the fixture in conftest.py


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    """Bit for bit."""
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)

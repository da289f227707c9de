"""Tensors arrive as they were, however they are packed."""

import torch

from workers.upload import Parcel, upload

CPU = torch.device("cpu")
TENSORS = [
    torch.arange(5),
    torch.arange(6, dtype=torch.int32).view(2, 3)[:, :2],  # not contiguous
    torch.empty(0, dtype=torch.int32),
    torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64),
    torch.tensor([7], dtype=torch.int32),
]


def test_a_parcel_holds_what_was_put_in() -> None:
    parcel = Parcel.of(TENSORS)
    views = parcel.views(parcel.fill(TENSORS, CPU))
    for view, tensor in zip(views, TENSORS, strict=True):
        assert view.dtype == tensor.dtype and torch.equal(view, tensor)


def test_every_tensor_starts_where_its_numbers_may() -> None:
    parcel = Parcel.of(TENSORS)
    assert all(start % 8 == 0 for start, _, _ in parcel.places)
    assert parcel.num_bytes == sum(-(-t.numel() * t.element_size() // 8) * 8 for t in TENSORS)


def test_on_the_host_nothing_moves() -> None:
    assert all(a is b for a, b in zip(upload(TENSORS, CPU), TENSORS, strict=True))

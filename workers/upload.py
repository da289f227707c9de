"""A step's host tensors to the device in one copy that the host does not wait for."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ALIGNMENT = 8  # bytes; of the widest numbers that are sent


@dataclass(frozen=True, slots=True)
class Parcel:
    """Tensors one behind the other in a buffer of bytes."""

    places: tuple[tuple[int, torch.dtype, torch.Size], ...]
    num_bytes: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> "Parcel":
        places, end = [], 0
        for tensor in tensors:
            places.append((end, tensor.dtype, tensor.shape))
            end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        return cls(tuple(places), end)

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in a buffer, uint8 [num_bytes]."""
        views = []
        for start, dtype, shape in self.places:
            stop = start + shape.numel() * dtype.itemsize
            views.append(buffer[start:stop].view(dtype).view(shape))
        return views

    def fill(self, tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """A host buffer that holds the tensors, from which the device can copy by itself.

        Pinned memory comes from torch's cache, which does not reuse it before the copy is over.
        """
        buffer = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        for view, tensor in zip(self.views(buffer), tensors, strict=True):
            view.copy_(tensor)
        return buffer


def upload(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The same tensors on the device; it has them before whatever is launched next."""
    if device.type == "cpu":
        return list(tensors)
    parcel = Parcel.of(tensors)
    return parcel.views(parcel.fill(tensors, device).to(device, non_blocking=True))

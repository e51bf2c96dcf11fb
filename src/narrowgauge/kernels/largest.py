"""The largest magnitude of a tensor, told by the kernel that wrote it.

A scale per tensor wants it before the first element can be cast. Who writes a tensor has every element in
registers anyway; asking afterwards is one more read of all of it. So it hangs on the tensor, for as long as
nobody changes that.
"""

import torch


def tell_largest(tensor: torch.Tensor, largest: torch.Tensor) -> None:
    """Hang the largest magnitude (0-dim float32; NaN if anything is NaN) on the tensor it is of."""
    tensor.largest = (largest, tensor._version)  # type: ignore[attr-defined]


def told_largest(tensor: torch.Tensor) -> torch.Tensor | None:
    """What was told of a tensor that has not changed since."""
    largest, version = getattr(tensor, "largest", (None, 0))
    return largest if version == tensor._version else None

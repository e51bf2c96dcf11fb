"""Reads an export back, with the readers of `import`, before it is published.

The readers share only the tables of names and formats with the writers: they decode what the layout's own
program would find there.
"""

from collections.abc import Mapping

import torch

from narrowgauge.errors import UserError

#: A decoded weight is an element times at most two scales: four roundings in float32.
_BOUND = 2.0**-21


def is_same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether a decoded tensor has the expected values, up to the rounding of a stored scale."""
    return bool(((found - expected).abs() <= _BOUND * expected.abs()).all())


def require_read_back(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Refuse files whose decoded tensors differ from the expected ones by more than rounding.

    Args:
        found: The tensors that a reader decoded from the files of an export, by our names.
        expected: The model's tensors in float32, by our names.
    """
    for name, values in expected.items():
        if not is_same(found[name], values):
            share = (found[name] - values).norm() / values.norm()
            raise UserError(
                f"the exported files were read back, and {name!r} differs from what the run multiplies by "
                f"{share:.2g} of its norm, so nothing was kept; report this fault with the run's recipe.toml "
                "and export with another --to"
            )

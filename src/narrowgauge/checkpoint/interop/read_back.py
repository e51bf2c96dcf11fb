"""An export is read again, with the readers of `import`, before it is published.

The readers share no code with the writers but the tables of names and of formats: they decode whatever the
layout's own program would find there.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from narrowgauge.checkpoint.interop.external_model import read_external_model
from narrowgauge.errors import UserError

#: A decoded weight is the product of an element and at most two scales: four roundings in float32.
_BOUND = 2.0**-21


def require_read_back(folder: Path, expected: Mapping[str, torch.Tensor]) -> None:
    """Refuse files whose tensors, decoded, are not the expected ones.

    Args:
        folder: The files of an export.
        expected: Float32 by our names, all of the model's.

    Raises:
        UserError: A tensor differs by more than the roundings of decoding it.
    """
    found = read_external_model(folder).tensors
    for name, values in expected.items():
        difference = (found[name] - values).abs()
        if not bool((difference <= _BOUND * values.abs()).all()):
            share = difference.norm() / values.norm()
            raise UserError(
                f"the exported files were read back, and {name!r} differs from what the run multiplies by "
                f"{share:.2g} of its norm, so nothing was kept; report this fault with the run's recipe.toml "
                "and export with another --to"
            )

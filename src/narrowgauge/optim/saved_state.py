"""Is a saved state that of this optimizer? It is asked before anything is copied."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from narrowgauge.errors import UserError


def require_same_tensors(current: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors of other names, shapes or dtypes.

    Raises:
        UserError: It is the state of another model or of another recipe; the first difference is named.
    """
    if unknown := sorted(saved.keys() - current.keys()) or sorted(current.keys() - saved.keys()):
        owner = "the checkpoint" if unknown[0] in saved else "this optimizer"
        raise UserError(
            f"the checkpoint's optimizer is another's: only {owner} has {unknown[0]!r}; "
            "use the run's own configuration, or `narrowgauge convert` to go on under another recipe"
        )
    for key, tensor in saved.items():
        if tensor.dtype != current[key].dtype or tensor.shape != current[key].shape:
            saved_as, kept_as = (f"{t.dtype} {tuple(t.shape)}" for t in (tensor, current[key]))
            raise UserError(
                f"the checkpoint's optimizer state {key!r} is {saved_as}, and this recipe keeps it as "
                f"{kept_as}; use the run's own recipe, or `narrowgauge convert` to go on under another"
            )


def require_same_groups(current: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Refuse the options of parameters that are divided into groups in another way.

    Raises:
        UserError: A group has another number of parameters, or there is another number of groups.
    """
    sizes = [len(group["params"]) for group in current]
    # An older state does not say how many parameters its groups have.
    saved_sizes = [len(g["params"]) if "params" in g else n for g, n in zip(saved, sizes, strict=False)]
    if len(saved) != len(current) or saved_sizes != sizes:
        raise UserError(
            f"the saved optimizer has {len(saved)} groups of {saved_sizes} parameters, and this one has "
            f"{len(current)} of {sizes}: make the optimizer with the groups that it was saved with"
        )

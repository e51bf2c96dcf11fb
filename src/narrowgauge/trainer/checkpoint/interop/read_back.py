"""Compares the files of an export with what they should hold.

    require_read_back     the values that `import` decodes, with those that the run multiplies
    different_tensors     what is stored, byte for byte, with another export of the same run
    wrong_input_scales    the scales of activations, with the inputs of the run

An export is read back before it is published. Files that come later, such as those that will be deployed, are
compared with a new export. The readers share only the tables of names and formats with the writers.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from narrowgauge.nn import Linear
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint.interop.activations import INPUT_SCALES, amax_of_scale
from narrowgauge.trainer.checkpoint.interop.gguf_file import GGUF_FILE, read_gguf
from narrowgauge.trainer.checkpoint.interop.name_map import name_map
from narrowgauge.trainer.checkpoint.interop.safetensors_reader import TensorFolder
from narrowgauge.trainer.models import Transformer

#: A decoded weight is an element times at most two scales: four roundings in float32.
_BOUND = 2.0**-21
_OTHER_BYTES = "other bytes"
_INPUT_SCALES = tuple(INPUT_SCALES.values())
_Stored = tuple[str, NDArray[np.uint8]]  # of a tensor in a file: type and shape as text, and its bytes


class Difference(NamedTuple):
    """A tensor of an export that is not that of the run: what is there, and what should be."""

    name: str
    found: str
    expected: str

    @property
    def is_of_form(self) -> bool:
        """Whether type or shape differ, or the tensor is on one side alone."""
        return not self.found.startswith(_OTHER_BYTES)

    def __str__(self) -> str:
        if not self.is_of_form:
            return f"{self.name} has {self.found} than the run's"
        return f"{self.name} is {self.found}, and should be {self.expected}"


def is_same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether a decoded tensor has the expected values, up to the rounding of a stored scale."""
    return bool(((found - expected).abs() <= _BOUND * expected.abs()).all())


def require_read_back(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Refuse files whose decoded tensors (`found`) differ from the expected ones by more than rounding."""
    for name, values in expected.items():
        if not is_same(found[name], values):
            share = (found[name] - values).norm() / values.norm()
            raise UserError(
                f"the exported files were read back, and {name!r} differs from what the run multiplies by "
                f"{share:.2g} of its norm, so nothing was kept; report this fault with the run's recipe.toml "
                "and export with another --to"
            )


def different_tensors(found: Path, expected: Path) -> list[Difference]:
    """The tensors of an export that are not those of another: names, types, shapes and bytes.

    Scales of activations depend on a text, and only have to be there: `wrong_input_scales` judges them.
    """
    differences = []
    theirs, ours = _stored(found), _stored(expected)
    for name in {**ours, **theirs}:
        (their_form, their_data), (our_form, our_data) = (of.get(name, _missing)() for of in (theirs, ours))
        if their_form != our_form:
            differences.append(Difference(name, their_form, our_form))
        elif not name.endswith(_INPUT_SCALES) and not np.array_equal(their_data, our_data):
            share = float(np.mean(their_data != our_data))
            differences.append(Difference(name, f"{_OTHER_BYTES} ({share:.1%} of them)", our_form))
    return differences


def has_input_scales(folder: Path) -> bool:
    """Whether an export stores scales of activations."""
    if (folder / GGUF_FILE).is_file():
        return False
    return any(name.endswith(_INPUT_SCALES) for name in TensorFolder(folder).file_of)


def wrong_input_scales(
    folder: Path, model: Transformer, amaxes: Mapping[str, float], within: float = 8.0
) -> list[Difference]:
    """The scales of activations that are missing, or reach neither as far as the inputs nor about so.

    `amaxes` has the largest magnitude of the input of each layer with a scale, by our names. `within` is the
    factor by which a scale may reach farther or less far: that of one text from another.
    """
    found, files = list[Difference](), TensorFolder(folder)
    for pair in name_map(model.config):
        ours, _, parameter = pair.ours.rpartition(".")
        for theirs in pair.theirs if parameter == "weight" and ours in amaxes else ():
            names = [f"{theirs.removesuffix('weight')}{part}" for part in _INPUT_SCALES]
            name = next((name for name in names if name in files.file_of), None)
            wanted = f"a scale that reaches about {amaxes[ours]:.3g}"
            if name is None:
                found.append(Difference(names[-1], "missing", wanted))
                continue
            scale, layer = float(files.read_stored(name).max()), model.get_submodule(ours)
            assert isinstance(layer, Linear)
            divides = name.endswith(_INPUT_SCALES[0])
            reach = amax_of_scale(layer.spec.casts["fprop.x"], scale, divides)
            if not amaxes[ours] / within <= reach <= amaxes[ours] * within:
                found.append(Difference(name, f"{scale:.3g}, which reaches {reach:.3g}", wanted))
    return found


def _missing() -> _Stored:
    return "missing", np.empty(0, np.uint8)


def _stored(folder: Path) -> Mapping[str, Callable[[], _Stored]]:
    """Functions that read each tensor of an export, by name."""
    if (folder / GGUF_FILE).is_file():
        tensors = read_gguf(folder / GGUF_FILE).tensors
        return {name: partial(lambda t: (f"{t.type} {t.shape}", t.data), t) for name, t in tensors.items()}

    def read(name: str) -> _Stored:
        tensor = files.read_stored(name)
        form = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        return form, tensor.reshape(-1).view(torch.uint8).numpy()

    files = TensorFolder(folder)
    return {name: partial(read, name) for name in files.file_of}

"""The tensors of a checkpoint as they are stored: headers are read, bytes are mapped and read where touched.

    model.safetensors, parts with an index, or any *.safetensors    8 bytes length, JSON header, bytes
    *.gguf                                                          `interop/gguf/container.py`

Files are mapped into memory, so that a sample of a tensor reads only its pages of the disk. A damaged header
is a fault of the checkpoint: it is recorded, and the other tensors are still checked. (Layout: the
safetensors format, "Format" in its README.)
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowgauge.checkpoint.interop.gguf.container import GgufError, is_gguf, read_gguf
from narrowgauge.checkpoint.interop.safetensors_reader import (
    INDEX,
    SINGLE_FILE,
    inside,
    read_json,
    refuse_pickle,
    refuse_pickles,
)
from narrowgauge.errors import UserError

#: Bits of an element, by the names that safetensors gives dtypes.
BITS: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I8", "U8", "BOOL"), 8),
    **{"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4},
}
_LARGEST_HEADER = 100_000_000  # bytes, the limit of the safetensors library


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file.

    Attributes:
        name: Its name in the file.
        dtype: As safetensors names it, "F8_E4M3", or ggml, "MXFP4".
        shape: Its shape; of a GGUF tensor with the columns last.
        data: Its bytes, uint8, mapped from the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    @property
    def elements(self) -> int:
        """The number of elements of the shape."""
        return math.prod(self.shape)

    def rows(self, at: NDArray[np.intp] | slice) -> NDArray[np.uint8]:
        """The bytes of some rows: (rows, bytes of a row), where rows are all axes but the last."""
        count = math.prod(self.shape[:-1])
        return np.ascontiguousarray(self.data.reshape(count, -1)[at])


@dataclass
class Checkpoint:
    """The tensors and settings of a folder or a file.

    Attributes:
        path: What was opened.
        tensors: By name.
        settings: `config.json`, with the table of `hf_quant_config.json` under "quantization_config" if it
            lacks one; the metadata of a GGUF file.
        faults: (file or tensor, sentence) of headers that cannot be trusted.
        is_gguf: Whether the tensors have ggml's types.
    """

    path: Path
    tensors: dict[str, Stored] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    faults: list[tuple[str, str]] = field(default_factory=list)
    is_gguf: bool = False


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the headers of a checkpoint.

    Raises:
        UserError: There are no tensors at `path`, or only pickles.
    """
    found = Checkpoint(path)
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = list(_files_of(path, found))
        _read_settings(path, found)
    else:
        raise UserError(f"{path} does not exist; name a folder with safetensors, or a .safetensors or .gguf")
    for file in files:
        if is_gguf(file):
            _add_gguf(file, found)
        elif file.suffix == ".safetensors":
            _add_safetensors(file, found)
        else:
            refuse_pickle(file)
            raise UserError(f"{file} is neither safetensors nor GGUF; name one of them, or a folder")
    return found


def _files_of(folder: Path, found: Checkpoint) -> Iterator[Path]:
    """The files of a folder: the single one, the files of its index, or all."""
    if (folder / SINGLE_FILE).exists():
        yield inside(folder, SINGLE_FILE)
        return
    if (folder / INDEX).exists():
        listed = read_json(inside(folder, INDEX)).get("weight_map")
        names = sorted(set(listed.values())) if isinstance(listed, dict) else []
        for name in names:
            try:
                yield inside(folder, str(name))
            except UserError as error:
                found.faults.append((str(name), f"{INDEX} lists this file: {error}"))
        return
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.gguf")])
    if not files:
        refuse_pickles(folder)
        if (folder / "config.toml").exists():
            raise UserError(
                f"{folder} is a run, and lint reads checkpoints of other programs; export it first"
            )
        raise UserError(f"{folder} has no .safetensors and no .gguf; name another folder, or a file")
    yield from (inside(folder, file.name) for file in files)


def _read_settings(folder: Path, found: Checkpoint) -> None:
    if (folder / "config.json").exists():
        found.settings = read_json(inside(folder, "config.json"))
    if (folder / "hf_quant_config.json").exists() and not found.settings.get("quantization_config"):
        said = read_json(inside(folder, "hf_quant_config.json"))
        found.settings["quantization_config"] = {"quant_method": "modelopt", **said}
    if (folder / INDEX).exists() and not (folder / SINGLE_FILE).exists():
        listed = read_json(inside(folder, INDEX)).get("weight_map")
        found.settings["weight_map"] = listed if isinstance(listed, dict) else {}


def _add_gguf(file: Path, found: Checkpoint) -> None:
    found.is_gguf = True
    try:
        read = read_gguf(file)
    except GgufError as error:
        found.faults.append((file.name, str(error)))
        return
    found.settings |= read.metadata
    found.faults += [(name, sentence) for name, sentence in read.faults]
    for tensor in read.tensors:
        found.tensors[tensor.name] = Stored(tensor.name, tensor.type, tensor.shape, tensor.data)


def _add_safetensors(file: Path, found: Checkpoint) -> None:
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            found.faults.append((file.name, f"a header of {length} bytes, in a file of {size}"))
            return
        try:
            header = json.loads(opened.read(length))
        except (ValueError, RecursionError) as error:
            found.faults.append((file.name, f"the header is not JSON: {error}"))
            return
    if not isinstance(header, dict):
        found.faults.append((file.name, "the header is not one JSON object"))
        return
    whole = np.memmap(file, np.uint8, "r", 8 + length) if size > 8 + length else np.zeros(0, np.uint8)
    for name, entry in header.items():
        if name != "__metadata__" and (fault := _add_tensor(name, entry, whole, found)):
            found.faults.append((name, fault))


def _add_tensor(name: str, entry: Any, whole: NDArray[np.uint8], found: Checkpoint) -> str:
    """Add the tensor of a header's entry; returns a sentence if the entry is impossible."""
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        start, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        return "its entry in the header has no dtype, shape and offsets"
    if not 0 <= start <= end <= len(whole):
        return f"bytes {start} to {end}, of {len(whole)} that the file has: it was cut off"
    bits = BITS.get(dtype)
    if bits is not None and math.prod(shape) * bits != (end - start) * 8:
        return f"{end - start} bytes do not hold {dtype} of shape {shape}"
    found.tensors[name] = Stored(name, dtype, shape, whole[start:end])
    return ""

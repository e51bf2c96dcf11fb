"""Megatron's token files: two files that share a name.

NAME.bin holds the concatenated ids of all sequences, without a header. NAME.idx locates the sequences; its
values are little-endian and unpadded:

| bytes          | content                                                                              |
|----------------|--------------------------------------------------------------------------------------|
| 0 to 8         | `MMIDIDX\\0\\0`                                                                        |
| 9 to 16        | uint64 version, 1                                                                    |
| 17             | uint8 code of the ids' dtype                                                         |
| 18 to 25       | uint64 S, the number of sequences                                                    |
| 26 to 33       | uint64 D, the number of documents + 1                                                |
| 4 S bytes      | int32 length of each sequence, in tokens                                             |
| 8 S bytes      | int64 offset of each sequence in NAME.bin, in bytes                                  |
| 8 D bytes      | int64 number of each document's first sequence; the first is 0, the last is S        |
| S bytes        | int8 mode of each sequence: only in multimodal files, which are not read             |

Codes: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16. Codes 6 and 7 are float types whose order depends
on the version; tokens are integers, so both are refused. `write_megatron` writes uint16 for vocabularies
below 65500, and int32 otherwise.

The end-of-document id, if there is one (`--append-eod`), comes *after* its document.

Source: `megatron/core/datasets/indexed_dataset.py` of github.com/NVIDIA/Megatron-LM.
"""

import struct
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import staged_file
from narrowgauge.trainer.data.token_files.token_file import OpenFile, unfit

MAGIC = b"MMIDIDX\0\0"
_LEGACY_MAGIC = b"TNTIDX\0\0"
_FIXED = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name)
    for code, name in ((1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2"))
}
_LARGEST_LENGTH = 2**31 - 1


def is_megatron_index(path: Path) -> bool:
    """Whether the file begins like Megatron's .idx, in the current or the old layout."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)).startswith((MAGIC, _LEGACY_MAGIC))


def open_megatron(path: Path) -> OpenFile:
    """The tokens of `path`, which is NAME.bin or NAME.idx, and the first of each document."""
    index, data = path.with_suffix(".idx"), path.with_suffix(".bin")
    for file in (index, data):
        if not file.is_file():
            raise unfit(file, "it is not there, and Megatron's tokens are an .idx and a .bin")
    raw = np.memmap(index, dtype=np.uint8, mode="r") if index.stat().st_size else np.empty(0, np.uint8)
    if raw[: len(_LEGACY_MAGIC)].tobytes() == _LEGACY_MAGIC:
        raise unfit(index, "it is in Megatron's old layout (TNTIDX), which Megatron itself no longer reads")
    if len(raw) < _FIXED.size or raw[: len(MAGIC)].tobytes() != MAGIC:
        raise unfit(index, f"it does not begin like Megatron's index ({MAGIC!r} and {_FIXED.size} bytes)")
    _, version, code, sequences, documents = _FIXED.unpack(raw[: _FIXED.size].tobytes())
    if version != 1:
        raise unfit(index, f"its version is {version}, and 1 is the only one known")
    if code not in _DTYPES:
        dtype = "floating-point numbers" if code in (6, 7) else "of an unknown type"
        raise unfit(index, f"its dtype code {code} means that the ids are {dtype}, but ids are integers")
    right = _FIXED.size + 12 * sequences + 8 * documents
    if len(raw) == right + sequences and sequences:
        raise unfit(index, "it has a mode for each sequence, as files of text and images have")
    if len(raw) != right or documents < 1:
        raise unfit(
            index,
            f"its header promises {sequences} sequences and {documents} document borders, so {right} bytes, "
            f"but it has {len(raw)}",
        )
    lengths = np.frombuffer(raw, "<i4", sequences, _FIXED.size)
    places = np.frombuffer(raw, "<i8", sequences, _FIXED.size + 4 * sequences)
    borders = np.frombuffer(raw, "<i8", documents, _FIXED.size + 12 * sequences)
    if borders[0] != 0 or borders[-1] != sequences or (np.diff(borders) < 0).any():
        raise unfit(index, f"its documents do not go from sequence 0 to sequence {sequences} in order")
    ids = _DTYPES[code]
    ends = places + lengths.astype(np.int64) * ids.itemsize
    if (lengths < 0).any() or places[:1].any() or (places[1:] != ends[:-1]).any():
        raise unfit(index, "its sequences do not lie end to end")
    total, size = int(ends[-1]) if len(ends) else 0, data.stat().st_size
    if total != size:
        raise unfit(
            index, f"it does not match {data.name}: its sequences end at byte {total}, and that has {size}"
        )
    if total == 0:
        raise unfit(data, "it holds no tokens")
    starts = (np.append(places, total) // ids.itemsize)[borders[:-1]]
    return OpenFile(data, "Megatron", np.memmap(data, dtype=ids, mode="r"), (index,), starts=starts)


def write_megatron(stem: Path, documents: Iterable[NDArray[Any]], vocab_size: int) -> tuple[Path, Path]:
    """Write STEM.bin and STEM.idx, one sequence for each document, and return both paths.

    The end-of-document id is the last of each document, as Megatron expects. The .idx appears last, so a pair
    with an .idx is complete.
    """
    dtype = np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")
    data, index = (stem.with_name(stem.name + suffix) for suffix in (".bin", ".idx"))
    lengths = array("i")
    with staged_file(data) as file:
        for document in documents:
            assert document.size == 0 or (document.min() >= 0 and document.max() < vocab_size)
            if document.size > _LARGEST_LENGTH:
                raise UserError(f"a document of {document.size} tokens is too long for {data}; split it")
            file.write(document.astype(dtype).tobytes())
            lengths.append(document.size)
    length_S = np.array(lengths, dtype="<i4")
    end_S = np.cumsum(length_S, dtype="<i8") * dtype.itemsize
    place_S = end_S - length_S.astype("<i8") * dtype.itemsize
    code = next(code for code, known in _DTYPES.items() if known == dtype)
    with staged_file(index) as file:
        file.write(_FIXED.pack(MAGIC, 1, code, len(length_S), len(length_S) + 1))
        for part in (length_S, place_S, np.arange(len(length_S) + 1, dtype="<i8")):
            file.write(part.tobytes())
    return data, index

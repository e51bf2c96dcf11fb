"""Layouts of token files, detected from their content.

| layout         | begins with                | the id between documents  | vocabulary              |
|----------------|----------------------------|---------------------------|-------------------------|
| llm.c          | int32 20240520 or 20240801 | precedes a document       | GPT-2's, or Llama 3's   |
| Megatron       | its .idx with `MMIDIDX`    | follows it, if present    | not stated              |
| datatrove      | its .ds.index and metadata | follows it, if present    | names its tokenizer     |
| numpy (.npy)   | `\\x93NUMPY`, 1-D integers  | begins the file, or       | not stated              |
|                |                            | follows a document        |                         |
| bare (nanoGPT) | a token: uint16, no header | follows it                | not stated              |

Ids of another dtype without a header are refused (`_dtype_of_ids`): `numpy.save` states the dtype.

modded-nanogpt's files are llm.c's. A file is bare if it has an even number of bytes, matches none of the
other layouts, is not text, is not in a format recognised by its first bytes (compressed, parquet, pickled
...), and its values repeat as in a text: fewer than half of them are distinct.

Every file is memory-mapped; none is executed or unpickled. llm.c's layout, which is ours, is in `tokens`.

**Megatron** has two files that share a name. NAME.bin holds the concatenated ids of all sequences, without a
header. NAME.idx locates the sequences; its values are little-endian and unpadded:

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

The end-of-document id, if there is one (`--append-eod`), comes *after* its document. Source:
`megatron/core/datasets/indexed_dataset.py` of github.com/NVIDIA/Megatron-LM.

**datatrove** has three files, as its `DocumentTokenizer` and `DocumentTokenizerMerger` write them:

| file            | content                                                                             |
|-----------------|-------------------------------------------------------------------------------------|
| `X.ds`          | the ids of all documents, little-endian, without a header                           |
| `X.ds.index`    | uint64 end of each document, in tokens                                              |
| `X.ds.metadata` | text: `TOKENIZER|BYTES OF AN ID`, then the number of ids, then that for people       |
| `X.ds.loss`     | a mask of the targets; refused, because targets are chosen by documents alone        |

An id has 2 bytes if the tokenizer has at most 65536 entries, otherwise 4. TOKENIZER is a path on the machine
that tokenized, or a name on the Hugging Face hub. The end of a document, if the pipeline names one
(`eos_token`), comes after it. Source: `pipeline/tokens/tokenizer.py` of github.com/huggingface/datatrove,
0.10.
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
from narrowgauge.trainer.data.sources.paths import file_type
from narrowgauge.trainer.data.token_files.tokens import (
    HEADER_BYTES,
    PICKLE,
    ZIP,
    LlmcMagic,
    OpenFile,
    open_token_file,
    unfit,
)

DATATROVE = ".ds"
BESIDE_DATATROVE = (".index", ".metadata")
_MEGATRON = b"MMIDIDX\0\0"
_OLD_MEGATRON = b"TNTIDX\0\0"
_FIXED = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name)
    for code, name in ((1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2"))
}
_LARGEST_LENGTH = 2**31 - 1
_LLM_C = {  # and their vocabularies
    LlmcMagic.TOKENS: ("llm.c uint16", (50257, 50256)),
    LlmcMagic.LLAMA3_TOKENS: ("llm.c uint32", (128256, 128000)),
}
# gzip, zstd, bzip2, xz, zip, parquet, PNG, JPEG, PDF, ELF, HDF5, SQLite, UTF-16 of either order
_NOT_TOKENS = (
    *(b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ", ZIP, b"PAR1", b"\x89PNG", b"\xff\xd8\xff"),
    *(b"%PDF", b"\x7fELF", b"\x89HDF", b"SQLite", b"\xff\xfe", b"\xfe\xff"),
)
_PRINTABLE = bytes([9, 10, 13, *range(32, 127)])
_SAMPLE_BYTES = 1 << 16
_FEW = 4096  # too few bytes to judge by repetition
_NUMPY, _LLMQ = b"\x93NUMPY", b"BIN.TOK\n"
_WIDE_DTYPES = ("<f8", ">f8", "<i8", ">i8", "<f4", ">f4", "<i4", ">i4")
_MOST_ID = 1 << 21
_ENOUGH = 16, 256  # the fewest wide ids, and the fewest of two bytes, that are not 0, to judge by


def open_tokens(path: Path) -> OpenFile | None:
    """A token file of any layout, by its first bytes, its size and its .idx; None if it does not hold tokens.

    Raises:
        OSError: the file cannot be read.
    """
    if found := _datatrove(path):
        return found
    with path.open("rb") as file:
        head = file.read(_SAMPLE_BYTES)
    magic = struct.unpack("<i", head[:4])[0] if len(head) >= 4 else 0
    if magic in list(LlmcMagic):
        if (known := LlmcMagic(magic)) not in _LLM_C:
            raise unfit(path, f"it is llm.c's {known.kind}")
        layout, vocabulary = _LLM_C[known]
        ids = open_token_file(path)
        return OpenFile(path, layout, ids, boundary_first=True, vocabulary=vocabulary)
    if head.startswith(_LLMQ):
        raise unfit(path, "it is llmq's, which narrowgauge does not read", "save its ids with numpy.save")
    if head.startswith(_NUMPY):
        return _numpy_array(path)
    if (index := path.with_suffix(".idx")).is_file():
        with index.open("rb") as file:
            if file.read(len(_MEGATRON)).startswith((_MEGATRON, _OLD_MEGATRON)):
                return open_megatron(path)
    size = path.stat().st_size
    is_other = size == 0 or size % 2 or _is_known(path, head) or _is_text(head) or not _repeats(head)
    if is_other or file_type(path) is not None:  # a bare layout is only a guess, so names of texts exclude it
        return None
    if magic and size >= HEADER_BYTES and not any(head[12:HEADER_BYTES]):
        version, count = struct.unpack("<2i", head[4:12])
        raise unfit(path, f"its header is unknown (magic {magic}, version {version}, {count} tokens)")
    if dtype := _dtype_of_ids(_sample(path)):
        raise unfit(
            path,
            f"its bytes look like ids of numpy's {dtype}, and ids without a header must be uint16",
            f"save them with a header: numpy.save('ids.npy', numpy.fromfile({path.name!r}, '{dtype}')"
            ".astype('uint32'))",
        )
    return OpenFile(path, "bare uint16", np.memmap(path, dtype="<u2", mode="r"))


def _is_known(path: Path, head: bytes) -> bool:
    """Whether the file is in another format; a pickle may begin like tokens, but ends in a dot."""
    if head.startswith(PICKLE):
        with path.open("rb") as file:
            file.seek(-1, 2)
            return file.read() == b"."
    return head.startswith(_NOT_TOKENS)


def _is_text(head: bytes) -> bool:
    """Whether the bytes are text, even with stray control characters or in an old 8-bit encoding."""
    if len(head.translate(None, _PRINTABLE)) < len(head) / 5:
        return True
    controls = sum(byte < 9 for byte in head)
    valid = head.decode("utf-8", "ignore").encode("utf-8")  # the last character may be incomplete
    return controls < len(head) / 100 and len(valid) > len(head) - 4


def _repeats(head: bytes) -> bool:
    """Whether few of the values are distinct, as in tokens of text and not in compressed bytes."""
    if len(head) < _FEW:
        return True
    numbers: NDArray[Any] = np.frombuffer(head[: len(head) // 2 * 2], "<u2")
    return len(np.unique(numbers)) < len(numbers) / 2


def _numpy_array(path: Path) -> OpenFile | None:
    """The ids of a .npy file; None if it holds another kind of array. Nothing is unpickled."""
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r")  # by default it refuses pickles
    except ValueError as error:  # cut, or an array of Python objects
        raise unfit(path, f"numpy cannot map it ({error})") from None
    has_ids = array.ndim == 1 and array.dtype.kind in "iu" and len(array)
    return OpenFile(path, "numpy", array, boundary_first=None) if has_ids else None


def _sample(path: Path) -> bytes:
    """Eight parts from all over a file, which may begin with thousands of equal ids."""
    data, part = np.memmap(path, dtype=np.uint8, mode="r"), _SAMPLE_BYTES // 8
    if len(data) <= _SAMPLE_BYTES:
        return data.tobytes()
    step = (len(data) - part) // 7 // 8 * 8
    return b"".join(data[i * step : i * step + part].tobytes() for i in range(8))


def _dtype_of_ids(sample: bytes) -> str | None:
    """The numpy dtype whose ids the bytes are more likely than uint16's; None if they are uint16's.

    Read as the right dtype, they are whole numbers of a vocabulary, many of them not 0, which two uint16 ids
    side by side almost never are. Of uint16, the upper bytes vary less than the lower ones; in the other byte
    order it is the other way round, and bytes that are ids themselves vary alike at odd and even places.
    """
    for dtype in _WIDE_DTYPES:
        size = np.dtype(dtype).itemsize
        if _are_wide_ids(np.frombuffer(sample[: len(sample) // size * size], dtype)):
            return dtype.removeprefix("<")
    numbers: NDArray[Any] = np.frombuffer(sample[: len(sample) // 2 * 2], "<u2")
    numbers = numbers[numbers != 0]  # not padding
    if len(numbers) < _ENOUGH[1]:
        return None
    # The share of each value among the bytes.
    low, high = (np.bincount(byte, minlength=256) / len(numbers) for byte in (numbers & 255, numbers >> 8))
    if low[0] == 1 or low @ low > 1.5 * (high @ high):
        return ">u2"
    return "u1" if low @ high > 0.97 * np.sqrt((low @ low) * (high @ high)) else None


def _are_wide_ids(values: NDArray[Any]) -> bool:
    with np.errstate(invalid="ignore"):
        numbers = values.astype(np.float64)
        if not (np.abs(numbers) < _MOST_ID).all() or (numbers % 1 != 0).any():
            return False
    ids = np.abs(numbers.astype(np.int64))
    # Two small ids, such as letters, are a number beyond 65535; an id that is, in a text, rarely ends so.
    is_plain = ids.max(initial=0) < 1 << 16 or (ids % (1 << 16) >= 32).mean() > 0.5
    return bool(is_plain and np.count_nonzero(ids) >= _ENOUGH[0])


def is_idle(path: Path) -> bool:
    """Whether a file is that of a task without documents: datatrove writes one for each of its tasks."""
    metadata = Path(f"{path}.metadata")
    is_empty = path.suffix == DATATROVE and not path.stat().st_size and metadata.is_file()
    return is_empty and metadata.read_bytes().split(b"\n")[1:2] == [b"0"]


def _datatrove(path: Path) -> OpenFile | None:
    """The tokens of X.ds, the first of each document, and the name of the tokenizer; None of another file."""
    index, metadata = (Path(f"{path}{suffix}") for suffix in BESIDE_DATATROVE)
    if path.suffix != DATATROVE and not index.is_file():
        return None
    for file, setting in ((index, "save_index"), (metadata, "save_final_metadata")):
        if not file.is_file():
            remedy = f"copy it there, or tokenize with {setting}=True"
            raise unfit(path, f"there is no {file.name} next to it", remedy)
    if Path(f"{path}.loss").is_file():
        remedy = "tokenize without save_loss_metadata, or move that file away to train on all targets"
        raise unfit(path, f"{path.name}.loss masks targets, which is not read", remedy)
    try:
        first, count = metadata.read_text(encoding="utf-8").splitlines()[:2]
        name, _, size = first.rpartition("|")
        dtype: np.dtype[Any] = np.dtype({"2": "<u2", "4": "<u4"}[size])
        total = int(count)
    except (ValueError, KeyError):
        raise unfit(metadata, "it does not begin with TOKENIZER|2 or |4 and a number of ids") from None
    if index.stat().st_size % 8 or not index.stat().st_size:
        raise unfit(index, f"it has {index.stat().st_size} bytes, and each end of a document has 8")
    ends = np.fromfile(index, "<i8")
    if (np.diff(ends, prepend=0) < 0).any():
        raise unfit(index, "its documents do not end one after the other")
    held = path.stat().st_size / dtype.itemsize
    if not held == total == ends[-1]:
        raise unfit(
            path, f"it holds {held:g} ids, its index ends at {ends[-1]}, and its metadata says {total}"
        )
    if not total:
        raise unfit(path, "it holds no tokens")
    starts = np.unique(np.append(0, ends[:-1]))  # an empty document starts where the next one does
    named = None if name.startswith("Unknown Tokenizer") else name
    return OpenFile(
        path,
        f"datatrove with tokenizer {named}" if named else "datatrove",
        np.memmap(path, dtype=dtype, mode="r"),
        (index, metadata),
        starts=starts[starts < total],
        tokenizer=named,
    )


def open_megatron(path: Path) -> OpenFile:
    """The tokens of `path`, which is NAME.bin or NAME.idx, and the first of each document."""
    index, data = path.with_suffix(".idx"), path.with_suffix(".bin")
    for file in (index, data):
        if not file.is_file():
            raise unfit(file, "it is not there, and Megatron's tokens are an .idx and a .bin")
    raw = np.memmap(index, dtype=np.uint8, mode="r") if index.stat().st_size else np.empty(0, np.uint8)
    if raw[: len(_OLD_MEGATRON)].tobytes() == _OLD_MEGATRON:
        raise unfit(index, "it is in Megatron's old layout (TNTIDX), which Megatron itself no longer reads")
    if len(raw) < _FIXED.size or raw[: len(_MEGATRON)].tobytes() != _MEGATRON:
        raise unfit(index, f"it does not begin like Megatron's index ({_MEGATRON!r} and {_FIXED.size} bytes)")
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
        file.write(_FIXED.pack(_MEGATRON, 1, code, len(length_S), len(length_S) + 1))
        for part in (length_S, place_S, np.arange(len(length_S) + 1, dtype="<i8")):
            file.write(part.tobytes())
    return data, index

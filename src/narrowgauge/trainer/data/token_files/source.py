"""Finds token files of other programs, and detects their layout from their content.

A source is a token file, a directory or a glob; Megatron's two files may also be named by their common name
without a suffix. In a directory, files that end in .bin, .npy or .ds are examined, but not those in
sub-folders; their content decides; a warning names these, and documents beside them.

**Held out** is, by the first rule that matches:

1. in a directory or a glob: the files with `val`, `valid`, `validation` or `eval` as a word of their name
   (`fineweb_val_000000.bin`); those with `test` are not used;
2. for a file or a glob with the word `train` in its name: the files of the same name with `val` instead; a
   file with the word `val` names the same pair, if the other file exists;
3. the last tenth of the tokens (`loading.dataset`).

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

Every file is memory-mapped; none is executed or unpickled.
"""

import glob
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import user_path
from narrowgauge.trainer.data.signatures import PICKLE, ZIP, LlmcMagic
from narrowgauge.trainer.data.sources.paths import LINES, TABLE, file_type, visible_files, warn_of_the_rest
from narrowgauge.trainer.data.token_files import datatrove
from narrowgauge.trainer.data.token_files.megatron import is_megatron_index, open_megatron
from narrowgauge.trainer.data.token_files.token_file import HEADER_BYTES, OpenFile, open_token_file, unfit

_ENDINGS = (".bin", ".npy", datatrove.SUFFIX)
_HELD_OUT_WORDS = {"val", "valid", "validation", "eval"}
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

Files = list[OpenFile]


def token_files(source: str) -> tuple[Files, Files] | None:
    """The files of a source to train on and those held out (none: the tail); None if it holds no tokens."""
    path = user_path(source)
    try:
        if path.is_dir():
            candidates = sorted(p for p in path.iterdir() if p.suffix in _ENDINGS and p.name[0] != ".")
            files = [
                file
                for p in candidates
                if p.is_file() and not datatrove.is_idle(p) and (file := open_tokens(p))
            ]
            if not files:
                return None
            others = [file.path for file in visible_files(path) if file.path.suffix != ".json"]
            found = [p for p in others if p.suffix in _ENDINGS or file_type(p) in (LINES, TABLE)]
            warn_of_the_rest(source, found, candidates)
            return _by_name(source, files)
        if not path.exists() and glob.has_magic(source):
            files = _matches(source)
            if not files:
                return None
            train, val = _by_name(source, files)
            known = {file.path for file in train}
            pairs = _matches(_with_word(source, "train", "val"))
            return train, val or [file for file in pairs if file.path not in known]
        path = _data_of(path)
        if not path.is_file() or not (file := open_tokens(path)):
            return None
        pair = [Path(_with_word(str(path), *words)) for words in (("val", "train"), ("train", "val"))]
        if pair[0] != pair[1] and all(map(Path.is_file, pair)):
            first, second = map(open_tokens, pair)
            if first and second:
                return [first], [second]
        return [file], []
    except OSError as error:
        raise UserError(
            f"cannot look into {source!r}: {error.strerror}; give a source that can be read"
        ) from None


def _data_of(path: Path) -> Path:
    """The file with the ids where one beside it is named, or Megatron's common name; else the path itself."""
    if path.suffix in datatrove.BESIDE and path.with_suffix("").is_file():
        return path.with_suffix("")
    for index in (path, path.with_name(path.name + ".idx")):
        if index.suffix == ".idx" and index.is_file():
            data = index.with_suffix(".bin")
            if not data.is_file():
                raise unfit(index, f"there is no {data.name} next to it")
            return data
    return path


def _matches(pattern: str) -> Files:
    """The token files that a glob matches, in order; apart from text files, either all match or none."""
    names = sorted(glob.glob(str(user_path(pattern)), recursive=True))
    paths = [Path(n) for n in names if Path(n).is_file() and file_type(Path(n)) is None]
    paths = [path for path in dict.fromkeys(map(_data_of, paths)) if not datatrove.is_idle(path)]
    opened = [open_tokens(path) for path in paths]
    files = [file for file in opened if file]
    if files and None in opened:
        raise UserError(
            f"data source {pattern!r} leads to token files and to {paths[opened.index(None)]}, which does "
            "not hold tokens; narrow the glob"
        )
    return files


def _by_name(source: str, files: Files) -> tuple[Files, Files]:
    words = {file: set(re.split(r"[^a-z]+", file.path.stem.lower())) for file in files}
    val = [file for file in files if words[file] & _HELD_OUT_WORDS]
    train = [file for file in files if file not in val and "test" not in words[file]]
    if not train:
        raise UserError(
            f"data source {source!r} holds nothing to train on: by their names its files are held out; "
            "name one of them to train on it"
        )
    return train, val


def _with_word(source: str, word: str, other: str) -> str:
    """The source with a word of its last part replaced by another."""
    head, slash, name = source.rpartition("/")
    return head + slash + re.sub(rf"(?<![A-Za-z]){word}(?![A-Za-z])", other, name, count=1)


def open_tokens(path: Path) -> OpenFile | None:
    """A token file of any layout, by its first bytes, its size and its .idx; None if it does not hold tokens.

    Raises:
        OSError: the file cannot be read.
    """
    if found := datatrove.open_datatrove(path):
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
        raise unfit(path, "it is llmq's, a layout that is no longer read", "save its ids with numpy.save")
    if head.startswith(_NUMPY):
        return _numpy_array(path)
    index = path.with_suffix(".idx")
    if index.is_file() and is_megatron_index(index):
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

"""datatrove's tokenized files, as its `DocumentTokenizer` and `DocumentTokenizerMerger` write them.

| file            | content                                                                             |
|-----------------|-------------------------------------------------------------------------------------|
| `X.ds`          | the ids of all documents, little-endian, without a header                           |
| `X.ds.index`    | uint64 end of each document, in tokens                                              |
| `X.ds.metadata` | text: `TOKENIZER|BYTES OF AN ID`, then the number of ids, then that for people       |
| `X.ds.loss`     | a mask of the targets; refused, because targets are chosen by documents alone        |

An id has 2 bytes if the tokenizer has at most 65536 entries, otherwise 4. TOKENIZER is a path on the machine
that tokenized, or a name on the Hugging Face hub. The end of a document, if the pipeline names one
(`eos_token`), comes after it.

Source: `pipeline/tokens/tokenizer.py` of github.com/huggingface/datatrove, 0.10.
"""

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import user_path
from narrowgauge.trainer.data.token_files.token_file import OpenFile, unfit
from narrowgauge.trainer.data.tokenization.tokenizer import Tokenizer, load_tokenizer

SUFFIX = ".ds"
BESIDE = (".index", ".metadata")


def is_idle(path: Path) -> bool:
    """Whether a file is that of a task without documents: datatrove writes one for each of its tasks."""
    metadata = Path(f"{path}.metadata")
    is_empty = path.suffix == SUFFIX and not path.stat().st_size and metadata.is_file()
    return is_empty and metadata.read_bytes().split(b"\n")[1:2] == [b"0"]


def open_datatrove(path: Path) -> OpenFile | None:
    """The tokens of X.ds, the first of each document, and the name of the tokenizer; None of another file."""
    index, metadata = (Path(f"{path}{suffix}") for suffix in BESIDE)
    if path.suffix != SUFFIX and not index.is_file():
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


def checked_tokenizer(opened: OpenFile, chosen: Tokenizer | None) -> Tokenizer:
    """The tokenizer that a file's metadata names, read from that path or from the hub's cache.

    `chosen` is the tokenizer to use instead, if it is the same.
    """
    path, name, size = opened.path, opened.tokenizer or "", opened.tokens.dtype.itemsize
    file = _find(name)
    made = load_tokenizer(file) if file else chosen
    if made is None:
        raise UserError(
            f"{path} was made with tokenizer {name!r}, which is not on this machine; name its tokenizer.json "
            "with --data.tokenizer FILE"
        )
    if file is None:
        warnings.warn(
            f"{path}: tokenizer {name!r} is not here, so the chosen one is not compared", stacklevel=2
        )
    right_size = 4 if made.library.get_vocab_size() > 1 << 16 else 2
    if (chosen and made.digest != chosen.digest) or size != right_size:
        raise UserError(
            f"{path} was made with tokenizer {name!r} and ids of {size} bytes, and not with the chosen one "
            f"of {(chosen or made).vocab_size} entries; leave data.tokenizer out"
        )
    return made


def _find(name: str) -> Path | None:
    if (path := user_path(name)).exists():
        return path
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "tokenizer.json")
    except HFValidationError:  # a path of the machine that tokenized
        return None
    return Path(cached) if isinstance(cached, str) else None

"""Export a dataset as token files of other programs.

| layout     | files                                           | the end-of-document id                 |
|------------|-------------------------------------------------|----------------------------------------|
| `llmc`     | STEM_train_000000.bin ..., STEM_val_000000.bin  | before each document, as in llm.c      |
| `megatron` | STEM_train_document, STEM_val_document: .bin    | after each document (--append-eod);    |
|            | and .idx; or all documents in NAME.bin and .idx | each document is one sequence          |

Megatron itself writes one pair of files, such as `wikipedia_text_document`, which `--split` divides by
position. With a NAME, the export is one such pair, and the held-out documents come last.

The tokenizer.json is written to the same directory, so that the directory can be read as a data source.
llm.c's C programs read only GPT-2's ids. Other vocabularies up to 65536 use the same layout, larger ones the
layout that llm.c uses for Llama 3.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowgauge.system.errors import UserError, unknown
from narrowgauge.system.files import staged_directory
from narrowgauge.trainer.data.token_files.layouts import write_megatron
from narrowgauge.trainer.data.token_files.tokens import (
    SHARD_TOKENS,
    Dataset,
    TokenStream,
    TokenWriter,
    shard_paths,
)
from narrowgauge.trainer.data.tokenization.formats import TOKENIZER_FILE

TOKEN_LAYOUTS = ("llmc", "megatron")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def check_name(name: str | None, layout: str) -> None:
    """Check the name of exported files; a `UserError` if it is malformed or the layout's names are fixed."""
    if name is None:
        return
    if layout not in TOKEN_LAYOUTS:
        raise UserError(
            f"--name {name}: files of layout {layout!r} have fixed names; leave it out, or choose --layout "
            f"{' or '.join(TOKEN_LAYOUTS)}"
        )
    if not _NAME.fullmatch(name):
        raise UserError(
            f"--name {name!r} begins the names of files in --out; use only letters, digits and _ . - in it"
        )


def export_tokens(dataset: Dataset, layout: str, directory: Path, name: str | None = None) -> None:
    """Write both parts of a dataset in one of `TOKEN_LAYOUTS`, into a new or empty directory.

    The directory appears in full or not at all. `name` is the prefix of the file names, "text" by default;
    for `megatron`, the full name of the single pair.
    """
    if layout not in TOKEN_LAYOUTS:
        raise unknown("token layout", layout, TOKEN_LAYOUTS)
    check_name(name, layout)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"cannot write tokens to {directory}: it is not an empty directory; name another")
    size, end = dataset.tokenizer.vocab_size, dataset.tokenizer.end_of_document
    parts = {"train": dataset.train.streams, "val": dataset.val.streams}
    with staged_directory(directory) as staging:
        dataset.tokenizer.save(staging / TOKENIZER_FILE)
        if layout == "llmc":
            for part, streams in parts.items():
                paths = shard_paths(staging, f"{name or 'text'}_{part}")
                with TokenWriter(paths, size, SHARD_TOKENS) as writer:
                    for document in _documents(streams):
                        writer.write(np.concatenate([[end], document]))
            return
        stems = {f"text_{part}_document": streams for part, streams in parts.items()}
        for stem, streams in (stems if name is None else {name: parts["train"] + parts["val"]}).items():
            chunks = (np.concatenate([document, [end]]) for document in _documents(streams))
            write_megatron(staging / stem, chunks, size)


def _documents(streams: Iterable[TokenStream]) -> Iterator[NDArray[Any]]:
    return chain.from_iterable(stream.documents() for stream in streams)

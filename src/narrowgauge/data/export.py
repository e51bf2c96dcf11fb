"""Export of our tokens as token files of other programs.

| layout     | files                                           | the end-of-document id                 |
|------------|-------------------------------------------------|----------------------------------------|
| `llmc`     | STEM_train_000000.bin ..., STEM_val_000000.bin  | before each document, as llm.c has it  |
| `megatron` | STEM_train_document, STEM_val_document: .bin    | after each, as with --append-eod; one  |
|            | and .idx                                        | sequence a document                    |

The tokenizer.json is in the same directory, so that it is a data source again. llm.c's C programs read
GPT-2's ids only; other vocabularies up to 65536 are written in the same layout, larger ones in that of its
Llama 3.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowgauge.data.loading.dataset import Dataset
from narrowgauge.data.token_files.megatron import write_megatron
from narrowgauge.data.token_files.token_file import write_token_shards
from narrowgauge.data.token_files.token_stream import Mixture
from narrowgauge.data.tokenization.formats import TOKENIZER_FILE
from narrowgauge.errors import UserError, unknown
from narrowgauge.files import staged_directory

TOKEN_LAYOUTS = ("llmc", "megatron")


def export_tokens(dataset: Dataset, layout: str, directory: Path, stem: str = "text") -> None:
    """Write both parts of a dataset in one of `TOKEN_LAYOUTS`, into a new or empty directory.

    The directory appears in full or not at all; file names begin with `stem`.

    Raises:
        UserError: the layout is unknown, or the directory is not empty.
    """
    if layout not in TOKEN_LAYOUTS:
        raise unknown("token layout", layout, TOKEN_LAYOUTS)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"cannot write tokens to {directory}: it is not an empty directory; name another")
    size, end = dataset.tokenizer.vocab_size, dataset.tokenizer.end_of_document
    with staged_directory(directory) as staging:
        dataset.tokenizer.save(staging / TOKENIZER_FILE)
        for part, mixture in (("train", dataset.train), ("val", dataset.val)):
            if layout == "llmc":
                chunks = (np.concatenate([[end], document]) for document in _documents(mixture))
                write_token_shards(staging, f"{stem}_{part}", chunks, size)
            else:
                chunks = (np.concatenate([document, [end]]) for document in _documents(mixture))
                write_megatron(staging / f"{stem}_{part}_document", chunks, size)


def _documents(mixture: Mixture) -> Iterator[NDArray[Any]]:
    for stream in mixture.streams:
        yield from stream.documents()

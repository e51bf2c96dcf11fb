"""How do our tokens become somebody else's files?

| layout     | files                                           | the end-of-document id                 |
|------------|-------------------------------------------------|----------------------------------------|
| `llmc`     | STEM_train_000000.bin ..., STEM_val_000000.bin  | before each document, as llm.c has it  |
| `megatron` | STEM_train_document, STEM_val_document: .bin    | after each, as with --append-eod; one  |
|            | and .idx                                        | sequence a document                    |

The tokenizer.json lies beside them, so that they are a data source of ours again. llm.c's C programs take
GPT-2's ids only; other vocabularies up to 65536 come in the same layout, larger ones in that of its Llama 3.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowgauge.data.loading.dataset import Dataset
from narrowgauge.data.preparation.publish import whole_directory
from narrowgauge.data.token_files.megatron import write_megatron
from narrowgauge.data.token_files.token_file import write_token_shards
from narrowgauge.data.token_files.token_stream import Mixture
from narrowgauge.data.tokenization.formats import TOKENIZER_FILE
from narrowgauge.errors import UserError, unknown

TOKEN_LAYOUTS = ("llmc", "megatron")


def export_tokens(dataset: Dataset, layout: str, directory: Path, stem: str = "text") -> None:
    """Write both parts of a dataset in another's layout; the directory appears whole or not at all.

    Errors: `UserError` for an unknown layout, and for a directory that is not empty.
    """
    if layout not in TOKEN_LAYOUTS:
        raise unknown("token layout", layout, TOKEN_LAYOUTS)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"cannot write tokens to {directory}: it is not an empty directory; name another")
    size, end = dataset.tokenizer.vocab_size, dataset.tokenizer.end_of_document
    with whole_directory(directory) as aside:
        dataset.tokenizer.save(aside / TOKENIZER_FILE)
        for part, mixture in (("train", dataset.train), ("val", dataset.val)):
            if layout == "llmc":
                chunks = (np.concatenate([[end], document]) for document in _documents(mixture))
                write_token_shards(aside, f"{stem}_{part}", chunks, size)
            else:
                chunks = (np.concatenate([document, [end]]) for document in _documents(mixture))
                write_megatron(aside / f"{stem}_{part}_document", chunks, size)


def _documents(mixture: Mixture) -> Iterator[NDArray[Any]]:
    for stream in mixture.streams:
        yield from stream.documents()

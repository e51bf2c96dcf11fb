"""Where do tokens come from? Sources, tokenizers, token files, their order, and batches."""

from narrowgauge.data.corpus import Corpus, Manifest, is_corpus, open_corpus
from narrowgauge.data.loader import count_windows, training_batch, validation_batches
from narrowgauge.data.order import samples
from narrowgauge.data.prepare import DEFAULT_TOKENIZER, cache_directory, prepare
from narrowgauge.data.sieve import Options
from narrowgauge.data.sources import Document, documents
from narrowgauge.data.token_file import (
    TokenFile,
    Tokens,
    open_token_file,
    verify_token_file,
    write_token_file,
)
from narrowgauge.data.tokenizer import Tokenizer, bytes_tokenizer, load_tokenizer, train_bpe

__all__ = [
    "DEFAULT_TOKENIZER",
    "Corpus",
    "Document",
    "Manifest",
    "Options",
    "TokenFile",
    "Tokenizer",
    "Tokens",
    "bytes_tokenizer",
    "cache_directory",
    "count_windows",
    "documents",
    "is_corpus",
    "load_tokenizer",
    "open_corpus",
    "open_token_file",
    "prepare",
    "samples",
    "train_bpe",
    "training_batch",
    "validation_batches",
    "verify_token_file",
    "write_token_file",
]

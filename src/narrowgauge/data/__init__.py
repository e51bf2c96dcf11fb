"""Where do tokens come from? Sources, tokenizers, token files, their order, and batches."""

from narrowgauge.data.corpus import Corpus, Manifest, is_corpus, open_corpus
from narrowgauge.data.dataset import AUTO, Dataset, open_data, split_sources
from narrowgauge.data.loader import Batch, Loader, count_windows, training_batch, validation_batches
from narrowgauge.data.megatron import open_megatron, write_megatron
from narrowgauge.data.order import first_samples, mixed_samples, samples, shares_of
from narrowgauge.data.prepare import DEFAULT_TOKENIZER, cache_directory, prepare
from narrowgauge.data.sieve import Options
from narrowgauge.data.sources import Document, documents
from narrowgauge.data.stream import Mixture, Stream
from narrowgauge.data.token_export import TOKEN_LAYOUTS, export_tokens
from narrowgauge.data.token_file import (
    TokenFile,
    Tokens,
    open_token_file,
    verify_token_file,
    write_token_file,
    write_token_shards,
)
from narrowgauge.data.tokenizer import (
    Tokenizer,
    bytes_tokenizer,
    ids_tokenizer,
    load_tokenizer,
    train_bpe,
)

__all__ = [
    "AUTO",
    "DEFAULT_TOKENIZER",
    "TOKEN_LAYOUTS",
    "Batch",
    "Corpus",
    "Dataset",
    "Document",
    "Loader",
    "Manifest",
    "Mixture",
    "Options",
    "Stream",
    "TokenFile",
    "Tokenizer",
    "Tokens",
    "bytes_tokenizer",
    "cache_directory",
    "count_windows",
    "documents",
    "export_tokens",
    "first_samples",
    "ids_tokenizer",
    "is_corpus",
    "load_tokenizer",
    "mixed_samples",
    "open_corpus",
    "open_data",
    "open_megatron",
    "open_token_file",
    "prepare",
    "samples",
    "shares_of",
    "split_sources",
    "train_bpe",
    "training_batch",
    "validation_batches",
    "verify_token_file",
    "write_megatron",
    "write_token_file",
    "write_token_shards",
]

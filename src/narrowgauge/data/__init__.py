"""Where do tokens come from? Sources, tokenizers, token files, their order, and batches."""

from narrowgauge.data.corpus import Corpus, CorpusManifest, is_corpus, open_corpus
from narrowgauge.data.export import TOKEN_LAYOUTS, check_name, export_tokens
from narrowgauge.data.loading.batch import Batch, count_windows, training_batch, validation_batches
from narrowgauge.data.loading.dataset import (
    AUTO,
    Dataset,
    open_data,
    split_sources,
    vocabulary_before_reading,
)
from narrowgauge.data.loading.loader import Loader
from narrowgauge.data.loading.sample_order import first_samples, mixed_samples, samples, shares_of
from narrowgauge.data.preparation.document_filter import Options
from narrowgauge.data.preparation.prepare import DEFAULT_TOKENIZER, prepare
from narrowgauge.data.sources import Document, documents
from narrowgauge.data.token_files.megatron import open_megatron, write_megatron
from narrowgauge.data.token_files.token_file import (
    TokenFile,
    Tokens,
    open_token_file,
    verify_token_file,
    write_token_file,
    write_token_shards,
)
from narrowgauge.data.token_files.token_stream import Mixture, TokenStream
from narrowgauge.data.tokenization.tokenizer import (
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
    "CorpusManifest",
    "Dataset",
    "Document",
    "Loader",
    "Mixture",
    "Options",
    "TokenFile",
    "TokenStream",
    "Tokenizer",
    "Tokens",
    "bytes_tokenizer",
    "check_name",
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
    "vocabulary_before_reading",
    "write_megatron",
    "write_token_file",
    "write_token_shards",
]

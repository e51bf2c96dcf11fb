"""The data of a run: sources of text, tokenizers, token files, the order of samples, and batches."""

from typing import TYPE_CHECKING

from narrowgauge.system.lazy import import_on_use

if TYPE_CHECKING:
    from narrowgauge.trainer.data.corpus import is_corpus as is_corpus
    from narrowgauge.trainer.data.corpus import open_corpus as open_corpus
    from narrowgauge.trainer.data.export import TOKEN_LAYOUTS as TOKEN_LAYOUTS
    from narrowgauge.trainer.data.export import check_name as check_name
    from narrowgauge.trainer.data.export import export_tokens as export_tokens
    from narrowgauge.trainer.data.loading.batch import Batch as Batch
    from narrowgauge.trainer.data.loading.batch import Loader as Loader
    from narrowgauge.trainer.data.loading.batch import count_windows as count_windows
    from narrowgauge.trainer.data.loading.batch import training_batch as training_batch
    from narrowgauge.trainer.data.loading.batch import validation_batches as validation_batches
    from narrowgauge.trainer.data.loading.dataset import AUTO as AUTO
    from narrowgauge.trainer.data.loading.dataset import open_data as open_data
    from narrowgauge.trainer.data.loading.dataset import split_sources as split_sources
    from narrowgauge.trainer.data.loading.dataset import (
        vocabulary_before_reading as vocabulary_before_reading,
    )
    from narrowgauge.trainer.data.loading.dataset import why_absent as why_absent
    from narrowgauge.trainer.data.loading.sample_order import first_samples as first_samples
    from narrowgauge.trainer.data.loading.sample_order import mixed_samples as mixed_samples
    from narrowgauge.trainer.data.loading.sample_order import samples as samples
    from narrowgauge.trainer.data.loading.sample_order import shares_of as shares_of
    from narrowgauge.trainer.data.preparation.prepare import Options as Options
    from narrowgauge.trainer.data.preparation.prepare import Progress as Progress
    from narrowgauge.trainer.data.preparation.prepare import prepare as prepare
    from narrowgauge.trainer.data.token_files.layouts import write_megatron as write_megatron
    from narrowgauge.trainer.data.token_files.tokens import Dataset as Dataset
    from narrowgauge.trainer.data.token_files.tokens import Mixture as Mixture
    from narrowgauge.trainer.data.token_files.tokens import Tokens as Tokens
    from narrowgauge.trainer.data.token_files.tokens import TokenStream as TokenStream
    from narrowgauge.trainer.data.token_files.tokens import open_token_file as open_token_file
    from narrowgauge.trainer.data.token_files.tokens import write_token_file as write_token_file
    from narrowgauge.trainer.data.tokenization.tokenizer import Tokenizer as Tokenizer
    from narrowgauge.trainer.data.tokenization.tokenizer import bytes_tokenizer as bytes_tokenizer
    from narrowgauge.trainer.data.tokenization.tokenizer import ids_tokenizer as ids_tokenizer
    from narrowgauge.trainer.data.tokenization.tokenizer import load_tokenizer as load_tokenizer
    from narrowgauge.trainer.data.tokenization.tokenizer import train_bpe as train_bpe
else:
    __all__, __getattr__, __dir__ = import_on_use(__name__)

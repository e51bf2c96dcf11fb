"""Examines the given data and tokenizer. Imported only if torch can be imported, since both need it."""

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import user_path
from narrowgauge.trainer.cluster.doctor.facts import Given
from narrowgauge.trainer.data import is_corpus, load_tokenizer, open_corpus, split_sources
from narrowgauge.trainer.data.sources import open_source
from narrowgauge.trainer.data.sources.tables import HUB
from narrowgauge.trainer.data.token_files.source import token_files
from narrowgauge.trainer.data.tokenization.tokenizer import tokenizer_identity


def read_data(source: str) -> Given:
    """The kinds of the sources; nothing is prepared."""
    try:
        found = [_one_source(name) for name in split_sources(source)]
    except (UserError, OSError) as error:
        return Given(source, error=str(error))
    return Given(source, found="; ".join(found))


def _one_source(name: str) -> str:
    if name.startswith(HUB):
        return "a data set of the Hugging Face hub"
    folder = user_path(name)
    if is_corpus(folder):
        facts = open_corpus(folder).manifest
        return f"a prepared corpus, whole: {facts.train_tokens:,} tokens to train on"
    if files := token_files(name):
        train, val = files
        return f"token files: {len(train)} to train on, {len(val) or 'the tail of them'} held out"
    return f"text: {len(open_source(name).inputs):,} files"


def read_tokenizer(name: str) -> Given:
    """The size of the tokenizer."""
    try:
        if tokenizer_identity(name) == name:
            return Given(name, found="needs no file")
        return Given(name, found=f"{load_tokenizer(user_path(name)).vocab_size:,} tokens")
    except (UserError, OSError) as error:
        return Given(name, error=str(error))

"""The dataset of a run, opened from its configuration.

A source is the first of these that applies:

- a prepared corpus (`corpus`), written by `narrowgauge prepare`;
- token files of another program (`token_files.source`);
- text, which is prepared on the spot (`preparation.prepare`).

Several sources are separated by commas. `weights` gives each source's share of the samples; without weights,
shares are proportional to token counts. All sources use one tokenizer: the named one, or with `auto` that of
the first source. For text, `auto` trains bpe-4096 on the first source alone.
"""

import hashlib
from collections.abc import Sequence

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import user_path
from narrowgauge.trainer.data.cache import Progress, no_progress
from narrowgauge.trainer.data.corpus import Corpus, is_corpus, read_manifest
from narrowgauge.trainer.data.loading.sample_order import shares_of
from narrowgauge.trainer.data.preparation.prepare import DEFAULT_TOKENIZER, prepare
from narrowgauge.trainer.data.sources import open_source
from narrowgauge.trainer.data.sources.tables import HUB
from narrowgauge.trainer.data.token_files.source import open_token_source, token_files, vocabulary_of_files
from narrowgauge.trainer.data.token_files.token_stream import Dataset, Mixture, as_mixture
from narrowgauge.trainer.data.tokenization.formats import TOKENIZER_FILE
from narrowgauge.trainer.data.tokenization.tokenizer import make_tokenizer

AUTO = "auto"


def open_data(
    source: str,
    tokenizer: str = AUTO,
    weights: Sequence[float] = (),
    progress: Progress | None = None,
) -> Dataset:
    """Open the dataset of a run; text is prepared first.

    Args:
        source: One source, or several separated by commas.
        tokenizer: Name of the tokenizer, or `AUTO`.
        weights: One weight for each source; () = proportional to token counts.
        progress: Called with progress reports while text is prepared or files are read.

    Raises:
        UserError: a source, the tokenizer or the weights cannot be used.
    """
    report = progress or no_progress
    names, opened = split_sources(source, weights), list[Dataset]()
    for name in names:
        opened.append(_open(name, tokenizer, opened[0] if opened else None, report))
        first, last = opened[0], opened[-1]
        if last.tokenizer.digest != first.tokenizer.digest:
            raise UserError(
                f"data sources {names[0]!r} and {name!r} have different tokenizers (sha256 "
                f"{first.tokenizer.digest[:12]} and {last.tokenizer.digest[:12]}); make both with the same "
                "one, and name it with --data.tokenizer"
            )
    if len(opened) == 1:
        return opened[0]
    shares = shares_of(weights or [len(one.train) for one in opened])
    digest = hashlib.sha256("\n".join(one.digest for one in opened).encode()).hexdigest()
    train, val = (
        Mixture(tuple(stream for one in parts for stream in one.streams), shares)
        for parts in zip(*((one.train, one.val) for one in opened), strict=True)
    )
    return Dataset(opened[0].tokenizer, train, val, digest)


def vocabulary_before_reading(source: str, tokenizer: str, weights: Sequence[float] = ()) -> int | None:
    """The vocabulary size of a dataset of `open_data`, from its tokenizer and file headers alone.

    None if it depends on the text or on all tokens.
    """
    if tokenizer != AUTO:
        return None if tokenizer.startswith("bpe-") else make_tokenizer(tokenizer, ()).vocab_size
    first = split_sources(source, weights)[0]
    if is_corpus(user_path(first)):
        return read_manifest(user_path(first)).vocab_size
    files = token_files(first)
    return vocabulary_of_files(files[0][0]) if files else None


def why_absent(source: str, weights: Sequence[float] = ()) -> str:
    """Why this machine cannot open a dataset's sources, from their names alone; empty if it can.

    The hub is not asked.
    """
    try:
        for name in split_sources(source, weights):
            if not (name.startswith(HUB) or is_corpus(user_path(name)) or token_files(name)):
                open_source(name)
    except UserError as error:
        return str(error)
    return ""


def split_sources(source: str, weights: Sequence[float] = ()) -> list[str]:
    """Split a list of sources at its commas; an existing path that contains a comma is one source."""
    names = [source] if user_path(source).exists() else [name.strip() for name in source.split(",")]
    if not all(names):
        raise UserError(f"data source {source!r} has an empty name between commas; remove the comma")
    if weights and len(weights) != len(names):
        raise UserError(
            f"data.weights has {len(weights)} numbers, and data.source {source!r} names {len(names)}; give "
            "one weight for each source"
        )
    if any(not 0 < weight < float("inf") for weight in weights):
        raise UserError(f"data.weights = {list(weights)} must be positive; leave out a source of no weight")
    return names


def _open(name: str, tokenizer: str, first: Dataset | None, report: Progress) -> Dataset:
    named = None if tokenizer == AUTO else tokenizer
    if is_corpus(user_path(name)):
        return _of_corpus(prepare(name, named))
    if files := token_files(name):
        return open_token_source(name, files, named, report)
    if first and first.tokenizer_file and (named is None or named.startswith("bpe-")):
        named = str(first.tokenizer_file)
    return _of_corpus(prepare(name, named or DEFAULT_TOKENIZER, progress=report))


def _of_corpus(corpus: Corpus) -> Dataset:
    train, val = as_mixture(corpus.train), as_mixture(corpus.val)
    return Dataset(corpus.tokenizer, train, val, corpus.digest, corpus.directory / TOKENIZER_FILE)

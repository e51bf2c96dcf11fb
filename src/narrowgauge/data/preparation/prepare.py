"""How does a source become a corpus?

    files -> chunks -> documents -> kept or not, held out or not -> token ids -> train.bin, val.bin
    (reader)           (workers)    (here, in their order)         (workers)     (here)

The files are digested first: with the tokenizer and the options, their digests say whether the corpus is
there already. Then, with a tokenizer that exists, one reading does all the rest. A tokenizer that is to be
learnt needs the text before there are ids; it lies compressed on the disk meanwhile (`document_buffer`).
Memory does not depend on the length of the source, and the result does not on the number of workers.

**Once only.** The corpus is built aside and renamed to its place, so it is whole wherever it is found. Two
processes that prepare the same corpus at once both build it, one of them publishes, both use that one. The
same files, tokenizer and options give the same bytes: no time, no place and no order of arrival goes in.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from narrowgauge.data.corpus import LAYOUT_VERSION, MANIFEST_FILE, Corpus, is_corpus, open_corpus
from narrowgauge.data.preparation.corpus_builder import CorpusBuilder, Progress, SourceFiles
from narrowgauge.data.preparation.document_filter import Options
from narrowgauge.data.preparation.publish import whole_directory
from narrowgauge.data.preparation.worker_pool import usable_cores
from narrowgauge.data.sources import open_source
from narrowgauge.data.tokenization.tokenizer import load_tokenizer, parallel_tokenizing, tokenizer_identity
from narrowgauge.errors import UserError

_FEW_BYTES = 8 << 20  # below this, processes take longer to start than they save

DEFAULT_TOKENIZER = "bpe-4096"


def prepare(
    source: str,
    tokenizer: str | None = None,
    directory: Path | None = None,
    progress: Progress | None = None,
    *,
    options: Options | None = None,
    workers: int | None = 1,
) -> Corpus:
    """Make the corpus of `source` under `tokenizer`, or find it where it was made before.

    `tokenizer` None is `DEFAULT_TOKENIZER`. `directory` is where it goes; None: a folder of the cache. A
    `source` that is a prepared corpus is opened as it is. `progress(stage, done, total, facts)` is called as
    bytes are read, learnt from and encoded; total is 0 where it is not known. With one worker all work is
    done in this process; `workers` None takes all cores where there is enough to read.

    Errors: `UserError` for a source, tokenizer or directory that will not do, for records that are refused,
    and for a damaged corpus.
    """
    place = Path(os.path.expanduser(source))
    if is_corpus(place):
        if directory:
            raise UserError(f"{source!r} is prepared already; train on it as it is, with --data {source}")
        return _open_prepared(place, tokenizer)
    options, name = options or Options(), tokenizer or DEFAULT_TOKENIZER
    if workers is not None and workers < 1:
        raise UserError(f"--workers {workers} must be at least 1")
    identity = tokenizer_identity(name)  # refuse a mistyped tokenizer before anything is read
    opened = open_source(source, options.text_key)
    files = SourceFiles(opened, progress or (lambda stage, done, total, facts: None))
    request = _digest(LAYOUT_VERSION, identity, asdict(options), opened.identity, files.facts)
    target = directory or cache_directory() / "tokens" / f"{_slug(source)}-{_slug(name)}-{request[:12]}"
    _refuse_foreign(target)
    if not (target / MANIFEST_FILE).exists():
        few = 0 < files.total < _FEW_BYTES
        workers = workers or (1 if few else usable_cores())
        _build(
            target,
            lambda aside: CorpusBuilder(aside, opened, name, identity, request, options, files, workers),
        )
    corpus = open_corpus(target)
    if corpus.manifest.request != request:
        raise UserError(
            f"{target} holds another corpus ({corpus.manifest.source} with {corpus.manifest.tokenizer}, "
            f"request {corpus.manifest.request[:12]}, not {request[:12]}); delete it or name another "
            "directory"
        )
    return corpus


def _build(target: Path, build: Callable[[Path], CorpusBuilder]) -> None:
    """Make the corpus aside, and give it its name."""
    try:
        with whole_directory(target) as aside, parallel_tokenizing():
            build(aside).run()
    except OSError as error:
        raise UserError(
            f"cannot write the corpus to {target}: {error.strerror or error}; name another directory, with "
            "--out or in NARROWGAUGE_CACHE, one with room in it"
        ) from error


def cache_directory() -> Path:
    """Where corpora go that were given no place: $NARROWGAUGE_CACHE, else narrowgauge in the user's cache."""
    if own := os.environ.get("NARROWGAUGE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "narrowgauge"


def _open_prepared(directory: Path, tokenizer: str | None) -> Corpus:
    """A corpus that somebody prepared, unless its tokenizer is not the one that is asked for."""
    corpus = open_corpus(directory)
    manifest = corpus.manifest
    known = (manifest.tokenizer_identity, f"sha256:{manifest.tokenizer_sha256}")
    if tokenizer is None or tokenizer_identity(tokenizer) in known:
        return corpus
    # The same ids may be written in files of another kind.
    if (
        not Path(tokenizer).expanduser().exists()
        or load_tokenizer(Path(tokenizer).expanduser()).digest != corpus.tokenizer.digest
    ):
        raise UserError(
            f"{directory} was prepared with tokenizer {manifest.tokenizer!r}, and data.tokenizer asks for "
            f"{tokenizer!r}; leave data.tokenizer out, or prepare the text again"
        )
    return corpus


def _digest(*parts: object) -> str:
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _refuse_foreign(target: Path) -> None:
    """Refuse a place that is taken by something else, before any work is done."""
    try:
        there = next(path for path in (target, *target.parents) if path.exists())
        if not there.is_dir():
            what = "is a file"
        elif there == target and any(target.iterdir()) and not (target / MANIFEST_FILE).exists():
            what = f"is not empty and has no {MANIFEST_FILE}, so it is not a prepared corpus"
        else:
            return
    except OSError as error:
        raise UserError(f"cannot look into {target}: {error.strerror}; name another directory") from None
    raise UserError(
        f"cannot write the corpus to {target}: {there} {what}; delete it or name another directory"
    )


def _slug(name: str) -> str:
    """A word for the name of a folder: the last part of a path, what is not plain replaced."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(name).name).strip("-.")[:40] or "text"

"""Prepares a source as a corpus.

    files -> chunks -> documents -> kept or not, held out or not -> token ids -> train.bin, val.bin
    (reader)           (workers)    (this process, in their order)  (workers)    (this process)

The files are digested first. Their digests, the tokenizer and the options decide whether the corpus already
exists. With an existing tokenizer, the source is then read once. A tokenizer that has to be trained needs the
text before there are ids (`TrainingTexts`), so the source is read twice. Memory does not depend on the
length of the source, and the result does not depend on the number of workers.

**Atomic.** The corpus is built in a staging directory and renamed, so any corpus that exists is complete. If
two processes prepare the same corpus at once, both build it, one publishes it, and both use that one. The
same files, tokenizer and options give the same bytes: times, paths and the order of arrival do not matter.
"""

import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import cache_directory, staged_directory, user_path
from narrowgauge.trainer.data.cache import Progress, no_progress
from narrowgauge.trainer.data.corpus import LAYOUT_VERSION, MANIFEST_FILE, Corpus, is_corpus, open_corpus
from narrowgauge.trainer.data.preparation.corpus_builder import CorpusBuilder, SourceFiles
from narrowgauge.trainer.data.preparation.document_filter import Options
from narrowgauge.trainer.data.preparation.worker_pool import usable_cores
from narrowgauge.trainer.data.sources import open_source
from narrowgauge.trainer.data.tokenization.tokenizer import (
    load_tokenizer,
    parallel_tokenizing,
    tokenizer_identity,
)

_FEW_BYTES = 8 << 20  # below this, starting processes takes longer than they save

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
    """Make a corpus, or open it if it exists.

    Args:
        source: See `data.sources`. A prepared corpus is opened as it is; options other than its own are
            refused.
        tokenizer: Name of the tokenizer; None = `DEFAULT_TOKENIZER`.
        directory: Directory of the corpus; None = one in the cache.
        progress: Called as bytes are read, trained on and encoded.
        options: Selection of the documents; None = the defaults.
        workers: Number of processes, including this one; None = one for each core if there is enough to read.

    Raises:
        UserError: the source, tokenizer or directory cannot be used, a record is rejected, or the corpus is
            damaged.
    """
    path = user_path(source)
    if is_corpus(path):
        if directory:
            raise UserError(f"{source!r} is already prepared; train on it directly, with --data {source}")
        return _open_prepared(path, tokenizer, options or Options())
    options, name = options or Options(), tokenizer or DEFAULT_TOKENIZER
    if workers is not None and workers < 1:
        raise UserError(f"--workers {workers} must be at least 1")
    identity = tokenizer_identity(name)  # refuses a misspelt tokenizer before anything is read
    opened = open_source(source, options.text_key)
    files = SourceFiles(opened, progress or no_progress)
    request = _digest(LAYOUT_VERSION, identity, asdict(options), opened.identity, files.facts)
    target = directory or cache_directory() / "tokens" / f"{_slug(source)}-{_slug(name)}-{request[:12]}"
    _require_usable(target)
    if not (target / MANIFEST_FILE).exists():
        few = 0 < files.total < _FEW_BYTES
        workers = workers or (1 if few else usable_cores())
        try:
            with staged_directory(target, keep_existing=True) as staging, parallel_tokenizing():
                CorpusBuilder(staging, opened, name, identity, request, options, files, workers).run()
        except OSError as error:
            raise UserError(
                f"cannot write the corpus to {target}: {error.strerror or error}; name a directory with room "
                "in --out or NARROWGAUGE_CACHE"
            ) from error
    corpus = open_corpus(target)
    if corpus.manifest.request != request:
        raise UserError(
            f"{target} holds another corpus ({corpus.manifest.source} with {corpus.manifest.tokenizer}, "
            f"request {corpus.manifest.request[:12]}, not {request[:12]}); delete it or name another "
            "directory"
        )
    return corpus


def _open_prepared(directory: Path, tokenizer: str | None, options: Options) -> Corpus:
    """Open the corpus in a directory; a tokenizer or options other than its own are an error."""
    corpus = open_corpus(directory)
    manifest = corpus.manifest
    for name, value in asdict(options).items():
        if value not in (asdict(Options())[name], manifest.options.get(name)):
            raise UserError(
                f"{directory} was prepared with {name} = {manifest.options.get(name)}, not {value}; leave "
                "the option out, or prepare the text again"
            )
    known = (manifest.tokenizer_identity, f"sha256:{manifest.tokenizer_sha256}")
    if tokenizer is None or tokenizer_identity(tokenizer) in known:
        return corpus
    # The same ids may be stored in another file format.
    path = user_path(tokenizer)
    if not path.exists() or load_tokenizer(path).digest != corpus.tokenizer.digest:
        raise UserError(
            f"{directory} was prepared with tokenizer {manifest.tokenizer!r}, and data.tokenizer asks for "
            f"{tokenizer!r}; leave data.tokenizer out, or prepare the text again"
        )
    return corpus


def _digest(*parts: object) -> str:
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _require_usable(target: Path) -> None:
    """Refuse a directory with other content before any work is done."""
    try:
        existing = next(path for path in (target, *target.parents) if path.exists())
        if not existing.is_dir():
            reason = "is a file"
        elif existing == target and any(target.iterdir()) and not (target / MANIFEST_FILE).exists():
            reason = f"is not empty and has no {MANIFEST_FILE}, so it is not a prepared corpus"
        else:
            return
    except OSError as error:
        raise UserError(f"cannot look into {target}: {error.strerror}; name another directory") from None
    raise UserError(
        f"cannot write the corpus to {target}: {existing} {reason}; delete it or name another directory"
    )


def _slug(name: str) -> str:
    """A word for the name of a folder: the last part of a path, with unusual characters replaced."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(name).name).strip("-.")[:40] or "text"

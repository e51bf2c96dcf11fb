"""Where do tokens come from that somebody else has made?

From a source that is a token file, a directory or a glob; Megatron's two files also go by the name that they
share, without a suffix. In a directory the files that end in .bin are looked at, those in folders below are
not; what is in them decides (`layouts`). All of a source's files are in one layout; they are read in the
order of their names, end to end.

**Held out** is, by the first rule that finds something:

1. of a directory or a glob: the files with `val`, `valid`, `validation` or `eval` as a word of their name
   (`fineweb_val_000000.bin`); those with `test` are left alone;
2. of a file or a glob with the word `train` in its name: what the name with `val` in that place leads to;
3. the last tenth of the tokens, but no more than 10 million, from a document's start on if one is near.

**The tokenizer** is the one named, or that of the files' folder. Else ids stand for themselves (`ids-N`),
with the vocabulary that the layout states; or GPT-2's, if the largest id is its end of text, 50256. Anything
else is refused: a guess would be a silent wrong start.

All files are read through once, for their digest and their largest id (`token_statistics`).
"""

import glob
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from narrowgauge.data.preparation.corpus_builder import Progress
from narrowgauge.data.sources.paths import kind_of
from narrowgauge.data.token_files.detect import BARE, OpenFile, layout_of, open_file
from narrowgauge.data.token_files.statistics import token_statistics
from narrowgauge.data.token_files.token_file import check_ids, unfit
from narrowgauge.data.token_files.token_stream import TokenStream
from narrowgauge.data.tokenization.formats import tokenizer_files
from narrowgauge.data.tokenization.tokenizer import Tokenizer, ids_tokenizer, load_tokenizer, make_tokenizer
from narrowgauge.errors import UserError

_HELD_OUT_WORDS = {"val", "valid", "validation", "eval"}
_HELD_OUT_ONE_IN = 10
_HELD_OUT_MOST = 10_000_000
_NEAR = 1 << 20  # tokens in which a document's start is looked for
_GPT2_SIZE = 50257


@dataclass(frozen=True, eq=False)
class TokenSource:
    """Both parts of somebody's tokens, the tokenizer they go with, and what names them."""

    tokenizer: Tokenizer
    train: TokenStream
    val: TokenStream
    digest: str


def token_files(source: str) -> tuple[list[Path], list[Path]] | None:
    """The files of a source to train on and those held out (none: the tail); None: it holds no tokens.

    Errors: `UserError` for a glob that leads to tokens and to other files, and for damaged files.
    """
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            candidates = sorted(p for p in path.glob("*.bin") if not p.name.startswith("."))
            files = [p for p in candidates if p.is_file() and _is_tokens(p)]
            return _by_name(source, files) if files else None
        if not path.exists() and glob.has_magic(source):
            files = _matches(source)
            if not files:
                return None
            train, val = _by_name(source, files)
            return train, val or [p for p in _matches(_held_out_name(source)) if p not in train]
        path = _data_of(path)
        if not path.is_file() or not _is_tokens(path):
            return None
        other = Path(_held_out_name(str(path)))
        return [path], [other] if other != path and other.is_file() and _is_tokens(other) else []
    except OSError as error:
        raise UserError(
            f"cannot look into {source!r}: {error.strerror}; give a source that can be read"
        ) from None


def open_token_source(
    source: str, files: tuple[list[Path], list[Path]], tokenizer: str | None, report: Progress
) -> TokenSource:
    """The tokens of `token_files(source)`, under the tokenizer of that name; None: the one they come with.

    Errors: `UserError` for files that do not go together, a vocabulary that is not known, an id beyond it, a
    mask that leaves nothing to learn.
    """
    train, val = ([open_file(path, str(layout_of(path))) for path in part] for part in files)
    opened = train + val
    if other := next((file for file in opened if file.layout != opened[0].layout), None):
        raise UserError(
            f"data source {source!r} mixes layouts: {opened[0].path} is {opened[0].layout} and {other.path} "
            f"is {other.layout}; make two sources of it, separated by a comma"
        )
    found = [token_statistics(file, report) for file in opened]
    largest = max(one.largest for one in found)
    the_tokenizer, boundaries = _tokenizer(source, opened[0], tokenizer, largest)
    for file, one in zip(opened, found, strict=True):
        if one.smallest < 0 or one.largest >= the_tokenizer.vocab_size:
            check_ids(file.path, file.tokens, the_tokenizer.vocab_size, unfit)
    text = "\n".join(["tokens", the_tokenizer.digest, *(one.sha256 for one in found), f"{len(val)} held out"])
    digest = hashlib.sha256(text.encode()).hexdigest()
    streams = [_stream(part, boundaries) for part in (train, val) if part]
    if len(streams) == 1:
        streams = [*_tail_apart(streams[0])]
    for part, stream in zip(("training", "held-out"), streams, strict=True):
        _require_targets(source, part, stream)
    return TokenSource(the_tokenizer, streams[0], streams[1], digest)


def _is_tokens(path: Path) -> bool:
    """Whether it holds tokens; where only statistics say so, not if it is named as a text."""
    layout = layout_of(path)
    return layout is not None and not (layout == BARE and kind_of(path) is not None)


def _data_of(path: Path) -> Path:
    """The .bin of a Megatron pair that is named by its .idx or without a suffix; else the path itself."""
    for index in (path, path.with_name(path.name + ".idx")):
        if index.suffix == ".idx" and index.is_file():
            data = index.with_suffix(".bin")
            if not data.is_file():
                raise unfit(index, f"there is no {data.name} beside it")
            return data
    return path


def _matches(pattern: str) -> list[Path]:
    """The token files that a glob matches, in order; all or none of what it matches, text files apart."""
    names = sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))
    paths = [Path(n) for n in names if Path(n).is_file() and kind_of(Path(n)) is None]
    paths = list(dict.fromkeys(map(_data_of, paths)))
    is_token = [_is_tokens(path) for path in paths]
    if any(is_token) and not all(is_token):
        raise UserError(
            f"data source {pattern!r} leads to token files and to {paths[is_token.index(False)]}, which is "
            "none; narrow the glob"
        )
    return paths if any(is_token) else []


def _by_name(source: str, files: list[Path]) -> tuple[list[Path], list[Path]]:
    words = {path: set(re.split(r"[^a-z]+", path.stem.lower())) for path in files}
    val = [path for path in files if words[path] & _HELD_OUT_WORDS]
    train = [path for path in files if path not in val and "test" not in words[path]]
    if not train:
        raise UserError(
            f"data source {source!r} holds nothing to train on: by their names its files are held out; "
            "name one of them to train on it"
        )
    return train, val


def _held_out_name(source: str) -> str:
    """The source with the word `train` of its last part replaced by `val`."""
    head, slash, name = source.rpartition("/")
    return head + slash + re.sub(r"(?<![A-Za-z])train(?![A-Za-z])", "val", name, count=1)


def _tokenizer(
    source: str, file: OpenFile, name: str | None, largest: int
) -> tuple[Tokenizer, tuple[int, ...]]:
    """The tokenizer, and the ids that stand between documents."""
    stated = file.vocabulary
    if name is not None:
        if name.startswith("bpe-"):
            raise UserError(
                f"data source {source!r} holds tokens, and tokenizer {name!r} would be learnt from text; "
                "name the tokenizer that they were made with, or leave data.tokenizer out"
            )
        tokenizer = make_tokenizer(name, [])
    elif tokenizer_files(file.path.parent):
        tokenizer = load_tokenizer(file.path.parent)
    elif stated:
        tokenizer = ids_tokenizer(*stated)
    elif largest == _GPT2_SIZE - 1:
        tokenizer = ids_tokenizer(_GPT2_SIZE, largest)
    else:
        raise UserError(
            f"{file.path} ({file.layout}) does not say which tokenizer made it, and its largest id is "
            f"{largest}; name one with --data.tokenizer FILE, or take the ids as they are with "
            f"--data.tokenizer ids-{largest + 2}"
        )
    # Llama 3 ends a document with one id, and llm.c puts another between them.
    also = {stated[1]} if stated and stated[0] == tokenizer.vocab_size else set()
    return tokenizer, tuple(sorted({tokenizer.end_of_document} | also))


def _stream(files: list[OpenFile], boundaries: tuple[int, ...]) -> TokenStream:
    """The files end to end."""
    starts, learnt, offset = [], [], 0
    for file in files:
        if file.starts is not None:
            starts.append(file.starts + offset)
        if file.learnt is not None:
            learnt.append(file.learnt)
        offset += len(file.tokens)
    if learnt and len(learnt) < len(files):
        unmasked = next(file for file in files if file.learnt is None)
        raise unfit(unmasked.path, "it has no mask, and others of its source have one")
    return TokenStream(
        tuple(file.tokens for file in files),
        boundaries,
        files[0].boundary_first,
        starts=np.concatenate(starts) if starts else None,
        learnt=tuple(learnt),
    )


def _require_targets(source: str, part: str, stream: TokenStream) -> None:
    """Refuse a mask that leaves nothing to learn: the mean of no losses is no number."""
    masks = (stream.ignored(start, min(start + _NEAR, len(stream))) for start in range(0, len(stream), _NEAR))
    if not any(mask is None or not mask.all() for mask in masks):
        raise UserError(
            f"data source {source!r}: the mask of its {part} part marks every token as not to be learnt, so "
            "there is nothing to train on; make the files again with the tokens to be learnt marked"
        )


def _tail_apart(stream: TokenStream) -> tuple[TokenStream, TokenStream]:
    """The stream without its tail, and the tail, which is held out."""
    size = len(stream)
    cut = size - min(size // _HELD_OUT_ONE_IN, _HELD_OUT_MOST)
    cut = stream.next_start(cut, min(_NEAR, (size - cut) // 2))
    return stream.part(0, cut), stream.part(cut, size)

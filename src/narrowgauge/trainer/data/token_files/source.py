"""Finds token files of other programs; `layouts` detects what they are from their content.

A source is a token file, a directory or a glob; Megatron's two files may also be named by their common name
without a suffix. In a directory, files that end in .bin, .npy or .ds are examined, but not those in
sub-folders; their content decides; a warning names these, and documents beside them.

**Held out** is, by the first rule that matches:

1. in a directory or a glob: the files with `val`, `valid`, `validation` or `eval` as a word of their name
   (`fineweb_val_000000.bin`); those with `test` are not used;
2. for a file or a glob with the word `train` in its name: the files of the same name with `val` instead; a
   file with the word `val` names the same pair, if the other file exists;
3. the last tenth of the tokens (`loading.dataset`).
"""

import glob
import re
from pathlib import Path

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import user_path
from narrowgauge.trainer.data.sources.paths import LINES, TABLE, file_type, visible_files, warn_of_the_rest
from narrowgauge.trainer.data.token_files.layouts import BESIDE_DATATROVE, DATATROVE, is_idle, open_tokens
from narrowgauge.trainer.data.token_files.tokens import OpenFile, unfit

_ENDINGS = (".bin", ".npy", DATATROVE)
_HELD_OUT_WORDS = {"val", "valid", "validation", "eval"}

Files = list[OpenFile]


def token_files(source: str) -> tuple[Files, Files] | None:
    """The files of a source to train on and those held out (none: the tail); None if it holds no tokens."""
    path = user_path(source)
    try:
        if path.is_dir():
            candidates = sorted(p for p in path.iterdir() if p.suffix in _ENDINGS and p.name[0] != ".")
            files = [file for p in candidates if p.is_file() and not is_idle(p) and (file := open_tokens(p))]
            if not files:
                return None
            others = [file.path for file in visible_files(path) if file.path.suffix != ".json"]
            found = [p for p in others if p.suffix in _ENDINGS or file_type(p) in (LINES, TABLE)]
            warn_of_the_rest(source, found, candidates)
            return _by_name(source, files)
        if not path.exists() and glob.has_magic(source):
            files = _matches(source)
            if not files:
                return None
            train, val = _by_name(source, files)
            known = {file.path for file in train}
            pairs = _matches(_with_word(source, "train", "val"))
            return train, val or [file for file in pairs if file.path not in known]
        path = _data_of(path)
        if not path.is_file() or not (file := open_tokens(path)):
            return None
        pair = [Path(_with_word(str(path), *words)) for words in (("val", "train"), ("train", "val"))]
        if pair[0] != pair[1] and all(map(Path.is_file, pair)):
            first, second = map(open_tokens, pair)
            if first and second:
                return [first], [second]
        return [file], []
    except OSError as error:
        raise UserError(
            f"cannot look into {source!r}: {error.strerror}; give a source that can be read"
        ) from None


def _data_of(path: Path) -> Path:
    """The file with the ids where one beside it is named, or Megatron's common name; else the path itself."""
    if path.suffix in BESIDE_DATATROVE and path.with_suffix("").is_file():
        return path.with_suffix("")
    for index in (path, path.with_name(path.name + ".idx")):
        if index.suffix == ".idx" and index.is_file():
            data = index.with_suffix(".bin")
            if not data.is_file():
                raise unfit(index, f"there is no {data.name} next to it")
            return data
    return path


def _matches(pattern: str) -> Files:
    """The token files that a glob matches, in order; apart from text files, either all match or none."""
    names = sorted(glob.glob(str(user_path(pattern)), recursive=True))
    paths = [Path(n) for n in names if Path(n).is_file() and file_type(Path(n)) is None]
    paths = [path for path in dict.fromkeys(map(_data_of, paths)) if not is_idle(path)]
    opened = [open_tokens(path) for path in paths]
    files = [file for file in opened if file]
    if files and None in opened:
        raise UserError(
            f"data source {pattern!r} leads to token files and to {paths[opened.index(None)]}, which does "
            "not hold tokens; narrow the glob"
        )
    return files


def _by_name(source: str, files: Files) -> tuple[Files, Files]:
    words = {file: set(re.split(r"[^a-z]+", file.path.stem.lower())) for file in files}
    val = [file for file in files if words[file] & _HELD_OUT_WORDS]
    train = [file for file in files if file not in val and "test" not in words[file]]
    if not train:
        raise UserError(
            f"data source {source!r} holds nothing to train on: by their names its files are held out; "
            "name one of them to train on it"
        )
    return train, val


def _with_word(source: str, word: str, other: str) -> str:
    """The source with a word of its last part replaced by another."""
    head, slash, name = source.rpartition("/")
    return head + slash + re.sub(rf"(?<![A-Za-z]){word}(?![A-Za-z])", other, name, count=1)

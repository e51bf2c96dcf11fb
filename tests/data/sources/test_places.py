"""Which files a source leads to: each once, in a fixed order, none left out silently."""

import gzip
import json
import lzma
import os
import tempfile
from pathlib import Path

import pytest

from data.reading import documents_in, names, pairs, refusal, texts, write
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data import prepare


def fill(folder, files):
    for name, content in files.items():
        write(folder / name, content)


def test_directory_source_reads_text_files_by_name(tmp_path):
    found = ["BOOK.TXT", "Z.txt", "a.txt", "a/b/c.py", "a/z.Md"]  # suffixes are matched in any case
    hidden = {"picture.png": b"\x89PNG", ".git/notes.txt": "x", ".hidden.txt": "x", "blank.txt": " \n\t\n"}
    for root in (tmp_path / "d", tmp_path / ".notes"):
        fill(root, {name: f"this is {name}\r\n" for name in reversed(found)} | hidden)
        with pytest.warns(UserWarning, match=r"leaves out 1 of 7 files .* not read: picture\.png; convert"):
            assert pairs(root) == [(name, f"this is {name}\r\n") for name in found]


def test_a_glob_names_each_file_once_below_its_fixed_part(tmp_path):
    fill(tmp_path, {name: name for name in ("x/1.txt", "x/deep/2.txt", "y/3.txt")})
    assert names(tmp_path / "x" / "**" / "*") == ["1.txt", "deep/2.txt"]
    assert names(tmp_path / "*" / "*.txt") == ["x/1.txt", "y/3.txt"]
    assert names(tmp_path / "**" / "**" / "*.txt") == ["x/1.txt", "x/deep/2.txt", "y/3.txt"]


def test_a_link_to_a_folder_is_followed_and_no_folder_is_read_twice(tmp_path):
    fill(tmp_path, {name: name for name in ("d/one.txt", "d/sub/two.txt", "elsewhere/deep/three.txt")})
    (tmp_path / "d" / "part").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "d" / "z-again").symlink_to(tmp_path / "elsewhere" / "deep")
    (tmp_path / "d" / "a-sub").symlink_to("sub")
    (tmp_path / "d" / "sub" / "up").symlink_to("..")
    (tmp_path / "elsewhere" / "round").symlink_to(tmp_path / "d")
    assert names(tmp_path / "d") == ["one.txt", "part/deep/three.txt", "sub/two.txt"]
    write(tmp_path / "e" / "a.txt", "text")
    (tmp_path / "e" / "b.jsonl.gz").symlink_to(tmp_path / "gone")
    assert "b.jsonl.gz is a link that leads nowhere; fix it, or remove it" in refusal(tmp_path / "e")
    (tmp_path / "e" / "b.jsonl.gz").rename(tmp_path / "e" / ".#b.txt")  # as an editor's lock
    assert names(tmp_path / "e") == ["a.txt#0"]


def test_a_folder_or_file_that_may_not_be_read_is_refused():
    """It was taken for an empty one. Root may read everything, so root becomes another user here."""
    with tempfile.TemporaryDirectory() as made:
        directory, was = Path(made), os.geteuid()
        directory.chmod(0o755)
        fill(directory, {"open/a.txt": "a", "locked/b.txt": "b"})
        (directory / "open" / "a.txt").chmod(0)
        (directory / "locked").chmod(0)
        if was == 0:
            os.seteuid(65534)
        try:
            assert f"cannot look into '{directory}/locked': Permission denied; give" in refusal(directory)
            assert "cannot read" in refusal(directory / "open" / "a.txt")
        finally:
            os.seteuid(was)
            (directory / "locked").chmod(0o755)


def lines(start, count=30, key="text"):
    rows = ({key: f"document {i}", "id": i} for i in range(start, start + count))
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def read(count):
    """The texts of `lines`."""
    return [f"document {i}" for i in range(count)]


def doc(i):
    return f'<doc id="{i}" url="https://x.org/?curid={i}" title="T {i}">\nT {i}\n\nText {i}.\n\n</doc>\n'


SHARDS = {"a.json.gz": gzip.compress(lines(0)), "b.json": lines(30), "c": lines(60)}
SHARDS |= {"d.xz": lzma.compress(lines(90))}
CARDS = {"README.md": "# A card", "set.py": "class Loader:", "LICENSE": "MIT", "dataset_infos.json": "{}"}
ARRAY = json.dumps([{"text": "a"}, {"text": "b"}])
WIKI = {
    "AA/wiki_00": doc(1) + doc(2),
    "AB/wiki_00": lines(0),
    "AB/wiki_01.gz": gzip.compress(doc(3).encode()),
}
ARTICLES = [f"T {i}\n\nText {i}.\n\n" for i in (1, 2, 3)]
TEXTS = {"a.md": "one", "b.txt": "two"}
# Files, the texts that are read, and the files that a warning names.
FOLDERS = {
    "shards of every suffix": (SHARDS, read(120), []),
    "a data set with its card": ({"data/a.jsonl": lines(0), **CARDS}, read(30), CARDS),
    "text with its card": (TEXTS | {"README.md": "x"}, ["one", "two"], ["README.md"]),
    "code": ({"README.md": "read", "a.py": "1", "x/b.py": "2"}, ["read", "1", "2"], []),
    "settings beside text": (TEXTS | {"package.json": "{}"}, ["one", "two"], ["package.json"]),
    "an array": ({"a.jsonl": lines(0), "b.json": ARRAY}, read(30), ["b.json"]),
    "another packing": ({"a.jsonl": lines(0), "b.jsonl.lz4": b"x"}, read(30), ["b.jsonl.lz4"]),
    "WikiExtractor's": (WIKI, [*ARTICLES[:2], *read(30), ARTICLES[2]], []),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_every_document_of_a_folder_is_read_and_what_is_left_out_is_named(tmp_path, recwarn, name):
    """30 of 90 documents were left out in silence, for their suffix, and a card was trained on."""
    files, wanted, left_out = FOLDERS[name]
    fill(tmp_path / "d", files)
    for source in (tmp_path / "d", tmp_path / "d" / "**" / "*"):
        recwarn.clear()
        assert texts(source) == wanted
        said = "".join(str(warning.message) for warning in recwarn)
        assert said.count("leaves out") == bool(left_out)
        assert all(name in said for name in left_out), said
    if left_out:
        assert f"leaves out {len(left_out)} of {len(files)} files (" in said


def test_a_document_of_wikiextractors_without_an_end_is_named(tmp_path):
    path = write(tmp_path / "cut" / "wiki_00", doc(1) + '<doc id="2" title="T">\n')
    for source in (path, path.parent):
        assert f"{path}:6 begins a document without </doc>" in refusal(source)


def test_equal_files_are_on_one_side_of_the_split(tmp_path):
    """A file twice in a folder was in the training and in the held-out part, by its names."""
    fill(tmp_path / "d", {f"{copy}{i}.txt": f"Document {i}." for i in range(40) for copy in ("", "again ")})
    corpus = prepare(str(tmp_path / "d"), "bytes")
    parts = [documents_in(p.streams[0], corpus.tokenizer.end_of_document) for p in (corpus.train, corpus.val)]
    train, val = ({corpus.tokenizer.decode(ids) for ids in part} for part in parts)
    assert len(train | val) == 40
    assert val
    assert not train & val


def test_a_source_that_is_not_there_is_met_with_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "novels" / "emma.txt", "Emma")
    near = f"data source '{tmp_path / 'novel'}' does not exist; the nearest path is '{tmp_path / 'novels'}'"
    for source, says in (
        ("stdlb", "unknown data source 'stdlb'; the nearest is 'stdlib'"),
        (tmp_path / "novel", near),
        (tmp_path / "novls" / "deeper" / "emma.txt", f"nearest path is '{tmp_path / 'novels'}'"),
        (tmp_path / "qqq" / "www.txt", "there is no"),
    ):
        assert says in refusal(source)
    for source in ("x" * 5000, "a\0b", "~nobody-at-all/x"):  # not valid as a file name
        with pytest.raises(UserError, match=r"cannot look into|unknown data source|does not exist"):
            prepare(source, "bytes")


def test_a_place_without_text_is_refused(tmp_path):
    write(tmp_path / "d" / "a.bin", b"\x00")
    fill(tmp_path / "e", {"a.txt": "\n \n", "b.txt": "\n"})
    write(tmp_path / "empty.txt", "")
    leads = "leads to no file that can be read: such a file ends in .txt, .md, .py, .jsonl"
    for name, says in (
        ("d", leads),
        ("d/*.txt", leads),
        ("d/a.bin", "cannot read"),
        ("e", "only white space"),
        ("empty.txt", "only white space"),
    ):
        assert says in refusal(tmp_path / name)

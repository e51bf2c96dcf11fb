"""Which files a source leads to: each once, none left out silently."""

import gzip
import json
import lzma
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from narrowgauge.data import documents, prepare
from narrowgauge.errors import UserError


def write(path, text="text"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text} of {path.name}")


def names(source):
    return [document.name for document in documents(str(source))]


def test_a_glob_that_matches_a_file_in_several_ways_reads_it_once(tmp_path):
    for name in ("x.txt", "a/y.txt", "a/b/z.txt"):
        write(tmp_path / name)
    assert names(tmp_path / "**" / "**" / "*.txt") == ["a/b/z.txt", "a/y.txt", "x.txt"]


def test_a_link_to_a_folder_is_followed_and_no_folder_is_read_twice(tmp_path):
    write(tmp_path / "d" / "one.txt")
    write(tmp_path / "d" / "sub" / "two.txt")
    write(tmp_path / "elsewhere" / "deep" / "three.txt")
    (tmp_path / "d" / "part").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "d" / "z-again").symlink_to(tmp_path / "elsewhere" / "deep")
    (tmp_path / "d" / "a-sub").symlink_to("sub")
    (tmp_path / "d" / "sub" / "up").symlink_to("..")
    (tmp_path / "elsewhere" / "round").symlink_to(tmp_path / "d")
    assert names(tmp_path / "d") == ["one.txt", "part/deep/three.txt", "sub/two.txt"]


def test_a_link_that_leads_nowhere_is_refused(tmp_path):
    write(tmp_path / "a.txt")
    (tmp_path / "b.jsonl.gz").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=r"b\.jsonl\.gz is a link that leads nowhere; fix it, or remove it"):
        names(tmp_path)
    (tmp_path / "b.jsonl.gz").rename(tmp_path / ".#b.txt")  # as an editor's lock
    assert names(tmp_path) == ["a.txt#0"]


def test_the_case_of_an_ending_does_not_matter(tmp_path):
    write(tmp_path / "BOOK.TXT")
    write(tmp_path / "b.Md")
    write(tmp_path / "c.txt")
    assert names(tmp_path) == ["BOOK.TXT", "b.Md", "c.txt"]


def test_a_folder_that_may_not_be_read_is_refused():
    """It was taken for an empty one. Root may read everything, so root becomes another user here."""
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        directory.chmod(0o755)
        write(directory / "open" / "a.txt")
        write(directory / "locked" / "b.txt")
        (directory / "locked").chmod(0)
        was = os.geteuid()
        if was == 0:
            os.seteuid(65534)
        try:
            with pytest.raises(UserError, match=r"cannot look into '.*locked': Permission denied; give"):
                names(directory)
        finally:
            os.seteuid(was)
            (directory / "locked").chmod(0o755)


def lines(start, count=30, key="text"):
    rows = ({key: f"document {i}", "id": i} for i in range(start, start + count))
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def doc(i):
    return f'<doc id="{i}" url="https://x.org/?curid={i}" title="T {i}">\nT {i}\n\nText {i}.\n\n</doc>\n'


def fill(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


SHARDS = {
    "a.json.gz": gzip.compress(lines(0)),
    "b.json": lines(30),
    "c": lines(60),
    "d.xz": lzma.compress(lines(90)),
}
CARDS = {"README.md": "# A card", "set.py": "class Loader: ...", "LICENSE": "MIT", "dataset_infos.json": "{}"}
ARRAY = json.dumps([{"text": "a"}, {"text": "b"}])
# Files, the texts that are read, and the files that a warning names.
FOLDERS = {
    "shards of every suffix": (SHARDS, [f"document {i}" for i in range(120)], []),
    "a data set with its card": (
        {"data/a.jsonl": lines(0), **CARDS},
        [f"document {i}" for i in range(30)],
        CARDS,
    ),
    "text with its card": (
        {"a.txt": "one", "b.txt": "two", "README.md": "card"},
        ["one", "two"],
        ["README.md"],
    ),
    "code": ({"README.md": "read", "a.py": "1", "x/b.py": "2"}, ["read", "1", "2"], []),
    "settings beside text": (
        {"a.md": "one", "b.md": "two", "package.json": '{"name": 1}'},
        ["one", "two"],
        ["package.json"],
    ),
    "an array": ({"a.jsonl": lines(0), "b.json": ARRAY}, [f"document {i}" for i in range(30)], ["b.json"]),
    "another packing": (
        {"a.jsonl": lines(0), "b.jsonl.lz4": b"x"},
        [f"document {i}" for i in range(30)],
        ["b.jsonl.lz4"],
    ),
    "WikiExtractor's": (
        {
            "AA/wiki_00": doc(1) + doc(2),
            "AB/wiki_00": lines(0),
            "AB/wiki_01.gz": gzip.compress(doc(3).encode()),
        },
        [
            "T 1\n\nText 1.\n\n",
            "T 2\n\nText 2.\n\n",
            *(f"document {i}" for i in range(30)),
            "T 3\n\nText 3.\n\n",
        ],
        [],
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_every_document_of_a_folder_is_read_and_what_is_left_out_is_named(tmp_path, recwarn, name):
    """30 of 90 documents were left out in silence, for their suffix, and a card was trained on."""
    files, texts, left_out = FOLDERS[name]
    fill(tmp_path / "d", files)
    for source in (tmp_path / "d", tmp_path / "d" / "**" / "*"):
        recwarn.clear()
        assert [document.text for document in documents(str(source))] == texts
        said = "".join(str(warning.message) for warning in recwarn)
        assert said.count("leaves out") == bool(left_out)
        assert all(name in said for name in left_out), said
    if left_out:
        assert f"leaves out {len(left_out)} of {len(files)} files (" in said


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            lines(0, key="body"),
            ":1 has no 'text'; it has body, id; name its key or column with `narrowgauge prep",
        ),
        (ARRAY.encode(), ":1 holds a list where an object belongs"),
        (doc(1).encode() + b'<doc id="2" title="T">\n', ":6 begins a document without </doc>"),
    ],
    ids=["another key", "array", "cut"],
)
def test_what_is_no_line_or_document_is_named(tmp_path, content, says):
    path = tmp_path / "d" / ("wiki_00" if b"<doc" in content else "a.json")
    fill(tmp_path / "d", {path.name: content})
    for source in (path, tmp_path / "d"):
        with pytest.raises(UserError) as caught:
            names(source)
        assert str(path) + says in str(caught.value)


def test_equal_files_are_on_one_side_of_the_split(tmp_path):
    """A file twice in a folder was in the training and in the held-out part, by its names."""
    for i in range(40):
        (tmp_path / "d" / "again").mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / f"{i}.txt").write_text(f"Document {i}.")
        shutil.copy(tmp_path / "d" / f"{i}.txt", tmp_path / "d" / "again" / f"copy of {i}.txt")
    for tokenizer in ("bytes", "bpe-260"):
        corpus = prepare(str(tmp_path / "d"), tokenizer)
        end = corpus.tokenizer.decode([corpus.tokenizer.end_of_document])
        train, val = (set(corpus.tokenizer.decode(ids).split(end)[1:]) for ids in (corpus.train, corpus.val))
        assert len(train | val) == 40
        assert val
        assert not train & val

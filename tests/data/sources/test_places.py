"""Which files a source leads to: each once, none left out silently."""

import os
import tempfile
from pathlib import Path

import pytest

from narrowgauge.data import documents
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

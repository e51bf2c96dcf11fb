"""Sources: a fixed order, nothing lost, and every refusal gives the way out."""

import hashlib
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.data import documents, prepare
from narrowgauge.data.sources.text import cut_text
from narrowgauge.errors import UserError


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def pairs(source):
    return [(document.name, document.text) for document in documents(str(source))]


def test_directory_source_reads_text_files_by_name(tmp_path):
    for name in ["b.txt", "a/z.md", "a.txt", "a/b/c.py", "Z.txt"]:
        write(tmp_path / "d" / name, f"this is {name}\r\n")
    write(tmp_path / "d" / "picture.png", b"\x89PNG")
    write(tmp_path / "d" / ".git" / "notes.txt", "hidden")
    write(tmp_path / "d" / ".hidden.txt", "hidden")
    write(tmp_path / "d" / "blank.txt", " \n\t\n")
    names = ["Z.txt", "a.txt", "a/b/c.py", "a/z.md", "b.txt"]
    with pytest.warns(UserWarning, match="leaves out 1 of 7 files .* is not read: picture.png; convert"):
        assert pairs(tmp_path / "d") == [(name, f"this is {name}\r\n") for name in names]


def test_a_directory_that_is_hidden_itself_is_read(tmp_path):
    write(tmp_path / ".notes" / "a.txt", "one")
    write(tmp_path / ".notes" / "b.txt", "two")
    assert [text for _, text in pairs(tmp_path / ".notes")] == ["one", "two"]


def test_a_glob_names_documents_below_its_fixed_part(tmp_path):
    for name in ["x/1.txt", "x/deep/2.txt", "y/3.txt"]:
        write(tmp_path / name, name)
    assert [name for name, _ in pairs(tmp_path / "x" / "**" / "*")] == ["1.txt", "deep/2.txt"]
    assert [name for name, _ in pairs(tmp_path / "*" / "*.txt")] == ["x/1.txt", "y/3.txt"]


def test_a_byte_order_mark_is_dropped_and_nothing_else(tmp_path):
    write(tmp_path / "a.txt", b"\xef\xbb\xbf one\r\n\x0c two \xc3\xa9")
    write(tmp_path / "b.txt", "b")
    assert pairs(tmp_path)[0] == ("a.txt", " one\r\n\x0c two \u00e9")


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_single_file_is_cut_between_paragraphs_and_nothing_is_lost(tmp_path, line_end):
    paragraph = (line_end.join(["a line of forty characters, more or less"] * 9) + line_end) * 2
    text = (paragraph + line_end) * 60
    pieces = pairs(write(tmp_path / "book.txt", text))
    assert "".join(piece for _, piece in pieces) == text
    assert [name for name, _ in pieces] == [f"book.txt#{i}" for i in range(len(pieces))]
    assert len(pieces) > 5
    for _, piece in pieces[:-1]:
        assert 4096 <= len(piece) <= 4096 + len(paragraph) + 2
        assert piece.endswith(line_end * 2)


def test_a_file_without_paragraphs_or_even_lines_is_cut_all_the_same(tmp_path):
    lines = "one line\n" * 5000
    pieces = [text for _, text in pairs(write(tmp_path / "lines.txt", lines))]
    assert "".join(pieces) == lines
    assert all(len(text) <= 12288 + 9 and text.endswith("\n") for text in pieces)
    one = "x" * 50_000
    pieces = [text for _, text in pairs(write(tmp_path / "one.txt", one))]
    assert "".join(pieces) == one
    assert max(map(len, pieces)) == 16384


def test_a_directory_of_one_file_is_cut_like_the_file(tmp_path):
    path = write(tmp_path / "d" / "book.md", "some words in a row\n\n" * 2000)
    assert pairs(tmp_path / "d") == pairs(path)


@given(
    st.lists(
        st.sampled_from(["x", "\n", "\r", "\r\n", "\u2028", "\n\n", "words " * 900, "y" * 16383, "z" * 20000])
    )
)
def test_the_pieces_do_not_depend_on_the_blocks_in_which_the_text_is_read(parts):
    assert list(cut_text(parts)) == list(cut_text(["".join(parts)]))
    assert "".join(cut_text(parts)) == "".join(parts)


def test_a_very_long_file_is_cut_also_among_others(tmp_path, monkeypatch):
    monkeypatch.setattr("narrowgauge.data.sources.text.MOST_UNCUT", 10_000)
    write(tmp_path / "d" / "a.txt", "short")
    write(tmp_path / "d" / "b.txt", "some words in a row\n\n" * 1000)
    write(tmp_path / "d" / "c.txt", "short too")
    names = [name for name, _ in pairs(tmp_path / "d")]
    assert names == ["a.txt", *(f"b.txt#{i}" for i in range(len(names) - 2)), "c.txt"]
    assert len(names) > 5


def test_a_long_file_that_is_not_utf8_is_refused_with_the_place(tmp_path, monkeypatch):
    monkeypatch.setattr("narrowgauge.data.sources.byte_stream._READ", 1000)
    bad = write(tmp_path / "a.txt", ("caf\u00e9 " * 999).encode() + b"\xe9 noir" + b"x" * 5000)
    assert f"{bad} is not UTF-8: byte 5994 is 0xe9; convert it" in refusal(bad)


@pytest.mark.tier("thorough")
def test_stdlib_is_the_library_and_the_same_twice():
    first, again = list(documents("stdlib")), list(documents("stdlib"))
    assert first == again
    names = [document.name for document in first]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py"} < set(names)
    assert not [name for name in names if {"test", "site-packages", "idlelib"} & set(name.split("/"))]
    with open(hashlib.__file__, encoding="utf-8", newline="") as file:
        assert next(d.text for d in first if d.name == "hashlib.py") == file.read()
    assert 5e6 < sum(len(document.text) for document in first) < 3e7


def refusal(source):
    with pytest.raises(UserError) as caught:
        list(documents(str(source)))
    return str(caught.value)


def test_a_mistyped_word_is_met_with_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal("stdlb").startswith("unknown data source 'stdlb'; the nearest is 'stdlib'")


def test_a_name_that_no_file_can_have_is_refused():
    for source in ("x" * 5000, "a\0b", "~nobody-at-all/x"):
        with pytest.raises(UserError, match=r"cannot look into|unknown data source|does not exist"):
            prepare(source, "bytes")


def test_a_missing_path_is_met_with_the_nearest(tmp_path):
    write(tmp_path / "novels" / "emma.txt", "Emma")
    assert refusal(tmp_path / "novel") == (
        f"data source '{tmp_path / 'novel'}' does not exist; the nearest path is '{tmp_path / 'novels'}'"
    )
    assert str(tmp_path / "novels" / "emma.txt") in refusal(tmp_path / "novels" / "ema.txt")
    assert f"nearest path is '{tmp_path / 'novels'}'" in refusal(tmp_path / "novls" / "deeper" / "emma.txt")
    assert "there is no" in refusal(tmp_path / "qqq" / "www.txt")


def test_a_place_without_text_is_refused(tmp_path):
    write(tmp_path / "d" / "a.bin", b"\x00")
    assert "leads to no file that can be read: such a file ends in .txt, .md, .py, .jsonl" in refusal(
        tmp_path / "d"
    )
    assert "leads to no file that can be read" in refusal(tmp_path / "d" / "*.txt")
    assert "cannot read" in refusal(tmp_path / "d" / "a.bin")
    for name in "ab":
        write(tmp_path / "e" / f"{name}.txt", "\n \n")
    assert "only white space" in refusal(tmp_path / "e")
    assert "only white space" in refusal(write(tmp_path / "empty.txt", ""))


def test_bytes_that_are_not_utf8_are_refused_with_file_and_place(tmp_path):
    write(tmp_path / "a.txt", "fine")
    bad = write(tmp_path / "b.txt", b"\xef\xbb\xbfcaf\xe9 noir")
    assert f"{bad} is not UTF-8: byte 6 is 0xe9; convert it" in refusal(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable to root")
def test_an_unreadable_file_is_refused(tmp_path):
    write(tmp_path / "a.txt", "a").chmod(0)
    assert "cannot read" in refusal(tmp_path / "a.txt")

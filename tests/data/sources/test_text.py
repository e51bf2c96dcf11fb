"""Text files: nothing lost where long ones are cut, and bytes that are not UTF-8 named by their place."""

import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.reading import names, pairs, refusal, texts, write
from narrowgauge.trainer.data import Options, prepare
from narrowgauge.trainer.data.sources.readers import cut_text

PARTS = ["x", "\n", "\r", "\r\n", "\u2028", "\n\n", "words " * 900, "y" * 16383, "z" * 20000]


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_single_file_is_cut_between_paragraphs_and_nothing_is_lost(tmp_path, line_end):
    paragraph = (line_end.join(["a line of forty characters, more or less"] * 9) + line_end) * 2
    text = (paragraph + line_end) * 60
    pieces = pairs(write(tmp_path / "d" / "book.txt", text))
    assert pairs(tmp_path / "d") == pieces  # a directory of one file is cut like the file
    assert "".join(piece for _, piece in pieces) == text
    assert [name for name, _ in pieces] == [f"book.txt#{i}" for i in range(len(pieces))]
    assert len(pieces) > 5
    for _, piece in pieces[:-1]:
        assert 4096 <= len(piece) <= 4096 + len(paragraph) + 2
        assert piece.endswith(line_end * 2)


def test_a_file_without_paragraphs_or_even_lines_is_cut_all_the_same(tmp_path):
    for text, most, end in (("one line\n" * 5000, 12288 + 9, "\n"), ("x" * 50_000, 16384, "x")):
        pieces = texts(write(tmp_path / "a.txt", text))
        assert "".join(pieces) == text
        assert all(len(piece) <= most and piece.endswith(end) for piece in pieces)
        assert len(pieces) == 4


@given(st.lists(st.sampled_from(PARTS)))
def test_the_pieces_do_not_depend_on_the_blocks_in_which_the_text_is_read(parts):
    assert list(cut_text(parts)) == list(cut_text(["".join(parts)]))
    assert "".join(cut_text(parts)) == "".join(parts)


def test_a_very_long_file_is_cut_also_among_others(tmp_path, monkeypatch):
    monkeypatch.setattr("narrowgauge.trainer.data.sources.readers.MOST_UNCUT", 10_000)
    for name, text in (("a", "short"), ("b", "some words in a row\n\n" * 1000)):
        write(tmp_path / f"{name}.txt", text)
    assert names(tmp_path)[:3] == ["a.txt", "b.txt#0", "b.txt#1"]


def test_a_byte_that_is_not_utf8_is_named_and_costs_its_piece_of_a_text_and_not_the_rest(tmp_path):
    """The rest of the file was lost as one record, so that a tolerance of 1 % could take most of a text."""
    mark, paragraph = b"\xef\xbb\xbf", "caf\u00e9 " * 900 + "\n\n"
    data = bytearray(mark + (paragraph * 200).encode())
    bad = len(mark) + 100 * len(paragraph.encode()) + 7
    data[bad] = 0xE9
    path = write(tmp_path / "a.txt", bytes(data))
    assert f"{path} is not UTF-8: byte {bad} is 0xe9; convert it" in refusal(path)
    facts = prepare(str(path), "bytes", tmp_path / "out", options=Options(tolerance=0.01)).manifest
    assert (facts.rejected, facts.train_documents + facts.val_documents) == (1, 199)
    path.write_bytes(mark + b" one\r\n\x0c two \xc3\xa9")
    assert texts(path) == [" one\r\n\x0c two \u00e9"], "the mark alone is dropped"


def test_text_with_a_nul_names_its_line_and_packed_text_is_text(tmp_path):
    path = write(tmp_path / "a.txt", b"one\ntwo \x00")
    assert f"{path}, piece 0, holds a NUL byte (character 8), so it is not text" in refusal(path)
    write(tmp_path / "b.txt", b"b")
    assert f"{path}:2 holds a NUL byte" in refusal(tmp_path)
    assert texts(write(tmp_path / "c.txt.gz", gzip.compress(b"packed"))) == ["packed"]

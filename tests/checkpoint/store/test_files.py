"""Files that are written whole or not at all, and lines that outlive the process which appends them."""

import os

import pytest

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import make_directory, open_regular, write_new, write_whole
from narrowgauge.system.json_lines import append_lines, read_jsonl

RECORDS = [{"step": 1, "loss": 2.5}, {"step": 2, "text": "na\u00efve\nline"}, {"step": 3, "loss": 0.1}]


def test_write_whole_replaces_the_content_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "status.json"
    write_whole(path, "old \u00e9")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    (tmp_path / "target").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_whole(tmp_path / "target", "text")
    assert sorted(os.listdir(tmp_path)) == ["status.json", "target"]


def test_what_is_there_is_not_overwritten_and_what_is_no_file_is_not_read(tmp_path):
    write_new(tmp_path / "f", b"abc")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "f", b"second")
    with pytest.raises(OSError, match="f"):
        make_directory(tmp_path / "f" / "below")
    (tmp_path / "link").symlink_to(tmp_path / "f")
    for name, words in (("link", "symbolic link"), ("", "not a regular file")):
        with pytest.raises(OSError, match=words):
            open_regular(tmp_path / name)


def test_a_file_cut_at_any_byte_reads_as_its_whole_lines_and_can_be_continued(tmp_path):
    path = tmp_path / "m.jsonl"
    for record in RECORDS:
        append_lines(path, [record])
    data = path.read_bytes()
    assert read_jsonl(path) == RECORDS
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        whole = data[:size].count(b"\n")
        assert read_jsonl(path) == RECORDS[:whole]
        append_lines(path, [{"step": 9}])
        assert read_jsonl(path) == [*RECORDS[:whole], {"step": 9}]
    path.write_bytes(b'{"step": 1}\n{"x": "' + b"y" * 200_000)  # a torn line longer than one block
    append_lines(path, [{"step": 2}])
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("bad", [b'{"a": 1', b"", b"[1]", b"7", b'{"a": "\xff"}', b"\0\0\0", b"[" * 100_000])
def test_damage_in_the_middle_names_file_and_line(tmp_path, bad):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"a": 1}\n' + bad + b'\n{"a": 3}\n')
    with pytest.raises(UserError, match=rf"{path}:2: .*fix or delete that line"):
        read_jsonl(path)

import os
import signal

import pytest

from narrowgauge.errors import UserError
from narrowgauge.files import make_directory, open_regular, sha256_of, write_new, write_whole
from narrowgauge.json_lines import append_lines, read_jsonl

RECORDS = [{"step": 1, "loss": 2.5}, {"step": 2, "text": "na\u00efve\nline"}, {"step": 3, "loss": 0.1}]


def test_write_whole_replaces_the_content_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "status.json"
    write_whole(path, "old \u00e9")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["status.json"]


def test_write_whole_that_fails_leaves_the_old_content(tmp_path):
    path = tmp_path / "target"
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        write_whole(path, "text")
    assert os.listdir(tmp_path) == ["target"]


@pytest.mark.parametrize(
    ("point", "expected"),
    [("write:f", "old"), ("synced:f", "old"), ("renamed:f", "new"), ("no such point", "new")],
)
def test_write_whole_killed_at_each_point_leaves_old_or_new(tmp_path, in_process, point, expected):
    path = tmp_path / "f"
    write_whole(path, "old")
    ended = in_process("write whole", path, crash_at=point, text="new")
    assert ended.code == (0 if point == "no such point" else 137)
    assert path.read_text() == expected


def test_write_new_never_overwrites(tmp_path):
    write_new(tmp_path / "f", b"first")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "f", b"second")
    assert (tmp_path / "f").read_text() == "first"


def test_make_directory_makes_parents_and_refuses_a_file_in_the_way(tmp_path):
    make_directory(tmp_path / "a" / "b")
    make_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        make_directory(tmp_path / "file" / "below")


def test_sha256_of_known_bytes(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")  # the example of FIPS 180
    assert sha256_of(tmp_path / "f") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_only_regular_files_are_opened(tmp_path):
    (tmp_path / "real").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="symbolic link"):
        open_regular(tmp_path / "link")
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(tmp_path)


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


def test_a_torn_line_longer_than_one_block_is_cut_off(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"x": "' + b"y" * 200_000)
    append_lines(path, [{"step": 2}])
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("bad", [b'{"a": 1', b"", b"[1]", b"7", b'{"a": "\xff"}', b"\0\0\0", b"[" * 100_000])
def test_damage_in_the_middle_names_file_and_line(tmp_path, bad):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"a": 1}\n' + bad + b'\n{"a": 3}\n')
    with pytest.raises(UserError, match=rf"{path}:2: .*fix or delete that line"):
        read_jsonl(path)


def test_non_finite_numbers_stay_visible(tmp_path):
    append_lines(tmp_path / "m", [{"loss": float("nan"), "grad_norm": float("inf")}])
    (record,) = read_jsonl(tmp_path / "m")
    assert record["loss"] != record["loss"]
    assert record["grad_norm"] == float("inf")


def test_sigkill_while_appending_tears_at_most_the_last_line(tmp_path, in_process):
    path = tmp_path / "m.jsonl"
    for kill in range(5):
        ended = in_process("append for ever", path, kill_after_s=0.02 + 0.005 * kill)
        assert ended.code == -signal.SIGKILL
        assert all(len(record["padding"]) == 20_000 for record in read_jsonl(path))
    assert len(read_jsonl(path)) > 5

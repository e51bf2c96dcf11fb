"""What leaves the process: plain text in a pipe, a live line on a terminal, an exit code, any encoding."""

import contextlib
import io
import os
import pty
import re
import shutil
import sys
import threading

import pytest
from rich.console import Console

from narrowgauge.trainer.cli.main import main
from narrowgauge.trainer.distributed.process_group.store import keep
from narrowgauge.trainer.runs.monitor.progress import Display
from support.fault_table import case

TEXT = "漢字 → déjà \udcff 🙂"  # the last but one: a byte of a file's name that is not UTF-8
COLORS = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"  # the cursor


@pytest.fixture
def on_terminal(narrowgauge):
    """Run the command on a pseudo-terminal: (how it ended, everything it wrote there)."""

    def do(*words):
        ours, theirs = pty.openpty()
        written = []

        def read():
            with contextlib.suppress(OSError):  # the last writer closed it
                while piece := os.read(ours, 4096):
                    written.append(piece)

        reader = threading.Thread(target=read)
        reader.start()
        place = {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
        ended = narrowgauge(*words, terminal=os.ttyname(theirs), **place)
        os.close(theirs)
        reader.join()
        os.close(ours)
        return ended, b"".join(written).decode()

    return do


@pytest.mark.tier("thorough")
def test_a_terminal_sees_a_live_line_and_gets_its_cursor_back(on_terminal, line, tmp_path, refused):
    out = tmp_path / "run"
    ended, written = on_terminal(*line({"training.steps": 12}), "--out", out)
    assert (ended.code, ended.err) == (0, "")
    assert re.search(r"training.*\d+/12.*loss \d\.\d{4}.*tokens/s", written)
    assert written.rindex(SHOWN) > written.rindex(HIDDEN)
    erased = written.rindex("\x1b[2K")
    assert "training " not in written[erased:], "the live line is gone"
    assert f"report: {out / 'report.html'}\r\n" in written[erased:]
    ended, written = on_terminal(*line({"optimizer.lr": 1e308}), "--out", tmp_path / "failed")
    refused(ended, code=1)
    assert written.rindex(SHOWN) > written.rindex(HIDDEN)
    assert "training " not in written[written.rindex("\x1b[2K") :]


@pytest.mark.tier("thorough")
def test_no_terminal_gets_plain_lines_and_tables_keep_to_80_columns(command, line, finished, tmp_path):
    for name in ("one", "two"):
        shutil.copytree(finished, tmp_path / name)
    tables = [["recipes"], ["formats"], ["formats", "e4m3"], ["report", tmp_path / "one", tmp_path / "two"]]
    for words in ([*line(), "--out", tmp_path / "run"], ["eval", finished, "--batches", "2"], *tables):
        ended = command(*words, COLUMNS="80", **COLORS)
        assert ended.code == 0, ended.err
        assert not {"\x1b", "\r"} & set(ended.out)
        if words in tables:  # a path stays in one piece, so that it can be copied
            lines = [text for text in ended.out.splitlines() if not text.startswith("report: ")]
            assert len(lines) > 2
            assert max(map(len, lines)) <= 80
    assert "\x1b" not in command("trian", **COLORS).err


@pytest.mark.tier("thorough")
def test_text_beyond_ascii_in_a_path(narrowgauge, line, tmp_path, look):
    out = tmp_path / "Größe 🚂" / "[bold]x"
    for environment in ({}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}):
        ended = narrowgauge(*line(), "--out", out, **environment)
        assert ended.code == 0, ended.err
        assert "Traceback" not in ended.err
    assert f"report: {out / 'report.html'}\n" in ended.out
    assert look(out).status["status"] == "done"


@pytest.mark.tier("thorough")
def test_a_run_goes_on_after_a_reader_or_a_disk_was_gone(narrowgauge, line, look, tmp_path, refused):
    words = [*line(), "--out", tmp_path / "run"]
    ended = narrowgauge(*words, reader_gone=True)
    assert (ended.code, ended.err) == (1, "")
    assert narrowgauge(*words).code == 0
    assert look(tmp_path / "run").column("step") == [1, 2, 3, 4, 5, 6]
    words[-1] = tmp_path / "full"
    refused(narrowgauge(*words, largest_file=4000), "File too large", code=1)  # bytes; the tokenizer has more
    assert narrowgauge(*words).code == 0


@pytest.mark.tier("thorough")
@case("G4", tier="quick")
def test_memory_that_runs_out_is_one_sentence(narrowgauge, line, look, tmp_path, refused):
    """2^31 - 1 sequences at once: their numbers alone take 16 GiB."""
    huge = {"training.batch_size": 2**31 - 1, "training.micro_batch_size": 2**31 - 1, "recipe.name": "bf16"}
    ended = narrowgauge(*line(huge), "--out", tmp_path / "run", memory=12 << 30)
    planned = ("a step is expected to take", "weights", "saved activations", "workspace")
    refused(ended, "out of memory", "KiB with --training.micro_batch_size 1", *planned, code=1)
    assert look(tmp_path / "run").status["status"] == "failed"
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.fixture
def strict(monkeypatch):
    """Make both streams strict ones of an encoding; returns what was written to standard output."""

    def change(encoding):
        streams = [io.TextIOWrapper(io.BytesIO(), encoding, "strict", write_through=True) for _ in range(2)]
        monkeypatch.setattr(sys, "stdout", streams[0])
        monkeypatch.setattr(sys, "stderr", streams[1])
        return lambda: streams[0].buffer.getvalue().decode(encoding)

    return change


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "gbk", "utf-8"])
def test_a_terminal_that_cannot_hold_a_character_shows_another(strict, tmp_path, encoding):
    """As terminals of East Asia, of old servers and of containers without a locale; nothing else changes."""
    run_directory = tmp_path / TEXT
    run_directory.mkdir()
    (run_directory / "config.toml").write_text("[recipe]\nname = 'bf16'\n")
    (run_directory / "status.json").write_text('{"status": "failed", "reason": "no → way"}')
    written = strict(encoding)
    assert main(["runs", str(tmp_path)]) == 0
    assert "failed: no " in written()
    assert main(["runs", str(tmp_path / (TEXT + "absent"))]) == 2
    written = strict(encoding)
    Display(Console(), 1, 1).log(f"sample, from {TEXT}")
    assert written().startswith("sample, from ")


def test_a_verb_needs_no_standard_output(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    for words in (["formats"], ["--help"], ["train", "--help"]):
        with contextlib.suppress(SystemExit):
            assert main(words) == 0


def test_the_traceback_of_a_rank_is_kept_in_full(monkeypatch, tmp_path):
    monkeypatch.setattr("locale.getencoding", lambda: "ascii")  # what a file of text has without encoding=
    assert keep(tmp_path, "errors", 1, "step 3", lambda file: file.write(TEXT))
    assert "déjà" in (tmp_path / "errors" / "rank-1.txt").read_text(encoding="utf-8")

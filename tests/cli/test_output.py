"""What leaves the process: plain text in a pipe, a live line on a terminal, an exit code."""

import contextlib
import os
import pty
import re
import shutil
import subprocess
import sys
import threading

import pytest

from support.fault_table import case


def screen(text):
    """What is left on a terminal after `text`: its lines, with the few escape codes of a live line obeyed."""
    lines, row = [""], 0
    for piece in re.split(r"(\x1b\[[?\d;]*[A-Za-z]|\n|\r)", text):
        if piece == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif piece.endswith("A") and piece.startswith("\x1b"):
            row -= int(piece[2:-1] or 1)
        elif piece == "\x1b[2K":
            lines[row] = ""
        elif piece and piece != "\r" and not piece.startswith("\x1b"):
            lines[row] += piece
    return lines


@pytest.fixture
def on_terminal(narrowgauge):
    """Run the command on a pseudo-terminal: (how it ended, everything it wrote there)."""

    def do(*words, **environment):
        ours, theirs = pty.openpty()
        written = []

        def read():
            with contextlib.suppress(OSError):  # the last writer closed it
                while piece := os.read(ours, 4096):
                    written.append(piece)

        reader = threading.Thread(target=read)
        reader.start()
        environment = {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"} | environment
        ended = narrowgauge(*words, terminal=os.ttyname(theirs), **environment)
        os.close(theirs)
        reader.join()
        os.close(ours)
        return ended, b"".join(written).decode()

    return do


@pytest.mark.tier("thorough")
def test_a_terminal_sees_a_live_line_and_gets_its_cursor_back(on_terminal, line, look, tmp_path):
    ended, written = on_terminal(*line({"training.steps": 12}), "--out", tmp_path / "run")
    assert ended.code == 0, ended.err
    assert ended.err == ""
    assert re.search(r"training.*\d+/12.*loss \d\.\d{4}.*tokens/s", written)
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l"), "the cursor is shown again"
    left = [text.rstrip() for text in screen(written)]
    assert not any("training " in text or "data:" in text for text in left), "the live line is gone"
    assert f"run directory: {tmp_path / 'run'}" in left
    assert any(re.fullmatch(r"step +12/12  loss .*  val loss .*", text) for text in left)
    assert left[-2:] == [f"report: {tmp_path / 'run' / 'report.html'}", ""]


def test_a_terminal_is_clean_after_a_failure(on_terminal, line, tmp_path, refused):
    ended, written = on_terminal(*line({"optimizer.lr": 1e308}), "--out", tmp_path / "run")
    refused(ended, code=1)
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")
    assert "training " not in "".join(screen(written))


@pytest.mark.tier("thorough")
def test_a_plan_shows_its_parts_on_a_terminal():
    ours, theirs = pty.openpty()
    written = b""
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"}
    words = [sys.executable, "-m", "narrowgauge", "plan", "--model", "debug", "--cluster", "h100"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=theirs, env=environment) as process:
        os.close(theirs)
        with contextlib.suppress(OSError):  # the process closed it
            while piece := os.read(ours, 4096):
                written += piece
        assert process.stdout is not None
        out = process.stdout.read()
    os.close(ours)
    assert process.returncode == 0
    shown = [b"starting", b"the memory of a step", b"the time of a step"]
    assert [text for text in shown if text in written] == shown
    assert written.rindex(b"\x1b[?25h") > written.rindex(b"\x1b[?25l"), "the cursor is shown again"
    assert b"fits: " in out
    assert b"\x1b" not in out


@pytest.mark.tier("thorough")
def test_no_terminal_gets_plain_lines(narrowgauge, line, finished, tmp_path):
    environment = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    lines = [[*line(), "--out", tmp_path / "run"], ["recipes"], ["formats"], ["report", finished]]
    lines.append(["eval", finished])
    for words in lines:
        ended = narrowgauge(*words, **environment)
        assert ended.code == 0, ended.err
        assert "\x1b" not in ended.out
        assert "\r" not in ended.out
    assert "\x1b" not in narrowgauge("trian", **environment).err


def test_tables_keep_to_80_columns(narrowgauge, finished, tmp_path):
    for name in ("one", "two"):
        shutil.copytree(finished, tmp_path / name)
    for words in (
        ["recipes"],
        ["formats"],
        ["formats", "e4m3"],
        ["report", tmp_path / "one", tmp_path / "two"],
    ):
        ended = narrowgauge(*words, COLUMNS="80")
        assert ended.code == 0, ended.err
        # A path stays in one piece, so that it can be copied.
        lines = [text for text in ended.out.splitlines() if not text.startswith("report: ")]
        assert len(lines) > 2
        assert max(map(len, lines)) <= 80


@pytest.mark.tier("thorough")
def test_text_beyond_ascii_in_a_path(narrowgauge, line, tmp_path, look):
    out = tmp_path / "Größe 🚂" / "[bold]x"
    for environment in ({}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}):
        ended = narrowgauge(*line(), "--out", out, **environment)
        assert ended.code == 0, ended.err
        assert "Traceback" not in ended.err
    assert f"report: {out / 'report.html'}\n" in ended.out
    assert look(out).status["status"] == "done"


@pytest.mark.parametrize("words", [["recipes"], ["recipes", "fp8"], ["--help"]], ids=" ".join)
def test_a_reader_that_had_enough_is_no_news(narrowgauge, words):
    ended = narrowgauge(*words, reader_gone=True)
    assert ended.err == ""
    assert ended.code == 1, "as any program in Python whose output nobody reads"


@pytest.mark.tier("thorough")
def test_a_run_whose_reader_went_away_says_so_in_its_directory(narrowgauge, line, look, tmp_path):
    words = [*line(), "--out", tmp_path / "run"]
    ended = narrowgauge(*words, reader_gone=True)
    assert (ended.code, ended.err) == (1, "")
    assert narrowgauge(*words).code == 0
    assert look(tmp_path / "run").column("step") == [1, 2, 3, 4, 5, 6]


@pytest.mark.tier("thorough")
@case("G4", tier="quick")
def test_memory_that_runs_out_is_one_sentence(narrowgauge, line, look, tmp_path, refused):
    """2^31 - 1 sequences at once: their numbers alone take 16 GiB."""
    huge = {"training.batch_size": 2**31 - 1, "training.micro_batch_size": 2**31 - 1, "recipe.name": "bf16"}
    ended = narrowgauge(*line(huge), "--out", tmp_path / "run", memory=12 << 30)
    refused(ended, "out of memory", "KiB with --training.micro_batch_size 1", code=1)
    for name in ("a step is expected to take", "weights", "saved activations", "workspace"):
        assert name in ended.err, "what was planned, by class"
    assert look(tmp_path / "run").status["status"] == "failed"
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.tier("thorough")
def test_a_full_disk_is_one_sentence(narrowgauge, line, tmp_path, refused):
    ended = narrowgauge(
        *line(), "--out", tmp_path / "run", largest_file=4000
    )  # bytes; the tokenizer has more
    refused(ended, "File too large", code=1)
    assert narrowgauge(*line(), "--out", tmp_path / "run").code == 0


@pytest.mark.tier("thorough")
def test_weights_that_went_bad_are_a_failure_not_a_mistake(narrowgauge, line, look, tmp_path, refused):
    ended = narrowgauge(*line({"optimizer.lr": 1e308}), "--out", tmp_path / "run")
    refused(ended, "NaN or an infinity", code=1)
    assert look(tmp_path / "run").status["status"] == "failed"
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))

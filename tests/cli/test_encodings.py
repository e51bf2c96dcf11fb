"""A terminal that cannot hold a character shows another in its place, and changes nothing else.

Terminals of East Asia, of old servers and of containers without a locale have such encodings.
"""

import contextlib
import io
import sys

import pytest
from rich.console import Console

from narrowgauge.cli.main import main
from narrowgauge.distributed.process_group.failure import keep_traceback
from narrowgauge.runs.monitor.progress import Display

ENCODINGS = ("ascii", "latin-1", "cp1252", "gbk", "utf-8")
TEXT = "漢字 → déjà \udcff 🙂"  # the last but one: a byte of a file's name that is not UTF-8


@pytest.fixture
def strict(monkeypatch):
    """Make both streams strict ones of an encoding; returns what was written to standard output."""

    def change(encoding):
        streams = [io.TextIOWrapper(io.BytesIO(), encoding, "strict", write_through=True) for _ in range(2)]
        monkeypatch.setattr(sys, "stdout", streams[0])
        monkeypatch.setattr(sys, "stderr", streams[1])
        return lambda: streams[0].buffer.getvalue().decode(encoding)

    return change


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_verb_prints_what_it_can(strict, tmp_path, encoding):
    run_directory = tmp_path / TEXT
    run_directory.mkdir()
    (run_directory / "config.toml").write_text("[recipe]\nname = 'bf16'\n")
    (run_directory / "status.json").write_text('{"status": "failed", "reason": "no → way"}')
    written = strict(encoding)
    assert main(["runs", str(tmp_path)]) == 0
    assert "failed: no " in written()
    assert main(["runs", str(tmp_path / (TEXT + "absent"))]) == 2


@pytest.mark.tier("thorough")
def test_a_run_whose_sample_the_terminal_cannot_hold_is_done(strict, line, look, tmp_path):
    written = strict("ascii")
    short = {"training.steps": 1, "validation.batches": 1, "log.prompt": "漢字 → déjà"}
    assert main([*line(short), "--out", str(tmp_path / "run")]) == 0
    assert "sample, from" in written()
    assert look(tmp_path / "run").status["status"] == "done"
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_run_from_python_prints_what_it_can(strict, encoding):
    written = strict(encoding)
    Display(Console(), 1, 1).log(f"sample, from {TEXT}")
    assert written().startswith("sample, from ")


@pytest.mark.parametrize("words", [["formats"], ["--help"], ["train", "--help"]])
def test_a_verb_needs_no_standard_output(monkeypatch, words):
    monkeypatch.setattr(sys, "stdout", None)
    with contextlib.suppress(SystemExit):
        assert main(words) == 0


def test_the_traceback_of_a_rank_is_kept_in_full(monkeypatch, tmp_path):
    monkeypatch.setattr("locale.getencoding", lambda: "ascii")  # what a file of text has without encoding=
    keep_traceback(ValueError(TEXT), 1, tmp_path)
    assert "déjà" in (tmp_path / "errors" / "rank-1.txt").read_text(encoding="utf-8")

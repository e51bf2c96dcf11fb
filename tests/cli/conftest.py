"""The command in this process, what a refusal looks like, and one finished run to look at."""

import contextlib
import io
import warnings

import pytest

from narrowgauge.trainer.cli.main import main
from narrowgauge.trainer.runs.monitor.machine import compute_by
from support.processes import Ended


@pytest.fixture
def command(capsys, monkeypatch):
    """`command(*words, NAME="value")` runs a line in this process."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # which `main` replaces

    def run(*words, **environment):
        capsys.readouterr()
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            try:
                code = main(list(map(str, words)))
            except SystemExit as ended:  # of --help
                code = ended.code or 0
            finally:
                compute_by({})  # the arithmetic of a run holds for its process
        return Ended(code, *capsys.readouterr())

    return run


@pytest.fixture
def refused(tmp_path):
    """A check: one sentence that holds these words, and nothing below `tmp_path` was trained."""

    def check(ended, *words, code=2):
        assert ended.code == code, ended.err
        assert ended.err.startswith("narrowgauge: ")
        assert ended.err.endswith("\n")
        assert ended.err.count("\n") == 1, ended.err
        for word in words:
            assert str(word) in ended.err
        if code == 2:
            lines = [line for file in tmp_path.rglob("metrics.jsonl") for line in file.open()]
            assert not any('"loss"' in line for line in lines), "something was trained"

    return check


@pytest.fixture(scope="session")
def printed():
    """What a line prints that succeeds without a warning."""

    def run(*words):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            assert main(list(map(str, words))) == 0
        compute_by({})
        assert err.getvalue() == ""
        return out.getvalue()

    return run


@pytest.fixture(scope="session")
def finished(line, printed, tmp_path_factory):
    """The directory of a finished run, to be read only."""
    out = tmp_path_factory.mktemp("finished") / "run"
    printed(*line(), "--out", out)
    return out

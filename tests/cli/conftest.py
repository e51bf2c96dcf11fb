"""What a refusal looks like, and one finished run to look at."""

import pytest


@pytest.fixture
def refused(tmp_path):
    """A check: the process ended with one sentence that holds these words, and nothing below `tmp_path` was
    trained."""

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
def finished(narrowgauge, line, tmp_path_factory):
    """The directory of a finished run, to be read only."""
    out = tmp_path_factory.mktemp("finished") / "run"
    ended = narrowgauge(*line(), "--out", out)
    assert ended.code == 0, ended.err
    assert ended.err == ""
    return out

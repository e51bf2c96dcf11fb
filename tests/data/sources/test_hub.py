"""The hub: rows once and in order through failures, and a last word that helps."""

import pytest

from data.reading import refusal, texts, write
from narrowgauge.data import prepare
from narrowgauge.data.sources.hub import retried
from narrowgauge.errors import UserError
from support.fault_table import case


class Wire:
    """A row at a time, failing before rows as often as asked, and from whichever row it is asked."""

    def __init__(self, rows, failures, error=ConnectionError):
        self.rows, self.failures, self.error = rows, dict(failures), error
        self.asked = []

    def __call__(self, skip):
        self.asked.append(skip)
        for row in range(skip, self.rows):
            if self.failures.get(row, 0):
                self.failures[row] -= 1
                raise self.error("503 Service Unavailable")
            yield {"text": f"row {row}"}


@case("F5", tier="quick")
@pytest.mark.parametrize("failures", [{}, {0: 1}, {5: 3}, {2: 3, 3: 3, 9: 1}])
def test_every_row_comes_once_whatever_fails_for_a_while(failures):
    wire, pauses = Wire(10, failures), []
    rows = list(retried(wire, "a/b", pauses=(1, 2, 4), sleep=pauses.append))
    assert [row["text"] for row in rows] == [f"row {i}" for i in range(10)]
    assert pauses == [p for row in sorted(failures) for p in (1, 2, 4)[: failures[row]]]
    assert len(wire.asked) == 1 + sum(failures.values())


@case("F5", tier="quick")
def test_what_fails_for_good_is_told_with_what_was_tried_and_the_way_out(monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://somebody:se/c@ret@proxy.example:3128")
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    rows = retried(Wire(10, {4: 100}), "a/b", pauses=(1, 2, 4), sleep=lambda seconds: None)
    with pytest.raises(UserError) as caught:
        list(rows)
    said = str(caught.value)
    for words in (
        "data set 'a/b' failed in 4 attempts, after 4 rows (ConnectionError: 503 Service Unavailable)",
        "the proxy HTTPS_PROXY=http://proxy.example:3128",
        "the mirror HF_ENDPOINT=https://mirror.example",
        "not offline mode (HF_HUB_OFFLINE=1)",
        "fetch its .parquet or .jsonl files on a machine that reaches them, copy the folder here",
    ):
        assert words in said
    assert "ret@" not in said


class DatasetNotFoundError(FileNotFoundError):
    """As the library calls it."""


@pytest.mark.parametrize("error", [DatasetNotFoundError, KeyError])
def test_what_cannot_pass_is_not_asked_again(error):
    wire = Wire(10, {0: 100}, error)
    with pytest.raises(UserError, match="failed at once, after 0 rows"):
        list(retried(wire, "a/b", sleep=lambda seconds: None))
    assert wire.asked == [0]


@pytest.mark.tier("thorough")  # the library takes a second
def test_a_data_set_is_read_by_the_library(tmp_path, monkeypatch):
    """From a folder of the disk, which the library takes for a name too."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    lines = [f'{{"text": "row {i}", "other": {i}}}\n' for i in range(300)]
    write(tmp_path / "set" / "train.jsonl", "".join(lines[:200]))
    write(tmp_path / "set" / "test.jsonl", "".join(lines[200:]))
    name = f"hf:{tmp_path / 'set'}"
    assert texts(name) == [f"row {i}" for i in range(200)]
    assert texts(f"{name}::test") == [f"row {i}" for i in range(200, 300)]
    said = refusal(name, "body")
    assert "unknown column 'body'" in said
    assert "name its key or column with `narrowgauge prepare --text-key" in said
    facts = prepare(name, "bpe-300", tmp_path / "out").manifest
    assert (facts.train_documents + facts.val_documents, facts.files) == (200, [])


def test_a_name_without_a_data_set_is_refused():
    for name in ("hf:", "hf::en"):
        said = "does not name a data set; write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT"
        assert said in refusal(name)

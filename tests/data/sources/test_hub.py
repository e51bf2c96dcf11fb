"""The hub: rows once and in order through failures, and a last word that helps."""

import pytest

from narrowgauge.data import documents, prepare
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
    got = []
    with pytest.raises(UserError) as caught:
        got.extend(rows)
    said = str(caught.value)
    assert (
        "data set 'a/b' failed in 4 attempts, after 4 rows (ConnectionError: 503 Service Unavailable)" in said
    )
    assert "the proxy HTTPS_PROXY=http://proxy.example:3128" in said
    assert "ret@" not in said
    assert "the mirror HF_ENDPOINT=https://mirror.example" in said
    assert "not offline mode (HF_HUB_OFFLINE=1)" in said
    assert "fetch its .parquet or .jsonl files on a machine that reaches them, copy the folder here" in said


class DatasetNotFoundError(FileNotFoundError):
    """As the library calls it."""


@pytest.mark.parametrize("error", [DatasetNotFoundError, KeyError])
def test_what_cannot_pass_is_not_asked_again(error):
    wire = Wire(10, {0: 100}, error)
    with pytest.raises(UserError, match="failed at once, after 0 rows"):
        list(retried(wire, "a/b", sleep=lambda seconds: None))
    assert wire.asked == [0]


def test_a_data_set_is_read_by_the_library(tmp_path, monkeypatch):
    """From a folder of the disk, which the library takes for a name too."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    folder = tmp_path / "set"
    folder.mkdir()
    lines = [f'{{"text": "row {i}", "other": {i}}}\n' for i in range(300)]
    (folder / "train.jsonl").write_text("".join(lines[:200]))
    (folder / "test.jsonl").write_text("".join(lines[200:]))
    name = f"hf:{folder}"
    assert [d.text for d in documents(name)] == [f"row {i}" for i in range(200)]
    assert [d.text for d in documents(f"{name}::test")] == [f"row {i}" for i in range(200, 300)]
    with pytest.raises(UserError, match=r"unknown column 'body'.*name its key or column with .* --text-key"):
        list(documents(name, "body"))
    corpus = prepare(name, "bpe-300", tmp_path / "out")
    assert corpus.manifest.train_documents + corpus.manifest.val_documents == 200
    assert corpus.manifest.files == []


@pytest.mark.parametrize("name", ["hf:", "hf::en"])
def test_a_name_without_a_data_set_is_refused(name):
    with pytest.raises(
        UserError, match="does not name a data set; write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT"
    ):
        list(documents(name))

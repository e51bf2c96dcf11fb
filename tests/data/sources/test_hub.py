"""The hub: its library reads data sets, and a last word that helps where it cannot."""

import datasets
import pytest

from data.reading import refusal, texts, write
from narrowgauge.trainer.data import prepare
from support.fault_table import case


@case("F5", tier="quick")
def test_what_fails_for_good_is_told_with_what_was_tried_and_the_way_out(monkeypatch):
    def fails(*arguments, **settings):
        try:
            raise ConnectionError("503 Service Unavailable")
        except ConnectionError as error:
            raise datasets.exceptions.DatasetNotFoundError("no such place") from error

    monkeypatch.setattr(datasets, "load_dataset", fails)
    monkeypatch.setenv("HTTPS_PROXY", "http://somebody:se/c@ret@proxy.example:3128")
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    said = refusal("hf:a/b")
    for words in (
        "'a/b' cannot be read (DatasetNotFoundError: no such place from ConnectionError: 503 Serv",
        "the proxy http://proxy.example:3128",
        "the mirror https://mirror.example",
        "fetch its .parquet or .jsonl files on a machine that reaches them",
    ):
        assert words in said
    assert "ret@" not in said


@case("F5", tier="quick")
def test_offline_a_data_set_that_is_not_in_the_cache_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    said = refusal("hf:nobody/nothing")
    assert "data set 'nobody/nothing' cannot be read (" in said
    assert "offline mode (HF_HUB_OFFLINE=1)" in said


@pytest.mark.tier("thorough")  # the library takes a second
def test_a_data_set_is_read_by_the_library(tmp_path, monkeypatch):
    """From a folder of the disk, which the library takes for a name too."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "home")
    lines = [f'{{"text": "row {i}", "other": {i}}}\n' for i in range(300)]
    write(tmp_path / "set" / "train.jsonl", "".join(lines[:200]))
    write(tmp_path / "set" / "test.jsonl", "".join(lines[200:]))
    name = f"hf:{tmp_path / 'set'}"
    assert texts(name) == [f"row {i}" for i in range(200)]
    assert texts(f"{name}::test") == [f"row {i}" for i in range(200, 300)]
    assert "unknown column 'body'" in refusal(name, "body")
    facts = prepare(name, "bpe-300", tmp_path / "out").manifest
    assert (facts.train_documents + facts.val_documents, facts.files) == (200, [])


def test_a_name_without_a_data_set_is_refused():
    assert "does not name a data set; write hf:NAME, hf:NAME:CONFIG or hf:NAME" in refusal("hf::en")

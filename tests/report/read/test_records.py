"""The raw files: what wins, what is left out."""

import json

from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.report.read.records import as_float, read_metrics


def test_records_of_one_step_are_merged_key_by_key(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2, "loss": 3, "val_loss": 4}\n{"step": 1, "loss": 9}\n{"step": 2, "loss": 2}\n')
    records, events, ignored = read_metrics(path)
    assert list(records) == [1, 2]
    assert records[2] == {"step": 2, "loss": 2, "val_loss": 4}
    assert (events, ignored) == ([], 0)


def test_words_and_truths_are_no_numbers():
    assert all(as_float(value) != as_float(value) for value in ("3", None, True, [1]))
    assert as_float(3) == 3.0


@given(cut=st.integers(min_value=0, max_value=200))
def test_a_file_cut_anywhere_keeps_every_whole_line_before_the_cut(tmp_path_factory, cut):
    lines = [json.dumps({"step": step, "loss": 1 / step}) for step in range(1, 8)]
    text = "\n".join(lines)[:cut]
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    path.write_text(text)
    records, _, ignored = read_metrics(path)
    whole = sum(line in lines for line in text.split("\n"))
    assert len(records) == whole
    assert ignored == (1 if text and text.split("\n")[-1] not in ("", *lines) else 0)

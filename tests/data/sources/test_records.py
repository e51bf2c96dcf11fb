"""Lines, rows and the hub: every text as it stands, every record that is none by file, line and reason."""

import bz2
import gzip
import json
import lzma

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data.reading import refusal, texts
from data.reading import write as written
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data import Options, open_corpus, prepare
from support.fault_table import case

TEXTS = ["one", "two\nlines \u2014 caf\u00e9", " three ", "four \U0001f682", "five"]
LINES = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS)).encode()
PACK = {
    "jsonl": bytes,
    "jsonl.gz": gzip.compress,
    "jsonl.bz2": bz2.compress,
    "jsonl.xz": lzma.compress,
    "json": bytes,
    "jsonl.zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
PACKED = ("jsonl.gz", "jsonl.bz2", "jsonl.xz", "jsonl.zst")


def test_lines_are_read_whatever_they_are_packed_in(tmp_path):
    at = LINES.index(b"three")  # in the middle of a line
    for suffix, pack in PACK.items():
        assert texts(written(tmp_path / f"a.{suffix}", pack(LINES))) == TEXTS, suffix
        if suffix in PACKED:  # streams end to end are one file
            two = written(tmp_path / f"b.{suffix}", pack(LINES[:at]) + pack(LINES[at:]))
            assert texts(two) == TEXTS, suffix


def test_a_window_of_two_gigabytes_is_read(tmp_path):
    """`zstd --long=31`, as crawls of Reddit are distributed; such a file was called damaged."""
    options = zstandard.ZstdCompressionParameters.from_level(3, window_log=31)
    packer = zstandard.ZstdCompressor(compression_params=options).compressobj()
    assert texts(written(tmp_path / "a.jsonl.zst", packer.compress(LINES) + packer.flush())) == TEXTS


def test_records_have_a_chosen_key_and_skip_blank_lines_marks_and_blank_texts(tmp_path):
    data = b'\xef\xbb\xbf{"body": "a"}\r\n\n  \n{"body": " \\n"}\n{"body": "b"}'
    assert texts(written(tmp_path / "a.jsonl", data), "body") == ["a", "b"]


BAD = [
    (b'{"text": "b', "is not JSON: Unterminated string"),
    (b"[1, 2]", "holds a list where an object belongs"),
    (b'{"id": 1, "body": "b"}', "has no 'text'; it has id, body; name its key or column with"),
    (b'{"text": 7}', "has a int where a text belongs"),
    (b'{"text": "caf\xe9"}', "is not UTF-8: byte 13 of the line is 0xe9"),
    (b'{"text": "a\x00b"}', "holds a NUL byte (byte 11 of the line)"),
    (b'{"text": "a\\u0000b"}', "holds a NUL byte (character 1), so it is not text"),
    (b'{"text": "a\\ud800b"}', "holds half a surrogate pair (U+D800 at character 1)"),
    (b"[" * 100_000, "is not JSON"),
    (b'{"text": "a"} {"text": "b"}', "is not JSON: Extra data"),
]


@case("F1", tier="quick")
@pytest.mark.parametrize(("line", "says"), BAD)
def test_a_bad_line_is_named_and_set_aside_alone(tmp_path, line, says):
    path = written(tmp_path / "a.jsonl", LINES + line + b"\n" + LINES)
    said = refusal(path)
    assert f"{path}:6 {says}" in said
    assert "fix it, or set such records aside with `narrowgauge prepare --tolerant`" in said
    with pytest.raises(UserError):
        prepare(str(path), "bytes", tmp_path / "strict")
    facts = prepare(str(path), "bytes", tmp_path / "out", options=Options(tolerance=0.2)).manifest
    assert (facts.rejected, facts.train_documents + facts.val_documents) == (1, 10)
    (aside,) = map(json.loads, (tmp_path / "out" / "rejected.jsonl").read_text().splitlines())
    assert aside["where"] == f"{path}:6"
    assert says.partition("; name")[0] in aside["reason"]
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_dir()] == ["out"]


@case("F1", tier="quick")
def test_a_line_beyond_the_limit_is_refused_without_being_held(tmp_path, monkeypatch):
    """Plain, packed a thousandfold, and without an end."""
    monkeypatch.setattr("narrowgauge.trainer.data.sources.records.MOST_BYTES", 1 << 20)
    long = b'{"text": "' + b"x" * (3 << 20)
    path = written(tmp_path / "a.jsonl", LINES + long + b'"}\n' + LINES)
    says = ":6 is a line of more than 1 MiB, the limit for one document"
    assert f"{path}{says}" in refusal(path)
    facts = prepare(str(path), "bytes", tmp_path / "out", options=Options(tolerance=0.2)).manifest
    assert (facts.rejected, facts.train_documents + facts.val_documents) == (1, 10)
    for suffix in PACKED:
        assert says in refusal(written(tmp_path / f"b.{suffix}", PACK[suffix](LINES + long)))


@pytest.mark.parametrize("suffix", PACKED)
def test_what_is_packed_and_damaged_is_refused_after_what_it_holds(tmp_path, suffix):
    lines = b"".join(b'{"text": "line %d"}\n' % i for i in range(4_000))
    whole = PACK[suffix](lines)
    middle, ends = len(whole) // 2, "ends before its compressed data does"
    flipped = whole[:middle] + bytes([whole[middle] ^ 0x10, whole[middle + 1] ^ 1]) + whole[middle + 2 :]
    damaged = [("cut", whole[:-10], ends), ("empty", b"", "is empty"), ("flipped", flipped, "is ")]
    for name, data, says in damaged:
        said = refusal(path := written(tmp_path / f"{name}.{suffix}", data))
        assert str(path) in said
        assert says in said
    path, options = written(tmp_path / f"second.{suffix}", whole + whole[:middle]), Options(tolerance=0.2)
    assert prepare(str(path), "bytes", tmp_path / "out", options=options).manifest.rejected == 1


def table(path, values, kind=None, name="text"):
    path.parent.mkdir(exist_ok=True)
    array = pyarrow.array(values, kind or pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"id": list(range(len(values))), name: array}), path)
    return path


TYPES = [
    *(pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(), pyarrow.binary(), pyarrow.binary(9)),
    *(pyarrow.binary_view(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())),
]


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_rows_are_read(tmp_path, kind):
    values = [f"texts {i % 100:03}" for i in range(600)]
    assert texts(table(tmp_path / "a.parquet", values, kind, "body"), "body") == values
    if "binary" in str(kind):
        path = table(tmp_path / "b.parquet", [b"caffeine\n", b"caf\xe9ine\n\n"], kind)
        assert f"{path}, row 1, is not UTF-8: byte 3 is 0xe9" in refusal(path)


def test_bad_rows_and_tables_are_named_and_rows_are_set_aside_alone(tmp_path):
    path = table(tmp_path / "a.parquet", ["a", None, "b", "c\x00", "d"])
    assert f"{path}, row 1, has no text" in refusal(path)
    facts = prepare(str(path), "bytes", tmp_path / "out", options=Options(tolerance=0.5)).manifest
    assert (facts.rejected, facts.train_documents + facts.val_documents) == (2, 3)
    path = table(tmp_path / "a.parquet", ["a"], name="txt")
    says = "unknown column 'text'; the nearest is 'txt' (known: id, txt); name its key or column with "
    assert says + "`narrowgauge prepare --text-key" in refusal(path)
    assert "holds int64, not text" in refusal(path, "id")
    whole = table(tmp_path / "a.parquet", ["a"] * 1000).read_bytes()
    for data in (whole[:-20], whole[: len(whole) // 2], b"", b"PAR1 is not enough"):
        path = written(tmp_path / "b.parquet", data)
        assert f"{path}, row 0, cannot be read as parquet" in refusal(path)


@case("F1", tier="quick")
def test_the_share_that_is_tolerated_is_kept_to(tmp_path):
    path, options = written(tmp_path / "a.jsonl", LINES * 20 + b"bad\n" * 2), Options(tolerance=0.019)
    says = r"2 of 102 records of .* were rejected \(2\.0%\), more than the 1\.9%"
    with pytest.raises(UserError, match=says):
        prepare(str(path), "bytes", tmp_path / "out", options=options)
    assert prepare(str(path), "bytes", options=Options(tolerance=0.02)).manifest.rejected == 2
    # Long before the end, where there are many.
    path = written(tmp_path / "b.jsonl", b"bad\n" * 5000 + LINES * 20_000)
    with pytest.raises(UserError, match="were rejected"):
        prepare(str(path), "bytes", tmp_path / "out", options=options)
    assert not (tmp_path / "out").exists()
    assert open_corpus(prepare(str(written(path, LINES * 20)), "bytes", tmp_path / "out").directory)
    for share in (0.0, 1.0, -1.0, float("nan")):
        for key in ("val_fraction", "tolerance"):
            with pytest.raises(UserError, match="must be between 0 and 1"):
                Options(**{key: share})


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
        "HTTPS_PROXY=http://proxy.example:3128",
        "HF_ENDPOINT=https://mirror.example",
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
    assert "HF_HUB_OFFLINE=1" in said


@pytest.mark.tier("thorough")  # the library takes a second
def test_a_data_set_is_read_by_the_library(tmp_path, monkeypatch):
    """From a folder of the disk, which the library takes for a name too."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "home")
    lines = [f'{{"text": "row {i}", "other": {i}}}\n' for i in range(300)]
    written(tmp_path / "set" / "train.jsonl", "".join(lines[:200]))
    written(tmp_path / "set" / "test.jsonl", "".join(lines[200:]))
    name = f"hf:{tmp_path / 'set'}"
    assert texts(name) == [f"row {i}" for i in range(200)]
    assert texts(f"{name}::test") == [f"row {i}" for i in range(200, 300)]
    assert "unknown column 'body'" in refusal(name, "body")
    facts = prepare(name, "bpe-300", tmp_path / "out").manifest
    assert (facts.train_documents + facts.val_documents, facts.files) == (200, [])


def test_a_name_without_a_data_set_is_refused():
    assert "does not name a data set; write hf:NAME, hf:NAME:CONFIG or hf:NAME" in refusal("hf::en")

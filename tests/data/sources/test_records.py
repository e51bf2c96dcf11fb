"""Lines and rows: every text as it stands, and every record that is none by file, line and reason."""

import bz2
import gzip
import json
import lzma

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from narrowgauge.data import documents, open_corpus, prepare
from narrowgauge.data.preparation.document_filter import Options
from narrowgauge.errors import UserError
from support.fault_table import case

TEXTS = ["one", "two\nlines \u2014 caf\u00e9", " three ", "four \U0001f682", "five"]
LINES = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS)).encode()
PACK = {
    "jsonl": bytes,
    "ndjson": bytes,
    "jsonl.gz": gzip.compress,
    "json.gz": gzip.compress,
    "jsonl.bz2": bz2.compress,
    "jsonl.xz": lzma.compress,
    "json.xz": lzma.compress,
    "json": bytes,
    "jsonl.zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
PACKED = ("jsonl.gz", "jsonl.bz2", "jsonl.xz", "jsonl.zst")


def written(path, data):
    path.write_bytes(data)
    return path


def texts(source, key="text"):
    return [document.text for document in documents(str(source), key)]


def refusal(source, key="text"):
    with pytest.raises(UserError) as caught:
        list(documents(str(source), key))
    return str(caught.value)


@pytest.mark.parametrize("suffix", PACK)
def test_lines_are_read_whatever_they_are_packed_in(tmp_path, suffix):
    assert texts(written(tmp_path / f"a.{suffix}", PACK[suffix](LINES))) == TEXTS


@pytest.mark.parametrize("suffix", PACKED)
def test_streams_end_to_end_are_one_file(tmp_path, suffix):
    at = LINES.index(b"three")  # in the middle of a line
    data = PACK[suffix](LINES[:at]) + PACK[suffix](LINES[at:])
    assert texts(written(tmp_path / f"a.{suffix}", data)) == TEXTS


def test_a_window_of_two_gigabytes_is_read(tmp_path):
    """`zstd --long=31`, as crawls of Reddit are distributed; such a file was called damaged."""
    options = zstandard.ZstdCompressionParameters.from_level(3, window_log=31)
    packer = zstandard.ZstdCompressor(compression_params=options).compressobj()
    assert texts(written(tmp_path / "a.jsonl.zst", packer.compress(LINES) + packer.flush())) == TEXTS


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_byte_that_is_not_utf8_costs_its_piece_of_a_text_and_not_the_rest(tmp_path, mark):
    """The rest of the file was lost as one record, so that a tolerance of 1 % could take most of a text."""
    paragraphs = ["caf\u00e9 " * 900 + "\n\n" for _ in range(1000)]
    data = bytearray(mark + "".join(paragraphs).encode())
    bad = len(mark) + 500 * len(paragraphs[0].encode()) + 7
    data[bad] = 0xE9
    path = written(tmp_path / "a.txt", bytes(data))
    assert f"{path} is not UTF-8: byte {bad} is 0xe9; convert it" in refusal(path)
    facts = prepare(str(path), "bytes", tmp_path / "out", options=Options(tolerance=0.01)).manifest
    assert (facts.rejected, facts.train_documents + facts.val_documents) == (1, 999)


def test_records_have_a_chosen_key_and_skip_blank_lines_marks_and_blank_texts(tmp_path):
    data = b'\xef\xbb\xbf{"body": "a"}\r\n\n  \n{"body": " \\n"}\n{"body": "b"}'
    assert texts(written(tmp_path / "a.jsonl", data), "body") == ["a", "b"]


def test_files_of_every_kind_come_in_the_order_of_their_names(tmp_path):
    table(tmp_path / "a" / "b.parquet", ["row"])
    written(tmp_path / "a" / "a.jsonl", b'{"text": "line"}\n')
    written(tmp_path / "a" / "c.txt", b"file")
    written(tmp_path / "a" / "d.jsonl.gz", gzip.compress(b'{"text": "packed"}\n'))
    assert texts(tmp_path / "a") == ["line", "row", "file", "packed"]
    assert texts(tmp_path / "a" / "*.jsonl*") == ["line", "packed"]


BAD = {
    "a cut line": (b'{"text": "b', "is not JSON: Unterminated string"),
    "another value": (b"[1, 2]", "holds a list where an object belongs"),
    "no text": (b'{"id": 1, "body": "b"}', "has no 'text'; it has id, body; name its key or column with"),
    "a number": (b'{"text": 7}', "has a int where a text belongs"),
    "nothing": (b'{"text": null}', "has a NoneType where a text belongs"),
    "not UTF-8": (b'{"text": "caf\xe9"}', "is not UTF-8: byte 13 of the line is 0xe9"),
    "a NUL": (b'{"text": "a\x00b"}', "holds a NUL byte (byte 11 of the line)"),
    "a NUL in disguise": (b'{"text": "a\\u0000b"}', "holds a NUL byte (character 1), so it is not text"),
    "half a pair": (b'{"text": "a\\ud800b"}', "holds half a surrogate pair (U+D800 at character 1)"),
    "depth": (b"[" * 100_000, "is not JSON"),
    "digits": (b'{"text": ' + b"9" * 5000 + b"}", "is not JSON that can be read"),
    "text and more": (b'{"text": "a"} {"text": "b"}', "is not JSON: Extra data"),
}


@case("F1", tier="quick")
@pytest.mark.parametrize("case", BAD)
def test_a_bad_line_is_named_and_set_aside_alone(tmp_path, case):
    line, says = BAD[case]
    path = written(tmp_path / "a.jsonl", LINES + line + b"\n" + LINES)
    said = refusal(path)
    assert f"{path}:6 {says}" in said
    assert "fix it, or set such records aside with `narrowgauge prepare --tolerant`" in said
    with pytest.raises(UserError):
        prepare(str(path), "bytes", tmp_path / "strict")
    corpus = prepare(str(path), "bytes", tmp_path / "out", options=Options(tolerance=0.2))
    facts = corpus.manifest
    assert (facts.rejected, facts.train_documents + facts.val_documents) == (1, 10)
    (aside,) = map(json.loads, (tmp_path / "out" / "rejected.jsonl").read_text().splitlines())
    assert aside["where"] == f"{path}:6"
    assert says.partition("; name")[0] in aside["reason"]
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_dir()] == ["out"]


@case("F1", tier="quick")
def test_a_line_of_a_hundred_megabytes_is_refused_without_being_held(tmp_path):
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(LINES + b'{"text": "')
        for _ in range(100):
            file.write(b"x" * (1 << 20))
        file.write(b'"}\n' + LINES)
    assert f"{path}:6 is a line of more than 32 MiB, the limit for one document" in refusal(path)
    facts = prepare(str(path), "bytes", tmp_path / "out", options=Options(tolerance=0.2)).manifest
    assert (facts.rejected, facts.train_documents + facts.val_documents) == (1, 10)


@pytest.mark.tier("thorough")
def test_so_is_one_that_is_packed_a_thousandfold_or_never_ends(tmp_path):
    long = b'{"text": "' + b"x" * (40 << 20)
    for suffix in PACKED:
        path = written(tmp_path / f"a.{suffix}", PACK[suffix](LINES + long))
        assert ":6 is a line of more than 32 MiB" in refusal(path)


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("suffix", PACKED)
def test_what_is_packed_and_damaged_is_refused_after_what_it_holds(tmp_path, suffix):
    lines = b"".join(b'{"text": "line %d"}\n' % i for i in range(20_000))
    whole = PACK[suffix](lines)
    for name, data in [("cut", whole[:-10]), ("empty", b""), ("half", whole[: len(whole) // 2])]:
        path = written(tmp_path / f"{name}.{suffix}", data)
        said = refusal(path)
        assert "is empty" in said if name == "empty" else "ends before its compressed data does" in said, said
        assert str(path) in said
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0x10
    flipped[len(whole) // 2 + 1] ^= 0x01
    said = refusal(written(tmp_path / f"flipped.{suffix}", bytes(flipped)))
    assert "is damaged" in said or "is not" in said
    half = PACK[suffix](lines * 6)
    written(tmp_path / f"half.{suffix}", half[: len(half) // 2])
    facts = prepare(
        str(tmp_path / f"half.{suffix}"), "bytes", tmp_path / "out", options=Options(tolerance=0.2)
    )
    assert facts.manifest.rejected == 1


def table(path, values, kind=None, name="text"):
    path.parent.mkdir(exist_ok=True)
    array = pyarrow.array(values, kind or pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"id": list(range(len(values))), name: array}), path)
    return path


TYPES = [
    *(pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()),
    *(pyarrow.binary(), pyarrow.large_binary(), pyarrow.binary_view(), pyarrow.binary(9)),
    *(pyarrow.dictionary(pyarrow.int32(), pyarrow.string()), pyarrow.dictionary("i1", pyarrow.binary())),
]


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_rows_are_read(tmp_path, kind):
    values = [f"texts {i % 100:03}" for i in range(600)]
    assert texts(table(tmp_path / "a.parquet", values, kind)) == values
    path = table(tmp_path / "b.parquet", values, kind, "body")
    assert texts(path, "body") == values


@pytest.mark.parametrize("kind", [kind for kind in TYPES if "binary" in str(kind)], ids=str)
def test_a_row_of_bytes_that_are_not_utf8_is_named(tmp_path, kind):
    path = table(tmp_path / "a.parquet", [b"caffeine\n", b"caf\xe9ine\n\n"], kind)
    assert f"{path}, row 1, is not UTF-8: byte 3 is 0xe9" in refusal(path)


def test_bad_rows_are_named_and_set_aside_alone(tmp_path):
    path = table(tmp_path / "a.parquet", ["a", None, "b", "c\x00", "d"])
    assert f"{path}, row 1, has no text" in refusal(path)
    facts = prepare(str(path), "bytes", tmp_path / "out", options=Options(tolerance=0.5)).manifest
    assert (facts.rejected, facts.train_documents + facts.val_documents) == (2, 3)


def test_a_table_without_such_a_column_is_refused(tmp_path):
    path = table(tmp_path / "a.parquet", ["a"], name="txt")
    assert (
        "unknown column 'text'; the nearest is 'txt' (known: id, txt); name its key or column with "
        "`narrowgauge prepare --text-key`" in refusal(path)
    )
    assert "column 'id' of" in refusal(path, "id")
    assert "holds int64, not text" in refusal(path, "id")


def test_a_table_that_is_cut_or_none_is_refused(tmp_path):
    whole = table(tmp_path / "a.parquet", ["a"] * 1000).read_bytes()
    for data in (whole[:-20], whole[: len(whole) // 2], b"", b"PAR1 is not enough"):
        path = written(tmp_path / "b.parquet", data)
        assert f"{path}, row 0, cannot be read as parquet" in refusal(path)


@pytest.mark.tier("thorough")
@case("F1", tier="quick")
def test_the_share_that_is_tolerated_is_kept_to(tmp_path):
    path = written(tmp_path / "a.jsonl", LINES * 20 + b"bad\n" * 3)
    options = Options(tolerance=0.01)
    with pytest.raises(
        UserError, match=r"3 of 103 records of .* were rejected \(2\.9%\), more than the 1\.0%"
    ):
        prepare(str(path), "bytes", tmp_path / "out", options=options)
    # Long before the end, where there are many.
    path = written(tmp_path / "b.jsonl", b"bad\n" * 5000 + LINES * 20_000)
    with pytest.raises(UserError, match="were rejected"):
        prepare(str(path), "bytes", tmp_path / "out", options=options)
    assert not (tmp_path / "out").exists()
    assert open_corpus(prepare(str(written(path, LINES * 20)), "bytes", tmp_path / "out").directory)


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0, float("nan")])
def test_shares_are_between_nothing_and_all(share):
    with pytest.raises(UserError, match="must be between 0 and 1"):
        Options(val_fraction=share)
    with pytest.raises(UserError, match="must be between 0 and 1"):
        Options(tolerance=share)


def test_text_with_a_nul_names_its_line_and_packed_text_is_text(tmp_path):
    path = written(tmp_path / "a.txt", b"one\ntwo \x00")
    assert f"{path}, piece 0, holds a NUL byte (character 8), so it is not text" in refusal(path)
    written(tmp_path / "b.txt", b"b")
    assert f"{path}:2 holds a NUL byte" in refusal(tmp_path)
    assert texts(written(tmp_path / "c.txt.gz", gzip.compress(b"packed"))) == ["packed"]
    assert "c.txt.gz ends before its compressed data does" in refusal(
        written(tmp_path / "c.txt.gz", gzip.compress(b"packed")[:-4])
    )

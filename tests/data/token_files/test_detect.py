"""Layouts are distinguished by content; what only looks like tokens is refused or left alone."""

import gzip
import os
import pickle
import struct

import numpy as np
import pytest

from narrowgauge.data import open_token_file, write_megatron, write_token_file, write_token_shards
from narrowgauge.data.token_files.detect import layout_of, open_file
from narrowgauge.errors import UserError

RNG = np.random.default_rng(0)
IDS = np.minimum(RNG.geometric(0.01, 5000) * 7, 50256)  # a few often, many seldom, as in a text


def write_llmq(path, ids, version=2, vocab_size=50257, mask=None):
    raw = b"BIN.TOK\n" + struct.pack("<3i", version, 4, len(ids))
    raw += struct.pack("<2i", vocab_size, mask is not None) if version == 2 else b""
    raw = raw.ljust(1023, b"*") + b"\n" + np.asarray(ids, "<i4").tobytes()
    path.write_bytes(raw + (b"" if mask is None else np.packbits(mask, bitorder="little").tobytes()))
    return path


def written(folder):
    """A file of each layout under a meaningless name, and the layout's name."""
    write_token_file(folder / "a", [IDS], 50257)
    write_token_file(folder / "b", [IDS], 128256)
    write_megatron(folder / "c", [IDS], 50257)
    write_llmq(folder / "d", IDS)
    write_llmq(folder / "e", IDS, version=1)
    write_llmq(folder / "f", IDS, mask=IDS % 3 > 0)
    (folder / "g").write_bytes(IDS.astype("<u2").tobytes())
    names = ["llm.c uint16", "llm.c uint32", "Megatron", "llmq", "llmq", "llmq", "bare uint16"]
    return dict(zip(["a", "b", "c.bin", "d", "e", "f", "g"], names, strict=True))


def test_content_tells_the_layout_and_every_layout_gives_the_ids(tmp_path):
    for name, layout in written(tmp_path).items():
        path = tmp_path / name
        assert layout_of(path) == layout
        opened = open_file(path, layout)
        assert np.array_equal(opened.tokens, IDS)
        assert opened.boundary_first == layout.startswith("llm.c")
        assert (opened.starts is not None) == (layout == "Megatron")
        with pytest.raises(ValueError, match="read-only"):
            opened.tokens[0] = 1
    assert open_file(tmp_path / "a", "llm.c uint16").vocabulary == (50257, 50256)
    assert open_file(tmp_path / "b", "llm.c uint32").vocabulary == (128256, 128000)
    learnt = open_file(tmp_path / "f", "llmq").target_mask
    assert learnt is not None
    assert learnt[:].tolist() == (IDS % 3 > 0).tolist()
    assert learnt[13:39].tolist() == (IDS % 3 > 0)[13:39].tolist()


@pytest.mark.parametrize("kind", range(11))
def test_what_is_no_token_file_is_left_alone(tmp_path, kind):
    content = [
        b"",
        b"abc",
        b"It is a truth universally acknowledged\n" * 500,
        "\u0412\u0441\u0451 \u0441\u043c\u0435\u0448\u0430\u043b\u043e\u0441\u044c.\n".encode() * 500,
        "L'\u00e9t\u00e9 \u00e0 la montagne\n".encode("latin-1") * 500,
        b"with a NUL \x00 in it, a stray one\n" * 500,
        gzip.compress(b"a" * 5000) + b"\0" * 10000,
        pickle.dumps({"vocab_size": 65, "itos": list(range(10000))}),
        b"\xff\xfe" + "UTF-16".encode("utf-16-le") * 1000,
        RNG.bytes(100_000),
        b"PAR1" + bytes(1000),
    ][kind]
    for padding in (b"", b"\n") if kind in (2, 3, 4, 5) else (b"",):
        (tmp_path / "x").write_bytes(content + padding)
        assert layout_of(tmp_path / "x") is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            struct.pack("<3i", 20240521, 1, 50) + bytes(1012) + bytes(100),
            "magic 20240521, version 1, 50 tokens",
        ),
        (struct.pack("<3i", 20240326, 3, 1024) + bytes(1012), "it is a GPT-2 model of llm.c's"),
        (struct.pack("<3i", 20240522, 1, 9) + bytes(1012), "it is an evaluation of llm.c's"),
    ],
)
def test_what_is_nearly_a_token_file_is_refused_for_what_it_is(tmp_path, content, words):
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(UserError, match=words):
        layout_of(tmp_path / "x.bin")


@pytest.mark.parametrize("dtype", ["<i4", "<u4", "<i8"])
@pytest.mark.parametrize("ids", [IDS, IDS + 60_000, np.where(IDS % 9, IDS, -100)], ids=["", "many", "marked"])
def test_wider_ids_without_a_header_are_refused(tmp_path, dtype, ids):
    """numpy's own dtype of ids is int64; read as uint16, every second token was 0."""
    if dtype == "<u4" and ids.min() < 0:
        pytest.skip("unsigned")
    ids.astype(dtype).tofile(tmp_path / "train.bin")
    with pytest.raises(UserError, match="every second value of it is close to 0, as in ids of 4 or 8 bytes"):
        layout_of(tmp_path / "train.bin")


@pytest.mark.parametrize("count", [2, 65, 500])
def test_few_or_small_ids_are_not_taken_for_wider_ones(tmp_path, count):
    """As nanoGPT's single characters are; 2: ids that are all next to 0."""
    RNG.integers(0, count, 4000).astype("<u2").tofile(tmp_path / "train.bin")
    assert layout_of(tmp_path / "train.bin") == "bare uint16"


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("a", lambda raw: raw[:-2], "promises 5000 tokens, so 11024 bytes, and it has 11022"),
        ("a", lambda raw: raw[:4] + b"\2" + raw[5:], "magic 20240520, version 2, 5000 tokens"),
        ("b", lambda raw: raw[:500], "it has 500 bytes, but the header alone has 1024"),
        ("d", lambda raw: raw[:-4], "promises 5000 tokens, so 21024 bytes, and it has 21020"),
        ("d", lambda raw: raw[:8] + b"\3" + raw[9:], "its version is 3, and 1 and 2 are known"),
        ("d", lambda raw: raw[:12] + b"\2" + raw[13:], "its tokens have 2 bytes, and 4 are known"),
        ("d", lambda raw: raw[:700], "it has 700 bytes, but the header alone has 1024"),
        ("d", lambda raw: raw[:24] + b"\7" + raw[25:], "its header is damaged"),
        ("f", lambda raw: raw[:-1], "so 21649 bytes, and it has 21648"),
    ],
)
def test_a_damaged_file_of_others_is_refused_with_the_numbers(tmp_path, name, damage, words):
    layout = written(tmp_path)[name]
    path = tmp_path / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=words) as caught:
        open_file(path, str(layout_of(path)))
    assert str(caught.value).startswith(f"{path} cannot be read as tokens: ")
    assert layout_of(path) == layout


def test_shards_are_llm_cs_and_end_to_end_they_are_the_tokens(tmp_path):
    """Read as llm.c's loader does: a header of 256 ints, then count tokens of two bytes, and nothing else."""
    chunks = [IDS[:10], IDS[10:10], IDS[10:3000], IDS[3000:]]
    paths = write_token_shards(tmp_path, "text_train", chunks, 50257, 1024)
    assert (
        [path.name for path in paths]
        == [f"text_train_{i:06}.bin" for i in range(5)]
        == sorted(os.listdir(tmp_path))
    )
    tokens = []
    for path in paths:
        with path.open("rb") as file:
            header = struct.unpack("<256i", file.read(1024))
            assert header[:2] == (20240520, 1)
            assert path.stat().st_size == 1024 + 2 * header[2]
            tokens.append(np.frombuffer(file.read(), "<u2"))
    assert [len(part) for part in tokens] == [1024, 1024, 1024, 1024, 904]
    assert np.array_equal(np.concatenate(tokens), IDS)
    (exact,) = write_token_shards(tmp_path, "exact", [IDS[:1024]], 50257, 1024)
    assert len(open_token_file(exact)) == 1024

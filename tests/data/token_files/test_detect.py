"""Layouts are distinguished by content; what only looks like tokens is refused or left alone."""

import gzip
import pickle
import struct

import numpy as np
import pytest

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data import open_data, write_megatron, write_token_file
from narrowgauge.trainer.data.token_files.layouts import open_tokens
from narrowgauge.trainer.data.token_files.tokens import TokenWriter

RNG = np.random.default_rng(0)
IDS = np.minimum(RNG.geometric(0.01, 5000) * 7, 50256)  # a few often, many seldom, as in a text


def written(folder):
    """A file of each layout under a meaningless name, and the layout's name."""
    write_token_file(folder / "a", [IDS], 50257)
    write_token_file(folder / "b", [IDS], 128256)
    write_megatron(folder / "c", [IDS], 50257)
    np.save(folder / "d.npy", IDS)
    (folder / "d.npy").rename(folder / "d")
    IDS.astype("<u2").tofile(folder / "e")
    names = ["llm.c uint16", "llm.c uint32", "Megatron", "numpy", "bare uint16"]
    return dict(zip(["a", "b", "c.bin", "d", "e"], names, strict=True))


def test_content_tells_the_layout_and_every_layout_gives_the_ids(tmp_path):
    for name, layout in written(tmp_path).items():
        path = tmp_path / name
        opened = open_tokens(path)
        assert opened.layout == layout
        assert np.array_equal(opened.tokens, IDS)
        assert bool(opened.boundary_first) == layout.startswith("llm.c")
        assert (opened.starts is not None) == (layout == "Megatron")
        with pytest.raises(ValueError, match="read-only"):
            opened.tokens[0] = 1
    assert open_tokens(tmp_path / "a").vocabulary == (50257, 50256)
    assert open_tokens(tmp_path / "b").vocabulary == (128256, 128000)


NO_TOKENS = [
    *(b"abc", b"It is a truth universally acknowledged\n" * 500, b"PAR1" + bytes(1000)),
    "\u0412\u0441\u0451 \u0441\u043c\u0435\u0448\u0430\u043b\u043e\u0441\u044c.\n".encode() * 500,
    "L'\u00e9t\u00e9 \u00e0 la montagne\n".encode("latin-1") * 500,
    b"with a NUL \x00 in it, a stray one\n" * 500,
    gzip.compress(b"a" * 5000) + b"\0" * 10000,
    pickle.dumps({"vocab_size": 65, "itos": list(range(10000))}),
    b"\xff\xfe" + "UTF-16".encode("utf-16-le") * 1000,
    RNG.bytes(100_000),
]


def test_what_is_no_token_file_is_left_alone(tmp_path):
    for content in NO_TOKENS:
        for padding in (b"", b"\n") if content.endswith(b"\n") else (b"",):
            (tmp_path / "x").write_bytes(content + padding)
            assert open_tokens(tmp_path / "x") is None, content[:40]


HEADER = b"\x93NUMPY\1\0v\0{'descr': '<u2', 'fortran_order': False, 'shape': (9,)}".ljust(127) + b"\n"
NEARLY = {
    "magic 20240521, version 1, 50 tokens": struct.pack("<3i", 20240521, 1, 50) + bytes(1112),
    "it is llm.c's gpt2 model": struct.pack("<3i", 20240326, 3, 1024) + bytes(1012),
    "it is llm.c's evaluation": struct.pack("<3i", 20240522, 1, 9) + bytes(1012),
    "it is llmq's": b"BIN.TOK\n" + struct.pack("<3i", 1, 4, 9) + bytes(1040),
    "numpy": HEADER,
}


def test_what_is_nearly_a_token_file_is_refused_for_what_it_is(tmp_path):
    for words, content in NEARLY.items():
        (tmp_path / "x.bin").write_bytes(content)
        with pytest.raises(UserError, match=words):
            open_tokens(tmp_path / "x.bin")


LETTERS = RNG.integers(0, 26, 60_000)
OF_IDS = {
    "text": IDS,
    "a large vocabulary": IDS + 60_000,
    "marked with -100": np.where(IDS % 9, IDS, -100),
    "letters": LETTERS,
    "bits": RNG.integers(0, 2, 60_000),
    "mostly zeros": IDS[RNG.integers(0, 5000, 60_000)] * (RNG.random(60_000) < 0.05),
    "letters with ends": np.where(np.arange(60_000) % 1024, LETTERS, 50256),
    "sixty": LETTERS[:60],
}
OTHER_DTYPES = ("<i4", "<u4", "<i8", ">i4", ">i8", "<f4", "<f8", ">u2", "u1")


@pytest.mark.parametrize("name", OF_IDS)
def test_ids_are_served_as_uint16_and_refused_as_any_other_dtype_whatever_their_size(tmp_path, name):
    """60,000 letters of int32, numpy's dtype, were read as 120,000 tokens of which every second was 0."""
    ids, path, refused = OF_IDS[name], tmp_path / "train.bin", 0
    np.where(ids < 0, 0, ids % 65536).astype("<u2").tofile(path)  # as nanoGPT's single characters
    assert open_tokens(path).layout == "bare uint16"
    for dtype in OTHER_DTYPES:
        info = np.iinfo(dtype) if np.dtype(dtype).kind != "f" else np.iinfo("<i4")
        too_few = np.dtype(dtype).itemsize < 4 and name == "sixty"
        if not too_few and info.min <= ids.min() <= ids.max() <= info.max:
            ids.astype(dtype).tofile(path)
            kind = np.dtype(dtype.replace("u4", "i4")).str.lstrip("<|")
            with pytest.raises(UserError, match=f"its bytes look like ids of numpy's {kind}, .* numpy.save"):
                open_tokens(path)
            refused += 1
    assert refused >= 5


def test_numpys_own_files_state_their_dtype(tmp_path):
    """build-nanogpt's shards, which `np.save` wrote."""
    path = tmp_path / "x.npy"
    for dtype in ("<u2", "<u4", "<i4", "<i8", ">u4", "u1"):
        np.save(path, LETTERS.astype(dtype))
        opened = open_tokens(path)
        assert opened.layout == "numpy"
        assert np.array_equal(opened.tokens, LETTERS)
    for array in (LETTERS.astype("f4"), LETTERS.reshape(-1, 2)):
        np.save(path, array)
        assert open_tokens(path) is None
        with pytest.raises(UserError, match=r"x\.npy' as text or as tokens: .* or one row of integers"):
            open_data(str(path))


def test_a_file_of_more_tokens_than_it_may_hold_is_refused(tmp_path):
    says = "b would hold more than 10 tokens, the limit for one file; split it"
    with pytest.raises(UserError, match=says), TokenWriter([tmp_path / "b"], 50257, 10) as writer:
        writer.write(IDS)

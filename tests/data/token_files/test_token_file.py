"""Token files: the layout to the bit, and no damaged file is ever read."""

import hashlib
import os
import struct

import numpy as np
import pytest

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data import open_token_file, write_token_file
from narrowgauge.trainer.data.token_files.tokens import TokenFile
from support.fault_table import case


def write(path, ids, vocab_size, chunk=3):
    array = np.array(ids, dtype=np.int64)
    return write_token_file(path, (array[i : i + chunk] for i in range(0, len(array), chunk)), vocab_size)


@pytest.mark.parametrize(
    ("vocab_size", "magic", "version", "letter"), [(65536, 20240520, 1, "H"), (65537, 20240801, 7, "I")]
)
def test_the_layout_is_llm_c_to_the_bit(tmp_path, vocab_size, magic, version, letter):
    path = tmp_path / "train.bin"
    ids = [0, 1, 255, 256, vocab_size - 1, 7, vocab_size - 1]
    written = write(path, ids, vocab_size)
    raw = path.read_bytes()
    assert raw == struct.pack("<3i", magic, version, 7) + bytes(4 * 253) + struct.pack(f"<7{letter}", *ids)
    assert written == TokenFile(name="train.bin", tokens=7, sha256=hashlib.sha256(raw).hexdigest())
    tokens = open_token_file(path, written, vocab_size)
    assert tokens.tolist() == ids
    assert tokens.dtype.itemsize == struct.calcsize(letter)


def test_nothing_appears_when_writing_fails(tmp_path):
    def chunks():
        yield np.arange(10)
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        write_token_file(tmp_path / "train.bin", chunks(), 257)
    with pytest.raises(AssertionError):
        write(tmp_path / "train.bin", [0, 257], 257)
    assert os.listdir(tmp_path) == []


def with_count(raw, count):
    return raw[:8] + struct.pack("<i", count) + raw[12:]


DAMAGE = [
    (lambda raw: raw[:-1], "promises 100 tokens, so 1224 bytes, and it has 1223"),
    (lambda raw: raw[:500], "it has 500 bytes, but the header alone has 1024"),
    (lambda raw: raw + b"\0\0", "and it has 1226"),
    (lambda raw: b"\1\2\3\4" + raw[4:], "does not begin like a token file"),
    (lambda raw: raw[:4] + struct.pack("<i", 2) + raw[8:], "version 2, 100 tokens"),
    (lambda raw: with_count(raw, -1), "-1 tokens"),
    (lambda raw: with_count(raw, 99)[:-2], "holds 99 tokens, but 100 were written"),
    (lambda raw: struct.pack("<2i", 20240801, 7) + raw[8:], "so 1424 bytes, and it has 1224"),  # of uint32
]


@case("F2", tier="quick")
def test_a_damaged_file_is_refused_at_opening_with_the_way_out(tmp_path):
    path = tmp_path / "train.bin"
    for damage, words in DAMAGE:
        written = write(path, range(100), 257)
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(UserError) as caught:
            open_token_file(path, written)
        for said in (f"{path} is damaged", words, f"delete the directory {tmp_path} and prepare it again"):
            assert said in str(caught.value)


def test_missing_empty_and_changed_files_are_refused(tmp_path):
    path = tmp_path / "train.bin"
    with pytest.raises(UserError, match="cannot be read"):
        open_token_file(path)
    write_token_file(path, [], 257)
    with pytest.raises(UserError, match="holds no tokens"):
        open_token_file(path)
    written = write(path, range(100), 257)
    raw = bytearray(path.read_bytes())
    raw[1024 + 2 * 40] ^= 1  # one bit: token 40 becomes 41
    path.write_bytes(raw)
    open_token_file(path)
    with pytest.raises(UserError, match="sha256 has changed since it was written"):
        open_token_file(path, written, 257)


@case("F3", tier="quick")
def test_an_id_beyond_the_vocabulary_is_refused_with_its_position(tmp_path):
    path = tmp_path / "train.bin"
    written = write(path, [5, 6, 299, 7, 257], 300)
    open_token_file(path, written, 300)
    with pytest.raises(UserError, match="token 2 has id 299, but the vocabulary ends at 256"):
        open_token_file(path, written, 257)
    ids = np.zeros((1 << 22) + 10, dtype=np.int64)
    ids[-3] = 299  # past the first chunk
    written = write_token_file(path, [ids], 300)
    with pytest.raises(UserError, match=f"token {(1 << 22) + 7} has id 299"):
        open_token_file(path, written, 257)

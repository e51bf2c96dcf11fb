"""Megatron's files: the layout to the bit; a wrong index is refused."""

import os
import struct
from itertools import chain

import numpy as np
import pytest

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data.token_files.layouts import open_megatron, write_megatron

CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
DOCUMENTS = [[5, 6, 7, 256], [256], [], [1, 2, 256], [9, 8, 7, 6, 5, 256]]


def arrays(documents):
    return [np.array(document, dtype=np.int64) for document in documents]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_499, np.uint16), (65_500, np.int32)])
def test_the_layout_is_megatrons_to_the_bit(tmp_path, vocab_size, dtype):
    data, index = write_megatron(tmp_path / "a_document", iter(arrays(DOCUMENTS)), vocab_size)
    assert sorted(os.listdir(tmp_path)) == [data.name, index.name] == ["a_document.bin", "a_document.idx"]
    lengths, size = [len(document) for document in DOCUMENTS], np.dtype(dtype).itemsize
    places, code = (size * np.cumsum([0, *lengths[:-1]])).tolist(), 8 if size == 2 else 4
    header = (b"MMIDIDX\0\0", 1, code, 5, 6)
    assert index.read_bytes() == struct.pack("<9sQBQQ5i5q6q", *header, *lengths, *places, *range(6))
    assert data.read_bytes() == np.array(list(chain(*DOCUMENTS)), dtype).tobytes()
    for path in (data, index):
        opened = open_megatron(path)
        assert opened.tokens.tolist() == list(chain(*DOCUMENTS))
        assert opened.starts.tolist() == [0, 4, 5, 5, 8]
    with pytest.raises(ValueError, match="read-only"):
        opened.tokens[0] = 1


def test_every_whole_dtype_and_documents_of_several_sequences_are_read(tmp_path):
    for code, dtype in CODES.items():
        ids = np.arange(100, 110, dtype=dtype)
        (tmp_path / "x.bin").write_bytes(ids.tobytes())
        index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, 3, 3)
        index += struct.pack("<3i3q3q", 3, 3, 4, 0, 3 * ids.itemsize, 6 * ids.itemsize, 0, 2, 3)
        (tmp_path / "x.idx").write_bytes(index)
        opened = open_megatron(tmp_path / "x.idx")
        assert opened.tokens.tolist() == list(range(100, 110))
        assert opened.starts.tolist() == [0, 6]


HEADER = struct.Struct("<9sQBQQ")


def with_header(raw, **changes):
    values = dict(zip(("magic", "version", "code", "s", "d"), HEADER.unpack(raw[:34]), strict=True))
    return HEADER.pack(*(values | changes).values()) + raw[34:]


def patched(raw, offset, form, *values):
    return raw[:offset] + struct.pack(form, *values) + raw[offset + struct.calcsize(form) :]


OFFSETS, BORDERS = 34 + 20, 34 + 60  # behind the header and five lengths; behind five pointers as well
NO_ENDS = "its sequences do not lie end to end"
NO_DOCUMENTS = "its documents do not go from sequence 0 to sequence 5"
DAMAGE = [
    (lambda raw: b"", "does not begin like Megatron's index"),
    (lambda raw: raw[:20], "does not begin like Megatron's index"),
    (lambda raw: raw[:-1], "promises 5 sequences and 6 document borders, so 142 bytes, but it has 141"),
    (lambda raw: raw + bytes(5), "it has a mode for each sequence"),
    (lambda raw: with_header(raw, magic=b"MMIDIDY\0\0"), "does not begin like Megatron's index"),
    (lambda raw: b"TNTIDX\0\0" + raw[8:], "Megatron's old layout"),
    (lambda raw: with_header(raw, version=2), "its version is 2"),
    (lambda raw: with_header(raw, code=6), "code 6 means that the ids are floating-point"),
    (lambda raw: with_header(raw, code=9), "its dtype code 9 means that the ids are of an unknown type"),
    (lambda raw: with_header(raw, s=2**62), "but it has 142"),
    (lambda raw: patched(raw, 34, "<i", -4), NO_ENDS),
    (lambda raw: patched(raw, OFFSETS, "<q", 2), NO_ENDS),
    (lambda raw: patched(raw, 34 + 16, "<i", 5), "it does not match x.bin: its sequences end at byte 26"),
    (lambda raw: patched(raw, BORDERS, "<q", 1), NO_DOCUMENTS),
    (lambda raw: patched(raw, BORDERS + 40, "<q", 4), NO_DOCUMENTS),
    (lambda raw: patched(raw, BORDERS + 8, "<2q", 3, 2), NO_DOCUMENTS),
]


def test_a_damaged_index_is_refused_by_name_with_the_reason(tmp_path):
    _, index = write_megatron(tmp_path / "x", arrays(DOCUMENTS), 257)
    whole = index.read_bytes()
    for damage, words in DAMAGE:
        index.write_bytes(damage(whole))
        with pytest.raises(UserError) as caught:
            open_megatron(index)
        assert f"{index} cannot be read as tokens: " in str(caught.value)
        assert words in str(caught.value)
        assert str(caught.value).endswith("; copy the file again, or create it again")


def test_a_bin_of_another_length_or_none_is_refused(tmp_path):
    data, index = write_megatron(tmp_path / "x", arrays(DOCUMENTS), 257)
    data.write_bytes(data.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"it does not match x\.bin: .* end at byte 28, and that has 26"):
        open_megatron(data)
    data.unlink()
    with pytest.raises(UserError, match=r"x\.bin cannot be read as tokens: it is not there"):
        open_megatron(index)
    write_megatron(tmp_path / "y", [], 257)
    with pytest.raises(UserError, match=r"y\.bin .* it holds no tokens"):
        open_megatron(tmp_path / "y.bin")

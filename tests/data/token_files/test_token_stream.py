"""Streams: files end to end, parts of them, and where their documents begin."""

from itertools import accumulate

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.trainer.data import TokenStream

END = 9


@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 42), min_size=4, max_size=4),
)
def test_files_end_to_end_are_the_tokens_whatever_range_is_read(sizes, cuts):
    whole = np.arange(sum(sizes))
    ends = list(accumulate(sizes))
    stream = TokenStream(tuple(whole[end - size : end] for size, end in zip(sizes, ends, strict=True)))
    assert len(stream) == len(whole)
    a, b = sorted(min(cut, len(whole)) for cut in cuts[:2])
    part = stream.substream(a, b)
    c, d = sorted(min(cut, b - a) for cut in cuts[2:])
    assert part[c:d].tolist() == whole[a:b][c:d].tolist()


def test_documents_begin_at_the_boundary_or_after_it():
    for first, row, positions in (
        (True, [1, 2, END, 3, 4, END, END, 5], [0, 1, 0, 1, 2, 0, 0, 1]),
        (True, [END, 1, 2], [0, 1, 2]),
        (False, [1, 2, END, 3, 4, END, END, 5], [0, 1, 2, 0, 1, 2, 0, 0]),
        (False, [1, 2, END], [0, 1, 2]),
        (False, [END, 1], [0, 0]),
    ):
        stream = TokenStream((np.array([7, *row]),), boundaries=(END, 11), boundary_first=first)
        assert stream.positions(1, np.array(row)).tolist() == positions
        assert stream.substream(1, len(stream)).positions(0, np.array(row)).tolist() == positions


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    at_once=st.integers(1, 20),
    kind=st.sampled_from(["before", "behind", "index", "index and ids"]),
)
def test_documents_come_one_by_one_without_the_ids_between_them(lengths, at_once, kind):
    numbers = iter(range(100, 200))
    texts = [[next(numbers) for _ in range(length)] for length in lengths]
    ids = {
        "before": [[END, *text] for text in texts],
        "behind": [[*text, END] for text in texts],
        "index": [text for text in texts if text],
        "index and ids": [[*text, END] for text in texts],
    }[kind]
    tokens = np.array([i for document in ids for i in document], dtype=np.int64)
    starts = np.cumsum([0, *map(len, ids)])[:-1] if "index" in kind else None
    stream = TokenStream((tokens[:7], tokens[7:]), (END,), kind == "before", starts)
    expected = [text for text in texts if text] if kind == "index" else texts
    assert [document.tolist() for document in stream.documents(at_once)] == expected

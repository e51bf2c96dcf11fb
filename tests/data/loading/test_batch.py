"""Batches: the right tokens in the right order, the same for every way of asking."""

import numpy as np
import pytest
import torch

from narrowgauge.data import (
    Mixture,
    TokenStream,
    count_windows,
    mixed_samples,
    open_token_file,
    samples,
    shares_of,
    training_batch,
    validation_batches,
    write_token_file,
)
from narrowgauge.errors import UserError


def test_a_training_batch_is_the_windows_of_its_samples_and_their_next_tokens(tokens):
    x_BT, y_BT = training_batch(tokens, seed=5, first_sample=7, count=6, sequence_length=10)
    assert x_BT.dtype == y_BT.dtype == torch.int64
    starts = 10 * samples(5, 7, 6, 10)
    assert x_BT.tolist() == [list(range(start, start + 10)) for start in starts]
    assert torch.equal(y_BT, x_BT + 1)
    assert x_BT.is_contiguous()
    assert y_BT.is_contiguous()


def test_an_epoch_meets_every_token_once_and_every_target_once(tokens):
    x_BT, y_BT = training_batch(tokens, seed=0, first_sample=0, count=10, sequence_length=10)
    assert sorted(x_BT.flatten().tolist()) == list(range(100))
    assert sorted(y_BT.flatten().tolist()) == list(range(1, 101))


@pytest.mark.parametrize("sequence_length", [1, 3, 7, 33, 99, 100])
def test_the_last_window_is_used_only_when_its_last_target_is_there(tokens, sequence_length):
    windows = count_windows(tokens, sequence_length)
    assert windows == 100 // sequence_length
    _, y_BT = training_batch(tokens, 0, 0, windows, sequence_length)
    assert y_BT.max() == windows * sequence_length


def test_ranks_and_micro_batches_take_slices_of_one_step(tokens):
    whole_BT, _ = training_batch(tokens, 3, 16, 8, 10)
    for world, micro in [(2, 4), (4, 2), (4, 1), (8, 1)]:
        share = 8 // world
        parts = [
            training_batch(tokens, 3, 16 + rank * share + i, micro, 10).x_BT
            for rank in range(world)
            for i in range(0, share, micro)
        ]
        assert torch.equal(torch.cat(parts), whole_BT)


def test_validation_is_the_same_every_time_and_lies_evenly(tokens):
    first, again = list(validation_batches(tokens, 2, 10, 2)), list(validation_batches(tokens, 2, 10, 2))
    assert [x_BT[:, 0].tolist() for x_BT, _ in first] == [[0, 20], [50, 70]]
    for (x_BT, y_BT), (x2_BT, y2_BT) in zip(first, again, strict=True):
        assert torch.equal(x_BT, x2_BT)
        assert torch.equal(y_BT, y2_BT)
        assert torch.equal(y_BT, x_BT + 1)


@pytest.mark.parametrize(
    ("limit", "sizes"), [(None, [4, 4, 2]), (1, [4]), (2, [4, 4]), (3, [4, 4, 2]), (99, [4, 4, 2])]
)
def test_validation_takes_no_window_twice_and_no_more_than_its_limit(tokens, limit, sizes):
    batches = list(validation_batches(tokens, 4, 10, limit))
    assert [len(x_BT) for x_BT, _ in batches] == sizes
    starts = torch.cat([x_BT[:, 0] for x_BT, _ in batches]).tolist()
    assert starts == sorted(set(starts))


def test_no_validation_batches_are_none(tokens):
    assert list(validation_batches(tokens, 4, 10, 0)) == []


def test_a_corpus_shorter_than_a_sequence_is_refused_with_the_numbers(tokens):
    words = (
        "the training part of the data holds 101 tokens, and a sequence of 101 needs 102; "
        "provide more text or set data.sequence_length to 100 or less"
    )
    with pytest.raises(UserError, match=words):
        training_batch(tokens, 0, 0, 1, 101)
    with pytest.raises(UserError, match="the held-out part of the data holds 101 tokens"):
        validation_batches(tokens, 1, 101, 1)  # at once, not when it is iterated


def test_uint32_ids_arrive_whole(tmp_path):
    write_token_file(tmp_path / "x.bin", [np.array([0, 70_000, 128_255, 65_536])], 128_256)
    x_BT, y_BT = training_batch(open_token_file(tmp_path / "x.bin"), 0, 0, 1, 3)
    assert (x_BT.tolist(), y_BT.tolist()) == ([[0, 70_000, 128_255]], [[70_000, 128_255, 65_536]])


END = 9


def documents(*texts, end_first):
    """A stream of the documents, each with END before or behind it."""
    ids = [[END, *text] if end_first else [*text, END] for text in texts]
    return TokenStream((np.concatenate(ids),), (END,), end_first)


def test_batch_of_separate_documents_has_positions_and_skips_targets_at_document_starts():
    first = documents([1, 2, 3], [4, 5], end_first=True)
    batch = training_batch(first, 0, 0, 1, 6, separate_documents=True)
    assert batch.x_BT.tolist() == [[9, 1, 2, 3, 9, 4]]
    assert batch.position_BT is not None
    assert batch.position_BT.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert batch.y_BT.tolist() == [[1, 2, 3, 9, 4, 5]]  # the end of a document is for it to know
    assert (batch.targets, batch.ignores) == (6, False)
    behind = documents([1, 2, 3], [4, 5, 6], end_first=False)
    batch = training_batch(behind, 0, 0, 1, 7, separate_documents=True)
    assert batch.x_BT.tolist() == [[1, 2, 3, 9, 4, 5, 6]]
    assert batch.position_BT is not None
    assert batch.position_BT.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert batch.y_BT.tolist() == [[2, 3, 9, -100, 5, 6, 9]]
    assert (batch.targets, batch.ignores) == (6, True)
    together = training_batch(behind, 0, 0, 1, 7)
    assert together.position_BT is None
    assert (together.y_BT.tolist(), together.targets) == ([[2, 3, 9, 4, 5, 6, 9]], 7)


def test_a_mixture_draws_each_sample_from_its_stream(tokens):
    other = TokenStream((np.arange(1000, 1500),))
    mixture = Mixture((TokenStream((tokens,)), other), shares_of([0.25, 0.75]))
    x_BT, y_BT = training_batch(mixture, 2, 50, 400, 10)
    stream_N, window_N = mixed_samples(2, 50, 400, [10, 49], mixture.shares)
    assert x_BT[:, 0].tolist() == (window_N * 10 + 1000 * stream_N).tolist()
    assert torch.equal(y_BT, x_BT + 1)
    assert 0.68 < (x_BT[:, 0] >= 1000).float().mean() < 0.82
    assert count_windows(mixture, 10) == 59
    held_out = torch.cat([batch.x_BT[:, 0] for batch in validation_batches(mixture, 4, 10)])
    assert held_out.tolist() == [*range(0, 100, 10), *range(1000, 1490, 10)]
    with pytest.raises(UserError, match="the training part of the data holds 101 tokens"):
        training_batch(mixture, 0, 0, 1, 200)

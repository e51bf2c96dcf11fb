"""Batches: the right tokens in the right order for every way of asking; a loader loses no thread or error."""

import threading

import numpy as np
import pytest
import torch

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data import (
    Loader,
    Mixture,
    TokenStream,
    count_windows,
    first_samples,
    mixed_samples,
    samples,
    shares_of,
    training_batch,
    validation_batches,
)

END = 9


def test_a_training_batch_is_the_windows_of_its_samples_and_their_next_tokens(tokens):
    whole_BT, y_BT = training_batch(tokens, 3, 16, 8, 10)
    assert whole_BT.dtype == y_BT.dtype == torch.int64
    assert whole_BT.tolist() == [list(range(start, start + 10)) for start in 10 * samples(3, 16, 8, 10)]
    assert torch.equal(y_BT, whole_BT + 1)
    for world, micro in [(2, 4), (4, 1)]:  # ranks and micro-batches take slices of the step
        share = 8 // world
        firsts = [16 + rank * share + i for rank in range(world) for i in range(0, share, micro)]
        parts = [training_batch(tokens, 3, first, micro, 10).x_BT for first in firsts]
        assert torch.equal(torch.cat(parts), whole_BT)


@pytest.mark.parametrize("sequence_length", [1, 33, 100])
def test_an_epoch_meets_every_target_once_up_to_the_last_whole_window(tokens, sequence_length):
    windows = count_windows(tokens, sequence_length)
    assert windows == 100 // sequence_length
    x_BT, y_BT = training_batch(tokens, 0, 0, windows, sequence_length)
    assert sorted(x_BT.flatten().tolist()) == list(range(windows * sequence_length))
    assert torch.equal(y_BT, x_BT + 1)


def test_validation_lies_evenly_and_takes_no_window_twice(tokens):
    batches = list(validation_batches(tokens, 2, 10, 4))
    assert [x_BT[:, 0].tolist() for x_BT, _ in batches] == [[0, 20], [50, 70]]
    assert all(torch.equal(y_BT, x_BT + 1) for x_BT, y_BT in batches)
    for most, sizes in ((None, [4, 4, 2]), (0, []), (4, [4]), (6, [4, 2]), (99, [4, 4, 2])):
        batches = list(validation_batches(tokens, 4, 10, most))
        assert [len(x_BT) for x_BT, _ in batches] == sizes
        starts = [start for x_BT, _ in batches for start in x_BT[:, 0].tolist()]
        assert starts == sorted(set(starts))


def test_a_corpus_shorter_than_a_sequence_is_refused_with_the_numbers(tokens):
    words = "the {} part of the data holds 101 tokens, and a sequence of 101 needs 102; provide more text or"
    with pytest.raises(UserError, match=words.format("training") + " set data.sequence_length to 100"):
        training_batch(tokens, 0, 0, 1, 101)
    with pytest.raises(UserError, match=words.format("held-out")):
        validation_batches(tokens, 1, 101, 1)  # at once, not when it is iterated


@pytest.mark.parametrize(
    ("end_first", "ids", "positions", "targets", "count"),
    [
        # The end of a document is for it to know; the start of the next is not.
        (True, [9, 1, 2, 3, 9, 4], [0, 1, 2, 3, 0, 1], [1, 2, 3, 9, 4, 5], 6),
        (False, [1, 2, 3, 9, 4, 5, 6], [0, 1, 2, 3, 0, 1, 2], [2, 3, 9, -100, 5, 6, 9], 6),
    ],
)
def test_batch_of_separate_documents_has_positions_and_skips_targets_at_document_starts(
    end_first, ids, positions, targets, count
):
    row = np.array([9, 1, 2, 3, 9, 4, 5] if end_first else [1, 2, 3, 9, 4, 5, 6, 9])
    stream = Mixture((TokenStream((row,), (END,), end_first),))
    batch = training_batch(stream, 0, 0, 1, len(ids), separate_documents=True)
    assert batch.x_BT.tolist() == [ids]
    assert batch.position_BT.tolist() == [positions]
    assert batch.y_BT.tolist() == [targets]
    assert (batch.targets, batch.ignores) == (count, not end_first)
    together = training_batch(stream, 0, 0, 1, len(ids))
    assert together.position_BT is None
    assert (together.y_BT.tolist(), together.targets) == ([row[1:].tolist()], len(ids))


def test_a_mixture_draws_each_sample_from_its_stream(tokens):
    other = TokenStream((np.arange(1000, 1500),))
    mixture = Mixture((*tokens.streams, other), shares_of([0.25, 0.75]))
    x_BT, y_BT = training_batch(mixture, 2, 50, 400, 10)
    stream_N, window_N = mixed_samples(2, 50, 400, [10, 49], mixture.shares)
    assert x_BT[:, 0].tolist() == (window_N * 10 + 1000 * stream_N).tolist()
    assert torch.equal(y_BT, x_BT + 1)
    assert 0.68 < (x_BT[:, 0] >= 1000).float().mean() < 0.82
    assert count_windows(mixture, 10) == 59
    held_out = torch.cat([batch.x_BT[:, 0] for batch in validation_batches(mixture, 4, 10)])
    assert held_out.tolist() == [*range(0, 100, 10), *range(1000, 1490, 10)]


def its_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("narrowgauge-loader")]


@pytest.mark.parametrize("ahead", [1, 3, 16])
def test_the_loader_gives_the_same_batches_and_leaves_no_thread_behind(tokens, ahead):
    with Loader(tokens, 5, first_samples(3, 8, 4), 4, 10, prefetch=ahead) as loader:
        for n in range(24, 24 + 4 * 30, 4):
            for found, expected in zip(next(loader), training_batch(tokens, 5, n, 4, 10), strict=True):
                assert torch.equal(found, expected)
        assert its_threads()
    assert not its_threads()


def test_a_loader_ends_with_its_samples_and_tells_what_went_wrong(tokens):
    with Loader(tokens, 0, iter([0, 4]), 4, 10, prefetch=5) as loader:
        assert len(list(loader)) == 2
    with Loader(tokens, 0, iter([0]), 4, 500) as loader, pytest.raises(UserError, match="holds 101 tokens"):
        next(loader)
    with Loader(tokens, 0, iter([0, 2**70]), 1, 10) as loader:
        next(loader)
        with pytest.raises(OverflowError) as raised:
            next(loader)
    (note,) = raised.value.__notes__
    assert note == f"in the loader's thread narrowgauge-loader_0, making the batch of sample {2**70}"

"""The loader: the same batches in the background, and no thread or error that is lost."""

import threading

import pytest
import torch

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data import Loader, first_samples, training_batch


def its_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("narrowgauge-loader")]


@pytest.mark.parametrize(("workers", "ahead"), [(1, 1), (4, 3), (4, 16)])
def test_the_loader_gives_the_same_batches_and_leaves_no_thread_behind(tokens, workers, ahead):
    with Loader(tokens, 5, first_samples(3, 8, 4), 4, 10, prefetch=ahead, workers=workers) as loader:
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

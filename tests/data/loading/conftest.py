"""Tokens that tell where they were taken."""

import numpy as np
import pytest

from narrowgauge.trainer.data import open_token_file, write_token_file


@pytest.fixture
def tokens(tmp_path):
    """101 tokens, token i is i: the ids of a batch show where it was taken."""
    write_token_file(tmp_path / "train.bin", [np.arange(101)], 257)
    return open_token_file(tmp_path / "train.bin")

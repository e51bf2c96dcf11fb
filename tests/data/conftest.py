"""A separate cache for every test, and a small corpus."""

import numpy as np
import pytest

from narrowgauge.trainer.data import Mixture, TokenStream, open_token_file, write_token_file

WORDS = ["narrow", "gauge", "rail", "train", "coal", "steam", "<|endoftext|>", "valley", "café", "signal"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


@pytest.fixture
def source(tmp_path):
    """Forty documents of made-up prose."""
    rng = np.random.default_rng(0)
    (tmp_path / "text").mkdir()
    for i in range(40):
        prose = " ".join(WORDS[w] for w in rng.integers(0, len(WORDS), 200 + 30 * i))
        (tmp_path / "text" / f"{i:02}.txt").write_text(prose + "\n", encoding="utf-8")
    return str(tmp_path / "text")


@pytest.fixture
def tokens(tmp_path):
    """101 tokens, token i is i: the ids of a batch show where it was taken."""
    write_token_file(tmp_path / "train.bin", [np.arange(101)], 257)
    return Mixture((TokenStream((open_token_file(tmp_path / "train.bin"),)),))

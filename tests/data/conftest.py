"""A separate cache for every test, and a small corpus."""

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


@pytest.fixture
def source(tmp_path):
    """Forty documents of made-up prose."""
    words = [
        "narrow",
        "gauge",
        "rail",
        "train",
        "coal",
        "steam",
        "<|endoftext|>",
        "valley",
        "caf\u00e9",
        "signal",
    ]
    rng = np.random.default_rng(0)
    (tmp_path / "text").mkdir()
    for i in range(40):
        prose = " ".join(words[w] for w in rng.integers(0, len(words), 200 + 30 * i))
        (tmp_path / "text" / f"{i:02}.txt").write_text(prose + "\n", encoding="utf-8")
    return str(tmp_path / "text")

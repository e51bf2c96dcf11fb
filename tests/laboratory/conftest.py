"""Models and text of a size that trains in a second, and registries that a test may change."""

from pathlib import Path

import pytest

from narrowgauge.formats import table
from narrowgauge.quantization import named_casts

DOCS = Path(__file__).parents[2] / "docs"
TINY = {
    "model": {"dim": 32, "layers": 2, "heads": 2, "kv_heads": 2, "ffn_dim": 64, "vocab_size": 320},
    "data": {"source": str(DOCS / "definitions.md"), "tokenizer": "bytes", "sequence_length": 32},
    "training": {"steps": 4, "batch_size": 4, "micro_batch_size": 4, "device": "cpu", "threads": 1},
    "validation": {"batches": 1},
}


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    """Formats and casts that a test registers belong to that test alone."""
    monkeypatch.setattr(table, "_FORMATS", dict(table._FORMATS))
    monkeypatch.setattr(named_casts, "_FUNCTIONS", {})


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A text that is long enough for training and validation."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md"))[:6]))
    return path


@pytest.fixture
def tiny(source):
    """Sections of a configuration that trains four steps in about a second."""
    return TINY | {"data": {**TINY["data"], "source": str(source)}}


@pytest.fixture(scope="session")
def run(source, tmp_path_factory):
    """A run that probes, sensitivities and searches take."""
    import narrowgauge as ng

    sections = TINY | {"data": {**TINY["data"], "source": str(source)}}
    return ng.train("bf16", tmp_path_factory.mktemp("runs") / "tiny", quiet=True, **sections).path

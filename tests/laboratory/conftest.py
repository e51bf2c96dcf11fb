"""Models and text of a size that trains in a second, and registries that a test may change."""

from pathlib import Path

import pytest

import narrowgauge as ng
from narrowgauge.formats import table
from narrowgauge.quantization import named_casts

DOCS = Path(__file__).parents[2] / "docs"


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


@pytest.fixture(scope="session")
def tiny(tiny):
    """Sections of a configuration that trains four steps in about a second."""
    sizes = {"steps": 4, "batch_size": 4, "micro_batch_size": 4, "threads": 1}
    sections = tiny({f"training.{key}": value for key, value in sizes.items()})
    return {name: table for name, table in sections.items() if name != "recipe"}


@pytest.fixture(scope="session")
def run(tiny, tmp_path_factory):
    """A run that probes, sensitivities and searches take."""
    return ng.train("bf16", tmp_path_factory.mktemp("runs") / "tiny", quiet=True, **tiny).path

"""The start page of the documentation is the README: a hook of mkdocs (`hooks` in mkdocs.yml)."""

from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"
LAST = "## Contribute\n"  # what follows links to files outside docs/


def text() -> str:
    """The README up to `LAST`, with links relative to docs/."""
    kept, found, _ = README.read_text(encoding="utf-8").partition(LAST)
    if not found:
        raise ValueError(f"the README has no section {LAST!r}")
    return kept.rstrip().replace("](docs/", "](") + "\n"


def on_files(files: Any, config: Any) -> Any:
    """Add the page to the site."""
    from mkdocs.structure.files import File  # tests read `text` without mkdocs

    files.append(File.generated(config, "index.md", content=text()))
    return files

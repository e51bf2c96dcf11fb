"""The start page of the documentation, made from the README.

`python -m support.index_page`, in tests/, writes it.
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "index.md"
LAST = "## Alternatives\n"  # what follows compares libraries, and links to files outside docs/


def text() -> str:
    """The README up to `LAST`, with links relative to docs/."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    kept, found, _ = readme.partition(LAST)
    assert found, f"the README has no section {LAST!r}"
    return kept.rstrip().replace("](docs/", "](") + "\n"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
    print(PAGE)

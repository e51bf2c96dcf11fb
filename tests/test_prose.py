"""The README, the pages and the docstrings avoid the patterns of `support.prose`; part of `make check`."""

from pathlib import Path

import pytest

from support.prose import PATTERNS, comments, docstrings, findings, of_page, sentences

ROOT = Path(__file__).parents[1]
#: Kept as it was written, or written by a tool.
EXEMPT = {"docs/lab-log-archive.md", "docs/faults.md"}
PAGES = sorted(
    {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")} - EXEMPT
    | {"README.md", "CONTRIBUTING.md"}
)
#: Rooms and root modules of src, without any finding in docstrings, comments and messages.
CLEAN_ROOMS = (
    *sorted(path.stem for path in (ROOT / "src/narrowgauge").glob("*.py")),
    *sorted(path.name for path in (ROOT / "src/narrowgauge").iterdir() if (path / "__init__.py").exists()),
)
EXAMPLES = (
    "The moments are narrow, too.",
    "A micro-batch is no step.",
    "A run that nobody disturbed.",
    "Layers are told the step.",
    "As the recipe says.",
    "After so many steps.",
    "Whose memory it is says the caller.",
    "That which is narrow.",
    "To mend a link.",
    "The plug converts the model.",
    "A recipe of your own.",
    "A master beside the weight.",
    "FP8 products.",
    "Trains in narrow numbers.",
    "In no need of a network.",
    "Not compared, for want of a seed.",
    "Create it anew.",
    "The run goes on.",
    "Nothing but zeros.",
    "Processes that hold a tensor together.",
    "Whom to time.",
    "Only the own step.",
    "The values are those of the format.",
    "Inside of a block.",
    "The same goes for the head.",
    "Ignored without a word.",
)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_free_of_the_patterns(page):
    found = findings(of_page((ROOT / page).read_text(encoding="utf-8")))
    lines = [f'{page}:{line}: "{words}": write {PATTERNS[pattern]}' for line, words, pattern in found]
    assert not lines, "\n".join(lines)


@pytest.mark.tier("thorough")  # `make check` runs it
@pytest.mark.parametrize("room", CLEAN_ROOMS)
def test_a_clean_room_is_free_of_the_patterns(room):
    path = ROOT / "src/narrowgauge" / room
    found = [
        f'{file.relative_to(ROOT)}: "{words}": write {PATTERNS[pattern]}'
        for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")])
        for text in (docstrings(file), comments(file), sentences(file))
        for _, words, pattern in findings(text)
    ]
    assert not found, "\n".join(found)


#: Folders of tests and test modules.
TESTS = sorted({path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("*.py")})


@pytest.mark.tier("thorough")  # `make check` runs it
@pytest.mark.parametrize("part", TESTS)
def test_docstrings_and_comments_of_tests_are_free_of_the_patterns(part):
    path = ROOT / "tests" / part
    found = [
        f'{file.relative_to(ROOT)}: "{words}": write {PATTERNS[pattern]}'
        for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])
        for text in (docstrings(file), comments(file))
        for _, words, pattern in findings(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("pattern", "example"), list(zip(PATTERNS, EXAMPLES, strict=True)))
def test_a_pattern_finds_its_example(pattern, example):
    assert pattern in {found for _, _, found in findings(example)}


def test_code_is_not_prose():
    page = "Run `narrowgauge said`:\n\n```text\nis no key, too\n```\n\n    [a](beside.md) is told\n"
    assert [(line, words) for line, words, _ in findings(of_page(page))] == [(7, "told")]

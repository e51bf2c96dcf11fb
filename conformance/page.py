"""docs/conformance.md from matrix.csv and causes.csv: `python conformance/page.py`."""

import csv
from fnmatch import fnmatchcase
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "conformance.md"
MARKS = {"fault": "F", "rule": "r", "range": "t", "open": "o", "refusal": "x"}
KINDS = {
    "fault": "against a specification, or against what the library itself promises",
    "rule": "another rule, or another order of float32 operations, that loses no more",
    "range": "magnitudes beyond what float32 can scale; no specification covers them",
    "open": "the specification leaves it open: NaN and infinity in a block",
    "refusal": "the library refuses it with an exception",
}
TABLES = {  # heading -> the formats of its rows
    "Single values": "* element*",
    "FP8 under float32 scales": "fp8 *",
    "MX": "mx*",
    "NVFP4": "nvfp4*",
}
HEAD = """# Libraries, case by case

Each library quantizes the same small tensors, each made for one property of a format, and is
compared with an exact oracle in rational arithmetic. `conformance/matrix.csv` holds the rows,
this page is made from it, and [found in others](found-in-others.md) describes the faults.

```sh
python conformance/matrix.py --environments ../environments --install
python conformance/page.py
```

Seven draw stochastic rounding on a CPU: auto-round, brevitas, fouroversix, gfloat, microxcaling,
Quartet II and narrowgauge. qwix accepts its noise and ignores it for floats. torchao draws bf16 and
int8, and NVFP4 in a GPU kernel; TransformerEngine draws in GPU kernels. The others do not.

A library that is not installed keeps its stored rows. Environment variables locate the checkouts of
libraries without a package (see the docstrings in `conformance/adapters/`).

Below, a row starts with the mark of most of its cases and lists the cases with another mark. Rows of
narrowgauge are left out: every mark is `=`.

| mark | meaning |
|---|---|
| `=` | codes and scales equal, bit for bit; for a stored tensor: its values |
| `v` | values equal up to the last bits of float32; a code or scale differs, or the library returns none |
"""
Row = dict[str, str]


def read(name: str) -> list[Row]:
    """The rows of a table of this folder."""
    with (HERE / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def cause_of(row: Row, causes: list[Row]) -> Row | None:
    """The first cause that fits a row."""
    for cause in causes:
        fits = cause["library"] == row["library"] and fnmatchcase(row["format"], cause["formats"])
        if fits and any(fnmatchcase(row["case"], c) for c in cause["cases"].split(";")):
            return cause
    return None


def page() -> str:
    """The text of the page."""
    rows, causes = read("matrix.csv"), read("causes.csv")
    parts = [HEAD + "".join(f"| `{MARKS[k]}` | {text} |\n" for k, text in KINDS.items())]
    versions = dict(sorted({r["library"]: (r["version"], r["date"]) for r in rows}.items()))
    counts = {
        name: [sum(_mark(r, causes) == m for r in rows if r["library"] == name) for m in "=vFrtox"]
        for name in versions
    }
    parts.append(
        "## Libraries\n\n| library | version | date | " + " | ".join(f"`{m}`" for m in "=vFrtox") + " |"
    )
    parts[-1] += "\n|" + "---|" * 10
    for name, (version, date) in versions.items():
        parts[-1] += f"\n| {name} | {version} | {date} | " + " | ".join(map(str, counts[name])) + " |"
    rows = [r for r in rows if r["library"] != "narrowgauge"]
    for heading, pattern in TABLES.items():
        parts.append(_table(heading, [r for r in rows if fnmatchcase(r["format"], pattern)], causes))
    lines = ["## Causes\n\n| library | formats | cases | mark | cause |\n|---|---|---|---|---|"]
    for c in causes:
        cases, mark = c["cases"].replace(";", "; ").replace("*", "\\*"), MARKS[c["kind"]]
        formats = c["formats"].replace("*", "\\*")
        lines.append(
            f"| {c['library']} | {formats} | {cases} | `{mark}` | {c['cause']} |".replace("_", "\\_")
        )
    return "\n\n".join([*(p.rstrip("\n") for p in parts), "\n".join(lines)]) + "\n"


def _mark(row: Row, causes: list[Row]) -> str:
    if row["verdict"] in ("equal", "values"):
        return {"equal": "=", "values": "v"}[row["verdict"]]
    cause = cause_of(row, causes)
    return MARKS[cause["kind"]] if cause else "?"


def _table(heading: str, rows: list[Row], causes: list[Row]) -> str:
    """One row for the formats of a library that give the same marks in the same cases."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for r in rows:
        marks = found.setdefault((r["library"], r["format"]), {mark: [] for mark in "=vFrtox"})
        marks[_mark(r, causes)].append(r["case"])
    alike: dict[tuple[str, int, str], list[str]] = {}
    for (library, name), marks in found.items():
        key = library, sum(map(len, marks.values())), _summary(marks)
        alike.setdefault(key, []).append(name)
    out = [f"## {heading}\n", "| library | formats | cases | marks |", "|---|---|---:|---|"]
    for (library, cases, marks), names in alike.items():
        out.append(f"| {library} | {', '.join(names)} | {cases} | {marks} |")
    return "\n".join(out).replace("_", "\\_")


def _summary(marks: dict[str, list[str]]) -> str:
    """The mark that most cases have, and the cases of each other mark."""
    most = max(marks, key=lambda mark: len(marks[mark]))
    others = [f"; `{mark}` {', '.join(cases)}" for mark, cases in marks.items() if cases and mark != most]
    return f"`{most}`" + "".join(others).replace("decode, scale", "decode of scale")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

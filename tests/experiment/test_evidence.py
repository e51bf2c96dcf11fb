"""The page of the project: made from its numbers, twice the same bytes, and the rest of it is not touched."""

import runpy
import shutil
from pathlib import Path

from narrowgauge.report.verdict.rungs import Row, rows_text

ROOT = Path(__file__).parents[2]


def test_the_page_is_made_from_the_rows_alone(tmp_path):
    for folder in ("experiments", "docs/evidence", "docs/images"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("evidence.py", "predictions.md"):
        shutil.copy(ROOT / "experiments" / name, tmp_path / "experiments")
    page = tmp_path / "docs" / "evidence.md"
    shutil.copy(ROOT / "docs" / "evidence.md", page)
    rows = [
        Row(arm, seed, rung, 1_638_400 * 2 ** (rung - 1), loss, loss, "done")
        for arm, more in (("bf16", 0.0), ("mxfp4", 0.04), ("nvfp4", 0.02))
        for seed in (1, 2, 3)
        for rung in (1, 2, 3)
        for loss in [4.5 - 0.3 * rung + 0.01 * seed + more * (1 + 0.01 * seed)]
    ]
    (tmp_path / "docs" / "evidence" / "runs.csv").write_text(rows_text(rows))
    before = page.read_text(encoding="utf-8")
    made = []
    for _ in range(2):
        runpy.run_path(str(tmp_path / "experiments" / "evidence.py"), run_name="__main__")
        made.append((page.read_bytes(), (tmp_path / "docs" / "images" / "evidence.svg").read_bytes()))
    assert made[0] == made[1]
    after = page.read_text(encoding="utf-8")
    assert after.split("begin -->")[0] == before.split("begin -->")[0]
    assert after.endswith(before.split("end -->")[1])
    assert "Positive control, mxfp4 to nvfp4: +0.5" in after
    assert "resolved." in after
    assert "| nvfp4 | 6.55 M | 3 | +0.5" in after

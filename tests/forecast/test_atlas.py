"""The atlas: what it holds, and its errors."""

import csv
from pathlib import Path

import pytest

from atlas import ladder_rows
from narrowgauge.forecast import COLUMNS, described, read_atlas
from narrowgauge.system.errors import UserError

ROOT = Path(__file__).parents[2]
GOOD = {
    "source": "a paper",
    "locator": "table 1",
    "date": "2026-02-20",
    "params": "1e8",
    "tokens": "2e9",
    "recipe": "nvfp4",
    "gap_percent": "1.5",
    "loss": "",
    "reference_loss": "",
    "seeds": "1",
    "family": "mine",
    "tail_share": "0.15",
}


def written(folder: Path, *rows: dict[str, str], columns=COLUMNS) -> Path:
    path = folder / "mine.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_the_atlas_has_its_points_each_with_a_source_and_a_place_in_it():
    atlas = read_atlas()
    assert len(atlas) >= 800
    assert all(point.source and point.locator and point.more["read"] for point in atlas.points)
    places = [(p.source, p.locator, p.recipe, p.more["note"]) for p in atlas.points]
    assert len(set(places)) == len(places)
    assert {"quartet2", "quartet", "ladder"} <= set(atlas.column("family"))


def test_gaps_are_those_of_the_losses_and_schemes_cost_what_a_paper_shows():
    """Full schemes at 30 million parameters and 400 tokens each, in the order of quartet 2's figure 5."""
    for point in read_atlas().points:
        if point.gap_nats is not None and point.reference_loss is not None:
            assert point.gap_percent == pytest.approx(100 * point.gap_nats / point.reference_loss, abs=0.006)
    at = read_atlas().where(family="quartet2", params=30482560.0, tokens=11999903744.0)
    gaps = {recipe: at.where(recipe=recipe).points[0].gap_percent for recipe in set(at.column("recipe"))}
    order = "quartet2-128 nvfp4-eden tetrajet2-tensor nvfp4-random-signs-4over6 nvfp4-random-signs"
    assert " ".join(sorted(order.split(), key=gaps.__getitem__)) == order


def test_the_rows_of_our_ladder_are_those_of_its_runs():
    atlas = read_atlas().where(family="ladder")
    rows = list(ladder_rows(ROOT / "docs" / "evidence" / "runs.csv"))
    assert [(p.locator, p.loss) for p in atlas.points] == [(r["locator"], float(r["loss"])) for r in rows]


def test_a_users_own_atlas_is_read(tmp_path):
    columns = (*COLUMNS, "corpus")
    (tmp_path / "own.toml").write_text('[fprop]\nx = "mxfp4"\nw = "mxfp4"\n', encoding="utf-8")
    rows = [GOOD | {"corpus": "C4"}, GOOD | {"recipe": "own.toml", "gap_percent": "", "loss": "3.03"}]
    rows[1] |= {"reference_loss": "3", "tail_share": "", "corpus": "C4"}
    atlas = read_atlas(written(tmp_path, *rows, columns=columns))
    first, second = atlas.points
    assert first.more == {"corpus": "C4"}
    assert first.gap_nats is None
    assert first.tokens_per_param == 20
    assert second.gap_percent == pytest.approx(1.0)
    assert second.gap_nats == pytest.approx(0.03)
    assert [part.gemm for part in described(atlas.recipes[second.recipe]).parts] == ["fprop"]
    assert (first.tail_share, second.tail_share) == (0.15, None)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"params": "-1"}, "line 2: params = '-1', but it must be a number above 0"),
        ({"tokens": ""}, "tokens = '', but it must be a number above 0"),
        ({"recipe": "nvpf4"}, "unknown recipe 'nvpf4'; the nearest is 'nvfp4'"),
        ({"gap_percent": ""}, "gap_percent is empty; give it, or both loss and reference_loss"),
        ({"gap_percent": "nan"}, "gap_percent = 'nan', but it must be a finite number"),
        ({"loss": "3.1", "reference_loss": "3"}, "loss and reference_loss make it 3.333"),
        ({"seeds": "0"}, "seeds = '0', but it must be a number of runs"),
        ({"tail_share": "15"}, "tail_share = '15', but it must be a share from 0 to 1"),
        ({"date": "spring"}, "date = 'spring', but it must be a day such as 2026-02-20"),
        ({"source": " "}, "source is empty"),
    ],
)
def test_a_mistake_in_a_users_atlas_is_one_sentence(tmp_path, change, sentence):
    with pytest.raises(UserError) as error:
        read_atlas(written(tmp_path, GOOD | change))
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_column_or_file_is_one_sentence(tmp_path):
    path = written(tmp_path, GOOD, columns=[c for c in COLUMNS if c not in ("seeds", "date")])
    with pytest.raises(UserError, match="lacks the columns date, seeds; its first line must name source, "):
        read_atlas(path)
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_atlas(tmp_path / "none.csv")
    with pytest.raises(UserError, match="has no points"):
        read_atlas(written(tmp_path))
    path.write_text(",".join(COLUMNS) + "\na,b\n", encoding="utf-8")
    with pytest.raises(UserError, match="line 2 has more or fewer values than there are columns"):
        read_atlas(path)

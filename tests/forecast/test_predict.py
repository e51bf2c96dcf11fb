"""`predict`: its answer for every recipe and model, its JSON and files, gaps at 1.9 billion parameters."""

import csv
import hashlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import forecasts
import narrowgauge as ng
import registry
from narrowgauge.forecast import COLUMNS, Forecaster, described, read_atlas, scheme
from narrowgauge.forecast.noise import TABLE, cast_text, measured_noise
from narrowgauge.forecast.published import loss_of
from narrowgauge.recipes import GEMM_PLACES, recipe_names
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.cli.main import main
from narrowgauge.trainer.models import model_names


@pytest.fixture(scope="module")
def forecaster():
    return Forecaster()


def small_atlas(folder: Path) -> Path:
    """The runs of at most 50 million parameters as a separate file."""
    points = [p for p in read_atlas().points if p.params < forecasts.SMALL]
    path = folder / "small.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for p in points:
            values = [getattr(p, name) for name in COLUMNS]
            writer.writerow(["" if value is None else value for value in values])
    return path


def test_the_gaps_at_two_billion_parameters_follow_from_small_runs(tmp_path):
    found = ng.predict(list(forecasts.NANOCHAT), 1.9e9, 3.8e10, atlas=small_atlas(tmp_path))
    for one, published in zip(found, forecasts.NANOCHAT.values(), strict=True):
        assert one.refused is None
        assert one.gap_percent.mean == pytest.approx(published, abs=0.15), one.recipe
        assert one.gap_percent.low < published < one.gap_percent.high
        assert one.extrapolation.params == pytest.approx(1.9e9 / 49556736)


@pytest.mark.tier("thorough")
def test_every_recipe_and_named_model_is_answered_or_refused_in_a_sentence(forecaster):
    for model in model_names():
        size = ng.predict("bf16", None, 1e10, model=model)[0].params
        for name in recipe_names():
            one = forecaster.forecast(scheme(name).recipe, size, 20 * size, name)
            if one.refused is None:
                assert one.gap_percent.low <= one.gap_percent.mean <= one.gap_percent.high
                assert one.gap_percent.mean < 15
            else:
                assert one.gap_percent is None
                assert "\n" not in one.refused
                assert len(one.refused) > 40


def test_json_has_the_settled_fields(capsys):
    assert main(["predict", "--recipe", "nvfp4,coat", "--params", "1.9e9", "--tokens", "38B", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    one, refused = found["forecasts"]
    assert (one["recipe"], one["params"], one["tokens"], one["refused"]) == ("nvfp4", 1.9e9, 3.8e10, None)
    for name in ("gap_percent", "gap_nats", "extra_tokens_percent", "kappa"):
        assert one[name]["low"] < one[name]["mean"] < one[name]["high"]
        assert refused[name] is None
    assert set(one["extrapolation"]) == {"params", "tokens_per_param"}
    assert one["points"] > 300
    assert "state in few bits" in refused["refused"]
    assert 0.1 < found["law"]["exponent"]["low"] < found["law"]["exponent"]["high"] < 0.25
    assert main(["predict", "--recipe", "coat", "--params", "1e9", "--tokens", "2e10"]) == 1


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--recipe nvfp5 --params 1e9 --tokens 2e10", "nvfp4"),
        ("--params many --tokens 2e10", "--params: 'many': it must be a number such as 1.9e9 or 38B"),
        ("--params 1e9 --tokens -1", "--tokens: '-1'"),
        ("--model llama --tokens 2e10", "llama"),
        *(
            (f"--params 1e9 --tokens 2e10 --{x} none", "none cannot be read")
            for x in ("atlas", "probe", "runs")
        ),
        ("--params 1e9 --tokens 2e10 --out x.png", "must end in .json, .csv, .svg, .txt"),
    ],
)
def test_mistakes_are_answered_in_a_sentence(line, sentence, capsys):
    given = line if "--recipe" in line else f"--recipe nvfp4 {line}"
    assert main(["predict", *given.split()]) == 2
    assert sentence in capsys.readouterr().err


def test_far_settings_are_refused_and_diverging_ones_flagged(forecaster):
    far = forecaster.forecast(ng.recipe("nvfp4"), 1e13, 1e15)
    assert "times beyond the runs that support nvfp4" in far.refused
    no_tail = forecaster.forecast(scheme("fp4-all").recipe, 1.2e10, 1e13, "fp4-all")
    assert "diverged" in no_tail.divergence
    assert not forecaster.forecast(ng.recipe("nvfp4"), 1.2e10, 1e13).divergence
    reference = forecaster.forecast(ng.recipe("bf16"), 1e9, 2e10)
    assert reference.gap_percent.mean == reference.gap_percent.high == 0.0


def test_a_changed_recipe_has_no_claim_to_the_points_of_its_name(forecaster):
    """A file that began as a copy of nvfp4.toml: its casts and state decide, not its name."""
    keys = tomllib.loads(ng.recipe("nvfp4").text)
    changes = ({"fprop": {"x": "mxfp4", "w": "mxfp4"}}, {"m": "dynamic8"}, {"keep": {"last_blocks": 2}})
    coarse, state, tail = (forecaster.forecast(ng.recipe(keys | more), 1e9, 2e10) for more in changes)
    assert (coarse.recipe, coarse.own_points) == ("nvfp4-changed", 0)
    assert "state in few bits" in state.refused
    assert (tail.recipe, tail.own_points) == ("nvfp4", 27)


def test_dictionaries_are_recipes_and_need_names_if_there_are_two():
    four, eight = ({"fprop": {"x": cast, "w": cast}} for cast in ("mxfp4", "mxfp8"))
    found = ng.predict(["nvfp4", four, eight | {"name": "mine"}], 1e9, 2e10)
    assert [one.recipe for one in found] == ["nvfp4", "own", "mine"]
    assert found[1].gap_percent.mean > found[2].gap_percent.mean
    with pytest.raises(UserError, match="two recipes are named own; give each another name"):
        ng.predict([four, eight], 1e9, 2e10)


def test_more_tokens_buy_the_gap_back(forecaster):
    one = forecaster.forecast(ng.recipe("nvfp4"), 1e9, 2e10)
    more = 2e10 * (1 + one.extra_tokens_percent.mean / 100)
    assert loss_of(1e9, more) * (1 + one.gap_percent.mean / 100) == pytest.approx(loss_of(1e9, 2e10))
    assert one.extra_tokens_percent.low < one.extra_tokens_percent.mean < one.extra_tokens_percent.high


def test_a_result_has_a_table_files_and_a_picture(tmp_path, monkeypatch):
    found = ng.predict(["nvfp4", "mxfp8"], 1e9, 2e10)
    assert repr(found).startswith("<Forecasts: nvfp4 +")
    assert [line.split()[0] for line in found.table().splitlines()[1:]] == ["recipe", "nvfp4", "mxfp8"]
    assert found.table().splitlines()[1].split()[-1] == "support"
    beyond = ng.predict("nvfp4", 2e11, 2e13).table().splitlines()[2]
    assert beyond.endswith("  beyond: 15x size")
    assert "published laws, nats: Kumar 2024" in found.explain()
    for ending in (".json", ".csv", ".svg", ".txt"):
        assert found.save(tmp_path / f"f{ending}").stat().st_size > 200
    assert json.loads((tmp_path / "f.json").read_text())["forecasts"][0]["recipe"] == "nvfp4"
    with (tmp_path / "f.csv").open() as file:
        assert [row["recipe"] for row in csv.DictReader(file)] == ["nvfp4", "mxfp8"]
    svg = (tmp_path / "f.svg").read_text()
    assert svg.startswith("<svg")
    assert "tokens per parameter" in svg
    assert svg.count("<circle") > 10
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="needs pandas"):
        found.to_pandas()


@pytest.mark.tier("thorough")
def test_a_probe_moves_a_recipe_without_points_and_narrows_it(tmp_path):
    def figures(loss, cosine):
        return {
            "loss_increase": {"mean": loss, "low": 0.95 * loss, "high": 1.05 * loss},
            "gradient_cosine": {"mean": cosine, "low": cosine, "high": cosine},
        }

    path, measured = tmp_path / "probe.json", {"mxfp4": (0.034, 0.979), "nvfp4": (0.0146, 0.984)}
    recipes = {name: figures(*of) for name, of in (measured | {"tetrajet2": (0.068, 0.984)}).items()}
    path.write_text(json.dumps({"recipes": recipes}))
    free, told = (ng.predict("tetrajet2", 1e9, 2e10, probe=p)[0] for p in (None, path))
    assert told.gap_percent.mean > 1.2 * free.gap_percent.mean
    assert told.predicted.structure <= free.predicted.structure


@pytest.mark.tier("thorough")
def test_it_takes_no_torch():
    code = "import sys, narrowgauge as ng; ng.predict(ng.recipe_names(), 1e9, 2e10).table(); "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_table_of_noise_is_what_the_casts_measure():
    casts = {ng.recipe(name).casts[place] for name in ("nvfp4", "mxfp4") for place in GEMM_PLACES}
    with TABLE.open(encoding="utf-8", newline="") as file:
        kept = {row["cast"]: float(row["noise"]) for row in csv.DictReader(file)}
    for cast in casts:
        assert kept[cast_text(cast)] == pytest.approx(measured_noise(cast), rel=0.02)  # other draws
    for name in recipe_names():
        for place in GEMM_PLACES:
            cast = ng.recipe(name).casts[place]
            assert cast.element.bits >= 16 or cast_text(cast) in kept


def test_a_recipe_is_the_sum_of_its_narrow_gemms():
    assert [part.gemm for part in described(ng.recipe("fp8-row-hp")).parts] == ["fprop", "dgrad"]
    assert described(ng.recipe("bf16")).parts == ()
    assert described(ng.recipe("nvfp4")).tail > 0.1
    assert described(ng.recipe("nvfp4-finish")).finishes
    assert "attention" in described(ng.recipe("fp8-attention")).beyond


def numbers_apart(text: str) -> tuple[str, list[float]]:
    """The words of a text, and its numbers."""
    pattern = r"-?\d+(?:\.\d+)?"
    return re.sub(pattern, "#", text), [float(number) for number in re.findall(pattern, text)]


# The other tables leave out one size, scheme or paper at a time, which takes minutes (`make forecasts`).
@pytest.mark.parametrize("name", forecasts.PAGES)
def test_the_pages_have_the_tables_of_the_data(name):
    """A last digit may differ on another CPU."""
    quick = ("coefficients", "nanochat", "large", "sources", "scores", "registered")
    made = numbers_apart(forecasts.page(name, quick))
    kept = numbers_apart((forecasts.DOCS / name).read_text(encoding="utf-8"))
    assert made[0] == kept[0]
    assert made[1] == pytest.approx(kept[1], rel=0.02, abs=0.02)


@pytest.mark.parametrize(
    ("day", "count", "digest"),
    [("2026-11-25", 41, "46cb1a404d7b7d0a"), ("2026-11-27", 101, "522a73de4bcf4518")],
)
def test_registered_forecasts_stay_as_they_were_registered(day, count, digest):
    """All sealed figures of a day, without outcomes. The second day registers what the changed law gives."""
    found = [
        (*one.key, one.gap.low, one.gap.mean, one.gap.high) for one in registry.sealed() if one.day == day
    ]
    assert len(found) == len({row[:3] for row in found}) == count
    assert hashlib.sha256(repr(sorted(found)).encode()).hexdigest()[:16] == digest

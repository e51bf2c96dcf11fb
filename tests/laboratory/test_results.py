"""What questions return: the same as the command prints, as objects, rows, files and pictures."""

import csv
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import rich.console

import narrowgauge as ng
from narrowgauge.system.errors import UserError
from narrowgauge.system.result import Result


def the_same_in_every_form(result: Result, folder: Path) -> None:
    """A result's forms agree with each other."""
    rows = result.rows()
    assert rows
    assert len({tuple(row) for row in rows}) == 1, "all rows have the same keys"
    assert len(repr(result)) < 200
    assert "\n" not in repr(result)
    assert str(result) == result.table()
    assert "<table>" in result._repr_html_()
    read = list(csv.DictReader(result.save(folder / "a.csv").read_text().splitlines()))
    assert len(read) == len(rows)
    assert json.loads(result.save(folder / "a.json").read_text()) == json.loads(json.dumps(result.as_json()))
    assert result.table() in result.save(folder / "a.txt").read_text()
    assert "http" not in result.save(folder / "a.html").read_text().replace("http://www.w3.org/2000/svg", "")
    ElementTree.fromstring(result.save(folder / "a.svg").read_text())
    assert result.plot().startswith("<svg")
    with pytest.raises(UserError, match=r"must end in \.json, \.csv, \.svg, \.txt, \.html"):
        result.save(folder / "a.png")


def test_a_run_is_trained_and_returned(run, tiny, tmp_path):
    result = ng.train("bf16", run, quiet=True, **tiny)
    assert result.path == run
    assert result.report.is_file()
    assert len(result.losses) == 4
    assert result.loss == result.run.final_val_loss
    the_same_in_every_form(result, tmp_path)


@pytest.mark.tier("thorough")  # `test_a_run_is_trained_and_returned` trains in the quick tier
def test_a_recipe_from_a_dictionary_is_kept_next_to_its_run_which_resumes(tiny, tmp_path):
    table = {"name": "half", "fprop": "mxfp4"}
    first = ng.train(table, tmp_path / "a", quiet=True, **tiny)
    assert (tmp_path / "a.recipe.toml").read_text() == ng.recipe(table).text
    again = ng.train(str(tmp_path / "a.recipe.toml"), tmp_path / "a", quiet=True, **tiny)
    assert again.losses == first.losses
    with pytest.raises(UserError, match="needs out"):
        ng.train(table, quiet=True, **tiny)
    changed = ng.recipe("mxfp8").with_places({"fprop.x": "bf16"})
    with pytest.raises(UserError, match="was changed after it was read"):
        ng.train(changed, tmp_path / "b", quiet=True, **tiny)


@pytest.mark.tier("thorough")  # `test_a_run_is_trained_and_returned` trains in the quick tier
def test_a_comparison_judges_shipped_recipes_and_functions_that_were_trained_here(tiny, tmp_path):
    ng.register_cast("coarse", lambda x: (x * 4).round() / 4)
    ours, folder = {"name": "ours", "fprop": "coarse"}, tmp_path / "c"
    with pytest.raises(
        UserError, match=r"is a function of this process, .* by narrowgauge.train\(\.\.\., out="
    ):
        ng.compare(["bf16", ours], 2, folder, quiet=True, **tiny)
    for seed, name in enumerate(("ours", "ours-seed-1")):
        sections = tiny | {"training": tiny["training"] | {"seed": seed}}
        ng.train(str(folder / "ours.recipe.toml"), folder / name, quiet=True, **sections)
    # 3 nats: two seeds have wide intervals
    result = ng.compare(["bf16", ours], 2, folder, gate=3.0, quiet=True, **tiny)
    assert [v.name for v in result.verdicts] == ["bf16", "ours"]
    assert len(result.verdicts[1].gaps) == 2
    assert [gate.word for gate in result.gates] == ["pass"]
    assert result.passes
    assert result.report.is_file()
    the_same_in_every_form(result, tmp_path)


@pytest.mark.tier("thorough")
def test_probes_sensitivities_and_searches_answer(run, tmp_path):
    probes = ng.probe(run, ["bf16", {"fprop": "mxfp4"}], draws=2, batches=2)
    assert [row["recipe"] for row in probes.rows()] == ["bf16", "own"]
    assert json.loads((run / "probe.json").read_text()) == json.loads(json.dumps(probes.as_json()))
    the_same_in_every_form(probes, tmp_path)
    costs = ng.sensitivity(run, to=ng.format("e2m1"), batches=2)
    assert len(costs.rows()) == 6 * 9
    assert costs.worst[0] in {f"{row['layer']}.{row['place']}" for row in costs.rows()}
    the_same_in_every_form(costs, tmp_path)
    never = {"fork_steps": 10**9, "batches": 2, "show": lambda *_: pytest.fail("it forked")}
    with pytest.raises(UserError, match=r"--out /proc/f\.toml cannot be written"):
        ng.search(run, ["mxfp4", "bf16"], 0.5, "/proc/f.toml", **never)
    found = ng.search(
        run, ["mxfp4", "bf16"], budget=0.5, out=tmp_path / "f.toml", fork_steps=1, fork_seeds=1, batches=2
    )
    assert found.recipe == ng.load_recipe(tmp_path / "f.toml")
    others = found.answer["baselines"].values()
    assert found.answer["predicted_cost"] <= min(other["predicted_cost"] for other in others)
    the_same_in_every_form(found, tmp_path)


@pytest.mark.tier("thorough")
def test_a_plan_and_a_forecast_are_results(tmp_path):
    plan = ng.plan("debug", {"fprop": "e4m3"}, "rtx4090", 10**10, price="0.5USD")
    assert plan.fits
    of_16 = {"cluster": "rtx4090", "devices": 16, "training": {"recompute": True}}
    by_name, as_object = (ng.plan("debug", r, **of_16) for r in ("msamp-o2", ng.recipe("msamp-o2")))
    assert by_name.as_json() == as_object.as_json()
    assert plan.days is not None
    assert plan.cost == pytest.approx(plan.days * 12, rel=1e-9)
    the_same_in_every_form(plan, tmp_path)
    the_same_in_every_form(ng.predict(["mxfp8", {"fprop": "mxfp4"}], 1e9, 2e10), tmp_path)
    with pytest.raises(UserError, match="need to know the machine"):
        ng.plan("gpt2-124m", tokens="10B")


MISTAKES = [
    (lambda: ng.train("bf16", "out", trainig={}), "unknown argument 'trainig'; the nearest is 'training'"),
    (lambda: ng.train("bf16", "out", optimizer=1e-3), "it is a section of the configuration"),
    (lambda: ng.predict(3), r"recipes = 3: a recipe is a name, .* as in \['bf16', 'mxfp8'\]"),
    (lambda: ng.recipe(3), r"unknown recipe '?3"),
    (lambda: ng.advise(3), r"unknown model '?3"),
    (lambda: ng.predict("mxfp4", "x", 2e10), "params = x: predict needs the parameters without embeddings"),
    (lambda: ng.predict("mxfp4", "1B", [1]), r"tokens = \[1\]: predict needs the tokens of training"),
    (lambda: ng.predict("mxfp4", "1B", 2e10, runs=3), "--runs 3 cannot be read"),
]


@pytest.mark.parametrize(("call", "sentence"), MISTAKES)
def test_a_mistake_is_answered_in_a_sentence(call, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=sentence):
        call()


@pytest.mark.tier("thorough")
def test_a_table_is_plain_text_in_a_notebook(monkeypatch):
    """There, rich takes any stream for a notebook's cell, and prints escape codes into it."""
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    table = str(ng.plan(model="debug", recipe="bf16"))
    assert "together" in table
    assert "\x1b" not in table


def test_pandas_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="to_pandas needs pandas; install it with: pip install pandas"):
        ng.predict("mxfp8", 1e9, 2e10).to_pandas()

"""Each verb as a user meets it: a line, what it prints, what it leaves."""

import json
import os
import re
import shutil

import pytest

from narrowgauge.recipes import load_recipe, recipe, recipe_names
from narrowgauge.trainer.models import count_parameters, model_config, model_names


def found(pattern, text):
    """What one line of a text holds."""
    return re.findall(pattern, text, re.MULTILINE)


@pytest.mark.tier("thorough")
def test_sample_continues_the_prompt(command, finished):
    def sample(*words):
        ended = command("sample", finished, "--prompt", "steam é", "--tokens", 12, *words)
        assert (ended.code, ended.err) == (0, "")
        assert ended.out.startswith("steam é")
        return ended.out

    likeliest = sample("--temperature", 0)
    assert likeliest == sample("--temperature", 0, "--seed", 5) == sample("--temperature", "1e-320")
    hot = ("--temperature", 2)
    first = sample(*hot, "--seed", 1)
    assert first == sample(*hot, "--seed", 1) != sample(*hot, "--seed", 2)


def test_eval_repeats_the_loss_of_the_run(command, finished, look):
    last = look(finished).steps[-1]["val_loss"]
    ended = command("eval", finished, "--task", "val", "--batches", 2)  # as the run's own [validation]
    assert ended.code == 0, ended.err
    said = f"{finished}: step 6, validation loss {last:.4f} nats per token, "
    assert ended.out.splitlines()[-1].startswith(said)
    assert ended.out.endswith(" bits per byte\n")
    assert f"{last:.4f}" not in command("eval", finished).out, "all batches are more than two"


def test_report_writes_the_page_it_names(command, finished, tmp_path):
    runs = [shutil.copytree(finished, tmp_path / name) for name in ("one", "two")]
    (runs[0] / "report.html").unlink()
    ended = command("report", *runs)
    assert ended.code == 0, ended.err
    page = (runs[0] / "report.html").read_text()
    assert ended.out.startswith(f"report: {runs[0] / 'report.html'}\n")
    assert all(f">{run.name}<" in page for run in runs)
    assert command("report", *runs, "--out", tmp_path / "pages" / "page.html").code == 0
    assert (tmp_path / "pages" / "page.html").read_text() == page


def test_runs_lists_what_is_there_and_says_what_is_broken(command, finished, look, tmp_path, monkeypatch):
    """tests/report/read/ has every state."""
    runs = tmp_path / "runs"
    for name in ("one", "compared/fp8"):
        shutil.copytree(finished, runs / name)
    for name, content in (("no-toml", "[training"), ("a-list", "training = 3\nrecipe = 4\n")):
        (runs / name).mkdir()
        (runs / name / "config.toml").write_text(content)
    (runs / "no-run").mkdir()
    listed = command("runs", runs, COLUMNS="300")
    assert listed.code == 0, listed.err
    last = look(finished).steps[-1]
    ends = rf"fp8 +6/6 +{last['loss']:.4f} +{last['val_loss']:.4f} *$"
    for name in ("one", "compared/fp8"):
        assert found(rf"/{name} +done +{ends}", listed.out), name
    assert found(r"/no-toml +broken ", listed.out)
    assert "/no-run" not in listed.out
    told = json.loads(command("runs", runs, "--json").out)
    assert [run["state"] for run in told if run["path"].endswith("/a-list")] == ["unknown"]
    monkeypatch.chdir(runs / "no-run")
    assert "no run directories in runs" in command("runs").out


def test_recipes_lists_every_recipe_and_prints_one_that_loads(command, tmp_path):
    listed = command("recipes").out
    assert all(found(rf"^ {name} +.* (native|emulated) ", listed) for name in recipe_names())
    mine = tmp_path / "mine.toml"
    for name in ("fp8", "nvfp4", "quartet2"):
        mine.write_text(command("recipes", name).out)
        assert load_recipe(mine).casts == recipe(name).casts
        assert command("recipes", mine).out == mine.read_text()


def test_recipes_of_another_device(command):
    """MI250X multiplies nothing narrow, and an RTX 4090 no FP4."""
    listed = command("recipes", "--device", "mi250x").out
    assert found(r"^ (\S+) +native ", listed) == ["fp32", "bf16", "bf16-sr", "eco", "fp16"]
    shown = command("recipes", "fp4", "--device", "sm_89").out
    assert found(r"^ fprop\.x, fprop\.w +fp4-row, fp4-row +emulated ", shown)
    assert found(r"^ wgrad\.dy, wgrad\.x +e5m2, e4m3 +native ", shown)
    assert found(r"^ e5m2 +Triton kernel +dgrad\.dy, wgrad\.dy +$", shown)
    assert "recipe fp4 as a whole is emulated" in shown


def test_recipes_differ_and_go_to_other_tools_and_come_from_them(command, tmp_path):
    out = " ".join(command("recipes", "fp8", "--diff", "fp8-row").out.split())
    assert "fprop.x, fprop.w, dgrad.w, wgrad.x e4m3 fp8-row power_of_two=true" in out
    assert not re.search("master|keep", out)
    file, mine = tmp_path / "theirs.py", tmp_path / "mine.toml"
    file.write_text("r = Float8CurrentScaling(fp8_format=Format.E4M3, use_power_2_scales=False)\n")
    mine.write_text(command("recipes", file, "--from", "te").out)
    assert mine.read_text().startswith("# Lost: fp8_gemm_fprop with use_split_accumulator=False")
    assert "are equal in every place" in " ".join(command("recipes", mine, "--diff", mine).out.split())
    ours = command("recipes", mine, "--to", "torchao").out.partition("\n\n")[2]
    # The comments at the top name the line that wrote each, the file and its tool.
    assert command("recipes", file, "--from", "te", "--to", "torchao").out.partition("\n\n")[2] == ours


def test_formats_and_models_are_listed_with_their_facts(command):
    one = command("formats", "e4m3").out
    assert "no infinity" in one
    assert "e5m2" not in one
    listed = command("models", COLUMNS="80").out
    assert "…" not in listed, "no heading is cut"
    assert all(found(rf"^ {re.escape(name)} +[\d.]+ [MB] ", listed) for name in model_names())
    parameters = count_parameters(model_config("debug"))
    assert f"# {parameters:,} parameters" in command("models", "debug").out


def test_prepare_stops_at_bad_lines_or_sets_them_aside(command, refused, tmp_path):
    source, out = tmp_path / "a.jsonl", tmp_path / "corpus"
    source.write_text("".join(f'{{"body": "line {i % 190}"}}\n' for i in range(200)) + '{"body": "cut\n')
    words = ("prepare", source, "--out", out, "--tokenizer", "bytes", "--text-key", "body")
    refused(command(*words), f"{source}:201 is not JSON", "--tolerant")
    assert not out.exists()
    ended = command(*words, "--tolerant", "--dedup")
    assert ended.code == 0, ended.err
    assert "left out 10 duplicates" in ended.out
    assert f"set aside 1 records: {out / 'rejected.jsonl'}" in ended.out
    assert f"train on it: narrowgauge train --data {out}" in ended.out
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "corpus"]


@pytest.fixture(scope="module")
def exported(finished, printed, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "hf"
    first, remark = printed("export", finished, "--to", "hf", "--out", out).splitlines()
    assert first == f"{out}: {finished} after step 6, as hf"
    assert remark.startswith("weights are stored as they are before the recipe's casts")
    return out


@pytest.fixture(scope="module")
def imported(exported, printed, text):
    run = exported.parent / "run"
    said = printed("import", exported, "--out", run, "--data", text)
    assert said.startswith(f"run directory: {run}\nthe weights were stored in fp32 (hf) and are kept in")
    assert f"--model.weights {run}" in said
    return run


def test_run_folder_and_import_are_one_model(command, exported, imported, text):
    said = [
        command("eval", p, "--data", text, "--sequence-length", 32, "--batches", 2)
        for p in (imported, exported)
    ]
    losses = [re.search(r"validation loss ([\d.]+)", ended.out)[1] for ended in said]
    assert losses[0] == losses[1]
    ended = command("eval", imported)  # on its own text, which is too short for its own windows
    assert (ended.code, "needs 1025" in ended.err) == (2, True)
    line = ("--prompt", "narrow", "--tokens", "8", "--temperature", "0")
    said = [command("sample", path, *line) for path in (imported, exported)]
    assert said[0] == said[1]
    assert said[0].out.startswith("narrow")


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("point", ["filled", "renamed"])
@pytest.mark.parametrize("verb", ["export", "import"])
def test_a_kill_leaves_all_or_nothing(narrowgauge, printed, finished, exported, tmp_path, verb, point):
    line = [verb, finished, "--to", "hf"] if verb == "export" else [verb, exported]
    ended = narrowgauge(*line, "--out", tmp_path / "out", NARROWGAUGE_CRASH_AT=f"exchange:{point}")
    assert ended.code in (137, -9)
    assert (tmp_path / "out").exists() == (point == "renamed")
    if point == "filled":
        assert narrowgauge(*line, "--out", tmp_path / "out").code == 0
    assert printed("sample", tmp_path / "out", "--prompt", "a", "--tokens", "2")

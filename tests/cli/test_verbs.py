"""Each verb as a user meets it: a line, what it prints, what it leaves."""

import re
import shutil
import tomllib

import pytest

from narrowgauge.recipes import load_recipe, recipe, recipe_names


def test_no_verb_and_help_explain(narrowgauge):
    for words in ([], ["--help"]):
        ended = narrowgauge(*words)
        assert ended.code == 0
        for verb in (
            "train",
            "compare",
            "sample",
            "eval",
            "prepare",
            "report",
            "recipes",
            "formats",
            "plan",
            "scaling",
            "doctor",
            "runs",
            "models",
        ):
            assert re.search(rf"^ +{verb}(  |$)", ended.out, re.MULTILINE), verb


@pytest.mark.tier("thorough")
def test_short_options_are_their_keys(narrowgauge, line, text, look, tmp_path):
    short = ["--model", "gpt2-debug", "--data", text, "--recipe", "mxfp8", "--backend", "emulated"]
    short += ["--steps", "2", "--seed", "3", "--device", "cpu"]
    ended = narrowgauge(*line({"model.kv_heads": 2}), *short, "--out", tmp_path / "run")
    assert ended.code == 0, ended.err
    config = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert (config["model"]["name"], config["model"]["positions"]) == ("gpt2-debug", "learned")
    assert config["data"]["source"] == text
    assert (config["recipe"]["name"], config["recipe"]["backend"]) == ("mxfp8", "emulated")
    assert (config["training"]["steps"], config["training"]["seed"]) == (2, 3)
    assert look(tmp_path / "run").column("step") == [1, 2]


@pytest.mark.tier("thorough")
def test_a_file_and_over_it_the_line(narrowgauge, finished, look, tmp_path):
    """The file a run leaves is the run, and the command line stands over it."""
    mine = tmp_path / "mine.toml"
    shutil.copy(finished / "config.toml", mine)
    for name, words in (("same", []), ("other", ["--training.seed", "1"])):
        ended = narrowgauge("train", mine, "--out", tmp_path / name, *words)
        assert ended.code == 0, ended.err
    same, other = look(tmp_path / "same"), look(tmp_path / "other")
    assert same.trajectory == look(finished).trajectory
    assert other.column("loss") != same.column("loss")
    assert tomllib.loads((tmp_path / "other" / "config.toml").read_text())["training"]["seed"] == 1


@pytest.mark.tier("thorough")
def test_train_shows_its_steps_its_table_and_its_report(narrowgauge, line, look, tmp_path):
    out = tmp_path / "new" / "run"
    ended = narrowgauge(*line({"log.every": 2}), "--out", out)
    assert ended.code == 0, ended.err
    run = look(out)
    shown = [int(n) for n in re.findall(r"^step +(\d+)/6", ended.out, re.MULTILINE)]
    assert shown == [0, 2, 4, 6]
    assert f"run directory: {out}\n" in ended.out
    assert f"loss {run.column('loss')[-1]:.4f}" in ended.out
    assert re.search(rf"^val loss +{run.steps[-1]['val_loss']:.4f}$", ended.out, re.MULTILINE)
    assert ended.out.endswith(f"report: {out / 'report.html'}\n")
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    assert run.status["status"] == "done"


@pytest.mark.tier("thorough")
def test_the_same_line_finds_a_run_done(narrowgauge, line, look, tmp_path):
    words = [*line(), "--out", tmp_path / "run"]
    assert narrowgauge(*words).code == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    ended = narrowgauge(*words)
    assert ended.code == 0
    assert "run is done; to train again, name another directory with --out" in ended.out
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


@pytest.mark.tier("thorough")
def test_without_out_a_run_goes_to_a_place_that_says_what_it_is(narrowgauge, line, text):
    ended = narrowgauge(*line({"training.steps": 1}))
    assert ended.code == 0, ended.err
    (made,) = (narrowgauge.directory / "runs").glob(f"debug-{text.rsplit('/')[-1]}-fp8,*")
    assert (made / "metrics.jsonl").exists()


@pytest.mark.tier("thorough")
def test_sample_continues_the_prompt(narrowgauge, finished):
    def sample(*words):
        ended = narrowgauge("sample", finished, "--prompt", "steam é", "--tokens", 12, *words)
        assert ended.code == 0, ended.err
        assert ended.err == ""
        assert ended.out.startswith("steam é")
        return ended.out

    likeliest = sample("--temperature", 0)
    assert likeliest == sample("--temperature", 0, "--seed", 5) == sample("--temperature", "1e-320")
    hot = ("--temperature", 2)
    first = sample(*hot, "--seed", 1)
    assert first == sample(*hot, "--seed", 1) != sample(*hot, "--seed", 2)


def test_eval_repeats_the_loss_of_the_run(narrowgauge, finished, look):
    last = look(finished).steps[-1]["val_loss"]
    ended = narrowgauge("eval", finished, "--task", "val", "--batches", 2)  # as the run's own [validation]
    assert ended.code == 0, ended.err
    said = f"{finished}: step 6, validation loss {last:.4f} nats per token, "
    assert ended.out.splitlines()[-1].startswith(said)
    assert ended.out.endswith(" bits per byte\n")
    ended = narrowgauge("eval", finished)
    assert ended.code == 0, ended.err
    assert f"{last:.4f}" not in ended.out, "all batches are more than two"


@pytest.mark.parametrize("count", [1, 2])
def test_report_writes_the_page_it_names(narrowgauge, finished, tmp_path, count):
    runs = [tmp_path / "one", tmp_path / "two"][:count]
    for run in runs:
        shutil.copytree(finished, run)
        (run / "report.html").unlink()
    ended = narrowgauge("report", *runs)
    assert ended.code == 0, ended.err
    page = (tmp_path / "one" / "report.html").read_text()
    assert ended.out.startswith(f"report: {tmp_path / 'one' / 'report.html'}\n")
    for name in ("one", "two"):
        assert (f">{name}<" in page) == (tmp_path / name in runs)
    ended = narrowgauge("report", *runs, "--out", tmp_path / "pages" / "page.html")
    assert ended.code == 0, ended.err
    assert (tmp_path / "pages" / "page.html").read_text() == page


@pytest.mark.tier("thorough")
def test_recipes_lists_every_recipe_and_prints_one_that_loads(narrowgauge, tmp_path):
    ended = narrowgauge("recipes")
    assert ended.code == 0
    for name in recipe_names():
        assert re.search(rf"^ {name} +.* (native|emulated) ", ended.out, re.MULTILINE), name
        mine = tmp_path / f"{name}.toml"
        mine.write_text(narrowgauge("recipes", name).out)
        assert load_recipe(mine).casts == recipe(name).casts
    assert narrowgauge("recipes", mine).out == mine.read_text()


def test_formats_lists_every_format_and_the_facts_of_one(narrowgauge):
    ended = narrowgauge("formats")
    assert ended.code == 0
    assert re.search(r"^ e4m3 +8 +4\.3 +7 +448 +0\.015625 +0\.00195312 *$", ended.out, re.MULTILINE)
    assert re.search(r"^ e2m1 +4 +2\.1 +1 +6 +1 +0\.5 *$", ended.out, re.MULTILINE)
    ended = narrowgauge("formats", "e4m3")
    assert ended.code == 0
    assert "no infinity" in ended.out
    assert "OCP" in ended.out
    assert "e5m2" not in ended.out


def test_recipes_of_another_device(narrowgauge):
    """On an RTX 4090 FP8 is native and NVFP4 is not; MI250X multiplies nothing narrow; typos are answered."""
    ended = narrowgauge("recipes", "--device", "rtx4090")
    assert re.search(r"^ fp8 +native ", ended.out, re.MULTILINE), ended.err
    assert re.search(r"^ nvfp4 +emulated ", ended.out, re.MULTILINE)
    ended = narrowgauge("recipes", "--device", "mi250x")
    native = re.findall(r"^ (\S+) +native ", ended.out, re.MULTILINE)
    assert native == ["fp32", "bf16", "bf16-sr", "eco", "fp16"]
    ended = narrowgauge("recipes", "fp4", "--device", "sm_89")
    assert re.search(r"^ fprop\.x, fprop\.w +fp4-row, fp4-row +emulated ", ended.out, re.MULTILINE)
    assert re.search(r"^ wgrad\.dy, wgrad\.x +e5m2, e4m3 +native ", ended.out, re.MULTILINE)
    assert re.search(r"^ e5m2 +Triton kernel +dgrad\.dy, wgrad\.dy +$", ended.out, re.MULTILINE)
    assert "recipe fp4 as a whole is emulated" in ended.out
    ended = narrowgauge("recipes", "--device", "rtx490")
    assert (ended.code, ended.out) == (2, "")
    assert "unknown device 'rtx490'; the nearest are rtx4090" in ended.err


@pytest.mark.tier("thorough")  # cluster/plan/ plans in this process
def test_plan_says_what_fits_and_what_would_help(narrowgauge, line, tmp_path):
    words = ["plan", *line({"training.micro_batch_size": 2})[1:]]
    ended = narrowgauge(*words)
    assert ended.code == 0, ended.err
    for name in ("weights", "gradients", "saved activations", "together"):
        assert re.search(rf"^ *{name} ", ended.out, re.MULTILINE), name
    assert re.search(r"^fits: ", ended.out, re.MULTILINE)
    tight = narrowgauge(*words, "--memory-limit", "10KB")
    assert re.search(
        r"^does not fit: .* of 9\.8 KiB \(training\.memory_limit 10KB\)", tight.out, re.MULTILINE
    )
    assert "with --training.recompute true: " in tight.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.tier("thorough")
def test_a_limit_ends_a_run_before_it_begins(narrowgauge, refused, line, tmp_path):
    ended = narrowgauge(*line(), "--memory-limit", "10KB", "--out", tmp_path / "run")
    refused(ended, "a step is expected to take", "training.memory_limit is 10KB", "choose a smaller --model")
    assert not (tmp_path / "run").exists()


@pytest.mark.tier("thorough")
def test_a_run_goes_on_under_another_recipe(narrowgauge, finished, look, tmp_path, refused):
    words = ("train", "--branch", finished, "--recipe", "msamp-o2", "--out", tmp_path / "new")
    refused(narrowgauge(*words), "a branch at step 6", "has no step left", "raise --steps")
    ended = narrowgauge(*words, "--steps", "8")
    assert ended.code == 0, ended.err
    assert "after step 6" in ended.out
    assert look(tmp_path / "new").status["status"] == "done"
    assert [event["step"] for event in look(tmp_path / "new").events("convert")] == [6]
    again = narrowgauge(*words[:3], "--recipe", "bf16", "--steps", "8", "--out", tmp_path / "new")
    assert again.code == 2
    assert "recipe.name = 'msamp-o2', and now it is 'bf16'" in again.err

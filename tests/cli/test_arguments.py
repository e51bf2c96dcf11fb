"""How an option is found, what help says, and where a run goes that is given no directory."""

import argparse
import json
import os
import re
import shlex
import shutil
from dataclasses import replace

import pytest

from narrowgauge.cli.line import read_line
from narrowgauge.cli.parsing.key_parser import EXAMPLES
from narrowgauge.cli.parsing.options import config_values
from narrowgauge.cli.parsing.verbs import VERBS, grouped
from narrowgauge.errors import UserError
from narrowgauge.models import count_parameters, model_config, model_names
from narrowgauge.runs import default_out
from narrowgauge.training import config_keys, make_config, to_toml
from narrowgauge.training.config.synonyms import other_names


def values(*words):
    return config_values(read_line(["train", *words]))


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--lr", "1e-3"], "optimizer.lr", "1e-3"),
        (["--lr=1e-3"], "optimizer.lr", "1e-3"),
        (["--learning-rate", "1e-3"], "optimizer.lr", "1e-3"),
        (["--learning_rate=1e-3"], "optimizer.lr", "1e-3"),
        (["--batch-size", "4"], "training.batch_size", "4"),
        (["--batch_size", "4"], "training.batch_size", "4"),
        (["--training.batch-size", "4"], "training.batch_size", "4"),
        (["--seq-len", "128"], "data.sequence_length", "128"),
        (["--max-grad-norm", "1"], "optimizer.clip_norm", "1"),
        (["--optimizer", "muon"], "optimizer.name", "muon"),
        (["--memory_limit", "24GB"], "training.memory_limit", "24GB"),
        (["--fprop.x", "bf16"], "recipe.fprop.x", "bf16"),
        (["--compile"], "training.compile", "true"),
        (["--recompute", "--steps", "3"], "training.recompute", "true"),
        (["--lr", "-1e-3"], "optimizer.lr", "-1e-3"),
    ],
)
def test_an_option_is_found_by_its_other_names(words, key, value):
    section, _, name = key.partition(".")
    assert values(*words)[section][name] == value


def test_where_a_run_goes_has_its_names_too():
    assert str(read_line(["train", "--output-dir", "runs/mine"]).out) == "runs/mine"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--stepz", "3"], ["unknown option '--stepz'", "'--steps'"]),
        (["--zero-stage", "3"], ["unknown option '--zero-stage'"]),
        (["--every", "10"], [f"--{s}.every" for s in ("validation", "checkpoint", "gauges", "log")]),
        (["--name", "x"], ["--model.name", "--optimizer.name", "--recipe.name"]),
        (["--outliers", "0.99"], ["no option --outliers", "it is a key of a cast"]),
        (["--training.lr", "1"], ["unknown option '--training.lr'; it is --optimizer.lr"]),
        (["--optimizer.learning_rate", "1"], ["it is --optimizer.lr"]),
        (["--learnin-rate", "1"], ["unknown option '--learnin-rate'", "'--learning-rate'"]),
        (["--lr"], ["--optimizer.lr", "expected one argument"]),
        (["--fprop.x", "{cast", "=", "fp4-row,", "outliers", "=", "0.99}"], ["'fp4-row,'", "single quotes"]),
    ],
)
def test_another_name_that_is_no_key_is_answered(words, says):
    with pytest.raises(UserError) as refused:
        values(*words)
    for word in says:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("line", "near"),
    [
        ("search runs/x --formats mxfp4 --budgte 0.6 --out m.toml", "--budget"),
        ("search runs/x --formats mxfp4 --budget 0.6 --outt=m.toml", "--out"),
        ("prepare texts --ot corpus", "--out"),
    ],
)
def test_a_misspelt_option_is_named_and_not_the_one_that_seems_to_be_missing(line, near):
    with pytest.raises(UserError, match=f"unknown option '--.*'; the nearest is '{near}'"):
        read_line(line.split())


def test_twelve_keys_have_an_alias_that_is_the_name_of_no_other_key():
    keys = config_keys()
    aliases = [key.alias for key in keys.values() if key.alias]
    assert len(set(aliases)) == len(aliases) == 11  # and --output-dir
    assert not set(aliases) & set(other_names({name: replace(key, alias="") for name, key in keys.items()}))


def test_a_key_of_a_file_leads_to_the_key_that_was_meant():
    for section, key, says in (
        ("training", "lr", "it is optimizer.lr"),
        ("optimizer", "warmup_steps", "it is schedule.warmup_steps"),
        ("training", "stepz", "the nearest is"),
    ):
        with pytest.raises(UserError, match=says):
            make_config({section: {key: 1}})


def test_a_cast_is_a_table_on_the_command_line():
    table = '{cast = "fp4-row", outliers = 0.99}'
    config = make_config(values("--recipe", "mxfp4", "--recipe.fprop.x", table))
    in_a_file = {"name": "mxfp4", "fprop": {"x": {"cast": "fp4-row", "outliers": 0.99}}}
    assert to_toml(config) == to_toml(make_config({"recipe": in_a_file}))
    assert config.spec.recipe.casts["fprop.x"].clamp.quantile == 0.99
    with pytest.raises(
        UserError, match=r"recipe\.fprop\.x = .* is not a TOML table; .* as in --recipe\.fprop\.x '"
    ):
        make_config(values("--recipe.fprop.x", "{cast = fp4-row}"))


def test_help_is_one_screen_and_all_of_it_when_asked(narrowgauge):
    short = narrowgauge("train", "--help", COLUMNS="100")
    assert short.code == 0
    assert len(short.out.splitlines()) <= 52
    assert max(map(len, short.out.splitlines())) <= 100
    # fprop.{x,w} stands for fprop.x, fprop.w
    listed = re.sub(r"(\w+)\.{(.*?)}", lambda m: " ".join(f"{m[1]}.{o}" for o in m[2].split(",")), short.out)
    whole = narrowgauge("train", "--help", "all", COLUMNS="100")
    for name, key in config_keys().items():
        section, _, ending = name.partition(".")
        assert f"--{section}.*" in short.out
        assert re.search(rf"\b{re.escape(ending)}\b", listed), name
        assert f"  --{name} {key.takes}" in whole.out
    for text in (short.out, whole.out):
        assert "PydanticUndefined" not in text
        assert "VALUE\n" not in text
    one = narrowgauge("plan", "--help", "optimizer").out
    assert one.startswith("[optimizer]\n  --optimizer.name adamw|muon")
    assert "[schedule]" not in one
    assert (
        "unknown section 'optimiser'; the nearest is 'optimizer'"
        in narrowgauge("train", "-h", "optimiser").err
    )


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_the_examples_of_the_help_are_read_as_the_command_reads_them(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").touch()
    words = shlex.split(line)
    options: argparse.Namespace = read_line(words[words.index("narrowgauge") + 1 :])
    if hasattr(options, "config"):
        assert make_config(config_values(options)).spec.recipe


def test_every_verb_has_an_example_and_a_group():
    assert set(EXAMPLES) | {"doctor"} >= set(VERBS)
    names = [name for names in grouped().values() for name in names]
    assert sorted(names) == sorted(VERBS)


def test_the_help_shows_groups_examples_and_what_is_required(narrowgauge):
    top = narrowgauge("--help").out
    assert all(f"\n{group}:\n" in top for group in grouped())
    assert "required: a named model" in narrowgauge("advise", "--help").out
    assert "examples:\n  narrowgauge sensitivity runs/mine" in narrowgauge("sensitivity", "--help").out


def test_models_lists_sizes_with_their_parameters(narrowgauge):
    listed = narrowgauge("models", COLUMNS="80")
    assert "…" not in listed.out, "no heading is cut"
    for name in model_names():
        assert re.search(rf"^ {re.escape(name)} +[\d.]+ [MB] ", listed.out, re.MULTILINE), name
    one = narrowgauge("models", "debug").out
    assert f"# {count_parameters(model_config('debug')):,} parameters" in one


@pytest.mark.tier("thorough")
def test_runs_lists_what_is_there_and_says_what_is_broken(narrowgauge, finished, look, tmp_path):
    runs = tmp_path / "runs"
    shutil.copytree(finished, runs / "one")
    shutil.copytree(finished, runs / "compared" / "fp8")
    shutil.copytree(finished, runs / "killed")
    (runs / "killed" / "status.json").write_text('{"status": "running", "reason": ""}')
    (runs / "killed" / ".lock").write_text(f"process {2**22 + 1} on host {os.uname().nodename}\n")
    with (runs / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    for name, content in (("no-toml", "[training"), ("a-list", "training = 3\nrecipe = 4\n")):
        (runs / name).mkdir()
        (runs / name / "config.toml").write_text(content)
    (runs / "metrics-alone").mkdir()
    (runs / "metrics-alone" / "metrics.jsonl").write_bytes(b"\xff\n[[[\n")
    (runs / "no-run").mkdir()
    listed = narrowgauge("runs", runs, COLUMNS="300")
    assert listed.code == 0, listed.err
    last = look(finished)
    loss, val_loss = f"{last.column('loss')[-1]:.4f}", f"{last.steps[-1]['val_loss']:.4f}"
    for name, state in (("one", "done"), ("compared/fp8", "done"), ("killed", "killed")):
        assert re.search(rf"/{name} +{state} +fp8 +6/6 +{loss} +{val_loss} *$", listed.out, re.MULTILINE), (
            name
        )
    for name in ("no-toml", "metrics-alone"):
        assert re.search(rf"/{name} +broken ", listed.out), name
    assert "metrics-alone broken: it has no config.toml" in listed.out
    assert "/no-run" not in listed.out
    told = json.loads(narrowgauge("runs", runs, "--json").out)
    assert [run["state"] for run in told if run["path"].endswith("/a-list")] == ["unknown"]
    absent = narrowgauge("runs", runs / "nowhere")
    assert (absent.code, "nowhere does not exist; name a folder" in absent.err) == (2, True)
    assert "no run directories in runs" in narrowgauge("runs", folder=runs / "no-run").out


def test_a_run_without_a_name_says_what_differs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def name(tables):
        return default_out(make_config(tables)).name

    assert name({}) == "debug-stdlib-fp8"
    assert name({"optimizer": {"lr": "1e-3"}, "training": {"seed": 3}}) == "debug-stdlib-fp8,seed=3,lr=0.001"
    assert name({"training": {"steps": 500}}) == "debug-stdlib-fp8", "the default is no difference"
    assert name({"log": {"every": 3}, "parallel": {"tensor": 2}}) == "debug-stdlib-fp8", (
        "nor what moves no loss"
    )
    odd = {"data": {"source": "a b/*.md,x;y.txt", "tokenizer": "/p" * 90}, "optimizer": {"lr": 1.25e-3}}
    many = odd | {
        "model": {"dim": 512, "layers": 3, "heads": 2, "kv_heads": 1, "ffn_dim": 64, "norm": "layer"}
    }
    for tables in (odd, many):
        assert re.fullmatch(r"[A-Za-z0-9_.+,=-]{1,100}", name(tables))
        tables = tables | {"optimizer": {"lr": 1.5e-3}}
        assert name(tables) != name(odd) != name(many), "what does not fit is in the digest"
    assert name(many) != name(many | {"optimizer": {"lr": 1.5e-3}})


@pytest.mark.tier("thorough")
def test_the_same_line_finds_a_run_under_an_older_name(tmp_path, monkeypatch, narrowgauge, line, look):
    """Before names carried keys, every line went to MODEL-SOURCE-RECIPE."""
    words = line({"training.steps": 2})
    monkeypatch.chdir(tmp_path)
    first = narrowgauge(*words, folder=tmp_path)
    assert first.code == 0, first.err
    (made,) = (tmp_path / "runs").iterdir()
    assert "-fp8," in made.name
    older = tmp_path / "runs" / made.name.partition(",")[0]
    made.rename(older)
    again = narrowgauge(*words, folder=tmp_path)
    assert f"runs/{older.name} is done" in again.out
    more = narrowgauge(*words, "--steps", "4", "--allow-change", "steps", folder=tmp_path)
    assert more.code == 0, more.err
    assert look(older).column("step") == [1, 2, 3, 4]
    same = narrowgauge(*words, "--steps", "4", folder=tmp_path)
    assert f"runs/{older.name} is done" in same.out, "what was changed on purpose goes on without the word"
    other = narrowgauge(*words, "--seed", "1", folder=tmp_path)
    assert other.code == 0, other.err
    assert len(list((tmp_path / "runs").iterdir())) == 2, "another line has a directory of its own"


def test_a_group_of_places_takes_one_cast(tmp_path):
    """`wgrad` is both of its operands, in a file and on the line; the line goes over the file."""
    file = tmp_path / "mine.toml"
    file.write_text('[recipe]\nname = "mxfp4"\n"wgrad.x" = "mxfp8"\nwgrad = "bf16"\n')

    def casts(*words):
        options = read_line(["train", str(file), *words])
        return {
            place: cast.name for place, cast in make_config(config_values(options)).spec.recipe.casts.items()
        }

    assert casts()["wgrad.dy"] == "bf16"
    assert casts()["wgrad.x"] == "mxfp8", "a place of its own goes over its group"
    assert casts()["fprop.x"] == "mxfp4"
    lined = casts("--recipe.wgrad", "e5m2")
    assert (lined["wgrad.dy"], lined["wgrad.x"]) == ("e5m2", "e5m2")
    assert casts("--fprop", "e4m3", "--recipe.fprop.w", "bf16")["fprop.w"] == "bf16"
    attention = make_config({"recipe": {"attention": "mxfp8"}}).spec.recipe.attention
    assert {cast and cast.name for cast in attention.values()} == {"mxfp8"}


def test_a_file_of_a_windows_editor_is_read(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_bytes(b"\xef\xbb\xbf[training]\r\nsteps = 3\r\n")
    options = read_line(["train", str(file)])
    assert make_config(config_values(options)).training.steps == 3


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        (
            "train --allow-change optimizer.lr --allow-change training.steps",
            "allow_change",
            "optimizer.lr,training.steps",
        ),
        ("compare --recipes bf16,fp8 --recipes mxfp4", "recipes", "bf16,fp8,mxfp4"),
        ("compare --rungs 100 --rungs 200,300", "rungs", "100,200,300"),
        ("compare --arms a --arms b", "arms", "a,b"),
        ("bench --peers te --peers torchao", "peers", "te,torchao"),
        ("scaling --procs 1 --procs 2", "procs", "1,2"),
        ("probe runs/x --recipes fp8 --recipes mxfp8", "recipes", "fp8,mxfp8"),
        ("search runs/x --formats mxfp4 --formats bf16 --budget 0.5 --out m.toml", "formats", "mxfp4,bf16"),
        ("search runs/x --formats a --budget 0.5 --out m.toml --keep head --keep b", "keep", "head,b"),
        ("predict --recipe fp8 --recipe nvfp4 --params 1B --tokens 1B", "recipe", "fp8,nvfp4"),
        ("train --log.sinks wandb --log.sinks trackio", "log.sinks", "wandb,trackio"),
        ("train --recipe.keep head --recipe.keep blocks.0.*", "recipe.keep", "head,blocks.0.*"),
        ("compare --seeds 3 --seeds 5", "seeds", "5"),
        ("train --betas 0.9,0.95 --betas 0.8,0.9", "optimizer.betas", "0.8,0.9"),
        ("train --steps 3 --steps 5", "training.steps", "5"),
    ],
)
def test_a_list_that_is_given_twice_is_one_list_and_a_value_is_the_last(line, name, value):
    assert getattr(read_line(line.split()), name) == value

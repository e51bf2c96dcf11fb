"""How an option is found, what help says, and where a run goes that is given no directory."""

import argparse
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.cli.line import GROUPS, VERBS, config_values, examples_of, function_of, read_line
from narrowgauge.trainer.runs import default_out
from narrowgauge.trainer.training import config_keys, make_config, to_toml
from narrowgauge.trainer.training.config.synonyms import other_names


def values(*words):
    return config_values(read_line(["train", *words]))


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("--lr 1e-3", "optimizer.lr", "1e-3"),
        ("--learning-rate -1e-3", "optimizer.lr", "-1e-3"),
        ("--optimizer muon", "optimizer.name", "muon"),
        ("--fprop.x bf16", "recipe.fprop.x", "bf16"),
        ("--compile", "training.compile", "true"),
        ("--recompute --steps 3", "training.recompute", "true"),
    ],
)
def test_an_option_is_found_by_its_other_names(line, key, value):
    section, _, name = key.partition(".")
    assert values(*line.split())[section][name] == value


def test_aliases_are_the_names_of_no_other_key():
    assert str(read_line(["train", "--output-dir", "runs/mine"]).out) == "runs/mine"
    keys = config_keys()
    aliases = [key.alias for key in keys.values() if key.alias]
    assert len(set(aliases)) == len(aliases)
    assert not set(aliases) & set(other_names({name: replace(key, alias="") for name, key in keys.items()}))


def test_a_cast_is_a_table_on_the_command_line():
    table = '{cast = "fp4-row", outliers = 0.99}'
    config = make_config(values("--recipe", "mxfp4", "--recipe.fprop.x", table))
    in_a_file = {"name": "mxfp4", "fprop": {"x": {"cast": "fp4-row", "outliers": 0.99}}}
    assert to_toml(config) == to_toml(make_config({"recipe": in_a_file}))
    assert config.spec.recipe.casts["fprop.x"].outliers == 0.99
    says = r"recipe\.fprop\.x = .* is not a TOML table; .* as in --recipe\.fprop\.x '"
    with pytest.raises(UserError, match=says):
        make_config(values("--recipe.fprop.x", "{cast = fp4-row}"))


def test_a_group_of_places_takes_one_cast(tmp_path):
    """`wgrad` is both of its operands, in a file and on the line; the line goes over the file."""
    file = tmp_path / "mine.toml"
    file.write_text('[recipe]\nname = "mxfp4"\n"wgrad.x" = "mxfp8"\nwgrad = "bf16"\n')

    def casts(*words):
        recipe = make_config(config_values(read_line(["train", str(file), *words]))).spec.recipe
        return {place: cast.name for place, cast in recipe.casts.items()}

    found = casts()
    assert (found["wgrad.dy"], found["wgrad.x"], found["fprop.x"]) == ("bf16", "mxfp8", "mxfp4")
    lined = casts("--recipe.wgrad", "e5m2")
    assert (lined["wgrad.dy"], lined["wgrad.x"]) == ("e5m2", "e5m2")
    assert casts("--fprop", "e4m3", "--recipe.fprop.w", "bf16")["fprop.w"] == "bf16"
    attention = make_config({"recipe": {"attention": "mxfp8"}}).spec.recipe.attention
    assert {cast and cast.name for cast in attention.values()} == {"mxfp8"}


def test_a_file_of_a_windows_editor_is_read(tmp_path):
    (tmp_path / "mine.toml").write_bytes(b"\xef\xbb\xbf[training]\r\nsteps = 3\r\n")
    assert make_config(values(str(tmp_path / "mine.toml"))).training.steps == 3


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("train --allow-change lr --allow-change steps", "allow_change", ("lr", "steps")),
        ("compare --rungs 100 --rungs 200,300", "rungs", (100, 200, 300)),
        ("scaling --procs 1 --procs 2", "procs", "1,2"),
        ("train --log.sinks wandb --log.sinks trackio", "log.sinks", "wandb,trackio"),
        ("compare --seeds 3 --seeds 5", "seeds", 5),
        ("train --betas 0.9,0.95 --betas 0.8,0.9", "optimizer.betas", "0.8,0.9"),
    ],
)
def test_a_list_that_is_given_twice_is_one_list_and_a_value_is_the_last(line, name, value):
    assert getattr(read_line(line.split()), name) == value


def test_help_is_one_screen_and_one_section_when_asked(command):
    """tests/golden has the keys and options that it lists."""
    short = command("train", "--help", COLUMNS="100")
    assert short.code == 0
    assert len(short.out.splitlines()) <= 52
    assert max(map(len, short.out.splitlines())) <= 100
    for text in (short.out, command("train", "--help", "all").out):
        assert "PydanticUndefined" not in text
        assert "VALUE\n" not in text
    one = command("plan", "--help", "optimizer").out
    assert one.startswith("[optimizer]\n  --optimizer.name adamw|muon")
    assert "[schedule]" not in one
    says = "unknown section 'optimiser'; the nearest is 'optimizer'"
    assert says in command("train", "-h", "optimiser").err


@pytest.mark.parametrize("line", [line for verb in VERBS for line in examples_of(function_of(verb))])
def test_the_examples_of_the_help_are_read_as_the_command_reads_them(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").touch()
    words = shlex.split(line)
    options: argparse.Namespace = read_line(words[words.index("narrowgauge") + 1 :])
    if hasattr(options, "config"):
        assert make_config(config_values(options)).spec.recipe


def test_every_verb_has_an_example_and_a_group(command):
    assert all(examples_of(function_of(verb)) or verb == "doctor" for verb in VERBS)
    assert all(f"\n{group}:\n" in command("--help").out for group in GROUPS)
    assert command() == command("--help")
    assert "required: a named model" in command("advise", "--help").out
    assert "examples:\n  narrowgauge sensitivity runs/mine" in command("sensitivity", "--help").out


def test_a_run_without_a_name_says_what_differs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def name(tables):
        return default_out(make_config(tables)).name

    plain = "debug-stdlib-fp8"
    assert name({"optimizer": {"lr": "1e-3"}, "training": {"seed": 3}}) == f"{plain},seed=3,lr=0.001"
    for same in ({}, {"training": {"steps": 500}}, {"log": {"every": 3}, "parallel": {"tensor": 2}}):
        assert name(same) == plain, "defaults and keys that cannot change a loss are left out of the name"
    odd = {"data": {"source": "a b/*.md,x;y.txt", "tokenizer": "/p" * 90}, "optimizer": {"lr": 1.25e-3}}
    dims = {"dim": 512, "layers": 3, "heads": 2, "kv_heads": 1, "ffn_dim": 64, "norm": "layer"}
    other = {"optimizer": {"lr": 1.5e-3}}
    many = odd | {"model": dims}
    found = [name(tables) for tables in (odd, odd | other, many, many | other)]
    assert len(set(found)) == 4, "what does not fit is in the digest"
    assert all(re.fullmatch(r"[A-Za-z0-9_.+,=-]{1,100}", name) for name in found)


@pytest.mark.tier("thorough")
def test_the_same_line_finds_a_run_under_an_older_name(tmp_path, monkeypatch, command, line, look):
    """Before names carried keys, every line went to MODEL-SOURCE-RECIPE."""
    words = line({"training.steps": 2})
    monkeypatch.chdir(tmp_path)
    assert command(*words).code == 0
    (made,) = Path("runs").iterdir()
    assert "-fp8," in made.name
    older = made.rename(made.with_name(made.name.partition(",")[0]))
    assert f"runs/{older.name} is done" in command(*words).out
    assert command(*words, "--steps", "4", "--allow-change", "steps").code == 0
    assert look(tmp_path / older).column("step") == [1, 2, 3, 4]
    same = command(*words, "--steps", "4")
    assert f"runs/{older.name} is done" in same.out, "what was changed on purpose goes on without the word"
    assert command(*words, "--seed", "1").code == 0
    assert len(list(Path("runs").iterdir())) == 2, "another line has a directory of its own"

"""The configurations that ship are valid, and those that their source names."""

import shlex
from pathlib import Path

import pytest

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import shipped_names
from narrowgauge.trainer.cli.line import config_values, read_line
from narrowgauge.trainer.models import count_parameters
from narrowgauge.trainer.models.published import published
from narrowgauge.trainer.training import load_values, make_config
from narrowgauge.trainer.training.config.config import config_names, published_config, with_published

# tokens in all and parameters, both in billions, as MS-AMP's scripts are known for
PUBLISHED = {"gpt3-345m": (32.8, 0.355), "gpt3-6.7b": (100, 6.66), "gpt3-13b": (300, 12.85)}


def values_of(line):
    return config_values(read_line(shlex.split(line)))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_ready_configuration_is_the_run_it_names(name):
    config = make_config(load_values(Path(name)))
    tokens, parameters = PUBLISHED[name]
    t, s = config.training, config.schedule
    assert config.model.name == name
    assert t.steps * t.batch_size * config.data.sequence_length / 1e9 == pytest.approx(tokens, rel=0.002)
    assert count_parameters(config.spec.model) / 1e9 == pytest.approx(parameters, rel=0.002)
    assert s.warmup_steps < t.steps
    stated = make_config(published_config(name, published(name)))
    assert t.steps == pytest.approx(stated.training.steps, rel=0.002)
    for path in (
        *("data.sequence_length", "training.batch_size", "optimizer.lr", "optimizer.weight_decay"),
        *("schedule.warmup_steps", "schedule.final_lr_fraction"),
    ):
        section, key = path.split(".")
        assert getattr(getattr(config, section), key) == getattr(getattr(stated, section), key), path


def test_each_name_is_a_valid_configuration_wherever_a_file_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no checkout is near
    assert shipped_names("trainer/training/config/shipped") == sorted(PUBLISHED)
    for name in config_names():
        config = make_config(values_of(f"train {name} --recipe fp8"))
        assert (config.model.name, config.recipe.name) == (name, "fp8")
    with pytest.raises(UserError, match="one that ships: gpt2-"):
        load_values(Path("gpt9"))
    (tmp_path / "gpt3-13b").write_text("[training]\nsteps = 7\n")
    assert load_values(Path("gpt3-13b")) == {"training": {"steps": 7}}, "a file of the reader comes first"


def test_what_is_given_stays_and_few_steps_shorten_the_warm_up():
    given = values_of("plan --model gpt2-124m --steps 500 --training.batch_size 8")
    values, note = with_published(given)
    config = make_config(values)
    assert (config.training.steps, config.training.batch_size) == (500, 8)
    assert (config.data.sequence_length, config.schedule.warmup_steps) == (1024, 50)
    assert note.startswith("what the line leaves out is as published: github.com/karpathy/llm.c")
    assert with_published({"model": {"name": "debug"}}) == ({"model": {"name": "debug"}}, "")

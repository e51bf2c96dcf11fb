"""The ready configurations in `configs/` are valid, and their models those that their source names."""

from pathlib import Path

import pytest

from narrowgauge.models import count_parameters
from narrowgauge.training import load_values, make_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))
# tokens in all and parameters, both in billions, as MS-AMP's scripts are known for
PUBLISHED = {"gpt3-345m": (32.8, 0.355), "gpt3-6.7b": (100, 6.66), "gpt3-13b": (300, 12.85)}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_ready_configuration_is_the_run_it_names(path):
    config = make_config(load_values(path))
    tokens, parameters = PUBLISHED[config.model.name]
    t, s = config.training, config.schedule
    assert config.model.name == path.stem
    assert t.steps * t.batch_size * config.data.sequence_length / 1e9 == pytest.approx(tokens, rel=0.002)
    assert count_parameters(config.spec.model) / 1e9 == pytest.approx(parameters, rel=0.002)
    assert s.warmup_steps < s.decay_steps < t.steps


def test_there_is_one_for_each():
    assert {path.stem for path in CONFIGS} == set(PUBLISHED)

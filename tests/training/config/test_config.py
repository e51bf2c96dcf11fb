"""The configuration: its keys, its rules, its text."""

import json
import tomllib
from pathlib import Path

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.errors import UserError
from narrowgauge.recipes import GROUPS, KEYS
from narrowgauge.training import Config, config_keys, load_values, make_config, to_toml
from narrowgauge.training.config.diff import trajectory

PLACES = (*KEYS, *GROUPS)


def test_keys_are_every_field_and_every_place():
    fields = {f"{s}.{k}" for s, section in Config() for k in type(section).model_fields}
    assert set(config_keys()) == fields - {"recipe.places"} | {f"recipe.{place}" for place in PLACES}
    assert all(key.description for key in config_keys().values()), "each key is described"


@pytest.mark.parametrize("key", [k for k in config_keys() if k.removeprefix("recipe.") not in PLACES])
def test_a_default_given_as_text_is_the_default(key):
    section, _, name = key.partition(".")
    value = getattr(getattr(Config(), section), name)
    if value is None:  # of the named model
        value = getattr(Config().spec.model, name)
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    values = {section: {name: text}}
    if key == "training.micro_batch_size":  # the size that a user gives stays
        assert not make_config(values).training.fit_micro_batch
        values[section]["fit_micro_batch"] = "true"
    assert to_toml(make_config(values)) == to_toml(Config())


def test_a_described_default_is_the_default():
    keys = config_keys()
    assert str(keys["training.steps"]).endswith(f"({Config().training.steps})")
    assert str(keys["optimizer.betas"]).endswith("(0.9,0.95)")
    assert str(keys["training.compile"]).endswith("(false)")
    for name in ("data.weights", "optimizer.groups", "model.dim", "training.memory_limit"):
        assert keys[name].default == "", "nothing, or as the named model has it"


def test_a_key_says_what_it_takes():
    takes = {name: key.takes for name, key in config_keys().items()}
    assert takes["training.steps"] == takes["model.dim"] == "N"
    assert takes["optimizer.lr"] == takes["model.rope_theta"] == "X"
    assert takes["training.compile"] == takes["model.tied_head"] == "true|false"
    assert takes["schedule.kind"] == "cosine|linear|wsd|constant"
    assert takes["model.positions"] == "learned|rope"
    assert (takes["optimizer.betas"], takes["data.weights"]) == ("X,X", "X,...")
    assert (takes["recipe.fprop.x"], takes["recipe.compute"]) == ("CAST", "bf16|fp16|fp32")
    assert takes["log.sinks"] == "tensorboard|wandb|trackio,..."


def test_a_configuration_does_not_change():
    with pytest.raises(pydantic.ValidationError):
        Config().training.steps = 3


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"optimiser": {}}, ["unknown section 'optimiser'", "'optimizer'"]),
        ({"optimizer": {"learning_rate": 1}}, ["unknown key 'optimizer.learning_rate'; it is optimizer.lr"]),
        ({"model": {"layer": 3}}, ["unknown key 'model.layer'", "'model.layers'"]),
        ({"model": {"name": "gpt2-124"}}, ["unknown model 'gpt2-124'", "'gpt2-124m'"]),
        ({"recipe": {"name": "mxpf4"}}, ["unknown recipe 'mxpf4'", "'mxfp4'"]),
        ({"recipe": {"backend": "nativ"}}, ["unknown backend 'nativ'", "'native'"]),
        ({"recipe": {"fprop.q": "bf16"}}, ["unknown key 'recipe.fprop.q'"]),
        ({"recipe": {"fprop": {"q": "bf16"}}}, ["unknown key 'recipe.fprop.q'"]),
        ({"recipe": {"fprop.x": "bf61"}}, ["unknown cast 'bf61'", "'bf16'"]),
        ({"recipe": {"places": 3}}, ["recipe.places = 3", "dictionary"]),
        ({"recipe": {"master": "bf16"}}, ["master = 'bf16'", "fp32"]),
        ({"training": {"steps": 0}}, ["training.steps = 0", "greater than or equal to 1"]),
        ({"training": {"steps": "ten"}}, ["training.steps = 'ten'", "integer"]),
        ({"training": {"seed": 2**63}}, ["training.seed", "less than"]),
        ({"training": 5}, ["training = 5"]),
        ({"training": {"batch_size": 6, "micro_batch_size": 4}}, ["batch_size = 6", "micro_batch_size = 4"]),
        ({"optimizer": {"lr": "nan"}}, ["optimizer.lr"]),
        ({"optimizer": {"lr": "inf"}}, ["optimizer.lr", "finite"]),
        ({"optimizer": {"betas": [0.9, 1.0]}}, ["optimizer.betas", "less than 1"]),
        ({"optimizer": {"betas": [0.9]}}, ["optimizer.betas"]),
        ({"schedule": {"kind": "cosin"}}, ["schedule.kind = 'cosin'", "'cosine'"]),
        ({"checkpoint": {"keep": 1}}, ["checkpoint.keep = 1", "2"]),
        ({"data": {"sequence_length": 2048}}, ["2048", "max_sequence_length = 1024", "--model.max"]),
        ({"model": {"heads": 3}}, ["model.dim = 256", "heads = 3"]),
        ({"log": {"prompt": "\udcff"}}, ["log.prompt", "UTF-8"]),
    ],
    ids=str,
)
def test_what_is_refused_is_named(values, words):
    with pytest.raises(UserError) as error:
        make_config(values)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_places_dotted_or_nested_are_the_same():
    dotted = make_config({"recipe": {"name": "bf16", "fprop.x": "mxfp4", "wgrad.x": "e4m3"}})
    nested = make_config({"recipe": {"name": "bf16", "fprop": {"x": "mxfp4"}, "wgrad": {"x": "e4m3"}}})
    assert dotted == nested
    casts = dotted.spec.recipe.casts
    assert (casts["fprop.x"].name, casts["wgrad.x"].name, casts["fprop.w"].name) == ("mxfp4", "e4m3", "bf16")


def test_a_dimension_overrides_the_named_size():
    model = make_config({"model": {"name": "gpt2-124m", "layers": "3"}}).spec.model
    assert (model.layers, model.dim) == (3, 768)


def test_names_are_resolved_once(tmp_path):
    """A recipe's file that changes while a run is on its way does not change the run."""
    file = tmp_path / "own.toml"
    file.write_text('fprop = "mxfp4"\n')
    values = {"recipe": {"name": str(file)}, "training": {"recompute": True, "seed": 5}}
    config = make_config(values)
    spec = config.spec
    file.write_text('fprop = "bf16"\n')
    assert config.spec is spec
    assert spec.recipe.casts["fprop.x"].name == "mxfp4"
    assert (spec.seed, spec.backend, spec.recompute, spec.chunked_loss) == (5, "auto", 1, False)
    assert make_config(values).spec.recipe.casts["fprop.x"].name == "bf16"


def test_recomputation_is_true_false_or_selective():
    def config(value):
        return make_config({"training": {"recompute": value, "recompute_every": 2}})

    specs = [config(value).spec for value in (False, "true", True, "selective")]
    assert [(s.recompute, s.selective) for s in specs] == [(0, False), (2, False), (2, False), (2, True)]
    assert make_config(tomllib.loads(to_toml(config("selective")))).training.recompute == "selective"
    with pytest.raises(UserError, match=r"recompute = 'selektive': input should be true, false or selective"):
        config("selektive")


def test_a_copy_with_other_sections_is_resolved_anew():
    config = make_config({"model": {"name": "debug"}})
    layers = config.spec.model.layers
    other = config.model_copy(update={"model": config.model.model_copy(update={"layers": layers + 2})})
    assert other.spec.model.layers == layers + 2
    assert config.spec.model.layers == layers
    assert make_config({"model": {"name": "debug"}}) == config


CASTS = st.sampled_from(["bf16", "e4m3", "mxfp4", {"cast": "nvfp4", "rounding": "stochastic"}])
POSITIVE = st.floats(min_value=1e-300, max_value=1e300)
VALUES = st.fixed_dictionaries(
    {
        "training": st.fixed_dictionaries(
            {"steps": st.integers(1, 10**12), "seed": st.integers(0, 2**63 - 1), "compile": st.booleans()}
        ),
        "optimizer": st.fixed_dictionaries(
            {
                "lr": POSITIVE,
                "betas": st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2),
                "clip_norm": POSITIVE | st.just(float("inf")),
            }
        ),
        "recipe": st.fixed_dictionaries({}, optional={"fprop.x": CASTS, "dgrad.dy": CASTS}),
        "data": st.fixed_dictionaries({"source": st.text(), "tokenizer": st.text()}),
        "log": st.fixed_dictionaries({"prompt": st.text()}),
    }
)


@pytest.mark.tier("thorough")
@given(VALUES)
def test_the_text_makes_the_same_configuration(values):
    config = make_config(values)
    text = to_toml(config)
    again = make_config(tomllib.loads(text))
    assert to_toml(again) == text
    assert again.spec.model == config.spec.model
    for section in ("data", "training", "optimizer", "schedule", "recipe", "log"):
        assert getattr(again, section) == getattr(config, section)


def test_the_trajectory_is_what_moves_losses():
    sections = trajectory(Config())
    assert set(sections) == {"model", "data", "training", "optimizer", "schedule", "recipe", "guard"}
    assert sections["model"]["dim"] == 256, "resolved, so that a named size and its dimensions are one"
    assert json.dumps(sections) == json.dumps(trajectory(make_config({"model": {"dim": 256}})))


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"steps = = 3", "line 1"), (b"prompt = '\xff'", "utf-8"), (None, "next to it are other.toml")],
    ids=["no TOML", "no UTF-8", "missing"],
)
def test_an_unreadable_file_is_named(tmp_path: Path, content, words):
    (tmp_path / "other.toml").touch()
    file = tmp_path / "mine.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=r"mine\.toml") as error:
        load_values(file)
    assert words in str(error.value)


def test_a_directory_is_no_configuration_file(tmp_path: Path):
    with pytest.raises(UserError, match=r"is a directory, .*; name a \.toml file"):
        load_values(tmp_path)
    (tmp_path / "config.toml").touch()
    with pytest.raises(UserError, match=r"that of this run is .*config\.toml"):
        load_values(tmp_path)


def test_groups_of_the_optimizer_come_from_both_doors(tmp_path):
    groups = {"*.bias": {"lr_factor": 2.0}}
    (tmp_path / "c.toml").write_text('[optimizer.groups]\n"*.bias" = {lr_factor = 2.0}\n')
    from_file = make_config(load_values(tmp_path / "c.toml"))
    from_line = make_config({"optimizer": {"groups": '{"*.bias": {"lr_factor": 2.0}}'}})
    assert from_file.optimizer.groups == from_line.optimizer.groups == groups
    (tmp_path / "again.toml").write_text(to_toml(from_file))
    assert to_toml(make_config(load_values(tmp_path / "again.toml"))) == to_toml(from_file)
    with pytest.raises(UserError, match="on the command line it is JSON"):
        make_config({"optimizer": {"groups": "*.bias=2"}})


def test_places_on_the_host_come_from_both_doors(tmp_path):
    (tmp_path / "c.toml").write_text('[recipe]\nname = "msamp-o3"\noffload = ["m", "master"]\n')
    from_file = make_config(load_values(tmp_path / "c.toml"))
    from_line = make_config({"recipe": {"name": "msamp-o3", "offload": "m, master"}})
    assert from_file.spec.recipe.offload == from_line.spec.recipe.offload == ("master", "m")
    with pytest.raises(UserError, match="place to offload 'weight'"):
        make_config({"recipe": {"offload": "weight"}})


def test_a_rule_that_waits_for_a_decay_needs_a_schedule_that_has_one(tmp_path):
    (tmp_path / "finish.toml").write_text('fprop = "mxfp4"\n[[rule]]\nfrom = "decay"\nfprop = "bf16"')
    values = {"recipe": {"name": str(tmp_path / "finish.toml")}, "schedule": {"kind": "constant"}}
    with pytest.raises(UserError, match=r"waits for the decay .* schedule\.kind = 'constant' has none"):
        make_config(values)
    values |= {"schedule": {"kind": "wsd"}, "training": {"steps": 500}}
    assert make_config(values).plan.decay_start == 401


@pytest.mark.parametrize(("steps", "warmup"), [(20, 100), (1, 2), (100, 100), (20, 0)])
def test_a_warm_up_that_outlasts_the_run_is_said(steps, warmup):
    plan = make_config({"training": {"steps": steps}, "schedule": {"warmup_steps": warmup}}).plan
    says = f"the warm-up of {warmup} steps is longer than the run"
    assert plan.warning.startswith(says) == bool(plan.warning) == (warmup > steps)

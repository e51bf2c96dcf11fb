"""The configuration: its keys, its rules, its text."""

import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.recipes import GROUPS, KEYS
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.training import Config, config_keys, load_values, make_config, to_toml

PLACES = (*KEYS, *GROUPS)


def test_a_default_given_as_text_is_the_default():
    expected = to_toml(Config())
    for key in [k for k in config_keys() if k.removeprefix("recipe.") not in PLACES]:
        section, _, name = key.partition(".")
        value = getattr(getattr(Config(), section), name)
        if value is None:  # of the named model
            value = getattr(Config().spec.model, name)
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        values = {section: {name: text}}
        if key == "training.micro_batch_size":  # the size that a user gives stays
            assert not make_config(values).training.fit_micro_batch
            values[section]["fit_micro_batch"] = "true"
        assert to_toml(make_config(values)) == expected, key


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"recipe": {"backend": "nativ"}}, ["unknown backend 'nativ'", "'native'"]),
        ({"recipe": {"places": 3}}, ["recipe.places = 3", "dictionary"]),
        ({"recipe": {"master": "bf16"}}, ["master = 'bf16'", "fp32"]),
        ({"training": {"steps": "ten"}}, ["training.steps = 'ten'", "integer"]),
        ({"training": {"seed": 2**63}}, ["training.seed", "less than"]),
        ({"optimizer": {"betas": [0.9, 1.0]}}, ["optimizer.betas", "less than 1"]),
        ({"schedule": {"kind": "cosin"}}, ["schedule.kind = 'cosin'", "'cosine'"]),
        ({"checkpoint": {"keep": 1}}, ["checkpoint.keep = 1", "2"]),
        ({"data": {"sequence_length": 2048}}, ["2048", "max_sequence_length = 1024", "--model.max"]),
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


def test_a_key_that_is_gone_is_read_where_it_says_what_holds_now(tmp_path):
    file = tmp_path / "older.toml"
    file.write_text('[guard]\nspike = "raise"\nraise_steps = inf\nraise_budget = 4\nlower_after = 0\n')
    assert make_config(load_values(file)).guard.spike == "raise"
    file.write_text("[guard]\nlower_after = 6\n")
    with pytest.raises(UserError, match=r"guard\.lower_after = 6: this key is gone, and 0 is its value"):
        load_values(file)


CASTS = st.sampled_from(["bf16", "e4m3", "mxfp4", {"cast": "nvfp4", "rounding": "stochastic"}])
POSITIVE = st.floats(min_value=1e-300, max_value=1e300)
BETAS = st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2)
FIXED = st.fixed_dictionaries
VALUES = FIXED(
    {
        "training": FIXED({"steps": st.integers(1, 10**12), "seed": st.integers(0, 2**63 - 1)}),
        "optimizer": FIXED({"lr": POSITIVE, "betas": BETAS, "clip_norm": POSITIVE | st.just(float("inf"))}),
        "recipe": FIXED({}, optional={"fprop.x": CASTS, "dgrad.dy": CASTS}),
        "data": FIXED({"source": st.text(), "tokenizer": st.text()}),
        "log": FIXED({"prompt": st.text()}),
    }
)


@pytest.mark.tier("thorough")
@settings(max_examples=25)
@given(VALUES)
def test_the_text_makes_the_same_configuration(values):
    config = make_config(values)
    text = to_toml(config)
    again = make_config(tomllib.loads(text))
    assert to_toml(again) == text
    assert again.spec.model == config.spec.model
    for section in ("data", "training", "optimizer", "schedule", "recipe", "log"):
        assert getattr(again, section) == getattr(config, section)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "other.toml").touch()
    file = tmp_path / "mine.toml"
    for make, words in (
        (lambda: None, "does not exist; name a .toml file, or one that ships: "),
        (lambda: file.write_bytes(b"steps = = 3"), "line 1"),
        (lambda: file.write_bytes(b"prompt = '\xff'"), "utf-8"),
        (lambda: file.unlink() or file.mkdir(), "is a directory, "),
        (lambda: (file / "config.toml").touch(), "that of this run is "),
    ):
        make()
        with pytest.raises(UserError, match=r"mine\.toml") as error:
            load_values(file)
        assert words in str(error.value)


GROUPED = '[optimizer.groups]\n"*.bias" = {lr_factor = 2.0}\n'
PLACED = '[recipe]\nname = "msamp-o3"\noffload = ["m", "master"]\n'
LINED = {"groups": '{"*.bias": {"lr_factor": 2.0}}'}
#: A section in a file, the same on the command line, and what is refused there.
DOORS = [
    ("optimizer", GROUPED, LINED, {"groups": "*.bias=2"}, "it is JSON"),
    ("recipe", PLACED, {"name": "msamp-o3", "offload": "m, master"}, {"offload": "weight"}, "to offload"),
]


@pytest.mark.parametrize(("section", "in_toml", "on_the_line", "wrong", "words"), DOORS)
def test_groups_and_places_on_the_host_come_from_both_doors(
    tmp_path, section, in_toml, on_the_line, wrong, words
):
    (tmp_path / "c.toml").write_text(in_toml)
    from_file, from_line = make_config(load_values(tmp_path / "c.toml")), make_config({section: on_the_line})
    again = make_config(tomllib.loads(to_toml(from_file)))
    found = [(c.optimizer.groups, c.spec.recipe.offload) for c in (from_file, from_line, again, Config())]
    assert found[0] == found[1] == found[2] != found[3]
    with pytest.raises(UserError, match=words):
        make_config({section: wrong})


def test_a_rule_that_waits_for_a_decay_needs_a_schedule_that_has_one(tmp_path):
    (tmp_path / "finish.toml").write_text('fprop = "mxfp4"\n[[rule]]\nfrom = "decay"\nfprop = "bf16"')
    values = {"recipe": {"name": str(tmp_path / "finish.toml")}, "schedule": {"kind": "constant"}}
    with pytest.raises(UserError, match=r"waits for the decay .* schedule\.kind = 'constant' has none"):
        make_config(values)
    values |= {"schedule": {"kind": "wsd"}, "training": {"steps": 500}}
    assert make_config(values).decay_start == 401


def test_a_warm_up_that_outlasts_the_run_is_said():
    for steps, warmup in [(20, 100), (1, 2), (100, 100), (20, 0)]:
        config = make_config({"training": {"steps": steps}, "schedule": {"warmup_steps": warmup}})
        says = f"the warm-up of {warmup} steps is longer than the run"
        assert config.warning.startswith(says) == bool(config.warning) == (warmup > steps)

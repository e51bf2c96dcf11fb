"""The guard raises: the place that broke becomes wider. Kills around a raise: faults/test_numerics.py."""

import math

import pytest
import torch

from faults.inject import gradient, outgrow
from narrowgauge.guard.raises import Raise
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint import load, steps
from narrowgauge.trainer.data import prepare
from narrowgauge.trainer.runs import open_run
from narrowgauge.trainer.training import make_config
from narrowgauge.trainer.training.step.trainer import Trainer
from support.in_process import run_here

CPU = torch.device("cpu")
FAULT = 27  # the step from which inputs do not fit scales that are older than they are
RUN = {
    "recipe.name": "fp8-delayed",
    "training.steps": 40,
    "training.batch_size": 4,
    "optimizer.lr": 0.01,
    "checkpoint.every": 4,
    "checkpoint.keep": 40,
    "validation.every": 100,
    "guard.spike": "raise",
    "guard.spike_window": 12,
    "guard.spike_factor": 3.0,
}
LAYERS = [f"blocks.{i}.{name}" for i in range(2) for name in ("qkv", "attention_out", "gate_up", "down")]


@pytest.fixture(scope="module")
def raised(tiny, tmp_path_factory):
    """A run in which a place was raised, made once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_accumulate", Trainer._accumulate)
        outgrow(FAULT)
        return run_here(tiny(RUN), tmp_path_factory.mktemp("raised") / "run")


@pytest.mark.tier("thorough")  # a whole run
def test_the_place_that_broke_is_widened_written_down_as_a_rule_and_the_run_goes_on(raised, look, tmp_path):
    ran = look(raised)
    (event,) = ran.events("raise")
    assert event["place"] == "fprop.x"
    assert set(event["layers"]) <= set(LAYERS)
    assert len(event["layers"]) > 4
    assert (event["from"], event["to"]) == ("e4m3", "bf16")
    assert event["step"] <= FAULT - 1
    assert (event["step"] - 1) % 4 == 0, "the step after a checkpoint"
    assert ran.events("rollback") == ran.events("skip") == []
    assert ran.column("step") == list(range(1, 41)), "each step once, in order"
    loss = ran.column("loss")
    assert max(loss[FAULT:]) < 1.2 * max(loss[FAULT - 8 : FAULT - 1]), "no trace of the spike"

    again = tmp_path / "again.toml"
    again.write_text((raised / "recipe.toml").read_text())
    rule = make_config({"recipe": {"name": str(again)}}).spec.recipe.rules[0]
    assert (rule.modules, rule.start.step) == (tuple(event["layers"]), event["step"])
    assert {place: cast.name for place, cast in rule.casts.items()} == {"fprop.x": "bf16", "wgrad.x": "bf16"}

    model = open_run(raised, "cpu").model
    wide = [name for name in LAYERS if model.get_submodule(name).spec.casts["fprop.x"].name == "bf16"]
    assert sorted(wide) == sorted(event["layers"])


@pytest.mark.tier("thorough")
def test_a_step_that_is_not_finite_for_another_reason_is_skipped(train, look, monkeypatch):
    monkeypatch.setattr(Trainer, "train_step", Trainer.train_step)
    gradient([3], math.nan, "blocks.1.down")
    ran = look(train("none", RUN | {"training.steps": 5}))
    assert not ran.events("raise")
    (skip,) = ran.events("skip")
    assert (skip["step"], skip["reason"].endswith("; no place broke")) == (3, True)


# State: re-cast from the checkpoint, in any place.
STATE = {
    "recipe.name": "msamp-o3",
    "recipe.v": "e4m3",
    "model.dim": 128,
    "model.ffn_dim": 128,
    "model.layers": 1,
    "guard.spike": "raise",
}


@pytest.fixture(scope="module")
def begun(tiny):
    config = make_config(tiny(STATE))
    trainer = Trainer.begin(config, CPU)
    corpus = prepare(config.data.source, config.data.tokenizer)
    with trainer.batches(corpus.train) as batches:
        for _ in range(2):
            trainer.train_step(batches)
    return config, trainer, corpus


@pytest.mark.tier("thorough")
@pytest.mark.tier("nightly", keep=("v", "weight", "master"))
@pytest.mark.parametrize("place", ["v", "m", "weight", "master", "grad"])
def test_state_is_cast_again_and_the_rest_keeps_its_bits(begun, place, tmp_path):
    config, trainer, corpus = begun
    path = trainer.plan_save(tmp_path, "id").write()
    before = load(path).tensors
    other = Trainer.begin(config, CPU)
    other.restore(path)
    other.guard.raised.append(Raise(place, ("blocks.0.down",), "narrow", "fp32", 3))
    other.follow_rules()
    p = other.model.blocks[0].down.weight
    kept = other.optimizer.moments(p) | dict(p.narrowgauge.by_place())
    assert place not in kept or kept[place].cast.name == "fp32"
    assert place != "weight" or p.dtype == torch.float32
    saved = load(other.plan_save(tmp_path / "raised", "id").write())
    for group, named in before.items():
        for name, tensor in named.items():
            if not name.startswith("blocks.0.down"):
                assert tensor.equal(saved.tensors[group][name]), name
    again = Trainer.begin(config, CPU)
    again.restore(tmp_path / "raised" / f"step-{steps(tmp_path / 'raised')[-1]}")
    results = []
    for trainer in (other, again):
        with trainer.batches(corpus.train) as batches:
            results.append([trainer.train_step(batches)[:2] for _ in range(2)])
    assert results[0] == results[1]
    for trainer in (other, again):
        trainer.guard.raised.clear()  # as a branch does
        trainer.follow_rules()
        p = trainer.model.blocks[0].down.weight
        now = trainer.optimizer.moments(p) | dict(p.narrowgauge.by_place())
        assert now[place].cast == config.spec.recipe.state[place]


@pytest.mark.tier("thorough")  # a whole run
def test_what_a_checkpoint_had_lost_is_raised_from_an_older_one(train, look, monkeypatch):
    """The norm is large in step 14, unless `v` was wide before step 12."""
    take = Trainer.train_step
    options = STATE | {"training.steps": 16, "checkpoint.every": 4, "guard.spike_window": 8}

    def train_step(self, *args, **kwargs):
        late = self.guard.raised and self.guard.raised[0].from_step > 12
        weight = self.model.head.weight
        hook = weight.register_hook(lambda g: g * 1e4) if self.step == 13 and late else None
        result = take(self, *args, **kwargs)
        if hook is not None:
            hook.remove()
        if self.step == 12 and not self.guard.raised:
            self.guard.raised.append(Raise("v", ("head",), "e4m3", "fp32", 13))
            self.follow_rules()
        return result

    monkeypatch.setattr(Trainer, "train_step", train_step)
    ran = look(train("late", options))
    (event,) = ran.events("raise")
    assert (event["place"], event["step"]) == ("v", 9), "the checkpoint before the one of step 12"
    assert not ran.events("rollback")
    assert ran.column("step") == list(range(1, 17)), "each step once, in order"
    assert "from_step = 9" in (ran.path / "recipe.toml").read_text()


def test_a_second_moment_that_underflowed_gets_the_bound_that_is_known_of_it(begun, tmp_path):
    config, trainer, _ = begun
    other = Trainer.begin(config, CPU)
    other.restore(trainer.plan_save(tmp_path, "id").write())
    p = other.model.head.weight
    narrow = other.optimizer.moments(p)["v"]
    was, scale = narrow.read(), narrow.tensors["scales"].float()
    assert (was == 0).any()
    other.guard.raised.append(Raise("v", ("head",), "e4m3", "fp32", 3))
    other.follow_rules()
    now = other.optimizer.moments(other.model.head.weight)["v"].read()
    assert torch.equal(now[was != 0], was[was != 0])
    assert torch.equal(now[was == 0], (scale * 2.0**-10).expand_as(was)[was == 0])


def test_a_guard_that_cannot_raise_is_refused(tiny):
    for key, value, words in [
        ("guard.raise_to", "mxfp4", "is narrower than fprop.x = 'e4m3'"),
        ("guard.raise_to", "fp5", "guard.raise_to: .*unknown cast 'fp5'"),
        ("gauges.every", 0, "this run has none; set --gauges.every 100"),
        ("training.compile", True, "this run has none; set --gauges.every 100"),
    ]:
        with pytest.raises(UserError, match=words):
            make_config(tiny({"guard.spike": "raise", key: value}))

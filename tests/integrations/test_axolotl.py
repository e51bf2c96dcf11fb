"""The plug-in in axolotl's own order of calls, around the trainer that axolotl derives its own from."""

import inspect

import pytest

from narrowgauge.errors import UserError

pytest.importorskip("axolotl", reason="axolotl is not installed")
pytest.importorskip("accelerate", reason="accelerate, which Trainer needs, is not installed")

from axolotl.integrations.base import BasePlugin, PluginManager
from axolotl.utils.dict import DictDefault

from integrations.test_transformers import LR, losses_of, model, trainer_of
from narrowgauge.integrations.axolotl import NarrowgaugeArgs, NarrowgaugePlugin
from narrowgauge.integrations.transformers import trainer_kwargs

pytestmark = pytest.mark.filterwarnings("ignore")  # of others' packages


def plugin_of(manager):
    manager.register("narrowgauge.integrations.axolotl.NarrowgaugePlugin")
    return manager.plugins["narrowgauge.integrations.axolotl.NarrowgaugePlugin"]


def test_every_method_has_the_signature_of_axolotls():
    own = {name: f for name, f in vars(NarrowgaugePlugin).items() if inspect.isfunction(f)}
    assert own
    for name, method in own.items():
        theirs = inspect.signature(getattr(BasePlugin, name)).parameters
        assert list(inspect.signature(method).parameters) == list(theirs), name


def test_the_same_losses_as_with_the_trainer_alone(tmp_path):
    plugin, cfg = plugin_of(PluginManager.get_instance()), DictDefault(narrowgauge={"recipe": "nvfp4"})
    NarrowgaugeArgs(**cfg)
    m = model()
    plugin.post_model_build(cfg, m)
    trainer = trainer_of(tmp_path, {"model": m}, learning_rate=LR)
    for callback in plugin.add_callbacks_post_trainer(cfg, trainer):
        trainer.add_callback(callback)
    trainer.train()
    alone = trainer_of(tmp_path, trainer_kwargs(model(), "nvfp4", lr=LR))
    alone.train()
    assert losses_of(trainer) == losses_of(alone)


@pytest.mark.parametrize(
    ("cfg", "words"),
    [
        ({}, "add one with `recipe: mxfp8`"),
        ({"narrowgauge": {"recipe": "nvfp4"}, "fsdp_config": {"fsdp_version": 2}}, "train with DDP"),
    ],
)
def test_refusals_name_the_way_out(cfg, words):
    with pytest.raises(UserError, match=words):
        NarrowgaugePlugin().post_model_build(DictDefault(**cfg), model())

"""The plug-in in axolotl's own order of calls, around the trainer that axolotl derives its own from."""

import inspect
from importlib import import_module

import pytest

from narrowgauge.system.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")  # of others' packages


@pytest.fixture
def axolotl():
    """The module of its plugins, and its configuration."""
    base = pytest.importorskip("axolotl.integrations.base", reason="axolotl is not installed")
    return base, import_module("axolotl.utils.dict").DictDefault


def test_every_method_has_the_signature_of_axolotls(axolotl):
    plugin = import_module("narrowgauge.integrations.axolotl").NarrowgaugePlugin
    own = {name: f for name, f in vars(plugin).items() if inspect.isfunction(f)}
    assert own
    for name, method in own.items():
        theirs = inspect.signature(getattr(axolotl[0].BasePlugin, name)).parameters
        assert list(inspect.signature(method).parameters) == list(theirs), name


def test_the_same_losses_as_with_the_trainer_alone(axolotl, hf, tmp_path):
    manager, cfg = axolotl[0].PluginManager.get_instance(), axolotl[1](narrowgauge={"recipe": "nvfp4"})
    manager.register("narrowgauge.integrations.axolotl.NarrowgaugePlugin")
    plugin = manager.plugins["narrowgauge.integrations.axolotl.NarrowgaugePlugin"]
    import_module("narrowgauge.integrations.axolotl").NarrowgaugeArgs(**cfg)
    m = hf.model()
    plugin.post_model_build(cfg, m)
    trainer = hf.trainer_of(tmp_path, {"model": m}, learning_rate=hf.LR)
    for callback in plugin.add_callbacks_post_trainer(cfg, trainer):
        trainer.add_callback(callback)
    trainer.train()
    alone = hf.trainer_of(tmp_path, hf.kwargs(hf.model(), "nvfp4", lr=hf.LR))
    alone.train()
    assert hf.losses_of(trainer) == hf.losses_of(alone)


@pytest.mark.parametrize(
    ("cfg", "words"),
    [
        ({}, "add one with `recipe: mxfp8`"),
        ({"narrowgauge": {"recipe": "nvfp4"}, "fsdp_config": {"fsdp_version": 2}}, "train with DDP"),
    ],
)
def test_refusals_name_the_way_out(axolotl, hf, cfg, words):
    plugin = import_module("narrowgauge.integrations.axolotl").NarrowgaugePlugin
    with pytest.raises(UserError, match=words):
        plugin().post_model_build(axolotl[1](**cfg), hf.model())

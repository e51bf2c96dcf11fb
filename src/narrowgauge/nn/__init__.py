"""How does a layer compute under a recipe? `Linear` (three GEMMs), attention, `convert(model, recipe)`."""

from typing import TYPE_CHECKING

from narrowgauge.system.lazy import import_on_use

if TYPE_CHECKING:
    from narrowgauge.nn.convert import apply_recipe as apply_recipe
    from narrowgauge.nn.convert import audit as audit
    from narrowgauge.nn.convert import convert as convert
    from narrowgauge.nn.convert import kept_layers as kept_layers
    from narrowgauge.nn.gauges import Gauges as Gauges
    from narrowgauge.nn.linear import Linear as Linear
    from narrowgauge.nn.operands import DTYPES as DTYPES
    from narrowgauge.nn.operands import EqualShare as EqualShare
    from narrowgauge.nn.operands import LinearShards as LinearShards
    from narrowgauge.nn.operands import Observation as Observation
    from narrowgauge.nn.operands import Observer as Observer
    from narrowgauge.nn.step_state import Stepped as Stepped
    from narrowgauge.nn.step_state import discard_step as discard_step
    from narrowgauge.nn.step_state import recipe_tensors as recipe_tensors
    from narrowgauge.nn.step_state import set_step as set_step
    from narrowgauge.nn.step_state import step as step
    from narrowgauge.nn.transformer.outline import outline_of as outline_of
    from narrowgauge.nn.transformer.places import NarrowAttention as NarrowAttention
    from narrowgauge.nn.transformer.places import NarrowResidual as NarrowResidual
else:
    __all__, __getattr__, __dir__ = import_on_use(__name__)

"""Every key of a cast before every consumer of casts: it is declared for the consumer, or refused, or left to
torch's plain operations. No consumer supports a key that is new in casts."""

from collections.abc import Callable, Collection
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from narrowgauge.formats import RandomStream
from narrowgauge.kernels.adamw import _supports_cast
from narrowgauge.kernels.cast import _has_kernel, _is_operator, emulate_rows
from narrowgauge.quantization import Cast, QuantContext, QuantizedState, cast, quantize_in_context
from narrowgauge.quantization import emulate as emulate_in_torch
from narrowgauge.quantization.blocks import Blocks
from narrowgauge.quantization.keys import KEYS, Consumer
from narrowgauge.quantization.passes.in_c import supports
from narrowgauge.recipes import named_device, places, recipe
from narrowgauge.recipes.backend import SCHEMES
from narrowgauge.recipes.recipe_rules import require_place, require_recipe
from narrowgauge.system.devices import imagine
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.analysis.probe import has_memory
from narrowgauge.trainer.checkpoint.interop.quantized_export import _scheme
from narrowgauge.trainer.runs.use.trained_model import is_tokenwise
from support.unchecked import tomorrow, unchecked

E4M3, NVFP4, ROW = cast("e4m3"), cast("nvfp4"), cast("fp8-row")
STREAM = RandomStream(torch.zeros(2, dtype=torch.int32))


def accepts(refuse: Callable[[Cast], object]) -> Callable[[Cast], bool]:
    """Whether a function takes a cast without a sentence."""

    def is_accepted(c: Cast) -> bool:
        try:
            refuse(c)
        except UserError:
            return False
        return True

    return is_accepted


def launches(c: Cast, is_rows: bool = False) -> bool:
    x = torch.empty(64, 128, dtype=torch.bfloat16, device="meta")
    with imagine(named_device("h200")):
        return emulate_rows(x, c) is not None if is_rows else _has_kernel(x, c, QuantContext(random=STREAM))


def is_one_operator(c: Cast) -> bool:
    """Whether a graph that torch compiles for a CPU has the cast as one operator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        return _is_operator(torch.ones(16, 32), c, QuantContext(random=STREAM))


def has_passes(c: Cast) -> bool:
    x = torch.ones(16, 32)
    return supports(x, Blocks.of(x.shape, (1, 16)), c)


def compressed(c: Cast) -> None:
    _scheme("a layer", SimpleNamespace(spec=SimpleNamespace(casts={**OPERANDS, "fprop.w": c})), None)


class Case(NamedTuple):
    """A consumer, a cast that it supports, whether it supports one, and keys beyond those declared for it."""

    consumer: Consumer
    base: Cast
    supports: Callable[[Cast], bool]
    others: Collection[str] = ()

    @property
    def keys(self) -> set[str]:
        return {key for key, one in KEYS.items() if self.consumer & one.consumers} | set(self.others)


def fits(changed, **fields):
    r = recipe("fp8")
    require_recipe(unchecked(r, places={**r.places, "gather": places.FP32, **changed}, **fields))


OPERANDS = dict(recipe("fp8").casts)
CONSUMERS = {
    "a kernel of a block's scale": Case(Consumer.KERNEL, NVFP4, launches),
    "a kernel of a tensor's scale": Case(Consumer.KERNEL, E4M3, launches),
    "the kernel of scaled rows": Case(Consumer.ROWS, ROW, partial(launches, is_rows=True)),
    "the operator of a compiled graph": Case(Consumer.OPERATOR, NVFP4, is_one_operator),
    "the passes in C": Case(Consumer.C, NVFP4, has_passes),
    "the kernels of AdamW": Case(Consumer.ADAMW, E4M3, _supports_cast),
    "a product of torch": Case(Consumer.NATIVE, E4M3, lambda c: any(s.is_of(c, c) for s in SCHEMES)),
    "state": Case(Consumer.STATE, E4M3, accepts(lambda c: QuantizedState(torch.Size((4, 8)), c))),
    "m of a recipe": Case(Consumer.STATE, E4M3, accepts(partial(require_place, "m"))),
    "fprop.x": Case(Consumer.OPERAND, NVFP4, accepts(partial(require_place, "fprop.x"))),
    "saved": Case(Consumer.SAVED, NVFP4, accepts(partial(require_place, "saved"))),
    "attention.q": Case(Consumer.ATTENTION, NVFP4, accepts(partial(require_place, "attention.q"))),
    "stream": Case(Consumer.STREAM, NVFP4, accepts(partial(require_place, "stream"))),
    "saved = 'operand'": Case(Consumer.KEPT, NVFP4, accepts(lambda c: fits({"fprop.x": c}, saved="operand"))),
    "the source of dgrad.w": Case(
        Consumer.SOURCE,
        NVFP4,
        accepts(lambda c: fits({"fprop.w": c, "dgrad.w": places.values_of("fprop.w")})),
    ),
    "gather": Case(Consumer.GATHER, E4M3, accepts(lambda c: fits(dict.fromkeys((*OPERANDS, "gather"), c)))),
    "reduce": Case(Consumer.REDUCE, E4M3, accepts(partial(require_place, "reduce"))),
    "a probe without steps before": Case(Consumer.MEMORYLESS, NVFP4, lambda c: not has_memory(c)),
    "a model whose tokens are alone": Case(Consumer.TOKENWISE, ROW, is_tokenwise),
    "one copy for both axes": Case(Consumer.ANY_AXIS, E4M3, lambda c: c.ignores_axis),
    "compressed-tensors": Case(
        Consumer.SAME_LAYOUT, NVFP4, accepts(compressed), ("element", "block", "scale", "tensor_scale")
    ),
}
#: A value of each key other than its default, which code that does not know the key could accept.
VALUES = {
    **{"element": cast("e5m2").element, "scale": "bf16", "tensor_scale": "row", "scale_target": 256.0},
    **{"scale_rounding": "stochastic", "zero_scale": "smallest", "candidates": (6.0, 4.0), "choose": "mse"},
    **{"feedback": "momentum", "of": "fprop.w", "keep_channels": 0.25, "keep_cast": "bf16"},
    **{"keep_steps": 4, "keep_every": 4, "refresh": 4, "center": "tokens", "center_cast": "e4m3"},
    **{"correct": "projection", "block": (1, 32), "scale_rule": "even", "rounding": "stochastic"},
    **{"hadamard": 16, "headroom": 0.5, "power_of_two": True, "signs": "random", "random_bits": 8},
    **{"history": 4, "history_algorithm": "most_recent", "margin": 1, "outliers": 0.99, "compensate": True},
    **{"expand": True, "codebook": "dynamic", "prescale": True, "estimator_k": 5.0, "estimator_cap": 2.0},
    **{"function": "mine"},
}


def test_there_is_a_value_of_every_key():
    assert set(VALUES) == set(Cast.defaults())


@pytest.mark.parametrize("name", CONSUMERS)
def test_a_key_that_a_consumer_does_not_name_is_not_taken(name):
    case = CONSUMERS[name]
    others = {key: value for key, value in VALUES.items() if key not in case.keys}
    taken = [k for k, v in others.items() if case.supports(unchecked(case.base, **{k: v}))]
    assert not taken


@pytest.mark.parametrize("name", CONSUMERS)
def test_no_consumer_supports_a_key_that_is_new_tomorrow(name):
    case = CONSUMERS[name]
    assert not case.supports(tomorrow(case.base))


@pytest.mark.parametrize("compute", [quantize_in_context, partial(emulate_in_torch, dtype=torch.bfloat16)])
def test_the_references_refuse_a_key_that_they_do_not_know(compute):
    with pytest.raises(UserError, match="nothing computes unheard; remove the key"):
        compute(torch.ones(4, 32), tomorrow(NVFP4), axis=-1, context=QuantContext())

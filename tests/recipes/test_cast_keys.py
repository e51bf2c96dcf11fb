"""Every key of a cast before every consumer of casts: the consumer names it, or refuses it, or lets torch's
plain operations compute it. A key that is new in casts is one that no consumer names."""

import dataclasses
from collections.abc import Callable, Collection
from functools import partial
from types import SimpleNamespace
from typing import ClassVar, NamedTuple

import pytest
import torch

from narrowgauge.analysis.probe import WITHOUT_MEMORY, has_memory
from narrowgauge.checkpoint.interop.compressed_tensors import _scheme
from narrowgauge.devices import imagine
from narrowgauge.errors import UserError
from narrowgauge.exchange import TARGETS, refusals
from narrowgauge.formats import RandomStream
from narrowgauge.kernels.adamw import STATE_KEYS as KERNEL_STATE_KEYS
from narrowgauge.kernels.adamw import _takes_cast
from narrowgauge.kernels.cast import _has_kernel, _is_operator, emulate_rows
from narrowgauge.quantization import Cast, QuantContext, QuantizedState, cast, quantize_in_context
from narrowgauge.quantization import emulate as emulate_in_torch
from narrowgauge.quantization.blocks import Blocks
from narrowgauge.quantization.cast import _ON_NO_AXIS, STATE_KEYS
from narrowgauge.quantization.passes.implementations import KERNEL_KEYS, OPERATOR_KEYS, PASS_KEYS, ROW_KEYS
from narrowgauge.quantization.passes.in_c import takes
from narrowgauge.quantization.stages import Transform
from narrowgauge.recipes import named_device, places, recipe, wire
from narrowgauge.recipes.attention_places import ATTENTION_KEYS, STREAM_KEYS, attention_casts, stream_cast
from narrowgauge.recipes.backend import NATIVE_KEYS, SCHEMES
from narrowgauge.recipes.cast_layout import CHOOSES_CODES
from narrowgauge.recipes.describe import changed_keys
from narrowgauge.runs.use.trained_model import TOKENWISE_KEYS, is_tokenwise
from support.unchecked import unchecked, with_keys

E4M3, NVFP4, ROW = cast("e4m3"), cast("nvfp4"), cast("fp8-row")
STREAM = RandomStream(torch.zeros(2, dtype=torch.int32))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Twist(Transform):
    """A transform that no consumer knows."""

    angle: int = 0
    KEYS: ClassVar = {"angle": "angle"}

    def rules(self):
        return [("angle", self.angle < 360, "it must lie below 360")]


NO_TWIST = Twist()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Tomorrow(Cast):
    """Casts with a key and a transform that were added to the record, and nowhere else."""

    unheard: int = 0
    twist: Twist = NO_TWIST


def accepts(refuse: Callable[[Cast], object]) -> Callable[[Cast], bool]:
    """Whether a function takes a cast without a sentence."""

    def is_accepted(c: Cast) -> bool:
        try:
            refuse(c)
        except UserError:
            return False
        return True

    return is_accepted


def launches_a_cast(c: Cast) -> bool:
    x = torch.empty(64, 128, dtype=torch.bfloat16, device="meta")
    with imagine(named_device("h200")):
        return _has_kernel(x, c, QuantContext(random=STREAM))


def launches_rows(c: Cast) -> bool:
    x = torch.empty(64, 128, dtype=torch.bfloat16, device="meta")
    with imagine(named_device("h200")):
        return emulate_rows(x, c) is not None


def is_one_operator(c: Cast) -> bool:
    """Whether a graph that torch compiles for a CPU has the cast as one operator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        return _is_operator(torch.ones(16, 32), c, QuantContext(random=STREAM))


def has_passes(c: Cast) -> bool:
    x = torch.ones(16, 32)
    return takes(x, Blocks.of(x.shape, (1, 16)), c)


def compressed(c: Cast) -> None:
    _scheme("a layer", SimpleNamespace(spec=SimpleNamespace(casts={**OPERANDS, "fprop.w": c})), None)


class Consumer(NamedTuple):
    """The keys that a consumer names, a cast that it takes, and whether it takes a cast."""

    keys: Collection[str]
    base: Cast
    takes: Callable[[Cast], bool]


WIDE = dict(places.WIDE_STATE)
#: A recipe that each tool can express.
EXPRESSED = dict.fromkeys(TARGETS, recipe("fp8")) | {"modelopt": recipe("modelopt-fp8-default")}
OPERANDS = dict(recipe("fp8").casts)
CONSUMERS = {
    "a kernel of a block's scale": Consumer(KERNEL_KEYS, NVFP4, launches_a_cast),
    "a kernel of a tensor's scale": Consumer(KERNEL_KEYS, E4M3, launches_a_cast),
    "the kernel of scaled rows": Consumer(ROW_KEYS, ROW, launches_rows),
    "the operator of a compiled graph": Consumer(OPERATOR_KEYS, NVFP4, is_one_operator),
    "the passes in C": Consumer(PASS_KEYS, NVFP4, has_passes),
    "the kernels of AdamW": Consumer(KERNEL_STATE_KEYS, E4M3, _takes_cast),
    "a product of torch": Consumer(NATIVE_KEYS, E4M3, lambda c: any(s.is_of(c, c) for s in SCHEMES)),
    "state": Consumer(STATE_KEYS, E4M3, accepts(lambda c: QuantizedState(torch.Size((4, 8)), c))),
    "m of a recipe": Consumer(
        STATE_KEYS, E4M3, accepts(lambda c: places.require_state({**WIDE, "m": c}, "here"))
    ),
    "fprop.x": Consumer(places.GEMM_KEYS, NVFP4, accepts(lambda c: places.require_operand("fprop.x", c))),
    "saved": Consumer(places.SAVED_KEYS, NVFP4, accepts(places.require_kept)),
    "saved = 'operand'": Consumer(
        places.OPERAND_KEYS, NVFP4, accepts(lambda c: places.require_saved("operand", c, "here"))
    ),
    "the source of dgrad.w": Consumer(
        places.SOURCE_KEYS,
        NVFP4,
        accepts(
            lambda c: places.require_reuse(
                {**OPERANDS, "fprop.w": c, "dgrad.w": places.cast_in("dgrad.w", "fprop.w")}, "input", "here"
            )
        ),
    ),
    "attention.q": Consumer(ATTENTION_KEYS, NVFP4, accepts(lambda c: attention_casts("attention.q", c))),
    "stream": Consumer(STREAM_KEYS, NVFP4, accepts(stream_cast)),
    "gather": Consumer(wire.GATHER_KEYS, E4M3, accepts(lambda c: wire.require_gather(c, [c], None, "here"))),
    "reduce": Consumer(wire.REDUCE_KEYS, E4M3, accepts(lambda c: wire.require_reduce(c, "here"))),
    "a probe without steps before": Consumer(WITHOUT_MEMORY, NVFP4, lambda c: not has_memory(c)),
    "a model whose tokens are alone": Consumer(TOKENWISE_KEYS, ROW, is_tokenwise),
    "one copy for both axes": Consumer(_ON_NO_AXIS, E4M3, lambda c: c.ignores_axis),
    "compressed-tensors": Consumer(
        (*CHOOSES_CODES, "element", "block", "scale", "tensor_scale"), NVFP4, accepts(compressed)
    ),
    **{
        f"{target} in {place}": Consumer(
            list(Cast.defaults()),  # key by key in test_writing.py
            EXPRESSED[target].casts[place],
            lambda c, target=target, place=place: (
                not refusals(
                    unchecked(EXPRESSED[target], casts={**EXPRESSED[target].casts, place: c}), target
                )
            ),
        )
        for target in TARGETS
        for place in OPERANDS
    },
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
def test_a_consumer_takes_its_cast_and_names_keys_that_exist(name):
    consumer = CONSUMERS[name]
    assert consumer.takes(consumer.base)
    assert set(consumer.keys) <= set(Cast.defaults())


@pytest.mark.parametrize("name", CONSUMERS)
def test_a_key_that_a_consumer_does_not_name_is_not_taken(name):
    consumer = CONSUMERS[name]
    others = {key: value for key, value in VALUES.items() if key not in consumer.keys}
    taken = [k for k, v in others.items() if consumer.takes(with_keys(consumer.base, **{k: v}))]
    assert not taken


@pytest.mark.parametrize("name", CONSUMERS)
def test_a_key_that_is_new_tomorrow_is_not_taken_by_any_consumer(name):
    consumer = CONSUMERS[name]
    known = {f.name: getattr(consumer.base, f.name) for f in dataclasses.fields(Cast)}
    assert consumer.takes(consumer.base)
    assert not consumer.takes(Tomorrow(**known, unheard=1))
    assert not consumer.takes(Tomorrow(**known, twist=Twist(angle=1)))


def test_a_new_key_is_written_and_its_rule_holds():
    known = {f.name: getattr(NVFP4, f.name) for f in dataclasses.fields(Cast)}
    new = Tomorrow(**known, unheard=1).having(angle=90)
    assert repr(new).endswith("unheard=1, angle=90)")
    assert changed_keys(new, NVFP4) == {"unheard": 1, "angle": 90}
    with pytest.raises(UserError, match=r"angle = 360, but it must lie below 360"):
        new.having(angle=360)


@pytest.mark.parametrize("compute", [quantize_in_context, partial(emulate_in_torch, dtype=torch.bfloat16)])
def test_the_references_refuse_a_transform_that_they_do_not_know(compute):
    known = {f.name: getattr(NVFP4, f.name) for f in dataclasses.fields(Cast)}
    with pytest.raises(UserError, match="nothing computes angle; remove the key"):
        compute(torch.ones(4, 32), Tomorrow(**known, twist=Twist(angle=1)), axis=-1, context=QuantContext())

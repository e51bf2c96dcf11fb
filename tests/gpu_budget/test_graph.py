"""A micro-batch can be one CUDA graph: the next one asks the GPU for the same, of the same memory, and waits
for nothing.

A graph replays kernels with the arguments that they had: addresses and numbers. So between the first and the
last micro-batch of a step, two that follow each other have to ask for the same kernels, in the same order,
with the same shapes, strides and numbers. Memory that existed before has to be the same memory; what a graph
allocates itself lies at the same addresses in each replay.
"""

import itertools
import weakref
from contextlib import nullcontext

import pytest
import torch

from narrowgauge.recipes import named_device, recipe_names
from narrowgauge.system.devices import imagine
from narrowgauge.system.torch_compat import operation_name, storage_key, tree_leaves
from narrowgauge.trainer.data import Batch
from narrowgauge.trainer.distributed.parallel.micro_batch_graph import graph_gap
from narrowgauge.trainer.simulate.recorder import Recorder
from narrowgauge.trainer.training import make_config
from narrowgauge.trainer.training.step.trainer import Trainer

MICRO_BATCHES, TOKENS = 4, 64


class Journal(Recorder):
    """All that is asked of the GPU, by micro-batch; it stands where gauges would read the step."""

    def __init__(self):
        super().__init__()
        self.asked, self.numbers, self.counter, self.first, self.begun = {}, {}, itertools.count(), 0, 0

    def begin_micro_batch(self, is_first, is_last):
        self.phase, self.first = f"micro-batch {self.begun}", next(self.counter)
        self.begun += 1

    def after_backward(self):
        self.phase = ""

    after_step = after_backward

    def told(self, work):
        super().told(work)
        self.note(work.name, [*work.reads, *work.writes], work.numbers)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is NotImplemented:  # a tensor without memory, whose codes come next
            return out
        values = tree_leaves((args, kwargs or {}, out))
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        self.note(operation_name(func), tensors, [v for v in values if not isinstance(v, torch.Tensor)])
        return out

    def note(self, name, tensors, numbers):
        where = [(self.memory(t), t.shape, t.stride(), t.storage_offset(), t.dtype) for t in tensors]
        self.asked.setdefault(self.phase, []).append((name, where, repr(numbers)))

    def memory(self, t):
        """Which memory: of what existed before this micro-batch, or its allocations."""
        storage = t.untyped_storage()
        key = storage_key(storage)
        if key not in self.numbers:
            self.numbers[key] = next(self.counter)
            weakref.finalize(storage, self.numbers.pop, key)
        number = self.numbers[key]
        return ("its own", number - self.first) if number > self.first else ("from before", number)


def config_of(recipe, **model):
    return make_config(
        {
            "model": {"name": "debug", "layers": 2} | model,
            "data": {"sequence_length": TOKENS},
            "training": {"batch_size": MICRO_BATCHES * 2, "micro_batch_size": 2},
            "recipe": {"name": recipe},
        }
    )


def journal_of(recipe, steps=1, prepare=lambda trainer, journal: {"gauges": journal}):
    """The journal of some steps; `prepare` returns their options."""
    journal, meta = Journal(), torch.device("meta")
    with imagine(named_device("h200"), journal.told), journal.watching():
        trainer = Trainer.begin(config_of(recipe), meta)
        options = prepare(trainer, journal)
        x_BT = torch.empty(2, TOKENS, dtype=torch.int64, device=meta)
        batches = [Batch(x_BT, x_BT, x_BT.numel(), None)] * MICRO_BATCHES
        for _ in range(steps):
            trainer.train_step(iter(batches), **options)
    return journal


def middle(journal):
    """What the two micro-batches between the first and the last of the step asked for."""
    phases = ("micro-batch 1", "micro-batch 2")
    assert not any(times for (phase, _), times in journal.waits.items() if phase in phases)
    one, two = (journal.asked[phase] for phase in phases)
    assert len(one) > 100
    return one, two


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_a_micro_batch_asks_for_what_the_one_before_it_asked(recipe):
    one, two = middle(journal_of(recipe))
    assert one == two


def test_under_random_bits_only_these_differ():
    """The keys of a micro-batch and the number of its first sample have separate memory, as several
    micro-batches may be under way. The number is written by value, once for each layer."""
    memory, numbers = set(), set()
    for (name, where, by_value), (name_2, where_2, by_value_2) in zip(
        *middle(journal_of("nvfp4")), strict=True
    ):
        assert (name, [w[1:] for w in where]) == (name_2, [w[1:] for w in where_2])
        numbers |= {name} if by_value != by_value_2 else set()
        memory |= {w[-1] for w, w_2 in zip(where, where_2, strict=True) if w[0] != w_2[0]}
    assert memory == {torch.int32, torch.int64}
    assert numbers == {"full"}


@pytest.mark.tier("thorough")
def test_from_step_to_step_only_these_are_new_memory():
    """Gradients, codes that are kept, and the sum of the losses: a graph of one step would need these where
    they were. All else is the same, numbers that are passed by value among it."""
    journal, renewed = journal_of("fp8", steps=2), set()
    one, two = (journal.asked[f"micro-batch {n}"] for n in (2, 2 + MICRO_BATCHES))
    for (name, where, numbers), (name_2, where_2, numbers_2) in zip(one, two, strict=True):
        assert (name, [w[1:] for w in where], numbers) == (name_2, [w[1:] for w in where_2], numbers_2)
        renewed |= {(name, w[-1]) for w, w_2 in zip(where, where_2, strict=True) if w[0] != w_2[0]}
    assert ("add_", torch.float32) in renewed
    others = {dtype for name, dtype in renewed if name != "add_"}
    assert others == {torch.float8_e4m3fn, torch.uint8, torch.float32}


class Marking:
    """Stands for a recorder: it runs what it would record."""

    aside = staticmethod(nullcontext)

    def record(self, run):
        run()
        return lambda: None

    def release(self):
        """Nothing is held."""


def marks_regions(trainer, journal):
    """The journal is of what graphs hold."""
    trainer.engine.record_graphs(Marking())
    graphs = trainer.engine.graphs
    run = graphs._pass

    def marked():
        journal.begin_micro_batch(False, False)
        run()
        journal.after_backward()

    graphs._pass = marked
    return {}


def model_of(recipe, **model):
    return Trainer.begin(config_of(recipe, **model), torch.device("meta")).model


NOT_HELD = {"fp16", "bf16-sr", "eco", "msamp-o1", "msamp-o2", "msamp-o3", "fp8-attention"}
HELD = [name for name in recipe_names() if name not in NOT_HELD]


def test_recipes_that_graphs_hold_are_listed():
    for name in recipe_names():
        assert bool(graph_gap(model_of(name), True, False)) == (name in NOT_HELD), name


MADE_ONCE = "quantization/transforms.py:_constant"  # a process's first step, which is not recorded


@pytest.mark.tier("nightly", keep=("fp8-delayed", "nvfp4", "fp4", "mxfp8"))
@pytest.mark.tier("thorough", keep=("fp8-delayed", "nvfp4"))
@pytest.mark.parametrize("recipe", HELD)
def test_what_is_recorded_is_the_same_in_each_further_micro_batch(recipe):
    """Kernels, numbers, the memory of every tensor, random keys among them; and the host never waits."""
    journal = journal_of(recipe, prepare=marks_regions)
    assert journal.begun == MICRO_BATCHES
    waits = {(phase, place) for (phase, place), times in journal.waits.items() if phase and times}
    assert waits <= {("micro-batch 0", MADE_ONCE)}
    one, two = (journal.asked[f"micro-batch {n}"] for n in (1, 2))
    assert len(one) > 100
    assert one == two


def test_what_a_graph_cannot_hold_is_named():
    for recipe, model, words in (
        ("fp16", {}, "the loss scale of fp16 follows what the host has read"),
        ("msamp-o2", {}, "blocks.0.qkv is stored in a cast, and the host tracks its state"),
        ("fp8-attention", {}, "blocks.0.attention is NarrowAttention, whose launches may depend on values"),
        ("fp8", {"experts": 4}, "blocks.0.experts is Experts, whose launches may depend on values"),
    ):
        assert words in graph_gap(model_of(recipe, **model), True, False)
    model = model_of("fp8")
    assert "several processes" in graph_gap(model, False, False)
    assert "compiled code" in graph_gap(model, True, True)
    model.blocks[0].register_forward_hook(print)
    assert graph_gap(model, True, False) == "a hook of blocks.0 may read values"

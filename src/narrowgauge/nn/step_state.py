"""The position of training in one layer: histories of delayed scales, random bits, rules with a start step.

Random bits are a function of (seed, step, tensor, element). In each step ten tensors of a linear layer have a
stream: the six operands, the signs of the three GEMMs' transforms, and the quantized gradient.

`Stepped` is the base of every module under a recipe: it holds the step and the keys of the streams. A
training loop sets the step (`nn.set_step`). Otherwise every forward pass that records gradients draws new
random bits, and a step ends when an optimizer takes one (`join`), or when `nn.step` is called.
Micro-batches are not optimizer steps: if a loop called `set_step` once and never again, a warning is raised.
"""

import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from narrowgauge.formats import stream_key
from narrowgauge.kernels.dropout import Dropout
from narrowgauge.nn.histories import History, end_steps
from narrowgauge.nn.operands import Observer
from narrowgauge.quantization import PreScale
from narrowgauge.recipes import Recipe
from narrowgauge.system.devices import is_gpu
from narrowgauge.system.errors import UserError, require
from narrowgauge.system.second_derivative import refuse_transforms
from narrowgauge.system.torch_compat import active_ddp, is_in_backward, is_transformed

#: Optimizer steps after one `set_step` before a warning. Adversarial training takes a few on purpose.
MOST_STEPS_UNSET = 10
_NEXT_KEY = 0x9E3779B9 - 2**32  # odd, so that keys repeat only after 2^32 calls
_A_PROCESS = 2**20  # sequences, more than any pass has, so that the ranges of processes are disjoint
_COUNTING: WeakKeyDictionary["Stepped", None] = WeakKeyDictionary()  # in order
_FRESH: WeakKeyDictionary[Any, bool | None] = WeakKeyDictionary()  # optimizers; None once they are checked


class Conversion:
    """The modules that one call of `convert` has put under a recipe; a copy of the model gets its own.

    Attributes:
        modules: The living modules, by the name that each had in the model then.
    """

    def __init__(self) -> None:
        self.modules: WeakValueDictionary[str, Stepped] = WeakValueDictionary()

    def __reduce__(self) -> tuple[type["Conversion"], tuple[()]]:
        """An empty one, which copied and unpickled modules join."""
        return Conversion, ()


class Stepped:
    """A module whose values depend on the step."""

    index: int  # of the module among the modules of its kind
    recipe: Recipe  # of this layer
    conversion: Conversion | None = None  # the modules that were converted together with this one
    full_name = ""  # of this one among them
    is_random: bool  # whether any of its casts needs random bits
    follows_step: bool  # whether any value of this module depends on the step
    keys: torch.Tensor | None  # int32, a key for each random stream; None if no cast is random
    first_sample: torch.Tensor | None  # the index in the global batch of the first sequence of the pass
    process: int | None = None  # the index among the data-parallel processes; None until it is known
    has_run = False  # whether it has recorded gradients since it was made or its position was restored
    #: The state of places from earlier steps; a module without operands has none
    histories: Mapping[str, History] = MappingProxyType({})
    observer: Observer | None = None  # sees the operands of the layer; attached for one step
    step: int | None = None  # the optimizer step; None before the first
    #: The number of steps of the run and the first step of its decay, if the loop passes them
    length: tuple[int | None, int | None] = (None, None)
    step_is_set = False  # whether the loop sets the step
    begins_step = True  # whether the next pass that records gradients begins a step
    hears_optimizer = False  # whether an optimizer has taken a step since the layer was made
    counts_calls = False  # whether `nn.step` was called; from then on only it counts steps
    awaits_backward = 0  # the passes of this step that the backward pass may recompute
    steps_unset = 0  # the optimizer steps, each after a pass, since the loop last set the step

    @property
    def memories(self) -> list[History | PreScale]:
        """Everything here that a step changes when it ends."""
        return [*self.histories.values()]

    def start(self) -> None:
        """Go to the position before the first step."""
        is_timed = any(rule.is_timed for rule in self.recipe.rules)
        self.follows_step = self.is_random or bool(self.memories) or is_timed
        self._set_keys(0, 0, 0)

    def join(self, conversion: Conversion, full_name: str) -> None:
        """Belong to a conversion, under a name, and count the steps of any optimizer in this process.

        The optimizer may belong to another model. Its step then also ends a step of this module, which has no
        effect if the module has not run since.
        """
        self.conversion, self.full_name = conversion, full_name
        conversion.modules[full_name] = self
        _COUNTING[self] = None
        _listen_to_optimizers()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Join the conversion of a copied or unpickled model."""
        super().__setstate__(state)  # type: ignore[misc]
        if self.conversion is not None:
            self.join(self.conversion, self.full_name)

    def set_position(
        self, seed: int, step: int, first_sample: int, steps: int | None, decay: int | None
    ) -> None:
        """Go to a step and a pass (`set_step`), after the end of the previous step."""
        # A module's own way to set an attribute is slow, and every micro-batch does it in every layer.
        vars(self).update(step=step, step_is_set=True, steps_unset=0, length=(steps, decay))
        self._use_rules(step, steps, decay)
        self._set_keys(seed, step, first_sample)

    def history_tensors(self) -> dict[str, torch.Tensor]:
        """What places remember of earlier steps, as `{"PLACE.NAME": tensor}`; the tensors themselves."""
        histories = ((place.replace(".", "_"), h) for place, h in self.histories.items())
        return {f"{place}.{name}": t for place, h in histories for name, t in h.tensors().items()}

    def weight_tensors(self) -> dict[str, torch.Tensor]:
        """What the recipe keeps for a weight in addition to its elements; the tensors themselves."""
        return {}

    def position(self) -> torch.Tensor:
        """The position of training, int64: step and length (-1 stands for None), three flags, keys."""
        at = (self.step, *self.length, self.step_is_set, self.hears_optimizer, self.counts_calls)
        keys = [] if self.keys is None else self.keys.flatten().tolist()
        return torch.tensor([*(-1 if n is None else int(n) for n in at), *keys], device="cpu")

    def restore_position(self, position: torch.Tensor) -> None:
        """Restore a `position`, between two steps."""
        self.begins_step, self.has_run = True, False
        self.step, *length = (None if n == -1 else n for n in position[:3].tolist())
        self.length = (length[0], length[1])
        self.step_is_set, self.hears_optimizer, self.counts_calls = map(bool, position[3:6].tolist())
        if self.step is not None:
            self._use_rules(self.step, *self.length)
        if self.keys is not None:
            self.keys = position[6:].view(-1, 2).to(self._device(), torch.int32)
            self._use_own_samples()

    def use_process(self, process: int) -> None:
        """Draw the random bits of process number `process`, until a loop sets the samples of a pass."""
        self.process = process
        self._use_own_samples()

    def begin_pass(self) -> bool:
        """Begin a forward pass; if the loop does not set steps, it may begin a step (`_is_new_step`).

        Returns:
            Whether a backward pass will follow.
        """
        if not self.follows_step:
            return torch.is_grad_enabled()
        if is_transformed() and not torch.compiler.is_compiling():
            refuse_transforms()  # before a key is drawn, which would belong to the transform
        if not torch.is_grad_enabled():
            return False
        is_eager = not torch.compiler.is_compiling()
        if not self.step_is_set and not self._is_recomputing():
            if any(rule.is_timed for rule in self.recipe.rules):
                raise UserError(
                    f"a rule of recipe {self.recipe.name!r} starts at a step, but this loop does not set "
                    "the step; call narrowgauge.set_step before each forward pass"
                )
            if self._is_new_step():
                for memory in self.memories:
                    memory.end_step()
            if is_eager and self.begins_step:  # earlier passes are recomputed, or never will be
                self.awaits_backward = min(self.awaits_backward, 1)
            if is_eager and self.process is None and self.keys is not None and (ddp := active_ddp()):
                self.use_process(ddp.process_group.rank())
            if self.keys is not None:  # a new tensor, because a backward pass may need the old one
                self.keys = self.keys + _NEXT_KEY
        if is_eager:
            self.begins_step, self.has_run = False, True
        return True

    def step_taken(self) -> None:
        """Count an optimizer step. Until a step is set, only calls of this method count from now on."""
        self.begins_step = self.hears_optimizer = self.counts_calls = True
        self.step_is_set = False
        self._use_own_samples()

    def optimizer_stepped(self) -> None:
        """Count a step of an optimizer, unless the loop sets steps.

        Warns:
            UserWarning: The loop has stopped setting steps.
        """
        if self.counts_calls:
            return
        if self.step_is_set and not self.begins_step and self.follows_step:
            self.steps_unset += 1
            if self.steps_unset == MOST_STEPS_UNSET:
                warnings.warn(
                    f"{self.steps_unset} optimizer steps were taken since narrowgauge.set_step set step "
                    f"{self.step}; random bits, delayed scales and rules still belong to that step: call "
                    "narrowgauge.set_step before each forward pass, or narrowgauge.step after each update",
                    stacklevel=2,
                )
        self.begins_step = self.hears_optimizer = True

    def lost(self, optimizer: torch.optim.Optimizer, is_fresh: bool) -> Iterator[str]:
        """What an optimizer does not keep of this module's recipe, each as the rest of a sentence."""
        if not (is_fresh or self.hears_optimizer or self.step_is_set) and self.follows_step:
            yield "resumes, but random bits and histories start over: resume with narrowgauge.load_state_dict"

    def discard_step(self) -> None:
        """Undo what the passes of this step have left behind; see `nn.discard_step`."""
        for memory in self.memories:
            memory.discard_step()

    def _is_new_step(self) -> bool:
        """Whether a pass is the first since an optimizer took a step.

        Before the first optimizer step, a pass begins a step unless a gradient of an earlier micro-batch
        exists. So each pass counts in a loop that updates weights without an optimizer, and in compiled code,
        where a changing flag would cause recompilation.
        """
        if torch.compiler.is_compiling():
            return True
        if self.begins_step or self.hears_optimizer:
            return self.begins_step
        return not self._has_gradient()

    def _has_gradient(self) -> bool:
        """Whether the gradient of a micro-batch has not been used by an optimizer yet."""
        return False

    def _is_recomputing(self) -> bool:
        """Whether this is the second forward pass of an activation checkpoint, within the backward pass.

        A reentrant checkpoint records no gradients in its first pass, so its second pass begins the step.
        """
        if torch.compiler.is_compiling():
            return False
        in_backward = is_in_backward()
        is_second = in_backward and self.awaits_backward > 0
        self.awaits_backward = max(0, self.awaits_backward + (-1 if in_backward else 1))
        return is_second

    def _set_keys(self, seed: int, step: int, first_sample: int) -> None:
        if self.is_random:
            device, words = self._device(), [stream_key(seed, step, i) for i in self._stream_ids()]
            keys = torch.tensor(words, dtype=torch.int32, device="cpu" if is_gpu(device) else device)
            keys = keys.pin_memory() if device.type == "cuda" else keys  # or the host waits for the GPU
            self.keys = keys.to(device, non_blocking=True)
            self.first_sample = torch.full((), first_sample, dtype=torch.int64, device=device)

    def _use_own_samples(self) -> None:
        """Use the samples of this process, if the loop does not set the samples of a pass."""
        if self.first_sample is not None and not self.step_is_set:
            self.first_sample = torch.full_like(self.first_sample, (self.process or 0) * _A_PROCESS)

    def _stream_ids(self) -> list[int]:
        """The tensor ids of the random streams."""
        raise NotImplementedError

    def _device(self) -> torch.device:
        """The device of the keys; from the host each pass copies them."""
        return torch.device("cpu")

    def _use_rules(self, step: int, steps: int | None, decay: int | None) -> None:
        """Switch to the casts that apply in a step."""


def set_step(
    model: torch.nn.Module,
    seed: int,
    step: int,
    first_sample: int,
    steps: int | None = None,
    decay: int | None = None,
) -> None:
    """Set the position of training in every converted module and dropout; call before each forward pass.

    Random bits then follow from (seed, step, tensor, element), delayed scales are updated when a step begins,
    and rules that waited for the step take effect.

    Args:
        model: A model that `convert` has changed.
        seed: The seed of the run.
        step: The optimizer step, from 1.
        first_sample: The index in the step's global batch of the first sequence of this forward pass.
        steps: The steps of the full run, for rules that hold after a share of it.
        decay: The first step whose learning rate is below the peak, for rules that hold from then on.

    Raises:
        UserError: The recipe has such a rule, and its argument is None.
    """
    require("model", model, torch.nn.Module)
    modules = list(model.modules())
    layers = [module for module in modules if isinstance(module, Stepped)]
    for layer in layers:
        if not layer.recipe.rules:
            continue
        if decay is None and any(rule.follows_schedule for rule in layer.recipe.rules):
            raise UserError(
                f"a rule of recipe {layer.recipe.name!r} waits for the decay of the learning rate, and its "
                "first step is not known; give set_step the argument `decay`"
            )
        if steps is None and any(rule.start.share or rule.until.share for rule in layer.recipe.rules):
            raise UserError(
                f"a rule of recipe {layer.recipe.name!r} holds from a share of the steps on, and their "
                "number is not known; give set_step the argument `steps`"
            )
    end_steps(memory for layer in layers if layer.step != step for memory in layer.memories)
    for layer in layers:
        layer.set_position(seed, step, first_sample, steps, decay)
    for module in modules:
        if isinstance(module, Dropout):
            module.set_position(seed, step, first_sample, next(model.parameters()).device)


def step(model: torch.nn.Module) -> None:
    """Report that an optimizer step was taken: the next forward pass that records gradients begins another.

    A loop that calls neither this nor `set_step` also works: layers count every step of a
    `torch.optim.Optimizer`. Call this if no such optimizer updates the weights, or if another model's
    optimizer steps between two micro-batches. From the first call on only these calls count.

    Args:
        model: A model that `convert` has changed.
    """
    require("model", model, torch.nn.Module)
    for module in stepped_modules(model).values():
        module.step_taken()


def discard_step(model: torch.nn.Module) -> None:
    """Undo a computed step's changes to the state of recipes, if the optimizer does not take the step.

    Histories of delayed scales forget what they recorded since `set_step` began the step, and pre-scaling
    factors are restored. Weights and masters have not changed yet, because only the optimizer changes them.
    """
    for module in stepped_modules(model).values():
        module.discard_step()


def recipe_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state of recipes that affects the trajectory, as `{"LAYER.PLACE.NAME": tensor}`.

    It includes histories of operands (delayed scales, kept channels), scales of weights, masters and
    pre-scaling factors. The tensors are the model's, not copies: copy into them to restore. A plain state
    dict does not include them.
    """
    found = {
        f"{name}.{key}".lstrip("."): tensor
        for name, module in stepped_modules(model).items()
        for key, tensor in (module.weight_tensors() | module.history_tensors()).items()
    }
    return dict(sorted(found.items(), key=lambda named: ".reduce." not in named[0]))  # as in checkpoints


def stepped_modules(model: torch.nn.Module) -> dict[str, Stepped]:
    """The modules of a model whose values depend on the step, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Stepped)}


def require_same_tensors(current: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    """Require the same names, shapes and dtypes; the error names the first difference."""
    for key in sorted(current.keys() | saved.keys()):
        require(f"{key!r} of the state", saved.get(key, current.get(key)), torch.Tensor)
        both = (f"{s[key].dtype} {tuple(s[key].shape)}" if key in s else "absent" for s in (saved, current))
        there, here = both
        if here != there:
            raise UserError(
                f"the state is of another model or recipe: {key!r} is {there} there and {here} here; use the "
                "model and recipe that it was saved with"
            )


def living_modules() -> list[Any]:
    """The living modules that have joined a conversion, of all models, the oldest first."""
    return list(_COUNTING)


@cache
def _listen_to_optimizers() -> None:
    register_optimizer_step_pre_hook(_check_state)
    register_optimizer_step_post_hook(_notify_layers)


def _check_state(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Warn once of what an optimizer does not keep of recipes; ours, and one without state, are fresh."""
    is_fresh = _FRESH.setdefault(optimizer, not optimizer.state or hasattr(optimizer, "recipe"))
    if optimizer.state and is_fresh is not None:
        _FRESH[optimizer] = None
        for text in dict.fromkeys(t for m in living_modules() for t in m.lost(optimizer, is_fresh)):
            warnings.warn(f"{type(optimizer).__name__} {text}", stacklevel=2)


def _notify_layers(*_: Any) -> None:
    for module in living_modules():
        module.optimizer_stepped()

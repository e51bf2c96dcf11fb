"""Hugging Face's `Trainer` and TRL's `SFTTrainer` under a recipe.

    trainer = Trainer(args=..., train_dataset=..., **trainer_kwargs(model, "nvfp4", lr=3e-4))

The arguments that `trainer_kwargs` returns:

    model                       converted in place; saved as a plain Hugging Face folder
    optimizer_cls_and_kwargs    `TrainerAdamW`, which the trainer constructs with its parameter groups. The
                                recipe's state goes into `optimizer.pt` of the trainer's checkpoints
    callbacks                   `NarrowTrainerCallback`: sets the step, skips steps whose gradients are not
                                finite, and adds entries that begin with `narrowgauge/` to the log, before any
                                reporter reads it
"""

import inspect
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from narrowgauge.distributed import prepare_ddp
from narrowgauge.guard import Guard, GuardRules
from narrowgauge.nn import Gauges, convert, discard_step, set_step
from narrowgauge.nn.gauges import means
from narrowgauge.optim import AdamW, Optimizer
from narrowgauge.recipes import RecipeLike
from narrowgauge.system.errors import UserError

WEIGHTS = "narrowgauge.weights"  # the key of `_bit_sums` in the optimizer's state
PREFIX = "narrowgauge/"  # of entries in the log


def trainer_kwargs(
    model: torch.nn.Module,
    recipe: RecipeLike,
    *,
    keep: str | Sequence[str] = (),
    seed: int = 0,
    gauges_every: int = 0,
    decay_step: int | None = None,
    **optimizer: Any,
) -> dict[str, Any]:
    """The arguments of `Trainer` and `SFTTrainer` that put a training under a recipe.

    Args:
        model: A model whose linear layers are converted in place; adapters (PEFT) are added afterwards.
        recipe: A recipe, its name, or the path of its TOML file.
        keep: Layers that stay in the recipe's `compute` format, as for `narrowgauge.convert`.
        seed: The seed of random bits.
        gauges_every: Read the gauges every n-th step; 0 for never.
        decay_step: The first step whose learning rate is below the peak, for rules that start there.
        optimizer: Arguments of `narrowgauge.AdamW`: lr, betas, eps. The defaults come from
            `TrainingArguments`. `weight_decay` always comes from there, since the trainer writes it into the
            parameter groups that it makes.

    Returns:
        `model`, `optimizer_cls_and_kwargs` and `callbacks`.

    Raises:
        UserError: `narrowgauge.convert` refuses the model or the recipe.
    """
    model = convert(model, recipe, keep)
    arguments = {"recipe": recipe, "seed": seed, **optimizer, "narrow_model": model}
    return {
        "model": model,
        "optimizer_cls_and_kwargs": (TrainerAdamW, arguments),
        "callbacks": [NarrowTrainerCallback(seed, gauges_every, arguments, decay_step)],
    }


class TrainerAdamW(AdamW):
    """`narrowgauge.AdamW`, whose state dict also tells whether the trainer has loaded the model's weights.

    A trainer loads them before the state of its optimizer, which holds everything else that affects the
    trajectory. transformers 5 writes the experts of Mixtral under the names of older releases; when its
    `Trainer` resumes it skips them with only a warning.
    """

    model: torch.nn.Module

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        *,
        narrow_model: torch.nn.Module,
        **arguments: Any,
    ) -> None:
        super().__init__(params, **arguments)
        self.model = narrow_model

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, and sums of the bits of the weights."""
        return {**super().state_dict(), WEIGHTS: _bit_sums(self.model)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a `state_dict` in optimizer and model.

        Raises:
            UserError: The state belongs to another optimizer, model or recipe, or the trainer has not loaded
                the weights that belong to it.
        """
        if WEIGHTS not in state_dict:
            raise UserError(
                "the checkpoint's optimizer is not narrowgauge's, and has no state of a recipe: resume it "
                "with the optimizer that it was saved with, or start from its weights without resuming"
            )
        super().load_state_dict(state_dict)
        found = _bit_sums(self.model)
        others = [name for name, total in state_dict[WEIGHTS].items() if found.get(name, total) != total]
        if others:
            raise UserError(
                f"{len(others)} parameters, such as {others[0]!r}, are not those that the checkpoint was "
                "saved with: the trainer has not read them back; make the model with "
                "from_pretrained(CHECKPOINT), and resume then"
            )


class NarrowTrainerCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Sets a converted model's step, guards the update, and logs quantization figures.

    A trainer gives each event its `TrainingArguments`, `TrainerState` and `TrainerControl`.

    Attributes:
        guard: Skips steps whose gradients are not finite.
        entries: Entries for the trainer's next log.
    """

    def __init__(
        self,
        seed: int = 0,
        gauges_every: int = 0,
        optimizer: dict[str, Any] | None = None,
        decay_step: int | None = None,
    ) -> None:
        """Set the seed of random bits, and read gauges every n-th step (0: never).

        `optimizer` holds the arguments of `TrainerAdamW`, which are completed in place from the trainer's;
        `decay_step` is that of `trainer_kwargs`.
        """
        self.seed, self.gauges_every = seed, gauges_every
        self.optimizer, self.decay_step = optimizer, decay_step
        self.guard = Guard(GuardRules(spike="off"))
        self.entries: dict[str, Any] = {}
        self.micro_batch = 0  # index within the step
        self.gauges: Gauges | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse setups that would train wrongly, and let DDP sum low-precision gradients."""
        _require_whole_model(args)
        if self.optimizer is not None:
            _complete(self.optimizer, args)
        if args.world_size > 1:
            prepare_ddp(kwargs["model"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Register for logs before the reporters, which the trainer calls first."""
        _call_first(self)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the step, before its first micro-batch."""
        self.micro_batch = 0
        if self.gauges_every and (state.global_step + 1) % self.gauges_every == 0:
            model, optimizer = kwargs["model"], _own(kwargs["optimizer"])
            self.gauges = Gauges.of(model, optimizer)
        self._begin_micro_batch(args, state, kwargs["model"])

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Advance to the next micro-batch of a step."""
        self.micro_batch += 1
        self._begin_micro_batch(args, state, kwargs["model"])

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Judge the gradients, which may have been clipped; without gradients the update changes nothing.

        Raises:
            Diverged: More consecutive steps were skipped than the guard allows.
        """
        optimizer = _own(kwargs["optimizer"])
        if self.gauges is not None:
            self.gauges.after_backward()
        norm = optimizer.clip_grad_norm_(math.inf).item()
        verdict = self.guard.judge(0.0, norm)
        if not verdict.accepts:
            self.guard.require_patience(verdict, state.global_step + 1)
            optimizer.zero_grad()
            discard_step(kwargs["model"])
            self.entries |= {f"{PREFIX}verdict": verdict.action, f"{PREFIX}gradient_norm": str(norm)}
            control.should_log = True
        return control

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the gauges of the update's results."""
        if self.gauges is not None:
            self.gauges.after_step()
            self.entries |= means(self.gauges.lines(state.global_step + 1), PREFIX)
            self.gauges = None

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the figures since the last log to the trainer's entry."""
        logs = kwargs.get("logs") or {}
        if {"loss", "train_loss"}.isdisjoint(logs):
            return  # the entry of an evaluation
        entries = self.entries | {f"{PREFIX}skips": self.guard.skips}
        self.entries = {}
        logs.update(entries)
        state.log_history[-1].update(entries)

    def _begin_micro_batch(self, args: Any, state: Any, model: torch.nn.Module) -> None:
        index = self.micro_batch * args.world_size + args.process_index
        first_sample = index * args.per_device_train_batch_size
        set_step(model, self.seed, state.global_step + 1, first_sample, state.max_steps, self.decay_step)
        if self.gauges is not None:
            is_last = self.micro_batch == args.gradient_accumulation_steps - 1
            self.gauges.begin_micro_batch(is_first=self.micro_batch == 0, is_last=is_last)


def _call_first(callback: NarrowTrainerCallback) -> None:
    """Put a callback before all others of the trainer whose event is being handled.

    The trainer passes its callbacks neither itself nor their list, so the list is found through the caller's
    frame. It is replaced, because the caller is iterating over it.
    """
    frame = inspect.currentframe()
    while frame is not None:
        handler = frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler):
            handler.callbacks = [callback, *(c for c in handler.callbacks if c is not callback)]
            return
        frame = frame.f_back


def _bit_sums(model: torch.nn.Module) -> dict[str, int]:
    """The sum of the bits of each parameter, read as integers; it detects changed weights."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = {name: p.detach().view(integers[p.element_size()]).sum() for name, p in model.named_parameters()}
    return {name: int(total) for name, total in sums.items()}


def _own(optimizer: torch.optim.Optimizer) -> Optimizer:
    """The optimizer inside accelerate's wrapper."""
    own = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(own, Optimizer):
        raise UserError(
            f"the trainer's optimizer is {type(own).__name__}, which keeps no state of a recipe: give the "
            "trainer `optimizer_cls_and_kwargs` of narrowgauge.integrations.transformers.trainer_kwargs"
        )
    return own


def _require_whole_model(args: TrainingArguments) -> None:
    """Refuse strategies that drop or flatten the recipe's state for a weight."""
    how = "deepspeed" if args.deepspeed else "fsdp" if args.fsdp else ""
    if how:
        raise UserError(
            f"{how} takes the parameters apart, past the state that narrowgauge keeps for them: train with "
            "DDP (torchrun) under any recipe, or in a custom loop with narrowgauge.fully_shard"
        )
    if args.n_gpu > 1:
        raise UserError(
            f"one process would train on {args.n_gpu} GPUs by torch's DataParallel, whose replicas keep no "
            f"state of a recipe: start it with torchrun --nproc-per-node {args.n_gpu}"
        )


def _complete(optimizer: dict[str, Any], args: TrainingArguments) -> None:
    """Complete missing arguments from the trainer's."""
    optimizer.setdefault("lr", args.learning_rate)
    optimizer.setdefault("betas", (args.adam_beta1, args.adam_beta2))
    optimizer.setdefault("eps", args.adam_epsilon)
    if (given := optimizer.get("weight_decay", args.weight_decay)) != args.weight_decay:
        raise UserError(
            f"weight_decay = {given} was given to trainer_kwargs, and the trainer gives its groups of "
            f"parameters that of TrainingArguments, {args.weight_decay}; give it there"
        )

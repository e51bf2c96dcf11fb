"""Where the memory of a training step goes, by class of tensor: measured from a step, or expected of one.

    weights, master, gradients, m, v     counted from the tensors themselves
    other                                what recipes remember, step counts, buffers
    saved activations                    what lives at the end of a forward pass and did not before it
    workspace                            the rest of the peak of a whole optimizer step

What a GPU has given out is known to its allocator. A CPU's allocator does not tell, so there a step's
operations are watched: every tensor that appears counts until it is gone.

The expectation is the same step on torch's meta device, whose tensors have shapes and no numbers: no formula
that could fall behind the code. It takes every operation on whole tensors, as a GPU does.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from narrowgauge.errors import UserError
from narrowgauge.models import count_parameters
from narrowgauge.nn import recipe_tensors, set_step
from narrowgauge.training import machine
from narrowgauge.training.config import Config, make_config
from narrowgauge.training.session import Session

STATE = ("weights", "master", "gradients", "m", "v", "other")
CLASSES = (*STATE, "saved activations", "workspace")


@dataclass(frozen=True)
class Memory:
    """Bytes by class: on the device, and of the state that lies in the host's memory."""

    device: dict[str, int]
    host: dict[str, int]
    parameters: int

    @property
    def peak(self) -> int:
        """The most that the device holds at once."""
        return sum(self.device.values())

    @property
    def state(self) -> int:
        """What the device holds between steps."""
        return sum(self.device[name] for name in STATE)

    def classes(self) -> str:
        """The device's bytes by class, for people; what is next to nothing is left out."""
        return " + ".join(f"{name} {gib(size)}" for name, size in self.device.items() if size >= 2**16)

    def as_json(self) -> dict[str, Any]:
        """For the metrics."""
        return {"bytes": self.device, "host_bytes": self.host, "peak": self.peak}


class Watch:
    """Watches one optimizer step of a session: `with watch: ...`, and `after_forward` in it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.saved, self.peak = device, 0, 0
        self._operations = None if device.type == "cuda" else _Operations(device.type)
        self._start = 0

    def __enter__(self) -> "Watch":
        if self._operations is not None:
            self._operations.__enter__()
        else:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._start = torch.cuda.memory_allocated(self.device)
        return self

    def after_forward(self, loss: torch.Tensor | None = None) -> None:
        """Note what the first forward pass has left for the backward pass."""
        self.saved = self.saved or self._now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._operations is not None:
            self._operations.__exit__(kind, error, trace)
            self.peak = self._operations.peak
        else:
            self.peak = torch.cuda.max_memory_allocated(self.device) - self._start

    def _now(self) -> int:
        if self._operations is not None:
            return self._operations.alive
        return torch.cuda.memory_allocated(self.device) - self._start


class _Operations(TorchDispatchMode):
    """Counts the bytes of tensors that operations make, until their memory is given back."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.alive, self.peak = device, 0, 0
        self._known: dict[int, weakref.finalize[..., Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._see((args, kwargs), counts=False)  # what was there before
        out = func(*args, **kwargs)
        self._see(out, counts=True)
        return out

    def _see(self, tree: Any, counts: bool) -> None:
        for t in tree_iter(tree):
            if not isinstance(t, torch.Tensor) or t.device.type != self.device:
                continue
            storage = t.untyped_storage()
            key, size = storage._cdata, storage.nbytes() if counts else 0
            if key in self._known:
                continue
            self._known[key] = weakref.finalize(storage, self._forget, key, size)
            self.alive += size
            self.peak = max(self.peak, self.alive)

    def _forget(self, key: int, size: int) -> None:
        del self._known[key]
        self.alive -= size


def measured(session: Session, watch: Watch) -> Memory:
    """The memory of a session, after the step that was watched."""
    device, host = _of_state(session)
    new = sum(p.grad.nbytes for p in session.optimizer.parameters() if p.grad is not None)
    device["saved activations"] = watch.saved
    # Gradients that a step makes anew are a class of their own.
    device["workspace"] = max(0, watch.peak - watch.saved - new)
    return Memory(device, host, sum(p.numel() for p in session.model.parameters()))


def expected(config: Config) -> Memory:
    """What a configuration's step will take, from a step on tensors without numbers."""
    session = Session.begin(config, torch.device("meta"))
    t, watch = config.training, Watch(session.device)
    x_BT = torch.zeros(t.micro_batch_size, config.data.sequence_length, dtype=torch.long, device="meta")
    positions = x_BT if config.data.separate_documents else None
    with watch:
        for first in range(0, min(t.batch_size, 2 * t.micro_batch_size), t.micro_batch_size):
            set_step(session.model, t.seed, 1, first, t.steps)
            loss = session.model.loss(x_BT, x_BT, positions)
            watch.after_forward()
            loss.backward()
            del loss
        session.optimizer.clip_grad_norm_(config.optimizer.clip_norm)
        session.optimizer.step()
    return measured(session, watch)


def require_memory(config: Config, device: torch.device) -> Memory:
    """What is expected of a run; refuses one that cannot fit.

    A CPU's memory is promised freely, and a process that takes up the promise is killed without a word.

    Raises:
        UserError: the state alone is larger than the device's memory, or the step than `memory_limit`.
    """
    there, parameters = machine.total_memory(device), count_parameters(config.the_model())
    least = parameters * _least_bytes(config)
    if least > there:  # too large even to be looked at
        raise UserError(f"{_too_large(config, parameters, least, device)}; choose a smaller --model")
    memory = expected(config)
    on_host = 0 if device.type != "cpu" else sum(memory.host.values())  # a CPU's device is its host
    if memory.state + on_host > there:
        advice = _advice(config, there, has_host=device.type != "cpu")
        raise UserError(f"{_too_large(config, parameters, memory.state, device)}; {advice}")
    limit = machine.bytes_of(config.training.memory_limit)
    if limit and memory.peak > limit:
        raise UserError(
            f"a step is expected to take {gib(memory.peak)}, and training.memory_limit is "
            f"{config.training.memory_limit} ({gib(limit)}); {_advice(config, limit, has_host=True)}"
        )
    return memory


def _least_bytes(config: Config) -> float:
    """Bytes of state on the device that no parameter goes below."""
    recipe = config.the_recipe()
    kept = (c for place, c in recipe.state.items() if c is not None and place not in recipe.offload)
    return sum(c.element.bits / 8 for c in kept)


def _too_large(config: Config, parameters: int, state: float, device: torch.device) -> str:
    return (
        f"the model has {parameters:,} parameters, whose state under recipe {config.recipe.name!r} takes "
        f"{gib(int(state))}, and this {device.type} has {gib(machine.total_memory(device))}"
    )


def _advice(config: Config, limit: int, has_host: bool) -> str:
    found = [f"{words} ({gib(m.peak)})" for words, m in cheaper(config, has_host) if m.peak <= limit]
    if found:
        return "it fits with " + ", or ".join(found)
    return "no setting of this recipe makes it fit: choose a smaller --model, or narrower state (msamp-o3)"


@dataclass
class _Change:
    words: str
    values: dict[str, dict[str, Any]] = field(default_factory=dict)


def cheaper(config: Config, has_host: bool = True) -> list[tuple[str, Memory]]:
    """What would lower the peak, as options of the command line, with the memory that is then expected.

    Each alone, then all together. `has_host`: whether there is another memory beside the device's.
    """
    changes = []
    if config.training.micro_batch_size > 1:
        changes.append(_Change("--training.micro_batch_size 1", {"training": {"micro_batch_size": 1}}))
    if not config.training.recompute:
        changes.append(_Change("--training.recompute true", {"training": {"recompute": True}}))
    if has_host and not config.the_recipe().offload:
        changes.append(
            _Change("--recipe.offload master,grad,m,v", {"recipe": {"offload": "master,grad,m,v"}})
        )
    if len(changes) > 1:
        together = _Change(" ".join(c.words for c in changes))
        for change in changes:
            for section, values in change.values.items():
                together.values[section] = together.values.get(section, {}) | values
        changes.append(together)
    return [(c.words, expected(_changed(config, c.values))) for c in changes]


def _changed(config: Config, values: dict[str, dict[str, Any]]) -> Config:
    tables = config.model_dump()
    tables["recipe"] |= tables["recipe"].pop("places")
    for section, changes in values.items():
        tables[section] |= changes
    return make_config(tables)


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


def _of_state(session: Session) -> tuple[dict[str, int], dict[str, int]]:
    """(on the device, on the host): bytes of the state by class."""
    device, host = dict.fromkeys(STATE, 0), dict.fromkeys(("master", "gradients", "m", "v"), 0)
    seen: set[int] = set()

    def count(name: str, tensors: Sequence[torch.Tensor], on_host: bool = False) -> None:
        for t in tensors:
            if id(t) not in seen:
                seen.add(id(t))
                (host if on_host and name in host else device)[name] += t.nbytes

    for p in session.optimizer.parameters():
        for name, part in (("weights", "at_rest"), ("master", "master"), ("gradients", "gradient")):
            if (at_rest := getattr(p, part, None)) is not None:
                count(name, list(at_rest.tensors.values()), at_rest.on_host)
        for place, moment in session.optimizer.moments(p).items():
            count(place, list(moment.tensors.values()), moment.on_host)
        if getattr(p, "at_rest", None) is None:
            count("weights", [p])
        count("gradients", [] if p.grad is None else [p.grad])
        count("other", [session.optimizer.state[p]["step"]])
    count("other", [*session.model.buffers(), *recipe_tensors(session.model).values()])
    return device, {name: size for name, size in host.items() if size}

"""What ranks do in the tests of whole trainings: look for what one process has alone, count bytes, resume.

For parity the process that trains alone leaves its numbers in a file; each rank then looks up its pieces'
numbers.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from narrowgauge.distributed import CommCounter, Mesh
from narrowgauge.nn import DTYPES, Linear, recipe_tensors
from narrowgauge.quantization import local_tensor, master_or_weight, shard_of, state_of
from narrowgauge.trainer.data import open_data, validation_batches
from narrowgauge.trainer.runs.loop.resolve import parallel_dims_of
from narrowgauge.trainer.runs.loop.validation import validation_loss
from narrowgauge.trainer.simulate import MemoryTracker
from narrowgauge.trainer.training.config.config import make_config
from narrowgauge.trainer.training.step.trainer import Trainer

CPU = torch.device("cpu")


def begin(values):
    """(configuration, its texts, the trainer of this rank)."""
    config = make_config(values)
    d = config.data
    data = open_data(d.source, d.tokenizer, d.weights, lambda *_: None)
    mesh = Mesh(parallel_dims_of(config, dist.get_world_size()), CPU)
    return config, data, Trainer.begin(config, CPU, mesh)


class Operands:
    """Laid on a layer: keeps what every product sees of its operands, one micro-batch after the other."""

    def __init__(self, name, layer, samples):
        self.name, self.layer, self.samples, self.seen = name, layer, samples, {}

    def operand(self, observation):
        place, in_backward = observation.place, torch._C._current_graph_task_id() != -1
        if place == "saved" or (place.startswith("fprop") and in_backward):  # no operand, or seen before
            return
        tokens = self.samples if place.endswith(".w") else observation.x.shape[0]
        sizes = self.samples, tokens, self.layer.out_features, self.layer.in_features
        part = self.layer.shards.tensor_shards(*sizes).get(place.partition(".")[2])
        self.seen.setdefault(place, []).append((observation.values.clone(), part))

    def product(self, *_):
        pass


class Trained:
    """A session after some steps: what each gave, the operands of the first, the loss on other text.

    Args:
        wide: compute what recipes call fp32 in float64, so that the order of a sum changes no number.
        loss_scale: to begin with, where gradients pass through fp16.
    """

    def __init__(self, values, steps, wide=True, loss_scale=0.0):
        if wide:
            DTYPES["fp32"] = torch.float64
        self.config, data, self.trainer = begin(values)
        d, samples = self.config.data, self.config.training.micro_batch_size
        if loss_scale:
            self.trainer.scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale)
            self.trainer.scaler.scale(torch.zeros(()))
        self.start = {name: numbers(p).clone() for name, p in self.parameters()}
        layers = {n: m for n, m in self.trainer.model.named_modules() if isinstance(m, Linear)}
        onlookers = [Operands(name, layer, samples) for name, layer in layers.items()]
        told = []
        with self.trainer.batches(data.train) as batches:
            for step in range(steps):
                for each in onlookers:
                    each.layer.observer = each if step == 0 else None
                told.append(self.trainer.train_step(batches)[:2])
        self.operands = {(o.name, place): seen for o in onlookers for place, seen in o.seen.items()}
        engine, go_to = self.trainer.engine, self.trainer.go_to_sample
        batches = validation_batches(data.val, samples, d.sequence_length, 3 * samples, d.separate_documents)
        val = validation_loss(engine, go_to, batches).mean
        chosen = recipe_tensors(self.trainer.model).items()
        chosen = {n: t.tolist() for n, t in chosen if n.endswith(".chosen")}
        self.told = {"steps": told, "val": val, "state": self.trainer.state(), "chosen": chosen}

    def parameters(self):
        return list(self.trainer.model.named_parameters())

    def found(self):
        """(parameter, kind, where it lies, numbers): how far it has moved, and its moments."""
        for name, p in self.parameters():
            yield name, "moved", shard_of(p), (numbers(p) - self.start[name]).detach()
            for place, moment in self.trainer.optimizer.moments(p).items():
                yield name, place, shard_of(p), moment.read()


def numbers(p):
    return local_tensor(p).float() if state_of(p).weight is None else master_or_weight(p)


def alone(path, **how):
    """What one process has: figures, and all tensors in a file."""
    trained = Trained(**how)
    kept = {f"{name} {kind}": t.contiguous() for name, kind, _, t in trained.found()}
    for (name, place), seen in trained.operands.items():
        kept |= {f"{name} {place} {i}": t.contiguous() for i, (t, _) in enumerate(seen)}
    save_file(kept, path)
    return trained.told


def together(path, **how):
    """The figures of several, and what their pieces differ in.

    `apart`: by parameter and kind, the sums of squares of the differences and of what there should be.
    `unlike`: by layer and place, how many elements of the first step's operands are others.
    """
    trained, theirs = Trained(**how), load_file(path)
    apart = {}
    for name, kind, part, ours in trained.found():
        expected = taken(theirs[f"{name} {kind}"], part)
        apart[f"{name} {kind}"] = [float(t.double().square().sum()) for t in (ours - expected, expected)]
    mesh, t = trained.trainer.engine.mesh, trained.config.training
    data = mesh.parallel_dims.data
    first = mesh.data_index * t.batch_size // (data * t.micro_batch_size)
    unlike = {}
    for (name, place), seen in trained.operands.items():
        if mesh.parallel_dims.expert > 1 and ".experts." in name:  # it has the tokens of several processes
            continue
        for i, (ours, part) in enumerate(seen, start=first):
            once = f"{name} {place.replace('dgrad.w', 'fprop.w')} {i}"  # alone both matmuls have the same
            expected = taken(theirs.get(f"{name} {place} {i}", theirs[once]), part)
            if count := int((ours != expected).sum()):
                unlike[f"{name} {place}"] = unlike.get(f"{name} {place}", 0) + count
    return trained.told | {"apart": apart, "unlike": unlike, "seen": len(trained.operands)}


def taken(whole, part):
    return whole if part is None else part.local_of(whole)


def account(values):
    """(bytes by class, bytes sent by purpose) of the first step of this rank."""
    _, data, trainer = begin(values)
    with trainer.batches(data.train) as batches, CommCounter() as traffic, MemoryTracker(CPU) as watch:
        trainer.train_step(batches, watch.after_forward)
    return watch.measured(trainer).as_json(), dict(traffic.sent)


def goes_on(values, path, start, steps=2):
    """Restore (or begin, without a start), save in between: losses, and the bits of the state."""
    _, data, trainer = begin(values)
    restored = ""
    if start:
        trainer.restore(Path(start), dist.group.WORLD)
        restored = trainer.plan_save(Path(path) / "restored", "me", dist.group.WORLD).write()
    with trainer.batches(data.train) as batches:
        told = [trainer.train_step(batches) for _ in range(steps)]
    trainer.check_replicas()
    saved = trainer.plan_save(Path(path), "me", dist.group.WORLD).write()
    sizes = {name: list(local_tensor(p).shape) for name, p in trainer.model.named_parameters()}
    return {"steps": told, "saved": str(saved), "restored": str(restored), "sizes": sizes}

"""What processes do in the tests of the torchtitan integration: its own trainer, on a CPU."""

import json
from dataclasses import dataclass
from pathlib import Path

import integrations.torchtitan_on_cpu  # noqa: F401  before torchtitan

# isort: split
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

import narrowgauge as ng
from narrowgauge.integrations.torchtitan import NarrowConverter
from narrowgauge.system.errors import UserError

LINEAR = "narrowgauge.integrations.torchtitan.narrow_linear"
OPTIMIZER = "narrowgauge.integrations.torchtitan.narrow_optimizer"
BATCH, LENGTH = 2, 32


class Rows(BaseDataLoader):
    """Rows of tokens that follow from their number in the training; one batch of a rank after the other."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_world_size, dp_rank, **_):
        self.number, self.world, self.rank = 0, dp_world_size, dp_rank

    def __iter__(self):
        while True:
            x = batch(self.number * self.world + self.rank)
            self.number += 1
            yield {"input": x[:, :-1]}, x[:, 1:]

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


def batch(number):
    return torch.randint(2048, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(number))


def assets(path="tests/assets"):
    """The files that torchtitan's checkout has: a tokenizer and a text."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    Path(path, "tokenizer").mkdir(parents=True, exist_ok=True)
    tokenizer.save(f"{path}/tokenizer/tokenizer.json")
    Path(path, "c4_test").mkdir(exist_ok=True)
    row = json.dumps({"text": " ".join(f"w{i % 62 + 1}" for i in range(500))})
    Path(path, "c4_test", "data.json").write_text("\n".join([row] * 50))


def configuration(recipe=None, steps=4, parts=1, **more):
    """torchtitan's configuration of its debug model with three blocks, in fp32."""
    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel")
    del config.model_spec.model.layers[3:]
    config.dataloader = Rows.Config()
    config.training.local_batch_size, config.training.seq_len = BATCH, LENGTH
    config.training.global_batch_size = BATCH * parts
    config.training.steps, config.training.disable_cuda_graphs = steps, True
    config.training.mixed_precision_param = "float32"
    config.debug.seed, config.lr_scheduler.warmup_steps, config.lr_scheduler.decay_ratio = 1, 0, 0.0
    config.validator.enable = config.checkpoint.enable = False
    if recipe is not None:
        config.override.imports = [(LINEAR, {"recipe": recipe}), (OPTIMIZER, {"total_steps": 4})]
    for key, value in more.items():
        section, _, name = key.partition("__")
        setattr(getattr(config, section), name, value)
    return config


def train(config, at_start=lambda trainer: None):
    """The losses of torchtitan's trainer, as it logs them."""
    assets()
    losses = []
    log = MetricsProcessor.log
    MetricsProcessor.log = lambda self, step, loss, *_, **__: losses.append(loss)
    trainer = Trainer(config)
    try:
        at_start(trainer)
        trainer.train()
    finally:
        MetricsProcessor.log = log
        trainer.close()
        dist.destroy_process_group()
        torch.use_deterministic_algorithms(False)
    return losses


def own_loop(start, recipe, steps, parts, lr=8e-4):
    """The same training without torchtitan's trainer: its model, `narrowgauge.convert`, torch's AdamW."""
    config = configuration()
    config.model_spec.model.update_from_config(config=config)
    model = config.model_spec.model.build()
    model.init_weights()
    model.load_state_dict(start)
    ng.convert(model, recipe)
    group = config.optimizer.param_groups[0].optimizer_kwargs
    optimizer = torch.optim.AdamW(model.parameters(), **{**group, "lr": lr}, fused=True)
    losses = []
    for step in range(1, steps + 1):
        total = 0.0
        for part in range(parts):
            x = batch((step - 1) * parts + part)
            ng.set_step(model, 0, step, BATCH * part, steps)
            logits = model(x[:, :-1]).float()
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), x[:, 1:].flatten(), reduction="sum"
            )
            loss = loss / (parts * BATCH * LENGTH)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def beside_own_loop(recipe, parts=1, **more):
    """The losses of the trainer, and of a separate loop from the same weights and tokens."""
    start = {}

    def keep(trainer):
        state = trainer.model_parts[0].state_dict()
        of_layers = {name.replace("_checkpoint_wrapped_module.", ""): t for name, t in state.items()}
        start.update({name: t.full_tensor().clone() for name, t in of_layers.items()})

    found = train(configuration(recipe, parts=parts, **more), at_start=keep)
    return found, own_loop(start, recipe, 4, parts)


def interrupted(recipe, folder, steps):
    """The losses from torchtitan's newest checkpoint in a folder on; it saves every second step."""
    config = configuration(recipe, steps=steps, parts=2, checkpoint__enable=True, checkpoint__interval=2)
    config.dump_folder = folder
    return train(config)


def refusal(recipe, keep=(), only_linear=False, **more):
    """The sentence with which a training is refused."""
    config = configuration(recipe, steps=1, **more)
    config.override.imports = [(LINEAR, {"recipe": recipe, "keep": list(keep)}), (OPTIMIZER, {})]
    if only_linear:
        del config.override.imports[1]
    try:
        train(config)
    except UserError as error:
        return str(error)
    return None


def converted(recipe):
    """The losses with the converter in place of the override of the model."""
    assert issubclass(NarrowConverter, QuantizationConverter)
    config = configuration(recipe)
    config.model_spec.model = NarrowConverter.Config(recipe=recipe).build().convert(config.model_spec.model)
    config.override.imports = [(OPTIMIZER, {"total_steps": 4})]
    return train(config)


def one_process(folder):
    """All that the tests ask of one process, which takes its time to import torchtitan."""
    narrow = ["nvfp4", "fp8-delayed"]
    return {
        "stock": train(configuration()),
        "fp32": train(configuration("fp32")),
        "own loops": {recipe: beside_own_loop(recipe, parts=2) for recipe in ("fp32", *narrow)},
        "whole": {r: interrupted(r, f"{folder}/{r}-whole", 4) for r in narrow},
        "begun": {r: interrupted(r, f"{folder}/{r}", 2) for r in narrow},
        "went on": {r: interrupted(r, f"{folder}/{r}", 4) for r in narrow},
        "narrow": train(configuration("nvfp4")),
        "converter": converted("nvfp4"),
        "narrow weights": refusal("msamp-o2"),
        "only the layers": refusal("nvfp4", only_linear=True),
        "no such layer": refusal("mxfp8", keep=["w9"]),
    }


def page(program):
    """The page's program, with files of the names that torchtitan's checkout has."""
    assets()
    found = []
    MetricsProcessor.log = lambda self, step, loss, *_, **__: found.append(loss)
    exec(compile(program, "page", "exec"), {"__name__": "program"})
    return found

"""Hugging Face's Trainer under a recipe: the real package on the CPU, against loops without it."""

import importlib.util
import json
import math
import shutil

import pytest
import torch

import narrowgauge as ng
from narrowgauge.errors import UserError

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate, which Trainer needs, is not installed")

from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from narrowgauge.integrations.transformers import NarrowTrainerCallback, trainer_kwargs

pytestmark = pytest.mark.filterwarnings("ignore")  # of others' packages
LR = 1e-2


def model(seed=0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def examples(count=48):
    tokens = torch.randint(64, (count, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": t, "labels": t} for t in tokens]


class Batches:
    """A collator that remembers the batches, in the order in which they are trained on."""

    def __init__(self):
        self.all = []

    def __call__(self, rows):
        self.all.append({key: torch.stack([row[key] for row in rows]) for key in rows[0]})
        return dict(self.all[-1])


def trainer_of(path, given, batches=None, **arguments):
    arguments = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
    } | arguments
    arguments = {"logging_steps": 1, "report_to": []} | arguments | {"use_cpu": True, "disable_tqdm": True}
    arguments = TrainingArguments(path, save_strategy=arguments.pop("save_strategy", "no"), **arguments)
    return Trainer(args=arguments, train_dataset=examples(), data_collator=batches or Batches(), **given)


def losses_of(trainer):
    return {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}


def own_loop(recipe, batches, steps=6):
    """The same training without a trainer: its batches, its decay groups, its schedule."""
    m = ng.convert(model(), recipe)
    decayed = [p for p in m.parameters() if p.ndim > 1]
    others = [p for p in m.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.0}]
    optimizer = ng.AdamW(groups, recipe, lr=LR)
    losses, m = [], m.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LR * (steps - step) / steps
        parts = batches[2 * step : 2 * step + 2]
        count = sum(part["labels"][:, 1:].numel() for part in parts)
        total = 0.0
        for number, part in enumerate(parts):
            ng.set_step(m, 0, step + 1, 2 * number, steps)
            logits = m(part["input_ids"]).logits[:, :-1].float()
            labels = part["labels"][:, 1:].reshape(-1)
            loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 64), labels, reduction="sum") / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.tier("thorough")
def test_under_fp32_the_trainers_own_losses(tmp_path):
    own = {"model": model(), "optimizers": (None, None)}
    expected = trainer_of(tmp_path, own, learning_rate=LR, optim="adamw_torch", weight_decay=0.0)
    mine = trainer_of(tmp_path, trainer_kwargs(model(), "fp32", lr=LR))
    expected.train()
    mine.train()
    a, b = losses_of(mine), losses_of(expected)
    assert a.keys() == b.keys()
    for step in b:
        assert math.isclose(a[step], b[step], rel_tol=1e-5)


def test_the_optimizers_arguments_are_those_given_and_else_the_trainers(tmp_path):
    """The trainer writes its own weight decay into the groups that it makes: another was passed over."""
    arguments = {"learning_rate": 2e-5, "adam_beta2": 0.95, "adam_epsilon": 1e-6, "weight_decay": 0.1}

    def groups_of(**optimizer):
        trainer = trainer_of(tmp_path, trainer_kwargs(model(), "mxfp8", **optimizer), **arguments)
        keys = ("lr", "betas", "eps", "weight_decay")
        return [tuple(group[key] for key in keys) for group in trainer.create_optimizer().param_groups]

    own = (2e-5, (0.9, 0.95), 1e-6)
    assert groups_of() == [(*own, 0.1), (*own, 0.0)]
    given = {"lr": LR, "betas": (0.8, 0.9), "eps": 1e-5}
    expected = tuple(given.values())
    assert groups_of(**given, weight_decay=0.1) == [(*expected, 0.1), (*expected, 0.0)]
    with pytest.raises(UserError, match=r"weight_decay = 0.01 .* TrainingArguments, 0.1; give it there"):
        groups_of(weight_decay=0.01)


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "msamp-o3"])
def test_as_in_a_loop_of_ones_own(recipe, tmp_path):
    """Random bits, accumulation and clipping match a loop that sets its steps."""
    batches = Batches()
    trainer = trainer_of(tmp_path, trainer_kwargs(model(), recipe, lr=LR, weight_decay=0.0), batches)
    trainer.train()
    torch.testing.assert_close(
        list(losses_of(trainer).values()), own_loop(recipe, batches.all), rtol=1e-4, atol=0
    )


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4", "msamp-o3"])
def test_resumed_by_the_trainers_own_means_to_the_last_digit(recipe, tmp_path):
    """Narrow weights, masters, histories and random keys are in the trainer's checkpoint."""
    saving = {"save_strategy": "steps", "save_steps": 3}
    whole = trainer_of(tmp_path, trainer_kwargs(model(), recipe, lr=LR), **saving)
    whole.train()
    again = trainer_of(tmp_path, trainer_kwargs(model(seed=1), recipe, lr=LR), **saving)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert losses_of(again) == losses_of(whole)
    assert_same_weights(whole.model, again.model)


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4", "msamp-o3", "bf16-sr"])
def test_a_finished_optimizer_resumes_to_the_last_digit(recipe, tmp_path):
    """What the recipe keeps is in the optimizer's own state dict."""

    def trained(seed, **more):
        given = trainer_kwargs(model(seed), recipe)
        del given["optimizer_cls_and_kwargs"]
        optimizer = ng.AdamW(given["model"].parameters(), recipe, lr=LR, weight_decay=0.0)
        trainer = trainer_of(
            tmp_path, {**given, "optimizers": (optimizer, None)}, save_strategy="steps", save_steps=3
        )
        trainer.train(**more)
        return trainer

    whole, again = trained(0), trained(1, resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert losses_of(again) == losses_of(whole)
    assert_same_weights(whole.model, again.model)


def assert_same_weights(one, other):
    weights = one.state_dict()
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.tier("thorough")
def test_a_rule_that_waits_for_the_decay_is_told_its_step(tmp_path):
    """`nvfp4-finish` computes the forward pass in bf16 from the decay on: the same digits until then."""
    plain = trainer_of(tmp_path, trainer_kwargs(model(), "nvfp4", lr=LR))
    finish = trainer_of(tmp_path, trainer_kwargs(model(), "nvfp4-finish", lr=LR, decay_step=4))
    plain.train()
    finish.train()
    a, b = losses_of(plain), losses_of(finish)
    assert [step for step in a if a[step] != b[step]] == [4, 5, 6]
    with pytest.raises(UserError, match="waits for the decay"):
        trainer_of(tmp_path, trainer_kwargs(model(), "nvfp4-finish", lr=LR)).train()


def mixture():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=4))


@pytest.mark.tier("thorough")
def test_trainer_refuses_to_resume_experts_that_it_does_not_read_back(tmp_path):
    trainer = trainer_of(
        tmp_path, trainer_kwargs(mixture(), "nvfp4", lr=LR), save_strategy="steps", save_steps=3
    )
    trainer.train()
    shutil.rmtree(tmp_path / "checkpoint-6")
    again = trainer_of(tmp_path, trainer_kwargs(mixture(), "nvfp4", lr=LR))
    with pytest.raises(
        UserError, match="the trainer has not read them back; make the model with from_pretrained"
    ):
        again.train(resume_from_checkpoint=True)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-3")
    again = trainer_of(tmp_path, trainer_kwargs(read, "nvfp4", lr=LR))
    again.train(resume_from_checkpoint=True)
    assert losses_of(again) == losses_of(trainer)


@pytest.mark.tier("thorough")
def test_a_saved_model_is_a_plain_folder(tmp_path):
    trainer = trainer_of(tmp_path, trainer_kwargs(model(), "msamp-o3", lr=LR), max_steps=2)
    trainer.train()
    trainer.save_model(tmp_path / "plain")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert type(plain.model.layers[0].mlp.up_proj) is torch.nn.Linear
    expected = trainer.model.state_dict()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.tier("thorough")
def test_a_step_without_numbers_is_skipped_and_logged(tmp_path):
    given = trainer_kwargs(model(), "fp8-delayed", lr=LR, gauges_every=3)
    trainer = trainer_of(tmp_path, given, max_steps=3)
    norm, seen = given["model"].model.norm.weight, []

    def poison(gradient):
        seen.append(norm.detach().clone())
        return gradient * (math.nan if len(seen) == 3 else 1.0)  # the first micro-batch of the second step

    norm.register_hook(poison)
    trainer.train()
    first, second, third = (row for row in trainer.state.log_history if "loss" in row)
    assert first["narrowgauge/skips"] == 0
    assert second["narrowgauge/verdict"] == "skip"
    assert "narrowgauge/verdict" not in third
    assert third["narrowgauge/skips"] == 1
    assert torch.equal(seen[2], seen[4])  # the weights of the second and third step
    assert not torch.equal(seen[0], seen[2])
    assert 0 < third["narrowgauge/fprop.x/sqnr_db"] < 60
    json.dumps(trainer.state.log_history)


class Reporter(TrainerCallback):
    """Keeps what it is given of each log at the time it is given it, as the trainer's reporters do."""

    def __init__(self):
        self.rows = []

    def on_log(self, args, state, control, logs, **kwargs):
        self.rows.append({"step": state.global_step, **logs})


GAUGE = "narrowgauge/fprop.w/sqnr_db"


@pytest.mark.tier("thorough")
def test_gauges_reach_reporters_that_the_trainer_calls_first(tmp_path):
    given = trainer_kwargs(model(), "mxfp8", lr=LR, gauges_every=2)
    first, last = Reporter(), Reporter()
    given["callbacks"] = [first, *given["callbacks"], last]
    trainer = trainer_of(tmp_path, given, max_steps=4)
    trainer.train()
    trainer.train()  # once more, with the same list
    assert [row["step"] for row in first.rows if GAUGE in row] == [2, 4] * 2
    assert all(0 < row[GAUGE] < 60 for row in first.rows if GAUGE in row)
    assert [row["narrowgauge/skips"] for row in first.rows if "loss" in row] == [0] * 8
    assert first.rows == last.rows
    assert trainer.state.log_history == first.rows[-5:]


@pytest.mark.tier("thorough")
def test_a_reading_of_gauges_after_the_last_log_is_reported_at_the_end(tmp_path):
    given = trainer_kwargs(model(), "mxfp8", lr=LR, gauges_every=2)
    reporter = Reporter()
    given["callbacks"] = [reporter, *given["callbacks"]]
    trainer_of(tmp_path, given, max_steps=4, logging_steps=100).train()
    assert [(row["step"], "train_loss" in row, GAUGE in row) for row in reporter.rows] == [(4, True, True)]


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_has_the_gauges(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    given = trainer_kwargs(model(), "mxfp8", lr=LR, gauges_every=2)
    trainer_of(tmp_path, given, max_steps=4, report_to=["tensorboard"]).train()
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [scalar.step for scalar in events.Scalars(f"train/{GAUGE}")] == [2, 4]
    assert [scalar.value for scalar in events.Scalars("train/narrowgauge/skips")] == [0.0] * 5


def test_what_cannot_work_is_refused(tmp_path):
    arguments = TrainingArguments(tmp_path, use_cpu=True, report_to=[])
    arguments.fsdp = "full_shard"
    with pytest.raises(UserError, match=r"DDP .* under any recipe, or .* narrowgauge\.fully_shard"):
        NarrowTrainerCallback().on_init_end(arguments, None, None, model=None)
    given = trainer_kwargs(model(), "nvfp4", lr=LR)
    del given["optimizer_cls_and_kwargs"]
    with pytest.raises(UserError, match="optimizer_cls_and_kwargs"):
        trainer_of(tmp_path, given, max_steps=1).train()


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
def test_trls_trainer_takes_the_same_arguments(tmp_path):
    from trl import SFTConfig, SFTTrainer

    rows = [{"input_ids": e["input_ids"].tolist()} for e in examples(8)]
    config = SFTConfig(tmp_path, max_steps=2, report_to=[], use_cpu=True, bf16=False, logging_steps=1)
    trainer = trl_trainer(SFTTrainer, config, rows, trainer_kwargs(model(), "nvfp4", lr=LR))
    trainer.train()
    assert [row["narrowgauge/skips"] for row in trainer.state.log_history if "loss" in row] == [0, 0]


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
def test_trls_preferences_are_learned_against_a_plain_reference(tmp_path):
    from trl import DPOConfig, DPOTrainer

    words = [" ".join(f"<{t}>" for t in e["input_ids"]) for e in examples(8)]
    rows = [
        {"prompt": a[:20], "chosen": a[20:], "rejected": b[20:]}
        for a, b in zip(words, reversed(words), strict=True)
    ]
    config = {"max_steps": 6, "report_to": [], "use_cpu": True, "bf16": False, "logging_steps": 1}
    reference, given = model(), trainer_kwargs(model(), "nvfp4", lr=LR)
    del given["optimizer_cls_and_kwargs"]  # which DPOTrainer does not take
    given["optimizers"] = (ng.AdamW(given["model"].parameters(), "nvfp4", lr=LR, weight_decay=0.0), None)
    before = {name: t.clone() for name, t in reference.state_dict().items()}
    trainer = trl_trainer(DPOTrainer, DPOConfig(tmp_path, **config), rows, {**given, "ref_model": reference})
    trainer.train()
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["narrowgauge/skips"] for row in logged] == [0] * 6
    assert abs(logged[0]["loss"] - math.log(2)) < 0.05, "policy and reference have the same weights"
    assert logged[-1]["loss"] < 0.9 * logged[0]["loss"]
    assert logged[-1]["rewards/margins"] > 0
    assert all(torch.equal(t, before[name]) for name, t in reference.state_dict().items())


def trl_trainer(trainer_class, config, rows, given):
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"<{i}>": i for i in range(64)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<1>", pad_token="<2>", unk_token="<0>"
    )
    return trainer_class(
        args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, **given
    )

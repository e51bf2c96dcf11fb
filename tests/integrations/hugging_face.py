"""Hugging Face's Trainer on a tiny model: what its tests in one process and in several share."""

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
)

import narrowgauge as ng
from narrowgauge.integrations.transformers import trainer_kwargs as kwargs

__all__ = ["kwargs"]
LR = 1e-2
read = AutoModelForCausalLM.from_pretrained


SIZES = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32},
}


def model(seed=0):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


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
    """The same training without a trainer: its batches, its schedule."""
    m = ng.convert(model(), recipe)
    optimizer = ng.AdamW(m.parameters(), recipe, lr=LR, weight_decay=0.0)
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


def assert_same_weights(one, other):
    weights = one.state_dict()
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


def mixture():
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))


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

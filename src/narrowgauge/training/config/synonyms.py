"""The names by which other trainers call our keys, and where each of them leads.

An option of the command line is found by (in this order)

    its name                    --optimizer.lr, and --model, --steps ...
    the same, with hyphens      --optimizer-lr, --training.batch-size
    the last part of a key      --lr, --batch-size, --fprop.x
    a synonym                   --learning-rate, --seq-len, --max-grad-norm

A synonym leads to a key only if it means exactly the same. If it means something near, or something that
nobody has to ask for here, the answer is a sentence that says what to write instead. A file has the names of
the keys alone, and its errors lead from the others to them.
"""

from collections.abc import Iterable, Mapping

from narrowgauge.errors import UserError, nearest, unknown
from narrowgauge.quantization import cast_keys
from narrowgauge.recipes import CAST_TABLE, RECIPE_KEYS

#: Other names of a key, by key. A name under two keys may mean either, and the answer names both.
SYNONYMS: Mapping[str, str] = {
    "model.name": "arch model-name model-size",
    "model.layers": "n-layer n-layers num-layers num-hidden-layers depth",
    "model.heads": "n-head n-heads num-heads num-attention-heads",
    "model.kv_heads": "n-kv-heads num-kv-heads num-key-value-heads num-query-groups",
    "model.dim": "n-embd d-model hidden-size embedding-dim n-embed",
    "model.ffn_dim": "d-ff intermediate-size ffn-hidden-size moe-intermediate-size moe-ffn-hidden-size",
    "model.experts": "num-experts num-local-experts n-routed-experts",
    "model.experts_per_token": "num-experts-per-tok top-k-experts moe-router-topk",
    "training.balance_loss": "router-aux-loss-coef moe-aux-loss-coeff load-balance-coeff",
    "model.max_sequence_length": (
        "max-position-embeddings n-positions block-size max-seq-len max-seq-length context-length n-ctx"
    ),
    "data.source": "dataset dataset-name dataset-path data-path data-dir data-files train-data corpus",
    "data.sequence_length": (
        "seq-len seq-length seqlen sequence-len block-size max-seq-len max-seq-length context-length n-ctx"
    ),
    "training.steps": (
        "max-steps num-steps n-steps total-steps train-steps training-steps iters iterations num-iterations "
        "max-iters num-iters train-iters"
    ),
    "training.batch_size": "bs global-batch-size total-batch-size train-batch-size",
    "training.seed": "random-seed",
    "training.compile": "torch-compile",
    "training.recompute": "gradient-checkpointing activation-checkpointing checkpoint-activations",
    "training.memory_limit": "max-memory",
    "optimizer.name": "optimizer optim optimizer-type opt",
    "optimizer.lr": "learning-rate max-lr peak-lr base-lr",
    "optimizer.weight_decay": "wd",
    "optimizer.eps": "epsilon adam-eps adam-epsilon",
    "optimizer.clip_norm": (
        "grad-clip clip-grad gradient-clip gradient-clipping gradient-clip-val max-grad-norm max-norm clip "
        "grad-norm-clip"
    ),
    "schedule.kind": "schedule scheduler lr-schedule lr-scheduler lr-scheduler-type lr-decay-style",
    "schedule.warmup_steps": "warmup warmup-iters lr-warmup-steps lr-warmup-iters num-warmup-steps",
    "parallel.replicate": "ddp data-parallel data-parallel-size dp dp-size",
    "parallel.shard": "fsdp data-parallel data-parallel-size dp dp-size",
    "parallel.tensor": "tp tp-size tensor-parallel tensor-parallel-size tensor-model-parallel-size",
    "parallel.pipeline": "pp pp-size pipeline-parallel pipeline-parallel-size pipeline-model-parallel-size",
    "parallel.context": "cp cp-size context-parallel context-parallel-size",
    "parallel.zero": "zero-stage",
    "parallel.expert": "ep ep-size expert-parallel expert-parallel-size expert-model-parallel-size",
    "validation.every": "eval-every eval-interval eval-steps val-every val-interval eval-freq",
    "validation.batches": "eval-iters eval-batches val-batches",
    "checkpoint.every": "save-every save-interval save-steps ckpt-every ckpt-interval checkpoint-interval",
    "checkpoint.keep": "save-total-limit",
    "log.every": "log-interval logging-steps log-freq print-every",
    "log.sinks": "report-to",
    "out": "output-dir output out-dir outdir save-dir run-dir logdir log-dir checkpoint-dir",
}

_AGAIN = "the same line again continues a run that stopped; leave it out, and give the --out that the run had"
_LONG = "write --steps, optimizer steps of training.batch_size x data.sequence_length tokens"
_FORMAT = "the format is a recipe; write --recipe, as in --recipe bf16 ('narrowgauge recipes' lists them)"
_ALONE = "the configuration file stands by itself, as in: narrowgauge train my.toml --steps 100"
_START = "one process is started for each device, as in: torchrun --nproc-per-node 8 -m narrowgauge train"
_ACCUMULATE = (
    "a step takes training.batch_size sequences of all ranks, in micro-batches of training.micro_batch_size; "
    "accumulation follows from the two"
)
_WEIGHTS = (
    "a run starts from the weights of another by --model.weights RUN; 'narrowgauge import PATH --out RUN' "
    "makes a run of another program's model"
)

#: Names that no key answers to exactly, and what to write instead.
INSTEAD: Mapping[str, str] = {
    "resume continue load auto-resume resume-from resume-from-checkpoint load-checkpoint restart": _AGAIN,
    "checkpoint ckpt checkpoint-path": f"{_AGAIN}; --model.weights RUN starts from another run's weights",
    "init-from pretrained finetune-from from-pretrained model-name-or-path": _WEIGHTS,
    "epochs epoch num-epochs n-epochs max-epochs num-train-epochs train-epochs": _LONG,
    "tokens max-tokens total-tokens num-tokens train-tokens token-budget": _LONG,
    "fp8 fp16 bf16 fp32 fp4 amp tf32 half": "the format is a recipe; write --recipe {name}",
    "dtype precision mixed-precision torch-dtype format bits quantization quantize": _FORMAT,
    "config config-file cfg conf": _ALONE,
    "gpus n-gpus num-gpus ngpus nproc nproc-per-node gpus-per-node world-size devices nodes nnodes": _START,
    "local-rank rank": "the launcher says the rank to each process by its environment; leave it out",
    "gpu cuda use-cuda": "write --device cuda",
    "cpu no-cuda use-cpu": "write --device cpu",
    "gradient-accumulation-steps grad-accum grad-accum-steps accumulate accumulation-steps": _ACCUMULATE,
    "grad-acc accumulate-grad-batches": _ACCUMULATE,
    "per-device-train-batch-size per-device-batch-size device-batch-size local-batch-size mbs": _ACCUMULATE,
    "min-lr lr-min final-lr": "write --schedule.final_lr_fraction, a share of the peak (0.1)",
    "warmup-ratio warmup-fraction": "write --schedule.warmup_steps, a number of steps (100)",
    "lr-decay-iters lr-decay-steps": "write --schedule.decay_steps, the step at which the fall ends",
    "beta1 beta2 adam-beta1 adam-beta2 adam-betas": "write both with --optimizer.betas 0.9,0.95",
    "wandb tensorboard trackio": "write --log.sinks {name}",
    "wandb-project wandb-name run-name experiment-name exp-name project": "a run has the name of its --out",
    "overwrite force overwrite-output-dir": "no run is overwritten; name another --out",
    "workers num-workers dataloader-num-workers": "the loader reads ahead by itself; leave it out",
    "dry-run dryrun check validate": (
        "'narrowgauge plan' with the same options trains nothing: it prints memory, time and cost"
    ),
    "verbose quiet debug": "write --log.every N for more or fewer lines of progress",
}


def plain(name: str) -> str:
    """A name with hyphens between its words, however it was written.

    >>> plain("batch_size"), plain("Optimizer.lr")
    ('batch-size', 'optimizer-lr')
    """
    return name.lower().replace("_", "-").replace(".", "-")


def other_names(keys: Iterable[str]) -> dict[str, list[str]]:
    """The keys that each other name may mean: the whole key, every ending of it, and its synonyms.

    >>> names = other_names(["optimizer.lr", "log.every", "gauges.every"])
    >>> names["lr"], names["learning-rate"], names["every"]
    (['optimizer.lr'], ['optimizer.lr'], ['log.every', 'gauges.every'])
    """
    keys = list(keys)
    synonyms: dict[str, list[str]] = {}
    endings: dict[str, list[str]] = {}
    whole: dict[str, list[str]] = {}
    for key in keys:
        whole[plain(key)] = [key]
        parts = key.split(".")
        for start in range(1, len(parts)):
            endings.setdefault(plain(".".join(parts[start:])), []).append(key)
        for name in SYNONYMS.get(key, "").split():
            synonyms.setdefault(name, []).append(key)
    return synonyms | endings | whole


def key_of(name: str, keys: Iterable[str]) -> str | None:
    """The key that a name without its `--` means, or None if nothing here knows it.

    Raises:
        UserError: The name may mean several keys, or is answered by something else.
    """
    found = other_names(keys).get(plain(name), [])
    if len(found) > 1:
        raise UserError(f"--{name} may mean {_or(found, '--')}; write the one that is meant")
    if found:
        return found[0]
    if answer := _instead(name):
        raise UserError(f"there is no option --{name}; {answer}")
    return None


def _instead(name: str) -> str:
    """What to write instead of a name that no key answers to; "" if nothing here knows it."""
    if plain(name) in map(plain, cast_keys()):
        return f"it is a key of a cast; write it in a place, as in --recipe.fprop.x '{CAST_TABLE}'"
    sentences = (sentence for names, sentence in INSTEAD.items() if plain(name) in names.split())
    return next(sentences, "").replace("{name}", plain(name))


def unknown_key(name: str, keys: Iterable[str], dashes: str = "") -> UserError:
    """The error for a `section.key` that there is not.

    It names the key that has this last part in another section or under another name, else the nearest.

    >>> str(unknown_key("training.learning_rate", ["optimizer.lr", "training.steps"]))
    "unknown key 'training.learning_rate'; it is optimizer.lr"
    """
    known = list(keys)
    kind = "option" if dashes else "key"
    section, _, last = name.rpartition(".")
    is_place = "." in section  # of a recipe: another place may have an operand of this name
    if section == "recipe" and last in RECIPE_KEYS:
        return UserError(
            f"unknown {kind} '{dashes}{name}'; it is a key of a recipe file: 'narrowgauge recipes fp8' "
            "prints one to start from, and --recipe FILE.toml takes it"
        )
    if not is_place and (found := other_names(known).get(plain(last), [])):
        return UserError(f"unknown {kind} '{dashes}{name}'; it is {_or(found, dashes)}")
    if answer := _instead(last):
        return UserError(f"unknown {kind} '{dashes}{name}'; {answer}")
    others = other_names(known)
    if not section and (near := nearest(plain(name), others)):
        keys = " or ".join(f"'{dashes}{key}'" for key in others[near])
        return UserError(f"unknown {kind} '{dashes}{name}'; the nearest is {keys}")
    return unknown(kind, dashes + name, [dashes + key for key in known])


def outside(name: str, value: object, keys: Iterable[str]) -> UserError:
    """The error for a key of a file that stands above every section.

    >>> str(outside("learning_rate", 0.1, ["optimizer.lr", "training.steps"]))
    'learning_rate = 0.1 stands outside of a section; write lr below [optimizer]'
    """
    if answer := _instead(name):
        return UserError(f"unknown key {name!r} outside of a section; {answer}")
    others, start = other_names(keys), f"{name} = {value!r} stands outside of a section"
    near = plain(name) if plain(name) in others else nearest(plain(name), others)
    if near is None:
        return UserError(
            f"unknown key {name!r} outside of a section; 'narrowgauge train --help all' lists the keys"
        )
    if near != plain(name):
        start = f"unknown key {name!r} outside of a section; the nearest is {near!r}"
    places = (f"{key} below [{section}]" for section, _, key in (key.partition(".") for key in others[near]))
    return UserError(f"{start}; write {' or '.join(places)}")


def _or(keys: list[str], dashes: str) -> str:
    *first, last = (dashes + key for key in keys)
    return f"{', '.join(first)} or {last}" if first else last

"""Other trainers' names for the everyday keys, and the keys that they stand for.

An option of the command line is found by (in this order)

    its name                    --optimizer.lr, and --model, --steps ...
    the same, with hyphens      --optimizer-lr, --training.batch-size
    the last part of a key      --lr, --batch-size, --fprop.x
    a synonym                   --learning-rate, --seq-len, --max-grad-norm

Synonyms are spellings of torchtitan, Hugging Face's Trainer, llm.c, nanoGPT and Megatron that mean exactly
the same as the key. For a name with a similar meaning, or one that needs no option here, the error names what
to write instead; for any other, the nearest name. Files accept only the names of the keys, and their errors
suggest the key for another name.
"""

from collections.abc import Iterable, Mapping

from narrowgauge.errors import UserError, nearest, unknown
from narrowgauge.quantization import cast_keys
from narrowgauge.recipes import CAST_TABLE, RECIPE_KEYS

#: Other names of a key, by key. A name listed under two keys is ambiguous, and the error names both.
SYNONYMS: Mapping[str, str] = {
    "model.layers": "n-layer num-layers num-hidden-layers",
    "model.heads": "n-head num-attention-heads",
    "model.kv_heads": "num-key-value-heads",
    "model.dim": "n-embd hidden-size",
    "model.ffn_dim": "intermediate-size ffn-hidden-size",
    "model.max_sequence_length": "block-size max-seq-len max-position-embeddings",
    "data.source": "dataset data-path",
    "data.sequence_length": "block-size max-seq-len seq-len seq-length",
    "training.steps": "max-steps max-iters train-iters num-iterations",
    "training.batch_size": "global-batch-size",
    "training.recompute": "gradient-checkpointing",
    "optimizer.name": "optimizer",
    "optimizer.lr": "learning-rate",
    "optimizer.clip_norm": "grad-clip clip-grad max-grad-norm",
    "schedule.kind": "lr-scheduler-type lr-decay-style",
    "schedule.warmup_steps": "warmup-iters lr-warmup-iters",
    "parallel.replicate": "ddp",
    "parallel.shard": "fsdp",
    "parallel.tensor": "tp",
    "parallel.pipeline": "pp",
    "validation.every": "eval-interval eval-steps",
    "validation.batches": "eval-iters",
    "checkpoint.every": "save-interval save-steps",
    "log.every": "log-interval logging-steps",
    "out": "out-dir output-dir",
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

#: Names without an exact key, and what to write instead.
INSTEAD: Mapping[str, str] = {
    "resume continue resume-from-checkpoint load": _AGAIN,
    "checkpoint ckpt": f"{_AGAIN}; --model.weights RUN starts from another run's weights",
    "init-from pretrained model-name-or-path": _WEIGHTS,
    "epochs num-epochs num-train-epochs tokens max-tokens": _LONG,
    "fp8 fp16 bf16 fp32 fp4 amp": "the format is a recipe; write --recipe {name}",
    "dtype precision mixed-precision format quantize": _FORMAT,
    "config config-file": _ALONE,
    "gpus num-gpus nproc-per-node world-size devices nodes": _START,
    "local-rank rank": "the launcher passes the rank to each process by its environment; leave it out",
    "gpu cuda": "write --device cuda",
    "cpu no-cuda": "write --device cpu",
    "grad-accum gradient-accumulation-steps per-device-train-batch-size local-batch-size": _ACCUMULATE,
    "min-lr": "write --schedule.final_lr_fraction, a share of the peak (0.1)",
    "warmup-ratio": "write --schedule.warmup_steps, a number of steps (100)",
    "lr-decay-iters": "write --schedule.decay_steps, the step at which the fall ends",
    "beta1 beta2 adam-beta1 adam-beta2": "write both with --optimizer.betas 0.9,0.95",
    "wandb tensorboard trackio": "write --log.sinks {name}",
    "wandb-project wandb-name run-name": "a run has the name of its --out",
    "overwrite force": "a run is never overwritten; name another --out",
    "workers num-workers": "the loader reads ahead by itself; leave it out",
    "dry-run check": "'narrowgauge plan' with the same options prints memory, time and cost",
    "verbose quiet": "write --log.every N for more or fewer lines of progress",
}


def plain(name: str) -> str:
    """A name with hyphens between its words, however it was written.

    >>> plain("batch_size"), plain("Optimizer.lr")
    ('batch-size', 'optimizer-lr')
    """
    return name.lower().replace("_", "-").replace(".", "-")


def other_names(keys: Iterable[str]) -> dict[str, list[str]]:
    """The keys that each other name may stand for: the whole key, every ending of it, and its synonyms.

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


def endings_of(name: str) -> list[str]:
    """The last parts, with hyphens, of the keys that a synonym stands for: options of verbs without keys.

    >>> endings_of("seq-len")
    ['sequence-length']
    """
    keys = (key for key, names in SYNONYMS.items() if plain(name) in names.split())
    return [plain(key.rpartition(".")[2]) for key in keys]


def key_of(name: str, keys: Iterable[str]) -> str | None:
    """The key for a name without its `--`; None if it is unknown here.

    Raises:
        UserError: The name is ambiguous, or something else replaces it.
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
    """What to write instead of a name without a key; "" if it is unknown here."""
    if plain(name) in map(plain, cast_keys()):
        return f"it is a key of a cast; write it in a place, as in --recipe.fprop.x '{CAST_TABLE}'"
    sentences = (sentence for names, sentence in INSTEAD.items() if plain(name) in names.split())
    return next(sentences, "").replace("{name}", plain(name))


def unknown_key(name: str, keys: Iterable[str], dashes: str = "") -> UserError:
    """The error for an unknown `section.key`.

    It names the key with this last part in another section or under another name, else the nearest key.

    >>> str(unknown_key("training.learning_rate", ["optimizer.lr", "training.steps"]))
    "unknown key 'training.learning_rate'; it is optimizer.lr"
    """
    known = list(keys)
    kind = "option" if dashes else "key"
    section, _, last = name.rpartition(".")
    is_place = "." in section  # a place of a recipe: another place may have an operand with this name
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
    """The error for a key in a file before any section.

    >>> str(outside("learning_rate", 0.1, ["optimizer.lr", "training.steps"]))
    'learning_rate = 0.1 stands outside a section; write lr below [optimizer]'
    """
    if answer := _instead(name):
        return UserError(f"unknown key {name!r} outside a section; {answer}")
    others, start = other_names(keys), f"{name} = {value!r} stands outside a section"
    near = plain(name) if plain(name) in others else nearest(plain(name), others)
    if near is None:
        return UserError(
            f"unknown key {name!r} outside a section; 'narrowgauge train --help all' lists the keys"
        )
    if near != plain(name):
        start = f"unknown key {name!r} outside a section; the nearest is {near!r}"
    places = (f"{key} below [{section}]" for section, _, key in (key.partition(".") for key in others[near]))
    return UserError(f"{start}; write {' or '.join(places)}")


def _or(keys: list[str], dashes: str) -> str:
    *first, last = (dashes + key for key in keys)
    return f"{', '.join(first)} or {last}" if first else last

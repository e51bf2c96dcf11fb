"""Bits per byte, and HellaSwag."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data import bytes_tokenizer, ids_tokenizer, train_bpe
from narrowgauge.trainer.data.tokenization.tokenizer import Tokenizer
from narrowgauge.trainer.runs import open_run
from narrowgauge.trainer.runs.loop.validation import token_bytes
from narrowgauge.trainer.runs.use.tasks import evaluate

TEXT = "narrow gauge, é 漢字 \n\ttrains 🚂 and <|endoftext|> in text"


def test_the_bytes_of_tokens_are_those_of_their_text():
    """Also of a vocabulary as in Llama 2: a mark for the space, and entries for single bytes."""
    for tokenizer in (bytes_tokenizer(), train_bpe([TEXT] * 20, 300)):
        ids = tokenizer.encode(TEXT)
        assert int(token_bytes(tokenizer)[ids].sum()) == len(TEXT.encode())
        assert token_bytes(tokenizer)[tokenizer.end_of_document] == 0
    vocabulary = {"<unk>": 0, "</s>": 1, "<0xE6>": 2, "\u2581train": 3, "é": 4}
    library = Library(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    library.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    library.add_special_tokens(["<unk>", "</s>"])
    assert token_bytes(Tokenizer(library, 5, 1, False)).tolist() == [0, 0, 1, 6, 2]
    assert not token_bytes(ids_tokenizer(20, 19)).any()


EXAMPLES = [
    {"ctx": "narrow gauge", "endings": ["rail", "coal and steam", "valley", "x"], "label": 1},
    {"ctx": "steam", "endings": ["train", "signal"], "label": 0},
    {"ctx": "s", "endings": ["coal", "a"], "label": 1},
    {"ctx": "valley " * 299 + "valley", "endings": ["of coal", "of steam"], "label": 0},
]


@pytest.fixture
def there(trained):
    """A model of bytes, without its tokenizer."""
    there = open_run(trained({"recipe.name": "fp32"}), "cpu")
    return type(there)(there.path, there.config, there.model, 0, None)


def as_binary(path, examples):
    """llm.c's layout, written as its `write_evalfile` does."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240522, 1, len(examples)
    stream = []
    for number, e in enumerate(examples):
        parts = [list(e["ctx"].encode()), *(list((" " + x).encode()) for x in e["endings"])]
        body = [number, e["label"], len(e["endings"])]
        for part in parts:
            body += [len(part), *part]
        stream += [65535, 2 * (2 + len(body)), *body]
    path.write_bytes(header.tobytes() + np.array(stream, dtype="<u2").tobytes())
    return path


def test_scores_are_those_of_a_plain_computation(there, tmp_path):
    path = as_binary(tmp_path / "task", EXAMPLES)
    right = right_norm = 0
    for e in EXAMPLES:
        context = list(e["ctx"].encode())
        totals, means = [], []
        for ending in e["endings"]:
            ids = list((" " + ending).encode())
            longest = max(len(" " + other) for other in e["endings"])
            shown = context[-(1024 + 1 - longest) :]
            with torch.no_grad():
                log_p = there.model(torch.tensor([(shown + ids)[:-1]]))[0].log_softmax(-1)
            places = range(len(shown) - 1, len(shown) + len(ids) - 1)
            total = sum(log_p[at, i].item() for at, i in zip(places, ids, strict=True))
            totals.append(total)
            means.append(total / len(ids))
        right += totals.index(max(totals)) == e["label"]
        right_norm += means.index(max(means)) == e["label"]
    score = evaluate(there, path)
    assert (score.examples, score.acc, score.acc_norm) == (4, right / 4, right_norm / 4)
    assert evaluate(there, path, limit=2).examples == 2


BINARY = [
    (lambda data: data[:-1], "cut"),
    (lambda data: data[:-2], "cut|stated length"),
    (lambda data: data[:900], "header is cut"),
    (lambda data: data[:1024] + b"\0\0" + data[1026:], "does not begin with 65535"),
    (lambda data: data + b"\0\0", "more values follow the last example"),
    (lambda data: data[:1030] + b"\x09\0" + data[1032:], "label is not an ending's"),
]


def test_a_damaged_file_is_refused_by_its_name(there, tmp_path):
    path = tmp_path / "task"
    for change, words in BINARY:
        as_binary(path, EXAMPLES)
        path.write_bytes(change(path.read_bytes()))
        with pytest.raises(UserError, match=words) as error:
            evaluate(there, path)
        assert str(path) in str(error.value)


def test_what_is_no_evaluation_of_this_model_is_refused(there, trained, tmp_path):
    """Nor is a model of llm.c's in the place of its evaluation one."""
    (tmp_path / "model.bin").write_bytes((20240326).to_bytes(4, "little") + bytes(1020))
    as_binary(tmp_path / "none", [])
    as_binary(tmp_path / "gpt2", [*EXAMPLES, {"ctx": "é", "endings": ["漢"], "label": 0}])
    data = bytearray(as_binary(tmp_path / "large", EXAMPLES[:1]).read_bytes())
    data[1024 + 12 : 1024 + 14] = (50256).to_bytes(2, "little")  # the first token of the context
    (tmp_path / "large").write_bytes(data)
    bytewise = open_run(trained({"recipe.name": "fp32"}), "cpu")
    for name, run, words in [
        ("none", there, "no example"),
        ("model.bin", there, "model.bin is not an evaluation file of llm.c"),
        ("gpt2", bytewise, r"GPT-2's tokenizer.*has 257 ids; use --task lm-eval:hellaswag"),
        ("large", there, "example 0 has the token id 50256"),
    ]:
        with pytest.raises(UserError, match=words):
            evaluate(run, tmp_path / name)

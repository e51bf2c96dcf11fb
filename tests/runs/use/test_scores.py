"""Bits per byte, and tasks of the kind of HellaSwag."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models

from narrowgauge.data import bytes_tokenizer, ids_tokenizer, train_bpe
from narrowgauge.data.tokenization.tokenizer import Tokenizer
from narrowgauge.errors import UserError
from narrowgauge.runs import open_run
from narrowgauge.runs.loop.validation import token_bytes
from narrowgauge.runs.use.hellaswag import evaluate, read_examples
from support.llama2 import KINDS, write_llama2

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
    {"ctx": "steam", "endings": ["train", "signal"], "label": "0"},
    {"ctx": "", "endings": ["coal", "a"], "label": 1},
    {"ctx": "valley " * 299 + "valley", "endings": ["of coal", "of steam"], "label": 0},
]


def as_lines(path, examples):
    path.write_text("".join(json.dumps(e) + "\n" for e in examples))
    return path


@pytest.fixture
def there(trained):
    return open_run(trained({"recipe.name": "fp32"}), "cpu")


def with_tokenizer(there, file):
    """The same model with another tokenizer, or with none."""
    return type(there)(there.path, there.config, there.model, 0, file)


def test_scores_are_those_of_a_plain_computation(there, tmp_path):
    path = as_lines(tmp_path / "task.jsonl", EXAMPLES)
    right = right_norm = 0
    for e in EXAMPLES:
        context = list(e["ctx"].encode()) or [256]
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
        right += totals.index(max(totals)) == int(e["label"])
        right_norm += means.index(max(means)) == int(e["label"])
    score = evaluate(there, path)
    assert (score.examples, score.acc, score.acc_norm) == (4, right / 4, right_norm / 4)
    assert evaluate(there, path, limit=2).examples == 2


def as_binary(path, examples):
    """llm.c's layout, written as its `write_evalfile` does."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240522, 1, len(examples)
    stream = []
    for number, e in enumerate(examples):
        parts = [list(e["ctx"].encode()) or [50256], *(list((" " + x).encode()) for x in e["endings"])]
        body = [number, int(e["label"]), len(e["endings"])]
        for part in parts:
            body += [len(part), *part]
        stream += [65535, 2 * (2 + len(body)), *body]
    path.write_bytes(header.tobytes() + np.array(stream, dtype="<u2").tobytes())
    return path


def test_both_kinds_of_file_hold_the_same_examples(there, tmp_path):
    examples = [e for e in EXAMPLES if e["ctx"]]
    lines = list(read_examples(as_lines(tmp_path / "a", examples), there))
    without = with_tokenizer(there, None)
    binary = list(read_examples(as_binary(tmp_path / "b", examples), without))
    assert lines == binary
    assert evaluate(without, tmp_path / "b") == evaluate(there, tmp_path / "a")


@pytest.mark.parametrize("kind", KINDS)
def test_an_ending_is_encoded_as_the_continuation_of_its_context(there, tmp_path, kind):
    """As lm-eval does: one text, cut where the context's own tokens end; its last blanks are the ending's."""
    tokenizer = write_llama2(tmp_path / "tokenizer.json", kind)
    run = with_tokenizer(there, tmp_path / "tokenizer.json")
    contexts = ["steam", "steam train,", "steam ", "steam  ", ""]
    examples = [{"ctx": text, "endings": ["train", "coal a"], "label": 0} for text in contexts]
    found = list(read_examples(as_lines(tmp_path / "task", examples), run))
    for text, example in zip(contexts, found, strict=True):
        assert example.context == [1, *tokenizer.encode(text.rstrip())]
        for ending, ids in zip(["train", "coal a"], example.endings, strict=True):
            assert [*example.context, *ids] == [1, *tokenizer.encode(f"{text} {ending}")]
    assert [tokenizer.library.id_to_token(i) for i in found[0].endings[0]] == ["\u2581tr", "a", "i", "n"]


def test_an_ending_without_a_token_is_named(there, tmp_path):
    ids_tokenizer(257, 256).save(tmp_path / "tokenizer.json")
    run = with_tokenizer(there, tmp_path / "tokenizer.json")
    path = as_lines(tmp_path / "task", [{"ctx": "12 13", "endings": ["14", " "], "label": 0}])
    with pytest.raises(UserError, match=r"task:1 is not an example.*an ending adds no token to its context"):
        evaluate(run, path)


def test_blanks_at_the_end_of_a_context_belong_to_the_ending(there, tmp_path):
    path = as_lines(tmp_path / "task", [{"ctx": "steam ", "endings": ["train"], "label": 0}])
    (example,) = read_examples(path, there)
    assert (bytes(example.context), bytes(example.endings[0])) == (b"steam", b"  train")


BINARY = [
    (lambda data: data[:-1], "cut"),
    (lambda data: data[:-2], "cut|stated length"),
    (lambda data: data[:900], "header is cut"),
    (lambda data: data[:1024] + b"\0\0" + data[1026:], "does not begin with 65535"),
    (lambda data: data + b"\0\0", "more values follow the last example"),
    (lambda data: data[:1030] + b"\x09\0" + data[1032:], "label is not an ending's"),
]
LINES = [
    ('{"ctx": "a", "endings": ["b"', ":2 is not an example"),
    ('{"ctx": "a", "endings": ["b"]}', "'label'"),
    ('{"ctx": 3, "endings": ["b"], "label": 0}', "of another kind"),
    ('{"ctx": "a", "endings": "bc", "label": 0}', "of another kind"),
    ('{"ctx": "a", "endings": ["b", "c"], "label": 2}', "label 2"),
    ("[1]", ":2 is not an example"),
]


def test_a_damaged_file_is_refused_by_its_name(there, tmp_path):
    path, without = tmp_path / "task", with_tokenizer(there, None)
    for change, words in BINARY:
        as_binary(path, [e for e in EXAMPLES if e["ctx"]])
        path.write_bytes(change(path.read_bytes()))
        with pytest.raises(UserError, match=words):
            evaluate(without, path)
    for line, words in LINES:
        as_lines(path, EXAMPLES[:1])
        path.write_text(path.read_text() + line + "\n")
        with pytest.raises(UserError, match=words) as error:
            evaluate(there, path)
        assert str(path) in str(error.value)


def test_what_is_no_evaluation_of_this_model_is_refused(there, tmp_path):
    """A model of llm.c's in the place of its evaluation: bytes that are no text are not printed."""
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "model.bin").write_bytes((20240326).to_bytes(4, "little") + bytes(1020))
    as_binary(tmp_path / "gpt2", EXAMPLES)
    for name, run, words in [
        ("empty", there, "no example"),
        ("missing", there, "cannot be read"),
        ("model.bin", there, r"model.bin:1 is not an example of the task: it is not text; each"),
        ("gpt2", there, r"GPT-2's tokenizer.*has 257 ids"),
        ("gpt2", with_tokenizer(there, None), "example 2 has the token id 50256"),
    ]:
        with pytest.raises(UserError, match=words):
            evaluate(run, tmp_path / name)

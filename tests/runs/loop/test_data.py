"""The same tokens make the same run, whoever's file they come in; and runs that keep documents apart."""

import numpy as np
import pytest

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data import prepare, write_megatron, write_token_file
from narrowgauge.trainer.runs.loop.resolve import check_vocabulary
from narrowgauge.trainer.training import make_config
from support.fault_table import case
from support.runs import interrupted

SMALL = {"model.vocab_size": 300, "data.tokenizer": "auto", "training.steps": 4}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Forty documents of made-up prose, prepared."""
    folder = tmp_path_factory.mktemp("prose")
    rng = np.random.default_rng(0)
    words = np.array(["narrow", "gauge", "rail", "train", "coal", "steam", "valley", "signal"])
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(" ".join(words[rng.integers(0, 8, 600)]) + "\n")
    return folder, prepare(str(folder), "bpe-300", tmp_path_factory.mktemp("corpus") / "out")


def documents(tokens, end):
    return [part for part in np.split(np.asarray(tokens), np.flatnonzero(tokens == end)) if len(part)]


def write_as(layout, corpus, folder):
    folder.mkdir()
    corpus.tokenizer.save(folder / "tokenizer.json")
    for name, part in (("train", corpus.train), ("val", corpus.val)):
        tokens = part.streams[0][:]
        if layout == "megatron":
            write_megatron(folder / f"my_{name}_document", documents(tokens, 0), 300)
        elif layout == "llm.c":
            write_token_file(folder / f"tiny_{name}.bin", [tokens], 300)
        else:
            (folder / f"{name}.bin").write_bytes(np.asarray(tokens).astype("<u2").tobytes())
    return str(folder)


@pytest.mark.tier("thorough")  # whole runs
def test_a_model_learns_the_same_from_text_a_prepared_corpus_and_token_files(corpus, tmp_path, train, look):
    text, prepared = corpus
    sources = {"text": (text, "bpe-300"), "prepared": (prepared.directory, "auto")}
    sources["bare"] = write_as("bare", prepared, tmp_path / "x"), "auto"
    found = [
        look(train(name, SMALL | {"data.source": str(source), "data.tokenizer": tokenizer})).trajectory
        for name, (source, tokenizer) in sources.items()
    ]
    assert found[0] == found[1] == found[2]


def test_gpt2s_tokens_are_refused_for_a_small_vocabulary_before_they_are_read(tmp_path):
    write_token_file(file := tmp_path / "tokens.bin", [np.arange(2000)], 50257)
    file.write_bytes(file.read_bytes()[:1024] + b"\xff" * 4000)  # ids that a reader would refuse
    config = make_config({"model": {"name": "gpt2-debug"}, "data": {"source": str(tmp_path)}})
    words = r"has token ids up to 50256, beyond model\.vocab_size = 4096; set --model\.vocab_size 50257"
    with pytest.raises(UserError, match=words):
        check_vocabulary(config)
    check_vocabulary(make_config({"model": {"name": "gpt2-124m"}, "data": {"source": str(tmp_path)}}))


@pytest.mark.tier("nightly", keep=("megatron",))
@pytest.mark.tier("thorough")  # whole runs
@case("E9", tier="quick")
@pytest.mark.parametrize("layout", ["llm.c", "megatron"])
def test_a_run_that_keeps_documents_apart_is_the_same_for_any_micro_batch(
    corpus, tmp_path, train, look, layout
):
    changes = SMALL | {
        "data.source": write_as(layout, corpus[1], tmp_path / "x"),
        "data.separate_documents": True,
        "data.sequence_length": 512,
        "model.max_sequence_length": 512,
        "training.batch_size": 4,
        "recipe.name": "fp32",
    }
    runs = [look(train(f"micro-{n}", changes | {"training.micro_batch_size": n})) for n in (1, 4)]
    together = look(train("together", changes | {"data.separate_documents": False}))
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose(runs[0].column(key), runs[1].column(key), rtol=1e-4)
        assert runs[0].column(key) != together.column(key)
    assert runs[0].column("loss")[0] == pytest.approx(together.column("loss")[0], rel=0.01)


@pytest.mark.tier("thorough")
def test_a_mixture_of_text_and_tokens_goes_on_where_it_stopped(corpus, tmp_path, train, look):
    text, prepared = corpus
    source = write_as("megatron", prepared, tmp_path / "x")
    changes = SMALL | {"data.tokenizer": f"{source}/tokenizer.json", "data.source": f"{text},{source}"}
    weighted = changes | {"data.weights": "0.75,0.25"}
    path = train("run", weighted)
    whole = look(path).trajectory
    interrupted(path, 4)
    train("run", weighted)
    assert look(path).events("resume")[0]["step"] == 2
    assert look(path).trajectory == whole
    assert look(train("even", changes | {"data.weights": "1,1"})).column("loss") != look(path).column("loss")

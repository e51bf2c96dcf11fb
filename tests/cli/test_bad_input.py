"""A mistake is one sentence that names the thing, exit code 2, and nothing is trained."""

import os
import signal

import pytest

DEEP = "no/such/dir"

# The words after `narrowgauge`, and what the sentence has to say. {run} is a finished run, {dir} a directory
# with the files below, {text} the corpus.
LINES = {
    "verb": (["trian"], ["unknown verb 'trian'", "'train'"]),
    "no verb but a word": ([""], ["unknown verb ''"]),
    "option": (["train", "--stepz", "3"], ["unknown option '--stepz'", "'--steps'"]),
    "option of another verb": (["eval", "{run}", "--prompt", "x"], ["unknown option '--prompt'"]),
    "key": (["train", "--optimizer.learning_rate", "1"], ["unknown option '--optimizer.learning_rate'"]),
    "place": (["train", "--recipe.fprop.q", "bf16"], ["'--recipe.fprop.q'", "'--recipe.fprop.x'"]),
    "option without a value": (["train", "--steps"], ["--steps", "expected one argument"]),
    "one argument more": (["train", "{dir}/good.toml", "b.toml"], ["unknown argument 'b.toml'"]),
    "no run": (["sample", "--prompt", "x"], ["RUN", "narrowgauge sample --help"]),
    "no prompt": (["sample", "{run}"], ["--prompt"]),
    "sample: no such run": (["sample", "{dir}/none", "--prompt", "x"], ["{dir}/none", "no run directory"]),
    "sample: a file": (
        ["sample", "{dir}/good.toml", "--prompt", "x"],
        ["{dir}/good.toml", "is no model file"],
    ),
    "sample: length": (["sample", "{run}", "--prompt", "x", "--tokens", "-1"], ["= -1"]),
    "sample: temperature": (["sample", "{run}", "--prompt", "x", "--temperature", "nan"], ["= nan"]),
    "sample: seed": (["sample", "{run}", "--prompt", "x", "--seed", "9" * 20], ["seed = 99999"]),
    "sample: no UTF-8": (["sample", "{run}", "--prompt", "\udcff"], ["U+DCFF"]),
    "eval: no such run": (["eval", "{dir}"], ["{dir}", "no run directory"]),
    "eval: task": (["eval", "{run}", "--task", "vla"], ["unknown task 'vla'", "'val'"]),
    "eval: batches": (["eval", "{run}", "--batches", "0"], ["--batches 0"]),
    "eval: device": (["eval", "{run}", "--device", "gpu"], ["unknown device 'gpu'"]),
    "report: no such run": (["report", "{run}", "{dir}/none"], ["{dir}/none", "is not a run"]),
    "report: page": (["report", "{run}", "--out", "{dir}"], ["{dir}", "is a directory"]),
    "report: below a file": (["report", "{run}", "--out", "{dir}/good.toml/x"], ["cannot write"]),
    "recipes: name": (["recipes", "mxpf4"], ["unknown recipe 'mxpf4'", "'mxfp4'"]),
    "recipes: file": (["recipes", "{dir}/none.toml"], ["{dir}/none.toml", "cannot be read"]),
    "formats: name": (["formats", "e4m4"], ["unknown format 'e4m4'", "'e4m3'"]),
    "no file": (["train", "{dir}/goood.toml"], ["{dir}/goood.toml", "good.toml"]),
    "a directory as the file": (["train", "{dir}"], ["{dir}", "is a directory", "name a .toml file"]),
    "a binary file": (["train", "{dir}/binary.txt"], ["{dir}/binary.txt", "cannot be read"]),
    "compare: no recipes": (["compare"], ["--recipes"]),
    "scaling: no numbers": (["scaling"], ["--procs ''", "as in 1,2,4"]),
    "scaling: falling numbers": (["scaling", "--procs", "2,1"], ["--procs '2,1'", "ascending"]),
    "scaling: no process": (["scaling", "--procs", "0,1"], ["--procs '0,1'", "ascending"]),
    "scaling: seconds": (["scaling", "--procs", "1", "--seconds", "0"], ["--seconds 0", "above 0"]),
    "scaling: a batch that cannot be divided": (
        ["scaling", "--procs", "1,3", "--device", "cpu"],
        ["training.batch_size = 8", "over 3 processes", "that fits: 1, 2, 4, 8"],
    ),
    "scaling: fewer than a model is divided over": (
        ["scaling", "--procs", "1,2", "--parallel.tensor", "2", "--device", "cpu"],
        ["--procs 1", "2 processes that [parallel] asks for", "multiples of 2"],
    ),
    "scaling: below a file": (
        ["scaling", "--procs", "1", "--device", "cpu", "--out", "{dir}/good.toml/x"],
        ["good.toml/x", "cannot be written"],
    ),
}

FILES = {
    "good.toml": b"[training]\nsteps = 1\n",
    "empty.txt": b"",
    "blank.txt": b" \n\t\n",
    "short.txt": b"coal\n",
    "binary.txt": bytes(range(128, 256)) * 40,
    "text.dat": b"coal and steam\n" * 99,
    "latin/a.txt": "café\n".encode("latin-1"),
    "latin/b.txt": b"coal\n",
    "brief/a.txt": b"coal\n",
    "brief/b.txt": b"steam\n",
    "tokenizer.json": b"{}",
    "recipe.toml": b"[fprop]\nx = {cast = 'mxfp4', hadamard = 'many'}\n",
}

# Keys over those of the tiny run.
KEYS = {
    "model": ({"model.name": "gpt2-124"}, ["unknown model 'gpt2-124'", "'gpt2-124m'"]),
    "recipe": ({"recipe.name": "mxpf4"}, ["unknown recipe 'mxpf4'", "'mxfp4'"]),
    "recipe file": ({"recipe.name": "{dir}/none.toml"}, ["{dir}/none.toml", "cannot be read"]),
    "recipe value": ({"recipe.name": "{dir}/recipe.toml"}, ["fprop.x", "hadamard = 'many'"]),
    "backend": ({"recipe.backend": "native"}, ["'fp8'", "--backend emulated"]),
    "device": ({"training.device": "cuda:99"}, ["cuda:99"]),
    "steps": ({"training.steps": 0}, ["training.steps = '0'", "greater than or equal to 1"]),
    "a fraction of steps": ({"training.steps": "1.5"}, ["training.steps = '1.5'", "integer"]),
    "seed": ({"training.seed": -1}, ["training.seed = '-1'"]),
    "lr": ({"optimizer.lr": "nan"}, ["optimizer.lr = 'nan'", "finite"]),
    "betas": ({"optimizer.betas": "0.9"}, ["optimizer.betas = '0.9'", "0.9,0.95"]),
    "batch": ({"training.micro_batch_size": 3}, ["batch_size = 2", "micro_batch_size = 3"]),
    "a batch beyond counting": ({"training.batch_size": 10**30}, ["training.batch_size", "less than"]),
    "heads": ({"model.heads": 3}, ["model.dim = 32", "model.heads = 3"]),
    "a model larger than the machine": ({"model.layers": 10**9}, ["parameters", "GiB", "smaller --model"]),
    "source": ({"data.source": DEEP}, [DEEP, "does not exist"]),
    "source: a file that is no text": ({"data.source": "{dir}/text.dat"}, ["{dir}/text.dat", ".txt"]),
    "source: a device": ({"data.source": "/dev/null"}, ["/dev/null", "neither a file nor a directory"]),
    "source: empty": ({"data.source": "{dir}/empty.txt"}, ["{dir}/empty.txt", "white space"]),
    "source: blank": ({"data.source": "{dir}/blank.txt"}, ["{dir}/blank.txt", "white space"]),
    "source: one document": ({"data.source": "{dir}/short.txt"}, ["{dir}/short.txt", "one document"]),
    "source: binary": ({"data.source": "{dir}/binary.txt"}, ["{dir}/binary.txt", "not UTF-8"]),
    "source: another encoding": ({"data.source": "{dir}/latin"}, ["latin/a.txt", "byte 3 is 0xe9"]),
    "source: shorter than a sequence": ({"data.source": "{dir}/brief"}, ["tokens", "sequence of 32", "33"]),
    "source: a glob of nothing": ({"data.source": "{dir}/*.md"}, ["{dir}/*.md", "no file that can be read"]),
    "tokenizer": ({"data.tokenizer": "byte"}, ["unknown tokenizer 'byte'", "'bytes'"]),
    "tokenizer file": ({"data.tokenizer": "{dir}/tokenizer.json"}, ["{dir}/tokenizer.json", "not a tok"]),
    "tokenizer: too small": ({"data.tokenizer": "bpe-5"}, ["'bpe-5'", "bpe-257"]),
    "tokenizer: too large": ({"data.tokenizer": f"bpe-{10**14}"}, [f"'bpe-{10**14}'", "too large"]),
    "tokenizer: a long name": ({"data.tokenizer": "x" * 5000}, ["File name too long"]),
    "an id beyond the vocabulary": (
        {"model.vocab_size": 256},
        ["up to 256", "model.vocab_size = 256", "--model.vocab_size 257"],
    ),
    "prompt": ({"log.prompt": "\udcff"}, ["log.prompt", "UTF-8"]),
}

TOML = {
    "no TOML": ("[training]\nsteps = = 3", ["line 2"]),
    "section": ("[trainin]\nsteps = 3", ["unknown section 'trainin'", "'training'"]),
    "key": ("[training]\nstep = 3", ["unknown key 'training.step'", "'training.steps'"]),
    "place": ("[recipe]\nfprop = {q = 'bf16'}", ["unknown key 'recipe.fprop.q'"]),
    "a grid": ("[sweep]\n'training.seed' = [1, 2]", ["section 'sweep' is a grid", "`narrowgauge compare`"]),
    "outside a section": ("steps = 3", ["unknown section 'steps'"]),
    "a section that is a number": ("training = 3", ["training = 3", "[training]"]),
    "a section that is a list": ("[[training]]\nsteps = 3", ["training = [{'steps': 3}]", "[training]"]),
    "text for a number": ("[data]\nsequence_length = 'long'", ["data.sequence_length = 'long'", "integer"]),
    "a number for text": ("[data]\nsource = 3", ["data.source = 3", "string"]),
    "a date": ("[optimizer]\nlr = 1979-05-27", ["optimizer.lr", "number"]),
    "not finite": ("[optimizer]\nlr = inf", ["optimizer.lr = inf", "finite"]),
    "a cast that is a number": ("[recipe]\n'fprop.x' = 3", ["'fprop.x' = 3", "cast"]),
    "a cast without a name": ("[recipe]\n'fprop.x' = {cast = 3}", ["'fprop.x'", "cast = 3"]),
    "a key of a cast": ("[recipe]\n'fprop.x' = {cast = 'e4m3', blok = 3}", ["unknown cast key 'blok'"]),
}


@pytest.fixture
def fill(finished, text, tmp_path):
    """Replace {run}, {dir} and {text} in a word."""
    there = tmp_path / "there"
    for name, content in FILES.items():
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_bytes(content)

    def word(pattern):
        return str(pattern).format(run=finished, dir=there, text=text)

    return word


@pytest.mark.parametrize(("line_words", "says"), LINES.values(), ids=LINES)
def test_a_line(narrowgauge, refused, fill, line_words, says):
    refused(narrowgauge(*map(fill, line_words)), *map(fill, says))


@pytest.mark.parametrize(("changes", "says"), KEYS.values(), ids=KEYS)
def test_a_value(narrowgauge, refused, line, fill, tmp_path, changes, says):
    words = line({key: fill(value) for key, value in changes.items()})
    refused(narrowgauge(*words, "--out", tmp_path / "run"), *map(fill, says))
    assert not (tmp_path / "run").exists(), "the directory is not taken for a run that cannot be"


@pytest.mark.parametrize(("content", "says"), TOML.values(), ids=TOML)
def test_a_file(narrowgauge, refused, line, tmp_path, content, says):
    file = tmp_path / "mine.toml"
    file.write_text(content)
    # A key of the line in the section that the file spoils must not hide it.
    ended = narrowgauge("train", file, "--steps", "1", "--device", "cpu", "--out", tmp_path / "run")
    refused(ended, *says)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda out: out.touch(), "is a file, but a run needs a directory"),
        (lambda out: out.symlink_to("/proc/none"), "File exists"),
        (lambda out: (out.mkdir(), (out / "thesis.tex").touch()), "holds 'thesis.tex' and no config.toml"),
    ],
    ids=["a file", "a link into /proc", "other files"],
)
def test_a_place_that_is_taken(narrowgauge, refused, line, tmp_path, make, says):
    out = tmp_path / "run"
    make(out)
    refused(narrowgauge(*line(), "--out", out), out, says)
    assert not out.is_dir() or [name for name in os.listdir(out) if not name.startswith(".lock")] == [
        "thesis.tex"
    ]


def test_a_place_that_cannot_be_written(narrowgauge, refused, line, tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file" / "run", "/proc/run"):
        refused(narrowgauge(*line(), "--out", out), out)


def test_a_run_of_another_configuration(narrowgauge, refused, line, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "config.toml").write_text("[training]\nseed = 7\n")
    refused(narrowgauge(*line(), "--out", out), out, "and now it is", "another --out")
    assert (out / "config.toml").read_text() == "[training]\nseed = 7\n"


def test_a_run_that_another_process_holds(narrowgauge, refused, line, look, tmp_path):
    words = [*line({"training.steps": 10_000}), "--out", tmp_path / "run"]
    holder = narrowgauge.start(*words).until(look(tmp_path / "run").has_step(1))
    second = narrowgauge(*words)
    holder.send(signal.SIGTERM)
    assert holder.wait().code == 75
    run = look(tmp_path / "run")
    assert run.column("step") == list(range(1, len(run.steps) + 1)), "the second one changed nothing"
    (run.path / "metrics.jsonl").unlink()
    refused(second, run.path, f"in use by process {holder.pid} ")


@pytest.mark.parametrize("file", ["train.bin", pytest.param("val.bin", marks=pytest.mark.slow)])
def test_a_token_file_that_was_cut_short(narrowgauge, refused, line, tmp_path, file):
    cache = tmp_path / "cache"
    assert (
        narrowgauge(*line({"training.steps": 1}), "--out", tmp_path / "a", NARROWGAUGE_CACHE=str(cache)).code
        == 0
    )
    (tmp_path / "a" / "metrics.jsonl").unlink()
    (tokens,) = cache.rglob(file)
    os.truncate(tokens, tokens.stat().st_size - 2)
    words = [*line({"training.steps": 1}), "--out", tmp_path / "b"]
    refused(
        narrowgauge(*words, NARROWGAUGE_CACHE=str(cache)),
        tokens,
        "is damaged",
        f"delete the directory {tokens.parent}",
    )
    for part in tokens.parent.iterdir():
        part.unlink()
    tokens.parent.rmdir()
    assert narrowgauge(*words, NARROWGAUGE_CACHE=str(cache)).code == 0, "the mend that was named mends it"

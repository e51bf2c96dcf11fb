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
    "verb: another program's": (["pretrain"], ["unknown verb 'pretrain'", "known: train, compare"]),
    "no verb but an option": (["--recipe", "fp8"], ["'--recipe'", "narrowgauge train --recipe"]),
    "no verb but --dry-run": (["--dry-run"], ["'--dry-run'", "a verb comes first"]),
    "a trial run": (["train", "--dry-run"], ["unknown option '--dry-run'", "compare has it"]),
    "a key of a cast": (
        ["train", "--recipe.rounding", "stochastic"],
        ["'--recipe.rounding'", "key of a cast", "--recipe.fprop.x '{{cast ="],
    ),
    "a key of a cast alone": (["train", "--rounding", "stochastic"], ["--rounding", "key of a cast"]),
    "a key of a recipe file": (["train", "--recipe.title", "mine"], ["'--recipe.title'", "recipe file"]),
    "an option near none": (["sample", "{run}", "--prompt", "x", "--checkpoint", "7"], ["'--checkpoint'"]),
    "one dash": (["train", "-steps", "3"], ["unknown option '-steps'", "'--steps'"]),
    "one dash: help": (["train", "-help"], ["unknown option '-help'", "'--help'"]),
    "one letter": (["train", "-s", "3"], ["unknown option '-s'", "the nearest is '--steps'"]),
    "one name more": (["recipes", "fp8", "bf16"], ["unknown argument 'bf16'", "NAME", "recipes --help"]),
    "a name for none": (["doctor", "here"], ["unknown argument 'here'", "takes none", "doctor --help"]),
    "a word for a file": (["train", "help"], ["no configuration file help", "name a .toml file"]),
    "a whole number": (
        ["prepare", "{text}", "--out", "{dir}/new", "--workers", "all"],
        ["--workers", "'all' is not a whole number"],
    ),
    "a number": (["sample", "{run}", "--prompt", "x", "--top-p", "much"], ["'much' is not a number"]),
    "an empty name": (["train", "--out", ""], ["--out", "the name is empty"]),
    "an empty file name": (["train", ""], ["CONFIG.toml", "the name is empty"]),
    "export: nowhere": (
        ["export", "{run}", "--to", "hf", "--out", "/proc/none"],
        ["/proc/none", "cannot be written", "--out"],
    ),
    "branch: nowhere": (
        ["train", "--branch", "{run}", "--steps", "9", "--recipe", "bf16", "--out", "/proc/none"],
        ["/proc/none", "cannot be written", "--out"],
    ),
    "branch: no run": (["train", "--branch", "/no/such"], ["/no/such", "config.toml"]),
    "formats: a family": (["formats", "fp8"], ["unknown format 'fp8'", "e4m3 and e5m2"]),
    "formats: torch's name": (["formats", "float8_e4m3fn"], ["'float8_e4m3fn'", "the nearest is 'e4m3'"]),
    "allowed: key": (
        ["train", "{run}/config.toml", "--out", "{run}", "--steps", "9", "--allow-change", "step"],
        ["--allow-change", "unknown key 'step'", "'training.steps'"],
    ),
    "option": (["train", "--stepz", "3"], ["unknown option '--stepz'", "'--steps'"]),
    "option of another verb": (
        ["eval", "{run}", "--prompt", "x"],
        ["'--prompt'; sample has it, eval does not"],
    ),
    "option of two verbs": (
        ["train", "--cluster", "h100"],
        ["unknown option '--cluster'; advise and plan have it, train does not"],
    ),
    "key of another verb": (
        ["eval", "{run}", "--lr", "1"],
        ["'--lr'; plan, train, compare", "eval does not"],
    ),
    "another program's name of an option": (["eval", "{run}", "--seq-len", "0"], ["--sequence-length 0"]),
    "export: a program": (
        ["export", "{run}", "--to", "vllm", "--out", "{dir}/new"],
        ["unknown format 'vllm'", "compressed-tensors, modelopt or hf"],
    ),
    "export: a program of one format": (
        ["export", "{run}", "--to", "llama.cpp", "--out", "{dir}/new"],
        ["unknown format 'llama.cpp'", "--to takes what it reads: gguf"],
    ),
    "export: a target of recipes": (
        ["export", "{run}", "--to", "torchao", "--out", "{dir}/new"],
        ["unknown format 'torchao'", "recipes NAME --to torchao", "gguf)"],
    ),
    "key": (["train", "--optimizer.learning_rate", "1"], ["unknown option '--optimizer.learning_rate'"]),
    "place": (["train", "--recipe.fprop.q", "bf16"], ["'--recipe.fprop.q'", "'--recipe.fprop.x'"]),
    "option without a value": (["train", "--steps"], ["--steps", "expected one argument"]),
    "one argument more": (["train", "{dir}/good.toml", "b.toml"], ["unknown argument 'b.toml'"]),
    "no run": (["sample", "--prompt", "x"], ["RUN", "narrowgauge sample --help"]),
    "no prompt": (["sample", "{run}"], ["--prompt"]),
    "sample: no such run": (["sample", "{dir}/none", "--prompt", "x"], ["{dir}/none", "not a run directory"]),
    "sample: a file": (
        ["sample", "{dir}/good.toml", "--prompt", "x"],
        ["{dir}/good.toml", "is not a model file"],
    ),
    "sample: length": (["sample", "{run}", "--prompt", "x", "--tokens", "-1"], ["= -1"]),
    "sample: temperature": (["sample", "{run}", "--prompt", "x", "--temperature", "nan"], ["= nan"]),
    "sample: seed": (["sample", "{run}", "--prompt", "x", "--seed", "9" * 20], ["seed = 99999"]),
    "sample: no UTF-8": (["sample", "{run}", "--prompt", "\udcff"], ["U+DCFF"]),
    "eval: no such run": (["eval", "{dir}"], ["{dir}", "not a run directory"]),
    "eval: task": (["eval", "{run}", "--task", "vla"], ["unknown task 'vla'", "'val'"]),
    "eval: batches": (["eval", "{run}", "--batches", "0"], ["--batches 0"]),
    "eval: device": (["eval", "{run}", "--device", "gpu"], ["unknown device 'gpu'"]),
    "report: no such run": (["report", "{run}", "{dir}/none"], ["{dir}/none", "is not a run"]),
    "report: page": (["report", "{run}", "--out", "{dir}"], ["{dir}", "is a directory"]),
    "report: below a file": (["report", "{run}", "--out", "{dir}/good.toml/x"], ["cannot write"]),
    "recipes: name": (["recipes", "mxpf4"], ["unknown recipe 'mxpf4'", "'mxfp4'"]),
    "recipes: a name near none": (
        ["recipes", "nope"],
        ["unknown recipe 'nope'", "'narrowgauge recipes' lists"],
    ),
    "a configuration that does not ship": (["train", "gpt2-124"], ["no configuration file", "gpt2-124m"]),
    "watch: no runs": (
        ["watch", "{dir}", "--once", "{dir}/p.html"],
        ["{dir} has no runs", "a run directory"],
    ),
    "recipes: file": (["recipes", "{dir}/none.toml"], ["{dir}/none.toml", "does not exist"]),
    "recipes: the ending": (["recipes", "{dir}/good.tml"], ["write {dir}/good.toml, which is there"]),
    "recipes: a near file": (["recipes", "{dir}/gooood.toml"], ["the nearest is {dir}/good.toml"]),
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
        ["--procs 1", "2 processes that [parallel] sets", "multiples of 2"],
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
    "empty.toml": b"",
    "rounding.toml": b"fprop = 'mxfp4'\nrounding = 'stochastic'\n",
    "json.toml": b'{"fprop": "mxfp4"}',
    "no-quotes.toml": b"compute = 'bf16'\nfprop = mxfp4\n",
}

# Keys over the tiny run's.
KEYS = {
    "model": ({"model.name": "gpt2-124"}, ["unknown model 'gpt2-124'", "'gpt2-124m'"]),
    "recipe": ({"recipe.name": "mxpf4"}, ["unknown recipe 'mxpf4'", "'mxfp4'"]),
    "recipe file": ({"recipe.name": "{dir}/none.toml"}, ["{dir}/none.toml", "does not exist"]),
    "recipe value": ({"recipe.name": "{dir}/recipe.toml"}, ["fprop.x", "hadamard = 'many'"]),
    "recipe file: empty": ({"recipe.name": "{dir}/empty.toml"}, ["{dir}/empty.toml", "is empty"]),
    "recipe file: a key of a cast": (
        {"recipe.name": "{dir}/rounding.toml"},
        ["'rounding'", "key of a cast", "fprop.x = {{cast ="],
    ),
    "recipe file: a configuration": ({"recipe.name": "{dir}/good.toml"}, ["'training'", "configuration"]),
    "recipe file: JSON": ({"recipe.name": "{dir}/json.toml"}, ["{dir}/json.toml", "it is JSON"]),
    "recipe file: no quotes": (
        {"recipe.name": "{dir}/no-quotes.toml"},
        ["{dir}/no-quotes.toml", "fprop = mxfp4", "in quotes"],
    ),
    "recipe: a directory": ({"recipe.name": "{dir}"}, ["{dir}", "is a directory", ".toml"]),
    "recipe: two": ({"recipe.name": "fp8,bf16"}, ["'fp8,bf16'", "one recipe", "narrowgauge compare"]),
    "recipe: a cast": ({"recipe.name": "e4m3"}, ["unknown recipe 'e4m3'", "a cast", "--recipe.fprop.x e4m3"]),
    "recipe: its own file": ({"recipe.name": "{dir}/good"}, ["'{dir}/good'", "{dir}/good.toml"]),
    "a group": ({"recipe.wgrad": "mxpf4"}, ["'wgrad.dy'", "unknown cast 'mxpf4'", "'mxfp4'"]),
    "model file": ({"model.name": "{dir}/good.toml"}, ["{dir}/good.toml", "configuration file"]),
    "a GPU by another name": ({"training.device": "gpu"}, ["unknown device 'gpu'", "is 'cuda'"]),
    "processes": (
        {"parallel.tensor": 2},
        ["tensor 2", "torchrun --standalone --nproc-per-node 2 -m narrowgauge train"],
    ),
    "source: a run": ({"data.source": "{run}"}, ["{run}", "is a run directory"]),
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
    "source: one document": ({"data.source": "{dir}/short.txt"}, ["{dir}/short.txt", "single document"]),
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
    "outside a section": ("steps = 3", ["steps = 3", "outside", "[training]"]),
    "outside: a synonym": ("learning_rate = 1e-3", ["learning_rate = 0.001", "[optimizer]", "lr"]),
    "outside: of several": ("every = 3", ["every = 3", "[validation]", "[checkpoint]"]),
    "outside: unknown": ("stepz = 3", ["unknown key 'stepz'", "'steps'", "[training]"]),
    "a recipe": ("name = 'mine'\nfprop = 'mxfp4'", ["is a recipe", "--recipe"]),
    "a section that is text": ("recipe = 'mxfp4'", ["recipe = 'mxfp4'", "[recipe]", 'name = "mxfp4"']),
    "a group": ("[recipe]\nwgrad = 'mxpf4'", ["'wgrad.dy'", "unknown cast 'mxpf4'"]),
    "a key of a cast in no place": (
        "[recipe]\nrounding = 'stochastic'",
        ["recipe.rounding", "key of a cast"],
    ),
    "a key of a recipe file": ("[recipe]\ntitle = 'mine'", ["recipe.title", "recipe file"]),
    "true for a number": ("[training]\nbatch_size = true", ["training.batch_size = True", "number"]),
    "JSON": ('{"training": {"steps": 3}}', ["it is JSON", "[training]"]),
    "YAML": ("training:\n  steps: 3", ["line 1", "'training:'", "it is YAML"]),
    "no quotes": ("[recipe]\nname = mxfp4", ["line 2", "'name = mxfp4'", "in quotes"]),
    "commas in a number": ("[training]\nsteps = 1,000", ["line 2", "'steps = 1,000'", "1_000"]),
    "Python's None": ("[log]\nprompt = None", ["line 2", "leave the key out"]),
    "twice": ("[training]\nsteps = 1\nsteps = 2\n", ["line 3", "'steps = 2'"]),
    "capitals": ("[Training]\nsteps = 3", ["unknown section 'Training'", "'training'"]),
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
        refused(narrowgauge(*line(), "--out", out), out, "cannot be made")


def test_a_run_of_another_configuration(narrowgauge, refused, line, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "config.toml").write_text("[training]\nseed = 7\n")
    refused(narrowgauge(*line(), "--out", out), out, "and now it is", "another --out")
    assert (out / "config.toml").read_text() == "[training]\nseed = 7\n"


@pytest.mark.tier("thorough")
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


@pytest.mark.tier("thorough")  # data/test_corpus.py damages every file
@pytest.mark.parametrize("file", ["train.bin", "val.bin"])
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

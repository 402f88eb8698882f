""" Loading a run again: the same loss, text with the recipe's forward, and one line per mistake. """
import json

import pytest
import torch

import data
import eval as evaluation
import train
from config import Config, ConfigError
from quant import Operand, Recipe
from recipes import RECIPES
from test_train import WINDOWS, last_state, shards, tiny  # noqa: F401 (a fixture)


@pytest.fixture(scope="module")
def run(shards, tmp_path_factory):
    """ A run of tetrajet_full in which OutControl and OsciReset have acted -> its folder. """
    out = tmp_path_factory.mktemp("out")
    train.main(tiny(shards, f"--out={out}", "--name=r", "--recipe=tetrajet_full", "--osci=full", *WINDOWS))
    return out / "r"


def go(capsys, *args) -> str:
    # the run was trained on a CPU: a GPU would compute in bf16
    device = [] if any("--device" in str(arg) for arg in args) else ["--device=cpu"]
    evaluation.main([str(arg) for arg in args] + device)
    return capsys.readouterr().out


def test_the_loss_is_the_one_that_training_printed(run, capsys):
    """
    Catches: outlier channels that are not restored, evaluation on other tokens or in another precision.
    """
    block = dict(line.split(": ", 1) for line in (run / "log.txt").read_text().splitlines()[-8:])
    printed = dict(line.split(": ", 1) for line in go(capsys, run).splitlines())
    assert printed["step"] == "20"
    for name in ("val_loss_fp4", "val_loss_bf16"):
        assert printed[name] == block[name]
    assert printed["val_loss_fp4"] != printed["val_loss_bf16"]


def test_loss_by_hand(run, shards):
    """ Catches: a mean of means, shifted targets, tokens counted twice. """
    model, cfg, corpus, _ = evaluation.load_checkpoint(run, "cpu")
    total, count = 0.0, 0
    for i in range(cfg.eval_tokens // cfg.seq_len):
        row = corpus.val.sequences(i, 1, cfg.seq_len, 0, 0)[0]
        with torch.no_grad():
            logp = model(row[None, :-1])[0].double().log_softmax(-1)
        total -= float(logp[torch.arange(cfg.seq_len), row[1:]].sum())
        count += cfg.seq_len
    assert evaluation.val_loss(model, corpus, cfg) == pytest.approx(total / count, rel=1e-6)


def test_text(run, capsys):
    """
    Catches: padding ids that are sampled (no byte has them), a prompt cut off,
    a generator shared with others.
    """
    ask = (run, "--prompt=so it <|endoftext|> goes, longer than a sequence of 32 tokens",
           "--tokens=40", "--seed=3")
    text = go(capsys, *ask)
    assert text.startswith("so it <|endoftext|> goes, longer than a sequence") and len(text) > 70
    torch.manual_seed(1)
    assert go(capsys, *ask) == text
    assert go(capsys, *ask[:-1], "--seed=4") != text
    assert go(capsys, run, "--prompt=", "--tokens=5", "--temperature=0")


def test_text_uses_the_recipe_s_forward(run, capsys, monkeypatch):
    """ Catches: text that is written by unrounded weights although the model would be deployed in FP4. """
    seen = []
    forward = evaluation.QuantLinear.forward
    monkeypatch.setattr(evaluation.QuantLinear, "forward",
                        lambda self, x: (seen.append(self.enabled), forward(self, x))[1])
    go(capsys, run, "--prompt=a", "--tokens=2")
    assert seen and all(seen)


@pytest.mark.parametrize("args, says", [
    (["nowhere"], "holds no checkpoint"),
    (["{run}", "--data=nowhere"], "nowhere"),
    (["{run}", "--device=gpu"], "device"),
    (["{run}", "--tokens=0"], "--tokens"),
    (["{run}", "--temperature=nan"], "--temperature"),
    (["{run}", "--temperature=inf"], "--temperature"),
    (["{run}", "--temperature=1e-45"], "--temperature"),
    (["{run}", "--seed=99999999999999999999999"], "--seed"),
    (["{run}", "--temprature=1"], "unrecognized"),
    ([], "run"),
])
def test_a_mistake_is_code_2_without_a_traceback(run, capsys, args, says):
    with pytest.raises(SystemExit) as error:
        go(capsys, *(arg.format(run=run) for arg in args))
    err = capsys.readouterr().err
    assert error.value.code == 2 and says in err and err.startswith("error: ") and err.count("\n") == 1


def test_a_corpus_with_another_vocabulary_is_refused(run, shards, tmp_path, capsys):
    """ Catches: text decoded with the words of another vocabulary. """
    for path in shards.glob("*.bin"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "meta.json").write_text(json.dumps({"encoding": "gpt2"}))
    with pytest.raises(SystemExit) as error:
        go(capsys, run, f"--data={tmp_path}")
    assert error.value.code == 2 and "257" in capsys.readouterr().err


@pytest.mark.parametrize("spoil", [
    lambda state: state["model"].pop("head.weight"),
    lambda state: state["model"].update({"head.weight": state["model"]["head.weight"].cfloat()}),
    lambda state: state["model"].update({"norm.weight": torch.ones(48).to_sparse()}),
    lambda state: state["config"].update(n_layer=10_000),
])
def test_a_checkpoint_of_another_shape_is_one_line(run, tmp_path, capsys, monkeypatch, spoil):
    """
    Catches: a traceback of PyTorch's where the file and the program disagree, weights of another type that
    are cast, and a minute spent on layers that a file names and does not hold.
    """
    build = evaluation.build
    monkeypatch.setattr(evaluation, "build",
                        lambda cfg, *args: build(cfg, *args) if cfg.n_layer < 9 else 1 / 0)
    state = last_state(run)
    spoil(state)
    torch.save(state, tmp_path / "ckpt_000000001.pt")
    with pytest.raises(SystemExit) as error:
        go(capsys, tmp_path)
    err = capsys.readouterr().err
    assert error.value.code == 2 and "does not fit" in err and err.count("\n") == 1


def test_a_full_disk_behind_the_output_is_one_line(run, capsys, monkeypatch):
    """ Catches: a traceback where `python eval.py RUN > FILE` cannot write. """
    def full(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(evaluation, "val_losses", full)
    with pytest.raises(SystemExit) as error:
        go(capsys, run)
    assert error.value.code == 2
    assert capsys.readouterr().err == "error: cannot write: No space left on device\n"


@pytest.mark.parametrize("fault, code, says", [
    (PermissionError(13, "Permission denied"), 2, "Permission denied; mend that first"),
    (OSError(5, "Input/output error"), 2, "Input/output error; mend that first"),
    (MemoryError("no room"), 2, "out of memory (no room)"), (KeyboardInterrupt(), 130, "stopped"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, "out of memory (Default")])
def test_what_is_no_fault_of_the_file_is_told_as_such(run, capsys, monkeypatch, fault, code, says):
    """ Catches: a whole checkpoint called torn, and a run given up for it, because memory was short. """
    def load(*_, **__):
        raise fault
    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(SystemExit) as error:
        evaluation.main([str(run)])
    err = capsys.readouterr().err
    assert error.value.code == code and says in err and "torn" not in err and "overwrite" not in err


@pytest.mark.parametrize("broken", [("__version__", "nightly"), ("__version__", "3.5.1")])
def test_a_triton_that_does_not_fit_is_no_end(monkeypatch, broken):
    """ Catches: a bf16 run that ends in a traceback because a package is broken that it does not need. """
    triton = pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring along")
    monkeypatch.setattr(triton, *broken)
    assert evaluation.pick_backend(Config(backend="auto"), torch.device("cpu"), Recipe()) == "reference"
    with pytest.raises(ConfigError, match="pip install -U triton"):
        evaluation.pick_backend(Config(backend="emulate"), torch.device("cpu"), RECIPES["tetrajet_full"])


def test_weights_too_large_to_write_with_are_one_line(run, tmp_path, capsys):
    """ Catches: a traceback of torch.multinomial's where a logit overflows. """
    state = last_state(run)
    state["model"]["head.weight"].fill_(3e38)
    torch.save(state, tmp_path / "ckpt_000000001.pt")
    with pytest.raises(SystemExit) as error:
        go(capsys, tmp_path, "--prompt=a")
    err = capsys.readouterr().err
    assert error.value.code == 2 and "not finite" in err and err.count("\n") == 1


@pytest.mark.parametrize("change", [{"d_model": 2**16}, {"n_layer": 5000}, {"d_ff": 41}, {"lr": "x"},
                                    {"seq_len": 0}])
def test_a_checkpoint_whose_config_lies_is_one_line(run, tmp_path, capsys, change):
    """ Catches: memory for a model of any size that a file claims, before its weights are looked at. """
    state = last_state(run)
    state["config"].update(change)
    torch.save(state, tmp_path / "ckpt_000000001.pt")
    with pytest.raises(SystemExit) as error:
        go(capsys, tmp_path)
    err = capsys.readouterr().err
    assert error.value.code == 2 and err.count("\n") == 1


def test_text_is_written_by_the_recipe_of_the_checkpoint(run, capsys, monkeypatch):
    """ Catches: a recipe edited since, whose forward is not the one that was trained. """
    before = go(capsys, run)
    monkeypatch.setitem(evaluation.RECIPES, "tetrajet_full", evaluation.RECIPES["tetrajet_base"].only([3]))
    assert go(capsys, run) == before


def test_no_vocabulary_offline_is_one_line(run, capsys, monkeypatch):
    def offline(name):
        raise data.DataError("cannot load the vocabulary; set TIKTOKEN_CACHE_DIR")
    monkeypatch.setattr(data, "load_encoding", offline)
    with pytest.raises(SystemExit) as error:
        go(capsys, run, "--prompt=a")
    assert error.value.code == 2 and "TIKTOKEN_CACHE_DIR" in capsys.readouterr().err


# -----------------------------------------------------------------------------
# which back end computes

BLACKWELL, HOPPER, TURING = (10, 0), (9, 0), (7, 5)


@pytest.fixture
def pick(monkeypatch):
    """ pick(backend, capability of the GPU or None, recipe) -> what pick_backend says, kernels compiled. """
    pytest.importorskip("triton", reason="needs Triton, which the CPU build of PyTorch does not bring along")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")

    def run(backend: str, capability: tuple[int, int] | None, recipe=RECIPES["tetrajet_full"]) -> str:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        device = torch.device("cuda" if capability else "cpu")
        return evaluation.pick_backend(Config(backend=backend), device, recipe)
    return run


@pytest.mark.parametrize("capability, expected", [
    (None, "reference"), (TURING, "reference"), ((8, 0), "emulate"), (HOPPER, "emulate"),
    (BLACKWELL, "native"), ((10, 3), "native"), ((12, 0), "native"), ((12, 1), "emulate")])
def test_the_fastest_back_end(pick, capability, expected):
    """
    Catches: FP4 tensor cores expected where gemms.py decodes, and a default that stops on a CPU. What is
    named outright is taken, or nothing is.
    """
    assert pick("auto", capability) == expected
    assert pick("reference", capability) == "reference"
    order = ["reference", "packed", "emulate", "native"]
    for backend in order[: order.index(expected) + 1]:
        assert pick(backend, capability) == backend
    for backend in order[order.index(expected) + 1 :]:
        with pytest.raises(ConfigError, match="type --backend=auto") as error:
            pick(backend, capability)
        assert repr(backend) in str(error.value) and "\n" not in str(error.value)


def test_the_back_end_for_other_recipes(pick):
    """ Catches: a recipe that no kernel knows, found out in the middle of the first step. """
    some = RECIPES["tetrajet_full"].only([1, 2, 3])
    odd = Recipe(y_x=Operand(outer=256))
    assert [pick("auto", BLACKWELL, recipe) for recipe in (some, odd, Recipe())] == ["emulate", "reference",
                                                                                     "reference"]
    for backend, recipe, words in (("native", some, "Q4"), ("emulate", odd, "256"), ("native", odd, "Q1")):
        with pytest.raises(ConfigError, match=words):
            pick(backend, BLACKWELL, recipe)
    # where nothing is rounded, who rounds makes no difference
    assert pick("native", None, Recipe()) == "native"


@pytest.mark.parametrize("recipe, changes, acts", [
    ("tetrajet_full", {}, True), ("nvfp4", {}, True), ("nvfp4", {"quantizers": "1,2,4"}, True),
    ("nvfp4", {"quantizers": "1,2,3,5"}, False), ("quartet", {}, False), ("fp8", {}, True),
    ("fp8", {"outlier_frac": 0.1, "outlier_format": "mxfp8"}, True), ("nvfp4", {"keep_last": 1.0}, False)])
def test_packed_acts_or_says_that_it_does_not(recipe, changes, acts):
    """ Catches: a run that is said to take less memory, where all is kept as in emulate. """
    pytest.importorskip("triton", reason="needs Triton, which the CPU build of PyTorch does not bring along")
    lines = evaluation.idle(Config(recipe=recipe, backend="packed", **changes))
    assert acts == (not any("backend = 'packed'" in line for line in lines)), lines


def test_without_triton(pick, monkeypatch):
    """ Catches: a traceback of an import where one line says what to install. """
    monkeypatch.setattr(evaluation, "find_spec", lambda name: None)
    assert pick("auto", BLACKWELL) == "reference"
    for backend in ("emulate", "packed", "native"):
        with pytest.raises(ConfigError, match="pip install triton"):
            pick(backend, BLACKWELL)


def test_the_interpreter_is_no_default(pick, monkeypatch):
    """ Catches: a test run of minutes per step, because the interpreter counts as a GPU. """
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert pick("auto", None) == "reference"
    assert pick("emulate", None) == "emulate" and pick("native", None) == "native"


def test_a_run_is_evaluated_with_what_is_here(run, tmp_path, capsys, monkeypatch):
    """ Catches: the back end that a run was trained with, asked for where it cannot run, or of no device. """
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    path = evaluation.checkpoints(run)[0]
    state = evaluation.read_checkpoint(path)
    state["config"]["backend"] = "native"
    (tmp_path / "r").mkdir()
    torch.save(state, tmp_path / "r" / path.name)
    assert go(capsys, tmp_path / "r") == go(capsys, run)

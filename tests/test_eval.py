""" Loading a run again: the same loss, text with the recipe's forward, and one line per mistake. """
import json
import shutil
from pathlib import Path

import pytest
import torch

import data
import eval as evaluation
from build import RECIPES, only
from checkpoint import read
from quant import QuantLinear, Rule, RULES, round_blocks
from test_train import FULL, go, shards, straight, tiny  # noqa: F401


@pytest.fixture
def ask(capsys):
    """ ask(folder, *args) -> what eval.py prints, or its line on stderr, whose exit code is 2. """
    def run(*args, code: int = 0) -> str:
        # the run was trained on a CPU: a GPU would compute in bf16
        ended = evaluation.main([str(arg) for arg in (*args, "--device=cpu")])
        said = capsys.readouterr()
        assert ended == code and (code == 0 or said.err.splitlines()[-1].startswith("error: ")), said
        return said.err if code else said.out
    return run


def change(run: Path, folder: Path, spoil) -> Path:
    """ A folder whose only checkpoint is the last one of a run, changed. """
    state = read(sorted(run.glob("ckpt_*.pt"))[-1])
    spoil(state)
    torch.save(state, folder / f"ckpt_{state['step']:09d}.pt")
    return folder


def test_the_loss_is_the_one_that_training_printed(straight, ask):  # noqa: F811
    """ Catches: outlier channels that are not restored, evaluation on other tokens or in other precision. """
    block = dict(line.split(": ", 1) for line in (straight / "log.txt").read_text().splitlines()[-8:])
    printed = dict(line.split(": ", 1) for line in ask(straight).splitlines())
    assert printed.pop("step") == "20" and printed == {name: block[name] for name in printed}
    assert printed["val_loss_fp4"] != printed["val_loss_bf16"]


def test_loss_by_hand(straight):  # noqa: F811
    """ Catches: a mean of means, shifted targets, tokens counted twice. """
    net, cfg, corpus, _ = evaluation.load_run(straight, device="cpu")
    net.model.eval()
    total = 0.0
    for i in range(cfg.eval_tokens // cfg.seq_len):
        row = corpus.val.sequences(i, 1, cfg.seq_len, 0, 0)[0]
        with torch.no_grad():
            logp = net.model(row[None, :-1])[0].double().log_softmax(-1)
        total -= float(logp[torch.arange(cfg.seq_len), row[1:]].sum())
    loss = evaluation.val_loss(net, corpus, cfg)
    assert loss == pytest.approx(total / cfg.eval_tokens, rel=1e-6)
    assert net.model.training, "an evaluation in training has to leave the model in training"


def test_text(straight, ask, monkeypatch):  # noqa: F811
    """
    Catches: padding ids that are sampled (no byte has them), a prompt cut off, a generator shared with
    others, text that is written by unrounded weights although the model would be deployed in FP4.
    """
    question = (straight, "--prompt=so it <|endoftext|> goes, longer than a sequence of 32 tokens",
                "--tokens=40", "--seed=3")
    text = ask(*question)
    assert text.startswith("so it <|endoftext|> goes, longer than a sequence") and len(text) > 70
    torch.manual_seed(1)
    assert ask(*question) == text and ask(*question[:-1], "--seed=4") != text
    seen, forward = [], QuantLinear.forward
    monkeypatch.setattr(QuantLinear, "forward",
                        lambda self, x: (seen.append(self.enabled), forward(self, x))[1])
    assert ask(straight, "--prompt=", "--tokens=5", "--temperature=0") and seen and all(seen)


@pytest.mark.parametrize("args, says", [
    (["nowhere"], "holds no checkpoint"), (["RUN", "--data=nowhere"], "nowhere"),
    (["RUN", "--prompt=a", "--tokens=0"], "tokens is above 0"), (["RUN", "--seed=1" + "0" * 30], "seed from"),
    (["RUN", "--temperature=nan"], "temperature"), (["RUN", "--temperature=1e-45"], "temperature"),
], ids=lambda x: x[-1] if isinstance(x, list) else "")
def test_a_mistake_is_one_line(straight, ask, args, says):  # noqa: F811
    assert says in ask(*(straight if arg == "RUN" else arg for arg in args), code=2)


def test_a_corpus_with_another_vocabulary_is_refused(straight, shards, tmp_path, ask):  # noqa: F811
    """ Catches: text decoded with the words of another vocabulary. """
    other = Path(shutil.copytree(shards, tmp_path / "other"))
    (other / "meta.json").write_text(json.dumps({"encoding": "gpt2"}))
    assert "type --data=DIR of its data" in ask(straight, f"--data={other}", code=2)


def test_a_run_is_evaluated_with_what_is_here(straight, tmp_path, ask):  # noqa: F811
    """ Catches: the back end that a run was trained with, asked for where it cannot run. """
    there = change(straight, tmp_path, lambda state: state["config"].update(backend="native"))
    assert ask(there) == ask(straight)


def test_imported_weights_are_evaluated_on_any_data(straight, tmp_path, ask):  # noqa: F811
    """ Catches: weights of Hugging Face, of unknown data, that no --data=DIR will do for. """
    pytest.importorskip("safetensors")
    from tools import hf
    folder = json.loads((straight / "config.json").read_text())["data"]
    assert hf.main(["export", str(straight), str(tmp_path / "hf"), "--device=cpu"]) == 0
    assert hf.main(["import", str(tmp_path / "hf"), str(tmp_path / "in")]) == 0
    assert "val_loss_fp4: 3." in ask(tmp_path / "in", f"--data={folder}")


def test_other_data_is_told(straight, tmp_path, ask, capsys):  # noqa: F811
    """ Catches: a loss on data that took the place of the run's own, printed as if it were the run's. """
    spoilt = change(straight, tmp_path, lambda state: state.update(data=state["data"] + "x"))
    assert evaluation.main([str(spoilt), "--device=cpu"]) == 0
    assert "note: this data is " in capsys.readouterr().err


def test_text_is_written_by_the_recipe_of_the_checkpoint(straight, tmp_path, ask, monkeypatch):  # noqa: F811
    """ Catches: a recipe edited since, whose forward is not the one that was trained. """
    before = ask(straight)
    dict.__setitem__(RECIPES, "tetrajet_full", only(RECIPES["tetrajet_full"], [3]))
    try:
        assert ask(straight) == before
    finally:
        dict.__setitem__(RECIPES, "tetrajet_full", evaluation.from_json(
            read(sorted(straight.glob("ckpt_*.pt"))[-1])["recipe"]))


def test_a_rule_that_is_missing_is_named(go, ask):  # noqa: F811
    """ Catches: a KeyError where a fork's file is not imported; a fork's rule that no run can use. """
    RULES["of a fork"] = Rule(round_blocks, scales="mantissa")
    try:
        folder, _ = go("r", "--recipe=tetrajet_base", "--scale_rule=of a fork", "--steps=2")
        assert "step: 2" in ask(folder)
    finally:
        del RULES["of a fork"]
    said = ask(folder, code=2)
    assert "rule 'of a fork' is unknown" in said and "import that file in rivals/__init__.py" in said


def test_the_forward_of_late_training_is_the_one_that_is_evaluated(go, ask):  # noqa: F811
    """ Catches: a run with --bf16_forward evaluated as if its forward pass still rounded. """
    folder, printed = go("r", "--recipe=nvfp4", "--bf16_forward=0.5", "--steps=4")
    said = dict(line.split(": ") for line in ask(folder).splitlines())
    assert said["val_loss_fp4"] == said["val_loss_bf16"]
    assert f"val_loss_fp4: {said['val_loss_fp4']}" in printed


@pytest.mark.parametrize("spoil, says", [
    (lambda state: state["model"].pop("head.weight"), "does not fit this model: head.weight"),
    (lambda state: state["config"].update(d_ff=48), "does not fit this model"),
    (lambda state: state["config"].update(lr="x"), "lr wants a number"),
    (lambda state: state["model"]["head.weight"].fill_(3e38), "not finite")])
def test_a_checkpoint_that_does_not_fit_is_one_line(straight, tmp_path, ask, spoil, says):  # noqa: F811
    """ Catches: a traceback of PyTorch's where the file and the program disagree, or a logit overflows. """
    assert says in ask(change(straight, tmp_path, spoil), "--prompt=a", code=2)


@pytest.mark.parametrize("fault, says, code", [
    (OSError(28, "No space left on device"), "cannot write: No space left on device", 2),
    (data.DataError("cannot load the vocabulary"), "cannot load the vocabulary", 2),
    (MemoryError(), "out of memory; type --device=cpu", 2)])
def test_what_goes_wrong_is_one_line(straight, ask, monkeypatch, fault, says, code):  # noqa: F811
    """ Catches: a traceback where `python eval.py RUN > FILE` cannot write. """
    def fail(*_):
        raise fault
    monkeypatch.setattr(evaluation, "val_losses", fail)
    assert ask(straight, code=code) == f"error: {says}\n"


def test_a_damaged_checkpoint_is_passed_by(go, ask, capsys):  # noqa: F811
    """ Catches: an evaluation that dies of the newest file, or takes an older one without a word. """
    folder, _ = go("r", "--recipe=bf16", "--steps=4", "--save_every=2")
    path = folder / "ckpt_000000004.pt"
    path.write_bytes(path.read_bytes()[:13131])
    assert evaluation.main([str(folder), "--device=cpu"]) == 0
    said = capsys.readouterr()
    assert "step: 2" in said.out and "skipping a checkpoint" in said.err

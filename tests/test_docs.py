""" The README keeps its word: commands parse, examples print what they show, the table is the code's. """
import argparse
import doctest
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import config
import data
import eval
import plot
import sweep
import train
from config import Config
from recipes import RECIPES, table
from shipped import shipped
from test_train import shards, tiny  # noqa: F401 (a fixture)

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCES = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)    # (language, text) of each
SOURCES = sorted(path for folder in (".", ".ci", "configs", "sweeps", "tests")
                 for path in shipped(f"{folder}/*") if path.is_file()
                 and (path.suffix in (".py", ".md", ".txt", ".ini") or path.name == "run"))


def commands(program: str) -> list[list[str]]:
    """ The arguments of each `python program ...`, or `torchrun ... program ...`, in the README's fences. """
    lines = "\n".join(text for _, text in FENCES).replace("\\\n", " ").splitlines()
    words = [shlex.split(line.split("&&")[-1], comments=True) for line in lines
             if "python " in line or line.startswith("torchrun ")]
    return [w[w.index(program) + 1 :] for w in words
            if w[:2] == ["python", program] or w[0] == "torchrun" and program in w]


def launches() -> list[list[str]]:
    """ The arguments of each `torchrun ...`. """
    lines = "\n".join(text for _, text in FENCES).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("torchrun ")]


def rows(first_header: str) -> list[list[str]]:
    """ The cells of the README's table whose header has this cell, without backquotes. """
    table = next(t for t in re.findall(r"(?:^\|.*\n)+", README, re.MULTILINE) if f"| {first_header} |" in t)
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


# -----------------------------------------------------------------------------
# commands

@pytest.mark.parametrize("argv", commands("train.py"), ids=" ".join)
def test_train_commands_parse(argv, capsys):
    """ Catches: a renamed knob, a config file that is gone, sizes that do not divide each other. """
    if "--help" in argv:
        with pytest.raises(SystemExit) as end:
            config.load(argv)
        assert end.value.code == 0 and "--steps=" in capsys.readouterr().out
    else:
        cfg = config.parse(argv)
        assert isinstance(cfg, Config) and cfg.recipe in RECIPES


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without distributed")
@pytest.mark.parametrize("argv", launches(), ids=" ".join)
def test_torchrun_commands_can_share_their_batch(argv):
    """ Catches: a flag that torchrun does not know, and a number of ranks that cannot share the batch. """
    from torch.distributed.run import get_args_parser
    options = get_args_parser().parse_args(argv)
    assert options.training_script == "train.py"
    ranks = int(options.nnodes.split(":")[0]) * int(options.nproc_per_node)
    assert ranks > 1
    config.check_share(config.parse(options.training_script_args), ranks)


@pytest.mark.parametrize("program, argv",
                         [(program, argv) for program in (data, eval, plot, sweep)
                          for argv in commands(f"{program.__name__}.py")],
                         ids=lambda x: " ".join(x) if isinstance(x, list) else x.__name__)
def test_other_commands_parse(program, argv, monkeypatch):
    """ Catches: a renamed flag or sub-command. Nothing is fetched or loaded. """
    class Parsed(Exception):
        pass
    parse = argparse.ArgumentParser.parse_args

    def parse_only(self, argv):
        parse(self, argv)
        raise Parsed
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    with pytest.raises(Parsed):
        program.main(argv)


def test_each_program_has_its_commands():
    """ Catches: a pattern above that finds nothing, so that nothing is tested. """
    assert [len(commands(f"{p}.py")) > 0 for p in ("train", "data", "eval", "plot", "sweep")] == [True] * 5


def test_the_quick_start_needs_no_network(tmp_path, monkeypatch, capsys):
    """ Catches: a vocabulary, a version or a data set that is asked for on the way, and waited for. """
    class Asked(BaseException):     # no `except OSError` may hide it
        pass

    def ask(*_, **__):
        raise Asked
    for name in ("getaddrinfo", "gethostbyname", "create_connection"):
        monkeypatch.setattr(socket, name, ask)
    monkeypatch.setattr(socket.socket, "connect", ask)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "nothing"))
    run = tmp_path / "tetrajet_full-s1"
    train.main([*commands("train.py")[0], f"--out={tmp_path}", "--device=cpu", "--steps=20",
                "--batch_tokens=128", "--eval_tokens=128", "--sample_tokens=3"])
    eval.main([str(run), "--device=cpu"])
    eval.main([str(run), "--device=cpu", "--prompt=import ", "--tokens=3"])
    monkeypatch.chdir(ROOT)
    assert sweep.main(["sweeps/quickstart.txt", "--dry_run"]) == 0
    assert capsys.readouterr().out.count("val_loss_fp4: ") == 2
    pytest.importorskip("matplotlib")
    plot.main([str(run)])
    assert (tmp_path / "compare.png").exists()


@pytest.mark.parametrize("argv", commands("sweep.py"), ids=" ".join)
def test_sweep_commands_name_a_list(argv, monkeypatch):
    """ Catches: a list that was renamed, or whose runs no longer parse. """
    monkeypatch.chdir(ROOT)
    assert sweep.read_list(Path(argv[0]))


def test_the_two_commands_of_a_fresh_machine():
    """ CI takes the second one from the README. """
    for command in ("python train.py configs/tetrajet_full.py", "python -m pytest"):
        assert re.search(rf"^```\npip install -r requirements.txt && {command}\n```$", README, re.MULTILINE)


# -----------------------------------------------------------------------------
# files

def test_config_files_exist():
    for path in re.findall(r"configs/\w+\.py", README):
        assert (ROOT / path).exists(), path
    tour = re.search(r"^configs/ .*\n(?: .*\n)+", README, re.MULTILINE)[0]
    for path in shipped("configs/*.py"):
        assert re.search(rf"\b{path.stem}\b", tour), f"{path.name} is not in the tour of the files"


def test_the_list_shown_is_that_of_the_quick_start():
    shown = next(text for _, text in FENCES if "| seeds\n" in text)
    assert (ROOT / "sweeps" / "quickstart.txt").read_text().endswith(shown)


def test_the_tour_is_complete():
    tour = next(text for _, text in FENCES if text.startswith("README.md "))
    names = [line.split()[0] for line in tour.splitlines() if not line.startswith(" ")]
    for name in names:
        assert (ROOT / name).exists(), name
    assert {path.name for path in shipped("*.py")} <= set(names)


# -----------------------------------------------------------------------------
# what is shown

def test_the_examples_print_what_they_show():
    """
    As `python -m doctest README.md` does; a fence that closes right below an output is taken for output.
    """
    examples = doctest.DocTestParser().get_doctest(README, {}, "README", "README.md", 0)
    assert len(examples.examples) > 10
    shown = []
    doctest.DocTestRunner(verbose=False).run(examples, out=shown.append)
    assert not shown, "".join(shown)


def test_the_operand_table_is_tetrajet_base():
    """ Catches: a default that changed, and a column that was copied from the row above. """
    recipe = RECIPES["tetrajet_base"]
    names = [field.name for field in fields(recipe)][:6]
    axes = {"Y": "K", "dX": "N", "dW": "T"}          # the summed axis of each product
    plain = {"y_x": "X", "y_w": "W", "dx_dy": "dY", "dw_dy": "dYᵀ"}
    aligned = {"dx_w": "Q2(W)ᵀ", "dw_x": "Q1(X)ᵀ"} if recipe.align else {"dx_w": "Wᵀ", "dw_x": "Xᵀ"}
    table = rows("in `Recipe`")
    assert [(row[0], row[1]) for row in table] == [(f"Q{i}", name) for i, name in enumerate(names, 1)]
    for _, name, product, stored, made_from, block, rounding, scale, rotation in table:
        op = getattr(recipe, name)
        assert (block, rounding, scale, rotation) == (
            f"{op.block[0]}x{op.block[1]} in {op.outer}", op.rounding, op.rule, str(op.hadamard)), name
        assert product.lower() == name.split("_")[0]
        assert stored.strip("()").split(", ")[1] == axes[product], name
        assert made_from == (plain | aligned)[name]


def test_the_table_of_recipes_is_printed_from_the_code():
    """ Catches: a recipe that was added or changed, and not in the table. """
    shown = re.search(r"<!-- recipes -->\n(.*?)<!-- end of recipes -->\n", README, re.DOTALL)[1]
    assert shown == table(), "put what `python recipes.py` prints between the markers of the README"
    assert shown.count("\n") == len(RECIPES) + 2


def test_the_output_shown_is_that_of_the_program():
    """ Catches: a line of the quick start that the program no longer prints in this form. """
    source = (ROOT / "train.py").read_text()
    output = next(text for _, text in FENCES if "val_loss_fp4: " in text)
    for key in re.findall(r"^(\w+): ", output, re.MULTILINE):
        assert f'"{key}": ' in source, key
    for words in ("backend reference: FP4 is emulated", "OutControl keeps", "OsciReset put", "val loss"):
        assert words in output and words in source, words


def test_the_four_diffs_apply_and_train(shards, tmp_path):
    """
    Catches: sources that have moved away from a diff of the README, a diff that grew, and a place that a new
    rule, format or recipe has to be added to as well.
    """
    if shutil.which("git") is None:
        pytest.skip("needs git, to apply the diffs")
    if "mine" in RECIPES:
        pytest.skip("the diffs are in this tree already")
    diffs = [text for language, text in FENCES if language == "diff"]
    assert len(diffs) == 4
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    for diff in diffs:
        changed = [line for line in diff.splitlines() if re.match(r"[+-](?![+-]{2} )", line)]
        assert 0 < len(changed) < 10
        done = subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=tmp_path, capture_output=True)
        assert done.returncode == 0, done.stderr
    look = ("import torch; from quant import Operand, fake_quantize as q; from recipes import RECIPES as R; "
            "x = torch.randn(9, 64); r = R['mine']; assert (q(x, r.dw_x).abs() <= 1.00001 * x.abs()).all(); "
            "assert q(x, Operand(rounding='zero', rule='up')).abs().max() > 1; "
            "w = torch.tensor([[16., 8, 5, 3, 1, .3, .1, 0]]); "
            "assert q(w, r.y_w).tolist() == [[16, 8, 4, 4, 1, .25, 0, 0]], q(w, r.y_w)")
    kernels = ("import torch; from fused import quantized; from quant import Operand, quantize; "
               "x = torch.randn(48, 160); x[3], x[5, 7] = 0, torch.nan\n"
               "for op in (Operand(rounding='zero'), Operand(rounding='zero', rule='up')):\n"
               "    a, b = quantized(x, op), quantize(x, op)\n"
               "    assert torch.equal(a.code, b.code) and torch.equal(a.inner, b.inner)")
    train = ["train.py", *tiny(shards, "--recipe=mine", "--steps=1", f"--out={tmp_path}")]
    commands = [["-c", look], *([["-c", kernels]] if find_spec("triton") else []), train]
    for argv in commands:
        env = os.environ | {"TRITON_INTERPRET": "1"} if argv[-1] == kernels else None
        done = subprocess.run([sys.executable, *argv], cwd=tmp_path, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
    assert "recipe mine" in done.stdout and "val_loss_fp4" in done.stdout


# -----------------------------------------------------------------------------
# what must not be there

def test_nothing_of_one_machine():
    """ Catches: what means something on one machine, or to its owner, only. """
    for path in SOURCES:
        found = re.search(r"/(home|root|Users|work|mnt)\b|\bsub-?agent|\bhelper-\w|pypi\.|pythonhosted\.|"
                          r"download\.pytorch", path.read_text(encoding="utf-8"))
        assert not found, f"{path.name}: {found[0]}"


def test_lines_are_not_too_long():
    for path in SOURCES:
        if path.suffix == ".py":
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                assert len(line) <= 110, f"{path.name}:{number} has {len(line)} columns"

""" README and docs/ keep their word: commands parse, diffs apply and train, what is shown is printed. """
import argparse
import re
import shlex
import shutil
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import build
import config
import data
import eval
import train
from docs import one_page
from noise import SIGN_STREAMS, Counter, random_signs, uniform
from quant import QuantLinear
from recipes import RECIPES
from rivals.__main__ import table
from shipped import shipped
from tools import hf, plot, sweep, verify

ROOT = Path(__file__).resolve().parent.parent
PAGES = {path.name: path.read_text(encoding="utf-8")
         for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]}
README = PAGES["README.md"]
# (language, text) of each
FENCES = [fence for page in PAGES.values()
          for fence in re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)]
PROGRAMS = {"train.py": train, "data.py": data, "eval.py": eval, "tools.sweep": sweep, "tools.plot": plot,
            "tools.hf": hf, "tools.verify": verify}
ADDED = ("five", "centered", "feedback")            # by the diffs of docs/forking.md, which are tried below


def commands(program: str) -> list[list[str]]:
    """ The arguments of each `python program ...`, or `torchrun ... program ...`, in the fences. """
    lines = "\n".join(text for _, text in FENCES).replace("\\\n", " ").splitlines()
    words = [shlex.split(line.split("&&")[-1], comments=True) for line in lines
             if "python " in line and not line.startswith((" ", "+", "-")) or line.startswith("torchrun ")]
    return [w[w.index(program) + 1:] for w in words
            if w[0] in ("python", "torchrun") and program in w]


def test_every_program_is_shown():
    """ Catches: a pattern above that finds nothing, so that nothing is tested. """
    assert all(commands(program) for program in PROGRAMS)


@pytest.mark.parametrize("argv", [argv for argv in commands("train.py")
                                  if not any(name in arg for arg in argv for name in ADDED)], ids=" ".join)
def test_train_commands_parse(argv, capsys):
    """ Catches: a renamed knob, a config file that is gone, a recipe that the flags do not fit. """
    if "--help" in argv:
        with pytest.raises(SystemExit) as end:
            config.parse(argv)
        assert not end.value.code and "--steps=" in capsys.readouterr().out
    else:
        build.recipe_of(config.parse(argv))


@pytest.mark.parametrize("program", [name for name in PROGRAMS if name != "train.py"])
def test_other_commands_parse(program, monkeypatch):
    """ Catches: a renamed flag or sub-command. Nothing is fetched or loaded. """
    class Parsed(Exception):
        pass
    parse = argparse.ArgumentParser.parse_args

    def parse_only(self, argv):
        parse(self, argv)
        raise Parsed
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    for argv in commands(program):
        with pytest.raises(Parsed):
            PROGRAMS[program].main(argv)


def test_the_two_commands_of_a_fresh_machine():
    """ CI takes the second one from the README. """
    for command in ("python train.py configs/tetrajet_full.py", "python -m pytest"):
        assert re.search(rf"^```\npip install -r requirements.txt && {command}\n```$", README, re.MULTILINE)


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
    assert train.main([*commands("train.py")[0], f"--out={tmp_path}", "--device=cpu", "--steps=20",
                       "--batch_tokens=128", "--eval_tokens=128", "--sample_tokens=3"]) == 0
    eval.main([str(run), "--device=cpu"])
    eval.main([str(run), "--device=cpu", "--prompt=import ", "--tokens=3"])
    assert capsys.readouterr().out.count("val_loss_fp4: ") == 2


# -----------------------------------------------------------------------------
# what is shown


def test_links_lead_somewhere():
    """ Catches: a page or a file that was moved, in a link or in the tour of the files. """
    for name, page in PAGES.items():
        folder = ROOT if name == "README.md" else ROOT / "docs"
        for link in re.findall(r"\]\((?!http|#)([^)#]+)", page):
            assert (folder / link).exists(), f"{name}: {link}"
    tour = {line.split()[0] for language, text in FENCES if not language for line in text.splitlines()
            if re.match(r"[\w/.]+ {2,}[A-Za-z]", line) and text.startswith(("README.md ", "codes.py "))}
    assert all((ROOT / name).exists() for name in tour)
    assert {path.name for path in shipped("*.py")} <= tour


def test_python_quant_prints_what_the_readme_shows():
    """ Catches: a changed number, or a format that is shown otherwise. """
    printed = subprocess.run([sys.executable, "quant.py"], cwd=ROOT, capture_output=True, text=True).stdout
    assert f"```\n{printed}```\n" in README


def test_the_operand_table_is_tetrajet_base():
    """ Catches: a default that changed, and a column that was copied from the row above. """
    recipe = RECIPES["tetrajet_base"]
    lines = README[README.index("| | in `Recipe` |"):].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    products, axes = ("Y", "Y", "dX", "dX", "dW", "dW"), ("K", "K", "N", "N", "T", "T")
    sources = ("X", "W", "dY", "Q2(W)ᵀ", "dYᵀ", "Q1(X)ᵀ")
    assert recipe.align
    for i, (field, op) in enumerate(zip(fields(recipe), recipe.operands)):
        number, name, product, stored, made_from, block, rounding, scale, rotation = rows[i]
        assert (number, name, product, made_from) == (f"Q{i + 1}", field.name, products[i], sources[i])
        assert stored.strip("()").split(", ")[1] == axes[i]
        assert (block, rounding, scale) == (f"1x{op.block[1]} in {op.outer}", op.rounding, op.rule)
        assert rotation == str(recipe.rotate[i // 2])


def test_the_table_of_recipes_is_printed_from_the_code():
    """ Catches: a recipe that was added or changed, and not in the table. """
    shown = re.search(r"<!-- recipes -->\n(.*?)<!-- end of recipes -->\n", PAGES["recipes.md"], re.DOTALL)[1]
    assert shown == table(), "put what `python -m rivals` prints between the markers of docs/recipes.md"


def test_the_list_shown_is_that_of_the_quick_start():
    """ Catches: a sweep whose list was changed in one of the two places. """
    shown = next(text for _, text in FENCES if "| seeds\n" in text)
    assert (ROOT / "sweeps" / "quickstart.txt").read_text().endswith(shown)


@pytest.mark.parametrize("name", ("tetrajet_base", "tetrajet_full"))
def test_the_linear_on_one_page_is_the_linear(name):
    """ Catches: a page on the wall that computes something else than the code. """
    counter, g = Counter(seed=3), torch.Generator().manual_seed(0)
    channels = torch.tensor([3, 40, 41]) if name == "tetrajet_full" else torch.empty(0, dtype=torch.int64)
    layer = QuantLinear(200, 72, bias=False, recipe=RECIPES[name], layer=5, counter=counter,
                        outliers=len(channels))
    layer.set_channels(channels)
    x, dy = torch.randn(130, 200, generator=g), torch.randn(130, 72, generator=g)
    x[:, channels] *= 30

    def draw(kind: str, what):
        if kind in ("dx", "dw"):
            return random_signs(what, counter.state, 5, SIGN_STREAMS[1 if kind == "dx" else 2])
        return uniform(tuple(what), counter.state, 5, int(kind[1]))
    results = []
    for multiply in (layer, lambda t: one_page.Linear.apply(t, layer.weight, channels, draw)):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y = multiply(leaf)
        y.backward(dy)
        results.append((y.detach(), leaf.grad, layer.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results))


# -----------------------------------------------------------------------------
# forking


def copy_of_the_project(folder: Path):
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    for name in ("rivals", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))


@pytest.mark.parametrize("number, flags", ((0, ["--recipe=five"]), (1, ["--recipe=centered"]),
                                           (2, ["--recipe=tetrajet_base", "--osci=feedback"])))
def test_the_three_ideas_apply_train_and_resume(number, flags, tmp_path):
    """
    Catches: code that has moved away from a diff of docs/forking.md, a diff that grew beyond 15 lines of
    code, an idea that the rest of the lesson has to know of, and state that a checkpoint does not hold.
    """
    if shutil.which("git") is None:
        pytest.skip("needs git, to apply the diff")
    diff = [text for language, text in FENCES if language == "diff"][number]
    added = [line for line in re.findall(r"^\+(?!\+\+)(.*)", diff, re.MULTILINE)
             if line.strip() and not line.startswith(('"""', "from rivals"))]
    assert len(added) <= 15 and diff.count("\n+++ ") == 2
    copy_of_the_project(tmp_path)
    done = subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr
    small = ["--n_layer=1", "--d_model=32", "--n_head=2", "--d_ff=32", "--seq_len=32", "--batch_tokens=128",
             "--eval_tokens=128", "--steps=24", "--sample_tokens=0", "--log_every=1", "--device=cpu", *flags]
    script = ("import sys, torch, train; a = sys.argv[1:]; train.main(a + ['--name=whole']); "
              "train.main(a + ['--name=cut', '--stop_at=11']); train.main(a + ['--name=cut']); "
              "w, c = (torch.load(f'out/{n}/ckpt_000000024.pt')['model'] for n in ('whole', 'cut')); "
              "assert w.keys() == c.keys() and all(torch.equal(w[k], c[k]) for k in w); "
              "from rivals.__main__ import table; print(table())")
    done = subprocess.run([sys.executable, "-c", script, *small], cwd=tmp_path, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    assert "val_loss_fp4" in done.stdout
    if number < 2:      # the third is a remedy and no recipe
        name = flags[0].split("=")[1]
        assert f"`{name}`" in done.stdout and done.stdout.count(f" {name}") >= 1


# -----------------------------------------------------------------------------
# what must not be there


def texts() -> list[Path]:
    return [path for folder in (".", ".ci", "configs", "sweeps", "tests", "rivals", "tools", "docs")
            for path in shipped(f"{folder}/*")
            if path.suffix in (".py", ".md", ".txt", ".ini") or path.name == "run"]


def test_nothing_of_one_machine():
    """ Catches: what means something on one machine, or to its owner, only. """
    for path in texts():
        found = re.search(r"/(home|root|Users|work|mnt)\b|\bsub-?agent|\bhelper-\w|pypi\.|pythonhosted\.|"
                          r"download\.pytorch", path.read_text(encoding="utf-8"))
        assert not found or path.name == "test_docs.py", f"{path.name}: {found[0]}"


def test_lines_are_not_too_long_and_no_function_is():
    """ Catches: lines that do not fit on a screen, and functions that do not. """
    for path in texts():
        if path.suffix == ".py":
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                assert len(line) <= 110, f"{path.name}:{number} has {len(line)} columns"


def test_the_lesson_knows_no_rival():
    """ Catches: a file of the lesson that imports what it is compared with, or names one of its rules. """
    for name in ("quant", "noise", "recipes", "outliers", "osci", "model", "train", "kernels", "rounding"):
        text = (ROOT / f"{name}.py").read_text(encoding="utf-8")
        assert not re.search(r"^\s*(import|from) (rivals|tools)", text, re.MULTILINE), name
        assert not re.search(r"\"(4/6|17/16|eden|quest|3/4|floor|max)\"", text), name

""" tools/verify.py: that it sees what is wrong, and what it says of our own recipes. """
import pytest
import torch

import rivals       # noqa: F401  their recipes
from quant import Product
from recipes import RECIPES
from tools import verify

UNBIASED = [name for name, r in RECIPES.items() if any(r.operands) and not r.around and all(
    op and (op.rule, op.rounding) in (("up", "sr"), ("17/16", "sr"), ("3/4", "sr")) for op in r.operands[2:])]


@pytest.fixture(autouse=True)
def fewer_draws(monkeypatch):
    monkeypatch.setattr(verify, "DRAWS", 100)


@pytest.mark.parametrize("name", UNBIASED)
def test_the_mean_of_the_gradient_is_exact(name):
    """ Catches: noise that two operands share, clipping, a Q4 or Q6 that starts from another matrix. """
    assert all(mean.chance and not mean.biased for _, mean in verify.gradient(RECIPES[name]))


def test_a_clipped_gradient_is_seen_to_be_biased(monkeypatch):
    """ Catches: bounds so wide, or draws so few, that nothing is ever biased. Clipping shortens by .004. """
    monkeypatch.setattr(verify, "DRAWS", 400)
    for _, mean in verify.gradient(RECIPES["tetrajet_released"]):
        assert mean.biased and -.01 < mean.length < -.002


def test_each_operand():
    """
    Catches: an operand that is not turned back before it is compared, errors of another operand. The error of
    stochastic rounding is a sixth of a gap squared, that of nearest a twelfth; and nearest has one draw.
    """
    found = {what: (error, mean) for what, error, mean in verify.operands(RECIPES["tetrajet_base"])}
    assert list(found) == ["Q1", "Q2", "Q3", "Q4", "Q5", "Q6"]
    assert all(.007 < error < .01 and not mean.chance for error, mean in list(found.values())[:2])
    assert all(.017 < error < .024 and not mean.biased for error, mean in list(found.values())[2:])


def test_other_bits_are_a_fault(monkeypatch, capsys):
    """ Catches: a comparison of a run with itself, a fault that is told with exit code 0. """
    real, calls = Product.forward, []

    def drifting(ctx, *args):
        calls.append(1)
        return real(ctx, *args) * (1 + 2.0**-20 * len(calls))
    monkeypatch.setattr(Product, "forward", staticmethod(drifting))
    monkeypatch.setattr(verify, "ranks", lambda name, folder: [])
    monkeypatch.setattr(verify, "DRAWS", 2)
    assert verify.main(["tetrajet_base"]) == 1
    assert capsys.readouterr().out.count("OTHER BITS") == 4


def test_the_whole_of_it(monkeypatch, capsys):
    """ Catches: a recipe of ours that has two results, a check that is left out. """
    monkeypatch.setattr(verify, "DRAWS", 2)
    assert verify.main(["tetrajet_full"]) == 0
    told = capsys.readouterr().out
    assert told.count(": the same") >= (5 if torch.__version__ >= "2.10" else 3) and "OTHER" not in told
    assert verify.main(["tetrajet_ful"]) == 2 and verify.main(["bf16"]) == 2
    assert "did you mean tetrajet_full?" in capsys.readouterr().err

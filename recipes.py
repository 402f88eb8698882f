"""
The recipes: which of the six operands of a linear layer are rounded, and how. RECIPES has one per method.

This file has bf16, which rounds nothing, and TetraJet-v2's own; rivals/recipes.py adds those of other papers,
and `python -m rivals` prints the table of all. An idea of your own is one entry more, in a file of yours
(docs/forking.md).

OsciReset (osci.py) and the choice of outlier channels (outliers.py) happen in training and are no part of a
recipe; a recipe only says in which format the outlier channels are kept.
"""
import json
from dataclasses import replace

from quant import Operand, Recipe, Table

# NVFP4 in double blocks: an outer scale for 1x128 numbers and an inner one for 1x16
NEAREST = Operand(rule="nearest", rounding="rtn")
STOCHASTIC = Operand(rule="up", rounding="sr")

# MXFP8, for outlier channels: E4M3 numbers, and a power of two for 32 of them, rounded up so that none clips
MXFP8 = Operand(grid="e4m3", block=(1, 32), scale="e8m0", outer=0, rule="up")

# TetraJet-v2, arXiv 2510.27527. The forward pass rounds to nearest: that has half the squared error of
# stochastic rounding, and training adapts to what is left. The four operands of the backward pass are rounded
# stochastically, since a bias would be in the gradient of every step and add up. They are rotated, and two of
# them start from what the forward pass rounded
TETRAJET_BASE = Recipe(NEAREST, NEAREST, *[STOCHASTIC] * 4, align=True, rotate=(0, 16, 16))

# The kernels that its authors released round the scales of stochastic operands to nearest too. Then the
# largest number of a block may be clipped, and the mean of what it is rounded to is not the number itself
RELEASED = replace(STOCHASTIC, rule="nearest")

RECIPES = Table(
    bf16=Recipe(),
    tetrajet_base=TETRAJET_BASE,
    tetrajet_full=replace(TETRAJET_BASE, outlier=MXFP8),
    tetrajet_released=Recipe(NEAREST, NEAREST, *[RELEASED] * 4, rotate=(0, 16, 16), outlier=MXFP8),
)


# -----------------------------------------------------------------------------
# what a checkpoint keeps: a recipe by the names of what it uses


def from_json(text: str) -> Recipe:
    """ The recipe whose .text this is. """
    def whole(value):
        if isinstance(value, dict):
            return Operand(**{name: whole(v) for name, v in value.items()})
        return tuple(value) if isinstance(value, list) else value
    return Recipe(**{name: whole(value) for name, value in json.loads(text).items()})

"""
The recipes: which of the six operands of a linear layer are rounded, and how. RECIPES has one per method.

    python -m rivals      prints the table of all recipes, as docs/recipes.md has it

Here stand bf16, which rounds nothing, and TetraJet-v2's own; rivals/recipes.py adds what other papers do. An
idea of your own is one entry more, in a file of yours (docs/forking.md).

OsciReset (osci.py) and the choice of outlier channels (outliers.py) happen in training and are no part of a
recipe; a recipe only says in which format the outlier channels are kept.
"""
import json
from dataclasses import asdict, replace

from quant import TENSOR, Operand, Recipe, Table

# NVFP4 in double blocks: an outer scale for 1x128 numbers and an inner one for 1x16
NEAREST = Operand(rule="nearest", rounding="rtn")
STOCHASTIC = Operand(rule="up", rounding="sr")

# MXFP8, for outlier channels: E4M3 numbers, and a power of two for 32 of them, rounded up so that none clips
MXFP8 = Operand(grid="e4m3", block=(1, 32), scale="e8m0", outer=0, rule="up")

# TetraJet-v2, arXiv 2510.27527. Forward to nearest; the four operands of the backward pass are rotated and
# stochastic, and two of them start from what the forward pass rounded
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


def to_json(recipe: Recipe) -> str:
    return json.dumps(asdict(recipe))


def from_json(text: str) -> Recipe:
    """ The inverse of to_json. """
    def whole(value):
        if isinstance(value, dict):
            return Operand(**{name: whole(v) for name, v in value.items()})
        return tuple(value) if isinstance(value, list) else value
    return Recipe(**{name: whole(value) for name, value in json.loads(text).items()})


# -----------------------------------------------------------------------------
# the table of docs/recipes.md


def table() -> str:
    """ RECIPES as a table in Markdown: a row for each recipe, a column for each operand. """
    names = ["X", "W", "dY", "Wᵀ", "dYᵀ", "Xᵀ"]
    head = ["recipe", *names, "Wᵀ, Xᵀ from", "outlier channels", "rotated, around"]

    def cells(operands: tuple[Operand | None, ...]) -> list[str]:
        words = [described(op) for op in operands]
        first = [words.index(text) for text in words]
        return [text if i == k or text == "-" else f"as {names[k]}"
                for i, (text, k) in enumerate(zip(words, first))]

    rows = [[f"`{name}`", *cells(r.operands),
             "-" if not any(r.operands) else "Q2(W), Q1(X)" if r.align else "W, X", described(r.outlier),
             turned(r)]
            for name, r in RECIPES.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]) + "\n"


def described(op: Operand | str | None) -> str:
    """ An operand in a few words: grid, block, what shares an outer scale, scale and rule, and sr. """
    if not isinstance(op, Operand):
        return op or "-"
    outer = {0: "", TENSOR: "in tensor"}.get(op.outer, f"in {op.outer}")
    words = [op.grid, f"{op.block[0]}x{op.block[1]}", outer, op.scale, op.rule, op.rounding]
    return " ".join(word for word in words if word not in ("", "rtn"))


def turned(r: Recipe) -> str:
    """ The rotations of Y, dX and dW, and what is around the linear. """
    words = [f"{product} by {size} {signs}" for product, size, signs in
             zip(("Y", "dX", "dW"), r.rotate, r.signs) if size]
    return ", ".join([*words, *r.around]) or "-"

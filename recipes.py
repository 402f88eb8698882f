"""
The recipes: which of the six operands of a linear layer is rounded, and how. One entry of RECIPES per method.

    python recipes.py      prints the table of the README

To try an idea of your own, add an entry here; a new rounding rule or block format is at most one function in
quant.py. Oscillation resets (osci.py) and the choice of outlier channels (outliers.py) are training options,
not part of a recipe; a recipe only says in which format the outlier channels are kept.
"""
from dataclasses import fields, replace

from quant import TENSOR, Operand, Recipe

# -----------------------------------------------------------------------------
# operands

# NVFP4 with the double block, 1x128 outer and 1x16 inner: TetraJet-v2, arXiv 2510.27527
NEAREST = Operand(rounding="rtn", rule="nearest")
STOCHASTIC = Operand(rounding="sr", rule="up", hadamard=16)

# MXFP8 for outlier channels: E4M3 values, one power of two per 32,
# rounded up so that nothing clips (same paper)
MXFP8 = Operand(grid="e4m3", block=(1, 32), scale="e8m0", outer=0, rule="ceil")

# NVFP4 with one outer scale for the tensor: 1x16 along the summed axis, or 16x16 for weights, which are
# then the same values in W and in W^T. 2509.25149, appendix B
NVFP4 = replace(NEAREST, outer=TENSOR)
SQUARE = replace(NVFP4, block=(16, 16))
# the same paper's gradients: the scale is rounded to nearest, so the largest value of a block may clip
NVFP4_SR = replace(NVFP4, rounding="sr")

# MXFP4 by the OCP specification, whose scale may clip; and by TetraJet v1, 2502.20853, whose scale does not
MXFP4 = Operand(block=(1, 32), scale="e8m0", outer=0, rule="floor")
CEIL = replace(MXFP4, rule="ceil")
CEIL_SR = replace(CEIL, rounding="sr")

# Quartet, 2505.14669: after a plain Hadamard matrix, a scale made for normal values, which clips; backward,
# fresh signs and a scale that clips nothing. As in its code the power of two is rounded down, so 6 scales are
# 1.5 to 2.9 standard deviations: a larger error than the paper's table has for QuEST, 21e-3 against 13.2e-3
QUEST = replace(MXFP4, rule="quest", hadamard=32, signs="none")
QUARTET_BACK = replace(MXFP4, rule="3/4", hadamard=32)

# MS-EDEN, 2601.22813: noise in the scales only, over rotations of 128
EDEN = Operand(outer=TENSOR, rounding="eden", hadamard=128)

# FP8 with one scale for the tensor, max / grid max, not rounded to a power of two: "current scaling" of
# TransformerEngine, which gives E4M3 to X and W, E5M2 to gradients
FP8 = Operand(grid="e4m3", block=(1, 128), scale="none", outer=TENSOR)
FP8_GRADIENT = replace(FP8, grid="e5m2")


def recipe(x: Operand, w: Operand, dy: Operand, wt: Operand | None = None, dyt: Operand | None = None,
           xt: Operand | None = None, align: bool = False, **others) -> Recipe:
    """ X, W, dY, W^T, dY^T, X^T -> a Recipe; a transposed operand that is left out is rounded as it is. """
    return Recipe(x, w, dy, wt or w, dyt or dy, xt or x, align=align, **others)


# -----------------------------------------------------------------------------
# recipes

# forward nearest and unrotated; both backward GEMMs rotated and stochastic, on the forward's rounded tensors
TETRAJET_BASE = Recipe(NEAREST, NEAREST, STOCHASTIC, STOCHASTIC, STOCHASTIC, STOCHASTIC, align=True)

# the released kernels round every scale to nearest, which clips block maxima
# and so biases the stochastic rounding
_RELEASED = replace(STOCHASTIC, rule="nearest")

# one sign vector for all layers and the whole run, on the two operands of dW only
_FIXED = dict(hadamard=16, signs="fixed")

# E2M1 has no value between 4 and 6: see Operand.rule
_SIX, _SIX_SQUARE = replace(NVFP4, rule="4/6"), replace(SQUARE, rule="4/6")

# scales with the range of E5M3; differs: the outer scale is made anew at every step, not every 50
_UE5M3, _UE5M3_SQUARE = replace(NVFP4, scale="ue5m3"), replace(SQUARE, scale="ue5m3")

# 4 bits evenly spaced, and every GEMM rotated
_UNIFORM = replace(NVFP4, grid="e1m2", hadamard=16, signs="fixed")

RECIPES = {
    "bf16": Recipe(),

    # 8 bits, the usual baselines
    "fp8": recipe(FP8, FP8, FP8_GRADIENT),
    "mxfp8": recipe(MXFP8, MXFP8, MXFP8),

    # the two 4-bit formats as they are: no rotation, no alignment
    "mxfp4": recipe(MXFP4, MXFP4, MXFP4),
    "nvfp4": recipe(NVFP4, NVFP4, NVFP4),
    # ... and the four backward operands stochastic, with a scale that does not clip
    "nvfp4_sr": recipe(NVFP4, NVFP4, *[replace(NVFP4_SR, rule="up")] * 4),

    # 2510.27527
    "tetrajet_base": TETRAJET_BASE,
    "tetrajet_full": replace(TETRAJET_BASE, outlier=MXFP8),
    "tetrajet_released": Recipe(NEAREST, NEAREST, _RELEASED, _RELEASED, _RELEASED, _RELEASED, outlier=MXFP8),

    # 2502.20853: six quantizers, Q4 and Q6 of what the forward pass rounded, no rotation
    "tetrajet_v1": recipe(CEIL, CEIL, *[CEIL_SR] * 4, align=True),

    # 2505.14669: the gradient of what the forward pass clipped is zero. Backward is stochastic in v1; v4 of
    # the paper takes that back and rounds to nearest
    # differs: the products' factor 16/9 is a factor 4/3 in each operand's scale; and v4's 1.009276, which the
    # summary at hand does not place, is one of each operand's too (by a count of ours, what rounding shortens
    # a normal operand by is 1.0095)
    "quartet": recipe(QUEST, QUEST, *[replace(QUARTET_BACK, rounding="sr")] * 4, align=True, trust=True),
    "quartet_v4": recipe(QUEST, QUEST, *[QUARTET_BACK] * 4, align=True, trust=True),

    # 2601.22813: four-over-six forward; backward MS-EDEN in all four operands, of what the forward rounded
    "quartet2": recipe(_SIX, _SIX, *[EDEN] * 4, align=True),

    # 2509.25149, section 4. differs: no block in bf16 unless --keep_last says so
    "nvidia": recipe(NVFP4, SQUARE, NVFP4_SR, dyt=replace(NVFP4_SR, **_FIXED), xt=replace(NVFP4, **_FIXED)),

    # 2512.02010 changes the forward's rule of nvidia; gradients stay, where the choice would be a bias.
    # differs: X^T in dW has the rule too, which that paper's summary leaves open
    "four_over_six": recipe(_SIX, _SIX_SQUARE, NVFP4_SR, dyt=replace(NVFP4_SR, **_FIXED),
                            xt=replace(_SIX, **_FIXED)),

    # 2505.19115: split rounding, stochastic for gradients and for the activations of the update
    "fp4_all_the_way": recipe(NVFP4, NVFP4, NVFP4_SR, xt=NVFP4_SR),

    # 2609.02846: 2D weights, gradients stochastic, no rotation
    "ue5m3": recipe(_UE5M3, _UE5M3_SQUARE, replace(_UE5M3, rounding="sr")),

    # 2606.20381: a uniform grid, all three GEMMs rotated, dY stochastic
    # differs: block and scales are NVFP4's, which the summary at hand leaves open
    "ufp4": recipe(_UNIFORM, _UNIFORM, replace(_UNIFORM, rounding="sr")),
}


# -----------------------------------------------------------------------------
# changes by flags


def altered(recipe: Recipe, cfg) -> Recipe:
    """
    The recipe with the changes of cfg, a Config: quantizers, rotate, rotate_size, block_w, block_x,
    scale_rule, backward, outer, align, outlier_format. ValueError where these do not fit each other or the
    recipe. A recipe that rounds nothing stays what it is.
    """
    if not any(recipe.operands):
        return recipe
    ops = {field.name: op for field, op in zip(fields(recipe), recipe.operands) if op}
    for name, op in ops.items():
        product, tensor = name.split("_")
        new = {"hadamard": _rotation(recipe, product, cfg)}
        if block := {"w": cfg.block_w, "x": cfg.block_x}.get(tensor):
            new["block"] = tuple(int(n) for n in block.split("x"))
        if cfg.outer:
            new["outer"] = TENSOR if cfg.outer == "tensor" else int(cfg.outer)
        if product == "y" and new["hadamard"] and op.signs == "fresh":
            # evaluation has to see the function that was trained
            new["signs"] = "fixed"
        if product != "y":
            changed = cfg.backward not in ("", op.rounding) and op.scale != "e8m0"
            new |= {"rounding": cfg.backward or op.rounding,
                    "rule": cfg.scale_rule or ("" if changed else op.rule)}
        ops[name] = replace(op, **new)
    align = recipe.align if cfg.align == "" else cfg.align == "true"
    outlier = {"": recipe.outlier, "mxfp8": MXFP8, "bf16": "bf16"}[cfg.outlier_format]
    numbers = [int(n) for n in cfg.quantizers.split(",") if n]
    return replace(recipe, **ops, align=align, outlier=outlier).only(numbers)


def _rotation(recipe: Recipe, product: str, cfg) -> int:
    """ How many values the operands of a product (y, dx or dw) are to be rotated by. """
    sizes = {op.hadamard for name, op in zip(fields(recipe), recipe.operands)
             if name.name.startswith(product) and op}
    size = max(sizes, default=0)
    if cfg.rotate:
        size = (size or cfg.rotate_size or 16) if product in cfg.rotate.split(",") else 0
    return cfg.rotate_size or size if size else 0


# -----------------------------------------------------------------------------
# the table in the README


def described(op: Operand | str | None) -> str:
    """ An operand in a few words: grid, block, what shares an outer scale, scale and rule, sr, rotation. """
    if not isinstance(op, Operand):
        return op or "-"
    words = [op.grid, f"{op.block[0]}x{op.block[1]}"] if op.scale != "none" else [op.grid]
    words += {0: [], TENSOR: ["in tensor"]}.get(op.outer, [f"in {op.outer}"])
    words += [op.scale, op.rule] if op.scale != "none" else []
    # eden is told by its rule: the noise is in the scale, and the values are rounded to nearest
    words += [op.rounding] if op.rounding not in ("rtn", "eden") else []
    if op.hadamard:
        words.append(f"H{op.hadamard}" + {"fresh": "", "fixed": " fixed", "none": " plain"}[op.signs])
    return " ".join(words)


def table() -> str:
    """ RECIPES as a table in Markdown, a row for each recipe and a column for each operand. """
    names = ["X", "W", "dY", "Wᵀ", "dYᵀ", "Xᵀ"]
    head = ["recipe", *names, "Wᵀ, Xᵀ from", "outlier channels", "trust mask"]

    def cells(operands: tuple[Operand | None, ...]) -> list[str]:
        words = [described(op) for op in operands]
        first = [words.index(text) for text in words]
        return [text if i == k or text == "-" else f"as {names[k]}"
                for i, (text, k) in enumerate(zip(words, first))]

    rows = [[f"`{name}`", *cells(r.operands),
             "-" if not any(r.operands) else "Q2(W), Q1(X)" if r.align else "W, X", described(r.outlier),
             "yes" if r.trust else "-"]
            for name, r in RECIPES.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]) + "\n"


if __name__ == "__main__":
    from config import script
    script(lambda: print(table(), end=""))

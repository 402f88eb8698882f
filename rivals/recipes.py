"""
The recipes of other papers, put into RECIPES. Each entry names its source, and in what it differs from it.

tetrajet_base (recipes.py) is the one that they are compared with.
"""
from dataclasses import replace

import rivals.rules    # noqa: F401  the rules, grids and signs that the recipes below name
from quant import TENSOR, Operand, Recipe
from recipes import MXFP8, NEAREST, RECIPES

# -----------------------------------------------------------------------------
# operands

# NVFP4 with one outer scale for the tensor: 1x16 along the summed axis, or 16x16 for weights, which are
# then the same values in W and in W^T. 2509.25149, appendix B
NVFP4 = replace(NEAREST, outer=TENSOR)
SQUARE = replace(NVFP4, block=(16, 16))
# the same paper's gradients: the scale is rounded to nearest, so the largest value of a block may clip
NVFP4_SR = replace(NVFP4, rounding="sr")

# MXFP4 by the OCP specification, whose scale may clip; and by TetraJet v1, 2502.20853, whose scale does not
MXFP4 = Operand(block=(1, 32), scale="e8m0", outer=0, rule="floor")
CEIL = replace(MXFP4, rule="up")
CEIL_SR = replace(CEIL, rounding="sr")

# Quartet, 2505.14669: after a plain Hadamard matrix, a scale made for normal values, which clips; backward,
# fresh signs and a scale that clips nothing. As in its code the power of two is rounded down, so 6 scales are
# 1.5 to 2.9 standard deviations: a larger error than the paper's table has for QuEST, 21e-3 against 13.2e-3
QUEST = replace(MXFP4, rule="quest")
QUARTET_BACK = replace(MXFP4, rule="3/4", outer=TENSOR)      # an outer scale of 4/3 for all
QUARTET = dict(align=True, rotate=(0, 32, 32), around=("rotate 32 none", "trust"))

# MS-EDEN, 2601.22813: noise in the scales only, over rotations of 128
EDEN = Operand(outer=TENSOR, rule="eden", rounding="sr")

# FP8 with one scale for the tensor, max / grid max, not rounded to a power of two: "current scaling" of
# TransformerEngine, which gives E4M3 to X and W, E5M2 to gradients
FP8 = Operand(grid="e4m3", block=(1, 128), rule="max", outer=TENSOR)
FP8_GRADIENT = replace(FP8, grid="e5m2")

# one sign vector for all layers and the whole run, on the two operands of dW only: 2509.25149
FIXED = dict(rotate=(0, 0, 16), signs=("fresh", "fresh", "fixed"))

# E2M1 has no number between 4 and 6, so the maximum of a block goes to whichever of the two is better
SIX, SIX_SQUARE = replace(NVFP4, rule="4/6"), replace(SQUARE, rule="4/6")

# each block in E2M1 or evenly spaced
IF4 = replace(NVFP4, grid="if4", rule="if4")

# scales with the range of E5M3. differs: the outer scale is made anew at every step, not every 50
UE5M3, UE5M3_SQUARE = replace(NVFP4, scale="ue5m3"), replace(SQUARE, scale="ue5m3")

# 4 bits evenly spaced, and every product rotated
UNIFORM = replace(NVFP4, grid="e1m2")


def same(x: Operand, w: Operand, dy: Operand, xt: Operand | None = None, **others) -> Recipe:
    """ X, W, dY and X^T -> a recipe whose transposed operands are rounded as they are untransposed. """
    return Recipe(x, w, dy, w, dy, xt or x, align=False, **others)


# -----------------------------------------------------------------------------
# recipes

# 8 bits, the usual baselines
RECIPES["fp8"] = same(FP8, FP8, FP8_GRADIENT)
RECIPES["mxfp8"] = same(MXFP8, MXFP8, MXFP8)

# the two 4-bit formats as they are: no rotation, no alignment
RECIPES["mxfp4"] = same(MXFP4, MXFP4, MXFP4)
RECIPES["nvfp4"] = same(NVFP4, NVFP4, NVFP4)
# ... and the four operands of the backward pass stochastic, with a scale that does not clip
RECIPES["nvfp4_sr"] = Recipe(NVFP4, NVFP4, *[replace(NVFP4_SR, rule="up")] * 4, align=False)

# 2502.20853: six quantizers, Q4 and Q6 of what the forward pass rounded, no rotation
RECIPES["tetrajet_v1"] = Recipe(CEIL, CEIL, *[CEIL_SR] * 4, align=True)

# 2505.14669: the gradient of what the forward pass clipped is zero. Backward is stochastic in v1; v4 of the
# paper takes that back and rounds to nearest
# differs: the products' factor 16/9 is a factor 4/3 in each operand's scale; and v4's 1.009276, which the
# summary at hand does not place, is one of each operand's too (by a count of ours, what rounding shortens a
# normal operand by is 1.0095)
RECIPES["quartet"] = Recipe(QUEST, QUEST, *[replace(QUARTET_BACK, rounding="sr")] * 4, **QUARTET)
RECIPES["quartet_v4"] = Recipe(QUEST, QUEST, *[QUARTET_BACK] * 4, **QUARTET)

# 2502.20586: the forward pass in bf16, where the paper also tries FP8; both products of the backward pass in
# MXFP4, of W and X as they are. Quartet's backward pass has its scale from here
RECIPES["tseng"] = Recipe(None, None, *[replace(QUARTET_BACK, rounding="sr")] * 4, align=False,
                          rotate=(0, 64, 64))
# 2605.09825 says that a rotation helps, and that noise and random signs do not: the same with neither, and so
# with the scale of the OCP specification, which may clip
RECIPES["tseng_fixed"] = Recipe(None, None, *[MXFP4] * 4, align=False, rotate=(0, 64, 64),
                                signs=("fresh", "none", "none"))

# 2601.22813: four-over-six forward; backward MS-EDEN in all four operands, of what the forward pass rounded
RECIPES["quartet2"] = Recipe(SIX, SIX, *[EDEN] * 4, align=True, rotate=(0, 128, 128))

# 2509.25149, section 4. differs: no block in bf16 unless --keep_last says so
RECIPES["nvidia"] = same(NVFP4, SQUARE, NVFP4_SR, xt=NVFP4, **FIXED)

# 2512.02010 changes the forward pass of nvidia; gradients stay, where the choice would be a bias.
# differs: X^T in dW has the rule too, which that paper's summary leaves open
RECIPES["four_over_six"] = same(SIX, SIX_SQUARE, NVFP4_SR, xt=SIX, **FIXED)

# 2603.28765, by the code of its 340M model: 1x16 blocks in weights too, dW rotated, gradients stochastic
# differs: its last four of 24 blocks are in bf16, here none unless --keep_last says so
RECIPES["if4"] = same(IF4, IF4, replace(IF4, rounding="sr"), **FIXED)

# 2603.10444 v2: the mean of the tokens apart, see averis in rules.py
# differs: dY is stochastic and X, W are not, which the summary at hand leaves open
RECIPES["averis"] = same(NVFP4, NVFP4, NVFP4_SR, around=("averis",))

# 2505.19115: split rounding, stochastic for gradients and for the activations of the update
RECIPES["fp4_all_the_way"] = same(NVFP4, NVFP4, NVFP4_SR, xt=NVFP4_SR)

# 2609.02846: 2D weights, gradients stochastic, no rotation
RECIPES["ue5m3"] = same(UE5M3, UE5M3_SQUARE, replace(UE5M3, rounding="sr"))

# 2606.20381: a uniform grid, all three products rotated, dY stochastic
# differs: block and scales are NVFP4's, which the summary at hand leaves open
RECIPES["ufp4"] = same(UNIFORM, UNIFORM, replace(UNIFORM, rounding="sr"), rotate=(16, 16, 16),
                       signs=("fixed",) * 3)

"""
The recipes: which of the six operands of a linear layer is rounded, and how. One entry of RECIPES per method.

To try an idea of your own, add an entry here; a new rounding rule or block format is at most one function in
quant.py. Oscillation resets (osci.py) and the choice of outlier channels (outliers.py) are training options,
not part of a recipe; a recipe only says in which format the outlier channels are kept.
"""
from dataclasses import replace

from quant import Operand, Recipe

# NVFP4 with the double block, 1x128 outer and 1x16 inner: TetraJet-v2, arXiv 2510.27527
NEAREST = Operand(rounding="rtn", rule="nearest")
STOCHASTIC = Operand(rounding="sr", rule="up", hadamard=16)

# MXFP8 for outlier channels: E4M3 values, one power of two per 32,
# rounded up so that nothing clips (same paper)
MXFP8 = Operand(grid="e4m3", block=(1, 32), scale="e8m0", outer=0, rule="ceil")

# forward nearest and unrotated; both backward GEMMs rotated and stochastic, on the forward's rounded tensors
TETRAJET_BASE = Recipe(NEAREST, NEAREST, STOCHASTIC, STOCHASTIC, STOCHASTIC, STOCHASTIC, align=True)

# the released kernels round every scale to nearest, which clips block maxima
# and so biases the stochastic rounding
_RELEASED = replace(STOCHASTIC, rule="nearest")

RECIPES = {
    "bf16": Recipe(),
    "tetrajet_base": TETRAJET_BASE,
    "tetrajet_full": replace(TETRAJET_BASE, outlier=MXFP8),
    "tetrajet_released": Recipe(NEAREST, NEAREST, _RELEASED, _RELEASED, _RELEASED, _RELEASED, outlier=MXFP8),
}

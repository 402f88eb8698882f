# configs/tseng_fixed.py     tseng without noise and random signs (arXiv 2605.09825)
#
#   python train.py configs/tseng_fixed.py --seed=1
#
# The forward pass in bf16; backward in MXFP4 to nearest, rotated by a plain Hadamard matrix of 64. That paper
# says that a rotation is what helps, against 2502.20586: tseng and this one are the two to compare.

recipe = "tseng_fixed"

# configs/tseng_fixed.py     tseng without noise and random signs (arXiv 2605.09825)
#
#   python train.py configs/tseng_fixed.py --seed=1
#
# The forward pass in bf16; backward in MXFP4 to nearest, with a scale that may clip, rotated by a plain
# Hadamard matrix of 64. That paper says that the rotation is what helps, against 2502.20586.

recipe = "tseng_fixed"

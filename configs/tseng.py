# configs/tseng.py     Training LLMs with MXFP4 (arXiv 2502.20586)
#
#   python train.py configs/tseng.py --seed=1
#
# The forward pass in bf16; both products of the backward pass rotated by 64 with fresh signs, and in MXFP4,
# stochastic, with a scale that clips nothing.

recipe = "tseng"

# configs/averis.py     Averis (arXiv 2603.10444, version 2)
#
#   python train.py configs/averis.py --seed=1
#
# NVFP4, with the mean over the tokens of X and of dY apart from the rest, gradients stochastic, no rotation.
# The mean is that of a micro-batch, so a token sees later ones: its loss is not that of a causal model.

recipe = "averis"

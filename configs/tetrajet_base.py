# configs/tetrajet_base.py     TetraJet-v2 (arXiv 2510.27527), the linear layer alone
#
#   python train.py configs/tetrajet_base.py --seed=1
#
# All six operands of every linear layer in NVFP4 with the double block: the forward rounds to nearest, both
# backward products are rotated (random Hadamard) and rounded stochastically. No outlier channels, no resets.

recipe = "tetrajet_base"

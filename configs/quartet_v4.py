# configs/quartet_v4.py     Quartet (arXiv 2505.14669), as its fourth version has it
#
#   python train.py configs/quartet_v4.py --seed=1
#
# As quartet, but the backward pass rounds to nearest: there the paper says that the advantage of stochastic
# rounding came from a fault in its code.

recipe = "quartet_v4"

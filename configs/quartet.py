# configs/quartet.py     Quartet (arXiv 2505.14669), as its first version has it
#
#   python train.py configs/quartet.py --seed=1
#
# MXFP4; the forward pass rotated and rounded by QuEST, with trust masks; the backward pass stochastic.

recipe = "quartet"

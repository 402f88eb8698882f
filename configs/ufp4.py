# configs/ufp4.py     UFP4 (arXiv 2606.20381)
#
#   python train.py configs/ufp4.py --seed=1
#
# Four bits evenly spaced; all three products rotated, gradients stochastic.

recipe = "ufp4"

# configs/ue5m3.py     UE5M3 scales (arXiv 2609.02846)
#
#   python train.py configs/ue5m3.py --seed=1
#
# E2M1 with scales of a wider range, weights in 16x16 squares, gradients stochastic, no rotation.

recipe = "ue5m3"

# configs/if4.py     IF4 (arXiv 2603.28765)
#
#   python train.py configs/if4.py --seed=1
#
# NVFP4 whose blocks take the better of E2M1 and evenly spaced numbers; gradients stochastic, dW rotated. Its
# authors keep the last 4 of 24 blocks in bf16, --keep_last=0.167.

recipe = "if4"

# configs/nvfp4.py     NVFP4, all six operands to nearest
#
#   python train.py configs/nvfp4.py --seed=1
#
# The 4-bit baseline with nothing added: no rotation, no stochastic rounding.

recipe = "nvfp4"

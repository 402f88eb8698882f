# configs/mxfp4.py     MXFP4 as the OCP specification has it, all six operands to nearest
#
#   python train.py configs/mxfp4.py --seed=1
#
# The 4-bit baseline with nothing added: no rotation, no stochastic rounding. Its scale may clip.

recipe = "mxfp4"

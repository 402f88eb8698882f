# configs/quartet2.py     Quartet II (arXiv 2601.22813)
#
#   python train.py configs/quartet2.py --seed=1
#
# NVFP4, four-over-six forward; in backward all four operands are rotated by 128 and rounded by MS-EDEN.

recipe = "quartet2"

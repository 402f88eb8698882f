# configs/mxfp8.py     MXFP8: E4M3 in blocks of 32 that share a power of two, all six operands
#
#   python train.py configs/mxfp8.py --seed=1
#
# The 8-bit baseline of Blackwell's tensor cores. Everything is rounded to nearest and nothing clips.

recipe = "mxfp8"

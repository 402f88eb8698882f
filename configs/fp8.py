# configs/fp8.py     FP8 with one scale per tensor: E4M3 forward, E5M2 for gradients
#
#   python train.py configs/fp8.py --seed=1
#
# The 8-bit baseline, TransformerEngine's current scaling: the scale is max|x| / the format's largest value.

recipe = "fp8"

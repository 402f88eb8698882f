# configs/nvfp4_sr.py     NVFP4, the four backward operands rounded stochastically
#
#   python train.py configs/nvfp4_sr.py --seed=1
#
# Their scales are rounded up, so that nothing clips and the rounding is unbiased.

recipe = "nvfp4_sr"

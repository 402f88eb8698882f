# configs/four_over_six.py     Four Over Six (arXiv 2512.02010)
#
#   python train.py configs/four_over_six.py --seed=1
#
# The recipe of nvidia, with each block's maximum at 6 or at 4, whichever is nearer.

recipe = "four_over_six"

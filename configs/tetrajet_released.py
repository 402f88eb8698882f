# configs/tetrajet_released.py     TetraJet-v2 by the rules of its released code, where these differ
#
#   python train.py configs/tetrajet_released.py --seed=1
#
# Two of the release's ways are not reproduced. It draws the noise of both operands of a product from one
# seed, which makes their rounding errors dependent: a fault. And it rounds the number of MXFP8 channels up to
# a multiple of 128, which turns a tenth of a narrow layer's channels into a quarter.

recipe = "tetrajet_released"    # scales rounded to nearest also where values are rounded stochastically
outlier_frac = 0.1
osci = "topk"                   # tracks only the weights that are closest to a rounding threshold
osci_track = 0.10               # the release's configs; the paper's text says 0.05
osci_tau = 8.0

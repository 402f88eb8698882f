# configs/tetrajet_full.py     TetraJet-v2 (arXiv 2510.27527), the whole method
#
#   python train.py configs/tetrajet_full.py --seed=1
#
# The linear layer of tetrajet_base with OutControl and OsciReset. When these two act depends on the length of
# a run, so osci_start, osci_period, osci_window and outlier_start, outlier_window belong to the size files.

recipe = "tetrajet_full"
outlier_frac = 0.1       # share of input channels in MXFP8; exactly round(0.1 * K) of them
osci = "full"            # tracks every weight: 9 bytes for each while a window is open
osci_tau = 8.0           # the released configs' value; the released code's own default is 16

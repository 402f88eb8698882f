# configs/tetrajet_v1.py     TetraJet v1 (arXiv 2502.20853), the linear layer
#
#   python train.py configs/tetrajet_v1.py --seed=1
#
# MXFP4 with scales that clip nothing, six quantizers, stochastic in backward. Made for vision transformers;
# its Q-EMA is --osci=qema.

recipe = "tetrajet_v1"

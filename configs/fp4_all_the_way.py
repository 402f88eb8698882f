# configs/fp4_all_the_way.py     FP4 All the Way (arXiv 2505.19115)
#
#   python train.py configs/fp4_all_the_way.py --seed=1
#
# NVFP4 with split rounding: stochastic for gradients and for the activations of the weight update.
# Its last phase, a run of its own here, rounds the forward pass alone: --quantizers=1,2 from these weights.

recipe = "fp4_all_the_way"

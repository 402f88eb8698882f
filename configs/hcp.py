# configs/hcp.py     hot channels of CHON (arXiv 2602.02047)
#
#   python train.py configs/hcp.py --seed=1
#
# NVIDIA's recipe, and a product in bf16 for what rounding took from the hot channels, those from which it
# takes most. CHON also keeps projections after QK in bf16; --keep=attn.out is near to that. The share of
# channels that are hot is ours.

recipe = "hcp"
outlier_frac = 0.1       # share of input channels that are patched; exactly round(0.1 * K) of them
outlier_choice = "error"

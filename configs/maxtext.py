# configs/maxtext.py     NVFP4 as MaxText has it, quantization=te_nvfp4
#
#   python train.py configs/maxtext.py --seed=1
#
# NVIDIA's recipe by TransformerEngine, in the MLPs alone.

recipe = "nvidia"
keep = "attn.qkv,attn.out"

# configs/nemotron3.py     NVFP4 as Nemotron 3 Super is trained (arXiv 2604.12374)
#
#   python train.py configs/nemotron3.py --seed=1
#
# NVIDIA's recipe, with the last 15% of the blocks and the projections of attention in bf16. Embeddings, which
# that model keeps in bf16, are rounded in no recipe here.

recipe = "nvidia"
keep = "attn.qkv,attn.out"
keep_last = 0.15            # rounded to whole blocks: none of two, 1 of 8, 2 of 12 or 16

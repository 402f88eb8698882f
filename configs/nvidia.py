# configs/nvidia.py     NVIDIA's NVFP4 recipe (arXiv 2509.25149)
#
#   python train.py configs/nvidia.py --seed=1
#
# Weights in 16x16 squares, gradients stochastic, a rotation on dW alone. NVIDIA keeps some blocks in bf16 and
# ends with a bf16 forward pass, --keep_last=0.15 --bf16_forward=0.82; here every block stays in 4 bits.

recipe = "nvidia"

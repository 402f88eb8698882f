""" Settings of the whole test session. """
import os

import torch

# the tensors here are small: a second thread costs more than it gives, above all on a busy machine
os.environ["OMP_NUM_THREADS"] = "1"     # for the programs that tests start
torch.set_num_threads(1)

# what cuBLAS asks of whoever wants the same bits twice; read when the GPU is first used
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

""" Settings of the whole test session. """
import os

import torch

# the tensors here are small: a second thread costs more than it gives, above all on a busy machine
os.environ["OMP_NUM_THREADS"] = "1"     # for the programs that tests start
torch.set_num_threads(1)

# left over in a shell from a job of several processes: tests train alone, or set these themselves
for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "TORCHELASTIC_RUN_ID"):
    os.environ.pop(name, None)

# what cuBLAS asks of whoever wants the same bits twice; read when the GPU is first used
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

# Without a GPU, Triton kernels run in its interpreter, which is chosen when Triton is first imported: here.
# What compiles kernels all the same does so in a process of its own (crosscompile.py)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

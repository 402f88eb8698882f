"""
More than one GPU: what the processes of one run do together.

    torchrun --nproc_per_node=4 train.py configs/tetrajet_full.py                    four GPUs of a machine
    torchrun --nproc_per_node=4 train.py configs/tetrajet_full.py --parallel=fsdp    each with part of a model

torchrun starts train.py once for each GPU, and each of these processes is a rank. PyTorch's own DDP or FSDP2
sums their gradients. Without torchrun there is one rank, ALONE, and nothing here does anything.

    what             ddp                            fsdp
    weights, Adam    all of it on each rank         each weight's rows are dealt out, the first to rank 0
    forward          as on one GPU                  a block's weights are put together, and then rounded
    gradients        summed over all ranks          summed, and each rank keeps those of its rows
    OsciReset        each rank does the same        each rank puts the weight together and does the same
    OutControl       norms are summed over ranks, so that all of them choose the same channels (outliers.py)
    gradient noise   each rank has its own: its number is part of the address of each draw (noise.py)

The batch is a setting, in tokens, and each rank takes its share of the sequences of each micro-step, so any
number of ranks sees the same batches. Rank 0 alone prints and writes files, in the format of a single
process: a checkpoint is whole, and any number of ranks, by either way, can go on from it.

A rank that fails tells why and ends at once. torchrun then ends the others. One that waits for it in vain, on
another machine, gives up when the connection breaks.

What this file leaves out: tensor and pipeline parallelism, and weights that do not fit on one GPU before they
are dealt out.
"""
import math
import os
import sys
import time
import traceback
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config import Config, ConfigError, need
from osci import dealt, whole

# Rank 0 saves and starts up while the others wait for it: long enough for a slow disk and a compiler
TIMEOUT = timedelta(minutes=10)
# torchrun ends all ranks as soon as it sees one that has failed. Where another rank tells what went wrong, a
# rank waits so many seconds to be ended, before it says what it knows itself
GRACE = 10
# Errors that all ranks meet at the same moment, so that one of them is enough to tell
SHARED = (ConfigError, FloatingPointError, KeyboardInterrupt)


def start(cfg: Config, device: torch.device) -> "Ranks":
    """ Meet the other ranks. ConfigError, on all of them, if the run cannot be shared. """
    no_other_launcher()
    if not launched() or world_size() == 1:
        return ALONE
    check_shares(cfg, world_size())
    need(device.type in ("cpu", "cuda"),
         f"device = {device.type!r} trains alone: type --device=cpu, or leave torchrun out")
    # PyTorch 2.6 has no FSDP on a CPU, and in 2.7 and 2.8 Gloo adds up gradients that it is to average
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    need(device.type == "cuda" or cfg.parallel == "ddp" or version >= (2, 10),
         f"parallel = 'fsdp' on a CPU needs PyTorch 2.10, this is {torch.__version__}: type --parallel=ddp")
    if device.type == "cuda":
        # Gloo carries what the ranks agree on between two steps, without a wait for the GPU
        own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=TIMEOUT, device_id=own)
    else:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    return Ranks(int(os.environ["RANK"]), world_size(), cfg.parallel, device)


def take_gpu():
    """ Each process of a machine computes on a GPU of its own: to be called before any GPU is used. """
    if launched():
        here, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        need(here <= gpus, f"torchrun started {here} processes here, where PyTorch sees {gpus} GPUs: "
                           f"type --nproc_per_node={gpus}")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def launched() -> bool:
    """ Whether torchrun started this process, and not a shell in which one of its variables is left over. """
    names = "TORCHELASTIC_RUN_ID MASTER_ADDR RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"
    return all(name in os.environ for name in names.split())


def world_size() -> int:
    """ How many ranks there are. """
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def no_other_launcher():
    """ ConfigError if mpirun, say, and not torchrun has started several processes: each would train all. """
    # of Slurm's variables the one that srun sets: a script of sbatch is one process, whatever its job has
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        size = os.environ.get(name) or "1"
        need(size == "1" or launched(),
             f"{name} is {size}, but torchrun did not start this program: type torchrun "
             f"--nproc_per_node=GPUS train.py ..., or `unset {name}` to train alone")


def check_shares(cfg: Config, world: int):
    """ Whether each of `world` ranks can take the same share of a batch. """
    sequences = cfg.batch_tokens // cfg.seq_len
    more = -(-sequences // world) * world * cfg.seq_len
    need(sequences % world == 0,
         f"batch_tokens = {cfg.batch_tokens} is {sequences} sequences, which {world} ranks cannot share "
         f"evenly: type --batch_tokens={more}")
    share = sequences // world
    need(share % (cfg.micro_batch or share) == 0,
         f"micro_batch = {cfg.micro_batch} does not divide a rank's share of {share} sequences: "
         f"type --micro_batch={math.gcd(cfg.micro_batch, share)}")


@dataclass(frozen=True)
class Ranks:
    """ This process among those of its run. """
    rank: int = 0
    world: int = 1                      # how many there are
    mode: str = ""                      # ddp | fsdp; "" alone
    device: torch.device = torch.device("cpu")

    @property
    def first(self) -> bool:
        """ Whether this is the rank that prints and writes. """
        return self.rank == 0

    # -------------------------------------------------------------------------
    # sharing a model

    def share(self, model: nn.Module) -> Callable:
        """
        Give the model to all ranks -> what to call in place of the model in training. Make the optimizer
        after that: under FSDP the parameters are others. Evaluation and checkpoints use the model itself, so
        that no name of a weight changes.
        """
        if self.mode == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard
            mesh = init_device_mesh(self.device.type, (self.world,))
            # the rest too gives its memory back, so that outside a forward pass every weight is in parts
            for part in (*model.blocks, model):
                fully_shard(part, mesh=mesh, reshard_after_forward=True)
        if self.mode == "ddp":
            with warnings.catch_warnings():
                # of the argument's new name, which older versions do not know
                warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
                # no buffer differs between ranks: what they hold is chosen alike
                return nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
        return model

    def micro_step(self, forward: Callable, last: bool):
        """ Around forward and backward of a micro-step: the last one sums the gradients over ranks. """
        if self.mode == "fsdp":
            forward.set_requires_gradient_sync(last)
        return forward.no_sync() if self.mode == "ddp" and not last else nullcontext()

    # -------------------------------------------------------------------------
    # agreeing

    def total(self, *values: Tensor) -> tuple[Tensor, ...]:
        """ The sum of each tensor over all ranks; all of one shape and kind, on the same device. """
        if self.world == 1:
            return values
        stacked = torch.stack(values)
        dist.all_reduce(stacked)
        return stacked.unbind()

    def any(self, mine: bool) -> bool:
        """ Whether it is so on some rank. """
        return bool(self.total(torch.tensor(int(mine)))[0])

    # -------------------------------------------------------------------------
    # checkpoints

    def whole(self, state):
        """
        The state of a model or of an optimizer as rank 0 writes it, with all rows of each weight. All ranks
        have to call this; what the others get is of no use.
        """
        def gather(t: Tensor) -> Tensor | None:
            t = whole(t)
            return t.cpu() if self.first else None
        return each_tensor(state, gather) if self.mode == "fsdp" else state

    def from_first(self, state):
        """ What rank 0 has, on all ranks: its disk may be the only one with the checkpoint. """
        if self.world == 1:
            return state
        outline = [each_tensor(state, lambda t: t.to("meta")) if self.first else None]
        dist.broadcast_object_list(outline)

        def send(t: Tensor) -> Tensor:
            t = t.to(self.device).contiguous() if self.first else torch.empty_like(t, device=self.device)
            dist.broadcast(t.view(-1).view(torch.uint8), 0)     # as bytes: Gloo does not know every type
            return t.cpu()
        return each_tensor(state if self.first else outline[0], send)


ALONE = Ranks()


def load_model(model: nn.Module, state: dict):
    """ Its own load_state_dict, for a whole state. """
    weights = model.state_dict()
    model.load_state_dict({name: like(t, weights[name]) for name, t in state.items()})


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict):
    """ Its own load_state_dict, for a whole state. """
    weights = [w for group in optimizer.param_groups for w in group["params"]]
    optimizer.load_state_dict(state | {"state": {
        i: {key: like(t, weights[i]) for key, t in values.items()} for i, values in state["state"].items()}})


def like(t, weight: Tensor):
    """ t; but of a tensor of the weight's shape, such as Adam's moments, the rows that this rank has. """
    if not isinstance(t, Tensor) or t.shape != weight.shape:
        return t
    return dealt(t.to(weight.device), weight)


def each_tensor(tree, f: Callable):
    """ The same dicts, lists and tuples, with f(t) in the place of each tensor t. """
    if isinstance(tree, Tensor):
        return f(tree)
    if isinstance(tree, dict):
        return type(tree)((key, each_tensor(value, f)) for key, value in tree.items())
    if isinstance(tree, (list, tuple)):
        return type(tree)(each_tensor(value, f) for value in tree)
    return tree


# -----------------------------------------------------------------------------
# the end of a rank


def finish():
    """ Part from the others, at the end of a good run. """
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        # A thread of Gloo's that has just summed a tensor needs the interpreter to let go of it, and to
        # end the group is to wait for that thread with the interpreter held: one run in twenty hung here
        time.sleep(0.2)
        dist.destroy_process_group()


def fail(error: BaseException, line: str, code: int) -> int:
    """
    Say why the run ends -> the exit code. A rank ends in here, and at once: an orderly end would wait for
    what the ranks are doing together, and the others would wait for this one.

    error   what ended the run
    line    what to say of it; "" for an error that nobody foresaw, which a traceback tells

    An error that all ranks have is told by the first one of each machine, another by the rank that met it.
    """
    if not launched():
        print(f"error: {line}", file=sys.stderr)
        return code
    shared = isinstance(error, SHARED) or not dist.is_initialized()
    if lost(error):
        line = f"another rank has gone, see what it says, or cannot be reached ({str(error)[:300]!r})"
    if lost(error) or shared and os.environ["LOCAL_RANK"] != "0":
        time.sleep(GRACE)
    who = "" if shared else f"rank {os.environ['RANK']}: "
    print(f"{who}error: {line}" if line else traceback.format_exc(), file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)


def lost(error: BaseException) -> bool:
    """ Whether this is what a rank sees when another has gone. """
    words = ("gloo", "Gloo", "NCCL", "Connection closed by peer")
    return isinstance(error, dist.DistError) or \
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)

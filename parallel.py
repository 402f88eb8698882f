"""
More than one GPU: what the processes of one run do together.

    torchrun --nproc_per_node=4 train.py configs/tetrajet_full.py                    four GPUs of a machine
    torchrun --nproc_per_node=4 train.py configs/tetrajet_full.py --parallel=fsdp    each with part of a model

torchrun starts train.py once for each GPU, a rank, and PyTorch's own DDP or FSDP2 sums their gradients.
Without torchrun there is one rank, ALONE, and nothing here does anything.

    what             ddp                            fsdp
    weights, Adam    all of it on each rank         each weight's rows are dealt out, the first to rank 0
    forward          as on one GPU                  a block's weights are put together, then rounded
    gradients        summed over all ranks          ... and each rank keeps those of its rows
    OsciReset        each rank does the same        each rank looks after its rows
    OutControl       norms are summed over ranks, so that all choose alike (outliers.py)
    gradient noise   a stream of its own for each rank: part of the address of each draw (quant.py)

The batch is a setting, in tokens, and each rank takes its share of the sequences of each micro-step, so any
number of ranks sees the same batches. Rank 0 alone prints and writes files, in the format of a single
process: a checkpoint is whole, and any number of ranks, by either way, can go on from it.

A rank that fails tells why and ends at once. torchrun then ends the others; one that waits for it in vain, on
another machine, gives up by itself when the connection breaks, or after TIMEOUT.

What this file leaves out: tensor and pipeline parallelism, and weights that do not fit on one GPU before they
are dealt out.
"""
import os
import sys
import time
import warnings
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from typing import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config import Config, ConfigError, check_share, no_other_launcher
from data import DataError

# Rank 0 saves and starts up while the others wait for it: long enough for a slow disk and a compiler
TIMEOUT = timedelta(minutes=10)
# torchrun ends all ranks as soon as it sees one that has failed, and the one that tells why may be slower.
# Seconds that the others give it
GRACE = 10


def launched() -> bool:
    """ Whether torchrun started this process, and not a shell in which one of its variables is left over. """
    numbers = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    return elastic() and os.environ.get("MASTER_ADDR", "") != "" and all(map(str.isdecimal, numbers))


def elastic() -> bool:
    return dist.is_available() and dist.is_torchelastic_launched()


def speaks() -> bool:
    """ Whether this process tells of what every process of its machine finds, such as a misspelt knob. """
    return not launched() or os.environ["LOCAL_RANK"] == "0"


@contextmanager
def one_voice():
    """ Within this block one process of each machine prints. """
    if speaks():
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        try:
            yield
        except SystemExit as end:
            time.sleep(GRACE if end.code else 0)
            raise


def start(cfg: Config, device: torch.device) -> "Ranks":
    """ Meet the other ranks. ConfigError, on all of this machine, if the run cannot be shared among them. """
    if elastic() and not launched():
        raise ConfigError("TORCHELASTIC_RUN_ID is set, and other variables of torchrun's are not: start with "
                          "torchrun, or type `unset TORCHELASTIC_RUN_ID`")
    no_other_launcher()
    if not launched() or os.environ["WORLD_SIZE"] == "1":
        return ALONE
    rank, world, here = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    check_share(cfg, world)
    if device.type == "cuda":
        if here > torch.cuda.device_count():
            raise ConfigError(f"torchrun started {here} programs here, where PyTorch sees fewer GPUs: "
                              f"type --nproc_per_node={torch.cuda.device_count()}")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    elif device.type != "cpu":
        raise ConfigError(f"device = {device.type!r} trains alone: type --device=cpu, or leave torchrun out")
    kind = {"backend": "nccl", "device_id": device} if device.type == "cuda" else {"backend": "gloo"}
    dist.init_process_group(timeout=TIMEOUT, **kind)
    return Ranks(rank, world, cfg.parallel, device)


@dataclass(frozen=True)
class Ranks:
    """ This process among those of its run. """
    rank: int = 0
    world: int = 1                      # how many there are
    mode: str = ""                      # ddp | fsdp; "" alone
    device: torch.device = torch.device("cpu")

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def sharded(self) -> bool:
        """ Whether each rank holds some of the rows of each weight. """
        return self.mode == "fsdp"

    def finish(self):
        """ Part from the others, at the end of a good run. """
        if self.world > 1:
            dist.barrier()
            # A thread of gloo's that has just summed a tensor needs the interpreter to let go of it, and to
            # end the group is to wait for that thread with the interpreter held: one run in twenty hung here
            time.sleep(0.2)
            dist.destroy_process_group()

    # -------------------------------------------------------------------------
    # agreeing

    @contextmanager
    def together(self):
        """
        A mistake of the user's that any rank finds in this block ends all of them, as one ConfigError. In the
        block no rank may wait for another.
        """
        if self.world == 1:
            yield
            return
        mine, told = "", [None] * self.world
        try:
            yield
        except (ConfigError, DataError) as error:
            mine = str(error)
        dist.all_gather_object(told, mine)
        for rank, text in enumerate(told):
            if text:
                raise ConfigError(text if rank == 0 else f"rank {rank}: {text}")

    def total(self, *values: Tensor) -> tuple[Tensor, ...]:
        """ The sum of each tensor over all ranks; all of one shape and kind, on the device. """
        if self.world == 1:
            return values
        stacked = torch.stack(values)
        dist.all_reduce(stacked)
        return stacked.unbind()

    def any(self, mine: bool) -> bool:
        """ Whether it is so on some rank. """
        return bool(self.total(torch.tensor(int(mine), device=self.device))[0])

    # -------------------------------------------------------------------------
    # sharing a model

    def share(self, model: nn.Module, compiled: bool) -> Callable:
        """
        Give the model to all ranks -> what to call in place of the model in training. Make the optimizer
        after that: under FSDP the parameters are others. Compiling touches neither evaluation nor any name.

        What is compiled are the blocks, one program for all: a model as one program takes several times as
        long to compile, on one GPU is no faster (LOG.md), and on several has all gradients at once, at the
        end, where those of a block can travel while the one before it is computed.
        """
        if compiled:
            compile_parts(model)
        if self.sharded:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard
            mesh = init_device_mesh(self.device.type, (self.world,))
            for block in model.blocks:
                fully_shard(block, mesh=mesh, reshard_after_forward=True)
            # the rest too gives its memory back, so that outside a forward pass every weight is in parts
            fully_shard(model, mesh=mesh, reshard_after_forward=True)
            return model
        if self.mode == "ddp":
            # no buffer differs between ranks: channels are chosen alike, and the rest never changes
            with warnings.catch_warnings():
                # of the argument's new name, which older versions do not know
                warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
                return nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
        return model

    def micro_step(self, forward: Callable, last: bool):
        """ Around forward and backward of a micro-step: the last one sums the gradients over ranks. """
        if self.sharded:
            forward.set_requires_gradient_sync(last)
        return forward.no_sync() if self.mode == "ddp" and not last else nullcontext()

    # -------------------------------------------------------------------------
    # checkpoints: a whole state on rank 0

    def whole(self, state: dict) -> dict:
        """
        A state, as rank 0 writes it: rows from all ranks under each other, on the CPU. On other ranks it is
        of no use, but all have to call this.

        in      state["osci"] has the tensors of OsciReset and the remedies, each with a layer's name above it
        """
        if not self.sharded:
            return state
        state = each_tensor(
            state, lambda t: self._gather(t.to_local(), t.shape[0]) if hasattr(t, "to_local") else t)
        osci = state["osci"]
        for kind in ("windows", "kept") if osci else ():
            for name, tensors in osci.get(kind, {}).items():
                rows = osci["shapes"][name][0]
                for key, t in tensors.items():
                    if t is not None and t.dim() == 2:
                        tensors[key] = self._gather(t, rows)
                    elif key == "counts":
                        tensors[key] = self.total(t)[0]
        return state

    def _gather(self, mine: Tensor, rows: int) -> Tensor:
        """ The rows of all ranks, on rank 0. As bytes, since gloo does not know every type. """
        each = -(-rows // self.world)
        padded = mine.new_zeros(each, *mine.shape[1:])
        padded[: len(mine)] = mine
        parts = [torch.empty_like(padded) for _ in range(self.world)] if self.first else None
        dist.gather(as_bytes(padded), parts and [as_bytes(part) for part in parts])
        return torch.cat(parts)[:rows].cpu() if parts else mine

    def from_first(self, state: dict | None) -> dict | None:
        """ What rank 0 has, on all ranks: its disk may be the only one with the checkpoint. """
        if self.world == 1:
            return state
        outline = [each_tensor(state, lambda t: t.to("meta")) if self.first else None]
        dist.broadcast_object_list(outline, device=self.device)

        def fetch(t: Tensor) -> Tensor:
            t = t.to(self.device).contiguous() if self.first else torch.empty_like(t, device=self.device)
            dist.broadcast(as_bytes(t), 0)
            return t.cpu()
        return each_tensor(state if self.first else outline[0], fetch)

    def own(self, whole: Tensor) -> Tensor:
        """ Of the rows of all ranks, ours. """
        each = -(-len(whole) // self.world)
        return whole[self.rank * each : (self.rank + 1) * each]

    def parts(self, state: dict, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
        """ The inverse of whole(), of a state that every rank has. ValueError if a shape does not fit. """
        if not self.sharded:
            return state
        here, params = model.state_dict(), [p for group in optimizer.param_groups for p in group["params"]]
        state = state | {
            "model": {name: self._like(t, here.get(name)) for name, t in state["model"].items()},
            "optimizer": state["optimizer"] | {"state": {
                i: {key: self._like(t, params[i]) if key != "step" else t for key, t in moments.items()}
                for i, moments in state["optimizer"]["state"].items()}},
        }
        if osci := state["osci"]:
            state["osci"] = osci | {kind: {name: {key: self._own_part(key, t) for key, t in tensors.items()}
                                           for name, tensors in osci[kind].items()}
                                    for kind in ("windows", "kept") if kind in osci}
        return state

    def _own_part(self, key: str, t: Tensor | None) -> Tensor | None:
        """ Our part of a tensor of OsciReset or a remedy. What is a sum over rows, rank 0 goes on with. """
        if t is None or t.dim() == 2:
            return t if t is None else self.own(t)
        return torch.zeros_like(t) if key == "counts" and not self.first else t

    def _like(self, whole: Tensor, here: Tensor | None) -> Tensor:
        """ Our rows of it, as a part of the same whole as `here`, which is a parameter under FSDP. """
        if not hasattr(here, "to_local"):
            return whole
        if whole.shape != here.shape:
            raise ValueError(f"a tensor of shape {list(whole.shape)} where the model has {list(here.shape)}")
        return type(here.data).from_local(self.own(whole).to(here.device), here.device_mesh, here.placements,
                                          run_check=False, shape=here.shape, stride=here.stride())


ALONE = Ranks()


def compile_parts(model: nn.Module, **options):
    """
    Compile the forward of all blocks as one, since they differ in the numbers of their layers alone, and the
    loss, whose logits would else pass through memory a dozen times. To torch a number on a module is a
    constant unless told otherwise, and after eight blocks it gives up compiling more.
    """
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    # the phases of a run (channels measured, chosen, a bf16 forward ...) make 7 programs of a block; after 8
    # the rest would run as it is, with a warning
    torch._dynamo.config.recompile_limit = 16
    for block in model.blocks:
        block.forward = in_training(block, "forward", **options)
    model.losses = in_training(model, "losses", **options)


def in_training(module: nn.Module, name: str, **options) -> Callable:
    """ A module's method, compiled in training only: a text would compile it for each of its lengths. """
    # its class's, so that a model which is compiled again does not call what it was compiled to before
    method = getattr(type(module), name).__get__(module)
    compiled = torch.compile(method, **options)
    return lambda *inputs: (compiled if module.training else method)(*inputs)


def as_bytes(t: Tensor) -> Tensor:
    """ The memory of a contiguous tensor, (n,) uint8. """
    return t.view(-1).view(torch.uint8)


def each_tensor(tree, f: Callable):
    """ The same dicts, lists and tuples, with f(t) in the place of each tensor t. """
    if isinstance(tree, Tensor):
        return f(tree)
    if isinstance(tree, dict):
        return type(tree)((key, each_tensor(value, f)) for key, value in tree.items())
    if isinstance(tree, (list, tuple)):
        return type(tree)(each_tensor(value, f) for value in tree)
    return tree


def lost(error: RuntimeError) -> bool:
    """ Whether this is what a rank sees when another has gone. """
    known = isinstance(error, dist.DistError) if dist.is_available() else False
    return known or any(word in str(error) for word in ("gloo", "Gloo", "NCCL", "Connection closed by peer"))


def leave(code: int, told: bool):
    """
    End a rank that has failed; told: it was the one to say why. At once, since an orderly end would wait for
    the collectives that are under way, and those for us.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0 if told else GRACE)
    os._exit(code)

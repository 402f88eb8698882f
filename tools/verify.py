"""
Does a recipe do what it claims? One of ours or one of your own, in a minute or two on a CPU.

    python -m tools.verify tetrajet_base

Four questions. What does each operand lose, and is its mean right? Is the mean of the gradient the exact one?
Is a run the same, bit for bit, however it is computed? Who computes the recipe on a GPU, and with the same
bits? Only other bits are a fault, with exit code 1: whether a recipe may be biased is for its authors to say.
"""
import argparse
import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import NormalDist
from typing import Iterator, NamedTuple

os.environ.setdefault("TRITON_INTERPRET", "1")      # kernels on a CPU; read once, when Triton is imported

from config import ConfigError, did_you_mean, need      # before PyTorch, see there

import torch
from torch import Tensor

import bench
import train
from build import enter_kernels
from checkpoint import checkpoints, read
from noise import SIGN_STREAMS, Counter
from quant import AROUND, BACKENDS, SIGNS, QuantLinear, Recipe, Rounder
from recipes import RECIPES
from rivals.rules import turn_back

DRAWS = 500
# without clipping, for which DDP and FSDP sum the squares of the gradient in another order
TINY = """--n_layer=1 --d_model=64 --n_head=2 --d_ff=64 --seq_len=32 --batch_tokens=256 --steps=12 --clip=0
          --eval_tokens=64 --eval_every=0 --save_every=0 --sample_tokens=0 --device=cpu""".split()
OUTLIERS = "--outlier_frac=0.1 --outlier_start=0.2 --outlier_window=0.2".split()


class Mean(NamedTuple):
    """ The mean of many draws, held against what it should be. """
    off: float          # norm of the difference, as a share of the right one's
    chance: float       # the same by chance, from how the draws scatter; 0 if they are all alike
    length: float       # how much longer the mean is than the right one, along it; clipping makes it negative
    deviations: float   # that, in deviations of its own mean
    worst: float        # the entry that is furthest off, in deviations of its own mean
    bound: float        # which `worst` exceeds by chance in one of 10,000 such measurements

    @property
    def biased(self) -> bool:
        return self.chance > 0 and (self.worst > self.bound or abs(self.deviations) > 4)

    def __str__(self) -> str:
        if not self.chance:
            return f"off by {self.off:.4f}, length {self.length:+.4f}: not random"
        return (f"mean off by {self.off:.4f}, by chance {self.chance:.4f}; length {self.length:+.4f}, "
                f"{abs(self.deviations):.1f} of 4 deviations; worst entry {self.worst:.1f} of "
                f"{self.bound:.1f}: {'BIASED' if self.biased else 'no bias seen'}")


def mean_of(draws: list[Tensor], right: Tensor) -> Mean:
    stacked, size = torch.stack(draws).double(), right.double().norm()
    off, chance = stacked.mean(0) - right, stacked.std(0) / len(draws) ** 0.5
    worst = (off / chance)[chance > 1e-6 * right.abs().max()].abs()
    lengths = (stacked * right).flatten(1).sum(1) / size**2 - 1
    spread = lengths.std() / len(draws) ** 0.5
    return Mean(float(off.norm() / size), float(chance.norm() / size), float(lengths.mean()),
                float(lengths.mean() / spread) if spread > 1e-9 else 0.0, max(worst.tolist(), default=0.0),
                NormalDist().inv_cdf(1 - 5e-5 / right.numel()))


def linear(r: Recipe) -> tuple[QuantLinear, Tensor, Tensor]:
    """ A layer with W (N, K), X (T, K), three channels of which are 20 times as large, and dY (T, N). """
    g, (T, K, N) = torch.Generator().manual_seed(0), (64, 160, 96)
    x, w, dy = (torch.randn(shape, generator=g) for shape in ((T, K), (N, K), (T, N)))
    x[:, [5, 40, 111]] *= 20
    layer = QuantLinear(K, N, bias=False, recipe=r, counter=Counter(1))
    layer.weight.data.copy_(w)
    return layer, x.requires_grad_(), dy


def operands(r: Recipe) -> Iterator[tuple[str, float, Mean]]:
    """ For each operand that r rounds: its name, its relative squared error, its mean. """
    layer, x, dy = linear(r)
    x, w = x.detach(), layer.weight.detach()
    at = Rounder(r, layer.counter.state, 0, torch.float32)
    w_t, x_t = (at.q(2, w), at.q(1, x)) if r.align else (w, x)      # what Q4 and Q6 round
    for i, (op, m) in enumerate(zip(r.operands, (x, w, dy, w_t.T, dy.T, x_t.T))):
        draws, size = [], r.rotate[i // 2]
        for step in range(DRAWS if op else 0):
            layer.counter.set(step)
            q = at.q(i + 1, m.contiguous())
            if size:        # turned back, to be held against m itself
                signs = SIGNS[r.signs[i // 2]](size, layer.counter.state, 0, SIGN_STREAMS[i // 2])
                q = turn_back(q, torch.empty(0), signs, m.shape[1])
            draws.append(q)
        if op:
            error = (torch.stack(draws) - m).square().mean() / m.square().mean()
            yield f"Q{i + 1}", float(error), mean_of(draws, m)


def gradient(r: Recipe) -> Iterator[tuple[str, Mean]]:
    """ -> the means of dX and dW, against those of exact products; without outlier channels. """
    layer, x, dy = linear(r)
    w = layer.weight

    def exact(x: Tensor, w: Tensor) -> Tensor:
        """ X W^T, or if aligned Q1(X) Q2(W)^T, with the derivative of rounding taken as 1. """
        at = Rounder(r, layer.counter.state, 0, torch.float32)
        x, w = (t + (at.q(i, t.detach()) - t).detach() if r.align and r.operands[i - 1] else t
                for i, t in ((1, x), (2, w)))
        return x @ w.T
    for name in reversed(r.around):
        exact = partial(AROUND[name].f, linear=exact, layer=layer)
    draws = []
    for step in range(DRAWS):
        layer.counter.set(step)
        draws.append(torch.autograd.grad(layer(x), (x, w), dy))
    for name, got, right in zip(("dX", "dW"), zip(*draws), torch.autograd.grad(exact(x, w), (x, w), dy)):
        yield name, mean_of(got, right)


def compiled(r: Recipe) -> bool | str:
    """ Whether a layer has the same bits with torch.compile as without; or why that is not tried. """
    if torch.__version__ < "2.7":
        return "PyTorch 2.6 compiles no layer"
    found = []
    for wrap in (lambda layer: layer, partial(torch.compile, backend="aot_eager")):
        layer, x, dy = linear(r)
        y = wrap(layer)(x)
        found.append((y.detach(), *torch.autograd.grad(y, (x, layer.weight), dy)))
    return all(map(torch.equal, *found))


def runs(name: str, folder: Path) -> Iterator[tuple[str, bool]]:
    """ -> ways to compute a run of 12 steps, and whether the weights at its end have the same bits. """
    once = weights(name, folder / "once")
    yield "a run, once more", once == weights(name, folder / "again")
    yield "a run with --recompute", once == weights(name, folder / "recomputed", "--recompute")
    weights(name, folder / "stopped", "--stop_at=6")
    yield "a run that is stopped and goes on", once == weights(name, folder / "stopped")


def ranks(name: str, folder: Path) -> Iterator[tuple[str, bool | str]]:
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"
    if torch.__version__ < "2.10":
        yield "two ranks", "FSDP on a CPU needs PyTorch 2.10"
        return
    yield "two ranks, by DDP and by FSDP", weights(name, folder / "ddp", by=torchrun) == \
        weights(name, folder / "fsdp", "--parallel=fsdp", by=torchrun)


def weights(name: str, run: Path, *more: str, by: tuple = ()) -> list[bytes]:
    """ Train, here or by a program of its own -> all weights at the end. """
    argv = [*TINY, f"--recipe={name}", f"--out={run.parent}", f"--name={run.name}", *more]
    argv += OUTLIERS if RECIPES[name].outlier else ()
    if by:
        command = [sys.executable, *by, train.__file__, *argv]
        status = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
    else:
        with redirect_stdout(None):
            status = train.main(argv)
    if status:      # it has said why, or a signal has ended it
        raise SystemExit(status)
    return [t.numpy().tobytes() for t in read(checkpoints(run)[0])["model"].values()]


def kernels(name: str) -> Iterator[tuple[str, bool | str]]:
    """
    For each back end of a GPU why it cannot, or "computes it"; for each pair of operands whether the kernel
    has the reference's bits.
    """
    r = RECIPES[name]
    if missing := enter_kernels(torch.device("cpu")):
        yield "kernels", missing
    for backend in [key for key in BACKENDS if key != "reference"]:
        yield backend, BACKENDS[backend].problem(r) or "computes it"
    if "emulate" in BACKENDS and not BACKENDS["emulate"].problem(r):
        for row, col in ((1, 6), (2, 4), (3, 5)):
            if r.operands[row - 1] or r.operands[col - 1]:
                try:
                    bench.check_rounding(name, row, col, torch.device("cpu"))
                    yield f"rounding of Q{row} and Q{col}", True
                except bench.CheckFailed:
                    yield f"rounding of Q{row} and Q{col}", False


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools.verify", description="Does a recipe do what it claims?")
    parser.add_argument("recipe", help="its name, such as tetrajet_base")
    name, faults = parser.parse_args(argv).recipe, 0
    try:
        need(name in RECIPES, f"recipe = {name!r} is unknown; {did_you_mean(name, RECIPES)}")
        need(any(RECIPES[name].operands), f"recipe = {name!r} rounds nothing: type such as tetrajet_base")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"Operands: squared error over square, and the mean of {DRAWS:,} draws")
    for what, error, mean in operands(RECIPES[name]):
        print(f"  {what}  {error:.2e}  {mean}")
    print(f"Gradients, against those of {'Q2(W) and Q1(X)' if RECIPES[name].align else 'W and X'}")
    for what, mean in gradient(RECIPES[name]):
        print(f"  {what}  {mean}")
    print("Bits")
    with tempfile.TemporaryDirectory() as folder:
        for what, found in chain([("a layer, compiled", compiled(RECIPES[name]))], runs(name, Path(folder)),
                                 ranks(name, Path(folder)), kernels(name)):
            faults += found is False
            print(f"  {what}: { {True: 'the same', False: 'OTHER BITS'}.get(found, found)}", flush=True)
    return int(faults > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

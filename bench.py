"""
How fast it is on the machine at hand. What is timed is checked first: wrong numbers have no speed.

    python bench.py kernels    rounding passes next to a copy of as many bytes, products next to bf16's
    python bench.py linear     forward and backward pass of one linear, by shape: bf16 and each back end
    python bench.py step       a whole training step of each recipe next to bf16's, and OsciReset's windows

Each prints tables in Markdown, row by row, so that what is cut off has the rows that were measured. Keep them
with `python bench.py step | tee step.md`; the first line tells the machine, the versions and the code.

A time is the median of n, with (least to most), of what lies between two marks in the GPU's stream of work,
after a warm-up. Where one operation is timed, a buffer larger than the L2 cache is read before each call, so
that its inputs come from memory as in training, and the host has time to launch all of it beforehand. In
`step` nothing comes between the steps, and the host keeps up or does not.

On a CPU the same programs run at small shapes, with the reference, and under TRITON_INTERPRET=1 with the
kernels too. That is for tests: the times there say nothing about FP4.

What this file leaves out: loading data, evaluation, more than one GPU. Letters used for shapes: T tokens, K
input and N output features.
"""
import argparse
import gc
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import SimpleNamespace

from config import Config, ConfigError, did_you_mean, need, parse       # before PyTorch, see there

import torch
import torch.nn.functional as F
from torch import Tensor

from build import autocast, build, enter_kernels, make_optimizers, pick_device
from checkpoint import code
from codes import Quantized, pack, quantize
from quant import BACKENDS, TENSOR, Counter, QuantLinear, Recipe, Rounder
from recipes import MXFP8, NEAREST, RECIPES
from train import one_step

HERE = Path(__file__).resolve().parent
WARMUP = 3          # calls or steps before the first that counts
FLUSHES = 20        # at most, before a call: see measure()


class CheckFailed(RuntimeError):
    """ Something computes wrong numbers, so it is not timed. """


def check(holds: bool, message: str):
    if not holds:
        raise CheckFailed(message)


# -----------------------------------------------------------------------------
# python bench.py kernels

# (T, K, N) of a linear in each of these models, qkv of attention and the way down of the MLP
KERNEL_SHAPES = {"70m qkv": (32768, 512, 1536), "70m down": (32768, 1024, 512),
                 "370m qkv": (32768, 1024, 3072), "370m down": (32768, 4096, 1024),
                 "d4096": (32768, 4096, 4096)}
# what one pass over memory reads, and the two operands that it makes of that, one along each axis
PASSES = (("X", 1, 6), ("W", 2, 4), ("dY", 3, 5))
COPY = 2**31        # bytes of the large copy, read plus written


def bench_kernels(args: argparse.Namespace, device: torch.device):
    clock = clock_of(device)
    bench_passes(args, device, clock)
    print()
    size, first = 8192 if device.type == "cuda" else 128, None
    table = Table("product".ljust(32), "shape".ljust(14), "TFLOP/s", "% of bf16", "ms".ljust(24), "n")
    for name, (call, a, b) in products(size, device):
        check_product(name, call(), a, b)
        t = measure(call, clock, args.n)
        first = first or t.median
        table.row(name, "x".join([str(size)] * 3), f"{2 * size**3 / t.median / 1e9:.1f}",
                  f"{100 * first / t.median:.1f}", t, t.n)


def bench_passes(args: argparse.Namespace, device: torch.device, clock):
    """ X, W and dY at each shape, rounded along both axes. """
    gpu = device.type == "cuda"
    copy = cache(partial(time_copy, device, clock, args.n))
    most = COPY if gpu else 2**20
    large = most / copy(most).median
    print(f"A copy reads and writes {large / 1e6:.0f} GB/s. % of copy: of this rate, counting the bytes that "
          "a pass must move; % of one as large: of the rate at which as many bytes are copied.\n")
    table = Table("rounding pass".ljust(40), "shape".ljust(11), "GB/s", "% of copy", "% of one as large",
                  "ms".ljust(24), "n")
    for name in args.recipes:
        for shape, (T, K, N) in (KERNEL_SHAPES if gpu else {"small": (128, 128, 128)}).items():
            for what, row, col in PASSES:
                x = random(N if what == "W" else T, N if what == "dY" else K, device, read_as(row, device))
                one_pass, by = rounding_pass(RECIPES[name], row, col)
                if one_pass is None:
                    continue
                check_rounding(name, row, col, device)
                outs = one_pass(x)
                moved = sum(t.numel() * t.element_size() for t in (x, *outs) if t is not None)
                t, alike = measure(lambda: one_pass(x, outs), clock, args.n), copy(moved)
                table.row(f"{shape}: {name}, {what}, {by}", f"{x.shape[0]}x{x.shape[1]}",
                          f"{moved / t.median / 1e6:.0f}", f"{100 * moved / t.median / large:.1f}",
                          f"{100 * alike.median / t.median:.1f}", t, t.n)


def rounding_pass(r: Recipe, row: int, col: int) -> tuple[Callable | None, str]:
    """
    How the operands Q<row> and Q<col> are made from one matrix x (M, K) -> f(x, outs), and who does it:
    `kernel`, or `reference` where there is none. f returns the values (M, K) and (K, M), None for an operand
    that the recipe does not round, and writes into what it has returned before. None if it rounds neither.
    """
    if not (r.operands[row - 1] or r.operands[col - 1]):
        return None, ""
    if "emulate" not in BACKENDS or BACKENDS["emulate"].problem(r):
        return partial(by_reference, r, row, col), "reference"
    from rounding import Out, Side, round_pair

    def side(number: int) -> Side | None:
        op, product = r.operands[number - 1], (number - 1) // 2
        return op and Side(op, number, r.rotate[product], r.signs[product])
    sides = side(row), side(col)

    def f(x: Tensor, outs: tuple | None = None) -> tuple:
        outs = outs or tuple(side and x.new_empty(shape, dtype=stored(x.device))
                             for side, shape in zip(sides, (x.shape, x.shape[::-1])))
        places = [None if out is None else Out(out, stride=out.shape[1]) for out in outs]
        round_pair(x, *sides, *places, counter_on(x.device), 0, align=aligned(r, row))
        return outs
    return f, "kernel"


def read_as(row: int, device: torch.device) -> torch.dtype:
    """ The dtype of the matrix that Q<row> rounds: Q2 has the float32 master weight. """
    return torch.float32 if row == 2 else stored(device)


def aligned(r: Recipe, row: int) -> bool:
    """ Whether Q6 and Q4 start from what Q1 and Q2 have rounded, and not from X and W. """
    return r.align and row < 3 and r.operands[row - 1] is not None


def by_reference(r: Recipe, row: int, col: int, x: Tensor, outs: tuple | None = None) -> tuple:
    """ rounding_pass in quant.py's own lines: dozens of passes over memory, which the kernels save. """
    at = Rounder(r, counter_on(x.device), 0, stored(x.device))
    q_row = at.q(row, x) if r.operands[row - 1] else None
    start = q_row if aligned(r, row) else x
    q_col = at.q(col, start.T.contiguous()) if r.operands[col - 1] else None
    return tuple(None if q is None else q.to(stored(x.device)) for q in (q_row, q_col))


@cache
def counter_on(device: torch.device) -> Tensor:
    return Counter(1, device=device).state


def check_rounding(name: str, row: int, col: int, device: torch.device, M: int = 128, K: int = 256):
    """ All values of one small matrix, bit for bit, against the reference. """
    r, x = RECIPES[name], random(M, K, device, read_as(row, device))
    got = rounding_pass(r, row, col)[0](x)
    for number, here, there in zip((row, col), got, by_reference(r, row, col, x)):
        check(here is None or torch.equal(here, there), f"{name}: Q{number} differs from the reference")


def products(size: int, device: torch.device) -> Iterator[tuple[str, tuple]]:
    """ name -> (call, a, b): a product of two matrices of this size, and what their numbers are. """
    a, b = random(size, size, device, torch.bfloat16), random(size, size, device, torch.bfloat16, seed=1)
    yield "bf16, library", (lambda: F.linear(a, b), a, b)
    if "emulate" not in BACKENDS:       # nor on AMD's GPUs, whatever they say of their capability
        return
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        a8, b8, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device=device)
        yield "FP8 per tensor, library", (
            lambda: torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16), a8, b8)
    from kernels import mxfp8_gemm, nvfp4_gemm
    for name, op, gemm in (("NVFP4, outer scale per 128", NEAREST, nvfp4_gemm),
                           ("NVFP4, outer scale per tensor", replace(NEAREST, outer=TENSOR), nvfp4_gemm),
                           ("MXFP8", MXFP8, mxfp8_gemm)):
        qa, qb = quantize(a, op), quantize(b, op)
        yield name, (partial(gemm, coded(qa), coded(qb)), qa.dequantize(), qb.dequantize())


def coded(q: Quantized) -> tuple:
    """ An operand as kernels.py takes it. """
    return (pack(q.code), q.inner, q.outer) if q.operand.grid == "e2m1" else (q.code, q.inner)


def check_product(name: str, got: Tensor, a: Tensor, b: Tensor):
    """ Against float64, of the first 256 rows. """
    exact = a[:256].float().double() @ b.float().double().t()
    error = float((got[:256].double() - exact).norm() / exact.norm())
    # the result is rounded to bf16, and a float32 sum of `size` products is far more exact than that
    check(error < 2.0**-8, f"{name} is off by {error:.1e} of the exact product of its operands")


# -----------------------------------------------------------------------------
# python bench.py linear


def bench_linear(args: argparse.Namespace, device: torch.device):
    methods = methods_of(args)
    print("Relative errors against float64, at T=256, K=384, N=512; back ends agree with the reference.\n")
    table = Table("method".ljust(28), "of Y  ", "of dX ", "of dW ")
    for method in methods:
        table.row("/".join(method), *(f"{error:.4f}" for error in check_linear(*method, device)))
    print("\nThe float32 master weight is cast or rounded in each forward pass. Speed over bf16: of both "
          "passes together.\n")
    table, clock = Table("shape, TxKxN".ljust(17), "method".ljust(28), "forward, ms".ljust(24),
                         "backward, ms".ljust(24), "TFLOP/s", "speed over bf16", "n"), clock_of(device)
    for T, K, N in args.shapes:
        bf16 = None
        for method in methods:
            try:
                f, b = time_linear(layer_of(*method, K, N, device), T, clock, args.n)
            except torch.OutOfMemoryError:
                table.row(f"{T}x{K}x{N}", "/".join(method), "out of memory", *["-"] * 4)
                free()
                continue
            both = f.median + b.median
            bf16 = both if method[0] == "bf16" else bf16
            table.row(f"{T}x{K}x{N}", "/".join(method), f, b, f"{6 * T * K * N / both / 1e9:.1f}",
                      f"{bf16 / both:.2f}" if bf16 else "-", min(f.n, b.n))


def methods_of(args: argparse.Namespace) -> list[tuple[str, str]]:
    """ bf16, and each recipe with each back end that can compute it here, or with those asked for. """
    return [("bf16", "reference")] + [(name, backend) for name in args.recipes if name != "bf16"
                                      for backend in args.backends or BACKENDS
                                      if not BACKENDS[backend].problem(RECIPES[name])]


def layer_of(recipe: str, backend: str, K: int, N: int, device: torch.device) -> QuantLinear:
    """ A tenth of its input channels, drawn at random, are outlier channels if the recipe knows such. """
    r = RECIPES[recipe]
    layer = QuantLinear(K, N, bias=False, recipe=r, counter=Counter(1, device=device), backend=backend,
                        outliers=K // 10 if r.outlier else 0, device=device)
    choose_channels([layer])
    with torch.no_grad():
        layer.weight.copy_(0.02 * random(N, K, device, seed=1))
    return layer


def choose_channels(layers: list[QuantLinear]):
    """ Outlier channels at random, as if OutControl had chosen them. """
    draw = torch.Generator().manual_seed(2)
    for layer in layers:
        order = torch.randperm(layer.in_features, generator=draw)
        layer.set_channels(order[: layer.channels.numel()].to(layer.channels.device))


def check_linear(recipe: str, backend: str, device: torch.device, T: int = 256, K: int = 384,
                 N: int = 512) -> list[float]:
    """ Relative errors of y, dx and dw against float64, as large as rounding makes them. """
    x, dy = random(T, K, device).requires_grad_(), random(T, N, device, seed=3)

    def run(backend: str) -> tuple[Tensor, ...]:
        layer = layer_of(recipe, backend, K, N, device)
        with autocast(device):
            y = layer(x)
        grads = torch.autograd.grad(y, (x, layer.weight), dy.to(y.dtype))
        return y.detach(), *grads, layer.weight.detach()

    def off(got: Tensor, wanted: Tensor) -> float:
        return float((got.double() - wanted.double()).norm() / wanted.double().norm())
    *got, weight = run(backend)
    x64, dy64, w64 = x.detach().double(), dy.double(), weight.double()
    errors = [off(a, b) for a, b in zip(got, (x64 @ w64.T, dy64 @ w64, dy64.T @ x64))]
    # bf16 is off by 2^-9; FP4 by .13 in Y and .23 in dX, by .009 and .021 of an operand's square. Below the
    # least, nothing was rounded
    least, most = (0.01, 0.5) if any(RECIPES[recipe].operands) else (0.0, 0.01)
    for name, error in zip(("Y", "dX", "dW"), errors):
        check(least <= error <= most,
              f"{recipe}/{backend}: the relative error of {name} is {error:.4f}, not from {least} to {most}")
    for name, here, there in zip(("Y", "dX", "dW"), got, run("reference")):
        # which rounds alike: what is left is that bf16 stores values and sums them
        check(off(here, there) <= 0.015, f"{recipe}/{backend}: {name} differs from the reference")
    return errors


def time_linear(layer: QuantLinear, T: int, clock, n: int) -> tuple["Timing", "Timing"]:
    """ Forward as in training, which keeps what backward needs; and backward, both gradients. """
    device = layer.weight.device
    x = random(T, layer.in_features, device).requires_grad_()
    dy = random(T, layer.out_features, device, seed=3)

    def forward() -> Tensor:
        x.grad = layer.weight.grad = None
        with autocast(device):
            return layer(x)
    return measure(forward, clock, n), measure(lambda y: y.backward(dy), clock, n, prepare=forward)


# -----------------------------------------------------------------------------
# python bench.py step

SIZES = {
    "nano": [],                                        # config.py's defaults
    "70m": ["olmo2_70m"],
    "370m": ["olmo2_370m"],
    "1b": ["olmo2_1b"],                                # computes its blocks again in the backward pass
    # four layers of a model in which the products weigh more: twice as wide, and wider heads
    "d2048": ["olmo2_370m", "--n_layer=4", "--d_model=2048", "--n_head=16", "--d_ff=5632"],
}


def bench_step(args: argparse.Namespace, device: torch.device):
    print("Steps of one micro-step, as train.py makes them. Time over bf16: of a token. First step: with the "
          "compiler's time. OsciReset: the milliseconds that it adds to the step that opens a window, to one "
          "in it (median), and to the one that resets; and its share of the time from osci_start on.\n")
    table = Table("size ", "recipe".ljust(17), "back end ", "tokens", "tokens/s", "ms a step".ljust(28),
                  "time over bf16", "first step, s", "peak GiB", "OsciReset".ljust(30), "n")
    clock = clock_of(device)
    for size in args.sizes:
        bf16 = None
        for name, backend in methods_of(args):
            tokens, row = args.tokens, None
            while row is None and tokens >= args.seq_len:
                try:
                    row = time_step(step_config(args, size, name, backend, device, tokens), clock, args.n)
                except torch.OutOfMemoryError:
                    tokens = tokens // 2 // args.seq_len * args.seq_len
            if row is None:
                table.row(size, name, backend, "out of memory", *["-"] * 7)
                continue
            t, *others = row
            bf16 = t.median / tokens if name == "bf16" else bf16
            table.row(size, name, backend, f"{tokens:,}", f"{1e3 * tokens / t.median:,.0f}", t,
                      f"{t.median / tokens / bf16:.2f}" if bf16 else "-", *others, t.n)


def step_config(args: argparse.Namespace, size: str, recipe: str, backend: str, device: torch.device,
                tokens: int) -> Config:
    """ The config of train.py, for one optimizer step of so many tokens in a single micro-step. """
    files = [name if name.startswith("--") else str(HERE / "configs" / f"{name}.py")
             for name in (recipe, *SIZES[size])]
    return parse([*files, f"--backend={backend}", f"--device={device.type}", f"--seq_len={args.seq_len}",
                  f"--batch_tokens={tokens}", "--micro_batch=0", f"--eval_tokens={args.seq_len}",
                  f"--compile={'false' if args.eager else 'true'}"])


class Training:
    """ A model that trains on one batch of random tokens, with the step of train.py. """

    def __init__(self, cfg: Config, device: torch.device):
        self.cfg, self.net = cfg, build(cfg, 128, device)
        self.optimizers = make_optimizers(cfg, self.net.model)
        choose_channels(list(self.net.layers.values()))
        shape, draw = (cfg.batch_tokens // cfg.seq_len, cfg.seq_len + 1), torch.Generator().manual_seed(1)
        rows = torch.randint(self.net.model.embed.num_embeddings, shape, generator=draw)
        self.corpus = SimpleNamespace(train=SimpleNamespace(sequences=lambda *_: rows))
        # a step when neither OutControl nor OsciReset has a window open
        self.quiet = sum(map(cfg.in_steps, (cfg.outlier_start, cfg.outlier_window, cfg.warmup)))

    def step(self, number: int) -> Tensor:
        """ -> the loss, on the device. """
        return one_step(self.cfg, self.net, self.optimizers, self.corpus, number)[0]

    def timed(self, numbers: list[int], clock) -> list[float]:
        """ Milliseconds of these steps, one after the other. """
        marks = [clock.mark()]
        for number in numbers:
            self.step(number)
            marks.append(clock.mark())
        return clock.between(list(zip(marks, marks[1:])))


def time_step(cfg: Config, clock, n: int) -> tuple["Timing", str, str, str]:
    """ -> a step; and as text the first one, in seconds, the most memory in GiB and what OsciReset adds. """
    free()
    torch._dynamo.reset()
    training, start = Training(cfg, clock.device), time.perf_counter()
    losses = [float(training.step(training.quiet))]
    first = time.perf_counter() - start
    losses += [float(training.step(training.quiet)) for _ in range(WARMUP)]
    check(math.isfinite(losses[-1]) and losses[-1] < losses[0], f"{cfg.recipe}/{cfg.backend}: the loss of "
          f"one batch went from {losses[0]:.4f} to {losses[-1]:.4f} in {WARMUP} steps")
    clock.forget_peak()
    t = Timing.of(training.timed([training.quiet] * n, clock))
    peak = clock.peak()
    osci = time_osci(training, t.median, n, clock) if cfg.osci == "reset" else "-"
    return t, f"{first:.1f}", peak, osci


def time_osci(training: Training, outside: float, n: int, clock) -> str:
    """ Two windows of n steps, the first to warm up -> what they add. """
    cfg = training.cfg
    start, window, period = (cfg.in_steps(x) for x in (cfg.osci_start, cfg.osci_window, cfg.osci_period))
    for _ in range(2):
        # of the steps in between, one number stands for all
        opening, *inside, closing = training.timed([start, *[start + 1] * n, start + window], clock)
    added = [opening - outside, median(inside) - outside, closing - outside]
    extra = added[0] + (window - 1) * added[1] + added[2]
    return f"{', '.join(f'{ms:+.1f}' for ms in added)}: {100 * extra / (extra + period * outside):.1f} %"


# -----------------------------------------------------------------------------
# the clock


@dataclass(frozen=True)
class Timing:
    """ Milliseconds. """
    median: float
    least: float
    most: float
    n: int

    @staticmethod
    def of(times: list[float]) -> "Timing":
        return Timing(median(times), min(times), max(times), len(times))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.least:.3f} to {self.most:.3f})"


class CpuClock:
    """ What a clock does: marks are set while work goes on, and read at the end. """

    def __init__(self, device: torch.device):
        self.device = device

    def mark(self):
        return self.host()

    def between(self, marks: list[tuple]) -> list[float]:
        """ Milliseconds from the first to the second mark of each pair. """
        return [end - start for start, end in marks]

    def host(self) -> float:
        """ Milliseconds on the host's clock, which goes on while the device works. """
        return 1e3 * time.perf_counter()

    def flush(self):
        """ L2 holds nothing of what was used before. """

    def forget_peak(self):
        """ peak() tells the most memory from here on. """

    def peak(self) -> str:
        """ In GiB; nobody counts it on a CPU. """
        return "-"


class CudaClock(CpuClock):
    """ Marks lie in the stream of work; reading them waits for the device once. """

    @cached_property
    def cold(self) -> Tensor:
        size = max(4 * torch.cuda.get_device_properties(self.device).L2_cache_size, 2**31)
        return torch.zeros(size // 4, dtype=torch.int32, device=self.device)

    def flush(self):
        # Read, not written: dirty lines would cost later. It takes half a millisecond of an H200, in which
        # the host gets ahead
        self.cold.amax()

    def mark(self):
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, marks: list[tuple]) -> list[float]:
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in marks]

    def forget_peak(self):
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> str:
        return f"{torch.cuda.max_memory_allocated() / 2**30:.1f}"


def clock_of(device: torch.device) -> CpuClock:
    return (CudaClock if device.type == "cuda" else CpuClock)(device)


def measure(call: Callable, clock, n: int, prepare: Callable | None = None) -> Timing:
    """
    Time call(), or call(prepare()) with prepare not timed, from a cold cache: n times after WARMUP others.

    Timed is the device's work, as if from a CUDA graph: the cache is flushed for longer than the host took to
    launch the same in the warm-up, so that no kernel waits for its launch. What waits for the host even so,
    because it reads a result or launches for longer than FLUSHES last, is timed with that.
    """
    def once(flushes: int) -> tuple:
        made = [prepare()] if prepare else []
        first = clock.mark()
        for _ in range(flushes):
            clock.flush()
        start, host = clock.mark(), clock.host()
        call(*made)
        return (start, clock.mark()), (first, start), clock.host() - host
    _, flushed, launches = zip(*(once(1) for _ in range(WARMUP)))
    flush = max(min(clock.between(flushed)), 1e-6)
    flushes = 1 + min(math.ceil(min(launches) / flush), FLUSHES)
    return Timing.of(clock.between([once(flushes)[0] for _ in range(n)]))


def time_copy(device: torch.device, clock, n: int, moved: int) -> Timing:
    """ A copy within the device that moves so many bytes, read plus written: what a pass may hope for. """
    source = torch.zeros(moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return measure(lambda: target.copy_(source), clock, n)


# -----------------------------------------------------------------------------
# what is printed, and the rest


class Table:
    """ A Markdown table that is printed as it grows. A cell of the head that ends in spaces makes room. """

    def __init__(self, *head: str):
        self.widths = [len(cell) for cell in head]
        self.row(*head)
        self.row(*("-" * width for width in self.widths))

    def row(self, *cells):
        cells = [str(cell).ljust(width) for cell, width in zip(cells, self.widths, strict=True)]
        print(f"| {' | '.join(cells)} |", flush=True)


def machine(device: torch.device) -> str:
    """ What a reader must know to compare a number with one of his own. """
    gpu, triton = "CPU", "none"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = f"{properties.name} (compute capability {properties.major}.{properties.minor})"
    if find_spec("triton"):
        import triton
        triton = triton.__version__
    return (f"{gpu}, torch {torch.__version__}, triton {triton}, python {platform.python_version()}, "
            f"code {code()}")


def random(M: int, K: int, device: torch.device, dtype: torch.dtype | None = None, seed: int = 0) -> Tensor:
    """ Normally distributed, (M, K), in the dtype of activations unless another one is given. """
    x = torch.randn(M, K, generator=torch.Generator(device).manual_seed(seed), device=device)
    return x.to(dtype or stored(device))


def stored(device: torch.device) -> torch.dtype:
    """ The dtype of activations, and of rounded values in emulation: on a CPU that of autocast() there. """
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def free():
    """ After an exception that held on to tensors. """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def read_shapes(text: str) -> list[tuple[int, ...]]:
    shapes = [tuple(int(n) if n.isdecimal() else 0 for n in shape.split("x")) for shape in text.split(",")]
    if any(len(shape) != 3 or min(shape) == 0 or any(n % 16 for n in shape) for shape in shapes):
        raise argparse.ArgumentTypeError(f"type TxKxN,... in multiples of 16, not {text!r}")
    return shapes


def read_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.py", description="Speed, measured here.", allow_abbrev=False)
    parser.add_argument("what", choices=PROGRAMS)
    names = partial(str.split, sep=",")
    parser.add_argument("--recipes", type=names, default=["tetrajet_base", "tetrajet_full"],
                        help="names, such as tetrajet_base,tetrajet_full (these two)")
    parser.add_argument("--backends", type=names, default=[], help="of linear and step (all that run here)")
    parser.add_argument("--shapes", type=read_shapes, help="of linear: TxKxN,..., multiples of 16")
    parser.add_argument("--sizes", type=names, help=f"of step, some of {','.join(SIZES)} (70m,370m,d2048)")
    parser.add_argument("--tokens", type=int, help="of step; halved where memory does not allow it (32768)")
    parser.add_argument("--seq_len", type=int, help="of step (1024)")
    parser.add_argument("--eager", action="store_true", help="do not compile the model of step")
    parser.add_argument("--n", type=int, default=20, help="times that each is measured (20)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    return parser.parse_args(argv)


PROGRAMS = {"kernels": bench_kernels, "linear": bench_linear, "step": bench_step}
SQUARES = [(T, d, d) for d in (1024, 2048, 4096, 8192) for T in (4096, 8192, 16384)]


def main(argv: list[str]) -> int:
    args = read_args(argv)
    try:
        device = pick_device(Config(device=args.device))
        missing, gpu = enter_kernels(device), device.type == "cuda"
        args.shapes = args.shapes or (SQUARES if gpu else [(128, 128, 128)])
        args.sizes = args.sizes or (["70m", "370m", "d2048"] if gpu else ["nano"])
        args.seq_len = args.seq_len or (1024 if gpu else 64)
        args.tokens = args.tokens or (32768 if gpu else 256)
        need(args.n > 0 and 0 < args.seq_len <= args.tokens,
             f"type --n above 0, and --tokens of at least --seq_len={args.seq_len}")
        for kind, asked, known in (("recipe", args.recipes, RECIPES), ("back end", args.backends, BACKENDS),
                                   ("size", args.sizes, SIZES)):
            for name in asked:
                need(name in known, f"{kind} {name!r} is unknown here; "
                     f"{missing if kind == 'back end' and missing else did_you_mean(name, known)}")
        print(f"`python bench.py {' '.join(argv)}`: {machine(device)}\n")
        PROGRAMS[args.what](args, device)
        return 0
    except ConfigError as error:
        line, status = str(error), 2
    except CheckFailed as error:
        line, status = f"{error}; it was not timed", 1
    print(f"error: {line}", file=sys.stderr)
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

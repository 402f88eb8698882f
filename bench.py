"""
How fast it is, on the machine at hand; and how fast it could be, on paper.

    python bench.py model      expected times of a layer's linears on three GPUs: computed, nothing measured
    python bench.py kernels    the kernels one by one: bytes a second, next to those of a plain copy
    python bench.py linear     forward and backward of one linear, by shape: bf16, FP8, each FP4 back end
    python bench.py step       tokens a second of a whole training step, and what OsciReset adds to it

Each prints markdown tables with the machine and the commit, and writes what it measured to
results/bench_<what>/bench.md, with the raw numbers in bench.json (--out=FOLDER for elsewhere). Every kernel,
layer and model is checked before it is timed. On a CPU the checks are all there is: a time there would say
nothing about FP4, so none is printed. What is not measured is written only if --out says where.

What is timed lies between two CUDA events, n times after a warm-up; the tables give median, least and most.
Where one operation is timed, a buffer larger than the L2 cache is read before each call: its inputs come from
memory, as in training, and the host has time to launch all of it beforehand. In `step` nothing comes between
the steps, and the host keeps up or does not.

Left out: data loading and evaluation, more than one GPU, and any number that is not of this machine, but for
the paper's, which are labelled as theirs.

Letters used for shapes: T tokens, K input and N output features, C outlier channels.
"""
import argparse
import gc
import json
import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import CHOICES, Config, ConfigError, folder_name, parse, script
from data import Parser
from eval import autocast, build, commit, pick_device
from osci import OsciReset
from parallel import compile_parts
from quant import (TENSOR, Counter, Operand, QuantLinear, fake_quantize, hadamard, pack, quantize,
                   random_signs, trust_mask, uniform)
from recipes import MXFP8, NEAREST, RECIPES, STOCHASTIC
from roofline import GPUS, METHODS, OUTLIER_SHARE, PAPER, layer_shapes, roofline

HERE = Path(__file__).resolve().parent
WARMUP = 3               # calls or steps before the first that counts
FEWEST, PATIENCE, FLUSHES = 5, 10_000, 20      # calls, milliseconds for all of them, flushes: see measure()


class BenchError(ValueError):
    """ A mistake of the user's, told in one line that says what to type instead. """


class CheckFailed(RuntimeError):
    """ Something computes wrong numbers, so its speed is not worth printing. """


def need(holds: bool, message: str):
    if not holds:
        raise CheckFailed(message)


# -----------------------------------------------------------------------------
# 1  the machine, the clock, the report


def machine(device: torch.device) -> dict[str, str]:
    """ What a reader must know to compare a number with one of his own. """
    gpu = "none (CPU)"
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        gpu = f"{p.name} (compute capability {p.major}.{p.minor})"
    triton = "none"
    if find_spec("triton"):
        import triton
        triton = triton.__version__
    return {"gpu": gpu, "torch": torch.__version__, "triton": triton, "python": platform.python_version(),
            "commit": commit()}


def backends_here(device: torch.device) -> list[str]:
    """ The FP4 back ends that this program has and this device can run, of those that config.py knows. """
    on_gpu = device.type == "cuda" and find_spec("triton") is not None
    there = {"reference": True, "emulate": on_gpu, "packed": on_gpu,
             "native": on_gpu and torch.cuda.get_device_capability(device)[0] in (10, 12)}
    return [name for name in there if there[name] and name in CHOICES["backend"]]


def has_fp8(device: torch.device) -> bool:
    """ Whether torch._scaled_mm runs on FP8 tensor cores here. """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


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


class CudaClock:
    """ Marks in the stream of work; reading them waits for the device once, at the end. """

    def __init__(self, device: torch.device):
        self.device = device

    @cached_property
    def cold(self) -> Tensor:
        size = max(4 * torch.cuda.get_device_properties(self.device).L2_cache_size, 2**31)
        return torch.zeros(size // 4, dtype=torch.int32, device=self.device)

    def flush(self):
        """
        L2 holds nothing of what was used before. Read, not written: dirty lines would cost later. It takes
        half a millisecond of an H200, in which the host gets ahead.
        """
        self.cold.amax()

    def host(self) -> float:
        """ Milliseconds on the host's clock, which goes on while the device works. """
        return 1e3 * time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, marks: list[tuple]) -> list[float]:
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in marks]


def measure(call: Callable, clock, n: int, prepare: Callable | None = None) -> Timing:
    """
    Time call(), or call(prepare()) with prepare not timed, from a cold cache: n times after WARMUP others,
    but fewer, down to FEWEST, where that would take longer than PATIENCE.

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
    timed, flushed, launches = zip(*(once(1) for _ in range(WARMUP)))
    warm, flush = clock.between(timed)[-1], min(clock.between(flushed))
    flushes = 1 + min(math.ceil(min(launches) / max(flush, 1e-6)), FLUSHES)
    n = min(n, max(FEWEST, int(PATIENCE / max(warm, 1e-6))))
    return Timing.of(clock.between([once(flushes)[0] for _ in range(n)]))


def markdown(rows: list[list]) -> str:
    """ A table, the first row its head, whose columns line up in a terminal too; numbers to the right. """
    rows = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = [all(cell[:1].isdigit() or cell == "-" for cell in column[1:]) for column in zip(*rows)]
    rule = ["-" * (width - r) + ":" * r for width, r in zip(widths, right)]
    head, *lines = [[cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right)]
                    for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *lines])


class Report:
    """ What is printed, and kept in a folder: bench.md as printed, bench.json with the raw numbers. """

    def __init__(self, args: argparse.Namespace, device: torch.device | None):
        self.folder = args.out
        # what has no times is no result, and must not stand in the way of one
        if self.folder is None and device and device.type == "cuda":
            self.folder = HERE / "results" / f"bench_{args.what}"
        if self.folder and (self.folder / "bench.json").exists() and not args.overwrite:
            raise BenchError(f"{self.folder} holds a result; type --overwrite, or --out=ANOTHER")
        about = machine(device) if device else {"gpu": "none: computed", "commit": commit()}
        self.data = {"what": args.what, "command": " ".join(["python bench.py", *args.argv]),
                     "machine": about, "rows": []}
        self.text, self.unfinished = [], []
        # now, so that a folder that cannot be written is told before the measuring and not after it
        self.save()
        self.say(f"`{self.data['command']}`: " + ", ".join(f"{k} {v}" for k, v in about.items()))

    def say(self, text: str):
        print(text + "\n", flush=True)
        self.text.append(text)
        self.unfinished = [table for table in self.unfinished if table != text]
        self.save()

    def so_far(self, *tables: str):
        """ Tables that still grow, for bench.md: all that it has of them if a limit comes before say(). """
        self.unfinished = list(tables)
        self.save()

    def row(self, **raw):
        """ One raw result. Saved at once: a later one may run out of memory, or of patience. """
        self.data["rows"].append(raw)
        self.save()

    def save(self):
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        texts = {"bench.json": json.dumps(self.data, indent=1),
                 "bench.md": "\n\n".join(self.text + self.unfinished)}
        for name, text in texts.items():
            temporary = self.folder / (name + ".tmp")
            temporary.write_text(text + "\n", encoding="utf-8")
            os.replace(temporary, self.folder / name)


def no_times(report: Report, args: argparse.Namespace, what: str, *acts: str):
    """ Say what is all that happens on a CPU, and which of the flags given, but for `acts`, do nothing. """
    report.say(f"On a CPU: {what} checked and nothing timed, since a time here would say nothing about FP4."
               + ("" if report.folder else " Not saved: that takes --out=FOLDER."))
    given = [word for word in args.argv if word.startswith("--")]
    if idle := [w for w in given if w.split("=")[0] not in ("--device", "--out", "--overwrite", *acts)]:
        report.say(f"Without effect on a CPU: {', '.join(idle)}")


def free():
    """ After an exception that held on to tensors. """
    gc.collect()
    torch.cuda.empty_cache()


def effective_bits(x: Tensor, rounded: Tensor) -> float:
    """ -log2(relative squared error) / 2: one bit more halves the error. inf if there is none. """
    error = float((rounded.double() - x.double()).square().sum() / x.double().square().sum())
    return -math.log2(error) / 2 if error else math.inf


# -----------------------------------------------------------------------------
# 2  bench.py model: the formulas are those of roofline.py


def speeds(t: dict, methods: tuple[str, ...], over: tuple[str, ...]) -> list[str]:
    """ t: method -> (forward, backward). How many times as fast: forward, and both passes together. """
    return [f"{there / here:.2f}" for m in methods for o in over
            for here, there in ((t[m][0], t[o][0]), (sum(t[m]), sum(t[o])))]


def bench_model(args: argparse.Namespace):
    report, T, ours = Report(args, None), args.tokens, METHODS[2:]
    report.say("Computed from the formulas in roofline.py and the vendor's peak rates; nothing was measured. "
               f"{T:,} tokens, d_ff = {args.ff:g} d_model. Rounding moves its bytes at full bandwidth and "
               "overlaps with nothing; products run at their peak, or at full bandwidth if that is longer. "
               "ms: forward + backward. base/fp8: how many times as fast; f: the forward pass alone.")
    head = ["d_model", "linear", "K", "N", *(f"{m}, ms" for m in METHODS)]
    head += [f"{m}/{o}{f}" for m in ours for o in ("fp8", "bf16") for f in (", f", "")]
    compared = [["GPU", "d_model", *(f"{m}/fp8{w}" for w in ("", ", W not rounded") for m in ours)]]
    for gpu in GPUS:
        rows = [head]
        for d in args.d_model:
            times, without_w = (roofline(gpu, T, d, args.ff, w) for w in (True, False))
            for name, t in times.items():
                K, N = layer_shapes(d, args.ff).get(name, ("-", "-"))
                rows.append([d, name, K, N, *(f"{1e3 * sum(t[m]):.3f}" for m in METHODS),
                             *speeds(t, ours, ("fp8", "bf16"))])
                report.row(gpu=asdict(gpu), tokens=T, d_model=d, linear=name, K=K, N=N, seconds=t,
                           seconds_w_not_rounded=without_w[name])
            compared.append([gpu.name, d, *(s for t in (times, without_w)
                                            for s in speeds(t["all four"], ours, ("fp8",))[1::2])])
        report.say(f"**{gpu.name}**: bf16 {gpu.bf16:g}, FP8 {gpu.fp8:g}, FP4 {gpu.fp4:g} TFLOP/s, "
                   f"{gpu.bandwidth:g} GB/s (vendor's datasheet, dense)")
        report.say(markdown(rows))
    report.say("All four linears of a layer, both passes, computed; W not rounded: by neither, as in a "
               "micro-step that finds W rounded by the one before.")
    report.say(markdown(compared))
    report.say("What the paper reports, measured by its authors on an RTX 5090 against TransformerEngine's "
               "FP8 (arXiv 2510.27527, as quoted); by its code, the time of a linear leaves rounding W out:")
    report.say(markdown([["of", "base over FP8, theirs", "full over FP8, theirs"],
                         *([what, f"{base:.2f}", f"{full:.2f}"] for what, base, full in PAPER)]))


# -----------------------------------------------------------------------------
# 3  bench.py kernels


@dataclass(frozen=True)
class Case:
    """ One kernel at one shape. work: the bytes that it must move at least; of a product, its operations. """
    name: str
    shape: tuple[int, ...]
    call: Callable[[], object]
    work: float
    check: Callable[[], float]     # -> effective bits of what call() computes; CheckFailed if it is wrong


def reference_cases(device: torch.device, T: int, K: int) -> list[Case]:
    """ The rounding of quant.py in plain PyTorch: dozens of passes, so this is what kernels improve on. """
    x = torch.randn(T, K, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    counter = Counter(1, device=device).state

    def case(name: str, op: Operand) -> Case:
        def call() -> Tensor:
            return fake_quantize(x, op, uniform(x.shape, counter, 0, 3) if op.stochastic else None)

        def check() -> float:
            noise = uniform(x.shape, counter, 0, 3)[:32].cpu() if op.stochastic else None
            got = call()
            need(torch.equal(got[:32].cpu(), fake_quantize(x[:32].cpu(), op, noise)),
                 f"{name} of {T}x{K} differs from the same rounding on the CPU")
            return effective_bits(x, got)
        return Case(f"reference: {name}", (T, K), call, T * K * (2 + 4), check)
    return [case("nearest, 1x16 in 128", NEAREST), case("stochastic, 1x16 in 128", STOCHASTIC),
            case("MXFP8", MXFP8)]


# (tokens, input features, output features) of a linear in each of these models: attention's qkv, and the MLP
KERNEL_SHAPES = {"70m qkv": (32768, 512, 1536), "70m down": (32768, 1024, 512),
                 "370m qkv": (32768, 1024, 3072), "370m down": (32768, 4096, 1024),
                 "d4096": (32768, 4096, 4096)}


def check_kernels(recipes: list[str]):
    """ BenchError if there is one without kernels, before anything is measured: one of your own, perhaps. """
    from fused import emulate_problem
    for name in recipes:
        off = [f"Q{i}" for i, op in enumerate(RECIPES[name].operands, 1) if op is None]
        problem = f"{off[0]} rounds nothing" if off else emulate_problem(RECIPES[name])
        if problem:
            raise BenchError(f"recipe {name} has no kernels to time: {problem}; leave it out of --recipes")


def fused_cases(device: torch.device, name: str, T: int, K: int, N: int, recipe: str) -> list[Case]:
    """ The three kernels of a linear without outlier channels: X and W with what is kept of them, and dY. """
    from fused import side_of, values
    from kernels import round_pair
    r, counter = RECIPES[recipe], Counter(1, device=device).state
    generator = torch.Generator(device).manual_seed(0)

    def case(kernel: str, M: int, K: int, dtype: torch.dtype, q_row: int, q_col: int, align: bool) -> Case:
        row, col = side_of(r, q_row), side_of(r, q_col)
        kept = torch.bfloat16 if device.type == "cuda" else torch.float32      # no bf16 in the interpreter
        x = torch.randn(M, K, generator=generator, device=device).to(dtype if device.type == "cuda" else kept)
        outs = values(x.to(kept), M, K, row), values(x.to(kept), K, M, col)
        (a, at), trust = (out.data for out in outs), None
        if r.trust and q_row < 3:
            trust = torch.empty(a.shape, dtype=torch.uint8, device=device)
            outs = outs[0]._replace(trust=trust), outs[1]
        # a scale for the whole tensor needs all of it, else some rows and columns are enough
        n = max(M, K) if TENSOR in (row.op.outer, col.op.outer) else 128

        def call():
            round_pair(x, row, col, *outs, counter, 2, align=align)

        def check() -> float:
            for out in (a, at):
                out.fill_(torch.nan)
            call()
            wanted = rounded_side(x[:n].float(), row, counter, 2)
            first = x[:, :n].float()
            start = rounded_side(first, row, counter, 2, columns=K) if align else first
            also = rounded_side(start.t().contiguous(), col, counter, 2)
            need(torch.equal(a[:n], wanted.to(kept)) and torch.equal(at[:n], also.to(kept)),
                 f"{recipe}, {kernel} of {M}x{K} differs from the reference")
            need(bool(a.isfinite().all() and at.isfinite().all()), f"{kernel} of {M}x{K} leaves holes")
            if trust is not None:
                need(torch.equal(trust[:n] == 1, trust_mask(turned(x[:n].float(), row, counter, 2), row.op)),
                     f"{recipe}, the trust mask of {kernel} of {M}x{K} differs from the reference")
            return effective_bits(turned(x[:128].float(), row, counter, 2), a[:128].float())
        moved = M * K * (x.element_size() + 2 * a.element_size() + (0 if trust is None else 1))
        return Case(f"{name}: {recipe}, {kernel}", (M, K), call, moved, check)

    return [case("X, Q1 and Q6", T, K, torch.bfloat16, 1, 6, r.align),
            case("W, Q2 and Q4", N, K, torch.float32, 2, 4, r.align),
            case("dY, Q3 and Q5", T, N, torch.bfloat16, 3, 5, False)]


def turned(x: Tensor, side, counter: Tensor, layer: int) -> Tensor:
    """ x rotated as this side of a matrix is. """
    return hadamard(x, random_signs(side.turn, counter, layer, side.signs)) if side.turn else x


def rounded_side(x: Tensor, side, counter: Tensor, layer: int, columns: int | None = None) -> Tensor:
    """ What the reference makes of one orientation; x may be the first columns of a row of `columns`. """
    x, noise = turned(x, side, counter, layer), None
    if side.op.stochastic:
        noise = uniform((x.shape[0], columns or x.shape[1]), counter, layer, side.noise)[:, : x.shape[1]]
    return fake_quantize(x, side.op, noise)


def gemm_cases(device: torch.device, size: int) -> list[Case]:
    """ Products of packed operands, all of one size; the first, bf16's, is what the others compare with. """
    from gemms import fp8_gemm, mxfp8_gemm, nvfp4_gemm
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator, device=device).bfloat16() for _ in range(2))

    def packed(x: Tensor, op: Operand) -> tuple:
        q = quantize(x, op)
        return (q.code, q.inner) if op.grid == "e4m3" else (pack(q.code), q.inner, q.outer)

    def case(name: str, call: Callable, op: Operand | None) -> Case:
        def check() -> float:
            got = call()
            if op is None:
                return effective_bits(a[:256].double() @ b.double().t(), got[:256].double())
            exact, other = (quantize(x, op).dequantize() for x in (a, b))
            exact = exact[:256].double() @ other.double().t()
            error = float((got[:256].double() - exact).norm() / exact.norm())
            # the result is rounded to bf16, and float32 sums of `size` products are far more exact than that
            need(error < 2.0**-8, f"{name} is off by {error:.1e} of the exact product of its operands")
            return effective_bits(exact, got[:256].double())
        return Case(name, (size,) * 3, call, 2.0 * size**3, check)

    cases = [case("bf16, library", lambda: F.linear(a, b), None)]
    if has_fp8(device):
        one = torch.ones((), device=device)
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        cases.append(case("FP8 per tensor, library", lambda: fp8_gemm(a8, b8, one, one), None))
    for name, op, gemm in (("NVFP4, outer scale per 128", NEAREST, nvfp4_gemm),
                           ("NVFP4, outer scale per tensor", replace(NEAREST, outer=TENSOR), nvfp4_gemm),
                           ("MXFP8", MXFP8, mxfp8_gemm)):
        operands = packed(a, op), packed(b, op)
        cases.append(case(name, lambda gemm=gemm, operands=operands: gemm(*operands), op))
    return cases


def gemm_table(cases: list[Case], report: Report, clock, n: int) -> str:
    """ Check and time products -> TFLOP/s and the share of bf16's, which is the first. """
    rows, first = [["product", "shape", "effective bits", "TFLOP/s", "% of bf16", "ms", "n"]], None
    for case in cases:
        bits, t = case.check(), measure(case.call, clock, n)
        rate = case.work / t.median / 1e9
        first = first or rate
        rows.append([case.name, "x".join(map(str, case.shape)), f"{bits:.2f}", f"{rate:.0f}",
                     f"{100 * rate / first:.1f}", t, t.n])
        report.row(product=case.name, shape=case.shape, flop=case.work, ms=asdict(t))
    return markdown(rows)


def time_copy(device: torch.device, clock, n: int, moved: float) -> Timing:
    """ A copy within the device that moves so many bytes, read plus written: what a kernel may hope for. """
    source = torch.zeros(int(moved) // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return measure(lambda: target.copy_(source), clock, n)


def kernel_table(cases: list[Case], report: Report, clock, n: int,
                 copy: Callable[[float], Timing] | None) -> str:
    """ Check and then time each case, next to copy(bytes) -> the table; without a clock the checks alone. """
    rows = [["kernel", "shape", "effective bits"]]
    if clock:
        rows[0] += ["GB moved", "GB/s", "% of copy", "% of one as large", "ms", "n"]
        large = 2**31 / copy(2**31).median
    for case in cases:
        row = [case.name, "x".join(map(str, case.shape)), f"{case.check():.2f}"]
        raw = {"kernel": case.name, "shape": case.shape, "bytes": case.work}
        if clock:
            # to start and to end cost every kernel some microseconds, a copy too
            t, alike = measure(case.call, clock, n), copy(case.work)
            rate = case.work / t.median
            row += [f"{case.work / 1e9:.3f}", f"{rate / 1e6:.0f}", f"{100 * rate / large:.1f}",
                    f"{100 * alike.median / t.median:.1f}", t, t.n]
            raw |= {"ms": asdict(t), "copy_ms": asdict(alike)}
        report.row(**raw)
        rows.append(row)
    return markdown(rows)


def bench_kernels(args: argparse.Namespace):
    device = pick_device(args)
    fused = "emulate" in backends_here(device)
    if fused:
        check_kernels(args.recipes)
    report = Report(args, device)
    if device.type == "cuda":
        clock = CudaClock(device)
        copy = cache(partial(time_copy, device, clock, args.n))
        timing = copy(2**31)
        report.row(kernel="copy", shape=[2**30], bytes=2**31, ms=asdict(timing))
        report.say(f"a copy of 1 GiB: {2**31 / timing.median / 1e6:.0f} GB/s, read + written; {timing} ms, "
                   f"n={timing.n}. % of copy: of this rate, counting what must move; % of one as large: of "
                   "the rate at which as many bytes are copied")
        for recipe in args.recipes if fused else []:
            # made one shape at a time, or all tensors would be there at once
            cases = (case for name, shape in KERNEL_SHAPES.items()
                     for case in fused_cases(device, name, *shape, recipe))
            report.say(kernel_table(cases, report, clock, args.n, copy))
        report.say(kernel_table(reference_cases(device, 32768, 1024), report, clock, args.n, copy))
        if fused:
            report.say(gemm_table(gemm_cases(device, 8192), report, clock, args.n))
        return
    no_times(report, args, "the rounding of one small tensor is")
    report.say(kernel_table(reference_cases(device, 64, 256), report, None, args.n, None))


# -----------------------------------------------------------------------------
# 4  bench.py linear


def fp8_cast(x: Tensor, op: Operand, counter: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """
    x (M, K) -> in FP8, by max|x| of the whole tensor; the same transposed; and the scale, float32. With a
    counter by the fused kernel, which asks for one though nothing here is random.
    """
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[op.grid]
    if counter is None:
        q = quantize(x, op)
        return q.code.view(dtype), q.code.t().contiguous().view(dtype), q.outer
    from fused import room
    from kernels import Side, round_pair
    side, (M, K) = Side(op), x.shape
    row, col = room(x, M, K, side)[1], room(x, K, M, side)[1]
    round_pair(x, side, side, row, col, counter, 0)
    return row.data.view(dtype), col.data.view(dtype), row.outer


class Fp8Product(torch.autograd.Function):
    """ A linear in FP8 per tensor: E4M3 forward, E5M2 for dY. """

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, counter: Tensor | None) -> Tensor:
        (x8, xt8, sx), (w8, wt8, sw) = (fp8_cast(t, RECIPES["fp8"].y_x, counter) for t in (x, w))
        ctx.save_for_backward(xt8, wt8, sx, sw)
        ctx.counter = counter
        return torch._scaled_mm(x8, w8.t(), sx, sw, out_dtype=torch.bfloat16, use_fast_accum=True)

    @staticmethod
    def backward(ctx, dy: Tensor):
        xt8, wt8, sx, sw = ctx.saved_tensors
        dy8, dyt8, sdy = fp8_cast(dy, RECIPES["fp8"].dx_dy, ctx.counter)
        # the second operand is always handed over column-major, which is what the tensor cores read
        dx = torch._scaled_mm(dy8, wt8.t(), sdy, sw, out_dtype=torch.bfloat16)
        dw = torch._scaled_mm(dyt8, xt8.t(), sdy, sx, out_dtype=torch.bfloat16)
        return dx, dw.float(), None


class Fp8Linear(nn.Module):
    def __init__(self, K: int, N: int, device: torch.device):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(N, K, device=device))
        self.counter = Counter(device=device).state if "emulate" in backends_here(device) else None

    def forward(self, x: Tensor) -> Tensor:
        return Fp8Product.apply(x, self.weight, self.counter)


def quant_linear(K: int, N: int, recipe: str, backend: str, device: torch.device) -> QuantLinear:
    """ With a tenth of its channels, drawn at random, in the outlier format where the recipe has one. """
    r = RECIPES[recipe]
    outliers = round(OUTLIER_SHARE * K) if r.outlier else 0
    other = {} if backend == "reference" else {"backend": backend}
    layer = QuantLinear(K, N, bias=False, recipe=r, counter=Counter(1, device=device), outliers=outliers,
                        device=device, **other)
    draw = torch.randperm(K, generator=torch.Generator().manual_seed(2))
    layer.set_channels(draw[:outliers].to(device))
    return layer


def make_layer(method: str, K: int, N: int, device: torch.device) -> nn.Module:
    """ bf16, fp8, or RECIPE/BACKEND; the weight is the same for all. """
    recipe, _, backend = method.partition("/")
    layer = Fp8Linear(K, N, device) if method == "fp8" else quant_linear(
        K, N, recipe, backend or "reference", device)
    with torch.no_grad():
        layer.weight.normal_(0.0, 0.02, generator=torch.Generator(device).manual_seed(1))
    return layer


def linear_inputs(T: int, K: int, N: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """ X, which wants a gradient, and dY: bf16 on a GPU, float32 on a CPU, as autocast has it there. """
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    g = torch.Generator(device).manual_seed(3)
    x, dy = (torch.randn(T, n, generator=g, device=device).to(dtype) for n in (K, N))
    return x.requires_grad_(), dy


# Least and most relative error of a product, for normally distributed operands. FP4: 9.0e-3 relative squared
# error of an operand to nearest and 21.3e-3 stochastic (tests/test_quant.py), so Y is off by .13 and dX by
# .23. Below the least, nothing was rounded
ERRORS = {"bf16": (0.0, 0.01), "fp8": (0.01, 0.1), "fp4": (0.05, 0.3)}
SAME = 0.015     # between back ends, which round alike: values stored and summed in bf16


def check_linear(method: str, device: torch.device, T: int = 256, K: int = 384,
                 N: int = 512) -> dict[str, float]:
    """ Relative errors of y, dx and dw against float64; CheckFailed if they are not those of the method. """
    x, dy = linear_inputs(T, K, N, device)

    def run(method: str) -> dict[str, Tensor]:
        layer = make_layer(method, K, N, device)
        x.grad = None
        with autocast(device):
            y = layer(x)
        y.backward(dy.to(y.dtype))
        return {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad, "w": layer.weight.detach()}

    def off(a: Tensor, b: Tensor) -> float:
        return float((a.double() - b.double()).norm() / b.double().norm())
    got = run(method)
    x64, w64, dy64 = (t.detach().double() for t in (x, got["w"], dy))
    errors = {"y": off(got["y"], x64 @ w64.T), "dx": off(got["dx"], dy64 @ w64),
              "dw": off(got["dw"], dy64.T @ x64)}
    recipe, _, backend = method.partition("/")
    least, most = ERRORS[method if method in ERRORS else "fp4"]
    for name, error in errors.items():
        need(least <= error <= most, f"{method}: the relative error of {name} is {error:.4f}, "
                                     f"not from {least} to {most}")
    if backend not in ("", "reference"):
        other = run(f"{recipe}/reference")
        for name in errors:
            distance = off(got[name], other[name])
            need(distance <= SAME,
                 f"{method}: {name} differs from the reference by {distance:.4f} of its size")
    return errors


def time_linear(layer: nn.Module, T: int, K: int, N: int, device: torch.device, clock, n: int):
    """ Forward as in training, which keeps what backward needs; and backward, both gradients -> Timings. """
    x, dy = linear_inputs(T, K, N, device)

    def forward() -> Tensor:
        x.grad = layer.weight.grad = None
        with autocast(device):
            return layer(x)
    return measure(forward, clock, n), measure(lambda y: y.backward(dy), clock, n, prepare=forward)


def default_shapes() -> list[tuple[int, int, int]]:
    square = [(T, d, d) for d in (1024, 2048, 4096, 8192, 16384) for T in (4096, 8192, 16384)]
    return [*square, (32768, 1024, 1024), (32768, 4096, 4096)]


def bench_linear(args: argparse.Namespace):
    device = pick_device(args)
    report = Report(args, device)
    methods = ["bf16"] + ["fp8"] * has_fp8(device)
    methods += [f"{recipe}/{backend}" for backend in args.backends or backends_here(device)
                for recipe in ("tetrajet_base", "tetrajet_full")]
    table = [["method", "error of Y", "of dX", "of dW"]]
    for method in methods:
        errors = check_linear(method, device)
        table.append([method, *(f"{e:.4f}" for e in errors.values())])
        report.row(method=method, relative_errors=errors)
    report.say("Checked at T=256, K=384, N=512: relative errors against float64.")
    report.say(markdown(table))
    if device.type != "cuda":
        return no_times(report, args, "layers of this one shape are", "--backends")
    report.say("Medians, and least to most, of the GPU's work, launched beforehand; the float32 master "
               "weight is cast or rounded in each forward. Speed over bf16: of both passes together, then of "
               "each.")
    report.say(markdown(linear_table(args, report, device, methods, CudaClock(device))))


def linear_table(args: argparse.Namespace, report: Report, device: torch.device, methods: list[str],
                 clock) -> list[list]:
    """ Every method at every shape. """
    table = [["T", "K", "N", "method", "forward, ms", "backward, ms", "TFLOP/s", "speed over bf16", "forward",
              "backward", "n"]]
    for T, K, N in args.shapes or default_shapes():
        bf16 = None
        for method in methods:
            print(f"{T}x{K}x{N} {method}", file=sys.stderr, flush=True)
            times = None
            try:
                times = time_linear(make_layer(method, K, N, device), T, K, N, device, clock, args.n)
            except torch.OutOfMemoryError:
                free()
            report.row(T=T, K=K, N=N, method=method, ms=times and [asdict(t) for t in times])
            if times is None:
                table.append([T, K, N, method, "out of memory", *["-"] * 6])
                continue
            f, b = (t.median for t in times)
            bf16 = (f, b) if method == "bf16" else bf16
            ratios = [f"{there / here:.2f}" for there, here in
                      ((sum(bf16), f + b), (bf16[0], f), (bf16[1], b))] if bf16 else ["-"] * 3
            table.append([T, K, N, method, *times, f"{6 * T * K * N / (f + b) / 1e9:.1f}", *ratios,
                          min(t.n for t in times)])
    return table


# -----------------------------------------------------------------------------
# 5  bench.py step

SIZES = {
    "nano": [],                                        # config.py's defaults, for a CPU
    "70m": ["olmo2_70m"],
    "370m": ["olmo2_370m"],
    "1b": ["olmo2_1b"],                                # computes its blocks again in the backward pass
    # four layers of a model in which the products weigh more: twice as wide, and wider heads
    "d2048": ["olmo2_370m", "--n_layer=4", "--d_model=2048", "--n_head=16", "--d_ff=5632"],
}


def step_config(size: str, recipe: str, backend: str, device: torch.device, tokens: int,
                seq_len: int) -> Config:
    """ The config of train.py for one optimizer step of `tokens` tokens in a single micro-step. """
    files = [name if name.startswith("--") else str(HERE / "configs" / f"{name}.py")
             for name in (recipe, *SIZES[size])]
    return parse([*files, f"--backend={backend}", f"--device={device.type}", f"--seq_len={seq_len}",
                  f"--batch_tokens={tokens}", "--micro_batch=0", f"--eval_tokens={seq_len}"])


class Training:
    """ A model that trains on one batch of random tokens: train.py's step without its data and its log. """

    def __init__(self, cfg: Config, device: torch.device, mode: str):
        self.cfg, self.device, self.done = cfg, device, 0
        self.model, self.layers, self.counter = build(cfg, 2, device)
        self.optimizer = torch.optim.AdamW(self.model.optimizer_groups(cfg.weight_decay), lr=cfg.lr,
                                           betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps, fused=True)
        g = torch.Generator().manual_seed(1)
        for layer in self.layers.values():
            draw = torch.randperm(layer.in_features, generator=g)
            layer.set_channels(draw[: layer.channels.numel()].to(device))
        shape = cfg.batch_tokens // cfg.seq_len, cfg.seq_len + 1
        rows = torch.randint(self.model.embed.num_embeddings, shape, generator=g).to(device)
        self.inputs, self.targets = rows[:, :-1], rows[:, 1:]
        self.forward = torch.compile(self.model, dynamic=False) if mode == "whole" else self.model
        if mode == "compiled":
            compile_parts(self.model)

    def step(self, osci: OsciReset | None = None) -> Tensor:
        """ Forward, backward, clipping, AdamW, OsciReset; -> the loss, on the device. """
        self.counter.set(self.done)
        with autocast(self.device):
            ce, z, _ = self.forward(self.inputs, self.targets)
        ((ce + self.cfg.z_loss * z) / self.cfg.batch_tokens).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.clip or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if osci:
            osci.after_step(self.done)
        self.done += 1
        return ce.detach() / self.cfg.batch_tokens

    def timed(self, n: int, clock, osci: OsciReset | None = None) -> list[float]:
        """ Milliseconds of n steps, one after the other. """
        marks = [clock.mark()]
        for _ in range(n):
            self.step(osci)
            marks.append(clock.mark())
        return clock.between(list(zip(marks, marks[1:])))


def osci_share(cfg: Config, outside: float, opening: float, inside: float, closing: float) -> float:
    """
    Share of the training time that OsciReset takes. Arguments: milliseconds of a step outside of windows, of
    the step that opens one, of those in it, and of the last, which resets. Each window has one step that
    opens it, osci_window - 1 in it and one that closes it.
    """
    start, period, window = (cfg.in_steps(x) for x in (cfg.osci_start, cfg.osci_period, cfg.osci_window))
    # those that close before training ends: start + i * period + window < steps
    windows = max(0, -(-(cfg.steps - window - start) // period))
    extra = windows * (opening + (window - 1) * inside + closing - (window + 1) * outside)
    return extra / (extra + cfg.steps * outside)


def time_osci(training: Training, mode: str, outside: float, n: int, clock) -> dict[str, float]:
    """ Two windows of n steps, the first to warm up -> the milliseconds that osci_share() asks for. """
    first = training.done
    osci = OsciReset(training.layers, mode, first, n + 1, n, training.cfg.osci_tau, training.cfg.osci_track)
    training.timed(n + 1, clock, osci)
    opening, *inside, closing = training.timed(n + 1, clock, osci)
    return {"outside": outside, "opening": opening, "inside": median(inside), "closing": closing}


def check_training(training: Training, steps: int) -> tuple[float, float]:
    """ CheckFailed unless the loss on the one batch falls. """
    losses = [float(training.step()) for _ in range(steps)]
    need(all(map(math.isfinite, losses)) and losses[-1] < losses[0],
         f"{training.cfg.recipe}, {training.cfg.backend}: the loss of one batch went from {losses[0]:.4f} to "
         f"{losses[-1]:.4f} in {steps} steps")
    return losses[0], losses[-1]


def time_step(make: Callable[[], Training], n: int, clock, osci_modes: tuple[str, ...]) -> dict:
    """ One model, checked and timed -> raw numbers. """
    free()
    torch._dynamo.reset()
    training, start = make(), time.perf_counter()
    float(training.step())
    first = time.perf_counter() - start
    losses = check_training(training, WARMUP)
    torch.cuda.reset_peak_memory_stats()
    t = Timing.of(training.timed(n, clock))
    peak = torch.cuda.max_memory_allocated() / 2**30
    osci = {mode: time_osci(training, mode, t.median, n, clock) for mode in osci_modes}
    return {"ms": asdict(t), "first_step_seconds": first, "peak_gib": peak, "losses": losses, "osci": osci}


def step_rows(args: argparse.Namespace, report: Report, device: torch.device, size: str, mode: str, clock):
    """ All recipes of one size and mode: for each a row, and rows about OsciReset where it is on. """
    bf16 = None
    for recipe in args.recipes:
        for backend in ["-"] if recipe == "bf16" else args.backends or backends_here(device):
            tokens, raw = args.tokens, None
            while raw is None and tokens >= args.seq_len:
                print(f"{size} {mode} {recipe} {backend} {tokens} tokens", file=sys.stderr, flush=True)
                cfg = step_config(size, recipe, backend.replace("-", "reference"), device, tokens,
                                  args.seq_len)
                try:
                    raw = time_step(lambda: Training(cfg, device, mode), args.n, clock,
                                    ("topk", "full") if cfg.osci != "off" else ())
                except torch.OutOfMemoryError:
                    tokens = tokens // 2 // args.seq_len * args.seq_len
            report.row(size=size, mode=mode, recipe=recipe, backend=backend, tokens=tokens, result=raw)
            if raw is None:
                yield [size, mode, recipe, backend, "out of memory", *["-"] * 6], []
                continue
            t, first = Timing(**raw["ms"]), raw["first_step_seconds"]
            bf16 = t.median / tokens if recipe == "bf16" else bf16
            row = [size, mode, recipe, backend, f"{tokens:,}", f"{1e3 * tokens / t.median:,.0f}", t,
                   f"{t.median / tokens / bf16:.2f}" if bf16 else "-",
                   f"{first:.1f}" if mode != "eager" else "-", f"{raw['peak_gib']:.1f}", t.n]
            yield row, [[size, mode, recipe, backend, osci, *(f"{ms:.2f}" for ms in times.values()),
                         f"{100 * osci_share(cfg, **times):.2f}"] for osci, times in raw["osci"].items()]


def bench_step(args: argparse.Namespace):
    device = pick_device(args)
    report = Report(args, device)
    if device.type != "cuda":
        no_times(report, args, "four steps of the nano size are", "--recipes", "--backends")
        table = [["recipe", "first loss", "last loss", "steps"]]
        for recipe in args.recipes:
            cfg = step_config("nano", recipe, "reference", device, 256, 64)
            losses = check_training(Training(cfg, device, "eager"), 4)
            table.append([recipe, *(f"{loss:.4f}" for loss in losses), 4])
            report.row(recipe=recipe, losses=losses)
        report.say(markdown(table))
        return
    clock = CudaClock(device)
    head = ["size", "mode", "recipe", "back end", "tokens", "tokens/s", "ms/step", "time over bf16",
            "first step, s", "peak GiB", "n"]
    osci_head = ["size", "mode", "recipe", "back end", "osci", "ms outside", "ms opening", "ms inside",
                 "ms closing", "% of training"]
    report.say("Medians, and least to most, of whole steps of one micro-step each. Time over bf16: of a "
               "token, in the same mode. First step: with the compiler's time in it. OsciReset: a step "
               "outside of windows, the one that opens a window (n=1), those in it (median), the one that "
               "resets (n=1); and its share of a training of the size's config with such steps.")
    for size in args.sizes:
        for mode in args.modes:
            rows, osci_rows = [head], [osci_head]
            for row, osci in step_rows(args, report, device, size, mode, clock):
                rows.append(row)
                osci_rows += osci
                tables = [markdown(table) for table in (rows, osci_rows) if table[1:]]
                report.so_far(*tables)
            for table in tables:
                report.say(table)


# -----------------------------------------------------------------------------
# command line


def listed(kind: str, known) -> Callable[[str], list[str]]:
    """ The type of a flag that is a comma-separated list of names. """
    def read(text: str) -> list[str]:
        for name in (names := text.split(",")):
            if name not in known:
                there = ", ".join(known)
                raise argparse.ArgumentTypeError(f"no {kind} is called {name!r}; there are {there}")
        return names
    return read


def whole(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"\d+(_\d+)*", text) or not least <= int(text) <= 2**24:
            raise argparse.ArgumentTypeError(f"type a whole number from {least} to {2**24}, not {text!r}")
        return int(text)
    return read


def read_shapes(text: str) -> list[tuple[int, ...]]:
    if not re.fullmatch(r"\d{1,6}x\d{1,6}x\d{1,6}(,\d{1,6}x\d{1,6}x\d{1,6})*", text):
        raise argparse.ArgumentTypeError(f"shapes are TxKxN,TxKxN, such as 4096x1024x1024, not {text!r}")
    shapes = [tuple(map(int, shape.split("x"))) for shape in text.split(",")]
    if any(n % 16 or n == 0 for shape in shapes for n in shape):
        raise argparse.ArgumentTypeError("T, K and N are multiples of 16, as FP8 products want it")
    return shapes


def read_args(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description="Speed, measured here or computed.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="what", required=True, metavar="kernels, linear, step or model")

    def command(name: str, run: Callable, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, allow_abbrev=False)
        sub.set_defaults(run=run)
        where = "nowhere" if name == "model" else f"results/bench_{name}"
        sub.add_argument("--out", type=folder_name, help=f"folder of the result ({where})")
        sub.add_argument("--overwrite", action="store_true", help="replace the result in that folder")
        if name != "model":
            sub.add_argument("--device", default="auto", choices=CHOICES["device"][:3])
            fewest, fewer = (10, "") if name == "step" else (FEWEST, "; fewer of what takes seconds")
            sub.add_argument("--n", type=whole(fewest), default=20,
                             help=f"times that each is measured (20{fewer})")
        return sub
    model = command("model", bench_model, "the expected speed, computed")
    model.add_argument("--tokens", type=whole(1), default=4096, help="in a micro-step (4096)")
    model.add_argument("--d_model", type=lambda text: [whole(16)(d) for d in text.split(",")],
                       default=[1024, 2048, 4096, 8192, 16384], help="widths (1024,2048,4096,8192,16384)")
    model.add_argument("--ff", type=float, default=2.0,
                       help="d_ff over d_model (2, as in the paper's code; 4 in its 370M)")
    kernels = command("kernels", bench_kernels, "each kernel: GB/s, next to a copy")
    kernels.add_argument("--recipes", type=listed("rounding recipe", [r for r in RECIPES if r != "bf16"]),
                         default=["tetrajet_base"], help="whose rounding kernels (tetrajet_base)")
    linear = command("linear", bench_linear, "one linear, by shape")
    linear.add_argument("--shapes", type=read_shapes, help="TxKxN,... (squares from 1024 to 16384)")
    step = command("step", bench_step, "a whole training step")
    recipes = [name for name in RECIPES if (HERE / "configs" / f"{name}.py").exists()]
    step.add_argument("--recipes", type=listed("recipe", recipes),
                      default=["bf16", "tetrajet_base", "tetrajet_full"],
                      help="to compare with bf16, named first (bf16,tetrajet_base,tetrajet_full)")
    step.add_argument("--sizes", type=listed("size", SIZES), default=["70m", "370m", "d2048"],
                      help=f"of {', '.join(SIZES)} (70m,370m,d2048)")
    step.add_argument("--modes", type=listed("mode", ("eager", "compiled", "whole")),
                      default=["eager", "compiled"], help="eager, compiled, or whole: the model as one "
                      "program, not as blocks (eager,compiled)")
    step.add_argument("--seq_len", type=whole(1), default=1024, help="tokens of a sequence (1024)")
    step.add_argument("--tokens", type=whole(1), default=32768,
                      help="in a step, a multiple of seq_len; halved where memory does not allow it (32768)")
    for sub in (linear, step):
        sub.add_argument("--backends", type=listed("back end", CHOICES["backend"][1:]),
                         help="FP4 back ends to measure (all that run here)")
    parser.set_defaults(argv=argv, backends=None)
    args = parser.parse_args(argv)
    if args.what == "model" and not 0.01 <= args.ff <= 100:
        parser.error("--ff is from 0.01 to 100")
    if args.what == "step" and args.tokens % args.seq_len:
        parser.error(f"--tokens={args.tokens} is no multiple of --seq_len={args.seq_len}")
    return args


def main(argv: list[str] | None = None):
    args = read_args(sys.argv[1:] if argv is None else argv)
    try:
        if args.backends and (absent := set(args.backends) - set(backends_here(pick_device(args)))):
            raise BenchError(f"the back end {min(absent)} does not run on this device; "
                             f"type --backends={','.join(backends_here(pick_device(args)))}")
        args.run(args)
    except (BenchError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2)
    except OSError as error:
        print(f"error: cannot write {error.filename or 'the result'}: {error.strerror}; type --out=FOLDER",
              file=sys.stderr)
        raise SystemExit(2)
    except CheckFailed as error:
        print(f"error: {error}; nothing of it was timed", file=sys.stderr)
        raise SystemExit(1)
    except KeyboardInterrupt:
        print("\ninterrupted; each time that was measured is in the result's bench.json", file=sys.stderr)
        raise SystemExit(130)


if __name__ == "__main__":
    script(main)

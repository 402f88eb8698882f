"""
The expected time of a layer's linears on three GPUs, on paper: nothing here is measured, and nothing runs.

Rounding is bound by memory: a kernel takes the bytes that it must read and write over the bandwidth, and
overlaps with nothing. A product takes its operations over the peak rate, or its operands and result over the
bandwidth, whichever is longer. Real kernels stay below both, so these are the shortest times that one may
hope for. Every formula is in a docstring; `python bench.py model` prints the tables.

Left out: attention, norms, activation functions, the optimizer, launch overhead.

Letters used for shapes: T tokens, K input and N output features, C outlier channels.
"""
from dataclasses import dataclass

from quant import Operand
from recipes import MXFP8, NEAREST, STOCHASTIC

OUTLIER_SHARE = 0.1      # of the input channels, as configs/tetrajet_full.py has it


@dataclass(frozen=True)
class Gpu:
    """ Peak rates by the vendor's datasheets: dense, products summed in float32; TFLOP/s and GB/s. """
    name: str
    bf16: float
    fp8: float
    fp4: float
    bandwidth: float


# All from the vendor's (NVIDIA's) datasheets, dense: theirs, and nothing that was measured here.
# A GeForce has its FP8 rate halved when it sums in float32; the second row is its rate summing in fp16.
GPUS = (
    Gpu("RTX 5090", 209.5, 419.0, 1676.0, 1792.0),
    Gpu("RTX 5090, FP8 summed in fp16", 209.5, 838.0, 1676.0, 1792.0),
    Gpu("B200", 2250.0, 4500.0, 9000.0, 8000.0),
    Gpu("GB300", 2500.0, 5000.0, 15000.0, 8000.0),
)
METHODS = ("bf16", "fp8", "base", "full")

# What arXiv 2510.27527 reports, as summaries of it quote: speed over TransformerEngine's FP8 on an RTX 5090,
# base and full. Measured by its authors. By their released code, the time of a linear leaves the rounding of
# W out, and 1/8 of its channels are split off; a layer has attention and norms in it
PAPER = (("a linear", 1.94, 1.83), ("a transformer layer, end to end", 1.75, 1.67))


def bits(op: Operand) -> float:
    """ Storage of a value, scales counted, in whole blocks. """
    (rows, columns), element = op.block, 4 if op.grid == "e2m1" else 8
    return element + 8 / (rows * columns) + (32 / (rows * op.outer) if op.outer else 0)


def rounding_bytes(method: str, T: int, K: int, N: int, C: int) -> dict[str, float]:
    """
    Bytes that one fused kernel for each of X, W and dY reads and writes: x, w, dy.

        bf16  W     read float32, write bf16                             4 + 2 a value
        fp8   each  read, write E4M3 or E5M2 as it is and transposed     X, dY: 2 + 1 + 1     W: 4 + 1 + 1
              with delayed scaling, as TransformerEngine has it: no pass for the maximum
        base  each  read, write two packed operands of b = 4.75 / 8 bytes a value
              X -> Q1, Q6: 2 + 2 b     W -> Q2, Q4: 4 + 2 b     dY -> Q3, Q5: 2 + 2 b
        full  base, and MXFP8 at m = 8.25 / 8: of X's outlier columns two copies (for Y, and for dW), of W's
              one, and of dY one, whole, for the dW of these columns. In FP4 these columns are stored as zeros
    """
    if method == "bf16":
        return {"x": 0, "w": 6 * N * K, "dy": 0}
    if method == "fp8":
        return {"x": 4 * T * K, "w": 6 * N * K, "dy": 4 * T * N}
    b, m = (bits(NEAREST) + bits(STOCHASTIC)) / 8, bits(MXFP8) / 8 if method == "full" else 0
    return {"x": T * (K * (2 + b) + 2 * C * m), "w": N * (K * (4 + b) + C * m), "dy": T * N * (2 + b + m)}


def product_seconds(gpu: Gpu, kind: str, M: int, N: int, S: int, adds: bool = False) -> float:
    """
    (M, S) times (N, S)^T: the longer of 2 M N S operations at the peak, and of both operands read and the
    bf16 result written once at full bandwidth. adds: the result is added to what is there, so read as well.
    """
    value = {"bf16": 16, "fp8": 8, "mxfp8": bits(MXFP8), "fp4": bits(NEAREST)}[kind] / 8
    peak = {"bf16": gpu.bf16, "fp8": gpu.fp8, "mxfp8": gpu.fp8, "fp4": gpu.fp4}[kind]
    moved = (M + N) * S * value + M * N * (4 if adds else 2)
    return max(2 * M * N * S / (peak * 1e12), moved / (gpu.bandwidth * 1e9))


def linear_seconds(gpu: Gpu, method: str, T: int, K: int, N: int,
                   round_w: bool = True) -> tuple[float, float]:
    """
    Forward and backward time of one linear, on paper. Rounding is bound by memory and overlaps with nothing.

        forward   = bytes(X) + bytes(W, if round_w) over bandwidth, + Y
        backward  = bytes(dY) over bandwidth, + dX + dW
        full      Y and dW also have a product in MXFP8, at the rate of FP8, over or for C = K / 10 channels

    Q4 and Q6, which only the backward pass needs, are written by the forward's kernels and counted there.
    """
    C = round(OUTLIER_SHARE * K) if method == "full" else 0
    kind = method if method in ("bf16", "fp8") else "fp4"
    moved = rounding_bytes(method, T, K, N, C)
    forward = product_seconds(gpu, kind, T, N, K)
    backward = product_seconds(gpu, kind, T, K, N) + product_seconds(gpu, kind, N, K, T)
    if C:
        forward += product_seconds(gpu, "mxfp8", T, N, C, adds=True)
        backward += product_seconds(gpu, "mxfp8", N, C, T)
    per_byte = 1 / (gpu.bandwidth * 1e9)
    return forward + (moved["x"] + moved["w"] * round_w) * per_byte, backward + moved["dy"] * per_byte


def layer_shapes(d: int, ff: float) -> dict[str, tuple[int, int]]:
    """ K and N of a block's four linears, gate and up in one, as model.py has them. """
    d_ff = round(ff * d)
    return {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 2 * d_ff), "down": (d_ff, d)}


def roofline(gpu: Gpu, T: int, d: int, ff: float, round_w: bool = True) -> dict[str, dict]:
    """ linear -> method -> (forward, backward) in seconds; and their sum, as `all four`. """
    times = {name: {m: linear_seconds(gpu, m, T, K, N, round_w) for m in METHODS}
             for name, (K, N) in layer_shapes(d, ff).items()}
    return times | {"all four": {m: tuple(sum(t[m][i] for t in times.values()) for i in (0, 1))
                                 for m in METHODS}}

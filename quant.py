"""
Number formats, and a linear layer that computes all three of its GEMMs in them.

Three parts, each usable alone:

    1  rounding     a float32 -> a small floating-point grid (E2M1, E4M3, E5M2), nearest or stochastic
    2  formats      quantize(x, operand): blocks that share a scale (NVFP4, MXFP4, MXFP8), packing, rotation
    3  the linear   QuantLinear: Y = X W^T forward, dX and dW backward, six operands, six quantizers

This is the reference: plain PyTorch, any device, the same bits everywhere. It emulates: codes and scales are
exactly those of the format, and the GEMM multiplies their float32 values, so it is right and it is slow.

One rule makes the bits reproducible: every line of arithmetic below is float32 with one rounding per written
operation. Multiplying or dividing by a power of two, and masking the bits of a float, are exact.

What this file leaves out: which recipe uses which operand (recipes.py), resets of oscillating weights
(osci.py), the choice of outlier channels (outliers.py).

Letters used for shapes: T tokens, K input features, N output features of a linear; M, K rows and columns
of an operand. GEMM is the usual name of a matrix product. Every operand of every GEMM is stored with the
summed axis last, so there is one GEMM: a @ b.T.
"""
import json
import math
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# -----------------------------------------------------------------------------
# 1  rounding


@dataclass(frozen=True)
class Grid:
    """
    A floating-point grid: magnitudes 0, then 2^mbits evenly spaced values in each binade [2^e, 2^(e+1)).

    emin   exponent of the smallest normal binade; below 2^emin the spacing stays that of this binade
    mbits  stored mantissa bits
    max    largest magnitude; everything beyond saturates to it
    """
    emin: int
    mbits: int
    max: float

    @property
    def emax(self) -> int:
        """ Exponent of the largest binade. """
        return math.floor(math.log2(self.max))


GRIDS = {
    "e2m1": Grid(emin=0, mbits=1, max=6.0),         # FP4: 0 .5 1 1.5 2 3 4 6
    "e1m2": Grid(emin=0, mbits=2, max=1.75),        # uniform, as INT4 is: 0 .25 .5 ... 1.75
    "e4m3": Grid(emin=-6, mbits=3, max=448.0),      # FP8 for values, and the scale of NVFP4
    "e5m2": Grid(emin=-14, mbits=2, max=57344.0),   # FP8 with more range
}
E2M1, E4M3 = GRIDS["e2m1"], GRIDS["e4m3"]
NIBBLES = ("e2m1", "e1m2")                          # sign and three bits: two codes to a byte
# the formats of inner scales that have a mantissa. UE5M3 is unsigned, its top exponent is not used
SCALES = {"e4m3": E4M3, "ue5m3": Grid(emin=-14, mbits=3, max=61440.0)}


def binade(y: Tensor) -> Tensor:
    """ 2^floor(log2 |y|) for float32 y, by masking sign and mantissa away; 0 for zero and for subnormals. """
    return (y.view(torch.int32) & 0x7F800000).view(torch.float32)


def round_to_grid(y: Tensor, grid: Grid, noise: Tensor | None = None, up: bool = False) -> Tensor:
    """
    Round to a grid.

    in    y      float32, any shape
          noise  uniform in [0, 1), same shape: stochastic rounding, E[out] = y for |y| <= grid.max. So much
                 of a gap is added to the signed value, and the sum is rounded down
          up     the smallest grid value that is not below y, instead of the nearest
    out   float32, values of the grid, saturated at grid.max

    Nearest ties go to the even code. E2M1:
        .25 -> 0   .75 -> 1   1.25 -> 1   1.75 -> 2   2.5 -> 2   3.5 -> 4   5 -> 4
    edges  NaN stays NaN
    """
    y = y.clamp(-grid.max, grid.max)
    gap = binade(y).clamp_(min=2.0**grid.emin).mul_(2.0**-grid.mbits)      # distance between neighbours at y
    n = y / gap                                                            # exact: gap is a power of two
    if noise is not None:
        # the 128 rounds n and noise to 2^-16, and lets a GPU make noise out of bits in one step;
        # noise below 1 must not become 1
        n = n.add_(noise.add(128.0).clamp_(max=129 - 2.0**-16)).floor_().sub_(128.0)
    elif up:
        n = n.ceil_()
    else:
        # half to even, and even n is even code
        n = n.round_()
    # again, since noise next to 1 may carry the largest value one step further
    return n.mul_(gap).clamp_(-grid.max, grid.max)


def encode(value: Tensor, grid: Grid) -> Tensor:
    """
    Grid magnitudes (float32 >= 0, exactly on the grid) -> their codes, uint8. Codes count up with the value.
    """
    # a normal float32 already holds the code in its upper bits; only the exponent bias differs
    normal = (value.view(torch.int32) >> (23 - grid.mbits)) - ((grid.emin + 126) << grid.mbits)
    subnormal = (value * 2.0 ** (grid.mbits - grid.emin)).to(torch.int32)
    return torch.where(value >= 2.0**grid.emin, normal, subnormal).to(torch.uint8)


def decode(code: Tensor, grid: Grid) -> Tensor:
    """
    The inverse of encode: uint8 codes without sign -> float32.
    The all-ones code of E4M3 is NaN, as in OCP FP8.
    """
    code = code.to(torch.int32)
    normal = ((code + ((grid.emin + 126) << grid.mbits)) << (23 - grid.mbits)).view(torch.float32)
    value = torch.where(code >= 1 << grid.mbits, normal, code * 2.0 ** (grid.emin - grid.mbits))
    return torch.where(code == 0x7F, math.nan, value) if grid is E4M3 else value


# -----------------------------------------------------------------------------
# random numbers: Philox, addressed by a counter instead of drawn from a moving generator
#
# A draw is a pure function of (run seed, step, micro-step, rank, layer, stream, position).
# So there is nothing to save, a resumed run and a recomputed activation see the same numbers,
# and two draws with different addresses are independent. The first four live in a small tensor
# on the device that the training loop advances.

DX_SIGNS, DW_SIGNS = 8, 9      # streams of the two sign vectors; streams 1..6 are the noise of Q1..Q6
RESET_CHOICE, CHANNEL_CHOICE = 10, 11    # streams of the controls: random weights to reset, random channels
FIXED_SIGNS = 12               # stream of the sign vector that a whole run shares
NO_SIGNS = 0                   # in the place of such a stream: all signs are +1

_PHILOX_ROUNDS = 7             # the fewest that pass BigCrush (Salmon et al.); 10 is the usual number
_PHILOX_MUL = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY = (0x9E3779B9, 0xBB67AE85)
_MASK32 = 0xFFFFFFFF


class Counter:
    """
    Where in the run we are: .state is int64 (4,) on the device, [seed, step, micro-step, rank].

    One Counter is shared by all layers of a model. set() writes in place, so that compiled code and CUDA
    graphs, which hold the tensor, see the new values without a host sync.
    """

    def __init__(self, seed: int = 0, rank: int = 0, device: str | torch.device = "cpu"):
        self.state = torch.tensor([seed, 0, 0, rank], dtype=torch.int64, device=device)

    def to(self, device: str | torch.device) -> "Counter":
        self.state = self.state.to(device)
        return self

    def set(self, step: int, micro: int = 0):
        # fill_ passes the number with the launch; building a tensor here
        # would copy from unpinned memory and wait
        self.state[1].fill_(step)
        self.state[2].fill_(micro)

    def at(self, step: int) -> Tensor:
        """ The state at the start of a step on rank 0: for draws that all micro-steps and ranks share. """
        state = self.state.clone()
        state[1].fill_(step)
        state[2:].fill_(0)
        return state


def philox(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """
    Philox4x32-7: four 32-bit words of counter and two of key -> four 32-bit random words, all held in int64.

    source  Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"
    """
    c0, c1, c2, c3 = counter
    rounds = torch.arange(_PHILOX_ROUNDS, device=c0.device)
    keys = [((k + increment * rounds) & _MASK32).unbind() for k, increment in zip(key, _PHILOX_KEY)]
    for k0, k1 in zip(*keys):
        # the int64 product wraps around, but its 64 bits are those of the unsigned product
        p0, p1 = c0 * _PHILOX_MUL[0], c2 * _PHILOX_MUL[1]
        c0, c2 = ((p1 >> 32) ^ c1 ^ k0) & _MASK32, ((p0 >> 32) ^ c3 ^ k1) & _MASK32
        # their lower halves; the upper ones are masked a round later
        c1, c3 = p1, p0
    return [c0, c1 & _MASK32, c2, c3 & _MASK32]


def random_words(n: int, counter: Tensor, layer: int, stream: int) -> list[Tensor]:
    """
    n groups of four random 32-bit words -> four int64 tensors (n,).

    The address of group g: key = the two halves of the seed, counter words = (g, step, micro * 2^16 + rank,
    layer * 16 + stream). Different addresses never meet as long as micro and rank stay below 65,536.
    """
    seed, step, micro, rank = counter.unbind()
    group = torch.arange(n, device=counter.device)
    words = [group, step & _MASK32, (micro << 16) + rank & _MASK32,
             torch.full_like(step, layer * 16 + stream)]
    return philox(words, [seed & _MASK32, seed >> 32 & _MASK32])


def uniform(shape: tuple[int, int], counter: Tensor, layer: int, stream: int) -> Tensor:
    """
    Noise for stochastic rounding -> float32 (M, K), values k / 2^16, k of 16 bits.

    Eight values share one Philox call, 16 bits each, low half of a word first; a row starts with a fresh
    group. With that, a value is rounded up with the probability that it should be, rounded to 2^-16: never
    where it should not at all, and too often by as much as too rarely. A value closer than 2^-17 of a gap to
    a neighbour always goes there.
    """
    M, K = shape
    groups = -(-K // 8)
    noise = torch.empty(M * groups, 4, 2, device=counter.device)
    for i, word in enumerate(random_words(M * groups, counter, layer, stream)):
        noise[:, i, 0] = word & 0xFFFF
        noise[:, i, 1] = word >> 16
    return noise.mul_(2.0**-16).view(M, groups * 8)[:, :K]


def random_signs(n: int, counter: Tensor, layer: int, stream: int) -> Tensor:
    """
    n random signs, float32 (n,) of +1 and -1: bit j % 32 of word j // 32. Those of stream FIXED_SIGNS are a
    function of the run's seed alone.
    """
    if stream == NO_SIGNS:
        return torch.ones(n, device=counter.device)
    if stream == FIXED_SIGNS:
        counter, layer = counter.clone(), 0
        counter[1:].zero_()
    words = torch.stack(random_words(-(-n // 128), counter, layer, stream), dim=-1).flatten()
    bits = words[:, None] >> torch.arange(32, device=words.device) & 1
    return 1.0 - 2.0 * bits.flatten()[:n].float()


def random_subset(n: int, count: int, counter: Tensor, layer: int, stream: int) -> Tensor:
    """ `count` different numbers below n, every subset as likely as every other: int64 (count,). """
    words = torch.stack(random_words(-(-n // 4), counter, layer, stream), dim=-1).flatten()[:n]
    # equal words are told apart by their position, so that the choice is the same on every device
    return (words << 31 | torch.arange(n, device=words.device)).sort().indices[:count]


def hadamard(x: Tensor, signs: Tensor) -> Tensor:
    """
    Random Hadamard transform of the last axis:
    each block of n = len(signs) values times diag(signs) H_n / sqrt(n).

    in    x      (..., K), any float dtype
          signs  (n,) of +1 and -1, n a power of two; the same for all blocks
    out   float32 (..., K rounded up to a multiple of n);
          the missing values of a ragged last block count as zeros

    H_n is the Sylvester matrix, H_2n = [[H, H], [H, -H]]. The matrix is orthogonal,
    so a GEMM whose two operands are both rotated along the summed axis is unchanged,
    while a single large value is spread over its block.
    """
    n = signs.numel()
    assert n & (n - 1) == 0 and n > 0, f"a Hadamard block has a power of two values, not {n}"
    *lead, K = x.shape
    y = F.pad(x.float(), (0, -K % n)).reshape(-1, n) * signs
    # butterfly: log2(n) passes that turn neighbours (a, b) into a + b in the lower half of the block and
    # a - b in the upper one. Each moves the lowest bit of the position to the top, so after log2(n) of them
    # every bit has had its turn and is back in its place. One order of additions: the same bits everywhere
    for _ in range(n.bit_length() - 1):
        a, b = y.view(-1, n // 2, 2).unbind(2)
        y = torch.empty_like(y)
        torch.add(a, b, out=y[:, : n // 2])
        torch.sub(a, b, out=y[:, n // 2 :])
    return (y * n**-0.5).view(*lead, K + -K % n)


# -----------------------------------------------------------------------------
# 2  formats: blocks of grid values that share a scale

TENSOR = -1                # Operand.outer: one outer scale for the whole tensor
TINY = 2.0**-100           # a block whose largest magnitude is below this counts as all zeros
E8M0_SMALLEST = 2.0**-127  # E8M0 has no zero: a block of zeros stores this
QUEST_TOP = 2.92247856     # rule quest: the root mean squares that the largest grid value stands for
NORMAL_GAIN = 1.009276     # rule 3/4, rtn: makes up for what rounding shortens


RULES = {                  # format of the inner scale -> how it can be rounded
    "e4m3": ("nearest", "up", "17/16", "4/6", "eden"),
    "ue5m3": ("nearest", "up", "17/16", "4/6"),
    "e8m0": ("ceil", "floor", "quest", "3/4"),
    "none": ("max",),
}


@dataclass(frozen=True)
class Operand:
    """
    How one operand of one GEMM is rounded. The default is the operand of TetraJet-v2's forward pass.

    grid      values: a key of GRIDS
    block     (rows, columns) that share an inner scale; columns run along the summed axis
    scale     format of the inner scale: e4m3, ue5m3, e8m0 (a power of two), or none: the outer one alone
    outer     columns that share a float32 outer scale: 128, TENSOR for one in all, 0 for none
    rule      how the inner scale is rounded
              e4m3, ue5m3:
                     nearest  may round down: then the block's own maximum lands above the grid and is clipped
                     up       the smallest value not below: nothing clips, so stochastic rounding is unbiased
                     17/16    nearest, with 17/16 head-room: nothing clips either, as long as the scale is no
                              subnormal (in E4M3, 2^-6 or more)                     [Quartet II, 2601.22813]
                     4/6      nearest, the maximum at 6 or at 4, whichever has the smaller squared error; the
                              scale's own maximum counts as 256; sr has the head-room of 17/16 and is biased
                              by the choice                                      [Four Over Six, 2512.02010]
                     eden     nearest, for rounding eden: 6 becomes 6 * 16/17 / .93, which clips a little, and
                              the scale's own maximum counts as 256            [Quartet II, 2601.22813]
              e8m0:  ceil     2^ceil(log2(max / grid max)): nothing clips            [TetraJet v1, 2502.20853]
                     floor    2^(floor(log2 max) - floor(log2 grid max))             [OCP MX specification]
                     quest    2^floor(log2(2.92247856 / grid max * rms))             [Quartet, 2505.14669]
                     3/4      floor / (3/4): nothing clips. Under rtn, values are then 1.009276 times as
                              large, which makes up for what rounding shortens, in the mean   [Quartet, v4]
              none:  max      the outer scale is max / grid max
              "" picks nearest for rtn and up for sr (e4m3, ue5m3), ceil (e8m0), max (none), eden for eden
    rounding  rtn (nearest, ties to even), sr (stochastic), or eden: values to nearest, then each block's
              scale is corrected and rounded stochastically. With half the error of sr, and no bias over
              random rotations; almost none over those that random signs make  [Quartet II, 2601.22813]
    hadamard  rotate blocks of this many values along the summed axis before rounding;
              0 for none. quantize() does not rotate by itself: the two operands of a GEMM share
              one sign vector, which the linear draws
    signs     of that rotation: fresh for each layer, GEMM and micro-step; fixed, one vector drawn from the
              run's seed for all layers and steps; none, all +1
    """
    grid: str = "e2m1"
    block: tuple[int, int] = (1, 16)
    scale: str = "e4m3"
    outer: int = 128
    rule: str = ""
    rounding: str = "rtn"
    hadamard: int = 0
    signs: str = "fresh"

    def __post_init__(self):
        object.__setattr__(self, "block", tuple(self.block))
        _one_of("grid", self.grid, GRIDS)
        _one_of("scale", self.scale, RULES)
        _one_of("rounding", self.rounding, ("rtn", "sr", "eden"))
        _one_of("signs", self.signs, ("fresh", "fixed", "none"))
        if not self.rule:
            usual = {"sr": "up", "eden": "eden"}.get(self.rounding, "nearest")
            object.__setattr__(self, "rule", {"e8m0": "ceil", "none": "max"}.get(self.scale, usual))
        _one_of(f"rule for {self.scale} scales", self.rule, RULES[self.scale])
        if any(type(n) is not int or n > 2**20 for n in (*self.block, self.outer, self.hadamard)):
            raise ValueError("block, outer and hadamard are whole numbers up to 2^20, not "
                             f"{self.block}, {self.outer!r} and {self.hadamard!r}")
        if len(self.block) != 2 or min(self.block) < 1:
            raise ValueError(f"block is (rows, columns), both at least 1, not {self.block}")
        if self.outer not in (0, TENSOR) and (self.outer < 0 or self.outer % self.block[1]):
            raise ValueError(f"outer is 0, TENSOR or a multiple of the block's {self.block[1]} columns, "
                             f"not {self.outer}")
        if self.scale == "e8m0" and self.outer:
            raise ValueError("an e8m0 scale has the range of float32 and takes no outer scale: set outer=0")
        if self.scale == "none" and not self.outer:
            raise ValueError("without an inner scale there has to be an outer one: set outer=TENSOR")
        if self.rule == "4/6" and self.grid != "e2m1":
            raise ValueError(f"rule 4/6 is about the grid values 4 and 6: set grid='e2m1', not {self.grid!r}")
        if (self.rounding == "eden") != (self.rule == "eden") or self.rule == "eden" and self.grid != "e2m1":
            raise ValueError("rounding eden, rule eden and grid e2m1 go together: "
                             f"not {self.rounding}, {self.rule} and {self.grid}")
        if self.hadamard < 0 or self.hadamard & (self.hadamard - 1):
            raise ValueError(f"hadamard is 0 or a power of two, not {self.hadamard}")

    @property
    def value_grid(self) -> Grid:
        return GRIDS[self.grid]

    @property
    def bits(self) -> int:
        """ Of a value's code. """
        return 4 if self.grid in NIBBLES else 8

    @property
    def scale_grid(self) -> Grid | None:
        """ That of the inner scales; None where they have no mantissa. """
        return SCALES.get(self.scale)

    @property
    def head_room(self) -> float:
        """ The part of the largest grid value that a block's maximum is meant to land on. """
        with_noise = 16 / 17 if self.stochastic else 1.0
        return {"17/16": 16 / 17, "4/6": with_noise, "eden": 16 / 17 / 0.93}.get(self.rule, 1.0)

    @property
    def reach(self) -> float:
        """ The largest inner scale, under an outer one; 4/6 and eden leave room to make it larger. """
        return 256.0 if self.rule in ("4/6", "eden") else self.scale_grid.max if self.scale_grid else 1.0

    @property
    def stochastic(self) -> bool:
        """ Whether it takes noise: sr one number for each value, eden one for each block, its first. """
        return self.rounding in ("sr", "eden")


def _one_of(what: str, value: str, allowed):
    if value not in allowed:
        raise ValueError(f"{what} is one of {', '.join(allowed)}, not {value!r}")


@dataclass
class Quantized:
    """
    A quantized matrix: value = code * (inner * outer).

    code   uint8, shape of the input. 4-bit grids: bits 0-2 the magnitude, bit 3 the sign. 8-bit: sign bit 7
    inner  uint8 (M / block rows, K / block columns), rounded up: the bytes of the scales; ones for none
    outer  float32 (M / block rows, K / outer), () for one in all, None without outer scales
    """
    code: Tensor
    inner: Tensor
    outer: Tensor | None
    operand: Operand

    def dequantize(self) -> Tensor:
        """ The values, float32, shape of the input. """
        blocks = _to_blocks(_rows(grid_value(self.code, self.operand)), self.operand)
        return _from_blocks(blocks * self.scale()[:, None, :, None], self.code.shape)

    def scale(self) -> Tensor:
        """ Inner times outer scale of each block, float32, shape of inner. """
        return _full_scale(_scale_value(self.inner, self.operand), self.outer, self.operand)

    def bits_per_value(self) -> float:
        """ Storage, all scales counted: 4.75 for the double block on whole blocks. """
        element = self.operand.bits
        inner = 0 if self.operand.scale == "none" else 8 * self.inner.numel()
        outer = 0 if self.outer is None else 32 * self.outer.numel()
        return element + (inner + outer) / max(1, self.code.numel())


def _sign_bit(op: Operand) -> int:
    return op.bits - 1


def grid_value(code: Tensor, op: Operand) -> Tensor:
    """ Codes with their sign bit, any shape -> grid values with sign, float32. """
    magnitude = decode(code & (1 << _sign_bit(op)) - 1, GRIDS[op.grid])
    return torch.where(code >> _sign_bit(op) != 0, -magnitude, magnitude)


def quantize(x: Tensor, operand: Operand, noise: Tensor | None = None) -> Quantized:
    """
    Round a matrix to a block format.

    in    x        (..., K) any float dtype; leading axes count as rows. Blocks run along the last axis
          operand  the format; its hadamard field is the linear's business and is ignored here
          noise    uniform in [0, 1), shape of x, for operand.rounding == "sr": so much of a gap is added
                   to the signed value before it is rounded down;
                   without it, torch's generator draws
    out   Quantized

    source  TetraJet-v2, arXiv 2510.27527, double-block quantization: for E2M1 values with E4M3 scales
                outer  S = (max |x| over 128 / 448) / 6
                inner  s = e4m3((max |x| over 16 / S) / 6)
                code   c = e2m1(x * (1 / (s * S)))
                value  v = c * (s * S)
    differs the released kernels round s to nearest under stochastic rounding too,
            which is biased; see Operand.rule
    edges   ragged last blocks behave as if padded with zeros
            a block of zeros gives exact zeros; one whose largest magnitude is below 2^-100 counts as zeros
            s underflows to 0: rtn stores code 0; sr uses the smallest scale above 0 instead (E4M3: 2^-9), so
            that it stays unbiased
            a NaN or Inf makes its whole outer block NaN (the block, where there is no outer scale)
            a magnitude above 2^127 may round to 2^128, which is Inf in float32
            the sign of x is kept, also where the magnitude rounds to zero
    """
    c, inner, outer = _round(x, operand, noise)
    grid = GRIDS[operand.grid]
    sign = torch.signbit(x).to(torch.uint8) << _sign_bit(operand)
    # a NaN lies in a block whose scale is NaN: any code will do, but on every device the same
    return Quantized(
        encode(c.abs().nan_to_num_(0.0), grid) | sign, _scale_byte(inner, operand), outer, operand)


def fake_quantize(x: Tensor, operand: Operand, noise: Tensor | None = None) -> Tensor:
    """
    quantize(...).dequantize() bit for bit, without building the codes: what training uses.
    """
    c, inner, outer = _round(x, operand, noise)
    blocks = _to_blocks(_rows(c), operand)
    return _from_blocks(blocks * _full_scale(inner, outer, operand)[:, None, :, None], x.shape)


def _round(x: Tensor, op: Operand, noise: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """ -> signed grid values (shape of x), inner scales (rows, blocks), outer scales; all float32. """
    if not x.is_floating_point() or x.dim() == 0:
        raise ValueError("a format rounds floating-point tensors with an axis, "
                         f"not {x.dtype} {list(x.shape)}")
    if noise is not None and noise.shape != x.shape:
        raise ValueError(f"noise has the shape of x, {list(x.shape)}, not {list(noise.shape)}")
    x = x.detach()
    if op.stochastic and noise is None:
        noise = torch.randint(2**16, x.shape, device=x.device).mul(2.0**-16)
    if not op.stochastic and noise is not None:
        raise ValueError("noise is for stochastic rounding: "
                         "set rounding='sr' in the Operand or leave noise out")
    flat = _rows(x.float())
    blocks = _to_blocks(flat, op)                                          # (R, rows, C, columns)
    if noise is not None:
        noise = _to_blocks(noise.reshape(flat.shape), op)
    amax = blocks.abs().amax(dim=(1, 3))                                   # (R, C)
    inner, outer = _scales(blocks, amax, op)
    c = _grid_values(blocks, _full_scale(inner, outer, op), op, noise)
    if op.rule == "4/6":
        c, inner = _four_over_six(blocks, amax, c, inner, outer, op, noise)
    if op.rounding == "eden":
        inner = _eden(blocks, c, inner, outer, op, noise)
    if op.rule == "3/4" and not op.stochastic:
        outer = outer * NORMAL_GAIN
    return _from_blocks(c, x.shape), inner, outer


def _grid_values(blocks: Tensor, scale: Tensor, op: Operand, noise: Tensor | None) -> Tensor:
    """ Blocks (R, rows, C, columns) rounded at their scales (R, C) -> signed grid values. """
    # what rounds to zero keeps its sign
    y = _in_scales(blocks, scale)
    return round_to_grid(y, GRIDS[op.grid], noise if op.rounding == "sr" else None).copysign_(blocks)


def _in_scales(blocks: Tensor, scale: Tensor) -> Tensor:
    """ Blocks (R, rows, C, columns) divided by their scales (R, C). """
    # 0 where the scale is NaN, zero, or E8M0's stand-in for zero, perhaps times 4/3, which no block that
    # counts can reach
    # (R, C): one exact division per block
    inv_scale = torch.where(scale > 2 * E8M0_SMALLEST, 1.0 / scale, 0.0)
    return blocks * inv_scale[:, None, :, None]


def _scales(blocks: Tensor, amax: Tensor, op: Operand, top: float = 0.0) -> tuple[Tensor, Tensor | None]:
    """
    Blocks (R, rows, C, columns) and their maxima (R, C) -> inner scales (R, C) and outer scales, float32.
    top is the grid value that a block's maximum goes to, 0 for the rule's own.
    """
    grid_max, grid = op.value_grid.max, op.scale_grid
    # the largest magnitude that each block shares a fate with:
    # if it is not finite all is NaN, if it is tiny all is 0
    if op.outer == TENSOR:
        outer_amax = amax.amax() if amax.numel() else amax.new_zeros(())
    elif op.outer:
        per_outer = op.outer // op.block[1]
        outer_amax = F.pad(amax, (0, -amax.shape[1] % per_outer)).unflatten(1, (-1, per_outer)).amax(dim=2)
    else:
        outer_amax = amax
    fate = outer_amax if op.outer == 0 else _spread(outer_amax, amax.shape, op)
    amax = torch.where(fate < TINY, 0.0, amax)
    if op.scale == "e8m0":
        # 3/4 is no power of two, so its inverse is an outer scale; 1 / (4/3) in float32 is 3/4 exactly
        outer = amax.new_full((), 4 / 3) if op.rule == "3/4" else None
        return torch.where(fate.isfinite(), _power_of_two(blocks, amax, op), math.nan), outer

    outer = outer_scale(outer_amax, op) if op.outer else None
    if grid is None:
        return torch.ones_like(amax), outer
    if op.outer:
        amax = amax / _spread(outer, amax.shape, op)
    inner = round_to_grid(_over(amax, (top or grid_max) * op.head_room), grid, up=op.rule == "up")
    if op.stochastic:
        inner = inner.clamp(min=2.0 ** (grid.emin - grid.mbits))
    # where an outer scale carries the NaN, the inner one stays an ordinary number
    return torch.where(fate.isfinite(), inner, math.nan if outer is None else 0.0), outer


def outer_scale(amax: Tensor, op: Operand) -> Tensor:
    """ The outer scales for these largest magnitudes, float32, any shape; NaN for what is not finite. """
    outer = _over(_over(amax, op.reach), op.value_grid.max * op.head_room)
    return torch.where(amax.isfinite(), torch.where(amax < TINY, 1.0, outer), math.nan)


def _power_of_two(blocks: Tensor, amax: Tensor, op: Operand) -> Tensor:
    """ The E8M0 scales of blocks (R, rows, C, columns) with these maxima (R, C), by op.rule. """
    grid_max = GRIDS[op.grid].max
    if op.rule == "ceil":
        q = _over(amax, grid_max)
        low = binade(q)
        inner = torch.where(low < q, 2 * low, low)
    elif op.rule == "quest":
        # squares of values near 1 cannot overflow
        unit = binade(amax)
        near_1 = blocks / unit.clamp(min=TINY)[:, None, :, None]
        rms = _over(_sum(near_1.square()), op.block[0] * op.block[1]).sqrt()
        inner = binade(rms * (QUEST_TOP / grid_max)) * unit
    else:
        inner = binade(amax) * 2.0**-op.value_grid.emax
    return inner.clamp(min=E8M0_SMALLEST)


def _four_over_six(blocks: Tensor, amax: Tensor, c: Tensor, inner: Tensor, outer: Tensor | None, op: Operand,
                   noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """
    Each block with its maximum at 6, as given, or at 4 -> grid values and inner scales of what is nearer.

    source  Four Over Six, arXiv 2512.02010: between 4 and 6 E2M1 has nothing, so a maximum at 4 can be better
    differs that code multiplies the unrounded scale by 1.5, here the maximum is divided by 4: E4M3 may round
            the two to neighbours where they are half-way between them
    edges   at equal errors, 6. With stochastic rounding the choice looks at the noise, which makes it biased
    """
    inner_4 = _scales(blocks, amax, op, top=4.0)[0]
    # noise of its own for the second rounding, of the same 16 bits: times an odd number is a permutation of
    # them, here with a correlation of 1/181, and exact in float32
    noise_4 = None if noise is None else (noise * 181.0).frac()
    c_4 = _grid_values(blocks, _full_scale(inner_4, outer, op), op, noise_4)
    # in units of a power of two below the maximum, so that no square leaves float32
    unit = binade(amax).clamp(min=TINY)
    near_1 = blocks / unit[:, None, :, None]
    error, error_4 = (_sum((near_1 - values * (_full_scale(s, outer, op) / unit)[:, None, :, None]).square())
                      for values, s in ((c, inner), (c_4, inner_4)))
    return (torch.where((error_4 < error)[:, None, :, None], c_4, c),
            torch.where(error_4 < error, inner_4, inner))


def _eden(blocks: Tensor, c: Tensor, inner: Tensor, outer: Tensor | None, op: Operand,
          noise: Tensor) -> Tensor:
    """
    Inner scales (R, C) under which blocks rounded to c have the right projection on themselves, in the mean.

    source  MS-EDEN of Quartet II, arXiv 2601.22813: f = <x, x> / <x, v> with v the rounded block, and
            s' = e4m3(f s), stochastic. Over uniformly random rotations E[v'] = x. Random signs are fewer: the
            mean is off by 2e-4 of a normal vector, by 3e-3 where one of its 128 values is 30 times as large
    differs f is that of each 16 values, as in the paper; its code takes a whole rotation's
            x is in units of the scale, so that no square leaves float32
    edges   a block that was rounded to zeros keeps its scale
    """
    y = _in_scales(blocks, _full_scale(inner, outer, op))
    norm, projection = _sum(y.square()), _sum(y * c)
    factor = torch.where(projection > 0, norm / projection, 1.0)
    return round_to_grid(inner * factor, E4M3, noise[:, 0, :, 0])


def _sum(blocks: Tensor) -> Tensor:
    """
    The sum of each block (R, rows, C, columns) -> (R, C): neighbours first, then neighbouring pairs, and so
    on, as if padded with zeros to a power of two. One order of additions: the same bits on every device.
    """
    x = blocks.transpose(1, 2).flatten(2)
    n = x.shape[2]
    x = F.pad(x, (0, (1 << (n - 1).bit_length()) - n))
    while x.shape[2] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def _over(x: Tensor, number: float) -> Tensor:
    """
    x / number, rounded once. With a Python number PyTorch's CUDA kernel multiplies by 1 / number: other bits.
    """
    return x / x.new_full((), number)


def _spread(outer: Tensor, shape: torch.Size, op: Operand) -> Tensor:
    """ Outer values repeated to one per inner block, shape (R, C). """
    if outer.dim() == 0:
        return outer.expand(shape)
    return outer.repeat_interleave(op.outer // op.block[1], dim=1)[:, : shape[1]]


def _full_scale(inner: Tensor, outer: Tensor | None, op: Operand) -> Tensor:
    """ s * S, one rounding, (R, C). """
    return inner if outer is None else inner * _spread(outer, inner.shape, op)


def _scale_byte(scale: Tensor, op: Operand) -> Tensor:
    """ Scale values -> bytes; NaN -> 0x7F (E4M3) or 0xFF (UE5M3, E8M0). """
    nan = scale.isnan()
    if op.scale in SCALES:
        byte = encode(torch.where(nan, 0.0, scale), SCALES[op.scale]).int()
        return torch.where(nan, 0x7F if op.scale == "e4m3" else 0xFF, byte).to(torch.uint8)
    if op.scale == "none":
        return scale.to(torch.uint8)
    # a power of two is its own exponent field; 2^-127 is subnormal, field 0, as E8M0 wants it
    return torch.where(nan, 0xFF, scale.view(torch.int32) >> 23).to(torch.uint8)


def _scale_value(byte: Tensor, op: Operand) -> Tensor:
    """ The inverse of _scale_byte, float32. """
    field = byte.to(torch.int32)
    if op.scale == "e4m3":
        return decode(byte, E4M3)
    if op.scale == "none":
        return byte.float()
    value = (decode(byte, SCALES["ue5m3"]) if op.scale == "ue5m3" else
             torch.where(field == 0, E8M0_SMALLEST, (field << 23).view(torch.float32)))
    return torch.where(field == 0xFF, math.nan, value)


def _rows(x: Tensor) -> Tensor:
    """ (..., K) -> (M, K). Spelled out because reshape(-1, K) cannot tell M of an empty tensor. """
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _to_blocks(x: Tensor, op: Operand) -> Tensor:
    """ (M, K) -> (R, rows, C, columns), padded with zeros to whole blocks. """
    rows, columns = op.block
    M, K = x.shape
    if M % rows or K % columns:
        x = F.pad(x, (0, -K % columns, 0, -M % rows))
    return x.reshape(-(-M // rows), rows, -(-K // columns), columns)


def _from_blocks(blocks: Tensor, shape: torch.Size) -> Tensor:
    """ The inverse of _to_blocks, cut back to shape (..., K). """
    R, rows, C, columns = blocks.shape
    M, K = math.prod(shape[:-1]), shape[-1]
    return blocks.reshape(R * rows, C * columns)[:M, :K].reshape(shape).contiguous()


def trust_mask(x: Tensor, op: Operand) -> Tensor:
    """
    Where quantize(x, op) clips nothing: bool, shape of x.

    source  Quartet, arXiv 2505.14669: the mask |x / s| < 6 of its QuEST quantizer
    differs a value that a scale of zero rounds to zero was not clipped, and is trusted
    """
    c, inner, outer = _round(x, op, None)
    blocks, top = _to_blocks(_rows(x.float()), op), GRIDS[op.grid].max
    beyond = blocks.abs() >= (top * _full_scale(inner, outer, op))[:, None, :, None]
    return (c.abs() < top) | ~_from_blocks(beyond, x.shape)


def pack(code: Tensor) -> Tensor:
    """
    E2M1 codes (..., K) -> two to a byte along K, (..., K/2 rounded up); the even column in the low nibble.
    """
    code = F.pad(code, (0, code.shape[-1] % 2))
    return code[..., 0::2] | code[..., 1::2] << 4


def unpack(packed: Tensor, K: int) -> Tensor:
    """ The inverse of pack, for K columns. """
    if packed.shape[-1] != -(-K // 2):
        raise ValueError(f"{K} codes fill {-(-K // 2)} bytes a row, not {packed.shape[-1]}")
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :K]


# -----------------------------------------------------------------------------
# 3  the linear

BACKENDS = ("reference", "emulate", "packed", "native")


@dataclass(frozen=True)
class Recipe:
    """
    How the six operands of a linear's three GEMMs are rounded. None keeps that operand in the compute dtype
    (bf16 under autocast): the original tensor, not the rounded one of another operand.

                  operand       of the GEMM           stored as    in the paper
        y_x       X             Y  = X   @ W.T        (T, K)       Q1
        y_w       W                                   (N, K)       Q2
        dx_dy     dY            dX = dY  @ W          (T, N)       Q3
        dx_w      W^T                                 (K, N)       Q4
        dw_dy     dY^T          dW = dY.T @ X         (N, T)       Q5
        dw_x      X^T                                 (K, T)       Q6

    align     Q4 and Q6 round the forward's rounded tensors, Q2(W) and Q1(X), so that the gradient
              is that of the function the forward pass really computed; False rounds the originals
    outlier   format of the outlier channels that OutControl picked (outliers.py), "bf16" for the compute
              dtype
    trust     an entry of X or W that the forward pass clipped gets no gradient: Quartet's trust mask

    Where the forward pass rotates, Q2(W) and Q1(X) are rounded in rotated coordinates; gradients that are
    made from them are turned back. Its signs cannot be fresh: evaluation has to see the function that was
    trained.
    """
    y_x: Operand | None = None
    y_w: Operand | None = None
    dx_dy: Operand | None = None
    dx_w: Operand | None = None
    dw_dy: Operand | None = None
    dw_x: Operand | None = None
    align: bool = True
    outlier: Operand | str | None = None
    trust: bool = False

    def __post_init__(self):
        if type(self.align) is not bool or type(self.trust) is not bool:
            raise ValueError(f"align and trust are True or False, not {self.align!r} and {self.trust!r}")
        for a, b, gemm in (
            (self.dx_dy, self.dx_w, "dX"), (self.dw_dy, self.dw_x, "dW"), (self.y_x, self.y_w, "Y"),
        ):
            if a and b and (a.hadamard, a.signs) != (b.hadamard, b.signs):
                raise ValueError(f"the operands of {gemm} must rotate alike, not by {a.hadamard} "
                                 f"({a.signs} signs) and {b.hadamard} ({b.signs} signs)")
        forward = [op for op in (self.y_x, self.y_w) if op and op.hadamard]
        if any(op.signs == "fresh" for op in forward):
            raise ValueError("the forward pass must rotate alike at every step: its signs are fixed or none")
        if forward and self.outlier:
            raise ValueError("a recipe that rotates the forward pass has no outlier channels: "
                             "a rotation mixes them with the others")
        if not isinstance(self.outlier, Operand) and self.outlier not in (None, "bf16"):
            raise ValueError(f"outlier is an Operand, 'bf16' or None, not {self.outlier!r}")

    @property
    def operands(self) -> tuple[Operand | None, ...]:
        """ Q1..Q6 in the paper's order. """
        return self.y_x, self.y_w, self.dx_dy, self.dx_w, self.dw_dy, self.dw_x

    def only(self, numbers) -> "Recipe":
        """ The same recipe with every quantizer off but these (1..6). """
        return replace(self, **{f.name: None for i, f in enumerate(fields(self)[:6], 1) if i not in numbers})

    def spec(self) -> str:
        """ The recipe as JSON: hashable, comparable, and what a custom op can take as an argument. """
        return json.dumps(asdict(self))

    @staticmethod
    @lru_cache
    def from_spec(spec: str) -> "Recipe":
        """ The inverse of spec(). """
        d = json.loads(spec)
        return Recipe(**{k: Operand(**v) if isinstance(v, dict) else v for k, v in d.items()})


def rotation(a: Operand | None, b: Operand | None) -> int:
    """ Size of the rotation that a GEMM's two operands share; it stays when one of them is not quantized. """
    return max(op.hadamard if op else 0 for op in (a, b))


def sign_stream(a: Operand | None, b: Operand | None, fresh: int) -> int:
    """ The stream of the signs of that rotation; fresh is the one of signs that are always new. """
    kind = next((op.signs for op in (a, b) if op and op.hadamard), "none")
    return {"fresh": fresh, "fixed": FIXED_SIGNS, "none": NO_SIGNS}[kind]


def inherited(r: Recipe, op: Operand | None) -> int:
    """ Size of the forward's rotation in whose coordinates Q4 or Q6 finds its tensor. """
    return rotation(r.y_x, r.y_w) if op and r.align else 0


def _turn_back(grad: Tensor, signs: Tensor | None, turned: bool, trust: Tensor, K: int) -> Tensor:
    """
    A gradient (M, K), or, if turned, (M, K up to whole blocks) in the coordinates of hadamard(signs) -> the
    gradient (M, K) in its own coordinates. Where trust, in the forward's coordinates, is false, it is zero.
    """
    if trust.numel():
        if signs is not None and not turned:
            grad, turned = hadamard(grad, signs), True
        grad = grad * trust
    if signs is None or not turned:
        return grad
    # the Hadamard matrix is its own inverse; the signs come last
    return (hadamard(grad, torch.ones_like(signs)).unflatten(-1, (-1, len(signs))) * signs).flatten(-2)[:, :K]


def _gemm(a: Tensor, b: Tensor, rounded: bool, dtype: torch.dtype) -> Tensor:
    """
    a (M, S) @ b (N, S)^T -> (M, N), summed in float32. Where neither operand was touched (rounded is False)
    this is the matmul that nn.Linear would run, in the compute dtype; of operands that are laid out otherwise
    in dW, which some CPUs add up in another order.
    """
    # autocast is still on inside a custom op: left alone, it would cast the rounded operands to bf16
    with torch.autocast(a.device.type, enabled=False):
        if not rounded:
            return F.linear(a.to(dtype), b.to(dtype))
        return F.linear(a.float(), b.float()).to(dtype)


def _zero_columns(x: Tensor, channels: Tensor) -> Tensor:
    """
    x (M, K) with the outlier columns set to zero in place of being cut out: blocks keep their channels.
    """
    return x.index_fill(1, channels, 0.0)


def outlier_values(x: Tensor, form: Operand | str, dtype: torch.dtype) -> Tensor:
    """ Outlier channels in a recipe's format for them. """
    return fake_quantize(x, form) if isinstance(form, Operand) else x.to(dtype)


class _Draws:
    """
    Everything random about one linear at one moment: hands out the noise and the signs of each operand.
    """

    def __init__(self, recipe: Recipe, counter: Tensor, layer: int):
        self.recipe, self.counter, self.layer = recipe, counter, layer

    def round(self, x: Tensor, number: int, dtype: torch.dtype) -> Tensor:
        """ Operand Q<number> applied to x (M, S), without rotation; in the compute dtype where it is off. """
        op = self.recipe.operands[number - 1]
        if op is None:
            return x.to(dtype)
        return fake_quantize(
            x, op, uniform(x.shape, self.counter, self.layer, number) if op.stochastic else None)

    def signs(self, a: Operand | None, b: Operand | None, stream: int = FIXED_SIGNS) -> Tensor | None:
        """ Of the rotation that operands a and b of a GEMM share; None where they are not rotated. """
        size = rotation(a, b)
        return random_signs(size, self.counter, self.layer, sign_stream(a, b, stream)) if size else None

    def rotate(self, x: Tensor, a: Operand | None, b: Operand | None, stream: int = FIXED_SIGNS) -> Tensor:
        """ x (M, S) as one of the operands a and b of a GEMM. """
        signs = self.signs(a, b, stream)
        return x if signs is None else hadamard(x, signs)

    def outlier(self, x: Tensor, on: Operand | None, dtype: torch.dtype) -> Tensor:
        """ Outlier channels; in the compute dtype where the operand that they belong to is off. """
        return outlier_values(x, self.recipe.outlier, dtype) if on else x.to(dtype)


# A custom op is opaque to torch.compile: the compiled model calls exactly this code, so it computes exactly
# what the eager model does, and no random draw can be duplicated or reordered by the compiler.
@torch.library.custom_op("nvfp4::linear", mutates_args=())
def linear_forward(
    x: Tensor,          # (T, K) in the compute dtype
    weight: Tensor,     # (N, K), the master weight
    channels: Tensor,   # (C,) int64, outlier input channels in ascending order; empty for none
    counter: Tensor,    # (4,) int64, Counter.state
    layer: int,         # number of this layer, so that no two layers share random numbers
    recipe: str,        # Recipe.spec()
    save: bool,         # also return what backward needs
    backend: str,       # one of BACKENDS; all but the reference are fused.py's
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """
    Y = X W^T -> y (T, N); then for backward: dx_w (K, N), dw_x (K, T), the FP8 rows of it (C, T), trust masks
    of X (T, K) and W (N, K), counter. What is not needed is empty; K is that of rotated X where X is rotated.
    The packed and native back ends return each of the three as one buffer of codes and scales.
    """
    r = Recipe.from_spec(recipe)
    if backend != "reference":
        import fused
        run = fused.native_forward if backend == "native" else fused.emulate_forward
        return *run(r, x, weight, channels, counter, layer, save, backend), counter.clone()
    draws = _Draws(r, counter, layer)
    split, dtype = channels.numel() > 0, x.dtype

    x4, w4 = (_zero_columns(x, channels), _zero_columns(weight, channels)) if split else (x, weight)
    turned = [draws.rotate(t, r.y_x, r.y_w) for t in (x4, w4)]
    x_hat, w_hat = (draws.round(t, number, dtype) for number, t in enumerate(turned, 1))
    masks = [trust_mask(t, op) if r.trust and op and save else x.new_empty(0, dtype=torch.bool)
             for t, op in zip(turned, (r.y_x, r.y_w))]
    x8 = w8 = x.new_empty(0, dtype=torch.float32)
    if split:
        x8, w8 = (draws.outlier(t[:, channels], op, dtype) for t, op in ((x, r.y_x), (weight, r.y_w)))
        y = (_gemm(x_hat, w_hat, True, torch.float32) + _gemm(x8, w8, True, torch.float32)).to(dtype)
    else:
        y = _gemm(x_hat, w_hat, bool(r.y_x or r.y_w), dtype)
    if not save:
        return (y, *(x.new_empty(0, dtype=torch.float32) for _ in range(3)), *masks, counter.clone())

    # The backward operands that need no dY are made here, while the rounded W and X are at hand,
    # and only they are kept: on hardware that is 4.75 bits a value instead of 16.
    # Here it is the same order in float32.
    # Q4: the whole weight, outlier channels included, is FP4 in dX
    if not (r.dx_w and r.align):
        # rounded from the master weight where Q2 is, so that squares are the same values in both
        w_back = weight if r.y_w and r.dx_w else weight.to(dtype)
    else:
        w_back = w_hat.float().index_copy(1, channels, w8.float()) if split else w_hat
    dx_w = draws.rotate(_transpose(w_back), r.dx_dy, r.dx_w, DX_SIGNS)
    dx_w = draws.round(dx_w, 4, dx_w.dtype)

    # Q6: the FP4 channels rotated, the outlier channels in FP8 and not
    x_back = x_hat if r.dw_x and r.align else x4
    dw_x = draws.rotate(_transpose(x_back), r.dw_dy, r.dw_x, DW_SIGNS)
    dw_x = draws.round(dw_x, 6, dw_x.dtype)
    dw_x8 = x.new_empty(0, dtype=torch.float32)
    if split:
        dw_x8 = _transpose(x8 if r.dw_x and r.align else x[:, channels])
        dw_x8 = draws.outlier(dw_x8, r.dw_x, torch.float32).float()
    return y, dx_w, dw_x, dw_x8, *masks, counter.clone()


def _transpose(x: Tensor) -> Tensor:
    """ A contiguous copy of x.T: an op must not return a view of its input. """
    return x.t().clone(memory_format=torch.contiguous_format)


# shapes and dtypes only: what torch.compile needs to know of an op that it does not look into
@linear_forward.register_fake
def _(x, weight, channels, counter, layer, recipe, save, backend):
    r = Recipe.from_spec(recipe)
    (T, K), N, C = x.shape, weight.shape[0], channels.shape[0]

    def rotated(n, a, b):
        return n + (-n % size if (size := rotation(a, b)) else 0)

    if backend == "reference":
        # what is rounded or rotated is float32, the rest in the compute dtype
        shapes = [(rotated(K, r.y_x, r.y_w) if inherited(r, b) else K, rotated(n, a, b), a, b)
                  for n, a, b in ((N, r.dx_dy, r.dx_w), (T, r.dw_dy, r.dw_x))]
        saved = [x.new_empty((rows, columns) if save else 0,
                             dtype=torch.float32 if not save or b or rotation(a, b) else x.dtype)
                 for rows, columns, a, b in shapes]
        saved.append(x.new_empty((C, T) if save and C else 0, dtype=torch.float32))
    else:
        import fused
        saved = [buffer for buffer, _ in fused.saved(r, x, N, C, save, backend)]
    masks = [x.new_empty((rows, rotated(K, r.y_x, r.y_w)) if r.trust and op and save else 0, dtype=torch.bool)
             for rows, op in ((T, r.y_x), (N, r.y_w))]
    return x.new_empty(T, N), *saved, *masks, torch.empty_like(counter)


@torch.library.custom_op("nvfp4::linear_backward", mutates_args=())
def linear_backward(
    dy: Tensor,         # (T, N)
    dx_w: Tensor,       # (K, N), rotated and rounded by the forward pass
    dw_x: Tensor,       # (K, T), likewise
    dw_x8: Tensor,      # (C, T), the outlier channels' activations in FP8
    trust_x: Tensor,    # (T, K), trust mask of X, empty without
    trust_w: Tensor,    # (N, K), of W
    channels: Tensor,   # (C,)
    counter: Tensor,    # (4,), as it was in the forward pass
    layer: int,
    recipe: str,
    need_dx: bool,
    need_dw: bool,
    backend: str,
    K: int,
) -> tuple[Tensor, Tensor]:
    """ dX = dY W (T, K) and dW = dY^T X (N, K), both in the dtype of dY; empty where not needed. """
    r = Recipe.from_spec(recipe)
    if backend != "reference":
        import fused
        run = fused.native_backward if backend == "native" else fused.emulate_backward
        return run(r, dy, dx_w, dw_x, dw_x8, trust_x, trust_w, channels, counter, layer, need_dx, need_dw, K,
                   backend)
    draws = _Draws(r, counter, layer)
    dx, dw = dy.new_empty(0), dy.new_empty(0)
    signs = draws.signs(r.y_x, r.y_w)
    if need_dx:
        a = draws.rotate(dy, r.dx_dy, r.dx_w, DX_SIGNS)
        dx = _gemm(draws.round(a, 3, a.dtype), dx_w, bool(r.dx_dy or r.dx_w), dy.dtype)
        dx = _turn_back(dx, signs, inherited(r, r.dx_w) > 0, trust_x, K).to(dy.dtype).contiguous()
    if need_dw:
        dyt = _transpose(dy)
        a = draws.rotate(dyt, r.dw_dy, r.dw_x, DW_SIGNS)
        dw = _gemm(draws.round(a, 5, a.dtype), dw_x, bool(r.dw_dy or r.dw_x), dy.dtype)
        dw = _turn_back(dw, signs, inherited(r, r.dw_x) > 0, trust_w, K).to(dy.dtype).contiguous()
        if channels.numel():
            dy8 = draws.outlier(dyt, r.dw_dy, dy.dtype)
            dw = dw.index_copy(1, channels, _gemm(dy8, dw_x8, bool(r.dw_dy or r.dw_x), dy.dtype))
    return dx, dw


@linear_backward.register_fake
def _(dy, dx_w, dw_x, dw_x8, trust_x, trust_w, channels, counter, layer, recipe, need_dx, need_dw, backend,
      K):
    dx = dy.new_empty(dy.shape[0], K) if need_dx else dy.new_empty(0)
    dw = dy.new_empty(dy.shape[1], K) if need_dw else dy.new_empty(0)
    return dx, dw


def _setup_context(ctx, inputs, output):
    x, weight, channels, _, ctx.layer, ctx.recipe, _, ctx.backend = inputs
    ctx.weight_dtype, ctx.K = weight.dtype, weight.shape[1]
    ctx.save_for_backward(*output[1:], channels)


def _autograd(ctx, dy, *_):
    dx_w, dw_x, dw_x8, trust_x, trust_w, counter, channels = ctx.saved_tensors
    need_dx, need_dw = ctx.needs_input_grad[:2]
    dx, dw = linear_backward(dy.contiguous(), dx_w, dw_x, dw_x8, trust_x, trust_w, channels, counter,
                             ctx.layer, ctx.recipe, need_dx, need_dw, ctx.backend, ctx.K)
    dw = dw.to(ctx.weight_dtype) if need_dw else None
    return dx if need_dx else None, dw, None, None, None, None, None, None


linear_forward.register_autograd(_autograd, setup_context=_setup_context)


class _InPlaceOf(torch.autograd.Function):
    """ The stand-in for a weight, while its gradient goes to the weight itself, unchanged. """

    @staticmethod
    def forward(ctx, weight: Tensor, stand_in: Tensor) -> Tensor:
        return stand_in.view_as(stand_in)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return dy, None


def own_rows(weight: Tensor) -> Tensor:
    """
    The rows of a weight, or of its gradient, that this process holds: all, unless FSDP has dealt them out to
    several. A view, through which they can be written. A block within a row is whole, wherever the row lies.
    """
    return weight.to_local() if hasattr(weight, "to_local") else weight


class QuantLinear(nn.Linear):
    """
    nn.Linear whose three GEMMs follow a Recipe. With a recipe that rounds nothing it is nn.Linear, exactly.

    recipe    what is rounded, and how
    layer     number of this layer in the model, part of the address of its random numbers
    counter   the model's Counter, advanced by the training loop. Without one the layer keeps its
              own and advances it at every training forward, so that no two steps share their noise;
              activation checkpointing, which runs a forward twice, needs a shared one
    outliers  how many input channels OutControl will keep in recipe.outlier's format
    backend   who computes: reference (this file, any device), emulate, packed or native (fused.py, with
              Triton)

    channels  buffer (outliers,) int64: those channels in ascending order, all -1 until they are chosen
    stand_in  None, or (N, K): what Q2 rounds in the place of the weight, which keeps the gradient.
              remedies.py computes it, from the weight and an average of it, so no checkpoint holds it
    sumsq     None, or float32 (K,) to which each training forward adds the squares of its input's channels
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, recipe: Recipe = Recipe(),
                 layer: int = 0, counter: Counter | None = None, outliers: int = 0,
                 backend: str = "reference", device=None, dtype=None):
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        if outliers and recipe.outlier is None:
            raise ValueError("this recipe has no format for outlier channels: "
                             "set Recipe.outlier, or outliers=0")
        if not 0 <= outliers <= in_features:
            raise ValueError("outliers is a number of input channels, "
                             f"from 0 to {in_features}, not {outliers}")
        _one_of("backend", backend, BACKENDS)
        self.layer, self.backend = layer, backend
        self.set_recipe(recipe)
        # a layer on its own draws its seed, or two such layers would share their noise
        self.own_counter = counter is None
        self.counter = Counter(int(torch.randint(2**31, (), device="cpu"))) if self.own_counter else counter
        self.enabled = True
        self.sumsq = None
        self.register_buffer("channels", torch.full((outliers,), -1, device=device))
        self.register_buffer("stand_in", None, persistent=False)
        self.split = False
        self.register_load_state_dict_post_hook(_restore_split)

    def __deepcopy__(self, memo: dict) -> "QuantLinear":
        """ A copy with a counter of its own has noise of its own, too. """
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__setstate__(deepcopy(self.__dict__, memo))
        if twin.own_counter:
            seed = int(torch.randint(2**31, (), device="cpu"))
            twin.counter = Counter(seed, device=twin.counter.state.device)
        return twin

    def set_recipe(self, recipe: Recipe):
        """ Round by this recipe from now on. """
        self.recipe, self.recipe_spec = recipe, recipe.spec()

    def set_channels(self, channels: Tensor):
        """ Keep these input channels (all of the same -1 for none yet) in the outlier format from now on. """
        chosen = sorted(channels.tolist())
        none, distinct = [-1] * len(chosen), len(set(chosen)) == len(chosen)
        good = chosen == none or distinct and all(c in range(self.in_features) for c in chosen)
        if channels.shape != self.channels.shape or channels.is_floating_point() or not good:
            raise ValueError(f"outlier channels are {self.channels.numel()} different integers below "
                             f"{self.in_features}, or all -1, not {chosen[:8]}")
        self.channels.copy_(channels.sort().values)
        self.split = bool(chosen) and chosen != none

    def forward_weight(self) -> Tensor:
        """
        The weight that the FP4 GEMM of the forward pass rounds, (N, K), outlier columns zero: of it, the rows
        that this process holds.
        """
        weight = own_rows(self.weight) if self.stand_in is None else self.stand_in
        return _zero_columns(weight, self.channels) if self.split else weight

    def rounded_weight(self) -> Tensor:
        """ What the FP4 GEMM of the forward pass multiplies with, float32 (N, K), in W's own coordinates. """
        r, draws = self.recipe, _Draws(self.recipe, self.counter.state, self.layer)
        w = draws.round(draws.rotate(self.forward_weight().detach(), r.y_x, r.y_w), 2, torch.float32)
        return _turn_back(w, draws.signs(r.y_x, r.y_w), True, w.new_empty(0), self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        if self.sumsq is not None and self.training:
            # a block that is computed again adds its squares twice, in all channels alike
            self.sumsq += x.detach().float().square().flatten(0, -2).sum(0)
        if not self.enabled or not any(self.recipe.operands):
            return F.linear(x, self.weight, self.bias)

        if x.shape[-1] != self.in_features:
            raise ValueError(f"the last axis has {self.in_features} input features, not {x.shape[-1]}")
        # autocast does not cast the arguments of a custom op, so do here what it does to nn.Linear.
        # The weight stays as it is: it is the master weight that Q2 rounds
        device = x.device.type
        cast = torch.is_autocast_enabled(device) and x.dtype != torch.float64
        dtype = torch.get_autocast_dtype(device) if cast else x.dtype
        flat = x.to(dtype).reshape(-1, self.in_features)
        save = torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad)
        if self.own_counter:
            self.counter.to(x.device)
            if save and self.training:
                self.counter.state[1] += 1
        channels = self.channels if self.split else self.channels[:0]
        weight = self.weight if self.stand_in is None else _InPlaceOf.apply(self.weight, self.stand_in)
        y = linear_forward(
            flat, weight, channels, self.counter.state, self.layer, self.recipe_spec, save,
            self.backend)[0]
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(dtype)

    def extra_repr(self) -> str:
        on = [str(i) for i, op in enumerate(self.recipe.operands, 1) if op]
        return (f"{super().extra_repr()}, quantizers={','.join(on) or 'none'}, "
                f"outliers={self.channels.numel()}")


def _restore_split(module: QuantLinear, _):
    """ After load_state_dict: the buffer says which channels, and whether they are chosen yet. """
    if not module.channels.is_meta:
        module.set_channels(module.channels)


@contextmanager
def quantizers_off(model: nn.Module):
    """
    Within this block every QuantLinear of the model is a plain linear: the same weights without rounding.
    """
    layers = [m for m in model.modules() if isinstance(m, QuantLinear)]
    before = [m.enabled for m in layers]
    for m in layers:
        m.enabled = False
    try:
        yield
    finally:
        for m, enabled in zip(layers, before):
            m.enabled = enabled

"""
The bits behind the numbers of quant.py: a code for each number, a byte for each scale.

quant.py computes with float32 numbers that lie on a grid. Where they have to be stored or counted, each one
is a code: a few bits that say which number of the grid it is, with the sign in front.

    a number of e2m1   is a nibble: the sign in bit 3, and 0 to 7 for the magnitudes 0 .5 1 1.5 2 3 4 6
    a number of e4m3   is a byte: the sign in bit 7, and the magnitude in bits 0 to 6
    an inner scale     is a byte: the code of its grid. A scale has no sign; a byte of e4m3 has room for one

Training does not need them, since fake_quantize() of quant.py gives the same values, bit for bit. Oscillation
(osci.py) is counted in codes, and tensor cores (kernels.py) and exports (tools/hf.py) take codes and bytes.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quant import GRIDS, ROW, RULES, TENSOR, Grid, Operand, from_blocks, to_blocks

E2M1, E4M3 = GRIDS["e2m1"], GRIDS["e4m3"]


@dataclass
class Quantized:
    """
    A matrix (M, K) in a block format. Each value is the number that its code names times the scale of its
    block, which is the product of inner and outer scale.

    code   uint8 (M, K), one code in each byte
    inner  uint8 (M / block rows, K / block columns), rounded up: a byte for each inner scale
    outer  float32 (M / block rows, K / Operand.outer), rounded up; (M / block rows, 1) where each row has
           one; (), a single number, where the whole matrix shares one; None without outer scales
    """
    code: Tensor
    inner: Tensor
    outer: Tensor | None
    operand: Operand

    def scale(self) -> Tensor:
        """ Inner times outer scale of each block, float32, shape of inner. """
        inner, outer = scale_value(self.inner, self.operand), self.outer
        if outer is None:
            return inner
        if self.operand.outer > 0:
            per_outer = self.operand.outer // self.operand.block[1]
            outer = outer.repeat_interleave(per_outer, dim=1)[:, : inner.shape[1]]
        return inner * outer

    def dequantize(self) -> Tensor:
        """ The values, float32 (M, K). """
        op, scale = self.operand, self.scale()[:, :, None]
        blocks, stored = to_blocks(grid_number(self.code, op), op), RULES[op.rule].stored
        blocks = stored[1](blocks, scale) if stored else blocks
        return from_blocks(blocks * scale, self.code.shape, op)

    def bits_per_value(self) -> float:
        """ What a value takes in storage, with its share of the scales: 4.75 for whole double blocks. """
        scales = 8 * self.inner.numel() + (0 if self.outer is None else 32 * self.outer.numel())
        return sign_bit(self.operand) + 1 + scales / max(1, self.code.numel())


def quantize(x: Tensor, op: Operand, noise: Tensor | None = None) -> Quantized:
    """
    x (M, K) -> its codes and scales, whose values are fake_quantize(x, op, noise). The sign of x is kept
    where its magnitude is rounded to zero, too.
    """
    blocks, rule = to_blocks(x.detach().float(), op), RULES[op.rule]
    c, inner, outer = rule.f(blocks, op, None if noise is None else to_blocks(noise, op))
    c = rule.stored[0](c, inner) if rule.stored else c
    # a NaN lies in a block whose scale is NaN: any code will do, but on every device the same
    code = encode(from_blocks(c, x.shape, op).abs().nan_to_num(0.0), GRIDS[op.grid])
    code |= x.signbit().to(torch.uint8) << sign_bit(op)
    inner, outer = inner[:, :, 0], outer[:, :, 0]
    if op.outer == 0:
        return Quantized(code, scale_byte(inner * outer, op), None, op)
    # where an outer scale carries the NaN, the inner one stays an ordinary number
    byte = scale_byte(torch.where(outer.isnan(), 0.0, inner), op)
    # copied, since a view would keep the scales of all blocks in memory, and in a checkpoint
    few = outer[0, 0] if op.outer == TENSOR else \
        outer[:, :1] if op.outer == ROW else outer[:, :: op.outer // op.block[1]]
    return Quantized(code, byte, few.clone(memory_format=torch.contiguous_format), op)


# -----------------------------------------------------------------------------
# the code of a number


def sign_bit(op: Operand) -> int:
    """ Which bit of a code is the sign: 3 where a code is a nibble, 7 where it is a byte. """
    grid = GRIDS[op.grid]
    binades = math.frexp(grid.max)[1] - grid.emin       # 2^emin .. max; the exponent 0 is for what lies below
    return binades.bit_length() + grid.mbits


def grid_number(code: Tensor, op: Operand) -> Tensor:
    """ Codes with their sign -> the numbers of the grid that they name, float32. """
    bit = sign_bit(op)
    magnitude = decode(code & (1 << bit) - 1, GRIDS[op.grid])
    return torch.where(code >> bit != 0, -magnitude, magnitude)


def encode(value: Tensor, grid: Grid) -> Tensor:
    """
    Magnitudes on the grid, float32 -> their codes, uint8. A code is exponent and mantissa side by side, so
    codes count up with the magnitudes: 0 is 0, 1 the smallest number above it, and so on.
    """
    # a float32 has its exponent and mantissa side by side as well. It has more bits of mantissa, and its
    # exponent is counted from elsewhere
    normal = (value.view(torch.int32) >> (23 - grid.mbits)) - ((grid.emin + 126) << grid.mbits)
    # below the smallest binade numbers are evenly spaced, and a code is how many spaces away zero is
    subnormal = (value * 2.0 ** (grid.mbits - grid.emin)).to(torch.int32)
    return torch.where(value >= 2.0**grid.emin, normal, subnormal).to(torch.uint8)


def decode(code: Tensor, grid: Grid) -> Tensor:
    """ Codes without sign -> magnitudes, float32: the inverse of encode(). In E4M3, 0x7F is NaN. """
    code = code.to(torch.int32)
    normal = ((code + ((grid.emin + 126) << grid.mbits)) << (23 - grid.mbits)).view(torch.float32)
    value = torch.where(code >= 1 << grid.mbits, normal, code * 2.0 ** (grid.emin - grid.mbits))
    return torch.where(code == 0x7F, math.nan, value) if grid is E4M3 else value


# -----------------------------------------------------------------------------
# the byte of an inner scale


def scale_byte(scale: Tensor, op: Operand) -> Tensor:
    """ Inner scales, float32 -> bytes. NaN becomes the byte that has no number: 0x7F of E4M3, else 0xFF. """
    nan, value = scale.isnan(), scale.nan_to_num()
    # a power of two is stored as its exponent, which float32 has in these bits. 2^-127, the smallest one,
    # has exponent 0 in both
    byte = value.view(torch.int32) >> 23
    if op.scale != "e8m0":
        byte = encode(value.abs(), GRIDS[op.scale]).int() | (value < 0) << 7
    return torch.where(nan, 0x7F if op.scale == "e4m3" else 0xFF, byte).to(torch.uint8)


def scale_value(byte: Tensor, op: Operand) -> Tensor:
    """ Bytes -> inner scales, float32: the inverse of scale_byte(). """
    if op.scale == "e4m3":
        return grid_number(byte, Operand(grid="e4m3"))
    if op.scale == "e8m0":
        exponent = byte.to(torch.int32)
        value = torch.where(exponent == 0, 2.0**-127, (exponent << 23).view(torch.float32))
    else:
        value = decode(byte, GRIDS[op.scale])
    return torch.where(byte == 0xFF, math.nan, value)


# -----------------------------------------------------------------------------
# two codes in a byte


def pack(code: Tensor) -> Tensor:
    """ Nibbles (M, K) -> two in a byte, (M, K / 2 rounded up): the even column is the lower nibble. """
    code = F.pad(code, (0, code.shape[-1] % 2))
    return code[..., 0::2] | code[..., 1::2] << 4


def unpack(packed: Tensor, K: int) -> Tensor:
    """ Bytes (M, K / 2 rounded up) -> K nibbles in each row: the inverse of pack(). """
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :K]

"""
The bits of what quant.py rounds: codes of values, bytes of scales, two 4-bit codes to a byte.

Training does not need them: fake_quantize gives the values that dequantize() gives, bit for bit.
Oscillation (osci.py) counts them, an export (hf.py) and the FP4 tensor cores (fused.py) store them.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quant import GRIDS, RULES, TENSOR, Grid, Operand, from_blocks, to_blocks

E2M1, E4M3 = GRIDS["e2m1"], GRIDS["e4m3"]


def encode(value: Tensor, grid: Grid) -> Tensor:
    """ Grid magnitudes, float32 >= 0 -> their codes, uint8. Codes count up with the value. """
    # a normal float32 already holds the code in its upper bits; only the exponent bias differs
    normal = (value.view(torch.int32) >> (23 - grid.mbits)) - ((grid.emin + 126) << grid.mbits)
    subnormal = (value * 2.0 ** (grid.mbits - grid.emin)).to(torch.int32)
    return torch.where(value >= 2.0**grid.emin, normal, subnormal).to(torch.uint8)


def decode(code: Tensor, grid: Grid) -> Tensor:
    """ The inverse of encode, float32. The all-ones code of E4M3 is NaN, as in OCP FP8. """
    code = code.to(torch.int32)
    normal = ((code + ((grid.emin + 126) << grid.mbits)) << (23 - grid.mbits)).view(torch.float32)
    value = torch.where(code >= 1 << grid.mbits, normal, code * 2.0 ** (grid.emin - grid.mbits))
    return torch.where(code == 0x7F, math.nan, value) if grid is E4M3 else value


def sign_bit(grid: Grid) -> int:
    """ 3 where a code is a nibble, 7 where it is a byte. """
    return int(encode(torch.tensor(grid.max), grid)).bit_length()


def scale_byte(scale: Tensor, op: Operand) -> Tensor:
    """ Inner scales -> bytes; NaN -> 0x7F (E4M3) or 0xFF. """
    # a power of two is its own exponent field; 2^-127 is subnormal, field 0, as E8M0 wants it
    nan, value = scale.isnan(), scale.nan_to_num()
    byte = value.view(torch.int32) >> 23
    if op.scale != "e8m0":
        byte = encode(value, GRIDS[op.scale]).int()
    return torch.where(nan, 0x7F if op.scale == "e4m3" else 0xFF, byte).to(torch.uint8)


def scale_value(byte: Tensor, op: Operand) -> Tensor:
    """ The inverse. """
    if op.scale == "e4m3":
        return decode(byte, E4M3)
    field = byte.to(torch.int32)
    value = decode(byte, GRIDS[op.scale]) if op.scale != "e8m0" else torch.where(
        field == 0, 2.0**-127, (field << 23).view(torch.float32))
    return torch.where(field == 0xFF, math.nan, value)


@dataclass
class Quantized:
    """
    A quantized matrix: value = code * (inner * outer).

    code   uint8 (M, K), a nibble (bit 3 the sign) or a byte (bit 7 the sign)
    inner  uint8 (M / block rows, K / block columns), rounded up: the bytes of the scales
    outer  float32 (M / block rows, K / outer), () for one in all, None without outer scales
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
        if outer.dim():
            per_outer = self.operand.outer // self.operand.block[1]
            outer = outer.repeat_interleave(per_outer, dim=1)[:, : inner.shape[1]]
        return inner * outer

    def dequantize(self) -> Tensor:
        """ The values, float32 (M, K). """
        values = to_blocks(grid_value(self.code, self.operand), self.operand)
        return from_blocks(values * self.scale()[:, :, None], self.code.shape, self.operand)

    def bits_per_value(self) -> float:
        """ Storage, all scales counted: 4.75 for the double block on whole blocks. """
        scales = 8 * self.inner.numel() + (0 if self.outer is None else 32 * self.outer.numel())
        return sign_bit(GRIDS[self.operand.grid]) + 1 + scales / max(1, self.code.numel())


def grid_value(code: Tensor, op: Operand) -> Tensor:
    """ Codes with their sign -> grid values, float32. """
    bit = sign_bit(GRIDS[op.grid])
    magnitude = decode(code & (1 << bit) - 1, GRIDS[op.grid])
    return torch.where(code >> bit != 0, -magnitude, magnitude)


def quantize(x: Tensor, op: Operand, noise: Tensor | None = None) -> Quantized:
    """ x (M, K) -> its codes and scales; noise as in fake_quantize. Zeros keep the sign of x too. """
    blocks = to_blocks(x.detach().float(), op)
    c, inner, outer = RULES[op.rule].f(blocks, op, None if noise is None else to_blocks(noise, op))
    # a NaN lies in a block whose scale is NaN: any code will do, but on every device the same
    code = encode(from_blocks(c, x.shape, op).abs().nan_to_num(0.0), GRIDS[op.grid])
    code |= x.signbit().to(torch.uint8) << sign_bit(GRIDS[op.grid])
    inner, outer = inner[:, :, 0], outer[:, :, 0]
    if op.outer == 0:
        return Quantized(code, scale_byte(inner * outer, op), None, op)
    # where an outer scale carries the NaN, the inner one stays an ordinary number
    byte = scale_byte(torch.where(outer.isnan(), 0.0, inner), op)
    few = outer[0, 0] if op.outer == TENSOR else outer[:, :: op.outer // op.block[1]].contiguous()
    return Quantized(code, byte, few, op)


def pack(code: Tensor) -> Tensor:
    """ Nibbles (M, K) -> two to a byte, (M, K/2 rounded up); the even column in the low nibble. """
    code = F.pad(code, (0, code.shape[-1] % 2))
    return code[..., 0::2] | code[..., 1::2] << 4


def unpack(packed: Tensor, K: int) -> Tensor:
    """ The inverse, for K columns. """
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :K]

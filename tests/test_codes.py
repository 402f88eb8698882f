"""
Codes and bytes: what is stored is what is computed. That quantize() has the codes and scales of independent
programs, for every format, is tested in test_quant.py.
"""
import io
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

import rivals    # noqa: F401  its grids have codes too
from codes import (Quantized, decode, encode, grid_number, pack, quantize, scale_byte, scale_value, sign_bit,
                   unpack)
from quant import GRIDS, ROW, TENSOR, Operand, fake_quantize
from recipes import MXFP8, NEAREST

ML = {"e2m1": (ml_dtypes.float4_e2m1fn, 8), "e4m3": (ml_dtypes.float8_e4m3fn, 0x7F),
      "e5m2": (ml_dtypes.float8_e5m2, 0x7C)}     # with the number of codes below NaN and Inf
VALUE_GRIDS = ("e2m1", "e1m2", "e4m3", "e5m2")
SCALES = ("e4m3", "e8m0", "ue5m3")


@pytest.mark.parametrize("grid", ML)
def test_codes_are_those_of_ml_dtypes(grid):
    """ Catches: a bias off by one, subnormals read as normals, another NaN. """
    kind, n = ML[grid]
    expected = torch.from_numpy(np.arange(n, dtype=np.uint8).view(kind).astype(np.float32))
    codes = torch.arange(n, dtype=torch.uint8)
    assert torch.equal(decode(codes, GRIDS[grid]), expected)
    assert torch.equal(encode(expected, GRIDS[grid]), codes)
    assert grid != "e4m3" or decode(torch.tensor([0x7F], dtype=torch.uint8), GRIDS[grid]).isnan()


@pytest.mark.parametrize("grid, size", [("e2m1", 4), ("e1m2", 4), ("e4m3", 8), ("e5m2", 8)])
def test_the_sign_is_in_front(grid, size):
    """ Catches: a sign bit inside the magnitude, or so far left that a nibble does not hold the code. """
    op = Operand(grid=grid)
    top = int(encode(torch.tensor(GRIDS[grid].max), GRIDS[grid]))
    assert sign_bit(op) == size - 1 and 2 ** (size - 2) <= top < 2 ** (size - 1)
    code = torch.tensor([0, 1, top, 1 << size - 1, 1 << size - 1 | 1, 1 << size - 1 | top], dtype=torch.uint8)
    value = grid_number(code, op)
    assert value.tolist() == [0, value[1], GRIDS[grid].max, 0, -value[1], -GRIDS[grid].max] and value[1] > 0
    assert value.signbit().tolist() == [False] * 3 + [True] * 3


@pytest.mark.parametrize("scale", SCALES)
def test_every_byte_of_a_scale_comes_back(scale):
    """ Catches: 2^-127 lost, a NaN that becomes a number, the largest scale that becomes NaN. """
    op = replace(NEAREST, scale=scale)
    top = int(scale_byte(torch.tensor(GRIDS[scale].max), op))
    byte = torch.arange(top + 1, dtype=torch.uint8)
    value = scale_value(byte, op)
    assert value.isfinite().all() and (value.diff() > 0).all() and value[-1] == GRIDS[scale].max
    assert torch.equal(scale_byte(value, op), byte)
    nan = scale_byte(torch.tensor([float("nan")]), op)
    assert nan.item() == (0x7F if scale == "e4m3" else 0xFF) and scale_value(nan, op).isnan().all()
    assert scale != "e8m0" or value[0] == 2.0**-127


@pytest.mark.parametrize("grid", VALUE_GRIDS)
@pytest.mark.parametrize("outer, block", [(128, (1, 16)), (TENSOR, (16, 16)), (ROW, (16, 16)), (0, (1, 32))])
def test_what_is_stored_is_what_is_computed(grid, outer, block):
    """ Catches: another order of products than in training, a scale of the wrong block, lost signs. """
    op = Operand(grid=grid, outer=outer, block=block)
    x = torch.randn(35, 300, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 300)
    x[3, 5], x[4, 6] = 0.0, -0.0
    q = quantize(x, op)
    assert torch.equal(q.dequantize(), fake_quantize(x, op))
    assert torch.equal(q.dequantize().signbit(), x.signbit())
    x[7, 9] = float("nan")
    a, b = quantize(x, op).dequantize(), fake_quantize(x, op)
    assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def test_if4_keeps_its_choice_in_the_sign_of_the_scale():
    """
    Catches: k read as a code of E2M1 or the other way round, the sign bit taken for a part of the scale, a
    choice that is stored for another block, a value that comes back with other last bits.
    """
    op = Operand(grid="if4", rule="if4", outer=TENSOR)
    x = torch.randn(35, 300, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 300)
    x[3, 5], x[4, 6], x[5] = 0.0, -0.0, 0.0
    q = quantize(x, op)
    assert torch.equal(q.dequantize(), fake_quantize(x, op))
    assert torch.equal(q.dequantize().signbit(), x.signbit())
    even = (q.inner > 127).repeat_interleave(16, 1)[:, :300]
    assert 0.3 < even.float().mean() < 0.9 and not even[5].any()
    # by the format alone: a nibble is a sign and k, or a sign and a place in E2M1's grid
    k, sign = (q.code & 7).double(), 1 - 2.0 * (q.code >> 3).double()
    e2m1 = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6]).double()[k.long()]
    inner = (q.inner & 127).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    scale = (torch.from_numpy(inner) * q.outer).repeat_interleave(16, 1)[:, :300]
    value = sign * torch.where(even, k * 6 / 7, e2m1) * scale
    assert torch.allclose(q.dequantize().double(), value, rtol=1e-6, atol=0)
    x[7, 9] = float("nan")
    assert quantize(x, op).dequantize().isnan().all() and fake_quantize(x, op).isnan().all()


def test_scales_own_their_memory():
    """ Catches: an outer scale that is a view, by which a checkpoint would hold those of all blocks. """
    for outer in (128, TENSOR, ROW):
        q = quantize(torch.randn(64, 1024), replace(NEAREST, outer=outer))
        file = io.BytesIO()
        torch.save([q.inner, q.outer], file)
        assert file.tell() < q.inner.numel() + 4 * q.outer.numel() + 2048


@pytest.mark.parametrize("op, bits", [
    (NEAREST, 4 + 8 / 16 + 32 / 128), (replace(NEAREST, outer=TENSOR), 4 + 8 / 16 + 32 / (16 * 1024)),
    (replace(NEAREST, outer=ROW), 4 + 8 / 16 + 32 / 1024),
    (replace(NEAREST, block=(16, 16), outer=0), 4 + 8 / 256), (MXFP8, 8 + 8 / 32),
])
def test_bits_per_value(op, bits):
    """ Catches: a scale that is not counted, or counted for each value. """
    assert quantize(torch.randn(16, 1024), op).bits_per_value() == pytest.approx(bits)


@pytest.mark.parametrize("K", [0, 1, 2, 7, 16, 17])
def test_pack_and_unpack(K):
    """ Catches: halves swapped, an odd last column lost. """
    code = torch.randint(16, (3, K), dtype=torch.uint8)
    packed = pack(code)
    assert packed.shape == (3, -(-K // 2)) and torch.equal(unpack(packed, K), code)
    assert K < 2 or (packed[:, 0] & 15).equal(code[:, 0]) and (packed[:, 0] >> 4).equal(code[:, 1])


def test_scale_of_ragged_blocks():
    """ Catches: outer scales repeated beyond the last block, or a whole group's for a part of one. """
    q = Quantized(torch.zeros(2, 150, dtype=torch.uint8), torch.full((2, 10), 0x38, dtype=torch.uint8),
                  torch.tensor([[2.0, 3.0], [5.0, 7.0]]), NEAREST)
    assert q.scale().tolist() == [[2.0] * 8 + [3.0] * 2, [5.0] * 8 + [7.0] * 2]

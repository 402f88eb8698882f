"""
The kernels of rounding.py and rivals/kernels.py, against quant.py, codes.py, osci.py and rivals/rules.py: bit
for bit.

On a GPU they run there; without one, in Triton's interpreter, which conftest.py switches on. The interpreter
cuts float32 off to bf16 where a GPU rounds; what goes through pairs of bf16 is rounded on both. What the
compiler makes of the kernels for GPUs that are not here, crosscompile.py tells.
"""
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rivals                                                   # noqa: F401
from codes import pack, quantize, sign_bit
from noise import SIGN_STREAMS, Counter, uniform
from quant import GRIDS, ROW, SIGNS, TENSOR, Operand, QuantLinear, Recipe, fake_quantize, hadamard
from recipes import MXFP8, NEAREST, RECIPES, STOCHASTIC
from rivals import rules

pytest.importorskip("triton", "3.6", reason="needs Triton 3.6 or later")
import triton                                                   # noqa: E402
import triton.language as tl                                    # noqa: E402

import osci                                                     # noqa: E402
import rivals.kernels                                           # noqa: E402
import rounding                                                 # noqa: E402
from crosscompile import TRITONS, Job, compile_many             # noqa: E402
from rounding import Out, Side, no_codes, no_kernel, no_lines, round_pair, track, unpack     # noqa: E402

# Triton's interpreter divides by the scales of empty blocks, too, before it leaves the quotients out
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYER = 2
COUNTER = Counter(seed=2**40 + 7, rank=3)       # a seed of more than 32 bits, and a rank
COUNTER.set(5, micro=2)
STATE = COUNTER.state.to(DEVICE)


def sides_of(r: Recipe) -> list[Side | None]:
    """ Q1 to Q6. """
    return [op and Side(op, i + 1, r.rotate[i // 2], r.signs[i // 2]) for i, op in enumerate(r.operands)]


def matrix(M: int, K: int, faults: bool = True) -> Tensor:
    """ Numbers of very different size, ties, zeros of both signs, blocks of zeros, tiny rows, NaN, Inf. """
    generator = torch.Generator().manual_seed(M * 1000 + K)
    x = torch.randn(M, K, generator=generator) * torch.randn(M, K, generator=generator).mul(2).exp()
    if M > 16:
        x[2] = 0
        x[3, : K // 2] = 0
        x[4] = 2.0**-101
        # with 6 in each block its scale is a power of two, and these are ties
        x[6] = (torch.arange(K) % 25 - 12) * 0.25
        x[6, ::16] = 6.0
        x[7, ::3] = -0.0
        x[8] *= 1e-3
        x[10] = 12          # with rule 4/6, exact both ways
        x[12], x[13] = x[12] * 1e-20, x[13] * 1e20
        x[15, : K // 2] *= 1e30
    if faults:
        x[1, K // 3], x[9, K // 2], x[11, 5] = torch.nan, torch.inf, -torch.inf
    return x


# -----------------------------------------------------------------------------
# what the reference makes of the same arguments


def turned(x: Tensor, side: Side) -> Tensor:
    if not side.rotate:
        return x.float()
    stream = SIGN_STREAMS[(side.number - 1) // 2]
    return hadamard(x, SIGNS[side.signs](side.rotate, COUNTER.state, LAYER, stream))


def noise_of(x: Tensor, side: Side) -> Tensor | None:
    return uniform(x.shape, COUNTER.state, LAYER, side.number) if side.op.rounding == "sr" else None


def value_of(x: Tensor, side: Side) -> Tensor:
    x = turned(x, side)
    return fake_quantize(x, side.op, noise_of(x, side)) if side.op else x


def same(a: Tensor, b: Tensor) -> bool:
    """ Equal, NaN where the other has NaN. -0 is 0: products cannot tell them apart. """
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


class Room:
    """ Room for one side's values, full of NaN, in a larger matrix that must stay as it is. """

    def __init__(self, rows: int, columns: int, side: Side | None, dtype: torch.dtype):
        columns += -columns % max(1, side.rotate) if side else 0
        self.whole = torch.full((rows + 2, columns + 16), torch.nan, dtype=dtype, device=DEVICE)
        self.out = Out(self.whole[1:-1, 8:-8], stride=columns + 16) if side else None

    def check(self, expected: Tensor):
        got = self.out.data.clone().cpu()
        self.out.data.fill_(torch.nan)
        assert self.whole.isnan().all(), "written outside of the output"
        if got.dtype == torch.bfloat16 and DEVICE == "cpu" and got.shape[1] % 8:
            cut = (expected.contiguous().view(torch.int32) & -65536).view(torch.float32)
            expected = torch.where(expected.isnan(), expected, cut)
        assert same(got, expected.to(got.dtype))


def check_pair(x: Tensor, row: Side | None, col: Side | None, align: bool = False,
               channels: Tensor | None = None, extra: Side | None = None):
    """ round_pair with these arguments writes what the reference computes, and nothing else. """
    (M, K), keep = x.shape, None
    a, at, at8 = Room(M, K, row, x.dtype), Room(K, M, col, x.dtype), Room(K, M, extra, x.dtype)
    start = x.float()
    if channels is not None:
        start = start.index_fill(1, channels, 0.0)
        keep = torch.full((K,), -1, dtype=torch.int16).index_fill_(0, channels, 0).to(DEVICE)
    round_pair(x.to(DEVICE), row, col, a.out, at.out, STATE, LAYER, align=align, keep=keep, extra=extra,
               extra_out=at8.out)
    t = (value_of(start, row) if align and row else start).t().contiguous()
    for room, side, v in ((a, row, start), (at, col, t), (at8, extra, t)):
        if side:
            room.check(value_of(v, side))


# -----------------------------------------------------------------------------
# values


def pairs_of(r: Recipe) -> list[tuple]:
    """ The three matrices of a recipe, each with how it is rounded along both axes: X, W and dY. """
    q1, q2, q3, q4, q5, q6 = sides_of(r)
    return [(q1, q6, r.align), (q2, q4, r.align), (q3, q5, False)]


# many recipes have a matrix in common: each once, whatever the number of its operand
PAIRS = {}
for _name, _recipe in RECIPES.items():
    for _matrix, _pair in zip(("X", "W", "dY"), pairs_of(_recipe) if any(_recipe.operands) else ()):
        PAIRS.setdefault(str([side._replace(number=0) if isinstance(side, Side) else side for side in _pair]),
                         (f"{_name} {_matrix}", _pair))
PAIRS = dict(PAIRS.values())
# and what --outer=row makes
PER_ROW = replace(NEAREST, outer=ROW), replace(STOCHASTIC, outer=ROW)
PAIRS["per row X"] = Side(PER_ROW[0], 1), Side(PER_ROW[1], 6, 16), True
PAIRS["per row W"] = Side(replace(PER_ROW[0], block=(16, 16)), 2), Side(PER_ROW[1], 4), True


@pytest.mark.parametrize("pair", PAIRS)
def test_operands_of_all_recipes(pair):
    """
    Catches: a group of noise or a sign vector that is not the reference's, a scale rounded by another rule or
    that of another block or row, a value that is not clipped, a NaN that a maximum loses or that spreads, a
    block of zeros that is not zero, a ragged edge that is read or written beyond.
    """
    row, col, align = PAIRS[pair]
    rounded = [side for side in (row, col) if side]
    assert not any(map(no_kernel, rounded))
    tensor = any(side.op.outer == TENSOR and side.op.scale != "e8m0" for side in rounded)
    check_pair(matrix(37, 119, faults=not tensor), row, col, align)


SQUARE = replace(STOCHASTIC, block=(16, 16))


@pytest.mark.parametrize("row, col, align", [
    (Side(replace(NEAREST, block=(1, 32)), 1), Side(SQUARE, 6, 16), True),
    (Side(replace(STOCHASTIC, outer=TENSOR, rule="17/16"), 3), Side(replace(NEAREST, rule="17/16"), 5),
     False),
    (Side(replace(MXFP8, rounding="sr"), 3), Side(replace(MXFP8, block=(16, 16), grid="e5m2"), 5), False),
    (Side(None, 3, 16), Side(replace(STOCHASTIC, outer=TENSOR), 5, 8), False),
    (None, Side(replace(STOCHASTIC, scale="ue5m3"), 6, 16), True),
    (Side(replace(PER_ROW[0], block=(1, 32)), 2), Side(replace(STOCHASTIC, outer=TENSOR), 4), False),
    (Side(NEAREST, 1), Side(replace(RECIPES["fp8"].y_x, outer=ROW), 6), True),
    (Side(RECIPES["fp8"].y_x, 1), None, True)])
def test_operands_that_flags_make(row, col, align):
    """
    Catches: squares under outer scales of 128, blocks that are two strips, a value that is only rotated, a
    side that is written although nobody asked for it; a maximum of the rows taken for one of the columns.
    """
    tensor = any(side and side.op and side.op.outer == TENSOR for side in (row, col))
    check_pair(matrix(37, 119, faults=not tensor), row, col, align)


def test_nan_under_a_scale_of_the_tensor():
    """ Catches: a NaN that the search for the largest magnitude loses, so that a diverged run goes on. """
    check_pair(matrix(20, 24), Side(replace(NEAREST, outer=TENSOR), 1), None)


@pytest.mark.parametrize("M, K", [(1, 1), (16, 16), (2, 130)])
def test_awkward_shapes(M, K):
    """ Catches: a tile of which little is there, and the second one taken for the first. """
    check_pair(matrix(M, K, faults=False), *PAIRS["tetrajet_base X"])


def test_nothing_to_do():
    """ Catches: a grid without programs, which is an error on a GPU. """
    for shape in ((0, 16), (16, 0)):
        check_pair(torch.empty(shape), Side(NEAREST), None)


@pytest.mark.parametrize("row, col", [PAIRS["tetrajet_base dY"][:2],
                                      (Side(PER_ROW[0], 3), Side(PER_ROW[1], 5, 16))])
def test_several_tiles_of_bf16(row, col):
    """
    Catches: the second tile taken for the first, in the noise or in where it is stored, and bf16 rows that
    are not whole pieces of 16 bytes: 130 values go out one by one, 136 in pairs; and the maximum of a row in
    one tile of it, or of lines that lie below the matrix.
    """
    check_pair(matrix(130, 136).bfloat16(), row, col, extra=Side(MXFP8, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outlier_columns(dtype):
    """
    Catches: an outlier column that counts in its block's scale or keeps its values; one that holds NaN and is
    multiplied by zero.
    """
    x = matrix(40, 40).to(dtype)
    channels = torch.tensor([0, 5, 17, 30, 39])
    x[:, channels] = 1e9
    x[3, 5], x[4, 39] = torch.nan, torch.inf
    check_pair(x, *PAIRS["tetrajet_base X"], channels=channels)


CUT = torch.tensor([0, 5, 17, 19, 39])


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("op", [STOCHASTIC, PER_ROW[1]])
def test_outlier_channels_are_rows_of_the_transposed_weight(codes, op):
    """
    Catches: noise of the place in the cut instead of in the matrix, a row written to the place in the cut, or
    one too many; scales of such rows that are stored elsewhere than their codes.
    """
    x, row, col = matrix(32, 40, faults=False), Side(MXFP8, 2), Side(op, 4, 16)
    whole = x.clone()
    whole[:, CUT] = value_of(x[:, CUT], row)
    a, expected = Room(32, len(CUT), row, x.dtype), value_of(whole.t().contiguous(), col)
    empty = torch.full((40, 32), torch.nan, device=DEVICE)
    out = packed_room(40, 32, col.op) if codes else Out(empty, stride=32)
    round_pair(x[:, CUT].contiguous().to(DEVICE), row, col, a.out, out, STATE, LAYER, align=True,
               lines=CUT.to(DEVICE))
    a.check(whole[:, CUT])
    got = unpack(out, col.op, 32, torch.float32) if codes else out.data
    assert same(got.cpu()[CUT], expected[CUT])
    assert codes or got.cpu().isnan().any(1).logical_not().nonzero().flatten().tolist() == CUT.tolist()


@pytest.mark.parametrize("size, signs", [(2, "fixed"), (4, "fresh"), (8, "fixed"), (16, "fixed"),
                                         (32, "fixed"), (64, "fresh"), (128, "fixed")])
def test_rotations(size, signs):
    """ Catches: a sign of another strip, sums in another order, a row that is cut where a rotation ends. """
    check_pair(matrix(17, 100, faults=False), Side(None, 3, size, signs), None)


def test_addresses_beyond_32_bits():
    """ Catches: an offset that wraps around at 2^31 elements, and writes into somebody else's memory. """
    x = matrix(3, 64, faults=False).bfloat16()
    out = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=DEVICE).as_strided((3, 64), (2**30, 1))
    round_pair(x.to(DEVICE), Side(NEAREST), None, Out(out, stride=2**30), None, STATE, LAYER)
    assert same(out.cpu().float(), fake_quantize(x, NEAREST).bfloat16().float())


@triton.jit
def _sums_kernel(x_ptr, out_ptr, SIDE: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, 16)[:, None] * 128 + tl.arange(0, 128)[None, :])
    sums = rivals.kernels._sum(rounding._split(tl.reshape(x, [16, 8, 16])), SIDE)
    tl.store(out_ptr + tl.arange(0, 16)[:, None] * 8 + tl.arange(0, 8)[None, :], sums)


@pytest.mark.parametrize("rows, columns", [(1, 16), (16, 16), (1, 32)])
def test_sums_are_added_in_order(rows, columns):
    """
    Catches: another order of the additions. In the choices that hang on these sums it would show in one of a
    million blocks, here it shows in each.
    """
    x = torch.randn(16, 128, generator=torch.Generator().manual_seed(1)) ** 3
    out, op = torch.empty(16, 8, device=DEVICE), Operand(block=(rows, columns))
    _sums_kernel[(1,)](x.to(DEVICE), out, rounding.plan(Side(op), False), enable_fp_fusion=False)
    expected = rules.tree_sum(rules.to_blocks(x, op))[:, :, 0]
    assert torch.equal(out.cpu(), expected.repeat_interleave(rows, 0).repeat_interleave(columns // 16, 1))


# -----------------------------------------------------------------------------
# codes and scales


def packed_room(rows: int, columns: int, op: Operand) -> Out:
    """ Room for codes and scales, full of something else. """
    (height, width), stride = op.block, columns + -columns % 16
    down = -(-rows // height)
    inner = torch.full((down, -(-stride // width)), 0xAB, dtype=torch.uint8, device=DEVICE)
    shape = {TENSOR: (), ROW: (down, 1)}.get(op.outer, (down, -(-stride // 128)))
    outer = torch.full(shape, 7.0, device=DEVICE) if op.outer else None
    data = torch.full((rows, stride * (sign_bit(op) + 1) // 8), 0xAB, dtype=torch.uint8, device=DEVICE)
    return Out(data, inner, outer, stride)


def check_codes(out: Out, x: Tensor, side: Side):
    """ Codes and scales are those of quantize(), of rows padded with zeros to 16; and values come back. """
    v = turned(x, side)
    K, noise = v.shape[1], noise_of(v, side)
    v, noise = (t if t is None else nn.functional.pad(t, (0, -K % 16)) for t in (v, noise))
    q, op = quantize(v, side.op, noise), side.op
    assert torch.equal(out.inner.cpu(), q.inner)
    assert q.outer is None if out.outer is None else same(out.outer.cpu(), q.outer)
    # the sign of what is not finite is left open, and so is that of a zero that a rotation made
    sign = 1 << sign_bit(op)
    free = (~v.isfinite() | ((v == 0) if side.rotate else False)) * torch.tensor(sign, dtype=torch.uint8)
    got, expected, free = (t if sign > 8 else pack(t) for t in (out.data.cpu(), q.code, free)) \
        if sign > 8 else (out.data.cpu(), pack(q.code), pack(free))
    assert torch.equal(got & ~free, expected & ~free)
    for dtype in (torch.float32, torch.bfloat16)[: 1 if DEVICE == "cpu" else 2]:
        assert same(unpack(out, op, K, dtype).cpu(), q.dequantize()[:, :K].to(dtype))


@pytest.mark.parametrize("pair", ["tetrajet_base X", "tetrajet_base dY", "nvfp4 X", "four_over_six W",
                                  "mxfp8 X", "tetrajet_v1 X", "quartet2 dY", "ue5m3 W", "ufp4 dY",
                                  "per row W"])
def test_codes_and_scales(pair):
    """
    Catches: nibbles in the wrong order, a subnormal code or scale encoded as a normal one, the sign of what
    rounds to zero, scales of squares written once for each row or to the next one's place, padding that holds
    what was there before; and what is decoded by another format.
    """
    row, col, align = PAIRS[pair]
    tensor = any(side.op.outer == TENSOR for side in (row, col))
    x, extra = matrix(37, 119, faults=not tensor), Side(MXFP8, 5) if pair == "tetrajet_base dY" else None
    width = 37 + -37 % max(1, col.rotate)
    row_out = packed_room(37, 119 + -119 % max(1, row.rotate), row.op)
    outs = [row_out, packed_room(119, width, col.op), extra and packed_room(119, 37, extra.op)]
    round_pair(x.to(DEVICE), row, col, *outs[:2], STATE, LAYER, align=align, extra=extra, extra_out=outs[2])
    t = (value_of(x, row) if align else x).t().contiguous()
    for out, side, v in zip(outs, (row, col, extra), (x, t, t)):
        if side:
            check_codes(out, v, side)


def test_both_ends_of_e8m0():
    """ Catches: the bytes 0 and 255 read as 0 and Inf; quant.py says 2^-127 and NaN. """
    out = packed_room(1, 64, MXFP8)
    out.data.fill_(0x38)                                        # 1.0
    out.inner.copy_(torch.tensor([[0, 255]]))
    assert same(unpack(out, MXFP8, 64, torch.float32).cpu(),
                torch.tensor([2.0**-127, torch.nan]).repeat_interleave(32)[None])


# -----------------------------------------------------------------------------
# a step of OsciReset's window


@pytest.mark.parametrize("op, tracked", [(NEAREST, None), (NEAREST, .3), (RECIPES["nvidia"].y_w, None),
                                         (RECIPES["tetrajet_v1"].y_w, .3), (PER_ROW[0], .3)])
def test_track(op, tracked):
    """ Catches: a scale of another block or step, a flip that is counted twice, a history that is lost. """
    layer, twin = (QuantLinear(40, 33, bias=False, recipe=Recipe(y_w=op)).to(DEVICE) for _ in range(2))
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(33, 40, generator=generator)
    for one in (layer, twin):
        for name in osci.STATE:
            one.register_buffer(f"osci_{name}", None)
        one.weight.data.copy_(w)
        osci.open_window(one, w.to(DEVICE), quantize(w.to(DEVICE), op), tracked or 1)
    for _ in range(4):
        w = w + 0.3 * torch.randn(33, 40, generator=generator)
        q = quantize(w.to(DEVICE), op)
        osci.advance(twin, w.to(DEVICE), q, 8.0)
        track(layer, w.to(DEVICE), q, 8.0)
        for name in osci.STATE:
            a, b = getattr(layer, f"osci_{name}"), getattr(twin, f"osci_{name}")
            assert a is b is None or torch.equal(a, b), name
    assert layer.osci_counts.min() > 0


# -----------------------------------------------------------------------------
# around the linear


@pytest.mark.parametrize("size, signs, trust", [(32, "none", True), (128, "fixed", False), (1, "none", True)])
def test_turned_there_and_back(size, signs, trust):
    """
    Catches: signs of another strip, or before the matrix on the way back; a gradient of another width; a
    value that was clipped and keeps its gradient, or the other way round.
    """
    x, turn = matrix(33, 150), SIGNS[signs](size, COUNTER.state, LAYER, 0)
    op = RECIPES["quartet"].y_x if trust else None
    y, mask = rules.turn_there(x, turn, op)
    got, got_mask = rivals.kernels.there(x.to(DEVICE), turn.to(DEVICE), op)
    assert same(got.cpu(), y) and torch.equal(got_mask.cpu(), mask)
    assert not trust or 0.9 < mask.float().mean() < 1
    grad = matrix(33, y.shape[1])
    back = rivals.kernels.back(grad.to(DEVICE), mask.to(DEVICE), turn.to(DEVICE), 150)
    assert same(back.cpu(), rules.turn_back(grad, mask, turn, 150))


def test_ops_tell_their_shapes():
    """ Catches: a fake implementation with other shapes or dtypes than the real one. """
    x, signs, grad = torch.randn(3, 40), torch.ones(32), torch.ones(3, 64)
    cases = [(rivals.kernels._there, (x, signs, "e2m1", 1, 32, rule)) for rule in ("quest", "")]
    for op, args in (*cases, (rivals.kernels.back, (grad, grad.bool(), signs, 40))):
        args = [arg.to(DEVICE) if isinstance(arg, Tensor) else arg for arg in args]
        torch.library.opcheck(op, args, test_utils="test_faketensor")


# -----------------------------------------------------------------------------
# what only a GPU can show

on_a_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")


@triton.jit
def _divide_kernel(a_ptr, b_ptr, over_ptr, reciprocal_ptr, quotient_ptr, NUMBER: tl.constexpr,
                   BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(a_ptr + i), tl.load(b_ptr + i)
    tl.store(over_ptr + i, rounding.over(a, NUMBER))
    tl.store(reciprocal_ptr + i, rounding.reciprocal(a))
    tl.store(quotient_ptr + i, rounding.divide(a, b, rounding.reciprocal(b)))


# the grid numbers and scales that largest magnitudes are mapped to, by any rule
NUMBERS = sorted({grid.max * kernel.top for grid in GRIDS.values() for kernel in rounding.KERNELS.values()
                  if grid.max < 2**100} | {4.0, 256.0})


@on_a_gpu
@pytest.mark.parametrize("number", NUMBERS)
def test_every_mantissa_divides_exactly(number):
    """
    Catches: a quotient or a reciprocal that is one unit in the last place off, of all 2^23 mantissas. Scales
    are made from such quotients, and a scale that rounds the other way is another code.
    """
    mantissas = (torch.arange(2**23, dtype=torch.int32, device=DEVICE) | 127 << 23).view(torch.float32)
    b = mantissas[torch.randperm(2**23, device=DEVICE)]
    for exponent in (-90, -3, 0, 7, 90):
        a = mantissas * 2.0**exponent
        over, reciprocal, quotient = (torch.empty_like(a) for _ in range(3))
        _divide_kernel[(2**13,)](a, b, over, reciprocal, quotient, number, 1024, enable_fp_fusion=False)
        # a division by a tensor is exactly rounded in PyTorch; by a Python number it is not
        assert torch.equal(over, a / a.new_full((), number))
        assert torch.equal(reciprocal, a.new_ones(()) / a)
        assert torch.equal(quotient, a / b)


@on_a_gpu
@pytest.mark.parametrize("pair", ["tetrajet_base dY", "nvidia dY"])
def test_a_cuda_graph_sees_the_counter(pair):
    """ Catches: seed and step that a kernel takes as numbers, which a graph would repeat for ever. """
    row, col, align = PAIRS[pair]
    x, state = torch.randn(160, 96, device=DEVICE), STATE.clone()
    outs = [Out(torch.empty(shape, device=DEVICE), stride=shape[1]) for shape in ((160, 96), (96, 160))]

    def step():
        round_pair(x, row, col, *outs, state, LAYER, align=align)
        return outs[0].data.clone()
    expected = []
    for number in (3, 4):
        state[1] = number
        expected.append(step())
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        replayed = step()
    for number, wanted in zip((3, 4), expected):
        state[1] = number
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(replayed, wanted)
    assert not torch.equal(*expected)


# -----------------------------------------------------------------------------
# what is refused, and the key of a compiled kernel


@pytest.mark.parametrize("side, words", [
    (Side(Operand(block=(1, 8))), "1x8"), (Side(Operand(block=(2, 16))), "2x16"),
    (Side(Operand(outer=256)), "256"), (Side(Operand(outer=0)), "over 0"),
    (Side(replace(STOCHASTIC, rule="4/6")), "4/6"),
    (Side(replace(RECIPES["quartet2"].dx_w, block=(16, 16))), "16x16"), (Side(Operand(rule="mine")), "mine"),
    (Side(NEAREST, 3, 256), "256"), (Side(NEAREST, 3, 16, "mine"), "mine signs")])
def test_formats_without_a_kernel(side, words):
    """ Catches: a format that a kernel takes for another one, and a line that does not say which it is. """
    assert words in no_kernel(side) and "\n" not in no_kernel(side)


def test_what_cannot_be_packed_or_cut():
    """ Catches: outlier channels that get a scale of their own where all rows share one. """
    assert no_lines(SQUARE) and no_lines(replace(NEAREST, outer=TENSOR)) and not no_lines(NEAREST)
    assert no_lines(replace(SQUARE, outer=ROW)) and not no_lines(PER_ROW[1])
    assert no_codes(RECIPES["fp8"].y_x) and no_codes(RECIPES["quartet"].dx_w) and not no_codes(MXFP8)


RULE = """
import triton, rounding
@triton.jit
def mine(v, amax, factor, largest, place, SIDE):
    return rounding.round_blocks(v, amax, factor, largest, place, {up}, SIDE)
"""
PLANS = """
import one, quant, rounding, two
for name, file in (("one", one), ("two", two)):
    rounding.KERNELS[name] = rounding.Kernel(file.mine)
    print(rounding.plan(rounding.Side(quant.Operand(rule=name), 1), False)._replace(rule=""))
"""


def test_an_edited_rule_is_another_kernel(tmp_path):
    """ Catches: kernels on disk that are kept by a rule's name: after an edit the old one would run. """
    (tmp_path / "one.py").write_text(RULE.format(up=False))
    (tmp_path / "two.py").write_text(RULE.format(up=True))
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(Path(rounding.__file__).parent)])
    one, two = subprocess.run([sys.executable, "-c", PLANS], env=env, capture_output=True, text=True,
                              check=True).stdout.splitlines()
    assert one != two


# -----------------------------------------------------------------------------
# what the compiler makes of it for GPUs that are not here


def launch(pair: str, packed: bool = False, extra: Side | None = None):
    """ The kernel as a linear under bf16 starts it for one of its matrices, X with outlier channels. """
    row, col, align = PAIRS[pair]
    x = torch.zeros(256, 256, dtype=torch.float32 if pair.endswith("W") else torch.bfloat16)
    outs = [side and (packed_room(256, 256, side.op) if packed else Out(x.bfloat16(), stride=256))
            for side in (row, col, extra)]
    keep = torch.zeros(256, dtype=torch.int16) if pair == "tetrajet_base X" else None
    round_pair(x, row, col, *outs[:2], STATE, LAYER, align=align, keep=keep, extra=extra, extra_out=outs[2])


launch_x = partial(launch, "tetrajet_base X")
launch_x_packed = partial(launch, "tetrajet_base X", packed=True)
launch_dy = partial(launch, "tetrajet_base dY", extra=Side(MXFP8, 5))
launch_row = partial(launch, "per row X")
launch_six = partial(launch, "four_over_six W")
launch_if4 = partial(launch, "if4 dY")
launch_quartet = partial(launch, "quartet X")


def launch_unpack():
    unpack(packed_room(256, 256, STOCHASTIC), STOCHASTIC, 256, torch.bfloat16)


def launch_there():
    rivals.kernels.there(torch.zeros(256, 256, dtype=torch.bfloat16), torch.ones(32), RECIPES["quartet"].y_x)


# (what is launched, architecture): bytes of a thread's values that find no register, waits for other warps,
# instructions for each value. A rounding kernel takes 5 to 20 s to compile the first time, so each kernel and
# each architecture is here, but not each with each other
LIMITS = {("x", 80): (0, 1, 46), ("dy", 90): (24, 1, 65), ("row", 90): (40, 1, 44),
          ("x_packed", 100): (0, 7, 60), ("six", 90): (0, 55, 92), ("there", 120): (0, 0, 36),
          ("unpack", 120): (0, 3, 14)}
# how many values a thread has
VALUES = {"there": 64 * 128 // 128, "unpack": 256 * 16 // 128, "six": 128 * 128 // 512}
KERNELS = {"there": "rivals.kernels:_there_kernel", "unpack": "rounding:_unpack_kernel"}


@pytest.fixture(scope="module", params=TRITONS)
def compiled(request):
    jobs = [Job(KERNELS.get(name, "rounding:_pair_kernel"), arch, f"test_rounding:launch_{name}")
            for name, arch in LIMITS]
    return dict(zip(LIMITS, compile_many(jobs, request.param)))


@pytest.mark.parametrize("name, arch", LIMITS)
def test_fits_the_gpu(name, arch, compiled):
    """
    Catches: values that spill, more shared memory than the smallest GPU has, 99 KiB, and a layout in which a
    step of the rounding moves values between threads: then there are more waits, shuffles and instructions.
    The transposition alone goes through shared memory. Newer Tritons did so to addresses of three dimensions.
    """
    result, (spills, waits, instructions) = compiled[name, arch], LIMITS[name, arch]
    values = VALUES.get(name, 128 * 128 // 256)
    assert result.spills <= spills and result.registers <= (255 if "packed" in name else 128)
    assert result.shared <= 99 * 1024
    assert result.sass.get("BAR", 0) <= waits and result.sass.get("SHFL", 0) <= 2 * values
    assert sum(result.sass.values()) - result.sass.get("NOP", 0) <= instructions * values


def test_maxima_keep_nan(compiled):
    """
    Catches: a maximum that drops NaN, as the instruction does by default. The interpreter's keeps it either
    way. A thread has 64 values of each side, and 15 of the 16 in a strip meet in a maximum.
    """
    assert compiled["x", 80].ptx.count("max.NaN.f32") >= 2 * 64 * 15 // 16


def test_compiled_as_on_that_gpu(compiled):
    """
    Catches: a kernel that asks what GPU it is on and hears of this machine's: then what is counted here is
    not what a GPU gets, and beside a newer GPU the code for sm_80 has an instruction that it does not know.
    """
    assert [".xorsign" in compiled[key].ptx for key in (("x", 80), ("six", 90))] == [False, True]

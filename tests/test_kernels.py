"""
The kernels of kernels.py and the two back ends of fused.py, against quant.py: bit for bit.

On a GPU the kernels run there; without one, in Triton's interpreter, which conftest.py switches on. The
interpreter cuts float32 off to bf16 where a GPU rounds; what goes through pairs of bf16 is rounded on both.
What the compiler makes of the kernels for GPUs that are not here, crosscompile.py tells.
"""
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import quant
from quant import (DW_SIGNS, DX_SIGNS, FIXED_SIGNS, NO_SIGNS, TENSOR, Counter, Operand, Recipe, fake_quantize,
                   hadamard, linear_backward, linear_forward, pack, quantize, random_signs, uniform, unpack)
from recipes import MXFP8, NEAREST, RECIPES, STOCHASTIC
from test_linear import CHANNELS, layer_of, randn, reference, run

pytest.importorskip("triton", reason="needs Triton, which the CPU build of PyTorch does not bring along")
import triton                                                   # noqa: E402
import triton.language as tl                                    # noqa: E402

import fused                                                    # noqa: E402
import kernels                                                  # noqa: E402
from crosscompile import Job, compile_many                      # noqa: E402
from fused import keep_of, packed_bytes, room, unpacked, up, values         # noqa: E402
from kernels import Out, Side, round_pair                       # noqa: E402

# Triton's interpreter divides by the scales of empty blocks, too, before it leaves the quotients out
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CORE = [f"tetrajet_{name}" for name in ("base", "full", "released")]
# with a config file; one of your own may be for the reference alone
PUBLISHED = [name for name in RECIPES if (Path(fused.__file__).with_name("configs") / f"{name}.py").exists()]
BASE, FULL, RELEASED = (RECIPES[name] for name in CORE)
LAYER = 2
COUNTER = Counter(seed=2**40 + 7, rank=3)       # a seed of more than 32 bits, and a rank
COUNTER.set(5, micro=2)
POISON = -12288.0                               # exact in bf16 and float16


def row_side(op: Operand | None, turn: int = 0) -> Side:
    return Side(op, turn, noise=3, signs=DX_SIGNS)


def col_side(op: Operand | None, turn: int = 0) -> Side:
    return Side(op, turn, noise=5, signs=DW_SIGNS)


def sr(**changes) -> Operand:
    return replace(STOCHASTIC, hadamard=0, **changes)


MXFP4 = Operand(block=(1, 32), scale="e8m0", outer=0)
SQUARE = Operand(block=(16, 16))
SCALED = Operand(outer=TENSOR)
FP8 = Operand(grid="e4m3", block=(1, 128), scale="none", outer=TENSOR)
UNIFORM, UE5M3 = replace(SCALED, grid="e1m2"), replace(SCALED, scale="ue5m3")
SIX, EDEN = replace(SCALED, rule="4/6"), Operand(outer=TENSOR, rounding="eden")
QUEST, THREE_FOURTHS = replace(MXFP4, rule="quest"), replace(MXFP4, rule="3/4")
# name: row side, column side, align
PAIRS = {
    "X": (row_side(NEAREST), col_side(STOCHASTIC, 16), True),
    "dY": (row_side(STOCHASTIC, 16), col_side(STOCHASTIC, 16), False),
    "released": (row_side(sr(rule="nearest"), 16), col_side(sr(rule="nearest"), 32), False),
    "up": (row_side(replace(NEAREST, rule="up")), col_side(sr()), False),
    "17/16": (row_side(replace(NEAREST, rule="17/16")), col_side(sr(rule="17/16")), True),
    "tensor": (row_side(SCALED), col_side(sr(outer=TENSOR), 16), True),
    "tensor 17/16": (row_side(sr(outer=TENSOR, rule="17/16")), col_side(replace(SCALED, rule="17/16")),
                     False),
    "squares": (row_side(replace(SQUARE, outer=TENSOR)), col_side(SQUARE), True),
    "squares sr": (row_side(sr(block=(16, 16)), 16), col_side(sr(block=(16, 16), outer=TENSOR), 16),
                   False),
    "mxfp8": (row_side(MXFP8), col_side(replace(MXFP8, rounding="sr")), True),
    "mxfp8 floor": (row_side(replace(MXFP8, rule="floor", rounding="sr")), col_side(MXFP8, 16), False),
    "mxfp4": (row_side(MXFP4), col_side(replace(MXFP4, rule="floor")), True),
    "mxfp4 sr": (row_side(replace(MXFP4, rounding="sr"), 32),
                 col_side(replace(MXFP4, rule="floor", rounding="sr"), 16), False),
    "e5m2": (row_side(replace(MXFP8, grid="e5m2")),
             col_side(replace(MXFP8, grid="e5m2", rule="floor", rounding="sr"), 16), False),
    "fp8": (row_side(FP8), col_side(replace(FP8, grid="e5m2", rounding="sr")), True),
    "fp8 in 128": (row_side(replace(FP8, outer=128, grid="e5m2")),
                   col_side(replace(FP8, outer=128, block=(16, 128), rounding="sr"), 16), False),
    "e4m3 in e4m3": (row_side(replace(NEAREST, grid="e4m3")), col_side(sr(grid="e4m3", outer=TENSOR)), True),
    "uniform": (row_side(UNIFORM, 16), col_side(replace(UNIFORM, rounding="sr", rule="nearest"), 16), False),
    "ue5m3": (row_side(UE5M3), col_side(replace(UE5M3, rounding="sr", rule="up")), True),
    "ue5m3 squares": (row_side(replace(UE5M3, block=(16, 16))),
                      col_side(replace(UE5M3, outer=128, rounding="sr", rule="17/16"), 16), False),
    "4/6": (row_side(replace(SIX, outer=128)), col_side(SIX, 16), True),
    "4/6 squares": (row_side(replace(SIX, block=(16, 16))), col_side(replace(SIX, block=(16, 16))), False),
    "4/6 ue5m3": (row_side(replace(UE5M3, rule="4/6"), 32), col_side(replace(SIX, block=(1, 32)), 16), True),
    "eden": (row_side(EDEN, 128), col_side(EDEN, 128), False),
    "eden in 128": (row_side(replace(EDEN, outer=128)), col_side(replace(EDEN, outer=128), 64), True),
    "eden 1x32": (row_side(replace(EDEN, block=(1, 32))), col_side(replace(EDEN, block=(1, 32))), False),
    "quest": (row_side(QUEST), col_side(replace(QUEST, rounding="sr"), 32), True),
    "3/4": (row_side(THREE_FOURTHS, 32), col_side(replace(THREE_FOURTHS, rounding="sr"), 32), True),
    "turn 64, 128": (row_side(MXFP4, 64), col_side(sr(), 128), True),
    "fixed": (Side(NEAREST, 16, 3, FIXED_SIGNS), Side(STOCHASTIC, 128, 5, FIXED_SIGNS), False),
    "plain": (Side(NEAREST, 32, 3, NO_SIGNS), Side(None, 64, 5, NO_SIGNS), True),
    "copy": (row_side(None), col_side(None, 16), True),
    "turn 32": (row_side(None, 32), col_side(STOCHASTIC, 32), False),
}


def matrix(M: int, K: int, size: float = 1.0, dtype: torch.dtype = torch.float32,
           faults: bool = False) -> Tensor:
    """ Values of very different size, exact ties, zeros of both signs, blocks of zeros, tiny rows. """
    generator = torch.Generator().manual_seed(M * 1000 + K)
    x = torch.randn(M, K, generator=generator) * torch.randn(M, K, generator=generator).mul(2).exp() * size
    if M > 12:
        x[2] = 0
        x[3, : K // 2] = 0
        x[4] = 2.0**-101
        # with 6 in each block its scale is a power of two, and these are ties
        x[6] = (torch.arange(K) % 25 - 12) * 0.25
        x[6, ::16] = 6.0
        x[7, ::3] = -0.0
        x[8] *= 1e-3
        x[10] = 12          # with rule 4/6, exact both ways
    if faults:
        x[1, 20], x[9, 100], x[11, 5] = torch.nan, torch.inf, -torch.inf
    return x.to(dtype)


def mixed(M: int, K: int) -> Tensor:
    """ Outer blocks of 1e-20 and of 1e20 side by side, and of 1 where there are three. """
    x = matrix(M, K)
    x[:, :128] *= 1e-20
    x[:, 128:256] *= 1e20
    return x


# -----------------------------------------------------------------------------
# what the reference makes of the same arguments

def signs_of(side: Side) -> Tensor:
    if side.signs == NO_SIGNS:
        return torch.ones(side.turn)
    if side.signs == FIXED_SIGNS:
        return random_signs(side.turn, Counter(2**40 + 7).state, 0, FIXED_SIGNS)
    return random_signs(side.turn, COUNTER.state, LAYER, side.signs)


def turned(x: Tensor, side: Side) -> Tensor:
    return hadamard(x, signs_of(side)) if side.turn else x.float()


def noise_of(x: Tensor, side: Side) -> Tensor | None:
    return uniform(x.shape, COUNTER.state, LAYER, side.noise) if side.op.stochastic else None


def value_of(x: Tensor, side: Side) -> Tensor:
    x = turned(x, side)
    return fake_quantize(x, side.op, noise_of(x, side)) if side.op else x


def starts(x: Tensor, row: Side | None, align: bool, channels: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """ What each side starts from, (M, K) and (K, M), float32. """
    x = x.float() if channels is None else x.float().index_fill(1, channels, 0.0)
    return x, (value_of(x, row) if align and row else x).t().contiguous()


def same(a: Tensor, b: Tensor) -> bool:
    """ Equal, NaN where the other has NaN. -0 is 0: products cannot tell them apart. """
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


class Guarded:
    """ Room for one side's values in a larger matrix, all of it poisoned. """

    def __init__(self, rows: int, columns: int, side: Side | None, dtype: torch.dtype):
        self.shape = rows, up(columns, side.turn if side else 0)
        self.whole = torch.full((rows + 2, self.shape[1] + 16), POISON, dtype=dtype, device=DEVICE)
        self.out = Out(self.whole[1:-1, 8:-8], None, None, self.whole.shape[1]) if side else None

    def check(self, expected: Tensor, bits: bool = False):
        got = self.out.data.clone().cpu()
        self.out.data.fill_(POISON)
        assert (self.whole == POISON).all(), "written outside of the output"
        if got.dtype == torch.bfloat16 and DEVICE == "cpu" and self.shape[1] % 8:
            cut = (expected.contiguous().view(torch.int32) & -65536).view(torch.float32)
            expected = torch.where(expected.isnan(), expected, cut)
        expected = expected.to(got.dtype)
        assert expected.shape == self.shape and same(got, expected)
        assert not bits or torch.equal(got.signbit() | got.isnan(), expected.signbit() | expected.isnan())


def check_pair(x: Tensor, row: Side | None, col: Side | None, align: bool, dtype: torch.dtype | None = None,
               channels: Tensor | None = None, extra: Side | None = None):
    """ round_pair with these arguments writes what the reference computes, and nothing else. """
    M, K = x.shape
    lines = up(K, row.turn) if row and align else K
    a, at, at8 = (Guarded(*shape, side, dtype or x.dtype) for shape, side in
                  (((M, K), row), ((lines, M), col), ((lines, M), extra)))
    keep = None if channels is None else keep_of(channels, K).to(DEVICE)
    round_pair(x.to(DEVICE), row, col, a.out, at.out, COUNTER.state.to(DEVICE), LAYER, align=align, keep=keep,
               extra=extra, extra_out=at8.out)
    start, t = starts(x, row, align, channels)
    for guarded, side, v in ((a, row, start), (at, col, t), (at8, extra, t)):
        if side:
            guarded.check(value_of(v, side), bits=side.op is None and not side.turn)


# -----------------------------------------------------------------------------
# values

CASES = {
    "bf16": lambda: matrix(128, 128, dtype=torch.bfloat16, faults=True),
    "float16": lambda: matrix(20, 40, dtype=torch.float16),
    "mixed": lambda: mixed(33, 140),
    "one": lambda: matrix(1, 1, 1e20),
    "small": lambda: matrix(17, 16, 1e-20),
    "zeros": lambda: torch.zeros(17, 16),
    "wide": lambda: mixed(33, 300),
    "huge": lambda: matrix(20, 40).clamp(-1, 1) * 3e38,
}


@pytest.mark.parametrize("pair, case", [
    *((pair, case) for pair in PAIRS for case in ("bf16", "mixed") if (pair, case) != ("eden", "mixed")),
    *((pair, "float16") for pair in ("X", "dY", "squares sr", "4/6")),
    *((pair, case) for pair in ("X", "tensor", "squares", "mxfp4 sr") for case in ("one", "small", "zeros")),
    ("X", "wide"), ("4/6", "huge"), ("quest", "huge")])
def test_values_are_those_of_the_reference(pair, case):
    """
    Catches: a group of noise or a sign vector that is not the reference's, a scale rounded by another rule or
    that of another block, a value that is not clipped, a NaN that a maximum loses or that spreads, a block of
    zeros that is not zero, a ragged edge that is read or written beyond.
    """
    row, col, align = PAIRS[pair]
    check_pair(CASES[case](), row, col, align, extra=col_side(MXFP8) if pair == "dY" else None)


@pytest.mark.parametrize("pair, M, K, dtype", [
    ("X", 136, 272, torch.float32), ("X", 130, 136, torch.bfloat16), ("dY", 130, 136, torch.bfloat16),
    ("squares", 130, 136, torch.float32)])
def test_several_tiles(pair, M, K, dtype):
    """
    Catches: the second tile taken for the first, in the noise or in where it is stored, and bf16 rows that
    are not whole pieces of 16 bytes: 130 values go out one by one, 136 and 272 in pairs.
    """
    row, col, align = PAIRS[pair]
    check_pair(matrix(M, K, dtype=dtype), row, col, align, torch.bfloat16,
               extra=col_side(MXFP8) if pair == "dY" else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_side_only(dtype):
    """ Catches: a side that is taken from the other's output, or written although nobody asked for it. """
    x = matrix(40, 24, dtype=dtype)
    check_pair(x, row_side(NEAREST), None, False)
    check_pair(x, None, col_side(STOCHASTIC, 16), False)


@pytest.mark.parametrize("K, dtype", [(40, torch.float32), (40, torch.bfloat16), (37, torch.bfloat16)])
def test_outlier_columns(K, dtype):
    """
    Catches: an outlier column that counts in its block's scale or keeps its values; one that holds NaN and is
    multiplied by zero; the wrong half of a pair of bf16 that is masked.
    """
    x = matrix(130, K, dtype=dtype)
    channels = torch.tensor([0, 5, 17, 30, K - 1])
    x[:, channels] = 1e9
    x[3, 5], x[4, K - 1] = torch.nan, torch.inf
    for align in (True, False):
        check_pair(x, row_side(NEAREST), col_side(STOCHASTIC, 16), align, channels=channels)


def test_a_grid_that_somebody_adds(monkeypatch):
    """ Catches: a kernel that knows the grids by name, or takes one for another of as many bits. """
    monkeypatch.setitem(quant.GRIDS, "e3m0", quant.Grid(emin=-2, mbits=0, max=16.0))
    monkeypatch.setattr(quant, "NIBBLES", (*quant.NIBBLES, "e3m0"))
    monkeypatch.setattr(kernels, "FORMATS", str(quant.GRIDS))
    row, col = row_side(replace(SCALED, grid="e3m0")), col_side(sr(grid="e3m0"))
    check_pair(matrix(40, 40), row, col, True)
    out = room(torch.empty(0, device=DEVICE), 40, 40, row)
    round_pair(matrix(40, 40).to(DEVICE), row, None, out[1], None, COUNTER.state.to(DEVICE), LAYER)
    check_codes(out[0], 40, 40, matrix(40, 40), row)


@triton.jit
def _sums_kernel(x_ptr, out_ptr, OP: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, 16)[:, None] * 128 + tl.arange(0, 128)[None, :])
    sums = kernels._sum(kernels._split(tl.reshape(x, [16, 8, 16]), 16), OP)
    tl.store(out_ptr + tl.arange(0, 16)[:, None] * 8 + tl.arange(0, 8)[None, :], sums)


@pytest.mark.parametrize("block", [(1, 16), (16, 16), (1, 32)])
def test_sums_are_added_in_order(block):
    """
    Catches: another order of the additions. In the choices that hang on these sums it would show in one of a
    million blocks, here it shows in each.
    """
    x = torch.randn(16, 128, generator=torch.Generator().manual_seed(1)) ** 3
    out = torch.empty(16, 8, device=DEVICE)
    _sums_kernel[(1,)](x.to(DEVICE), out, Operand(block=block), enable_fp_fusion=False)
    rows, columns = block
    expected = quant._sum(x.view(16 // rows, rows, 128 // columns, columns))
    assert torch.equal(out.cpu(), expected.repeat_interleave(rows, 0).repeat_interleave(columns // 16, 1))


# -----------------------------------------------------------------------------
# lines: what was cut out of a matrix goes back to its rows of the transposed side

CUT = torch.tensor([0, 5, 17, 130, 139])


@pytest.mark.parametrize("align", [True, False])
def test_lines_of_values(align):
    """ Catches: noise of the place in the cut, a row written to the place in the cut, or one too many. """
    x = matrix(40, 140)
    row, col = row_side(MXFP8), col_side(STOCHASTIC, 16)
    a, at = Guarded(40, len(CUT), row, x.dtype), Guarded(140, 40, col, x.dtype)
    round_pair(x[:, CUT].contiguous().to(DEVICE), row, col, a.out, at.out, COUNTER.state.to(DEVICE), LAYER,
               align=align, lines=CUT.to(DEVICE))
    start = value_of(x[:, CUT], row)
    a.check(start)
    # the reference rounds a whole matrix, which has the same rows there
    whole = x.clone()
    whole[:, CUT] = start if align else x[:, CUT]
    expected = torch.full((140, 48), POISON)
    expected[CUT] = value_of(whole.t().contiguous(), col)[CUT]
    at.check(expected)


def test_lines_of_codes():
    """ Catches: scales of such rows that are stored elsewhere than their codes, rows that change others. """
    x = matrix(40, 140)
    row, col = row_side(MXFP8), col_side(STOCHASTIC, 16)
    state = COUNTER.state.to(DEVICE)
    (buffer, out), (_, cut_out) = room(x.to(DEVICE), 140, 40, col), room(x.to(DEVICE), 40, len(CUT), row)
    round_pair(x.to(DEVICE), None, col, None, out, state, LAYER, keep=keep_of(CUT, 140).to(DEVICE))
    round_pair(x[:, CUT].contiguous().to(DEVICE), row, col, cut_out, out, state, LAYER, align=True,
               lines=CUT.to(DEVICE))
    whole = x.clone()
    whole[:, CUT] = value_of(x[:, CUT], row)
    check_codes(buffer, 140, 40, whole.t().contiguous(), col)


def test_lines_need_rows_of_their_own():
    """
    Catches: rows that share a scale with rows that are not there, those of a square or of a whole tensor: it
    would be that of the few alone.
    """
    x, out = torch.zeros(32, 16, device=DEVICE), torch.zeros(64, 32, device=DEVICE)
    for op in (SQUARE, SCALED):
        with pytest.raises(ValueError, match="reference back end") as error:
            round_pair(x, None, col_side(op), None, Out(out, None, None, 32), COUNTER.state.to(DEVICE), LAYER,
                       lines=torch.arange(16, device=DEVICE))
        assert "\n" not in str(error.value)
        with pytest.raises(ValueError, match="reference back end"):
            round_pair(x, None, col_side(None), None, Out(out, None, None, 32), COUNTER.state.to(DEVICE),
                       LAYER, extra=col_side(op), extra_out=Out(out, None, None, 32))
        recipe = replace(FULL, dx_w=replace(op, rounding="sr", hadamard=16))
        assert all("Q4" in problem(recipe) for problem in (fused.emulate_problem, fused.native_problem))
        assert fused.emulate_problem(replace(recipe, align=False)) == ""
        assert fused.emulate_problem(replace(recipe, outlier=None)) == ""


def test_nothing_to_do():
    """ Catches: a grid without programs, which is an error on a GPU, and an output that is not there. """
    for shape in ((0, 16), (16, 0)):
        x = torch.empty(shape, device=DEVICE)
        round_pair(x, row_side(NEAREST), None, values(x, *shape, row_side(NEAREST)), None,
                   COUNTER.state.to(DEVICE), LAYER)


# -----------------------------------------------------------------------------
# codes and scales

PACKED = ("X", "dY", "up", "tensor", "squares", "mxfp8", "mxfp4")
PACKED_ONCE = ("e5m2", "fp8", "fp8 in 128", "uniform", "ue5m3", "4/6", "4/6 squares", "eden", "quest")


def check_codes(buffer: Tensor, rows: int, columns: int, x: Tensor, side: Side):
    """ A buffer's codes and scales are those of quantize(x), rows padded with zeros to 16 values. """
    got = unpacked(buffer, rows, columns, side)
    op, v = side.op, turned(x, side)
    noise, missing = noise_of(v, side), -v.shape[1] % 16
    noise = None if noise is None else F.pad(noise, (0, missing))
    v = F.pad(v, (0, missing))
    q = quantize(v, op, noise)
    assert torch.equal(got.inner.cpu(), q.inner)
    assert q.outer is None if got.outer is None else same(got.outer.cpu(), q.outer)
    code = got.data.cpu() if op.bits == 8 else unpack(got.data.cpu(), v.shape[1])
    assert got.data.shape[1] * 8 == v.shape[1] * op.bits
    assert op.bits == 8 or torch.equal(pack(code), got.data.cpu())
    # the sign of what is not finite is left open, and so is that of a zero that a rotation made
    sign = 1 << (op.bits - 1)
    strict = v.isfinite() & ((v != 0) if side.turn else True)
    assert torch.equal(code & ~sign, q.code & ~sign) and torch.equal(code[strict], q.code[strict])


@pytest.mark.parametrize("pair, case", [(pair, case) for pair in PACKED for case in ("mixed", "bf16")]
                         + [("X", "one"), ("squares", "one"), ("tensor", "zeros")]
                         + [(pair, "bf16") for pair in PACKED_ONCE])
def test_codes_and_scales_are_those_of_the_reference(pair, case):
    """
    Catches: nibbles in the wrong order, a subnormal code or scale encoded as a normal one, the sign of what
    rounds to zero, scales of squares written once for each row or to the next one's place, padding that holds
    what was there before.
    """
    row, col, align = PAIRS[pair]
    x = CASES[case]()
    M, K = x.shape
    extra = col_side(MXFP8) if pair == "dY" else None
    sides = [(row, (M, K)), (col, (K, M)), (extra, (K, M))]
    guarded = [torch.full((64 + packed_bytes(*shape, side),), 0xAB, dtype=torch.uint8, device=DEVICE)
               if side else None for side, shape in sides]
    outs = [side and unpacked(whole[32:-32], *shape, side) for whole, (side, shape) in zip(guarded, sides)]
    round_pair(x.to(DEVICE), row, col, outs[0], outs[1], COUNTER.state.to(DEVICE), LAYER, align=align,
               extra=extra, extra_out=outs[2])
    start, t = starts(x, row, align)
    for whole, (side, shape), v in zip(guarded, sides, (start, t, t)):
        if side:
            check_codes(whole[32:-32], *shape, v, side)
            assert (whole[:32] == 0xAB).all() and (whole[-32:] == 0xAB).all(), "written outside of the output"


def test_codes_of_outlier_columns():
    """ Catches: a mask that only the values see. """
    x, channels = matrix(40, 40), torch.tensor([0, 5, 39])
    x[3, 5] = torch.nan
    row, col, _ = PAIRS["X"]
    buffers = [room(x.to(DEVICE), 40, 40, side) for side in (row, col)]
    round_pair(x.to(DEVICE), row, col, buffers[0][1], buffers[1][1], COUNTER.state.to(DEVICE), LAYER,
               align=True, keep=keep_of(channels, 40).to(DEVICE))
    for (buffer, _), side, v in zip(buffers, (row, col), starts(x, row, True, channels)):
        check_codes(buffer, 40, 40, v, side)


# -----------------------------------------------------------------------------
# noise

def test_both_sides_have_noise_of_their_own():
    """
    Catches: one stream for both sides, noise of a position that both read, or eight values of one draw that
    agree. Every value lies in the middle of a gap, so each one up or down is a toss of a coin; two that are
    independent agree in half of the cases.
    """
    x = torch.full((128, 128), 2.5)
    x[:, ::16], x[::16] = 6.0, 6.0
    op = sr(block=(1, 16), outer=0, scale="e8m0", rule="ceil")
    row, col = row_side(op), col_side(op)
    a, at = torch.empty(128, 128, device=DEVICE), torch.empty(128, 128, device=DEVICE)

    def tosses(col) -> tuple[Tensor, Tensor]:
        round_pair(x.to(DEVICE), row, col, Out(a, None, None, 128), Out(at, None, None, 128),
                   COUNTER.state.to(DEVICE), LAYER)
        keep = torch.arange(128) % 16 != 0
        for t in (a, at):
            assert ((t == 2) | (t == 3) | (t == 6)).all()
        return tuple(t.cpu()[keep][:, keep] == 3 for t in (a, at))

    ups, other = tosses(col)
    n, sigma = ups.numel(), ups.numel() ** 0.5 / 2
    for agree in (ups == other, ups == other.t(), ups, other, ups[:, 1:] == ups[:, :-1]):
        assert abs(int(agree.sum()) - agree.numel() / 2) < 5 * sigma
    # the test can tell: with one stream for both, the transposed side of this matrix is the other once more
    ups, other = tosses(col._replace(noise=row.noise))
    assert int((ups == other).sum()) == n


# -----------------------------------------------------------------------------
# the linear

HALF_ULP = 2.0**-24     # of float32, relative


def layer(recipe: Recipe, backend: str, K: int = 21, N: int = 19, outliers: bool = False):
    """ A layer on the GPU, if there is one, and its twin that the reference computes, on the CPU. """
    one, twin = (layer_of(recipe, K, N, channels=CHANNELS if outliers else None, backend=b)
                 for b in (backend, "reference"))
    one.counter.to(DEVICE)
    return one.to(DEVICE), twin


def step(linear, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    return {k: v.cpu() for k, v in run(linear, x.to(DEVICE), dy.to(DEVICE)).items()}


def exact(a: Tensor, b: Tensor) -> Tensor:
    return a.double() @ b.double().t()


def sizes(a: Tensor, b: Tensor) -> Tensor:
    return exact(a.abs(), b.abs())


def assert_close(got: dict, linear, x: Tensor, dy: Tensor):
    """
    y, dx and dw are the products of the reference's operands, but for the error of a float32 sum: each of its
    terms meets one rounding for each addition, and some for the scales and the result. A GPU's tensor cores
    truncate: twice that.
    """
    wanted, bound = (reference(linear, x, dy, multiply) for multiply in (exact, sizes))
    (T, K), N = x.shape, linear.out_features
    for name, terms in (("y", K + len(CHANNELS)), ("dx", N + 32), ("dw", T + 32)):
        error = (got[name].double() - wanted[name]).abs()
        limit = bound[name] * HALF_ULP * (terms + 8) * (2 if DEVICE == "cuda" else 1)
        assert (error <= limit).all(), f"{name}: {(error / limit).max():.3g} times the bound"


MX_SR = replace(MXFP4, rounding="sr", hadamard=32)
SQUARES, STRIPS = replace(SQUARE, outer=TENSOR), sr(outer=TENSOR)
RECIPE_CASES = {
    "base": (BASE, False), "full": (FULL, True), "full, none chosen": (FULL, False),
    "released": (RELEASED, True), "not aligned": (replace(FULL, align=False), True),
    "per tensor": (Recipe(SCALED, SQUARES, STRIPS, SQUARES, STRIPS, STRIPS, align=False), False),
    "mx": (Recipe(MXFP4, MXFP4, MX_SR, MX_SR, MX_SR, MX_SR, outlier=MXFP8), True),
}


@pytest.mark.parametrize("case, T", [("full", 1), ("full, none chosen", 20), ("full", 130), ("base", 130),
                                     ("released", 20), ("not aligned", 20), ("per tensor", 20), ("mx", 20)])
def test_emulated_step(case, T):
    """
    Catches: a side that gets another operand's format, stream or signs, alignment with the wrong tensor,
    outlier columns in the wrong place of the wider operands, padding of a ragged axis that is not zero. The
    operands are those of the reference, so what one product computes is the reference's, bit for bit; y is
    the sum of two there and one product here.
    """
    recipe, outliers = RECIPE_CASES[case]
    linear, twin = layer(recipe, "emulate", outliers=outliers)
    x, dy = matrix(T, 21), matrix(T, 19)
    got, wanted = step(linear, x, dy), reference(twin, x, dy)
    if DEVICE == "cpu":
        for name in ("dx", "dw") if outliers else ("y", "dx", "dw"):
            assert torch.equal(got[name], wanted[name]), name
    assert_close(got, twin, x, dy)


FORWARD_TURNED = replace(SCALED, hadamard=64, signs="fixed")
TRUSTED = Recipe(QUEST, replace(QUEST, rule="ceil"), trust=True)
OTHER_RECIPES = {
    # Quartet's forward pass alone: masks in rotated coordinates, products in the original ones
    "forward of quartet": RECIPES["quartet"].only([1, 2]),
    "trust without rotation": replace(TRUSTED, dw_dy=MX_SR, dw_x=MX_SR),
    "turned 64, aligned": replace(BASE, y_x=FORWARD_TURNED, y_w=FORWARD_TURNED),
    "turned 64, w alone": Recipe(y_w=FORWARD_TURNED, dx_w=STRIPS),
}


@pytest.mark.parametrize("name", [*(name for name in PUBLISHED if name not in ("bf16", *CORE)),
                                  *OTHER_RECIPES])
def test_each_recipe(name):
    """
    Catches: fixed signs that depend on step or layer, a mask of the wrong operand or of unrotated values, a
    gradient that is not turned back or is turned twice, what the backward pass finds in rotated coordinates
    cut to K columns, a largest magnitude of the tensor that is taken before the rotation. Reference and
    kernels multiply the same operands by the same product, so all bits agree, on a GPU too.
    """
    recipe = RECIPES.get(name) or OTHER_RECIPES[name]
    assert fused.emulate_problem(recipe) == ""
    linear, twin = layer(recipe, "emulate", K=40)
    x, dy = matrix(20, 40), matrix(20, 19)
    twin.counter.to(DEVICE)
    got, wanted = step(linear, x, dy), step(twin.to(DEVICE), x, dy)
    for kind in ("y", "dx", "dw"):
        assert torch.equal(got[kind], wanted[kind]), kind


@pytest.mark.skipif(DEVICE == "cuda", reason="these kernels are tested above, and take seconds to compile")
@pytest.mark.parametrize("number, align", [*((n, True) for n in range(1, 7)), (4, False), (6, False)])
def test_each_quantizer_alone(number, align):
    """
    Catches: an operand that is taken from its rounded twin although it is off, a rotation that only one of
    two operands has, outlier channels rounded where their operand is off.
    """
    recipe = replace(FULL.only([number]), align=align)
    linear, twin = layer(recipe, "emulate", outliers=True)
    x, dy = randn(20, 21), randn(20, 19, seed=1)
    got, wanted = step(linear, x, dy), reference(twin, x, dy)
    assert torch.equal(got["dx"], wanted["dx"]) and torch.equal(got["dw"], wanted["dw"])
    # the two products of the reference's y are one here
    assert (got["y"] - wanted["y"]).abs().max() <= 64 * HALF_ULP * sizes(x, twin.weight.detach()).max()


def test_emulated_step_in_bf16():
    """ Catches: operands rounded to bf16 twice, or a master weight that is cast before it is rounded. """
    linear, twin = layer(FULL, "emulate", K=40, N=48, outliers=True)
    x, dy = randn(24, 40, dtype=torch.bfloat16), randn(24, 48, seed=1, dtype=torch.bfloat16)
    got = {k: v.float() for k, v in step(linear, x, dy).items()}

    def rounded(multiply):
        return lambda a, b: multiply(a.bfloat16(), b.bfloat16())
    for name, terms in (("y", 45), ("dx", 48), ("dw", 32)):
        wanted, size = (reference(twin, x, dy, rounded(m))[name] for m in (exact, sizes))
        error = (got[name].double() - wanted).abs()
        assert (error <= size * HALF_ULP * 2 * terms + wanted.abs() * 2.0**-8 * 1.01).all(), name


@pytest.mark.parametrize("case, T", [("full", 1), ("full", 130), ("base", 20), ("released", 20),
                                     ("not aligned", 20), ("per tensor", 20), ("mx", 20)])
def test_native_step(case, T):
    """
    Catches: codes or scales of one operand read as another's, a buffer cut at the wrong byte, the scales of
    squares that are not repeated for each of their rows, an MXFP8 product that is left out or added twice.
    """
    recipe, outliers = RECIPE_CASES[case]
    linear, twin = layer(recipe, "native", outliers=outliers)
    x, dy = matrix(T, 21), matrix(T, 19)
    assert_close(step(linear, x, dy), twin, x, dy)


@pytest.mark.parametrize("case", ["full", "squares", "mx", "eden", "e5m2, uniform, ue5m3", "quartet", "fp8"])
def test_packed_step(case):
    """
    Catches: a code or scale of another format read by the wrong decoder, half of a byte that goes to the
    neighbour, a scale of another block, row or square, an operand without codes that is taken for one with.
    """
    turn = dict(hadamard=16, signs="none")
    recipe, outliers = {
        "squares": (Recipe(SCALED, SQUARES, STRIPS, SQUARES, STRIPS, replace(SQUARES, outer=128)), False),
        "eden": (Recipe(dx_w=EDEN, dw_x=EDEN), False), "quartet": (RECIPES["quartet_v4"], False),
        "fp8": (RECIPES["fp8"], False),
        "e5m2, uniform, ue5m3": (Recipe(dx_dy=replace(UNIFORM, **turn), dx_w=replace(UNIFORM, **turn),
                                        dw_x=replace(UE5M3, grid="e5m2", block=(1, 32))), False),
    }.get(case) or RECIPE_CASES[case]
    (packed, _), (emulate, _) = (layer(recipe, b, K=37, outliers=outliers) for b in ("packed", "emulate"))
    x, dy = matrix(70, 37), matrix(70, 19)
    x[:, 13], x[:, 14] = 2.0**-101, 0
    if case in ("full", "mx"):      # elsewhere the scale of the whole tensor would be NaN
        x[5, 3] = torch.nan
    got, wanted = step(packed, x, dy), step(emulate, x, dy)
    assert all(same(got[kind], wanted[kind]) for kind in wanted)
    assert wanted["dx"].isfinite().all() and wanted["dw"].isfinite().any()
    assert wanted["dw"].isnan().any() == (case in ("full", "mx"))


def test_what_packed_keeps():
    """ Catches: values kept beside the codes, or codes where a recipe's operand has none and is a value. """
    x, weight = randn(128, 128).to(DEVICE), randn(112, 128, seed=1).to(DEVICE)
    channels = torch.arange(0, 128, 4, device=DEVICE)
    for recipe, bits, eights in ((FULL, 4.75, 8.25), (FULL.only([1, 2, 3, 4, 5]), 32, 32)):
        _, *kept, _, _, _ = linear_forward(x, weight, channels, COUNTER.state.to(DEVICE), 1, recipe.spec(),
                                           True, "packed")
        sizes_of = [t.numel() * t.element_size() * 8 for t in kept]
        assert sizes_of == [128 * (112 * 4.5 + 32), 128 * 128 * bits, 32 * 128 * eights]


@pytest.mark.parametrize("backend", ["emulate", "native"])
def test_gradients_nobody_asked_for(backend):
    """ Catches: an operand that is only made for one gradient, noise that changes with what is asked for. """
    linear, _ = layer(BASE, backend)
    x, dy = randn(20, 21).to(DEVICE), randn(20, 19, seed=1).to(DEVICE)
    expected = run(linear, x, dy)
    linear.zero_grad()
    linear(x).backward(dy)
    assert x.grad is None and torch.equal(linear.weight.grad, expected["dw"])
    linear.weight.requires_grad_(False)
    linear.zero_grad()
    leaf = x.clone().requires_grad_()
    linear(leaf).backward(dy)
    assert linear.weight.grad is None and torch.equal(leaf.grad, expected["dx"])
    with torch.no_grad():
        y = linear(x)
    assert not y.requires_grad and torch.equal(y, expected["y"])


def test_what_is_kept():
    """ Catches: an operand that is kept as values: packed it takes 4.75 bits a value, and 8.25 in MXFP8. """
    x, weight = randn(128, 128).to(DEVICE), randn(112, 128, seed=1).to(DEVICE)
    channels = torch.arange(0, 128, 4, device=DEVICE)
    args = COUNTER.state.to(DEVICE), 1, FULL.spec()
    _, *kept, _, _, _ = linear_forward(x, weight, channels, *args, True, "native")
    assert [t.numel() * 8 for t in kept] == [128 * (112 * 4.5 + 32), 128 * 128 * 4.75, 32 * 128 * 8.25]
    for backend in ("emulate", "native"):
        _, *kept, _, _, _ = linear_forward(x[:1], weight, channels[:0], *args, False, backend)
        assert [t.numel() for t in kept] == [0, 0, 0]


@pytest.mark.parametrize("backend", ["emulate", "native"])
@pytest.mark.parametrize("case", ["full", "per tensor"])
def test_empty_batch(case, backend):
    """ Catches: a launch without programs, or a look at the scale of an operand that has no rows. """
    recipe, outliers = RECIPE_CASES[case]
    linear, _ = layer(recipe, backend, outliers=outliers)
    out = step(linear, torch.empty(0, 21), torch.empty(0, 19))
    assert out["y"].shape == (0, 19) and out["dx"].shape == (0, 21) and (out["dw"] == 0).all()


def test_passes_for_maxima_store_no_values(monkeypatch):
    """ Catches: rounded rows that are written twice, first on the way to the maxima of the columns. """
    r, x = RECIPES["quartet2"], randn(33, 40).to(DEVICE)
    row, col = fused.side_of(r, 1), fused.side_of(r, 6)
    outs, left = (values(x, 33, 40, row), values(x, 40, 33, col)), []
    for out in outs:
        out.data.fill_(POISON)

    class Watched:
        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                kernel[grid](*args, **kwargs)
                left.append((kwargs["MEASURE"], *(bool((out.data == POISON).all()) for out in outs)))
            return launch
    kernel = kernels._pair_kernel
    monkeypatch.setattr(kernels, "_pair_kernel", Watched())
    round_pair(x, row, col, *outs, COUNTER.state.to(DEVICE), LAYER, align=True)
    assert left == [("row", True, True), ("col", True, True), ("", False, False)]


# -----------------------------------------------------------------------------
# autograd, compilation, recomputation

@pytest.mark.parametrize("backend", ["emulate", "packed", "native"])
def test_ops_are_registered_correctly(backend):
    """ Catches: a fake implementation with other shapes or dtypes than the real one. """
    # parts of buffers have no room between them in these shapes: what is there is left as it was
    x, weight, dy = (randn(32, 32, seed=i).to(DEVICE) for i in range(3))
    eight, none, state = CHANNELS.to(DEVICE), CHANNELS[:0].to(DEVICE), COUNTER.state.to(DEVICE)
    cases = [(FULL, eight, True), (BASE, none, False)]
    for recipe, channels, save in cases + [(BASE.only([3]), none, True)] * (backend != "native"):
        args = x[:25], weight[:19], channels, state, 3, recipe.spec(), save, backend
        torch.library.opcheck(linear_forward, args, test_utils="test_faketensor")
    args = x.clone().requires_grad_(), weight, none, state, 3, BASE.spec(), True, backend
    torch.library.opcheck(linear_forward, args, test_utils=("test_schema", "test_aot_dispatch_dynamic"))
    _, *saved = linear_forward(x, weight, none, state, 3, BASE.spec(), True, backend)
    for need, test in (((True, False), "test_faketensor"), ((False, True), "test_schema")):
        args = dy, *saved[:5], none, saved[5], 3, BASE.spec(), *need, backend, 32
        torch.library.opcheck(linear_backward, args, test_utils=test)


@pytest.mark.parametrize("backend", ["emulate", "native"])
def test_compiled_and_recomputed(backend):
    """
    Catches: a graph break at the kernels, a stride that the compiler is told wrong, and a forward pass that
    is run a second time, by activation checkpointing, with other noise than the first.
    """
    linear, _ = layer(BASE, backend)
    x, dy = randn(20, 21), randn(20, 19, seed=1)
    expected = step(linear, x, dy)
    linear.zero_grad()
    leaf = x.to(DEVICE).requires_grad_()
    y = checkpoint(linear, leaf, use_reentrant=False)
    y.backward(dy.to(DEVICE))
    assert torch.equal(y.detach().cpu(), expected["y"]) and torch.equal(leaf.grad.cpu(), expected["dx"])
    assert torch.equal(linear.weight.grad.cpu(), expected["dw"])
    torch._dynamo.reset()
    got = step(torch.compile(linear, backend="aot_eager", fullgraph=True), x, dy)
    assert all(torch.equal(got[k], expected[k]) for k in expected)


# -----------------------------------------------------------------------------
# what is refused

@pytest.mark.parametrize("op, words", [
    (replace(QUEST, block=(16, 32)), "16x32"), (replace(QUEST, block=(16, 16)), "quest in squares"),
    (replace(EDEN, block=(16, 16)), "eden in squares"), (sr(rule="4/6"), "stochastic"),
    (replace(FP8, block=(2, 128)), "2x128"), (replace(FP8, outer=256), "256"),
    (Operand(block=(1, 8)), "1x8"), (Operand(outer=256), "256"), (Operand(outer=0), "over 0"),
    (Operand(hadamard=256), "256"),
])
def test_formats_without_a_kernel(op, words):
    """ Catches: a format that a kernel takes for another one, and a line that does not say which it is. """
    assert words in kernels.no_kernel(op) and "\n" not in kernels.no_kernel(op)
    problem = fused.emulate_problem(Recipe(dx_dy=op))
    assert words in problem and "Q3" in problem and "\n" not in problem
    x = torch.zeros(16, 16, device=DEVICE)
    side, out = Side(op, op.hadamard), Out(x, None, None, 16)
    for row, col in ((side, None), (None, side)):
        with pytest.raises(ValueError, match="reference back end") as error:
            round_pair(x, row, col, out, out, COUNTER.state.to(DEVICE), 1)
        assert words in str(error.value) and "\n" not in str(error.value)


def test_recipes_of_each_back_end():
    """ Catches: a core recipe that is refused, and one that the tensor cores would read as another. """
    for recipe in (BASE, FULL, RELEASED, *(case[0] for case in RECIPE_CASES.values())):
        assert fused.emulate_problem(recipe) == "" and fused.native_problem(recipe) == ""
    for recipe, words in [(BASE.only([1, 2, 3, 4, 6]), "Q5"), (replace(BASE, y_w=MXFP8), "Q2"),
                          (replace(BASE, y_x=Operand(outer=256)), "Q1"), (replace(BASE, y_x=MXFP4), "of Y"),
                          (replace(FULL, outlier=NEAREST), "not MXFP8"),
                          (replace(BASE, y_w=replace(MXFP4, block=(1, 16))), "Q2")]:
        assert words in fused.native_problem(recipe) and "\n" not in fused.native_problem(recipe)
    assert fused.emulate_problem(FULL.only([3])) == ""
    assert "outlier" in fused.emulate_problem(replace(FULL, outlier=Operand(block=(1, 8))))
    assert "outlier" in fused.emulate_problem(replace(FULL, outlier=SCALED))
    for number in (1, 2):
        turned = Recipe(**{("y_x", "y_w")[2 - number]: FORWARD_TURNED, ("dw_x", "dx_w")[number - 1]: STRIPS})
        assert f"Q{6 if number == 1 else 4}" in fused.emulate_problem(turned)
        assert fused.emulate_problem(replace(turned, align=False)) == ""
    for name in PUBLISHED:
        assert fused.emulate_problem(RECIPES[name]) == "", name
        native = name in (*CORE, "nvfp4", "nvfp4_sr", "mxfp4", "tetrajet_v1", "quartet2", "nvidia",
                          "four_over_six", "fp4_all_the_way")
        assert (fused.native_problem(RECIPES[name]) == "") == native, name


# -----------------------------------------------------------------------------
# what the compiler makes of it for GPUs that are not here

def launch(name: str, packed: bool):
    """ The kernel as a linear of tetrajet_full under bf16 starts it, for one of its three matrices. """
    n, kept = 256, torch.zeros(256, 256, dtype=torch.bfloat16)
    x = kept.float() if name == "W" else kept
    row = row_side(STOCHASTIC, 16) if name == "dY" else row_side(NEAREST)
    col = col_side(STOCHASTIC, 16)
    extra = Side(MXFP8) if name == "dY" else None
    a, at, at8 = (room(kept, n, n, side)[1] if packed else values(kept, n, n, side)
                  for side in (row, col, extra))
    round_pair(x, row, col, a, at, COUNTER.state, LAYER, align=name != "dY", extra=extra,
               extra_out=at8, keep=None if name == "dY" else torch.zeros(n, dtype=torch.int16))


launch_x, launch_x_packed = partial(launch, "X", False), partial(launch, "X", True)
launch_w, launch_w_packed = partial(launch, "W", False), partial(launch, "W", True)
launch_dy, launch_dy_packed = partial(launch, "dY", False), partial(launch, "dY", True)

def launch_other(recipe: str, row: int, col: int):
    """ One scale for the tensor, and fixed signs. """
    x, r = torch.zeros(256, 256, dtype=torch.bfloat16), RECIPES[recipe]
    row, col = fused.side_of(r, row), fused.side_of(r, col)
    round_pair(x, row, col, values(x, 256, 256, row), values(x, 256, 256, col), COUNTER.state, LAYER)


launch_nvidia = partial(launch_other, "nvidia", 3, 5)
launch_six = partial(launch_other, "four_over_six", 1, 6)


def launch_turn_back():
    side = fused.side_of(RECIPES["quartet"], 1)
    mask = torch.zeros(256, 256, dtype=torch.uint8)
    kernels.turn_back(torch.zeros(256, 256, dtype=torch.bfloat16), mask, side, 256, True, COUNTER.state)


def launch_unpack():
    side = col_side(STOCHASTIC, 16)
    kernels.unpack(room(COUNTER.state, 256, 256, side)[1], side.op, 256, torch.bfloat16)


def launch_track():
    q = quantize(torch.zeros(256, 256), NEAREST)
    w, flags, counts = torch.zeros(256, 256), torch.zeros(256, 256, dtype=torch.uint8), COUNTER.state
    kernels.track(w, q.code, q.inner, q.outer, q.inner, q.outer, None, w, w, flags, counts, 8.0, NEAREST)


# (what is launched, architecture): bytes of a thread's values that find no register. A rounding kernel takes
# 5 to 20 s to compile the first time, so each kernel and each architecture is here, but not each with each
# other
SPILLS = {("x", 80): 0, ("dy", 90): 48, ("w_packed", 90): 0, ("dy_packed", 100): 0, ("x_packed", 103): 0,
          ("w", 120): 0, ("nvidia", 90): 24, ("six", 90): 0, ("turn_back", 100): 0,
          ("unpack", 103): 0, ("track", 120): 0}
KERNELS = {name: f"_{name}_kernel" for name in ("turn_back", "unpack", "track")}


@pytest.fixture(scope="module")
def compiled():
    jobs = [Job(f"kernels:{KERNELS.get(name, '_pair_kernel')}", {}, {}, arch,
                launch=f"test_kernels:launch_{name}") for name, arch in SPILLS]
    return dict(zip(SPILLS, compile_many(jobs)))


@pytest.mark.parametrize("name, arch", SPILLS)
def test_fits_the_gpu(name, arch, compiled):
    """
    Catches: values that spill, more shared memory than the smallest GPU has, 99 KiB, and a layout in which
    each step of the rounding moves values between threads: the transposition alone does, once.
    """
    result = compiled[name, arch]
    assert result.spills <= SPILLS[name, arch], f"{result.spills} bytes"
    assert result.registers <= (255 if "packed" in name else 128) and result.shared <= 99 * 1024
    if name in ("x", "w", "dy", "nvidia", "six"):
        assert result.ttgir.count("convert_layout") == 1


def test_maxima_keep_nan(compiled):
    """
    Catches: a maximum that drops NaN, as the instruction does by default. The interpreter's keeps it either
    way. A thread has 64 values of each side, and 15 of the 16 in a strip meet in a maximum.
    """
    assert compiled["x", 80].ptx.count("max.NaN.f32") >= 2 * 64 * 15 // 16

"""
The products of kernels.py, against float64 products of the values that codes and scales stand for.

On a GPU the kernels run there; without one, in Triton's interpreter, which conftest.py switches on. What the
tensor cores of other GPUs would be given is looked up in the PTX (crosscompile.py), on any machine.
"""
from functools import partial

import pytest
import torch

from codes import decode, pack, quantize
from quant import GRIDS, ROW, TENSOR, Operand
from recipes import MXFP8

pytest.importorskip("triton", minversion="3.6")
import kernels                                      # noqa: E402
from crosscompile import TRITONS, Job, compile_many # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF_ULP = 2.0**-24     # of float32, relative
DOUBLE_BLOCK, PER_TENSOR, PER_ROW = Operand(), Operand(outer=TENSOR), Operand(outer=ROW)


def values(code, inner, outer, op) -> torch.Tensor:
    """ code * inner * outer in float64, without a rounding: codes (M, K), one to a byte. """
    M, K = code.shape
    sign = 8 if op.grid == "e2m1" else 128
    value = decode(code & sign - 1, GRIDS[op.grid]).double() * torch.where(code >= sign, -1.0, 1.0).double()
    if op.scale == "e4m3":
        scale = decode(inner, GRIDS["e4m3"]).double()
    else:
        scale = torch.where(inner == 255, torch.nan, torch.exp2(inner.double() - 127))
    value *= scale.repeat_interleave(op.block[1], 1)[:, :K]
    if outer is None or not outer.dim():
        return value if outer is None else value * outer.double()
    return value * outer.double().repeat_interleave(K if op.outer == ROW else 128, 1)[:, :K]


def operand(rows, K, op, seed):
    """ A random operand, rows of very different size -> what the kernels take, and its values in float64. """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, K, generator=generator) * torch.randn(rows, 1, generator=generator).mul(3).exp()
    q = quantize(x, op)
    tensors = (pack(q.code), q.inner, q.outer) if op.grid == "e2m1" else (q.code, q.inner)
    return tuple(t.to(DEVICE) for t in tensors), values(q.code, q.inner, q.outer, op)


def assert_product(out, roundings, *pairs):
    """
    out is the sum of A B^T over the pairs, within the error of a float32 sum: each term meets `roundings`
    roundings at most, of half a unit in the last place each. A GPU's tensor cores truncate: twice that.
    """
    exact = sum(a @ b.T for a, b in pairs)
    bound = sum(a.abs() @ b.abs().T for a, b in pairs) * HALF_ULP * roundings * (2 if DEVICE == "cuda" else 1)
    error = (out.cpu().double() - exact).abs()
    assert out.isfinite().all() and (error <= bound).all(), f"{(error / bound).max():.3g} times the bound"


@pytest.mark.parametrize("op", [DOUBLE_BLOCK, PER_TENSOR, PER_ROW], ids=["block", "tensor", "row"])
@pytest.mark.parametrize("M, N, K, K8", [(1, 16, 16, 16), (17, 48, 400, 112), (130, 70, 272, 0)])
def test_product(M, N, K, K8, op):
    """
    Catches: nibbles in the wrong order in one operand, scales of a neighbouring block, an outer scale of the
    wrong row, applied twice, not at all, or to the MXFP8 product too; what is read beyond a ragged edge.
    """
    pairs = [[operand(rows, k, form, seed) for seed, rows in enumerate((M, N))]
             for k, form in ((K, op), (K8, MXFP8)) if k]
    inputs, exact = zip(*(zip(*pair) for pair in pairs))
    out = kernels.nvfp4_gemm(*inputs[0], *(inputs[1] if K8 else ()), dtype=torch.float32)
    # 128 additions in a step, one for each step, two outer scales; without a block of 128, K additions
    additions = 128 + -(-K // 128) if op is DOUBLE_BLOCK else K
    assert out.shape == (M, N)
    assert_product(out, additions + 2 + K8, *exact)
    if K8:
        assert_product(kernels.mxfp8_gemm(*inputs[1], dtype=torch.float32), K8, exact[1])


def test_many_tiles():
    """ Catches: an order of tiles that leaves one out, in a last group that is not full. """
    tile = 128 if kernels.native(torch.device(DEVICE)) else 64
    a, a_values = operand(9 * tile + 3, 16, DOUBLE_BLOCK, 0)
    b, b_values = operand(tile + 1, 16, DOUBLE_BLOCK, 1)
    assert_product(kernels.nvfp4_gemm(a, b, dtype=torch.float32), 16 + 3, (a_values, b_values))


def one_hot(n, code, op):
    """ n rows of n codes whose row i is 1 in column i, to read the values of another operand one by one. """
    one = torch.zeros(n, n, dtype=torch.uint8).fill_diagonal_(code)
    inner = torch.full((n, -(-n // op.block[1])), 0x38 if op.scale == "e4m3" else 127, dtype=torch.uint8)
    return (pack(one) if op.grid == "e2m1" else one).to(DEVICE), inner.to(DEVICE)


@pytest.mark.parametrize("op, scales", [(DOUBLE_BLOCK, range(127)), (MXFP8, range(247))],
                         ids=["nvfp4", "mxfp8"])
def test_every_code_with_every_scale(op, scales):
    """
    Catches: a subnormal code or scale decoded as if it were normal, one that is flushed to zero, a power of
    two that is forgotten or overflows. Bit for bit: the product of a code and a scale fits into bf16. (Left
    out: products outside of the normal range of float32, and E4M3's code for NaN.)
    """
    codes = torch.arange(256 if op.grid == "e4m3" else 32, dtype=torch.uint8)
    codes = torch.where(codes & 127 == 127, 0, codes) if op.grid == "e4m3" else codes % 16
    code = codes.repeat(len(scales), 1)
    inner = torch.tensor(scales, dtype=torch.uint8)[:, None].repeat(1, len(codes) // op.block[1])
    one = one_hot(len(codes), 0x38 if op.grid == "e4m3" else 2, op)
    if op.grid == "e4m3":
        out = kernels.mxfp8_gemm((code.to(DEVICE), inner.to(DEVICE)), one, dtype=torch.float32)
    else:
        outer = torch.ones((), device=DEVICE)
        out = kernels.nvfp4_gemm((pack(code).to(DEVICE), inner.to(DEVICE), outer), (*one, outer),
                                 dtype=torch.float32)
    expected = values(code, inner, None, op)
    normal = (expected == 0) | (expected.abs() >= torch.finfo(torch.float32).tiny)
    assert torch.equal(out.cpu().double()[normal], expected[normal])


@pytest.mark.parametrize("where", ["inner", "outer", "row", "tensor", "mxfp8"])
@pytest.mark.parametrize("side", [0, 1])
def test_nan_scale(where, side):
    """
    Catches: 0x7F decoded as 480 and 0xFF as Inf, a NaN lost in a block of zero codes, or one that spreads
    to other rows. No code is negative, so that Inf would stay Inf.
    """
    op = {"tensor": PER_TENSOR, "row": PER_ROW, "mxfp8": MXFP8}.get(where, DOUBLE_BLOCK)
    pair = [operand(20, 288, op, 0)[0], operand(24, 288, op, 1)[0]]
    hit = pair[side]
    pair[1 - side][0].fill_(0x22)
    if where in ("outer", "row"):
        hit[2][5, -1] = torch.nan
    elif where == "tensor":
        hit[2].fill_(torch.nan)
    else:
        hit[1][5, -1] = 0x7F if where == "inner" else 0xFF
        hit[0][5] = 0
    out = (kernels.mxfp8_gemm if where == "mxfp8" else kernels.nvfp4_gemm)(*pair, dtype=torch.float32)
    expected = torch.zeros(20, 24, dtype=torch.bool)
    if where == "tensor":
        expected[:] = True
    else:
        (expected if side == 0 else expected.T)[5] = True
    assert torch.equal(out.isnan().cpu(), expected)


def test_empty_and_what_is_refused():
    """ Catches: a launch without programs, a sum over nothing that is not zero, scales of another matrix. """
    a, b = operand(20, 48, DOUBLE_BLOCK, 0)[0], operand(24, 48, DOUBLE_BLOCK, 1)[0]
    a8 = operand(20, 16, MXFP8, 0)[0]
    for M, K, op in ((0, 16, DOUBLE_BLOCK), (3, 0, DOUBLE_BLOCK), (3, 0, PER_ROW)):
        out = kernels.nvfp4_gemm(operand(M, K, op, 0)[0], operand(8, K, op, 1)[0])
        assert torch.equal(out.float().cpu(), torch.zeros(M, 8))
    for message, call in [
        ("fit together", lambda: kernels.nvfp4_gemm(a, (b[0], b[1][:, :2], b[2]))),
        ("or neither", lambda: kernels.nvfp4_gemm(a, b, a8)),
        ("or neither", lambda: kernels.nvfp4_gemm(a, operand(24, 48, PER_TENSOR, 1)[0])),
        ("or neither", lambda: kernels.nvfp4_gemm(*(operand(24, 144, op, 1)[0]
                                                    for op in (PER_ROW, DOUBLE_BLOCK)))),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


# -----------------------------------------------------------------------------
# what the compiler makes of it for GPUs that are not here


def stored(rows: int, K: int, op: Operand) -> tuple[torch.Tensor, ...]:
    """ Zeros of the shapes of an operand. """
    if op.grid == "e4m3":
        return torch.zeros(rows, K, dtype=torch.uint8), torch.zeros(rows, -(-K // 32), dtype=torch.uint8)
    outer = torch.ones({TENSOR: (), ROW: (rows, 1)}.get(op.outer, (rows, -(-K // 128))))
    return torch.zeros(rows, K // 2, dtype=torch.uint8), torch.zeros(rows, K // 16, dtype=torch.uint8), outer


def launch(name: str):
    """ A product of 768 x 512 outputs, as the back end native starts it on Blackwell. """
    kernels.native = lambda device: name != "decoded"
    op = {"tensor": PER_TENSOR, "row": PER_ROW}.get(name, DOUBLE_BLOCK)
    fp4 = [stored(rows, 2048, op) for rows in (768, 512)]
    fp8 = [stored(rows, 208, MXFP8) for rows in (768, 512)]
    if name == "mxfp8":
        kernels.mxfp8_gemm(*fp8)
    else:
        kernels.nvfp4_gemm(*fp4, *(fp8 if name == "both" else ()))


launch_both, launch_tensor, launch_row, launch_mxfp8, launch_decoded = (
    partial(launch, name) for name in ("both", "tensor", "row", "mxfp8", "decoded"))

JOBS = [("both", 100), ("both", 103), ("both", 120), ("tensor", 100), ("tensor", 120), ("row", 100),
        ("row", 120), ("mxfp8", 100), ("mxfp8", 120), ("decoded", 90), ("decoded", 80)]
SHARED = {80: 163, 90: 227, 100: 227, 103: 227, 120: 99}        # KiB that one program may have [CUDA guide]


@pytest.fixture(scope="module", params=TRITONS)
def compiled(request):
    """ All jobs, compiled in one process: it takes some seconds, less when Triton has them in its cache. """
    jobs = [Job("kernels:_gemm", arch, f"test_gemm:launch_{name}") for name, arch in JOBS]
    return dict(zip(JOBS, compile_many(jobs, request.param)))


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_what_the_gpu_is_given(job, compiled):
    """
    Catches: a tile that spills registers or wants more shared memory than there is; scales passed as another
    type, and what else the compiler silently answers with decoding to bf16 and an ordinary product; where
    decoding is meant, values in float32, whose products are rounded to TF32.
    """
    (name, arch), result = job, compiled[job]
    # Triton 3.8 and 3.9 find no register for 32 bytes of one of these tiles: both, for sm_120
    assert result.spills <= 32 and result.shared <= SHARED[arch] * 1024
    if name == "decoded":
        assert result.mma and all("f32.bf16.bf16" in instruction for instruction in result.mma)
        return
    for kind, wanted in ("mxf4nvf4", name != "mxfp8"), ("mxf8f6f4", name not in ("tensor", "row")):
        assert any(f"kind::{kind}.block_scale" in instruction for instruction in result.mma) == wanted, kind
    assert all("block_scale" in instruction for instruction in result.mma) and "bf16.bf16" not in result.ptx

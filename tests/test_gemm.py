"""
The GEMMs of gemms.py, against float64 products of the values that codes and scales stand for.

On a GPU the kernels run there; without one, in Triton's interpreter, which conftest.py switches on. What the
tensor cores of other GPUs would be given is looked up in the PTX (crosscompile.py), on any machine.
"""
import pytest
import torch

from quant import E4M3, GRIDS, TENSOR, Operand, decode, pack, quantize
from recipes import MXFP8

pytest.importorskip("triton", reason="needs Triton, which the CPU build of PyTorch does not bring along")
import gemms as kernels                          # noqa: E402
from crosscompile import Job, compile_many              # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF_ULP = 2.0**-24     # of float32, relative
DOUBLE_BLOCK, PER_TENSOR = Operand(), Operand(outer=TENSOR)
MXFP4 = Operand(block=(1, 32), scale="e8m0", outer=0)
SHAPES = [(1, 16, 16), (17, 48, 400), (128, 128, 128), (130, 144, 272)]      # M, N, K


def values(code, inner, outer, op) -> torch.Tensor:
    """ code * inner * outer in float64, without a rounding: codes (M, K), one to a byte. """
    M, K = code.shape
    sign = 8 if op.grid == "e2m1" else 128
    value = decode(code & sign - 1, GRIDS[op.grid]).double() * torch.where(code >= sign, -1.0, 1.0).double()
    scale = decode(inner, E4M3).double() if op.scale == "e4m3" else torch.exp2(inner.double() - 127)
    if op.scale == "e8m0":
        scale = torch.where(inner == 255, torch.nan, scale)
    value *= scale.repeat_interleave(op.block[1], 1)[:, :K]
    if outer is None or not outer.dim():
        return value if outer is None else value * outer.double()
    return value * outer.double().repeat_interleave(128, 1)[:, :K]


def operand(rows, K, op, seed):
    """ A random operand, rows of very different size -> what the kernels take, and its values in float64. """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, K, generator=generator) * torch.randn(rows, 1, generator=generator).mul(3).exp()
    q = quantize(x, op)
    code = pack(q.code) if op.grid == "e2m1" else q.code
    tensors = (code, q.inner) if op.grid == "e4m3" else (code, q.inner, q.outer)
    return tuple(t if t is None else t.to(DEVICE) for t in tensors), values(q.code, q.inner, q.outer, op)


def assert_product(out, roundings, *pairs):
    """
    out is the sum of A B^T over the pairs, within the error of a float32 sum: each term meets `roundings`
    roundings at most, of half a unit in the last place each. A GPU's tensor cores truncate: twice that.
    """
    exact = sum(a @ b.T for a, b in pairs)
    bound = sum(a.abs() @ b.abs().T for a, b in pairs) * HALF_ULP * roundings * (2 if DEVICE == "cuda" else 1)
    error = (out.cpu().double() - exact).abs()
    assert out.isfinite().all() and (error <= bound).all(), f"{(error / bound).max():.3g} times the bound"


# -----------------------------------------------------------------------------
# NVFP4 and MXFP4

@pytest.mark.parametrize("M, N, K", SHAPES)
@pytest.mark.parametrize("a_op, b_op", [(DOUBLE_BLOCK, DOUBLE_BLOCK), (DOUBLE_BLOCK, PER_TENSOR),
                                        (PER_TENSOR, DOUBLE_BLOCK), (PER_TENSOR, PER_TENSOR), (MXFP4, MXFP4)],
                         ids=["block-block", "block-tensor", "tensor-block", "tensor-tensor", "mx"])
def test_fp4_product(M, N, K, a_op, b_op):
    """
    Catches: nibbles in the wrong order in one operand, scales of a neighbouring block, an outer scale of the
    wrong row, applied twice or not at all, and what is read beyond a ragged edge.
    """
    K = -(-K // 32) * 32 if a_op is MXFP4 else K
    a, a_values = operand(M, K, a_op, 0)
    b, b_values = operand(N, K, b_op, 1)
    out = kernels.nvfp4_gemm(a, b, dtype=torch.float32)
    assert out.shape == (M, N)
    # 128 additions in a step, one for each step, two outer scales; without a block of 128, K additions
    additions = 128 + -(-K // 128) if 128 in (a_op.outer, b_op.outer) else K
    assert_product(out, additions + 2, (a_values, b_values))


def test_many_tiles():
    """ Catches: an order of tiles that leaves one out, in a last group that is not full. """
    a, a_values = operand(11 * 16 + 3, 32, DOUBLE_BLOCK, 0)
    b, b_values = operand(16 + 1, 32, DOUBLE_BLOCK, 1)
    out = kernels.nvfp4_gemm(a, b, dtype=torch.float32, tile=(16, 16, 4, 2))
    assert_product(out, 32 + 3, (a_values, b_values))


@pytest.mark.skipif(kernels.arch_of(torch.device(DEVICE)) != "sm_90", reason="needs a Hopper GPU")
@pytest.mark.parametrize("M, N, K", [(1, 16, 128), (130, 144, 640), (257, 300, 1024), (128, 128, 256),
                                     (9, 8, 384)])
def test_hopper(M, N, K, monkeypatch):
    """
    Catches: a step that is decoded before it has arrived, or over one that is still multiplied; the first,
    the last or an odd step left out; outer scales of the step before; rows beyond the edge. Bit for bit what
    the other kernel computes, twice, so that a race has another chance.
    """
    a, a_values = operand(M, K, DOUBLE_BLOCK, 0)
    b, b_values = operand(N, K, DOUBLE_BLOCK, 1)
    assert kernels._for_hopper(a, b)
    fast = [kernels.nvfp4_gemm(a, b, dtype=torch.float32) for _ in range(2)]
    monkeypatch.setattr(kernels, "hopper", None)
    assert_product(fast[0], K + 3, (a_values, b_values))
    for out in (*fast, kernels.nvfp4_gemm(a, b, dtype=torch.float32)):
        assert torch.equal(out, fast[0])


def test_what_hopper_is_given(monkeypatch):
    """ Catches: what its kernel cannot copy or multiply: odd starts, part of a step, other scales. """
    monkeypatch.setattr(kernels, "arch_of", lambda device: "sm_90")
    monkeypatch.setattr(kernels, "hopper", True)
    (code, inner, outer), _ = operand(16, 128, DOUBLE_BLOCK, 0)
    assert kernels._for_hopper((code, inner, outer), (code, inner, outer))

    def shifted(x, by):
        return torch.cat([x.new_zeros(by), x.flatten()])[by:].view(x.shape)
    for a in ((shifted(code, 4), inner, outer), (code, shifted(inner, 8), outer),
              operand(16, 144, DOUBLE_BLOCK, 0)[0], operand(16, 128, PER_TENSOR, 0)[0],
              operand(16, 128, MXFP4, 0)[0], (code[:0], inner[:0], outer[:0])):
        assert not kernels._for_hopper(a, a)


def one_hot(n, code, op):
    """ n rows of n codes whose row i is 1 in column i, to read the values of another operand one by one. """
    one = torch.zeros(n, n, dtype=torch.uint8).fill_diagonal_(code)
    inner = torch.full((n, -(-n // op.block[1])), 0x38 if op.scale == "e4m3" else 127, dtype=torch.uint8)
    return (pack(one) if op.grid == "e2m1" else one).to(DEVICE), inner.to(DEVICE)


@pytest.mark.parametrize(
    "op, scales", [(DOUBLE_BLOCK, range(127)), (MXFP4, range(253)), (MXFP8, range(247))],
    ids=["nvfp4", "mxfp4", "mxfp8"])
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
        outer = None if op.scale == "e8m0" else torch.ones((), device=DEVICE)
        out = kernels.nvfp4_gemm((pack(code).to(DEVICE), inner.to(DEVICE), outer), (*one, outer),
                                 dtype=torch.float32)
    expected = values(code, inner, None, op)
    normal = (expected == 0) | (expected.abs() >= torch.finfo(torch.float32).tiny)
    assert torch.equal(out.cpu().double()[normal], expected[normal])


# -----------------------------------------------------------------------------
# MXFP8

@pytest.mark.parametrize("M, N, K", [(1, 16, 16), (17, 48, 112), (130, 144, 272)])
def test_mxfp8_product(M, N, K):
    """ Catches: bytes in another order in one operand, a scale of the wrong block, a ragged last block. """
    a, a_values = operand(M, K, MXFP8, 0)
    b, b_values = operand(N, K, MXFP8, 1)
    assert_product(kernels.mxfp8_gemm(a, b, dtype=torch.float32), K, (a_values, b_values))


def test_mxfp8_adds_to_what_is_there():
    """ Catches: an output that is overwritten, added twice, or a copy of the tensor that was handed in. """
    a, a_values = operand(33, 48, MXFP8, 0)
    b, b_values = operand(20, 48, MXFP8, 1)
    before = torch.randn(33, 20, device=DEVICE)
    out = before.clone()
    assert kernels.mxfp8_gemm(a, b, out) is out
    eye = torch.eye(20, dtype=torch.float64)
    assert_product(out, 49, (a_values, b_values), (before.cpu().double(), eye))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the interpreter cuts bf16 off")
def test_bf16_is_rounded_once():
    """ Catches: FP4 and FP8 products that are rounded to bf16 one after the other. """
    (a, _), (b, _) = operand(64, 256, DOUBLE_BLOCK, 0), operand(80, 256, DOUBLE_BLOCK, 1)
    (a8, _), (b8, _) = operand(64, 32, MXFP8, 2), operand(80, 32, MXFP8, 3)
    assert torch.equal(kernels.nvfp4_gemm(a, b, a8, b8),
                       kernels.nvfp4_gemm(a, b, a8, b8, dtype=torch.float32).bfloat16())
    before = torch.randn(64, 80, device=DEVICE).bfloat16()
    assert torch.equal(kernels.mxfp8_gemm(a8, b8, before.clone()),
                       kernels.mxfp8_gemm(a8, b8, before.float()).bfloat16())


@pytest.mark.parametrize("op", [DOUBLE_BLOCK, PER_TENSOR, MXFP4], ids=["block", "tensor", "mx"])
def test_outlier_channels_are_added(op):
    """ Catches: outer scales, or the factor of the decoded FP4 product, that reach the MXFP8 product too. """
    (a, a_values), (b, b_values) = operand(70, 160, op, 0), operand(40, 160, op, 1)
    (a8, a8_values), (b8, b8_values) = operand(70, 16, MXFP8, 2), operand(40, 16, MXFP8, 3)
    out = kernels.nvfp4_gemm(a, b, a8, b8, dtype=torch.float32)
    assert_product(out, 160 + 2 + 16, (a_values, b_values), (a8_values, b8_values))


# -----------------------------------------------------------------------------
# NaN, and what is refused

@pytest.mark.parametrize("where", ["inner", "outer", "tensor", "mx", "mxfp8"])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("codes", [0, 0x22])
def test_nan_scale(where, side, codes):
    """
    Catches: 0x7F decoded as 480 and 0xFF as Inf, a NaN lost in a block of zero codes, or one that spreads
    to other rows. No code is negative, so that Inf would stay Inf.
    """
    op = {"tensor": PER_TENSOR, "mx": MXFP4, "mxfp8": MXFP8}.get(where, DOUBLE_BLOCK)
    pair = [operand(20, 288, op, 0)[0], operand(24, 288, op, 1)[0]]
    hit = pair[side]
    pair[1 - side][0].fill_(0x22)
    if where == "outer":
        hit[2][5, 1] = torch.nan
    elif where == "tensor":
        hit[2].fill_(torch.nan)
    else:
        hit[1][5, -1] = 0x7F if where == "inner" else 0xFF
        hit[0][5] = codes
    out = (kernels.mxfp8_gemm if where == "mxfp8" else kernels.nvfp4_gemm)(*pair, dtype=torch.float32)
    expected = torch.zeros(20, 24, dtype=torch.bool)
    if where == "tensor":
        expected[:] = True
    else:
        (expected if side == 0 else expected.T)[5] = True
    assert torch.equal(out.isnan().cpu(), expected)


def test_empty():
    """ Catches: a launch that needs a program, and a sum over nothing that is not zero. """
    op = DOUBLE_BLOCK
    assert kernels.nvfp4_gemm(operand(0, 16, op, 0)[0], operand(8, 16, op, 1)[0]).shape == (0, 8)
    out = kernels.nvfp4_gemm(operand(3, 0, op, 0)[0], operand(8, 0, op, 1)[0], dtype=torch.float32)
    assert torch.equal(out.cpu(), torch.zeros(3, 8))


def test_what_is_refused():
    """ Catches: operands that do not fit together, read beyond their end. """
    a, b = operand(20, 48, DOUBLE_BLOCK, 0)[0], operand(24, 48, DOUBLE_BLOCK, 1)[0]
    a8, b8 = operand(20, 16, MXFP8, 0)[0], operand(24, 16, MXFP8, 1)[0]
    mx = operand(24, 48, MXFP4, 1)[0]
    for message, call in [
        ("code is contiguous", lambda: kernels.nvfp4_gemm(a, operand(24, 64, DOUBLE_BLOCK, 1)[0])),
        ("code is contiguous", lambda: kernels.nvfp4_gemm(a, (b[0].int(), *b[1:]))),
        ("strided", lambda: kernels.nvfp4_gemm(a, (b[0].repeat(1, 2)[:, ::2], *b[1:]))),
        ("pad with zero codes", lambda: kernels.nvfp4_gemm((a[0][:, :20].contiguous(), *a[1:]), b)),
        ("multiple of 4", lambda: kernels.nvfp4_gemm(
            (torch.zeros(20 * 24 + 1, dtype=torch.uint8, device=DEVICE)[1:].view(20, 24), *a[1:]), b)),
        ("inner is contiguous", lambda: kernels.nvfp4_gemm(a, (b[0], b[1][:, :2].contiguous(), b[2]))),
        ("outer is contiguous", lambda: kernels.nvfp4_gemm(a, (b[0], b[1], b[2].double()))),
        ("give both or none", lambda: kernels.nvfp4_gemm(a, mx)),
        ("both a8 and b8", lambda: kernels.nvfp4_gemm(a, b, a8)),
        ("a8 has the rows of a", lambda: kernels.nvfp4_gemm(a, b, b8, a8)),
        ("scale is contiguous", lambda: kernels.mxfp8_gemm(a8, (b8[0], b8[1][:1].clone()))),
        ("out is contiguous", lambda: kernels.mxfp8_gemm(a8, b8, torch.zeros(20, 25, device=DEVICE))),
        ("bfloat16 or float32", lambda: kernels.nvfp4_gemm(a, b, dtype=torch.float16)),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            call()
        assert "\n" not in str(error.value)


def test_fp8_baseline():
    """
    Catches: an operand that is not transposed, scales that divide. A Hopper GPU keeps some 14 bits of a sum
    of FP8 products (arXiv 2412.19437, section 3.5.2).
    """
    a, b = (torch.randn(rows, 32, device=DEVICE).to(torch.float8_e4m3fn) for rows in (16, 48))
    scales = torch.tensor(0.5, device=DEVICE), torch.tensor(4.0, device=DEVICE)
    out = kernels.fp8_gemm(a, b, *scales, dtype=torch.float32)
    assert_product(out, 34 if DEVICE == "cpu" else 2**10, (a.cpu().double() * 0.5, b.cpu().double() * 4))


# -----------------------------------------------------------------------------
# what the compiler makes of it for GPUs that are not here

def job(arch, form, outer, mxfp8, add=False, one=False) -> Job:
    """ The kernel as _launch() would start it on that GPU; with one, for M, N and columns of 1. """
    table = {90: "sm_90", 80: "decode"}.get(arch, "native")
    BM, BN, warps, stages = kernels.TILES[table]
    pointers = {f"{x}{part}_ptr": "*fp32" if part == "_outer" else "*u8"
                for x in "ab" for part in ("", "_inner", "_outer", "8", "8_inner")}
    ints = ["M", "N", "columns", "inner_columns", "outer_columns", "columns8", "inner_columns8"]
    constexprs = dict(FORMAT=form, A_OUTER=outer, B_OUTER=outer, ADD=add, NATIVE=table == "native",
                      BM=BM, BN=BN, GROUP=8, STAGES=stages)
    constexprs |= {p: None for p in pointers if (p[1] == "8" and not mxfp8) or (p[1] != "8" and not form)
                   or ("outer" in p and not outer)}
    constexprs |= {i: 1 for i in ("M", "N", "inner_columns", "outer_columns") if one}
    signature = pointers | dict.fromkeys(ints, "i32") | {"out_ptr": "*bf16", "zero": "fp32"}
    return Job("gemms:_gemm", signature, constexprs, arch, {"num_warps": warps, "num_stages": stages})


JOBS = {f"{name} sm_{arch}": job(arch, *args) for arch, name, args in [
    (100, "nvfp4+mxfp8", ("nvfp4", 128, True)), (103, "nvfp4+mxfp8", ("nvfp4", 128, True)),
    (120, "nvfp4+mxfp8", ("nvfp4", 128, True)), (100, "per tensor", ("nvfp4", -1, False)),
    (100, "mxfp4", ("mxfp4", 0, False)), (120, "add", ("", 0, True, True)),
    (90, "nvfp4+mxfp8", ("nvfp4", 128, True)), (80, "nvfp4", ("nvfp4", 128, False)),
    (90, "ones", ("nvfp4", 128, False, False, True)),
]}
if kernels.hopper:
    JOBS["hopper sm_90"] = Job("hopper:_hopper_kernel", {
        **{f"{x}{part}_ptr": "*fp32" if part == "_outer" else "*u8" for x in "ab"
           for part in ("", "_inner", "_outer")}, "out_ptr": "*bf16", "M": "i32", "N": "i32", "steps": "i32"},
        {}, 90, {"num_warps": kernels.hopper.WARPS.value})
SHARED = {80: 163, 90: 227, 100: 227, 103: 227, 120: 99}        # KiB that one program may have [CUDA guide]


@pytest.fixture(scope="module")
def compiled():
    """ All jobs, compiled in one process: it takes some seconds, less when Triton has them in its cache. """
    return dict(zip(JOBS, compile_many(list(JOBS.values()))))


@pytest.mark.parametrize("name", JOBS)
def test_fits_the_gpu(name, compiled):
    """ Catches: a tile that spills registers, or stages that no program can have the memory for. """
    result = compiled[name]
    assert result.spills == 0 and result.shared <= SHARED[JOBS[name].arch] * 1024


@pytest.mark.parametrize("name", [name for name, job in JOBS.items() if job.arch >= 100])
def test_native_instructions(name, compiled):
    """
    Catches: scales passed as another type, and what the compiler silently answers with decoding to bf16
    and an ordinary product.
    """
    mma = compiled[name].mma
    constexprs = JOBS[name].constexprs
    kinds = {"mxf4nvf4.block_scale.scale_vec::4X": constexprs["FORMAT"] == "nvfp4",
             "mxf4.block_scale.scale_vec::2X": constexprs["FORMAT"] == "mxfp4",
             "mxf8f6f4.block_scale": "a8_ptr" not in constexprs}
    for kind, wanted in kinds.items():
        assert any(f"kind::{kind}" in instruction for instruction in mma) == wanted, (kind, mma)
    assert all("block_scale" in instruction for instruction in mma) and "bf16.bf16" not in compiled[name].ptx


@pytest.mark.parametrize("name", [name for name, job in JOBS.items()
                                  if job.arch < 100 and "hopper" not in name])
def test_decoded_instructions(name, compiled):
    """ Catches: values decoded to float32, whose products are rounded to TF32, or decoded one by one. """
    result = compiled[name]
    family = "wgmma" if JOBS[name].arch == 90 else "mma.sync"
    assert result.mma and all(i.startswith(family) and "f32.bf16.bf16" in i for i in result.mma)
    assert "fma.rn.bf16x2" in result.ptx


@pytest.mark.skipif(not kernels.hopper, reason="a Triton without Gluon")
def test_hopper_decodes_while_it_multiplies(compiled):
    """
    Catches: a product that is waited for where it is started, so that nothing overlaps. In the loop come the
    decoding, the wait for the last product, the next one, and new copies without another wait.
    """
    ptx = compiled["hopper sm_90"].ptx
    assert compiled["hopper sm_90"].mma and "f32.f16.f16" in ptx
    loop = ptx[ptx.rindex("cp.async.wait_group", 0, ptx.rindex("cvt.rn.f16x2.e4m3x2")):]
    decoded, waited, started, copied = map(loop.index, (
        "cvt.rn.f16x2.e4m3x2", "wgmma.wait_group", "wgmma.mma_async", "cp.async.cg"))
    assert decoded < waited < started < copied and "wgmma.wait_group" not in loop[started:copied]


@pytest.mark.parametrize("name", [name for name, job in JOBS.items()
                                  if job.arch == 90 and "hopper" not in name])
def test_decoded_in_place_on_hopper(name, compiled):
    """
    Catches: an order of the summed axis in which no thread has what its tensor core wants of A, so that all
    of A goes through shared memory once more. Nothing else would tell: the product is right in any order.
    """
    ttgir = compiled[name].ttgir
    dots = [line for line in ttgir.splitlines() if "ttng.warp_group_dot " in line]
    stored = [line for line in ttgir.splitlines() if "ttg.local_alloc %" in line and "bf16" in line]
    assert dots and all("bf16, #ttg.dot_op" in line for line in dots)
    assert len(stored) == len(dots), "one operand of each product, B, is decoded into shared memory"

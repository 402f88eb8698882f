"""
GEMMs over packed low-precision operands, in Triton: NVFP4, MXFP4, MXFP8, and the FP8 baseline of the library.

One kernel source serves every GPU. Where the tensor cores read block-scaled FP4 themselves (sm_100, sm_103,
sm_120), each step over 128 of the summed axis is one tl.dot_scaled. Elsewhere the codes are decoded in
registers, to bf16, which holds code times inner scale exactly, and tl.dot multiplies them. Both add up in
float32. One product, the one of double-block operands on sm_90, has a kernel of its own in hopper.py.

What this file leaves out: rounding. It knows tensors only, and takes codes and scales as quant.py makes them.

Letters used for shapes: out (M, N) = A (M, K) B (N, K)^T. Both operands lie with the summed axis last.
"""
import torch
import triton
import triton.language as tl
from torch import Tensor

try:
    import hopper
except ImportError:     # a Triton without Gluon
    hopper = None

# one inner loop step: the columns that share an outer scale
STEP = tl.constexpr(128)
# decoded NVFP4 operands are 2^-8 of their value, so that no factor on the way leaves bf16's range; the
# accumulator, which is float32, takes it back in the end
LIFT = tl.constexpr(256.0)
# the interpreter runs no PTX, and multiplies bf16 as if it were integers
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
TILE_TYPE = tl.constexpr(tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16)


# -----------------------------------------------------------------------------
# decoding: two values at a time, as the two bf16 halves of a 32-bit word
#
#   A code is moved to where bf16 has its sign, exponent and mantissa. That gives its value times a power of
#   two, because the biases of the exponents differ; the subnormals of the small format become those of bf16,
#   so a multiplication puts all of them right, exactly:
#
#       bf16              s eeeeeeee mmmmmmm
#       E2M1  s ee m      s 000000ee m000000      value * 2^-126
#       E4M3  s eeee mmm  s 0000eeee mmm0000      value * 2^-120


@triton.jit
def _mul2(x, y):
    """ The products of two pairs of bf16, uint32 words: each rounded once, NaN stays NaN. """
    if INTERPRETED:
        low = (x << 16).to(tl.float32, bitcast=True) * (y << 16).to(tl.float32, bitcast=True)
        high = (x & 0xFFFF0000).to(tl.float32, bitcast=True) * (y & 0xFFFF0000).to(tl.float32, bitcast=True)
        return (low.to(tl.uint32, bitcast=True) >> 16) | (high.to(tl.uint32, bitcast=True) & 0xFFFF0000)
    # x * y + (-0): a plain product of bf16 pairs needs sm_90, this one sm_80
    return tl.inline_asm_elementwise(
        "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }", "=r,r,r", [x, y],
        dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def _scale_pairs(byte, E8M0: tl.constexpr):
    """ Scale bytes -> uint32 words that hold the scale twice: E8M0 as it is, E4M3 times 2^118. """
    byte = byte.to(tl.uint32)
    if E8M0:
        # bf16 has the same exponent field; 2^-127 is subnormal there
        half = tl.where(byte == 0, 0x0040, tl.where(byte == 0xFF, 0x7FC0, byte << 7))
        return half * 0x00010001
    # E4M3 is at 2^-120, and 2^119 twice puts it where 448 times it is still finite
    lift = tl.full(byte.shape, 0x7B007B00, tl.uint32)
    scale = _mul2(_mul2(byte * 0x00100010, lift), lift)
    return tl.where(byte == 0x7F, 0x7FC07FC0, scale)


@triton.jit
def _halves(x):
    """ Words (R, W, ...) of two bf16 each, from W words of codes -> values (R, 128), reordered. """
    # The order of the summed axis is free, if both operands have the same. On Hopper a thread wants, of each
    # 16 columns of A, two pairs that lie 8 apart, and its three neighbours those between. Word t of a group
    # of four goes to neighbour t whole, so A is decoded where the tensor cores read it, in registers, and
    # does not pass through shared memory. What is left of the order keeps threads that store B off each
    # other's banks
    x = tl.reshape(x, x.shape[0], x.shape[1] // 4, 4, STEP // 4 // x.shape[1], 2)
    x = tl.reshape(tl.permute(x, (0, 3, 1, 4, 2)), x.shape[0], STEP // 2)
    low = x.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    high = (x >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.reshape(tl.join(low, high), x.shape[0], STEP).to(TILE_TYPE)


@triton.jit
def _decode(x, byte, FORMAT: tl.constexpr):
    """ x (R, W) uint32, whole words of codes; byte (R, S) uint8, their scales -> values (R, 128). """
    scale = _scale_pairs(byte, FORMAT != "nvfp4")
    scale = tl.broadcast_to(scale[:, :, None], scale.shape[0], scale.shape[1], x.shape[1] // scale.shape[1])
    scale = tl.reshape(scale, x.shape[0], x.shape[1])
    if FORMAT == "mxfp8":
        # bytes i and i + 2 are 16 bits apart, as the halves of a word are
        x0 = ((x << 4) & 0x07F007F0) | ((x << 8) & 0x80008000)
        x1 = ((x >> 4) & 0x07F007F0) | (x & 0x80008000)
        lift = tl.full(x.shape, 0x7B807B80, tl.uint32)          # 2^120
        words = tl.join(_mul2(_mul2(x0, lift), scale), _mul2(_mul2(x1, lift), scale))
    else:
        # nibbles i and i + 4 are 16 bits apart
        x0 = ((x << 6) & 0x01C001C0) | ((x << 12) & 0x80008000)
        x1 = ((x << 2) & 0x01C001C0) | ((x << 8) & 0x80008000)
        x2 = ((x >> 2) & 0x01C001C0) | ((x << 4) & 0x80008000)
        x3 = ((x >> 6) & 0x01C001C0) | (x & 0x80008000)
        if FORMAT == "mxfp4":
            lift = tl.full(x.shape, 0x7E807E80, tl.uint32)      # 2^126
            x0, x1, x2, x3 = _mul2(x0, lift), _mul2(x1, lift), _mul2(x2, lift), _mul2(x3, lift)
        words = tl.join(tl.join(_mul2(x0, scale), _mul2(x1, scale)),
                        tl.join(_mul2(x2, scale), _mul2(x3, scale)))
    return _halves(words)


# -----------------------------------------------------------------------------
# the GEMM
#
#   equals    (code inner outer of A) (code inner outer of B)^T + A8 B8^T, but for the order of a sum
#   why       on tensor cores that read FP4 this is the speed that FP4 promises; on others it is the same
#             product from the same packed operands, 4.75 bits a value, without a bf16 copy of them in memory
#   grid      1-D, program p owns one BM x BN tile of the output, GROUP rows of tiles after one another
#
#                 K ->   128      128          each step of 128 columns: load codes and inner scales of both
#               +------+------+------+- - -    operands, multiply into a fresh accumulator, and
#            BM | step | step | step |         acc += product * A_outer[:, None] * B_outer[None, :]
#               +------+------+------+- - -    With one outer scale per tensor, or none: straight into acc
#
#   numerics  products of codes and inner scales are exact; sums are float32, in the hardware's order
#   hardware  NATIVE: sm_100, sm_103, sm_120. Decoding: sm_80 and later. The interpreter decodes to float32


@triton.jit
def _steps(columns, per_step: tl.constexpr):
    """ How many steps cover these columns, as a bound that range() takes. """
    steps = tl.cdiv(columns, per_step)
    # the interpreter has an array of one element here, which NumPy 2.4 no longer turns into an int by itself
    return steps.handle.data.item() if INTERPRETED else steps


@triton.jit
def _load(ptr, row, n_rows, column, n_columns):
    """ A tile of a (n_rows, n_columns) matrix; zeros outside. """
    inside = (row < n_rows)[:, None] & (column < n_columns)[None, :]
    return tl.load(ptr + row[:, None] * n_columns + column[None, :], inside, other=0)


@triton.jit
def _outer(ptr, row, n_rows, step, n_columns):
    """ The outer scales of one step, (R,); zeros outside. """
    # Read as pairs of which only the first counts. A tensor with fewer elements than the program has threads
    # would be read in the layout of the accumulator instead: 32 loads for each thread in place of one
    pair = tl.arange(0, 2)
    inside = (row < n_rows)[:, None] & (pair < 1)[None, :]
    scale, _ = tl.split(tl.load(ptr + row[:, None] * n_columns + (step + pair)[None, :], inside, other=0.0))
    return scale


@triton.jit
def _product(acc, a_ptr, a_inner_ptr, b_ptr, b_inner_ptr, m, M, n, N, step, code_columns, inner_columns,
             FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """ acc (BM, BN) plus the product over one step of the summed axis, without outer scales. """
    BYTES: tl.constexpr = STEP if FORMAT == "mxfp8" else STEP // 2
    INNER: tl.constexpr = STEP // 16 if FORMAT == "nvfp4" else STEP // 32
    inner_column = step * INNER + tl.arange(0, INNER)
    a_inner = _load(a_inner_ptr, m, M, inner_column, inner_columns)
    b_inner = _load(b_inner_ptr, n, N, inner_column, inner_columns)
    if NATIVE:
        GRID: tl.constexpr = "e4m3" if FORMAT == "mxfp8" else "e2m1"
        column = step * BYTES + tl.arange(0, BYTES)
        a = _load(a_ptr, m, M, column, code_columns)
        b = _load(b_ptr, n, N, column, code_columns)
        if FORMAT == "nvfp4":
            # the type of the scales is what tells NVFP4 from MXFP4
            a_inner = a_inner.to(tl.float8e4nv, bitcast=True)
            b_inner = b_inner.to(tl.float8e4nv, bitcast=True)
        return tl.dot_scaled(a, a_inner, GRID, tl.trans(b), b_inner, GRID, acc)
    else:
        column = step * (BYTES // 4) + tl.arange(0, BYTES // 4)
        a = _load(a_ptr.to(tl.pointer_type(tl.uint32), bitcast=True), m, M, column, code_columns // 4)
        b = _load(b_ptr.to(tl.pointer_type(tl.uint32), bitcast=True), n, N, column, code_columns // 4)
        return tl.dot(_decode(a, a_inner, FORMAT), tl.trans(_decode(b, b_inner, FORMAT)), acc)


@triton.jit
def _gemm(
    a_ptr, a_inner_ptr, a_outer_ptr,        # codes uint8 (M, K/2), scales uint8 (M, K/16 or K/32), float32
    b_ptr, b_inner_ptr, b_outer_ptr,        # (N, K/2), (N, K/16 or K/32), float32
    a8_ptr, a8_inner_ptr,                   # codes uint8 (M, K8), scales uint8 (M, K8/32), or None
    b8_ptr, b8_inner_ptr,                   # (N, K8), (N, K8/32)
    out_ptr,                                # (M, N), float32 or bf16
    M, N,
    columns, inner_columns, outer_columns,  # of A's and B's codes, inner and outer scales, as stored
    columns8, inner_columns8,
    zero,                                   # 0.0
    FORMAT: tl.constexpr,                   # nvfp4, mxfp4, or "" without the first six
    A_OUTER: tl.constexpr,                  # columns that share an outer scale: 128, -1 for all, 0 for none
    B_OUTER: tl.constexpr,
    ADD: tl.constexpr,                      # add to out instead of overwriting it
    NATIVE: tl.constexpr,                   # tl.dot_scaled instead of decoding
    BM: tl.constexpr, BN: tl.constexpr,     # tile of out
    GROUP: tl.constexpr,                    # as many rows of tiles are walked together, so that L2 keeps B
    STAGES: tl.constexpr,                   # steps whose operands are on their way or in shared memory
):
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    per_group = GROUP * tiles_n
    first = tl.program_id(0) // per_group * GROUP
    height = min(tiles_m - first, GROUP)
    tile_m = first + tl.program_id(0) % per_group % height
    tile_n = tl.program_id(0) % per_group // height
    m = tile_m.to(tl.int64) * BM + tl.arange(0, BM)
    n = tile_n.to(tl.int64) * BN + tl.arange(0, BN)

    # an accumulator that the compiler knows to be zero crashes it on sm_100 (Triton 3.6, 3.7)
    nothing = tl.full((BM, BN), zero if NATIVE else 0.0, tl.float32)
    acc = nothing
    if FORMAT != "":
        for k in tl.range(0, _steps(columns, STEP // 2), num_stages=STAGES):
            if A_OUTER == 128 or B_OUTER == 128:
                part = _product(nothing, a_ptr, a_inner_ptr, b_ptr, b_inner_ptr, m, M, n, N, k,
                                columns, inner_columns, FORMAT, NATIVE)
                if A_OUTER == 128:
                    part *= _outer(a_outer_ptr, m, M, k, outer_columns)[:, None]
                if B_OUTER == 128:
                    part *= _outer(b_outer_ptr, n, N, k, outer_columns)[None, :]
                acc += part
            else:
                acc = _product(acc, a_ptr, a_inner_ptr, b_ptr, b_inner_ptr, m, M, n, N, k,
                               columns, inner_columns, FORMAT, NATIVE)
        if A_OUTER == -1:
            acc *= tl.load(a_outer_ptr)
        if B_OUTER == -1:
            acc *= tl.load(b_outer_ptr)
        if FORMAT == "nvfp4" and not NATIVE:
            acc *= LIFT * LIFT
    if a8_ptr is not None:
        for k in tl.range(0, _steps(columns8, STEP), num_stages=STAGES):
            acc = _product(acc, a8_ptr, a8_inner_ptr, b8_ptr, b8_inner_ptr, m, M, n, N, k,
                           columns8, inner_columns8, "mxfp8", NATIVE)
    out_ptrs = out_ptr + m[:, None] * N + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    if ADD:
        acc += tl.load(out_ptrs, inside, other=0.0).to(tl.float32)
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), inside)


# -----------------------------------------------------------------------------
# what other files call

# compute capabilities whose tensor cores multiply block-scaled FP4
NATIVE_ARCHS = ((10, 0), (10, 3), (12, 0))

# (BM, BN, warps, stages). With outer scales per 128 a program holds two accumulators, that of a step and the
# sum, which spill at 128 x 256 and 8 warps. With one per tensor there is one, it fits, and an H200 is a sixth
# faster with that tile, which is to be asked for (results/bench_h200/gemm_variants.txt)
TILES = {"native": (128, 128, 8, 3), "sm_90": (128, 128, 8, 3), "decode": (64, 64, 4, 3)}


def arch_of(device: torch.device) -> str:
    """ The key of TILES for this device. """
    if device.type != "cuda" or INTERPRETED.value:
        return "decode"
    capability = torch.cuda.get_device_capability(device)
    return "native" if capability in NATIVE_ARCHS else "sm_90" if capability == (9, 0) else "decode"


def nvfp4_gemm(a: tuple, b: tuple, a8: tuple | None = None, b8: tuple | None = None, *,
               dtype: torch.dtype = torch.bfloat16, tile: tuple | None = None) -> Tensor:
    """
    A B^T, plus A8 B8^T: the FP4 operands of a linear and its outlier channels, one sum, rounded once.

    in    a      (code, inner, outer) of A (M, K); value = code * inner * outer
                 code   uint8 (M, K/2)   E2M1, packed along K, the even column in the low nibble
                 inner  uint8 (M, K/16)  E4M3
                 outer  float32 (M, K/128 rounded up), or () for one in all
                 MXFP4: inner uint8 (M, K/32 rounded up) E8M0, outer None
          b      the same for B (N, K)
          a8     (code, scale) of A8 (M, K8), as in mxfp8_gemm, or None
          b8     (code, scale) of B8 (N, K8)
          dtype  of out: bfloat16 or float32
          tile   (BM, BN, warps, stages), for another than that of TILES, and than hopper.py
    out   (M, N)

    edges  K is a multiple of 16: pad rows with zero codes, under any scale that is not NaN
           an inner or outer scale that is NaN makes NaN all outputs that use its block
           not bit for bit what quant.py computes: sums have another order, and an outer scale acts on the sum
           of 128 products instead of on each value
           where codes are decoded, an MXFP4 value of 2^128 or more is Inf, and an NVFP4 result below 2^-110
           loses bits
    """
    M, N, columns = _check_pair(a, b, 8)
    blocks = [16 if t[2] is not None else 32 for t in (a, b)]
    if blocks[0] != blocks[1]:
        raise ValueError("the operands are NVFP4, with outer scales, or MXFP4, without: give both or none")
    for t, rows in ((a, M), (b, N)):
        _check("inner", t[1], torch.uint8, (rows, triton.cdiv(2 * columns, blocks[0])), t[0].device)
        if t[2] is not None and t[2].dim():
            _check("outer", t[2], torch.float32, (rows, triton.cdiv(columns, 64)), t[0].device)
        elif t[2] is not None:
            _check("outer", t[2], torch.float32, (), t[0].device)
    if (a8 is None) != (b8 is None):
        raise ValueError("the MXFP8 operands are two: give both a8 and b8, or neither")
    if a8 is not None:
        _check_mxfp8(a8, b8, (M, N))
    out = torch.empty(M, N, dtype=dtype, device=a[0].device)
    if tile is None and a8 is None and _for_hopper(a, b):
        return hopper.nvfp4_gemm(a, b, out)
    return _launch(out, "nvfp4" if blocks[0] == 16 else "mxfp4", a, b, a8, b8, False, tile)


def _for_hopper(a: tuple, b: tuple) -> bool:
    """ Whether hopper.py multiplies these operands, which nvfp4_gemm has checked. """
    whole = a[0].shape[1] % 64 == 0 and a[0].numel() > 0 and b[0].numel() > 0
    double_block = all(t[2] is not None and t[2].dim() for t in (a, b))
    # copies of more than a byte at a time need to be known to be aligned, and to Triton that is to 16 bytes
    aligned = all(x.data_ptr() % 16 == 0 for t in (a, b) for x in t[:2])
    return hopper is not None and arch_of(a[0].device) == "sm_90" and whole and double_block and aligned


def mxfp8_gemm(a8: tuple, b8: tuple, out: Tensor | None = None, *, dtype: torch.dtype = torch.bfloat16,
               tile: tuple | None = None) -> Tensor:
    """
    A8 B8^T, or with out: out += A8 B8^T in place.

    in    a8     (code, scale) of A8 (M, K8)
                 code   uint8 (M, K8)    E4M3, the sign in bit 7
                 scale  uint8 (M, K8/32 rounded up) E8M0
          b8     the same for B8 (N, K8)
          out    (M, N) bfloat16 or float32, read, added to in float32 and rounded once; None makes a new one
    out   (M, N)

    edges  K8 is a multiple of 16: pad rows with zero codes
           a scale that is NaN makes NaN all outputs that use its block; codes are never NaN
           where codes are decoded, values go through bf16: exact for scales of 2^-117 and more, and smaller
           ones belong to blocks of zeros
    """
    M, N = _check_mxfp8(a8, b8)
    if out is not None:
        _check("out", out, out.dtype, (M, N), a8[0].device)
    add = out is not None
    if not add:
        out = torch.empty(M, N, dtype=dtype, device=a8[0].device)
    return _launch(out, "", (None, None, None), (None, None, None), a8, b8, add, tile)


def fp8_gemm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor,
             dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """
    The FP8 baseline: A (M, K) B (N, K)^T times two float32 () scales, through the library. A and B are
    float8_e4m3fn, or one of them float8_e5m2; K and N are multiples of 16. Needs sm_89.
    """
    return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype)


def _check(name: str, x: Tensor, dtype: torch.dtype, shape: tuple, device: torch.device):
    if x.dtype != dtype or x.shape != shape or x.device != device or not x.is_contiguous():
        raise ValueError(f"{name} is contiguous {dtype} {list(shape)} on {device}, not "
                         f"{'' if x.is_contiguous() else 'strided '}{x.dtype} {list(x.shape)} on {x.device}")


def _check_pair(a: tuple, b: tuple, multiple: int) -> tuple[int, int, int]:
    """ The codes of two operands -> M, N, bytes in a row; the rows are whole multiples of 16 values. """
    code = a[0]
    if code.dim() != 2 or code.shape[1] % multiple:
        raise ValueError(f"the codes of a row fill a multiple of {multiple} bytes, that is of 16 values, not "
                         f"{list(code.shape)}: pad with zero codes")
    for x in (code, b[0]):
        _check("code", x, torch.uint8, (x.shape[0], code.shape[1]), code.device)
        if x.data_ptr() % 4:
            raise ValueError("codes are read in words of 4 bytes: start them at a multiple of 4")
    if code.device.type != "cuda" and not INTERPRETED.value:
        raise ValueError(f"Triton needs an NVIDIA GPU, not {code.device}: move the operands there, or type "
                         "TRITON_INTERPRET=1 before python to run the kernel in Triton's interpreter")
    return code.shape[0], b[0].shape[0], code.shape[1]


def _check_mxfp8(a8: tuple, b8: tuple, shape: tuple | None = None) -> tuple[int, int]:
    """ MXFP8 operands, of a product of this shape or of any. -> M, N """
    M, N, columns = _check_pair(a8, b8, 16)
    if shape not in (None, (M, N)):
        raise ValueError(f"a8 has the rows of a, {shape[0]}, and b8 those of b, {shape[1]}, not {M} and {N}")
    for code, scale in (a8, b8):
        _check("scale", scale, torch.uint8, (code.shape[0], triton.cdiv(columns, 32)), a8[0].device)
    return M, N


def _launch(out, form, a, b, a8, b8, add, tile):
    if out.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out is bfloat16 or float32, not {out.dtype}")
    M, N = out.shape
    arch = arch_of(out.device)
    BM, BN, warps, stages = tile or TILES[arch]
    columns, inner_columns, outer_columns = 0, 0, 0
    kinds = [0, 0]
    if form:
        columns, inner_columns, outer_columns = a[0].shape[1], a[1].shape[1], triton.cdiv(a[0].shape[1], 64)
        kinds = [0 if t[2] is None else 128 if t[2].dim() else -1 for t in (a, b)]
    columns8, inner_columns8 = (a8[0].shape[1], a8[1].shape[1]) if a8 is not None else (0, 0)
    _gemm[(triton.cdiv(M, BM) * triton.cdiv(N, BN),)](
        *a, *b, *(a8 or (None, None)), *(b8 or (None, None)), out, M, N,
        columns, inner_columns, outer_columns, columns8, inner_columns8, 0.0,
        FORMAT=form, A_OUTER=kinds[0], B_OUTER=kinds[1], ADD=add, NATIVE=arch == "native",
        BM=BM, BN=BN, GROUP=8, STAGES=stages, num_warps=warps, num_stages=stages)
    return out

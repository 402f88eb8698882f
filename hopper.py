"""
The product of double-block NVFP4 operands on Hopper (sm_90), in Gluon: gemms.py calls it where it applies.

Hopper's tensor cores read no FP4, so each step of 128 columns is decoded to float16 first. The kernel of
gemms.py does so too, in Triton, but with an outer scale per 128 columns it needs the product of a step before
it may go on, and Triton then has the tensor cores wait for the decoding and the decoding for them. In Gluon,
Triton's lower level, a kernel says itself what lies where and what waits for what:

    copies         |  step k+2     |  step k+3     |    global to shared memory, by hardware
    warps          |  decode k+1   |  decode k+2   |    codes to float16 values, shared memory again
    tensor cores   |  product k    |  product k+1  |    shared memory to a fresh accumulator; then the warps
                                                        add it, times its outer scales, to the sum

What this file leaves out: all but two NVFP4 operands with outer scales per 128 and K a multiple of 128.

Letters used for shapes: out (M, N) = A (M, K) B (N, K)^T.
"""
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy, fence_async_shared, warpgroup_mma, warpgroup_mma_wait)

TILE, WARPS = gl.constexpr(128), gl.constexpr(8)      # a square of out has a program of its own
STAGES = gl.constexpr(4)        # steps whose codes and scales are on their way, or in shared memory
GROUP = gl.constexpr(16)        # as many rows of tiles are walked together, so that L2 keeps B
# decoded operands are 2^-7 of their value
LIFT = gl.constexpr(2.0**14)


# -----------------------------------------------------------------------------
# decoding: two values at a time, as the two halves of a 32-bit word
#
#   A code is moved to where float16 has its sign, exponent and mantissa. That gives its value times 2^-14,
#   since the biases of the exponents differ; the subnormals of E2M1 become those of float16. The scale, which
#   the hardware converts, takes 2^7 of that back: every code times every scale is then exact in float16
#
#       E2M1     s ee m
#       float16  s 000ee m000000000


@gluon.jit
def _mul2(x, y):
    """ The products of two pairs of float16, uint32 words. """
    return gl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.uint32,
                                     is_pure=True, pack=1)


@gluon.jit
def _scale_pairs(byte):
    """ E4M3 bytes -> words that hold the scale twice, times 2^7. """
    twice = gl.inline_asm_elementwise(
        "{ .reg .b16 h; .reg .b32 t; prmt.b32 t, $1, 0, 0; cvt.u16.u32 h, t; cvt.rn.f16x2.e4m3x2 $0, h; }",
        "=r,r", [byte.to(gl.uint32)], dtype=gl.uint32, is_pure=True, pack=1)
    return _mul2(twice, gl.full(twice.shape, 0x58005800, gl.uint32, layout=twice.type.layout))


@gluon.jit
def _decode(x, byte):
    """ x (TILE, 16) words of codes, byte (TILE, 8) scales -> float16 (TILE, 128), columns reordered. """
    scale = gl.expand_dims(_scale_pairs(byte), 2)
    scale, _ = gl.broadcast(scale, gl.full([TILE, 8, 2], 0, gl.uint32, layout=scale.type.layout))
    scale = gl.convert_layout(gl.reshape(scale, [TILE, 16]), x.type.layout, assert_trivial=True)
    # codes i and i + 4 are 16 bits apart, as the halves of a word are
    x0 = ((x << 9) & 0x0E000E00) | ((x << 12) & 0x80008000)
    x1 = ((x << 5) & 0x0E000E00) | ((x << 8) & 0x80008000)
    x2 = ((x << 1) & 0x0E000E00) | ((x << 4) & 0x80008000)
    x3 = ((x >> 3) & 0x0E000E00) | (x & 0x80008000)
    words = gl.join(gl.join(_mul2(x0, scale), _mul2(x1, scale)), gl.join(_mul2(x2, scale), _mul2(x3, scale)))
    # the order is free, if both operands have the same: in this one threads that store together do not meet
    # at a bank of the memory
    words = gl.reshape(words, [TILE, 4, 4, 2, 2])
    words = gl.reshape(gl.permute(words, (0, 3, 1, 4, 2)), [TILE, 64])
    low = words.to(gl.uint16).to(gl.float16, bitcast=True)
    high = (words >> 16).to(gl.uint16).to(gl.float16, bitcast=True)
    return gl.reshape(gl.join(low, high), [TILE, 128])


# -----------------------------------------------------------------------------
# the GEMM


@gluon.jit
def _sources(code_ptr, inner_ptr, outer_ptr, first, rows, steps):
    """ What a thread copies of one operand: pointers to codes, inner and outer scales of step 0; masks. """
    words: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])         # 16 bytes
    bytes_: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [WARPS, 1], [1, 0])       # 8 bytes
    line: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    row = gl.arange(0, TILE, gl.SliceLayout(1, words))
    row_inner = gl.arange(0, TILE, gl.SliceLayout(1, bytes_))
    row_outer = gl.arange(0, TILE, line)
    first = first.to(gl.int64)
    code = code_ptr.to(gl.pointer_type(gl.uint32), bitcast=True) + first * (steps * 16)
    code += (row * (steps * 16))[:, None] + gl.arange(0, 16, gl.SliceLayout(0, words))[None, :]
    inner = inner_ptr + first * (steps * 8)
    inner += (row_inner * (steps * 8))[:, None] + gl.arange(0, 8, gl.SliceLayout(0, bytes_))[None, :]
    outer = outer_ptr + first * steps + row_outer * steps
    inside = rows - first
    return (code, inner, outer), ((row < inside)[:, None], (row_inner < inside)[:, None], row_outer < inside)


@gluon.jit
def _room():
    """ Shared memory for codes, inner and outer scales of one operand, STAGES steps. """
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return (gl.allocate_shared_memory(gl.uint32, [STAGES, TILE, 16], flat),
            gl.allocate_shared_memory(gl.uint8, [STAGES, TILE, 8], flat),
            gl.allocate_shared_memory(gl.float32, [STAGES, TILE], line))


@gluon.jit
def _copy(step, steps, room, source, inside):
    """ Set off the copies of one operand's step; none beyond the last. """
    slot, there = step % STAGES, step < steps
    async_copy.async_copy_global_to_shared(room[0].index(slot), source[0] + step * 16, inside[0] & there)
    async_copy.async_copy_global_to_shared(room[1].index(slot), source[1] + step * 8, inside[1] & there)
    async_copy.async_copy_global_to_shared(room[2].index(slot), source[2] + step, inside[2] & there)


@gluon.jit
def _values(step, room, values):
    """ Decode an operand's step, which has arrived, to where the tensor cores read it. """
    words: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])
    # a thread has the two scales of its four words
    scales: gl.constexpr = gl.SliceLayout(2, gl.BlockedLayout([1, 2, 2], [8, 4, 1], [WARPS, 1, 1], [2, 1, 0]))
    slot = step % STAGES
    values.index(step % 2).store(_decode(room[0].index(slot).load(words), room[1].index(slot).load(scales)))


@gluon.jit
def _add(acc, part, step, a_room, b_room):
    """ acc plus the product of a step, times its outer scales. """
    mma: gl.constexpr = part.type.layout
    a_outer = a_room[2].index(step % STAGES).load(gl.SliceLayout(1, mma))
    b_outer = b_room[2].index(step % STAGES).load(gl.SliceLayout(0, mma))
    return acc + part * a_outer[:, None] * b_outer[None, :]


@gluon.jit(do_not_specialize=["M", "steps"])
def _hopper_kernel(
    a_ptr, a_inner_ptr, a_outer_ptr,        # codes uint8 (M, K/2), scales uint8 (M, K/16), float32 (M, K/128)
    b_ptr, b_inner_ptr, b_outer_ptr,        # (N, K/2), (N, K/16), (N, K/128)
    out_ptr,                                # (M, N), float32 or bf16
    M, N, steps,                            # of 128 columns
):
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1],
                                                  instr_shape=[16, TILE, 16])
    tiles_m, tiles_n = gl.cdiv(M, TILE), gl.cdiv(N, TILE)
    per_group = GROUP * tiles_n
    first = gl.program_id(0) // per_group * GROUP
    height = min(tiles_m - first, GROUP)
    top = (first + gl.program_id(0) % per_group % height) * TILE
    left = gl.program_id(0) % per_group // height * TILE

    a_source, a_inside = _sources(a_ptr, a_inner_ptr, a_outer_ptr, top, M, steps)
    b_source, b_inside = _sources(b_ptr, b_inner_ptr, b_outer_ptr, left, N, steps)
    a_room, b_room = _room(), _room()
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    a_values = gl.allocate_shared_memory(gl.float16, [2, TILE, 128], swizzled)
    b_values = gl.allocate_shared_memory(gl.float16, [2, TILE, 128], swizzled)

    for ahead in gl.static_range(STAGES - 1):
        _copy(ahead, steps, a_room, a_source, a_inside)
        _copy(ahead, steps, b_room, b_source, b_inside)
        async_copy.commit_group()
    acc = gl.full([TILE, TILE], 0.0, gl.float32, layout=mma)
    async_copy.wait_group(STAGES - 2)
    _values(0, a_room, a_values)
    _values(0, b_room, b_values)
    # the tensor cores read shared memory by a way of their own, which sees no write before this
    fence_async_shared()
    part = warpgroup_mma(a_values.index(0), b_values.index(0).permute((1, 0)), acc, use_acc=False,
                         is_async=True)
    for k in range(1, steps):
        async_copy.wait_group(STAGES - 3)
        _values(k, a_room, a_values)
        _values(k, b_room, b_values)
        fence_async_shared()
        # until here the product of step k - 1 was under way
        done = warpgroup_mma_wait(0, [part])
        acc = _add(acc, done, k - 1, a_room, b_room)
        part = warpgroup_mma(a_values.index(k % 2), b_values.index(k % 2).permute((1, 0)), done,
                             use_acc=False, is_async=True)
        # to where step k - 2 was, of which nothing is needed any more
        _copy(k + STAGES - 2, steps, a_room, a_source, a_inside)
        _copy(k + STAGES - 2, steps, b_room, b_source, b_inside)
        async_copy.commit_group()
    done = warpgroup_mma_wait(0, [part])
    acc = _add(acc, done, steps - 1, a_room, b_room) * LIFT

    m = top + gl.arange(0, TILE, gl.SliceLayout(1, mma))
    n = left + gl.arange(0, TILE, gl.SliceLayout(0, mma))
    out_ptrs = out_ptr + m.to(gl.int64)[:, None] * N + n[None, :]
    gl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), (m < M)[:, None] & (n < N)[None, :])


def nvfp4_gemm(a: tuple, b: tuple, out: Tensor) -> Tensor:
    """ gemms.nvfp4_gemm into out, for operands with outer scales per 128 and rows of whole steps of 128. """
    (M, N), steps = out.shape, a[2].shape[1]
    _hopper_kernel[(triton.cdiv(M, TILE.value) * triton.cdiv(N, TILE.value),)](
        *a, *b, out, M, N, steps, num_warps=WARPS.value)
    return out

"""
The rounding of quant.py in Triton, bit for bit, in as few passes over memory as the method allows.

    round_pair   one pass over a matrix x (M, K) -> x rounded along its rows, and x^T rounded along its rows:
                 X -> Q1(X) and Q6 of Q1(X)^T, W -> Q2(W) and Q4 of Q2(W)^T, dY -> Q3(dY) and Q5(dY^T)

A program takes a tile of 128 x 128: one outer block along both axes, so that no program waits for another.
What makes it fast is where the values lie. A *strip* is 16 values along a row, which in NVFP4 are rotated
together and share a scale, and a tile's strips are kept as 16 tensors: tensor i holds element i of every
strip. So each thread has whole strips in its own registers, and the Hadamard butterfly, the maximum and the
noise are plain arithmetic between registers. Longer blocks and rotations end with a step or a few between the
strips of neighbouring threads. Only the transposition goes through shared memory, once.

Bits: as in quant.py, float32 and one rounding per written operation, with the compiler's own fusion off.
tl.fma stands where the product is exact (one factor is a power of two) and so rounds as a product and a sum
do. Three liberties that cannot show in a result: a rotation's factor, where it is a power of two (1/4 for 16
values), is multiplied into the scale (for |x| below 2^120), values saturate after rounding instead of before,
and not at all where the scale was rounded up, and a division is a reciprocal with two corrections, which is
the exact quotient (_divide).

What this file leaves out: which operand is rounded how. It takes quant.Operand as a plain record of settings.

Letters used for shapes: M, K rows and columns of x; R, C strips down and across a tile.
"""
import os
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

import quant

TILE = 128                                 # rows and columns of a tile
STRIP = tl.constexpr(16)                   # values in a strip
STRIPS = tl.constexpr(TILE // 16)          # strips across a tile
TENSOR = tl.constexpr(quant.TENSOR)        # Operand.outer: one outer scale for the whole tensor
# with TRITON_INTERPRET=1 kernels run on a CPU, in NumPy, which has neither PTX nor an exact fma
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
INF, NAN = tl.constexpr(float("inf")), tl.constexpr(float("nan"))
TINY = tl.constexpr(quant.TINY)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)
QUEST_TOP = tl.constexpr(quant.QUEST_TOP)
# what rule 3/4 multiplies its powers of two by, before and, under rtn, after
FOUR_THIRDS = tl.constexpr(torch.tensor(4 / 3).item())
NORMAL_FOUR_THIRDS = tl.constexpr((torch.tensor(4 / 3) * quant.NORMAL_GAIN).item())
FIXED_SIGNS, NO_SIGNS = tl.constexpr(quant.FIXED_SIGNS), tl.constexpr(quant.NO_SIGNS)
RULES = ("nearest", "up", "17/16", "4/6", "eden", "ceil", "floor", "quest", "3/4", "max")    # of quant.RULES
# a compiled kernel is kept by the names of its formats: with their numbers a changed grid is another kernel
FORMATS = f"{quant.GRIDS} {quant.SCALES}"


class Side(NamedTuple):
    """ What happens along one orientation of a matrix. Streams are those of quant.random_words. """
    op: object           # quant.Operand; None leaves the values unrounded
    turn: int = 0        # rotate this many neighbours at a time, 0 for none
    noise: int = 0       # stream of the noise
    signs: int = 0       # stream of the signs, quant.NO_SIGNS for none


class Out(NamedTuple):
    """
    Where one orientation goes: values, or, where there is room for inner scales, codes and scales. stride is
    that of a row of values. trust, if it is wanted, is uint8 (rows, stride): quant.trust_mask.
    """
    data: Tensor
    inner: Tensor | None
    outer: Tensor | None
    stride: int
    trust: Tensor | None = None


# -----------------------------------------------------------------------------
# strips: [R, C, n] <-> n tensors [R, C]. Relabelling of registers: the compiler moves nothing


@triton.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@triton.jit
def _split(x, n: tl.constexpr):
    """ [R, C, n] -> n tensors [R, C], in order. """
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    parts = (x,)
    for level in tl.static_range(_log2(n)):
        even, odd = (), ()
        for i in tl.static_range(len(parts)):
            e, o = tl.split(tl.reshape(parts[i], [R, C, n >> (level + 1), 2]))
            even, odd = even + (e,), odd + (o,)
        parts = even + odd
    strips = ()
    for i in tl.static_range(n):
        strips = strips + (tl.reshape(parts[i], [R, C]),)
    return strips


@triton.jit
def _join(v):
    """ The inverse of _split. """
    n: tl.constexpr = len(v)
    R: tl.constexpr = v[0].shape[0]
    C: tl.constexpr = v[0].shape[1]
    for level in tl.static_range(_log2(n)):
        pairs = ()
        for i in tl.static_range(n >> (level + 1)):
            pairs = pairs + (tl.join(v[i], v[i + (n >> (level + 1))]),)
        v = pairs
    return tl.reshape(v[0], [R, C, n])


@triton.jit
def _slice(v, start: tl.constexpr, n: tl.constexpr):
    out = ()
    for i in tl.static_range(n):
        out = out + (v[start + i],)
    return out


@triton.jit
def _cast(v, dtype: tl.constexpr):
    out = ()
    for i in tl.static_range(len(v)):
        out = out + (v[i].to(dtype),)
    return out


@triton.jit
def _floats(v):
    """ Strips as they were loaded -> float32. Of two bf16 in a word each takes one instruction. """
    if v[0].dtype == tl.int32:
        out = ()
        for i in tl.static_range(len(v)):
            low, high = v[i] << 16, v[i] & -65536
            out = out + (low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True))
    else:
        out = _cast(v, tl.float32)
    return out


@triton.jit
def _unpaired(v):
    """ Strips as they were loaded, pairs of bf16 as bf16. """
    if v[0].dtype == tl.int32:
        out = ()
        for i in tl.static_range(len(v)):
            even = v[i].to(tl.int16).to(tl.bfloat16, bitcast=True)
            out = out + (even, (v[i] >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True))
        v = out
    return v


@triton.jit
def _transpose(v):
    """ Strips of a tile along its rows -> strips along its columns, float32. """
    tile = tl.trans(tl.reshape(_join(v), [128, 128]))
    return _cast(_split(tl.reshape(tile, [128, STRIPS, STRIP]), STRIP), tl.float32)


@triton.jit
def _stack(a, b):
    """ The strips of the first rows of a tile and those of the next, [R, C] -> those of both, [2 R, C]. """
    out = ()
    for i in tl.static_range(len(a)):
        both = tl.permute(tl.join(a[i], b[i]), [2, 0, 1])
        out = out + (tl.reshape(both, [2 * a[i].shape[0], a[i].shape[1]]),)
    return out


@triton.jit
def _halves(v):
    """ The inverse of _stack. """
    a, b = (), ()
    for i in tl.static_range(len(v)):
        x, y = tl.split(tl.permute(tl.reshape(v[i], [2, v[i].shape[0] // 2, v[i].shape[1]]), [1, 2, 0]))
        a, b = a + (x,), b + (y,)
    return a, b


@triton.jit
def _exchange(a, b, odd):
    """
    Neighbouring lanes trade: an even one gives b for the odd one's a. Its own inverse. Four operations and a
    shuffle; s is the exclusive or of what the two give away.
    """
    s = (a & odd) | (b & ~odd)
    pair = tl.reshape(s, [s.shape[0], s.shape[1] // 2, 2])
    s = tl.reshape(tl.broadcast_to(tl.xor_sum(pair, axis=2, keep_dims=True), pair.shape), s.shape)
    return a ^ (s & odd), b ^ (s & ~odd)


@triton.jit
def _place(row, first, stride, sector: tl.constexpr, W: tl.constexpr, P: tl.constexpr, PAIRED: tl.constexpr):
    """
    Offsets and columns [C, R, P] of the two pieces of P values that a lane moves of one sector, 2 P values,
    of strips of W.

    A thread needs whole sectors, but 16 bytes are the most that it can move at once, and the memory wants
    whole sectors of 32 at once. PAIRED: lanes 2 j and 2 j + 1 together move a sector of strip 2 j, then one
    of strip 2 j + 1, and trade. The strip axis comes first: Triton hands out lanes from the first of the axes
    that are not contiguous in memory.
    """
    strip, lane = tl.arange(0, STRIPS)[:, None, None], tl.arange(0, P)[None, None, :]
    if PAIRED:
        low = (strip // 2) * (2 * W) + (strip % 2) * P + sector * (2 * P)
        high = low + W
    else:
        low = strip * W + sector * (2 * P)
        high = low + P
    at = row[None, :, None] * stride + first + lane
    return at + low, at + high, first + lane + low, first + lane + high


@triton.jit
def _load(ptr, row, first, M, K, stride, keep_ptr):
    """
    The strips of some rows from column `first` on; zero outside of (M, K). A pointer to int32 is one to pairs
    of bf16; then first, K and stride count pairs. keep_ptr, if there is one, has a mask of bits for each
    column (pair of columns): what it leaves out counts as zero, whatever it is.
    """
    BITS: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
    PAIRS: tl.constexpr = ptr.dtype.element_ty == tl.int32
    N: tl.constexpr = 8 if PAIRS else 16
    P: tl.constexpr = min(128 // BITS, N // 2)
    rows = (row < M)[None, :, None]
    strips = ()
    for sector in tl.static_range(N // (2 * P)):
        # both halves of a sector, one after the other: the second comes from the cache
        at_a, at_b, column_a, column_b = _place(row, first, stride, sector, N, P, False)
        a = tl.load(ptr + at_a, rows & (column_a < K), 0)
        b = tl.load(ptr + at_b, rows & (column_b < K), 0)
        if keep_ptr is not None:
            keep_a = tl.load(keep_ptr + column_a, column_a < K, 0)
            keep_b = tl.load(keep_ptr + column_b, column_b < K, 0)
            if PAIRS:
                a, b = a & keep_a, b & keep_b
            else:
                a, b = tl.where(keep_a != 0, a, 0.0), tl.where(keep_b != 0, b, 0.0)
        a, b = tl.permute(a, [1, 0, 2]), tl.permute(b, [1, 0, 2])
        strips = strips + _split(a, P) + _split(b, P)
    return strips


@triton.jit
def _pack_bf16(low, high):
    """ Two float32 to the nearest bf16, ties to even, in one int32. """
    if INTERPRETED:
        low, high = low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)
        low = ((low + 0x7FFF + ((low >> 16) & 1)) >> 16) & 0xFFFF
        word = ((high + 0x7FFF + ((high >> 16) & 1)) & -65536) | low
    else:
        word = tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f",
                                         [low.to(tl.float32), high.to(tl.float32)], tl.int32, True, 1)
    return word


@triton.jit
def _store(ptr, v, row, first, M, K, stride):
    """ The inverse of _load. """
    BITS: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
    PAIRS: tl.constexpr = ptr.dtype.element_ty == tl.int32
    N: tl.constexpr = len(v) // 2 if PAIRS else len(v)
    P: tl.constexpr = min(128 // BITS, N // 2)
    if PAIRS:
        words = ()
        for i in tl.static_range(N):
            words = words + (_pack_bf16(v[2 * i], v[2 * i + 1]),)
        v = words
    odd = -(tl.arange(0, STRIPS) % 2)[None, :]
    rows = (row < M)[None, :, None]
    for sector in tl.static_range(N // (2 * P)):
        a, b = _slice(v, sector * 2 * P, P), _slice(v, sector * 2 * P + P, P)
        if PAIRS:
            low, high = (), ()
            for i in tl.static_range(P):
                x, y = _exchange(a[i], b[i], odd)
                low, high = low + (x,), high + (y,)
            a, b = low, high
        at_a, at_b, column_a, column_b = _place(row, first, stride, sector, N, P, PAIRS)
        a, b = _join(_cast(a, ptr.dtype.element_ty)), _join(_cast(b, ptr.dtype.element_ty))
        tl.store(ptr + at_a, tl.permute(a, [1, 0, 2]), rows & (column_a < K))
        tl.store(ptr + at_b, tl.permute(b, [1, 0, 2]), rows & (column_b < K))


# -----------------------------------------------------------------------------
# rotation and noise


@triton.jit
def _product(a, FACTOR: tl.constexpr):
    """ The upper and lower 32 bits of a product: one instruction, IMAD.WIDE, if written in 64 bits. """
    p = a.to(tl.uint64) * FACTOR
    return (p >> 32).to(tl.uint32), p.to(tl.uint32)


@triton.jit
def _philox(seed, c0, c1, c2, c3):
    """ quant.philox. tl.philox has the same bits, for as many rounds, and multiplies twice for a product. """
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(7):
        high0, low0 = _product(c0, 0xD2511F53)
        high1, low1 = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _sign_words(at, STREAM: tl.constexpr):
    """
    The four words of random bits that quant.random_signs makes signs of: scalars, one Philox call. Without
    signs they are zeros: a bit that is set is a minus.
    """
    seed, step, micro, layer = at
    if STREAM == NO_SIGNS:
        none = tl.full((), 0, tl.int32)
        return none, none, none, none
    zero = tl.zeros([1], tl.uint32)
    if STREAM == FIXED_SIGNS:
        drawn = _philox(seed, zero, zero, zero, zero + STREAM)
    else:
        drawn = _philox(seed, zero, step, micro, layer * 16 + STREAM)
    words = ()
    for i in tl.static_range(4):
        words = words + (tl.max(drawn[i].to(tl.int32, bitcast=True), 0),)
    return words


@triton.jit
def _sign(word, i: tl.constexpr):
    """ Bit i of a word as a float, 1 or -1: it moves to the place of the sign, under it the bits of 1.0. """
    return (((word << (31 - i)) & -2147483648) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _flip(v, words, n: tl.constexpr):
    """ Every n neighbours, perhaps of several strips, times diag(signs). """
    # the first sign of each strip is bit `place % 32` of one of the words
    place = (tl.arange(0, STRIPS) * STRIP % n)[None, :]
    word = tl.full([1, STRIPS], 0, tl.int32) + words[0]
    for i in tl.static_range(1, 4):
        word = tl.where(place // 32 == i, words[i], word)
    word = word >> (place % 32)
    out = ()
    for i in tl.static_range(STRIP):
        sign = (word << (31 - i % n)) & -2147483648
        out = out + ((v[i].to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True),)
    return out


@triton.jit
def _rotate(v, word, n: tl.constexpr):
    """
    quant.hadamard without its factor: every n of the strips' values times diag(signs) H_n, n at most 16.

    Each pass of the butterfly, a + b and a - b, takes its two signs as that of a, kept for later, and that of
    a b, which a fused multiply-add has for nothing. In the end all values wait for the first sign. After p
    passes the signs that wait are those of every 2^p-th value, so the bits of a b are word ^ word >> 2^p.
    """
    out = ()
    for first in tl.static_range(0, len(v), n):
        x = _slice(v, first, n)
        for p in tl.static_range(_log2(n)):
            low, high, both = (), (), word ^ (word >> (1 << p))
            for j in tl.static_range(n // 2):
                sign = _sign(both, j % (n >> (p + 1)) << (p + 1))
                low = low + (tl.fma(x[2 * j + 1], sign, x[2 * j]),)
                high = high + (tl.fma(x[2 * j + 1], -sign, x[2 * j]),)
            x = low + high
        out = out + x
    return out


@triton.jit
def _across(v, n: tl.constexpr):
    """
    The last steps of the butterfly of n values, which lie in several strips. Each adds or subtracts what the
    partner strip has in the same place; the exclusive or of both and one of them is the other.
    """
    strip = tl.arange(0, STRIPS)[None, :]
    for level in tl.static_range(_log2(n // STRIP)):
        second = strip >> level & 1
        sign = (1 - 2 * second).to(tl.float32)
        out = ()
        for i in tl.static_range(STRIP):
            mine = v[i].to(tl.int32, bitcast=True)
            pair = tl.reshape(mine, [mine.shape[0], STRIPS >> (level + 1), 2, 1 << level])
            both = tl.broadcast_to(tl.xor_sum(pair, axis=2, keep_dims=True), pair.shape)
            other = (tl.reshape(both, mine.shape) ^ mine).to(tl.float32, bitcast=True)
            out = out + (tl.fma(v[i], sign, other),)
        v = out
    return v


@triton.jit
def _noise(seed, group, step, micro, address, MBITS: tl.constexpr):
    """
    Eight values of quant.uniform, as 128 gaps + noise of one gap, in units of a binade, which has 2^MBITS
    gaps: one Philox call, 16 bits each.
    """
    words = _philox(seed, group, step, micro, address)
    # 16 bits under the exponent of 128 are the float 128 + k / 2^16; a lower exponent divides it
    exponent: tl.constexpr = 0x43000000 - (MBITS << 23)
    noise = ()
    for i in tl.static_range(4):
        low = ((words[i] & 0xFFFF) | exponent).to(tl.float32, bitcast=True)
        high = ((words[i] >> 16) | exponent).to(tl.float32, bitcast=True)
        noise = noise + (low, high)
    return noise


# -----------------------------------------------------------------------------
# rounding


@triton.jit
def _reciprocal(x):
    """ 1 / x, exactly rounded, for normal x and 1 / x: tests/test_cuda_kernels.py tries every mantissa. """
    if INTERPRETED:
        r = tl.div_rn(1.0, x)
    else:
        r = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
        r = tl.fma(r, tl.fma(-x, r, 1.0), r)
    return r


@triton.jit
def _divide(a, b, inv_b):
    """
    a / b, exactly rounded, given the exactly rounded inv_b = 1 / b. A plain division costs a branch and a
    call that no thread takes; this one is five instructions (Markstein, IBM J. Res. Dev. 34, 1990).
    """
    if INTERPRETED:
        q = tl.div_rn(a, b)
    else:
        q = a * inv_b
        q = tl.fma(tl.fma(-q, b, a), inv_b, q)
        q = tl.fma(tl.fma(-q, b, a), inv_b, q)
    return q


@triton.jit
def _over(a, number: tl.constexpr):
    """ a / number, exactly rounded. One correction is enough, see tests/test_cuda_kernels.py. """
    if INTERPRETED:
        q = tl.div_rn(a, tl.full(a.shape, number, tl.float32))
    else:
        q = a * (1.0 / number)
        q = tl.fma(tl.fma(q, -number, a), 1.0 / number, q)
    return q


@triton.jit
def _binade(y, smallest: tl.constexpr):
    bits = y.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.maximum(bits.to(tl.float32, bitcast=True), smallest)


@triton.jit
def _nearest(y, EMIN: tl.constexpr, MBITS: tl.constexpr):
    """
    y to the nearest value of a grid without a largest value. Adding 1.5 * 2^23 gaps and taking them off
    again leaves a multiple of the gap, ties to even: float32 addition does that. The sign of a zero is lost.
    """
    binade = _binade(y, 2.0**EMIN)
    much: tl.constexpr = 1.5 * 2.0 ** (23 - MBITS)
    return tl.fma(binade, -much, tl.fma(binade, much, y))


@triton.jit
def _stochastic(y, noise, EMIN: tl.constexpr, MBITS: tl.constexpr):
    """
    y + noise, rounded down, as quant.round_to_grid does it: noise is 128 gaps too large, which rounds y to
    2^-16 of a gap. Rounding down is the same addition as in _nearest, with the mode of the instruction set.
    """
    binade = _binade(y, 2.0**EMIN)
    t = tl.fma(noise, binade, y)
    much: tl.constexpr = 1.5 * 2.0 ** (23 - MBITS)
    if INTERPRETED:
        gap = binade * 2.0**-MBITS
        return tl.floor(t / gap) * gap - binade * 2.0 ** (7 - MBITS)
    else:
        t = tl.inline_asm_elementwise("fma.rm.f32 $0, $1, $2, $3;", "=f,f,f,f",
                                      [binade, tl.full(y.shape, much - 2.0 ** (7 - MBITS), tl.float32), t],
                                      tl.float32, True, 1)
        return tl.fma(binade, -much, t)


@triton.jit
def _add_up(a, b, c):
    """ a * b + c, rounded up. """
    return tl.inline_asm_elementwise("fma.rp.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], tl.float32, True, 1)


@triton.jit
def _to_scale(q, OP: tl.constexpr):
    """ q to the nearest value of the inner scales' grid, or the smallest that is not below. """
    EMIN: tl.constexpr = OP.scale_grid.emin
    MBITS: tl.constexpr = OP.scale_grid.mbits
    if OP.rule == "up":
        binade = _binade(q, 2.0**EMIN)
        if INTERPRETED:
            gap = binade * 2.0**-MBITS
            s = tl.ceil(q / gap) * gap
        else:
            much: tl.constexpr = 1.5 * 2.0 ** (23 - MBITS)
            s = tl.fma(binade, -much, _add_up(binade, tl.full(q.shape, much, tl.float32), q))
    else:
        s = _nearest(q, EMIN, MBITS)
    return tl.minimum(s, OP.scale_grid.max)


@triton.jit
def _maximum(v):
    """ max |v| of each strip; NaN if a value is. """
    a = tl.abs(v[0])
    for i in tl.static_range(1, len(v)):
        a = tl.maximum(a, tl.abs(v[i]), propagate_nan=tl.PropagateNan.ALL)
    return a


@triton.jit
def _max_along(a, axis: tl.constexpr):
    """ The largest of magnitudes along an axis, NaN included: as integers they are ordered, NaN on top. """
    return tl.max(a.to(tl.int32, bitcast=True), axis=axis, keep_dims=True).to(tl.float32, bitcast=True)


@triton.constexpr_function
def _share(OP):
    """ How many neighbouring strips share a scale. Without inner scales, any number would do. """
    return OP.block[1] // 16 if OP.scale != "none" else 1


@triton.jit
def _amax(a, OP: tl.constexpr):
    """ Maxima of strips [R, C] -> in each of them that of its block, of several rows or strips. """
    ROWS: tl.constexpr = OP.block[0]
    SHARE: tl.constexpr = _share(OP)
    if ROWS > 1:
        square = tl.reshape(a, [a.shape[0] // ROWS, ROWS, a.shape[1]])
        a = tl.reshape(tl.broadcast_to(_max_along(square, 1), square.shape), a.shape)
    if SHARE > 1:
        pair = tl.reshape(a, [a.shape[0], a.shape[1] // SHARE, SHARE])
        a = tl.reshape(tl.broadcast_to(_max_along(pair, 2), pair.shape), a.shape)
    return a


@triton.jit
def _outer(amax, tensor_amax, OP: tl.constexpr):
    """ -> the magnitude that decides over NaN and zero, and the outer scale: [R, 1], [1, 1] of a tensor. """
    if OP.outer == TENSOR:
        fate = tl.full([1, 1], 0.0, tl.float32) + tensor_amax
    else:
        fate = _max_along(amax, 1)
    top: tl.constexpr = OP.value_grid.max * OP.head_room
    outer = tl.where(fate < TINY, 1.0, _over(_over(fate, OP.reach), top))
    return fate, tl.where(fate < INF, outer, NAN)


@triton.jit
def _inner(v, factor, a, fate, outer, inv_outer, OP: tl.constexpr, TOP: tl.constexpr):
    """
    For strips v, times factor, in blocks of the maxima a, which go to the grid value TOP -> inner scales,
    their products with the outer one, and the reciprocals of these.
    """
    if OP.outer != 0:
        if OP.scale == "none":
            inner = tl.full(a.shape, 1.0, tl.float32)
        else:
            a = tl.where(fate < TINY, 0.0, a)
            inner = _to_scale(_over(_divide(a, outer, inv_outer), TOP * OP.head_room), OP)
            if OP.stochastic:
                inner = tl.maximum(inner, 2.0 ** (OP.scale_grid.emin - OP.scale_grid.mbits))
            inner = tl.where(fate < INF, inner, 0.0)
        scale = inner * outer
        return inner, scale, tl.where(scale > SMALLEST_NORMAL, _reciprocal(scale), 0.0)
    # E8M0: a power of two, so bits of the exponent. A block of zeros stores 2^-127, the bits 0x400000
    a = tl.where(a < TINY, 0.0, a)
    if OP.rule == "floor" or OP.rule == "3/4":
        inner = _binade(a, 0.0) * 2.0**-OP.value_grid.emax
    elif OP.rule == "quest":
        unit, inv_unit = _unit(a)
        squares = ()
        for i in tl.static_range(STRIP):
            near_1 = v[i] * (inv_unit * factor)
            squares = squares + (near_1 * near_1,)
        rms = tl.sqrt_rn(_sum(squares, OP) * (1.0 / OP.block[1]))
        inner = _binade(rms * (QUEST_TOP / OP.value_grid.max), 0.0) * tl.where(a < TINY, 0.0, unit)
    else:
        q = _over(a, OP.value_grid.max)
        low = _binade(q, 0.0)
        inner = tl.where(low < q, 2 * low, low)
    bits = tl.maximum(inner.to(tl.int32, bitcast=True), 0x400000)
    usable = (bits > 0x400000) & (a < INF)
    inv = tl.where(usable, (-(bits - 0x7F000000)).to(tl.float32, bitcast=True), 0.0)
    inner = tl.where(a < INF, bits.to(tl.float32, bitcast=True), NAN)
    if OP.rule == "3/4":
        return inner, inner * FOUR_THIRDS, inv * 0.75
    return inner, inner, inv


@triton.jit
def _unit(a):
    """
    A power of two not far below the magnitudes a, and its inverse. Sums of squares in this unit stay in
    float32; quant.py takes a itself where a is beyond 2^127, which only doubles its numbers.
    """
    bits = tl.minimum(tl.maximum(a, TINY).to(tl.int32, bitcast=True) & 0x7F800000, 253 << 23)
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def _sum(x, OP: tl.constexpr):
    """ quant._sum, in each strip that of its block: neighbours first, strips before rows. """
    for _ in tl.static_range(_log2(len(x))):
        pairs = ()
        for i in tl.static_range(len(x) // 2):
            pairs = pairs + (x[2 * i] + x[2 * i + 1],)
        x = pairs
    s = x[0]
    SHARE: tl.constexpr = _share(OP)
    for level in tl.static_range(_log2(SHARE)):
        strips = tl.reshape(s, [s.shape[0], s.shape[1] >> (level + 1), 2, 1 << level])
        s = tl.reshape(tl.broadcast_to(tl.sum(strips, axis=2, keep_dims=True), strips.shape), s.shape)
    ROWS: tl.constexpr = OP.block[0]
    for level in tl.static_range(_log2(ROWS)):
        rows = tl.reshape(s, [s.shape[0] >> (level + 1), 2, 1 << level, s.shape[1]])
        s = tl.reshape(tl.broadcast_to(tl.sum(rows, axis=1, keep_dims=True), rows.shape), s.shape)
    return s


@triton.jit
def _error(v, codes, factor, scale, a, OP: tl.constexpr):
    """ The squared error of blocks rounded to codes times scale, in the units of their maxima a. """
    _, inv_unit = _unit(a)
    scale = scale * inv_unit
    squares = ()
    for i in tl.static_range(STRIP):
        e = v[i] * (inv_unit * factor) - codes[i] * scale
        squares = squares + (e * e,)
    return _sum(squares, OP)


@triton.jit
def _code(c, EMIN: tl.constexpr, MBITS: tl.constexpr, SIGN: tl.constexpr):
    """ quant.encode of a signed grid value, int32, with the sign in bit SIGN. """
    bits = c.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude >> (23 - MBITS)) - ((EMIN + 126) << MBITS)
    subnormal = (tl.abs(c) * 2.0 ** (MBITS - EMIN)).to(tl.int32)
    code = tl.where(magnitude >= (EMIN + 127) << 23, normal, subnormal)
    # a NaN, whose scale is NaN too, stores 0; bit 31 is the sign, shifted down as an unsigned number
    return tl.where(magnitude > 0x7F800000, 0, code) | ((bits >> (31 - SIGN)) & (1 << SIGN))


@triton.jit
def _scale_byte(inner, OP: tl.constexpr):
    """ quant._scale_byte of scales that are not NaN, or perhaps (E8M0). """
    if OP.scale == "none":
        return tl.full(inner.shape, 1, tl.uint8)
    if OP.scale_grid is not None:
        return _code(inner, OP.scale_grid.emin, OP.scale_grid.mbits, 7).to(tl.uint8)
    return tl.where(inner == inner, inner.to(tl.int32, bitcast=True) >> 23, 0xFF).to(tl.uint8)


@triton.jit
def _turn(v, words, n: tl.constexpr):
    """
    v rotated by the signs in these words, n values at a time, up to a factor: -> values, factor. The factor
    is a sign and, where that is a power of two, 1 / sqrt(n): the scale takes it along without rounding.
    """
    factor = 1.0
    if n > STRIP:
        v = _across(_rotate(_flip(v, words, n), tl.full((), 0, tl.int32), 16), n)
        factor = n ** -0.5
    elif n > 0:
        v = _rotate(v, words[0], n)
        factor = _sign(words[0], 0) * (n ** -0.5)
    if n > 0 and _log2(n) % 2 == 1:
        v = _times(v, factor)
        factor = 1.0
    return v, factor


@triton.jit
def _magnitude(factor):
    """ |factor|, also where it is a plain number. """
    return tl.abs(tl.full([1, 1], 0.0, tl.float32) + factor)


@triton.jit
def _times(v, factor):
    out = ()
    for i in tl.static_range(len(v)):
        out = out + (v[i] * factor,)
    return out


@triton.jit
def _codes(v, inv, at, group, OP: tl.constexpr, STREAM: tl.constexpr, SIGNED: tl.constexpr):
    """ Strips v, times inv, on the grid. See _round. """
    EMIN: tl.constexpr = OP.value_grid.emin
    MBITS: tl.constexpr = OP.value_grid.mbits
    TOP: tl.constexpr = OP.value_grid.max
    # nothing exceeds the grid where the scale was rounded up
    CLIP: tl.constexpr = OP.rule != "up" and OP.rule != "ceil"
    codes = ()
    noise = v
    for eight in tl.static_range(0, STRIP, 8):
        if OP.rounding == "sr":
            seed, step, micro, layer = at
            noise = _noise(seed, group + eight // 8, step, micro, layer * 16 + STREAM, MBITS)
        for j in tl.static_range(8):
            y = v[eight + j] * inv
            c = _stochastic(y, noise[j], EMIN, MBITS) if OP.rounding == "sr" else _nearest(y, EMIN, MBITS)
            if CLIP:
                # NaN stays NaN, which has the code 0
                c = tl.maximum(c, -TOP, propagate_nan=tl.PropagateNan.ALL)
                c = tl.minimum(c, TOP, propagate_nan=tl.PropagateNan.ALL)
            if SIGNED:
                sign = y.to(tl.int32, bitcast=True) & -2147483648
                c = (tl.abs(c).to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
            codes = codes + (c,)
    return codes


@triton.jit
def _eden(v, inv, c, inner, at, group, OP: tl.constexpr, STREAM: tl.constexpr):
    """ quant._eden: the inner scales of blocks that were rounded to c, stochastically corrected. """
    squares, products = (), ()
    for i in tl.static_range(STRIP):
        y = v[i] * inv
        squares, products = squares + (y * y,), products + (y * c[i],)
    norm, projection = _sum(squares, OP), _sum(products, OP)
    inner = inner * tl.where(projection > 0, tl.div_rn(norm, projection), 1.0)
    seed, step, micro, layer = at
    MBITS: tl.constexpr = OP.scale_grid.mbits
    # each block takes the first number of its first group; a strip has two groups
    group -= (tl.arange(0, STRIPS) % _share(OP) * 2)[None, :]
    noise = _noise(seed, group, step, micro, layer * 16 + STREAM, MBITS)[0]
    return tl.minimum(_stochastic(inner, noise, OP.scale_grid.emin, MBITS), OP.scale_grid.max)


@triton.jit
def _round(v, at, group, tensor_amax, factor, OP: tl.constexpr, STREAM: tl.constexpr,
           SIGNED: tl.constexpr):
    """
    Round strips v, times factor -> signed grid values, in as many tensors [R, C]; scales and inner scales of
    each strip; and the outer scale.

    at     seed, step, micro-step and rank, layer: the address of the noise
    group  [R, C], number of the first group of eight values of each strip; see quant.uniform
    SIGNED keep the sign of what rounds to zero: codes have it, in products it makes no difference
    """
    TOP: tl.constexpr = OP.value_grid.max
    a = _amax(_maximum(v) * _magnitude(factor), OP)
    fate, outer, inv_outer = a, a, a
    if OP.outer != 0:
        fate, outer = _outer(a, tensor_amax, OP)
        inv_outer = _reciprocal(outer)
    inner, scale, inv = _inner(v, factor, a, fate, outer, inv_outer, OP, TOP)
    if OP.rule == "4/6":
        # rounded a third time below: cheaper than to keep both sets of values in registers
        inner_4, scale_4, inv_4 = _inner(v, factor, a, fate, outer, inv_outer, OP, 4.0)
        c = _codes(v, inv * factor, at, group, OP, STREAM, False)
        c_4 = _codes(v, inv_4 * factor, at, group, OP, STREAM, False)
        better = _error(v, c_4, factor, scale_4, a, OP) < _error(v, c, factor, scale, a, OP)
        inner, scale = tl.where(better, inner_4, inner), tl.where(better, scale_4, scale)
        inv = tl.where(better, inv_4, inv)
    inv = inv * factor
    c = _codes(v, inv, at, group, OP, STREAM, SIGNED)
    if OP.rounding == "eden":
        inner = _eden(v, inv, c, inner, at, group, OP, STREAM)
        scale = inner * outer
    if OP.rule == "3/4" and OP.rounding == "rtn":
        scale = inner * NORMAL_FOUR_THIRDS
    return c, scale, inner, outer


@triton.jit
def _write(out, v, codes, inner, outer, row, first, M, K, OP: tl.constexpr):
    """ Store the strips of one tile as values, or as codes and scales: the layout of quant.Quantized. """
    if out.inner is None:
        HALF: tl.constexpr = 2 if out.data.dtype.element_ty == tl.int32 else 1
        _store(out.data, v, row, first // HALF, M, K // HALF, out.stride // HALF)
    else:
        # rows are whole multiples of 16 values; those beyond K are zeros
        K = out.stride
        EMIN: tl.constexpr = OP.value_grid.emin
        MBITS: tl.constexpr = OP.value_grid.mbits
        if OP.bits == 4:
            pairs = ()
            for i in tl.static_range(STRIP // 2):
                low, high = _code(codes[2 * i], EMIN, MBITS, 3), _code(codes[2 * i + 1], EMIN, MBITS, 3)
                pairs = pairs + (low | high << 4,)
            _store(out.data, pairs, row, first // 2, M, K // 2, K // 2)
        else:
            bytes = ()
            for i in tl.static_range(STRIP):
                bytes = bytes + (_code(codes[i], EMIN, MBITS, 7),)
            _store(out.data, bytes, row, first, M, K, K)
        # the first row and strip of each block store its scale
        ROWS: tl.constexpr = OP.block[0]
        SHARE: tl.constexpr = OP.block[1] // STRIP
        once, strip = (row < M) & (row % ROWS == 0), tl.arange(0, STRIPS)
        blocks, block = (K + OP.block[1] - 1) // OP.block[1], (first // STRIP + strip) // SHARE
        tl.store(out.inner + (row // ROWS)[:, None] * blocks + block[None, :], _scale_byte(inner, OP),
                 once[:, None] & ((block < blocks) & (strip % SHARE == 0))[None, :])
        if OP.outer > 0:
            at = (row // ROWS)[:, None] * ((K + OP.outer - 1) // OP.outer) + first // OP.outer
            tl.store(out.outer + at, outer, once[:, None])


# -----------------------------------------------------------------------------
# one pass over a matrix


@triton.jit
def _trusted(v, factor, codes, scale, OP: tl.constexpr):
    """ quant.trust_mask of strips v, times factor, that were rounded to codes. """
    TOP: tl.constexpr = OP.value_grid.max
    out = ()
    for i in tl.static_range(STRIP):
        clipped = (tl.abs(codes[i]) >= TOP) & (tl.abs(v[i] * factor) >= TOP * scale)
        out = out + (clipped == 0,)
    return out


@triton.jit
def _side(v, out, at, words, line, first, lines, length, amax_ptr, PLACE: tl.constexpr, SIDE: tl.constexpr,
          MEASURE: tl.constexpr):
    """
    Rotate, round and store strips v of some lines, from position `first` of each line of `length` -> the
    rounded values. With MEASURE nothing is stored but the largest magnitude.
    """
    OP: tl.constexpr = SIDE.op
    n: tl.constexpr = SIDE.turn
    v, factor = _turn(v, words, n)
    if MEASURE:
        a = _maximum(v) * _magnitude(factor)
        tl.atomic_max(amax_ptr + PLACE, tl.max(a.to(tl.int32, bitcast=True)))
    else:
        if n > 0:
            length = (length + n - 1) // n * n
        codes, inner, outer = v, v[0], v[0]
        if OP is not None:
            amax = 0.0
            if OP.outer == TENSOR:
                amax = tl.load(amax_ptr + PLACE).to(tl.float32, bitcast=True)
            group = line[:, None] * ((length + 7) // 8) + (first // 8 + tl.arange(0, STRIPS) * 2)[None, :]
            codes, scale, inner, outer = _round(v, at, group.to(tl.uint32), amax, factor, OP, SIDE.noise,
                                                out.inner is not None)
            if out.trust is not None:
                _store(out.trust, _trusted(v, factor, codes, scale, OP), line, first, lines, length, length)
            v = _times(codes, scale)
        elif n > 0:
            v = _times(v, factor)
        _write(out, v, codes, inner, outer, line, first, lines, length, OP)
    return v


@triton.jit(do_not_specialize=["layer"])
def _pair_kernel(x_ptr, M, K, row_out, col_out, extra_out, keep_ptr, line_ptr, lines, amax_ptr, counter_ptr,
                 layer,
                 ROW: tl.constexpr, COL: tl.constexpr, EXTRA: tl.constexpr, ALIGN: tl.constexpr,
                 MEASURE: tl.constexpr, FORMATS: tl.constexpr):
    """ See round_pair. Program (i, j) has the tile from row 128 i and column 128 j on. """
    HALF: tl.constexpr = 2 if x_ptr.dtype.element_ty == tl.int32 else 1
    top, left = tl.program_id(0).to(tl.int64) * 128, tl.program_id(1).to(tl.int64) * 128
    seed, step = tl.load(counter_ptr), tl.load(counter_ptr + 1).to(tl.uint32)
    micro = ((tl.load(counter_ptr + 2) << 16) + tl.load(counter_ptr + 3)).to(tl.uint32)
    at = (seed, step, micro, layer.to(tl.uint32))

    # half of the rows at a time, so that few values are alive at once. A pass for the maxima of columns may
    # need the rounded rows too; storing them is left to the last pass
    halves, stored = (), M if MEASURE == "" else 0
    if ROW is not None:
        words = _sign_words(at, ROW.signs)      # once, not once for each half
    for i in tl.static_range(2):
        row = top + i * 64 + tl.arange(0, 64)
        x = _load(x_ptr, row, left // HALF, M, K // HALF, K // HALF, keep_ptr)
        rounded = x
        if ROW is not None and (MEASURE != "col" or ALIGN):
            rounded = _side(_floats(x), row_out, at, words, row, left, stored, K, amax_ptr, 0, ROW,
                            MEASURE == "row" or MEASURE == "both")
        halves = halves + (rounded if ALIGN else _unpaired(x),)

    if COL is not None and MEASURE != "row":
        # the transposed tile: its lines are the columns of x, or those that they were once
        line = left + tl.arange(0, 128)
        if line_ptr is not None:
            line = tl.load(line_ptr + line, line < K, lines)
        v = _transpose(_stack(halves[0], halves[1]))
        if EXTRA is not None and MEASURE == "":
            words = _sign_words(at, EXTRA.signs)
            _side(v, extra_out, at, words, line, top, lines, M, amax_ptr, 0, EXTRA, False)
        words = _sign_words(at, COL.signs)
        _side(v, col_out, at, words, line, top, lines, M, amax_ptr, 1, COL,
              MEASURE == "col" or MEASURE == "both")


def round_pair(x: Tensor, row: Side | None, col: Side | None, row_out: Out | None, col_out: Out | None,
               counter: Tensor, layer: int, align: bool = False, keep: Tensor | None = None,
               lines: Tensor | None = None, extra: Side | None = None, extra_out: Out | None = None):
    """
    One pass over x: rounded along its rows, and transposed and rounded along its columns.

    in    x         (M, K) contiguous, any float dtype
          row, col  what to do in each orientation, None for not wanted
          counter   int64 (4,), quant.Counter.state, read on the device; layer, see quant.random_words
          align     the columns start from the rounded rows instead of from x: where these are rotated, from
                    rows in rotated coordinates, of which there may be more than K
          keep      int16 (K,), -1, or 0 for a column that counts as zero, whatever it holds
          lines     int64 (K,), where column k of x is a row of col_out and has the noise of that row; else k
          extra     one more rounding of the transposed side, from before its rotation
    out   row_out   (M, K) and col_out, extra_out (K, M), see Out; K and M rounded up to whole rotations

    A scale for the whole tensor needs its largest magnitude first: one more pass, or two with align.

    source  the operands of TetraJet-v2, arXiv 2510.27527
    """
    M, K = x.shape
    if M == 0 or K == 0 or not (row or col):
        return
    packed = tuple(out is not None and out.inner is not None for out in (row_out, col_out, extra_out))
    looks, twice = _plan(row, col, extra, packed, align, lines is not None)
    amax = torch.zeros(2, dtype=torch.int32, device=x.device) if looks else None
    halves, keep_to = _pairs(x), keep
    if keep is not None and halves is not x:
        keep_to = keep.view(torch.int32)
    row_to, col_to, extra_to = _in_pairs(row_out), _in_pairs(col_out), _in_pairs(extra_out)
    rows = K
    if lines is not None:
        rows = col_out.data.shape[0]
    elif align and row and row.turn:
        rows = triton.cdiv(K, row.turn) * row.turn

    # 128 registers let two programs of 8 warps share a multiprocessor; codes and scales need more. 16 warps,
    # whose threads have half as many values each, where the two roundings of rule 4/6 need the room, and
    # where there is no second program for each multiprocessor
    grid = triton.cdiv(M, TILE), triton.cdiv(K, TILE)
    few = x.is_cuda and grid[0] * grid[1] <= _multiprocessors(x.device)
    warps, registers = 16 if twice or few else 8, None if any(packed) else 128

    def launch(measure: str):
        _pair_kernel[grid](
            halves, M, K, row_to, col_to, extra_to, keep_to, lines, rows, amax, counter, layer,
            ROW=row, COL=col, EXTRA=extra, ALIGN=align, MEASURE=measure, FORMATS=FORMATS, num_warps=warps,
            maxnreg=registers, enable_fp_fusion=False)

    for name in looks:
        launch(name)
    for place, (side, out) in enumerate(((row, row_out), (col, col_out))):
        if packed[place] and side.op.outer == quant.TENSOR:
            out.outer.copy_(quant.outer_scale(amax[place].view(torch.float32), side.op))
    launch("")


@cache
def _plan(row: Side | None, col: Side | None, extra: Side | None, packed: tuple[bool, ...], align: bool,
          lined: bool) -> tuple[tuple[str, ...], bool]:
    """
    What round_pair does, as far as settings tell -> its passes that look for largest magnitudes, and whether
    rule 4/6 rounds twice. ValueError if no kernel does it.
    """
    _check((row, col, extra), packed, apart=(extra, col) if lined else (extra,))
    # rounded rows are where aligned columns start from, so their maxima come first
    looks = tuple(name for name, side in (("row", row), ("col", col))
                  if side and side.op and side.op.outer == quant.TENSOR)
    twice = any(side and side.op and side.op.rule == "4/6" for side in (row, col))
    return ("both",) if len(looks) == 2 and not align else looks, twice


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _check(sides: tuple[Side | None, ...], packed: tuple[bool, ...], apart: tuple[Side | None, ...]):
    """ ValueError unless kernels round so, to codes where packed, and some rows without the others. """
    for side, codes in zip(sides, packed):
        if side and side.op and (problem := no_kernel(side.op)):
            raise ValueError(f"{problem}: use the reference back end")
        if codes and (problem := no_codes(side.op)):
            raise ValueError(f"{problem}: use the emulate back end")
    for side in apart:
        if side and side.op and (problem := no_lines(side.op)):
            raise ValueError(f"{problem}: use the reference back end")


def _pairs(x: Tensor) -> Tensor:
    """ A bf16 matrix as int32, two values each, where its rows are whole pieces of 16 bytes. """
    if x.dtype != torch.bfloat16 or x.dim() != 2:
        return x
    whole = x.shape[1] % 8 == 0 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x.view(torch.int32) if whole else x


def _in_pairs(out: Out | None) -> Out | None:
    return out and Out(_pairs(out.data), *out[1:])


def no_kernel(op) -> str:
    """ Why no kernel rounds like this Operand, or "". """
    if op.rounding not in ("rtn", "sr", "eden") or op.rule not in RULES:
        return f"no kernel for rounding {op.rounding} with scales by rule {op.rule}"
    if op.scale != "none" and op.block not in ((1, 16), (16, 16), (1, 32)) or op.block[0] not in (1, 16):
        return f"no kernel for blocks of {op.block[0]}x{op.block[1]}"
    if op.scale != "e8m0" and op.outer not in (TILE, quant.TENSOR):
        return f"no kernel for {op.scale} scales with outer scales over {op.outer}"
    if op.rule == "4/6" and op.stochastic:
        return "no kernel for rule 4/6 with stochastic rounding"
    if op.rule in ("eden", "quest") and op.block[0] > 1:
        return f"no kernel for rule {op.rule} in squares"
    if op.hadamard > TILE:
        return f"no kernel rotates {op.hadamard} values"
    return ""


def no_codes(op) -> str:
    """ Why its codes and scales are not written, or "". """
    without = op.rule == "3/4" or op.scale == "none" and op.block[1] not in (16, 32, 64, 128)
    return f"no codes under scales of {op.scale} by rule {op.rule}" if without else ""


def no_lines(op) -> str:
    """ Why outlier channels, some rows of many, cannot be rounded apart from the others, or "". """
    shared = "the whole tensor" if op.outer == TENSOR else "squares" if op.block[0] > 1 else ""
    return f"no kernel for outlier channels under a scale of {shared}" if shared else ""


# -----------------------------------------------------------------------------
# codes and scales -> values


@triton.jit
def _decode(code, FORM: tl.constexpr):
    """ quant.decode: codes without sign -> float32. """
    MBITS: tl.constexpr = FORM.mbits
    normal = ((code + ((FORM.emin + 126) << MBITS)) << (23 - MBITS)).to(tl.float32, bitcast=True)
    return tl.where(code < (1 << MBITS), code.to(tl.float32) * 2.0 ** (FORM.emin - MBITS), normal)


@triton.jit
def _grid_value(code, OP: tl.constexpr):
    """ quant.grid_value. """
    FORM: tl.constexpr = OP.value_grid
    magnitude = _decode(code & ((1 << (OP.bits - 1)) - 1), FORM)
    return tl.where(code >> (OP.bits - 1) != 0, -magnitude, magnitude)


@triton.jit
def _scale_of(inner_ptr, outer_ptr, row, k, blocks, outers, OP: tl.constexpr):
    """ Inner times outer scale of values at (row, k). """
    ROWS: tl.constexpr = OP.block[0]
    byte = tl.load(inner_ptr + row // ROWS * blocks + k // OP.block[1]).to(tl.int32)
    if OP.scale == "none":
        scale = byte.to(tl.float32)
    elif OP.scale_grid is None:
        # the byte of a power of two is its exponent. At the ends these bits are 0 and Inf where the scale is
        # 2^-127 and NaN: times the code, which is 0 there, the same
        scale = (byte << 23).to(tl.float32, bitcast=True)
    else:
        FORM: tl.constexpr = OP.scale_grid
        scale = _decode(byte, FORM)
    if OP.outer == TENSOR:
        scale = scale * tl.load(outer_ptr)
    elif OP.outer > 0:
        scale = scale * tl.load(outer_ptr + row // ROWS * outers + k // OP.outer)
    return scale


@triton.jit
def _unpack_kernel(code_ptr, inner_ptr, outer_ptr, out_ptr, M, K, stride, blocks, outers, OP: tl.constexpr,
                   FORMATS: tl.constexpr):
    PER_BYTE: tl.constexpr = 8 // OP.bits
    row = (tl.program_id(0).to(tl.int64) * 8 + tl.arange(0, 8))[:, None]
    k = (tl.program_id(1) * 256 + tl.arange(0, 256))[None, :]
    inside = (row < M) & (k < K)
    row, k = tl.where(row < M, row, 0), tl.where(k < K, k, 0)
    byte = tl.load(code_ptr + row * (stride // PER_BYTE) + k // PER_BYTE).to(tl.int32)
    if PER_BYTE == 2:
        byte = tl.where(k % 2 == 0, byte & 15, byte >> 4)
    value = byte
    if out_ptr.dtype.element_ty != tl.uint8:
        value = _grid_value(byte, OP) * _scale_of(inner_ptr, outer_ptr, row, k, blocks, outers, OP)
    tl.store(out_ptr + row * K + k, value.to(out_ptr.dtype.element_ty), inside)


def unpack(packed: Out, op, K: int, dtype: torch.dtype) -> Tensor:
    """
    Codes and scales -> values (rows, K) as round_pair would have stored them; -0 is 0 there. In the dtype
    uint8: the codes.
    """
    M = packed.data.shape[0]
    out = torch.empty(M, K, dtype=dtype, device=packed.data.device)
    if M and K:
        outers = packed.outer.shape[1] if packed.outer is not None and packed.outer.dim() else 0
        _unpack_kernel[(triton.cdiv(M, 8), triton.cdiv(K, 256))](
            packed.data, packed.inner, packed.outer, out, M, K, packed.stride, packed.inner.shape[1], outers,
            OP=op, FORMATS=FORMATS, enable_fp_fusion=False)
    return out


# -----------------------------------------------------------------------------
# gradients in the coordinates of a rotated forward pass


@triton.jit
def _turn_back_kernel(x_ptr, trust_ptr, out_ptr, M, K, length, counter_ptr, n: tl.constexpr,
                      STREAM: tl.constexpr, TURNED: tl.constexpr):
    top, left = tl.program_id(0).to(tl.int64) * 64, tl.program_id(1).to(tl.int64) * 128
    # the signs of the forward pass are those of the whole run: of the address they look at the seed alone
    at = (tl.load(counter_ptr), 0, 0, 0)
    row = top + tl.arange(0, 64)
    given = length if TURNED else K
    v = _floats(_load(x_ptr, row, left, M, given, given, None))
    words = _sign_words(at, STREAM)
    if not TURNED:
        v, factor = _turn(v, words, n)
        v = _times(v, factor)
    if trust_ptr is not None:
        trust = _floats(_load(trust_ptr, row, left, M, length, length, None))
        out = ()
        for i in tl.static_range(STRIP):
            out = out + (v[i] * trust[i],)
        v = out
    # the Hadamard matrix is its own inverse; the signs come last
    v, factor = _turn(v, _sign_words(at, NO_SIGNS), n)
    _store(out_ptr, _flip(_times(v, factor), words, n), row, left, M, K, K)


def turn_back(x: Tensor, trust: Tensor | None, side: Side, K: int, turned: bool, counter: Tensor) -> Tensor:
    """
    quant._turn_back: a gradient (M, K), or, if turned, (M, K up to whole rotations) in the coordinates of the
    forward pass, whose Side this is -> the gradient (M, K) in its own; zero where trust, in those
    coordinates, is false.
    """
    M, n = x.shape[0], side.turn
    out = x.new_empty(M, K)
    if M and K:
        length = triton.cdiv(K, n) * n
        _turn_back_kernel[(triton.cdiv(M, 64), triton.cdiv(length, TILE))](
            x, trust, out, M, K, length, counter, n=n, STREAM=side.signs, TURNED=turned, num_warps=4,
            enable_fp_fusion=False)
    return out


# -----------------------------------------------------------------------------
# OsciReset: one step of a window


@triton.jit(do_not_specialize=["tau"])
def _track_kernel(w_ptr, code_ptr, inner_ptr, outer_ptr, last_inner_ptr, last_outer_ptr, columns_ptr,
                  last_w_ptr, excess_ptr, flags_ptr, counts_ptr, N, n, K, blocks, outers, tau,
                  OP: tl.constexpr, FORMATS: tl.constexpr, BLOCK: tl.constexpr):
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = e // n < N
    # places beyond the end repeat the first: nothing of them is stored or counted
    row, k = tl.where(inside, e // n, 0), tl.where(inside, e % n, 0)
    if columns_ptr is not None:
        k = tl.load(columns_ptr + row * n + k).to(tl.int64)
    w, code = tl.load(w_ptr + row * K + k), tl.load(code_ptr + row * K + k).to(tl.int32)
    last_w, flags = tl.load(last_w_ptr + e, inside, 0.0), tl.load(flags_ptr + e, inside, 0).to(tl.int32)
    last = flags & 15

    # the two distances
    now = _grid_value(code, OP) * _scale_of(inner_ptr, outer_ptr, row, k, blocks, outers, OP)
    before = _grid_value(last, OP) * _scale_of(last_inner_ptr, last_outer_ptr, row, k, blocks, outers, OP)
    moved = w - last_w
    excess = tl.load(excess_ptr + e, inside, 0.0) + (tl.abs(now - before) - tau * tl.abs(moved))

    # the flips of the code; the history is 0 never, 1 once, 2 twice or more in one direction, 3 reversed
    level = tl.where(code >= 8, -(code & 7), code & 7) - tl.where(last >= 8, -(last & 7), last & 7)
    flipped, up, was_up, history = level != 0, (level > 0).to(tl.int32), (flags >> 4) & 1, (flags >> 5) & 3
    reversal = flipped & (history != 0) & (up != was_up)
    onward = tl.where(history == 0, 1, tl.maximum(history, 2))
    history = tl.where(flipped, tl.where(reversal, 3, onward), history)
    ever = (flags >> 7) | (moved != 0).to(tl.int32)
    flags = code | tl.where(flipped, up, was_up) << 4 | history << 5 | ever << 7

    tl.store(last_w_ptr + e, w, inside)
    tl.store(excess_ptr + e, excess, inside)
    tl.store(flags_ptr + e, flags.to(tl.uint8), inside)
    tl.atomic_add(counts_ptr, tl.sum((flipped & inside).to(tl.int64)))
    tl.atomic_add(counts_ptr + 1, tl.sum(reversal.to(tl.int64)))    # places beyond the end have no history


def track(w: Tensor, code: Tensor, inner: Tensor, outer: Tensor | None, last_inner: Tensor,
          last_outer: Tensor | None, columns: Tensor | None, last_w: Tensor, excess: Tensor, flags: Tensor,
          counts: Tensor, tau: float, op):
    """
    One step of osci.Window.advance for all tracked weights, in one pass and in place, bit for bit.

    in    w (N, K) float32 and its codes (N, K), inner and outer scales now; the scales at the last step
          columns  (N, n) of the tracked weights, None for all
    out   last_w, excess, flags (N, n) and counts (flips, reversals), which it adds to
    """
    n, BLOCK = last_w.shape[1], 1024
    outers = outer.shape[1] if outer is not None and outer.dim() else 0
    _track_kernel[(triton.cdiv(last_w.numel(), BLOCK),)](
        w, code, inner, outer, last_inner, last_outer, columns, last_w, excess, flags, counts, w.shape[0], n,
        w.shape[1], inner.shape[1], outers, tau, OP=op, FORMATS=FORMATS, BLOCK=BLOCK,
        enable_fp_fusion=False)

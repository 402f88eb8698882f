"""
What the recipes of other papers need beyond rounding.py, put into its open tables, bit for bit that of
rivals/rules.py.

    KERNELS  17/16, 4/6, if4, eden, max; floor, quest, 3/4
    TURNS    rotations of 2, 4, 8, 32, 64 and 128 values
    DRAWS    fixed signs, and none
    PASSES   there and back: X and W rotated around the linear, with the mask of what is not clipped

A rule here gets what rounding.py's own get: strips v, which times factor are the values, and so on.
"""
import torch
import triton
import triton.language as tl
from torch import Tensor

from quant import GRIDS, Operand
from rivals.rules import EDEN_ROOM, EVEN, FIXED_SIGNS, NORMAL_GAIN, PASSES, QUEST_TOP
from rounding import (DRAWS, INF_BITS, KERNELS, TINY, TURNS, Kernel, Side, binade, clip, fresh, in_pairs,
                      inner_scale, inverse, load, log2, maximum_of_blocks, nan_unless_finite, nearest,
                      noise_of, outer_scale, over, plan, rotate, round_in, stochastic, store, times, to_float,
                      to_nearest, with_sign)

TOP_OF_QUEST, FIXED = tl.constexpr(QUEST_TOP), tl.constexpr(FIXED_SIGNS)
# 4/3 in float32, and what rule 3/4 multiplies its powers of two by when it rounds to nearest
FOUR_THIRDS = tl.constexpr(torch.tensor(4 / 3).item())
LONGER = tl.constexpr((torch.tensor(4 / 3) * NORMAL_GAIN).item())
# the evenly spaced numbers of rule if4: those of E1M2 times STEPS
E1M2, STEPS = tl.constexpr(GRIDS["e1m2"]), tl.constexpr(torch.tensor(EVEN).item())

# -----------------------------------------------------------------------------
# rules for scales with a mantissa


@triton.jit
def four_over_six(v, amax, factor, largest, place, SIDE: tl.constexpr):
    """ 4/6: the block's maximum at 6 or at 4, whichever has the smaller squared error. """
    outer = outer_scale(largest, SIDE)
    six = inner_scale(amax, largest, outer, 6.0, False, SIDE)
    four = inner_scale(amax, largest, outer, 4.0, False, SIDE)
    c_four = round_in(v, four * outer, factor, place, True, SIDE)
    c_six = round_in(v, six * outer, factor, place, True, SIDE)
    better = (_error(v, c_four, four * outer, amax, factor, SIDE)
              < _error(v, c_six, six * outer, amax, factor, SIDE))
    inner = tl.where(better, four, six)
    # rounded a third time: cheaper than to keep both sets of values in registers
    return round_in(v, inner * outer, factor, place, True, SIDE), inner, outer


@triton.jit
def if4(v, amax, factor, largest, place, SIDE: tl.constexpr):
    """ if4: the block in E2M1 or in evenly spaced numbers, whichever has the smaller squared error. """
    TOP: tl.constexpr = 6.0 * 16 / 17 if SIDE.stochastic else 6.0
    outer = tl.where(largest < TINY, 1.0, over(over(largest, SIDE.reach), TOP))
    inner = inner_scale(amax, largest, outer, TOP, False, SIDE)
    scale = inner * outer
    c, even = round_in(v, scale, factor, place, True, SIDE), _evenly(v, scale, factor, place, SIDE)
    better = _error(v, even, scale, amax, factor, SIDE) < _error(v, c, scale, amax, factor, SIDE)
    out = ()
    for i in tl.static_range(16):
        out = out + (tl.where(better, even[i], c[i]),)
    return out, inner, outer


@triton.jit
def _evenly(v, scale, factor, place, SIDE: tl.constexpr):
    """ Strips v, times factor, at their scales -> evenly spaced numbers, by the other noise. """
    GRID: tl.constexpr = E1M2.value
    at, group = place
    inv = inverse(scale * STEPS) * factor
    c, noise = (), v
    for eight in tl.static_range(0, 16, 8):
        if SIDE.stochastic:
            noise = noise_of(at, (group + eight // 8).to(tl.uint32), SIDE.noise, GRID)
        for i in tl.static_range(8):
            y = v[eight + i] * inv
            if SIDE.stochastic:
                bits = noise[i].to(tl.int32, bitcast=True)              # 16 of them are the noise
                bits = (bits & -65536) | (bits * 181 & 65535)
                near = stochastic(y, bits.to(tl.float32, bitcast=True), GRID)
            else:
                near = to_nearest(y, GRID)
            c = c + (clip(near, GRID.max) * STEPS,)
    return c


@triton.jit
def _error(v, c, scale, amax, factor, SIDE: tl.constexpr):
    """ The squared error of blocks as numbers c at this scale, in units of a power of two. """
    _, inv_unit = _unit(amax)
    squares = ()
    for i in tl.static_range(16):
        e = v[i] * (inv_unit * factor) - c[i] * (scale * inv_unit)
        squares = squares + (e * e,)
    return _sum(squares, SIDE)


@triton.jit
def eden(v, amax, factor, largest, place, SIDE: tl.constexpr):
    """ eden: values to nearest, and each scale corrected by the projection and rounded stochastically. """
    GRID: tl.constexpr = SIDE.grid
    SCALES: tl.constexpr = SIDE.scales
    at, group = place
    outer = outer_scale(largest, SIDE)
    inner = inner_scale(amax, largest, outer, SIDE.top, False, SIDE)
    inv = inverse(inner * outer) * factor
    c, squares, products = (), (), ()
    for i in tl.static_range(16):
        y = v[i] * inv
        near = clip(to_nearest(y, GRID), GRID.max)
        if SIDE.codes:
            near = with_sign(near, y)
        c, squares, products = c + (near,), squares + (y * y,), products + (y * near,)
    norm, projection = _sum(squares, SIDE), _sum(products, SIDE)
    inner = inner * tl.where(projection > 0, tl.div_rn(norm, projection), 1.0)
    # a block takes the first noise of its first group; a strip has two groups
    group -= (tl.arange(0, 8) % (SIDE.columns // 16) * 2)[None, :]
    noise = noise_of(at, group.to(tl.uint32), SIDE.noise, SCALES)[0]
    return c, tl.minimum(stochastic(inner, noise, SCALES), SCALES.max), outer


@triton.jit
def one_in_all(v, amax, factor, largest, place, SIDE: tl.constexpr):
    """ max: no inner scale. """
    outer = outer_scale(largest, SIDE)
    return round_in(v, outer, factor, place, True, SIDE), 1.0, outer


# -----------------------------------------------------------------------------
# rules for scales that are powers of two


@triton.jit
def floor(v, amax, factor, largest, place, SIDE: tl.constexpr):
    """ floor: 2^(floor(log2 max) - floor(log2 grid max)), which may clip. """
    inner = _floor(amax, SIDE)
    return round_in(v, inner, factor, place, True, SIDE), inner, 1.0


@triton.jit
def three_quarters(v, amax, factor, largest, place, SIDE: tl.constexpr):
    """ 3/4: floor / (3/4), which clips nothing. To nearest, values are then longer by NORMAL_GAIN. """
    inner = _floor(amax, SIDE)
    c = round_in(v, inner * FOUR_THIRDS, factor, place, True, SIDE)
    return c, inner, FOUR_THIRDS if SIDE.stochastic else LONGER


@triton.jit
def _floor(amax, SIDE: tl.constexpr):
    """ 2^(floor(log2 amax) - floor(log2 grid max)), 0 for zeros. """
    inner = binade(tl.where(amax < TINY, 0.0, amax), 0.0) * 2.0 ** -log2(SIDE.grid.max)
    return nan_unless_finite(amax, inner)


@triton.jit
def quest(v, amax, factor, largest, place, SIDE: tl.constexpr):
    """ quest: 2^floor(log2(QUEST_TOP / grid max * root mean square)), which clips. """
    unit, inv_unit = _unit(amax)
    squares = ()
    for i in tl.static_range(16):
        near_1 = v[i] * (inv_unit * factor)
        squares = squares + (near_1 * near_1,)
    rms = tl.sqrt_rn(_sum(squares, SIDE) * (1.0 / (SIDE.rows * SIDE.columns)))
    inner = binade(rms * (TOP_OF_QUEST / SIDE.grid.max), 0.0) * unit
    inner = nan_unless_finite(amax, tl.where(amax < TINY, 0.0, inner))
    return round_in(v, inner, factor, place, True, SIDE), inner, 1.0


@triton.jit
def _unit(amax):
    """ A power of two not far below the maxima, and its inverse: in such units no square leaves float32. """
    bits = tl.minimum(tl.maximum(amax, TINY).to(tl.int32, bitcast=True) & INF_BITS, 253 << 23)
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def _sum(x, SIDE: tl.constexpr):
    """ tree_sum, in each strip that of its block: neighbours first, strips before rows. """
    for _ in tl.static_range(4):
        pairs = ()
        for i in tl.static_range(len(x) // 2):
            pairs = pairs + (x[2 * i] + x[2 * i + 1],)
        x = pairs
    s = x[0]
    R: tl.constexpr = s.shape[0]
    for level in tl.static_range(log2(SIDE.columns // 16)):
        strips = tl.reshape(s, [R, 8 >> (level + 1), 2, 1 << level])
        s = tl.reshape(tl.broadcast_to(tl.sum(strips, axis=2, keep_dims=True), strips.shape), [R, 8])
    for level in tl.static_range(log2(SIDE.rows)):
        rows = tl.reshape(s, [R >> (level + 1), 2, 1 << level, 8])
        s = tl.reshape(tl.broadcast_to(tl.sum(rows, axis=1, keep_dims=True), rows.shape), [R, 8])
    return s


KERNELS["17/16"] = Kernel(nearest, top=16 / 17)
KERNELS["4/6"] = Kernel(four_over_six, reach=256.0, rounds=("rtn",), warps=16)
KERNELS["if4"] = Kernel(if4, codes=False, warps=16)
KERNELS["eden"] = Kernel(eden, top=EDEN_ROOM, reach=256.0, squares=False)
KERNELS["max"] = Kernel(one_in_all, reach=1.0, inner=False, codes=False)
KERNELS["floor"] = Kernel(floor)
KERNELS["3/4"] = Kernel(three_quarters, codes=False)
KERNELS["quest"] = Kernel(quest)

# -----------------------------------------------------------------------------
# rotations of other sizes, and signs


@triton.jit
def turn(v, words, N: tl.constexpr):
    """ Every N neighbours, perhaps of several strips: times their signs, and the Hadamard matrix. """
    # the first sign of each strip is bit `place % 32` of one of the words
    place = (tl.arange(0, 8) * 16 % N)[None, :]
    word = tl.full([1, 8], 0, tl.int32) + words[0]
    for i in tl.static_range(1, 4):
        word = tl.where(place // 32 == i, words[i], word)
    word, out = word >> (place % 32), ()
    for i in tl.static_range(16):
        flip = (word << (31 - i % N)) & -2147483648
        out = out + ((v[i].to(tl.int32, bitcast=True) ^ flip).to(tl.float32, bitcast=True),)
    return hadamard(out, N)


@triton.jit
def hadamard(v, N: tl.constexpr):
    """ quant.hadamard without signs -> values, and its factor, where that is a power of two. """
    if N < 16:
        out = ()
        for first in tl.static_range(0, 16, N):
            x = ()
            for i in tl.static_range(N):
                x = x + (v[first + i],)
            for _ in tl.static_range(log2(N)):
                low, high = (), ()
                for j in tl.static_range(N // 2):
                    low, high = low + (x[2 * j] + x[2 * j + 1],), high + (x[2 * j] - x[2 * j + 1],)
                x = low + high
            out = out + x
        v = out
    else:
        v, _ = rotate(v, (tl.full((), 0, tl.int32),), 16)
        for level in tl.static_range(log2(N // 16)):
            v = _across(v, level)
    factor = N**-0.5
    if log2(N) % 2 == 1:
        v = times(v, factor)
        factor = 1.0
    return v, factor


@triton.jit
def _across(v, level: tl.constexpr):
    """ A step of the Hadamard matrix between strips: each adds or subtracts what its partner has. """
    strip, out = tl.arange(0, 8)[None, :], ()
    partner = tl.broadcast_to(strip ^ (1 << level), v[0].shape)
    sign = (1 - 2 * (strip >> level & 1)).to(tl.float32)
    for i in tl.static_range(16):
        out = out + (tl.fma(v[i], sign, tl.gather(v[i], partner, 1)),)
    return out


@triton.jit
def fixed(at, STREAM: tl.constexpr):
    """ Signs of the whole run: of the address they look at the seed alone. """
    zero = tl.zeros([1], tl.uint32)
    return fresh((at[0], zero, zero, zero), FIXED)


@triton.jit
def none(at, STREAM: tl.constexpr):
    """ No bit is set, and no sign a minus. """
    zero = tl.full((), 0, tl.int32)
    return zero, zero, zero, zero


for size in (2, 4, 8, 32, 64, 128):
    TURNS[size] = turn
DRAWS |= {"fixed": fixed, "none": none}

# -----------------------------------------------------------------------------
# around the linear: Quartet's forward pass, and its way back. Each is one op that torch.compile does not look
# into


@triton.jit
def _there_kernel(x_ptr, signs_ptr, out_ptr, mask_ptr, M, K, length, N: tl.constexpr, SIDE: tl.constexpr):
    """ Rotates the tile of 64 x 128 values from row 64 i and column 128 j on; SIDE says what clips it. """
    line, left = tl.program_id(0) * 64 + tl.arange(0, 64), tl.program_id(1) * 128
    v, factor = hadamard(_each(to_float(load(x_ptr, line, left, M, K, None)), _signs(signs_ptr, N)), N)
    v = times(v, factor)
    store(out_ptr, v, line, left, M, length, length)
    if SIDE is not None:
        top, kept, mask = SIDE.grid.max, (), ()
        for i in tl.static_range(16):
            kept = kept + (v[i].to(x_ptr.dtype.element_ty).to(tl.float32),)
        amax = maximum_of_blocks(kept, 1.0, SIDE)
        RULE: tl.constexpr = SIDE.rule
        c, inner, outer = RULE(kept, amax, 1.0, amax, (0, 0), SIDE)
        for i in tl.static_range(16):
            clipped = (tl.abs(c[i]) >= top) & (tl.abs(kept[i]) >= top * (inner * outer))
            mask = mask + (clipped == 0,)
        store(mask_ptr, mask, line, left, M, length, length)


@triton.jit
def _back_kernel(grad_ptr, mask_ptr, signs_ptr, out_ptr, M, K, length, N: tl.constexpr):
    """ The same tile of a gradient (M, length), trusted and turned back, to (M, K). """
    line, left = tl.program_id(0) * 64 + tl.arange(0, 64), tl.program_id(1) * 128
    v = to_float(load(grad_ptr, line, left, M, length, None))
    if mask_ptr is not None:
        v = _each(v, to_float(load(mask_ptr, line, left, M, length, None)))
    v, factor = hadamard(v, N)
    store(out_ptr, _each(times(v, factor), _signs(signs_ptr, N)), line, left, M, K, K)


@triton.jit
def _signs(ptr, N: tl.constexpr):
    """ The signs of 8 strips, 16 tensors [1, 8]. """
    signs = ()
    for i in tl.static_range(16):
        signs = signs + (tl.load(ptr + (tl.arange(0, 8) * 16 + i) % N)[None, :],)
    return signs


@triton.jit
def _each(v, factors):
    out = ()
    for i in tl.static_range(16):
        out = out + (v[i] * factors[i],)
    return out


def there(x: Tensor, signs: Tensor, op: Operand | None) -> tuple[Tensor, Tensor]:
    """ rules.turn_there, in one pass. """
    return _there(x, signs, *((op.grid, *op.block, op.rule) if op else ("", 0, 0, "")))


@torch.library.custom_op("rivals::there", mutates_args=())
def _there(x: Tensor, signs: Tensor, grid: str, rows: int, columns: int, rule: str) -> tuple[Tensor, Tensor]:
    x, (M, K) = x.contiguous(), x.shape
    out, mask = _places(x, signs, rule)
    if M and K:
        side = plan(Side(Operand(grid, (rows, columns), "e8m0", 0, rule)), False) if rule else None
        _there_kernel[(triton.cdiv(M, 64), triton.cdiv(out.shape[1], 128))](
            x, signs, in_pairs(out), mask.view(torch.uint8), M, K, out.shape[1], N=len(signs), SIDE=side,
            num_warps=4, enable_fp_fusion=False)
    return out, mask


@_there.register_fake
def _(x, signs, grid, rows, columns, rule):
    return _places(x, signs, rule)


def _places(x: Tensor, signs: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    out = x.new_empty(x.shape[0], x.shape[1] + -x.shape[1] % len(signs))
    return out, out.new_empty(out.shape if rule else 0, dtype=torch.bool)


@torch.library.custom_op("rivals::back", mutates_args=())
def back(grad: Tensor, mask: Tensor, signs: Tensor, K: int) -> Tensor:
    """ rules.turn_back, in one pass. """
    grad, (M, length), out = grad.contiguous(), grad.shape, grad.new_empty(grad.shape[0], K)
    if M and K:
        _back_kernel[(triton.cdiv(M, 64), triton.cdiv(length, 128))](
            grad, mask.view(torch.uint8) if mask.numel() else None, signs, in_pairs(out), M, K, length,
            N=len(signs), num_warps=4, enable_fp_fusion=False)
    return out


@back.register_fake
def _(grad, mask, signs, K):
    return grad.new_empty(grad.shape[0], K)


PASSES |= {"there": there, "back": back}

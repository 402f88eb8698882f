"""
What the recipes of other papers need beyond quant.py, put into its open tables.

    GRIDS   e1m2, if4, e5m2, ue5m3
    SIGNS   fixed, none
    RULES   17/16, 4/6, if4, eden for E4M3 scales; floor, quest, 3/4 for powers of two; max: one in all
    AROUND  rotate 32 none, and other sizes; trust: Quartet's forward pass; averis

A rule gets blocks (R, B, n), one row of n values for each block, and returns grid numbers (R, B, n),
inner scales and outer scales (R, B, 1). What a squared error or a root mean square is taken of is
first divided by a power of two, so that no square leaves float32.
"""
import math
from dataclasses import replace
from functools import partial
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from codes import E2M1, decode, encode
from noise import random_signs
from quant import (AROUND, GRIDS, RULES, SIGNS, TINY, Around, Grid, Operand, QuantLinear, Rule, binade,
                   from_blocks, hadamard, over, round_blocks, round_in, round_to_grid, to_blocks)

# -----------------------------------------------------------------------------
# grids and signs

GRIDS["e1m2"] = Grid(emin=0, mbits=2, max=1.75)         # uniform, as INT4 is: 0 .25 .5 ... 1.75
GRIDS["if4"] = E2M1                                     # or as many evenly spaced numbers: rule if4
GRIDS["e5m2"] = Grid(emin=-14, mbits=2, max=57344.0)    # FP8 with more range
GRIDS["ue5m3"] = Grid(emin=-14, mbits=3, max=61440.0)   # a scale; its top exponent is not used

FIXED_SIGNS = 12            # stream of the sign vector that a whole run shares


def fixed_signs(n: int, counter: Tensor, layer: int, stream: int) -> Tensor:
    """ One vector for all layers and steps: a function of the run's seed alone. """
    start = counter.clone()
    start[1:].zero_()
    return random_signs(n, start, 0, FIXED_SIGNS)


def no_signs(n: int, counter: Tensor, layer: int, stream: int) -> Tensor:
    """ A plain Hadamard matrix. """
    return torch.ones(n, device=counter.device)


SIGNS["fixed"] = fixed_signs
SIGNS["none"] = no_signs

# -----------------------------------------------------------------------------
# rules for scales with a mantissa

EDEN_ROOM = 16 / 17 / 0.93


def head_room(blocks: Tensor, op: Operand, noise: Tensor | None):
    """ 17/16: to nearest, with so much room that no normal scale clips. Quartet II, 2601.22813 """
    return round_blocks(blocks, op, noise, top=GRIDS[op.grid].max * (16 / 17))


def tree_sum(blocks: Tensor) -> Tensor:
    """
    The sum of each block (R, B, n) -> (R, B, 1): neighbours first, then neighbouring pairs, and so
    on, as if padded with zeros to a power of two. One order of sums: the same bits on every device.
    """
    n = blocks.shape[2]
    x = F.pad(blocks, (0, (1 << (n - 1).bit_length()) - n))
    while x.shape[2] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x


def four_over_six(blocks: Tensor, op: Operand, noise: Tensor | None):
    """
    4/6: each block with its maximum at 6 or at 4, whichever has the smaller squared error.

    source  Four Over Six, arXiv 2512.02010: between 4 and 6 E2M1 has nothing, so a maximum at 4 can
            be better. The scale's own maximum counts as 256, to leave room for a larger one
    differs that code multiplies the unrounded scale by 1.5, here the maximum is divided by 4
    edges   at equal errors, 6. With noise, 17/16 head-room; the choice looks at the noise: biased
    """
    room = 1.0 if noise is None else 16 / 17
    c, inner, outer = round_blocks(blocks, op, noise, top=6.0 * room, reach=256.0)
    c_4, inner_4, _ = round_blocks(blocks, op, second_noise(noise), top=4.0 * room, outer=outer)
    return better(blocks, outer, (c, inner), (c_4, inner_4))


def second_noise(noise: Tensor | None) -> Tensor | None:
    """
    Noise for a second rounding, made of the same 16 bits: times an odd number is a permutation of them, here
    with a correlation of 1/181, and exact in float32.
    """
    return None if noise is None else (noise * 181.0).frac()


def better(blocks: Tensor, outer: Tensor, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]):
    """ Of two roundings c, s of each block the one with the smaller squared error; of equals, the first. """
    unit = binade(blocks.abs().amax(-1, keepdim=True)).clamp(min=TINY)
    error, error_2 = (tree_sum((blocks / unit - c * (s * outer / unit)).square()) for c, s in (first, second))
    return *(torch.where(error_2 < error, b, a) for a, b in zip(first, second)), outer


EVEN = 24 / 7               # e1m2 times this is evenly spaced up to 6: k times 6/7, k = 0 .. 7


def int_or_float(blocks: Tensor, op: Operand, noise: Tensor | None):
    """
    if4: each block in E2M1 or in evenly spaced numbers up to 6, whichever has the smaller squared error. Both
    have the same scale; where it is negative, it says that its block is evenly spaced.

    source  IF4, arXiv 2603.28765, github.com/mit-han-lab/fouroversix
    differs evenly spaced numbers are stored as sign and k, there as the two's complement
    edges   at equal errors, E2M1. With noise, 17/16 head-room, and as there the choice looks at what the
            noise has made of the block, each rounding with noise of its own: biased
    """
    c, inner, outer = round_blocks(blocks, op, noise, top=6.0 * (1.0 if noise is None else 16 / 17))
    even = round_in(blocks, inner * outer * EVEN, replace(op, grid="e1m2"), second_noise(noise)) * EVEN
    return better(blocks, outer, (c, inner), (-even, -inner))


def to_e2m1(c: Tensor, scale: Tensor) -> Tensor:
    """ k of evenly spaced numbers -> the number of E2M1 whose code is k. """
    return torch.where(scale < 0, decode((c.abs() * (7 / 6)).round(), E2M1), c)


def from_e2m1(number: Tensor, scale: Tensor) -> Tensor:
    """ The inverse. """
    even = torch.copysign(encode(number.abs(), E2M1) * 0.25 * EVEN, -number)
    return torch.where(scale < 0, even, number)


def eden(blocks: Tensor, op: Operand, noise: Tensor):
    """
    Values to nearest, then each block's scale is corrected so that the block has the right
    projection on itself, and rounded stochastically with the block's first noise.

    source  MS-EDEN of Quartet II, arXiv 2601.22813: f = <x, x> / <x, v> with v the rounded block,
            and s' = e4m3(f s). Over uniformly random rotations E[v'] = x
    differs f is that of each 16 values, as in the paper; its code takes a whole rotation's
    edges   a block that was rounded to zeros keeps its scale
    """
    _, inner, outer = round_blocks(blocks, op, noise, top=6.0 * EDEN_ROOM, reach=256.0)
    scale = inner * outer
    c = round_in(blocks, scale, op, None)
    y = blocks * torch.where(scale > 2.0**-126, 1.0 / scale, 0.0)
    norm, projection = tree_sum(y.square()), tree_sum(y * c)
    factor = torch.where(projection > 0, norm / projection, 1.0)
    return c, round_to_grid(inner * factor, GRIDS[op.scale], noise[..., :1]), outer


def one_in_all(blocks: Tensor, op: Operand, noise: Tensor | None):
    """ max: no inner scale, the outer one is max / grid max. FP8 as TransformerEngine has it. """
    outer = round_blocks(blocks, op, noise, reach=1.0)[2]
    return round_in(blocks, outer, op, noise), torch.ones_like(outer), outer


RULES["17/16"] = Rule(head_room, scales="mantissa")
RULES["4/6"] = Rule(four_over_six, scales="mantissa", grids=("e2m1",))
RULES["if4"] = Rule(int_or_float, scales="mantissa", grids=("if4",), stored=(to_e2m1, from_e2m1))
RULES["eden"] = Rule(eden, scales="mantissa", grids=("e2m1",), rounds=("sr",))
RULES["max"] = Rule(one_in_all, scales="mantissa")

# -----------------------------------------------------------------------------
# rules for scales that are powers of two; "up" of quant.py is TetraJet v1's

QUEST_TOP = 2.92247856      # the root mean squares that the largest grid number stands for
NORMAL_GAIN = 1.009276      # makes up for what rounding shortens


def block_max(blocks: Tensor) -> Tensor:
    """ The largest magnitude of each block, (R, B, 1); what is tiny counts as zero. """
    amax = blocks.abs().amax(-1, keepdim=True)
    return torch.where(amax < TINY, 0.0, amax)


def power_of_two(scale: Tensor) -> Tensor:
    """ The next one below; NaN for an Inf. """
    return torch.where(scale.isfinite(), binade(scale), math.nan)


def floor(blocks: Tensor, op: Operand, noise: Tensor | None, outer: float = 1.0):
    """ 2^(floor(log2 max) - floor(log2 grid max)), which may clip. OCP MX specification """
    amax = block_max(blocks)
    inner = power_of_two(amax) * 2.0 ** -math.floor(math.log2(GRIDS[op.grid].max))
    outer = torch.full_like(amax, outer)
    return round_in(blocks, inner * outer, op, noise), inner, outer


def three_quarters(blocks: Tensor, op: Operand, noise: Tensor | None):
    """
    3/4: floor / (3/4), which clips nothing. To nearest, values are then NORMAL_GAIN times as large,
    which makes up for what rounding shortens, in the mean. Quartet, v4, 2505.14669
    """
    c, inner, outer = floor(blocks, op, noise, outer=4 / 3)
    return c, inner, outer if noise is not None else outer * NORMAL_GAIN


def quest(blocks: Tensor, op: Operand, noise: Tensor | None):
    """ 2^floor(log2(QUEST_TOP / grid max * root mean square)), which clips. Quartet, 2505.14669 """
    unit = binade(block_max(blocks))
    rms = over(tree_sum((blocks / unit.clamp(min=TINY)).square()), blocks.shape[2]).sqrt()
    inner = power_of_two(rms * (QUEST_TOP / GRIDS[op.grid].max)) * unit
    return round_in(blocks, inner, op, noise), inner, torch.ones_like(inner)


RULES["floor"] = Rule(floor, scales="powers")
RULES["3/4"] = Rule(three_quarters, scales="powers", outer=True)
RULES["quest"] = Rule(quest, scales="powers")

# -----------------------------------------------------------------------------
# around the linear: Quartet's forward pass, 2505.14669


def rotate(x: Tensor, w: Tensor, linear, layer: QuantLinear, size: int, signs: str) -> Tensor:
    """
    X and W rotated along K, so that Q4 and Q6 may start from what was rounded in between. Where "trust"
    follows, it is seen to here, so that on a GPU the two are one pass.
    """
    r, turn = layer.recipe, SIGNS[signs](size, layer.counter.state.to(x.device), layer.layer, 0)
    ops = (r.y_x, r.y_w) if "trust" in r.around else (None, None)
    return linear(turned(x, turn, ops[0]), turned(w, turn, ops[1]))


def trust(x: Tensor, w: Tensor, linear, layer: QuantLinear) -> Tensor:
    """ What the forward pass clips of X or W gets no gradient: a straight-through clip. """
    r = layer.recipe
    if any(name.startswith("rotate") for name in r.around):
        return linear(x, w)
    none = torch.ones(1, device=x.device)       # the rotation of single values
    return linear(turned(x, none, r.y_x), turned(w, none, r.y_w))


def turned(x: Tensor, signs: Tensor, op: Operand | None) -> Tensor:
    """ x rotated by signs, with the gradient of Turned. """
    known = op is None or op.rule == "quest" and op.block in ((1, 16), (1, 32), (16, 16))
    there = PASSES["there"] if x.is_cuda and PASSES and len(signs) <= 128 and known else turn_there
    y, mask = there(x.detach(), signs, op if torch.is_grad_enabled() else None)
    return Turned.apply(x, y, mask, signs)


class Turned(torch.autograd.Function):
    """ y, which is x (M, K) rotated. The gradient is zero where mask is false, and turned back. """

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor, mask: Tensor, signs: Tensor) -> Tensor:
        ctx.save_for_backward(mask, signs)
        ctx.K = x.shape[1]
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad: Tensor):
        fast = grad.is_cuda and PASSES and len(ctx.saved_tensors[1]) <= 128
        return (PASSES["back"] if fast else turn_back)(grad, *ctx.saved_tensors, ctx.K), None, None, None


# turn_there and turn_back in one pass each, with the same bits: rivals/kernels.py puts them here
PASSES: dict[str, Callable] = {}


def turn_there(x: Tensor, signs: Tensor, op: Operand | None) -> tuple[Tensor, Tensor]:
    """ -> x rotated, in its own dtype, and what to trust of it; no mask where op is None. """
    y = hadamard(x, signs).to(x.dtype)
    return y, trust_mask(y, op) if op else torch.empty(0, dtype=torch.bool, device=x.device)


def turn_back(grad: Tensor, mask: Tensor, signs: Tensor, K: int) -> Tensor:
    """ The Hadamard matrix is its own inverse; the signs come last. """
    y = hadamard(grad * mask if mask.numel() else grad, torch.ones_like(signs))
    return (y.unflatten(-1, (-1, len(signs))) * signs).flatten(-2)[:, :K].to(grad.dtype)


def trust_mask(x: Tensor, op: Operand) -> Tensor:
    """
    Where op clips nothing of x: bool, shape of x. The mask |x / s| < 6 of Quartet's quantizer.
    differs a value that a scale of zero rounds to zero was not clipped, and is trusted
    """
    blocks, top = to_blocks(x.detach().float(), op), GRIDS[op.grid].max
    c, inner, outer = RULES[op.rule].f(blocks, op, None)
    beyond = blocks.abs() >= top * (inner * outer)
    return from_blocks((c.abs() < top) | ~beyond, x.shape, op)


def averis(x: Tensor, w: Tensor, linear, layer: QuantLinear) -> Tensor:
    """
    The mean of all tokens is taken off X, and off dY, and has products of its own.

    source  Averis, arXiv 2603.10444 v2. Its flaw: the mean is that of a micro-batch, so a token sees other
            sequences and later tokens, in training and in evaluation. A causal mean would be another one for
            each token, whose product costs as much as the linear itself
    differs of dW's four products the two that have a mean of zero as a factor are left out; from dX the mean
            of its first term is taken off, which is zero but for rounding; the mean is rounded with the noise
            of the first token
    """
    mean = x.mean(0, keepdim=True)
    return Split.apply(linear(x - mean, w), linear(mean, w))


class Split(torch.autograd.Function):
    """ y (T, N) + y_mean (1, N). Backward gives y the dY without its mean over tokens, y_mean their sum. """

    @staticmethod
    def forward(ctx, y: Tensor, y_mean: Tensor) -> Tensor:
        return y + y_mean

    @staticmethod
    def backward(ctx, dy: Tensor):
        mean = dy.mean(0, keepdim=True)
        return dy - mean, mean * len(dy)


AROUND["averis"] = Around(averis)
AROUND["trust"] = Around(trust, forward=True)
for bits in range(1, 11):
    for kind in ("fixed", "none"):      # evaluation has to see the same forward pass: not fresh
        turn = partial(rotate, size=2**bits, signs=kind)
        AROUND[f"rotate {2**bits} {kind}"] = Around(turn, changes_w=True, forward=True)

"""
TetraJet-v2's linear layer: Y = X W^T and its two gradients, all three products in 4-bit numbers.

    1  rounding    one float32 number -> a number of a small grid: the nearest one, or one of its two
                   neighbours at random, so that the mean is right
    2  rotation    a random Hadamard matrix, which spreads one large number over its 15 neighbours
    3  blocks      a matrix -> grid numbers in blocks that share scales: NVFP4 and MXFP8
    4  the linear  three products, six rounded operands Q1 to Q6, and QuantLinear, which takes the place of
                   nn.Linear

This file emulates 4-bit hardware: the numbers are exactly those of the format, and float32 multiplies them.
It is plain PyTorch and has the same bits on every device, because each operation below is rounded to float32
once. rounding.py and kernels.py compute the same numbers fast; codes.py turns them into bytes.

Five tables are open: GRIDS, SIGNS, RULES, BACKENDS and AROUND, and three more elsewhere: RECIPES in
recipes.py, CHOICES in outliers.py, REMEDIES in osci.py. Other files put entries into them, and nothing here
knows those by name. The folder rivals/ has what the recipes of other papers need.

    python quant.py     shows one block of 16 numbers on its way through Q1 and Q3

Letters used for shapes: T tokens, K input and N output features, C outlier channels; M, K any matrix, and
R, B its blocks, down and across, of n numbers each. Every operand of a product lies with the summed axis
last, so there is one kind of product: a @ b.T.
"""
import json
import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noise import SIGN_STREAMS, Counter, random_signs, uniform


class Table(dict):
    """ name -> entry, open to every file. A name is entered once, so that it means one thing everywhere. """

    def __setitem__(self, name: str, entry):
        if name in self:
            raise KeyError(f"the table has an entry {name!r} already: choose another name")
        super().__setitem__(name, entry)


# -----------------------------------------------------------------------------
# 1  rounding


@dataclass(frozen=True)
class Grid:
    """
    A small floating-point format: 0, then 2^mbits evenly spaced numbers in each binade [2^e, 2^(e+1)), up to
    max, each with either sign. Below 2^emin, the smallest binade, the spacing stays what it is there.
    """
    emin: int
    mbits: int
    max: float


GRIDS = Table(
    e2m1=Grid(emin=0, mbits=1, max=6.0),            # FP4: 0 .5 1 1.5 2 3 4 6
    e4m3=Grid(emin=-6, mbits=3, max=448.0),         # FP8: numbers of MXFP8, and scales of NVFP4
    e8m0=Grid(emin=-127, mbits=0, max=2.0**127),    # powers of two: scales of MXFP8
)

# Stochastic rounding is floor(n + noise). 192 is added before and taken off afterwards: near 192 the numbers
# of float32 are 2^-16 apart, whatever n is, so numbers of each sign and size are treated alike
OFFSET = 192.0


def round_to_grid(y: Tensor, grid: Grid, noise: Tensor | None = None, up: bool = False) -> Tensor:
    """
    y float32, any shape -> the nearest numbers of the grid. Half-way between two, the one whose code is even:
    its place in the grid, counted from 0.

    noise   uniform in [0, 1), shape of y: rounds stochastically instead. This share of a gap is added to y,
            and the sum is rounded down, so a number that has come 30% of the way to its upper neighbour goes
            there in 30% of all draws, and E[out] = y
    up      rounds to the smallest grid number that is not below y instead

    What lies beyond grid.max becomes grid.max. NaN stays NaN.
    """
    y = y.clamp(-grid.max, grid.max)
    gap = binade(y).clamp(min=2.0**grid.emin) * 2.0**-grid.mbits    # between the two neighbours of y
    n = y / gap                                                     # exact, since gap is a power of two
    if noise is not None:
        # noise + OFFSET is rounded to 2^-16 itself: noise above 1 - 2^-17 would become 1, a gap too much
        n = (n + (noise + OFFSET).clamp(max=OFFSET + 1 - 2.0**-16)).floor() - OFFSET
    else:
        n = n.ceil() if up else n.round()
    # once more, since noise may carry the largest number one step further
    return (n * gap).clamp(-grid.max, grid.max)


def binade(y: Tensor) -> Tensor:
    """ 2^floor(log2 |y|) for float32 y: its exponent alone, with sign and mantissa masked away. """
    return (y.view(torch.int32) & 0x7F800000).view(torch.float32)


# -----------------------------------------------------------------------------
# 2  rotation

# name -> f(n, counter, layer, stream) -> the signs of a rotation, float32 (n,). Fresh ones are drawn anew for
# each layer, product and micro-step
SIGNS = Table(fresh=random_signs)


def hadamard(x: Tensor, signs: Tensor) -> Tensor:
    """
    Each n = len(signs) numbers of the last axis of x (M, K) times the matrix diag(signs) H_n / sqrt(n)
    -> float32 (M, K rounded up to a multiple of n), as if x were padded with zeros.

    H_n is the Hadamard matrix of +1 and -1: H_2n = [[H_n, H_n], [H_n, -H_n]]. The whole matrix is orthogonal,
    so a product whose two operands are both rotated along the summed axis stays what it was, while one large
    number of either is spread over its block.
    """
    (M, K), n = x.shape, len(signs)
    y = F.pad(x.float(), (0, -K % n)).reshape(-1, n) * signs
    # log2(n) passes over pairs of neighbours: one order of the sums, so the same bits everywhere
    for _ in range(n.bit_length() - 1):
        a, b = y.view(-1, n // 2, 2).unbind(2)
        y = torch.cat((a + b, a - b), dim=1)
    return (y * n**-0.5).view(M, K + -K % n)


# -----------------------------------------------------------------------------
# 3  blocks

TENSOR, ROW = -1, -2    # for Operand.outer: the whole matrix, or each of its rows, shares one outer scale
# Numbers that all are below this, under an outer scale, are rounded to zeros: what is computed of them would
# leave the normal numbers of float32, and there devices differ
TINY = 2.0**-100


@dataclass(frozen=True)
class Operand:
    """
    How one operand of one product is rounded. The default is that of TetraJet-v2's forward pass.

    grid      the format of the numbers, a key of GRIDS
    block     (rows, columns) that share an inner scale; columns run along the summed axis
    scale     the format of the inner scales, a key of GRIDS
    outer     columns that share an outer scale, which is float32; TENSOR for one in all, ROW for one in each
              row, or row of blocks where they have several; 0 for none
    rule      how a block gets its scales, a key of RULES: "nearest" and "up" are about the inner SCALE
    rounding  how the NUMBERS are rounded then: rtn, to nearest, or sr, stochastically
    """
    grid: str = "e2m1"
    block: tuple[int, int] = (1, 16)
    scale: str = "e4m3"
    outer: int = 128
    rule: str = "nearest"
    rounding: str = "rtn"


def fake_quantize(x: Tensor, op: Operand, noise: Tensor | None = None) -> Tensor:
    """
    x (M, K) -> what it is rounded to, float32 (M, K). Noise, (M, K), is for op.rounding sr and no other.
    A NaN or Inf makes NaN of all the numbers that share a scale with it.
    """
    assert (noise is not None) == (op.rounding == "sr"), "stochastic rounding takes noise, nearest none"
    noise = None if noise is None else to_blocks(noise, op)
    c, inner, outer = RULES[op.rule].f(to_blocks(x.float(), op), op, noise)
    return from_blocks(c * (inner * outer), x.shape, op)


def round_blocks(blocks: Tensor, op: Operand, noise: Tensor | None, up: bool = False,
                 top: float = 0.0, reach: float = 0.0, outer: Tensor | None = None):
    """
    Blocks (R, B, n) -> grid numbers c (R, B, n), inner scales s and outer scales S, both (R, B, 1).

        S = (max |x| over 128 / 448) / 6            double-block quantization,
        s = e4m3((max |x| over 16 / S) / 6)         TetraJet-v2, arXiv 2510.27527
        c = e2m1(x * (1 / (s S)))                   and the value is c * (s S)

    up      rounds s to the smallest scale that is not below, so nothing is clipped and stochastic rounding
            has no bias. A scale rounded to nearest may come out too small, and then the largest number of the
            block lies beyond the grid and is clipped. To round values again is not to leave them as they are:
            S may come back lower by the last bit, and then s is the next scale up (nearest forgives that)
    top     the grid number that the largest number of a block is mapped to; by default the largest, 6
    reach   the inner scale that the largest block under S gets; by default the largest, 448
    outer   S, where it is known already
    """
    scales = GRIDS[op.scale]
    top, reach = top or GRIDS[op.grid].max, reach or scales.max
    amax = blocks.abs().amax(-1, keepdim=True)                      # (R, B, 1)
    largest = outer_max(amax, op)
    zero = largest < TINY
    if outer is None:
        outer = over(over(largest, reach), top) if op.outer else torch.ones_like(amax)
        # 1 over zeros, and NaN over a NaN or Inf, so that all values under this scale become NaN
        outer = torch.where(zero, 1.0, torch.where(largest.isfinite(), outer, math.nan))
    inner = round_to_grid(over(torch.where(zero, 0.0, amax) / outer, top), scales, up=up)
    if noise is not None:
        # at least the smallest scale above zero, since to make small numbers zero would be a bias
        inner = inner.clamp(min=2.0 ** (scales.emin - scales.mbits))
    return round_in(blocks, inner * outer, op, noise), inner, outer


def outer_max(amax: Tensor, op: Operand) -> Tensor:
    """ The maxima of blocks (R, B, 1) -> for each block the largest of those under the same outer scale. """
    if op.outer == 0 or amax.numel() == 0:
        return amax
    if op.outer in (TENSOR, ROW):
        return amax.amax((0, 1) if op.outer == TENSOR else 1, keepdim=True).expand_as(amax)
    per_outer, B = op.outer // op.block[1], amax.shape[1]
    groups = F.pad(amax, (0, 0, 0, -B % per_outer)).unflatten(1, (-1, per_outer))
    return groups.amax(2, keepdim=True).expand_as(groups).flatten(1, 2)[:, :B]


def round_in(blocks: Tensor, scale: Tensor, op: Operand, noise: Tensor | None) -> Tensor:
    """ Blocks (R, B, n) at their scales (R, B, 1) -> grid numbers, 0 where a scale is 0 or NaN. """
    inv_scale = torch.where(scale > 2.0**-126, 1.0 / scale, 0.0)    # one division for each block
    return round_to_grid(blocks * inv_scale, GRIDS[op.grid], noise)


def over(x: Tensor, number: float) -> Tensor:
    """ x / number, as a tensor: PyTorch on a GPU computes x / 448.0 as x * (1 / 448.0), with other bits. """
    return x / x.new_full((), number)


def to_blocks(x: Tensor, op: Operand) -> Tensor:
    """ (M, K) -> (M / rows, K / columns, rows * columns), a row for each block, as if padded with zeros. """
    (rows, columns), (M, K) = op.block, x.shape
    if x.numel():       # PyTorch 2.6 pads nothing that is empty
        x = F.pad(x, (0, -K % columns, 0, -M % rows))
    x = x.reshape(-(-M // rows), rows, -(-K // columns), columns)
    return x.transpose(1, 2).flatten(2)


def from_blocks(blocks: Tensor, shape: torch.Size, op: Operand) -> Tensor:
    """ The inverse of to_blocks, cut back to shape (M, K). """
    (rows, columns), (R, B, _) = op.block, blocks.shape
    x = blocks.view(R, B, rows, columns).transpose(1, 2).reshape(R * rows, B * columns)
    return x[: shape[0], : shape[1]].contiguous()


@dataclass(frozen=True)
class Rule:
    """
    A way to round blocks, and what it is for.

    f        f(blocks, op, noise) -> c, s, S as round_blocks; noise is None under rounding rtn
    scales   mantissa, powers or any: the kind of scale that it makes. Powers are the powers of two of e8m0
    grids    names of the grids that it knows, () for any
    rounds   the values of Operand.rounding that it knows
    outer    whether it may have an outer scale although its inner scales are powers of two
    stored   None; or where c has numbers that the grid has not, f(c, scales) -> the grid's numbers that are
             stored for them, and its inverse
    """
    f: Callable
    scales: str = "any"
    grids: tuple[str, ...] = ()
    rounds: tuple[str, ...] = ("rtn", "sr")
    outer: bool = False
    stored: tuple[Callable, Callable] | None = None


RULES = Table(nearest=Rule(round_blocks, scales="mantissa"), up=Rule(partial(round_blocks, up=True)))


# -----------------------------------------------------------------------------
# 4  the linear


@dataclass(frozen=True)
class Recipe:
    """
    How the six operands are rounded; None leaves one as it is, in the compute dtype: that in which the model
    computes, bf16 on a GPU and float32 on a CPU.

                  operand       of the product       lies as      in the paper
        y_x       X             Y  = X   @ W.T       (T, K)       Q1
        y_w       W                                  (N, K)       Q2
        dx_dy     dY            dX = dY  @ W         (T, N)       Q3
        dx_w      W^T                                (K, N)       Q4
        dw_dy     dY^T          dW = dY.T @ X        (N, T)       Q5
        dw_x      X^T                                (K, T)       Q6

    align     an aligned gradient is that of what the forward pass really computed: Q4 and Q6 round Q2(W) and
              Q1(X). False: they round W and X
    outlier   how the channels are rounded that OutControl picks (outliers.py); "bf16": in the compute dtype;
              "patched": as the others, in FP4, and an entry of AROUND corrects the product
    rotate    sizes of the rotations along the summed axes of Y, dX and dW, 0 for none. With align, that of Y
              is 0: Q1 of a rotated X is another matrix than the Q1(X) that an aligned gradient needs. Where
              both are wanted, X and W are rotated before the linear, by an entry of AROUND
    signs     of these rotations, keys of SIGNS
    around    what happens around the linear, the outermost first: keys of AROUND
    """
    y_x: Operand | None = None
    y_w: Operand | None = None
    dx_dy: Operand | None = None
    dx_w: Operand | None = None
    dw_dy: Operand | None = None
    dw_x: Operand | None = None
    align: bool = True
    outlier: Operand | str | None = None
    rotate: tuple[int, int, int] = (0, 0, 0)
    signs: tuple[str, str, str] = ("fresh", "fresh", "fresh")
    around: tuple[str, ...] = ()

    def __post_init__(self):
        # all of it as text: a checkpoint keeps it, and torch.compile hands on no other object (fused.py)
        object.__setattr__(self, "text", json.dumps(asdict(self)))

    @property
    def operands(self) -> tuple[Operand | None, ...]:
        """ Q1 to Q6. """
        return self.y_x, self.y_w, self.dx_dy, self.dx_w, self.dw_dy, self.dw_x


class Product(torch.autograd.Function):
    """
    x (T, K), w (N, K), outlier channels (C,) -> y (T, N) in dtype, and the gradients of x and w. counter and
    layer are the address of the random numbers; save says that a backward pass will follow.
    """

    @staticmethod
    def forward(ctx, x, w, r: Recipe, channels, counter, layer: int, dtype, save: bool) -> Tensor:
        rounder = Rounder(r, counter, layer, dtype)

        # OutControl: in the FP4 operands outlier channels are set to zero and not cut out, so that every
        # other channel stays in its block. A second product, of few channels in MXFP8, adds them
        x4, w4 = x.index_fill(1, channels, 0.0), w.index_fill(1, channels, 0.0)
        x8, w8 = rounder.outlier(x[:, channels], r.y_x), rounder.outlier(w[:, channels], r.y_w)

        # Y (T, N)  =  Q1(X) (T, K)  @  Q2(W)^T (K, N)   +   X8 (T, C)  @  W8^T (C, N)
        # Two products are summed in float32, so that y is rounded to dtype once
        q1, q2 = rounder.q(1, x4), rounder.q(2, w4)
        y = (gemm(q1, q2.float()) + gemm(x8, w8)).to(dtype) if len(channels) else gemm(q1, q2).to(dtype)

        # The operands of the backward pass that need no dY are rounded now, and only they are kept: as codes
        # and scales that is 4.75 bits for each number
        if save:
            # Q4 rounds the W that the forward pass used, if aligned: Q2(W), and W8 in the outlier channels.
            # Here, as in the paper, all channels become FP4
            w_used = q2.index_copy(1, channels, w8.to(q2.dtype)) if r.align and r.dx_w else w
            q4 = rounder.q(4, w_used.T.contiguous())
            # Q6 rounds the X that it used; outlier channels stay apart from it, in MXFP8
            x_used, x8_used = (q1, x8) if r.align and r.dw_x else (x4, x[:, channels])
            q6 = rounder.q(6, x_used.T.contiguous())
            x8_t = rounder.outlier(x8_used.T.contiguous(), r.dw_x)
            ctx.save_for_backward(q4, q6, x8_t, channels)
        ctx.rounder, ctx.dtypes = rounder, (x.dtype, w.dtype)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        (q4, q6, x8_t, channels), rounder, dx, dw = ctx.saved_tensors, ctx.rounder, None, None
        if ctx.needs_input_grad[0]:
            # dX (T, K)  =  Q3(dY) (T, N)  @  Q4(W^T)^T (N, K)
            dx = gemm(rounder.q(3, dy), q4).to(dy.dtype).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            # dW (N, K)  =  Q5(dY^T) (N, T)  @  Q6(X^T)^T (T, K)
            # and in the columns of outlier channels, (N, C)  =  dY8^T (N, T)  @  X8 (T, C)
            dy_t = dy.T.contiguous()
            dw = gemm(rounder.q(5, dy_t), q6)
            if len(channels):
                dw8 = gemm(rounder.outlier(dy_t, rounder.recipe.dw_dy), x8_t)
                dw = dw.index_copy(1, channels, dw8.to(dw.dtype))
            dw = dw.to(dy.dtype).to(ctx.dtypes[1])
        return dx, dw, *[None] * 6


@dataclass
class Rounder:
    """
    Rounds the operands of one linear layer, with the random numbers of that layer at one step and micro-step.
    What the recipe does not round is cast to dtype.
    """
    recipe: Recipe
    counter: Tensor
    layer: int
    dtype: torch.dtype

    def q(self, number: int, x: Tensor) -> Tensor:
        """ Q1 to Q6, by number, of x with the summed axis last: rotated as its partner is, and rounded. """
        op, product = self.recipe.operands[number - 1], (number - 1) // 2       # product: 0 Y, 1 dX, 2 dW
        x = x if op else x.to(self.dtype)
        if size := self.recipe.rotate[product]:
            draw = SIGNS[self.recipe.signs[product]]
            x = hadamard(x, draw(size, self.counter, self.layer, SIGN_STREAMS[product]))
        if op is None:
            return x
        sr = op.rounding == "sr"
        noise = uniform(x.shape, self.counter, self.layer, number) if sr else None
        return fake_quantize(x, op, noise)

    def outlier(self, x: Tensor, on: Operand | None) -> Tensor:
        """ Outlier channels in their own format, if the operand that they belong to is rounded at all. """
        op = self.recipe.outlier
        return fake_quantize(x, op) if on and isinstance(op, Operand) else x.to(self.dtype).float()


def gemm(a: Tensor, b: Tensor) -> Tensor:
    """ a (M, K) @ b (N, K)^T -> (M, N): float32, or the compute dtype if both are still in it. """
    if a.dtype != b.dtype:
        a, b = a.float(), b.float()
    with torch.autocast(a.device.type, enabled=False):
        return F.linear(a, b)


@dataclass(frozen=True)
class Backend:
    """
    Who rounds and multiplies. The numbers are the same, the speed is not.

    linear   f(x, w, recipe, channels, counter, layer, dtype, save) -> y with its gradients, as Product
    problem  f(recipe) -> why it cannot compute this recipe here, in a line; "" if it can
    codes    f(w (N, K), op) -> codes.Quantized, a weight rounded to nearest; None for codes.quantize
    track    one step of OsciReset's window, in place; None for the lines of osci.py
    """
    linear: Callable
    problem: Callable = lambda recipe: ""
    codes: Callable | None = None
    track: Callable | None = None


# torch.compile does not look into the reference: it might fuse operations, which then are rounded only once.
# A faster back end is entered after a slower one: the last one that can compute a recipe is taken
BACKENDS = Table(reference=Backend(torch.compiler.disable(Product.apply)))


@dataclass(frozen=True)
class Around:
    """
    Something around the linear. f(x (T, K), w (N, K), linear, layer) -> y (T, N) calls linear(x, w), which is
    the rest; changes_w tells that W itself does not get there, so that its oscillation cannot be watched,
    and forward that it is about what the forward pass rounds, and nothing where that rounds nothing.
    """
    f: Callable
    changes_w: bool = False
    forward: bool = False


AROUND = Table()


class QuantLinear(nn.Linear):
    """
    nn.Linear whose three products follow a recipe.

    layer, counter  address of its random numbers. Without a counter it draws one, and counts its forward
                    passes itself. Such a layer does not go with recomputation, where a second forward pass
                    would count on and draw other noise
    outliers        how many input channels OutControl may keep in recipe.outlier's format
    channels        buffer (outliers,): those channels, ascending; all -1 until they are chosen
    split           whether they are chosen yet, and set apart
    squares         None, or (K,), to which multiply adds the squares of its input, for OutControl to look at
    extra           keys of AROUND that are applied outside those of the recipe; remedies of osci.py set them
    enabled         False: nothing is rounded, for a look at the same weights in evaluation
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *,
                 recipe: Recipe = Recipe(), layer: int = 0, counter: Counter | None = None,
                 outliers: int = 0, backend: str = "reference", device=None, dtype=None):
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.recipe, self.layer, self.backend, self.enabled = recipe, layer, backend, True
        self.own, self.counter = counter is None, counter or own_counter(device)
        self.register_buffer("channels", torch.full((outliers,), -1, device=device))
        self.squares, self.split, self.extra = None, False, ()
        self.register_load_state_dict_post_hook(QuantLinear.restore)

    def __setstate__(self, state: dict):
        """ A copy of a layer with a counter of its own has noise of its own too. """
        super().__setstate__(state)
        self.counter = own_counter(self.weight.device) if self.own else self.counter

    def set_channels(self, channels: Tensor):
        """ Keep these input channels in the outlier format from now on; all -1 for none yet. """
        self.channels.copy_(channels.sort().values)
        self.split = bool((self.channels >= 0).any()) and self.recipe.outlier != "patched"

    def restore(self, _):
        """ After load_state_dict: the buffer says which channels, if they are chosen yet. """
        self.set_channels(self.channels)

    def multiply(self, x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
        """ x (T, K), w (N, K) -> y (T, N). Backward needs the counter as it is now, so it gets a copy. """
        if self.squares is not None and self.training:
            # with recomputation this runs twice: all channels get the same factor, and their order stays
            self.squares += x.detach().float().square().sum(0)
        counter = self.counter.state.to(x.device, copy=True)
        channels = self.channels if self.split else self.channels[:0]
        save = torch.is_grad_enabled() and (x.requires_grad or w.requires_grad)
        linear = BACKENDS[self.backend].linear
        return linear(x, w, self.recipe, channels, counter, self.layer, dtype, save)

    def forward(self, x: Tensor) -> Tensor:
        if not self.enabled or not any(self.recipe.operands):
            return F.linear(x, self.weight, self.bias)
        # what autocast does to nn.Linear; but W stays as it is: Q2 rounds the master weight, the float32 one
        # that the optimizer moves
        cast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if cast else x.dtype
        if self.own and self.training:
            self.counter.state[1] += 1
        linear = partial(self.multiply, dtype=dtype)
        for name in reversed((*self.extra, *self.recipe.around)):
            linear = partial(AROUND[name].f, linear=linear, layer=self)
        y = linear(x.to(dtype).reshape(-1, self.in_features), self.weight)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(dtype)


def own_counter(device) -> Counter:
    """ A counter with a rank of its own, and seed 0: signs that a whole run shares are shared here too. """
    return Counter(0, rank=int(torch.randint(2**31, (), device="cpu")), device=device or "cpu")


# -----------------------------------------------------------------------------
# python quant.py


def show():
    """ One block of 16 numbers on its way through Q1 and Q3, printed. """
    x = torch.zeros(1, 128)     # an outer block, whose largest number, 21, is in another inner block
    x[0, :16] = torch.tensor([.78, -.5, .3, .2, -.1, .04, .03, 0, .65, -.25, .16, -.01, .42, -.36, .07, .02])
    x[0, 16] = 21.0

    def line(name: str, numbers: Tensor):
        print(f"{name:16}" + " ".join(f"{n:5.2f}" for n in numbers.flatten()[:16].tolist()))

    def steps(x: Tensor, c: Tensor, inner: Tensor, outer: Tensor):
        print(f"outer scale S = {outer[0, 0, 0]:.6g}, inner scale s = {inner[0, 0, 0]:g}")
        line("x / (s S)", x[0, :16] / (inner * outer)[0, 0])
        line("c, on the grid", c)
        line("value c (s S)", c * (inner * outer))

    line("x", x)
    print("\nQ1, to nearest")
    op = Operand()
    steps(x, *round_blocks(to_blocks(x, op), op, None))

    print("\nQ3, rotated and stochastic, one draw of the noise")
    op, counter = Operand(rule="up", rounding="sr"), Counter(seed=1).state
    x = hadamard(x, random_signs(16, counter, 0, SIGN_STREAMS[1]))
    line("x, rotated", x)
    noise = uniform(x.shape, counter, 0, 3)
    steps(x, *round_blocks(to_blocks(x, op), op, to_blocks(noise, op), up=True))
    many = x.expand(10_000, 128)
    line("mean of 10,000", fake_quantize(many, op, uniform(many.shape, counter, 0, 3)).mean(0))


if __name__ == "__main__":
    show()

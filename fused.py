"""
The quantized linear of quant.py on a GPU: three back ends, put into quant.BACKENDS.

    packed    as emulate, but what the backward pass needs is kept as codes and scales, 4.75 bits a value, and
              becomes values again just before its product: less memory, some more time
    emulate   the kernels round to values in the compute dtype, which a GEMM of the library multiplies
    native    the kernels round to codes and scales, which the FP4 tensor cores multiply (kernels.py)

All three round the six operands to the same codes and scales as the reference, bit for bit. What differs is
the product: emulate and packed round each code times scale once more where the compute dtype is bf16, and
sums run in the order of the hardware.

One linear is few passes over memory. A pass reads a matrix once and writes it rounded in both orientations
(rounding.round_pair):

    forward    X -> Q1(X) for Y, and Q6(X^T), kept for dW        Y  = Q1(X)    @ Q2(W)^T
               W -> Q2(W) for Y, and Q4(W^T), kept for dX
    backward   dY -> Q3(dY) for dX, and Q5(dY^T) for dW          dX = Q3(dY)   @ Q4(W^T)^T
                                                                 dW = Q5(dY^T) @ Q6(X^T)^T

Outlier channels need no second product. As values they are further columns of both operands,
Y = [X4 X8] @ [W4 W8]^T, and nvfp4_gemm adds their MXFP8 product to its sum before it rounds.

To torch.compile each linear is two opaque operators, one for each direction. It knows the shapes of what they
return and does not look into them, so a compiled model has the bits of the eager one: no random number can be
drawn twice or at another place.

What this file leaves out: formats (quant.py), how kernels round (rounding.py) and multiply (kernels.py), and
what a recipe has around the linear, which QuantLinear calls.

Letters used for shapes: T tokens, K input and N output features, C outlier channels.
"""
import math
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import codes
from kernels import NATIVE_ARCHS, mxfp8_gemm, native, nvfp4_gemm
from noise import Counter
from quant import BACKENDS, ROW, TENSOR, Backend, Operand, QuantLinear, Recipe, gemm
from recipes import from_json
from rounding import Out, Side, no_codes, no_kernel, no_lines, round_pair, track, unpack

# -----------------------------------------------------------------------------
# the linear, in both directions


def forward(f: "Forms", x: Tensor, w: Tensor, channels: Tensor, counter: Tensor, layer: int, save: bool,
            dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """
    x (T, K), w (N, K) -> y (T, N) in dtype, and what the backward pass needs, Q4(W^T), Q6(X^T) and X8^T, each
    in one tensor, which is empty unless save.
    """
    x, w, C = x.contiguous(), w.contiguous(), channels.numel()
    q1, x8 = for_y(f.q1, f.x8, x, C, dtype)
    q2, w8 = for_y(f.q2, f.w8, w, C, dtype)
    q4, q6, x8_t = for_backward(f, x, w, channels, save, dtype)
    both = partial(round_both, counter=counter, layer=layer, dtype=dtype)

    # a column that is an outlier channel counts as zero: all bits of the others, and none of these
    fp4 = x.new_full(x.shape[1:], -1, dtype=torch.int16).index_fill_(0, channels, 0) if C else None
    both(x, q1, q6 if save else None, align=f.align_x, row_mask=fp4, col_mask=fp4)
    # in W^T all channels are FP4. Where it starts from the rounded W, the rows of outlier channels are zeros
    # for now ...
    both(w, q2, q4 if save else None, align=f.align_w, row_mask=fp4)
    if C:
        both(x.index_select(1, channels), x8, x8_t if save else None, align=f.align_x)
        # ... and are made here, of W8
        aligned = save and f.align_w
        both(w.index_select(1, channels), w8, q4 if aligned else None, align=f.align_w,
             col_rows=channels if aligned else None)
    # Y (T, N)  =  Q1(X) (T, K)  @  Q2(W)^T (K, N)   +   X8 (T, C)  @  W8^T (C, N)
    y = product(q1, q2, dtype, x8, w8)
    return y, q4.memory, q6.memory, x8_t.memory


def backward(f: "Forms", dy: Tensor, q4: Tensor, q6: Tensor, x8_t: Tensor, channels: Tensor, counter: Tensor,
             layer: int, need_dx: bool, need_dw: bool, K: int) -> tuple[Tensor, Tensor]:
    """ dy (T, N) and what forward() kept -> dx (T, K), dw (N, K) in its dtype; empty if not needed. """
    (T, N), C, dtype = dy.shape, channels.numel(), dy.dtype
    if T == 0:
        return dy.new_empty(0, K if need_dx else 0), dy.new_zeros((N, K) if need_dw else 0)
    q3 = along_rows(f.q3, dy, dtype) if need_dx else None
    q5 = empty(f.q5, dy, N, T, dtype) if need_dw else None
    dy8 = empty(f.dy8, dy, N, T, dtype) if need_dw and C else None
    round_both(dy, q3, q5, counter, layer, dtype, extra=dy8)

    dx, dw = dy.new_empty(0), dy.new_empty(0)
    if need_dx:
        # dX (T, K)  =  Q3(dY) (T, N)  @  Q4(W^T)^T (N, K)
        dx = product(q3, Stored(f.q4, q4, K, N), dtype)
    if need_dw:
        # dW (N, K)  =  Q5(dY^T) (N, T)  @  Q6(X^T)^T (T, K)
        # and in the columns of outlier channels, (N, C)  =  dY8^T (N, T)  @  X8 (T, C)
        dw = product(q5, Stored(f.q6, q6, K, T), dtype)
        if C:
            dw.index_copy_(1, channels, product(dy8, Stored(f.x8_t, x8_t, C, T), dtype))
    return dx, dw


def round_both(t: Tensor, row: "Stored | None", col: "Stored | None", counter: Tensor, layer: int,
               dtype: torch.dtype, align: bool = False, row_mask: Tensor | None = None,
               col_mask: Tensor | None = None, col_rows: Tensor | None = None, extra: "Stored | None" = None):
    """
    t (M, S) rounded along its rows into row (M, S), and along its columns into col (S, M): in one pass if
    both start from the same values, which is the rule, and else in two.

    align     col starts from the rounded rows
    masks     int16 (S,): which columns of t count as zeros, for row and for col
    col_rows  int64 (S,): the rows of col that the columns of t are, where col has more
    extra     as col, rounded in a second way
    """
    def start(to: Stored | None) -> Tensor:
        """ What is not rounded is in the compute dtype. """
        return t if to is None or to.form.side.op else t.to(dtype)

    first = row.memory if row and row.given else start(row)
    second = first if align else start(col)
    (row_side, row_out), (col_side, col_out), (extra_side, extra_out) = map(target, (row, col, extra))
    if align or col is None or first is second and row_mask is col_mask:
        round_pair(first, row_side, col_side, row_out, col_out, counter, layer, align, row_mask, col_rows,
                   extra_side, extra_out)
    else:
        round_pair(first, row_side, None, row_out, None, counter, layer, keep=row_mask)
        round_pair(second, None, col_side, None, col_out, counter, layer, False, col_mask, col_rows,
                   extra_side, extra_out)


def product(a: "Stored", b: "Stored", dtype: torch.dtype, a8: "Stored | None" = None,
            b8: "Stored | None" = None) -> Tensor:
    """ a (M, S) @ b (N, S)^T (+ a8 @ b8^T, which as values are columns of a and b) -> (M, N) in dtype. """
    if a.form.bits == 4:
        return nvfp4_gemm(a.codes(), b.codes(), a8 and a8.codes(), b8 and b8.codes(), dtype)
    if a.form.bits == 8:
        return mxfp8_gemm(a.codes(), b.codes(), dtype)
    a, b = a.values(dtype), b.values(dtype)
    # gemm() keeps autocast from casting float32 to bf16
    return gemm(a, b) if dtype == torch.float32 else F.linear(a, b)


# -----------------------------------------------------------------------------
# how operands lie in memory


class Form(NamedTuple):
    """ How an operand is rounded, and whether it is stored as codes, of so many bits, or as values: 0. """
    side: Side
    bits: int

    def shapes(self, rows: int, columns: int) -> list[tuple[int, ...]]:
        """ The shapes of codes, inner and outer scales. A row of codes is filled up to a multiple of 16. """
        op, columns = self.side.op, up(up(columns, self.side.rotate), 16)
        down = -(-rows // op.block[0])
        shapes = [(rows, columns * self.bits // 8), (down, -(-columns // op.block[1]))]
        if op.outer:
            across = 1 if op.outer == ROW else -(-columns // op.outer)
            shapes.append(() if op.outer == TENSOR else (down, across))
        return shapes

    def sizes(self, rows: int, columns: int) -> list[int]:
        """ Their bytes, in multiples of 16, so that each starts where a whole piece of memory does. """
        return [up(math.prod(shape) * kind.itemsize, 16)
                for shape, kind in zip(self.shapes(rows, columns), KINDS)]

    def out(self, parts: list[Tensor]) -> Out:
        """ Codes, inner and perhaps outer scales as the kernels write and read them. """
        code, inner, outer = (*parts, None)[:3]
        return Out(code, inner, outer, code.shape[1] * 8 // self.bits)


# the types of codes, inner and outer scales
KINDS = torch.uint8, torch.uint8, torch.float32


class Stored(NamedTuple):
    """
    An operand (rows, columns) in memory. As values that is a matrix, with the columns rounded up to whole
    rotations, and further ones where outlier channels lie beside. As codes it is one tensor of bytes.
    given says that the matrix was there before, and nothing is to be written.
    """
    form: Form
    memory: Tensor
    rows: int
    columns: int
    given: bool = False

    def out(self) -> Out:
        """ As the kernels write and read it. """
        if not self.form.bits:
            return Out(self.memory, stride=self.memory.stride(0))
        pieces = self.memory.split(self.form.sizes(self.rows, self.columns))
        return self.form.out([piece.view(kind)[: math.prod(shape)].view(shape) for piece, kind, shape in
                              zip(pieces, KINDS, self.form.shapes(self.rows, self.columns))])

    def values(self, dtype: torch.dtype) -> Tensor:
        """ The matrix. """
        side = self.form.side
        if not self.form.bits:
            return self.memory
        return unpack(self.out(), side.op, up(self.columns, side.rotate), dtype)

    def codes(self) -> tuple[Tensor, ...]:
        """ Codes and scales as kernels.py takes them, where the rows of a square have no scale in common. """
        out, height = self.out(), self.form.side.op.block[0]
        scales = [s for s in (out.inner, out.outer) if s is not None]
        if height > 1:
            scales = [s.repeat_interleave(height, 0)[: self.rows].contiguous() if s.dim() else s
                      for s in scales]
        return out.data, *scales


def target(to: Stored | None) -> tuple[Side | None, Out | None]:
    return (None, None) if to is None or to.given else (to.form.side, to.out())


def empty(form: Form, like: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Stored:
    """ Memory for an operand, on the device of like. """
    if form.bits:
        memory = like.new_empty(sum(form.sizes(rows, columns)), dtype=torch.uint8)
    else:
        memory = like.new_empty(rows, up(columns, form.side.rotate), dtype=dtype)
    return Stored(form, memory, rows, columns)


def along_rows(form: Form, x: Tensor, dtype: torch.dtype) -> Stored:
    """ Where x (M, S) rounded along its rows goes; x itself if it stays as it is. """
    if form.side.op or form.side.rotate:
        return empty(form, x, *x.shape, dtype)
    return Stored(form, x.to(dtype), *x.shape, given=True)


def for_y(form: Form, form8: Form, x: Tensor, C: int, dtype: torch.dtype) -> tuple[Stored, Stored | None]:
    """ Where Q1(X) and X8, or Q2(W) and W8, go: as values side by side, so that one product adds up both. """
    if C == 0:
        return along_rows(form, x, dtype), None
    rows, K = x.shape
    if form.bits:
        return empty(form, x, rows, K, dtype), empty(form8, x, rows, C, dtype)
    first = up(K, form.side.rotate)
    # a multiple of 16 more, as K mostly is, so that rows begin at whole pieces of memory
    both = x.new_empty(rows, first + up(C, 16), dtype=dtype)
    both[:, first + C :].zero_()
    return Stored(form, both, rows, K), Stored(form8, both[:, first : first + C], rows, C)


def for_backward(f: "Forms", x: Tensor, w: Tensor, channels: Tensor, save: bool,
                 dtype: torch.dtype) -> tuple[Stored, Stored, Stored]:
    """ Where Q4(W^T), Q6(X^T) and X8^T go; without rows unless save. """
    (T, K), N, C = x.shape, w.shape[0], channels.shape[0]
    return (empty(f.q4, x, K if save else 0, N, dtype), empty(f.q6, x, K if save else 0, T, dtype),
            empty(f.x8_t, x, C if save else 0, T, dtype))


def up(n: int, multiple: int) -> int:
    """ n rounded up to a multiple; to itself for 0. """
    return -(-n // multiple) * multiple if multiple else n


# -----------------------------------------------------------------------------
# what a recipe means to a back end: all that depends on settings alone is made once, since small layers on a
# fast GPU wait for what Python does between kernels


class Forms(NamedTuple):
    """ The Form of each operand and of outlier channels, and whether Q6, Q4 start from rounded X, W. """
    q1: Form
    q2: Form
    q3: Form
    q4: Form
    q5: Form
    q6: Form
    x8: Form
    w8: Form
    dy8: Form
    x8_t: Form
    align_x: bool
    align_w: bool


@cache
def forms_of(backend: str, recipe: str) -> Forms:
    """ The Forms of a recipe that is given as text, since an operator takes no other object. """
    r = from_json(recipe)

    def form(side: Side, kept: bool) -> Form:
        """ kept says that it is what the backward pass needs of the forward pass. """
        coded = side.op and (backend == "native" or backend == "packed" and kept and not no_codes(side.op))
        return Form(side, codes.sign_bit(side.op) + 1 if coded else 0)

    def outlier(on: Operand | None, kept: bool = False) -> Form:
        return form(Side(r.outlier if on and isinstance(r.outlier, Operand) else None), kept)

    six = [form(side, kept=number in (4, 6)) for number, side in enumerate(sides(r), 1)]
    return Forms(*six, outlier(r.y_x), outlier(r.y_w), outlier(r.dw_dy), outlier(r.dw_x, kept=True),
                 bool(r.align and r.dw_x), bool(r.align and r.dx_w))


def sides(r: Recipe) -> list[Side]:
    """ How Q1 to Q6 are rounded: two for each product, which are rotated alike. """
    return [Side(op, i + 1, r.rotate[i // 2], r.signs[i // 2]) for i, op in enumerate(r.operands)]


def problem(r: Recipe) -> str:
    """ Why no kernel rounds like this recipe, or "". """
    for number, side in enumerate(sides(r), 1):
        if why := no_kernel(side):
            return f"operand Q{number}: {why}"
    if isinstance(r.outlier, Operand) and (why := no_kernel(Side(r.outlier)) or no_lines(r.outlier)):
        return f"outlier channels: {why}"
    if isinstance(r.outlier, Operand) and r.outlier.outer == ROW:
        return "outlier channels: no kernel for a scale of each row"
    if r.outlier and r.align and r.dx_w and (why := no_lines(r.dx_w)):
        return f"operand Q4: {why}"
    return ""


def native_problem(r: Recipe) -> str:
    """ Why the FP4 tensor cores of this GPU do not multiply what the recipe rounds, or "". """
    if torch.cuda.is_available() and not native(torch.device("cuda")):
        known = ", ".join(f"{major}.{minor}" for major, minor in NATIVE_ARCHS)
        return f"FP4 tensor cores come with Blackwell, compute capability {known}"
    if why := problem(r):
        return why
    for number, op in enumerate(r.operands, 1):
        if op is None or op.grid != "e2m1":
            return f"operand Q{number} is not FP4"
        if op.scale != "e4m3" or op.block[1] != 16 or no_codes(op):
            return f"operand Q{number} has scales that the tensor cores do not read"
    for name, (a, b) in zip(("Y", "dX", "dW"), zip(r.operands[::2], r.operands[1::2])):
        if a.outer != b.outer:
            return f"one operand of {name} has more outer scales than the other"
    mxfp8 = ("e4m3", "e8m0", (1, 32), 0)
    if r.outlier == "bf16" or isinstance(r.outlier, Operand) and mxfp8 != (
            r.outlier.grid, r.outlier.scale, r.outlier.block, r.outlier.outer):
        return "outlier channels are not MXFP8"
    return ""


# -----------------------------------------------------------------------------
# one opaque op for each direction, and the entries of BACKENDS


def linear(backend: str, x: Tensor, w: Tensor, recipe: Recipe, channels: Tensor, counter: Tensor, layer: int,
           dtype: torch.dtype, save: bool) -> Tensor:
    """ quant.Backend.linear of one back end. """
    return linear_op(x, w, channels, counter, layer, backend, recipe.text, save, dtype)[0]


@torch.library.custom_op("nvfp4::linear", mutates_args=())
def linear_op(x: Tensor, w: Tensor, channels: Tensor, counter: Tensor, layer: int, backend: str, recipe: str,
              save: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return forward(forms_of(backend, recipe), x, w, channels, counter, layer, save, dtype)


@linear_op.register_fake
def _(x, w, channels, counter, layer, backend, recipe, save, dtype):
    stored = for_backward(forms_of(backend, recipe), x, w, channels, save, dtype)
    return x.new_empty(x.shape[0], w.shape[0], dtype=dtype), *(s.memory for s in stored)


@torch.library.custom_op("nvfp4::linear_backward", mutates_args=())
def linear_backward_op(dy: Tensor, q4: Tensor, q6: Tensor, x8_t: Tensor, channels: Tensor, counter: Tensor,
                       layer: int, backend: str, recipe: str, need_dx: bool, need_dw: bool,
                       K: int) -> tuple[Tensor, Tensor]:
    f = forms_of(backend, recipe)
    return backward(f, dy, q4, q6, x8_t, channels, counter, layer, need_dx, need_dw, K)


@linear_backward_op.register_fake
def _(dy, q4, q6, x8_t, channels, counter, layer, backend, recipe, need_dx, need_dw, K):
    T, N = dy.shape
    return dy.new_empty((T, K) if need_dx else 0), dy.new_empty((N, K) if need_dw else 0)


def _setup_context(ctx, inputs, output):
    x, w, channels, counter, ctx.layer, ctx.backend, ctx.recipe, _, _ = inputs
    ctx.dtypes, ctx.K = (x.dtype, w.dtype), x.shape[1]
    ctx.save_for_backward(*output[1:], channels, counter)


def _backward(ctx, dy, *_):
    needed = ctx.needs_input_grad[:2]
    grads = linear_backward_op(dy.contiguous(), *ctx.saved_tensors, ctx.layer, ctx.backend, ctx.recipe,
                               *needed, ctx.K)
    return *(g.to(kind) if need else None for g, kind, need in zip(grads, ctx.dtypes, needed)), *[None] * 7


linear_op.register_autograd(_backward, setup_context=_setup_context)


def weight_codes(w: Tensor, op: Operand) -> codes.Quantized:
    """ codes.quantize(w, op), to nearest, by the kernels. """
    side = Side(op)
    if no_kernel(side) or no_codes(op):
        return codes.quantize(w, op)
    form, (N, K) = Form(side, codes.sign_bit(op) + 1), w.shape
    no_noise = torch.zeros(4, dtype=torch.int64, device=w.device)
    # each in memory of its own: OsciReset keeps the scales, and codes with them would double what that costs
    parts = [torch.empty(shape, dtype=kind, device=w.device) for shape, kind in zip(form.shapes(N, K), KINDS)]
    out = form.out(parts)
    round_pair(w.contiguous(), side, None, out, None, no_noise, 0)
    code = codes.unpack(out.data, K) if form.bits == 4 else out.data[:, :K]
    return codes.Quantized(code.contiguous(), out.inner, out.outer, op)


BACKENDS["packed"] = Backend(partial(linear, "packed"), problem, weight_codes, track)
BACKENDS["emulate"] = Backend(partial(linear, "emulate"), problem, weight_codes, track)
BACKENDS["native"] = Backend(partial(linear, "native"), native_problem, weight_codes, track)


def check_native(recipe: Recipe, device: torch.device, shape: tuple[int, int, int] = (192, 320, 144)) -> str:
    """
    One linear by the native back end and by the reference on this GPU, before a run trusts it: "", or where
    they differ. The codes and scales of W have to be equal, bit for bit, and products but for the order of
    their sums.
    """
    T, K, N = shape
    C = K // 10 if recipe.outlier else 0
    generator, results = torch.Generator(device).manual_seed(0), []
    x, w, dy = (torch.randn(shape, generator=generator, device=device) for shape in ((T, K), (N, K), (T, N)))
    if recipe.y_w.rounding == "rtn":
        ours, right = weight_codes(w, recipe.y_w), codes.quantize(w, recipe.y_w)
        if not all(torch.equal(a, b) for a, b in zip((ours.code, ours.inner, ours.outer),
                                                     (right.code, right.inner, right.outer))):
            return "the rounding kernel differs from the reference on this GPU"
    for backend in ("reference", "native"):
        layer = QuantLinear(K, N, bias=False, recipe=recipe, counter=Counter(1, device=device), outliers=C,
                            backend=backend, device=device)
        layer.weight.data.copy_(w)
        layer.set_channels(torch.arange(0, 10 * C, 10, device=device))
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(dy)
        results.append((y.detach(), leaf.grad, layer.weight.grad))
    for name, right, ours in zip(("Y", "dX", "dW"), *results):
        error = float((ours - right).norm() / right.norm())
        # the order of a few hundred float32 sums makes 1e-6 at most, and one wrong code 1e-3
        if not error < 1e-5:
            return f"{name} of the native back end is off by {error:.1e} on this GPU"
    return ""

"""
The quantized linear of quant.py on a GPU: the same six operands in fewer passes, and two ways to multiply.

    emulate   operands as rounded values in the compute dtype, one GEMM of the library each. Codes and scales
              are those of the reference, bit for bit. bf16 then rounds code times scale once more, to 8 bits
    packed    the same values, but what is kept for the backward pass is codes and scales, 4.75 bits a value,
              and made into values there: less memory, and some time. What has no codes (kernels.no_codes)
              stays as in emulate
    native    operands as codes and scales, the FP4 tensor cores multiply (gemms.py)

Outlier channels need no second product: in the emulation they are further columns of both operands,
Y = [X4 X8] [W4 W8]^T, and nvfp4_gemm adds their MXFP8 product to its sum before it rounds.

What this file leaves out: formats (quant.py), kernels (kernels.py, gemms.py). quant.py calls it, and loads it
when it does.

Letters used for shapes: T tokens, K input features, N output features, C outlier channels.
"""
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from gemms import mxfp8_gemm, nvfp4_gemm
from kernels import Out, Side, no_codes, no_kernel, no_lines, round_pair, turn_back, unpack
from quant import DW_SIGNS, DX_SIGNS, Operand, Quantized, Recipe, inherited, rotation, sign_stream


def up(n: int, multiple: int) -> int:
    return -(-n // max(1, multiple)) * max(1, multiple)


@cache
def sides_of(r: Recipe) -> tuple[Side, ...]:
    """
    How the operands Q1 to Q6 are rounded, and rotated: each as the other one of its product. Cached, as all
    that depends on settings alone: small layers on a fast GPU wait for what the host does between kernels.
    """
    def side(number: int, op: Operand | None, other: Operand | None) -> Side:
        signs = sign_stream(op, other, DX_SIGNS if number in (3, 4) else DW_SIGNS)
        return Side(op, rotation(op, other), number, signs)
    return tuple(side(i + 1, op, r.operands[i ^ 1]) for i, op in enumerate(r.operands))


def side_of(r: Recipe, number: int) -> Side:
    """ That of operand Q<number>. """
    return sides_of(r)[number - 1]


def idle(side: Side) -> bool:
    """ Whether it leaves a matrix as it is. """
    return not (side.op or side.turn)


# -----------------------------------------------------------------------------
# where a kernel writes


def values(x: Tensor, rows: int, columns: int, side: Side | None) -> Out | None:
    """ Room for one orientation of x as values, its columns rounded up to whole rotations. """
    if side is None:
        return None
    columns = up(columns, side.turn)
    return Out(x.new_empty(rows, columns), None, None, columns)


def packed_bytes(rows: int, columns: int, side: Side) -> int:
    return sum(size for size, _ in _parts(rows, columns, side))


def _parts(rows: int, columns: int, side: Side) -> list[tuple[int, tuple[int, int]]]:
    """ Bytes, a multiple of 16, and shape of codes, inner and outer scales; rows are padded to 16 values. """
    op, columns = side.op, up(up(columns, side.turn), 16)
    height, width = op.block
    blocks = up(rows, height) // height
    # one outer scale in all, or none
    outer = (blocks, up(columns, op.outer) // op.outer) if op.outer > 0 else (-op.outer, 1)
    shapes = [(rows, columns * op.bits // 8), (blocks, up(columns, width) // width), outer]
    sizes = [shapes[0][0] * shapes[0][1], shapes[1][0] * shapes[1][1], 4 * shapes[2][0] * shapes[2][1]]
    return [(up(size, 16), shape) for size, shape in zip(sizes, shapes)]


def unpacked(buffer: Tensor, rows: int, columns: int, side: Side) -> Out:
    """ One buffer of packed_bytes() as codes, inner and outer scales, the outer one () for one in all. """
    sizes = [size for size, _ in _parts(rows, columns, side)]
    return _in_memory(buffer.split(sizes), rows, columns, side)


def _in_memory(memory, rows: int, columns: int, side: Side) -> Out:
    """ Three pieces of memory, as large as _parts() says, as codes and scales. """
    parts = zip(memory, _parts(rows, columns, side), (torch.uint8, torch.uint8, torch.float32))
    code, inner, outer = (piece.view(kind)[: shape[0] * shape[1]].view(shape)
                          for piece, (_, shape), kind in parts)
    if side.op.outer == 0:
        outer = None
    elif side.op.outer < 0:
        outer = outer[0, 0]
    return Out(code, inner, outer, up(up(columns, side.turn), 16))


def room(x: Tensor, rows: int, columns: int, side: Side | None) -> tuple[Tensor, Out | None]:
    """ A buffer for codes and scales, and its parts. """
    if side is None:
        return x.new_empty(0, dtype=torch.uint8), None
    buffer = torch.empty(packed_bytes(rows, columns, side), dtype=torch.uint8, device=x.device)
    return buffer, unpacked(buffer, rows, columns, side)


def saved(r: Recipe, x: Tensor, N: int, C: int, save: bool, backend: str) -> list[tuple[Tensor, Out | None]]:
    """
    Room for what the backward pass needs, Q4 of W^T, Q6 of X^T and its outlier channels: one tensor of values
    or of codes and scales each, and the Out in it.
    """
    T, K = x.shape
    rooms = []
    for rows, columns, side in saved_sides(r, T, K, N, C):
        codes = as_codes(side, backend)
        if not save or rows == 0:
            rooms.append((x.new_empty(0, dtype=torch.uint8 if codes else x.dtype), None))
        elif codes:
            rooms.append(room(x, rows, columns, side))
        else:
            out = values(x, rows, columns, side)
            rooms.append((out.data, out))
    return rooms


def saved_sides(r: Recipe, T: int, K: int, N: int, C: int) -> list[tuple[int, int, Side]]:
    """ Rows, columns before rotation, and Side of the three. A rotated forward pass leaves more rows. """
    sides = sides_of(r)
    return [(up(K, inherited(r, r.dx_w)), N, sides[3]), (up(K, inherited(r, r.dw_x)), T, sides[5]),
            (C, T, Side(fp8(r) if r.dw_x else None))]


def as_codes(side: Side, backend: str) -> bool:
    """ Whether what is kept for the backward pass is codes and scales. """
    return backend == "native" or backend == "packed" and side.op is not None and not no_codes(side.op)


def operand(out: Out, op) -> tuple:
    """ Codes and scales as gemms.py takes them: squares share a scale there, rows do not. """
    inner, outer = out.inner, out.outer
    if op.block[0] > 1:
        inner = inner.repeat_interleave(op.block[0], 0)[: out.data.shape[0]].contiguous()
        if outer is not None and outer.dim():
            outer = outer.repeat_interleave(op.block[0], 0)[: out.data.shape[0]].contiguous()
    return (out.data, inner) if op.grid == "e4m3" else (out.data, inner, outer)


def quantized(x: Tensor, op: Operand) -> Quantized:
    """ quant.quantize(x, op), to nearest, by the kernels. """
    side = Side(op)
    # each in memory of its own: OsciReset keeps the scales, and codes with them would double what that costs
    memory = [torch.empty(size, dtype=torch.uint8, device=x.device) for size, _ in _parts(*x.shape, side)]
    out = _in_memory(memory, *x.shape, side)
    round_pair(x.contiguous(), side, None, out, None, torch.zeros(4, dtype=torch.int64, device=x.device), 0)
    return Quantized(unpack(out, op, x.shape[1], torch.uint8), out.inner, out.outer, op)


def fp8(r: Recipe):
    """ The format of a recipe's outlier channels; None, as everywhere, where they stay in bf16. """
    return None if r.outlier == "bf16" else r.outlier


def keep_of(channels: Tensor, K: int) -> Tensor:
    """ int16 (K,): 0 for outlier channels, -1, all bits, for the others. """
    return torch.full((K,), -1, dtype=torch.int16, device=channels.device).index_fill_(0, channels, 0)


# -----------------------------------------------------------------------------
# emulate and packed


def emulate_forward(r: Recipe, x: Tensor, weight: Tensor, channels: Tensor, counter: Tensor, layer: int,
                    save: bool, backend: str):
    """ As quant.linear_forward -> y, dx_w, dw_x, dw_x8, see saved(), and the trust masks. """
    (T, K), N, C, dtype = x.shape, weight.shape[0], channels.numel(), x.dtype
    x, weight = x.contiguous(), weight.contiguous() if r.y_w else weight.to(dtype).contiguous()
    sides = sides_of(r)
    # a multiple of 16, as K mostly is: the same compiled kernel for every layer
    wide = up(K, sides[0].turn) + up(C, 16)
    keep = keep_of(channels, K) if C else None
    x_hat, w_hat = (t.new_empty(len(t), wide, dtype=dtype) if C or not idle(side) else None
                    for t, side in ((x, sides[0]), (weight, sides[1])))
    rooms = saved(r, x, N, C, save, backend)
    dx_w, dw_x, dw_x8 = (out for _, out in rooms)
    masks = [torch.empty((len(t), up(K, side.turn)) if r.trust and save and side.op else 0, dtype=torch.bool,
                         device=x.device) for t, side in ((x, sides[0]), (weight, sides[1]))]
    # dX sees the whole weight; where it does not start from the rounded one, it is the original
    whole = bool(r.dx_w and r.align)

    for t, hat, row, col, out, mask, align in (
            (x, x_hat, sides[0], sides[5], dw_x, masks[0], bool(r.dw_x and r.align)),
            (weight, w_hat, sides[1], sides[3], dx_w, masks[1], whole)):
        trust = mask.view(torch.uint8) if mask.numel() else None
        row_out = None if hat is None else Out(hat, None, None, wide, trust)
        if out and t is weight and not whole and (C or not r.dx_w):
            round_pair(t if r.dx_w else t.to(dtype), None, col, None, out, counter, layer)
            out = None
        round_pair(t, row if row_out else None, col if out else None, row_out, out, counter, layer,
                   align=align, keep=keep)

    if C:
        eights = [Out(hat[:, K : K + C], None, None, wide) for hat in (x_hat, w_hat)]
        for hat in (x_hat, w_hat):
            hat[:, K + C :].zero_()
        chosen_x, chosen_w = (t.index_select(1, channels) for t in (x, weight))
        eight = fp8(r)
        kept = Side(eight if r.dw_x else None) if save else None
        round_pair(chosen_x, Side(eight if r.y_x else None), kept, eights[0], dw_x8, counter, layer,
                   align=bool(r.dw_x and r.align))
        # the rows of dx_w that are outlier channels, made again from the FP8 weight
        again = save and whole
        round_pair(chosen_w, Side(eight if r.y_w else None), sides[3] if again else None, eights[1],
                   dx_w if again else None, counter, layer, align=True, lines=channels if again else None)
    y = F.linear(x if x_hat is None else x_hat, weight.to(dtype) if w_hat is None else w_hat)
    return y, *(buffer for buffer, _ in rooms), *masks


def emulate_backward(r: Recipe, dy: Tensor, dx_w: Tensor, dw_x: Tensor, dw_x8: Tensor, trust_x: Tensor,
                     trust_w: Tensor, channels: Tensor, counter: Tensor, layer: int, need_dx: bool,
                     need_dw: bool, K: int, backend: str):
    """ As quant.linear_backward -> dx, dw. """
    (T, N), C = dy.shape, channels.numel()
    sides = saved_sides(r, T, K, N, C)

    def kept(buffer: Tensor, which: int) -> Tensor:
        """ As values, made at the last moment, so that few of them are there at once. """
        rows, columns, side = sides[which]
        if not as_codes(side, backend):
            return buffer
        return unpack(unpacked(buffer, rows, columns, side), side.op, up(columns, side.turn), dy.dtype)

    row, col = side_of(r, 3) if need_dx else None, side_of(r, 5) if need_dw else None
    if row and idle(row):
        row = None
    extra = Side(fp8(r) if r.dw_dy else None) if need_dw and C else None
    a, at, at8 = values(dy, T, N, row), values(dy, N, T, col), values(dy, N, T, extra)
    round_pair(dy, row, col, a, at, counter, layer, extra=extra, extra_out=at8)
    dx, dw = dy.new_empty(0), dy.new_empty(0)
    if need_dx:
        dx = own_coordinates(r, F.linear(a.data if a else dy, kept(dx_w, 0)), trust_x, r.dx_w, K, counter)
    if need_dw:
        dw = own_coordinates(r, F.linear(at.data, kept(dw_x, 1)), trust_w, r.dw_x, K, counter)
        if extra:
            dw.index_copy_(1, channels, F.linear(at8.data, kept(dw_x8, 2)))
    return dx, dw


def own_coordinates(r: Recipe, grad: Tensor, trust: Tensor, other, K: int, counter: Tensor) -> Tensor:
    """ A gradient that was made with Q4 or Q6 (other): its trusted part, without the forward's rotation. """
    forward, turned = side_of(r, 1), inherited(r, other) > 0
    if not trust.numel() and not turned:
        return grad
    mask = trust.view(torch.uint8) if trust.numel() else None
    if not forward.turn:
        return grad * mask
    return turn_back(grad, mask, forward, K, turned, counter)


# -----------------------------------------------------------------------------
# what can run


def emulate_problem(r: Recipe) -> str:
    """ Why there is no kernel for this recipe, or "". """
    for number, op in enumerate((*r.operands, fp8(r)), 1):
        if problem := op and no_kernel(op):
            return f"operand Q{number}: {problem}" if number < 7 else f"outlier channels: {problem}"
    if fp8(r) and (problem := no_lines(fp8(r))):
        return f"outlier channels: {problem}"
    for first, second, name in ((r.y_x, r.dw_x, "Q6"), (r.y_w, r.dx_w, "Q4")):
        if rotation(r.y_x, r.y_w) and r.align and second and not first:
            return f"operand {name}: no kernel for what the forward pass rotates and does not round"
    if r.outlier and r.align and r.dx_w and (problem := no_lines(r.dx_w)):
        return f"operand Q4, with outlier channels: {problem}"
    return ""


def native_problem(r: Recipe) -> str:
    """ Why the FP4 tensor cores cannot run this recipe, or "". """
    if r.trust or rotation(r.y_x, r.y_w):
        return "the forward pass is rotated or has trust masks"
    for number, op in enumerate(r.operands, 1):
        if op is None or op.grid != "e2m1":
            return f"operand Q{number} is not FP4"
        if op.scale == "e4m3" and (op.block[1] != 16 or op.outer not in (128, -1)):
            return f"operand Q{number} has scales that the tensor cores do not read"
        if op.scale == "ue5m3" or no_codes(op):
            return f"operand Q{number} has scales that the tensor cores do not read"
        if op.scale == "e8m0" and op.block != (1, 32):
            return f"operand Q{number} has other blocks than 1x32 under its power-of-two scales"
    for gemm, a, b in (("Y", r.y_x, r.y_w), ("dX", r.dx_dy, r.dx_w), ("dW", r.dw_dy, r.dw_x)):
        if a.scale != b.scale:
            return f"the operands of {gemm} have scales of two formats"
    if r.outlier and (not fp8(r) or (r.outlier.grid, r.outlier.scale, r.outlier.block) !=
                      ("e4m3", "e8m0", (1, 32))):
        return "outlier channels are not MXFP8"
    return emulate_problem(r)


# -----------------------------------------------------------------------------
# native


def native_forward(r: Recipe, x: Tensor, weight: Tensor, channels: Tensor, counter: Tensor, layer: int,
                   save: bool, _backend: str):
    """ As quant.linear_forward -> y, and one buffer each of codes and scales for dx_w, dw_x, dw_x8. """
    (T, K), N, C = x.shape, weight.shape[0], channels.numel()
    x, weight = x.contiguous(), weight.contiguous()
    keep = keep_of(channels, K) if C else None
    x_row, w_row, _, w_side, _, x_side = sides_of(r)
    eight = Side(r.outlier)
    rooms = saved(r, x, N, C, save, "native")
    dx_w_out, dw_x_out, dw_x8_out = (out for _, out in rooms)
    x4, w4 = room(x, T, K, x_row)[1], room(weight, N, K, w_row)[1]
    round_pair(x, x_row, x_side if save else None, x4, dw_x_out, counter, layer, align=r.align,
               keep=keep)
    if save and not r.align:
        round_pair(weight, None, w_side, None, dx_w_out, counter, layer)
    aligned = save and r.align
    back, back_out = (w_side, dx_w_out) if aligned else (None, None)
    round_pair(weight, w_row, back, w4, back_out, counter, layer, align=r.align, keep=keep)
    if C:
        x8, w8 = (room(t, t.shape[0], C, eight)[1] for t in (x, weight))
        round_pair(x.index_select(1, channels), eight, eight if save else None, x8, dw_x8_out, counter, layer,
                   align=r.align)
        round_pair(weight.index_select(1, channels), eight, back, w8, back_out, counter, layer, align=True,
                   lines=channels if aligned else None)
    outliers = (operand(x8, r.outlier), operand(w8, r.outlier)) if C else (None, None)
    y = nvfp4_gemm(operand(x4, r.y_x), operand(w4, r.y_w), *outliers, dtype=x.dtype)
    return y, *(buffer for buffer, _ in rooms), *(x.new_empty(0, dtype=torch.bool) for _ in range(2))


def native_backward(r: Recipe, dy: Tensor, dx_w: Tensor, dw_x: Tensor, dw_x8: Tensor, _trust_x: Tensor,
                    _trust_w: Tensor, channels: Tensor, counter: Tensor, layer: int, need_dx: bool,
                    need_dw: bool, K: int, _backend: str):
    """ As quant.linear_backward -> dx, dw. K tells the shape of what the buffers hold. """
    (T, N), C = dy.shape, channels.numel()
    row, col = side_of(r, 3) if need_dx else None, side_of(r, 5) if need_dw else None
    extra = Side(r.outlier) if need_dw and C else None
    a, at, at8 = room(dy, T, N, row)[1], room(dy, N, T, col)[1], room(dy, N, T, extra)[1]
    round_pair(dy, row, col, a, at, counter, layer, extra=extra, extra_out=at8)
    dx, dw = dy.new_empty(0), dy.new_empty(0)
    if need_dx:
        w = unpacked(dx_w, K, N, side_of(r, 4))
        dx = nvfp4_gemm(operand(a, r.dx_dy), operand(w, r.dx_w), dtype=dy.dtype)
    if need_dw:
        x = unpacked(dw_x, K, T, side_of(r, 6))
        dw = nvfp4_gemm(operand(at, r.dw_dy), operand(x, r.dw_x), dtype=dy.dtype)
        if C:
            x8 = unpacked(dw_x8, C, T, extra)
            dw8 = mxfp8_gemm(operand(at8, r.outlier), operand(x8, r.outlier), dtype=dy.dtype)
            dw.index_copy_(1, channels, dw8)
    return dx, dw

"""
The linear layer of quant.py: three GEMMs, six operands, autograd, torch.compile.

reference() below writes one training step out operand by operand; the layer is compared with it, and with
nn.Linear where nothing is rounded, bit for bit. Averages over many backward passes are compared within a
bound that is computed from their own spread. Every docstring names a bug that the test would catch.
"""
import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from build import only
from codes import E4M3, decode, quantize
from noise import SIGN_STREAMS, Counter, random_signs, uniform
from quant import ROW, Operand, QuantLinear, Recipe, fake_quantize, hadamard
from recipes import MXFP8, NEAREST, RECIPES, STOCHASTIC

_, DX_SIGNS, DW_SIGNS = SIGN_STREAMS
BASE, FULL = RECIPES["tetrajet_base"], RECIPES["tetrajet_full"]
CHANNELS = torch.tensor([1, 4, 7, 16, 17])      # not a multiple of 32


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer_of(recipe: Recipe, K: int = 20, N: int = 18, bias: bool = False, dtype: torch.dtype = torch.float32,
             channels: Tensor | None = None, counter: Counter | None = None, layer: int = 3,
             backend: str = "reference") -> QuantLinear:
    """ A layer with fixed weights, at step 5 of a run with seed 1. """
    if counter is None:
        counter = Counter(seed=1)
        counter.set(5)
    linear = QuantLinear(K, N, bias, recipe=recipe, layer=layer, counter=counter, dtype=dtype,
                         outliers=0 if channels is None else len(channels), backend=backend)
    with torch.no_grad():
        linear.weight.copy_(randn(N, K, seed=10))
        if bias:
            linear.bias.copy_(randn(N, seed=11))
    if channels is not None:
        linear.set_channels(channels)
    return linear


def plain(linear: QuantLinear) -> nn.Linear:
    """ nn.Linear with the same parameters. """
    other = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None,
                      dtype=linear.weight.dtype)
    other.load_state_dict({k: v for k, v in linear.state_dict().items() if k != "channels"})
    return other


def run(module: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """ One forward and backward pass: y and the gradients. """
    module.zero_grad()
    x = x.detach().requires_grad_()
    y = module(x)
    y.backward(dy)
    out = {"y": y.detach(), "dx": x.grad, "dw": module.weight.grad}
    return out | ({"db": module.bias.grad} if module.bias is not None else {})


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def reference(linear: QuantLinear, x: Tensor, dy: Tensor, multiply=F.linear) -> dict[str, Tensor]:
    """
    y, dx, dw of a layer without bias, for x (T, K) and dy (T, N), as Recipe describes them. multiply takes
    the two operands of each product that has a rounded one, float32.
    """
    r, w, state = linear.recipe, linear.weight.detach(), linear.counter.state
    out = linear.channels if linear.split else linear.channels[:0]

    def rounded(t, number):
        op = r.operands[number - 1]
        noise = uniform(t.shape, state, linear.layer, number) if op and op.rounding == "sr" else None
        return fake_quantize(t, op, noise) if op else t.float()

    def rotated(t, product):
        n = r.rotate[product]
        return hadamard(t, random_signs(n, state, linear.layer, SIGN_STREAMS[product])) if n else t

    def in_fp8(t, on):
        return fake_quantize(t.contiguous(), r.outlier) if on else t.float()

    def product(a, b, *ops):
        return multiply(a, b) if any(ops) else F.linear(a.to(x.dtype), b.to(x.dtype)).float()

    x4, w4 = x.clone(), w.clone()
    x4[:, out] = w4[:, out] = 0
    x_hat, w_hat = rounded(x4, 1), rounded(w4, 2)
    x8, w8 = ((in_fp8(t[:, out], op) for t, op in ((x, r.y_x), (w, r.y_w))) if len(out)
              else (x[:, out], w[:, out]))
    y = multiply(x_hat, w_hat) + multiply(x8, w8) if len(out) else product(x_hat, w_hat, r.y_x, r.y_w)

    # dX: every channel in FP4, the outlier channels from their FP8 values
    w_back = w_hat.clone() if r.align and r.dx_w else w.float()
    if r.align and r.dx_w and len(out):
        w_back[:, out] = w8
    dx = product(rounded(rotated(dy, 1), 3),
                 rounded(rotated(w_back.t().contiguous(), 1), 4), r.dx_dy, r.dx_w)
    # dW: the outlier columns of FP8 operands, not rotated
    x_back = x_hat if r.align and r.dw_x else x4.float()
    dyt = dy.t().contiguous()
    dw = product(rounded(rotated(dyt, 2), 5),
                 rounded(rotated(x_back.t().contiguous(), 2), 6), r.dw_dy, r.dw_x)
    if len(out):
        x8t = (x8 if r.align and r.dw_x else x[:, out]).t().contiguous()
        dw[:, out] = product(in_fp8(dyt, r.dw_dy), in_fp8(x8t, r.dw_x), r.dw_dy, r.dw_x)
    if multiply is not F.linear:
        return {"y": y, "dx": dx, "dw": dw}
    return {"y": y.to(x.dtype), "dx": dx.to(x.dtype), "dw": dw.to(x.dtype).to(w.dtype)}


# -----------------------------------------------------------------------------
# nothing rounded, one thing rounded, everything rounded


@pytest.mark.parametrize("autocast", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("shape", ((24, 20), (2, 12, 20), (20,)))
def test_all_off_is_nn_linear(shape, bias, dtype, autocast):
    """
    Catches a bias that is never added, an output in another dtype, and a cast that autocast would not make.
    """
    linear = layer_of(Recipe(), bias=bias, dtype=dtype)
    x, dy = randn(*shape, dtype=dtype), randn(*shape[:-1], 18, seed=1)
    results = []
    for module in (linear, plain(linear)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            results.append(run(module, x, dy.bfloat16() if autocast else dy.to(dtype)))
    assert equal(*results)
    assert set(linear.state_dict()) - set(plain(linear).state_dict()) == {"channels"}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("number, gemm", ((1, "y"), (2, "y"), (3, "dx"), (4, "dx"), (5, "dw"), (6, "dw")))
def test_each_quantizer_changes_its_own_gemm_only(number, gemm, dtype):
    """
    Catches two operands swapped, and a rounded tensor that another GEMM picks up where the original belongs.
    """
    linear = layer_of(only(BASE, [number]), K=96, N=80, dtype=dtype)
    x, dy = randn(64, 96, dtype=dtype), randn(64, 80, seed=1, dtype=dtype)
    mine, theirs = run(linear, x, dy), run(plain(linear), x, dy)
    # nn.Linear's own dW is of transposed views, which some CPUs add up in another order in bf16
    assert torch.allclose(theirs["dw"], dw := F.linear(dy.t().contiguous(), x.t().contiguous()), 2**-7, 2**-6)
    theirs["dw"] = dw
    for name in ("y", "dx", "dw"):
        assert torch.equal(mine[name], theirs[name]) == (name != gemm)
    assert equal(mine, reference(linear, x, dy))


RELEASED = RECIPES["tetrajet_released"]
SQUARE = Operand(block=(16, 16), outer=-1)
STRIP = Operand(outer=-1, rounding="sr", rule="nearest")
PER_TENSOR = Recipe(replace(STRIP, rounding="rtn"), SQUARE, STRIP, SQUARE, STRIP,
                    replace(STRIP, rounding="rtn"), align=False, rotate=(0, 0, 16))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("T, K, N", ((24, 20, 18), (1, 17, 33), (128, 256, 48), (150, 140, 130)))
@pytest.mark.parametrize("recipe",
                         (BASE, replace(BASE, align=False), RELEASED, PER_TENSOR, only(BASE, [1, 3, 6])),
                         ids=("base", "not aligned", "released", "per tensor", "1 3 6"))
def test_one_step_is_the_reference(recipe, T, K, N, dtype):
    """
    Catches signs that differ within a GEMM, noise of another operand, a missed alignment, a ragged axis.
    """
    linear = layer_of(recipe, K, N, dtype=dtype)
    x, dy = randn(T, K, dtype=dtype), randn(T, N, seed=1, dtype=dtype)
    assert equal(run(linear, x, dy), reference(linear, x, dy))


def by_row(x: Tensor) -> Tensor:
    """ NVFP4 with an outer scale for each row of x (M, K), written anew, for K in 16s and without ties. """
    M, K = x.shape
    blocks, six, top = x.contiguous().view(M, K // 16, 16), torch.tensor(6.0), torch.tensor(448.0)
    outer = (x.abs().amax(1) / top / six)[:, None, None].clamp(min=1e-30)
    scale = (blocks.abs().amax(2, keepdim=True) / outer / six).to(torch.float8_e4m3fn).float() * outer
    y, grid = blocks * torch.where(scale > 0, 1 / scale, 0), torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6])
    nearest = grid[torch.bucketize(y.abs(), (grid[1:] + grid[:-1]) / 2)]
    return (nearest.copysign(y) * scale).view(M, K)


@pytest.mark.parametrize("align", (False, True))
def test_a_scale_for_each_row_and_for_each_column_of_the_transposed(align):
    """
    Catches a transposed copy with the scales of the rows that it came from, and one scale for several rows:
    rows and columns are of sizes so different that no other scale fits. TransformerEngine #2931, #3206.
    """
    linear = layer_of(Recipe(*[Operand(outer=ROW)] * 6, align=align), K=160, N=144)
    x, dy = (randn(T, K, seed=K) * torch.exp2(2 * randn(T, 1)) * torch.exp2(2 * randn(1, K, seed=1))
             for T, K in ((48, 160), (48, 144)))
    w, x_hat = linear.weight.detach(), by_row(x)
    w_hat = by_row(w)
    x_t, w_t = ((x_hat if align else x).T, (w_hat if align else w).T)
    assert equal(run(linear, x, dy), {"y": F.linear(x_hat, w_hat), "dx": F.linear(by_row(dy), by_row(w_t)),
                                      "dw": F.linear(by_row(dy.T), by_row(x_t))})


@pytest.mark.parametrize("inside", (False, True))
@pytest.mark.parametrize("recipe, channels", ((BASE, None), (FULL, CHANNELS)), ids=("base", "full"))
def test_autocast_rounds_nothing_twice(recipe, channels, inside):
    """
    Catches autocast inside the op, which would cast the rounded operands to bf16, in backward by where it is.
    """
    linear = layer_of(recipe, K=96, N=80, channels=channels)
    x, dy = randn(64, 96), randn(64, 80, seed=1).bfloat16()
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(leaf)
        if inside:
            y.backward(dy)
    if not inside:
        y.backward(dy)
    expected = reference(linear, x.bfloat16(), dy)
    # the master weight is rounded as it is, in float32, and its gradient is float32
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected["y"])
    assert torch.equal(leaf.grad, expected["dx"].float()) and torch.equal(linear.weight.grad, expected["dw"])


def test_bias():
    """ Catches a bias that is added twice, rounded, or without a gradient. """
    x, dy = randn(2, 12, 20), randn(2, 12, 18, seed=1)
    with_bias, without = layer_of(BASE, bias=True), layer_of(BASE)
    a, b = run(with_bias, x, dy), run(without, x, dy)
    assert torch.equal(a["y"], b["y"] + with_bias.bias) and torch.equal(a["dx"], b["dx"])
    assert torch.equal(a["db"], run(plain(with_bias), x, dy)["db"])


@pytest.mark.parametrize("number, gemm", ((3, "dx"), (4, "dx"), (5, "dw"), (6, "dw")))
def test_rotation_cancels(number, gemm):
    """
    Catches an operand that stays unrotated because only the other one is rounded:
    the product would be garbage.
    """
    name = ("y_x", "y_w", "dx_dy", "dx_w", "dw_dy", "dw_x")[number - 1]
    recipe = Recipe(**{name: Operand(grid="e4m3")}, rotate=(0, 16, 0) if gemm == "dx" else (0, 0, 16))
    linear = layer_of(recipe)
    x, dy = randn(24, 20), randn(24, 18, seed=1)
    got = run(linear, x, dy)[gemm].double()
    a, b = (dy, linear.weight.detach().t()) if gemm == "dx" else (dy.t(), x.t())
    stream = DX_SIGNS if gemm == "dx" else DW_SIGNS
    signs = random_signs(16, linear.counter.state, linear.layer, stream)
    # E4M3 keeps each rotated value to 2^-4 of itself, or of the smallest normal number where it is smaller
    rotated = [hadamard(t.contiguous(), signs).double().abs() for t in (a, b)]
    bound = 2.0**-4 * (rotated[0] @ rotated[1].t()) * (1 + 2.0**-8) + 1e-3
    exact = a.double() @ b.double().t()
    assert ((got - exact).abs() <= bound).all()
    assert bound.square().mean() < exact.square().mean() / 10
    assert (got - exact).abs().max() > 0


# -----------------------------------------------------------------------------
# the mean of many backward passes
#
# One pass costs milliseconds, most of them overhead. So COPIES passes share one call of a layer that has
# COPIES times the rows in both operands of the GEMM in question; every row is rounded with noise of its own.
# The number of rows is the same in both operands, because it is between rows of equal index that the
# released code shares noise.

COPIES = 20


def passes(recipe: Recipe, gemm: str, calls: range) -> tuple[Tensor, dict[str, Tensor]]:
    """
    Passes through the same tiny GEMM, dX or dW, ragged in every axis.

    out  the results, float32 (len(calls) * COPIES, 20, 20); and what they would be without rounding in
         backward: "aligned" with the forward's rounded tensors, "original" without, "clipped" the mean
         under clipping scales, float64, of the same shape
    """
    rows, inner = 20, 18 if gemm == "dx" else 24
    many = rows * COPIES
    if gemm == "dx":
        linear = layer_of(only(recipe, [2, 3, 4]), K=many, N=inner)
        w, dy = randn(inner, rows).repeat(1, COPIES), randn(rows, inner, seed=1).repeat(COPIES, 1)
        linear.weight = nn.Parameter(w, requires_grad=False)
        x = torch.zeros(many, many, requires_grad=True)
        a, b, b_hat = dy, w.t(), fake_quantize(w, NEAREST).t()
    else:
        linear = layer_of(only(recipe, [1, 5, 6]), K=many, N=many)
        x, dy = randn(inner, rows).repeat(1, COPIES), randn(inner, rows, seed=1).repeat(1, COPIES)
        a, b, b_hat = dy.t(), x.t(), fake_quantize(x, NEAREST).t()

    def copies_of(product):
        return product.view(COPIES, rows, COPIES, rows).diagonal(dim1=0, dim2=2).permute(2, 0, 1)

    target = {"aligned": copies_of(a.double() @ b_hat.double().t()),
              "original": copies_of(a.double() @ b.double().t())}
    results, clipped = [], []
    for step in calls:
        linear.counter.set(step)
        grad, = torch.autograd.grad(linear(x), x if gemm == "dx" else linear.weight, dy)
        results.append(copies_of(grad))
        if recipe is RELEASED:
            stream = DX_SIGNS if gemm == "dx" else DW_SIGNS
            signs = random_signs(16, linear.counter.state, linear.layer, stream)
            a_c, b_c = (clip(hadamard(t.contiguous(), signs), recipe.dx_dy).double() for t in (a, b_hat))
            clipped.append(copies_of(a_c @ b_c.t()))
    target = {k: v.repeat(len(calls), 1, 1) for k, v in target.items()}
    if clipped:
        target["clipped"] = torch.cat(clipped)
    return torch.cat(results), target


def clip(x: Tensor, op: Operand) -> Tensor:
    """ The mean of stochastic rounding: x, but no larger than the grid's top in its block's scale. """
    q = quantize(x, replace(op, rounding="rtn"))
    scale = decode(q.inner, E4M3) * q.outer.repeat_interleave(8, 1)[:, : q.inner.shape[1]]
    top = 6 * scale.repeat_interleave(16, 1)
    return torch.maximum(torch.minimum(x, top), -top)


def bias_in_sigmas(error: Tensor) -> Tensor:
    """ The mean of each entry's error (n, 20, 20), in standard deviations of that mean. """
    return error.mean(0) / (error.std(0) / math.sqrt(len(error)))


@pytest.mark.parametrize("gemm", ("dx", "dw"))
def test_gradient_is_unbiased(gemm):
    """
    Catches clipping, noise shared by the two operands, noise repeated from step to step,
    signs that differ, and a Q4 or Q6 that starts from the original tensor: E[dX] = dY Q2(W)
    and E[dW] = dY^T Q1(X), for every entry.
    """
    counts = [10**k for k in range(5)]
    results, target = passes(BASE, gemm, range(sum(counts) // COPIES + 1))
    error = results.double() - target["aligned"]
    squared, start = [], 0
    for n in counts:
        squared.append(float(error[start:start + n].mean(0).square().sum()))
        start += n
    # entries share rows of noise: the covariance S of one pass gives |error|^2 a variance of 2 tr S^2.
    # From n passes, tr S^2 comes out too large by (tr S)^2 / n
    deviation = error.flatten(1)
    covariance = deviation.t() @ deviation / len(error)
    trace = float(covariance.trace())
    spread = math.sqrt(2 * (float(covariance.square().sum()) - trace**2 / len(error))) / trace / 2

    # every entry, at the end: five standard deviations for each of 400
    assert bias_in_sigmas(error).abs().max() < 5
    # all entries together: the error is what is left of the noise, at the end and on the way there
    assert abs(math.sqrt(squared[-1] * counts[-1] / trace) - 1) < 4 * spread
    logs = np.log(counts)
    slope = np.polyfit(logs, np.log(squared) / 2, 1)[0]
    assert abs(slope + 0.5) < 4 * spread / math.sqrt(((logs - logs.mean()) ** 2).sum())
    # and the test can tell the rounded tensor from the original
    assert bias_in_sigmas(results.double() - target["original"]).abs().max() > 20


@pytest.mark.parametrize("gemm", ("dx", "dw"))
def test_without_alignment_the_mean_is_that_of_the_originals(gemm):
    """ Catches an align=False that does nothing. """
    results, target = passes(replace(BASE, align=False), gemm, range(100))
    assert bias_in_sigmas(results.double() - target["original"]).abs().max() < 5
    assert bias_in_sigmas(results.double() - target["aligned"]).abs().max() > 10


@pytest.mark.parametrize("gemm", ("dx", "dw"))
def test_the_released_gradient_is_biased(gemm):
    """
    Catches a quiet repair of the released kernels' rule: the mean has to be that of clipped block maxima.
    """
    results, target = passes(RELEASED, gemm, range(150))
    assert bias_in_sigmas(results.double() - target["clipped"]).abs().max() < 5
    # projected on the right gradient it falls short, by what clipping predicts
    exact = target["aligned"]
    norm = exact.square().sum((1, 2))
    projection, predicted = ((t * exact).sum((1, 2)) / norm for t in (results.double(), target["clipped"]))
    sigma = (projection - predicted).std() / math.sqrt(len(results))
    assert abs(projection.mean() - predicted.mean()) < 5 * sigma
    assert 1 - projection.mean() > 10 * sigma


def rounded_weight(linear: QuantLinear) -> Tensor:
    """ Q4(W^T) as one backward pass used it: with dY = 1 and nothing else rounded, dX is it. """
    x = torch.zeros(linear.out_features, linear.in_features, requires_grad=True)
    return torch.autograd.grad(linear(x), x, torch.eye(linear.out_features))[0]


def test_noise_is_fresh():
    """ Catches noise that repeats in consecutive passes, in another layer, step, micro-step or rank. """
    recipe = Recipe(dx_w=STOCHASTIC)
    shared = Counter(seed=1)
    first, other = (layer_of(recipe, 128, 128, counter=shared, layer=i) for i in (3, 4))
    own = QuantLinear(128, 128, bias=False, recipe=recipe)
    own.load_state_dict(first.state_dict())
    rank = layer_of(recipe, 128, 128, counter=Counter(seed=1, rank=1))
    exact = first.weight.detach()
    samples = {"own": rounded_weight(own), "own again": rounded_weight(own), "first": rounded_weight(first),
               "other layer": rounded_weight(other), "rank": rounded_weight(rank)}
    assert torch.equal(rounded_weight(first), samples["first"])         # the same address, the same numbers
    shared.set(1)
    samples["next step"] = rounded_weight(first)
    shared.set(0, micro=1)
    samples["next micro-step"] = rounded_weight(first)
    errors = [(q.abs() - exact.abs()).double() for q in samples.values()]
    for i, a in enumerate(errors):
        for b in errors[:i]:
            # a sum of products with mean zero, in its own standard deviations
            assert abs((a * b).sum() / (a * b).square().sum().sqrt()) < 4


def test_own_counter_advances_in_training_only():
    """ Catches a layer that repeats its noise, and an evaluation that changes the training run. """
    own, shared = QuantLinear(20, 18, recipe=BASE), layer_of(BASE)
    x, before = randn(24, 20), shared.counter.state.clone()
    for _ in range(3):
        own(x), shared(x)
    assert own.counter.state.tolist()[1:3] == [3, 0]
    own.eval()(x)
    assert own.counter.state.tolist()[1:3] == [3, 0]
    assert torch.equal(shared.counter.state, before)


# -----------------------------------------------------------------------------
# outlier channels


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("T", (24, 150))
@pytest.mark.parametrize("recipe",
                         (FULL, replace(FULL, align=False), RELEASED,
                          *(only(FULL, [i]) for i in range(1, 7))),
                         ids=("full", "not aligned", "released", *(f"only {i}" for i in range(1, 7))))
def test_outlier_step_is_the_reference(recipe, T, dtype):
    """
    Catches outlier columns left in the FP4 GEMM, rotated in dW, or rounded where their operand is off.
    """
    linear = layer_of(recipe, K=140, N=36, dtype=dtype, channels=CHANNELS)
    x, dy = randn(T, 140, dtype=dtype), randn(T, 36, seed=1, dtype=dtype)
    # a power of two as scale and 3 mantissa bits round twice to the same,
    # but for values far below their block
    x[:, CHANNELS] *= 30 * torch.exp2(8 * randn(T, len(CHANNELS), seed=2)).to(dtype)
    assert equal(run(linear, x, dy), reference(linear, x, dy))


def test_outlier_channels_leave_the_others_in_their_blocks():
    """
    Catches columns cut out in place of being zeroed, which would move every later channel to another block.
    """
    linear = layer_of(FULL, K=140, N=36, channels=CHANNELS)
    x = randn(24, 140)
    x[:, CHANNELS] *= 30
    others = torch.ones(140, dtype=torch.bool).index_fill(0, CHANNELS, False)
    zeroed = x * others
    # without outliers in it, y is the sum of the FP4 part and of the skinny MXFP8 GEMM
    w = linear.weight.detach()
    fp4 = F.linear(fake_quantize(zeroed, NEAREST), fake_quantize(w * others, NEAREST))
    fp8 = F.linear(fake_quantize(x[:, CHANNELS], MXFP8), fake_quantize(w[:, CHANNELS], MXFP8))
    assert torch.equal(linear(x), fp4 + fp8)


def test_outlier_gradients():
    """ Catches dX without the outlier channels, and noise or rotation in the outlier columns of dW. """
    linear = layer_of(FULL, K=140, N=36, channels=CHANNELS)
    x, dy = randn(24, 140), randn(24, 36, seed=1)
    steps = []
    for step in (1, 2):
        linear.counter.set(step)
        steps.append(run(linear, x, dy))
    dy8 = fake_quantize(dy.t().contiguous(), MXFP8)
    x8 = fake_quantize(fake_quantize(x[:, CHANNELS], MXFP8).t().contiguous(), MXFP8)
    for out in steps:
        assert torch.equal(out["dw"][:, CHANNELS], F.linear(dy8, x8))
        # 18.7e-3 to 23.5e-3 of squared error in each operand:
        # the outlier channels of dX are as good as the others
        exact = dy @ linear.weight.detach()
        error = (out["dx"] - exact).square().mean(0) / exact.square().mean()
        assert error[CHANNELS].mean() < 2 * error.mean()
    assert not torch.equal(steps[0]["dx"], steps[1]["dx"])


def test_channels_are_state():
    """ Catches a split that a checkpoint does not bring back, and channels in the order they were chosen. """
    linear = QuantLinear(20, 18, recipe=FULL, outliers=5)
    assert not linear.split and linear.channels.tolist() == [-1] * 5
    linear.set_channels(CHANNELS.flip(0))
    assert linear.split and torch.equal(linear.channels, CHANNELS)

    other = QuantLinear(20, 18, recipe=FULL, outliers=5)
    other.load_state_dict(linear.state_dict())
    x = randn(24, 20)
    assert other.split and torch.equal(other(x), linear(x))
    model, other = nn.Sequential(linear), nn.Sequential(QuantLinear(20, 18, recipe=FULL, outliers=5))
    other.load_state_dict(model.state_dict())
    assert other[0].split
    other.load_state_dict(nn.Sequential(QuantLinear(20, 18, recipe=FULL, outliers=5)).state_dict())
    assert not other[0].split


def test_channels_not_chosen_yet_change_nothing():
    """ Catches index -1, which is the last channel, used before the choice is made. """
    x, dy = randn(24, 20), randn(24, 18, seed=1)
    linear = layer_of(FULL, channels=CHANNELS)
    linear.set_channels(torch.full((5,), -1))
    assert equal(run(linear, x, dy), run(layer_of(BASE), x, dy))


def test_squares_count_training_passes():
    """ Catches norms that evaluation adds to, or that count tokens of one axis only. """
    linear = layer_of(FULL)
    x = randn(2, 12, 20)
    linear.squares = torch.zeros(20)
    linear(x), linear(x)
    linear.eval()(x)
    assert torch.equal(linear.squares, 2 * x.square().flatten(0, 1).sum(0))


# -----------------------------------------------------------------------------
# shapes and edges


@pytest.mark.parametrize("recipe, channels", ((BASE, None), (FULL, CHANNELS)), ids=("base", "full"))
def test_layout_of_the_input(recipe, channels):
    """ Catches view() on a strided x or dY, and leading axes that are not tokens. """
    linear = layer_of(recipe, channels=channels)
    x, dy = randn(2, 12, 20), randn(2, 12, 18, seed=1)
    expected = run(linear, x, dy)
    strided = x.transpose(0, 2).contiguous().transpose(0, 2)
    strided_dy = dy.transpose(0, 2).contiguous().transpose(0, 2)
    assert not strided.is_contiguous() and equal(run(linear, strided, strided_dy), expected)
    flat = run(linear, x.view(24, 20), dy.view(24, 18))
    assert torch.equal(flat["y"], expected["y"].view(24, 18)) and torch.equal(flat["dw"], expected["dw"])
    # an expanded gradient, as y.sum() makes it
    y = linear(x)
    grad, = torch.autograd.grad(y.sum(), linear.weight)
    assert torch.equal(grad, run(linear, x, torch.ones(2, 12, 18))["dw"])
    row = run(linear, x[0, 0], dy[0, 0])
    assert row["y"].shape == (18,) and torch.equal(row["y"], linear(x[:1, 0])[0])


@pytest.mark.parametrize("recipe, channels", ((BASE, None), (FULL, CHANNELS)), ids=("base", "full"))
def test_zero_rows(recipe, channels):
    """ Catches 0/0 in padded tokens and dead rows, forward and backward. """
    linear = layer_of(recipe, channels=channels)
    x, dy = randn(150, 20), randn(150, 18, seed=1)
    x[3], dy[5] = 0, 0
    out = run(linear, x, dy)
    assert (out["y"][3] == 0).all() and (out["dx"][5] == 0).all()
    assert all(t.isfinite().all() and t.count_nonzero() for t in out.values())
    # all of it zero, and a weight of zeros
    out = run(linear, torch.zeros_like(x), torch.zeros_like(dy))
    assert all((t == 0).all() for t in out.values())
    nn.init.zeros_(linear.weight)
    out = run(linear, x, dy)
    assert (out["y"] == 0).all() and (out["dx"] == 0).all() and out["dw"].isfinite().all()


@pytest.mark.parametrize("bad", (math.nan, math.inf))
@pytest.mark.parametrize("recipe, channels", ((BASE, None), (FULL, CHANNELS)), ids=("base", "full"))
def test_nan_and_inf_are_not_hidden(recipe, channels, bad):
    """ Catches a NaN that becomes code 7: the loss would stay finite and the run would go on. """
    linear = layer_of(recipe, channels=channels)
    for column in (0, 4):       # an FP4 channel and, under "full", an outlier channel
        x, dy = randn(24, 20), randn(24, 18, seed=1)
        clean = run(linear, x, dy)
        x[3, column] = bad
        out = run(linear, x, dy)
        rows = torch.arange(24) != 3
        assert out["y"][3].isnan().all() and torch.equal(out["y"][rows], clean["y"][rows])
        assert out["dw"][:, column].isnan().all() and torch.equal(out["dx"], clean["dx"])
        x, dy[3, column] = randn(24, 20), bad
        out = run(linear, x, dy)
        assert torch.equal(out["y"], clean["y"])
        assert out["dx"][3].isnan().all() and torch.equal(out["dx"][rows], clean["dx"][rows])
        assert out["dw"][column].isnan().all()


# -----------------------------------------------------------------------------
# autograd, compilation, recomputation


@pytest.mark.skipif(torch.__version__ < "2.7", reason="PyTorch 2.6 compiles no layer")
@pytest.mark.parametrize("autocast", (False, True))
@pytest.mark.parametrize("recipe, channels", ((BASE, None), (FULL, CHANNELS)), ids=("base", "full"))
def test_compiled_gradient_is_the_eager_one(recipe, channels, autocast):
    """
    Catches a graph break, and random numbers that the compiler draws twice: signs would differ within a GEMM.
    """
    linear = layer_of(recipe, bias=True, channels=channels)
    torch._dynamo.reset()
    compiled = torch.compile(linear, backend="aot_eager")
    dy = randn(2, 12, 18, seed=1)
    for step in (5, 6):
        linear.counter.set(step)
        results = []
        for module in (linear, compiled):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                results.append(run(module, randn(2, 12, 20), dy.bfloat16() if autocast else dy))
        assert equal(*results)


@pytest.mark.parametrize("recipe", ("tetrajet_base", "ufp4"))
def test_a_copy_has_noise_of_its_own(recipe):
    """
    Catches: N copies of one layer, as nn.TransformerEncoder makes them, whose errors add up in place of
    averaging out; a model's counter that its copy does not share among its layers; a copy whose forward pass
    is rotated by other signs (ufp4), so that it is another function.
    """
    one = QuantLinear(20, 18, recipe=RECIPES[recipe])
    twin, x, dy = copy.deepcopy(one), randn(24, 20), randn(24, 18, seed=1)
    a, b = run(one, x, dy), run(twin, x, dy)
    assert torch.equal(a["y"], b["y"]) and not torch.equal(a["dx"], b["dx"])
    shared = Counter(3)
    model = torch.nn.Sequential(*(QuantLinear(20, 20, recipe=BASE, counter=shared) for _ in range(2)))
    again = copy.deepcopy(model)
    assert again[0].counter is again[1].counter is not shared
    assert torch.equal(again[0].counter.state, shared.state)


@pytest.mark.skipif(torch.__version__ < "2.7", reason="PyTorch 2.6 compiles no layer")
def test_compiled_layer_advances_its_own_counter():
    """ Catches a counter that tracing freezes: every compiled step would see the same noise. """
    eager = QuantLinear(20, 18, recipe=BASE)
    twin = copy.deepcopy(eager)
    twin.counter.state.copy_(eager.counter.state)
    torch._dynamo.reset()
    compiled = torch.compile(twin, backend="aot_eager")
    x, dy = randn(24, 20), randn(24, 18, seed=1)
    for step in (1, 2, 3):
        assert equal(run(eager, x, dy), run(compiled, x, dy))
        assert twin.counter.state[1] == step


@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("recipe, channels", ((BASE, None), (FULL, CHANNELS)), ids=("base", "full"))
def test_activation_checkpointing(recipe, channels, reentrant):
    """ Catches a recomputed forward pass that draws other numbers than the first one. """
    linear = layer_of(recipe, bias=True, channels=channels)
    x, dy = randn(24, 20), randn(24, 18, seed=1)
    expected = run(linear, x, dy)
    linear.zero_grad()
    leaf = x.clone().requires_grad_()
    y = checkpoint(linear, leaf, use_reentrant=reentrant)
    y.backward(dy)
    assert equal(expected, {"y": y.detach(), "dx": leaf.grad,
                            "dw": linear.weight.grad, "db": linear.bias.grad})


def test_a_layer_used_twice_before_backward():
    """ Catches saved tensors, or a counter, that the second use overwrites. """
    linear = layer_of(BASE)
    x1, x2, dy = randn(24, 20), randn(24, 20, seed=2), randn(24, 18, seed=1)
    linear.counter.set(1)
    first = run(linear, x1, dy)
    linear.counter.set(2)
    second = run(linear, x2, dy)

    linear.zero_grad()
    a, b = x1.clone().requires_grad_(), x2.clone().requires_grad_()
    linear.counter.set(1)
    y1 = linear(a)
    linear.counter.set(2)
    y2 = linear(b)
    linear.counter.set(3)
    torch.autograd.backward((y1, y2), (dy, dy))
    assert torch.equal(a.grad, first["dx"]) and torch.equal(b.grad, second["dx"])
    # and gradients add up
    assert torch.equal(linear.weight.grad, first["dw"] + second["dw"])


@pytest.mark.parametrize("recipe, channels", ((BASE, None), (FULL, CHANNELS)), ids=("base", "full"))
def test_gradients_nobody_asked_for(recipe, channels):
    """
    Catches a frozen weight, or an input without gradient, that changes the other gradient or gets one.
    """
    linear = layer_of(recipe, bias=True, channels=channels)
    x, dy = randn(24, 20), randn(24, 18, seed=1)
    expected = run(linear, x, dy)
    linear.zero_grad()
    linear(x).backward(dy)
    assert x.grad is None and torch.equal(linear.weight.grad, expected["dw"])

    linear.zero_grad()
    linear.weight.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    linear(leaf).backward(dy)
    assert linear.weight.grad is None and torch.equal(leaf.grad, expected["dx"])
    linear.zero_grad()
    linear(x).backward(dy)
    assert torch.equal(linear.bias.grad, expected["db"])
    with torch.no_grad():
        y = linear(x)
    assert not y.requires_grad and torch.equal(y, expected["y"])


def test_layers_on_their_own_have_their_own_noise():
    """
    Catches a default seed: in nn.Sequential(QuantLinear(...), QuantLinear(...)) both would round alike.
    """
    torch.manual_seed(0)
    a, b = QuantLinear(20, 18, recipe=BASE), QuantLinear(20, 18, recipe=BASE)
    torch.manual_seed(0)
    again = QuantLinear(20, 18, recipe=BASE)
    assert not torch.equal(a.counter.state, b.counter.state)
    assert torch.equal(again.counter.state, a.counter.state), "but the same after torch.manual_seed"
    b.load_state_dict(a.state_dict())
    x, dy = randn(24, 20), randn(24, 18)
    grads = []
    for layer in (a, b):
        layer(x).backward(dy)
        grads.append(layer.weight.grad)
    assert not torch.equal(*grads)

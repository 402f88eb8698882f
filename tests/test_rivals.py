"""
What defines each recipe, seen from outside: the tensors that its three GEMMs multiply. Every docstring names
a bug that the test would catch.
"""
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

import quant
import rivals
from build import only
from codes import decode, grid_number, quantize
from noise import SIGN_STREAMS, Counter, random_signs, uniform
from osci import rounded_weight
from quant import GRIDS, ROW, TENSOR, Operand, QuantLinear, Recipe, fake_quantize, hadamard, round_to_grid
from recipes import MXFP8, RECIPES, from_json
from rivals.__main__ import described, table, turned
from rivals.recipes import EDEN, NVFP4
from rivals.rules import FIXED_SIGNS, trust_mask

_, DX_SIGNS, DW_SIGNS = SIGN_STREAMS
NIBBLES = ("e2m1", "e1m2", "if4")

T, K, N = 64, 96, 80
NAMES = ("x", "w", "dy", "wt", "dyt", "xt")
four_bit = pytest.mark.parametrize("name", [n for n, r in RECIPES.items()
                                            if any(op and op.grid in NIBBLES for op in r.operands)])


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer_of(recipe: Recipe, layer: int = 3, seed: int = 1, step: int = 5, rank: int = 0) -> QuantLinear:
    counter = Counter(seed, rank)
    counter.set(step)
    linear = QuantLinear(K, N, False, recipe=recipe, layer=layer, counter=counter)
    with torch.no_grad():
        linear.weight.copy_(randn(N, K, seed=10))
    return linear


def multiplied(monkeypatch, recipe: Recipe, x: Tensor | None = None, **at) -> dict[str, Tensor]:
    """ What the three GEMMs of one pass multiply, by NAMES, and their results after all: y, dx, dw. """
    seen, gemm = [], quant.gemm
    monkeypatch.setattr(quant, "gemm", lambda a, b: (seen.extend((a, b)), gemm(a, b))[1])
    linear = layer_of(recipe, **at)
    x = (randn(T, K) if x is None else x).requires_grad_()
    y = linear(x)
    y.backward(randn(T, N, seed=1).to(y.dtype))
    monkeypatch.undo()
    return dict(zip(NAMES, seen)) | {"y": y.detach(), "dx": x.grad, "dw": linear.weight.grad}


def rms(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_are_those_of_the_linear(name):
    """
    Catches two operands of a GEMM that are rotated differently, a gradient left in rotated coordinates, and a
    scale that is forgotten: the results would be unrelated to the exact ones, or a factor away.
    """
    r = RECIPES[name]
    linear, x, dy = layer_of(r), randn(T, K).requires_grad_(), randn(T, N, seed=1)
    y = linear(x)
    y.backward(dy)
    w = linear.weight.detach()
    # two operands with relative squared errors of at most .03 each, in 8 bits much less. With trust masks
    # (Quartet) the forward pass clips an eighth of all values, and these get no gradient; a rounding of your
    # own may shrink as much
    clips = "trust" in r.around or any(op and op.rounding not in ("rtn", "sr") for op in r.operands)
    most = 0.5 if clips else max(0.3 if op.grid in NIBBLES else 0.06 for op in r.operands if op) if any(
        r.operands) else 0
    most = most or 1e-6
    for ours, exact in ((y.detach(), x.detach() @ w.t()), (x.grad, dy @ w), (linear.weight.grad, dy.t() @ x)):
        exact = exact.detach()
        assert rms(ours, exact) < most
        assert abs(float((ours * exact).sum() / exact.square().sum()) - 1) < (0.25 if clips else 0.05)


def test_a_recipe_survives_its_names():
    """ Catches a field that the JSON of a checkpoint loses, and two recipes that are one. """
    for recipe in RECIPES.values():
        assert from_json(recipe.text) == recipe
    assert len({recipe.text for recipe in RECIPES.values()}) == len(RECIPES) >= 18


def test_the_table_tells_recipes_apart():
    """ Catches a field of a recipe that its row does not show: two recipes would look alike. """
    rows = table().splitlines()[2:]
    assert len({row.split("|", 2)[2] for row in rows}) == len(RECIPES)
    other = replace(RECIPES["tetrajet_base"], rotate=(0, 16, 32))
    assert described(other.dx_dy) == described(RECIPES["tetrajet_base"].dx_dy)
    assert turned(other) not in table()
    assert [described(Operand(outer=n)).split()[2:4] for n in (TENSOR, ROW, 64)] == [
        ["in", "tensor"], ["in", "row"], ["in", "64"]]


def test_a_name_is_entered_once():
    """ Catches a fork's rule that quietly takes the place of another one of the same name. """
    with pytest.raises(KeyError, match="choose another name"):
        quant.RULES["nearest"] = quant.RULES["up"]


@four_bit
def test_every_operand_is_in_four_bits(name, monkeypatch):
    """ Catches a quantizer that is left out: its operand would have more than 15 values in a block. """
    seen = multiplied(monkeypatch, RECIPES[name])
    for operand, op in zip(NAMES, RECIPES[name].operands):
        if not op or op.grid not in NIBBLES:
            continue
        columns = seen[operand].shape[1] // op.block[1] * op.block[1]
        blocks = seen[operand][:, :columns].unflatten(1, (-1, op.block[1]))
        assert max(len(b.unique()) for b in blocks.flatten(0, 1)[:200]) <= 15, operand


# -----------------------------------------------------------------------------
# 8 bits


def test_fp8_has_one_scale_and_two_formats(monkeypatch):
    """ Catches E5M2 in the forward pass, a scale per block, a power of two, and W^T rounded once more. """
    seen = multiplied(monkeypatch, RECIPES["fp8"])
    for operand, grid, original in (("x", "e4m3", randn(T, K)), ("w", "e4m3", randn(N, K, seed=10)),
                                    ("dy", "e5m2", randn(T, N, seed=1))):
        # the largest value is exact but for the rounding of the scale, and the others are grid numbers
        largest = original.abs().max()
        assert abs(seen[operand].abs().max() / largest - 1) < 2.0**-22
        scale = (largest / GRIDS[grid].max).double()
        assert scale.log2() % 1 != 0
        y = (seen[operand].double() / scale).float()
        nearest = round_to_grid(y, GRIDS[grid])
        assert ((y - nearest).abs() <= 2.0**-21 * nearest.abs()).all()
    for operand, transposed in (("x", "xt"), ("w", "wt"), ("dy", "dyt")):
        assert torch.equal(seen[operand].t(), seen[transposed])


def test_mxfp8_clips_nothing(monkeypatch):
    """ Catches the OCP rule, which rounds the scale down, and a block along the wrong axis. """
    seen = multiplied(monkeypatch, RECIPES["mxfp8"])
    for operand, original in (("x", randn(T, K)), ("xt", randn(T, K).t().contiguous())):
        # no error is larger than half a step at the top of its block: 2^-4 of the maximum
        top = original.unflatten(1, (-1, 32)).abs().amax(2).repeat_interleave(32, 1)
        assert ((seen[operand] - original).abs() <= top * 2.0**-4).all()
        assert torch.equal(seen[operand], fake_quantize(original, RECIPES["mxfp8"].y_x))


# -----------------------------------------------------------------------------
# NVFP4 and MXFP4


@pytest.mark.parametrize("name, noisy", (("mxfp4", ""), ("nvfp4", ""), ("nvfp4_sr", "dy wt dyt xt"),
                                         ("tetrajet_v1", "dy wt dyt xt"), ("nvidia", "dy dyt"),
                                         ("quartet", "dy wt dyt xt"), ("quartet_v4", "dy wt dyt xt"),
                                         ("quartet2", "dy wt dyt xt"),
                                         ("four_over_six", "dy dyt"), ("fp4_all_the_way", "dy dyt xt"),
                                         ("ue5m3", "dy dyt"), ("ufp4", "dy dyt"), ("if4", "dy dyt"),
                                         ("tseng", "dy wt dyt xt"), ("tseng_fixed", "")))
def test_where_the_noise_is(name, noisy, monkeypatch):
    """ Catches stochastic rounding on a weight or an activation where the paper warns of it, none on dY. """
    a, b = (multiplied(monkeypatch, RECIPES[name], step=step) for step in (5, 6))
    assert [o for o in NAMES if not torch.equal(a[o], b[o])] == noisy.split()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", ("nvidia", "four_over_six", "ue5m3"))
def test_squares_give_both_gemms_one_weight(name, dtype, monkeypatch):
    """
    Catches a weight that dX rounds anew, from its bf16 copy or along the other axis: 1x16 blocks would.
    """
    seen = multiplied(monkeypatch, RECIPES[name], x=randn(T, K, dtype=dtype))
    assert torch.equal(seen["wt"].float(), seen["w"].float().t())
    other = replace(RECIPES[name], y_w=NVFP4, dx_w=NVFP4)
    seen = multiplied(monkeypatch, other, x=randn(T, K, dtype=dtype))
    assert not torch.equal(seen["wt"].float(), seen["w"].float().t())


def test_nvidia_rotates_dw_alone_by_one_vector(monkeypatch):
    """ Catches signs that change with step, layer or rank, or that no seed changes; a rotated dX. """
    recipe = only(RECIPES["nvidia"], [1, 2, 3, 4, 6])    # Q5 off: its operand shows the rotation itself
    start = Counter(1).state
    signs = random_signs(16, start, 0, FIXED_SIGNS)
    rotated = hadamard(randn(T, N, seed=1).t().contiguous(), signs)
    for at in ({}, dict(step=9), dict(layer=4), dict(rank=1), dict(step=0, layer=0)):
        assert torch.equal(multiplied(monkeypatch, recipe, **at)["dyt"], rotated)
    assert not torch.equal(multiplied(monkeypatch, recipe, seed=2)["dyt"], rotated)
    seen = multiplied(monkeypatch, RECIPES["nvidia"])
    # dX as it is, and X^T of the original, not of what the forward pass rounded
    noise = uniform((T, N), layer_of(recipe).counter.state, 3, 3)
    assert torch.equal(seen["dy"], fake_quantize(randn(T, N, seed=1), recipe.dx_dy, noise))
    assert torch.equal(seen["xt"], fake_quantize(hadamard(randn(T, K).t().contiguous(), signs), NVFP4))


def test_mxfp4_clips_and_tetrajet_v1_does_not(monkeypatch):
    """ Catches the two rules for a power of two exchanged, and a TetraJet v1 that forgets its alignment. """
    for name, clips in (("mxfp4", True), ("tetrajet_v1", False)):
        x = multiplied(monkeypatch, RECIPES[name])["x"]
        top = randn(T, K).unflatten(1, (-1, 32)).abs().amax(2)
        # a maximum beyond 6 scales comes out at least a tenth too small, or as 6 scales; E2M1's next gap is 2
        short = top > 6 * quantize(randn(T, K), RECIPES[name].y_x).scale()
        assert short.any() == clips and x.isfinite().all()
    recipe = RECIPES["tetrajet_v1"]
    state = layer_of(recipe).counter.state
    seen = multiplied(monkeypatch, recipe)
    for operand, rounded, number in (("wt", "w", 4), ("xt", "x", 6)):
        t = seen[rounded].t().contiguous()
        assert torch.equal(seen[operand], fake_quantize(t, recipe.dx_w, uniform(t.shape, state, 3, number)))


def test_four_over_six_is_nearer_in_every_block():
    """ Catches a choice that is never made, or made for the tensor, or the larger error kept. """
    x = randn(T, K)
    per_block = {}
    for rule in ("4/6", "nearest"):
        op = replace(NVFP4, rule=rule)
        per_block[rule] = (fake_quantize(x, op) - x).square().unflatten(1, (-1, 16)).sum(2)
    q = quantize(x, replace(NVFP4, rule="4/6"))
    fours = (q.code & 7).view(T, -1, 16).amax(2) == 6                    # code 6 is the value 4
    # about 45% of blocks of normal values, by a count of ours; 384 blocks here
    assert 0.3 < fours.float().mean() < 0.6
    assert (per_block["4/6"][fours] < per_block["nearest"][fours]).float().mean() > 0.8
    # and 256 leaves room: no scale of a 4 is cut off at 448
    assert decode(q.inner, GRIDS["e4m3"]).max() <= 384


def test_ue5m3_reaches_further_down():
    """ Catches E4M3's range under another name: a block 10^6 times below the largest would be lost. """
    x = randn(16, 64)
    x[:, 16:] *= 1e-6
    for op in (RECIPES["ue5m3"].y_x, RECIPES["ue5m3"].y_w):
        assert rms(fake_quantize(x, op)[:, 16:], x[:, 16:]) < 0.2
        assert (fake_quantize(x, replace(op, scale="e4m3"))[:, 16:] == 0).all()
    # stochastic rounding has a smallest scale, which is not E4M3's
    x[:, 16:] *= 1e-2
    noise = uniform((16, 64), Counter(1).state, 0, 3)
    assert rms(fake_quantize(x, RECIPES["ue5m3"].dx_dy, noise)[:, 16:], x[:, 16:]) < 0.3
    assert RECIPES["ue5m3"].rotate == (0, 0, 0)


def test_ufp4_is_uniform_and_rotates_everything(monkeypatch):
    """ Catches a grid with gaps that grow, and a forward pass that is not rotated. """
    recipe = RECIPES["ufp4"]
    assert decode(torch.arange(8, dtype=torch.uint8), GRIDS["e1m2"]).diff().unique().numel() == 1
    seen = multiplied(monkeypatch, recipe)
    signs = random_signs(16, Counter(1).state, 0, FIXED_SIGNS)
    assert torch.equal(seen["x"], fake_quantize(hadamard(randn(T, K), signs), recipe.y_x))
    assert torch.equal(seen["wt"], fake_quantize(hadamard(randn(N, K, seed=10).t().contiguous(), signs),
                                                 recipe.y_w))
    assert torch.equal(seen["y"], multiplied(monkeypatch, recipe, step=77)["y"])


# -----------------------------------------------------------------------------
# a forward pass that is rotated


@pytest.mark.parametrize("signs", ("none", "fixed"))
def test_gradients_of_a_rotated_forward_are_turned_back(signs, monkeypatch):
    """
    Catches a turn with the signs on the wrong side, or missing, in dX or dW: with nothing rounded in backward
    the gradients are those of the rounded tensors, and a ragged K must be cut back.
    """
    forward = NVFP4         # 96 is one and a half rotations of 64
    exact = Operand(grid="e4m3", block=(1, 16), outer=TENSOR)   # 8 bits, to see past the rounding
    recipe = Recipe(forward, forward, exact, exact, exact, exact, around=(f"rotate 64 {signs}",))
    seen = multiplied(monkeypatch, recipe)
    vector = torch.ones(64) if signs == "none" else random_signs(64, Counter(1).state, 0, FIXED_SIGNS)
    assert seen["x"].shape == (T, 128) and torch.equal(
        seen["x"], fake_quantize(hadamard(randn(T, K), vector), forward))
    # the matrix itself: 128 x 96
    turn = hadamard(torch.eye(K), vector).t()
    dy = randn(T, N, seed=1)
    assert rms(seen["dx"], dy @ seen["w"] @ turn) < 0.05 and seen["dx"].shape == (T, K)
    assert rms(seen["dw"], dy.t() @ seen["x"] @ turn) < 0.05 and seen["dw"].shape == (N, K)
    # and without alignment they are made from the tensors as they are
    seen = multiplied(monkeypatch, replace(recipe, align=False))
    assert rms(seen["dx"], dy @ randn(N, K, seed=10)) < 0.05
    assert rms(seen["dw"], dy.t() @ randn(T, K)) < 0.05


# -----------------------------------------------------------------------------
# Quartet


def test_quartet_masks_in_rotated_coordinates(monkeypatch):
    """
    Catches a mask of the wrong operand or in the wrong coordinates, one that is inverted, and a gradient that
    is not turned back: dX and dW are rebuilt from what the products multiply.
    """
    recipe = RECIPES["quartet"]
    seen, dy = multiplied(monkeypatch, recipe), randn(T, N, seed=1)
    turn = hadamard(torch.eye(32), torch.ones(32))
    for operand, original, a, b, gradient in (("x", randn(T, K), "dy", "wt", "dx"),
                                              ("w", randn(N, K, seed=10), "dyt", "xt", "dw")):
        rotated = hadamard(original, torch.ones(32))
        q = quantize(rotated, recipe.y_x)
        assert torch.equal(seen[operand], q.dequantize())
        clipped = (rotated / q.scale().repeat_interleave(32, 1)).abs() >= 6
        assert 0.02 < clipped.float().mean() < 0.2
        masked = (seen[a] @ seen[b].t()).masked_fill(clipped, 0)
        expected = (masked.unflatten(1, (-1, 32)) @ turn.t()).flatten(1)
        assert rms(seen[gradient], expected) < 1e-6
        # without the backward operands the mask stays, though the product is in the original coordinates
        plain = multiplied(monkeypatch, only(recipe, [1, 2]))
        exact = {"dx": dy @ randn(N, K, seed=10), "dw": dy.t() @ randn(T, K)}
        masked = hadamard(exact[gradient], torch.ones(32)).masked_fill(clipped, 0)
        assert rms(plain[gradient], (masked.unflatten(1, (-1, 32)) @ turn.t()).flatten(1)) < 1e-5
    without = multiplied(monkeypatch, replace(recipe, around=("rotate 32 none",)))
    assert rms(without["dx"], seen["dx"]) > 0.1 and rms(without["dw"], seen["dw"]) > 0.1


def test_a_value_that_was_not_clipped_is_trusted():
    """ Catches blocks of zeros, and values beside a large one, that get no gradient for ever. """
    x = torch.zeros(2, 256)
    x[0, 0], x[0, 1] = 1.0, 1e-12
    for op in (NVFP4, RECIPES["quartet"].y_x):
        assert trust_mask(x, op)[:, 1:].all()
    assert not trust_mask(x, RECIPES["quartet"].y_x)[0, 0]       # .18 is the root mean square


def test_three_quarters_is_unbiased_and_clips_nothing():
    """
    Catches the factor left out of the product, or in it once; a floor scale that clips; and codes left over
    where a block counts as zeros.
    """
    op, x = RECIPES["quartet"].dx_dy, randn(64, 64)
    scale = torch.exp2(x.unflatten(1, (-1, 32)).abs().amax(2).log2().floor() - 2)
    q = quantize(x, op, torch.zeros_like(x))
    assert torch.equal(q.scale(), scale * torch.tensor(4 / 3)) and q.outer.shape == ()
    # the grid numbers are those of 3/4 x, exactly
    noise = uniform((64, 64), Counter(1).state, 0, 3)
    y = 0.75 * x / scale.repeat_interleave(32, 1)
    assert y.abs().max() < 6
    codes = quantize(x, op, noise).code
    assert torch.equal(grid_number(codes, op), round_to_grid(y, GRIDS["e2m1"], noise))
    assert (quantize(x.clamp(-3, 3) * 2.0**-102, op, noise).code & 7 == 0).all()
    n = 4000
    rows = x[:4].repeat(n, 1)
    draws = fake_quantize(rows, op, uniform(rows.shape, Counter(2).state, 0, 3)).double().view(n, 4, 64)
    sigma = draws.std(0) / n**0.5
    # five standard deviations for each of 256 values, the noise's 2^16 levels
    assert ((draws.mean(0) - x[:4]).abs() <= 5 * sigma + 2.0**-15 * x.abs().max()).all()


def test_v4_makes_up_for_what_rounding_shortens():
    """ Catches 1.009276 left out, applied before rounding, or to a stochastic operand. """
    op = RECIPES["quartet_v4"].dx_dy
    x = randn(2048, 1024) * torch.exp2(torch.arange(2048) / 2048)[:, None]     # all phases of a power of two

    def projection(op):
        return float((fake_quantize(x, op) * x).double().sum() / x.double().square().sum())
    assert abs(projection(op) - 1) < 0.0006
    shortened = projection(op) / 1.009276
    assert abs(shortened - 1 / 1.0095) < 0.0006
    q = quantize(x, op)
    plain = round_to_grid(x / q.scale().repeat_interleave(32, 1) * 1.009276, GRIDS["e2m1"])
    assert (grid_number(q.code, op) == plain).float().mean() > 0.9999


# -----------------------------------------------------------------------------
# Quartet II


def test_quartet2_rounds_again_what_the_forward_pass_rounded(monkeypatch):
    """
    Catches Q4 or Q6 of the original, a rotation of 16, noise that two operands share, a forward pass without
    four-over-six, and a whole gradient that is biased: its mean over steps is that of the rounded tensors.
    """
    recipe = RECIPES["quartet2"]
    seen = multiplied(monkeypatch, recipe)
    state = layer_of(recipe).counter.state
    assert torch.equal(seen["x"], fake_quantize(randn(T, K), replace(NVFP4, rule="4/6")))
    for operand, original, stream, number in (("dy", randn(T, N, seed=1), DX_SIGNS, 3),
                                              ("wt", seen["w"].t(), DX_SIGNS, 4),
                                              ("dyt", randn(T, N, seed=1).t(), DW_SIGNS, 5),
                                              ("xt", seen["x"].t(), DW_SIGNS, 6)):
        turned = hadamard(original.contiguous(), random_signs(128, state, 3, stream))
        noise = uniform(turned.shape, state, 3, number)
        assert torch.equal(seen[operand], fake_quantize(turned, EDEN, noise))
    linear, x, dy = layer_of(recipe), randn(T, K).requires_grad_(), randn(T, N, seed=1)
    exact = {"dx": dy @ seen["w"], "dw": dy.t() @ seen["x"]}
    along = {"dx": [], "dw": []}
    for step in range(400):
        linear.counter.set(step)
        dx, dw = torch.autograd.grad(linear(x), (x, linear.weight), dy)
        for name, gradient in (("dx", dx), ("dw", dw)):
            along[name].append(float((gradient * exact[name]).sum() / exact[name].square().sum()))
    for values in map(torch.tensor, along.values()):
        assert abs(values.mean() - 1) < 4 * values.std() / 20 < 0.001


# -----------------------------------------------------------------------------
# by hand: what the sources compute, in NumPy, to compare with. No function of ours but the noise itself

E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6])


def neighbour(y, noise, step=None):
    """
    y to the nearest number of E2M1, or of the multiples of step. With noise, which is in 2^-16 of a gap, to
    one of the two neighbours.
    """
    grid = np.concatenate((-E2M1[:0:-1], E2M1)) if step is None else np.arange(-7, 8) * step
    if noise is None and step is None:
        return y.astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
    if noise is None:
        return np.round(np.clip(y / step, -7, 7)) * step
    low = np.clip(np.searchsorted(grid, y, side="right") - 1, 0, len(grid) - 2)
    come = np.round((y - grid[low]) / (grid[low + 1] - grid[low]) * 2**16) / 2**16
    return np.where(come + noise >= 1, grid[low + 1], grid[low])


def e4m3(s):
    return s.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def by_hand(x: Tensor, noise: Tensor | None = None, room: float = 1.0, if4: bool = False) -> Tensor:
    """ NVFP4 with one scale for the tensor; or IF4, which also tries the multiples of 6/7. """
    (M, K), pad = x.shape, ((0, 0), (0, -x.shape[1] % 16))
    x, noise = (t if t is None else np.pad(t.double().numpy(), pad).reshape(M, -1, 16)
                for t in (x.detach(), noise))
    outer = np.abs(x).max() / 448 / (6 * room)
    scale = e4m3(np.abs(x).max(2, keepdims=True) / outer / (6 * room)) * outer
    out = neighbour(x / scale, noise) * scale
    if if4:
        even = neighbour(x / scale, None if noise is None else noise * 181 % 1, 6 / 7) * scale
        errors = [((v - x) ** 2).sum(2, keepdims=True) for v in (even, out)]
        out = np.where(errors[0] < errors[1], even, out)
    return torch.from_numpy(out.reshape(M, -1)[:, :K])


def turned_by_hand(x: Tensor, signs: Tensor) -> Tensor:
    """ Each len(signs) numbers of a row times diag(signs) and Sylvester's matrix. """
    H = np.ones((1, 1))
    while len(H) < len(signs):
        H = np.block([[H, H], [H, -H]])
    blocks = torch.nn.functional.pad(x, (0, -x.shape[1] % len(H))).double().unflatten(1, (-1, len(H)))
    return (blocks * signs.double() @ torch.from_numpy(H) / len(H) ** 0.5).flatten(1)


def close(a: Tensor, b: Tensor) -> bool:
    """ The same but for the last bits. Another code would be a fourteenth of its block's maximum off. """
    return torch.allclose(a.double(), b.double(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ("tseng", "tseng_fixed"))
def test_tseng_rounds_the_backward_pass_alone(name, monkeypatch):
    """
    Catches: a forward pass that is rounded or rotated, operands that start from rounded tensors, a rotation
    of 32 or one vector for both products, 3/4 left out of the value or applied twice, the floor scale with
    noise, which clips, and noise that two operands share.
    """
    recipe = RECIPES[name]
    seen, state = multiplied(monkeypatch, recipe), layer_of(recipe).counter.state
    x, w, dy = randn(T, K), randn(N, K, seed=10), randn(T, N, seed=1)
    assert torch.equal(seen["x"], x) and torch.equal(seen["w"], w)
    for operand, original, stream, number in (("dy", dy, DX_SIGNS, 3), ("wt", w.t(), DX_SIGNS, 4),
                                              ("dyt", dy.t(), DW_SIGNS, 5), ("xt", x.t(), DW_SIGNS, 6)):
        fresh = random_signs(64, state, 3, stream)
        a = turned_by_hand(original, fresh if name == "tseng" else torch.ones(64)).numpy()
        blocks = a.reshape(len(a), -1, 32)
        exponent = np.floor(np.log2(np.abs(blocks).max(2, keepdims=True))) - 2
        if name == "tseng":     # microxcaling's "dither_scale": 3 A / 2^(e + 2), and back
            noise = uniform(a.shape, state, 3, number).numpy().reshape(blocks.shape)
            out = neighbour(3 * blocks / 2 ** (exponent + 2), noise) * 2 ** (exponent + 2) / 3
        else:
            out = neighbour(blocks / 2**exponent, None) * 2**exponent       # the cast clips
        assert close(seen[operand], torch.from_numpy(out.reshape(a.shape))), operand


def test_tseng_is_unbiased():
    """ Catches: a gradient that is too long or too short in the mean: 16/9 left over, a clip. """
    linear, x, dy = layer_of(RECIPES["tseng"]), randn(T, K).requires_grad_(), randn(T, N, seed=1)
    exact = dy @ linear.weight.detach(), dy.t() @ x.detach()
    along = [[], []]
    for step in range(400):
        linear.counter.set(step)
        gradients = torch.autograd.grad(linear(x), (x, linear.weight), dy)
        for lengths, gradient, right in zip(along, gradients, exact):
            lengths.append(float((gradient * right).sum() / right.square().sum()))
    for lengths in map(torch.tensor, along):
        assert abs(lengths.mean() - 1) < 4 * lengths.std() / 20 < 0.002


def test_if4_takes_the_better_of_two_grids(monkeypatch):
    """
    Catches: evenly spaced numbers that end at 7 or have a scale of their own, the larger error kept, a choice
    for the tensor, no head-room for gradients, noise that both roundings share, squares, a rotated dX.
    """
    recipe = RECIPES["if4"]
    seen, state = multiplied(monkeypatch, recipe), layer_of(recipe).counter.state
    x, w, dy = randn(T, K), randn(N, K, seed=10), randn(T, N, seed=1)
    signs = random_signs(16, Counter(1).state, 0, FIXED_SIGNS)
    for operand, original, number in (("x", x, 0), ("w", w, 0), ("dy", dy, 3), ("wt", w.t(), 0),
                                      ("dyt", turned_by_hand(dy.t(), signs), 5),
                                      ("xt", turned_by_hand(x.t(), signs), 0)):
        noise = uniform(original.shape, state, 3, number) if number else None
        assert close(seen[operand], by_hand(original, noise, 16 / 17 if number else 1.0, if4=True)), operand


def test_averis_rounds_the_mean_apart():
    """
    Catches: a mean of the features, one that stays in X or dY, or is not rounded; the mean's part of dW once
    in place of T times; a dX without the mean's part, or with T times of it.
    """
    linear, x, dy = layer_of(RECIPES["averis"]), randn(T, K) + 3 * randn(1, K, seed=3), randn(T, N, seed=1)
    dy, w, state = dy + randn(1, N, seed=4), linear.weight.detach(), linear.counter.state
    x.requires_grad_()
    y = linear(x)
    y.backward(dy)

    def q(a, number=0):
        return by_hand(a, uniform(a.shape, state, 3, number) if number else None)
    mu, nu = x.detach().mean(0, keepdim=True), dy.mean(0, keepdim=True)
    R, G = x.detach() - mu, dy - nu
    assert rms(y, q(R) @ q(w).t() + q(mu) @ q(w).t()) < 1e-6
    first = q(G, 3) @ q(w.t()).t()
    assert rms(x.grad, first - first.mean(0) + q(T * nu, 3) @ q(w.t()).t() / T) < 1e-6
    assert rms(linear.weight.grad, q(G.t(), 5) @ q(R.t()).t() + q(T * nu.t(), 5) @ q(mu.t()).t()) < 1e-6
    # what it is for: the mean takes no scale from what is not the mean
    exact, plain = R @ w.t(), layer_of(RECIPES["nvfp4"])(x)
    assert rms(y - y.mean(0), exact) < 0.6 * rms(plain - plain.mean(0), exact)


# -----------------------------------------------------------------------------
# outlier channels


def test_outlier_channels_in_bf16_are_not_rounded():
    """ Catches a format that is a string and is dropped, or taken for MXFP8, in forward or in dW. """
    recipe = replace(RECIPES["tetrajet_base"], outlier="bf16")
    linear = QuantLinear(K, N, False, recipe=only(recipe, [1, 2, 6]), layer=3, counter=Counter(1), outliers=5)
    linear.set_channels(torch.tensor([1, 7, 8, 50, 95]))
    x = torch.zeros(T, K)
    x[:, linear.channels] = randn(T, 5)
    x.requires_grad_()
    y = linear(x)
    assert torch.allclose(y, x @ linear.weight.t(), rtol=0, atol=1e-6)
    y.backward(randn(T, N, seed=1))
    assert torch.allclose(linear.weight.grad[:, linear.channels],
                          (randn(T, N, seed=1).t() @ x)[:, linear.channels], rtol=0, atol=1e-4)


# -----------------------------------------------------------------------------
# hot channels


@pytest.mark.parametrize("dtype, ops", [(torch.float32, [1, 2, 3, 4, 5, 6]), (torch.float32, [1]),
                                        (torch.bfloat16, [1, 2, 3, 4, 5, 6])])
def test_a_patch_adds_what_rounding_took_from_hot_channels(dtype, ops):
    """
    Catches: residuals of another operand or of other channels, a term left out or taken twice, channels set
    apart as well, a patch before channels are chosen, a gradient that goes through it,
    another program under torch.compile.
    """
    recipe, hot = only(RECIPES["hcp"], ops), torch.tensor([3, 17, 40, 41, 95])
    x, w, dy = randn(T, K), randn(N, K, seed=10), randn(T, N, seed=1)
    x[:, hot] *= 3
    x, dy = x.to(dtype).requires_grad_(), dy.to(dtype)
    linear, plain = (QuantLinear(K, N, False, recipe=r, layer=3, counter=Counter(1), outliers=len(hot))
                     for r in (recipe, replace(recipe, outlier=None, around=())))
    for layer in (linear, plain):
        layer.weight.data.copy_(w)
    y4, *grads = (plain(x), *torch.autograd.grad(plain(x), (x, plain.weight), dy))
    assert torch.equal(linear(x), y4)
    linear.set_channels(hot)
    assert not linear.split
    y = linear(x)
    assert all(map(torch.equal, torch.autograd.grad(y, (x, linear.weight), dy), grads))

    x8, qx, qw = x.detach().float(), fake_quantize(x.detach(), recipe.y_x), w
    qw = fake_quantize(w, recipe.y_w) if 2 in ops else w
    i, cold = hot, [k for k in range(K) if k not in hot]
    expected = y4.float() + (x8 - qx)[:, i] @ qw[:, i].T + qx[:, i] @ (w - qw)[:, i].T
    assert rms(y.float(), expected) < (1e-6 if dtype == torch.float32 else 5e-3)
    # of the hot channels nothing is missing but what is of second order
    missing = x8[:, cold] @ w[:, cold].T - qx[:, cold] @ qw[:, cold].T
    missing += (x8 - qx)[:, i] @ (w - qw)[:, i].T
    assert rms(expected + missing, x8 @ w.T) < (1e-6 if dtype == torch.float32 else 5e-3)
    assert rms(y.float(), x8 @ w.T) < 0.96 * rms(y4.float(), x8 @ w.T)
    assert torch.equal(torch.compile(linear, backend="aot_eager")(x), y)


def test_what_a_patch_leaves_to_others():
    """ Catches: an OsciReset that takes hot channels for zeros, a patch for what has another format. """
    linear = QuantLinear(K, N, False, recipe=RECIPES["hcp"], counter=Counter(1), outliers=3)
    linear.set_channels(torch.tensor([1, 2, 3]))
    w, q = rounded_weight(linear)
    assert torch.equal(w, linear.weight) and torch.equal(q.dequantize(), fake_quantize(w, linear.recipe.y_w))
    # with another format they are set apart, and not patched
    apart = [QuantLinear(K, N, False, recipe=r, counter=Counter(1), outliers=3) for r in (
        replace(RECIPES["hcp"], outlier=MXFP8), replace(RECIPES["nvidia"], outlier=MXFP8))]
    for layer in apart:
        layer.weight.data.copy_(linear.weight.data)
        layer.set_channels(linear.channels)
    a, b = (layer(randn(T, K)) for layer in apart)
    assert torch.equal(a, b)

"""
What OsciReset is compared with: each remedy does what its paper says while block scales hold, and each
control changes one thing. That ranks with parts of the weights do the same: test_parallel.py.
"""
import math

import pytest
import torch
import torch.nn.functional as F

import build
import config
from codes import E2M1, decode, quantize
from noise import Counter
from osci import THRESHOLDS, full_scale, level, rounded_weight
from outliers import CHOICES
from quant import Operand, QuantLinear, Recipe, fake_quantize
from recipes import RECIPES
from rivals.remedies import EMA_WARMUP, ema_code, follow, random_subset, stand_in
from test_osci import (BASE, KINDS, OPERANDS, RESTS, SWINGS, WINDOW, Ops, adversarial, in_code_units,
                       in_units, journey, linear, lists_made, model, play, remedy, resumed, run, same, walk)

GRID = decode(torch.arange(8, dtype=torch.uint8), E2M1).double()
PLAIN = Recipe(y_w=OPERANDS["no outer"])


def block(*ys, last=6.0):
    """ One block of 16 values, whose last one holds the scale: in the format of PLAIN, exactly 1. """
    w = torch.zeros(1, 16)
    w[0, :len(ys)], w[0, 15] = torch.tensor(ys), last
    return w


# -----------------------------------------------------------------------------
# Q-EMA


@pytest.mark.parametrize("y, mean, expected", [
    (1.20, 1.24, 1.0), (1.20, 1.26, 1.5), (1.30, 1.24, 1.0), (1.30, 1.26, 1.5),
    (1.20, 9.0, 1.5), (1.20, 0.1, 1.0),            # never farther than a neighbour
    (1.20, -7.0, 1.0), (-1.20, 7.0, -1.0),         # a mean on the other side of zero
    (-1.20, -1.26, -1.5), (-1.20, -1.24, -1.0),
    (0.1, 0.3, 0.5), (0.4, -0.4, 0.0), (4.4, 5.1, 6.0), (4.9, 5.1, 6.0), (5.1, 4.9, 4.0),
    (1.5, 9.0, 1.5), (3.0, -9.0, 3.0),             # on a grid number there is no other neighbour
    (1.2, 1.25, 1.0), (1.6, 1.75, 2.0), (2.9, 2.5, 2.0), (3.1, 3.5, 4.0), (5.9, 5.0, 4.0),    # ties: even
])
def test_which_neighbour(y, mean, expected):
    """ Catches: the mean rounded by itself, neighbours of the mean, magnitudes, ties to the lower one. """
    w, means = block(y), block(mean)
    code = ema_code(w, means, quantize(w, PLAIN.y_w))[0, 0]
    assert decode(code & 7, E2M1) == abs(expected) and bool(code >> 3) == (y < 0)


def by_hand(w, mean, q):
    """ The definition in float64: (N, K) grid numbers in code units, without sign; which were clear. """
    scale = full_scale(q).double()
    y = torch.where(scale > 2.0**-127, w.double().abs() / scale, 0.0)
    y_mean = torch.where(scale > 2.0**-127, mean.double() * torch.where(w < 0, -1, 1) / scale, 0.0)
    high = GRID[torch.searchsorted(GRID, y.clamp(max=6.0)).clamp(max=7)]
    low = torch.where(high <= y, high, GRID[(torch.searchsorted(GRID, y.clamp(max=6.0)) - 1).clamp(min=0)])
    clear = ((y_mean - (low + high) / 2).abs() > 1e-5) & ((y[..., None] - GRID).abs().amin(-1) > 1e-5)
    return torch.where((y_mean - low).abs() < (y_mean - high).abs(), low, high), clear


def largest_of_blocks(w, rows, columns):
    N, K = w.shape
    padded = F.pad(w.abs(), (0, -K % columns, 0, -N % rows))
    blocks = padded.view(-1, rows, padded.shape[1] // columns, columns).amax(dim=(1, 3))
    return blocks.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:N, :K]


@pytest.mark.parametrize("name", [*OPERANDS, "up"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_stand_in_has_the_codes_and_the_scales(kind, name):
    """
    Catches: a stand-in that lifts a block's largest weight or lowers it, so that its own scale, or by an ulp
    the outer one, is another; codes that rounding the stand-in does not give.
    """
    op = (OPERANDS | {"up": Operand(rule="up")})[name]
    w = adversarial(kind, op)
    q = quantize(w, op)
    g = torch.Generator().manual_seed(2)
    for size in (0.02, 0.3, 1.0):
        mean = w + w.abs().mean() * size * torch.randn(w.shape, generator=g)
        code = ema_code(w, mean, q)
        value, clear = by_hand(w, mean, q)
        assert torch.equal(GRID[code.long() & 7][clear], value[clear])
        assert torch.equal(code >> 3, w.signbit().byte())
        new, differs = stand_in(w, q, code)
        after = quantize(new, op)
        assert torch.equal(after.code, torch.where(differs, code, q.code))
        assert torch.equal(after.inner, q.inner)
        assert op.outer == 0 or torch.equal(after.outer, q.outer)
        assert same(new[~differs], w[~differs])
        if kind == "plain" and name != "no outer":
            assert clear.float().mean() > 0.9
            # only a largest weight that should round down is refused, and there are such
            refused = (code != q.code) & ~differs
            lowest = w.abs()[refused] * (1 + 1e-6) >= largest_of_blocks(w, *op.block)[refused]
            assert lowest.all() and (code < q.code)[refused].all() and differs.sum() > 10
            assert size < 1 or refused.any()


def standing_in(recipe=RECIPES["tetrajet_full"], outliers=0, N=36, K=140):
    """ A layer of random weights with a stand-in that differs from them, and its remedy. """
    torch.manual_seed(0)
    layer = QuantLinear(K, N, bias=False, recipe=recipe, outliers=outliers, counter=Counter(3))
    if outliers:
        layer.set_channels(torch.arange(0, 11 * outliers, 11))
    qema = remedy("qema", {"a": layer})
    layer.qema_mean = layer.weight.detach() * (1 + 0.5 * torch.randn(N, K))
    with torch.no_grad():
        follow(layer)
    return layer, qema


def passes(layer, x, dy):
    """ One forward and backward pass -> y, dX, dW. """
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(dy)
    return y.detach(), leaf.grad, layer.weight.grad


@pytest.mark.parametrize("outliers", [0, 5])
def test_the_forward_pass_rounds_the_stand_in_and_the_weight_gets_the_gradient(outliers):
    """
    Catches: a gradient that stops at the stand-in, or is masked where it differs; Q4 made from the weight;
    outlier columns that are replaced too; codes of the weight reported for those of the stand-in.
    """
    layer, qema = standing_in(outliers=outliers)
    twin = QuantLinear(140, 36, bias=False, recipe=layer.recipe, outliers=outliers, counter=layer.counter)
    twin.set_channels(layer.channels)
    twin.weight.data.copy_(layer.qema_stand_in)
    assert (layer.weight != layer.qema_stand_in).float().mean() > 0.02
    assert same(layer.weight.data[:, layer.channels], layer.qema_stand_in[:, layer.channels])
    x, dy = torch.randn(24, 140), torch.randn(24, 36)
    for a, b in zip(passes(layer, x, dy), passes(twin, x, dy), strict=True):
        assert same(a, b)
    assert layer.weight.grad.abs().min() > 0 and layer.qema_stand_in.grad is None
    (w, q), (_, expected) = qema.rounded(layer), rounded_weight(twin)
    zeroed = layer.weight.detach().index_fill(1, layer.channels, 0.0)
    assert torch.equal(q.code, expected.code) and same(w, zeroed)
    layer.enabled = False
    assert torch.equal(layer(x), F.linear(x, layer.weight))


@pytest.mark.skipif(torch.__version__ < "2.7", reason="PyTorch 2.6 compiles no layer")
def test_the_compiled_layer_with_a_stand_in_is_the_eager_one():
    """ Catches: a stand-in that tracing freezes: it changes in place after each step. """
    layer, _ = standing_in()
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager")
    x, dy = torch.randn(24, 140), torch.randn(24, 36)
    before = passes(layer, x, dy)[0]
    for _ in range(2):
        for a, b in zip(passes(layer, x, dy), passes(compiled, x, dy), strict=True):
            assert same(a, b)
        place = layer.qema_stand_in.data_ptr()
        layer.qema_mean *= 1.2
        with torch.no_grad():
            follow(layer)
        assert layer.qema_stand_in.data_ptr() == place
    assert not torch.equal(passes(layer, x, dy)[0], before)


def test_a_trembling_weight_is_still():
    """
    Catches: a mean that is not that of the weight, or follows at once; the forward pass too early or late.
    Of two that swing, the one whose mean lies above the threshold rounds up, and neither flips.
    """
    swings = (SWINGS[:2] * 20)[:33]
    weights = in_units([swings, [2.5 - y for y in swings], RESTS[:1] * 33])
    layer = linear(weights[0])
    qema = remedy("qema", {"a": layer}, start=2, period=20, decay=0.5)
    mean = weights[2, 0, :2].double()
    for step, w in enumerate(weights):
        layer.weight.data.copy_(w)
        qema.after_step(step)
        if step > 2:
            mean = 0.5 * mean + 0.5 * w[0, :2].double()
        assert (layer.qema_stand_in is not None) == (step >= 2 + EMA_WARMUP)
        if step >= 2:
            assert layer.qema_mean[0, :2].tolist() == pytest.approx(mean.tolist(), rel=1e-6)
    # that mean swings itself; one of a decay of .9983 does not
    slow = linear(weights[0])
    reports = play(remedy("qema", {"a": slow}, period=20, decay=0.9983), slow, weights)
    # the first window sees rounding to nearest, the second one only the average's
    assert reports[WINDOW]["flips"] > 0 == reports[WINDOW]["held"]
    last = reports[20 + WINDOW]
    assert (last["flips"], last["found"], last["reset"]) == (0, 0, 0) and same(slow.weight.data, weights[-1])
    other = linear(weights[0])
    assert play(remedy("watch", {"a": other}, period=20), other, weights)[20 + WINDOW]["flips"] == 16


def test_what_q_ema_reports():
    """ Catches: refused weights counted as held, neither counted, refusals where nothing is asked for. """
    weights = walk((8, 128), 21, size=0.05)
    report, weight = run(weights, "qema", layer := linear(weights[0]), decay=0.0)
    assert (report["held"], report["refused"]) == (0, 0) and same(layer.qema_stand_in, weights[-1])
    layer = linear(block(1.2, 1.3, -1.2), PLAIN)
    qema = remedy("qema", {"a": layer}, window=20, decay=0.999)
    for step in range(20):
        qema.after_step(step)
    # the last one holds the scale at 5.9, nearer to 6 than to 4, and its mean says 4
    layer.qema_mean.copy_(block(1.3, 1.3, -1.2, last=4.0))
    layer.weight.data[0, 15] = 5.9
    said, columns = qema.after_step(20)
    assert (columns["osci_held"], columns["osci_refused"]) == (1, 1)
    assert said.startswith("Q-EMA rounds 1 weights (6.25%) to the neighbour that is farther, and not 1 more")


def test_an_average_that_is_never_followed_is_refused():
    """ Catches: a run that is accepted and ends before Q-EMA begins. """
    with pytest.raises(config.ConfigError, match="leave no step of 13"):
        remedy("qema", model(), start=2, steps=13)
    remedy("qema", model(), start=2, steps=14)


def test_a_checkpoint_of_q_ema_is_evaluated_as_it_was_trained():
    """ Catches: an evaluation that rounds to nearest what was trained otherwise. """
    layers = model()
    journey(layers, remedy("qema", layers, start=0, steps=30), range(14))
    cfg = config.parse(["--recipe=tetrajet_full", "--osci=qema", "--steps=100"])
    net = build.build(cfg, 256, torch.device("cpu"))
    layer = net.layers["blocks.0.attn.qkv"]
    assert layer.extra == ("qema",) and layer.qema_stand_in is None
    ours, theirs = layers["up"], model()["up"]
    remedy("qema", {"a": theirs})
    theirs.weight.data.copy_(ours.weight.data)
    x = torch.randn(4, 100)
    assert not same(theirs.eval()(x), ours.eval()(x))
    theirs.qema_stand_in = resumed(layers)["up.qema_stand_in"]
    assert same(theirs(x), ours(x))


# -----------------------------------------------------------------------------
# Freeze


def freeze_by_hand(weights, op, thresholds):
    """ The paper's algorithm in float64, on weights that freezing does not change -> when frozen, and at. """
    now = torch.stack([level(quantize(w, op).code) for w in weights]).long()
    N, K = now.shape[1:]
    steps, targets, margin = torch.full((N, K), -1), torch.zeros(N, K), math.inf
    for n in range(N):
        for k in range(K):
            path = now[:, n, k].tolist()
            last, direction, f, mean = path[0], 0, 0.0, float(path[0])
            for step, i in enumerate(path[1:], 1):
                turn = (i > last) - (i < last)
                f = 0.01 * (turn * direction < 0) + 0.99 * f
                margin = min(margin, abs(f - thresholds[step]))
                direction, last = turn or direction, i
                if f > thresholds[step]:
                    steps[n, k], targets[n, k] = step, round(mean)
                    break
                mean = 0.01 * i + 0.99 * mean
    assert margin > 1e-7, "an exact tie: choose another seed"
    return steps, targets


def test_freeze_against_the_definition():
    """
    Catches: a first flip counted, or one in the same direction; the threshold of another step; frozen at the
    level of the moment, or at the average after it; a schedule that falls at once, or not at all.
    """
    weights, op = walk((4, 48), 60, size=0.02), Operand()
    thresholds = [0.02 + 0.08 * (1 + math.cos(math.pi * step / 59)) / 2 for step in range(60)]
    steps, targets = freeze_by_hand(weights, op, thresholds)
    layer = linear(weights[0], Recipe(y_w=op))
    freeze = remedy("freeze", {"a": layer}, window=50, steps=60, threshold=0.02)
    seen = torch.full((4, 48), -1)
    for step, w in enumerate(weights):
        layer.weight.data.copy_(w)
        # levels are those of the walk: what is frozen is not written, so that scales are the walk's as well
        freeze.after_step(step)
        seen[(seen < 0) & layer.freeze_frozen] = step
    first = steps >= 0
    assert first.sum() > 8 and (~first).sum() > 50 and len(steps[first].unique()) > 3
    assert torch.equal(seen, steps)
    assert torch.equal(layer.freeze_target[first].float(), targets[first])


def frozen(layer, places, target=None, **knobs):
    """ A layer of which some weights (a slice of columns) are frozen, where they are or at target. """
    freeze = remedy("freeze", {"a": layer}, threshold=1.0, **knobs)
    freeze.FIRST = 1.0                                # nothing else is frozen
    freeze.after_step(0)
    layer.freeze_frozen[:, places] = True
    layer.freeze_target.copy_(layer.freeze_level)
    if target:
        layer.freeze_target[:, places] = torch.tensor(target, dtype=torch.int8)
    return freeze


def test_a_frozen_weight_keeps_its_code_while_the_scale_moves():
    """ Catches: the value frozen in place of the code, or written once and then left to the optimizer. """
    weights = walk((6, 300), 30, size=0.02)
    layer = linear(weights[0])
    freeze = frozen(layer, slice(None, None, 3), period=40, window=20)
    wanted, scales = layer.freeze_target[:, ::3].clone(), []
    for step, move in enumerate(weights.diff(dim=0), 1):
        layer.weight.data += move * 5
        said, columns = freeze.after_step(step)
        q = quantize(layer.weight.detach(), BASE.y_w)
        assert (level(q.code)[:, ::3] == wanted).float().mean() > 0.97
        scales.append(full_scale(q))
        if step == 20:
            assert columns["osci_held"] == wanted.numel() and said.startswith("Freeze holds 600 weights")
            assert columns["osci_refused"] < 0.03 * columns["osci_held"]
    assert (scales[0] != scales[-1]).float().mean() > 0.3
    # to a few ulps: writing a largest weight may move an outer scale by one
    value = fake_quantize(layer.weight.detach(), BASE.y_w)[:, ::3]
    assert torch.isclose(value, layer.weight.data[:, ::3], rtol=1e-6, atol=0).float().mean() > 0.97


def test_a_block_does_not_shrink():
    """
    Catches: the guard dropped. A largest weight frozen at 4 is written as 4 of 6 units of its own size, step
    after step; and a guard by block alone, which would also leave the others of that block unwritten.
    """
    layer = linear(block(1.2, 4.9), PLAIN)
    freeze = frozen(layer, [0, 15], target=[2, 6])
    for step in range(1, 20):
        layer.weight.data[0, 0] += 0.1
        with torch.no_grad():
            seen = freeze.act(layer, step)
        assert (int(seen["held"]), int(seen["refused"])) == (2, 1)
        assert layer.weight.data[0, [0, 15]].tolist() == [1.0, 6.0]


def test_a_coarse_scale_holds_too():
    """
    Catches: only largest weights with another code guarded. This one sits on 4 of a scale of 1.6 steps of
    2^-9, rounded to 2: written as 4 of these, the scale would be 1.33 steps, rounded to 1.
    """
    w = torch.zeros(1, 128)
    w[0, 0], w[0, 20], w[0, 21] = 1.0, 1.6 * 2.0**-9 / 448, -0.5 * 2.0**-9 / 448
    layer = linear(w)
    freeze = frozen(layer, [20])
    assert layer.freeze_level[0, [0, 20]].tolist() == [7, 6]
    before = quantize(w, BASE.y_w)
    for step in range(1, 4):
        with torch.no_grad():
            seen = freeze.act(layer, step)
        after = quantize(layer.weight.detach(), BASE.y_w)
        assert torch.equal(after.inner, before.inner) and torch.equal(after.code, before.code)
        assert (int(seen["held"]), int(seen["refused"])) == (1, 1) and same(layer.weight.data, w)


def test_the_threshold_falls_from_a_tenth():
    """ Catches: rising in place of falling; a schedule that begins at step 0 or ends after the last step. """
    layer, seen = linear(walk((2, 16), 1, 0.0)[0]), []
    freeze = remedy("freeze", {"a": layer}, start=10, period=20, window=5, steps=31)
    freeze.follow = lambda layer, now, threshold: seen.append(threshold)
    for step in range(31):
        freeze.after_step(step)
    assert len(seen) == 20 and all(a > b for a, b in zip(seen, seen[1:]))
    assert seen[9] == pytest.approx(0.055) and seen[-1] == pytest.approx(0.01) and 0.099 < seen[0] < 0.1


def test_freeze_leaves_outlier_channels_alone():
    """ Catches: the zeros that stand for outlier columns written over them. """
    layer = linear(walk((4, 64), 1, 0.0)[0], RECIPES["tetrajet_full"], outliers=3)
    freeze = frozen(layer, slice(None))
    before = layer.weight.data.clone()
    layer.set_channels(torch.tensor([3, 20, 40]))
    freeze.after_step(1)
    assert same(layer.weight.data[:, layer.channels], before[:, layer.channels])
    assert not same(layer.weight.data, before)


# -----------------------------------------------------------------------------
# Dampen


def penalty(layer):
    """ The formula, for autograd. """
    w = layer.weight if not layer.split else layer.weight.index_fill(1, layer.channels, 0.0)
    q = quantize(w.detach(), layer.recipe.y_w)
    bound = 6 * full_scale(q)
    return (q.dequantize() - torch.clamp(w, -bound, bound)).square().sum()


@pytest.mark.parametrize("step, strength", [(3, 0.0), (8, 0.01), (13, 0.02)])
def test_the_gradient_is_that_of_the_formula(step, strength):
    """
    Catches: the sign, the factor 2, a mean for a sum, weights beyond the range drawn back, the gradient that
    was there replaced, outlier columns drawn to zero, a schedule that is off by one.
    """
    layers = model()
    dampen = remedy("dampen", layers, start=3, steps=14, strength=0.02)
    expected = {}
    for name, layer in layers.items():
        layer.weight.grad = torch.randn(layer.weight.shape)
        grad, = torch.autograd.grad(strength * penalty(layer), layer.weight)
        expected[name] = layer.weight.grad + grad
        bound = 6 * full_scale(rounded_weight(layer)[1])
        assert (layer.weight.abs() > bound).any() and (strength == 0 or grad.abs().max() > 0)
    dampen.before_clip(2)
    for name, layer in layers.items():
        assert (layer.weight.grad - expected[name]).abs().max() > 0 or strength == 0
    dampen.before_clip(step)
    for name, layer in layers.items():
        torch.testing.assert_close(layer.weight.grad, expected[name], rtol=1e-6, atol=1e-9)
    split = layers["down"]
    grad, = torch.autograd.grad(penalty(split), split.weight)
    assert not grad[:, split.channels].any()


def test_dampen_reports_the_sum_of_squares():
    layers = model()
    expected = sum(float(penalty(layer).detach()) for layer in layers.values())
    dampen = remedy("dampen", layers, window=1)
    assert dampen.after_step(0) == ("", {})
    assert dampen.after_step(1)[1]["osci_penalty"] == pytest.approx(expected, rel=1e-5) and expected > 0


# -----------------------------------------------------------------------------
# the controls


def control(name, weights, seed=3, outliers=0, number=0, start=0):
    """ One window of 20 steps over these weights -> columns, mask of what was reset. """
    layer = linear(weights[0], RECIPES["tetrajet_full"], outliers=outliers)
    layer.counter, layer.layer = Counter(seed), number
    if outliers:
        layer.set_channels(torch.arange(7, 7 + outliers))
    watch = remedy(name, {"a": layer}, start=start, window=20, tau=5.0)
    report = play(watch, layer, weights, first=start)[start + 20]
    return report, layer.weight.data != weights[-1]


@pytest.mark.parametrize("outliers", [0, 12])
@pytest.mark.parametrize("name", ["random", "nearest", "watch"])
def test_a_control_resets_as_many_others(name, outliers):
    """
    Catches: a control that resets what OsciReset found, a number that is not the window's, outlier columns or
    weights of dead blocks drawn. The tracking is the same, so what was found is.
    """
    weights = walk((16, 300), 21, size=0.005)
    weights[:, 3, 32:48] = 0.0
    full, mask = control("reset", weights, outliers=outliers)
    report, other = control(name, weights, outliers=outliers)
    assert report["found"] == full["reset"] + full["refused"] > 100
    for column in ("tracked", "flips", "reversals", "single", "near_share", "scale_flicker"):
        assert report[column] == full[column]
    if name == "watch":
        assert not other.any() and (report["reset"], report["refused"]) == (0, 0)
        return
    assert report["reset"] + report["refused"] == report["found"] and report["refused"] < 0.03 * mask.sum()
    assert report["reset_single"] + report["reset_never"] > full["reset_single"] + full["reset_never"]
    share, overlap = mask.float().mean(), (mask & other).sum() / mask.sum()
    # a random choice meets the other by chance: 5 sigma
    assert overlap < 0.9 and (name == "nearest" or abs(overlap - share) < 5 * (share / mask.sum()) ** 0.5)
    assert not other[:, 7:7 + outliers].any()


def test_the_random_control_is_a_function_of_seed_step_and_layer():
    """ Catches: the same weights in each window or layer, and a choice that no seed repeats. """
    weights = walk((16, 300), 21, size=0.005)
    base = control("random", weights)[1]
    assert torch.equal(base, control("random", weights)[1])
    for other in (dict(seed=4), dict(number=1), dict(start=1)):
        assert (base & control("random", weights, **other)[1]).sum() < 0.5 * base.sum(), other


def test_the_nearest_are_nearest():
    """ Catches: distances in code units, the farthest taken, or those nearest when the window opened. """
    weights = walk((16, 300), 21, size=0.005)
    report, mask = control("nearest", weights)
    y = in_code_units(weights[-1], quantize(weights[-1], BASE.y_w))
    share = torch.stack([(y - t).abs() / gap for t, gap in THRESHOLDS]).amin(0)
    limit = share.flatten().sort().values[report["found"] - 1]
    assert (share[mask] <= limit * (1 + 1e-4)).all() and mask.sum() == report["reset"] > 100


def test_edge_measures_the_gap_of_the_threshold():
    """ Catches: a width that is not the gap, so that one side of 2 and 4 is never or always reset. """
    ys, hits = [], []
    for threshold, gap in THRESHOLDS:
        for side in (-1, 1):
            ys += [threshold + side * 0.004 * gap, threshold + side * 0.006 * gap]
            hits += [True, False]
    w = in_units([[y] for y in ys[:14]])[0].repeat(2, 1)
    w[0, :14], w[1, :14] = w[0, :14], torch.tensor(ys[14:]) * w[0, 15] / 6
    w[1] *= -1
    layer = linear(w)
    watch = remedy("edge", {"a": layer}, start=2, period=4, window=1)
    reports = [watch.after_step(step)[1] for step in range(6)]
    assert [bool(r) for r in reports] == [False, False, False, True, False, False]
    changed = layer.weight.data != w
    assert changed[:, :14].flatten().tolist() == hits and not changed[:, 14:].any()
    assert same(layer.weight.data[changed], fake_quantize(w, BASE.y_w)[changed])
    assert (reports[3]["osci_reset"], reports[3]["osci_near_share"]) == (14, 28 / 32)
    assert not [name for name in resumed({"a": layer}) if "osci" in name]


def test_a_random_subset():
    """ Catches: numbers twice, numbers that are never drawn, another draw for each micro-step or rank. """
    layer = linear(torch.zeros(1, 16))
    layer.counter = Counter(3)
    counts = torch.zeros(10)
    for step in range(1000):
        subset = random_subset(10, 3, layer, step, 10)
        assert len(set(subset.tolist())) == 3
        counts[subset] += 1
    assert (counts - 300).abs().max() < 5 * (1000 * 0.3 * 0.7) ** 0.5
    before = random_subset(100, 50, layer, 7, 10)
    layer.counter.set(9, micro=2)
    layer.counter.state[3] = 1
    assert torch.equal(before, random_subset(100, 50, layer, 7, 10))
    assert layer.counter.state.tolist() == [3, 9, 2, 1]
    assert not torch.equal(before, random_subset(100, 50, layer, 7, 11))


def test_random_channels_are_the_control_of_outcontrol():
    """ Catches: channels that follow the norms, that a seed does not repeat, or all layers the same. """
    def chosen(seed, number):
        layer = linear(torch.zeros(4, 512), RECIPES["tetrajet_full"], outliers=51)
        layer.counter, layer.layer = Counter(seed), number
        x = torch.randn(8, 512)
        x[:, :51] *= 30
        control = CHOICES["random"]({"a": layer}, 0, 1)
        control.before_step(0)
        layer(x)
        assert "51 input channels of 1 layers" in control.after_step(0)[0]
        assert layer.split and layer.channels.unique().numel() == 51
        return set(layer.channels.tolist())

    a = chosen(1, 0)
    # of 51 of 512, 5 meet 51 others by chance, with a deviation of 2.1
    assert a == chosen(1, 0) and len(a & set(range(51))) < 16
    assert len(a & chosen(2, 0)) < 16 and len(a & chosen(1, 1)) < 16


# -----------------------------------------------------------------------------
# all of them


@pytest.mark.parametrize("name, bytes_each", [("qema", 8), ("freeze", 12), ("dampen", 0), ("edge", 0)])
def test_the_host_waits_once_and_memory_is_bounded(name, bytes_each, monkeypatch):
    """ Catches: .item(), nonzero, an if on a tensor at each step; state that grows, or before the start. """
    layers = model()
    rival = remedy(name, layers, start=3, period=12, window=11, steps=20)
    lists, plain = lists_made(monkeypatch), resumed(layers, file=False)
    for layer in layers.values():
        layer.weight.grad = torch.zeros_like(layer.weight)
    with Ops() as ops:
        for step in range(14):
            rival.before_clip(step)
            assert rival.after_step(step) == ("", {})
            assert step > 2 or resumed(layers, file=False).keys() == plain.keys()
        assert not lists
        assert rival.after_step(14)[0]
    assert not ops.waits() and len(lists) == 1
    kept = [t for name, t in resumed(layers, file=False).items() if name not in plain]
    weights = sum(layer.weight.numel() for layer in layers.values())
    assert sum(t.numel() * t.element_size() for t in kept) == bytes_each * weights

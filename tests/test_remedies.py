"""
The remedies that OsciReset is compared with: what they do is what their papers say, block scales hold, and
a checkpoint forgets nothing.
"""
import csv
import io
import math

import pytest
import torch
import torch.nn.functional as F

import data
import eval
import quant
import train
from config import EMA_WARMUP, parse
from osci import full_scale, level, rounded_weight
from quant import E2M1, Operand, QuantLinear, Recipe, decode, fake_quantize, quantize, quantizers_off
from recipes import RECIPES
from remedies import Dampen, Freeze, QEma, ema_code, stand_in
from test_osci import (BASE, KINDS, OPERANDS, SCHEDULE, WINDOW, Ops, adversarial, in_units, linear, model,
                       play, same, walk)
from test_train import WINDOWS, assert_same, go, last_state, learned, shards, tiny  # noqa: F401 (fixtures)

GRID = decode(torch.arange(8, dtype=torch.uint8), E2M1).double()
PHASES = {k: v for k, v in SCHEDULE.items() if k != "track"}
REMEDIES = {"qema": (QEma, dict(decay=0.9, warmup=4)), "freeze": (Freeze, dict(steps=20, threshold=0.005)),
            "dampen": (Dampen, dict(steps=20, strength=0.1))}


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
    (1.5, 9.0, 1.5), (3.0, -9.0, 3.0),             # on a grid value there is no other neighbour
    (1.2, 1.25, 1.0), (1.6, 1.75, 2.0), (2.9, 2.5, 2.0), (3.1, 3.5, 4.0), (5.9, 5.0, 4.0),    # ties: even
])
def test_which_neighbour(y, mean, expected):
    """ Catches: the mean rounded by itself, neighbours of the mean, magnitudes, ties to the lower one. """
    w, means = block(y), block(mean)
    code = ema_code(w, means, quantize(w, PLAIN.y_w))[0, 0]
    assert decode(code & 7, E2M1) == abs(expected) and bool(code >> 3) == (y < 0)


def by_hand(w, mean, q):
    """ The definition in float64: (N, K) grid values in code units, without sign; which were clear. """
    scale = full_scale(q).double()
    y = torch.where(scale > 2.0**-127, w.double().abs() / scale, 0.0)
    y_mean = torch.where(scale > 2.0**-127, mean.double() * torch.where(w < 0, -1, 1) / scale, 0.0)
    high = GRID[torch.searchsorted(GRID, y.clamp(max=6.0)).clamp(max=7)]
    low = torch.where(high <= y, high, GRID[(torch.searchsorted(GRID, y.clamp(max=6.0)) - 1).clamp(min=0)])
    clear = ((y_mean - (low + high) / 2).abs() > 1e-5) & ((y[..., None] - GRID).abs().amin(-1) > 1e-5)
    return torch.where((y_mean - low).abs() < (y_mean - high).abs(), low, high), clear


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
            rows, columns = op.block
            lowest = w.abs()[refused] * (1 + 1e-6) >= largest_of_blocks(w, rows, columns)[refused]
            assert lowest.all() and (code < q.code)[refused].all() and differs.sum() > 10
            assert size < 1 or refused.any()


def largest_of_blocks(w, rows, columns):
    N, K = w.shape
    padded = F.pad(w.abs(), (0, -K % columns, 0, -N % rows))
    blocks = padded.view(-1, rows, padded.shape[1] // columns, columns).amax(dim=(1, 3))
    return blocks.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:N, :K]


def standing_in(recipe, outliers=0, N=36, K=140):
    """ A layer of random weights with a stand-in that differs from them; and the codes it stands for. """
    torch.manual_seed(0)
    layer = QuantLinear(K, N, bias=False, recipe=recipe, outliers=outliers, counter=quant.Counter(3))
    if outliers:
        layer.set_channels(torch.arange(0, 11 * outliers, 11))
    mean = layer.weight.detach() * (1 + 0.5 * torch.randn(N, K))
    QEma.follow(layer, mean)
    return layer, mean


def run(layer, x, dy):
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(dy)
    return y.detach(), leaf.grad, layer.weight.grad


@pytest.mark.parametrize("outliers", [0, 5])
def test_the_forward_pass_rounds_the_stand_in_and_the_weight_gets_the_gradient(outliers):
    """
    Catches: a gradient that stops at the stand-in, or is masked where it differs; Q4 made from the weight;
    outlier columns that are replaced too.
    """
    layer, _ = standing_in(RECIPES["tetrajet_full"], outliers)
    twin = QuantLinear(140, 36, bias=False, recipe=layer.recipe, outliers=outliers, counter=layer.counter)
    twin.load_state_dict(layer.state_dict())
    twin.weight.data.copy_(layer.stand_in)
    assert (layer.weight != layer.stand_in).float().mean() > 0.02
    assert same(layer.weight.data[:, layer.channels[:outliers]], layer.stand_in[:, layer.channels[:outliers]])
    x, dy = torch.randn(24, 140), torch.randn(24, 36)
    for a, b in zip(run(layer, x, dy), run(twin, x, dy), strict=True):
        assert same(a, b)
    assert layer.weight.grad.abs().min() > 0 and layer.stand_in.grad is None
    with quantizers_off(layer):
        assert torch.equal(layer(x), F.linear(x, layer.weight))
    with torch.no_grad():
        w, q = rounded_weight(layer)
        assert torch.equal(q.code, quantize(twin.forward_weight(), layer.recipe.y_w).code)
        zeroed = layer.weight if not outliers else layer.weight.index_fill(1, layer.channels, 0.0)
        assert same(w, zeroed)


def test_the_compiled_layer_with_a_stand_in_is_the_eager_one():
    """ Catches: a graph break, and a stand-in that tracing freezes: it changes in place after each step. """
    layer, mean = standing_in(BASE)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, dy = torch.randn(24, 140), torch.randn(24, 36)
    before = run(layer, x, dy)[0]
    for _ in range(2):
        for a, b in zip(run(layer, x, dy), run(compiled, x, dy), strict=True):
            assert same(a, b)
        with torch.no_grad():
            place = layer.stand_in.data_ptr()
            QEma.follow(layer, mean * 1.2)
            assert layer.stand_in.data_ptr() == place
    assert not torch.equal(run(layer, x, dy)[0], before)


def test_a_trembling_weight_is_still():
    """
    Catches: a mean that is not that of the weight, or follows at once; the forward pass too early or late.
    Of two that swing, the one whose mean lies above the threshold rounds up, and neither flips.
    """
    swings = [1.24, 1.26] * 13 + [1.24]
    weights = in_units([swings, [2.5 - y for y in swings], [1.25001] * 27])
    layer = linear(weights[0])
    remedy = QEma({"a": layer}, start=2, period=16, window=WINDOW, decay=0.5, warmup=4)
    mean = weights[2, 0, :2].double()
    for step, w in enumerate(weights):
        layer.weight.data.copy_(w)
        remedy.after_step(step)
        if step > 2:
            mean = 0.5 * mean + 0.5 * w[0, :2].double()
        assert (layer.stand_in is not None) == (step >= 2 + 4)
        if step >= 2:
            assert remedy.kept["a"]["mean"][0, :2].tolist() == pytest.approx(mean.tolist(), rel=1e-6)
    # that mean swings itself; one of a decay of .9983 does not
    slow = linear(weights[0])
    remedy = QEma({"a": slow}, start=0, period=16, window=WINDOW, decay=0.9983, warmup=4)
    reports = play(remedy, slow, weights)
    # the first window sees both ways of rounding, the second one only the average's
    assert reports[WINDOW].flips > 0
    assert (reports[16 + WINDOW].flips, reports[16 + WINDOW].found) == (0, 0)
    assert reports[16 + WINDOW].reset == 0 and same(slow.weight.data, weights[-1])
    watch = train.OsciReset({"a": linear(weights[0])}, "watch", 0, 16, WINDOW)
    assert play(watch, watch.layers["a"], weights)[16 + WINDOW].flips == 16


def test_a_decay_of_nothing_is_rounding_to_nearest():
    """ Catches: the average of the step before, and refusals where nothing is asked for. """
    weights = walk((8, 128), 12, size=0.05)
    layer = linear(weights[0])
    report = play(QEma({"a": layer}, 0, 20, 10, decay=0.0, warmup=0), layer, weights)[10]
    assert (report.held, report.refused) == (0, 0) and same(layer.stand_in, weights[-1])


def test_what_q_ema_reports():
    """ Catches: refused weights counted as held, and neither counted. """
    layer = linear(block(1.2, 1.3, -1.2), PLAIN)
    remedy = QEma({"a": layer}, 0, 10, 1, decay=0.999, warmup=0)
    remedy.after_step(0)
    # the last one holds the scale at 5.9, nearer to 6 than to 4, and its mean says 4
    remedy.kept["a"]["mean"].copy_(block(1.3, 1.3, -1.2, last=4.0))
    layer.weight.data[0, 15] = 5.9
    report = remedy.after_step(1)
    assert (report.held, report.refused) == (1, 1)


# -----------------------------------------------------------------------------
# Freeze


def freeze_by_hand(weights, op, thresholds):
    """ The paper's algorithm in float64, on weights that freezing does not change -> when frozen, and at. """
    now = torch.stack([level(quantize(w, op).code) for w in weights]).long()
    N, K = now.shape[1:]
    steps, targets = torch.full((N, K), -1), torch.zeros(N, K)
    margin = math.inf
    for n in range(N):
        for k in range(K):
            last, direction, f, mean = int(now[0, n, k]), 0, 0.0, float(now[0, n, k])
            for step in range(1, len(now)):
                i = int(now[step, n, k])
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
    remedy = Freeze({"a": layer}, 0, 100, 50, steps=60, threshold=0.02)
    seen = torch.full((4, 48), -1)
    for step, w in enumerate(weights):
        layer.weight.data.copy_(w)
        # levels are those of the walk: what is frozen is not written, so that scales are the walk's as well
        remedy.after_step(step)
        seen[(seen < 0) & remedy.kept["a"]["frozen"]] = step
    first = steps >= 0
    assert first.sum() > 8 and (~first).sum() > 50 and len(steps[first].unique()) > 3
    assert torch.equal(seen, steps)
    assert torch.equal(remedy.kept["a"]["target"][first].float(), targets[first])


def test_a_frozen_weight_keeps_its_code_while_the_scale_moves():
    """ Catches: the value frozen in place of the code, or written once and then left to the optimizer. """
    weights = walk((6, 300), 30, size=0.02)
    layer = linear(weights[0])
    remedy = Freeze({"a": layer}, 0, 40, 20, steps=40, threshold=1.0)
    remedy.FIRST = 1.0                                # nothing else is frozen
    remedy.after_step(0)
    kept = remedy.kept["a"]
    kept["frozen"][:, ::3] = True
    kept["target"].copy_(kept["level"])
    wanted = kept["target"][:, ::3].clone()
    scales = []
    for step, move in enumerate(weights.diff(dim=0), 1):
        layer.weight.data += move * 5
        report = remedy.after_step(step)
        q = quantize(layer.weight.detach(), BASE.y_w)
        held = level(q.code)[:, ::3] == wanted
        assert held.float().mean() > 0.97
        scales.append(full_scale(q))
        if step == 20:
            assert report.held == wanted.numel() and report.refused < 0.03 * report.held
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
    remedy = Freeze({"a": layer}, 0, 100, 50, steps=100)
    remedy.after_step(0)
    kept = remedy.kept["a"]
    kept["frozen"][0, [0, 15]] = True
    kept["target"][0, [0, 15]] = torch.tensor([2, 6], dtype=torch.int8)
    for step in range(1, 20):
        layer.weight.data[0, 0] += 0.1
        with torch.no_grad():
            seen = remedy.act(layer, kept, step)
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
    remedy = Freeze({"a": layer}, 0, 100, 50, steps=100)
    remedy.after_step(0)
    kept = remedy.kept["a"]
    assert kept["level"][0, [0, 20]].tolist() == [7, 6]
    before = quantize(w, BASE.y_w)
    kept["frozen"][0, 20] = True
    kept["target"].copy_(kept["level"])
    for step in range(1, 4):
        with torch.no_grad():
            seen = remedy.act(layer, kept, step)
        after = quantize(layer.weight.detach(), BASE.y_w)
        assert torch.equal(after.inner, before.inner) and torch.equal(after.code, before.code)
        assert (int(seen["held"]), int(seen["refused"])) == (1, 1) and same(layer.weight.data, w)


def test_the_threshold_falls_from_a_tenth():
    """ Catches: rising in place of falling; a schedule that begins at step 0 or ends after the last step. """
    layer = linear(walk((2, 16), 1, 0.0)[0])
    remedy = Freeze({"a": layer}, 10, 20, 5, steps=31, threshold=0.01)
    seen = []
    remedy.track = lambda kept, now, threshold: seen.append(threshold)
    for step in range(31):
        remedy.after_step(step)
    assert len(seen) == 20 and all(a > b for a, b in zip(seen, seen[1:]))
    assert seen[9] == pytest.approx(0.055) and seen[-1] == pytest.approx(0.01) and 0.099 < seen[0] < 0.1


def test_freeze_leaves_outlier_channels_alone():
    """ Catches: the zeros that stand for outlier columns written over them. """
    layer = linear(walk((4, 64), 1, 0.0)[0], RECIPES["tetrajet_full"], outliers=3)
    remedy = Freeze({"a": layer}, 0, 100, 50, steps=100)
    remedy.after_step(0)
    remedy.kept["a"]["frozen"].fill_(True)
    before = layer.weight.data.clone()
    layer.set_channels(torch.tensor([3, 20, 40]))
    remedy.after_step(1)
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
    remedy = Dampen(layers, start=3, period=20, window=5, steps=14, strength=0.02)
    expected = {}
    for name, layer in layers.items():
        layer.weight.grad = torch.randn(layer.weight.shape)
        grad, = torch.autograd.grad(strength * penalty(layer), layer.weight)
        expected[name] = layer.weight.grad + grad
        bound = 6 * full_scale(rounded_weight(layer)[1])
        assert (layer.weight.abs() > bound).any() and (strength == 0 or grad.abs().max() > 0)
    remedy.add_gradient(2)
    for name, layer in layers.items():
        assert (layer.weight.grad - expected[name]).abs().max() > 0 or strength == 0
    remedy.add_gradient(step)
    for name, layer in layers.items():
        torch.testing.assert_close(layer.weight.grad, expected[name], rtol=1e-6, atol=1e-9)
    split = layers["down"]
    grad, = torch.autograd.grad(penalty(split), split.weight)
    assert not grad[:, split.channels].any()


def test_dampen_reports_the_sum_of_squares():
    layers = model()
    expected = sum(float(penalty(layer).detach()) for layer in layers.values())
    remedy = Dampen(layers, 0, 20, 1, steps=14)
    assert remedy.after_step(0) is None
    assert remedy.after_step(1).penalty == pytest.approx(expected, rel=1e-5) and expected > 0


def test_dampening_is_part_of_the_gradient_that_is_clipped(shards):
    """ Catches: a hook that is never called, or only after the norm was taken. """
    norms = []
    for strength in (1e-9, 1e3):
        cfg = parse(tiny(shards, "--recipe=tetrajet_base", *WINDOWS[3:], "--osci=dampen", "--lr=1e-9",
                         f"--osci_strength={strength}"))
        trainer = train.Trainer(cfg, data.open_corpus(str(shards)))
        norms.append([float(trainer.train_step()["grad_norm"]) for _ in range(12)])
    assert norms[0][:9] == norms[1][:9]              # it begins at step 8, with strength 0
    assert norms[1][10] > 1.5 * norms[0][10]


# -----------------------------------------------------------------------------
# all of them


def journey(layers, remedy, steps):
    """ A made-up optimizer whose gradients depend on the step, and on the forward pass that it sees. """
    reports = {}
    for step in steps:
        for i, layer in enumerate(layers.values()):
            g = torch.Generator().manual_seed(1000 * i + step)
            layer.counter.set(step)
            layer.zero_grad()
            layer(torch.randn(8, layer.in_features, generator=g)).square().sum().backward()
        if isinstance(remedy, Dampen):
            remedy.add_gradient(step)
        for i, layer in enumerate(layers.values()):
            g = torch.Generator().manual_seed(2000 * i + step)
            noise = torch.randn(layer.weight.shape, generator=g) * 1e-3
            layer.weight.data += noise - 1e-5 * layer.weight.grad
        report = remedy.after_step(step)
        if report:
            reports[step] = report
    return reports


@pytest.mark.parametrize("cut", [2, 5, 10, 13, 17])
@pytest.mark.parametrize("name", REMEDIES)
def test_ten_and_ten_steps_are_twenty(name, cut):
    """ Catches: an average, a frequency or a stand-in that a checkpoint forgets, at any phase. """
    def start():
        layers = model()
        kind, settings = REMEDIES[name]
        return layers, kind(layers, **PHASES, **settings)

    straight, remedy = start()
    reports = journey(straight, remedy, range(20))
    assert list(reports) == [13] and (reports[13].held > 0 or reports[13].penalty > 0)
    first, remedy = start()
    journey(first, remedy, range(cut))
    saved = {"model": {n: m.state_dict() for n, m in first.items()}, "osci": remedy.state_dict()}
    if cut % 2:                                      # else the very tensors, which must then be copied
        file = io.BytesIO()
        torch.save(saved, file)
        saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    second, resumed = start()
    for n, layer in second.items():
        layer.load_state_dict(saved["model"][n])
        assert not any("stand_in" in key for key in saved["model"][n])
    resumed.load_state_dict(saved["osci"])
    journey(first, remedy, range(cut, cut + 2))      # the old run must not reach into the new one
    rest = journey(second, resumed, range(cut, 20))
    assert rest == {step: report for step, report in reports.items() if step >= cut}
    assert all(same(second[n].weight.data, straight[n].weight.data) for n in straight)


@pytest.mark.parametrize("name", REMEDIES)
def test_no_host_sync_between_reports(name):
    """ Catches: .item(), nonzero, an if on a tensor: the GPU would wait for the host at each step. """
    layers = model()
    kind, settings = REMEDIES[name]
    remedy = kind(layers, **PHASES, **settings)
    for layer in layers.values():
        layer.weight.grad = torch.zeros_like(layer.weight)
    with Ops() as ops:
        for step in range(13):
            if name == "dampen":
                remedy.add_gradient(step)
            assert remedy.after_step(step) is None
    waits = ("_local_scalar_dense", "nonzero", "aten.equal", "masked_select", "unique")
    assert not [op for op in ops.names if any(w in op for w in waits)]
    with Ops() as ops:
        assert remedy.after_step(13)
    assert any("_local_scalar_dense" in op for op in ops.names), "the detector does not detect"


@pytest.mark.parametrize("name, bytes_each", [("qema", 4), ("freeze", 12), ("dampen", 0)])
def test_memory(name, bytes_each):
    """ Catches: state that grows, or is kept before the start. """
    layers = model()
    kind, settings = REMEDIES[name]
    remedy = kind(layers, **PHASES, **settings)
    sizes = []
    for step in range(15):
        remedy.after_step(step)
        sizes.append(remedy.state_bytes())
    weights = sum(layer.weight.numel() for layer in layers.values())
    assert sizes[2] == 0 and sizes[14] == bytes_each * weights


@pytest.mark.parametrize("name", REMEDIES)
def test_state_that_does_not_fit_is_refused(name):
    """ Catches: the average of one layer applied to another, or of another type. """
    layers = model()
    kind, settings = REMEDIES[name]
    remedy = kind(layers, **PHASES, **settings)
    journey(layers, remedy, range(15))
    state = remedy.state_dict()
    for kept in ({}, {"mean": torch.ones(1)}, {"mean": torch.ones(6, 100, dtype=torch.float64)}):
        if kept or name != "dampen":
            with pytest.raises(ValueError, match="of up does not fit"):
                remedy.load_state_dict(state | {"kept": state["kept"] | {"up": kept}})


@pytest.mark.parametrize("kind, settings, message", [
    (QEma, dict(decay=1.0), "decay < 1"), (QEma, dict(warmup=-1), "warmup >= 0"),
    (Freeze, dict(threshold=1.5), "threshold <= 1"), (Freeze, dict(steps=3), "steps > start"),
    (Dampen, dict(strength=0.0), "strength > 0"), (Dampen, dict(steps=2), "steps > start"),
    (Dampen, dict(window=12), "window < period"),
])
def test_what_cannot_work_is_refused(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        kind(model(), **PHASES | settings)
    with pytest.raises(ValueError, match="not rounded to FP4"):
        kind({"a": linear(torch.ones(4, 16), RECIPES["bf16"])}, **PHASES)


def test_the_warm_up_is_the_one_that_config_checks():
    """ Catches: a run that is accepted and ends before Q-EMA begins. """
    assert QEma(model(), **PHASES).warmup == EMA_WARMUP


# -----------------------------------------------------------------------------
# in a run

Q_EMA = ["--recipe=tetrajet_full", *WINDOWS, "--osci=qema", "--osci_start=0", "--osci_decay=0.9", "--lr=1e-2"]


def test_a_checkpoint_of_q_ema_is_evaluated_as_it_was_trained(go):
    """ Catches: an evaluation, or a resumed run, that rounds to nearest what was trained otherwise. """
    straight, printed = go("straight", *Q_EMA)
    go("resumed", *Q_EMA, "--stop_at=15")
    resumed, _ = go("resumed", *Q_EMA)
    assert_same(learned(last_state(straight)), learned(last_state(resumed)))

    net, cfg, corpus, _ = eval.load_checkpoint(straight, device="cpu")
    losses = eval.val_losses(net, corpus, cfg)
    block = dict(line.split(": ", 1) for line in printed.splitlines()[-8:])
    assert f"{losses['val_loss_fp4']:.4f}" == block["val_loss_fp4"]
    assert f"{losses['val_loss_bf16']:.4f}" == block["val_loss_bf16"]
    for layer in net.modules():
        if isinstance(layer, QuantLinear):
            layer.stand_in = None
    assert eval.val_losses(net, corpus, cfg)["val_loss_fp4"] != losses["val_loss_fp4"]


@pytest.mark.parametrize("change", [
    dict(kept={}), dict(kept={"blocks.0.attn.qkv": {}}), dict(following=None),
])
def test_a_crafted_checkpoint_is_one_line(go, capsys, change):
    """ Catches: a traceback, or a checkpoint without its averages that is evaluated as if it had them. """
    folder, _ = go("r", *Q_EMA, "--stop_at=14")
    path, = folder.glob("ckpt_*.pt")
    state = torch.load(path, weights_only=True)
    state["osci"] |= change
    if change == dict(following=None):
        del state["osci"]["following"]
    torch.save(state, path)
    with pytest.raises(eval.CheckpointError, match="does not fit this program"):
        eval.load_checkpoint(folder, device="cpu")
    with pytest.raises(SystemExit) as error:
        go("r", *Q_EMA)
    err = capsys.readouterr().err
    assert error.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1, err


@pytest.mark.parametrize("osci, said", [
    ("watch", "OsciReset would have put"), ("random", "the control put random"),
    ("nearest", "weights nearest to a threshold"), ("qema", "Q-EMA rounds"), ("freeze", "Freeze holds"),
    ("dampen", "Dampen's sum of squared distances"),
])
def test_what_a_run_says(go, osci, said):
    """ Catches: a remedy that is accepted and never acts, a report without words or columns. """
    folder, printed = go(osci, "--recipe=tetrajet_base", *WINDOWS[3:], f"--osci={osci}", "--osci_start=0.1",
                         "--osci_period=0.6", "--osci_window=0.5", "--osci_tau=0.2", "--lr=1e-2",
                         "--osci_threshold=0.001")
    assert said in printed and "of them reversals" in printed
    row, = [row for row in csv.DictReader((folder / "metrics.csv").open()) if row["osci_flips"]]
    assert row["step"] == "12" and int(row["osci_found"]) > 0
    assert (int(row["osci_reset"]) > 0) == (osci in ("random", "nearest"))
    assert (float(row["osci_penalty"]) > 0) == (osci == "dampen")

"""
OsciReset: which weights are found, what a reset does to them, and that it touches nothing else.

Most trajectories are written in code units, w = y * UNIT: one block of 16 whose column 15 stays at 6 units,
so that its scale is exactly UNIT and a weight's rounding can be read off the table of E2M1.
"""
import io
from dataclasses import fields, replace
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import osci
from osci import MODES, THRESHOLDS, OsciReset, Report, Window, rounded_weight
from quant import E4M3, TENSOR, Counter, Operand, QuantLinear, Recipe, decode, fake_quantize, quantize
from recipes import MXFP4, NEAREST, RECIPES

UNIT = 448 * 2.0**-9       # 6 * UNIT / 448 / 6 is 2^-9 exactly, so inner times outer scale comes to this
BASE = RECIPES["tetrajet_base"]
OPERANDS = {
    "double block": Operand(),
    "per tensor": Operand(outer=TENSOR),
    "squares": Operand(block=(16, 16), outer=TENSOR),
    "outer 32": Operand(outer=32),
    "no outer": Operand(outer=0),
    "mxfp4": Operand(block=(1, 32), scale="e8m0", outer=0),
    "17/16": Operand(rule="17/16"),
}


def linear(weight, recipe=BASE, outliers=0, dtype=None):
    N, K = weight.shape
    layer = QuantLinear(K, N, bias=False, recipe=recipe, outliers=outliers, dtype=dtype)
    layer.weight.data.copy_(weight)
    return layer


def in_units(columns):
    """ Lists of y over time, one for each of the first columns -> weights (steps, 1, 16). """
    steps = len(columns[0])
    w = torch.zeros(steps, 1, 16)
    w[:, 0, 15] = 6 * UNIT
    for i, y in enumerate(columns):
        w[:, 0, i] = torch.tensor(y) * UNIT
    return w


def play(watch, layer, weights, first=0):
    """ Set the layer's weight to each of weights in turn, as an optimizer would -> the reports by step. """
    reports = {}
    for step, w in enumerate(weights, first):
        layer.weight.data.copy_(w)
        report = watch.after_step(step)
        if report:
            reports[step] = report
    return reports


def walk(shape, steps, size, seed=0, scale=0.02):
    """ Gaussian weights that take random steps of about `size` of their own size -> (steps, *shape). """
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=g) * scale
    moves = torch.randn(steps - 1, *shape, generator=g) * scale * size
    return torch.cat((w[None], w + moves.cumsum(0)))


def same(a, b):
    """ Equal bit for bit, and in the sign of zero. """
    return torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


# -----------------------------------------------------------------------------
# what is found

WINDOW = 8
SWINGS = [1.24, 1.26] * 4 + [1.24]                            # 8 flips, 7 reversals, ratio .5 / .02 = 25
DRIFTS = [1.20 + 0.0126 * i for i in range(9)]                # 1 flip, ratio .5 / .1 = 5
CREEPS = [1.245 + 0.0013 * i for i in range(9)]               # 1 flip, ratio .5 / .0104 = 48
TRAVELS = [0.1 + 0.5 * i for i in range(9)]                   # 0 .5 1 1.5 2 3 3 4 4: 6 flips, ratio 1
RESTS = [1.25001] * 9
TREMBLES = [1.0, 1.1] * 4 + [1.0]                             # inside its cell
CROSSES_ZERO = [-0.01, 0.01] * 4 + [-0.01]                    # -0 and +0 are the same value
NEGATIVE = [-y for y in SWINGS]
TURNS_ONCE = [2.49] * 2 + [2.51] * 4 + [2.49] * 3             # 2 flips, 1 reversal, ratio 2 / .04 = 50
CLIMBS = [-0.4, -0.4, -0.1, -0.1, 0.1, 0.1, 0.4, 0.4, 0.4]    # -.5 -0 0 .5: 2 flips, both upwards
LEAPS = [-0.26] * 4 + [0.26] * 5                              # -.5 to .5 in one step: 1 flip
CAST = [SWINGS, DRIFTS, CREEPS, TRAVELS, RESTS, TREMBLES, CROSSES_ZERO, NEGATIVE, TURNS_ONCE, CLIMBS, LEAPS]


def test_a_known_cast():
    """
    Catches: a ratio upside down; a reversal counted at the first flip; -0 to +0 counted as a flip; flips by
    magnitude, so that a climb through zero turns back; codes instead of levels, where 6 to -0 is upwards.
    """
    layer = linear(torch.zeros(1, 16))
    watch = OsciReset({"a": layer}, "full", start=0, period=100, window=WINDOW, tau=8.0)
    report = play(watch, layer, in_units(CAST))[WINDOW]
    expected = dict(weights=16, tracked=16, flips=8 + 1 + 1 + 6 + 8 + 2 + 2 + 1, reversals=7 + 7 + 1,
                    single=3, reset=4, reset_single=1, reset_never=0, refused=0, scale_changes=0)
    assert {k: v for k, v in report.row().items() if k in expected} == expected
    # within a tenth of the gap at the end: all that are reset, RESTS and LEAPS; DRIFTS ends outside, at 1.301
    assert report.near == 6
    w = layer.weight.data[0] / UNIT
    assert w[[0, 2, 7, 8]].tolist() == [1.0, 1.5, -1.0, 2.0]      # 2.0 and not 2.125, the middle of its cell
    expected = in_units(CAST)[-1, 0]
    kept = [1, 3, 4, 5, 6, *range(9, 16)]
    assert same(layer.weight.data[0][kept], expected[kept])


@pytest.mark.parametrize("mode", ["full", "topk"])
@pytest.mark.parametrize("tau, resets", [(1.9, [0, 1, 2]), (4, [0, 1]), (6, [0]), (24, [0]), (26, [])])
def test_tau_is_compared_with_the_ratio(mode, tau, resets):
    """ Catches: tau squared or per step, a step left out, distances between magnitudes (LEAPS, 1 / .52). """
    layer = linear(torch.zeros(1, 16))
    watch = OsciReset({"a": layer}, mode, 0, 100, WINDOW, tau=tau, track=1.0)
    weights = in_units([SWINGS, DRIFTS, LEAPS])
    play(watch, layer, weights)
    assert (layer.weight.data != weights[-1])[0].nonzero().flatten().tolist() == resets


@pytest.mark.parametrize("mode", ["full", "topk"])
@pytest.mark.parametrize("tau, resets", [(7.99, 1), (8.0, 1), (8.01, 0)])
def test_a_ratio_of_exactly_tau_is_reset(mode, tau, resets):
    """ Catches: > for >=. Every number here is a few bits long, so nothing is rounded. """
    layer = linear(torch.zeros(1, 16))
    watch = OsciReset({"a": layer}, mode, 0, 100, WINDOW, tau=tau, track=1.0)
    assert play(watch, layer, in_units([[1.21875, 1.28125] * 4 + [1.21875]]))[WINDOW].reset == resets


def test_a_scale_that_flickers():
    """
    Catches: a still weight reset because its neighbour moves the scale (x / 0); flicker not counted, or taken
    for flips. The second block's maximum swings between two E4M3 scales, and no code changes.
    """
    weights = torch.zeros(9, 1, 32)
    weights[:, 0, 15] = 6 * UNIT
    weights[:, 0, 16:20] = torch.tensor([1.0, -2.0, 0.5, 4.0]) * UNIT / 4
    weights[:, 0, 31] = 6 * UNIT / 4
    weights[1::2, 0, 31] *= 1.12                          # the scale's next E4M3 value is 8/7 of it
    weights[1::2, 0, 16] *= 1 + 1e-6                      # this one moves a little, without a flip
    layer = linear(torch.zeros(1, 32))
    report = play(OsciReset({"a": layer}, "full", 0, 100, WINDOW), layer, weights)[WINDOW]
    assert (report.scale_changes, report.scale_steps) == (8, 16)
    assert (report.flips, report.reset, report.reset_never) == (0, 1, 1)
    assert same(layer.weight.data[0, 17:], weights[-1, 0, 17:])


def by_hand(weights, op, tau):
    """ The definition, weight by weight, in float64 and plain Python -> ratio and once (N, K), counts. """
    q = torch.stack([fake_quantize(w, op) for w in weights]).double()
    codes = torch.stack([quantize(w, op).code for w in weights]).long()
    levels = torch.where(codes >= 8, 8 - codes, codes)
    dist_q, dist_m = q.diff(dim=0).abs().sum(0), weights.double().diff(dim=0).abs().sum(0)
    flips = reversals = single = 0
    once = torch.zeros_like(dist_q, dtype=torch.bool)
    for n in range(levels.shape[1]):
        for k in range(levels.shape[2]):
            jumps = [b - a for a, b in zip(levels[:-1, n, k].tolist(), levels[1:, n, k].tolist()) if b != a]
            flips += len(jumps)
            reversals += sum(a * b < 0 for a, b in zip(jumps, jumps[1:]))
            single += len(jumps) == 1
            once[n, k] = len(jumps) == 1
    ratio = torch.where(dist_m > 0, dist_q / dist_m, 0.0)
    return ratio, once, flips, reversals, single


@pytest.mark.parametrize("name, N, K", [("double block", 3, 300), ("mxfp4", 5, 100), ("squares", 17, 40)])
def test_random_walks_against_the_definition(name, N, K):
    """ Catches: any error in the packed byte, in the sum that replaces two, in ragged or square blocks. """
    op, tau = OPERANDS[name], 6.0
    weights = walk((N, K), 21, size=0.004)
    weights[:, :, 7] = weights[0, :, 7]                           # some do not move
    ratio, once, flips, reversals, single = by_hand(weights, op, tau)
    assert ((ratio - tau).abs() > 1e-4).all(), "an exact tie: choose another seed"
    layer = linear(weights[0], Recipe(y_w=op))
    report = play(OsciReset({"a": layer}, "full", 0, 50, 20, tau), layer, weights)[20]
    wanted = ratio >= tau
    assert report.flips == flips and report.reversals == reversals and report.single == single
    assert report.reset + report.refused == wanted.sum() and wanted.sum() > 20
    assert report.reset_single <= (wanted & once).sum() <= report.reset_single + report.refused
    assert (wanted & once).sum() > 0 and (wanted & ~once).sum() > 0
    changed = layer.weight.data != weights[-1]
    assert not (changed & ~wanted).any()
    landed = fake_quantize(weights[-1], op)
    assert same(layer.weight.data[changed], landed[changed])


@pytest.mark.parametrize("K", [128, 300])
def test_topk_with_everything_tracked_is_full(K):
    """ Catches: gather and scatter with different columns; the columns of another row. """
    weights = walk((6, K), 21, size=0.01)
    results = []
    for mode in ("full", "topk"):
        layer = linear(weights[0])
        report = play(OsciReset({"a": layer}, mode, 0, 50, 20, track=1.0), layer, weights)[20]
        results.append((report, layer.weight.data))
    assert results[0][0] == results[1][0] and results[0][0].reset > 10
    assert same(results[0][1], results[1][1])


def test_topk_resets_a_subset_of_full():
    """ Catches: topk's rows mixed up by an index of the wrong type, or statistics of untracked weights. """
    weights = walk((16, 512), 21, size=0.005)
    layers = {mode: linear(weights[0]) for mode in ("full", "topk")}
    reports = {mode: play(OsciReset({"a": layer}, mode, 0, 50, 20, track=0.05), layer, weights)[20]
               for mode, layer in layers.items()}
    full, topk = ((layers[mode].weight.data != weights[-1]) for mode in ("full", "topk"))
    assert reports["topk"].tracked == 16 * 25 and 50 < reports["topk"].reset < reports["full"].reset
    assert not (topk & ~full).any()


# -----------------------------------------------------------------------------
# mode topk: which weights, and how much memory


def gaussian(N=256, K=1024):
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    q = quantize(w, Operand())
    return w, q, osci.code_units(w, q)


def shares(y):
    """ How y are distributed over the seven thresholds, each counted at the nearest one. """
    nearest = torch.stack([(y - t).abs() for t, _ in THRESHOLDS]).argmin(0)
    return torch.bincount(nearest.flatten(), minlength=7) / y.numel()


def test_topk_takes_the_nearest_of_each_row():
    """ Catches: the farthest taken; distances in weight units, not code units; the sign of w left in. """
    w, q, _ = gaussian(N=8, K=300)
    inner, outer = decode(q.inner, E4M3).repeat_interleave(16, 1), q.outer.repeat_interleave(128, 1)
    y = (w.double() / (inner[:, :300] * outer[:, :300]).double()).abs()
    distance = torch.stack([(y - t).abs() for t, _ in THRESHOLDS]).amin(0)
    columns = osci.nearest_columns(linear(w), w, q, 0.05)
    assert columns.shape == (8, 15) and columns.dtype == torch.int16
    for row, chosen in zip(distance, columns.long()):
        assert chosen.unique().numel() == 15
        rest = torch.ones(300, dtype=torch.bool).index_fill_(0, chosen, False)
        assert row[chosen].max() <= row[rest].min()


def test_topk_is_not_skewed():
    """
    Catches: the released score, a distance to the grid value that takes it for the middle of its cell. On
    Gaussian weights the tracked ones must spread over the thresholds as all weights near them do.
    """
    w, q, y = gaussian()
    near = osci.threshold_distance(y) < 0.025
    population = shares(y[near])
    n, error = int(0.05 * 1024) * 256, 4 * (0.25 / 13000) ** 0.5
    chosen = y.gather(1, osci.nearest_columns(linear(w), w, q, 0.05).long())
    assert chosen.numel() == n and (shares(chosen) - population).abs().max() < error
    below = sum(((chosen < t) & (chosen > t - 0.1)).sum() for t, _ in THRESHOLDS) / n
    assert abs(below - 0.5) < error

    # the released rule, for comparison: four fifths of what it tracks rounds to 2 or 4
    value = osci.grid_value(q.code, q.operand).abs()
    width = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.75, 1.0, 1.5, 2.0])
    score = (y - value).abs() / width[q.code.long() & 7]
    released = score.flatten().topk(n).indices
    assert (shares(y.flatten()[released]) - population).abs().max() > 5 * error
    to_2_or_4 = ((value == 2) | (value == 4)).flatten()
    assert to_2_or_4[released].float().mean() > 0.75 and to_2_or_4.float().mean() < 0.35


@pytest.mark.parametrize("K", [128, 512, 1024, 4096])
def test_memory(K):
    """ Catches: int64 columns, a snapshot of the whole matrix, state that state_bytes() forgets to count. """
    layer = linear(walk((8, K), 1, 0.0)[0])
    watch = OsciReset({"a": layer}, "topk", 0, 20, 10, track=0.05)
    assert watch.state_bytes() == 0
    sizes = []
    for step in range(12):
        watch.after_step(step)
        sizes.append(watch.state_bytes() / layer.weight.numel())
    assert 0.5 < sizes[0] <= 0.8 and len(set(sizes[:10])) == 1, sizes
    assert K < 4096 or sizes[0] == pytest.approx(0.65, abs=0.01)
    assert sizes[10:] == [0, 0]
    full = OsciReset({"a": layer}, "full", 0, 20, 10)
    full.after_step(0)
    assert full.state_bytes() / layer.weight.numel() == pytest.approx(9.1, abs=0.03)
    watch.after_step(20)
    file = io.BytesIO()
    torch.save(watch.state_dict(), file)
    assert watch.state_bytes() <= file.tell() <= watch.state_bytes() + 8192      # headers and names


def test_wide_layers():
    """ Catches: column numbers beyond 32767 wrapped around in 16 bits. """
    w = torch.full((1, 40000), 3.0)
    w[0, 39990] = 3.49
    layer = linear(w)
    columns = osci.nearest_columns(layer, w, quantize(w, BASE.y_w), 1e-6)
    assert columns.dtype == torch.int32
    w[0, ::16] = 6.0
    assert osci.nearest_columns(layer, w, quantize(w, BASE.y_w), 1e-6).tolist() == [[39990]]


@pytest.mark.parametrize("name", ["double block", "no outer", "mxfp4"])
def test_dead_blocks_are_not_tracked(name):
    """ Catches: 0 * (1 / 0), and a slot spent on weights that have no scale and so no threshold. """
    w = torch.zeros(1, 256)
    w[0, 128:] = 3.0
    w[0, 128] = 6.0
    w[0, :128:5] = 2.0**-120                             # below what quantize() counts as zero
    assert osci.nearest_columns(linear(w), w, quantize(w, OPERANDS[name]), 0.25).min() >= 128


# -----------------------------------------------------------------------------
# mode edge


def test_edge_measures_the_gap_of_the_threshold():
    """ Catches: a cell's width in place of the gap, so that one side of 2 and 4 is never or always reset. """
    ys, hits = [], []
    for threshold, gap in THRESHOLDS:
        for side in (-1, 1):
            ys += [threshold + side * 0.004 * gap, threshold + side * 0.006 * gap]
            hits += [True, False]
    w = torch.zeros(2, 16)
    w[:, :14] = torch.tensor(ys).view(2, 14) * torch.tensor([[1.0], [-1.0]])
    w[:, 15] = 6.0
    w *= UNIT
    layer = linear(w)
    watch = OsciReset({"a": layer}, "edge", start=2, period=4, window=1)
    reports = [watch.after_step(step) for step in range(6)]
    assert [r is None for r in reports] == [True, True, True, False, True, True] and watch.state_bytes() == 0
    changed = layer.weight.data != w
    assert changed[:, :14].flatten().tolist() == hits and not changed[:, 14:].any()
    assert same(layer.weight.data[changed], fake_quantize(w, BASE.y_w)[changed])
    assert (reports[3].reset, reports[3].near, reports[3].tracked) == (14, 28, 0)


# -----------------------------------------------------------------------------
# the controls


def control(mode, weights, seed=3, outliers=0, layer=0, start=0):
    """ One window of 20 steps over these weights -> report, mask of what was reset. """
    lin = linear(weights[0], RECIPES["tetrajet_full"], outliers=outliers)
    lin.counter, lin.layer = Counter(seed), layer
    if outliers:
        lin.set_channels(torch.arange(7, 7 + outliers))
    watch = OsciReset({"a": lin}, mode, start, 50, 20, tau=5.0)
    report = play(watch, lin, weights, first=start)[start + 20]
    return report, lin.weight.data != weights[-1]


@pytest.mark.parametrize("outliers", [0, 12])
@pytest.mark.parametrize("mode", ["random", "nearest"])
def test_a_control_resets_as_many_others(mode, outliers):
    """
    Catches: a control that resets what OsciReset found, a number that is not the window's, outlier columns or
    weights of dead blocks drawn. The tracking is the same, so what was found is.
    """
    weights = walk((16, 300), 21, size=0.005)
    weights[:, 3, 32:48] = 0.0
    full, mask = control("full", weights, outliers=outliers)
    report, other = control(mode, weights, outliers=outliers)
    assert report.found == full.found == full.reset + full.refused > 100
    assert report.reset + report.refused == full.found and report.refused < 0.03 * full.found
    assert (report.flips, report.reversals, report.near) == (full.flips, full.reversals, full.near)
    assert report.reset_single + report.reset_never > full.reset_single + full.reset_never
    share = mask.float().mean()
    overlap = (mask & other).sum() / mask.sum()
    # a random choice meets the other by chance: 5 sigma
    assert overlap < 0.9 and (mode == "nearest" or abs(overlap - share) < 5 * (share / mask.sum()) ** 0.5)
    assert not other[:, 7:7 + outliers].any()


def test_the_random_control_is_a_function_of_seed_step_and_layer():
    """ Catches: the same weights in each window or layer, and a choice that no seed repeats. """
    weights = walk((16, 300), 21, size=0.005)
    base = control("random", weights)[1]
    assert torch.equal(base, control("random", weights)[1])
    for other in (dict(seed=4), dict(layer=1), dict(start=1)):
        assert (base & control("random", weights, **other)[1]).sum() < 0.5 * base.sum(), other


def test_the_nearest_are_nearest():
    """ Catches: distances in code units, the farthest taken, or those nearest when the window opened. """
    weights = walk((16, 300), 21, size=0.005)
    report, mask = control("nearest", weights)
    q = quantize(weights[-1], BASE.y_w)
    y = osci.code_units(weights[-1], q)
    share = torch.stack([(y - t).abs() / gap for t, gap in THRESHOLDS]).amin(0)
    limit = share.flatten().sort().values[report.found - 1]
    assert (share[mask] <= limit).all() and mask.sum() == report.reset > 100


def test_to_watch_is_to_do_nothing():
    """ Catches: a reset, or another count than that of OsciReset, which has found what it resets. """
    weights = walk((16, 300), 21, size=0.005)
    full, report = control("full", weights)[0], control("watch", weights)
    assert not report[1].any()
    zero = dict(reset=0, reset_single=0, reset_never=0, refused=0)
    assert replace(report[0], layers={}) == replace(full, layers={}, **zero)


# -----------------------------------------------------------------------------
# what a reset does


def adversarial(kind, op=Operand(), seed=0):
    """ Weights (48, 300), or fewer, for which resets in the format op are likely to go wrong. """
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(48, 300, generator=g)
    if kind == "ragged":
        return w[:5, :100]
    if kind == "subnormal scales":       # many scales are a few steps of 2^-9: coarse
        return w * 10.0 ** (-6 * torch.rand(48, 19, generator=g)).repeat_interleave(16, 1)[:, :300]
    if kind == "on the thresholds":      # an ulp in the outer scale moves them across
        q = quantize(w, op)
        t = torch.tensor([t for t, _ in THRESHOLDS])[torch.randint(7, w.shape, generator=g)]
        return torch.where(q.code & 7 == 7, w, t.copysign(w) * osci.full_scale(q))
    if kind == "zeros":
        w[:, 16:32] = 0.0
        w[3], w[4, ::2], w[5, 128:256] = 0.0, -0.0, 0.0
        w[6] *= 2.0**-110
        return w
    return w * 1e-3


KINDS = ["plain", "ragged", "subnormal scales", "on the thresholds", "zeros"]


@pytest.mark.parametrize("name", OPERANDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_moves_no_code_and_no_scale(kind, name):
    """
    Catches: the guard dropped, or too fine: a block's maximum that lands on 3 or 4 sends its scale elsewhere,
    and an ulp in an outer scale moves weights of other blocks that sit on a threshold.
    """
    op = OPERANDS[name]
    w = adversarial(kind, op)
    for mask_name, dtype in product(("some", "maxima", "all"), (torch.float32, torch.bfloat16)):
        layer = linear(w, Recipe(y_w=op), dtype=dtype)
        before, q = osci.rounded_weight(layer)
        before, mask = before.clone(), choose(mask_name, q)
        done = osci.reset(layer, before, q, mask)
        after, again = osci.rounded_weight(layer)
        assert torch.equal(again.code, q.code) and torch.equal(again.inner, q.inner)
        assert not (done & ~mask).any()
        assert same(after[~done], before[~done])
        assert same(after[done], q.dequantize().to(dtype).float()[done])
        # plain weights are hardly ever refused, so the guard does not keep its promise by refusing everything
        if kind == "plain" and name == "double block" and dtype == torch.float32:
            assert done.sum() > 0.99 * mask.sum()


def choose(mask_name, q):
    """ Which weights to reset: a twentieth of them, those that round to 6 (the maxima, mostly), or all. """
    if mask_name == "maxima":
        return q.code & 7 == 7
    share = 0.05 if mask_name == "some" else 1.0
    return torch.rand(q.code.shape, generator=torch.Generator().manual_seed(1)) < share


@pytest.mark.parametrize("kind, mask_name, moved", [
    ("subnormal scales", "all", "inner"), ("on the thresholds", "maxima", "code"),
    ("on the thresholds", "maxima", "outer"),
])
def test_the_guard_is_needed(kind, mask_name, moved):
    """ Catches: adversarial weights that are not, so that the test above would pass without any guard. """
    w = adversarial(kind)
    q = quantize(w, Operand())
    unguarded = quantize(torch.where(choose(mask_name, q), q.dequantize(), w), Operand())
    assert not torch.equal(getattr(unguarded, moved), getattr(q, moved))


@pytest.mark.parametrize("name", ["per tensor", "squares"])
def test_the_maximum_of_a_tensor(name):
    """ Catches: refusal by block where one outer scale couples all. The maximum is alone in its block. """
    op = OPERANDS[name]
    for seed in range(20):
        w = adversarial("on the thresholds", op, seed)
        mask = w.abs() == w.abs().max()
        w[osci.max_in_block(mask, *op.block) & ~mask] = 0.0
        q = quantize(w, op)
        unguarded = quantize(torch.where(mask, q.dequantize(), w), op)
        if not torch.equal(unguarded.code, q.code):
            break
    else:
        pytest.fail("no seed for which the maximum moves the outer scale")
    layer = linear(w, Recipe(y_w=op))
    assert not osci.reset(layer, w, q, mask).any() and same(layer.weight.data, w)


def test_a_bad_block_does_not_stop_the_others():
    """ Catches: the whole tensor refused where one inner block would do. """
    w = adversarial("plain")
    w[7, 32:48] = 0.0
    # this scale is 1.6 steps of 2^-9 and rounds to 2, so the maximum is 4.8 units and rounds to 4: with it
    # there, the scale would be 1.33 steps
    w[7, 40] = w.abs().max() * 1.6 * 2.0**-9 / 448
    layer = linear(w, Recipe(y_w=OPERANDS["per tensor"]))
    weight, q = osci.rounded_weight(layer)
    mask = torch.zeros_like(w, dtype=torch.bool)
    mask[:, ::8] = True
    mask &= w.abs() < w.abs().max()
    assert osci.grid_value(q.code, q.operand)[7, 40] == 4.0 and mask[7, 40]
    done = osci.reset(layer, weight.clone(), q, mask)
    assert not done[7, 32:48].any() and done.sum() == mask.sum() - 2


def test_refused_weights_are_counted_apart():
    """ Catches: refusals reported as resets, or among the resets that flipped only once. """
    small = 2.0**-17                                      # 2 steps of 2^-9 times the outer scale of 2^-9
    weights = torch.zeros(9, 1, 256)
    weights[:, :, 128:144] = in_units([SWINGS])           # one that is reset
    weights[:, 0, 15] = 6 * UNIT
    weights[:, 0, 20] = torch.tensor([4.95, 5.05] * 4 + [4.95]) * small      # a maximum that ends on 4
    weights[:, 0, 21] = torch.tensor(CREEPS) * small      # a neighbour, refused with it
    layer = linear(weights[0])
    report = play(OsciReset({"a": layer}, "full", 0, 100, WINDOW), layer, weights)[WINDOW]
    assert (report.flips, report.single) == (8 + 8 + 1, 1)
    assert (report.reset, report.refused, report.reset_single) == (1, 2, 0)
    assert same(layer.weight.data[0, :128], weights[-1, 0, :128]) and layer.weight.data[0, 128] == UNIT


def test_the_optimizer_keeps_its_moments():
    """ Catches: moments cleared, or a parameter replaced, so that the optimizer goes on with a dead one. """
    torch.manual_seed(0)
    layer = QuantLinear(64, 32, bias=False, recipe=BASE)
    opt = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    watch = OsciReset({"a": layer}, "full", 0, 100, 6, tau=2.0)
    place = layer.weight.data_ptr()
    for step in range(7):
        layer(torch.randn(16, 64)).square().sum().backward()
        opt.step()
        state = {k: v.clone() for k, v in opt.state[layer.weight].items()}
        report = watch.after_step(step)
        opt.zero_grad()
    assert report.reset > 0
    assert all(torch.equal(v, opt.state[layer.weight][k]) for k, v in state.items())
    assert layer.weight.data_ptr() == place and layer.weight.requires_grad


# -----------------------------------------------------------------------------
# when


@pytest.fixture
def roundings(monkeypatch):
    """ A list to which each call of quantize by osci.py adds an entry. """
    calls = []

    def counted(*args):
        calls.append(args)
        return quantize(*args)

    monkeypatch.setattr(osci, "quantize", counted)
    return calls


@pytest.mark.parametrize("mode", ["full", "topk", "edge"])
def test_when_windows_open_and_close(mode, roundings):
    """
    Catches: start ignored (the release's memory-saving branch does); a reset one step late, or in every step
    after the window; work or memory outside windows; windows counted from step 0; only the first acted on.
    """
    layer = linear(walk((4, 128), 1, 0.0)[0])
    watch = OsciReset({"a": layer}, mode, start=5, period=10, window=3)
    counts, open_at, reports = [], [], []
    for step in range(30):
        roundings.clear()
        if watch.after_step(step):
            reports.append(step)
        counts.append(len(roundings))
        if watch.state_bytes():
            open_at.append(step)
    # one rounding a step; the last step also rounds what it is about to write, by block and by outer block
    tracked = [0] * 5 + [1, 1, 1, 3, 0, 0, 0, 0, 0, 0] * 2 + [1, 1, 1, 3, 0]
    assert counts == ([n if n == 3 else 0 for n in tracked] if mode == "edge" else tracked)
    assert reports == [8, 18, 28]
    assert open_at == ([] if mode == "edge" else [5, 6, 7, 15, 16, 17, 25, 26, 27])


@pytest.mark.parametrize("mode", ["full", "topk"])
@pytest.mark.parametrize("flip_at, seen", [(4, 0), (5, 0), (6, 1), (7, 1), (8, 1), (9, 0)])
def test_which_steps_count(mode, flip_at, seen):
    """ Catches: the first or last step of a window lost, as in the release, or one from outside taken in. """
    layer = linear(torch.zeros(1, 16))
    watch = OsciReset({"a": layer}, mode, start=5, period=100, window=3, tau=8.0, track=1.0)
    ys = [1.2499 if step < flip_at else 1.2501 for step in range(12)]
    reports = play(watch, layer, in_units([ys]))
    assert list(reports) == [8]
    assert (reports[8].flips, reports[8].reset) == (seen, seen)


def test_each_window_starts_afresh():
    """ Catches: sums, flips or tracked columns carried over from the window before. """
    layer = linear(torch.zeros(1, 16))
    watch = OsciReset({"a": layer}, "topk", start=0, period=10, window=WINDOW, track=0.1)
    first, second = in_units([SWINGS, RESTS]), in_units([[2.0] * 9, SWINGS])
    gap = first[-1:]
    reports = play(watch, layer, torch.cat((first, gap, second, gap, first)))
    assert list(reports) == [8, 18, 28]
    # of the first cast one weight is tracked, the one at 1.25001: nearer than 1.24, and it does not move
    assert [(r.reset, r.flips, r.reversals) for r in reports.values()] == [(0, 0, 0), (1, 8, 7), (0, 0, 0)]


class Ops(TorchDispatchMode):
    """ Collects the names of the operators that run. """

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", MODES)
def test_no_host_sync_while_a_window_is_open(mode, monkeypatch):
    """
    Catches: .item(), tolist, nonzero, an if on a tensor: the GPU waits for the host at each step. At the last
    one: a wait for each layer in turn.
    """
    lists, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: lists.append(x) or tolist(x))
    layer = linear(walk((4, 128), 1, 0.0)[0], RECIPES["tetrajet_full"], outliers=8)
    layer.set_channels(torch.arange(3, 11))
    watch = OsciReset({"a": layer, "b": layer}, mode, 0, 10, 5)
    lists.clear()
    with Ops() as ops:
        for step in range(5):
            watch.after_step(step)
    assert not lists
    waits = ("_local_scalar_dense", "nonzero", "aten.equal", "masked_select", "unique")
    assert not [name for name in ops.names if any(w in name for w in waits)]
    with Ops() as ops:
        assert watch.after_step(5)
    assert len(lists) == (1 if mode == "edge" else 2), "for both layers together: channels, then the report"
    assert mode in ("random", "nearest") or not [name for name in ops.names if any(w in name for w in waits)]
    with Ops() as ops:
        bool(layer.weight.isfinite().all())
    assert any("_local_scalar_dense" in name for name in ops.names), "the detector does not detect"


# -----------------------------------------------------------------------------
# outlier channels


@pytest.mark.parametrize("mode", ["full", "topk", "edge", "nearest"])
def test_outlier_channels_are_left_alone(mode):
    """ Catches: outlier columns tracked, reset, or overwritten by the zeros that stand for them in FP4. """
    channels = torch.tensor([0, 3, 77])
    weights = walk((8, 128), 11, size=0.01)
    weights[:, :, 0] = 5.0                                # were it not zeroed, it would crush the scales
    weights[::2, :, 3], weights[1::2, :, 3] = 0.249, 0.251
    layer = linear(weights[0], RECIPES["tetrajet_full"], outliers=3)
    layer.set_channels(channels)
    watch = OsciReset({"a": layer}, mode, 0, 20, 10, tau=4.0, track=1.0)
    report = play(watch, layer, weights)[10]
    assert report.weights == 8 * 125 and report.tracked == (0 if mode == "edge" else 8 * 125)
    assert report.reset > 3
    assert same(layer.weight.data[:, channels], weights[-1][:, channels])

    # the rest is reset as if the columns had been zero all along
    zeroed = weights.index_fill(2, channels, 0.0)
    twin = linear(zeroed[0])
    watch = OsciReset({"a": twin}, mode, 0, 20, 10, tau=4.0, track=1.0)
    assert play(watch, twin, zeroed)[10].reset == report.reset
    rest = torch.ones(128, dtype=torch.bool).index_fill_(0, channels, False)
    assert same(twin.weight.data[:, rest], layer.weight.data[:, rest])


def test_topk_never_selects_outlier_channels():
    """ Catches: zeroed columns, a quarter from the first threshold, taken before weights farther off. """
    w = torch.full((4, 128), 3.0)
    w[:, 0] = 6.0
    layer = linear(w, RECIPES["tetrajet_full"], outliers=12)
    layer.set_channels(torch.arange(50, 62))
    weight, q = osci.rounded_weight(layer)
    columns = osci.nearest_columns(layer, weight, q, 1.0)
    assert columns.shape == (4, 116) and not torch.isin(columns, torch.arange(50, 62)).any()


@pytest.mark.parametrize("mode", ["full", "topk"])
def test_outlier_channels_chosen_in_an_open_window(mode):
    """ Catches: columns that drop to zero taken for a move, and blocks that are rescaled for oscillation. """
    weights = walk((8, 128), 11, size=0.01)
    weights[:, :, 0] = 1.0
    layers = {name: linear(weights[0], RECIPES["tetrajet_full"], outliers=1) for name in "ab"}
    watch = OsciReset(layers, mode, 0, 20, 10, tau=1e-3, track=1.0)
    for step in range(11):
        for layer in layers.values():
            layer.weight.data.copy_(weights[step])
        if step == 5:
            layers["a"].set_channels(torch.tensor([0]))
        report = watch.after_step(step)
    assert list(report.layers) == ["b"] and report.reset == report.layers["b"].reset > 0
    assert same(layers["a"].weight.data, weights[-1])


# -----------------------------------------------------------------------------
# state


def model():
    """ Two layers of different shapes, one of them with outlier channels. """
    layers = {"up": linear(walk((6, 100), 1, 0.0)[0]),
              "down": linear(walk((4, 160), 1, 0.0, seed=1)[0], RECIPES["tetrajet_full"], outliers=5)}
    layers["down"].set_channels(torch.tensor([1, 9, 30, 31, 144]))
    for number, layer in enumerate(layers.values()):
        layer.own_counter, layer.counter, layer.layer = False, Counter(9), number
    return layers


def train(layers, watch, steps):
    """ Random moves that depend on the step alone -> reports by step. """
    reports = {}
    for step in steps:
        for i, layer in enumerate(layers.values()):
            g = torch.Generator().manual_seed(1000 * i + step)
            layer.weight.data += torch.randn(layer.weight.shape, generator=g) * 1e-4
        report = watch.after_step(step)
        if report:
            reports[step] = report
    return reports


SCHEDULE = dict(start=3, period=12, window=10, tau=4.0, track=0.2)


@pytest.mark.parametrize("through_a_file", [True, False])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "watch"])
def test_ten_and_ten_steps_are_twenty(mode, through_a_file):
    """ Catches: part of an open window not saved, saved in a type that cannot be loaded, or shared. """
    layers = model()
    reports = train(layers, OsciReset(layers, mode, **SCHEDULE), range(20))
    assert list(reports) == [13] and reports[13].reset > 0

    first = model()
    watch = OsciReset(first, mode, **SCHEDULE)
    assert not train(first, watch, range(10))
    saved = {"model": {n: m.state_dict() for n, m in first.items()}, "osci": watch.state_dict()}
    if through_a_file:
        file = io.BytesIO()
        torch.save(saved, file)
        saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    second = model()
    for name, layer in second.items():
        layer.load_state_dict(saved["model"][name])
    resumed = OsciReset(second, mode, **SCHEDULE)
    resumed.load_state_dict(saved["osci"])
    assert resumed.state_bytes() == watch.state_bytes() > (-1 if mode == "edge" else 0)
    train(first, watch, range(10, 12))      # the old run goes on, and must not reach into the new one
    assert train(second, resumed, range(10, 20)) == reports
    assert all(same(second[n].weight.data, layers[n].weight.data) for n in layers)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "watch"])
def test_a_gpu_resets_what_the_cpu_resets(mode):
    """ Catches: a step of an open window that waits for the GPU, arithmetic that differs there by an ulp. """
    weights = walk((64, 300), 8, size=0.01)
    results = []
    for device in ("cpu", "cuda"):
        layer = linear(weights[0], RECIPES["tetrajet_full"], outliers=5).to(device)
        layer.counter = Counter(9, device=device)       # a layer's own has another seed for each layer
        layer.set_channels(torch.tensor([1, 9, 30, 31, 144], device=device))
        watch = OsciReset({"a": layer}, mode, start=0, period=10, window=7, tau=4.0, track=0.2)
        for step, w in enumerate(weights.to(device)):
            layer.weight.data.copy_(w)
            torch.cuda.set_sync_debug_mode("error" if step < 7 else "default")
            try:
                report = watch.after_step(step)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        results.append((report, layer.weight.data.cpu()))
    assert results[0][0] == results[1][0] and results[0][0].reset > 3
    assert same(results[0][1], results[1][1])


def test_resuming_without_the_state():
    """ Catches: the release's KeyError when a run continues inside a window that it did not open. """
    layers = model()
    before = {n: m.weight.data.clone() for n, m in layers.items()}
    watch = OsciReset(layers, "full", **SCHEDULE)
    assert all(watch.after_step(step) is None for step in range(9, 15))
    assert all(same(m.weight.data, before[n]) for n, m in layers.items())
    assert watch.after_step(15) is None and watch.state_bytes() > 0        # the next one opens as usual


@pytest.mark.parametrize("change, message", [
    (dict(mode="full"), "mode was topk, is full"),
    (dict(tau=5.0), "tau was 4.0, is 5.0"),
    (dict(layers="wider"), r"up was \[6, 100\], is \[6, 104\]"),
    (dict(layers="fewer"), r"down was \[4, 160\], is None"),
])
def test_state_of_another_run_is_refused(change, message):
    """ Catches: columns of one shape silently applied to another, sums of one tau continued with another. """
    layers = model()
    watch = OsciReset(layers, "topk", **SCHEDULE)
    train(layers, watch, range(6))
    if change.get("layers") == "wider":
        layers["up"] = linear(torch.zeros(6, 104))
    elif change.get("layers") == "fewer":
        del layers["down"]
    settings = dict(mode="topk") | SCHEDULE | {k: v for k, v in change.items() if k != "layers"}
    other = OsciReset(layers, **settings)
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(watch.state_dict())
    # outside a window there is nothing to continue, so nothing to refuse
    other.load_state_dict(OsciReset(layers, "topk", **SCHEDULE).state_dict())


def test_two_models_do_not_collide():
    """ Catches: statistics in globals, keyed by layer name, as in the release. """
    def run(which):
        a, b = model(), model()
        for layer in b.values():
            layer.weight.data *= 1.5
        watches = [OsciReset(a, "full", **SCHEDULE), OsciReset(b, "full", **SCHEDULE)]
        for step in range(14):
            for i in which:
                train((a, b)[i], watches[i], [step])
        return [layer.weight.data for i in which for layer in (a, b)[i].values()]

    together, alone = run([0, 1]), run([0]) + run([1])
    assert all(same(x, y) for x, y in zip(together, alone, strict=True))


def test_the_total_is_the_sum_of_the_layers():
    """ Catches: a field left out of the sum, or a layer counted twice. """
    layers = model()
    report = train(layers, OsciReset(layers, "full", **SCHEDULE), range(14))[13]
    assert list(report.layers) == ["up", "down"]
    for f in fields(Report)[:-1]:
        assert getattr(report, f.name) == sum(getattr(r, f.name) for r in report.layers.values()) >= 0
    row = report.row()
    assert row["reset_share"] == report.reset / (600 + 4 * 155) and "layers" not in row
    assert all(type(v) in (int, float) for v in row.values())


@pytest.mark.parametrize("change, message", [
    (dict(mode="freeze"), "mode is one of watch, full, topk, edge, random, nearest"),
    (dict(window=12), "window < period"),
    (dict(window=0), "1 <= window"),
    (dict(start=-1), "start >= 0"),
    (dict(tau=0.0), "tau > 0"),
    (dict(track=0.0), "0 < track"),
    (dict(track=1.5), "track <= 1"),
    (dict(recipe=RECIPES["bf16"]), "a: its weight is not rounded to FP4"),
    (dict(recipe=Recipe(y_w=replace(BASE.y_w, grid="e4m3"))), "a: its weight is not rounded to FP4"),
    (dict(recipe=Recipe(y_w=Operand(rounding="sr"))), "a: its weight is not rounded to FP4"),
])
def test_what_cannot_work_is_refused(change, message):
    """ Catches: a window that never closes, and resets of weights that no threshold applies to. """
    layer = linear(torch.ones(4, 16), change.pop("recipe", BASE))
    settings = dict(mode="full") | SCHEDULE | change
    with pytest.raises(ValueError, match=message):
        OsciReset({"a": layer}, **settings)


# -----------------------------------------------------------------------------
# the kernel

# the interpreter divides by the scales of empty blocks, too, before it leaves the quotients out
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("track", (None, 0.2), ids=("full", "topk"))
@pytest.mark.parametrize("shape, op", (((48, 160), NEAREST), ((33, 300), NEAREST),
                                       ((40, 48), replace(NEAREST, outer=TENSOR)),
                                       ((40, 48), replace(NEAREST, block=(16, 16))),
                                       ((40, 70), MXFP4), ((20, 48), replace(NEAREST, rule="4/6")),
                                       ((33, 48), replace(NEAREST, outer=TENSOR, scale="ue5m3"))), ids=str)
def test_the_kernel_tracks_bit_for_bit(shape, op, track):
    """
    Catches: a flip that is not counted, a scale of another block, a direction forgotten, tau times the wrong
    distance, places beyond the end of the last block of threads; codes that scales keep in memory.
    """
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(shape, generator=generator)
    weight[:, 16:32] *= 2e-5        # inner scales below E4M3's normal numbers
    windows = []
    for backend in ("reference", "emulate"):
        layer = QuantLinear(shape[1], shape[0], bias=False, recipe=Recipe(y_w=op), backend=backend).to(device)
        layer.weight.data.copy_(weight)
        windows.append((layer, Window.open(layer, track)))
    for step in range(6):
        # small steps to and fro, so that weights near a threshold flip and return
        move = 0.05 * torch.randn(shape, generator=generator) * (-1) ** step
        move[:, 16:32] *= 2e-5
        move[torch.rand(shape, generator=generator) < 0.3] = 0.0
        for layer, window in windows:
            layer.weight.data += move.to(device)
            window.advance(*rounded_weight(layer), 8.0, layer.backend)
    (_, a), (_, b) = windows
    assert a.counts.tolist() == b.counts.tolist() and a.counts[:2].min() > 0
    for name in ("columns", "w", "excess", "flags", "inner", "outer"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None and y is None) or torch.equal(x, y), name
        # the same memory too, up to the padding of a buffer: a view would keep all that it is a view of
        assert y is None or y.untyped_storage().nbytes() <= x.numel() * x.element_size() + 15, name

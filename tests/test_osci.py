"""
OsciReset: which weights are found, what a reset does to them, and that it touches nothing else.

Most trajectories are written in code units, w = y * UNIT: one block of 16 whose column 15 stays at 6 units,
so that its scale is exactly UNIT and a weight's rounding can be read off the table of E2M1.
"""
import io
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import osci
import quant
import rivals    # noqa: F401  rules of other papers round here too
from checkpoint import fill
from codes import E4M3, decode, grid_number, quantize
from noise import Counter
from osci import REMEDIES, STATE, THRESHOLDS
from quant import ROW, TENSOR, Backend, Operand, QuantLinear, Recipe, fake_quantize
from recipes import RECIPES

UNIT = 448 * 2.0**-9       # 6 * UNIT / 448 / 6 is 2^-9 exactly, so inner times outer scale comes to this
BASE = RECIPES["tetrajet_base"]
OPERANDS = {
    "double block": Operand(),
    "per tensor": Operand(outer=TENSOR),
    "per row": Operand(outer=ROW),
    "squares": Operand(block=(16, 16), outer=TENSOR),
    "outer 32": Operand(outer=32),
    "no outer": Operand(outer=0),
    "mxfp4": Operand(block=(1, 32), scale="e8m0", outer=0, rule="up"),
    "17/16": Operand(rule="17/16"),
}


def remedy(name, layers, **knobs):
    """ An entry of REMEDIES with these knobs, in steps: start, period, window, tau, track, steps, ... """
    knobs = dict(start=0, period=100, window=8, tau=8.0, track=1, decay=0.9, threshold=0.01,
                 strength=0.1) | knobs
    steps = knobs.pop("steps", 1000)
    cfg = SimpleNamespace(**{f"osci_{knob}": value for knob, value in knobs.items()}, steps=steps,
                          in_steps=lambda steps: steps)
    return REMEDIES[name](layers, cfg)


def linear(weight, recipe=BASE, outliers=0, dtype=None):
    N, K = weight.shape
    layer = QuantLinear(K, N, bias=False, recipe=recipe, outliers=outliers, dtype=dtype)
    layer.weight.data.copy_(weight)
    return layer


def in_units(columns):
    """ Lists of y over time, one for each of the first columns -> weights (steps, 1, 16). """
    w = torch.zeros(len(columns[0]), 1, 16)
    w[:, 0, 15] = 6 * UNIT
    for i, y in enumerate(columns):
        w[:, 0, i] = torch.tensor(y) * UNIT
    return w


def play(watch, layer, weights, first=0):
    """ Set the layer's weight to each of weights in turn, as an optimizer would -> columns by step. """
    reports = {}
    for step, w in enumerate(weights, first):
        layer.weight.data.copy_(w)
        if columns := watch.after_step(step)[1]:
            reports[step] = {name.removeprefix("osci_"): x for name, x in columns.items()}
    return reports


def run(weights, name="reset", layer=None, **knobs):
    """ One window over all of weights -> its report, and the weight after it. """
    layer = layer or linear(weights[0])
    window = len(weights) - 1
    watch = remedy(name, {"a": layer}, window=window, **knobs)
    return play(watch, layer, weights)[window], layer.weight.data


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
TREMBLES = [1.0, 1.1] * 4 + [1.0]                             # between two thresholds
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
    report, weight = run(in_units(CAST))
    expected = dict(tracked=16, flips=8 + 1 + 1 + 6 + 8 + 2 + 2 + 1, reversals=7 + 7 + 1, single=3, reset=4,
                    reset_single=1, reset_never=0, refused=0, scale_flicker=0)
    # within a tenth of the gap at the end: all that are reset, RESTS and LEAPS; DRIFTS ends outside, at 1.301
    assert report == expected | {"near_share": 6 / 16, "reset_share": 4 / 16}
    w = weight[0] / UNIT
    assert w[[0, 2, 7, 8]].tolist() == [1.0, 1.5, -1.0, 2.0]      # 2.0 and not 2.125, the middle
    kept = [1, 3, 4, 5, 6, *range(9, 16)]
    assert same(weight[0][kept], in_units(CAST)[-1, 0][kept])


@pytest.mark.parametrize("weights, tau, resets", [
    *[([SWINGS, DRIFTS, LEAPS], tau, resets) for tau, resets in
      ((1.9, [0, 1, 2]), (4, [0, 1]), (6, [0]), (24, [0]), (26, []))],
    # every number is a few bits long here, so nothing is rounded: a ratio of exactly 8
    *[([[1.21875, 1.28125] * 4 + [1.21875]], tau, resets) for tau, resets in
      ((7.99, [0]), (8.0, [0]), (8.01, []))],
])
def test_tau_is_compared_with_the_ratio(weights, tau, resets):
    """ Catches: tau squared or per step, a step left out, distances of magnitudes (LEAPS), > for >=. """
    weights = in_units(weights)
    _, weight = run(weights, tau=tau)
    assert (weight != weights[-1])[0].nonzero().flatten().tolist() == resets


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
    report, weight = run(weights)
    assert report["scale_flicker"] == 8 / 16
    assert (report["flips"], report["reset"], report["reset_never"]) == (0, 1, 1)
    assert same(weight[0, 17:], weights[-1, 0, 17:])


def by_hand(weights, op):
    """ The definition, weight by weight, in float64 and plain Python -> ratio and once (N, K), counts. """
    q = torch.stack([fake_quantize(w, op) for w in weights]).double()
    codes = torch.stack([quantize(w, op).code for w in weights]).long()
    levels = torch.where(codes >= 8, 8 - codes, codes)
    dist_q, dist_m = q.diff(dim=0).abs().sum(0), weights.double().diff(dim=0).abs().sum(0)
    flips = reversals = single = 0
    once = torch.zeros_like(dist_q, dtype=torch.bool)
    for n in range(levels.shape[1]):
        for k in range(levels.shape[2]):
            path = levels[:, n, k].tolist()
            jumps = [b - a for a, b in zip(path, path[1:]) if b != a]
            flips += len(jumps)
            reversals += sum(a * b < 0 for a, b in zip(jumps, jumps[1:]))
            single += len(jumps) == 1
            once[n, k] = len(jumps) == 1
    return torch.where(dist_m > 0, dist_q / dist_m, 0.0), once, flips, reversals, single


@pytest.mark.parametrize("name, N, K", [("double block", 3, 300), ("mxfp4", 5, 100), ("squares", 17, 40)])
def test_random_walks_against_the_definition(name, N, K):
    """ Catches: any error in the packed byte, in the sum that replaces two, in ragged or square blocks. """
    op, tau = OPERANDS[name], 6.0
    weights = walk((N, K), 21, size=0.004)
    weights[:, :, 7] = weights[0, :, 7]                           # some do not move
    ratio, once, flips, reversals, single = by_hand(weights, op)
    assert ((ratio - tau).abs() > 1e-4).all(), "an exact tie: choose another seed"
    report, weight = run(weights, layer=linear(weights[0], Recipe(y_w=op)), tau=tau)
    wanted = ratio >= tau
    assert (report["flips"], report["reversals"], report["single"]) == (flips, reversals, single)
    assert report["reset"] + report["refused"] == wanted.sum() and wanted.sum() > 20
    assert report["reset_single"] <= (wanted & once).sum() <= report["reset_single"] + report["refused"]
    assert (wanted & once).sum() > 0 and (wanted & ~once).sum() > 0
    changed = weight != weights[-1]
    assert not (changed & ~wanted).any()
    assert same(weight[changed], fake_quantize(weights[-1], op)[changed])


@pytest.mark.parametrize("K", [128, 300])
def test_all_columns_listed_is_all_tracked(K):
    """ Catches: gather and scatter with different columns; the columns of another row. """
    weights = walk((6, K), 21, size=0.01)
    (one, a), (other, b) = (run(weights, track=track) for track in (1, 1 + 1e-6))
    assert one == other and one["reset"] > 10 and same(a, b)


def test_what_is_tracked_is_reset_as_if_all_were():
    """ Catches: rows mixed up by an index of the wrong type, or statistics of untracked weights. """
    weights = walk((16, 512), 21, size=0.005)
    (full, a), (part, b) = (run(weights, track=track) for track in (1, 0.05))
    assert part["tracked"] == 16 * 25 and 50 < part["reset"] < full["reset"]
    assert not ((b != weights[-1]) & ~(a != weights[-1])).any()


# -----------------------------------------------------------------------------
# which weights are tracked, and how much memory that takes


def in_code_units(w, q):
    return (w.double() / osci.full_scale(q).double()).abs()


def test_the_nearest_of_each_row_are_tracked():
    """ Catches: the farthest taken; distances in weight units, not code units; the sign of w left in. """
    w = torch.randn(8, 300, generator=torch.Generator().manual_seed(0))
    q = quantize(w, Operand())
    inner, outer = decode(q.inner, E4M3).repeat_interleave(16, 1), q.outer.repeat_interleave(128, 1)
    y = (w.double() / (inner[:, :300] * outer[:, :300]).double()).abs()
    distance = torch.stack([(y - t).abs() for t, _ in THRESHOLDS]).amin(0)
    columns = osci.nearest_columns(linear(w), w, q, 0.05)
    assert columns.shape == (8, 15) and columns.dtype == torch.int16
    for row, chosen in zip(distance, columns.long()):
        assert chosen.unique().numel() == 15
        rest = torch.ones(300, dtype=torch.bool).index_fill_(0, chosen, False)
        assert row[chosen].max() <= row[rest].min()


def test_the_choice_is_not_skewed():
    """
    Catches: the released score, a distance to the grid number that takes it for the middle of what rounds to
    it. On Gaussian weights the tracked ones must spread over the thresholds as all weights near them do.
    """
    w = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    q = quantize(w, Operand())
    y = in_code_units(w, q)
    distances = torch.stack([(y - t).abs() for t, _ in THRESHOLDS])

    def shares(chosen):
        """ How they are distributed over the seven thresholds, each counted at the nearest one. """
        counts = torch.bincount(distances.argmin(0)[chosen], minlength=7)
        return counts / counts.sum()

    population = shares(distances.amin(0) < 0.025)
    n, error = int(0.05 * 1024) * 256, 4 * (0.25 / 13000) ** 0.5
    columns = osci.nearest_columns(linear(w), w, q, 0.05)
    chosen = osci.put(torch.ones_like(columns, dtype=torch.bool), columns, 1024)
    assert chosen.sum() == n and (shares(chosen) - population).abs().max() < error
    below = sum(((y[chosen] < t) & (y[chosen] > t - 0.1)).sum() for t, _ in THRESHOLDS) / n
    assert abs(below - 0.5) < error

    # the released rule, for comparison: four fifths of what it tracks rounds to 2 or 4
    value = grid_number(q.code, q.operand).abs()
    width = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.75, 1.0, 1.5, 2.0])
    score = (y - value).abs() / width[q.code.long() & 7]
    released = score >= score.flatten().topk(n).values[-1]
    assert (shares(released) - population).abs().max() > 5 * error
    assert ((value == 2) | (value == 4))[released].float().mean() > 0.75


def state_bytes(layer):
    """ Memory of what is open, and its size in a checkpoint. """
    open_now = [t for name in STATE if (t := getattr(layer, f"osci_{name}")) is not None]
    file = io.BytesIO()
    torch.save({str(i): t for i, t in enumerate(open_now)}, file)
    return sum(t.numel() * t.element_size() for t in open_now), file.tell()


@pytest.mark.parametrize("K, track, each", [(128, 0.05, 0.66), (4096, 0.05, 0.65), (1024, 1, 9.1)])
def test_memory(K, track, each):
    """ Catches: int64 columns, a snapshot of the whole matrix, views that drag a whole matrix along. """
    layer = linear(walk((8, K), 1, 0.0)[0])
    watch = remedy("reset", {"a": layer}, period=20, window=10, track=track)
    sizes = []
    for step in range(12):
        watch.after_step(step)
        size, on_disk = state_bytes(layer)
        sizes.append(size / layer.weight.numel())
        assert on_disk < size + 8192                          # headers and names
    assert sizes[:10] == pytest.approx([each] * 10, abs=0.06) and sizes[10:] == [0, 0]


def test_wide_layers():
    """ Catches: column numbers beyond 32767 wrapped around in 16 bits. """
    w = torch.full((1, 40000), 3.0)
    w[0, ::16], w[0, 39990] = 6.0, 3.49
    columns = osci.nearest_columns(linear(w), w, quantize(w, BASE.y_w), 1e-6)
    assert columns.dtype == torch.int32 and columns.tolist() == [[39990]]


@pytest.mark.parametrize("name", ["double block", "no outer", "mxfp4"])
def test_dead_blocks_are_not_tracked(name):
    """ Catches: 0 * (1 / 0), and a slot spent on weights that have no scale and so no threshold. """
    w = torch.zeros(1, 256)
    w[0, 128:], w[0, 128] = 3.0, 6.0
    w[0, :128:5] = 2.0**-120                             # below what quantize() counts as zero
    assert osci.nearest_columns(linear(w), w, quantize(w, OPERANDS[name]), 0.25).min() >= 128


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


def choose(mask_name, q):
    """ Which weights to reset: a twentieth of them, those that round to 6 (the maxima, mostly), or all. """
    if mask_name == "maxima":
        return q.code & 7 == 7
    share = 0.05 if mask_name == "some" else 1.0
    return torch.rand(q.code.shape, generator=torch.Generator().manual_seed(1)) < share


@pytest.mark.parametrize("name", OPERANDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_moves_no_code_and_no_scale(kind, name):
    """
    Catches: the guard dropped, or too fine: a block's maximum that lands on 3 or 4 sends its scale elsewhere,
    and an ulp in an outer scale moves weights of other blocks that sit on a threshold.
    """
    w = adversarial(kind, OPERANDS[name])
    for mask_name, dtype in product(("some", "maxima", "all"), (torch.float32, torch.bfloat16)):
        layer = linear(w, Recipe(y_w=OPERANDS[name]), dtype=dtype)
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


@pytest.mark.parametrize("name", ["per tensor", "per row", "squares"])
def test_the_maximum_of_a_tensor(name):
    """ Catches: refusal by block where one outer scale couples more. The maximum is alone in its block. """
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
    assert grid_number(q.code, q.operand)[7, 40] == 4.0 and mask[7, 40]
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
    report, weight = run(weights)
    assert (report["flips"], report["single"]) == (8 + 8 + 1, 1)
    assert (report["reset"], report["refused"], report["reset_single"]) == (1, 2, 0)
    assert same(weight[0, :128], weights[-1, 0, :128]) and weight[0, 128] == UNIT


def test_the_optimizer_keeps_its_moments():
    """ Catches: moments cleared, or a parameter replaced, so that the optimizer goes on with a dead one. """
    torch.manual_seed(0)
    layer = QuantLinear(64, 32, bias=False, recipe=BASE)
    opt = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    watch = remedy("reset", {"a": layer}, window=6, tau=2.0)
    place = layer.weight.data_ptr()
    for step in range(7):
        layer(torch.randn(16, 64)).square().sum().backward()
        opt.step()
        state = {k: v.clone() for k, v in opt.state[layer.weight].items()}
        said, columns = watch.after_step(step)
        opt.zero_grad()
    assert columns["osci_reset"] > 0 and f"OsciReset put {columns['osci_reset']:,} weights" in said
    assert all(torch.equal(v, opt.state[layer.weight][k]) for k, v in state.items())
    assert layer.weight.data_ptr() == place and layer.weight.requires_grad


# -----------------------------------------------------------------------------
# when


def test_when_windows_open_and_close(monkeypatch):
    """
    Catches: start ignored (the release's memory-saving branch does); a reset one step late, or in every step
    after the window; work or memory outside windows; windows counted from step 0; only the first acted on.
    """
    roundings = []
    monkeypatch.setattr(osci, "quantize", lambda *args: roundings.append(args) or quantize(*args))
    layer = linear(walk((4, 128), 1, 0.0)[0])
    watch = remedy("reset", {"a": layer}, start=5, period=10, window=3)
    counts, open_at, reports = [], [], []
    for step in range(30):
        roundings.clear()
        if watch.after_step(step)[0]:
            reports.append(step)
        counts.append(len(roundings))
        if state_bytes(layer)[0]:
            open_at.append(step)
    # one rounding a step; the last step also rounds what it is about to write, by block and by outer block
    assert counts == [0] * 5 + [1, 1, 1, 3, 0, 0, 0, 0, 0, 0] * 2 + [1, 1, 1, 3, 0]
    assert reports == [8, 18, 28] and open_at == [5, 6, 7, 15, 16, 17, 25, 26, 27]


@pytest.mark.parametrize("track", [1, 0.9])
@pytest.mark.parametrize("flip_at, seen", [(4, 0), (5, 0), (6, 1), (7, 1), (8, 1), (9, 0)])
def test_which_steps_count(track, flip_at, seen):
    """ Catches: the first or last step of a window lost, as in the release, or one from outside taken in. """
    layer = linear(torch.zeros(1, 16))
    watch = remedy("reset", {"a": layer}, start=5, window=3, track=track)
    reports = play(watch, layer, in_units([[1.2499 if step < flip_at else 1.2501 for step in range(12)]]))
    assert list(reports) == [8]
    assert (reports[8]["flips"], reports[8]["reset"]) == (seen, seen)


def test_each_window_starts_afresh():
    """ Catches: sums, flips or tracked columns carried over from the window before. """
    layer = linear(torch.zeros(1, 16))
    watch = remedy("reset", {"a": layer}, period=10, window=WINDOW, track=0.1)
    first, second = in_units([SWINGS, RESTS]), in_units([[2.0] * 9, SWINGS])
    gap = first[-1:]
    reports = play(watch, layer, torch.cat((first, gap, second, gap, first)))
    assert list(reports) == [8, 18, 28]
    # of the first cast one weight is tracked, the one at 1.25001: nearer than 1.24, and it does not move
    assert [(r["reset"], r["flips"], r["reversals"]) for r in reports.values()] == [
        (0, 0, 0), (1, 8, 7), (0, 0, 0)]


class Ops(TorchDispatchMode):
    """ Collects the names of the operators that run, and finds those for which the host waits. """
    WAITS = ("_local_scalar_dense", "nonzero", "aten.equal", "masked_select", "unique")

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    def waits(self):
        return [name for name in self.names if any(w in name for w in self.WAITS)]


def lists_made(monkeypatch):
    """ A list with an entry for each tolist(), for which the host waits too. """
    lists, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: lists.append(x) or tolist(x))
    return lists


@pytest.mark.parametrize("track", [1, 0.2])
def test_the_host_waits_once(track, monkeypatch):
    """
    Catches: .item(), tolist, nonzero, an if on a tensor: the GPU waits for the host at each step. At the last
    one: a wait for each layer in turn.
    """
    layers = model()
    watch = remedy("reset", layers, period=10, window=5, track=track)
    lists = lists_made(monkeypatch)
    with Ops() as ops:
        for step in range(5):
            watch.after_step(step)
        assert not lists
        assert watch.after_step(5)[0]
    assert not ops.waits() and len(lists) == 1
    with Ops() as ops:
        bool(layers["up"].weight.isfinite().all())
    assert ops.waits(), "the detector does not detect"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", [name for name in REMEDIES if name not in ("off", "watch")])
def test_a_gpu_resets_what_the_cpu_resets(name):
    """ Catches: a step of an open window that waits for the GPU, arithmetic that differs there by an ulp. """
    weights = walk((64, 300), 14, size=0.01)
    results = []
    for device in ("cpu", "cuda"):
        layer = linear(weights[0], RECIPES["tetrajet_full"], outliers=5).to(device)
        layer.counter = Counter(9, device=device)       # a layer's own has another seed for each layer
        layer.set_channels(torch.tensor([1, 9, 30, 31, 144], device=device))
        watch = remedy(name, {"a": layer}, window=13, tau=4.0, track=0.2, threshold=0.005, steps=20)
        for step, w in enumerate(weights.to(device)):
            layer.weight.data.copy_(w)
            layer.weight.grad = torch.zeros_like(w)
            torch.cuda.set_sync_debug_mode("error" if 0 < step < 13 else "default")
            try:
                watch.before_clip(step)
                report = watch.after_step(step)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        results.append((report[1], layer.weight.data.cpu(), layer.weight.grad.cpu()))
    (a, *x), (b, *y) = results
    assert a == pytest.approx(b, rel=1e-6) and all(map(same, x, y))


# -----------------------------------------------------------------------------
# outlier channels


@pytest.mark.parametrize("track", [1, 0.99])
def test_outlier_channels_are_left_alone(track):
    """ Catches: outlier columns tracked, reset, or overwritten by the zeros that stand for them in FP4. """
    channels = torch.tensor([0, 3, 77])
    weights = walk((8, 128), 11, size=0.01)
    weights[:, :, 0] = 5.0                                # were it not zeroed, it would crush the scales
    weights[::2, :, 3], weights[1::2, :, 3] = 0.249, 0.251
    layer = linear(weights[0], RECIPES["tetrajet_full"], outliers=3)
    layer.set_channels(channels)
    report, weight = run(weights, layer=layer, tau=4.0, track=track)
    assert report["tracked"] == 8 * 125 and report["reset"] > 3
    assert report["reset_share"] == report["reset"] / (8 * 125)
    assert same(weight[:, channels], weights[-1][:, channels])

    # the rest is reset as if the columns had been zero all along
    zeroed = weights.index_fill(2, channels, 0.0)
    twin, other = run(zeroed, tau=4.0)
    rest = torch.ones(128, dtype=torch.bool).index_fill_(0, channels, False)
    assert twin["reset"] == report["reset"] and same(other[:, rest], weight[:, rest])


def test_outlier_channels_are_never_tracked():
    """ Catches: zeroed columns, a quarter from the first threshold, taken before weights farther off. """
    w = torch.full((4, 128), 3.0)
    w[:, 0] = 6.0
    layer = linear(w, RECIPES["tetrajet_full"], outliers=12)
    layer.set_channels(torch.arange(50, 62))
    columns = osci.nearest_columns(layer, *osci.rounded_weight(layer), 0.99)
    assert columns.shape == (4, 116) and not torch.isin(columns, torch.arange(50, 62)).any()


@pytest.mark.parametrize("name, track", [("reset", 1), ("reset", 0.9), ("dampen", 1)])
def test_outlier_channels_chosen_in_an_open_window(name, track):
    """ Catches: columns that drop to zero taken for a move, and blocks that are rescaled for oscillation. """
    weights = walk((8, 128), 11, size=0.01)
    weights[:, :, 0] = 1.0
    knobs = dict(window=10, tau=1e-3, track=track)
    alone = play(remedy(name, {"b": (b := linear(weights[0]))}, **knobs), b, weights)
    for names in ("ab", "a"):
        layers = {"a": linear(weights[0], RECIPES["tetrajet_full"], outliers=1), "b": linear(weights[0])}
        watch = remedy(name, {which: layers[which] for which in names}, **knobs)
        for step in range(11):
            for layer in layers.values():
                layer.weight.data.copy_(weights[step])
            if step == 5:
                layers["a"].set_channels(torch.tensor([0]))
            said, columns = watch.after_step(step)
        # of "a" alone there is nothing to report
        assert {key.removeprefix("osci_"): x for key, x in columns.items()} == (alone[10] if said else {})
        assert bool(said) == (names == "ab") and layers["a"].osci_w is None
        assert same(layers["a"].weight.data, weights[-1])


# -----------------------------------------------------------------------------
# state


def model():
    """ Two layers of different shapes, one of them with outlier channels. """
    layers = {"up": linear(walk((6, 100), 1, 0.0)[0]),
              "down": linear(walk((4, 160), 1, 0.0, seed=1)[0], RECIPES["tetrajet_full"], outliers=5)}
    layers["down"].set_channels(torch.tensor([1, 9, 30, 31, 144]))
    for number, layer in enumerate(layers.values()):
        layer.own, layer.counter, layer.layer = False, Counter(9), number
    return layers


SCHEDULE = dict(start=3, period=12, window=10, tau=4.0, track=0.2, steps=20)


def resumed(layers, file=True):
    """ What a checkpoint holds of these layers, as a resumed run reads it. """
    saved = nn.ModuleDict(layers).state_dict()
    if file:
        stream = io.BytesIO()
        torch.save(saved, stream)
        saved = torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    return saved


def restore(layers, saved):
    """ Load a checkpoint, as train.py and eval.py do. """
    counter = next(iter(layers.values())).counter
    fill(SimpleNamespace(model=nn.ModuleDict(layers), counter=counter), {"model": saved})


def journey(layers, watch, steps):
    """ A made-up optimizer; where something is around the linear, gradients depend on what it does. """
    reports = {}
    for step in steps:
        for i, layer in enumerate(layers.values()):
            g = torch.Generator().manual_seed(1000 * i + step)
            layer.counter.set(step)
            layer.weight.grad = torch.randn(layer.weight.shape, generator=g)
            if layer.extra:
                layer(torch.randn(8, layer.in_features, generator=g)).square().sum().backward()
        watch.before_clip(step)
        for i, layer in enumerate(layers.values()):
            g = torch.Generator().manual_seed(2000 * i + step)
            noise = torch.randn(layer.weight.shape, generator=g) * 1e-3
            layer.weight.data += noise - 1e-5 * layer.weight.grad
        said, columns = watch.after_step(step)
        if said:
            reports[step] = said, columns
    return reports


@pytest.mark.parametrize("name, track", [("reset", 1), *((name, 0.2) for name in REMEDIES if name != "off")])
def test_ten_and_ten_steps_are_twenty(name, track):
    """
    Catches: part of an open window, an average, a frequency or a stand-in that a checkpoint forgets, at any
    phase; and state that a resumed run shares with the old one.
    """
    knobs = SCHEDULE | dict(track=track, threshold=0.005)
    straight = model()
    reports = journey(straight, remedy(name, straight, **knobs), range(20))
    assert list(reports) == [13]
    for cut in (2, 10, 14, 17):
        first, second = model(), model()
        watch, other = (remedy(name, layers, **knobs) for layers in (first, second))
        journey(first, watch, range(cut))
        saved = resumed(first, file=cut != 10)
        assert ("up.osci_w" in saved) == (cut in (10, 17) and name != "edge")
        restore(second, saved)
        journey(first, watch, range(cut, cut + 2))      # the old run goes on, and must not reach into this
        rest = journey(second, other, range(cut, 20))
        assert rest == {step: report for step, report in reports.items() if step >= cut}
        assert all(same(second[n].weight.data, straight[n].weight.data) for n in straight)


def test_a_back_end_rounds_and_tracks():
    """ Catches: kernels that are never asked, or asked with other arguments than the lines they replace. """
    calls = []

    def codes(w, op):
        calls.append("codes")
        return quantize(w, op)

    def track(layer, w, q, tau):
        calls.append("track")
        osci.advance(layer, w, q, tau)

    quant.BACKENDS["spy"] = Backend(quant.BACKENDS["reference"].linear, codes=codes, track=track)
    try:
        weights = walk((4, 64), 4, size=0.01)
        layer = linear(weights[0])
        layer.backend = "spy"
        assert run(weights, layer=layer)[0] == run(weights)[0]
    finally:
        del quant.BACKENDS["spy"]
    assert calls == ["codes", "codes", "track", "codes", "track", "codes", "track"]


def test_off_does_nothing():
    """ Catches: a base class that acts, or that keeps something. """
    layers = model()
    before = resumed(layers)
    assert journey(layers, remedy("off", layers), range(3)) == {} and before.keys() == resumed(layers).keys()

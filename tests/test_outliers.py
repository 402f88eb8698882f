""" OutControl: which channels it chooses, and that switching them over does not hurt. """
from dataclasses import replace

import pytest
import torch

import outliers
import rivals       # noqa: F401  their choices and arounds
from outliers import CHOICES, OutControl
from quant import QuantLinear
from recipes import RECIPES

FULL = RECIPES["tetrajet_full"]


def layer(K: int = 64, N: int = 48, outliers: int = 6, seed: int = 0) -> QuantLinear:
    torch.manual_seed(seed)
    return QuantLinear(K, N, bias=False, recipe=FULL, outliers=outliers)


def measure(control: OutControl, steps: dict[int, list[torch.Tensor]]) -> dict[int, tuple[str, dict]]:
    """ Steps, each with its micro-batches -> what was said, and columns, by step. """
    lin, = control.layers.values()
    said = {}
    for step, micros in steps.items():
        control.before_step(step)
        for x in micros:
            lin(x)
        line, columns = control.after_step(step)
        if line:
            said[step] = line, columns
    return said


def calibrate(lin: QuantLinear, steps: list[list[torch.Tensor]], start: int = 2):
    """ One window over steps, each a list of micro-batches. """
    control = OutControl({"lin": lin}, start, len(steps))
    assert list(measure(control, dict(enumerate(steps, start)))) == [start + len(steps) - 1]


def test_finds_planted_channels_and_sorts_them():
    """ Catches: smallest instead of largest, indices in the order of norms instead of ascending. """
    lin = layer()
    planted = [50, 3, 17, 40, 9, 63]
    steps = [[torch.randn(32, 64)] for _ in range(3)]
    for (x,) in steps:
        x[:, planted] *= torch.arange(10.0, 16.0)
    calibrate(lin, steps)
    assert lin.split and lin.channels.tolist() == sorted(planted)


def uneven_tokens() -> torch.Tensor:
    """ (4, 8, 64): channel 0 is loud in the first quarter only, channel 1 less so and everywhere. """
    x = torch.zeros(4, 8, 64)
    x[0, :, 0] = 4.0
    x[:, :, 1] = 1.5
    return x


def test_norms_of_the_whole_step_do_not_depend_on_micro_batches(monkeypatch):
    """
    Catches: a norm added per micro-batch, as the release does, and ranks that choose by their own tokens
    alone. Channel 0 has all its energy in one quarter and channel 1 spreads three quarters of it over four:
    sums of the quarters' norms rank them the wrong way round.
    """
    x = uneven_tokens()
    assert x[:, :, 1].norm(dim=1).sum() > x[:, :, 0].norm(dim=1).sum()
    whole, split, rank = layer(outliers=1), layer(outliers=1), layer(outliers=1)
    calibrate(whole, [[x.flatten(0, 1)]])
    calibrate(split, [list(x)])

    def all_reduce(squares):
        """ The other rank has seen the first half of the tokens. """
        squares += x[:2].square().sum((0, 1))

    monkeypatch.setattr(outliers.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(outliers.dist, "all_reduce", all_reduce)
    calibrate(rank, [list(x[2:])])
    assert [lin.channels.tolist() for lin in (whole, split, rank)] == [[0]] * 3


def test_norms_and_not_energies_are_summed_over_steps():
    """ Catches: a square root taken once at the end: one loud step would outvote many steady ones. """
    lin = layer(outliers=1)
    loud, steady = torch.zeros(8, 64), torch.zeros(8, 64)
    loud[:, 0], steady[:, 1] = 2.0, 1.0
    calibrate(lin, [[loud], [steady], [steady], [steady]])
    assert lin.channels.tolist() == [1]


def test_ties_go_to_the_lower_channel():
    """ Catches: an unstable sort, which would choose other channels on another device. """
    largest = OutControl({}, 0, 1).choose
    assert largest(torch.ones(1000), layer(outliers=5), 0).tolist() == [0, 1, 2, 3, 4]
    assert largest(torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0]), layer(outliers=3), 0).tolist() == [1, 3, 2]


def test_what_is_measured_is_what_is_rounded():
    """ Catches: norms of X from before the around, where a channel that is all mean is the largest one. """
    for around, expected in (((), [0]), (("averis",), [1])):
        lin = layer(outliers=1)
        lin.recipe = replace(FULL, around=around)
        x = torch.zeros(32, 64)
        x[:, 0], x[::2, 1], x[1::2, 1] = 3.0, 2.0, -2.0
        calibrate(lin, [[x]])
        assert lin.channels.tolist() == expected


def test_window_opens_and_closes_when_it_says():
    """ Catches: off by one at either end; measuring outside the window; something kept after it. """
    lin = layer()
    control = OutControl({"lin": lin, "none": layer(outliers=0)}, start=3, window=2)
    closed = []
    for step in range(8):
        control.before_step(step)
        assert (lin.squares is not None) == (step in (3, 4))
        lin(torch.randn(16, 64))
        said, columns = control.after_step(step)
        if said:
            assert said.startswith("OutControl has chosen 6 input channels of 1 layers") and not columns
            closed.append(step)
        assert lin.split == (step >= 4) and lin.squares is None
        assert ("channel_norms" in lin.state_dict()) == (step == 3)
    assert closed == [4]


def test_channels_chosen_late():
    """ Catches: a window that only opens early in training: a late start is how a late choice is tried. """
    early, late = torch.zeros(8, 64), torch.zeros(8, 64)
    early[:, :6], late[:, 30:36] = 9.0, 9.0
    for start, expected in ((2, list(range(6))), (30, list(range(30, 36)))):
        control = OutControl({"lin": layer()}, start, 3)
        measure(control, {step: [early if step < 20 else late] for step in range(35)})
        assert control.layers["lin"].channels.tolist() == expected


def drifting(steps) -> dict[int, list[torch.Tensor]]:
    """ Six channels are loud, and move on by one in two steps. """
    found = {}
    for step in steps:
        found[step] = [torch.full((8, 64), 0.1)]
        found[step][0][:, [(i + step // 2) % 64 for i in range(6)]] = 5.0
    return found


def test_the_overlap_with_the_first_choice():
    """
    Catches: compared with the choice before in place of the first; the choice replaced; windows counted from
    step 0; norms that run on from one window into the next.
    """
    lin = layer()
    said = measure(OutControl({"lin": lin}, 2, 2, again=4), drifting(range(30)))
    assert list(said) == [3, 7, 11, 15, 19, 23, 27] and lin.channels.tolist() == list(range(1, 7))
    assert said[3][1] == {} and lin.squares is None and lin.channel_norms is None
    # two further on with each window: 4 of 6 are left, 2, 0
    assert [columns["outlier_overlap"] for _, columns in list(said.values())[1:]] == pytest.approx(
        [4/6, 2/6, 0, 0, 0, 0])
    assert said[7][0] == ("of a layer's kept channels, 66.7% would be chosen now too; fewest in lin, 66.7%")
    assert tuple(said[7][1]) == OutControl.COLUMNS


@pytest.mark.parametrize("cut", [2, 6])
def test_a_checkpoint_inside_a_window_changes_nothing(cut):
    """
    Catches: norms that live only in memory, in the first window or in a later one. Where channels drift, the
    second half of a window alone would choose others.
    """
    steps = drifting(range(8))
    straight = layer()
    expected = measure(OutControl({"lin": straight}, 0, 4, again=4), steps)
    assert straight.channels.tolist() == list(range(6)) and expected[7][1]["outlier_overlap"] == 4 / 6
    first = layer()
    measure(OutControl({"lin": first}, 0, 4, again=4), {step: steps[step] for step in range(cut)})
    saved = first.state_dict()
    second = layer(seed=5)
    control = OutControl({"lin": second}, 0, 4, again=4)
    second.channel_norms = torch.empty_like(saved["channel_norms"])      # as checkpoint.fill does
    second.load_state_dict(saved)
    rest = measure(control, {step: steps[step] for step in range(cut, 8)})
    assert rest == {step: said for step, said in expected.items() if step >= cut}
    assert second.channels.tolist() == straight.channels.tolist()


def test_evaluation_is_not_measured():
    """ Catches: validation batches inside the window that leak into the choice. """
    lin = layer()
    OutControl({"lin": lin}, 0, 1).before_step(0)
    lin.eval()(torch.randn(16, 64))
    assert not lin.squares.any()


def test_switching_over_lowers_the_error_of_the_forward_pass():
    """ Catches: a switch that drops, doubles or misplaces channels. With outliers the error must fall. """
    lin = layer(outliers=6).eval()
    x = torch.randn(256, 64)
    x[:, [5, 20, 33, 41, 50, 60]] *= 30
    exact = torch.nn.functional.linear(x, lin.weight)
    before = (lin(x) - exact).norm() / exact.norm()
    lin.set_channels(torch.tensor([5, 20, 33, 41, 50, 60]))
    after = (lin(x) - exact).norm() / exact.norm()
    assert 0 < after < 0.6 * before


# -----------------------------------------------------------------------------
# channels chosen by what rounding takes from them


def nvfp4(x: torch.Tensor, rows: int, outer: int) -> torch.Tensor:
    """ x (M, K), both in whole blocks, in blocks of rows x 16; outer columns share a scale, 0: all. """
    M, K = x.shape
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    blocks = x.view(M // rows, rows, K // 16, 16).transpose(1, 2)               # (R, B, rows, 16)
    most = blocks.abs().amax((2, 3))
    top = x.abs().max()
    if outer:
        top = most.view(len(most), -1, outer // 16).amax(2).repeat_interleave(outer // 16, 1)
    scale = (most / (top / 448 / 6) / 6).to(torch.float8_e4m3fn).float() * (top / 448 / 6)
    y = blocks / scale[:, :, None, None]
    return ((grid[(y.abs()[..., None] - grid).abs().argmin(-1)] * y.sign() * scale[:, :, None, None])
            .transpose(1, 2).reshape(M, K))


@pytest.mark.parametrize("recipe, rows, outer", [("tetrajet_full", 1, 128), ("hcp", 16, 0)])
@pytest.mark.parametrize("passes, cut", [(1, 1), (2, 1), (1, 4)])
def test_channels_that_lose_most_by_rounding(recipe, rows, outer, passes, cut):
    """
    Catches: errors of another operand, axis or format, sums in the place of means, tokens that count twice
    where recomputation shows them twice, each micro-step or each rank with a mean of its own, evaluation in
    the sums, errors of the weight that are left out or outweigh all, numbers of two choices exchanged, sums
    that torch.compile loses.
    """
    torch.manual_seed(0)
    lin = QuantLinear(128, 48, bias=False, recipe=RECIPES[recipe], outliers=13)
    lin.weight.data = torch.randn(48, 128) * torch.rand(128).exp2()
    steps = [torch.randn(64, 128) * torch.rand(128).exp2() for _ in range(3)]
    of_x = torch.stack([(x - nvfp4(x, 1, outer)).abs().mean(0) for x in steps]).mean(0)
    of_w = (lin.weight - nvfp4(lin.weight.detach(), rows, outer)).abs().mean(0)

    def top(score: torch.Tensor) -> set[int]:
        return set(score.topk(13).indices.tolist())
    expected, by_norm = top(of_x + of_w), top(sum(x.norm(dim=0) for x in steps))
    wrong = by_norm, top(of_x), top(of_w), top(2 * of_x + of_w)
    assert len({frozenset(found) for found in (expected, *wrong)}) == 5
    # one outer scale in all would be another in each part
    for choice, kept in (("error", expected), ("norm_error", by_norm)):
        lin.set_channels(torch.full((13,), -1))
        lin.extra = ()
        control = CHOICES[choice]({"lin": lin}, 2, 3)
        for step, x in enumerate(steps, 2):
            control.before_step(step)
            for part in x.chunk(cut if outer else 1):
                for _ in range(passes):
                    (torch.compile(lin, backend="aot_eager") if cut > 1 else lin)(part)
            lin.eval()(x * 9)
            line, columns = control.after_step(step)
            lin.train()
        assert set(lin.channels.tolist()) == kept and lin.split == (recipe != "hcp")
        share = len(expected & by_norm) / 13
        assert list(columns.items()) == [("outlier_common", share), ("outlier_common_min", share)]
        other = "norm" if choice == "error" else "error"
        assert f"chosen ones, {share:.1%} would be chosen by {other} too; fewest in lin, {share:.1%}" in line
        assert tuple(columns) == control.COLUMNS[2:] and lin.channel_errors is None and lin.errors is None


def test_errors_are_summed_over_ranks(monkeypatch):
    """ Catches: ranks that choose by their own tokens, or a mean of means of unequal ranks. """
    torch.manual_seed(0)
    whole, rank = (layer(K=128, outliers=13) for _ in range(2))
    x = torch.randn(64, 128) * torch.rand(64, 128).exp2() ** 3
    other = layer(K=128, outliers=13)

    def one_step(lin, tokens):
        control = CHOICES["error"]({"lin": lin}, 0, 1)
        control.before_step(0)
        lin(tokens)
        return control
    one_step(whole, x).after_step(0)
    one_step(other, x[:48])
    sums = {1: other.squares, 2: other.errors}
    control = one_step(rank, x[48:])
    monkeypatch.setattr(outliers.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(outliers.dist, "all_reduce", lambda mine: mine.add_(sums[mine.dim()]))
    control.after_step(0)
    assert torch.equal(whole.channels, rank.channels)
    alone = layer(K=128, outliers=13)
    monkeypatch.undo()
    one_step(alone, x[48:]).after_step(0)
    assert not torch.equal(whole.channels, alone.channels)

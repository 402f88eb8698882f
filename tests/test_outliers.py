""" OutControl: which channels it chooses, and that switching them over does not hurt. """
import pytest
import torch

from outliers import OutControl, top_channels
from parallel import Ranks
from quant import Counter, QuantLinear
from recipes import RECIPES

FULL = RECIPES["tetrajet_full"]


def layer(K: int = 64, N: int = 48, outliers: int = 6, seed: int = 0) -> QuantLinear:
    torch.manual_seed(seed)
    return QuantLinear(K, N, bias=False, recipe=FULL, outliers=outliers)


def calibrate(lin: QuantLinear, steps: list[list[torch.Tensor]], start: int = 2,
              choice: str = "norm") -> OutControl:
    """ Run a calibration over steps, each a list of micro-batches. """
    control = OutControl({"lin": lin}, start, len(steps), choice)
    for i, micros in enumerate(steps):
        control.begin_step(start + i)
        for x in micros:
            lin(x)
        control.after_step(start + i)
    return control


def test_finds_planted_channels_and_sorts_them():
    """ Catches: smallest instead of largest, indices in the order of norms instead of ascending. """
    lin = layer()
    planted = [50, 3, 17, 40, 9, 63]
    steps = [[torch.randn(32, 64)] for _ in range(3)]
    for (x,) in steps:
        x[:, planted] *= torch.arange(10.0, 16.0)
    calibrate(lin, steps)
    assert lin.split and lin.channels.tolist() == sorted(planted)


def test_norms_of_the_whole_step_do_not_depend_on_micro_batches():
    """
    Catches: adding a norm per micro-batch, as the release does. Channel 0 has all its energy in one
    micro-batch and channel 1 spreads three quarters of it over four: sums of micro-batch norms rank
    them the wrong way round.
    """
    x = uneven_tokens()
    whole, split = layer(outliers=1), layer(outliers=1)
    calibrate(whole, [[x.flatten(0, 1)]])
    calibrate(split, [list(x)])
    assert whole.channels.tolist() == split.channels.tolist() == [0]
    assert x[:, :, 1].norm(dim=1).sum() > x[:, :, 0].norm(dim=1).sum()


def calibrate_rank(rank: int, world: int, folder: str):
    """ One of `world` processes: sees its share of the tokens, writes the channels that it chose. """
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank,
                                         world_size=world)
    lin = layer(outliers=1)
    calibrate(lin, [[uneven_tokens().chunk(world)[rank].flatten(0, 1)]])
    torch.save(lin.channels, f"{folder}/channels{rank}.pt")
    Ranks(rank, world).finish()     # at once it aborts now and then: a thread of gloo's is still at work


def uneven_tokens() -> torch.Tensor:
    """ (4, 8, 64): channel 0 is loud in the first quarter only, channel 1 less so and everywhere. """
    x = torch.zeros(4, 8, 64)
    x[0, :, 0] = 4.0
    x[:, :, 1] = 1.5
    return x


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")
def test_ranks_choose_what_one_process_would(tmp_path):
    """ Catches: ranks that choose by their own tokens alone, so that the second one would take channel 1. """
    torch.multiprocessing.spawn(calibrate_rank, (2, str(tmp_path)), nprocs=2)
    assert [torch.load(tmp_path / f"channels{rank}.pt").tolist() for rank in (0, 1)] == [[0], [0]]


def test_norms_and_not_energies_are_summed_over_steps():
    """ Catches: a square root taken once at the end: one loud step would outvote many steady ones. """
    lin = layer(outliers=1)
    loud, steady = torch.zeros(8, 64), torch.zeros(8, 64)
    loud[:, 0], steady[:, 1] = 2.0, 1.0
    calibrate(lin, [[loud], [steady], [steady], [steady]])
    assert lin.channels.tolist() == [1]


def test_ties_go_to_the_lower_channel():
    """ Catches: an unstable sort, which would choose other channels on another device. """
    assert top_channels(torch.ones(1000), 5).tolist() == [0, 1, 2, 3, 4]
    assert top_channels(torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0]), 3).tolist() == [1, 2, 3]


def test_window_opens_and_closes_when_it_says():
    """ Catches: off by one at either end; measuring outside the window. """
    lin = layer()
    control = OutControl({"lin": lin}, start=3, window=2)
    closed = []
    for step in range(8):
        control.begin_step(step)
        assert (lin.sumsq is not None) == (step in (3, 4))
        lin(torch.randn(16, 64))
        if found := control.after_step(step):
            assert found.chosen["lin"] is lin.channels and not found.overlap
            closed.append(step)
        assert lin.split == (step >= 4) and lin.sumsq is None
    assert closed == [4] and control.state_dict() == {"norms": {}}


def test_channels_chosen_late():
    """ Catches: a window that only opens early in training: a late start is how a late choice is tried. """
    early, late = torch.zeros(8, 64), torch.zeros(8, 64)
    early[:, :6], late[:, 30:36] = 9.0, 9.0
    for start, expected in ((2, list(range(6))), (90, list(range(30, 36)))):
        lin = layer()
        control = OutControl({"lin": lin}, start, window=3)
        for step in range(100):
            control.begin_step(step)
            lin(early if step < 50 else late)
            control.after_step(step)
        assert lin.channels.tolist() == expected


def measure(lin: QuantLinear, control: OutControl, steps) -> dict[int, dict]:
    """ Channels loud[step] are loud -> what each closing window found, by step. """
    found = {}
    for step in steps:
        x = torch.full((8, 64), 0.1)
        x[:, [(i + step // 2) % 64 for i in range(6)]] = 5.0        # the loud ones move by one in two steps
        control.begin_step(step)
        lin(x)
        if closed := control.after_step(step):
            found[step] = closed
    return found


def test_the_overlap_with_the_first_choice():
    """
    Catches: compared with the choice before in place of the first; the choice replaced; windows counted from
    step 0; norms that run on from one window into the next.
    """
    lin, control = layer(), None
    control = OutControl({"lin": lin}, start=2, window=2, again=4)
    found = measure(lin, control, range(30))
    assert list(found) == [3, 7, 11, 15, 19, 23, 27]
    assert lin.channels.tolist() == list(range(1, 7)) and not found[3].overlap
    # two further on with each window: 4 of 6 are left, 2, 0
    assert [found[step].overlap["lin"] for step in list(found)[1:]] == pytest.approx([4/6, 2/6, 0, 0, 0, 0])
    assert not any(closed.chosen for step, closed in found.items() if step > 3)
    assert lin.sumsq is None and control.state_dict() == {"norms": {}}


def test_a_checkpoint_inside_a_later_window_changes_nothing():
    """ Catches: norms of a later window that are not saved, or a resumed run that chooses anew. """
    straight = measure(lin := layer(), OutControl({"lin": lin}, 1, 3, again=4), range(12))
    first = layer()
    control = OutControl({"lin": first}, 1, 3, again=4)
    measure(first, control, range(7))
    state = control.state_dict()
    assert state["norms"]
    second = layer()
    second.load_state_dict(first.state_dict())
    control = OutControl({"lin": second}, 1, 3, again=4)
    control.load_state_dict(state)
    rest = measure(second, control, range(7, 12))
    assert list(rest) == [7, 11] and {s: r.overlap for s, r in rest.items()} == {
        s: straight[s].overlap for s in rest} and second.channels.tolist() == first.channels.tolist()


def test_random_channels_are_the_control():
    """ Catches: channels that follow the norms, that a seed does not repeat, or all layers the same. """
    def chosen(seed, number):
        lin = layer(K=512, outliers=51)
        lin.counter, lin.layer = Counter(seed), number
        x = torch.randn(8, 512)
        x[:, :51] *= 30
        calibrate(lin, [[x], [x]], choice="random")
        assert lin.split and lin.channels.unique().numel() == 51
        return set(lin.channels.tolist())

    a = chosen(1, 0)
    # of 51 of 512, 5 meet 51 others by chance, with a deviation of 2.1
    assert a == chosen(1, 0) and len(a & set(range(51))) < 16
    assert len(a & chosen(2, 0)) < 16 and len(a & chosen(1, 1)) < 16


@pytest.mark.parametrize("settings, message", [
    (dict(choice="loudest"), "choice is one of norm, random"), (dict(again=2), "again = 0 or >= window"),
    (dict(window=0), "window >= 1"), (dict(start=-1), "start >= 0"),
])
def test_what_cannot_work_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        OutControl({"lin": layer()}, **dict(start=0, window=3) | settings)


def test_evaluation_is_not_measured():
    """ Catches: validation batches inside the window that leak into the choice. """
    lin = layer()
    control = OutControl({"lin": lin}, 0, 1)
    control.begin_step(0)
    lin.eval()
    lin(torch.randn(16, 64))
    assert not lin.sumsq.any()


def test_a_checkpoint_inside_the_window_changes_nothing(tmp_path):
    """ Catches: norms that live only in memory, so that a resumed window has seen fewer steps. """
    torch.manual_seed(1)
    # channels whose rank changes between the first and the second half of the window
    steps = [[torch.randn(16, 64) * torch.linspace(1, 3, 64).roll(20 * i)] for i in range(4)]
    straight = layer()
    calibrate(straight, steps)

    first = layer()
    control = OutControl({"lin": first}, 2, 4)
    for i in (0, 1):
        control.begin_step(2 + i)
        first(steps[i][0])
        control.after_step(2 + i)
    torch.save({"model": first.state_dict(), "outliers": control.state_dict()}, tmp_path / "c.pt")

    saved = torch.load(tmp_path / "c.pt", weights_only=True)
    second = layer(seed=5)
    second.load_state_dict(saved["model"])
    control = OutControl({"lin": second}, 2, 4)
    control.load_state_dict(saved["outliers"])
    for i in (2, 3):
        control.begin_step(2 + i)
        second(steps[i][0])
        control.after_step(2 + i)
    assert second.channels.tolist() == straight.channels.tolist()
    only_half = layer()
    calibrate(only_half, steps[2:])
    assert only_half.channels.tolist() != straight.channels.tolist()      # so the test can fail


def test_norms_of_another_model_are_refused():
    with pytest.raises(ValueError, match="other layers"):
        OutControl({"lin": layer()}, 0, 1).load_state_dict({"norms": {"other": torch.ones(3)}})


def test_switching_over_lowers_the_error_of_the_forward_pass():
    """
    Catches: a switch that drops, doubles or misplaces channels. With real outliers the error must fall.
    """
    lin = layer(outliers=6).eval()
    x = torch.randn(256, 64)
    x[:, [5, 20, 33, 41, 50, 60]] *= 30
    exact = torch.nn.functional.linear(x, lin.weight)
    before = (lin(x) - exact).norm() / exact.norm()
    lin.set_channels(torch.tensor([5, 20, 33, 41, 50, 60]))
    after = (lin(x) - exact).norm() / exact.norm()
    assert 0 < after < 0.6 * before

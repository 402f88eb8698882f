""" OutControl: which channels it chooses, and that switching them over does not hurt. """
import pytest
import torch

from outliers import OutControl, top_channels
from quant import QuantLinear
from recipes import RECIPES

FULL = RECIPES["tetrajet_full"]


def layer(K: int = 64, N: int = 48, outliers: int = 6, seed: int = 0) -> QuantLinear:
    torch.manual_seed(seed)
    return QuantLinear(K, N, bias=False, recipe=FULL, outliers=outliers)


def calibrate(lin: QuantLinear, steps: list[list[torch.Tensor]], start: int = 2) -> OutControl:
    """ Run a calibration over steps, each a list of micro-batches. """
    control = OutControl({"lin": lin}, start, len(steps))
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
    torch.distributed.destroy_process_group()


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
        if control.after_step(step) is not None:
            closed.append(step)
        assert lin.split == (step >= 4) and lin.sumsq is None
    assert closed == [4] and control.state_dict() == {"norms": {}}


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

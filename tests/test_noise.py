""" Random numbers by address (noise.py): known answers, addresses, uniformity, independence. """
import math

import pytest
import torch
from torch import Tensor

from noise import SIGN_STREAMS, Counter, philox, random_signs, random_words, uniform
from quant import fake_quantize
from recipes import STOCHASTIC

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
_, DX_SIGNS, DW_SIGNS = SIGN_STREAMS


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def address(seed: int = 0, step: int = 0, micro: int = 0, rank: int = 0) -> Tensor:
    counter = Counter(seed, rank)
    counter.set(step, micro)
    return counter.state


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("counter, key, expected", (
    # kat_vectors of Random123, philox4x32 with 7 rounds
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
))
def test_philox_known_answers(counter, key, expected, device):
    """ Catches a signed shift, a product cut to 32 bits, and a round too few. """
    words = philox([torch.tensor(c, device=device) for c in counter],
                   [torch.tensor(k, device=device) for k in key])
    assert tuple(w.item() for w in words) == expected


def test_addresses_are_as_documented():
    """ Catches a stream that ignores the step, the micro-step, the rank, the layer or half of the seed. """
    at = dict(seed=0x123456789ABCDEF0, step=77, micro=5, rank=3)
    words = random_words(7, address(**at), 11, 4)
    counter = [torch.arange(7), torch.tensor(77), torch.tensor((5 << 16) + 3), torch.tensor(11 * 16 + 4)]
    assert torch.equal(
        words, torch.stack(philox(counter, [torch.tensor(0x9ABCDEF0), torch.tensor(0x12345678)]), 1))

    seen = {tuple(random_words(1, address(seed, step, micro, rank), layer, stream)[0].tolist())
            for seed in (0, 1, 1 << 32) for step in (0, 1, 1 << 16)
            for micro in (0, 1, 9) for rank in (0, 1, 9)
            for layer in (0, 1, 9) for stream in (3, 4, 5, 6, DX_SIGNS, DW_SIGNS)}
    assert len(seen) == 3**5 * 6


@pytest.mark.parametrize("shape", ((5, 17), (3, 24), (1, 1), (4, 128), (6, 9)))
def test_uniform_is_addressed_by_row_and_column(shape):
    """
    Catches halves in another order, and rows that share a group: then a kernel could not draw row by row.
    """
    state = address(seed=9, step=2, micro=1, rank=1)
    got = uniform(shape, state, 7, 5)
    groups = -(-shape[1] // 8)
    words = random_words(shape[0] * groups, state, 7, 5)
    for r in range(shape[0]):
        for c in range(shape[1]):
            word = words[r * groups + c // 8, c % 8 // 2].item()
            half = word >> 16 if c % 2 else word & 0xFFFF
            assert got[r, c].item() == half / 65536
    # a ragged row is a whole one, cut
    assert torch.equal(got, uniform((shape[0], groups * 8), state, 7, 5)[:, : shape[1]])


def test_uniform_is_uniform():
    """ Catches 1.0 (it would round grid numbers up), a level that never comes, a mean that is not half. """
    n = 1 << 19
    u = uniform((n >> 10, 1 << 10), address(3), 2, 6).flatten().double()
    assert u.min() == 0 and u.max() == 1 - 2.0**-16
    assert torch.equal(u * 65536, (u * 65536).floor())
    assert abs(u.mean() - 0.5) < 4 * math.sqrt(1 / 12 / n)
    # counts of the upper and of the lower eight bits: chi-square with 255 degrees of freedom
    level = (u * 65536).long()
    for bits in (level >> 8, level & 255):
        chi2 = (torch.bincount(bits, minlength=256) - n / 256).square().sum() / (n / 256)
        assert abs(chi2 - 255) < 5 * math.sqrt(2 * 255)
    # neighbours in a row, in a word and in a group
    for lag in (1, 2, 8, 1024):
        assert abs(torch.corrcoef(torch.stack((u[lag:], u[:-lag])))[0, 1]) < 4 / math.sqrt(n)


def test_random_signs_are_bits_of_the_words():
    """ Catches signs from one word repeated, or other values than +1 and -1. """
    state = address(5, 6, 7, 8)
    words = random_words(2, state, 3, DX_SIGNS).flatten().tolist()
    expected = [1.0 - 2.0 * (words[j // 32] >> j % 32 & 1) for j in range(200)]
    for n in (1, 2, 16, 32, 128, 129, 200):
        assert random_signs(n, state, 3, DX_SIGNS).tolist() == expected[:n]
    # fresh for the other GEMM, another layer, another step
    others = [random_signs(128, state, 3, DW_SIGNS), random_signs(128, state, 4, DX_SIGNS),
              random_signs(128, address(5, 7, 7, 8), 3, DX_SIGNS)]
    for other in others:
        assert abs((other * torch.tensor(expected[:128])).sum()) < 4 * math.sqrt(128)


def rounding_error(x: Tensor, state: Tensor, layer: int, stream: int) -> Tensor:
    """ With its sign: the noise pushes along the number line. """
    return fake_quantize(x, STOCHASTIC, uniform(x.shape, state, layer, stream)) - x


def correlation(a: Tensor, b: Tensor) -> float:
    """
    Of two errors with mean zero, in standard deviations: large steps weigh more, so n alone is not the bound.
    """
    product = a.double() * b.double()
    return (product.sum() / product.square().sum().sqrt()).item()


@pytest.mark.parametrize("a, b", (
    (((0, 1, 0, 0), 2, 3), ((0, 1, 0, 0), 2, 4)),      # the two operands of dX
    (((0, 1, 0, 0), 2, 5), ((0, 1, 0, 0), 2, 6)),      # of dW
    (((0, 1, 0, 0), 2, 3), ((0, 1, 0, 0), 2, 5)),      # dY in both
    (((0, 1, 0, 0), 2, 3), ((0, 1, 0, 0), 3, 3)),      # two layers
    (((0, 1, 0, 0), 2, 3), ((0, 2, 0, 0), 2, 3)),      # two steps
    (((0, 1, 0, 0), 2, 3), ((0, 1, 1, 0), 2, 3)),      # two micro-steps
    (((0, 1, 0, 0), 2, 3), ((0, 1, 0, 1), 2, 3)),      # two ranks
    (((0, 1, 0, 1), 2, 3), ((0, 1, 1, 0), 2, 3)),      # rank 1 and micro-step 1
    (((0, 1, 0, 0), 2, 3), ((1, 1, 0, 0), 2, 3)),      # two seeds
))
def test_rounding_errors_are_independent(a, b):
    """
    Catches two operands, layers, steps, micro-steps or ranks that share noise. The released kernels use one
    seed for both operands of a GEMM, so that rows of equal index are rounded with the same noise.
    """
    x, w = randn(64, 256), randn(64, 256, seed=1)
    (at_a, layer_a, stream_a), (at_b, layer_b, stream_b) = a, b
    mine = rounding_error(x, address(*at_a), layer_a, stream_a)
    for other in (x, w):
        theirs = rounding_error(other, address(*at_b), layer_b, stream_b)
        assert abs(correlation(mine, theirs)) < 4
        # the statistic has the power to see shared noise, also between different tensors
        shared = rounding_error(other, address(*at_a), layer_a, stream_a)
        assert correlation(mine, shared) > 20

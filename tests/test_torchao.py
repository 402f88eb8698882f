"""
NVFP4 with one outer scale for the tensor, held against an independent implementation, torchao's: the same
codes and scales bit for bit, but for these differences, each of which is shown to be all there is.

    ours    S = (max / 448) / 6     s = e4m3((max of 16 / S) / 6)     c = e2m1(x * (1 / (s S)))
    theirs  S = max / (448 * 6)     s = e4m3((max of 16 / 6) / S)     c = e2m1(x * ((1 / S) / s))

They keep s at 2^-6 or above, the smallest normal number of E4M3; ours may be subnormal, or zero.
"""
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from codes import E4M3, decode, quantize
from quant import TENSOR
from recipes import NEAREST

theirs = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
PER_TENSOR = replace(NEAREST, outer=TENSOR)
HALFWAY = torch.tensor([.25, .75, 1.25, 1.75, 2.5, 3.5, 5])


def both(x: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """ x (M, K) -> inner scales (M, K / 16), float32, and codes (M, K), uint8: ours, theirs. """
    scale = theirs.per_tensor_amax_to_scale(x.abs().amax())
    inner, packed = theirs.nvfp4_quantize(x, per_tensor_scale=scale)
    q = quantize(x, PER_TENSOR)
    return (decode(q.inner, E4M3), q.code), (inner.float(), theirs.unpack_uint4(packed))


def spread(seed: int) -> Tensor:
    """ Normal numbers, in blocks whose sizes differ by up to 2^20. """
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 32, 16, generator=g) * torch.exp2(torch.randint(-19, 1, (64, 32, 1), generator=g))
    return x.flatten(1)


@pytest.mark.parametrize("power", [-20, 0, 9])
def test_where_the_outer_scale_is_a_power_of_two_all_bits_agree(power):
    """ Catches: thresholds of E2M1 and ties, saturation, signs of zero, the order of codes in a byte. """
    x = spread(1).clamp(-1, 1)
    x[0, :16] = torch.cat((HALFWAY, -HALFWAY, torch.tensor([6, -0.0]))) * 448 / 2.0**11     # has the largest
    (s, c), (s_theirs, c_theirs) = both(x * 2.0**power)
    clamped = s < 2.0**-6
    assert torch.equal(s.masked_fill(clamped, 2.0**-6), s_theirs)
    assert torch.equal(c.unflatten(1, (-1, 16))[~clamped], c_theirs.unflatten(1, (-1, 16))[~clamped])
    assert .1 < clamped.float().mean() < .5


def test_elsewhere_a_scale_differs_only_at_a_threshold():
    """ Catches: a factor of the scale that is off by more than its last bits, such as 448 for 464. """
    differ = codes = 0
    for seed in range(20):
        x = spread(seed)
        (s, c), (s_theirs, c_theirs) = both(x)
        other, blocks = (s != s_theirs) & (s_theirs > 2.0**-6), x.double().unflatten(1, (-1, 16))
        # there, the unrounded scale is half-way between the two, to within the last bits of float32
        exact = blocks.abs().amax(2) / 6 / (blocks.abs().max() / 448 / 6)
        middle = (s.double() + s_theirs.double()) / 2
        assert ((exact / middle - 1).abs() < 2.0**-22)[other].all()
        # and under an equal scale a code differs only where x is half-way between two numbers of E2M1
        same = (s == s_theirs)[:, :, None] & (c != c_theirs).unflatten(1, (-1, 16))
        y = (blocks / (s.double() * (blocks.abs().max() / 448 / 6))[:, :, None]).abs()[same]
        assert ((y[:, None] / HALFWAY - 1).abs().amin(1) < 2.0**-21).all()
        differ, codes = differ + int(other.sum()), codes + int(same.sum())
    assert differ + codes < 100         # of 41,000 scales and 655,000 codes

"""
Random numbers that are a pure function of their address: Philox, which needs a counter and keeps no state.

The address of a random number is where in the run it is used: seed, step, micro-step and rank, then layer,
stream (what it is used for) and position. So there is nothing to save: a run that is resumed, and a block
that is computed again in the backward pass, meet the same noise again.
"""
import torch
from torch import Tensor

# Streams 1 to 6 are the noise of the operands Q1 to Q6 of a linear layer (quant.py). Streams 7, 8 and 9 are
# the signs of the rotations of Y, dX and dW
SIGN_STREAMS = 7, 8, 9
MASK = 0xFFFFFFFF           # random words have 32 bits and are held in int64: this keeps the lower 32


class Counter:
    """
    Where the run is, for all its layers: .state is int64 (4,), [seed, step, micro-step, rank], on the device.
    set() writes in place, so that compiled code, which holds the tensor, sees the new numbers.
    """

    def __init__(self, seed: int = 0, rank: int = 0, device: str | torch.device = "cpu"):
        self.state = torch.tensor([seed, 0, 0, rank], dtype=torch.int64, device=device)

    def set(self, step: int, micro: int = 0):
        self.state[1].fill_(step)
        self.state[2].fill_(micro)


def uniform(shape: tuple[int, int], counter: Tensor, layer: int, stream: int) -> Tensor:
    """
    Noise in [0, 1), float32 (M, K): multiples of 2^-16, since 16 random bits make one number. A group of four
    words makes eight numbers of a row, and a row starts a new group.
    """
    (M, K), groups = shape, -(-shape[1] // 8)
    words = random_words(M * groups, counter, layer, stream)
    halves = torch.stack((words & 0xFFFF, words >> 16), dim=-1)             # (M groups, 4, 2)
    return (halves.float() * 2.0**-16).view(M, groups * 8)[:, :K]


def random_signs(n: int, counter: Tensor, layer: int, stream: int) -> Tensor:
    """ n random signs, float32 (n,) of +1 and -1: the bits of the words, the lowest bit first. """
    words = random_words(-(-n // 128), counter, layer, stream).flatten()
    bits = words[:, None] >> torch.arange(32, device=words.device) & 1
    return 1.0 - 2.0 * bits.flatten()[:n].float()


def random_words(n: int, counter: Tensor, layer: int, stream: int) -> Tensor:
    """ n groups of four random 32-bit words, int64 (n, 4). No two addresses share a group. """
    seed, step, micro, rank = counter.unbind()
    c = [torch.arange(n, device=counter.device), step & MASK, (micro << 16) + rank & MASK,
         torch.full_like(step, layer * 16 + stream)]
    return torch.stack(philox(c, [seed & MASK, seed >> 32 & MASK]), dim=-1)


def philox(c: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """
    Philox4x32-7: four words of counter and two of key -> four random words.

    source  Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"
    """
    k0, k1 = key
    for _ in range(7):
        # an int64 product may wrap around, but its 64 bits are those of the unsigned product
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32 & MASK) ^ c[1] ^ k0, p1 & MASK, (p0 >> 32 & MASK) ^ c[3] ^ k1, p0 & MASK]
        k0, k1 = k0 + 0x9E3779B9 & MASK, k1 + 0xBB67AE85 & MASK
    return c

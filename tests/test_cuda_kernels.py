""" What of kernels.py only a GPU can show: its own division, and CUDA graphs. """
import pytest
import torch

triton = pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

import triton.language as tl

import kernels
from quant import GRIDS, SCALES, Counter, QuantLinear
from recipes import RECIPES


@triton.jit
def _divide_kernel(a_ptr, b_ptr, over_ptr, reciprocal_ptr, quotient_ptr, NUMBER: tl.constexpr,
                   BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(a_ptr + i), tl.load(b_ptr + i)
    tl.store(over_ptr + i, kernels._over(a, NUMBER))
    tl.store(reciprocal_ptr + i, kernels._reciprocal(a))
    tl.store(quotient_ptr + i, kernels._divide(a, b, kernels._reciprocal(b)))


# largest grid values, with the head-room of the rules, and largest scales
NUMBERS = sorted({grid.max * room for grid in GRIDS.values() for room in (1.0, 16 / 17, 16 / 17 / 0.93)} |
                 {scale.max for scale in SCALES.values()})


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("exponent", (-90, -3, 0, 7, 90))
def test_every_mantissa_divides_exactly(number, exponent):
    """
    Catches: a quotient or a reciprocal that is one unit in the last place off, of all 2^23 mantissas. Scales
    are made from such quotients, and a scale that rounds the other way is another code.
    """
    a = (torch.arange(2**23, dtype=torch.int32, device="cuda") | 127 << 23).view(torch.float32)
    b = a[torch.randperm(len(a), device="cuda")]
    a = a * 2.0**exponent
    over, reciprocal, quotient = (torch.empty_like(a) for _ in range(3))
    _divide_kernel[(len(a) // 1024,)](a, b, over, reciprocal, quotient, number, 1024, enable_fp_fusion=False)
    # a division by a tensor is exactly rounded in PyTorch; by a Python number it is not
    assert torch.equal(over, a / a.new_full((), number))
    assert torch.equal(reciprocal, a.new_ones(()) / a)
    assert torch.equal(quotient, a / b)


# outlier channels; one scale for the tensor, and noise in scales; trust masks, and gradients turned back
@pytest.mark.parametrize("recipe, backend", [
    ("tetrajet_base", "emulate"), ("tetrajet_full", "emulate"), ("tetrajet_full", "packed"),
    ("quartet2", "packed"), ("quartet", "emulate")])
def test_a_cuda_graph_sees_the_counter(recipe, backend):
    """
    Catches: seed and step that a kernel takes as numbers, which a graph would repeat for ever; an allocation
    or a wait for the host within the layer, which capture refuses.
    """
    outliers = 13 if RECIPES[recipe].outlier else 0
    layer = QuantLinear(128, 96, bias=False, recipe=RECIPES[recipe], counter=Counter(5, device="cuda"),
                        outliers=outliers, backend=backend).cuda()
    layer.set_channels(torch.arange(0, 9 * outliers, 9, device="cuda"))
    x, dy = torch.randn(160, 128, device="cuda").requires_grad_(), torch.randn(160, 96, device="cuda")

    def step() -> torch.Tensor:
        return torch.autograd.grad(layer(x), x, dy)[0]

    expected = []
    for number in (3, 4):
        layer.counter.set(number)
        expected.append(step())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            replayed = step()
    torch.cuda.synchronize()
    for number, wanted in zip((3, 4), expected):
        layer.counter.set(number)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(replayed, wanted)
    assert not torch.equal(*expected)

""" What only a GPU can show: the bits of the CPU, compiled or not, and no wait for the host in a step. """
import pytest
import torch

import build
import data
import train
from codes import quantize
from config import parse
from noise import Counter, random_signs, uniform
from quant import ROW, TENSOR, Operand, QuantLinear, fake_quantize, hadamard
from recipes import MXFP8, RECIPES
from test_train import WINDOWS, assert_same, last_state, learned, shards, tiny  # noqa: F401 (a fixture)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def fresh_compiler():
    """ Programs that earlier tests compiled count towards a limit of the compiler. """
    torch._dynamo.reset()


@pytest.mark.parametrize("op", [
    Operand(), Operand(rule="up"), Operand(rounding="sr"), Operand(rounding="sr", rule="17/16"),
    Operand(block=(16, 16), outer=TENSOR), Operand(outer=ROW), MXFP8,
    Operand(block=(1, 32), scale="e8m0", outer=0, rule="floor"),
], ids=str)
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_codes_scales_and_values_are_those_of_the_cpu(op, size):
    """
    Catches: division by a Python number, which CUDA turns into a multiplication by the rounded reciprocal;
    flushed subnormals; fused multiply-add. Found by this test: the first.
    """
    generator = torch.Generator().manual_seed(0)
    for shape in ((64, 512), (33, 300)):
        x = (torch.randn(shape, generator=generator)
             * torch.randn(shape, generator=generator).exp() ** 2 * size)
        counter, noise = Counter(7).state, (None, None)
        if op.rounding == "sr":
            noise = uniform(shape, counter, 2, 3), uniform(shape, counter.to(CUDA), 2, 3)
            assert torch.equal(noise[0], noise[1].cpu())
        a, b = quantize(x, op, noise[0]), quantize(x.to(CUDA), op, noise[1])
        assert torch.equal(a.code, b.code.cpu()) and torch.equal(a.inner, b.inner.cpu())
        assert a.outer is None or torch.equal(a.outer, b.outer.cpu())
        assert torch.equal(a.dequantize(), fake_quantize(x.to(CUDA), op, noise[1]).cpu())


def test_rotation_is_that_of_the_cpu():
    """ Catches: a rotation through a matrix product, whose order of additions is the library's business. """
    x = torch.randn(40, 300)
    for n in (16, 128):
        signs = random_signs(n, Counter(3).state, 1, 8)
        assert torch.equal(signs, random_signs(n, Counter(3, device=CUDA).state, 1, 8).cpu())
        assert torch.equal(hadamard(x, signs), hadamard(x.to(CUDA), signs.to(CUDA)).cpu())


def layer_of(recipe: str, backend: str) -> QuantLinear:
    torch.manual_seed(0)
    assert not build.enter_kernels(CUDA)
    outliers = 19 if RECIPES[recipe].outlier else 0
    layer = QuantLinear(192, 160, bias=False, recipe=RECIPES[recipe], counter=Counter(5, device=CUDA),
                        outliers=outliers, backend=backend).to(CUDA)
    layer.set_channels(torch.arange(0, 10 * outliers, 10, device=CUDA))
    return layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe, backend", [("tetrajet_full", "reference"), ("tetrajet_full", "emulate"),
                                             ("tetrajet_full", "packed"), ("quartet", "emulate")])
def test_compiled_gradient_equals_the_eager_one(recipe, backend, dtype):
    """
    Catches: a compiler that draws the signs of one product's two operands twice (seen with signs from
    torch.randint: no error, and a gradient off by more than its own size). Bit for bit, through the full code
    generator of torch.compile; kernels are one operator to it, and the reference interrupts the graph.
    """
    layer = layer_of(recipe, backend)
    x = torch.randn(3, 96, 192, device=CUDA, dtype=dtype)
    dy = torch.randn(3, 96, 160, device=CUDA, dtype=dtype)
    results = []
    for f in (layer, torch.compile(layer, fullgraph=recipe == "tetrajet_full" and backend != "reference",
                                   dynamic=False)):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y = f(leaf)
        y.backward(dy)
        results.append((y.detach(), leaf.grad, layer.weight.grad.clone()))
    for a, b in zip(*results):
        assert torch.equal(a, b) and a.abs().max() > 0


@pytest.mark.parametrize("recipe, backend", [("tetrajet_full", "emulate"), ("tetrajet_full", "packed"),
                                             ("quartet2", "packed")])
def test_a_cuda_graph_sees_the_counter(recipe, backend):
    """
    Catches: seed and step that a kernel takes as numbers, which a graph would repeat for ever; an allocation
    or a wait for the host within the layer, which capture refuses.
    """
    layer = layer_of(recipe, backend)
    x, dy = torch.randn(160, 192, device=CUDA).requires_grad_(), torch.randn(160, 160, device=CUDA)

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


def built(shards, *flags):  # noqa: F811
    """ A tiny run with everything on, ready for its first step. """
    cfg = parse(tiny(shards, "--device=cuda", "--recipe=tetrajet_full", *WINDOWS, *flags))
    corpus = data.open_corpus(str(shards))
    net = build.build(cfg, corpus.vocab_size, CUDA)
    return cfg, net, build.make_optimizers(cfg, net.model), corpus


@pytest.mark.parametrize("osci", ["reset", "qema", "freeze", "dampen"])
def test_a_step_does_not_wait_for_the_host(shards, osci):  # noqa: F811
    """ Catches: .item(), a boolean of a tensor, a tensor built from a list, inside the step. """
    run = built(shards, "--compile=false", f"--osci={osci}")
    train.one_step(*run, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(1, 13):       # calibration and a window of OsciReset are open from step 8 on
            train.one_step(*run, step)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_model_has_no_graph_break_and_the_loss_of_the_eager_one(shards):  # noqa: F811
    """ Catches: a linear that breaks the compiled block, and a loss that compilation changes. """
    cfg, net, _, corpus = built(shards, "--compile=false")
    rows, _ = next(train.batches(cfg, corpus, 0, net.ranks))
    inputs, targets = rows[:, :-1].to(CUDA), rows[:, 1:].to(CUDA)
    with torch.autocast("cuda", torch.bfloat16):
        eager, compiled = (float(f(inputs, targets)[0].detach()) / inputs.numel()
                           for f in (net.model, torch.compile(net.model, fullgraph=True)))
    # norms and the softmax are fused differently, in bf16
    assert abs(eager - compiled) < 0.02


@pytest.mark.parametrize("osci", ["reset", "freeze"])
def test_ten_plus_ten_is_twenty_on_a_gpu_too(shards, tmp_path, osci):  # noqa: F811
    """ Catches: state left on the other device. Without compilation the kernels are the same both times. """
    flags = ["--device=cuda", "--compile=false", "--recipe=tetrajet_full", *WINDOWS, f"--osci={osci}"]
    # the backward passes of embedding and attention otherwise add in whatever order threads arrive
    torch.use_deterministic_algorithms(True)
    try:
        for name, stops in (("straight", [0]), ("resumed", [10, 0])):
            for stop in stops:
                train.main(tiny(shards, f"--out={tmp_path}", f"--name={name}", f"--stop_at={stop}", *flags))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(learned(last_state(tmp_path / "straight")), learned(last_state(tmp_path / "resumed")))

""" On a GPU: the same bits as on the CPU, compiled or not, and no wait for the host within a step. """
import pytest
import torch

import data
import train
from config import CHOICES, parse
from quant import (TENSOR, Counter, Operand, QuantLinear, fake_quantize, hadamard, quantize, random_signs,
                   uniform)
from recipes import MXFP8, RECIPES
from test_train import WINDOWS, assert_same, last_state, learned, shards, tiny  # noqa: F401 (a fixture)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

FORMATS = [
    Operand(), Operand(rule="up"), Operand(rounding="sr"), Operand(rounding="sr", rule="nearest"),
    Operand(rounding="sr", rule="17/16"), Operand(outer=TENSOR), Operand(block=(16, 16), outer=TENSOR), MXFP8,
    Operand(block=(1, 32), scale="e8m0", outer=0, rule="floor"),
    Operand(block=(1, 32), scale="e8m0", outer=0),
]


@pytest.mark.parametrize("operand", FORMATS, ids=str)
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_codes_scales_and_values_are_those_of_the_cpu(operand, size):
    """
    Catches: division by a Python number, which CUDA turns into a multiplication by the rounded reciprocal;
    flushed subnormals; fused multiply-add. Found by this test: the first.
    """
    generator = torch.Generator().manual_seed(0)
    for shape in ((64, 512), (33, 300)):
        x = (torch.randn(shape, generator=generator)
             * torch.randn(shape, generator=generator).exp() ** 2 * size)
        counter = Counter(7).state
        noise = uniform(shape, counter, 2, 3) if operand.stochastic else None
        noise_gpu = uniform(shape, counter.cuda(), 2, 3) if operand.stochastic else None
        if operand.stochastic:
            assert torch.equal(noise, noise_gpu.cpu())
        a, b = quantize(x, operand, noise), quantize(x.cuda(), operand, noise_gpu)
        assert torch.equal(a.code, b.code.cpu()) and torch.equal(a.inner, b.inner.cpu())
        assert a.outer is None or torch.equal(a.outer, b.outer.cpu())
        assert torch.equal(a.dequantize(), b.dequantize().cpu())
        assert torch.equal(a.dequantize(), fake_quantize(x.cuda(), operand, noise_gpu).cpu())


def test_rotation_is_that_of_the_cpu():
    """ Catches: a rotation through a matrix product, whose order of additions is the library's business. """
    x = torch.randn(40, 300)
    for n in (16, 32, 128):
        signs = random_signs(n, Counter(3).state, 1, 8)
        assert torch.equal(signs, random_signs(n, Counter(3).state.cuda(), 1, 8).cpu())
        assert torch.equal(hadamard(x, signs), hadamard(x.cuda(), signs.cuda()).cpu())


@pytest.mark.parametrize("backend", ["reference", "emulate"])
@pytest.mark.parametrize("recipe", ["tetrajet_base", "tetrajet_full", "tetrajet_released"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_gradient_equals_the_eager_one(recipe, dtype, backend):
    """
    Catches: a compiler that draws the signs of one GEMM's two operands twice (seen with signs
    from torch.randint: no error, and a gradient off by more than its own size). Bit for bit,
    through torch.compile's full code generator.
    """
    torch.manual_seed(0)
    lin = QuantLinear(192, 160, bias=False, recipe=RECIPES[recipe], counter=Counter(5, device="cuda"),
                      outliers=19 if RECIPES[recipe].outlier else 0, backend=backend).cuda()
    lin.set_channels(torch.arange(0, 190, 10, device="cuda")[: lin.channels.numel()])
    x = torch.randn(3, 96, 192, device="cuda", dtype=dtype)
    dy = torch.randn(3, 96, 160, device="cuda", dtype=dtype)
    results = []
    for f in (lin, torch.compile(lin, fullgraph=True, dynamic=False)):
        lin.zero_grad()
        leaf = x.clone().requires_grad_()
        y = f(leaf)
        y.backward(dy)
        results.append((y.detach(), leaf.grad, lin.weight.grad.clone()))
    for a, b in zip(*results):
        assert torch.equal(a, b) and a.abs().max() > 0


def test_compiled_model_has_no_graph_break_and_the_loss_of_the_eager_one(shards):
    trainer = trainer_of(shards, "--compile=false")
    _, inputs, targets = next(trainer.micro_batches())
    with torch.autocast("cuda", torch.bfloat16):
        eager = float(trainer.model(inputs, targets)[0].detach()) / inputs.numel()
        compiled = float(
            torch.compile(trainer.model, fullgraph=True)(inputs, targets)[0].detach()) / inputs.numel()
    # norms and the softmax are fused differently, in bf16
    assert abs(eager - compiled) < 0.02


def trainer_of(shards, *flags) -> train.Trainer:
    cfg = parse(tiny(shards, "--device=cuda", "--recipe=tetrajet_full", "--osci=full", *WINDOWS, *flags))
    return train.Trainer(cfg, data.open_corpus(str(shards)))


@pytest.mark.parametrize("osci", [osci for osci in CHOICES["osci"] if osci not in ("off", "edge")])
def test_a_step_does_not_wait_for_the_host(shards, osci):
    """ Catches: .item(), a boolean of a tensor, a tensor built from a list, inside the step. """
    early = ["--osci_start=0", "--osci_period=0.8", "--osci_window=0.7"] if osci == "qema" else []
    trainer = trainer_of(shards, "--compile=false", f"--osci={osci}", *early)
    trainer.train_step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(12):        # calibration and an OsciReset window are open from step 8 on
            trainer.train_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("osci", ["topk", "qema", "freeze", "dampen"])
def test_ten_plus_ten_is_twenty_on_a_gpu_too(shards, tmp_path, osci):
    """ Catches: state left on the other device. Without compilation the kernels are the same both times. """
    flags = ["--device=cuda", "--compile=false", "--recipe=tetrajet_full", *WINDOWS, f"--osci={osci}",
             "--osci_start=0.3"]
    # the backward passes of embedding and attention otherwise add in whatever order threads arrive
    torch.use_deterministic_algorithms(True)
    try:
        for name, stops in (("straight", [0]), ("resumed", [10, 0])):
            for stop in stops:
                train.main(tiny(shards, f"--out={tmp_path}", f"--name={name}", f"--stop_at={stop}", *flags))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(learned(last_state(tmp_path / "straight")), learned(last_state(tmp_path / "resumed")))

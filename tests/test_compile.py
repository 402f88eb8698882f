""" What torch.compile makes of a model on any machine; test_cuda.py has what only a GPU can show. """
from functools import partial

import torch
from torch._dynamo.testing import CompileCounterWithBackend

from build import Net, build, compile_parts, only
from config import parse


def gradients(net: Net) -> list[torch.Tensor]:
    """ Loss and gradients of some tokens. """
    ids = torch.arange(16).view(2, 8)
    net.model.zero_grad()
    loss = net.model(ids, ids)[0]
    loss.backward()
    return [loss.detach(), *(p.grad for p in net.model.parameters())]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """ But for sums in another order, in which PyTorch 2.7 writes them out. """
    return all((x - y).abs().max() <= 1e-5 * x.abs().max() for x, y in zip(a, b))


def test_blocks_are_compiled_once_for_all(monkeypatch):
    """
    Catches: a compilation for each block, of which PyTorch makes a few and leaves the other blocks as they
    are; noise that is another block's, as the number of a layer is no longer a constant; a loss or a gradient
    that compilation changes.
    """
    plain, frames = torch.compile, []
    for n_layer in (2, 5):
        torch._dynamo.reset()
        seen = CompileCounterWithBackend("aot_eager")
        monkeypatch.setattr(torch, "compile", partial(plain, backend=seen))
        cfg = parse(["--recipe=tetrajet_base", f"--n_layer={n_layer}", "--d_model=16", "--n_head=1",
                     "--d_ff=24"])
        net = build(cfg, 40, torch.device("cpu"))
        net.counter.set(3)
        expected = gradients(net)
        compile_parts(net.model)
        assert same(expected, gradients(net))
        frames.append(seen.frame_count)
    assert frames[0] == frames[1], frames


def test_the_phases_of_a_run_are_compiled_anew(monkeypatch):
    """
    Catches: a compiled program that goes on when channels are chosen, or when the forward pass is no longer
    rounded.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    cfg = parse(["--recipe=tetrajet_full", "--n_layer=2", "--d_model=16", "--n_head=1", "--d_ff=24"])
    nets = [build(cfg, 40, torch.device("cpu")) for _ in range(2)]
    compile_parts(nets[1].model)
    assert same(*map(gradients, nets))
    for net in nets:
        for layer in net.layers.values():
            layer.set_channels(3 * torch.arange(len(layer.channels)))
    assert same(*map(gradients, nets))
    for net in nets:
        for layer in net.layers.values():
            layer.recipe = only(layer.recipe, [3, 4, 5, 6])
    assert same(*map(gradients, nets))

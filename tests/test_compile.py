""" What torch.compile makes of a model on any machine; test_cuda.py has what only a GPU can show. """
from functools import partial

import torch
from torch._dynamo.testing import CompileCounterWithBackend

from build import build, compile_parts
from config import parse


def test_blocks_are_compiled_once_for_all(monkeypatch):
    """
    Catches: a compilation for each block, of which PyTorch makes a few and leaves the other blocks as they
    are; noise that is another block's, as the number of a layer is no longer a constant; a loss or a gradient
    that compilation changes, by more than sums in another order: PyTorch 2.7 writes them out so.
    """
    plain, frames = torch.compile, []
    for n_layer in (3, 10):
        torch._dynamo.reset()
        seen = CompileCounterWithBackend("aot_eager")
        monkeypatch.setattr(torch, "compile", partial(plain, backend=seen))
        cfg = parse(["--recipe=tetrajet_base", f"--n_layer={n_layer}", "--d_model=16", "--n_head=1",
                     "--d_ff=24"])
        net, ids, results = build(cfg, 40, torch.device("cpu")), torch.arange(16).view(2, 8), []
        net.counter.set(3)
        for compiled in (False, True):
            if compiled:
                compile_parts(net.model)
            net.model.zero_grad()
            loss = net.model(ids, ids)[0]
            loss.backward()
            results.append((loss.detach(), *(p.grad for p in net.model.parameters())))
        assert all((a - b).abs().max() <= 1e-5 * a.abs().max() for a, b in zip(*results))
        frames.append(seen.frame_count)
    assert frames[0] == frames[1], frames

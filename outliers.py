"""
OutControl: keep the input channels with the largest activations in FP8 (TetraJet-v2, arXiv 2510.27527).

A few input channels of a linear are far larger than the rest. In a block of 16 values that share one scale,
such a channel takes the scale for itself and its neighbours round to zero. OutControl measures the channels
once, early in training, and from then on holds the top share of them in MXFP8, in the forward pass and in
dW; in dX all channels are FP4. How the two parts are computed is QuantLinear's business (quant.py); this
file only chooses.

    window    steps start .. start + window - 1;
              the paper opens it at 1% of training and measures for 50 steps
    measure   each step, the L2 norm of every input channel over all tokens of the step;
              norms are summed over steps
    choose    after the last step of the window: the largest `count` channels of each layer,
              for the rest of training

differs from the release: norms are taken over the whole step instead of over each micro-batch, so the
    choice does not depend on how a step is cut into micro-batches or spread over ranks; ties go to the
    lower channel instead of to whatever the sort leaves first; the count is exactly round(share * K)
    instead of the next multiple of 128; the chosen columns are zeroed in place in the FP4 operand instead
    of being sorted out of it.
"""
import torch
import torch.distributed as dist
from torch import Tensor

from quant import QuantLinear


class OutControl:
    """
    Chooses the outlier channels of some linears.

    layers  name -> layer; those with room for outlier channels (layer.channels) take part
    start   first step of the calibration window (optimizer steps from 0)
    window  its length in steps
    """

    def __init__(self, layers: dict[str, QuantLinear], start: int, window: int):
        self.layers = {name: layer for name, layer in layers.items() if layer.channels.numel()}
        self.start, self.window = start, window
        self.norms: dict[str, Tensor] = {}                 # name -> (K,) summed norms, in a window

    def begin_step(self, step: int):
        """ Call before the first micro-step of optimizer step `step`. """
        if not self.start <= step < self.start + self.window:
            return
        for name, layer in self.layers.items():
            layer.sumsq = torch.zeros(layer.in_features, device=layer.weight.device)
            self.norms.setdefault(name, torch.zeros_like(layer.sumsq))

    def after_step(self, step: int) -> dict[str, Tensor] | None:
        """
        Call after the last micro-step. -> name -> chosen channels (C,), ascending, when the window closed.
        """
        if not self.norms or not self.start <= step < self.start + self.window:
            return None
        for name, layer in self.layers.items():
            # each rank has seen its own tokens of the step: sum before the root, and all ranks choose alike
            if dist.is_available() and dist.is_initialized():
                dist.all_reduce(layer.sumsq)
            self.norms[name] += layer.sumsq.sqrt()
            layer.sumsq = None
        if step < self.start + self.window - 1:
            return None
        for name, layer in self.layers.items():
            layer.set_channels(top_channels(self.norms[name], layer.channels.numel()))
        self.norms = {}
        return {name: layer.channels for name, layer in self.layers.items()}

    def state_dict(self) -> dict:
        """
        What an open window has measured so far. The chosen channels themselves are buffers of the model.
        """
        return {"norms": dict(self.norms)}

    def load_state_dict(self, state: dict):
        unknown = set(state["norms"]) ^ set(self.layers) if state["norms"] else set()
        if unknown:
            raise ValueError(
                f"outlier norms of other layers than this model has: {', '.join(sorted(unknown))}")
        self.norms = {name: norms.to(self.layers[name].weight.device)
                      for name, norms in state["norms"].items()}


def top_channels(norms: Tensor, count: int) -> Tensor:
    """ The `count` largest of norms (K,) -> their indices, ascending; among equals the lower index first. """
    return norms.sort(descending=True, stable=True).indices[:count].sort().values

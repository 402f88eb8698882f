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

Two questions about that choice can be asked here. Does it matter which channels are kept? As a control,
choice "random" keeps as many random ones instead, from the same step on. And do the channels that were the
largest once stay so? After each `again` steps the same measurement is made anew, and compared, no more: the
overlap is the share of a layer's channels that would be chosen now too. Random channels have an overlap near
their share of the layer.

differs from the release: norms are taken over the whole step instead of over each micro-batch, so the
    choice does not depend on how a step is cut into micro-batches or spread over ranks; ties go to the
    lower channel instead of to whatever the sort leaves first; the count is exactly round(share * K)
    instead of the next multiple of 128; the chosen columns are zeroed in place in the FP4 operand instead
    of being sorted out of it.
"""
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from quant import CHANNEL_CHOICE, QuantLinear, random_subset

CHOICES = ("norm", "random")


@dataclass
class Measured:
    """ What a window that closed has found: one of the two is empty. """
    chosen: dict[str, Tensor]      # the first window: layer -> its channels (C,) from now on, ascending
    overlap: dict[str, float]      # a later one: layer -> share of its channels that would be chosen now too


class OutControl:
    """
    Chooses the outlier channels of some linears.

    layers  name -> layer; those with room for outlier channels (layer.channels) take part
    start   first step of the calibration window (optimizer steps from 0)
    window  its length in steps
    choice  norm: the largest; random: any
    again   steps from the opening of one window to the next, which only measures; 0: there is no other
    """

    def __init__(self, layers: dict[str, QuantLinear], start: int, window: int, choice: str = "norm",
                 again: int = 0):
        if choice not in CHOICES:
            raise ValueError(f"choice is one of {', '.join(CHOICES)}, not {choice!r}")
        if start < 0 or window < 1 or 0 < again < window:
            raise ValueError("need start >= 0, window >= 1, and again = 0 or >= window, "
                             f"not {start=}, {window=}, {again=}")
        self.layers = {name: layer for name, layer in layers.items() if layer.channels.numel()}
        self.start, self.window, self.choice, self.again = start, window, choice, again
        self.norms: dict[str, Tensor] = {}                 # name -> (K,) summed norms, in a window

    def place(self, step: int) -> int:
        """ Which step of its window this is, from 0; -1 outside windows. """
        since = step - self.start
        since = since % self.again if self.again and since >= 0 else since
        return since if 0 <= since < self.window else -1

    def begin_step(self, step: int):
        """ Call before the first micro-step of optimizer step `step`. """
        if self.place(step) < 0:
            return
        for name, layer in self.layers.items():
            layer.sumsq = torch.zeros(layer.in_features, device=layer.weight.device)
            self.norms.setdefault(name, torch.zeros_like(layer.sumsq))

    def after_step(self, step: int) -> Measured | None:
        """ Call after the last micro-step; what was found when the window closed, else None. """
        if not self.norms or self.place(step) < 0:
            return None
        for name, layer in self.layers.items():
            # each rank has seen its own tokens of the step: sum before the root, and all ranks choose alike
            if dist.is_available() and dist.is_initialized():
                dist.all_reduce(layer.sumsq)
            self.norms[name] += layer.sumsq.sqrt()
            layer.sumsq = None
        if self.place(step) < self.window - 1:
            return None
        found = Measured({}, {})
        for name, layer in self.layers.items():
            C = layer.channels.numel()
            largest = top_channels(self.norms[name], C)
            if step >= self.start + self.window:
                found.overlap[name] = float(torch.isin(layer.channels, largest).sum()) / C
                continue
            if self.choice == "random":
                layer.set_channels(random_subset(layer.in_features, C, layer.counter.at(step), layer.layer,
                                                 CHANNEL_CHOICE))
            else:
                layer.set_channels(largest)
            found.chosen[name] = layer.channels
        self.norms = {}
        return found

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
        self.norms = {}
        for name, norms in state["norms"].items():
            layer = self.layers[name]
            if (norms.dtype, norms.shape, norms.layout) != (torch.float32, (layer.in_features,),
                                                            torch.strided):
                raise ValueError(f"outlier norms of {name} are not float32 ({layer.in_features},)")
            if not (norms >= 0).all():
                raise ValueError(f"outlier norms of {name} are negative or NaN")
            self.norms[name] = norms.to(layer.weight.device, copy=True)


def top_channels(norms: Tensor, count: int) -> Tensor:
    """ The `count` largest of norms (K,) -> their indices, ascending; among equals the lower index first. """
    return norms.sort(descending=True, stable=True).indices[:count].sort().values

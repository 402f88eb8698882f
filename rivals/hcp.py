"""
Hot channels, CHON, arXiv 2602.02047: input channels that are chosen by what rounding takes from them, and
that stay in FP4 with a patch.

    --outlier_choice=error        chooses them, for any recipe that has outlier channels
    --outlier_choice=norm_error   the norms choose, and what `error` would choose is compared with that
    --recipe=hcp                  patches them, whoever chose them

The paper contradicts TetraJet-v2 on which channels matter, and finds that they drift for thousands of steps:
see --outlier_log. Its formulas were at hand here, and not the whole of it: what is not known is said below.

Letters used for shapes: T tokens, K input and N output features, C hot channels.
"""
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

import rivals.recipes    # noqa: F401  nvidia, which hcp patches
from osci import whole
from outliers import CHOICES, OutControl, overlap
from quant import AROUND, Around, QuantLinear, Rounder, gemm
from recipes import RECIPES


def rounded(number: int, t: Tensor, layer: QuantLinear) -> Tensor:
    """ Q1(X) or Q2(W) of a layer all of whose channels are in FP4, float32. """
    return Rounder(layer.recipe, layer.counter.state.to(t.device), layer.layer, torch.float32).q(number, t)


# -----------------------------------------------------------------------------
# the choice


class ByError(OutControl):
    """
    error: the channels that lose most by rounding, by the score

        s_k = mean over tokens of |X - Q1(X)|_k  +  mean over rows of |W - Q2(W)|_k

    The first is over all tokens of the window, the second of the weight at its end. What is added up of a
    layer's input is its buffer channel_errors (2, K): the errors, and beside them how many tokens there were,
    since with recomputation each one is seen twice.

    source  2602.02047: the score
    differs it is taken once, as OutControl does; there channels are chosen anew in the course of training,
            how often is not known here
    """
    COLUMNS = (*OutControl.COLUMNS, "outlier_common", "outlier_common_min")
    OTHER = "norm"      # what the choice is compared with

    def __init__(self, *args):
        super().__init__(*args)
        for layer in self.layers.values():
            layer.register_buffer("channel_errors", None)
            layer.errors, layer.extra = None, (*layer.extra, "errors")

    def before_step(self, step: int):
        super().before_step(step)
        for layer in self.layers.values() if self.place(step) >= 0 else ():
            layer.errors = torch.zeros(2, layer.in_features, device=layer.weight.device)
            if self.place(step) == 0:
                layer.channel_errors = torch.zeros_like(layer.errors)

    def after_step(self, step: int) -> tuple[str, dict]:
        for layer in self.layers.values() if self.place(step) >= 0 else ():
            if dist.is_available() and dist.is_initialized():
                dist.all_reduce(layer.errors)
            layer.channel_errors += layer.errors
            layer.errors = None
        self.found = {}
        line, columns = super().after_step(step)
        if not line:
            return "", {}
        for layer in self.layers.values():
            layer.channel_errors = None
        one, other = ({name: self.found[layer][i] for name, layer in self.layers.items()} for i in (0, 1))
        words, shares = overlap(one, other, f"by {self.OTHER}")
        return f"{line}; of a layer's chosen ones, {words}", columns | dict(zip(self.COLUMNS[2:], shares))

    def choose(self, norms: Tensor, layer: QuantLinear, step: int) -> Tensor:
        w = whole(layer.weight.detach()).float()
        errors, tokens = layer.channel_errors
        score = errors / tokens + (w - rounded(2, w, layer)).abs().mean(0)
        self.found[layer] = [super(ByError, self).choose(sizes, layer, step) for sizes in (score, norms)]
        return self.found[layer][0]


class ByNorm(ByError):
    """ norm_error: as norm; but the errors are measured too, and the choices compared. """
    OTHER = "error"

    def choose(self, norms: Tensor, layer: QuantLinear, step: int) -> Tensor:
        super().choose(norms, layer, step)
        self.found[layer].reverse()
        return self.found[layer][0]


def measured(x: Tensor, w: Tensor, linear, layer: QuantLinear) -> Tensor:
    """ Around a linear that ByError looks at: measures what Q1 takes from X, and changes nothing. """
    if layer.training and layer.errors is not None:
        add_errors(x.detach(), layer)
    return linear(x, w)


@torch.compiler.disable     # as the reference: each operation is rounded to float32 once
def add_errors(x: Tensor, layer: QuantLinear):
    layer.errors[0] += (x.float() - rounded(1, x, layer)).abs().sum(0)
    layer.errors[1] += len(x)


CHOICES["error"], CHOICES["norm_error"] = ByError, ByNorm
AROUND["errors"] = Around(measured)

# -----------------------------------------------------------------------------
# the patch


def patched(x: Tensor, w: Tensor, linear, layer: QuantLinear) -> Tensor:
    """
    Y = Q1(X) Q2(W)^T + dX_I Q2(W)_I^T + Q1(X)_I dW_I^T, with dX = X - Q1(X), dW = W - Q2(W) and I the hot
    channels. Of their part of X W^T nothing is missing then but dX_I dW_I^T.

    source  2602.02047: the terms of first order, appended to K, [Q1(X) dX_I Q1(X)_I] [Q2(W) Q2(W)_I dW_I]^T
    differs they are a product of their own, in the compute dtype, and added to that of FP4; whether the paper
            rounds the residuals is not known here
            the gradient is straight-through, that of the linear without its patch; whether the paper patches
            the products of the backward pass too is not known here
    """
    y = linear(x, w)
    if layer.recipe.outlier != "patched" or layer.channels.numel() == 0:
        return y
    return y + patch(x.detach(), w.detach(), layer).to(y.dtype)


@torch.compiler.disable
def patch(x: Tensor, w: Tensor, layer: QuantLinear) -> Tensor:
    """ What is added to y (T, N); zeros until channels are chosen, which only the device knows. """
    hot, chosen = layer.channels.clamp(min=0), layer.channels >= 0
    (x4, dx), (w4, dw) = (
        (q, (t[:, hot].float() - q) * chosen)
        for t, q in ((x, rounded(1, x, layer)[:, hot]), (w, rounded(2, w, layer)[:, hot])))
    return gemm(torch.cat((dx, x4), 1).to(x.dtype), torch.cat((w4, dw), 1).to(x.dtype))


AROUND["patch"] = Around(patched, forward=True)
# 2602.02047. differs: that NVIDIA's recipe lies below it is a guess; CHON also keeps the projections after QK
# in bf16, which is up to --keep here
RECIPES["hcp"] = replace(RECIPES["nvidia"], outlier="patched", around=("patch",))

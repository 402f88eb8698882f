"""
The earlier remedies against oscillating weights, to compare OsciReset (osci.py) with: Q-EMA, Freeze, Dampen.

All three know what oscillation is, a weight whose rounded value jumps from side to side of a threshold, and
each stops it in another place:

    qema    in the forward pass. The weight moves on freely, but which of its two neighbours it rounds to is
            decided by a slow average of it, which does not tremble
    freeze  in the weight. What has turned back too often is put on one grid value and stays there
    dampen  in the loss. A penalty draws each weight towards the grid value that it rounds to

They were made for other formats: the first for MXFP4, the other two for integers whose scale is learned.
Here a block's scale is made from its largest weight at every step, so "the integer" becomes the code, its
place among the grid values, and "the range" becomes the outermost grid values times the scale. One thing that
a fixed scale allows is impossible: the weight that holds the scale, the largest of its block, cannot be
rounded to less than what it holds the scale with. Wherever a remedy wants that, or anything else that would
move a scale, it is refused and counted, as a reset in osci.py is.

All act from step `start` on, after the update of each step, at a cost in every step. OsciReset starts late in
training, and so do these by default, as if what came before were the training of a model that is then trained
on in low precision. TetraJet v1 averages from the first step: that is start = 1, by --osci_start=0.

What oscillates is measured as OsciReset measures it, in the same windows, by its mode watch: so flips,
reversals and what OsciReset would have found can be compared between all of them.

What this file leaves out: OsciReset, and its controls that reset other weights (osci.py).

Letters used for shapes: N, K output and input features of a layer.
"""
import math

import torch
from torch import Tensor

from osci import OsciReset, Report, full_scale, level, max_in_block, rounded_weight, safe_to_write
from quant import (E2M1, E8M0_SMALLEST, Quantized, QuantLinear, encode, grid_value, own_rows, round_to_grid)


def cosine(first: float, last: float, progress: float) -> float:
    """ From first at progress 0 to last at progress 1, along half a cosine. """
    return last + (first - last) * (1 + math.cos(math.pi * progress)) / 2


class Remedy:
    """
    What the three have in common: when they act, what they report and what a checkpoint holds of them.

    layers  name -> QuantLinear; each must round its weight to FP4 (Q2), to nearest
    start   the first optimizer step after which the remedy acts; it stays until the end
    period, window, tau  as in OsciReset: when and how oscillation is measured. tau resets nothing here

    Each has a method act(layer, kept, step): what it does to one layer after a step; -> fields of the layer's
    Report, as tensors () on the device. `kept` is what it keeps of the layer: empty at first, then KEPT.

    The training loop calls after_step(step) after each optimizer step. It waits for the device only where a
    report is made, at the last step of a window.
    """
    KEPT: dict[str, torch.dtype] = {}    # what is kept of each weight from step to step: name -> type

    def __init__(self, layers: dict[str, QuantLinear], start: int, period: int, window: int,
                 tau: float = 8.0):
        self.watch = OsciReset(layers, "watch", start, period, window, tau)
        self.layers, self.start = self.watch.layers, start
        self.kept: dict[str, dict[str, Tensor]] = {}       # layer -> name -> (N, K)

    @torch.no_grad()
    def after_step(self, step: int) -> Report | None:
        """ Call it after optimizer step number `step` (from 0) was applied; a Report when a window ends. """
        if step < self.start:
            return None
        seen = {name: self.act(layer, self.kept.setdefault(name, {}), step)
                for name, layer in self.layers.items()}
        report = self.watch.after_step(step)
        if report is None:
            return None
        for name, of_layer in report.layers.items():
            vars(of_layer).update({key: value.item() for key, value in seen[name].items()})
        return Report.total(report.layers)

    def state_bytes(self) -> int:
        """ Memory of everything kept at this moment, in bytes, without the stand-ins of qema. """
        tensors = [t for kept in self.kept.values() for t in kept.values()]
        return self.watch.state_bytes() + sum(t.numel() * t.element_size() for t in tensors)

    def state_dict(self) -> dict:
        """ That of the open window, and what is kept: tensors that are not copied, as in a module's. """
        return self.watch.state_dict() | {"kept": {name: dict(kept) for name, kept in self.kept.items()}}

    def load_state_dict(self, state: dict):
        """ Continue where the state was saved. The weights must have been loaded before. """
        self.watch.load_state_dict(state)
        self.kept = self.kept_in(state, self.layers) if state["kept"] else {}

    @classmethod
    def kept_in(cls, state: dict, layers: dict[str, QuantLinear]) -> dict[str, dict[str, Tensor]]:
        """ What the state has kept of each of these layers, on its device. ValueError if it does not fit. """
        all_kept = {}
        for name, layer in layers.items():
            kept = state["kept"][name]
            if {key: (t.dtype, t.shape) for key, t in kept.items()} != {
                    key: (dtype, own_rows(layer.weight).shape) for key, dtype in cls.KEPT.items()}:
                raise ValueError(f"what {cls.__name__} has kept of {name} does not fit the layer")
            all_kept[name] = {key: t.to(layer.weight.device, copy=True) for key, t in kept.items()}
        return all_kept


# -----------------------------------------------------------------------------
# Q-EMA


def ema_code(w: Tensor, mean: Tensor, q: Quantized) -> Tensor:
    """
    What Q-EMA rounds w to, at the scales of q: codes (N, K), uint8.

    Of the two grid values around w, the one that is nearer to mean; half-way between them, the even code.
    That is mean, moved into the interval between the two, rounded to nearest.
    """
    scale = full_scale(q)
    inv_scale = torch.where(scale > E8M0_SMALLEST, 1.0 / scale, 0.0)
    y = w.abs() * inv_scale
    low, high = round_to_grid(y, E2M1, noise=torch.zeros_like(y)), round_to_grid(y, E2M1, up=True)
    # along the sign of w: a mean on the other side of zero is below the lower neighbour
    y_mean = torch.where(w.signbit(), -mean, mean) * inv_scale
    value = round_to_grid(torch.minimum(torch.maximum(y_mean, low), high), E2M1)
    # a NaN has a NaN for a scale: any code will do, and quantize() has chosen one
    code = encode(value.nan_to_num(0.0), E2M1) | w.signbit().to(torch.uint8) << 3
    return torch.where(value.isnan(), q.code, code)


def stand_in(w: Tensor, q: Quantized, code: Tensor) -> tuple[Tensor, Tensor]:
    """
    A weight that Q2 rounds to these codes, at the very scales of w -> it, (N, K); where it differs from w.

    in    w     (N, K) float32
          q     its rounding to nearest
          code  (N, K), each at most one place from q's: those of ema_code()

    It is w where the codes agree already, and else the grid value, which is far from every threshold. A code
    is refused, and stays that of q, in the largest weight of a block if it is lower than q's: the block would
    lose its scale; and where safe_to_write() finds that another code or a scale would move.
    """
    rows, columns = q.operand.block
    mag, differs = w.abs(), code != q.code
    largest = max_in_block(mag, rows, columns)
    differs &= ~((mag == largest) & (code < q.code))
    value = grid_value(code & 7, q.operand) * full_scale(q)
    # 6 may lie beyond the largest weight of the block, which itself rounds to 6: then that one's magnitude
    # will do, and nothing that a scale is made from becomes larger
    value = torch.where(max_in_block(q.code & 7, rows, columns) == 7, torch.minimum(value, largest), value)
    new = value.copysign(w)
    differs = safe_to_write(w, q, new, code, differs)
    return torch.where(differs, new, w), differs


class QEma(Remedy):
    """
    Q-EMA: the forward pass rounds each weight to the neighbour that its average is nearer to.

    decay   mean <- decay * mean + (1 - decay) * w after each step, from w as it was after step `start`
    warmup  steps that only average, before the forward pass follows

    Only Q2 is changed: the gradient goes to the weight, at the value that the forward pass rounded to, as it
    always does. It costs 8 bytes for each weight, and a rounding or three in each step.

    source  TetraJet v1, arXiv 2502.20853, and its released code: decay .9983, warmup 10
    differs the scale is NVFP4's; there, MXFP4's, whose largest value too may round down: here it cannot, see
            stand_in()
            half-way between the neighbours, the even code
    """
    KEPT = {"mean": torch.float32}

    def __init__(self, layers: dict[str, QuantLinear], start: int, period: int, window: int, tau: float = 8.0,
                 decay: float = 0.9983, warmup: int = 10):
        if not 0 <= decay < 1 or warmup < 0:
            raise ValueError(f"need 0 <= decay < 1 and warmup >= 0, not {decay=}, {warmup=}")
        super().__init__(layers, start, period, window, tau)
        self.decay, self.warmup = decay, warmup

    def act(self, layer: QuantLinear, kept: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        if not kept:
            kept["mean"] = layer.weight.detach().float().clone()
        else:
            kept["mean"] += (layer.weight - kept["mean"]) * (1 - self.decay)
        return self.follow(layer, kept["mean"]) if step >= self.start + self.warmup else {}

    @staticmethod
    def follow(layer: QuantLinear, mean: Tensor) -> dict[str, Tensor]:
        """ Let the forward pass round as this mean says; -> how often that is not to nearest, or refused. """
        # the weight itself, and not what stood in for it until now
        layer.stand_in, before = None, layer.stand_in
        w, q = rounded_weight(layer)
        code = ema_code(w, mean, q)
        new, differs = stand_in(w, q, code)
        # where nothing is replaced, outlier columns included, the weight itself
        new = torch.where(differs, new, layer.weight.detach())
        # in place: compiled code and CUDA graphs hold the tensor
        layer.stand_in = new if before is None else before.copy_(new)
        held = differs.sum()
        return {"held": held, "refused": (code != q.code).sum() - held}

    def state_dict(self) -> dict:
        following = any(layer.stand_in is not None for layer in self.layers.values())
        return super().state_dict() | {"following": following}

    def load_state_dict(self, state: dict):
        super().load_state_dict(state)
        self.restore(state, self.layers)

    @classmethod
    @torch.no_grad()
    def restore(cls, state: dict, layers: dict[str, QuantLinear]):
        """ Let layers whose weights are loaded round as this state did: all that evaluation needs. """
        kept = cls.kept_in(state, layers) if state["following"] else {}
        for name, layer in layers.items():
            layer.stand_in = None
            if kept:
                cls.follow(layer, kept[name]["mean"])


# -----------------------------------------------------------------------------
# Freeze


class Freeze(Remedy):
    """
    Freeze: a weight that has turned back too often is put on one grid value, and stays there.

    steps      of the whole training: where the threshold has come down
    threshold  there; it falls to it from FIRST along half a cosine, so that the worst are frozen first

    After each step, with i the place of a weight's code among the grid values, -7 to 7:

        o = 1 if i changed, in the direction opposite to its last change, else 0
        f <- MOMENTUM * o + (1 - MOMENTUM) * f
        if f > threshold: frozen, at the average of i, rounded
        average <- MOMENTUM * i + (1 - MOMENTUM) * average

    A frozen weight is written back after each step: grid value times the scale that its block has then. So
    it follows the scale, and its code is what is frozen. Adam's moments go on. It costs 12 bytes a weight.

    source  Nagel et al. 2022, "Overcoming oscillations in quantization-aware training", arXiv 2203.11086,
            and its released code: MOMENTUM .01, threshold from .1 to .01 with 4 bits
    differs the scale is made from the weights, there it is learned. Where a block's largest weight is frozen
            below the code that it holds the scale with, or a scale or another code would move, it is not
            written in this step (`refused`); else its block would shrink by a third with each step
            the average is rounded once, as the weight is frozen
    """
    FIRST, MOMENTUM = 0.1, 0.01
    KEPT = {"level": torch.int8, "direction": torch.int8, "often": torch.float32, "mean": torch.float32,
            "frozen": torch.bool, "target": torch.int8}

    def __init__(self, layers: dict[str, QuantLinear], start: int, period: int, window: int, tau: float = 8.0,
                 steps: int = 1000, threshold: float = 0.01):
        if not 0 <= threshold <= 1 or steps <= start:
            raise ValueError(f"need 0 <= threshold <= 1 and steps > start, not {threshold=}, {steps=}")
        super().__init__(layers, start, period, window, tau)
        self.steps, self.threshold = steps, threshold

    def act(self, layer: QuantLinear, kept: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        w, q = rounded_weight(layer)
        now = level(q.code)
        if not kept:
            kept.update({key: torch.zeros(w.shape, dtype=dtype, device=w.device)
                         for key, dtype in self.KEPT.items()})
            kept["level"].copy_(now), kept["mean"].copy_(now)
        else:
            progress = (step - self.start) / max(1, self.steps - 1 - self.start)
            self.track(kept, now, cosine(self.FIRST, self.threshold, min(1.0, progress)))
        written = self.hold(layer, w, q, kept)
        frozen = kept["frozen"].sum()
        return {"held": frozen, "refused": frozen - written.sum()}

    def track(self, kept: dict[str, Tensor], now: Tensor, threshold: float):
        """ Take in the levels after one more step, and freeze. """
        now = torch.where(kept["frozen"], kept["target"], now)
        turn = (now - kept["level"]).sign()
        turned_back = turn * kept["direction"] == -1
        kept["often"].mul_(1 - self.MOMENTUM).add_(turned_back * self.MOMENTUM)
        kept["direction"] = torch.where(turn != 0, turn, kept["direction"])
        new = ~kept["frozen"] & (kept["often"] > threshold)
        kept["target"] = torch.where(new, kept["mean"].round().to(torch.int8), kept["target"])
        kept["frozen"] |= new
        kept["mean"].mul_(1 - self.MOMENTUM).add_(now * self.MOMENTUM)
        kept["level"] = torch.where(kept["frozen"], kept["target"], now)

    @staticmethod
    def hold(layer: QuantLinear, w: Tensor, q: Quantized, kept: dict[str, Tensor]) -> Tensor:
        """ Write the frozen weights; -> mask (N, K) of those that were written. """
        target = kept["target"]
        code = target.abs().to(torch.uint8) | (target < 0).to(torch.uint8) << 3
        mag = w.abs()
        holds_scale = mag == max_in_block(mag, *q.operand.block)
        mask = kept["frozen"] & ~(holds_scale & (code != q.code))
        if layer.split:
            mask = mask.index_fill(1, layer.channels, False)
        weight = own_rows(layer.weight)
        new = (grid_value(code, q.operand) * full_scale(q)).to(weight.dtype)
        mask = safe_to_write(w, q, new.float(), code, mask)
        weight.copy_(torch.where(mask, new, weight))
        return mask


# -----------------------------------------------------------------------------
# Dampen


class Dampen(Remedy):
    """
    Dampen: a penalty that draws each weight towards the grid value that it rounds to.

        loss += strength * sum over layers and weights of (stopgrad(Q(w)) - clip(w, -6 scale, 6 scale))^2

    steps     of the whole training: where the strength has come up
    strength  there; it rises to it from 0 along half a cosine, beginning at `start`

    No loss is computed: the training loop calls add_gradient(step) when the gradient of the step is whole and
    before it is clipped, and what the penalty would have added to it is added. It keeps nothing.

    source  Nagel et al. 2022, arXiv 2203.11086, and its released code, which sums as written above
    differs scale and range come from the weights of the moment and have no gradient; there they are learned
    """

    def __init__(self, layers: dict[str, QuantLinear], start: int, period: int, window: int, tau: float = 8.0,
                 steps: int = 1000, strength: float = 0.1):
        if not strength > 0 or steps <= start:
            raise ValueError(f"need strength > 0 and steps > start, not {strength=}, {steps=}")
        super().__init__(layers, start, period, window, tau)
        self.steps, self.strength = steps, strength

    @staticmethod
    def distance(layer: QuantLinear) -> Tensor:
        """ clip(w) - Q(w), (N, K): 0 where w is clipped, as Q(w) is the bound there; outlier columns 0. """
        w, q = rounded_weight(layer)
        bound = E2M1.max * full_scale(q)
        return w.clamp(-bound, bound) - q.dequantize()

    @torch.no_grad()
    def add_gradient(self, step: int):
        """ Add the penalty's gradient at optimizer step `step`: 2 strength (clip(w) - Q(w)). """
        if step < self.start:
            return
        progress = min(1.0, (step - self.start) / max(1, self.steps - 1 - self.start))
        strength = cosine(0.0, self.strength, progress)
        for layer in self.layers.values():
            own_rows(layer.weight.grad).add_(self.distance(layer) * (2 * strength))

    def act(self, layer: QuantLinear, kept: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        return {"penalty": self.distance(layer).square().sum()}

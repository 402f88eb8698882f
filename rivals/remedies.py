"""
What else is done about oscillating weights, to compare OsciReset (osci.py) with. Each is a name for --osci.

Three earlier remedies know what oscillation is, a weight whose rounded value jumps from side to side of a
threshold, and each stops it in another place:

    qema    in the forward pass. The weight moves on freely, but which of its two neighbours it rounds to is
            decided by a slow average of it, which does not tremble
    freeze  in the weight. What has turned back too often is put on one grid number and stays there
    dampen  in the loss. A penalty draws each weight towards the grid number that it rounds to

They were made for other formats: the first for MXFP4, the other two for integers whose scale is learned.
Here a block's scale is made from its largest weight at every step, so "the integer" becomes the code, its
place in the grid, and "the range" becomes the outermost grid numbers times the scale. One thing that
a fixed scale allows is impossible: the weight that holds the scale, the largest of its block, cannot be
rounded to less than what it holds the scale with. Wherever a remedy wants that, or anything else that would
move a scale, it is refused and counted, as a reset in osci.py is.

All three act from step `start` on, after the update of each step, at a cost in every step. OsciReset starts
late in training, and so do these by default, as if what came before were the training of a model that is then
trained on in low precision. TetraJet v1 averages from the first step: that is start = 1, by --osci_start=0.

Four controls are OsciReset with one thing changed:

    watch            resets nothing, and tells what OsciReset would have reset. The three above measure
                     oscillation by it, so flips and reversals can be compared between all of them
    random, nearest  reset as many weights of each layer as OsciReset would, but others: random ones, or those
                     nearest to a threshold. If OsciReset lowers the loss and these do so too, its choice is
                     not what helps
    edge             tracks nothing, and resets what lies close to a threshold when a window ends

And one of OutControl (outliers.py): --outlier_choice=random keeps as many random channels.

Letters used for shapes: N, K output and input features of a layer.
"""
import math

import torch
from torch import Tensor

from codes import E2M1, Quantized, encode, grid_number
from config import need
from noise import random_words
from osci import (NEAR, REMEDIES, OsciReset, dealt, distance, full_scale, level, max_in_block, reset,
                  rounded_weight, safe_to_write, whole, write)
from outliers import CHOICES, OutControl
from quant import AROUND, Around, QuantLinear, round_to_grid

# -----------------------------------------------------------------------------
# what the three remedies and the controls have in common


class Watch(OsciReset):
    """ watch: tracks every weight, and resets none. """
    COLUMNS = (*OsciReset.COLUMNS, "osci_found")
    KNOBS = tuple(knob for knob in OsciReset.KNOBS if knob != "osci_track")
    SAYS = "OsciReset would have put {found:,} weights back on their grid numbers"

    def __init__(self, layers: dict[str, QuantLinear], cfg):
        super().__init__(layers, cfg)
        self.track = 1

    def choose(self, layer: QuantLinear, found: Tensor, near: Tensor, step: int) -> Tensor:
        return torch.zeros_like(found)


class EveryStep(Watch):
    """
    A remedy that acts after every step, from step `start` to the last one, and is watched meanwhile.

    BUFFERS  what it keeps of each layer from step to step: buffers of the layer, None before `start`
    """
    BUFFERS: tuple[str, ...] = ()

    def __init__(self, layers: dict[str, QuantLinear], cfg):
        super().__init__(layers, cfg)
        self.steps = cfg.steps
        for layer in layers.values():
            for name in self.BUFFERS:
                layer.register_buffer(name, None)

    def act(self, layer: QuantLinear, step: int) -> dict[str, Tensor]:
        """ What is done to one layer after a step -> numbers for the report, on the device. """
        raise NotImplementedError

    @torch.no_grad()
    def after_step(self, step: int) -> tuple[str, dict]:
        if step < self.start:
            return "", {}
        self.seen = {layer: self.act(layer, step) for layer in self.layers.values()}
        return super().after_step(step)

    def close(self, layer: QuantLinear, w: Tensor, q: Quantized, step: int) -> dict[str, Tensor]:
        same = (layer.osci_channels == layer.channels).all()
        return super().close(layer, w, q, step) | {name: x * same for name, x in self.seen[layer].items()}

    def between(self, first: float, last: float, step: int) -> float:
        """ From first at `start` to last at the end of training, along half a cosine. """
        progress = min(1.0, (step - self.start) / max(1, self.steps - 1 - self.start))
        return last + (first - last) * (1 + math.cos(math.pi * progress)) / 2


# -----------------------------------------------------------------------------
# Q-EMA

EMA_WARMUP = 10     # steps that only average, before the forward pass follows: TetraJet v1's value


class QEma(EveryStep):
    """
    Q-EMA: the forward pass rounds each weight to the neighbour that its average is nearer to.

        average <- decay * average + (1 - decay) * w      after each step, from w as it was after step `start`

    Q2 itself stays what it is. The forward pass gives it another matrix in the place of the weight, the
    stand-in: it is the weight, but where the average decides for the other neighbour it is that grid number.
    The gradient goes to the weight, at the value that the forward pass rounded to, as it always does. It
    costs 8 bytes for each weight, and a rounding or three in each step.

    source  TetraJet v1, arXiv 2502.20853, and its released code: decay .9983, EMA_WARMUP 10
    differs the scale is NVFP4's; there, MXFP4's, whose largest value too may round down: here it cannot, see
            stand_in()
            half-way between the neighbours, the even code
    """
    COLUMNS, KNOBS = (*Watch.COLUMNS, "osci_held"), (*Watch.KNOBS, "osci_decay")
    BUFFERS = ("qema_mean", "qema_stand_in")
    SAYS = ("Q-EMA rounds {held:,} weights ({held_share:.2%}) to the neighbour that is farther, and not "
            "{refused:,} more, for a scale's sake")

    def __init__(self, layers: dict[str, QuantLinear], cfg):
        super().__init__(layers, cfg)
        self.decay = cfg.osci_decay
        need(self.start + EMA_WARMUP + 1 < cfg.steps,
             f"osci_start and a warm-up of {EMA_WARMUP} ({self.start} + {EMA_WARMUP} steps) leave no step of "
             f"{cfg.steps}: type a smaller --osci_start")
        for layer in layers.values():
            layer.extra = (*layer.extra, "qema")

    def act(self, layer: QuantLinear, step: int) -> dict[str, Tensor]:
        w = whole(layer.weight.detach()).float()
        if layer.qema_mean is None:
            layer.qema_mean = w.clone()
        else:
            layer.qema_mean += (w - layer.qema_mean) * (1 - self.decay)
        if step < self.start + EMA_WARMUP:
            return dict.fromkeys(("held", "refused"), w.new_zeros(()))
        return follow(layer)

    def rounded(self, layer: QuantLinear) -> tuple[Tensor, Quantized]:
        """ The weight itself, and what the forward pass rounds the stand-in to. """
        w, q = rounded_weight(layer)
        return w, q if layer.qema_stand_in is None else rounded_weight(layer, layer.qema_stand_in)[1]


def follow(layer: QuantLinear) -> dict[str, Tensor]:
    """ Let the forward pass round as the average says -> how often that is not to nearest, or is refused. """
    w, q = rounded_weight(layer)
    code = ema_code(w, layer.qema_mean, q)
    new, differs = stand_in(w, q, code)
    # where nothing is replaced, outlier columns included, the weight itself
    new = torch.where(differs, new, whole(layer.weight.detach()))
    if layer.qema_stand_in is None:
        layer.qema_stand_in = new
    else:
        # in place: compiled code and CUDA graphs hold the tensor
        layer.qema_stand_in.copy_(new)
    held = differs.sum()
    return {"held": held, "refused": (code != q.code).sum() - held}


def ema_code(w: Tensor, mean: Tensor, q: Quantized) -> Tensor:
    """
    What Q-EMA rounds w to, at the scales of q: codes (N, K), uint8.

    Of the two grid numbers around w, the one that is nearer to mean; half-way between them, the even code.
    That is mean, moved into the interval between the two, rounded to nearest.
    """
    scale = full_scale(q)
    inv_scale = torch.where(scale > 2.0**-127, 1.0 / scale, 0.0)
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

    It is w where the codes agree already, and else the grid number, which is far from every threshold. A code
    is refused, and stays that of q, in the largest weight of a block if it is lower than q's: the block would
    lose its scale; and where safe_to_write() finds that another code or a scale would move.
    """
    rows, columns = q.operand.block
    mag, differs = w.abs(), code != q.code
    largest = max_in_block(mag, rows, columns)
    differs &= ~((mag == largest) & (code < q.code))
    value = grid_number(code & 7, q.operand) * full_scale(q)
    # 6 may lie beyond the largest weight of the block, which itself rounds to 6: then that one's magnitude
    # will do, and nothing that a scale is made from becomes larger
    value = torch.where(max_in_block(q.code & 7, rows, columns) == 7, torch.minimum(value, largest), value)
    new = value.copysign(w)
    differs = safe_to_write(w, q, new, code, differs)
    return torch.where(differs, new, w), differs


class InPlaceOf(torch.autograd.Function):
    """ The stand-in, where the forward pass asks for the weight; the gradient goes to the weight. """

    @staticmethod
    def forward(ctx, w: Tensor, stand_in: Tensor) -> Tensor:
        return stand_in.view_as(stand_in)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


def around_stand_in(x: Tensor, w: Tensor, linear, layer: QuantLinear) -> Tensor:
    """ The linear with the stand-in for W, once there is one. """
    return linear(x, w if layer.qema_stand_in is None else InPlaceOf.apply(w, layer.qema_stand_in))


AROUND["qema"] = Around(around_stand_in, changes_w=True)
REMEDIES["qema"] = QEma

# -----------------------------------------------------------------------------
# Freeze


class Freeze(EveryStep):
    """
    Freeze: a weight that has turned back too often is put on one grid number, and stays there.

    After each step, with i the place of a weight's code among the grid numbers, -7 to 7:

        o = 1 if i changed, in the direction opposite to its last change, else 0
        often <- MOMENTUM * o + (1 - MOMENTUM) * often
        if often > threshold: frozen, at the average of i, rounded
        average <- MOMENTUM * i + (1 - MOMENTUM) * average

    The threshold falls from FIRST to --osci_threshold at the end of training, so that the worst are frozen
    first. A frozen weight is written back after each step: grid number times the scale that its block has
    then. So it follows the scale, and its code is what is frozen. Adam's moments go on. It costs 12 bytes a
    weight.

    source  Nagel et al. 2022, "Overcoming oscillations in quantization-aware training", arXiv 2203.11086,
            and its released code: MOMENTUM .01, threshold from .1 to .01 with 4 bits
    differs the scale is made from the weights, there it is learned. Where a block's largest weight is frozen
            below the code that it holds the scale with, or a scale or another code would move, it is not
            written in this step (`refused`); else its block would shrink by a third with each step
            the average is rounded once, as the weight is frozen
    """
    COLUMNS, KNOBS = (*Watch.COLUMNS, "osci_held"), (*Watch.KNOBS, "osci_threshold")
    FIRST, MOMENTUM = 0.1, 0.01
    KEPT = {"freeze_level": torch.int8, "freeze_direction": torch.int8, "freeze_often": torch.float32,
            "freeze_mean": torch.float32, "freeze_frozen": torch.bool, "freeze_target": torch.int8}
    BUFFERS = tuple(KEPT)
    SAYS = ("Freeze holds {held:,} weights ({held_share:.2%}), but {refused:,} not in this step, for a "
            "scale's sake")

    def __init__(self, layers: dict[str, QuantLinear], cfg):
        super().__init__(layers, cfg)
        self.threshold = cfg.osci_threshold

    def act(self, layer: QuantLinear, step: int) -> dict[str, Tensor]:
        w, q = self.rounded(layer)
        now = level(q.code)
        if layer.freeze_level is None:
            for name, dtype in self.KEPT.items():
                setattr(layer, name, torch.zeros(w.shape, dtype=dtype, device=w.device))
            layer.freeze_level.copy_(now)
            layer.freeze_mean.copy_(now)
        else:
            self.follow(layer, now, self.between(self.FIRST, self.threshold, step))
        written = self.hold(layer, w, q)
        frozen = layer.freeze_frozen.sum()
        return {"held": frozen, "refused": frozen - written.sum()}

    def follow(self, layer: QuantLinear, now: Tensor, threshold: float):
        """ Take in the levels (N, K) after one more step, and freeze. """
        frozen, target = layer.freeze_frozen, layer.freeze_target
        now = torch.where(frozen, target, now)
        turn = (now - layer.freeze_level).sign()
        turned_back = turn * layer.freeze_direction == -1
        layer.freeze_often.mul_(1 - self.MOMENTUM).add_(turned_back * self.MOMENTUM)
        layer.freeze_direction.copy_(torch.where(turn != 0, turn, layer.freeze_direction))
        new = ~frozen & (layer.freeze_often > threshold)
        target.copy_(torch.where(new, layer.freeze_mean.round().to(torch.int8), target))
        frozen |= new
        layer.freeze_mean.mul_(1 - self.MOMENTUM).add_(now * self.MOMENTUM)
        layer.freeze_level.copy_(torch.where(frozen, target, now))

    @staticmethod
    def hold(layer: QuantLinear, w: Tensor, q: Quantized) -> Tensor:
        """ Write the frozen weights -> mask (N, K) of those that were written. """
        target = layer.freeze_target
        code = target.abs().to(torch.uint8) | (target < 0).to(torch.uint8) << 3
        mag = w.abs()
        holds_scale = mag == max_in_block(mag, *q.operand.block)
        mask = layer.freeze_frozen & ~(holds_scale & (code != q.code))
        if layer.split:
            mask = mask.index_fill(1, layer.channels, False)
        return write(layer, w, q, grid_number(code, q.operand) * full_scale(q), code, mask)


REMEDIES["freeze"] = Freeze

# -----------------------------------------------------------------------------
# Dampen


class Dampen(EveryStep):
    """
    Dampen: a penalty that draws each weight towards the grid number that it rounds to.

        loss += strength * sum over layers and weights of (stopgrad(Q(w)) - clip(w, -6 scale, 6 scale))^2

    The strength rises from 0 at step `start` to --osci_strength at the end of training. No loss is computed:
    what the penalty would have added to the gradient is added to it, before it is clipped. Nothing is kept.

    source  Nagel et al. 2022, arXiv 2203.11086, and its released code, which sums as written above
    differs scale and range come from the weights of the moment and have no gradient; there they are learned
    """
    COLUMNS, KNOBS = (*Watch.COLUMNS, "osci_penalty"), (*Watch.KNOBS, "osci_strength")
    SAYS = "Dampen's sum of squared distances to the grid is {penalty:.4g}"

    def __init__(self, layers: dict[str, QuantLinear], cfg):
        super().__init__(layers, cfg)
        self.strength = cfg.osci_strength

    @torch.no_grad()
    def before_clip(self, step: int):
        """ Add the gradient of the penalty: 2 strength (clip(w) - Q(w)). """
        if step < self.start:
            return
        strength = self.between(0.0, self.strength, step)
        for layer in self.layers.values():
            grad = layer.weight.grad
            grad.add_(dealt(self.beside(layer) * (2 * strength), grad))

    def act(self, layer: QuantLinear, step: int) -> dict[str, Tensor]:
        return {"penalty": self.beside(layer).square().sum()}

    def beside(self, layer: QuantLinear) -> Tensor:
        """ clip(w) - Q(w), (N, K): 0 where w is clipped, as Q(w) is the bound there; outlier columns 0. """
        w, q = self.rounded(layer)
        bound = E2M1.max * full_scale(q)
        return w.clamp(-bound, bound) - q.dequantize()


REMEDIES["dampen"] = Dampen

# -----------------------------------------------------------------------------
# the controls of OsciReset

EDGE = 0.005        # of the gap: edge resets what is closer; the release's "beyond .495 of the width"


class Random(Watch):
    """ random: resets as many weights of a layer as OsciReset would, whichever a draw says. """
    SAYS = OsciReset.SAYS.replace("OsciReset put", "the control put random")

    def choose(self, layer: QuantLinear, found: Tensor, near: Tensor, step: int) -> Tensor:
        ours = torch.ones_like(found)
        if layer.split:
            ours.index_fill_(1, layer.channels, False)
        ours = ours.flatten().nonzero().flatten()
        chosen = ours[random_subset(ours.numel(), int(found.sum()), layer, step, RESET_CHOICE)]
        return torch.zeros_like(found).flatten().index_fill(0, chosen, True).view_as(found)


class Nearest(Watch):
    """ nearest: resets as many weights of a layer as OsciReset would, those nearest to a threshold now. """
    SAYS = OsciReset.SAYS.replace("OsciReset put {reset:,} weights",
                                  "the control put {reset:,} weights nearest to a threshold")

    def choose(self, layer: QuantLinear, found: Tensor, near: Tensor, step: int) -> Tensor:
        # a stable sort, so that ties fall alike on every device
        chosen = near.flatten().sort(stable=True).indices[: int(found.sum())]
        mask = torch.zeros_like(found).flatten().index_fill(0, chosen, True).view_as(found)
        return mask & near.isfinite()


class Edge(OsciReset):
    """ edge: at the last step of a window, resets what lies within EDGE of a threshold. It keeps nothing. """
    COLUMNS = ("osci_reset", "osci_refused", "osci_near_share", "osci_reset_share")
    KNOBS = ("osci_start", "osci_period", "osci_window")
    SAYS = "{reset:,} weights ({reset_share:.2%}) at the edge of a threshold were put on their grid numbers"
    SEEN = ""

    @torch.no_grad()
    def after_step(self, step: int) -> tuple[str, dict]:
        if step < self.start or (step - self.start) % self.period != self.window:
            return "", {}
        return self.report([self.close(layer, *self.rounded(layer), step) for layer in self.layers.values()])

    def close(self, layer: QuantLinear, w: Tensor, q: Quantized, step: int) -> dict[str, Tensor]:
        near = distance(layer, w, q)
        wanted = near < EDGE
        done = reset(layer, w, q, wanted)
        weights = w.shape[0] * (w.shape[1] - (layer.channels.numel() if layer.split else 0))
        none = torch.zeros_like(done.sum())
        return {"weights": none + weights, "near": (near < NEAR).sum(), "reset": done.sum(),
                "refused": wanted.sum() - done.sum(), "scale_changes": none, "scale_steps": none}


REMEDIES["watch"] = Watch
REMEDIES["random"] = Random
REMEDIES["nearest"] = Nearest
REMEDIES["edge"] = Edge

# -----------------------------------------------------------------------------
# the control of OutControl, and random choices

RESET_CHOICE, CHANNEL_CHOICE = 10, 11       # streams of noise: which weights to reset, which channels to keep


class RandomChannels(OutControl):
    """ As many channels as a layer has room for, whichever a draw says. """

    def choose(self, norms: Tensor, layer: QuantLinear, step: int) -> Tensor:
        return random_subset(layer.in_features, layer.channels.numel(), layer, step, CHANNEL_CHOICE)


CHOICES["random"] = RandomChannels


def random_subset(n: int, count: int, layer: QuantLinear, step: int, stream: int) -> Tensor:
    """ `count` different numbers below n, every subset as likely as every other: int64 (count,). """
    at = layer.counter.state.clone()
    at[1].fill_(step)
    at[2:].fill_(0)         # all micro-steps and ranks draw the same
    words = random_words(-(-n // 4), at, layer.layer, stream).flatten()[:n]
    # equal words are told apart by their position, so that the choice is the same on every device
    return (words << 31 | torch.arange(n, device=words.device)).sort().indices[:count]

"""
OsciReset: find the weights that swing across a rounding threshold, and put each back on its grid value.

What oscillation is. The forward pass sees Q(w), which has eight magnitudes, while the optimizer moves w in
far smaller steps. Late in training, a weight whose best value lies between two grid values is pushed up from
the lower one and down from the upper one. It settles at the threshold between the two, and Q(w) keeps jumping
by a whole gap although w hardly moves. The network then trains on a weight that is noise.

How it is found. Over a window of steps, add up how far the weight travelled after rounding and before:

    dist_Q = sum |Q(w_t) - Q(w_t-1)|    dist_M = sum |w_t - w_t-1|    oscillating if dist_Q / dist_M >= tau

A weight that travels far crosses a threshold for each gap that it passes, so its ratio is near 1. One that
rests inside its cell has ratio 0. One that trembles at a threshold earns a whole gap with each tiny step.

What is done. w <- Q(w): the grid value times the current scale, so that w has half a gap to go before it can
flip again. This is not the middle of the numbers that round there, which lies elsewhere where the two
neighbours are not equally far: 2 owns 1.75 to 2.5, and 4 owns 3.5 to 5. The rounded weight stays the same,
so the loss does not jump. Adam's moments stay too: the first one still points where the weight was going.

What to be careful with. The ratio does not prove oscillation. A weight that drifts across one threshold,
once, has dist_Q = gap and dist_M = window * |dw|, so it reaches tau as soon as its steps are below
gap / (window * tau): for 50 steps and tau 8, gap / 400. And Q(w) also moves when the block's scale does,
which one neighbour can cause. So the report of each window counts reversals (a flip against the direction of
the weight's last flip), and tells how many of the weights that it reset had flipped once only, or never.

    source  TetraJet-v2, arXiv 2510.27527, OsciReset, and its released code, thu-ml/TetraJet-v2-NVFP4Training.
            The ratio comes from Q-Ramping in TetraJet v1, arXiv 2502.20853, which slows such weights down
    differs windows are counted from `start`; the release counts from step 0, so its first may open later. We
            reset at the last step of a window; the release one step later, without that step in its sums
            the release's memory-saving branch does not look at the start step and resets from step 0 on
            the release keeps its sums in globals that no checkpoint holds; here they are in state_dict()
            a reset that would move a code or an inner scale is refused: safe_to_write()
            how mode topk picks weights, see nearest_columns(); how edge measures, see threshold_distance()

What this file leaves out: when in a run windows lie (config.py), how weights are rounded (quant.py), and the
earlier remedies that OsciReset is compared with (remedies.py). Its own controls are here, as modes.

Letters used for shapes: N, K output and input features of a layer, n tracked weights in each row.
"""
import math
from dataclasses import dataclass, field, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from quant import (E2M1, E8M0_SMALLEST, RESET_CHOICE, TENSOR, Operand, Quantized, QuantLinear, decode,
                   grid_value, own_rows, quantize, random_subset)

MODES = ("watch", "full", "topk", "edge", "random", "nearest")
NEAR = 0.1       # of the gap: how close to a threshold a weight must be to count as near it in the report
EDGE = 0.005     # of the gap: mode edge resets what is closer; the release's "beyond .495 of the width"

_VALUES = decode(torch.arange(8, dtype=torch.uint8), E2M1).tolist()
# the seven rounding thresholds .25 .75 1.25 1.75 2.5 3.5 5, each with the gap between its two grid values
THRESHOLDS = [((low + high) / 2, high - low) for low, high in zip(_VALUES, _VALUES[1:])]


# -----------------------------------------------------------------------------
# one layer's weight and its rounding


def has_kernel(backend: str, op: Operand) -> bool:
    """ Whether kernels.py rounds a weight to codes, and follows them from step to step. """
    if backend == "reference":
        return False
    from kernels import no_codes
    return no_codes(op) == ""


def rounded_weight(layer: QuantLinear) -> tuple[Tensor, Quantized]:
    """
    The weight, float32 (N, K), outlier columns zero: of it, the rows that this process holds. And what the
    forward pass rounds it to. That is Q2 of the weight itself, unless a remedy has put a stand-in in its
    place, which rounds to other codes.
    """
    w, op = layer.forward_weight().detach().float(), layer.recipe.y_w
    if has_kernel(layer.backend, op):
        from fused import quantized
        q = quantized(w, op)
    else:
        q = quantize(w, op)
    if layer.stand_in is not None:
        w = own_rows(layer.weight).detach().float()
        w = w.index_fill(1, layer.channels, 0.0) if layer.split else w
    return w, q


def level(code: Tensor) -> Tensor:
    """ E2M1 codes -> int8 -7..7, counting grid values from zero: larger is higher, and -0 is 0. """
    magnitude = (code & 7).to(torch.int8)
    return torch.where(code >= 8, -magnitude, magnitude)


def full_scale(q: Quantized) -> Tensor:
    """ Inner times outer scale, for each weight, (N, K). """
    (rows, columns), (N, K) = q.operand.block, q.code.shape
    return q.scale().repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:N, :K]


def code_units(w: Tensor, q: Quantized) -> Tensor:
    """ |w| in units of its grid, (N, K); infinite, so far from every threshold, in a block of zeros. """
    scale = full_scale(q)
    return torch.where(scale > E8M0_SMALLEST, w.abs() * (1.0 / scale), math.inf)


def threshold_distance(y: Tensor, in_gaps: bool = False) -> Tensor:
    """
    Distance of y >= 0, in code units, to the nearest threshold of E2M1; in_gaps as a share of its gap.

    differs from the release, which takes the distance to the grid value over the width of its cell, as if
            it were in the middle. 2 and 4 are not: their upper thresholds score .667, their lower ones .333
    """
    distance = torch.full_like(y, math.inf)
    for threshold, gap in THRESHOLDS:
        distance = torch.minimum(distance, (y - threshold).abs_().div_(gap if in_gaps else 1.0))
    return distance


def nearest_columns(layer: QuantLinear, w: Tensor, q: Quantized, track: float) -> Tensor:
    """
    For each row, the columns of the max(1, int(track K)) weights nearest to a threshold: (N, n) int16 (int32
    if K is too large for it). Never an outlier column.

    differs the release ranks the whole matrix; row by row, a rank that holds some of the rows decides alone
            it ranks by the score above, so that most of its slots go to the upper thresholds of 2 and 4
    """
    K, outliers = w.shape[1], layer.channels.numel() if layer.split else 0
    y = code_units(w, q)
    if outliers:
        y.index_fill_(1, layer.channels, math.inf)
    n = min(max(1, int(track * K)), K - outliers)
    columns = threshold_distance(y).topk(n, dim=1, largest=False, sorted=False).indices
    return columns.to(torch.int16 if K <= torch.iinfo(torch.int16).max else torch.int32)


def max_in_block(x: Tensor, rows: int, columns: int) -> Tensor:
    """ x >= 0 (N, K) -> (N, K): the maximum of its rows x columns block; of bools, whether one is true. """
    N, K = x.shape
    x = F.pad(x, (0, -K % columns, 0, -N % rows))
    blocks = x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return blocks.amax(dim=(1, 3), keepdim=True).expand_as(blocks).flatten(2, 3).flatten(0, 1)[:N, :K]


def safe_to_write(w: Tensor, q: Quantized, new: Tensor, code: Tensor, mask: Tensor) -> Tensor:
    """
    The part of mask in which weights may be set to `new`, so that each of them gets its `code`, while all
    other codes and all inner scales stay as they are in q, to the bit.

    To write a block's maximum moves what its scale is made from. That may move the outer scale by an ulp and,
    where E4M3 is coarse (a subnormal scale, so that the maximum sits on 3 or 4), the inner scale. So the new
    weight is rounded before it is written: a block that would differ keeps all its weights, and where that is
    not enough, so do all blocks that share an outer scale with it.
    """
    op = q.operand
    N, K = w.shape
    rows, columns = op.block
    coupled = (N, K) if op.outer == TENSOR else (rows, op.outer or columns)
    for block in (op.block, coupled):
        after = quantize(torch.where(mask, new, w), op)
        inner = (after.inner != q.inner).repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:N, :K]
        wrong = after.code != torch.where(mask, code, q.code)
        mask = mask & ~max_in_block(wrong | inner, *block)
    return mask


@torch.no_grad()
def reset(layer: QuantLinear, w: Tensor, q: Quantized, mask: Tensor) -> Tensor:
    """ w <- Q(w) where mask is true and safe_to_write() agrees, in place; -> mask (N, K) of these. """
    weight = own_rows(layer.weight)
    new = q.dequantize().to(weight.dtype)
    mask = safe_to_write(w, q, new.float(), q.code, mask)
    weight.copy_(torch.where(mask, new, weight))
    return mask


# -----------------------------------------------------------------------------
# what is remembered while a window is open

# Window.flags, one byte a weight: the code at the last step in bits 0-3, and
_UP = 4           # bit 4: the direction of the last flip
_HISTORY = 5      # bits 5-6: how the weight has flipped since the window opened
_MOVED = 7        # bit 7: whether the weight has moved at all, dist_M > 0
NEVER, ONCE, SAME_WAY, REVERSED = range(4)     # values of the history; SAME_WAY is twice or more


@dataclass
class Window:
    """
    One layer's state. Mode topk tracks the weights in `columns`, mode full all (columns is None, n = K).

    Q(w_t-1) is not kept: its code and the scales of its blocks are. And dist_Q - tau * dist_M takes the place
    of the two sums, since its sign is all that is asked for. So a tracked weight costs 11 bytes (9 in mode
    full), and each weight of the layer another .1 for the scales: .65 per weight of the layer at track = .05.

    Where FSDP has dealt out the rows of a weight, a process has the window of its rows. All that has two
    dimensions is by rows then (scales too, which need blocks within a row); counts are those of these rows.
    """
    columns: Tensor | None     # (N, n) int16 or int32
    w: Tensor                  # (N, n) float32, the weights at the last step
    excess: Tensor             # (N, n) float32, dist_Q - tau * dist_M
    flags: Tensor              # (N, n) uint8, see above
    inner: Tensor              # bytes of the inner scales at the last step, as in Quantized
    outer: Tensor | None       # the outer scales
    channels: Tensor           # the layer's outlier channels when the window opened
    counts: Tensor             # (3,) int64: flips, reversals, changes of an inner scale

    @staticmethod
    def open(layer: QuantLinear, track: float | None) -> "Window":
        """ At the window's first step. track is the share of weights to track, None for all. """
        w, q = rounded_weight(layer)
        columns = None if track is None else nearest_columns(layer, w, q, track)
        window = Window(columns, w.clone(), torch.zeros_like(w), q.code, q.inner, q.outer,
                        layer.channels.clone(), torch.zeros(3, dtype=torch.int64, device=w.device))
        if columns is not None:
            window.w, window.excess, window.flags = (window.take(x) for x in (w, window.excess, q.code))
        return window

    def take(self, x: Tensor) -> Tensor:
        """ The tracked ones of (N, K) -> (N, n). """
        return x if self.columns is None else x.gather(1, self.columns.long())

    def put(self, x: Tensor, K: int) -> Tensor:
        """ bool (N, n) of the tracked ones -> bool (N, K), false elsewhere. """
        return x if self.columns is None else x.new_zeros(x.shape[0], K).scatter_(1, self.columns.long(), x)

    @property
    def history(self) -> Tensor:
        return self.flags >> _HISTORY & 3

    def advance(self, w: Tensor, q: Quantized, tau: float, backend: str = "reference"):
        """ Add one step: the layer's weight is now w, and rounds to q. """
        changed = (q.inner != self.inner).sum()
        if has_kernel(backend, q.operand):
            from kernels import track
            track(w, q.code, q.inner, q.outer, self.inner, self.outer, self.columns, self.w, self.excess,
                  self.flags, self.counts, tau, q.operand)
            self.counts[2] += changed
            self.inner, self.outer = q.inner, q.outer
            return

        # the two distances
        code, last = self.take(q.code), self.flags & 15
        last_scale = full_scale(Quantized(q.code, self.inner, self.outer, q.operand))
        value, last_value = grid_value(code, q.operand), grid_value(last, q.operand)
        dist_q = value * self.take(full_scale(q)) - last_value * self.take(last_scale)
        dist_m = self.take(w) - self.w
        self.excess += dist_q.abs() - tau * dist_m.abs()

        # flips of the code, and their directions
        step = level(code) - level(last)
        flipped, up, was_up, history = step != 0, step > 0, self.flags >> _UP & 1 != 0, self.history
        reversal = flipped & (history != NEVER) & (up != was_up)
        onward = torch.where(history == NEVER, ONCE, history.clamp(min=SAME_WAY))
        history = torch.where(flipped, torch.where(reversal, REVERSED, onward), history)
        moved = (self.flags >> _MOVED != 0) | (dist_m != 0)
        up, moved = torch.where(flipped, up, was_up).byte(), moved.byte()
        self.flags = code | up << _UP | history << _HISTORY | moved << _MOVED
        self.counts += torch.stack((flipped.sum(), reversal.sum(), changed))

        # the snapshot moves on
        self.w.copy_(self.take(w))
        self.inner, self.outer = q.inner, q.outer


@dataclass
class Report:
    """ What one window saw and did: numbers of weights, unless it says otherwise. """
    weights: int = 0          # all of the layer, without outlier columns
    near: int = 0             # within a tenth of the gap of a threshold, as the window ends, before the reset
    tracked: int = 0
    flips: int = 0            # events: a tracked weight's code changed from one step to the next
    reversals: int = 0        # events: a flip in the direction opposite to that weight's last flip
    single: int = 0           # tracked weights that flipped exactly once
    reset: int = 0
    reset_single: int = 0     # reset although they flipped exactly once: perhaps a drift, not an oscillation
    reset_never: int = 0      # reset although they never flipped: the scale of their block moved
    refused: int = 0          # not reset, since a code or an inner scale would have changed
    found: int = 0            # tracked weights with dist_Q / dist_M >= tau: what OsciReset resets, or would
    held: int = 0             # by a remedy, see remedies.py
    penalty: float = 0.0      # of Dampen: the sum of squares
    scale_changes: int = 0    # events: an inner scale changed from one step to the next
    scale_steps: int = 0      # inner scales times steps: what scale_changes is a share of
    layers: dict[str, "Report"] = field(default_factory=dict)     # the same by layer; empty in a layer's own

    @staticmethod
    def total(layers: dict[str, "Report"]) -> "Report":
        names = [f.name for f in fields(Report) if f.name != "layers"]
        return Report(**{name: sum(getattr(r, name) for r in layers.values()) for name in names},
                      layers=layers)

    def row(self) -> dict[str, float]:
        """ Counts and shares by name, for one row of a table. """
        counts = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "layers"}
        return counts | {
            "near_share": self.near / max(1, self.weights),
            "reset_share": self.reset / max(1, self.weights),
            "scale_flicker": self.scale_changes / max(1, self.scale_steps),
        }


def reports(closed: dict[str, dict]) -> dict[str, Report]:
    """ Numbers and tensors (), by layer and name -> Reports. All are fetched at once. """
    tensors = [n for counts in closed.values() for n in counts.values() if isinstance(n, Tensor)]
    values = iter(torch.stack(tensors).tolist())
    return {layer: Report(**{name: next(values) if isinstance(n, Tensor) else n
                             for name, n in counts.items()}) for layer, counts in closed.items()}


# -----------------------------------------------------------------------------
# the schedule


class OsciReset:
    """
    Resets oscillating weights of quantized linears, periodically.

    layers  name -> QuantLinear; each must round its weight to FP4 (Q2), to nearest
    mode    full   tracks every weight: 9.1 bytes per weight, while a window is open
            topk   tracks in each row the share `track` of weights nearest to a threshold as the window opens
            edge   tracks nothing, and resets what is within EDGE of a threshold at the window's last step
            watch  tracks as full and resets nothing: how much oscillation is there?
            random, nearest    the controls. Track as full, and reset as many weights of each layer as full
                   would, but others: random ones, or those nearest to a threshold in units of its gap, as
                   edge measures. If full lowers the loss and these do so too, its choice is not what helps
    start, period, window  in optimizer steps: a window opens after step start + i * period, i = 0, 1, ...,
            sums over the next `window` steps and resets after the last of them
    tau     reset where dist_Q / dist_M >= tau, in modes full and topk

    The training loop calls after_step(step) after each optimizer step. Outside windows that costs nothing and
    nothing is kept. Inside, it rounds each weight once a step, on the device. The last step waits for it
    twice, for all layers together; the controls random and nearest wait once more for each.
    A weight that did not move at all is never reset, whatever its scale did (the ratio would be x / 0).
    A layer whose outlier channels change while a window is open is left out of that window.
    """

    def __init__(self, layers: dict[str, QuantLinear], mode: str, start: int, period: int, window: int,
                 tau: float = 8.0, track: float = 0.05):
        if mode not in MODES:
            raise ValueError(f"mode is one of {', '.join(MODES)}, not {mode!r}")
        if start < 0 or not 1 <= window < period:
            raise ValueError(f"need start >= 0 and 1 <= window < period, not {start=}, {window=}, {period=}")
        if tau <= 0 or not 0 < track <= 1:
            raise ValueError(f"need tau > 0 and 0 < track <= 1, not {tau=}, {track=}")
        for name, layer in layers.items():
            op = layer.recipe.y_w
            if op is None or op.grid != "e2m1" or op.stochastic:
                raise ValueError(f"{name}: its weight is not rounded to FP4, to nearest (Q2)")
        self.layers = dict(layers)
        self.settings = dict(mode=mode, start=start, period=period, window=window, tau=tau, track=track)
        self.windows: dict[str, Window] = {}

    @torch.no_grad()
    def after_step(self, step: int) -> Report | None:
        """ Call it after optimizer step number `step` (from 0) was applied; a Report when a window ends. """
        s = self.settings
        since_open = (step - s["start"]) % s["period"]
        if step < s["start"] or since_open > s["window"]:
            return None
        edge, last = s["mode"] == "edge", since_open == s["window"]
        if since_open == 0 and not edge:
            track = s["track"] if s["mode"] == "topk" else None
            self.windows = {name: Window.open(layer, track) for name, layer in self.layers.items()}
            return None

        closed, fits = {}, {}
        if last and self.windows:
            # asked for all layers at once, so that the device is waited for once and not before each of them
            same = [(window.channels == self.layers[name].channels).all()
                    for name, window in self.windows.items()]
            fits = dict(zip(self.windows, torch.stack(same).tolist()))
        # no window is open where a run was resumed in the middle of one without the state of the run before
        for name in self.layers if edge and last else list(self.windows):
            layer, window = self.layers[name], self.windows.get(name)
            w, q = rounded_weight(layer)
            if window:
                window.advance(w, q, s["tau"], layer.backend)
            if last:
                if fits.get(name, True):
                    closed[name] = self._close(layer, window, w, q, step)
                self.windows.pop(name, None)
        return Report.total(reports(closed)) if closed else None

    def _choose(self, layer: QuantLinear, found: Tensor, distance: Tensor, step: int) -> Tensor:
        """ What is to be reset (N, K), given what the window found and all distances to a threshold. """
        mode = self.settings["mode"]
        if mode == "watch":
            return torch.zeros_like(found)
        if mode in ("full", "topk"):
            return found
        chosen, n = torch.zeros_like(found).flatten(), int(found.sum())
        if mode == "nearest":
            # a stable sort, so that ties fall alike on every device
            nearest = distance.flatten().sort(stable=True).indices[:n]
            chosen[nearest] = distance.flatten()[nearest].isfinite()
        else:
            ours = torch.ones_like(found)
            if layer.split:
                ours.index_fill_(1, layer.channels, False)
            ours = ours.flatten().nonzero().flatten()
            address = layer.counter.at(step)
            chosen[ours[random_subset(ours.numel(), n, address, layer.layer, RESET_CHOICE)]] = True
        return chosen.view_as(found)

    def _close(self, layer: QuantLinear, window: Window | None, w: Tensor, q: Quantized, step: int) -> dict:
        """
        Reset what the window found in one layer, or what is at an edge now if there was none -> what to
        report, numbers and tensors ().
        """
        N, K = w.shape
        distance = threshold_distance(code_units(w, q), in_gaps=True)
        if layer.split:
            distance.index_fill_(1, layer.channels, math.inf)
        weights = N * (K - (layer.channels.numel() if layer.split else 0))
        counts = {"weights": weights, "near": (distance < NEAR).sum()}
        if window is None:
            wanted = distance < EDGE
            done = reset(layer, w, q, wanted)
        else:
            found = window.put((window.excess >= 0) & (window.flags >> _MOVED != 0), K)
            wanted = self._choose(layer, found, distance, step)
            done = reset(layer, w, q, wanted)
            hit, history = window.take(done), window.history
            flips, reversals, scale_changes = window.counts
            counts |= {
                "tracked": min(weights, window.w.numel()), "flips": flips, "reversals": reversals,
                "single": (history == ONCE).sum(), "reset_single": (hit & (history == ONCE)).sum(),
                "reset_never": (hit & (history == NEVER)).sum(), "scale_changes": scale_changes,
                "scale_steps": q.inner.numel() * self.settings["window"], "found": found.sum(),
            }
        return counts | {"reset": done.sum(), "refused": wanted.sum() - done.sum()}

    def state_bytes(self) -> int:
        """ Memory of everything kept at this moment, in bytes. """
        tensors = [t for window in self.windows.values() for t in vars(window).values() if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)

    def shapes(self) -> dict[str, list[int]]:
        return {name: list(layer.weight.shape) for name, layer in self.layers.items()}

    def state_dict(self) -> dict:
        """ Settings and open windows: plain types, and tensors that are not copied, as in a module's. """
        windows = {name: dict(vars(window)) for name, window in self.windows.items()}
        return {"settings": dict(self.settings), "shapes": self.shapes(), "windows": windows}

    @torch.no_grad()
    def load_state_dict(self, state: dict):
        """
        Continue where the state was saved. In an open window, settings and layers must be the same, and the
        weights must have been loaded before: the file may come from anywhere, and kernels trust shapes.
        """
        if state["windows"]:
            must_equal("settings", state["settings"], self.settings)
            must_equal("layers", state["shapes"], self.shapes())
        self.windows = {}
        for name, tensors in state["windows"].items():
            device = self.layers[name].weight.device
            tensors = {key: t if t is None else t.to(device, copy=True) for key, t in tensors.items()}
            self.windows[name] = Window(**tensors)
            check_window(name, self.layers[name], self.windows[name])


def check_window(name: str, layer: QuantLinear, window: Window):
    """ ValueError unless its tensors are such as a window of this layer has. """
    w, q = rounded_weight(layer)
    (N, K), columns = w.shape, window.columns
    n = K if columns is None else columns.shape[-1]
    # name -> type and shape; the number of places is the window's own, since it depends on when it was opened
    wanted = {"w": (torch.float32, (N, n)), "excess": (torch.float32, (N, n)), "flags": (torch.uint8, (N, n)),
              "counts": (torch.int64, (3,))}
    wanted |= {key: (t.dtype, t.shape) for key, t in (("inner", q.inner), ("outer", q.outer),
                                                      ("channels", layer.channels)) if t is not None}
    if columns is not None:
        wanted["columns"] = (columns.dtype, (N, n))
    found = {key: t for key, t in vars(window).items() if t is not None}
    in_order = all(t.layout == torch.strided and t.is_contiguous() for t in found.values())
    if not in_order or {key: (t.dtype, t.shape) for key, t in found.items()} != wanted:
        raise ValueError(f"the saved window of {name} does not fit the layer")
    if columns is not None and (columns.dtype not in (torch.int16, torch.int32)
                                or not ((columns >= 0) & (columns < K)).all()):
        raise ValueError(f"the saved window of {name} tracks columns that the layer does not have")
    if not (window.w.isfinite().all() and window.excess.isfinite().all()):
        raise ValueError(f"the saved window of {name} holds a NaN or an Inf")


def must_equal(what: str, saved: dict, ours: dict):
    for key in sorted(saved.keys() | ours.keys()):
        if saved.get(key) != ours.get(key):
            raise ValueError(f"the saved OsciReset window has other {what}: {key} was {saved.get(key)}, is "
                             f"{ours.get(key)}. Resume as it was saved, or from outside a window")

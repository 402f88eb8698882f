"""
Train a language model with all linear layers in FP4, forward and backward.

    python train.py configs/tetrajet_full.py      a small model, any machine, minutes
    python train.py configs/bf16.py               the same without rounding, to compare with
    python train.py configs/tetrajet_full.py configs/olmo2_70m.py --data=data/fineweb10B      one GPU

Everything of a run lies in out/<name>/: config.json, metrics.csv (one row per logged step), log.txt and the
last two checkpoints. The same command again continues a run that was killed, from its newest checkpoint, and
computes what it would have computed without the interruption: bit for bit on a CPU, SR noise included, since
every random number is a function of (seed, step, micro-step, layer, operand). Under torchrun several
processes, ranks, train together (parallel.py), and the rank too is part of a random number's address.
"""
import os

# OpenMP threads that wait for each other by spinning stand still on a busy machine: a laptop with one more
# program running trained 40 times slower. Sleeping costs nothing measurable.
# Read once, when torch is imported
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import json
import math
import re
import sys
import time
import traceback
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch

from config import EMA_WARMUP, FREE, Config, ConfigError, in_full, load, need, package, script, short
from data import Corpus, DataError, open_corpus
from eval import (CHECKPOINT_FORMAT, MISFIT, autocast, build, check_native, check_tensors, checkpoints,
                  commit, first_line, idle, late_switch, newest_checkpoint, no_memory, pick_device, recipe_of,
                  sample, val_losses)
from osci import OsciReset, Report
from outliers import OutControl
from parallel import ALONE, Ranks, launched, leave, lost, one_voice, speaks, start
from quant import TENSOR, QuantLinear, Recipe, own_rows
from remedies import Dampen, Freeze, QEma
from tracker import ID, Tracker

# what OsciReset, or what takes its place, reports of a window (osci.Report.row), summed over layers
OSCI = ("tracked", "flips", "reversals", "single", "reset", "reset_single", "reset_never", "refused",
        "near_share", "reset_share", "scale_flicker", "found", "held", "penalty")
COLUMNS = ("step", "tokens", "seconds", "lr", "train_loss", "z_loss", "grad_norm", "val_loss_fp4",
           "val_loss_bf16", "tokens_per_s", *(f"osci_{name}" for name in OSCI), "outlier_overlap",
           "outlier_overlap_min")


SPEED = {
    "reference": "backend reference: FP4 is emulated, the numbers are those of the format "
                 "and the speed is not",
    "emulate": "backend emulate: fused kernels round to FP4, bf16 tensor cores multiply",
    "packed": "backend packed: as emulate, and what backward needs is kept as codes, in less memory",
    "native": "backend native: fused kernels round to FP4, FP4 tensor cores multiply",
}


class TrainingError(RuntimeError):
    """ The run cannot go on. The text is one line and says what to do. """


# -----------------------------------------------------------------------------
# a run's folder


class Run:
    """ The folder out/<name>: what a run writes, and how it finds itself again. """

    OURS = re.compile(r"ckpt_\d{9}\.(pt|tmp)|(config\.json|metrics\.csv)(\.tmp)?|log\.txt|" + re.escape(ID))

    def __init__(self, cfg: Config, writes: bool = True):
        self.folder = in_full(cfg.out) / cfg.name
        self.writes = writes                               # else it says and writes nothing: one rank does
        self.lock = None
        self.tracker: Tracker | None = None                # of --wandb
        self.last_good: Path | None = None                 # the checkpoint loaded or written last
        self.warned = False

    def open(self, cfg: Config, recipe: Recipe) -> dict | None:
        """
        Make the folder ready and return the checkpoint to continue from, None for a fresh start. ConfigError
        if it holds a run that this command would spoil.
        """
        try:
            foreign = [path for path in self.folder.glob("*") if not self.OURS.fullmatch(path.name)]
            if cfg.overwrite and foreign and not (self.folder / "config.json").exists():
                raise ConfigError(f"{self.folder} is not the folder of a run; --overwrite will not touch it")
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock()
            leftovers = [*self.folder.glob("*.tmp")]       # of a run that was killed while saving
            if cfg.overwrite:
                leftovers += [*checkpoints(self.folder),
                              *(self.folder / name for name in ("config.json", "metrics.csv", ID))]
                (self.folder / "log.txt").write_text("")
            for path in leftovers:
                if self.OURS.fullmatch(path.name) and path.is_file():
                    path.unlink()
            found = newest_checkpoint(self.folder, self.say)
            if found is None and checkpoints(self.folder):
                raise ConfigError(f"{self.folder} holds checkpoints and none can be read; "
                                  "type --name=ANOTHER, or --overwrite to start anew")
            if found is not None:
                self._check_same(cfg, recipe, found[1])
            self._write("config.json", json.dumps(cfg.to_dict(), indent=1))
            if found is None:
                self._write("metrics.csv", ",".join(COLUMNS) + "\n")
                return None
            self.last_good, state = found
            self.say(f"continuing from {self.last_good}, step {state['step']}")
            if (then := state.get("commit")) != commit():
                self.say(f"note: commit {short(str(then))} wrote that, and commit {commit()} goes on: what "
                         "follows may be another program's")
            self._drop_rows(state["step"])
            return state
        except OSError as error:
            raise ConfigError(f"cannot write to {self.folder}: {error.strerror}; make room or way for it, "
                              "or type --out=FOLDER") from None

    def _check_same(self, cfg: Config, recipe: Recipe, state: dict):
        """ ConfigError unless the run in this folder is unfinished and is the one that cfg asks for. """
        try:
            before = Config.from_dict(state["config"]).to_dict()
        except MISFIT as error:
            raise ConfigError(f"the run in {self.folder} does not fit this program ({first_line(error)}); "
                              "type --name=ANOTHER, or --overwrite to delete it") from None
        differ = [f"{k}={before[k]!r}" for k, v in cfg.to_dict().items() if k not in FREE and before[k] != v]
        if not differ and state["recipe"] != recipe.spec():
            differ = [f"another version of the recipe {cfg.recipe}"]
        if differ:
            raise ConfigError(f"{self.folder} holds a run with {', '.join(differ)}; type --name=ANOTHER, or "
                              "--overwrite to delete that run")
        if state["step"] > cfg.steps:
            raise ConfigError(f"{self.folder} is at step {short(str(state['step']))}, beyond the last one of "
                              f"steps = {cfg.steps}; type --name=ANOTHER, or --overwrite to delete that run")
        # killed during its last evaluation, a run has the last checkpoint and lacks the row: so that is done
        if state["step"] >= cfg.steps and self._has_row(cfg.steps):
            raise ConfigError(f"{self.folder} holds this run, finished; type --name=ANOTHER, "
                              "or --overwrite to delete it")
        if 0 < cfg.stop_at <= state["step"]:
            raise ConfigError(f"{self.folder} is at step {state['step']} already; type a larger --stop_at")

    def _has_row(self, step: int) -> bool:
        """ Whether metrics.csv ends with the whole row of this step. """
        path = self.folder / "metrics.csv"
        if path.is_file():
            # half a row has no newline behind it
            rows = path.read_bytes().split(b"\n")[:-1]
            return any(row.startswith(b"%d," % step) and row.count(b",") == len(COLUMNS) - 1
                       for row in rows[-1:])
        return False

    def _lock(self):
        """ Keep a second process out of this folder; the system forgets the lock when this one dies. """
        try:
            import fcntl
        except ImportError:                                                # Windows
            return
        self.lock = open(self.folder / "log.txt", "a")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is training in {self.folder}; type --name=ANOTHER") from None
        except OSError:                                                    # a file system without locks
            pass

    def close(self, code: int):
        if self.tracker:
            self.tracker.close(code)
        if self.lock:
            self.lock.close()

    def _drop_rows(self, step: int):
        """ Forget logged rows from `step` on: they will be computed, and logged, again. """
        path = self.folder / "metrics.csv"
        kept = [",".join(COLUMNS)]
        try:
            if not path.is_file():      # nor a link to a device, which has no end
                raise FileNotFoundError
            for line in path.read_text(encoding="utf-8").splitlines():
                # a row that was cut off when the run was killed, or with other columns, is no row
                number, *others = line.split(",")
                if number.isdigit() and int(number) < step and len(others) == len(COLUMNS) - 1:
                    kept.append(line)
        except (FileNotFoundError, UnicodeDecodeError, ValueError) as error:
            self.say(f"note: the rows of {path} up to step {step} cannot be read ({type(error).__name__})")
        self._write("metrics.csv", "\n".join(kept) + "\n")

    def _write(self, name: str, text: str):
        """ Replace a file as a whole, or not at all. """
        path = self.folder / name
        temporary = path.with_name(name + ".tmp")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)

    def _append(self, name: str, text: str):
        """ All of the text or, on a full disk, none of it: half a row would be read as another number. """
        path, size = self.folder / name, None
        try:
            with open(path, "a", encoding="utf-8", errors="replace") as f:
                size = path.stat().st_size
                f.write(text)
        except OSError as error:
            if size is not None:
                with suppress(OSError):
                    os.truncate(path, size)
            if not self.warned:
                print(f"warning: cannot write {path}: {error.strerror}; the run goes on", file=sys.stderr)
            self.warned = True

    def say(self, line: str = ""):
        if not self.writes:
            return
        try:
            print(line, flush=True)
        except OSError:                                    # whoever read the output has left: `| head -1`
            sys.stdout = open(os.devnull, "w")
        self._append("log.txt", line + "\n")

    def row(self, values: dict):
        """ One row of metrics.csv; a column that was not measured at this step stays empty. """
        if not self.writes:
            return
        shown = [f"{v:.6g}" if isinstance(v, float) else str(v) for v in (values.get(c, "") for c in COLUMNS)]
        self._append("metrics.csv", ",".join(shown) + "\n")
        if self.tracker:
            self.tracker.row({name: float(text) for name, text in zip(COLUMNS, shown) if text})

    def save(self, state: dict) -> bool:
        """
        Write ckpt_<step>.pt under a temporary name, sync it to the disk, rename it; keep the one before.
        A kill at any moment leaves a whole checkpoint. False, with a message, if it cannot be written.
        """
        if not self.writes:
            return True
        path = self.folder / f"ckpt_{state['step']:09d}.pt"
        temporary = path.with_suffix(".tmp")
        try:
            with open(temporary, "wb") as f:
                torch.save(state, f)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, path)
        except (OSError, RuntimeError) as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            # torch.save hides that the disk is full behind a check of its own
            reason = error.strerror if isinstance(error, OSError) else \
                "a part of it was not written" if "inline_container" in str(error) else first_line(error)
            self.say(f"error: cannot save {path} ({reason}); free some space. The run goes on, "
                     f"{f'{self.last_good} is kept' if self.last_good else 'nothing is saved yet'}")
            return False
        for old in checkpoints(self.folder):
            if old < path and old != self.last_good:
                with suppress(OSError):
                    old.unlink()
        self.last_good = path
        return True


# -----------------------------------------------------------------------------
# schedule, printing


def learning_rate(cfg: Config, step: int) -> float:
    """ Linear warm-up to the peak, then cosine or linear decay to the floor at decay_end, then flat. """
    warmup, end = round(cfg.warmup * cfg.steps), round(cfg.decay_end * cfg.steps)
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, end - warmup))
    fall = (1 + math.cos(math.pi * progress)) / 2 if cfg.schedule == "cosine" else 1 - progress
    return cfg.lr * (cfg.lr_final + (1 - cfg.lr_final) * fall)


def layer_table(layers: dict, cfg: Config) -> str:
    rows = [f"{'layer':24} {'in':>6} {'out':>6} {'parameters':>12}  {'kept channels':>13}  "
            f"quantizers of {cfg.recipe}"]
    for name, layer in layers.items():
        on = ",".join(f"Q{i}" for i, op in enumerate(layer.recipe.operands, 1) if op) or "none"
        rows.append(f"{name:24} {layer.in_features:6} {layer.out_features:6} {layer.weight.numel():12,}  "
                    f"{layer.channels.numel():13}  {on}")
    return "\n".join(rows)


def clock(seconds: float) -> str:
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02}m" if hours else f"{m}m{s:02}s"


def not_finite(run: Run, trainer: "Trainer", step: int) -> TrainingError:
    """
    The error that ends a run at a NaN or Inf: it names the first weight that holds one, and a way out.
    """
    bad = [name for name, p in trainer.model.named_parameters()
           if trainer.ranks.any(not own_rows(p.detach()).isfinite().all())]
    where = f"the first bad weight is {bad[0]}" if bad else "all weights are still finite"
    return TrainingError(f"step {step}: the loss is not finite, {where}; lower --lr and start anew, "
                         f"or continue from {run.last_good or 'nothing: no checkpoint yet'}")


def out_of_memory(cfg: Config, world: int = 1) -> str:
    sequences = cfg.batch_tokens // cfg.seq_len // world
    now = cfg.micro_batch or sequences
    smaller = next((n for n in range(now - 1, 0, -1) if sequences % n == 0), 0)
    cure = f"--micro_batch={smaller}" if smaller else "a smaller --seq_len"
    return (f"out of memory with {now} sequences of {cfg.seq_len} tokens in a micro-step; type {cure}, "
            "or train a smaller model")


# -----------------------------------------------------------------------------
# training


def against_oscillation(cfg: Config, layers: dict[str, QuantLinear]) -> OsciReset | QEma | Freeze | Dampen:
    """ What cfg.osci names. """
    phases = dict(start=cfg.in_steps(cfg.osci_start), period=cfg.in_steps(cfg.osci_period),
                  window=cfg.in_steps(cfg.osci_window), tau=cfg.osci_tau)
    if cfg.osci == "qema":
        return QEma(layers, **phases, decay=cfg.osci_decay, warmup=EMA_WARMUP)
    if cfg.osci == "freeze":
        return Freeze(layers, **phases, steps=cfg.steps, threshold=cfg.osci_threshold)
    if cfg.osci == "dampen":
        return Dampen(layers, **phases, steps=cfg.steps, strength=cfg.osci_strength)
    return OsciReset(layers, cfg.osci, **phases, track=cfg.osci_track)


class Trainer:
    """ Everything that lives while training, and what of it a checkpoint holds. """

    def __init__(self, cfg: Config, corpus: Corpus):
        self.cfg, self.corpus, self.ranks = cfg, corpus, ALONE
        self.device = pick_device(cfg)
        self.model, self.layers, self.counter = build(cfg, corpus.vocab_size, self.device)
        self.recipe, self.backend = recipe_of(cfg), next(iter(self.layers.values())).backend
        recipe = self.recipe
        rounded = {name: layer for name, layer in self.layers.items() if any(layer.recipe.operands)}
        self.rounds = bool(rounded)
        if self.backend == "native" and self.rounds:
            check_native(recipe, self.device)
        self.outliers = OutControl(self.layers, cfg.in_steps(cfg.outlier_start),
                                   cfg.in_steps(cfg.outlier_window), cfg.outlier_choice,
                                   cfg.in_steps(cfg.outlier_log) if cfg.outlier_log else 0)
        self.osci = None
        if cfg.osci != "off" and self.rounds:
            self.osci = against_oscillation(cfg, rounded)
        self.step = 0
        self.seconds = 0.0
        self.share(ALONE)

    def share(self, ranks: Ranks):
        """ Train together with these ranks. For a fresh trainer, whose weights are the same on each. """
        cfg, self.ranks = self.cfg, ranks
        if ranks.sharded and self.osci:
            check_rows(cfg, self.layers, ranks.world)
        self.counter.state[3] = ranks.rank
        compiled = cfg.compile and self.device.type == "cuda" and find_spec("triton") is not None
        # checkpoints, evaluation and sampling use the module itself, so no key ever gets a compiler's prefix
        self.forward = ranks.share(self.model, compiled)
        # the fused update is one kernel on a GPU and one pass on a CPU
        self.optimizer = torch.optim.AdamW(self.model.optimizer_groups(cfg.weight_decay), lr=cfg.lr,
                                           betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps, fused=True)

    def state(self) -> dict:
        """ All of it, on rank 0; the other ranks have to call it too. """
        return self.ranks.whole({
            "format": CHECKPOINT_FORMAT, "config": self.cfg.to_dict(), "commit": commit(),
            "recipe": self.recipe.spec(),
            "vocab_size": self.corpus.vocab_size, "train_tokens": self.corpus.train.n_tokens,
            "step": self.step, "seconds": self.seconds, "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(), "outliers": self.outliers.state_dict(),
            "osci": self.osci.state_dict() if self.osci else None,
        })

    def load(self, state: dict):
        """ Continue from a checkpoint. ConfigError if it does not fit: the file may come from anywhere. """
        tokens, vocab = self.corpus.train.n_tokens, self.corpus.vocab_size
        if (state["vocab_size"], state["train_tokens"]) != (vocab, tokens):
            raise ConfigError(f"the run began with {state['train_tokens']:,} training tokens of "
                              f"{state['vocab_size']} ids and the data now has {tokens:,} of {vocab}; type "
                              "--data=DIR of the same data, or --name=ANOTHER for a new run")
        try:
            check_tensors(state["model"], self.model.state_dict())
            saved, ours = state["optimizer"]["param_groups"], self.optimizer.state_dict()["param_groups"]
            if [group["params"] for group in saved] != [group["params"] for group in ours]:
                raise ValueError("its optimizer is for other weights")
            # how Adam is set is our config's to say, but for the rate, which each step sets
            groups = [mine | {"lr": float(group["lr"])} for mine, group in zip(ours, saved)]
            # the fused update walks through memory without a look at strides
            if any((t.dtype, t.layout) != (torch.float32, torch.strided) or not t.is_contiguous()
                   for moments in state["optimizer"]["state"].values() for t in moments.values()):
                raise ValueError("its optimizer holds a tensor that is not dense, in order and float32")
            if any((moments["exp_avg_sq"] < 0).any() for moments in state["optimizer"]["state"].values()):
                raise ValueError("its optimizer holds a mean of squares below zero")
            state = self.ranks.parts(state, self.model, self.optimizer)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"] | {"param_groups": groups})
            # the fused update trusts all of this
            for p in self.model.parameters():
                step, *moments = (self.optimizer.state[p][key] for key in ("step", "exp_avg", "exp_avg_sq"))
                if any(m.shape != p.shape for m in moments):
                    raise ValueError("Adam's moments have other shapes than the weights")
                if step.shape or step != state["step"]:
                    raise ValueError("Adam has made another number of steps")
            self.outliers.load_state_dict(state["outliers"])
            if self.osci:
                self.osci.load_state_dict(state["osci"])
        except MISFIT as error:
            if no_memory(error):
                raise
            raise ConfigError(f"the checkpoint does not fit ({first_line(error)}); type --name=ANOTHER, or "
                              "--overwrite to start anew") from None
        self.step, self.seconds = state["step"], state["seconds"]

    def micro_batches(self):
        """
        Our share of the sequences of this step: a function of (seed, step, rank), so there is no loader to
        save. Together the ranks have what a single one would have. -> micro-step, inputs, targets
        """
        cfg, (rank, world) = self.cfg, (self.ranks.rank, self.ranks.world)
        sequences = cfg.batch_tokens // cfg.seq_len
        size = cfg.micro_batch or sequences // world
        for micro in range(sequences // world // size):
            first = self.step * sequences + (micro * world + rank) * size
            rows = self.corpus.train.sequences(first, size, cfg.seq_len, cfg.seed, cfg.shuffle)
            if self.device.type == "cuda":
                rows = rows.pin_memory()
            rows = rows.to(self.device, non_blocking=True)
            yield micro, rows[:, :-1], rows[:, 1:]

    def train_step(self) -> dict:
        """
        One optimizer step -> train_loss, z_loss, grad_norm as tensors on the device, and what was measured of
        outlier channels and of oscillation.
        """
        cfg, device, ranks = self.cfg, self.device, self.ranks
        self.outliers.begin_step(self.step)
        ce_total = z_total = torch.zeros((), device=device)
        tokens = 0
        for micro, inputs, targets in self.micro_batches():
            self.counter.set(self.step, micro)
            tokens += inputs.numel() * ranks.world
            with ranks.micro_step(self.forward, last=tokens == cfg.batch_tokens):
                with autocast(device):
                    ce, z, _ = self.forward(inputs, targets)
                # sums over the whole step's tokens, so that the split into micro-batches does not matter.
                # DDP and FSDP take the mean of the ranks' gradients, and ours is the sum of their losses
                ((ce + cfg.z_loss * z) * ranks.world / cfg.batch_tokens).backward()
            ce_total, z_total = ce_total + ce.detach(), z_total + z.detach()
        ce_total, z_total = ranks.total(ce_total, z_total)
        outliers = self.outliers.after_step(self.step)
        if isinstance(self.osci, Dampen):
            self.osci.add_gradient(self.step)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), cfg.clip or math.inf)
        if ranks.sharded:    # it is then what each rank has of the sum
            norm = norm.full_tensor()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(cfg, self.step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        osci = self.osci.after_step(self.step) if self.osci else None
        self.step += 1
        return {"train_loss": ce_total / cfg.batch_tokens, "z_loss": z_total / cfg.batch_tokens,
                "grad_norm": norm, "outliers": outliers, "osci": self.over_ranks(osci)}

    def finite(self) -> bool:
        """ Whether every weight is, after the last update; the loss before it cannot tell. """
        good = [own_rows(p.detach()).isfinite().all() for p in self.model.parameters()]
        return not self.ranks.any(not torch.stack(good).all())

    def over_ranks(self, osci: Report | None) -> Report | None:
        """ A report whose rows lie on several ranks, added up. """
        if osci is None or not self.ranks.sharded:
            return osci
        names = [name for name in vars(osci) if name != "layers"]
        table = torch.tensor([[getattr(r, name) for name in names] for r in osci.layers.values()],
                             dtype=torch.float64, device=self.device)
        table = self.ranks.total(table)[0].tolist()
        return Report.total({layer: Report(**{name: type(getattr(osci, name))(x)
                                              for name, x in zip(names, row)})
                             for layer, row in zip(osci.layers, table)})


def check_rows(cfg: Config, layers: dict[str, QuantLinear], world: int):
    """ ConfigError unless what cfg does about oscillation can be done to some rows of a weight at a time. """
    if cfg.osci in ("random", "nearest", "qema"):
        why = "rounds a weight that the forward pass needs whole" if cfg.osci == "qema" else \
              "chooses among all weights of a layer"
        raise ConfigError(f"osci = {cfg.osci!r} {why}, and parallel = 'fsdp' deals out its rows: "
                          "type --parallel=ddp")
    for name, layer in layers.items():
        op, N = layer.recipe.y_w, layer.out_features
        if op and (op.block[0] > 1 or op.outer == TENSOR):
            raise ConfigError(f"recipe {cfg.recipe} has scales over several rows of a weight, and osci under "
                              "parallel = 'fsdp' sees some of its rows: type --parallel=ddp, or --osci=off")
        if op and (world - 1) * -(-N // world) >= N:
            raise ConfigError(f"{name} has {N} rows, too few for {world} ranks under parallel = 'fsdp': type "
                              "--parallel=ddp")


def report(run: Run, step: int, mode: str, seen: dict) -> dict:
    """
    Say what OutControl, and OsciReset or what takes its place (mode), did in a step; -> the columns of
    metrics.csv that they fill.
    """
    row = {}
    if outliers := seen["outliers"]:
        if chosen := outliers.chosen:
            n = sum(c.numel() for c in chosen.values())
            run.say(f"step {step}: OutControl keeps {n} input channels of {len(chosen)} layers out of "
                    "FP4 from now on")
        if overlap := outliers.overlap:
            row |= {"outlier_overlap": sum(overlap.values()) / len(overlap),
                    "outlier_overlap_min": min(overlap.values())}
            run.say(f"step {step}: of a layer's kept channels, {row['outlier_overlap']:.1%} would be "
                    f"chosen now too; fewest in {min(overlap, key=overlap.get)}, "
                    f"{row['outlier_overlap_min']:.1%}")
    if seen["osci"] is not None:
        osci = seen["osci"].row()
        run.say(f"step {step}: {what_was_done(mode, osci)}; of {osci['tracked']:,} tracked, "
                f"{osci['flips']:,} flips, {osci['reversals']:,} of them reversals")
        row |= {f"osci_{name}": osci[name] for name in OSCI}
    return row


def what_was_done(mode: str, osci: dict) -> str:
    """ The row of a window's report, in words. """
    held = f"{osci['held']:,} weights ({osci['held'] / max(1, osci['weights']):.2%})"
    match mode:
        case "watch":
            return f"OsciReset would have put {osci['found']:,} weights back on their grid values"
        case "qema":
            return (f"Q-EMA rounds {held} to the neighbour that is farther, and not {osci['refused']:,} "
                    "more, for a scale's sake")
        case "freeze":
            return f"Freeze holds {held}, but {osci['refused']:,} not in this step, for a scale's sake"
        case "dampen":
            return f"Dampen's sum of squared distances to the grid is {osci['penalty']:.4g}"
    who = {"random": "the control put random", "nearest": "the control put"}.get(mode, "OsciReset put")
    which = " nearest to a threshold" if mode == "nearest" else ""
    return (f"{who} {osci['reset']:,} weights{which} ({osci['reset_share']:.2%}) back on their grid values, "
            f"of which {osci['reset_single']:,} had flipped once and {osci['reset_never']:,} never")


def train(cfg: Config, run: Run, trainer: Trainer) -> dict | None:
    """ The loop -> the last row of metrics.csv, None where stop_at ended it. """
    model, corpus = trainer.model, trainer.corpus
    first = trainer.step
    saved = True
    began, trained = time.perf_counter(), 0.0
    # counts losses that are not finite, without a host sync
    bad = torch.zeros((), device=trainer.device)

    def due(every: int, step: int) -> bool:
        return every > 0 and step % every == 0

    for step in range(first, cfg.steps + 1):
        if late_switch(cfg, trainer.layers, step):
            run.say(f"step {step}: the forward pass is not rounded from now on")
        last, stop = step == cfg.steps, cfg.stop_at == step > first
        row = {"step": step, "tokens": step * cfg.batch_tokens, "seconds": trainer.seconds}

        # once in a while, and at the end: save, before anything else can fail
        if step > first and (last or stop or due(cfg.save_every, step)):
            saved = run.save(trainer.state())

        # once in a while, and at the end: validation loss, with the recipe's forward and without rounding
        if last or (due(cfg.eval_every, step) and step > 0):
            row |= (losses := val_losses(model, corpus, cfg, trainer.ranks))
            if not all(map(math.isfinite, losses.values())):
                raise not_finite(run, trainer, step)
            run.say(f"step {step}: val loss {row['val_loss_fp4']:.4f} " +
                    (f"(recipe's forward), {row['val_loss_bf16']:.4f} (no rounding)" if trainer.rounds else
                     "(nothing is rounded)"))
        if last or stop:
            run.row(row) if last else run.say(f"stopped at step {step}, as stop_at says")
            break

        # ---- one optimizer step, the only timed part
        start = time.perf_counter()
        seen = trainer.train_step()
        bad += ~(seen["train_loss"].isfinite() & seen["grad_norm"].isfinite())
        coming = step + 1
        log = due(cfg.log_every, step) or cfg.log_every > 0 and coming == cfg.steps
        pause = (coming in (cfg.steps, cfg.stop_at) or due(cfg.eval_every, coming)
                 or due(cfg.save_every, coming))
        # bool(bad) waits for the device: before a number is shown, and before the clock stops for something
        # else. Nothing that is not finite is ever evaluated or saved
        if (log or pause) and bool(bad) or pause and not trainer.finite():
            raise not_finite(run, trainer, step)
        took = time.perf_counter() - start
        trainer.seconds += took
        trained += took
        # ---- end of the timed part

        row |= report(run, step, trainer.cfg.osci, seen)
        if log:
            done = coming - first
            row |= {k: float(seen[k]) for k in ("train_loss", "z_loss", "grad_norm")}
            row |= {"lr": learning_rate(cfg, step),
                    "tokens_per_s": done * cfg.batch_tokens / max(trained, 1e-9)}
            left = clock((time.perf_counter() - began) / done * (cfg.steps - coming))
            run.say(f"step {step}/{cfg.steps}  loss {row['train_loss']:.4f}  lr {row['lr']:.2e}  "
                    f"grad {row['grad_norm']:.2f}  {row['tokens_per_s']:,.0f} tokens/s  {left} left")
        if row.keys() - {"step", "tokens", "seconds"}:
            run.row(row)
    if not saved:
        raise TrainingError("the last checkpoint could not be saved; see the message above")
    return row if last else None


def summary(run: Run, trainer: Trainer, row: dict):
    """ A sample of text, and the last thing printed: one greppable `key: value` block. """
    device = trainer.device
    if trainer.cfg.sample_tokens:
        problem = ""
        try:
            trainer.corpus.encoding
        except DataError as error:
            # no vocabulary to decode with: the run itself is fine
            problem = str(error)
        # under FSDP the ranks can only write together
        if trainer.ranks.any(bool(problem)):
            run.say(f"no sample: {problem or 'another rank has no vocabulary'}")
        else:
            try:
                text = sample(trainer.model, trainer.corpus, "", trainer.cfg.sample_tokens)
                run.say(f"\na sample, with the recipe's forward:\n{text}\n")
            except FloatingPointError as error:
                run.say(f"no sample: {error}")
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else _peak_rss()
    trained = trainer.step * trainer.cfg.batch_tokens
    values = {
        "val_loss_fp4": f"{row['val_loss_fp4']:.4f}", "val_loss_bf16": f"{row['val_loss_bf16']:.4f}",
        "tokens": trained, "seconds": f"{trainer.seconds:.1f}",
        "tokens_per_s": f"{trained / max(trainer.seconds, 1e-9):.0f}", "peak_gib": f"{peak:.2f}",
        "backend": trainer.backend, "commit": commit(),
    }
    for key, value in values.items():
        run.say(f"{key}: {value}")


def _peak_rss() -> float:
    """ The most memory this process ever held, GiB; nan where the system does not tell (Windows). """
    try:
        import resource
    except ImportError:
        return math.nan
    unit = 1 if sys.platform == "darwin" else 1024         # bytes on macOS, kilobytes on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def introduce(run: Run, trainer: Trainer, entropy: float):
    """
    Say what is about to run, and where. entropy is that of single tokens of the held-out text, in nats.
    """
    cfg, device, count = trainer.cfg, trainer.device, trainer.model.num_params()
    name = torch.cuda.get_device_name() if device.type == "cuda" else device.type
    run.say(f"torch {torch.__version__}, {name}, commit {commit()}, run {run.folder}, recipe {cfg.recipe}")
    if (ranks := trainer.ranks).world > 1:
        run.say(f"{ranks.world} ranks by {ranks.mode}, "
                f"{cfg.batch_tokens // cfg.seq_len // ranks.world} sequences each in a step")
    if trainer.rounds:
        run.say(SPEED[trainer.backend])
    for line in idle(cfg, ranks):
        run.say(line)
    if trainer.rounds and trainer.recipe.outlier and not cfg.outlier_frac:
        run.say(f"outlier_frac = 0: recipe {cfg.recipe} has a format for outlier channels, and there are "
                "none")
    if trainer.rounds and cfg.outlier_frac and not trainer.outliers.layers:
        run.say(f"outlier_frac = {cfg.outlier_frac} is less than half a channel in every layer: "
                "none is kept out of FP4")
    whole = trainer.corpus.val.whole_windows(cfg.seq_len) * cfg.seq_len
    if whole < cfg.eval_tokens:
        run.say(f"validation uses all {whole:,} held-out tokens, "
                f"fewer than eval_tokens = {cfg.eval_tokens:,}")
    run.say(f"{trainer.corpus.describe()}; counting alone reaches a loss of {entropy:.2f}")
    run.say(f"{sum(count.values()):,} parameters: {count['block_linears']:,} in the linears of "
            f"{cfg.n_layer} blocks, {count['embeddings']:,} in embedding and head")
    epochs = trainer.corpus.train.epochs(cfg.steps * cfg.batch_tokens // cfg.seq_len, cfg.seq_len)
    run.say(f"{cfg.steps:,} steps of {cfg.batch_tokens:,} tokens" +
            (f": {epochs:.1f} times through the training tokens" if epochs > 1 else ""))


def initial_weights(cfg: Config, run: Run, trainer: Trainer) -> str:
    """ Read init_from's weights into a fresh run -> what to say. A checkpoint to continue from wins. """
    if not cfg.init_from or checkpoints(run.folder) and not cfg.overwrite:
        return ""
    from hf import init_weights
    return init_weights(trainer.model, cfg)


def work(cfg: Config, run: Run, ranks: Ranks):
    """ From a config to the last line printed. """
    missing = ""
    with ranks.together():
        try:
            corpus = open_corpus(cfg.data)
        except DataError as error:
            # layers can be shown before there is data to train on
            if not (cfg.dry_run and cfg.vocab_size) or in_full(cfg.data).exists():
                raise
            corpus = SimpleNamespace(vocab_size=cfg.vocab_size)
            missing = f"no data yet: {error}\n"
        try:
            trainer = Trainer(cfg, corpus)
        except (MemoryError, RuntimeError) as error:
            need(not no_memory(error), "out of memory for the weights alone: type a smaller --d_model, "
                                       "--d_ff, --n_layer or --vocab_size")
            raise
        # what may be wrong with the data shows before an old run is touched, and not at the first evaluation
        if not cfg.dry_run:
            if cfg.wandb and ranks.first:
                package("wandb")
            entropy = corpus.val.unigram_entropy()
            corpus.val.whole_windows(cfg.seq_len)
            origin = initial_weights(cfg, run, trainer)
    trainer.share(ranks)
    if cfg.dry_run:
        if ranks.first:
            print(json.dumps(cfg.to_dict(), indent=1))
            print(layer_table(trainer.layers, cfg))
            print("".join(f"{line}\n" for line in idle(cfg, ranks)) + missing, end="")
        return
    with ranks.together():
        next(trainer.micro_batches())
        state = run.open(cfg, trainer.recipe) if ranks.first else None
        if cfg.wandb and ranks.first:
            run.tracker = Tracker(cfg, run.folder, run.say)
    state = ranks.from_first(state)
    if state:
        with ranks.together():
            trainer.load(state)
        del state
    introduce(run, trainer, entropy)
    if origin:
        run.say(origin)
    row = train(cfg, run, trainer)
    if row is not None:
        summary(run, trainer, row)


def what_next(cfg: Config, run: Run) -> str:
    """ What the same command would do now. """
    again = "the same command" + " without --overwrite" * cfg.overwrite
    saved = checkpoints(run.folder)
    if saved or not run.writes:     # those of another rank need not be on this disk
        return f"{again} continues from {saved[0].name if saved else 'the last checkpoint'}"
    return "there is no checkpoint yet, so the same command starts anew (--save_every saves more often)"


def fault(error: BaseException, cfg: Config, run: Run, ranks: Ranks) -> tuple[str, int, bool]:
    """
    What to say of an error, the exit code, and whether other ranks have the same error at the same moment;
    "" for an error that nobody foresaw.
    """
    if isinstance(error, ConfigError):
        return f"error: {error}", 2, True
    if isinstance(error, DataError):
        return f"error: {error}", 2, False
    if no_memory(error):
        return f"error: {out_of_memory(cfg, ranks.world)}", 2, False
    if isinstance(error, TrainingError):
        return f"error: {error}", 1, True
    if isinstance(error, KeyboardInterrupt):
        return f"\ninterrupted; {what_next(cfg, run)}", 130, True
    if isinstance(error, RuntimeError) and lost(error):
        return (f"error: another rank has gone, see what it says ({first_line(error)}); "
                f"{what_next(cfg, run)}"), 1, False
    return "", 1, False


def main(argv: list[str]):
    with one_voice():
        cfg = load(argv)
    ranks, run, code = ALONE, Run(cfg), 0
    try:
        ranks = start(cfg, pick_device(cfg))
        run.writes = ranks.first
        work(cfg, run, ranks)
        ranks.finish()
    except BaseException as error:
        line, code, shared = fault(error, cfg, run, ranks)
        tells = not shared or ranks.first and speaks()
        if line and tells:
            print(line if shared or ranks.world == 1 else f"rank {ranks.rank}: {line}", file=sys.stderr)
        if launched():
            if not line:
                traceback.print_exc()
            leave(code, told=tells)
        if not line:
            raise
        raise SystemExit(code)
    finally:
        run.close(code)


if __name__ == "__main__":
    script(lambda: main(sys.argv[1:]))

"""
A run's folder, out/<name>/: what a run writes there, and how it finds itself again.

    config.json        the resolved config
    metrics.csv        a row for each logged step
    log.txt            what the terminal shows; its lock keeps a second process out
    ckpt_000000150.pt  the last two checkpoints, each whole whenever the run is killed

A checkpoint is what torch.save writes: a zip file with a checksum for each record. A file that does not agree
with its checksums, torn or with a flipped bit, is skipped with a line, and the one before it is taken. It is
written under another name first, so a kill at any moment leaves the one before as it was.

What lives between two steps is in the state of the model and of its optimizers: weights, outlier channels and
open windows are parameters and buffers of layers. Nothing here knows the names of any of them. Batches and
noise are functions of seed and step, so there is nothing else to save.
"""
import csv
import inspect
import json
import os
import secrets
import subprocess
import sys
import zipfile
import zlib
from contextlib import nullcontext, suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch

from build import Net, first_line
from config import FREE, Config, ConfigError, check, fit, in_full, need
from data import Corpus
from parallel import load_model, load_optimizer
from quant import AROUND, RULES, SIGNS, Operand, Recipe

FORMAT = 2
FILES = ("log.txt", "metrics.csv", "config.json", "wandb_id.txt")

# -----------------------------------------------------------------------------
# a run's folder


class Run:
    """ The folder of a run that trains; other processes are kept out until this one ends. """

    def __init__(self, cfg: Config, columns: tuple[str, ...]):
        self.cfg, self.columns, self.folder = cfg, columns, Path(cfg.out).expanduser() / cfg.name
        self.last_good: Path | None = None      # the checkpoint that was loaded or written last
        self.wandb = None                       # of --wandb
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in (self.folder / name for name in FILES):
            # to open a pipe, say, would wait for somebody at its other end
            need(path.is_file() or not path.exists(), f"{path} is no regular file; type --name=ANOTHER")
        self.log = open(self.folder / "log.txt", "a", encoding="utf-8")
        try:
            import fcntl
            fcntl.flock(self.log, fcntl.LOCK_EX | fcntl.LOCK_NB)    # forgotten when this process dies
        except BlockingIOError:
            raise ConfigError(f"another process trains in {self.folder}; type --name=ANOTHER") from None
        except (ImportError, OSError):
            pass                                # Windows, and file systems without locks
        for path in (*self.folder.glob("ckpt_*.tmp"), *(self.folder / f"{name}.tmp" for name in FILES)):
            path.unlink(missing_ok=True)        # of a run that was killed while it wrote

    def say(self, line: str):
        """ To the terminal and to log.txt. Neither a closed terminal nor a full disk ends a run. """
        try:
            print(line, flush=True)
        except OSError:
            sys.stdout = open(os.devnull, "w")      # whoever read it has left, as in `| head -1`
        with suppress(OSError):
            print(line, file=self.log, flush=True)

    def row(self, values: dict):
        """ One row of metrics.csv; a column that was not measured at this step stays empty. """
        shown = [values.get(column, "") for column in self.columns]
        shown = [f"{value:.6g}" if isinstance(value, float) else value for value in shown]
        try:
            with open(self.folder / "metrics.csv", "a", newline="") as file:
                csv.writer(file, lineterminator="\n").writerow(shown)
        except OSError as error:
            self.say(f"warning: a row of metrics.csv is lost: {error.strerror}")
        if self.wandb:
            self.track(lambda: self.wandb.log({c: values[c] for c in self.columns if c in values}))

    def save(self, state: dict) -> bool:
        """
        Write a checkpoint under another name, sync it to the disk, rename it; keep the one before. False,
        with a line, if it cannot be written: the run goes on, and the next one may do better.
        """
        path = self.folder / f"ckpt_{state['step']:09d}.pt"
        temporary = path.with_suffix(".tmp")
        try:
            with open(temporary, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except (OSError, RuntimeError) as error:    # torch hides a full disk behind an error of its own
            temporary.unlink(missing_ok=True)
            self.say(f"error: cannot save {path} ({first_line(error)}); free some space. "
                     f"{self.last_good or 'Nothing'} is kept")
            return False
        for old in checkpoints(self.folder):
            if old < path and old != self.last_good:
                old.unlink()
        self.last_good = path
        return True

    def resume(self, net: Net, optimizers: list, corpus: Corpus) -> tuple[int, float]:
        """ Load the newest good checkpoint -> its step and seconds of training; 0, 0.0 for a fresh start. """
        state = net.ranks.from_first(self.find(net, corpus))
        step, seconds = 0, 0.0
        if state:
            step, seconds = state["step"], state["seconds"]
            fill(net, state)
            for optimizer, saved in zip(optimizers, state["optimizers"]):
                load_optimizer(optimizer, saved)
        self.begin(step)
        return step, seconds

    def find(self, net: Net, corpus: Corpus) -> dict | None:
        """ What this run starts from: its newest good checkpoint, weights of another run, or None. """
        cfg, old = self.cfg, checkpoints(self.folder)
        found = None if cfg.overwrite else newest(self.folder, self.say)
        need(found or cfg.overwrite or not old,
             f"{self.folder} holds checkpoints and none can be read; type --name=ANOTHER")
        if not found:
            return weights_of(net, in_full(cfg.init_from), self.say) if cfg.init_from else None
        self.last_good, state = found
        self.check_same(state, net, corpus)
        self.say(f"continuing from {self.last_good}, step {state['step']}")
        return state

    def begin(self, step: int):
        """ Make the folder ready for the steps from this one on. """
        if self.cfg.overwrite:
            others = (self.folder / name for name in ("metrics.csv", "wandb_id.txt"))
            for path in (*checkpoints(self.folder), *others):
                path.unlink(missing_ok=True)
            self.log.truncate(0)
        write(self.folder / "config.json", json.dumps(asdict(self.cfg), indent=1))
        # rows from this step on will be computed, and logged, again; one that a full disk or a kill cut off
        # is no row
        path, rows = self.folder / "metrics.csv", []
        if step and path.is_file():
            rows = [line.split(",") for line in path.read_text(errors="replace").splitlines()]
        rows = [row for row in rows
                if len(row) == len(self.columns) and row[0].isdigit() and int(row[0]) < step]
        write(path, "".join(",".join(row) + "\n" for row in [self.columns, *rows]))

    def check_same(self, state: dict, net: Net, corpus: Corpus):
        """ ConfigError unless the run in this folder is the one that this command asks for. """
        new = "type --name=ANOTHER"
        before = asdict(config_of(state))
        differ = [f"{knob}={before[knob]!r}" for knob, value in asdict(self.cfg).items()
                  if knob not in FREE and before[knob] != value]
        # with more steps the fractions of training, that of the learning rate first, would have been others
        longer = f" --init_from={self.folder}, to train on from its weights" * \
            (differ == [f"steps={before['steps']}"])
        need(not differ, f"{self.folder} holds a run with {', '.join(differ)}; {new}{longer}")
        need(state["recipe"] == net.recipe.text, f"the recipe {self.cfg.recipe} has changed since; {new}")
        need(state["data"] == fingerprint(corpus), f"the run began with other data ({state['data']}, now "
             f"{fingerprint(corpus)}): type --data=DIR of the same, or {new}")
        need(not self.cfg.stop_at or state["step"] < self.cfg.stop_at,
             f"{self.folder} is at step {state['step']} already: type a larger --stop_at, or none")
        ours = sources(net.recipe)
        changed = [name for name, source in state["sources"].items() if ours.get(name) != source]
        # a commit that leaves all files of the program as they are is no other code
        if changed or state["code"].split("+")[-1] != code().split("+")[-1]:
            self.say(f"note: code {state['code']} wrote that and code {code()} goes on; " +
                     (f"{', '.join(changed)} of the recipe changed" if changed else "its recipe is the same"))

    def start_wandb(self):
        """ --wandb: send the rows of metrics.csv to Weights & Biases too, which its own variables set. """
        import wandb
        path = self.folder / "wandb_id.txt"         # a run that is continued keeps its id
        if not path.is_file():
            write(path, secrets.token_hex(8))
        self.wandb = wandb.init(project=os.environ.get("WANDB_PROJECT", "tetrajet"), name=self.cfg.name,
                                id=path.read_text().strip(), resume="allow", dir=self.folder,
                                config=asdict(self.cfg))
        self.wandb.define_metric("*", step_metric="step")

    def track(self, call):
        """ Whatever fails in wandb is a line, and the run goes on without it: metrics.csv is the record. """
        try:
            call()
        except Exception as error:
            self.wandb = None
            self.say(f"warning: wandb gets no more rows ({first_line(error)})")


class Onlooker(Run):
    """ What all ranks but the first have in the place of a Run: it finds, says and writes nothing. """

    def __init__(self, cfg: Config, columns: tuple[str, ...]):
        self.folder, self.last_good, self.log = Path(cfg.out).expanduser() / cfg.name, None, nullcontext()

    def say(self, *_):
        return None

    find = begin = row = track = start_wandb = say

    def save(self, state: dict) -> bool:
        return True


def write(path: Path, text: str):
    """ Replace a file as a whole, or not at all. """
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


# -----------------------------------------------------------------------------
# checkpoints


def snapshot(cfg: Config, net: Net, optimizers: list, corpus: Corpus, step: int, seconds: float) -> dict:
    """ What a checkpoint holds, on the first rank; all of them have to call this. """
    return {"format": FORMAT, "config": asdict(cfg), "code": code(), "recipe": net.recipe.text,
            "sources": sources(net.recipe), "data": fingerprint(corpus), "step": step, "seconds": seconds,
            "model": net.ranks.whole(net.model.state_dict()),
            "optimizers": [net.ranks.whole(o.state_dict()) for o in optimizers]}


def checkpoints(folder: Path) -> list[Path]:
    """ The checkpoints of a run, newest first. """
    found = folder.glob("ckpt_" + "[0-9]" * 9 + ".pt")
    return sorted((path for path in found if path.is_file()), reverse=True)


def newest(folder: Path, say=print) -> tuple[Path, dict] | None:
    """ The newest checkpoint of a run that can be read; says which ones it had to skip. """
    for path in checkpoints(folder):
        try:
            return path, read(path)
        except ValueError as error:
            say(f"skipping a checkpoint: {path} {error}")
    return None


def read(path: Path) -> dict:
    """ One checkpoint, on the CPU. ValueError if it is damaged, or none. It cannot hold code to run. """
    with open(path, "rb") as file:
        try:
            damaged = zipfile.ZipFile(file).testzip()
            state = None if damaged else torch.load(path, map_location="cpu", weights_only=True)
        except MemoryError:
            raise
        except Exception as error:      # zipfile and torch have a dozen ways to say so
            raise ValueError(f"is torn or no checkpoint ({type(error).__name__})") from None
    if damaged:
        raise ValueError(f"is damaged: its record {damaged} is not what was written")
    if not (isinstance(state, dict) and state.get("format") == FORMAT and f"{state['step']:09}" in path.name):
        raise ValueError(f"is no checkpoint of this program (format {FORMAT}), or of another step")
    return state


def weights_of(net: Net, folder: Path, say) -> dict:
    """ A checkpoint of step 0 with the weights of another run. Channels and windows are this run's own. """
    path, other = newest(folder, say) or (None, None)
    need(other, f"init_from = {str(folder)!r} holds no checkpoint that can be read; type the folder of a run")
    say(f"weights of {path}")
    names = dict(net.model.named_parameters())
    # also those that have no place here, as an OLMo-2's in a Llama: fill() tells
    theirs = {name: tensor for name, tensor in other["model"].items() if name.endswith(".weight")}
    own = {name: tensor for name, tensor in net.model.state_dict().items() if name not in names}
    return {"model": own | theirs, "optimizers": [], "step": 0, "seconds": 0.0}


def config_of(state: dict, **changes) -> Config:
    """ The config of a checkpoint. Knobs that are new since then take their defaults. """
    return check(Config(**{name: fit(name, value) for name, value in (state["config"] | changes).items()}))


def fill(net: Net, state: dict):
    """ Load weights and buffers. ConfigError unless names, shapes and types agree, or torch would cast. """
    saved, device = state["model"], net.counter.state.device
    for prefix, module in net.model.named_modules():
        for name, buffer in module._buffers.items():
            # what a layer keeps in a window only is a buffer that is None outside
            if buffer is None and f"{prefix}.{name}" in saved:
                setattr(module, name, torch.empty_like(saved[f"{prefix}.{name}"], device=device))
    there, here = ({name: f"{list(t.shape)} {t.dtype}" for name, t in side.items()}
                   for side in (saved, net.model.state_dict()))
    for name in {**here, **there}:
        a, b = there.get(name, "missing"), here.get(name, "missing")
        need(a == b, f"the checkpoint does not fit this model: {name} is {a} there and {b} here; type the "
             "block and the sizes that its config.json has")
    load_model(net.model, saved)


# -----------------------------------------------------------------------------
# what a checkpoint says of where it comes from


@cache
def code() -> str:
    """ The code as it was at the first call: a checksum of its files, behind the commit if git knows one. """
    here, checksum = Path(__file__).resolve().parent, 0
    for path in sorted((*here.glob("*.py"), *here.glob("rivals/*.py"))):
        checksum = zlib.crc32(path.read_bytes(), checksum)
    try:
        head = subprocess.run(["git", "-C", str(here), "rev-parse", "--short", "HEAD"], capture_output=True)
        return f"{head.stdout.decode().strip()}+{checksum:08x}".removeprefix("+")
    except OSError:
        return f"{checksum:08x}"


def sources(recipe: Recipe) -> dict[str, str]:
    """ Each function that a recipe names -> a checksum of its source. """
    ops = [op for op in (*recipe.operands, recipe.outlier) if isinstance(op, Operand)]
    named = {f"rule {op.rule}": RULES[op.rule].f for op in ops}
    named |= {f"signs {name}": SIGNS[name] for name in recipe.signs}
    named |= {f"around {name}": AROUND[name].f for name in recipe.around}
    for name, f in named.items():
        text = ""
        with suppress(OSError, TypeError):      # typed at a prompt, or written in C
            text = inspect.getsource(getattr(f, "func", f))
        # of a partial function its arguments too
        text += f"{getattr(f, 'args', '')}{getattr(f, 'keywords', '')}"
        named[name] = f"{zlib.crc32(text.encode()):08x}"
    return named


SAMPLES, LENGTH = 2048, 4096


@cache
def fingerprint(corpus: Corpus) -> str:
    """ The data by its content: encoding, lengths, and a checksum of pieces, of all if it has 8M tokens. """
    checksum = 0
    for stream in (corpus.train, corpus.val):
        length = min(LENGTH, stream.n_tokens - 1)
        pieces, windows = min(SAMPLES, stream.windows(length)), stream.windows(length)
        for i in range(pieces):
            piece = stream.sequences(i * windows // pieces, 1, length, seed=0, shuffle=0)
            checksum = zlib.crc32(piece.numpy().astype("<u4"), checksum)
    return (f"{corpus.encoding_name}, {corpus.train.n_tokens:,} and {corpus.val.n_tokens:,} tokens, "
            f"checksum {checksum:08x}")

"""
Many runs, several seeds each, on this machine: a row for each run, and a table with a row for each name.

    python sweep.py sweeps/quickstart.txt              one run after the other
    python sweep.py sweeps/quickstart.txt --jobs=2     two at a time, where memory holds both
    python sweep.py sweeps/quickstart.txt --dry_run    print the commands, no more

The list is text, parsed and never executed. A line is `name | config files and flags | seeds`; a first line
`all | config files and flags` holds for every run, and a run's own flag wins over it:

    all           | --steps=300
    bf16          | configs/bf16.py          | 1 2 3
    tetrajet_base | configs/tetrajet_base.py | 1 2 3

Every run is a `python train.py` of its own in out/<sweep>/<name>-s<seed>/, where <sweep> is the list's name;
what it printed is in stdout.txt and stderr.txt there. All names train their first seed before any trains its
second, so that a sweep cut short still compares. results/<sweep>/ gets

    runs.csv      a row for each run, whatever became of it: done, failed (with the reason), running, missing
    summary.md    by name: mean and standard deviation, and the gap to the first name, seed by seed

The same command again goes on where it stopped: what is done is read and not repeated, an unfinished run
continues from its checkpoint, a failed one gets one more try.

Left out on purpose: a guess of how many runs fit at a time (peak_gib tells, after one). Runs that train side
by side slow each other down: take tokens_per_s from --jobs=1.
"""
import argparse
import csv
import io
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev

try:
    import fcntl
except ImportError:     # Windows: there, nothing keeps two processes out of one folder
    fcntl = None

from config import FREE, Config, ConfigError, need, no_other_launcher, parse, read_flag, script, short, typed

TRAIN = Path(__file__).resolve().with_name("train.py")
SET_HERE = ("out", "name", "seed", "overwrite", "stop_at", "dry_run")
FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")
LINE = "a line is `name | config files and flags | seeds`, such as `bf16 | configs/bf16.py | 1 2 3`"
FP4, BF16 = "val_loss_fp4", "val_loss_bf16"
# what a finished run measured, from the last rows of its metrics.csv and the last lines of its log.txt
FROM_ROWS = ("tokens", FP4, BF16, "train_loss", "seconds")
FROM_LOG = {"tokens_per_s": r"\d+", "peak_gib": r"\d+\.\d+", "backend": r"\w+", "commit": r"\w+(?:\+\w*)?"}
COLUMNS = ("name", "seed", "status", "flags", "steps", "tokens", FP4, BF16, "train_loss", "tokens_per_s",
           "peak_gib", "seconds", "backend", "commit", "error")


@dataclass(eq=False)
class Run:
    """ One row of runs.csv. """
    name: str
    seed: int
    flags: list[str]                # of the list
    args: list[str]                 # and those of SET_HERE, which say where a run lies
    cfg: Config                     # what train.py makes of them
    status: str = "missing"         # done | failed | running | missing
    error: str = ""
    values: dict = field(default_factory=dict)
    process: subprocess.Popen | None = None     # None too while a process of others trains in the folder
    began: float = 0.0

    @property
    def folder(self) -> Path:
        return Path(self.cfg.out) / self.cfg.name

    def command(self) -> list[str]:
        return [sys.executable, str(TRAIN), *self.args]


def say(line: str):
    try:
        print(line, flush=True)
    except OSError:             # whoever read the output has left: `| head -1`
        sys.stdout = open(os.devnull, "w")


# -----------------------------------------------------------------------------
# the list


def words(text: str) -> list[str]:
    """ Config files and flags; a flag that is no knob, or is not the list's to give, is refused here. """
    args = shlex.split(text)
    for arg in args:
        name, equals, value = arg.removeprefix("--").partition("=")
        need(not arg.startswith("--") or name not in SET_HERE, f"--{name} is set by sweep.py; take it out")
        if arg.startswith("--") and equals:
            read_flag(name, value)
    return args


def read_line(cells: list[str], common: list[str], out: str) -> list[Run]:
    """
    The runs of a line, one for each seed. parse() and recipe_of() refuse now what train.py would refuse hours
    later.
    """
    need(len(cells) == 3, LINE)
    name, own, seeds = cells[0], words(cells[1]), cells[2].split()
    need(FOLDER.fullmatch(name),
         f"{short(repr(name))} names a folder: type a letter or digit, then at most 99 more or . _ + -")
    need(seeds and all(re.fullmatch("[0-9]{1,10}", seed) for seed in seeds),
         f"seeds are whole numbers with spaces between, such as 1 2 3, not {short(repr(cells[2]))}")
    seeds = [int(seed) for seed in seeds]
    need(len(set(seeds)) == len(seeds), f"a seed stands twice in {short(repr(cells[2]))}; keep one of them")
    given = {arg.split("=")[0] for arg in own if arg.startswith("--")}
    flags = [arg for arg in common if arg.split("=")[0] not in given] + own
    args = [[*flags, f"--out={out}", f"--name={name}-s{seed}", f"--seed={seed}"] for seed in seeds]
    runs = [Run(name, seed, flags, a, parse(a)) for seed, a in zip(seeds, args)]
    if runs[0].cfg.recipe != "bf16":
        from eval import recipe_of      # only here: PyTorch takes seconds to import
        recipe_of(runs[0].cfg)
    return runs


def read_list(path: Path) -> list[Run]:
    """ All runs, in the order of the list; ConfigError names the line. Nothing has been started by then. """
    need(FOLDER.fullmatch(path.stem),
         f"{short(repr(path.stem))} is to name a folder: call the list something like sweeps/quickstart.txt")
    try:
        lines = typed(path).decode("utf-8-sig").splitlines()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}; {LINE}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; type a list such as sweeps/quickstart.txt")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file; {LINE}")
    common, runs, seen = None, [], {}
    for number, line in enumerate(lines, 1):
        cells = [cell.strip() for cell in re.sub(r"(^|\s)#.*", "", line).split("|")]
        try:
            if cells == [""]:
                continue
            if cells[0] == "all":
                need(len(cells) == 2 and common is None and not runs,
                     "`all | config files and flags` stands once, above all runs, and has no seeds")
                common = words(cells[1])
                continue
            runs += read_line(cells, common or [], f"out/{path.stem}")
            # on some systems, Nano and nano are one folder
            key = cells[0].casefold()
            need(key not in seen, f"the name {cells[0]} is taken by line {seen.get(key)}; type another")
            seen[key] = number
        except ValueError as error:     # ours, config.py's, and shlex's about a quotation mark
            raise ConfigError(f"{path}:{number}: {error}") from None
    need(runs, f"{path} lists no runs; {LINE}")
    return runs


# -----------------------------------------------------------------------------
# what a run left: files from anywhere, read as text that may be cut off or worse


def text_of(path: Path) -> str:
    try:
        # a link to a device or a pipe has no end
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    except OSError:
        return ""


def finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def measured(run: Run) -> dict[str, str]:
    """ The numbers of a finished run, as train.py wrote them; empty if its last validation is not there. """
    # what follows the last newline is half a row
    head, *lines = text_of(run.folder / "metrics.csv").split("\n")[:-1] or [""]
    columns = head.split(",")
    rows = [dict(zip(columns, line.split(","))) for line in lines if line.count(",") == head.count(",")]
    last = rows[-1] if rows else {}
    if last.get("step") != str(run.cfg.steps) or not all(finite(last.get(key, "")) for key in (FP4, BF16)):
        return {}
    # the last row is that of the evaluation after training, without a loss in training of its own
    losses = [row["train_loss"] for row in rows if finite(row.get("train_loss", ""))]
    last["train_loss"] = losses[-1] if losses else ""
    values = {key: last[key] for key in FROM_ROWS if finite(last.get(key, ""))}
    for line in text_of(run.folder / "log.txt").splitlines()[-8:]:
        key, _, value = line.partition(": ")
        if key in FROM_LOG and re.fullmatch(FROM_LOG[key], value):
            values[key] = value
    return values


def another(run: Run, finished: bool) -> str:
    """ What is wrong if the folder holds a run with other settings, or "". """
    if not finished and not any(run.folder.glob("ckpt_*.pt")):
        return ""
    try:
        old, new = Config.from_dict(json.loads(text_of(run.folder / "config.json"))), run.cfg.to_dict()
        differ = [f"{k}={v!r}" for k, v in old.to_dict().items() if k not in FREE and v != new[k]]
    except (ValueError, TypeError, AttributeError, RecursionError):
        differ = ["a config.json that cannot be read"]
    cure = "give this line of the list another name, or delete that folder"
    return f"{run.folder} holds a run with {', '.join(differ)}; {cure}" if differ else ""


def look(run: Run):
    """ Set the run's status, values and error by what lies in its folder: done, failed or missing. """
    values = measured(run)
    run.error = another(run, bool(values))
    run.values = {} if run.error else values
    run.status = "failed" if run.error else "done" if values else "missing"


def reason(run: Run) -> str:
    """ Why the process ended as it did, on one line; "" if nothing was wrong. """
    code = run.process.returncode
    said = [line for line in text_of(run.folder / "stderr.txt").splitlines() if line.strip()]
    last = "".join(filter(str.isprintable, said[-1]))[:400].removeprefix("error: ") if said else ""
    if code < 0:
        return f"killed by signal {-code}" + (f"; its last words: {last}" if last else "")
    if code:
        return last or f"exit code {code}, and nothing on stderr"
    return "" if run.values else f"metrics.csv has no validation loss of step {run.cfg.steps}: a full disk?"


# -----------------------------------------------------------------------------
# running


def lock(path: Path):
    """ The file, locked until it is closed or this process dies; None if another process has the lock. """
    file = open(path, "a")
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:                     # a file system without locks
        pass
    return file


def locked(run: Run) -> bool:
    """ Whether a process trains in the run's folder: train.py holds its log.txt locked. """
    try:
        log = run.folder / "log.txt"
        free = lock(log) if log.exists() else io.StringIO()
    except OSError:                     # train.py will say what is wrong with it
        return False
    if free:
        free.close()
    return not free


def begin(run: Run):
    """ Start the run, unless it trains already: then it counts as running, and is waited for. """
    run.status, run.error, run.process, run.began = "running", "", None, time.time()
    if locked(run):
        say(f"{run.cfg.name}: another process trains in {run.folder}, perhaps left by a sweep that was "
            "killed; waiting for it")
        return
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        with open(run.folder / "stdout.txt", "ab") as out, open(run.folder / "stderr.txt", "wb") as err:
            # a session of its own: Ctrl-C reaches this program alone, which then ends the run's whole group
            run.process = subprocess.Popen(run.command(), stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                           start_new_session=True)
        say(f"{run.cfg.name}: started, see {run.folder / 'log.txt'}")
    except OSError as error:
        run.status = "failed"
        run.error = f"cannot start in {run.folder}: {error.strerror}; make room or way for it"


def ended(run: Run) -> bool:
    """ Whether a run that was begun has ended; its status then is final. """
    if run.status == "running" and run.process is None and not locked(run):
        look(run)
        if run.status == "missing":
            begin(run)                  # the other process has left it unfinished
    elif run.status == "running" and run.process and run.process.poll() is not None:
        look(run)
        why = reason(run)
        if run.status == "missing" and "another process is training" in why:
            # that one took the folder after locked() had looked
            run.status, run.process = "running", None
            say(f"{run.cfg.name}: {why}; waiting for it")
            return False
        run.status = "done" if run.values else "failed"
        run.error = run.error or why
    return run.status != "running"


def stop(runs: list[Run]):
    """ End these runs with all that they have started. Their checkpoints stay. """
    mine = [run for run in runs if run.process and run.process.poll() is None]
    for number in (signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM)):
        for run in mine:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(run.process.pid, number) if hasattr(os, "killpg") else run.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            for run in mine:
                run.process.wait(10)
    for run in runs:
        look(run)
        run.error = run.error or ("" if run.values else "stopped; the same command goes on with it")


def run_all(runs: list[Run], jobs: int, record) -> int:
    """
    Run what is missing, `jobs` at a time, each once. record() is called after each start and end.

    out   the number of the signal that ended it early, 0 without
    """
    turn = {run: [other.name for other in runs[:i]].count(run.name) for i, run in enumerate(runs)}
    # not those that failed already: another run is in their way, and must not be touched
    queue = [run for run in sorted(runs, key=turn.get) if run.status == "missing"]
    active, signals = [], []
    # a handler that only takes note cannot come between the start of a run and the line that remembers it.
    # What is ignored already, as by nohup, stays so
    ends = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {end: signal.signal(end, lambda number, frame: signals.append(number))
              for end in ends if signal.getsignal(end) is not signal.SIG_IGN}
    try:
        while (queue or active) and not signals:
            while queue and len(active) < jobs:
                active.append(queue.pop(0))
                begin(active[-1])
                record()
            time.sleep(0.1)
            for run in [run for run in active if ended(run)]:
                active.remove(run)
                record()
                losses = f"val_loss_fp4 {run.values[FP4]}" if run.values else run.error
                say(f"{run.cfg.name}: {run.status} after {time.time() - run.began:.0f} s, {losses}; "
                    f"{len(queue) + len(active)} to go")
    finally:
        stop(active)
        record()
        for end, handler in before.items():
            signal.signal(end, handler)
    return signals[0] if signals else 0


# -----------------------------------------------------------------------------
# what the sweep leaves


def spread(values: list[float], sign: str = "") -> str:
    """ mean +- sample standard deviation; one value stands alone, "-" for none. """
    if not values:
        return "-"
    # + 0.0 makes 0.0 of -0.0
    mean = f"{round(fmean(values), 4) + 0.0:{sign}.4f}"
    return mean + (f" +- {stdev(values):.4f}" if len(values) > 1 else "")


def table(runs: list[Run]) -> str:
    """ A row for each name. A gap is that to the run of the first name with the same seed. """
    losses = {run.name: {} for run in runs}
    for run in runs:
        if run.status == "done":
            losses[run.name][run.seed] = float(run.values[FP4]), float(run.values[BF16])
    first = runs[0].name
    rows = [["name", "seeds", "val loss, fp4 fwd", "val loss, bf16 fwd", "pairs", "gap, fp4", "gap, bf16"]]
    for name, of in losses.items():
        asked = sum(run.name == name for run in runs)
        base = losses[first] if name != first else {}
        pairs = [seed for seed in of if seed in base]
        rows.append([name, f"n={len(of)}" + (f" of {asked}" if len(of) < asked else ""),
                     *(spread([loss[i] for loss in of.values()]) for i in (0, 1)),
                     f"n={len(pairs)}" if pairs else "-",
                     *(spread([of[seed][i] - base[seed][i] for seed in pairs], "+") for i in (0, 1))])
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows)


def summary(runs: list[Run], path: Path) -> str:
    """ The table, what it means, and what is not in it. """
    made = {key: ", ".join(sorted({run.values.get(key, "unknown") for run in runs if run.values}))
            for key in ("backend", "commit")}
    parts = [f"# {path.stem}", table(runs),
             f"`python sweep.py {path}`. Validation losses in nats per token, with the recipe's forward and "
             "without rounding; +- is the standard deviation over seeds, with n - 1. Gaps are to "
             f"{runs[0].name}, seed by seed where both are done.",
             f"Back end: {made['backend'] or '-'}. Commit: {made['commit'] or '-'}."]
    left = [f"- {run.cfg.name}: {run.status}" + (f", {run.error}" if run.error else "")
            for run in runs if run.status != "done"]
    return "\n\n".join(parts + ["\n".join(left)] * bool(left)) + "\n"


def rows_of(runs: list[Run]) -> str:
    """ runs.csv. What a run has not measured stays empty. """
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for run in runs:
        writer.writerow({"name": run.name, "seed": run.seed, "status": run.status, "error": run.error,
                         "flags": shlex.join(run.flags), "steps": run.cfg.steps, **run.values})
    return out.getvalue()


def write(path: Path, text: str) -> bool:
    """ Replace the file as a whole or not at all; False, with a line on stderr, where that fails. """
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8", errors="replace")
        os.replace(temporary, path)
        return True
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        print(f"error: cannot write {path}: {error.strerror}; make room or way for it", file=sys.stderr)
        return False


def sweep(path: Path, runs: list[Run], jobs: int) -> int:
    """ Run the list, and write its results -> exit code. """
    out, results = Path(runs[0].cfg.out), Path("results") / path.stem

    def record() -> bool:
        return write(results / "runs.csv", rows_of(runs))
    try:
        out.mkdir(parents=True, exist_ok=True)
        held = lock(out / "sweep.lock")
    except OSError as error:
        raise ConfigError(f"cannot write to {out}: {error.strerror}; make room or way for it") from None
    need(held, f"another sweep.py works in {out}; wait for it, or stop it")
    with held:
        # results that have no place are better noticed now than after the first run
        if not record():
            return 2
        number = run_all(runs, jobs, record)
        written = [record(), write(results / "summary.md", summary(runs, path))]
    say("\n" + summary(runs, path))
    if number:
        return 128 + number
    return 0 if all(written) and all(run.status == "done" for run in runs) else 1


class Parser(argparse.ArgumentParser):
    """ One whose complaint is one line, as every other is here. """

    def error(self, message: str):
        raise ConfigError(f"{message}; see --help")


def main(argv: list[str]) -> int:
    """ -> exit code: 0 all done, 1 not all, 2 a mistake of the user's, 128 + the signal that ended it. """
    parser = Parser(prog="sweep.py", description="Train the runs of a list.", allow_abbrev=False)
    parser.add_argument("list", type=Path, help="lines of `name | config files and flags | seeds`")
    parser.add_argument("--jobs", type=int, default=1, help="runs that train at a time (1)")
    parser.add_argument("--dry_run", action="store_true", help="print the commands, no more")
    try:
        args = parser.parse_args(argv)
        need(args.jobs > 0, f"--jobs={args.jobs}: type how many runs train at a time, 1 or more")
        runs = read_list(args.list)
        for run in runs:
            look(run)
        if args.dry_run:
            say("\n".join(("# done: " if r.status == "done" else "") + shlex.join(r.command()) for r in runs))
            return 0
        no_other_launcher()
        return sweep(args.list, runs, args.jobs)
    except ValueError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2


if __name__ == "__main__":
    script(lambda: main(sys.argv[1:]))

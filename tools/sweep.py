"""
Many runs, several seeds each, on this machine: a row for each run, and a table with a row for each name.

    python -m tools.sweep sweeps/quickstart.txt              one run after the other
    python -m tools.sweep sweeps/quickstart.txt --jobs=2     two at a time, where memory holds both
    python -m tools.sweep sweeps/quickstart.txt --dry_run    print the commands, no more

The list is text, parsed and never executed. A line is `name | config files and flags | seeds`; a first line
`all | config files and flags` holds for every run, and a run's own flag wins over it:

    all           | --steps=300
    bf16          | configs/bf16.py          | 1 2 3
    tetrajet_base | configs/tetrajet_base.py | 1 2 3

All lines are checked before anything starts. Every run is a `python train.py` of its own in
out/<list>/<name>-s<seed>/; what it printed is in stdout.txt and stderr.txt there. All names train their first
seed before any trains its second, so that a sweep cut short still compares. results/<list>/ gets

    runs.csv      a row for each run, whatever became of it: done, failed (and why), running, missing
    summary.md    by name: mean and standard deviation, and the gap to the first name, seed by seed

The same command goes on where it stopped: what is done is read and not repeated, an unfinished run continues
from its checkpoint, a failed one gets one more try.

What this file leaves out: a guess of how many runs fit at a time (peak_gib tells, after one), and a lock: one
list is for one sweep at a time. Runs side by side slow each other down: take tokens_per_s from --jobs=1.
"""
import argparse
import csv
import json
import math
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev

from config import FREE, Config, ConfigError, need, parse
from tools.plot import BF16, FP4, markdown, read_rows, spread

TRAIN = Path(__file__).resolve().parent.parent / "train.py"
SET_HERE = ("out", "name", "seed", "overwrite", "stop_at", "dry_run")
LINE = "a line is `name | config files and flags | seeds`, such as `bf16 | configs/bf16.py | 1 2 3`"
# of a finished run: from the last rows of its metrics.csv, and from the last lines of its log.txt
FROM_ROWS = ("tokens", FP4, BF16, "train_loss", "seconds")
FROM_LOG = ("tokens_per_s", "peak_gib", "backend", "code")
COLUMNS = ("name", "seed", "status", "flags", "steps", *FROM_ROWS, *FROM_LOG, "error")


@dataclass(eq=False)
class Run:
    """ One row of runs.csv. """
    name: str
    seed: int
    flags: list[str]                # of the list
    args: list[str]                 # these, and the flags that say where the run lies
    cfg: Config                     # what train.py makes of the args
    status: str = "missing"         # done | failed | running | missing
    error: str = ""
    values: dict = field(default_factory=dict)      # FROM_ROWS and FROM_LOG, once it is done
    process: subprocess.Popen | None = None

    @property
    def folder(self) -> Path:
        return Path(self.cfg.out) / self.cfg.name

    def command(self) -> list[str]:
        return [sys.executable, str(TRAIN), *self.args]


# -----------------------------------------------------------------------------
# the list


def read_list(path: Path) -> list[Run]:
    """ All runs, in the order of the list; ConfigError names the line. """
    common, runs = [], []
    need(path.is_file() or not path.exists(), f"{path} is no regular file; name a list, such as "
         "sweeps/quickstart.txt")
    for number, line in enumerate(path.read_text("utf-8-sig", errors="replace").splitlines(), 1):
        cells = [cell.strip() for cell in re.sub(r"(^|\s)#.*", "", line).split("|")]
        try:
            if cells[0] == "all":
                need(len(cells) == 2 and not runs, "`all | config files and flags` stands above all runs")
                common = shlex.split(cells[1])
            elif cells != [""]:
                need(cells[0] not in [run.name for run in runs], f"the name {cells[0]} is taken already")
                runs += read_line(cells, common, f"out/{path.stem}")
        except ValueError as error:     # config.py's, ours, and shlex's about a quotation mark
            raise ConfigError(f"{path}:{number}: {error}") from None
    need(runs, f"{path} lists no runs; {LINE}")
    need(not Path("out", path.stem, "config.json").exists(),
         f"out/{path.stem} is the folder of one run, and would be that of all: give the list another name")
    return runs


def read_line(cells: list[str], common: list[str], out: str) -> list[Run]:
    """ The runs of a line, one for each seed; ConfigError for what train.py would refuse hours later. """
    need(len(cells) == 3, LINE)
    name, own, seeds = cells[0], shlex.split(cells[1]), cells[2].split()
    need(re.fullmatch(r"\w[\w.+-]*", name), f"{name!r} names a folder: type letters, digits and . _ + -")
    need(seeds and all(map(str.isdecimal, seeds)) and len(set(map(int, seeds))) == len(seeds),
         f"seeds are different whole numbers with spaces between, such as 1 2 3, not {cells[2]!r}")
    # a flag of the line replaces that of the line `all`
    given = {arg.split("=")[0] for arg in own if arg.startswith("--")}
    flags = [arg for arg in common if arg.split("=")[0] not in given] + own
    for arg in flags:
        knob = arg.removeprefix("--").split("=")[0]
        need(not arg.startswith("--") or knob not in SET_HERE, f"--{knob} is set here; take it out")
    args = [[*flags, f"--out={out}", f"--name={name}-s{seed}", f"--seed={seed}"] for seed in seeds]
    runs = [Run(name, int(seed), flags, a, parse(a)) for seed, a in zip(seeds, args)]
    from build import recipe_of         # here alone, since PyTorch takes seconds to import
    recipe_of(runs[0].cfg)
    return runs


# -----------------------------------------------------------------------------
# what a run has left in its folder


def look(run: Run):
    """ Set the run's values, and its status: done or missing. """
    run.values, run.error = measured(run), ""
    if run.values:
        before = json.loads((run.folder / "config.json").read_text())
        differ = [knob for knob, value in asdict(run.cfg).items()
                  if knob not in FREE - {"data"} and before.get(knob, value) != value]
        need(differ in ([], ["data"]), f"{run.folder} holds a run with another {', '.join(differ)}; give the "
             "list another name, or move that folder away")
        run.values = {} if differ else run.values       # train.py finds whether it is the same data elsewhere
    run.status = "done" if run.values else "missing"


def measured(run: Run) -> dict[str, str]:
    """ The numbers of a finished run; empty if its last validation is not there. """
    rows, log = read_rows(run.folder / "metrics.csv"), run.folder / "log.txt"
    last = rows[-1] if rows else {}
    losses = last.get(FP4, math.nan) + last.get(BF16, math.nan)
    if last.get("step") != run.cfg.steps or not math.isfinite(losses):
        return {}
    # the last row is that of the evaluation after training, without a loss in training of its own
    last["train_loss"] = next((row["train_loss"] for row in reversed(rows) if "train_loss" in row), math.nan)
    lines = log.read_text(errors="replace").splitlines()[-9:]
    said = dict(line.split(": ", 1) for line in lines if ": " in line)
    # older runs say commit
    said.setdefault("code", said.get("commit", "unknown"))
    return {key: f"{last[key]:.9g}" for key in FROM_ROWS} | {key: said.get(key, "") for key in FROM_LOG}


def end(run: Run):
    """ Set the status of a run whose process has ended. """
    look(run)
    said = (run.folder / "stderr.txt").read_text(errors="replace").split("\n")
    last = next((line.removeprefix("error: ") for line in reversed(said) if line.strip()), "")
    if code := run.process.returncode:
        run.error = run.error or (f"killed by signal {-code}; " if code < 0 else "") + last[:400]
        run.status = "done" if run.values else "failed"
    elif run.status == "missing":
        run.status, run.error = "failed", f"metrics.csv has no validation loss of step {run.cfg.steps}"
    run.process = None


# -----------------------------------------------------------------------------
# running


def run_all(runs: list[Run], jobs: int, record):
    """
    Run what is missing, `jobs` at a time, each once, and call record() whenever a status changes. Ctrl-C,
    SIGTERM and SIGUSR1 end the runs too: train.py saves, and goes on from there the next time.
    """
    turn = {run: [other.name for other in runs[:i]].count(run.name) for i, run in enumerate(runs)}
    queue = [run for run in sorted(runs, key=turn.get) if run.status == "missing"]
    active = []
    try:
        while queue or active:
            while queue and len(active) < jobs:
                begin(run := queue.pop(0))
                active.append(run)
                print(f"{run.cfg.name}: started, see {run.folder / 'log.txt'}", flush=True)
                record()
            time.sleep(0.05)
            for run in [run for run in active if run.process.poll() is not None]:
                active.remove(run)
                end(run)
                record()
                losses = f"val_loss_fp4 {run.values[FP4]}" if run.values else run.error
                print(f"{run.cfg.name}: {run.status}, {losses}; {len(queue) + len(active)} to go", flush=True)
    finally:
        for run in active:
            run.process.terminate()
        for run in active:
            try:
                run.process.wait(60)
            except subprocess.TimeoutExpired:
                run.process.kill()
            look(run)
        record()


def begin(run: Run):
    run.folder.mkdir(parents=True, exist_ok=True)
    with open(run.folder / "stdout.txt", "ab") as out, open(run.folder / "stderr.txt", "wb") as err:
        # in a session of its own, so that Ctrl-C reaches this program alone, which then ends the run
        run.process = subprocess.Popen(run.command(), stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                       start_new_session=True)
    run.status = "running"


# -----------------------------------------------------------------------------
# what the sweep leaves


def table(runs: list[Run]) -> str:
    """ A row for each name. A gap is that to the run of the first name with the same seed. """
    losses = {run.name: {} for run in runs}
    for run in runs:
        if run.status == "done":
            losses[run.name][run.seed] = float(run.values[FP4]), float(run.values[BF16])
    rows = [["name", "seeds", "val loss, fp4 fwd", "val loss, bf16 fwd", "pairs", "gap, fp4", "p",
             "gap, bf16"]]
    for name, of in losses.items():
        asked = sum(run.name == name for run in runs)
        base = losses[runs[0].name] if name != runs[0].name else {}
        fp4, bf16 = ([of[seed][i] - base[seed][i] for seed in of if seed in base] for i in (0, 1))
        rows.append([name, f"n={len(of)}" + (f" of {asked}" if len(of) < asked else ""),
                     *(spread([loss[i] for loss in of.values()]) for i in (0, 1)),
                     f"n={len(fp4)}" if fp4 else "-", spread(fp4, "+"),
                     f"{p_value(fp4):.3f}" if len(fp4) > 1 else "-", spread(bf16, "+")])
    return markdown(rows)


def p_value(gaps: list[float]) -> float:
    """ How often chance makes a mean gap as large if there is none: Student's t, two-sided. """
    df = len(gaps) - 1      # degrees of freedom
    angle = math.atan2(abs(fmean(gaps)) * math.sqrt(len(gaps)), stdev(gaps) * math.sqrt(df))
    # Abramowitz and Stegun, 26.7.3 and 26.7.4: a sum of df / 2 terms
    odd, term = df % 2, math.sin(angle) * math.cos(angle) ** (df % 2)
    inside = odd * angle
    for k in range(1 + odd, df, 2):
        inside, term = inside + term, term * math.cos(angle) ** 2 * k / (k + 1)
    return 1 - inside * (2 / math.pi if odd else 1)


def summary(runs: list[Run], path: Path) -> str:
    """ The table, what it means, and what is not in it. """
    done = [run for run in runs if run.status == "done"]
    backends, codes = (", ".join(sorted({run.values[key] for run in done})) or "-"
                       for key in ("backend", "code"))
    left = "\n".join(f"- {run.cfg.name}: {run.status}" + (f", {run.error}" if run.error else "")
                     for run in runs if run.status != "done")
    return f"""# {path.stem}

{table(runs)}

`python -m tools.sweep {path}`. Validation losses in nats per token, with the recipe's forward pass and
without rounding; +- is the standard deviation over seeds, with n - 1. Gaps are to {runs[0].name}, seed by
seed where both are done; p is how often chance makes a mean gap as large (fp4) where there is none.

Back end: {backends}. Code: {codes}.

{left}""".rstrip() + "\n"


def sweep(path: Path, runs: list[Run], jobs: int) -> int:
    """ Run the list, and write its results -> exit code: 0 if all is done, 1 if not. """
    results = Path("results") / path.stem
    results.mkdir(parents=True, exist_ok=True)

    def record():
        with open(results / "runs.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
            writer.writeheader()
            for run in runs:
                about = {"status": run.status, "flags": shlex.join(run.flags), "error": run.error}
                writer.writerow({"name": run.name, "seed": run.seed, "steps": run.cfg.steps}
                                | about | run.values)
        (results / "summary.md").write_text(summary(runs, path), encoding="utf-8")
    run_all(runs, jobs, record)
    print("\n" + summary(runs, path))
    return 0 if all(run.status == "done" for run in runs) else 1


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools.sweep", description="Train the runs of a list.")
    parser.add_argument("list", type=Path, help="lines of `name | config files and flags | seeds`")
    parser.add_argument("--jobs", type=int, default=1, help="runs that train at a time (1)")
    parser.add_argument("--dry_run", action="store_true", help="print the commands, no more")
    args = parser.parse_args(argv)
    try:
        runs = read_list(args.list)
        for run in runs:
            look(run)
        if args.dry_run:
            print("\n".join("# done: " * (run.status == "done") + shlex.join(run.command()) for run in runs))
            return 0
        for name in ("SIGTERM", "SIGUSR1"):
            if hasattr(signal, name):           # Windows has not all
                signal.signal(getattr(signal, name), signal.default_int_handler)
        return sweep(args.list, runs, max(1, args.jobs))
    except ConfigError as error:
        line = str(error)
    except OSError as error:
        line = f"{error.filename or 'cannot write'}: {error.strerror}"
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    print(f"error: {line}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

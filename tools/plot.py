"""
Tables and figures from the folders of runs. Every number comes from a metrics.csv, and none is typed.

    python -m tools.plot out/bf16-s1 out/tetrajet_full-s1    print a table of these runs, and draw them in
                                                             out/compare.png and .svg (--to=DIR elsewhere)
    python -m tools.plot out/quickstart                      the same for all runs of a sweep
    python -m tools.plot --results=results                   write the tables of results/README.md, and draw
                                                             each folder in it that has an about.md

Runs that differ in nothing but the seed share a row of the table: the mean over seeds, +- the standard
deviation. The gap of a run is its loss minus that of the bf16 run with the same seed, after as many tokens;
where no two runs make such a pair, minus that of the first run.

A figure shows the curves of all runs. More than MANY names would hide each other, so then it shows the last
gap of each run instead. Nothing is smoothed or interpolated: two losses are subtracted only where both were
measured.
"""
import argparse
import json
import math
import re
import sys
from dataclasses import dataclass, fields, replace
from itertools import cycle
from pathlib import Path
from statistics import fmean, stdev

from config import FREE, Config, ConfigError, fit, need

FP4, BF16 = "val_loss_fp4", "val_loss_bf16"
KNOBS = [field.name for field in fields(Config)]
# knobs that say where a run lies and how often it wrote, not what it computed
IDLE = FREE - {"data"} | {"seed"}
# what else may differ between a run and the bf16 run that it is compared with
PRECISION = set(KNOBS[KNOBS.index("recipe"):KNOBS.index("log_every")])

BEGIN = "<!-- tables: `python -m tools.plot --results=results` writes from here ... -->"
END = "<!-- ... to here -->"
LEGEND = """\
`+-` is the standard deviation over seeds, with n - 1. Losses are validation losses in nats per token: with
the fp4 forward, rounded as in training, and with the bf16 forward, the same weights unrounded. The gap is the
loss with the fp4 forward minus that of the bf16 run of the same seed. Tokens are those of one run; tokens/s
is the mean over runs of what train.py logged, which leaves evaluation out."""


# -----------------------------------------------------------------------------
# reading


@dataclass(eq=False)
class Run:
    """ The folder of a run, as it was read. """
    folder: Path
    name: str            # of the folder: config.json does not know of a renaming
    config: dict
    rows: list[dict]     # of metrics.csv, column -> number; what was not measured is not in it

    def curve(self, column: str) -> dict[float, float]:
        """ tokens -> value, where it was measured. """
        return {row["tokens"]: row[column] for row in self.rows if column in row}

    def minus(self, base: "Run | None", column: str) -> dict[float, float]:
        """ tokens -> difference from another run, where both were measured. """
        there = base.curve(column) if base and base is not self else {}
        return {tokens: y - there[tokens] for tokens, y in self.curve(column).items() if tokens in there}

    def last(self) -> dict:
        """ The last row with validation losses; empty if there is none. """
        return next((row for row in reversed(self.rows) if {FP4, BF16} <= row.keys()), {})

    def finished(self) -> bool:
        return self.last().get("step") == self.config["steps"]

    def alike(self, but: set[str]) -> dict:
        """ The config without these knobs: equal for runs that may be compared. """
        return {knob: value for knob, value in self.config.items() if knob not in but}


def read_run(folder: Path) -> Run:
    path = folder / "config.json"
    need(path.is_file(), f"{folder} is not the folder of a run: it has no config.json")
    try:
        config = json.loads(path.read_bytes())
        for knob in ("recipe", "seed", "steps", "batch_tokens"):
            fit(knob, config[knob])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"{path} is damaged, or of another program: leave this folder out") from None
    rows = read_rows(folder / "metrics.csv")
    need(rows, f"{folder / 'metrics.csv'} has no rows that train.py wrote yet: leave this folder out")
    return Run(folder, folder.resolve().name, config, rows)


def read_rows(path: Path) -> list[dict]:
    """ metrics.csv. What a run that was killed, or is just writing, has left of a last row is no row. """
    if not path.is_file():
        return []
    head, *lines = path.read_text(errors="replace").split("\n")[:-1] or [""]
    columns, rows = head.split(","), []
    for line in lines:
        cells = line.split(",")
        try:
            row = {column: float(cell) for column, cell in zip(columns, cells, strict=True) if cell}
        except ValueError:
            continue
        if math.isfinite(row.get("step", math.nan) + row.get("tokens", math.nan)):
            rows.append(row)
    return rows


def runs_in(folder: Path) -> list[Path]:
    """ The folder of a run itself; those of all runs in the folder of a sweep. """
    inside = sorted(path.parent for path in folder.glob("*/config.json"))
    return [folder] if (folder / "config.json").exists() else inside or [folder]


# -----------------------------------------------------------------------------
# which runs belong together


def by_name(runs: list[Run]) -> dict[str, list[Run]]:
    """
    Label -> runs that differ in the seed only, bf16 first; the label is their name without the seed. What
    has not finished, or is there twice, stands by itself: neither is one more seed.
    """
    groups: list[list[Run]] = []
    for run in sorted(runs, key=lambda run: (run.config["recipe"] != "bf16", run.name)):
        same = next((group for group in groups if run.finished() and group[0].finished()
                     and group[0].alike(IDLE) == run.alike(IDLE)
                     and run.config["seed"] not in [other.config["seed"] for other in group]), None)
        same.append(run) if same else groups.append([run])

    def stem(run: Run) -> str:
        return re.sub(rf"[-_]s{run.config['seed']}(?=[-_]|$)", "", run.name)
    stems = [" / ".join(dict.fromkeys(map(stem, group))) for group in groups]
    # two groups of one label keep the whole names of their runs
    return {words if stems.count(words) == 1 else " / ".join(run.name for run in group): group
            for words, group in zip(stems, groups)}


def bases(runs: list[Run]) -> tuple[dict[Run, Run | None], str]:
    """ The run that the gap of each run is to, and what to call it. """
    def bf16_of(run: Run) -> Run | None:
        return next((other for other in runs if other.config["recipe"] == "bf16"
                     and other.config["seed"] == run.config["seed"]
                     and other.alike(IDLE | PRECISION) == run.alike(IDLE | PRECISION)), None)
    pairs = {run: run if run.config["recipe"] == "bf16" else bf16_of(run) for run in runs}
    if any(base not in (None, run) for run, base in pairs.items()):
        return pairs, "bf16"
    return dict.fromkeys(runs, runs[0]), runs[0].name


def last_gap(run: Run, base: Run | None, column: str = FP4) -> list[float]:
    """ The gap at the run's last evaluation; [] where the base was not evaluated after as many tokens. """
    gaps = run.minus(base, column)
    return [gaps[tokens] for tokens in [run.last().get("tokens")] if tokens in gaps]


# -----------------------------------------------------------------------------
# tables


def spread(values: list[float], sign: str = "") -> str:
    """ The mean +- the standard deviation; one value stands alone, and none is "-". """
    if not values:
        return "-"
    # + 0.0 makes 0.0 of -0.0, which would print as -0.0000
    mean = f"{round(fmean(values), 4) + 0.0:{sign}.4f}"
    return mean + (f" +- {stdev(values):.4f}" if len(values) > 1 and all(map(math.isfinite, values)) else "")


def markdown(rows: list[list]) -> str:
    """ A table, the first row its head, whose columns also line up in a terminal. """
    rows = [[str(cell).replace("|", r"\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return "\n".join("| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows)


def table(runs: list[Run]) -> str:
    """ A row for each label of by_name(). """
    base, reference = bases(runs)
    rows = [["recipe", "seeds", "val loss, fp4 forward", "val loss, bf16 forward", f"gap to {reference}",
             "tokens", "tokens/s"]]
    for label, members in by_name(runs).items():
        config, ends = members[0].config, [run.last() for run in members if run.last()]
        gaps = [gap for run in members for gap in last_gap(run, base[run])]
        few = f" (n={len(gaps)})" if 0 < len(gaps) < len(members) else ""
        done, whole = ends[0]["tokens"] if ends else 0, config["steps"] * config["batch_tokens"]
        speeds = [list(curve.values())[-1] for run in members if (curve := run.curve("tokens_per_s"))]
        rows.append([
            label, f"n={len(members)}",
            # bf16 rounds nothing, so it has no fp4 forward to report
            spread([end[FP4] for end in ends if config["recipe"] != "bf16"]),
            spread([end[BF16] for end in ends]),
            "0" if base[members[0]] is members[0] else spread(gaps, "+") + few,
            f"{done:,.0f}" + ("" if done == whole else f" of {whole:,}"),
            # three digits: the fourth is noise
            f"{float(f'{fmean(speeds):.3g}'):,.0f}" if speeds else "-"])
    return markdown(rows)


# -----------------------------------------------------------------------------
# figures

# title; unit of y; what y shows: 0 ("zero", "gap"), all but the first losses ("late", "gap"); kind -> column
PANELS = (
    ("training and validation loss", "nats per token", "late",
     {"training": "train_loss", "fp4 forward": FP4, "bf16 forward": BF16}),
    ("validation loss minus that of {}", "nats per token", "gap", {"fp4 forward": FP4, "bf16 forward": BF16}),
    ("OsciReset", "number per window", "zero",
     {"flips": "osci_flips", "reversals": "osci_reversals", "resets": "osci_reset"}),
)
DASHED, DOTTED = {"linestyle": (0, (4, 2))}, {"linestyle": (0, (1, 1.5))}
STYLES = {"training": {"linewidth": 0.7, "alpha": 0.5, "marker": ""},
          "bf16 forward": DASHED | {"fillstyle": "none"}, "reversals": DASHED, "resets": DOTTED}
# Okabe and Ito's, which colour-blind readers tell apart, without the yellow, which is too pale for a line
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "os^DvP*X"      # one more than colours, so that the pairs repeat only after 56
MANY = 14                 # names whose curves can be told apart


def draw(runs: list[Run], folder: Path):
    """ compare.png and compare.svg in this folder, which is made. """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("figures need matplotlib: type pip install matplotlib") from None
    # a matplotlibrc of the user's would change the bytes, and so would an SVG's random ids without a salt
    matplotlib.rcdefaults()
    matplotlib.rcParams.update({
        "svg.hashsalt": "compare", "axes.titlelocation": "left", "axes.titlesize": "medium",
        "axes.grid": True, "grid.alpha": 0.25, "legend.fontsize": "small", "lines.markersize": 4})
    base, reference = bases(runs)
    figure, names, gaps = Figure(layout="constrained"), by_name(runs), last_gaps(runs)
    if len(names) > MANY and any(values for of in gaps.values() for values in of.values()):
        draw_gaps(figure, gaps, reference)
    else:
        draw_curves(figure, names, base, reference)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "compare.png", dpi=120, metadata={"Software": None})
    figure.savefig(folder / "compare.svg", metadata={"Date": None, "Creator": None})
    print(f"wrote {folder / 'compare.png'} and .svg")


def draw_curves(figure, names: dict[str, list[Run]], base: dict[Run, Run | None], reference: str):
    """ The PANELS that have a curve, one above the other; a name has one colour. """
    looks = {label: {"color": c, "marker": m} for label, c, m in zip(names, cycle(COLOURS), cycle(MARKERS))}
    lines = [(label, run) for label, members in names.items() for run in members]
    panels = []
    for title, y_unit, scale, kinds in PANELS:
        curves = [(kind, looks[label], run.minus(base[run], column) if scale == "gap" else run.curve(column))
                  for kind, column in kinds.items() for label, run in lines]
        # a figure has one panel at least
        if not panels or any(curve for _, _, curve in curves):
            panels.append((title.format(reference), y_unit, scale, curves))
    late = max(run.rows[-1]["tokens"] for _, run in lines) / 10
    figure.set_size_inches(8, 0.8 + 2.4 * len(panels) + 0.1 * len(looks))
    axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for ax, panel in zip(axes, panels):
        draw_panel(ax, *panel, late)
    axes[-1].set_xlabel("training tokens, millions")
    handles = [axes[0].plot([], [], label=label, **look)[0] for label, look in looks.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=2)


def draw_panel(ax, title: str, y_unit: str, scale: str, curves: list[tuple], late: float):
    """ curves: (kind, colour and marker, tokens -> y); from `late` tokens on, all y have to be seen. """
    for kind, look, curve in curves:
        ax.plot([tokens / 1e6 for tokens in curve], list(curve.values()),
                markevery=len(curve) // 15 + 1, **look | STYLES.get(kind, {}))
    for kind in dict.fromkeys(kind for kind, _, _ in curves):
        ax.plot([], [], color="grey", label=kind, **STYLES.get(kind, {}))
    if scale == "zero":
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_formatter("{x:,.0f}")
    else:
        # the first losses would press the rest into a flat line
        shown = [y for _, _, curve in curves for x, y in curve.items() if x >= late and math.isfinite(y)]
        shown += [0.0] if scale == "gap" or not shown else []
        margin = 0.06 * (max(shown) - min(shown)) or 0.01
        ax.set_ylim(min(shown) - margin, max(shown) + margin)
        ax.axhline(0, color="grey", linewidth=0.8)
    ax.set(title=title, ylabel=y_unit)
    ax.legend()


def last_gaps(runs: list[Run]) -> dict[str, dict[str, list[float]]]:
    """
    Label -> column -> the gap of each of its runs; the label with the smallest mean first. The bases are
    left out, and so is the gap of a run that is unfinished or has diverged: then the label says `1 of 2`.
    """
    (base, _), found = bases(runs), {}
    for label, members in by_name(runs).items():
        if base[members[0]] is not members[0]:
            gaps = {column: [gap for run in members if run.finished()
                             for gap in last_gap(run, base[run], column) if math.isfinite(gap)]
                    for column in (FP4, BF16)}
            few = f", {len(gaps[FP4])} of {len(members)}" if len(gaps[FP4]) < len(members) else ""
            found[label + few] = gaps
    return dict(sorted(found.items(), key=lambda item: fmean(item[1][FP4] or [math.inf])))


def draw_gaps(figure, gaps: dict[str, dict[str, list[float]]], reference: str):
    """ A row for each label of last_gaps(): a dot for each run, and a bar at their mean. """
    figure.set_size_inches(8, 1.2 + 0.25 * len(gaps))
    ax = figure.subplots()
    filled, hollow = {"color": COLOURS[1]}, {"color": COLOURS[2], "fillstyle": "none"}
    for column, kind, shift, look in ((FP4, "fp4 forward", -0.15, filled),
                                      (BF16, "bf16 forward", 0.15, hollow)):
        for row, values in enumerate(of[column] for of in gaps.values()):
            ax.plot(values, [row + shift] * len(values), "o", **look)
            if values:
                ax.plot(fmean(values), row + shift, "|", markersize=10, **look)
        ax.plot([], [], "o", label=kind, **look)
    ax.plot([], [], "|", color="grey", markersize=10, label="mean")
    ax.axvline(0, color="grey", linewidth=0.8)
    ax.set_yticks(range(len(gaps)), list(gaps))
    ax.invert_yaxis()
    ax.set(title=f"last validation loss minus that of {reference}", xlabel="nats per token")
    ax.legend()


# -----------------------------------------------------------------------------
# the two uses


def compare(folders: list[Path], to: Path | None):
    """ A table and a figure of any runs, and of those of sweeps. """
    runs = [read_run(path) for folder in folders for path in runs_in(folder)]
    if len({run.name for run in runs}) < len(runs):
        runs = [replace(run, name=str(run.folder)) for run in runs]
    print(table(runs), end="\n\n")
    draw(runs, to or runs[0].folder.parent)


def results(root: Path):
    """ The README of a folder of experiments, between BEGIN and END, and the figures. """
    before, begin, rest = (root / "README.md").read_text(encoding="utf-8").partition(BEGIN)
    old, end, after = rest.partition(END)
    need(begin and end, f"{root / 'README.md'} needs these two lines, in this order: {BEGIN} and {END}")
    sections = [LEGEND]
    for about in sorted(root.glob("*/about.md")):
        folder = about.parent
        runs = [read_run(config.parent) for config in sorted(folder.glob("*/config.json"))]
        if runs:
            draw(runs, folder)
            # a log begins with torch, device and code, and ends with the back end
            logs = "".join((run.folder / "log.txt").read_text(errors="replace") for run in runs)
            made = re.findall(r"^(torch .+, (?:code|commit) \S+), run |^(backend: \w+)$", logs, re.MULTILINE)
            sections += [f"## {folder.name}", about.read_text(encoding="utf-8").strip(), table(runs),
                         f"By the logs: {'; '.join(sorted({a or b for a, b in made}))}.",
                         f"![these runs]({folder.name}/compare.png)"]
    text = "\n\n".join([before + begin, *sections, end + after])
    (root / "README.md").write_text(text, encoding="utf-8", newline="\n")
    print(f"wrote {root / 'README.md'}")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools.plot", description="Tables and figures of runs.")
    parser.add_argument("runs", type=Path, nargs="*", help="folders of runs or of a sweep")
    parser.add_argument("--to", type=Path, help="folder of the figure (where the first run's folder lies)")
    parser.add_argument("--results", type=Path, help="write tables and figures of this folder of experiments")
    args = parser.parse_args(argv)
    try:
        need(bool(args.runs) != bool(args.results), "type folders of runs, or --results=results alone")
        if args.results:
            results(args.results)
        else:
            compare(args.runs, args.to)
        return 0
    except ConfigError as error:
        line = str(error)
    except OSError as error:
        line = f"{error.filename or 'cannot write'}: {error.strerror}"
    print(f"error: {line}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

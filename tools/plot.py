"""
Figures and tables from the folders of runs. Every number comes from a metrics.csv, none is typed.

    python plot.py out/bf16-s1 out/tetrajet_full-s1   compare runs with the first of them: print a table and
                                                      write out/compare.png and .svg; --to=DIR for elsewhere
    python plot.py out/quickstart                     compare all runs of a sweep, each with the bf16 run of
                                                      its seed; many names by their last gaps alone
    python plot.py --results=results                  write the tables of results/README.md and the figures

What --results reads and writes:

    results/README.md                        between the comments BEGIN and END below; the rest is left alone
    results/<experiment>/about.md            read: a paragraph of what, why, command, commit, GPU, corpus
    results/<experiment>/<run>/              read: config.json, metrics.csv, log.txt, as train.py left them
    results/<experiment>/compare.png, .svg   written
    results/bench_*/                         left alone: what bench.py measured, which no run trained

Runs that differ in nothing but the seed share a row of the table: mean +- standard deviation. The same runs
give the same bytes, so that a diff of results/ shows what changed and nothing else.

Left out on purpose: smoothing and interpolation. Losses are subtracted only where both runs measured one.
"""
import argparse
import json
import math
import re
import sys
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from statistics import fmean, stdev

BEGIN = "<!-- tables: `python plot.py --results=results` writes from here ... -->"
END = "<!-- ... to here -->"
LEGEND = """\
`+-` is the standard deviation over seeds, with n - 1. Losses are validation losses in nats per token: with
the fp4 forward, rounded as in training, and with the bf16 forward, the same weights unrounded. The gap is the
loss with the fp4 forward minus that of the bf16 run of the same seed. Tokens are those of one run; tokens/s
is the mean over runs of what train.py logged, which leaves evaluation out."""
FP4, BF16 = "val_loss_fp4", "val_loss_bf16"

# knobs that say where a run lies, how it was interrupted and how often it wrote, not what it computed
IDLE = "out|name|seed|overwrite|stop_at|dry_run|log_every|eval_every|save_every|sample_tokens|wandb"
# what else may differ between a run and the bf16 run that it is compared with
PRECISION = ("recipe|quantizers|keep|keep_last|bf16_forward|rotate|rotate_size|block_.|scale_rule|backward|"
             "outer|align|outlier_.*|osci|osci_.*|backend|device|parallel|compile|recompute|micro_batch")

# title; unit of y; what y shows: 0 (zero, gap), all but the first losses (late, gap); kind of curve -> column
PANELS = (
    ("training and validation loss", "nats per token", "late",
     {"training": "train_loss", "fp4 forward": FP4, "bf16 forward": BF16}),
    ("validation loss minus that of {}", "nats per token", "gap", {"fp4 forward": FP4, "bf16 forward": BF16}),
    ("OsciReset", "number per window", "zero",
     {"flips": "osci_flips", "reversals": "osci_reversals", "resets": "osci_reset"}),
    ("speed, mean since the run was started or continued", "tokens/s", "zero", {"speed": "tokens_per_s"}),
)
DASHED, DOTTED = {"linestyle": (0, (4, 2))}, {"linestyle": (0, (1, 1.5))}
STYLES = {"training": {"linewidth": 0.7, "alpha": 0.5, "marker": ""}, "speed": {"marker": ""},
          "bf16 forward": DASHED | {"fillstyle": "none"}, "reversals": DASHED, "resets": DOTTED}
# Okabe and Ito's, which colour-blind readers tell apart, without the yellow, which is too pale for a line
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "os^DvP*X"      # one more than colours, so that the pairs repeat only after 56
MANY = 14                 # curves of more names hide each other: then the last gaps are drawn, and no more


class PlotError(ValueError):
    """ A mistake of the user's, told in one line. """


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


def read(path: Path, hint: str = "it is not the folder of a run") -> str:
    if not path.parent.is_dir():
        raise PlotError(f"there is no folder {path.parent}")
    if not path.is_file():
        raise PlotError(f"{path.parent} has no {path.name}: {hint}")
    return path.read_text(encoding="utf-8", errors="replace")


def subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] not in "._")


def runs_in(folder: Path) -> list[Path]:
    """ The folder of a run, or those in the folder of a sweep. """
    if folder.is_dir() and not (folder / "config.json").exists():
        return [path for path in subfolders(folder) if (path / "config.json").is_file()] or [folder]
    return [folder]


def read_rows(path: Path) -> list[dict]:
    """ metrics.csv. A torn last row, of a run that was killed or is just writing, is skipped with a note. """
    text = read(path)
    head, *lines = text.splitlines() or [""]
    columns, rows = head.split(","), []
    if not {"step", "tokens"} <= set(columns):
        raise PlotError(f"{path}: the first line does not name the columns step and tokens")
    for number, line in enumerate(lines, 2):
        try:
            row = {name: float(cell) for name, cell in zip(columns, line.split(","), strict=True) if cell}
        except ValueError:
            row = {}
        last = number == len(lines) + 1
        # without its newline, a last number may be cut short and still be a number
        if {"step", "tokens"} <= row.keys() and not (last and not text.endswith("\n")):
            rows.append(row)
        elif last:
            print(f"note: {path}: the last row is torn, and skipped", file=sys.stderr)
        else:
            raise PlotError(f"{path}, line {number}: a torn row; delete it")
    return rows


# the knobs that are looked at one by one
NEEDED = {"seed": int, "steps": int, "batch_tokens": int, "recipe": str}


def read_run(folder: Path) -> Run:
    path = folder / "config.json"
    text = read(path)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):        # no JSON, a number of 5,000 digits; too deep
        config = None
    if (not isinstance(config, dict) or any(type(config.get(k)) is not kind for k, kind in NEEDED.items())
            or max(config["steps"], config["batch_tokens"]) > 10**15):
        raise PlotError(f"{path} is not the config of a run")
    name = folder.resolve().name.encode("utf-8", "replace").decode()
    return Run(folder, name, config, read_rows(folder / "metrics.csv"))


# -----------------------------------------------------------------------------
# tables


def key(run: Run, but: str) -> str:
    """ The run's config without the knobs that match `but`: equal for runs that may be compared. """
    return json.dumps({k: v for k, v in run.config.items() if not re.fullmatch(but, k)}, sort_keys=True)


def recipes(runs: list[Run]) -> dict[str, list[Run]]:
    """ Label -> runs that differ in the seed only; bf16 first. The label is their name without the seed. """
    groups = {}
    for run in sorted(runs, key=lambda run: (run.config["recipe"] != "bf16", run.name)):
        groups.setdefault(key(run, IDLE), []).append(run)
    stems = [dict.fromkeys(re.sub(rf"[-_]s{run.config['seed']}(?=[-_]|$)", "", run.name) for run in group)
             for group in groups.values()]
    # two groups of one label keep their runs' whole names
    return {" / ".join(stem if stems.count(stem) == 1 else [run.name for run in group]): group
            for stem, group in zip(stems, groups.values())}


def bf16_of(run: Run, runs: list[Run]) -> dict[int, Run]:
    """ seed -> the bf16 run that differs from this run in nothing but precision and seed. """
    return {other.config["seed"]: other for other in runs if other.config["recipe"] == "bf16"
            and key(other, f"{IDLE}|{PRECISION}") == key(run, f"{IDLE}|{PRECISION}")}


def markdown(rows: list[list[str]]) -> str:
    """ A table, the first row its head, whose columns also line up in a terminal. """
    rows = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return "\n".join("| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows)


def spread(values: list[float], sign: str = "") -> str:
    """ mean +- sd; one value stands alone, and "-" for none. sign "+" writes the plus of a gap. """
    if not values:
        return "-"
    # + 0.0 makes 0.0 of -0.0, which would print as -0.0000
    mean = f"{round(fmean(values), 4) + 0.0:{sign}.4f}"
    # stdev() of an inf is a traceback
    return mean + (f" +- {stdev(values):.4f}" if len(values) > 1 and all(map(math.isfinite, values)) else "")


def head(first: list[str], base: str) -> list[str]:
    return [*first, "val loss, fp4 forward", "val loss, bf16 forward", f"gap to {base}", "tokens", "tokens/s"]


def cells(runs: list[Run], gap: str) -> list[str]:
    """ The cells below head() of runs of one config, each as it was last evaluated. """
    rows, config = [run.last() for run in runs if run.last()], runs[0].config
    # bf16 rounds nothing, so it has no FP4 forward to report
    fp4 = spread([row[FP4] for row in rows if config["recipe"] != "bf16"])
    done, whole = rows[0]["tokens"] if rows else 0, config["steps"] * config["batch_tokens"]
    tokens = f"{done:,.0f}" + ("" if done == whole else f" of {whole:,}")
    speeds = [list(curve.values())[-1] for run in runs if (curve := run.curve("tokens_per_s"))]
    # three digits: the fourth is noise
    speed = f"{float(f'{fmean(speeds):.3g}'):,.0f}" if speeds else "-"
    return [fp4, spread([row[BF16] for row in rows]), gap, tokens, speed]


def compare_table(lines: list[tuple[str, Run, Run | None]], reference: str) -> str:
    """ A row per run; its gap is to its base after as many tokens. """
    rows = [head(["run"], reference)]
    for _, run, base in lines:
        gaps = run.minus(base, FP4)
        gap = spread([gaps[t] for t in [run.last().get("tokens")] if t in gaps], "+")
        rows.append([run.name, *cells([run], "0" if run is base else gap)])
    return markdown(rows)


def gap_to_bf16(runs: list[Run], base: dict[int, Run]) -> str:
    """ Seed by seed where both have it, so that what a seed does to both is no part of the deviation. """
    if not base or runs[0] in base.values():
        return "0" if base else "-"
    pairs = [run.last()[FP4] - base[seed].last()[FP4] for run in runs if (seed := run.config["seed"]) in base]
    if not pairs:
        here, there = (fmean(run.last()[FP4] for run in side) for side in (runs, base.values()))
        return spread([here - there], "+") + " (other seeds)"
    return spread(pairs, "+") + (f" (n={len(pairs)})" if len(pairs) < len(runs) else "")


def results_table(finished: list[Run]) -> str:
    """ A row per recipe. """
    rows = [head(["recipe", "seeds"], "bf16")]
    for label, runs in recipes(finished).items():
        if len({run.config["seed"] for run in runs}) < len(runs):
            raise PlotError(f"{', '.join(str(run.folder) for run in runs)}: one config, and one seed twice: "
                            "not independent, so keep one of the two")
        rows.append([label, f"n={len(runs)}", *cells(runs, gap_to_bf16(runs, bf16_of(runs[0], finished)))])
    return markdown(rows)


# -----------------------------------------------------------------------------
# figures


def draw_panel(ax, panel: tuple, looks: dict[str, dict], unit: float, late: float):
    """ looks: label -> colour and marker; unit: tokens in a unit of x; late: tokens where y must fit. """
    title, y_unit, scale, curves = panel
    for kind, label, curve in curves:
        ax.plot([tokens / unit for tokens in curve], list(curve.values()),
                markevery=len(curve) // 15 + 1, **looks[label] | STYLES.get(kind, {}))
    for kind in dict.fromkeys(kind for kind, _, _ in curves):
        ax.plot([], [], color="grey", label=kind, **STYLES.get(kind, {}))
    if scale in ("late", "gap"):
        # the first losses would press the rest into a flat line
        shown = [y for _, _, curve in curves for x, y in curve.items() if x >= late and math.isfinite(y)]
        shown += [0.0] if scale == "gap" or not shown else []
        margin = 0.06 * (max(shown) - min(shown)) or 0.01
        ax.set_ylim(min(shown) - margin, max(shown) + margin)
        ax.axhline(0, color="grey", linewidth=0.8)
    else:
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.set(title=title, ylabel=y_unit)
    ax.legend()


def plain(name: str) -> str:
    """ As matplotlib shows it unchanged: $ would begin mathematics. """
    return name.replace("$", r"\$")


def last_gaps(lines: list[tuple[str, Run, Run | None]]) -> dict[str, dict[str, list[float]]]:
    """
    Label -> column -> the gap of each of its runs, nan where training or the base's has not got there, or has
    diverged; the label with the smallest mean first. That of the bases is left out.
    """
    found = {}
    for label, run, base in lines:
        end = run.last()["tokens"] if run.finished() else math.inf
        for column in (FP4, BF16) if run is not base else ():
            gap = run.minus(base, column).get(end, math.nan)
            found.setdefault(label, {}).setdefault(column, []).append(gap if math.isfinite(gap) else math.nan)
    return dict(sorted(found.items(), key=lambda item: finite_mean(item[1][FP4])))


def finite_mean(values: list[float]) -> float:
    """ Of those that are numbers; inf if none is. """
    return fmean([x for x in values if x == x] or [math.inf])


def draw_gaps(figure, gaps: dict[str, dict[str, list[float]]], reference: str):
    """ A row for each label of last_gaps(): a dot for each run, and a bar at their mean. """
    figure.set_size_inches(8, 1.2 + 0.25 * len(gaps))
    ax, names = figure.subplots(), []
    looks = {FP4: ("fp4 forward", -0.15, {"color": COLOURS[1]}),
             BF16: ("bf16 forward", 0.15, {"color": COLOURS[2], "fillstyle": "none"})}
    for row, (label, by_column) in enumerate(gaps.items()):
        for column, (_, shift, look) in looks.items():
            values = by_column[column]
            ax.plot(values, [row + shift] * len(values), "o", **look)
            if finite_mean(values) < math.inf:
                ax.plot(finite_mean(values), row + shift, "|", markersize=10, **look)
        runs, there = len(by_column[FP4]), sum(x == x for x in by_column[FP4])
        names.append(plain(label if len(label) <= 40 else label[:39] + "\u2026")
                     + (f", {there} of {runs}" if there < runs else ""))
    for kind, _, look in looks.values():
        ax.plot([], [], "o", label=kind, **look)
    ax.plot([], [], "|", color="grey", markersize=10, label="mean")
    ax.axvline(0, color="grey", linewidth=0.8)
    ax.set_yticks(range(len(gaps)), names)
    ax.invert_yaxis()
    ax.set(title=f"last validation loss minus that of {plain(reference)}", xlabel="nats per token")
    ax.legend()


def draw_curves(figure, lines: list[tuple[str, Run, Run | None]], reference: str):
    """ The PANELS that have a curve, one above the other; a label has one colour. """
    found = []
    for title, y_unit, scale, kinds in PANELS:
        curves = [(kind, label, run.minus(base, column) if scale == "gap" else run.curve(column))
                  for kind, column in kinds.items() for label, run, base in lines]
        # a figure has one panel at least
        if not found or any(curve for _, _, curve in curves):
            found.append((title.format(plain(reference)), y_unit, scale, curves))
    labels = dict.fromkeys(label for label, _, _ in lines)
    looks = {label: {"color": c, "marker": m} for label, c, m in zip(labels, cycle(COLOURS), cycle(MARKERS))}
    tokens = max(run.rows[-1]["tokens"] for _, run, _ in lines)
    unit, word = (1e9, "billions") if tokens >= 1e9 else (1e6, "millions")
    figure.set_size_inches(8, 0.8 + 2.4 * len(found) + 0.1 * len(labels))
    axes = figure.subplots(len(found), sharex=True, squeeze=False)[:, 0]
    for ax, panel in zip(axes, found):
        draw_panel(ax, panel, looks, unit, tokens / 10)
    axes[-1].set_xlabel(f"training tokens, {word}")
    handles = [axes[0].plot([], [], label=plain(label), **look)[0] for label, look in looks.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=2)


def draw(lines: list[tuple[str, Run, Run | None]], reference: str, folder: Path):
    """ compare.png and compare.svg of (label, run, the run that its gap is to). """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotError("figures need matplotlib: type pip install matplotlib")
    # a matplotlibrc of the user's would change the bytes, and so would an SVG's random ids without a salt
    matplotlib.rcdefaults()
    matplotlib.rcParams.update({
        "svg.hashsalt": "compare", "axes.titlelocation": "left", "axes.titlesize": "medium",
        "axes.grid": True, "grid.alpha": 0.25, "legend.fontsize": "small", "lines.markersize": 4})
    figure, gaps = Figure(layout="constrained"), last_gaps(lines)
    if len(gaps) > MANY and any(finite_mean(gap[FP4]) < math.inf for gap in gaps.values()):
        draw_gaps(figure, gaps, reference)
    else:
        draw_curves(figure, lines, reference)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "compare.png", dpi=120, metadata={"Software": None})
    figure.savefig(folder / "compare.svg", metadata={"Date": None, "Creator": None})
    print(f"wrote {folder / 'compare.png'} and .svg")


# -----------------------------------------------------------------------------
# the two uses


SAME_SEED = "the bf16 run of the same seed"


def by_seed(runs: list[Run]) -> list[tuple[str, Run, Run | None]]:
    """ (label, run, the bf16 run of its seed), for draw(). """
    return [(label, run, bf16_of(run, runs).get(run.config["seed"]))
            for label, members in recipes(runs).items() for run in members]


def compare(folders: list[Path], to: Path | None):
    """ Any runs, with the first of them; those of a sweep, if it has bf16 runs, with that of their seed. """
    runs = [read_run(path) for folder in folders for path in runs_in(folder)]
    for run in runs:
        if not run.rows:
            raise PlotError(f"{run.folder / 'metrics.csv'} has no rows: the run has logged nothing yet")
    if len({run.name for run in runs}) < len(runs):
        runs = [replace(run, name=str(run.folder)) for run in runs]
    lines, reference = by_seed(runs), SAME_SEED
    if len(folders) > 1 or all(base in (None, run) for _, run, base in lines):
        lines, reference = [(run.name, run, runs[0]) for run in runs], runs[0].name
    print(compare_table(lines, reference), end="\n\n")
    draw(lines, reference, to or runs[0].folder.parent)


def experiment(folder: Path) -> tuple[str, list]:
    """ What README.md says of an experiment, and the lines of its figure. """
    about = read(folder / "about.md", "write what, why, command, commit, GPU and corpus in a paragraph")
    runs = [read_run(path) for path in subfolders(folder)]
    begun, done = [run for run in runs if run.rows], [run for run in runs if run.finished()]
    parts = [f"## {folder.name}", about.strip()]
    if done:
        # a log begins with torch, device and commit, and ends with the back end
        logs = "".join(read(run.folder / "log.txt") for run in done)
        made = re.findall(r"^(torch .+, commit \S+), run |^(backend: \w+)$", logs, re.MULTILINE)
        parts += [results_table(done), f"By the logs: {'; '.join(sorted({a or b for a, b in made}))}."]
    cut = [f"{run.name} ({run.rows[-1]['step'] if run.rows else 0:,.0f} of {run.config['steps']:,} steps)"
           for run in runs if run not in done]
    if cut:
        parts.append(f"Unfinished, so not in the table: {', '.join(cut)}.")
    if begun:
        parts.append(f"![these runs]({folder.name}/compare.png)")
    return "\n\n".join(parts), by_seed(begun)


def results(root: Path):
    """ All experiments; nothing is written before everything is read. """
    readme = root / "README.md"
    try:
        text = readme.read_text(encoding="utf-8") if readme.exists() else f"# Results\n\n{BEGIN}\n{END}\n"
    except UnicodeDecodeError:
        # replacing what cannot be read would lose it when the file is written again
        raise PlotError(f"{readme} is not UTF-8: convert it") from None
    before, _, rest = text.partition(BEGIN)
    if text.count(BEGIN) != 1 or rest.count(END) != 1:
        raise PlotError(f"{readme} needs these two lines, once each and in this order: {BEGIN} and {END}")
    # bench.py and sweep.py leave tables of their own; a sweep's runs join when somebody adds their folders
    # and about.md
    found = {folder: experiment(folder) for folder in subfolders(root)
             if not folder.name.startswith("bench_")
             and ((folder / "about.md").exists() or not (folder / "runs.csv").exists())}
    for folder, (_, lines) in found.items():
        if lines:
            draw(lines, SAME_SEED, folder)
    sections = [section for section, _ in found.values()]
    text = "\n\n".join([before + BEGIN, LEGEND, *sections, END + rest.partition(END)[2]])
    readme.write_text(text, encoding="utf-8", newline="\n")
    print(f"wrote {readme}")


class Parser(argparse.ArgumentParser):
    """ One whose complaint is one line, as every other is here. """

    def error(self, message: str):
        raise PlotError(f"{message}; see plot.py --help")


def main(argv: list[str] | None = None):
    from config import folder_name      # the rest of this file works without any other of ours
    parser = Parser(description="Figures and tables of runs.", allow_abbrev=False)
    parser.add_argument("runs", type=Path, nargs="*",
                        help="folders of runs or of a sweep, compared with the first run")
    parser.add_argument("--to", type=folder_name,
                        help="folder for the figure (where the first run's folder lies)")
    parser.add_argument("--results", type=folder_name,
                        help="write tables and figures of this folder of experiments")
    try:
        args = parser.parse_args(argv)
        if args.results and not args.runs and not args.to:
            results(args.results)
        elif args.runs and not args.results:
            compare(args.runs, args.to)
        else:
            raise PlotError("type folders of runs, as out/A out/B --to=DIR, or --results=results alone")
    except PlotError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        raise SystemExit(130)
    except OSError as error:        # a full disk names no file
        print(f"error: {error.filename or 'cannot write'}: {error.strerror}; make room or way for it, or "
              "type --to=DIR", file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    from config import script
    script(main)

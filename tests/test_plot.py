""" plot.py: numbers that a hand computes too, files that are not as they should be, the same bytes twice. """
import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import data
import plot
import train
from config import KINDS, Config

ROOT = Path(__file__).resolve().parent.parent
STEPS, EVALS, BATCH = 40, (20, 40), 100
LOG = "torch 9.9.0, Some GPU, commit abc1234, run out/x\nstep 0/40  loss 5\nbackend: emulate\ntokens: 9\n"


def make(folder: Path, loss: float | None = 3.0, bf16: float | None = None, evals=EVALS, logged: int = STEPS,
         osci: bool = False, speed: float = 1000.0, **knobs) -> Path:
    """
    A run's folder, without a run. loss: the last validation loss with the fp4 forward, 1 more at each earlier
    evaluation; bf16: the same, with the bf16 forward; logged: the step that the rows stop before.
    """
    cfg = Config(**{"recipe": "bf16", "steps": STEPS, "batch_tokens": BATCH, "name": folder.name} | knobs)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(cfg.to_dict()))
    (folder / "log.txt").write_text(LOG)
    with open(folder / "metrics.csv", "w", newline="") as f:
        table = csv.DictWriter(f, train.COLUMNS, lineterminator="\n")
        table.writeheader()
        for step in sorted({*range(0, logged, 5), *(s for s in evals if s <= logged)}):
            row = {"step": step, "tokens": step * BATCH, "seconds": step / 10}
            if step < STEPS:
                row |= {"train_loss": 6 - step / 20, "tokens_per_s": speed if step == STEPS - 5 else 1.0}
            if step in evals:
                more = sum(other > step for other in evals)
                row |= {"val_loss_fp4": loss + more, "val_loss_bf16": (bf16 or loss) + more}
            if osci and step == 30:
                row |= {"osci_flips": 70, "osci_reversals": 5, "osci_reset": 0}
            table.writerow(row)
    return folder


@pytest.fixture
def experiment(tmp_path) -> Path:
    folder = tmp_path / "results" / "nano"
    folder.mkdir(parents=True)
    (folder / "about.md").write_text("What and why.\n")
    return folder


def cells(markdown: str) -> dict[str, list[str]]:
    """ The first cell of a table's rows -> the others. """
    lines = [line.strip("| ").split("|") for line in markdown.splitlines() if line.startswith("|")]
    return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines[2:]}


def table(experiment: Path) -> dict[str, list[str]]:
    return cells(plot.experiment(experiment)[0])


def fails(capsys, *argv) -> str:
    """ The one line that a mistake prints. """
    with pytest.raises(SystemExit) as end:
        plot.main([str(arg) for arg in argv])
    assert end.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


# -----------------------------------------------------------------------------
# numbers

def test_the_table_is_what_a_hand_computes(experiment):
    """
    Catches: sd with n instead of n - 1, the sd of unpaired differences (0.13 here), a gap with the wrong sign
    or forward, an evaluation that is not the last, tokens/s that is not the last logged or not a mean.
    """
    for seed, loss, speed in ((1, 3.0, 1000), (2, 3.1, 2000), (3, 3.2, 6000)):
        make(experiment / f"bf16-s{seed}", loss, seed=seed, speed=speed)
    for seed, loss, bf16 in ((1, 3.05, 3.04), (2, 3.17, 3.14), (3, 3.22, 3.24)):
        make(experiment / f"full-s{seed}", loss, bf16, seed=seed, recipe="tetrajet_full", osci="full")
    # gaps 0.05 0.07 0.02: mean 0.14/3; squared distances sum to 0.0038/3, half of it is 0.02517^2
    # losses 3.05 3.17 3.22: mean 9.44/3; squares sum to 0.0458/3, half of it is 0.08737^2
    assert table(experiment) == {
        "bf16": ["n=3", "-", "3.1000 +- 0.1000", "0", "4,000", "3,000"],
        "full": ["n=3", "3.1467 +- 0.0874", "3.1400 +- 0.1000", "+0.0467 +- 0.0252", "4,000", "1,000"],
    }


def test_one_seed_has_no_deviation(experiment):
    """ Catches: +- 0.0000 or +- nan where nothing was measured, and a gap that rounds to -0.0000. """
    make(experiment / "bf16-s1", 3.0)
    make(experiment / "full-s1", 2.99999, recipe="tetrajet_full")
    text = plot.experiment(experiment)[0]
    assert cells(text)["full"][:4] == ["n=1", "3.0000", "3.0000", "+0.0000"] and "+-" not in text


def test_gaps_are_between_the_same_seeds(experiment):
    """ Catches: pairs by position, and a number of pairs that is taken for the number of seeds. """
    for seed, loss in ((1, 3.0), (2, 9.0), (3, 3.2)):
        make(experiment / f"full-s{seed}", loss, seed=seed, recipe="tetrajet_full")
    assert table(experiment)["full"][3] == "-"
    make(experiment / "bf16-s4", 4.0, seed=4)
    assert table(experiment)["full"][3] == "+1.0667 (other seeds)"
    for seed, loss in ((3, 3.0), (1, 2.9)):
        make(experiment / f"bf16-s{seed}", loss, seed=seed)
    assert table(experiment)["full"][3] == "+0.1500 +- 0.0707 (n=2)"


def test_the_bf16_run_is_one_of_the_same_training(experiment):
    """ Catches: a gap to a run with another learning rate, and none for a knob that does not matter. """
    make(experiment / "bf16-lr1-s1", 3.0, lr=1e-3)
    make(experiment / "bf16-lr2-s1", 5.0, lr=2e-3)
    make(experiment / "full-lr2-s1", 5.5, lr=2e-3, recipe="tetrajet_full", osci="topk", osci_tau=2.0,
         outlier_frac=0.1, micro_batch=1, recompute=True, wandb=True, out="elsewhere", log_every=7,
         eval_every=3)
    make(experiment / "full-lr3-s1", 5.5, lr=3e-3, recipe="tetrajet_full")
    assert [row[3] for row in table(experiment).values()] == ["0", "0", "+0.5000", "-"]


def test_runs_share_a_row_only_if_only_the_seed_differs(experiment):
    """ Catches: names that decide what is averaged, and two groups of one label of which one gets lost. """
    make(experiment / "bf16-s1", 3.0, seed=1, lr=1e-3)
    make(experiment / "bf16-s2", 4.0, seed=2, lr=2e-3)
    make(experiment / "first", 5.0, recipe="tetrajet_base", seed=1)
    make(experiment / "second", 6.0, recipe="tetrajet_base", seed=2, stop_at=7, save_every=9, out="x")
    make(experiment / "full-s100-s1", 6.0, recipe="tetrajet_full", seed=1)
    make(experiment / "full-s100-s12", 6.0, recipe="tetrajet_full", seed=12)
    rows = table(experiment)
    assert {label: row[0] for label, row in rows.items()} == {
        "bf16-s1": "n=1", "bf16-s2": "n=1", "first / second": "n=2", "full-s100": "n=2"}
    assert rows["first / second"][2] == "5.5000 +- 0.7071"


def test_a_seed_counts_once(experiment, capsys):
    """ Catches: a copied folder that halves the deviation. """
    make(experiment / "bf16-s1", 3.0)
    make(experiment / "bf16-again", 3.0)
    assert "bf16-again" in fails(capsys, f"--results={experiment.parent}")


def test_unfinished_runs_are_listed_and_not_averaged(experiment):
    """ Catches: a run that died and is hidden, or counted with a loss of half-way. """
    make(experiment / "bf16-s1", 3.0)
    make(experiment / "bf16-s2", 9.0, seed=2, logged=23)
    make(experiment / "bf16-s3", 9.0, seed=3, evals=())
    make(experiment / "full-s1", recipe="tetrajet_full", evals=(), logged=0)
    text, lines = plot.experiment(experiment)
    assert cells(text) == {"bf16": ["n=1", "-", "3.0000", "0", "4,000", "1,000"]}
    assert ("Unfinished, so not in the table: bf16-s2 (20 of 40 steps), bf16-s3 (35 of 40 steps), "
            "full-s1 (0 of 40 steps).") in text
    assert len(lines) == 3
    for seed in (1, 2, 3):
        shutil.rmtree(experiment / f"bf16-s{seed}")
    plot.main([f"--results={experiment.parent}"])
    text = (experiment.parent / "README.md").read_text()
    assert "full-s1 (0 of 40 steps)" in text and "|" not in text and "compare.png" not in text


def test_the_folders_of_bench_are_no_experiments(experiment):
    """ Catches: a benchmark's folder, with no about.md and no runs, that ends the writing of all tables. """
    make(experiment / "bf16-s1")
    (experiment.parent / "bench_linear").mkdir()
    plot.main([f"--results={experiment.parent}"])
    text = (experiment.parent / "README.md").read_text()
    assert f"## {experiment.name}" in text and "bench_linear" not in text


def test_commit_and_device_come_from_the_logs(experiment):
    """ Catches: a table that hides that its rows were made by two commits, or on two GPUs. """
    make(experiment / "bf16-s1")
    other = make(experiment / "bf16-s2", seed=2)
    (other / "log.txt").write_text(LOG.replace("abc1234", "def5678+"))
    assert ("By the logs: backend: emulate; torch 9.9.0, Some GPU, commit abc1234; "
            "torch 9.9.0, Some GPU, commit def5678+.") in plot.experiment(experiment)[0]


def test_comparison_is_at_equal_tokens(tmp_path):
    """ Catches: the loss of a run that is still young minus the last loss of the reference. """
    runs = [make(tmp_path / "a", 3.0),
            make(tmp_path / "b", 2.5, 2.4, recipe="tetrajet_base", evals=(20,), logged=23),
            make(tmp_path / "c", 2.5, recipe="tetrajet_base", evals=(30,)), make(tmp_path / "d", evals=())]
    a, b, c, d = runs = [plot.read_run(folder) for folder in runs]
    assert b.minus(a, "val_loss_fp4") == {2000: -1.5} and c.minus(a, "val_loss_fp4") == {}
    assert a.minus(a, "val_loss_fp4") == {}, "a run has no distance from itself to draw"
    assert cells(plot.compare_table([(run.name, run, a) for run in runs], "a")) == {
        "a": ["-", "3.0000", "0", "4,000", "1,000"],
        "b": ["2.5000", "2.4000", "-1.5000", "2,000 of 4,000", "1"],
        "c": ["2.5000", "2.5000", "-", "3,000 of 4,000", "1,000"],
        "d": ["-", "-", "-", "0 of 4,000", "1,000"],
    }


# -----------------------------------------------------------------------------
# what runs, kills and people do to files

@pytest.mark.parametrize("tail", ["4", "45,4500,9", "45,4500,9.1\n", "\0\0\0",
                                  "45,4500" + "," * (len(train.COLUMNS) - 2) + "0.12"])
def test_a_torn_last_row_is_skipped_with_a_note(tmp_path, capsys, tail):
    """ Catches: a crash beside a run that is writing, and 0.12 taken for the 0.1234 it was to become. """
    folder = make(tmp_path / "a", 3.0)
    whole = plot.read_rows(folder / "metrics.csv")
    assert whole[-1]["step"] == STEPS and not capsys.readouterr().err
    with open(folder / "metrics.csv", "a") as f:
        f.write(tail)
    assert plot.read_rows(folder / "metrics.csv") == whole
    assert capsys.readouterr().err == f"note: {folder / 'metrics.csv'}: the last row is torn, and skipped\n"


def test_a_run_whose_end_is_torn_is_not_finished(experiment):
    """ Catches: a last validation loss that lost its digits in a table of results. """
    metrics = make(experiment / "bf16-s1", 3.25) / "metrics.csv"
    text = metrics.read_text()
    metrics.write_text(text[:text.rindex("3.25") + 3])
    assert "bf16-s1 (35 of 40 steps)" in plot.experiment(experiment)[0]


def break_row(folder):
    lines = (folder / "metrics.csv").read_text().splitlines(keepends=True)
    (folder / "metrics.csv").write_text("".join(lines[:3] + ["10,10"] + lines[3:]))


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("spoil, says", [
    (shutil.rmtree, "there is no folder {folder}"),
    (lambda folder: (folder / "metrics.csv").unlink(), "{folder} has no metrics.csv"),
    (lambda folder: (folder / "config.json").unlink(), "{folder} has no config.json"),
    (lambda folder: (folder / "config.json").write_text('{"seed": 1'), "is not the config of a run"),
    (lambda folder: (folder / "config.json").write_text("[1]"), "is not the config of a run"),
    (lambda folder: (folder / "config.json").write_text('{"seed": 1}'), "is not the config of a run"),
    (lambda folder: (folder / "config.json").write_text("[" * 100_000), "is not the config of a run"),
    (lambda folder: (folder / "config.json").write_text("9" * 5_000), "is not the config of a run"),
    (lambda folder: change_config(folder, steps="many"), "is not the config of a run"),
    (lambda folder: change_config(folder, batch_tokens=None), "is not the config of a run"),
    (lambda folder: change_config(folder, seed=[]), "is not the config of a run"),
    (lambda folder: change_config(folder, recipe={}), "is not the config of a run"),
    (lambda folder: (folder / "metrics.csv").write_text(",".join(train.COLUMNS) + "\n"), "has no rows"),
    (lambda folder: (folder / "metrics.csv").write_text(""), "does not name the columns step and tokens"),
    (lambda folder: (folder / "metrics.csv").write_text("step,loss\n1,2\n"), "does not name the columns"),
    (break_row, "metrics.csv, line 4: a torn row; delete it"),
])
def test_mistakes_with_runs(tmp_path, capsys, spoil, says):
    """ Catches: a traceback, or a figure with a hole, for what one line can tell. """
    good, folder = make(tmp_path / "good"), make(tmp_path / "bad")
    spoil(folder)
    assert says.format(folder=folder) in fails(capsys, good, folder, f"--to={tmp_path / 'to'}")
    assert not (tmp_path / "to").exists()


def test_the_folder_of_a_sweep_is_its_runs(tmp_path, capsys):
    """ Catches: a sweep that can be plotted only by typing its runs, and its lock taken for one. """
    pytest.importorskip("matplotlib")
    for name in ("bf16-s1", "full-s1"):
        make(tmp_path / "sweep" / name)
    (tmp_path / "sweep" / "sweep.lock").write_text("")
    plot.main([str(tmp_path / "sweep")])
    out = capsys.readouterr().out
    assert "bf16-s1" in out and "full-s1" in out and (tmp_path / "sweep" / "compare.png").exists()
    (tmp_path / "empty").mkdir()
    assert "no config.json" in fails(capsys, tmp_path / "empty")


def test_the_runs_of_a_sweep_are_compared_seed_by_seed(tmp_path, capsys):
    """ Catches: gaps of seed 2 to seed 1, gaps to whatever name comes first. """
    pytest.importorskip("matplotlib")
    for seed, bf16, base in ((1, 3.0, 3.25), (2, 4.0, 4.5)):
        make(tmp_path / "sweep" / f"base-s{seed}", base, seed=seed, recipe="tetrajet_base")
        make(tmp_path / "sweep" / f"bf16-s{seed}", bf16, seed=seed)
    plot.main([str(tmp_path / "sweep")])
    out = capsys.readouterr().out
    assert "gap to the bf16 run of the same seed" in out
    assert {name: row[2] for name, row in cells(out).items()} == {
        "bf16-s1": "0", "bf16-s2": "0", "base-s1": "+0.2500", "base-s2": "+0.5000"}
    # typed one by one, they are compared with the first
    plot.main([str(tmp_path / "sweep" / name) for name in ("base-s1", "bf16-s1")])
    assert cells(capsys.readouterr().out)["bf16-s1"][2] == "-0.2500"


def test_names_that_mean_something_elsewhere(tmp_path, capsys):
    """ Catches: mathematics in a legend, where it may not parse; a name that adds a column to a table. """
    pytest.importorskip("matplotlib")
    plot.main([str(make(tmp_path / name)) for name in ("$x^$", "a|b")])
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len({line.replace(r"\|", "").count("|") for line in table}) == 1 and len(table) == 4
    assert "$x^$" in (tmp_path / "compare.svg").read_text()
    for flag in ("--to=", "--results="):
        assert "is empty; name a folder" in fails(capsys, tmp_path / "a|b", flag)


def test_a_misspelt_flag_and_a_full_disk_are_one_line(tmp_path, capsys, monkeypatch):
    """ Catches: argparse's three lines, and "[Errno 28]", which names neither the place nor a way out. """
    assert "--too" in fails(capsys, "--too=x")

    def full(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(plot, "draw", full)
    assert "No space left on device; make room" in fails(capsys, make(tmp_path / "bf16-s1"))


def test_mistakes_with_results(experiment, capsys):
    """ Catches: tables that are written half, or over a README whose markers somebody deleted. """
    run, root = make(experiment / "bf16-s1"), experiment.parent
    readme = root / "README.md"
    for text in ("mine", plot.BEGIN, plot.END + plot.BEGIN, plot.BEGIN + plot.END + plot.BEGIN + plot.END):
        readme.write_text(text)
        assert "needs these two lines" in fails(capsys, f"--results={root}")
        assert readme.read_text() == text
    readme.write_bytes(f"caf\xe9\n{plot.BEGIN}\n{plot.END}\n".encode("latin1"))
    assert "not UTF-8" in fails(capsys, f"--results={root}")
    readme.unlink()
    (run / "log.txt").unlink()
    assert "has no log.txt" in fails(capsys, f"--results={root}")
    (experiment / "about.md").unlink()
    assert "has no about.md: write what" in fails(capsys, f"--results={root}")
    assert "nowhere" in fails(capsys, f"--results={root / 'nowhere'}")
    for argv in ([], [run, f"--results={root}"], [f"--results={root}", "--to=x"]):
        assert "type folders of runs" in fails(capsys, *argv)
    assert sorted(path.name for path in root.rglob("*")) == ["bf16-s1", "config.json", "metrics.csv", "nano"]


def test_the_results_of_a_sweep_do_not_stop_the_others(experiment):
    """ Catches: `has no about.md` for the sake of a sweep, so that nobody's tables are written. """
    make(experiment / "bf16-s1")
    other = experiment.parent / "quickstart"
    other.mkdir()
    (other / "runs.csv").write_text("name,seed\n")
    plot.main([f"--results={experiment.parent}"])
    text = (experiment.parent / "README.md").read_text()
    assert "## nano" in text and "quickstart" not in text
    (other / "about.md").write_text("Why.\n")
    plot.main([f"--results={experiment.parent}"])
    assert "## quickstart" in (experiment.parent / "README.md").read_text()


def test_without_matplotlib(experiment, capsys, monkeypatch):
    """ Catches: a traceback, a table withheld that needs no matplotlib, tables without their figures. """
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)       # as if it were not installed
    run = make(experiment / "bf16-s1")
    assert "pip install matplotlib" in fails(capsys, f"--results={experiment.parent}")
    assert not (experiment.parent / "README.md").exists()
    with pytest.raises(SystemExit) as end:
        plot.main([str(run)])
    out, err = capsys.readouterr()
    assert end.value.code == 2 and "bf16-s1" in cells(out) and len(err.splitlines()) == 1


def test_importing_is_light():
    """ Catches: a heavy import at the top, and an import of ours, which would tie figures to a torch. """
    code = "import sys; old = set(sys.modules); import plot; print(*set(sys.modules) - old)"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    names = {name.split(".")[0] for name in said.stdout.split()}
    assert "plot" in names and names - {"plot"} <= sys.stdlib_module_names, names


# -----------------------------------------------------------------------------
# figures

def shown(svg: Path) -> str:
    """ The words of a figure: matplotlib writes each text as a comment beside its outlines. """
    return "\n".join(line.strip() for line in svg.read_text().splitlines() if line.strip().startswith("<!--"))


def test_panels_are_those_that_were_measured(tmp_path):
    """ Catches: an empty OsciReset panel of runs without it, a gap to itself, a run without its name. """
    pytest.importorskip("matplotlib")
    a, b = make(tmp_path / "one", 3.0), make(tmp_path / "two", 3.5, recipe="tetrajet_full", osci=True)
    plot.main([str(a)])
    words = shown(tmp_path / "compare.svg")
    assert "training and validation loss" in words and "tokens/s" in words and "-- one --" in words
    assert "OsciReset" not in words and "minus" not in words
    plot.main([str(a), str(b), f"--to={tmp_path / 'new' / 'folder'}"])
    words = shown(tmp_path / "new" / "folder" / "compare.svg")
    for text in ("OsciReset", "flips", "resets", "loss minus that of one", "-- two --", "nats per token"):
        assert text in words, text
    assert (tmp_path / "new" / "folder" / "compare.png").stat().st_size > 10_000


@pytest.mark.filterwarnings("error")
def test_figures_of_odd_runs(tmp_path, capsys):
    """ Catches: an axis that ends at infinity, no room for many names, one point, no curve, no tokens. """
    pytest.importorskip("matplotlib")
    for name, loss in (("nan", float("nan")), ("inf", float("inf"))):
        plot.main([str(make(tmp_path / "a" / name, loss, recipe="tetrajet_base"))])
    assert cells(capsys.readouterr().out)["inf"][0] == "inf"
    start = make(tmp_path / "b" / "start", evals=(), logged=1)
    plot.main([str(start)])
    (start / "metrics.csv").write_text("step,tokens,seconds\n0,0,0\n")
    plot.main([str(start)])
    long = [make(tmp_path / "c" / f"tetrajet_full-olmo2_150m-lr3e-4-s{i}", seed=i) for i in range(20)]
    plot.main([str(folder) for folder in long[: plot.MANY]])
    plot.main([str(folder) for folder in long])
    twins = [make(tmp_path / "x" / "same"), make(tmp_path / "y" / "same")]
    plot.main([str(folder) for folder in twins])
    assert {str(folder) for folder in twins} <= set(cells(capsys.readouterr().out))


def many(experiment: Path) -> Path:
    """ 15 names with seeds 1 and 2, run00 to run14; the gap of each is .03 smaller than that before it. """
    for seed, own in ((1, 0.0), (2, 5.0)):
        make(experiment / f"bf16-s{seed}", 3.0 + own, seed=seed)
        for i in range(15):
            # of run00 the second seed has the larger gap; 10 tokens earlier, all gaps are larger by 1
            make(experiment / f"run{i:02}-s{seed}", 3.5 - 0.03 * i + own * (1 if i else 1.2), seed=seed,
                 bf16=3.25 + own, evals=(20, 30, 40), recipe="tetrajet_base", osci_tau=2.0 + i)
    return experiment


def test_the_last_gaps_of_many_names(experiment):
    """
    Catches: a first gap for the last, that of an unfinished run, one seed for the mean, an order that a NaN
    upsets, a name without a gap that is left out.
    """
    many(experiment)
    for i, loss in ((13, "nan"), (4, "inf")):
        path = experiment / f"run{i:02}-s1" / "metrics.csv"
        *rows, last = path.read_text().splitlines()
        last = last.split(",")
        last[rows[0].split(",").index("val_loss_fp4")] = loss
        path.write_text("\n".join([*rows, ",".join(last)]) + "\n")
    rows = (experiment / "run03-s2" / "metrics.csv").read_text().splitlines()
    for name in ("run03-s2", "run12-s1", "run12-s2"):       # stopped at step 20
        (experiment / name / "metrics.csv").write_text("\n".join(rows[:6]) + "\n")
    section, lines = plot.experiment(experiment)
    assert cells(section)["run04"][1] == "inf"
    gaps = plot.last_gaps(lines)
    # the mean of run00, .5 and 1.5, is the largest, and the others follow their number backwards
    assert list(gaps) == [f"run{i:02}" for i in range(14, -1, -1) if i != 12] + ["run12"]
    nan = pytest.approx(float("nan"), nan_ok=True)
    fp4 = {name: gap["val_loss_fp4"] for name, gap in gaps.items()}
    assert fp4["run00"] == pytest.approx([0.5, 1.5]) and fp4["run05"] == pytest.approx([0.35, 0.35])
    assert fp4["run03"] == [pytest.approx(0.41), nan] and fp4["run12"] == [nan, nan]
    assert fp4["run13"] == [nan, pytest.approx(0.11)] and fp4["run04"] == [nan, pytest.approx(0.38)]
    assert gaps["run05"]["val_loss_bf16"] == pytest.approx([0.25, 0.25])


def test_the_figure_of_the_last_gaps():
    """ Catches: a dot in another row, or not at its gap; a mean of one seed; the best at the bottom. """
    Figure = pytest.importorskip("matplotlib.figure").Figure
    nan, figure = float("nan"), Figure()
    plot.draw_gaps(figure, {"a$b$": {"val_loss_fp4": [0.1, 0.3], "val_loss_bf16": [0.2, 0.6]},
                            "c": {"val_loss_fp4": [nan, 0.5], "val_loss_bf16": [nan, nan]},
                            "d" * 41: {"val_loss_fp4": [nan], "val_loss_bf16": [nan]}}, "bf16")
    ax, = figure.axes
    drawn = [(line.get_marker(), round(y), round(float(x), 9), line.get_fillstyle()) for line in ax.lines
             if line.get_marker() in ("o", "|") for x, y in zip(line.get_xdata(), line.get_ydata()) if x == x]
    assert drawn == [("o", 0, 0.1, "full"), ("o", 0, 0.3, "full"), ("|", 0, 0.2, "full"),
                     ("o", 0, 0.2, "none"), ("o", 0, 0.6, "none"), ("|", 0, 0.4, "none"),
                     ("o", 1, 0.5, "full"), ("|", 1, 0.5, "full")]
    names = [text.get_text() for text in ax.get_yticklabels()]
    assert names == [r"a\$b\$", "c, 1 of 2", 39 * "d" + "\u2026, 0 of 1"]
    assert ax.yaxis_inverted() and [0, 0] in [list(line.get_xdata()) for line in ax.lines]


def test_many_names_are_drawn_by_their_gaps(experiment):
    """ Catches: curves that hide each other, fourteen names without their curves, a gap to another seed. """
    pytest.importorskip("matplotlib")
    many(experiment)
    plot.main([f"--results={experiment.parent}"])
    svg = (experiment / "compare.svg").read_bytes()
    words = shown(experiment / "compare.svg")
    assert "last validation loss minus that of the bf16 run" in words and "training" not in words
    assert "-- run14 --" in words and "-- bf16 --" not in words
    (experiment / "compare.svg").unlink()
    plot.main([str(experiment)])
    assert (experiment / "compare.svg").read_bytes() == svg
    for seed in (1, 2):
        shutil.rmtree(experiment / f"run14-s{seed}")
    plot.main([str(experiment)])
    words = shown(experiment / "compare.svg")
    assert "training and validation loss" in words and "-- run13 --" in words
    for seed in (1, 2):
        shutil.rmtree(experiment / f"bf16-s{seed}")
    plot.main([str(experiment)])            # no bf16 among them: to the first, each by itself
    assert "minus that of run00-s1" in shown(experiment / "compare.svg")


def test_the_same_runs_give_the_same_bytes(experiment, tmp_path):
    """ Catches: dates and random ids in figures, an order that hashing decides, a user's matplotlibrc. """
    pytest.importorskip("matplotlib")
    for seed in (1, 2):
        make(experiment / f"bf16-s{seed}", 3.0 + seed, seed=seed)
        make(experiment / f"full-s{seed}", 3.1 + seed, seed=seed, recipe="tetrajet_full", osci=True)
    root, written = experiment.parent, []
    (root / "README.md").write_text(f"# Mine\n\n{plot.BEGIN}\nold\n{plot.END}\n\nafter\n")
    (tmp_path / "matplotlibrc").write_text("font.size: 30\n")
    for environment in ({"PYTHONHASHSEED": "1"},
                        {"PYTHONHASHSEED": "2", "SOURCE_DATE_EPOCH": "1", "MATPLOTLIBRC": str(tmp_path)}):
        subprocess.run([sys.executable, ROOT / "plot.py", f"--results={root}"], env=os.environ | environment,
                       check=True, capture_output=True)
        written.append([path.read_bytes() for path in
                        (root / "README.md", experiment / "compare.png", experiment / "compare.svg")])
    assert [a == b for a, b in zip(*written)] == [True] * 3
    text = written[0][0].decode()
    assert text.startswith(f"# Mine\n\n{plot.BEGIN}\n\n") and text.endswith(f"\n\n{plot.END}\n\nafter\n")
    assert "## nano\n\nWhat and why.\n\n| recipe" in text and "nano/compare.png" in text and "old" not in text


# -----------------------------------------------------------------------------
# what train.py writes

def test_knobs_and_columns_are_those_of_train():
    """ Catches: a knob or column renamed there and not here, so that panels vanish and groups fall apart. """
    assert {c for *_, kinds in plot.PANELS for c in kinds.values()} <= set(train.COLUMNS)
    assert set(plot.IDLE.split("|")) - {"seed"} <= set(train.FREE)
    for pattern in plot.PRECISION.split("|"):
        assert any(re.fullmatch(pattern, knob) for knob in KINDS), pattern


def test_a_real_run(tmp_path, capsys, monkeypatch):
    """ Catches: a folder of train.py's that plot.py cannot read, and other numbers than it said. """
    monkeypatch.setattr(train, "commit", lambda: "abc1234+")
    rng = np.random.default_rng(0)
    for name, n in (("a_train_000001", 4000), ("a_val_000000", 400)):
        data.write_shard(tmp_path / f"{name}.bin", rng.integers(97, 123, n).astype(np.uint16))
    (tmp_path / "meta.json").write_text('{"encoding": "bytes"}')
    root = tmp_path / "results"
    tiny = {"data": tmp_path, "n_layer": 1, "d_model": 48, "n_head": 2, "d_ff": 40, "seq_len": 32, "steps": 6,
            "batch_tokens": 64, "log_every": 1, "eval_every": 3, "eval_tokens": 64, "sample_tokens": 0,
            "device": "cpu", "out": root / "tiny", "osci_period": 0.4, "osci_window": 0.2, "osci_start": 0.1}
    flags = [f"--{name}={value}" for name, value in tiny.items()]
    train.main([*flags, "--recipe=bf16", "--name=bf16-s1"])
    bf16 = capsys.readouterr().out
    train.main([*flags, "--recipe=tetrajet_full", "--osci=full", "--name=full-s1"])
    outputs = (bf16, capsys.readouterr().out)
    said = [dict(re.findall(r"^(\w+): (.+)$", out, re.MULTILINE)) for out in outputs]
    (root / "tiny" / "about.md").write_text("x")
    text, lines = plot.experiment(root / "tiny")
    row, gap = cells(text)["full"], float(said[1]["val_loss_fp4"]) - float(said[0]["val_loss_fp4"])
    assert row[:3] == ["n=1", said[1]["val_loss_fp4"], said[1]["val_loss_bf16"]] and row[4] == "384"
    assert abs(float(row[3]) - gap) < 1.01e-4, "each of the two was rounded to 4 digits"
    assert "backend: reference; torch " in text and "commit abc1234+." in text
    assert lines[1][1].curve("osci_flips") and lines[1][2].name == "bf16-s1"

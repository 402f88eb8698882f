""" tools/plot.py: numbers that a hand computes too, files that are not as they should be, the same bytes. """
import csv
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

import train
from config import Config, ConfigError
from tools import plot

ROOT = Path(__file__).resolve().parent.parent
STEPS, EVALS, BATCH = 40, (20, 40), 100
LOG = "torch 9.9.0, Some GPU, code abc1234+, run out/x\nstep 0/40  loss 5\nbackend: emulate\ntokens: 9\n"


def make(folder: Path, loss: float | None = 3.0, bf16: float | None = None, evals=EVALS, logged: int = STEPS,
         osci: bool = False, speed: float = 1000.0, **knobs) -> Path:
    """
    A run's folder, without a run. loss: the last validation loss with the fp4 forward, 1 more at each earlier
    evaluation; bf16: the same, with the bf16 forward; logged: the step that the rows stop before.
    """
    cfg = Config(**{"recipe": "bf16", "steps": STEPS, "batch_tokens": BATCH, "name": folder.name} | knobs)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(asdict(cfg)))
    (folder / "log.txt").write_text(LOG)
    with open(folder / "metrics.csv", "w", newline="") as f:
        table = csv.DictWriter(f, (*train.COLUMNS, "osci_flips", "osci_reversals", "osci_reset"),
                               lineterminator="\n")
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


def read(folder: Path) -> list[plot.Run]:
    return [plot.read_run(path) for path in plot.runs_in(folder)]


def cells(markdown: str) -> dict[str, list[str]]:
    """ The first cell of a table's rows -> the others. """
    lines = [line.strip("| ").split("|") for line in markdown.splitlines() if line.startswith("|")]
    return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines[2:]}


def table(folder: Path) -> dict[str, list[str]]:
    return cells(plot.table(read(folder)))


def fails(capsys, *argv) -> str:
    """ The one line that a mistake prints. """
    assert plot.main([str(arg) for arg in argv]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


# -----------------------------------------------------------------------------
# numbers


def test_the_table_is_what_a_hand_computes(tmp_path):
    """
    Catches: sd with n instead of n - 1, the sd of unpaired differences (0.13 here), a gap with the wrong sign
    or forward, an evaluation that is not the last, tokens/s that is not the last logged or not a mean.
    """
    for seed, loss, speed in ((1, 3.0, 1000), (2, 3.1, 2000), (3, 3.2, 6000)):
        make(tmp_path / f"bf16-s{seed}", loss, seed=seed, speed=speed)
    for seed, loss, bf16 in ((1, 3.05, 3.04), (2, 3.17, 3.14), (3, 3.22, 3.24)):
        make(tmp_path / f"full-s{seed}", loss, bf16, seed=seed, recipe="tetrajet_full", osci="reset")
    # gaps 0.05 0.07 0.02: mean 0.14/3; squared distances sum to 0.0038/3, half of it is 0.02517^2
    # losses 3.05 3.17 3.22: mean 9.44/3; squares sum to 0.0458/3, half of it is 0.08737^2
    assert table(tmp_path) == {
        "bf16": ["n=3", "-", "3.1000 +- 0.1000", "0", "4,000", "3,000"],
        "full": ["n=3", "3.1467 +- 0.0874", "3.1400 +- 0.1000", "+0.0467 +- 0.0252", "4,000", "1,000"],
    }


def test_one_seed_has_no_deviation(tmp_path):
    """ Catches: +- 0.0000 or +- nan where nothing was measured, and a gap that rounds to -0.0000. """
    make(tmp_path / "bf16-s1", 3.0)
    make(tmp_path / "full-s1", 2.99999, recipe="tetrajet_full")
    assert table(tmp_path)["full"] == ["n=1", "3.0000", "3.0000", "+0.0000", "4,000", "1,000"]
    assert plot.spread([]) == "-" and plot.spread([float("inf"), 1.0]) == "inf"


def test_gaps_are_between_the_same_seeds(tmp_path):
    """ Catches: pairs by position, and a number of pairs that is taken for the number of seeds. """
    for seed, loss in ((1, 3.0), (2, 9.0), (3, 3.2)):
        make(tmp_path / f"full-s{seed}", loss, seed=seed, recipe="tetrajet_full")
    for seed, loss in ((3, 3.0), (1, 2.9), (4, 4.0)):
        make(tmp_path / f"bf16-s{seed}", loss, seed=seed)
    assert table(tmp_path)["full"][3] == "+0.1500 +- 0.0707 (n=2)"


def test_the_bf16_run_is_one_of_the_same_training(tmp_path):
    """ Catches: a gap to a run with another learning rate, and none for a knob that does not matter. """
    make(tmp_path / "bf16-lr1-s1", 3.0, lr=1e-3)
    make(tmp_path / "bf16-lr2-s1", 5.0, lr=2e-3)
    make(tmp_path / "full-lr2-s1", 5.5, lr=2e-3, recipe="tetrajet_full", osci="reset", osci_tau=2.0,
         outlier_frac=0.1, micro_batch=1, recompute=True, wandb=True, out="elsewhere", log_every=7,
         eval_every=3, keep="mlp.down", backend="emulate")
    make(tmp_path / "full-lr3-s1", 5.5, lr=3e-3, recipe="tetrajet_full")
    assert [row[3] for row in table(tmp_path).values()] == ["0", "0", "+0.5000", "-"]


def test_runs_share_a_row_only_if_only_the_seed_differs(tmp_path):
    """
    Catches: names that decide what is averaged, two groups of one label of which one gets lost, a copied
    folder that halves the deviation, other data.
    """
    make(tmp_path / "bf16-s1", 3.0, seed=1, lr=1e-3)
    make(tmp_path / "bf16-s2", 4.0, seed=2, lr=2e-3)
    make(tmp_path / "first", 5.0, recipe="tetrajet_base", seed=1)
    make(tmp_path / "second", 6.0, recipe="tetrajet_base", seed=2, stop_at=7, save_every=9, out="x")
    make(tmp_path / "second-again", 6.0, recipe="tetrajet_base", seed=2)
    make(tmp_path / "second-data", 6.0, recipe="tetrajet_base", seed=3, data="other")
    make(tmp_path / "full-s100-s1", 6.0, recipe="tetrajet_full", seed=1)
    make(tmp_path / "full-s100-s12", 6.0, recipe="tetrajet_full", seed=12)
    rows = table(tmp_path)
    assert {label: row[0] for label, row in rows.items()} == {
        "bf16-s1": "n=1", "bf16-s2": "n=1", "first / second": "n=2", "full-s100": "n=2",
        "second-again": "n=1", "second-data": "n=1"}
    assert rows["first / second"][2] == "5.5000 +- 0.7071"


def test_an_unfinished_run_is_shown_and_not_averaged(tmp_path):
    """
    Catches: a run that died and is hidden, or counted with a loss of half-way; the loss of a run that is
    still young minus the last loss of the bf16 run.
    """
    make(tmp_path / "bf16-s1", 3.0)
    make(tmp_path / "full-s1", 3.5, recipe="tetrajet_full")
    make(tmp_path / "bf16-s2", 9.0, seed=2)
    make(tmp_path / "full-s2", 8.0, recipe="tetrajet_full", seed=2, evals=(20,), logged=23)
    make(tmp_path / "full-s3", recipe="tetrajet_full", seed=3, evals=())
    assert table(tmp_path) == {
        "bf16": ["n=2", "-", "6.0000 +- 4.2426", "0", "4,000", "1,000"],
        "full-s1": ["n=1", "3.5000", "3.5000", "+0.5000", "4,000", "1,000"],
        "full-s2": ["n=1", "8.0000", "8.0000", "-2.0000", "2,000 of 4,000", "1"],
        "full-s3": ["n=1", "-", "-", "-", "0 of 4,000", "1,000"]}


def test_without_bf16_the_first_run_is_what_others_are_compared_with(tmp_path, capsys):
    """ Catches: a comparison of two recipes that ends in dashes; two folders of one name. """
    pytest.importorskip("matplotlib")
    a, b = make(tmp_path / "a" / "x", 3.0, recipe="nvfp4"), make(tmp_path / "b" / "x", 2.5, recipe="nvidia")
    assert plot.main([str(a), str(b), f"--to={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert f"gap to {a}" in out and {name: row[3] for name, row in cells(out).items()} == {
        str(a): "0", str(b): "-0.5000"}


# -----------------------------------------------------------------------------
# what runs, kills and people do to files


@pytest.mark.parametrize("tail", ["4", "45,4500,9", "45,4500,9.1\n", "\0\0\0",
                                  "45,nan" + "," * (len(train.COLUMNS) + 1) + "\n",
                                  "45,4500" + "," * (len(train.COLUMNS) + 1) + "0.12"])
def test_a_torn_row_is_no_row(tmp_path, tail):
    """ Catches: a crash beside a run that is writing, and 0.12 taken for the 0.1234 it was to become. """
    metrics = make(tmp_path / "a", 3.0) / "metrics.csv"
    whole = plot.read_rows(metrics)
    assert whole[-1]["step"] == STEPS and whole[-1]["val_loss_fp4"] == 3.0
    metrics.write_text(metrics.read_text() + tail)
    assert plot.read_rows(metrics) == whole


def test_mistakes_are_one_line(tmp_path, capsys):
    """ Catches: a traceback, or a figure with a hole, for what one line can tell. """
    good, folder = make(tmp_path / "good"), make(tmp_path / "bad")
    assert "type folders of runs" in fails(capsys)
    assert "type folders of runs" in fails(capsys, good, f"--results={tmp_path}")
    (folder / "metrics.csv").write_text("step,tokens,seconds\n")
    assert "has no rows" in fails(capsys, good, folder, f"--to={tmp_path / 'to'}")
    (folder / "config.json").unlink()
    assert "is not the folder of a run" in fails(capsys, good, folder, f"--to={tmp_path / 'to'}")
    assert "is not the folder of a run" in fails(capsys, tmp_path / "nowhere")
    odd = '{"recipe": "bf16", "seed": "(", "steps": 1, "batch_tokens": 1}'
    for text in ("", "[]", "{}", odd, "[" * 100_000):
        (folder / "config.json").write_text(text)
        assert "config.json is damaged" in fails(capsys, good, folder, f"--to={tmp_path / 'to'}")
    assert not (tmp_path / "to").exists()


def test_without_matplotlib_there_is_a_table(tmp_path, capsys, monkeypatch):
    """ Catches: a traceback, or a table withheld that needs no matplotlib. """
    monkeypatch.setitem(sys.modules, "matplotlib", None)       # as if it were not installed
    assert plot.main([str(make(tmp_path / "bf16-s1"))]) == 2
    out, err = capsys.readouterr()
    assert "bf16" in cells(out) and "pip install matplotlib" in err and len(err.splitlines()) == 1


def test_importing_is_light():
    """ Catches: a heavy import at the top, which would tie figures to a torch. """
    code = "import sys; from tools import plot; print(not {'torch', 'matplotlib'} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout == "True\n"


# -----------------------------------------------------------------------------
# figures


def shown(svg: Path) -> str:
    """ The words of a figure: matplotlib writes each text as a comment beside its outlines. """
    return "\n".join(line.strip() for line in svg.read_text().splitlines() if line.strip().startswith("<!--"))


@pytest.mark.filterwarnings("error")
def test_panels_are_those_that_were_measured(tmp_path, capsys):
    """ Catches: an empty OsciReset panel of runs without it, a gap to itself, one curve that ends at inf. """
    pytest.importorskip("matplotlib")
    a = make(tmp_path / "one" / "bf16-s1", 3.0)
    plot.main([str(a)])
    words = shown(tmp_path / "one" / "compare.svg")
    assert "training and validation loss" in words and "-- bf16 --" in words
    assert "OsciReset" not in words and "minus" not in words
    b = make(tmp_path / "two" / "full-s1", 3.5, recipe="tetrajet_full", osci=True)
    c = make(tmp_path / "two" / "odd", float("inf"), recipe="nvfp4")
    plot.main([str(a), str(b), str(c), f"--to={tmp_path / 'new' / 'folder'}"])
    words = shown(tmp_path / "new" / "folder" / "compare.svg")
    for text in ("OsciReset", "flips", "resets", "loss minus that of bf16", "-- full --", "nats per token"):
        assert text in words, text
    assert (tmp_path / "new" / "folder" / "compare.png").stat().st_size > 10_000
    assert cells(capsys.readouterr().out)["odd"][1] == "inf"


def test_the_last_gaps_of_many_names(tmp_path, capsys):
    """
    Catches: a first gap for the last, that of an unfinished run, one seed for the mean, an order that a NaN
    upsets, a name without a gap that is left out; curves that hide each other.
    """
    pytest.importorskip("matplotlib")
    for seed, own in ((1, 0.0), (2, 5.0)):
        make(tmp_path / f"bf16-s{seed}", 3.0 + own, seed=seed)
        for i in range(15):
            # the gap of each is .03 smaller than that before it; of run00 the second seed has the larger gap
            loss = 3.5 - 0.03 * i + own * (1 if i else 1.2)
            evals, logged = ((20,), 20) if i == 12 else (EVALS, STEPS)
            make(tmp_path / f"run{i:02}-s{seed}", float("nan") if (i, seed) == (4, 1) else loss, seed=seed,
                 bf16=3.25 + own, evals=evals, logged=logged, recipe="tetrajet_base", osci_tau=2.0 + i)
    gaps = plot.last_gaps(read(tmp_path))
    # the mean of run00, .5 and 1.5, is the largest, and the others follow their number backwards
    names = [f"run{i:02}" for i in range(14, -1, -1) if i != 12] + ["run12-s1, 0 of 1", "run12-s2, 0 of 1"]
    assert [name.removesuffix(", 1 of 2") for name in gaps] == names and "run04, 1 of 2" in gaps
    fp4 = {name: gap["val_loss_fp4"] for name, gap in gaps.items()}
    assert fp4["run00"] == pytest.approx([0.5, 1.5]) and fp4["run05"] == pytest.approx([0.35, 0.35])
    assert fp4["run04, 1 of 2"] == [pytest.approx(0.38)] and fp4["run12-s1, 0 of 1"] == []
    assert gaps["run05"]["val_loss_bf16"] == pytest.approx([0.25, 0.25])
    plot.main([str(tmp_path)])
    words = shown(tmp_path / "compare.svg")
    assert "last validation loss minus that of bf16" in words and "training" not in words
    assert "-- run14 --" in words and "-- bf16 --" not in words


def test_the_figure_of_the_last_gaps():
    """ Catches: a dot in another row, or not at its gap; a mean of one seed; the best at the bottom. """
    figure = pytest.importorskip("matplotlib.figure").Figure()
    plot.draw_gaps(figure, {"a": {"val_loss_fp4": [0.1, 0.3], "val_loss_bf16": [0.2, 0.6]},
                            "c": {"val_loss_fp4": [0.5], "val_loss_bf16": []}}, "bf16")
    ax, = figure.axes
    drawn = {(line.get_marker(), round(y), round(float(x), 9), line.get_fillstyle()) for line in ax.lines
             if line.get_marker() in ("o", "|") for x, y in zip(line.get_xdata(), line.get_ydata())}
    assert drawn == {("o", 0, 0.1, "full"), ("o", 0, 0.3, "full"), ("|", 0, 0.2, "full"),
                     ("o", 0, 0.2, "none"), ("o", 0, 0.6, "none"), ("|", 0, 0.4, "none"),
                     ("o", 1, 0.5, "full"), ("|", 1, 0.5, "full")}
    assert [text.get_text() for text in ax.get_yticklabels()] == ["a", "c"] and ax.yaxis_inverted()


# -----------------------------------------------------------------------------
# the page of results


def test_the_same_runs_give_the_same_bytes(tmp_path):
    """
    Catches: dates and random ids in figures, an order that hashing decides, a user's matplotlibrc; a table
    that hides that its rows were made by two commits; text around the tables that is lost.
    """
    pytest.importorskip("matplotlib")
    root, written = tmp_path / "results", []
    for seed in (1, 2):
        make(root / "nano" / f"bf16-s{seed}", 3.0 + seed, seed=seed)
        make(root / "nano" / f"full-s{seed}", 3.1 + seed, seed=seed, recipe="tetrajet_full", osci=True)
    (root / "nano" / "bf16-s2" / "log.txt").write_text(LOG.replace("code abc1234+", "commit def5678"))
    for name in ("nano", "bench_gpu"):
        (root / name).mkdir(exist_ok=True)
        (root / name / "about.md").write_text("What and why.\n")
    (root / "README.md").write_text(f"# Mine\n\n{plot.BEGIN}\nold\n{plot.END}\n\nafter\n")
    (tmp_path / "matplotlibrc").write_text("font.size: 30\n")
    for environment in ({"PYTHONHASHSEED": "1"},
                        {"PYTHONHASHSEED": "2", "SOURCE_DATE_EPOCH": "1", "MATPLOTLIBRC": str(tmp_path)}):
        subprocess.run([sys.executable, "-m", "tools.plot", f"--results={root}"], check=True, cwd=ROOT,
                       env=os.environ | environment, capture_output=True)
        written.append([path.read_bytes() for path in
                        (root / "README.md", root / "nano/compare.png", root / "nano/compare.svg")])
    assert [a == b for a, b in zip(*written)] == [True] * 3
    text = written[0][0].decode()
    assert text.startswith(f"# Mine\n\n{plot.BEGIN}\n\n") and text.endswith(f"\n\n{plot.END}\n\nafter\n")
    assert "## nano\n\nWhat and why.\n\n| recipe" in text and "nano/compare.png" in text and "old" not in text
    assert ("By the logs: backend: emulate; torch 9.9.0, Some GPU, code abc1234+; "
            "torch 9.9.0, Some GPU, commit def5678.") in text and "bench_gpu" not in text
    (root / "README.md").write_text("mine")
    with pytest.raises(ConfigError, match="needs these two lines"):
        plot.results(root)
    assert (root / "README.md").read_text() == "mine"


def test_the_tables_of_the_results_are_those_of_their_runs(tmp_path, monkeypatch):
    """ Catches: results of earlier code that can no longer be read, or now say something else. """
    shutil.copytree(ROOT / "results", tmp_path / "results", ignore=shutil.ignore_patterns("bench_*"))
    monkeypatch.setattr(plot, "draw", lambda runs, folder: None)
    plot.results(tmp_path / "results")
    assert (tmp_path / "results/README.md").read_text() == (ROOT / "results/README.md").read_text()


def test_columns_are_those_of_train_py():
    """ Catches: a column renamed there and not here, so that a panel vanishes. """
    from osci import OsciReset
    columns = {column for *_, kinds in plot.PANELS for column in kinds.values()}
    assert columns <= {*train.COLUMNS, *OsciReset.COLUMNS}
    assert {"recipe", "align", "osci", "outlier_frac", "keep", "rotate"} <= plot.PRECISION
    assert not {"lr", "steps", "seed", "d_model", "optimizer"} & plot.PRECISION

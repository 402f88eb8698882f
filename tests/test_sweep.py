"""
Many runs: a typo costs nothing, a failure stops no other run, and what was stopped goes on.

Most tests start a fake train.py that lasts milliseconds; one trains with the real one.
"""
import csv
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from config import ConfigError
from shipped import shipped
from tools import sweep

ROOT = Path(__file__).resolve().parent.parent

# what a run does is in its name: bad, crash, liar, late, or wait, until there is a file `go`
FAKE = '''
import json, os, signal, sys, time
from dataclasses import asdict
from pathlib import Path
from config import parse

def tell(what):
    with open("events.txt", "a") as f:
        f.write(f"{what} {cfg.name} {os.getpid()}\\n")

cfg = parse(sys.argv[1:])
folder = Path(cfg.out) / cfg.name
signal.signal(signal.SIGTERM, lambda *_: (tell("saved"), sys.exit(143)))
tell("begin")
end = time.time() + 60
while cfg.name.startswith("wait") and not Path("go").exists() and time.time() < end:
    time.sleep(0.02)
time.sleep(0.1)
if cfg.name.startswith("bad"):
    sys.exit("a warning\\nerror: no recipe is called x")
if cfg.name.startswith("crash"):
    os.kill(os.getpid(), 9)
if not cfg.name.startswith("liar"):
    (folder / "metrics.csv").write_text("step,tokens,seconds,train_loss,val_loss_fp4,val_loss_bf16\\n"
                                        f"0,0,0,3.5,,\\n{cfg.steps},640,1.5,,{cfg.lr + cfg.seed},{cfg.lr}\\n")
    (folder / "config.json").write_text(json.dumps(asdict(cfg)))
(folder / "log.txt").write_text("tokens_per_s: 427\\npeak_gib: 0.25\\nbackend: reference\\ncode: abc1234\\n")
tell("end")
if cfg.name.startswith("late"):
    sys.exit("error: no room for the last checkpoint")
'''


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """ An empty folder to work in, with a fake train.py. """
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(sweep, "TRAIN", tmp_path / "fake.py")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def go(text: str, *flags: str) -> int:
    Path("list.txt").write_text(text)
    return sweep.main(["list.txt", *flags])


def rows() -> dict[str, dict]:
    """ runs.csv by name and seed, such as bf16-s1. """
    with open("results/list/runs.csv", newline="") as file:
        return {f"{row['name']}-s{row['seed']}": row for row in csv.DictReader(file)}


def events(what: str) -> list[str]:
    """ The names of the runs that told so, in this order. """
    path = Path("events.txt")
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split()[1] for line in lines if line.startswith(what)]


def cells(markdown: str) -> list[list[str]]:
    """ The rows of a table, below its head. """
    lines = [line.strip("| ").split("|") for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines[2:]]


# -----------------------------------------------------------------------------
# the list


@pytest.mark.parametrize("text, says", [
    ("a | | 1\nb | --stepz=3 | 1", "list.txt:2: no knob is called 'stepz'; did you mean steps?"),
    ("# one\n\nall | --stepz=3\na | | 1", "list.txt:4: no knob is called 'stepz'; did you mean steps?"),
    ("a | --n_head=3 | 1", "list.txt:1: n_head = 3 does not cut"),
    ("a | configs/bf17.py | 1", "list.txt:1: cannot read configs/bf17.py"),
    ("a | --lr=1 --lr=2 | 1", "--lr is given twice"),
    ("a | --name=x | 1", "--name is set here"),
    ("all | --seed=3\na | | 1", "list.txt:2: --seed is set here"),
    ("a | --overwrite | 1", "--overwrite is set here"),
    ("a | --data='x | 1", "list.txt:1: No closing quotation"),
    ("a | | 1 one", "such as 1 2 3, not '1 one'"),
    ("a | | ", "seeds are different whole numbers"),
    ("a | | 1 2 01", "seeds are different whole numbers"),
    ("a | --steps=3", "a line is `name | config files and flags | seeds`"),
    ("../a | | 1", "'../a' names a folder"),
    ("a | | 1\na | | 2", "list.txt:2: the name a is taken already"),
    ("a | | 1\nall | --steps=3", "list.txt:2: `all | config files and flags` stands above all runs"),
    ("# nothing\n", "lists no runs"),
    ("a | | 1\nb | --recipe=nvfp5 | 1", "list.txt:2: recipe = 'nvfp5' is unknown; did you mean nvfp4?"),
    ("a | | 1\nb | --recipe=fp8 --osci=reset | 1", "type --osci=off"),
    ("a | --recipe=bf16 --osci=resett | 1", "did you mean reset?"),
    ("a | | ²", "seeds are different whole numbers"),
])
def test_a_typo_costs_nothing(place, capsys, text, says):
    """ Catches: a list whose first runs train for hours before the last one turns out to be mistyped. """
    assert go(text) == 2
    out, err = capsys.readouterr()
    assert says in err and err.count("\n") == 1 and err.startswith("error: "), err
    assert not out and not Path("out").exists() and not Path("results").exists()


def test_a_list_does_not_mix_with_a_run(place, capsys):
    """ Catches: runs inside another run's folder, which plot.py then does not see. """
    Path("out/list").mkdir(parents=True)
    Path("out/list/config.json").write_text("{}")
    assert go("a | | 1") == 2 and "give the list another name" in capsys.readouterr().err


def test_a_run_s_own_flag_wins_over_all(tmp_path):
    """ Catches: `--lr is given twice`, and an `all` that overrules the line. """
    path = tmp_path / "x.txt"
    # Notepad writes a mark before the first line
    path.write_text("all | --lr=1 --steps=7  # for all\na | --lr=2 | 1\nb | | 3 4\n", encoding="utf-8-sig")
    a, b, c = sweep.read_list(path)
    assert [(r.cfg.lr, r.cfg.steps, r.cfg.seed) for r in (a, b, c)] == [(2, 7, 1), (1, 7, 3), (1, 7, 4)]
    assert [run.folder for run in (a, c)] == [Path("out/x/a-s1"), Path("out/x/b-s4")]


def test_the_lists_that_come_with_it(monkeypatch):
    """ Catches: a renamed knob, remedy or config file. """
    monkeypatch.chdir(ROOT)
    for path in shipped("sweeps/*"):
        assert f"python -m tools.sweep sweeps/{path.name}" in path.read_text()
        assert len(sweep.read_list(path)) > 1


def test_dry_run_starts_and_writes_nothing(place, capsys):
    """ Catches: a command that a shell would cut at a space. """
    assert go("all | --steps=3\na | --data='my text' | 1 2", "--dry_run") == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 2 and "'--data=my text' --out=out/list --name=a-s2" in out
    assert not Path("out").exists() and not Path("results").exists()


# -----------------------------------------------------------------------------
# scheduling


@pytest.mark.parametrize("jobs", [1, 2])
def test_as_many_at_a_time_as_asked(place, jobs):
    """
    Catches: --jobs ignored, a slot given twice; a sweep cut short that has three seeds of one name, and
    nothing to compare them with.
    """
    assert go("a | | 5 2\nb | | 1 2\n", f"--jobs={jobs}") == 0
    now, most = 0, 0
    for line in Path("events.txt").read_text().splitlines():
        now += {"begin": 1, "end": -1}[line.split()[0]]
        most = max(most, now)
    assert most == jobs and now == 0
    assert set(events("begin")[:2]) == {"a-s5", "b-s1"} and set(events("begin")[2:]) == {"a-s2", "b-s2"}
    assert list(rows()) == ["a-s5", "a-s2", "b-s1", "b-s2"]


@pytest.mark.skipif(os.name == "nt", reason="signals differ")
def test_a_failure_stops_no_other_run(place, capsys):
    """
    Catches: a sweep that ends at the first failure; a failed run that passes for done, hides its reason or is
    never tried again; a done one that is trained again; a measured loss that is thrown away.
    """
    text = "a | | 1\nbad | | 1\ncrash | | 1\nliar | | 1\nlate | | 1\n"
    assert go(text) == 1
    out = capsys.readouterr().out
    assert {name: (row["status"], row["error"], row["val_loss_fp4"]) for name, row in rows().items()} == {
        "a-s1": ("done", "", "1.004"),
        "bad-s1": ("failed", "no recipe is called x", ""),
        "crash-s1": ("failed", "killed by signal 9; ", ""),
        "liar-s1": ("failed", "metrics.csv has no validation loss of step 600", ""),
        "late-s1": ("done", "no room for the last checkpoint", "1.004")}
    summary = Path("results/list/summary.md").read_text()
    assert summary in out and "- bad-s1: failed, no recipe is called x\n" in summary
    assert ["bad", "n=0 of 1", *["-"] * 6] in cells(summary)
    assert go(text) == 1
    assert events("begin")[5:] == ["bad-s1", "crash-s1", "liar-s1"]


@pytest.mark.skipif(os.name == "nt", reason="signals differ")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_ctrl_c_ends_the_runs_and_the_same_command_goes_on(place, name):
    """ Catches: training that goes on unseen after Ctrl-C, or is killed before it has saved. """
    text = "a | | 1\nwait | | 1 2\n"
    Path("list.txt").write_text(text)
    code = ("import sys, signal; from tools import sweep; sweep.TRAIN = 'fake.py';"
            "signal.signal(signal.SIGINT, signal.default_int_handler);"
            "sys.exit(sweep.main(['list.txt', '--jobs=2']))")
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE)
    end = time.time() + 60
    while len(events("begin")) < 3 or rows()["a-s1"]["status"] != "done":
        assert time.time() < end and process.poll() is None
        time.sleep(0.05)
    assert [row["status"] for row in rows().values()] == ["done", "running", "running"]
    process.send_signal(getattr(signal, name))
    assert "Traceback" not in process.communicate(timeout=60)[1].decode() and process.returncode == 130
    assert sorted(events("saved")) == ["wait-s1", "wait-s2"]
    assert [row["status"] for row in rows().values()] == ["done", "missing", "missing"]
    Path("go").touch()
    assert go(text) == 0 and events("end") == ["a-s1", "wait-s1", "wait-s2"]


def test_with_the_real_train_py(tmp_path, monkeypatch, capsys):
    """ Catches: numbers that train.py writes elsewhere or under another name; a finished run done again. """
    monkeypatch.chdir(tmp_path)
    flags = ("--n_layer=1 --d_model=16 --n_head=1 --d_ff=16 --seq_len=16 --batch_tokens=32 --eval_tokens=32 "
             "--steps=2 --device=cpu --sample_tokens=3 --recipe=tetrajet_base")
    text = f"base | {flags} | 1\n"
    assert go(text) == 0
    row, folder = rows()["base-s1"], Path("out/list/base-s1")
    said = dict(re.findall(r"^(\w+): (.+)$", (folder / "stdout.txt").read_text(), re.MULTILINE))
    assert row["status"] == "done" and row["tokens"] == "64" and row["error"] == ""
    assert float(row["val_loss_fp4"]) == pytest.approx(float(said["val_loss_fp4"]), abs=1e-4)
    assert float(row["val_loss_bf16"]) == pytest.approx(float(said["val_loss_bf16"]), abs=1e-4)
    assert float(row["train_loss"]) > 0 and float(row["seconds"]) > 0 and float(row["tokens_per_s"]) > 0
    assert row["backend"] == "reference" and row["code"] == said.get("code", said.get("commit"))
    # what tools/plot.py looks for in a log
    assert re.search(r"^torch .+, (code|commit) \S+, run ", (folder / "log.txt").read_text(), re.MULTILINE)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert go(text) == 0 and "started" in capsys.readouterr().out
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


# -----------------------------------------------------------------------------
# what lies in a run's folder

GOOD = "step,tokens,seconds,train_loss,val_loss_fp4,val_loss_bf16\n0,0,0,3,,\n5,80,1,,2.5,2.25\n"


@pytest.fixture
def run(place) -> sweep.Run:
    """ A run of 5 steps, whose folder is there and is empty. """
    Path("x.txt").write_text("a | --steps=5 | 1\n")
    [one] = sweep.read_list(Path("x.txt"))
    one.folder.mkdir(parents=True)
    (one.folder / "log.txt").write_text("backend: fake\n" * 9 + "backend: reference\ncommit: abc1234+\n")
    return one


@pytest.mark.parametrize("text", [
    GOOD[:-1], GOOD[:-3], GOOD.replace("5,80", "4,80"), GOOD.replace("2.5,", ","), GOOD + "6,96,1,,,\n",
    GOOD.replace("2.25", "nan"), GOOD.replace("2.25", "2.25,1"), GOOD.replace("2.25", "x"), "", "\n",
])
def test_what_is_not_the_last_validation_loss_is_not_taken_for_it(run, text):
    """ Catches: half a row on a full disk read as another number; the loss of an earlier step; a nan. """
    (run.folder / "metrics.csv").write_text(text)
    assert sweep.measured(run) == {}
    (run.folder / "metrics.csv").write_text(GOOD)
    assert sweep.measured(run) == {
        "tokens": "80", "val_loss_fp4": "2.5", "val_loss_bf16": "2.25", "train_loss": "3", "seconds": "1",
        "tokens_per_s": "", "peak_gib": "", "backend": "reference", "code": "abc1234+"}


@pytest.mark.parametrize("before, status", [
    ('{"steps": 5, "lr": 0.5, "name": "a-s1"}', "refused"), ('{"steps": 5, "data": "other"}', "missing"),
    ('{"steps": 5, "micro_batch": 2, "gone": 1}', "done")])
def test_numbers_of_other_settings_are_not_those_of_the_list(run, before, status):
    """
    Catches: a list that was edited, whose rows then show old numbers beside new flags, or failures in the
    place of results.
    """
    (run.folder / "metrics.csv").write_text(GOOD)
    (run.folder / "config.json").write_text(before)
    if status == "refused":
        with pytest.raises(ConfigError, match="a run with another lr; give the list another name"):
            sweep.look(run)
        return
    sweep.look(run)
    assert run.status == status and bool(run.values) == (status == "done")


def test_results_of_earlier_code_can_be_read(monkeypatch):
    """ Catches: a column renamed here, so that what was measured is measured again or lost. """
    monkeypatch.chdir(ROOT / "results")
    with open("recipes_70m_10M_tokens/runs.csv", newline="") as file:
        old = next(row for row in csv.DictReader(file) if row["name"] == "tetrajet_full")
    cfg = sweep.parse([f"--steps={old['steps']}", "--out=recipes_70m_10M_tokens", "--name=tetrajet_full-s1"])
    new = sweep.measured(sweep.Run("tetrajet_full", 1, [], [], cfg))
    assert new.pop("code") == old["commit"]
    assert new == {key: old[key] for key in new}


# -----------------------------------------------------------------------------
# the table


def test_the_table_by_hand(tmp_path):
    """
    Catches: a gap between means of different seeds, sd with n instead of n - 1, seeds paired by position, an
    unfinished run that counts.

    a: 2.0 2.1 2.5 for seeds 1 2 3: mean 2.2, sd sqrt((.04 + .01 + .09) / 2) = .2646
    b: 2.7 (seed 3), 2.4 (seed 2), seed 1 failed: gaps +.2, +.3: mean +.25, sd .0707, t = .25 / .05 = 5 with
    one degree of freedom: p = 1 - 2 atan(5) / pi = .126. c: one seed, none paired
    """
    path = tmp_path / "x.txt"
    path.write_text("a | | 1 2 3\nb | | 3 2 1\nc | | 9\nd | | 1\n")
    runs = sweep.read_list(path)
    losses = {("a", 1): 2.0, ("a", 2): 2.1, ("a", 3): 2.5, ("b", 3): 2.7, ("b", 2): 2.4, ("c", 9): 3.0,
              ("d", 1): 1.99996}
    for r in runs:
        if loss := losses.get((r.name, r.seed)):
            r.status = "done"
            r.values = {"val_loss_fp4": str(loss), "val_loss_bf16": str(loss - (r.name == "b")),
                        "backend": "reference", "code": "abc"}
    assert cells(sweep.table(runs)) == [
        ["a", "n=3", "2.2000 +- 0.2646", "2.2000 +- 0.2646", "-", "-", "-", "-"],
        ["b", "n=2 of 3", "2.5500 +- 0.2121", "1.5500 +- 0.2121", "n=2",
         "+0.2500 +- 0.0707", "0.126", "-0.7500 +- 0.0707"],
        ["c", "n=1", "3.0000", "3.0000", "-", "-", "-", "-"],
        ["d", "n=1", "2.0000", "2.0000", "n=1", "+0.0000", "-", "+0.0000"]]
    text = sweep.summary(runs, path)
    assert "- b-s1: missing" in text and "Gaps are to a," in text and "Code: abc." in text


@pytest.mark.parametrize("df, t", [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262),
                                   (30, 2.042)])
def test_p_values_are_those_of_the_tables(df, t):
    """ Catches: a one-sided p, n degrees of freedom, a wrong sum. These are the t that have p = .05. """
    n, ones = df + 1, [(-1.0) ** i for i in range(df + 1)]
    mean = sum(ones) / n
    sd = (sum((x - mean) ** 2 for x in ones) / df) ** 0.5
    gaps = [(x - mean) / sd - t / n**0.5 for x in ones]
    assert sweep.p_value(gaps) == pytest.approx(0.05, abs=1e-4)
    assert sweep.p_value([0.0, *[0.0] * df]) == pytest.approx(1.0)


def test_a_list_that_is_not_there_is_one_line(place, capsys):
    """ Catches: a traceback for a misspelt file. """
    assert sweep.main(["nowhere.txt"]) == 2
    assert capsys.readouterr().err == "error: nowhere.txt: No such file or directory\n"
    with pytest.raises(ConfigError, match="lists no runs"):
        Path("empty.txt").write_text("")
        sweep.read_list(Path("empty.txt"))

"""
Many runs: a typo costs nothing, a failure stops no other run, and no kill loses, repeats or orphans one.

Most tests schedule a fake train.py that lasts milliseconds; one trains with the real one.
"""
import csv
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import stdev

import pytest

import config
import sweep
from shipped import shipped
from test_train import shards, tiny      # noqa: F401  (a fixture)

ROOT = Path(__file__).resolve().parent.parent
posix = pytest.mark.skipif(os.name == "nt", reason="signals and locks differ")

# what a run does is in its name: bad, crash, liar, late, full, wait (for a file `go`, with a child process)
FAKE = '''
import os, subprocess, sys, time
from pathlib import Path
from config import parse

def tell(what):
    with open("events.txt", "a") as f:
        f.write(f"{what} {cfg.name} {os.getpid()}\\n")

cfg = parse(sys.argv[1:])
folder = Path(cfg.out) / cfg.name
log = open(folder / "log.txt", "a")
try:
    import fcntl
    fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(f"another process is training in {folder}")
tell("begin")
if cfg.name.startswith("wait"):
    other = subprocess.Popen(["sleep", "60"])
    tell(f"child {other.pid}")
    end = time.time() + 60
    while not Path("go").exists() and time.time() < end:
        time.sleep(0.02)
    other.kill()
time.sleep(0.15)
if cfg.name.startswith("bad"):
    print("a warning\\nerror: no recipe is called 'x'\\x1b[2J", file=sys.stderr)
    sys.exit(2)
if cfg.name.startswith("crash"):
    os.kill(os.getpid(), 9)
if cfg.name.startswith("full"):
    Path("results/list/runs.csv").unlink()
    Path("results/list/runs.csv").mkdir()
if not cfg.name.startswith("liar"):
    (folder / "metrics.csv").write_text("step,tokens,seconds,train_loss,val_loss_fp4,val_loss_bf16\\n"
                                        f"0,0,0,3.5,,\\n{cfg.steps},640,1.5,,{cfg.lr + cfg.seed},{cfg.lr}\\n")
    (folder / "config.json").write_text(__import__("json").dumps(cfg.to_dict()))
log.write("tokens_per_s: 427\\npeak_gib: 0.25\\nbackend: reference\\ncommit: abc1234\\n")
tell("end")
if cfg.name.startswith("late"):
    sys.exit("error: no room for the last checkpoint")
'''


@pytest.fixture
def place(tmp_path) -> Path:
    """ A folder with sweep.py, config.py and a fake train.py. """
    for name in ("sweep.py", "config.py"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "train.py").write_text(FAKE)
    return tmp_path


def listening():
    """ Signals as a terminal sets them: tests started with `&` or nohup ignore some, and hand that down. """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start(place: Path, text: str, *flags: str) -> subprocess.Popen:
    (place / "list.txt").write_text(text)
    return subprocess.Popen([sys.executable, "sweep.py", "list.txt", *flags], cwd=place, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            preexec_fn=None if os.name == "nt" else listening)


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    """ Exit code, stdout, stderr. """
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err, err
    return process.returncode, out, err


def go(place: Path, text: str, *flags: str) -> tuple[int, str, str]:
    return finish(start(place, text, *flags))


def rows(place: Path, name: str = "list") -> list[dict]:
    return list(csv.DictReader((place / "results" / name / "runs.csv").open(newline="")))


def events(place: Path, what: str) -> list[list[str]]:
    path = place / "events.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split()[1:] for line in lines if line.startswith(what)]


def wait_for(condition):
    end = time.time() + 30
    while not condition():
        assert time.time() < end, "it never came"
        time.sleep(0.02)


def alive(pid: str) -> bool:
    """ Whether the process still runs; one that has ended and that nobody has asked about does not. """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -----------------------------------------------------------------------------
# the list

@pytest.mark.parametrize("text, says", [
    ("a | | 1\nb | --stepz=3 | 1", "list.txt:2: no knob is called 'stepz'; did you mean steps?"),
    ("# one\n\nall | --stepz=3\na | | 1", "list.txt:3: no knob is called 'stepz'; did you mean steps?"),
    ("a | --steps=many | 1", "list.txt:1: steps wants a whole number"),
    ("a | --n_head=3 | 1", "list.txt:1: n_head = 3 does not cut"),
    ("a | configs/bf17.py | 1", "list.txt:1: cannot read 'configs/bf17.py'"),
    ("a | --lr=1 --lr=2 | 1", "--lr is given twice"),
    ("a | --out=x | 1", "--out is set by sweep.py"),
    ("a | --name=x | 1", "--name is set by sweep.py"),
    ("a | --overwrite | 1", "--overwrite is set by sweep.py"),
    ("a | --stop_at=3 | 1", "--stop_at is set by sweep.py"),
    ("all | --seed=3\na | | 1", "list.txt:1: --seed is set by sweep.py"),
    ("a | --data='x | 1", "list.txt:1: No closing quotation"),
    ("a | | 1 one", "seeds are whole numbers with spaces between, such as 1 2 3, not '1 one'"),
    ("a | | ", "seeds are whole numbers"),
    ("a | | 99999999999", "seeds are whole numbers"),
    ("a | | 1 2 01", "a seed stands twice"),
    ("a | | 9999999999", "type a number up to 2_147_483_647"),
    ("a | --steps=3", "a line is `name | config files and flags | seeds`"),
    ("a | --steps=3 | 1 | 2", "a line is `name | config files and flags | seeds`"),
    ("../a | | 1", "'../a' names a folder"),
    ("a/b | | 1", "'a/b' names a folder"),
    (" | | 1", "'' names a folder"),
    ("a | | 1\nA | | 2", "list.txt:2: the name A is taken by line 1"),
    ("a | | 1\nall | --steps=3", "list.txt:2: `all | config files and flags` stands once, above all runs"),
    ("all | | 1\na | | 1", "has no seeds"),
    ("# nothing\n", "lists no runs"),
])
def test_a_typo_costs_nothing(place, text, says):
    """
    Catches: a list of which the first runs train for hours before the last one turns out to be mistyped.
    """
    code, out, err = go(place, text)
    assert code == 2 and says in err and err.count("\n") == 1 and err.startswith("error: "), err
    assert not out and not (place / "out").exists() and not (place / "results").exists()


@pytest.mark.parametrize("flags, says", [
    ("--recipe=nvfp5", "did you mean nvfp4"),
    ("--recipe=quartet --outlier_frac=0.1", "no format for outlier"),
    ("--recipe=mxfp4 --outer=128", "takes no outer scale"), ("--recipe=fp8 --osci=full", "--osci=off"),
    ("--recipe=nvfp4 --osci=full --quantizers=1", "add 2 to --quantizers"),
])
def test_a_recipe_that_does_not_fit_is_a_typo_too(tmp_path, flags, says):
    """ Catches: a list that is found out by its last run, when the others have trained for days. """
    (tmp_path / "list.txt").write_text(f"a | | 1\nb | {flags} | 1")
    with pytest.raises(config.ConfigError, match=r"list.txt:2: .*" + re.escape(says)):
        sweep.read_list(tmp_path / "list.txt")


@pytest.mark.parametrize("argv, says", [
    (["nowhere.txt"], "cannot read nowhere.txt"), (["."], "is to name a folder"),
    (["list.txt", "--jobs=0"], "--jobs=0: type how many"), (["list.txt", "--jobs=two"], "invalid int value"),
    (["list.txt", "--job=2"], "unrecognized arguments"), ([], "required: list"),
    (["binary.txt"], "binary.txt is not a text file"), (["long.txt"], "long.txt: longer than a megabyte"),
])
def test_a_mistyped_command_is_one_line(place, monkeypatch, capsys, argv, says):
    (place / "list.txt").write_text("a | | 1")
    (place / "binary.txt").write_bytes(b"\xff\xfe\x00\x80")
    (place / "long.txt").write_bytes(b"# \n" * 400_000)
    monkeypatch.chdir(place)
    assert sweep.main(argv) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1 and not (place / "out").exists(), err


def test_a_run_s_own_flag_wins_over_all(tmp_path):
    """ Catches: `--lr is given twice`, and an `all` that overrules the line. """
    path = tmp_path / "x.txt"
    # Notepad writes a mark before the first line
    path.write_text("all | --lr=1 --steps=7  # for all\na | --lr=2 | 1\nb | | 3 4\n", encoding="utf-8-sig")
    a, b, c = sweep.read_list(path)
    assert [(r.cfg.lr, r.cfg.steps, r.cfg.seed) for r in (a, b, c)] == [(2, 7, 1), (1, 7, 3), (1, 7, 4)]
    assert [run.folder for run in (a, c)] == [Path("out/x/a-s1"), Path("out/x/b-s4")]


def test_the_lists_that_come_with_it(monkeypatch):
    """ Catches: a renamed knob or config file. """
    monkeypatch.chdir(ROOT)
    for path in shipped("sweeps/*"):
        runs = sweep.read_list(path)
        assert f"sweeps/{path.name} " in path.read_text() and len(runs) > 1


def test_dry_run_starts_and_writes_nothing(place):
    code, out, _ = go(place, "all | --steps=3\na | --data='my text' | 1 2", "--dry_run")
    assert code == 0 and len(out.splitlines()) == 2 and "'--data=my text' --out=out/list --name=a-s2" in out
    assert not (place / "out").exists() and not (place / "results").exists()


# -----------------------------------------------------------------------------
# with the real train.py

def test_two_runs_of_two_seeds(shards, tmp_path):       # noqa: F811
    """
    Catches: numbers of another run or row, an unfinished run that starts anew, a finished one that does too.
    """
    flags = " ".join(tiny(shards, "--steps=4"))
    (tmp_path / "t.txt").write_text(f"all | {flags}\nplain | --recipe=bf16 | 1 2\n"
                                    "fp4 | --recipe=tetrajet_base | 1 2\n")
    run = dict(cwd=tmp_path, capture_output=True, text=True)
    subprocess.run([sys.executable, ROOT / "train.py", *flags.split(), "--recipe=bf16", "--seed=2",
                    "--out=out/t", "--name=plain-s2", "--stop_at=2"], check=True, **run)
    first = subprocess.run([sys.executable, ROOT / "sweep.py", "t.txt", "--jobs=2"], **run)
    assert first.returncode == 0 and not first.stderr, first.stderr
    assert "continuing from" in (tmp_path / "out/t/plain-s2/log.txt").read_text()
    table = rows(tmp_path, "t")
    assert list(table[0]) == list(sweep.COLUMNS)
    assert [(row["name"], row["seed"]) for row in table] == [
        ("plain", "1"), ("plain", "2"), ("fp4", "1"), ("fp4", "2")]
    assert {(row["status"], row["error"], row["steps"], row["tokens"]) for row in table} == {
        ("done", "", "4", "512")}
    gaps = []
    for row in table:
        folder = tmp_path / "out/t" / f"{row['name']}-s{row['seed']}"
        metrics = list(csv.DictReader((folder / "metrics.csv").open(newline="")))
        assert [row[key] for key in ("val_loss_fp4", "val_loss_bf16", "tokens", "seconds")] == [
            metrics[-1][key] for key in ("val_loss_fp4", "val_loss_bf16", "tokens", "seconds")]
        assert row["train_loss"] == metrics[-2]["train_loss"] != ""
        log = dict(line.split(": ", 1) for line in (folder / "log.txt").read_text().splitlines()[-8:])
        assert [row[key] for key in sweep.FROM_LOG] == [log[key] for key in sweep.FROM_LOG]
        assert f"--recipe={'bf16' if row['name'] == 'plain' else 'tetrajet_base'}" in row["flags"].split()
        gaps.append(float(row["val_loss_fp4"]))
    gaps = [gaps[2] - gaps[0], gaps[3] - gaps[1]]
    text = (tmp_path / "results/t/summary.md").read_text()
    assert f"{sum(gaps) / 2 + 0.0:+.4f} +- {stdev(gaps):.4f}" in text and text in first.stdout
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    again = subprocess.run([sys.executable, ROOT / "sweep.py", "t.txt"], **run)
    assert again.returncode == 0 and "started" not in again.stdout
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


# -----------------------------------------------------------------------------
# scheduling, with the fake one

@pytest.mark.parametrize("jobs", [1, 2])
def test_as_many_at_a_time_as_asked(place, jobs):
    """ Catches: --jobs ignored; a slot that is not given to the next run, or given twice. """
    code, _, err = go(place, "a | | 1 2\nb | | 1 2\n", f"--jobs={jobs}")
    assert code == 0, err
    now, most = 0, 0
    for line in (place / "events.txt").read_text().splitlines():
        now += {"begin": 1, "end": -1}[line.split()[0]]
        most = max(most, now)
    assert most == jobs and now == 0


def test_all_names_train_one_seed_before_any_trains_two(place):
    """ Catches: a sweep cut short that has three seeds of one name, and nothing to compare them with. """
    assert go(place, "a | | 5 2\nb | | 1 2\n")[0] == 0
    assert [name for name, _ in events(place, "begin")] == ["a-s5", "b-s1", "a-s2", "b-s2"]
    assert [row["name"] + row["seed"] for row in rows(place)] == ["a5", "a2", "b1", "b2"]


@posix
def test_a_sweep_that_nobody_listens_to(place):
    """ Catches: a sweep started by a service without a stdout, which once ended it before its first run. """
    (place / "list.txt").write_text("a | | 1")
    done = subprocess.run(f"{shlex.quote(sys.executable)} sweep.py list.txt >&-", shell=True, cwd=place,
                          capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr and rows(place)[0]["status"] == "done", done.stderr


@posix
def test_a_failure_stops_no_other_run(place):
    """
    Catches: a sweep that ends at the first failure; a failed run that is dropped, passes for done, hides its
    reason or is never tried again; a file in the way of a run's folder; a measured loss that is thrown away.
    """
    (place / "out" / "list").mkdir(parents=True)
    (place / "out" / "list" / "file-s1").write_text("")
    text = "bad | | 1\ncrash | | 1\nliar | | 1\nfile | | 1\na | | 1\nlate | | 1\n"
    code, out, _ = go(place, text)
    assert code == 1
    found = {row["name"]: (row["status"], row["error"], row["val_loss_fp4"]) for row in rows(place)}
    assert found.pop("file")[:2] == ("failed", "cannot start in out/list/file-s1: File exists; "
                                               "make room or way for it")
    assert found == {"bad": ("failed", "no recipe is called 'x'[2J", ""),
                     "crash": ("failed", "killed by signal 9", ""),
                     "liar": ("failed", "metrics.csv has no validation loss of step 600: a full disk?", ""),
                     "a": ("done", "", "1.004"),
                     "late": ("done", "no room for the last checkpoint", "1.004")}
    assert "| bad   | n=0 of 1 |" in out and "- bad-s1: failed, no recipe is called" in out
    code, out, _ = go(place, text)
    failed = ["bad-s1", "crash-s1", "liar-s1"]
    assert code == 1 and [name for name, _ in events(place, "begin")] == [*failed, "a-s1", "late-s1", *failed]


def test_results_that_cannot_be_written(place):
    """ Catches: hours of runs whose table has no place; a sweep that a full disk ends half-way. """
    (place / "results").write_text("")
    code, _, err = go(place, "a | | 1\n")
    assert code == 2 and "cannot write results" in err and not events(place, "begin")
    (place / "results").unlink()
    code, out, err = go(place, "full | | 1\na | | 1\n")
    assert code == 1 and "cannot write results" in err and len(events(place, "end")) == 2
    assert "| full | n=1" in out and not list(place.rglob("*.tmp"))


# -----------------------------------------------------------------------------
# kills

@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_leaves_no_child(place, number):
    """
    Catches: training that goes on, unseen, after Ctrl-C or a closed terminal; a run's own children left over.
    """
    text = "a | | 1\nwait | | 1 2\n"
    process = start(place, text, "--jobs=2")
    wait_for(lambda: len(events(place, "child")) == 2)
    pids = [pid for line in events(place, "child") for pid in (line[0], line[2])]
    assert all(map(alive, pids))
    wait_for(lambda: [row["status"] for row in rows(place)] == ["done", "running", "running"])
    process.send_signal(number)
    code, out, err = finish(process)
    assert code == 128 + number and not err
    wait_for(lambda: not any(map(alive, pids)))
    assert [(row["status"], row["error"]) for row in rows(place)] == [
        ("done", ""), *[("missing", "stopped; the same command goes on with it")] * 2]
    (place / "go").touch()
    assert go(place, text)[0] == 0
    assert [name for name, _ in events(place, "end")] == ["a-s1", "wait-s1", "wait-s2"]


def start_after_kill_9(place, text: str):
    """ A sweep that begins while the child of a killed one, on the same list, is still training. """
    killed = start(place, text)
    wait_for(lambda: len(events(place, "child")) == 1)
    killed.kill()
    killed.communicate()
    return start(place, text)


@posix
def test_after_kill_9_no_run_is_trained_twice(place):
    """
    Catches: two processes in one folder, and a second one beside the orphan of the first on a GPU for one.
    """
    text = "wait | | 1\na | | 1\n"
    second = start_after_kill_9(place, text)
    wait_for(lambda: (place / "results/list/runs.csv").exists() and rows(place)[0]["status"] == "running")
    time.sleep(0.5)
    assert len(events(place, "begin")) == 1
    (place / "go").touch()
    code, out, err = finish(second)
    assert code == 0 and not err and "waiting for it" in out
    assert [name for name, _ in events(place, "begin")] == ["wait-s1", "a-s1"]
    assert [row["status"] for row in rows(place)] == ["done", "done"]


@posix
def test_an_orphan_that_dies_is_continued(place):
    """ Catches: a run that another process left unfinished and that stays "running" for ever. """
    text = "wait | | 1\n"
    second = start_after_kill_9(place, text)
    time.sleep(0.5)
    [[child, _, pid]] = events(place, "child")
    os.kill(int(pid), signal.SIGKILL)
    os.kill(int(child), signal.SIGKILL)
    wait_for(lambda: len(events(place, "begin")) == 2)
    (place / "go").touch()
    assert finish(second)[0] == 0 and rows(place)[0]["status"] == "done"


@posix
def test_a_list_is_run_once_at_a_time(place):
    """ Catches: two sweeps of one list, which would overwrite each other's runs.csv. """
    first = start(place, "wait | | 1\n")
    wait_for(lambda: len(events(place, "child")) == 1)
    code, _, err = go(place, "wait | | 1\n")
    assert code == 2 and "another sweep.py works in" in err
    (place / "go").touch()
    assert finish(first)[0] == 0 and len(events(place, "begin")) == 1


@posix
def test_a_race_for_a_folder_is_waited_for(place):
    """
    Catches: a run that counts as failed because another process locked its folder after sweep.py had looked.
    """
    (place / "sweep.py").write_text((ROOT / "sweep.py").read_text().replace(
        "def begin(run: Run):", "def begin(run: Run, locked=lambda run: False):"))
    text = "wait | | 1\n"
    folder = place / "out/list/wait-s1"
    folder.mkdir(parents=True)
    other = subprocess.Popen([sys.executable, "train.py", "--out=out/list", "--name=wait-s1"], cwd=place)
    wait_for(lambda: len(events(place, "child")) == 1)
    process = start(place, text)
    wait_for(lambda: "another process" in "".join(p.read_text() for p in folder.glob("stderr.txt")))
    time.sleep(0.3)
    (place / "go").touch()
    code, out, _ = finish(process)
    other.wait()
    assert code == 0 and "is training in" in out and len(events(place, "begin")) == 1


# -----------------------------------------------------------------------------
# what lies in a run's folder

GOOD = "step,train_loss,val_loss_fp4,val_loss_bf16\n0,3,,\n5,,2.5,2.25\n"


@pytest.fixture
def run(tmp_path, monkeypatch) -> sweep.Run:
    """ A run of 5 steps, whose folder is there and is empty. """
    monkeypatch.chdir(tmp_path)
    Path("x.txt").write_text("a | --steps=5 | 1\n")
    [one] = sweep.read_list(Path("x.txt"))
    one.folder.mkdir(parents=True)
    return one


@pytest.mark.parametrize("text", [
    GOOD[:-1], GOOD[:-3], GOOD.replace("5,,", "4,,"), GOOD.replace("2.5,", ","), GOOD.replace("2.25", "nan"),
    GOOD + "6,,,\n", GOOD.replace("2.25", "2.25,1"), GOOD.replace("2.25", "x"), "", "\n", "\0,,\n\0,,\n",
])
def test_what_is_not_the_last_validation_loss_is_not_taken_for_it(run, text):
    """ Catches: half a row on a full disk read as another number; the loss of an earlier step. """
    (run.folder / "config.json").write_text("{}")
    (run.folder / "metrics.csv").write_text(text)
    assert sweep.measured(run) == {}


def test_numbers_come_from_the_end_of_the_log(run):
    """ Catches: a sample of text that the model wrote taken for a measurement; text where a number is. """
    (run.folder / "metrics.csv").write_text(GOOD)
    (run.folder / "log.txt").write_text("peak_gib: 9.99\n" + "\n" * 5 + "peak_gib: lots\nbackend: reference\n"
                                        "tokens_per_s: 99\ncommit: abc1234+\n")
    assert sweep.measured(run) == {"val_loss_fp4": "2.5", "val_loss_bf16": "2.25", "train_loss": "3",
                                   "backend": "reference", "tokens_per_s": "99", "commit": "abc1234+"}


@pytest.mark.parametrize("before, status, says", [
    ('{"steps": 5, "lr": 0.5, "name": "a-s1"}', "failed", "holds a run with lr=0.5; give this line"),
    ('{"steps": 5, "micro_batch": 2}', "done", ""),
    ('{"nobody": 5}', "failed", "cannot be read"), ("[1]", "failed", "cannot be read"),
    ("{", "failed", "cannot be read"),
])
def test_numbers_of_other_settings_are_not_those_of_the_list(run, before, status, says):
    """ Catches: a list that was edited, and whose rows then show old numbers beside new flags. """
    (run.folder / "metrics.csv").write_text(GOOD)
    (run.folder / "config.json").write_text(before)
    sweep.look(run)
    assert run.status == status and says in run.error and bool(run.values) == (status == "done")


def test_a_run_that_is_in_the_way_is_left_alone(place):
    """ Catches: a finished run whose checkpoints were deleted, and which an edited list then overwrites. """
    assert go(place, "a | --steps=3 | 1\n")[0] == 0
    folder = place / "out/list/a-s1"
    before = {path: path.read_bytes() for path in folder.iterdir()}
    code, out, _ = go(place, "a | --steps=3 --lr=0.5 | 1\nb | | 1\n")
    assert code == 1 and before == {path: path.read_bytes() for path in folder.iterdir()}
    assert [row["status"] + row["val_loss_fp4"] for row in rows(place)] == ["failed", "done1.004"]
    assert "- a-s1: failed, out/list/a-s1 holds a run with lr=0.004; give this line" in out


# -----------------------------------------------------------------------------
# the table

def test_the_table_by_hand(tmp_path):
    """
    Catches: a gap between means of different seeds, sd with n instead of n - 1, seeds paired by position, an
    unfinished run that counts.

    a: 2.0 2.1 2.5 for seeds 1 2 3: mean 2.2, sd sqrt((.04 + .01 + .09) / 2) = .2646
    b: 2.7 (seed 3), 2.4 (seed 2), seed 1 failed: gaps +.2, +.3: mean +.25, sd .0707. c: one seed, none paired
    """
    path = tmp_path / "x.txt"
    path.write_text("a | | 1 2 3\nb | | 3 2 1\nc | | 9\nd | | 1\n")
    runs = sweep.read_list(path)
    losses = {("a", 1): 2.0, ("a", 2): 2.1, ("a", 3): 2.5, ("b", 3): 2.7, ("b", 2): 2.4, ("c", 9): 3.0,
              ("d", 1): 1.99996}
    for r in runs:
        if loss := losses.get((r.name, r.seed)):
            r.status = "done"
            r.values = {"val_loss_fp4": str(loss), "val_loss_bf16": str(loss - (r.name == "b"))}
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in sweep.table(runs).splitlines()[2:]]
    assert cells == [
        ["a", "n=3", "2.2000 +- 0.2646", "2.2000 +- 0.2646", "-", "-", "-"],
        ["b", "n=2 of 3", "2.5500 +- 0.2121", "1.5500 +- 0.2121", "n=2",
         "+0.2500 +- 0.0707", "-0.7500 +- 0.0707"],
        ["c", "n=1", "3.0000", "3.0000", "-", "-", "-"],
        ["d", "n=1", "2.0000", "2.0000", "n=1", "+0.0000", "+0.0000"]]
    text = sweep.summary(runs, path)
    assert "- b-s1: missing" in text and "Gaps are to a," in text and "Commit: unknown" in text

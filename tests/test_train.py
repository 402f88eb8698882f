"""
The loop: exact resumption, equal batches however they are cut, kills, full disks, and one line per mistake.
"""
import csv
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import data
import train
from config import CHOICES, KINDS, ConfigError, parse
from eval import commit, read_checkpoint
from quant import QuantLinear
from recipes import RECIPES

ROOT = Path(__file__).resolve().parent.parent
RECIPE_FILES = sorted(path.name for path in (ROOT / "configs").glob("*.py")
                      if "\nrecipe =" in path.read_text())

# a model that takes a few milliseconds a step; K = 48 and 40 are no multiples of 128, 32 or, once, 16
TINY = ["--n_layer=1", "--d_model=48", "--n_head=2", "--d_ff=40", "--seq_len=32", "--batch_tokens=128",
        "--steps=20", "--log_every=1", "--eval_every=0", "--eval_tokens=64", "--save_every=0",
        "--sample_tokens=0", "--device=cpu"]
# both windows are open at step 10: calibration over steps 8 to 17, OsciReset from 8 to 14.
# A calibration that ended inside the OsciReset window would void the latter
WINDOWS = ["--outlier_frac=0.1", "--outlier_start=0.4", "--outlier_window=0.5", "--osci_start=0.4",
           "--osci_period=0.5", "--osci_window=0.3", "--osci_tau=2"]


@pytest.fixture(scope="session")
def shards(tmp_path_factory) -> Path:
    """ A folder of token shards: text with plenty to learn, so that the loss falls within a few steps. """
    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(0)
    words = [bytes(rng.integers(97, 123, n, dtype=np.uint8)) + b" " for n in rng.integers(2, 6, 12)]
    for name, n in (("a_train_000001", 4000), ("a_val_000000", 800)):
        text = b"".join(words[i] for i in rng.integers(0, 12, n))
        data.write_shard(folder / f"{name}.bin", np.frombuffer(text, np.uint8).astype(np.uint16))
    (folder / "meta.json").write_text('{"encoding": "bytes"}')
    return folder


def tiny(data_folder, *flags: str) -> list[str]:
    """ The flags of TINY and these, which win. """
    flags = [f"--data={data_folder}", *flags]
    last = {flag.split("=")[0]: flag for flag in TINY + flags if flag.startswith("--")}
    return [flag for flag in flags if not flag.startswith("--")] + list(last.values())


@pytest.fixture
def go(shards, tmp_path, capsys):
    """ go(name, *flags) trains a tiny model in out/name -> (its folder, what it printed). """
    def run(name: str, *flags: str):
        train.main(tiny(shards, f"--out={tmp_path}", f"--name={name}", *flags))
        return tmp_path / name, capsys.readouterr().out
    return run


def last_state(folder: Path) -> dict:
    return read_checkpoint(sorted(folder.glob("ckpt_*.pt"))[-1])


def assert_same(a, b, where: str = "state"):
    """ Equal bit for bit, all the way down. """
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, f"{where}.{i}")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    else:
        assert a == b, where


def learned(state: dict) -> dict:
    """ What training computed, without what says where, when and how often it was written down. """
    return {key: state[key] for key in ("step", "model", "optimizer", "osci", "outliers")}


def rows(folder: Path) -> list[dict]:
    return list(csv.DictReader((folder / "metrics.csv").open(newline="")))


def test_blocks_computed_again_change_nothing(go, monkeypatch):
    """ Catches: noise that is drawn anew in the second pass, channels that are measured differently. """
    flags = ["--recipe=tetrajet_full", *WINDOWS, "--osci=full", "--micro_batch=2"]
    calls = []
    forward = QuantLinear.forward
    monkeypatch.setattr(QuantLinear, "forward", lambda layer, x: calls.append(1) or forward(layer, x))
    states = []
    for name in ("kept", "again"):
        calls.clear()
        folder, _ = go(name, *flags, f"--recompute={name == 'again'}")
        states.append((len(calls), learned(last_state(folder))))
    (kept, a), (again, b) = states
    assert again > 1.4 * kept
    assert_same(a, b)


# -----------------------------------------------------------------------------
# 10 + resume + 10 = 20

@pytest.mark.parametrize("recipe, flags", [
    ("bf16", []),
    ("tetrajet_full", [*WINDOWS, "--osci=full"]),
    ("tetrajet_full", [*WINDOWS, "--osci=topk", "--osci_track=0.2"]),
    ("tetrajet_full", [*WINDOWS, "--osci=edge", "--micro_batch=2"]),
    ("tetrajet_released", [*WINDOWS, "--osci=topk", "--osci_track=1", "--shuffle=7"]),
    ("tetrajet_full", [*WINDOWS, "--osci=random", "--outlier_choice=random"]),
    ("tetrajet_full", [*WINDOWS, "--osci=nearest", "--outlier_start=0.1", "--outlier_window=0.3",
                       "--outlier_log=0.35"]),
    ("tetrajet_full", [*WINDOWS, "--osci=qema", "--osci_start=0.3", "--osci_period=0.6"]),
    ("tetrajet_full", [*WINDOWS, "--osci=freeze", "--osci_threshold=0", "--lr=1e-2"]),
    ("tetrajet_full", [*WINDOWS, "--osci=dampen", "--micro_batch=2"]),
])
def test_ten_plus_ten_is_twenty(go, recipe, flags):
    """
    Catches: any state that a checkpoint forgets (Adam, an open OsciReset or calibration window,
    the noise counter, the data position), and evaluation or logging that touches training.
    Bit for bit, with other intervals after resuming.
    """
    flags = [f"--recipe={recipe}", *flags]
    straight, _ = go("straight", *flags)
    go("resumed", *flags, "--stop_at=10", "--log_every=3", "--save_every=4")
    stopped = last_state(straight.parent / "resumed")
    assert stopped["step"] == 10
    if "--osci=full" in flags or "--osci=topk" in flags:
        assert stopped["osci"]["windows"] and stopped["outliers"]["norms"], "both windows should be open"
    resumed, printed = go("resumed", *flags, "--eval_every=3", "--log_every=2", "--save_every=7")
    assert "continuing from" in printed
    assert_same(learned(last_state(straight)), learned(last_state(resumed)))


def test_evaluation_and_logging_touch_no_training_state(go):
    """
    Catches: evaluation that draws from a shared generator, advances the counter, or leaves a flag set.
    """
    flags = ["--recipe=tetrajet_full", *WINDOWS, "--osci=full"]
    quiet, _ = go("quiet", *flags, "--log_every=0")
    busy, _ = go("busy", *flags, "--eval_every=1", "--save_every=1", "--sample_tokens=20")
    assert_same(learned(last_state(quiet)), learned(last_state(busy)))


def test_resuming_forgets_the_rows_that_will_be_written_again(go):
    """ Catches: metrics.csv with two rows for one step, or a gap, after a kill between two checkpoints. """
    flags = ["--recipe=tetrajet_base", "--eval_every=5"]
    folder, _ = go("r", *flags, "--stop_at=10")
    with open(folder / "metrics.csv", "a") as f:
        f.write("10,1280,9\n11,14")                        # rows of steps after the checkpoint, one cut off
    go("r", *flags)
    assert [int(row["step"]) for row in rows(folder)] == list(range(21))
    straight, _ = go("s", *flags)
    for column in ("step", "tokens", "lr", "train_loss", "val_loss_fp4", "val_loss_bf16"):
        assert [row[column] for row in rows(folder)] == [row[column] for row in rows(straight)], column


# -----------------------------------------------------------------------------
# batches

def steps_of(shards, micro_batch: int, *flags) -> train.Trainer:
    """ A trainer after three steps of four sequences in micro-batches of the given size. """
    cfg = parse(tiny(shards, f"--micro_batch={micro_batch}", *flags))
    trainer = train.Trainer(cfg, data.open_corpus(str(shards)))
    trainer.losses = [float(trainer.train_step()["train_loss"]) for _ in range(3)]
    return trainer


@pytest.mark.parametrize("flags", [("--recipe=bf16",), ("--recipe=tetrajet_base", "--quantizers=1,2")])
def test_the_split_into_micro_batches_does_not_matter(shards, flags):
    """
    Catches: a mean of means, gradients divided twice or not at all, data that depends on the micro-batch.
    With stochastic rounding off, 1x4 = 2x2 = 4x1 up to the order of float32 sums.
    """
    one, two, four = (steps_of(shards, size, *flags) for size in (4, 2, 1))
    for other in (two, four):
        # Adam's first steps are lr * sign(g) where a gradient is near 0,
        # so compare what the steps did to the loss
        np.testing.assert_allclose(one.losses, other.losses, rtol=2e-5)


def test_gradient_of_micro_batches_equals_that_of_the_batch(shards):
    """ The same at the level of the gradient, where float32 bounds it: no optimizer in between. """
    grads = []
    for size in (4, 2, 1):
        cfg = parse(tiny(shards, f"--micro_batch={size}", "--recipe=bf16", "--clip=0", "--lr=1e-30"))
        trainer = train.Trainer(cfg, data.open_corpus(str(shards)))
        trainer.optimizer.zero_grad = lambda set_to_none: None
        trainer.train_step()
        grads.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters()]))
    for other in grads[1:]:
        assert (grads[0] - other).norm() < 1e-6 * grads[0].norm()


def test_micro_steps_have_their_own_noise(shards):
    """
    Catches: a counter that is set once a step, so that all micro-batches of it share their rounding noise.
    """
    seen = []
    cfg = parse(tiny(shards, "--micro_batch=2", "--recipe=tetrajet_base"))
    trainer = train.Trainer(cfg, data.open_corpus(str(shards)))
    forward = trainer.forward
    trainer.forward = lambda *a: (seen.append(trainer.counter.state.tolist()), forward(*a))[1]
    trainer.train_step(), trainer.train_step()
    assert [state[1:3] for state in seen] == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_data_order_is_the_seed_s(shards):
    """ Catches: batches that ignore the seed, or that repeat from step to step. """
    def batch(seed, step):
        trainer = train.Trainer(parse(tiny(shards, f"--seed={seed}")), data.open_corpus(str(shards)))
        trainer.step = step
        return torch.cat([x for _, x, _ in trainer.micro_batches()])
    assert torch.equal(batch(1, 3), batch(1, 3))
    assert not torch.equal(batch(1, 3), batch(2, 3)) and not torch.equal(batch(1, 3), batch(1, 4))


def test_learning_rate():
    """
    Catches: off-by-one warm-up (a first step of rate 0), a decay that misses its floor or goes below it.
    """
    cfg = parse(["--steps=100", "--warmup=0.1", "--lr=1", "--lr_final=0.1", "--decay_end=0.9"])
    rate = [train.learning_rate(cfg, step) for step in range(100)]
    assert rate[0] == pytest.approx(0.1) and rate[9] == rate[10] == 1
    assert rate[50] == pytest.approx(0.55) and rate[90:] == pytest.approx([0.1] * 10)
    assert all(a >= b for a, b in zip(rate[9:], rate[10:]))
    linear = parse(["--steps=100", "--warmup=0", "--lr=1", "--lr_final=0", "--schedule=linear"])
    assert [train.learning_rate(linear, step) for step in (0, 25, 75)] == [1, 0.75, 0.25]


# -----------------------------------------------------------------------------
# every recipe trains

@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_runs_three_steps(go, recipe):
    _, printed = go(recipe, f"--recipe={recipe}", "--steps=3")
    assert "val_loss_fp4" in printed


@pytest.mark.parametrize("name", RECIPE_FILES)
def test_every_recipe_file_trains_and_acts(go, name):
    """ Catches: a config file whose method never acts; and a method that does not learn. """
    folder, printed = go(name, f"configs/{name}", "--steps=40", "--lr=1e-2")
    full = name in ("tetrajet_full.py", "tetrajet_released.py")
    assert ("OutControl keeps" in printed) == full and ("OsciReset put" in printed) == full
    losses = [float(row["train_loss"]) for row in rows(folder) if row["train_loss"]]
    corpus = data.open_corpus(json.loads((folder / "config.json").read_text())["data"])
    assert losses[0] > 4.5 and losses[-1] < corpus.train.unigram_entropy(), "no better than counting letters"


def test_bf16_has_one_loss_and_fp4_has_two(go):
    """ Catches: a `bf16` validation that still rounds, or an `fp4` one that does not. """
    bf16, _ = go("a", "--recipe=bf16", "--steps=5")
    base, _ = go("b", "--recipe=tetrajet_base", "--steps=5")
    last = rows(bf16)[-1]
    assert last["val_loss_fp4"] == last["val_loss_bf16"]
    last = rows(base)[-1]
    assert last["val_loss_fp4"] != last["val_loss_bf16"]


def test_the_switch_to_outlier_channels_is_no_jump(shards):
    """
    Catches: channels dropped or doubled at the switch: the loss of one batch before and after, same weights.
    """
    cfg = parse(tiny(shards, "--recipe=tetrajet_full", *WINDOWS))
    trainer = train.Trainer(cfg, data.open_corpus(str(shards)))
    for _ in range(17):
        trainer.train_step()
    _, inputs, targets = next(trainer.micro_batches())

    def loss():
        ce, _, n = trainer.model(inputs, targets)
        return float(ce.detach() / n)

    trainer.outliers.begin_step(17)
    before = loss()
    assert trainer.outliers.after_step(17).chosen and all(layer.split for layer in trainer.layers.values())
    assert loss() != before and abs(loss() - before) < 0.02


# -----------------------------------------------------------------------------
# kills, torn files, full disks, NaN

def command(shards, out, *flags) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), *tiny(shards, f"--out={out}", "--name=r", *flags)]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_kill_at_any_moment(shards, tmp_path):
    """ Catches: a checkpoint written in place, a torn one that is believed, rows lost or doubled. """
    flags = ["--recipe=tetrajet_full", *WINDOWS, "--osci=full", "--save_every=1"]
    assert subprocess.run(command(shards, tmp_path / "straight", *flags), capture_output=True).returncode == 0
    killed = 0
    for delay in (0.02, 0.11, 0.2):
        with subprocess.Popen(command(shards, tmp_path / "killed", *flags),
                              stdout=subprocess.PIPE, text=True) as run:
            for line in run.stdout:
                if re.match(r"step \d+/", line):
                    break
            time.sleep(delay)
            run.send_signal(signal.SIGKILL)
        killed += run.returncode == -signal.SIGKILL
    assert killed >= 2
    last = subprocess.run(command(shards, tmp_path / "killed", *flags), capture_output=True, text=True)
    # the run may have been done by the time of the last kill
    assert last.returncode == 0 or "finished" in last.stderr, last.stderr
    a, b = tmp_path / "straight" / "r", tmp_path / "killed" / "r"
    assert_same(learned(last_state(a)), learned(last_state(b)))
    assert [row["train_loss"] for row in rows(a)] == [row["train_loss"] for row in rows(b)]
    assert not list(b.glob("*.tmp")) and len(list(b.glob("ckpt_*.pt"))) == 2


@pytest.mark.parametrize("left", ["", "20,2560,", None])
def test_a_kill_during_the_last_evaluation(go, left):
    """
    Catches: a run that is refused as finished, though it was killed before its last validation loss.
    """
    folder, _ = go("r", "--recipe=tetrajet_base")
    path = folder / "metrics.csv"
    straight, kept = path.read_text(), path.read_text().splitlines(keepends=True)[:-1]
    path.write_text("".join(kept) + (left or ""))
    if left is None:
        path.unlink()
    _, printed = go("r", "--recipe=tetrajet_base")
    assert "val_loss_fp4: " in printed and "left" not in printed
    assert path.read_text() == (straight if left is not None else kept[0] + straight.splitlines(True)[-1])
    with pytest.raises(SystemExit):
        go("r", "--recipe=tetrajet_base")


def test_a_torn_checkpoint_is_skipped(go):
    """ Catches: a resume that trusts the newest file, or dies of it. """
    flags = ["--recipe=tetrajet_base", "--save_every=5"]
    straight, _ = go("straight", *flags)
    torn, _ = go("torn", *flags, "--stop_at=10")
    newest = sorted(torn.glob("ckpt_*.pt"))[-1]
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size * 7 // 10])
    _, printed = go("torn", *flags)
    assert re.search(r"skipping a checkpoint: .*000010\.pt is torn", printed) and "step 5" in printed
    assert_same(learned(last_state(straight)), learned(last_state(torn)))


def test_a_checkpoint_with_a_nan_is_skipped(go):
    """ Catches: a damaged checkpoint that is resumed, fails, and is named as the one to continue from. """
    folder, _ = go("r", "--recipe=bf16", "--save_every=5", "--stop_at=10")
    state = read_checkpoint(folder / "ckpt_000000010.pt")
    state["model"]["head.weight"][3, 5] = torch.nan
    torch.save(state, folder / "ckpt_000000010.pt")
    _, printed = go("r", "--recipe=bf16", "--save_every=5")
    assert "ckpt_000000010.pt has a NaN" in printed and "ckpt_000000005.pt, step 5" in printed


def moments(state: dict, change, key: str = "exp_avg"):
    """ Change one of Adam's tensors of the largest weight. """
    largest = max(state["optimizer"]["state"].values(), key=lambda tensors: tensors[key].numel())
    largest[key] = change(largest[key])


def window(state: dict, key: str, change):
    kept = next(iter(state["osci"]["windows"].values()))
    kept[key] = change(kept[key])


@pytest.mark.parametrize("spoil", [
    lambda s: moments(s, lambda t: t[:1, :1].clone().expand_as(t)),
    lambda s: moments(s, lambda t: t.t().contiguous().t()),
    lambda s: moments(s, lambda t: t - 1, "exp_avg_sq"),
    lambda s: window(s, "w", lambda t: t.double()), lambda s: window(s, "w", lambda t: t[:3]),
    lambda s: window(s, "w", lambda t: t.to_sparse()), lambda s: window(s, "excess", lambda t: t * torch.nan),
    lambda s: window(s, "flags", lambda t: None), lambda s: window(s, "columns", lambda t: t + 1000),
    lambda s: window(s, "inner", lambda t: t.t().contiguous().t()),
    lambda s: s["outliers"]["norms"].update({name: t[:3] for name, t in s["outliers"]["norms"].items()}),
    lambda s: s["outliers"]["norms"].update({name: t.long() for name, t in s["outliers"]["norms"].items()}),
    lambda s: s["outliers"]["norms"].update({name: -t for name, t in s["outliers"]["norms"].items()})])
def test_tensors_of_a_checkpoint_that_do_not_fit_are_one_line(go, capsys, spoil):
    """
    Catches: moments of other strides, which the fused update runs past the end of or takes in another order;
    windows and norms whose shapes, types or places kernels would trust; a traceback steps later.
    """
    flags = ["--recipe=tetrajet_full", "--outlier_frac=0.1", "--outlier_start=0.2", "--outlier_window=0.3",
             "--osci=topk", "--osci_track=0.2", "--osci_start=0.2", "--osci_period=0.4", "--osci_window=0.3"]
    folder, _ = go("r", *flags, "--stop_at=7")
    path = folder / "ckpt_000000007.pt"
    state = read_checkpoint(path)
    assert state["osci"]["windows"] and state["outliers"]["norms"], "both windows should be open"
    spoil(state)
    torch.save(state, path)
    with pytest.raises(SystemExit) as error:
        go("r", *flags)
    err = capsys.readouterr().err
    assert error.value.code == 2 and "the checkpoint does not fit" in err and err.count("\n") == 1, err


def test_a_window_from_before_channels_were_chosen_is_resumed(go):
    """ Catches: a saved window held against one opened now, whose rows have fewer places to choose from. """
    flags = ["--recipe=tetrajet_full", "--outlier_frac=0.2", "--outlier_start=0.2", "--outlier_window=0.1",
             "--osci=topk", "--osci_track=1", "--osci_start=0", "--osci_period=0.9", "--osci_window=0.8"]
    straight, _ = go("straight", *flags)
    stopped, _ = go("stopped", *flags, "--stop_at=10")
    go("stopped", *flags)
    assert_same(learned(last_state(straight)), learned(last_state(stopped)))


def test_a_clock_that_goes_back_loses_nothing(go, monkeypatch):
    """ Catches: seconds below zero, for which all checkpoints of a run were refused; a division by them. """
    now = iter(range(10**6, 0, -1))
    monkeypatch.setattr(train.time, "time", lambda: float(next(now)))
    monkeypatch.setattr(train.time, "perf_counter", lambda: 5.0)
    folder, _ = go("r", "--recipe=bf16", "--stop_at=6")
    monkeypatch.undo()
    assert read_checkpoint(folder / "ckpt_000000006.pt")["seconds"] == 0
    _, printed = go("r", "--recipe=bf16")
    assert "continuing from" in printed and "val_loss_bf16" in printed


def test_a_run_whose_checkpoints_are_all_torn_is_not_overwritten(go, capsys):
    folder, _ = go("r", "--stop_at=5", "--recipe=bf16")
    before = (folder / "metrics.csv").read_bytes()
    for path in folder.glob("ckpt_*.pt"):
        path.write_bytes(b"not a checkpoint")
    with pytest.raises(SystemExit) as error:
        go("r", "--recipe=bf16")
    assert error.value.code == 2 and "none can be read" in capsys.readouterr().err
    assert (folder / "metrics.csv").read_bytes() == before


def test_a_checkpoint_with_code_in_it_is_refused(go, capsys, tmp_path):
    """ Catches: torch.load without weights_only, which would run whatever a file says. """
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)
    folder, _ = go("r", "--stop_at=5", "--recipe=bf16")
    for path in folder.glob("ckpt_*.pt"):
        torch.save({"format": 1, "evil": Evil()}, path)
    with pytest.raises(SystemExit):
        go("r", "--recipe=bf16")
    assert not (tmp_path / "evil").exists() and "none can be read" in capsys.readouterr().err


def test_a_full_disk_is_reported_and_keeps_the_previous_checkpoint(shards, tmp_path):
    """
    Catches: a failed save that kills the run, deletes the good checkpoint, or goes unnoticed at the end.
    """
    resource = pytest.importorskip("resource")
    flags = ["--recipe=bf16", "--steps=12", "--save_every=4"]
    assert subprocess.run(command(shards, tmp_path, *flags, "--stop_at=4"),
                          capture_output=True).returncode == 0
    size = next((tmp_path / "r").glob("ckpt_*.pt")).stat().st_size

    def small_disk():
        # the closest a test gets to a full disk: no file may pass this size, writes beyond it fail
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))
    full = subprocess.run(command(shards, tmp_path, *flags), capture_output=True, text=True,
                          preexec_fn=small_disk)
    assert full.returncode == 1 and "Traceback" not in full.stderr, full.stderr
    assert full.stdout.count("cannot save") == 2 and "ckpt_000000004.pt is kept" in full.stdout
    assert "enforce fail" not in full.stdout, "what PyTorch says of a full disk tells a user nothing"
    assert [path.name for path in (tmp_path / "r").glob("ckpt_*")] == ["ckpt_000000004.pt"]
    # with space again, the run goes on from there
    again = subprocess.run(command(shards, tmp_path, *flags), capture_output=True, text=True)
    assert again.returncode == 0 and "step 4" in again.stdout


def test_nan_stops_the_run_and_keeps_the_last_good_checkpoint(go, capsys):
    """ Catches: a run that trains on NaN for days, or saves it over the good weights. """
    go("r", "--recipe=tetrajet_base", "--save_every=5", "--stop_at=10")
    good = train.Trainer.train_step

    def poison(self):
        with torch.no_grad():
            self.layers["blocks.0.mlp.up"].weight[3, 5] = torch.nan
        return good(self)
    train.Trainer.train_step = poison
    try:
        with pytest.raises(SystemExit) as error:
            go("r", "--recipe=tetrajet_base", "--save_every=5", "--log_every=0")
    finally:
        train.Trainer.train_step = good
    err = capsys.readouterr().err
    assert (error.value.code == 1 and "not finite" in err and "ckpt_000000010.pt" in err
            and err.count("\n") == 1)


def test_a_last_update_that_ends_in_nan_is_no_result(go, capsys, monkeypatch):
    """ Catches: code 0, a row in metrics.csv and a checkpoint of weights that no later loss has seen. """
    good = train.Trainer.train_step

    def poison(self):
        seen = good(self)
        if self.step == 20:
            with torch.no_grad():
                self.layers["blocks.0.mlp.up"].weight[3, 5] = torch.nan
        return seen
    monkeypatch.setattr(train.Trainer, "train_step", poison)
    with pytest.raises(SystemExit) as error:
        go("r", "--recipe=bf16", "--save_every=10")
    err = capsys.readouterr().err
    assert error.value.code == 1 and "blocks.0.mlp.up.weight" in err and "ckpt_000000010.pt" in err


@pytest.mark.parametrize("flags", [["--eval_every=5"], []])
def test_a_validation_loss_that_is_not_finite_ends_the_run(go, capsys, monkeypatch, flags):
    """ Catches: code 0 for a run without a result, and the same run again called finished. """
    monkeypatch.setattr(train, "val_losses", lambda *_: {"val_loss_fp4": torch.nan, "val_loss_bf16": 1.0})
    for _ in range(2):
        with pytest.raises(SystemExit) as error:
            go("r", "--recipe=bf16", *flags)
        err = capsys.readouterr().err
        assert error.value.code == 1 and "loss is not finite" in err and err.count("\n") == 1


def test_files_that_look_like_checkpoints_cost_nothing(go):
    """
    Catches: pruning by name. A copy that the user made, a torn file with a higher number, a link or a folder
    of that name once made each new checkpoint look old, so that it was deleted as soon as it was written.
    """
    folder, _ = go("r", "--recipe=bf16", "--stop_at=6")
    (folder / "ckpt_best.pt").write_bytes((folder / "ckpt_000000006.pt").read_bytes())
    (folder / "ckpt_000000099.pt").write_bytes(b"")
    (folder / "ckpt_000000098.pt").mkdir()
    (folder / "ckpt_000000097.pt").symlink_to("ckpt_000000006.pt")
    (folder / "notes.tmp").mkdir()
    _, printed = go("r", "--recipe=bf16", "--save_every=4")
    assert "ckpt_000000006.pt, step 6" in printed
    left = {path.name for path in folder.glob("ckpt_0000000[0-8]*") if path.is_file()}
    assert left == {"ckpt_000000016.pt", "ckpt_000000020.pt"} and (folder / "ckpt_best.pt").exists()


def test_half_a_row_is_taken_back(go, tmp_path, monkeypatch):
    """ Catches: a disk that is full for a moment and glues two rows into one that reads like a good one. """
    run = train.Run(parse([f"--out={tmp_path}", "--name=r"]))
    run.folder.mkdir()
    run.row({"step": 1})
    real = open

    class Full:
        def __init__(self, *args, **kwargs):
            self.file = real(*args, **kwargs)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, text):
            self.file.write(text[: len(text) // 2])
            self.file.flush()
            raise OSError(28, "No space left on device")
    monkeypatch.setattr(train, "open", Full, raising=False)
    run.row({"step": 2})
    monkeypatch.undo()
    run.row({"step": 3})
    lines = (run.folder / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["1", "3"]
    assert all(line.count(",") == len(train.COLUMNS) - 1 for line in lines)


@pytest.mark.parametrize("env, flags", [({"PYTHONIOENCODING": "ascii"}, ["--sample_tokens=60"]),
                                        ({"LC_ALL": "C", "PYTHONUTF8": "0"}, ["--sample_tokens=60"])])
def test_text_that_a_terminal_cannot_show(shards, tmp_path, env, flags):
    """ Catches: a run whose last lines are lost because the sample holds a character that is not ASCII. """
    flags = ["--recipe=bf16", "--steps=2", *flags]
    done = subprocess.run(command(shards, tmp_path, *flags), capture_output=True, env=os.environ | env)
    assert done.returncode == 0 and b"val_loss_fp4: " in done.stdout, done.stderr


@pytest.mark.skipif(os.name == "nt", reason="pipes differ")
def test_a_reader_that_leaves_does_not_stop_the_run(shards, tmp_path):
    """ Catches: `python train.py ... | head -1`, which killed the run at its second line. """
    with subprocess.Popen(command(shards, tmp_path, "--recipe=bf16"),
                          stdout=subprocess.PIPE, text=True) as run:
        run.stdout.readline()
        run.stdout.close()
    assert run.returncode == 0 and "val_loss_fp4: " in (tmp_path / "r" / "log.txt").read_text()


# -----------------------------------------------------------------------------
# checkpoints that somebody else made

def put(**items):
    return lambda state: state.update(items)


def inside(where: str, **items):
    return lambda state: state[where].update({key.replace("__", "."): value for key, value in items.items()})


def moment(**items):
    """ Change what Adam holds of the first weight. """
    def change(state):
        held = state["optimizer"]["state"][0]
        held.update({key: f(held[key]) for key, f in items.items()})
    return change


CRAFTED = {
    "only a format": lambda state: [state.pop(key) for key in list(state) if key != "format"],
    "format is true": put(format=True), "no step": lambda state: state.pop("step"),
    "text step": put(step="5"), "step is true": put(step=True), "negative step": put(step=-2),
    "nan seconds": put(seconds=float("nan")), "config is a list": put(config=[1]),
    "unknown knob": inside("config", foo=1), "bad knob": inside("config", lr="x"),
    "model is a list": put(model=[1]), "weight is a number": inside("model", head__weight=3),
    "weight of another shape": inside("model", head__weight=torch.ones(3, 3)),
    "weight too many": inside("model", extra=torch.ones(1)),
    "weight missing": lambda state: state["model"].pop("head.weight"),
    "channel out of range": inside("model", blocks__0__attn__qkv__channels=torch.tensor([0, 1, 2, 3, 999])),
    "channel twice": inside("model", blocks__0__attn__qkv__channels=torch.tensor([0, 1, 2, 3, 3])),
    "optimizer is empty": put(optimizer={}), "no moments": inside("optimizer", state={}),
    "no groups": inside("optimizer", param_groups=[]),
    "moment of another shape": lambda state: state["optimizer"]["state"][0].update(exp_avg=torch.ones(3)),
    "nan weight": inside("model", head__weight=torch.full((384, 48), torch.nan)),
    "weight without memory": inside("model", head__weight=torch.ones(384, 48, device="meta")),
    "inf moment": lambda state: state["optimizer"]["state"][0]["exp_avg_sq"].fill_(torch.inf),
    "step after the last": put(step=21),
    "weights of another type": lambda state: state["model"].update(
        {name: t.int() for name, t in state["model"].items()}),
    "sparse weight": lambda state: state["model"].update({"norm.weight": torch.ones(48).to_sparse()}),
    "step beyond the end": put(step=10**30),
    "moments of another type": moment(exp_avg=lambda t: t.half()),
    "sparse moment": moment(exp_avg=lambda t: t.to_sparse()),
    "Adam's step is several": moment(step=lambda t: torch.ones(7)),
    "Adam's step is nan": moment(step=lambda t: t * math.nan),
    "rate is text": lambda state: state["optimizer"]["param_groups"][0].update(lr="x"),
    "groups of other weights": lambda state: state["optimizer"]["param_groups"][0]["params"].pop(),
    "osci is text": put(osci="x"), "osci is missing": put(osci=None),
    "osci of another layer": inside("osci", windows={"zz": {}}),
    "norms of another layer": put(outliers={"norms": {"zz": torch.ones(3)}}),
    "recipe is no recipe": put(recipe="[]"),
}


@pytest.fixture(scope="module")
def half_run(shards, tmp_path_factory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("half")
    train.main(tiny(shards, f"--out={out}", "--name=r", "--recipe=tetrajet_full", "--osci=full", *WINDOWS,
                    "--stop_at=12"))
    return out / "r", last_state(out / "r")


@pytest.mark.parametrize("what", CRAFTED)
def test_a_crafted_checkpoint_is_one_line(half_run, go, capsys, what):
    """
    Catches: a traceback, a crash inside a fused kernel, or silent acceptance of a file that does not fit.
    """
    folder, state = half_run
    crafted = torch.load(folder / "ckpt_000000012.pt", weights_only=True)
    CRAFTED[what](crafted)
    ours = folder.parent / f"c{list(CRAFTED).index(what)}" / "r"
    ours.mkdir(parents=True)
    for name in ("config.json", "metrics.csv", "log.txt"):
        (ours / name).write_bytes((folder / name).read_bytes())
    torch.save(crafted, ours / "ckpt_000000012.pt")
    with pytest.raises(SystemExit) as error:
        go("r", "--recipe=tetrajet_full", "--osci=full", *WINDOWS, f"--out={ours.parent}")
    err = capsys.readouterr().err
    assert error.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1, err


def test_a_recipe_that_was_edited_is_noticed(go, capsys, monkeypatch):
    """ Catches: two halves of a run with different rounding, under one name. """
    go("r", "--recipe=tetrajet_base", "--stop_at=5")
    monkeypatch.setitem(RECIPES, "tetrajet_base", RECIPES["tetrajet_base"].only([1, 2]))
    with pytest.raises(SystemExit) as error:
        go("r", "--recipe=tetrajet_base")
    assert error.value.code == 2 and "another version of the recipe" in capsys.readouterr().err


def test_a_knob_added_since_does_not_end_old_runs(go):
    """ Catches: "a knob is one line" that makes every unfinished run unusable. """
    folder, _ = go("r", "--recipe=bf16", "--stop_at=5")
    path = folder / "ckpt_000000005.pt"
    state = read_checkpoint(path)
    del state["config"]["norm_eps"]                        # as if it had not existed then; it has its default
    torch.save(state, path)
    _, printed = go("r", "--recipe=bf16")
    assert "continuing from" in printed


# -----------------------------------------------------------------------------
# mistakes: one line, exit code 2, nothing lost

@pytest.mark.parametrize("flags, says", [
    (["--recipe=tetrajet_ful"], "did you mean tetrajet_full"),
    (["--recipe=configs/quartet.py"], "type the name of one in recipes.py"), (["--recipe="], "recipes.py"),
    (["--recipe=" + 300 * "a"], "type the name of one in recipes.py"),
    (["--recipe=tetrajet_base", "--outlier_frac=0.1"], "--outlier_format=mxfp8"),
    (["--recipe=quartet", "--outlier_frac=0.1"], "--recipe=tetrajet_full"),
    (["--recipe=tetrajet_base", "--osci=full", "--quantizers=1,3"], "add 2 to --quantizers"),
    (["--vocab_size=100"], "--vocab_size=0"),
    (["--data=nowhere"], "nowhere"),
    (["--seq_len=100000", "--batch_tokens=100000", "--eval_tokens=100000"], "tokens"),
    (["--device=cuda"], "--device=auto"),
    (["--lr=fast"], "lr wants a number"), (["--adam_eps=1e-99"], "from 1e-30 on"),
    (["--rope_theta=0.5"], "from 1 on"), (["--lr=1", "--weight_decay=1"], "smaller weight_decay"),
    (["--sample_tokens=100_000"], "up to 65_536"),
    (["configs/none.py"], "configs/none.py"), (["--out=~nobody-of-this-name/x"], "home folder is not known"),
    (["--out=" + 300 * "a"], "at most 255 bytes"), (["--init_from=" + 300 * "a"], "no such folder"),
    (["--init_from=~nobody-of-this-name/x"], "home folder is not known"),
    (["--lr=1" + 400 * "0"], "lr"),
])
def test_a_mistake_is_one_line_and_code_2(go, capsys, flags, says):
    if "--device=cuda" in flags and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(SystemExit) as error:
        go("r", *flags)
    err = capsys.readouterr().err
    assert error.value.code == 2 and says in err and err.startswith("error: ") and err.count("\n") == 1, err


def test_a_model_larger_than_memory_is_one_line_and_code_2(shards, tmp_path):
    """ Catches: a traceback for want of memory, advice to cut batches where the weights do not fit. """
    resource = pytest.importorskip("resource")

    def terabyte():
        # some systems promise any amount, and kill whoever uses it
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (2**40 if hard == resource.RLIM_INFINITY else hard, hard))
    run = subprocess.run(command(shards, tmp_path, "--vocab_size=1_048_576", "--d_model=1_048_576"),
                         capture_output=True, text=True, preexec_fn=terabyte)
    assert run.returncode == 2 and run.stderr.startswith("error: out of memory for the weights"), run.stderr
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize("osci", [osci for osci in CHOICES["osci"] if osci != "off"])
def test_what_the_config_accepts_its_parts_accept(osci):
    """ Catches: a value that config.py lets through and a class refuses with a traceback: osci_track = 0. """
    for knob in (knob for knob, kind in KINDS.items() if kind is float and knob.startswith("osci_")):
        for value in ("0", "1e-300", "0.5", "1", "1e15"):
            try:
                cfg = parse([f"--osci={osci}", f"--{knob}={value}", "--steps=100"])
            except ConfigError:
                continue
            train.against_oscillation(cfg, {})


@pytest.mark.parametrize("save_every, then", [
    (2, "the same command continues from ckpt_000000004.pt"),
    (0, "there is no checkpoint yet, so the same command starts anew")])
def test_an_interrupted_run_says_what_comes_next(go, capsys, monkeypatch, save_every, then):
    """ Catches: "continues from the last checkpoint" where there is none, and half an hour is lost. """
    real = train.Trainer.train_step

    def train_step(trainer):
        if trainer.step == 5:
            raise KeyboardInterrupt
        return real(trainer)
    monkeypatch.setattr(train.Trainer, "train_step", train_step)
    with pytest.raises(SystemExit) as error:
        go("r", "--recipe=bf16", f"--save_every={save_every}")
    assert error.value.code == 130 and f"interrupted; {then}" in capsys.readouterr().err


def test_other_code_under_a_resumed_run_is_noticed(go, monkeypatch):
    """ Catches: a rounding rule edited between two halves of a run that passes for one. """
    _, first = go("r", "--recipe=bf16", "--stop_at=2")
    _, same = go("r", "--recipe=bf16", "--stop_at=4")
    monkeypatch.setattr(train, "commit", lambda: "abc1234+00c0ffee")
    _, other = go("r", "--recipe=bf16", "--stop_at=6")
    assert "note: commit" not in first + same
    assert f"note: commit {commit()} wrote that, and commit abc1234+00c0ffee goes on" in other


def test_the_last_step_is_logged(go):
    """ Catches: a training loss of step 0, in a run of fewer steps than --log_every, as its last one. """
    folder, _ = go("r", "--recipe=bf16", "--steps=7", "--log_every=5", "--save_every=3")
    assert [row["step"] for row in rows(folder) if row["train_loss"]] == ["0", "5", "6"]


def test_a_finished_or_different_run_is_not_overwritten(go, capsys):
    folder, _ = go("r", "--recipe=bf16", "--steps=3")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for flags, says in ((["--steps=3"], "finished"), (["--steps=4"], "steps=3"),
                        (["--steps=3", "--lr=0.5"], "lr=")):
        with pytest.raises(SystemExit) as error:
            go("r", "--recipe=bf16", *flags)
        assert error.value.code == 2 and says in capsys.readouterr().err
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert before == after
    go("r", "--recipe=bf16", "--steps=4", "--overwrite")
    assert last_state(folder)["step"] == 4


def test_overwrite_deletes_runs_only(go, tmp_path, capsys):
    """ Catches: `--out=. --name=thesis --overwrite`. """
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("years of work")
    with pytest.raises(SystemExit) as error:
        go("thesis", "--recipe=bf16", "--overwrite")
    assert error.value.code == 2 and "not the folder of a run" in capsys.readouterr().err
    assert (tmp_path / "thesis" / "chapter1.tex").exists()


def test_overwrite_leaves_what_is_not_the_run_s(go):
    """ Catches: a folder that is removed as a whole, notes and all. """
    folder, _ = go("r", "--recipe=bf16", "--steps=3")
    (folder / "notes.md").write_text("what I saw")
    go("r", "--recipe=bf16", "--steps=2", "--overwrite")
    assert (folder / "notes.md").exists() and [p.name for p in folder.glob("ckpt_*")] == ["ckpt_000000002.pt"]
    assert (len(rows(folder)) == 3
            and "step 2" not in (folder / "log.txt").read_text().split("val_loss")[0][:200])


def test_two_processes_cannot_share_a_folder(go, capsys):
    """ Catches: the same command typed twice, whose two processes would write each other's checkpoints. """
    fcntl = pytest.importorskip("fcntl")
    folder, _ = go("r", "--recipe=bf16", "--stop_at=3")
    with open(folder / "log.txt", "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for extra in ([], ["--overwrite"]):
            with pytest.raises(SystemExit) as error:
                go("r", "--recipe=bf16", *extra)
            assert error.value.code == 2 and "another process" in capsys.readouterr().err
    assert list(folder.glob("ckpt_*.pt"))
    go("r", "--recipe=bf16")


def test_a_folder_that_cannot_be_made_is_one_line(go, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as error:
        go("r", f"--out={tmp_path / 'file'}")
    err = capsys.readouterr().err
    assert error.value.code == 2 and "cannot write" in err and err.count("\n") == 1


def test_a_run_without_a_vocabulary_ends_well(go, monkeypatch):
    """
    Catches: an hour of training whose last lines are lost because there is no network to fetch GPT-2's words.
    """
    def offline(name):
        raise data.DataError("no network")
    monkeypatch.setattr(data, "load_encoding", offline)
    _, printed = go("r", "--recipe=bf16", "--steps=2", "--sample_tokens=5")
    assert "no sample: no network" in printed and "val_loss_fp4: " in printed


def test_out_of_memory_names_a_micro_batch_that_works():
    """
    Catches: advice that config.py then refuses. The GPU's own error is too far from a CPU to raise here.
    """
    cfg = parse(["--batch_tokens=1536", "--seq_len=128", "--micro_batch=6"])
    assert "type --micro_batch=4, " in train.out_of_memory(cfg)
    parse(["--batch_tokens=1536", "--seq_len=128", "--micro_batch=4"])
    assert "seq_len" in train.out_of_memory(parse(["--micro_batch=1"]))


def test_overwrite_waits_until_the_new_run_can_start(go, shards, tmp_path, capsys):
    """ Catches: the old weights deleted by a command that then fails over its data. """
    folder, _ = go("r", "--recipe=bf16", "--steps=3")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name, short in (("train", "a_train_000001.bin"), ("val", "a_val_000000.bin")):
        bad = tmp_path / name
        bad.mkdir()
        for path in shards.iterdir():
            (bad / path.name).write_bytes(path.read_bytes())
        data.write_shard(bad / short, np.arange(10, dtype=np.uint16))
        with pytest.raises(SystemExit) as error:
            go("r", "--recipe=bf16", "--overwrite", f"--data={bad}")
        assert error.value.code == 2 and "10 tokens" in capsys.readouterr().err
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("content", [b"a,b,c\n1,2,3\n", b"\xff\xfe\x00", b"x" * 300_000, None,
                                     Path("metrics.csv"), Path("/dev/zero")])
def test_metrics_that_cannot_be_read_do_not_stop_a_resume(go, content):
    """ Catches: a traceback, a link to itself, and one to what has no end. """
    folder, _ = go("r", "--recipe=bf16", "--stop_at=5")
    (folder / "metrics.csv").unlink()
    if isinstance(content, Path):
        (folder / "metrics.csv").symlink_to(content)
    elif content is not None:
        (folder / "metrics.csv").write_bytes(content)
    go("r", "--recipe=bf16")
    assert [int(row["step"]) for row in rows(folder)] == list(range(5, 21))


def test_a_folder_that_was_left_half_made_can_be_overwritten(go, capsys):
    """ Catches: a disk that was full at the start and leaves a folder that is refused for ever. """
    folder, _ = go("r", "--recipe=bf16", "--steps=2")
    (folder / "config.json").rename(folder / "config.json.tmp")
    go("r", "--recipe=bf16", "--steps=3", "--overwrite")
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    with pytest.raises(SystemExit) as error:
        go("r", "--recipe=bf16", "--steps=4", "--overwrite")
    err = capsys.readouterr().err
    assert error.value.code == 2 and "cannot write" in err and err.count("\n") == 1


def test_stopping_where_the_run_already_stands_is_said(go, capsys):
    go("r", "--recipe=bf16", "--stop_at=5")
    with pytest.raises(SystemExit) as error:
        go("r", "--recipe=bf16", "--stop_at=5")
    assert error.value.code == 2 and "larger --stop_at" in capsys.readouterr().err


def test_what_cannot_act_is_said(go):
    """
    Catches: a run that passes for tetrajet_full and keeps no channel in FP8;
    fewer validation tokens than asked.
    """
    _, printed = go("r", "--recipe=tetrajet_full", "--steps=2", "--outlier_frac=0.001",
                    "--eval_tokens=100_000")
    assert "none is kept out of FP4" in printed and "fewer than eval_tokens = 100,000" in printed


@pytest.mark.parametrize("recipe, flag, others", [
    ("bf16", "--keep_last=1", []), ("bf16", "--rotate=dx", []), ("bf16", "--bf16_forward=0.5", []),
    ("bf16", "--osci_tau=3", ["--osci=full"]), ("nvfp4", "--rotate_size=16", []),
    ("nvfp4", "--rotate_size=64", ["--rotate=dx"]), ("nvfp4", "--rotate=none", []),
    ("nvfp4", "--align=true", ["--quantizers=1,4"]), ("nvfp4", "--align=true", []),
    ("nvfp4", "--outlier_format=bf16", []),
    ("tetrajet_full", "--outlier_format=bf16", ["--outlier_frac=0.1"]),
    ("nvfp4", "--bf16_forward=0.5", ["--quantizers=3"]), ("nvfp4", "--bf16_forward=0.5", []),
    ("nvfp4", "--backward=sr", ["--quantizers=1,2"]), ("nvfp4", "--backward=sr", []),
    ("nvfp4", "--block_x=1x8", ["--quantizers=2"]), ("nvfp4", "--block_x=1x8", []),
    ("fp8", "--block_w=1x16", []), ("mxfp4", "--block_w=1x32", []), ("nvidia", "--block_w=1x16", []),
    ("tetrajet_base", "--scale_rule=up", []), ("tetrajet_base", "--scale_rule=nearest", []),
    ("tetrajet_base", "--keep=mlp.up", ["--keep_last=1"]), ("tetrajet_base", "--keep=mlp.up", []),
    ("tetrajet_full", "--outlier_choice=random", []),
    ("tetrajet_full", "--outlier_choice=random", ["--outlier_frac=0.1"]),
    ("tetrajet_full", "--osci_tau=1", ["--osci=edge"]), ("tetrajet_full", "--osci_tau=1", ["--osci=full"]),
    ("tetrajet_full", "--osci_track=1", ["--osci=full"]),
    ("tetrajet_full", "--osci_track=1", ["--osci=topk"]),
    ("tetrajet_full", "--osci_start=0", []), ("tetrajet_full", "--osci_start=0", ["--osci=edge"]),
    ("tetrajet_full", "--osci_decay=0.5", ["--osci=full"]),
    ("tetrajet_full", "--osci_strength=1", ["--osci=watch"]),
    ("tetrajet_full", "--osci_strength=1", ["--osci=dampen"]), ("bf16", "--parallel=fsdp", []),
    ("bf16", "--stop_at=11", []), ("bf16", "--stop_at=9", []),
])
def test_a_flag_acts_or_the_run_says_that_it_does_not(go, recipe, flag, others):
    """ Catches: an ablation that is none, and a flag said to be without effect that has one. """
    flags = [f"--recipe={recipe}", "--steps=10", "--outlier_start=0.2", "--outlier_window=0.2",
             "--osci_start=0.4", "--osci_period=0.4", "--osci_window=0.2", "--osci_tau=16", *others]
    flags = [given for given in flags if given.split("=")[0] != flag.split("=")[0]]
    without, _ = go("without", *flags)
    folder, printed = go("with", *flags, flag)
    said = [line for line in printed.splitlines() if line.startswith("without effect: ")]
    idle = any(f"{flag[2:].split('=')[0]} = " in line for line in said)
    a, b = last_state(without)["model"], last_state(folder)["model"]
    same = all(torch.equal(a[key], b[key]) for key in a)
    assert idle == (same and rows(without)[-1]["val_loss_fp4"] == rows(folder)[-1]["val_loss_fp4"]), said


def test_other_data_under_a_resumed_run_is_noticed(go, shards, capsys):
    """
    Catches: a data folder that changed between two halves of a run, so that data positions mean other tokens.
    """
    folder, _ = go("r", "--recipe=bf16", "--stop_at=5")
    path = sorted(folder.glob("ckpt_*.pt"))[-1]
    state = read_checkpoint(path)
    state["train_tokens"] += 1
    torch.save(state, path)
    with pytest.raises(SystemExit) as error:
        go("r", "--recipe=bf16")
    assert error.value.code == 2 and "training tokens" in capsys.readouterr().err


# -----------------------------------------------------------------------------
# what a run leaves behind

def test_what_a_run_leaves_behind(go):
    folder, printed = go("r", "--recipe=tetrajet_full", *WINDOWS, "--osci=full",
                         "--eval_every=10", "--save_every=5", "--sample_tokens=10")
    assert sorted(path.name for path in folder.iterdir()) == [
        "ckpt_000000015.pt", "ckpt_000000020.pt", "config.json", "log.txt", "metrics.csv"]
    block = dict(line.split(": ", 1) for line in printed.splitlines()[-8:])
    assert list(block) == ["val_loss_fp4", "val_loss_bf16", "tokens", "seconds", "tokens_per_s", "peak_gib",
                           "backend", "commit"]
    assert block["tokens"] == str(20 * 128)
    table = rows(folder)
    assert [int(row["step"]) for row in table] == list(range(21)) and list(table[0]) == list(train.COLUMNS)
    assert float(table[-1]["val_loss_fp4"]) == pytest.approx(float(block["val_loss_fp4"]), abs=6e-5)
    assert [row["step"] for row in table if row["val_loss_fp4"]] == ["10", "20"]
    assert [row["step"] for row in table if row["osci_reset"]] == ["14"]
    assert (folder / "log.txt").read_text() == printed
    assert json.loads((folder / "config.json").read_text())["recipe"] == "tetrajet_full"


def test_the_overlap_of_outlier_channels_is_logged(go):
    """ Catches: columns that stay empty, or the mean where the least is meant. """
    folder, printed = go("r", "--recipe=tetrajet_full", "--outlier_frac=0.2", "--outlier_start=0.1",
                         "--outlier_window=0.1", "--outlier_log=0.3", "--outlier_choice=random")
    table = [row for row in rows(folder) if row["outlier_overlap"]]
    assert [row["step"] for row in table] == ["9", "15"] and printed.count("would be chosen now too") == 2
    for row in table:
        assert 0 <= float(row["outlier_overlap_min"]) < float(row["outlier_overlap"]) < 0.6


def test_dry_run_writes_nothing(go, tmp_path):
    _, printed = go("r", "--recipe=tetrajet_full", "--outlier_frac=0.1", "--dry_run")
    assert not (tmp_path / "r").exists()
    assert '"recipe": "tetrajet_full"' in printed
    line = next(line for line in printed.splitlines() if "attn.qkv" in line).split()
    assert line == ["blocks.0.attn.qkv", "48", "144", "6,912", "5", "Q1,Q2,Q3,Q4,Q5,Q6"]


def test_dry_run_of_a_size_file_needs_no_data(go, capsys):
    """ Catches: gigabytes to be fetched before a model's layers can be looked at; a guessed vocabulary. """
    nowhere = ["--dry_run", "--data=nowhere"]
    _, printed = go("r", "--recipe=tetrajet_full", *nowhere, "--vocab_size=512")
    assert "blocks.0.attn.qkv" in printed and printed.splitlines()[-1].startswith("no data yet: nowhere")
    for flags in (nowhere, ["--data=nowhere", "--vocab_size=512"]):
        with pytest.raises(SystemExit) as error:
            go("r", "--recipe=tetrajet_full", *flags)
        assert error.value.code == 2 and "nowhere" in capsys.readouterr().err


def test_what_is_not_rounded_is_said(go):
    """ Catches: "the recipe's forward" of a run in which nothing rounds; OutControl off behind its name. """
    _, bf16 = go("b", "--recipe=bf16", "--steps=2")
    assert "(nothing is rounded)" in bf16 and "recipe's forward" not in bf16 and "outlier_frac" not in bf16
    _, alone = go("f", "--recipe=tetrajet_full", "--steps=2")
    assert "outlier_frac = 0: recipe tetrajet_full has a format for outlier channels" in alone

"""
The training loop, seen from what a run leaves behind: the same numbers however it is cut, stopped or killed,
and one line for each mistake. Runs are made in this process, by main(), with a model of a few milliseconds a
step. What a checkpoint may meet on a disk stands in test_checkpoint.py.
"""
import csv
import io
import json
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data
import train
from build import RECIPES
from checkpoint import read
from config import parse
from model import GPT
from quant import QuantLinear

ROOT = Path(__file__).resolve().parent.parent

# K = 48 and 40 are no multiples of 128, 32 or, once, 16
TINY = ["--n_layer=1", "--d_model=48", "--n_head=2", "--d_ff=40", "--seq_len=32", "--batch_tokens=128",
        "--steps=20", "--log_every=1", "--eval_every=0", "--eval_tokens=64", "--save_every=0",
        "--sample_tokens=0", "--device=cpu"]
# both windows are open at step 10: that of OutControl over steps 8 to 17, that of OsciReset from 8 to 14.
# Channels that changed within the window of OsciReset would void it
WINDOWS = ["--outlier_frac=0.1", "--outlier_start=0.4", "--outlier_window=0.5", "--osci_start=0.4",
           "--osci_period=0.5", "--osci_window=0.3", "--osci_tau=2"]
FULL = ["--recipe=tetrajet_full", "--osci=reset", *WINDOWS]
needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs PyTorch 2.9")


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
    def run(name: str, *flags: str, code: int = 0):
        ended = train.main(tiny(shards, f"--out={tmp_path}", f"--name={name}", *flags))
        said = capsys.readouterr()
        assert ended == code, said
        # a run that fails says why in one line
        assert code in (0, 130, 138, 143) or "cannot save" in said.out or said.err.count("\n") == 1, said
        return tmp_path / name, said.err if code and said.err else said.out
    return run


@pytest.fixture(scope="session")
def straight(shards, tmp_path_factory) -> Path:
    """ The folder of a run with FULL and nothing in its way; several tests hold theirs against it. """
    out = tmp_path_factory.mktemp("straight")
    assert train.main(tiny(shards, f"--out={out}", "--name=r", *FULL, "--log_every=1")) == 0
    return out / "r"


def last_state(folder: Path) -> dict:
    return read(sorted(folder.glob("ckpt_*.pt"))[-1])


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
    return {key: state[key] for key in ("step", "model", "optimizers")}


def rows(folder: Path) -> list[dict]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def timeless(folder: Path) -> list[dict]:
    return [{key: value for key, value in row.items() if key not in ("seconds", "tokens_per_s")}
            for row in rows(folder)]


# -----------------------------------------------------------------------------
# 10 + resume + 10 = 20

@pytest.mark.parametrize("flags", [
    ["--recipe=bf16"], pytest.param(["--recipe=bf16", "--optimizer=muon"], marks=needs_muon),
    [*FULL, "--osci_track=1", "--shuffle=7"],
    [*FULL, "--outlier_start=0.1", "--outlier_window=0.3", "--outlier_log=0.35", "--micro_batch=2"],
    # channels are chosen while a window is open, which was opened with more weights to choose from
    [*FULL, "--outlier_start=0.2", "--outlier_window=0.1", "--osci_start=0", "--osci_period=0.9",
     "--osci_window=0.8", "--osci_track=1"],
    [*FULL, "--osci=freeze"], [*FULL, "--recipe=hcp", "--outlier_choice=error", "--micro_batch=2"],
], ids=lambda flags: " ".join(flags[-3:]))
def test_ten_plus_ten_is_twenty(go, flags):
    """
    Catches: any state that a checkpoint forgets (moments, an open window of OsciReset or OutControl, noise,
    the place in the data), and evaluation or logging that touches training: the second half has other
    intervals. Bit for bit.
    """
    whole, _ = go("whole", *flags)
    stopped, printed = go("resumed", *flags, "--stop_at=10", "--log_every=3", "--save_every=4")
    assert "stopped at step 10; the same command without --stop_at goes on from" in printed
    state = last_state(stopped)
    if "--shuffle=7" in flags:
        assert {"osci_w", "channel_norms"} <= {name.split(".")[-1] for name in state["model"]}
    resumed, printed = go("resumed", *flags, "--eval_every=3", "--log_every=2", "--save_every=7")
    assert "continuing from" in printed and state["step"] == 10
    assert_same(learned(last_state(whole)), learned(last_state(resumed)))


def test_evaluation_and_logging_touch_no_training_state(go, straight):
    """ Catches: evaluation that draws from a shared generator, moves the counter, or leaves a flag set. """
    busy, _ = go("busy", *FULL, "--eval_every=1", "--save_every=1", "--sample_tokens=20")
    assert_same(learned(last_state(straight)), learned(last_state(busy)))


@pytest.mark.parametrize("block", ["olmo2", "llama"])
def test_blocks_computed_again_change_nothing(go, monkeypatch, block):
    """ Catches: noise that is drawn anew in the second pass, channels that are measured differently. """
    calls, states, forward = [], [], QuantLinear.forward
    monkeypatch.setattr(QuantLinear, "forward", lambda layer, x: calls.append(1) or forward(layer, x))
    for name in ("kept", "again"):
        calls.clear()
        folder, _ = go(name, *FULL, f"--block={block}", f"--recompute={name == 'again'}")
        states.append((len(calls), learned(last_state(folder))))
    (kept, a), (again, b) = states
    assert again > 1.4 * kept
    assert_same(a, b)


class Fetched(torch.Tensor):
    """ What .cpu() returns, where a GPU is mimicked. """


def test_a_device_without_float64(go, monkeypatch):
    """ Catches: float64 on an Apple GPU, which has none: a traceback at the first validation or report. """
    double = torch.Tensor.double

    def no_double(t):
        assert isinstance(t, Fetched)
        return double(t)
    monkeypatch.setattr(torch.Tensor, "double", no_double)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t: t.as_subclass(Fetched))
    go("r", *FULL, "--eval_every=5", "--outlier_start=0.1", "--outlier_window=0.1", "--outlier_log=0.3")


def test_a_run_on_the_cpu_leaves_a_gpu_alone(go, monkeypatch):
    """ Catches: pinned memory, for which CUDA is started, beside a GPU that is too old or in use. """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for kind in ("cuda", "accelerator"):        # PyTorch's own optimizers ask the GPU too
        monkeypatch.setattr(torch.optim.Optimizer, f"_{kind}_graph_capture_health_check", lambda _: None,
                            raising=False)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: 1 / 0)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: 1 / 0)
    go("r", "--recipe=bf16", "--steps=3")


@pytest.mark.skipif(not hasattr(os, "fork") or torch.cuda.is_available(), reason="a fork has no GPU")
def test_kill_at_any_moment(go, shards, straight, tmp_path):
    """ Catches: a checkpoint written in place, a torn one that is believed, rows lost or doubled. """
    flags = [*FULL, "--save_every=1"]
    # a fork has PyTorch in memory already, so that kills fall into the steps, from the first on
    command = tiny(shards, f"--out={tmp_path}", "--name=killed", *flags)
    killed = 0
    for _ in range(6):
        process = multiprocessing.get_context("fork").Process(target=train.main, args=(command,))
        process.start()
        time.sleep(0.05 + 0.3 * random.random())
        process.kill()
        process.join()
        killed += process.exitcode == -signal.SIGKILL
    assert killed >= 3
    folder, _ = go("killed", *flags)
    assert_same(learned(last_state(straight)), learned(last_state(folder)))
    assert timeless(straight) == timeless(folder)
    assert not list(folder.glob("*.tmp")) and len(list(folder.glob("ckpt_*.pt"))) == 2


@pytest.mark.parametrize("name, code", [("SIGTERM", 143), ("SIGUSR1", 138), ("SIGINT", 130)])
def test_a_signal_ends_the_run_after_the_step(go, straight, monkeypatch, name, code):
    """ Catches: a preempted job that loses its steps since the last save, and says nothing. """
    calls, forward = [], GPT.forward

    def interrupted(model, *inputs):
        calls.append(1)
        if len(calls) == 7:
            # Slurm sends it to all processes, and torchrun hands its own on: it comes twice
            for _ in range(1 if name == "SIGINT" else 2):
                os.kill(os.getpid(), getattr(signal, name))
        return forward(model, *inputs)
    monkeypatch.setattr(GPT, "forward", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    folder, printed = go("r", *FULL, code=code)
    monkeypatch.undo()
    assert "stopped at step 7; the same command goes on from" in printed and last_state(folder)["step"] == 7
    assert signal.getsignal(signal.SIGTERM) == before
    if name == "SIGTERM":
        go("r", *FULL)
        assert_same(learned(last_state(straight)), learned(last_state(folder)))
        assert timeless(straight) == timeless(folder)


def test_a_signal_before_the_first_step(go, monkeypatch):
    """ Catches: a job that is preempted while it loads its checkpoint, and ends without a word. """
    monkeypatch.setattr(train, "introduce", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    _, printed = go("r", "--recipe=bf16", code=143)
    assert printed == "stopped at step 0; the same command goes on from the start\n"


def test_what_to_type_deletes_nothing(go):
    """ Catches: advice to type the same command again, --overwrite and all: it would begin anew. """
    _, printed = go("r", "--recipe=bf16", "--overwrite", "--stop_at=3")
    assert "the same command without --overwrite and --stop_at goes on from" in printed


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_ends_at_once(go, monkeypatch, first):
    """ Catches: an evaluation of an hour that nobody can leave, and a traceback in its place. """
    def hang(*_):
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), signal.SIGINT)
        return 1 / 0
    monkeypatch.setattr(train, "val_losses", hang)
    _, said = go("r", "--recipe=bf16", "--eval_every=5", code=130)
    assert said == "error: interrupted; the same command goes on from the newest checkpoint, if any\n"


# -----------------------------------------------------------------------------
# batches


def seen_by_the_model(monkeypatch) -> list:
    """ What each training micro-step gets: its tokens, and the counter of the noise. """
    seen, forward = [], GPT.forward

    def look(model, tokens, targets=None):
        if model.training:
            counter = model.blocks[0].mlp.up.counter
            seen.append((tokens.clone(), counter.state.tolist()))
        return forward(model, tokens, targets)
    monkeypatch.setattr(GPT, "forward", look)
    return seen


@pytest.mark.parametrize("flags", [["--recipe=bf16"], ["--recipe=tetrajet_base", "--quantizers=1,2"]])
def test_the_split_into_micro_batches_does_not_matter(go, monkeypatch, flags):
    """
    Catches: a mean of means, gradients divided twice or not at all, data that depends on the micro-batch,
    micro-steps that share their noise. Gradients differ by the order of float32 sums alone.
    """
    grads, clip = [], torch.nn.utils.clip_grad_norm_

    def keep(parameters, *args):
        parameters = list(parameters)
        grads.append(torch.cat([p.grad.flatten() for p in parameters]))
        return clip(parameters, *args)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", keep)
    seen = seen_by_the_model(monkeypatch)
    for size in (4, 2, 1):
        go(f"m{size}", *flags, f"--micro_batch={size}", "--steps=2", "--lr=1e-30", "--log_every=0")
    assert [counter[1:3] for _, counter in seen] == [
        [step, micro] for count in (1, 2, 4) for step in range(2) for micro in range(count)]
    whole = [torch.cat([tokens for tokens, _ in part]) for part in (seen[:2], seen[2:6], seen[6:])]
    assert torch.equal(whole[0], whole[1]) and torch.equal(whole[0], whole[2])
    for other in (grads[2:4], grads[4:6]):
        assert all((a - b).norm() < 1e-6 * a.norm() for a, b in zip(grads, other))


def test_data_order_is_the_seed_s(go, monkeypatch):
    """ Catches: batches that ignore the seed, or that repeat from step to step. """
    seen = seen_by_the_model(monkeypatch)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        go(name, "--recipe=bf16", f"--seed={seed}", "--steps=2")
    tokens = [tokens for tokens, _ in seen]
    assert all(torch.equal(x, y) for x, y in zip(tokens[:2], tokens[2:4]))
    assert not torch.equal(tokens[0], tokens[4]) and not torch.equal(tokens[0], tokens[1])


def test_learning_rate():
    """ Catches: off-by-one warm-up (a first step of rate 0), a decay that misses its floor or passes it. """
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
def test_every_recipe_trains_and_has_two_losses(go, recipe):
    """ Catches: a recipe that the linear cannot carry out; a `bf16` loss that rounds, an `fp4` one that does
    not. """
    folder, _ = go(recipe, f"--recipe={recipe}", "--steps=3")
    last = rows(folder)[-1]
    assert (last["val_loss_fp4"] == last["val_loss_bf16"]) == (not any(RECIPES[recipe].operands[:2]))


@pytest.mark.parametrize("name", ["bf16", "tetrajet_full", "tetrajet_released"])
def test_a_config_file_acts_and_learns(go, name):
    """ Catches: a config file whose method never acts; and a method that does not learn. """
    folder, printed = go(name, str(ROOT / f"configs/{name}.py"), "--steps=30", "--lr=1e-2")
    assert ("OutControl has chosen" in printed) == ("OsciReset put" in printed) == (name != "bf16")
    losses = [float(row["train_loss"]) for row in rows(folder) if row["train_loss"]]
    corpus = data.open_corpus(json.loads((folder / "config.json").read_text())["data"])
    assert losses[0] > 4.5 and losses[-1] < corpus.train.unigram_entropy(), "no better than counting letters"


def test_the_forward_pass_goes_back_to_bf16(go):
    """ Catches: a switch at another step, and one that a resumed run forgets. """
    flags = ("--recipe=nvfp4", "--bf16_forward=0.5", "--eval_every=1")
    folder, printed = go("a", *flags)
    assert "step 10: the forward pass is not rounded from now on" in printed
    losses = {int(row["step"]): (row["val_loss_fp4"], row["val_loss_bf16"]) for row in rows(folder)
              if row["val_loss_fp4"]}
    assert all((fp4 == bf16) == (step >= 10) for step, (fp4, bf16) in losses.items()) and len(losses) == 20
    for at in (6, 13):      # before and after the switch
        go(f"b{at}", *flags, f"--stop_at={at}")
        resumed, printed = go(f"b{at}", *flags)
        assert f"step {max(at, 10)}: the forward pass" in printed
        assert_same(learned(last_state(resumed)), learned(last_state(folder)))


# -----------------------------------------------------------------------------
# NaN


def poisoned(monkeypatch, at: int):
    """ From the optimizer's update number `at` on, one weight of blocks.0.mlp.up is NaN. """
    updates, step = [], torch.optim.AdamW.step

    def spoil(optimizer, *args):
        step(optimizer, *args)
        updates.append(1)
        if len(updates) > at:
            weights = [p for group in optimizer.param_groups for p in group["params"] if p.shape == (80, 48)]
            with torch.no_grad():
                weights[0][3, 5] = math.nan
    monkeypatch.setattr(torch.optim.AdamW, "step", spoil)


@pytest.mark.parametrize("flags", [["--log_every=0"], ["--save_every=0", "--eval_every=2"]], ids=" ".join)
def test_nan_stops_the_run_and_keeps_the_last_good_checkpoint(go, monkeypatch, flags):
    """ Catches: a run that trains on NaN for days, saves it over the good weights, or shows it. """
    folder, _ = go("r", "--recipe=tetrajet_base", "--save_every=5", "--stop_at=10")
    poisoned(monkeypatch, at=3)
    _, said = go("r", "--recipe=tetrajet_base", "--save_every=5", *flags, code=1)
    assert "the first bad weight is " in said and "ckpt_000000010.pt" in said
    assert last_state(folder)["step"] == 10 and "nan" not in (folder / "metrics.csv").read_text()


def test_a_last_update_that_ends_in_nan_is_no_result(go, monkeypatch):
    """ Catches: code 0, a row in metrics.csv and a checkpoint of weights that no later loss has seen. """
    poisoned(monkeypatch, at=19)
    folder, said = go("r", "--recipe=bf16", "--save_every=10", code=1)
    assert "blocks.0.mlp.up.weight" in said and last_state(folder)["step"] == 10


def test_a_validation_loss_that_is_not_finite_ends_the_run(go, monkeypatch):
    """ Catches: code 0 for a run without a result. """
    monkeypatch.setattr(train, "val_losses", lambda *_, **__: {"val_loss_fp4": math.nan, "val_loss_bf16": 1.})
    for flags in (["--eval_every=5"], []):
        _, said = go("r", "--recipe=bf16", *flags, "--overwrite", code=1)
        assert "the validation loss is not finite" in said


# -----------------------------------------------------------------------------
# what a run says and leaves behind


def test_what_a_run_leaves_behind(go):
    """ Catches: files, columns or keys of the last block that go missing: tools/sweep.py reads them. """
    folder, printed = go("r", *FULL, "--eval_every=10", "--save_every=5", "--sample_tokens=10")
    assert sorted(path.name for path in folder.iterdir()) == [
        "ckpt_000000015.pt", "ckpt_000000020.pt", "config.json", "log.txt", "metrics.csv"]
    block = dict(line.split(": ", 1) for line in printed.splitlines()[-8:])
    assert list(block) == ["val_loss_fp4", "val_loss_bf16", "tokens", "seconds", "tokens_per_s", "peak_gib",
                           "backend", "commit"]
    assert block["tokens"] == str(20 * 128) and float(block["peak_gib"]) > 0.05
    table = rows(folder)
    assert [int(row["step"]) for row in table] == list(range(21))
    assert float(table[-1]["val_loss_fp4"]) == pytest.approx(float(block["val_loss_fp4"]), abs=6e-5)
    assert [row["step"] for row in table if row["val_loss_fp4"]] == ["10", "20"]
    assert [row["step"] for row in table if row["osci_reset"]] == ["14"]
    assert (folder / "log.txt").read_text() == printed
    assert json.loads((folder / "config.json").read_text())["recipe"] == "tetrajet_full"


def test_the_last_step_is_logged(go):
    """ Catches: a training loss of step 0, in a run of fewer steps than --log_every, as its last one. """
    folder, _ = go("r", "--recipe=bf16", "--steps=7", "--log_every=5", "--save_every=3")
    assert [row["step"] for row in rows(folder) if row["train_loss"]] == ["0", "5", "6"]


def test_the_overlap_of_outlier_channels_is_logged(go):
    """ Catches: columns that stay empty, or the mean where the least is meant. """
    folder, printed = go("r", "--recipe=tetrajet_full", "--outlier_frac=0.2", "--outlier_start=0.1",
                         "--outlier_window=0.1", "--outlier_log=0.3")
    table = [row for row in rows(folder) if row["outlier_overlap"]]
    assert [row["step"] for row in table] == ["9", "15"] and printed.count("would be chosen now too") == 2
    assert all(0 <= float(row["outlier_overlap_min"]) <= float(row["outlier_overlap"]) <= 1 for row in table)


def test_what_cannot_act_is_said(go):
    """ Catches: OutControl off behind the recipe's name; fewer validation tokens than asked. """
    _, printed = go("r", "--recipe=tetrajet_full", "--steps=2", "--eval_tokens=100_000")
    assert "outlier_frac = 0: there are no" in printed and "not eval_tokens = 100,000" in printed


def test_dry_run_needs_no_data_and_writes_nothing(go, tmp_path):
    """ Catches: gigabytes to be fetched, or memory to be had, before a model's layers can be looked at. """
    flags = ["--recipe=tetrajet_full", "--outlier_frac=0.1", "--dry_run"]
    for more in ([], ["--data=nowhere", "--vocab_size=512"], ["--vocab_size=1_000_000", "--d_ff=1_000_000"]):
        _, printed = go("r", *flags, *more)
        assert not (tmp_path / "r").exists() and '"recipe": "tetrajet_full"' in printed
        line = next(line for line in printed.splitlines() if "attn.qkv" in line).split()
        assert line == ["blocks.0.attn.qkv", "48", "144", "6,912", "5", "Q1,Q2,Q3,Q4,Q5,Q6"]
    assert "nowhere" in go("r", *flags, "--data=nowhere", code=2)[1]


def test_a_run_without_a_vocabulary_ends_well(go, monkeypatch):
    """ Catches: an hour of training whose last lines are lost because GPT-2's words cannot be fetched. """
    def offline(name):
        raise data.DataError("no network")
    monkeypatch.setattr(data, "load_encoding", offline)
    _, printed = go("r", "--recipe=bf16", "--steps=2", "--sample_tokens=5")
    assert "no sample: no network" in printed and "val_loss_fp4: " in printed


def fake_wandb(monkeypatch, fails_in: str = "") -> list:
    """ A package wandb that notes what it is told. """
    told = []

    def call(name):
        def take(*args, **named):
            if name == fails_in:
                raise ConnectionError("no\nnetwork")
            told.append((name, args, named))
            return SimpleNamespace(log=call("log"), define_metric=call("define_metric"))
        return take
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=call("init")))
    return told


def test_wandb_gets_the_rows(go, monkeypatch):
    """ Catches: rows that do not get there, text in place of numbers, a resumed run that is a new one. """
    told = fake_wandb(monkeypatch)
    folder, _ = go("r", "--recipe=bf16", "--wandb", "--stop_at=5")
    go("r", "--recipe=bf16", "--wandb")
    first, second = (named for name, _, named in told if name == "init")
    assert first["id"] == second["id"] and first["config"]["recipe"] == "bf16"
    logged = [args[0] for name, args, _ in told if name == "log"]
    assert [row["step"] for row in logged] == list(range(21)) and isinstance(logged[3]["train_loss"], float)


@pytest.mark.parametrize("fails_in", ["init", "log", "import"])
def test_a_run_goes_on_without_wandb(go, monkeypatch, fails_in):
    """ Catches: a run that ends because a server cannot be reached, or a package is not there. """
    fake_wandb(monkeypatch, fails_in)
    if fails_in == "import":
        monkeypatch.setitem(sys.modules, "wandb", None)
    folder, printed = go("r", "--recipe=bf16", "--wandb")
    assert printed.count("warning: wandb gets no more rows") == 1 and len(rows(folder)) == 21


# -----------------------------------------------------------------------------
# mistakes: one line, exit code 2, nothing lost


@pytest.mark.parametrize("flags, says", [
    (["--vocab_size=100"], "--vocab_size=0"), (["--data=nowhere"], "nowhere"),
    (["--seq_len=100000", "--batch_tokens=100000", "--eval_tokens=100000"], "tokens"),
    (["--recipe=tetrajet_ful"], "did you mean tetrajet_full"), (["--lr=fast"], "lr wants a number"),
    (["configs/none.py"], "configs/none.py"), (["--init_from=nowhere"], "holds no checkpoint"),
    (["--out=/proc/none"], "/proc/none"), (["--backend=emulat"], "emulat"), (["--device=cuda"], "--device="),
], ids=lambda x: x[0] if isinstance(x, list) else "")
def test_a_mistake_is_one_line_and_code_2(go, flags, says):
    if "--device=cuda" in flags and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    _, said = go("r", *flags, code=2)
    assert says in said and said.startswith("error: ")


def test_out_of_memory_names_a_micro_batch_that_divides():
    """ Catches: advice that config.py then refuses. The GPU's own error is too far from a CPU to raise. """
    cfg = parse(["--batch_tokens=1536", "--seq_len=128", "--micro_batch=6"])
    assert "type --micro_batch=4, " in train.out_of_memory(cfg)
    parse(["--batch_tokens=1536", "--seq_len=128", "--micro_batch=4"])
    assert "seq_len" in train.out_of_memory(parse(["--micro_batch=1"]))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")], ids=repr)
def test_too_little_memory_is_one_line(go, monkeypatch, error):
    """ Catches: a traceback for want of memory, and another error that is taken for it. """
    def forward(*_):
        raise error
    monkeypatch.setattr(GPT, "forward", forward)
    assert "out of memory with 4 sequences of 32 tokens in a micro-step; type --micro_batch=2" in go(
        "r", "--recipe=bf16", code=2)[1]
    error = RuntimeError("shapes do not fit")
    with pytest.raises(RuntimeError, match="shapes"):
        go("r", "--recipe=bf16")


# -----------------------------------------------------------------------------
# as a program


def test_a_reader_that_leaves_does_not_stop_the_run(shards, tmp_path):
    """ Catches: `python train.py ... | head -1`, which killed the run at its second line; an exit code. """
    flags = tiny(shards, f"--out={tmp_path}", "--name=r", "--recipe=bf16", "--steps=5")
    with subprocess.Popen([sys.executable, str(ROOT / "train.py"), *flags], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True) as run:
        run.stdout.readline()
        run.stdout.close()
        said = run.stderr.read()
    assert run.returncode == 0 and said == "", said
    assert "val_loss_fp4: " in (tmp_path / "r" / "log.txt").read_text()


def test_a_terminal_that_knows_ascii_alone(shards, tmp_path, monkeypatch):
    """ Catches: a run whose last lines are lost because its sample, or its path, has other letters. """
    for screen in (io.TextIOWrapper(io.BytesIO(), encoding="ascii"), io.StringIO()):    # and a notebook's
        monkeypatch.setattr(sys, "stdout", screen)
        flags = ["--recipe=bf16", "--steps=2", "--overwrite"]
        assert train.main(tiny(shards, f"--out={tmp_path}", "--name=é", *flags)) == 0
        screen.seek(0)
        assert "val_loss_fp4: " in screen.read()


@pytest.mark.skipif(os.name == "nt", reason="signals differ")
@pytest.mark.parametrize("name", ["train", "eval", "bench", "data", "tools.hf", "tools.verify"])
def test_while_torch_is_imported(tmp_path, name):
    """
    Catches: Ctrl-C in these seconds told by a traceback; the variable set after torch is imported, when
    OpenMP no longer reads it, and threads wait in a busy loop.
    """
    (tmp_path / "torch.py").write_text("import os, signal\nprint(os.environ.get('OMP_WAIT_POLICY'))\n"
                                       "os.kill(os.getpid(), signal.SIGINT)\n")
    env = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    env["PYTHONPATH"] = os.pathsep.join((str(tmp_path), str(ROOT)))
    run = subprocess.run([sys.executable, "-m", name], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (run.stdout, run.stderr, run.returncode) == ("PASSIVE\n", "", -signal.SIGINT)

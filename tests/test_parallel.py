"""
Several ranks: the loss curve of one, checkpoints that move between them, and no rank that waits for ever.

Most of it runs in one set of 2 and one of 4 processes on the CPU, which do their jobs one after the other
(fixture `done`); what ends a process, or needs torchrun or two hosts, starts programs of its own.
"""
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing
from torch._dynamo.testing import CompileCounterWithBackend

import data
import parallel
import tracker
import sweep
import train
from config import ConfigError, check_share, parse
from eval import build, read_checkpoint
from test_train import WINDOWS, assert_same, last_state, learned, rows, tiny
from test_train import shards    # noqa: F401, a fixture
from test_tracker import Fake

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without distributed")

FULL = ["--recipe=tetrajet_full", *WINDOWS, "--osci=full"]
# no weight has a number of rows that 4 divides, but embedding and head
UNEVEN = [*FULL, "--d_model=50", "--n_head=5", "--d_ff=37"]
# What DDP and FSDP sum in another order is the norm of the gradient: --clip=0. And Adam's update on a CPU
# rounds the last few numbers of a tensor, which do not fill a vector, in another way: parts are multiples of
# 32. Then two ranks compute the same bits either way, since a + b = b + a
EXACT = [*FULL, "--clip=0", "--d_model=64", "--n_head=2", "--d_ff=32"]
# what else acts on the rows of a rank. No channel is chosen while it acts
ACTS = {"freeze": ["--osci_threshold=0", "--lr=1e-2", "--outlier_start=0.1", "--outlier_window=0.1"],
        "dampen": ["--osci_strength=10", "--outlier_start=0.1", "--outlier_window=0.1"]}
BF16 = ["--recipe=bf16", "--eval_every=3", "--eval_tokens=320", "--steps=6"]
NEAREST = ["--recipe=tetrajet_base", "--quantizers=1,2", *BF16[1:]]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# -----------------------------------------------------------------------------
# what each process does

def be_rank(rank: int, world: int, folder: Path, jobs: list[tuple]):
    """ One of `world` processes, as torchrun would have started it: does the jobs, leaves what it found. """
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
                   "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "TORCHELASTIC_RUN_ID": "test"}
    if rank:
        sys.stdout = open(folder / f"printed-{world}-{rank}", "w")
    for name, port, what, argv in jobs:
        os.environ["MASTER_PORT"] = str(port)
        torch.save(what(argv), folder / f"{name}-{world}-{rank}.pt")


def run(argv: list[str]) -> dict:
    """ A whole run -> what this rank holds at its end. """
    trainers, share = [], train.Trainer.share
    train.Trainer.share = lambda self, ranks: (trainers.append(self), share(self, ranks))[1]
    try:
        train.main(argv)
    finally:
        train.Trainer.share = share
    trainer = trainers[-1]
    held = {name: parallel.each_tensor(state, lambda t: t.to_local() if hasattr(t, "to_local") else t)
            for name, state in (("model", trainer.model.state_dict()),
                                ("optimizer", trainer.optimizer.state_dict()),
                                ("osci", trainer.osci.state_dict() if trainer.osci else None),
                                ("outliers", trainer.outliers.state_dict()))}
    return held | {"rank": trainer.counter.state[3]}


def run_exactly(argv: list[str]) -> dict:
    """ The same with sums in an order of their own: attention's backward pass on a GPU takes any. """
    torch.use_deterministic_algorithms(True)
    return parallel.each_tensor(run(argv), lambda t: t.cpu())


def tracked(argv: list[str]) -> list[str]:
    """ A run with --wandb -> what wandb was told by this rank. """
    fake = Fake()
    sys.modules["wandb"], tracker.reachable = fake, lambda url: False
    train.main([*argv, "--wandb"])
    return [call[0] for call in fake.calls]


def copy(argv: list[str]) -> dict:
    """ Load the checkpoint argv[0] on all ranks, and make a checkpoint of it. """
    cfg = parse(argv[1:])
    ranks = parallel.start(cfg, torch.device("cpu"))
    trainer = train.Trainer(cfg, data.open_corpus(cfg.data))
    trainer.share(ranks)
    trainer.load(ranks.from_first(read_checkpoint(Path(argv[0])) if ranks.first else None))
    state = trainer.state()
    ranks.finish()
    return learned(state) if ranks.first else {}


def damaged(argv: list[str]) -> str:
    """ What each rank says of the checkpoint argv[0] with a NaN in a window, in a row of rank 1's. """
    cfg = parse(argv[1:])
    ranks, told = parallel.start(cfg, torch.device("cpu")), ""
    trainer = train.Trainer(cfg, data.open_corpus(cfg.data))
    trainer.share(ranks)
    state = read_checkpoint(Path(argv[0])) if ranks.first else None
    if ranks.first:
        state["osci"]["windows"]["blocks.0.mlp.up"]["w"][-1, 0] = torch.nan
    state = ranks.from_first(state)
    try:
        with ranks.together():
            trainer.load(state)
    except ConfigError as error:
        told = str(error)
    ranks.finish()
    return told


def own_gradient(argv: list[str]) -> list:
    """ The gradients of two recipes on the same tokens, of this rank alone. """
    grads = []
    for flags in (["--recipe=tetrajet_base"], ["--recipe=tetrajet_base", "--quantizers=1,2"]):
        cfg = parse(argv + flags)
        ranks = parallel.start(cfg, torch.device("cpu"))
        trainer = train.Trainer(cfg, data.open_corpus(cfg.data))
        trainer.share(ranks)
        tokens = torch.arange(33)[None]
        trainer.counter.set(0)
        with ranks.micro_step(trainer.forward, last=False):
            trainer.forward(tokens[:, :-1], tokens[:, 1:])[0].backward()
        grads.append(torch.cat([layer.weight.grad.flatten() for layer in trainer.layers.values()]))
        ranks.finish()
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    return grads


def mistakes(argv: list[str]) -> list[str]:
    """ What each rank is told when rank 1 alone finds a mistake, and when none does. """
    ranks, told = parallel.start(parse(argv), torch.device("cpu")), []
    for wrong in (1, -1):
        try:
            with ranks.together():
                if ranks.rank == wrong:
                    raise data.DataError("no such folder")
            told.append("")
        except ConfigError as error:
            told.append(str(error))
    ranks.finish()
    return told


@pytest.fixture(scope="module")
def done(shards, tmp_path_factory):    # noqa: F811
    """ done.out: the runs' folder; done(name, world): what each rank found. Starts 2 + 4 processes, once. """
    out = tmp_path_factory.mktemp("ranks")

    def flags(name, *more):
        return tiny(shards, f"--out={out}", f"--name={name}", *more)

    # alone: what the others are compared with
    for name, more in (("bf16-1", BF16), ("nearest-1", NEAREST), ("stopped-1", [*UNEVEN, "--stop_at=10"])):
        train.main(flags(name, *more))
    checkpoint = str(out / "stopped-1" / "ckpt_000000010.pt")
    jobs = {world: [("bf16", run, flags(f"bf16-{world}", *BF16)),
                    ("nearest", run, flags(f"nearest-{world}", *NEAREST, "--parallel=fsdp")),
                    ("copy-ddp", copy, [checkpoint, *flags("copy", *UNEVEN)]),
                    ("copy-fsdp", copy, [checkpoint, *flags("copy", *UNEVEN, "--parallel=fsdp")])]
            for world in (2, 4)}
    jobs[2] += [("ddp", run, flags("ddp", *EXACT)),
                ("stopped-ddp", run, flags("ddp-fsdp", *EXACT, "--stop_at=10")),
                ("stopped-fsdp", run, flags("fsdp-ddp", *EXACT, "--stop_at=10", "--parallel=fsdp")),
                ("ddp-fsdp", run, flags("ddp-fsdp", *EXACT, "--parallel=fsdp")),
                ("fsdp-ddp", run, flags("fsdp-ddp", *EXACT)),
                *((f"{osci}-{mode}", run, flags(f"{osci}-{mode}", *EXACT, *more, f"--osci={osci}",
                                                f"--parallel={mode}"))
                  for osci, more in ACTS.items() for mode in ("ddp", "fsdp")),
                ("micro-bf16", run, flags("micro-2", *BF16, "--micro_batch=1")),
                ("micro-fsdp", run, flags("micro-fsdp", *BF16, "--micro_batch=1", "--parallel=fsdp")),
                ("tracked", tracked, flags("tracked", *BF16)),
                ("mistakes", mistakes, flags("none")),
                ("damaged", damaged, [checkpoint, *flags("copy", *UNEVEN, "--parallel=fsdp")]),
                ("gradient", own_gradient, flags("none"))]
    for world, todo in jobs.items():
        todo = [(name, free_port(), what, argv) for name, what, argv in todo]
        torch.multiprocessing.spawn(be_rank, (world, out, todo), nprocs=world)

    def found(name: str, world: int) -> list:
        return [torch.load(out / f"{name}-{world}-{rank}.pt") for rank in range(world)]
    found.out = out
    return found


# -----------------------------------------------------------------------------
# the same run

LOSSES = ("train_loss", "z_loss", "grad_norm", "val_loss_fp4", "val_loss_bf16")


@pytest.mark.parametrize("name, alone", [("bf16-2", "bf16-1"), ("bf16-4", "bf16-1"), ("micro-2", "bf16-1"),
                                         ("micro-fsdp", "bf16-1"), ("nearest-2", "nearest-1"),
                                         ("nearest-4", "nearest-1")])
def test_any_number_of_ranks_has_the_same_curve(done, name, alone):
    """
    Catches: a wrong share of the batch, a mean in the place of a sum, a loss that is not added up, a norm
    of a rank's part of the gradient, validation tokens left out or counted twice (10 sequences do not
    divide by 4), gradients summed in each micro-step or in none. Without noise only the order of sums
    differs.
    """
    ours, theirs = rows(done.out / name), rows(done.out / alone)
    assert [r["step"] for r in ours] == [r["step"] for r in theirs] and len(ours) == 7
    for a, b in zip(ours, theirs):
        for column in LOSSES:
            assert (a[column] == "") == (b[column] == "")
            if a[column]:
                assert float(a[column]) == pytest.approx(float(b[column]), rel=5e-5), (a["step"], column)


def test_all_ranks_hold_the_same(done):
    """
    Catches: OsciReset or OutControl that decides by what one rank has seen: channels by its own norms, resets
    by its noise. Both windows are open at the end of this run. All but the rank is equal, bit for bit.
    """
    a, b = done("stopped-ddp", 2)
    assert a["osci"]["windows"] and a["outliers"]["norms"], "both windows should be open"
    assert [a.pop("rank"), b.pop("rank")] == [0, 1]
    assert_same(a, b)
    a, b = done("ddp", 2)
    a.pop("rank"), b.pop("rank")
    assert any(int(c.min()) >= 0 for name, c in a["model"].items() if name.endswith("channels"))
    assert_same(a, b)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_hold_the_same(shards, tmp_path):    # noqa: F811
    """ Catches, with the fused kernels and NCCL: what the tests of the same names catch on a CPU. """
    def flags(name, *more):
        return tiny(shards, f"--out={tmp_path}", f"--name={name}", *EXACT, "--device=cuda",
                    "--backend=emulate", "--compile=false", *more)
    jobs = [("stopped", free_port(), run_exactly, flags("stopped", "--stop_at=10")),
            ("ddp", free_port(), run_exactly, flags("ddp")),
            ("fsdp", free_port(), run_exactly, flags("fsdp", "--parallel=fsdp"))]
    torch.multiprocessing.spawn(be_rank, (2, tmp_path, jobs), nprocs=2)
    for name in ("stopped", "ddp"):
        a, b = (torch.load(tmp_path / f"{name}-2-{rank}.pt") for rank in range(2))
        assert name == "ddp" or a["osci"]["windows"] and a["outliers"]["norms"], "both windows should be open"
        assert [int(a.pop("rank")), int(b.pop("rank"))] == [0, 1]
        assert_same(a, b)
    assert_same(*(learned(last_state(tmp_path / name)) for name in ("ddp", "fsdp")))


def test_ranks_have_their_own_noise(done):
    """ Catches: one noise for all ranks, whose errors then add up in place of averaging out. """
    (noisy_a, exact_a), (noisy_b, exact_b) = done("gradient", 2)
    assert torch.equal(exact_a, exact_b)
    assert (noisy_a != noisy_b).float().mean() > 0.9


# -----------------------------------------------------------------------------
# checkpoints

@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_checkpoint_goes_through_ranks_unchanged(done, world, mode):
    """
    Catches: rows put together in another order, with padding, or of some ranks only; a count that each rank
    restores, so that it is added up to a multiple; a window or Adam's moments that stay behind. Bit for bit.
    """
    assert_same(learned(last_state(done.out / "stopped-1")), done(f"copy-{mode}", world)[0])


def test_ddp_and_fsdp_are_the_same_run(done):
    """
    Catches: OsciReset that resets other weights on a rank's rows than on all of them, gradients that are not
    those of the rows, noise that depends on the way. Two ranks and no clipping: equal bit for bit.
    """
    a, b = (last_state(done.out / name) for name in ("ddp-fsdp", "ddp"))
    assert a["step"] == b["step"] == 20
    assert_same(learned(a), learned(b))
    assert_same(learned(last_state(done.out / "fsdp-ddp")), learned(b))


@pytest.mark.parametrize("osci", ACTS)
def test_remedies_do_the_same_to_rows(done, osci):
    """ Catches: Freeze that writes into a copy of the rows, Dampen whose gradient goes to other rows. """
    a, b = (last_state(done.out / f"{osci}-{mode}") for mode in ("ddp", "fsdp"))
    assert_same(learned(a), learned(b))
    reports = [[row["osci_penalty"] for row in rows(done.out / f"{osci}-{mode}") if row["osci_tracked"]]
               for mode in ("ddp", "fsdp")]
    assert len(reports[0]) > 0
    np.testing.assert_allclose(*(np.array(report, float) for report in reports), rtol=1e-5)
    if osci == "freeze":
        assert any(kept["frozen"].any() for kept in a["osci"]["kept"].values())
    else:
        assert float(reports[0][0]) > 0


def test_reports_count_the_rows_of_all_ranks(done):
    """ Catches: a report of rank 0's rows alone. FSDP made the reset of the one run, DDP of the other. """
    reports = [[row for row in rows(done.out / name) if row["osci_tracked"]] for name in ("ddp-fsdp", "ddp")]
    assert reports[0] and int(reports[0][0]["osci_reset"]) > 0
    for a, b in zip(*reports):
        assert {k: v for k, v in a.items() if k.startswith("osci_")} == {
            k: v for k, v in b.items() if k.startswith("osci_")}


def test_fsdp_deals_out_rows(done):
    """ Catches: FSDP that was not applied, each rank holding everything; a window of all rows. """
    for name, t in done("stopped-fsdp", 2)[0]["model"].items():
        if name.endswith("qkv.weight"):
            assert t.shape == (96, 64)
    windows = done("stopped-fsdp", 2)[1]["osci"]["windows"].values()
    assert {len(w["w"]) for w in windows} == {32, 96}


def test_one_process_goes_on_from_two(done, shards, capsys):    # noqa: F811
    """ Catches: a checkpoint of two ranks that one process cannot read, in the middle of both windows. """
    shutil.copytree(done.out / "ddp-fsdp", done.out / "alone")
    for path in (done.out / "alone").glob("ckpt_*20.pt"):
        path.unlink()
    state = last_state(done.out / "alone")
    assert state["step"] == 10 and state["osci"]["windows"] and state["outliers"]["norms"]
    train.main(tiny(shards, f"--out={done.out}", "--name=alone", *EXACT))
    assert "continuing from" in capsys.readouterr().out and last_state(done.out / "alone")["step"] == 20


# -----------------------------------------------------------------------------
# mistakes and deaths

def test_a_mistake_of_one_rank_is_told_to_all(done):
    """ Catches: a rank that ends in silence while the others wait for it. """
    assert done("mistakes", 2) == [["rank 1: no such folder", ""]] * 2


def test_a_nan_in_one_rank_s_rows_is_told_by_all(done):
    """ Catches: rank 0, whose rows are sound, that goes on alone and waits for a rank that has ended. """
    first, second = done("damaged", 2)
    assert first == second and first.startswith("rank 1: ") and "of blocks.0.mlp.up holds a NaN" in first


def test_only_rank_0_prints(done):
    assert [(done.out / f"printed-4-{rank}").read_text() for rank in (1, 2, 3)] == [""] * 3


def test_only_rank_0_sends_rows(done):
    """ Catches: as many runs of wandb's as there are GPUs, all of one id. """
    first, second = done("tracked", 2)
    assert first.count("init") == first.count("finish") == 1 and first.count("log") == 7 and not second


@pytest.mark.parametrize("flags, world, told", [
    (["--batch_tokens=160"], 4, "type --batch_tokens=128"),
    (["--batch_tokens=32"], 4, "type --batch_tokens=128"),
    (["--batch_tokens=128", "--micro_batch=4"], 2, "type --micro_batch=2"),
    (["--batch_tokens=192", "--micro_batch=6"], 2, "type --micro_batch=3"),
])
def test_shares_that_cannot_be_equal(flags, world, told):
    """ Catches: tokens dropped in silence; a cure that does not cure. """
    cfg = parse(["--seq_len=32", *flags])
    with pytest.raises(ConfigError, match=told):
        check_share(cfg, world)
    knob = told.removeprefix("type ")
    others = [flag for flag in flags if flag.split("=")[0] != knob.split("=")[0]]
    check_share(parse(["--seq_len=32", *others, knob]), world)


@pytest.mark.parametrize("flags, told", [
    (["--osci=qema"], "needs whole"), (["--osci=random"], "chooses among all"),
    (["--osci=nearest"], "chooses among all"), (["--osci=full", "--d_model=6", "--n_head=1"], "has 6 rows"),
])
def test_what_cannot_be_done_to_some_rows_is_refused(shards, flags, told):    # noqa: F811
    """ Catches: a control that resets other weights on 4 ranks than on 1, and says nothing. """
    cfg = parse(tiny(shards, "--recipe=tetrajet_base", *WINDOWS, "--outlier_frac=0", *flags))
    trainer = train.Trainer(cfg, data.open_corpus(str(shards)))
    with pytest.raises(ConfigError, match=told + ".*type --parallel=ddp"):
        train.check_rows(cfg, trainer.layers, 4)


def torchrun(*argv: str, prefix=(), **options) -> subprocess.Popen:
    return subprocess.Popen([*prefix, sys.executable, "-m", "torch.distributed.run", *argv],
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env=os.environ | options.pop("env", {}), **options)


def wait(process: subprocess.Popen, seconds: int = 60) -> tuple[int, str]:
    try:
        output = process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail("it hangs")
    return process.returncode, output


def kill_rank(rank: int, argument: str):
    """ SIGKILL for the process of this rank whose command line has the argument. """
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words, env = ((path / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
        except OSError:
            continue
        if argument.encode() in words and b"RANK=%d" % rank in env:
            return os.kill(int(path.name), signal.SIGKILL)
    pytest.fail(f"rank {rank} is not there")


def wait_for(path: Path, *processes: subprocess.Popen):
    for _ in range(6000):
        if path.exists():
            return
        assert all(p.poll() is None for p in processes), processes[0].communicate()[0]
        time.sleep(0.01)
    pytest.fail(f"{path.name} does not appear")


linux = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
LONG = ["--recipe=bf16", "--steps=60", "--save_every=5", "--eval_every=2", "--log_every=0"]


@linux
def test_a_killed_rank_ends_the_job_which_resumes(shards, tmp_path):    # noqa: F811
    """ Catches: a job that hangs, or says that all is well; a second launch that starts anew. """
    argv = ["--nproc_per_node=2", f"--master_port={free_port()}", str(ROOT / "train.py"),
            *tiny(shards, f"--out={tmp_path}", "--name=r", *LONG)]
    process = torchrun(*argv)
    wait_for(tmp_path / "r" / "ckpt_000000005.pt", process)
    kill_rank(1, f"--out={tmp_path}")
    code, output = wait(process)
    assert code != 0 and "Signal 9" in output, output
    code, output = wait(torchrun(*argv, "--stop_at=59"))
    assert code == 0 and "continuing from" in output and output.count("stopped at step 59") == 1, output


def test_a_fault_of_one_rank_ends_all(shards, tmp_path):    # noqa: F811
    """
    Catches: rank 0 that waits for ever for a rank that met a bad token. The bad id is in the third sequence
    of step 3, so in rank 1's share.
    """
    folder = tmp_path / "data"
    shutil.copytree(shards, folder)
    tokens = np.array(data.open_shard(folder / "a_train_000001.bin"))
    tokens[32 * (3 * 4 + 2) + 5] = 300
    data.write_shard(folder / "a_train_000001.bin", tokens)
    code, output = wait(torchrun(
        "--nproc_per_node=2", f"--master_port={free_port()}", str(ROOT / "train.py"),
        *tiny(folder, f"--out={tmp_path}", "--name=r", "--recipe=bf16", "--shuffle=0", "--eval_every=0")))
    # not at the start of a line: the end of rank 0's last one may come after it
    assert code != 0 and len(re.findall(r"rank 1: error: .*300", output)) == 1, output
    assert "step 2/20" in output and "step 3/20" not in output


def test_blocks_are_compiled_once_for_all():
    """
    Catches: a compilation for each block, of which PyTorch makes eight and leaves the other blocks as they
    are; noise that is another block's, as the number of a layer is no longer a constant; a loss that is left
    as it is. The first block is compiled with its numbers, the second for all numbers.
    """
    torch._dynamo.reset()
    cfg = parse(["configs/tetrajet_base.py", "--n_layer=10", "--d_model=16", "--n_head=1", "--d_ff=24"])
    model, _, counter = build(cfg, 40, torch.device("cpu"))
    counter.set(3)
    ids, seen = torch.randint(40, (2, 8)), CompileCounterWithBackend("aot_eager")
    results = []
    for compiled in (False, True):
        if compiled:
            parallel.compile_parts(model, backend=seen, fullgraph=True)
        model.zero_grad()
        loss = model(ids, ids)[0]
        loss.backward()
        results.append((loss.detach(), *(p.grad for p in model.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*results)) and seen.frame_count == 3


@pytest.mark.parametrize("name, size", [("WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_SIZE", "8"),
                                        ("PMI_SIZE", "8")])
def test_another_launcher_is_told_of_torchrun(shards, tmp_path, monkeypatch, capsys,    # noqa: F811
                                              name, size):
    """
    Catches: eight programs that each train the whole run alone, since something else started them; a sweep
    whose runs all fail of that.
    """
    runs = tmp_path / "list.txt"
    runs.write_text("a | --steps=1 | 1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, size)
    for main, argv in ((train.main, tiny(shards, "--out=out", "--name=q")), (sweep.main, [str(runs)])):
        try:
            code = main(argv)
        except SystemExit as end:
            code = end.code
        err = capsys.readouterr().err
        assert code == 2 and err.startswith(f"error: {name} is {size}, but torchrun did not"), err
        assert err.count("\n") == 1 and f"unset {name}" in err
    assert [path.name for path in tmp_path.iterdir()] == ["list.txt"]


@pytest.mark.parametrize("name, value", [("RANK", "1"), ("WORLD_SIZE", ""), ("WORLD_SIZE", "1")])
def test_what_is_left_over_and_says_nothing(shards, tmp_path, monkeypatch, name, value):    # noqa: F811
    """ Catches: a run refused for a variable that names no second process. """
    monkeypatch.setenv(name, value)
    train.main(tiny(shards, f"--out={tmp_path}", "--name=r", "--steps=1"))
    assert (tmp_path / "r" / "metrics.csv").exists()


@pytest.mark.parametrize("there", [{}, {"WORLD_SIZE": "two"}, {"WORLD_SIZE": "2"}])
def test_half_of_torchrun_s_variables_is_one_line(shards, tmp_path, monkeypatch, capsys,    # noqa: F811
                                                  there):
    """ Catches: a KeyError in a shell that was left over from a job, with one of its variables set. """
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    there = there and {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} | there      # no MASTER_ADDR
    for name, value in ({"TORCHELASTIC_RUN_ID": "left"} | there).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as error:
        train.main(tiny(shards, f"--out={tmp_path}", "--name=r"))
    err = capsys.readouterr().err
    assert error.value.code == 2 and err.count("\n") == 1 and "unset TORCHELASTIC_RUN_ID" in err


def test_a_mistyped_flag_is_told_once():
    """ Catches: one line for each rank, or none, since torchrun ended the one that speaks. """
    code, output = wait(torchrun("--nproc_per_node=2", f"--master_port={free_port()}", str(ROOT / "train.py"),
                                 "--stepz=3"))
    assert code != 0 and output.count("error: no knob is called 'stepz'; did you mean steps?") == 1, output


# -----------------------------------------------------------------------------
# two hosts

@pytest.fixture
def hosts():
    """ Two network namespaces with a cable between them -> for each, what to put before a command. """
    if not shutil.which("ip"):
        pytest.skip("no ip command")
    names = [f"ranks{os.getpid()}{i}" for i in "ab"]
    made = [subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True) for name in names]
    if any(m.returncode for m in made):
        pytest.skip(f"network namespaces are not permitted here: {made[0].stderr.strip()}")
    try:
        ends = [f"v{os.getpid() % 10**6}{i}" for i in "ab"]
        subprocess.run(["ip", "link", "add", ends[0], "netns", names[0], "type", "veth",
                        "peer", "name", ends[1], "netns", names[1]], check=True)
        for i, (name, end) in enumerate(zip(names, ends), 1):
            subprocess.run(["ip", "-n", name, "address", "add", f"10.77.0.{i}/24", "dev", end], check=True)
            for device in (end, "lo"):
                subprocess.run(["ip", "-n", name, "link", "set", device, "up"], check=True)
        yield [(["ip", "netns", "exec", name], {"GLOO_SOCKET_IFNAME": end}) for name, end in zip(names, ends)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name])


@linux
def test_two_hosts(hosts, shards, tmp_path):    # noqa: F811
    """
    Catches: a second host that writes files, or waits for ever for a rank that was killed on the first one.
    Each has a folder of its own, and only rank 0's has the checkpoint, from which both resume.
    """
    def launch():
        started = []
        for i, (prefix, env) in enumerate(hosts):
            (tmp_path / f"host{i}").mkdir(exist_ok=True)
            started.append(torchrun(
                "--nnodes=2", f"--node_rank={i}", "--nproc_per_node=1", "--master_addr=10.77.0.1",
                "--master_port=29500", str(ROOT / "train.py"),
                *tiny(shards, "--out=out", "--name=r", *LONG, f"--data={shards}", "--parallel=fsdp"),
                prefix=prefix, cwd=tmp_path / f"host{i}", env=env | {"TEST_HOSTS": str(tmp_path)}))
        return started
    started = launch()
    wait_for(tmp_path / "host0" / "out" / "r" / "ckpt_000000005.pt", *started)
    kill_rank(1, "--parallel=fsdp")
    assert all(code != 0 for code, _ in map(wait, started))
    ended = [wait(process) for process in launch()]
    assert [code for code, _ in ended] == [0, 0], ended
    assert "continuing from" in ended[0][1] and "val_loss_fp4: " in ended[0][1]
    assert "run out" not in ended[1][1] and "val" not in ended[1][1]
    assert last_state(tmp_path / "host0" / "out" / "r")["step"] == 60
    assert not list((tmp_path / "host1").iterdir())

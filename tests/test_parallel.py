"""
Several ranks: the loss curve of one, checkpoints that move between them, and no rank that waits for ever.

Most of it runs in one set of two and one of four processes on the CPU, which do their jobs one after the
other (fixture `done`); what ends a process starts processes of its own. They fork from one that has imported
PyTorch, since that takes longer than all they do.
"""
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import data
import parallel
import train
from build import build, make_optimizers, only
from checkpoint import Onlooker, Run, read, snapshot
from config import ConfigError, parse
from test_train import FULL, assert_same, last_state, learned, rows, tiny
from test_train import shards    # noqa: F401, a fixture

fcntl = pytest.importorskip("fcntl", reason="processes that fork, and signals")
ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without distributed")

# no weight has a number of rows that four divides, but embedding and head
UNEVEN = [*FULL, "--d_model=50", "--n_head=5", "--d_ff=37", "--stop_at=10"]
# What DDP and FSDP sum in another order is the norm of the gradient: --clip=0. And Adam's update on a CPU
# rounds the last few numbers of a tensor, which do not fill a vector, in another way: parts are multiples of
# 32. Then two ranks compute the same bits either way, since a + b = b + a
EXACT = [*FULL, "--clip=0", "--d_model=64", "--n_head=2", "--d_ff=32", "--steps=10"]
# 10 sequences to validate, of which four ranks cannot take the same number
BF16 = ["--recipe=bf16", "--eval_every=3", "--eval_tokens=320", "--steps=6"]
NEAREST = ["--recipe=tetrajet_base", "--quantizers=1,2", *BF16[1:]]
# what acts on whole weights, of which a rank has some rows. No channel is chosen while it acts. One of
# them in the other block
ACTS = {"qema": ["--osci_start=0.1", "--osci_decay=0.5", "--steps=14"],
        "dampen": ["--osci_strength=10", "--block=llama"],
        "freeze": ["--osci_threshold=0", "--osci_start=0.1", "--lr=1e-2"]}
EARLY = ["--outlier_start=0.1", "--outlier_window=0.1"]


FORKS = multiprocessing.get_context("forkserver")
multiprocessing.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp",
                                        "torch.distributed.tensor"])


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
    sys.stdout = sys.stderr = open(folder / f"printed-{world}-{rank}", "w")
    for name, port, what, argv in jobs:
        os.environ["MASTER_PORT"] = str(port)
        torch.save(what(argv), folder / f"{name}-{world}-{rank}.pt")
        parallel.finish()


def start(world: int, folder: Path, jobs: list[tuple]) -> list:
    """ The processes of all ranks, started; each job is (name, what to call, its argument). """
    jobs = [(name, free_port(), what, argv) for name, what, argv in jobs]
    processes = [FORKS.Process(target=be_rank, args=(rank, world, folder, jobs)) for rank in range(world)]
    for process in processes:
        process.start()
    return processes


def end(processes: list, folder: Path, codes: list[int]):
    """ Wait until they have ended with these codes; none of them hangs. """
    for process in processes:
        process.join(timeout=300)
    found = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert found == codes, [path.read_text() for path in sorted(folder.glob("printed-*"))]


def run(argv: list[str]) -> dict:
    """ A whole run -> what this rank holds in memory of the model, in parts where it is in parts. """
    nets, make = [], train.build
    train.build = lambda *args, **more: nets.append(make(*args, **more)) or nets[-1]
    assert train.main(argv) == 0
    train.build = make
    state, net = nets[0].model.state_dict(), nets[0]
    state = {name: t.to_local() if hasattr(t, "to_local") else t for name, t in state.items()}
    return {name: t.cpu() for name, t in state.items()} | {"rank": int(net.counter.state[3])}


def run_exactly(argv: list[str]) -> dict:
    """ The same with sums in an order of their own: attention's backward pass on a GPU takes any. """
    torch.use_deterministic_algorithms(True)
    return run(argv)


def begin(argv: list[str]):
    """ What train.train() does before its first step. """
    cfg = parse(argv)
    corpus, device = data.open_corpus(cfg.data), torch.device("cpu")
    ranks = parallel.start(cfg, device)
    net = build(cfg, corpus.vocab_size, device, ranks=ranks)
    return cfg, corpus, net, make_optimizers(cfg, net.model)


def copy(argv: list[str]) -> dict:
    """ Go on from a checkpoint, and make a checkpoint of that. """
    cfg, corpus, net, optimizers = begin(argv)
    step, seconds = (Run if net.ranks.first else Onlooker)(cfg, ()).resume(net, optimizers, corpus)
    return learned(snapshot(cfg, net, optimizers, corpus, step, seconds))


def gradients(argv: list[str]) -> list:
    """ This rank's gradients of the same tokens, with stochastic rounding and with rounding to nearest. """
    cfg, corpus, net, _ = begin(argv)
    found, tokens = [], torch.arange(33)[None]
    for quantizers in ([1, 2, 3, 4, 5, 6], [1, 2]):
        for layer in net.layers.values():
            layer.recipe = only(layer.recipe, quantizers)
        net.model.zero_grad()
        with net.ranks.micro_step(net.forward, last=False):
            net.forward(tokens[:, :-1], tokens[:, 1:])[0].backward()
        found.append(torch.cat([layer.weight.grad.flatten() for layer in net.layers.values()]))
    return found


@pytest.fixture(scope="module")
def done(shards, tmp_path_factory):    # noqa: F811
    """
    done.out: the runs' folder; done(name, world): what each rank found. Starts 2 + 4 processes, once: of
    several pytests that share the tests, one does it, and the others wait.
    """
    if torch.__version__ < "2.10":
        pytest.skip("FSDP on a CPU needs PyTorch 2.10")
    base = tmp_path_factory.getbasetemp()
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "ranks"
    out.mkdir(exist_ok=True)

    def flags(name, *more):
        return tiny(shards, f"--out={out}", f"--name={name}", *more)

    def found(name: str, world: int) -> list:
        return [torch.load(out / f"{name}-{world}-{rank}.pt") for rank in range(world)]
    found.out, found.flags = out, flags
    with open(out / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (out / "all").exists():
            do_all(out, flags)
            (out / "all").touch()
    return found


def do_all(out: Path, flags):
    """ All runs; flags(name, *more) is the command line of one. """
    # alone: what the others are compared with
    for name, more in (("bf16-1", BF16), ("nearest-1", NEAREST)):
        assert train.main(flags(name, *more)) == 0
    assert train.main(flags("copy", *UNEVEN)) == 0
    jobs = {world: [("bf16", run, flags(f"bf16-{world}", *BF16)),
                    ("nearest", run, flags(f"nearest-{world}", *NEAREST, "--parallel=fsdp")),
                    *((f"copy-{mode}", copy, flags("copy", *UNEVEN[:-1], f"--parallel={mode}"))
                      for mode in ("ddp", "fsdp"))]
            for world in (2, 4)}
    jobs[2] += [("ddp", run, flags("ddp", *EXACT)),
                ("stopped-ddp", run, flags("ddp-fsdp", *EXACT, "--stop_at=5")),
                ("stopped-fsdp", run, flags("fsdp-ddp", *EXACT, "--stop_at=5", "--parallel=fsdp")),
                ("ddp-fsdp", run, flags("ddp-fsdp", *EXACT, "--parallel=fsdp")),
                ("fsdp-ddp", run, flags("fsdp-ddp", *EXACT)),
                *((f"{osci}-{mode}", run, flags(f"{osci}-{mode}", *EXACT, *EARLY, *more, f"--osci={osci}",
                                                f"--parallel={mode}"))
                  for osci, more in ACTS.items() for mode in ("ddp", "fsdp")),
                *((f"error-{mode}", run, flags(f"error-{mode}", *EXACT, *EARLY, "--recipe=hcp",
                                               "--outlier_choice=error", f"--parallel={mode}"))
                  for mode in ("ddp", "fsdp")),
                ("random", run, flags("random", *EXACT, *EARLY, "--osci_tau=0.5", "--osci=random")),
                ("micro-bf16", run, flags("micro-2", *BF16, "--micro_batch=1")),
                ("micro-fsdp", run, flags("micro-fsdp", *BF16, "--micro_batch=1", "--parallel=fsdp")),
                ("gradient", gradients, flags("none", "--recipe=tetrajet_base"))]
    for world, todo in jobs.items():
        end(start(world, out, todo), out, [0] * world)


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
    by its noise. Both windows are open at the end of the first run. All but the rank is equal, bit for bit.
    """
    a, b = done("stopped-ddp", 2)
    assert {"osci_w", "channel_norms"} <= {name.split(".")[-1] for name in a}, "both windows should be open"
    assert [a.pop("rank"), b.pop("rank")] == [0, 1]
    assert_same(a, b)
    for name in ("ddp", "random"):
        a, b = done(name, 2)
        a.pop("rank"), b.pop("rank")
        assert any(int(c.min()) >= 0 for name, c in a.items() if name.endswith("channels"))
        assert_same(a, b)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_hold_the_same(shards, tmp_path):    # noqa: F811
    """ Catches, with the kernels of a GPU and NCCL: what the tests of the same names catch on a CPU. """
    def flags(name, *more):
        return tiny(shards, f"--out={tmp_path}", f"--name={name}", *EXACT, "--device=cuda",
                    "--backend=emulate", "--compile=false", *more)
    jobs = [("ddp", run_exactly, flags("ddp")), ("fsdp", run_exactly, flags("fsdp", "--parallel=fsdp"))]
    end(start(2, tmp_path, jobs), tmp_path, [0, 0])
    a, b = (torch.load(tmp_path / f"ddp-2-{rank}.pt") for rank in range(2))
    assert [a.pop("rank"), b.pop("rank")] == [0, 1]
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
    Catches: rows put together in another order, with padding, or of some ranks only; a window or Adam's
    moments that stay behind; ranks that look for the checkpoint on their own disks. Bit for bit.
    """
    assert_same(learned(last_state(done.out / "copy")), done(f"copy-{mode}", world)[0])


def test_ddp_and_fsdp_are_the_same_run(done):
    """
    Catches: OsciReset that resets other weights under FSDP, gradients that are not those of the rows, noise
    that depends on the way. Two ranks and no clipping: equal bit for bit, and the report of the window too.
    """
    a, b, c = (last_state(done.out / name) for name in ("ddp-fsdp", "ddp", "fsdp-ddp"))
    assert a["step"] == b["step"] == 10
    assert_same(learned(a), learned(b))
    assert_same(learned(c), learned(b))
    reports = [[{k: v for k, v in row.items() if k.startswith("osci_")} for row in rows(done.out / name)
                if row["osci_tracked"]] for name in ("ddp-fsdp", "ddp", "fsdp-ddp")]
    assert int(reports[0][0]["osci_reset"]) > 0 and reports[0] == reports[1] == reports[2]


@pytest.mark.parametrize("osci", ACTS)
def test_remedies_do_the_same_to_weights_in_parts(done, osci):
    """ Catches: Freeze that writes into a copy, Dampen whose gradient has other rows, a stand-in of rows. """
    a, b = (last_state(done.out / f"{osci}-{mode}") for mode in ("ddp", "fsdp"))
    assert_same(learned(a), learned(b))
    column = "osci_penalty" if osci == "dampen" else "osci_held"
    seen = [float(row[column]) for row in rows(done.out / f"{osci}-fsdp") if row["osci_tracked"]]
    assert seen and max(seen) > 0


def test_errors_of_rounding_are_those_of_whole_weights(done):
    """ Catches: a rank that rounds its rows of a weight alone, and so chooses other channels. """
    a, b = (last_state(done.out / f"error-{mode}") for mode in ("ddp", "fsdp"))
    assert_same(learned(a), learned(b))
    assert float(rows(done.out / "error-fsdp")[-1]["step"]) == 10
    assert [row["outlier_common"] != "" for row in rows(done.out / "error-fsdp")].count(True) == 1


def test_fsdp_deals_out_rows(done):
    """ Catches: FSDP that was not applied, each rank holding everything. """
    whole = read(done.out / "fsdp-ddp" / "ckpt_000000005.pt")["model"]["blocks.0.attn.qkv.weight"]
    for rank, held in enumerate(done("stopped-fsdp", 2)):
        assert torch.equal(held["blocks.0.attn.qkv.weight"], whole[96 * rank : 96 * (rank + 1)])


def test_one_process_goes_on_from_two(done, capsys):
    """ Catches: a checkpoint of two ranks that one process cannot read, in the middle of both windows. """
    shutil.copytree(done.out / "fsdp-ddp", done.out / "alone")
    (done.out / "alone" / "ckpt_000000010.pt").unlink()
    assert train.main(done.flags("alone", *EXACT)) == 0
    assert "ckpt_000000005.pt, step 5" in capsys.readouterr().out
    assert last_state(done.out / "alone")["step"] == 10


def test_only_rank_0_prints(done):
    said = [(done.out / f"printed-4-{rank}").read_text() for rank in range(4)]
    assert "4 ranks by ddp" in said[0] and said[1:] == [""] * 3


# -----------------------------------------------------------------------------
# mistakes and deaths


@pytest.mark.parametrize("flags, world, told", [
    (["--batch_tokens=160"], 4, "type --batch_tokens=256"),
    (["--batch_tokens=32"], 4, "type --batch_tokens=128"),
    (["--batch_tokens=128", "--micro_batch=4"], 2, "type --micro_batch=2"),
    (["--batch_tokens=192", "--micro_batch=6"], 2, "type --micro_batch=3"),
])
def test_shares_that_cannot_be_equal(flags, world, told):
    """ Catches: tokens dropped in silence; a cure that does not cure. """
    cfg = parse(["--seq_len=32", *flags])
    with pytest.raises(ConfigError, match=told):
        parallel.check_shares(cfg, world)
    knob = told.removeprefix("type ")
    others = [flag for flag in flags if flag.split("=")[0] != knob.split("=")[0]]
    parallel.check_shares(parse(["--seq_len=32", *others, knob]), world)


def test_fsdp_on_a_cpu_with_an_old_torch_is_one_line(monkeypatch):
    """ Catches: PyTorch 2.6 told by a traceback; 2.8, whose gradients are sums over ranks and not means. """
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2"), monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch, "__version__", "2.8.0+cpu")
    with pytest.raises(ConfigError, match="2.8.0.*type --parallel=ddp"):
        parallel.start(parse(["--parallel=fsdp"]), torch.device("cpu"))


@pytest.mark.parametrize("name, size", [("WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_SIZE", "8"), ("PMI_SIZE", "8"),
                                        ("SLURM_STEP_NUM_TASKS", "2")])
def test_another_launcher_is_told_of_torchrun(shards, tmp_path, monkeypatch, capsys,    # noqa: F811
                                              name, size):
    """ Catches: eight programs that each train the whole run alone, since something else started them. """
    monkeypatch.setenv(name, size)
    assert train.main(tiny(shards, f"--out={tmp_path}", "--name=q")) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {name} is {size}, but torchrun did not") and f"unset {name}" in err
    assert err.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("left", [{"RANK": "1"}, {"WORLD_SIZE": ""}, {"WORLD_SIZE": "1"},
                                  {"TORCHELASTIC_RUN_ID": "left", "RANK": "0"}])
def test_what_is_left_over_and_says_nothing(shards, tmp_path, monkeypatch, left):    # noqa: F811
    """ Catches: a run refused, or that waits for others, in a shell with variables of an old job. """
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    assert train.main(tiny(shards, f"--out={tmp_path}", "--name=r", "--steps=1")) == 0
    assert (tmp_path / "r" / "metrics.csv").exists()


def test_a_mistake_is_told_once_under_torchrun(shards, tmp_path):    # noqa: F811
    """ Catches: one line for each rank, or none, since torchrun ended the one that speaks; a hang. """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
               f"--master_port={free_port()}", str(ROOT / "train.py"), *tiny(shards, f"--out={tmp_path}",
               "--name=r", "--recipe=nvfp5")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode != 0 and ended.stderr.count("error: recipe = 'nvfp5' is unknown") == 1, ended
    assert re.search(r"exitcode *: 2 ", ended.stderr) and "train.py\", line" not in ended.stderr, ended


def on_a_machine_of_its_own(argv: list[str]) -> int:
    """ train.main() in a folder of its own. On the second machine the data is bad from step 60 on. """
    rank, read = os.environ["RANK"], data.Stream.sequences

    def sequences(stream, first: int, *args, **more):
        if rank == "1" and first >= 60 * 4:
            raise data.DataError("token 300")
        return read(stream, first, *args, **more)
    os.chdir(argv[0] + rank)
    os.environ["LOCAL_RANK"], parallel.GRACE, data.Stream.sequences = "0", 0.1, sequences
    return train.main(argv[1:])


@pytest.mark.skipif(torch.__version__ < "2.10", reason="FSDP on a CPU needs PyTorch 2.10")
def test_two_machines(shards, tmp_path):    # noqa: F811
    """
    Catches: a second machine that writes files; ranks that stop at different steps, or one that goes on, when
    a signal comes to one machine alone; a second launch that starts anew, since only rank 0 has the
    checkpoint on its disk; a rank that waits for ever for one that met bad data, or one that does not say
    which rank it is.
    """
    flags = tiny(shards, "--out=out", "--name=r", "--recipe=bf16", "--steps=70", "--save_every=5",
                 "--log_every=0", "--parallel=fsdp")
    for rank in range(2):
        (tmp_path / f"host{rank}").mkdir()
    job, out = ("machine", on_a_machine_of_its_own, [f"{tmp_path}/host", *flags]), tmp_path / "host0/out/r"

    processes = start(2, tmp_path, [job])
    while not (out / "ckpt_000000005.pt").exists() and processes[0].is_alive():
        time.sleep(0.01)
    os.kill(processes[1].pid, signal.SIGTERM)
    end(processes, tmp_path, [0, 0])
    assert [torch.load(tmp_path / f"machine-2-{rank}.pt") for rank in range(2)] == [0, 128 + signal.SIGTERM]
    stopped = int(re.search(r"stopped at step (\d+)", (tmp_path / "printed-2-0").read_text())[1])
    assert last_state(out)["step"] == stopped < 60 and not (tmp_path / "printed-2-1").read_text()

    end(start(2, tmp_path, [job]), tmp_path, [1, 2])
    said = [(tmp_path / f"printed-2-{rank}").read_text() for rank in range(2)]
    assert f"continuing from out/r/ckpt_{stopped:09d}.pt" in said[0] and "another rank has gone" in said[0]
    assert said[1] == "rank 1: error: token 300\n", said
    assert not list((tmp_path / "host1").iterdir())

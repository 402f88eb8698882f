""" bench.py and roofline.py: formulas by hand, clocks that do not lie, each command as far as a CPU goes. """
import argparse
import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch

import bench
import roofline
from bench import Timing, markdown, measure, osci_share
from config import Config
from quant import quantize
from recipes import MXFP8, NEAREST, STOCHASTIC
from roofline import Gpu, bits, linear_seconds, product_seconds, rounding_bytes

CPU = torch.device("cpu")
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")      # where kernels run


class FakeClock:
    """ Time passes only when tick() is called, so that what a timing contains can be counted. """

    def __init__(self):
        self.now, self.flushes, self.busy = 0.0, 0, 0.0

    def tick(self, ms: float):
        self.now += ms

    def flush(self):
        self.flushes += 1
        self.now += 1000

    def mark(self) -> float:
        return self.now

    def host(self) -> float:
        return self.busy

    def between(self, marks):
        return [end - start for start, end in marks]


# -----------------------------------------------------------------------------
# roofline.py


@pytest.mark.parametrize("operand, expected", [(NEAREST, 4.75), (STOCHASTIC, 4.75), (MXFP8, 8.25)])
def test_bits_are_those_of_the_format(operand, expected):
    """ Catches: an outer scale counted once per inner block, or forgotten; counted from real codes too. """
    noise = torch.rand(4, 256) if operand.stochastic else None
    assert bits(operand) == expected == quantize(torch.randn(4, 256), operand, noise).bits_per_value()


def test_bytes_of_each_rounding_kernel():
    """ Catches: an operand that is left out, a copy too many, W read as bf16. """
    T, K, N = 8, 16, 32
    assert rounding_bytes("bf16", T, K, N, 0) == {"x": 0, "w": 512 * 6, "dy": 0}
    assert rounding_bytes("fp8", T, K, N, 0) == {"x": 128 * 4, "w": 512 * 6, "dy": 256 * 4}
    # 2 + 2 * 4.75 / 8 = 3.1875, and 4 + 2 * 4.75 / 8 = 5.1875
    base = {"x": 128 * 3.1875, "w": 512 * 5.1875, "dy": 256 * 3.1875}
    assert rounding_bytes("base", T, K, N, 0) == base
    # 8.25 / 8 = 1.03125: two copies of X's two columns, one of W's, all of dY
    more = {"x": 2 * 8 * 2 * 1.03125, "w": 32 * 2 * 1.03125, "dy": 256 * 1.03125}
    assert rounding_bytes("full", T, K, N, 2) == {name: base[name] + more[name] for name in base}


def test_a_product_is_bound_by_its_rate_or_by_its_bytes():
    """ Catches: M N S operations instead of 2 M N S, TFLOP/s taken for GFLOP/s, a result that is free. """
    fast_memory = Gpu("", bf16=1.0, fp8=2.0, fp4=4.0, bandwidth=1e9)
    for kind, seconds in {"bf16": 2e-3, "fp8": 1e-3, "mxfp8": 1e-3, "fp4": 0.5e-3}.items():
        assert product_seconds(fast_memory, kind, 1000, 1000, 1000) == pytest.approx(seconds)
    slow_memory = Gpu("", bf16=1e9, fp8=1e9, fp4=1e9, bandwidth=1.0)
    # (10 + 20) * 16 values in, 10 * 20 out at 2 bytes, read before that at another 2
    assert product_seconds(slow_memory, "fp4", 10, 20, 16) == pytest.approx((480 * 4.75 / 8 + 400) / 1e9)
    assert product_seconds(slow_memory, "mxfp8", 10, 20, 16, adds=True) == pytest.approx(
        (480 * 8.25 / 8 + 800) / 1e9)


def test_time_of_a_linear_by_hand():
    """ Catches: dW or dX left out, W's rounding counted backward, outlier products in FP4 or in dX too. """
    gpu = Gpu("", bf16=1.0, fp8=2.0, fp4=4.0, bandwidth=1000.0)     # 1e12 operations and bytes a second
    n = 1000                                                        # so a product has 2e9 operations
    forward, backward = linear_seconds(gpu, "bf16", n, n, n)
    assert (forward, backward) == pytest.approx((6e-6 + 2e-3, 4e-3))
    forward, backward = linear_seconds(gpu, "fp8", n, n, n)
    assert (forward, backward) == pytest.approx((10e-6 + 1e-3, 4e-6 + 2e-3))
    forward, backward = linear_seconds(gpu, "base", n, n, n)
    assert (forward, backward) == pytest.approx((3.1875e-6 + 5.1875e-6 + 0.5e-3, 3.1875e-6 + 1e-3))
    # C = 100: X 2 * .1, W .1 and dY 1 of 1.03125 bytes; two products of 2e8 operations at the rate of FP8
    full = linear_seconds(gpu, "full", n, n, n)
    assert full == pytest.approx((forward + .3 * 1.03125e-6 + 1e-4, backward + 1.03125e-6 + 1e-4))
    without = linear_seconds(gpu, "base", n, n, n, round_w=False)
    assert without == pytest.approx((forward - 5.1875e-6, backward))


def test_the_shapes_are_those_of_the_model():
    """ Catches: a linear that model.py has and the roofline does not; gate and up counted once. """
    cfg = Config(n_layer=1, d_model=64, n_head=4, d_ff=192)
    _, layers, _ = bench.build(cfg, 128, CPU)
    assert roofline.layer_shapes(64, 3.0) == {
        name.split(".")[-1]: (layer.in_features, layer.out_features) for name, layer in layers.items()}


def test_model_command_says_whose_numbers_are_whose(tmp_path, capsys):
    """ Catches: a paper's number that looks measured here, a sum that is not that of its rows. """
    bench.main(["model", "--d_model=1024", f"--out={tmp_path}"])
    out = capsys.readouterr().out
    assert "nothing was measured" in out and "vendor's datasheet, dense" in out
    theirs = out[out.index("What the paper reports"):]
    assert "measured by its authors on an RTX 5090" in theirs and "1.94" in theirs and "1.67" in theirs
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    rows = [row for row in rows if row["gpu"]["name"] == "B200"]
    for method in roofline.METHODS:
        *parts, whole = [sum(row["seconds"][method]) for row in rows]
        assert whole == pytest.approx(sum(parts)) and len(parts) == 4
    assert (tmp_path / "bench.md").read_text().strip() == out.strip()


# -----------------------------------------------------------------------------
# clock and table


def test_measure_times_the_call_alone():
    """ Catches: warm-up, flush or preparation inside the timed part; a mean for a median. """
    clock, calls = FakeClock(), []

    def call(made):
        calls.append(made)
        # the three calls to warm up are slow, and one later call is an outlier
        clock.tick(50 if len(calls) <= bench.WARMUP else 90 if len(calls) == 6 else 10 + len(calls) % 2)

    def prepare() -> int:
        clock.tick(7)
        return len(calls)
    timing = measure(call, clock, 9, prepare)
    assert (timing.median, timing.least, timing.most, timing.n) == (11, 10, 90, 9)
    assert calls == list(range(12)) and clock.flushes == 12


def test_what_is_computed_is_no_result(tmp_path, monkeypatch, capsys):
    """ Catches: a table on paper among the measured ones, and the next call refused for it. """
    monkeypatch.setattr(bench, "HERE", tmp_path)
    for _ in range(2):
        bench.main(["model", "--d_model=1024"])
    assert not list(tmp_path.iterdir()) and "B200" in capsys.readouterr().out


@pytest.mark.parametrize("ms, flushes", [(0.0, 1), (1.0, 2), (1000.0, 2), (2500.0, 4),
                                         (1e9, 1 + bench.FLUSHES)])
def test_the_host_launches_beforehand(ms, flushes):
    """ Catches: FP8's casts, ten launches in Python, timed as the host's milliseconds; flushes no end. """
    clock, first = FakeClock(), True

    def call():
        nonlocal first
        clock.tick(3)
        clock.busy += 1e12 if first else ms     # the first call compiles
        first = False
    assert measure(call, clock, 5).median == 3
    assert clock.flushes == bench.WARMUP + 5 * flushes


def test_slow_calls_are_measured_less_often():
    """ Catches: half an hour for one row of the table, and a row from a single call. """
    for ms, n in ((1.0, 20), (1000.0, 10), (60_000.0, bench.FEWEST)):
        clock = FakeClock()
        assert measure(lambda: clock.tick(ms), clock, 20).n == n


def test_table_lines_up():
    """ Catches: a cell too few, and numbers to the left. """
    assert markdown([["kernel", "GB/s"], ["a", "7"], ["bcd", "4000"], ["e", "-"]]) == "\n".join([
        "| kernel | GB/s |",
        "| ------ | ---: |",
        "| a      |    7 |",
        "| bcd    | 4000 |",
        "| e      |    - |"])
    with pytest.raises(ValueError):
        markdown([["kernel", "GB/s"], ["a"]])


def test_kernel_table_is_bytes_over_time(tmp_path):
    """ Catches: bits for bytes, ms for s; a kernel timed before it was checked, or although it is wrong. """
    clock, done = FakeClock(), []
    report = bench.Report(argparse.Namespace(what="kernels", argv=[], out=tmp_path, overwrite=False), CPU)

    def check() -> float:
        done.append("check")
        return 3.25

    def call():
        done.append("call")
        clock.tick(2.0)
    case = bench.Case("a kernel", (4, 8), call, 3e9, check)

    def copy(moved: float) -> bench.Timing:
        """ 3000 GB/s in the large, 1.5 ms for as much as the kernel moves. """
        return bench.Timing(2**31 / 3e9 if moved == 2**31 else 1.5, 0.0, 0.0, 1)
    table = bench.kernel_table([case], report, clock, 5, copy)
    assert [cell.strip() for cell in table.splitlines()[2].strip("|").split("|")] == [
        "a kernel", "4x8", "3.25", "3.000", "1500", "50.0", "75.0", "2.000 (2.000 to 2.000)", "5"]
    assert done[0] == "check" and done.count("check") == 1
    raw = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert raw == [{"kernel": "a kernel", "shape": [4, 8], "bytes": 3e9,
                    "ms": {"median": 2.0, "least": 2.0, "most": 2.0, "n": 5},
                    "copy_ms": {"median": 1.5, "least": 0.0, "most": 0.0, "n": 1}}]

    def wrong():
        raise bench.CheckFailed("a kernel is wrong")
    with pytest.raises(bench.CheckFailed):
        bench.kernel_table([bench.Case("b", (1,), call, 1.0, wrong)], report, clock, 5, copy)
    assert len(done) == 1 + bench.WARMUP + 5


def test_effective_bits():
    """ Catches: the root of the error taken twice, or not at all. A relative error of 1/8 is 3 bits. """
    x = torch.ones(64)
    assert bench.effective_bits(x, x * 1.125) == 3.0 and bench.effective_bits(x, x) == math.inf


# -----------------------------------------------------------------------------
# linear and step


def test_check_finds_a_layer_that_does_not_round(monkeypatch):
    """ Catches: a check that any layer passes, so that bf16 is sold as FP4; bounds that good layers miss. """
    for method in ("bf16", "fp8", "tetrajet_base/reference", "tetrajet_full/reference"):
        bench.check_linear(method, CPU)
    make = bench.make_layer
    monkeypatch.setattr(bench, "make_layer", lambda method, *args: make("bf16", *args))
    for method in ("fp8", "tetrajet_base/reference"):
        with pytest.raises(bench.CheckFailed, match="relative error of y is 0.0000"):
            bench.check_linear(method, CPU)


def test_check_compares_back_ends(monkeypatch):
    """ Catches: a back end that rounds otherwise than the reference, with an error of the right size. """
    make = bench.make_layer

    def other(method, *args):
        layer = make(method.replace("emulate", "reference"), *args)
        if "emulate" in method:
            layer.counter.state[0] += 1
        return layer
    monkeypatch.setattr(bench, "make_layer", other)
    with pytest.raises(bench.CheckFailed, match="dx differs from the reference"):
        bench.check_linear("tetrajet_base/emulate", CPU)


def args_of(what: str, tmp_path, *flags) -> argparse.Namespace:
    return bench.read_args([what, f"--out={tmp_path}", "--device=cpu", *flags])


def test_linear_rows(tmp_path, monkeypatch):
    """ Catches: speed upside down, forward time in backward, one shape that does not fit ending all. """
    args = args_of("linear", tmp_path, "--shapes=32x64x48,64x64x48", "--n=5")
    report, clock = bench.Report(args, CPU), FakeClock()

    def timed(layer, T, K, N, device, clock, n):
        if T == 64 and layer.recipe.outlier:
            raise torch.OutOfMemoryError
        ms = 4.0 if any(layer.recipe.operands) else 1.0
        return Timing(ms, ms, ms, n), Timing(3 * ms, ms, ms, n)
    monkeypatch.setattr(bench, "time_linear", timed)
    _, *rows = bench.linear_table(args, report, CPU, ["bf16", "tetrajet_full/reference"], clock)
    # 6 * 32 * 64 * 48 operations in 4 ms are 1.5e8 a second
    assert rows[0][3:] == ["bf16", *timed(bench.make_layer("bf16", 64, 48, CPU), 1, 1, 1, 1, 1, 5), "0.0",
                           "1.00", "1.00", "1.00", 5]
    assert rows[1][3] == "tetrajet_full/reference" and rows[1][7:10] == ["0.25", "0.25", "0.25"]
    assert rows[3][3:5] == ["tetrajet_full/reference", "out of memory"] and len(rows[3]) == len(rows[0])


def test_forward_and_backward_are_timed_apart():
    """ Catches: backward timed with its forward, gradients that pile up from call to call. """
    layer, clock, seen = bench.make_layer("tetrajet_full/reference", 64, 48, CPU), FakeClock(), []
    layer.register_forward_hook(lambda *_: clock.tick(5))
    layer.weight.register_hook(lambda grad: (seen.append(layer.weight.grad), clock.tick(11))[0])
    forward, backward = bench.time_linear(layer, 32, 64, 48, CPU, clock, 5)
    assert (forward.median, backward.median) == (5, 11) and seen == [None] * (bench.WARMUP + 5)


def test_osci_share_by_hand():
    """ Catches: windows that never close counted, the step that opens one forgotten. """
    cfg = Config(steps=100, osci_start=0.6, osci_period=0.1, osci_window=0.05)
    # windows open after steps 60, 70, 80, 90 and close 5 later; each costs (4 + 4 * 2 + 6) - 6 * 1 more
    assert osci_share(cfg, outside=1.0, opening=4.0, inside=2.0, closing=6.0) == pytest.approx(48 / 148)
    late = Config(steps=100, osci_start=0.6, osci_period=0.1, osci_window=0.09)
    # the last would close after step 99, the last there is
    assert osci_share(late, 1.0, 1.0, 2.0, 1.0) == pytest.approx(4 * 8 / 132)
    later = Config(steps=100, osci_start=0.61, osci_period=0.1, osci_window=0.09)
    assert osci_share(later, 1.0, 1.0, 2.0, 1.0) == pytest.approx(3 * 8 / 124)
    # 62, 72, 82 and 92: less than a period is left after the last, and it closes all the same
    part = Config(steps=100, osci_start=0.62, osci_period=0.1, osci_window=0.05)
    assert osci_share(part, 1.0, 1.0, 2.0, 1.0) == pytest.approx(4 * 4 / 116)


def test_step_rows_on_a_cpu(tmp_path, monkeypatch):
    """
    Catches: OsciReset that opens no window while it is timed, memory that runs out and ends all, tokens that
    do not follow, a time ratio upside down. Everything but the clock and the memory counters is real.
    """
    args = args_of("step", tmp_path, "--recipes=bf16,tetrajet_full", "--sizes=nano", "--modes=eager",
                   "--seq_len=32", "--tokens=256", "--n=10")
    monkeypatch.setitem(bench.SIZES, "nano", ["--n_layer=1", "--d_model=32", "--n_head=2", "--d_ff=64"])
    report, clock, windows = bench.Report(args, CPU), FakeClock(), []
    step = bench.Training.step

    def ticking(self, osci=None):
        loss = step(self, osci)
        if self.cfg.batch_tokens == 256 and self.cfg.recipe == "tetrajet_full":
            raise torch.OutOfMemoryError
        clock.tick(1.0 if self.cfg.recipe == "bf16" else 2.0)
        if osci:
            windows.append(len(osci.windows))
            clock.tick(4.0 if osci.windows else 8.0)
        return loss
    monkeypatch.setattr(bench.Training, "step", ticking)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**30)
    rows, (none, osci) = zip(*bench.step_rows(args, report, CPU, "nano", "eager", clock))
    assert [row[2:6] + row[7:] for row in rows] == [
        ["bf16", "-", "256", "256,000", "1.00", "-", "3.0", 10],
        ["tetrajet_full", "reference", "128", "64,000", "4.00", "-", "3.0", 10]]
    # open after the first step of each eleven, closed after the last
    assert windows == ([4] * 10 + [0]) * 4
    assert none == [] and [row[4:9] for row in osci] == [
        [mode, "2.00", "6.00", "6.00", "10.00"] for mode in ("topk", "full")]
    assert len(json.loads((tmp_path / "bench.json").read_text())["rows"]) == 2


def test_what_is_cut_off_has_its_table(tmp_path, monkeypatch, capsys):
    """ Catches: an hour of measuring, ended by a limit, whose bench.md has no numbers; a lost row. """
    args = args_of("step", tmp_path, "--recipes=bf16,tetrajet_full", "--sizes=370m", "--modes=eager")
    monkeypatch.setattr(bench, "pick_device", lambda args: torch.device("cuda"))
    monkeypatch.setattr(bench, "machine", lambda device: {})
    monkeypatch.setattr(bench, "CudaClock", lambda device: None)
    row = ["370m", "eager", "bf16", "-", *range(7)]

    def cut(*args):
        yield row, []
        full = [*row[:2], "tetrajet_full", "emulate"]
        yield [*full, *row[4:]], [[*full, "topk", *range(5)]]
        raise KeyboardInterrupt
    monkeypatch.setattr(bench, "step_rows", cut)
    with pytest.raises(KeyboardInterrupt):
        bench.bench_step(args)
    whole = [line for line in (tmp_path / "bench.md").read_text().splitlines() if line.startswith("| 370m")]
    assert [line.split("|")[3].strip() for line in whole] == ["bf16", "tetrajet_full", "tetrajet_full"]

    def rows(args, report, device, size, *rest):
        for recipe in ("bf16", "tetrajet_base", "tetrajet_full"):
            about = [size, "eager", recipe, "-"]
            osci = () if recipe == "bf16" else ("topk", "full")
            yield [*about, *range(7)], [[*about, mode, *range(5)] for mode in osci]
    monkeypatch.setattr(bench, "step_rows", rows)
    capsys.readouterr()
    bench.bench_step(args_of("step", tmp_path, "--overwrite", "--sizes=370m,70m", "--modes=eager"))
    text = (tmp_path / "bench.md").read_text()
    assert text.strip() == capsys.readouterr().out.strip()
    tables = [[line.split("|")[3].strip() for line in part.splitlines()[2:]]
              for part in text.split("\n\n") if part.startswith("|")]
    assert tables == 2 * [["bf16", "tetrajet_base", "tetrajet_full"],
                          ["tetrajet_base", "tetrajet_base", "tetrajet_full", "tetrajet_full"]]


def test_each_size_is_a_config_of_one_step():
    """ Catches: a micro-batch of the size file that cuts the step, widths that heads do not divide. """
    for size in bench.SIZES:
        for recipe in ("bf16", "tetrajet_base", "tetrajet_full", "tetrajet_released"):
            cfg = bench.step_config(size, recipe, "reference", CPU, 32768, 1024)
            assert (cfg.batch_tokens, cfg.seq_len, cfg.micro_batch, cfg.recipe) == (32768, 1024, 0, recipe)
    assert (cfg.n_layer, cfg.d_model, cfg.n_head, cfg.d_ff, cfg.vocab_size) == (4, 2048, 16, 5632, 50304)


def test_training_that_does_not_learn_is_not_timed(monkeypatch):
    """ Catches: the speed of a step that computes nothing. """
    cfg = bench.step_config("nano", "bf16", "reference", CPU, 64, 32)
    training = bench.Training(cfg, CPU, "eager")
    monkeypatch.setattr(training.optimizer, "step", lambda: None)
    with pytest.raises(bench.CheckFailed, match="the loss of one batch went from"):
        bench.check_training(training, 3)


# -----------------------------------------------------------------------------
# the program


@pytest.mark.parametrize("what", ["kernels", "linear", "step"])
def test_on_a_cpu_everything_is_checked_and_nothing_timed(what, tmp_path, capsys, monkeypatch):
    """ Catches: a CPU's time in a table of FP4 speeds; a check without times that blocks a folder. """
    monkeypatch.setattr(bench, "HERE", tmp_path)
    monkeypatch.setattr(bench, "step_config", lambda *args: cfg_of(args[1]))
    bench.main([what, "--device=cpu"])
    out = capsys.readouterr().out
    assert "On a CPU: " in out and "nothing timed" in out
    assert not any(word in out for word in (" ms", "tokens/s", "GB/s", "TFLOP/s"))
    assert not list(tmp_path.iterdir())
    bench.main([what, "--device=cpu", f"--out={tmp_path / 'kept'}"])
    data = json.loads((tmp_path / "kept" / "bench.json").read_text())
    assert data["rows"] and data["machine"]["gpu"] == "none (CPU)" and data["machine"]["commit"]
    assert data["command"].startswith(f"python bench.py {what} --device=cpu")


@pytest.mark.parametrize("argv, idle", [
    (["kernels"], ""), (["kernels", "--recipes=quartet", "--n=7"], "--recipes=quartet, --n=7"),
    (["step", "--recipes=bf16", "--modes", "whole"], "--modes")])
def test_a_flag_that_does_nothing_on_a_cpu_is_named(argv, idle, capsys, monkeypatch):
    """ Catches: kernels of a recipe that pass for checked where only the reference ran. """
    monkeypatch.setattr(bench, "step_config", lambda *args: cfg_of(args[1]))
    bench.main([*argv, "--device=cpu"])
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Without effect")]
    assert said == ([f"Without effect on a CPU: {idle}"] if idle else [])


def test_a_recipe_without_kernels_is_one_line(capsys, monkeypatch):
    """ Catches: a traceback in the middle of the measuring, for a recipe of one's own. """
    pytest.importorskip("triton", reason="needs Triton, which the CPU build of PyTorch does not bring along")
    monkeypatch.setattr(bench, "backends_here", lambda device: ["reference", "emulate"])
    base = bench.RECIPES["tetrajet_base"]
    small = replace(base.y_w, block=(1, 8))
    for recipe, words in ((replace(base, dx_w=None), "Q4 rounds nothing"),
                          (replace(base, y_w=small), "Q2: no kernel for blocks of 1x8")):
        monkeypatch.setitem(bench.RECIPES, "mine", recipe)
        with pytest.raises(SystemExit) as error:
            bench.main(["kernels", "--device=cpu", "--recipes=tetrajet_base,mine"])
        said = capsys.readouterr().err
        assert error.value.code == 2 and words in said and said.count("\n") == 1


def cfg_of(recipe: str) -> Config:
    return Config(recipe=recipe, n_layer=1, d_model=32, n_head=2, d_ff=64, seq_len=32, batch_tokens=128,
                  outlier_frac=0.1 if recipe == "tetrajet_full" else 0.0)


@pytest.mark.parametrize("argv, told", [
    ([], "required: kernels, linear, step or model"),
    (["modle"], "invalid choice: 'modle'"),
    (["linear", "--shape=16x16x16"], "unrecognized arguments"),
    (["linear", "--shapes=16x16"], "such as 4096x1024x1024"),
    (["linear", "--shapes=16x16x16,"], "such as 4096x1024x1024"),
    (["linear", "--shapes=16x16x24"], "multiples of 16"),
    (["linear", "--shapes=16x0x16"], "multiples of 16"),
    (["linear", "--backends=refrence"], "no back end is called 'refrence'; there are reference"),
    (["step", "--recipes=bf16,tetrajet"], "no recipe is called 'tetrajet'"),
    (["step", "--sizes="], "there are nano, 70m"),
    (["step", "--tokens=1000"], "no multiple of --seq_len=1024"),
    (["step", "--n=9"], "from 10 to"),
    (["step", "--tokens=1e4"], "type a whole number"),
    (["model", "--d_model=1024,x"], "type a whole number from 16"),
    (["model", "--ff=nan"], "--ff is from 0.01 to 100"),
    (["model", "--out=/dev/null/x"], "cannot write"),
], ids=lambda x: " ".join(x) if isinstance(x, list) else None)
def test_mistakes_are_one_line(argv, told, capsys):
    """ Catches: a traceback, a usage text of ten lines, a mistake found after an hour of measuring. """
    with pytest.raises(SystemExit) as end:
        bench.main(argv)
    out, err = capsys.readouterr()
    assert end.value.code == 2 and not out
    assert err.count("\n") == 1 and err.startswith("error: ") and told in err


def test_a_back_end_that_cannot_run_here_is_one_line(capsys, monkeypatch):
    """ Catches: the reference measured, silently, where native FP4 was asked for. """
    monkeypatch.setitem(bench.CHOICES, "backend", ("auto", "reference", "emulate", "native"))
    with pytest.raises(SystemExit) as end:
        bench.main(["linear", "--device=cpu", "--backends=native"])
    assert end.value.code == 2
    assert capsys.readouterr().err == ("error: the back end native does not run on this device; "
                                       "type --backends=reference\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu_is_one_line(capsys):
    with pytest.raises(SystemExit) as end:
        bench.main(["step", "--device=cuda"])
    assert end.value.code == 2 and "PyTorch sees none" in capsys.readouterr().err


def test_a_result_is_not_overwritten_unasked(tmp_path, capsys):
    """ Catches: an hour on a rented GPU lost to the same command again. """
    command = ["model", "--d_model=1024", f"--out={tmp_path}"]
    bench.main(command)
    before = (tmp_path / "bench.json").read_bytes()
    with pytest.raises(SystemExit) as end:
        bench.main([*command, "--tokens=64"])
    assert end.value.code == 2 and "type --overwrite" in capsys.readouterr().err
    assert (tmp_path / "bench.json").read_bytes() == before
    bench.main([*command, "--tokens=64", "--overwrite"])
    assert json.loads((tmp_path / "bench.json").read_text())["rows"][0]["tokens"] == 64


def test_a_failed_check_ends_with_one_line(capsys, monkeypatch):
    """ Catches: a traceback, or code 0, for a kernel that computes nonsense. """
    monkeypatch.setattr(bench, "ERRORS", dict.fromkeys(bench.ERRORS, (2.0, 3.0)))
    with pytest.raises(SystemExit) as end:
        bench.main(["linear", "--device=cpu"])
    assert end.value.code == 1 and "nothing of it was timed" in capsys.readouterr().err


def test_back_ends_are_those_of_the_program(monkeypatch):
    """ Catches: a back end that this program does not have, or that this device cannot run. """
    monkeypatch.setattr(bench, "find_spec", lambda name: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setitem(bench.CHOICES, "backend", ("auto", "reference"))
    assert bench.backends_here(torch.device("cuda")) == ["reference"]
    monkeypatch.setitem(bench.CHOICES, "backend", ("auto", "reference", "emulate", "native"))
    assert bench.backends_here(CPU) == ["reference"]
    for capability, expected in (((9, 0), ["reference", "emulate"]), ((8, 0), ["reference", "emulate"]),
                                 ((10, 3), ["reference", "emulate", "native"]),
                                 ((12, 0), ["reference", "emulate", "native"])):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert bench.backends_here(torch.device("cuda")) == expected
        assert bench.has_fp8(torch.device("cuda")) == (capability >= (8, 9))
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    assert bench.backends_here(torch.device("cuda")) == ["reference"]


@pytest.mark.parametrize("recipe, spoilt", [("quartet", "data"), ("quartet", "trust"), ("nvidia", "data")])
def test_a_wrong_rounding_kernel_is_not_timed(recipe, spoilt, monkeypatch):
    """
    Catches: a check that looks at no value, or that rounds by another recipe than the kernel did; the trust
    mask unchecked.
    """
    pytest.importorskip("triton")
    import kernels
    real, spoil = kernels.round_pair, False

    def round_pair(x, row, col, row_out, *others, **more):
        real(x, row, col, row_out, *others, **more)
        if spoil and getattr(row_out, spoilt) is not None:
            getattr(row_out, spoilt)[5, 7] = 2
    monkeypatch.setattr(kernels, "round_pair", round_pair)
    for spoil in (False, True):
        for case in bench.fused_cases(HERE, "small", 128, 128, 128, recipe)[: 2 if spoilt == "data" else 1]:
            if spoil:
                with pytest.raises(bench.CheckFailed, match=f"{recipe}, .* differs from the reference"):
                    case.check()
            else:
                assert 2 < case.check() < 4


@pytest.mark.parametrize("number, dtype", [(1, torch.float8_e4m3fn), (3, torch.float8_e5m2)])
def test_fp8_baseline_is_cast_alike_by_kernels(number, dtype):
    """ Catches: FP8 bytes that PyTorch reads as other numbers, a scale that divides, a copy not turned. """
    pytest.importorskip("triton", reason="needs Triton, which the CPU build of PyTorch does not bring along")
    x, op = torch.randn(48, 80, device=HERE), bench.RECIPES["fp8"].operands[number - 1]
    slow = bench.fp8_cast(x, op, None)
    for got, wanted in zip(bench.fp8_cast(x, op, bench.Counter(device=HERE).state), slow):
        assert got.dtype == wanted.dtype and torch.equal(got.float(), wanted.float())
    assert slow[0].dtype == dtype and torch.equal(slow[0].float(), slow[1].float().t())
    scale = x.abs().max() / torch.finfo(dtype).max
    assert slow[2] == scale and (slow[0].float() * scale - x).abs().max() < x.abs().max() / 14


def test_a_compiled_model_trains_what_the_eager_one_does(monkeypatch):
    """ Catches: a model timed in parts of which one is left out, or whose parts compute something else. """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    cfg = bench.parse(["configs/tetrajet_base.py", "--n_layer=2", "--d_model=32", "--n_head=1", "--d_ff=32",
                       "--seq_len=16", "--batch_tokens=32", "--vocab_size=64"])
    losses = []
    for mode in ("eager", "compiled", "whole"):
        torch._dynamo.reset()
        training = bench.Training(cfg, CPU, mode)
        losses.append([float(training.step()) for _ in range(3)])
    assert losses[0] == losses[1] == losses[2] and losses[0][2] < losses[0][0]

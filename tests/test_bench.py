""" bench.py: a clock that does not lie, checks that find what is wrong, and each command on a CPU. """
import re
from dataclasses import replace

import pytest
import torch

import bench
from bench import CheckFailed, Timing, measure
from quant import BACKENDS, Product

CPU = torch.device("cpu")
TINY = ["--n_layer=1", "--d_model=16", "--n_head=1", "--d_ff=16", "--vocab_size=128"]


class FakeClock(bench.CpuClock):
    """ Time passes only when tick() is called, so that what a timing contains can be counted. """

    def __init__(self):
        super().__init__(CPU)
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


def tables(out: str) -> list[list[list[str]]]:
    """ The rows below the head of each table that was printed. """
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", out, re.MULTILINE):
        lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        assert len({len(line) for line in lines}) == 1, "a cell too few"
        found.append(lines[2:])
    return found


# -----------------------------------------------------------------------------
# the clock


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


@pytest.mark.parametrize("ms, flushes", [(0.0, 1), (1.0, 2), (1000.0, 2), (2500.0, 4),
                                         (1e9, 1 + bench.FLUSHES)])
def test_the_host_launches_beforehand(ms, flushes):
    """ Catches: launches in Python timed as the device's milliseconds; flushes without end. """
    clock, first = FakeClock(), True

    def call():
        nonlocal first
        clock.tick(3)
        clock.busy += 1e12 if first else ms     # the first call compiles
        first = False
    assert measure(call, clock, 5).median == 3
    assert clock.flushes == bench.WARMUP + 5 * flushes


def test_forward_and_backward_are_timed_apart():
    """ Catches: backward timed with its forward, gradients that pile up from call to call. """
    layer, clock, seen = bench.layer_of("tetrajet_full", "reference", 64, 48, CPU), FakeClock(), []
    layer.register_forward_hook(lambda *_: clock.tick(5))
    layer.weight.register_hook(lambda grad: (seen.append(layer.weight.grad), clock.tick(11))[0])
    forward, backward = bench.time_linear(layer, 32, clock, 5)
    assert (forward.median, backward.median) == (5, 11) and seen == [None] * (bench.WARMUP + 5)


# -----------------------------------------------------------------------------
# the checks


def test_a_layer_that_does_not_round_is_not_timed(monkeypatch):
    """ Catches: a check that any layer passes, so that bf16 is sold as FP4; bounds that good layers miss. """
    for recipe in ("bf16", "fp8", "mxfp4", "tetrajet_base", "tetrajet_full", "quartet"):
        bench.check_linear(recipe, "reference", CPU)
    make = bench.layer_of
    monkeypatch.setattr(bench, "layer_of", lambda recipe, *others: make("bf16", *others))
    with pytest.raises(CheckFailed, match="relative error of Y is 0.0000"):
        bench.check_linear("tetrajet_base", "reference", CPU)


def test_a_back_end_that_rounds_otherwise_is_not_timed(monkeypatch):
    """ Catches: noise of another address, with an error of the right size. """
    def linear(x, w, recipe, channels, counter, *others):
        return Product.apply(x, w, recipe, channels, counter + torch.tensor([0, 1, 0, 0]), *others)
    monkeypatch.setitem(BACKENDS, "other", replace(BACKENDS["reference"], linear=linear))
    with pytest.raises(CheckFailed, match="tetrajet_base/other: dX differs from the reference"):
        bench.check_linear("tetrajet_base", "other", CPU)


@pytest.mark.parametrize("number", [3, 5])
def test_a_rounding_pass_that_is_wrong_is_not_timed(monkeypatch, number):
    """ Catches: a check that looks at no value, or at one of the two orientations alone. """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")    # kernels are interpreted without
    bench.check_rounding("tetrajet_base", 3, 5, device)

    def wrong(r, row, col):
        def f(x):
            outs = bench.by_reference(r, row, col, x)
            outs[(row, col).index(number)][7, 5] += 1
            return outs
        return f, "kernel"
    monkeypatch.setattr(bench, "rounding_pass", wrong)
    with pytest.raises(CheckFailed, match=f"Q{number} differs"):
        bench.check_rounding("tetrajet_base", 3, 5, device)


def test_the_six_operands_are_those_of_the_linear():
    """ Catches: W^T rounded from W where the gradient is aligned; a rotation or noise of another product. """
    r, x, seen = bench.RECIPES["tetrajet_base"], torch.randn(64, 48), {}
    layer = bench.layer_of("tetrajet_base", "reference", 48, 32, CPU)
    q = bench.Rounder.q

    def watch(self, number, x):
        seen[number] = q(self, number, x)
        return seen[number]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.Rounder, "q", watch)
        dy = torch.randn(64, 32)
        layer(x.requires_grad_()).backward(dy)
    for what, row, col in ((x.detach(), 1, 6), (layer.weight.detach(), 2, 4), (dy, 3, 5)):
        for number, got in zip((row, col), bench.by_reference(r, row, col, what)):
            assert torch.equal(got, seen[number]), number


def test_a_product_that_is_wrong_is_not_timed():
    """ Catches: scales of the wrong operand; rounding of the result taken for an error. """
    a, b = torch.randn(32, 64), torch.randn(48, 64)
    bench.check_product("mine", (a @ b.T).bfloat16(), a, b)
    with pytest.raises(CheckFailed, match="mine is off by"):
        bench.check_product("mine", 1.01 * (a @ b.T), a, b)


def training(recipe: str = "bf16", **knobs) -> bench.Training:
    cfg = bench.parse([*TINY, f"--recipe={recipe}", "--seq_len=16", "--batch_tokens=32", "--eval_tokens=16",
                       *(f"--{name}={value}" for name, value in knobs.items())])
    return bench.Training(cfg, CPU)


def test_training_that_does_not_learn_is_not_timed(monkeypatch):
    """ Catches: the speed of a step that computes nothing. """
    monkeypatch.setattr(bench, "make_optimizers", lambda cfg, model: [])
    with pytest.raises(CheckFailed, match="the loss of one batch went from"):
        bench.time_step(training().cfg, FakeClock(), 2)


# -----------------------------------------------------------------------------
# what a step is


def test_osci_reset_is_timed_in_windows_of_its_own(monkeypatch):
    """
    Catches: a window that never opens or closes while it is timed; windows that are open in the steps that
    are compared with; a share that forgets the step that opens a window.
    """
    one, clock = training("tetrajet_full", osci="reset"), FakeClock()
    cfg, step, opened = one.cfg, bench.Training.step, []

    def ticking(self, number):
        loss = step(self, number)
        is_open = any(layer.osci_w is not None for layer in self.net.layers.values())
        clock.tick({cfg.in_steps(cfg.osci_start): 5.0, one.quiet: 1.0}.get(number, 3.0 if is_open else 7.0))
        opened.append(is_open)
        return loss
    monkeypatch.setattr(bench.Training, "step", ticking)
    assert one.timed([one.quiet] * 2, clock) == [1.0, 1.0] and opened == [False] * 2
    # 360 steps before it, a window of 30 in each 60: 4 + 29 * 2 + 6 ms more than the 60 of a period
    assert bench.time_osci(one, 1.0, 4, clock) == "+4.0, +2.0, +6.0: 53.1 %"
    assert opened[2:] == ([True] * 5 + [False]) * 2


def test_each_size_is_a_config_of_one_step():
    """ Catches: a micro-batch of the size file that cuts the step, widths that heads do not divide. """
    args = bench.read_args(["step", "--seq_len=1024"])
    for size in bench.SIZES:
        for recipe in ("bf16", "tetrajet_base", "tetrajet_full", "tetrajet_released"):
            cfg = bench.step_config(args, size, recipe, "reference", CPU, 32768)
            assert (cfg.batch_tokens, cfg.seq_len, cfg.micro_batch, cfg.recipe) == (32768, 1024, 0, recipe)
            quiet = sum(map(cfg.in_steps, (cfg.outlier_start, cfg.outlier_window, cfg.warmup)))
            assert cfg.osci == "off" or quiet < cfg.in_steps(cfg.osci_start)
    assert (cfg.n_layer, cfg.d_model, cfg.n_head, cfg.d_ff, cfg.vocab_size) == (4, 2048, 16, 5632, 50304)


def test_step_rows(monkeypatch, capsys):
    """ Catches: memory that runs out and ends all, tokens that do not follow, a time ratio upside down. """
    def timed(cfg, clock, n):
        if cfg.batch_tokens == 256 and cfg.recipe == "tetrajet_full":
            raise torch.OutOfMemoryError
        ms = 1.0 if cfg.recipe == "bf16" else 2.0
        return Timing(ms, ms, ms, n), "0.1", "3.0", "-"
    monkeypatch.setattr(bench, "time_step", timed)
    bench.main(["step", "--device=cpu", "--backends=reference", "--recipes=bf16,tetrajet_full", "--n=7",
                "--seq_len=64", "--tokens=256"])
    assert tables(capsys.readouterr().out) == [[
        ["nano", "bf16", "reference", "256", "256,000", "1.000 (1.000 to 1.000)", "1.00", "0.1", "3.0", "-",
         "7"],
        ["nano", "tetrajet_full", "reference", "128", "64,000", "2.000 (2.000 to 2.000)", "4.00", "0.1",
         "3.0", "-", "7"]]]


def test_linear_rows(monkeypatch, capsys):
    """ Catches: speed upside down, forward time in backward, one shape that does not fit ending all. """
    def timed(layer, T, clock, n):
        if T == 64 and layer.recipe.outlier:
            raise torch.OutOfMemoryError
        ms = 4.0 if any(layer.recipe.operands) else 1.0
        return Timing(ms, ms, ms, n), Timing(3 * ms, ms, ms, n)
    monkeypatch.setattr(bench, "time_linear", timed)
    bench.main(["linear", "--device=cpu", "--shapes=32x64x48,64x64x48", "--n=5", "--backends=reference",
                "--recipes=tetrajet_full"])
    errors, rows = tables(capsys.readouterr().out)
    assert [row[0] for row in errors] == ["bf16/reference", "tetrajet_full/reference"]
    # 6 * 32 * 64 * 48 operations in 4 ms are 1.5e8 a second
    assert rows[0] == ["32x64x48", "bf16/reference", "1.000 (1.000 to 1.000)", "3.000 (1.000 to 1.000)",
                       "0.0", "1.00", "5"]
    assert rows[1][:2] == ["32x64x48", "tetrajet_full/reference"] and rows[1][5] == "0.25"
    assert rows[3][1:3] == ["tetrajet_full/reference", "out of memory"]


# -----------------------------------------------------------------------------
# the program


@pytest.mark.parametrize("what, count", [("kernels", [3, 1]), ("linear", [2, 2]), ("step", [2])])
def test_each_command_runs_on_a_cpu(what, count, monkeypatch, capsys):
    """ Catches: a command that a renamed function elsewhere breaks, which a rented GPU would find out. """
    monkeypatch.setitem(bench.SIZES, "nano", TINY)
    # the kernels would be interpreted, which takes seconds; another test has them
    monkeypatch.setattr(bench, "BACKENDS", {"reference": BACKENDS["reference"]})
    assert bench.main([what, "--device=cpu", "--n=1", "--recipes=tetrajet_full", "--tokens=64"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"`python bench.py {what} --device=cpu --n=1") and "`: CPU, torch " in out
    assert [len(rows) for rows in tables(out)] == count


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_kernels_are_checked_in_the_interpreter(monkeypatch, capsys):
    """ Catches: kernels whose arguments have changed; products whose operands are packed otherwise. """
    pytest.importorskip("triton", "3.6")

    def once(call, *_, **__):
        call()
        return Timing(1.0, 1.0, 1.0, 1)
    monkeypatch.setattr(bench, "measure", once)
    assert bench.main(["kernels", "--device=cpu", "--recipes=tetrajet_base"]) == 0
    rounding, products = tables(capsys.readouterr().out)
    assert [row[0].split(", ", 1)[1] for row in rounding] == ["X, kernel", "W, kernel", "dY, kernel"]
    assert [row[0].split(",")[0] for row in products] == ["bf16", "NVFP4", "NVFP4", "MXFP8"]


@pytest.mark.parametrize("argv, told", [
    (["linear", "--backends=refrence"], "back end 'refrence' is unknown here"),
    (["step", "--recipes=bf16,tetrajet"], "recipe 'tetrajet' is unknown here; did you mean tetrajet_"),
    (["step", "--sizes=71m"], "did you mean 70m?"), (["linear", "--n=0"], "type --n above 0"),
    (["step", "--tokens=10"], "--tokens of at least --seq_len=64"),
])
def test_mistakes_are_one_line(argv, told, capsys):
    """ Catches: a traceback, a mistake found after an hour of measuring. """
    assert bench.main([*argv, "--device=cpu"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and err.startswith("error: ") and told in err


def test_a_failed_check_ends_with_one_line(monkeypatch, capsys):
    """ Catches: a traceback, or code 0, for a kernel that computes nonsense. """
    def wrong(*_):
        raise CheckFailed("a kernel is wrong")
    monkeypatch.setattr(bench, "check_rounding", wrong)
    assert bench.main(["kernels", "--device=cpu", "--n=1"]) == 1
    assert capsys.readouterr().err == "error: a kernel is wrong; it was not timed\n"

""" config.py and the files in configs/: what is accepted, and that every mistake is told in one line. """
import dataclasses
import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

import config
from build import RECIPES, recipe_of
from checkpoint import config_of
from config import Config, ConfigError, parse
from model import GPT
from shipped import shipped

ROOT = Path(config.__file__).parent
FILES = shipped("configs/*.py")
RECIPE_FILES = [path for path in FILES if "recipe" in config.read_file(str(path))]
SIZE_FILES = [path for path in FILES if "n_layer" in config.read_file(str(path))]


@pytest.fixture
def file(tmp_path):
    """ Writes a config file and returns its path. """
    def write(text, name="mine.py"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)
    return write


# -----------------------------------------------------------------------------
# what is accepted


def test_later_files_win_and_flags_win_over_all(file):
    """ Catches: flags that are applied where they stand, so that a file after them undoes them. """
    a, b = file("lr = 1e-3\nsteps = 7\nn_layer = 2\n", "a.py"), file("lr = 2e-3\nsteps = 8\n", "b.py")
    cfg = parse(["--lr=3e-3", a, b])
    assert (cfg.lr, cfg.steps, cfg.n_layer) == (3e-3, 8, 2)
    assert parse([b, a]).steps == 7


def test_expressions_in_a_file(file):
    """ Catches: operators that are mixed up, precedence that is lost, names that do not carry down. """
    cfg = parse([file('"""A docstring."""\nsteps = 2**5 * 10   # 320\n\nwarmup = 16 / steps\n'
                      "eval_every = -(-steps // 3) + 1\nlr = +1e-3 - 5e-4\ncompile = False\nname = 'a=b'\n")])
    assert (cfg.steps, cfg.warmup, cfg.eval_every, cfg.lr) == (320, 0.05, 108, 5e-4)
    assert cfg.compile is False and cfg.name == "a=b"
    assert parse([file("\ufeffsteps = 7\n")]).steps == 7         # Notepad writes a mark before the first line


@pytest.mark.parametrize("flag, name, value", [
    ("--lr=1", "lr", 1.0), ("--lr=3e-4", "lr", 3e-4), ("--steps=1e3", "steps", 1000),
    ("--eval_tokens=4_096", "eval_tokens", 4096),
    ("--out=a=b", "out", "a=b"), ("--data=1", "data", "1"), ("--data=", "data", ""),
    ("--dry_run", "dry_run", True), ("--compile=True", "compile", True), ("--compile=0", "compile", False),
    ("--compile=no", "compile", False), ("--quantizers=", "quantizers", ""), ("--wandb", "wandb", True),
])
def test_flags(flag, name, value):
    """ Catches: a type that is not the knob's: 1 kept as an int, "False" taken as true, text cut at =. """
    got = getattr(parse([flag]), name)
    assert got == value and type(got) is type(value)


def test_name_comes_from_files_and_seed(file):
    """ Catches: runs of two recipes, sizes or seeds that would share a folder. """
    a, b = file("lr = 1e-3\n", "full.py"), file("steps = 9\n", "small.py")
    assert parse([a, b, "--seed=3"]).name == "full-small-s3"
    assert parse([]).name == "bf16-s1" and parse(["--recipe=tetrajet_base"]).name == "tetrajet_base-s1"
    assert parse([a, "--name=mine", "--seed=3"]).name == "mine"


def test_a_saved_config_comes_back(file):
    """ Catches: a value that JSON changes, 1 in one run and 1.0 in another; a knob that nobody knows, or that
    is missing from a checkpoint because it is newer. """
    cfg = parse(["--lr=1e-5", "--compile=no", "--seed=4", file("clip = 1\n")])
    saved = json.loads(json.dumps(dataclasses.asdict(cfg)))
    assert config_of({"config": saved}) == cfg and type(cfg.clip) is float
    assert config_of({"config": saved}, device="cpu") == dataclasses.replace(cfg, device="cpu")
    assert saved.pop("block") == "olmo2" and config_of({"config": saved}) == cfg        # older than that knob
    with pytest.raises(ConfigError, match="warmpu.*warmup"):
        config_of({"config": saved | {"warmpu": 0.1}})
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.steps = 5


def test_in_steps():
    """ Catches: truncation in place of rounding (0.29 * 100 is 28.999...), and a length of nothing. """
    cfg = Config(steps=100)
    assert [cfg.in_steps(f) for f in (0.29, 0.006, 0.0, 1.0)] == [29, 1, 1, 100]


def test_help_has_every_knob_once(capsys):
    """ Catches: a knob without a comment, which the pattern that makes the help would skip in silence. """
    with pytest.raises(SystemExit) as end:
        parse(["configs/nowhere.py", "-h"])
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    for f in dataclasses.fields(Config):
        line, = [line for line in lines if line.startswith(f"  --{f.name}=")]
        assert len(line.split(maxsplit=1)[1]) > 5 and len(line) <= 110, line
    names = re.search(r"--recipe=.* recipes.py: (.*), \.\.\.", config.help_text())[1].split(", ")
    assert len(names) > 2 and set(names) <= set(RECIPES)


def test_config_needs_nothing_but_python():
    """ Catches: an import that makes `--help` wait for torch, or ties config.py to the rest. """
    code = "import config, sys; print('torch' in sys.modules or 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "False\n", done


# -----------------------------------------------------------------------------
# mistakes


@pytest.mark.parametrize("flags, told", [
    ("--learning_rte=1e-3", "no knob is called 'learning_rte'"), ("--n_layers=3", "did you mean n_layer?"),
    ("--dry-run", "did you mean dry_run?"), ("--", "no knob is called ''"),
    ("--n_layer=abc", "n_layer wants a whole number, not 'abc'"),
    ("--n_layer=1.5", "n_layer wants a whole number, not 1.5"),
    ("--n_layer=True", "n_layer wants a whole number, not 'True'"),
    ("--lr=fast", "lr wants a number, not 'fast'"), ("--lr=", "lr wants a number, not ''"),
    ("--compile=maybe", "compile wants true or false, not 'maybe'"),
    ("--lr", "--lr has no value: type --lr=VALUE"), ("-lr=1", "flags are written --KNOB=VALUE"),
    ("--lr=1 --lr=1", "--lr is given twice"), ("--dry_run --dry_run=no", "--dry_run is given twice"),
    ("lr=1", "cannot read lr=1"), ("configs/nowhere.py", "type configs/NAME.py, or --KNOB=VALUE"),
    ("configs/tetrajet_ful.py", "; did you mean configs/tetrajet_full.py?"), ("configs", "no regular file"),
    ("--lr=nan", "lr = nan: type a finite number"), ("--lr=inf", "lr = inf: type a finite number"),
    ("--steps=inf", "steps wants a whole number, not inf"),
    ("--lr=-1", "lr = -1.0: type a finite number that is not negative"),
    ("--lr=0", "lr = 0.0: type a number above 0"), ("--steps=0", "steps = 0: type a number above 0"),
    ("--osci_track=0", "osci_track = 0.0: type a number above 0"),
    ("--warmup=1.5", "warmup = 1.5: type a fraction, from 0 to 1"),
    ("--warmup=1", "does not end before decay_end"), ("--schedule=cos", "type one of cosine, linear"),
    ("--block=gpt2", "type one of olmo2, llama"),
    ("--optimizer=adam", "type one of adamw, muon"), ("--device=gpu", "type one of auto, cpu, cuda, mps"),
    ("--seed=2147483648", "type a number below"), ("--beta2=1", "type numbers below 1"),
    ("--osci_decay=1", "osci_decay = 1"), ("--lr=1 --weight_decay=1", "a smaller weight_decay"),
    ("--name=..", "type the name of one folder"), ("--name=a/b", "type the name of one folder"),
    ("--quantizers=1,7", "type some of 1,2,3,4,5,6"), ("--quantizers=1,1", "each once"),
    ("--keep=mlp", "type some of attn.qkv"), ("--rotate=dz", "type some of none,y,dx,dw"),
    ("--rotate_size=12", "power of two"), ("--block_w=16", "type rows x columns"),
    ("--block_x=0x16", "type rows x columns"), ("--backward=up", "type one of rtn, sr"),
    ("--outer=64", "type one of 128, tensor, row"), ("--align=yes", "type one of true, false"),
    ("--outlier_format=fp8", "type one of mxfp8, bf16"),
    ("--n_head=3", "n_head = 3 does not cut d_model"), ("--n_head=128", "heads of one even width"),
    ("--batch_tokens=2000", "no multiple of seq_len"), ("--micro_batch=6", "does not divide the batch of 8"),
    ("--eval_tokens=100", "less than a sequence"), ("--bf16_forward=1", "leaves no step"),
    ("--bf16_forward=0.5 --osci=reset", "leave one of the two out"),
    # runs that would start and then never do what they were asked for: the window has 30 of 600 steps
    ("--osci=reset --osci_period=0.05", "come to 30 and 30 steps, which leaves no step between"),
    ("--osci=reset --osci_start=0.95", "osci_start + osci_window (570 + 30 steps) must be less"),
    ("--outlier_frac=.1 --outlier_start=0.99", "outlier_start + outlier_window (594 + 18 steps)"),
    ("--outlier_frac=.1 --outlier_log=0.02", "(18 steps) is longer than outlier_log (12 steps)"),
    ("--outlier_frac=.1 --outlier_log=0.97", "(6 + 582 + 18 steps) exceed steps = 600"),
])
def test_mistake_on_the_command_line(flags, told, monkeypatch):
    """ Catches: a check that is dropped and a message without a cure. """
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError) as error:
        parse(flags.split())
    assert told in str(error.value) and "\n" not in str(error.value)


def test_a_window_that_just_fits():
    """ Catches: a check that is off by one: step 599, the last of 600, may choose channels and may reset. """
    parse(["--outlier_frac=0.1", "--outlier_start=0.97"])       # measures in steps 582 to 599
    parse(["--osci=reset", f"--osci_start={569 / 600}"])        # resets after step 569 + 30
    parse(["--outlier_frac=0.1", "--outlier_log=0.96"])         # measures anew in steps 582 to 599
    parse(["--steps=3"])                                        # windows do not matter while they are off


@pytest.mark.parametrize("text, told", [
    ("lr = 1e-3\nlearning_rte = 1e-3\n", ":2: no knob is called 'learning_rte'"),
    ("warm_up = 0.1\n", ":1: no knob is called 'warm_up'; did you mean warmup?"),
    ("steps = 5\nsteps = 6\n", ":2: steps is assigned twice"),
    ("steps = 'many'\n", ":1: steps wants a whole number, not 'many'"),
    ("steps = True\n", ":1: steps wants a whole number, not True"), ("data = None\n", ":1: a value is"),
    ("quantizers = [1, 2]\n", ":1: a value is"), ("warmup = 10 / steps\nsteps = 100\n", ":1: a value is"),
    ("lr = (-2)**0.5\n", ":1: lr wants a number"), ("data = f'{lr}'\n", ":1: a value is"),
    ("data = __import__('os').getcwd()\n", ":1: a value is"), ("lr = 1 if 1 else 2\n", ":1: a value is"),
    ("steps = 7 % 4\n", ":1: a value is"), ("data = 'a' * 3\n", ":1: arithmetic is for numbers"),
    ("lr = 1 / 0\n", "division by zero"), ("import os\n", ":1: a config file holds lines"),
    ("lr = 1\nprint(lr)\n", ":2: a config file holds"), ("a = b = 1\n", ":1: a config file holds lines"),
    ("lr: float = 1\n", ":1: a config file holds lines"), ("lr += 1\n", ":1: a config file holds lines"),
    ("lr = 1\nsteps = = 2\n", ":2: invalid syntax"), ("lr = 10**400\n", ":1: "), ("steps = 5\n\x00", ":"),
    # whole numbers that would take for ever
    ("steps = 9**9**9\n", ":1: "), ("steps = 10**10**10\n", ":1: "),
])
def test_mistake_in_a_file(file, text, told):
    """ Catches: code that is executed, an error other than ConfigError, and one without file and line. """
    path = file(text)
    with pytest.raises(ConfigError) as error:
        parse([path])
    assert str(error.value).startswith(path) and told in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_no_text(tmp_path):
    """ Catches: a traceback over a shard that is typed for a config file. """
    (tmp_path / "mine.py").write_bytes(b"\x7fELF\xff\0")
    with pytest.raises(ConfigError, match="mine.py"):
        parse([str(tmp_path / "mine.py")])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_pipe_is_no_config_file(tmp_path):
    """ Catches: a program that waits for ever, without a word, for somebody to write. """
    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(ConfigError, match="no regular file"):
        parse([str(tmp_path / "pipe.py")])


# -----------------------------------------------------------------------------
# the files in configs/


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_config_file_opens_with_its_command(path):
    """ Catches: a file that is renamed or copied and shows the command of another; a recipe that is not. """
    lines = path.read_text().splitlines()
    assert lines[0].startswith(f"# configs/{path.name} ")
    assert any("train.py " in line and f" configs/{path.name} --" in line for line in lines[:8])
    recipe_of(parse([str(path)]))


@pytest.mark.parametrize("size", SIZE_FILES, ids=lambda p: p.stem)
def test_recipes_and_sizes_combine(size):
    """ Catches: a knob that both set, so that the order of the two files would matter. """
    for recipe in RECIPE_FILES:
        a, b = str(recipe), str(size)
        one, two = (dataclasses.replace(parse(pair), name="") for pair in ([a, b], [b, a]))
        assert one == two and set(config.read_file(a)).isdisjoint(config.read_file(b))
        recipe_of(one)


def test_every_file_is_a_recipe_or_a_size():
    assert {p.stem for p in RECIPE_FILES} >= {"bf16", "tetrajet_base", "tetrajet_full", "tetrajet_released"}
    assert {p.stem for p in SIZE_FILES} >= {"olmo2_70m", "olmo2_150m", "olmo2_370m", "olmo2_1b"}
    assert set(FILES) == set(RECIPE_FILES) | set(SIZE_FILES)
    full = parse([str(ROOT / "configs/tetrajet_full.py")])
    # the share that the paper tracks
    assert (full.osci, full.osci_track, full.osci_tau, full.outlier_frac) == ("reset", 0.05, 8.0, 0.1)


# arXiv 2510.27527 by its released configs: width, layers, heads, inner width, peak rate, warm-up, steps,
# tokens to the end of the cosine, first step of resets, their period, millions of weights in block linears
PAPER = {
    "olmo2_70m": (512, 8, 8, 1024, 4e-4, 238, 12_505, 50e9, 8_000, 200, 21.0),
    "olmo2_150m": (768, 12, 12, 1536, 3e-4, 2_000, 25_500, 100e9, 15_000, 200, 70.8),
    "olmo2_370m": (1024, 16, 16, 4096, 3e-4, 2_000, 50_500, 200e9, 35_000, 400, 268),
}


@pytest.mark.parametrize("stem", PAPER)
def test_sizes_are_the_papers(stem):
    """ Catches: a digit that slips, and a fraction that does not come back as the paper's step. """
    width, layers, heads, inner, lr, warmup, steps, tokens, start, period, millions = PAPER[stem]
    cfg = parse([str(ROOT / "configs/tetrajet_full.py"), str(ROOT / f"configs/{stem}.py")])
    assert (cfg.d_model, cfg.n_layer, cfg.n_head, cfg.d_ff) == (width, layers, heads, inner)
    assert (cfg.lr, cfg.steps, cfg.in_steps(cfg.warmup)) == (lr, steps, warmup)
    assert (cfg.in_steps(cfg.osci_start), cfg.in_steps(cfg.osci_period)) == (start, period)
    assert cfg.in_steps(cfg.osci_window) == cfg.in_steps(cfg.outlier_window) == 50
    assert cfg.outlier_start == 0.01 and cfg.outlier_frac == 0.1 and cfg.lr_final == 0.1
    assert (cfg.seq_len, cfg.batch_tokens) == (4096, 4096 * 1024)
    assert cfg.decay_end * cfg.steps * cfg.batch_tokens == pytest.approx(tokens, rel=1e-12)
    assert cfg.vocab_size == -(-50_257 // 128) * 128
    as_in_olmo2(cfg)
    with torch.device("meta"):
        weights = GPT(cfg, cfg.vocab_size).num_params()["block_linears"]
    assert round(weights / 1e6, 1 if millions < 100 else 0) == millions


def as_in_olmo2(cfg):
    """ What all sizes have in common, and the released config of OLMo 2 too, is what the defaults are. """
    assert (cfg.beta1, cfg.beta2, cfg.adam_eps, cfg.weight_decay, cfg.clip) == (0.9, 0.95, 1e-8, 0.1, 1.0)
    assert (cfg.schedule, cfg.z_loss, cfg.rope_theta, cfg.norm_eps) == ("cosine", 1e-5, 5e5, 1e-6)
    assert cfg.init_std == 0.02


def test_the_size_of_olmo_2_1b():
    """ Catches: mlp_ratio 8 taken for the inner width, steps that forget that the batch is half as large. """
    cfg = parse([str(ROOT / "configs/tetrajet_full.py"), str(ROOT / "configs/olmo2_1b.py")])
    assert (cfg.d_model, cfg.n_layer, cfg.n_head, cfg.d_ff) == (2048, 16, 16, 8192) and cfg.recompute
    with torch.device("meta"):
        count = GPT(cfg, 100_352).num_params()
    # with the rows of its own embedding it has the 1.48B parameters of the released model
    assert count["block_linears"] == 1_073_741_824 and sum(count.values()) == 1_484_916_736
    assert (cfg.seq_len, cfg.batch_tokens, cfg.lr, cfg.lr_final) == (4096, 4096 * 512, 4e-4, 0.1)
    assert cfg.in_steps(cfg.warmup) * cfg.batch_tokens == 8_388_608_000
    assert (cfg.in_steps(cfg.osci_start), cfg.in_steps(cfg.osci_period)) == (34_000, 400)
    as_in_olmo2(cfg)


def test_all_combinations_of_windows_act_or_are_refused():
    """ Catches: a run that is accepted and never resets or chooses channels. """
    kept, fractions = 0, ((0, 0.6, 0.97, 1), (0, 0.05, 0.5, 1), (0, 0.1, 1))
    for steps, start, window, period in product((1, 3, 14, 20, 600), *fractions):
        cfg = Config(steps=steps, osci="reset", osci_start=start, osci_window=window, osci_period=period,
                     outlier_frac=0.1, outlier_start=start, outlier_window=window)
        try:
            config.check(cfg)
        except ConfigError:
            continue
        kept += 1
        start, window, period = (cfg.in_steps(x) for x in (cfg.osci_start, cfg.osci_window, cfg.osci_period))
        assert any((step - start) % period == window for step in range(start, cfg.steps))
        assert cfg.in_steps(cfg.outlier_start) + cfg.in_steps(cfg.outlier_window) - 1 in range(cfg.steps)
    assert kept > 20

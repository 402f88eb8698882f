""" config.py and the files in configs/: what is accepted, and that every mistake is told in one line. """
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest
import torch

import config
from config import Config, ConfigError, parse
from model import GPT
from shipped import shipped

ROOT = Path(config.__file__).parent
FILES = shipped("configs/*.py")
RECIPE_FILES = [p for p in FILES if "recipe" in config.read_file(str(p))]
SIZE_FILES = [p for p in FILES if "n_layer" in config.read_file(str(p))]


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
    """ Catches flags that are applied where they stand, so that a file after them undoes them. """
    a, b = file("lr = 1e-3\nsteps = 7\nn_layer = 2\n", "a.py"), file("lr = 2e-3\nsteps = 8\n", "b.py")
    cfg = parse(["--lr=3e-3", a, b])
    assert (cfg.lr, cfg.steps, cfg.n_layer) == (3e-3, 8, 2)
    assert parse([b, a]).steps == 7


def test_expressions_in_a_file(file):
    """ Catches operators that are mixed up, precedence that is lost, and names that do not carry down. """
    cfg = parse([file('"""A docstring."""\nsteps = 2**5 * 10   # 320\n\nwarmup = 16 / steps\n'
                      "eval_every = -(-steps // 3) + 1\nlr = +1e-3 - 5e-4\ncompile = False\nname = 'a=b'\n")])
    assert (cfg.steps, cfg.warmup, cfg.eval_every, cfg.lr) == (320, 0.05, 108, 5e-4)
    assert cfg.compile is False and cfg.name == "a=b"


@pytest.mark.parametrize("flag, name, value", [
    ("--lr=1", "lr", 1.0),                      # nanoGPT refuses an int where a float is the default
    ("--lr=3e-4", "lr", 3e-4),
    ("--steps=1e3", "steps", 1000),
    ("--eval_tokens=4_096", "eval_tokens", 4096),
    ("--out=a=b", "out", "a=b"),                # nanoGPT splits at every =
    ("--data=1", "data", "1"),                  # text stays text, also where it looks like a number
    ("--data=", "data", ""),
    ("--dry_run", "dry_run", True),
    ("--compile=true", "compile", True), ("--compile=False", "compile", False),
    ("--compile=1", "compile", True), ("--compile=0", "compile", False),
    ("--compile=Yes", "compile", True), ("--compile=no", "compile", False),
    ("--quantizers=", "quantizers", ""), ("--quantizers=5", "quantizers", "5"),
    ("--micro_batch=4", "micro_batch", 4), ("--vocab_size=0", "vocab_size", 0),
])
def test_flags(flag, name, value):
    """ Catches a type that is not the knob's: 1 kept as an int, "False" taken as true, text cut at =. """
    got = getattr(parse([flag]), name)
    assert got == value and type(got) is type(value)


def test_an_int_in_a_file_becomes_a_float(file):
    """ Catches a config.json that says 1 in one run and 1.0 in another, so that they seem to differ. """
    assert type(parse([file("clip = 1\n")]).clip) is float


def test_name_comes_from_files_and_seed(file):
    """ Catches runs of two recipes, sizes or seeds that would share a folder. """
    a, b = file("lr = 1e-3\n", "full.py"), file("steps = 9\n", "small.py")
    assert parse([a, b, "--seed=3"]).name == "full-small-s3"
    assert parse([]).name == "bf16-s1"
    assert parse(["--recipe=tetrajet_base"]).name == "tetrajet_base-s1"
    assert parse([a, "--name=mine", "--seed=3"]).name == "mine"


def test_round_trip_through_json():
    """ Catches a value that JSON changes, and a saved config with a knob that this version does not know. """
    cfg = parse(["--lr=1e-5", "--compile=no", "--seed=4"])
    saved = json.loads(json.dumps(cfg.to_dict()))
    assert Config.from_dict(saved) == cfg
    with pytest.raises(ConfigError, match="warmpu.*warmup"):
        Config.from_dict(saved | {"warmpu": 0.1})
    with pytest.raises(ConfigError, match="steps"):
        Config.from_dict(saved | {"steps": "300"})


def test_the_config_is_frozen():
    """ Catches code that changes a knob under way, after which config.json no longer says what ran. """
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().steps = 5


def test_in_steps():
    """ Catches truncation in place of rounding (0.29 * 100 is 28.999...), and a length of nothing. """
    cfg = Config(steps=100)
    assert [cfg.in_steps(f) for f in (0.29, 0.006, 0.0, 1.0)] == [29, 1, 1, 100]


def test_help_has_every_knob_once(capsys):
    """ Catches a knob without a comment, which the pattern that makes the help would skip in silence. """
    with pytest.raises(SystemExit) as end:
        config.load(["configs/nowhere.py", "-h"])
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    for f in dataclasses.fields(Config):
        line, = [line for line in lines if line.startswith(f"  --{f.name}=")]
        assert len(line.split(maxsplit=1)[1]) > 5 and len(line) <= 110, line


# -----------------------------------------------------------------------------
# mistakes

MISTAKES_ON_THE_LINE = [
    ("--learning_rte=1e-3", "no knob is called 'learning_rte'"),
    ("--n_layers=3", "did you mean n_layer?"),
    ("--dry-run", "did you mean dry_run?"),
    ("--", "no knob is called ''"),
    ("--n_layer=abc", "n_layer wants a whole number, not 'abc'"),
    ("--n_layer=1.5", "n_layer wants a whole number, not 1.5"),
    ("--n_layer=True", "n_layer wants a whole number, not 'True'"),
    ("--lr=fast", "lr wants a number, not 'fast'"),
    ("--lr=", "lr wants a number, not ''"),
    ("--compile=maybe", "compile wants true or false, not 'maybe'"),
    ("--lr", "--lr has no value: type --lr=VALUE"),
    ("-lr=1", "flags are written --KNOB=VALUE"),
    ("lr=1", "cannot read 'lr=1'"),
    ("configs/nowhere.py", "type configs/NAME.py, or --KNOB=VALUE"),
    ("configs/tetrajet_ful.py", "; did you mean configs/tetrajet_full.py?"),
    ("configs", "cannot read 'configs'"),
    ("--lr=nan", "lr = nan: type a finite number"),
    ("--lr=inf", "lr = inf: type a finite number"),
    ("--steps=inf", "steps wants a whole number, not inf"),
    ("--lr=-1", "lr = -1.0: type a finite number that is not negative"),
    ("--eval_every=-1", "eval_every = -1: type a finite number that is not negative"),
    ("--lr=0", "lr = 0.0: type a number above 0"),
    ("--steps=0", "steps = 0: type a number above 0"),
    ("--n_layer=0", "n_layer = 0: type a number above 0"),
    ("--warmup=1.5", "warmup = 1.5: type a fraction, from 0 to 1"),
    ("--outlier_frac=10", "outlier_frac = 10.0: type a fraction, from 0 to 1"),
    ("--warmup=1", "type a smaller warmup"),
    ("--osci=none", "osci = 'none': type one of off, watch, full, topk"),
    ("--schedule=cos", "type one of cosine, linear"),
    ("--backend=fp4", "type one of auto, reference"),
    ("--device=gpu", "type one of auto, cpu, cuda, mps"),
    ("--seed=2147483648", "seed = 2147483648: type a number up to 2_147_483_647"),
    ("--beta2=1", "type numbers below 1"),
    ("--d_model=1e10", "d_model = 10000000000: type a number up to 1_048_576"),
    ("--d_model=1e300", "type a number up to 1_048_576"),
    ("--d_ff=1e9", "type a number up to"), ("--seq_len=1e9", "type a number up to"),
    ("--vocab_size=1e9", "type a number up to"), ("--n_layer=10_001", "type a number up to 10_000"),
    ("--steps=2e9", "type a number up to"), ("--batch_tokens=1e13", "type a number up to"),
    ("--eval_tokens=1e13", "type a number up to"), ("--lr=1e300", "lr = 1e+300: type a number up to 10_000"),
    ("--init_std=11", "type a number up to 10"), ("--z_loss=1e300", "type a number up to 1_000"),
    ("--rope_theta=1e16", "type a number up to 1_000_000_000_000_000"),
    ("--decay_end=0", "decay_end = 0.0: type a number above 0"),    # no smaller warmup would help
    ("--out=", "type a folder"),
    ("--out=a\0b", "type printable text"), ("--name=a\0b", "type printable text"),
    ("--name=h9\udcff", "type printable text"), ("--data=h9\udcff", "type printable text"),
    ("--name=" + 101 * "é", "at most 200 bytes"),
    ("--name=..", "type the name of one folder"),
    ("--name=a/b", "type the name of one folder"),
    ("--quantizers=1,7", "type some of 1,2,3,4,5,6"),
    ("--quantizers=1, 2", "without spaces"),
    ("--quantizers=1,1", "each once"),
    ("--d_model=7", "type an even number"),
    ("--n_head=3", "type --n_head=2"),
    ("--n_head=128", "type --n_head=64"),      # 128 heads of width 1: rotary positions turn pairs
    ("--batch_tokens=2000", "type --batch_tokens=2048"),
    ("--batch_tokens=100", "type --batch_tokens=128"),
    ("--micro_batch=6", "type --micro_batch=2"),
    ("--eval_tokens=100", "type --eval_tokens=128"),
]


@pytest.mark.parametrize("command", ["recipes.py", "train.py --dry_run", "bench.py model"])
def test_output_that_nobody_can_take(command, tmp_path):
    """ Catches: tracebacks for `| head -1`, a full disk, and a terminal that knows ASCII alone. """
    def run(out, **env):
        return subprocess.run([sys.executable, *command.split()], cwd=ROOT, text=True, stdout=out,
                              stderr=subprocess.PIPE, env=os.environ | {"PYTHONUNBUFFERED": "1"} | env)
    reader, writer = os.pipe()
    os.close(reader)
    left = run(writer)
    os.close(writer)
    assert left.stderr == "" and left.returncode in (0, 141), left
    assert run(subprocess.DEVNULL, PYTHONIOENCODING="ascii").returncode == 0
    if Path("/dev/full").exists():
        with open("/dev/full", "w") as full:
            done = run(full)
        assert done.stderr.count("\n") <= 1 and "Traceback" not in done.stderr, done


@pytest.mark.parametrize("arg, told", MISTAKES_ON_THE_LINE)
def test_mistake_on_the_command_line(arg, told, monkeypatch):
    """ Mistakes that somebody makes: catches a check that is dropped and a message without a cure. """
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError) as error:
        parse([arg])
    assert told in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("flags, told", [
    (["--lr=1", "--lr=1"], "--lr is given twice"),
    (["--dry_run", "--dry_run=no"], "--dry_run is given twice"),
    # the window has 30 of 600 steps, as has the period
    (["--osci=full", "--osci_period=0.05"], "osci_window (30 steps) fills osci_period (30 steps): type"),
    (["--osci_track=0"], "osci_track = 0.0: type a number above 0"),
    (["--outlier_frac=0.1", "--outlier_start=0.99"], "outlier_start + outlier_window (594 + 18 steps)"),
    # 0.99 of 20 steps is 20 when rounded
    (["--outlier_frac=0.1", "--outlier_start=0.99", "--outlier_window=.01", "--steps=20"], "(20 + 1 steps)"),
    (["--osci=full", "--osci_start=0.97"], "osci_start + osci_window (582 + 30 steps) must be less"),
    (["--osci=full", "--osci_start=0.95"], "osci_start + osci_window (570 + 30 steps) must be less"),
    (["--osci=dampen", "--osci_start=0.95"], "osci_start + osci_window (570 + 30 steps) must be less"),
    (["--osci=qema", "--osci_window=0.005", f"--osci_start={589 / 600}"], "a warm-up of 10 (589 + 10 steps)"),
    (["--osci=qema", "--osci_decay=1"], "osci_decay = 1 keeps the first weights"),
    (["--outlier_log=0.1"], "outlier_frac = 0: type --outlier_log=0, or"),
    (["--outlier_frac=0.1", "--outlier_log=0.02"], "(18 steps) is longer than outlier_log (12 steps)"),
    (["--outlier_frac=0.1", "--outlier_log=0.97"],
     "outlier_log + outlier_window (6 + 582 + 18 steps) exceed steps = 600: type --outlier_log=0"),
])
def test_flags_that_contradict_each_other(flags, told):
    """ Catches runs that would start and then never do what they were asked for. """
    with pytest.raises(ConfigError) as error:
        parse(flags)
    assert told in str(error.value)


def test_a_window_that_just_fits():
    """ Catches a check that is off by one: step 599, the last of 600, may choose channels and may reset. """
    parse(["--outlier_frac=0.1", "--outlier_start=0.97"])       # measures in steps 582 to 599
    parse(["--osci=full", f"--osci_start={569 / 600}"])         # resets after step 569 + 30
    parse(["--osci=qema", "--osci_window=0.005", f"--osci_start={588 / 600}"])       # is in force in step 599
    parse(["--outlier_frac=0.1", "--outlier_log=0.96"])         # measures anew in steps 582 to 599


@pytest.mark.parametrize("flags", [
    ["--n_head=3"], ["--batch_tokens=2000"], ["--micro_batch=6"], ["--eval_tokens=100"],
    ["--osci=full", "--osci_window=1", "--osci_period=1"], ["--osci=full", "--steps=2"],
    ["--osci=qema", "--steps=20"], ["--osci=qema", "--steps=2", "--osci_start=1"],
    ["--outlier_frac=0.1", "--outlier_log=1"], ["--outlier_frac=0.1", "--outlier_log=0.01", "--steps=2"],
    [f"{ROOT}/configs/tetrajet_full.py", "--steps=3"], [f"{ROOT}/configs/tetrajet_full.py", "--steps=1"],
])
def test_the_cure_cures(flags):
    """ Catches advice that leads to the next error: what stands after `type` is typed, and accepted. """
    with pytest.raises(ConfigError) as error:
        parse(flags)
    cure = str(error.value).split(": type ")[1].split()
    names = [flag.split("=")[0] for flag in cure]
    parse([flag for flag in flags if flag.split("=")[0] not in names] + cure)


@pytest.mark.parametrize("steps", [1, 2, 3, 14, 15, 20, 600])
def test_what_is_on_acts_and_the_cure_cures(steps):
    """ Catches a run that is accepted and never resets or chooses channels, and advice that cannot help. """
    refused = 0
    for start, window, period in product((0, 0.01, 0.6, 0.97, 1), (0, 0.05, 0.5, 1), (0, 0.05, 0.1, 1)):
        cfg = Config(steps=steps, osci="full", osci_start=start, osci_window=window, osci_period=period,
                     outlier_frac=0.1, outlier_start=start, outlier_window=window)
        try:
            config.check(cfg)
        except ConfigError as error:
            cure = dict(re.findall(r"--(\w+)=(\S+)", str(error)))
            assert cure
            cure = {knob: config.read_flag(knob, value) for knob, value in cure.items()}
            cfg = config.check(dataclasses.replace(cfg, **cure))
            refused += 1
        start, window, period = (cfg.in_steps(x) for x in (cfg.osci_start, cfg.osci_window, cfg.osci_period))
        assert any((step - start) % period == window for step in range(start, cfg.steps))
        assert cfg.in_steps(cfg.outlier_start) + cfg.in_steps(cfg.outlier_window) - 1 in range(cfg.steps)
    assert refused > 20


@pytest.mark.parametrize("start", ["--lr=", "--name=", "--quantizers=", "--osci=", "--", "-", ""])
def test_long_values_are_shortened(start):
    """ Catches a message that fills the screen with what was typed. """
    with pytest.raises(ConfigError) as error:
        parse([start + 5000 * "x"])
    assert len(str(error.value)) < 200


def test_a_long_name_in_a_file_is_shortened(file):
    """ Catches the placeholder alone, which is all that textwrap.shorten leaves of one long word. """
    with pytest.raises(ConfigError, match="not xxx.* \\.\\.\\.$") as error:
        parse([path := file(f"lr = {5000 * 'x'}\n")])
    assert len(str(error.value)) < len(path) + 200


def test_a_name_that_comes_from_a_file_is_checked(file):
    """ Catches a check that only sees what was typed, so that mkdir fails later. """
    with pytest.raises(ConfigError, match="at most 200 bytes"):
        parse([file("", 240 * "x" + ".py")])


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero, a file without an end")
def test_a_file_without_an_end():
    """ Catches: a shard that is typed for a config file and read as a whole, until memory ends. """
    with pytest.raises(ConfigError, match="/dev/zero:1: longer than a megabyte"):
        parse(["/dev/zero"])


@pytest.mark.parametrize("content", [b"\x7fELF\0", "lr = 1\n".encode("utf-16"), b"# coding: bogus\nlr = 1\n"])
def test_a_file_that_is_no_text(tmp_path, content):
    """ Catches the parser's own words, with line None or 0. """
    (tmp_path / "mine.py").write_bytes(content)
    with pytest.raises(ConfigError, match="mine.py: not a text file of Python assignments$"):
        parse([str(tmp_path / "mine.py")])


def test_windows_do_not_matter_while_resets_are_off():
    """ Catches a check that refuses a short bf16 run, in which both lengths round to one step. """
    parse(["--steps=3"])


@pytest.mark.parametrize("text, told", [
    ("lr = 1e-3\nlearning_rte = 1e-3\n", ":2: no knob is called 'learning_rte'"),
    ("warm_up = 0.1\n", ":1: no knob is called 'warm_up'; did you mean warmup?"),
    ("tokens = 5\nsteps = tokens\n", ":1: no knob is called 'tokens'"),
    ("steps = 5\nsteps = 6\n", ":2: steps is assigned twice"),
    ("steps = 'many'\n", ":1: steps wants a whole number, not 'many'"),
    ("steps = True\n", ":1: steps wants a whole number, not True"),
    ("compile = 1\n", ":1: compile wants true or false, not 1"),
    ("recipe = 4\n", ":1: recipe wants text"),
    ("data = None\n", ":1: a value is"),
    ("quantizers = [1, 2]\n", ":1: a value is"),
    ("warmup = 10 / steps\nsteps = 100\n", ":1: a value is"),
    ("lr = (-2)**0.5\n", ":1: a value is"),                      # complex
    ("lr = 1j\n", ":1: a value is"),
    ("data = f'{lr}'\n", ":1: a value is"),
    ("lr = max(1, 2)\n", ":1: a value is"),
    ("data = __import__('os').getcwd()\n", ":1: a value is"),
    ("lr = 1 if 1 else 2\n", ":1: a value is"),
    ("steps = 7 % 4\n", ":1: a value is"),
    ("steps = not 0\n", ":1: a value is"),
    ("data = 'a' * 3\n", ":1: arithmetic is for numbers"),
    ("steps = True + 1\n", ":1: arithmetic is for numbers"),
    ("lr = 1 / 0\n", ":1: division by zero"),
    ("lr = 1e400\n", ":1: numbers end at"),
    ("import os\n", ":1: a config file holds lines"),
    ("lr = 1\nprint(lr)\n", ":2: a config file holds lines"),
    ("if True:\n    lr = 1\n", ":1: a config file holds lines"),
    ("def f():\n    return 1\n", ":1: a config file holds lines"),
    ("a = b = 1\n", ":1: a config file holds lines"),
    ("lr: float = 1\n", ":1: a config file holds lines"),
    ("lr += 1\n", ":1: a config file holds lines"),
    ("lr, steps = 1, 2\n", ":1: a config file holds lines"),
    ("lr = 1\nsteps = = 2\n", ":2: invalid syntax"),
    ("steps = " + "9" * 5000 + "\n", ":1:"),
    ("steps = " + "(" * 500 + "1" + ")" * 500 + "\n", ":1:"),
    ("steps = " + "1+" * 5000 + "1\n", ":1:"),
    ("steps = 5\n\x00", ": "),
])
def test_mistake_in_a_file(file, text, told):
    """ Catches code that is executed, a crash other than ConfigError, and messages without file and line. """
    path = file(text)
    with pytest.raises(ConfigError) as error:
        parse([path])
    assert str(error.value).startswith(path) and told in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("expression", ["2**10**10", "9**9**9", "10**15**15", "2**-10**10", "(2**64)**64",
                                        "1e15**64", "10**15 * 10**15"])
def test_huge_powers_are_refused_at_once(file, expression):
    """ Catches an evaluator that computes first and looks afterwards: 9**9**9 has 370 million digits. """
    start = time.perf_counter()
    with pytest.raises(ConfigError, match="exponents end|numbers end|out of range"):
        parse([file(f"steps = {expression}\n")])
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize("arg", ["--steps=abc", "--a\nb=1", "-a\nb", "nowhere\n.py", "--lr=nan", "", "mine"])
def test_a_script_ends_with_code_2_and_one_line(tmp_path, arg):
    """ Catches a traceback, a message on stdout, and an exit code that a shell script takes for success. """
    (tmp_path / "mine").write_text("import os\n")
    code = "import config, sys; config.load(sys.argv[1:]); print('started')"
    done = subprocess.run([sys.executable, "-c", code, arg], capture_output=True, text=True, cwd=tmp_path,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 2 and done.stdout == "", done
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and done.stderr.endswith("\n")


def test_config_needs_nothing_but_python():
    """ Catches an import that makes `--help` wait for torch, or ties config.py to the rest. """
    code = "import config, sys; print('torch' in sys.modules or 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "False\n", done


# -----------------------------------------------------------------------------
# the files in configs/


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_config_file_opens_with_its_command(path):
    """ Catches a file that is renamed or copied and still shows the command of another. """
    lines = path.read_text().splitlines()
    assert lines[0].startswith(f"# configs/{path.name} ")
    assert any("train.py " in line and f" configs/{path.name} --" in line for line in lines[:8])
    parse([str(path)])


@pytest.mark.parametrize("recipe, size", list(product(RECIPE_FILES, SIZE_FILES)), ids=lambda p: p.stem)
def test_recipes_and_sizes_combine(recipe, size):
    """ Catches a knob that both set, so that the order of the two files would matter. """
    a, b = str(recipe), str(size)
    assert parse([a, b]).to_dict() | {"name": ""} == parse([b, a]).to_dict() | {"name": ""}
    assert set(config.read_file(a)).isdisjoint(config.read_file(b))


def test_every_file_is_a_recipe_or_a_size():
    assert {p.stem for p in RECIPE_FILES} >= {"bf16", "tetrajet_base", "tetrajet_full", "tetrajet_released"}
    assert {p.stem for p in SIZE_FILES} >= {"olmo2_70m", "olmo2_150m", "olmo2_370m", "olmo2_1b"}
    assert set(FILES) == set(RECIPE_FILES) | set(SIZE_FILES)


def test_recipe_files_name_entries_of_the_table():
    """ Catches a recipe that is renamed in recipes.py and not here. """
    recipes = pytest.importorskip("recipes").RECIPES
    for path in RECIPE_FILES:
        assert config.read_file(str(path))["recipe"] in recipes, path


def test_the_comment_names_recipes():
    """ Catches an entry of the table that --help does not name. """
    names = re.search(r"--recipe=.* recipes.py: (.*), \.\.\.", config.help_text())[1].split(", ")
    assert len(names) > 2 and set(names) <= set(pytest.importorskip("recipes").RECIPES)


# arXiv 2510.27527 by its released configs: width, layers, heads, inner width, peak rate, warm-up, steps,
# tokens to the end of the cosine, first step of resets, their period, millions of weights in block linears
PAPER = {
    "olmo2_70m": (512, 8, 8, 1024, 4e-4, 238, 12_505, 50e9, 8_000, 200, 21.0),
    "olmo2_150m": (768, 12, 12, 1536, 3e-4, 2_000, 25_500, 100e9, 15_000, 200, 70.8),
    "olmo2_370m": (1024, 16, 16, 4096, 3e-4, 2_000, 50_500, 200e9, 35_000, 400, 268),
}


@pytest.mark.parametrize("stem", PAPER)
def test_sizes_are_the_papers(stem):
    """ Catches a digit that slips, and a fraction that does not come back as the paper's number of steps. """
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

"""
Every knob of a run, and the few functions that set them.

    python train.py configs/tetrajet_full.py configs/olmo2_70m.py --seed=2 --lr=3e-4

Any number of config files is read from left to right, and a later file wins over an earlier one. A flag wins
over every file, wherever it stands on the line. The dataclass below is the documentation: one line per knob,
with its unit and default; `--help` prints the same lines. The defaults are the `nano` size, which trains on
a laptop's CPU in minutes and downloads nothing.

A config file is a list of Python assignments to these names, with comments and perhaps a docstring:

    steps = 12_505
    osci_start = 8_000 / steps        # names assigned further up in the same file may be used

It is parsed, never executed, so it can neither do harm nor invent a name that nobody reads: a misspelt name
is an error that tells the nearest real one. There is no None and no list, and no knob comes from
the environment: the resolved Config, saved as config.json, says everything about a run.
"""
import argparse
import ast
import difflib
import importlib
import inspect
import math
import operator
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path


# Lengths of phases are fractions of training, so that a config survives a change of `steps`; sizes of batches
# are in tokens, so that it survives a change of `seq_len`. An interval of 0 means never.
@dataclass(frozen=True)
class Config:
    # run
    out: str = "out"                    # folder that holds the folders of all runs
    name: str = ""                      # this run's folder under out; "" = config files and seed, bf16-s1
    seed: int = 1                       # decides the first weights, the order of the data, the rounding noise
    device: str = "auto"                # auto | cpu | cuda | mps; auto = cuda where there is one, else cpu
    backend: str = "auto"               # auto | reference | emulate | packed | native: who rounds, and how
    parallel: str = "ddp"               # ddp | fsdp: how torchrun's ranks share the model; fsdp cuts it up
    compile: bool = True                # torch.compile blocks and loss on CUDA; has no effect elsewhere
    recompute: bool = False             # compute blocks again in the backward pass: less memory, more time
    overwrite: bool = False             # delete a finished or unfinished run of the same name and start anew
    stop_at: int = 0                    # stop after this step, saved, as a job that is killed would; 0 = off
    dry_run: bool = False               # print the resolved config and the table of layers, then stop

    # data
    data: str = ""                      # folder of token shards; "" = the text of this Python installation
    shuffle: int = 4096                 # sequences in a shuffle window; 0 = read them in order

    # model
    n_layer: int = 2                    # blocks
    d_model: int = 128                  # width of the residual stream
    n_head: int = 4                     # attention heads, each d_model / n_head wide
    d_ff: int = 256                     # inner width of the SwiGLU
    seq_len: int = 128                  # tokens in a training sequence
    vocab_size: int = 0                 # rows of the embedding; 0 = the data's, up to a multiple of 128
    rope_theta: float = 500_000.0       # base of the rotary frequencies
    norm_eps: float = 1e-6              # added to the mean square in every RMSNorm
    init_std: float = 0.02              # of the initial weights, a normal that is cut at 3 std
    init_from: str = ""                 # start from the OLMo-2 in this folder (Hugging Face); "" = random

    # training
    steps: int = 600                    # optimizer steps
    batch_tokens: int = 1024            # tokens in an optimizer step, over all ranks and micro-steps
    micro_batch: int = 0                # sequences in a micro-step on one rank; 0 = the rank's whole batch
    lr: float = 4e-3                    # peak learning rate
    warmup: float = 0.05                # fraction of training over which the rate rises to its peak
    schedule: str = "cosine"            # cosine | linear: how it falls from there
    decay_end: float = 1.0              # fraction of training at which it has reached its floor
    lr_final: float = 0.1               # the floor, as a fraction of the peak
    weight_decay: float = 0.1           # decoupled (AdamW), on all but the token embedding
    beta1: float = 0.9                  # Adam's decay of the mean of gradients
    beta2: float = 0.95                 # Adam's decay of the mean of squared gradients
    adam_eps: float = 1e-8              # Adam's eps
    clip: float = 1.0                   # largest norm of the whole gradient; 0 = off
    z_loss: float = 1e-5                # weight of the mean of log(sum(exp(logits)))^2 in the loss; 0 = off

    # precision
    recipe: str = "bf16"                # a name in recipes.py: bf16, tetrajet_base, nvidia, ...
    quantizers: str = "1,2,3,4,5,6"     # which of the recipe's quantizers Q1 to Q6 are on; "" = none
    keep: str = ""                      # in bf16: some of attn.qkv,attn.out,mlp.up,mlp.down; "" = none
    keep_last: float = 0.0              # share of the blocks, the last ones, whose linears are in bf16
    bf16_forward: float = 0.0           # fraction of training after which only backward rounds; 0 = never

    # changes to the recipe: "" or 0 = as the recipe says
    rotate: str = ""                    # products to rotate: none, or some of y,dx,dw
    rotate_size: int = 0                # values that a rotation mixes, a power of two
    block_w: str = ""                   # block of W and its transpose, such as 16x16 or 1x16
    block_x: str = ""                   # block of X and its transpose
    scale_rule: str = ""                # nearest | up | 17/16: scales of the four backward operands
    backward: str = ""                  # rtn | sr: rounding of the four backward operands
    outer: str = ""                     # 128 | tensor: values that share an outer scale
    align: str = ""                     # true | false: round Q2(W) and Q1(X) in backward, not W and X
    outlier_format: str = ""            # mxfp8 | bf16: format of the outlier channels

    # outlier channels and oscillation
    outlier_frac: float = 0.0           # share of each layer's input channels kept in MXFP8; 0 = off
    outlier_choice: str = "norm"        # norm | random: those of the largest norms, or, as a control, any
    outlier_start: float = 0.01         # fraction of training at which the choice of channels begins
    outlier_window: float = 0.03        # fraction of training over which channels are measured
    outlier_log: float = 0.0            # fraction of training from one new measurement to the next; 0 = none
    osci: str = "off"                   # off|watch|full|topk|edge|random|nearest|qema|freeze|dampen
    osci_start: float = 0.6             # fraction of training after which oscillating weights are dealt with
    osci_period: float = 0.1            # fraction of training from one reset to the next
    osci_window: float = 0.05           # fraction of training, in each period, over which they are tracked
    osci_tau: float = 8.0               # reset a weight that moved tau times as far after rounding as before
    osci_track: float = 0.05            # share of each layer's weights that osci=topk tracks
    osci_decay: float = 0.9983          # osci=qema: decay per step of the average that decides the rounding
    osci_threshold: float = 0.01        # osci=freeze: turns per step, on average, that freeze at the end
    osci_strength: float = 0.1          # osci=dampen: weight of its penalty in the loss at the end

    # log
    log_every: int = 20                 # steps from one row of metrics.csv to the next
    eval_every: int = 150               # steps from one validation loss to the next
    eval_tokens: int = 16384            # validation tokens, the same ones every time
    save_every: int = 150               # steps from one checkpoint to the next
    sample_tokens: int = 200            # tokens of text sampled at the end; 0 = off
    wandb: bool = False                 # send the rows of metrics.csv to Weights & Biases too

    def in_steps(self, fraction: float) -> int:
        """ A fraction of training as a number of steps, at least 1. """
        return max(1, round(fraction * self.steps))

    def to_dict(self) -> dict:
        """ For config.json and checkpoints. """
        return asdict(self)

    @staticmethod
    def from_dict(values: dict) -> "Config":
        """ The inverse of to_dict. Knobs that are not in `values` take their defaults. """
        return check(Config(**{name: fit(name, value) for name, value in values.items()}))


KINDS = {f.name: f.type for f in fields(Config)}
# knobs that may differ when a run is continued: they change what is written, where it runs or which noise
# is drawn, not what is computed in the mean
FREE = ("device", "backend", "parallel", "compile", "recompute", "overwrite", "stop_at", "dry_run", "out",
        "name", "micro_batch", "log_every", "eval_every", "save_every", "sample_tokens", "wandb")
WANTED = {bool: "true or false", int: "a whole number", float: "a number", str: 'text, such as "auto"'}


class ConfigError(ValueError):
    """ A mistake of the user's, told in one line that says what to type instead. """


def short(text: str) -> str:
    """ The start of a text that may be long, on one line. """
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:56] + " ..."


def package(name: str):
    """ An optional package; ConfigError, with what to type, where it is not installed. """
    top = name.split(".")[0]
    problem, cure = "is not installed", f"pip install {top}"
    try:
        module = importlib.import_module(name)
        # a folder of that name in the current one, such as wandb leaves its files in, can be imported too
        if module.__file__:
            return module
    except ModuleNotFoundError:
        pass
    except Exception as error:      # anything, of a package whose parts do not fit each other
        problem, cure = f"cannot be imported ({type(error).__name__})", f"pip install -U {top}"
    raise ConfigError(f"this needs the package {top}, which {problem}: type {cure}")


def fit(name: str, value):
    """ The value in the type of the knob `name`. 1 is a good float and 1e3 a good int; True is no number. """
    if name not in KINDS:
        near = difflib.get_close_matches(name, KINDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "--help lists them all"
        raise ConfigError(f"no knob is called {short(repr(name))}; {hint}")
    kind = KINDS[name]
    if kind is float and type(value) is int and abs(value) <= LARGEST:
        return float(value)
    if kind is int and type(value) is float and value.is_integer():
        return int(value)
    if type(value) is not kind:
        raise ConfigError(f"{name} wants {WANTED[kind]}, not {short(repr(value))}")
    return value


# -----------------------------------------------------------------------------
# config files

ARITHMETIC = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow, ast.UAdd: operator.pos, ast.USub: operator.neg,
}

# No knob needs more than these, and they bound the work: 9**9**9 would run until memory ends.
LARGEST, LARGEST_EXPONENT = 10**15, 64


def evaluate(node: ast.expr, earlier: dict):
    """ The value of one expression of a config file: literals, earlier names, and arithmetic on numbers. """
    if isinstance(node, ast.Constant):
        value = node.value
    elif isinstance(node, ast.Name) and node.id in earlier:
        value = earlier[node.id]
    elif isinstance(node, (ast.BinOp, ast.UnaryOp)) and type(node.op) in ARITHMETIC:
        parts = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.operand]
        parts = [evaluate(part, earlier) for part in parts]
        if not all(type(part) in (int, float) for part in parts):
            raise ConfigError(f"arithmetic is for numbers: {shown(node)}")
        if isinstance(node.op, ast.Pow) and abs(parts[1]) > LARGEST_EXPONENT:
            raise ConfigError(f"exponents end at {LARGEST_EXPONENT}: {shown(node)}")
        value = ARITHMETIC[type(node.op)](*parts)
    else:
        value = None    # a call, an attribute, a list, a name that is not assigned above
    if type(value) not in WANTED:
        raise ConfigError(f"a value is text, True, False or arithmetic with earlier names, not {shown(node)}")
    if type(value) in (int, float) and abs(value) > LARGEST:
        raise ConfigError(f"numbers end at {LARGEST:.0e}: {shown(node)}")
    return value


def shown(node: ast.AST) -> str:
    """ A piece of source on one line. """
    return short(ast.unparse(node))


FILE_LIMIT = 1 << 20    # bytes: a longer file is something else, such as a shard, perhaps larger than memory


def typed(path: str | Path) -> bytes:
    """ The bytes of a file that somebody wrote by hand. ConfigError, without the path, if it is too long. """
    with open(path, "rb") as file:
        content = file.read(FILE_LIMIT + 1)
    if len(content) > FILE_LIMIT:
        raise ConfigError("longer than a megabyte, so this is another kind of file")
    return content


def read_file(path: str) -> dict:
    """ The assignments of one config file. """
    values, line = {}, 1
    try:
        text = typed(path)
        if b"\0" in text:       # of which some versions of Python say SyntaxError, and others ValueError
            raise SyntaxError
        for node in ast.parse(text).body:
            line = node.lineno
            match node:
                case ast.Expr(value=ast.Constant(value=str())):
                    continue    # a docstring
                case ast.Assign(targets=[ast.Name(id=name)]):
                    pass
                case _:
                    raise ConfigError(f"a config file holds lines `name = value`, not {shown(node)}")
            if name in values:
                raise ConfigError(f"{name} is assigned twice in this file; keep one of the two")
            values[name] = fit(name, evaluate(node.value, values))
    except OSError as error:
        ours = {file.stem: file for file in Path(__file__).with_name("configs").glob("*.py")}
        near = difflib.get_close_matches(Path(path).stem, ours, n=1)
        if near and ours[near[0]].is_relative_to(Path.cwd()):       # as somebody there would type it
            ours[near[0]] = ours[near[0]].relative_to(Path.cwd())
        hint = f"did you mean {ours[near[0]]}?" if near else "type configs/NAME.py, or --KNOB=VALUE"
        raise ConfigError(f"cannot read {short(repr(path))}: {error.strerror}; {hint}")
    except SyntaxError as error:
        if not error.lineno:    # an encoding that Python does not know, too
            raise ConfigError(f"{path}: not a text file of Python assignments")
        raise ConfigError(f"{path}:{error.lineno}: {error.msg}")
    except (ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{path}:{line}: {(error.args or ['too large'])[-1]}")
    return values


# -----------------------------------------------------------------------------
# the command line

SWITCH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def read_flag(name: str, text: str):
    """ What stands after the `=` of a flag, in the type of its knob. """
    value = text
    if KINDS.get(name) is bool:
        value = SWITCH.get(text.lower(), text)
    elif KINDS.get(name) in (int, float):
        try:
            value = float(text)     # fit() makes an int of it where one is wanted
        except ValueError:
            pass                    # fit() complains of text
    return fit(name, value)


def parse(argv: list[str]) -> Config:
    """ The Config that a command line asks for, or ConfigError. """
    files, stems, flags = {}, [], {}
    for arg in argv:
        if not arg.startswith("-"):
            files |= read_file(arg)
            stems.append(Path(arg).stem)
            continue
        name, equals, text = arg.removeprefix("--").partition("=")
        if not arg.startswith("--"):
            raise ConfigError(f"{short(arg)}: flags are written --KNOB=VALUE")
        if name in flags:
            raise ConfigError(f"--{name} is given twice; keep one of the two")
        if not equals and KINDS.get(name, bool) is not bool:
            raise ConfigError(f"--{name} has no value: type --{name}=VALUE")
        flags[name] = read_flag(name, text if equals else "true")
    cfg = Config(**files | flags)
    return check(cfg if cfg.name else replace(cfg, name="-".join(stems or [cfg.recipe]) + f"-s{cfg.seed}"))


def load(argv: list[str]) -> Config:
    """ parse() for a script: --help ends it with code 0, a mistake with one line on stderr and code 2. """
    if "-h" in argv or "--help" in argv:
        print(help_text())
        raise SystemExit(0)
    try:
        return parse(argv)
    except ConfigError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        raise SystemExit(2)


def no_other_launcher():
    """ ConfigError if mpirun, say, and not torchrun has started several processes: each would train all. """
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        size = os.environ.get(name) or "1"
        need(size == "1" or "TORCHELASTIC_RUN_ID" in os.environ,
             f"{name} is {short(size)}, but torchrun did not start this program: type torchrun "
             f"--nproc_per_node=GPUS train.py ..., or `unset {name}` to train alone")


def in_full(path: str | Path) -> Path:
    """ The path with a leading ~ or ~user in full. """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{path}: that home folder is not known; write the path in full") from None


def folder_name(text: str) -> Path:
    """ in_full() for an argument of argparse. """
    try:
        need(text != "", "it is empty; name a folder, or . for this one")
        return in_full(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class Output:
    """ A stream that takes no more once it has failed, so that no print ends a program half-way. """

    def __init__(self, stream):
        self.stream, self.failed = stream, None

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self._try(self.stream.write, text)
        return len(text)

    def flush(self):
        self._try(self.stream.flush)

    def _try(self, call: Callable, *args):
        if self.failed:
            return
        try:
            call(*args)
        except OSError as error:
            self.failed = error
            # Python flushes once more when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


def script(main: Callable[[], int | None]):
    """
    Run a program's main() and end with its exit code. What the terminal cannot show becomes a question mark.
    Where whoever read the output has left, as in `| head -1`, the rest is not printed; where it cannot be
    written, one line says so at the end, and the code is 2.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.reconfigure(errors="replace")
    out = sys.stdout = Output(sys.stdout) if sys.stdout else None
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    if out:
        out.flush()
        if out.failed and not isinstance(out.failed, BrokenPipeError):
            print(f"error: cannot print: {out.failed.strerror}", file=sys.stderr)
            code = code or 2
    raise SystemExit(code)


def help_text() -> str:
    """ The lines of the class Config, each knob as it is typed. """
    lines = ["usage: python train.py [configs/NAME.py ...] [--KNOB=VALUE ...]"]
    for line in inspect.getsource(Config).splitlines():
        if knob := re.match(r" {4}(\w+): \w+ = (.+?) +# (.+)", line):
            lines.append(f"  {'--' + knob[1] + '=' + knob[2]:<33} {knob[3]}")
        elif group := re.match(r" {4}# (.+)", line):
            lines.append(f"\n{group[1]}")
    return "\n".join(lines)


# -----------------------------------------------------------------------------
# values that have the right type but make no sense

CHOICES = {
    "device": ("auto", "cpu", "cuda", "mps"),
    "backend": ("auto", "reference", "emulate", "packed", "native"),
    "parallel": ("ddp", "fsdp"),
    "schedule": ("cosine", "linear"),
    "scale_rule": ("", "nearest", "up", "17/16"),
    "backward": ("", "rtn", "sr"),
    "outer": ("", "128", "tensor"),
    "align": ("", "true", "false"),
    "outlier_format": ("", "mxfp8", "bf16"),
    "outlier_choice": ("norm", "random"),
    "osci": ("off", "watch", "full", "topk", "edge", "random", "nearest", "qema", "freeze", "dampen"),
}
POSITIVE = """n_layer d_model n_head d_ff seq_len rope_theta norm_eps init_std steps batch_tokens lr decay_end
              adam_eps osci_tau osci_track osci_strength eval_tokens""".split()
FRACTIONS = """keep_last bf16_forward warmup decay_end lr_final outlier_frac outlier_start outlier_window
               outlier_log osci_start osci_period osci_window osci_track osci_decay osci_threshold""".split()
MOST = {    # a seed fits any counter; what is not listed ends at LARGEST
    "seed": 2**31 - 1, "n_layer": 10_000, "d_model": 2**20, "d_ff": 2**20, "seq_len": 2**20,
    "vocab_size": 2**20, "init_std": 10, "steps": 10**9, "batch_tokens": 2**40, "lr": 10_000, "z_loss": 1000,
    "eval_tokens": 2**40, "rotate_size": 1024, "sample_tokens": 2**16,
}
LEAST = {"rope_theta": 1, "norm_eps": 1e-30, "adam_eps": 1e-30}    # in float32, less is 0 and makes NaNs


def need(holds: bool, message: str):
    if not holds:
        raise ConfigError(message)


def check(cfg: Config) -> Config:
    """ The config itself, if a run could start from it. """
    for name, value in asdict(cfg).items():
        told, most = f"{name} = {short(repr(value))}", MOST.get(name, LARGEST)
        if KINDS[name] in (int, float):
            # put this way round so that nan fails: every comparison with it is false
            need(0 <= value < math.inf, f"{told}: type a finite number that is not negative")
            need(value > 0 or name not in POSITIVE, f"{told}: type a number above 0")
            need(value <= 1 or name not in FRACTIONS, f"{told}: type a fraction, from 0 to 1")
            need(value <= most, f"{told}: type a number up to {most:_}")
            need(value >= LEAST.get(name, 0), f"{told}: type a number from {LEAST.get(name, 0)} on")
        need(KINDS[name] is not str or value.isprintable(), f"{told}: type printable text")
        if name in CHOICES:
            need(value in CHOICES[name], f"{told}: type one of {', '.join(filter(None, CHOICES[name]))}")

    need(max(cfg.beta1, cfg.beta2) < 1, f"beta1 = {cfg.beta1}, beta2 = {cfg.beta2}: type numbers below 1")
    need(cfg.lr * cfg.weight_decay < 1,
         f"lr * weight_decay = {cfg.lr * cfg.weight_decay:.3g}, but a step can take at most all of a weight "
         "away: type a smaller weight_decay")
    need(cfg.recipe and not set(cfg.recipe) & set("/\\") and len(cfg.recipe.encode()) <= 100,
         f"recipe = {short(repr(cfg.recipe))}: type the name of one in recipes.py, such as tetrajet_full")
    need(cfg.out != "", "out is empty: type a folder, such as --out=out")
    need(all(len(part.encode()) <= 255 for part in in_full(cfg.out).parts),
         f"out = {short(repr(cfg.out))}: type folders whose names have at most 255 bytes")
    need(cfg.name not in (".", "..") and not set(cfg.name) & set("/\\") and len(cfg.name.encode()) <= 200,
         f"name = {short(repr(cfg.name))}: type the name of one folder, at most 200 bytes; its parent is out")
    chosen = cfg.quantizers.split(",") if cfg.quantizers else []
    need(len(set(chosen)) == len(chosen) and set(chosen) <= set("123456"),
         f"quantizers = {short(repr(cfg.quantizers))}: type some of 1,2,3,4,5,6, each once, without spaces")
    check_recipe(cfg)
    check_sizes(cfg)
    check_phases(cfg)
    return cfg


LINEARS = ("attn.qkv", "attn.out", "mlp.up", "mlp.down")


def check_recipe(cfg: Config):
    """ Changes to the recipe that make no sense with any recipe. """
    for name, known in (("keep", LINEARS), ("rotate", ("y", "dx", "dw"))):
        text = getattr(cfg, name)
        parts = text.split(",") if text and (name, text) != ("rotate", "none") else []
        need(len(set(parts)) == len(parts) and set(parts) <= set(known),
             f"{name} = {short(repr(text))}: type some of {','.join(known)}, each once, without spaces")
    need(cfg.rotate_size & (cfg.rotate_size - 1) == 0 and cfg.rotate_size != 1,
         f"rotate_size = {cfg.rotate_size}: type a power of two, such as --rotate_size=16")
    need(not cfg.rotate_size or cfg.rotate != "none",
         f"rotate_size = {cfg.rotate_size} goes with no rotation: type --rotate_size=0, or --rotate=dx,dw")
    for name in ("block_w", "block_x"):
        text = getattr(cfg, name)
        need(not text or re.fullmatch(r"[1-9]\d{0,2}x[1-9]\d{0,2}", text, re.ASCII),
             f"{name} = {short(repr(text))}: type rows x columns, such as --{name}=1x16")
    need(not cfg.keep_last or round(cfg.keep_last * cfg.n_layer),
         f"keep_last = {cfg.keep_last} is less than half a block of {cfg.n_layer}: "
         f"type --keep_last={1 / cfg.n_layer:.3g}")
    need(not cfg.bf16_forward or cfg.in_steps(cfg.bf16_forward) < cfg.steps,
         f"bf16_forward = {cfg.bf16_forward} leaves no step: type a smaller one, or --bf16_forward=0")
    need(not cfg.bf16_forward or cfg.osci == "off",
         f"bf16_forward = {cfg.bf16_forward} ends the rounding of weights that osci = {cfg.osci!r} is about: "
         "type --osci=off, or --bf16_forward=0")


def check_sizes(cfg: Config):
    """ What must divide what. """
    heads = [h for h in range(1, cfg.d_model // 2 + 1) if cfg.d_model % (2 * h) == 0]
    need(heads, f"d_model = {cfg.d_model}: type an even number")
    need(cfg.n_head in heads,
         f"n_head = {cfg.n_head} does not cut d_model = {cfg.d_model} into heads of one even width: "
         f"type --n_head={min(heads, key=lambda h: abs(h - cfg.n_head))}")
    sequences = max(1, round(cfg.batch_tokens / cfg.seq_len))
    need(cfg.batch_tokens == sequences * cfg.seq_len,
         f"batch_tokens = {cfg.batch_tokens} is no multiple of seq_len = {cfg.seq_len}: "
         f"type --batch_tokens={sequences * cfg.seq_len}")
    micro = cfg.micro_batch or sequences
    need(sequences % micro == 0,
         f"micro_batch = {micro} does not divide the batch of {sequences} sequences: "
         f"type --micro_batch={math.gcd(micro, sequences)}")
    need(cfg.eval_tokens >= cfg.seq_len,
         f"eval_tokens = {cfg.eval_tokens} is less than a sequence: type --eval_tokens={cfg.seq_len}")


def check_share(cfg: Config, world: int):
    """ Whether each of `world` ranks can take the same share of a batch. """
    sequences = cfg.batch_tokens // cfg.seq_len
    nearest = max(1, round(sequences / world)) * world
    need(sequences % world == 0,
         f"batch_tokens = {cfg.batch_tokens} is {sequences} sequences, which {world} ranks cannot share "
         f"evenly: start as many as divide {sequences}, or type --batch_tokens={nearest * cfg.seq_len}")
    own = sequences // world
    micro = cfg.micro_batch or own
    need(own % micro == 0,
         f"micro_batch = {micro} does not divide a rank's share of {own} sequences: "
         f"type --micro_batch={math.gcd(micro, own)}")


def check_phases(cfg: Config):
    """ What must come before what. """
    need(cfg.warmup < cfg.decay_end,
         f"warmup = {cfg.warmup} does not end before decay_end = {cfg.decay_end}: type a smaller warmup")
    need(cfg.osci_decay < 1, "osci_decay = 1 keeps the first weights for ever: type a number below 1")
    need(cfg.outlier_log == 0 or cfg.outlier_frac > 0,
         f"outlier_log = {cfg.outlier_log} measures anew the channels of outlier_frac = 0: type "
         "--outlier_log=0, or an outlier_frac above 0")
    if problem := never(cfg):
        # the first that works of: the default of one knob, of all, more steps, both
        other = {knob: getattr(Config, knob) for knob in WHEN if getattr(cfg, knob) != getattr(Config, knob)}
        cures = [{knob: value} for knob, value in other.items()] + [other]
        cures += [{"steps": n} for n in range(cfg.steps + 1, 100)] + [other | {"steps": 30}]
        cure = next(cure for cure in cures if not never(replace(cfg, **cure)))
        raise ConfigError(f"{problem}: type " + " ".join(f"--{knob}={value}" for knob, value in cure.items()))


WHEN = ["outlier_start", "outlier_window", "outlier_log", "osci_start", "osci_period", "osci_window"]
EMA_WARMUP = 10    # steps that osci=qema only averages, before the forward pass follows; TetraJet v1's value


def never(cfg: Config) -> str:
    """ Why OutControl or what osci names is on and would never act, or "". """
    calibrate, measure, again, start, period, window = (cfg.in_steps(getattr(cfg, knob)) for knob in WHEN)
    if cfg.outlier_frac > 0 and calibrate + measure > cfg.steps:
        return f"outlier_start + outlier_window ({calibrate} + {measure} steps) exceed steps = {cfg.steps}"
    if cfg.outlier_log > 0 and measure > again:
        return f"outlier_window ({measure} steps) is longer than outlier_log ({again} steps)"
    if cfg.outlier_log > 0 and calibrate + again + measure > cfg.steps:
        return (f"outlier_start + outlier_log + outlier_window ({calibrate} + {again} + {measure} steps) "
                f"exceed steps = {cfg.steps}")
    if cfg.osci != "off" and window >= period:
        return f"osci_window ({window} steps) fills osci_period ({period} steps)"
    if cfg.osci != "off" and start + window >= cfg.steps:    # a reset follows the step start + window, from 0
        return f"osci_start + osci_window ({start} + {window} steps) must be less than steps = {cfg.steps}"
    if cfg.osci == "qema" and start + EMA_WARMUP + 1 >= cfg.steps:    # so that one forward pass follows it
        return (f"osci_start and a warm-up of {EMA_WARMUP} ({start} + {EMA_WARMUP} steps) leave no step of "
                f"{cfg.steps}")
    return ""

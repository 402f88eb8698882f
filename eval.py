"""
What a run's weights are worth: build the model of a config, load a checkpoint,
measure its loss, let it write.

    python eval.py out/RUN                         validation loss, with the recipe's forward
                                                   and without rounding
    python eval.py out/RUN --prompt="Python is"    text that continues the prompt, with the recipe's forward
    python eval.py out/RUN --export=hf --to=DIR    the model as a folder for Hugging Face transformers; nvfp4
                                                   for vLLM (hf.py)

train.py uses the same functions, so that a loss printed in training and one printed here are the same number.
"""
import os

# as in train.py: threads that wait for each other should sleep
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import difflib
import math
import re
import subprocess
import sys
import zlib
from contextlib import nullcontext, suppress
from dataclasses import fields, replace
from importlib.util import find_spec
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from config import CHOICES, KINDS, LINEARS, MOST, Config, ConfigError, package, script
from data import Corpus, DataError, Parser, open_corpus
from model import GPT, IGNORE
from parallel import ALONE, Ranks, each_tensor
from quant import BACKENDS, Counter, QuantLinear, Recipe, quantize, quantizers_off
from recipes import RECIPES, altered
from remedies import QEma

CHECKPOINT_FORMAT = 1
# the knobs that change a recipe
CHANGES = ("rotate", "rotate_size", "block_w", "block_x", "scale_rule", "backward", "outer", "align",
           "outlier_format")


# -----------------------------------------------------------------------------
# from a config to a model


def pick_device(cfg: Config) -> torch.device:
    """ The device that cfg.device asks for; ConfigError where it is not there. """
    if cfg.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there[cfg.device]:
        raise ConfigError(f"device = {cfg.device!r}: PyTorch sees none on this machine; type --device=auto")
    return torch.device(cfg.device)


def triton_problem() -> str:
    """ Why Triton cannot be used, whatever the device, or "". """
    if find_spec("triton") is None:
        return "Triton is not installed: type pip install triton"
    try:
        found = package("triton").__version__
    except ConfigError as error:
        return str(error)
    # 3.6.0, 3.6.0+git1234; what begins otherwise is older, or nobody's release
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers and (int(numbers[1]), int(numbers[2])) >= (3, 6):
        return ""
    return f"its kernels need Triton 3.6, not {found}: type pip install -U triton"


def pick_backend(cfg: Config, device: torch.device, recipe: Recipe) -> str:
    """ The back end that cfg.backend asks for, or this device's fastest; ConfigError if it cannot run. """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    why_not = dict.fromkeys(BACKENDS, "")
    if problem := triton_problem():
        why_not["emulate"] = problem
    elif not interpreted and device.type != "cuda":
        why_not["emulate"] = f"its kernels need an NVIDIA GPU, and this run is on {device.type}"
    elif not interpreted and torch.cuda.get_device_capability(device) < (8, 0):
        name = torch.cuda.get_device_name()
        why_not["emulate"] = f"its kernels need compute capability 8.0, and {name} has less"
    else:
        from fused import emulate_problem, native_problem
        from gemms import NATIVE_ARCHS
        why_not["emulate"] = emulate_problem(recipe)
        why_not["native"] = native_problem(recipe)
        if cfg.bf16_forward:
            why_not["native"] = "its forward pass is in FP4, and bf16_forward ends that"
        if not interpreted and torch.cuda.get_device_capability(device) not in NATIVE_ARCHS:
            archs = ", ".join(f"{major}.{minor}" for major, minor in NATIVE_ARCHS)
            why_not["native"] = f"FP4 tensor cores come with Blackwell, compute capability {archs}"
    why_not["packed"], why_not["native"] = why_not["emulate"], why_not["native"] or why_not["emulate"]
    if not any(recipe.operands):
        return "reference" if cfg.backend == "auto" else cfg.backend
    if cfg.backend == "auto":
        # an interpreter is for tests, not for speed
        order = ["native", "emulate", "reference"] if device.type == "cuda" else ["reference"]
        return next(name for name in order if not why_not[name])
    if why_not[cfg.backend]:
        raise ConfigError(f"backend = {cfg.backend!r}: {why_not[cfg.backend]}; or type --backend=auto")
    return cfg.backend


def check_native(recipe: Recipe, device: torch.device):
    """
    Run the kernels of the native back end once on this GPU, beside the reference: codes and scales must be
    equal bit for bit, and products equal but for the order of float32 sums. ConfigError if they are not.
    """
    import fused
    T, K, N, outliers = 256, 384, 320, 38 if recipe.outlier else 0
    counter, generator = Counter(1).to(device), torch.Generator(device).manual_seed(0)
    x, w, dy = (torch.randn(shape, generator=generator, device=device) for shape in ((T, K), (N, K), (T, N)))
    op, results = recipe.y_w, []
    if not op.stochastic:
        ours, theirs = fused.quantized(w, op), quantize(w, op)
        for a, b in ((ours.code, theirs.code), (ours.inner, theirs.inner), (ours.outer, theirs.outer)):
            if a is not None and not torch.equal(a, b):
                raise ConfigError(f"the rounding kernel differs from the reference on this GPU; {BROKEN}")
    for backend in ("reference", "native"):
        layer = QuantLinear(K, N, bias=False, recipe=recipe, counter=counter, outliers=outliers,
                            backend=backend, device=device)
        layer.weight.data.copy_(w)
        layer.set_channels(torch.arange(0, 10 * outliers, 10, device=device))
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(dy)
        results.append((y, leaf.grad, layer.weight.grad))
    for name, reference, ours in zip(("Y", "dX", "dW"), *results):
        error = float((ours - reference).norm() / reference.norm())
        # sums of a few hundred float32 products in two orders: 1e-6 is generous, a wrong code is 1e-3
        if not error < 1e-5:
            raise ConfigError(f"{name} of the native back end is off by {error:.1e} on this GPU; {BROKEN}")


BROKEN = "type --backend=emulate, and please report it with the output of python bench.py kernels"


def autocast(device: torch.device):
    """
    bf16 on accelerators, as the paper trains; float32 on a CPU, where bf16 is slow and bits are compared.
    """
    return nullcontext() if device.type == "cpu" else torch.autocast(device.type, torch.bfloat16)


def is_kept(cfg: Config, name: str) -> bool:
    """ Whether the linear of this name, such as blocks.3.mlp.down, stays in bf16. """
    block, kind = int(name.split(".")[1]), name.split(".", 2)[2]
    return kind in cfg.keep.split(",") or block >= cfg.n_layer - round(cfg.keep_last * cfg.n_layer)


def linears(cfg: Config) -> list[str]:
    """ The names of all linears of the blocks. """
    return [f"blocks.{block}.{kind}" for block in range(cfg.n_layer) for kind in LINEARS]


def late_switch(cfg: Config, layers: dict[str, QuantLinear], step: int) -> bool:
    """ From the step of bf16_forward on, round in backward only; True if that is new. """
    late = cfg.bf16_forward > 0 and step >= cfg.in_steps(cfg.bf16_forward)
    todo = [layer for layer in layers.values() if late and (layer.recipe.y_x or layer.recipe.y_w)]
    for layer in todo:
        layer.set_recipe(layer.recipe.only([3, 4, 5, 6]))
    return bool(todo)


def recipe_of(cfg: Config) -> Recipe:
    """
    The recipe that cfg names, with the changes that cfg makes. ConfigError where these, or outlier channels
    or osci, do not fit it: what is wrong with a config and takes no data, device or memory to tell.
    """
    if cfg.recipe not in RECIPES:
        near = difflib.get_close_matches(cfg.recipe, RECIPES, n=1)
        raise ConfigError(f"no recipe is called {cfg.recipe!r}; " +
                          (f"did you mean {near[0]}?" if near else f"there are {', '.join(RECIPES)}"))
    try:
        recipe = altered(RECIPES[cfg.recipe], cfg)
    except ValueError as error:
        flags = " ".join(f"--{name}={getattr(cfg, name)}" for name in CHANGES if getattr(cfg, name))
        raise ConfigError(f"recipe {cfg.recipe} with {flags}: {error}; leave such a flag out, or type "
                          "another --recipe") from None
    if cfg.outlier_frac and any(recipe.operands) and recipe.outlier is None:
        turned = any(op and op.hadamard for op in (recipe.y_x, recipe.y_w))
        cure = "a recipe that has one, such as --recipe=tetrajet_full" if turned else "--outlier_format=mxfp8"
        raise ConfigError(f"recipe {cfg.recipe} has no format for outlier channels: type --outlier_frac=0, "
                          f"or {cure}")
    rounds = any(recipe.operands) and not all(is_kept(cfg, name) for name in linears(cfg))
    if cfg.osci != "off" and rounds:
        if recipe.y_w is None:
            raise ConfigError(f"osci = {cfg.osci!r} is about weights that Q2 rounds: add 2 to --quantizers, "
                              "or type --osci=off")
        if recipe.y_w.grid != "e2m1" or recipe.y_w.hadamard:
            raise ConfigError(f"osci = {cfg.osci!r} is about weights rounded to E2M1 as they are, and recipe "
                              f"{cfg.recipe} does not round such: type --osci=off")
    return recipe


# the knobs that say which operands of which layers are rounded how
ROUNDING = ("quantizers", "keep", "keep_last", *CHANGES)
# knobs that some values of osci alone look at
OSCI_KNOBS = {"osci_track": ("topk",), "osci_decay": ("qema",), "osci_threshold": ("freeze",),
              "osci_strength": ("dampen",), "osci_tau": set(CHOICES["osci"]) - {"off", "edge"}}


def rounding(cfg: Config) -> list[Recipe]:
    """ The recipe of each linear, without what its layer does not look at: equal ones round alike. """
    recipe = recipe_of(replace(cfg, outlier_frac=0.0, osci="off"))
    plain = {f.name: replace(op, block=(1, 128))    # an outer scale alone has no use for blocks
             for f, op in zip(fields(recipe), recipe.operands) if op and op.scale == "none"}
    from_forward = recipe.y_w and recipe.dx_w or recipe.y_x and recipe.dw_x
    recipe = replace(recipe, **plain, align=recipe.align and bool(from_forward),
                     outlier=recipe.outlier if cfg.outlier_frac and any(recipe.operands) else None)
    return [Recipe(align=False) if is_kept(cfg, name) else recipe for name in linears(cfg)]


def keeps_codes(r: Recipe) -> bool:
    """ Whether the back end packed finds anything to keep as codes; by itself emulate keeps values. """
    from fused import as_codes, saved_sides
    sides = saved_sides(r, T=1, K=1, N=1, C=1 if r.outlier else 0)
    return any(rows and as_codes(side, "packed") for rows, _, side in sides)


def idle(cfg: Config, ranks: Ranks = ALONE) -> list[str]:
    """
    The knobs that are not at their defaults and change nothing in this run, a line for each reason. Config
    files set such knobs for good reasons; a flag that does nothing would pass for an ablation.
    """
    ours = rounding(cfg)
    rounds = any(any(recipe.operands) for recipe in ours)

    def same_without(knob: str) -> bool:
        try:
            return rounding(replace(cfg, **{knob: getattr(Config, knob)})) == ours
        except ConfigError:     # it makes another knob fit
            return False

    def reason(knob: str) -> str:
        outlier, osci = knob.startswith("outlier_"), knob.startswith("osci")
        if knob == "parallel" and ranks.world == 1:
            return "one process trains alone"
        if knob in ROUNDING and not (outlier and not cfg.outlier_frac) and not same_without(knob):
            return ""
        if not rounds and (knob in (*ROUNDING, "bf16_forward", "backend") or outlier or osci):
            return f"recipe {cfg.recipe} rounds nothing here"
        if knob == "backend" and cfg.backend == "packed" and not any(map(keeps_codes, ours)):
            return "what backward needs has no codes in this recipe, so it is as emulate"
        if outlier and not cfg.outlier_frac:
            return "outlier_frac = 0"
        if osci and (cfg.osci == "off" or cfg.osci not in OSCI_KNOBS.get(knob, CHOICES["osci"])):
            return f"osci = {cfg.osci!r}"
        if knob == "stop_at" and cfg.stop_at >= cfg.steps:
            return f"steps = {cfg.steps}"
        if knob == "bf16_forward" and not any(recipe.y_x or recipe.y_w for recipe in ours):
            return "no forward pass is rounded"
        return "rounding is the same without" if knob in ROUNDING else ""

    why = {}
    for knob in KINDS:
        value = getattr(cfg, knob)
        if value != getattr(Config, knob) and (because := reason(knob)):
            shown = f"{value:.4g}" if isinstance(value, float) else repr(value)
            why.setdefault(because, []).append(f"{knob} = {shown}")
    return [f"without effect: {', '.join(knobs)} ({because})" for because, knobs in why.items()]


def build(cfg: Config, corpus_vocab: int, device: torch.device,
          recipe: Recipe | None = None) -> tuple[GPT, dict[str, QuantLinear], Counter]:
    """
    The model of a config on its device, its quantized linears by name, and the counter of their noise. recipe
    is the one that cfg names, unless a checkpoint remembers another.
    """
    vocab = cfg.vocab_size or -(-corpus_vocab // 128) * 128
    if vocab < corpus_vocab:
        raise ConfigError(f"vocab_size = {vocab}, but the data has {corpus_vocab} ids; type --vocab_size=0")
    recipe, layers = recipe or recipe_of(cfg), {}
    backend = pick_backend(cfg, device, recipe)
    counter = Counter(cfg.seed)

    def make_linear(in_features: int, out_features: int, name: str) -> nn.Module:
        own = Recipe() if is_kept(cfg, name) else recipe
        outliers = round(cfg.outlier_frac * in_features) if any(own.operands) else 0
        layers[name] = QuantLinear(in_features, out_features, bias=False, recipe=own, layer=len(layers),
                                   counter=counter, outliers=outliers, backend=backend)
        return layers[name]

    model = GPT(cfg, vocab, make_linear).to(device)
    counter.to(device)
    return model, layers, counter


@lru_cache
def commit() -> str:
    """
    The git commit of the code as it was at the first call; where Python files differ from it, '+' and a
    checksum of the difference; 'unknown' without git.
    """
    def git(*args) -> bytes:
        here = Path(__file__).resolve().parent
        return subprocess.run(["git", "-C", str(here), *args], capture_output=True, check=True).stdout.strip()
    try:
        git("ls-files", "--error-unmatch", "eval.py")   # else a copy of it lies in somebody else's repository
        changes = git("diff", "--no-ext-diff", "--no-color", "HEAD", "--", "*.py")
        head = git("rev-parse", "--short", "HEAD").decode()
        return f"{head}+{zlib.crc32(changes):08x}" if changes else head
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# -----------------------------------------------------------------------------
# checkpoints


class CheckpointError(ValueError):
    """ A checkpoint that cannot be used. The text is one line and says what to do. """


# what a checkpoint holds, and of which types
CONTENTS = {
    "format": int, "commit": str, "config": dict, "recipe": str, "vocab_size": int, "train_tokens": int,
    "step": int, "seconds": float, "model": dict, "optimizer": dict, "outliers": dict,
    "osci": (dict, type(None)),
}
# what goes wrong where a file has the right types and the wrong contents
MISFIT = (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError)


def checkpoints(folder: Path) -> list[Path]:
    """ The checkpoints of a run, newest first. A copy under another name, or a link, is the user's own. """
    ours = [path for path in folder.glob("ckpt_*.pt") if re.fullmatch(r"ckpt_\d{9}\.pt", path.name)]
    return sorted((path for path in ours if path.is_file() and not path.is_symlink()), reverse=True)


def no_memory(error: BaseException) -> bool:
    """ Whether there was too little of it. The CPU's allocator has no exception of its own. """
    return (isinstance(error, (MemoryError, torch.OutOfMemoryError))
            or isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def read_checkpoint(path: Path) -> dict:
    """
    One checkpoint file, its tensors on the CPU. weights_only: a file can hold tensors and numbers, not code.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:        # no fault of what is in the file, so no older one is taken in its place
        raise ConfigError(f"cannot read {path}: {error.strerror or error}; mend that first") from None
    # a torn zip, a pickle that is not ours, a file that is no checkpoint at all:
    # torch has a dozen ways to say so
    except Exception as error:
        if no_memory(error):
            raise
        raise CheckpointError(f"{path} is torn or no checkpoint ({type(error).__name__})") from None
    version = state.get("format") if isinstance(state, dict) else None
    if type(version) is not int or version != CHECKPOINT_FORMAT:
        raise CheckpointError(f"{path} is no checkpoint of this program (format {CHECKPOINT_FORMAT})")
    wrong = [name for name, kind in CONTENTS.items() if name not in state or
             not isinstance(state[name], kind) or isinstance(state[name], bool)]
    if not wrong:
        wrong = [] if 0 <= state["step"] < math.inf else ["step"]
        wrong += [] if math.isfinite(state["seconds"]) else ["seconds"]
        wrong += [name for name, t in state["model"].items() if not isinstance(t, torch.Tensor)]
    if wrong:
        raise CheckpointError(f"{path} is no checkpoint of this program: it has no good {wrong[0]}")
    # train.py saves no NaN, and to go on from one would waste the run
    for part in ("model", "optimizer"):
        with suppress(RuntimeError):        # a sparse tensor, or one without memory, will not fit the model
            good = []
            each_tensor(state[part], lambda t: good.append(bool(t.isfinite().all())))
            if not all(good):
                raise CheckpointError(f"{path} has a NaN or an Inf in its {part}")
    return state


def check_tensors(found: dict, expected: dict):
    """ ValueError unless names, shapes, types and layouts agree: load_state_dict casts in silence. """
    there, here = ({name: (t.shape, t.dtype, t.layout) for name, t in side.items()}
                   for side in (found, expected))
    if there != here:
        name = next(name for name in [*here, *there] if there.get(name) != here.get(name))
        raise ValueError(f"its weights are not those of its config, as {name} shows")


def newest_checkpoint(folder: Path, say=print) -> tuple[Path, dict] | None:
    """
    The newest checkpoint of a run that can be read; says which ones it had to skip. None if there is none.
    """
    for path in checkpoints(folder):
        try:
            return path, read_checkpoint(path)
        except CheckpointError as error:
            say(f"skipping a checkpoint: {error}")
    return None


def load_checkpoint(folder: Path, device: str = "auto", data: str | None = None):
    """ A run's folder -> (model, config, corpus, step), ready for evaluation. CheckpointError, DataError. """
    found = newest_checkpoint(folder, say=lambda line: print(line, file=sys.stderr))
    if found is None:
        raise CheckpointError(f"{folder} holds no checkpoint that can be read; give the folder of a run, "
                              "such as out/NAME")
    path, state = found
    try:
        # the back end is this machine's choice; that of the training run may need a GPU that is not here
        here = {"device": device, "backend": "auto"} | ({} if data is None else {"data": data})
        cfg = Config.from_dict(state["config"] | here)
        recipe, vocab = Recipe.from_spec(state["recipe"]), state["vocab_size"]
        # first without memory, and without the time for layers that are not there: a file may claim any size
        if not any(name.startswith(f"blocks.{cfg.n_layer - 1}.") for name in state["model"]):
            raise ValueError(f"its weights are not those of its config, which has {cfg.n_layer} blocks")
        with torch.device("meta"):
            expected = build(cfg, vocab, torch.device("meta"), recipe)[0].state_dict()
        check_tensors(state["model"], expected)
        model, layers, _ = build(cfg, vocab, pick_device(cfg), recipe)
        late_switch(cfg, layers, state["step"])
        model.load_state_dict(state["model"])
        # the forward pass of such a run rounds by an average that is no part of the model
        if cfg.osci == "qema" and state["osci"]:
            QEma.restore(state["osci"], layers)
    except ConfigError:
        raise
    except MISFIT as error:
        if no_memory(error):
            raise
        raise CheckpointError(f"{path} does not fit this program: {first_line(error)}") from None
    corpus = open_corpus(cfg.data)
    if corpus.vocab_size != vocab:
        raise CheckpointError(f"{path} was trained on {vocab} ids and {corpus.name} has {corpus.vocab_size}; "
                              "give the folder of its data with --data=DIR")
    return model.eval(), cfg, corpus, state["step"]


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


# -----------------------------------------------------------------------------
# loss and text


@torch.no_grad()
def val_loss(model: GPT, corpus: Corpus, cfg: Config, ranks: Ranks = ALONE) -> float:
    """
    Cross entropy in nats per token over the first cfg.eval_tokens held-out tokens, the same ones every time,
    shared among the ranks.
    """
    device = next(model.parameters()).device
    total = min(cfg.eval_tokens // cfg.seq_len, corpus.val.whole_windows(cfg.seq_len))
    batch = cfg.micro_batch or cfg.batch_tokens // cfg.seq_len // ranks.world
    ce_sum = count = torch.zeros((), dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    for begin in range(0, total, batch * ranks.world):
        first = begin + ranks.rank * batch
        n_rows = min(batch, total - first)
        # where no sequence is left for this rank it computes one that does not count: under FSDP the others
        # cannot do without its weights
        rows = corpus.val.sequences(
            first if n_rows > 0 else 0, max(1, n_rows), cfg.seq_len, seed=0, shuffle=0).to(device)
        targets = rows[:, 1:] if n_rows > 0 else torch.full_like(rows[:, 1:], IGNORE)
        with autocast(device):
            ce, _, n = model(rows[:, :-1], targets)
        ce_sum, count = ce_sum + ce.double(), count + n
    model.train(was_training)
    ce_sum, count = ranks.total(ce_sum, count)
    return float(ce_sum / count)


def val_losses(model: GPT, corpus: Corpus, cfg: Config, ranks: Ranks = ALONE) -> dict[str, float]:
    """
    The loss with the recipe's forward, which is what would be deployed, and of the same weights unrounded.
    """
    fp4 = bf16 = val_loss(model, corpus, cfg, ranks)
    # a recipe whose forward pass rounds nothing has the same loss twice
    if any(m.recipe.y_x or m.recipe.y_w for m in model.modules() if isinstance(m, QuantLinear)):
        with quantizers_off(model):
            bf16 = val_loss(model, corpus, cfg, ranks)
    return {"val_loss_fp4": fp4, "val_loss_bf16": bf16}


def sample(model: GPT, corpus: Corpus, prompt: str, n: int, temperature: float = 0.8, top_k: int = 50,
           seed: int = 0) -> str:
    """ The prompt and n tokens more, with the recipe's forward. An empty prompt starts a new document. """
    encoding = corpus.encoding
    device = next(model.parameters()).device
    tokens = torch.tensor([[encoding.eot_token] + encoding.encode_ordinary(prompt)], device=device)
    generator = torch.Generator().manual_seed(seed)
    with autocast(device):
        tokens = model.generate(tokens, n, temperature, top_k, generator, vocab_limit=corpus.vocab_size)
    return encoding.decode([t for t in tokens[0, 1:].tolist() if t != encoding.eot_token])


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description="Loss and text of a trained model.", allow_abbrev=False)
    parser.add_argument("run", type=Path, help="the folder of a run, such as out/tetrajet_full-s1")
    parser.add_argument("--prompt", help="continue this text instead of measuring the loss")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of text to write (200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (0.8)")
    parser.add_argument("--top_k", type=int, default=50,
                        help="draw among so many likeliest tokens, 0 all (50)")
    parser.add_argument("--seed", type=int, default=0, help="of the text (0)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps (auto)")
    parser.add_argument("--data", help="folder of token shards, if it is not where it was in training")
    parser.add_argument("--export", choices=("hf", "nvfp4"),
                        help="write the model in this format instead of measuring the loss")
    parser.add_argument("--to", type=Path, help="the folder to write, new or empty")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"),
                        help="of the weights that --export=hf writes (float32)")
    args = parser.parse_args(argv)
    if not 1 <= args.tokens <= MOST["sample_tokens"]:
        parser.error(f"--tokens is from 1 to {MOST['sample_tokens']}")
    if args.top_k < 0 or not 0 <= args.seed < 2**63:
        parser.error("--top_k is at least 0, --seed from 0 to 2**63 - 1")
    if args.temperature != 0 and not 1e-3 <= args.temperature <= 1e3:
        parser.error("--temperature is 0, or from 0.001 to 1000")
    if bool(args.export) != bool(args.to and args.to.name):
        parser.error("--export=hf or --export=nvfp4 goes with --to=DIR, a new folder, and --to with --export")
    if args.dtype and args.export != "hf" or args.export and args.prompt is not None:
        parser.error("--dtype goes with --export=hf, and --prompt with no --export")
    return args


def main(argv: list[str]):
    try:
        args = parse(argv)
        model, cfg, corpus, step = load_checkpoint(args.run, args.device, args.data)
        if args.prompt is not None:
            try:
                print(sample(model, corpus, args.prompt, args.tokens, args.temperature, args.top_k,
                             args.seed))
            except FloatingPointError as error:
                raise CheckpointError(f"{error}, as its loss will tell; take another run") from None
            return
        if args.export:
            from hf import export
            export(model, cfg, corpus, args.export, args.to, args.dtype or "float32")
            return
        print(f"step: {step}")
        for name, loss in val_losses(model, corpus, cfg).items():
            print(f"{name}: {loss:.4f}")
    except (CheckpointError, ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2)
    except (MemoryError, RuntimeError) as error:
        if not no_memory(error):
            raise
        print(f"error: out of memory ({first_line(error)}); free some, or type --device=cpu", file=sys.stderr)
        raise SystemExit(2)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        raise SystemExit(130)
    except OSError as error:
        print(f"error: {error.filename or 'cannot write'}: {error.strerror}", file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    script(lambda: main(sys.argv[1:]))

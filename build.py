"""
Where everything is put together: from a config to a recipe, a back end, a model and its optimizers.

    net = build(cfg, corpus.vocab_size, device)     model, linears, their noise, OutControl, remedy
    optimizers = make_optimizers(cfg, net.model)

train.py, eval.py, bench.py and the tools all build here, so that what they build is the same. Importing this
file also fills the open tables with what rivals/ has.
"""
import os
from contextlib import nullcontext, suppress
from dataclasses import fields, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Callable, NamedTuple

import torch
from torch import nn

import rivals    # noqa: F401  fills the open tables
from config import LINEARS, Config, ConfigError, did_you_mean, need
from model import GPT
from osci import REMEDIES, Remedy
from outliers import CHOICES, OutControl
from parallel import ALONE, Ranks, take_gpu
from quant import AROUND, BACKENDS, GRIDS, ROW, RULES, SIGNS, TENSOR, Counter, Operand, QuantLinear, Recipe
from recipes import MXFP8, RECIPES

# -----------------------------------------------------------------------------
# the model


class Net(NamedTuple):
    """ A model, and what goes with it in training. """
    model: GPT
    layers: dict[str, QuantLinear]      # the linears of its blocks by name: blocks.0.attn.qkv, ...
    counter: Counter                    # of their noise
    recipe: Recipe
    backend: str
    outliers: OutControl
    remedy: Remedy
    ranks: Ranks                        # the processes that train it together
    forward: Callable                   # what training calls in the place of model, see Ranks.share


def build(cfg: Config, ids: int, device: torch.device, recipe: Recipe | None = None,
          ranks: Ranks = ALONE) -> Net:
    """
    For data of so many ids, on this device, shared by these ranks. recipe is the one that cfg names, unless a
    checkpoint remembers another one.
    """
    vocab = cfg.vocab_size or -(-ids // 128) * 128
    need(vocab >= ids, f"vocab_size = {vocab}, but the data has {ids} ids; type --vocab_size=0")
    recipe, layers = recipe or recipe_of(cfg), {}
    need(cfg.osci in REMEDIES, f"osci = {cfg.osci!r} is unknown here. If a file of yours enters it, import "
         "that file in rivals/__init__.py")
    backend, counter = pick_backend(cfg, device, recipe), Counter(cfg.seed, ranks.rank, device)

    def make_linear(in_features: int, out_features: int, name: str) -> nn.Module:
        own = Recipe() if is_kept(cfg, name) else recipe
        outliers = round(cfg.outlier_frac * in_features) if any(own.operands) else 0
        layers[name] = QuantLinear(in_features, out_features, bias=False, recipe=own, layer=len(layers),
                                   counter=counter, outliers=outliers, backend=backend)
        return layers[name]

    model = GPT(cfg, vocab, make_linear).to(device)
    choice, again = CHOICES[cfg.outlier_choice], cfg.in_steps(cfg.outlier_log) if cfg.outlier_log else 0
    outliers = choice(layers, cfg.in_steps(cfg.outlier_start), cfg.in_steps(cfg.outlier_window), again)
    rounded = {name: layer for name, layer in layers.items() if layer.recipe.y_w}
    remedy = REMEDIES[cfg.osci if rounded else "off"](rounded, cfg)
    if cfg.compile and device.type == "cuda" and find_spec("triton"):
        compile_parts(model)
    return Net(model, layers, counter, recipe, backend, outliers, remedy, ranks, ranks.share(model))


def is_kept(cfg: Config, name: str) -> bool:
    """ Whether the linear of this name, such as blocks.3.mlp.down, stays in bf16. """
    block, kind = int(name.split(".")[1]), name.split(".", 2)[2]
    return kind in cfg.keep.split(",") or block >= cfg.n_layer - round(cfg.keep_last * cfg.n_layer)


def compile_parts(model: GPT):
    """
    Compile the forward of all blocks as one program, since they differ in the numbers of their layers alone,
    and the loss. In training only: a text would compile it for each of its lengths.
    """
    dynamo = torch._dynamo.config
    if not hasattr(dynamo, "allow_unspec_int_on_nn_module"):
        return      # before PyTorch 2.7: it would compile each block by itself, and most of them never
    dynamo.allow_unspec_int_on_nn_module = True
    dynamo.recompile_limit = 16         # the phases of a run make 7 programs of a block
    # PyTorch 2.10 on Python 3.13 went on with the program of before when a layer's attributes had changed
    if hasattr(dynamo, "use_recursive_dict_tags_for_guards"):
        dynamo.use_recursive_dict_tags_for_guards = False

    def in_training(module: nn.Module, method: Callable) -> Callable:
        compiled = torch.compile(method)
        return lambda *inputs: (compiled if module.training else method)(*inputs)
    for block in model.blocks:
        block.forward = in_training(block, block.forward)
    model.losses = in_training(model, model.losses)


def forward_unrounded(cfg: Config, net: Net, step: int) -> bool:
    """ From the step of bf16_forward on, round in backward only; True if that is new. """
    late = step >= cfg.in_steps(cfg.bf16_forward)
    todo = [layer for layer in net.layers.values() if late and any(layer.recipe.operands[:2])]
    for layer in todo:
        layer.recipe = only(layer.recipe, [3, 4, 5, 6])
    return bool(todo)


# -----------------------------------------------------------------------------
# the optimizer, the device and the back end


def make_optimizers(cfg: Config, model: GPT) -> list[torch.optim.Optimizer]:
    """ One, or two that share the weights. The training loop sets their rate; they save all they need. """
    groups = model.optimizer_groups(cfg.weight_decay)
    adamw = partial(torch.optim.AdamW, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps, fused=True)
    if cfg.optimizer == "adamw":
        return [adamw(groups)]
    need(hasattr(torch.optim, "Muon"), "optimizer = 'muon' comes with PyTorch 2.9: type --optimizer=adamw")
    matrices = {p: None for p in model.blocks.parameters() if p.ndim == 2}
    rest = [group | {"params": [p for p in group["params"] if p not in matrices]} for group in groups]
    # its update has the size of AdamW's, so that one rate and one decay do for both
    return [adamw(rest), torch.optim.Muon(list(matrices), lr=cfg.lr, weight_decay=cfg.weight_decay,
                                          adjust_lr_fn="match_rms_adamw")]


def pick_device(cfg: Config) -> torch.device:
    """ The device that cfg.device asks for; ConfigError where there is none that can compute. """
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    name = ("cuda" if cuda else "cpu") if cfg.device == "auto" else cfg.device
    need({"cpu": True, "cuda": cuda, "mps": mps}[name],
         f"device = {cfg.device!r}: PyTorch sees none on this machine; type --device=auto")
    if name == "cuda":
        take_gpu()
    try:
        torch.zeros(1, device=name) + 1
    except RuntimeError as error:       # a GPU that is too old for this PyTorch, or that others have filled
        raise ConfigError(f"the GPU does not work with this PyTorch ({first_line(error)}); "
                          "type --device=cpu") from None
    return torch.device(name)


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def no_memory(error: Exception) -> bool:
    """ Whether there was too little of it. The CPU's allocator has no exception of its own. """
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)


def pick_backend(cfg: Config, device: torch.device, recipe: Recipe) -> str:
    """
    Who rounds and multiplies: the back end that cfg.backend names, or the fastest one that can compute this
    recipe here, which is the last such entry of BACKENDS. ConfigError, with the reason, if it cannot.
    """
    if cfg.backend == "reference" or cfg.backend == "auto" and device.type != "cuda":
        return "reference"              # on a CPU kernels are only interpreted, which is for tests
    name, missing = cfg.backend, enter_kernels(device)
    need(name in ("auto", *BACKENDS), f"backend = {name!r}: {missing}; type --backend=auto")
    if not any(recipe.operands):
        return "reference"
    recipes = [recipe, only(recipe, [3, 4, 5, 6])] if cfg.bf16_forward else [recipe]

    def problem(name: str) -> str:
        return next(filter(None, (BACKENDS[name].problem(r) for r in recipes)), "")
    if name == "auto":
        name = next(name for name in reversed(BACKENDS) if not problem(name))
    need(not (why := problem(name)), f"backend = {name!r}: {why}; or type --backend=auto")
    if name == "native" and device.type == "cuda":
        # before anything is trained, its kernels have to agree with the reference on this very GPU
        import fused
        need(not (why := fused.check_native(recipe, device)),
             f"{why}; type --backend=emulate, and please report it with the output of python bench.py")
    return name


def enter_kernels(device: torch.device) -> str:
    """ Let fused.py put the back ends of a GPU into BACKENDS -> "", or why they cannot run here. """
    if os.environ.get("TRITON_INTERPRET") != "1":
        if device.type != "cuda" or torch.version.hip:
            return f"its kernels need an NVIDIA GPU, not {'AMD' if torch.version.hip else device.type}"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return f"its kernels need compute capability 8.0, which {torch.cuda.get_device_name()} has not"
    try:
        found = version("triton")
        if tuple(int(n) for n in found.split(".")[:2]) < (3, 6):
            return f"its kernels need Triton 3.6, not {found}: type pip install -U torch triton"
        import fused            # noqa: F401
        import rivals.kernels   # noqa: F401
    except PackageNotFoundError:
        return "Triton is not installed: type pip install triton"
    except Exception as error:  # whatever a Triton that we do not know stumbles over
        return f"Triton {found} cannot be used ({first_line(error)}): type pip install triton==3.6"
    return ""


def autocast(device: torch.device):
    """
    bf16 on accelerators, as the paper trains; float32 on a CPU, where bf16 is slow and bits are compared.
    """
    return nullcontext() if device.type == "cpu" else torch.autocast(device.type, torch.bfloat16)


# -----------------------------------------------------------------------------
# the recipe

# the knobs that change a recipe, and those that say which layers and operands it is for
CHANGES = ("rotate", "rotate_size", "block_w", "block_x", "scale_rule", "backward", "outer", "align",
           "outlier_format")
ROUNDING = ("quantizers", "keep", "keep_last", "bf16_forward", *CHANGES)


def recipe_of(cfg: Config) -> Recipe:
    """
    The recipe that cfg names, with the changes that cfg makes. ConfigError where these, or outlier channels
    or the remedy, do not fit it: what is wrong with a config and takes no data, device or memory to tell.
    """
    for knob, known in (("recipe", RECIPES), ("osci", REMEDIES), ("outlier_choice", CHOICES),
                        ("scale_rule", ("", *RULES)),
                        ("backend", dict.fromkeys(("auto", *BACKENDS, "packed", "emulate", "native")))):
        if (value := getattr(cfg, knob)) not in known:
            raise ConfigError(f"{knob} = {value!r} is unknown; {did_you_mean(value, known)}")
    try:
        recipe = checked(altered(RECIPES[cfg.recipe], cfg))
    except ValueError as error:
        flags = "".join(f" --{name}={getattr(cfg, name)}" for name in CHANGES if getattr(cfg, name))
        raise ConfigError(f"recipe {cfg.recipe}{flags and ' with' + flags}: {error}") from None
    if not any(recipe.operands):
        return recipe
    need(not cfg.outlier_frac or recipe.outlier is not None,
         f"recipe {cfg.recipe} has no format for outlier channels: type --outlier_frac=0, or a recipe that "
         "has one, such as --recipe=tetrajet_full")
    q2, moved = recipe.y_w, recipe.rotate[0] or any(AROUND[name].changes_w for name in recipe.around)
    need(cfg.osci == "off" or q2 and (q2.grid, q2.rounding) == ("e2m1", "rtn") and not moved,
         f"osci = {cfg.osci!r} is about weights that Q2 rounds to the nearest E2M1 as they are, and recipe "
         f"{cfg.recipe} does not round such: type --osci=off")
    return recipe


def idle(cfg: Config) -> str:
    """ The knobs of rounding, outliers and osci that change nothing here: they would pass for ablations. """
    ours, unused = effect(cfg), []
    for field in fields(cfg):
        name, value = field.name, getattr(cfg, field.name)
        if value != field.default and (name in ROUNDING or name.startswith(("outlier", "osci"))):
            with suppress(ValueError):      # without this knob another one does not fit
                if effect(replace(cfg, **{name: field.default})) == ours:
                    unused.append(f"{name} = {value!r}")
    return f"without effect: {', '.join(unused)}" if unused else ""


def effect(cfg: Config) -> tuple:
    """ What the knobs of rounding, outliers and osci come to. Where it is equal, so are the runs. """
    recipe = checked(altered(RECIPES[cfg.recipe], cfg))
    channels = [round(cfg.outlier_frac * width) for width in (cfg.d_model, cfg.d_ff)]
    recipe = recipe if any(channels) else replace(recipe, outlier=None)
    names = [f"blocks.{i}.{kind}" for i in range(cfg.n_layer) for kind in LINEARS]
    layers = [Recipe() if is_kept(cfg, name) else recipe for name in names]
    knobs = []
    if any(any(r.operands) for r in layers):
        knobs += ["osci", *REMEDIES[cfg.osci].KNOBS]
        knobs += [f.name for f in fields(cfg) if f.name.startswith("outlier")] if any(channels) else []
    if any(any(r.operands[:2]) for r in layers):
        knobs.append("bf16_forward")
    return layers, [(knob, getattr(cfg, knob)) for knob in knobs]


USUAL = {"rtn": "nearest", "sr": "up"}         # rounding -> rule, for scales with a mantissa


def altered(recipe: Recipe, cfg: Config) -> Recipe:
    """
    The recipe with the changes of cfg, its knobs in CHANGES and quantizers; ValueError where one of them does
    not fit the recipe. A recipe that rounds nothing stays what it is.
    """
    same = all(getattr(cfg, knob) == getattr(Config, knob) for knob in ("quantizers", *CHANGES))
    if same or not any(recipe.operands):
        return recipe
    ops = {}
    for field, op in zip(fields(recipe), recipe.operands):
        if op is None:
            continue
        product, tensor = field.name.split("_")
        block, rule = {"w": cfg.block_w, "x": cfg.block_x}.get(tensor), RULES[op.rule]
        new = {"block": tuple(int(n) for n in block.split("x"))} if block else {}
        if cfg.outer:
            new["outer"] = {"tensor": TENSOR, "row": ROW}.get(cfg.outer) or int(cfg.outer)
        if product != "y":
            # a rule that knows one rounding alone is itself that rounding, and another is no change of scales
            alone = len(rule.rounds) == 1
            if cfg.scale_rule and alone and not cfg.backward:
                raise ValueError(f"rule {op.rule} rounds in a way of its own: add --backward=sr or rtn")
            changed = cfg.backward and (cfg.backward != op.rounding or alone) and GRIDS[op.scale].mbits
            rounding = cfg.backward or op.rounding
            usual = USUAL[rounding] if changed and op.rule != "max" and not rule.stored else op.rule
            new |= {"rounding": rounding, "rule": cfg.scale_rule or usual}
        if op.rule == "max" and ("block" in new or new.get("rule", "max") != "max"):
            raise ValueError("a format without inner scales has neither blocks nor a rule for these")
        ops[field.name] = replace(op, **new)
    outlier = {"": recipe.outlier, "mxfp8": MXFP8, "bf16": "bf16"}[cfg.outlier_format]
    align = recipe.align if cfg.align == "" else cfg.align == "true"
    recipe = rotated(replace(recipe, **ops, outlier=outlier, align=align), cfg)
    return only(recipe, [int(n) for n in cfg.quantizers.split(",") if n])


def rotated(r: Recipe, cfg: Config) -> Recipe:
    """
    The recipe with the rotations that cfg asks for. A rotation of Y lies around the linear where its
    gradients are aligned, as these have to start from what was rounded in between.
    """
    around = [name for name in r.around if name.startswith("rotate")]       # such as "rotate 32 none"
    _, size, signs = around[0].split() if around else ("", r.rotate[0], "fixed")
    sizes = [int(size), *r.rotate[1:]]
    if cfg.rotate:
        sizes = [(size or cfg.rotate_size or 16) if product in cfg.rotate.split(",") else 0
                 for product, size in zip(("y", "dx", "dw"), sizes)]
    sizes = [cfg.rotate_size or size if size else 0 for size in sizes]
    rest = tuple(name for name in r.around if name not in around)
    if sizes[0] and (r.align or around):
        return replace(r, around=(f"rotate {sizes[0]} {signs}", *rest), rotate=(0, *sizes[1:]))
    # evaluation has to see the function that was trained, so the signs of Y are never fresh
    fixed = sizes[0] and r.signs[0] == "fresh"
    return replace(r, around=rest, rotate=tuple(sizes), signs=("fixed", *r.signs[1:]) if fixed else r.signs)


def only(r: Recipe, numbers) -> Recipe:
    """ The same recipe with no operand rounded but these (1..6); a product without any is plain. """
    ops = [op if i in numbers else None for i, op in enumerate(r.operands, 1)]
    rotate = tuple(size if any(ops[2 * i : 2 * i + 2]) else 0 for i, size in enumerate(r.rotate))
    names = [field.name for field in fields(r)[:6]]
    return replace(r, **dict(zip(names, ops)), align=r.align and bool(ops[3] or ops[5]), rotate=rotate,
                   around=tuple(name for name in r.around if any(ops[:2]) or not AROUND[name].forward))


def checked(r: Recipe) -> Recipe:
    """ The recipe; ValueError where a table has no such entry, or where entries do not fit each other. """
    known = [*((name, SIGNS, "signs") for name in r.signs), *((name, AROUND, "around") for name in r.around)]
    operands = [op for op in (*r.operands, r.outlier) if isinstance(op, Operand)]
    for op in operands:
        known += [(op.grid, GRIDS, "grid"), (op.scale, GRIDS, "scale"), (op.rule, RULES, "rule"),
                  (op.rounding, USUAL, "rounding")]
    for name, table, field in known:
        if name not in table:
            raise ValueError(f"{field} {name!r} is unknown ({did_you_mean(name, table)}). If a file of yours "
                             "enters it, import that file in rivals/__init__.py")
    for op in operands:
        rule, power = RULES[op.rule], GRIDS[op.scale].mbits == 0
        if op.outer > 0 and op.outer % op.block[1]:
            raise ValueError(f"outer is 0, TENSOR, ROW or a multiple of the block's {op.block[1]} columns, "
                             f"not {op.outer}")
        if rule.scales not in ("any", "powers" if power else "mantissa"):
            raise ValueError(f"rule {op.rule} is not for scales {op.scale}")
        if rule.grids and op.grid not in rule.grids:
            raise ValueError(f"rule {op.rule} is about {', '.join(rule.grids)}, not {op.grid}")
        own = [name for name, other in RULES.items() if other.stored and op.grid in other.grids]
        if own and op.rule not in own:
            raise ValueError(f"grid {op.grid} is for rule {own[0]}, not {op.rule}")
        if op.rounding not in rule.rounds:
            raise ValueError(f"rule {op.rule} is for rounding {', '.join(rule.rounds)}, not {op.rounding}")
        if power and op.outer and not rule.outer:
            raise ValueError(f"a scale {op.scale} has the range of float32 and takes no outer one: outer=0")
    if any(size < 0 or size & (size - 1) for size in r.rotate):
        raise ValueError(f"a rotation is of a power of two values, not {r.rotate}")
    if r.align and r.rotate[0]:
        raise ValueError("aligned gradients cannot start from a rotated Q1(X): rotate around the linear")
    if r.outlier and (r.rotate[0] or any(name.startswith("rotate") for name in r.around)):
        raise ValueError("a recipe that rotates the forward pass has no outlier channels")
    return r

"""
Where everything is put together: from a config to a recipe, a back end, a model and its optimizers.

    net = build(cfg, corpus.vocab_size, device)     model, linears, their noise, OutControl, remedy
    optimizers = make_optimizers(cfg, net.model)

train.py, eval.py and the programs beside them all build here, so that what they build is the same.
"""
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Callable, NamedTuple

import torch
from torch import nn

import rivals    # noqa: F401  fills the open tables
from config import LINEARS, Config, ConfigError, did_you_mean, need
from model import GPT
from osci import REMEDIES, Remedy
from outliers import CHOICES, OutControl
from quant import BACKENDS, GRIDS, RULES, TENSOR, Counter, Operand, QuantLinear, Recipe
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


def build(cfg: Config, ids: int, device: torch.device, recipe: Recipe | None = None) -> Net:
    """ For data of so many ids. recipe is the one that cfg names, unless a checkpoint remembers another. """
    vocab = cfg.vocab_size or -(-ids // 128) * 128
    need(vocab >= ids, f"vocab_size = {vocab}, but the data has {ids} ids; type --vocab_size=0")
    recipe, layers = recipe or recipe_of(cfg), {}
    backend, counter = pick_backend(cfg), Counter(cfg.seed, device=device)

    def make_linear(in_features: int, out_features: int, name: str) -> nn.Module:
        own = Recipe() if is_kept(cfg, name) else recipe
        outliers = round(cfg.outlier_frac * in_features) if any(own.operands) else 0
        layers[name] = QuantLinear(in_features, out_features, bias=False, recipe=own, layer=len(layers),
                                   counter=counter, outliers=outliers, backend=backend)
        return layers[name]

    model = GPT(cfg, vocab, make_linear).to(device)
    outliers = OutControl(layers, cfg.in_steps(cfg.outlier_start), cfg.in_steps(cfg.outlier_window),
                          cfg.outlier_choice, cfg.in_steps(cfg.outlier_log) if cfg.outlier_log else 0)
    rounded = {name: layer for name, layer in layers.items() if layer.recipe.y_w}
    remedy = REMEDIES[cfg.osci if rounded else "off"](rounded, cfg)
    if cfg.compile and device.type == "cuda":
        compile_parts(model)
    return Net(model, layers, counter, recipe, backend, outliers, remedy)


def is_kept(cfg: Config, name: str) -> bool:
    """ Whether the linear of this name, such as blocks.3.mlp.down, stays in bf16. """
    block, kind = int(name.split(".")[1]), name.split(".", 2)[2]
    return kind in cfg.keep.split(",") or block >= cfg.n_layer - round(cfg.keep_last * cfg.n_layer)


def compile_parts(model: GPT):
    """
    Compile the forward of all blocks as one program, since they differ in the numbers of their layers alone,
    and the loss. In training only: a text would compile it for each of its lengths.
    """
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    torch._dynamo.config.recompile_limit = 16       # the phases of a run make 7 programs of a block

    def in_training(module: nn.Module, method: Callable) -> Callable:
        compiled = torch.compile(method)
        return lambda *inputs: (compiled if module.training else method)(*inputs)
    for block in model.blocks:
        block.forward = in_training(block, block.forward)
    model.losses = in_training(model, model.losses)


def forward_unrounded(cfg: Config, net: Net, step: int) -> bool:
    """ From the step of bf16_forward on, round in backward only; True if that is new. """
    late = cfg.bf16_forward > 0 and step >= cfg.in_steps(cfg.bf16_forward)
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
    matrices = {p: None for p in model.blocks.parameters() if p.ndim == 2}
    rest = [group | {"params": [p for p in group["params"] if p not in matrices]} for group in groups]
    # its update has the size of AdamW's, so that one rate and one decay do for both
    return [adamw(rest), torch.optim.Muon(list(matrices), lr=cfg.lr, weight_decay=cfg.weight_decay,
                                          adjust_lr_fn="match_rms_adamw")]


def pick_device(cfg: Config) -> torch.device:
    """ The device that cfg.device asks for; ConfigError where it is not there. """
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if cfg.device == "auto":
        return torch.device("cuda" if cuda else "cpu")
    need({"cpu": True, "cuda": cuda, "mps": mps}[cfg.device],
         f"device = {cfg.device!r}: PyTorch sees none on this machine; type --device=auto")
    return torch.device(cfg.device)


def pick_backend(cfg: Config) -> str:
    """ The back end that cfg.backend asks for, or the fastest that has put itself into BACKENDS. """
    need(cfg.backend in ("auto", *BACKENDS), f"backend = {cfg.backend!r} is not on this machine; "
         + did_you_mean(cfg.backend, ("auto", *BACKENDS)))
    return next(reversed(BACKENDS)) if cfg.backend == "auto" else cfg.backend


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
ROUNDING = ("quantizers", "keep", "keep_last", *CHANGES)


def recipe_of(cfg: Config) -> Recipe:
    """
    The recipe that cfg names, with the changes that cfg makes. ConfigError where these, or outlier channels
    or the remedy, do not fit it: what is wrong with a config and takes no data, device or memory to tell.
    """
    for knob, known in (("recipe", RECIPES), ("osci", REMEDIES), ("outlier_choice", CHOICES)):
        value = getattr(cfg, knob)
        need(value in known, f"{knob} = {value!r} is unknown; {did_you_mean(value, known)}")
    try:
        recipe = altered(RECIPES[cfg.recipe], cfg)
    except ValueError as error:
        flags = " ".join(f"--{name}={getattr(cfg, name)}" for name in CHANGES if getattr(cfg, name))
        raise ConfigError(f"recipe {cfg.recipe} with {flags}: {error}") from None
    need(not cfg.outlier_frac or not any(recipe.operands) or recipe.outlier is not None,
         f"recipe {cfg.recipe} has no format for outlier channels: type --outlier_frac=0, or a recipe that "
         "has one, such as --recipe=tetrajet_full")
    turned = recipe.rotate[0] or any(name.startswith("rotate") for name in recipe.around)
    fits = recipe.y_w and recipe.y_w.grid == "e2m1" and recipe.y_w.rounding == "rtn" and not turned
    need(cfg.osci == "off" or not any(recipe.operands) or fits,
         f"osci = {cfg.osci!r} is about weights that Q2 rounds to the nearest E2M1 as they are, and recipe "
         f"{cfg.recipe} does not round such: type --osci=off")
    return recipe


def idle(cfg: Config) -> str:
    """ The knobs of rounding, outliers and osci that change nothing here: they would pass for ablations. """
    def rounding(knob: str = "seed") -> list[Recipe]:
        """ Of each linear, with this knob at its default. """
        plain = replace(cfg, osci="off", outlier_frac=0.0, **{knob: getattr(Config, knob)})
        names = [f"blocks.{i}.{kind}" for i in range(cfg.n_layer) for kind in LINEARS]
        try:
            return [Recipe() if is_kept(plain, name) else recipe_of(plain) for name in names]
        except ConfigError:
            return []       # without it another knob does not fit
    rounds = any(any(r.operands) for r in rounding())
    used = ("osci", *REMEDIES[cfg.osci].KNOBS) if rounds else ()
    set_here = {knob: value for knob, value in asdict(cfg).items() if value != getattr(Config, knob)}
    unused = [f"{knob} = {value!r}" for knob, value in set_here.items()
              if knob in ROUNDING and rounding(knob) == rounding()
              or knob.startswith("osci") and knob not in used
              or knob.startswith("outlier") and not (cfg.outlier_frac and rounds)]
    return f"without effect: {', '.join(unused)}" if unused else ""


USUAL = {"rtn": "nearest", "sr": "up"}         # rounding -> rule, for scales with a mantissa


def altered(recipe: Recipe, cfg) -> Recipe:
    """
    The recipe with the changes of cfg, a Config: quantizers, rotate, rotate_size, block_w, block_x,
    scale_rule, backward, outer, align, outlier_format. ValueError where these do not fit each other or the
    recipe. A recipe that rounds nothing stays what it is.
    """
    if not any(recipe.operands):
        return recipe
    ops = {field.name: op for field, op in zip(fields(recipe), recipe.operands) if op}
    for name, op in ops.items():
        product, tensor = name.split("_")
        new = {}
        if block := {"w": cfg.block_w, "x": cfg.block_x}.get(tensor):
            new["block"] = tuple(int(n) for n in block.split("x"))
        if cfg.outer:
            new["outer"] = TENSOR if cfg.outer == "tensor" else int(cfg.outer)
        if product != "y":
            # eden is a rule of its own, and its rounding none of these two
            changed = cfg.backward and (cfg.backward != op.rounding or op.rule == "eden")
            rounding = cfg.backward or op.rounding
            if cfg.scale_rule and op.rule == "max":
                raise ValueError("a format without inner scales has no rule for them")
            usual = USUAL[rounding] if changed and op.scale != "e8m0" and op.rule != "max" else op.rule
            new |= {"rounding": rounding, "rule": cfg.scale_rule or usual}
        ops[name] = replace(op, **new)
    new = {"align": recipe.align if cfg.align == "" else cfg.align == "true",
           "outlier": {"": recipe.outlier, "mxfp8": MXFP8, "bf16": "bf16"}[cfg.outlier_format]}
    around = [name for name in recipe.around if name.startswith("rotate")]
    sizes = [int(around[0].split()[1]) if around else recipe.rotate[0], *recipe.rotate[1:]]
    if cfg.rotate:
        sizes = [(size or cfg.rotate_size or 16) if product in cfg.rotate.split(",") else 0
                 for product, size in zip(("y", "dx", "dw"), sizes)]
    sizes = [cfg.rotate_size or size if size else 0 for size in sizes]
    rest = tuple(name for name in recipe.around if not name.startswith("rotate"))
    if sizes[0] and (new["align"] or around):
        signs = around[0].split()[2] if around else "fixed"
        new |= {"around": (f"rotate {sizes[0]} {signs}", *rest), "rotate": (0, *sizes[1:])}
    else:
        new |= {"around": rest, "rotate": tuple(sizes)}
        if sizes[0] and recipe.signs[0] == "fresh":
            # evaluation has to see the function that was trained
            new["signs"] = ("fixed", *recipe.signs[1:])
    numbers = [int(n) for n in cfg.quantizers.split(",") if n]
    return checked(only(replace(recipe, **ops, **new), numbers))


def only(r: Recipe, numbers) -> Recipe:
    """ The same recipe with every quantizer off but these (1..6); a product without any is plain. """
    ops = [op if i in numbers else None for i, op in enumerate(r.operands, 1)]
    rotate = tuple(size if any(ops[2 * i : 2 * i + 2]) else 0 for i, size in enumerate(r.rotate))
    names = [field.name for field in fields(r)[:6]]
    return replace(r, **dict(zip(names, ops)), rotate=rotate, around=r.around if any(ops[:2]) else ())


def checked(r: Recipe) -> Recipe:
    """ The recipe; ValueError where a table has no such entry, or where entries do not fit each other. """
    for op in (*r.operands, r.outlier):
        if not isinstance(op, Operand):
            continue
        for field, known in (("grid", GRIDS), ("scale", GRIDS), ("rule", RULES), ("rounding", USUAL)):
            if (value := getattr(op, field)) not in known:
                raise ValueError(f"{field} is one of {', '.join(known)}, not {value!r}")
        if op.outer > 0 and op.outer % op.block[1]:
            raise ValueError(f"outer is 0, TENSOR or a multiple of the block's {op.block[1]} columns, "
                             f"not {op.outer}")
        rule, power = RULES[op.rule], GRIDS[op.scale].mbits == 0
        if rule.scales not in ("any", "powers" if power else "mantissa"):
            raise ValueError(f"rule {op.rule} is not for scales {op.scale}")
        if rule.grids and op.grid not in rule.grids:
            raise ValueError(f"rule {op.rule} is about {', '.join(rule.grids)}, not {op.grid}")
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

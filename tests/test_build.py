"""
build.py: what the flags make of a recipe, which flags are told to do nothing, who computes, who optimizes.
Every docstring names a bug that the test would catch.
"""
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import build
from build import (RECIPES, build as build_net, enter_kernels, idle, make_optimizers, only, pick_backend,
                   pick_device, recipe_of)
from config import Config, ConfigError, parse
from quant import BACKENDS, ROW, TENSOR, Backend, Operand, Recipe, Table
from test_train import go, last_state, needs_muon, rows, shards, tiny  # noqa: F401

BASE = RECIPES["tetrajet_base"]
BACKWARD = ("dx_dy", "dx_w", "dw_dy", "dw_x")
CPU = torch.device("cpu")


def changed(recipe: str, *flags: str) -> Recipe:
    return recipe_of(parse([f"--recipe={recipe}", *flags]))


def with_fields(recipe: Recipe, names: tuple[str, ...], **new) -> Recipe:
    return replace(recipe, **{name: replace(getattr(recipe, name), **new) for name in names})


# -----------------------------------------------------------------------------
# flags that change a recipe


@pytest.mark.parametrize("name", RECIPES)
def test_no_flag_changes_nothing(name):
    """ Catches: a neutral default that is not neutral. """
    assert changed(name) == RECIPES[name]


@pytest.mark.parametrize("flag, expected", (
    ("--quantizers=1,2", replace(BASE, dx_dy=None, dx_w=None, dw_dy=None, dw_x=None, align=False,
                                 rotate=(0, 0, 0))),
    ("--quantizers=4", replace(BASE, y_x=None, y_w=None, dx_dy=None, dw_dy=None, dw_x=None,
                               rotate=(0, 16, 0))),
    ("--rotate=dx", replace(BASE, rotate=(0, 16, 0))), ("--rotate=none", replace(BASE, rotate=(0, 0, 0))),
    ("--rotate_size=64", replace(BASE, rotate=(0, 64, 64))),
    # aligned gradients start from what was rounded after a rotation of Y, so that lies around the linear
    ("--rotate=y,dx,dw", replace(BASE, around=("rotate 16 fixed",))),
    ("--block_w=16x16", with_fields(BASE, ("y_w", "dx_w"), block=(16, 16))),
    ("--block_x=1x32", with_fields(BASE, ("y_x", "dw_x"), block=(1, 32))),
    ("--scale_rule=17/16", with_fields(BASE, BACKWARD, rule="17/16")),
    ("--backward=rtn", with_fields(BASE, BACKWARD, rounding="rtn", rule="nearest")), ("--backward=sr", BASE),
    ("--outer=tensor", with_fields(BASE, ("y_x", "y_w", *BACKWARD), outer=TENSOR)),
    ("--outer=row", with_fields(BASE, ("y_x", "y_w", *BACKWARD), outer=ROW)),
    ("--align=false", replace(BASE, align=False)),
    ("--outlier_format=bf16", replace(BASE, outlier="bf16")),
    ("--outlier_format=mxfp8", RECIPES["tetrajet_full"]),
))
def test_each_flag_changes_its_own_fields(flag, expected):
    """ Catches: a flag that reaches an operand too many or too few, and one that does nothing. """
    assert changed("tetrajet_base", flag) == expected


def test_flags_together():
    """ Catches: flags that undo each other, or a rule that is lost beside another flag. """
    assert changed("tetrajet_base", "--scale_rule=nearest",
                   "--outlier_format=mxfp8") == RECIPES["tetrajet_released"]
    nvidia = changed("nvidia", "--rotate=dw,dx", "--rotate_size=128", "--backward=sr", "--outer=128")
    assert nvidia.rotate == (0, 128, 128) and nvidia.signs == RECIPES["nvidia"].signs
    assert [op.rule for op in nvidia.operands] == ["nearest"] * 3 + ["up"] + ["nearest"] + ["up"]
    # without alignment the product itself is rotated, and evaluation sees the signs that were trained with
    turned = changed("nvfp4", "--rotate=y")
    assert (turned.rotate, turned.signs[0], turned.around) == ((16, 0, 0), "fixed", ())
    quartet = changed("quartet", "--rotate_size=64")
    assert quartet.around == ("rotate 64 none", "trust") and quartet.rotate == (0, 64, 64)
    assert changed("quartet", "--rotate=none").around == ("trust",)
    # MS-EDEN is a way of rounding too: another rounding brings the usual rule along
    assert changed("quartet2", "--backward=sr").dx_dy.rule == "up"
    assert changed("quartet", "--backward=rtn").dx_dy.rule == "3/4"     # a power of two keeps its rule


@pytest.mark.parametrize("flags, message", (
    (["--recipe=mxfp4", "--outer=tensor"], "takes no outer one"),
    (["--recipe=tetrajet_v1", "--scale_rule=nearest"], "rule nearest is not for scales e8m0"),
    (["--recipe=tetrajet_base", "--scale_rule=floor"], "rule floor is not for scales e4m3"),
    (["--recipe=tetrajet_base", "--scale_rule=ceil"], "scale_rule = 'ceil' is unknown"),
    (["--recipe=ufp4", "--scale_rule=4/6"], "rule 4/6 is about e2m1, not e1m2"),
    (["--recipe=if4", "--scale_rule=up"], "grid if4 is for rule if4, not up"),
    (["--recipe=quartet2", "--scale_rule=up"], "rule eden rounds in a way of its own"),
    (["--recipe=fp8", "--scale_rule=up"], "without inner scales"),
    (["--recipe=fp8", "--block_w=1x16"], "without inner scales"),
    (["--recipe=nvfp4", "--block_w=1x48", "--outer=128"], "multiple of the block's 48 columns"),
    (["--recipe=tetrajet_full", "--rotate=y"], "no outlier channels"),
    (["--recipe=nvfp4", "--outlier_frac=0.1"], "no format for outlier channels"),
    (["--recipe=tetrajet_ful"], "did you mean tetrajet_full?"), (["--osci=rset"], "did you mean reset?"),
    (["--outlier_choice=nrm"], "did you mean norm?"), (["--recipe=configs/ufp4.py"], "there are bf16"),
    *((["--osci=reset", *more], "type --osci=off") for more in (
        ["--recipe=mxfp8"], ["--recipe=ufp4"], ["--recipe=quartet"], ["--recipe=nvfp4", "--rotate=y"],
        ["--recipe=tetrajet_base", "--quantizers=1,3"])),
))
def test_a_flag_that_does_not_fit_is_one_line(flags, message):
    """ Catches: a traceback, a change that is dropped in silence, a remedy for weights it does not know. """
    with pytest.raises(ConfigError) as error:
        recipe_of(parse(flags))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("bad, message", [
    (dict(y_x=Operand(rule="mine")), "rule 'mine' is unknown.*rivals/__init__.py"),
    (dict(y_x=Operand(grid="e3m0")), "grid 'e3m0' is unknown"), (dict(around=("mine",)), "around 'mine'"),
    (dict(signs=("fresh", "mine", "fresh")), "signs 'mine'"), (dict(rotate=(0, 12, 0)), "power of two"),
    (dict(y_x=Operand(), rotate=(16, 0, 0), align=True), "around the linear"),
    (dict(y_x=Operand(outer=24)), "multiple of the block's 16")])
def test_a_recipe_of_one_s_own_that_cannot_be(bad, message):
    """ Catches: a misspelt entry of a fork that fails in the middle of the first step. """
    with pytest.raises(ValueError, match=message):
        build.checked(replace(BASE, **bad))


CHANGED = (["--keep=attn.qkv,attn.out,mlp.up"], ["--rotate=y,dx,dw", "--rotate_size=32"],
           ["--block_w=16x16", "--block_x=16x16"], ["--outer=tensor", "--align=false", "--scale_rule=17/16"],
           ["--outer=row", "--block_w=16x16"],
           ["--outlier_format=bf16", "--outlier_frac=0.1", "--outlier_start=0.1", "--outlier_window=0.3"])


@pytest.mark.parametrize("flags", CHANGED, ids=" ".join)
def test_a_changed_recipe_trains(flags, go):  # noqa: F811
    """ Catches: a change that the linear cannot carry out. """
    assert "val_loss_fp4" in go("r", "--recipe=tetrajet_base", "--steps=3", *flags)[1]


def net_of(*flags: str):
    return build_net(parse(tiny("", "--recipe=tetrajet_full", *flags)), 256, CPU)


def test_kept_layers_are_plain():
    """ Catches: a kept layer that still rounds, has outlier channels or is watched; and the wrong layers. """
    net = net_of("--outlier_frac=0.1", "--n_layer=3", "--osci=reset", "--keep=mlp.down,attn.qkv",
                 "--keep_last=0.3")
    last = {f"blocks.2.{kind}" for kind in ("attn.qkv", "attn.out", "mlp.up", "mlp.down")}
    kept = last | {f"blocks.{i}.{kind}" for i in (0, 1) for kind in ("attn.qkv", "mlp.down")}
    assert {name for name, layer in net.layers.items() if not any(layer.recipe.operands)} == kept
    assert all(net.layers[name].channels.numel() == 0 for name in kept)
    assert set(net.remedy.layers) == set(net.outliers.layers) == set(net.layers) - kept
    assert net.recipe == RECIPES["tetrajet_full"]       # the run is still one of this recipe


def test_layers_have_addresses_of_their_own():
    """ Catches: two layers that draw the same noise, or a counter that is not the run's. """
    net = net_of("--n_layer=2")
    assert [layer.layer for layer in net.layers.values()] == list(range(8))
    assert all(layer.counter is net.counter for layer in net.layers.values())
    assert list(net.layers)[:2] == ["blocks.0.attn.qkv", "blocks.0.attn.out"]


# -----------------------------------------------------------------------------
# flags without effect


@pytest.mark.parametrize("recipe, flag, others", [
    ("bf16", "--keep_last=1", []), ("bf16", "--rotate=dx", []), ("bf16", "--bf16_forward=0.5", []),
    ("bf16", "--osci_tau=3", ["--osci=reset"]), ("nvfp4", "--rotate_size=16", []),
    ("nvfp4", "--rotate_size=64", ["--rotate=dx"]), ("nvfp4", "--rotate=none", []),
    ("nvfp4", "--align=true", ["--quantizers=1,3"]), ("nvfp4", "--align=true", []),
    ("nvfp4", "--outlier_format=bf16", []),
    ("tetrajet_full", "--outlier_format=bf16", ["--outlier_frac=0.1"]),
    ("nvfp4", "--bf16_forward=0.5", ["--quantizers=3"]), ("nvfp4", "--bf16_forward=0.5", []),
    ("nvfp4", "--backward=sr", ["--quantizers=1,2"]), ("nvfp4", "--backward=sr", []),
    ("nvfp4", "--block_x=1x8", ["--quantizers=2"]), ("nvfp4", "--block_x=1x8", []),
    ("mxfp4", "--block_w=1x32", []), ("nvidia", "--block_w=1x16", []),
    ("tetrajet_base", "--scale_rule=up", []), ("tetrajet_base", "--scale_rule=nearest", []),
    ("tetrajet_base", "--keep=mlp.up", ["--keep_last=1"]), ("tetrajet_base", "--keep=mlp.up", []),
    ("tetrajet_base", "--keep_last=0.3", []), ("tetrajet_full", "--outlier_frac=0.001", []),
    ("tetrajet_full", "--outlier_start=0", []),
    ("tetrajet_full", "--outlier_start=.5", ["--outlier_frac=.1"]),
    ("tetrajet_full", "--osci_track=1", ["--osci=reset"]), ("tetrajet_full", "--osci_track=1", []),
    ("tetrajet_full", "--osci_decay=0.5", ["--osci=reset"]), ("tetrajet_full", "--osci=reset", []),
])
def test_a_flag_acts_or_the_run_says_that_it_does_not(go, recipe, flag, others):  # noqa: F811
    """ Catches: an ablation that is none, and a flag said to be without effect that has one. """
    flags = [f"--recipe={recipe}", "--steps=8", "--outlier_start=0.2", "--outlier_window=0.2",
             "--osci_start=0.4", "--osci_period=0.4", "--osci_window=0.2", "--osci_tau=16", *others]
    flags = [given for given in flags if given.split("=")[0] != flag.split("=")[0]]
    without, _ = go("without", *flags)
    folder, printed = go("with", *flags, flag)
    said = [line for line in printed.splitlines() if line.startswith("without effect: ")]
    told = any(f"{flag[2:].split('=')[0]} = " in line for line in said)
    a, b = last_state(without)["model"], last_state(folder)["model"]
    same = all(torch.equal(a[key], b[key]) for key in a)
    assert told == (same and rows(without)[-1]["val_loss_fp4"] == rows(folder)[-1]["val_loss_fp4"]), said


def test_idle_looks_at_each_knob_alone():
    """ Catches: a knob that is blamed for another, and a traceback where a knob makes another one fit. """
    assert idle(parse(["--recipe=tetrajet_full", "--outlier_frac=0.1", "--osci=reset", "--osci_tau=4"])) == ""
    assert idle(parse(["--recipe=bf16", "--lr=1e-3", "--outlier_frac=0.1"])) == \
        "without effect: outlier_frac = 0.1"
    # without the block, the outer scale would not fit
    assert idle(parse(["--recipe=nvfp4", "--block_w=1x32", "--block_x=1x32", "--outer=128"])) == ""


# -----------------------------------------------------------------------------
# optimizers


@pytest.mark.parametrize("name", ["adamw", pytest.param("muon", marks=needs_muon)])
def test_each_weight_is_stepped_once(name):
    """ Catches: a weight that is never stepped, or twice; decay on the embedding; Muon on a vector. """
    net = net_of(f"--optimizer={name}", "--weight_decay=0.3")
    optimizers = make_optimizers(parse([f"--optimizer={name}", "--weight_decay=0.3"]), net.model)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    stepped = [p for group in groups for p in group["params"]]
    assert sorted(map(id, stepped)) == sorted(map(id, net.model.parameters()))
    plain = [p for group in groups if not group["weight_decay"] for p in group["params"]]
    assert len(plain) == 1 and plain[0] is net.model.embed.weight
    if name == "muon":
        assert {id(p) for p in optimizers[1].param_groups[0]["params"]} == {
            id(layer.weight) for layer in net.layers.values()}


@needs_muon
def test_muon_learns(go, shards):  # noqa: F811
    """ Catches: a rate of another scale, with which one of the two optimizers does nothing or diverges. """
    folder, _ = go("r", "--recipe=bf16", "--optimizer=muon", "--lr=1e-2", "--steps=30")
    losses = [float(row["train_loss"]) for row in rows(folder) if row["train_loss"]]
    assert losses[-1] < 0.6 * losses[0]


# -----------------------------------------------------------------------------
# devices and back ends


@pytest.fixture
def kernels(monkeypatch):
    """ kernels(cuda) -> BACKENDS with two more, as fused.py would enter them on a GPU. """
    table = Table(reference=BACKENDS["reference"])
    monkeypatch.setattr(build, "BACKENDS", table)

    def enter(device):
        if device.type == "cuda" and len(table) == 1:
            table["quick"] = Backend(None, problem=lambda r: "" if r.align else "of aligned gradients alone")
            table["native"] = Backend(None, problem=lambda r: "" if all(r.operands) else "no FP4 product")
        return "" if device.type == "cuda" else "its kernels need an NVIDIA GPU"
    monkeypatch.setattr(build, "enter_kernels", enter)
    return table


def test_the_fastest_back_end_that_can_compute_the_recipe(kernels, monkeypatch):
    """
    Catches: a recipe that no kernel knows, found out in the middle of the first step; a GPU whose products
    are wrong, found out by a loss that does not fall.
    """
    cuda, full = torch.device("cuda"), RECIPES["tetrajet_full"]

    def pick(recipe, device=cuda, **knobs):
        return pick_backend(Config(**knobs), device, recipe)
    with pytest.raises(ConfigError, match="need an NVIDIA GPU"):
        pick(full, CPU, backend="native")
    told = [""]
    fused = SimpleNamespace(check_native=lambda recipe, device: told[0])
    monkeypatch.setitem(sys.modules, "fused", fused)
    assert pick(full) == "native" and pick(full, CPU) == "reference"
    assert pick(only(full, [1, 2, 4])) == "quick" and pick(Recipe(y_x=Operand(), align=False)) == "reference"
    assert pick(Recipe()) == "reference" and pick(full, backend="quick") == "quick"
    # what runs after the switch has to run, too
    assert pick(full, bf16_forward=0.5) == "quick"
    with pytest.raises(ConfigError, match="no FP4 product"):
        pick(full, backend="native", bf16_forward=0.5)
    told[0] = "dX is off by 1e-2 on this GPU"
    with pytest.raises(ConfigError, match="dX is off .*type --backend=emulate"):
        pick(full)


def test_why_there_are_no_kernels(monkeypatch):
    """ Catches: a traceback of an import where one line says what to install; AMD taken for NVIDIA. """
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "not cpu" in enter_kernels(CPU) and "8.0, which a GPU has not" in enter_kernels(cuda)
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert "not AMD" in enter_kernels(cuda)
    monkeypatch.undo()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(build, "version", lambda _: "3.2.0")
    assert "Triton 3.6, not 3.2.0: type pip install -U torch triton" in enter_kernels(CPU)
    monkeypatch.setattr(build, "version", lambda _: "3.9.0+git")
    monkeypatch.setitem(sys.modules, "fused", None)
    assert "Triton 3.9.0+git cannot be used" in enter_kernels(CPU)
    # another test may have entered more
    monkeypatch.setattr(build, "BACKENDS", Table(reference=BACKENDS["reference"]))
    with pytest.raises(ConfigError, match="cannot be used"):
        pick_backend(Config(backend="emulate"), CPU, BASE)

    def missing(name):
        raise build.PackageNotFoundError(name)
    monkeypatch.setattr(build, "version", missing)
    assert enter_kernels(CPU) == "Triton is not installed: type pip install triton"


def test_a_device_that_is_not_there_or_does_not_work(monkeypatch):
    """ Catches: a traceback of eighteen lines on a GPU that is too old for this PyTorch. """
    assert pick_device(Config(device="cpu")) == CPU
    if not torch.backends.mps.is_available():
        with pytest.raises(ConfigError, match="type --device=auto"):
            pick_device(Config(device="mps"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(build, "take_gpu", lambda: None)

    def zeros(*_, **__):
        raise RuntimeError("CUDA error: no kernel image is available\nCompile with TORCH_USE_CUDA_DSA")
    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(ConfigError, match="no kernel image is available.*type --device=cpu") as error:
        pick_device(Config())
    assert "\n" not in str(error.value)


def test_a_vocabulary_smaller_than_the_data_s_is_refused():
    """ Catches: ids beyond the embedding, an error of an index in the middle of a step. """
    assert net_of().model.embed.weight.shape[0] == 256      # and up to a multiple of 128:
    assert build_net(Config(), 257, CPU).model.embed.weight.shape[0] == 384
    with pytest.raises(ConfigError, match="type --vocab_size=0"):
        net_of("--vocab_size=100")


def test_what_is_about_the_forward_pass_goes_with_it():
    """ Catches: averis without its split of dY, or Quartet's mask of a forward pass that clips nothing. """
    left = {name: only(RECIPES[name], [3, 4, 5, 6]).around for name in ("averis", "quartet", "hcp")}
    assert left == {"averis": ("averis",), "quartet": (), "hcp": ()}

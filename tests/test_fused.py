"""
The back ends of fused.py: the linear of quant.py by kernels, against the reference.

On a GPU the kernels run there; without one, in Triton's interpreter, which conftest.py switches on and which
takes a second for a linear. In float32 the operands of both are the same bits and so are their products; only
Y with outlier channels is one sum here and two there.
"""
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import rivals  # noqa: F401
from build import altered, only
from codes import quantize
from config import Config
from quant import BACKENDS, ROW, TENSOR, Operand, Recipe
from recipes import MXFP8, NEAREST, RECIPES, STOCHASTIC
from test_linear import CHANNELS, layer_of, randn, reference, run

pytest.importorskip("triton", minversion="3.6")
import fused                # noqa: E402
import rivals.kernels       # noqa: E402, F401

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BASE, FULL, RELEASED = (RECIPES[f"tetrajet_{name}"] for name in ("base", "full", "released"))
HALF_ULP = 2.0**-24         # of float32, relative


def layer(recipe: Recipe, backend: str, K: int = 21, N: int = 19, outliers: bool = False):
    """ A layer on the GPU, if there is one, and its twin of the reference, on the CPU. """
    one, twin = (layer_of(recipe, K, N, channels=CHANNELS if outliers else None, backend=b)
                 for b in (backend, "reference"))
    one.counter.state = one.counter.state.to(DEVICE)
    return one.to(DEVICE), twin


def step(linear, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    return {k: v.cpu() for k, v in run(linear, x.to(DEVICE), dy.to(DEVICE)).items()}


def exact(a: Tensor, b: Tensor) -> Tensor:
    return a.double() @ b.double().t()


def sizes(a: Tensor, b: Tensor) -> Tensor:
    return exact(a.abs(), b.abs())


def assert_close(got: dict, twin, x: Tensor, dy: Tensor, names=("y", "dx", "dw")):
    """
    They are the products of the reference's operands, but for the error of a float32 sum: each of its terms
    meets one rounding for each addition, and some for the scales and the result. A GPU's tensor cores
    truncate: twice that.
    """
    wanted, bound = (reference(twin, x, dy, multiply) for multiply in (exact, sizes))
    (T, K), N = x.shape, twin.out_features
    for name, terms in (("y", K + len(CHANNELS)), ("dx", N + 32), ("dw", T + 32)):
        error = (got[name].double() - wanted[name]).abs()
        limit = bound[name] * HALF_ULP * (terms + 8) * (2 if DEVICE == "cuda" else 1)
        assert name not in names or (error <= limit).all(), f"{name}: {(error / limit).max():.3g}"


# -----------------------------------------------------------------------------
# the step of every recipe

# in the interpreter a rotation of 128 takes a minute, and so do both back ends for every recipe. What packed
# has beyond emulate are codes of Q4, Q6 and X8; what emulate has beyond packed are values of these
RECIPE_OF = {name: recipe for name, recipe in RECIPES.items() if name != "bf16"}
RECIPE_OF["per row"] = PER_ROW = altered(FULL, Config(outer="row"))
if DEVICE == "cpu":
    RECIPE_OF["quartet2"] = replace(RECIPES["quartet2"], rotate=(0, 16, 16))
STEPS = [(name, "packed") for name in RECIPE_OF] + [
    (name, "emulate") for name in RECIPE_OF if DEVICE == "cuda" or name == "tetrajet_full"]


@pytest.mark.parametrize("name, backend", STEPS)
def test_each_recipe(name, backend):
    """
    Catches: a side that gets another operand's format, stream, signs or rotation; alignment with the wrong
    tensor; a code or scale of another format read by the wrong decoder, half of a byte that goes to the
    neighbour, a scale of another block or square, an operand without codes that is taken for one with.
    """
    recipe = RECIPE_OF[name]
    assert BACKENDS[backend].problem(recipe) == ""
    linear, twin = layer(recipe, backend)
    x, dy = randn(20, 21), randn(20, 19, seed=1)
    got = step(linear, x, dy)
    twin.counter.state = twin.counter.state.to(DEVICE)
    wanted = step(twin.to(DEVICE), x, dy)
    for kind in ("y", "dx", "dw"):
        assert torch.equal(got[kind], wanted[kind]), kind


MIXED = Recipe(NEAREST, None, STOCHASTIC, STOCHASTIC, None, STOCHASTIC, align=False, outlier=MXFP8,
               rotate=(16, 0, 16))


@pytest.mark.parametrize("recipe, T, backend", [
    (FULL, 1, "emulate"), (FULL, 130, "packed"), (replace(FULL, align=False), 20, "packed"),
    (PER_ROW, 20, "packed"),
    (replace(RELEASED, outlier="bf16"), 20, "emulate"), (MIXED, 20, "emulate"),
    (RECIPES["hcp"], 20, "packed"),
    (only(FULL, [1]), 20, "emulate"), (only(FULL, [3]), 20, "emulate"), (only(FULL, [4]), 20, "emulate"),
    (only(FULL, [6]), 20, "packed")])
def test_outlier_channels(recipe, T, backend):
    """
    Catches: outlier columns in the wrong place of the wider operands, or rounded where their operand is off;
    rows of W^T that are zeros or were rounded from W in place of W8; padding of a ragged axis that is not
    zero; an operand that is taken from its rounded twin although it is off; a rotation that one of two has.
    """
    linear, twin = layer(recipe, backend, outliers=True)
    x, dy = randn(T, 21), randn(T, 19, seed=1)
    got, wanted = step(linear, x, dy), run(twin, x, dy)
    if DEVICE == "cpu":
        assert torch.equal(got["dx"], wanted["dx"]) and torch.equal(got["dw"], wanted["dw"])
    # the two products of the reference's y are one here
    size = sizes(x, twin.weight.detach()).max() + sizes(dy, dy).max()
    for name in wanted:
        assert (got[name] - wanted[name]).abs().max() <= 128 * HALF_ULP * size, name


def test_nan_stays_with_its_block():
    """ Catches: a NaN that codes lose, or that reaches rows and channels which share no scale with it. """
    linear, twin = layer(only(FULL, [1, 6]), "packed", outliers=True)
    x, dy = randn(20, 21), randn(20, 19, seed=1)
    x[5, 3], x[:, 13], x[:, 14] = torch.nan, 2.0**-101, 0
    got, wanted = step(linear, x, dy), run(twin, x, dy)
    for name in wanted:
        assert torch.equal(got[name].isnan(), wanted[name].isnan()), name
    assert got["y"].isnan().any() and got["dw"].isnan().any() and got["dx"].isfinite().all()


def test_bf16():
    """ Catches: operands rounded to bf16 twice, or a master weight that is cast before it is rounded. """
    linear, twin = layer(FULL, "emulate", K=40, N=48, outliers=True)
    x, dy = randn(24, 40, dtype=torch.bfloat16), randn(24, 48, seed=1, dtype=torch.bfloat16)
    got = {k: v.float() for k, v in step(linear, x, dy).items()}

    def rounded(multiply):
        return lambda a, b: multiply(a.bfloat16(), b.bfloat16())
    for name, terms in (("y", 45), ("dx", 48), ("dw", 32)):
        wanted, size = (reference(twin, x, dy, rounded(m))[name] for m in (exact, sizes))
        error = (got[name].double() - wanted).abs()
        assert (error <= size * HALF_ULP * 2 * terms + wanted.abs() * 2.0**-8 * 1.01).all(), name


SCALED, SQUARE = Operand(outer=TENSOR), Operand(block=(16, 16), outer=TENSOR)
PER_TENSOR = Recipe(SCALED, SQUARE, SCALED, SQUARE, SCALED, SCALED, align=False)


@pytest.mark.parametrize("recipe, T, outliers", [
    (FULL, 20, True), (PER_TENSOR, 20, False), (PER_ROW, 150, True)])
def test_native(recipe, T, outliers):
    """
    Catches: codes or scales of one operand read as another's, memory cut at the wrong byte, the scales of
    squares that are not repeated for each of their rows, an MXFP8 product that is left out or added twice.
    """
    linear, twin = layer(recipe, "native", outliers=outliers)
    x, dy = randn(T, 21), randn(T, 19, seed=1)
    assert_close(step(linear, x, dy), twin, x, dy)


@pytest.mark.parametrize("recipe, backend", [(FULL, "emulate"), (PER_TENSOR, "native")])
def test_empty_batch(recipe, backend):
    """ Catches: a launch without programs, or a look at the scale of an operand that has no rows. """
    linear, _ = layer(recipe, backend, outliers=bool(recipe.outlier))
    out = step(linear, torch.empty(0, 21), torch.empty(0, 19))
    assert out["y"].shape == (0, 19) and out["dx"].shape == (0, 21) and (out["dw"] == 0).all()


# -----------------------------------------------------------------------------
# what is kept, asked for, compiled and computed again


def test_what_is_kept():
    """ Catches: values kept beside codes; codes of more than 4.75 bits a value, or 8.25 in MXFP8. """
    x, w, channels = torch.empty(128, 128), torch.empty(112, 128), torch.arange(0, 128, 4)

    def kept(recipe: Recipe, backend: str, save: bool = True) -> list[int]:
        forms = fused.forms_of(backend, recipe.text)
        stored = fused.for_backward(forms, x, w, channels, save, torch.bfloat16)
        return [s.memory.numel() * s.memory.element_size() * 8 for s in stored]
    coded = [128 * (112 * 4.5 + 32), 128 * 128 * 4.75, 32 * 128 * 8.25]
    assert kept(FULL, "packed") == kept(FULL, "native") == coded
    assert kept(FULL, "emulate") == [128 * 112 * 16, 128 * 128 * 16, 32 * 128 * 16]
    assert kept(only(FULL, [1, 2, 3, 4, 5]), "packed") == [coded[0], 128 * 128 * 16, 32 * 128 * 16]
    assert kept(RECIPES["fp8"], "packed")[:2] == [128 * 112 * 16, 128 * 128 * 16]
    assert kept(FULL, "packed", save=False) == [0, 0, 0]


def test_gradients_nobody_asked_for():
    """ Catches: an operand that is only made for one gradient, noise that changes with what is asked for. """
    linear, _ = layer(only(BASE, [3]), "emulate")
    x, dy = randn(20, 21).to(DEVICE), randn(20, 19, seed=1).to(DEVICE)
    expected = run(linear, x, dy)
    linear.zero_grad()
    linear(x).backward(dy)
    assert x.grad is None and torch.equal(linear.weight.grad, expected["dw"])
    linear.weight.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    linear.weight.grad = None
    linear(leaf).backward(dy)
    assert linear.weight.grad is None and torch.equal(leaf.grad, expected["dx"])
    with torch.no_grad():
        y = linear(x)
    assert not y.requires_grad and torch.equal(y, expected["y"])


@pytest.mark.parametrize("recipe, backend, save", [(only(FULL, [6]), "packed", True),
                                                   (only(BASE, [3]), "emulate", False)])
def test_the_compiler_is_told_the_right_shapes(recipe, backend, save):
    """ Catches: shapes or types that the compiler plans with and the kernels do not return. """
    x, w, dy = (randn(*shape).to(DEVICE) for shape in ((25, 32), (19, 32), (25, 19)))
    channels = CHANNELS[: 5 if recipe.outlier else 0].to(DEVICE)
    at = channels, torch.zeros(4, dtype=torch.int64, device=DEVICE), 3, backend, recipe.text
    torch.library.opcheck(fused.linear_op, (x, w, *at, save, torch.bfloat16), test_utils="test_faketensor")
    if save:
        kept = fused.linear_op(x, w, *at, save, torch.float32)[1:]
        torch.library.opcheck(fused.linear_backward_op, (dy, *kept, *at, True, False, 32),
                              test_utils="test_faketensor")


def test_compiled_and_recomputed():
    """
    Catches: a graph break at the kernels, noise that the compiler draws elsewhere, a recipe or a step that is
    frozen into a compiled program; and a forward pass that is run a second time, by activation
    checkpointing, with other noise than the first.
    """
    linear, _ = layer(only(BASE, [3]), "packed")
    x, dy = randn(20, 21), randn(20, 19, seed=1)
    expected = step(linear, x, dy)
    linear.zero_grad()
    leaf = x.to(DEVICE).requires_grad_()
    checkpoint(linear, leaf, use_reentrant=False).backward(dy.to(DEVICE))
    assert torch.equal(leaf.grad.cpu(), expected["dx"])
    assert torch.equal(linear.weight.grad.cpu(), expected["dw"])
    torch._dynamo.reset()
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    got = step(compiled, x, dy)
    assert all(torch.equal(got[k], expected[k]) for k in expected)
    linear.counter.set(6)
    linear.recipe = only(BASE, [5])
    expected, got = step(linear, x, dy), step(compiled, x, dy)
    assert all(torch.equal(got[k], expected[k]) for k in expected)


# -----------------------------------------------------------------------------
# what else the back ends give


@pytest.mark.parametrize("op", [
    NEAREST, SQUARE, PER_ROW.y_w, MXFP8, Operand(rule="3/4", scale="e8m0", block=(1, 32), outer=TENSOR)])
def test_codes_of_a_weight(op):
    """ Catches: codes beside those of codes.quantize; scales that hold on to more memory than they need. """
    w = randn(37, 50).to(DEVICE)
    for got, wanted in zip(*(vars(f(w, op)).values() for f in (BACKENDS["emulate"].codes, quantize))):
        if isinstance(got, Tensor):
            assert got.dtype == wanted.dtype and torch.equal(got, wanted) and got.is_contiguous()
            assert got.untyped_storage().nbytes() == got.nbytes


def test_native_checks_itself(monkeypatch):
    """ Catches: a check that passes with a product or a code that is wrong, or fails with right ones. """
    device, shape = torch.device(DEVICE), (20, 40, 19)
    assert fused.check_native(BASE, device, shape) == ""
    right = fused.nvfp4_gemm
    monkeypatch.setattr(fused, "nvfp4_gemm", lambda *args: right(*args) * 1.001)
    assert "Y" in fused.check_native(BASE, device, shape)
    monkeypatch.setattr(fused, "round_pair", lambda *args, **kwargs: None)
    assert "rounding" in fused.check_native(BASE, device, shape)


@pytest.mark.parametrize("capability, words", [((9, 0), "come with Blackwell"), ((10, 0), ""), ((10, 3), ""),
                                               ((12, 0), ""), ((12, 1), "come with Blackwell")])
def test_one_function_knows_blackwell(monkeypatch, capability, words):
    """ Catches: DGX Spark, 12.1, taken for 12.0, whose machine code is another. train and bench ask it. """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    assert words in (said := fused.native_problem(BASE)) and bool(words) == bool(said)


def test_what_each_back_end_can_do():
    """ Catches: a recipe that is refused for nothing, and one without a kernel that is taken for another. """
    native = {"tetrajet_base", "tetrajet_full", "tetrajet_released", "nvfp4", "nvfp4_sr", "quartet2",
              "nvidia", "four_over_six", "fp4_all_the_way", "averis", "hcp"}
    blackwell = DEVICE == "cpu" or fused.native(torch.device("cuda"))
    for name, recipe in RECIPES.items():
        assert fused.problem(recipe) == "", name
        assert (fused.native_problem(recipe) == "") == (blackwell and name in native), name
    assert fused.problem(PER_ROW) == "" and (fused.native_problem(PER_ROW) == "") == blackwell
    for recipe, words in [
            (replace(BASE, y_x=Operand(outer=256)), "Q1"), (replace(BASE, y_w=Operand(rule="mine")), "Q2"),
            (replace(BASE, dx_dy=Operand(block=(1, 8))), "Q3"), (replace(BASE, rotate=(0, 256, 0)), "Q3"),
            (replace(FULL, dx_w=SQUARE), "Q4"), (replace(FULL, outlier=SCALED), "outlier"),
            (replace(FULL, outlier=Operand(outer=ROW)), "outlier channels: no kernel for a scale of each")]:
        assert words in fused.problem(recipe) and "\n" not in fused.problem(recipe)
    if blackwell:
        for recipe, words in [(only(BASE, [1, 2, 3, 4, 6]), "Q5"), (replace(BASE, y_w=MXFP8), "Q2"),
                              (replace(FULL, outlier="bf16"), "MXFP8"), (replace(BASE, y_x=SCALED), "Y")]:
            assert words in fused.native_problem(recipe), words
    # the last one that can compute a recipe is taken
    order = ["packed", "emulate", "native"]
    assert [name for name in BACKENDS if name in order] == order

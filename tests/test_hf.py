""" Into and out of Hugging Face's format: bit for bit there and back, and one line per mistake. """
import json
import math
import os
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import torch

import checkpoint
import data
import train
from codes import Quantized
from config import ConfigError
from eval import load_run, val_losses
from quant import TENSOR, Operand, fake_quantize

st = pytest.importorskip("safetensors.torch")
from tools import hf    # noqa: E402  needs that package

EPS = torch.finfo(torch.float32).eps
# widths are multiples of 16, as NVFP4's packing wants them
SIZES = "--n_layer=2 --d_model=48 --n_head=2 --d_ff=32".split()
TINY = [*SIZES, *("--seq_len=32 --batch_tokens=128 --eval_tokens=256 --sample_tokens=0 --device=cpu "
                  "--backend=reference").split()]


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """ A folder of token shards: a few words over and over. """
    folder, rng = tmp_path_factory.mktemp("shards"), np.random.default_rng(0)
    words = [bytes(rng.integers(97, 123, n, dtype=np.uint8)) + b" " for n in rng.integers(2, 6, 12)]
    for name, n in (("a_train_000001", 3000), ("a_val_000000", 300)):
        text = b"".join(words[i] for i in rng.integers(0, 12, n))
        data.write_shard(folder / f"{name}.bin", np.frombuffer(text, np.uint8).astype(np.uint16))
    (folder / "meta.json").write_text('{"encoding": "bytes"}')
    return folder


@pytest.fixture(scope="module")
def run(request, shards, tmp_path_factory) -> Path:
    """ A run of tetrajet_full in which OutControl has chosen channels -> its folder. """
    out, block = tmp_path_factory.mktemp("out"), getattr(request, "param", "olmo2")
    assert not train.main([*TINY, f"--data={shards}", f"--out={out}", "--name=r", "--recipe=tetrajet_full",
                           f"--block={block}", "--steps=6", "--outlier_frac=0.1", "--outlier_start=0.2",
                           "--outlier_window=0.5"])
    return out / "r"


both_blocks = pytest.mark.parametrize("run", ["olmo2", "llama"], indirect=True)


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    """ exported("hf") -> the folder that is written, and what is said. Each is made once. """
    made = {}

    def folder(kind: str, *dtype: str) -> tuple[Path, str]:
        if (kind, *dtype) not in made:
            to, said = tmp_path_factory.mktemp("export") / "x", []
            net, cfg, corpus, _ = load_run(run, device="cpu")
            hf.export(net, cfg, corpus, kind, to, *dtype, say=said.append)
            made[(kind, *dtype)] = to, "\n".join(said)
        return made[(kind, *dtype)]
    return folder


def load(run):
    """ The run's net without rounding, and tokens to feed it. """
    net, cfg, corpus, _ = load_run(run, device="cpu")
    for layer in net.layers.values():
        layer.enabled = False
    return net, corpus.val.sequences(0, 2, cfg.seq_len, 0, 0)[:, :-1]


@torch.no_grad()
def logits(model, x):
    y = model(x)
    return y if isinstance(y, torch.Tensor) else y.logits


def mistake(capsys, *args) -> str:
    """ The one line with which the command ends with code 2. """
    capsys.readouterr()
    assert hf.main([str(arg) for arg in args]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    return err


# -----------------------------------------------------------------------------
# out


@both_blocks
def test_logits_equal_transformers(run, exported):
    """
    Catches: q, k, v in another order, gate and up exchanged, norms swapped, another architecture, theta or
    eps in config.json. The two add in other orders, so they differ by a few eps of the largest logit.
    """
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported("hf")[0], dtype=torch.float32)
    net, x = load(run)
    a, b = logits(net.model, x), logits(theirs, x)
    assert a.shape == b.shape and (a - b).abs().max() <= 20 * EPS * b.abs().max()
    assert theirs.config.eos_token_id == 256


def test_logits_in_bf16(run, exported):
    """ Catches: a dtype that the file does not have, and weights that are not ours rounded to bf16. """
    transformers = pytest.importorskip("transformers")
    folder = exported("hf", "bfloat16")[0]
    assert transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == torch.bfloat16
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    net, x = load(run)
    for p in net.model.parameters():
        p.data.copy_(p.bfloat16())
    a, b = logits(net.model, x), logits(theirs, x)
    assert (a - b).abs().max() <= 20 * EPS * b.abs().max()


def test_the_folder_says_what_it_is(exported):
    """ Catches: padding of the vocabulary left unsaid, a file that only its owner can read. """
    folder, text = exported("hf")
    assert "vocab_size 384" in text and "257 ids" in text and "127 rows of padding" in text
    assert "before rounding" in text
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json"}
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


def test_the_export_command(run, exported, tmp_path, capsys):
    """ Catches: a command that writes something else than export(), and one that touches what is there. """
    command = ["export", run, tmp_path / "x", "--device=cpu"]
    assert hf.main([str(arg) for arg in [*command, "--dtype=bfloat16"]]) == 0
    assert "Olmo2ForCausalLM" in capsys.readouterr().out
    for path in exported("hf", "bfloat16")[0].iterdir():
        assert (tmp_path / "x" / path.name).read_bytes() == path.read_bytes()
    assert "no empty folder" in mistake(capsys, *command)
    assert "--dtype" in mistake(capsys, *command, "--format=nvfp4", "--dtype=float32")
    assert "no checkpoint" in mistake(capsys, "export", tmp_path / "x", tmp_path / "y", "--device=cpu")
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("fault", ["disk", "nan"])
def test_a_failure_leaves_nothing(run, tmp_path, capsys, monkeypatch, fault):
    """ Catches: half a folder under the name that was asked for, a temporary one left behind, and a NaN in a
    file that other programs trust. """
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    def spoilt(*args, **kwargs):
        loaded = load_run(*args, **kwargs)
        loaded[0].model.norm.weight.data[3] = math.nan
        return loaded
    monkeypatch.setattr(*{"disk": (hf.shutil, "copymode", full), "nan": (hf, "load_run", spoilt)}[fault])
    said = mistake(capsys, "export", run, tmp_path / "x", "--device=cpu")
    assert {"disk": "No space left", "nan": "norm.weight"}[fault] in said and not os.listdir(tmp_path)


# -----------------------------------------------------------------------------
# NVFP4


def weight(scale: float = 0.02, shape=(96, 256)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)) * scale


@pytest.mark.parametrize("scale", [0.02, 1.0, 37.0, 1e-20, 1e20])
def test_the_divisor_is_a_power_of_two_that_fits(scale):
    """
    Catches: the inverse stored for the scale, scales that clip or waste a binade, values that bf16 cannot
    hold. The double of a divisor would put the largest scale beyond 448.
    """
    w = weight(scale)
    q, divisor = hf.pack_weight("x", w)
    assert math.frexp(divisor)[0] == 0.5
    assert 448 * 6 / 2 < float(w.abs().max()) * divisor <= 448 * 6
    back = hf.unpack_weight((q, divisor))
    assert torch.equal(back.bfloat16().float(), back)
    # the format's error is some 9e-3 of the energy
    assert (back - w).double().square().sum() < 0.02 * w.double().square().sum()


def test_a_power_of_two_costs_nothing():
    """ Catches: a divisor that costs accuracy against the outer scale that quant.py would take. """
    def db(w, v):
        return 10 * math.log10(w.double().square().sum() / (w - v).double().square().sum())
    for factor in (1, 1.2, 1.5, 1.9):
        w = weight(0.02 * factor)
        a, b = fake_quantize(w, Operand(outer=TENSOR)), hf.unpack_weight(hf.pack_weight("x", w))
        assert abs(db(w, a) - db(w, b)) < 0.15


def test_odd_weights():
    """ Catches: a division by the largest of all zeros, and blocks that would reach into the next row. """
    q, divisor = hf.pack_weight("x", torch.zeros(4, 32))
    assert divisor == 1 and not hf.unpack_weight((q, divisor)).any()
    with pytest.raises(ConfigError, match="--format=hf"):
        hf.pack_weight("blocks.0.mlp.down", torch.ones(48, 40))


def packed_files(folder):
    """ Module of theirs -> its three tensors by name. """
    modules = {}
    for name, tensor in st.load_file(folder / "model.safetensors").items():
        module, _, part = name.rpartition(".")
        if part != "weight":
            modules.setdefault(module, {})[part] = tensor
    return modules


def test_what_is_packed_is_what_was_rounded(run, exported):
    """
    Catches: nibbles exchanged, scales by column, rows of q, k, v or of gate and up in another order, and
    layers that vLLM fuses with different divisors, of which it keeps one. Read back as the format says.
    """
    net, _ = load(run)
    modules, names = packed_files(exported("nvfp4")[0]), hf.module_names(load_run(run, device="cpu")[1])
    assert len(modules) == 14
    grid = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6, -0.0, -.5, -1, -1.5, -2, -3, -4, -6])
    for ours, layer in net.layers.items():
        parts = [modules[theirs] for theirs in names[ours]]
        assert len({float(part["weight_global_scale"]) for part in parts}) == 1
        rows = []
        for part in parts:
            assert part["weight_scale"].dtype == torch.float8_e4m3fn
            assert part["weight_global_scale"].shape == (1,)
            codes = torch.stack((part["weight_packed"] & 15, part["weight_packed"] >> 4), -1).flatten(1)
            scale = (part["weight_scale"].float() / part["weight_global_scale"]).repeat_interleave(16, 1)
            rows.append(grid[codes.long()] * scale)
        assert torch.equal(torch.cat(rows), hf.unpack_weight(hf.pack_weight(ours, layer.weight)))


def test_the_package_reads_what_we_wrote(exported):
    """
    Catches: a global scale that is not inverted, nibbles exchanged, a config that the package does not know.
    Its own decompressor gives our values, bit for bit.
    """
    ct = pytest.importorskip("compressed_tensors")
    folder, _ = exported("nvfp4")
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = ct.quantization.QuantizationConfig.model_validate(said)
    scheme = config.config_groups["group_0"]
    assert scheme.input_activations is None and scheme.output_activations is None
    reader = ct.compressors.BaseCompressor.get_value_from_registry(config.format)
    for parts in packed_files(folder).values():
        assert set(parts) == set(reader.compression_param_names(scheme))
        N, half = parts["weight_packed"].shape
        code = torch.stack((parts["weight_packed"] & 15, parts["weight_packed"] >> 4), -1).flatten(1)
        ours = Quantized(code, parts["weight_scale"].view(torch.uint8), None, hf.PACKED)
        value = reader.decompress(dict(parts), scheme)["weight"]
        assert torch.equal(value.float(), hf.unpack_weight((ours, float(parts["weight_global_scale"]))))


def as_exported(net):
    """ Give a net the weights that its NVFP4 export holds. """
    master = {name: layer.weight.detach().clone() for name, layer in net.layers.items()}
    for p in net.model.parameters():
        p.data.copy_(p.bfloat16())
    for name, layer in net.layers.items():
        layer.weight.data.copy_(hf.unpack_weight(hf.pack_weight(name, master[name])))
    return net


@both_blocks
def test_transformers_computes_with_the_packed_weights(run, exported):
    """ Catches: a folder of good tensors that transformers does not take for a quantized model. """
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported("nvfp4")[0], dtype="auto")
    assert theirs.dtype == torch.bfloat16
    net, x = load(run)
    logits(theirs, x)                           # unpacks the weights, to bf16, which holds them exactly
    torch.nn.Module.float(theirs)               # their own float() refuses packed models
    a, b = logits(as_exported(net).model, x), logits(theirs, x)
    assert (a - b).abs().max() <= 20 * EPS * b.abs().max()


def test_the_table_of_costs(run, exported):
    """ Catches: rows exchanged, a loss of other weights than those in the file, channels not counted. """
    text = exported("nvfp4")[1]
    table = {line[:20].strip(): line[20:].split() for line in text.splitlines()}
    net, cfg, corpus, _ = load_run(run, device="cpu")
    losses = val_losses(net, corpus, cfg)
    assert table["recipe's forward"] == [f"{losses['val_loss_fp4']:.4f}"]
    assert table["not rounded"] == [f"{losses['val_loss_bf16']:.4f}"]
    channels = sum(layer.channels.numel() for layer in net.layers.values())
    assert f"{channels} input channels that OutControl keeps in FP8 become FP4" in text

    master = {name: layer.weight.detach().clone() for name, layer in net.layers.items()}

    def db(weights):
        noise = sum((master[name] - weights[name]).double().square().sum() for name in master)
        return 10 * math.log10(sum(w.double().square().sum() for w in master.values()) / noise)
    with torch.no_grad():
        ours = {name: hf.recipe_weight(layer) for name, layer in net.layers.items()}
    loss = val_losses(as_exported(net), corpus, cfg)["val_loss_bf16"]
    theirs = {name: layer.weight.detach() for name, layer in net.layers.items()}
    assert table["recipe's weights"][0] == f"{db(ours):.2f}"
    assert table["as exported"] == [f"{db(theirs):.2f}", f"{loss:.4f}"] and db(theirs) < db(ours)


def test_recipe_weight_is_what_the_forward_pass_multiplies_with(run):
    """ Catches: another rounding than the recipe's, FP8 columns in wrong places, a recipe left changed. """
    net, _ = load(run)
    for layer in net.layers.values():
        layer.enabled, before = True, layer.recipe
        with torch.no_grad():
            w, channels = hf.recipe_weight(layer), layer.channels
        assert layer.split and layer.recipe is before
        wanted = fake_quantize(layer.weight.detach().index_fill(1, channels, 0.0), before.y_w)
        kept = fake_quantize(layer.weight.detach()[:, channels], before.outlier)
        assert torch.equal(w, wanted.index_copy(1, channels, kept))


# -----------------------------------------------------------------------------
# the tokenizer

PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"     # GPT-2's


def small_bpe(text: str, merges: int) -> tiktoken.Encoding:
    """ GPT-2's kind of encoding with a few merges: the most frequent pair of neighbours becomes a token. """
    rank = {bytes([255 - i]): i for i in range(256)}
    words = [[bytes([b]) for b in word.encode()] for word in text.replace(" ", "\n ").split("\n") if word]
    for _ in range(merges):
        pairs = Counter(pair for word in words for pair in zip(word, word[1:]))
        a, b = max(pairs, key=lambda pair: (pairs[pair], pair))
        rank[a + b] = len(rank)
        for word in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == (a, b):
                    word[i:i + 2] = [a + b]
                i += 1
    return tiktoken.Encoding("small", pat_str=PATTERN, mergeable_ranks=rank,
                             special_tokens={data.EOT: len(rank)})


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_the_tokenizer_gives_the_same_ids(name):
    """ Catches: merges in another order, a letter per byte that is off by one, a blank put in front. """
    tokenizers = pytest.importorskip("tokenizers")
    text = Path(data.__file__).read_text(encoding="utf-8")
    encoding = data.load_encoding("bytes") if name == "bytes" else small_bpe(text[:6000], 150)
    files = hf.tokenizer_files(SimpleNamespace(encoding_name=name, encoding=encoding), 128)
    theirs = tokenizers.Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
    assert theirs.get_vocab_size() == encoding.n_vocab and theirs.token_to_id(data.EOT) == encoding.eot_token
    draw = random.Random(0)
    letters = " \n\t\r'sdmtlvre.,0129abcXYZé🙂中\u00a0\u2003½²ßПр<|>_-\x00\x85\u200b"
    texts = [text.replace(data.EOT, "")] + ["".join(draw.choices(letters, k=draw.randrange(1, 40)))
                                            for _ in range(1000)]
    for sample in texts:
        ids = theirs.encode(sample).ids
        assert ids == encoding.encode_ordinary(sample) and theirs.decode(ids) == sample


def test_transformers_loads_the_tokenizer(exported):
    """ Catches: a tokenizer class that is gone, an end of text that is no special token. """
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(exported("hf")[0])
    assert theirs("aé<|endoftext|>").input_ids == [97, 195, 169, 256]
    assert theirs.eos_token_id == theirs.bos_token_id == 256


def test_other_encodings_have_none():
    with pytest.raises(data.DataError, match="cl100k_base"):
        hf.tokenizer_files(SimpleNamespace(encoding_name="cl100k_base"), 128)


# -----------------------------------------------------------------------------
# in


def weights_of(folder) -> dict:
    return checkpoint.newest(folder)[1]["model"]


def sharded(folder, to):
    """ The same model in two files with an index. """
    tensors = st.load_file(folder / "model.safetensors")
    to.mkdir()
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    where = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(where.values()):
        st.save_file({name: tensors[name] for name in tensors if where[name] == file}, to / file)
    (to / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return to


@both_blocks
@pytest.mark.parametrize("dtype, split", [("float32", False), ("float32", True), ("bfloat16", False)])
def test_there_and_back_is_bit_exact(run, exported, tmp_path, dtype, split):
    """ Catches: rows of q, k, v or of gate and up put back in another order, a weight left out. """
    folder = exported("hf", dtype)[0]
    hf.import_model(sharded(folder, tmp_path / "s") if split else folder, tmp_path / "in")
    before, after = weights_of(run), weights_of(tmp_path / "in")
    assert {name: len(w) for name, w in after.items() if name.endswith(".channels")} == {
        f"{name}.channels": 0 for name in load(run)[0].layers}
    after = {name: w for name, w in after.items() if not name.endswith(".channels")}
    assert after.keys() == {name for name, p in load(run)[0].model.named_parameters()}
    for name, w in after.items():
        assert w.dtype == torch.float32 and torch.equal(w, before[name].to(hf.DTYPES[dtype]).float()), name


@both_blocks
def test_a_run_starts_from_it(run, exported, shards, tmp_path, capsys):
    """ Catches: a checkpoint that train.py does not take, flags that it is told to take and does not, and a
    first loss of random weights. """
    assert hf.main(["import", str(exported("hf")[0]), str(tmp_path / "in")]) == 0
    told = capsys.readouterr().out.splitlines()[-1].replace("--data=DIR", f"--data={shards}").split()
    assert told[:2] == ["python", "train.py"] and f"--init_from={tmp_path / 'in'}" in told
    sizes = {flag.split("=")[0] for flag in told}
    flags = [flag for flag in TINY if flag.split("=")[0] not in sizes]
    assert not train.main([*flags, *told[2:], f"--out={tmp_path}", "--name=n", "--recipe=tetrajet_base",
                           "--steps=2"])
    rows = (tmp_path / "n" / "metrics.csv").read_text().splitlines()
    first = float(dict(zip(rows[0].split(","), rows[1].split(",")))["train_loss"])
    net, cfg, corpus, _ = load_run(run, device="cpu")
    assert abs(first - val_losses(net, corpus, cfg)["val_loss_bf16"]) < 0.2 < math.log(384) - first


def change(folder, **values):
    """ Rewrite entries of config.json. """
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def tensors(folder, edit):
    """ Rewrite model.safetensors by edit(dict of tensors). """
    content = st.load_file(folder / "model.safetensors")
    edit(content)
    st.save_file(content, folder / "model.safetensors")


def pipe(path):
    path.unlink()
    os.mkfifo(path)


INDEX = "model.safetensors.index.json"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
FAULTS = {
    "kv": (lambda f: change(f, num_key_value_heads=1), "grouped queries"),
    "rope": (lambda f: change(f, rope_parameters=None, rope_scaling={"rope_type": "yarn"}), "rotary"),
    "new rope": (lambda f: change(f, rope_parameters={"rope_type": "yarn", "rope_theta": 5e5}), "rotary"),
    "mistral": (lambda f: change(f, model_type="mistral"), "'mistral', not olmo2 or llama"),
    "llama": (lambda f: change(f, model_type="llama"), "input_layernorm.weight is missing"),
    "bias": (lambda f: change(f, attention_bias=True), "biases"),
    "bias of the MLP": (lambda f: change(f, mlp_bias=True), "biases"),
    "packed": (lambda f: change(f, quantization_config={"quant_method": "x"}), "packed"),
    "text": (lambda f: change(f, num_hidden_layers="2"), "n_layer"),
    "list": (lambda f: (f / "config.json").write_text("[]"), "config.json"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "pickle": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "safetensors"),
    "torn": (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-8]),
             "cannot be read"),
    "shape": (lambda f: tensors(f, lambda t: t.update({K_PROJ: torch.zeros(48, 48, 1)})), "k_proj"),
    "sizes": (lambda f: change(f, intermediate_size=48), "shape [32, 48], not [48, 48]"),
    "missing": (lambda f: tensors(f, lambda t: t.pop(K_PROJ)), K_PROJ),
    "extra": (lambda f: tensors(f, lambda t: t.update({"model.x": torch.zeros(1)})), "model.x"),
    "nan": (lambda f: tensors(f, lambda t: t[K_PROJ].fill_(math.nan)), "NaN"),
    "beyond float32": (lambda f: tensors(f, lambda t: t.update({K_PROJ: t[K_PROJ].double() + 1e300})), "Inf"),
    "int8": (lambda f: tensors(f, lambda t: t.update({K_PROJ: t[K_PROJ].to(torch.int8)})), "torch.int8"),
    "fp8": (lambda f: tensors(f, lambda t: t.update({K_PROJ: t[K_PROJ].to(torch.float8_e5m2)})), "float8"),
    "many blocks": (lambda f: change(f, num_hidden_layers=10**9), "sizes in config.json"),
    "wide": (lambda f: change(f, hidden_size=10**30), "sizes in config.json"),
    "tied to nothing": (lambda f: change(f, tie_word_embeddings=True)
                        or tensors(f, lambda t: t.pop("model.embed_tokens.weight")), "embed_tokens"),
    "rope text": (lambda f: change(f, rope_scaling="linear"), "config.json"),
    "deep config": (lambda f: (f / "config.json").write_text("[" * 100_000), "config.json"),
    "index out": (lambda f: (f / INDEX).write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}})),
                  "../x.safetensors is no file in it"),
    "index list": (lambda f: (f / INDEX).write_text("[]"), "cannot be read"),
    "pipe": (lambda f: pipe(f / "model.safetensors"), "no file in it"),
    "config pipe": (lambda f: pipe(f / "config.json"), "config.json"),
}


def copy(exported, to):
    """ A copy of the exported folder that a test may spoil. """
    to.mkdir()
    for path in exported("hf")[0].iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_folder_is_one_line(exported, tmp_path, capsys, fault):
    """ Catches: a traceback, weights of another model taken for these, packed ones for plain, files outside
    the folder that are read, a pipe or sizes without end that hang, half a run's folder. """
    if "pipe" in fault and not hasattr(os, "mkfifo"):
        pytest.skip("Windows has no named pipes")
    folder = copy(exported, tmp_path / "model")
    spoil, says = FAULTS[fault]
    spoil(folder)
    assert says in mistake(capsys, "import", folder, tmp_path / "in")
    assert os.listdir(tmp_path) == ["model"]


def test_a_folder_of_llamas_first_years(exported, tmp_path):
    """ Catches: Llama 2 refused for the speeds of angles that its files hold, or its theta, which they do not
    name, taken for ours. """
    folder = copy(exported, tmp_path / "model")
    path = folder / "config.json"
    values = {key: value for key, value in json.loads(path.read_text()).items() if "rope" not in key}
    path.write_text(json.dumps(values))
    tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(12)}))
    hf.import_model(folder, tmp_path / "in")
    assert load_run(tmp_path / "in", data="", device="cpu")[1].rope_theta == 10_000


def test_a_tied_head_is_copied_and_said(exported, tmp_path):
    """ Catches: a head that stays random because the file of a tied model does not have it. """
    folder, said = copy(exported, tmp_path / "model"), []
    change(folder, tie_word_embeddings=True)
    tensors(folder, lambda t: t.pop("lm_head.weight"))
    hf.import_model(folder, tmp_path / "in", said.append)
    weights = weights_of(tmp_path / "in")
    assert "embedding" in said[0] and torch.equal(weights["head.weight"], weights["embed.weight"])

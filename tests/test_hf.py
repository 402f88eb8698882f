""" Into and out of Hugging Face's format: bit for bit there and back, and one line per mistake. """
import json
import math
import random
import struct
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiktoken
import torch

import data
import eval as evaluation
import hf
import train
from config import ConfigError, parse
from quant import TENSOR, Operand, fake_quantize, quantizers_off
from test_train import WINDOWS, last_state, shards, tiny  # noqa: F401 (a fixture)

EPS = torch.finfo(torch.float32).eps
WIDE = "--d_ff=48"      # a multiple of 16, as NVFP4's packing wants it


@pytest.fixture(scope="module")
def run(shards, tmp_path_factory):
    """ A run of tetrajet_full in which OutControl has chosen channels -> its folder. """
    out = tmp_path_factory.mktemp("out")
    train.main(tiny(shards, f"--out={out}", "--name=r", "--recipe=tetrajet_full", "--n_layer=2", WIDE,
                    "--osci=full", *WINDOWS))
    return out / "r"


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    """ exported("hf") -> the folder that the command writes, and what it prints. """
    pytest.importorskip("safetensors")
    made = {}

    def folder(kind: str, *flags: str):
        if (kind, *flags) not in made:
            to = tmp_path_factory.mktemp("export") / "x"
            text = []
            model, cfg, corpus, _ = evaluation.load_checkpoint(run, "cpu")
            hf.export(model, cfg, corpus, kind, to, *flags, say=text.append)
            made[kind, *flags] = to, "\n".join(text)
        return made[kind, *flags]
    return folder


def load(run):
    """ The run's model without rounding, and tokens to feed it. """
    model, cfg, corpus, _ = evaluation.load_checkpoint(run, "cpu")
    return model, corpus.val.sequences(0, 2, cfg.seq_len, 0, 0)[:, :-1]


def ours(model, tokens):
    with torch.no_grad(), quantizers_off(model):
        return model(tokens)


def mistake(capsys, program, *args) -> str:
    """ The one line with which a program ends with code 2. """
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        program.main([str(arg) for arg in args])
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    return err


# -----------------------------------------------------------------------------
# out

def test_logits_equal_transformers(run, exported):
    """
    Catches: q, k, v in another order, gate and up exchanged, norms swapped, another theta or eps in
    config.json. The two add in other orders, so they differ by a few eps of the largest logit.
    """
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported("hf")[0], dtype=torch.float32)
    model, x = load(run)
    a, b = ours(model, x), theirs(x).logits.detach()
    assert a.shape == b.shape and (a - b).abs().max() <= 20 * EPS * b.abs().max()
    assert theirs.config.eos_token_id == 256


def test_logits_in_bf16(run, exported):
    """
    Catches: a dtype that the file does not have. The weights are ours rounded to bf16, exactly: computed in
    float32 they give the same logits. Computed in bf16, some 14 roundings of 2^-9 in a block and 4 around
    them, each relative to its vector, may add up.
    """
    transformers = pytest.importorskip("transformers")
    folder = exported("hf", "bfloat16")[0]
    model, x = load(run)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())
    a = ours(model, x)
    exact = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(x).logits.detach()
    assert (a - exact).abs().max() <= 20 * EPS * a.abs().max()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert theirs.dtype == torch.bfloat16
    difference = (theirs(x).logits.detach().float() - a).abs().max()
    assert 0 < difference <= (14 * len(model.blocks) + 4) * 2.0**-9 * a.abs().max()


def test_the_folder_says_what_it_is(run, exported):
    """ Catches: padding of the vocabulary left unsaid, a file that only its owner can read. """
    folder, text = exported("hf")
    assert "vocab_size 384" in text and "257 ids" in text and "127 rows of padding" in text
    assert "before rounding" in text
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json"}
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


def test_the_command(run, tmp_path, capsys):
    """ Catches: eval.py that does not reach hf.py, or measures a loss besides. """
    pytest.importorskip("safetensors")
    evaluation.main([str(run), "--device=cpu", "--export=hf", f"--to={tmp_path}/x"])
    assert "Olmo2ForCausalLM" in capsys.readouterr().out
    said = mistake(capsys, evaluation, run, "--device=cpu", "--export=hf", f"--to={tmp_path}/x")
    assert "not an empty folder" in said
    (tmp_path / "empty").mkdir()
    evaluation.main([str(run), "--device=cpu", "--export=hf", f"--to={tmp_path}/empty"])
    assert (tmp_path / "empty" / "model.safetensors").exists()


@pytest.mark.parametrize("flags, says", [
    (["--export=hf"], "--to"),
    (["--to=x"], "--export"),
    (["--export=gguf", "--to=x"], "gguf"),
    (["--export=hf", "--to=x", "--prompt=a"], "--prompt"),
    (["--dtype=float32"], "--dtype"),
    (["--export=nvfp4", "--to=x", "--dtype=float32"], "--dtype"),
    (["--export=hf", "--to={tmp}/file"], "another --to"),
    (["--export=hf", "--to={tmp}/no/x"], "make it"),
    (["--export=hf", "--to={tmp}/file/x"], "another --to"),
])
def test_a_mistake_in_an_export_is_one_line(run, tmp_path, capsys, flags, says):
    """ Catches: a traceback, and a folder that is touched before all is known to be well. """
    (tmp_path / "file").write_text("mine")
    assert says in mistake(capsys, evaluation, run, "--device=cpu", *(f.format(tmp=tmp_path) for f in flags))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_without_the_package_one_line_says_what_to_install(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.delitem(sys.modules, "safetensors.torch", raising=False)
    said = mistake(capsys, evaluation, run, "--device=cpu", "--export=hf", f"--to={tmp_path}/x")
    assert "pip install safetensors" in said and not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing(run, tmp_path, capsys, monkeypatch):
    """ Catches: half a folder under the name that was asked for, or a temporary one left behind. """
    pytest.importorskip("safetensors")

    def full(source, target):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(hf.os, "replace", full)
    said = mistake(capsys, evaluation, run, "--device=cpu", "--export=hf", f"--to={tmp_path}/x")
    assert "No space left" in said and not list(tmp_path.iterdir())


def test_a_nan_is_not_exported(run, tmp_path):
    pytest.importorskip("safetensors")
    model, cfg, corpus, _ = evaluation.load_checkpoint(run, "cpu")
    with torch.no_grad():
        model.norm.weight[3] = math.nan
    with pytest.raises(ConfigError, match="norm.weight"):
        hf.export(model, cfg, corpus, "hf", tmp_path / "x")
    assert not list(tmp_path.iterdir())


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


def test_zeros_are_packed():
    q, divisor = hf.pack_weight("x", torch.zeros(4, 32))
    assert divisor == 1 and not hf.unpack_weight((q, divisor)).any()


def test_a_width_that_cannot_be_packed_is_refused():
    with pytest.raises(ConfigError, match="--export=hf"):
        hf.pack_weight("blocks.0.mlp.down", torch.ones(48, 40))


def packed_files(folder):
    """ Module of theirs -> its three tensors by name. """
    tensors, modules = pytest.importorskip("safetensors.torch").load_file(folder / "model.safetensors"), {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part != "weight":
            modules.setdefault(module, {})[part] = tensor
    return modules


@torch.no_grad()
def as_in_the_file(model):
    """ Give a model the weights that its NVFP4 export holds. """
    layers = hf.quant_linears(model)
    for name, p in model.named_parameters():
        if (layer := name.removesuffix(".weight")) in layers:
            p.copy_(hf.unpack_weight(hf.pack_weight(layer, p)))
        else:
            p.copy_(p.bfloat16())


def values_by_module(run):
    """ Module of theirs -> what it should be worth, from our own codes. """
    model, _ = load(run)
    values = {}
    for name, layer in hf.quant_linears(model).items():
        names = hf.module_names(len(model.blocks))[name]
        rows = hf.unpack_weight(hf.pack_weight(name, layer.weight)).chunk(len(names))
        values |= dict(zip(names, rows))
    return values


def test_the_package_reads_what_we_wrote(run, exported):
    """
    Catches: a global scale that is not inverted, nibbles exchanged, scales by column, a config that the
    package does not know. Its own decompressor gives our values, bit for bit, in bf16 and in float32.
    """
    ct = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.quant_scheme import NVFP4A16
    folder, _ = exported("nvfp4")
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = ct.quantization.QuantizationConfig.model_validate(said)
    scheme = config.config_groups["group_0"]
    preset = NVFP4A16["weights"]
    for field in ("num_bits", "type", "strategy", "symmetric", "dynamic", "group_size"):
        assert getattr(scheme.weights, field) == getattr(preset, field), field
    assert scheme.input_activations is None and scheme.output_activations is None

    reader = ct.compressors.BaseCompressor.get_value_from_registry(config.format)
    modules, wanted = packed_files(folder), values_by_module(run)
    assert modules.keys() == wanted.keys() and len(modules) == 14
    for name, parts in modules.items():
        assert set(parts) == {"weight_packed", "weight_scale", "weight_global_scale"}
        assert set(parts) == set(reader.compression_param_names(scheme))
        assert parts["weight_scale"].dtype == torch.float8_e4m3fn
        assert parts["weight_global_scale"].shape == (1,)
        value = reader.decompress(dict(parts), scheme)["weight"]
        assert torch.equal(value.float(), wanted[name])
        M, half = parts["weight_packed"].shape
        codes = unpack_fp4_from_uint8(parts["weight_packed"], M, 2 * half, torch.float32)
        value = dequantize(codes, parts["weight_scale"].float(), args=scheme.weights, dtype=torch.float32,
                           global_scale=parts["weight_global_scale"])
        assert torch.equal(value, wanted[name])


def test_fused_layers_share_a_divisor(exported):
    """ Catches: q, k, v rounded one by one: vLLM fuses them and keeps only the largest global scale. """
    modules = packed_files(exported("nvfp4")[0])
    for i in range(2):
        for names in ("self_attn.q_proj self_attn.k_proj self_attn.v_proj", "mlp.gate_proj mlp.up_proj"):
            scales = {float(modules[f"model.layers.{i}.{name}"]["weight_global_scale"])
                      for name in names.split()}
            assert len(scales) == 1


def test_transformers_computes_with_the_packed_weights(run, exported):
    """ Catches: a folder of good tensors that transformers does not take for a quantized model. """
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported("nvfp4")[0], dtype="auto")
    assert theirs.dtype == torch.bfloat16
    model, x = load(run)
    as_in_the_file(model)
    theirs(x)                                   # unpacks the weights, to bf16, which holds them exactly
    torch.nn.Module.float(theirs)               # their own float() refuses packed models
    a, b = ours(model, x), theirs(x).logits.detach()
    assert (a - b).abs().max() <= 20 * EPS * b.abs().max()


def test_the_table_of_costs(run, exported):
    """ Catches: rows exchanged, a loss of other weights than those in the file, channels not counted. """
    text = exported("nvfp4")[1]
    table = {line[:36].strip(): line[36:].split() for line in text.splitlines() if len(line) > 36}
    model, cfg, corpus, _ = evaluation.load_checkpoint(run, "cpu")
    losses = evaluation.val_losses(model, corpus, cfg)
    assert table["recipe's forward"] == [f"{losses['val_loss_fp4']:.4f}"]
    assert table["not rounded"] == [f"{losses['val_loss_bf16']:.4f}"]
    layers = hf.quant_linears(model)
    channels = sum(layer.channels.numel() for layer in layers.values())
    assert f"{channels} input channels that OutControl keeps in FP8 become FP4" in text

    out = [layer for name, layer in layers.items() if name.endswith(".out")]
    with torch.no_grad():
        noise = sum((layer.weight - hf.recipe_weight(layer)).double().square().sum() for layer in out)
        db = 10 * math.log10(sum(layer.weight.double().square().sum() for layer in out) / noise)
    kinds = table["weights"][:-2]
    assert kinds == ["qkv", "out", "up", "down", "all"]
    assert table["recipe's weights"][kinds.index("out")] == f"{db:.2f}"
    total = {label: float(table[label][4]) for label in
             ("recipe's weights", "one scale, FP8 channels kept", "as exported")}
    assert total["as exported"] < min(total["recipe's weights"], total["one scale, FP8 channels kept"])

    as_in_the_file(model)
    with quantizers_off(model):
        assert table["as exported"][-1] == f"{evaluation.val_loss(model, corpus, cfg):.4f}"


def test_recipe_weight_is_what_the_forward_pass_multiplies_with(run):
    """ Catches: another rounding than the recipe's, FP8 columns in the wrong places. """
    model, _ = load(run)
    for layer in hf.quant_linears(model).values():
        layer.recipe = layer.recipe.only([2])           # so that the input stays what it is
        layer.recipe_spec = layer.recipe.spec()
        with torch.no_grad():
            assert layer.split and torch.equal(layer(torch.eye(layer.in_features)).T, hf.recipe_weight(layer))


def test_measuring_changes_no_weight(run):
    """ Catches: weights of one row that stay in the model for the next, or for the file. """
    model, cfg, corpus, _ = evaluation.load_checkpoint(run, "cpu")
    before = {name: p.clone() for name, p in model.named_parameters()}
    packed = {name: hf.pack_weight(name, layer.weight) for name, layer in hf.quant_linears(model).items()}
    assert len(list(hf.price(model, cfg, corpus, packed, torch.bfloat16))) == 8
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


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
            for i in reversed(range(len(word) - 1)):
                if i + 1 < len(word) and (word[i], word[i + 1]) == (a, b):
                    word[i:i + 2] = [a + b]
    return tiktoken.Encoding("small", pat_str=PATTERN, mergeable_ranks=rank,
                             special_tokens={hf.EOT: len(rank)})


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_the_tokenizer_gives_the_same_ids(name):
    """ Catches: merges in another order, a letter per byte that is off by one, a blank put in front. """
    tokenizers = pytest.importorskip("tokenizers")
    text = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    encoding = data.load_encoding("bytes") if name == "bytes" else small_bpe(text[:6000], 150)
    files = hf.tokenizer_files(SimpleNamespace(encoding_name=name, encoding=encoding), 128)
    theirs = tokenizers.Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
    assert theirs.get_vocab_size() == encoding.n_vocab and theirs.token_to_id(hf.EOT) == encoding.eot_token
    draw = random.Random(0)
    letters = " \n\t\r'sdmtlvre.,0129abcXYZé🙂中\u00a0\u2003½²ßПр<|>_-\x00\x85\u200b"
    texts = [text] + ["".join(draw.choices(letters, k=draw.randrange(1, 40))) for _ in range(1000)]
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
    with pytest.raises(hf.DataError, match="cl100k_base"):
        hf.tokenizer_files(SimpleNamespace(encoding_name="cl100k_base"), 128)


# -----------------------------------------------------------------------------
# in

def begin(shards, tmp_path, folder, *flags):
    """ The flags of a run that starts from a folder. """
    return tiny(shards, f"--out={tmp_path}", "--name=n", "--n_layer=2", WIDE, f"--init_from={folder}", *flags)


def started(argv):
    """ A Trainer with the weights of init_from, and what was said. """
    cfg = parse(argv)
    trainer = train.Trainer(cfg, evaluation.open_corpus(cfg.data))
    return trainer, hf.init_weights(trainer.model, cfg)


def shard(folder, to):
    """ The same model in two files with an index. """
    st = pytest.importorskip("safetensors.torch")
    tensors = st.load_file(folder / "model.safetensors")
    to.mkdir()
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    where = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(where.values()):
        st.save_file({name: tensors[name] for name in tensors if where[name] == file}, to / file)
    (to / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return to


@pytest.mark.parametrize("dtype, split", [("float32", False), ("float32", True), ("bfloat16", False)])
def test_there_and_back_is_bit_exact(run, exported, shards, tmp_path, dtype, split):
    """ Catches: rows of q, k, v or of gate and up put back in another order, a weight left random. """
    folder = exported("hf", dtype)[0]
    trainer, _ = started(begin(shards, tmp_path, shard(folder, tmp_path / "s") if split else folder))
    before = last_state(run)["model"]
    for name, p in trainer.model.named_parameters():
        assert torch.equal(p, before[name].to(hf.DTYPES[dtype]).float()), name


def test_a_run_starts_from_it_and_resumes_without_it(run, exported, shards, tmp_path, capsys):
    """
    Catches: a first loss of random weights, a resumed run whose checkpoint is overwritten by the weights that
    it began with, another init_from that goes unnoticed.
    """
    folder = copy(exported, tmp_path / "model")
    argv = begin(shards, tmp_path / "a", folder, "--steps=4", "--recipe=tetrajet_base")
    train.main(argv)
    assert f"weights from {folder}" in capsys.readouterr().out
    whole = last_state(tmp_path / "a" / "n")

    argv = begin(shards, tmp_path / "b", folder, "--steps=4", "--recipe=tetrajet_base")
    train.main([*argv, "--stop_at=2"])
    capsys.readouterr()
    others = [flag for flag in argv if not flag.startswith("--init_from")]
    assert "init_from=" in mistake(capsys, train, *others)
    for path in folder.iterdir():
        path.unlink()
    train.main(argv)
    parts = last_state(tmp_path / "b" / "n")
    assert all(torch.equal(whole["model"][name], t) for name, t in parts["model"].items())
    first = (tmp_path / "a" / "n" / "metrics.csv").read_text().splitlines()[1].split(",")[4]
    assert float(first) < math.log(257) - 0.5


def copy(exported, to):
    """ A copy of the exported folder that a test may spoil. """
    to.mkdir()
    for path in exported("hf")[0].iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def change(folder, **values):
    """ Rewrite entries of config.json. """
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def tensors(folder, edit):
    """ Rewrite model.safetensors by edit(dict of tensors). """
    st = pytest.importorskip("safetensors.torch")
    content = st.load_file(folder / "model.safetensors")
    edit(content)
    st.save_file(content, folder / "model.safetensors")


K_PROJ = "model.layers.1.self_attn.k_proj.weight"
FAULTS = {
    "kv": (lambda f: change(f, num_key_value_heads=1), "grouped queries"),
    "rope": (lambda f: change(f, rope_parameters=None, rope_scaling={"rope_type": "yarn"}), "rotary"),
    "llama": (lambda f: change(f, model_type="llama"), "olmo2"),
    "bias": (lambda f: change(f, attention_bias=True), "biases"),
    "packed": (lambda f: change(f, quantization_config={"quant_method": "x"}), "packed"),
    "huge": (lambda f: change(f, hidden_size=10**12), "hidden_size"),
    "text": (lambda f: change(f, num_hidden_layers="2"), "num_hidden_layers"),
    "bool": (lambda f: change(f, num_attention_heads=True), "num_attention_heads"),
    "tied": (lambda f: change(f, tie_word_embeddings="false"), "tie_word_embeddings"),
    "both ropes": (lambda f: change(f, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
                                    rope_scaling={"rope_type": "yarn"}), "rotary"),
    "list": (lambda f: (f / "config.json").write_text("[]"), "no JSON object"),
    "deep": (lambda f: (f / "config.json").write_text("[" * 10**5), "no JSON object"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "pickle": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "safetensors"),
    "torn": (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-8]),
             "cannot be read"),
    "header": (lambda f: (f / "model.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}"),
               "cannot be read"),
    "shape": (lambda f: tensors(f, lambda t: t.update({K_PROJ: torch.zeros(48, 47)})), "[48, 47]"),
    "dtype": (lambda f: tensors(f, lambda t: t.update({K_PROJ: t[K_PROJ].half()})), "F16"),
    "missing": (lambda f: tensors(f, lambda t: t.pop(K_PROJ)), "lacks"),
    "extra": (lambda f: tensors(f, lambda t: t.update({"model.x": torch.zeros(1)})), "no place"),
    "nan": (lambda f: tensors(f, lambda t: t[K_PROJ].fill_(math.nan)), "NaN"),
    "outside": (lambda f: (f / "model.safetensors").rename(f.parent / "x.safetensors") and
                (f / "model.safetensors.index.json").write_text(
                    json.dumps({"weight_map": {K_PROJ: "../x.safetensors"}})), "files beside it"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_folder_is_one_line_and_costs_no_run(exported, shards, tmp_path, capsys, fault):
    """ Catches: a traceback, memory for whatever a file claims, a run that was deleted for nothing. """
    folder, old = copy(exported, tmp_path / "model"), tmp_path / "n"
    old.mkdir()
    (old / "config.json").write_text("{}")
    (old / "ckpt_000000001.pt").write_text("an old run")
    spoil, says = FAULTS[fault]
    spoil(folder)
    assert says in mistake(capsys, train, *begin(shards, tmp_path, folder, "--overwrite"))
    assert (old / "ckpt_000000001.pt").read_text() == "an old run"


def test_json_of_any_size_is_not_read(tmp_path, monkeypatch):
    """ Catches: memory for a file that is no config.json. """
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')
    assert hf.read_json(path) == {"a": 1}
    monkeypatch.setattr(hf, "JSON_LIMIT", 7)
    with pytest.raises(ConfigError, match="no JSON object"):
        hf.read_json(path)


def test_the_knobs_that_are_named_cure(exported, shards, tmp_path, capsys):
    """ Catches: a message that names one knob at a time, or the wrong value. """
    folder = exported("hf")[0]
    wrong = ["--n_layer=1", "--d_model=32", "--d_ff=64", "--norm_eps=1e-5", "--rope_theta=1e4", "--n_head=4"]
    argv = [f for f in begin(shards, tmp_path, folder) if f.split("=")[0] not in
            {w.split("=")[0] for w in wrong}]
    said = mistake(capsys, train, *argv, *wrong)
    cure = said.split("type ")[1].split()
    assert len(cure) == len(wrong)
    started([*argv, *cure])
    assert "no such folder" in mistake(capsys, train, *begin(shards, tmp_path, tmp_path / "nowhere"))


def test_a_tied_head_is_copied_and_said(exported, shards, tmp_path):
    """ Catches: a head that stays random because the file of a tied model does not have it. """
    folder = copy(exported, tmp_path / "model")
    change(folder, tie_word_embeddings=True)
    tensors(folder, lambda t: t.pop("lm_head.weight"))
    trainer, said = started(begin(shards, tmp_path, folder))
    model = trainer.model
    assert "tied" in said and torch.equal(model.head.weight, model.embed.weight)
    assert model.head.weight is not model.embed.weight


def test_training_without_the_package_is_one_line(shards, tmp_path, capsys, monkeypatch):
    """ Catches: an import at the top of a file, which would make the package a requirement of training. """
    folder = tmp_path / "model"
    folder.mkdir()
    cfg = parse(begin(shards, tmp_path, folder))
    settings = hf.model_config(train.Trainer(cfg, evaluation.open_corpus(cfg.data)).model, cfg,
                               evaluation.open_corpus(cfg.data), "float32")
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "model.safetensors").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert "pip install safetensors" in mistake(capsys, train, *begin(shards, tmp_path, folder))

"""
Into and out of Hugging Face's format: a trained model for other programs, an OLMo-2 or Llama to go on from.

    python -m tools.hf export out/RUN DIR                       master weights, for transformers and lm-eval
    python -m tools.hf export out/RUN DIR --format=nvfp4        block linears in packed NVFP4, for vLLM
    python -m tools.hf import DIR out/NAME                      makes a run's folder with the weights in DIR,
    python train.py --init_from=out/NAME ...                    and this starts a fresh run from them

It needs the package safetensors, and nothing needs transformers. The files of a model are
model.safetensors, config.json, generation_config.json, and, for an encoding that can be written so,
tokenizer.json and tokenizer_config.json. Left out: files of several shards on the way out, float16, grouped
queries, any format with code in it.
"""
import argparse
import json
import math
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

from config import LINEARS, Config, ConfigError, check, fit, in_full, need      # before PyTorch, see there

import torch
from torch import Tensor

try:
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file
except ImportError:
    raise SystemExit("error: this program needs a package more: type pip install safetensors") from None

from build import Net, only
from checkpoint import FORMAT, code
from codes import E2M1, E4M3, Quantized, pack, quantize
from data import EOT, Corpus, DataError, new_folder, read_json
from eval import load_run, val_loss, val_losses
from model import GPT
from quant import Operand, QuantLinear, Recipe

# -----------------------------------------------------------------------------
# names


# ours: theirs. A layer that is fused here is several of theirs, one below the other: the rows are stacked
BLOCK = {
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.out": ("self_attn.o_proj",),
    "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
# of each `block`, which is also their model_type. One name has two meanings: in an OLMo-2 it is the norm of
# attention's output, in a Llama that of the MLP's input
NORMS = {
    "olmo2": {"attn.q_norm": ("self_attn.q_norm",), "attn.k_norm": ("self_attn.k_norm",),
              "attn_norm": ("post_attention_layernorm",), "mlp_norm": ("post_feedforward_layernorm",)},
    "llama": {"attn_norm": ("input_layernorm",), "mlp_norm": ("post_attention_layernorm",)},
}
REST = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


def module_names(cfg: Config) -> dict[str, list[str]]:
    """ Each module of ours that has a weight -> theirs, in the order in which their rows are stacked. """
    names = {ours: [theirs] for ours, theirs in REST.items()}
    for i in range(cfg.n_layer):
        names |= {f"blocks.{i}.{ours}": [f"model.layers.{i}.{name}" for name in theirs]
                  for ours, theirs in (BLOCK | NORMS[cfg.block]).items()}
    return names


# -----------------------------------------------------------------------------
# out

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def export(net: Net, cfg: Config, corpus: Corpus, kind: str, to: Path, dtype: str = "float32", say=print):
    """
    Write a folder that transformers (kind "hf") or vLLM (kind "nvfp4") can load, whole or not at all.

    dtype   of kind "hf"; what "nvfp4" does not pack is in bfloat16, which its readers compute in
    """
    dtype, model = dtype if kind == "hf" else "bfloat16", net.model
    with new_folder(to) as making:
        for name, p in model.named_parameters():
            need(p.isfinite().all(), f"{name} holds a NaN or Inf: export an earlier checkpoint of the run")
        settings, packed = model_config(model, cfg, corpus, dtype), {}
        if kind == "nvfp4":
            packed = {name: pack_weight(name, layer.weight) for name, layer in net.layers.items()}
            settings["quantization_config"] = QUANTIZATION
        ends = {key: settings[key] for key in ("bos_token_id", "eos_token_id")}
        files = {"config.json": settings, "generation_config.json": ends}
        try:
            files |= tokenizer_files(corpus, cfg.seq_len)
        except DataError as error:
            say(f"no tokenizer files: {error}")
        for name, content in files.items():
            (making / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        try:
            save_file(tensors_of(model, cfg, packed, DTYPES[dtype]), making / "model.safetensors",
                      metadata={"format": "pt"})
        except SafetensorError as error:        # in which it wraps what is wrong with the disk
            raise ConfigError(f"cannot write {to}: {error}") from None
        # the package makes a file that only its owner can read
        shutil.copymode(making / "config.json", making / "model.safetensors")
    if kind == "hf" and any(any(layer.recipe.operands[:2]) for layer in net.layers.values()):
        say("the weights are those before rounding: other programs compute the loss without rounding")
    for line in price(net, cfg, corpus, packed) if packed else ():
        say(line)
    rows = model.embed.weight.shape[0]
    say(f"{to}: {settings['architectures'][0]}, {sum(model.num_params().values()):,} parameters in {dtype}"
        + (", those of the blocks' linears in NVFP4" if packed else ""))
    say(f"vocab_size {rows} as in the checkpoint: {corpus.vocab_size} ids of encoding {corpus.encoding_name} "
        f"and {rows - corpus.vocab_size} rows of padding")


def model_config(model: GPT, cfg: Config, corpus: Corpus, dtype: str) -> dict:
    """ config.json. Two spellings of dtype and theta: transformers renamed both between versions 4 and 5. """
    eot = corpus.vocab_size - 1 if corpus.encoding_name in TOKENIZERS else None
    return {
        "architectures": [f"{cfg.block.capitalize()}ForCausalLM"], "model_type": cfg.block,
        "vocab_size": model.embed.weight.shape[0], "hidden_size": cfg.d_model,
        "intermediate_size": cfg.d_ff, "num_hidden_layers": cfg.n_layer,
        "num_attention_heads": cfg.n_head, "num_key_value_heads": cfg.n_head,
        "max_position_embeddings": cfg.seq_len, "rms_norm_eps": cfg.norm_eps,
        "rope_theta": cfg.rope_theta, "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
        "tie_word_embeddings": False, "initializer_range": cfg.init_std, "use_cache": True,
        "bos_token_id": eot, "eos_token_id": eot, "pad_token_id": None,
        "torch_dtype": dtype, "dtype": dtype,
    }


def tensors_of(model: GPT, cfg: Config, packed: dict, dtype: torch.dtype) -> dict:
    """ Every tensor of model.safetensors by name, on the CPU; modules in `packed` as three tensors each. """
    tensors = {}
    for ours, theirs in module_names(cfg).items():
        if ours not in packed:
            weight = model.get_submodule(ours).weight.detach()
            for name, rows in zip(theirs, weight.chunk(len(theirs))):
                tensors[f"{name}.weight"] = rows.to("cpu", dtype, copy=True)
            continue
        q, divisor = packed[ours]
        parts = zip(theirs, pack(q.code).chunk(len(theirs)), q.inner.chunk(len(theirs)))
        for name, codes, inner in parts:
            tensors[f"{name}.weight_packed"] = codes.cpu().clone()
            tensors[f"{name}.weight_scale"] = inner.cpu().clone().view(torch.float8_e4m3fn)
            tensors[f"{name}.weight_global_scale"] = torch.tensor([divisor])
    return tensors


# -----------------------------------------------------------------------------
# NVFP4 as vLLM loads it: "nvfp4-pack-quantized" of the package compressed-tensors
#
#     weight_packed        uint8 (N, K/2)        two codes to a byte, the even column in the low nibble
#     weight_scale         float8_e4m3fn (N, K/16)
#     weight_global_scale  float32 (1,)          value = code * (weight_scale / weight_global_scale)
#
# So the last is a divisor, the inverse of what quant.py calls the outer scale; NVIDIA's ModelOpt stores that
# one. A tensor has a single one and no place for one per 128 values: weights are rounded anew, from the
# master weights.
#
# differs from quantize(w, Operand(outer=TENSOR)): the divisor is a power of two. Scales and values are then
# exact in whatever way a program multiplies, divides or inverts them, and each value, having 6 significant
# bits, is exact in bf16. The largest scale lies between 224 and 448 instead of at 448, which costs nothing:
# the precision of E4M3 is relative, and tests/test_hf.py asserts that the two agree within 0.15 dB.
#
# q, k, v share a divisor, and so do gate and up, since they are rounded together: vLLM fuses them and keeps
# only the largest of theirs.

QUANTIZATION = {
    "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed", "kv_cache_scheme": None, "global_compression_ratio": None,
    # head and embedding are not rounded in training either
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                    "symmetric": True, "dynamic": False},
        # null is what makes it W4A16: activations stay in bf16
        "input_activations": None, "output_activations": None,
    }},
}
PACKED = Operand(outer=0)       # E4M3 scales for 1x16, to nearest; the divisor is pack_weight's


def pack_weight(name: str, weight: Tensor) -> tuple[Quantized, float]:
    """ A weight (N, K) -> its codes and inner scales, and the divisor of all scales, a power of two. """
    weight = weight.detach()
    need(weight.shape[1] % 16 == 0, f"{name} has {weight.shape[1]} input features, no multiple of 16, which "
         "the format wants: type --format=hf")
    largest = float(weight.abs().max())
    # frexp(x) = (m, e) with x = m 2^e and m in [.5, 1): 2^(e - 1) is the power of two at or below x
    exponent = math.frexp(E4M3.max * E2M1.max / largest)[1] - 1 if largest > 0 else 0
    divisor = 2.0 ** max(-126, min(126, exponent))
    return quantize(weight * divisor, PACKED), divisor


def unpack_weight(packed: tuple[Quantized, float]) -> Tensor:
    """ What a program that loads these tensors gets, float32. The division is by a power of two: exact. """
    return packed[0].dequantize() / packed[1]


@torch.no_grad()
def price(net: Net, cfg: Config, corpus: Corpus, packed: dict[str, tuple[Quantized, float]]):
    """
    What it costs to have one scale per tensor, and no outlier channels in FP8 -> lines of text, a table.

    A row is a set of weights: signal to noise against the master weights in dB, over the linears of all
    blocks, and the validation loss with them. Activations are rounded in the row "recipe's forward" alone.
    Afterwards the model has the exported weights, and rounds nothing.
    """
    channels = sum(layer.channels.numel() for layer in net.layers.values() if layer.split)
    if channels:
        yield f"{channels:,} input channels that OutControl keeps in FP8 become FP4: the format has one kind"
    losses = val_losses(net, corpus, cfg)
    yield f"{'weights':20}{'dB':>8}{'val loss':>10}"
    for label, loss in ("recipe's forward", losses["val_loss_fp4"]), ("not rounded", losses["val_loss_bf16"]):
        yield f"{label:28}{loss:>10.4f}"

    master = {name: layer.weight.clone() for name, layer in net.layers.items()}
    ours = {name: recipe_weight(layer) for name, layer in net.layers.items()}
    for layer in net.layers.values():
        layer.enabled = False
    for label, weights in (("recipe's weights", ours), ("as exported", None)):
        if weights is None:     # embedding, head and norms are in bf16 there
            for p in net.model.parameters():
                p.copy_(p.bfloat16())
            weights = {name: unpack_weight(packed[name]) for name in net.layers}
        for name, layer in net.layers.items():
            layer.weight.copy_(weights[name])
        signal, noise = (sum(float(w.cpu().double().square().sum()) for w in tensors) for tensors in (
            master.values(), (master[name] - weights[name] for name in master)))
        ratio = 10 * math.log10(signal / noise) if noise else math.inf
        yield f"{label:20}{ratio:>8.2f}{val_loss(net, corpus, cfg):>10.4f}"


def recipe_weight(layer: QuantLinear) -> Tensor:
    """ The weight that the recipe's forward pass multiplies with: what it makes of the unit matrix. """
    recipe, backend = layer.recipe, layer.backend
    layer.recipe, layer.backend = only(recipe, [2]), "reference"
    weight = layer(torch.eye(layer.in_features, device=layer.weight.device)).T.contiguous()
    layer.recipe, layer.backend = recipe, backend
    return weight


# -----------------------------------------------------------------------------
# the tokenizer

# GPT-2's pattern is the one that the class ByteLevel has built in; bytes are the same with no merge at all
TOKENIZERS = ("bytes", "gpt2", "r50k_base")


def tokenizer_files(corpus: Corpus, seq_len: int) -> dict[str, dict]:
    """
    tokenizer.json and tokenizer_config.json that give the ids of the corpus's tiktoken encoding. DataError
    where the encoding has another pattern, or its vocabulary cannot be had.
    """
    if corpus.encoding_name not in TOKENIZERS:
        raise DataError(f"encoding {corpus.encoding_name} cuts text otherwise than GPT-2's; copy the files "
                        "of a tokenizer with the same ids into the folder")
    encoding = corpus.encoding
    tokens = [encoding.decode_single_token_bytes(i) for i in range(encoding.n_vocab)
              if i != encoding.eot_token]
    letters = byte_letters()

    def word(token: bytes) -> str:
        return "".join(letters[b] for b in token)

    rank = {token: encoding.encode_single_token(token) for token in tokens}
    merges = [[word(part) for part in halves(token, rank)]
              for token in sorted(rank, key=rank.get) if len(token) > 1]
    special = {"id": encoding.eot_token, "content": EOT, "special": True, "single_word": False,
               "lstrip": False, "rstrip": False, "normalized": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "tokenizer.json": {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [special],
            "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                      "ignore_merges": False, "merges": merges,
                      "vocab": {word(t): i for t, i in rank.items()} | {EOT: encoding.eot_token}},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": EOT, "eos_token": EOT,
            "model_max_length": seq_len, "clean_up_tokenization_spaces": False,
        },
    }


def byte_letters() -> list[str]:
    """ GPT-2's letter for each byte: itself where it can be printed, else the next one from U+0100 on. """
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(b if b in printed else next(others)) for b in range(256)]


def halves(token: bytes, rank: dict[bytes, int]) -> list[bytes]:
    """ The two tokens that a token was merged from: its encoding when only earlier merges are allowed. """
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        pairs = [rank.get(a + b, len(rank)) for a, b in zip(parts, parts[1:])]
        i = min(range(len(pairs)), key=pairs.__getitem__)
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return parts


# -----------------------------------------------------------------------------
# in

KNOBS = {"block": "model_type", "n_layer": "num_hidden_layers", "d_model": "hidden_size",
         "n_head": "num_attention_heads", "d_ff": "intermediate_size", "vocab_size": "vocab_size",
         "norm_eps": "rms_norm_eps", "rope_theta": "rope_theta"}


def import_model(folder: Path, to: Path, say=print):
    """
    Make a run's folder whose only checkpoint, of step 0, has the weights of an OLMo-2 or Llama in Hugging
    Face's format. The folder comes from anywhere: nothing that can hold code, nor anything outside, is read.
    """
    try:
        theirs = read_json(folder / "config.json")
        # a config.json of Llama's first years has no theta, and means this one
        values = {"rope_theta": 1e4, **theirs, **(theirs.get("rope_parameters") or {})}
        check_plain(values)
        cfg = check(Config(out=str(to.parent), name=to.name,
                           **{knob: fit(knob, values[key]) for knob, key in KNOBS.items()}))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"{folder}/config.json is not that of a plain OLMo-2 or Llama ({error})") from None
    tensors, tied = read_tensors(folder), values.get("tie_word_embeddings")
    if tied:
        tensors |= {"lm_head.weight": w for name, w in tensors.items() if name == "model.embed_tokens.weight"}
    weights = our_weights(tensors, cfg, folder)
    # of each layer a checkpoint says too which channels OutControl keeps, here none
    weights |= {f"blocks.{i}.{kind}.channels": torch.zeros(0, dtype=torch.int64)
                for i in range(cfg.n_layer) for kind in LINEARS}
    with new_folder(to) as making:
        torch.save({"format": FORMAT, "config": asdict(cfg), "code": code(), "recipe": Recipe().text,
                    "sources": {}, "data": f"unknown, as imported from {folder}", "step": 0, "seconds": 0.0,
                    "model": weights, "optimizers": []}, making / "ckpt_000000000.pt")
        (making / "config.json").write_text(json.dumps(asdict(cfg), indent=1), encoding="utf-8")
    if tied:
        say("the weights of its head are those of its embedding; from now on the two train apart")
    say(f"{to}: {sum(w.numel() for w in weights.values()):,} parameters. With data in the ids of their "
        "tokenizer, start from them by")
    say(f"python train.py --init_from={to} --data=DIR " +
        " ".join(f"--{knob}={getattr(cfg, knob)}" for knob in KNOBS))


def check_plain(theirs: dict):
    """ ConfigError where their config.json asks for what model.py does not have. """
    kind, biases = theirs.get("model_type"), theirs.get("attention_bias") or theirs.get("mlp_bias")
    need(kind in NORMS, f"its model_type is {kind!r}, not {' or '.join(NORMS)}")
    rope = theirs.get("rope_scaling") or theirs
    scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    heads, wide = theirs["num_attention_heads"], theirs["hidden_size"]
    for odd, what in ((scaled, "scaled rotary positions"), (biases, "biases"),
                      ((theirs.get("num_key_value_heads") or heads) != heads, "grouped queries"),
                      ((theirs.get("head_dim") or wide // heads) != wide // heads, "heads of another width"),
                      (theirs.get("hidden_act", "silu") != "silu", "another activation than silu"),
                      (theirs.get("quantization_config"), "packed weights")):
        need(not odd, f"it has {what}, and model.py has not")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """ All tensors of a model by name, from one file, or from those that an index names. """
    files, tensors, index = {"model.safetensors"}, {}, folder / "model.safetensors.index.json"
    try:
        if index.exists():
            files = {*read_json(index)["weight_map"].values()}
        for file in sorted(files):
            # an index of others may lead out of its folder, and a pipe would wait for ever
            need(Path(file).name == file and (folder / file).is_file(), f"{file} is no file in it")
            tensors |= load_file(folder / file)
    except (SafetensorError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"{folder} cannot be read as safetensors ({str(error)[:99]})") from None
    return tensors


def our_weights(theirs: dict[str, Tensor], cfg: Config, folder: Path) -> dict[str, Tensor]:
    """ Their tensors -> ours, float32. ConfigError unless they are those that model.py has in its sizes. """
    largest = max((n for tensor in theirs.values() for n in tensor.shape), default=0)
    need(cfg.n_layer <= len(theirs) and max(cfg.d_model, cfg.d_ff, cfg.vocab_size) <= largest,
         f"{folder}: the sizes in config.json are beyond those of its tensors")
    with torch.device("meta"):      # takes no memory: only the shapes are wanted
        shapes = {name: p.shape for name, p in GPT(cfg, cfg.vocab_size).named_parameters()}
    names = {f"{ours}.weight": [f"{name}.weight" for name in parts]
             for ours, parts in module_names(cfg).items()}
    # older Llamas bring the speeds of their rotary angles, which follow from theta
    known = {name for name in theirs if not name.endswith(".rotary_emb.inv_freq")}
    odd = known ^ {name for parts in names.values() for name in parts}
    need(not odd, f"{folder}: the tensor {min(odd, default='')} is missing, or has no place in {cfg.block}")
    weights = {}
    for ours, parts in names.items():
        rows, *columns = shapes[ours]
        wanted = [rows // len(parts), *columns]
        for name in parts:
            there, dtype = list(theirs[name].shape), theirs[name].dtype
            need(there == wanted, f"{folder}: {name} has the shape {there}, not {wanted} as config.json says")
            # whole numbers and FP8 are packed weights, whose scales are elsewhere
            need(dtype.is_floating_point and dtype.itemsize > 1,
                 f"{folder}: {name} is {dtype}: get the model in float32 or bfloat16")
            need(theirs[name].float().isfinite().all(), f"{folder}: {name} holds a NaN or Inf: get it again")
        weights[ours] = torch.cat([theirs[name].float() for name in parts])
    return weights


# -----------------------------------------------------------------------------
# the command line


def main(argv: list[str]) -> int:
    """ The program's exit code: 2 for a mistake that the last line explains. """
    parser = argparse.ArgumentParser(prog="python -m tools.hf", allow_abbrev=False,
                                     description="Hugging Face's format, out and in.")
    commands = parser.add_subparsers(dest="command", required=True)
    out = commands.add_parser("export", allow_abbrev=False, help="a run's model for other programs")
    out.add_argument("run", type=in_full, help="the folder of a run, such as out/tetrajet_full-s1")
    out.add_argument("to", type=in_full, help="a new folder")
    out.add_argument("--format", default="hf", choices=("hf", "nvfp4"),
                     help="hf for transformers (the default), nvfp4 for vLLM")
    out.add_argument("--dtype", choices=DTYPES, help="of --format=hf: float32 (the default) or bfloat16")
    out.add_argument("--device", default="auto", help="auto, cpu, cuda or mps (auto)")
    out.add_argument("--data", help="folder of token shards, if it is not where it was in training")
    back = commands.add_parser("import", allow_abbrev=False, help="the weights of an OLMo-2 or Llama")
    back.add_argument("model", type=in_full, help="a folder in Hugging Face's format")
    back.add_argument("to", type=in_full, help="a new folder, such as out/olmo2")
    args = parser.parse_args(argv)
    try:
        if args.command == "import":
            import_model(args.model, args.to)
            return 0
        need(args.format == "hf" or not args.dtype, "--format=nvfp4 has dtypes of its own: leave --dtype out")
        moved = {} if args.data is None else {"data": args.data}
        net, cfg, corpus, _ = load_run(args.run, device=args.device, **moved)
        export(net, cfg, corpus, args.format, args.to, args.dtype or "float32")
        return 0
    except (ConfigError, DataError) as error:
        line = str(error)
    except OSError as error:        # a full disk names no file
        line = f"{error.filename or args.to}: {error.strerror or error}"
    print(f"error: {line}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

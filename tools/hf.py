"""
Into and out of Hugging Face's format: a trained model for other programs, and an OLMo-2 to go on from.

    python eval.py out/RUN --export=hf --to=DIR         master weights, for transformers and lm-eval
    python eval.py out/RUN --export=nvfp4 --to=DIR      block linears in packed NVFP4, for vLLM
    python train.py ... --init_from=DIR                 a fresh run that starts from the weights in DIR

Three parts: the table of names, which serves both ways; out; in. All of it needs the package safetensors, and
nothing needs transformers. The files are model.safetensors, config.json, generation_config.json, and, for an
encoding that can be written so, tokenizer.json and tokenizer_config.json.

What this file leaves out: files of several shards on the way out, float16, grouped queries, any format with
code in it. Names of files and tensors, shapes and numbers of a folder that is read are checked before use.
"""
import json
import math
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from config import Config, ConfigError, in_full, package
from data import Corpus, DataError
from eval import val_loss
from model import GPT
from quant import (E2M1, E4M3, Operand, Quantized, QuantLinear, outlier_values, pack, quantize,
                   quantizers_off)

# -----------------------------------------------------------------------------
# names


# ours: theirs. A layer that is fused here is several of theirs, one below the other: the rows are stacked
BLOCK = {
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.q_norm": ("self_attn.q_norm",),
    "attn.k_norm": ("self_attn.k_norm",),
    "attn.out": ("self_attn.o_proj",),
    "attn_norm": ("post_attention_layernorm",),
    "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
    "mlp_norm": ("post_feedforward_layernorm",),
}
REST = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


def module_names(n_layer: int) -> dict[str, list[str]]:
    """ Each module of ours that has a weight -> theirs, in the order in which their rows are stacked. """
    names = {ours: [theirs] for ours, theirs in REST.items()}
    for i in range(n_layer):
        names |= {f"blocks.{i}.{ours}": [f"model.layers.{i}.{name}" for name in theirs]
                  for ours, theirs in BLOCK.items()}
    return names


# -----------------------------------------------------------------------------
# out

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def export(model: GPT, cfg: Config, corpus: Corpus, kind: str, to: Path, dtype: str = "float32",
           say=print):
    """
    Write a folder that transformers (kind "hf") or vLLM (kind "nvfp4") can load, whole or not at all.

    in      dtype   of kind "hf"; what "nvfp4" does not pack is in bfloat16, which its readers compute in
    errors  ConfigError: a folder that is not empty, a full disk, a model that the format cannot hold
    """
    to = in_full(to)
    check_target(to)
    package("safetensors.torch")
    dtype = dtype if kind == "hf" else "bfloat16"
    for name, p in model.named_parameters():
        if not p.isfinite().all():
            raise ConfigError(f"{name} holds a NaN or Inf: export an earlier checkpoint of the run")

    settings = model_config(model, cfg, corpus, dtype)
    packed = {}
    if kind == "nvfp4":
        packed = {name: pack_weight(name, layer.weight) for name, layer in quant_linears(model).items()}
        settings["quantization_config"] = QUANTIZATION
    rounds = any(any(layer.recipe.operands[:2]) for layer in quant_linears(model).values())
    if packed:
        for line in price(model, cfg, corpus, packed, DTYPES[dtype]):
            say(line)
    elif rounds:
        say("the weights are those before rounding: other programs compute the loss without rounding")

    ends = {key: settings[key] for key in ("bos_token_id", "eos_token_id")}
    files = {"config.json": settings, "generation_config.json": ends}
    try:
        files |= tokenizer_files(corpus, cfg.seq_len)
    except DataError as error:
        say(f"no tokenizer files: {error}")
    write_folder(to, files, tensors_of(model, packed, DTYPES[dtype]))
    rows = model.embed.weight.shape[0]
    say(f"{to}: Olmo2ForCausalLM, {sum(model.num_params().values()):,} parameters in {dtype}"
        + (", those of the blocks' linears in NVFP4" if packed else ""))
    say(f"vocab_size {rows} as in the checkpoint: {corpus.vocab_size} ids of encoding {corpus.encoding_name} "
        f"and {rows - corpus.vocab_size} rows of padding")


def quant_linears(model: GPT) -> dict[str, QuantLinear]:
    """ The linears of the blocks by name: blocks.0.attn.qkv, ... """
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear)}


def model_config(model: GPT, cfg: Config, corpus: Corpus, dtype: str) -> dict:
    """ config.json. Two spellings of dtype and theta: transformers renamed both between versions 4 and 5. """
    eot = corpus.vocab_size - 1 if corpus.encoding_name in TOKENIZERS else None
    return {
        "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2",
        "vocab_size": model.embed.weight.shape[0], "hidden_size": cfg.d_model,
        "intermediate_size": cfg.d_ff, "num_hidden_layers": cfg.n_layer,
        "num_attention_heads": cfg.n_head, "num_key_value_heads": cfg.n_head,
        "max_position_embeddings": cfg.seq_len, "rms_norm_eps": cfg.norm_eps,
        "rope_theta": cfg.rope_theta, "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},
        "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
        "tie_word_embeddings": False, "initializer_range": cfg.init_std, "use_cache": True,
        "bos_token_id": eot, "eos_token_id": eot, "pad_token_id": None,
        "torch_dtype": dtype, "dtype": dtype,
    }


def tensors_of(model: GPT, packed: dict[str, tuple[Quantized, float]], dtype: torch.dtype) -> dict:
    """ Every tensor of model.safetensors by name, on the CPU; modules in `packed` as three tensors each. """
    tensors = {}
    for ours, theirs in module_names(len(model.blocks)).items():
        if ours not in packed:
            weight = model.get_submodule(ours).weight.detach()
            for name, rows in zip(theirs, weight.chunk(len(theirs))):
                tensors[f"{name}.weight"] = rows.to("cpu", dtype, copy=True)
            continue
        q, divisor = packed[ours]
        parts = zip(theirs, pack(q.code).chunk(len(theirs)), q.inner.chunk(len(theirs)))
        for name, code, inner in parts:
            tensors[f"{name}.weight_packed"] = code.cpu().clone()
            tensors[f"{name}.weight_scale"] = inner.cpu().clone().view(torch.float8_e4m3fn)
            tensors[f"{name}.weight_global_scale"] = torch.tensor([divisor])
    return tensors


def check_target(to: Path):
    """ ConfigError unless the folder is empty or not there, and its parent is. """
    try:
        if os.path.lexists(to) and (not to.is_dir() or any(to.iterdir())):
            raise ConfigError(f"{to} is there already and not an empty folder; type another --to=DIR")
        if not to.parent.is_dir():
            raise ConfigError(f"{to.parent} is no folder; make it, or type another --to=DIR")
    except OSError as error:
        raise ConfigError(f"{to}: {error.strerror}; type another --to=DIR") from None


def write_folder(to: Path, files: dict[str, dict], tensors: dict[str, Tensor]):
    """ Fill a temporary folder beside `to` and rename it, so that `to` is never half written. """
    safetensors = package("safetensors.torch")
    temporary = to.with_name(f"{to.name}.tmp-{os.getpid()}")
    try:
        temporary.mkdir()
        for name, content in files.items():
            (temporary / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        safetensors.save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        # the package makes a file that only its owner can read
        shutil.copymode(temporary / "config.json", temporary / "model.safetensors")
        if to.is_dir():
            to.rmdir()      # it is empty, or this fails
        os.replace(temporary, to)
    except (OSError, package("safetensors").SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot write {to} ({reason}); make room, or type another --to=DIR") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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
WIDTH = 16


def pack_weight(name: str, weight: Tensor) -> tuple[Quantized, float]:
    """ A weight (N, K) -> its codes and inner scales, and the divisor of all scales, a power of two. """
    weight = weight.detach()
    if weight.shape[1] % WIDTH:
        raise ConfigError(f"{name} has {weight.shape[1]} input features, no multiple of {WIDTH}, which the "
                          "format wants: type --export=hf")
    largest = float(weight.abs().max())
    # frexp(x) = (m, e) with x = m 2^e and m in [.5, 1): 2^(e - 1) is the power of two at or below x
    exponent = math.frexp(E4M3.max * E2M1.max / largest)[1] - 1 if largest > 0 else 0
    divisor = 2.0 ** max(-126, min(126, exponent))
    return quantize(weight * divisor, PACKED), divisor


def unpack_weight(packed: tuple[Quantized, float]) -> Tensor:
    """ What a program that loads these tensors gets, float32. The division is by a power of two: exact. """
    q, divisor = packed
    return q.dequantize() / divisor


@torch.no_grad()
def price(model: GPT, cfg: Config, corpus: Corpus, packed: dict[str, tuple[Quantized, float]],
          dtype: torch.dtype):
    """
    What one scale per tensor costs, and the loss of the FP8 channels -> lines of text, a table.

    A row is a set of weights: signal to noise against the master weights in dB, by kind of layer and in all,
    and the validation loss with them. Only in the row "recipe's forward" are activations rounded, too.
    """
    layers = quant_linears(model)
    kinds = list(dict.fromkeys(name.split(".")[-1] for name in layers))
    channels = sum(layer.channels.numel() for layer in layers.values() if layer.split)

    def row(label: str, weights: dict[str, Tensor], loss: float) -> str:
        noise = sqnr(layers, weights, kinds) if weights else [""] * (len(kinds) + 1)
        cells = "".join(f"{x:>7.2f}" if weights else f"{x:>7}" for x in noise)
        return f"{label:36}{cells}{loss:>10.4f}"

    yield "NVFP4 with one outer scale per tensor: all weights of the blocks' linears are rounded anew"
    if channels:
        yield f"{channels:,} input channels that OutControl keeps in FP8 become FP4: the format has one kind"
    yield f"{'weights':36}" + "".join(f"{kind:>7}" for kind in [*kinds, "all"]) + "  val loss"
    yield row("recipe's forward", {}, val_loss(model, corpus, cfg))
    with quantizers_off(model):
        yield row("not rounded", {}, val_loss(model, corpus, cfg))
        for label, weights in weight_sets(layers, packed).items():
            # with embedding, head and norms as they stand in the file
            rest = {} if label != "as exported" else {
                ours: model.get_submodule(ours).weight.to(dtype)
                for ours in module_names(len(model.blocks)) if ours not in layers}
            with replaced(model, weights | rest):
                loss = val_loss(model, corpus, cfg)
            yield row(label, weights, loss)


def weight_sets(layers: dict[str, QuantLinear], packed: dict[str, tuple[Quantized, float]]) -> dict:
    """ The sets of rounded weights that are compared -> label -> layer -> weight. """
    sets = {}
    if any(layer.recipe.y_w for layer in layers.values()):
        sets["recipe's weights"] = {name: recipe_weight(layer) for name, layer in layers.items()}
        if any(layer.split for layer in layers.values()):
            sets["one scale, FP8 channels kept"] = {
                name: with_fp8(layer, unpack_weight(pack_weight(name, layer.forward_weight())))
                for name, layer in layers.items()}
    return sets | {"as exported": {name: unpack_weight(packed[name]) for name in layers}}


def recipe_weight(layer: QuantLinear) -> Tensor:
    """ The weight that the forward pass of the recipe multiplies with. """
    return with_fp8(layer, layer.rounded_weight()) if layer.recipe.y_w else layer.weight


def with_fp8(layer: QuantLinear, weight: Tensor) -> Tensor:
    """ The weight with OutControl's channels, if there are any, in their own format. """
    if not layer.split:
        return weight
    return weight.index_copy(1, layer.channels,
                             outlier_values(layer.weight[:, layer.channels], layer.recipe.outlier,
                                            torch.float32))


def sqnr(layers: dict[str, QuantLinear], weights: dict[str, Tensor], kinds: list[str]) -> list[float]:
    """ 10 log10(sum w^2 / sum (w - rounded w)^2) over the layers of each kind, and over all. """
    sums = {kind: torch.zeros(2, dtype=torch.float64) for kind in kinds}
    for name, layer in layers.items():
        w = layer.weight.double()
        pair = torch.stack((w.square().sum(), (w - weights[name]).square().sum()))
        sums[name.split(".")[-1]] += pair.cpu()
    return [10 * math.log10(signal / noise) if noise > 0 else math.inf
            for signal, noise in (pair.tolist() for pair in [*sums.values(), sum(sums.values())])]


@contextmanager
def replaced(model: nn.Module, weights: dict[str, Tensor]):
    """ Within this block the named modules have these weights. """
    mine = {name: model.get_submodule(name).weight for name in weights}
    before = {name: p.clone() for name, p in mine.items()}
    try:
        for name, p in mine.items():
            p.copy_(weights[name])
        yield
    finally:
        for name, p in mine.items():
            p.copy_(before[name])


# -----------------------------------------------------------------------------
# the tokenizer

# GPT-2's pattern is the one that the class ByteLevel has built in; bytes are the same with no merge at all
TOKENIZERS = ("bytes", "gpt2", "r50k_base")
EOT = "<|endoftext|>"


def tokenizer_files(corpus: Corpus, seq_len: int) -> dict[str, dict]:
    """
    tokenizer.json and tokenizer_config.json that give the ids of the corpus's tiktoken encoding.

    errors  DataError where the encoding has another pattern, or its vocabulary cannot be had
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
        if pairs[i] >= rank[token]:
            raise DataError(f"the token {token!r} is no merge of two earlier ones")
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return parts


# -----------------------------------------------------------------------------
# in

JSON_LIMIT = 1 << 26        # bytes; the index of a model of a thousand layers has 2 MB
KNOBS = {"n_layer": "num_hidden_layers", "d_model": "hidden_size", "n_head": "num_attention_heads",
         "d_ff": "intermediate_size", "vocab_size": "vocab_size", "norm_eps": "rms_norm_eps",
         "rope_theta": "rope_theta"}


@torch.no_grad()
def init_weights(model: GPT, cfg: Config) -> str:
    """
    Put the weights in the folder cfg.init_from into a model -> a line that says so.

    The folder comes from anywhere: config.json is compared with cfg before a weight is looked at, each tensor
    with the shape that it should have before it is read, and files that are not safetensors are not opened.

    errors  ConfigError, with the knobs to type where sizes differ
    """
    folder = in_full(cfg.init_from)
    if not os.path.isdir(folder):       # which is false, and no error, for a name that is too long
        raise ConfigError(f"init_from = {cfg.init_from}: no such folder; type --init_from=DIR of an OLMo-2 "
                          "model in Hugging Face format")
    tied = check_config(read_json(folder / "config.json"), folder, cfg, model.embed.weight.shape[0])
    files = tensor_files(folder)
    wanted = {f"{name}.weight": rows
              for ours, theirs in module_names(cfg.n_layer).items()
              for name, rows in zip(theirs, model.get_submodule(ours).weight.chunk(len(theirs)))}
    if tied and "lm_head.weight" not in files:
        del wanted["lm_head.weight"]
    if odd := sorted(wanted.keys() ^ files.keys()):
        what = "lacks the tensor" if odd[0] in wanted else "has a tensor that this model has no place for,"
        raise ConfigError(f"{folder} {what} {odd[0]}: type --init_from=DIR of a plain OLMo-2 model")
    for path in sorted(set(files.values())):
        copy_tensors(path, {name: wanted[name] for name in wanted if files[name] == path})
    if tied:
        model.head.weight.copy_(model.embed.weight)
    return (f"weights from {folder}" +
            (": its head was tied to the embedding, and trains apart from it from now on" if tied else ""))


def copy_tensors(path: Path, wanted: dict[str, Tensor]):
    """ Fill these tensors from a safetensors file. The package checks the header against the file's size. """
    errors = (package("safetensors").SafetensorError, OSError)
    try:
        with package("safetensors").safe_open(path, framework="pt", device="cpu") as file:
            for name, target in wanted.items():
                there = file.get_slice(name)
                kind, shape = there.get_dtype(), list(there.get_shape())
                if kind not in ("F32", "BF16"):
                    raise ConfigError(f"{path}: {name} is {kind}; save the model in float32 or bfloat16")
                if shape != list(target.shape):
                    raise ConfigError(f"{path}: {name} has the shape {shape} and its config.json says "
                                      f"{list(target.shape)}; get the model again")
                target.copy_(file.get_tensor(name))
                if not target.isfinite().all():
                    raise ConfigError(f"{path}: {name} holds a NaN or Inf; get the model again")
    except errors as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(f"{path} cannot be read as safetensors ({reason}); get it again") from None


def tensor_files(folder: Path) -> dict[str, Path]:
    """ Name of each tensor -> the file that has it: the one file, or the shards that an index names. """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        try:
            with package("safetensors").safe_open(single, framework="pt", device="cpu") as file:
                return dict.fromkeys(file.keys(), single)
        except (package("safetensors").SafetensorError, OSError) as error:
            reason = " ".join(str(error).split())[:120]
            raise ConfigError(f"{single} cannot be read as safetensors ({reason}); get it again") from None
    if not index.exists():
        raise ConfigError(f"{folder} has no model.safetensors, nor an index of shards; other formats can "
                          "hold code and are not read: save the model as safetensors")
    shards = read_json(index).get("weight_map")
    good = isinstance(shards, dict) and all(
        isinstance(file, str) and file.isprintable() and file.endswith(".safetensors")
        and not set(file) & set("/\\:")
        for file in shards.values())
    if not good:
        raise ConfigError(f"{index} does not name files beside it; get the model again")
    return {name: folder / file for name, file in shards.items()}


def read_json(path: Path) -> dict:
    """ A JSON object, of a bounded size. """
    try:
        with open(path, "rb") as file:
            text = file.read(JSON_LIMIT + 1)
        content = json.loads(text) if len(text) <= JSON_LIMIT else None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; type --init_from=DIR of an OLMo-2 model in Hugging "
                          "Face format") from None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is no JSON object; get the model again")
    return content


def check_config(theirs: dict, folder: Path, cfg: Config, vocab: int) -> bool:
    """ ConfigError unless their config.json describes the model of cfg -> whether the head is tied. """
    def need(holds: bool, problem: str):
        if not holds:
            raise ConfigError(f"{folder}: {problem}")

    need(theirs.get("model_type") == "olmo2", "config.json is not that of an OLMo-2 (model_type olmo2); type "
         "--init_from=DIR of one")
    rope = theirs.get("rope_parameters") or {}
    for given in (rope, theirs.get("rope_scaling") or {}):
        need(isinstance(given, dict) and given.get("rope_type", given.get("type", "default")) == "default",
             "its rotary positions are scaled, which model.py cannot do; take a model without rope_scaling")
    values = {"rope_theta": rope.get("rope_theta")} | theirs
    values = {knob: values.get(key) for knob, key in KNOBS.items()}
    for knob, value in values.items():
        kinds = (int, float) if knob in ("norm_eps", "rope_theta") else (int,)
        need(type(value) in kinds and 0 < value < 1e9, f"config.json has no good {KNOBS[knob]}; get it again")
    ours = {knob: getattr(cfg, knob) for knob in KNOBS} | {"vocab_size": vocab}
    differ = [f"--{knob}={value}" for knob, value in values.items() if value != ours[knob]]
    need(not differ, f"the model there has other sizes than this run: type {' '.join(differ)}")

    heads = theirs.get("num_key_value_heads")
    need(heads in (None, cfg.n_head), f"num_key_value_heads is not {cfg.n_head}: it has grouped queries and "
         "model.py has none; take a model without them")
    need(theirs.get("head_dim") in (None, cfg.d_model // cfg.n_head), "its heads are not d_model / n_head "
         "wide, as those of model.py are; take another model")
    need(not theirs.get("attention_bias") and theirs.get("hidden_act", "silu") == "silu"
         and not theirs.get("quantization_config"), "it has biases, another activation than silu or packed "
         "weights, and model.py has none of these; take a plain OLMo-2")
    tied = theirs.get("tie_word_embeddings", False)
    need(tied is None or type(tied) is bool, "config.json has no good tie_word_embeddings; get it again")
    return bool(tied)

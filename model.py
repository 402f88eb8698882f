"""
The transformer that is trained: OLMo-2 (arXiv 2501.00656), top to bottom, with no FP4 in sight.

    tokens -> embedding -> n_layer blocks -> RMSNorm -> head -> logits
    block:  x = x + RMSNorm(attention(x))           or, of a Llama:  x = x + attention(RMSNorm(x))
            x = x + RMSNorm(mlp(x))                                  x = x + mlp(RMSNorm(x))

What differs from a GPT-2: RMSNorm stands on the output of attention and MLP and not on their input; queries
and keys are normalised over the whole width; rotary positions; SwiGLU; no biases; a head of its own weights.
The first two are not so in a Llama, which is here so that results can be compared with those of others. The
same weights give the same logits as Olmo2ForCausalLM and LlamaForCausalLM of Hugging Face transformers
(tests/test_model.py).

The four linear layers of a block come from make_linear(in_features, out_features, name): this is where FP4
gets in. Embedding, head, norms and the attention products stay in high precision, as in arXiv 2510.27527.
Not here: a KV cache, dropout, grouped queries.

Dimensions: B sequences, S tokens in each, d = d_model, H heads, D = d / H, F = d_ff, V ids in the vocabulary
"""
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

IGNORE = -100    # a target that does not count, as in F.cross_entropy


class RMSNorm(nn.Module):
    """ x / rms(x) * weight, in float32 whatever comes in. """

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * y).to(x.dtype)


def rope_tables(seq_len: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """ cos and sin of the angle position * theta^(-2i / D), each (S, D/2), float32. """
    speed = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)    # (D/2,)
    angle = torch.arange(seq_len).float()[:, None] * speed                      # (S, D/2)
    return angle.cos(), angle.sin()


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """
    Turn each pair of channels of x (B, H, S, D) by its angle; cos and sin are (S, D/2).

    The pairs are (i, i + D/2), the halves of a head, as in transformers. RoFormer (arXiv 2104.09864) pairs
    neighbours, (2i, 2i + 1): the same model with the rows of Wq and Wk reordered; weights do not carry over.
    """
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, cfg, make_linear: Callable, name: str):
        super().__init__()
        self.n_head, d = cfg.n_head, cfg.d_model
        self.qkv = make_linear(d, 3 * d, f"{name}.qkv")
        self.q_norm = RMSNorm(d, cfg.norm_eps) if cfg.block == "olmo2" else nn.Identity()
        self.k_norm = RMSNorm(d, cfg.norm_eps) if cfg.block == "olmo2" else nn.Identity()
        self.out = make_linear(d, d, f"{name}.out")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, S, d = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)                       # (B, S, d) each
        # over all heads together, so a head may be louder than another; it bounds the logits of attention
        q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.view(B, S, self.n_head, -1).transpose(1, 2) for t in (q, k, v))    # (B, H, S, D)
        y = F.scaled_dot_product_attention(rope(q, cos, sin), rope(k, cos, sin), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, S, d))


class MLP(nn.Module):
    def __init__(self, d_model: int, d_ff: int, make_linear: Callable, name: str):
        super().__init__()
        self.up = make_linear(d_model, 2 * d_ff, f"{name}.up")       # gate and up, fused
        self.down = make_linear(d_ff, d_model, f"{name}.down")

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)                       # (B, S, F) each
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, cfg, make_linear: Callable, name: str):
        super().__init__()
        self.norm_first = cfg.block == "llama"
        self.attn = Attention(cfg, make_linear, f"{name}.attn")
        self.attn_norm = RMSNorm(cfg.d_model, cfg.norm_eps)
        self.mlp = MLP(cfg.d_model, cfg.d_ff, make_linear, f"{name}.mlp")
        self.mlp_norm = RMSNorm(cfg.d_model, cfg.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.norm_first:
            x = x + self.attn(self.attn_norm(x), cos, sin)
            return x + self.mlp(self.mlp_norm(x))
        x = x + self.attn_norm(self.attn(x, cos, sin))
        return x + self.mlp_norm(self.mlp(x))


def plain_linear(in_features: int, out_features: int, name: str) -> nn.Module:
    return nn.Linear(in_features, out_features, bias=False)


class GPT(nn.Module):
    def __init__(self, cfg, vocab_size: int, make_linear: Callable = plain_linear):
        """
        cfg          has block, n_layer, d_model, n_head, d_ff, seq_len, rope_theta, norm_eps, init_std, seed
                     and recompute: keep only the input of each block, and compute the block again in the
                     backward pass. Noise is addressed by a counter, so that it comes out the same
        vocab_size   V, rows of the embedding and of the head
        make_linear  (in_features, out_features, name) -> a module with one parameter, `weight` (out, in); the
                     names are blocks.0.attn.qkv, blocks.0.attn.out, blocks.0.mlp.up, blocks.0.mlp.down, ...
        """
        super().__init__()
        self.seq_len, self.recompute = cfg.seq_len, cfg.recompute
        self.embed = nn.Embedding(vocab_size, cfg.d_model)
        self.blocks = nn.ModuleList(Block(cfg, make_linear, f"blocks.{i}") for i in range(cfg.n_layer))
        self.norm = RMSNorm(cfg.d_model, cfg.norm_eps)
        self.head = nn.Linear(cfg.d_model, vocab_size, bias=False)

        # not part of a checkpoint: it follows from the config
        cos, sin = rope_tables(cfg.seq_len, cfg.d_model // cfg.n_head, cfg.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.init_weights(cfg.init_std, cfg.seed)

    @torch.no_grad()
    def init_weights(self, std: float, seed: int):
        """
        Matrices from a normal that is cut at 3 std, which leaves 0.987 std; norms 1: as in OLMo-2, while
        transformers' Llama does not cut. All of it is drawn from one generator on the CPU, in the order of
        named_parameters(), so that every device, every make_linear and either block starts from the same
        weights. randn has the same numbers in every version of torch; trunc_normal_ has not.
        """
        generator = torch.Generator("cpu").manual_seed(seed)
        for name, p in self.named_parameters():
            layer = name.removesuffix(".weight").split(".")[-1]
            if name.endswith(".weight") and layer in ("embed", "qkv", "out", "up", "down", "head"):
                if not p.is_meta:    # a model on the meta device is only counted
                    drawn = torch.randn(p.shape, generator=generator)
                    while (beyond := drawn.abs() > 3).any():
                        drawn[beyond] = torch.randn(int(beyond.sum()), generator=generator)
                    p.copy_(std * drawn)
            elif name.endswith(".weight") and layer in ("q_norm", "k_norm", "attn_norm", "mlp_norm", "norm"):
                p.fill_(1.0)
            else:
                raise ValueError(f"init_weights has no rule for the parameter {name}")

    def forward(self, tokens: Tensor, targets: Tensor | None = None):
        """
        in    tokens   (B, S) int64, S at most cfg.seq_len
              targets  (B, S) int64, the token that follows each; IGNORE where it does not count
        out   without targets: logits (B, S, V) float32
              with targets: (ce_sum, z_sum, n_targets), scalars summed over the targets that count: the cross
              entropy, log(sum(exp(logits)))^2 for the z-loss, and their number, int64

        Sums and not means, so that micro-steps with unequal numbers of targets average rightly: the loss of a
        batch is (ce_sum + z_loss * z_sum) / n_targets, each of the three summed over the micro-steps first.
        """
        S = tokens.shape[1]
        if S > self.seq_len:
            raise ValueError(f"{S} tokens in a sequence, but the model was made for seq_len = {self.seq_len}")
        x = self.embed(tokens)                                       # (B, S, d)
        cos, sin = self.cos[:S], self.sin[:S]
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                # nothing in a block draws from torch's generators
                x = checkpoint(block, x, cos, sin, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, cos, sin)
        return self.logits(x) if targets is None else self.losses(x, targets)

    def logits(self, x: Tensor) -> Tensor:
        """ What the last block leaves, (B, S, d) -> (B, S, V) float32. """
        return self.head(self.norm(x)).float()

    def losses(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """ The same and targets (B, S) -> (ce_sum, z_sum, n_targets), see forward. """
        logits, counts = self.logits(x), targets != IGNORE
        # one logsumexp serves both terms, so that only one (B, S, V) tensor is kept for the backward pass
        lse = logits.logsumexp(-1)                                   # (B, S)
        picked = logits.gather(-1, targets.where(counts, 0)[..., None])[..., 0]
        ce_sum = (lse - picked).where(counts, 0.0).sum()
        z_sum = lse.square().where(counts, 0.0).sum()
        return ce_sum, z_sum, counts.sum()

    def optimizer_groups(self, weight_decay: float) -> list[dict]:
        """ All but the token embedding are decayed, norms and head too, as OLMo does (arXiv 2501.00656). """
        decayed = [p for p in self.parameters() if p is not self.embed.weight]
        assert len(decayed) + 1 == len(list(self.parameters())), "each parameter is in exactly one group"
        return [{"params": [self.embed.weight], "weight_decay": 0.0},
                {"params": decayed, "weight_decay": weight_decay}]

    def num_params(self) -> dict[str, int]:
        """ Parameters in the linear layers of the blocks, in embedding and head together, and in norms. """
        count = {"block_linears": 0, "embeddings": 0, "rest": 0}
        for name, p in self.named_parameters():
            kind = "rest" if p.ndim == 1 else "block_linears" if name.startswith("blocks.") else "embeddings"
            count[kind] += p.numel()
        return count

    @torch.no_grad()
    def generate(self, tokens: Tensor, n: int, temperature: float = 1.0, top_k: int = 0,
                 generator: torch.Generator | None = None, vocab_limit: int | None = None) -> Tensor:
        """
        Append n tokens to each row of tokens (B, S >= 1) and return (B, S + n).

        temperature  0 takes the likeliest token
        top_k        sample among this many likeliest; 0 = among all
        generator    on the CPU; None makes one with seed 0, so that sampling never touches the global state
        vocab_limit  ids from here on are padding of the vocabulary and are never taken

        FloatingPointError where a logit is NaN or infinite.
        """
        generator = generator or torch.Generator("cpu").manual_seed(0)
        was_training = self.training
        self.eval()
        for _ in range(n):
            logits = self(tokens[:, -self.seq_len:])[:, -1].cpu()                    # (B, V)
            logits[:, vocab_limit if vocab_limit is not None else logits.shape[1]:] = -torch.inf
            if not logits.amax(1).isfinite().all():
                raise FloatingPointError("the model's outputs are not finite")
            if top_k > 0:
                kth = logits.topk(min(top_k, logits.shape[1])).values[:, -1:]
                logits[logits < kth] = -torch.inf
            if temperature == 0:
                following = logits.argmax(-1, keepdim=True)                          # (B, 1)
            else:
                following = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat((tokens, following.to(tokens.device)), dim=1)
        self.train(was_training)
        return tokens

""" model.py: the same functions as transformers' Olmo2 and Llama, and what the training loop relies on. """
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from config import Config
from model import GPT, IGNORE, RMSNorm, plain_linear, rope, rope_tables

# several of everything, no two sizes alike, so that a transposed or swapped axis cannot pass
CFG = Config(n_layer=3, d_model=48, n_head=4, d_ff=80, seq_len=32, seed=5)
LLAMA = replace(CFG, block="llama")
both = pytest.mark.parametrize("cfg", [CFG, LLAMA], ids=["olmo2", "llama"])
V = 100
EPS = torch.finfo(torch.float32).eps


def tokens(B=2, S=32, seed=0, high=V):
    return torch.randint(0, high, (B, S), generator=torch.Generator().manual_seed(seed))


def lively(cfg=CFG, vocab_size=V):
    """ A model whose norms differ from 1 and whose attention is far from uniform, as after some training. """
    model = GPT(cfg, vocab_size)
    g = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.copy_(torch.rand(p.shape, generator=g) + 0.5)
            else:
                p.copy_(torch.randn(p.shape, generator=g) * 0.3)
    return model


# -----------------------------------------------------------------------------
# against transformers


def to_transformers(model, cfg):
    """ The same weights in a model of theirs: fused layers are cut, names are theirs. """
    transformers = pytest.importorskip("transformers")
    config, make, norms = {
        "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM,
                  {"self_attn.q_norm": "attn.q_norm", "self_attn.k_norm": "attn.k_norm",
                   "post_attention_layernorm": "attn_norm", "post_feedforward_layernorm": "mlp_norm"}),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM,
                  {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}),
    }[cfg.block]
    theirs = make(config(
        vocab_size=V, hidden_size=cfg.d_model, intermediate_size=cfg.d_ff, num_hidden_layers=cfg.n_layer,
        num_attention_heads=cfg.n_head, max_position_embeddings=cfg.seq_len, rms_norm_eps=cfg.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": cfg.rope_theta}, rope_theta=cfg.rope_theta,
        tie_word_embeddings=False, attention_bias=False, pad_token_id=None, eos_token_id=None))
    weights = {"model.embed_tokens.weight": model.embed.weight, "model.norm.weight": model.norm.weight,
               "lm_head.weight": model.head.weight}
    for i, block in enumerate(model.blocks):
        q, k, v = block.attn.qkv.weight.chunk(3)
        gate, up = block.mlp.up.weight.chunk(2)
        layer = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
                 "self_attn.o_proj": block.attn.out.weight,
                 "mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": block.mlp.down.weight,
                 **{name: block.get_submodule(ours).weight for name, ours in norms.items()}}
        weights |= {f"model.layers.{i}.{name}.weight": w for name, w in layer.items()}
    theirs.load_state_dict(weights)      # strict: a weight of theirs that we lack is an error
    return theirs


@both
def test_logits_and_gradients_equal_transformers(cfg):
    """
    Catches anything that makes this another architecture: norms on the other side, QK-norm per head, or in a
    Llama, interleaved rotary pairs, another theta, gate and up exchanged, eps in another place. The two sum
    in float32 in other orders (products are fused here), so they differ by a few eps of the largest value:
    2.4 were seen for logits, 3.8 for gradients.
    """
    ours = lively(cfg)
    theirs = to_transformers(ours, cfg)
    x, y = tokens(), tokens(seed=1)
    a, b = ours(x), theirs(x).logits
    assert a.shape == b.shape and (a - b).abs().max() <= 20 * EPS * b.abs().max()

    ce_sum, _, n = ours(x, y)
    (ce_sum / n).backward()
    F.cross_entropy(b.flatten(0, 1), y.flatten()).backward()
    a, b = ours.embed.weight.grad, theirs.model.embed_tokens.weight.grad
    assert (a - b).abs().max() <= 20 * EPS * b.abs().max()


# -----------------------------------------------------------------------------
# the function


def test_causal():
    """ Catches attention that sees the future: a changed token may not change what comes before it. """
    model, x = lively(), tokens()
    y = x.clone()
    y[:, 20] = (y[:, 20] + 1) % V
    changed = (model(x) != model(y)).any(-1)                                 # (B, S)
    assert not changed[:, :20].any() and changed[:, 20:].all()


def test_short_sequences():
    """ Catches tables that are not cut to the length: the start of a causal sequence stands for itself. """
    model, x = lively(), tokens()
    whole = model(x)
    for S in (1, 2, 31):
        part = model(x[:, :S])
        # products of other shapes are summed in another order
        assert (part - whole[:, :S]).abs().max() <= 20 * EPS * whole.abs().max()
    with pytest.raises(ValueError, match="33 tokens"):
        model(tokens(S=33))


def test_positions_matter_only_by_difference():
    """ Catches a rotation that is not one: q.k may depend on the distance of positions and on it alone. """
    cos, sin = rope_tables(64, 8, 10_000.0)
    g = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 8, generator=g)
    q, k = (rope(x.expand(1, 1, 64, 8), cos, sin)[0, 0] for x in (q, k))     # (64, 8), alike everywhere
    scores = q @ k.T
    for distance in (0, 1, 13):
        d = scores.diagonal(distance)
        # the angles are float32 and reach 63, so they carry errors up to 63 eps, in q and in k
        assert (d - d[0]).abs().max() <= 2 * 63 * EPS * q[0].norm() * k[0].norm()
    assert scores[0].std() > 0.1


def test_loss_by_hand():
    """
    Catches ignored targets that are counted or averaged over, a shift of targets by one, a z that is the
    square of a mean, and sums that do not add up over micro-steps of unequal sizes.
    """
    model, x, y = lively(), tokens(), tokens(seed=1)
    y[0, 5:], y[1, 0] = IGNORE, IGNORE
    ce_sum, z_sum, n = model(x, y)
    ce = z = count = 0
    for row, targets in zip(model(x).double(), y):
        for logits, target in zip(row, targets.tolist()):
            if target >= 0:
                lse = math.log(sum(math.exp(v) for v in logits.tolist()))
                ce, z, count = ce + lse - logits[target].item(), z + lse**2, count + 1
    assert n == count == 5 + 31 and not n.is_floating_point()
    # each term is rounded a few times, and sums of 36 in any order
    assert abs(ce_sum.item() - ce) <= 40 * EPS * ce and abs(z_sum.item() - z) <= 40 * EPS * z
    assert ce_sum.dtype == z_sum.dtype == torch.float32

    parts = [model(x[i:i + 1], y[i:i + 1]) for i in range(2)]
    for whole, first, second in zip((ce_sum, z_sum, n), *parts):
        assert abs((first + second - whole).item()) <= 40 * EPS * whole.item()


def test_loss_gradient_equals_cross_entropy():
    """ Catches a gradient that reaches ignored targets, or misses one of the two terms. """
    model, x, y = lively(), tokens(), tokens(seed=1)
    y[0, 5:] = IGNORE
    ce_sum, z_sum, _ = model(x, y)
    ours = torch.autograd.grad(ce_sum + 0.1 * z_sum, model.head.weight)[0]
    logits = model(x)
    z = logits.logsumexp(-1)[y != IGNORE].square().sum()
    ce = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=IGNORE, reduction="sum")
    theirs = torch.autograd.grad(ce + 0.1 * z, model.head.weight)[0]
    assert (ours - theirs).abs().max() <= 20 * EPS * theirs.abs().max()


def test_a_batch_without_targets_is_zero():
    """ Catches 0 / 0: a micro-step of padding alone must add nothing, and no nan, to the gradient. """
    model, x = lively(), tokens()
    ce_sum, z_sum, n = model(x, torch.full_like(x, IGNORE))
    (ce_sum + z_sum).backward()
    assert ce_sum == z_sum == n == 0
    assert all((p.grad == 0).all() for p in model.parameters())


def test_bf16_autocast_keeps_norms_and_loss_in_float32():
    """ Catches a loss, or a mean square, that is taken in bf16, where 1 + 1/256 is 1. """
    model, x, y = lively(), tokens(), tokens(seed=1)
    seen = []
    for m in (model.embed, model.blocks[0], model.head):
        m.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = model(x, y)
        assert model(x).dtype == torch.float32
    assert seen[:3] == [torch.float32, torch.float32, torch.bfloat16]
    assert losses[0].dtype == losses[1].dtype == torch.float32
    # bf16 has 8 bits, so the two forwards differ by about 1/256 a layer
    assert abs(losses[0] / model(x, y)[0] - 1) < 3 / 256

    norm = RMSNorm(3, 1e-6)
    assert norm(torch.full((3,), 1e4, dtype=torch.float16)).tolist() == [1, 1, 1]    # 1e8 overflows float16


@both
def test_compiles_without_graph_break(cfg):
    """ Catches Python in the forward that a compiler cannot follow, also for a second length. """
    model = lively(replace(cfg, n_layer=1))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for S in (32, 7):
        x, y = tokens(S=S), tokens(S=S, seed=1)
        a, b = compiled(x, y), model(x, y)
        assert abs(a[0] - b[0]) <= 20 * EPS * b[0] and a[2] == b[2]
        a[0].backward()
    assert all(p.grad is not None for p in model.parameters())


# -----------------------------------------------------------------------------
# initial weights


def test_initial_weights():
    """
    Catches a std that is that of the normal after the cut, a cut elsewhere, a layer that keeps nn.Linear's
    own init, and norms that are drawn. n numbers show a standard deviation to 1 / sqrt(2n) of itself: 0.14%
    for all 268,000 here, and the cut takes away 1.3%.
    """
    std = 0.02
    model = GPT(replace(CFG, d_model=96, d_ff=160, init_std=std), V)
    matrices = {name: p for name, p in model.named_parameters() if p.ndim == 2}
    rest = [p for p in model.parameters() if p.ndim != 2]
    assert all((p == 1).all() for p in rest) and len(matrices) == 2 + 4 * CFG.n_layer
    # a standard normal cut at c has the variance 1 - 2 c phi(c) / (2 Phi(c) - 1), with phi its density
    c = 3.0
    phi = math.exp(-c * c / 2) / math.sqrt(2 * math.pi)
    expected = std * math.sqrt(1 - 2 * c * phi / math.erf(c / math.sqrt(2)))
    assert expected == pytest.approx(0.9866 * std, rel=1e-4)    # and model.py says 0.987
    for name, p in matrices.items():
        sigma = 1 / math.sqrt(2 * p.numel())
        assert abs(p.std().item() / expected - 1) < 4 * sigma, name
        assert abs(p.mean().item()) < 4 * std / math.sqrt(p.numel()), name
        assert p.abs().max() <= c * std, name
    everything = torch.cat([p.flatten() for p in matrices.values()])
    assert abs(everything.std().item() / expected - 1) < 4 / math.sqrt(2 * everything.numel())
    # 1 in 1,000 lies between 2.9 std and the cut
    assert everything.abs().max() > 2.9 * std


def test_initial_weights_follow_the_seed_alone():
    """ Catches draws from the global generator, and an order that changes with what make_linear builds. """
    class Other(nn.Module):
        """ Draws numbers of its own, as nn.Linear does, but other ones; has a buffer besides its weight. """
        def __init__(self, in_features, out_features):
            super().__init__()
            self.register_buffer("signs", torch.randn(16))
            self.weight = nn.Parameter(torch.rand(out_features, in_features))

    def weights(cfg, make_linear=plain_linear):
        state = torch.get_rng_state()
        model = GPT(cfg, V, make_linear)
        torch.set_rng_state(state)
        return torch.cat([p.flatten() for p in model.parameters()])

    first = weights(CFG)
    torch.manual_seed(77)
    assert torch.equal(first, weights(CFG))
    assert torch.equal(first, weights(CFG, lambda i, o, name: Other(i, o)))
    llama = weights(LLAMA)
    assert torch.equal(first[first != 1], llama[llama != 1])        # all but norms
    assert not torch.equal(first, weights(replace(CFG, seed=6)))

    changed = lively()
    changed.init_weights(CFG.init_std, CFG.seed)    # sets every parameter, norms too
    assert torch.equal(first, torch.cat([p.flatten() for p in changed.parameters()]))


def test_unknown_parameters_are_refused():
    """ Catches a new parameter that would silently keep whatever its module gave it. """
    with pytest.raises(ValueError, match="blocks.0.attn.qkv.bias"):
        GPT(CFG, V, lambda i, o, name: nn.Linear(i, o))


def test_make_linear_gets_names_and_shapes():
    """ Catches a block linear that does not pass through make_linear, and a head that does. """
    asked = {}
    def make_linear(i, o, name):
        asked[name] = (o, i)
        return plain_linear(i, o, name)
    model = GPT(CFG, V, make_linear)
    d, f = CFG.d_model, CFG.d_ff
    one = {"attn.qkv": (3 * d, d), "attn.out": (d, d), "mlp.up": (2 * f, d), "mlp.down": (d, f)}
    assert asked == {f"blocks.{i}.{name}": shape for i in range(CFG.n_layer) for name, shape in one.items()}
    assert all(model.get_submodule(name).weight.shape == shape for name, shape in asked.items())


# -----------------------------------------------------------------------------
# what the loop asks for


def test_optimizer_groups_cover_all():
    """ Catches a parameter that is never stepped, or stepped twice, and decay on the embedding. """
    model = GPT(CFG, V)
    groups = model.optimizer_groups(0.1)
    ids = [id(p) for group in groups for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in model.parameters())
    assert [group["weight_decay"] for group in groups] == [0.0, 0.1]
    assert [id(p) for p in groups[0]["params"]] == [id(model.embed.weight)]
    torch.optim.AdamW(groups, lr=1e-3)


@both
def test_num_params(cfg):
    """ Catches a split that forgets a table: the paper's sizes count one of the two, ours counts both. """
    model = GPT(cfg, V)
    count = model.num_params()
    d, f, L = CFG.d_model, CFG.d_ff, CFG.n_layer
    norms = d * ((2 if cfg is LLAMA else 4) * L + 1)
    assert count == {"block_linears": L * (4 * d * d + 3 * d * f), "embeddings": 2 * V * d, "rest": norms}
    assert sum(count.values()) == sum(p.numel() for p in model.parameters())


def test_state_dict_holds_weights_only():
    """ Catches position tables in checkpoints, which then could not be read with another seq_len. """
    model = lively()
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    longer = GPT(replace(CFG, seq_len=64, seed=8), V)
    longer.load_state_dict(model.state_dict())
    x = tokens()
    assert torch.equal(longer(x), model(x))


def test_generate():
    """ Catches ids of padding, a crop at the wrong end, and global state that sampling moves. """
    model, prompt = lively(), tokens(S=5, high=20)
    state = torch.get_rng_state()
    model.train()
    generator = torch.Generator().manual_seed(3)
    out = model.generate(prompt, 40, temperature=5.0, generator=generator, vocab_limit=20)
    assert out.shape == (2, 45) and torch.equal(out[:, :5], prompt)      # longer than seq_len
    assert out.max() < 20 and len(out.unique()) > 10                     # of 100 ids, 80 are padding
    assert model.training and torch.equal(state, torch.get_rng_state())
    model.eval()
    again = model.generate(prompt, 40, temperature=5.0, generator=generator.manual_seed(3), vocab_limit=20)
    assert not model.training and torch.equal(out, again)


def test_generate_greedy_and_top_k():
    """ Catches a temperature of 0 that divides, argmax at another position, and top_k off by one. """
    model, prompt = lively(), tokens(S=30, high=20)
    out = model.generate(prompt, 10, temperature=0, vocab_limit=50)
    for at in range(30, 40):
        likeliest = model(out[:, max(0, at - 32):at])[:, -1, :50].argmax(-1)
        assert torch.equal(out[:, at], likeliest)
    assert torch.equal(out, model.generate(prompt, 10, temperature=1.0, top_k=1, vocab_limit=50))

    top = model(prompt[:1])[0, -1].topk(3).indices
    many = model.generate(prompt[:1].repeat(500, 1), 1, temperature=10.0, top_k=3)[:, -1]
    assert set(many.tolist()) == set(top.tolist())


def test_learns():
    """ Catches a sign or a detached tensor: one batch must be learnt by heart. """
    model, x = GPT(replace(CFG, init_std=0.1), V), tokens()
    optimizer = torch.optim.AdamW(model.optimizer_groups(0.1), lr=1e-2)
    for _ in range(60):
        ce_sum, z_sum, n = model(x[:, :-1], x[:, 1:])
        ((ce_sum + 1e-5 * z_sum) / n).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert ce_sum / n < 0.1

"""Mixture-of-Recursions (MoR): a Transformer that spends more layers on some tokens than on others.

The middle layers of a MoR are one shared block that is applied 1 to N times. A small router, trained along
with everything else, decides token by token how often. That saves parameters (one block instead of N),
compute (a token that has left is not computed again) and KV cache (what was not computed leaves no entry).

    depth 3                   *         *        the same block a third time, for one third of the tokens
    depth 2             *     *         *        the same block again, for those that its router keeps
    depth 1       *     *     *    *    *        the shared block, for every token
    first layer   *     *     *    *    *
                  A    dog   that  ,   barks     after its depth a token waits for the last layer and the head

Paper: arXiv 2507.10524; equation numbers below are the paper's. Where this file departs from the paper or
from the authors' released code, a comment that begins with DIFFERS: gives the reason.

Read it from top to bottom: 1 configuration, 2 the ordinary Transformer, 3 which tokens attend to which, 4 who
goes deeper, 5 the whole model, 6 generation, 7 what it costs. train.py and sample.py run it.

Letters in shape comments: B rows in the batch, T tokens in a row, N tokens in flight (of any rows, N <= B*T),
S the longest row among them, C width of the residual stream (n_embd), H query heads, G key/value heads, D
width of a head, V vocabulary. A token is one vector of an (N, C) matrix; which row of text it is from matters
only where tokens attend to, or compete with, each other.
Depth counts 1..n_rec in words, outputs and logs; code loops over r = 0..n_rec-1.
"""
import math
import time
from collections import Counter, deque
from dataclasses import dataclass, field, fields
from typing import Literal, get_args, get_origin

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# ------------------------------------------------------------------------------------------------------------
# 1. Configuration

@dataclass
class MoRConfig:
    """Shape of a model. Impossible ones raise ValueError. The comment behind a field is its --help text."""
    vocab_size: int = 50304  # token ids the embedding knows
    block_size: int = 2048  # longest row of tokens
    n_layer: int = 32  # depth of the plain Transformer that this model stands in for
    n_head: int = 15  # query heads
    n_kv_head: int = 5  # key/value heads, each shared by n_head / n_kv_head query heads
    n_embd: int = 960  # width of the residual stream
    n_ff: int = 2560  # width inside the MLP
    n_rec: int = 3  # recursions: how often the shared block can be applied; 1 is a plain Transformer
    sharing: Literal["middle_cycle", "cycle", "middle_sequence", "sequence"] = "middle_cycle"  # who shares
    router: Literal["expert", "token", "none"] = "expert"  # who decides the depth; none: all go to the last
    cache: Literal["recursion", "shared"] = "recursion"  # keys and values of each recursion, or the first
    router_arch: Literal["linear", "mlp", "random"] = "linear"  # what scores a token; random: a baseline
    gate: Literal["paper", "sigmoid", "tanh", "softmax"] = "paper"  # paper: expert sigmoid, token softmax
    alpha: float = -1.0  # scale of the gate; -1: the paper's, 0.1 for expert and 1.0 for token
    sampling: Literal["aux_loss", "aux_router"] = "aux_loss"  # expert: what learns to foretell the top-k
    aux_coef: float = 0.001  # expert: weight of that lesson's loss
    balance: Literal["loss", "loss_free"] = "loss"  # token: how depths are kept in balance
    balance_coef: float = 0.1  # token: weight of the balance loss
    balance_rate: float = 0.001  # token: step of the loss-free bias
    z_coef: float = -1.0  # weight of the z-loss on router logits; -1: the paper's, expert 0 and token 1e-5

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            if get_origin(f.type) is Literal and value not in get_args(f.type):
                raise ValueError(f"{f.name}={value!r} is unknown: choose from {', '.join(get_args(f.type))}")
            if f.type is int and value < 1:
                raise ValueError(f"{f.name}={value} must be at least 1")
            if f.type is float and (not math.isfinite(value) or value < 0 and value != f.default):
                raise ValueError(f"{f.name}={value} must be a number that is not negative")
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f"n_embd={self.n_embd} must be an even multiple of n_head={self.n_head}")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head={self.n_head} must be a multiple of n_kv_head={self.n_kv_head}")
        if self.n_layer <= self.n_unshared:
            raise ValueError(f"n_layer={self.n_layer} must be at least 3 for sharing={self.sharing}")
        if self.routed and "cycle" not in self.sharing:
            raise ValueError(f"sharing={self.sharing} has no block that router={self.router} could repeat: "
                             "choose cycle or middle_cycle, or router=none")
        gates = ("paper", "sigmoid", "softmax" if self.router == "token" else "tanh")
        if self.routed and self.gate not in gates:
            raise ValueError(f"gate={self.gate} does not fit router={self.router}: choose {', '.join(gates)}")
        if self.router_arch == "random" and (self.router != "expert" or self.sampling == "aux_router"):
            raise ValueError("router_arch=random has nothing to learn: use router=expert, sampling=aux_loss")

    @property
    def routed(self):
        """Whether there is anything to decide."""
        return self.n_rec > 1 and self.router != "none"

    @property
    def n_unshared(self):
        """Layers outside the shared block: the first and the last one in the middle_ maps."""
        return 2 if self.sharing.startswith("middle") else 0

    @property
    def n_shared(self):
        """Layers in the shared block."""
        # DIFFERS: where n_rec does not divide the depth, the released code drops layers; the paper adds some.
        return math.ceil((self.n_layer - self.n_unshared) / self.n_rec)

    @property
    def effective_depth(self):
        """Layers that a token of depth n_rec passes through."""
        return self.n_unshared + self.n_rec * self.n_shared

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    def capacity(self, T, warm=1.0):
        """Tokens of a row of T that expert-choice keeps at each recursion: (n_rec - r) / n_rec of them, >= 1.

        warm in [0, 1]: progress of the capacity warm-up (the paper's appendix tried it), which starts with
        all T and comes down on a cosine, in steps of T/16 so that compiled code meets few sizes.
        """
        k = [max(1, (self.n_rec - r) * T // self.n_rec) for r in range(self.n_rec)]
        if warm < 1:
            step, slack = max(1, T // 16), 0.5 * (1 + math.cos(math.pi * warm))
            k = [min(T, kr + math.ceil((T - kr) * slack / step) * step) for kr in k]
        return tuple(k)


# Sizes of the paper's Table 6, and one for two CPU cores.
PRESETS = {
    "tiny": dict(vocab_size=257, block_size=128, n_layer=8, n_head=3, n_kv_head=1, n_embd=96, n_ff=256),
    "135m": dict(n_layer=30, n_head=9, n_kv_head=3, n_embd=576, n_ff=1536),
    "360m": dict(n_layer=32, n_head=15, n_kv_head=5, n_embd=960, n_ff=2560),
    "730m": dict(n_layer=26, n_head=24, n_kv_head=8, n_embd=1536, n_ff=4096),
    "1.7b": dict(n_layer=24, n_head=32, n_kv_head=32, n_embd=2048, n_ff=8192),
}


# ------------------------------------------------------------------------------------------------------------
# 2. The ordinary Transformer: Llama, as in SmolLM. The one change: tokens come without their rows

def at_least_float32(x):
    """Router logits, sampling and losses are never computed in half precision (float64 stays float64)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rope_table(T, D, dtype, device, theta=10000.0):
    """cos and sin, (T, 2, 1, D), of the angles t * theta^(-2i/D) by which position t turns pair (i, i + D/2).
    sin starts with the minus of a rotation, which makes (a cos - b sin, b cos + a sin) of a pair (a, b)."""
    freq = theta ** (-torch.arange(0, D, 2, device=device, dtype=dtype) / D)               # (D/2,)
    angle = torch.arange(T, device=device, dtype=dtype)[:, None] * freq                    # (T, D/2)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([torch.cat([cos, cos], dim=1), torch.cat([-sin, sin], dim=1)], dim=1).unsqueeze(2)


def rotate(x, rope):
    """Turn the pairs in each head of x (N, H, D) by their token's angles; rope: cos, sin, (N, 1, D) each."""
    cos, sin = rope
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        H, G, D = self.heads = config.n_head, config.n_kv_head, config.head_dim
        self.q_proj = nn.Linear(config.n_embd, H * D, bias=False)
        self.kv_proj = nn.Linear(config.n_embd, 2 * G * D, bias=False)   # k and v are always needed together
        self.o_proj = nn.Linear(H * D, config.n_embd, bias=False)

    def forward(self, x, rows, layer):
        H, G, D = self.heads
        q, k, v = rotate(self.q_proj(x).view(-1, H, D), rows.rope), None, None             # (N, H, D)
        n = rows.writers(layer)
        if n > 0:
            k, v = self.kv_proj(x[:n]).view(-1, 2, G, D).unbind(1)                         # (n, G, D) each
            k = rotate(k, [t[:n] for t in rows.rope])
        return self.o_proj(rows.attend(layer, q, k, v).flatten(1))                         # (N, C)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_up_proj = nn.Linear(config.n_embd, 2 * config.n_ff, bias=False)
        self.down_proj = nn.Linear(config.n_ff, config.n_embd, bias=False)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    """One layer, for N tokens (N, C) of any rows. `rows` knows who attends to whom; `layer` is a name."""
    def __init__(self, config):
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.n_embd, eps=1e-5)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.n_embd, eps=1e-5)
        self.mlp = MLP(config)

    def forward(self, x, rows, layer):
        x = x + self.attn(self.attn_norm(x), rows, layer)
        return x + self.mlp(self.mlp_norm(x))


# ------------------------------------------------------------------------------------------------------------
# 3. Which tokens attend to which

class Rows:
    """Where N tokens stand: B rows of T positions, each of which may hold any number of these tokens.

    One rule serves everything: a query sees exactly the keys it is handed whose position is not after its
    own. The two KV caches of the paper (section 2.2.2) differ in which keys are handed over:

        cache         who writes keys and values        what a query at depth r sees
        recursion     every token, wherever it goes     the tokens that went as deep as r
        shared        every token, at depth 1 only      every token; deeper, no key and no value is projected

    Tokens stay in row order, and in position order within a row: then `is_causal` is that rule, maskless.

    flat (N,): row * T + position of each token, ascending. S: tokens in each row, or None if rows hold
    different numbers. table: see rope_table. store: keys and values by layer for the shared cache, None for
    the other. written: None, or a list to which every layer adds (layer, flat, k, v) of what it writes.
    """
    def __init__(self, B, T, table, store, written, flat, S=None):
        self.B, self.T, self.table, self.store, self.written = B, T, table, store, written
        self.flat, self.S = flat, S
        self.cell, self.rope = None, table[flat % T].unbind(1)                            # (N, 1, D) each
        if S is None:   # a row's tokens first, then padding, where no real query sees it
            row, count = flat // T, torch.bincount(flat // T, minlength=B)                 # (N,), (B,)
            rank = torch.arange(len(flat), device=flat.device) - (count.cumsum(0) - count)[row]
            self.S = int(count.max())
            self.cell = row * self.S + rank                                                # (N,)

    def take(self, chosen, S=None):
        """The rows of some of these tokens; chosen (N',) holds ascending indices into them, S is as above."""
        return Rows(self.B, self.T, self.table, self.store, self.written, self.flat[chosen], S)

    def writers(self, layer):
        """How many tokens, from the first, write keys and values: all, or none where earlier ones serve."""
        return len(self.flat) if self.store is None or layer not in self.store else 0

    def attend(self, layer, q, k, v):
        """Attention of q (N, H, D) to k, v (N, G, D), or None for those in store; returns (N, H, D)."""
        cell, S, mask = self.cell, self.S, None
        if k is not None:
            if self.written is not None:
                self.written.append((layer, self.flat, k, v))
            k, v = self.spread(k, cell, S), self.spread(v, cell, S)                        # (B, G, S, D) each
            if self.store is not None:
                self.store[layer] = k, v
        else:
            k, v = self.store[layer]                                                       # (B, G, T, D) each
            if q.is_cuda:   # back on the grid of all T positions: flash attention takes no mask
                cell, S = self.flat, self.T
            else:           # on a CPU a mask costs half of that
                position = self.spread((self.flat % self.T).view(-1, 1, 1), cell, S)       # (B, 1, S, 1)
                mask = position >= torch.arange(self.T, device=q.device)                   # (B, 1, S, T)
        q = self.spread(q, cell, S)                                                        # (B, H, S, D)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        y = y.transpose(1, 2).flatten(0, 1)                                                # (B*S, H, D)
        return y if cell is None else y.index_select(0, cell)

    def spread(self, x, cell, S):
        """Tokens (N, H, D) to the rows that attention works on, (B, H, S, D)."""
        if cell is not None:
            x = x.new_zeros(self.B * S, *x.shape[1:]).index_copy(0, cell, x)
        return x.view(self.B, S, *x.shape[1:]).transpose(1, 2)


# ------------------------------------------------------------------------------------------------------------
# 4. Who goes deeper: two routers
#
# A router gets h (N, C), all tokens after the first layer, and `recursion(x, rows, r)`, the shared block as a
# function. It returns the tokens as they enter the last layer. Expert-choice: each recursion chooses its
# tokens. Token-choice: each token chooses its depth. In both, a token that has left is not computed again.

@dataclass
class Routing:
    """How a forward pass is to route (the first four), and what came of it. Only losses carry gradients."""
    causal: bool  # by threshold, as in generation; else by top-k over the row, as in training
    max_depth: int  # tokens still there after this many recursions leave
    threshold: float  # expert-choice, causal: a token goes on while sigmoid(logit) is above
    k: tuple  # expert-choice, not causal: how many tokens of a row each recursion keeps
    depth: torch.Tensor  # (B, T) recursions each token took, 1..n_rec; flat until `finish`
    logits: torch.Tensor  # (B, T, n_rec) raw router logits, NaN where not asked; flat until `finish`
    losses: dict = field(default_factory=dict)  # unweighted scalars: lm; expert: aux, z; token: balance, z
    health: dict = field(default_factory=dict)  # see `finish`; the routers say what they add

    def add(self, **losses):
        """Add to the losses; where every recursion has a router, they sum over recursions."""
        for name, value in losses.items():
            self.losses[name] = self.losses.get(name, 0.0) + value

    def finish(self, B, T):
        """Back to rows. Health: load (n_rec,), the share of tokens at each depth; mean_depth; dead, the share
        of positions that no row of the batch sent to the last recursion (2/3 if one third always goes)."""
        self.depth, self.logits = self.depth.view(B, T), self.logits.view(B, T, -1)
        load = [(self.depth == r + 1).float().mean() for r in range(self.logits.shape[2])]
        dead = (self.depth < self.max_depth).all(dim=0).float().mean()
        self.health.update(load=torch.stack(load), mean_depth=self.depth.float().mean(), dead=dead)
        if "agreement" in self.health:
            self.health["agreement"] = torch.stack(self.health["agreement"])
        return self


class Score(nn.Module):
    """Router logits of each token, (N, C) -> (N, n_out), read off the raw residual stream in float32."""
    # DIFFERS: the released code compares alpha * sigmoid(z) in bfloat16, where high scores tie.
    def __init__(self, config, n_out):
        super().__init__()
        C, mlp = config.n_embd, config.router_arch == "mlp"
        self.layers = nn.ModuleList([nn.Linear(C, 2 * C, bias=False)] if mlp else [])
        self.layers.append(nn.Linear(2 * C if mlp else C, n_out, bias=False))

    def forward(self, x):
        x = at_least_float32(x)
        with torch.autocast(x.device.type, enabled=False):
            for i, layer in enumerate(self.layers):
                x = F.linear(F.gelu(x) if i else x, layer.weight.to(x.dtype))
        return x


def among(chosen, S, x, rows, f):
    """Run f(x, rows) on the chosen tokens; the others come back as they are.

    chosen (N',) holds ascending indices into x (N, C); S as in Rows. Calls nest: f may call `among` for the
    next recursion, and then picks from the compact survivors. On the way back each level writes its survivors
    over x, which holds the leavers as they left.
    """
    if len(chosen) == len(x):
        return f(x, rows)
    if len(chosen) == 0:
        return x
    return x.index_copy(0, chosen, f(x.index_select(0, chosen), rows.take(chosen, S)))


class ExpertRouter(nn.Module):
    """Expert-choice: at each recursion a router of its own keeps the best of the tokens that are still there.

    Training keeps the k best of a row. That looks at the whole row, the future included, which generation
    cannot: there a token goes on while sigmoid(z) > threshold, and an auxiliary loss has taught z to foretell
    the top-k (or, sampling=aux_router, taught a second router and left z alone). The first recursion takes
    every token.

    Health: agreement (n_rec,), how often the threshold would decide as the top-k did, among the tokens asked.
    """
    def __init__(self, config):
        super().__init__()
        self.random = config.router_arch == "random"
        self.gate, self.n_rec = torch.tanh if config.gate == "tanh" else torch.sigmoid, config.n_rec
        self.alpha = 0.1 if config.alpha < 0 else config.alpha
        self.coef = {"aux": config.aux_coef, "z": max(config.z_coef, 0.0)}
        n, n_aux = config.n_rec * (not self.random), config.n_rec * (config.sampling == "aux_router")
        self.score = nn.ModuleList(Score(config, 1) for _ in range(n))
        self.aux_score = nn.ModuleList(Score(config, 1) for _ in range(n_aux))
        if self.random:   # logits fixed by recursion and position, above 0 as often as training keeps a token
            draw = dict(generator=torch.Generator().manual_seed(0), device="cpu")
            u = torch.rand(config.block_size, config.n_rec, **draw)                        # (T, n_rec)
            bar = torch.tensor([1 / (config.n_rec + 1 - r) for r in range(config.n_rec)], device="cpu")
            self.register_buffer("noise", u - bar, persistent=False)

    def ask(self, h, position, r):
        """Logits of tokens h (N, C) before recursion r, (N,) each: for gate and top-k, for the threshold."""
        z = at_least_float32(self.noise[position, r]) if self.random else self.score[r](h).squeeze(1)
        return z, self.aux_score[r](h.detach()).squeeze(1) if self.aux_score else z

    def forward(self, h, rows, recursion, routing, r=0):
        if r == routing.max_depth:
            return h
        z, guess = self.ask(h, rows.flat % rows.T, r)                                      # (N,) each
        if self.random and self.training and not routing.causal:
            z = torch.rand(len(z)).to(z)   # anew at every step; on the CPU, whose state checkpoints keep
        chosen, S = self.choose(z, guess, rows, routing, r)                                # (N',)
        routing.logits[rows.flat, r] = z.detach()
        routing.depth[rows.flat[chosen]] = r + 1
        gate = self.weigh(z)                                                               # (N,)

        def deeper(x, rows):
            # Eq 2.1. recursion(x) contains x already, so this is (1 + gate) * x + gate * its changes.
            x = x + gate[chosen].unsqueeze(1).to(x.dtype) * recursion(x, rows, r)          # (N', C)
            return self(x, rows, recursion, routing, r + 1)
        return among(chosen, S, h, rows, deeper)

    def choose(self, z, guess, rows, routing, r):
        """Who passes recursion r: ascending indices (N',), and how many in each row if that is one number."""
        everyone, k = torch.arange(len(z), device=z.device), routing.k[r]
        if routing.causal:
            # DIFFERS: the released code evaluates with the top-k. (0.5 is z = 0, also under the tanh gate.)
            keep = guess.detach() > math.log(routing.threshold / (1 - routing.threshold))
            return everyone if r == 0 else keep.nonzero().squeeze(1), None
        chosen = everyone
        if k < rows.S:   # the best, back in position order, so that attention stays causal
            best = z.detach().view(rows.B, rows.S).topk(k, sorted=False).indices           # (B, k)
            chosen = (best.sort(dim=1).values + everyone[::rows.S].unsqueeze(1)).flatten()   # (B * k,)
        kept = torch.zeros_like(guess).index_fill(0, chosen, 1.0)
        if not self.random:   # means over the tokens that were asked
            agreement = ((guess.detach() >= 0) == (kept > 0)).float().mean()
            routing.health.setdefault("agreement", []).append(agreement)
            routing.add(aux=F.binary_cross_entropy_with_logits(guess, kept), z=z.square().mean())
        return chosen, k

    def weigh(self, z):
        return self.alpha * (torch.ones_like(z) if self.random else self.gate(z))

    def start(self, h, position):
        """Generation: logits (N, n_rec) of new tokens h (N, C) at positions (N,), NaN where not asked yet."""
        return F.pad(self.ask(h, position, 0)[0].unsqueeze(1), (0, self.n_rec - 1), value=math.nan)

    def step(self, h, x, h0, z, r, position, max_depth, threshold):
        """Generation: recursion r (N,) has made x of h, (N, C) each. Returns what goes on from there, z (N,
        n_rec) with its next answer, and who leaves, (N,). Any token is asked at all r: no shape may depend on
        who is where."""
        h = h + self.weigh(z.gather(1, r.unsqueeze(1))).to(h.dtype) * x
        leaves = torch.ones_like(r, dtype=torch.bool)
        for s in range(1, max_depth):
            answer, guess = self.ask(h, position, s)
            z[:, s] = torch.where(r + 1 == s, answer, z[:, s])
            leaves &= (r + 1 != s) | (guess <= math.log(threshold / (1 - threshold)))
        return h, z, leaves


class TokenRouter(nn.Module):
    """Token-choice: one router, read once after the first layer; each token takes the depth that scores best.

    Causal by construction. Its danger is a collapse to one depth, against which a balance loss pulls the
    depths to equal loads, or (balance=loss_free) a bias on the choice is nudged after every step.

    Health: max_vio, (max load - mean load) / mean load; entropy of the mean probabilities, in nats.
    """
    def __init__(self, config):
        super().__init__()
        self.softmax = config.gate != "sigmoid"
        self.alpha = 1.0 if config.alpha < 0 else config.alpha
        self.coef = {"balance": config.balance_coef * (config.balance == "loss"),
                     "z": 1e-5 if config.z_coef < 0 else config.z_coef}
        self.rate = config.balance_rate * (config.balance == "loss_free")
        self.score = Score(config, config.n_rec)
        self.register_buffer("bias", torch.zeros(config.n_rec))

    def forward(self, h, rows, recursion, routing):
        z = self.score(h)                                                                  # (N, n_rec)
        p, choice = self.decide(z)
        depth = (choice.squeeze(1) + 1).clamp(max=routing.max_depth)                       # (N,)
        routing.logits[rows.flat], routing.depth[rows.flat] = z.detach(), depth

        load = F.one_hot(choice.squeeze(1), z.shape[1]).to(p.dtype).mean(dim=0)            # (n_rec,)
        # DIFFERS: p includes alpha, as in the released code; the paper's P_i is the bare probability.
        balance = z.shape[1] * (load * p.mean(dim=0)).sum()
        routing.add(balance=balance, z=z.logsumexp(dim=1).square().mean())
        share = p.detach().mean(dim=0) / p.detach().mean(dim=0).sum()
        routing.health.update(max_vio=load.max() / load.mean() - 1, entropy=-(share * share.log()).sum())
        # DIFFERS: the gate acts once, on the way out, as in the released code; Eq 2.2 gates every recursion.
        return h + p.gather(1, choice).to(h.dtype) * self.deepen(h, rows, recursion, depth)

    def deepen(self, x, rows, recursion, depth, r=0):
        """The recursion applied `depth` (N,) times to each token of x (N, C)."""
        chosen = (depth > r).nonzero().squeeze(1)                                          # (N',)

        def deeper(x, rows):
            return self.deepen(recursion(x, rows, r), rows, recursion, depth[chosen], r + 1)
        return among(chosen, None, x, rows, deeper)

    def decide(self, z):
        """Gates (N, n_rec) of all depths, and the depth chosen (N, 1), counted from 0."""
        p = self.alpha * (z.softmax(dim=1) if self.softmax else z.sigmoid())
        return p, (p.detach() + self.bias).argmax(dim=1, keepdim=True)

    def start(self, h, position):
        """Generation: logits (N, n_rec) of new tokens h (N, C)."""
        return self.score(h)

    def step(self, h, x, h0, z, r, position, max_depth, threshold):
        """Generation: recursion r (N,) has made x of h, (N, C) each, and the first, of h0. Returns what goes
        on from there, z (N, n_rec), and who leaves, (N,)."""
        p, choice = self.decide(z)
        leaves = r >= choice.squeeze(1).clamp(max=max_depth - 1)
        return torch.where(leaves.unsqueeze(1), h0 + p.gather(1, choice).to(x.dtype) * x, x), z, leaves

    @torch.no_grad()
    def update_bias(self, load):
        """Loss-free balancing, after an optimizer step: load (n_rec,) is its share of tokens per depth."""
        self.bias += self.rate * torch.sign(load.mean() - load)


# ------------------------------------------------------------------------------------------------------------
# 5. Mixture-of-Recursions

class MoR(nn.Module):
    """The model. n_rec=1 is a plain Transformer, router=none a plain recursive one, by the same code."""
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.first = nn.ModuleList(Block(config) for _ in range(config.n_unshared // 2))
        self.shared = nn.ModuleList(Block(config) for _ in range(config.n_shared))
        self.last = nn.ModuleList(Block(config) for _ in range(config.n_unshared // 2))
        self.norm = nn.RMSNorm(config.n_embd, eps=1e-5)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        routers = {"expert": ExpertRouter, "token": TokenRouter}
        self.router = routers[config.router](config) if config.routed else None
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, idx, targets=None, causal=None, max_depth=None, threshold=0.5, k=None):
        """idx (B, T) -> logits (B, T, V), loss, Routing.

        loss: None without targets (B, T); else their mean cross-entropy in nats per token (-1 is left out)
        plus the router's losses by their coefficients. causal: see Routing; None: unless training. max_depth:
        None is n_rec. k: None is config.capacity(T). Raises ValueError, see `check`.
        """
        (B, T), causal = idx.shape, not self.training if causal is None else causal
        flat = torch.arange(B * T, device=idx.device)
        x, routing = self.states(idx, flat, causal, max_depth, threshold, k)
        logits, loss = self.lm_head(self.norm(x)), None                                    # (B*T, V)
        if targets is not None:
            lm = F.cross_entropy(at_least_float32(logits), targets.flatten(), ignore_index=-1)
            loss = lm + sum(self.router.coef[name] * term for name, term in routing.losses.items())
            routing.add(lm=lm)
        return logits.view(B, T, -1), loss, routing.finish(B, T)

    def states(self, idx, flat, causal, max_depth, threshold, k=None, written=None):
        """Tokens of idx (B, T) after the last layer, (N, C), and their Routing. flat (N,): which ones; from
        each row some number of the first, from one row all. written: see Rows. The rest: see forward."""
        c, (B, T) = self.config, idx.shape
        max_depth = c.n_rec if max_depth is None else max_depth
        self.check(T, max_depth, threshold)
        like = dict(dtype=torch.promote_types(self.wte.weight.dtype, torch.float32), device=idx.device)
        routing = Routing(causal, max_depth, threshold, k or c.capacity(T),
                          depth=torch.full((B * T,), 1 if c.routed else max_depth, device=idx.device),
                          logits=torch.full((B * T, c.n_rec), torch.nan, **like))
        rows = Rows(B, T, rope_table(T, c.head_dim, **like), {} if c.cache == "shared" else None, written,
                    flat, T if len(flat) == B * T else None)

        x = self.wte(idx.flatten()[flat])                                                  # (N, C)
        for block in self.first:
            x = block(x, rows, "first")
        if c.routed:
            x = self.router(x, rows, self.recursion, routing)
        else:
            for r in range(max_depth):
                x = self.recursion(x, rows, r)
        for block in self.last:
            x = block(x, rows, "last")
        return x, routing

    def recursion(self, x, rows, r):
        """The paper's f: recursion r of the shared block on tokens x (N, C). Table 1 has the sharing maps."""
        m = len(self.shared)
        for l in range(r * m, (r + 1) * m):
            layer = l % m if "cycle" in self.config.sharing else l // self.config.n_rec
            x = self.shared[layer](x, rows, layer)
        return x

    def check(self, T, max_depth, threshold):
        """ValueError for a row of T tokens that does not fit, or a dial that is out of range."""
        c = self.config
        if not 1 <= T <= c.block_size:
            raise ValueError(f"a row of {T} tokens does not fit: it must hold 1 to block_size={c.block_size}")
        if not 1 <= max_depth <= c.n_rec or max_depth < c.n_rec and "cycle" not in c.sharing:
            raise ValueError(f"max_depth={max_depth} must be 1 to n_rec={c.n_rec}, and below that only where "
                             f"sharing={c.sharing} is cycle or middle_cycle")
        if not 0 < threshold < 1:
            raise ValueError(f"threshold={threshold} must lie between 0 and 1")


# ------------------------------------------------------------------------------------------------------------
# 6. Generation
#
# A slot holds a text that is being written, and of it one token on its way. One pass of the shared block
# serves the tokens of all slots, each at its own depth, but for those that their router has let go: they wait
# for the last layer and the head. There each yields the next token of its text, which starts at the first
# layer. A text that ends hands its slot to the next in the queue.

def pick(logits, u, temperature=1.0, top_k=None):
    """Draw ids (N,) from logits (N, V) with uniform numbers u (N,) in [0, 1), one for each token.

    Numbers from a stream of its own make a sampled text independent of its neighbours. temperature 0 takes
    the likeliest token; top_k, unless None or 0, draws from the k likeliest only.
    """
    if temperature == 0:
        return logits.argmax(dim=1)
    logits = at_least_float32(logits)
    if top_k and top_k < logits.shape[1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
    logits = logits - logits.amax(dim=1, keepdim=True)   # at most 0: no temperature makes it overflow,
    total = logits.div_(max(temperature, 1e-30)).exp_().cumsum(dim=1)   # nor does a tiny one make 0/0; (N, V)
    last = total[:, -1:]   # u * last has to stay below, or a token of probability 0 could be drawn
    u = torch.minimum(u.to(last.dtype).unsqueeze(1) * last, torch.nextafter(last, torch.zeros_like(last)))
    return torch.searchsorted(total, u, right=True).squeeze(1)


class Log:
    """Keys and values of the texts in flight: in each layer a row for each slot, and rows only grow.

        cache        a token adds, in the shared block     and a query at recursion r sees
        recursion    an entry at each recursion it takes   the entries with tag r
        shared       an entry at the first recursion       all entries

    In the first and the last layer each token has one entry. kv[layer]: k and v, (slots, G, length, D) each,
    allocated once and written in place. tagged: layers whose entries have a tag, the recursion 0..n_rec-1
    that made them: tag (slots, entries). Entries with another tag are read and masked; what is saved are the
    work and the room of those that are never made.
    """
    def __init__(self, config, slots, max_len, entries, like):
        self.slots, G, D, shared = slots, config.n_kv_head, config.head_dim, tuple(range(config.n_shared))
        self.tagged = shared if config.cache == "recursion" and config.n_rec > 1 else ()
        self.kv = {layer: [torch.zeros(slots, G, entries if layer in self.tagged else max_len, D, **like)
                           for _ in "kv"] for layer in ("first", "last")[:config.n_unshared] + shared}
        self.tag = torch.full((slots, entries), -1, device=like["device"])

    def where(self, layer, slot, entry):
        """Indices (n * G,) into kv[layer], seen as rows of D, of n tokens at slot and entry (n,). Nothing but
        `Engine.room` keeps an entry inside its slot."""
        _, G, length, _ = self.kv[layer][0].shape
        heads = torch.arange(G, device=slot.device)
        return ((slot.unsqueeze(1) * G + heads) * length + entry.unsqueeze(1)).flatten()

    def write(self, layer, where, k, v):
        """Write k and v (n, G, D) of n tokens."""
        for buffer, x in zip(self.kv[layer], (k, v)):
            buffer.view(-1, x.shape[2]).index_copy_(0, where, x.flatten(0, 1))

    def wipe(self, slots):
        """Empty some slots. Zeros are for an old NaN, which no mask would hide: 0 times NaN is NaN."""
        self.tag[slots] = -1
        for buffer in sum(self.kv.values(), []):
            buffer[slots] = 0

    def fill(self, slots, depth, written):
        """Write one prompt for each of slots, as if token by token. depth (B, T); written: see Rows."""
        T, turns = depth.shape[1], Counter()   # how often a layer has run
        before = (depth.cumsum(dim=1) - depth).flatten()   # entries in front of each token's own
        for layer, flat, k, v in written:
            slot, entry = slots[flat // T], flat % T
            if layer in self.tagged:
                entry = before[flat] + turns[layer]
                self.tag[slot, entry] = turns[layer]
                turns[layer] += 1
            self.write(layer, self.where(layer, slot, entry), k, v)


class Pass:
    """Where one token of each of n slots stands; to a layer, what Rows is.

    slot, position, done (recursions so far), entry (where the next one goes): (n,) each. new: so many, the
    first, have done none. lengths: entries in use, in rows without tags and with. full: whether these are all
    slots, in order. Compiled, shapes are fixed: then `new` is n, and what others write where only new tokens
    should goes to the last slot, which is spare.
    """
    def __init__(self, log, table, slot, position, done, entry, new, lengths, full):
        self.log, self.new, self.lengths, self.full = log, new, lengths, full
        self.slot, self.position, self.done, self.entry = slot, position, done, entry
        self.new_slot = torch.where(done == 0, slot, log.slots - 1)
        self.turns, self.views = Counter(), {}   # how often a layer has run: once, but for the sequence maps
        self.rope = table.index_select(0, position).unbind(1)                              # (n, 1, D) each

    def writers(self, layer):
        """As in Rows."""
        return len(self.slot) if layer in self.log.tagged else self.new if self.turns[layer] == 0 else 0

    def attend(self, layer, q, k, v):
        """Attention of q (n, H, D) to the entries of their slots, once k and v of the writers are there."""
        kind = layer in self.log.tagged, self.turns[layer]
        if kind not in self.views:   # the same for all layers of the block
            self.views[kind] = self.view(layer, *kind)
        (mask, where), self.turns[layer] = self.views[kind], kind[1] + 1
        if k is not None:
            self.log.write(layer, where[:k.shape[0] * k.shape[1]], k, v)
        # Keys and values are too many to be copied: queries go to the slots. Heads that share a key become
        # queries of one head: with enable_gqa, only cuDNN's kernel would take a mask.
        k, v = (buffer[:, :, :mask.shape[-1]] for buffer in self.log.kv[layer])            # (slots, G, S, D)
        if not self.full:
            q = q.new_zeros(self.log.slots, *q.shape[1:]).index_copy(0, self.slot, q)      # (slots, H, D)
        y = F.scaled_dot_product_attention(q.unflatten(1, (k.shape[1], -1)), k, v, mask).flatten(1, 2)
        return y if self.full else y.index_select(0, self.slot)                            # (n, H, D)

    def view(self, layer, tagged, turn):
        """The mask (slots, 1, 1, S) to be added, and where each token writes, see Log.where."""
        if tagged:
            slot, entry, tag = self.slot, self.entry + turn, self.done + turn
            self.log.tag[slot, entry] = tag
            seen = self.log.tag[slot, :self.lengths[1]] == tag.unsqueeze(1)                # (n, S)
        else:
            slot, entry = self.new_slot, self.position
            seen = torch.arange(self.lengths[0], device=slot.device) <= entry.unsqueeze(1)
        mask = torch.where(seen, 0.0, -math.inf).to(self.log.kv[0][0].dtype)
        if not self.full:   # other slots get NaN, which nobody reads
            mask = mask.new_full((self.log.slots, seen.shape[1]), -math.inf).index_copy(0, self.slot, mask)
        return mask[:, None, None], self.log.where(layer, slot, entry)


@dataclass(eq=False)
class Request:
    """A text to go on with, and what came of it."""
    prompt: list  # token ids
    max_new_tokens: int
    stream: torch.Generator  # gives one number for each new token
    tokens: list = field(default_factory=list)  # new ids; the stop token, if it came, is the last
    depths: list = field(default_factory=list)  # recursions that went into choosing each
    logits: list = field(default_factory=list)  # of the router at each depth, NaN where it was not asked
    reason: str = ""  # why the text ended: max_new_tokens, stop, or length, when the log is full
    slot: int = -1
    position: int = 0  # of the token on its way
    done: int = 0  # recursions it has taken
    entry: int = 0  # where its next one goes: the recursions of all tokens so far
    kv_entries: int = 0  # in the log, over all layers


class Engine:
    """Continuous depth-wise batching (paper, section 3.3): a queue of requests, served by a number of slots.

    max_len: tokens that a slot holds, by default block_size. entries: recursions that it holds (only
    cache=recursion), by default enough for all. stop: the id that ends a text. vocab_size: ids from here on
    are never drawn. patience: the head is called when this share of the texts in flight waits for it, for
    fuller calls of the head, though of emptier passes. compile: compiled calls of fixed shapes. temperature,
    top_k: see pick. max_depth, threshold: see forward.

    Up to rounding, a text depends neither on its neighbours nor on slots and patience, nor on max_len and
    entries until it fills them. counts: block_calls, exit_calls, block_rows (tokens in block calls), tokens
    (new ones), recursions (that these took), kv_entries (the most at a time), seconds.
    """
    def __init__(self, model, slots=8, max_len=None, entries=None, temperature=1.0, top_k=None,
                 max_depth=None, threshold=0.5, stop=None, vocab_size=None, patience=0.5, compile=False):
        c, w, n = model.config, model.wte.weight, slots + compile   # compiled: the last one is spare
        self.model, self.temperature, self.top_k, self.threshold = model, temperature, top_k, threshold
        self.stop, self.vocab_size, self.patience, self.compile = stop, vocab_size, patience, compile
        self.max_depth = c.n_rec if max_depth is None else max_depth
        self.max_len = c.block_size if max_len is None else max_len
        self.entries = self.max_len * self.max_depth if entries is None else entries
        model.check(self.max_len, self.max_depth, threshold)
        if slots < 1 or self.entries < 1 or vocab_size is not None and vocab_size < 1:
            raise ValueError(f"slots={slots}, entries={self.entries}, vocab_size={vocab_size}: at least 1")
        if not 0 <= patience <= 1:
            raise ValueError(f"patience={patience} must lie between 0 and 1")
        if not 0 <= temperature < math.inf or (top_k or 0) < 0:
            raise ValueError(f"temperature={temperature} and top_k={top_k} must not be negative")
        # Under the cycle maps the layers are the same at every depth. Else a pass is all recursions in a row.
        self.span = 1 if "cycle" in c.sharing else c.n_rec
        wide = dict(device=w.device, dtype=torch.promote_types(w.dtype, torch.float32))
        self.log = Log(c, n, self.max_len, self.entries, dict(device=w.device, dtype=w.dtype))
        self.table = rope_table(self.max_len, c.head_dim, **wide)
        self.token = torch.zeros(n, dtype=torch.long, device=w.device)
        self.h, self.h0 = torch.zeros(2, n, c.n_embd, device=w.device, dtype=w.dtype)  # now; after `first`
        self.z = torch.full((n, c.n_rec), math.nan, **wide)                            # router logits
        self.block, self.head = (torch.compile(f, dynamic=False) if compile else f
                                 for f in (self._block, self._head))
        self.queue, self.free, self.counts = deque(), list(range(slots))[::-1], Counter()
        self.busy, self.waiting, self.chosen = [], [], None

    def submit(self, prompt, max_new_tokens, seed=None):
        """Queue a prompt, a list of ids, and return its Request. ValueError if it cannot fit."""
        if not prompt or not self.room(len(prompt) - 1, (len(prompt) - 1) * self.max_depth):
            raise ValueError(f"a prompt of {len(prompt)} tokens does not fit: it must have 1 to max_len="
                             f"{self.max_len}, and {self.max_depth} for each in entries={self.entries}")
        V = self.model.config.vocab_size
        if max_new_tokens < 0 or min(prompt) < 0 or max(prompt) >= V:
            raise ValueError(f"max_new_tokens={max_new_tokens} must not be negative, and the tokens of a "
                             f"prompt must be 0 to {V - 1}")
        stream = torch.Generator().manual_seed(torch.randint(2**62, ()).item() if seed is None else seed)
        request = Request(list(prompt), max_new_tokens, stream)
        if max_new_tokens == 0:
            request.reason = "max_new_tokens"
        else:
            self.queue.append(request)
        return request

    def room(self, position, entry):
        """Whether a slot holds one more token, as deep as it may go."""
        return position < self.max_len and (not self.log.tagged or entry + self.max_depth <= self.entries)

    def run(self):
        """Serve until all is done. Yields a request whenever it gets a token."""
        while self.queue or self.busy or self.chosen:
            yield from self.step()

    @torch.inference_mode()
    @sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    def step(self):
        """One pass of the block, and what goes with it. Returns the requests that get a token. (Not with the
        kernel of cuDNN, which is not to be trusted with masks: pytorch issues 191612, 193893, 196678.)"""
        clock, running = time.perf_counter(), self.admit()
        leaves = self.block(*self.plan(running)).tolist() if running else []   # here we wait for the device
        got, self.busy, c = self.deliver(), [], self.model.config
        for request, leaving in zip(running, leaves):
            if not request.reason:   # else its newest token, as is known only now, was the stop token
                request.done, request.entry = request.done + self.span, request.entry + self.span
                fed = request.position + 1
                request.kv_entries = (c.n_shared * (request.entry if self.log.tagged else fed)
                                      + c.n_unshared * fed)
                (self.waiting if leaving else self.busy).append(request)
        held = sum(request.kv_entries for request in self.waiting + self.busy)
        self.counts["kv_entries"] = max(self.counts["kv_entries"], held)
        if self.waiting and len(self.waiting) >= self.patience * (len(self.waiting) + len(self.busy)):
            self.exit()
        self.counts.update(block_calls=bool(running), block_rows=len(running))   # adds
        self.counts["seconds"] += time.perf_counter() - clock
        return got

    def admit(self):
        """Hand free slots to those who have waited longest. Returns all who are ready for the block."""
        new = [self.queue.popleft() for _ in range(min(len(self.queue), len(self.free)))]
        if new:
            for request in new:
                request.slot, request.position = self.free.pop(), len(request.prompt) - 1
            slots = self.tensor([request.slot for request in new])
            self.log.wipe(slots)
            self.prefill(new)
            self.token[slots] = self.tensor([request.prompt[-1] for request in new])
            self.busy += new
        return sorted(self.busy, key=lambda request: (request.done, request.slot))

    def prefill(self, requests):
        """Prompts, in parallel, but for their last tokens, which go the way of every later one."""
        T = max(request.position for request in requests)
        if T > 0:
            idx = self.tensor([r.prompt[:-1] + [0] * (T - r.position) for r in requests])           # (B, T)
            flat = self.tensor([i * T + t for i, r in enumerate(requests) for t in range(r.position)])
            written = []
            _, routing = self.model.states(idx, flat, True, self.max_depth, self.threshold, written=written)
            depth = routing.depth.view_as(idx)
            self.log.fill(self.tensor([r.slot for r in requests]), depth, written)
            for request, row in zip(requests, depth.tolist()):
                request.entry = sum(row[:request.position])

    def exit(self):
        """Those who wait choose their next tokens, and go on with them unless the text ends there."""
        ends, self.waiting, requests = [], [], self.waiting
        for request in requests:
            fed = request.position + 1
            reason = ("max_new_tokens" if fed - len(request.prompt) + 1 == request.max_new_tokens else
                      "" if self.room(fed, request.entry) else "length")
            ends.append((request, request.done, reason))
            request.done = 0
        plan = self.plan(requests)
        u = torch.cat([torch.rand(1, generator=request.stream) for request in requests])
        u = F.pad(u, (0, len(plan[0]) - len(u))).to(self.h.device, non_blocking=True)
        self.chosen = ends, *self.head(u, *plan)
        for request, _, reason in ends:
            request.position += 1
            if reason:
                self.free.append(request.slot)
            else:
                self.busy.append(request)
        self.counts["exit_calls"] += 1

    def deliver(self):
        """Hand out what the last `exit` chose. The pass since then has been waited for, so it is there."""
        if not self.chosen:
            return []
        (ends, tokens, z), self.chosen = self.chosen, None
        for (request, depth, reason), token, logits in zip(ends, tokens.tolist(), z.tolist()):
            request.tokens.append(token)
            request.depths.append(depth)
            request.logits.append(logits)
            request.reason = "stop" if token == self.stop else reason
            if token == self.stop and not reason:
                self.free.append(request.slot)
        self.counts.update(tokens=len(ends), recursions=sum(depth for _, depth, _ in ends))
        return [request for request, _, _ in ends]

    def tensor(self, ints):
        return torch.tensor(ints).to(self.h.device, non_blocking=True)   # else it would wait for the device

    def plan(self, requests):
        """What Pass wants to know of these requests. Compiled, padded to all slots with the spare one."""
        rows = [(r.slot, r.position, r.done, r.entry) for r in requests]
        new = sum(r.done == 0 for r in requests)
        lengths = max(r.position for r in requests) + 1, max(r.entry for r in requests) + self.span
        if self.compile:
            rows += [(self.log.slots - 1, 0, 0, 0)] * (self.log.slots - 1 - len(rows))
            new, lengths = len(rows), (self.max_len, self.entries)
        full = [row[0] for row in rows] == list(range(self.log.slots))
        return *self.tensor(rows).T.unbind(), new, lengths, full

    def _block(self, *plan):
        """One pass of the shared block. Returns which of the tokens (n,) have left after it."""
        model, here, new = self.model, Pass(self.log, self.table, *plan), plan[4]
        slot = here.slot
        if new:   # new tokens come from the embedding and the first layer
            first = here if new == len(slot) else Pass(self.log, self.table, *(x[:new] for x in plan[:4]),
                                                       new, plan[5], False)
            x = model.wte(self.token[first.slot])
            for block in model.first:
                x = block(x, first, "first")
            self.h[first.new_slot] = x
            if model.router:
                self.h0[first.new_slot] = x
                self.z[first.new_slot] = model.router.start(x, first.position)
        h = x = self.h[slot]
        for r in range(self.span):
            x = model.recursion(x, here, r)
        leaves = here.done + self.span >= self.max_depth
        if model.router:
            x, self.z[slot], leaves = model.router.step(h, x, self.h0[slot], self.z[slot], here.done,
                                                        here.position, self.max_depth, self.threshold)
        self.h[slot] = x
        return leaves

    def _head(self, u, *plan):
        """Last layer and head: the next tokens (n,), drawn by u (n,), and what the router said on the way."""
        here = Pass(self.log, self.table, *plan)
        x, z = self.h[here.slot], self.z[here.slot]
        for block in self.model.last:
            x = block(x, here, "last")
        logits = self.model.lm_head(self.model.norm(x))[:, :self.vocab_size]               # (n, V)
        self.token[here.slot] = tokens = pick(logits, u, self.temperature, self.top_k)
        return tokens, z


def generate(model, prompts, max_new_tokens, temperature=1.0, top_k=None, seed=None, max_depth=None,
             threshold=0.5, slots=None, **options):
    """Go on with each prompt, a list of token ids. Returns their Requests, with `tokens` and `depths`.

    seed: of the first; each further one adds 1. slots: how many run at a time, by default up to 32. A text
    ends where it fills block_size. The rest, and options: see Engine. Raises ValueError.
    """
    slots = max(1, min(32, len(prompts))) if slots is None else slots
    longest = max(map(len, prompts), default=0) + max(max_new_tokens, 1)
    engine = Engine(model, slots, min(longest, model.config.block_size), temperature=temperature, top_k=top_k,
                    max_depth=max_depth, threshold=threshold, **options)
    requests = [engine.submit(prompt, max_new_tokens, None if seed is None else seed + i)
                for i, prompt in enumerate(prompts)]
    for _ in engine.run():
        pass
    return requests


# ------------------------------------------------------------------------------------------------------------
# 7. What it costs

def n_params(config, embedding=True):
    """Number of unique parameters, counted on a model that is built without memory."""
    with torch.device("meta"):
        model = MoR(config)
    return sum(p.numel() for p in model.parameters()) - (0 if embedding else model.wte.weight.numel())


def shares(config):
    """Share of the tokens that take each recursion: (n_rec - r) / n_rec, or all where nothing routes."""
    return [(config.n_rec - r) / config.n_rec if config.routed else 1.0 for r in range(config.n_rec)]


def flops_per_token(config, T, paper=False, share=None):
    """Forward FLOPs of one token in a row of T in training, which costs thrice as much. share: of the tokens,
    how many take each recursion; None: by capacity, see `shares`.

    As torch.utils.flop_counter counts, attention by its full square, of which causal kernels skip half; on
    CUDA, deeper recursions of the shared cache compute the whole square too. paper: as the paper counts (its
    numbers of steps follow): half the square, keys and values as wide as queries, no router and no head.
    """
    c, C, shared = config, config.n_embd, config.cache == "shared"
    kv = 4 * C * (C if paper else c.n_kv_head * c.head_dim)
    linear, attention = 4 * C * C + kv + 6 * C * c.n_ff, (2 if paper else 4) * T * C
    total = c.n_unshared * (linear + attention)
    for r, s in enumerate(share or shares(c)):
        saved = kv if shared and r > 0 else 0
        total += c.n_shared * s * (linear - saved + attention * (1.0 if shared else s))
    if paper:
        return total
    if c.routed and c.router_arch != "random":
        asked, n_out = (1.0, c.n_rec) if c.router == "token" else (sum([1.0] + shares(c)[:-1]), 1)
        asked *= 2 if c.router == "expert" and c.sampling == "aux_router" else 1
        total += asked * (4 * C * (C + n_out) if c.router_arch == "mlp" else 2 * C * n_out)
    return total + 2 * C * c.vocab_size


def kv_bytes_per_token(config, mean_depth=None, itemsize=2):
    """Bytes of keys and values that a token keeps in the cache; mean_depth defaults to the capacities'."""
    mean_depth = sum(shares(config)) if mean_depth is None else mean_depth
    entries = config.n_unshared + config.n_shared * (1 if config.cache == "shared" else mean_depth)
    return entries * 2 * config.n_kv_head * config.head_dim * itemsize

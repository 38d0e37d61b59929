"""Mixture-of-Recursions (MoR): a Transformer that spends more layers on some tokens than on others.

The middle layers of a MoR are one shared block that is applied 1 to N times. A small router, trained along
with everything else, decides token by token how often. That saves parameters (one block instead of N),
compute (a token that has left is not computed again) and KV cache (what was not computed leaves no entry).

    depth 3                   *         *        the same block a third time, for those that it keeps again
    depth 2             *     *         *        the same block again, for those that its router keeps
    depth 1       *     *     *    *    *        the shared block, for every token
    first layer   *     *     *    *    *
                  A    dog   that  ,   barks     after its depth a token waits for the last layer and the head

Paper: arXiv 2507.10524; equation numbers are the paper's. Where this file departs from the paper or from the
authors' released code, a comment that begins with DIFFERS: gives the reason. Read it from top to bottom.

Letters in shape comments: B rows in the batch, T tokens in a row, N tokens in flight (of any rows, N <= B*T),
N' those of them that go on, S the most of them in one row, C width of the residual stream (n_embd), H query
heads, G key/value heads, D width of a head, V vocabulary; in section 7, n texts in a call. A token is one
vector of an (N, C) matrix; which row of text it is from matters only where tokens attend to, or compete with,
each other.
Depth counts 1..n_rec in words, outputs and logs: "recursion 1" is the first. Code counts r = 0..n_rec-1:
"recursion r" of r = 0 is the first.
"""
import inspect
import math
import random
from collections import Counter, deque
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import pairwise
from operator import attrgetter, index
from typing import Literal, get_args, get_origin

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

# ---- 1. Configuration --------------------------------------------------------------------------------------

def require(fine, message):   # message: one sentence that names the value and what to do
    if not fine:
        raise ValueError(message)

def check_fields(config, most={}, **least):
    """ValueError for a field of a dataclass with an unknown choice or an unfit number. The default always
    passes; the least is `least[name]`, or else 1 for an int and 0 for a float; the most, if any, most[name].
    """
    for f in fields(config):
        value = getattr(config, f.name)
        if get_origin(f.type) is Literal:
            choices = get_args(f.type)
            require(value in choices, f"{f.name}={value!r} is unknown: choose from {str(choices)[1:-1]}")
        elif f.type in (int, float) and value != f.default:
            low, high = least.get(f.name, int(f.type is int)), most.get(f.name, math.inf)
            number = isinstance(value, (int, f.type)) and low <= value <= high and value < math.inf
            also = f", at most {high}" if f.name in most else ""
            also += "" if f.default is None or f.default >= low else f", or {f.default}"
            require(number, f"{f.name}={value!r} must be {f.type.__name__}, at least {low}{also}")

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
    rope_theta: float = 10000.0  # base of the angles by which queries and keys are turned
    n_rec: int = 3  # recursions: how often the shared block can be applied; 1 is a plain Transformer
    sharing: Literal["middle_cycle", "cycle", "middle_sequence", "sequence"] = "middle_cycle"  # who shares
    router: Literal["expert", "token", "none"] = "expert"  # who decides the depth; none: all go to the last
    cache: Literal["recursion", "shared"] = "recursion"  # keys and values of each recursion, or shared
    router_arch: Literal["linear", "mlp", "random"] = "linear"  # what scores a token; random: a baseline
    gate: Literal["paper", "sigmoid", "tanh", "softmax"] = "paper"  # paper: expert sigmoid, token softmax
    alpha: float = -1.0  # scale of the gate; -1: the paper's, 0.1 for expert and 1.0 for token
    sampling: Literal["aux_loss", "aux_router"] = "aux_loss"  # expert: what predicts the top-k
    aux_coef: float = 0.001  # expert: weight of the auxiliary loss
    balance: Literal["loss", "loss_free"] = "loss"  # token: how depths are kept in balance
    balance_coef: float = 0.1  # token: weight of the balance loss
    balance_rate: float = 0.001  # token: step of the loss-free bias
    z_coef: float = -1.0  # weight of the z-loss on router logits; -1: the paper's, expert 0 and token 1e-5

    def __post_init__(self):
        coefs = ("alpha", "aux_coef", "balance_coef", "balance_rate", "z_coef")
        check_fields(self, most=dict(n_layer=1000, n_rec=64, **dict.fromkeys(coefs, 1000)), rope_theta=1)
        self.head_dim = self.n_embd // self.n_head
        self.routed = self.n_rec > 1 and self.router != "none"   # whether there is anything to decide
        self.cyclic = "cycle" in self.sharing   # whether a recursion is the same layers every time
        self.n_unshared = 2 if "middle" in self.sharing else 0   # layers outside the shared block
        # DIFFERS: where n_rec does not divide the depth, the released code drops layers. The paper adds some.
        self.n_shared = math.ceil((self.n_layer - self.n_unshared) / self.n_rec)   # in the shared block
        self.effective_depth = self.n_unshared + self.n_rec * self.n_shared   # layers at depth n_rec
        require(self.n_embd % (2 * self.n_head) == 0,
                f"n_embd={self.n_embd} must be an even multiple of n_head={self.n_head}")
        require(self.n_head % self.n_kv_head == 0,
                f"n_head={self.n_head} must be a multiple of n_kv_head={self.n_kv_head}")
        require(self.n_layer > self.n_unshared,
                f"n_layer={self.n_layer} must be at least 3 for sharing={self.sharing}")
        require(self.cyclic or not self.routed,
                f"sharing={self.sharing} has no block that router={self.router} could repeat: choose cycle, "
                "middle_cycle or router=none")
        gates = ["paper", "sigmoid", "softmax" if self.router == "token" else "tanh"]
        require(self.gate in gates or not self.routed,
                f"gate={self.gate} does not fit router={self.router}: choose {', '.join(gates)}")
        require(self.router_arch != "random" or (self.router, self.sampling) == ("expert", "aux_loss"),
                "router_arch=random has nothing to learn: use router=expert, sampling=aux_loss")

    def capacity(self, T):
        """Tokens of a row that expert-choice keeps at each recursion: 12, 8, 4 for T=12 and n_rec=3."""
        return tuple(max(1, (self.n_rec - r) * T // self.n_rec) for r in range(self.n_rec))

PRESETS = {   # sizes of the paper's Table 6, and one for two CPU cores
    "tiny": dict(vocab_size=257, block_size=128, n_layer=8, n_head=3, n_kv_head=1, n_embd=96, n_ff=256),
    "135m": dict(n_layer=30, n_head=9, n_kv_head=3, n_embd=576, n_ff=1536),
    "360m": dict(n_layer=32, n_head=15, n_kv_head=5, n_embd=960, n_ff=2560),
    "730m": dict(n_layer=26, n_head=24, n_kv_head=8, n_embd=1536, n_ff=4096),
    "1.7b": dict(n_layer=24, n_head=32, n_kv_head=32, n_embd=2048, n_ff=8192),
}

# ---- 2. The ordinary Transformer: Llama, as in SmolLM. The one change: tokens come without their rows ------

def wide(dtype):   # float32, or float64 if that is what there is: for rotations, router logits and sampling
    return torch.promote_types(dtype, torch.float32)

def logit(p):   # the z whose sigmoid is p
    return math.log(p / (1 - p))

def rope(position, config, dtype):
    """cos and sin, (N, 1, D) each, of the angles t * theta^(-2i/D) by which tokens at positions t (N,) turn
    their pairs (i, i + D/2). sin has a minus in its first half, where a rotation has one."""
    pair = torch.arange(0, config.head_dim, 2, device=position.device, dtype=dtype)
    freq = config.rope_theta ** (-pair / config.head_dim)                                  # (D/2,)
    angle = position[:, None, None] * freq                                                 # (N, 1, D/2)
    sin = angle.sin()
    return torch.cat([angle, angle], dim=2).cos(), torch.cat([-sin, sin], dim=2)

def rotate(x, cos_sin):   # each pair (a, b) in heads x (N, H, D) becomes (a cos - b sin, b cos + a sin)
    cos, sin = cos_sin
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)

class Linear(nn.Linear):
    """A matrix without bias. If it is large, a CPU multiplies it by the few tokens of a call of the engine
    faster in the order W x^T (MKL, float32; most with 2 to 8 rows), and by two tokens faster than by one."""
    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out, bias=False)
        self.large = n_in * n_out >= 2**17

    def forward(self, x):   # (N, n_in) -> (N, n_out)
        few = self.large and 0 < len(x) <= 48 and x.dtype == torch.float32 and x.device.type == "cpu"
        if not few or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().forward(x)
        rows = x if len(x) > 1 else x.repeat(2, 1)
        return torch.mm(self.weight, rows.t()).t()[:len(x)]

class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.G = config.n_kv_head
        self.D = config.head_dim
        self.q_proj = Linear(config.n_embd, config.n_embd)
        self.kv_proj = Linear(config.n_embd, 2 * self.G * self.D)   # always needed together
        self.o_proj = Linear(config.n_embd, config.n_embd)

    def forward(self, x, rows, layer):
        q = rotate(self.q_proj(x).view(len(x), -1, self.D), rows.rope)                     # (N, H, D)
        kv = None
        n = rows.writers(layer)   # the first n write keys and values; if the cache is shared, at recursion 1
        if n > 0:
            k, v = self.kv_proj(x[:n]).view(n, 2, self.G, self.D).unbind(1)                # (n, G, D) each
            kv = torch.cat([rotate(k, [t[:n] for t in rows.rope]), v], dim=1)              # (n, 2 * G, D)
        return self.o_proj(rows.attend(layer, q, kv).flatten(1))                           # (N, C)

class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_up_proj = Linear(config.n_embd, 2 * config.n_ff)
        self.down_proj = Linear(config.n_ff, config.n_embd)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)

class Block(nn.Module):
    """One layer, for N tokens (N, C) of any rows. `rows` (section 4) knows who attends to whom. `layer` is
    (name or index, turn): which layer this is, and how often it was applied before, as in ("first", 0) or
    (2, 1)."""
    def __init__(self, config):
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.n_embd, eps=1e-5)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.n_embd, eps=1e-5)
        self.mlp = MLP(config)

    def forward(self, x, rows, layer):
        x = x + self.attn(self.attn_norm(x), rows, layer)
        return x + self.mlp(self.mlp_norm(x))

# ---- 3. The whole model ------------------------------------------------------------------------------------

class MoR(nn.Module):
    """The model. n_rec=1 is a plain Transformer, router=none a plain recursive one, by the same code."""
    def __init__(self, config):
        super().__init__()
        self.config = config
        blocks = lambda n: nn.ModuleList(Block(config) for _ in range(n))
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.first = blocks(config.n_unshared // 2)
        self.shared = blocks(config.n_shared)
        self.last = blocks(config.n_unshared // 2)
        self.norm = nn.RMSNorm(config.n_embd, eps=1e-5)
        self.lm_head = Linear(config.n_embd, config.vocab_size)
        self.lm_head.weight = self.wte.weight
        self.router = make_router(config) if config.routed else None
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, idx, targets=None, causal=None, max_depth=None, threshold=0.5, k=None,
                past=None, start=0):
        """idx (B, T) -> logits (B, T, V), loss, Routing. Raises ValueError, see `check` (which leaves out k).

        loss: None without targets (B, T); else their mean cross-entropy in nats per token (-1 is left out)
        plus the router's losses by their coefficients. causal: whether tokens are routed by what came before
        them, as in generation, instead of by the whole row; None: not in training. max_depth: recursions at
        most; None: n_rec. threshold, k: see Routing; k of None is config.capacity(T). past, start: see
        `write`; logits are then of the newest token only."""
        causal = not self.training if causal is None else causal
        max_depth = self.config.n_rec if max_depth is None else max_depth
        self.check(idx.shape, max_depth, threshold, causal, past, start)
        rows = Rows.whole(idx, self, past, start)   # who attends to whom
        routing = Routing(causal, max_depth, logit(threshold), k or self.config.capacity(idx.shape[1]),
                          depth=torch.full_like(rows.flat, max_depth), logits=self.no_logits(len(rows.flat)))
        x = self.enter(idx.flatten(), rows)                                                # (N, C), N = B * T
        if self.router:
            x = self.router(x, rows, self.recursion, routing)   # each token 1 to max_depth recursions
        else:
            for r in range(max_depth):
                x = self.recursion(x, rows, r)
        logits = self.head(x, rows, slice(None) if past is None else slice(-1, None))      # (N, V)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.to(self.wide), targets.flatten(), ignore_index=-1)
            routing.add("lm", loss)
            for name, coef in self.router.coef.items() if self.router else []:
                loss = loss + coef * routing.losses.get(name, 0.0)   # causal expert-choice has none
        return logits.view(len(idx), -1, logits.shape[1]), loss, routing.finish(*idx.shape)

    def enter(self, idx, rows):   # tokens (N,) through the embedding and the first layer, (N, C)
        x = self.wte(idx)
        for block in self.first:
            x = block(x, rows, ("first", 0))
        return x

    def recursion(self, x, rows, r):
        """The paper's f: recursion r of the shared block on tokens x (N, C). Its Table 1 maps recursions to
        layers: two of them are applied as 0 1 0 1 0 1 by (middle_)cycle, as 0 0 0 1 1 1 by (middle_)sequence.
        """
        n = len(self.shared)
        for l in range(r * n, (r + 1) * n):   # of all that are applied, in order
            i, turn = (l % n, r) if self.config.cyclic else divmod(l, self.config.n_rec)
            x = self.shared[i](x, rows, (i, turn))   # layer i, for the turn-th time
        return x

    def head(self, x, rows, wanted=slice(None)):   # tokens (N, C) through the last layer to logits (N, V)
        for block in self.last:
            x = block(x, rows, ("last", 0))
        return self.lm_head(self.norm(x[wanted]))

    @property
    def wide(self):
        return wide(self.wte.weight.dtype)

    def no_logits(self, n):   # (n, n_rec), before a router was asked
        return self.wte.weight.new_full((n, self.config.n_rec), torch.nan, dtype=self.wide)

    def check(self, shape, max_depth, threshold, causal=True, past=None, start=0):
        """ValueError for rows that do not fit, or an argument that is out of range."""
        c = self.config
        B, T = shape
        require(1 <= start + T <= c.block_size,
                f"a row of {start + T} tokens does not fit: it must hold 1 to block_size={c.block_size}")
        require(max_depth == c.n_rec or c.cyclic and 1 <= max_depth <= c.n_rec,
                f"max_depth={max_depth} must be 1 to n_rec={c.n_rec}, and below that only where sharing="
                f"{c.sharing} is cycle or middle_cycle")
        require(0 < threshold < 1, f"threshold={threshold} must lie between 0 and 1")
        known = max([0, *(kv.shape[2] for kv in (past or {}).values())])
        require(start == known and (past is None or B == 1 and causal and (T == 1 or not known)),
                f"past holds {known} tokens; {B} x {T} at start={start}, causal={causal} do not follow them: "
                "give one prompt at 0, then single tokens, each at its position")

@dataclass
class Routing:
    """How a forward pass is to route (the first four), and what came of it. Only losses carry gradients."""
    causal: bool  # by threshold, as in generation; else by top-k over the row, as in training
    max_depth: int  # tokens still there after this many recursions leave
    bar: float  # expert-choice, causal: a token goes on while its logit is above; 0 is a threshold of 0.5
    k: tuple  # expert-choice, not causal: how many tokens of a row each recursion keeps; the first, all
    depth: Tensor  # (B, T) recursions each token took, 1..n_rec; flat until `finish`
    logits: Tensor  # (B, T, n_rec) raw router logits, NaN where not asked; flat until `finish`
    losses: dict = field(default_factory=dict)  # unweighted scalars: lm; expert: aux, z; token: balance, z
    health: dict = field(default_factory=dict)  # see `finish`; the routers say what they add

    def add(self, name, value):   # to a loss; where every recursion has a router, they sum over recursions
        self.losses[name] = self.losses.get(name, 0.0) + value

    def finish(self, B, T):
        """Depth and logits back to rows. Health: load (n_rec,), the share of tokens at each depth;
        mean_depth; dead, the share of positions that no row of the batch sent to the last recursion (2/3 if
        always the same third goes)."""
        self.depth = self.depth.view(B, T)
        self.logits = self.logits.view(B, T, -1)
        self.health["load"] = F.one_hot(self.depth - 1, self.logits.shape[2]).float().mean(dim=(0, 1))
        self.health["mean_depth"] = self.depth.float().mean()
        self.health["dead"] = (self.depth < self.max_depth).all(dim=0).float().mean()
        if "agreement" in self.health:
            self.health["agreement"] = torch.stack(self.health["agreement"])
        return self

# ---- 4. Which tokens attend to which -----------------------------------------------------------------------

def padded(S, device):   # a GPU meets a new length slowly, and gets few of them: multiples of 128
    return math.ceil(S / 128) * 128 if device.type == "cuda" else S

@dataclass
class Rows:
    """Where N tokens stand: B rows of T positions, each of which may hold any number of these tokens.

    One rule serves everything: a query sees exactly the keys it is handed whose position is not after its
    own. The two KV caches of the paper (section 2.2.2) differ in which keys are handed over:

        cache         who writes keys and values        what a query at depth r sees
        recursion     every token, wherever it goes     the tokens that went at least as deep as r
        shared        every token, at depth 1 only      every token; deeper, no key and no value is projected

    Tokens stay in row order, and in position order within a row. Then is_causal=True is that rule, and no
    mask is needed. An example with B=2 and T=4: if tokens 0 and 2 of row 0 and 3 of row 1 are left, flat is
    0 2 7, S is 2 and cell is 0 1 2, in a grid of 2 x S places."""
    B: int
    T: int
    S: int  # places for tokens in each row
    flat: Tensor  # (N,) row * T + place in the row, ascending
    position: Tensor  # (N,) in the text
    rope: tuple  # cos and sin, (N, 1, D) each
    shared: bool  # which cache
    past: dict  # layer -> keys and values (B, 2 * G, tokens, D), if later ones will ask for them; else None
    cell: Tensor = None  # (N,) row * S + rank in the row; None: every row has S, so tokens lie in order

    @classmethod
    def whole(cls, idx, model, past, start):   # all tokens of idx (B, T)
        B, T = idx.shape
        flat = torch.arange(B * T, device=idx.device)
        position = start + flat % T
        shared = model.config.cache == "shared"
        past = {} if shared and past is None else past   # deeper recursions read what the first has left
        return cls(B, T, T, flat, position, rope(position, model.config, model.wide), shared, past)

    def take(self, keep, ragged=True):
        """The rows of some of these tokens, by ascending indices keep (N',). ragged: rows may hold different
        numbers of them, as no top-k does; then padding follows the tokens of a row, which cannot see it."""
        flat = self.flat[keep]
        S, cell = len(keep) // self.B, None
        if ragged and self.B > 1:
            row = flat // self.T                                                           # (N',)
            count = torch.bincount(row, minlength=self.B)                                  # (B,)
            rank = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
            S = padded(int(count.max()), row.device)
            cell = row * S + rank                                                          # (N',)
        rope = [t[keep] for t in self.rope]
        return replace(self, S=S, flat=flat, position=self.position[keep], rope=rope, cell=cell)

    def writers(self, layer):   # how many tokens write keys and values here; 0: those of recursion 1 serve
        return 0 if self.shared and layer[1] > 0 else len(self.flat)

    def attend(self, layer, q, kv):
        """Attention of q (N, H, D) to kv (N, 2 * G, D), or, if it is None, to those of recursion 1."""
        if kv is None:   # queries go back to the places of all T tokens, where is_causal holds
            cell, S = self.flat, self.T
            kv = self.past[layer[0], 0]                                                    # (B, 2 * G, T, D)
        else:
            cell, S = self.cell, self.S
            kv = self.grid(kv, cell, S)                                                    # (B, 2 * G, S, D)
            if self.past is not None:
                if layer in self.past:   # earlier tokens of the text
                    kv = torch.cat([self.past[layer], kv], dim=2)
                self.past[layer] = kv
        q = self.grid(q, cell, S)                                                          # (B, H, S, D)
        k, v = kv.chunk(2, dim=1)
        gqa = not (q.is_cuda and q.dtype == torch.float32)
        if not gqa:   # the only fused kernel for float32 on a GPU wants keys for each query head
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        # One new token sees all of past. Where there are more, or rows are padded, past is empty.
        causal = self.T > 1 or self.cell is not None
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)      # (B, H, S, D)
        y = y.transpose(1, 2).flatten(0, 1)                                                # (B*S, H, D)
        return y if cell is None else y.index_select(0, cell)

    def grid(self, x, cell, S):   # tokens (N, H, D) to the rows that attention works on, (B, H, S, D)
        if cell is not None:
            x = x.new_zeros(self.B * S, *x.shape[1:]).index_copy(0, cell, x)
        return x.view(self.B, S, *x.shape[1:]).transpose(1, 2)

# ---- 5. Two routers: who goes deeper -----------------------------------------------------------------------
#
# A router gets x (N, C), all tokens after the first layer, and `recursion(x, rows, r)`, the shared block as a
# function. It returns the tokens as they enter the last layer. Expert-choice: each recursion chooses its
# tokens. Token-choice: each token chooses its depth. Both are one loop: choose who stays, shrink x and rows
# to them, apply the block, put the result into `out`. A token that has left is not computed again.

class Score(nn.Module):
    """Router logits of each token, (N, C) -> (N, n_out), read off the raw residual stream in float32."""
    # DIFFERS: the released code compares alpha * sigmoid(z) in bfloat16, where high scores tie.
    def __init__(self, config, n_out):
        super().__init__()
        hidden = [2 * config.n_embd] if config.router_arch == "mlp" else []
        widths = pairwise([config.n_embd, *hidden, n_out])
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in widths)

    def forward(self, x):
        x = x.to(wide(x.dtype))
        with torch.autocast(x.device.type, enabled=False):
            for i, layer in enumerate(self.layers):
                x = F.linear(F.gelu(x) if i else x, layer.weight.to(x.dtype))
        return x

class ExpertRouter(nn.Module):
    """Expert-choice: at each recursion a router of its own keeps the best of the tokens that are still there.

    Training keeps the k best of a row. That looks at the whole row, the future included, which generation
    cannot: there a token goes on while sigmoid(z) > threshold, and an auxiliary loss teaches z to predict the
    top-k. The first recursion takes every token.
    Health: agreement (max_depth,), how often threshold and top-k decide alike, among the tokens asked."""
    def __init__(self, config):
        super().__init__()
        self.n_rec = config.n_rec
        self.squash = torch.sigmoid
        self.alpha = 0.1 if config.alpha < 0 else config.alpha
        self.coef = {"aux": config.aux_coef, "z": max(config.z_coef, 0.0)}
        self.score = nn.ModuleList(Score(config, 1) for _ in range(config.n_rec))

    def forward(self, x, rows, recursion, routing):
        out = x                                                                            # (N, C)
        for r in range(routing.max_depth):
            z = self.ask(x, rows, r)   # for the gate, and for the choice of all but the first: (N, 1)
            routing.logits[rows.flat, r] = z.detach()[:, 0]
            keep = self.choose(x, z, rows, routing, r)                                     # (N',)
            if len(keep) == 0:
                break
            if len(keep) < len(x):   # the others have left: they stay in `out` as they are
                x = x.index_select(0, keep)                                                # (N', C)
                z = z.index_select(0, keep)
                rows = rows.take(keep, ragged=routing.causal)
            # Eq 2.1. recursion(x) contains x already, so this is (1 + gate) * x + gate * its changes.
            x = x + self.gate(z).to(x.dtype) * recursion(x, rows, r)
            out = out.index_copy(0, rows.flat, x)
            routing.depth.index_fill_(0, rows.flat, r + 1)
        return out

    def ask(self, x, rows, r):   # logits (N, 1) before recursion r, for gate and top-k
        return self.score[r](x)

    def predict(self, x, z, r):   # logits (N, 1) that are to predict the top-k: z itself
        return z

    def gate(self, z):
        return self.alpha * self.squash(z)

    def choose(self, x, z, rows, routing, r):   # who takes recursion r: ascending indices (N',)
        keep = torch.arange(len(z), device=z.device)
        predicted = self.predict(x, z, r)
        if routing.causal:
            # DIFFERS: the released code evaluates with the top-k. (0.5 is z = 0, also under the tanh gate.)
            return keep if r == 0 else keep[predicted[:, 0] > routing.bar]
        k = routing.k[r]
        if r > 0 and k < rows.S:   # the best, back in position order, so that attention stays causal
            best = z.detach().view(rows.B, rows.S).topk(k, sorted=False).indices           # (B, k)
            first = keep.view(rows.B, rows.S)[:, :1]   # index of each row's first token, (B, 1)
            keep = (first + best.sort(dim=1).values).flatten()                             # (B * k,)
        kept = torch.zeros_like(z).index_fill(0, keep, 1.0)                                # (N, 1)
        routing.add("aux", F.binary_cross_entropy_with_logits(predicted, kept))   # a mean over those asked
        routing.add("z", z.square().mean())
        agreement = ((predicted >= 0) == (kept > 0)).float().mean()   # at a threshold of 0.5
        routing.health.setdefault("agreement", []).append(agreement)
        return keep

    # The same in the engine of section 7; skip it until then. z[slot, r] is the logit before recursion r.

    def enter(self, x, here):   # logits (n, n_rec) of new tokens x (n, C), NaN where not asked yet
        return F.pad(self.ask(x, here, 0), (0, self.n_rec - 1), value=torch.nan)

    def advance(self, h, x, here, engine):
        """Recursion here.done (n,), of each token its own, has made x of h, (n, C) each. Returns what goes
        on, and who leaves (n,). All are asked at all depths, so that no shape depends on where they are;
        after the last one comes NaN, above no bar."""
        done = here.done[:, None]                                                          # (n, 1)
        gate = self.gate(engine.z.index_select(0, here.slot).gather(1, done))              # (n, 1)
        x = h + gate.to(h.dtype) * x                                                       # Eq 2.1
        z = [self.ask(x, here, r) for r in range(1, engine.max_depth)]
        predicted = [self.predict(x, z_r, r) for r, z_r in enumerate(z, 1)]
        nobody = torch.full_like(done, torch.nan, dtype=engine.z.dtype)
        # Column `done` of all logits is the one before recursion done + 1, the next.
        own = lambda logits: torch.cat([*logits, nobody], dim=1).gather(1, done)[:, 0]     # (n,)
        engine.z[here.slot, here.done + 1] = own(z)
        return x, ~(own(predicted) > engine.bar)

class TokenRouter(nn.Module):
    """Token-choice: one router, read once after the first layer; each token takes the depth that scores best.

    Causal by construction. Its danger is a collapse to one depth, against which a balance loss pulls the
    depths to equal loads: it is 1 there, and n_rec for a collapse.
    Health: max_vio, (max load - mean load) / mean load; entropy of the mean probabilities, in nats."""
    def __init__(self, config):
        super().__init__()
        self.squash = partial(torch.softmax, dim=1)
        self.alpha = 1.0 if config.alpha < 0 else config.alpha
        self.coef = {"balance": config.balance_coef, "z": 1e-5 if config.z_coef < 0 else config.z_coef}
        self.score = Score(config, config.n_rec)
        self.register_buffer("bias", torch.zeros(config.n_rec))   # only LossFreeRouter moves it

    def forward(self, x, rows, recursion, routing):
        h = out = x                                                                        # (N, C)
        z = self.score(x)                                                                  # (N, n_rec)
        gate = self.gate(z)                                                                # (N, n_rec)
        choice = self.choose(gate)                                                         # (N, 1)
        self.compare(z, gate, choice, routing)
        routing.logits = z.detach()
        routing.depth = (choice[:, 0] + 1).clamp(max=routing.max_depth)                    # (N,)
        for r in range(routing.max_depth):
            keep = (routing.depth[rows.flat] > r).nonzero()[:, 0]                          # (N',)
            if len(keep) == 0:
                break
            if len(keep) < len(x):   # the others have left: they stay in `out` as they are
                x = x.index_select(0, keep)                                                # (N', C)
                rows = rows.take(keep)
            x = recursion(x, rows, r)
            out = out.index_copy(0, rows.flat, x)
        # DIFFERS: the gate acts once, on the way out, as in the released code; Eq 2.2 gates every recursion.
        return h + gate.gather(1, choice).to(h.dtype) * out

    def gate(self, z):
        return self.alpha * self.squash(z)

    def choose(self, gate):   # the depth of each token, (N, 1), counted from 0
        return (gate.detach() + self.bias).argmax(dim=1, keepdim=True)

    def compare(self, z, gate, choice, routing):   # balance loss, and how balanced the depths are
        load = F.one_hot(choice[:, 0], z.shape[1]).to(z.dtype).mean(dim=0)                 # (n_rec,)
        mean = gate.mean(dim=0)
        # DIFFERS: gates include alpha, as in the released code; the paper's P_i is the bare probability.
        routing.add("balance", len(load) * (load * mean).sum())
        routing.add("z", z.logsumexp(dim=1).square().mean())
        routing.health["max_vio"] = load.max() / load.mean() - 1
        routing.health["entropy"] = torch.special.entr(mean.detach() / mean.detach().sum()).sum()

    def enter(self, x, here):   # in the engine, as in ExpertRouter
        return self.score(x)

    def advance(self, h, x, here, engine):   # in the engine: as in ExpertRouter
        gate = self.gate(engine.z.index_select(0, here.slot)[:, :-1])
        choice = self.choose(gate)   # the gate is that of the choice, even where max_depth cuts it short
        leaves = here.done[:, None] >= choice.clamp(max=engine.max_depth - 1)
        out = engine.entered.index_select(0, here.slot) + gate.gather(1, choice).to(x.dtype) * x
        return torch.where(leaves, out, x), leaves[:, 0]

# Variants that the paper's appendix tried: skip them on a first reading.

class AuxRouter(ExpertRouter):
    """A second router predicts the top-k, and leaves the first one's z to gate and top-k."""
    def __init__(self, config):
        super().__init__(config)
        self.aux_score = nn.ModuleList(Score(config, 1) for _ in range(config.n_rec))

    def predict(self, x, z, r):
        return self.aux_score[r](x.detach())

class RandomRouter(ExpertRouter):
    """The baseline: chance decides, as often as training keeps a token, and nothing is learned."""
    def __init__(self, config):
        super().__init__(config)
        self.score = None
        self.coef = {}
        self.squash = torch.ones_like
        u = torch.rand(config.block_size, config.n_rec, generator=torch.Generator().manual_seed(0))
        bar = 1 / (config.n_rec + 1 - torch.arange(config.n_rec))   # 1 - share kept of those asked
        self.register_buffer("bar", bar, persistent=False)
        self.register_buffer("noise", (u - bar).T[..., None], persistent=False)   # fixed: evaluation repeats

    def ask(self, x, rows, r):
        if self.training:   # anew at every step; from the CPU's generator, which checkpoints keep
            return torch.rand(len(x), 1).to(self.bar) - self.bar[r]
        return self.noise[r].index_select(0, rows.position).to(wide(x.dtype))

class LossFreeRouter(TokenRouter):
    """Instead of a balance loss, a bias on the choice is moved after every step, towards equal loads."""
    def __init__(self, config):
        super().__init__(config)
        self.coef["balance"] = 0.0
        self.rate = config.balance_rate

    @torch.no_grad()
    def update_bias(self, load):   # after an optimizer step, with its load (n_rec,), see Routing.finish
        self.bias += self.rate * torch.sign(load.mean() - load)

def make_router(config):
    expert = AuxRouter if config.sampling == "aux_router" else ExpertRouter
    token = LossFreeRouter if config.balance == "loss_free" else TokenRouter
    cls = RandomRouter if config.router_arch == "random" else dict(expert=expert, token=token)[config.router]
    router = cls(config)
    if config.gate in ("sigmoid", "tanh") and cls is not RandomRouter:
        router.squash = getattr(torch, config.gate)
    return router

# ---- 6. One text, token by token ---------------------------------------------------------------------------

def pick(logits, u, temperature=1.0, top_k=None):
    """Draw ids (N,) from logits (N, V) with uniform numbers u (N,) in [0, 1), one for each token.

    temperature 0 takes the likeliest token; top_k, unless None or 0, draws from the k likeliest only."""
    if temperature == 0:
        return logits.argmax(dim=1)
    if top_k and top_k < logits.shape[1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
    logits = logits.to(wide(logits.dtype))
    logits = logits - logits.amax(dim=1, keepdim=True)   # at most 0, so that no temperature makes it overflow
    total = logits.div_(max(temperature, 1e-30)).exp_().cumsum(dim=1)                      # (N, V)
    u = u.to(total).clamp(max=1 - 2**-24)[:, None]   # rounded to 1, it could draw a token of probability 0
    return torch.searchsorted(total, u * total[:, -1:], right=True)[:, 0]

def check_text(model, prompt, max_new_tokens, temperature=1.0, top_k=None):
    """The prompt as a list of int. ValueError for arguments of which no text can come."""
    prompt = [index(token) for token in prompt]
    V = model.config.vocab_size
    require(prompt and min(prompt) >= 0 and max(prompt) < V,
            f"a prompt of {len(prompt)} tokens must have one or more, each 0 to {V - 1}")
    require(max_new_tokens >= 0, f"max_new_tokens={max_new_tokens} must not be negative")
    require(0 <= temperature < math.inf and (top_k or 0) >= 0,
            f"temperature={temperature} and top_k={top_k} must not be negative")
    return prompt

@torch.inference_mode()
def write(model, prompt, max_new_tokens, temperature=1.0, top_k=None, seed=0, max_depth=None, threshold=0.5):
    """Go on with one prompt, a list of ids, and yield (token, depth) as they come, until block_size is full.

    Each forward gets the new tokens only. `past` has keys and values of all earlier ones: every layer adds to
    it, and reads it. So early exit needs nothing more: a token that leaves is not in the next recursion, is
    not computed there, and leaves nothing in `past` for it. As a generator, it raises ValueError only at the
    first next()."""
    new = check_text(model, prompt, max_new_tokens, temperature, top_k)
    stream = random.Random(seed)
    start, past = 0, {}
    for _ in range(max_new_tokens):
        idx = torch.tensor([new], device=model.wte.weight.device)
        logits, _, routing = model(idx, None, True, max_depth, threshold, past=past, start=start)
        u = torch.tensor([stream.random()])
        token = pick(logits[:, -1], u, temperature, top_k).item()
        yield token, routing.depth[0, -1].item()
        start += len(new)
        new = [token]
        if start == model.config.block_size:
            return

# ---- 7. Many texts at the same time: continuous depth-wise batching (paper, section 3.3) -------------------
#
# A slot holds a text that is being written, and of it one token on its way. `enter` brings new tokens through
# the first layer. One call of `block`, the shared block, serves the tokens of all slots, each at its own
# depth. Those whose router lets them leave wait for `head`, the last layer and the logits, which chooses the
# next token of their text. A text that ends hands its slot to the next in the queue.
#
#     slot 0   "def main("   token "("   at recursion 2   \
#     slot 1   "import "     token " "   at recursion 1    }   one call of the shared block
#     slot 2   "class Foo"   token "o"   at recursion 3   /
#     slot 3   "x = 1"       token "1"   left after recursion 1: waits for the head

@dataclass(eq=False)
class Request:
    """A text to go on with, and what came of it."""
    prompt: list  # token ids
    max_new_tokens: int
    stream: random.Random  # gives one number for each new token
    tokens: list = field(default_factory=list)  # new ids; the stop token, if it came, is the last
    depths: list = field(default_factory=list)  # recursions that went into choosing each
    logits: list = field(default_factory=list)  # of the router at each depth, NaN where it was not asked
    reason: str = ""  # why the text ended: max_new_tokens, stop, or length, when a row is full
    slot: int = -1
    newest: int = 0  # the token on its way, at first the prompt's last
    position: int = 0  # of the newest token
    done: int = 0  # recursions that it has taken
    full: bool = False  # whether a row of its slot is full

class Cache:
    """Keys and values of the texts in flight, in some layers. Each slot has a row for each recursion, or just
    one in the first and the last layer, and in all if the cache is shared. A token adds an entry to the row
    of every recursion it takes. What the text A B C leaves, with depths 3, 1 and 2:

        recursion 1   A B C        A query reads one row of its slot, that of its recursion, up to its own
        recursion 2   A C          entry. These are exactly the keys that it is to see, and none has to be
        recursion 3   A            masked for the depth that wrote it.

    kv[layer]: keys and values, (entries, 2 * G, D), allocated once; rows of a recursion lie side by side.
    room[r]: entries that row r can hold; step[r]: from one row to the next, in whole pages.
    used[slot][r]: entries that it holds."""
    def __init__(self, slots, config, like, layers, room):
        self.page = page = page_size(like, config.head_dim)
        self.room = room
        self.step = [math.ceil(n / page) * page for n in room]
        self.base = [slots * sum(self.step[:r]) for r in range(len(room))]   # where rows of recursion r begin
        self.used = [[0] * len(room) for _ in range(slots)]
        entries, heads, D = slots * sum(self.step), 2 * config.n_kv_head, config.head_dim
        # In pages, all heads of an entry lie together; else all entries of a head, which a CPU reads faster.
        new = lambda: (like.new_zeros(entries, heads, D) if page > 1 else
                       like.new_zeros(heads, entries, D).transpose(0, 1))
        self.kv = {layer: new() for layer in layers}

    def admit(self, slot, depths, past):
        """Empty a slot, then copy what a prompt, whose tokens had these depths, has left in `past`."""
        for r, room in enumerate(self.room):
            n = sum(depth > r for depth in depths)
            self.used[slot][r] = n
            for layer, kv in self.kv.items():
                row = kv.narrow(0, self.base[r] + slot * self.step[r], room)
                row.zero_()   # an old NaN passes any mask
                if n > 0:
                    row[:n] = past[layer, r][0].transpose(0, 1)

    def extend(self, requests):
        """Give the newest token of each text its entry. Returns a line of numbers for each, which Batch
        names, and how many get one: in the shared cache, only those at recursion 1.

        Compiled, all write: free places belong to a spare slot, the last, which no text reads; and a token
        that already has its entry writes a dummy there."""
        lines, n_new = [], 0
        for request in requests:
            r = min(request.done, len(self.room) - 1)
            used = self.used[request.slot]
            start = self.base[r] + request.slot * self.step[r]
            write_at = (len(self.used) - 1) * self.step[0]
            # A row has at most one entry for each earlier token, `position` of them. If it has more, this
            # token has written its own: in the shared cache, at recursion 1.
            if used[r] <= request.position:
                write_at = start + used[r]
                used[r] += 1
                n_new += 1
                request.full |= used[r] == self.room[r]
            lines.append((request.slot, request.position, request.done, request.newest, write_at, r, start,
                          used[r]))
        return lines, n_new

class Batch:
    """Plays the part of Rows in the engine: the newest tokens of n texts. The first n_new add an entry to a
    row; all read one. columns (8, n): what `Cache.extend` says of each, on the device. read(q, kv): attention
    to the rows, if the host has planned it; else None."""
    def __init__(self, cache, table, columns, n_new, read):
        self.cache = cache
        self.n_new = n_new
        self.read = read
        self.slot, self.position, self.done, self.token, self.write_at, _, start, length = columns.unbind()
        self.rope = table.index_select(0, self.position).unbind(1)                         # (n, 1, D) each
        if cache.kv and read is None:   # compiled, or on a GPU: the same shapes whatever the lengths
            kv = next(iter(cache.kv.values()))
            plan = partial(plan_pages, cache.page) if cache.page > 1 else plan_copies
            self.read = plan(start, length, padded(max(cache.step), kv.device), kv)

    def writers(self, layer):   # as in Rows
        return self.n_new

    def attend(self, layer, q, kv):
        """Attention of q (n, H, D) to their rows, to which kv of the writers, (n', 2 * G, D), is added."""
        cached = self.cache.kv[layer[0]]   # (entries, 2 * G, D)
        if kv is not None:
            cached.index_put_((self.write_at[:len(kv)],), kv)
        return self.read(q, cached)                                                        # (n, H, D)

@dataclass(eq=False)
class Engine:
    """Continuous depth-wise batching: a queue of requests, served by a number of slots. Up to rounding, a
    text depends neither on its neighbours nor on slots and patience, nor, until full, on max_len and entries.
    counts: tokens (new ones), block_calls, block_rows (tokens in these), head_calls."""
    model: MoR
    slots: int = 8  # texts in flight
    max_len: int = None  # tokens that a slot holds; None: block_size
    entries: list = None  # that the row of each recursion holds (cache=recursion); None: max_len each
    temperature: float = 1.0  # see pick
    top_k: int = None  # see pick
    max_depth: int = None  # see MoR.forward
    threshold: float = 0.5  # see MoR.forward
    stop: int = None  # the id that ends a text
    vocab_size: int = None  # ids from here on are never drawn
    patience: float = 0.5  # the head is called once more than this share of the texts in flight wait for it
    compile: bool = False  # compiled calls, of fixed shapes
    graphs: bool = True  # compiled calls on a GPU are CUDA graphs: one launch each

    def __post_init__(self):
        c, w = self.model.config, self.model.wte.weight
        check_fields(self, top_k=0, stop=0)
        self.max_depth = self.max_depth or c.n_rec
        self.max_len = self.max_len or c.block_size
        self.model.check((1, self.max_len), self.max_depth, self.threshold)
        self.bar = logit(self.threshold)
        room = [self.max_len] * (self.max_depth if c.cache == "recursion" else 1)
        self.entries = self.entries or room
        require(len(self.entries) == len(room) and all(1 <= n <= self.max_len for n in self.entries),
                f"entries={self.entries} must be {len(room)} numbers, each 1 to max_len={self.max_len}")
        require(self.patience <= 1, f"patience={self.patience} must lie between 0 and 1")
        require(c.n_rec == 1 or c.cyclic,
                f"sharing={c.sharing} has no depths to batch: use `write`, one text at a time")
        n = self.slots + self.compile   # compiled calls need a spare one, see Cache.extend
        self.h = w.new_zeros(n, c.n_embd)   # residual stream of each slot's newest token
        self.entered = w.new_zeros(n, c.n_embd)   # the same after the first layer
        self.z = F.pad(self.model.no_logits(n), (0, 1))   # what the router has said of it, and a spare column
        position = torch.arange(c.block_size, device=w.device)
        self.table = torch.stack(rope(position, c, self.model.wide), dim=1)   # (block_size, 2, 1, D)
        new_cache = partial(Cache, n, c, w)
        self.caches = dict(enter=new_cache(["first"][:c.n_unshared], [self.max_len]),
                           block=new_cache(range(c.n_shared), self.entries),
                           head=new_cache(["last"][:c.n_unshared], [self.max_len]))
        self.spare = Request([0], 0, None, slot=self.slots)
        self.calls = {name: self.wrap(getattr(self, name)) for name in self.caches}
        self.queue = deque()
        self.counts = Counter()
        self.free = list(range(self.slots))
        self.new, self.busy, self.waiting = [], [], []   # requests before enter, block and head

    def wrap(self, call):   # compiled, if that is wanted
        if not self.compile:
            return call
        kept = [kv for cache in self.caches.values() for kv in cache.kv.values()]
        for buffer in (self.h, self.entered, self.z, self.table, *kept):
            torch._dynamo.mark_static_address(buffer)   # graphs may write to it: it stays where it is
        graphs = self.graphs and self.h.is_cuda
        return torch.compile(call, dynamic=False, mode="reduce-overhead" if graphs else None)

    def submit(self, prompt, max_new_tokens, seed=None):
        """Queue a prompt, a list of ids, and return its Request. ValueError if it cannot fit."""
        prompt = check_text(self.model, prompt, max_new_tokens)
        # A prompt may send all its tokens to the last recursion: it has to fit into each row.
        require(len(prompt) <= min(self.max_len, *self.entries), f"a prompt of {len(prompt)} tokens does not "
                f"fit into max_len={self.max_len} and entries={self.entries}")
        seed = torch.randint(2**62, ()).item() if seed is None else seed
        request = Request(prompt, max_new_tokens, random.Random(seed), newest=prompt[-1],
                          position=len(prompt) - 1)
        if max_new_tokens == 0:
            request.reason = "max_new_tokens"
        else:
            self.queue.append(request)
        return request

    def run(self):
        """Serve until all is done. Yields a request whenever it gets a token."""
        while self.queue or self.new or self.busy:
            yield from self.step()

    @torch.inference_mode()
    def step(self):
        """One call of enter, block and head, as far as needed. Returns the requests that get a token."""
        while self.queue and self.free:
            self.admit(self.queue.popleft())
        if self.new:
            self.call("enter", self.new)
        self.busy += self.new
        self.new = []
        if not self.busy:
            return []
        requests, leaves = self.call("block", self.busy)
        self.busy = []
        for request, leaving in zip(requests, leaves.tolist()):
            request.done += 1
            (self.waiting if leaving else self.busy).append(request)
        self.counts.update(block_calls=1, block_rows=len(requests))
        enough = self.patience * (len(self.waiting) + len(self.busy))
        return self.next_tokens() if len(self.waiting) > enough or not self.busy else []

    def admit(self, request):
        """Give it a slot. Its prompt is computed in parallel, but for the last token, which goes the way of
        every later one."""
        request.slot = self.free.pop(0)
        past = {}
        depths = []
        if request.position > 0:
            idx = torch.tensor([request.prompt[:-1]], device=self.h.device)
            routing = self.model(idx, None, True, self.max_depth, self.threshold, past=past)[2]
            depths = routing.depth[0].tolist()
        for cache in self.caches.values():
            cache.admit(request.slot, depths, past)
        self.new.append(request)

    def call(self, name, requests):
        """Make one of the three calls. Returns the requests as sorted for it, and its results. These are to
        be read before the next call, which may use their memory."""
        order = ["done", "slot"] if name == "block" else ["slot"]   # those that write first, and as rows lie
        requests = sorted(requests, key=attrgetter(*order))
        spare = [self.spare] * (self.slots + 1 - len(requests)) if self.compile else []
        cache = self.caches[name]
        lines, n_new = cache.extend(requests + spare)
        read = None
        if cache.kv and not (self.compile or self.h.is_cuda):
            read = plan_views([line[5:] for line in lines], next(iter(cache.kv.values())))
        n_new = len(lines) if self.compile else n_new
        return requests, self.calls[name](self.send([*zip(*lines)]), n_new, read)

    def send(self, numbers):   # to the device, without waiting for it
        # Elsewhere, a copy that nobody waits for may read a temporary that is no more (pytorch 189690).
        cuda = self.h.is_cuda
        return torch.tensor(numbers, pin_memory=cuda).to(self.h.device, non_blocking=cuda)

    def enter(self, *args):   # new tokens through the first layer
        here = Batch(self.caches["enter"], self.table, *args)
        x = self.model.enter(here.token, here)                                             # (n, C)
        self.h.index_copy_(0, here.slot, x)
        if self.model.router:
            self.entered.index_copy_(0, here.slot, x)
            self.z[:, :-1].index_copy_(0, here.slot, self.model.router.enter(x, here))

    def block(self, *args):   # each token one recursion further; returns which of them leave, (n,)
        here = Batch(self.caches["block"], self.table, *args)
        h = self.h.index_select(0, here.slot)                                              # (n, C)
        x = self.model.recursion(h, here, 0)   # of any, as all are the same layers
        if self.model.router:
            x, leaves = self.model.router.advance(h, x, here, self)
        else:
            leaves = here.done + 1 >= self.max_depth
        self.h.index_copy_(0, here.slot, x)
        return leaves

    def head(self, *args):   # logits (n, V) of the next tokens, and what the router has said, (n, n_rec + 1)
        here = Batch(self.caches["head"], self.table, *args)
        h = self.h.index_select(0, here.slot)
        return self.model.head(h, here), self.z.index_select(0, here.slot)

    def next_tokens(self):
        """Those who wait choose their next tokens, and go on with them unless the text ends there."""
        requests, (logits, z) = self.call("head", self.waiting)
        u = self.send([request.stream.random() for request in requests])
        tokens = pick(logits[:len(u), :self.vocab_size], u, self.temperature, self.top_k)
        self.waiting = []
        z[:len(u), -1] = tokens   # into its spare column, for a single wait for the device
        for request, (*said, token) in zip(requests, z.tolist()):
            token = int(token)
            request.tokens.append(token)
            request.depths.append(request.done)
            request.logits.append(said)
            request.newest = token
            request.position += 1
            request.done = 0
            request.reason = ("stop" if token == self.stop else
                              "max_new_tokens" if len(request.tokens) == request.max_new_tokens else
                              "length" if request.full else "")
            if request.reason:
                self.free.append(request.slot)
            else:
                self.new.append(request)
        self.counts.update(head_calls=1, tokens=len(requests))
        return requests

def generate(model, prompts, max_new_tokens, temperature=1.0, top_k=None, seed=None, slots=None, **options):
    """Go on with each prompt, a list of token ids. Returns their Requests, with `tokens` and `depths`.

    seed: of the first; each further one adds 1; None: any. slots: how many run at a time, by default up to
    32. A text ends where it fills block_size. The rest, and options: see Engine. Raises ValueError."""
    slots = min(32, max(1, len(prompts))) if slots is None else slots
    longest = max(map(len, prompts), default=0) + max(1, max_new_tokens)
    engine = Engine(model, slots, min(longest, model.config.block_size), temperature=temperature, top_k=top_k,
                    **options)
    requests = [engine.submit(prompt, max_new_tokens, None if seed is None else seed + i)
                for i, prompt in enumerate(prompts)]
    list(engine.run())
    return requests

# How a batch reads its rows: skip it on a first reading, it is all about speed. There are three ways. Each is
# planned once for a call of the engine, from `start` and `length` of n rows in kv (entries, 2 * G, D); a plan
# is a function of q (n, H, D) and the kv of a layer.

def grouped(q, k, v, mask):   # k and v (n, G, S, D): the H/G heads that share a key are H/G queries to it
    q = q.view(len(q), k.shape[1], -1, q.shape[2])                                         # (n, G, H/G, D)
    return F.scaled_dot_product_attention(q, k, v, mask).flatten(1, 2)                     # (n, H, D)

CALL = 2**15   # one call of attention costs about as much as copying so many numbers (measured on a CPU)

def plan_views(spans, kv):
    """On a CPU: neighbours at equal distances share a call, in which their rows are a view of kv. Where that
    takes many calls for short rows, they are copied instead. spans: lists of (recursion, start, length)."""
    recursion, start, length = zip(*spans)
    G, D = kv.shape[1] // 2, kv.shape[2]
    runs = even_runs(recursion, start)
    if len(spans) * max(length) * G * D < (len(runs) - 1) * CALL:
        return plan_copies(torch.tensor(start), torch.tensor(length), max(length), kv)
    mask = mask_ends(torch.tensor(length), max(length), kv)
    per_entry, per_head, _ = kv.stride()
    calls = []
    for i, j in runs:
        longest = max(length[i:j])
        step = start[i + 1] - start[i] if j - i > 1 else 0   # from one row to the next
        sizes = 2, j - i, G, longest, D
        view = sizes, (per_head * G, per_entry * step, per_head, per_entry, 1), per_entry * start[i]
        calls.append((i, j, view, mask[i:j, ..., :longest] if min(length[i:j]) < longest else None))
    return partial(read_views, calls)

def even_runs(recursion, start):
    """Groups [i, j) of neighbours whose starts ascend by equal steps, in the same recursion: there rows have
    the same room, so that a view as long as the longest of them ends inside kv."""
    runs = [[0, 1]]
    for i in range(1, len(start)):
        first = runs[-1][0]
        step = start[i] - start[i - 1]
        even = i - first == 1 or step == start[first + 1] - start[first]
        if recursion[i] == recursion[i - 1] and step >= 0 and even:
            runs[-1][1] += 1
        else:
            runs.append([i, i + 1])
    return runs

def read_views(calls, q, kv):
    y = [grouped(q[i:j], *kv.as_strided(*view), mask) for i, j, view, mask in calls]
    return y[0] if len(y) == 1 else torch.cat(y)

def plan_copies(start, length, longest, kv):
    """Anywhere: rows copied and padded to the longest. start, length: (n,)."""
    head = torch.arange(kv.shape[1], device=kv.device).view(2, 1, -1, 1)                   # (2, 1, G, 1)
    entry = torch.arange(longest, device=kv.device)                                        # (longest,)
    entry = start[:, None] + torch.minimum(entry, length[:, None] - 1)                     # (n, longest)
    per_entry, per_head = (stride // kv.shape[2] for stride in kv.stride()[:2])
    place = entry[:, None] * per_entry + head * per_head   # of vectors (D,) in kv: (2, n, G, longest)
    return partial(read_copies, place, mask_ends(length, longest, kv))

def mask_ends(length, longest, like):   # (n, 1, 1, longest): 0 for the first length (n,) entries, then -inf
    ended = torch.arange(longest, device=like.device) >= length[:, None]
    return like.new_zeros(ended.shape).masked_fill(ended, -math.inf)[:, None, None]

def read_copies(place, mask, q, kv):
    D = kv.shape[2]
    k, v = F.embedding(place, kv.as_strided((kv.numel() // D, D), (D, 1)))   # (n, G, longest, D) each
    return grouped(q, k, v, mask)

def page_size(like, D):
    """256, the least that flash attention takes, where it can read rows page by page: on a GPU of 2020 or
    later, in half precision, with torch 2.13 (2.11 cannot). Else 1."""
    able = like.is_cuda and torch.cuda.get_device_capability(like.device) >= (8, 0)
    able &= like.dtype in (torch.bfloat16, torch.float16) and D % 8 == 0 and D <= 256
    return 256 if able and "block_table" in inspect.signature(varlen_attn).parameters else 1

def plan_pages(page, start, length, longest, kv):
    """On a GPU: n sequences of one query and at most `longest` keys, which lie in the pages of a table
    (n, longest / page). Flash attention reads the first `length` keys where they lie, and no other."""
    table = start[:, None] // page + torch.arange(longest // page, device=kv.device)
    cu = torch.arange(len(start) + 1, device=kv.device, dtype=torch.int32)   # where sequences begin
    # One split: with more, a text would depend on its neighbours, and be wrong (pytorch 194167).
    return partial(read_pages, page, dict(
        cu_seq_q=cu, cu_seq_k=cu * longest, max_q=1, max_k=longest, seqused_k=length.int(), num_splits=1,
        block_table=table.clamp(max=len(kv) // page - 1).int(), enable_gqa=True))

def read_pages(page, plan, q, kv):
    k, v = kv.unflatten(0, (-1, page)).chunk(2, dim=2)   # (pages, page, G, D) each
    return varlen_attn(q, k, v, **plan)

# ---- 8. What it costs --------------------------------------------------------------------------------------

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

    Attention counts as the half of its square that causal kernels compute (torch.utils.flop_counter counts
    all of it). paper: as the paper counts (its numbers of steps follow): keys and values as wide as queries,
    no router and no head."""
    c = config
    C = c.n_embd
    kv = 4 * C * (C if paper else c.n_kv_head * c.head_dim)
    layer = 4 * C * C + kv + 6 * C * c.n_ff   # all matrices
    square = 2 * T * C   # attention to T / 2 tokens, which is the mean
    total = c.n_unshared * (layer + square)
    for r, s in enumerate(share or shares(c)):
        if c.cache == "recursion":
            total += c.n_shared * s * (layer + s * square)
        else:   # the paper counts the queries that there are; we compute all, see Rows.attend
            total += c.n_shared * (s * (layer - kv * (r > 0)) + (s if paper else s > 0) * square)
    if paper:
        return total
    if c.routed:   # two for each weight of a router, and each token that it is asked about
        asked = sum([1.0, *(share or shares(c))[:-1]]) / c.n_rec if c.router == "expert" else 1.0
        total += 2 * asked * (n_params(c) - n_params(replace(c, router="none", router_arch="linear")))
    return total + 2 * C * c.vocab_size

def kv_bytes_per_token(config, mean_depth=None, itemsize=2):
    """Bytes of keys and values that a token keeps in the cache; mean_depth defaults to the capacities'."""
    mean_depth = sum(shares(config)) if mean_depth is None else mean_depth
    entries = config.n_unshared + config.n_shared * (1 if config.cache == "shared" else mean_depth)
    return entries * 2 * config.n_kv_head * config.head_dim * itemsize

def kv_reads_per_token(config, T, share=None):
    """Entries of the cache that a token reads in all layers, the mean over a text of T tokens. Each query
    reads the row of its own recursion, up to its own entry. share: as in flops_per_token."""
    c = config
    reads = c.n_unshared * (T + 1) / 2   # the first token reads one entry, the last T
    for s in share or shares(c):
        row = T if c.cache == "shared" else s * T   # entries in the end
        reads += c.n_shared * s * (row + 1) / 2
    return reads

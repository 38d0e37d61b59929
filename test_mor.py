"""Properties of this project, offline, on two CPU cores: python -m pytest -q

Sections follow the files: the model (mor.py), then train.py, data/ and sample.py. Three sources of truth:
golden values computed with the authors' released code, an oracle below that loops over tokens in plain
Python, and closed forms.
"""
import ast
import gzip
import html
import json
import math
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import fields, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

from data.system import lock, quiet_threads

quiet_threads()   # before torch is imported

import numpy as np
import pytest
import torch
from torch._inductor.exc import GPUTooOldForTriton, InductorError, TritonMissing
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import bench
import mor
import sample
import train
from data import fineweb_edu, pretrained, python_source, system
from data.shards import HEADER, Reader, read_tokens, val_batches, write_tokens
from data.tokenizer import Tokenizer
from mor import (Engine, MoR, MoRConfig, PRESETS, Score, flops_per_token, generate, kv_bytes_per_token,
                 kv_reads_per_token, n_params, pick, write)

torch.set_num_threads(1)   # tiny tensors: a second thread only waits
ROOT = Path(__file__).resolve().parent
TINY = dict(vocab_size=96, block_size=32, n_layer=8, n_head=4, n_kv_head=2, n_embd=32, n_ff=48)

# ---- Golden values -----------------------------------------------------------------------------------------
#
# data/golden.npz holds weights, inputs and outputs of tiny random models, computed in float64 with the
# authors' released code (github.com/raymin0223/mixture_of_recursions, 884fa5a, with expert_choice_router.py
# of 82c97f2, where attention is shared as the paper says). Weights have our names; they are multiples of
# 1/128 and stored as such, norms less 1. Of 96 logits the first 32 are kept: they determine the others, for
# the model is 32 wide. Where our parameter joins two of theirs (k and v, gate and up), its gradient's norm
# joins their norms.

GOLDEN = np.load(ROOT / "data" / "golden.npz")

@pytest.mark.parametrize("case", sorted({key.split("/")[0] for key in GOLDEN}))
def test_golden(case):
    """The released code's logits, losses, selections, depths and gradient norms, to 1e-9 in float64."""
    spec = json.loads(str(GOLDEN[f"{case}/spec"]))
    get = {key.split("/", 1)[1]: torch.from_numpy(np.asarray(GOLDEN[key])) for key in GOLDEN
           if key.startswith(f"{case}/") and not key.endswith("spec")}
    model = MoR(MoRConfig(**spec["config"])).double().train()
    state = model.state_dict()
    for name, w in state.items():
        w_key = f"{spec['weights_of']}/weights/{name.replace('lm_head', 'wte')}"
        if w_key in GOLDEN:
            stored = torch.from_numpy(GOLDEN[w_key]).double()
            w.copy_(stored if name == "router.bias" else stored / 128 + name.endswith("norm.weight"))
    idx = get["ids"].long()
    targets = torch.cat([idx[:, 1:], torch.full((2, 1), -1)], dim=1)
    logits, _, routing = model(idx, targets)
    close = lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=1e-9, equal_nan=True)
    close(logits[..., :32], get["logits"])
    if model.config.routed:
        assert torch.equal(routing.depth, get["depth"].long())
        close(routing.logits, get["router_logits"])
    if "agreement" in get:
        close(routing.health["agreement"], get["agreement"].float())
    for term in {"lm", "aux", "balance", "z"} & set(get):
        close(routing.losses[term], get[term])
    if "bias_after_update" in get:
        model.router.update_bias(routing.health["load"])
        close(model.router.bias, get["bias_after_update"])
    for term, expected in zip(spec["terms"], get["grad_norms"]):
        grads = torch.autograd.grad(routing.losses[term], list(model.parameters()), retain_graph=True,
                                    allow_unused=True, materialize_grads=True)
        close(torch.stack([g.norm() for g in grads]), expected)

# ---- The model against an oracle that loops over tokens in plain Python ------------------------------------

def build(seed=0, **options):
    """A tiny float64 model, its weights so large that every choice and layer shows in the logits."""
    torch.manual_seed(seed)
    model = MoR(MoRConfig(**{**TINY, **options})).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8) if p.dim() > 1 else p.add_(0.2 * torch.randn_like(p))
        if options.get("balance") == "loss_free":
            model.router.bias.copy_(torch.tensor([-0.2, 0.1, 0.1]))
    return model

def ids(B, T, seed=0):
    return torch.randint(96, (B, T), generator=torch.Generator().manual_seed(seed))

MODES = [dict(router=router, cache=cache, sharing=sharing)
         for router in ("expert", "token", "none") for cache in ("recursion", "shared")
         for sharing in ("middle_cycle", "cycle", "middle_sequence", "sequence")[:2 + 2 * (router == "none")]]
VARIANTS = [dict(n_rec=1), dict(n_rec=1, cache="shared", sharing="cycle"), dict(n_rec=2),
            dict(n_rec=4, n_layer=9), dict(gate="tanh"), dict(router_arch="mlp"), dict(router_arch="random"),
            dict(sampling="aux_router"), dict(sampling="aux_router", router_arch="mlp", cache="shared"),
            dict(alpha=1.0), dict(router="token", gate="sigmoid", alpha=0.1),
            dict(router="token", router_arch="mlp"),
            dict(router="token", balance="loss_free", cache="shared")]
name = lambda mode: "-".join(str(v) for v in mode.values()) or "default"
every_mode = pytest.mark.parametrize("mode", MODES + VARIANTS, ids=name)

def oracle_norm(x, w):
    return x / (x.pow(2).mean() + 1e-5).sqrt() * w

def oracle_turn(x, t):
    D, x, i = len(x), x.clone(), torch.arange(len(x) // 2)
    angle = t * 10000.0 ** (-2 * i.double() / D)
    a, b = x[:D // 2].clone(), x[D // 2:].clone()
    x[:D // 2], x[D // 2:] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    return x

def oracle_layer(c, block, where, h, written):
    """One layer for h, a dict: position -> vector. `written` keeps its keys and values under `where`."""
    H, G, D = c.n_head, c.n_kv_head, c.n_embd // c.n_head
    normed = {t: oracle_norm(x, block.attn_norm.weight) for t, x in h.items()}
    if c.cache == "recursion" or where not in written:
        kv = {t: (block.attn.kv_proj.weight @ x).view(2, G, D) for t, x in normed.items()}
        written[where] = {t: ([oracle_turn(k, t) for k in kv[t][0]], list(kv[t][1])) for t in kv}
    out = {}
    for t, x in h.items():
        heads = []
        for i, q in enumerate((block.attn.q_proj.weight @ normed[t]).view(H, D)):
            seen = [p for p in written[where] if p <= t]
            keys, values = ([written[where][p][j][i // (H // G)] for p in seen] for j in (0, 1))
            scores = torch.stack([oracle_turn(q, t) @ k for k in keys]) / D ** 0.5
            heads.append(sum(a * v for a, v in zip(scores.softmax(0), values)))
        x = x + block.attn.o_proj.weight @ torch.cat(heads)
        gate, up = (block.mlp.gate_up_proj.weight @ oracle_norm(x, block.mlp_norm.weight)).chunk(2)
        out[t] = x + block.mlp.down_proj.weight @ (gate * gate.sigmoid() * up)
    return out

def oracle_score(router, x):
    x = router.layers[0].weight @ x
    return x if len(router.layers) == 1 else router.layers[1].weight @ F.gelu(x)

def oracle(model, tokens, causal, max_depth=None, threshold=0.5):
    """Logits (T, V) and depths of one row. h, and whatever is made of it, is a dict: position -> vector."""
    c, T, m, written = model.config, len(tokens), len(model.shared), {}
    n = max_depth or c.n_rec

    def layer(block, where, h):
        return oracle_layer(c, block, where, h, written)

    def recursion(h, r):
        for l in range(r * m, (r + 1) * m):
            where = l % m if "cycle" in c.sharing else l // c.n_rec
            h = layer(model.shared[where], where, h)
        return h

    h = {t: model.wte.weight[i] for t, i in enumerate(tokens)}
    for block in model.first:
        h = layer(block, "first", h)
    depth = {t: n for t in h}
    if c.routed and c.router == "token":
        z = {t: oracle_score(model.router.score, x) for t, x in h.items()}
        p = {t: model.router.alpha * (z[t].sigmoid() if c.gate == "sigmoid" else z[t].softmax(0)) for t in h}
        choice = {t: int((p[t] + model.router.bias).argmax()) for t in h}
        depth, u = {t: min(choice[t] + 1, n) for t in h}, dict(h)
        for r in range(n):
            u.update(recursion({t: u[t] for t in h if depth[t] > r}, r))
        h = {t: h[t] + p[t][choice[t]] * u[t] for t in h}
    elif c.routed:
        alive = list(h)
        for r in range(n):
            z = {t: oracle_score(model.router.score[r], h[t])[0] for t in alive}
            guess = z
            if c.sampling == "aux_router":
                guess = {t: oracle_score(model.router.aux_score[r], h[t])[0] for t in alive}
            if causal:
                alive = [t for t in alive if r == 0 or guess[t].sigmoid() > threshold]
            else:
                alive = sorted(sorted(alive, key=lambda t: -z[t])[:max(1, (c.n_rec - r) * T // c.n_rec)])
            out = recursion({t: h[t] for t in alive}, r)
            for t in alive:
                gate = z[t].tanh() if c.gate == "tanh" else z[t].sigmoid()
                h[t] = h[t] + model.router.alpha * gate * out[t]
                depth[t] = r + 1
    else:
        for r in range(n):
            h = recursion(h, r)
    for block in model.last:
        h = layer(block, "last", h)
    logits = [model.wte.weight @ oracle_norm(h[t], model.norm.weight) for t in h]
    return torch.stack(logits), [depth[t] for t in h]

@torch.no_grad()
@pytest.mark.parametrize("mode", [m for m in MODES + VARIANTS if m.get("router_arch") != "random"], ids=name)
@pytest.mark.parametrize("causal", [True, False])
def test_oracle(mode, causal):
    """The model equals the loop over tokens: logits and depths, as trained and as generating."""
    model, idx = build(**mode), ids(2, 7)
    logits, _, routing = model(idx, causal=causal)
    expected, depth = oracle(model, idx[1].tolist(), causal)
    torch.testing.assert_close(logits[1], expected, rtol=0, atol=1e-10)
    assert routing.depth[1].tolist() == depth

@torch.no_grad()
@pytest.mark.parametrize("mode", [dict(), dict(cache="shared"), dict(sampling="aux_router"),
                                  dict(gate="tanh"), dict(router="token"), dict(router="none")], ids=name)
def test_dials(mode):
    """max_depth forces tokens out, threshold moves the exit; both as the oracle says, and never deeper than
    asked."""
    model, idx = build(**mode), ids(1, 7)
    for max_depth, threshold in [(1, 0.5), (2, 0.5), (3, 0.3), (3, 0.7)]:
        logits, _, routing = model(idx, max_depth=max_depth, threshold=threshold)
        expected, depth = oracle(model, idx[0].tolist(), True, max_depth, threshold)
        torch.testing.assert_close(logits[0], expected, rtol=0, atol=1e-10)
        assert routing.depth[0].tolist() == depth and max(depth) <= max_depth

# ---- What must hold of any routing -------------------------------------------------------------------------

@torch.no_grad()
@every_mode
def test_causal(mode):
    """A changed future token leaves every earlier logit and depth as it was."""
    model, idx = build(**mode), ids(2, 16)
    other = idx.clone()
    other[:, 11:] = ids(2, 5, seed=9)
    (a, _, ra), (b, _, rb) = model(idx, causal=True), model(other, causal=True)
    torch.testing.assert_close(a[:, :11], b[:, :11], rtol=0, atol=1e-12)
    assert torch.equal(ra.depth[:, :11], rb.depth[:, :11])
    assert (a[:, 11:] - b[:, 11:]).abs().min(dim=2).values.max() > 1e-3

@torch.no_grad()
def test_topk_leaks():
    """Expert-choice as trained sees the future: the reason why generation needs a threshold."""
    model, idx = build(), ids(8, 16)
    other = idx.clone()
    other[:, 11:] = ids(8, 5, seed=9)
    change = (model(idx, causal=False)[0] - model(other, causal=False)[0])[:, :11].abs().amax(dim=(1, 2))
    assert change.max() > 1e-2

@torch.no_grad()
@every_mode
def test_companions(mode):
    """A row alone gives what it gives in a batch."""
    model, idx = build(**mode), ids(4, 12)
    together, _, routing = model(idx)
    for b in range(4):
        alone, _, r = model(idx[b:b + 1])
        torch.testing.assert_close(alone[0], together[b], rtol=0, atol=1e-11)
        assert torch.equal(r.depth[0], routing.depth[b])

@every_mode
def test_gradients(mode):
    """Every parameter gets a gradient from the training loss."""
    model = build(**{**mode, "z_coef": 0.01}).train()
    model(ids(2, 12), ids(2, 12, seed=1))[1].backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert not missing

@torch.no_grad()
@every_mode
@pytest.mark.parametrize("causal", [True, False])
def test_rows_computed(mode, causal):
    """Exactly the routed tokens enter the shared block: nothing else is computed."""
    model, seen = build(**mode), []
    model.shared[0].register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    depth = model(ids(3, 13), causal=causal)[2].depth
    expected = [int((depth > r).sum()) for r in range(model.config.n_rec)]
    if "sequence" in model.config.sharing:   # the first layer is the same one n_rec times in a row
        expected = [depth.numel()] * model.config.n_rec
    assert seen == [n for n in expected if n]

@torch.no_grad()
def test_capacities():
    """k of the row, not of the survivors, at least 1; sets nest; rows of one, two and three tokens work."""
    config = MoRConfig()
    assert config.capacity(2048) == (2048, 1365, 682) and config.capacity(1) == (1, 1, 1)
    assert replace(config, n_rec=4).capacity(16) == (16, 12, 8, 4) and config.capacity(2) == (2, 1, 1)
    assert config.capacity(12) == (12, 8, 4)
    config = replace(config, block_size=256)
    warm = [train.capacity_at(step, config, warmup=50) for step in range(60)]
    assert warm[0] == (256, 256, 256) and warm[49] == warm[59] == config.capacity(256)
    assert len(set(warm)) <= 17 and train.capacity_at(0, config, 0) == config.capacity(256)
    assert all(a >= b for one, two in zip(warm, warm[1:]) for a, b in zip(one, two))
    for mode in ({}, dict(router="token"), dict(cache="shared"), dict(router="none")):
        model = build(**mode)
        for T in (1, 2, 3, 32):
            for causal in (True, False):
                logits, loss, routing = model(ids(2, T), ids(2, T, seed=1), causal=causal)
                assert logits.isfinite().all() and loss.isfinite() and routing.depth.min() >= 1
                if mode in ({}, dict(cache="shared")) and not causal:
                    k = model.config.capacity(T)
                    kept = [(routing.depth > r).sum(dim=1).tolist() for r in range(3)]
                    assert kept == [[kr, kr] for kr in k]

def force(model, depth):
    """Router weights that send every token to `depth`: they read coordinate 0, which is made large."""
    expert = model.config.router == "expert"
    with torch.no_grad():
        model.wte.weight[:, 0] = 50.0
        for r, score in enumerate(model.router.score if expert else [model.router.score]):
            weight = score.layers[0].weight.zero_()
            weight[0 if expert else depth - 1, 0] = 1.0 if r < depth else -1.0
    return model

@pytest.mark.parametrize("router", ["expert", "token"])
@pytest.mark.parametrize("cache", ["recursion", "shared"])
def test_nobody_deeper(router, cache):
    """Rows, or whole batches, without a token at some depth give numbers, and gradients that are numbers."""
    for depth in (1, 2, 3):
        model = force(build(router=router, cache=cache), depth)
        logits, loss, routing = model(ids(2, 9), ids(2, 9, seed=1), causal=True)
        assert (routing.depth == depth).all() and logits.isfinite().all()
        loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    model = build(router=router, cache=cache)   # a row that leaves early beside one that does not
    idx = ids(64, 4)
    depth = model(idx)[2].depth.amax(dim=1)
    assert depth.min() < 3 == depth.max()

# ---- Routers -----------------------------------------------------------------------------------------------

def test_expert_losses():
    """Auxiliary loss and accuracy at known logits: ln 2 at z = 0, small when the threshold is the top-k."""
    model, idx = build(), ids(2, 12)
    with torch.no_grad():
        for score in model.router.score:
            score.layers[0].weight.zero_()
    routing = model(idx, idx, causal=False)[2]
    assert routing.losses["aux"].item() == pytest.approx(3 * math.log(2)) and routing.losses["z"].item() == 0
    assert routing.health["agreement"].tolist() == pytest.approx([1, 2 / 3, 1 / 2])   # z >= 0 says yes to all
    assert routing.health["load"].tolist() == pytest.approx([1 / 3] * 3) and routing.health["mean_depth"] == 2
    z = routing.logits
    assert z[..., 0].isfinite().all() and z[..., 2].isnan().sum() == 2 * 4

def test_token_losses():
    """Balance loss 1 when uniform, n_rec when collapsed; z-loss ln(n_rec)^2 at logits 0; MaxVio, entropy."""
    model, idx = build(router="token", balance="loss_free"), ids(2, 12)
    with torch.no_grad():
        model.router.score.layers[0].weight.zero_()
        model.router.bias.zero_()
    routing = model(idx, idx)[2]
    assert routing.losses["balance"].item() == pytest.approx(1)
    assert routing.health["entropy"] == pytest.approx(math.log(3))
    assert routing.losses["z"].item() == pytest.approx(math.log(3) ** 2)
    assert routing.health["max_vio"] == pytest.approx(2)   # ties all go to one depth
    routing = force(model, 2)(idx, idx)[2]
    assert routing.losses["balance"].item() == pytest.approx(3, rel=1e-6) and routing.health["entropy"] < 1e-6
    model.router.update_bias(routing.health["load"])
    assert model.router.bias.tolist() == pytest.approx([0.001, -0.001, 0.001])

def test_total_loss():
    """loss is lm plus each term by its coefficient."""
    for options, coef in [(dict(aux_coef=0.5, z_coef=0.25), dict(aux=0.5, z=0.25)), (dict(),
                          dict(aux=0.001, z=0)), (dict(router="token"), dict(balance=0.1, z=1e-5)),
                          (dict(router="token", balance="loss_free"), dict(balance=0, z=1e-5))]:
        _, loss, routing = build(**options).train()(ids(2, 12), ids(2, 12, seed=1))
        terms = routing.losses
        assert set(terms) == {"lm", *coef}
        total = terms["lm"] + sum(c * terms[n] for n, c in coef.items())
        assert loss.item() == pytest.approx(total.item(), rel=1e-12)

@torch.no_grad()
def test_random_routing():
    """The paper's baseline: as always in training, but anew; repeatable, causal, as deep when generating."""
    model, idx = build(router_arch="random", block_size=1024, n_layer=3), ids(2, 900)
    assert not list(model.router.parameters())
    other = build(router_arch="random", block_size=1024, n_layer=3, gate="tanh")   # gates are 1 here
    assert torch.equal(model(idx)[0], other(idx)[0])
    assert torch.equal(model(idx)[2].depth, model(idx)[2].depth)
    model.train()
    a, b = model(idx)[2].depth, model(idx)[2].depth
    kept = [(a > r).sum(dim=1).tolist() for r in range(3)]
    assert not torch.equal(a, b) and kept == [[900] * 2, [600] * 2, [300] * 2]
    load = model(idx, causal=True)[2].health["load"].tolist()
    assert load == pytest.approx([1 / 3] * 3, abs=0.05)

@torch.no_grad()
@pytest.mark.parametrize("router", ["expert", "token", "none"])
def test_half_precision(router):
    """bfloat16 weights, or autocast over float32 ones: router logits stay float32, the residual stream under
    autocast too."""
    model, seen = build(router=router).float(), []
    model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    for score in [m for m in model.modules() if isinstance(m, Score)]:
        score.register_forward_hook(lambda score, args, z: torch.testing.assert_close(
            z.double(), args[0].double() @ score.layers[0].weight.double().T, rtol=1e-4, atol=1e-4))
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss, routing = model(ids(2, 9), ids(2, 9))
    assert seen == [torch.float32] and logits.dtype == torch.bfloat16
    assert loss.dtype == routing.logits.dtype == torch.float32
    logits, loss, routing = model.bfloat16()(ids(2, 9), ids(2, 9))
    assert logits.dtype == torch.bfloat16 and loss.dtype == routing.logits.dtype == torch.float32
    for model in (model, build(router_arch="random").bfloat16()):
        assert [len(r.tokens) for r in generate(model, [[1, 2, 3], [4]], 6)] == [6, 6]

def test_config_errors():
    """Impossible models raise one sentence with the field, its value and what to do."""
    for options, words in [
            (dict(sharing="sequence"), "sharing=sequence"), (dict(n_embd=100, n_head=3), "n_embd=100"),
            (dict(n_head=15, n_kv_head=4), "n_kv_head=4"), (dict(n_rec=0), "n_rec=0"),
            (dict(n_layer=2), "n_layer=2"), (dict(router="expart"), "'expart'"),
            (dict(gate="tanh", router="token"), "gate=tanh"), (dict(alpha=-2.0), "alpha=-2.0"),
            (dict(aux_coef=math.nan), "aux_coef=nan"), (dict(z_coef=-0.5), "z_coef"),
            (dict(router_arch="random", router="token"), "random"), (dict(vocab_size=0), "vocab_size=0"),
            (dict(n_rec=2.5), "n_rec=2.5"), (dict(n_rec="3"), "n_rec='3'"), (dict(alpha=None), "alpha=None")]:
        with pytest.raises(ValueError, match=".") as error:
            MoRConfig(**options)
        assert words in str(error.value) and "\n" not in str(error.value)
    model = build()
    for options, words in [(dict(max_depth=4), "max_depth=4"), (dict(threshold=1.0), "threshold=1.0")]:
        with pytest.raises(ValueError, match=words):
            model(ids(1, 4), **options)
    with pytest.raises(ValueError, match="row of 33 tokens"):
        model(ids(1, 33))
    with pytest.raises(ValueError, match="max_depth=1 must"):
        build(router="none", sharing="sequence")(ids(1, 4), max_depth=1)
    MoRConfig(n_rec=1, sharing="sequence"), MoRConfig(router="none", sharing="middle_sequence")

# ---- Sharing and costs -------------------------------------------------------------------------------------

def test_weights_stay_shared(tmp_path):
    """One block, however often it is applied: after a step, save, load, copy to another dtype, compile."""
    model = build().train()
    count = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(ids(2, 12), ids(2, 12))[1].backward()
    optimizer.step()
    torch.save(model.state_dict(), tmp_path / "m.pt")
    other = MoR(model.config).to(torch.float64)
    other.load_state_dict(torch.load(tmp_path / "m.pt", weights_only=True))
    for m in (model, other, torch.compile(other, backend="eager")._orig_mod):
        calls = []
        for block in m.shared:
            block.attn.register_forward_hook(lambda attn, *_: calls.append(attn.q_proj.weight.data_ptr()))
        logits = m.eval()(ids(1, 8))[0]
        assert len(set(calls)) == 2 and m.lm_head.weight is m.wte.weight
        assert sum(p.numel() for p in m.parameters()) == count
        torch.testing.assert_close(logits, model.eval()(ids(1, 8))[0])
    assert sum(p.numel() for p in build(n_rec=1).parameters()) > count

def test_parameters():
    """The paper's counts (Table 3 and 6) for every preset, and the formula equals the model."""
    plain = lambda preset, n_rec: MoRConfig(**PRESETS[preset], n_rec=n_rec, router="none")
    for preset, n_rec, millions in [("360m", 1, 314.6), ("360m", 2, 167.1), ("360m", 3, 118.0),
                                    ("360m", 4, 98.3), ("135m", 1, 106.2), ("135m", 3, 42.5),
                                    ("730m", 1, 654.4), ("730m", 3, 251.7), ("1.7b", 1, 1610.7),
                                    ("1.7b", 2, 872.5), ("1.7b", 3, 671.1)]:
        assert n_params(plain(preset, n_rec), embedding=False) / 1e6 == pytest.approx(millions, abs=0.1)
    for preset, n_rec, depth in [("135m", 3, 32), ("360m", 3, 32), ("360m", 4, 34), ("730m", 3, 26)]:
        assert plain(preset, n_rec).effective_depth == depth
    for mode in MODES + VARIANTS:
        model = build(**mode)
        assert sum(p.numel() for p in model.parameters()) == n_params(model.config)

def test_paper_flops():
    """The paper's accounting, from which its step counts follow (MFLOPs per token at T=2048)."""
    for options, mega in [(dict(n_rec=1), 833.6), (dict(n_rec=2), 623.5), (dict(n_rec=3), 555.6),
                          (dict(n_rec=4), 553.5), (dict(n_rec=3, cache="shared"), 536.2),
                          (dict(n_rec=3, router="none"), 833.6)]:
        flops = flops_per_token(MoRConfig(**PRESETS["360m"], **options), 2048, paper=True)
        assert flops / 1e6 == pytest.approx(mega, abs=0.05)

@pytest.mark.parametrize("mode", [m for m in MODES + VARIANTS if m.get("router") != "token"], ids=name)
def test_flops(mode):
    """torch.utils.flop_counter agrees with the formula: what routing leaves out really is not computed.

    (Token-choice has the loads that it happens to have; test_rows_computed counts those.)"""
    from torch.utils.flop_counter import FlopCounterMode
    aten = torch.ops.aten
    attention = lambda q, k, v, *args, **kwargs: 2 * q[0] * q[1] * q[2] * k[2] * q[3]   # the causal half
    mapping = {aten._scaled_dot_product_flash_attention_for_cpu: attention}
    counter = FlopCounterMode(display=False, custom_mapping=mapping)
    model = build(**mode)
    with counter, torch.no_grad():
        model(ids(2, 24), causal=False)
    assert counter.get_total_flops() == pytest.approx(2 * 24 * flops_per_token(model.config, 24), rel=1e-9)

def test_kv_bytes():
    """Cache sizes of the paper's Table 2, (n_rec + 1) / 2 n_rec or 1 / n_rec, but for two full layers."""
    for n_rec in (2, 3, 4):
        c = MoRConfig(**{**PRESETS["360m"], "n_layer": 24}, n_rec=n_rec, sharing="cycle")
        vanilla = kv_bytes_per_token(replace(c, n_rec=1))
        assert vanilla == 24 * 2 * 5 * 64 * 2
        assert kv_bytes_per_token(c) / vanilla == pytest.approx((n_rec + 1) / (2 * n_rec))
        assert kv_bytes_per_token(replace(c, cache="shared")) / vanilla == pytest.approx(1 / n_rec)
    ratio = kv_bytes_per_token(MoRConfig(n_rec=3)) / kv_bytes_per_token(MoRConfig(n_rec=1))
    assert ratio == pytest.approx(0.688, abs=1e-3)

def test_compile():
    """An expert-choice step is one graph without a break, and a capacity warm-up makes at most three. No
    result is as large as the logits."""
    graphs, sizes = [], []

    def backend(graph, inputs):
        graphs.append(graph)
        return lambda *args: [sizes.append(y.numel()) or y for y in graph.forward(*args)]
    torch._dynamo.reset()
    for cache, steps in (("recursion", 12), ("shared", 2)):
        graphs.clear()
        model = build(cache=cache, n_layer=5).train()
        compiled = torch.compile(train.Loss(model), backend=backend, fullgraph=True)
        for step in range(steps):
            k = train.capacity_at(step, model.config, 8)
            loss, routing = compiled(ids(2, 32, seed=step), ids(2, 32), k)
            loss.backward()
        assert 1 <= len(graphs) <= 3 and max(sizes) < 2 * 32 * 96
        expected = model(ids(2, 32, seed=steps - 1), ids(2, 32), causal=False, k=k)
        torch.testing.assert_close(loss, expected[1])
        assert torch.equal(routing.depth, expected[2].depth)

class Operations(TorchDispatchMode):
    """Names of the operations that run."""
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        self.names.add(f.name().split("::")[1].split(".")[0])
        return f(*args, **(kwargs or {}))

@pytest.mark.parametrize("mode", [dict(n_rec=1), {}, dict(cache="shared"), dict(router="token"),
                                  dict(router="token", cache="shared")], ids=name)
def test_attention_kernels(mode):
    """A training step runs attention by a fused kernel, forward and backward, and by nothing else; on a GPU
    by flash attention, in float32 by the efficient one."""
    device = train.pick_device("auto" if torch.cuda.is_available() else "cpu")
    kernels = {torch.bfloat16: "flash_attention", torch.float32: "efficient_attention"}
    kernels = kernels if device.type == "cuda" else {torch.float32: "flash_attention_for_cpu"}
    model = MoR(MoRConfig(**{**TINY, "n_embd": 256, **mode})).to(device).train()
    x = torch.randint(96, (2, 32), device=device)
    for dtype, kernel in kernels.items():
        with Operations() as operations:
            with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = model(x, x)[1]
            loss.backward()
        attention = {n for n in operations.names if "dot_product" in n}
        assert attention == {f"_scaled_dot_product_{kernel}{way}" for way in ("", "_backward")}

@pytest.mark.parametrize("mode", [dict(router="token"), dict(router="token", cache="shared"), {}], ids=name)
def test_padded(mode, monkeypatch):
    """Padding ragged rows to few lengths, as on a GPU, changes neither value nor gradient."""
    model, results = build(**mode), []
    assert [mor.padded(S, torch.device("cuda")) for S in (1, 128, 129)] == [128, 128, 256]
    for multiple in (1, 128):
        monkeypatch.setattr(mor, "padded", lambda S, device: math.ceil(S / multiple) * multiple)
        results.append([])
        for shape in ((3, 24), (9, 1)):
            logits, loss, _ = model(ids(*shape), ids(*shape), causal=True)
            results[-1] += [logits, *torch.autograd.grad(loss, model.parameters(), allow_unused=True)]
    for a, b in zip(*results):
        assert (a is None) == (b is None)
        if a is not None:
            close(a, b)

# ---- Generation --------------------------------------------------------------------------------------------

@torch.no_grad()
def test_few_rows():
    """A product with few rows, which a CPU computes the other way round, is the same up to rounding."""
    layer, small = mor.Linear(256, 512), mor.Linear(24, 40)
    for n in (0, 1, 2, 48, 49):
        x = torch.randn(n, 256)
        y = layer(x)
        assert y.shape == (n, 512)
        torch.testing.assert_close(y, x @ layer.weight.T, rtol=1e-5, atol=1e-5)
    assert layer(torch.randn(2, 256)).stride() == (1, 2) and layer(torch.randn(49, 256)).stride() == (512, 1)
    assert small(torch.randn(2, 24)).stride() == (40, 1)

def test_pick():
    """Sampling follows the probabilities, never leaves the top k, and any number in [0, 1) gives a token."""
    logits = torch.tensor([[0.0, math.log(2), -math.inf, math.log(5)]])
    u = (torch.arange(8000) + 0.5) / 8000
    draws = lambda **options: pick(logits.expand(8000, -1), u, **options).bincount(minlength=4).tolist()
    assert draws() == [1000, 2000, 0, 5000] and draws(top_k=4) == draws(top_k=99) == draws(top_k=0)
    for options in (dict(temperature=0), dict(top_k=1), dict(temperature=1e-38), dict(temperature=1e-320)):
        assert draws(**options) == [0, 0, 0, 8000]
    assert draws(top_k=2)[0] == 0
    assert draws(temperature=0.5) == pytest.approx([8000 / 30, 8000 * 4 / 30, 0, 8000 * 25 / 30], abs=1)
    edge = torch.tensor([0.0, 1 - 2**-24, 1 - 1e-16], dtype=torch.float64)
    masked = torch.tensor([[-math.inf, 0.1, 0.3, -math.inf]]).expand(3, -1)
    assert pick(masked, edge).tolist() == [1, 2, 2]

DIALS = [dict(max_depth=1), dict(max_depth=2), dict(threshold=0.3), dict(threshold=0.7)]
ROUTED = [dict(), dict(cache="shared"), dict(router="token"), dict(router="token", cache="shared"),
          dict(sampling="aux_router"), dict(gate="tanh"), dict(router_arch="mlp", cache="shared")]
with_dials = pytest.mark.parametrize(
    "mode, dials", [(m, {}) for m in MODES + VARIANTS] + [(m, d) for m in ROUTED for d in DIALS] +
    [(dict(router="none"), DIALS[1])], ids=lambda option: name(option))
close = partial(torch.testing.assert_close, rtol=0, atol=1e-10, equal_nan=True)

def random_prompts(*lengths):
    return [ids(1, T, seed=T)[0].tolist() for T in lengths]

def written(model, prompt, n, **options):
    """What `write` makes of a prompt, as a request; `heads` has the logits of the head."""
    said, hook = [], model.register_forward_hook(lambda module, args, y: said.append(y))
    tokens, depths = zip(*write(model, prompt, n, **options))
    hook.remove()
    return SimpleNamespace(prompt=prompt, tokens=list(tokens), depths=list(depths),
                           logits=[routing.logits[0, -1].tolist() for _, _, routing in said],
                           heads=torch.stack([logits[0, -1] for logits, _, _ in said]))

def serve(engine, prompts, n, seed=0):
    """The requests, served, with `heads`."""
    requests = [engine.submit(prompt, n, seed + i) for i, prompt in enumerate(prompts)]
    heads, call = {id(request): [] for request in requests}, engine.call

    def watched(name, some):
        some, results = call(name, some)
        for request, row in zip(some, results[0] if name == "head" else []):
            heads[id(request)].append(row)
        return some, results
    engine.call = watched
    for _ in range(2000):
        engine.step()
        if all(request.reason for request in requests):
            break
    del engine.call
    assert not (engine.queue or engine.new or engine.busy or engine.waiting or engine.step())
    assert sorted(engine.free) == list(range(engine.slots))
    for request in requests:
        request.heads = torch.stack(heads[id(request)])
    return requests

def assert_same(a, b):
    assert (a.tokens, a.depths) == (b.tokens, b.depths)
    close(a.heads, b.heads)
    close(torch.tensor(a.logits).double(), torch.tensor(b.logits).double())

@torch.no_grad()
def uncached(model, text, **dials):
    """What the forward without a cache says where `text` got its new tokens."""
    new = slice(len(text.prompt) - 1, -1)
    logits, _, routing = model(torch.tensor([text.prompt + text.tokens]), causal=True, **dials)
    return SimpleNamespace(tokens=logits[0, new].argmax(dim=1).tolist(), heads=logits[0, new],
                           depths=routing.depth[0, new].tolist(), logits=routing.logits[0, new].tolist())

@with_dials
def test_write(mode, dials):
    """One text, a token at a time, is what the forward without a cache says, in all that it says."""
    model = build(**mode)
    for prompt in random_prompts(1, 5, 17):
        text = written(model, prompt, 7, temperature=0, **dials)
        assert_same(text, uncached(model, text, **dials))

@with_dials
def test_engine(mode, dials):
    """The engine writes what `write` does, and what the forward without a cache says. Three prompts share two
    slots, so that one is used twice, and are at different depths at the same time. It refuses maps without
    depths to batch."""
    model = build(**mode)
    if not model.config.cyclic and model.config.n_rec > 1:
        with pytest.raises(ValueError, match="sharing=.*sequence has no depths to batch: use `write`"):
            Engine(model)
        return
    for text in serve(Engine(model, slots=2, temperature=0, **dials), random_prompts(1, 5, 17), 7):
        assert_same(text, uncached(model, text, **dials))
        assert_same(text, written(model, text.prompt, 7, temperature=0, **dials))

@pytest.mark.parametrize("mode, temperature", [(ROUTED[0], 0), *((mode, 0.9) for mode in ROUTED[1:4]),
                                               (dict(n_rec=1), 0.9), (dict(n_rec=4), 0.9)], ids=str)
@pytest.mark.parametrize("call", [0, 10**9])
def test_independent(mode, temperature, call, monkeypatch):
    """A text is what `write` makes of it whatever the company, the slots, the patience and the length of
    rows, in a slot that others have used, and in memory full of NaN; and whether rows are views or copied."""
    monkeypatch.setattr(mor, "CALL", call)
    model, prompts = build(**mode, block_size=64), random_prompts(3, 1, 9, 2, 12)
    alone = [written(model, prompt, 7, seed=i, temperature=temperature) for i, prompt in enumerate(prompts)]
    assert len({tuple(r.tokens) for r in alone}) > 2
    entries = [20, 19, 20, 18][:1 if model.config.cache == "shared" else model.config.n_rec]
    for options in (dict(slots=1), dict(slots=2, patience=0), dict(slots=8, patience=1),
                    dict(slots=3, max_len=20, entries=entries)):
        engine = Engine(model, **{"max_len": 64, **options}, temperature=temperature)
        for repeat in range(2):
            for cache in engine.caches.values():
                for kv in cache.kv.values():
                    kv.fill_(math.nan)
            for one, other in zip(alone, serve(engine, prompts, 7)):
                assert_same(one, other)

def test_many_slots():
    """Rows that happen to be at equal distances share a call: any subset of many slots, at any depths."""
    for mode in (ROUTED[0], ROUTED[3]):
        model, prompts = build(**mode), random_prompts(*range(1, 12))
        texts = serve(Engine(model, slots=11, patience=0.3), prompts, 9, seed=5)
        for i, text in enumerate(texts):
            assert_same(text, written(model, text.prompt, 9, seed=5 + i))

def test_past():
    """`past` is filled by one prompt, then by single tokens; all else is refused, and changes nothing."""
    model = build()
    for idx, start, options in [(ids(2, 3), 0, {}), (ids(1, 3), 4, {}), (ids(1, 2), 5, {}),
                                (ids(1, 1), 4, {}), (ids(1, 1), 6, {}), (ids(1, 28), 5, {}),
                                (ids(1, 1), 5, dict(causal=False))]:
        past = {}
        model(ids(1, 5), causal=True, past=past) if start else None
        before = {key: kv.clone() for key, kv in past.items()}
        with pytest.raises(ValueError, match="past holds|a row of 33 tokens"):
            model(idx, **{"causal": True, **options}, past=past, start=start)
        assert past.keys() == before.keys() and all(torch.equal(past[key], before[key]) for key in past)
    with pytest.raises(ValueError, match="past holds 0 tokens"):
        model(ids(1, 3), start=3)
    for options, words in [(dict(temperature=-1.0), "temperature=-1"), (dict(top_k=-1), "top_k=-1"),
                           (dict(max_depth=4), "max_depth=4"), (dict(threshold=1.0), "threshold=1")]:
        with pytest.raises(ValueError, match=words):
            next(write(model, [1], 5, **options))
    for prompt, n in (([], 5), ([96], 5), ([-1], 5), ([1] * 33, 5), ([1], -1)):
        with pytest.raises(ValueError):
            list(write(model, prompt, n))
    assert len(list(write(model, [1] * 30, 99))) == 3 and not list(write(model, [1], 0))

def test_full_rows():
    """A row that is full ends its text with "length", and nothing before it is lost; a prompt too long for a
    row is refused; block_size is the limit otherwise."""
    model = build()
    prompt = random_prompts(6)[0]
    full = generate(model, [prompt], 100, seed=3)[0]
    assert full.reason == "length" and len(full.tokens) == 32 - 6 + 1
    depth = model(torch.tensor([(prompt + full.tokens)[:32]]))[2].depth[0]
    used = torch.stack([(depth > r).cumsum(dim=0) for r in range(3)])                        # (n_rec, T)
    for room in ([12] * 3, [32, 9, 32], [32, 32, 6], [20, 14, 9]):
        engine = Engine(model, 2, entries=room)
        request, _ = serve(engine, [prompt, prompt[:1]], 100, seed=3)
        fed = (used == torch.tensor(room)[:, None]).any(dim=0).nonzero()[0].item() + 1   # until one is full
        assert request.reason == "length" and request.tokens == full.tokens[:fed - 6 + 1]
        assert engine.caches["block"].used[0] == used[:, fed - 1].tolist()
    assert serve(Engine(model, 1, max_len=12), [prompt], 100, seed=3)[0].tokens == full.tokens[:7]
    for engine, T in ((Engine(model, 1, entries=[9, 9, 6]), 7), (Engine(model, 1, max_len=5), 6)):
        with pytest.raises(ValueError, match=f"a prompt of {T} tokens does not fit"):
            engine.submit(ids(1, T)[0].tolist(), 1)

@pytest.mark.parametrize("cache", ["recursion", "shared"])
@pytest.mark.parametrize("router", ["expert", "token"])
@pytest.mark.parametrize("call", [0, 10**9])
def test_entries(router, cache, call, monkeypatch):
    """A token of depth d passes the block d times, in the prompt as well; keys and values are made once per
    entry; rows hold, and queries read, what a closed form says: of their own recursion, up to themselves."""
    monkeypatch.setattr(mor, "CALL", call)
    model, rows, keys, reads = build(router=router, cache=cache), [], [], []
    attention = F.scaled_dot_product_attention

    def spy(q, k, v, mask=None, **options):
        if not options:   # the engine's; the forward of prompts gives options
            reads.append(k.shape[0] * k.shape[2] if mask is None else (mask == 0).sum().item())
        return attention(q, k, v, mask, **options)
    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    model.shared[0].register_forward_hook(lambda module, args, y: rows.append(len(y)))
    model.shared[0].attn.kv_proj.register_forward_hook(lambda module, args, y: keys.append(len(y)))
    engine = Engine(model, slots=4, temperature=0)
    requests = serve(engine, random_prompts(1, 5, 17, 8), 9)
    computed, projected, read = sum(rows), sum(keys), sum(reads)
    assert engine.counts["block_rows"] == sum(sum(r.depths) for r in requests)
    assert engine.counts["tokens"] == 36

    c, expected_rows, expected_entries, expected_reads = model.config, 0, 0, 0
    for request in requests:
        depth = model(torch.tensor([request.prompt + request.tokens[:-1]]))[2].depth[0].tolist()
        prefix = range(len(depth))
        expected_rows += sum(depth)
        expected_entries += len(depth) if cache == "shared" else sum(depth)
        used = [sum(d > r for d in depth) for r in range(3 if cache == "recursion" else 1)]
        assert engine.caches["block"].used[request.slot] == used
        for t in prefix[len(request.prompt) - 1:]:
            seen = [t + 1 if cache == "shared" else sum(d > r for d in depth[:t + 1])
                    for r in range(depth[t])]
            expected_reads += c.n_unshared * (t + 1) + c.n_shared * sum(seen)
    held = engine.caches["block"].kv[0][:, :, 0].count_nonzero().item() / (2 * c.n_kv_head)
    assert (computed, projected, read) == (expected_rows, expected_entries, expected_reads)
    assert held == expected_entries

def test_stop():
    """The stop token ends a text at once: nothing is computed for it, and its slot goes on with the next."""
    model, prompts = build(), random_prompts(5, 17)
    one, two = (written(model, prompt, 9, temperature=0) for prompt in prompts)
    stop = one.tokens[3]
    first = one.tokens.index(stop) + 1
    engine = Engine(model, slots=1, temperature=0, stop=stop)
    request, after = serve(engine, prompts, 9)
    assert request.reason == "stop" and request.tokens == one.tokens[:first]
    assert after.tokens == two.tokens[:len(after.tokens)]
    assert engine.counts["block_rows"] == sum(request.depths) + sum(after.depths)

@pytest.mark.parametrize("router", ["expert", "token"])
@pytest.mark.parametrize("cache", ["recursion", "shared"])
def test_forced_depths(router, cache):
    """Router weights that let all out at depth d: d passes for each token, and memory as deep."""
    for depth in (1, 2, 3):
        model = force(build(router=router, cache=cache), depth)
        engine = Engine(model, slots=4, patience=0)
        requests = serve(engine, [[1]] * 8, 10)
        assert all(r.depths == [depth] * 10 for r in requests)
        assert engine.counts["block_calls"] == 2 * 10 * depth and engine.counts["head_calls"] == 20
        used = [10] * depth + [0] * (3 - depth) if cache == "recursion" else [10]
        assert engine.caches["block"].used == [used] * 4 and engine.caches["head"].used == [[10]] * 4

def test_patience():
    """The head waits until a share of the texts in flight want it: fewer calls for as many tokens."""
    calls = []
    for patience in (0, 0.5, 1):
        engine = Engine(build(router="token"), slots=8, patience=patience)
        assert sum(len(r.tokens) for r in serve(engine, [[i] for i in range(8)], 20)) == 160
        calls.append(engine.counts["head_calls"])
    assert calls[0] > calls[1] > calls[2] == 20

def test_no_copies(monkeypatch):
    """Long rows are views: a step makes nothing as large as the keys that it reads. It waits for the device
    twice at most: who leaves; the tokens, and what the router said."""
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            y = function(*args, **(kwargs or {}))
            assert "local_scalar" not in str(function) and "nonzero" not in str(function)
            if torch.is_tensor(y) and y.untyped_storage().data_ptr() not in old:
                sizes.append(y.untyped_storage().nbytes())
            return y
    model, sizes, reads, tolist = build(block_size=2048, n_head=16, n_kv_head=16), [], [], torch.Tensor.tolist
    monkeypatch.setattr(mor, "CALL", 2**10)
    engine = Engine(model, slots=4)
    kept = [kv for cache in engine.caches.values() for kv in cache.kv.values()]
    old = {x.untyped_storage().data_ptr() for x in [*kept, *model.parameters(), engine.table, engine.h]}
    for i in range(4):
        engine.submit([i], 999)
    while engine.counts["tokens"] < 4 * 60:
        engine.step()
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: reads.append(x) or tolist(x))
    with Watch():
        for _ in range(60):
            engine.step()
    assert max(sizes) < 4 * 60 * 32 * 8 / 2 and len(sizes) > 1000 and len(reads) <= 2 * 60

def test_generate_edges():
    """What people ask for: nothing, one token, more texts than slots, every id, likeliest, impossible."""
    model = build()
    ask = lambda prompts=([5], [7]), n=6, **options: [
        r.tokens for r in generate(model, prompts, n, **{"seed": 1, **options})]
    assert ask(n=0) == [[], []] and generate(model, [], 5) == []
    assert generate(model, [[5]], 0)[0].reason == "max_new_tokens"
    assert ask(n=1) == [row[:1] for row in ask()] != ask(n=1, seed=9)
    assert ask(temperature=0) == ask(top_k=1) == ask(top_k=1, seed=7)
    assert ask(top_k=96) == ask(top_k=1000) == ask() == ask(slots=1) == ask(slots=7)
    assert ask() == [[token for token, _ in write(model, [i], 6, seed=seed)] for i, seed in ((5, 1), (7, 2))]
    assert ask([[5]] * 9, slots=2)[3] == ask([[5]], seed=4)[0]
    assert ask(torch.tensor([[5], [7]])) == ask() == ask(entries=[7, 7, 7])
    assert max(sum(ask(n=20, vocab_size=9, temperature=5.0), [])) < 9
    torch.manual_seed(0)
    a, b = ask(seed=None), ask(seed=None)
    torch.manual_seed(0)
    assert a == ask(seed=None) != b and ask(seed=0) == ask(seed=0) != ask(seed=None)
    for options, words in [(dict(temperature=-1), "temperature=-1"), (dict(top_k=-1), "top_k=-1"),
                           (dict(n=-1), "max_new_tokens=-1"), (dict(slots=0), "slots=0"),
                           (dict(vocab_size=0), "vocab_size=0"), (dict(patience=2), "patience=2"),
                           (dict(max_depth=4), "max_depth=4"), (dict(max_depth=0), "max_depth=0"),
                           (dict(threshold=0), "threshold=0"), (dict(prompts=[[96]]), "0 to 95"),
                           (dict(prompts=[[]]), "0 tokens"), (dict(prompts=[[1] * 33]), "33 tokens")]:
        with pytest.raises(ValueError, match=words):
            ask(**options)
    for entries in ([32], [0, 32, 32], [32, 32, 33]):
        with pytest.raises(ValueError, match="entries="):
            Engine(model, entries=entries)

@pytest.mark.parametrize("call", [0, 2**40])
def test_reads(call, monkeypatch):
    """As views or copied, a query sees its row up to its length and nothing else, wherever the row lies."""
    monkeypatch.setattr(mor, "CALL", call)
    room, rng = [30, 20, 5], np.random.default_rng(0)
    base = [0, 90, 150]   # of three slots
    for _ in range(50):
        spans = sorted((r, base[r] + slot * room[r], int(rng.integers(1, room[r] + 1)))
                       for slot, r in enumerate(rng.integers(3, size=3)))
        q, kv = torch.randn(3, 4, 8).double(), torch.randn(4, 165, 8).double()
        for kv in (kv.transpose(0, 1), kv.transpose(0, 1).contiguous()):   # as on a CPU, and as in pages
            y = mor.plan_views(spans, kv)(q, kv)
            for i, (_, start, length) in enumerate(spans):
                k, v = kv[start:start + length].transpose(0, 1).chunk(2)
                expected = (q[i].view(2, 2, 8) @ k.transpose(1, 2) / 8**0.5).softmax(dim=2) @ v
                torch.testing.assert_close(y[i], expected.flatten(0, 1), rtol=0, atol=1e-12)

def plain_varlen(q, k, v, *, cu_seq_q, cu_seq_k, max_q, max_k, seqused_k, block_table, **options):
    """What varlen_attn says that it does with pages (and one query a sequence), in plain Python."""
    assert options == dict(enable_gqa=True, num_splits=1) and max_q == 1
    assert cu_seq_q.tolist() == list(range(len(q) + 1)) and cu_seq_k.tolist() == [n * max_k for n in cu_seq_q]
    assert {t.dtype for t in (cu_seq_q, cu_seq_k, seqused_k, block_table)} == {torch.int32}
    assert block_table.shape == (len(q), max_k // 8) and 0 <= block_table.min() <= block_table.max() < len(k)
    rows = []
    for query, length, pages in zip(q, seqused_k.tolist(), block_table.tolist()):
        assert 0 < length <= max_k
        keys, values = (torch.stack([x[pages[t // 8], t % 8] for t in range(length)]) for x in (k, v))
        heads = [h * k.shape[2] // len(query) for h in range(len(query))]
        rows.append([(keys[:, g] @ one / one.shape[0]**0.5).softmax(0) @ values[:, g]
                     for one, g in zip(query, heads)])
    return torch.stack([torch.stack(row) for row in rows])

@pytest.mark.parametrize("mode", [*ROUTED[:4], dict(n_rec=1), dict(router="none", sharing="cycle")], ids=name)
def test_pages(mode, monkeypatch):
    """As on a GPU: page table and lengths are those of the rows, so that the same texts come of them, in
    slots that were used before, in memory full of NaN; uncompiled, and with a spare slot as compiled."""
    model, prompts = build(**mode), random_prompts(3, 1, 9, 2)
    entries = [20, 19, 16, 16][:1 if model.config.cache == "shared" else model.config.n_rec]
    expected = serve(Engine(model, 3, max_len=20, entries=entries), prompts, 6)
    monkeypatch.setattr(mor, "page_size", lambda like, D: 8)
    monkeypatch.setattr(mor, "varlen_attn", plain_varlen)
    monkeypatch.setattr(torch, "compile", lambda call, **options: call)
    monkeypatch.setattr(mor, "plan_views", lambda spans, kv: None)
    for compile in (False, True):
        engine = Engine(model, 3, max_len=20, entries=entries, compile=compile)
        for cache in engine.caches.values():
            for kv in cache.kv.values():
                assert kv.is_contiguous() and len(kv) % 8 == 0
                kv.fill_(math.nan)
        for pair in zip(serve(engine, prompts, 6), expected):
            assert_same(*pair)

@pytest.mark.parametrize("mode", [ROUTED[0], ROUTED[3], ROUTED[1], dict(router="none", sharing="cycle")],
                         ids=name)
def test_compiled_calls(mode, monkeypatch):
    """Compiled, a whole generation needs one graph for each of the three calls, and gives the same text."""
    graphs, prompts = [], random_prompts(1, 4, 9, 2)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend, fullgraph=True))
    model = build(**mode)
    for pair in zip(*(serve(Engine(model, 3, compile=compile), prompts, 6) for compile in (False, True))):
        assert_same(*pair)
    assert len(graphs) == 3

# ---- train.py: options, schedule, checkpoints --------------------------------------------------------------

SMALL = ["--block_size=32", "--n_layer=5", "--n_embd=32", "--n_head=2", "--n_kv_head=1", "--n_ff=48",
         "--batch_size=2", "--eval_rows=4", "--log_interval=5", "--device=cpu", "--dtype=float32"]
SMALLER = ["--n_embd=8", "--n_head=1"]   # for a vocabulary of 50304

@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "novel.txt"
    path.write_text("".join(f"{i} times {i} is {i * i}\n" for i in range(3000)))
    return path

@pytest.fixture
def go(tmp_path, text, monkeypatch):
    """Run train.main in tmp_path with small sizes and the options given."""
    monkeypatch.chdir(tmp_path)
    return lambda *options: train.main([f"--data={text}", "--data_dir=data", *SMALL, *options])

def refusal(main, argv, capsys):
    """The one line with which a command refuses argv."""
    with pytest.raises(SystemExit) as stop:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["x.py", *argv])
            train.guarded(main)
    err = capsys.readouterr().err
    assert (stop.value.code, err.count("\n"), "Traceback" in err) == (2, 1, False), err
    return err

def weights(path):
    return torch.load(path, weights_only=True)["model"]

def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)

def test_parse():
    """What people type: = or a space, 1e3 for an int, any case for a bool; only what was given counts."""
    parse = lambda *argv: train.parse(argv, "", MoRConfig, train.TrainConfig)
    assert parse() == {}
    assert parse("--n_rec", "2", "--max_steps=1e3", "--compile=True", "--learning_rate=1", "--out_dir=2024",
                 "--n_head=6.0", "--data=a=b", "--alpha=-1", "--warmup_steps=-1") == dict(
        n_rec=2, max_steps=1000, compile=True, learning_rate=1.0, out_dir="2024", n_head=6, data="a=b",
        alpha=-1.0, warmup_steps=-1)
    assert train.settle(parse("--seed=0", "--dtype=float32"), None)[1].seed == 0
    assert {f.name for f in fields(MoRConfig)} & {f.name for f in fields(train.TrainConfig)} == set()
    for preset in PRESETS.values():
        MoRConfig(**preset)

@pytest.mark.parametrize("option, words", [
    ("--n_recs=3", "did you mean --n_rec?"), ("--n_rec=2.5", "'2.5' is not a whole number"),
    ("--compile=maybe", "'maybe'"), ("--router=expart", "'expart'"), ("--n_embd=100", "n_embd=100"),
    ("--max_steps=0", "max_steps=0"), ("--n_rec", "n_rec"), ("--learning_rate=nan", "learning_rate=nan"),
    ("--seed=-1", "seed=-1"), ("--keep_steps=a", "keep_steps=a"), ("--device=cuda:99", "--device=cuda:99"),
    ("--device=meta", "--device=meta"), ("--dtype=float8", "'float8'"),
    ("--data=nowhere.txt", "nowhere.txt does not exist"), ("--data=empty.txt", "empty.txt holds no text"),
    ("--data=short.txt", "--block_size"), ("--data=hollow", "hollow holds no text"),
    ("--resume=nowhere", "nowhere"), ("--resume=empty.txt", "empty.txt is not a checkpoint"),
    ("--resume=foreign.pt", "foreign.pt is not a checkpoint"), ("--vocab_size=100", "vocab_size=100"),
    ("--out_dir=empty.txt", "empty.txt"), ("--model=huge", "'huge'"), ("tiny", "tiny"),
    ("--out_dir=", "out_dir="), ("--batch_size=1e18", "memory"), ("--keep_shards=1", "keep_shards=1"),
    ("--batch_tokens=1000", "multiple of 1024"), ("--flops=1", "less than one"), ("--flops=-1", "flops="),
    ("--batch_size=1e12", "memory"), ("--sharing=sequence", "sharing=sequence"), ("--seed=1e30", "seed="),
    ("--n_rec=1e9", "at most 64"), ("--n_layer=1e6", "at most 1000"), ("--alpha=1e39", "alpha=1e+39"),
    ("--batch_tokens=1e30", "batch_tokens="), ("--keep_steps=5,9999", "1 to 2200"), ("--device=mps", "mps"),
    ("--data=~nobody_here/x.txt", "names a user who is not"), ("--resume=", "no checkpoint")])
def test_bad_input(option, words, tmp_path, monkeypatch, capsys):
    """One line that names the value, exit code 2, and nothing written."""
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch(), Path("short.txt").write_text("too short"), Path("hollow").mkdir()
    torch.save({"weights": torch.zeros(3)}, "foreign.pt")
    argv = ["--device=cpu", "--data_dir=d", option] if "=" in option else [option]
    err = refusal(train.main, argv, capsys)
    assert words in err and len(err) < 400 and not list(tmp_path.rglob("ckpt.pt"))

def test_help(capsys):
    """--help shows every option with its comment and default."""
    with pytest.raises(SystemExit) as stop:
        train.parse(["--help"], train.__doc__, MoRConfig, train.TrainConfig)
    out = capsys.readouterr().out
    n = len(fields(MoRConfig)) + len(fields(train.TrainConfig))
    assert stop.value.code == 0 and out.count("(default:") == n
    assert "last 20 % of the steps" in " ".join(out.split())

def test_schedule():
    """wsd: linear up, flat, linear down over the last fifth; cosine: from the peak to a tenth of it."""
    c = train.settle(dict(device="cpu", max_steps=1000, learning_rate=1.0), None)[1]
    lr = [train.lr_at(s, c) for s in range(1000)]
    assert lr[0] == 1 / 50 and lr[49] == lr[50] == lr[800] == 1 and lr[900] == 0.5
    assert lr[999] == pytest.approx(1 / 200)
    c = replace(c, schedule="cosine", warmup_steps=0)
    assert [train.lr_at(s, c) for s in (0, 500, 1000)] == pytest.approx([1, 0.55, 0.1])
    for steps in (1, 2, 3):
        for schedule in ("wsd", "cosine"):
            given = dict(device="cpu", max_steps=steps, schedule=schedule, learning_rate=1.0)
            c = train.settle(given, None)[1]
            assert all(0 < train.lr_at(s, c) <= 1 for s in range(steps))

@pytest.mark.parametrize("options", [
    ["--router_arch=random"], ["--router=token", "--balance=loss_free"],
    ["--sampling=aux_router", "--batch_tokens=128", "--capacity_warmup=15"]], ids="".join)
def test_resume(go, options):
    """10 steps, a stop, and 10 more equal 20, bit for bit: weights, optimizer, RNG, data."""
    go(*options, "--max_steps=20", "--keep_steps=10", "--out_dir=whole")
    go("--resume=whole/step_10.pt", "--out_dir=half")
    a, b = (torch.load(f"{d}/ckpt.pt", weights_only=True) for d in ("whole", "half"))
    assert a["step"] == b["step"] == 20 and same(a["model"], b["model"]) and a["reader"] == b["reader"]
    assert torch.equal(a["rng"], b["rng"]) and not same(a["model"], weights("whole/step_10.pt"))

def test_branch(go, capsys):
    """A plateau checkpoint resumed with fewer max_steps cools down; what contradicts it is refused."""
    saved, save = [], train.save_checkpoint
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "save_checkpoint", lambda *what: save(*what) or saved.append(what[0].name))
        go("--max_steps=20", "--keep_steps=8", "--out_dir=long", "--eval_interval=8")
    assert saved == ["step_8.pt", "ckpt.pt", "ckpt.pt", "ckpt.pt"]   # killed in between, step_8.pt is there
    go("--resume=long/step_8.pt", "--max_steps=10", "--out_dir=branch")
    lr = [json.loads(line)["lr"] for line in open("branch/log.jsonl") if '"lr"' in line]
    assert lr == pytest.approx([5e-3 * 0.5]) and torch.load("branch/ckpt.pt", weights_only=True)["step"] == 10
    before = weights("long/ckpt.pt")
    for options, words in [
            (["--resume=long/step_8.pt"], "long/ckpt.pt would be overwritten"),
            (["--out_dir=long"], "long/ckpt.pt would be overwritten"), (["--resume=long"], "at step 20"),
            (["--resume=long", "--n_rec=2", "--max_steps=30"], "--n_rec=2 contradicts n_rec=3"),
            (["--resume=long", "--seed=1", "--max_steps=30"], "--seed=1 contradicts seed=1337"),
            (["--resume=long", "--flops=1e15", "--max_steps=30"], "give one of them")]:
        assert words in refusal(lambda argv: go(*argv), options, capsys)
    assert same(before, weights("long/ckpt.pt"))
    damaged = bytearray(Path("long/ckpt.pt").read_bytes())
    damaged[len(damaged) // 2] ^= 255
    Path("damaged.pt").write_bytes(damaged)
    for options, words in [(["--resume=damaged.pt"], "damaged.pt is not a checkpoint"),
                           (["--out_dir=nan", "--max_steps=1", "--learning_rate=1e38"], "not finite")]:
        assert words in refusal(lambda argv: go(*argv), options, capsys) and not Path("nan/ckpt.pt").exists()
    go("--resume=long", "--max_steps=22")
    assert torch.load("long/ckpt.pt", weights_only=True)["step"] == 22

def test_interrupt(go, monkeypatch, capsys):
    """Ctrl-C finishes the step and saves; so does a run without evaluations; going on is exact."""
    go("--max_steps=12", "--out_dir=whole")
    step = train.Run.train_step

    def pressed(run):
        numbers = step(run)
        os.kill(os.getpid(), signal.SIGINT) if run.step == 7 else None
        return numbers
    monkeypatch.setattr(train.Run, "train_step", pressed)
    assert go("--max_steps=12", "--out_dir=out") == 130
    assert "python train.py --resume=out" in capsys.readouterr().out
    assert torch.load("out/ckpt.pt", weights_only=True)["step"] == 7
    assert go("--resume=out") == 0 and same(weights("whole/ckpt.pt"), weights("out/ckpt.pt"))

def test_interrupted_wait(hub, go, capsys, monkeypatch):
    """Ctrl-C while a shard is on its way ends the wait, and the steps so far are saved."""
    hub.faults = ["", "", "stall"]
    join = fineweb_edu.Fetch.join

    def pressed(fetch, timeout):
        if fetch.path.name.endswith("000002.bin"):
            os.kill(os.getpid(), signal.SIGINT)
        join(fetch, timeout)
    monkeypatch.setattr(fineweb_edu.Fetch, "join", pressed)
    with pytest.raises(KeyboardInterrupt):
        go("--data=fineweb_edu", "--max_steps=9", *SMALLER)
    assert "saved out/ckpt.pt at step 5" in capsys.readouterr().out
    assert torch.load("out/ckpt.pt", weights_only=True)["reader"] == dict(epoch=0, shard=0, window=10)

def test_killed_while_saving(go):
    """kill -9, or a full disk, in the middle of a save leaves the last checkpoint as it was."""
    go("--max_steps=5")
    before = weights("out/ckpt.pt")
    state, save, child = torch.load("out/ckpt.pt", weights_only=True), torch.save, os.fork()

    def half(state, f):
        save(state, f)
        f.flush()
        os.truncate(f.name, 1000)
        os.kill(os.getpid(), 9)
    if child == 0:
        torch.save = half
        try:
            train.save_checkpoint(Path("out/ckpt.pt"), {**state, "step": 6})
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 9 and Path(f"out/ckpt.pt.{child}.tmp").stat().st_size == 1000
    assert same(before, weights("out/ckpt.pt"))
    go("--resume=out", "--max_steps=7")
    assert torch.load("out/ckpt.pt", weights_only=True)["step"] == 7 and not list(Path("out").glob("*.tmp"))

def test_accumulation(go):
    """One batch of 8 and four of 2 make the same step, the auxiliary loss included."""
    configs = []
    for batch_size in (8, 2):
        go(f"--batch_size={batch_size}", "--batch_tokens=256", "--max_steps=1", "--aux_coef=1",
           f"--out_dir=out{batch_size}")
        configs.append(torch.load(f"out{batch_size}/ckpt.pt", weights_only=True))
    norms = [json.loads(open(f"out{n}/log.jsonl").readlines()[1])["norm"] for n in (8, 2)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4) and norms[0] > 1   # clipping hides it from Adam
    a, b = (c["optimizer"]["state"] for c in configs)
    assert configs[0]["reader"] == configs[1]["reader"]
    for i in a:
        torch.testing.assert_close(a[i]["exp_avg"], b[i]["exp_avg"], rtol=1e-4, atol=1e-7)

def test_processes(go, text):
    """Two processes, and one with twice the batch, make the same steps; one of the two writes."""
    runs = [["--max_steps=3", "--batch_tokens=256", "--log_interval=1", "--eval_interval=2", *mode]
            for mode in (["--aux_coef=1"], ["--router=token", "--balance=loss_free"])]
    both = [[f"--data={text}", "--data_dir=data", *SMALL, *run, f"--out_dir=two{run[4]}"] for run in runs]
    Path("both.py").write_text(f"import train\nfor argv in {both}:\n    train.main(argv)\n")
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "both.py"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for run in runs:
        go(*run, "--batch_size=4", f"--out_dir=one{run[4]}")
    out, err = process.communicate()
    assert process.returncode == 0 and out.count(b"step 3/3") == 2, err.decode()
    for mode in ("--aux_coef=1", "--router=token"):
        one, two = (torch.load(f"{d}{mode}/ckpt.pt", weights_only=True) for d in ("one", "two"))
        assert one["reader"] == two["reader"] and one["step"] == two["step"] == 3
        for name, w in one["model"].items():
            torch.testing.assert_close(two["model"][name], w, rtol=1e-3, atol=1e-5)
        for x, y in zip(*(c["optimizer"]["state"].values() for c in (one, two))):
            torch.testing.assert_close(x["exp_avg"], y["exp_avg"], rtol=1e-3, atol=1e-7)
        a, b = ([json.loads(line) for line in open(f"{d}{mode}/log.jsonl")][1:] for d in ("one", "two"))
        assert len(a) == len(b) == 5
        for x, y in zip(a, b):   # loss, norm, load, agreement: over all rows of the step
            for key in x.keys() - {"tokens_per_s", "dead", "max_vio", "entropy"}:
                assert x[key] == pytest.approx(y[key], rel=1e-4, abs=1e-5), key

def test_gpu_settings(go, monkeypatch):
    """TF32 serves float32 runs only: in bfloat16 it would round what the router says, unlike generation.
    Processes on GPUs exchange gradients by nccl, each on its own, and flags by gloo."""
    for dtype, precision in (("bfloat16", "highest"), ("float32", "high")):
        go("--max_steps=1", f"--dtype={dtype}", f"--out_dir={dtype}")
        assert torch.get_float32_matmul_precision() == precision
    calls = []
    for name, value in dict(is_torchelastic_launched=True, is_initialized=False, get_rank=1,
                            get_world_size=2).items():
        monkeypatch.setattr(train.dist, name, lambda value=value: value)
    monkeypatch.setattr(train.dist, "init_process_group", lambda *args, **rest: calls.append((args, rest)))
    for device in (torch.device("cpu"), torch.device("cuda", 1)):
        assert train.init_distributed(device) == (1, 2)
    assert calls == [(("gloo",), dict(device_id=None)), (("cpu:gloo,cuda:nccl",), dict(device_id=device))]

def test_recipe(monkeypatch):
    """The paper's numbers of steps at 16.5e18 FLOPs follow from --flops; 10B tokens are the default of its
    sizes, whatever the tokens of a step; the micro-batch divides them."""
    parse = lambda *argv: train.parse(["--device=cpu", *argv], "", MoRConfig, train.TrainConfig)
    settle = lambda *argv: train.settle(parse(*argv), None)[1]
    paper = "--model=360m", "--batch_tokens=2097152", "--flops=16.5e18"
    for options, steps in [
            (["--n_rec=1"], 9438), (["--router=none"], 9438), (["--n_rec=2", "--router=none"], 9438),
            (["--n_rec=4", "--router=none"], 8883), (["--n_rec=2"], 12619), (["--n_rec=3"], 14161),
            (["--n_rec=4"], 14216), (["--cache=shared"], 14672), (["--router=token"], 14161)]:
        assert abs(settle(*paper, *options).max_steps - steps) <= 1
    for flops, plateau in (("2e18", 1373), ("5e18", 3433), ("16.5e18", 11328)):   # where the branches leave
        assert abs(settle(*paper[:2], f"--flops={flops}").max_steps * 0.8 - plateau) <= 1
    tc = settle("--model=135m")
    assert (tc.data, tc.batch_tokens, tc.max_steps, tc.learning_rate) == ("fineweb_edu", 524288, 19073, 3e-3)
    assert tc.warmup_steps == 954 and tc.grad_accum(2048, 8) * tc.batch_size * 2048 * 8 == 524288
    assert settle("--model=135m", "--batch_tokens=2097152").max_steps == 4768
    assert settle().max_steps == 2200 and settle().data == "python"
    with pytest.raises(ValueError, match="must be a multiple of 98304"):
        settle("--model=135m", "--batch_size=16").grad_accum(2048, 3)
    monkeypatch.setattr(train, "pick_device", torch.device)   # as on a machine with a GPU
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    for model, memory, rows in (("360m", 85e9, 16), ("360m", 25.3e9, 4), ("360m", 4e9, 1),
                                ("360m", 300e9, 16), ("1.7b", 85e9, 8), ("135m", 25.3e9, 8)):
        gpu = SimpleNamespace(total_memory=memory)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
        tc = settle("--device=cuda", *["--model=" + model] * (model != "360m"))
        assert (tc.model, tc.dtype, tc.compile, tc.batch_size) == (model, "bfloat16", True, rows)
    assert not settle("--device=cuda", "--router=token").compile

def test_log_and_learning(go, capsys):
    """The loss falls in every mode; log line and log.jsonl carry loss, rate, speed, the router's health."""
    for options, words in [
            ([], ["depth 1.9", "aux ", "agree [", "dead "]), (["--cache=shared"], ["aux "]),
            (["--capacity_warmup=40"], ["aux "]),
            (["--router=token"], ["balance ", "max_vio ", "entropy "]), (["--n_rec=1"], []),
            (["--router=none", "--sharing=sequence"], [])]:
        out = "-".join(options) or "out"
        go(*options, "--max_steps=40", f"--out_dir={out}", "--eval_interval=20", "--learning_rate=1e-2")
        printed = capsys.readouterr().out
        assert all(w in printed for w in ["step 40/40 | loss ", "eval 40/40 | causal ", " | eta ", *words])
        records = [json.loads(line) for line in open(f"{out}/log.jsonl")]
        losses = [r["lm"] for r in records if "lm" in r]
        if options in ([], ["--cache=shared"]):   # capacities of 32, 21 and 10 from the first step on
            assert records[1]["mean_depth"] == pytest.approx(63 / 32)
        if "--capacity_warmup=40" in options:   # from all tokens to these capacities
            depths = [r["mean_depth"] for r in records if "lm" in r]
            assert depths[0] == 3 and depths[-1] == pytest.approx(63 / 32)
        evals = [r for r in records if "val_causal" in r]
        assert losses[-1] < losses[0] - 1 and len(evals) == 2 and evals[-1]["val_causal"] < 4
        assert records[0]["vocab_size"] == 257 and math.isfinite(evals[-1]["val_mean_depth"])

# ---- data/: one format, one reader -------------------------------------------------------------------------

def shard_files(folder, lengths):
    """Shards whose tokens count on from 0 over all of them."""
    start, paths = 0, []
    for i, n in enumerate(lengths):
        write_tokens(folder / f"{i}.bin", [np.arange(start, start + n, dtype=np.uint16)])
        start, paths = start + n, [*paths, folder / f"{i}.bin"]
    return lambda i: read_tokens(paths[i]) if i < len(paths) else None

@pytest.mark.parametrize("lengths", [[8], [9], [10], [17], [5, 9, 30], [3, 0, 4, 12], [40]])
def test_reader(lengths, tmp_path):
    """An epoch gives every window of every shard once; targets are shifted by one; epochs differ."""
    B, T = 2, 4
    reader = Reader(shard_files(tmp_path, lengths), B, T, seed=1)
    starts = np.cumsum([0, *lengths])
    expected = sorted(int(s + i * T) for s, n in zip(starts, lengths) for i in range(max(0, n - 1) // T))
    epochs = []
    for _ in range(2):
        firsts = []
        while len(firsts) < len(expected):   # B divides no epoch in general: batches run over the edge
            x, y = next(reader)
            assert x.shape == (B, T) and x.dtype == torch.int64 and torch.equal(x[:, 1:], y[:, :-1])
            assert torch.equal(y, x + 1)
            firsts += x[:, 0].tolist()
        epochs.append(firsts)
    flat = [f for e in epochs for f in e]
    n = len(expected)
    assert sorted(flat[:n]) == expected and sorted(flat[n:2 * n]) == expected
    again = Reader(shard_files(tmp_path, lengths), B, T, seed=1, state=reader.state)
    ranks = [Reader(shard_files(tmp_path, lengths), 1, T, 1, torch.device("cpu"), reader.state, rank, world=2)
             for rank in range(2)]
    for _ in range(9):   # two readers of one row are one of two
        rows = next(reader)[0]
        assert torch.equal(rows, next(again)[0]) and torch.equal(rows, torch.cat([next(r)[0] for r in ranks]))
        assert reader.state == ranks[0].state == ranks[1].state

def test_reader_order(tmp_path):
    """Windows come in an order that the seed and the epoch decide."""
    first = lambda seed, n: [next(r)[0][0, 0].item() for r in [Reader(shards, 1, 4, seed)] for _ in range(n)]
    shards = shard_files(tmp_path, [401])
    a = first(1, 200)
    assert a == first(1, 200) and a != first(2, 200) and a[:100] != a[100:] and a[:100] != sorted(a[:100])

def test_token_files(tmp_path):
    """What is not a whole token file is refused; large ids survive uint16; too little text says so."""
    path = tmp_path / "a.bin"
    write_tokens(path, [np.array([0, 65535], dtype=np.uint16), np.array([40000], dtype=np.uint16)])
    assert read_tokens(path).tolist() == [0, 65535, 40000] and path.stat().st_size == 1024 + 6
    assert np.fromfile(path, dtype=np.int32, count=3).tolist() == [20240520, 1, 3]
    assert next(Reader([read_tokens(path), None].__getitem__, 1, 2, 0))[1].tolist() == [[65535, 40000]]
    for content in (path.read_bytes()[:-2], path.read_bytes() + b"xx", b"<html>", b"\0" * 2000, b""):
        (tmp_path / "b.bin").write_bytes(content)
        with pytest.raises(ValueError, match="b.bin is"):
            read_tokens(tmp_path / "b.bin")
    for use in (lambda: next(Reader(shard_files(tmp_path, [4]), 1, 4, 0)),
                lambda: Reader(lambda i: None, 1, 4, 0),
            lambda: next(Reader(shard_files(tmp_path, [4]), 1, 4, 0, state=dict(epoch=0, shard=0, window=7))),
                lambda: val_batches(path, 1, 4, 1, torch.device("cpu"))):
        with pytest.raises(ValueError, match="--block_size"):
            use()

def test_val_batches(tmp_path):
    """The same windows every time, spread over the file, each once; the last batch is what is left."""
    write_tokens(tmp_path / "v.bin", [np.arange(1001, dtype=np.uint16)])
    batches = val_batches(tmp_path / "v.bin", 8, 10, 32, torch.device("cpu"))
    firsts = torch.cat([x[:, 0] for x, _ in batches]).tolist()
    assert len(firsts) == 32 and firsts[0] == 0 and firsts[-1] == 990 and len(set(firsts)) == 32
    assert [len(x) for x, _ in val_batches(tmp_path / "v.bin", 64, 10, 256, torch.device("cpu"))] == [64, 36]

def test_bytes(tmp_path):
    """Any bytes make the round trip; the split goes by name; other text gets another folder."""
    every = bytes(range(256)) + "déjà vu \N{SNOWMAN}".encode()
    assert python_source.decode(python_source.encode(every)) == every
    assert python_source.decode(python_source.encode("é\udcff")) == b"\xc3\xa9\xff"   # odd bytes in argv
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    for i in range(40):
        (folder / "deep" / f"{i:02}.txt").write_bytes(b"%d" % (i % 10) * 50)
    (folder / ".hidden").write_text("no"), (folder / "binary").write_bytes(b"no\0")
    source = python_source.source(str(folder), tmp_path / "data")
    val, train_tokens = read_tokens(source.val).tolist(), source.train(0).tolist()
    assert val == ([ord("9")] * 50 + [256]) * 2 and len(train_tokens) == 38 * 51 and source.train(1) is None
    assert source.vocab_size == 257 and max(train_tokens) == 256
    (folder / "deep" / "00.txt").write_text("changed")
    assert python_source.source(str(folder), tmp_path / "data").name != source.name
    single = python_source.source(str(folder / "deep" / "01.txt"), tmp_path / "data")
    assert [len(single.train(0)), len(read_tokens(single.val))] == [48, 4]

def test_python_source(tmp_path):
    """The default data: about 10 MB of the standard library, the same split every time."""
    source = python_source.source("python", tmp_path)
    train_tokens, val = source.train(0), read_tokens(source.val)
    assert len(train_tokens) > 5e6 and 0.02 < len(val) / len(train_tokens) < 0.1
    assert b"import" in python_source.decode(val.tolist())
    built = source.val.stat().st_mtime_ns
    assert python_source.source("python", tmp_path).val.stat().st_mtime_ns == built

# ---- data/: FineWeb-Edu, from a server on the loopback that can misbehave ----------------------------------

class Hub(BaseHTTPRequestHandler):
    """Serves `server.files`, bytes by name. The first of `server.faults` is what goes wrong with this answer,
    and is used up; `server.seen` has what was asked for."""
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        hub, name = self.server, self.path.rsplit("/", 1)[-1]
        hub.seen.append((self.path, self.headers["Range"], self.headers["Authorization"]))
        fault = hub.faults.pop(0) if hub.faults else ""
        hub.stalled.wait(30) if fault == "stall" else None
        if name not in hub.files or fault.isdecimal():
            return self.answer(int(fault or 404), b"no", **{"Retry-After": "7"} if fault == "429" else {})
        if fault in ("redirect", "away"):
            host = f"http://localhost:{hub.server_port}" * (fault == "away")
            return self.answer(302, b"", Location=f"{host}/elsewhere/{name}")
        if fault == "html":
            return self.answer(200, b"<!DOCTYPE html><title>Please log in</title>" * 50)
        content = hub.files[name]
        etag = {} if fault.endswith("unnamed") else {"ETag": f'"{hash(content)}"'}
        first, last = self.headers["Range"][6:].split("-")
        first, last = int(first), min(int(last or len(content)), len(content) - 1)
        if first > last and "unranged" not in fault:
            return self.answer(416, b"", **{"Content-Range": f"bytes */{len(content)}"})
        if fault == "shifted":
            first += 3
        if fault == "piece":   # less than was asked for, which is allowed
            last = first + 1999
        span = {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
        if "unranged" in fault:
            first, last, span = 0, len(content) - 1, {}
        share = 0.4 if "cut" in fault else 1
        if "starred" in fault:   # a server that does not know how much there is
            span["Content-Range"] = f"bytes {first}-{last}/*"
        body, packed = content[first:last + 1], {}
        if "packed" in fault:
            body, packed = gzip.compress(body), {"Content-Encoding": "gzip"}
        length = {"Content-Length": None} if "endless" in fault else {}
        self.answer(206 if span else 200, body, share, **etag, **span, **packed, **length)

    def answer(self, status, body, share=1, **headers):
        self.send_response(status)
        for key, value in {"Content-Length": len(body), **headers}.items():
            if value is not None:
                self.send_header(key, str(value))
            else:
                self.close_connection = True
        self.end_headers()
        self.wfile.write(body[:int(share * len(body))])
        self.close_connection |= share < 1

    def log_message(self, *args):
        pass

def token_bytes(n, start=0, magic=20240520, count=None):
    """A token file whose ids count on from start."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, 1, n if count is None else count
    return header.tobytes() + (np.arange(start, start + n) % 50257).astype("<u2").tobytes()

@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub with one validation and three training files, which train.py finds; no pause is really made."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files = {"edu_fineweb_val_000000.bin": token_bytes(400, 7)}
    for i, n in enumerate((331, 330, 290)):
        server.files[f"edu_fineweb_train_{i + 1:06}.bin"] = token_bytes(n, 1000 * i)
    server.faults, server.seen, server.stalled = [], [], threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    server.slept, server.handle_error = [], lambda *connection: None   # who asked may be gone
    clock = SimpleNamespace(sleep=server.slept.append, time_ns=time.time_ns, monotonic=time.monotonic)
    monkeypatch.setattr(fineweb_edu, "time", clock)
    monkeypatch.setattr(fineweb_edu.Fetch, "met", False)
    monkeypatch.setattr(fineweb_edu, "CHUNK", 1000)
    for name, value in {"HF_ENDPOINT": server.url, "NO_PROXY": "*", "no_proxy": "*"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield server
    server.stalled.set()
    server.shutdown()
    server.server_close()

FAULTS = [([], []), (["unranged"], []), (["cut"], [1]), (["cut", "unranged"], [1]), (["shifted"], [1]),
          (["cut", "shifted"], [1, 2]), (["cut"] * 5, None), (["cut", "416"], [1, 2]), (["416"], [1]),
          (["429"], [7]), (["503"] * 3, [1, 2, 4]), (["429", "503", "cut", "500", "redirect"], None),
          (["redirect"], []), (["cut unnamed"], [1, 2]), (["cut unnamed"] * 3, None),
          (["unranged unnamed"], []), (["piece"], [1]), (["piece"] * 3, None),
          (["starred"], []), (["starred cut"], [1]), (["unranged endless"], []), (["unranged packed"], []),
          (["unranged endless cut"], [1]), (["429", "cut", "piece", "unranged"], [7, 1, 1])]

@pytest.mark.parametrize("limit", [None, 2500])
@pytest.mark.parametrize("faults, slept", FAULTS, ids=lambda v: "-".join(map(str, v or [])))
def test_fetch(faults, slept, limit, hub, tmp_path):
    """Whatever goes wrong on the way, what has its final name in the end is the file, or its beginning."""
    hub.files["a.bin"], hub.faults, path = token_bytes(5000), list(faults), tmp_path / "a.bin"
    assert fineweb_edu.Fetch(f"{hub.url}/a.bin", path, limit).wait() == path and not hub.faults
    assert read_tokens(path).tolist() == list(range(limit or 5000))
    assert path.read_bytes() == token_bytes(limit or 5000)
    assert {p.name for p in tmp_path.iterdir()} == {"a.bin", "lock"}
    assert slept is None or hub.slept == slept
    if faults == ["cut"]:   # goes on from where it ended
        sent = 2000 if limit else 4000   # in full chunks
        assert hub.seen[1][1] == f"bytes={sent}-" + (f"{HEADER + 2 * limit - 1}" if limit else "")
    n = len(hub.seen)
    assert fineweb_edu.Fetch(f"{hub.url}/a.bin", path, limit).wait() == path and len(hub.seen) == n

@pytest.mark.parametrize("content, faults, words", [
    (token_bytes(500), ["html"], ["no shard", "<!DOCTYPE"]),
    (token_bytes(500, magic=7), [], ["no shard", "magic"]),
    (token_bytes(500, count=400), [], ["no shard", "2024 bytes", "promises 1824"]),
    (token_bytes(500, count=600), [], ["no shard"]), (token_bytes(500, count=-1), [], ["no shard"]),
    (token_bytes(500).replace(b"\x00\x00\x01\x00", b"\xff\xff\x01\x00"), [], ["id 65535"]),
    (b"", [], ["status 416"]), (b"", ["unranged"] * 9, ["only 0 bytes came"]),
    (token_bytes(500), ["503"] * 9, ["status 503", "HF_ENDPOINT", "--data=python"]),
    (token_bytes(500), ["401"], ["status 401", "HF_TOKEN"]),
    (token_bytes(500), ["shifted"] * 9, ["other bytes"]),
    (token_bytes(500), ["redirect"] * 300, ["too many redirects"])])
@pytest.mark.parametrize("limit", [None, 100])
def test_fetch_refused(content, faults, words, limit, hub, tmp_path):
    """What cannot be had, or is no shard, ends in one line after a bounded time, with nothing under the final
    name, and does not stand in the way of a better answer."""
    hub.files["a.bin"], hub.faults = content, list(faults)
    with pytest.raises(ValueError) as error:
        fineweb_edu.Fetch(f"{hub.url}/a.bin", tmp_path / "a.bin", limit).wait()
    assert all(w in str(error.value) for w in ["a.bin", *words]) and sum(hub.slept) <= 127
    assert not (tmp_path / "a.bin").exists()
    hub.files["a.bin"], hub.faults = token_bytes(500), []
    path = fineweb_edu.Fetch(f"{hub.url}/a.bin", tmp_path / "a.bin", limit).wait()
    assert len(read_tokens(path)) == (limit or 500)

def test_fetch_parts(hub, tmp_path, monkeypatch):
    """Parts that an earlier run left: of the same file, complete, too long, of another version, no shard."""
    url, path, whole = f"{hub.url}/a.bin", tmp_path / "a.bin", token_bytes(5000)
    hub.files["a.bin"] = whole
    monkeypatch.setattr(fineweb_edu, "TRIES", 1)
    hub.faults = ["cut"]
    with pytest.raises(ValueError, match="broke off"):
        fineweb_edu.Fetch(url, path).wait()
    (part,) = tmp_path.glob("*.part")
    assert part.read_bytes() == whole[:4000]
    monkeypatch.setattr(fineweb_edu, "TRIES", 8)
    other = token_bytes(5000, 9)
    for left, content, requests in [
            (whole[:2000], whole, 1), (whole, whole, 0), (whole + b"xx", whole, 2), (whole[:2000], other, 2),
            (b"<html>" * 300, whole, 1), (b"", whole, 1), (whole[:100], whole, 1), (whole, other, 0)]:
        path.unlink(missing_ok=True)
        part.write_bytes(left)
        hub.files["a.bin"], hub.seen = content, []
        assert fineweb_edu.Fetch(url, path).wait() == path and len(hub.seen) == requests
        assert path.read_bytes() == (content if requests else left) and not list(tmp_path.glob("*.part"))
    path.unlink()
    assert fineweb_edu.Fetch(f"{hub.url}/b.bin", tmp_path / "b.bin").wait(needed=False) is None
    assert hub.slept == [1] * 2
    hub.shutdown(), hub.server_close()   # no network
    hub.slept.clear()
    with pytest.raises(ValueError, match="Connection refused.*check the network"):
        fineweb_edu.Fetch(url, path).wait()
    assert hub.slept == [1, 2, 4, 8, 16, 32, 64]
    for folder in (tmp_path / "lock" / "in a file", Path("/proc/none")):
        with pytest.raises(OSError, match="cannot be written .*another --data_dir"):
            fineweb_edu.Fetch(url, folder / "a.bin").wait()

def test_fetch_killed(hub, tmp_path):
    """kill -9 half way, and another run: it asks for the rest only. Two runs at once do not mix their
    bytes."""
    hub.files["a.bin"], hub.faults = token_bytes(900_000), ["cut", "stall"]
    code = ("import sys, pathlib; from data import fineweb_edu as f\n"
            "f.Fetch(sys.argv[1], pathlib.Path(sys.argv[2])).wait()")
    argv = [sys.executable, "-c", code, f"{hub.url}/a.bin", str(tmp_path / "a.bin")]
    process = subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
    while len(hub.seen) < 2:
        time.sleep(0.01)
    other = fineweb_edu.Fetch(f"{hub.url}/a.bin", tmp_path / "a.bin")
    other.join(0.2)
    assert other.is_alive() and len(hub.seen) == 2   # it waits for the first
    process.kill()
    process.wait()
    assert read_tokens(other.wait()).tolist() == list(np.arange(900_000) % 50257)
    assert hub.seen[2][1] == f"bytes={len(token_bytes(900_000)) * 2 // 5 // 2**16 * 2**16}-"
    hub.stalled.set()

def test_disk_full(hub, go, capsys):
    """A disk that is full ends in one line, and the last step is saved."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    hub.files["edu_fineweb_train_000002.bin"] = token_bytes(600_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Run, "save", lambda run, name: run.saved.append(run.step))
        patch.setattr(train.Run, "saved", [], raising=False)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large.*make room.*--keep_shards=2"):
                go("--data=fineweb_edu", "--max_steps=9", *SMALLER)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert train.Run.saved == [5]
    hub.faults, _ = ["404"], capsys.readouterr()
    assert "status 404" in refusal(lambda argv: go("--data=fineweb_edu_10b", "--out_dir=a"), [], capsys)

def test_streaming(hub, go, capsys, monkeypatch):
    """Three shards. A run that is killed in the second, resumed in an empty folder, left without the third
    in the middle of a batch, and resumed again, ends as an unbroken one does. Old shards go where that is
    asked for."""
    options = ["--data=fineweb_edu", "--max_steps=17", "--eval_interval=6", "--n_rec=2", "--eval_rows=2",
               "--batch_size=3", *SMALLER]
    code = ("import os, sys, torch, train; step = train.Run.train_step\n"
            "def killed(run):\n"
            "    os.kill(os.getpid(), 9) if run.step == 7 else None\n"
            "    return step(run)\n"
            "torch.set_num_threads(1); train.Run.train_step = killed; train.main(sys.argv[1:])\n")
    argv = [sys.executable, "-c", code, "--data_dir=killed", *SMALL, *options, "--keep_shards=2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    monkeypatch.setenv("HF_ENDPOINT", hub.url + "/")
    monkeypatch.setenv("HF_TOKEN", "secret")
    go(*options, "--out_dir=whole")
    assert "epoch 2 begins" in capsys.readouterr().out
    paths = [path for path, _, token in hub.seen if token == "Bearer secret"]
    folder = Path("data/fineweb-edu-100B-gpt2-token-shards")
    assert paths[:4] == [f"/datasets/karpathy/{folder.name}/resolve/main/edu_fineweb_{part}.bin"
                         for part in ("val_000000", "train_000001", "train_000002", "train_000003")]
    assert process.wait() == -9 and torch.load("out/ckpt.pt", weights_only=True)["step"] == 6
    resume = ["--resume=out", "--data_dir=again", "--keep_shards=2"]
    hub.faults = ["", "", "401", "401"]
    with pytest.raises(ValueError, match="000003.bin cannot be had"):
        train.main(resume)
    hub.faults = []
    lost = torch.load("out/ckpt.pt", weights_only=True)
    assert lost["step"] == 6 and lost["reader"] == dict(epoch=0, shard=1, window=8)
    assert train.main(resume) == 0
    assert same(weights("whole/ckpt.pt"), weights("out/ckpt.pt"))
    kept = [p.name[-5] for p in (Path("again") / folder.name).glob("*train*")]
    assert kept == ["3"]   # of the second epoch, and none ahead
    assert "tiktoken" not in sys.modules

def test_shards_ahead(hub, tmp_path, capsys, monkeypatch):
    """The next shard is fetched meanwhile, and waited for with a bar; what failed then is tried again."""
    hub.files["edu_fineweb_train_000001.bin"] = token_bytes(9)
    hub.faults = ["", "", "stall"]
    source = fineweb_edu.source("fineweb_edu", tmp_path, 0)
    reader = Reader(source.train, 1, 4, seed=0)
    next(reader), next(reader)
    while len(hub.seen) < 3:
        time.sleep(0.01)
    assert not list(tmp_path.rglob("*_000002.bin"))
    threading.Timer(1, hub.stalled.set).start()
    next(reader)
    assert "\r" not in capsys.readouterr().err   # a bar is for terminals
    source.train.ahead[2].join()
    hub.faults = ["401"]
    source = fineweb_edu.source("fineweb_edu", tmp_path, 0)
    (next(tmp_path.rglob("*_000002.bin"))).unlink()
    source.train(0)
    source.train.ahead[1].join()
    assert isinstance(source.train.ahead[1].error, ValueError) and len(source.train(1)) == 330
    source = fineweb_edu.source("fineweb_edu", tmp_path, keep_shards=2)
    for i in (0, 1, 0, 1, 2):
        source.train(i)
        next(iter(source.train.ahead.values())).join()
        ahead = [i, i + 1] if i < 2 else [2]
        assert sorted(int(p.stem[-1]) - 1 for p in tmp_path.rglob("*_train_*")) == ahead
    assert len(source.train(1)) == 330
    next(tmp_path.rglob("*_000003.bin")).unlink()   # by another run
    source.train(1)
    source.train.ahead[2].join()
    next(tmp_path.rglob("*_000003.bin")).unlink()
    assert len(source.train(2)) == 290 and source.train(3) is None
    assert source.train(4) is None and source.vocab_size == 50304 and source.tokenizer == "gpt2"
    source.val.write_bytes(b"damaged")
    with pytest.raises(ValueError, match="is not a token file.*delete it"):
        fineweb_edu.source("fineweb_edu", tmp_path, 0)
    for variable, value, words in [("HF_ENDPOINT", "huggingface.co", "HF_ENDPOINT=huggingface.co must"),
                                   ("HF_TOKEN", "a secret", "HF_TOKEN holds characters")]:
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=words) as error:
            patch.setenv(variable, value)
            fineweb_edu.source("fineweb_edu", tmp_path, 0)
        assert "secret" not in str(error.value)
    (source.val.parent / "edu_fineweb_train_000002.bin").write_bytes(token_bytes(9)[:-1])
    with pytest.raises(ValueError, match="damaged.*delete it"):
        source.train(1)

# ---- sample.py ---------------------------------------------------------------------------------------------

def test_sample(go, capsys, monkeypatch):
    """Text, depths and a legend; repeatable by seed; prompts of any bytes; bad input in one line."""
    assert "python train.py --n_rec=3" in refusal(sample.main, [], capsys)
    go("--max_steps=3")
    capsys.readouterr()

    def run(*options):
        sample.main(["--device=cpu", "--max_new_tokens=20", *options])
        out = capsys.readouterr().out
        summary = out.splitlines()[-1 - str(options).count("=page.")]   # then "wrote page.html"
        assert "calls of the shared block" in summary
        return out.replace(summary, "")   # speed varies
    text = run()
    assert "depth  1:" in text and " mean " in text and " of 3 over " in text
    assert text == run() != run("--seed=1")
    assert "\033[48;5;" in run("--color=always") and "\033" not in text
    assert " mean 1.00 of 3 over 20 tokens" in run("--max_depth=1")
    assert run("--num_samples=2", "--seed=5").count("--- ") == 2
    assert run("--temperature=0") == run("--temperature=0", "--seed=9") == run("--top_k=1", "--seed=3")
    assert "over 0 tokens" in run("--max_new_tokens=0") and "over 99 tokens" in run("--max_new_tokens=99")
    parts, submit = [], Engine.submit
    with monkeypatch.context() as patch:   # a full text goes on with its last half, prompt included
        patch.setattr(Engine, "submit", lambda *args: parts.append(submit(*args)) or parts[-1])
        run(f"--prompt={'x' * 30}")
    assert len(parts) > 1 and parts[0].reason == "length"
    assert all(b.prompt == (a.prompt + a.tokens)[-16:] for a, b in zip(parts, parts[1:]))
    for prompt in ("def f(", "é\N{SNOWMAN}", "\udcff\udc80", "\0\x1b[2J", "longer than a row " * 9):
        out = run(f"--prompt={prompt}")
        assert "\x1b" not in out and out
    many = run("--num_samples=5", "--slots=2", "--max_new_tokens=70", f"--prompt={'x' * 99}",
               "--html=page.html", "--svg=page.svg")
    n = int(many.split(" over ")[1].split()[0])
    assert many.count("--- ") == 5 and 70 < n <= 350
    page = Path("page.html").read_text(encoding="utf-8")
    assert page.count('<b class="d') == n and page.count("<pre>") == 5
    assert "depth 1 of 3 | router, recursion 1: " in page
    pieces = list(ElementTree.parse("page.svg").iter("{http://www.w3.org/2000/svg}text"))
    legend = pieces[-1].get("y")
    shown = lambda pairs: [(depth, char) for depth, text in pairs if depth != "d0"
                           for char in html.unescape(text).replace("\u21b5", "") if not char.isspace()]
    drawn = [(piece.get("class"), piece.text) for piece in pieces if piece.get("y") != legend]
    assert shown(drawn) == shown(re.findall(r'<b class="(d.)"[^>]*>([^<]*)</b>', page))
    widths = {}
    for piece in pieces:   # side by side, and not beyond the edge
        assert int(piece.get("x")) == sample.WIDTH + widths.get(piece.get("y"), 0)
        widths[piece.get("y")] = widths.get(piece.get("y"), 0) + int(piece.get("textLength"))
    assert max(widths.values()) == sample.WIDTH * sample.COLUMNS
    run("--prompt=<script>", "--html=page.html", "--svg=page.svg")
    assert "".join(ElementTree.parse("page.svg").getroot().itertext()).count("<script>") == 1
    page = Path("page.html").read_text(encoding="utf-8")
    assert "http" not in page and "<script" not in page and "&lt;script&gt;" in page
    calls, print_piece = [], sample.Printer.__call__

    def interrupted(self, text, depth):
        calls.append(text)
        if len(calls) == 9:
            raise KeyboardInterrupt
        print_piece(self, text, depth)
    with monkeypatch.context() as patch:
        patch.setattr(sample.Printer, "__call__", interrupted)
        assert sample.main(["--device=cpu", "--max_new_tokens=1e6", "--html=page.html"]) == 130
    n = int(capsys.readouterr().out.split(" over ")[1].split()[0])
    assert n >= 8 and Path("page.html").read_text(encoding="utf-8").count('<b class="d') == n
    for option, words in [("--temperature=-1", "temperature=-1"), ("--top_k=-1", "top_k=-1"),
                          ("--slots=0", "slots=0"), ("--html=no/such/page.html", "no/such"),
                          ("--html=out/ckpt.pt", "must end in .html"), ("--svg=out/ckpt.pt", "in .svg"),
                          ("--max_new_tokens=-1", "max_new_tokens=-1"), ("--max_depth=4", "max_depth=4"),
                          ("--num_samples=0", "num_samples=0"), ("--threshold=2", "threshold=2"),
                          ("--out_dir=no", "no")]:
        assert words in refusal(sample.main, [option], capsys)

# ---- Published checkpoints ---------------------------------------------------------------------------------

LLAMA = dict(model_type="llama", vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=6,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5,
             rope_theta=500.0, tie_word_embeddings=True, eos_token_id=1, torch_dtype="float32")

def published(folder, dtype="F32", files=1, seed=0, tokenizer=None, **changes):
    """A tiny Llama as the hub has it. Returns its tensors, float64, as they are after rounding to dtype."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**LLAMA, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer or bpe()))
    C, V, I, kv = config["hidden_size"], config["vocab_size"], config["intermediate_size"], 8
    shapes = {"model.embed_tokens.weight": [V, C], "model.norm.weight": [C]}
    for i in range(config["num_hidden_layers"]):
        for name, shape in {"self_attn.q_proj": [C, C], "self_attn.k_proj": [kv, C],
                            "self_attn.v_proj": [kv, C], "self_attn.o_proj": [C, C],
                            "mlp.gate_proj": [I, C], "mlp.up_proj": [I, C], "mlp.down_proj": [C, I],
                            "input_layernorm": [C], "post_attention_layernorm": [C]}.items():
            shapes[f"model.layers.{i}.{name}.weight"] = shape
    stream = torch.Generator().manual_seed(seed)
    kind = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[dtype]
    tensors = {name: (torch.randn(shape, generator=stream) * 0.5 + (len(shape) == 1)).to(kind)
               for name, shape in shapes.items()}
    parts = [dict([*tensors.items()][i::files]) for i in range(files)]
    names = [f"model{f'-{i}-of-{files}' * (files > 1)}.safetensors" for i in range(files)]
    for name, part in zip(names, parts):
        (folder / name).write_bytes(safetensors(part, dtype))
    if files > 1:
        where = {tensor: name for name, part in zip(names, parts) for tensor in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return {name: tensor.double() for name, tensor in tensors.items()}

def safetensors(tensors, dtype="F32", **lies):
    """The bytes of a safetensors file. lies: name -> what its header says of a tensor."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, t in tensors.items():
        raw = t.contiguous().view(torch.uint8).numpy().tobytes()
        header[name] = dict(dtype=dtype, shape=list(t.shape), data_offsets=[len(data), len(data) + len(raw)])
        data += raw
    text = json.dumps({**header, **lies}).encode()
    return len(text).to_bytes(8, "little") + text + data

LETTERS = {byte: chr(byte) for byte in range(256) if chr(byte).isprintable() and byte not in (32, 173)}
LETTERS |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in LETTERS)}

def bpe(merges=("h e", "l l", "he ll", "\u0120 w", "o r"), lacking=b"", **changes):
    """A tokenizer.json of bytes and merges; two special tokens come first."""
    letters = [LETTERS[byte] for byte in range(256) if byte not in lacking]
    words = ["<|start|>", "<|end|>", *letters, *(merge.replace(" ", "") for merge in merges)]
    vocab = {word: i for i, word in enumerate(words)}
    added = [dict(id=i, content=word, single_word=False, lstrip=False, rstrip=False, special=True)
             for i, word in enumerate(["<|start|>", "<|end|>"])]
    byte_level = dict(type="ByteLevel", add_prefix_space=False, use_regex=True)
    model = dict(type="BPE", vocab=vocab, merges=list(merges), unk_token=None)
    return {"model": model, "added_tokens": added, "pre_tokenizer": byte_level, "normalizer": None,
            "post_processor": None, **changes}

def slow_llama(w, tokens, c):
    """Logits of a row by the textbook, position by position, from tensors by their published names."""
    D, H = c["hidden_size"] // c["num_attention_heads"], c["num_attention_heads"]
    norm = lambda x, g: x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * g

    def turned(x, t):   # (heads, D): pairs (i, i + D/2)
        angle = t * c["rope_theta"] ** (-torch.arange(0, D, 2).double() / D)
        a, b = x[:, :D // 2], x[:, D // 2:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=1)
    x = w["model.embed_tokens.weight"][tokens]
    for i in range(c["num_hidden_layers"]):
        get = lambda name: w[f"model.layers.{i}.{name}.weight"]
        h = norm(x, get("input_layernorm"))
        q, k, v = ((h @ get(f"self_attn.{n}_proj").T).view(len(x), -1, D) for n in "qkv")
        rows = []
        for t in range(len(x)):
            heads = []
            for head in range(H):
                g = head * k.shape[1] // H
                keys = torch.stack([turned(k[s], s)[g] for s in range(t + 1)])
                weights = (keys @ turned(q[t], t)[head] / D ** 0.5).softmax(0)
                heads.append(weights @ v[:t + 1, g])
            rows.append(torch.cat(heads))
        x = x + torch.stack(rows) @ get("self_attn.o_proj").T
        h = norm(x, get("post_attention_layernorm"))
        h = F.silu(h @ get("mlp.gate_proj").T) * (h @ get("mlp.up_proj").T)
        x = x + h @ get("mlp.down_proj").T
    return norm(x, w["model.norm.weight"]) @ w["model.embed_tokens.weight"].T

@pytest.mark.parametrize("dtype, files", [("F32", 1), ("BF16", 1), ("F16", 2)])
def test_published(dtype, files, tmp_path):
    """A published Llama is what the textbook says, also through the engine, and in memory of its own."""
    w = published(tmp_path / "m", dtype, files)
    model = pretrained.load(str(tmp_path / "m"), tmp_path)["model"]
    assert model.wte.weight.dtype == torch.float32 and model.lm_head.weight is model.wte.weight
    model = model.double().eval()
    idx = torch.randint(300, (1, 9), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(idx)[0][0], slow_llama(w, idx[0], LLAMA), rtol=0, atol=1e-9)
    text = generate(model, [idx[0].tolist()], 5, temperature=0)[0].tokens
    assert text == [slow_llama(w, idx[0].tolist() + text[:i], LLAMA)[-1].argmax().item() for i in range(5)]

REFUSED = [(dict(model_type="qwen2"), "model_type=qwen2"), (dict(attention_bias=True), "attention_bias"),
           (dict(mlp_bias=True), "mlp_bias"), (dict(tie_word_embeddings=False), "tie_word_embeddings=False"),
           (dict(rope_scaling={"rope_type": "llama3", "factor": 8}), "rope_type"),
           (dict(rope_scaling={"type": "linear"}), "rope_type"),
           (dict(hidden_act="gelu"), "hidden_act"), (dict(rms_norm_eps=1e-6), "rms_norm_eps=1e-06"),
           (dict(head_dim=8), "head_dim=8"),
           (dict(num_attention_heads=3), "n_embd=16"), (dict(vocab_size=200), "ids up to"),
           (dict(eos_token_id=999), "eos_token_id=999"), (dict(eos_token_id=[]), "eos_token_id=None"),
           (dict(rope_scaling="linear"), "no model"), (dict(rms_norm_eps=None), "no model"),
           (dict(num_hidden_layers="many"), "no model"),
           (dict(quantization_config={"bits": 4}), "quantization_config")]

@pytest.mark.parametrize("changes, words", REFUSED)
def test_published_refused(changes, words, tmp_path, capsys):
    published(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    assert words in refusal(sample.main, [f"--out_dir={tmp_path / 'm'}"], capsys)

def test_published_damaged(tmp_path, capsys):
    """Tensors that are missing, misshapen, of another kind, or not where the header says; and other files."""
    folder, one = tmp_path / "m", torch.ones(4)
    published(folder)
    path = folder / "model.safetensors"
    whole, refused = path.read_bytes(), lambda: refusal(sample.main, [f"--out_dir={folder}"], capsys)
    n = int.from_bytes(whole[:8], "little")

    def rewrite(change):
        header = json.loads(whole[8:8 + n])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + n:])
        return refused()
    norm = "model.norm.weight"
    assert "lacks tensor model.norm.weight" in rewrite(lambda h: h.update(other=h.pop(norm)))
    assert "must be F32, F16 or BF16 [16]" in rewrite(lambda h: h[norm].update(shape=[4, 4]))
    assert "must be F32, F16 or BF16 [16]" in rewrite(lambda h: h[norm].update(dtype="I32"))
    for lie in ([0, 64], [10**9, 10**9 + 64], [-64, 0], [64, 0], "ab", [0]):
        assert "header is wrong" in rewrite(lambda h: h[norm].update(data_offsets=lie))
    assert "header is wrong" in rewrite(lambda h: h[norm].update(shape=[17]))
    assert "header is wrong" in rewrite(lambda h: h.update(x=3))
    path.write_bytes(whole[:-4] + b"\xff" * 4)   # NaN
    assert "numbers that are not finite" in refused()
    path.write_bytes(whole + b"more")
    assert f"has {len(whole) + 4} bytes, but its header promises {len(whole)}" in refused()
    for content in (whole[:-5], whole[:50], b"", b"<html>" * 9, (2**40).to_bytes(8, "little")):
        path.write_bytes(content)
        assert "model.safetensors" in refused()
    tensors = published(folder)
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    path.write_bytes(safetensors({**tensors, "model.layers.0.x.bias": one}))
    assert "holds 1 tensors" in refused() and "x.bias" in refused()
    path.unlink()
    assert "there is no" in refused()
    published(folder, files=2)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../b.safetensors"}}')
    assert "must name files" in refused()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": null}')
    assert "must name files" in refused()
    for name in ("config.json", "tokenizer.json"):
        published(folder)
        (folder / "model.safetensors.index.json").unlink(missing_ok=True)
        for content in (b"[1, 2", b"[" * 10**5, b"\xff", b""):
            (folder / name).write_bytes(content)
            assert name in refused()

@pytest.mark.parametrize("files, faults", [(1, []), (2, ["", "", "404", "cut", "cut", "503", "cut"]),
                                           (1, ["cut", "cut", "unranged cut", "cut", "cut", "piece"])])
def test_published_hub(files, faults, hub, go, tmp_path, capsys):
    """A name is fetched from the hub, through everything that goes wrong there, and only once."""
    w = published(tmp_path / "m", files=files)
    hub.files, hub.faults = {p.name: p.read_bytes() for p in (tmp_path / "m").iterdir()}, list(faults)
    argv = ["--device=cpu", "--out_dir=who/tiny", "--max_new_tokens=3", "--prompt=hello", "--temperature=0"]
    assert sample.main(argv) == 0 and not hub.faults
    seen, out = len(hub.seen), capsys.readouterr().out
    assert all(path.startswith("/who/tiny/resolve/main/") for path, *_ in hub.seen)
    assert sample.main(argv) == 0 and capsys.readouterr().out.split("calls")[0] == out.split("calls")[0]
    assert len(hub.seen) == seen
    text = Tokenizer(json.dumps(bpe()), 1)
    tokens = text.encode("hello")
    best = slow_llama(w, tokens, LLAMA)[-1].argmax().item()
    assert text.decode([best]).decode("utf-8", "replace").strip() in out
    hub.faults = ["html"]
    assert "no file of a checkpoint" in refusal(sample.main, ["--out_dir=who/other"], capsys)
    hub.faults = ["404"]
    assert "config.json does not exist" in refusal(sample.main, ["--out_dir=who/third"], capsys)
    assert "no checkpoint" in refusal(sample.main, ["--out_dir=m/third"], capsys)   # the folder m is here

def test_tokenizer():
    """Merges, digits, special tokens and what the vocabulary lacks, against words that were split by hand."""
    words = lambda text, ids: [text.decode([i]).decode() for i in ids]
    text = Tokenizer(json.dumps(bpe()), 1)
    assert words(text, text.encode("hello wor 12  x")) == [*"hell,o, w,or, ,1,2, , ,x".split(",")]
    assert text.prefix == [] and text.VOCAB_SIZE == 263 and text.decode([1]) == b""
    assert text.encode("a<|start|>b<|end|>") == [*text.encode("a"), 0, *text.encode("b"), 1]
    assert 0 not in text.tokens(b"a<|start|>b")
    every = "".join(map(chr, [*range(300), 0x20ac, 0x1f600])) + "  \n\n x"
    assert text.decode(text.encode(every)) == every.encode()
    assert text.decode(text.encode("\udcff")) == "\ufffd".encode()
    level = dict(type="ByteLevel", add_prefix_space=False, use_regex=True)
    pre = lambda *parts: dict(type="Sequence", pretokenizers=list(parts))
    merges = ("1 2", "\u0120 1", "\u0120 \u0120", "\u0120 x")
    for part, expected in [(dict(type="Digits", individual_digits=True), ["  ", "1", "2", " ", " x"]),
                           (dict(type="Digits", individual_digits=False), ["  ", "12", " ", " x"])]:
        text = Tokenizer(json.dumps(bpe(merges, pre_tokenizer=pre(part, level))), 1)
        assert words(text, text.encode("  12  x")) == expected
    for pattern, expected in [(r"x|[^x]+", ["  ", "12", "  ", "x"]), (r"\d", ["  ", "1", "2", "  ", "x"])]:
        own = dict(type="Split", pattern={"Regex": pattern}, behavior="Isolated", invert=False)
        text = Tokenizer(json.dumps(bpe(merges, pre_tokenizer=pre(own, {**level, "use_regex": False}))), 1)
        assert words(text, text.encode("  12  x")) == expected   # also what the pattern does not match
    assert len(text.encode(" " * 99_999)) == 50_000
    with pytest.raises(ValueError, match="a run of 100000 spaces"):
        text.tokens(b"\n" * 10**6)
    before = dict(type="TemplateProcessing", single=[{"SpecialToken": {"id": "<|start|>"}}, {"Sequence": {}},
                                                     {"SpecialToken": {"id": "<|end|>"}}])
    assert Tokenizer(json.dumps(bpe(post_processor=before)), 1).prefix == [0]
    for unknown, fuse, ids in [(None, False, []), ("<|start|>", False, [0, 0]), ("<|start|>", True, [0])]:
        lacks = bpe(lacking=b"\x04\x06")
        lacks["model"].update(unk_token=unknown, fuse_unk=fuse)
        text = Tokenizer(json.dumps(lacks), 1)
        assert text.encode("a\x04\x06") == text.encode("a") + ids

@pytest.mark.parametrize("changes, words", [
    (dict(model=dict(type="Unigram")), "not BPE"),
    (dict(normalizer={"type": "NFC"}), "normalizer"), (dict(pre_tokenizer=None), "pre_tokenizer"),
    (dict(pre_tokenizer={"type": "Metaspace"}), "Metaspace"),
    (dict(pre_tokenizer=dict(type="ByteLevel", add_prefix_space=False, use_regex=False)), "pre_tokenizer"),
    (dict(pre_tokenizer=dict(type="Sequence", pretokenizers=[
        dict(type="Split", pattern={"Regex": "(?m:.)"}, behavior="Isolated", invert=False),
        dict(type="ByteLevel", add_prefix_space=False, use_regex=False)])), "pre_tokenizer"),
    (dict(model={**bpe()["model"], "dropout": 0.1}), "dropout"),
    (dict(model={**bpe()["model"], "end_of_word_suffix": "</w>"}), "marks in words"),
    (dict(model={**bpe()["model"], "byte_fallback": True, "vocab": {"<0x00>": 3}}), "<0x00>"),
    (dict(model={**bpe()["model"], "ignore_merges": True, "merges": []}), "no merge makes"),
    (dict(post_processor={"type": "BertProcessing"}), "BertProcessing"),
    (dict(added_tokens=[dict(content=word, id=i, lstrip=False, rstrip=False, single_word=False)
                        for i, word in enumerate(("<a>", "<a", "<b>"))]), "others begin with"),
    (dict(pre_tokenizer=dict(type="ByteLevel", add_prefix_space=True)), "pre_tokenizer"),
    (dict(added_tokens=[dict(content="<x>", id=0, lstrip=True, rstrip=False, single_word=False)]),
     "spaces along")])
def test_tokenizer_refused(changes, words):
    with pytest.raises(ValueError, match="tokenizer.json is not supported") as error:
        Tokenizer(json.dumps(bpe(**changes)), 1)
    assert words in str(error.value)

def test_origins():
    """The released code's choice of layers, by its formulas; where the depth does not divide, ours."""
    config = lambda **options: MoRConfig(**{**TINY, **options})
    for sharing, n_layer, n in [("middle_cycle", 8, 3), ("middle_cycle", 30, 2), ("cycle", 8, 2),
                                ("middle_sequence", 14, 4), ("sequence", 12, 3), ("middle_cycle", 9, 1)]:
        c = config(sharing=sharing, n_layer=n_layer, n_rec=n, router="none")
        middle, L = "middle" in sharing, n_layer
        b = (L - 2) // n if middle else L // n
        evenly = np.linspace(1, L - 2, b) if middle else np.linspace(0, L - 1, b)
        expected = {
            "step": [[int(x)] for x in np.round(evenly)],
            "lower": [[middle + i] for i in range(b)], "upper": [[L - middle - b + i] for i in range(b)],
            "average": [[middle + (i + r * b if "cycle" in sharing else i * n + r) for r in range(n)]
                        for i in range(b)]}
        for init, layers in expected.items():
            assert [list(ids) for ids in train.origins(c, L, init)] == layers
    c = config(n_layer=9, n_rec=3)   # 7 layers between the ends, 3 shared
    assert [list(ids) for ids in train.origins(c, 9, "average")] == [[1, 4, 7], [2, 5], [3, 6]]
    assert [list(ids) for ids in train.origins(c, 9, "upper")] == [[5], [6], [7]]

@pytest.mark.parametrize("init", ["step", "average"])
def test_uptraining(init, go, text, tmp_path, capsys):
    """From a published model: the weights that training starts with, text through its tokenizer, a resumed
    run that equals an unbroken one, and what contradicts."""
    w = published(tmp_path / "m")
    options = ["--init_from=m", f"--init={init}", "--n_rec=2", "--block_size=16", "--eval_rows=4",
               "--max_steps=6", "--batch_size=2", "--dtype=float32"]
    bare = [f"--data={text}", "--device=cpu"]
    start = lambda more: train.main([*bare, *options, *more])
    start(["--out_dir=frozen", "--learning_rate=1e-30"])
    model = train.load_checkpoint("frozen")["model"]
    a, b = ([1], [4]) if init == "step" else ([1, 3], [2, 4])
    blocks = [*model.first, *model.shared, *model.last]
    for block, ids in zip(blocks, [[0], a, b, [5]], strict=True):
        up = sum(w[f"model.layers.{i}.mlp.up_proj.weight"] for i in ids) / len(ids)
        v = sum(w[f"model.layers.{i}.self_attn.v_proj.weight"] for i in ids) / len(ids)
        torch.testing.assert_close(block.mlp.gate_up_proj.weight.double()[24:], up, rtol=0, atol=1e-6)
        torch.testing.assert_close(block.attn.kv_proj.weight.double()[8:], v, rtol=0, atol=1e-6)
    assert torch.equal(model.wte.weight.double(), w["model.embed_tokens.weight"]) and len(model.shared) == 2
    assert model.config.rope_theta == 500.0
    start(["--out_dir=whole"])
    start(["--out_dir=half", "--keep_steps=3"])
    shutil.rmtree(tmp_path / "m")   # a checkpoint needs it no more
    assert train.main(["--resume=half/step_3.pt", "--out_dir=more"]) == 0
    assert same(weights("whole/ckpt.pt"), weights("more/ckpt.pt"))
    for extra, words in [("--init=upper", "--init=upper contradicts init="), ("--init_from=x", "contradict")]:
        assert words in refusal(train.main, ["--resume=half/step_3.pt", "--out_dir=b", extra], capsys)
    capsys.readouterr()
    assert sample.main(["--device=cpu", "--out_dir=whole", "--max_new_tokens=20", "--prompt=hello"]) == 0
    assert capsys.readouterr().out.startswith("hello")
    published(tmp_path / "m")
    for extra, words in [("--n_layer=5", "--n_layer=5 contradicts n_layer=6"),
                         ("--model=tiny", "contradicts the sizes of"), ("--out_dir=m", "holds a published"),
                         ("--block_size=65", "64 tokens"), ("--rope_theta=1e4", "rope_theta=500.0")]:
        assert words in refusal(start, ["--out_dir=c", extra], capsys)
    assert "init=upper needs" in refusal(train.main, ["--init=upper", "--out_dir=c"], capsys)
    assert "must be a plain model" in refusal(train.main, ["--init_from=whole", "--out_dir=c"], capsys)
    far = dict(bpe()["added_tokens"][0], content="<|far|>", id=70000)
    published(tmp_path / "big", vocab_size=70001, tokenizer=bpe(added_tokens=bpe()["added_tokens"] + [far]))
    assert "ids up to 65535" in refusal(train.main, ["--init_from=big", "--out_dir=c", *bare], capsys)

def test_uptraining_ours(go, capsys):
    """A plain model of ours is a start, too."""
    go("--n_rec=1", "--max_steps=2", "--out_dir=plain")
    go("--init_from=plain", "--n_rec=3", "--max_steps=1", "--learning_rate=1e-30")
    plain, model = train.load_checkpoint("plain")["model"], train.load_checkpoint("out")["model"]
    assert torch.equal(model.last[0].mlp.down_proj.weight, plain.last[0].mlp.down_proj.weight)
    assert torch.equal(model.shared[0].mlp.down_proj.weight, plain.shared[0].mlp.down_proj.weight)
    argv = ["--init_from=plain", "--data=fineweb_edu", "--out_dir=b", "--device=cpu"]
    assert "the model knows bytes" in refusal(train.main, argv, capsys)

def test_translated(hub, go, monkeypatch, tmp_path):
    """Shards of GPT-2's tokens are decoded and encoded again, one by one, and kept as long as the others."""
    import tiktoken
    ranks = {bytes([i]): i for i in range(256)} | {b"%05d" % i: i for i in range(256, 50256)}
    gpt2 = tiktoken.Encoding("gpt2", pat_str=r"\S+|\s+", mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": 50256})
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": gpt2}.get)
    texts = [["hello é", "two words"], ["hello", ""], ["more", "x" * 99], ["end"]]
    for i, documents in enumerate(texts):
        ids = np.array([t for d in documents for t in (fineweb_edu.EOF, *d.encode())], dtype="<u2")
        name = f"edu_fineweb_train_{i:06}.bin" if i else "edu_fineweb_val_000000.bin"
        hub.files[name] = token_bytes(len(ids))[:HEADER] + ids.tobytes()
    text = Tokenizer(json.dumps(bpe()), 1)
    source = fineweb_edu.source("fineweb_edu", tmp_path, 2, text)
    expected = [[t for d in documents for t in (1, *text.encode(d))] for documents in texts]
    assert read_tokens(source.val).tolist() == expected[0] and source.tokenizer == text.description
    for i in range(3):
        assert source.train(i).tolist() == expected[i + 1]
        next(iter(source.train.ahead.values())).join()
    assert source.train(3) is None
    left = {path.relative_to(source.val.parents[1]).as_posix() for path in tmp_path.rglob("*train*")}
    assert left == {"edu_fineweb_train_000003.bin", f"{text.name}/edu_fineweb_train_000003.bin"}
    asked = len(hub.seen)
    next(tmp_path.glob("*/edu_fineweb_train_000003.bin")).unlink()   # what was encoded is enough
    again = fineweb_edu.source("fineweb_edu", tmp_path, 0, text)
    assert again.val == source.val and again.train(2).tolist() == expected[3]
    assert not [path for path, *_ in hub.seen[asked:] if "000003" in path]
    assert again.name != fineweb_edu.source("fineweb_edu", tmp_path, 0).name
    assert text.VOCAB_SIZE == again.vocab_size

def test_gpt2_text(go, capsys, monkeypatch, hub):
    """A checkpoint says how its ids become text: here by tiktoken, with a vocabulary of bytes and of pairs
    that begin with a space; padded ids are not drawn. Where tiktoken has no vocabulary, a line says so."""
    import tiktoken
    go("--data=fineweb_edu", "--max_steps=1", "--n_rec=2", *SMALLER)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "nothing")
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name)
    capsys.readouterr()
    assert "TIKTOKEN_CACHE_DIR" in refusal(sample.main, ["--device=cpu"], capsys)
    ranks = {bytes([i]): i for i in range(256)} | {b" " + bytes([i]): 256 + i for i in range(256)}
    ranks |= {b"%05d" % i: i for i in range(512, 50256)}
    gpt2 = tiktoken.Encoding("gpt2", pat_str=r" ?\S+|\s+", mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": 50256})
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": gpt2}.get)
    assert fineweb_edu.encode(" a<|endoftext|>") == [256 + ord("a"), *b"<|endoftext|>"]
    assert fineweb_edu.decode([256 + ord("a"), fineweb_edu.EOF, 98]) == b" ab"
    checkpoint = torch.load("out/ckpt.pt", weights_only=True)
    checkpoint["model"]["wte.weight"][50257:] *= 1000   # padding would win nearly every draw
    torch.save(checkpoint, "out/ckpt.pt")
    for prompt in ("once upon a <|endoftext|>", "\udcff"):
        options = ["--device=cpu", f"--prompt={prompt}", "--max_new_tokens=40", "--temperature=5"]
        assert sample.main(options) == 0
        assert " of 2 over " in capsys.readouterr().out

# ---- bench.py ----------------------------------------------------------------------------------------------

def measured(capsys, argv):
    """The rows of the tables that bench.py prints."""
    bench.main([*argv, "--device=cpu"])
    out = capsys.readouterr().out.splitlines()
    rows = [json.loads(line) for line in out if line.startswith("{")]
    assert len(rows) == sum(line.startswith("| ") - 2 * line.startswith("| -") for line in out)
    return rows

@pytest.fixture
def small(tmp_path, monkeypatch):
    """A smaller size called tiny, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(PRESETS, "tiny", dict(PRESETS["tiny"], n_embd=48, n_ff=64, block_size=32))

def test_bench_cost(monkeypatch, capsys):
    """The paper's parameters, tokens (rounded up in its Table 3), ratios; and what caches hold, counted."""
    for options in (dict(n_rec=1), dict(), dict(cache="shared"), dict(n_rec=4, router="token")):
        config = MoRConfig(**{**PRESETS["tiny"], **options})
        share, kept, read = bench.count_kv(config)
        assert kept == pytest.approx(kv_bytes_per_token(config, sum(share)), rel=1e-6)
        # With a shared cache a query reads an entry for each token so far: only on average (T + 1) / 2.
        off = 0.1 if config.cache == "shared" else 1e-6
        assert read == pytest.approx(kv_reads_per_token(config, bench.COUNTED, share), rel=off)
        assert config.n_rec == 1 or 1 < sum(share) < config.n_rec
    monkeypatch.setattr(bench, "count_kv", lambda c: ([1.0], 0.0, 0.0))
    rows = measured(capsys, ["cost"])
    known = [row for row in rows if row.get("paper")]
    assert len(known) == len(bench.TABLE_3)
    for row in known:
        ours = float(row["parameters"][:-1]), float(row["tokens for 16.5e18"][:-1])
        paper = [float(number[:-1]) for number in row["paper"].split(", ")]
        assert abs(ours[0] - paper[0]) < 0.5 and 0 <= paper[1] - ours[1] < 1
    ratios = {(row["recursions"], row["cache"]): row for row in rows[16:]}
    for n in (2, 3, 4):   # paper, Table 2
        assert ratios[n, "recursion"]["KV memory"] == pytest.approx((n + 1) / (2 * n))
        assert ratios[n, "recursion"]["KV read"] == pytest.approx((n + 1) / (2 * n))
        assert ratios[n, "shared"]["KV memory"] == pytest.approx(1 / n)
        assert ratios[n, "shared"]["KV read"] == 1
    assert ratios[3, "recursion"]["KV memory, model"] == pytest.approx(22 / 32)
    assert ratios[3, "recursion"]["attention FLOPs"] == pytest.approx((1 + 4 / 9 + 1 / 9) / 3)

def test_bench_train(small, capsys):
    """Every variant is measured beside a plain Transformer of its depth."""
    rows = measured(capsys, ["train", "--rounds=2", "--steps=1", "--batch_size=2"])
    plain = flops_per_token(MoRConfig(**PRESETS["tiny"], n_rec=1), 32)
    assert [r["model"] for r in rows[:3]] == ["plain, 8 layers", "plain, 10 layers", "MoR-2, expert"]
    assert len(rows) == 8 and rows[0]["time / plain"] == "1.00 [1.00 1.00]"
    share = [1.0, 21 / 32, 10 / 32]   # of 32 tokens, those that expert-choice keeps
    ratio = flops_per_token(MoRConfig(**PRESETS["tiny"], n_rec=3), 32, share=share) / plain
    assert rows[3]["FLOPs / plain"] == pytest.approx(ratio, rel=1e-6)
    all_deep, asked = MoRConfig(**PRESETS["tiny"], n_rec=3, router="none"), 1 + 1 + 1
    assert flops_per_token(replace(all_deep, router="expert"), 32, share=[1.0] * 3) == pytest.approx(
        flops_per_token(all_deep, 32) + asked * 2 * 48)
    Path("x.bin").touch()
    for argv, words in [
            (["trian"], "trian cannot be measured: choose cost"), (["train", "--rounds=0"], "rounds=0"),
            (["gpu", "--device=cpu"], "needs an NVIDIA GPU"), (["look"], "there is no checkpoint out"),
            (["generate", "--quick=1"], "a row of 512 tokens does not fit"),
            (["train", "--batch_size=1e30"], "out of memory"), (["quality", "--out_dir=x.bin"], "exists")]:
        assert words in refusal(bench.main, argv, capsys)

def test_bench_generate(small, monkeypatch, capsys):
    """As many slots, then as much memory; what is timed is held to the forward without a cache."""
    monkeypatch.setattr(bench, "GROWTH", [(8, 2), (16, 3)])
    options = ["generate", "--rounds=1", "--passes=12", "--slots=4"]
    rows = measured(capsys, options)
    plain = {row["model"]: row for row in rows[1::-1]}
    assert [row["slots"] for row in rows[-2:]] == [2, 3]
    for row in rows[:-2]:
        layers, mine = 10 if row["model"] == "MoR-4, expert" else 8, row["KV MB"]
        memory = plain[f"plain, {layers} layers"]["KV MB"]
        assert row["same as uncached"] > 0.97 and row["layers / plain"] <= 1
        if row["slots"] > 4 and "MoR" in row["model"]:   # as much memory: not one slot more would fit
            assert memory - mine / row["slots"] < mine <= memory
    assert any(row["model"] == "MoR-3, expert, shared cache" and row["slots"] == 8 for row in rows)   # of 4
    assert rows[0]["speed / plain, 4 slots"] == rows[0]["/ plain, as many"] == "1.00 [1.00 1.00]"

def test_bench_checked(monkeypatch):
    """An engine that draws, or takes, wrong tokens is noticed, and one that is only deeper than it should be:
    here layers add nothing, so that depth shows in no token."""
    model, right = build().float(), mor.pick
    assert bench.checked(Engine(model, 3)) == 1
    for wrong in (True, False):
        monkeypatch.setattr(mor, "pick", lambda logits, u, temperature, top_k: (
            right(logits, u, temperature, top_k) + (wrong == bool(temperature))) % 96)
        with pytest.raises(ValueError, match="would write only"):
            bench.checked(Engine(model, 3))
    monkeypatch.setattr(mor, "pick", right)
    with torch.no_grad():
        for block in [*model.first, *model.shared, *model.last]:
            block.attn.o_proj.weight.zero_(), block.mlp.down_proj.weight.zero_()
    assert bench.checked(Engine(model, 3)) == 1
    with pytest.raises(ValueError, match="would write only"):
        bench.checked(Engine(model, 3, max_depth=1))

def test_bench_gpu(tmp_path, monkeypatch, capfd):
    """Its parts, at toy sizes on a CPU."""
    monkeypatch.chdir(tmp_path)
    toy = dict(model="tiny", device="cpu", rounds=1, passes=8, slots=4, batch_size=2, n_layer=5, n_embd=48,
               n_ff=64, block_size=32)
    argv = [f"--{name}={value}" for name, value in toy.items()]
    measure = lambda part: measured(capfd, [part, *argv])
    kernels = [row for row in measure("gpu_kernels") if row["kernel"] == "flash"]
    assert [row["tokens"] for row in kernels] == [32, 32, 21, 21, 10, 10]
    assert [row["queries to 32 keys"] for row in measure("gpu_shapes")[2:]] == [21, 10]
    mor3, plain = measure("gpu_train")
    assert (mor3["model"], plain["model"]) == ("MoR-3, expert", "plain")
    assert 0.6 < plain["FLOPs"] < mor3["FLOPs"] == 1
    assert [row["model"] for row in measure("gpu_token")] == ["MoR-3, token"]
    monkeypatch.setattr(torch, "compile", lambda call, **options: call)
    rows = measure("gpu_decode")
    assert [(row["how"], row["context"], row["slots"]) for row in rows[::2]] == [
        ("graphs", 32, 4), ("graphs", 16, 4), ("graphs", 16, 5), ("eager", 32, 4), ("eager", 16, 4),
        ("compiled", 32, 4)]
    assert [row["step"] for row in measure("gpu_precision")] == [1, 10, 20]
    attended = bench.attended
    monkeypatch.setattr(bench, "attended", lambda kernel, *args: [
        y * (math.nan if kernel == bench.KERNELS["flash"] and i == 2 else 1)   # dk alone is not finite
        for i, y in enumerate(attended(kernel, *args))])
    assert "not what it should be: flash" in refusal(bench.main, ["gpu_kernels", *argv], capfd)

def test_bench_in_turn(monkeypatch, capsys):
    """A part that fails, or takes too long, does not take the others along; all have the same options."""
    given = bench.BenchConfig(device="cpu", rounds=2, data_dir="a b")

    def run(command, timeout):
        assert command[:2] == [sys.executable, bench.__file__]
        assert bench.BenchConfig(**train.parse(command[3:], "", bench.BenchConfig)) == given
        if command[2] == "cost":
            raise subprocess.TimeoutExpired(command, timeout)
        return SimpleNamespace(returncode=2 if command[2] == "look" else 0)
    monkeypatch.setattr(bench.subprocess, "run", run)
    assert bench.in_turn(given, {"look": (None, 60), "cost": (None, 9), "train": (None, 60)}) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "not as expected, or not finished: look (exit code 2), cost (stopped after 9 s)"
    assert bench.in_turn(given, {"train": (None, 60)}) == 0

def test_bench_quality(small, text, monkeypatch, capsys):
    """Trains what the table says, with equal tokens or FLOPs."""
    trainings = bench.study(bench.BenchConfig(max_steps=400))
    assert len(trainings) == 18
    for name, options in trainings.items():
        given = train.parse(options.split(), "", MoRConfig, train.TrainConfig)
        config, tc = train.settle(given, None)
        cost = flops_per_token(config, 32, paper=True) * tc.max_steps
        target = flops_per_token(MoRConfig(**PRESETS["tiny"], n_rec=1), 32, paper=True) * 400
        assert abs(cost / target - 1) < 0.003 if "equal FLOPs" in name else tc.max_steps == 400
        if "few" in name:
            assert n_params(config) == n_params(MoRConfig(**PRESETS["tiny"], n_rec=3, router="none"))
    few = {name: trainings[name].replace("400", "2") for name in (
        "plain", "recursive, middle_cycle", "MoR, expert", "MoR, expert, shared cache", "MoR, token")}
    commands = []

    def run(command, **options):
        """As subprocess.Popen, in this process, where threads cannot have signals."""
        commands.append(command[2:])
        return SimpleNamespace(returncode=train.main(command[2:]), communicate=lambda: ("", ""))
    monkeypatch.setattr(train, "find_source",
                        lambda tc, tokenizer=None: python_source.source(str(text), tc.data_dir))
    monkeypatch.setattr(train.signal, "signal", lambda *args: None)
    monkeypatch.setattr(bench, "study", lambda config: few)
    monkeypatch.setattr(bench.subprocess, "Popen", run)
    argv = ["quality", "--seeds=1", "--eval_rows=8", "--rounds=1", "--passes=8", "--slots=2"]
    rows = measured(capsys, argv)
    assert len(commands) == 5 and all("--seed=1337" in command for command in commands)
    for row, (name, command) in zip(rows, zip(few, commands)):
        log = Path(command[-1].removeprefix("--out_dir="), "log.jsonl").read_text().splitlines()
        assert row["model"] == name
        assert row["causal loss"].startswith(f"{json.loads(log[-1])['val_causal']:.3f}")
    assert [row["threshold"] for row in rows[9:14]] == [0.1, 0.3, 0.5, 0.7, 0.9]
    assert float(rows[9]["mean depth"]) >= float(rows[13]["mean depth"])

def test_bench_trained(tmp_path, monkeypatch):
    """A training is started, gone on with, or only read, as its folder says; and its failure is told."""
    out, commands = tmp_path / "plain", []
    out.mkdir()
    begun = json.dumps(dict(argv=["--x=1", f"--out_dir={out}"], max_steps=9)) + "\n"
    outcomes = [(130, begun), (0, begun + json.dumps(dict(step=5, val_causal=3.0))),
                (0, begun + json.dumps(dict(step=9, val_causal=2.0)))]

    def run(command, **options):
        commands.append(command[2:])
        code, log = outcomes[len(commands) - 1]
        (out / "log.jsonl").write_text(log)
        return SimpleNamespace(returncode=code, communicate=lambda: ("", "x.py: no\n"),
                               terminate=stopped.clear)
    monkeypatch.setattr(bench.subprocess, "Popen", run)
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(ValueError, match="--x=1 --out_dir=.* ended with: x.py: no"):
        bench.trained(["--x=1"], out, "1", [], stopped)
    assert not stopped.is_set()   # it was told to end
    (out / "ckpt.pt").touch()
    steps = [bench.trained(["--x=1"], out, "1", [], stopped)[1]["step"] for _ in range(3)]
    assert steps == [5, 9, 9]   # 5: not yet
    start = ["--x=1", f"--out_dir={out}"]
    assert commands == [start, [*start, f"--resume={out}"], [*start, f"--resume={out}"]]
    with pytest.raises(ValueError, match="holds another run"):
        bench.trained(["--x=2"], out, "1", [], stopped)

def test_bench_look():
    """Kinds of bytes, and the norms and cosines of unrolled layers."""
    text = b"a1 = f(bc)\n  x"
    depth = list(range(1, len(text) + 1))
    rows = {row["byte"]: (row["bytes"], row["mean depth"]) for row in bench.by_kind([list(text)], [depth], 3)}
    assert rows == {
        "first of a word": (4, (1 + 6 + 8 + 14) / 4), "digit": (1, 2), "space": (2, 4), "other": (1, 4),
        "opening bracket": (1, 7), "later in a word": (1, 9), "closing bracket": (1, 10), "new line": (1, 11),
        "indentation": (2, 12.5)}
    for cache in ("recursion", "shared"):
        model = build(n_rec=3, cache=cache)
        x = ids(2, 32)
        rows = bench.unrolled(model, x)
        assert [row["layer"] for row in rows] == ["first", "1.1", "1.2", "2.1", "2.2", "3.1", "3.2", "last"]
        _, _, routing = model(x, causal=True)
        assert [row["tokens"] for row in rows[1:7:2]] == [(routing.depth > r).sum().item() for r in range(3)]
        assert all(row["hidden, cosines"][-2] == "9" for row in rows)   # each with itself
        assert (rows[3]["key"] == "") == ("." in rows[3]["key, cosines"]) == (cache == "shared")
        assert train.evaluate(model, [(x, x)], "float32")["load"] and not model.training   # as it was
        first = model.first[0]
        h = model.wte(x.flatten())
        _, v = first.attn.kv_proj(first.attn_norm(h)).chunk(2, dim=1)
        assert rows[0]["value"] == pytest.approx(v.norm(dim=1).mean().item())
        with torch.no_grad():   # blocks that add nothing: a token's direction stays, if it is that token's
            for block in model.shared:
                block.attn.o_proj.weight.zero_()
                block.mlp.down_proj.weight.zero_()
        assert all(set(row["hidden, cosines"]) == {"`", "9"} for row in bench.unrolled(model, x)[1:7])

# ---- Where it is used: busy machines, closed terminals, real folders, full disks, proxies ------------------

linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks /proc or /dev/full")

def script(*argv, shell="exec {}", env={}, **options):
    """A script of the project, started as from a terminal; {} in shell stands for it and its options."""
    command = shell.format(shlex.join([sys.executable, str(ROOT / argv[0]), *argv[1:]]))
    return subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env={**os.environ, "OMP_NUM_THREADS": "1", **env}, errors="replace", **options)

def test_before_torch(tmp_path):
    """Before torch is imported, its threads are told to spin shortly, if the user has not said otherwise;
    Ctrl-C then leaves without a traceback; a file cannot take the place of a stream that was closed."""
    (tmp_path / "torch.py").write_text(
        "import os, signal\nprint([os.environ.get(name) for name in ('GOMP_SPINCOUNT', 'KMP_BLOCKTIME')], "
        "open('x', 'w').fileno(), flush=True)\nos.kill(os.getpid(), signal.SIGINT)\n")
    unset = {"PYTHONPATH": str(tmp_path), "GOMP_SPINCOUNT": "", "KMP_BLOCKTIME": ""}
    runs = [(name, {}, "['1000', '1']") for name in ("train.py", "sample.py", "bench.py")]
    runs += [("train.py", {"GOMP_SPINCOUNT": "5"}, "['5', '1']"),
             ("train.py", {"OMP_WAIT_POLICY": "PASSIVE"}, "[None, None]")]
    shell = "for n in GOMP_SPINCOUNT KMP_BLOCKTIME; do [ \"${{!n}}\" ] || unset $n; done; exec {} <&-"
    for run, words in [(script(name, shell=shell, env={**unset, **env}, cwd=tmp_path), words)
                       for name, env, words in runs]:
        out, err = run.communicate()
        assert out == f"{words} 3\n" and err == "" and run.returncode == -signal.SIGINT

def test_two_runs(go, capsys, monkeypatch):
    """The folder of a run that is at work is refused to another; left-over files of a killed one go."""
    Path("out").mkdir()
    for left in ("out/ckpt.pt.9.tmp", "out/step_5.pt.9.tmp", "out/mine.tmp"):
        Path(left).write_text("half")
    with open("out/log.jsonl", "a") as log:
        assert lock(log)
        assert "another run is at work in out" in refusal(lambda argv: go(*argv), ["--max_steps=1"], capsys)
    assert go("--max_steps=1") == 0 and [str(p) for p in Path().rglob("*.tmp")] == ["out/mine.tmp"]
    source = python_source.source(__file__, "data")
    source.val.unlink()
    with open(source.val.with_name("lock"), "a") as file:   # who waits says so, and finds what was built
        assert lock(file)
        pauses = []

        def pause(seconds):
            pauses.append(seconds)
            time.sleep(0.01)
            if len(pauses) == 60:
                write_tokens(source.val, [])
                file.close()
        monkeypatch.setattr(system, "time", SimpleNamespace(sleep=pause))
        capsys.readouterr()
        python_source.source(__file__, "data")
    out, err = capsys.readouterr()
    assert out == "" and err == f"waiting for {file.name}, which another process holds\n"

@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "nohup"])
def test_signals(name, go, monkeypatch, capfd):
    """The step is finished and saved, though a closing terminal sends SIGHUP twice; nohup goes on."""
    step, signum = train.Run.train_step, getattr(signal, name, signal.SIGHUP)

    def asked(run):
        numbers = step(run)
        for _ in range(1 + (signum == signal.SIGHUP)):
            os.kill(os.getpid(), signum) if run.step == 3 else None
        return numbers
    monkeypatch.setattr(train.Run, "train_step", asked)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if name == "nohup" else signal.SIG_DFL)
    try:
        assert go("--max_steps=6") == (0 if name == "nohup" else 130)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert torch.load("out/ckpt.pt", weights_only=True)["step"] == (6 if name == "nohup" else 3)

def test_streams(go, text):
    """Without a stream, the log stays JSON, and SIGTERM saves. If who reads has left, train.py saves and
    sample.py writes its page, and both leave without a word."""
    go("--max_steps=1")
    argv = ["train.py", f"--data={text}", *SMALL, "--log_interval=1", "--max_steps=1e6"]
    closed = script(*argv, "--out_dir=closed", shell="exec {} <&- >&- 2>&-")
    head = "; exit ${{PIPESTATUS[0]}}"
    pipe = script(*argv, "--out_dir=pipe", shell="{} | head -8" + head)
    page = script("sample.py", "--html=a.html", shell="{} | head -c 5" + head)
    while not Path("closed/log.jsonl").exists() or Path("closed/log.jsonl").read_text().count("\n") < 4:
        assert closed.poll() is None
        time.sleep(0.01)
    closed.terminate()
    (out, err), written = pipe.communicate(), page.communicate()
    assert (out.count("\n"), err, pipe.returncode) == (8, "", 141) and "step 1/" in out
    assert written[0] and (written[1], page.returncode) == ("", 141)
    assert "</html>" in Path("a.html").read_text()
    assert closed.wait() == 130
    for name in ("pipe", "closed"):
        last = [json.loads(line) for line in open(f"{name}/log.jsonl")][-1]
        assert torch.load(f"{name}/ckpt.pt", weights_only=True)["step"] == last["step"]

def test_split_by_bytes(tmp_path):
    """Validation has 5 % of the bytes, or nearly, whatever the sizes of the files."""
    for last in (8, 50, 100_000):
        sizes = [(tmp_path / str(i), 1000) for i in range(19)] + [(tmp_path / "19", last)]
        n, val = (sum(end - start for _, start, end in pieces) for pieces in python_source.split(sizes))
        assert n + val == 19_000 + last and 0.025 <= val / (n + val) <= 0.1

def test_folder(tmp_path, capsys, monkeypatch):
    """UTF-16 and UTF-32 are read by their marks; what is left out is named; the run's own log is not read;
    nothing is read twice under two names."""
    monkeypatch.chdir(tmp_path)
    words = "déjà vu \N{SNOWMAN}\r\n" * 9
    for i, coding in enumerate(("utf-8", "utf-16", "utf-16-be", "utf-32", "utf-16-le")):
        mark = {"utf-16-be": b"\xfe\xff", "utf-16-le": b"\xff\xfe"}.get(coding, b"")
        Path(f"{i}.txt").write_bytes(mark + words.encode(coding))
    Path("image.png").write_bytes(b"\x89PNG\0"), Path(".secret").write_text("no"), Path("d").mkdir()
    Path("no_mark.txt").write_bytes(words.encode("utf-16-le")), Path("log.jsonl").write_text("{}")
    Path("to_d").symlink_to("d")
    source = python_source.source(".", "data")
    out = capsys.readouterr().out
    assert "from 5 files" in out and out.count("\n") == 1 and all(name in out for name in (
        "'.secret' (hidden)", "'image.png' (zero bytes", "'no_mark.txt' (", "'log.jsonl' (written",
        "'to_d' (a link"))
    n = len(words.encode()) * 95 // 100
    assert source.train(0).tolist() == 5 * [*words.encode()[:n], 256]
    again = python_source.source("1.txt", "data")
    assert python_source.decode(again.train(0).tolist()) == words.encode()[:n]
    assert capsys.readouterr().err == ""
    python_source.source("no_mark.txt", "data")
    assert "note: no_mark.txt has zero bytes" in capsys.readouterr().err
    Path("bad.txt").write_bytes(b"\xff\xfe\x00\xd8a\x00")   # half of a pair
    assert "�a".encode() == b"".join(python_source.read(Path("bad.txt")))

def test_changed_text(tmp_path, capsys, monkeypatch):
    """Tokens follow the content: other text of the same size and time is read anew, a mere touch builds
    nothing, and of one text there is one build, though a run that reads an old one keeps it."""
    path, data = tmp_path / "a.txt", tmp_path / "data"
    path.write_text("abcd" * 50)
    old = python_source.source(str(path), data)
    stat = path.stat()
    path.write_text("efgh" * 50)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (old.val.parent / "train-old.bin.tmp").write_text("half")   # of a process that was killed
    new = python_source.source(str(path), data)
    assert bytes(new.train(0)[:4].tolist()) == b"efgh" and new.name != old.name
    os.utime(path)
    assert python_source.source(str(path), data).val == new.val
    (tmp_path / "b").mkdir(), (tmp_path / "b" / "a.txt").write_text("other" * 50)   # of the same name
    python_source.source(str(tmp_path / "b" / "a.txt"), data)
    assert capsys.readouterr().out.count("built") == 3 and len(list(data.rglob("*.bin*"))) == 4
    write = python_source.write_tokens

    def slowly(path, chunks):   # and meanwhile somebody saves another version
        (tmp_path / "a.txt").write_text("ijkl" * 50)
        return write(path, chunks)
    monkeypatch.setattr(python_source, "write_tokens", slowly)
    path.write_text("mnop" * 50)
    with pytest.raises(ValueError, match="was changed while it was read"):
        python_source.source(str(path), data)
    assert len(list(data.rglob("*.bin*"))) == 4
    reader = Reader(old.train, 1, 9, seed=0)
    assert all(set(next(reader)[0].flatten().tolist()) <= set(b"abcd") for _ in range(50))   # into epoch 2

@pytest.mark.parametrize("error", [
    TritonMissing(None), GPUTooOldForTriton(SimpleNamespace(name="GTX 1080", major=6, minor=1), None),
    InductorError(RuntimeError("Compiler: cl is not found."), None)], ids=repr)
def test_no_compiler(error, capsys):
    """What torch.compile lacks is one line that says what to do, whatever its words are; other errors, of
    ours, keep their traceback."""
    def main(argv):
        raise error
    assert "use --compile=false" in refusal(main, [], capsys)
    error = RuntimeError("ours")
    with pytest.raises(RuntimeError, match="ours"):
        train.guarded(main)

def test_null_in_log(tmp_path):
    """log.jsonl is JSON even where a number is none, and where the disk is full; so is the log of a collapse.
    """
    with open(tmp_path / "log", "ab", buffering=0) as log:
        train.write_record(log, {"a": math.nan, "b": [1.0, math.inf], "c": -math.inf})
    assert (tmp_path / "log").read_text() == '{"a": null, "b": [1.0, null], "c": null}\n'
    model = build(router="token", balance="loss_free")
    with torch.no_grad():
        model.router.score.layers[0].weight.mul_(1e30)
    health = model(ids(2, 8))[2].health
    assert 0 <= health["entropy"] < 2

@linux
def test_disk_full_elsewhere(go, capsys, monkeypatch):
    """Page, checkpoint and log: one line names the file, and the old one is whole."""
    go("--max_steps=2")
    Path("page.html").write_text("old"), Path("page.html").chmod(0o600)
    Path("l.html").symlink_to("page.html")
    limits, before = resource.getrlimit(resource.RLIMIT_FSIZE), weights("out/ckpt.pt")
    start = Path("out/log.jsonl").stat().st_size
    for main, argv, limit, name in [
            (sample.main, ["--device=cpu", "--html=page.html"], 2000, "page.html"),
            (lambda argv: go(*argv), ["--resume=out", "--max_steps=4"], 20_000, "out/ckpt.pt"),
            (lambda argv: go(*argv), ["--resume=out", "--max_steps=4"], start + 9000, "out/log.jsonl"),
            (lambda argv: go(*argv), ["--out_dir=b", "--max_steps=4"], 900, "b/log.jsonl")]:
        if name == "out/log.jsonl":   # in the middle of a line
            Path(name).write_text(Path(name).read_text().ljust(start + 8999, " ") + "\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            err = refusal(main, argv, capsys)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert f"{name} cannot be written (" in err and ("File too large" in err or "no room" in err)
        assert not list(Path().rglob("*.tmp"))
    assert Path("b/log.jsonl").read_text() == "" and Path("out/log.jsonl").read_text().endswith(" \n")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", open("/dev/full", "w"))
        muted = []
        patch.setattr(train, "mute", muted.append)
        err = refusal(lambda argv: go(*argv), ["--out_dir=c", "--max_steps=9", "--log_interval=3"], capsys)
    assert "standard output cannot be written (No space left" in err and muted == ["stdout"]
    assert torch.load("c/ckpt.pt", weights_only=True)["step"] == 2
    assert Path("page.html").read_text() == "old" and same(before, weights("out/ckpt.pt"))
    inode = Path("page.html").stat().st_ino
    sample.main(["--device=cpu", "--html=l.html", "--max_new_tokens=5"])   # through a link, with its mode
    assert Path("page.html").stat().st_ino != inode   # another file, which was complete
    assert Path("l.html").is_symlink() and Path("page.html").read_text().endswith("</html>\n")
    assert Path("page.html").stat().st_mode & 0o777 == 0o600
    assert not Path("b/ckpt.pt").exists()
    write = train.write_record
    with monkeypatch.context() as patch:   # a log that is full after three lines, where a checkpoint fits
        patch.setattr(train, "write_record", lambda log, record: write(
            log if record.get("step", 0) < 3 else open("/dev/full", "ab", buffering=0), record))
        err = refusal(lambda argv: go(*argv), ["--out_dir=d", "--max_steps=9", "--log_interval=1"], capsys)
    assert "/dev/full cannot be written (No space left" in err
    assert torch.load("d/ckpt.pt", weights_only=True)["step"] == 4

def test_home(monkeypatch):
    """~ is a home in every option that names a file or folder, and in no other."""
    monkeypatch.setenv("HOME", "/home/me")
    names = {cls: [f.name for f in fields(cls) if f.type is train.path]
             for cls in (train.TrainConfig, sample.SampleConfig, bench.BenchConfig)}
    assert list(names.values()) == [["data", "data_dir", "out_dir", "init_from", "resume"],
                                    ["out_dir", "data_dir", "html", "svg"], ["out_dir", "data_dir"]]
    for cls, options in names.items():
        given = train.parse([f"--{name}=~/x.{name}" for name in options], "", cls)
        assert given == {name: f"/home/me/x.{name}" for name in options}
    assert train.parse(["--prompt=~/x"], "", sample.SampleConfig) == dict(prompt="~/x")

def test_token_wins(hub, tmp_path, monkeypatch):
    """HF_TOKEN goes before a login in netrc, also when redirected, and to no other host."""
    (tmp_path / "netrc").write_text("default login me password pw\n")
    asked = []
    for token in ("secret", ""):
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        monkeypatch.setenv("HF_TOKEN", token)
        for fault in ("redirect", "away"):
            hub.faults = [fault]
            fineweb_edu.Fetch(f"{hub.url}/edu_fineweb_val_000000.bin", tmp_path / (token + fault)).wait()
            asked += [[seen[2] and seen[2][:9] for seen in hub.seen]]
            hub.seen.clear()
    assert asked[:2] == [["Bearer se", "Bearer se"], ["Bearer se", None]]
    assert asked[2][0] == asked[3][0] == "Basic bWU"

@pytest.mark.parametrize("settings, words", [
    (dict(REQUESTS_CA_BUNDLE="none.pem", HF_ENDPOINT="https://me:pw@127.0.0.1:9"), ["CA_BUNDLE", "none.pem"]),
    (dict(HTTP_PROXY="http://me:pw@127.0.0.1:9"), ["proxy http://127.0.0.1:9", "Connection refused"]),
    (dict(HTTP_PROXY="http://me:pw@:9"), ["proxy http://:9", "no valid address"]),
    (dict(HTTP_PROXY="http://me:/pw b@127.0.0.1:9"), ["proxy http://127.0.0.1:9"]),
    (dict(HTTP_PROXY="hub"), ["proxy http://127.0.0.1", "status 407"]),
    (dict(HF_ENDPOINT="http://me:pw@["), ["HF_ENDPOINT=http://[ must be"]),
    (dict(HF_ENDPOINT="https"), ["certificate or TLS", "REQUESTS_CA_BUNDLE"])], ids=str)
def test_network_settings(settings, words, hub, tmp_path, monkeypatch):
    """A wrong setting is named, without the password in it, and not tried again."""
    if settings.get("HF_ENDPOINT") == "https":
        settings = dict(HF_ENDPOINT=hub.url.replace("http:", "https:"))
    if settings.get("HTTP_PROXY") == "hub":
        settings, hub.faults = dict(HTTP_PROXY=hub.url.replace("//", "//me:pw@")), ["407"]
    if "HTTP_PROXY" in settings:
        settings |= dict(http_proxy=settings["HTTP_PROXY"], NO_PROXY="", no_proxy="")
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="cannot be had|must be") as error:
        fineweb_edu.source("fineweb_edu", tmp_path, 0)
    assert all(word in str(error.value) for word in words) and "pw" not in str(error.value) and not hub.slept

def test_slow_server(hub, tmp_path, capsys, monkeypatch):
    """Where there is no terminal, a line now and then says what has come, and there is no bar."""
    monkeypatch.setattr(fineweb_edu, "EVERY", 0.2)
    hub.faults = ["stall"]
    threading.Timer(0.7, hub.stalled.set).start()
    fineweb_edu.Fetch(f"{hub.url}/edu_fineweb_val_000000.bin", tmp_path / "a.bin").wait()
    assert set(capsys.readouterr().err.splitlines()) == {"a.bin: 0 of ? bytes"}

@linux
def test_mapped_shard(hub, tmp_path, monkeypatch):
    """A shard is deleted where a mapped file cannot be, as on Windows."""
    unlink = Path.unlink

    def windows(path, missing_ok=False):
        if str(path) in Path("/proc/self/maps").read_text():
            raise PermissionError(13, "in use", str(path))
        unlink(path, missing_ok)
    monkeypatch.setattr(Path, "unlink", windows)
    reader = Reader(fineweb_edu.source("fineweb_edu", tmp_path, 2).train, 8, 40, seed=0)
    next(reader), next(reader)
    assert reader.state["shard"] == 1 and not list(tmp_path.rglob("*_train_000001.bin"))

def test_characters(capsys, monkeypatch):
    """Only what steers a terminal is replaced; the end of a line may be Windows's; digits stand below their
    characters."""
    spelled = lambda text: "".join(piece for piece, *_ in sample.spelled(list(text.encode()), [], bytes))
    kept = "a\N{NO-BREAK SPACE}\N{IDEOGRAPHIC SPACE}\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}é\ue000"
    assert spelled(kept) == kept and spelled("a\r\nb\rc\n") == "a\nb\nc\n"
    for char in "\0\x1b\x7f\x9b\u202e\u2067\uffff":
        assert spelled(f"a{char}b") == "a�b"
    printer = sample.Printer("never")
    for char, depth in zip("a\N{HIRAGANA LETTER A}e\N{COMBINING ACUTE ACCENT}b\n", (1, 2, 3, 3, 1, 1)):
        printer(char, depth)
    assert capsys.readouterr().out == "a\N{HIRAGANA LETTER A}e\N{COMBINING ACUTE ACCENT}b\n12 311\n"
    samples = [[(t, 2, []) for t in ("\N{HIRAGANA LETTER A}" * 60 + "e\N{COMBINING ACUTE ACCENT}").encode()]]
    svg = ElementTree.fromstring(sample.picture(MoRConfig(**TINY), [], samples, bytes))
    lengths = [int(e.get("textLength")) for e in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert lengths[:2] == [48 * 16, 12 * 16 + 8]
    for env, terminal, colour in [({}, True, True), ({}, False, False), ({"NO_COLOR": ""}, True, True),
                                  ({"NO_COLOR": "1"}, True, False), ({"TERM": "dumb"}, True, False)]:
        with monkeypatch.context() as patch:
            patch.delenv("NO_COLOR", raising=False), patch.setenv("TERM", "xterm")
            [patch.setenv(*item) for item in env.items()]
            patch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
            assert sample.Printer("auto").color == colour

def test_no_asserts():
    """python -O leaves asserts out: none of them checks an input."""
    for path in [*ROOT.glob("*.py"), *ROOT.glob("data/*.py")]:
        nodes = ast.walk(ast.parse(path.read_text()))
        assert path.name == "test_mor.py" or not any(isinstance(node, ast.Assert) for node in nodes), path

def test_copies_to_devices(monkeypatch):
    """Copies that nobody waits for are for CUDA: elsewhere the source may be gone before they begin."""
    to, flags = torch.Tensor.to, []
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **options: (
        flags.append(options.get("non_blocking")), to(self, *args, **options))[1])
    generate(build(), [[1, 2], [3]], 3, seed=0)
    assert flags and not any(flags)

def test_bench_stopped(tmp_path):
    """SIGTERM to `bench.py quality` stops its trainings, which save."""
    logs = lambda: [path for path in tmp_path.glob("o/*/log.jsonl") if path.read_text().count("\n") > 1]

    def stop():
        deadline = time.monotonic() + 60
        while not logs() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=stop, daemon=True).start()
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt):
            bench.main(["quality", "--seeds=1", "--n_embd=32", "--n_head=2", "--n_kv_head=1", "--n_ff=48",
                        "--block_size=32", "--device=cpu", f"--data_dir={tmp_path}/d",
                        f"--out_dir={tmp_path}/o"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert logs()
    for log in logs():   # and nobody is at work any more
        step = torch.load(log.with_name("ckpt.pt"), weights_only=True)["step"]
        assert json.loads(log.read_text().splitlines()[-1])["step"] == step < 1000
        with open(log) as file:
            assert lock(file)

"""Properties of this project, offline, on two CPU cores: python -m pytest -q

Sections follow the files: the model (mor.py), then train.py, data/ and sample.py. Three sources of truth: golden values
computed with the authors' released code, an oracle below that loops over tokens in plain Python, and closed forms.
"""
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from mor import MoR, MoRConfig, PRESETS, Score, flops_per_token, kv_bytes_per_token, n_params, paper_flops_per_token

torch.set_num_threads(1)   # tiny tensors: a second thread only waits
ROOT = Path(__file__).resolve().parent
TINY = dict(vocab_size=96, block_size=32, n_layer=8, n_head=4, n_kv_head=2, n_embd=32, n_ff=48)

# ---------------------------------------------------------------------------------------------------------------
# Golden values
#
# data/golden.npz holds weights, inputs and outputs of tiny random models, computed in float64 with the authors'
# released code (github.com/raymin0223/mixture_of_recursions, 884fa5a, with expert_choice_router.py of 82c97f2, where
# attention is shared as the paper says). Weights are stored as multiples of 1/128, which they are, norms less 1.
# Of the 96 logits the first 32 are kept: the residual stream is 32 wide, so they determine the others.

GOLDEN = np.load(ROOT / "data" / "golden.npz")
CASES = sorted({k.split("/")[0] for k in GOLDEN})
NAMES = {"attn.q_proj": ["q_proj"], "attn.kv_proj": ["k_proj", "v_proj"], "attn.o_proj": ["o_proj"],
         "mlp.gate_up_proj": ["gate_proj", "up_proj"], "mlp.down_proj": ["down_proj"],
         "attn_norm": ["attn_norm"], "mlp_norm": ["mlp_norm"]}


def golden_config(spec):
    if spec["kind"] == "vanilla":
        return MoRConfig(**{**TINY, "n_layer": spec["n_effective_layers"]}, n_rec=1)
    config = dict(TINY, n_layer=spec["n_effective_layers"], n_rec=spec["n_recursions"], sharing=spec["sharing"],
                  cache="shared" if spec["kv"] else "recursion", router="none")
    if spec["kind"] != "recursive":
        config.update(router=spec["kind"], gate=spec["func"], alpha=spec["alpha"], router_arch=spec["router"],
                      sampling=spec.get("sampling", "aux_loss"), balance=spec.get("balancing", "loss"))
    return MoRConfig(**config)


def golden_names(model):
    """(parameter of ours, names of its parts there) for each parameter."""
    layers = [*model.first, *model.shared, *model.last]
    theirs = ["first"] * len(model.first) + [f"shared.{i}" for i in range(len(model.shared))] + ["last"] * len(model.last)
    if model.config.n_rec == 1:
        theirs = [f"layer.{i}" for i in range(len(layers))]
    yield model.wte.weight, ["embed"]
    yield model.norm.weight, ["norm"]
    for layer, name in zip(layers, theirs):
        for ours, parts in NAMES.items():
            yield layer.get_submodule(ours).weight, [f"{name}.{p}" for p in parts]
    router = model.router
    scores = {}
    if model.config.routed and model.config.router == "token":
        scores = {"router": router.score}
    elif model.config.routed:
        scores = {f"router.{r}": s for r, s in enumerate(router.score)}
        scores.update({f"aux_router.{r}": s for r, s in enumerate(router.aux_score)})
    for name, score in scores.items():
        ends = [""] if len(score.layers) == 1 else [".in", ".out"]
        for end, layer in zip(ends, score.layers):
            yield layer.weight, [name + end]


def golden_model(case):
    spec = json.loads(str(GOLDEN[f"{case}/spec"]))
    model = MoR(golden_config(spec)).double().train()
    with torch.no_grad():
        for p, parts in golden_names(model):
            w = [torch.tensor(GOLDEN[f"{spec.get('weights_of', case)}/{n}"] / 128.0) + n.endswith("norm") for n in parts]
            p.copy_(torch.cat(w))
        if f"{case}/router_bias" in GOLDEN:
            model.router.bias.copy_(torch.tensor(GOLDEN[f"{case}/router_bias"]))
    get = lambda key: torch.tensor(GOLDEN[f"{case}/{key}"])
    return spec, model, get, lambda key: f"{case}/{key}" in GOLDEN


@pytest.mark.parametrize("case", CASES)
def test_golden(case):
    """The released code's logits, losses, selections, depths and gradient norms, to 1e-9 in float64."""
    spec, model, get, has = golden_model(case)
    idx = get("ids").long()
    targets = torch.cat([idx[:, 1:], torch.full((2, 1), -1)], dim=1)
    logits, _, routing = model(idx, targets)
    close = lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=1e-9, equal_nan=True)
    close(logits[..., :32], get("logits"))
    close(routing.losses["lm"], get("lm_loss"))
    terms = {"lm": routing.losses["lm"]}
    if spec["kind"] == "expert":
        for r in range(spec["n_recursions"]):
            chosen = (routing.depth > r).nonzero()[:, 1].view(2, -1)
            assert torch.equal(chosen, get(f"selected.{r}").long())
        close(routing.logits, get("router_logits").permute(1, 2, 0))
        close(routing.health["agreement"].double(), get("aux_acc").float().double())
        for name in ("aux", "z"):
            terms[name] = routing.losses[name]
            close(terms[name], get(f"{name}_loss").sum())
    if spec["kind"] == "token":
        assert torch.equal(routing.depth, get("depth").long() + 1)
        close(routing.logits, get("router_logits"))
        for name in ("balance", "z"):
            terms[name] = routing.losses[name]
            if has(f"{name}_loss"):
                close(terms[name], get(f"{name}_loss"))
    if has("bias_after_update"):
        model.router.update_bias(routing.health["load"])
        close(model.router.bias, get("bias_after_update"))
    parameters = list(golden_names(model))
    for term, expected in zip(spec["grad_terms"], get("grad_l2")):
        norms = {}
        grads = torch.autograd.grad(terms[term], [p for p, _ in parameters], retain_graph=True, allow_unused=True)
        for (p, parts), g in zip(parameters, grads):
            g = torch.zeros_like(p) if g is None else g
            norms.update((n, piece.norm()) for n, piece in zip(parts, g.chunk(len(parts))))
        close(torch.stack([norms[n] for n in spec["grad_names"]]), expected)

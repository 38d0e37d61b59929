"""Measure, side by side, on the machine at hand: what a model costs, how fast it is and how good.

    python bench.py              all of the next four, small: 2 to 4 minutes on two cores
    python bench.py cost         parameters, FLOPs and cache by formula, beside the paper's numbers; no timing
    python bench.py train        a training step of each variant, beside a plain Transformer's
    python bench.py generate     tokens a second of the engine, at equal slots and at equal KV memory
    python bench.py quality      losses of models trained alike: 40 to 60 minutes on two cores
    python bench.py look         what a trained router does, and what unrolled layers have in common
    python bench.py gpu          at most ten minutes: is what we take for granted about a GPU so?
    python bench.py train --model=135m --batch_size=1      each part for another size

Variants take turns, so that a slow minute of the machine is slow for all of them. A ratio is the median over
the turns, with the least and the greatest in brackets. Output: Markdown tables, and a JSON line for each row.
"""
from data import system   # first of all, see there

if __name__ == "__main__":
    system.prepare()

import gc
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import count, product
from pathlib import Path
from threading import Event
from typing import Literal

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

import train
from data import python_source
from data.shards import val_batches
from mor import (Engine, MoR, MoRConfig, PRESETS, check_fields, flops_per_token, kv_bytes_per_token,
                 kv_reads_per_token, n_params, page_size, pick, require, shares)

SIZE = tuple(PRESETS["tiny"])   # the options of a model's size
VARIANTS = {"plain": dict(n_rec=1), **{f"recursive-{n}": dict(n_rec=n, router="none") for n in (2, 3, 4)},
            **{f"MoR-{n}, {router}" + ", shared cache" * (cache == "shared"):
               dict(n_rec=n, router=router, cache=cache)
               for router in ("expert", "token") for cache in ("recursion", "shared") for n in (2, 3, 4)}}

@dataclass
class BenchConfig:
    """What to measure, and for how long."""
    model: Literal[tuple(PRESETS)] = "tiny"  # sizes; of cost 360m, of quality tiny, else as in train.py
    batch_size: int = 0  # train: rows in a step; 0: as train.py chooses
    rounds: int = 7  # turns of each variant
    steps: int = 5  # train: steps in a turn
    passes: int = 48  # generate: passes of the shared block in a turn; best a multiple of all n_rec
    slots: int = 32  # generate: texts in flight
    quick: int = 0  # generate: texts are so many times shorter than 256 tokens; 0: as block_size demands
    max_steps: int = 1000  # quality: steps of each training
    seeds: int = 2  # quality: trainings of each model
    eval_rows: int = 800  # quality, look: rows of validation text
    out_dir: train.path = ""  # look, generate: a checkpoint; quality: where to train, out_study if empty
    data_dir: train.path = "data"  # where token files are built
    device: str = "auto"  # cpu, cuda, mps; auto: the best there is
    compile: bool = False  # torch.compile train's steps and generate's calls; true on an NVIDIA GPU
    vocab_size: int = 0  # this and the following: sizes, see train.py
    block_size: int = 0  # tokens in a row
    n_layer: int = 0  # layers of a plain Transformer
    n_head: int = 0  # query heads
    n_kv_head: int = 0  # key/value heads
    n_embd: int = 0  # width
    n_ff: int = 0  # width inside the MLP

    def __post_init__(self):
        check_fields(self, passes=8)   # in which each engine ends a token
        plain = MoRConfig(**PRESETS[self.model])
        self.size = {name: getattr(self, name) or getattr(plain, name) for name in SIZE}

def seconds(device, f, n=1):
    """Seconds that a call of f takes, the mean of n, with the device done before and after."""
    finish = torch.accelerator.synchronize if device.type != "cpu" else lambda: None
    finish()
    start = time.perf_counter()
    for _ in range(n):
        f()
    finish()
    return (time.perf_counter() - start) / n

def race(turns, rounds, name):
    """What functions return, by name, over rounds in which each has its turn."""
    values = {key: [] for key in turns}
    for _ in tqdm(range(rounds), name, disable=None):   # no bar off a terminal
        for key, turn in turns.items():
            values[key].append(turn())
    return values

def spread(values, digits=2):
    """Median, least and greatest."""
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f} {max(values):.{digits}f}]"

def ratios(values, others):
    """Of two variants, round by round."""
    return spread([a / b for a, b in zip(values, others)])

def table(title, rows):
    """Print dicts with the same keys as a Markdown table, each as it comes, then as JSON lines."""
    done = []
    for row in rows:
        if not done:
            print(f"\n**{title}**\n\n| " + " | ".join(row) + " |\n|" + " --- |" * len(row))
        print("| " + " | ".join(f"{v:,.3g}" if isinstance(v, float) else str(v) for v in row.values()) + " |",
              flush=True)
        done.append(row)
    print()
    for row in done:
        print(json.dumps({"table": title, **row}, ensure_ascii=False), flush=True)

# ---- cost --------------------------------------------------------------------------------------------------

# Table 3 of the paper, for 16.5e18 FLOPs: parameters outside the embedding, tokens.
TABLE_3 = {"plain": "315M, 20B", "recursive-2": "167M, 20B", "recursive-3": "118M, 20B",
           "recursive-4": "98M, 19B", "MoR-2, expert": "167M, 27B", "MoR-3, expert": "118M, 30B",
           "MoR-4, expert": "98M, 30B", "MoR-3, expert, shared cache": "118M, 31B",
           "MoR-3, token": "118M, 30B"}

def cost(bench):
    """Parameters, forward FLOPs and bytes of cache per token by formula, beside what the paper says."""
    rows, plain, T = [], MoRConfig(**bench.size, n_rec=1), bench.size["block_size"]
    configs = {name: MoRConfig(**bench.size, **options) for name, options in VARIANTS.items()}
    million = lambda number: f"{number / 1e6:,.1f}M"
    unrolled = {d: million(n_params(replace(plain, n_layer=d), embedding=False))
                for d in {c.effective_depth for c in configs.values()}}
    for name, c in tqdm(configs.items(), "cost", disable=None):
        paper, every, kv = flops_per_token(c, T, paper=True), flops_per_token(c, T), kv_bytes_per_token(c)
        share, kept, read = count_kv(c)
        row = {"model": name,
               "layers, unique / unrolled": f"{c.n_unshared + c.n_shared} / {c.effective_depth}",
               "parameters": million(n_params(c, embedding=False)),
               "unrolled": unrolled[c.effective_depth],
               "FLOPs, paper's count": million(paper),
               "paper FLOPs / plain": paper / flops_per_token(plain, T, paper=True),
               "FLOPs, all": million(every), "all FLOPs / plain": every / flops_per_token(plain, T),
               "KV bytes": f"{kv:,.0f}", "KV / plain": kv / kv_bytes_per_token(plain),
               "KV entries read": f"{kv_reads_per_token(c, T):,.0f}",
               "read / plain": kv_reads_per_token(c, T) / kv_reads_per_token(plain, T),
               "KV bytes counted (formula)": f"{kept:,.0f} ({kv_bytes_per_token(c, sum(share)):,.0f})",
               "entries read, counted (formula)":
               f"{read:,.0f} ({kv_reads_per_token(c, COUNTED, share):,.0f})",
               "at a depth of": sum(share)}
        if bench.size == BenchConfig("360m").size:
            row |= {"tokens for 16.5e18": f"{16.5e9 / paper:.1f}B", "paper": TABLE_3.get(name, "")}
        rows.append(row)
    table(f"{bench.model}: parameters outside the embedding; FLOPs and bytes of cache for a token", rows)
    table("Table 2 of the paper, which is about recursions alone, and that of the model", table_2(bench))

COUNTED = 100   # tokens in the text that is counted

class Reads(TorchFunctionMode):
    """Counts the keys that queries are given."""
    total = 0

    def __torch_function__(self, f, types, args=(), kwargs=None):
        if f is F.scaled_dot_product_attention:
            self.total += args[1].shape[-2]   # one query at a time
        return f(*args, **(kwargs or {}))

def count_kv(c):
    """Share of tokens at each recursion, and for a token bytes of keys and values kept and entries read:
    counted while a text is written by a model of as many layers that is only two numbers wide."""
    torch.manual_seed(0)
    narrow = dict(n_head=1, n_kv_head=1, n_embd=2, n_ff=1, vocab_size=999, block_size=COUNTED)
    arch = "random" if c.router == "expert" else "linear"
    engine = Engine(MoR(replace(c, **narrow, router_arch=arch)).eval(), slots=1)
    text = engine.submit([0], COUNTED, seed=0)
    with Reads() as reads:
        list(engine.run())
    rows = [kv for cache in engine.caches.values() for kv in cache.kv.values()]   # (entries, 2, 2)
    written = sum(kv[:, 0].any(dim=1).sum().item() for kv in rows)   # entries that are not zero
    share = [sum(depth > r for depth in text.depths) / COUNTED for r in range(c.n_rec)]
    return share, written / COUNTED * 2 * c.n_kv_head * c.head_dim * 2, reads.total / COUNTED

def table_2(bench):
    """The paper's ratios, of recursions alone; and the model's, whose first and last layer save nothing."""
    rows = []
    for n in (2, 3, 4):
        for cache in ("recursion", "shared"):
            c = MoRConfig(**bench.size, n_rec=n, cache=cache)
            mean, square = sum(shares(c)) / n, sum(x * x for x in shares(c)) / n
            memory, read, attention = (1 / n, 1.0, mean) if cache == "shared" else (mean, mean, square)
            row = {"recursions": n, "cache": cache}
            for name, x in {"KV memory": memory, "KV read": read, "attention FLOPs": attention}.items():
                row |= {name: x, f"{name}, model": (c.n_unshared + c.n_shared * n * x) / c.effective_depth}
            rows.append(row)
    return rows

# ---- train -------------------------------------------------------------------------------------------------

def training(bench):
    """Training steps of train.py, data and optimizer included, of MoR and of a plain Transformer as deep."""
    device, names = train.pick_device(bench.device), [f"MoR-{n}, expert" for n in (2, 3, 4)]
    names += ["MoR-3, expert, shared cache", "MoR-3, token", "recursive-3"]
    base = dict(bench.size, device=bench.device, model=bench.model, data="python", batch_tokens=0, n_rec=1,
                max_steps=10**6, compile=bench.compile)
    base |= dict(batch_size=bench.batch_size) if bench.batch_size else {}
    settled = {name: train.settle({**base, **VARIANTS[name]}, None) for name in names}
    depths = sorted({config.effective_depth for config, _ in settled.values()})
    plain = {f"plain, {d} layers": train.settle({**base, "n_layer": d}, None) for d in depths}
    source, variants = source_code(bench), plain | settled
    # Not all fit into the memory of a GPU: there it is one after the other, until eight minutes are over.
    gpu, until = device.type == "cuda", time.monotonic() + 480
    times, peak, load = {}, {}, {}
    for group in [[name] for name in variants] if gpu else [list(variants)]:
        if gpu and time.monotonic() > until:
            print(f"{group[0]}: left out, eight minutes are over", file=sys.stderr)
            continue
        runs = {name: started(name, *variants[name], source)[0] for name in group}
        turns = {name: partial(seconds, device, run.train_step, bench.steps) for name, run in runs.items()}
        times |= race(turns, bench.rounds, "train")
        load |= {name: run.train_step()["load"].tolist() for name, run in runs.items()}
        peak |= {name: torch.cuda.max_memory_allocated() / 1e9 for name in runs if gpu}
        del runs, turns
        gc.collect()   # a compiled model holds itself
    rows = []
    for name in times:
        (c, tc), like = variants[name], f"plain, {variants[name][0].effective_depth} layers"
        T, speed = c.block_size, tc.batch_tokens / statistics.median(times[name])
        share = [sum(load[name][r:]) for r in range(c.n_rec)]   # token-choice has no fixed loads
        row = {"model": name, "parameters": f"{n_params(c) / 1e6:,.4g}M", "tokens/s": f"{speed:,.0f}",
               "time / plain": ratios(times[name], times[like]),
               "FLOPs / plain": flops_per_token(c, T, share=share) / flops_per_token(variants[like][0], T),
               "mean depth": sum(share), "compiled": tc.compile}
        if gpu:
            row |= {"MFU": train.mfu(c, tc, speed, load[name]), "peak GB": peak[name]}
        rows.append(row)
    table(f"A step: width {c.n_embd}, {tc.batch_size} x {T} tokens, {tc.dtype}, {device}", rows)

def source_code(bench):
    """Python's library, to train on."""
    source, V = python_source.source("python", bench.data_dir), bench.size["vocab_size"]
    require(V >= source.vocab_size, f"vocab_size={V} must be at least {source.vocab_size} here")
    return source

def started(name, config, tc, source):
    """A training run that is warm, and the seconds of its first step, which compiles."""
    run = train.Run(config, tc, source)
    warm = seconds(run.device, run.train_step)
    print(f"{name}: {tc.batch_size} x {config.block_size} tokens, {tc.dtype}, compile={tc.compile}; the "
          f"first step took {warm:.1f} s", file=sys.stderr)
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    run.train_step()
    return run, warm

# ---- generate ----------------------------------------------------------------------------------------------

def untrained(**options):
    """A model whose weights are so large that every layer shows in its tokens, which `checked` looks at."""
    model = MoR(MoRConfig(**options))
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=p.shape[1]**-0.5)
    return model

def ready(model, device):
    """The model as it generates here: in bfloat16 where that is fast, but for its router."""
    dtype = getattr(torch, train.machine(device)[0].get("dtype", "float32"))
    for name, part in model.to(device).named_children():
        part.to(torch.float32 if name == "router" else dtype)
    return model.eval()

def protocol(mean, slots):
    """Endless (prompt, new tokens, seed), as in the paper: no prompt, Normal(mean, mean / 4) new tokens. The
    first have any length up to the mean, so that those that follow in the same slots have any age."""
    rng = random.Random(0)
    for i in count():
        n = rng.randint(1, mean) if i < slots else max(1, round(rng.gauss(mean, mean / 4)))
        yield [0], n, rng.randrange(2**32)

def serve(engine, texts, passes):
    """Tokens a second over some passes of an engine whose queue is never empty."""
    before = engine.counts["tokens"]

    def step():
        while len(engine.queue) < engine.slots:
            engine.submit(*next(texts))
        engine.counts["depth"] += sum(request.depths[-1] for request in engine.step())
    took = seconds(engine.h.device, step, passes) * passes
    return (engine.counts["tokens"] - before) / took

def warm_up(engine, texts, tokens):
    """Serve so many tokens, and forget about it."""
    while engine.counts["tokens"] < tokens:
        serve(engine, texts, 8)
    engine.counts.clear()

def checked(engine):
    """Share of tokens in short texts, of likeliest and of drawn tokens, that the forward without a cache
    would write too, up to rounding, and at the same depth. ValueError if it is low."""
    model, right, usual = engine.model, [], engine.temperature
    slack = 1e-3 if model.wte.weight.dtype == torch.float32 else 4e-2   # in logits, and in probability
    n, V = min(8, *engine.entries), model.config.vocab_size
    for engine.temperature in (0.0, 1.0):
        texts = [engine.submit([j % V for j in range(i, i + n)], 24, seed=i) for i in range(4)]
        list(engine.run())
        for seed, text in enumerate(texts):
            ids = torch.tensor(text.prompt + text.tokens, device=engine.h.device)
            with torch.inference_mode():
                logits, _, routing = model(ids[None, :-1], causal=True)
            logits, depth, new = logits[0, n - 1:], routing.depth[0, n - 1:], ids[n:]
            stream = random.Random(seed)
            u = torch.tensor([stream.random() for _ in text.tokens], device=ids.device)
            if engine.temperature:   # a number a bit lower, or higher, would draw this token or one beyond it
                fine = (pick(logits, u - slack) <= new) & (new <= pick(logits, u + slack))
            else:
                fine = logits.amax(dim=1) - logits.gather(1, new[:, None])[:, 0] < slack
            right += (fine & (depth == torch.tensor(text.depths, device=ids.device))).tolist()
    engine.temperature = usual
    engine.counts.clear()
    require(sum(right) >= 0.95 * len(right),
            f"of {len(right)} tokens, the forward without a cache would write only {sum(right)}")
    return sum(right) / len(right)

def stopwatch(engine, texts, passes):
    """Milliseconds in a call of the block and of the head, and the share of all time that goes into the head.
    Waits for the device at each call: not for speed."""
    spent, calls, whole = Counter(), Counter(), dict(engine.calls)

    def timed(name, *plan):
        y = []
        spent[name] += seconds(engine.h.device, lambda: y.append(whole[name](*plan)))
        calls[name] += 1
        return y[0]
    engine.calls = {name: partial(timed, name) for name in whole}
    total = seconds(engine.h.device, partial(serve, engine, texts, passes))
    engine.calls = whole
    return [1e3 * spent[name] / max(1, calls[name]) for name in ("block", "head")], spent["head"] / total

def contestants(bench, device):
    """Models by name. An untrained MoR goes deeper by chance, as often as training keeps a token; that of
    out_dir routes as it has learned. Plain ones are as deep as these. Compiled, which takes half a minute to
    a minute for each engine, only MoR-3."""
    size, names, loaded = bench.size, [f"MoR-{n}, expert" for n in ((3,) if bench.compile else (2, 3, 4))], {}
    if bench.out_dir:
        model = train.load_checkpoint(bench.out_dir)["model"]
        size, loaded[bench.out_dir] = {name: getattr(model.config, name) for name in SIZE}, model
    names += [] if bench.compile else ["MoR-3, expert, shared cache"]
    models = {name: untrained(**size, **VARIANTS[name], router_arch="random") for name in names} | loaded
    if not bench.compile:
        models["recursive-3"] = untrained(**size, **VARIANTS["recursive-3"])
    depths = sorted({model.config.effective_depth for model in models.values()})
    plain = {f"plain, {d} layers": untrained(**{**size, "n_rec": 1, "n_layer": d}) for d in depths}
    return {name: ready(model, device) for name, model in (plain | models).items()}

def kv_of_slot(engine):   # bytes
    return sum(kv.nbytes / len(cache.used) for cache in engine.caches.values() for kv in cache.kv.values())

def generation(bench):
    """Tokens a second of the engine: with as many slots as `plain`, and as much room for keys and values."""
    device = train.pick_device(bench.device)
    torch.manual_seed(0)
    models, engines, kv = contestants(bench, device), {}, {}
    plain = {name: f"plain, {model.config.effective_depth} layers" for name, model in models.items()}
    # Room for texts of mean + 4 deviations, twice the mean; in pages thrice, as thirds are then whole pages.
    c = models["MoR-3, expert"].config
    times = 2 if page_size(models["MoR-3, expert"].wte.weight, c.head_dim) == 1 else 3
    mean = max(1, 256 // (bench.quick or max(1, math.ceil(256 * times / c.block_size))))

    def enter(name, slots):
        c = models[name].config
        entries = [math.ceil(times * mean * x) for x in shares(c)] if c.cache == "recursion" else None
        engine = Engine(models[name], slots, times * mean, entries, compile=bench.compile)
        engines[name, slots] = engine, protocol(mean, slots)
        kv[name] = kv_of_slot(engine)
    for name in models:
        enter(name, bench.slots)
    for name in models:
        slots = int(bench.slots * kv[plain[name]] / kv[name])
        if slots > bench.slots:
            enter(name, slots)
    for name, slots in list(engines):
        if (plain[name], slots) not in engines:   # what slots alone give
            enter(plain[name], slots)
    right = {key: checked(engine) for key, (engine, _) in engines.items()}
    for (_, slots), (engine, texts) in engines.items():
        warm_up(engine, texts, slots * mean)
    turns = {key: partial(serve, *engine, bench.passes) for key, engine in engines.items()}
    speeds, rows, headless = race(turns, bench.rounds, "generate"), [], {}
    for (name, slots), (engine, texts) in engines.items():
        key, base, c = (name, slots), (plain[name], bench.slots), models[name].config
        n = Counter(engine.counts)
        (block, head), head_share = stopwatch(engine, texts, 2 * bench.passes)
        depth = n["depth"] / n["tokens"]
        headless[key] = statistics.median(speeds[key]) / (1 - head_share)
        rows.append({
            "model": name, "slots": slots, "KV MB": kv[name] * slots / 1e6,
            "tokens/s": f"{statistics.median(speeds[key]):,.0f}",
            f"speed / plain, {bench.slots} slots": ratios(speeds[key], speeds[base]),
            "/ plain, as many": ratios(speeds[key], speeds[plain[name], slots]),
            "without head": headless[key] / headless[base],
            "mean depth": depth, "layers / plain": (c.n_unshared + c.n_shared * depth) / c.effective_depth,
            "block calls for 1000 tokens": f"{1000 * n['block_calls'] / n['tokens']:.0f}",
            "head calls": f"{1000 * n['head_calls'] / n['tokens']:.0f}", "block call, ms": block,
            "head call, ms": head, "same as uncached": right[key]})
    table(f"Generation, width {c.n_embd}, texts of Normal({mean}, {mean / 4:g}) tokens without a prompt, "
          f"{engine.h.dtype}, {device}", rows)
    growth(bench, device)

GROWTH = [(128, 1), (128, 8), (128, 32), (128, 128), (512, 32), (2048, 32)]   # context, slots

def growth(bench, device):
    """What a token costs as contexts grow, and as slots do. Both models write as many tokens to each text."""
    rows, each = [], 8   # tokens to a text in a turn
    new = 4 * (bench.rounds + 2) * each   # a text may get more than its due, and should not end
    size = dict(bench.size, block_size=max(GROWTH)[0] + new)
    pair = {"plain": (dict(n_rec=1), 1), "MoR-3": (VARIANTS["MoR-3, expert"] | dict(router_arch="random"), 2)}
    models = {name: ready(untrained(**size, **options), device) for name, (options, _) in pair.items()}
    for context, slots in GROWTH[-1:] if bench.compile else GROWTH:
        # Not all at the same position: there random routing would have them go as deep as each other.
        turns, start = {}, max(1, context - new // 8 - min(slots, 32) // 2)
        for name, model in models.items():
            engine = Engine(model, slots, context + new, compile=bench.compile)
            texts = (([0] * (start + i % 32), new, i) for i in count())
            turns[name] = partial(serve, engine, texts, each * pair[name][1])
            turns[name]()
        speeds = race(turns, bench.rounds, f"context {context}, slots {slots}")
        rows.append({"context": context, "slots": slots,
                     **{f"{name}, ms a token": 1e3 / statistics.median(v) for name, v in speeds.items()},
                     "time / plain": ratios(speeds["plain"], speeds["MoR-3"])})
    table(f"Time of a token, width {bench.size['n_embd']}, {device}", rows)

# ---- quality -----------------------------------------------------------------------------------------------

def study(bench):
    """The trainings of `quality` as options of train.py: equal tokens, then equal FLOPs; then some with a
    lower learning rate, as one that suits all models may not be there."""
    c, plain = MoRConfig(**bench.size, n_rec=3), MoRConfig(**bench.size, n_rec=1)
    small, recursive = f"--n_rec=1 --n_layer={c.n_unshared + c.n_shared}", "--n_rec=3 --router=none"
    mor = {"MoR, expert": "--n_rec=3", "MoR, expert, shared cache": "--n_rec=3 --cache=shared"}
    runs = {"plain": "--n_rec=1", "plain, as few parameters": small, "recursive, middle_cycle": recursive,
            **{f"recursive, {sharing}": f"{recursive} --sharing={sharing}"
               for sharing in ("cycle", "middle_sequence", "sequence")},
            **mor, "MoR, token": "--n_rec=3 --router=token", "MoR, random": "--n_rec=3 --router_arch=random"}
    tc = train.settle(dict(bench.size, model=bench.model, n_rec=1, device=bench.device), None)[1]
    flops = flops_per_token(plain, c.block_size, paper=True) * tc.batch_tokens * bench.max_steps
    steps, rate = f"--max_steps={bench.max_steps}", f"--learning_rate={0.4 * tc.learning_rate:g}"
    return ({name: f"{options} {steps}" for name, options in runs.items()}
            | {f"{name}, equal FLOPs": f"{options} --flops={flops:.4g}"
               for name, options in {"plain, as few parameters": small, **mor}.items()}
            | {f"{name}, lower rate": f"{runs[name]} {steps} {rate}"
               for name in ("plain", "recursive, middle_cycle", "MoR, expert", "MoR, token", "MoR, random")})

def trained(argv, out, threads, at_work, stopped):
    """Have `python train.py argv` fill the folder out: from the start, from where it stopped, or not at all
    if it is complete. Returns settings and last evaluation. The process is added to the list at_work, and
    ends at once if the event stopped is set."""
    log, argv = out / "log.jsonl", [*argv, f"--out_dir={out}"]
    lines = log.read_text().splitlines() if log.exists() else []
    require(not lines or json.loads(lines[0])["argv"] == argv,
            f"{out} holds another run: choose another --out_dir")
    ends = lines and "val_causal" in lines[-1] and json.loads(lines[-1])["step"]
    if not lines or ends != json.loads(lines[0])["max_steps"]:
        resume = [f"--resume={out}"] if (out / "ckpt.pt").exists() else []
        run = subprocess.Popen([sys.executable, train.__file__, *argv, *resume], text=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               env={**os.environ, "OMP_NUM_THREADS": threads})
        at_work.append(run)
        if stopped.is_set():
            run.terminate()
        last = run.communicate()[1].strip().rpartition("\n")[2]
        require(run.returncode == 0, f"train.py {' '.join(argv)} ended with: {last}")
        lines = log.read_text().splitlines()
    return json.loads(lines[0]), json.loads(lines[-1])

def train_all(argvs, device):
    """Results of all trainings, by key. On a CPU each has one core: tiny models gain little from a second."""
    workers = torch.get_num_threads() if device.type == "cpu" else 1
    threads = "1" if workers > 1 else str(torch.get_num_threads())
    at_work, stopped = [], Event()
    with ThreadPoolExecutor(workers) as pool:
        jobs = {key: pool.submit(trained, *job, threads, at_work, stopped) for key, job in argvs.items()}
        try:
            for job in tqdm(as_completed(jobs.values()), "quality", len(jobs), disable=None):
                settings, last = job.result()
                tqdm.write(f"{settings['out_dir']}: causal loss {last['val_causal']:.4f}", file=sys.stderr)
        except BaseException:   # those at work save what they have
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for run in at_work:
                run.terminate()
            raise
    return {key: job.result() for key, job in jobs.items()}

def quality(bench):
    """Losses of models trained alike; and what some of them do when they have to leave early."""
    runs, device, standard = study(bench), train.pick_device(bench.device), BenchConfig(bench.model).size
    seeds, top = [1337 + i for i in range(bench.seeds)], Path(bench.out_dir or "out_study")
    common = [f"--model={bench.model}", f"--device={bench.device}", f"--data_dir={bench.data_dir}",
              f"--eval_rows={bench.eval_rows}"]
    common += ["--compile=false"] * (device.type == "cuda" and not bench.compile)
    common += [f"--{name}={value}" for name, value in bench.size.items() if value != standard[name]]
    out = {(name, seed): top / f"{name.replace(', ', '-').replace(' ', '_')}-{seed}"
           for seed in seeds for name in runs}
    top.mkdir(parents=True, exist_ok=True)
    results = train_all({(name, seed): ([*common, *runs[name].split(), f"--seed={seed}"], folder)
                         for (name, seed), folder in out.items()}, device)
    rows = []
    for name, options in runs.items():
        settings, last = results[name, seeds[0]]
        c = MoRConfig(**{f.name: settings[f.name] for f in fields(MoRConfig)})
        tokens = settings["max_steps"] * settings["batch_tokens"]
        causal, topk, plain = ([results[of, seed][1].get(f"val_{loss}") for seed in seeds]
                               for of, loss in ((name, "causal"), (name, "topk"), ("plain", "causal")))
        rows.append({"model": name, "parameters": f"{n_params(c) / 1e6:.3f}M", "layers": c.effective_depth,
                     "tokens": f"{tokens / 1e6:.3g}M",
                     "FLOPs, paper's count": f"{tokens * flops_per_token(c, c.block_size, paper=True):.2e}",
                     "causal loss": spread(causal, 3), "topk loss": spread(topk, 3) if topk[0] else "",
                     "causal - plain": spread([a - b for a, b in zip(causal, plain)], 3),
                     "mean depth": f"{last['val_mean_depth']:.2f}" if c.routed else "",
                     "options": f"`{options}`"})
    table(f"`python train.py {' '.join(common)} --seed={' or '.join(map(str, seeds))}` and options", rows)
    four = ("recursive, middle_cycle", "MoR, expert", "MoR, expert, shared cache", "MoR, token")
    loaded = {name: train.load_checkpoint(out[name, seeds[0]]) for name in four}
    batches = validation(loaded["MoR, expert"], bench, device)
    models = {name: checkpoint["model"].to(device).eval() for name, checkpoint in loaded.items()}
    table(f"Causal loss where every token has to leave after max_depth, seed {seeds[0]}", [
        {"model": name, **{f"max_depth={d}": f"{causal_loss(model, batches, max_depth=d)[0]:.3f}"
                           for d in range(1, model.config.n_rec + 1)}} for name, model in models.items()])
    table(f"The threshold of MoR, expert, seed {seeds[0]}", dial(models["MoR, expert"], batches, bench))
    look(replace(bench, out_dir=str(out["MoR, expert", seeds[0]])))

def validation(checkpoint, bench, device):
    """Batches of the text that a checkpoint was validated with."""
    tc = replace(train.TrainConfig(**checkpoint["train_config"]), data_dir=bench.data_dir)
    T = checkpoint["config"]["block_size"]
    source = train.find_source(tc, checkpoint["tokenizer"])
    return val_batches(source.val, 8, T, bench.eval_rows, device)

@torch.inference_mode()
def causal_loss(model, batches, **dials):
    """Loss and mean depth, routed as in generation."""
    sums, n = [0.0, 0.0], sum(len(x) for x, _ in batches)
    for x, y in batches:
        routing = model(x, y, causal=True, **dials)[2]
        for i, value in enumerate((routing.losses["lm"], routing.health["mean_depth"])):
            sums[i] += value.item() * len(x) / n
    return sums

def dial(model, batches, bench):
    """Loss, depth and speed at thresholds from 0.1 to 0.9."""
    mean, turns, rows = model.config.block_size // 2, {}, []
    for t in (0.1, 0.3, 0.5, 0.7, 0.9):
        engine, texts = Engine(model, bench.slots, threshold=t), protocol(mean, bench.slots)
        warm_up(engine, texts, bench.slots * mean)
        turns[t] = partial(serve, engine, texts, bench.passes)
    speeds = race(turns, bench.rounds, "threshold")
    for t in turns:
        loss, depth = causal_loss(model, batches, threshold=t)
        rows.append({"threshold": t, "causal loss": f"{loss:.3f}", "mean depth": f"{depth:.2f}",
                     "tokens/s": f"{statistics.median(speeds[t]):,.0f}",
                     "speed / that of 0.5": ratios(speeds[t], speeds[0.5])})
    return rows

# ---- look --------------------------------------------------------------------------------------------------

KINDS = re.compile(r"(?P<new_line>\n)|(?P<indentation>(?<=\n) +)|(?P<space> )|(?P<opening_bracket>[(\[{])|"
                   r"(?P<closing_bracket>[)\]}])|(?P<digit>\d)|(?P<first_of_a_word>(?<![^\W_])[^\W\d_])|"
                   r"(?P<later_in_a_word>[^\W_])|(?P<other>.)", re.DOTALL | re.ASCII)

def bars(values):
    """Values as a row of bars, the greatest of which is the highest."""
    top = max(1, *values)
    return "`" + "".join(" ▁▂▃▄▅▆▇█"[math.ceil(8 * v / top)] for v in values) + "`"

@torch.inference_mode()
def look(bench):
    """Of a trained model: scores, health, depth by kind of byte, and what unrolled layers have in common."""
    checkpoint, device = train.load_checkpoint(bench.out_dir or "out"), train.pick_device(bench.device)
    model, c = checkpoint["model"].to(device).eval(), checkpoint["model"].config
    batches = validation(checkpoint, bench, device)
    if c.routed:
        routings = [model(x, causal=True)[2] for x, _ in batches]
        depth, z = (torch.cat([getattr(r, name) for r in routings]) for name in ("depth", "logits"))
        table("Router scores on validation text", scores(c, depth, z))
        health = train.evaluate(model, batches, checkpoint["train_config"]["dtype"])
        table("Health of the router", [{
            name: str([round(v, 3) for v in value]) if isinstance(value, list) else value
            for name, value in health.items()}])
        if checkpoint["tokenizer"] == "bytes":
            ids = [row for x, _ in batches for row in x.tolist()]
            table("Depth by kind of the byte that is read", by_kind(ids, depth.tolist(), c.n_rec))
    table("Unrolled layers: mean norms; first digit of the cosine to each layer up to this one",
          unrolled(model, batches[0][0]))

def scores(c, depth, z):
    """A row for each recursion (token-choice: depth): how the router's probabilities are distributed."""
    rows, p = [], z.softmax(dim=2) if c.router == "token" and c.gate != "sigmoid" else z.sigmoid()
    for r in range(c.n_rec):
        asked = p[:, :, r][~z[:, :, r].isnan()].float().cpu()
        rows.append({"recursion": r + 1, "tokens asked": len(asked),
                     "share that took it": (depth > r).float().mean().item(),
                     "mean score": asked.mean().item() if len(asked) else "",
                     "scores from 0 to 1": bars(torch.histc(asked, 20, 0, 1).tolist())})
    return rows

def by_kind(ids, depths, n_rec):
    """Mean depth by kind of byte: rows of bytes, and the depth of each."""
    kinds = {}
    for text, depth in zip(ids, depths):
        for match in KINDS.finditer("".join(map(chr, text))):
            kinds.setdefault(match.lastgroup.replace("_", " "), []).extend(depth[match.start():match.end()])
    return [{"byte": kind, "bytes": len(d), "mean depth": statistics.fmean(d),
             **{f"depth {r + 1}": d.count(r + 1) / len(d) for r in range(n_rec)}}
            for kind, d in sorted(kinds.items(), key=lambda item: statistics.fmean(item[1]))]

def unrolled(model, idx):
    """Mean norms of hidden state, key and value in each unrolled layer; and their cosine to those of each
    layer up to it, the mean of the tokens that both have: the first decimal, - below -0.1, . for none."""
    seen, written, hooks = [], [], []

    def hook(block, args, y):
        _, rows, (part, turn) = args
        name = part if isinstance(part, str) else f"{turn + 1}.{part + 1}"
        # Keys before their rotation, which changes neither norms nor cosines at the same position.
        vectors = [y, *(written.pop().chunk(2, dim=1) if written else ())]
        seen.append((name, len(rows.flat), {   # (B*T, width), NaN for tokens that have left
            what: x.new_full((idx.numel(), x.shape[1]), math.nan).index_copy(0, rows.flat, x)
            for what, x in zip(("hidden", "key", "value"), vectors)}))
    for block in [*model.first, *model.shared, *model.last]:
        hooks.append(block.register_forward_hook(hook))
        hooks.append(block.attn.kv_proj.register_forward_hook(lambda layer, args, y: written.append(y)))
    model(idx, causal=True)
    rows = []
    for handle in hooks:
        handle.remove()
    for i, (name, n, mine) in enumerate(seen):
        row = {"layer": name, "tokens": n}
        for what in ("hidden", "key", "value"):
            row[what] = mine[what].norm(dim=1).nanmean().item() if what in mine else ""
        for what in ("hidden", "key", "value"):
            cosines = [F.cosine_similarity(mine[what], other[what]).nanmean().item()
                       if what in mine and what in other else math.nan for _, _, other in seen[:i + 1]]
            row[f"{what}, cosines"] = "`" + "".join(
                "." if math.isnan(v) else "-" if v <= -0.1 else str(max(0, min(9, int(10 * v + 1e-3))))
                for v in cosines) + "`"
        rows.append(row)
    return rows

# ---- gpu ---------------------------------------------------------------------------------------------------
#
# What is expected was estimated from compiled graphs and data sheets (H100; H200), with no GPU at hand.

KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}

def attended(kernel, q, k, v, grad):
    """Causal attention of heads (B, H, n, D) by one kernel, and gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(kernel):
        y = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        return y, *torch.autograd.grad(y, leaves, grad)

def heads(bench, B, n):
    """Random q, k, v and gradient of the output, as in training, for B rows of n tokens."""
    c, device = MoRConfig(**bench.size), train.pick_device(bench.device)
    require(n > 0, f"block_size={c.block_size} is too short to be measured here")
    return [torch.randn(B, h, n, c.head_dim, device=device).bfloat16()
            for h in (c.n_head, c.n_kv_head, c.n_kv_head, c.n_head)]

def gpu_kernels(bench):
    """Attention in bfloat16 against float32 math on the same numbers: at the lengths that expert-choice has,
    and where all scores are near -120, so that exp(log-sum-exp) is 0 in float32."""
    bad, T = [], bench.size["block_size"]

    def measure(n, low, name):
        q, k, v, grad = heads(bench, 4, n)
        if low:   # in their first numbers alone; there, gradients cancel, and are not compared
            q[..., 0], k[..., 0] = 1, -120 * q.shape[3]**0.5
        exact = attended(SDPBackend.MATH, *(x.float() for x in (q, k, v, grad)))
        call = partial(attended, KERNELS[name], q, k, v, grad)
        row = {"tokens": n, "scores": "near -120" if low else "near 0", "kernel": name}
        try:
            ys = call()
            took = statistics.median(seconds(q.device, call, 5) for _ in range(bench.rounds))
        except RuntimeError as error:
            bad.extend([name] if name == "flash" else [])   # others need not be there
            return row | {"failed": str(error)[:60]}
        gaps = [((y.float() - x)[..., 1:].norm() / x[..., 1:].norm()).item() for x, y in zip(exact, ys)]
        finite = all(y.isfinite().all() for y in ys)
        bad.extend([] if finite and all(gap < 0.02 for gap in gaps) else [name])
        return row | {f"gap of {what}": gap for what, gap in zip(("output", "dq", "dk", "dv"), gaps)} | {
            "finite": finite, "ms": 1e3 * took, "expected": "finite, gaps below 0.02"}
    lengths = T, 2 * T // 3, T // 3
    table("Attention, forward and backward, against float32",
          (measure(*case) for case in product(lengths, (False, True), KERNELS)))
    require(not bad, f"attention is not what it should be: {', '.join(sorted(set(bad)))}")

def gpu_shapes(bench):
    """What a first call costs at a new length, as prompts have them; and, for the shared cache, queries put
    back on the grid of all tokens against a mask."""
    B, T = bench.batch_size or 16, bench.size["block_size"]

    def measure(name):
        times = []
        for n in range(T - 6, T):
            inputs = heads(bench, B, n)
            call = partial(attended, KERNELS[name], *inputs)
            try:
                times.append([1e3 * seconds(inputs[0].device, call) for _ in range(2)])
            except RuntimeError as error:
                return {"kernel": str(error)[:60]}
        first, second = zip(*times)
        return {"kernel": name, "first call, ms": spread(first), "second call, ms": spread(second),
                "expected": "flash: alike; cuDNN: first 34 to 440 ms more"}
    table("Attention at six new lengths, forward and backward", map(measure, KERNELS))
    table("Attention to shared keys and values, forward and backward",
          (attention_forms(bench, B, n) for n in (2 * T // 3, T // 3)))

def attention_forms(bench, B, n):
    (q, _, _, grad), (full, k, v, _) = heads(bench, B, n), heads(bench, B, bench.size["block_size"])
    T = full.shape[2]
    index = torch.stack([torch.randperm(T, device=q.device)[:n].sort()[0] for _ in range(B)])
    mask = index[:, None, :, None] >= torch.arange(T, device=q.device)                     # (B, 1, n, T)
    cells = index[:, None, :, None].expand_as(q)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def grid():
        y = full.new_zeros(full.shape).scatter(2, cells, q)
        y = F.scaled_dot_product_attention(y, k, v, is_causal=True, enable_gqa=True)
        torch.autograd.grad(y.gather(2, cells), leaves, grad)

    def masked():   # by the efficient kernel, which wants keys for each query head
        every = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        torch.autograd.grad(F.scaled_dot_product_attention(q, *every, mask), leaves, grad)
    grid(), masked()
    turns = {f.__name__: partial(seconds, q.device, f, 5) for f in (grid, masked)}
    times = race(turns, bench.rounds, "forms")
    return {f"queries to {T} keys": n,
            **{f"{name}, ms": 1e3 * statistics.median(t) for name, t in times.items()},
            "grid / masked": ratios(times["grid"], times["masked"]), "expected": "below 1"}

def gpu_settings(bench, **options):
    """MoRConfig, TrainConfig and data of a training in bfloat16 with bench's sizes."""
    base = dict(bench.size, model=bench.model, data="python", batch_size=bench.batch_size or 16,
                batch_tokens=0, max_steps=10**6, dtype="bfloat16", compile=bench.compile, device=bench.device)
    return *train.settle(base | options, None), source_code(bench)

STEPS = {"MoR-3, expert": "169 ms (H200: 149), 194k tokens/s, MFU 0.35, 30 GB",
         "plain": "239 ms; 0.71 in time for 0.70 of the FLOPs", "MoR-3, token": "at most 60 GB"}   # expected

def gpu_train(bench, names=("MoR-3, expert", "plain")):
    """Ten steps of some models, one after the other."""
    first = []   # seconds and FLOPs of the first

    def measure(name):
        config, tc, source = gpu_settings(bench, **VARIANTS[name])
        run, warm = started(name, config, tc, source)
        took = statistics.median(seconds(run.device, run.train_step) for _ in range(10))
        numbers = run.train_step()
        require(numbers["lm"].isfinite() and numbers["norm"].isfinite(), f"{name}: loss {numbers['lm']}")
        load = numbers["load"].tolist()
        share = [sum(load[r:]) for r in range(config.n_rec)]
        gpu, speed = run.device.type == "cuda", tc.batch_tokens / took
        peak = torch.cuda.max_memory_allocated() / 1e9 if gpu else ""
        del run
        gc.collect()   # a compiled model holds itself
        cost = 3 * flops_per_token(config, config.block_size, share=share)
        first.extend([took, cost])
        return {"model": name, "compiled": tc.compile, "first step, s": warm, "ms": 1e3 * took,
                "tokens/s": f"{speed:,.0f}", "MFU": train.mfu(config, tc, speed, load) if gpu else "",
                "peak GB": peak, "GFLOPs a token": cost / 1e9, "mean depth": sum(share),
                "time, first / this": first[0] / took, "FLOPs": first[1] / cost, "expected": STEPS[name]}
    table(f"A step of {bench.batch_size or 16} x {bench.size['block_size']} tokens", map(measure, names))

DECODE = {"eager": "3-4k", "compiled": "6-7k", "graphs": "10-11k"}   # tokens/s of MoR-3 expected at 32 slots

def gpu_decode(bench):
    """Generation, eager, compiled and as CUDA graphs. At the short context, texts of about 256 tokens at any
    age, as in `generate`; at the long one, texts that are so long already."""
    device, T = train.pick_device(bench.device), bench.size["block_size"]
    short, new = min(256, T // 2), (bench.rounds + 1) * bench.passes
    size = bench.size | {"block_size": max(T + 32 + new, 3 * short)}
    models = {name: ready(untrained(**size, **options), device)
              for name, options in (("MoR-3", dict(n_rec=3, router_arch="random")), ("plain", dict(n_rec=1)))}
    c, plain = (model.config for model in models.values())
    if page_size(models["plain"].wte.weight, c.head_dim) == 1:
        print(f"note: {device}, torch {torch.__version__}: no attention over pages, entries are copied")

    def measure(name, how, context, slots, entries):
        room = 3 * short if context == short else T + 32 + new   # thirds of it are whole pages
        long = (([0] * (T + i % 32), new, i) for i in count())
        texts = protocol(short, slots) if context == short else long
        gc.collect()   # an engine holds itself
        engine = Engine(models[name], slots, room, entries, compile=how != "eager", graphs=how == "graphs")
        right = []
        first = seconds(device, lambda: right.append(checked(engine)))
        warm_up(engine, texts, slots * short if context == short else 1)
        turn = partial(seconds, device, partial(serve, engine, texts, bench.passes))
        took, n = statistics.median(turn() for _ in range(bench.rounds)) / bench.passes, engine.counts
        return {"model": name, "how": how, "context": context, "slots": slots, "first tokens, s": first,
                "same as uncached": right[0], "ms a pass": 1e3 * took,
                "tokens/s": f"{n['tokens'] / n['block_calls'] / took:,.0f}",
                "mean depth": n["depth"] / n["tokens"],
                "expected tokens/s": DECODE[how] if name == "MoR-3" and slots == bench.slots else ""}
    cases = [(name, how, context, bench.slots, None) for how, context in (
        ("graphs", T), ("graphs", short), ("eager", T), ("eager", short), ("compiled", T)) for name in models]
    # With these entries and slots MoR-3 has as much memory as plain.
    more = int(bench.slots * kv_bytes_per_token(plain) / kv_bytes_per_token(c))
    cases.insert(4, ("MoR-3", "graphs", short, more, [math.ceil(3 * short * share) for share in shares(c)]))
    table("Generation", (measure(*case) for case in cases))

def gpu_precision(bench):
    """Losses of 20 steps, compiled in bfloat16 against uncompiled in float32, from the same weights."""
    losses = {}
    for options in (dict(dtype="float32", compile=False), dict(compile=bench.compile)):
        config, tc, source = gpu_settings(bench, n_rec=3, n_layer=min(8, bench.size["n_layer"]), **options,
                                          batch_size=bench.batch_size or 8, max_steps=1000)
        run = train.Run(config, tc, source)
        torch.set_float32_matmul_precision("highest")   # no TF32 in what is compared with
        losses[tc.dtype] = [run.train_step()["lm"].item() for _ in range(20)]
    gaps = [abs(a - b) for a, b in zip(*losses.values())]
    table("The same training in two precisions", [
        {"step": s, **{f"loss, {dtype}": values[s - 1] for dtype, values in losses.items()},
         "gap": gaps[s - 1], "expected": "below 0.02"} for s in (1, 10, 20)])
    require(all(gap < 0.02 for gap in gaps), f"losses in two precisions differ: {gaps}")   # or are NaN

# Parts of `gpu`, and seconds that each may take.
GPU = {"gpu_kernels": (gpu_kernels, 45), "gpu_shapes": (gpu_shapes, 45), "gpu_train": (gpu_train, 170),
       "gpu_decode": (gpu_decode, 210), "gpu_token": (partial(gpu_train, names=["MoR-3, token"]), 50),
       "gpu_precision": (gpu_precision, 60)}

def gpu(bench):
    """Each part in a process of its own, so that one that takes too long, fails, or leaves the GPU in a bad
    state does not take the others along."""
    device = train.pick_device(bench.device)
    require(device.type == "cuda", f"--device={bench.device}: this part needs an NVIDIA GPU")
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    return in_turn(bench, GPU)

def in_turn(bench, parts):
    """Runs `python bench.py part` for each; returns 1 if one did not end well, else 0."""
    options = [f"--{f.name}={getattr(bench, f.name)}" for f in fields(bench) if getattr(bench, f.name) != ""]
    bad = []
    for name, (_, limit) in parts.items():
        try:
            print(f"\n## {name}, {limit} s at most", flush=True)
            code = subprocess.run([sys.executable, __file__, name, *options], timeout=limit).returncode
            bad += [f"{name} (exit code {code})"] if code else []
        except subprocess.TimeoutExpired:
            bad.append(f"{name} (stopped after {limit} s)")
    print(f"\nnot as expected, or not finished: {', '.join(bad) or 'nothing'}", flush=True)
    return int(bool(bad))

def main(argv):
    parts = {"cost": cost, "train": training, "generate": generation, "quality": quality, "look": look,
             "gpu": gpu, **{name: part for name, (part, _) in GPU.items()}}
    part, argv = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("", argv)
    require(not part or part in parts,
            f"{part} cannot be measured: choose {', '.join(parts)}, or nothing for some of each")
    given = train.parse(argv, __doc__, BenchConfig)
    auto = train.machine(train.pick_device(given.get("device", "auto")))[0]
    given.setdefault("compile", auto.get("compile", False))
    for signum in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        if signal.getsignal(signum) != signal.SIG_IGN:   # as Ctrl-C: no child is left alone
            signal.signal(signum, signal.default_int_handler)
    torch._dynamo.config.recompile_limit = 64   # to it all variants are one function; its limit is 8
    if part:
        model = {"cost": "360m", "quality": "tiny"}.get(part, auto.get("model", "tiny"))
        return parts[part](BenchConfig(**{"model": model, **given}))
    small = {**dict(rounds=3, steps=2, passes=24, max_steps=40, seeds=1, eval_rows=100), **given}
    with tempfile.TemporaryDirectory() as folder:
        cost(BenchConfig(**{"model": "360m", **small}))
        for part, out_dir in ((training, ""), (generation, ""), (quality, given.get("out_dir", folder))):
            part(BenchConfig(**{**small, "out_dir": out_dir}))

if __name__ == "__main__":
    train.guarded(main)

"""Measure, side by side, on the machine at hand: what a model costs, how fast it is and how good.

    python bench.py              all of the next four, small: under 4 minutes on two cores
    python bench.py cost         parameters, FLOPs and cache by formula, beside the paper's numbers; no timing
    python bench.py train        a training step of each variant, beside a plain Transformer's
    python bench.py generate     tokens a second of the engine, at equal slots and at equal KV memory
    python bench.py quality      losses of models trained alike: an hour on two cores
    python bench.py look         what a trained router does, and what unrolled layers have in common
    python bench.py gpu          what a GPU makes of attention, of decoding and of bfloat16
    python bench.py train --model=135m --batch_size=1      each part for another size

Variants take turns, so that a machine's moods are the same for all of them. A ratio is the median over the
turns, with the least and the greatest in brackets. Out come Markdown tables, and a JSON line for each row.
"""
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, fields, replace
from itertools import count
from pathlib import Path
from typing import Literal

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

import train
from data import python_source
from data.shards import val_batches
from mor import (Engine, MoR, MoRConfig, PRESETS, flops_per_token, generate, kv_bytes_per_token, n_params,
                 shares)


@dataclass
class BenchConfig:
    """What to measure, and for how long."""
    model: Literal[tuple(PRESETS)] = "tiny"  # sizes; of cost 360m, on an NVIDIA GPU of most parts
    batch_size: int = 0  # train: rows in a step; 0: as train.py chooses
    rounds: int = 7  # turns of each variant
    steps: int = 5  # train: steps in a turn
    passes: int = 40  # generate: passes of the shared block in a turn
    slots: int = 32  # generate: texts in flight
    quick: int = 0  # generate: texts are so many times shorter than 256 tokens; 0: by block_size
    max_steps: int = 1000  # quality: steps of each training
    seeds: int = 2  # quality: trainings of each model
    eval_rows: int = 800  # quality, look: rows of validation text
    out_dir: str = ""  # look, generate: a trained checkpoint; quality: where to train, out_study if empty
    data_dir: str = "data"  # where token files are built
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
        for f in fields(self):
            if f.type is int and getattr(self, f.name) < min(1, f.default):
                raise ValueError(f"{f.name}={getattr(self, f.name)} must be at least {min(1, f.default)}")
        plain = MoRConfig(**PRESETS[self.model])
        self.size = {name: getattr(self, name) or getattr(plain, name) for name in SIZE}


SIZE = tuple(PRESETS["tiny"])   # names of the options of size


def finish(device):
    """Wait for the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def seconds(device, f, n=1):
    """Seconds that a call of f takes, the mean of n, with the device done before and after."""
    finish(device)
    start = time.perf_counter()
    for _ in range(n):
        f()
    finish(device)
    return (time.perf_counter() - start) / n


def spread(values, digits=2):
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f} {max(values):.{digits}f}]"


def table(rows):
    """Print dicts with the same keys as a Markdown table, then as JSON lines."""
    print("\n| " + " | ".join(rows[0]) + " |\n|" + " --- |" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(f"{v:,.3g}" if isinstance(v, float) else str(v) for v in row.values()) + " |")
    print()
    for row in rows:
        print(json.dumps(row, ensure_ascii=False), flush=True)


# ------------------------------------------------------------------------------------------------------------
# cost

# Table 3 of the paper, for 16.5e18 FLOPs: parameters outside the embedding, tokens.
TABLE_3 = {"plain": "315M, 20B", "recursive-2": "167M, 20B", "recursive-3": "118M, 20B",
           "recursive-4": "98M, 19B", "MoR-2, expert": "167M, 27B", "MoR-3, expert": "118M, 30B",
           "MoR-4, expert": "98M, 30B", "MoR-3, expert, shared cache": "118M, 31B",
           "MoR-3, token": "118M, 30B"}


def cost(bench):
    """Parameters, forward FLOPs and bytes of cache per token by formula, beside what the paper says."""
    variants = {"plain": dict(n_rec=1), **{f"recursive-{n}": dict(n_rec=n, router="none") for n in (2, 3, 4)}}
    for router, sizes in (("expert", (2, 3, 4)), ("token", (3,))):
        for cache, name in (("recursion", ""), ("shared", ", shared cache")):
            variants |= {f"MoR-{n}, {router}{name}": dict(n_rec=n, router=router, cache=cache) for n in sizes}
    rows, plain, T = [], MoRConfig(**bench.size, n_rec=1), bench.size["block_size"]
    for name, options in tqdm(variants.items(), "cost"):
        c = MoRConfig(**bench.size, **options)
        paper, true, kv = flops_per_token(c, T, paper=True), flops_per_token(c, T), kv_bytes_per_token(c)
        depth, counted = count_kv(c)
        row = {"model": name, "parameters": f"{n_params(c, embedding=False) / 1e6:.1f}M",
               "layers": f"{c.n_unshared + c.n_shared} of {c.effective_depth}",
               "FLOPs as the paper": f"{paper / 1e6:,.1f}M",
               "/ plain": paper / flops_per_token(plain, T, paper=True),
               "all FLOPs": f"{true / 1e6:,.1f}M", "all / plain": true / flops_per_token(plain, T),
               "KV bytes": f"{kv:,.0f}", "KV / plain": kv / kv_bytes_per_token(plain),
               "KV counted at a depth": f"{counted:,.0f} at {depth:.2f}",
               "formula there": f"{kv_bytes_per_token(c, depth):,.0f}"}
        if bench.size == BenchConfig("360m").size:
            row |= {"tokens for 16.5e18": f"{16.5e9 / paper:.1f}B", "paper": TABLE_3.get(name, "")}
        rows.append(row)
    table(rows)
    table(table_2(bench))


@torch.inference_mode()
def count_kv(c):
    """Mean depth, and bytes of keys and values per token, counted in the log after a text of 300 tokens, in a
    model of as many layers that is only two numbers wide."""
    torch.manual_seed(0)
    narrow = dict(n_head=1, n_kv_head=1, n_embd=2, n_ff=1, vocab_size=999, block_size=300)
    arch = "random" if c.router == "expert" and c.routed else "linear"
    model, prompt = MoR(replace(c, **narrow, router_arch=arch)).eval(), torch.randint(999, (300,))
    text = generate(model, [prompt.tolist()], 1)[0]
    depth = model(prompt[None], causal=True)[2].health["mean_depth"].item()
    return depth, text.kv_entries / len(prompt) * 2 * c.n_kv_head * c.head_dim * 2


def table_2(bench):
    """The paper's ratios, which are those of the recursions alone; and those of the model, whose first and
    last layer save nothing."""
    rows = []
    for n in (2, 3, 4):
        for cache in ("recursion", "shared"):
            c = MoRConfig(**bench.size, n_rec=n, cache=cache)
            mean, square = sum(shares(c)) / n, sum(x * x for x in shares(c)) / n
            memory, read, attention = (1 / n, 1.0, mean) if cache == "shared" else (mean, mean, square)
            row = {"recursions": n, "cache": cache}
            for name, x in {"KV memory": memory, "KV read": read, "attention FLOPs": attention}.items():
                row[name] = x
                row[f"{name}, model"] = (c.n_unshared + c.n_shared * n * x) / c.effective_depth
            rows.append(row)
    return rows


# ------------------------------------------------------------------------------------------------------------
# train

def train_step(bench):
    """Training steps of train.py, data and optimizer included, of MoR and of a plain Transformer as deep."""
    device = train.pick_device(bench.device)
    base = dict(bench.size, device=bench.device, model=bench.model, data="python", batch_tokens=0, n_rec=1,
                max_steps=10**6, compile=bench.compile)
    base |= dict(batch_size=bench.batch_size) if bench.batch_size else {}
    variants = [(f"MoR-{n}, expert", dict(n_rec=n)) for n in (2, 3, 4)]
    variants += [("MoR-3, expert, shared cache", dict(n_rec=3, cache="shared")),
                 ("MoR-3, token", dict(n_rec=3, router="token")),
                 ("recursive-3", dict(n_rec=3, router="none"))]
    depths = [train.settle({**base, **options}, None)[0].effective_depth for _, options in variants]
    variants = [(f"plain, {depth} layers", dict(n_layer=depth)) for depth in sorted(set(depths))] + variants
    source, runs, memory = python_source.source("python", bench.data_dir), {}, {}
    used = torch.cuda.memory_allocated if device.type == "cuda" else lambda: 0
    for name, options in variants:
        before, (config, tc) = used(), train.settle({**base, **options}, None)
        runs[name] = run = train.Run(config, tc, source)
        warm = seconds(device, run.train_step)   # compiles
        memory[name] = used() - before
        run.train_step()
        print(f"{name}: {tc.batch_size} x {config.block_size} tokens, {tc.dtype}, compile={tc.compile}; the "
              f"first step took {warm:.1f} s", file=sys.stderr)
    times, peak = {name: [] for name in runs}, {}
    for _ in tqdm(range(bench.rounds), "train"):
        for name, run in runs.items():
            others = used() - memory[name]
            torch.cuda.reset_peak_memory_stats() if device.type == "cuda" else None
            times[name].append(seconds(device, run.train_step, bench.steps))
            peak[name] = torch.cuda.max_memory_allocated() - others if device.type == "cuda" else 0
    rows = []
    for name, run in runs.items():
        plain, c = f"plain, {run.config.effective_depth} layers", run.config
        speed = run.tc.batch_tokens / statistics.median(times[name])
        row = {"model": name, "parameters": f"{n_params(c) / 1e6:,.4g}M", "tokens/s": f"{speed:,.0f}",
               "time / plain": spread([a / b for a, b in zip(times[name], times[plain])]),
               "FLOPs / plain": flops_per_token(c, c.block_size)
               / flops_per_token(runs[plain].config, c.block_size)}
        if device.type == "cuda":
            row.update({"MFU": train.mfu(run, speed), "peak GB": peak[name] / 1e9})
        rows.append(row)
    table(rows)


# ------------------------------------------------------------------------------------------------------------
# generate

def ready(model, device):
    """The model as it generates here: in bfloat16 where that is fast, but for its router."""
    dtype = getattr(torch, train.machine(device)[0].get("dtype", "float32"))
    for name, part in model.to(device).named_children():
        part.to(torch.float32 if name == "router" else dtype)
    return model.eval()


def requests(mean):
    """Endless texts, as the paper has them: no prompt, Normal(mean, mean / 4) new tokens."""
    rng = random.Random(0)
    while True:
        yield [0], max(1, round(rng.gauss(mean, mean / 4))), rng.randrange(2**32)


def serve(engine, texts, passes):
    """Tokens a second over some passes of an engine whose queue is never empty."""
    before = Counter(engine.counts)
    for _ in range(passes):
        while len(engine.queue) < engine.log.slots:
            engine.submit(*next(texts))
        engine.step()
    return ((engine.counts["tokens"] - before["tokens"]) / (engine.counts["seconds"] - before["seconds"]))


def checked(model, bench):
    """Share of greedily written tokens that the forward without a cache finds likeliest too, up to rounding,
    and at the same depth. ValueError if it is low."""
    right, slack = [], 1e-3 if model.wte.weight.dtype == torch.float32 else 2e-2
    for text in generate(model, [[0]] * 4, 24, temperature=0, compile=bench.compile):
        ids = torch.tensor(text.prompt + text.tokens, device=model.wte.weight.device)
        with torch.inference_mode():
            logits, _, routing = model(ids[None, :-1], causal=True)
        gap = logits[0].amax(dim=1) - logits[0].gather(1, ids[1:, None]).squeeze(1)
        right += [g < slack and a == b
                  for g, a, b in zip(gap.tolist(), routing.depth[0].tolist(), text.depths)]
    if sum(right) < 0.95 * len(right):
        raise ValueError(f"of {len(right)} tokens, the forward without a cache would write only {sum(right)}")
    return sum(right) / len(right)


def stopwatch(engine, texts, passes, device):
    """Milliseconds in a call of the block and of the head, and the share of all time that goes into the head
    and (uncompiled) into writing keys and values. Waits for the device at each call: not for speed."""
    spent, calls, before, whole = Counter(), Counter(), Counter(engine.counts), (engine.block, engine.head)

    def timed(name, f):
        def call(*args):
            y = []
            spent[name] += seconds(device, lambda: y.append(f(*args)))
            calls[name] += 1
            return y[0]
        return call
    engine.block, engine.head = timed("block", engine.block), timed("head", engine.head)
    if not engine.compile:
        engine.log.write = timed("write", engine.log.write)
    serve(engine, texts, passes)
    engine.block, engine.head = whole
    vars(engine.log).pop("write", None)
    total = engine.counts["seconds"] - before["seconds"]
    return ([1e3 * spent[name] / max(1, calls[name]) for name in ("block", "head")],
            (spent["head"] + spent["write"]) / total)


def contestants(bench, device):
    """Models by name. An untrained MoR goes deeper by chance, as often as training keeps a token; that of
    out_dir routes as it has learned. Plain ones are as deep as these."""
    size, chance, trained = bench.size, dict(router_arch="random"), {}
    if bench.out_dir:
        model = train.load_checkpoint(bench.out_dir)["model"]
        size = {name: getattr(model.config, name) for name in SIZE}
        trained = {f"MoR-{model.config.n_rec}, trained": model}
    models = {f"MoR-{n}": MoR(MoRConfig(**size, **chance, n_rec=n)) for n in (2, 3, 4)}
    models |= {"MoR-3, shared cache": MoR(MoRConfig(**size, **chance, n_rec=3, cache="shared")), **trained}
    depths = sorted({model.config.effective_depth for model in models.values()})
    plain = {f"plain, {d} layers": MoR(MoRConfig(**{**size, "n_rec": 1, "n_layer": d})) for d in depths}
    return {name: ready(model, device) for name, model in (plain | models).items()}


def generation(bench):
    """Tokens a second of the engine: with as many slots as `plain`, and as much room for keys and values."""
    device = train.pick_device(bench.device)
    torch.manual_seed(0)
    models, engines, kv, good = contestants(bench, device), {}, {}, {}
    plain = {name: f"plain, {model.config.effective_depth} layers" for name, model in models.items()}
    mean = 256 // (bench.quick or max(1, 512 // models["MoR-3"].config.block_size))

    def enter(name, slots):
        """An engine with room for texts of mean + 4 deviations, which are twice the mean, at due depth."""
        c = models[name].config
        depth = sum(shares(c)) if c.routed else c.n_rec
        engine = Engine(models[name], slots, 2 * mean, round(2 * mean * depth), compile=bench.compile)
        engines[name, slots] = engine, requests(mean)
        kv[name] = sum(x.nbytes for pair in engine.log.kv.values() for x in pair) / engine.log.slots
    for name, model in models.items():
        good[name] = checked(model, bench)
        enter(name, bench.slots)
    for name in models:
        slots = int(bench.slots * kv[plain[name]] / kv[name])
        if slots > bench.slots:
            enter(name, slots)
    enter(plain["MoR-3"], slots=max(n for name, n in engines if name == "MoR-3"))   # what slots alone give
    for (_, slots), (engine, texts) in engines.items():   # until texts of all ages are in flight
        while engine.counts["tokens"] < slots * mean:
            serve(engine, texts, bench.passes)
        engine.counts.clear()
    speeds, rows, bare = {key: [] for key in engines}, [], {}
    for _ in tqdm(range(bench.rounds), "generate"):
        for key, (engine, texts) in engines.items():
            speeds[key].append(serve(engine, texts, bench.passes))
    for (name, slots), (engine, texts) in engines.items():
        key, base, c = (name, slots), (plain[name], bench.slots), models[name].config
        n = Counter(engine.counts)
        (block, head), extra = stopwatch(engine, texts, 2 * bench.passes, device)
        depth, bare[key] = n["recursions"] / n["tokens"], statistics.median(speeds[key]) / (1 - extra)
        rows.append({
            "model": name, "slots": slots, "KV MB": kv[name] * slots / 1e6,
            "tokens/s": f"{statistics.median(speeds[key]):,.0f}",
            "speed / plain": spread([a / b for a, b in zip(speeds[key], speeds[base])]),
            "without KV writes, head": bare[key] / bare[base], "mean depth": depth,
            "layers / plain": (c.n_unshared + c.n_shared * depth) / c.effective_depth,
            "passes a token": n["block_calls"] / n["tokens"], "head calls": n["exit_calls"] / n["tokens"],
            "pass, ms": block, "head, ms": head, "KV entries": f"{n['kv_entries']:,}", "checked": good[name]})
    print(f"{device}, {model.wte.weight.dtype}; texts of Normal({mean}, {mean / 4:g}) tokens, no prompt")
    table(rows)
    growth(bench, device)


GROWTH = [(128, 1), (128, 8), (128, 32), (128, 128), (512, 32), (2048, 32)]   # context, slots


def growth(bench, device):
    """What a token costs as contexts grow, and as slots do."""
    rows, new = [], bench.rounds * bench.passes + 40
    size = dict(bench.size, block_size=max(GROWTH)[0] + new)
    pair = [ready(MoR(MoRConfig(**size, **options)), device)
            for options in (dict(n_rec=1), dict(n_rec=3, router_arch="random"))]
    for context, slots in tqdm(GROWTH, "context, slots"):
        engines = [Engine(model, slots, context + new, compile=bench.compile) for model in pair]
        # Not all at the same position: there random routing would have them go as deep as each other.
        texts, times = (([0] * (context - i % 32), new, i) for i in count()), []
        for engine in engines:
            serve(engine, texts, 20)
        for _ in range(bench.rounds):
            times.append([1e3 / serve(engine, texts, bench.passes) for engine in engines])
        rows.append({"context": context, "slots": slots,
                     **{f"{name}, ms a token": statistics.median(column)
                        for name, column in zip(("plain", "MoR-3"), zip(*times))},
                     "time / plain": spread([b / a for a, b in times])})
    table(rows)


# ------------------------------------------------------------------------------------------------------------
# quality

def study(bench):
    """The trainings of `quality` as options of train.py: of equal tokens, then of equal FLOPs."""
    c, plain = MoRConfig(**bench.size, n_rec=3), MoRConfig(**bench.size, n_rec=1)
    small, recursive = f"--n_rec=1 --n_layer={c.n_unshared + c.n_shared}", "--n_rec=3 --router=none"
    mor = {"MoR, expert": "--n_rec=3", "MoR, expert, shared cache": "--n_rec=3 --cache=shared"}
    runs = {"plain": "--n_rec=1", "plain, as few parameters": small, "recursive, middle_cycle": recursive,
            **{f"recursive, {sharing}": f"{recursive} --sharing={sharing}"
               for sharing in ("cycle", "middle_sequence", "sequence")},
            **mor, "MoR, token": "--n_rec=3 --router=token", "MoR, random": "--n_rec=3 --router_arch=random"}
    tc = train.settle(dict(model=bench.model, n_rec=1, device=bench.device), None)[1]
    flops = flops_per_token(plain, c.block_size, paper=True) * tc.batch_tokens * bench.max_steps
    return ({name: f"{options} --max_steps={bench.max_steps}" for name, options in runs.items()}
            | {f"{name}, equal FLOPs": f"{options} --flops={flops:.4g}"
               for name, options in {"plain, as few parameters": small, **mor}.items()})


def trained(argv, out, threads):
    """Have `python train.py argv` fill the folder out: from the start, from where it stopped, or not at all
    if it is complete. Returns settings and last evaluation."""
    log, argv = out / "log.jsonl", [*argv, f"--out_dir={out}"]
    lines = log.read_text().splitlines() if log.exists() else []
    if lines and json.loads(lines[0])["argv"] != argv:
        raise ValueError(f"{out} holds another run: choose another --out_dir")
    if not lines or "val_causal" not in lines[-1]:
        resume = [f"--resume={out}"] if (out / "ckpt.pt").exists() else []
        run = subprocess.run([sys.executable, train.__file__, *argv, *resume], capture_output=True, text=True,
                             env={**os.environ, "OMP_NUM_THREADS": threads})
        if run.returncode:
            raise ValueError(f"train.py {' '.join(argv)} ended with: {run.stderr.strip()[-200:]}")
        lines = log.read_text().splitlines()
    return json.loads(lines[0]), json.loads(lines[-1])


def train_all(argvs, device):
    """Results of all trainings, by key. On a CPU each has one core: tiny models gain little from a second."""
    workers = torch.get_num_threads() if device.type == "cpu" else 1
    threads = "1" if workers > 1 else str(torch.get_num_threads())
    with ThreadPoolExecutor(workers) as pool:
        jobs = {key: pool.submit(trained, *job, threads) for key, job in argvs.items()}
        try:
            for job in tqdm(as_completed(jobs.values()), "quality", len(jobs)):
                job.result()
        except BaseException:   # those at work save what they have
            pool.shutdown(cancel_futures=True)
            raise
    return {key: job.result() for key, job in jobs.items()}


def quality(bench):
    """Losses of models trained alike; and what some of them do when they have to leave early."""
    runs, device, standard = study(bench), train.pick_device(bench.device), BenchConfig(bench.model).size
    seeds, top = [1337 + i for i in range(bench.seeds)], Path(bench.out_dir or "out_study")
    common = [f"--model={bench.model}", f"--device={bench.device}", f"--data_dir={bench.data_dir}",
              f"--eval_rows={bench.eval_rows}"]
    common += [f"--{name}={value}" for name, value in bench.size.items() if value != standard[name]]
    out = {(name, seed): top / f"{name.replace(', ', '-').replace(' ', '_')}-{seed}"
           for seed in seeds for name in runs}
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
                     "tokens": f"{tokens / 1e6:.2f}M",
                     "FLOPs": f"{tokens * flops_per_token(c, c.block_size, paper=True):.2e}",
                     "loss, causal": spread(causal, 3), "loss, topk": spread(topk, 3) if topk[0] else "",
                     "causal - plain": spread([a - b for a, b in zip(causal, plain)], 3),
                     "mean depth": f"{last['val_mean_depth']:.2f}" if c.routed else "",
                     "options": f"`{options}`"})
    print(f"python train.py {' '.join(common)} --seed={' or '.join(map(str, seeds))}, and these options:")
    table(rows)
    four = ("recursive, middle_cycle", "MoR, expert", "MoR, expert, shared cache", "MoR, token")
    loaded = {name: train.load_checkpoint(out[name, seeds[0]]) for name in four}
    models = {name: checkpoint["model"].to(device).eval() for name, checkpoint in loaded.items()}
    batches = validation(loaded["MoR, expert"], bench, device)
    table([{"loss, causal": name, **{f"max_depth={d}": f"{causal_loss(model, batches, max_depth=d)[0]:.3f}"
                                     for d in range(1, c.n_rec + 1)}} for name, model in models.items()])
    table(dial(models["MoR, expert"], batches, bench))
    look(replace(bench, out_dir=str(out["MoR, expert", seeds[0]])))


def validation(checkpoint, bench, device):
    """Batches of the text that a checkpoint was validated with."""
    tc = replace(train.TrainConfig(**checkpoint["train_config"]), data_dir=bench.data_dir)
    T = checkpoint["config"]["block_size"]
    return val_batches(train.find_source(tc).val, 8, T, bench.eval_rows, device)


@torch.inference_mode()
def causal_loss(model, batches, **dials):
    """Loss and mean depth, routed as in generation."""
    routings = [model(x, y, causal=True, **dials)[2] for x, y in batches]
    return (statistics.fmean(routing.losses["lm"].item() for routing in routings),
            statistics.fmean(routing.health["mean_depth"].item() for routing in routings))


def dial(model, batches, bench):
    """Loss, depth and speed at thresholds from 0.1 to 0.9."""
    engines = {t: Engine(model, bench.slots, threshold=t) for t in (0.1, 0.3, 0.5, 0.7, 0.9)}
    texts, speeds, rows = requests(model.config.block_size // 2), {t: [] for t in engines}, []
    for engine in engines.values():
        serve(engine, texts, 5 * bench.passes)
    for _ in tqdm(range(bench.rounds), "dial"):
        for t, engine in engines.items():
            speeds[t].append(serve(engine, texts, bench.passes))
    for t in engines:
        loss, depth = causal_loss(model, batches, threshold=t)
        rows.append({"threshold": t, "loss, causal": f"{loss:.3f}", "mean depth": f"{depth:.2f}",
                     "tokens/s": f"{statistics.median(speeds[t]):,.0f}",
                     "speed / that of 0.5": spread([a / b for a, b in zip(speeds[t], speeds[0.5])])})
    return rows


# ------------------------------------------------------------------------------------------------------------
# look

KINDS = re.compile(r"(?P<new_line>\n)|(?P<indentation>(?<=\n) +)|(?P<space> )|(?P<opening_bracket>[(\[{])|"
                   r"(?P<closing_bracket>[)\]}])|(?P<digit>\d)|(?P<first_of_a_word>(?<![^\W_])[^\W\d_])|"
                   r"(?P<later_in_a_word>[^\W_])|(?P<other>.)", re.DOTALL)


def bars(values):
    """Values as a row of bars, the greatest of which is the highest."""
    return "`" + "".join(" ▁▂▃▄▅▆▇█"[math.ceil(8 * v / max(values))] for v in values) + "`"


@torch.inference_mode()
def look(bench):
    """Of a trained model: scores, health, depth by kind of byte, and what unrolled layers have in common."""
    checkpoint, device = train.load_checkpoint(bench.out_dir or "out"), train.pick_device(bench.device)
    model, c = checkpoint["model"].to(device).eval(), checkpoint["model"].config
    if not c.routed:
        raise ValueError(f"{checkpoint['path']} has no router to look at: choose a model with one")
    batches = validation(checkpoint, bench, device)
    ids, routings = torch.cat([x for x, _ in batches]), [model(x, causal=True)[2] for x, _ in batches]
    depth, z = (torch.cat([getattr(r, name) for r in routings]) for name in ("depth", "logits"))
    rows, p = [], z.softmax(dim=2) if c.router == "token" and c.gate != "sigmoid" else z.sigmoid()
    for r in range(c.n_rec):
        asked = p[:, :, r][~z[:, :, r].isnan()].float().cpu()
        rows.append({"recursion": r + 1, "tokens asked": len(asked),
                     "went as deep": (depth > r).float().mean().item(), "mean score": asked.mean().item(),
                     "scores, 0 to 1": bars(torch.histc(asked, 20, 0, 1).tolist())})
    table(rows)
    health = train.evaluate(model, batches, "float32")
    table([{name: str([round(v, 3) for v in value]) if isinstance(value, list) else value
            for name, value in health.items()}])
    if checkpoint["tokenizer"] == "bytes":
        table(by_kind(ids.tolist(), depth.tolist(), c.n_rec))
    table(unrolled(model, batches[0][0]))


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
    """Mean norms of hidden state, key and value in each unrolled layer; and their cosine with those of each
    layer up to it, the first digit behind the point, over the tokens that both layers have."""
    seen, written, turns = [], [], Counter()

    def hook(block, args, y):
        _, rows, layer = args
        turns[layer] += 1
        name = layer if isinstance(layer, str) else f"{turns[layer]}.{layer + 1}"
        vectors = dict(zip(("hidden", "key", "value"), (y, *(written.pop()[2:] if written else ()))))
        seen.append((name, len(rows.flat), {   # (B*T, width), NaN for tokens that have left
            what: x.new_full((idx.numel(), x[0].numel()), math.nan).index_copy(0, rows.flat, x.flatten(1))
            for what, x in vectors.items()}))
    hooks = [block.register_forward_hook(hook) for block in [*model.first, *model.shared, *model.last]]
    model.states(idx, torch.arange(idx.numel(), device=idx.device), True, None, 0.5, written=written)
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
                "." if math.isnan(v) else str(max(0, min(9, int(10 * v + 1e-3)))) for v in cosines) + "`"
        rows.append(row)
    return rows


# ------------------------------------------------------------------------------------------------------------
# gpu

def attention_forms(bench, device):
    """Shared keys and values, forward and backward: queries back on the grid of all positions, against a
    mask."""
    c, B, rows = MoRConfig(**PRESETS[bench.model]), bench.batch_size or 16, []
    T, H, G, D = c.block_size, c.n_head, c.n_kv_head, c.head_dim
    like = dict(device=device, dtype=torch.bfloat16, requires_grad=True)
    new = lambda heads, n: torch.randn(B, heads, n, D, **like)
    for k in (2 * T // 3, T // 3):
        index = torch.stack([torch.randperm(T, device=device)[:k].sort()[0] for _ in range(B)])
        mask, cell = index[:, None, :, None] >= torch.arange(T, device=device), index[:, None, :, None]
        q, keys, values = new(H, k), new(G, T), new(G, T)

        def grid():
            cells = cell.expand(B, H, k, D)
            full = q.new_zeros(B, H, T, D).scatter(2, cells, q)
            y = F.scaled_dot_product_attention(full, keys, values, is_causal=True, enable_gqa=True)
            y.gather(2, cells).sum().backward()

        def masked():
            wide = (x.repeat_interleave(H // G, dim=1) for x in (keys, values))   # as masked kernels want it
            with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):   # as cuDNN's may give NaN
                F.scaled_dot_product_attention(q, *wide, mask).sum().backward()
        grid(), masked()
        pairs = [(seconds(device, grid, 10), seconds(device, masked, 10)) for _ in range(bench.rounds)]
        rows.append({f"queries to {T} keys": k, "grid, ms": 1e3 * min(a for a, _ in pairs),
                     "mask, ms": 1e3 * min(b for _, b in pairs),
                     "grid / mask": spread([a / b for a, b in pairs])})
    return rows


def precision(bench, device):
    """Losses of 20 steps, compiled in bfloat16 against uncompiled in float32, from the same weights."""
    source, losses = python_source.source("python", bench.data_dir), {}
    for options in (dict(dtype="float32", compile=False), dict(dtype="bfloat16", compile=True)):
        given = dict(model=bench.model, n_rec=3, data="python", batch_size=bench.batch_size or 8,
                     batch_tokens=0, max_steps=1000)
        run = train.Run(*train.settle({**given, **options, "device": str(device)}, None), source)
        torch.set_float32_matmul_precision("high" if options["compile"] else "highest")
        losses[options["dtype"]] = [run.train_step()["lm"].item() for _ in range(20)]
    gap = max(abs(a - b) for a, b in zip(*losses.values()))
    return [{"step": s, **{f"loss, {dtype}": values[s - 1] for dtype, values in losses.items()},
             "greatest gap of 20": gap} for s in (1, 10, 20)]


def gpu(bench):
    """Checks of what this project takes for granted about a GPU."""
    device = train.pick_device(bench.device)
    if device.type != "cuda":
        raise ValueError(f"--device={bench.device}: this part needs an NVIDIA GPU")
    for part in (attention_forms, precision):
        table(part(bench, device))


def main(argv):
    parts = {"cost": cost, "train": train_step, "generate": generation, "quality": quality, "look": look,
             "gpu": gpu}
    part, argv = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("", argv)
    if part and part not in parts:
        raise ValueError(f"{part} cannot be measured: choose {', '.join(parts)}, or nothing for some of each")
    given = train.parse(argv, __doc__, BenchConfig)
    auto = train.machine(train.pick_device(given.get("device", "auto")))[0]
    given.setdefault("compile", auto.get("compile", False))
    torch._dynamo.config.recompile_limit = 64   # all variants are one function to it, and 8 its limit
    if part:
        model = {"cost": "360m", "quality": "tiny"}.get(part, auto.get("model", "tiny"))
        return parts[part](BenchConfig(**{"model": model, **given}))
    with tempfile.TemporaryDirectory() as folder:
        small = dict(rounds=3, steps=2, passes=20, max_steps=40, seeds=1, eval_rows=100)
        cost(BenchConfig(**{"model": "360m", **small, **given}))
        train_step(BenchConfig(**{**small, **given}))
        generation(BenchConfig(**{**small, **given}))
        quality(BenchConfig(**{**small, **given, "out_dir": folder}))


if __name__ == "__main__":
    train.guarded(main)

"""Measure, side by side, on the machine at hand.

    python bench.py train                        a training step of each variant, beside a plain Transformer's
    python bench.py train --model=360m --batch_size=32 --steps=10 --rounds=6
    python bench.py gpu                          what a GPU makes of attention, of decoding and of bfloat16

In `train`, variants take turns, so that a machine's moods are the same for all of them. A ratio is the median
over the turns, with the least and the greatest in brackets. Out come Markdown tables, and a JSON line for
each row.
"""
import json
import statistics
import sys
import time
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import train
from data import python_source
from mor import Engine, MoR, MoRConfig, PRESETS, flops_per_token, n_params


@dataclass
class BenchConfig:
    """What to measure, and for how long."""
    model: Literal[tuple(PRESETS)] = "tiny"  # sizes; 360m on an NVIDIA GPU
    batch_size: int = 0  # rows in a step; 0: as train.py chooses
    rounds: int = 7  # turns of each variant
    steps: int = 5  # training steps in a turn
    data_dir: str = "data"  # where token files are built
    device: str = "auto"  # cpu, cuda, mps; auto: the best there is

    def __post_init__(self):
        for f in fields(self):
            if f.type is int and getattr(self, f.name) < min(1, f.default):
                raise ValueError(f"{f.name}={getattr(self, f.name)} must be at least {min(1, f.default)}")


def seconds(device, f, n=1):
    """Seconds that a call of f takes, the mean of n, with the device done before and after."""
    finish = torch.accelerator.synchronize if device.type != "cpu" else lambda: None
    finish()
    start = time.perf_counter()
    for _ in range(n):
        f()
    finish()
    return (time.perf_counter() - start) / n


def spread(values):
    return f"{statistics.median(values):.2f} [{min(values):.2f} {max(values):.2f}]"


def table(rows):
    """Print dicts with the same keys as a Markdown table, then as JSON lines."""
    print("\n| " + " | ".join(rows[0]) + " |\n|" + " --- |" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(f"{v:,.3g}" if isinstance(v, float) else str(v) for v in row.values()) + " |")
    print()
    for row in rows:
        print(json.dumps(row))


def train_step(bench):
    """Training steps of train.py, data and optimizer included, of MoR and of a plain Transformer as deep."""
    device = train.pick_device(bench.device)
    base = dict(device=bench.device, model=bench.model, data="python", batch_tokens=0, max_steps=10**6,
                n_rec=1, **dict(batch_size=bench.batch_size) if bench.batch_size else {})
    variants = [(f"MoR-{n}, expert", dict(n_rec=n)) for n in (2, 3, 4)]
    variants += [("MoR-3, expert, shared cache", dict(n_rec=3, cache="shared")),
                 ("MoR-3, token", dict(n_rec=3, router="token")),
                 ("recursive-3", dict(n_rec=3, router="none"))]
    depths = [train.settle({**base, **options}, None)[0].effective_depth for _, options in variants]
    variants = [(f"plain, {depth} layers", dict(n_layer=depth)) for depth in sorted(set(depths))] + variants
    torch._dynamo.config.recompile_limit = 64   # all variants are one function to it, and 8 its limit
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
    for _ in range(bench.rounds):
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


def decode_forms(bench, device):
    """Decoding by calls as they are, against compiled ones of fixed shapes."""
    model = MoR(MoRConfig(**PRESETS[bench.model], n_rec=3)).to(device, torch.bfloat16).eval()
    model.router.to(torch.float32)
    rows = []
    for slots in (1, 32):
        times = {}
        for compiled in (False, True):
            engine = Engine(model, slots, 128, compile=compiled)
            for _ in range(2 * slots):   # the first half warms up, and compiles
                engine.submit([0], 100, 0)
            start = {}
            for _ in engine.run():
                if engine.counts["tokens"] >= 100 * slots and not start:
                    start = dict(engine.counts, clock=time.perf_counter())
            passes = engine.counts["block_calls"] - start["block_calls"]
            times[compiled] = (time.perf_counter() - start["clock"]) / passes
        rows.append({"decoding, slots": slots, "ms a pass": 1e3 * times[False],
                     "ms a pass, compiled": 1e3 * times[True], "compiled / not": times[True] / times[False]})
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
    for part in (attention_forms, decode_forms, precision):
        table(part(bench, device))


def main(argv):
    parts = {"train": train_step, "gpu": gpu}
    if argv[:1] in (["-h"], ["--help"]):
        train.parse(argv, __doc__, BenchConfig)
    if not argv or argv[0] not in parts:
        raise ValueError(f"name what to measure: {' or '.join(parts)}")
    given = train.parse(argv[1:], __doc__, BenchConfig)
    auto = train.machine(train.pick_device(given.get("device", "auto")))[0]
    parts[argv[0]](BenchConfig(**{"model": auto.get("model", "tiny"), **given}))


if __name__ == "__main__":
    train.guarded(main)

"""Train a Mixture-of-Recursions.

    python train.py --n_rec=3                              on this machine's defaults; then: python sample.py
    python train.py --n_rec=1 --out_dir=out_plain          the plain Transformer that it is compared with
    python train.py --router=token --cache=shared --out_dir=out_token
    python train.py --data=my_novel.txt --max_steps=2e3 --out_dir=out_novel
    python train.py --model=360m --flops=16.5e18           the paper's sizes stream FineWeb-Edu
    torchrun --nproc_per_node=8 train.py --model=360m      on several GPUs
    python train.py --resume=out                           continue a run that was stopped
    python train.py --help                                 every option, its default and what it does
"""
from data import system   # first of all, see there

if __name__ == "__main__":
    system.prepare()

import argparse
import difflib
import inspect
import json
import math
import os
import re
import shlex
import signal
import sys
import textwrap
import time
import warnings
import zipfile
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Literal, get_args, get_origin

import numpy as np
import torch
from torch import distributed as dist, nn
from torch.nn.parallel import DistributedDataParallel

from data import fineweb_edu, pretrained, python_source
from data.shards import Reader, val_batches
from data.system import cannot_write, lock, mute, remove, replacing
from data.tokenizer import Tokenizer
from mor import LossFreeRouter, MoR, MoRConfig, PRESETS, check_fields, flops_per_token, n_params, require

def path(text):
    """The type of an option that names a file or folder: ~ is a home."""
    full = os.path.expanduser(text)
    if full.startswith("~"):
        raise argparse.ArgumentTypeError(f"{text!r} names a user who is not here: write ./{text} for a file")
    return full

@dataclass
class TrainConfig:
    """How to train. Defaults are those of tiny on two CPU cores; `machine` and `recipe` have others."""
    model: Literal[tuple(PRESETS)] = "tiny"  # sizes to start from, and recipe; 360m on an NVIDIA GPU
    data: path = "python"  # python: the source of its library; fineweb_edu, fineweb_edu_10b; a file or folder
    data_dir: path = "data"  # where token files are built, and shards kept
    keep_shards: int = 0  # keep this many shards on disk, 2 or more, and delete the others; 0: keep all
    out_dir: path = "out"  # where checkpoints and log.jsonl go
    init_from: path = ""  # a plain model to start from: a published Llama, folder or name on the hub; or ours
    init: Literal["step", "upper", "lower", "average"] = "step"  # its layers that the shared block starts as
    resume: path = ""  # a checkpoint, or a folder with a ckpt.pt, to go on from
    max_steps: int = 2200  # optimizer steps in all
    flops: float = 0.0  # instead of max_steps: forward FLOPs as the paper counts them, as in 16.5e18
    batch_size: int = 8  # rows of block_size tokens in a micro-batch, on each device
    batch_tokens: int = 0  # tokens in a step, by gradient accumulation; 0: one micro-batch on each device
    learning_rate: float = 5e-3  # peak of the schedule
    schedule: Literal["wsd", "cosine"] = "wsd"  # wsd: up, plateau, down to 0 over the last 20 % of the steps
    warmup_steps: int = -1  # steps from 0 to the peak; -1: 5 % of the steps
    capacity_warmup: int = 0  # expert-choice: steps over which capacities shrink from all tokens to theirs
    keep_steps: str = ""  # steps whose checkpoints are kept as step_N.pt to branch off from, as in 400,800
    eval_interval: int = 550  # steps between evaluations; each saves ckpt.pt
    eval_rows: int = 400  # rows of validation text in an evaluation
    log_interval: int = 50  # steps between log lines
    seed: int = 1337  # of the weights and of the order of the data
    device: str = "auto"  # cpu, cuda, cuda:1, mps; auto: the best there is
    dtype: Literal["float32", "bfloat16"] = "float32"  # of matrix products; bfloat16 where that is fast
    compile: bool = False  # torch.compile the training step, except with router=token; true on an NVIDIA GPU

    def __post_init__(self):
        check_fields(self, most=dict(batch_tokens=10**7), seed=0, warmup_steps=0, keep_shards=2)
        require(self.data and self.data_dir and self.out_dir,
                f"data={self.data}, data_dir={self.data_dir} and out_dir={self.out_dir} must not be empty")
        require(self.init_from or self.init == "step", f"init={self.init} needs an --init_from")
        require(self.learning_rate > 0, f"learning_rate={self.learning_rate} must be a positive number")
        require(self.seed < 2**32, f"seed={self.seed} must be 0 to {2**32 - 1}")
        require(re.fullmatch(r"(\d+(,\d+)*)?", self.keep_steps),
                f"keep_steps={self.keep_steps} must be steps, as in 400,800")

    def grad_accum(self, block_size, world):
        """Micro-batches of a step on each of `world` devices."""
        tokens = self.batch_size * block_size * world
        require(self.batch_tokens % tokens == 0,
                f"batch_tokens={self.batch_tokens} must be a multiple of {tokens}: batch_size="
                f"{self.batch_size} rows of {block_size} tokens on {world} device(s)")
        return max(1, self.batch_tokens // tokens)

# ---- Training ----------------------------------------------------------------------------------------------

def lr_at(step, config):
    """Learning rate of a step (from 0): wsd is the paper's trapezoid, cosine ends at a tenth of the peak."""
    warmup = config.warmup_steps
    up = (step + 1) / max(1, warmup)
    if config.schedule == "wsd":
        return config.learning_rate * min(1.0, up, (config.max_steps - step) / (0.2 * config.max_steps))
    progress = max(0, step - warmup) / max(1, config.max_steps - warmup)
    return config.learning_rate * min(up, 0.1 + 0.45 * (1 + math.cos(math.pi * progress)))

def capacity_at(step, config, warmup):
    """Tokens of a row that each recursion keeps at a step (from 0) of a capacity warm-up, which the paper's
    appendix tried: it starts with all T and comes down on a cosine, in steps of T/16, so that compiled code
    meets few sizes."""
    # DIFFERS: counted in steps; the released code counts forward calls, which accumulation multiplies.
    T, extra = config.block_size, 0.5 * (1 + math.cos(math.pi * min(1.0, (step + 1) / max(1, warmup))))
    unit = max(1, T // 16)
    return tuple(min(T, k + math.ceil((T - k) * extra / unit) * unit) for k in config.capacity(T))

def make_optimizer(model, config):
    """AdamW with weight decay on matrices only; `scale` is a group's share of the learning rate.

    As in the released code, an auxiliary router learns ten times as fast: no other weight depends on it.
    """
    groups = {}
    for name, p in model.named_parameters():
        key = ("weight_decay", 0.1 if p.dim() > 1 else 0.0), ("scale", 10.0 if "aux_score" in name else 1.0)
        groups.setdefault(key, []).append(p)
    groups = [dict(key, params=params) for key, params in groups.items()]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)

def origins(config, n_layer, init):
    """For each shared layer, the layers (from 0) of a plain Transformer whose mean it starts as."""
    # DIFFERS: where n_rec does not divide the depth, the released code has fewer layers, and we more.
    n, b, first = config.n_rec, config.n_shared, config.n_unshared // 2
    end = n_layer - first   # of those in the middle
    if init == "step":
        return [[layer] for layer in np.linspace(first, end - 1, b).round().astype(int)]
    if init == "average":   # of the layers that it stands in for
        return [range(first, end)[i::b] if config.cyclic else range(first, end)[i * n:][:n] for i in range(b)]
    return [[i + (first if init == "lower" else end - b)] for i in range(b)]

@torch.no_grad()
def uptrained(plain, config, init):
    """A new MoR that starts from a plain model (the paper's Table 12). Only its routers are new."""
    model, layers = MoR(config), [*plain.first, *plain.shared, *plain.last]

    def copy(part, *others):
        for p, *values in zip(part.parameters(), *(other.parameters() for other in others)):
            p.copy_(sum(values) / len(values))
    ends = [layers[:1], layers[-1:]] if config.n_unshared else [[], []]
    blocks = [*zip(model.first, ends[0]), *zip(model.last, ends[1])]
    blocks += [(block, *(layers[i] for i in ids))
               for block, ids in zip(model.shared, origins(config, len(layers), init))]
    for block, *others in [(model.wte, plain.wte), (model.norm, plain.norm), *blocks]:
        copy(block, *others)
    return model

class Loss(nn.Module):
    """The model in training, without its logits: even if nobody uses them, autograd makes a gradient for all
    that compiled code returns, here 6.5 GB for 16 rows of 360m."""
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y, k):   # loss and Routing
        return self.model(x, y, causal=False, k=k)[1:]

class Run:
    """One training run: model, optimizer, data and step, all that a checkpoint holds."""
    def __init__(self, config, tc, source, checkpoint=None, plain=None):
        self.config, self.tc, self.source, self.step = config, tc, source, 0
        self.reading = False   # is a step waiting for its data?
        self.device = pick_device(tc.device)
        self.rank, self.world = init_distributed(self.device)
        self.grad_accum = tc.grad_accum(config.block_size, self.world)
        # TF32 on a GPU, but in a bfloat16 run, where only the router would use it, unlike in generation.
        torch.set_float32_matmul_precision("high" if tc.dtype == "float32" else "highest")
        warnings.filterwarnings("ignore", "TensorFloat32")   # which the compiler recommends
        torch.manual_seed(tc.seed)
        new = lambda: uptrained(plain, config, tc.init) if plain else MoR(config)
        self.model = (checkpoint["model"] if checkpoint else new()).to(self.device).train()
        self.optimizer = make_optimizer(self.model, tc)
        if checkpoint:
            self.step = checkpoint["step"]
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            torch.set_rng_state(checkpoint["rng"])
        if self.rank:   # each process draws its own noise (router_arch=random)
            torch.manual_seed((tc.seed + self.rank + 1000 * self.step) % 2**32)
        self.reader = Reader(source.train, tc.batch_size, config.block_size, tc.seed, self.device,
                             checkpoint and checkpoint["reader"], self.rank, self.world)
        self.forward = Loss(self.model)
        if tc.compile:   # for the shapes that there are; a capacity warm-up has many
            self.forward = torch.compile(self.forward, fullgraph=True,
                                         dynamic=None if tc.capacity_warmup else False)
        if self.world > 1:
            torch._dynamo.config.optimize_ddp = False   # gradients of shared weights come last: one graph
            self.forward = DistributedDataParallel(self.forward, gradient_as_bucket_view=True)

    def save(self, name):
        require(all(p.isfinite().all() for p in self.model.parameters()),
                f"weights at step {self.step} are not finite and not saved: start again with --learning_rate "
                f"below {self.tc.learning_rate}")
        state = dict(config=asdict(self.config), train_config=asdict(self.tc), step=self.step,
                     model=self.model.state_dict(), optimizer=self.optimizer.state_dict(),
                     reader=self.reader.state, rng=torch.get_rng_state(),
                     tokenizer=self.source.tokenizer, data=self.source.name)
        if self.rank == 0:
            save_checkpoint(Path(self.tc.out_dir) / name, state)
        if self.world > 1:   # whoever leaves early has torchrun end the others
            dist.barrier()

    def batches(self):
        """The micro-batches of a step. If one process cannot have them, or Ctrl-C ends the wait for them, all
        save the steps so far and leave."""
        position, lost = dict(self.reader.state), None
        try:
            self.reading = True
            batches = [next(self.reader) for _ in range(self.grad_accum)]
            self.reading = False
        except (OSError, ValueError, KeyboardInterrupt) as error:
            self.reading, lost = False, error
        if any_process(lost is not None, self.world):
            self.reader.state = position
            if self.step:
                self.save("ckpt.pt")
                print(f"saved {Path(self.tc.out_dir) / 'ckpt.pt'} at step {self.step}", flush=True)
            raise lost or ValueError("another process has no data for this step, or was stopped")
        return batches

    def train_step(self):
        """One optimizer step. Its numbers are returned as tensors on the device: nothing waits for them."""
        tc, config, numbers = self.tc, self.config, {}
        for group in self.optimizer.param_groups:
            group["lr"] = lr_at(self.step, tc) * group["scale"]
        k = capacity_at(self.step, config, tc.capacity_warmup)
        for i, (x, y) in enumerate(self.batches(), 1):
            # Processes exchange gradients once a step, with the last micro-batch.
            with self.forward.no_sync() if self.world > 1 and i < self.grad_accum else nullcontext():
                with torch.autocast(self.device.type, torch.bfloat16, enabled=tc.dtype == "bfloat16"):
                    loss, routing = self.forward(x, y, k)
                # DIFFERS: all losses are means over the step; the released code sums the auxiliary one up.
                (loss / self.grad_accum).backward()
            for name, value in {**routing.health, **routing.losses}.items():
                numbers[name] = numbers.get(name, 0.0) + value.detach() / self.grad_accum
        for value in numbers.values() if self.world > 1 else []:   # the mean over all processes
            dist.all_reduce(value)
            value /= self.world
        numbers["norm"] = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if isinstance(self.model.router, LossFreeRouter):
            self.model.router.update_bias(numbers["load"])
        self.step += 1
        return numbers

def catch_signals(run, stop):
    """Have Ctrl-C, SIGTERM and the SIGHUP of a terminal that closes append to stop instead of ending the
    process. Returns the handlers before."""
    def ask(signum, frame):
        # Asked twice: leave at once; the last checkpoint is whole. But one closing terminal asks twice.
        signal.signal(signum, signal.SIG_DFL if signum in (signal.SIGINT, signal.SIGTERM) else signal.SIG_IGN)
        stop.append(signum)
        if run.rank == 0:
            with suppress(OSError):   # nobody may be left to read it
                os.write(2, b"finishing this step, then saving; once more to leave without\n")
        if run.reading:   # a wait for data may be long; else the step is finished first
            raise KeyboardInterrupt
    asks = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    if signal.getsignal(asks[-1]) == signal.SIG_IGN:   # nohup ignores SIGHUP: so do we
        asks.pop()
    return {signum: signal.signal(signum, ask) for signum in asks}

def write_record(log, record):
    """Add a line of JSON to log.jsonl, with null for what is no number."""
    record = json.loads(json.dumps(record), parse_constant=lambda name: None)
    line, end = json.dumps(record).encode() + b"\n", log.seek(0, os.SEEK_END)
    try:
        if log.write(line) < len(line):   # the disk is full
            log.truncate(end)
            raise OSError("no room for a line")
    except OSError as error:
        raise cannot_write(log.name, error) from None

def report(log, record, line, stop):
    """Log a record and print a line. Where that fails (a full disk, a closed pipe or terminal), the error is
    one more reason to stop: the run saves, and raises it then."""
    try:
        write_record(log, record)
        print(line, flush=True)
    except OSError as error:
        stop.append(error)

def train(run, log):
    """Step until max_steps or Ctrl-C; log, evaluate (each process on all rows) and save on the way."""
    tc, halt, losses, clock = run.tc, False, [], time.perf_counter()
    stop = []   # why to stop: signals, and errors of output and log
    val = val_batches(run.source.val, tc.batch_size, run.config.block_size, tc.eval_rows, run.device)
    keep = {int(s) for s in tc.keep_steps.split(",") if s}

    before = catch_signals(run, stop)
    while not halt:
        numbers = run.train_step()
        losses.append(numbers["lm"])
        last = run.step == tc.max_steps
        halt = last or any_process(bool(stop), run.world)
        evaluating = last or run.step % tc.eval_interval == 0
        logging = halt or evaluating or run.step in keep or run.step % tc.log_interval == 0 or run.step == 1
        if logging:
            numbers = {name: value.tolist() for name, value in numbers.items()}   # waits for the device
            lm, speed = torch.stack(losses).mean().item(), len(losses) / (time.perf_counter() - clock)
            require(math.isfinite(lm + numbers["norm"]),
                    f"loss {lm}, gradient {numbers['norm']} at step {run.step}: start again with "
                    f"--learning_rate below {tc.learning_rate}; no checkpoint was lost")
            rate = speed * tc.batch_tokens
            numbers.update(lm=lm, lr=lr_at(run.step - 1, tc), tokens_per_s=rate)
            if run.device.type == "cuda":
                numbers.update(peak_gb=torch.cuda.max_memory_allocated() / 1e9,
                               mfu=mfu(run.config, tc, rate / run.world, numbers["load"]))
            report(log, {"step": run.step, **numbers}, f"step {run.step}/{tc.max_steps} | loss {lm:.3f} | lr "
                   f"{numbers['lr']:.1e} | norm {numbers['norm']:.2f} | {rate / 1e3:.1f}k tok/s"
                   f"{pulse(numbers)} | eta {(tc.max_steps - run.step) / speed / 60:.1f}m", stop)
        if evaluating:
            val_numbers = evaluate(run.model, val, tc.dtype)
            topk = f" | topk {val_numbers['topk']:.4f}" if "topk" in val_numbers else ""
            named = {f"val_{name}": value for name, value in val_numbers.items()}
            report(log, {"step": run.step, **named}, f"eval {run.step}/{tc.max_steps} | causal "
                   f"{val_numbers['causal']:.4f}{topk}{pulse(val_numbers)}", stop)
        if run.step in keep:   # first: a run that goes on from ckpt.pt does not come by this step again
            run.save(f"step_{run.step}.pt")
        if halt or evaluating:
            run.save("ckpt.pt")
        if logging:
            losses, clock = [], time.perf_counter()   # evaluating and saving are not part of the steps
    for signum, handler in before.items():
        signal.signal(signum, handler)
    failed = [error for error in stop if isinstance(error, OSError)]
    if failed:
        raise failed[0]

@torch.no_grad()
def evaluate(model, batches, dtype):
    """Means over the rows: the loss as generation routes (causal), for expert-choice the loss as training
    does (topk) and how often threshold and top-k agree, and the health of the causal routing."""
    c, sums, n, alive = model.config, {}, sum(len(x) for x, _ in batches), False
    modes = [("topk", False)] * (c.routed and c.router == "expert") + [("causal", True)]   # the last one's
    training = model.training   # health counts
    model.eval()
    for x, y in batches:
        numbers = {}
        for name, causal in modes:
            with torch.autocast(x.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
                routing = model(x, y, causal=causal)[2]
            numbers.update(routing.health, **{name: routing.losses["lm"]})
        alive = alive | (routing.depth == c.n_rec).any(dim=0)   # positions, over all the batches
        for name, value in numbers.items():
            sums[name] = sums.get(name, 0.0) + value * (len(x) / n)
    model.train(training)
    sums["dead"] = 1 - alive.float().mean()
    return {name: value.tolist() for name, value in sums.items()}

# ---- What a log line says of router and GPU ----------------------------------------------------------------

def pulse(numbers):
    """GPU and router in a log line: a collapse to one depth, or a threshold unlike the top-k, shows."""
    percent = lambda values: f"[{' '.join(f'{100 * v:.0f}' for v in values)}]%"
    words = [""]
    words += [f"mfu {100 * numbers['mfu']:.0f}%"] if numbers.get("mfu") else []
    words += [f"{numbers['peak_gb']:.1f}GB"] if "peak_gb" in numbers else []
    if len(numbers["load"]) > 1:
        words.append(f"depth {numbers['mean_depth']:.2f} {percent(numbers['load'])}")
        for name in ("aux", "balance", "max_vio", "entropy"):
            words += [f"{name} {numbers[name]:.2f}"] if name in numbers else []
        words += [f"agree {percent(numbers['agreement'][1:])}"] if "agreement" in numbers else []
        words.append(f"dead {100 * numbers['dead']:.0f}%")
    return " | ".join(words)

# Dense bfloat16 FLOP/s of GPUs by name, from their data sheets.
PEAK = {"NVIDIA H100 80GB HBM3": 989.4e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H200": 989.4e12,
        "NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA GeForce RTX 4090": 165.2e12}

def mfu(config, tc, tokens_per_s, load):
    """Share of the GPU's peak in use, by flops_per_token (attention counts as its causal half) and twice that
    backward, at this load; None if not known."""
    peak = PEAK.get(torch.cuda.get_device_name()) if tc.dtype == "bfloat16" else None
    share = [sum(load[r:]) for r in range(config.n_rec)]
    return peak and 3 * flops_per_token(config, config.block_size, share=share) * tokens_per_s / peak

# ---- Several processes -------------------------------------------------------------------------------------

def init_distributed(device):
    """Which of how many processes this is: those that torchrun started, one for each GPU; else 0 of 1."""
    if not dist.is_torchelastic_launched():
        return 0, 1
    if not dist.is_initialized():   # nccl for gradients, gloo for `any_process`
        cuda = device.type == "cuda"
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", device_id=device if cuda else None)
    return dist.get_rank(), dist.get_world_size()

def any_process(flag, world):
    """Whether the flag is true in any process, so that all do the same."""
    flag = torch.tensor(float(flag))
    if world > 1:
        dist.all_reduce(flag)
    return flag.item() > 0

# ---- Checkpoints: tensors and plain types only, so that torch.load needs no trust --------------------------

def load_checkpoint(path):
    """What `Run.save` wrote to a file, or to ckpt.pt in a folder, and its model; ValueError for all else."""
    path = Path(path) / "ckpt.pt" if Path(path).is_dir() else Path(path)
    require(path.is_file(), f"there is no checkpoint {path}: train one first with python train.py --n_rec=3")
    try:
        require(zipfile.ZipFile(path).testzip() is None, "its content is damaged")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        model = MoR(MoRConfig(**checkpoint["config"]))
        model.load_state_dict(checkpoint["model"])
        tc = TrainConfig(**checkpoint["train_config"])
        parts = {"step", "optimizer", "reader", "rng", "data", "tokenizer"}
        require(parts <= set(checkpoint), "parts of it are missing")
    except Exception as error:
        reason = f"{type(error).__name__}: {brief(error)}"
        raise ValueError(f"{path} is not a checkpoint of this project ({reason})") from None
    return {**checkpoint, "config": asdict(model.config), "train_config": asdict(tc), "model": model,
            "path": path}

def load_model(name, data_dir):
    """A checkpoint of ours, see above, or a published one, see pretrained.load."""
    return pretrained.load(name, data_dir) if pretrained.is_published(name) else load_checkpoint(name)

def save_checkpoint(path, state):
    """Write a checkpoint, see `replacing`."""
    with replacing(path) as f:
        try:
            torch.save(state, f)
        except RuntimeError as error:   # hides the OSError of a full disk
            raise error.__context__ or error from None

# ---- What a run is: command line over checkpoint, or over machine and recipe -------------------------------

# What a resumed run may change; all else decides what is computed, and has to be as the checkpoint says.
CHANGEABLE = {"data_dir", "keep_shards", "out_dir", "resume", "max_steps", "flops", "keep_steps",
              "eval_interval", "eval_rows", "log_interval", "device", "compile"}

def pick_device(name):
    """The torch.device for an option; auto takes the best there is, and under torchrun each process a GPU.
    On a GPU, sets the kernels that attention may take."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    require(name.split(":")[0] in ("cpu", "cuda", "mps"),
            f"--device={name} is unknown: choose cpu, cuda, cuda:1 and so on, or mps")
    try:
        device = torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device={name} cannot be used here ({brief(error)}): try --device=cpu") from None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Flash attention instead of cuDNN's, which spends 34 to 440 ms on each new length (prompts have any)
        # and whose gradients were reported as NaN (pytorch 196678, with a mask, which we have not;
        # cudnn-frontend 160). `bench.py gpu` compares both.
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.compiler.config.cache_key_tag = "no cuDNN"   # the compiler's cache does not look at that
    return device

def machine(device):
    """Defaults that depend on the machine, and why."""
    if device.type == "cuda":
        dtype = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
        return dict(model="360m", dtype=dtype, compile=True), "an NVIDIA GPU"
    abilities = getattr(torch.cpu, "get_capabilities", dict)() if device.type == "cpu" else {}
    if any(abilities.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16")):
        return dict(dtype="bfloat16"), "a processor that multiplies bfloat16"
    return {}, "nothing here multiplies bfloat16 fast, so float32"

def recipe(model, device, plain=None):
    """Defaults that depend on the model: tiny has TrainConfig's, the paper's sizes those of its ablations,
    except that a step has a quarter of the paper's tokens. A plain model to start from has its own sizes."""
    if plain and device.type == "cpu":   # a quarter of an hour on two cores for 135M
        return dict(block_size=256, batch_size=2, learning_rate=3e-4, max_steps=200, eval_interval=100,
                    eval_rows=64, log_interval=10)
    if model == "tiny":
        return {}
    rows = 1   # in a micro-batch: a power of two, up to the paper's 16; a row of 360m is estimated at 5 GB
    if device.type == "cuda":
        need = 5e9 * PRESETS[model]["n_embd"] * PRESETS[model]["n_layer"] / (960 * 32)
        memory = torch.cuda.get_device_properties(device).total_memory
        rows = 2 ** max(0, min(4, int(math.log2(memory / need))))
    return dict(data="fineweb_edu", learning_rate=3e-3, batch_size=rows, batch_tokens=2**19, log_interval=10,
                eval_interval=1000, eval_rows=800)

def start_sizes(given, plain, block_size):
    """The sizes that --init_from decides. Rows are as long as given, or as block_size, if it knows such."""
    sizes = {name: plain["config"][name] for name in [*PRESETS["tiny"], "rope_theta"]}
    longest, whose = sizes.pop("block_size"), f"--init_from={given['init_from']}"
    for name, value in given.items():
        require(name != "model" and value == sizes.get(name, value), f"--{name}={value} contradicts "
                f"{'the sizes' if name == 'model' else f'{name}={sizes.get(name)}'} of {whose}: leave it out")
    require(given.get("block_size", 1) <= longest,
            f"--block_size={given.get('block_size')} is more than the {longest} tokens that {whose} knows")
    return {**sizes, "block_size": min(block_size, longest)}

def settle(given, checkpoint, world=1, plain=None):
    """MoRConfig and TrainConfig of this run: command line over checkpoint, or over machine and recipe."""
    require("flops" not in given or "max_steps" not in given,
            f"--flops={given.get('flops')} and --max_steps={given.get('max_steps')}: give one of them")
    if checkpoint:
        path = checkpoint["path"]
        base = {**checkpoint["config"], **checkpoint["train_config"], "flops": 0.0,
                "out_dir": str(path.parent)}
        for name, value in given.items():
            require(name in CHANGEABLE or value == base[name],
                    f"--{name}={value} contradicts {name}={base[name]} of {path}: leave it out, or start a "
                    "new run without --resume")
    else:
        device = pick_device(given.get("device", "auto"))
        base = {"model": "tiny", **machine(device)[0]}
        model = given.get("model", base["model"])
        base |= PRESETS[model] | recipe(model, device, plain)
        if plain:
            base |= start_sizes(given, plain, base["block_size"])
    base.update(given)
    ours = {f.name: base.pop(f.name) for f in fields(MoRConfig) if f.name in base}
    config, tc = MoRConfig(**ours), TrainConfig(**base)
    # Defaults that depend on others become numbers, which a branch, a longer run or other devices keep.
    tc.batch_tokens = tc.grad_accum(config.block_size, world) * tc.batch_size * config.block_size * world
    if tc.model != "tiny" and not checkpoint and "max_steps" not in given:   # 10B tokens, as the ablations
        tc.max_steps = max(1, 10**10 // tc.batch_tokens)
    if tc.flops:
        cost = flops_per_token(config, config.block_size, paper=True) * tc.batch_tokens
        tc.max_steps = int(tc.flops / cost)
        require(tc.max_steps > 0, f"flops={tc.flops} are less than one step, which takes {cost:.2e}")
    if tc.warmup_steps < 0:
        tc.warmup_steps = round(0.05 * tc.max_steps)
    done = checkpoint["step"] if checkpoint else 0
    require(all(done < int(s) <= tc.max_steps for s in given.get("keep_steps", "").split(",") if s),
            f"keep_steps={tc.keep_steps} must be steps of this run, {done + 1} to {tc.max_steps}")
    # Expert-choice has the same shapes at every step; token-choice has new ones, and runs uncompiled.
    tc.compile = tc.compile and not (config.routed and config.router == "token")
    return config, tc

def find_source(tc, tokenizer=None):
    """The data, see shards.Source; for the tokenizer that a model has already, if it has one."""
    ours = "gpt2" if tc.data in fineweb_edu.SETS else "bytes"
    text = find_text(tokenizer) if isinstance(tokenizer, dict) else None
    require(text or tokenizer in (None, ours),
            f"--data={tc.data} makes tokens of {ours}, but the model knows {tokenizer}: choose other --data")
    require(not text or text.VOCAB_SIZE <= 2**16, f"--init_from={tc.init_from} has ids up to "
            f"{text and text.VOCAB_SIZE - 1}, and token files hold ids up to {2**16 - 1}")
    if tc.data in fineweb_edu.SETS:
        return fineweb_edu.source(tc.data, tc.data_dir, tc.keep_shards, text)
    return python_source.source(tc.data, tc.data_dir, text)

def find_text(tokenizer):
    """What encodes and decodes the text of a checkpoint: EOF, VOCAB_SIZE, encode, decode, prefix."""
    if isinstance(tokenizer, dict):
        return Tokenizer(**tokenizer)
    return {"bytes": python_source, "gpt2": fineweb_edu}[tokenizer]

def check_out_dir(tc, checkpoint):
    """Refuses an out_dir that holds checkpoints, except to a run that goes on from its ckpt.pt."""
    out, mine = Path(tc.out_dir), checkpoint and checkpoint["path"].resolve()
    require(not (out / "config.json").exists(), f"--out_dir={out} holds a published model: choose another")
    for path in sorted(out.glob("*.pt")):
        go_on = mine and mine.parent == out.resolve() and (path.name != "ckpt.pt" or path.resolve() == mine)
        require(go_on, f"{path} would be overwritten: go on from it with --resume={out}, or choose another "
                "--out_dir")
    if checkpoint:
        require(checkpoint["step"] < tc.max_steps, f"{checkpoint['path']} is at step {checkpoint['step']} "
                f"already: give a larger --max_steps than {tc.max_steps}")

# ---- Command line ------------------------------------------------------------------------------------------

def brief(error):
    """What an error says, on one line that is not too long."""
    return textwrap.shorten(str(error), 150, placeholder=" ...")

def fail(message):
    """A person's mistake ends in one line and exit code 2."""
    with suppress(OSError):   # nobody may be left to read it
        print(f"{Path(sys.argv[0]).name}: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(2)

def guarded(main):
    """Run main; bad input, a full disk or too little memory end in one line instead of a traceback."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:   # see `prepare`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(sys.stdout, "reconfigure"):   # a terminal without Unicode shows question marks
        sys.stdout.reconfigure(errors="replace")
    try:
        code = main(sys.argv[1:])
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.stdout.flush()   # a closed pipe shows here at last
        sys.exit(code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:   # whoever read the output has left, as `head` does: so do we
        mute("stdout")
        mute("stderr")
        sys.exit(141)
    except (ValueError, OSError) as error:
        if getattr(error, "errno", None) and not error.filename:   # of no file, so of the output
            mute("stdout")
            error = cannot_write("standard output", error)
        fail(error)
    except Exception as error:
        if re.search("MemoryError|out of memory|allocate memory|[Oo]verflow|too large", repr(error)):
            fail("out of memory: choose a smaller model, --batch_size (--batch_tokens keeps the step), "
                 "--block_size or --slots")
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "triton")):
            fail(f"torch.compile did not work ({brief(error)}): use --compile=false")
        raise

def integer(text):
    if not float(text).is_integer():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(float(text))

def boolean(text):
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a bool: write true or false")
    return text.lower() in ("true", "1")

def parse(argv, doc, *classes):
    """The options that were given, by name. Each field of a class is one; the comment behind it, its help."""
    wide = partial(argparse.RawDescriptionHelpFormatter, width=110, max_help_position=28)
    parser = argparse.ArgumentParser(allow_abbrev=False, argument_default=argparse.SUPPRESS, description=doc,
                                     formatter_class=wide, usage="%(prog)s [--option=value ...]")
    parser.error = fail
    for cls in classes:
        group = parser.add_argument_group(cls.__name__, cls.__doc__.splitlines()[0])
        notes = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(cls), re.MULTILINE))
        for f in fields(cls):
            choices = get_args(f.type) if get_origin(f.type) is Literal else None
            kind = str if choices else {bool: boolean, int: integer}.get(f.type, f.type)
            default = "by --model" if f.name in PRESETS["tiny"] else f.default
            note = f"{notes[f.name]} (default: {default})".replace("%", "%%")
            group.add_argument(f"--{f.name}", type=kind, choices=choices, help=note,
                               metavar=None if choices else f.type.__name__)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        names = [f"--{f.name}" for cls in classes for f in fields(cls)]
        near = difflib.get_close_matches(unknown[0].split("=")[0], names, n=1)
        fail(f"unknown option {unknown[0]}" + (f"; did you mean {near[0]}?" if near else "; see --help"))
    return vars(given)

def main(argv):
    given = parse(argv, __doc__, MoRConfig, TrainConfig)
    rank, world = init_distributed(pick_device(given.get("device", "auto")))
    if rank:   # one process speaks, and writes
        sys.stdout = open(os.devnull, "w")
    checkpoint = load_checkpoint(given["resume"]) if "resume" in given else None
    plain = None
    if given.get("init_from") and not checkpoint:
        plain = load_model(given["init_from"], given.get("data_dir", "data"))
        plain["config"] = asdict(plain["model"].config)
        require(plain["model"].config.n_rec == 1,
                f"--init_from={given['init_from']} must be a plain model, of n_rec=1")
    config, tc = settle(given, checkpoint, world, plain)
    device = pick_device(tc.device)
    model = f"--init_from={tc.init_from} --init={tc.init}" if tc.init_from else f"--model={tc.model}"
    print(f"{device}: {machine(device)[1]}. Chosen: {model} --data={tc.data} --dtype={tc.dtype} "
          f"--compile={tc.compile}; --help lists what else there is")
    Path(tc.out_dir).mkdir(parents=True, exist_ok=True)
    with open(os.devnull if rank else Path(tc.out_dir) / "log.jsonl", "ab", buffering=0) as log:
        alone = None if rank else lock(log)
        require(alone is not False, f"another run is at work in {tc.out_dir}: choose another --out_dir")
        if alone:
            remove(*Path(tc.out_dir).glob("*.pt.*.tmp"))   # of a run that was killed while it saved
        check_out_dir(tc, checkpoint)
        source = find_source(tc, (checkpoint or plain or {}).get("tokenizer"))
        if "vocab_size" not in given and not checkpoint and not plain:
            config.vocab_size = source.vocab_size
        require(config.vocab_size >= source.vocab_size,
                f"vocab_size={config.vocab_size} must be {source.vocab_size} or more for {tc.data}")
        if checkpoint and checkpoint["data"] != source.name:
            print(f"note: the checkpoint was trained on {checkpoint['data']}, and this is {source.name}")
        run = Run(config, tc, source, checkpoint, plain and plain["model"])
        settings = {**asdict(config), **asdict(tc)}
        print(f"{n_params(config):,} parameters, {config.effective_depth} layers deep: {config.n_shared} "
              f"shared x {config.n_rec} + {config.n_unshared}")
        print("config", *(f"{name}={value}" for name, value in settings.items() if value != ""))
        write_record(log, {"argv": argv, "torch": torch.__version__, **settings})
        train(run, log)
    done, out = run.step == tc.max_steps, shlex.quote(tc.out_dir)
    print(f"saved {Path(tc.out_dir) / 'ckpt.pt'} at step {run.step}; next: python sample.py"
          + f" --out_dir={out}" * (out != "out")
          + f", or go on with python train.py --resume={out}" * (not done))
    return 0 if done else 130

if __name__ == "__main__":
    guarded(main)

"""Train a Mixture-of-Recursions.

    python train.py --n_rec=3                              on this machine's defaults; then: python sample.py
    python train.py --n_rec=1 --out_dir=out_plain          the plain Transformer that it is compared with
    python train.py --router=token --cache=shared --out_dir=out_token
    python train.py --data=my_novel.txt --max_steps=2e3 --out_dir=out_novel
    python train.py --resume=out --max_steps=4e3           go on where a run stopped
    python train.py --help                                 every option, its default and what it does
"""
import argparse
import difflib
import inspect
import json
import math
import os
import re
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal, get_args, get_origin

import torch

from data import python_source
from data.shards import Reader, val_batches
from mor import MoR, MoRConfig, PRESETS, n_params

# ---------------------------------------------------------------------------------------------------------------
# Options

@dataclass
class TrainConfig:
    """How to train. The defaults are those of the tiny model on two CPU cores; see `machine` for the others."""
    model: Literal[tuple(PRESETS)] = "tiny"  # sizes to start from; every field of the model can be given as well
    data: str = "python"  # python: the source of Python's standard library; else a text file or a folder of text
    data_dir: str = "data"  # where token files are built
    out_dir: str = "out"  # where checkpoints and log.jsonl go
    resume: str = ""  # a checkpoint, or a folder with a ckpt.pt, to go on from
    max_steps: int = 1000  # optimizer steps in all
    batch_size: int = 16  # rows of block_size tokens in a micro-batch
    grad_accum: int = 1  # micro-batches in a step
    learning_rate: float = 4e-3  # peak of the schedule
    schedule: Literal["wsd", "cosine"] = "wsd"  # wsd: warm-up, plateau, then down to 0 over the last 20 % of the steps
    warmup_steps: int = -1  # steps from 0 to the peak; -1: 5 % of max_steps
    capacity_warmup: int = 0  # expert-choice: steps in which the kept tokens come down from all to their capacity
    keep_steps: str = ""  # steps whose checkpoints are kept as step_N.pt to branch off from, as in 400,800
    eval_interval: int = 250  # steps between evaluations; each saves ckpt.pt
    eval_batches: int = 20  # batches in an evaluation
    log_interval: int = 10  # steps between log lines
    seed: int = 1337  # of the weights and of the order of the data
    device: str = "auto"  # cpu, cuda, cuda:1, mps; auto: the best there is
    dtype: Literal["float32", "bfloat16"] = "float32"  # of matrix products; weights and residual stream are float32
    compile: bool = False  # torch.compile the training step

    def __post_init__(self):
        for name in ("max_steps", "batch_size", "grad_accum", "eval_interval", "eval_batches", "log_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate={self.learning_rate} must be a positive number")
        if self.warmup_steps < -1 or self.capacity_warmup < 0:
            raise ValueError(f"warmup_steps={self.warmup_steps} and capacity_warmup={self.capacity_warmup} count steps")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be 0 to {2**32 - 1}")
        if not re.fullmatch(r"(\d+(,\d+)*)?", self.keep_steps):
            raise ValueError(f"keep_steps={self.keep_steps} must be steps with commas between, as in 400,800")


# What a resumed run may change; all else decides what is computed, and has to be as the checkpoint says.
CHANGEABLE = {"data_dir", "out_dir", "resume", "max_steps", "keep_steps", "eval_interval", "eval_batches", "log_interval",
              "device", "compile"}


def fail(message):
    """A person's mistake ends in one line and exit code 2."""
    print(f"{Path(sys.argv[0]).name}: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(2)


def guarded(main):
    """Run main; bad input, a full disk or too little memory end in one line instead of a traceback."""
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:   # the reader of our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (ValueError, OSError) as error:
        fail(error)
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error):
            raise
        fail("out of memory: choose a smaller --batch_size (with a larger --grad_accum), --block_size or --model")


def whole(text):
    value = float(text)
    if not value.is_integer():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


def boolean(text):
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a bool: write true or false")
    return text.lower() in ("true", "1")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(message + " (see --help)")


def parse(argv, doc, *classes):
    """The options that were given, by name. Each field of the dataclasses is an option, the comment behind it its help."""
    parser = Parser(allow_abbrev=False, argument_default=argparse.SUPPRESS, description=doc,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    names = []
    for cls in classes:
        group = parser.add_argument_group(cls.__name__)
        notes = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(cls), re.MULTILINE))
        for f in fields(cls):
            literal = get_origin(f.type) is Literal
            kind = str if literal else {bool: boolean, int: whole}.get(f.type, f.type)
            note = f"{notes[f.name]} (default: {f.default})".replace("%", "%%")
            group.add_argument(f"--{f.name}", type=kind, choices=get_args(f.type) if literal else None,
                               metavar=None if literal else f.type.__name__.upper(), help=note)
            names.append(f"--{f.name}")
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        near = difflib.get_close_matches(unknown[0].split("=")[0], names, n=1)
        fail(f"unknown option {unknown[0]}" + (f"; did you mean {near[0]}?" if near else "; --help lists them all"))
    return vars(given)


def pick_device(name):
    """The torch.device for an option; auto takes the best there is."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device={name} cannot be used here ({str(error).splitlines()[0]}): try --device=cpu") from None
    return device


def machine(device):
    """Defaults that depend on the machine, and why."""
    if device.type == "cuda":
        return dict(dtype="bfloat16", compile=True), "a GPU: bfloat16 and torch.compile"
    abilities = getattr(torch.cpu, "get_capabilities", dict)()
    if device.type == "cpu" and any(abilities.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16")):
        return dict(dtype="bfloat16"), "no GPU; bfloat16, which this processor multiplies natively"
    return {}, "no GPU; float32, since this processor does not multiply bfloat16 natively"


def settle(given, checkpoint):
    """MoRConfig and TrainConfig of this run: command line over checkpoint, or over preset and machine."""
    model_fields = {f.name for f in fields(MoRConfig)}
    if checkpoint:
        base = {**checkpoint["config"], **checkpoint["train_config"]}
        for name, value in given.items():
            if name not in CHANGEABLE and value != base[name]:
                raise ValueError(f"--{name}={value} contradicts {name}={base[name]} of the checkpoint {given['resume']}: "
                                 f"leave the option out, or start anew with another --out_dir")
        base["out_dir"] = str(checkpoint["path"].parent)
    else:
        base = {**machine(pick_device(given.get("device", "auto")))[0], **PRESETS[given.get("model", "tiny")]}
    base.update(given)
    return (MoRConfig(**{k: v for k, v in base.items() if k in model_fields}),
            TrainConfig(**{k: v for k, v in base.items() if k not in model_fields}))


# ---------------------------------------------------------------------------------------------------------------
# Checkpoints: tensors and plain types only, so that torch.load needs no trust

def load_checkpoint(path, device="cpu"):
    """The checkpoint in a file, or in the ckpt.pt of a folder; ValueError if there is none, or it is not one of ours."""
    path = Path(path) / "ckpt.pt" if Path(path).is_dir() else Path(path)
    if not path.is_file():
        raise ValueError(f"there is no checkpoint {path} yet: train one first with python train.py --n_rec=3")
    try:
        checkpoint = torch.load(path, map_location=device, weights_only=True)
        model = MoR(MoRConfig(**checkpoint["config"]))
        model.load_state_dict(checkpoint["model"])
        assert set(checkpoint["train_config"]) == {f.name for f in fields(TrainConfig)}, "its options are other ones"
    except Exception as error:
        raise ValueError(f"{path} is not a checkpoint of this project ({str(error).splitlines()[0][:100]})") from None
    return {**checkpoint, "model": model, "path": path}


def save_checkpoint(path, state):
    """Written beside and then renamed: whatever happens, `path` is a whole checkpoint, the old one or the new one."""
    beside = path.with_suffix(".tmp")
    with open(beside, "wb") as f:
        torch.save(state, f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(beside, path)


# ---------------------------------------------------------------------------------------------------------------
# Training

def lr_at(step, config):
    """Learning rate of a step (from 0): `wsd` is the paper's trapezoid, `cosine` ends at a tenth of the peak."""
    warmup = config.warmup_steps if config.warmup_steps >= 0 else round(0.05 * config.max_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.schedule == "wsd":
        return config.learning_rate * min(1.0, (config.max_steps - step) / max(1.0, 0.2 * config.max_steps))
    progress = (step - warmup) / max(1, config.max_steps - warmup)
    return config.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def make_optimizer(model, config):
    """AdamW with weight decay on matrices only. `scale` is a group's share of the learning rate.

    As in the released code, an auxiliary router learns at ten times the rate, for nothing depends on its output.
    """
    aux = list(model.router.aux_score.parameters()) if hasattr(model.router, "aux_score") else []
    ours = [p for p in model.parameters() if not any(p is q for q in aux)]
    groups = [dict(params=[p for p in ours if p.dim() > 1], weight_decay=0.1, scale=1.0),
              dict(params=[p for p in ours if p.dim() == 1], weight_decay=0.0, scale=1.0),
              dict(params=aux, weight_decay=0.1, scale=10.0)]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def autocast(device, dtype):
    return torch.autocast(device.type, torch.bfloat16) if dtype == "bfloat16" else nullcontext()


@torch.no_grad()
def evaluate(model, batches, precision):
    """Validation loss as generation routes (causal), and for expert-choice as training routes (topk), with the health
    numbers: share of tokens per depth, mean depth, agreement of threshold and top-k, dead positions."""
    c, sums, training = model.config, {}, model.training
    expert = c.routed and c.router == "expert"
    alive = torch.zeros(c.block_size, dtype=torch.bool, device=batches[0][0].device)
    model.eval()
    for x, y in batches:
        for causal in (True, False) if expert else (True,):
            with precision():
                routing = model(x, y, causal=causal)[2]
            numbers = dict(routing.health, causal=routing.losses["lm"]) if causal else dict(topk=routing.losses["lm"])
            if "agreement" in routing.health:
                numbers["agreement"] = routing.health["agreement"][1:].mean()
            for name, value in numbers.items():
                sums[name] = sums.get(name, 0.0) + value * len(x) / sum(len(x) for x, _ in batches)
            if causal:
                alive |= (routing.depth == c.n_rec).any(dim=0)
    model.train(training)
    return {**{k: v.tolist() for k, v in sums.items()}, "dead": 1 - alive.float().mean().item()}


def routing_words(numbers):
    """The router's pulse: a collapse to one depth, or a threshold that does not follow the top-k, shows here."""
    words = []
    if len(numbers["load"]) > 1:
        words.append(f"depth {numbers['mean_depth']:.2f} [{' '.join(f'{100 * s:.0f}' for s in numbers['load'])}]%")
    words += [f"{name} {numbers[name]:.3f}" for name in ("aux", "balance", "max_vio", "entropy") if name in numbers]
    words += [f"{name} {100 * numbers[name]:.0f}%" for name in ("agreement", "dead") if name in numbers]
    return "".join(" | " + word for word in words)


class Run:
    """One training run: model, optimizer, data and step, everything that a checkpoint holds."""
    def __init__(self, config, tc, source, checkpoint=None):
        self.config, self.tc, self.source, self.step = config, tc, source, 0
        self.device = pick_device(tc.device)
        torch.manual_seed(tc.seed)
        self.model = checkpoint["model"] if checkpoint else MoR(config)
        self.model.to(self.device).train()
        self.optimizer = make_optimizer(self.model, tc)
        state = None
        if checkpoint:
            self.step, state = checkpoint["step"], checkpoint["reader"]
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            torch.set_rng_state(checkpoint["rng"].cpu())
            if self.device.type == "cuda" and "cuda_rng" in checkpoint:
                torch.cuda.set_rng_state(checkpoint["cuda_rng"].cpu(), self.device)
        self.reader = Reader(source.train, tc.batch_size, config.block_size, tc.seed, self.device, state)
        # Token-choice has another shape every step, so it runs uncompiled. Expert-choice has the same ones throughout.
        static = not (config.routed and config.router == "token")
        self.forward = torch.compile(self.model, fullgraph=True) if tc.compile and static else self.model

    def save(self, name):
        state = dict(config=asdict(self.config), train_config=asdict(self.tc), step=self.step,
                     model=self.model.state_dict(), optimizer=self.optimizer.state_dict(), reader=self.reader.state,
                     rng=torch.get_rng_state(), tokenizer=self.source.tokenizer, data=self.source.val.parent.name)
        if self.device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state(self.device)
        save_checkpoint(Path(self.tc.out_dir) / name, state)

    def train_step(self):
        """One optimizer step; returns its numbers, as tensors on the device so that nothing waits for them."""
        tc, config, numbers = self.tc, self.config, {}
        for group in self.optimizer.param_groups:
            group["lr"] = lr_at(self.step, tc) * group["scale"]
        # DIFFERS: counted in steps; the released code counts forward calls, and so depends on the accumulation.
        k = config.capacity(config.block_size, min(1.0, self.step / tc.capacity_warmup) if tc.capacity_warmup else 1.0)
        for _ in range(tc.grad_accum):
            x, y = next(self.reader)
            with autocast(self.device, tc.dtype):
                _, loss, routing = self.forward(x, y, causal=False, k=k)
            # DIFFERS: every term is averaged over the step, while the released code sums the auxiliary loss over it.
            (loss / tc.grad_accum).backward()
            for name, value in {**routing.health, **routing.losses}.items():
                numbers[name] = numbers.get(name, 0.0) + value.detach() / tc.grad_accum
        numbers["norm"] = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if config.routed and config.router == "token":
            self.model.router.update_bias(numbers["load"])
        self.step += 1
        if "agreement" in numbers:
            numbers["agreement"] = numbers["agreement"][1:].mean()
        return numbers


def train(run, log):
    """Step until max_steps or Ctrl-C; evaluate, log and save on the way. Returns whether the run reached its end."""
    tc, stop, busy, lm, since = run.tc, [], 0.0, 0.0, run.step
    precision = lambda: autocast(run.device, tc.dtype)
    val = val_batches(run.source.val, tc.batch_size, run.config.block_size, tc.eval_batches, run.device)
    keep = {int(s) for s in tc.keep_steps.split(",") if s}

    def ask(signum, frame):
        if stop:
            raise KeyboardInterrupt   # asked twice: leave at once; the last checkpoint is whole
        stop.append(signum)
        print("finishing this step, then saving", flush=True)
    before = [(s, signal.signal(s, ask)) for s in (signal.SIGINT, signal.SIGTERM)]

    def record(numbers, line):
        print(line, flush=True)
        log.write(json.dumps({"step": run.step, **numbers}) + "\n")
        log.flush()

    while run.step < tc.max_steps and not stop:
        start = time.perf_counter()
        numbers = run.train_step()
        lm, last = lm + numbers["lm"], run.step == tc.max_steps
        if run.step % tc.log_interval == 0 or last or run.step == 1:
            numbers = {name: value.tolist() for name, value in numbers.items()}   # waits for the device
            busy, steps = busy + time.perf_counter() - start, run.step - since
            numbers.update(lm=lm.item() / steps, lr=lr_at(run.step - 1, tc),
                           tokens_per_s=steps * tc.batch_size * tc.grad_accum * run.config.block_size / busy)
            if not math.isfinite(numbers["lm"] + numbers["norm"]):
                raise ValueError(f"the loss is {numbers['lm']} at step {run.step}: try a smaller --learning_rate than "
                                 f"{tc.learning_rate}; checkpoints in {tc.out_dir} are as they were")
            eta = (tc.max_steps - run.step) * busy / steps / 60
            record(numbers, f"step {run.step}/{tc.max_steps} | loss {numbers['lm']:.3f} | lr {numbers['lr']:.1e} | "
                   f"norm {numbers['norm']:.2f} | {numbers['tokens_per_s'] / 1e3:.1f}k tok/s"
                   f"{routing_words(numbers)} | eta {eta:.1f}m")
            busy, lm, since = 0.0, 0.0, run.step
        else:
            busy += time.perf_counter() - start
        if run.step % tc.eval_interval == 0 or last:
            numbers = evaluate(run.model, val, precision)
            topk = f" | top-k {numbers['topk']:.4f}" if "topk" in numbers else ""
            record({f"val_{k}": v for k, v in numbers.items()},
                   f"eval {run.step}/{tc.max_steps} | causal {numbers['causal']:.4f}{topk}{routing_words(numbers)}")
        if run.step % tc.eval_interval == 0 or last or stop:
            run.save("ckpt.pt")
        if run.step in keep:
            run.save(f"step_{run.step}.pt")
    for signum, handler in before:
        signal.signal(signum, handler)
    return run.step == tc.max_steps


def open_log(path, step):
    """log.jsonl for appending, without what a killed run wrote after the step that is resumed."""
    lines = path.read_text().splitlines() if step and path.exists() else []
    steps = [re.match(r'{"step": (\d+)', line) for line in lines]
    path.write_text("".join(line + "\n" for line, s in zip(lines, steps) if not s or int(s[1]) <= step))
    return path.open("a")


def check_out_dir(tc, checkpoint):
    """Make out_dir. Nothing is overwritten, but for a ckpt.pt by the run that goes on from it."""
    out = Path(tc.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    mine = checkpoint and checkpoint["path"].resolve()
    others = [p for p in sorted(out.glob("ckpt.pt" if checkpoint else "*.pt")) if p.resolve() != mine]
    if others:
        raise ValueError(f"{others[0]} would be overwritten: go on from it with --resume={out}, or choose another --out_dir")
    if checkpoint and checkpoint["step"] >= tc.max_steps:
        raise ValueError(f"{checkpoint['path']} is at step {checkpoint['step']} of --max_steps={tc.max_steps} already: "
                         "give a larger --max_steps to go on")


def describe(config):
    kind = {"expert": "expert-choice", "token": "token-choice", "none": "plain recursion"}[config.router]
    name = "plain Transformer" if config.n_rec == 1 else f"MoR with {config.n_rec} recursions, {kind}, {config.cache} cache"
    shape = f"{config.n_shared} shared x {config.n_rec}" + " + 2" * bool(config.n_unshared)
    return f"{name}: {n_params(config):,} parameters, {config.effective_depth} layers deep ({shape})"


def main(argv):
    given = parse(argv, __doc__, MoRConfig, TrainConfig)
    checkpoint = load_checkpoint(given["resume"]) if given.get("resume") else None
    config, tc = settle(given, checkpoint)
    device = pick_device(tc.device)
    print(f"device {device.type}: {machine(device)[1]}. Now {tc.dtype}, {'' if tc.compile else 'not '}compiled, "
          f"model {tc.model}, data {tc.data}; --help lists every choice")
    check_out_dir(tc, checkpoint)
    source = python_source.source(tc.data, tc.data_dir)
    if "vocab_size" not in given and not checkpoint:
        config.vocab_size = source.vocab_size
    if config.vocab_size < source.vocab_size:
        raise ValueError(f"vocab_size={config.vocab_size} is too small: --data={tc.data} has ids up to {source.vocab_size - 1}")
    if checkpoint and checkpoint["data"] != source.val.parent.name:
        print(f"note: the data ({source.val.parent.name}) are not those of the checkpoint ({checkpoint['data']})")
    run = Run(config, tc, source, checkpoint)
    print(describe(config))
    print("config", *(f"{k}={v}" for k, v in {**asdict(config), **asdict(tc)}.items() if v != ""))
    with open_log(Path(tc.out_dir) / "log.jsonl", run.step) as log:
        log.write(json.dumps(dict(argv=argv, torch=torch.__version__, config=asdict(config), train_config=asdict(tc))) + "\n")
        done = train(run, log)
    out = "" if tc.out_dir == "out" else f" --out_dir={tc.out_dir}"
    print(f"saved {Path(tc.out_dir) / 'ckpt.pt'} at step {run.step}; next: python sample.py{out}"
          + ("" if done else f", or go on with python train.py --resume={tc.out_dir}"))
    return 0 if done else 130


if __name__ == "__main__":
    guarded(main)

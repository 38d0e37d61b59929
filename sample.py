"""Write text with a trained model, each token coloured by how many recursions went into choosing it.

    python sample.py                                       what `python train.py` left in out/
    python sample.py --prompt="def main(" --temperature=0.5 --top_k=40
    python sample.py --max_depth=1                         the same text budget with a shallower model
"""
import codecs
import os
import sys
from dataclasses import dataclass
from typing import Literal

import torch

from data import python_source
from mor import pick
from train import guarded, load_checkpoint, parse, pick_device


@dataclass
class SampleConfig:
    """What to write, and how."""
    out_dir: str = "out"  # folder of the checkpoint, or the checkpoint itself
    prompt: str = ""  # text to go on from; empty: the beginning of a file
    max_new_tokens: int = 500  # tokens to write; the model always sees the last block_size of the text
    num_samples: int = 1  # texts to write, one after the other
    temperature: float = 0.8  # 0 always takes the likeliest token
    top_k: int = 0  # draw from the k likeliest tokens only; 0: from all
    seed: int = 1337  # of the first text; each further one adds 1
    max_depth: int = 0  # recursions a token can take at most; 0: all of the model's
    threshold: float = 0.5  # expert-choice: a token goes deeper while its router says more than this
    color: Literal["auto", "always", "never"] = "auto"  # without colour, a line of depths below each line
    device: str = "auto"  # cpu, cuda, mps; auto: the best there is

    def __post_init__(self):
        if self.max_new_tokens < 0 or self.num_samples < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 0, and "
                             f"num_samples={self.num_samples} at least 1")
        if not 0 <= self.temperature < float("inf") or self.top_k < 0:
            raise ValueError(f"temperature={self.temperature} and top_k={self.top_k} must not be negative")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be 0 to {2**32 - 1}")


@torch.no_grad()
def write(model, prompt, config, seed, device, bfloat16):
    """Yield (token, depth) one by one; depth is the recursions that went into choosing the token."""
    generator = torch.Generator().manual_seed(seed)
    idx = torch.tensor([prompt], device=device)                                              # (1, T)
    for _ in range(config.max_new_tokens):
        idx = idx[:, -model.config.block_size:]
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
            logits, _, routing = model(idx, max_depth=config.max_depth or None, threshold=config.threshold)
        u = torch.rand(1, generator=generator)
        logits = logits[:, -1, :python_source.VOCAB_SIZE].cpu()                              # (1, V)
        token = pick(logits, u, config.temperature, config.top_k)                            # (1,)
        yield token.item(), routing.depth[0, -1].item()
        idx = torch.cat([idx, token.view(1, 1).to(device)], dim=1)


class Printer:
    """Text as it comes, its depth as background colour on a terminal, elsewhere as a digit below it."""
    BACKGROUND = [153, 216, 210, 177]   # among 256 terminal colours, for depth 2, 3, 4, 5, and again

    def __init__(self, color):
        terminal = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self.color = terminal if color == "auto" else color == "always"
        self.decoder, self.depths = codecs.getincrementaldecoder("utf-8")("replace"), ""

    def paint(self, text, depth):
        background = self.BACKGROUND[(depth - 2) % 4]
        return f"\033[48;5;{background};38;5;16m{text}\033[0m" if self.color and depth > 1 else text

    def __call__(self, data, depth=0, final=False):
        """Print bytes; a character may need several tokens and shows with the last of them."""
        for char in self.decoder.decode(data, final):
            self.depths += "\t" if char == "\t" else str(depth % 10) if depth else " "
            if char == "\n":
                self.end_line()
                continue
            if not char.isprintable() and char != "\t":   # nothing that a model writes may steer the terminal
                char = "\N{REPLACEMENT CHARACTER}"
            print(self.paint(char, depth), end="", flush=True)

    def end_line(self):
        print()
        if not self.color and self.depths.strip():
            print(self.depths)
        self.depths = ""


def main(argv):
    config = SampleConfig(**parse(argv, __doc__, SampleConfig))
    checkpoint, device = load_checkpoint(config.out_dir), pick_device(config.device)
    model = checkpoint["model"].to(device).eval()
    prompt = [python_source.EOF] + python_source.encode(config.prompt)
    model.check(1, config.max_depth or model.config.n_rec, config.threshold)
    bfloat16 = device.type == "cuda" and checkpoint["train_config"]["dtype"] == "bfloat16"
    printer, depths = Printer(config.color), []
    for i in range(config.num_samples):
        if config.num_samples > 1:
            print(f"--- {i + 1} of {config.num_samples}")
        printer(python_source.decode(prompt))
        for token, depth in write(model, prompt, config, config.seed + i, device, bfloat16):
            depths.append(depth)
            if token == python_source.EOF:
                break
            printer(python_source.decode([token]), depth)
        printer(b"", final=True)
        printer.end_line()
    n, n_rec = max(1, len(depths)), model.config.n_rec
    legend = " ".join(printer.paint(f" {d}: {depths.count(d) / n:.0%} ", d) for d in range(1, n_rec + 1))
    print(f"depth {legend}  mean {sum(depths) / n:.2f} of {n_rec} over {len(depths)} tokens")


if __name__ == "__main__":
    guarded(main)

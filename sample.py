"""Write text with a trained model, each token coloured by how many recursions went into choosing it.

    python sample.py                                       what `python train.py` left in out/
    python sample.py --prompt="def main(" --temperature=0.5 --top_k=40
    python sample.py --num_samples=8 --html=sample.html    eight at a time, also as a page for a browser
    python sample.py --max_depth=1                         the same text budget with a shallower model
"""
import codecs
import html
import os
import sys
from dataclasses import dataclass
from typing import Literal

import torch

from data import fineweb_edu, python_source
from mor import Engine
from train import guarded, load_checkpoint, parse, pick_device


@dataclass
class SampleConfig:
    """What to write, and how."""
    out_dir: str = "out"  # folder of the checkpoint, or the checkpoint itself
    prompt: str = ""  # text to go on from; empty: the beginning of a file or document
    max_new_tokens: int = 500  # tokens to write; where block_size is full, the last half of the text goes on
    num_samples: int = 1  # texts to write
    slots: int = 8  # texts to write at the same time
    temperature: float = 0.8  # 0 always takes the likeliest token
    top_k: int = 0  # draw from the k likeliest tokens only; 0: from all
    seed: int = 1337  # of the first text; each further one adds 1
    max_depth: int = 0  # recursions a token can take at most; 0: all of the model's
    threshold: float = 0.5  # expert-choice: a token goes deeper while its router says more than this
    html: str = ""  # file to write a page to: the text in colours, with what the router said of each token
    color: Literal["auto", "always", "never"] = "auto"  # without colour, a line of depths below each line
    device: str = "auto"  # cpu, cuda, mps; auto: the best there is

    def __post_init__(self):
        if self.max_new_tokens < 0 or not 1 <= self.num_samples <= 10**5:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 0, and "
                             f"num_samples={self.num_samples} 1 to {10**5}")
        if self.html and not self.html.endswith(".html"):
            raise ValueError(f"html={self.html} must end in .html, so that nothing else is overwritten")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be 0 to {2**32 - 1}")


def write(engine, prompt, config):
    """Yield (sample, token, depth, logits) as they come; see Request for depth and logits."""
    block_size, origin = engine.max_len, {}   # which sample, and which part of it, a request is for

    def submit(sample, part, context, left):
        if len(context) > block_size or part > 0:
            context = context[-max(1, block_size // 2):]
        request = engine.submit(context, left, config.seed + sample + part * 2**32)
        origin[request] = sample, part
    for sample in range(config.num_samples):
        submit(sample, 0, prompt, config.max_new_tokens)
    for request in engine.run():
        sample, part = origin[request]
        yield sample, request.tokens[-1], request.depths[-1], request.logits[-1]
        if request.reason == "length":
            submit(sample, part + 1, request.prompt + request.tokens,
                   request.max_new_tokens - len(request.tokens))


def follow(sample, samples, events, n, end):
    """Yield (token, depth, logits) of one sample, up to n or to token `end`. What comes for others waits in
    samples."""
    for k in range(n):
        while k == len(samples[sample]):
            other, *event = next(events)
            samples[other].append(event)
        yield samples[sample][k]
        if samples[sample][k][0] == end:
            return


class Printer:
    """Text as it comes, its depth as background colour on a terminal, elsewhere as a digit below it."""
    BACKGROUND = [153, 216, 210, 177]   # among 256 terminal colours, for depth 2, 3, 4, 5, and again

    def __init__(self, color, decode):
        terminal = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self.color, self.decode = terminal if color == "auto" else color == "always", decode
        self.decoder, self.depths = codecs.getincrementaldecoder("utf-8")("replace"), ""

    def paint(self, text, depth):
        background = self.BACKGROUND[(depth - 2) % 4]
        return f"\033[48;5;{background};38;5;16m{text}\033[0m" if self.color and depth > 1 else text

    def __call__(self, tokens, depth=0, final=False):
        """Print tokens; a character may need several and shows with the last of them."""
        for char in readable(self.decoder, self.decode(tokens), final):
            self.depths += "\t" if char == "\t" else str(depth % 10) if depth else " "
            if char == "\n":
                self.end_line()
                continue
            print(self.paint(char, depth), end="", flush=True)

    def end_line(self):
        print()
        if not self.color and self.depths.strip():
            print(self.depths)
        self.depths = ""


def readable(decoder, data, final=False):
    """Bytes as text, in which nothing steers a terminal; part of a character is kept for the next call."""
    return "".join(char if char.isprintable() or char in "\t\n" else "\N{REPLACEMENT CHARACTER}"
                   for char in decoder.decode(data, final))


# A page that loads nothing. Pointing at a token shows at the foot what the router said of it.
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Mixture-of-Recursions</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 58rem; margin: 2rem auto 6rem; padding: 0 1rem }}
pre {{ font: 15px/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  border-top: 1px solid GrayText; padding-top: 1rem }}
pre span:hover {{ outline: 2px solid }}
pre span:hover::after {{ content: attr(data-t); position: fixed; inset: auto 0 0 0; padding: .6rem 1rem;
  background: CanvasText; color: Canvas }}
td {{ padding: .1rem .6rem }} hr {{ height: 1rem; margin: 0; border: 0; background: GrayText }}
i, small {{ color: GrayText; font-style: normal }}
{colors}</style>
<h1>Mixture-of-Recursions</h1><p>The colour of a token is its depth: how many recursions of the shared block
went into choosing it. Point at one to see what the router said. The prompt is grey.</p>
<table>{rows}</table><p><small>{summary}</small></p>{texts}</html>
"""


def router_says(config, logits):
    """Score and probability, as the gate has them, for each recursion or depth that the router was asked."""
    z, name = torch.tensor(logits), "depth" if config.router == "token" else "recursion"
    p = z.softmax(0) if config.router == "token" and config.gate != "sigmoid" else z.sigmoid()
    return "".join(f" | router, {name} {r}: {score:+.2f}, {chance:.0%}"
                   for r, (score, chance) in enumerate(zip(z.tolist(), p.tolist()), 1) if score == score)


def page(config, prompt, samples, summary, decode):
    """The page for samples, each a list of (token, depth, logits)."""
    depths = [depth for sample in samples for _, depth, _ in sample]
    n, texts, colors, rows = config.n_rec, "", "", ""
    for d in range(1, n + 1):
        share = depths.count(d) / max(1, len(depths))
        colors += f".d{d} {{ background: rgb(255 140 0 / {0.6 * (d - 1) / max(1, n - 1):.2f}) }}\n"
        rows += (f'<tr><td class="d{d}">depth {d}</td><td>{share:.1%}</td><td>{depths.count(d)} tokens</td>'
                 f'<td><hr style="width: {20 * share:.1f}rem"></td></tr>\n')
    for sample in samples:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        texts += f"<pre><i>{html.escape(readable(decoder, decode(prompt)))}</i>"
        for token, depth, logits in sample:
            text = readable(decoder, decode([token]))
            about = html.escape(f"{text!r} | depth {depth} of {n}{router_says(config, logits)}")
            text = html.escape(text).replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}\n")
            texts += f'<span class="d{depth}" data-t="{about}">{text}</span>'
        texts += readable(decoder, b"", final=True) + "</pre>\n"
    return PAGE.format(colors=colors, rows=rows, summary=html.escape(summary), texts=texts)


def main(argv):
    config = SampleConfig(**parse(argv, __doc__, SampleConfig))
    checkpoint, device = load_checkpoint(config.out_dir), pick_device(config.device)
    model = checkpoint["model"].to(device).eval()
    if device.type == "cuda" and checkpoint["train_config"]["dtype"] == "bfloat16":
        for name, part in model.named_children():   # the router decides in float32
            part.to(torch.float32 if name == "router" else torch.bfloat16)
    text = {"bytes": python_source, "gpt2": fineweb_edu}[checkpoint["tokenizer"]]
    prompt = [text.EOF] + text.encode(config.prompt)
    engine = Engine(model, min(config.slots, config.num_samples), temperature=config.temperature,
                    top_k=config.top_k, max_depth=config.max_depth or None, threshold=config.threshold,
                    stop=text.EOF, vocab_size=text.VOCAB_SIZE)
    if config.html:
        open(config.html, "a").close()   # a name that cannot be written is refused before the work
    samples, events, code = [[] for _ in range(config.num_samples)], write(engine, prompt, config), 0
    for i in range(config.num_samples):
        if config.num_samples > 1:
            print(f"--- {i + 1} of {config.num_samples}")
        printer = Printer(config.color, text.decode)
        printer(prompt)
        try:
            for token, depth, _ in follow(i, samples, events, config.max_new_tokens, text.EOF):
                printer([token], depth)
        except KeyboardInterrupt:   # enough: sum up what is there
            code = 130
        printer([], final=True)
        printer.end_line()
        if code:
            break
    depths = [depth for sample in samples for _, depth, _ in sample]
    n, n_rec, c = max(1, len(depths)), model.config.n_rec, engine.counts
    legend = " ".join(printer.paint(f" {d}: {depths.count(d) / n:.0%} ", d) for d in range(1, n_rec + 1))
    print(f"depth {legend}  mean {sum(depths) / n:.2f} of {n_rec} over {len(depths)} tokens")
    summary = (f"{c['block_calls']} calls of the shared block, {c['exit_calls']} of the head, at most "
               f"{c['kv_entries']} KV entries, {len(depths) / max(c['seconds'], 1e-9):.0f} tokens/s")
    print(summary)
    if config.html:
        with open(config.html, "w", encoding="utf-8") as f:
            f.write(page(model.config, prompt, samples, summary, text.decode))
        print(f"wrote {config.html}")
    return code


if __name__ == "__main__":
    guarded(main)

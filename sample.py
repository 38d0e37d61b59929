"""Write text with a trained model, each token coloured by how many recursions went into choosing it.

    python sample.py                                       what `python train.py` left in out/
    python sample.py --prompt="def main(" --temperature=0.5 --top_k=40
    python sample.py --num_samples=8 --html=sample.html    eight at a time, also as a page for a browser
    python sample.py --svg=sample.svg                      also as a picture
    python sample.py --max_depth=1                         with one recursion for each token
"""
from data import system   # first of all, see there

if __name__ == "__main__":
    system.prepare()

import codecs
import html
import io
import os
import sys
import time
import unicodedata
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Literal

import torch

from data.system import mute, replacing
from mor import Engine, check_fields, require
from train import find_text, guarded, load_model, parse, path, pick_device

@dataclass
class SampleConfig:
    """What to write, and how."""
    out_dir: path = "out"  # a checkpoint or its folder; a published Llama, its folder or name on the hub
    data_dir: path = "data"  # where models of the hub are kept
    prompt: str = ""  # text to go on from; empty: the beginning of a file or document
    max_new_tokens: int = 500  # tokens to write; when block_size is full, its last half is the new beginning
    num_samples: int = 1  # texts to write
    slots: int = 8  # texts to write at the same time
    temperature: float = 0.8  # 0 always takes the likeliest token
    top_k: int = 0  # draw from the k likeliest tokens only; 0: from all
    seed: int = 1337  # of the first text; each further one adds 1
    max_depth: int = 0  # recursions a token can take at most; 0: all of the model's
    threshold: float = 0.5  # expert-choice: a token goes deeper while its router says more than this
    html: path = ""  # file to write a page to: the text in colours, with what the router said of each token
    svg: path = ""  # file to write a picture to: the text in colours
    color: Literal["auto", "always", "never"] = "auto"  # without colour, a line of depths below each line
    device: str = "auto"  # cpu, cuda, mps; auto: the best there is

    def __post_init__(self):
        check_fields(self, max_new_tokens=0, seed=0)
        require(self.num_samples <= 10**5, f"num_samples={self.num_samples} must be 1 to {10**5}")
        for name in ("html", "svg"):
            value = getattr(self, name)
            require(not value or value.endswith("." + name),
                    f"{name}={value} must end in .{name}, so that nothing else is overwritten")

def texts(engine, prompt, config, samples):
    """Append (token, depth, logits), see Request, to the samples as they come; yield after each. Where a text
    fills block_size, its next part is a new request, with the last half as prompt."""
    block_size, origin = engine.max_len, {}   # sample and part that each request is for

    def submit(sample, part, context, left):
        if len(context) > block_size or part > 0:
            context = context[-max(1, block_size // 2):]
        request = engine.submit(context, left, config.seed + sample + part * 2**32)
        origin[request] = sample, part
    for sample in range(config.num_samples):
        submit(sample, 0, prompt, config.max_new_tokens)
    for request in engine.run():
        sample, part = origin[request]
        samples[sample].append((request.tokens[-1], request.depths[-1], request.logits[-1]))
        yield
        if request.reason == "length":
            submit(sample, part + 1, request.prompt + request.tokens,
                   request.max_new_tokens - len(request.tokens))

def follow(sample, samples, events, n, end):
    """Yield (token, depth, logits) of one sample, up to n or to token `end`, while `events` fill them all."""
    for k in range(n):
        while k == len(samples[sample]):
            next(events)
        yield samples[sample][k]
        if samples[sample][k][0] == end:
            return

class Printer:
    """Text as it comes, its depth as background colour on a terminal, elsewhere as a digit below it."""
    BACKGROUND = [153, 216, 210, 177]   # among 256 terminal colours, for depth 2, 3, 4, 5, and again

    def __init__(self, color):
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        terminal = sys.stdout.isatty() and not plain
        self.color, self.depths = terminal if color == "auto" else color == "always", ""

    def paint(self, text, depth):
        background = self.BACKGROUND[(depth - 2) % 4]
        return f"\033[48;5;{background};38;5;16m{text}\033[0m" if self.color and depth > 1 else text

    def __call__(self, text, depth):
        for char in text:
            digit = str(depth % 10) if depth else " "
            self.depths += "\t" if char == "\t" else digit.ljust(columns(char)) if columns(char) else ""
            if char == "\n":
                self.end_line()
            else:
                print(self.paint(char, depth), end="", flush=True)

    def end_line(self):
        print()
        if not self.color and self.depths.strip():
            print(self.depths)
        self.depths = ""

def columns(char):
    """How many places of a line a character takes: two in East Asian scripts, none for a combining one."""
    if unicodedata.category(char) in ("Mn", "Me", "Cf") or "\u1160" <= char <= "\u11ff":   # parts of Hangul
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1

def harmless(char):
    """The character itself, but for those that steer a terminal, turn the direction of text, or are none."""
    steers = unicodedata.category(char) == "Cc" and char not in "\t\n" or char in "\ufffe\uffff"
    turns = unicodedata.bidirectional(char) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    return "\N{REPLACEMENT CHARACTER}" if steers or turns else char

def spelled(prompt, sample, decode):
    """Yield (text, depth, logits) for each token of a prompt, whose depth is 0, and of a sample, as it comes.
    A character, and the end of a line on Windows, may need several tokens, and comes with the last."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
    for token, depth, logits in chain(((token, 0, []) for token in prompt), sample, [(None, 0, [])]):
        text = decoder.decode(b"" if token is None else decode([token]), final=token is None)
        yield "".join(map(harmless, text)), depth, logits

def legend(samples, n_rec):
    """(text, depth) of each piece of the line that explains the colours."""
    depths = [depth for sample in samples for _, depth, _ in sample]
    n = max(1, len(depths))
    pieces = [(f" {d}: {depths.count(d) / n:.0%} ", d) for d in range(1, n_rec + 1)]
    return [("depth ", 0), *pieces, (f"  mean {sum(depths) / n:.2f} of {n_rec} over {len(depths)} tokens", 0)]

def opacity(depth, n_rec):   # of orange, on light or dark: depth 1 has none, each further one more
    return f"{0.6 * max(0, depth - 1) / max(1, n_rec - 1):.2f}"

# Pages and pictures load nothing. Pointing at a token in a page shows what the router said of it.
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Mixture-of-Recursions</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 58rem; margin: 2rem auto 6rem; padding: 0 1rem }}
pre {{ font: 15px/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  border-top: 1px solid GrayText; padding-top: 1rem }}
b {{ font-weight: normal }} b:hover {{ outline: 2px solid }} i, small {{ color: GrayText }}
{colors}</style>
<h1>Mixture-of-Recursions</h1><p>The colour of a token is its depth: how many recursions of the shared block
went into choosing it. Point at one to see what the router said. The prompt is grey.</p>
<p>{legend}</p><p><small>{summary}</small></p>{texts}</html>
"""

def router_says(config, logits):
    """Score and probability, as the gate has them, for each recursion or depth that the router was asked."""
    z, name = torch.tensor(logits), "depth" if config.router == "token" else "recursion"
    p = z.softmax(0) if config.router == "token" and config.gate != "sigmoid" else z.sigmoid()
    return "".join(f" | router, {name} {r}: {score:+.2f}, {chance:.0%}"
                   for r, (score, chance) in enumerate(zip(z.tolist(), p.tolist()), 1) if score == score)

def page(config, prompt, samples, summary, decode):
    """The page for samples, each a list of (token, depth, logits)."""
    n, texts = config.n_rec, ""
    for sample in samples:
        texts += "<pre>"
        for text, depth, logits in spelled(prompt, sample, decode):
            about = html.escape(f"{text!r} | depth {depth} of {n}{router_says(config, logits)}")
            text = html.escape(text).replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}\n")
            texts += f'<b class="d{depth}" title="{about}">{text}</b>' if depth else f"<i>{text}</i>"
        texts = texts.replace("</i><i>", "").replace("<i></i>", "") + "</pre>\n"
    colors = "".join(f".d{d} {{ background: rgb(255 140 0 / {opacity(d, n)}) }}\n" for d in range(1, n + 1))
    colored = "".join(f'<span class="d{d}">{text}</span>' for text, d in legend(samples, n))
    return PAGE.format(colors=colors, legend=colored, summary=html.escape(summary), texts=texts)

PICTURE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"
 height="{height}" font-family="ui-monospace, Menlo, Consolas, monospace" font-size="13" xml:space="preserve">
<style>.page {{ fill: #fff }} text {{ fill: #1f2328 }} .d0 {{ fill: #818b98 }}
@media (prefers-color-scheme: dark) {{ .page {{ fill: #0d1117 }} text {{ fill: #e6edf3 }} }}</style>
<rect class="page" width="{width}" height="{height}" rx="6"/>
{texts}</svg>
"""
WIDTH, HEIGHT, COLUMNS = 8, 18, 96   # of a character, in pixels; characters in a line

def picture(config, prompt, samples, decode):
    """The same as an SVG, in which every character has its place, whatever the font."""
    pieces, lines, used, svg = [], [[]], 0, ""
    for sample in samples:
        pieces += [*spelled(prompt, sample, decode), ("\n\n", 0, [])]
    for text, depth, *_ in pieces + legend(samples, config.n_rec):
        for char in text.expandtabs(4):
            if char == "\n" or used + columns(char) > COLUMNS:
                lines.append([])
                used = 0
            if char != "\n":
                joins = lines[-1] and not columns(char)   # the character before, whatever its own depth
                lines[-1].append((lines[-1][-1][0] if joins else depth, char))
                used += columns(char)
    for y, line in enumerate(lines):
        x = WIDTH
        for depth, run in groupby(line, key=itemgetter(0)):
            text = "".join(char for _, char in run)
            place, width = f'x="{x}" y="{HEIGHT * y + 8}"', WIDTH * sum(map(columns, text))
            svg += (f'<rect {place} width="{width}" height="{HEIGHT}" fill="#ff8c00" fill-opacity="'
                    f'{opacity(depth, config.n_rec)}"/><text {place} dy="13" textLength="{width}" '
                    f'class="d{depth}">{html.escape(text)}</text>\n')
            x += width
    return PICTURE.format(width=WIDTH * (COLUMNS + 2), height=HEIGHT * len(lines) + 16, texts=svg)

def main(argv):
    config = SampleConfig(**parse(argv, __doc__, SampleConfig))
    checkpoint, device = load_model(config.out_dir, config.data_dir), pick_device(config.device)
    model = checkpoint["model"].to(device).eval()
    if device.type == "cuda" and checkpoint["train_config"]["dtype"] == "bfloat16":
        for name, part in model.named_children():   # the router decides in float32
            part.to(torch.float32 if name == "router" else torch.bfloat16)
    text = find_text(checkpoint["tokenizer"])
    prompt = text.prefix + text.encode(config.prompt) or [text.EOF]
    longest = min(len(prompt) + max(1, config.max_new_tokens), model.config.block_size)
    engine = Engine(model, min(config.slots, config.num_samples), longest, temperature=config.temperature,
                    top_k=config.top_k, max_depth=config.max_depth or None, threshold=config.threshold,
                    stop=text.EOF, vocab_size=text.VOCAB_SIZE)
    for file in filter(None, (config.html, config.svg)):   # refused before the work
        require(os.access(Path(file).parent, os.W_OK) and not Path(file).is_dir(),
                f"{file} cannot be written: name a file in a folder that you may write to")
    samples, code = [[] for _ in range(config.num_samples)], 0
    events, printer = texts(engine, prompt, config, samples), Printer(config.color)
    clock = time.perf_counter()
    try:
        for i in range(config.num_samples):
            if config.num_samples > 1:
                print(f"--- {i + 1} of {config.num_samples}")
            sample = follow(i, samples, events, config.max_new_tokens, text.EOF)
            for piece, depth, _ in spelled(prompt, sample, text.decode):
                printer(piece, depth)
            printer.end_line()
    except KeyboardInterrupt:   # enough: sum up what is there
        printer.end_line()
        code = 130
    except BrokenPipeError:   # nobody reads on; the page is written
        mute("stdout")
        code = 141
    seconds = time.perf_counter() - clock
    print("".join(printer.paint(piece, depth) for piece, depth in legend(samples, model.config.n_rec)))
    summary = (f"{engine.counts['block_calls']} calls of the shared block, {engine.counts['head_calls']} of "
               f"the head, {engine.counts['tokens'] / max(seconds, 1e-9):.0f} tokens/s")
    print(summary)
    for file, content in ((config.html, partial(page, summary=summary)), (config.svg, picture)):
        if file:
            with replacing(file) as f:
                f.write(content(model.config, prompt, samples, decode=text.decode).encode())
            print(f"wrote {file}")
    return code

if __name__ == "__main__":
    guarded(main)

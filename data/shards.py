"""One file format for all token data, the one that public token shards use, and one reader for it.

A file is a header of 256 int32 (magic, version, number of tokens, zeros), then the tokens as uint16.
"""
import os
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np
import torch

MAGIC, VERSION, HEADER = 20240520, 1, 256 * 4


class Source(NamedTuple):
    """What a data source offers."""
    train: Callable  # shard number -> path of that training file, or None past the last one
    val: Path  # file of validation tokens
    name: str  # of exactly these tokens: another text has another name
    vocab_size: int  # token ids are below this
    tokenizer: str  # how ids become text: "bytes" or "gpt2"


def write_tokens(path, chunks):
    """Write uint16 arrays to one token file; the name appears only when the file is complete. Returns their number."""
    part, n = Path(f"{path}.part{os.getpid()}"), 0
    with open(part, "wb") as f:
        f.write(bytes(HEADER))
        for chunk in chunks:
            f.write(chunk.astype("<u2").tobytes())
            n += len(chunk)
        header = np.zeros(256, dtype="<i4")
        header[:3] = MAGIC, VERSION, n
        f.seek(0)
        f.write(header.tobytes())
    os.replace(part, path)
    return n


def read_tokens(path):
    """The tokens of a file as a read-only uint16 array on disk. ValueError if it is not a whole token file."""
    size = os.path.getsize(path)
    header = np.fromfile(path, dtype="<i4", count=256)
    if size < HEADER or header[0] != MAGIC or header[1] != VERSION:
        raise ValueError(f"{path} is not a token file: its header has no magic {MAGIC} and version {VERSION}")
    if size != HEADER + 2 * header[2]:
        raise ValueError(f"{path} is damaged: {size} bytes, but {header[2]} tokens make {HEADER + 2 * header[2]}")
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER, shape=int(header[2])) if header[2] else np.zeros(0, "<u2")


def batch(windows, device):
    """Inputs and targets (B, T), int64, from windows (B, T + 1): targets are inputs shifted by one."""
    if device.type == "cuda":   # pinned, so that the copy overlaps with what the device is doing
        windows = windows.pin_memory().to(device, non_blocking=True)
    return windows[:, :-1].to(device), windows[:, 1:].to(device)


class Reader:
    """Endless batches of B rows of T tokens, shard after shard, the windows of a shard in a seeded random order.

    An epoch predicts every token once, except the first of a shard and the fewer than T at its end that fill no window.
    `state` is the exact position: a reader that is given it goes on as if it had never stopped.
    """
    def __init__(self, shard, B, T, seed, device=torch.device("cpu"), state=None):
        self.shard, self.B, self.T, self.seed, self.device = shard, B, T, seed, device
        self.state = dict(state or {"epoch": 0, "shard": 0, "window": 0})
        self.barren = state is None   # until a window is found
        self.open()

    def open(self):
        """Open the shard of the current position, or begin the next epoch behind the last one."""
        s = self.state
        path = self.shard(s["shard"])
        if path is None:
            if self.barren:
                raise ValueError(f"no {self.T + 1} tokens of the training data stand in a row: give more text, or a "
                                 f"--block_size below {self.T}")
            s.update(epoch=s["epoch"] + 1, shard=0, window=0)
            path = self.shard(0)
        self.tokens = read_tokens(path)
        n = max(0, (len(self.tokens) - 1) // self.T)
        self.order = np.random.default_rng((self.seed, s["epoch"], s["shard"])).permutation(n)
        self.barren = self.barren and n == 0

    def __next__(self):
        """Inputs and targets (B, T), int64, on the device."""
        windows, s = torch.empty(self.B, self.T + 1, dtype=torch.int64), self.state
        for row in windows:
            while s["window"] == len(self.order):
                s.update(shard=s["shard"] + 1, window=0)
                self.open()
            start = self.order[s["window"]] * self.T
            row.copy_(torch.from_numpy(self.tokens[start:start + self.T + 1].astype(np.int64)))
            s["window"] += 1
        return batch(windows, self.device)


def val_batches(path, B, T, n, device):
    """Up to n batches of B rows, spread evenly over a validation file, the same ones every time."""
    tokens = read_tokens(path)
    total = (len(tokens) - 1) // T
    if total < 1:
        raise ValueError(f"{path} holds {len(tokens)} validation tokens, fewer than the {T + 1} of a row: give more text, "
                         f"or a --block_size below {T}")
    picks = np.linspace(0, total - 1, min(n * B, total)).round().astype(int)
    windows = torch.stack([torch.from_numpy(tokens[i * T:(i + 1) * T + 1].astype(np.int64)) for i in picks])
    return [batch(rows, device) for rows in windows.split(B)]

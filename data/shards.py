"""One file format for all token data, the one that public token shards use, and one reader for it.

A file is a header of 256 int32 (magic, version, number of tokens, zeros), then the tokens as uint16.
"""
import os
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np
import torch

from data.system import replacing

MAGIC, VERSION, HEADER = 20240520, 1, 256 * 4

class Source(NamedTuple):
    """What a data source offers."""
    train: Callable  # shard number -> tokens of that training file, or None past the last one
    val: Path  # file of validation tokens
    name: str  # of exactly these tokens: other text has another name
    vocab_size: int  # rows that an embedding needs: token ids are below this
    tokenizer: str  # how ids become text

def write_tokens(path, chunks):
    """Write uint16 arrays to one token file, whose name appears when it is complete. Returns its length."""
    n = 0
    with replacing(path) as f:
        f.write(bytes(HEADER))
        for chunk in chunks:
            f.write(chunk.astype("<u2").tobytes())
            n += len(chunk)
        f.seek(0)
        f.write(np.array([MAGIC, VERSION, n], dtype="<i4").tobytes())
    return n

def count_tokens(path):
    """Number of tokens that the header of a file promises. ValueError if it is not that of a token file."""
    header = np.fromfile(path, dtype="<i4", count=256)
    if len(header) < 256 or header[0] != MAGIC or header[1] != VERSION or header[2] < 0:
        raise ValueError(f"{path} is not a token file: it lacks magic {MAGIC}, version {VERSION}, a count: "
                         "delete it, and it is made again")
    return int(header[2])

def read_tokens(path):
    """The tokens of a file, a uint16 array that stays on disk. ValueError if it is not a whole token file."""
    n, size = count_tokens(path), os.path.getsize(path)
    if size != HEADER + 2 * n:
        raise ValueError(f"{path} is damaged: it has {size} bytes, but {n} tokens make {HEADER + 2 * n}: "
                         "delete it, and it is made again")
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER, shape=n) if n else np.zeros(0, dtype="<u2")

def batch(windows, device):
    """Inputs and targets (B, T), int64, from windows (B, T + 1): targets are inputs shifted by one."""
    if device.type == "cuda":   # pinned, so that the copy overlaps with what the device is doing
        windows = windows.pin_memory().to(device, non_blocking=True)
    return windows[:, :-1].to(device), windows[:, 1:].to(device)

class Reader:
    """Endless batches of B rows of T tokens, shard after shard, a shard's windows in a seeded random order.

    An epoch predicts every token once, except a shard's first and the fewer than T left over at its end.
    `state` is the exact position: a reader that is given it goes on as if it had never stopped. Of `world`
    readers, each takes B of every world * B rows, and all have the same state.
    """
    # DIFFERS: the released code reads in order; shuffled within a shard, rows of a batch are unrelated texts.
    def __init__(self, shard, B, T, seed, device=torch.device("cpu"), state=None, rank=0, world=1):
        self.shard, self.B, self.T, self.seed, self.device = shard, B, T, seed, device
        self.rank, self.world = rank, world
        self.state = dict(state or {"epoch": 0, "shard": 0, "window": 0})
        self.barren = state is None   # nothing found in this epoch, as far as is known
        self.open()

    def open(self):
        """Open the shard of the current position; behind the last one, begin the next epoch."""
        s = self.state
        self.tokens = None   # Windows cannot delete a file that is mapped, and a shard may go now
        self.tokens = self.shard(s["shard"])
        if self.tokens is None:
            if self.barren:
                raise ValueError(f"the training data has no {self.T + 1} tokens in a row: give more text, or "
                                 f"a --block_size below {self.T}")
            self.barren = True
            s.update(epoch=s["epoch"] + 1, shard=0, window=0)
            print(f"the data has been read to its end: epoch {s['epoch'] + 1} begins", flush=True)
            self.tokens = self.shard(0)
        n = max(0, (len(self.tokens) - 1) // self.T)
        self.order = np.random.default_rng((self.seed, s["epoch"], s["shard"])).permutation(n)
        self.barren = self.barren and n == 0

    def __next__(self):
        """Inputs and targets (B, T), int64, on the device."""
        windows, s = torch.empty(self.B, self.T + 1, dtype=torch.int64), self.state
        for i in range(self.world * self.B):
            while s["window"] >= len(self.order):
                s.update(shard=s["shard"] + 1, window=0)
                self.open()
            if i // self.B == self.rank:
                start = self.order[s["window"]] * self.T
                window = self.tokens[start:start + self.T + 1].astype(np.int64)
                windows[i % self.B] = torch.from_numpy(window)
            s["window"] += 1
        return batch(windows, self.device)

def val_batches(path, B, T, n, device):
    """Up to n rows in batches of B, spread evenly over a validation file, the same ones every time."""
    tokens = read_tokens(path)
    total = (len(tokens) - 1) // T
    if total < 1:
        raise ValueError(f"{path} has {len(tokens)} tokens, but validation needs {T + 1}: give more text, or "
                         f"a --block_size below {T}")
    picks = np.linspace(0, total - 1, min(n, total)).round().astype(int)
    windows = torch.stack([torch.from_numpy(tokens[i * T:(i + 1) * T + 1].astype(np.int64)) for i in picks])
    return [batch(rows, device) for rows in windows.split(B)]

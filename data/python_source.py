"""Text that is already there, as bytes: the source of Python's own standard library, or any file or folder.

Byte b is token b, and token 256 ends a file. The library is real text in a language whose samples a reader can
judge, about 11 MB of it on any machine that can run this, so the default needs no download.
"""
import hashlib
import os
import platform
import sysconfig
from pathlib import Path

import numpy as np

from data.shards import Source, write_tokens

EOF = 256
VOCAB_SIZE = 257
CHUNK = 1 << 24


def library_files():
    """The .py files of the standard library, tests and idlelib left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    out = {"test", "tests", "idlelib", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    return root, sorted(p for p in root.rglob("*.py") if not out & set(p.relative_to(root).parts))


def text_files(path):
    """The text files in a folder, however deep, or the one file. Hidden files and those with a zero byte are left out."""
    path = Path(path).expanduser()
    if not path.exists():
        raise ValueError(f"--data={path} does not exist: name a text file, a folder of text, or python")
    if not path.is_dir():
        return path.parent, [path]

    def fail(error):
        raise error
    found = [Path(folder) / name for folder, _, names in os.walk(path, onerror=fail) for name in names]
    found = [p for p in found if not any(part.startswith(".") for part in p.relative_to(path).parts) and p.is_file()]
    return path, sorted(p for p in found if b"\0" not in p.open("rb").read(4096))


def split(files):
    """(train, val) lists of (path, first byte, end byte): every 20th file is for validation, by name; if there are fewer,
    the last 5 % of each."""
    sizes = [(p, p.stat().st_size) for p in files]
    if len(sizes) >= 20:
        pieces = [(p, 0, n) for p, n in sizes]
        return [x for i, x in enumerate(pieces) if i % 20 != 19], pieces[19::20]
    cuts = [(p, n * 95 // 100, n) for p, n in sizes]
    return [(p, 0, cut) for p, cut, _ in cuts], cuts


def tokens(pieces):
    """The bytes of each piece as uint16 arrays, each file's followed by EOF."""
    for path, start, end in pieces:
        with open(path, "rb") as f:
            f.seek(start)
            while start < end and (chunk := f.read(min(CHUNK, end - start))):
                yield np.frombuffer(chunk, dtype=np.uint8).astype(np.uint16)
                start += len(chunk)
        yield np.array([EOF], dtype=np.uint16)


def source(data, data_dir):
    """The source for data="python" or a path; builds its two token files in data_dir on first use."""
    root, files = library_files() if data == "python" else text_files(data)
    if not sum(p.stat().st_size for p in files):
        raise ValueError(f"--data={data} holds no text: name a text file or a folder of text")
    stamp = hashlib.sha256(repr([(str(p.relative_to(root)), p.stat().st_size, p.stat().st_mtime_ns) for p in files]).encode())
    name = f"python-{platform.python_version()}" if data == "python" else Path(data).resolve().name
    folder = Path(data_dir) / f"{name}-{stamp.hexdigest()[:8]}"   # other text, other folder
    train, val = folder / "train.bin", folder / "val.bin"
    if not (train.exists() and val.exists()):
        folder.mkdir(parents=True, exist_ok=True)
        n = [write_tokens(path, tokens(pieces)) for path, pieces in zip((train, val), split(files))]
        print(f"built {folder} from {len(files):,} files: {n[0]:,} tokens to train on, {n[1]:,} to validate")
    return Source(train=lambda i: train if i == 0 else None, val=val, name=folder.name, vocab_size=VOCAB_SIZE, tokenizer="bytes")


def encode(text):
    """Tokens of a text (str or bytes); text that Python could not decode comes back as the bytes that it was."""
    return list(text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text)


def decode(tokens):
    """The bytes of tokens; EOF has none."""
    return bytes(t for t in tokens if t != EOF)

"""Text that is already there, as bytes: the source of Python's own standard library, or any file or folder.

Byte b is token b, and token 256 ends a file. The library is real text, in a language whose samples a reader
can judge, about 11 MB of it on any machine that can run this: so the default needs no download.
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
CHUNK = 1 << 24   # bytes read at a time
NOT_LIBRARY = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}


def walk(root, skip):
    """All files below a folder, sorted by name, but those for which, or for whose folder, skip(name)
    holds."""
    def fail(error):
        raise error
    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = sorted(name for name in folders if not skip(name))
        yield from (Path(folder) / name for name in sorted(names) if not skip(name))


def find(data):
    """(folder, files) for data="python" or a path. Hidden files and those with a zero byte are not text."""
    if data == "python":
        root = Path(sysconfig.get_paths()["stdlib"])
        return root, [p for p in walk(root, NOT_LIBRARY.__contains__) if p.suffix == ".py"]
    path = Path(data).expanduser()
    if not path.exists():
        raise ValueError(f"--data={data} does not exist: name a text file, a folder of text, or python")
    if not path.is_dir():
        return path.parent, [path]
    files = [p for p in walk(path, lambda name: name.startswith(".")) if p.is_file()]
    return path, [p for p in files if b"\0" not in p.open("rb").read(4096)]


def split(files):
    """Pieces (path, first byte, end byte) to train on, and to validate with: every 20th file by name, or if
    there are fewer, the last 5 % of each."""
    whole = [(p, 0, p.stat().st_size) for p in files]
    if len(files) >= 20:
        return [piece for i, piece in enumerate(whole) if i % 20 != 19], whole[19::20]
    return [(p, 0, n * 95 // 100) for p, _, n in whole], [(p, n * 95 // 100, n) for p, _, n in whole]


def tokens(pieces):
    """The bytes of each piece as uint16 arrays, and EOF behind each."""
    for path, start, end in pieces:
        with open(path, "rb") as f:
            f.seek(start)
            while start < end and (chunk := f.read(min(CHUNK, end - start))):
                yield np.frombuffer(chunk, dtype=np.uint8).astype(np.uint16)
                start += len(chunk)
        yield np.array([EOF], dtype=np.uint16)


def source(data, data_dir):
    """The Source for data="python" or a path; builds its two token files below data_dir on first use."""
    root, files = find(data)
    stats = [(str(p.relative_to(root)), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    if not sum(size for _, size, _ in stats):
        raise ValueError(f"--data={data} holds no text: name a text file or a folder of text")
    name = f"python-{platform.python_version()}" if data == "python" else Path(data).resolve().name
    stamp = hashlib.sha256(repr((root.resolve(), stats)).encode(errors="surrogateescape")).hexdigest()
    name = f"{name}-{stamp[:8]}"   # other text, other name
    train, val = Path(data_dir) / name / "train.bin", Path(data_dir) / name / "val.bin"
    if not (train.exists() and val.exists()):
        train.parent.mkdir(parents=True, exist_ok=True)
        n = [write_tokens(path, tokens(pieces)) for path, pieces in zip((train, val), split(files))]
        print(f"built {train.parent} from {len(files):,} files: {n[0]:,} tokens, {n[1]:,} of validation")
    return Source(lambda i: train if i == 0 else None, val, name, VOCAB_SIZE, tokenizer="bytes")


def encode(text):
    """Tokens of a text (str or bytes); what Python could not decode in an argument becomes its bytes
    again."""
    return list(text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text)


def decode(tokens):
    """The bytes of tokens; EOF has none."""
    return bytes(t for t in tokens if t != EOF)

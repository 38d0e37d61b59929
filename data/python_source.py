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

from data.shards import Source, read_tokens, write_tokens
from data.system import lock, remove, say

EOF = 256
VOCAB_SIZE = 257
prefix = [EOF]   # what a prompt begins with: the beginning of a file
CHUNK = 1 << 24   # bytes, or characters, read at a time
NOT_LIBRARY = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}
MARKS = {b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}

def walk(root, skip):
    """All files below a folder, sorted by name, but those for which, or for whose folder, skip(path)
    holds."""
    def fail(error):
        raise error
    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = sorted(name for name in folders if not skip(Path(folder, name)))
        yield from (path for name in sorted(names) if not skip(path := Path(folder, name)))

def unfit(path):
    """Why a file or folder below a folder of text is left out; None if it is not."""
    if path.name.startswith("."):
        return "hidden"
    if path.name == "log.jsonl" or path.name == "lock" and path.stat().st_size == 0:
        return "written by train.py"
    if path.is_dir():
        return "a link" if path.is_symlink() else None
    if not path.is_file():
        return "no file"
    return "zero bytes: no text, or UTF-16 without a mark" if b"\0" in next(read(path), b"")[:4096] else None

def find(data):
    """Folder, files and what was left out, for data="python" or a path."""
    if data == "python":
        root = Path(sysconfig.get_paths()["stdlib"])
        skip = lambda path: path.name in NOT_LIBRARY
        return root, [path for path in walk(root, skip) if path.suffix == ".py"], []
    path, left_out = Path(data), []
    if path.is_file():
        if b"\0" in next(read(path), b"")[:4096]:
            say(f"note: {data} has zero bytes: is it no text, or UTF-16 without a mark?")
        return path.parent, [path], []
    if not path.is_dir():
        fault = "is no file" if path.exists() else "does not exist"
        raise ValueError(f"--data={data} {fault}: name a text file, a folder of text, or python")

    def skip(path):
        if reason := unfit(path):
            left_out.append(f"{path.name!r} ({reason})")
        return reason
    return path, list(walk(path, skip)), left_out

def read(path):
    """The bytes of a file, CHUNK by CHUNK; those of UTF-8 where a mark says that it is UTF-16 or UTF-32."""
    try:
        with open(path, "rb") as f:
            first = f.read(4)
        coding = next((coding for mark, coding in MARKS.items() if first.startswith(mark)), None)
        with open(path, encoding=coding, errors="replace", newline="") if coding else open(path, "rb") as f:
            while chunk := f.read(CHUNK):
                yield chunk.encode() if coding else chunk
    except OSError as error:   # of a disk that fails: say where
        raise OSError(error.errno, error.strerror, str(path)) from None

def split(sizes):
    """Pieces (path, first byte, end byte) to train on, and to validate with, of files (path, size): every
    20th file by name, if they have 2.5 to 10 % of the bytes; else the last 5 % of each file."""
    whole = [(path, 0, size) for path, size in sizes]
    if 0.025 <= sum(size for _, size in sizes[19::20]) / sum(size for _, size in sizes) <= 0.1:
        return [piece for i, piece in enumerate(whole) if i % 20 != 19], whole[19::20]
    return [(path, 0, n * 95 // 100) for path, n in sizes], [(path, n * 95 // 100, n) for path, n in sizes]

def tokens(pieces, text=None):
    """The tokens of each piece as uint16 arrays, and EOF behind each. text: see `source`."""
    for path, start, end in pieces:
        rest = b""
        for chunk in read(path):
            rest += chunk[max(0, start):max(0, end)]
            start, end = start - len(chunk), end - len(chunk)
            cut = rest.rfind(b"\n") + 1 if text else len(rest)   # between lines: no character is cut
            yield text.tokens(rest[:cut]) if text else np.frombuffer(rest, dtype=np.uint8).astype(np.uint16)
            rest = rest[cut:]
        yield from [text.tokens(rest)] if rest else []
        yield np.array([text.EOF if text else EOF], dtype=np.uint16)

def measure(files):
    """The size of each file in bytes, and eight letters that say what is in them."""
    sizes, key = dict.fromkeys(files, 0), hashlib.sha256()
    for path in files:
        for chunk in read(path):
            key.update(chunk)
            sizes[path] += len(chunk)
        key.update(f"end at {sizes[path]}".encode())
    return sizes, key.hexdigest()[:8]

def source(data, data_dir, text=None):
    """The Source for data="python" or a path. Builds its two token files below data_dir on first use, and
    deletes those of the same text as it was before. text: the tokenizer, see pretrained.Tokenizer; None:
    bytes."""
    root, files, left_out = find(data)
    sizes, content = measure(files)
    left = f"; left out {len(left_out):,}: {', '.join(left_out[:9])}" if left_out else ""
    if not sum(sizes.values()):
        raise ValueError(f"--data={data} holds no text: name a text file or a folder of text{left}")
    name = f"python-{platform.python_version()}" if data == "python" else Path(data).resolve().name
    place = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:8]
    encoded = f"-{text.name}" if text else ""
    folder = Path(data_dir) / f"{name}-{place}{encoded}"
    built = folder / f"train-{content}.bin", folder / f"val-{content}.bin"   # other text, other names
    folder.mkdir(parents=True, exist_ok=True)
    if not all(path.exists() for path in built):
        with open(folder / "lock", "a") as file:
            alone = lock(file, wait=True)
            if not all(path.exists() for path in built):   # nor has another process built them meanwhile
                pieces = split([*sizes.items()])
                n = [write_tokens(path, tokens(part, text)) for path, part in zip(built, pieces)]
                if measure(files)[1] != content:
                    remove(*built)
                    raise ValueError(f"--data={data} was changed while it was read: start again")
                print(f"built {folder} from {len(files):,} files: {n[0]:,} tokens, {n[1]:,} of "
                      f"validation{left}")
            if alone:   # older text, and what killed processes left; a run that has a file open keeps it
                remove(*set(folder.glob("*.bin*")) - set(built))
    held = read_tokens(built[0])   # held for good, whoever builds here meanwhile
    return Source(lambda i: held if i == 0 else None, built[1], f"{name}-{content}{encoded}",
                  text.VOCAB_SIZE if text else VOCAB_SIZE, text.description if text else "bytes")

def encode(text):
    """Tokens of a text (str or bytes); what Python could not decode in an argument becomes its bytes
    again."""
    return list(text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text)

def decode(tokens):
    """The bytes of tokens; EOF has none."""
    return bytes(t for t in tokens if t != EOF)

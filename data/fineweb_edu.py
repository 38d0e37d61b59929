"""FineWeb-Edu, streamed: public shards of 100M GPT-2 tokens each, fetched one ahead of the one in training.

Training needs no tokenizer, for the shards hold ids already. Only text does: tiktoken's gpt2.
"""
import hashlib
import os
import re
import threading
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import requests
from requests.exceptions import ChunkedEncodingError, ProxyError, SSLError
from tqdm import tqdm

from data.shards import HEADER, MAGIC, VERSION, Source, count_tokens, read_tokens, write_tokens
from data.system import cannot_write, lock, remove, say

# --data -> dataset on the Hugging Face hub, and how the names of its files begin.
SETS = {"fineweb_edu": ("karpathy/fineweb-edu-100B-gpt2-token-shards", "edu_fineweb"),
        "fineweb_edu_10b": ("kjj0/finewebedu10B-gpt2", "finewebedu")}
EOF = 50256   # <|endoftext|>; in the shards it stands before each document
VOCAB_SIZE = 50257
prefix = [EOF]   # what a prompt begins with: the beginning of a document
PADDED = 50304   # rows of the embedding: a multiple of 128, which GPUs multiply faster
VAL_TOKENS = 10_000_000   # of the 100M in the validation file
START = np.array([MAGIC, VERSION], dtype="<i4").tobytes()   # of every token file
CHUNK = 1 << 16   # bytes read at a time
TRIES = 8   # failures in a row before a fetch gives up, with 1, 2, 4, ... seconds in between
LONGEST_WAIT = 300   # seconds that a server can ask for
EVERY = 30   # seconds from line to line where a bar would be no use

class Fetch(threading.Thread):
    """One token file on its way from url to path, in the background; with a limit, only its first tokens.

    What has come lies in a part, a file named after the version (ETag) that it is of; the next try, or run,
    goes on from its end. The final name appears when magic, version, count and size agree. pretrained.py
    fetches other kinds of files with it.
    """
    kind, instead, room = "shard", "--data=python needs no network", "; --keep_shards=2 bounds what is kept"
    met = False   # whether a server has answered this process: then proxy and certificates are right

    def __init__(self, url, path, limit=None):
        super().__init__(daemon=True)   # a run that ends does not wait for it
        self.url, self.path, self.limit = url, path, limit
        self.total = self.error = None
        self.missing = False   # the server has no such file
        self.start()

    def wait(self, needed=True):
        """The path; where the server has no such file and it is not needed, None. Raises what went wrong.
        Meanwhile a bar; where there is no terminal, a line now and then."""
        silent, said = os.environ.get("LOCAL_RANK", "0") != "0", time.monotonic()
        with tqdm(desc=self.path.name, unit="B", unit_scale=True, delay=0.5, disable=silent or None) as bar:
            while self.is_alive():
                self.join(0.1)
                bar.total = self.total
                bar.update(self.have() - bar.n)
                if bar.disable and time.monotonic() > said + EVERY:
                    said = time.monotonic()
                    say(f"{self.path.name}: {self.have()} of {self.total or '?'} bytes")
        if self.error:
            raise self.error
        if self.missing and needed:
            raise ValueError(f"{shown(self.url)} does not exist (status 404): check HF_ENDPOINT and HF_TOKEN")
        if self.missing:
            return None
        self.check(self.path)
        return self.path

    def promised(self, path):
        """Bytes of the whole file, by what has come of it; None if that is too little to say. ValueError if
        it is another kind of file."""
        if path.stat().st_size < HEADER and START.startswith(path.open("rb").read(8)):
            return None
        return HEADER + 2 * count_tokens(path)

    def check(self, path):
        check(path)

    def part(self):
        """The part that there is, or None."""
        return next(self.path.parent.glob(f"{self.path.name}.*.part"), None)

    def have(self):
        """Bytes that have come."""
        try:
            return self.part().stat().st_size
        except (AttributeError, FileNotFoundError):   # none yet, or renamed this moment
            return self.total if self.total and self.path.exists() else 0

    def run(self):
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self.path.exists():
                with open(self.path.parent / "lock", "w") as file:
                    lock(file, wait=True)   # no two processes write the same part
                    self.fetch()
        except OSError as error:
            error = cannot_write(self.path, error, "--data_dir")
            self.error = OSError(f"{error}{self.room}")
        except Exception as error:   # for the thread that waits
            self.error = error

    def fetch(self):
        """Try until the file is there, or there is none, or it is clear that it cannot be had."""
        failures, most = 0, self.have()
        while not self.path.exists():
            try:
                self.request()
            except OSError as error:
                if error.errno:   # of the disk: what requests raises has no number
                    raise
                # A try that got a chunk further than any before it begins the count anew.
                moved = self.have() >= most + CHUNK
                failures, most = 1 if moved else failures + 1, max(most, self.have())
                answer, reason = getattr(error, "response", None), why(error, self.url)
                status = None if answer is None else answer.status_code
                if status == 404:
                    self.missing = True
                    return
                lasting = isinstance(error, (ValueError, requests.TooManyRedirects)) or (
                    status and 400 <= status < 500 and status not in (408, 416, 425, 429))
                setting = isinstance(error, (ProxyError, SSLError)) or type(error) is OSError
                if failures == TRIES or lasting or setting and not self.met:
                    raise ValueError(f"{shown(self.url)} cannot be had ({reason}): check the network, "
                                     f"HF_ENDPOINT and HF_TOKEN; {self.instead}") from None
                after = number(answer.headers.get("Retry-After", "")) if status else None
                pause = 2 ** (failures - 1) if after is None else min(after, LONGEST_WAIT)
                say(f"{self.path.name}: {reason}; trying again in {pause} s")
                time.sleep(pause)

    def request(self):
        """Ask once for what is missing. Raises requests.RequestException if the file is incomplete still."""
        part, have, whole = self.part(), self.have(), None
        try:
            whole = part and self.wanted(self.promised(part))
        except ValueError:   # it is something else
            part.unlink()
            part, have = None, 0
        if part and have == whole:   # all of it had come before a run was killed
            return self.finish(part, None)
        headers = {"Accept-Encoding": "identity", "Range": f"bytes={have}-"}
        if self.limit:
            headers["Range"] += str(self.wanted() - 1)
        if token := os.environ.get("HF_TOKEN", "").strip():
            headers["Authorization"] = f"Bearer {token}"   # requests drops it where another host takes over
            os.environ["NETRC"] = os.devnull   # or a login of ~/.netrc would replace it
        with requests.get(self.url, headers=headers, stream=True, timeout=(10, 30)) as answer:
            Fetch.met = True
            if answer.status_code == 416:   # the part is longer than the file
                part and part.unlink()
            answer.raise_for_status()
            version, first, total = self.describe(answer)
            name = self.path.with_name(f"{self.path.name}.{version}.part")
            if first != 0 and (first != have or name != part):
                part and part.unlink()
                raise requests.ConnectionError("the server sent other bytes than were asked for")
            if part and name != part:
                part.unlink()
            self.total = self.wanted(total)
            with open(name, "ab" if first else "wb") as f:
                for chunk in answer.iter_content(CHUNK):
                    f.write(chunk)
                    if self.total and f.tell() >= self.total:
                        f.truncate(self.total)
                        break
                f.flush()
                os.fsync(f.fileno())
        self.finish(name, total)

    def wanted(self, total=None):
        """Bytes to fetch of a file of total bytes; None for all, where their number is not known."""
        sizes = [total, self.limit and HEADER + 2 * self.limit]
        return min((size for size in sizes if size is not None), default=None)

    def describe(self, answer):
        """Which version of the file an answer is of, its first byte, and the bytes of the file, if known."""
        names = [a.headers.get("X-Linked-ETag") for a in [*answer.history, answer]]   # what the hub says
        names += [answer.headers.get("ETag"), answer.headers.get("Last-Modified")]   # what the host says
        version = next(filter(None, names), f"unknown {time.time_ns()}")
        version = hashlib.sha256(version.encode()).hexdigest()[:16]
        if answer.status_code != 206:
            packed = "Content-Encoding" in answer.headers   # then Content-Length is of something else
            return version, 0, None if packed else number(answer.headers.get("Content-Length", ""))
        span = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", answer.headers.get("Content-Range", ""))
        return version, number(span[1]) if span else None, number(span[2]) if span else None

    def finish(self, part, total):
        """Give a part its final name, if it is what it should be. total: bytes of the whole file, if known.
        Raises requests.RequestException if some are missing, ValueError if it is something else."""
        size, begins = part.stat().st_size, part.open("rb").read(16)
        try:
            promised = self.promised(part)
            if total and (promised or size >= total) and promised != total:
                raise ValueError(f"it has {total} bytes, but its beginning promises {promised or 'more'}")
            whole = self.wanted(promised)
            if promised is None or size < whole:
                of = f" of {whole}" if promised else ""
                raise requests.ConnectionError(f"only {size}{of} bytes came")
            if whole < promised:   # a prefix gets a header of its own
                with open(part, "r+b") as f:
                    f.truncate(whole)
                    f.seek(8)
                    f.write(np.array(self.limit, dtype="<i4").tobytes())
                    os.fsync(f.fileno())
            self.check(part)
        except ValueError as error:
            part.unlink()
            raise ValueError(f"{shown(self.url)} is no {self.kind}, beginning with {begins}: "
                             f"{error}") from None
        os.replace(part, self.path)

def number(text):
    """The whole number that a header holds, or None."""
    return int(text) if re.fullmatch(r"[0-9]{1,15}", text) else None

def why(error, url):
    """What went wrong with a url, in a few words."""
    # The innermost of a chain of causes: "... (Caused by X(<Y object>: [Errno 111] Connection refused'))".
    text, answer = re.sub(r".*[:>] ", "", str(error)).strip("')\" "), getattr(error, "response", None)
    proxy = shown(requests.utils.select_proxy(url, requests.utils.get_environ_proxies(url)) or "")
    if isinstance(error, requests.exceptions.InvalidURL):   # its words may hold a password
        text = "no valid address"
    if isinstance(error, requests.TooManyRedirects):
        text = "too many redirects"
    elif answer is not None:
        text = f"status {answer.status_code}"
    elif "timed out" in str(error):
        text = "no answer in time"
    elif isinstance(error, ChunkedEncodingError):
        text = "the answer broke off"
    if proxy and (isinstance(error, (ProxyError, ValueError)) or text == "status 407"):
        text = f"proxy {proxy}, see HTTP_PROXY and HTTPS_PROXY: {text}"
    elif isinstance(error, SSLError):
        text = f"certificate or TLS: {text}; REQUESTS_CA_BUNDLE can name a file of certificates to trust"
    elif type(error) is OSError:   # the file of certificates
        text = f"{error}; see REQUESTS_CA_BUNDLE"
    return text

def shown(url):
    """A url, or text around it, without the name and password that it may hold."""
    return re.sub(r"(?<=//).*@|^[^/]*@", "", url)

def check(path, vocab_size=VOCAB_SIZE):
    """ValueError if a file is not whole, or not in the vocabulary, GPT-2's."""
    tokens = read_tokens(path)
    if len(tokens) and tokens.max() >= vocab_size:
        raise ValueError(f"{path} holds id {tokens.max()}, but the last of its vocabulary is "
                         f"{vocab_size - 1}: delete it, and it is made again")

class Translated(Fetch):
    """The same, then decoded and encoded again with another tokenizer, into a folder of its own."""
    def __init__(self, text, url, path, limit=None):
        self.text, self.translated = text, path.parent / text.name / path.name
        super().__init__(url, path, limit)

    def fetch(self):
        super().fetch()
        if not self.missing:
            self.translated.parent.mkdir(exist_ok=True)
            write_tokens(self.translated, translate(read_tokens(self.path), self.text))

    def run(self):
        if not self.translated.exists():
            super().run()
        self.path = self.translated

    def check(self, path):
        check(path, self.text.VOCAB_SIZE if path == self.translated else VOCAB_SIZE)

def translate(tokens, text):
    """Documents of GPT-2 tokens, each behind an EOF, as uint16 arrays of another tokenizer's."""
    gpt2, begins = encoding(), np.flatnonzero(tokens == EOF)
    for i, j in pairwise([0, *begins, len(tokens)]):
        document = tokens[i:j]
        if len(document) and document[0] == EOF:
            yield np.array([text.EOF], dtype=np.uint16)
        yield text.tokens(gpt2.decode_bytes(document[document != EOF].tolist()))

class Shards:
    """Shard number -> tokens of that training file, None past the last one; fetches the next one meanwhile.

    keep: how many training files stay, including the one in use and the one ahead; 0: all. Another run that
    had use for one of the others fetches it again.
    """
    def __init__(self, fetch, url, folder, prefix, keep):
        self.fetching, self.url, self.folder, self.prefix, self.keep = fetch, url, folder, prefix, keep
        self.ahead = {}

    def fetch(self, i):
        name = f"{self.prefix}_train_{i + 1:06}.bin"   # the first is 1
        return self.fetching(f"{self.url}/{name}", self.folder / name)

    def __call__(self, i):
        fetch = self.ahead.pop(i, None)
        if not fetch or not (fetch.is_alive() or fetch.missing or fetch.path.exists()):
            fetch = self.fetch(i)   # also what failed in the background, or was deleted since
        path = fetch.wait(needed=i == 0)
        if path is None:
            return None
        if self.keep:
            name = f"{self.prefix}_train_*.bin"
            for old in {*self.folder.glob(name), *path.parent.glob(name)}:
                if int(old.stem[-6:]) - 1 not in range(i + 2 - self.keep, i + 2):
                    remove(old)
        self.ahead = {i + 1: self.fetch(i + 1)}
        return read_tokens(path)

def hub():
    """The address of the hub. ValueError for settings that cannot be."""
    endpoint = os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or "https://huggingface.co"
    try:
        fine = re.fullmatch(r"https?://[!-~]+", endpoint) and requests.Request("GET", endpoint).prepare()
    except ValueError:
        fine = False
    if not fine:
        raise ValueError(f"HF_ENDPOINT={shown(endpoint)} must be an address like https://huggingface.co")
    if not re.fullmatch(r"[!-~]*", os.environ.get("HF_TOKEN", "").strip()):
        raise ValueError("HF_TOKEN holds characters that no token has: set it again, or unset it")
    return endpoint

def source(data, data_dir, keep_shards, text=None):
    """The Source for a name in SETS; waits for the validation tokens if they are not below data_dir yet.
    text: the tokenizer to encode it with, see pretrained.Tokenizer; None: GPT-2's."""
    repo, prefix = SETS[data]
    url, folder = f"{hub()}/datasets/{repo}/resolve/main", Path(data_dir) / repo.split("/")[1]
    name, fetch = f"{prefix}_val_000000.bin", partial(Translated, text) if text else Fetch
    val = fetch(f"{url}/{name}", folder / name, limit=VAL_TOKENS).wait()
    shards = Shards(fetch, url, folder, prefix, keep_shards)
    if text:
        return Source(shards, val, f"{repo}-{text.name}", text.VOCAB_SIZE, text.description)
    return Source(shards, val, repo, PADDED, tokenizer="gpt2")

def encoding():
    """tiktoken's gpt2, which comes from the network once and then from its cache. ValueError if it cannot."""
    import tiktoken   # here, because only text needs it
    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:
        network = isinstance(error, requests.RequestException)
        reason = why(error, "https://openaipublic.blob.core.windows.net") if network else error
        raise ValueError(f"tiktoken's gpt2 vocabulary cannot be had ({reason}): run this once with a "
                         "network, or set TIKTOKEN_CACHE_DIR to a folder that holds it") from None

def encode(text):
    """Tokens of a text; <|endoftext|> in it is ordinary text."""
    return encoding().encode_ordinary(text)

def decode(tokens):
    """The bytes of tokens; EOF has none."""
    return encoding().decode_bytes([t for t in tokens if t != EOF])

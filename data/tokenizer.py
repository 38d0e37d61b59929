"""The tokenizer of a published checkpoint, from its tokenizer.json: byte-level BPE, which tiktoken does."""
import hashlib
import json
import re
from itertools import pairwise, takewhile

import numpy as np

from mor import require

# How GPT-2 splits text into words, and what else goes before it, by the name in tokenizer.json.
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|"
SPACES = r"\s+(?!\S)|\s+"
GPT2 = WORDS + r" ?\p{N}+|" + SPACES
DIGITS = {True: r"\p{N}|", False: r"\p{N}+|"}   # each of its own, or in runs, but apart from spaces
BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]   # that stand for themselves in a vocabulary
OTHERS = [byte for byte in range(256) if byte not in BYTES]   # for which letters from 256 on stand
TOO_LONG = re.compile(r"(?<!\s)\s{100000}")   # for tiktoken, which looks back from the end of a run of spaces
LETTERS = {chr(byte): byte for byte in BYTES} | {chr(256 + i): byte for i, byte in enumerate(OTHERS)}

def split_pattern(pre):
    """The pattern by which a pre_tokenizer splits text. ValueError for a kind that is not known here."""
    parts = [pre] if pre and pre["type"] != "Sequence" else (pre or {}).get("pretokenizers", [])
    kinds = [part["type"] for part in parts]
    byte_level = parts.pop() if kinds[-1:] == ["ByteLevel"] else {"add_prefix_space": True}
    require(not byte_level.get("add_prefix_space") and len(parts) <= 1 and set(kinds) <= {
            "ByteLevel", "Digits", "Split"}, f"its pre_tokenizer {kinds} is not supported")
    use_regex = byte_level.get("use_regex", True)
    if not parts and use_regex:
        return GPT2
    part = parts[0] if parts else byte_level
    if part["type"] == "Digits" and use_regex:   # a number ends a run of spaces as the end of the text does
        return WORDS + DIGITS[part["individual_digits"]] + r"\s+(?=\p{N})|" + SPACES
    plain = part["type"] == "Split" and part["behavior"] == "Isolated" and not part["invert"]
    words = part["pattern"].get("Regex") if plain and not use_regex else None
    require(words and not re.search(r"\(\?[a-z-]*[msx]", words),   # flags that tiktoken reads differently
            f"its pre_tokenizer {part} is not supported")
    return rf"(?:{words})|(?s:.)+?(?=(?:{words})|\z)"   # what it does not match stays

def unsupported(model, added, normal, post, merged):
    """What a tokenizer.json has that would make other tokens there than here."""
    words = sorted(["", *(a["content"] for a in added)])
    found = {
        "dropout": model.get("dropout"),
        "marks in words": model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"),
        "bytes as <0x00>": model.get("byte_fallback") and "<0x00>" in model["vocab"],
        "words that no merge makes": model.get("ignore_merges") and model["vocab"].keys() - merged - {
            *LETTERS, *words},
        "a normalizer": normal and normal.get("normalizers") != [],
        f"post_processor {post}": post - {"ByteLevel", "Sequence", "TemplateProcessing"},
        "added tokens that take spaces along": any(
            a["lstrip"] or a["rstrip"] or a["single_word"] for a in added),
        "added tokens that others begin with": any(
            a == b or a and b.startswith(a) for a, b in pairwise(words)),
    }
    return [what for what, is_there in found.items() if is_there]

class Tokenizer:
    """Text to ids and back, as python_source and data/fineweb_edu.py do it.

    text: the content of tokenizer.json; eof: the id between documents, and at the end of a text.
    description: both, for checkpoints. name: eight letters, for files. prefix: ids that go before a prompt.
    ValueError for a tokenizer that is not supported."""
    def __init__(self, text, eof):
        import tiktoken   # here, because only text needs it
        self.description, self.EOF = dict(text=text, eof=eof), eof
        self.name = hashlib.sha256(text.encode() + str(eof).encode()).hexdigest()[:8]
        try:
            t = json.loads(text)
            model, added, normal = t["model"], t["added_tokens"], t.get("normalizer") or {}
            require(model["type"] == "BPE", f"it is {model['type']}, not BPE")
            merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
            vocab, post = model["vocab"], [p for p in [t.get("post_processor")] if p]
            post += [inner for p in post for inner in p.get("processors", [])]
            bad = unsupported(model, added, normal, {p["type"] for p in post}, {*map("".join, merges)})
            require(not bad, ", ".join(bad))
            pattern, ranks = split_pattern(t["pre_tokenizer"]), {}
            # Ranks of tiktoken: the single bytes, then the results of merges in their order.
            for word in [*LETTERS, *("".join(pair) for pair in merges)]:
                ranks.setdefault(bytes(LETTERS[letter] for letter in word), (len(ranks), vocab.get(word, -1)))
            special = {a["content"]: (len(ranks) + i, a["id"]) for i, a in enumerate(added)}
            template = [piece for p in post for piece in p.get("single", [])]
            self.prefix = [special[piece["SpecialToken"]["id"]][1]
                           for piece in takewhile(lambda piece: "Sequence" not in piece, template)]
            self.unknown = {**vocab, **{a["content"]: a["id"] for a in added}}.get(model.get("unk_token"), -1)
            self.fuse = bool(model.get("fuse_unk"))
        except (AttributeError, KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
            raise ValueError(f"tokenizer.json is not supported: {str(error)[:100]}") from None
        places = [*ranks.values(), *special.values()]
        self.ids = np.array([i for _, i in places])   # by rank; -1: a byte that the vocabulary lacks
        self.VOCAB_SIZE = int(self.ids.max()) + 1
        require(type(eof) is int and eof in self.ids, f"eos_token_id={eof!r} is no id of the tokenizer")
        self.rank = {i: rank for rank, i in reversed(places) if i >= 0}
        self.tiktoken = tiktoken.Encoding(
            self.name, pat_str=pattern, mergeable_ranks={word: rank for word, (rank, _) in ranks.items()},
            special_tokens={word: rank for word, (rank, _) in special.items()})

    def find(self, ranks):
        """Ids of tiktoken's ranks. Bytes that the vocabulary lacks become its unknown token, neighbours one
        if it fuses them (here also across words); without such a token they are left out."""
        ids = self.ids[np.array(ranks, dtype=int)]
        lacking = ids < 0
        repeats = lacking & np.append(False, lacking[:-1]) & self.fuse
        ids = np.where(lacking, self.unknown, ids)
        return ids[~repeats & (ids >= 0)]

    def tokens(self, data):
        """Ids of bytes of UTF-8, an array; special tokens in them are ordinary text."""
        return self.split(data.decode("utf-8", "replace"), set()).astype(np.uint16)

    def encode(self, text):
        """Ids of a prompt, in which special tokens are what they mean; a list."""
        text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return self.split(text, "all").tolist()

    def split(self, text, special):
        """Ids of a text in which these special tokens are what they mean. ValueError for 100000 spaces."""
        require(not TOO_LONG.search(text), "a run of 100000 spaces is too long for tiktoken: shorten it")
        return self.find(self.tiktoken.encode(text, allowed_special=special, disallowed_special=()))

    def decode(self, tokens):
        """The bytes of tokens; EOF has none."""
        return self.tiktoken.decode_bytes([self.rank[t] for t in tokens if t != self.EOF and t in self.rank])

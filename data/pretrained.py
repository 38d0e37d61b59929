"""Published Llama checkpoints as the Hugging Face hub has them: config.json, tokenizer.json and
model.safetensors or its shards. What a plain MoR cannot compute exactly is refused."""
import json
import math
import re
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from data.fineweb_edu import Fetch, hub
from data.tokenizer import Tokenizer
from mor import MoR, MoRConfig, require

NAME = r"\w[\w.-]*/\w[\w.-]*(?<!\.pt)"   # owner/model, on the hub
INDEX = "model.safetensors.index.json"   # says which shard a tensor is in
DTYPES = {"F32": (torch.float32, 4), "F16": (torch.float16, 2), "BF16": (torch.bfloat16, 2)}
LAYER = {"attn_norm": ["input_layernorm"], "attn.q_proj": ["self_attn.q_proj"],   # ours, and theirs
         "attn.kv_proj": ["self_attn.k_proj", "self_attn.v_proj"], "attn.o_proj": ["self_attn.o_proj"],
         "mlp_norm": ["post_attention_layernorm"], "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
         "mlp.down_proj": ["mlp.down_proj"]}

ONLY = {"model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": True, "attention_bias": None,
        "mlp_bias": None, "quantization_config": None, "rope_type": "default"}   # in config.json

class HubFile(Fetch):
    """A file of a checkpoint, fetched as shards of tokens are."""
    kind, instead, room = "file of a checkpoint", "check also the model's name, or name a folder", ""

    def promised(self, path):
        if ".safetensors" in self.path.suffix:
            return read_header(path)[1]
        text = path.read_bytes()
        require(text[:1] in (b"{", b""), "no JSON")
        with suppress(ValueError):   # not whole yet
            return json.loads(text) and len(text)

    def check(self, path):
        require(self.promised(path) == path.stat().st_size, f"{path} is damaged: delete it")

def is_published(name):
    """Whether a name is that of a published checkpoint: a folder with a config.json, or one on the hub."""
    if Path(name).exists():
        return Path(name, "config.json").is_file()
    return re.fullmatch(NAME, name) is not None and not Path(name).parent.exists()

def find(name, data_dir):
    """The folder of a published checkpoint. One on the hub is fetched to data_dir/owner/model."""
    if Path(name).is_dir():
        return Path(name)
    folder, url = Path(data_dir, name), f"{hub()}/{name}/resolve/main"
    fetch = lambda file, needed=True: HubFile(f"{url}/{file}", folder / file).wait(needed)
    fetch("config.json")
    fetch("tokenizer.json")
    if (folder / INDEX).exists() or not fetch("model.safetensors", needed=False):
        fetch(INDEX)
        for file in shards(folder):
            fetch(file)
    return folder

def read_json(path):
    try:
        content = json.loads(path.read_bytes())
        require(isinstance(content, dict), "no object")
        return content
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}): get the checkpoint again") from None

def shards(folder):
    """The names of its files of tensors."""
    if not (folder / INDEX).exists():
        return ["model.safetensors"]
    places = read_json(folder / INDEX).get("weight_map")
    files = set(map(str, places.values())) if isinstance(places, dict) else ()
    require(files and all(re.fullmatch(r"\w[\w.-]*\.safetensors", file) for file in files),
            f"{folder / INDEX} must name files that end in .safetensors")
    return sorted(files)

def read_header(path):
    """Of a safetensors file: 8 bytes say how long its header is, which is JSON; then come the tensors, one
    behind the other. Returns {name: (dtype, shape, first byte)} and the size of the file, which is None if
    the header is not whole. ValueError if it contradicts itself."""
    with open(path, "rb") as f:
        n = int.from_bytes(f.read(8), "little")
        text = f.read(n) if n <= 10**8 else b""
        if f.tell() < 8 or n <= 10**8 and len(text) < n:
            return {}, None
    header, end = {}, 8 + n
    try:
        tensors = json.loads(text)
        tensors.pop("__metadata__", None)
        for name, t in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
            (start, stop), dtype, shape = t["data_offsets"], t["dtype"], t["shape"]
            size = DTYPES[dtype][1] * math.prod(shape) if dtype in DTYPES else stop - start
            require(8 + n + start == end and size == stop - start >= 0,
                    f"{name}, {dtype} {shape}, cannot lie at {start} to {stop}")
            header[name], end = (dtype, shape, end), end + size
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no safetensors file, or its header is wrong: {error}") from None
    return header, end

class Tensors(dict):
    """name -> (file, dtype, shape, first byte) for all tensors of a checkpoint, and their values."""
    def __init__(self, folder):
        for path in (folder / file for file in shards(folder)):
            require(path.is_file(), f"there is no {path}: get the checkpoint again")
            (header, promised), size = read_header(path), path.stat().st_size
            require(promised == size, f"{path} has {size} bytes, but its header promises "
                    f"{promised or 'more'}: get the checkpoint again")
            self.update({name: (path, *tensor) for name, tensor in header.items()})

    def read(self, name, shape):
        """A tensor, float32, in memory of its own. ValueError if it is missing or not of that shape."""
        require(name in self, f"the checkpoint lacks tensor {name}")
        path, dtype, found, start = self.pop(name)
        require(dtype in DTYPES and tuple(found) == tuple(shape), f"{path}: tensor {name} is {dtype} "
                f"{list(found)}, but must be F32, F16 or BF16 {list(shape)}")
        dtype, size = DTYPES[dtype]
        raw = np.fromfile(path, dtype=np.uint8, offset=start, count=size * math.prod(shape))
        values = torch.from_numpy(raw).view(dtype).view(*shape).float()
        require(values.sum().isfinite(), f"{path}: tensor {name} holds numbers that are not finite")
        return values

def read_config(folder):
    """config.json as a MoRConfig, and as it is. ValueError for what a plain MoR cannot compute."""
    path = folder / "config.json"
    c = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
         **read_json(path)}   # Llama's defaults
    try:
        rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
        c["rope_type"], heads = rope.get("rope_type", rope.get("type", "default")), c["num_attention_heads"]
        for name, only in ONLY.items():
            require((c.get(name) or None) == only, f"{name}={c.get(name)}" + f", only {only}" * bool(only))
        require(math.isclose(c["rms_norm_eps"], 1e-5, rel_tol=1e-3),
                f"rms_norm_eps={c['rms_norm_eps']}, only 1e-05")
        config = MoRConfig(
            n_rec=1, vocab_size=c["vocab_size"], block_size=c["max_position_embeddings"],
            n_layer=c["num_hidden_layers"], n_head=heads, n_kv_head=c.get("num_key_value_heads") or heads,
            n_embd=c["hidden_size"], n_ff=c["intermediate_size"],
            rope_theta=float(rope.get("rope_theta", c["rope_theta"])))
        require(c.get("head_dim") in (None, config.head_dim),
                f"head_dim={c.get('head_dim')}, only hidden_size / num_attention_heads = {config.head_dim}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} describes no model that is supported: {error}") from None
    return config, c

def load(name, data_dir):
    """A published checkpoint as a dict: model (n_rec=1, float32), tokenizer (see Tokenizer), and the dtype
    of its training. ValueError for what is missing, damaged or not supported."""
    folder = find(name, data_dir)
    config, c = read_config(folder)
    eof, path = c.get("eos_token_id"), folder / "tokenizer.json"
    try:
        text = Tokenizer(path.read_text("utf-8"), (eof or [None])[0] if isinstance(eof, list) else eof)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be used ({error}): choose another checkpoint") from None
    require(text.VOCAB_SIZE <= config.vocab_size, f"{folder}: the tokenizer has ids up to "
            f"{text.VOCAB_SIZE - 1}, the model only up to {config.vocab_size - 1}")
    with torch.device("meta"):   # without memory
        model = MoR(config)
    tensors, state = Tensors(folder), {}
    tensors.pop("lm_head.weight", None)   # the embedding once more
    places = ["first.0", *(f"shared.{i}" for i in range(config.n_shared)), "last.0"]
    names = {"wte": ["embed_tokens"], "norm": ["norm"], **{
        f"{place}.{ours}": [f"layers.{i}.{their}" for their in theirs]
        for i, place in enumerate(places) for ours, theirs in LAYER.items()}}
    for ours, theirs in names.items():
        rows, *columns = model.get_parameter(f"{ours}.weight").shape
        parts = [tensors.read(f"model.{their}.weight", (rows // len(theirs), *columns)) for their in theirs]
        state[f"{ours}.weight"] = torch.cat(parts) if len(parts) > 1 else parts[0]
    more = [name for name in tensors if not name.endswith("rotary_emb.inv_freq")]
    require(not more, f"{folder} holds {len(more)} tensors that a plain MoR has no place for, as {more[:1]}")
    model.load_state_dict(state, strict=False, assign=True)
    model.lm_head.weight = model.wte.weight
    dtype = c.get("dtype", c.get("torch_dtype"))
    return dict(model=model, tokenizer=text.description, train_config=dict(dtype=dtype))

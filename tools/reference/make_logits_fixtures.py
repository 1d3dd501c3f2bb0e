"""Writes the reference logits that the Llama tests compare with.

Reads a GGUF file with Hugging Face transformers, in f32 on the CPU, and stores for a few prompts: the token ids, a
sample of the logits at some positions, and 64 greedy tokens with the distance between the two best logits.

    python make_logits_fixtures.py MODEL.gguf OUT.json

Needs torch, transformers, accelerate and gguf. Not run in CI: its output is committed.
"""

import argparse
import hashlib
import json
import pathlib

import gguf
import numpy as np
import torch
import transformers

NUM_GREEDY = 64
NUM_TOP = 16
NUM_RANDOM = 32
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

PROSE = (
    "The lighthouse stood at the end of a long spit of sand, and in winter the keeper saw nobody for weeks at a "
    "time. He kept a diary in a small, careful hand. On the third of January he wrote that the wind had turned"
)
CODE = '''def merge_intervals(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merges overlapping intervals.

    >>> merge_intervals([(1, 3), (2, 6), (8, 10)])
    [(1, 6), (8, 10)]
    """
    merged = []
    for start, end in sorted(intervals):
'''


def chat(*turns: str) -> str:
    """A conversation in the model's own format, with the answer open."""
    parts = [("system", SYSTEM)] + [("user" if i % 2 == 0 else "assistant", t) for i, t in enumerate(turns)]
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in parts)
    return text + "<|im_start|>assistant\n"


def ledger() -> str:
    """A long text without repetition that a model could copy: facts with numbers, and a question about one."""
    ports = ["Aldermouth", "Brenholm", "Caskerry", "Dunvale", "Eastwick", "Farrow Bay", "Glenmora"]
    goods = ["barley", "slate", "lamp oil", "salted fish", "timber", "wool", "copper wire", "paper", "tea"]
    lines = []
    for entry in range(1, 53):
        port, good = ports[entry * 5 % 7], goods[entry * 4 % 9]
        lines.append(f"Entry {entry}: ship no. {entry * 37 % 101} left {port} with {entry * 13 % 89 + 2} tons of {good}.")
    question = "Summarise the log in two sentences. Which port does entry 17 name?"
    return chat("Here is the log of a harbour master.\n" + "\n".join(lines) + "\n" + question)


PROMPTS = {
    "capital_of_france": chat("What is the capital of France?"),
    "prose": PROSE,
    "code": CODE,
    "several_turns": chat(
        "Hi! Can you translate \u201cgood morning\u201d into French, Spanish and \u65e5\u672c\u8a9e? \U0001f642",
        "Of course: \u201cbonjour\u201d, \u201cbuenos d\u00edas\u201d and \u201c\u304a\u306f\u3088\u3046\u201d.",
        "Thanks. And which of these languages has the most native speakers? Answer in one sentence.",
    ),
    "long_ledger": ledger(),
}


def check_weights(path: pathlib.Path, model: transformers.PreTrainedModel) -> None:
    """Compares every weight with the gguf package's own dequantisation; Q and K rows are put back in order here."""
    reader = gguf.GGUFReader(path)
    state = model.state_dict()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    theirs = {names.get_name(name, try_suffixes=(".weight", ".bias")): name for name in state}
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for part, num_heads in heads.items():
            if f".{part}." in tensor.name:
                head_dim = weight.shape[0] // num_heads
                order = list(range(0, head_dim, 2)) + list(range(1, head_dim, 2))
                weight = np.concatenate([weight[h * head_dim :][:head_dim][order] for h in range(num_heads)])
        found = state[theirs[tensor.name]].numpy()
        assert np.array_equal(found, weight.astype(np.float32)), f"{tensor.name} differs"
    print(f"{len(reader.tensors)} tensors equal the gguf package's dequantisation")


def sampled_positions(length: int) -> list[int]:
    """Ends of the prompt, both sides of block and chunk borders, and an even spread."""
    borders = {0, 1, 15, 16, 63, 64, 127, 128, 1023, 1024, length - 2, length - 1}
    spread = {length * part // 5 for part in range(1, 5)}
    return sorted(position for position in borders | spread if position < length)


def numbers(values) -> list[float]:
    """f32 values with the digits that f32 has."""
    return [float(f"{value:.7g}") for value in values]


def sample(logits: torch.Tensor, position: int, generator: torch.Generator) -> dict:
    row = logits[position]
    top = torch.topk(row, NUM_TOP).indices
    rest = torch.randint(0, row.shape[0], (NUM_RANDOM,), generator=generator)
    ids = torch.unique(torch.cat([top, rest]))
    return {
        "position": position,
        "largest": float(f"{row.abs().max().item():.7g}"),
        "mean": float(f"{row.double().mean().item():.7g}"),
        "best": int(row.argmax()),
        "ids": ids.tolist(),
        "logits": numbers(row[ids].tolist()),
    }


def greedy(model: transformers.PreTrainedModel, ids: list[int]) -> dict:
    """64 greedy tokens, past end tokens too, with the lead of the best logit relative to the largest."""
    out, leads = [], []
    feed, cache = torch.tensor([ids]), None
    for _ in range(NUM_GREEDY):
        result = model(feed, past_key_values=cache, use_cache=True)
        cache, row = result.past_key_values, result.logits[0, -1]
        best, second = torch.topk(row, 2).values.tolist()
        out.append(int(row.argmax()))
        leads.append(float(f"{(best - second) / row.abs().max().item():.4g}"))
        feed = torch.tensor([[out[-1]]])
    return {"ids": out, "leads": leads}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    args = parser.parse_args()
    source = {"pretrained_model_name_or_path": str(args.model.parent), "gguf_file": args.model.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    model.eval()
    check_weights(args.model, model)

    generator = torch.Generator().manual_seed(7)
    prompts = []
    for name, text in PROMPTS.items():
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
            samples = [sample(logits, position, generator) for position in sampled_positions(len(ids))]
            continuation = greedy(model, ids)
        print(f"{name}: {len(ids)} tokens, then {tokenizer.decode(continuation['ids'])!r}")
        prompts.append({"name": name, "ids": ids, "samples": samples, "greedy": continuation})
    fixture = {
        "model": args.model.name,
        "model_sha256": hashlib.sha256(args.model.read_bytes()).hexdigest(),
        "reference": f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, f32, CPU",
        "prompts": prompts,
    }
    lines = json.dumps(fixture, separators=(",", ":")).replace('{"position"', '\n{"position"')
    args.out.write_text(lines.replace('{"name"', '\n{"name"') + "\n")
    print(f"{args.out}: {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()

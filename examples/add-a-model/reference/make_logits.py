"""Makes tests/fixtures/qwen3_tiny.json: logits and greedy tokens of the tiny checkpoint by Hugging Face transformers.

The weights are those of src/tiny.rs, made by the same formula. Not run in CI.

Usage: python make_logits.py CONFIG.json OUTPUT.json

CONFIG.json is the config.json that src/tiny.rs writes. Needs torch, transformers and numpy.
"""

import json
import sys

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

PROMPT = [3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 7]
NUM_GREEDY = 24


def weights(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    mask = (1 << 64) - 1
    seed = 0xCBF29CE484222325
    for byte in name.encode():
        seed = ((seed ^ byte) * 0x100000001B3) & mask
    index = np.arange(int(np.prod(shape)), dtype=np.uint64)
    with np.errstate(over="ignore"):
        bits = np.uint64(seed) + index * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    unit = (bits >> np.uint64(40)).astype(np.float32) / np.float32(8388608.0) - np.float32(1.0)
    if len(shape) == 2:
        values = unit * (np.float32(3.0) / np.sqrt(np.float32(shape[1])))
    else:
        values = np.float32(1.0) + np.float32(0.5) * unit
    return torch.from_numpy(values.reshape(shape))


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        config = Qwen3Config(**json.load(file))
    model = Qwen3ForCausalLM(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights(name, tuple(parameter.shape)))
        logits = model(torch.tensor([PROMPT])).logits[0]
        tokens = list(PROMPT)
        margins = []
        for _ in range(NUM_GREEDY):
            row = model(torch.tensor([tokens])).logits[0, -1]
            best = torch.topk(row, 2).values
            margins.append(float(best[0] - best[1]))
            tokens.append(int(row.argmax()))
    result = {
        "prompt": PROMPT,
        "logits": [[round(value, 5) for value in row] for row in logits.tolist()],
        "greedy": tokens[len(PROMPT):],
        "smallest_margin": round(min(margins), 5),
    }
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(result, file)
        file.write("\n")


if __name__ == "__main__":
    main()

"""Writes crates/ops/tests/ops/fixtures/attention.txt: one causal attention with a cached prefix, computed by PyTorch.

Usage: python make_attention_fixture.py OUTPUT
"""

import sys

import torch


def main(path):
    torch.manual_seed(3)
    query_len, kv_len, heads, kv_heads, head_dim = 5, 9, 4, 2, 6
    q = torch.randn(query_len, heads, head_dim, dtype=torch.float64) * 2
    k = torch.randn(kv_len, kv_heads, head_dim, dtype=torch.float64) * 2
    v = torch.randn(kv_len, kv_heads, head_dim, dtype=torch.float64)
    # Rounded first, so that the file holds the very inputs that the outputs belong to.
    q, k, v = (x.float().double() for x in (q, k, v))
    rows = torch.arange(query_len)[:, None] + kv_len - query_len
    mask = torch.arange(kv_len)[None, :] <= rows
    heads_first = lambda x: x.transpose(0, 1)
    out = torch.nn.functional.scaled_dot_product_attention(
        heads_first(q), heads_first(k), heads_first(v), attn_mask=mask, enable_gqa=True
    )
    scores = heads_first(q) @ heads_first(k).repeat_interleave(heads // kv_heads, 0).transpose(1, 2)
    scores = (scores / head_dim**0.5).masked_fill(~mask, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    with open(path, "w") as file:
        file.write("# q [5, 4, 6], k [9, 2, 6], v [9, 2, 6], out [5, 4, 6], lse [5, 4]\n")
        for tensor in (q, k, v, out.transpose(0, 1), lse.transpose(0, 1)):
            file.write(" ".join(f"{value:.9g}" for value in tensor.flatten().tolist()) + "\n")


main(sys.argv[1])

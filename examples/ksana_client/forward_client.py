"""Asks ``POST /forward`` how likely a text is, and what the model makes of its last token. Needs msgpack and numpy.

python forward_client.py --prefix "The capital of France is" --text " Paris, and it lies on the river Seine."
"""

from __future__ import annotations

import argparse
import base64
import json
import urllib.request
from typing import Any

import msgpack
import numpy as np


def main() -> None:
    """Print the perplexity of a text behind a prefix, and the shape and length of a hidden state."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="of the server")
    parser.add_argument("--content-type", choices=["msgpack", "json"], default="msgpack")
    parser.add_argument("--prefix", default="The capital of France is", help="is not scored; at least a token")
    parser.add_argument("--text", default=" Paris, and it lies on the river Seine.")
    arguments = parser.parse_args()

    [prefix] = forward(arguments.url, [{"prompt": arguments.prefix}], arguments.content_type)
    num_prefix_tokens = len(prefix["input_token_ids"])
    # Position i holds the probability of token i + 1: from the first token of the text to the last.
    scored = {
        "target_name": "logits",
        "token_reduce_mode": "GATHER_TOKEN_ID",
        "slice_pos": [[num_prefix_tokens - 1, -2]],
    }
    state = {"target_name": "layernorm", "token_reduce_mode": "GATHER_ALL", "slice_pos": [[-1, -1]]}
    request = {"prompt": arguments.prefix + arguments.text, "request_target": [scored, state]}
    [answer] = forward(arguments.url, [request], arguments.content_type)
    tensors = {each["target_name"]: array_of(each["tensor"]) for each in answer["response"]}
    print(f"tokens: {len(answer['input_token_ids'])}, {len(tensors['logits'])} of them scored")
    print(f"perplexity: {2 ** -np.log2(tensors['logits']).mean():.3f}")
    print(f"last state: shape {tensors['layernorm'].shape}, length {np.linalg.norm(tensors['layernorm']):.2f}")


def forward(url: str, requests: list[dict[str, Any]], content_type: str) -> list[dict[str, Any]]:
    """The responses, in the order of the requests."""
    body = {"requests": requests}
    if content_type == "msgpack":
        data, media_type = msgpack.packb(body), "application/x-msgpack"
    else:
        data, media_type = json.dumps(body).encode(), "application/json"
    request = urllib.request.Request(f"{url}/forward", data, headers={"Content-Type": media_type})
    with urllib.request.urlopen(request) as response:
        answer = response.read()
    return (msgpack.unpackb(answer) if content_type == "msgpack" else json.loads(answer))["responses"]


def array_of(tensor: dict[str, Any]) -> np.ndarray:
    """The array in an answer, as float32."""
    data = base64.b64decode(tensor["data"])
    if tensor["dtype"] == "bfloat16":  # the upper half of a float32; numpy does not have it
        elements = (np.frombuffer(data, dtype="<u2").astype("<u4") << 16).view("<f4")
    else:
        elements = np.frombuffer(data, dtype=tensor["dtype"]).astype(np.float32)
    return elements.reshape(tensor["shape"])


if __name__ == "__main__":
    main()

"""llama.cpp in a process of its own: what stops it, stops that process alone.

    python -m ffncompress.exporting.llama_child FILE.gguf < question.json > answer.json

llama.cpp aborts where it meets what it did not expect, and logs to standard error; so it is never run in ours.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

MOST_SLOTS = 8  # sequences that are read side by side
SURE = 1e4  # a bias by which the token that the text has is drawn; the log-probability told is that without it


def serve(file: str, context: int, slots: int, exact: bool, threads: int) -> Any:
    """A server of llama.cpp on one file; exact: no flash attention, and a cache of 32-bit numbers."""
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path = file
    options.n_ctx, options.n_parallel, options.n_gpu_layers = context * slots, slots, 0
    options.warmup, options.verbosity = False, -1
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
    if exact:
        options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    return xllamacpp.Server(options)


def tokenise(server: Any, text: str) -> list[int]:
    """A text's tokens, as llama.cpp splits it; over the loopback, for that is the one way to ask."""
    body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
    request = urllib.request.Request(f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=60) as answer:
        tokens: list[int] = json.loads(answer.read())["tokens"]
    return tokens


def log_probabilities(server: Any, ids: list[int], top: int, slot: int) -> list[list[tuple[int, float]]]:
    """For each token but the first: its log-probability after those before it, and those of the likeliest few.

    Nothing for a token that is only part of a character.
    """
    found: list[list[tuple[int, float]]] = []
    for end in range(1, len(ids)):
        answer = server.handle_completions({
            "prompt": ids[:end], "max_tokens": 1, "logprobs": top, "temperature": 0, "cache_prompt": True,
            "logit_bias": [[ids[end], SURE]], "id_slot": slot,
        })  # fmt: skip
        told = answer["choices"][0]["logprobs"]
        if not told:  # the server keeps back a token that is part of a character
            found.append([])
            continue
        said = told["content"][0]
        if said["id"] != ids[end]:
            raise RuntimeError(f"llama.cpp drew token {said['id']} where {ids[end]} was asked for")
        found.append([(each["id"], each["logprob"]) for each in (said, *said["top_logprobs"])])
    return found


def generate(server: Any, prompt: str | list[int], length: int) -> dict[str, Any]:
    """A continuation, the likeliest token each time, and how quick it was."""
    answer = server.handle_completions(
        {"prompt": prompt, "max_tokens": length, "temperature": 0, "cache_prompt": False, "ignore_eos": length > 1}
    )
    return {"text": answer["choices"][0]["text"], "timings": answer["timings"]}


def main() -> None:
    """Answer one question about one file."""
    question = json.load(sys.stdin)
    sequences: list[list[int]] = question["sequences"]
    slots = max(1, min(MOST_SLOTS, len(sequences)))
    server = serve(sys.argv[1], question["context"], slots, question["exact"], question["threads"])

    def told(slot: int) -> list[list[list[tuple[int, float]]]]:
        return [log_probabilities(server, ids, question["top"], slot) for ids in sequences[slot::slots]]

    with ThreadPoolExecutor(slots) as pool:  # llama.cpp reads a token of each at once
        by_slot = list(pool.map(told, range(slots)))
    answer: dict[str, Any] = {
        "tokens": [tokenise(server, text) for text in question["texts"]],
        "log_probabilities": [by_slot[index % slots][index // slots] for index in range(len(sequences))],
        "generated": [generate(server, prompt, length) for prompt, length in question["generate"]],
    }
    json.dump(answer, sys.stdout)
    sys.stdout.flush()


if __name__ == "__main__":
    main()

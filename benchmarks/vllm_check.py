"""A folder in vLLM beside the checkpoint in transformers: greedy tokens, and how far log-probabilities differ.

    python benchmarks/vllm_check.py CHECKPOINT EXPORTED [--tokens 16]

Run it where vLLM is installed; ffncompress need not be, for a checkpoint carries its loader. CHECKPOINT is what `apply`
wrote, EXPORTED what `export --to vllm` made of it; a stock checkpoint (`plan --native`) is given as both. Both run in
float32. Differences are over every place of the prompts but the first and of what follows them, for the token that is
there and the 20 likeliest.
"""

import argparse
import os

# one process, so that a failure is raised here; a cache of 1 GB is plenty. vLLM reads these when it is imported.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}

import torch
import transformers
import vllm

PROMPTS = ("Once upon a time", "The little dog ran to the", "Lily was sad because")
Told = list[dict[int, float]]  # of each place, the tokens' log-probabilities


def in_vllm(folder: str, prompts: list[list[int]], tokens: int) -> list[tuple[list[int], Told]]:
    """What vLLM writes after each prompt, and what it tells of each place after the first."""
    model = vllm.LLM(folder, trust_remote_code=True, dtype="float32", max_model_len=128, enforce_eager=True, seed=0)
    print(f"vLLM runs it as {model.llm_engine.model_config.architecture}")
    wanted = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=20, prompt_logprobs=20)
    answers = model.generate([{"prompt_token_ids": ids} for ids in prompts], wanted)
    found = []
    for answer in answers:
        written = answer.outputs[0]
        places = [*answer.prompt_logprobs[1:], *written.logprobs]
        told = [{token: value.logprob for token, value in place.items()} for place in places]
        found.append((list(written.token_ids), told))
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("exported")
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.checkpoint)
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    answers = in_vllm(options.exported, prompts, options.tokens)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.checkpoint, dtype=torch.float32, trust_remote_code=True
    ).eval()
    agreeing, places, largest = 0, 0, 0.0
    for ids, (written, told) in zip(prompts, answers, strict=True):
        expected = torch.tensor([ids])
        for _ in range(options.tokens):
            following = model(input_ids=expected, use_cache=False).logits[:, -1:].argmax(-1)
            expected = torch.cat([expected, following], dim=1)
        agreeing += sum(one == other for one, other in zip(written, expected[0, len(ids) :].tolist(), strict=True))
        # of vLLM's own tokens: one that differs must not be counted in every place after it
        logits = model(input_ids=torch.tensor([ids + written]), use_cache=False).logits[0, :-1]
        for place, known in zip(logits.log_softmax(-1), told, strict=True):
            places += len(known)
            largest = max([largest, *(abs(float(place[token]) - value) for token, value in known.items())])
        print(repr(tokenizer.decode(ids + written)))
    print(f"vllm {vllm.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
    print(f"greedy tokens agreeing: {agreeing} of {len(prompts) * options.tokens}")
    print(f"largest difference of a log-probability: {largest:.1e}, of {places}")


if __name__ == "__main__":
    main()

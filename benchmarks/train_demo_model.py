"""Train the small GPT-2 that ships inside the package, and print what it learned.

    python benchmarks/train_demo_model.py OUT --steps 3500 --extra TEXT [--extra TEXT ...] --also-report TEXT

The tokenizer and the model see the fit part of python-docs and the --extra texts. The choose and report parts
of python-docs (by a hash of each document's name, see ffncompress/texts.py) are never trained on: the figures
printed at the end are on the report part, beside a unigram model's on the same tokens.
"""

import argparse
import math
import time
from collections import Counter
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from ffncompress.text.parts import FIT, read_parts
from ffncompress.text.sources import PYTHON_DOCS, read

END = "<|endoftext|>"
CONTEXT, WIDTH, LAYERS, HEADS, VOCABULARY = 256, 128, 7, 4, 3072
BATCH = 24


def train_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, model_max_length=CONTEXT)


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> torch.Tensor:
    ids: list[int] = []
    for document in documents:
        ids += [0, *tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]]
    return torch.tensor(ids)


@torch.inference_mode()
def perplexity(model: GPT2LMHeadModel, ids: torch.Tensor) -> float:
    model.eval()
    rows = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    total, count = 0.0, 0
    for batch in rows.split(32):
        total += model(input_ids=batch, labels=batch).loss.item() * len(batch)
        count += len(batch)
    model.train()
    return math.exp(total / count)


def unigram_perplexity(train: torch.Tensor, held_out: torch.Tensor) -> float:
    """Add-one smoothed token frequencies of the training text."""
    counts = Counter(train.tolist())
    total = len(train) + VOCABULARY
    return math.exp(-sum(math.log((counts[t] + 1) / total) for t in held_out.tolist()) / len(held_out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=3500)
    parser.add_argument("--extra", action="append", default=[])
    parser.add_argument("--also-report", action="append", default=[])
    parser.add_argument("--lr", type=float, default=2e-3)
    options = parser.parse_args()
    torch.manual_seed(0)

    parts = read_parts(PYTHON_DOCS)
    train_documents = list(parts[FIT].documents)
    for source in options.extra:
        train_documents += read(source).documents
    tokenizer = train_tokenizer(train_documents)
    train = encode(tokenizer, train_documents)
    held_out = {f"python-docs {name}": encode(tokenizer, list(parts[name].documents)) for name in ("choose", "report")}
    held_out |= {Path(s).name: encode(tokenizer, list(read(s).documents))[:200_000] for s in options.also_report}

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
        resid_pdrop=0.05, embd_pdrop=0.05, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(train):,} training tokens", flush=True)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.98))

    start, seen, smooth = time.monotonic(), 0, None
    for step in range(1, options.steps + 1):
        falling = 0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * step / options.steps))
        rate = options.lr * min(1.0, step / 100) * falling
        for group in optimizer.param_groups:
            group["lr"] = rate
        at = torch.randint(0, len(train) - CONTEXT, (BATCH,))
        batch = torch.stack([train[i : i + CONTEXT] for i in at])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen += batch.numel()
        smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
        if step % 250 == 0:
            choose = perplexity(model, held_out["python-docs choose"])
            minutes = (time.monotonic() - start) / 60
            print(
                f"{minutes:5.1f} min  step {step:5d}  {seen / 1e6:5.1f} M tokens  train loss {smooth:.3f}  "
                f"python-docs choose perplexity {choose:.2f}",
                flush=True,
            )

    model.eval()
    config.resid_pdrop = config.embd_pdrop = 0.0
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(f"trained {step} steps, {seen / 1e6:.1f} M tokens, {seen / len(train):.1f} epochs")
    for name, ids in held_out.items():
        ours, unigram = perplexity(model, ids), unigram_perplexity(train, ids)
        print(f"{name}: perplexity {ours:.2f} at context {CONTEXT}, unigram {unigram:.1f}, ratio {unigram / ours:.1f}")


if __name__ == "__main__":
    main()

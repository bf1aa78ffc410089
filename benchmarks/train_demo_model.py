"""Train the small GPT-2 that ships inside the package, and print what it learned.

    python benchmarks/train_demo_model.py STORIES OUT --minutes 70

STORIES is what benchmarks/write_stories.py writes; shards that come while this runs are taken up. OUT gets the model
(bf16), its tokenizer, the held-out stories that ship with it, and state.pt, from which a run that was killed goes on;
minutes are of processor time, so a run that had to wait loses nothing.

Every place is learned from the teacher's twelve likeliest next tokens, by their probabilities, and from the token that
was written where it is another: together, on average, the teacher's whole distribution. Half the windows begin with a
story, half anywhere; in a third, stories are divided by a blank line instead of <|endoftext|>, because a text file's
are.
"""

import argparse
import math
import time
from pathlib import Path

import torch
from library.story_streams import Streams, held_out_stories, load_tokenizer, pack, unigram_perplexity
from safetensors.torch import load_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

CONTEXT, WIDTH, LAYERS, HEADS = 256, 160, 7, 5
BATCH = 16
PROMPTS = (
    "Once upon a time, there was a little girl named Lily.",
    "One day, Tom and his dog went to the park.",
    "The cat was very hungry, so",
    "Once upon a time, in a big forest, there lived a bear.",
    "Ben wanted to build a tall tower with his blocks.",
    "It was raining outside, and Sue was sad because",
    'Mom said, "It is time for bed."',
    "A small bird sat in a tree. It wanted to",
    "Tim found a shiny red ball in the grass.",
    "Sam and Mia were best friends. One day they",
)


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix is replaced by the nearest orthogonal one (five Newton-Schulz steps)."""

    def __init__(self, params: list[Tensor], lr: float, momentum: float = 0.95, decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:
        group = self.param_groups[0]
        for p in group["params"]:
            speed = self.state[p].setdefault("speed", torch.zeros_like(p))
            speed.lerp_(p.grad, 1 - group["momentum"])
            ahead = p.grad.lerp(speed, group["momentum"])
            parts = ahead.split(min(p.shape), 1) if p.shape[1] == 3 * p.shape[0] else [ahead]  # q, k and v apart
            update = torch.cat([orthogonal(part) for part in parts], 1)
            p.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=-group["lr"])


def orthogonal(g: Tensor) -> Tensor:
    """About u v^T of g = u s v^T, with entries as large as a square one's."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if g.shape[0] > g.shape[1] else x) * max(1, g.shape[1] / g.shape[0]) ** 0.5


def new_model(embedding: Tensor) -> GPT2LMHeadModel:
    """An untrained model whose tokens begin where the teacher has them, as far as the width goes."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(embedding), n_positions=CONTEXT, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, activation_function="gelu_pytorch_tanh",
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    _, _, directions = torch.linalg.svd(embedding - embedding.mean(0), full_matrices=False)
    rows = embedding @ directions[:WIDTH].T
    model.transformer.wte.weight.data = rows * (0.03 / rows.std())
    return model


class CrossEntropy(torch.autograd.Function):
    """Of logits [n, v] against weights p [n, k] at tokens [n, k], in half the passes that autograd takes."""

    @staticmethod
    def forward(ctx, logits: Tensor, at: Tensor, p: Tensor) -> Tensor:
        log_q = logits.log_softmax(-1)
        loss = -(p * log_q.gather(1, at)).sum() / len(p)
        ctx.gradient = log_q.exp_().mul_(p.sum(-1, keepdim=True) / len(p)).scatter_add_(1, at, -p / len(p))
        return loss

    @staticmethod
    def backward(ctx, scale: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient.mul_(scale), None, None


def loss_of(model: GPT2LMHeadModel, batch: dict[str, Tensor]) -> Tensor:
    """The cross-entropy against the teacher's likeliest tokens, and the one written where it is none of them."""
    logits = model(input_ids=batch["ids"]).logits.flatten(0, 1)
    at = torch.cat([batch["likely"], batch["rest"].clamp(min=0)[..., None]], -1).flatten(0, 1)
    p = torch.cat([batch["log_p"].float().exp(), (batch["rest"] >= 0)[..., None].float()], -1).flatten(0, 1)
    return CrossEntropy.apply(logits, at, p)


@torch.inference_mode()
def perplexity(model: GPT2LMHeadModel, ids: Tensor) -> float:
    """On one stream of tokens, in windows of the whole context."""
    rows = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    losses = [model(input_ids=batch, labels=batch).loss.item() * len(batch) for batch in rows.split(16)]
    return math.exp(sum(losses) / len(rows))


def optimizers(model: GPT2LMHeadModel, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, Adam for the rest."""
    matrices = [p for p in model.transformer.h.parameters() if p.dim() == 2]
    inside = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in inside]
    return [Muon(matrices, lr), torch.optim.AdamW(rest, lr / 6, betas=(0.9, 0.98), weight_decay=0.0)]


def learning_rate(done: float) -> float:
    """The share of the peak at a share of the run: up, level, and down to nothing over the last 60 %."""
    return min(1.0, 0.05 + done / 0.01, (1 - done) / 0.6)


def save(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, folder: Path, state: dict) -> None:
    """The state to go on from, and the model as it ships."""
    torch.save(state, folder / "state.part")
    (folder / "state.part").rename(folder / "state.pt")
    config = GPT2Config.from_dict(model.config.to_dict() | {"activation_function": "gelu_new"})  # the same function
    shipped = GPT2LMHeadModel(config)
    shipped.load_state_dict(model.state_dict())
    shipped.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def show(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """How the model goes on from ten prompts, greedily and by chance."""
    torch.manual_seed(0)
    for number, prompt in enumerate(PROMPTS, 1):
        inputs = tokenizer(prompt, return_tensors="pt")
        for name, how in (("greedy", {"do_sample": False}), ("sampled", {"do_sample": True, "temperature": 0.5})):
            ids = model.generate(**inputs, max_new_tokens=60, pad_token_id=0, **how)[0, inputs["input_ids"].shape[1] :]
            print(f"{number:2d} {name:7} {prompt} | {tokenizer.decode(ids, skip_special_tokens=True).strip()!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stories", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=70, help="of processor time, in all; 0 only reports")
    parser.add_argument("--lr", type=float, default=0.024)
    parser.add_argument("--begin", type=Path, help="a model of an earlier run of the same tokens, to go on from")
    parser.add_argument("--save-every", type=float, default=4, help="minutes")
    options = parser.parse_args()
    torch.set_num_threads(1)  # see write_stories.py
    options.out.mkdir(parents=True, exist_ok=True)

    tokenizer = load_tokenizer(options.stories, CONTEXT)
    streams = Streams(options.stories, tokenizer)
    stories = held_out_stories(options.stories, tokenizer)
    held_out = torch.tensor([i for story in stories for i in (0, *story)])
    model = new_model(load_file(options.stories / "embedding.safetensors")["embedding"])
    if options.begin:
        model.load_state_dict(GPT2LMHeadModel.from_pretrained(options.begin, dtype=torch.float32).state_dict())
    both = optimizers(model, options.lr)
    steps, minutes = 0, 0.0
    if (options.out / "state.pt").exists():
        state = torch.load(options.out / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, kept in zip(both, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        steps, minutes = state["steps"], state["minutes"]
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, at step {steps}", flush=True)

    torch.manual_seed(steps)
    begun, smooth, saved, stepped = time.process_time() - 60 * minutes, 0.0, minutes, steps
    while minutes < options.minutes:
        for optimizer, peak in zip(both, (options.lr, options.lr / 6), strict=True):
            optimizer.param_groups[0]["lr"] = peak * learning_rate(minutes / options.minutes)
        loss = loss_of(model, streams.draw(BATCH, CONTEXT))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        steps, minutes = steps + 1, (time.process_time() - begun) / 60
        smooth = loss.item() if steps == stepped + 1 else 0.98 * smooth + 0.02 * loss.item()
        if minutes - saved > options.save_every or minutes >= options.minutes:
            saved = minutes
            kept = [optimizer.state_dict() for optimizer in both]
            state = {"model": model.state_dict(), "optimizers": kept, "steps": steps, "minutes": minutes}
            save(model, tokenizer, options.out, state)
            streams.take_up()
            print(
                f"{time.strftime('%H:%M')} {minutes:5.1f} min  step {steps:5d}  {steps * BATCH * CONTEXT / 1e6:5.1f} M "
                f"tokens of {streams.tokens / 1e6:.1f} M  loss {smooth:.3f}  held-out perplexity "
                f"{perplexity(model, held_out[:50_000]):.2f}",
                flush=True,
            )

    shipped = GPT2LMHeadModel.from_pretrained(options.out, dtype=torch.float32).eval()
    pack([tokenizer.decode(story) for story in stories], options.out / "stories.jsonl.gz")
    ours, unigram = perplexity(shipped, held_out), unigram_perplexity(streams.ids, held_out)
    print(f"held-out perplexity {ours:.2f} at context {CONTEXT}, unigram {unigram:.1f}, ratio {unigram / ours:.1f}")
    show(shipped, tokenizer)


if __name__ == "__main__":
    main()

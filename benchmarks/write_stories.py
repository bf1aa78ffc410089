"""Have a small storyteller of the Llama architecture write the text that the embedded model learns from.

    python benchmarks/write_stories.py TEACHER OUT --rows 16384 --held-out 1536

TEACHER is a folder with stories15M (MIT; config.json, model.safetensors, tokenizer.json). OUT gets

    tokenizer.json, pieces.json            the student's 3,072 tokens, and which token of the teacher each one is
    embedding.safetensors                  the teacher's vectors of these
    train-00000.safetensors, ...           128 rows of 256 tokens, and the teacher's twelve likeliest next tokens
    held-00000.safetensors, ...            the same from other seeds, never trained on

A student's token is a teacher's token ("Ġword" for "▁word", a newline's byte for a newline), so the teacher is read
with its head cut down to the student's rows, and its probabilities are the student's targets as they are. A row is a
stream: when a story ends, the next begins, as the teacher was trained. A shard that is there is not written again.
One thread: products this small wait for a second one longer than they work, on a machine that does other things.
"""

import argparse
import json
import re
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel

END = "<|endoftext|>"
VOCABULARY, CONTEXT, BATCH, TOP = 3072, 256, 128, 12
BOS = 1  # the teacher's, between stories
OPENING = 24  # tokens of a row that are drawn more freely, so that rows differ
FREELY, CALMLY = 1.0, 0.8  # temperatures; the targets are always the calm ones
ONE_WORD = re.compile(r"▁?[A-Za-z]+|▁?[0-9]+|▁?[^\sA-Za-z0-9▁]+|▁|'(s|t|re|ve|m|ll|d)")  # one pre-token of GPT-2's


class Teacher:
    """A Llama that reads one token of every row at a time, with the head's rows that were asked for."""

    def __init__(self, folder: Path, rows: torch.Tensor | None = None) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.w = load_file(folder / "model.safetensors")
        self.layers, self.heads = config["num_hidden_layers"], config["num_attention_heads"]
        self.width, self.eps = config["hidden_size"], config["rms_norm_eps"]
        embedding = self.w["model.embed_tokens.weight"]
        self.embedding = embedding if rows is None else embedding[rows]  # tied: also the head
        size = self.width // self.heads
        angle = torch.arange(CONTEXT)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
        self.cos, self.sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        self.cache = torch.zeros(self.layers, 2, BATCH, self.heads, CONTEXT, size)
        for i in range(self.layers):  # one product for the three, and one for the two
            at = f"model.layers.{i}."
            self.w[f"{i}.qkv"] = torch.cat([self.w[f"{at}self_attn.{n}_proj.weight"] for n in "qkv"])
            self.w[f"{i}.up"] = torch.cat([self.w[f"{at}mlp.{n}_proj.weight"] for n in ("gate", "up")])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (self.width,), self.w[f"{name}.weight"], self.eps)

    def _turn(self, x: torch.Tensor, place: int) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cos[place] + torch.cat([-second, first], -1) * self.sin[place]

    def read(self, tokens: torch.Tensor, place: int) -> torch.Tensor:
        """The logits of the next token of each row."""
        x = self.embedding[tokens]
        for i in range(self.layers):
            at = f"model.layers.{i}"
            q, k, v = (self._norm(x, f"{at}.input_layernorm") @ self.w[f"{i}.qkv"].T).view(
                len(x), 3, self.heads, 1, -1
            ).unbind(1)  # fmt: skip
            self.cache[i, 0, :, :, place], self.cache[i, 1, :, :, place] = self._turn(k, place)[:, :, 0], v[:, :, 0]
            keys, values = self.cache[i, 0, :, :, : place + 1], self.cache[i, 1, :, :, : place + 1]
            mixed = F.scaled_dot_product_attention(self._turn(q, place), keys, values).reshape(len(x), -1)
            x = x + mixed @ self.w[f"{at}.self_attn.o_proj.weight"].T
            gate, up = (self._norm(x, f"{at}.post_attention_layernorm") @ self.w[f"{i}.up"].T).chunk(2, -1)
            x = x + (F.silu(gate) * up) @ self.w[f"{at}.mlp.down_proj.weight"].T
        return self._norm(x, "model.norm") @ self.embedding.T


def draw(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """A token of each row: where a uniform number falls among the summed probabilities."""
    below = (logits / temperature).softmax(-1).cumsum(-1)
    return torch.searchsorted(below, torch.rand(len(below), 1) * below[:, -1:])[:, 0].clamp(max=below.shape[1] - 1)


def soft_counts(teacher: Teacher, batches: int) -> torch.Tensor:
    """How often the teacher would write each of its tokens, by its probabilities; a story's first word counts apart."""
    counts = torch.zeros(2, len(teacher.embedding))
    for _ in range(batches):
        tokens = torch.full((BATCH,), BOS)
        for place in range(CONTEXT):
            logits = teacher.read(tokens, place)
            probabilities, opens = logits.softmax(-1), tokens == BOS
            counts[0] += probabilities.sum(0)
            counts[1] += probabilities[opens].sum(0)
            tokens = draw(logits, FREELY)
    return counts


def byte_level(piece: str) -> str:
    """How GPT-2 writes a piece of the teacher's."""
    return piece.replace("▁", "Ġ")


def teachers_bytes(vocabulary: dict[str, int]) -> dict[str, int]:
    """Every byte-level character, and the teacher's token of that character, or else of that byte."""
    plain = {i for span in ((33, 127), (161, 173), (174, 256)) for i in range(*span)}
    others = [b for b in range(256) if b not in plain]
    written = {b: chr(b) if b in plain else chr(256 + others.index(b)) for b in range(256)}
    assert set(written.values()) == set(ByteLevel.alphabet())
    named = {b: vocabulary.get("▁" if b == 32 else chr(b)) if b < 128 else None for b in range(256)}
    return {written[b]: named[b] or vocabulary[f"<0x{b:02X}>"] for b in range(256)}


def choose_pieces(spec: dict, counts: torch.Tensor) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The student's tokens with the teacher's ids, in order, and the merges that make them, in the teacher's order."""
    vocabulary = spec["vocab"]
    need = {piece: counts[0, id].item() for piece, id in vocabulary.items()}
    for piece, id in vocabulary.items():  # a story's first word is stored without its space
        if piece.startswith("▁") and piece[1:] in need:
            need[piece[1:]] += counts[1, id].item()
    ranks = {tuple(pair): rank for rank, pair in enumerate(spec["merges"])}
    kept = teachers_bytes(vocabulary)
    merges: set[tuple[str, str]] = set()
    for piece in sorted(need, key=lambda piece: -need[piece]):
        if not piece.removeprefix("▁").isascii() or not ONE_WORD.fullmatch(piece):
            continue
        steps = derivation(piece, ranks)
        made = {byte_level(a + b): vocabulary[a + b] for a, b in steps}
        if byte_level(piece) in kept or byte_level(piece) not in made:
            continue
        if len(kept | made) > VOCABULARY - 1:
            break
        kept |= made
    for left, right in ranks:
        if all(byte_level(part) in kept for part in (left, right, left + right)):
            merges.add((left, right))
    ordered = [(byte_level(a), byte_level(b)) for a, b in sorted(merges, key=ranks.__getitem__)]
    return {END: BOS, **kept}, ordered


def derivation(piece: str, ranks: dict[tuple[str, str], int]) -> list[tuple[str, str]]:
    """The merges that the teacher's tokenizer makes on the way to a piece."""
    parts, steps = list(piece), []
    while len(parts) > 1:
        rank, at = min((ranks.get((a, b), len(ranks)), i) for i, (a, b) in enumerate(pairwise(parts)))
        if rank == len(ranks):
            break
        steps.append((parts[at], parts[at + 1]))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return steps


def pieces_of(tokenizer: Tokenizer, spec: dict) -> dict[str, int]:
    """The tokens of a tokenizer that this script wrote before, with the teacher's ids."""
    known = {byte_level(piece): i for piece, i in spec["vocab"].items()} | teachers_bytes(spec["vocab"]) | {END: BOS}
    tokens = tokenizer.get_vocab()
    return {piece: known[piece] for piece in sorted(tokens, key=tokens.__getitem__)}


def write_tokenizer(folder: Path, teacher: Path, batches: int, like: Path | None) -> None:
    """Choose the student's tokens and write them as a byte-level BPE; or take those of a student."""
    spec = json.loads((teacher / "tokenizer.json").read_text())["model"]
    writer = Teacher(teacher)
    if like is not None:
        tokenizer = Tokenizer.from_file(str(like / "tokenizer.json"))
        pieces, merges = pieces_of(tokenizer, spec), json.loads(tokenizer.to_str())["model"]["merges"]
    else:
        pieces, merges = choose_pieces(spec, soft_counts(writer, batches))
        tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
    rows = writer.embedding[torch.tensor(list(pieces.values()))]
    save_file({"embedding": rows}, folder / "embedding.safetensors")
    (folder / "pieces.json").write_text(json.dumps(list(pieces.values())))
    print(f"{len(pieces)} tokens, {len(merges)} merges", flush=True)


def write_rows(teacher: Teacher, seed: int) -> dict[str, torch.Tensor]:
    """128 rows and, for each place, the teacher's likeliest next tokens with their log-probabilities."""
    torch.manual_seed(seed)
    ids = torch.zeros(BATCH, CONTEXT + 1, dtype=torch.int16)
    likely = torch.zeros(BATCH, CONTEXT, TOP, dtype=torch.int16)
    log_p = torch.zeros(BATCH, CONTEXT, TOP, dtype=torch.float16)
    for place in range(CONTEXT):
        logits = teacher.read(ids[:, place].long(), place)
        top = (logits / CALMLY).log_softmax(-1).topk(TOP)
        likely[:, place], log_p[:, place] = top.indices.short(), top.values.half()
        ids[:, place + 1] = draw(logits, FREELY if place < OPENING else CALMLY).short()
    return {"ids": ids[:, :CONTEXT].contiguous(), "likely": likely, "log_p": log_p}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--held-out", type=int, default=1536, help="rows that are not for training")
    parser.add_argument("--count-batches", type=int, default=3, help="batches that the choice of tokens rests on")
    parser.add_argument("--like", type=Path, help="a student whose tokens are taken, instead of choosing them")
    parser.add_argument("--first", type=int, default=0, help="shard of --rows to begin with: other seeds, new stories")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if not (options.out / "pieces.json").exists():
        write_tokenizer(options.out, options.teacher, options.count_batches, options.like)
    pieces = torch.tensor(json.loads((options.out / "pieces.json").read_text()))
    teacher = Teacher(options.teacher, pieces)
    work = [(f"held-{i:05}", 10**6 + i) for i in range(options.held_out // BATCH)]
    work += [(f"train-{i:05}", i) for i in range(options.first, options.rows // BATCH)]
    start = time.monotonic()
    for name, seed in work:
        file = options.out / f"{name}.safetensors"
        if not file.exists():
            save_file(write_rows(teacher, seed), file.with_suffix(".part"))
            file.with_suffix(".part").rename(file)
            print(f"{(time.monotonic() - start) / 60:5.1f} min  {name}", flush=True)


if __name__ == "__main__":
    main()

"""The shards of write_stories.py as streams of tokens and targets to train on, and the held-out stories as text."""

import gzip
import json
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

END = 0  # <|endoftext|>
Arrays = dict[str, Tensor]  # ids [n], likely and log_p [n, 12], rest [n]: the token written where likely has it not


def load_tokenizer(folder: Path, context: int) -> PreTrainedTokenizerFast:
    """The student's tokenizer, as transformers has it."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.id_to_token(END)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end, model_max_length=context)


class Words:
    """Rewrites a story's first word without the space that the teacher begins with."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        self.known: dict[tuple[int, ...], list[int]] = {}

    def first(self, ids: list[int], at: int) -> tuple[list[int], int]:
        """The word that begins at a place, rewritten, and where it ends."""
        if at >= len(ids) or not self.pieces[ids[at]].startswith("Ġ"):
            return [], at
        end = at + 1
        while end < len(ids) and self.pieces[ids[end]].isalpha() and self.pieces[ids[end]].isascii():
            end += 1
        word = tuple(ids[at:end])
        if word not in self.known:
            text = self.tokenizer.decode(list(word)).lstrip(" ")
            self.known[word] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self.known[word], end


def stream(shard: Arrays, words: Words) -> Arrays:
    """The rows of a shard one after another, first words rewritten."""
    rows, context = shard["ids"].shape
    ids: list[int] = []
    source: list[int] = []  # the place whose target a token has; -1: the next token alone
    for row in range(rows):
        old = shard["ids"][row].tolist()
        at = 0
        while at < context:
            ids.append(old[at])
            source.append(row * context + at)
            at += 1
            if old[at - 1] == END:
                word, end = words.first(old, at)
                if word:
                    source[-1] = -1
                    ids += word
                    source += [-1] * (len(word) - 1) + [row * context + end - 1]
                    at = end
    made, places = torch.tensor(ids), torch.tensor(source)
    likely = shard["likely"].flatten(0, 1).long()[places]
    log_p = shard["log_p"].flatten(0, 1)[places]
    following = made.roll(-1)
    alone = places < 0
    likely[alone, 0], log_p[alone] = following[alone], torch.tensor([0.0] + [-torch.inf] * 11).half()
    written = (likely == following[:, None]).any(1) | (places % context == context - 1)  # a row's end is cut
    rest = torch.where(written, -1, following)
    return {"ids": made.short(), "likely": likely.short(), "log_p": log_p, "rest": rest.short()}


def divided_by_lines(arrays: Arrays, line: int) -> Arrays:
    """A stream in which two newlines stand where <|endoftext|> stood."""
    ends = arrays["ids"] == END
    index = torch.arange(len(ends)).repeat_interleave(1 + ends.int())
    made = {name: values[index] for name, values in arrays.items()}
    for name in ("ids", "likely", "rest"):
        made[name][made[name] == END] = line
    first = ends[index] & ends[index].roll(-1) & (index == index.roll(-1))
    made["likely"][first, 0], made["rest"][first] = line, -1
    made["log_p"][first] = torch.tensor([0.0] + [-torch.inf] * 11).half()
    return made


class Streams:
    """All training shards of a folder, and the windows drawn from them."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        self.folder, self.words = folder, Words(tokenizer)
        self.line = tokenizer("\n", add_special_tokens=False)["input_ids"][0]
        self.taken: set[Path] = set()
        self.plain: Arrays = {}
        self.take_up()

    @property
    def ids(self) -> Tensor:
        """Every training token."""
        return self.plain["ids"].long()

    @property
    def tokens(self) -> int:
        """How many there are."""
        return len(self.plain["ids"])

    def take_up(self) -> None:
        """Read the shards that were not there before."""
        new = [file for file in sorted(self.folder.glob("train-*.safetensors")) if file not in self.taken]
        if not new:
            return
        parts = [stream(load_file(file), self.words) for file in new]
        parts = [self.plain, *parts] if self.plain else parts
        self.taken |= set(new)
        self.plain = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        self.lined = divided_by_lines(self.plain, self.line)
        self.begins = {
            "plain": (self.plain["ids"] == END).nonzero()[:, 0],
            "lined": (self.lined["ids"].roll(1) == self.line).nonzero()[:, 0],
        }

    def draw(self, count: int, length: int) -> Arrays:
        """Windows of a length: two in three from the plain stream, and half at a story's (or paragraph's) beginning."""
        found = []
        for number in range(count):
            name = "lined" if number % 3 == 2 else "plain"
            arrays: Arrays = getattr(self, name)
            last = len(arrays["ids"]) - length
            at = int(torch.randint(last, ()))
            if number % 2:
                begins = self.begins[name]
                at = int(begins[torch.randint(len(begins), ())]) + int(torch.randint(2, ())) * (name == "plain")
            at = min(at, last)
            found.append({key: values[at : at + length] for key, values in arrays.items()})
        batch = {key: torch.stack([window[key] for window in found]) for key in found[0]}
        return {key: values if key == "log_p" else values.long() for key, values in batch.items()}


def held_out_stories(folder: Path, tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """The tokens of every whole story of the held-out shards, without <|endoftext|>."""
    words, found = Words(tokenizer), []
    for file in sorted(folder.glob("held-*.safetensors")):
        for row in load_file(file)["ids"].tolist():
            ends = [at for at, token in enumerate(row) if token == END]
            for begin, end in pairwise(ends):
                word, after = words.first(row, begin + 1)
                found.append([*word, *row[after:end]])
    return [story for story in found if len(story) >= 40]


def pack(stories: list[str], file: Path) -> None:
    """Write stories as the package has them: one JSON object a line, compressed to the same bytes every time."""
    lines = "".join(json.dumps({"text": story}) + "\n" for story in stories)
    file.write_bytes(gzip.compress(lines.encode(), 9, mtime=0))


def unigram_perplexity(train: Tensor, held_out: Tensor) -> float:
    """That of the training tokens' frequencies, with one added to each count."""
    counts = torch.bincount(train, minlength=int(held_out.max()) + 1).double() + 1
    return float(torch.exp(-(counts / counts.sum()).log()[held_out].mean()))

"""A Hugging Face tokenizer as llama.cpp keeps one: tokens, scores, types, merges, and the name of its pre-tokenizer.

llama.cpp knows pre-tokenizers by name, not by rule. So the rule in tokenizer.json is looked up by its content; what is
not in the table is refused, for a near miss would split some texts otherwise, and nobody would notice.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import IntEnum

from ffncompress.errors import ModelError
from ffncompress.type_aliases import Json, Tokenizer

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# the splits of a byte-level pre-tokenizer in order, then whether GPT-2's own pattern follows
KNOWN_RULES = {
    ((), True): "gpt-2",
    (("digits",), True): "smollm",
    ((_LLAMA3,), False): "llama-bpe",
    ((_QWEN2,), False): "qwen2",
}


class TokenType(IntEnum):
    """As GGUF numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass
class GgufTokenizer:
    """What goes under `tokenizer.` in the file."""

    model: str  # gpt2: byte-level BPE; llama: SentencePiece's
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None = None
    merges: list[str] | None = None
    special: dict[str, int] = field(default_factory=dict)
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = False
    chat_template: str | None = None
    note: str = ""


def as_gguf_tokenizer(tokenizer: Tokenizer, rows: int) -> GgufTokenizer:
    """Lay out a tokenizer for llama.cpp.

    Args:
        tokenizer: a fast one of transformers.
        rows: how many rows the embedding has; those without a token get one that no text gives.

    Raises:
        ModelError: it is of a kind that llama.cpp would not follow.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError("its tokenizer has no tokenizer.json; save it once with transformers' fast tokenizer")
    spec = json.loads(backend.to_str())
    model = spec["model"]
    if model["type"] != "BPE":
        raise ModelError(f"its tokenizer is of the kind {model['type']}, which is not written to GGUF; export it to hf")
    is_spm = bool(model.get("byte_fallback"))
    tokens, types = _tokens(tokenizer, spec, model, rows, is_spm)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    made = GgufTokenizer("llama" if is_spm else "gpt2", "default", tokens, types, special=_special(tokenizer))
    if is_spm:
        made.scores = _scores(tokens, model["merges"])
        made.add_space_prefix = _space_prefix(spec)
    else:
        made.merges, made.pre = merges, pre_tokenizer_of(spec)
        if (spec.get("normalizer") or {}).get("type") == "NFC":
            made.note = (
                "llama.cpp does not compose Unicode (NFC) as this tokenizer does: text that is not composed differs"
            )
        elif spec.get("normalizer"):
            raise ModelError("its tokenizer normalises text in a way that llama.cpp does not; export it to hf")
    ids = tokenizer("a").input_ids
    made.add_bos = bool(ids) and ids[0] == made.special.get("bos", -1)
    made.add_eos = len(ids) > 1 and ids[-1] == made.special.get("eos", -1)
    template = getattr(tokenizer, "chat_template", None)
    made.chat_template = template if isinstance(template, str) else None
    return made


def pre_tokenizer_of(spec: Json) -> str:
    """llama.cpp's name for the pre-tokenizer of a tokenizer.json.

    Raises:
        ModelError: it has none that is known here.
    """
    steps, own_pattern = [], False
    stated = spec.get("pre_tokenizer") or {}
    for step in stated.get("pretokenizers", [stated]):
        if step.get("type") == "ByteLevel" and not step.get("add_prefix_space"):
            own_pattern = bool(step.get("use_regex", True))
        elif step.get("type") == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            steps.append(str(step["pattern"].get("Regex")))
        elif step.get("type") == "Digits" and step.get("individual_digits"):
            steps.append("digits")
        else:
            steps.append(f"unknown {step.get('type')}")
    name = KNOWN_RULES.get((tuple(steps), own_pattern))
    if name is None:
        raise ModelError(
            "its tokenizer splits text by a rule that llama.cpp is not known here to have; export it to hf, or convert "
            "a native checkpoint with llama.cpp's own convert_hf_to_gguf.py"
        )
    return name


def _tokens(tokenizer: Tokenizer, spec: Json, model: Json, rows: int, is_spm: bool) -> tuple[list[str], list[int]]:
    by_id = {number: token for token, number in tokenizer.get_vocab().items()}
    if max(by_id) >= rows:
        raise ModelError(f"its tokenizer has {max(by_id) + 1} tokens, its embedding {rows} rows; get the model again")
    added = {token["id"]: token for token in spec.get("added_tokens", [])}
    tokens, types = [], []
    for number in range(rows):
        token = by_id.get(number)
        if token is None:
            tokens.append(f"[PAD{number}]")
            types.append(TokenType.UNUSED)
            continue
        tokens.append(token)
        if is_spm and token == model.get("unk_token"):
            types.append(TokenType.UNKNOWN)
        elif number in added:
            types.append(TokenType.CONTROL if added[number]["special"] else TokenType.USER_DEFINED)
        elif is_spm and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            types.append(TokenType.BYTE)
        else:
            types.append(TokenType.NORMAL)
    return tokens, [int(kind) for kind in types]


def _scores(tokens: list[str], merges: Json) -> list[float]:
    """A token's score is the rank of the first merge that makes it: the pair of the best score is joined first."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        ranks.setdefault(left + right, rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]


def _space_prefix(spec: Json) -> bool:
    """Whether a text begins with a space of the tokenizer's own.

    Raises:
        ModelError: it does something else to spaces than SentencePiece for Llama does.
    """
    normalizer = spec.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    kinds = [step["type"] for step in steps]
    pre = spec.get("pre_tokenizer") or {}
    if pre.get("type") == "Metaspace" and not kinds:
        return bool(pre.get("prepend_scheme", "always") != "never")
    if pre or kinds not in (["Prepend", "Replace"], ["Replace"]):
        raise ModelError("its tokenizer treats spaces in a way that llama.cpp does not; export it to hf")
    return bool(kinds[0] == "Prepend")


def _special(tokenizer: Tokenizer) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    ids = {name: getattr(tokenizer, f"{short}_token_id", None) for name, short in names.items()}
    return {name: number for name, number in ids.items() if number is not None}

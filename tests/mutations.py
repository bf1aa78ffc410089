"""Damage as a stranger may send it: JSON, safetensors and YAML, changed a little or a lot, by a seeded chance."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from random import Random
from typing import Any

NUMBERS = (
    -1, 0, 1, 2, -0.0, 0.5, 1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf"), 10**30, -(10**30),
    10**400, 2**31, 2**53, 2**63, 1e-9, True, False, None,
)  # fmt: skip
WORDS = (
    "", " ", "\0", "x" * 100_000, "\x1b]0;owned\x07\x9b2J", "\ud800", "\u202e<script>", "../../escape", "/etc/passwd",
    "~nobody/model", "C:\\x", "file:///etc/passwd", "demo", "a/b", "hub:../..:x:y:z", "n" * 300, "canary.Canary",
    "NaN", "1e999", "9" * 5000, "9" * 400 + "x", "9" * 400 + "%", "0%", "%s%n", "{0.__class__}", "[/b]", "plan.json",
    "float64", "cuda", "random", "true", "null", "0", "3",
)  # fmt: skip
TYPED = ("", "'", '"', "\\", "#", ":", "- ", "[", "{", "&a ", "*a", "|", ">", "%", "@", "`", "\t", "\n", "!!", "---\n")
TAGS = (
    "!!python/object/apply:os.system ['touch canary-ran']", "!!python/name:os.system",
    "!!python/object:canary.Canary {}",
    "!!python/object/new:canary.Canary []", "!!binary '!'", "!!set {a, b}", "!!timestamp 2001-99-99", "2001-02-30",
    "!!float x", "!!int 0x", "1_0", "0b", "0o9", ".nan", "-.inf", "1:60:60", "~", "yes", "? [a]\n: b", "{[a]: b}",
    "<<: 3",
    "&a [*a]", "*a", "!unknown x", "'\\ud800'", '"\\ud800"', '"\\0"', "1" * 5000, "1e400",
)  # fmt: skip
CODE = {
    "auto_map": dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"), "canary.Canary"),
    "trust_remote_code": True, "custom_pipelines": {"x": {"impl": "canary.Canary"}}, "__class__": "os.system",
    "quantization_config": {"quant_method": "ffncompress"}, "_name_or_path": "../..", "base_model_name_or_path": "demo",
}  # fmt: skip
DEEP = "\uffffdeep"  # stands for brackets, which json.dumps could not nest so deep


def mutated_json(content: bytes, chance: Random) -> bytes:
    """Another JSON file: the tree changed in up to three places, or the bytes."""
    if chance.random() < 0.15:
        return mutated_bytes(content, chance)
    tree = {"": json.loads(content)}
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        chance.choice(_TREE)(tree, chance)
    text = json.dumps(tree.get(""))
    depth = chance.choice((2, 50, 500, 5000, 200_000))
    brackets = chance.choice(("[]", '{"a":1}'))
    opening, closing = ("[", "]") if brackets == "[]" else ('{"a":', "1" + "}" * depth)
    nested = opening * depth + (closing * depth if brackets == "[]" else closing)
    return text.replace(json.dumps(DEEP), nested).encode("utf-8", "surrogatepass")


def mutated_bytes(content: bytes, chance: Random) -> bytes:
    """Cut, flipped, doubled, or with something put in."""
    at, other = sorted(chance.randrange(len(content) + 1) for _ in range(2))
    how = chance.randrange(7)
    if how == 0:
        return content[:at]
    if how == 1:
        return content[:at] + content[other:]
    if how == 2:
        return content[:other] + content[at:]
    if how == 3:
        return (
            content[:at]
            + chance.choice((b"\0", b"\xff", b"\xef\xbb\xbf", b"NaN", b"9" * 5000, b'"', b"}"))
            + content[at:]
        )
    if how == 4:
        return chance.choice((b"", b"null", b"[]", b"{}", b"0", b'"x"', b"\xef\xbb\xbf" + content, content + content))
    flipped = bytearray(content)
    for _ in range(chance.choice((1, 1, 4, 64))):
        flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
    return bytes(flipped)


def mutated_tensors(content: bytes, chance: Random) -> bytes:
    """Another safetensors file: header or bytes changed."""
    if chance.random() < 0.4:
        return mutated_bytes(content, chance)
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    for _ in range(chance.choice((1, 1, 2))):
        data = chance.choice(_HEADER)(header, data, chance)
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    claimed = len(text) if chance.random() < 0.9 else chance.choice((0, 1, len(text) - 1, len(text) + 1, 2**40, 2**63))
    return struct.pack("<Q", claimed) + text + data


def mutated_yaml(content: bytes, chance: Random) -> bytes:
    """Another YAML file: a line, a value or the bytes changed."""
    if chance.random() < 0.15:
        return mutated_bytes(content, chance)
    lines = content.decode().splitlines()
    for _ in range(chance.choice((1, 1, 2, 3))):
        _edit_line(lines, chance)
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _edit_line(lines: list[str], chance: Random) -> None:
    at = chance.randrange(len(lines)) if lines else 0
    line = lines[at] if lines else ""
    key, colon, _ = line.partition(":")
    value = chance.choice((*TAGS, *map(_as_yaml, NUMBERS), *map(_as_yaml, WORDS), *("[" * 3000, "{a: " * 3000)))
    spot = chance.randrange(len(line) + 1)
    edits = [
        f"{key}{colon} {value}", f"{key}: [{value}]", f"{value}: 1", line[:spot] + chance.choice(TYPED) + line[spot:],
        line[:spot], " " * chance.choice((1, 2, 3, 8)) + line, line.strip(), f"{line}\n{line}", "",
    ]  # fmt: skip
    lines[at : at + 1] = [chance.choice(edits)]
    if chance.random() < 0.1:
        chance.shuffle(lines)


def _as_yaml(value: Any) -> str:
    return json.dumps(value)[:20_000]


def _place(tree: Any, chance: Random) -> tuple[Any, Any]:
    """A place of the tree: (container, key), each depth as likely as another."""
    at, key = tree, ""
    while isinstance(at[key], dict | list) and at[key] and chance.random() < 0.85:
        at = at[key]
        key = chance.choice(list(at)) if isinstance(at, dict) else chance.randrange(len(at))
    return at, key


def _delete(tree: Any, chance: Random) -> None:
    at, key = _place(tree, chance)
    if at is not tree:
        del at[key]


def _repeat(tree: Any, chance: Random) -> None:
    at, key = _place(tree, chance)
    value = at[key]
    if isinstance(at, list):
        at[key:key] = [value] * chance.choice((1, 1, 3, 100))
    elif at is not tree:
        at[chance.choice((*list(at), *WORDS[:12]))] = value


def _odd_number(tree: Any, chance: Random) -> None:
    at, key = _place(tree, chance)
    for _ in range(20):  # rather where a number was
        if isinstance(at[key], int | float):
            break
        at, key = _place(tree, chance)
    value = at[key] if type(at[key]) in (int, float) else 1
    at[key] = chance.choice((*NUMBERS, 2 * value, -value, value + 1, value / 2 if value < 2**53 else 0.5))


def _everywhere(tree: Any, chance: Random) -> None:
    """Every number of one name gets the same odd value, of its own type where that can be."""
    key = _place(tree, chance)[1]
    odd = chance.choice(NUMBERS)
    queue = [tree]
    while queue:
        node = queue.pop()
        for name in list(node) if isinstance(node, dict) else range(len(node)):
            if isinstance(node[name], dict | list):
                queue.append(node[name])
            elif name == key and type(node[name]) in (int, float):
                is_float = isinstance(node[name], float) and isinstance(odd, int) and abs(odd) < 10**300
                node[name] = float(odd) if is_float else odd


def _emptied(tree: Any, chance: Random) -> None:
    at, key = _place(tree, chance)
    for _ in range(20):  # rather a list than the top
        if isinstance(at[key], list):
            break
        at, key = _place(tree, chance)
    at[key] = [] if isinstance(at[key], list) else None


def _odd_word(tree: Any, chance: Random) -> None:
    at, key = _place(tree, chance)
    at[key] = chance.choice(WORDS)


def _retype(tree: Any, chance: Random) -> None:
    at, key = _place(tree, chance)
    value = at[key]
    at[key] = chance.choice(([value], {"a": value}, [], {}, str(value)[:1000], None, True, DEEP, [[value]]))


def _swap(tree: Any, chance: Random) -> None:
    (at, key), (other, name) = _place(tree, chance), _place(tree, chance)
    one, two = json.dumps(at[key]), json.dumps(other[name])
    at[key] = json.loads(two)
    if name in other if isinstance(other, dict) else name < len(other):
        other[name] = json.loads(one)


def _copy(tree: Any, chance: Random) -> None:
    (at, key), (other, name) = _place(tree, chance), _place(tree, chance)
    at[key] = json.loads(json.dumps(other[name]))


def _rename(tree: Any, chance: Random) -> None:
    at, key = _place(tree, chance)
    if isinstance(at, dict) and at is not tree:
        at[chance.choice((*WORDS, f"{key}x", key.upper()))] = at.pop(key)


def _add(tree: Any, chance: Random) -> None:
    at, key = _place(tree, chance)
    target = at[key]
    if isinstance(target, dict):
        name = chance.choice(list(CODE))
        target[name] = CODE[name]
    elif isinstance(target, list):
        target.append(chance.choice((*NUMBERS, *WORDS)))


_TREE: tuple[Callable[[Any, Random], None], ...] = (
    _delete, _repeat, _odd_number, _odd_number, _odd_number, _everywhere, _everywhere, _emptied,
    _odd_word, _odd_word, _retype, _swap, _copy, _rename, _add,
)  # fmt: skip


def _names(header: dict[str, Any]) -> list[str]:
    return [name for name, entry in header.items() if isinstance(entry, dict) and "dtype" in entry] or [""]


def _span(entry: dict[str, Any], data: bytes) -> tuple[int, int]:
    """Where a tensor's bytes are; nowhere, if its entry is damaged already."""
    try:
        begin, end = entry["data_offsets"]
        return (begin, end) if 0 <= begin <= end <= len(data) else (0, 0)
    except (KeyError, TypeError, ValueError):
        return 0, 0


def _retyped_tensor(header: dict[str, Any], data: bytes, chance: Random) -> bytes:
    entry = header.get(chance.choice(_names(header)), {})
    entry["dtype"] = chance.choice(
        ("F64", "F32", "F16", "BF16", "I32", "I64", "BOOL", "F8_E4M3", "U8", "X", "", None, 3)
    )
    return data


def _reshaped_tensor(header: dict[str, Any], data: bytes, chance: Random) -> bytes:
    entry = header.get(chance.choice(_names(header)), {})
    shape = list(entry.get("shape") or [1])
    shapes = (shape[::-1], [*shape, 1], shape[:-1], [], [0], [-1], [2**62, 4], [10**30], [0.5], ["x"], None, [1] * 70)
    entry["shape"] = chance.choice(shapes)
    return data


def _moved_tensor(header: dict[str, Any], data: bytes, chance: Random) -> bytes:
    entry = header.get(chance.choice(_names(header)), {})
    begin, end = chance.choice((0, 8, -1, len(data), 2**63, 10**30)), chance.choice((0, 4, len(data), 2**40, "x", None))
    entry["data_offsets"] = chance.choice(([begin, end], [end, begin], [begin], None))
    return data


def _renamed_tensor(header: dict[str, Any], data: bytes, chance: Random) -> bytes:
    name, other = chance.choice(_names(header)), chance.choice(_names(header))
    if chance.random() < 0.5 and name != other:
        header[name], header[other] = header[other], header[name]
    elif name in header:
        header[chance.choice((*WORDS, f"{name}x", f"1.{name}", "__metadata__", other))] = header.pop(name)
    return data


def _removed_tensor(header: dict[str, Any], data: bytes, chance: Random) -> bytes:
    """With its bytes, so that the rest is still a whole file."""
    name = chance.choice(_names(header))
    if name not in header:
        return data
    begin, end = _span(header.pop(name), data)
    for entry in header.values():
        first, last = _span(entry, data)
        if last > first >= end:
            entry["data_offsets"] = [first - (end - begin), last - (end - begin)]
    return data[:begin] + data[end:]


def _added_tensor(header: dict[str, Any], data: bytes, chance: Random) -> bytes:
    name = chance.choice((*WORDS, "1.c_fc.weight", "9.c_proj.bias", "x.y"))
    filling = chance.choice((b"\0\0\0\0", struct.pack("<f", float("nan")), struct.pack("<f", float("inf"))))
    header[name] = {"dtype": "F32", "shape": [1], "data_offsets": [len(data), len(data) + 4]}
    return data + filling


def _other_numbers(header: dict[str, Any], data: bytes, chance: Random) -> bytes:
    """A tensor's bytes all alike: zeros, ones, NaN, huge."""
    entry = header.get(chance.choice(_names(header)), {})
    begin, end = _span(entry, data)
    value = struct.pack("<f", chance.choice((0.0, 1.0, float("nan"), float("inf"), -3e38, 1e-40)))
    return data[:begin] + (value * ((end - begin) // 4 + 1))[: end - begin] + data[end:]


_HEADER: tuple[Callable[[dict[str, Any], bytes, Random], bytes], ...] = (
    _retyped_tensor, _reshaped_tensor, _moved_tensor, _renamed_tensor, _removed_tensor, _added_tensor, _other_numbers,
)  # fmt: skip

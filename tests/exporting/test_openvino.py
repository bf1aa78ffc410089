"""The OpenVINO code of docs/serving.md, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from exporting.slimmed import EVERY_KIND, slimmed

from ffncompress.exporting.onnx_folder import export_onnx
from ffncompress.type_aliases import Tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"


@pytest.mark.slow
def test_the_pages_code_gives_what_transformers_does(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openvino", reason="openvino is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    model = slimmed("llama", EVERY_KIND)
    export_onnx(model, tokenizer, tmp_path / "slim-onnx", verify=False)
    [code] = [
        block for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S) if "openvino" in block
    ]
    monkeypatch.chdir(tmp_path)
    page: dict = {}
    exec(code, page)
    ids = torch.randint(3, 3000, (1, 12))
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
    at_once, _ = page["read"](ids.numpy(), page["empty"])
    cache, found = page["empty"], []
    for place in range(ids.shape[1]):
        logits, cache = page["read"](ids[:, place : place + 1].numpy(), cache)
        found.append(torch.from_numpy(logits.copy()))
    assert (torch.from_numpy(at_once.copy()) - expected).abs().max() < 1e-4
    assert (torch.cat(found, dim=1) - expected).abs().max() < 1e-4

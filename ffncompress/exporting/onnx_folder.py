"""A folder for ONNX Runtime: one graph with a KV cache, of any batch, any length, and any cache, an empty one too.

    FOLDER/model.onnx       input_ids, attention_mask, position_ids, past_key_values.N.key/value
                            -> logits, present.N.key/value
    FOLDER/config.json, tokenizer files

With an empty cache it reads a prompt, with what it gave back it goes on from there.
"""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ffncompress.errors import ArtifactError, ModelError
from ffncompress.exporting.native import stock_config, widths_of
from ffncompress.exporting.page import PAGE
from ffncompress.exporting.record import ExportResult, Verification
from ffncompress.models import count_parameters
from ffncompress.storage.outputs import staged_directory
from ffncompress.type_aliases import Config, Model, Tokenizer

FILE = "model.onnx"
LIMIT = 1e-4  # largest difference of a logit
ONE_FILE = 1_900_000_000  # bytes: protobuf takes no more than 2 GiB
_READ, _CONTINUED = 24, 8  # tokens that are read at once, and one by one, for the comparison
Cache = list[tuple[Tensor, Tensor]]  # keys and values of each layer


class _WithCache(nn.Module):
    """A causal model as a function of tensors alone."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: Cache
    ) -> tuple[Tensor, Cache]:
        """The logits, and the cache with these tokens in it."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for index, (keys, values) in enumerate(past):
            cache.update(keys, values, index)
        out = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, past_key_values=cache,
            use_cache=True,
        )  # fmt: skip
        return out.logits, [(layer.keys, layer.values) for layer in out.past_key_values.layers]


class OnnxModel:
    """An exported folder, run by ONNX Runtime."""

    def __init__(self, folder: str | Path, config: Config, *, threads: int = 0) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        file = str(Path(folder) / FILE)
        self._session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        self._config = config

    def empty_cache(self, batch: int = 1) -> Cache:
        """What a text begins with."""
        return _cache(self._config, batch, 0)

    def __call__(self, ids: Tensor, past: Cache) -> tuple[Tensor, Cache]:
        """Logits of tokens that follow a cache, and the cache after them."""
        batch, length = ids.shape
        before = past[0][0].shape[2]
        inputs = {
            "input_ids": ids.numpy(),
            "attention_mask": torch.ones(batch, before + length, dtype=torch.int64).numpy(),
            "position_ids": torch.arange(before, before + length).expand(batch, length).numpy(),
        }
        for index, (keys, values) in enumerate(past):
            inputs |= {f"past_key_values.{index}.key": keys.numpy(), f"past_key_values.{index}.value": values.numpy()}
        logits, *present = (torch.from_numpy(value) for value in self._session.run(None, inputs))
        return logits, list(zip(present[::2], present[1::2], strict=True))


def export_onnx(
    model: Model, tokenizer: Tokenizer, output: str | Path, *, dtype: str | None = None, verify: bool = True,
    overwrite: bool = False, source: Path | None = None,
) -> ExportResult:  # fmt: skip
    """Write a folder for ONNX Runtime; where that is installed, run it and compare logits before it is put in place.

    Raises:
        ModelError: it cannot be traced, or a package is missing.
        ArtifactError: the output may not be written, or the logits differ.
    """
    if dtype not in (None, "f32"):
        raise ModelError(f"{dtype}: ONNX is written as f32; quantise it afterwards with onnxruntime's own tools")
    if find_spec("onnxscript") is None:
        raise ModelError("writing ONNX needs the onnx and onnxscript packages: pip install 'ffncompress[onnx]'")
    with staged_directory(output, "export", overwrite=overwrite, inputs=[source]) as folder:
        _write(model, folder)
        stock_config(model.config, max(widths_of(model), default=0)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        verified = _verified(model, tokenizer, folder) if verify else Verification(runtime="none", note="not asked for")
        size = sum(file.stat().st_size for file in folder.glob(f"{FILE}*"))
    return ExportResult(
        format="onnx", output=str(output), architecture=str(model.config.model_type), dtype="f32", bytes=size,
        parameters=count_parameters(model), base_parameters=count_parameters(model), widths=widths_of(model),
        verified=verified,
    )  # fmt: skip


def _cache(config: Config, batch: int, length: int) -> Cache:
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (batch, heads, length, size)
    return [(torch.zeros(shape), torch.zeros(shape)) for _ in range(config.num_hidden_layers)]


def _write(model: Model, folder: Path) -> None:
    """Trace the model on a few tokens after a few others, with every length left open."""
    batch, length, before = 2, 3, 5  # all different, and none 0 or 1, which the tracer would take for constants
    ids = torch.zeros(batch, length, dtype=torch.int64)
    mask = torch.ones(batch, before + length, dtype=torch.int64)
    positions = torch.arange(before, before + length).expand(batch, length).contiguous()
    past = _cache(model.config, batch, before)
    open_: Any = torch.export.Dim.DYNAMIC
    either = {0: open_, 1: open_}
    shapes = (either, either, either, [({0: open_, 2: open_}, {0: open_, 2: open_}) for _ in past])
    kinds = [f"{index}.{kind}" for index in range(len(past)) for kind in ("key", "value")]
    try:
        with torch.no_grad(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            program = torch.onnx.export(
                _WithCache(model).eval(), (ids, mask, positions, past),
                input_names=["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{k}" for k in kinds)],
                output_names=["logits", *(f"present.{k}" for k in kinds)],
                dynamic_shapes=shapes, dynamo=True, verbose=False,
            )  # fmt: skip
    except Exception as error:  # torch's exporter has its own, and those of each library that it traces through
        from ffncompress.sanitize import in_short

        raise ModelError(
            f"{model.config.model_type}: torch cannot trace it ({in_short(error)}); export it to gguf or hf"
        ) from error
    assert program is not None
    program.save(str(folder / FILE), external_data=4 * count_parameters(model) > ONE_FILE)


@torch.inference_mode()
def _verified(model: Model, tokenizer: Tokenizer, folder: Path) -> Verification:
    """Read a text at once, then go on token by token: logits must be those of transformers.

    Raises:
        ArtifactError: they are not.
    """
    if find_spec("onnxruntime") is None:
        missing = "onnxruntime is not installed here; it is with: pip install 'ffncompress[onnx]'"
        return Verification(runtime="none", note=missing)
    import onnxruntime

    ids = torch.tensor([tokenizer(PAGE, verbose=False).input_ids[: _READ + _CONTINUED]])
    expected = model(input_ids=ids, use_cache=False).logits
    runner = OnnxModel(folder, model.config)
    logits, cache = runner(ids[:, :_READ], runner.empty_cache())
    found = [logits]
    for place in range(_READ, ids.shape[1]):
        logits, cache = runner(ids[:, place : place + 1], cache)
        found.append(logits)
    worst = float((torch.cat(found, dim=1) - expected).abs().max())
    if not worst < LIMIT:
        raise ArtifactError(
            f"ONNX Runtime's logits differ from transformers' by up to {worst:.1e}, more than {LIMIT:g}; "
            "nothing was kept; please report this"
        )
    return Verification(
        runtime=f"onnxruntime {onnxruntime.__version__}", tokens=ids.shape[1], max_difference=worst, of="logits",
        limit=LIMIT, note=f"{_READ} tokens read at once, {_CONTINUED} one by one",
    )  # fmt: skip

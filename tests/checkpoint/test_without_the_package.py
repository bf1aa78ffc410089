"""A slimmed checkpoint where the package is missing: its own loader, or a stop that names both ways out.

Here an import blocker stands for the missing package; `.ci/versions` does the same in environments that lack it.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import TINY
from fresh_process import LOAD, run_python

from ffncompress import api, load, modeling_ffncompress
from ffncompress.storage.manifest import Manifest

IDS = torch.arange(5, 25)[None]
FLAGGED = LOAD.replace("from_pretrained({folder!r})", "from_pretrained({folder!r}, trust_remote_code=True)")
MISSING = """
import sys
assert "ffncompress" not in sys.modules
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ffncompress":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocker())
"""


def run_without_package(code: str, **environment: str):
    return run_python(MISSING + code, TORCH_DEVICE_BACKEND_AUTOLOAD="0", **environment)


def answer_of(folder: Path) -> float:
    with torch.inference_mode():
        return load(folder)(IDS).logits.double().sum().item()


def test_the_file_stands_by_itself(demo_slim: Path) -> None:
    """It imports torch and transformers alone, and is the one that the package itself runs."""
    text = (demo_slim / "modeling_ffncompress.py").read_text()
    assert text == Path(modeling_ffncompress.__file__).read_text()
    found = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).partition(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert found - set(sys.stdlib_module_names) == {"torch", "transformers", "safetensors"}
    assert "modeling_ffncompress.py" in Manifest.read(demo_slim).files
    for reference in json.loads((demo_slim / "config.json").read_text())["auto_map"].values():
        assert hasattr(modeling_ffncompress, reference.partition(".")[2])


@pytest.mark.slow
def test_every_family_loads_with_the_flag(mixed_folder, tmp_path: Path) -> None:
    """And so does what was saved again there; the classes are transformers' own."""
    code = "from transformers import AutoModel, AutoTokenizer, pipeline\n"
    for family in TINY:
        code += FLAGGED.format(folder=str(mixed_folder(family)))
        again = tmp_path / family
        code += (
            f"print(type(model).__module__.startswith('transformers.models.'))\nmodel.save_pretrained({str(again)!r})\n"
        )
        code += FLAGGED.format(folder=str(again))
    folder = str(mixed_folder("llama"))
    code += f"print(AutoModel.from_pretrained({folder!r}, trust_remote_code=True).__class__.__name__)\n"
    code += f"print(pipeline('text-generation', {folder!r}, trust_remote_code=True)('Return', max_new_tokens=2))\n"
    done = run_without_package(code)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")
    sums = [float(line.split()[1]) for line in lines if line.startswith("SUM")]
    for at, family in enumerate(TINY):
        assert sums[2 * at : 2 * at + 2] == pytest.approx([answer_of(mixed_folder(family))] * 2, rel=1e-5)
    assert lines.count("True") == len(TINY)
    assert "LlamaModel" in lines
    assert "generated_text" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_without_the_flag_both_ways_out_are_named(family: str, mixed_folder) -> None:
    done = run_without_package(LOAD.format(folder=str(mixed_folder(family))))
    assert done.returncode != 0
    assert "SUM" not in done.stdout
    last = done.stderr.splitlines()[-1]
    assert "pip install ffncompress" in last
    assert "trust_remote_code=True" in last


@pytest.mark.slow
def test_with_the_package_the_file_is_never_run(demo_slim: Path, tmp_path: Path) -> None:
    """No prompt, and no look at it: it may say anything."""
    import shutil

    folder = Path(shutil.copytree(demo_slim, tmp_path / "slim"))
    (folder / "modeling_ffncompress.py").write_text("raise SystemExit('the file was run')\n")
    done = run_python("import builtins\nbuiltins.input = None\n" + LOAD.format(folder=str(folder)))
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split("SUM")[1]) == pytest.approx(answer_of(demo_slim), rel=1e-6)
    assert torch.equal(load(folder)(IDS).logits, load(demo_slim)(IDS).logits)
    with pytest.raises(api.FfncompressError, match=r"modeling_ffncompress.py has another"):
        api.verify(folder)


@pytest.mark.slow
@pytest.mark.parametrize("package", [True, False])
def test_lm_eval_as_a_program(package: bool, mixed_folder, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    folder = mixed_folder("llama")
    (tmp_path / "text.jsonl").write_text(json.dumps({"page": "The function returns a list of all names."}) + "\n")
    (tmp_path / "own.yaml").write_text(
        "task: own\ndataset_path: json\noutput_type: loglikelihood_rolling\ntest_split: test\n"
        f"dataset_kwargs:\n  data_files:\n    test: {tmp_path / 'text.jsonl'}\n"
        'doc_to_text: ""\ndoc_to_target: "{{page}}"\n'
        "metric_list:\n  - metric: word_perplexity\n    aggregation: weighted_perplexity\n    higher_is_better: false\n"
    )
    words = f"pretrained={folder}" + ("" if package else ",trust_remote_code=True")
    arguments = ["lm_eval", "--model", "hf", "--model_args", words, "--tasks", "own", "--include_path", str(tmp_path)]
    arguments += ["--device", "cpu", "--output_path", str(tmp_path / "out")]
    code = f"import runpy, sys\nsys.argv = {arguments!r}\nrunpy.run_module('lm_eval', run_name='__main__')\n"
    environment = {"HF_DATASETS_CACHE": str(tmp_path / "datasets")}
    done = run_python(code, **environment) if package else run_without_package(code, **environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "word_perplexity" in done.stdout

"""Run where ffncompress is not installed: a slimmed checkpoint must stop without the flag, and load with it."""

import json
import sys
from importlib.util import find_spec

import torch
import transformers
from transformers import AutoModelForCausalLM, pipeline

folder, origin = sys.argv[1:]
assert find_spec("ffncompress") is None, "the package is here"
try:
    AutoModelForCausalLM.from_pretrained(folder)
except Exception as error:
    if "pip install ffncompress" not in str(error) or "trust_remote_code=True" not in str(error):
        raise
else:
    raise SystemExit("it loaded without the package and without the flag")
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
with open(origin, encoding="utf-8") as file:
    recorded = json.load(file)
assert sum(p.numel() for p in model.parameters()) == recorded["parameters_after"]
with torch.inference_mode():
    logits = model(torch.arange(5, 25)[None]).logits
    model.save_pretrained(f"{folder}-saved")
    again = AutoModelForCausalLM.from_pretrained(f"{folder}-saved", trust_remote_code=True)
    assert torch.equal(again(torch.arange(5, 25)[None]).logits, logits)
text = pipeline("text-generation", folder, trust_remote_code=True)("Return the", max_new_tokens=4, do_sample=False)
print(f"without the package, transformers {transformers.__version__}: {text[0]['generated_text']!r}")

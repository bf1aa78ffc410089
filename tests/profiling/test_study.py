"""The study: planted answers are found, a killed run goes on, and the page works in a real browser."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from browser import in_a_browser, opened
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from ffncompress import api
from ffncompress.cli import run
from ffncompress.errors import FfncompressError
from ffncompress.models import find_blocks, find_model, load_model, load_random
from ffncompress.profiling import pitfall
from ffncompress.profiling import session as session_module
from ffncompress.profiling.agreement import agreements, distance, learned
from ffncompress.profiling.crossfeed import matching, verdict
from ffncompress.profiling.measure import Linear
from ffncompress.profiling.page import render
from ffncompress.profiling.probing import captured
from ffncompress.profiling.records import Study
from ffncompress.recovery import LinearFit, Moments, fit_linear
from ffncompress.recovery.bilinear import fit_bilinear
from ffncompress.runtime.run import Run
from ffncompress.runtime.workers import Workers

pytestmark = pytest.mark.slow

SMALL = {"tokens": 2048, "seq_len": 64, "data": ["stories"]}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    """An ordinary checkpoint, its FFNs down(gate(x) * up(x)): exactly linear, bilinear of rank 4, an outlier."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=3072, max_position_embeddings=256, hidden_act="linear", mlp_bias=True, initializer_range=0.2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    linear, bilinear, outlier = (layer.mlp for layer in model.model.layers)
    with torch.no_grad():
        linear.gate_proj.weight.zero_()
        linear.gate_proj.bias.fill_(1.0)
        bilinear.down_proj.weight[:, 4:] = 0
        outlier.gate_proj.weight[0].zero_()
        outlier.gate_proj.bias[0] = 1.0
        outlier.down_proj.weight *= 0.1
        outlier.down_proj.weight[:, 0] = 0
        outlier.down_proj.weight[5, 0] = 50.0
    folder = tmp_path_factory.mktemp("planted") / "planted"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def study(planted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything at once, through the command line."""
    folder = tmp_path_factory.mktemp("study") / "report"
    pages = tmp_path_factory.mktemp("texts") / "numbers.txt"
    pages.write_text(
        "".join(f"{i} is {'even' if i % 2 == 0 else 'odd'}, and {i} + 1 is {i + 1}.\n" for i in range(6000))
    )
    texts = ["--data", "stories", "--data", str(pages), "--tokens", "8192"]
    wishes = ["--probe", "--pitfall", "0", "--against-random", "--cross-feed"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pitfall, "STEPS", 200)
        assert run(["profile", str(planted), "-o", str(folder), *texts, *wishes]) == 0
    return folder


def test_planted_regimes_are_found(study: Path) -> None:
    linear, bilinear, outlier = Study.load(study).trained[0].blocks
    assert [b.regime for b in (linear, bilinear, outlier)] == ["broadly linear", "nonlinear", "outlier-dominated"]
    assert linear.scores.r2_lin == pytest.approx(1, abs=1e-6)
    assert linear.scores.r2_median_feature == pytest.approx(1, abs=1e-6)
    assert bilinear.scores.r2_lin < 0.4
    assert bilinear.scores.effective_rank_output <= 4.01  # four neurons write
    assert outlier.scores.r2_lin > 0.99
    assert outlier.scores.r2_median_feature < 0.5
    assert outlier.scores.effective_rank_output == pytest.approx(1, abs=0.1)
    assert "effective rank" in outlier.rule
    assert "below 0.7" in bilinear.rule


def test_the_probe_finds_what_is_bilinear_and_nothing_else(study: Path) -> None:
    profile = Study.load(study).trained[0]
    linear, bilinear, _ = (block.probe for block in profile.blocks)
    assert bilinear.r2_lin + bilinear.gain == pytest.approx(1, abs=0.02)
    assert abs(linear.gain) < 1e-5
    assert bilinear.gain_error < 0.1
    assert profile.probe.largest_gain == max(block.probe.gain for block in profile.blocks)


def test_r2_is_sklearns(planted: Path, study: Path, tokenizer) -> None:
    """Captured rows, an ordinary regression, and the same number as the moments gave."""
    from ffncompress.settings import PlanSettings
    from ffncompress.text.corpus import gather_text

    source = find_model(str(planted))
    model = load_model(source)
    reading = Study.load(study).trained[0].held_out_text.reading
    corpus = gather_text(PlanSettings(tokens=8192), "stories", tokenizer, 128, lambda _: reading)
    rows = []
    for windows in (corpus.fit, corpus.choose):
        ((_, [_, pair, _]),) = captured(model, find_blocks(model), windows, Run(Workers("cpu")))
        rows += [part.double().numpy() for part in pair]
    found = Study.load(study).trained[0].blocks[1].scores
    regression = make_pipeline(StandardScaler(), LinearRegression())
    predicted = regression.fit(rows[0], rows[1]).predict(rows[2])
    expected = r2_score(rows[3], predicted, multioutput="variance_weighted")
    assert found.r2_lin == pytest.approx(expected, abs=1e-6)
    assert found.r2_by_rank[-1] == pytest.approx(found.r2_lin, abs=1e-9)
    assert len(found.r2_by_rank) == 33


def test_everything_that_was_asked_for_is_there(study: Path) -> None:
    found = Study.load(study)
    assert [p.variant for p in found.profiles] == ["", "", "random"]
    assert [p.probe is not None for p in found.profiles] == [True, False, False]  # on the first text
    assert len(found.agreements) == 1
    assert len(found.cross_feeds) == 2
    assert len(found.learned) == 1
    assert {t.optimiser for t in found.pitfalls[0].trained} == {"SGD", "Adam"}
    drawn = {file.name for file in (study / "figures").iterdir()}
    for name in ("profile", "regimes", "ranks", "texts", "probe", "pitfall", "training", "cross-feed"):
        assert {f"{name}.png", f"{name}.svg"} <= drawn
    assert not list((study / "stages").glob("*.safetensors"))
    assert not study.with_name("report.partial").exists()
    times = {t.name.split(": ")[-1]: t.ratio for t in found.stages}
    assert times["one forward pass"] == 1
    assert times["scores"] > 0


def test_tables_carry_what_their_numbers_are_of(study: Path) -> None:
    import pyarrow.parquet

    found = Study.load(study)
    with (study / "profile.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == sum(len(p.blocks) for p in found.profiles) == 9
    assert all(row["text"] and row["fit_tokens"] and row["context"] and row["seed"] for row in rows)
    assert float(rows[-1]["r2_lin"]) == found.profiles[-1].blocks[-1].scores.r2_lin
    assert pyarrow.parquet.read_table(study / "profile.parquet").num_rows == 9


def test_what_is_printed_fits_and_show_prints_it_again(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", str(study)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert "outlier-dominated" in out
    assert "…" not in out
    assert run(["show", str(study), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["schema_version"] == 1


def test_a_killed_run_goes_on(
    short_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def killed(*_args: object, **_kwargs: object) -> None:
        raise KeyboardInterrupt

    def repeated(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("a finished stage was run again")

    folder, model = tmp_path / "report", str(short_demo)
    with monkeypatch.context() as patch:
        patch.setattr(session_module, "swap_linear", killed)
        words = ["--tokens", "2048", "--seq-len", "64", "--data", "stories"]  # as in SMALL
        assert run(["profile", model, "-o", str(folder), *words]) == 130
        assert "run it again to go on" in capsys.readouterr().err
    assert not folder.exists()
    monkeypatch.setattr(session_module, "measure_blocks", repeated)
    first = api.profile(model, folder, **SMALL)
    assert first.profiles[0].blocks[0].swap is not None
    assert not (tmp_path / "report.partial").exists()
    monkeypatch.setattr(session_module, "swap_linear", repeated)
    with pytest.raises(AssertionError):  # other text, other stages
        api.profile(model, folder, **{**SMALL, "tokens": 4096}, overwrite=True)
    again = api.profile(model, folder, **SMALL, overwrite=True)
    assert again.profiles == first.profiles


def test_two_runs_agree_and_random_twins_follow_their_seed(demo_source) -> None:
    one, two, other = (load_random(demo_source, seed=seed).state_dict() for seed in (1, 1, 2))
    name = "transformer.h.0.mlp.c_fc.weight"
    assert torch.equal(one[name], two[name])
    assert not torch.equal(one[name], other[name])


def test_revisions_are_folders_too(tiny_folder, tmp_path: Path) -> None:
    step = tmp_path / "step1000"
    shutil.copytree(tiny_folder("gpt2"), step)
    found = api.profile(str(tiny_folder("gpt2")), tmp_path / "report", revisions=[str(step)], swaps=False, **SMALL)
    assert [p.variant for p in found.profiles] == ["step1000", ""]
    assert found.profiles[0].r2 == found.profiles[1].r2  # the same weights
    assert (tmp_path / "report" / "figures" / "training.png").is_file()


@pytest.mark.parametrize("family", ["gpt_neox", "gemma", "qwen2"])
def test_every_family_is_profiled(family: str, tiny_folder, tmp_path: Path) -> None:
    found = api.profile(str(tiny_folder(family)), tmp_path / "report", **SMALL)
    assert all(0 <= block.scores.r2_lin <= 1 and block.swap for block in found.profiles[0].blocks)


def by_moments(x: torch.Tensor, y: torch.Tensor) -> LinearFit:
    return fit_linear(
        Moments.of(x[:2000].double(), y[:2000].double()), Moments.of(x[2000:].double(), y[2000:].double())
    )


def test_a_bilinear_layer_is_found_behind_ill_conditioned_inputs() -> None:
    torch.manual_seed(0)
    x = torch.randn(3000, 16) @ torch.diag(torch.logspace(0, -3, 16)) + 0.3
    white = (x - x.mean(0)) / x.std(0)
    y = (white @ torch.randn(16, 4) + 1) * (white @ torch.randn(16, 4)) @ torch.randn(4, 8)
    parts = (x[:2000], y[:2000], x[2000:2500], y[2000:2500])
    probe = fit_bilinear(by_moments(x, y), *parts, seed=0)
    left = (y[2500:] - probe(x[2500:])).square().sum() / (y[2500:] - y[2500:].mean(0)).square().sum()
    assert left < 0.01
    assert torch.equal(probe.out, fit_bilinear(by_moments(x, y), *parts, seed=0).out)


def test_a_probe_of_noise_stays_at_the_linear_map() -> None:
    torch.manual_seed(0)
    x = torch.randn(3000, 16)
    y = x @ torch.randn(16, 8) + torch.randn(3000, 8)
    fit = by_moments(x, y)
    probe = fit_bilinear(fit, x[:200], y[:200], x[2000:2500], y[2000:2500], seed=0)
    linear = (y[2500:] - x[2500:] @ fit.weight.float() - fit.bias.float()).square().sum()
    assert (y[2500:] - probe(x[2500:])).square().sum().item() == pytest.approx(linear.item(), rel=0.01)


def test_gradient_descent_misses_what_the_closed_form_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On white inputs both optimisers arrive; on ill-conditioned ones SGD is far behind after as many steps."""
    monkeypatch.setattr(pitfall, "STEPS", 500)
    torch.manual_seed(0)
    white, weight = torch.randn(3000, 16), torch.randn(16, 8)
    scales = torch.logspace(0, -2, 16)
    for x, map_, arrives in ((white, weight, True), (white * scales, weight / scales[:, None], False)):
        y = x @ map_
        sgd, _ = pitfall.train_layers(x[:2500], y[:2500], x[2500:], y[2500:], seed=0)
        assert (sgd.r2[-1] > 0.99) == arrives


def test_matched_inputs_have_the_targets_covariance() -> None:
    torch.manual_seed(0)
    x, other = torch.randn(500, 6).double() @ torch.randn(6, 6).double(), torch.randn(500, 6).double() + 1
    one, two = (Linear(None, rows.mean(0), rows.T.cov(correction=0)) for rows in (x, other))  # type: ignore[arg-type]
    moved = two.mean + (x - one.mean) @ matching(one, two).T
    torch.testing.assert_close(moved.mean(0), two.mean)
    torch.testing.assert_close(moved.T.cov(correction=0), two.covariance)


def test_a_model_fed_its_own_activations_keeps_its_profile(tiny_folder, tmp_path: Path) -> None:
    twin = tmp_path / "twin"
    shutil.copytree(tiny_folder("llama"), twin)
    found = api.profile([str(tiny_folder("llama")), str(twin)], tmp_path / "r", cross_feed=True, swaps=False, **SMALL)
    for block in found.cross_feeds[0].blocks:
        assert block.raw == pytest.approx(block.own, abs=1e-9)
        assert block.matched == pytest.approx(block.own, abs=1e-4)


def test_whose_profile_a_cross_fed_one_is() -> None:
    own, giver, neither = [0.9, 0.8], [0.3, 0.2], [0.1, 0.9]
    assert "the map decides" in verdict(own, [0.85, 0.8], own, giver)
    assert "the inputs decide" in verdict(own, [0.35, 0.2], own, giver)
    assert "raw activations it is near neither" in verdict(own, neither, own, giver)


def test_verdicts(study: Path) -> None:
    found = Study.load(study)
    one = found.trained[0]
    same = one.model_copy(update={"text": "other.txt"})
    scores = [b.scores.model_copy(update={"r2_lin": 1 - b.scores.r2_lin}) for b in one.blocks]
    blocks = [b.model_copy(update={"scores": s}) for b, s in zip(one.blocks, scores, strict=True)]
    turned = one.model_copy(update={"text": "t.txt", "blocks": blocks})
    assert distance(one, same) == 0
    assert agreements([one, same])[0].own
    assert "the model's own" in agreements([one, same])[0].verdict
    assert not agreements([one, turned])[0].own
    assert "freshly initialised" in learned(found.profiles)[0]


def test_wishes_that_do_not_go_together(tiny_folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo, tiny = "demo", str(tiny_folder("llama"))
    output = ["-o", str(tmp_path / "r"), "--tokens", "2048", "--seq-len", "64", "--data", "stories"]
    for words, told in (
        ([demo, tiny, "--cross-feed"], "one width"),
        ([demo, "--cross-feed"], "needs two models"),
        ([demo, tiny, "--revisions", "step1"], "of one model"),
        ([demo, "--pitfall", "first"], "pitfall"),
        ([demo, "--pitfall", "99", "--no-swaps"], "blocks are 0 to 6"),
        ([demo, demo], "two models are called demo"),
        ([demo, "--seq-len", "512"], "lower --seq-len"),
        ([demo, "--tokens", "320"], "too few"),
    ):
        assert run(["profile", *output, *words]) == 2
        assert told in capsys.readouterr().err
        assert not (tmp_path / "r").exists()
    with pytest.raises(FfncompressError, match="already exists"):
        api.profile(demo, tmp_path)


def test_the_page_asks_nothing_of_a_network(planted: Path, study: Path) -> None:
    page = (study / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"""(src|href|url)\s*[=(]\s*["']?(https?:)?//""", page)
    assert "@import" not in page
    assert str(planted.parent) not in page  # nor does it tell anybody's folders
    nasty = Study.load(study)
    profile = nasty.profiles[0].model_copy(update={"model": "</script><script>alert(1)</script>"})
    assert "<script>alert" not in render(nasty.model_copy(update={"profiles": [profile, *nasty.profiles[1:]]}))


@in_a_browser
def test_the_page_in_a_browser(study: Path, tmp_path: Path) -> None:
    """It draws, it sorts, lines can be hidden, another profile can be chosen, and nothing is logged as an error."""
    script = """
      const firsts = () => [...document.querySelectorAll("#blocks tbody tr td:first-child")];
      const cells = () => firsts().map((cell) => cell.textContent).join("");
      const heading = [...document.querySelectorAll("#blocks th button")].find((b) => b.textContent === "R2_lin");
      heading.click();
      seen.push("sorted: " + cells());
      heading.click();
      seen.push("turned: " + cells());
      const lines = () => document.querySelectorAll("#profile svg path").length;
      const before = lines();
      document.querySelector("#profile .legend button").click();
      seen.push("hidden: " + (before - lines()));
      const over = new PointerEvent("pointermove", { clientX: 50, clientY: 50 });
      document.querySelector("#profile circle").dispatchEvent(over);
      seen.push("tip: " + document.getElementById("tip").textContent.split("\\n")[1]);
      const picker = document.querySelector("#blocks select");
      picker.value = "2";
      picker.dispatchEvent(new Event("change"));
      seen.push("columns: " + document.querySelectorAll("#blocks th").length);
      """
    page = shutil.copy(study / "report.html", tmp_path / "report.html")  # the study's own folder stays as it is
    dump, seen = opened(Path(page), tmp_path, script)
    assert "error" not in seen
    order = sorted(range(3), key=lambda i: Study.load(study).trained[0].blocks[i].scores.r2_lin)
    assert f"sorted: {''.join(map(str, order))}" in seen
    assert f"turned: {''.join(map(str, order[::-1]))}" in seen
    assert "hidden: 1" in seen
    assert "tip: block 0: R2_lin" in seen
    assert "columns: 15" in seen  # a random twin has no swaps and no probe
    assert "wide: true" in seen  # on a phone, nothing but a table scrolls sideways
    sections = re.findall(r'<section id="([\w-]+)"', dump)
    assert sections == ["profile", "swaps", "blocks", "probe", "pitfall", "texts", "cross-feed", "times"]

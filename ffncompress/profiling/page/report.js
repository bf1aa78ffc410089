const study = data;
const REGIMES = { "broadly linear": 0, "outlier-dominated": 1, nonlinear: 7 };
const tone = (p) => colour(study.profiles.indexOf(p)); // a profile keeps its colour from plot to plot
const nameOf = (p) => base(p.model) + (p.variant ? ` (${p.variant})` : "");
const labelOf = (p) => `${nameOf(p)}, ${base(p.text)}`;
const provenanceOf = (p) =>
  `${base(p.text)}, ${p.fit_tokens.toLocaleString("en")} fit + ${p.held_out_tokens.toLocaleString("en")} held-out tokens, context ${p.context}, seed ${p.seed}`;

function badge(regime, rule) {
  const node = make("span", { class: "regime", style: `color:${colour(REGIMES[regime])}` }, regime);
  tell(node, rule);
  return node;
}

const trained = study.profiles.filter((p) => !p.variant);
const blockWords = (p, b) =>
  `${labelOf(p)}\nblock ${b.index}: R2_lin ${num(b.scores.r2_lin)} ±${num(1.96 * b.scores.r2_lin_error)} (95 %)\nmedian feature ${num(b.scores.r2_median_feature)}\n${b.regime}: ${b.rule}`;

document.getElementById("summary").append(make("ul", {}, ...trained.map((p) => {
  const r2 = p.blocks.map((b) => b.scores.r2_lin);
  const words = `${nameOf(p)}: R2_lin from ${num(Math.min(...r2))} to ${num(Math.max(...r2))} over ${r2.length} blocks `;
  return make("li", {}, words, make("span", { class: "provenance" }, provenanceOf(p)));
})));

(function profiles() {
  const host = section("R2_lin by block", "The share of a block's held-out output variance that the exact least-squares linear map of its input explains. Bars: 95 %, jackknife over sequences." + (trained.length === 1 ? " Hollow: the median output feature." : ""), "profile");
  const series = [];
  study.profiles.forEach((p) => {
    series.push({ name: labelOf(p), colour: tone(p), points: p.blocks.map((b) => ({ x: b.index, y: b.scores.r2_lin, error: 1.96 * b.scores.r2_lin_error, words: blockWords(p, b) })) });
    if (!p.variant && trained.length === 1) series.push({ name: "median feature", colour: tone(p), line: false, marker: "hollow", points: p.blocks.map((b) => ({ x: b.index, y: b.scores.r2_median_feature, words: blockWords(p, b) })) });
  });
  const lowest = Math.min(0, ...study.profiles.flatMap((p) => p.blocks.map((b) => b.scores.r2_lin)));
  plot(host, { series, x: { label: "block", whole: true }, y: { label: "R2, held out", min: Math.max(lowest, -0.5), max: 1 }, height: 300 });
  for (const words of study.learned) host.append(make("p", {}, `${words}.`));
})();

(function swaps() {
  const shown = trained.filter((p) => p.blocks.every((b) => b.swap));
  if (!shown.length) return;
  const host = section("What a swap costs", "Each FFN replaced by its linear map, alone in the model: the rise of perplexity in percent of the base's. Bars: one standard error. Linear below 1 %, logarithmic above.", "swaps");
  plot(host, {
    series: shown.map((p) => ({ name: labelOf(p), colour: tone(p), points: p.blocks.map((b) => ({
      x: b.index, y: (100 * b.swap.delta) / p.base_perplexity, error: (100 * b.swap.error) / p.base_perplexity,
      words: `${labelOf(p)}\nblock ${b.index}: ${num(b.swap.delta)} ±${num(b.swap.error)} on ${num(p.base_perplexity, 2)}\n${b.swap.tokens.toLocaleString("en")} tokens, R2_lin ${num(b.scores.r2_lin)}` })) })),
    x: { label: "block", whole: true }, y: { label: "delta-PPL, % of base", scale: "symlog" },
  });
})();

const measureOf = (p) => ({ masked: "pseudo-perplexity", embedding: "exp(1 - cosine)" })[p.task] || "perplexity";

(function chosen() {
  const host = section("Block by block", "Choose a profile; click a heading to sort; point at one to read what it is.", "blocks");
  const picker = make("select", { "aria-label": "profile" });
  study.profiles.forEach((p, i) => picker.append(make("option", { value: i }, labelOf(p))));
  picker.value = String(Math.max(0, study.profiles.findIndex((p) => !p.variant)));
  const place = make("div");
  host.append(picker, place);
  const score = (name, key, hint) => ({ name, hint, value: (b) => b.scores[key] });
  const draw = () => {
    const p = study.profiles[Number(picker.value)];
    place.replaceChildren(make("p", { class: "provenance" }, `${provenanceOf(p)}; ${p.family}, ${p.parameters.toLocaleString("en")} parameters, base ${measureOf(p)} ${num(p.base_perplexity, 2)}`));
    const count = (regime) => p.blocks.filter((b) => b.regime === regime).length;
    const cards = make("div", { class: "cards" });
    for (const regime of Object.keys(REGIMES)) cards.append(make("div", {}, make("b", {}, `${count(regime)} of ${p.blocks.length}`), make("span", {}, regime)));
    place.append(cards);
    const columns = [
      { name: "block", value: (b) => b.index, show: (b) => String(b.index), hint: "Depth, from 0" },
      { name: "R2_lin", value: (b) => b.scores.r2_lin, show: (b) => `${num(b.scores.r2_lin)} ±${num(1.96 * b.scores.r2_lin_error)}`, hint: "Pooled over features, held out; 95 % by the jackknife over sequences" },
      score("median", "r2_median_feature", "R2 of the median output feature"),
      { name: "5 to 95 %", value: (b) => b.scores.r2_quantiles["5%"], show: (b) => `${num(b.scores.r2_quantiles["5%"], 2)} to ${num(b.scores.r2_quantiles["95%"], 2)}`, hint: "R2 of the output features, quantiles" },
      { name: "regime", value: (b) => b.regime, show: (b) => badge(b.regime, b.rule), words: true, hint: "Point at one to read the rule that named it" },
      ...(p.blocks[0].swap ? [{ name: p.task && p.task !== "causal" ? "swap cost" : "swap dPPL", value: (b) => b.swap.delta, show: (b) => `${num(b.swap.delta, 2)} ±${num(b.swap.error, 2)}`, hint: "What is added to the base's figure by the linear map in the block's place, alone" }] : []),
      ...(p.blocks[0].probe ? [{ name: "probe gain", value: (b) => b.probe.gain, show: (b) => `${b.probe.gain.toFixed(3)} ±${(1.96 * b.probe.gain_error).toFixed(3)}`, hint: "R2 that a rank-16 bilinear layer adds" }] : []),
      score("rank in", "effective_rank_input", "Effective rank of the input: exp of the spectrum's entropy"),
      score("rank out", "effective_rank_output", "Effective rank of the output"),
      score("rank map", "effective_rank_map", "Effective rank of the fitted map's output"),
      score("part. in", "participation_input", "Participation ratio of the input's spectrum"),
      score("part. out", "participation_output", "Participation ratio of the output's spectrum"),
      score("cond", "condition_number", "Condition number of the input's covariance"),
      score("range", "dynamic_range", "Largest over smallest variance of an input feature"),
      score("of stream", "share_of_stream", "Energy of what the block adds, relative to the residual stream after it"),
      score("unrecovered", "unrecovered_share", "The part of that which no linear map recovers"),
      score("ridge", "ridge", "Ridge chosen on held-out rows"),
    ];
    sortable(place, columns, p.blocks);
    ranks(place, p);
    regimes(place, p);
  };
  picker.addEventListener("change", draw);
  draw();
})();

function ranks(host, p) {
  host.append(make("h2", {}, "R2 against rank"));
  const series = p.blocks.map((b) => ({
    name: String(b.index), colour: `hsl(${190 + (130 * b.index) / Math.max(1, p.blocks.length - 1)} 65% 50%)`, marker: false,
    words: `block ${b.index}: R2_lin ${num(b.scores.r2_lin)}; rank ${b.rank_for_99} gives 99 % of it`,
    points: b.curve.map(([rank, r2]) => ({ x: rank, y: r2 })),
  }));
  plot(host, { series, x: { label: "rank of the linear map", scale: "log" }, y: { label: "R2, held out", min: 0, max: 1 }, height: 280 });
}

function regimes(host, p) {
  host.append(make("h2", {}, "Regimes"), make("p", { class: "note" }, "Pooled R2_lin against the median feature's. The larger a point, the higher the effective rank of the block's output."));
  const series = Object.keys(REGIMES).map((regime) => ({
    name: regime, colour: colour(REGIMES[regime]), line: false,
    points: p.blocks.filter((b) => b.regime === regime).map((b) => ({ x: b.scores.r2_lin, y: b.scores.r2_median_feature, label: b.index, radius: 3 + 12 * Math.sqrt(b.scores.effective_rank_output / b.d_out), words: blockWords(p, b) })),
  }));
  plot(host, { series, x: { label: "R2_lin, pooled", min: 0, max: 1 }, y: { label: "median feature", min: 0, max: 1 }, height: 300 });
}

(function probes() {
  const shown = trained.filter((p) => p.probe);
  if (!shown.length) return;
  const host = section("The bilinear probe", "A layer of 16 products on top of the linear map: what it gains in R2 (95 %), against what the linear map left. Half of the held-out sequences stopped it, the other half measured it.", "probe");
  plot(host, {
    series: shown.map((p) => ({ name: labelOf(p), colour: tone(p), line: false, points: p.blocks.map((b) => ({ x: 1 - b.scores.r2_lin, y: b.probe.gain, error: 1.96 * b.probe.gain_error, label: b.index, words: `${labelOf(p)}\nblock ${b.index}: gain ${num(b.probe.gain)}, ${b.probe.steps} steps\n${b.probe.fit_tokens} fit, ${b.probe.stop_tokens} stop, ${b.probe.report_tokens} report tokens` })) })),
    x: { label: "1 - R2_lin" }, y: { label: "gain in R2" },
  });
  for (const p of shown) {
    const r = p.probe.correlation === null ? "" : `; Pearson r with 1 - R2_lin ${num(p.probe.correlation, 2)} (p = ${num(p.probe.p_value, 2)})`;
    host.append(make("p", {}, `${labelOf(p)}: median gain ${num(p.probe.median_gain)}, largest ${num(p.probe.largest_gain)}${r}.`));
  }
})();

(function pitfalls() {
  for (const found of study.pitfalls) {
    const host = section(`The pitfall: block ${found.block} of ${base(found.model)}`, `The same linear layer trained by gradient descent and solved. Condition number of its input ${num(found.condition_number)}, dynamic range ${num(found.dynamic_range)}. ${base(found.text)}, ${found.fit_rows.toLocaleString("en")} fit and ${found.held_out_rows.toLocaleString("en")} held-out rows, context ${found.context}, seed ${found.seed}.`, "pitfall");
    const last = Math.max(...found.trained.flatMap((t) => t.steps));
    plot(host, {
      series: [
        { name: `closed form ${num(found.closed_form)}`, colour: colour(0), marker: false, points: [{ x: 1, y: found.closed_form }, { x: last, y: found.closed_form }] },
        ...found.trained.map((t, i) => ({ name: `${t.optimiser}, rate ${t.rate.toExponential(1)}: ${num(t.r2[t.r2.length - 1])}`, colour: colour(i + 1), points: t.steps.map((s, j) => ({ x: s, y: t.r2[j], words: `${t.optimiser} after ${s} steps: ${num(t.r2[j])}` })) })),
      ],
      x: { label: "training steps", scale: "log" }, y: { label: "R2, held out", min: 0, max: 1 },
    });
  }
})();

(function texts() {
  const shown = study.agreements;
  if (!shown.length) return;
  const host = section("From text to text", "Rank correlation (Spearman) of R2_lin over blocks between texts, and the verdict.", "texts");
  for (const a of shown) {
    host.append(make("p", {}, `${base(a.model)}: ${a.verdict}.`));
    sortable(host, [
      { name: "text", value: (i) => a.texts[i], show: (i) => a.texts[i], words: true },
      ...a.texts.map((text, j) => ({ name: text, value: (i) => a.spearman[i][j], show: (i) => num(a.spearman[i][j], 2) })),
    ], a.texts.map((_, i) => i));
  }
})();

(function crossFed() {
  if (!study.cross_feeds.length) return;
  const host = section("The map or its inputs", "FFNs of one model on the activations of another: as they are, and with the mean and covariance of the inputs they know.", "cross-feed");
  for (const feed of study.cross_feeds) {
    host.append(make("h2", {}, `${feed.model} fed ${feed.giver}'s activations`), make("p", {}, `${feed.verdict}.`));
    const names = { own: "own inputs", raw: "raw", matched: "matched", giver: `${feed.giver}'s own FFN` };
    plot(host, {
      series: Object.entries(names).map(([key, name], i) => ({ name, colour: colour(i), dash: key === "giver" ? "3 3" : undefined, points: feed.blocks.map((b) => ({ x: b.block, y: b[key], words: `block ${b.block}, ${name}: ${num(b[key])}` })) })),
      x: { label: "block", whole: true }, y: { label: "R2_lin", max: 1 },
    });
  }
})();

(function times() {
  const host = section("What it took", "Each stage beside one bare forward pass over the same tokens, on the machine that ran it.", "times");
  sortable(host, [
    { name: "stage", value: (t) => t.name, show: (t) => t.name, words: true },
    { name: "seconds", value: (t) => t.seconds, show: (t) => num(t.seconds, 1) },
    { name: "forward passes", value: (t) => (t.forward_seconds ? t.seconds / t.forward_seconds : null), show: (t) => (t.forward_seconds ? num(t.seconds / t.forward_seconds, 2) : "") },
  ], study.stages);
})();

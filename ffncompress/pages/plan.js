const PARTS = {
  untouched: ["kept as it is", "var(--whole)"],
  neurons: ["kept neurons", "var(--c0)"],
  linear: ["linear map", "var(--c2)"],
};
const summary = document.getElementById("summary");
const percentOfBase = (v) => (v === null ? null : (100 * v) / data.base);

(function headline() {
  const f = data.final;
  if (data.doubt) summary.append(make("p", { class: "warning" }, `Not to be believed: ${data.doubt}.`));
  summary.append(make("p", {}, `${data.summary}.`));
  const cards = [
    [`${short(data.before)} → ${short(data.after)}`, `parameters: ${count(data.before)} to ${count(data.after)}`],
    [`${num((100 * data.after) / data.before, 1)} %`, "of the whole model is kept"],
  ];
  if (data.at_target) cards.push([count(data.at_target), `parameters as ${data.target}`]);
  if (f) {
    cards.push([`${num(f.base_perplexity, 2)} → ${num(f.perplexity, 2)}`, `${data.measure}, lower is better`]);
    cards.push([`${signed((100 * f.delta) / f.base_perplexity, 1)} % ±${num((100 * f.delta_error) / f.base_perplexity, 1)}`, `rise, measured on held-out text; ± one standard error`]);
  }
  if (data.limit) cards.push([data.limit, "rise that was allowed"]);
  summary.append(cardsOf(cards));
  if (data.reason) summary.append(make("p", {}, `ffncompress eval will hold it to ${data.tolerance}: ${data.reason}.`));
  if (data.warning) summary.append(make("p", { class: "warning" }, `${data.warning}.`));
  if (data.next.length) summary.append(make("p", {}, "Next, where this folder lies:"), commandOf(data.next));
})();

(function picture() {
  const host = section("What is kept of the model", "One row for each feed-forward block (FFN), from the first layer down to the last. The full width of a row is the block as it was; what is coloured stays, the rest goes.", "model");
  host.append(keyOf([...Object.values(PARTS), ["removed", "var(--gone)"]]));
  const largest = Math.max(...data.blocks.map((b) => b.parameters));
  const stack = make("div", { class: "stack" }, make("div", { class: "flow" }, "text in ↓"));
  for (const b of data.blocks) {
    const bar = make("div", { class: "bar", style: `width:${(100 * b.parameters) / largest}%` });
    for (const [part, [, fill]] of Object.entries(PARTS)) if (b[part]) bar.append(make("i", { style: `width:${(100 * b[part]) / b.parameters}%;background:${fill}` }));
    const kept = (100 * (b.untouched + b.neurons + b.linear)) / b.parameters;
    const words = b.kept_neurons ? b.becomes.replace(" neurons", ` of ${b.width} neurons`) : b.becomes;
    const row = make("div", { class: "row" }, make("b", {}, String(b.index)), make("div", { class: "track" }, bar), make("span", { class: "share" }, `${Math.round(kept)} %`), make("span", { class: "what" }, words));
    tell(row, `block ${b.index}, ${b.path}\n${b.reason}`);
    stack.append(row);
  }
  stack.append(make("div", { class: "flow" }, "next word out ↓"));
  host.append(stack);
  for (const [layer, why] of data.kept_layers) host.append(make("p", { class: "note" }, `Layer ${layer} is kept as it is: ${why}.`));
  host.append(make("h2", {}, "The whole of it"));
  const left = data.after - (data.before - data.ffns), rest = data.before - data.ffns;
  const whole = make("div", { class: "bar" });
  const pieces = [[rest, "attention, embeddings and all else", "var(--whole)"], [left, "FFNs that are left", "var(--c0)"], [data.before - data.after, "removed", "var(--gone)"]];
  for (const [size, words, fill] of pieces) {
    const piece = make("i", { style: `width:${(100 * size) / data.before}%;background:${fill}` });
    tell(piece, `${words}: ${count(size)} parameters`);
    whole.append(piece);
  }
  host.append(make("div", { class: "stack" }, whole), keyOf(pieces.map(([size, words, fill]) => [`${words}: ${num((100 * size) / data.before, 1)} %`, fill])));
})();

(function frontier() {
  const points = data.frontier;
  if (!points.length) return;
  const knee = points.find((p) => p.knee), f = data.final, share = (p) => 100 * p.share;
  const host = section("Size against quality", `How much ${data.measure} rises as the model shrinks, before the replacements are fitted again. Filled: measured, everything replaced together. Hollow: expected, from the measured ones beside it.`, "frontier");
  const words = (p) => `${num(share(p), 1)} % of the parameters (${count(p.parameters)})\n${data.measure} ${num(p.measured_perplexity ?? p.expected_perplexity, 2)}, ${p.measured_perplexity === null ? "expected" : "measured"}`;
  const series = [
    { name: "expected", colour: colour(0), marker: "hollow", points: points.map((p) => ({ x: share(p), y: p.expected_perplexity, words: words(p) })) },
    { name: "measured", colour: colour(0), line: false, points: points.filter((p) => p.measured_perplexity !== null).map((p) => ({ x: share(p), y: p.measured_perplexity, words: words(p) })) },
  ];
  if (knee) series.push({ name: "where it bends", colour: colour(2), line: false, marker: "hollow", points: [{ x: share(knee), y: knee.expected_perplexity, radius: 9, label: "bend", words: `Where the curve bends\n${words(knee)}` }] });
  if (f) series.push({ name: "this plan", colour: colour(1), line: false, points: [{ x: 100 * f.share, y: f.perplexity, error: f.delta_error, radius: 6, label: "this plan", words: `This plan, ${f.refitted ? "fitted again" : "as fitted"}: ${num(f.perplexity, 2)} ±${num(f.delta_error, 2)}` }] });
  plot(host, { series, x: { label: "parameters kept, % of the whole model" }, y: { label: data.measure, scale: "log" }, height: 320 });
  host.append(make("p", {}, knee
    ? `The curve bends at ${num(share(knee), 1)} %: down to there parameters go cheaply, beyond it each costs much more. (The point farthest below the straight line between the ends, in log ${data.measure}.)`
    : "The curve has no clear bend: smaller costs steadily more."));
  sortable(host, [
    { name: "kept", value: (p) => p.share, show: (p) => `${num(share(p), 2)} %`, hint: "Share of the whole model's parameters" },
    { name: "parameters", value: (p) => p.parameters, show: (p) => count(p.parameters) },
    { name: "expected", value: (p) => p.expected_perplexity, show: (p) => num(p.expected_perplexity, 2), hint: `${data.measure}, expected` },
    { name: "measured", value: (p) => p.measured_perplexity, show: (p) => num(p.measured_perplexity, 2), hint: `${data.measure}, measured before the replacements are fitted again` },
    { name: "rise", value: (p) => p.expected_perplexity, show: (p) => `${signed(100 * (p.expected_perplexity / points[0].expected_perplexity - 1), 1)} %` },
    { name: "", value: (p) => Number(p.knee), show: (p) => (p.knee ? "bends here" : ""), words: true },
  ], points);
  const takeable = points.filter((p) => p.command.length);
  if (!takeable.length) return;
  const picker = make("select", { "aria-label": "point of the frontier" }), place = make("div");
  takeable.forEach((p, i) => picker.append(make("option", { value: i }, `${num(share(p), 2)} %${p.knee ? ", where it bends" : ""}`)));
  picker.value = String(Math.max(0, takeable.indexOf(knee)));
  const draw = () => place.replaceChildren(commandOf(takeable[Number(picker.value)].command));
  picker.addEventListener("change", draw);
  draw();
  host.append(make("h2", {}, "Take a point"), make("p", {}, "The command that plans it, to run where this folder lies: ", picker), place);
})();

(function costs() {
  const host = section("Predicted against measured", `What one replacement adds to the ${data.measure}, in percent of the base's, tried alone in its block: hollow as predicted, filled as measured, with one standard error. Near each other: the predictions that the plan is chosen by can be relied on. Linear below 1 %, logarithmic above.`, "costs");
  const words = (b) => `block ${b.index}: ${b.tried}\npredicted ${signed(b.predicted, 2)}, measured ${signed(b.measured, 2)} ±${num(b.error, 2)} on ${num(data.base, 2)}`;
  const lowest = Math.min(0, ...data.blocks.flatMap((b) => [percentOfBase(b.predicted), percentOfBase(b.measured) - percentOfBase(b.error)]));
  plot(host, {
    series: [
      { name: "measured", colour: colour(0), line: false, points: data.blocks.map((b) => ({ x: b.index, y: percentOfBase(b.measured), error: percentOfBase(b.error), words: words(b) })) },
      { name: "predicted", colour: colour(2), line: false, marker: "hollow", points: data.blocks.map((b) => ({ x: b.index, y: percentOfBase(b.predicted), words: words(b) })) },
    ],
    x: { label: "block", whole: true, pad: 0.04 }, y: { label: "rise, % of the base", scale: "symlog", min: lowest },
  });
  if (data.final) host.append(make("p", {}, `All that was chosen, together: ${signed(100 * data.added, 1)} % if the predictions simply added; ${signed((100 * data.final.delta) / data.final.base_perplexity, 1)} % ±${num((100 * data.final.delta_error) / data.final.base_perplexity, 1)} as measured${data.final.refitted ? ", after they were fitted again in order" : ""}.`));
})();

(function together() {
  if (!data.checks.length) return;
  const host = section("What the joint checks said", "Everything replaced at once, on text that nothing was fitted on, in the order of the checks. The plan's own is marked.", "checks");
  sortable(host, [
    { name: "blocks", value: (c) => c.replaced, show: (c) => String(c.replaced), hint: "How many blocks were replaced" },
    { name: "size kept", value: (c) => c.share, show: (c) => `${num(100 * c.share, 1)} %` },
    { name: "base", value: (c) => c.base_perplexity, show: (c) => num(c.base_perplexity, 2), hint: `${data.measure} of the model as it was, on the same windows` },
    { name: "slimmed", value: (c) => c.perplexity, show: (c) => num(c.perplexity, 2) },
    { name: "rise", value: (c) => c.delta, show: (c) => `${signed((100 * c.delta) / c.base_perplexity, 1)} % ±${num((100 * c.delta_error) / c.base_perplexity, 1)}`, hint: "± one standard error" },
    ...(data.limit ? [{ name: `within ${data.limit}`, value: (c) => Number(c.within_limit), show: (c) => (c.within_limit === null ? "" : c.within_limit ? "yes" : "no"), words: true }] : []),
    { name: "fitted again", value: (c) => Number(c.refitted), show: (c) => (c.refitted ? "yes" : "no"), words: true, hint: "Fitted again, in order, on the slimmed model's own inputs" },
    { name: "windows", value: (c) => c.windows, show: (c) => (c.windows === null ? "" : `${c.windows} x ${c.context}`), hint: "How many, of so many tokens" },
    { name: "", value: (c) => Number(c.chosen), show: (c) => (c.chosen ? "this plan" : c.fresh ? "fresh windows" : ""), words: true },
  ], data.checks);
})();

(function blocks() {
  const host = section("Block by block", "Every figure is on held-out text. Click a heading to sort; point at one to read what it is.", "blocks");
  const score = (name, key, hint, digits = 2) => ({ name, hint, value: (b) => b.scores[key], show: (b) => num(b.scores[key], digits) });
  sortable(host, [
    { name: "block", value: (b) => b.index, show: (b) => String(b.index), hint: "Depth, from 0" },
    { name: "becomes", value: (b) => b.becomes, show: (b) => b.becomes, words: true, hint: "What the plan makes of it" },
    { name: "predicted cost", value: (b) => b.cost, show: (b) => (b.cost === null ? "" : signed(b.cost, 2)), hint: `${data.measure} that this adds alone, as predicted` },
    { name: "R2_lin", value: (b) => b.scores.r2_lin, show: (b) => `${num(b.scores.r2_lin)} ±${num(b.scores.r2_lin_error)}`, hint: "How linear the block is: the share of its output's variance that the best linear map of its input explains" },
    score("median", "r2_median_feature", "The same for the median output feature"),
    { name: "tried", value: (b) => b.tried, show: (b) => b.tried, words: true, hint: "The replacement that was put into the model alone, to see whether predictions hold" },
    { name: "predicted", value: (b) => b.predicted, show: (b) => signed(b.predicted, 2), hint: `${data.measure} that it was predicted to add` },
    { name: "measured", value: (b) => b.measured, show: (b) => `${signed(b.measured, 2)} ±${num(b.error, 2)}`, hint: "What it did add; ± one standard error" },
    score("rank in", "effective_rank_input", "Effective rank of the input", 0),
    score("rank out", "effective_rank_output", "Effective rank of the output", 0),
    score("rank map", "effective_rank_map", "Effective rank of the fitted map's output", 0),
    score("cond", "condition_number", "Condition number of the input's covariance", 0),
    ...(data.blocks.some((b) => b.seconds) ? [{ name: "ms", value: (b) => b.seconds, show: (b) => (b.seconds ? num(1000 * b.seconds, 2) : ""), hint: "Milliseconds of the replacement for one batch, on the machine that planned" }] : []),
    { name: "why", value: (b) => b.reason, show: (b) => b.reason, words: true },
  ], data.blocks);
})();

(function texts() {
  const host = section("What it was measured on", `Fitting and choosing use parts of a text that share nothing; a third part is left for ffncompress eval. Seed ${data.settings.seed}, windows of ${data.seq_len} tokens, ${data.settings.dtype === "auto" ? "the machine's dtype" : data.settings.dtype}.`, "texts");
  sortable(host, [
    { name: "text", value: (t) => t.source, show: (t) => t.source, words: true },
    { name: "used for", value: (t) => t.used, show: (t) => t.used, words: true },
    { name: "part", value: (t) => t.part, show: (t) => t.part, words: true },
    { name: "tokens", value: (t) => t.tokens, show: (t) => count(t.tokens) },
    { name: "documents", value: (t) => t.documents, show: (t) => count(t.documents) },
    { name: "read", value: (t) => t.reading, show: (t) => (t.reading === "joined" ? "on from document to document" : "each document by itself"), words: true },
    { name: "sha256", value: (t) => t.sha256, show: (t) => t.sha256.slice(0, 12), words: true, hint: "Of its content: a copy is known again" },
  ], data.texts);
  host.append(make("p", { class: "note" }, `Asked for: ${data.asked || "nothing in particular"}. ${data.family}; base ${data.measure} ${num(data.base, 2)} in windows of ${data.seq_len} tokens.`));
  const timed = data.blocks.filter((b) => b.seconds);
  if (timed.length) host.append(make("p", {}, `The replacements take ${num(1000 * timed.reduce((sum, b) => sum + b.seconds, 0), 1)} ms for one batch, by the times that the plan was chosen by, measured on the machine that planned.`));
})();

(function timings() {
  if (!data.timings.length) return;
  const whole = data.timings.reduce((sum, [, seconds]) => sum + seconds, 0);
  const host = section("How long it took", "Seconds of each stage on the machine that planned, in the order of their beginning. What a killed run had finished before is not counted.", "timings");
  sortable(host, [
    { name: "stage", value: ([name]) => name, show: ([name]) => name, words: true },
    { name: "seconds", value: ([, seconds]) => seconds, show: ([, seconds]) => num(seconds, 1) },
    { name: "share", value: ([, seconds]) => seconds, show: ([, seconds]) => `${num((100 * seconds) / whole, 0)} %` },
  ], data.timings);
})();

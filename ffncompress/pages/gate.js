const summary = document.getElementById("summary");
const texts = data.texts, speed = data.speed, sizes = data.sizes, first = texts[0];
const percent = (v, digits = 1) => `${signed(100 * v, digits)} %`;
const within = (t) => (t.rise_error === null ? "" : ` ±${num(196 * t.rise_error, 2)}`);
const change = ([before, after]) => percent(after / before - 1);

(function headline() {
  document.querySelector("h1").classList.add(data.passed ? "good" : "bad");
  if (data.doubt) summary.append(make("p", { class: "warning" }, `Not to be believed: ${data.doubt}.`));
  summary.append(make("p", {}, `On ${first.text}, text that nothing was fitted or chosen on, ${data.measure} goes from ${num(first.base.token, 2)} to ${num(first.slimmed.token, 2)}: ${percent(first.relative, 2)}${within(first)}. The limit is ${data.limit}.`));
  if (data.limit_warning) summary.append(make("p", { class: "warning" }, `${data.limit_warning}.`));
  summary.append(cardsOf([
    [`${percent(first.relative, 2)}${within(first)}`, `${data.measure}, 95 % interval; lower is better`],
    [change(sizes.whole_model), "parameters of the whole model"],
    [change(sizes.bytes_on_disk), "bytes of weights on disk"],
    ...(speed ? [[`${num(speed.ratio, 2)}x`, `as fast as the base, ${speed.device}`]] : []),
  ]));
  if (data.next.length) summary.append(make("p", {}, "Next, where the checkpoint lies:"), commandOf(data.next, 1));
})();

(function rises() {
  const host = section("How much worse it is", `The rise of ${data.measure} on each text, in percent of the base's. Bars: the 95 % interval, from how much the text's own windows differ. The verdict is on the first text; the others are only reported.`, "rises");
  const points = texts.map((t, i) => ({ x: i, y: 100 * t.relative, error: t.rise_error === null ? 0 : 196 * t.rise_error, label: t.text, radius: 5, words: `${t.text} (${t.part})\n${num(t.base.token, 3)} to ${num(t.slimmed.token, 3)}: ${percent(t.relative, 2)}${within(t)}` }));
  const edge = { min: -0.6, max: texts.length - 0.4 };
  const across = (y) => [{ x: edge.min, y }, { x: edge.max, y }];
  const reach = points.flatMap((p) => [p.y - p.error, p.y + p.error]), most = data.most === null ? 0 : 100 * data.most;
  const low = Math.min(0, ...reach), high = Math.max(0, most, ...reach);
  plot(host, {
    series: [
      { name: `rise of ${data.measure}`, colour: colour(0), line: false, points },
      ...(data.most === null ? [] : [{ name: `limit ${data.limit}, for the first text`, colour: "var(--bad)", marker: false, dash: "5 4", points: across(most) }]),
      { name: "no change", colour: "var(--whole)", marker: false, dash: "2 3", points: across(0) },
    ],
    x: { label: "texts, the first is judged", ...edge, bare: true }, y: { label: "rise, %", min: low - 0.05 * (high - low), max: high + 0.12 * (high - low) }, height: 240,
  });
  const rows = texts.flatMap((t) => ["token", "word", "byte"].filter((unit) => t.base[unit] !== null && t.base[unit] !== undefined).map((unit) => ({ t, unit, before: t.base[unit], after: t.slimmed[unit] })));
  const units = { causal: (u) => u, masked: () => "hidden token", embedding: () => "window" }[data.task];
  sortable(host, [
    { name: "text", value: (r) => r.t.text, show: (r) => `${r.t.text} (${r.t.part})`, words: true },
    { name: "per", value: (r) => r.unit, show: (r) => units(r.unit), words: true, hint: "The verdict is per token; per word and byte can be compared between tokenizers" },
    { name: "base", value: (r) => r.before, show: (r) => num(r.before, 3) },
    { name: "slimmed", value: (r) => r.after, show: (r) => num(r.after, 3) },
    { name: "change", value: (r) => r.after / r.before, show: (r) => percent(r.after / r.before - 1, 2) + (r.unit === "token" ? within(r.t) : "") },
    { name: "tokens", value: (r) => r.t.tokens, show: (r) => count(r.t.tokens) },
    { name: "context", value: (r) => r.t.context, show: (r) => String(r.t.context), hint: "Tokens that the model reads at once" },
  ], rows);
})();

(function continuations() {
  if (data.task === "embedding") return;
  const host = section("Both go on with the same words", "Each model's likeliest next words, one after the other.", "continuations");
  host.append(make("p", {}, `“${data.prompt.trim()}” …`));
  host.append(make("div", { class: "pair" }, ...[["base", data.continuation_base], ["slimmed", data.continuation_slimmed]].map(([who, words]) => make("blockquote", {}, make("b", {}, who), words.trim()))));
})();

function compared(host, rows) {
  const table = make("div", { class: "compare" });
  for (const { name, values: [before, after], show, changed } of rows) {
    const most = Math.max(before, after) || 1;
    table.append(make("b", {}, `${name}: ${changed || change([before, after])}`));
    for (const [who, value, fill] of [["base", before, "var(--whole)"], ["slimmed", after, "var(--c0)"]])
      table.append(make("span", {}, who), make("div", { class: "with" }, make("i", { style: `width:${(65 * value) / most}%;background:${fill}` }), show(value)));
  }
  host.append(table);
}

(function amounts() {
  const host = section("How large it is", "Parameters, and what its weights take on disk.", "sizes");
  const bytes = (v) => (v >= 1e9 ? `${num(v / 1e9, 2)} GB` : `${num(v / 1e6, 2)} MB`);
  compared(host, [
    { name: "Weights on disk", values: sizes.bytes_on_disk, show: bytes },
    { name: "Parameters, whole model", values: sizes.whole_model, show: count },
    ...(sizes.all_ffns ? [{ name: "Parameters, all FFNs", values: sizes.all_ffns, show: count }] : []),
    ...(sizes.replaced_ffns ? [{ name: "Parameters, replaced FFNs", values: sizes.replaced_ffns, show: count }] : []),
  ]);
})();

(function pace() {
  if (!speed) { section("How fast it is", `${data.untimed}.`, "speed"); return; }
  const host = section("How fast it is", `Tokens a second on ${speed.device}: of prompts that are read at once (prefill), and of going on from one, a token at a time (decode). The median of ${speed.repeats} timings of each model, in turns; in brackets, the least and the greatest ratio. Beside it is the ratio of the FLOPs, which bound prefill, or of the bytes of weights that a token reads, which bound decode. Another machine, another figure. Weights of sha256 ${data.weights_sha256.slice(0, 16)}.`, "speed");
  compared(host, data.paces.map(({ what, values, measured, expected }) => ({ name: what, values, changed: expected ? `${measured}, ${expected}` : measured, show: (v) => count(Math.round(v)) })));
})();

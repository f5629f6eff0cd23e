// A conversation with one of the server's models.

import { ApiError, streamChat } from "./api.js";
import { byId, copy, count, duration, el, rate, setText } from "./dom.js";
import { MarkdownView } from "./markdown.js";

const REDRAW_MS = 60;
const ANNOUNCE_MS = 2500;

const list = byId("messages");
const field = byId("message");
const announcer = byId("announcer");
const emptyNote = byId("empty");
let history = [];
let running = null;
let onUnauthorized = () => {};
let onRequest = () => {};

/** `unauthorized` is called where the server wants another key, `request` with the id of each answer. */
export function startChat(unauthorized, request) {
  onUnauthorized = unauthorized;
  onRequest = request;
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  field.addEventListener("input", fitField);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") stop();
  });
  byId("stop").addEventListener("click", stop);
  byId("clear").addEventListener("click", clear);
  byId("settings-button").addEventListener("click", (event) => {
    const settings = byId("settings");
    settings.hidden = !settings.hidden;
    event.currentTarget.setAttribute("aria-expanded", String(!settings.hidden));
  });
}

export function showModels(models) {
  const picker = byId("model");
  const before = picker.value;
  picker.replaceChildren(
    ...models.map(({ id, parent }) => el("option", { value: id }, parent ? `${id} (adapter of ${parent})` : id)),
  );
  if (models.some(({ id }) => id === before)) picker.value = before;
}

function fitField() {
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, 200)}px`;
}

function stop() {
  running?.abort();
}

function clear() {
  stop();
  history = [];
  list.replaceChildren(emptyNote);
  field.focus();
}

function send() {
  const text = field.value.trim();
  if (!text || running) return;
  field.value = "";
  fitField();
  emptyNote.remove();
  history.push({ role: "user", content: text });
  list.append(message("user", "You", el("div", { class: "text plain" }, text)));
  answer();
}

function message(role, name, ...parts) {
  return el("article", { class: `message ${role}`, "aria-label": name }, el("h2", {}, name), ...parts);
}

function requestBody(model) {
  const system = byId("system").value.trim();
  const temperature = byId("temperature").value;
  const maxTokens = byId("max-tokens").value;
  const body = {
    model,
    messages: system ? [{ role: "system", content: system }, ...history] : history,
  };
  if (temperature !== "") body.temperature = Number(temperature);
  if (maxTokens !== "") body.max_completion_tokens = Number(maxTokens);
  return body;
}

/** Streams the answer to what stands in the history. */
async function answer() {
  const model = byId("model").value;
  const own = history;
  const shown = new Answer(model);
  list.append(shown.node);
  follow(true);
  running = new AbortController();
  setRunning(true);
  try {
    for await (const chunk of streamChat(requestBody(model), running.signal)) shown.add(chunk);
    shown.end(null);
  } catch (error) {
    if (error.name === "AbortError") shown.end("stopped");
    else {
      shown.fail(error instanceof ApiError ? error.message : `The answer can't be read: ${error.message}`);
      if (error.status === 401) onUnauthorized();
    }
  }
  running = null;
  setRunning(false);
  if (shown.text) own.push({ role: "assistant", content: shown.text });
  else {
    // Nothing came of the question: it is there to be sent once more.
    const { content } = own.pop();
    if (own === history) field.value ||= content;
    fitField();
  }
  shown.offer(() => {
    if (running) return;
    own.pop();
    shown.node.remove();
    answer();
  });
}

function setRunning(is) {
  const focused = document.activeElement;
  byId("send").hidden = is;
  byId("stop").hidden = !is;
  list.setAttribute("aria-busy", String(is));
  // Who pressed the button that goes away keeps a place.
  if (is && focused === byId("send")) byId("stop").focus();
  if (!is && focused === byId("stop")) field.focus();
}

const isAtEnd = () => list.scrollHeight - list.scrollTop - list.clientHeight < 60;

function follow(should) {
  if (should) list.scrollTop = list.scrollHeight;
}

class Answer {
  constructor(model) {
    this.text = "";
    this.reasoning = "";
    this.finish = null;
    this.usage = null;
    this.started = performance.now();
    this.first = null;
    this.announced = 0;
    this.lastAnnounced = this.started;
    this.body = el("div", { class: "text" });
    this.view = new MarkdownView(this.body);
    this.thoughts = el("div", { class: "thoughts" });
    this.summary = el("summary", {}, "Reasoning");
    this.fold = el("details", { class: "reasoning", hidden: true }, this.summary, this.thoughts);
    this.note = el("p", { class: "hint note" }, "Waiting for the first token …");
    this.node = message("assistant", model, this.fold, this.body, this.note);
    this.timer = null;
  }

  add(chunk) {
    onRequest(chunk.id);
    if (chunk.usage) this.usage = chunk.usage;
    const [choice] = chunk.choices;
    if (!choice) return;
    const { content, reasoning } = choice.delta;
    if (content || reasoning) this.first ??= performance.now();
    this.text += content ?? "";
    this.reasoning += reasoning ?? "";
    this.finish = choice.finish_reason ?? this.finish;
    this.timer ??= setTimeout(() => this.draw(), REDRAW_MS);
  }

  draw() {
    clearTimeout(this.timer);
    this.timer = null;
    const wasAtEnd = isAtEnd();
    if (this.reasoning) {
      this.fold.hidden = false;
      setText(this.summary, this.text || this.finish ? "Reasoning" : "Reasoning …");
      setText(this.thoughts, this.reasoning.trim());
    }
    this.view.update(this.text);
    if (this.first && !this.finish) setText(this.note, "Writing …");
    follow(wasAtEnd);
    const now = performance.now();
    if (now - this.lastAnnounced > ANNOUNCE_MS) this.announce(now);
  }

  /** Whole sentences at a time, for screen readers. */
  announce(now) {
    const end = Math.max(...[". ", "! ", "? ", "\n"].map((mark) => this.text.lastIndexOf(mark)));
    if (end <= this.announced) return;
    announcer.textContent = this.text.slice(this.announced, end + 1);
    this.announced = end + 1;
    this.lastAnnounced = now;
  }

  end(how) {
    this.draw();
    const seconds = (performance.now() - this.started) / 1000;
    const parts = [];
    if (how) parts.push(how);
    else if (this.finish === "length") parts.push("ended at the limit of tokens");
    if (this.first) parts.push(`first token after ${duration((this.first - this.started) / 1000)}`);
    if (this.usage) {
      const { prompt_tokens: prompt, completion_tokens: output } = this.usage;
      const writing = (performance.now() - (this.first ?? this.started)) / 1000;
      parts.push(`${count(prompt)} tokens read, ${count(output)} written`);
      if (output > 1) parts.push(`${rate((output - 1) / writing)} tokens/s`);
    } else parts.push(duration(seconds));
    setText(this.note, parts.join(" · "));
    const rest = this.text.slice(this.announced);
    announcer.textContent = `${rest} ${how ? "Answer stopped." : "Answer complete."}`;
    follow(true);
  }

  fail(text) {
    this.draw();
    this.note.className = "error";
    this.note.setAttribute("role", "alert");
    setText(this.note, text);
    follow(true);
  }

  /** `again`: in place of this answer, which is the last one as long as the button shows. */
  offer(again) {
    const buttons = el("div", { class: "buttons" });
    if (this.text) {
      const button = el("button", { type: "button", class: "quiet" }, "Copy");
      button.addEventListener("click", () => copy(this.text, button));
      const retry = el("button", { type: "button", class: "quiet again" }, "Try again");
      retry.addEventListener("click", again);
      buttons.append(button, retry);
    }
    this.node.append(buttons);
    follow(isAtEnd());
  }
}

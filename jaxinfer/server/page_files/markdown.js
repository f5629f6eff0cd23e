// Markdown into DOM nodes. Text only ever becomes text nodes, and links lead to http and https alone.

import { copy, el } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const MAX_DEPTH = 8;
const MAX_DIVIDER = 1000;

/** A place where a text that grows is shown: only the blocks that have changed are made anew. */
export class MarkdownView {
  constructor(node) {
    this.node = node;
    this.sources = [];
  }

  update(text) {
    const blocks = splitBlocks(text.split("\n"));
    blocks.forEach((block, i) => {
      const source = block.lines.join("\n");
      if (this.sources[i] === source) return;
      const made = renderBlock(block, 0);
      if (i < this.node.children.length) this.node.children[i].replaceWith(made);
      else this.node.append(made);
      this.sources[i] = source;
    });
    while (this.node.children.length > blocks.length) this.node.lastElementChild.remove();
    this.sources.length = blocks.length;
  }
}

export function splitBlocks(lines) {
  const blocks = [];
  let i = 0;
  const take = (kind, goesOn) => {
    const start = i++;
    while (i < lines.length && goesOn(lines[i], i)) i++;
    blocks.push({ kind, lines: lines.slice(start, i) });
  };
  while (i < lines.length) {
    const line = lines[i];
    const fence = FENCE.exec(line);
    if (!line.trim()) i++;
    else if (fence) {
      const mark = fence[1];
      let open = true;
      take("code", (next) => {
        const goesOn = open;
        if (next.trim().startsWith(mark) && !next.trim().replaceAll(mark[0], "")) open = false;
        return goesOn;
      });
    } else if (HEADING.test(line)) take("heading", () => false);
    else if (RULE.test(line)) take("rule", () => false);
    else if (QUOTE.test(line)) take("quote", (next) => QUOTE.test(next));
    else if (ITEM.test(line)) {
      take("list", (next, at) => {
        const belongs = (text = "") => ITEM.test(text) || /^\s{2,}\S/.test(text);
        if (!next.trim()) return belongs(lines[at + 1]);
        return belongs(next) || (lines[at - 1].trim() !== "" && !starts(next));
      });
    } else if (line.includes("|") && isDivider(lines[i + 1] ?? "")) {
      take("table", (next) => next.includes("|"));
    } else take("paragraph", (next) => next.trim() !== "" && !starts(next));
  }
  return blocks;
}

const isDivider = (line) => line.length < MAX_DIVIDER && line.includes("|") && DIVIDER.test(line);

const starts = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((form) => form.test(line));

function renderBlock({ kind, lines }, depth) {
  switch (kind) {
    case "code": return renderCode(lines);
    case "heading": {
      const [, marks, text] = HEADING.exec(lines[0]);
      // The page's own headings end at the third level.
      return el(`h${Math.min(marks.length + 3, 6)}`, {}, ...inline(text));
    }
    case "rule": return el("hr");
    case "quote": return renderInside(el("blockquote"), lines.map((line) => line.replace(QUOTE, "")), depth);
    case "list": return renderList(lines, depth);
    case "table": return renderTable(lines);
    default: return el("p", {}, ...inline(lines.join("\n")));
  }
}

function renderInside(node, lines, depth) {
  if (depth >= MAX_DEPTH) node.append(lines.join("\n"));
  else node.append(...splitBlocks(lines).map((block) => renderBlock(block, depth + 1)));
  return node;
}

function renderCode(lines) {
  const [, mark, info] = FENCE.exec(lines[0]);
  const [language] = info.trim().split(/\s/);
  const last = lines.at(-1).trim();
  const isClosed = lines.length > 1 && last.startsWith(mark) && !last.replaceAll(mark[0], "");
  const text = lines.slice(1, isClosed ? -1 : undefined).join("\n");
  const button = el("button", { type: "button", class: "quiet copy" }, "Copy");
  button.addEventListener("click", () => copy(text, button));
  const head = el("div", { class: "code-head" }, el("span", {}, language || "text"), button);
  const body = el("pre", { tabIndex: 0 }, el("code", {}, text));
  return el("div", { class: "code" }, head, body);
}

function renderList(lines, depth) {
  const indent = ITEM.exec(lines[0])[1].length;
  const first = ITEM.exec(lines[0])[2];
  const list = el(/\d/.test(first) ? "ol" : "ul");
  if (/\d/.test(first)) list.start = parseInt(first, 10);
  let item = [];
  const close = () => {
    if (item.length) list.append(renderInside(el("li"), item, depth));
  };
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent + 1) {
      close();
      item = [found[3]];
    } else item.push(line.replace(new RegExp(`^\\s{0,${indent + 2}}`), ""));
  }
  close();
  // An item of one line needs no paragraph.
  for (const li of list.children) {
    if (li.children.length && li.children[0].tagName === "P") li.children[0].replaceWith(...li.children[0].childNodes);
  }
  return list;
}

function renderTable(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (line, tag) => el("tr", {}, ...cells(line).map((cell) => el(tag, {}, ...inline(cell))));
  const body = lines.slice(2).map((line) => row(line, "td"));
  const table = el("table", {}, el("thead", {}, row(lines[0], "th")), el("tbody", {}, ...body));
  return el("div", { class: "table-scroll", tabIndex: 0 }, table);
}

const PAIRS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const URL_END = /[\s<>"]|$/;

/** The nodes of a line of text. What isn't closed, or isn't allowed, stays the text that it is. */
export function inline(text, depth = 0) {
  const nodes = [];
  const absent = new Set();
  let plain = "";
  let i = 0;
  const find = (mark, from) => {
    // What was looked for in vain isn't looked for again: texts of nothing but brackets stay cheap.
    if (absent.has(mark)) return -1;
    const at = text.indexOf(mark, from);
    if (at < 0) absent.add(mark);
    return at;
  };
  const push = (node, end) => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
    nodes.push(node);
    i = end;
  };
  while (i < text.length) {
    const made = depth < MAX_DEPTH && special(text, i, depth, find);
    if (made) push(made.node, made.end);
    else {
      if (text[i] === "\\" && /[!-/:-@[-`{-~]/.test(text[i + 1] ?? "")) i++;
      plain += text[i++];
    }
  }
  if (plain) nodes.push(document.createTextNode(plain));
  return nodes;
}

function special(text, i, depth, find) {
  const char = text[i];
  if (char === "`") {
    const mark = /^`+/.exec(text.slice(i, i + 16))[0];
    const end = find(mark, i + mark.length);
    if (end > 0) {
      const code = text.slice(i + mark.length, end).replaceAll("\n", " ");
      return { node: el("code", {}, code.trim() ? code.replace(/^ (.*) $/, "$1") : code), end: end + mark.length };
    }
  } else if (char === "[") {
    const middle = find("](", i);
    const end = middle > 0 ? text.indexOf(")", middle) : -1;
    if (end > 0 && end - i < 4096) {
      const [target] = text.slice(middle + 2, end).trim().split(/\s/);
      const link = anchor(target);
      if (link) {
        link.append(...inline(text.slice(i + 1, middle), depth + 1));
        return { node: link, end: end + 1 };
      }
    }
  } else if (char === "h" && /^https?:\/\//.test(text.slice(i, i + 8)) && !/\w/.test(text[i - 1] ?? "")) {
    const rest = text.slice(i, i + 2048);
    const target = rest.slice(0, rest.search(URL_END)).replace(/[.,;:!?)\]*_'~]+$/, "");
    const link = anchor(target);
    if (link) {
      link.append(target);
      return { node: link, end: i + target.length };
    }
  } else if (char === "\n" && text.slice(Math.max(i - 2, 0), i) === "  ") {
    return { node: el("br"), end: i + 1 };
  } else if ("*_~".includes(char)) {
    for (const [mark, tag] of PAIRS) {
      if (!text.startsWith(mark, i) || /\s/.test(text[i + mark.length] ?? " ")) continue;
      if (char === "_" && /\w/.test(text[i - 1] ?? "")) continue;
      const end = closing(text, mark, i + mark.length, find);
      if (end > 0) return { node: el(tag, {}, ...inline(text.slice(i + mark.length, end), depth + 1)), end: end + mark.length };
    }
  }
  return null;
}

function closing(text, mark, from, find) {
  let at = find(mark, from);
  for (let tries = 0; at > 0 && tries < 16; tries++) {
    const isInner = mark.length === 1 && (text[at + 1] === mark || text[at - 1] === mark);
    const joins = mark.startsWith("_") && /\w/.test(text[at + mark.length] ?? "");
    if (at > from && !isInner && !joins && !/\s/.test(text[at - 1])) return at;
    at = text.indexOf(mark, at + mark.length);
  }
  return -1;
}

function anchor(target) {
  if (!/^https?:\/\//i.test(target) || !URL.canParse(target)) return null;
  return el("a", { href: target, target: "_blank", rel: "noopener noreferrer" });
}

// Puts the page together: the two views, and the API key where the server wants one.

import { ApiError, forgetKey, getModels, hasKey, setKey } from "./api.js";
import { showModels, startChat } from "./chat.js";
import { byId, setText } from "./dom.js";
import { markOwn, startEngine, wakeEngine } from "./engine.js";

const tabs = [byId("tab-chat"), byId("tab-engine")];
const isWide = matchMedia("(min-width: 1000px)");

function show(view) {
  document.body.dataset.view = view;
  for (const tab of tabs) {
    const isChosen = tab.id === `tab-${view}`;
    tab.setAttribute("aria-selected", String(isChosen));
    tab.tabIndex = isChosen ? 0 : -1;
  }
  wakeEngine();
}

for (const [i, tab] of tabs.entries()) {
  tab.addEventListener("click", () => show(tab.getAttribute("aria-controls")));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = tabs[1 - i];
    show(other.getAttribute("aria-controls"));
    other.focus();
  });
}

function askForKey() {
  if (!byId("key-form").hidden) return;
  const wasWrong = hasKey();
  forgetKey();
  byId("forget-key").hidden = true;
  byId("key-form").hidden = false;
  setText(byId("key-error"), wasWrong ? "The server doesn't know this key." : "");
  byId("key").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value);
  byId("key").value = "";
  byId("key-form").hidden = true;
  load();
  wakeEngine();
});

byId("forget-key").addEventListener("click", () => {
  forgetKey();
  askForKey();
});

async function load() {
  try {
    showModels(await getModels());
    byId("trouble").hidden = true;
    byId("forget-key").hidden = !hasKey();
    // Not where a keyboard would come up over the page.
    if (matchMedia("(hover: hover)").matches) byId("message").focus();
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) askForKey();
    else {
      setText(byId("trouble"), error.message);
      byId("trouble").hidden = false;
      setTimeout(load, 3000);
    }
  }
}

startChat(askForKey, markOwn);
startEngine(() => isWide.matches || document.body.dataset.view === "engine", askForKey);
isWide.addEventListener("change", wakeEngine);
load();

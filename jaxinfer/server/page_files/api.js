// What the page asks of its server. Paths are relative: the page may lie under a proxy's prefix.

const KEY = "jaxinfer-api-key";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const setKey = (key) => sessionStorage.setItem(KEY, key);
export const forgetKey = () => sessionStorage.removeItem(KEY);

async function request(path, options = {}) {
  const headers = new Headers(options.headers);
  if (hasKey()) headers.set("Authorization", `Bearer ${sessionStorage.getItem(KEY)}`);
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server can't be reached.");
  }
  if (!response.ok) throw new ApiError(response.status, await errorText(response));
  return response;
}

async function errorText(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return error.param ? `${error.message} (${error.param})` : error.message;
  } catch {
    return text || `${response.status} ${response.statusText}`;
  }
}

export async function getModels() {
  const { data } = await (await request("v1/models")).json();
  return data;
}

export async function getAnatomy(engine) {
  return (await request(`anatomy?engine=${engine}`)).json();
}

/** The chunks of a chat completion. Leaving the loop, or `signal`, ends the request on the server too. */
export async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(chunk.error.code, chunk.error.message);
        yield chunk;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

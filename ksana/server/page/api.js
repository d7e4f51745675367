// How the page talks to its server: the API key, errors, server-sent events.

const KEY = "ksana-api-key";
const UNREACHABLE = "The server cannot be reached.";

export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Fetch `path`, with `body` as JSON if there is one. Asks for an API key until the server takes it. */
export async function request(path, { body, signal } = {}) {
  const key = sessionStorage.getItem(KEY);
  const response = await reach(
    fetch(path, {
      method: body ? "POST" : "GET",
      headers: {
        ...(body && { "Content-Type": "application/json" }),
        ...(key && { Authorization: `Bearer ${key}` }),
      },
      body: body && JSON.stringify(body),
      signal,
    }),
  );
  if (response.status === 401) {
    // Another request may have asked meanwhile.
    if (key === sessionStorage.getItem(KEY)) await askForKey();
    return request(path, { body, signal });
  }
  if (!response.ok) throw new ServerError(await reasonOf(response), response.status);
  return response;
}

/** The JSON events of a response, until [DONE]; an error among them, or an early end, is thrown. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reach(reader.read());
      if (done) throw new ServerError("The connection ended before the answer did.");
      const frames = (rest + value).split("\n\n");
      rest = frames.pop();
      for (const frame of frames) {
        const data = frame.replace(/^data: ?/, "");
        if (data === "[DONE]") return;
        if (data === frame) continue; // a comment
        const event = JSON.parse(data);
        if (event.error) throw new ServerError(event.error.message);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function reach(promise) {
  try {
    return await promise;
  } catch (error) {
    throw error instanceof TypeError ? new ServerError(UNREACHABLE) : error;
  }
}

async function reasonOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answers ${response.status} ${response.statusText}`.trimEnd();
  }
}

let asking = null; // one question serves all requests that were refused

function askForKey() {
  asking ??= new Promise((resolve, reject) => {
    const dialog = document.querySelector("#key-dialog");
    const input = document.querySelector("#key");
    const closed = () => {
      asking = null;
      const key = input.value.trim();
      input.value = "";
      if (dialog.returnValue !== "ok" || !key) return reject(new ServerError("This server asks for an API key.", 401));
      sessionStorage.setItem(KEY, key);
      dispatchEvent(new Event("ksana-key"));
      resolve();
    };
    dialog.returnValue = "";
    dialog.addEventListener("close", closed, { once: true });
    dialog.showModal();
  });
  return asking;
}

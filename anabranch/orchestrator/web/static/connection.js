// The connection: one stream of server-sent events, reopened when it falls silent.

import { $, announce, text } from "./dom.js";
import { clock, duration } from "./format.js";
import { known } from "./known.js";

const STALE_MS = 3000; // the server writes at least twice per second
const REOPEN_MS = 10000;
const RETRY_MS = 1500;

let handlers = {};
let stream = null;
let openedAt = 0;
let heardAt = 0; // performance.now() of the last picture
let lastHeard = null; // wall clock, for people

/** Hand every picture to `take` and every list of events to `record`, with the life they come from. */
export function follow(take, record) {
  handlers = { take, record };
  setInterval(() => {
    drawLink();
    if (performance.now() - openedAt > REOPEN_MS) connect(); // a connection that stays silent is dead
  }, 500);
  connect();
}

function connect() {
  stream?.close();
  openedAt = performance.now();
  const mine = new EventSource("api/events");
  stream = mine;
  const read = (event) => [JSON.parse(event.data), event.lastEventId.split("-")[0]];
  mine.addEventListener("status", (event) => {
    lastHeard = Date.now();
    openedAt = performance.now();
    const picture = read(event);
    heardAt = performance.now();
    handlers.take(...picture);
    drawLink();
  });
  mine.addEventListener("tape", (event) => handlers.record(...read(event)));
  mine.addEventListener("error", () => {
    heardAt = -Infinity;
    drawLink();
    if (mine.readyState === EventSource.CLOSED) setTimeout(() => stream === mine && connect(), RETRY_MS);
  });
}

/** Whether what is shown is new, in words and for the style sheet. */
function drawLink() {
  const now = performance.now();
  const link = !known.status ? "connecting" : now - heardAt > STALE_MS ? "lost" : "live";
  document.documentElement.dataset.link = link;
  text($("link"), { connecting: stream?.readyState === EventSource.CLOSED || now - openedAt > STALE_MS ? "no answer yet, trying again" : "connecting",
    live: "live", lost: "no connection" }[link]);
  $("banner").hidden = link !== "lost";
  if (link !== "lost") return;
  const seconds = Math.max(1, Math.round((Date.now() - lastHeard) / 1000));
  const age = seconds < 100 ? `${seconds} s` : duration(seconds);
  text($("banner-text"), `The synchronizer does not answer. What you see is ${age} old, from ${clock(lastHeard / 1000)}; trying again.`);
  document.title = `no connection · ${known.status.run} · anabranch`;
  announce(`No connection: showing old data from ${clock(lastHeard / 1000)}`);
}

// The tape: the decisions' events, filtered and held.

import { $, attr, keyed, make, text } from "./dom.js";
import { clock } from "./format.js";
import { known } from "./known.js";

const SEVERITY = {
  merged: "good", joined: "good", born: "good", back: "good",
  rejected: "warn", abandoned: "warn", refused: "warn", "turned away": "warn", declined: "warn", resend: "warn",
  "server full": "warn", "server has room": "good", trouble: "warn",
  gone: "bad", "ledger mismatch": "bad", timeline: "bad", orphaned: "bad",
};
const GLYPHS = { good: "✓", warn: "!", bad: "✕", quiet: "·" };

let held = false; // the list stands still for a reader
let shownEvents = [];

export function drawEvents() {
  const { events } = known;
  if (!held) shownEvents = [...events];
  const words = wanted($("filter").value);
  const found = shownEvents.filter((event) => words.every((word) => searchable(event).includes(word)));
  keyed($("events"), found, (event) => event.id, makeEvent, () => {});
  const waiting = held && events.length ? events.findIndex((event) => event.id === shownEvents[0]?.id) : 0;
  const news = waiting < 0 ? events.length : waiting;
  text($("events-note"), (words.length ? `${found.length} of ${shownEvents.length} ` : "") + (held ? `held, ${news} newer` : ""));
  $("events-empty").hidden = found.length > 0;
  text($("events-empty"), shownEvents.length ? "No event matches the filter." : "Nothing has happened yet.");
}

/** All of these must be found; "round 1" is not "round 12". */
function wanted(typed) {
  const words = typed.toLowerCase().match(/(?:round|fragment)\s+\d+|\S+/g) ?? [];
  return words.map((word) => word.replace(/\s+(\d+)$/, " $1 "));
}

function searchable(event) {
  return (event.words ??= `${event.kind} ${about(event)} ${event.name ?? ""} ${event.reason} `.toLowerCase());
}

function about(event) {
  const parts = [];
  if (event.round) parts.push(`round ${event.round}`);
  if (event.fragment !== undefined) parts.push(`fragment ${event.fragment}${event.kind === "merged" ? ` → v${event.version}` : ""}`);
  if (event.name && !event.reason.includes(event.name)) parts.push(event.name);
  return parts.join(" · ");
}

function severity(event) {
  if (event.kind === "gone" && event.left) return "quiet";
  return SEVERITY[event.kind] ?? "quiet";
}

function makeEvent(event) {
  const level = severity(event);
  const kind = make("span", { class: "kind" }, make("span", { class: "glyph", "aria-hidden": "true" }), " ", make("span"));
  text(kind.children[0], GLYPHS[level]);
  text(kind.children[1], event.kind);
  const node = make("li", { "data-level": level }, make("time"), kind, make("span", { class: "about muted isolate" }),
    make("span", { class: "reason isolate" }));
  text(node.children[0], event.time ? clock(event.time) : "");
  text(node.children[2], about(event));
  text(node.children[3], event.reason);
  return node;
}

$("filter").addEventListener("input", drawEvents);
$("hold").addEventListener("click", () => {
  held = !held;
  attr($("hold"), "aria-pressed", held);
  text($("hold"), held ? "Go on" : "Hold");
  drawEvents();
});

// The phase and the figures at the top.

import { $, announce, attr, text } from "./dom.js";
import { bytes, count, loss, percent, whole } from "./format.js";

const HINTS = [
  [/^quorum (\d+)\/(\d+)$/, (m) => `needs ${m[2] - m[1]} more contribution${m[2] - m[1] === 1 ? "" : "s"} to merge`, "warn"],
  [/^training$/, () => "", "good"],
  [/^paused$/, () => "no round opens until anabranch resume URL", "warn"],
  [/^stopped$/, () => "the run is over", "quiet"],
  [/^no live worker$/, (m, s) => `start one: anabranch worker ${s.url}`, "bad"],
  [/^waiting for a first worker$/, (m, s) => `start one: anabranch worker ${s.url}`, "quiet"],
  [/^waiting for version 0/, () => "its weights become the first global model", "quiet"],
  [/^no data left/, (m, s) => `train on: anabranch set ${s.url} data.epochs=…`, "quiet"],
  [/^no worker makes steps$/, () => "workers answer, but their step counters stand still", "bad"],
  [/^the server is nearly full/, () => "workers train on; raise maxmemory, or wait until payloads run out", "warn"],
  [/^the server lost this run/, () => "end this synchronizer, anabranch restore CHECKPOINT URL, then start it again", "bad"],
  [/^Redis does not answer$/, () => "figures are the last known ones; it goes on by itself", "bad"],
  [/^the server (refuses|is loading|is busy|takes no more|does not take)/, () => "workers train on, and it goes on by itself once the server is well", "bad"],
  [/^maxmemory-policy/, () => "nothing is written until then; it goes on by itself", "bad"],
  [/^the server lost what it acknowledged/, () => "look at the server's log, and whether a proxy hides fail-overs", "bad"],
  [/^standby/, () => "this synchronizer takes over if the leader stops", "quiet"],
];

const rates = []; // [performance.now(), tokens]

export function drawHead(s) {
  text($("run"), s.run);
  const [hint, tone] = explain(s);
  text($("phase"), s.phase);
  text($("hint"), hint);
  attr($("phase-line"), "data-tone", tone);
  text($("phase-glyph"), { good: "●", warn: "▲", bad: "✕", quiet: "○" }[tone]);
  document.title = `${s.phase} · ${s.run} · anabranch`;
  announce(`${s.run}: ${s.phase}. ${hint}`);
  text($("release"), s.release);
  text($("join"), `anabranch worker ${s.url}`);
  if (!s.members) return;

  const workers = s.members.filter((m) => m.role === "worker");
  const gone = workers.length - s.live;
  text($("live"), whole(s.live));
  text($("live-note"), `${whole(s.participating)} participating${gone ? `, ${whole(gone)} gone` : ""}`);
  text($("tokens"), count(s.tokens));
  text($("tokens-note"), rate(s.tokens));
  const points = s.heldout;
  text($("loss"), points.length ? loss(points.at(-1)[1]) : "–");
  text($("loss-note"), points.length ? `nats/token, from ${loss(points[0][1])}` : "no evaluator has measured yet");
  const merged = s.rounds["all arrived"] + s.rounds["grace expired"];
  text($("merged"), whole(merged));
  text($("merged-note"), `${whole(s.rounds.abandoned)} abandoned`);
  text($("goodput"), s.goodput === null ? "–" : percent(s.goodput));
  text($("bytes"), bytes(s.bytes_sent));
  text($("bytes-note"), merged ? `${bytes(s.bytes_sent / merged)} per merged round` : "");
}

function explain(s) {
  for (const [pattern, words, tone] of HINTS) {
    const match = pattern.exec(s.phase);
    if (match) return [words(match, s), tone];
  }
  return ["", "quiet"];
}

function rate(tokens) {
  const now = performance.now();
  rates.push([now, tokens]);
  while (rates.length > 2 && now - rates[0][0] > 30000) rates.shift();
  const [[then, before]] = rates;
  return now - then > 4000 ? `${count(Math.round(((tokens - before) * 1000) / (now - then)))} per second` : "";
}

/** Rates begin anew. */
export function forgetRates() {
  rates.length = 0;
}

// How rounds closed, what was turned down, the pace, the settings.

import { $, attr, keyed, make, text } from "./dom.js";
import { duration, percent, whole } from "./format.js";

const CLOSED = { "all arrived": "applied", "grace expired": "pending", abandoned: "rejected" };

export function drawClosed(s) {
  const rounds = Object.entries(s.rounds ?? {});
  const all = rounds.reduce((sum, [, n]) => sum + n, 0);
  keyed($("closed-bar"), rounds, ([how]) => how, ([how]) => make("i", { "data-part": CLOSED[how] ?? "lost" }),
    (segment, [, n]) => { segment.style.flexGrow = n; });
  drawCounts($("closed"), rounds.map(([how, n]) => [how, all ? `${whole(n)} (${percent(n / all)})` : "0", CLOSED[how]]));
  const refused = Object.entries(s.refused ?? {});
  drawCounts($("refused"), refused.length ? refused.map(([what, n]) =>
    [what, whole(n), what === "ledger mismatches" && n ? "lost" : null]) : [["nothing", "", null]]);
  const pace = s.averages;
  drawCounts($("pace"), pace ? [["step", pace.step_s], ["opening to quorum", pace.quorum_s], ["close to broadcast", pace.sync_s],
    ["slack", pace.slack_s]].map(([what, value]) =>
    [what, value === null ? "–" : value < 0 ? `−${duration(-value)}` : duration(value), null]) : []);
}

/** The shared dataset: what is handed out, done, and had to be done again. */
export function drawData(s) {
  const d = s.data;
  $("data-card").hidden = !d;
  if (!d) return;
  text($("data-note"), `epoch ${whole(d.epoch)}${d.epochs ? ` of ${whole(d.epochs)}` : ""}`);
  drawCounts($("data"), [
    ["items", whole(d.items), null],
    ["ranges handed out", `${whole(d.handed_out)} of ${whole(d.ranges)}`, null],
    ["in workers' hands", whole(d.leased), "pending"],
    ["waiting to be redone", whole(d.waiting), d.waiting ? "rejected" : null],
    ["done, all epochs", whole(d.done), "applied"],
    ["items redone", whole(d.redone_items), null],
  ]);
}

function drawCounts(list, items) {
  keyed(list, items, ([what]) => what, () => make("li", {}, make("span"), make("b")), (node, [what, n, part]) => {
    text(node.children[0], what);
    text(node.children[1], n);
    attr(node, "data-part", part ?? null);
  });
}

export function drawSettings(s) {
  const rows = Object.entries({ ...s.settings, timeline: s.timeline, checkpoint: s.checkpoint, server: s.url })
    .map(([key, value]) => {
      const unit = key.endsWith("_s") ? " s" : "";
      return [key.slice(0, key.length - unit.length).replaceAll("_", " "), value === null || value === undefined ? "automatic" : `${value}${unit}`];
    });
  keyed($("settings"), rows, ([key]) => key, () => make("div", {}, make("dt"), make("dd")), (node, [key, value]) => {
    text(node.children[0], key);
    text(node.children[1], key === "checkpoint" && value === "automatic" ? "none yet" : value);
  });
}

// Fragments, members and the ledger.

import { $, attr, keyed, make, text } from "./dom.js";
import { bytes, count, duration, loss, plural, whole } from "./format.js";
import { drawDots } from "./rounds.js";

const DEPARTED_SHOWN = 20;
const PARTS = ["applied", "rejected", "discarded", "lost", "pending"];
const CONDITIONS = { live: "●", joining: "◌", stuck: "▲", gone: "✕", left: "○" };

// --- fragments --------------------------------------------------------------------------------------------

export function drawFragments(s) {
  const fragments = s.fragments ?? [];
  const newest = Math.max(0, ...fragments.map((f) => f.version));
  const oldest = Math.min(newest, ...fragments.map((f) => f.version));
  const open = new Map((s.open ?? []).map((r) => [r.fragment, r.phase]));
  attr($("fragments"), "data-many", fragments.length > 48);
  text($("fragments-note"), fragments.length
    ? `${fragments.length}, ${count(s.parameters)} parameters, ${newest === oldest ? `all at version ${whole(newest)}` : `versions ${whole(oldest)}–${whole(newest)}`}`
    : "none before version 0");
  keyed($("fragments"), fragments, (_, i) => i,
    () => make("li", {}, make("span", { class: "index" }), make("span", { class: "version" }), make("span", { class: "dots", "aria-hidden": "true" })),
    (cell, fragment) => {
      const index = fragments.indexOf(fragment);
      const [name, version, dots] = cell.children;
      text(name, index);
      if (version.textContent && version.textContent !== `v${fragment.version}`) flash(cell);
      text(version, `v${fragment.version}`);
      drawDots(dots, Math.min(fragment.in_hand, 6), Math.min(fragment.in_hand, 6));
      attr(cell, "data-phase", open.get(index) ?? "idle");
      attr(cell, "data-behind", newest - fragment.version > 1);
      attr(cell, "title", `fragment ${index}: version ${fragment.version}, ${count(fragment.size)} parameters, `
        + `${plural(fragment.in_hand, "contribution")} in hand, ${open.has(index) ? `round ${open.get(index)}` : "no round open"}`);
    });
}

function flash(node) {
  node.classList.remove("flash");
  requestAnimationFrame(() => node.classList.add("flash"));
}

// --- members ----------------------------------------------------------------------------------------------

export function drawMembers(s) {
  const rank = (m) => (["stuck", "gone"].includes(m.condition) || m.complaint ? 0 : m.role === "worker" ? 1 : 2); // trouble first
  const here = [...(s.members ?? [])].sort((a, b) => rank(a) - rank(b));
  const present = new Set(here.map((m) => m.name));
  const past = new Map(); // the last incarnation of every name that is not here
  for (const one of s.departed ?? []) if (!present.has(one.name)) past.set(one.name, one);
  const departed = [...past.values()].slice(-DEPARTED_SHOWN).reverse()
    .map((one) => ({ ...one, over: true }));
  const heartbeat = s.settings?.heartbeat_s ?? 1;
  keyed($("members"), [...here, ...departed], (m) => m.incarnation, makeMember, (row, m) => updateMember(row, m, heartbeat));
  $("members-empty").hidden = here.length + departed.length > 0;
  $("members").closest(".scroll").hidden = here.length + departed.length === 0;
  const tally = Object.keys(CONDITIONS)
    .map((condition) => [condition, [...here, ...departed].filter((m) => m.condition === condition).length])
    .filter(([, n]) => n).map(([condition, n]) => `${n} ${condition}`);
  text($("members-note"), tally.join(", "));
  const complaining = here.filter((m) => m.complaint);
  keyed($("complaints"), complaining, (m) => m.incarnation, () => make("li", { class: "isolate" }), (item, m) => text(item, m.complaint));
  $("complaints").hidden = complaining.length === 0;
}

const cell = (label, options = {}) => make("td", { role: "cell", "data-label": label, ...options });

function makeMember() {
  const number = (label) => cell(label, { class: "number" });
  return make("tr", { role: "row" },
    make("th", { role: "rowheader", scope: "row" }, make("span", { class: "name isolate" }), make("span", { class: "label isolate muted" })),
    cell("Condition", { class: "condition" }), number("Steps"), number("Step time"), number("Loss"), number("Tokens"),
    number("Merged lately"), number("Behind"), number("Last round"), number("Heard"));
}

function updateMember(row, m, heartbeat) {
  const [who, condition, steps, step, trained, tokens, lately, behind, round, heard] = row.children;
  const worker = m.role === "worker";
  text(who.children[0], m.name);
  text(who.children[1], [worker ? "" : m.role, m.label, m.device].filter(Boolean).join(" · "));
  const memory = m.memory_bytes ? `${bytes(m.memory_bytes)} of memory` : "";
  attr(who.children[1], "title", [who.children[1].textContent, memory].filter(Boolean).join(" · "));
  attr(row, "data-condition", m.condition);
  if (!condition.firstChild) condition.append(make("span", { "aria-hidden": "true", class: "glyph" }), " ", make("span"));
  text(condition.children[0], CONDITIONS[m.condition] ?? "?");
  text(condition.children[1], m.condition);
  text(steps, worker && !m.over ? whole(m.steps) : "–");
  text(step, worker && m.step_s > 0 ? duration(m.step_s) : "–");
  text(trained, worker ? loss(m.loss) : `${loss(m.heldout_loss)}${m.heldout_loss == null ? "" : " held-out"}`);
  text(tokens, worker ? count(Math.round(m.processed)) : "–");
  drawLately(lately, m);
  attr(row, "data-wasted", Boolean(m.complaint));
  text(behind, m.over ? "–" : m.behind ? plural(m.behind, "version") : "current");
  attr(behind, "data-zero", !m.behind);
  text(round, m.last_round ? whole(m.last_round) : "–");
  text(heard, m.over ? "books closed" : m.seen_s < 1.5 * heartbeat ? "now" : `${duration(m.seen_s)} ago`);
}

/** Which share of its newest tokens was merged; what became of the others, and what to do about it, in the tooltip. */
function drawLately(cell, m) {
  const share = (part) => `${Math.round(100 * m.lately[part])} %`;
  text(cell, m.lately ? share("merged") : "–");
  attr(cell, "data-zero", !m.lately);
  attr(cell, "title", m.complaint ?? (m.lately
    ? `of the tokens of its last cycles ${share("merged")} were merged, ${share("rejected")} rejected, ${share("discarded")} discarded`
    : m.role === "worker" && !m.over ? "not known before its first cycle is over" : ""));
}

// --- ledger -----------------------------------------------------------------------------------------------

export function drawLedger(s) {
  const rows = s.ledger ?? [];
  const total = { name: "all", total: true };
  for (const column of ["processed", "unexplained", ...PARTS]) total[column] = rows.reduce((sum, row) => sum + (row[column] ?? 0), 0);
  keyed($("ledger"), rows.length > 1 ? [...rows, total] : rows, (row) => (row.total ? "" : row.name), makeAccount, updateAccount);
  $("ledger-empty").hidden = rows.length > 0;
  $("ledger").closest(".scroll").hidden = rows.length === 0;
}

function makeAccount(row) {
  const bar = make("span", { class: "bar", "aria-hidden": "true" }, ...PARTS.map((part) => make("i", { "data-part": part })));
  return make("tr", { role: "row", ...(row.total ? { class: "total" } : {}) },
    make("th", { role: "rowheader", scope: "row" }, make("span", { class: "name isolate" }), bar),
    ...["Processed", "Applied", "Rejected", "Discarded", "Lost", "Pending"].map((label) => cell(label, { class: "number" })),
    cell("Adds up", { class: "sum" }));
}

function updateAccount(node, row) {
  const [who, processed, ...rest] = node.children;
  const sum = rest.pop();
  text(who.children[0], row.name);
  text(processed, whole(row.processed));
  PARTS.forEach((part, index) => {
    text(rest[index], whole(row[part]));
    attr(rest[index], "data-zero", row[part] < 0.5);
    who.children[1].children[index].style.flexGrow = Math.max(0, row[part]);
  });
  const open = row.processed - PARTS.reduce((total, part) => total + row[part], 0);
  const wrong = (row.unexplained ?? 0) > 0.01;
  const verdict = wrong ? "wrong" : Math.abs(open) >= 0.5 ? "settling" : "right";
  attr(node, "data-sum", verdict);
  text(sum, { wrong: `✕ off by ${whole(row.unexplained) === "0" ? "less than 1" : whole(row.unexplained)}`,
    settling: "… settling", right: "✓ yes" }[verdict]);
  attr(sum, "title", { wrong: "processed differs from its parts although every outcome has been read",
    settling: `${whole(Math.abs(open))} tokens have an outcome that the worker has not read yet`, right: "" }[verdict]);
}

// Rounds in flight: a slot each, with countdowns.

import { $, attr, keyed, make, text } from "./dom.js";
import { whole } from "./format.js";
import { closings, known, names } from "./known.js";

const NAMES_SHOWN = 24;

const slots = []; // one per round that may be open: it keeps showing its last round until it gets a new one

export function drawSlots(s) {
  const open = s.open ?? [];
  const room = Math.max(s.settings?.in_flight ?? 0, open.length);
  const fresh = open.filter((r) => !slots.some((slot) => slot.number === r.round));
  for (const slot of slots) slot.open = open.find((r) => r.round === slot.number) ?? null;
  for (const round of fresh) place(round.round, room).open = round;
  const shown = new Set(slots.map((slot) => slot.number));
  for (const number of [...closings.keys()].sort((a, b) => b - a).slice(0, room)) {
    const oldest = slots.filter((slot) => !slot.open).sort((a, b) => a.number - b.number)[0];
    if (!shown.has(number) && (slots.length < room || (oldest && oldest.number < number))) place(number, room);
  }
  keyed($("slots"), slots, (slot) => slot.key, makeSlot, updateSlot);
  $("open-empty").hidden = slots.length > 0;
  text($("open-note"), room ? `${open.length} of ${room} open` : "");
  if (open.length) animate();
}

function place(number, room) {
  const free = slots.filter((slot) => !slot.open).sort((a, b) => a.number - b.number)[0];
  const slot = slots.length < room || !free ? { key: `slot ${slots.length}` } : free;
  if (slot !== free) slots.push(slot);
  return Object.assign(slot, { number, open: null, graceEnds: null, deadlineEnds: null });
}

function makeSlot() {
  const meter = (name) =>
    make("div", { class: `meter ${name}` }, make("span", { class: "what" }), make("span", { class: "track", "aria-hidden": "true" },
      make("span", { class: "fill" })), make("span", { class: "left" }));
  return make("article", { class: "slot" },
    make("div", { class: "head" }, make("strong"), make("span", { class: "muted where" }), make("span", { class: "pill" })),
    make("div", { class: "quorum" }, make("span", { class: "dots", "aria-hidden": "true" }), make("span", { class: "words" })),
    make("ul", { class: "chips" }), meter("grace"), meter("deadline"), make("p", { class: "muted outcome" }));
}

function updateSlot(node, slot) {
  slot.node = node;
  const part = (name) => node.querySelector(name);
  const { open } = slot;
  const closing = closings.get(slot.number);
  const fragment = open?.fragment ?? closing?.fragment;
  const base = open?.base ?? closing?.base ?? (closing?.version ?? 1) - 1;
  const phase = open ? open.phase : closing?.kind ?? "closed";
  text(part("strong"), `Round ${whole(slot.number)}`);
  text(part(".where"), fragment === undefined ? "" : `fragment ${fragment} · v${base} → v${base + 1}`);
  text(part(".pill"), phase);
  attr(node, "data-phase", phase);
  if (open) slot.last = { arrived: open.arrived.length, quorum: open.quorum, chips: chipsOf(open) };
  if (closing && !open) slot.last = { ...slot.last, ...settled(closing, slot.last) };
  const { arrived = 0, quorum = 0, chips = [] } = slot.last ?? {};
  drawDots(part(".dots"), arrived, quorum);
  text(part(".words"), quorum ? `quorum ${arrived}/${quorum}` : "");
  attr(part(".quorum"), "data-met", arrived >= quorum);
  drawChips(part(".chips"), chips);
  text(part(".outcome"), open ? "" : closing?.reason ?? "");
  const now = performance.now();
  slot.graceEnds = open && open.grace_left_s !== null ? steady(slot.graceEnds, now + open.grace_left_s * 1000) : null;
  slot.deadlineEnds = open ? steady(slot.deadlineEnds, now + open.deadline_left_s * 1000) : null;
  part(".grace").hidden = slot.graceEnds === null;
  part(".deadline").hidden = !open || phase === "merging";
  text(part(".grace .what"), "grace");
  text(part(".deadline .what"), "deadline");
}

function chipsOf(open) {
  const missing = new Set(open.missing);
  const arrived = new Set(open.arrived);
  return [...new Set([...open.called, ...open.arrived])].sort().map((name) =>
    arrived.has(name) ? [name, "arrived"] : missing.has(name) ? [name, "missing"] : [name, "refused"]);
}

/** What a closed round's slot shows: who was merged, who was turned down. */
function settled(closing, last) {
  if (closing.kind !== "merged") return {};
  const chips = closing.verdicts.map((v) => [names.get(v.incarnation) ?? `#${v.incarnation}`, v.applied ? "arrived" : "refused"]);
  const decided = new Set(chips.map(([name]) => name));
  chips.push(...(last?.chips ?? []).filter(([name]) => !decided.has(name)));
  const applied = closing.verdicts.filter((v) => v.applied).length;
  return { chips: chips.sort(), arrived: applied, quorum: last?.quorum ?? applied };
}

export function drawDots(node, arrived, quorum) {
  const total = Math.min(Math.max(arrived, quorum), NAMES_SHOWN);
  const dots = Array.from({ length: total }, (_, i) => (i < arrived ? (i < quorum ? "full" : "extra") : "hollow"));
  keyed(node, dots, (_, i) => i, () => make("i"), (dot, kind) => attr(dot, "class", kind));
}

function drawChips(node, chips) {
  const more = chips.length > NAMES_SHOWN ? [[`and ${chips.length - NAMES_SHOWN} more`, "more"]] : [];
  keyed(node, [...chips.slice(0, NAMES_SHOWN), ...more], ([name]) => name,
    () => make("li", {}, make("span", { "aria-hidden": "true" }), make("span", { class: "isolate" }), make("span", { class: "unseen" })),
    (chip, [name, how]) => {
      attr(chip, "class", how);
      text(chip.children[0], { arrived: "✓", missing: "…", refused: "✕", more: "" }[how]);
      text(chip.children[1], name);
      text(chip.children[2], how === "more" ? "" : ` ${how}`);
    });
}

/** A countdown's end, smoothed: the server's clock moves in steps. */
const steady = (old, fresh) => (old === null || Math.abs(fresh - old) > 800 ? fresh : old + 0.25 * (fresh - old));

let animating = false;

function animate() {
  if (animating) return;
  animating = true;
  const frame = (now) => {
    const moving = slots.filter((slot) => slot.open && slot.node);
    if (!moving.length) animating = false;
    else requestAnimationFrame(frame);
    if (document.documentElement.dataset.link !== "live" || !known.status.hearing) return; // old data stands still
    for (const { open, node, graceEnds, deadlineEnds } of moving) {
      meter(node.querySelector(".grace"), graceEnds, open.grace_s, now);
      meter(node.querySelector(".deadline"), deadlineEnds, open.age_s + open.deadline_left_s, now);
    }
  };
  requestAnimationFrame(frame);
}

function meter(node, ends, total, now) {
  if (ends === null || node.hidden) return;
  const left = Math.max(0, (ends - now) / 1000);
  node.querySelector(".fill").style.transform = `scaleX(${total > 0 ? Math.min(1, left / total) : 0})`;
  text(node.querySelector(".left"), `${left.toFixed(1)} s`);
}

/** No round is in flight any more. */
export function forgetSlots() {
  slots.length = 0;
}

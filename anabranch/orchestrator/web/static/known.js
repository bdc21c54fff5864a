// What the page knows: the last picture, the newest events, and what they said about rounds and members.

const FLIGHT_KEPT = 400; // closed rounds remembered, for the slots
const EVENTS_KEPT = 200;

export const known = {
  status: null, // the last picture
  events: [], // newest first
};
export const closings = new Map(); // round: its `merged` or `abandoned` event
export const names = new Map(); // incarnation: name

let source = ""; // which life of the synchronizer it came from
let seen = new Set();

/** Whether this is another life of the synchronizer: incarnations go on, what is measured and in flight does not. */
export function enter(from) {
  if (from === source) return false;
  source = from;
  closings.clear();
  return true;
}

export function remember(picture) {
  known.status = picture;
  for (const member of picture.members ?? []) names.set(member.incarnation, member.name);
  for (const member of picture.departed ?? []) names.set(member.incarnation, member.name);
}

export function record(news, from) {
  const { events } = known;
  for (const event of news) {
    const id = `${from}-${event.number}`;
    if (seen.has(id)) continue;
    seen.add(id);
    events.unshift({ ...event, id });
    if (event.kind === "merged" || event.kind === "abandoned") closings.set(event.round, event);
    if (event.kind === "joined") names.set(event.incarnation, event.name);
  }
  if (events.length > EVENTS_KEPT) events.length = EVENTS_KEPT;
  if (seen.size > 4 * EVENTS_KEPT) seen = new Set(events.map((event) => event.id));
  for (const round of closings.keys()) if (closings.size > FLIGHT_KEPT) closings.delete(round);
  if (names.size > 5000) names.clear();
}

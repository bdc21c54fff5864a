// Numbers, durations and times as words.

const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
export const whole = (value) => grouped.format(value);

function scaled(value, units, base = 1000) {
  let [unit, size] = [0, value];
  while (size >= base * 0.9995 && unit < units.length - 1) [unit, size] = [unit + 1, size / base];
  const digits = unit === 0 && Number.isInteger(size) ? 0 : size < 10 ? 2 : size < 100 ? 1 : 0;
  return `${size.toFixed(digits)}${units[unit] && ` ${units[unit]}`}`;
}

export const count = (value) => (value < 10000 ? whole(value) : scaled(value, ["", "k", "M", "G", "T", "P", "E"]));
export const bytes = (value) => scaled(value, ["B", "kB", "MB", "GB", "TB", "PB"]);
export const percent = (share) => `${(share * 100).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;

export function loss(value) {
  if (value === null || value === undefined) return "–";
  return Math.abs(value) < 1e4 && (Math.abs(value) >= 1e-3 || value === 0) ? value.toFixed(3) : value.toExponential(2);
}

export function duration(seconds) {
  if (seconds < 0.9995) return `${(seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
  if (seconds < 99.5) return `${seconds.toFixed(1)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${Math.round(seconds / 86400)} days`;
}

export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");
export const plural = (n, one, more = `${one}s`) => `${whole(n)} ${n === 1 ? one : more}`;

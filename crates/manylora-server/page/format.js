// How numbers and adapters look: in words, and in colours that stay the same wherever an adapter is drawn.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const whole = new Intl.NumberFormat("en");

/** Bytes in the unit that leaves few digits. */
export function bytes(count) {
  let unit = 0;
  while (count >= 1024 && unit < UNITS.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${count >= 100 || unit === 0 ? Math.round(count) : count.toPrecision(3)} ${UNITS[unit]}`;
}

export const count = (value) => whole.format(value);

/** `1 adapter`, `2 adapters`. */
export const several = (value, what) => `${count(value)} ${what}${value === 1 ? "" : "s"}`;

/** Seconds in the unit that leaves few digits. */
export function seconds(value) {
  if (value >= 10) return [value.toFixed(0), "s"];
  if (value >= 1) return [value.toFixed(2), "s"];
  return [(value * 1000).toFixed(value >= 0.01 ? 0 : 1), "ms"];
}

/** A version as people tell versions apart. */
export const short = (version) => (version ? version.slice(0, 12) : "not read yet");

/** Where an adapter is, in words. */
export function place(adapter) {
  if (adapter.loading) return "loading";
  if (adapter.tier === null) return "registered";
  return adapter.tier === "device" ? "on the card" : "in memory";
}

/** Gives an element an adapter's colour: the style sheets make light and dark ones of it. */
export function colour(element, name) {
  let hash = 2166136261;
  for (let index = 0; index < name.length; index += 1) {
    hash = Math.imul(hash ^ name.charCodeAt(index), 16777619);
  }
  // Spread by one more step, since names often differ in their last character; the blues are those of the KV cache.
  hash = Math.imul(hash ^ (hash >>> 15), 2654435761) >>> 0;
  element.style.setProperty("--hue", String((290 + (hash % 29) * 10) % 360));
  element.style.setProperty("--shift", String((((hash >>> 8) % 3) - 1) * 0.07));
}

/** A new element with classes, properties and children; strings become text, never markup. */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

/** The same in SVG, with attributes. */
export function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Sets a text where it differs, so that nobody who listens is told the same again. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

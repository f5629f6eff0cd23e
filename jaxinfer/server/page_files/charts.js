// Small drawings on canvases, in the colours of the style sheet.

const ratio = () => window.devicePixelRatio || 1;

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** The canvas's context in CSS pixels, cleared, and its size. */
export function prepare(canvas, height = canvas.clientHeight) {
  const width = canvas.clientWidth;
  const [w, h] = [Math.round(width * ratio()), Math.round(height * ratio())];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(ratio(), 0, 0, ratio(), 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/** 1, 2 or 5 times a power of ten, at least `value`. */
export function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  return power * [1, 2, 5, 10].find((step) => step * power >= value * (1 - 1e-9));
}

function frame({ context, width, height }, top, label) {
  context.strokeStyle = color("line");
  context.lineWidth = 1;
  context.beginPath();
  for (const y of [0.5, height - 0.5]) {
    context.moveTo(0, y);
    context.lineTo(width, y);
  }
  context.stroke();
  if (!label) return;
  context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  context.fillStyle = color("muted");
  context.textBaseline = "top";
  context.textAlign = "left";
  context.fillText(label(top), 2, 4);
}

/** `points`: [seconds ago, value], oldest first; a value of null is a gap. */
export function drawLine(canvas, points, span, stroke, label) {
  const area = prepare(canvas);
  const { context, width, height } = area;
  const top = niceCeiling(Math.max(1, ...points.map(([, value]) => value ?? 0)));
  const x = (ago) => width * (1 - ago / span);
  const y = (value) => height - 1 - (height - 18) * (value / top);
  for (const filled of [true, false]) {
    let first = null;
    let last = null;
    context.beginPath();
    const close = () => {
      if (!filled || first === null) return;
      context.lineTo(last, height);
      context.lineTo(first, height);
    };
    for (const [ago, value] of points) {
      if (value === null) {
        close();
        first = null;
        continue;
      }
      last = x(ago);
      if (first === null) context.moveTo((first = last), y(value));
      else context.lineTo(last, y(value));
    }
    close();
    context.globalAlpha = filled ? 0.15 : 1;
    context.fillStyle = context.strokeStyle = stroke;
    context.lineWidth = 1.5;
    if (filled) context.fill();
    else context.stroke();
  }
  context.globalAlpha = 1;
  frame(area, top, label);
}

/** Bars from left to right, each a stack of [value, colour]; they end at the right edge. `slots`: how many fit. */
export function drawStacks(canvas, stacks, slots, label) {
  const area = prepare(canvas);
  const { context, width, height } = area;
  const totals = stacks.map((stack) => stack.reduce((sum, [value]) => sum + value, 0));
  const top = niceCeiling(Math.max(1, ...totals));
  const step = width / slots;
  stacks.forEach((stack, i) => {
    let y = height - 1;
    const x = width - (stacks.length - i) * step;
    for (const [value, fill] of stack) {
      if (!value) continue;
      const h = Math.max(1, (height - 18) * (value / top));
      context.fillStyle = fill;
      context.fillRect(x, y - h, Math.max(step - 1, 1), h);
      y -= h;
    }
  });
  frame(area, top, label);
}

/** Bars with the bounds between them written below. */
export function drawHistogram(canvas, counts, names, fill) {
  const { context, width, height } = prepare(canvas);
  const top = Math.max(1, ...counts);
  const step = width / Math.max(counts.length, 1);
  const floor = height - 16;
  context.font = `10px ${getComputedStyle(document.body).fontFamily}`;
  context.textBaseline = "bottom";
  context.textAlign = "center";
  counts.forEach((value, i) => {
    const h = value ? Math.max(2, (floor - 4) * (value / top)) : 0;
    context.fillStyle = fill;
    context.fillRect(i * step + 1, floor - h, step - 2, h);
  });
  context.fillStyle = color("line");
  context.fillRect(0, floor, width, 1);
  context.fillStyle = color("muted");
  let free = 0;
  names.forEach((name, i) => {
    const x = (i + 1) * step;
    const half = context.measureText(name).width / 2 + 3;
    if (x - half < free || x + half > width) return;
    context.fillText(name, x, height);
    free = x + half;
  });
}

const [MIN_SIDE, MAX_SIDE] = [9, 20];
const GRID_HEIGHT = 260;

/** A grid of `count` square cells in a width: as large as they can be in about this height. */
export function gridLayout(count, width) {
  for (let side = MAX_SIDE; ; side--) {
    const columns = Math.max(1, Math.min(count, Math.floor(width / side)));
    const rows = Math.ceil(count / columns);
    if (side === MIN_SIDE || rows * side <= GRID_HEIGHT) return { side, columns, rows };
  }
}

/** `cells[i]`: [share, colour] from the bottom up; what is left of a cell is hollow. `cursor` is framed. */
export function drawGrid(canvas, cells, cursor) {
  const { side, columns, rows } = gridLayout(cells.length, canvas.clientWidth);
  const height = rows * side;
  if (canvas.style.height !== `${height}px`) canvas.style.height = `${height}px`;
  const { context } = prepare(canvas, height);
  const inner = side - 2;
  const hollow = color("free");
  cells.forEach((parts, i) => {
    const x = (i % columns) * side;
    let y = Math.floor(i / columns) * side + inner;
    context.fillStyle = hollow;
    context.fillRect(x, y - inner, inner, inner);
    for (const [share, fill] of parts) {
      if (!share) continue;
      const h = share === 1 ? inner : Math.max(1, Math.round(inner * share));
      context.fillStyle = fill;
      context.fillRect(x, y - h, inner, h);
      y -= h;
    }
  });
  if (cursor === null) return;
  context.strokeStyle = color("ink");
  context.lineWidth = 2;
  context.strokeRect((cursor % columns) * side, Math.floor(cursor / columns) * side, inner, inner);
}

// The block pool as a grid: a cell is a block, or several where there are many.

import { color, drawGrid, gridLayout } from "./charts.js";
import { byId, count, setText } from "./dom.js";

const STATES = ["cached", "in_use", "shared"];
const NAMES = { free: "free", cached: "cached", in_use: "in use", shared: "shared" };

const canvas = byId("blocks");
let pool = null;
let cursor = null;

export function startBlocks() {
  const onPointer = (event) => {
    if (!pool) return;
    const { side, columns } = gridLayout(numCells(), canvas.clientWidth);
    const [column, row] = [Math.floor(event.offsetX / side), Math.floor(event.offsetY / side)];
    const cell = row * columns + column;
    point(column < columns && cell < numCells() ? cell : null);
  };
  canvas.addEventListener("pointerdown", onPointer);
  canvas.addEventListener("pointermove", onPointer);
  canvas.addEventListener("pointerleave", (event) => event.pointerType === "touch" || point(null));
  canvas.addEventListener("blur", () => point(null));
  canvas.addEventListener("keydown", (event) => {
    if (!pool) return;
    const { columns } = gridLayout(numCells(), canvas.clientWidth);
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -Infinity, End: Infinity };
    const move = moves[event.key];
    if (move === undefined) return;
    event.preventDefault();
    point(Math.min(Math.max((cursor ?? 0) + (cursor === null && Number.isFinite(move) ? 0 : move), 0), numCells() - 1));
  });
}

const numCells = () => pool.cells.free.length;

function point(cell) {
  cursor = cell;
  if (pool) draw();
}

export function showBlocks({ blocks, limits }) {
  pool = blocks;
  setText(byId("block-size"), count(limits.block_size));
  const each = pool.cells.blocks_per_cell;
  setText(byId("cell-note"), each === 1 ? "A square is a block." : `A square is ${count(each)} blocks, filled by how many are in which state.`);
  for (const state of Object.keys(NAMES)) setText(byId(`n-${state.replace("_", "-")}`), count(pool[state]));
  const words = Object.entries(NAMES).map(([state, name]) => `${count(pool[state])} ${name}`);
  canvas.setAttribute("aria-label", `${count(pool.num_blocks)} blocks: ${words.join(", ")}`);
  draw();
}

function draw() {
  const fills = Object.fromEntries(STATES.map((state) => [state, color(state.replace("_", "-"))]));
  const { cells } = pool;
  const parts = cells.free.map((free, i) => {
    const total = free + cells.cached[i] + cells.in_use[i] + cells.shared[i];
    // What is held stands below what is merely kept.
    return ["shared", "in_use", "cached"].map((state) => [cells[state][i] / total, fills[state]]);
  });
  if (cursor !== null && cursor >= parts.length) cursor = null;
  drawGrid(canvas, parts, cursor);
  setText(byId("block-detail"), cursor === null ? "Point at a block, or move with the arrow keys." : describe(cursor));
}

function describe(cell) {
  const each = pool.cells.blocks_per_cell;
  const first = cell * each + 1;
  const last = Math.min(first + each - 1, pool.num_blocks);
  const where = first === last ? `Block ${count(first)}` : `Blocks ${count(first)} to ${count(last)}`;
  const held = Object.entries(NAMES).filter(([state]) => pool.cells[state][cell]);
  const words = held.map(([state, name]) => (first === last ? name : `${count(pool.cells[state][cell])} ${name}`));
  return `${where}: ${words.join(", ")}`;
}

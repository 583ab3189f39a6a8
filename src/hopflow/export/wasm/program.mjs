/** A program that has stopped. `kind` is the class of the error in Python, and the
 * message its text, with the line of the function that was exported. */
export class ProgramError extends Error {
  constructor(text, status) {
    super(text);
    this.name = "ProgramError";
    this.kind = text.slice(0, text.indexOf(":"));
    this.status = status;
  }
}

const ARRAYS = {
  bool: Uint8Array,
  int8: Int8Array,
  int16: Int16Array,
  int32: Int32Array,
  int64: BigInt64Array,
  uint8: Uint8Array,
  uint16: Uint16Array,
  uint32: Uint32Array,
  uint64: BigUint64Array,
  float16: globalThis.Float16Array ?? Uint16Array,
  bfloat16: Uint16Array, // its bits
  float32: Float32Array,
  float64: Float64Array,
};
const ALIGNMENT = 64;
const PAGE = 65536;
const OUT_OF_MEMORY = -2;
const MOST_PAGES = 65536;

/** What the program takes and gives, in the order of its function. */
export const signature = PROGRAM;

const { name: NAME, parameters: PARAMETERS, sources: SOURCES } = PROGRAM;
const INPUTS = PARAMETERS.filter((p) => p.role === "input" || p.role === "updated");
const ARGUMENTS = INPUTS.filter((p) => !(p.name in PROGRAM.initial));
const NUMBERS = PARAMETERS.filter((p) => p.role === "number");
const SIZES = PARAMETERS.filter((p) => p.role === "size");
const RESULTS = PARAMETERS.filter((p) => p.role === "output" || p.role === "made");
const SHAPED = PARAMETERS.filter((p) => p.is_shaped);
const OF_SIZES = PARAMETERS.filter((p) => p.is_of_sizes);

/** Load the program.
 *
 * @param source of the module: its bytes, a URL, a compiled `WebAssembly.Module`; if
 *   nothing is given, the file beside this one.
 */
export async function load(source) {
  const module =
    source instanceof WebAssembly.Module
      ? source
      : await WebAssembly.compile(await bytesOf(source));
  return new Program(await WebAssembly.instantiate(module, IMPORTS));
}

// What the module leaves to JavaScript: a remainder is exact, as `fmod` is.
const IMPORTS = { env: { fmod: (x, y) => x % y, fmodf: (x, y) => x % y } };

async function bytesOf(source) {
  if (source instanceof ArrayBuffer || ArrayBuffer.isView(source)) return source;
  const url = new URL(source ?? `./${NAME}.wasm`, import.meta.url);
  if (url.protocol === "file:" && typeof process === "object") {
    const files = await import("node:fs/promises");
    return files.readFile(url);
  }
  const response = await fetch(url);
  if (!response.ok) throw new Error(`${NAME}: ${url} has the status ${response.status}`);
  return response.arrayBuffer();
}

class Program {
  #exports;
  #top; // where free memory begins, while a call allocates it

  constructor(instance) {
    this.#exports = instance.exports;
    this.signature = signature;
    /** What calls read and write besides their arguments. */
    this.state = {};
    for (const p of INPUTS) {
      if (!(p.name in PROGRAM.initial)) continue;
      const address = this.#exports[PROGRAM.initial[p.name]].value;
      this.state[p.name] = this.#read(p, address, p.shape);
    }
  }

  /** Run the program once.
   *
   * @param given arguments by name: typed arrays, whose property `shape` tells the
   *   sizes of more than one axis; numbers.
   * @returns the results by name: typed arrays with a property `shape`, and numbers.
   * @throws ProgramError if the program stops; TypeError and RangeError for arguments
   *   that it cannot take. Then no argument has been written.
   */
  run(given = {}) {
    const values = read(given, this.state);
    this.#top = this.#exports.__heap_base.value;
    const passed = new Map();
    for (const p of [...SIZES, ...NUMBERS]) passed.set(p, [values.get(p)]);
    for (const p of INPUTS) passed.set(p, [this.#write(values.get(p).data)]);
    const ofSizes = OF_SIZES.flatMap((p) => passed.get(p));
    const shapes = this.#shapes(ofSizes);
    const room = this.#exports[`${NAME}_workspace`](...ofSizes);
    if (room < 0n) this.#stop(Number(-room));
    for (const p of RESULTS) passed.set(p, this.#allocateResult(p, shapes.get(p)));
    this.#call(passed, Number(room));
    for (const p of INPUTS) {
      if (p.role !== "updated") continue;
      const { data } = values.get(p);
      data.set(this.#view(data, passed.get(p)[0]));
    }
    const results = RESULTS.map((p) => [p.name, this.#result(p, passed, shapes)]);
    return Object.fromEntries(results);
  }

  #call(passed, room) {
    const details = this.#allocate(16);
    const start = this.#top;
    const given = PARAMETERS.flatMap((p) => passed.get(p));
    for (let bytes = room; ; bytes = Math.max(2 * bytes, PAGE)) {
      this.#top = start;
      const workspace = this.#allocate(bytes);
      const status = this.#exports[NAME](...given, workspace, BigInt(bytes), details);
      if (status === 0) return;
      if (status !== OUT_OF_MEMORY) this.#stop(status, details);
    }
  }

  /** The shapes of the results, as far as they are known before a call. */
  #shapes(ofSizes) {
    const found = new Map(RESULTS.map((p) => [p, p.shape]));
    if (SHAPED.length === 0) return found;
    const places = SHAPED.map((p) => this.#allocate(8 * p.shape.length));
    const status = this.#exports[`${NAME}_sizes`](...ofSizes, ...places);
    if (status !== 0) this.#stop(status);
    SHAPED.forEach((p, k) => found.set(p, this.#numbers(places[k], p.shape.length)));
    return found;
  }

  #allocateResult(p, shape) {
    if (p.role === "output") return [this.#allocate(product(shape) * bytesPer(p))];
    return [this.#allocate(4), this.#allocate(8 * p.shape.length)];
  }

  #result(p, passed, shapes) {
    let [address, place] = passed.get(p);
    let shape = shapes.get(p);
    if (p.role === "made") {
      address = new Uint32Array(this.#buffer, address, 1)[0];
      shape = this.#numbers(place, shape.length);
    }
    const found = this.#read(p, address, shape);
    if (!p.is_number) return found;
    return p.dtype === "bool" ? found[0] !== 0 : found[0];
  }

  /** Throw the error of a status. */
  #stop(status, details) {
    const [first, second] = details ? new BigInt64Array(this.#buffer, details, 2) : [];
    const numbers = { "{0}": first, "{1}": second };
    const bytes = new Uint8Array(this.#buffer, this.#exports[`${NAME}_error_text`](status));
    const text = new TextDecoder().decode(bytes.slice(0, bytes.indexOf(0)));
    const filled = details ? text.replace(/\{[01]\}/g, (place) => numbers[place]) : text;
    throw new ProgramError(filled, status);
  }

  // --- memory: each call begins anew, behind what the module has in it

  get #buffer() {
    return this.#exports.memory.buffer;
  }

  #allocate(bytes) {
    const start = Math.ceil(this.#top / ALIGNMENT) * ALIGNMENT;
    const end = start + bytes;
    const pages = Math.ceil((end - this.#buffer.byteLength) / PAGE);
    if (pages > 0) this.#grow(pages, end);
    this.#top = end;
    return start;
  }

  #grow(pages, end) {
    try {
      if (end > MOST_PAGES * PAGE) throw new RangeError("more than 32 bits address");
      this.#exports.memory.grow(pages);
    } catch (error) {
      throw new RangeError(`${NAME}: no memory of ${end} bytes: ${error.message}`);
    }
  }

  #write(data) {
    const address = this.#allocate(data.byteLength);
    this.#view(data, address).set(data);
    return address;
  }

  /** As many elements of the memory as an array has, of its type. */
  #view(data, address) {
    const Type = globalThis[data[Symbol.toStringTag]];
    return new Type(this.#buffer, address, data.length);
  }

  /** A copy of an array in the memory. */
  #read(p, address, shape) {
    const view = new ARRAYS[p.dtype](this.#buffer, address, product(shape));
    return shaped(view.slice(), shape);
  }

  #numbers(address, count) {
    return Array.from(new BigInt64Array(this.#buffer, address, count), Number);
  }
}

// --- arguments -----------------------------------------------------------------------

/** The values of all sizes, numbers and arrays that a call takes. */
function read(given, state) {
  const known = [...ARGUMENTS, ...NUMBERS, ...SIZES].map((p) => p.name);
  if (given === null || typeof given !== "object") {
    throw new TypeError(`${NAME}: arguments are an object: {${known.join(", ")}}`);
  }
  for (const name of Object.keys(given)) {
    if (known.includes(name)) continue;
    throw new TypeError(`${NAME}: no argument \`${name}\`; there are ${known.join(", ")}`);
  }
  const values = new Map();
  const sizes = {};
  for (const p of SIZES) {
    if (given[p.name] !== undefined) sizes[p.name] = Number(integer(p, given[p.name]));
  }
  for (const p of NUMBERS) {
    values.set(p, number(p, required(p, given)));
    sizes[p.name] = Number(values.get(p));
  }
  const arrays = INPUTS.map((p) => {
    const value = p.name in state ? state[p.name] : required(p, given);
    return [p, array(p, value), value?.shape];
  });
  // Those of a known shape first: they tell the sizes of the others.
  for (const isTold of [true, false]) {
    for (const [p, data, shape] of arrays) {
      if ((shape !== undefined || p.shape.length < 2) !== isTold) continue;
      const found = shapeOf(p, data, shape, sizes);
      tellSizes(p, found, sizes);
      values.set(p, { data, shape: found });
    }
  }
  for (const p of SIZES) {
    if (sizes[p.name] === undefined) {
      throw new TypeError(`${NAME}: the size \`${p.name}\` is missing: no array tells it`);
    }
    values.set(p, BigInt(sizes[p.name]));
  }
  for (const p of INPUTS) checkShape(p, values.get(p).shape, sizes);
  return values;
}

function required(p, given) {
  if (given[p.name] === undefined) {
    throw new TypeError(`${NAME}: the argument \`${p.name}\` is missing (${p.text})`);
  }
  return given[p.name];
}

function integer(p, value) {
  const isWhole = typeof value === "bigint" || Number.isInteger(value);
  const found = isWhole ? BigInt(value) : undefined;
  if (found === undefined || BigInt.asIntN(64, found) !== found) {
    throw new TypeError(`${NAME}: \`${p.name}\` must be an integer, and is ${said(value)}`);
  }
  return found;
}

function number(p, value) {
  if (p.dtype === "int64") return integer(p, value);
  if (typeof value !== "number") {
    throw new TypeError(`${NAME}: \`${p.name}\` must be a number, and is ${said(value)}`);
  }
  return value;
}

/** A value as a typed array of the dtype of a parameter. */
function array(p, value) {
  const isScalar = ["number", "bigint", "boolean"].includes(typeof value);
  if (isScalar && p.shape.length === 0 && p.role === "input") return scalar(p, value);
  const tag = ArrayBuffer.isView(value) ? value[Symbol.toStringTag] : "";
  const wanted = ARRAYS[p.dtype].name;
  const isOf = tag === wanted || (p.dtype === "float16" && tag === "Uint16Array");
  if (!isOf) {
    throw new TypeError(
      `${NAME}: \`${p.name}\` must be a ${wanted} (${p.text}), and is ${said(value)}`,
    );
  }
  if (p.dtype === "bool") {
    const other = value.find((x) => x > 1);
    if (other !== undefined) {
      throw new TypeError(`${NAME}: \`${p.name}\` is of 0 and 1, and has ${other}`);
    }
  }
  return value;
}

function scalar(p, value) {
  const holder = new ARRAYS[p.dtype](1);
  const isBits = p.dtype === "bfloat16" || (p.dtype === "float16" && holder instanceof Uint16Array);
  const isBig = p.dtype === "int64" || p.dtype === "uint64";
  const isFloat = p.dtype.startsWith("float");
  const fits =
    !isBits &&
    (p.dtype === "bool"
      ? typeof value === "boolean"
      : isFloat
        ? typeof value === "number"
        : typeof value === "bigint" || Number.isInteger(value));
  if (fits) {
    holder[0] = isBig ? BigInt(value) : isFloat ? value : Number(value);
    if (isFloat || p.dtype === "bool" || BigInt(holder[0]) === BigInt(value)) return holder;
  }
  throw new TypeError(`${NAME}: \`${p.name}\` (${p.text}) cannot be ${said(value)}`);
}

/** The shape of an array; if it does not tell, one size may follow from the others. */
function shapeOf(p, data, given, sizes) {
  const rank = p.shape.length;
  let shape = given === undefined ? undefined : Array.from(given, Number);
  if (shape === undefined && rank === 1) shape = [data.length];
  if (shape === undefined) {
    const axes = p.shape.map((axis) => evaluate(axis, sizes));
    const open = axes.flatMap((n, k) => (n === undefined ? [k] : []));
    const rest = axes.reduce((total, n) => total * (n ?? 1), 1);
    if (open.length > 1 || (open.length === 1 && rest === 0)) {
      throw new TypeError(`${NAME}: \`${p.name}\` needs a property \`shape\` (${p.text})`);
    }
    if (open.length === 1) axes[open[0]] = data.length / rest;
    shape = axes;
  }
  const isWhole = shape.every((n) => Number.isSafeInteger(n) && n >= 0);
  if (shape.length !== rank || !isWhole || product(shape) !== data.length) {
    throw new RangeError(
      `${NAME}: \`${p.name}\` has ${data.length} elements of the shape ` +
        `[${shape.join(", ")}], and must be ${p.text}`,
    );
  }
  return shape;
}

/** Note what the shape of an array tells of sizes. */
function tellSizes(p, shape, sizes) {
  p.shape.forEach((axis, k) => {
    if (typeof axis === "string") sizes[axis] ??= shape[k];
  });
  for (const [name, { input, axis, factor, offset }] of Object.entries(SOURCES)) {
    if (input === p.name) sizes[name] ??= Math.floor((shape[axis] - offset) / factor);
  }
}

function checkShape(p, shape, sizes) {
  p.shape.forEach((axis, k) => {
    const wanted = evaluate(axis, sizes);
    if (wanted === undefined || wanted === shape[k]) return;
    throw new RangeError(
      `${NAME}: \`${p.name}\` must be ${p.text}, and its axis ${k} has ${shape[k]} ` +
        `elements instead of ${wanted}`,
    );
  });
}

const OPERATIONS = {
  "+": (args) => args.reduce((x, y) => x + y, 0),
  "*": (args) => args.reduce((x, y) => x * y, 1),
  "//": ([x, y]) => Math.floor(x / y),
  "%": ([x, y]) => x - y * Math.floor(x / y),
  min: (args) => Math.min(...args),
  max: (args) => Math.max(...args),
};

/** The value of a size; undefined: it depends on something that is not known. */
function evaluate(size, sizes) {
  if (typeof size === "number") return size;
  if (typeof size === "string") return sizes[size];
  const args = size?.args.map((arg) => evaluate(arg, sizes)) ?? [undefined];
  if (args.includes(undefined)) return undefined;
  return OPERATIONS[size.op]?.(args);
}

// --- arrays --------------------------------------------------------------------------

const product = (shape) => shape.reduce((x, y) => x * y, 1);
const bytesPer = (p) => ARRAYS[p.dtype].BYTES_PER_ELEMENT;
const shaped = (array, shape) => Object.assign(array, { shape: [...shape] });

function said(value) {
  if (value === null || value === undefined) return String(value);
  return typeof value === "object" ? `a ${value.constructor?.name}` : `the ${typeof value} ${value}`;
}

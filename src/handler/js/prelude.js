// Makes one realm safe for handlers: runs once in each, before any module, with the engine's own objects untouched.
//
// Afterwards nothing that two commands share can be changed: the intrinsics and the global object are frozen, code
// cannot be made from strings, and the clock and the dice are those of the command.
(function (random, log) {
  "use strict";
  const { apply, construct, defineProperty, deleteProperty, getOwnPropertyDescriptor, getPrototypeOf, ownKeys } = Reflect;
  const { freeze } = Object;

  // What would observe other threads, the garbage collector or the job queue has no place here.
  for (const name of [
    "eval", "Atomics", "SharedArrayBuffer", "WeakRef", "FinalizationRegistry", "queueMicrotask", "performance", "DOMException", "navigator",
  ]) {
    deleteProperty(globalThis, name);
  }
  // Accessors of something that would last from one command to the next.
  deleteProperty(Error, "stackTraceLimit");
  deleteProperty(Error, "prepareStackTrace");
  // With this accessor gone, "__proto__" is a key like any other: `users[name] = …` holds for every name.
  deleteProperty(Object.prototype, "__proto__");

  for (const sample of [function () {}, async function () {}, function* () {}, async function* () {}]) {
    const prototype = getPrototypeOf(sample);
    const Function = function Function() {
      throw new TypeError("code cannot be made from strings here");
    };
    defineProperty(Function, "prototype", { value: prototype, writable: false });
    defineProperty(prototype, "constructor", { value: Function });
    if (prototype === globalThis.Function.prototype) {
      globalThis.Function = Function;
    }
  }

  // The command's time; none while a module is evaluated, so that it is the same for every command.
  let now;
  const time = () => {
    if (now === undefined) {
      throw new TypeError("the time is known only while a command runs");
    }
    return now;
  };
  const EngineDate = Date;
  const CommandDate = function Date(...parts) {
    if (new.target === undefined) {
      return new EngineDate(time()).toString();
    }
    return construct(EngineDate, parts.length === 0 ? [time()] : parts, new.target);
  };
  defineProperty(CommandDate, "length", { value: 7 });
  defineProperty(CommandDate, "prototype", { value: EngineDate.prototype, writable: false });
  for (const [name, value] of [["now", { now: () => time() }.now], ["parse", EngineDate.parse], ["UTC", EngineDate.UTC]]) {
    defineProperty(CommandDate, name, { value, writable: true, configurable: true });
  }
  defineProperty(EngineDate.prototype, "constructor", { value: CommandDate });
  defineProperty(globalThis, "Date", { value: CommandDate });
  defineProperty(Math, "random", { value: random });

  // A business rule's "no". Only what `reject` made is one: a private name cannot be forged.
  const codePattern = /^[A-Za-z][A-Za-z0-9_.:-]{0,63}$/;
  class Rejection {
    #made;
    constructor(code, message, details) {
      if (typeof code !== "string" || !codePattern.test(code)) {
        throw new TypeError("reject: the code must be a letter followed by at most 63 letters, digits and _ . : -");
      }
      if (typeof message !== "string") {
        throw new TypeError("reject: the message must be a string");
      }
      this.code = code;
      this.message = message;
      this.details = details;
      freeze(this);
    }
    static isOne(value) {
      return typeof value === "object" && value !== null && #made in value;
    }
    toString() {
      return `rejection ${this.code}: ${this.message}`;
    }
  }
  const define = (name, value) => defineProperty(globalThis, name, { value, writable: false, enumerable: false, configurable: false });
  define("reject", function reject(code, message, details) {
    return new Rejection(code, message, details);
  });

  const show = (value) => {
    if (typeof value === "string") {
      return value;
    }
    if (value instanceof Error) {
      return `${value}\n${value.stack}`;
    }
    try {
      return JSON.stringify(value, (_, part) => (typeof part === "bigint" ? `${part}n` : part)) ?? String(value);
    } catch {
      return String(value);
    }
  };
  const console = {};
  for (const level of ["debug", "log", "info", "warn", "error", "trace"]) {
    console[level] = { [level]: (...values) => log(level, values.map(show).join(" ")) }[level];
  }
  define("console", console);

  // Freezing a prototype also forbids *assigning* a property of that name to whatever inherits from it
  // (`state.toString = 1`, `this.name = "X"` in a class of errors). As an accessor the property can still be
  // overridden by assignment, and still not be changed.
  const allowOverride = (prototype, names) => {
    for (const name of names) {
      const { value, writable, enumerable, configurable } = getOwnPropertyDescriptor(prototype, name) ?? {};
      if (!writable || !configurable) {
        continue;
      }
      defineProperty(prototype, name, {
        get: () => value,
        set(assigned) {
          if (this === prototype) {
            throw new TypeError(`'${String(name)}' is read-only`);
          }
          if (!defineProperty(this, name, { value: assigned, writable: true, enumerable: true, configurable: true })) {
            throw new TypeError(`'${String(name)}' cannot be set`);
          }
        },
        enumerable,
        configurable,
      });
    }
  };
  allowOverride(Object.prototype, ownKeys(Object.prototype));
  for (const name of ownKeys(globalThis)) {
    if (typeof name === "string" && name.endsWith("Error")) {
      const { prototype } = globalThis[name];
      allowOverride(prototype, ownKeys(prototype));
    }
  }
  for (const { prototype } of [Function, Array, EngineDate, Promise, Map, Set]) {
    allowOverride(prototype, ["constructor", "toString"]);
  }

  // Freezes a value and all that can be reached from it.
  const hardened = new WeakSet();
  let areEngines = true;
  const isObject = (value) => (typeof value === "object" && value !== null) || typeof value === "function";
  const harden = (root) => {
    if (!isObject(root)) {
      return;
    }
    const queue = [root];
    for (let at = 0; at < queue.length; at += 1) {
      const value = queue[at];
      if (hardened.has(value)) {
        continue;
      }
      hardened.add(value);
      // The elements of a typed array cannot be frozen.
      if (!ArrayBuffer.isView(value)) {
        freeze(value);
      }
      const prototype = getPrototypeOf(value);
      if (prototype !== null && !hardened.has(prototype)) {
        queue.push(prototype);
      }
      const keys = ownKeys(value);
      const isFunction = typeof value === "function";
      for (let index = 0; index < keys.length; index += 1) {
        const key = keys[index];
        // Nearly all of the engine's own objects are functions with nothing but these two, a number and a string.
        if (isFunction && areEngines && (key === "length" || key === "name")) {
          continue;
        }
        const { value: member, get, set } = getOwnPropertyDescriptor(value, key);
        for (const part of [member, get, set]) {
          if (isObject(part)) {
            queue.push(part);
          }
        }
      }
    }
  };
  const hidden = [
    [].values(), ""[Symbol.iterator](), new Map().entries(), new Set().entries(), "".matchAll(/a/g), (function* () {})(), (async function* () {})(),
    [].values().map((value) => value), Iterator.from({ next() {} }), async function () {}, Rejection, random,
  ];
  harden(globalThis);
  hidden.forEach(harden);
  areEngines = false;

  // Evaluates a module anew, from the functions of its files, the last of which is its own. Gives one of its commands.
  const renew = (files, name) => {
    now = undefined;
    const made = [];
    const importFile = (place) => {
      if (made[place] === undefined) {
        const file = files[place];
        made[place] = freeze(file(importFile));
      }
      return made[place];
    };
    const file = files[files.length - 1];
    const command = file(importFile).commands[name];
    return [command.handle, command];
  };

  // Runs one command: [true, response, state], or [false, code, message, details]; whatever else is thrown is a failure.
  const invoke = (handle, command, state, request, entityId, version, commandId, commandTime) => {
    now = commandTime;
    let isRunning = true;
    const context = freeze({
      entityId,
      version,
      commandId,
      now: commandTime,
      random,
      replaceState(value) {
        if (!isRunning) {
          throw new TypeError("replaceState: the command is over");
        }
        state = value;
      },
    });
    try {
      const response = apply(handle, command, [state, request, context]);
      isRunning = false;
      if (Rejection.isOne(response)) {
        // Taken for a response it would commit what the handler meant to refuse.
        throw new TypeError("the handler returned reject(...) instead of throwing it");
      }
      return [true, response, state];
    } catch (thrown) {
      isRunning = false;
      if (Rejection.isOne(thrown)) {
        return [false, thrown.code, thrown.message, thrown.details];
      }
      throw thrown;
    }
  };

  // What JSON shows of an object that is no plain one: the primitive in a wrapper, nothing of a collection (undefined), or itself.
  const collections = [getOwnPropertyDescriptor(Map.prototype, "size").get, getOwnPropertyDescriptor(Set.prototype, "size").get];
  const wrappers = [Number.prototype.valueOf, String.prototype.valueOf, Boolean.prototype.valueOf, BigInt.prototype.valueOf];
  const unbox = (value) => {
    for (const method of collections) {
      try {
        apply(method, value, []);
        return undefined;
      } catch {}
    }
    for (const method of wrappers) {
      try {
        return apply(method, value, []);
      } catch {}
    }
    return value;
  };

  return { renew, invoke, unbox };
});

// Lets a handler change a large document that stays in the engine, and tells what it changed. Runs once in a realm that needs it, after the
// prelude: all intrinsics are frozen, so they are what they seem.
//
// A handler gets proxies, made for its command alone, and never an object of the document itself. Changes are noted, with what was there
// before, and applied to the document at once, so that the engine's own functions work on it. At the end all of them are undone,
// whatever came of the command; of one that was accepted the changes are applied again as texts that were read anew. So nothing of the
// handler stays in the document, and a value that it put in two places becomes two.
(function () {
  "use strict";
  const { defineProperty, deleteProperty, get, getOwnPropertyDescriptor, getPrototypeOf, ownKeys, set } = Reflect;
  const { hasOwn } = Object;
  const { isArray } = Array;

  // What a slot held that was not there.
  const ABSENT = Symbol("absent");
  // An array of which more than this, and more than half, has changed is told as a whole.
  const EDITS_MAX = 32;

  // Objects whose number of keys is known (else -1), or whose keys are not in the order of their text.
  const infos = new WeakMap();
  const infoOf = (raw) => {
    let info = infos.get(raw);
    if (info === undefined) {
      info = { count: -1, isDisordered: false };
      infos.set(raw, info);
    }
    return info;
  };
  const isObject = (value) => (typeof value === "object" && value !== null) || typeof value === "function";
  const define = (raw, key, value) => defineProperty(raw, key, { value, writable: true, enumerable: true, configurable: true });
  const now = (raw, key) => (hasOwn(raw, key) ? raw[key] : ABSENT);

  // Keys are ordered by their UTF-8 bytes; the engine compares UTF-16 units, which differs where there are surrogates.
  const surrogate = /[\ud800-\udfff]/;
  const rank = (unit) => (unit >= 0xe000 ? unit - 0x800 : unit >= 0xd800 ? unit + 0x2000 : unit);
  const byCodePoint = (a, b) => {
    const length = a.length < b.length ? a.length : b.length;
    for (let at = 0; at < length; at += 1) {
      const difference = rank(a.charCodeAt(at)) - rank(b.charCodeAt(at));
      if (difference !== 0) {
        return difference;
      }
    }
    return a.length - b.length;
  };

  // Gives an object the order of keys that it would have, had it been read from its text: those in `late` were added after that.
  const reorder = (raw, late) => {
    const keys = ownKeys(raw);
    const isLate = (key) => late !== null && late.has(key);
    const early = keys.filter((key) => !isLate(key));
    early.sort(early.some((key) => surrogate.test(key)) ? byCodePoint : undefined);
    const ordered = early.concat(keys.filter(isLate));
    const values = ordered.map((key) => raw[key]);
    ordered.forEach((key) => deleteProperty(raw, key));
    ordered.forEach((key, at) => define(raw, key, values[at]));
    infoOf(raw).isDisordered = false;
  };

  const ascending = (numbers) => [...numbers].sort((a, b) => a - b);

  // Begins a command on a document.
  const record = (root) => {
    const metas = new Map();
    const raws = new Map();
    // Objects of the handler that are in the document: they are given back as they are.
    const foreign = new Set();
    const touched = [];
    let isOpen = true;
    let isExotic = false;
    let changesMade = 0;
    let reads = 0;

    // What plain objects can do and this cannot: the command is run again on a plain copy, so what it does from here on is void.
    const giveUp = () => {
      isExotic = true;
      throw new TypeError("the state cannot be recorded any more");
    };
    const check = () => {
      if (!isOpen) {
        throw new TypeError("the command is over");
      }
    };

    const wrap = (raw, parent, key) => {
      let meta = metas.get(raw);
      if (meta === undefined) {
        meta = { raw, proxy: undefined, parent, key, changed: null, late: null, length: 0, isDirty: false, inner: null };
        meta.proxy = new Proxy(raw, infos.get(raw)?.isDisordered ? orderly(meta) : traps);
        metas.set(raw, meta);
        raws.set(meta.proxy, raw);
      }
      return meta.proxy;
    };
    // A container that is seen for the first time is where it was when the command began: whoever moves it has to get it first.
    const show = (value, raw, key) => {
      if (typeof value !== "object" || value === null || typeof key === "symbol" || foreign.has(value)) {
        return value;
      }
      return wrap(value, metas.get(raw), isArray(raw) ? Number(key) : key);
    };

    // Keeps what a slot holds before its first change, for when all is undone.
    const keep = (meta, key) => {
      const { raw } = meta;
      if (meta.changed === null) {
        meta.changed = new Map();
        meta.length = isArray(raw) ? raw.length : 0;
        touched.push(meta);
      }
      if (!meta.changed.has(key)) {
        meta.changed.set(key, now(raw, key));
      }
    };
    // Notes that a slot changes; answers whether it is there now.
    const note = (raw, key) => {
      check();
      changesMade += 1;
      const meta = metas.get(raw);
      keep(meta, key);
      const isThere = hasOwn(raw, key);
      if (!isThere && !isArray(raw)) {
        meta.late ??= new Set();
        meta.late.add(key);
      }
      return isThere;
    };

    const indexOf = (key) => {
      const index = key >>> 0;
      return String(index) === key && index < 0xffffffff ? index : -1;
    };

    const setLength = (raw, length) => {
      if (typeof length !== "number" || length >>> 0 !== length || length > raw.length) {
        giveUp();
      }
      for (let index = length; index < raw.length; index += 1) {
        note(raw, index);
      }
      raw.length = length;
      return true;
    };

    const assign = (raw, key, value) => {
      let inner = value;
      if (isObject(value)) {
        inner = raws.get(value);
        if (inner === undefined) {
          inner = value;
          if (typeof value === "function" && key === "toJSON") {
            giveUp();
          }
          foreign.add(value);
        }
      }
      if (!isArray(raw)) {
        return note(raw, key) ? set(raw, key, inner) : define(raw, key, inner);
      }
      if (key === "length") {
        return setLength(raw, value);
      }
      const index = indexOf(key);
      if (index < 0 || index > raw.length) {
        giveUp();
      }
      return note(raw, index) ? set(raw, index, inner) : define(raw, index, inner);
    };

    const traps = {
      get(raw, key) {
        check();
        reads += 1;
        return show(get(raw, key), raw, key);
      },
      getOwnPropertyDescriptor(raw, key) {
        check();
        reads += 1;
        const descriptor = getOwnPropertyDescriptor(raw, key);
        if (descriptor !== undefined) {
          descriptor.value = show(descriptor.value, raw, key);
        }
        return descriptor;
      },
      set(raw, key, value, receiver) {
        if (typeof key === "symbol" || raws.get(receiver) !== raw) {
          giveUp();
        }
        return assign(raw, key, value);
      },
      defineProperty(raw, key, descriptor) {
        const isThere = hasOwn(raw, key);
        const isOn = (attribute) => (isThere ? attribute !== false : attribute === true);
        const { writable, enumerable, configurable } = descriptor;
        const isPlain = isOn(writable) && isOn(enumerable) && isOn(configurable) && hasOwn(descriptor, "value");
        if (typeof key === "symbol" || !isPlain || (isArray(raw) && key === "length")) {
          giveUp();
        }
        return assign(raw, key, descriptor.value);
      },
      deleteProperty(raw, key) {
        check();
        if (!hasOwn(raw, key)) {
          return true;
        }
        if (isArray(raw)) {
          if (key === "length") {
            return false;
          }
          note(raw, Number(key));
        } else {
          note(raw, key);
        }
        return deleteProperty(raw, key);
      },
      preventExtensions: giveUp,
      setPrototypeOf: (raw, prototype) => prototype === getPrototypeOf(raw) || giveUp(),
    };
    // The engine checks the keys that a trap gives one by one with all others. So there is none: looking for it puts the keys in order.
    const orderly = (meta) => ({
      ...traps,
      get ownKeys() {
        if (infos.get(meta.raw).isDisordered) {
          reorder(meta.raw, meta.late);
        }
        return undefined;
      },
    });

    const hasChanged = ({ raw, changed, length }) => {
      if (isArray(raw) && raw.length !== length) {
        return true;
      }
      for (const [key, before] of changed) {
        if (now(raw, key) !== before) {
          return true;
        }
      }
      return false;
    };
    // Marks the containers that have changed, and those that they were in.
    const mark = () => {
      for (const changed of touched.filter(hasChanged)) {
        changed.isDirty = true;
        for (let meta = changed; meta.parent !== null; meta = meta.parent) {
          meta.parent.inner ??= new Set();
          meta.parent.inner.add(meta);
        }
      }
    };

    // What became of a container that is where it was, at the end of `list`: [raw, path, isArray, edits, count before, count after], with
    // edits as [kind, key, value, before]. False, and nothing, where its place is better filled anew.
    const REPLACE = 0;
    const ADD = 1;
    const REMOVE = 2;
    const tell = (meta, path, list) => (isArray(meta.raw) ? tellArray(meta, path, list) : tellObject(meta, path, list));
    const tellInner = (meta, path, list, edits, isInPlace) => {
      for (const inner of meta.inner ?? []) {
        if (isInPlace(inner) && !tell(inner, [...path, inner.key], list)) {
          edits.push([REPLACE, inner.key, inner.raw, inner.raw]);
        }
      }
    };
    const tellObject = (meta, path, list) => {
      const { raw, changed } = meta;
      const edits = [];
      for (const [key, before] of meta.isDirty ? changed : []) {
        const after = now(raw, key);
        if (after !== before) {
          edits.push(after === ABSENT ? [REMOVE, key, undefined, before] : before === ABSENT ? [ADD, key, after] : [REPLACE, key, after, before]);
        }
      }
      tellInner(meta, path, list, edits, ({ raw: inner, key }) => now(raw, key) === inner);
      list.push([raw, path, false, edits, 0, 0]);
      return true;
    };
    const tellArray = (meta, path, list) => {
      const { raw, changed } = meta;
      const after = raw.length;
      const before = changed === null ? after : meta.length;
      const indices = changed === null ? [] : ascending(changed.keys());
      if (indices.some((index) => index < after && !hasOwn(raw, index))) {
        // A hole, which is null in a text.
        giveUp();
      }
      const was = (index) => (changed !== null && changed.has(index) ? changed.get(index) : raw[index]);
      const isClean = (value) => {
        const inner = metas.get(value);
        return inner === undefined || (!inner.isDirty && inner.inner === null);
      };
      // From `from` on, elements have been replaced, added or removed; the last `kept` have only moved.
      const shared = before < after ? before : after;
      const from = indices.find((index) => index >= shared || was(index) !== raw[index]) ?? shared;
      let kept = 0;
      if (before !== after) {
        while (kept < shared - from && was(before - 1 - kept) === raw[after - 1 - kept] && isClean(raw[after - 1 - kept])) {
          kept += 1;
        }
      }
      const replaced = shared - kept;
      const edits = [];
      for (const index of indices) {
        if (index < replaced && was(index) !== raw[index]) {
          edits.push([REPLACE, index, raw[index], was(index)]);
        }
      }
      const moved = [];
      for (let index = before - kept - 1; index >= replaced; index -= 1) {
        moved.push([REMOVE, index, undefined, was(index)]);
      }
      for (let index = replaced; index < after - kept; index += 1) {
        moved.push([ADD, index, raw[index]]);
      }
      const count = edits.length + moved.length;
      if (count > EDITS_MAX && count > after / 2) {
        return false;
      }
      tellInner(meta, path, list, edits, ({ raw: inner, key }) => key < replaced && raw[key] === inner);
      list.push([raw, path, true, edits.concat(moved), before, after]);
      return true;
    };

    return {
      state: wrap(root, null, undefined),
      unwrap: (value) => raws.get(value),
      isExotic: () => isExotic,
      changesMade: () => changesMade,
      reads: () => reads,
      // All changes, those inside a container before its own; null where the document is better told as a whole.
      changes() {
        mark();
        const list = [];
        return tell(metas.get(root), [], list) ? list.filter((container) => container[3].length > 0) : null;
      },
      // Puts values that were read from what was told in place of the handler's own, which may show another text each time they are read:
      // [raw, key, value] one after another, without a value (undefined) where nothing was told.
      settle(slots) {
        for (let at = 0; at < slots.length; at += 3) {
          const raw = slots[at];
          const key = slots[at + 1];
          const value = slots[at + 2];
          keep(metas.get(raw), key);
          if (value === undefined) {
            deleteProperty(raw, key);
          } else {
            define(raw, key, value);
          }
        }
      },
      // Puts everything back; the proxies are of no more use.
      undo() {
        isOpen = false;
        for (const { raw, changed, late, length } of touched) {
          if (isArray(raw)) {
            if (raw.length > length) {
              raw.length = length;
            }
            for (const index of ascending(changed.keys())) {
              if (index < length) {
                define(raw, index, changed.get(index));
              }
            }
            continue;
          }
          for (const [key, before] of changed) {
            if (before === ABSENT) {
              deleteProperty(raw, key);
              continue;
            }
            if (!hasOwn(raw, key) || late?.has(key)) {
              infoOf(raw).isDisordered = true;
            }
            define(raw, key, before);
          }
        }
      },
    };
  };

  // How many members an object of a document has.
  const count = (raw) => {
    const info = infoOf(raw);
    if (info.count < 0) {
      info.count = ownKeys(raw).length;
    }
    return info.count;
  };

  // Changes a document: [raw, isArray, kind, key, value] one after another, with values that nobody else has.
  const apply = (edits) => {
    for (let at = 0; at < edits.length; at += 5) {
      const raw = edits[at];
      const isOfArray = edits[at + 1];
      const kind = edits[at + 2];
      const key = edits[at + 3];
      const value = edits[at + 4];
      if (kind === 0) {
        define(raw, key, value);
      } else if (isOfArray) {
        if (kind === 2) {
          raw.splice(key, 1);
        } else if (key === raw.length) {
          raw.push(value);
        } else {
          raw.splice(key, 0, value);
        }
      } else {
        const info = infoOf(raw);
        const step = kind === 1 ? 1 : -1;
        info.count = info.count < 0 ? -1 : info.count + step;
        if (kind === 1) {
          info.isDisordered = true;
          define(raw, key, value);
        } else {
          deleteProperty(raw, key);
        }
      }
    }
  };

  return { record, count, apply };
});

// A room: who is in it. Messages are entities of their own, so that a busy room does not hold up its members.

export const state = {
  type: "object",
  properties: {
    title: { type: "string" },
    members: { type: "array", items: { type: "string" }, uniqueItems: true },
  },
  required: ["title", "members"],
  additionalProperties: false,
};

const member = {
  type: "object",
  properties: { name: { type: "string", minLength: 1, maxLength: 40 } },
  required: ["name"],
  additionalProperties: false,
};

export const commands = {
  create: {
    creates: true,
    request: {
      type: "object",
      properties: { title: { type: "string", minLength: 1, maxLength: 100 } },
      required: ["title"],
      additionalProperties: false,
    },
    handle(state, { title }) {
      state.title = title;
      state.members = [];
      return { members: 0 };
    },
  },

  join: {
    request: member,
    handle(state, { name }) {
      if (state.members.includes(name)) throw reject("is_member", `${name} is in the room already`);
      state.members.push(name);
      return { members: state.members.length };
    },
  },

  leave: {
    request: member,
    handle(state, { name }) {
      const place = state.members.indexOf(name);
      if (place < 0) throw reject("no_member", `${name} is not in the room`);
      state.members.splice(place, 1);
      return { members: state.members.length };
    },
  },
};

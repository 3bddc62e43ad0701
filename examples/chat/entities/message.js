// A message in a room. Its author writes it down with a command id before sending it, so that it can be sent again, however late, and is there once.

const text = { type: "string", minLength: 1, maxLength: 2000 };

export const state = {
  type: "object",
  properties: {
    room: { type: "string" },
    author: { type: "string" },
    text,
    // When the author wrote it: milliseconds since 1970. It may have arrived much later.
    written_at: { type: "integer" },
    edited: { type: "boolean" },
  },
  required: ["room", "author", "text", "written_at", "edited"],
  additionalProperties: false,
};

export const commands = {
  post: {
    creates: true,
    request: {
      type: "object",
      properties: {
        room: { type: "string", minLength: 1, maxLength: 20 },
        author: { type: "string", minLength: 1, maxLength: 40 },
        text,
        written_at: { type: "integer", minimum: 0 },
      },
      required: ["room", "author", "text"],
      additionalProperties: false,
    },
    handle(state, { room, author, text, written_at }, { now }) {
      Object.assign(state, { room, author, text, written_at: written_at ?? now, edited: false });
      return {};
    },
  },

  edit: {
    request: {
      type: "object",
      properties: { author: { type: "string" }, text },
      required: ["author", "text"],
      additionalProperties: false,
    },
    handle(state, { author, text }) {
      if (author !== state.author) throw reject("not_the_author", `only ${state.author} may edit this`);
      state.text = text;
      state.edited = true;
      return {};
    },
  },
};

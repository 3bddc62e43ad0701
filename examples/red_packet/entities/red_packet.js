// A red packet: an amount that is split at random among those who take a share, first come, first served.

const user = { type: "string", minLength: 1, maxLength: 64, description: "who takes a share" };
const amount = { type: "integer", minimum: 1, maximum: 1_000_000_000_000, description: "whole cents" };
const count = { type: "integer", minimum: 1, maximum: 100_000, description: "number of shares" };
const whole = { type: "integer", minimum: 0 };

export const state = {
  type: "object",
  properties: {
    amount,
    count,
    amount_left: { ...whole, description: "cents that nobody has taken" },
    shares_left: { ...whole, description: "shares that nobody has taken" },
    taken: { type: "object", additionalProperties: amount, description: "cents by user" },
  },
  required: ["amount", "count", "amount_left", "shares_left", "taken"],
  additionalProperties: false,
};

// The share of the next user. At least 1, at most twice the average of what is left, and never so much that the others
// could not get 1 each. The last user gets the rest.
function draw(amountLeft, sharesLeft, context) {
  if (sharesLeft === 1) return amountLeft;
  const most = Math.min(Math.floor((2 * amountLeft) / sharesLeft), amountLeft - (sharesLeft - 1));
  return 1 + Math.floor(context.random() * most);
}

export const commands = {
  create: {
    creates: true,
    request: { type: "object", properties: { amount, count }, required: ["amount", "count"], additionalProperties: false },
    response: { type: "object", properties: { shares_left: whole }, required: ["shares_left"], additionalProperties: false },
    handle(state, { amount, count }) {
      if (amount < count) throw reject("amount_too_low", "everyone must get at least 1", { amount, count });
      Object.assign(state, { amount, count, amount_left: amount, shares_left: count, taken: {} });
      return { shares_left: count };
    },
  },

  take: {
    request: { type: "object", properties: { user }, required: ["user"], additionalProperties: false },
    response: {
      type: "object",
      properties: { amount, shares_left: whole },
      required: ["amount", "shares_left"],
      additionalProperties: false,
    },
    handle(state, { user }, context) {
      // Users choose their names: "constructor" is nobody's inherited property here, and "__proto__" is a name like any other.
      if (Object.hasOwn(state.taken, user)) {
        throw reject("already_taken", "this user has a share already", { amount: state.taken[user] });
      }
      if (state.shares_left === 0) throw reject("empty", "all shares are taken", { count: state.count });
      const share = draw(state.amount_left, state.shares_left, context);
      state.amount_left -= share;
      state.shares_left -= 1;
      Object.defineProperty(state.taken, user, { value: share, enumerable: true, writable: true, configurable: true });
      return { amount: share, shares_left: state.shares_left };
    },
  },
};

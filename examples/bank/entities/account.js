// A bank account. Amounts are whole cents, so that no sum is ever rounded.

// The most cents that an account may hold. Far below 2^53, so that every balance is an exact JavaScript number.
const BALANCE_MAX = 1_000_000_000_000_000;

// How far below zero a vip account may go: 1,000.00.
const VIP_OVERDRAFT = 100_000;

const cents = { type: "integer", minimum: 1, maximum: 1_000_000_000_000, description: "whole cents" };
const balance = { type: "integer", minimum: -VIP_OVERDRAFT, maximum: BALANCE_MAX, description: "whole cents; below zero only for vip accounts" };
const owner = { type: "string", minLength: 1, maxLength: 200, description: "who the account belongs to" };
const vip = { type: "boolean", description: "may go below zero" };

export const state = {
  type: "object",
  properties: { balance, owner, vip },
  required: ["balance"],
  additionalProperties: false,
};

const amountRequest = { type: "object", properties: { amount: cents }, required: ["amount"], additionalProperties: false };
const balanceResponse = { type: "object", properties: { balance }, required: ["balance"], additionalProperties: false };

function add(state, amount) {
  const sum = (state.balance ?? 0) + amount;
  if (sum > BALANCE_MAX) {
    throw reject("balance_too_high", "the account would hold more than an account may", { balance: state.balance ?? 0, balance_max: BALANCE_MAX });
  }
  state.balance = sum;
  return { balance: sum };
}

export const commands = {
  // Opens an account; everything may be left out, the request too.
  open: {
    creates: true,
    request: {
      type: ["object", "null"],
      properties: { amount: { ...cents, minimum: 0 }, owner, vip },
      additionalProperties: false,
    },
    response: balanceResponse,
    handle(state, request) {
      const { amount = 0, owner, vip } = request ?? {};
      if (owner !== undefined) state.owner = owner;
      if (vip !== undefined) state.vip = vip;
      return add(state, amount);
    },
  },

  // Pays in. An account that does not exist is opened by its first deposit.
  deposit: {
    creates: "if-missing",
    request: amountRequest,
    response: balanceResponse,
    handle(state, request) {
      return add(state, request.amount);
    },
  },

  // Takes out, where the balance allows it. A refusal is recorded like any other answer.
  charge: {
    request: amountRequest,
    response: balanceResponse,
    handle(state, request) {
      const lowest = state.vip ? -VIP_OVERDRAFT : 0;
      if (state.balance - request.amount < lowest) {
        throw reject("insufficient_funds", "balance too low", { balance: state.balance });
      }
      state.balance -= request.amount;
      return { balance: state.balance };
    },
  },
};
